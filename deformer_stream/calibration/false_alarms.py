"""The distribution of the number of false alarms, with which a share of alerts is compared.

Each new record is compared with the same n calibration records. It raises an alert at the false-alarm rate α if it is
one of the k = ⌊α(n + 1)⌋ most anomalous of these n + 1 records. The calibration records are random, so the probability
of a false alarm is random as well: it has the distribution Beta(k, n + 1 − k). The number of false alarms among m
normal records is therefore beta-binomial (Vovk 2012; Bates et al., arXiv 2104.08279). Equal scores only lower it.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from deformer_stream.model.gamma import log_gamma

DEFAULT_CONFIDENCE = 0.99
"""Probability that the number of false alarms is at most the bound that reports state."""

_GRID_POINTS = 65_536
"""Largest number of points at which probabilities are computed; between them they are bounded from above."""


@functools.lru_cache(maxsize=256)
def bound_false_alarms(
    alpha: float,
    num_calibration_records: int,
    num_records: int,
    confidence: float = DEFAULT_CONFIDENCE,
    is_grouped: bool = False,
) -> int:
    """Return an upper bound of the number of false alarms among normal records, which holds with this confidence.

    The bound is the quantile of the beta-binomial distribution, exactly if there are fewer than `_GRID_POINTS` records.
    For more records it may be larger than the quantile, by less than 1% in practice.

    Args:
        alpha: False-alarm rate, the α of the module's description.
        num_calibration_records: The number n of calibration records; of the smallest group with a calibration of its
            own, if there are groups.
        num_records: The number m of normal records.
        confidence: Probability with which the bound holds, at most 1 − 1e-12.
        is_grouped: Whether groups of records have calibrations of their own. Their numbers of false alarms are
            independent, with different distributions. Every exponential moment of the sum is at most that of a
            beta-binomial variable with the mean αm and the n of the smallest group. So this variable is used.
    """
    n, m = num_calibration_records, num_records
    rank = alpha * (n + 1)
    k = rank if is_grouped else math.floor(rank + 1e-9)  # the small term compensates rounding errors of the product
    if k <= 0 or m <= 0:  # no rank is extreme enough for an alert
        return 0
    b = n + 1 - k  # the second parameter of the beta distribution
    # More false alarms than this have a probability far below 1e-12. The reason is that the tails of Beta(k, n + 1 − k)
    # are not heavier than those of a gamma distribution with the shape k.
    largest = min(m, math.ceil(m * (k + 10 * math.sqrt(k) + 50) / (n + 1)) + 100)
    step = -(-(largest + 1) // _GRID_POINTS)
    x = np.arange(0, largest + 1, step, dtype=np.float64)
    # ln of the probability of x false alarms: ln C(m, x) + ln B(x + k, m − x + b) − ln B(k, b), with the binomial
    # coefficient C(m, x) = Γ(m + 1) / (Γ(x + 1) Γ(m − x + 1)) and the beta function B(u, w) = Γ(u) Γ(w) / Γ(u + w).
    # `constant` has the terms without x.
    constant = math.lgamma(m + 1) + math.lgamma(n + 1) - math.lgamma(k) - math.lgamma(b) - math.lgamma(m + n + 1)
    log_probabilities = constant - log_gamma(x + 1) - log_gamma(m - x + 1)
    log_probabilities += log_gamma(x + k) + log_gamma(m - x + b)
    # Above the mode probabilities fall, so each point bounds those between it and the next one. Entry i of `tail` is
    # the probability of at least x[i] false alarms.
    tail = (step * np.exp(log_probabilities))[::-1].cumsum()[::-1]
    is_rare = tail <= 1.0 - confidence
    # The first x such that more false alarms are rare enough. Rounding may make no point rare.
    return int(x[is_rare][0]) - 1 if is_rare.any() else largest
