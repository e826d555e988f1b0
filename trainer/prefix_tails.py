"""The distribution of a number over prefixes of training records, from which a term of the alert is computed.

A term of the alert's statistic compares a number of an open record, such as its distance to stored records, with that
of training records with as many readings. The tail of its distribution is taken as exponential, so the term is a
straight line in the number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class TermScale:
    """The term w · max((k/L)^a · −ln S_k − c, 0) of a prefix with k of L readings.

    S_k is the share of normal records with as many readings whose number is at least as large.

    Attributes:
        exponent: The power a.
        weight: The weight w.
        min_nats: The nats c from which the term is positive.
    """

    exponent: float
    weight: float = 1.0
    min_nats: float = 0.0

    def fit_line(
        self, num_readings: int, num_features: int, quantile: float, share: float, excess: float
    ) -> tuple[float, float]:
        """Return the number from which the term is positive, and its slope, for prefixes of one length.

        Args:
            num_readings: The number k of readings of the prefix.
            num_features: The number L of features that are scored.
            quantile: A number beyond which the tail of the training records is exponential.
            share: The share of the training records beyond it.
            excess: Their mean excess over it, positive.
        """
        factor = (num_readings / num_features) ** self.exponent
        return quantile + excess * (self.min_nats / factor + math.log(share)), self.weight * factor / excess


def fit_lines(
    measured: Floats,
    num_readings: Ints,
    num_features: int,
    min_excess: float,
    scale: TermScale,
    is_extended: bool = False,
) -> tuple[Floats, Floats]:
    """Return the starts and slopes of a term for prefixes of 1, 2, …, L readings, (L,) each.

    Args:
        measured: (M,) the number of each prefix of the reference records; larger is more anomalous.
        num_readings: (M,) the number of readings of each prefix, without those of context features.
        num_features: The number L of features that are scored.
        min_excess: Smallest mean excess of the tail.
        scale: The scale of the term.
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
        starts[k], slopes[k] = scale.fit_line(k + 1, num_features, quantile, share, excess)
    return starts, slopes
