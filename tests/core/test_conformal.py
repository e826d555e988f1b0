"""Law 6 and the arithmetic of the rule."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.core.conformal import Calibration, PrefixState, advance, record_excess
from deformer_stream.core.model import ModelConfig
from deformer_stream.core.schema import Feature, Schema
from tests.core.worlds import model_of, normalised, records_of
from tests.statistics import beta_binomial_upper

NUMBERS = Schema(tuple(Feature(f"f{i}", "continuous", context=i == 1) for i in range(4)))


def g_of(p: list[float]) -> list[float]:
    """The definition, reading by reading, in plain arithmetic."""
    out, best = [], 0.0
    for k in range(1, len(p) + 1):
        t = -sum(math.log(x) for x in p[:k])
        fisher = -math.log(sum(t**i / math.factorial(i) for i in range(k))) + t
        sidak = -math.log(-math.expm1(k * math.log1p(-min(p[:k])))) if min(p[:k]) < 1 else 0.0
        best = max(best, fisher, sidak)
        out.append(best)
    return out


@given(st.lists(st.floats(1e-12, 0.999), min_size=1, max_size=30))
def test_prefix_statistics_follow_their_definition(p: list[float]) -> None:
    log_p = np.log(np.array(p))[None]
    score, _ = advance(PrefixState.start(1), log_p, np.ones_like(log_p, bool))
    np.testing.assert_allclose(score[0], g_of(p), rtol=1e-6, atol=1e-9)


@given(st.lists(st.floats(-2000, 0), min_size=1, max_size=40), st.data())
def test_any_split_gives_the_same_bits(log_p: list[float], data: st.DataObject) -> None:
    whole = np.array(log_p)[None]
    scored = np.array(data.draw(st.lists(st.booleans(), min_size=len(log_p), max_size=len(log_p))))[None]
    expected, end = advance(PrefixState.start(1), whole, scored)
    cut = data.draw(st.integers(0, len(log_p)))
    parts, state = [], PrefixState.start(1)
    for piece in (slice(0, cut), slice(cut, None)):
        if whole[:, piece].size:
            score, state = advance(state, whole[:, piece], scored[:, piece])
            parts.append(score)
    assert np.array_equal(np.concatenate(parts, 1), expected)
    assert (state.count, state.total, state.least, state.peak) == (end.count, end.total, end.least, end.peak)


def test_statistics_stay_finite_far_out() -> None:
    log_p = np.array([[-1e6, -1e300, 0.0, -5.0]])
    score, _ = advance(PrefixState.start(1), log_p, np.ones((1, 4), bool))
    assert np.isfinite(score).all()
    assert (np.diff(score) >= 0).all()


def test_context_changes_nothing() -> None:
    log_p = np.log(np.array([[0.5, 1e-9, 0.2]]))
    with_context, _ = advance(PrefixState.start(1), log_p, np.array([[True, False, True]]))
    without, _ = advance(PrefixState.start(1), log_p[:, [0, 2]], np.ones((1, 2), bool))
    assert with_context[0, [0, 2]].tolist() == without[0].tolist()
    assert with_context[0, 1] == with_context[0, 0]


def test_ties_within_the_noise_of_float32_count_as_ties() -> None:
    scores = np.array([0.5, 3.0, 40.0])
    calibration = Calibration.of(scores, "random")
    exact = calibration.p_value(scores)
    np.testing.assert_array_equal(calibration.p_value(scores * (1 + 1e-5)), exact)
    np.testing.assert_array_equal(calibration.p_value(scores * (1 - 1e-5)), exact)
    assert (calibration.p_value(scores * 1.001) < exact).all()


def test_p_value_counts_ties_against_the_record() -> None:
    calibration = Calibration.of(np.array([1.0, 2.0, 2.0, 3.0]), "random")
    p = calibration.p_value(np.array([0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 9.0]))
    np.testing.assert_allclose(p, np.array([5, 5, 4, 4, 2, 2, 1]) / 5)
    assert calibration.smallest_p == 0.2


@given(st.lists(st.floats(0, 50), min_size=1, max_size=200), st.floats(0.001, 0.5))
def test_threshold_is_where_alerts_begin(statistics: list[float], alpha: float) -> None:
    calibration = Calibration.of(np.array(statistics), "random")
    threshold = calibration.threshold(alpha)
    if alpha < calibration.smallest_p:
        assert threshold == math.inf
        return
    above = threshold + 1e-9 if threshold > -math.inf else 0.0
    assert calibration.p_value(np.array([above]))[0] <= alpha
    if threshold > -math.inf:
        assert calibration.p_value(np.array([threshold - 1e-9]))[0] > alpha


@pytest.mark.parametrize("bad", [[2.0, 1.0], [math.nan], [math.inf]])
def test_calibrations_that_are_none(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="calibration"):
        Calibration(np.array(bad), "random")


def test_round_trip_through_json() -> None:
    calibration = Calibration.of(np.random.default_rng(0).exponential(size=50), "arrival")
    again = Calibration.from_json(calibration.to_json())
    assert again.order == "arrival"
    assert np.array_equal(again.scores, calibration.scores)


def test_false_alarms_of_a_wrong_model_stay_within_alpha() -> None:
    """However wrong the p-values are (here far from uniform and dependent), the share of alerts keeps to alpha."""
    rng = np.random.default_rng(5)
    n, m, k, alpha = 999, 20_000, 12, 0.01

    def peaks(count: int) -> np.ndarray:
        common = rng.exponential(size=(count, 1))
        log_p = -(common + rng.exponential(size=(count, k)) ** 1.7)
        return advance(PrefixState.start(count), log_p, np.ones((count, k), bool))[1].peak

    calibration = Calibration.of(peaks(n), "arrival")
    alarms = int((calibration.p_value(peaks(m)) <= alpha).sum())
    assert alarms <= beta_binomial_upper(n, m, alpha, 0.99)
    assert alarms > 0


def test_the_excess_of_a_record_adds_up_what_its_readings_exceed() -> None:
    model = model_of(NUMBERS, ModelConfig(d_model=16, layers=1, heads=2, feedforward=32, mixtures=3, hidden=(16,)))
    codes, values = records_of(NUMBERS, 5, 3, missing=0.3)
    values = normalised(NUMBERS, codes, values)
    whole = record_excess(model, codes, values, batch=2)
    features, numbers = torch.from_numpy(codes), torch.from_numpy(values)
    with torch.inference_mode():
        excess = model.conditionals(features, numbers).surprise(numbers)[1].numpy()
    counted = (codes >= 0) & (codes != 1)  # feature 1 is context
    np.testing.assert_allclose(whole, np.where(counted, excess, 0.0).sum(1), atol=1e-9)
