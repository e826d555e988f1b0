"""Inputs of the network that express the times of irregular readings.

They are the age of the record at the reading, and the gap: the time since the previous reading of the same sensor in
the context. Linear maps of them are added to the tokens of the reading, as positional encodings are in the original
Transformer.

Shapes use these letters: N is the number of records, L the number of readings of each record, T the number of time
inputs of a reading. *S stands for a shape S of any length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deformer_stream.model.constants import MAX_AGE
from deformer_stream.model.reading_times import ReadingTimes


def encode_times(scales: ReadingTimes, ages: Tensor, gaps: Tensor) -> Tensor:
    """Return the inputs of the network that express the times of readings.

    Let a be the age as a fraction of the duration. The inputs are a, and the sines and the cosines of 2π · 2ᵏ · a for k
    = 0, 1, …, from which attention can compute differences of times. Three more numbers describe the gap: its signed
    logarithm, whether the sensor has reported before, and whether the gap is zero.

    Args:
        scales: The time scales of the records.
        ages: Float64 seconds from the origin of the record to each reading, of any shape S.
        gaps: Float64 seconds to each reading from the reading of the same sensor that arrived last before it, of the
            shape S. Negative if the reading that arrived first has the later time; NaN if the sensor has not reported
            before.

    Returns:
        (*S, T) float64.
    """
    age = (ages * (1e6 / scales.duration)).clamp(-MAX_AGE, MAX_AGE)
    frequencies = 2.0 ** torch.arange(scales.num_octaves, dtype=torch.float64, device=ages.device)
    angles = 2.0 * math.pi * age.unsqueeze(-1) * frequencies
    has_previous = ~gaps.isnan()
    gap = gaps.nan_to_num(0.0) * (1e6 / scales.resolution)  # in units of the resolution
    log_gap = gap.sign() * gap.abs().log1p() / math.log1p(scales.duration / scales.resolution)
    flags = torch.stack([has_previous, has_previous & (gap == 0)], -1).to(age.dtype)
    return torch.cat([age.unsqueeze(-1), angles.sin(), angles.cos(), log_gap.unsqueeze(-1), flags], -1)


def find_previous_of_sensor(features: Tensor) -> Tensor:
    """Return, for each reading, the index of the latest earlier reading of the same sensor, −1 if there is none.

    Args:
        features: (N, L) feature codes in arrival order, −1 for padding.

    Returns:
        (N, L) int64 indexes from 0 to L − 1, or −1; meaningless for padding.
    """
    num_readings = features.shape[1]
    # A stable sort by code puts the readings of a sensor next to each other, in arrival order.
    order = torch.argsort(features, dim=1, stable=True)
    sorted_codes = features.gather(1, order)
    is_same = torch.zeros_like(features, dtype=torch.bool)
    is_same[:, 1:] = sorted_codes[:, 1:] == sorted_codes[:, :-1]
    previous = torch.where(is_same, order.roll(1, dims=1), -1) if num_readings else order
    return torch.empty_like(order).scatter_(1, order, previous)


def compute_gaps(features: Tensor, ages: Tensor) -> Tensor:
    """Return the seconds from the previous reading of the same sensor to each reading, NaN if there is none.

    Args:
        features: (N, L) feature codes in arrival order, −1 for padding.
        ages: (N, L) float64 seconds from the origin of the record to each reading.

    Returns:
        (N, L) float64, negative if the previous reading has a later time; meaningless for padding.
    """
    previous = find_previous_of_sensor(features)
    gaps = ages - ages.gather(1, previous.clamp(min=0))
    return gaps.masked_fill(previous < 0, torch.nan)
