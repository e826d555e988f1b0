"""Law 6 and the arithmetic of the rule."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.calibration.conformal import (
    P_VALUE_EXPONENT,
    Calibration,
    PrefixState,
    advance_prefix_state,
    trim_largest,
)
from deformer_stream.calibration.torch_scoring import compute_centered_nll
from deformer_stream.model.deformer import ModelConfig
from deformer_stream.model.schema import Feature, Schema
from tests.engine.worlds import model_of, normalised, records_of
from tests.statistics import beta_binomial_upper

NUMBERS = Schema(tuple(Feature(f"f{i}", "continuous", context=i == 1) for i in range(4)))


def g_of(p: list[float]) -> list[float]:
    """The definition, reading by reading, in plain arithmetic."""
    out, best, p = [], 0.0, [x**P_VALUE_EXPONENT for x in p]
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
    score, _ = advance_prefix_state(PrefixState.initial(1), log_p, np.ones_like(log_p, bool))
    np.testing.assert_allclose(score[0], g_of(p), rtol=1e-6, atol=1e-9)


@given(st.lists(st.floats(-2000, 0), min_size=1, max_size=40), st.data())
def test_any_split_gives_the_same_bits(log_p: list[float], data: st.DataObject) -> None:
    whole = np.array(log_p)[None]
    scored = np.array(data.draw(st.lists(st.booleans(), min_size=len(log_p), max_size=len(log_p))))[None]
    expected, end = advance_prefix_state(PrefixState.initial(1), whole, scored)
    cut = data.draw(st.integers(0, len(log_p)))
    parts, state = [], PrefixState.initial(1)
    for piece in (slice(0, cut), slice(cut, None)):
        if whole[:, piece].size:
            score, state = advance_prefix_state(state, whole[:, piece], scored[:, piece])
            parts.append(score)
    assert np.array_equal(np.concatenate(parts, 1), expected)
    assert (state.num_scored, state.neg_log_p_sum, state.min_log_p, state.max_statistic) == (end.num_scored, end.neg_log_p_sum, end.min_log_p, end.max_statistic)


def test_statistics_stay_finite_far_out() -> None:
    log_p = np.array([[-1e6, -1e300, 0.0, -5.0]])
    score, _ = advance_prefix_state(PrefixState.initial(1), log_p, np.ones((1, 4), bool))
    assert np.isfinite(score).all()
    assert (np.diff(score) >= 0).all()


def test_context_changes_nothing() -> None:
    log_p = np.log(np.array([[0.5, 1e-9, 0.2]]))
    with_context, _ = advance_prefix_state(PrefixState.initial(1), log_p, np.array([[True, False, True]]))
    without, _ = advance_prefix_state(PrefixState.initial(1), log_p[:, [0, 2]], np.ones((1, 2), bool))
    assert with_context[0, [0, 2]].tolist() == without[0].tolist()
    assert with_context[0, 1] == with_context[0, 0]


def test_ties_within_the_noise_of_float32_count_as_ties() -> None:
    scores = np.array([0.5, 3.0, 40.0])
    calibration = Calibration.from_statistics(scores, "random")
    exact = calibration.compute_pooled_p_values(scores)
    np.testing.assert_array_equal(calibration.compute_pooled_p_values(scores * (1 + 1e-5)), exact)
    np.testing.assert_array_equal(calibration.compute_pooled_p_values(scores * (1 - 1e-5)), exact)
    assert (calibration.compute_pooled_p_values(scores * 1.001) < exact).all()


def test_p_value_counts_ties_against_the_record() -> None:
    calibration = Calibration.from_statistics(np.array([1.0, 2.0, 2.0, 3.0]), "random")
    p = calibration.compute_pooled_p_values(np.array([0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 9.0]))
    np.testing.assert_allclose(p, np.array([5, 5, 4, 4, 2, 2, 1]) / 5)
    assert calibration.min_p_value == 0.2


@given(st.lists(st.floats(0, 50), min_size=1, max_size=200), st.floats(0.001, 0.5))
def test_threshold_is_where_alerts_begin(statistics: list[float], alpha: float) -> None:
    calibration = Calibration.from_statistics(np.array(statistics), "random")
    threshold = calibration.compute_threshold(alpha)
    if alpha < calibration.min_p_value:
        assert threshold == math.inf
        return
    above = threshold + 1e-9 if threshold > -math.inf else 0.0
    assert calibration.compute_pooled_p_values(np.array([above]))[0] <= alpha
    if threshold > -math.inf:
        assert calibration.compute_pooled_p_values(np.array([threshold - 1e-9]))[0] > alpha


def peaks_of(shift: float, count: int, rng: np.random.Generator, k: int = 8) -> np.ndarray:
    """M of records whose readings are all as surprising as this shift makes them."""
    log_p = -rng.exponential(size=(count, k)) * (1.0 + shift)
    return advance_prefix_state(PrefixState.initial(count), log_p, np.ones((count, k), bool))[1].max_statistic


GROUPS = {"calm": 0.0, "hot": 0.6}


def grouped(rng: np.random.Generator, n: int = 999) -> Calibration:
    peaks = {name: peaks_of(shift, n, rng) for name, shift in GROUPS.items()}
    return Calibration.from_statistics(np.concatenate(list(peaks.values())), "arrival").with_groups(peaks, "/", 99)


@pytest.mark.parametrize("alpha", [0.01, 0.05])
def test_each_group_keeps_its_alpha_where_all_together_do_not(alpha: float) -> None:
    """Two groups, one of which is noisier: within 99% beta-binomial bounds each by its own calibration."""
    rng, m = np.random.default_rng(8), 5_000
    calibration = grouped(rng)
    for name, shift in GROUPS.items():
        score = peaks_of(shift, m, rng)[:, None]
        ids = [f"{name}/{i}" for i in range(m)]
        own = int((calibration.compute_p_values(score, lambda ids=ids: ids) <= alpha).sum())
        pooled = int((calibration.compute_p_values(score, lambda: ["no group"] * m) <= alpha).sum())
        low = beta_binomial_upper(999, m, alpha, 0.005)
        assert low <= own <= beta_binomial_upper(999, m, alpha, 0.995)
        if name == "hot":
            assert pooled > beta_binomial_upper(2 * 999, m, alpha, 0.999), "the noisier group alarms too often"
        else:
            assert pooled < low, "at the expense of the other one"


def test_groups_are_those_with_enough_records() -> None:
    rng = np.random.default_rng(1)
    peaks = {"many": peaks_of(0.0, 99, rng), "few": peaks_of(9.0, 98, rng), "": peaks_of(0.0, 200, rng)}
    calibration = Calibration.from_statistics(np.concatenate(list(peaks.values())), "random").with_groups(peaks, "@", 99)
    assert list(calibration.calibration_by_group) == ["many"]
    score = np.array([[3.0]] * 5)
    ids = ["many@1", "few@1", "many", "a@many@1", "x/many@1"]
    p = calibration.compute_p_values(score, lambda: ids)[:, 0]
    pooled, own = calibration.compute_pooled_p_values(score)[0, 0], calibration.calibration_by_group["many"].compute_pooled_p_values(score)[0, 0]
    assert p.tolist() == [own, pooled, pooled, pooled, pooled]
    assert own != pooled
    assert Calibration.from_statistics(peaks["few"], "random").with_groups({"few": peaks["few"]}, "@", 99).separator == ""


def test_groups_survive_being_stored() -> None:
    calibration = grouped(np.random.default_rng(2), 120)
    again = Calibration.from_json(json.loads(json.dumps(calibration.to_json())))
    assert (again.arrival_order, again.separator, list(again.calibration_by_group)) == ("arrival", "/", list(GROUPS))
    for name, own in calibration.calibration_by_group.items():
        assert np.array_equal(again.calibration_by_group[name].scores, own.scores)
    assert "groups" not in Calibration.from_statistics(np.arange(3.0), "random").to_json()


@pytest.mark.parametrize(
    "change",
    [{"separator": ""}, {"groups": {}}, {"groups": {"": [1.0]}}, {"groups": {"a": [2.0, 1.0]}}, {"groups": [[1.0]]}],
)
def test_groups_that_are_none(change: dict[str, Any]) -> None:
    row = Calibration.from_statistics(np.arange(9.0), "random").with_groups({"a": np.arange(9.0)}, "/", 9).to_json()
    with pytest.raises((ValueError, AttributeError), match=r"calibration|items"):
        Calibration.from_json(row | change)


def test_trimming_leaves_out_the_largest() -> None:
    statistics = np.array([5.0, 1.0, 9.0, 2.0, 7.0])
    assert trim_largest(statistics, 0.0).tolist() == [1, 2, 5, 7, 9]
    assert trim_largest(statistics, 0.3).tolist() == [1, 2, 5]
    assert trim_largest(statistics, 0.09).tolist() == [1, 2, 5, 7, 9], "less than half a record"


def test_alphas_out_of_reach_are_told_with_what_they_take() -> None:
    calibration = Calibration.from_statistics(np.arange(99.0), "random")
    assert calibration.find_unreachable_alphas((0.05, 0.01, 0.009, 0.001)) == {0.009: 111, 0.001: 999}
    assert calibration.describe_reachability(0.01) == "yes"
    assert calibration.describe_reachability(0.001) == "no: it takes 999 calibration records, there are 99"
    for alpha, needed in calibration.find_unreachable_alphas((0.009, 0.001)).items():
        assert Calibration.from_statistics(np.arange(float(needed)), "random").describe_reachability(alpha) == "yes"


@pytest.mark.parametrize("bad", [[2.0, 1.0], [math.nan], [math.inf]])
def test_calibrations_that_are_none(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="calibration"):
        Calibration(np.array(bad), "random")


def test_round_trip_through_json() -> None:
    calibration = Calibration.from_statistics(np.random.default_rng(0).exponential(size=50), "arrival")
    again = Calibration.from_json(calibration.to_json())
    assert again.arrival_order == "arrival"
    assert np.array_equal(again.scores, calibration.scores)


def test_false_alarms_of_a_wrong_model_stay_within_alpha() -> None:
    """However wrong the p-values are (here far from uniform and dependent), the share of alerts keeps to alpha."""
    rng = np.random.default_rng(5)
    n, m, k, alpha = 999, 20_000, 12, 0.01

    def peaks(count: int) -> np.ndarray:
        common = rng.exponential(size=(count, 1))
        log_p = -(common + rng.exponential(size=(count, k)) ** 1.7)
        return advance_prefix_state(PrefixState.initial(count), log_p, np.ones((count, k), bool))[1].max_statistic

    calibration = Calibration.from_statistics(peaks(n), "arrival")
    alarms = int((calibration.compute_pooled_p_values(peaks(m)) <= alpha).sum())
    assert alarms <= beta_binomial_upper(n, m, alpha, 0.99)
    assert alarms > 0


def test_the_excess_of_a_record_adds_up_what_its_readings_exceed() -> None:
    model = model_of(NUMBERS, ModelConfig(d_model=16, layers=1, heads=2, feedforward=32, mixtures=3, hidden=(16,)))
    codes, values = records_of(NUMBERS, 5, 3, missing=0.3)
    values = normalised(NUMBERS, codes, values)
    whole = compute_centered_nll(model, codes, values, batch_size=2)
    features, numbers = torch.from_numpy(codes), torch.from_numpy(values)
    with torch.inference_mode():
        excess = model.conditionals(features, numbers).surprise(numbers)[1].numpy()
    counted = (codes >= 0) & (codes != 1)  # feature 1 is context
    np.testing.assert_allclose(whole, np.where(counted, excess, 0.0).sum(1), atol=1e-9)
