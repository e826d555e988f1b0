"""Explanations: trees of orders against single orders, and suspects against faults that are known."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import Calibration, PrefixState, advance_prefix_state
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.events import Contribution, EventBatch, Explanation
from deformer_stream.engine.explain import (
    MAX_CANDIDATES,
    MAX_SUSPECTS,
    AlertRule,
    bound_num_nodes,
    explain_records,
)
from deformer_stream.engine.imputation import impute
from deformer_stream.engine.order_trees import build_order_tree
from deformer_stream.engine.torch_conditionals import compute_tree_conditionals
from deformer_stream.model.deformer import DEformer, ModelConfig, to_tensor
from deformer_stream.model.schema import Feature, Schema
from tests.effort import num_examples
from tests.engine.max_statistics import compute_max_statistics
from tests.engine.random_models import configs, draw_records, make_model, normalise_values, schemas
from tests.models import draw_linear_records, train_linear_model

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CONFIG = ModelConfig(d_model=16, layers=1, heads=1, feedforward=16, mixtures=2, hidden=(8,))


@pytest.fixture(scope="module")
def linear() -> DEformer:
    """Return a trained model of records with y = 2x + 1 and the sign of x."""
    return train_linear_model()


@pytest.fixture(scope="module")
def alert_rule(linear: DEformer) -> AlertRule:
    """Return the alert rule of a calibrated linear model at alpha = 1%."""
    rows = draw_linear_records(300, 5)
    codes = np.argsort(np.random.default_rng(3).random(rows.shape), 1)
    values = linear.schema.normalise(codes, np.take_along_axis(rows, codes, 1))
    return Calibration.from_statistics(compute_max_statistics(linear, codes, values), "random").make_alert_rule(0.01)


def never_alert(score: Any, _: Any) -> Any:
    """Raise no alert, whatever the statistic."""
    return np.zeros(score.shape, bool)


def always_alert(score: Any, _: Any) -> Any:
    """Raise an alert, whatever the statistic."""
    return np.ones(score.shape, bool)


def explain_one(
    model: DEformer, codes: Ints, raw_values: Floats, alert_rule: AlertRule, effort: Any = "full"
) -> Explanation:
    """Return the explanation of one record, given its codes and raw values in order of arrival."""
    return explain_records(model, codes[None], raw_values[None], [{}], ["r"], alert_rule, effort)[0]


def index_by_feature(explanation: Explanation) -> dict[str, Contribution]:
    """Return the contributions by feature name."""
    return {part.feature: part for part in explanation.contributions}


@settings(max_examples=num_examples(60))
@given(st.integers(0, 5), st.integers(0, 20), st.integers(0, 3), st.booleans())
def test_tree_contains_the_orders_that_were_requested(
    num_given: int, num_items: int, num_extra: int, is_mirrored: bool
) -> None:
    tree = build_order_tree(num_given, num_items, num_extra, is_mirrored)
    orders = [[int(tree.reading_index[node]) for node in path if node >= 0] for path in tree.paths]
    repeats = 2 if is_mirrored and num_items else 1
    num_leave_one_out = repeats * num_items
    expected_leaves = [num_given + i for i in range(num_items)] * repeats
    assert [order[-1] for order in orders[:num_leave_one_out]] == expected_leaves
    for order in orders[:num_leave_one_out]:
        assert order[:num_given] == list(range(num_given))
        assert sorted(order) == list(range(num_given + num_items))
    for i, order in enumerate(orders[num_leave_one_out : num_leave_one_out + num_extra]):
        assert sorted(order[:-1]) == list(range(num_given + num_items))
        assert order[-1] == num_given + num_items + i
    for path in tree.paths:
        nodes = path[path >= 0]
        for k, node in enumerate(nodes):
            assert set(np.flatnonzero(tree.ancestor_mask[node])) == set(nodes[:k].tolist())
    if num_items > 2:
        bound = 2 * (num_given + num_items * (num_items.bit_length() + 1) + num_extra) + num_extra
        assert len(tree.reading_index) < bound


@given(st.integers(0, 5), st.integers(0, 20), st.integers(0, 3), st.booleans())
def test_tree_nodes_are_in_depth_first_order(num_given: int, num_items: int, num_extra: int, is_mirrored: bool) -> None:
    """The compiled kernels rely on it: a new node replaces the previous node of the same depth and all below it."""
    tree = build_order_tree(num_given, num_items, num_extra, is_mirrored)
    current_path: list[int] = []
    for node, is_ancestor in enumerate(tree.ancestor_mask):
        current_path[is_ancestor.sum() :] = [node]
        assert np.flatnonzero(is_ancestor).tolist() == current_path[:-1]


@settings(max_examples=num_examples(20), deadline=None)
@given(schemas(max_features=7), configs, st.integers(0, 99), st.booleans())
def test_tree_conditionals_equal_those_of_single_orders(
    schema: Schema, config: ModelConfig, seed: int, is_mirrored: bool
) -> None:
    model, num_features = make_model(schema, config, seed), len(schema)
    codes, raw_values = draw_records(schema, 3, seed)
    features, values = torch.from_numpy(codes), to_tensor(normalise_values(schema, codes, raw_values), model)
    num_given, num_extra = num_features // 3, num_features // 4
    tree = build_order_tree(num_given, num_features - num_given - num_extra, num_extra, is_mirrored)
    with torch.inference_mode():
        by_node = compute_tree_conditionals(model, tree, features, values).log_prob(values[:, tree.reading_index])
        for path in tree.paths:
            nodes = path[path >= 0]
            order = tree.reading_index[nodes]
            expected = model.conditionals(features[:, order], values[:, order]).log_prob(values[:, order])
            torch.testing.assert_close(by_node[:, nodes], expected, rtol=1e-8, atol=1e-8)


@settings(max_examples=num_examples(15), deadline=None)
@given(schemas(max_features=8, context=True), configs, st.integers(0, 99), st.sampled_from([never_alert, always_alert]))
def test_explanations_are_complete_and_independent_of_the_batch(
    schema: Schema, config: ModelConfig, seed: int, alert_rule: AlertRule
) -> None:
    model = make_model(schema, config, seed)
    codes, raw_values = draw_records(schema, 4, seed, missing_share=0.2)
    record_ids = list("abcd")
    explanations = explain_records(model, codes, raw_values, [{}] * 4, record_ids, alert_rule)
    for row in range(4):
        record_codes = codes[row][codes[row] >= 0]
        scored_codes = record_codes[~schema.is_context[record_codes]]
        parts = explanations[row].contributions
        assert sorted(part.feature for part in parts) == sorted(schema.names[code] for code in scored_codes)
        reliefs = np.sort([part.relief for part in parts if part.relief is not None])
        assume((np.diff(reliefs) > 1e-9).all())  # rounding decides between equally suspicious readings
        rows = slice(row, row + 1)
        (single,) = explain_records(model, codes[rows], raw_values[rows], [{}], record_ids[rows], alert_rule)
        assert [part.feature for part in single.contributions] == [part.feature for part in parts]
        np.testing.assert_allclose([p.surprise for p in single.contributions], [p.surprise for p in parts], atol=1e-6)
        is_suspect = [part.suspect for part in parts]
        assert is_suspect == sorted(is_suspect, reverse=True)
        if not parts:
            continue
        assert sum(is_suspect) == (1 if alert_rule is never_alert else min(MAX_SUSPECTS, len(scored_codes)))
        assert explanations[row].silenced_by == ((parts[0].feature,) if alert_rule is never_alert else None)
        for part in parts:
            assert part.surprise >= 0
            assert part.leave_one_out is not None
            if part.expected.low is not None:
                assert part.expected.high is not None
                assert isinstance(part.expected.median, float)
                assert part.expected.low <= part.expected.median <= part.expected.high


def test_attributions_approximate_shapley_values() -> None:
    """An untrained model's conditionals depend on the order, so the attributions are compared with all orders."""
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(5)))
    model = make_model(schema, CONFIG, 3)
    codes, raw_values = np.arange(5), np.array([0.3, -1.0, 2.0, 0.1, 5.0])
    parts = index_by_feature(explain_one(model, codes, raw_values, always_alert))
    orders = np.array(list(itertools.permutations(range(5))))
    values = torch.from_numpy(schema.normalise(orders, raw_values[orders]))
    with torch.inference_mode():
        surprisal = -model.conditionals(torch.from_numpy(orders), values).log_prob(values).numpy()
    shapley = np.array([surprisal[orders == f].mean() for f in range(5)])
    attributions = np.array([parts[f"f{f}"].attribution for f in range(5)])
    assert abs(attributions.sum() - shapley.sum()) < 0.1 * abs(shapley).sum()
    np.testing.assert_allclose(attributions, shapley, atol=0.25 * np.abs(shapley).max())
    for f in range(5):
        last_terms = surprisal[orders[:, -1] == f, -1]
        leave_one_out = parts[f"f{f}"].leave_one_out
        assert leave_one_out is not None
        assert last_terms.min() - 1e-6 <= leave_one_out <= last_terms.max() + 1e-6


