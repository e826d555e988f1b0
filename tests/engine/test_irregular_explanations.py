"""Explanations of alerts of records with irregular readings, with a process whose exact density is known."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.codec.alert_text import format_alert_line
from deformer_stream.engine import explain_contexts, findings
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.events import Alert, Explanation
from deformer_stream.engine.explain import ExplanationEffort
from deformer_stream.engine.explain_contexts import explain_context
from deformer_stream.engine.order_trees import build_chain_tree, build_order_tree
from deformer_stream.engine.torch_conditionals import compute_tree_conditionals
from deformer_stream.kernels.cpu import CpuKernels
from deformer_stream.kernels.library import load_library
from deformer_stream.model.deformer import DEformer
from tests.effort import num_examples
from tests.engine.exact_models import (
    DURATION,
    EXACT,
    LEVEL,
    NOISE,
    OWN,
    OWN_SCALE,
    PROCESS_SCHEMA,
    SLOW,
    SLOW_SCALE,
    Floats,
    Ints,
    compute_statistics,
    make_exact_model,
    make_process_batch,
    simulate,
)
from tests.engine.irregular_streams import MINUTE, make_batch, make_engine
from tests.engine.irregular_streams import make_model as make_random_model
from tests.model.irregular_models import draw_contexts

ONE_FAST_SENSOR = (0.5, *(0.1,) * 5)
"""Shares of the readings of each sensor."""


@cache
def get_kernels(neighbors: int = 16) -> CpuKernels:
    library = load_library(False)
    assert library is not None
    return CpuKernels(make_exact_model(neighbors), library)


def explain_one(
    codes: Ints, values: Floats, ages: Floats, effort: ExplanationEffort = "full", neighbors: int = 16
) -> Explanation:
    times = np.round(1e6 * ages).astype(np.int64)
    kernels = get_kernels(neighbors)
    return explain_context(kernels.parameters, codes, values, ages, times, "r", {}, effort, kernels)


def raise_alerts(
    records: list[tuple[Ints, Floats, Floats]], scores: Floats, effort: ExplanationEffort
) -> dict[int, Alert]:
    """Return the alerts of records at α = 5%, if the statistics of normal records are `scores`."""
    model = make_exact_model()
    model.kernel_library = load_library(False)
    calibration = Calibration.from_statistics(scores, "arrival")
    engine = Engine(model, calibration, "process", 0.05, effort=effort)
    alerts = engine.handle(make_process_batch(records), 0).alerts
    model.kernel_library = None
    return {int(alert.record): alert for alert in alerts}


def test_a_shifted_sensor_is_the_first_suspect_more_often_than_by_the_surprise_on_arrival() -> None:
    """The faulty sensor reports often, so that its readings make those of the other sensors look improbable."""
    rng = np.random.default_rng(5)
    scores = compute_statistics([simulate(rng, shares=ONE_FAST_SENSOR) for _ in range(300)])
    records = []
    for _ in range(200):
        codes, values, ages = simulate(rng, shares=ONE_FAST_SENSOR)
        records.append((codes, values + np.where(codes == 0, rng.choice([-2.0, 2.0]), 0.0), ages))
    hits = {}
    efforts: tuple[ExplanationEffort, ...] = ("fast", "full")
    for effort in efforts:
        alerts = raise_alerts(records, scores, effort)
        hits[effort] = np.array([alert.contributions[0].feature == "sensor0" for alert in alerts.values()])
    assert len(hits["full"]) > 100
    assert hits["full"].mean() > hits["fast"].mean() + 0.15


@pytest.mark.parametrize("seed", [0, 1])
def test_attributions_add_up_to_the_negative_log_density_of_the_context(seed: int) -> None:
    codes, values, ages = simulate(np.random.default_rng(seed), 30)
    values[20] += 3.0
    explanation = explain_one(codes, values, ages, neighbors=30)
    assert len(explanation.contributions) == 30
    lag = np.abs(ages[:, None] - ages)
    covariance = LEVEL + SLOW * np.exp(-lag / SLOW_SCALE) + NOISE * np.eye(30)
    covariance += (codes[:, None] == codes) * OWN * np.exp(-lag / OWN_SCALE)
    normal = values.copy()
    normal[20] -= 3.0
    # Without the outlier, the process is the exact density, whatever the order.
    parts = explain_one(codes, normal, ages, neighbors=30).contributions
    sign, log_determinant = np.linalg.slogdet(covariance)
    expected = 0.5 * (normal @ np.linalg.solve(covariance, normal) + log_determinant + 30 * np.log(2 * np.pi))
    total = sum(part.attribution or 0.0 for part in parts)
    assert sign == 1
    assert abs(total - expected) < 0.05 * 30
    # The leave-one-out surprisal of a Gaussian is known, too.
    precision = np.linalg.inv(covariance)
    variance = 1 / np.diag(precision)
    residual = variance * (precision @ normal)
    by_time = {
        round(age * 1e6): 0.5 * (r**2 / v + np.log(2 * np.pi * v))
        for age, r, v in zip(ages, residual, variance, strict=True)
    }
    for part in parts:
        assert part.leave_one_out is not None
        assert part.time is not None
        assert abs(part.leave_one_out - by_time[part.time]) < 0.1 * (1 + abs(by_time[part.time]))


@settings(max_examples=num_examples(10), deadline=None)
@given(seed=st.integers(0, 99), num_readings=st.integers(2, 9))
def test_attributions_add_up_to_the_mean_over_orders_of_any_network(seed: int, num_readings: int) -> None:
    model = make_random_model(seed % 3)
    codes, values, ages = (t[0].numpy() for t in draw_contexts(1, num_readings, seed))
    raw_values = model.schema.denormalise(codes, values)
    times = np.arange(num_readings)
    parts = explain_context(model, codes, raw_values, ages, times, "r", {}).contributions
    permutation = findings._make_rng("r").permutation(num_readings)
    tree = build_order_tree(0, num_readings, is_mirrored=True)
    with torch.inference_mode():
        orders = permutation[tree.reading_index[tree.paths]]
        batch = (torch.from_numpy(array[orders]) for array in (codes, model.schema.normalise(codes, raw_values), ages))
        features, order_values, order_ages = batch
        log_prob = model.log_prob(features, order_values, ages=order_ages)
    assert sum(part.attribution or 0.0 for part in parts) == pytest.approx(-float(log_prob.sum(1).mean()), rel=1e-9)
    last = {int(times[reading]): -log_prob[orders[:, -1] == reading, -1].mean() for reading in range(num_readings)}
    for part in parts:
        assert part.time is not None
        assert part.leave_one_out == pytest.approx(float(last[part.time]), rel=1e-6, abs=1e-9)


def test_expected_ranges_contain_nine_of_ten_normal_readings() -> None:
    rng = np.random.default_rng(3)
    is_inside = []
    for _ in range(40):
        codes, values, ages = simulate(rng, 40)
        for part in explain_one(codes, values, ages).contributions:
            assert isinstance(part.value, float)
            assert part.expected.low is not None
            assert part.expected.high is not None
            is_inside.append(part.expected.low <= part.value <= part.expected.high)
    assert len(is_inside) == 1600
    assert 0.87 < np.mean(is_inside) < 0.93


def test_suspects_are_the_readings_of_the_faulty_sensor_since_the_onset() -> None:
    rng = np.random.default_rng(11)
    num_alike = 0
    for _ in range(12):
        codes, values, ages = simulate(rng)
        is_faulty = (codes == 2) & (ages > 0.6 * DURATION)
        values[is_faulty] += 2.0
        explanation = explain_one(codes, values, ages)
        suspects = [part for part in explanation.contributions if part.suspect]
        assert explanation.contributions[: len(suspects)] == tuple(suspects)
        assert {part.feature for part in suspects} == {"sensor2"}
        assert {part.unit for part in suspects} == {"bar"}
        faulty_times = set(np.round(1e6 * ages[is_faulty]).astype(int).tolist())
        num_alike += len({part.time for part in suspects} ^ faulty_times) <= 1
        # The range is that of the record without the fault, because the suspects do not vouch for each other.
        faulty_pairs = zip(ages[is_faulty].tolist(), values[is_faulty].tolist(), strict=True)
        true_values = {round(1e6 * age): value - 2.0 for age, value in faulty_pairs}
        for part in suspects[:2]:
            assert part.time is not None
            if part.time in true_values:
                assert part.expected.median == pytest.approx(true_values[part.time], abs=1.0)
        surprises = [part.surprise for part in explanation.contributions[len(suspects) :]]
        assert surprises == sorted(surprises, reverse=True)
    assert num_alike >= 8


def test_compiled_kernels_and_pytorch_explain_alike() -> None:
    codes, values, ages = simulate(np.random.default_rng(4), 25)
    values[codes == 1] += 1.5
    times = np.arange(25)
    kernels = get_kernels()
    compiled = explain_context(kernels.parameters, codes, values, ages, times, "r", {}, "full", kernels)
    reference = explain_context(kernels.parameters, codes, values, ages, times, "r", {}, "full", None)
    assert [part.suspect for part in compiled.contributions] == [part.suspect for part in reference.contributions]
    by_time = {part.time: part for part in reference.contributions}
    for part in compiled.contributions:
        other = by_time[part.time]
        for name in ("surprise", "attribution", "leave_one_out", "relief"):
            assert getattr(part, name) == pytest.approx(getattr(other, name), rel=0.01, abs=0.01)


def test_a_context_without_suspects_has_none() -> None:
    """All readings are as expected: the alert followed from readings before the context."""
    codes, ages = np.array([0, 1, 2, 0, 1, 2]), 60.0 * np.arange(6, dtype=np.float64)
    explanation = explain_one(codes, np.zeros(6, np.float64), ages)
    assert len(explanation.contributions) == 6
    assert not any(part.suspect for part in explanation.contributions)
    assert explanation.silenced_by is None


def test_only_some_readings_of_a_large_context_are_compared_in_many_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain_contexts, "MAX_CONTEXT_CANDIDATES", 5)
    codes, values, ages = simulate(np.random.default_rng(6), 20)
    values[15] += 4.0
    parts = explain_one(codes, values, ages).contributions
    assert len(parts) == 20
    assert sum(part.leave_one_out is not None for part in parts) == 5
    assert all(part.attribution is not None for part in parts)
    assert parts[0].suspect
    assert parts[0].time == round(1e6 * ages[15])


def test_context_features_and_no_effort_have_no_contributions() -> None:
    codes, values, ages = simulate(np.random.default_rng(6), 20)
    assert explain_one(codes, values, ages, "off") == Explanation(())
    features = tuple(replace(feature, context=i == 0) for i, feature in enumerate(PROCESS_SCHEMA.features))
    model = DEformer(replace(PROCESS_SCHEMA, features=features), EXACT).eval()
    times = np.arange(20)
    efforts: tuple[ExplanationEffort, ...] = ("fast", "full")
    for effort in efforts:
        parts = explain_context(model, codes, values, ages, times, "r", {}, effort).contributions
        assert len(parts) == (codes != 0).sum()
        assert "sensor0" not in {part.feature for part in parts}
        only_context = explain_context(model, codes * 0, values, ages, times, "r", {}, effort)
        assert only_context == Explanation(())


def test_an_alert_has_one_contribution_for_each_reading_of_its_context() -> None:
    readings = [("r", i % 2, 0.1, i * MINUTE) for i in range(10)]
    readings += [("r", 2, 1e4 * i, i * MINUTE) for i in range(10, 20)]
    batch = make_batch(readings)
    whole = make_engine(effort="full").handle(batch, 1).alerts
    assert whole
    engine = make_engine(effort="full")
    single = [alert for reading in readings for alert in engine.handle(make_batch([reading]), 1).alerts]
    # Explanations do not depend on how the input is divided into batches.
    assert [(alert.id, alert.contributions) for alert in whole] == [(alert.id, alert.contributions) for alert in single]
    for alert in whole:
        times = [part.time for part in alert.contributions]
        assert len(times) == len(set(times))
        assert (alert.raised_at - 1) * MINUTE in times
        assert all(part.attribution is not None for part in alert.contributions)


def test_the_line_of_an_alert_names_a_sensor_once() -> None:
    readings = [("r", i % 2, 0.1, i * MINUTE) for i in range(10)]
    readings += [("r", 2, 1e4 * i, i * MINUTE) for i in range(10, 20)]
    alert = make_engine(effort="full").handle(make_batch(readings), 1).alerts[-1]
    suspects = tuple(replace(part, suspect=part.feature == "sensor2") for part in alert.contributions)
    ordered = tuple(sorted(suspects, key=lambda part: not part.suspect))
    assert sum(part.suspect for part in ordered) > 1
    assert format_alert_line(replace(alert, contributions=ordered, evidence=None)).count("sensor2") == 1


@given(
    num_given=st.integers(0, 3),
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=7),
)
def test_orders_of_a_chain_tree_keep_chains_together(num_given: int, lengths: list[int]) -> None:
    tree = build_chain_tree(num_given, lengths)
    ends = num_given + np.cumsum(lengths)
    chains = [list(range(end - length, end)) for end, length in zip(ends.tolist(), lengths, strict=True)]
    orders = [tree.reading_index[path].tolist() for path in tree.paths]
    assert len(orders) == 2 * len(chains)
    for i, order in enumerate(orders):
        chain = chains[i % len(chains)]
        assert order[:num_given] == list(range(num_given))
        assert order[-len(chain) :] == chain
        assert sorted(order) == list(range(num_given + sum(lengths)))
        starts = sorted(order.index(chain[0]) for chain in chains)
        assert all(order[start] in [chain[0] for chain in chains] for start in starts)
    for path in tree.paths:
        for k, node in enumerate(path.tolist()):
            assert set(np.flatnonzero(tree.ancestor_mask[node])) == set(path[:k].tolist())


@settings(max_examples=num_examples(15), deadline=None)
@given(seed=st.integers(0, 99), lengths=st.lists(st.integers(1, 3), min_size=1, max_size=4), is_chain=st.booleans())
def test_tree_conditionals_of_irregular_readings_equal_those_of_each_order(
    seed: int, lengths: list[int], is_chain: bool
) -> None:
    model, num_given = make_random_model(seed % 3), seed % 3
    codes, values, ages = draw_contexts(2, num_given + sum(lengths), seed)
    tree = build_chain_tree(num_given, lengths) if is_chain else build_order_tree(num_given, sum(lengths), 0, True)
    with torch.inference_mode():
        conditional = compute_tree_conditionals(model, tree, codes, values, ages=ages)
        actual = conditional.log_prob(values[:, tree.reading_index])
        for path in tree.paths:
            order = tree.reading_index[path]
            expected = model.conditionals(codes[:, order], values[:, order], ages=ages[:, order])
            torch.testing.assert_close(actual[:, path], expected.log_prob(values[:, order]), rtol=1e-8, atol=1e-8)
