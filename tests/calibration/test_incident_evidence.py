"""E-values, detectors and the tail of scores: the evidence for incidents."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.incident_detectors import advance_detectors
from deformer_stream.calibration.conditional_e_values import compute_log_normalisers
from deformer_stream.calibration.incident_evidence import (
    INITIAL_STATE,
    LN_10,
    NUM_EXPONENTS,
    DetectorKind,
    ScoreTail,
    advance_detector,
    compute_log_e_values,
    compute_log_statistic,
    fit_tail,
)

KINDS: tuple[DetectorKind, ...] = ("shiryaev-roberts", "cusum")
P_VALUES = st.floats(1e-6, 1.0)


def run(p_values: list[float], kind: DetectorKind = "shiryaev-roberts") -> list[float]:
    """Return ln of the statistic after each record."""
    state, statistics = INITIAL_STATE, []
    for p_value in p_values:
        state = advance_detector(state, p_value, kind)
        statistics.append(compute_log_statistic(state))
    return statistics


@given(st.integers(1, 3000))
def test_the_mean_of_an_e_value_over_all_ranks_is_at_most_1(num_records: int) -> None:
    ranks = np.arange(1, num_records + 2) / (num_records + 1)
    assert (np.exp(compute_log_e_values(ranks)).mean(0) <= 1.0 + 1e-12).all()


@given(st.lists(P_VALUES, min_size=1, max_size=60), st.sampled_from(KINDS))
def test_many_detectors_advance_as_one(p_values: list[float], kind: DetectorKind) -> None:
    state = np.full((2, NUM_EXPONENTS), -np.inf)
    statistics = []
    for p_value in p_values:
        state, statistic = advance_detectors(state, compute_log_e_values(np.array([p_value, 1.0])), kind)
        statistics.append(statistic[0])
    np.testing.assert_allclose(statistics, run(p_values, kind), rtol=1e-9, atol=1e-9)


@given(st.lists(P_VALUES, min_size=1, max_size=40), st.data(), st.sampled_from(KINDS))
def test_the_statistic_rises_if_a_p_value_falls(p_values: list[float], data: st.DataObject, kind: DetectorKind) -> None:
    index = data.draw(st.integers(0, len(p_values) - 1))
    smaller = [*p_values[:index], p_values[index] * data.draw(st.floats(0.01, 0.99)), *p_values[index + 1 :]]
    before, after = run(p_values, kind), run(smaller, kind)
    assert all(b >= a - 1e-9 for a, b in zip(before, after, strict=True))
    assert after[index] > before[index]


def test_four_records_of_p_001_pass_a_month_of_seconds() -> None:
    # The figure that `science.md` and decision 0036 state.
    statistics = run([0.001] * 4)
    month = math.log(30 * 86_400)
    assert statistics[2] < month < statistics[3]


def test_shiryaev_roberts_by_hand() -> None:
    # M = (0 + 1) L, then (L + 1) L; with p = 1 each L is its κ.
    first, second = run([1.0, 1.0])
    kappas = np.array([0.05, 0.1, 0.2, 0.4, 0.6])
    assert math.exp(first) == pytest.approx(kappas.mean())
    assert math.exp(second) == pytest.approx(((kappas + 1) * kappas).mean())
    assert math.exp(run([1.0, 1.0], "cusum")[1]) == pytest.approx(kappas.mean())


def test_the_statistic_of_uniform_p_values_has_the_mean_of_a_martingale() -> None:
    # E[M_t] = t for Shiryaev–Roberts with E[L] = 1. Small exponents have heavy tails, so p-values have a lower bound.
    rng = np.random.default_rng(0)
    num_runs, num_records = 40_000, 5
    state = np.full((num_runs, NUM_EXPONENTS), -np.inf)
    for _ in range(num_records):
        ranks = rng.integers(1, 101, num_runs) / 100
        state, statistic = advance_detectors(state, compute_log_e_values(ranks))
    assert np.exp(statistic).mean() < num_records * 1.02


def test_extremely_small_p_values_stay_finite() -> None:
    assert all(map(math.isfinite, run([1e-300] * 1000)))
    assert run([1e-300] * 1000)[-1] / LN_10 > 10_000


def test_normalisers_are_subtracted() -> None:
    normalisers = compute_log_normalisers(500)
    plain, divided = advance_detector(INITIAL_STATE, 0.01), advance_detector(INITIAL_STATE, 0.01, "cusum", normalisers)
    np.testing.assert_allclose(np.subtract(plain, divided), normalisers)


def test_a_tail_extends_only_scores_beyond_its_start() -> None:
    tail = ScoreTail(10.0, 0.001, 2.0)
    assert tail.extend(0.02, 5.0) == 0.02
    assert tail.extend(0.001, 10.0) == 0.001
    assert tail.extend(0.001, 14.0) == pytest.approx(0.001 * math.exp(-2))
    assert tail.extend(0.001, math.inf) > 0
    assert tail.extend(1e-9, 10.1) == 1e-9  # it never raises a p-value
    assert tail.extend(0.5, math.nan) == 0.5


def test_the_tail_of_exponential_scores_has_their_scale() -> None:
    scores = np.random.default_rng(0).exponential(3.0, 20_000)
    tail = fit_tail(scores)
    assert tail is not None
    assert tail.scale == pytest.approx(3.0, rel=0.1)
    assert tail.start == scores.max()
    assert tail.p_value == pytest.approx(1 / 20_001)


@pytest.mark.parametrize("scores", [[], [1.0], [2.0, 2.0, 2.0]])
def test_too_few_different_scores_have_no_tail(scores: list[float]) -> None:
    assert fit_tail(np.array(scores)) is None
