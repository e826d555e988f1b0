"""The bound of the number of false alarms is a quantile of the beta-binomial distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import betabinom

from deformer_stream.calibration.false_alarms import bound_false_alarms


@pytest.mark.parametrize("confidence", [0.5, 0.99, 0.999, 1 - 1e-9])
@pytest.mark.parametrize("alpha", [0.5, 0.05, 0.01, 0.001])
@pytest.mark.parametrize(("calibrated", "records"), [(19, 1), (99, 40), (500, 2000), (999, 1), (20_000, 8192)])
def test_bound_is_the_quantile(alpha: float, calibrated: int, records: int, confidence: float) -> None:
    k = math.floor(alpha * (calibrated + 1) + 1e-9)
    if not k:
        assert bound_false_alarms(alpha, calibrated, records, confidence) == 0
        return
    log_p = betabinom.logpmf(np.arange(records + 1), records, k, calibrated + 1 - k)
    bound = bound_false_alarms(alpha, calibrated, records, confidence)
    assert bound == records or logsumexp(log_p[bound + 1 :]) <= math.log1p(-confidence) + 1e-6
    assert bound == 0 or logsumexp(log_p[bound:]) > math.log1p(-confidence) - 1e-6


@pytest.mark.parametrize("alpha", [0.05, 0.001])
def test_bound_of_many_records_is_safe_and_close(alpha: float) -> None:
    calibrated, records = 2000, 3_000_000
    k = math.floor(alpha * (calibrated + 1) + 1e-9)
    quantile = betabinom.isf(1e-3, records, k, calibrated + 1 - k)
    assert quantile <= bound_false_alarms(alpha, calibrated, records, 0.999) <= 1.01 * quantile


def test_no_records_and_alphas_out_of_reach_have_no_false_alarms() -> None:
    assert bound_false_alarms(0.01, 98, 10_000, 0.999) == 0
    assert bound_false_alarms(0.01, 99, 0, 0.999) == 0


def test_bound_of_groups_holds_for_mixtures() -> None:
    """Groups of different sizes, one of them the smallest; 99.9% of simulated totals are within the bound."""
    rng, alpha, sizes, counts = np.random.default_rng(0), 0.02, (99, 150, 5000), (100, 300, 600)
    totals = sum(
        rng.binomial(count, rng.beta(k := math.floor(alpha * (n + 1) + 1e-9), n + 1 - k, 200_000))
        for n, count in zip(sizes, counts, strict=True)
    )
    bound = bound_false_alarms(alpha, min(sizes), sum(counts), 0.999, is_grouped=True)
    assert np.mean(totals > bound) <= 1e-3
