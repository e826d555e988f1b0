"""Leave suspected anomalies out of training, without a model (`--contamination`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trainer.data import PreparedTable, Split

NUM_REFERENCES = 500
"""Random records to which distances are computed."""

MAX_DIFFERENCES = 4_000_000
"""Differences of readings that are held in memory at once."""


def drop_outliers(data: PreparedTable, share: float, seed: int) -> PreparedTable:
    """Return the table without its most distant records in training and validation.

    A record's distance is the median of its distances to a random sample of all records. The median is used because
    similar anomalies are near to each other: a nearest-neighbour distance would not detect them. Calibration records
    stay, because calibration needs a random sample.

    Args:
        data: The prepared table.
        share: Share of all records that are suspected; 0 returns the table unchanged.
        seed: Seed of the random sample.
    """
    num_suspected = round(share * len(data.split))
    if not num_suspected:
        return data
    by_distance = np.argsort(compute_median_distances(data, seed), kind="stable")
    suspected = by_distance[len(data.split) - num_suspected :]
    split = data.split.copy()
    split[suspected[split[suspected] != Split.CALIBRATION]] = Split.LEFT_OUT
    return replace(data, split=split)


def compute_median_distances(data: PreparedTable, seed: int) -> NDArray[np.float64]:
    """Return the median distance of each of N records to `NUM_REFERENCES` random records, (N,).

    The distance of two records is the root mean square difference of the features that both have, in standard
    deviations. Labels differ by 1 or 0. The distance is 0 if two records have no feature in common.
    """
    num_records, num_features = data.values.shape
    rng = np.random.default_rng([seed, 0x51F7])
    reference_rows = np.sort(rng.permutation(num_records)[:NUM_REFERENCES])
    references = np.asarray(data.values[reference_rows], np.float64)
    is_label = data.schema.is_discrete
    deviations = np.maximum(np.nan_to_num(_compute_deviations(references), nan=1.0), 1e-9)
    units = np.where(is_label, 1.0, deviations)
    cycle_lengths, median_distances = data.schema.cycle_lengths, np.zeros(num_records)
    step = max(1, MAX_DIFFERENCES // (len(reference_rows) * num_features))
    for start in range(0, num_records, step):
        values = np.asarray(data.values[start : start + step], np.float64)
        differences = np.abs(values[:, None] - references)
        if data.schema.is_cyclic.any():
            differences = np.minimum(differences % cycle_lengths, cycle_lengths - differences % cycle_lengths)
        differences = differences / units
        squares = np.where(is_label, (differences != 0).astype(np.float64), differences**2)
        are_known = ~np.isnan(differences)
        mean_squares = np.where(are_known, squares, 0.0).sum(2) / np.maximum(are_known.sum(2), 1)
        median_distances[start : start + step] = np.median(np.sqrt(mean_squares), 1)
    return median_distances


def _compute_deviations(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the standard deviation of each feature without missing readings, (F,), NaN if there is no reading."""
    is_known = ~np.isnan(values)
    counts = is_known.sum(0)
    means = np.where(is_known, values, 0.0).sum(0) / np.maximum(counts, 1)
    variances = np.where(is_known, (values - means) ** 2, 0.0).sum(0) / np.maximum(counts, 1)
    return np.where(counts > 0, np.sqrt(variances), np.nan)
