"""Evidence for a fault in the successive records of a device: e-values of p-values, and how they accumulate.

An e-value is a non-negative statistic whose mean under normal operation is at most 1. A p-value p gives the e-values

    L_κ(p) = κ p^(κ − 1)        with κ in `EXPONENTS`

(Vovk and Wang, "E-values: Calibration, combination and applications", 2021). The integral of L_κ from 0 to 1 is 1, and
L_κ falls with p. So its mean is at most 1 if P(p ≤ x) ≤ x for all x. Small κ favour few very small p-values, large κ
many slightly small ones.

A detector accumulates the e-values of the records of one device, and starts anew whenever that gives more evidence:

    Shiryaev–Roberts    M_κ ← (M_κ + 1) · L_κ
    CUSUM               M_κ ← max(M_κ, 1) · L_κ

The statistic is the mean of M_κ over the exponents, which learns the exponent from the data. The method is from Shin,
Ramdas and Rinaldo, "E-detectors: a nonparametric framework for sequential change detection", arXiv 2203.03532. It rises
if any p-value falls. All values are natural logarithms, because products over thousands of records leave the range of a
float.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import exp, log, log1p
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DetectorKind = Literal["shiryaev-roberts", "cusum"]

EXPONENTS = (0.05, 0.1, 0.2, 0.4, 0.6)
"""The exponents κ of the e-values. Their e-values have equal weights."""

NUM_EXPONENTS = len(EXPONENTS)

LN_10 = math.log(10.0)

TAIL_QUANTILE = 0.9
"""The tail of the calibration scores begins at this quantile."""

_LOG_EXPONENTS = tuple(math.log(exponent) for exponent in EXPONENTS)
_LOG_WEIGHT = -math.log(NUM_EXPONENTS)
_MAX_NEG_LOG_P = 200.0
"""Bound of −ln p of a record, so that sums stay finite. No calibration gives such a small p-value."""

LogState = tuple[float, ...]
"""ln M_κ for each exponent."""

INITIAL_STATE: LogState = (-math.inf,) * NUM_EXPONENTS
"""The state before the first record: M_κ = 0."""


@dataclass(frozen=True, slots=True)
class ScoreTail:
    """An exponential tail of the anomaly scores of normal records, beyond the largest score of the calibration.

    With n calibration records, no p-value is below 1/(n + 1), so all scores beyond the calibration would have the same
    p-value. The tail extends p-values below this bound. It is an assumption about the scores. Only the segment rule
    uses it, because its guarantee holds for every statistic of the records, with or without a tail.

    Attributes:
        start: The largest score of the calibration records.
        p_value: The p-value of this score, 1/(n + 1).
        scale: Increase of the score by which the p-value falls to 1/e of its value.
        of_records: The tail of the anomaly scores of complete records, None if they are unknown.
    """

    start: float
    p_value: float
    scale: float
    of_records: ScoreTail | None = None

    def extend(self, p_value: float, score: float | None) -> float:
        """Return the p-value of a record, extended below `p_value` if its score is larger than `start`.

        Args:
            p_value: p-value of the record by comparison with the calibration records.
            score: Anomaly score of the record; larger is more anomalous. None if it is unknown.
        """
        if score is None or not score > self.start:
            return p_value
        return min(p_value, self.p_value * math.exp(-min((score - self.start) / self.scale, _MAX_NEG_LOG_P)))


def fit_tail(calibration_scores: Floats) -> ScoreTail | None:
    """Return the exponential tail of the scores of calibration records, None if there are too few different scores.

    The scale is the mean excess of the scores above their `TAIL_QUANTILE`, the maximum-likelihood estimate.

    Args:
        calibration_scores: (n,) anomaly scores of normal records, in any order; larger is more anomalous.
    """
    scores = np.sort(np.asarray(calibration_scores, np.float64))
    if len(scores) < 2:
        return None
    first = scores[min(int(TAIL_QUANTILE * len(scores)), len(scores) - 2)]
    excesses = scores[scores > first] - first
    if not len(excesses):
        return None
    return ScoreTail(float(scores[-1]), 1.0 / (len(scores) + 1), float(excesses.mean()))


def fit_tails(calibration_scores: Floats, record_scores: Floats | None) -> ScoreTail | None:
    """Return the tail of the scores of calibration records, with that of their scores as complete records.

    Args:
        calibration_scores: (n,) anomaly scores of normal records, in any order.
        record_scores: (m,) anomaly scores of complete normal records, in any order; None if they are unknown.
    """
    tail = fit_tail(calibration_scores)
    return tail if tail is None or record_scores is None else replace(tail, of_records=fit_tail(record_scores))


def compute_log_e_values(p_values: Floats) -> Floats:
    """Return ln L_κ of p-values for each exponent, with the shape of `p_values` and a last axis of `NUM_EXPONENTS`."""
    log_p = np.maximum(np.log(p_values), -_MAX_NEG_LOG_P)[..., None]
    exponents = np.array(EXPONENTS)
    log_e_values: Floats = np.log(exponents) + (exponents - 1.0) * log_p
    return log_e_values


def advance_detector(
    log_state: LogState,
    p_value: float,
    kind: DetectorKind = "shiryaev-roberts",
    log_normalisers: LogState | None = None,
) -> LogState:
    """Add one record to one detector and return ln M_κ after it.

    Args:
        log_state: ln M_κ before the record.
        p_value: p-value of the record, above 0.
        kind: How e-values accumulate.
        log_normalisers: ln of the number by which each e-value is divided (`conditional_e_values`), None for 1.
    """
    log_e_values = _compute_log_e_values(p_value, log_normalisers)
    if kind == "cusum":
        return tuple([max(log_m, 0.0) + log_e for log_m, log_e in zip(log_state, log_e_values, strict=True)])
    return tuple(
        [
            (log_m + log1p(exp(-log_m)) if log_m > 0.0 else log1p(exp(log_m))) + log_e
            for log_m, log_e in zip(log_state, log_e_values, strict=True)
        ]
    )


def advance_with_alerts(
    log_state: LogState,
    alert_p_values: Iterable[float],
    kind: DetectorKind = "shiryaev-roberts",
    log_normalisers: LogState | None = None,
) -> LogState:
    """Return ln M_κ as if open records that have alerted closed now, each with its p-value at the alert.

    The p-value of a record never rises, so the record counts at least as much when it closes.

    Args:
        log_state: ln M_κ of the closed records.
        alert_p_values: p-values of the open records.
        kind: How e-values accumulate.
        log_normalisers: As in `advance_detector`.
    """
    for p_value in alert_p_values:
        log_state = advance_detector(log_state, p_value, kind, log_normalisers)
    return log_state


@functools.lru_cache(maxsize=65_536)
def _compute_log_e_values(p_value: float, log_normalisers: LogState | None) -> LogState:
    """Return ln L_κ of a p-value for each exponent. Most p-values of a stream are ranks, so they repeat."""
    log_p = max(log(p_value), -_MAX_NEG_LOG_P)
    log_e_values = [
        log_exponent + (exponent - 1.0) * log_p
        for log_exponent, exponent in zip(_LOG_EXPONENTS, EXPONENTS, strict=True)
    ]
    if log_normalisers is None:
        return tuple(log_e_values)
    return tuple([log_e - divisor for log_e, divisor in zip(log_e_values, log_normalisers, strict=True)])


def compute_log_statistic(log_state: LogState) -> float:
    """Return ln of the mean of M_κ over the exponents; larger is more evidence for a fault."""
    largest = max(log_state)
    if largest == -math.inf:
        return largest
    return largest + log(sum([exp(log_m - largest) for log_m in log_state])) + _LOG_WEIGHT
