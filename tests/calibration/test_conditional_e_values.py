"""E-values that hold given the calibration records."""

from __future__ import annotations

import math

import numpy as np
import pytest

from deformer_stream.calibration.conditional_e_values import (
    DEFAULT_DELTA,
    compute_log_normalisers,
    draw_conditional_means,
)
from deformer_stream.calibration.incident_evidence import (
    INITIAL_STATE,
    advance_detector,
    compute_log_e_values,
    compute_log_statistic,
)


def draw_exact_means(num_records: int, num_sets: int, seed: int) -> np.ndarray:
    """Return E[L_κ] given each of some calibration sets, from the spacings of their sorted uniform scores."""
    rng = np.random.default_rng([seed, 1])
    scores = np.sort(rng.random((num_sets, num_records)), 1)
    edges = np.concatenate([np.zeros((num_sets, 1)), scores, np.ones((num_sets, 1))], 1)
    # A new score between the r-th largest and the next one has the p-value r / (n + 1).
    probabilities = np.diff(edges, axis=1)[:, ::-1]
    ranks = np.arange(1, num_records + 2) / (num_records + 1)
    return np.asarray(probabilities @ np.exp(compute_log_e_values(ranks)))


@pytest.mark.parametrize("num_records", [1, 20, 200, 2000])
def test_normalised_e_values_have_a_mean_above_1_for_few_calibration_sets(num_records: int) -> None:
    means = draw_exact_means(num_records, 4000, seed=num_records)
    normalised = means / np.exp(compute_log_normalisers(num_records))
    share = (normalised > 1.0).any(1).mean()
    # 99.9% of binomial variables with 4000 trials at 1% are below 1.6%.
    assert share < 0.016
    assert DEFAULT_DELTA == 0.01


def test_plain_e_values_have_a_mean_above_1_for_many_calibration_sets() -> None:
    # Why the normalisation is needed: its absence would void the bound for a third of all calibrations.
    means = draw_exact_means(2000, 2000, seed=3)
    assert (means[:, 4] > 1.0).mean() > 0.25
    assert (means[:, 3] > 1.0).mean() > 0.1


def test_blocks_of_ranks_bound_the_means_from_above_and_closely() -> None:
    exact = draw_exact_means(3000, 4000, seed=5)
    bounds = draw_conditional_means(3000, 4000, seed=5)
    for quantile in (0.5, 0.99):
        ratio = np.quantile(bounds, quantile, axis=0) / np.quantile(exact, quantile, axis=0)
        assert (ratio > 0.97).all()
        assert (ratio < 1.05).all()


def test_normalisers_are_the_same_in_every_run_and_moderate() -> None:
    assert compute_log_normalisers(1000) == compute_log_normalisers(1000)
    for num_records in (100, 1000, 20_000):
        factors = np.exp(compute_log_normalisers(num_records))
        assert (factors > 0.3).all()
        assert (factors < 1.4).all()


def test_the_bound_holds_for_independent_records_given_the_calibration() -> None:
    # 60 calibration sets of 200 records; the mean number of records to a false incident is at least the threshold.
    num_records, threshold, limit = 200, 150, 3000
    rng = np.random.default_rng(0)
    normalisers = compute_log_normalisers(num_records)
    times = []
    for _ in range(60):
        calibration = np.sort(rng.random(num_records))
        state, count = INITIAL_STATE, 0
        while count < limit and compute_log_statistic(state) < math.log(threshold):
            rank = 1 + num_records - int(np.searchsorted(calibration, rng.random()))
            state = advance_detector(state, rank / (num_records + 1), "shiryaev-roberts", normalisers)
            count += 1
        times.append(count)
    assert np.mean(times) > threshold