def test_number_of_tree_nodes_is_bounded() -> None:
    for num_items in range(1, MAX_CANDIDATES + 1):
        tree = build_order_tree(0, num_items, is_mirrored=True)
        assert len(tree.reading_index) <= bound_num_nodes(num_items)


@pytest.mark.parametrize("faulty", [0, 1, 2])
def test_faulty_reading_is_the_suspect_and_its_replacement_avoids_the_alert(
    linear: DEformer, alert_rule: AlertRule, faulty: int
) -> None:
    """With three readings, the two normal ones identify the faulty one."""
    rows = draw_linear_records(40, 21)
    rows = rows[np.abs(rows[:, 0]) > 0.5][:12]
    rows[:, faulty] = [lambda x: -x, lambda y: 2 - y, lambda s: 1 - s][faulty](rows[:, faulty])
    rng, num_hits = np.random.default_rng(1), 0
    for row in rows:
        codes = rng.permutation(3)
        explanation = explain_one(linear, codes, row[codes], alert_rule)
        first = explanation.contributions[0]
        num_hits += first.feature == linear.schema.names[faulty]
        assert first.suspect
        assert explanation.silenced_by is not None
        repaired = row.copy()
        repaired[[linear.schema.code_by_name[name] for name in explanation.silenced_by]] = np.nan
        is_missing = np.isnan(repaired)
        repaired = np.where(is_missing, impute(linear, repaired[None], is_missing[None]).median[0], repaired)
        values = linear.schema.normalise(codes, repaired[codes])
        assert not alert_rule(compute_max_statistics(linear, codes[None], values[None])[:, None], ["r"]).any()
    assert num_hits >= 10


