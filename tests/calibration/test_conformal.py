"""Conformal p-values: the arithmetic of the prefix statistics, and false alarms within alpha (invariant 6)."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import (
    P_VALUE_EXPONENT,
    Calibration,
    PrefixState,
    advance_prefix_state,
    choose_num_calibration,
    trim_largest,
)
from deformer_stream.calibration.false_alarms import bound_false_alarms
from deformer_stream.calibration.torch_scoring import compute_centered_nll
from deformer_stream.model.deformer import ModelConfig
from deformer_stream.model.schema import Feature, Schema
from tests.engine.random_models import draw_records, make_model, normalise_values

Floats = NDArray[np.float64]

SCHEMA_WITH_CONTEXT = Schema(tuple(Feature(f"f{i}", "continuous", context=i == 1) for i in range(4)))

SHIFT_BY_GROUP = {"calm": 0.0, "hot": 0.6}
"""How much more surprising the readings of each group are, relative to a correct model."""


def compute_statistics_directly(p_values: list[float]) -> list[float]:
    """Return the running statistic after each reading, by the definition and one reading at a time."""
    running, largest = [], 0.0
    p_values = [p**P_VALUE_EXPONENT for p in p_values]
    for k in range(1, len(p_values) + 1):
        prefix = p_values[:k]
        t = -sum(math.log(p) for p in prefix)
        fisher = -math.log(sum(t**i / math.factorial(i) for i in range(k))) + t
        sidak = -math.log(-math.expm1(k * math.log1p(-min(prefix)))) if min(prefix) < 1 else 0.0
        largest = max(largest, fisher, sidak)
        running.append(largest)
    return running


@given(st.lists(st.floats(1e-12, 0.999), min_size=1, max_size=30))
def test_prefix_statistics_equal_their_definition(p_values: list[float]) -> None:
    log_p = np.log(np.array(p_values))[None]
    score, _ = advance_prefix_state(PrefixState.initial(1), log_p, np.ones_like(log_p, bool))
    np.testing.assert_allclose(score[0], compute_statistics_directly(p_values), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("num_records", "expected"),
    [(3, 1), (50, 10), (112, 19), (222, 39), (296, 59), (297, 99), (635, 99), (828, 199), (3335, 699), (22795, 4999)],
)
def test_number_of_calibration_records(num_records: int, expected: int) -> None:
    assert choose_num_calibration(num_records) == expected


@given(st.integers(297, 100_000))
def test_alerts_use_all_of_alpha_by_default(num_records: int) -> None:
    num_calibration = choose_num_calibration(num_records)
    assert (num_calibration + 1) % 100 == 0
    assert 0.13 <= num_calibration / num_records <= 1 / 3


@given(st.lists(st.floats(-2000, 0), min_size=1, max_size=40), st.data())
def test_splitting_readings_over_calls_gives_the_same_bits(values: list[float], data: st.DataObject) -> None:
    log_p = np.array(values)[None]
    is_scored = np.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))[None]
    expected, final_state = advance_prefix_state(PrefixState.initial(1), log_p, is_scored)
    split = data.draw(st.integers(0, len(values)))
    scores, state = [], PrefixState.initial(1)
    for part in (slice(0, split), slice(split, None)):
        if log_p[:, part].size:
            score, state = advance_prefix_state(state, log_p[:, part], is_scored[:, part])
            scores.append(score)
    assert np.array_equal(np.concatenate(scores, 1), expected)
    assert state.num_scored == final_state.num_scored
    assert state.neg_log_p_sum == final_state.neg_log_p_sum
    assert state.min_log_p == final_state.min_log_p
    assert state.max_statistic == final_state.max_statistic


def test_statistics_of_tiny_p_values_are_finite() -> None:
    log_p = np.array([[-1e6, -1e300, 0.0, -5.0]])
    score, _ = advance_prefix_state(PrefixState.initial(1), log_p, np.ones((1, 4), bool))
    assert np.isfinite(score).all()
    assert (np.diff(score) >= 0).all()


def test_context_readings_do_not_change_the_statistics() -> None:
    log_p = np.log(np.array([[0.5, 1e-9, 0.2]]))
    with_context, _ = advance_prefix_state(PrefixState.initial(1), log_p, np.array([[True, False, True]]))
    without, _ = advance_prefix_state(PrefixState.initial(1), log_p[:, [0, 2]], np.ones((1, 2), bool))
    assert with_context[0, [0, 2]].tolist() == without[0].tolist()
    assert with_context[0, 1] == with_context[0, 0]


def test_scores_within_float32_rounding_count_as_equal() -> None:
    scores = np.array([0.5, 3.0, 40.0])
    calibration = Calibration.from_statistics(scores, "random")
    exact = calibration.compute_pooled_p_values(scores)
    np.testing.assert_array_equal(calibration.compute_pooled_p_values(scores * (1 + 1e-5)), exact)
    np.testing.assert_array_equal(calibration.compute_pooled_p_values(scores * (1 - 1e-5)), exact)
    assert (calibration.compute_pooled_p_values(scores * 1.001) < exact).all()


def test_equal_calibration_scores_raise_the_p_value() -> None:
    calibration = Calibration.from_statistics(np.array([1.0, 2.0, 2.0, 3.0]), "random")
    p = calibration.compute_pooled_p_values(np.array([0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 9.0]))
    np.testing.assert_allclose(p, np.array([5, 5, 4, 4, 2, 2, 1]) / 5)
    assert calibration.min_p_value == 0.2


@given(st.lists(st.floats(0, 50), min_size=1, max_size=200), st.floats(0.001, 0.5))
def test_alerts_begin_above_the_threshold(statistics: list[float], alpha: float) -> None:
    calibration = Calibration.from_statistics(np.array(statistics), "random")
    threshold = calibration.compute_threshold(alpha)
    if alpha < calibration.min_p_value:
        assert threshold == math.inf
        return
    above = threshold + 1e-9 if threshold > -math.inf else 0.0
    assert calibration.compute_pooled_p_values(np.array([above]))[0] <= alpha
    if threshold > -math.inf:
        assert calibration.compute_pooled_p_values(np.array([threshold - 1e-9]))[0] > alpha


def draw_max_statistics(shift: float, num_records: int, rng: np.random.Generator, num_readings: int = 8) -> Floats:
    """Draw the largest prefix statistic of random records whose −ln p are larger by the factor 1 + shift."""
    log_p = -rng.exponential(size=(num_records, num_readings)) * (1.0 + shift)
    is_scored = np.ones(log_p.shape, bool)
    return advance_prefix_state(PrefixState.initial(num_records), log_p, is_scored)[1].max_statistic


def make_grouped_calibration(rng: np.random.Generator, records_per_group: int = 999) -> Calibration:
    """Return a calibration with the groups of `SHIFT_BY_GROUP`."""
    statistics_by_group = {
        name: draw_max_statistics(shift, records_per_group, rng) for name, shift in SHIFT_BY_GROUP.items()
    }
    pooled = Calibration.from_statistics(np.concatenate(list(statistics_by_group.values())), "arrival")
    return pooled.with_groups(statistics_by_group, "/", 99)


@pytest.mark.parametrize("alpha", [0.01, 0.05])
def test_each_group_keeps_alpha_only_with_its_own_calibration(alpha: float) -> None:
    """One of two groups is noisier. Counts stay within 99% beta-binomial bounds by group, and leave them if pooled."""
    rng, num_records = np.random.default_rng(8), 5_000
    calibration = make_grouped_calibration(rng)
    for name, shift in SHIFT_BY_GROUP.items():
        score = draw_max_statistics(shift, num_records, rng)[:, None]
        record_ids = [f"{name}/{i}" for i in range(num_records)]
        by_group = int((calibration.compute_p_values(score, lambda ids=record_ids: ids) <= alpha).sum())
        pooled = int((calibration.compute_p_values(score, lambda: ["no group"] * num_records) <= alpha).sum())
        low = bound_false_alarms(alpha, 999, num_records, 0.005)
        assert low <= by_group <= bound_false_alarms(alpha, 999, num_records, 0.995)
        if name == "hot":
            assert pooled > bound_false_alarms(alpha, 2 * 999, num_records, 0.999), (
                "the noisier group is not over alpha"
            )
        else:
            assert pooled < low, "the quieter group is not under alpha"


def test_groups_with_few_records_use_the_pooled_calibration() -> None:
    rng = np.random.default_rng(1)
    statistics_by_group = {
        "many": draw_max_statistics(0.0, 99, rng),
        "few": draw_max_statistics(9.0, 98, rng),
        "": draw_max_statistics(0.0, 200, rng),
    }
    pooled = Calibration.from_statistics(np.concatenate(list(statistics_by_group.values())), "random")
    calibration = pooled.with_groups(statistics_by_group, "@", 99)
    assert list(calibration.calibration_by_group) == ["many"]
    score = np.array([[3.0]] * 5)
    record_ids = ["many@1", "few@1", "many", "a@many@1", "x/many@1"]
    p = calibration.compute_p_values(score, lambda: record_ids)[:, 0]
    pooled_p = calibration.compute_pooled_p_values(score)[0, 0]
    group_p = calibration.calibration_by_group["many"].compute_pooled_p_values(score)[0, 0]
    assert p.tolist() == [group_p, pooled_p, pooled_p, pooled_p, pooled_p]
    assert group_p != pooled_p
    few = statistics_by_group["few"]
    assert Calibration.from_statistics(few, "random").with_groups({"few": few}, "@", 99).separator == ""


def test_groups_round_trip_through_json() -> None:
    calibration = make_grouped_calibration(np.random.default_rng(2), 120)
    restored = Calibration.from_json(json.loads(json.dumps(calibration.to_json())))
    assert restored.arrival_order == "arrival"
    assert restored.separator == "/"
    assert list(restored.calibration_by_group) == list(SHIFT_BY_GROUP)
    for name, group in calibration.calibration_by_group.items():
        assert np.array_equal(restored.calibration_by_group[name].scores, group.scores)
    assert "groups" not in Calibration.from_statistics(np.arange(3.0), "random").to_json()


@pytest.mark.parametrize(
    "change",
    [{"separator": ""}, {"groups": {}}, {"groups": {"": [1.0]}}, {"groups": {"a": [2.0, 1.0]}}, {"groups": [[1.0]]}],
)
def test_invalid_groups_are_rejected(change: dict[str, Any]) -> None:
    calibration = Calibration.from_statistics(np.arange(9.0), "random").with_groups({"a": np.arange(9.0)}, "/", 9)
    with pytest.raises((ValueError, AttributeError), match=r"calibration|items"):
        Calibration.from_json(calibration.to_json() | change)


def test_trimming_drops_the_largest_statistics() -> None:
    statistics = np.array([5.0, 1.0, 9.0, 2.0, 7.0])
    assert trim_largest(statistics, 0.0).tolist() == [1, 2, 5, 7, 9]
    assert trim_largest(statistics, 0.3).tolist() == [1, 2, 5]
    assert trim_largest(statistics, 0.09).tolist() == [1, 2, 5, 7, 9], "less than half a record was not rounded down"


def test_unreachable_alphas_are_reported_with_the_required_records() -> None:
    calibration = Calibration.from_statistics(np.arange(99.0), "random")
    assert calibration.find_unreachable_alphas((0.05, 0.01, 0.009, 0.001)) == {0.009: 111, 0.001: 999}
    assert calibration.describe_reachability(0.01) == "yes"
    assert calibration.describe_reachability(0.001) == "no: it takes 999 calibration records, there are 99"
    for alpha, required in calibration.find_unreachable_alphas((0.009, 0.001)).items():
        larger = Calibration.from_statistics(np.arange(float(required)), "random")
        assert larger.describe_reachability(alpha) == "yes"


def test_required_records_are_the_fewest_whose_smallest_p_value_is_at_most_alpha() -> None:
    for num_records in (1, 48, 98, 107, 186, 999, 31_249):
        for alpha in (
            1 / (num_records + 1),
            np.nextafter(1 / (num_records + 1), 1),
            np.nextafter(1 / (num_records + 1), 0),
        ):
            required = Calibration.count_required_records(alpha)
            assert 1 / (required + 1) <= alpha < 1 / required


@pytest.mark.parametrize("scores", [[2.0, 1.0], [math.nan], [math.inf]])
def test_invalid_scores_are_rejected(scores: list[float]) -> None:
    with pytest.raises(ValueError, match="calibration"):
        Calibration(np.array(scores), "random")


def test_calibration_round_trips_through_json() -> None:
    calibration = Calibration.from_statistics(np.random.default_rng(0).exponential(size=50), "arrival")
    restored = Calibration.from_json(calibration.to_json())
    assert restored.arrival_order == "arrival"
    assert np.array_equal(restored.scores, calibration.scores)


def test_false_alarms_of_a_wrong_model_stay_within_alpha() -> None:
    """The p-values of the readings are far from uniform and dependent, yet the share of alerts stays within alpha."""
    rng = np.random.default_rng(5)
    num_calibration, num_records, num_readings, alpha = 999, 20_000, 12, 0.01

    def draw_statistics(count: int) -> Floats:
        common = rng.exponential(size=(count, 1))
        log_p = -(common + rng.exponential(size=(count, num_readings)) ** 1.7)
        is_scored = np.ones((count, num_readings), bool)
        return advance_prefix_state(PrefixState.initial(count), log_p, is_scored)[1].max_statistic

    calibration = Calibration.from_statistics(draw_statistics(num_calibration), "arrival")
    num_alerts = int((calibration.compute_pooled_p_values(draw_statistics(num_records)) <= alpha).sum())
    assert num_alerts <= bound_false_alarms(alpha, num_calibration, num_records, 0.99)
    assert num_alerts > 0


def test_centered_nll_of_a_record_is_the_sum_over_its_scored_readings() -> None:
    config = ModelConfig(d_model=16, layers=1, heads=2, feedforward=32, mixtures=3, hidden=(16,))
    model = make_model(SCHEMA_WITH_CONTEXT, config)
    codes, raw_values = draw_records(SCHEMA_WITH_CONTEXT, 5, 3, missing_share=0.3)
    values = normalise_values(SCHEMA_WITH_CONTEXT, codes, raw_values)
    by_record = compute_centered_nll(model, codes, values, batch_size=2)
    x = torch.from_numpy(values)
    with torch.inference_mode():
        by_reading = model.conditionals(torch.from_numpy(codes), x).score(x)[1].numpy()
    is_scored = (codes >= 0) & (codes != 1)  # feature 1 is context
    np.testing.assert_allclose(by_record, np.where(is_scored, by_reading, 0.0).sum(1), atol=1e-9)


def test_complete_records_are_compared_with_complete_records_of_their_group() -> None:
    statistics = np.arange(99.0)
    assert Calibration.from_statistics(statistics, "arrival").compute_record_p_values(np.zeros(1), ["a@1"]) is None
    pooled = Calibration.from_statistics(statistics, "arrival", record_scores=np.arange(-10.0, 9.0)[::-1])
    calibration = pooled.with_groups({"a": statistics}, "@", 1, {"a": np.arange(4.0)})
    for copy in (calibration, Calibration.from_json(json.loads(json.dumps(calibration.to_json())))):
        p_values = copy.compute_record_p_values(np.array([-10.0, -10.0, 8.5, 2.0]), ["a@1", "b@1", "b@2", "a@2"])
        assert p_values is not None
        np.testing.assert_allclose(p_values, [1.0, 1.0, 0.05, 0.6])


def test_equal_negative_scores_of_complete_records_raise_the_p_value() -> None:
    calibration = Calibration.from_statistics(np.arange(3.0), "arrival", record_scores=np.array([-50.0, 1.0, 2.0]))
    p_values = calibration.compute_record_p_values(np.array([-50.0 + 1e-3]), ["r"])
    assert p_values is not None
    assert p_values.tolist() == [1.0]
