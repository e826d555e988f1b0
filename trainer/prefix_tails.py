"""The distribution of a number over prefixes of training records, from which a term of the alert is computed.

A term of the alert's statistic compares a number of an open record, such as its distance to stored records, with that
of training records with as many readings. The tail of its distribution is taken as exponential, so the term is a
straight line in the number.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MIN_RECORDS = 100
"""Smallest number of training and validation records with which such terms are used by default."""
MAX_REFERENCE_RECORDS = 1000
"""Largest number of records from which the distribution is computed."""
TAIL_SHARE, MIN_TAIL = 0.1, 10
"""Share of the reference records in the tail of the distribution, which is exponential, and their smallest number."""
MIN_PREFIXES = 20
"""Smallest number of reference records with k readings from which the distribution for k readings is computed."""

FitLine = Callable[[int, int, float, float, float], tuple[float, float]]
"""A function that returns start and slope of the term for prefixes of one length (`model.alert_prior.fit_line`).

Its arguments are the number of readings of the prefix, the number of features that are scored, a quantile, the share of
the records beyond it, and their mean excess over it."""


def fit_lines(
    measured: Floats,
    num_readings: Ints,
    num_features: int,
    min_excess: float,
    fit_line: FitLine,
    is_extended: bool = False,
) -> tuple[Floats, Floats]:
    """Return the starts and slopes of a term for prefixes of 1, 2, …, L readings, (L,) each.

    Args:
        measured: (M,) the number of each prefix of the reference records; larger is more anomalous.
        num_readings: (M,) the number of readings of each prefix, without those of context features.
        num_features: The number L of features that are scored.
        min_excess: Smallest mean excess of the tail.
        fit_line: Computes the line for one length.
        is_extended: Whether prefixes of a length that too few reference records have get the line of the next shorter
            length. Otherwise they have no term.
    """
    starts, slopes = np.zeros(num_features), np.zeros(num_features)
    for k in range(num_features):
        of_length = measured[num_readings == k + 1]
        if len(of_length) < MIN_PREFIXES:  # too few to estimate the tail
            if is_extended and k:
                starts[k], slopes[k] = starts[k - 1], slopes[k - 1]
            continue
        share = max(TAIL_SHARE, MIN_TAIL / len(of_length))
        quantile = float(np.quantile(of_length, 1.0 - share))
        beyond = of_length[of_length > quantile]
        excess = max(float(beyond.mean()) - quantile if len(beyond) else 0.0, min_excess)
        starts[k], slopes[k] = fit_line(k + 1, num_features, quantile, share, excess)
    return starts, slopes
