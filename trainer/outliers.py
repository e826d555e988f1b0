"""Training records that may be anomalies, found without a model, so that none is fitted to them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trainer.data import PreparedTable, Split

REFERENCES = 500
"""Records that distances are taken to."""
CELLS = 4_000_000
"""Differences held at once."""


def drop_outliers(data: PreparedTable, share: float, seed: int) -> PreparedTable:
    """Leave this share of the records, those farthest from the others, out of training and validation.

    A record's distance is the median of its distances to a sample of all: anomalies that are alike, near each other,
    stay far from the median record, while the nearest neighbours would vouch for each other. Records for calibration
    stay, for they are chosen by chance alone.
    """
    count = round(share * len(data.split))
    if not count:
        return data
    far = np.argsort(compute_median_distances(data, seed), kind="stable")[len(data.split) - count :]
    split = data.split.copy()
    split[far[split[far] != Split.CALIBRATION]] = Split.LEFT_OUT
    return replace(data, split=split)


def compute_median_distances(data: PreparedTable, seed: int) -> NDArray[np.float64]:
    """(N,) median distance of each record to `REFERENCES` others: the root mean square difference over the features
    that both have, in standard deviations; labels differ by one or not at all. 0 where nothing can be compared."""
    n, features = data.values.shape
    chosen = np.sort(np.random.default_rng([seed, 0x51F7]).permutation(n)[:REFERENCES])
    words = data.schema.is_discrete
    references = np.asarray(data.values[chosen], np.float64)
    spread = np.where(words, 1.0, np.maximum(np.nan_to_num(_deviation(references), nan=1.0), 1e-9))
    turns, result = data.schema.cycle_lengths, np.zeros(n)
    step = max(1, CELLS // (len(chosen) * features))
    for start in range(0, n, step):
        values = np.asarray(data.values[start : start + step], np.float64)
        difference = np.abs(values[:, None] - references)
        if data.schema.is_cyclic.any():
            difference = np.minimum(difference % turns, turns - difference % turns)
        difference = difference / spread
        squares = np.where(words, (difference != 0).astype(np.float64), difference**2)
        both = ~np.isnan(difference)
        total = np.where(both, squares, 0.0).sum(2) / np.maximum(both.sum(2), 1)
        result[start : start + step] = np.median(np.sqrt(total), 1)
    return result


def _deviation(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """(F,) standard deviations of what is there, NaN where nothing is."""
    known = ~np.isnan(values)
    count = known.sum(0)
    mean = np.where(known, values, 0.0).sum(0) / np.maximum(count, 1)
    variance = np.where(known, (values - mean) ** 2, 0.0).sum(0) / np.maximum(count, 1)
    return np.where(count > 0, np.sqrt(variance), np.nan)