def test_only_the_last_reading_of_a_tie_group_is_a_decision_point(linear: DEformer) -> None:
    """A large x alone would raise an alert, x with its simultaneous y would not, and the label "minus" is wrong."""
    codes, raw_values = np.arange(3)[None], np.array([[2.6, 6.2, 0.0]])
    normal_values = linear.schema.normalise(codes, np.array([[2.6, 6.2, 1.0]]))
    with torch.inference_mode():
        x = to_tensor(normal_values, linear)
        log_p = linear.conditionals(torch.from_numpy(codes), x).log_p_value(x).double().numpy()

    def compute_statistic(is_decision_point: NDArray[np.bool_]) -> float:
        _, state = advance_prefix_state(PrefixState.initial(1), log_p, codes >= 0, is_decision_point)
        return float(state.max_statistic[0])

    at_every_reading, at_the_last = compute_statistic(codes >= 0), compute_statistic(codes == 2)
    assert at_every_reading > 1.2 * at_the_last
    threshold = (at_every_reading + at_the_last) / 2

    def alert_rule(score: Any, _: Any) -> Any:
        return score > threshold

    def find_silencing_set(is_decision_point: list[bool]) -> Any:
        points = np.array([is_decision_point])
        (explanation,) = explain_records(linear, codes, raw_values, [{}], ["r"], alert_rule, is_decision_point=points)
        return explanation.silenced_by

    assert find_silencing_set([False, False, True]) == ("sign",)
    assert find_silencing_set([True, False, True]) != ("sign",)
    calibration = Calibration.from_statistics(np.full(99, threshold), "arrival", tie_policy="hold")
    engine = Engine(linear, calibration, "m", 0.01)
    zeros = np.zeros(3, np.int32)
    batch = EventBatch(["r"] * 3, codes[0].astype(np.int32), raw_values[0], zeros + np.int64(5), zeros, zeros)
    (alert,) = engine.handle(batch, 0).alerts
    assert alert.silenced_by == ("sign",)


def test_expected_ranges_are_conditioned_on_trusted_readings_only(linear: DEformer, alert_rule: AlertRule) -> None:
    """x = 1 and "plus" agree and y = −9 does not, so x is expected where "plus" indicates, not where y does."""
    parts = index_by_feature(explain_one(linear, np.array([1, 0, 2]), np.array([-9.0, 1.0, 1.0]), alert_rule))
    assert parts["y"].suspect
    assert 2.0 < parts["y"].expected.median < 4.0  # type: ignore[operator]
    assert 0.0 < parts["x"].expected.median < 2.0  # type: ignore[operator]
    assert (parts["sign"].value, parts["sign"].expected.median) == ("plus", "plus")
    assert parts["y"].surprise > 5 > max(parts["x"].surprise, parts["sign"].surprise)
    assert parts["y"].relief > parts["x"].relief + 1  # type: ignore[operator]


