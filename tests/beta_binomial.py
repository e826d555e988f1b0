"""The distribution of the number of false alarms, with which tests check a calibrated alert rule."""

from __future__ import annotations

import math


def compute_beta_binomial_upper(num_calibration: int, num_records: int, alpha: float, confidence: float) -> int:
    """Return the smallest number of false alarms that is exceeded with probability at most 1 − confidence.

    With n calibration records, the probability that a normal record raises an alert has the distribution
    Beta(k, n + 1 − k) over the draw of these records, where k = ⌊α(n + 1)⌋. The number of alerts among m records is
    then beta-binomial.

    Args:
        num_calibration: The number n of calibration records.
        num_records: The number m of normal records that are tested.
        alpha: The false-alarm rate for which the rule is calibrated.
        confidence: Probability that the number of false alarms does not exceed the result.
    """
    k = math.floor(alpha * (num_calibration + 1) + 1e-9)
    if k == 0:
        return 0
    a, b = k, num_calibration + 1 - k

    def log_beta(x: float, y: float) -> float:
        return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)

    cumulative = 0.0
    for x in range(num_records + 1):
        log_choose = math.lgamma(num_records + 1) - math.lgamma(x + 1) - math.lgamma(num_records - x + 1)
        cumulative += math.exp(log_choose + log_beta(x + a, num_records - x + b) - log_beta(a, b))
        if cumulative >= confidence:
            return x
    return num_records
