"""Leave suspected anomalies out of training (`--contamination`).

A table for training should contain normal records only. If it may contain anomalies, the records that are most distant
from the others are left out before a model exists.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trainer.data import PreparedTable, Split

NUM_REFERENCES = 500
"""Number of random records to which the distances of each record are computed."""

MAX_DIFFERENCES = 4_000_000
"""Largest number of differences between readings of two records that are in memory at once."""


def drop_outliers(data: PreparedTable, share: float, seed: int) -> PreparedTable:
    """Return the table with its most distant records moved from training and validation to `Split.LEFT_OUT`.

    Records of `Split.LEFT_OUT` are used for nothing. A record's distance is the median of its distances to a random
    sample of all records. The median detects groups of similar anomalies. A distance to the nearest neighbours would
    not, because these anomalies are near to each other. Calibration records are not left out, because calibration needs
    a random sample of all records.

    Args:
        data: The prepared table.
        share: Share (0 to 1) of all records that may be anomalies. With 0 the table is returned unchanged.
        seed: Seed of the random sample.
    """
    num_suspected = round(share * len(data.split))
    if not num_suspected:
        return data
    rows_by_distance = np.argsort(compute_median_distances(data, seed), kind="stable")
    suspected_rows = rows_by_distance[len(data.split) - num_suspected :]  # the most distant records come last
    split = data.split.copy()
    left_out_rows = suspected_rows[split[suspected_rows] != Split.CALIBRATION]
    split[left_out_rows] = Split.LEFT_OUT
    return replace(data, split=split)


def compute_median_distances(data: PreparedTable, seed: int) -> NDArray[np.float64]:
    """Return the median distance of each of N records to `NUM_REFERENCES` random records of the table.

    The distance of two records is the root mean square of their differences, over the features of which both have a
    reading. A difference of measurements is in standard deviations; for cyclic features, such as angles, it is the
    shorter way around the cycle. A difference of labels is 1, or 0 if they are equal. The distance is 0 if no feature
    has a reading in both records.

    Args:
        data: The prepared table.
        seed: Seed of the random choice.

    Returns:
        (N,) median distances. A larger distance means a more unusual record.
    """
    # Shapes: N records, R references, F features, C records of a chunk.
    num_records, num_features = data.values.shape
    rng = np.random.default_rng([seed, 0x51F7])
    reference_rows = np.sort(rng.permutation(num_records)[:NUM_REFERENCES])
    references = np.asarray(data.values[reference_rows], np.float64)  # (R, F)
    is_label = data.schema.is_discrete
    # The unit of a difference. It must be positive, even for features without readings (NaN) or with a constant value.
    deviations = np.maximum(np.nan_to_num(_compute_deviations(references), nan=1.0), 1e-9)
    units = np.where(is_label, 1.0, deviations)
    cycle_lengths = data.schema.cycle_lengths  # infinite for features that are not cyclic
    median_distances = np.zeros(num_records)
    # Each chunk has so few records that at most MAX_DIFFERENCES differences are in memory.
    chunk_size = max(1, MAX_DIFFERENCES // (len(reference_rows) * num_features))
    for start in range(0, num_records, chunk_size):
        values = np.asarray(data.values[start : start + chunk_size], np.float64)  # (C, F)
        differences = np.abs(values[:, None] - references)  # (C, R, F), NaN if a reading is missing
        if data.schema.is_cyclic.any():
            remainders = differences % cycle_lengths
            differences = np.minimum(remainders, cycle_lengths - remainders)
        differences = differences / units
        squares = np.where(is_label, (differences != 0).astype(np.float64), differences**2)
        is_in_both = ~np.isnan(differences)  # whether both records have a reading of the feature
        num_in_both = np.maximum(is_in_both.sum(2), 1)  # at least 1, so that the distance is 0 without such features
        mean_squares = np.where(is_in_both, squares, 0.0).sum(2) / num_in_both  # (C, R)
        median_distances[start : start + chunk_size] = np.median(np.sqrt(mean_squares), 1)
    return median_distances


def _compute_deviations(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the standard deviation of each feature over the readings that are not missing.

    Args:
        values: (R, F) values of R records and F features, NaN if missing.

    Returns:
        (F,) standard deviations, NaN for a feature without readings.
    """
    # Unlike np.nanstd, this raises no warning for a feature without readings.
    is_known = ~np.isnan(values)
    counts = is_known.sum(0)
    divisors = np.maximum(counts, 1)
    means = np.where(is_known, values, 0.0).sum(0) / divisors
    variances = np.where(is_known, (values - means) ** 2, 0.0).sum(0) / divisors
    return np.where(counts > 0, np.sqrt(variances), np.nan)