def test_orders_depend_on_the_record_id_only() -> None:
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(6)))
    model = make_model(schema, CONFIG, 1)
    record_ids = ["pump-1", "pump-2", "pump-1"]
    codes, raw_values = np.tile(np.arange(6), (3, 1)), np.tile(np.linspace(-1, 2, 6), (3, 1))
    explanations = explain_records(model, codes, raw_values, [{}] * 3, record_ids, always_alert)
    first, other, repeated = (index_by_feature(explanation)["f3"].relief for explanation in explanations)
    assert first == pytest.approx(repeated, abs=1e-9)
    assert first != pytest.approx(other, abs=1e-9)


def test_unseen_label_is_shown_as_text(linear: DEformer, alert_rule: AlertRule) -> None:
    codes, raw_values = np.array([[2, 0, 1]]), np.array([[2.0, 1.0, 3.0]])
    (explanation,) = explain_records(linear, codes, raw_values, [{0: "sideways"}], ["r"], alert_rule)
    first = explanation.contributions[0]
    assert (first.feature, first.value, first.expected.median) == ("sign", "sideways", "plus")
    assert explanation.silenced_by == ("sign",)


def test_most_surprising_readings_become_candidates() -> None:
    num_features = MAX_CANDIDATES + 6
    schema = Schema(tuple(Feature(f"f{i}", "continuous", context=i == 0) for i in range(num_features)))
    model = make_model(schema, CONFIG, 1, torch.float32)
    raw_values = np.random.default_rng(2).normal(size=num_features)
    raw_values[[5, 40]] = 300.0
    explanation = explain_one(model, np.arange(num_features), raw_values, always_alert)
    assert len(explanation.contributions) == num_features - 1
    candidates = [part for part in explanation.contributions if part.relief is not None]
    assert len(candidates) == MAX_CANDIDATES
    assert {"f5", "f40"} <= {part.feature for part in candidates}
    assert all(np.isfinite(part.surprise) and part.attribution is not None for part in explanation.contributions)
    assert explanation.contributions[-1].leave_one_out is None


def test_contributions_have_the_documented_order() -> None:
    """Suspects first, then candidates, then the others; in each class by the sum of surprise and relief."""
    num_features = MAX_CANDIDATES + 6
    schema = Schema(tuple(Feature(f"c{i}", "continuous") for i in range(num_features)))
    model = make_model(schema, CONFIG, 1, torch.float32)
    raw_values = np.random.default_rng(1).normal(size=num_features) * np.where(np.arange(num_features) % 7, 1.0, 5.0)
    parts = explain_one(model, np.arange(num_features), raw_values, always_alert).contributions
    keys = [(part.suspect, part.relief is not None, part.surprise + (part.relief or 0.0)) for part in parts]
    assert keys == sorted(keys, reverse=True)
    assert {key[:2] for key in keys} == {(True, True), (False, True), (False, False)}
    reliefs = [part.relief for part in parts if part.relief is not None]
    assert reliefs != sorted(reliefs, reverse=True), "the relief alone does not determine the order"


def test_fast_effort_conditions_on_earlier_readings_and_off_returns_nothing(linear: DEformer) -> None:
    codes, raw_values = np.array([2, 0, 1]), np.array([1.0, 1.0, -9.0])
    fast = explain_one(linear, codes, raw_values, always_alert, "fast")
    assert fast.silenced_by is None
    assert fast.contributions[0].feature == "y"
    assert all(part.relief is None and part.attribution is None and not part.suspect for part in fast.contributions)
    values = torch.from_numpy(linear.schema.normalise(codes, raw_values)[None]).float()
    with torch.inference_mode():
        log_p = linear.conditionals(torch.from_numpy(codes[None]), values).log_p_value(values)[0].tolist()
    parts = index_by_feature(fast)
    surprises = [parts[linear.schema.names[code]].surprise for code in codes]
    assert surprises == pytest.approx([-value for value in log_p], abs=1e-4)
    assert explain_one(linear, codes, raw_values, always_alert, "off") == Explanation(())
