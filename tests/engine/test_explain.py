"""Explanations: the orders against the whole-record path, and the blame against a truth that is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deformer_stream.calibration.conformal import Calibration, PrefixState, advance_prefix_state
from deformer_stream.calibration.torch_scoring import compute_max_statistics
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.events import Contribution, EventBatch, Explanation
from deformer_stream.engine.explain import MOST_SUSPECTS, MOST_TESTED, Alarming, explain
from deformer_stream.engine.order_trees import conditionals, each_last
from deformer_stream.engine.queries import fill
from deformer_stream.model.deformer import DEformer, ModelConfig, to_tensor
from deformer_stream.model.schema import Feature, Schema
from tests.engine.worlds import configs, model_of, normalised, records_of, schemas
from tests.models import linear_model, linear_records


@pytest.fixture(scope="module")
def linear() -> DEformer:
    return linear_model()


@pytest.fixture(scope="module")
def alarming(linear: DEformer) -> Alarming:
    rows = linear_records(300, 5)
    codes = np.argsort(np.random.default_rng(3).random(rows.shape), 1)
    values = linear.schema.normalise(codes, np.take_along_axis(rows, codes, 1))
    return Calibration.from_statistics(compute_max_statistics(linear, codes, values), "random").make_alert_rule(0.01)


def never(score: Any, _: Any) -> Any:
    return np.zeros(score.shape, bool)


def always(score: Any, _: Any) -> Any:
    return np.ones(score.shape, bool)


def of(model: DEformer, codes: np.ndarray, values: np.ndarray, alarm: Alarming, effort: Any = "full") -> Explanation:
    return explain(model, codes[None], values[None], [{}], ["r"], alarm, effort)[0]


def by_name(found: Explanation) -> dict[str, Contribution]:
    return {part.feature: part for part in found.contributions}


@settings(max_examples=60)
@given(st.integers(0, 5), st.integers(0, 20), st.integers(0, 3), st.booleans())
def test_orders_are_what_they_say(given_: int, items: int, asked: int, mirrored: bool) -> None:
    orders = each_last(given_, items, asked, mirrored)
    ways = [[int(orders.reading[node]) for node in path if node >= 0] for path in orders.paths]
    copies = (2 if mirrored else 1) * items
    assert [way[-1] for way in ways[:copies]] == [given_ + i for i in range(items)] * (2 if mirrored and items else 1)
    for way in ways[:copies]:
        assert way[:given_] == list(range(given_))
        assert sorted(way) == list(range(given_ + items))
    for a, way in enumerate(ways[copies : copies + asked]):
        assert (sorted(way[:-1]), way[-1]) == (list(range(given_ + items)), given_ + items + a)
    for path in orders.paths:
        nodes = path[path >= 0]
        for k, node in enumerate(nodes):
            assert set(np.flatnonzero(orders.before[node])) == set(nodes[:k].tolist())
    way: list[int] = []  # depth first: who comes later on the way takes the place of who stood there before
    for node, before in enumerate(orders.before):
        way[before.sum() :] = [node]
        assert np.flatnonzero(before).tolist() == way[:-1]
    if items > 2:
        assert len(orders.reading) < 2 * (given_ + items * (items.bit_length() + 1) + asked * 1) + asked


@settings(max_examples=20, deadline=None)
@given(schemas(most=7), configs, st.integers(0, 99), st.booleans())
def test_a_tree_of_orders_equals_the_orders_one_by_one(
    schema: Schema, config: ModelConfig, seed: int, mirrored: bool
) -> None:
    model, W = model_of(schema, config, seed), len(schema)
    codes, raw = records_of(schema, 3, seed)
    features, values = torch.from_numpy(codes), to_tensor(normalised(schema, codes, raw), model)
    orders = each_last(W // 3, W - W // 3 - W // 4, W // 4, mirrored)
    with torch.inference_mode():
        together = conditionals(model, orders, features, values).log_prob(values[:, orders.reading])
        for path in orders.paths:
            nodes = path[path >= 0]
            way = orders.reading[nodes]
            alone = model.conditionals(features[:, way], values[:, way]).log_prob(values[:, way])
            torch.testing.assert_close(together[:, nodes], alone, rtol=1e-8, atol=1e-8)


@settings(max_examples=15, deadline=None)
@given(schemas(most=8, context=True), configs, st.integers(0, 99), st.sampled_from([never, always]))
def test_what_an_explanation_says(schema: Schema, config: ModelConfig, seed: int, alarm: Alarming) -> None:
    model = model_of(schema, config, seed)
    codes, raw = records_of(schema, 4, seed, missing=0.2)
    found = explain(model, codes, raw, [{}] * 4, list("abcd"), alarm)
    for row in range(4):
        own = codes[row][codes[row] >= 0]
        scored = own[~schema.context[own]]
        parts = found[row].contributions
        assert sorted(part.feature for part in parts) == sorted(schema.names[code] for code in scored)
        reliefs = np.sort([part.relief for part in parts if part.relief is not None])
        assume((np.diff(reliefs) > 1e-9).all())  # of two that are equally suspicious the last bit decides
        alone = explain(model, codes[row : row + 1], raw[row : row + 1], [{}], ["abcd"[row]], alarm)[0]
        assert [part.feature for part in alone.contributions] == [part.feature for part in parts]
        np.testing.assert_allclose([p.surprise for p in alone.contributions], [p.surprise for p in parts], atol=1e-6)
        suspects = [part.suspect for part in parts]
        assert suspects == sorted(suspects, reverse=True)
        if not parts:
            continue
        assert sum(suspects) == (1 if alarm is never else min(MOST_SUSPECTS, len(scored)))
        assert found[row].silenced_by == ((parts[0].feature,) if alarm is never else None)
        for part in parts:
            assert part.surprise >= 0
            assert part.leave_one_out is not None
            if part.expected.low is not None:
                assert part.expected.high is not None
                assert isinstance(part.expected.median, float)
                assert part.expected.low <= part.expected.median <= part.expected.high


def test_attributions_add_up_and_the_last_term_is_the_leave_one_out_surprise() -> None:
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(5)))
    model = model_of(schema, ModelConfig(16, 1, 1, 16, 2, hidden=(8,)), 3)
    codes, raw = np.arange(5), np.array([0.3, -1.0, 2.0, 0.1, 5.0])
    parts = by_name(of(model, codes, raw, always))
    # A model whose conditionals depend on order little enough is not to be had untrained: all orders, then.
    import itertools

    every = np.array(list(itertools.permutations(range(5))))
    values = torch.from_numpy(schema.normalise(every, raw[every]))
    with torch.inference_mode():
        terms = -model.conditionals(torch.from_numpy(every), values).log_prob(values).numpy()
    shapley = np.array([terms[every == f].mean() for f in range(5)])
    found = np.array([parts[f"f{f}"].attribution for f in range(5)])
    assert abs(found.sum() - shapley.sum()) < 0.1 * abs(shapley).sum()
    np.testing.assert_allclose(found, shapley, atol=0.25 * np.abs(shapley).max())
    for f in range(5):
        ends = terms[every[:, -1] == f, -1]
        assert ends.min() - 1e-6 <= parts[f"f{f}"].leave_one_out <= ends.max() + 1e-6  # type: ignore[operator]


@pytest.mark.parametrize("faulty", [0, 1, 2])
def test_the_faulty_one_is_blamed_and_its_replacement_silences(
    linear: DEformer, alarming: Alarming, faulty: int
) -> None:
    """With three readings two can outvote one."""
    rows = linear_records(40, 21)
    rows = rows[np.abs(rows[:, 0]) > 0.5][:12]
    rows[:, faulty] = [lambda x: -x, lambda y: 2 - y, lambda s: 1 - s][faulty](rows[:, faulty])
    rng, hits = np.random.default_rng(1), 0
    for row in rows:
        codes = rng.permutation(3)
        found = of(linear, codes, row[codes], alarming)
        first = found.contributions[0]
        hits += first.feature == linear.schema.names[faulty]
        assert first.suspect
        assert found.silenced_by is not None
        mended = row.copy()
        mended[[linear.schema.codes[name] for name in found.silenced_by]] = np.nan
        mended = np.where(np.isnan(mended), fill(linear, mended[None], np.isnan(mended)[None]).value[0], mended)
        normal = linear.schema.normalise(codes, mended[codes])
        assert not alarming(compute_max_statistics(linear, codes[None], normal[None])[:, None], ["r"]).any()
    assert hits >= 10


def test_of_a_block_of_ties_the_end_counts(linear: DEformer) -> None:
    """A large x alone would alert, with the y that came at once it would not; "minus" is wrong."""
    codes, raw = np.arange(3)[None], np.array([[2.6, 6.2, 0.0]])
    sound = linear.schema.normalise(codes, np.array([[2.6, 6.2, 1.0]]))
    with torch.inference_mode():
        values = to_tensor(sound, linear)
        log_p = linear.conditionals(torch.from_numpy(codes), values).log_p_value(values).double().numpy()
    everywhere, at_the_end = (
        float(advance_prefix_state(PrefixState.initial(1), log_p, codes >= 0, ends)[1].max_statistic[0]) for ends in (codes >= 0, codes == 2)
    )
    assert everywhere > 1.2 * at_the_end
    threshold = (everywhere + at_the_end) / 2

    def alarm(score: Any, _: Any) -> Any:
        return score > threshold

    def silenced(ends: list[bool]) -> Any:
        return explain(linear, codes, raw, [{}], ["r"], alarm, ends=np.array([ends]))[0].silenced_by

    assert silenced([False, False, True]) == ("sign",)
    assert silenced([True, False, True]) != ("sign",)
    calibration = Calibration.from_statistics(np.full(99, threshold), "arrival", tie_policy="hold")
    engine = Engine(linear, calibration, "m", 0.01)
    none = np.zeros(3, np.int32)
    batch = EventBatch(["r"] * 3, codes[0].astype(np.int32), raw[0], none + np.int64(5), none, none)
    (alert,) = engine.handle(batch, 0).alerts
    assert alert.silenced_by == ("sign",)


def test_expected_ranges_trust_the_rest_only(linear: DEformer, alarming: Alarming) -> None:
    """x = 1 and "plus" agree, y = −9 does not: x is expected where "plus" puts it, not where y would."""
    parts = by_name(of(linear, np.array([1, 0, 2]), np.array([-9.0, 1.0, 1.0]), alarming))
    assert parts["y"].suspect
    assert 2.0 < parts["y"].expected.median < 4.0  # type: ignore[operator]
    assert 0.0 < parts["x"].expected.median < 2.0  # type: ignore[operator]
    assert (parts["sign"].value, parts["sign"].expected.median) == ("plus", "plus")
    assert parts["y"].surprise > 5 > max(parts["x"].surprise, parts["sign"].surprise)
    assert parts["y"].relief > parts["x"].relief + 1  # type: ignore[operator]


def test_records_have_orders_of_their_own_that_stay() -> None:
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(6)))
    model = model_of(schema, ModelConfig(16, 1, 1, 16, 2, hidden=(8,)), 1)
    names = ["pump-1", "pump-2", "pump-1"]
    codes, raw = np.tile(np.arange(6), (3, 1)), np.tile(np.linspace(-1, 2, 6), (3, 1))
    one, other, again = (by_name(found)["f3"].relief for found in explain(model, codes, raw, [{}] * 3, names, always))
    assert one == pytest.approx(again, abs=1e-9)
    assert one != pytest.approx(other, abs=1e-9)


def test_labels_never_seen(linear: DEformer, alarming: Alarming) -> None:
    (found,) = explain(linear, np.array([[2, 0, 1]]), np.array([[2.0, 1.0, 3.0]]), [{0: "sideways"}], ["r"], alarming)
    first = found.contributions[0]
    assert (first.feature, first.value, first.expected.median) == ("sign", "sideways", "plus")
    assert found.silenced_by == ("sign",)


def test_of_many_readings_the_most_surprising_are_tested() -> None:
    n = MOST_TESTED + 6
    schema = Schema(tuple(Feature(f"f{i}", "continuous", context=i == 0) for i in range(n)))
    model = model_of(schema, ModelConfig(16, 1, 1, 16, 2, hidden=(8,)), 1, torch.float32)
    raw = np.random.default_rng(2).normal(size=n)
    raw[[5, 40]] = 300.0
    found = of(model, np.arange(n), raw, always)
    assert len(found.contributions) == n - 1
    tested = [part for part in found.contributions if part.relief is not None]
    assert len(tested) == MOST_TESTED
    assert {"f5", "f40"} <= {part.feature for part in tested}
    assert all(np.isfinite(part.surprise) and part.attribution is not None for part in found.contributions)
    assert found.contributions[-1].leave_one_out is None


def test_less_effort(linear: DEformer) -> None:
    codes, raw = np.array([2, 0, 1]), np.array([1.0, 1.0, -9.0])
    fast = of(linear, codes, raw, always, "fast")
    assert fast.silenced_by is None
    assert fast.contributions[0].feature == "y"
    assert all(part.relief is None and part.attribution is None and not part.suspect for part in fast.contributions)
    values = torch.from_numpy(linear.schema.normalise(codes, raw)[None]).float()
    with torch.inference_mode():
        log_p = linear.conditionals(torch.from_numpy(codes[None]), values).log_p_value(values)[0].tolist()
    surprises = [by_name(fast)[linear.schema.names[code]].surprise for code in codes]
    assert surprises == pytest.approx([-one for one in log_p], abs=1e-4)
    assert of(linear, codes, raw, always, "off") == Explanation(())
