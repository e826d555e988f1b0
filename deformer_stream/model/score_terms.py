"""Score terms: the numbers of each reading from which the scores of its record are computed, as the rows of an array.

The array has a column for each reading, and three or four rows. Below, v is the observed value of a reading, and p its
distribution given the earlier readings of the record. Logarithms are natural.

    LOG_PROB       ln p(v); larger is more probable
    LOG_P_VALUE    ln of the highest-density p-value, the probability of a value that is at most as probable as v
    CENTERED_NLL   −ln p(v) minus its expectation, which is the entropy of p; larger is more anomalous
    LOG_P_PRIOR    ln of the p-value under the Gaussian prior alone; 0 for readings that the prior lacks

The row `LOG_P_PRIOR` exists only if scores depend on it. There are two cases, which exclude each other:

- The p-values under the prior are a term of the alert (`alert_prior`).
- Records have cumulative sums (`calibration.cusum`), and the prior is a Gaussian process. The p-values are then
  conditional on the readings of other sensors only (`gaussian_process`).
"""

from __future__ import annotations

LOG_PROB, LOG_P_VALUE, CENTERED_NLL, LOG_P_PRIOR = range(4)
"""The rows of arrays of score terms."""


def count_score_terms(has_prior_row: bool) -> int:
    """Return the number of rows of an array of score terms, 3 or 4.

    Args:
        has_prior_row: Whether the array has the row `LOG_P_PRIOR`.
    """
    return LOG_P_PRIOR + has_prior_row
