"""Laws of chance the tests judge by."""

from __future__ import annotations

import math


def beta_binomial_upper(calibration: int, records: int, alpha: float, confidence: float) -> int:
    """The number of false alarms that chance alone stays at or under with this confidence.

    With n calibration records, the probability that a normal record alerts is, over the draw of the calibration set,
    Beta(k, n + 1 − k) with k = ⌊α(n + 1)⌋; the count among m records is then beta-binomial.
    """
    k = math.floor(alpha * (calibration + 1) + 1e-9)
    if k == 0:
        return 0
    a, b = k, calibration + 1 - k

    def log_beta(x: float, y: float) -> float:
        return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)

    total = 0.0
    for x in range(records + 1):
        choose = math.lgamma(records + 1) - math.lgamma(x + 1) - math.lgamma(records - x + 1)
        total += math.exp(choose + log_beta(x + a, records - x + b) - log_beta(a, b))
        if total >= confidence:
            return x
    return records
