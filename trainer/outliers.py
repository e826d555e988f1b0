"""Leave suspected anomalies out of training (`--contamination`).

A table for training should contain normal records only. If it may contain anomalies, the records that are most distant
from the others are left out before a model exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trainer.data import PreparedTable, Split

NUM_REFERENCES, MIN_REFERENCES = 500, 50
"""Number of random records to which the distances of each record are computed, and the smallest such number.

The smaller number is used if a time limit is short. The median of 50 distances is less precise than that of 500.
"""

MEASURED_RECORDS = 2000
"""Number of records on which `choose_num_references` measures the time."""

MAX_DIFFERENCES = 4_000_000
"""Largest number of distances between two records that are in memory at once."""


def drop_outliers(
    data: PreparedTable,
    share: float,
    seed: int,
    num_references: int = NUM_REFERENCES,
    on_progress: Callable[[int], object] = lambda num_done: None,
) -> PreparedTable:
    """Return the table with its most distant records moved from training and validation to `Split.LEFT_OUT`.

    Records of `Split.LEFT_OUT` are used for nothing. A record's distance is the median of its distances to a random
    sample of all records. The median detects groups of similar anomalies. A distance to the nearest neighbours would
    not, because these anomalies are near to each other. Calibration records are not left out, because calibration needs
    a random sample of all records.

    Args:
        data: The prepared table.
        share: Share (0 to 1) of all records that may be anomalies. With 0 the table is returned unchanged.
        seed: Seed of the random sample.
        num_references: Number of records of the random sample.
        on_progress: Called with the number of records that are done, about once a second or more often.
    """
    num_suspected = round(share * len(data.split))
    if not num_suspected:
        return data
    rows_by_distance = np.argsort(compute_median_distances(data, seed, num_references, on_progress), kind="stable")
    suspected_rows = rows_by_distance[len(data.split) - num_suspected :]  # the most distant records come last
    split = data.split.copy()
    left_out_rows = suspected_rows[split[suspected_rows] != Split.CALIBRATION]
    split[left_out_rows] = Split.LEFT_OUT
    return replace(data, split=split)


def choose_num_references(data: PreparedTable, seconds: float, clock: Callable[[], float]) -> int:
    """Return the number of references with which the distances of all records take at most the given time.

    The time is measured on the first records.

    Args:
        data: The prepared table.
        seconds: The time in seconds.
        clock: A function that returns the current time in seconds.

    Returns:
        A number from `MIN_REFERENCES` to `NUM_REFERENCES`. With the smallest one, it may take longer.
    """
    num_records = len(data.values)
    if num_records <= MEASURED_RECORDS:
        return NUM_REFERENCES
    first_records = replace(data, values=data.values[:MEASURED_RECORDS], split=data.split[:MEASURED_RECORDS])
    started = clock()
    compute_median_distances(first_records, seed=0)
    expected_seconds = (clock() - started) * num_records / MEASURED_RECORDS
    num_affordable = NUM_REFERENCES * seconds / max(expected_seconds, 1e-9)
    return int(np.clip(num_affordable, MIN_REFERENCES, NUM_REFERENCES))


def compute_median_distances(
    data: PreparedTable,
    seed: int,
    num_references: int = NUM_REFERENCES,
    on_progress: Callable[[int], object] = lambda num_done: None,
) -> NDArray[np.float64]:
    """Return the median distance of each of N records to a random sample of the table's records, the references.

    The distance of two records is the root mean square of their differences, over the features of which both have a
    reading. A difference of measurements is in standard deviations; for cyclic features, such as angles, it is the
    shorter way around the cycle. A difference of labels is 1, or 0 if they are equal. The distance is 0 if no feature
    has a reading in both records.

    Args:
        data: The prepared table.
        seed: Seed of the random choice.
        num_references: Number of references.
        on_progress: Called with the number of records that are done, about once a second or more often.

    Returns:
        (N,) median distances. A larger distance means a more unusual record.
    """
    # Shapes: N records, R references, F features, C records of a chunk.
    num_records = len(data.values)
    rng = np.random.default_rng([seed, 0x51F7])
    reference_rows = np.sort(rng.permutation(num_records)[:num_references])
    references = np.asarray(data.values[reference_rows], np.float64)  # (R, F)
    # The unit of a difference. It must be positive, even for features without readings (NaN) or with a constant value.
    units = np.maximum(np.nan_to_num(_compute_deviations(references), nan=1.0), 1e-9)
    median_distances = np.zeros(num_records)
    # Each chunk has so few records that at most MAX_DIFFERENCES distances or readings are in memory.
    chunk_size = max(1, MAX_DIFFERENCES // max(len(reference_rows), len(data.schema)))
    for start in range(0, num_records, chunk_size):
        values = np.asarray(data.values[start : start + chunk_size], np.float64)  # (C, F)
        square_sums = _sum_linear_squares(values, references, units, data.schema.is_linear)  # (C, R)
        for code in np.flatnonzero(~data.schema.is_linear):
            differences = np.abs(values[:, code, None] - references[:, code])  # (C, R), NaN if a reading is missing
            if data.schema.is_discrete[code]:
                differences = (differences > 0).astype(np.float64)  # NaN is not larger than 0
            else:  # the feature is cyclic
                remainders = differences % data.schema.cycle_lengths[code]
                differences = np.minimum(remainders, data.schema.cycle_lengths[code] - remainders) / units[code]
            square_sums += np.nan_to_num(differences) ** 2
        num_in_both = (~np.isnan(values)).astype(np.float64) @ (~np.isnan(references)).astype(np.float64).T
        # The number is at least 1, so that the distance is 0 if no feature has a reading in both records.
        distances = np.sqrt(square_sums / np.maximum(num_in_both, 1.0))
        median_distances[start : start + chunk_size] = np.median(distances, 1)
        on_progress(min(start + chunk_size, num_records))
    return median_distances


def _sum_linear_squares(
    values: NDArray[np.float64],
    references: NDArray[np.float64],
    units: NDArray[np.float64],
    is_linear: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Return the sums of squared differences of C records to R references over the measurements that are not cyclic.

    Matrix products compute them many times faster than the differences themselves: (x − r)² = x² − 2xr + r².

    Args:
        values: (C, F) normalised values of the records, NaN if missing.
        references: (R, F) normalised values of the references, NaN if missing.
        units: (F,) unit of a difference of each feature.
        is_linear: (F,) whether a feature is a measurement and not cyclic.

    Returns:
        (C, R) sums over the features of which both records have a reading, at least 0.
    """
    x, r = values[:, is_linear] / units[is_linear], references[:, is_linear] / units[is_linear]
    is_known, is_known_reference = (~np.isnan(x)).astype(np.float64), (~np.isnan(r)).astype(np.float64)
    x, r = np.nan_to_num(x), np.nan_to_num(r)
    sums = x**2 @ is_known_reference.T - 2.0 * (x @ r.T) + is_known @ (r**2).T
    clipped: NDArray[np.float64] = np.maximum(sums, 0.0)  # rounding can make a sum of 0 negative
    return clipped


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
