"""Scores of complete records, and sums over the readings of each feature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CalibrationScores:
    """Scores of N complete records, and sums over all readings of each of the model's F features.

    Attributes:
        statistics: (N,) for each record the largest anomaly score over all its prefixes (its first 1, 2, … readings);
            larger is more anomalous.
        neg_log_p_sums: (F,) for each feature the sum of −ln p over its readings, in nats. p is the highest-density
            p-value of a reading: the probability of a value that is at most as likely as the observed one.
        num_readings: (F,) for each feature the number of its scored readings.
        centered_nll: (N,) for each record the sum of the centered NLLs of its readings, in nats; empty if unknown. The
            centered NLL of a reading is its negative log-likelihood minus its expectation.
        complete_terms: (N,) for each record the terms of the alert after all of its readings
            (`conformal.compute_complete_terms`), which are a term of the ranking of wide records; 0 for other models,
            empty if unknown.
    """

    statistics: Floats
    neg_log_p_sums: Floats
    num_readings: NDArray[np.int64]
    centered_nll: Floats = field(default_factory=lambda: np.empty(0))
    complete_terms: Floats = field(default_factory=lambda: np.empty(0))

    def __add__(self, other: CalibrationScores) -> CalibrationScores:
        """Return the scores of these records followed by those of `other`, and the sums over the readings of both."""
        return CalibrationScores(
            np.concatenate([self.statistics, other.statistics]),
            self.neg_log_p_sums + other.neg_log_p_sums,
            self.num_readings + other.num_readings,
            np.concatenate([self.centered_nll, other.centered_nll]),
            np.concatenate([self.complete_terms, other.complete_terms]),
        )

    def average_neg_log_p_by_feature(self, names: Sequence[str]) -> dict[str, float]:
        """Return the mean of −ln p over the readings of each feature, in nats, by the feature's name.

        p is a reading's highest-density p-value. It is uniform under a correct model, so the expected mean is 1; a
        larger one means that the readings are less probable than the model predicts. Features without readings are
        left out.

        Args:
            names: The names of the F features in the order of their codes.
        """
        return {
            names[code]: float(self.neg_log_p_sums[code] / self.num_readings[code])
            for code in np.flatnonzero(self.num_readings).tolist()
        }
