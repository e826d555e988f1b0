"""Filling and drawing: against the whole-record path, and against a truth that is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.engine import queries
from deformer_stream.kernels.kv_cache import KeyValueCache
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.schema import LINEAR, Feature, Schema
from tests.engine.worlds import configs, model_of, schemas
from tests.models import CONFIG, SCHEMA, linear_model, linear_records, small_model


@pytest.fixture(scope="module")
def linear() -> DEformer:
    return linear_model()


def gappy(schema: Schema, n: int, seed: int, share: float) -> np.ndarray:
    """(n, F) raw values and label codes, unseen ones among them, NaN where missing."""
    rng = np.random.default_rng(seed)
    values = np.empty((n, len(schema)))
    for f, feature in enumerate(schema.features):
        labels = len(feature.labels)
        values[:, f] = rng.integers(0, labels + 1, n) if labels else rng.normal(feature.location, feature.scale, n)
    values[rng.random(values.shape) < share] = np.nan
    return values


@settings(max_examples=25, deadline=None)
@given(schemas(most=8, context=True), configs, st.sampled_from([0.0, 0.3, 0.7, 1.0]), st.integers(0, 99))
def test_fill_equals_the_whole_record_path(schema: Schema, config: ModelConfig, share: float, seed: int) -> None:
    model = model_of(schema, config, seed)
    values = gappy(schema, 6, seed, share)
    rng = np.random.default_rng(seed)
    asked = np.isnan(values) & (rng.random(values.shape) < 0.8)
    filled = queries.fill(model, values, asked, 0.5)
    for r, f in np.ndindex(values.shape):
        feature = schema.features[f]
        wanted = asked[r, f] and not feature.context
        assert wanted == (not np.isnan(filled.value[r, f]))
        for part in (filled.low, filled.high, filled.mean, filled.mode):
            assert (wanted and not feature.labels) == (not np.isnan(part[r, f]))
        if not wanted:
            continue
        known = np.flatnonzero(~np.isnan(values[r]))
        codes = np.append(known, f)
        row = np.append(schema.normalise(known, values[r, known]), 0.0)
        with torch.inference_mode():
            asks = model.conditionals(torch.from_numpy(codes[None]), torch.from_numpy(row[None]))[:, -1]
            if feature.labels:
                mass = asks.log_mass[0, : len(feature.labels)]
                assert mass[int(filled.value[r, f])] == mass.max()
            else:
                raw = [schema.denormalise(np.array([f]), asks.quantile(q).numpy())[0] for q in (0.25, 0.5, 0.75)]
                found = [filled.low[r, f], filled.value[r, f], filled.high[r, f]]
                np.testing.assert_allclose(found, raw, rtol=1e-6, atol=1e-6)
                if asks.nodes()[0].abs().max() < LINEAR:
                    mean = schema.denormalise(np.array([f]), asks.mean().numpy())[0]
                    assert filled.mean[r, f] == pytest.approx(mean, rel=1e-6, abs=1e-6)


def test_fill_of_nothing(linear: DEformer) -> None:
    for n in (0, 3):
        filled = queries.fill(linear, np.zeros((n, 3)), np.ones((n, 3), bool))
        assert filled.value.shape == (n, 3)
        assert np.isnan(filled.value).all()


def test_fill_knows_the_line(linear: DEformer) -> None:
    truth = linear_records(400, 12)
    values = truth.copy()
    values[:200, 1] = np.nan
    values[200:, 0] = np.nan
    values[::3, 2] = np.nan
    filled = queries.fill(linear, values, np.isnan(values), 0.9)
    gaps = np.isnan(values[:, :2])
    error = np.abs(filled.value[:, :2] - truth[:, :2])[gaps]
    assert np.median(error) < 0.15
    inside = ((filled.low <= truth) & (truth <= filled.high))[:, :2][gaps]
    assert 0.8 < inside.mean() <= 1.0
    clear = np.isnan(values[:, 2]) & (np.abs(truth[:, 0]) > 0.3)
    assert (filled.value[clear, 2] == truth[clear, 2]).mean() > 0.95


def test_a_wild_reading_does_not_throw_the_gap_beside_it_out_of_reach() -> None:
    """Two features that move together: what a million suggests for the other lies beyond anything training saw."""
    ends = {"low": -3.0, "high": 4.0}
    schema = Schema((Feature("a", "continuous", **ends), Feature("b", "continuous", **ends)))
    model = DEformer(schema, replace(CONFIG, gaussians=1)).eval()
    assert model.gaussians is not None
    model.gaussians.covariances.copy_(torch.tensor([[1.0, 0.99], [0.99, 1.0]]))
    values = np.array([[1e6, np.nan], [1.0, np.nan], [-1e6, np.nan]])
    filled = queries.fill(model, values, np.isnan(values))
    assert filled.value[:, 1] == pytest.approx([11.0, 0.99, -10.0], abs=0.1)
    assert filled.mean[:, 1] == pytest.approx([11.0, 0.99, -10.0], abs=0.3)
    assert (filled.low[:, 1] <= filled.value[:, 1]).all()
    assert (filled.value[:, 1] <= filled.high[:, 1]).all()
    assert filled.high[:, 1].max() == 11.0


def test_quantiles_rise_and_agree_with_what_is_filled(linear: DEformer) -> None:
    values = linear_records(60, 4)
    values[:, 1] = np.nan
    values[::2, 2] = np.nan
    found = queries.quantiles(linear, values, np.isnan(values), (0.05, 0.3, 0.5, 0.95))
    filled = queries.fill(linear, values, np.isnan(values), 0.9)
    assert (np.isnan(found) == ~(np.isnan(values) & ~linear.schema.discrete)).all()
    low, _, middle, high = found[:, :, 1]
    assert (np.diff(found[:, :, 1], axis=0) > 0).all()
    np.testing.assert_allclose([low, middle, high], [filled.low[:, 1], filled.value[:, 1], filled.high[:, 1]])


def test_the_mode_is_where_the_density_is_highest(linear: DEformer) -> None:
    values = linear_records(40, 6)
    values[:, 1] = np.nan
    mode = queries.fill(linear, values, np.isnan(values)).mode[:, 1]
    ((_, codes, conditional),) = queries.conditionals(linear, values, np.isnan(values))
    grid = torch.linspace(-6.0, 6.0, 4001).expand(40, -1)
    best = torch.stack([conditional.log_prob(point) for point in grid.T], -1).max(-1).values
    at_mode = conditional.log_prob(torch.from_numpy(linear.schema.normalise(codes, mode)).to(linear.dtype))
    assert (at_mode > best - 0.05).all()


def test_joint_draws_know_what_they_have_drawn(linear: DEformer) -> None:
    """y follows x, and neither is there: single medians would put y at its mean, joint draws keep to the line."""
    values = np.full((30, 3), np.nan)
    values[:, 2] = np.arange(30) % 2
    values[:5, 0] = 1.0
    drawn = queries.complete(linear, values, np.isnan(values), 20, seed=3)
    assert drawn.shape == (20, 30, 3)
    assert not np.isnan(drawn).any()
    there = ~np.isnan(values)
    assert (drawn[:, there] == values[there]).all()
    x, y, sign = np.moveaxis(drawn, 2, 0)
    assert np.median(np.abs(y - 2 * x - 1)) < 0.2
    assert x[:, 5:].std() > 0.5
    assert ((x > 0) == sign)[:, 5:][np.abs(x[:, 5:]) > 0.3].mean() > 0.95
    np.testing.assert_array_equal(drawn, queries.complete(linear, values, np.isnan(values), 20, seed=3))
    assert (drawn != queries.complete(linear, values, np.isnan(values), 20, seed=4)).any()


def test_a_draw_of_one_reading_has_its_conditional_law(linear: DEformer) -> None:
    values = np.array([[0.7, np.nan, 1.0]])
    drawn = queries.complete(linear, values, np.isnan(values), 2000, seed=0)[:, 0, 1]
    ((_, codes, conditional),) = queries.conditionals(linear, values, np.isnan(values))
    z = torch.from_numpy(linear.schema.normalise(codes.repeat(2000), drawn)).to(linear.dtype)
    u = np.sort(conditional[[0] * 2000].cdf(z).numpy())
    assert np.abs(u - np.linspace(0, 1, 2000)).max() < 1.95 / np.sqrt(2000)  # Kolmogorov–Smirnov, 0.1%


@settings(max_examples=15, deadline=None)
@given(schemas(most=8, context=True), configs, st.sampled_from([0.0, 0.4, 1.0]), st.integers(0, 99))
def test_completions_are_whole_and_within_reach(schema: Schema, config: ModelConfig, share: float, seed: int) -> None:
    model = model_of(schema, config, seed)
    values = gappy(schema, 5, seed, share)
    asked = np.isnan(values) & (np.random.default_rng(seed).random(values.shape) < 0.8)
    drawn = queries.complete(model, values, asked, 3, seed, memory=1)
    wanted = asked & ~schema.context
    assert (np.isnan(drawn) == (np.isnan(values) & ~wanted)).all()
    low, high = queries.reaches(schema)
    assert ((low <= drawn) & (drawn <= high))[:, wanted].all()
    for f in np.flatnonzero(schema.discrete):
        assert set(drawn[:, wanted[:, f], f].ravel()) <= set(range(len(schema.features[f].labels)))
    np.testing.assert_allclose(drawn, queries.complete(model, values, asked, 3, seed, memory=1))


def test_samples_lie_on_the_line(linear: DEformer) -> None:
    drawn = np.concatenate(list(queries.sample(linear, 3000, 5)))
    assert drawn.shape == (3000, 3)
    x, y, sign = drawn.T
    assert abs(x.mean()) < 0.15
    assert 0.8 < x.std() < 1.2
    assert np.median(np.abs(y - 2 * x - 1)) < 0.2
    clear = np.abs(x) > 0.3
    assert ((x > 0) == sign)[clear].mean() > 0.95
    assert set(sign) == {0.0, 1.0}


@settings(max_examples=15, deadline=None)
@given(schemas(most=8, context=True), configs, st.integers(0, 99))
def test_samples_are_whole_and_possible(schema: Schema, config: ModelConfig, seed: int) -> None:
    model = model_of(schema, config, seed)
    drawn = np.concatenate(list(queries.sample(model, 9, seed)))
    assert np.array_equal(np.isnan(drawn), np.broadcast_to(schema.context, drawn.shape))
    for f, feature in enumerate(schema.features):
        if feature.labels:
            assert set(drawn[:, f]) <= set(range(len(feature.labels)))
    np.testing.assert_allclose(drawn, np.concatenate(list(queries.sample(model, 9, seed))))


def test_samples_within_a_bound_of_memory() -> None:
    model = small_model()
    blocks = list(queries.sample(model, 10, 0, memory=1))
    assert [len(block) for block in blocks] == [1] * 10
    assert sum(map(len, queries.sample(model, 2500, 0))) == 2500
    assert list(queries.sample(model, 0, 0)) == []


def test_sampling_draws_from_the_conditionals() -> None:
    """The readings drawn first, against the law that the model states."""
    schema = Schema((Feature("x", "continuous"), Feature("k", "discrete", labels=("a", "b", "c"))))
    model = model_of(schema, ModelConfig(16, 1, 1, 16, 2, hidden=(8,)), 3, torch.float32)
    drawn = np.concatenate(list(queries.sample(model, queries.MOST_DRAWN, 1)))
    with torch.inference_mode():
        first = model.conditionals(torch.tensor([[0]]), torch.zeros(1, 1))
    order = np.argsort(np.random.default_rng(1).random((queries.MOST_DRAWN, 2)), 1)[:, 0]
    x = torch.from_numpy(drawn[order == 0, 0]).float()
    u = np.sort(first[0].cdf(x[:, None]).numpy()[:, 0])
    assert np.abs(u - np.linspace(0, 1, len(u))).max() < 1.95 / np.sqrt(len(u))  # Kolmogorov–Smirnov, 0.1%


@pytest.mark.parametrize(
    ("quantum", "low", "value", "expected"),
    [
        (0.1, 5.0, 20.3000001, 20.3),
        (0.1, 0.1, 0.31, 0.3),
        (0.5, 0.25, 1.1, 1.25),
        (1.0, 3.0, 7.4, 7.0),
        (1.0, None, -0.6, -1.0),
        (250.0, 0.0, 600.0, 500.0),
        (1 / 3, 0.0, 0.9, 1.0),
        (None, 0.0, 0.123, 0.123),
        (0.001, -5.0, -4.9996, -5.0),
    ],
)
def test_on_grid(quantum: float | None, low: float | None, value: float, expected: float) -> None:
    schema = Schema((Feature("a", "continuous"), Feature("x", "continuous", quantum=quantum, low=low)))
    found = queries.on_grid(schema, np.array([1, 0]), np.array([value, value]))
    assert found.tolist() == [pytest.approx(expected, abs=1e-12), value]


def test_on_grid_gives_short_numbers() -> None:
    feature = SCHEMA.features[0]
    values = queries.on_grid(SCHEMA, np.zeros(200, np.int64), np.linspace(5.0, 35.0, 200))
    assert feature.quantum == 0.1
    assert all(float(f"{v:.1f}") == v for v in values.tolist())


def test_pages_begin_as_zeros() -> None:
    """What a page does not hold is given the weight 0, and 0 · NaN would be NaN."""
    model = small_model()
    for _ in range(20):
        garbage = [torch.full((size,), float("nan")) for size in (100, 1000, 10_000, 100_000)]
        del garbage
        cache = KeyValueCache(model, 300_000)
        assert all(not pool.any() for pool in (*cache.keys, *cache.values))
        assert all(pool.data_ptr() % 64 == 0 for pool in (*cache.keys, *cache.values))
