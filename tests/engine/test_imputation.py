"""Imputation and sampling: against the forward pass without a cache, and against known distributions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deformer_stream.engine import imputation
from deformer_stream.kernels.torch_kv_cache import TorchKVCache
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.schema import LINEAR_LIMIT, Feature, Schema
from tests.effort import num_examples
from tests.engine.random_models import configs, make_model, schemas
from tests.models import CONFIG, SCHEMA, draw_linear_records, make_small_model, train_linear_model

Floats = NDArray[np.float64]

KOLMOGOROV_SMIRNOV_BOUND = 1.95
"""Critical value of √n · D at a significance level of 0.1%."""


@pytest.fixture(scope="module")
def linear() -> DEformer:
    """Return a trained model of records with y = 2x + 1 and the sign of x."""
    return train_linear_model()


def draw_incomplete_records(schema: Schema, n: int, seed: int, missing_share: float) -> Floats:
    """Draw (n, F) raw values and label codes, including unseen labels, of which a share is missing."""
    rng = np.random.default_rng(seed)
    values = np.empty((n, len(schema)))
    for f, feature in enumerate(schema.features):
        num_labels = len(feature.labels)
        if num_labels:
            values[:, f] = rng.integers(0, num_labels + 1, n)
        else:
            values[:, f] = rng.normal(feature.location, feature.scale, n)
    values[rng.random(values.shape) < missing_share] = np.nan
    return values


@settings(max_examples=num_examples(25), deadline=None)
@given(schemas(max_features=8, context=True), configs, st.sampled_from([0.0, 0.3, 0.7, 1.0]), st.integers(0, 99))
def test_imputed_values_equal_those_of_the_uncached_path(
    schema: Schema, config: ModelConfig, missing_share: float, seed: int
) -> None:
    model = make_model(schema, config, seed)
    values = draw_incomplete_records(schema, 6, seed, missing_share)
    rng = np.random.default_rng(seed)
    is_requested = np.isnan(values) & (rng.random(values.shape) < 0.8)
    imputed = imputation.impute(model, values, is_requested, 0.5)
    for r, f in np.ndindex(values.shape):
        feature = schema.features[f]
        is_imputed = is_requested[r, f] and not feature.context
        assert is_imputed == (not np.isnan(imputed.median[r, f]))
        for part in (imputed.low, imputed.high, imputed.mean, imputed.mode):
            assert (is_imputed and not feature.labels) == (not np.isnan(part[r, f]))
        if not is_imputed:
            continue
        present = np.flatnonzero(~np.isnan(values[r]))
        codes = np.append(present, f)
        row = np.append(schema.normalise(present, values[r, present]), 0.0)
        with torch.inference_mode():
            conditional = model.conditionals(torch.from_numpy(codes[None]), torch.from_numpy(row[None]))[:, -1]
            if feature.labels:
                mass = conditional.log_mass[0, : len(feature.labels)]
                assert mass[int(imputed.median[r, f])] == mass.max()
            else:
                quantiles = [conditional.quantile(q).numpy() for q in (0.25, 0.5, 0.75)]
                expected = [schema.denormalise(np.array([f]), quantile)[0] for quantile in quantiles]
                actual = [imputed.low[r, f], imputed.median[r, f], imputed.high[r, f]]
                np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)
                if conditional.quadrature_points()[0].abs().max() < LINEAR_LIMIT:
                    mean = schema.denormalise(np.array([f]), conditional.mean().numpy())[0]
                    assert imputed.mean[r, f] == pytest.approx(mean, rel=1e-6, abs=1e-6)


def test_complete_records_are_not_imputed(linear: DEformer) -> None:
    for n in (0, 3):
        imputed = imputation.impute(linear, np.zeros((n, 3)), np.ones((n, 3), bool))
        assert imputed.median.shape == (n, 3)
        assert np.isnan(imputed.median).all()


def test_imputed_values_follow_the_linear_relation(linear: DEformer) -> None:
    truth = draw_linear_records(400, 12)
    values = truth.copy()
    values[:200, 1] = np.nan
    values[200:, 0] = np.nan
    values[::3, 2] = np.nan
    imputed = imputation.impute(linear, values, np.isnan(values), 0.9)
    is_missing = np.isnan(values[:, :2])
    error = np.abs(imputed.median[:, :2] - truth[:, :2])[is_missing]
    assert np.median(error) < 0.15
    is_covered = ((imputed.low <= truth) & (truth <= imputed.high))[:, :2][is_missing]
    assert 0.8 < is_covered.mean() <= 1.0
    has_clear_sign = np.isnan(values[:, 2]) & (np.abs(truth[:, 0]) > 0.3)
    assert (imputed.median[has_clear_sign, 2] == truth[has_clear_sign, 2]).mean() > 0.95


def test_outlier_does_not_push_imputed_values_out_of_bounds() -> None:
    """Two features are strongly correlated, and one of them is a million: the other stays within its raw bounds."""
    training_range = {"low": -3.0, "high": 4.0}
    schema = Schema((Feature("a", "continuous", **training_range), Feature("b", "continuous", **training_range)))
    model = DEformer(schema, replace(CONFIG, gaussians=1)).eval()
    assert model.gaussians is not None
    model.gaussians.covariances.copy_(torch.tensor([[1.0, 0.99], [0.99, 1.0]]))
    values = np.array([[1e6, np.nan], [1.0, np.nan], [-1e6, np.nan]])
    imputed = imputation.impute(model, values, np.isnan(values))
    assert imputed.median[:, 1] == pytest.approx([11.0, 0.99, -10.0], abs=0.1)
    assert imputed.mean[:, 1] == pytest.approx([11.0, 0.99, -10.0], abs=0.3)
    assert (imputed.low[:, 1] <= imputed.median[:, 1]).all()
    assert (imputed.median[:, 1] <= imputed.high[:, 1]).all()
    assert imputed.high[:, 1].max() == 11.0


def test_quantiles_increase_and_agree_with_imputed_values(linear: DEformer) -> None:
    values = draw_linear_records(60, 4)
    values[:, 1] = np.nan
    values[::2, 2] = np.nan
    quantiles = imputation.impute_quantiles(linear, values, np.isnan(values), (0.05, 0.3, 0.5, 0.95))
    imputed = imputation.impute(linear, values, np.isnan(values), 0.9)
    assert (np.isnan(quantiles) == ~(np.isnan(values) & ~linear.schema.is_discrete)).all()
    low, _, median, high = quantiles[:, :, 1]
    assert (np.diff(quantiles[:, :, 1], axis=0) > 0).all()
    np.testing.assert_allclose([low, median, high], [imputed.low[:, 1], imputed.median[:, 1], imputed.high[:, 1]])


def test_mode_has_the_highest_density(linear: DEformer) -> None:
    values = draw_linear_records(40, 6)
    values[:, 1] = np.nan
    mode = imputation.impute(linear, values, np.isnan(values)).mode[:, 1]
    ((_, codes, conditional),) = imputation.iterate_conditionals(linear, values, np.isnan(values))
    grid = torch.linspace(-6.0, 6.0, 4001).expand(40, -1)
    highest = torch.stack([conditional.log_prob(point) for point in grid.T], -1).max(-1).values
    at_mode = conditional.log_prob(torch.from_numpy(linear.schema.normalise(codes, mode)).to(linear.dtype))
    assert (at_mode > highest - 0.05).all()


def test_joint_draws_preserve_dependences(linear: DEformer) -> None:
    """y depends on x and both are missing: single medians would put y at its mean, joint draws stay on the line."""
    values = np.full((30, 3), np.nan)
    values[:, 2] = np.arange(30) % 2
    values[:5, 0] = 1.0
    draws = imputation.sample_completions(linear, values, np.isnan(values), 20, seed=3)
    assert draws.shape == (20, 30, 3)
    assert not np.isnan(draws).any()
    is_present = ~np.isnan(values)
    assert (draws[:, is_present] == values[is_present]).all()
    x, y, sign = np.moveaxis(draws, 2, 0)
    assert np.median(np.abs(y - 2 * x - 1)) < 0.2
    assert x[:, 5:].std() > 0.5
    assert ((x > 0) == sign)[:, 5:][np.abs(x[:, 5:]) > 0.3].mean() > 0.95
    repeated = imputation.sample_completions(linear, values, np.isnan(values), 20, seed=3)
    np.testing.assert_array_equal(draws, repeated)
    assert (draws != imputation.sample_completions(linear, values, np.isnan(values), 20, seed=4)).any()


def test_single_draw_follows_its_conditional_distribution(linear: DEformer) -> None:
    values = np.array([[0.7, np.nan, 1.0]])
    draws = imputation.sample_completions(linear, values, np.isnan(values), 2000, seed=0)[:, 0, 1]
    ((_, codes, conditional),) = imputation.iterate_conditionals(linear, values, np.isnan(values))
    x = torch.from_numpy(linear.schema.normalise(codes.repeat(2000), draws)).to(linear.dtype)
    u = np.sort(conditional[[0] * 2000].cdf(x).numpy())
    assert np.abs(u - np.linspace(0, 1, 2000)).max() < KOLMOGOROV_SMIRNOV_BOUND / np.sqrt(2000)


@settings(max_examples=num_examples(15), deadline=None)
@given(schemas(max_features=8, context=True), configs, st.sampled_from([0.0, 0.4, 1.0]), st.integers(0, 99))
def test_completions_are_complete_and_within_bounds(
    schema: Schema, config: ModelConfig, missing_share: float, seed: int
) -> None:
    model = make_model(schema, config, seed)
    values = draw_incomplete_records(schema, 5, seed, missing_share)
    is_requested = np.isnan(values) & (np.random.default_rng(seed).random(values.shape) < 0.8)
    draws = imputation.sample_completions(model, values, is_requested, 3, seed, cache_bytes=1)
    is_drawn = is_requested & ~schema.is_context
    assert (np.isnan(draws) == (np.isnan(values) & ~is_drawn)).all()
    low, high = imputation.compute_raw_bounds(schema)
    assert ((low <= draws) & (draws <= high))[:, is_drawn].all()
    for f in np.flatnonzero(schema.is_discrete):
        assert set(draws[:, is_drawn[:, f], f].ravel()) <= set(range(len(schema.features[f].labels)))
    repeated = imputation.sample_completions(model, values, is_requested, 3, seed, cache_bytes=1)
    np.testing.assert_allclose(draws, repeated)


def test_sampled_records_follow_the_linear_relation(linear: DEformer) -> None:
    records = np.concatenate(list(imputation.sample_records(linear, 3000, 5)))
    assert records.shape == (3000, 3)
    x, y, sign = records.T
    assert abs(x.mean()) < 0.15
    assert 0.8 < x.std() < 1.2
    assert np.median(np.abs(y - 2 * x - 1)) < 0.2
    has_clear_sign = np.abs(x) > 0.3
    assert ((x > 0) == sign)[has_clear_sign].mean() > 0.95
    assert set(sign) == {0.0, 1.0}


@settings(max_examples=num_examples(15), deadline=None)
@given(schemas(max_features=8, context=True), configs, st.integers(0, 99))
def test_sampled_records_are_complete_and_have_known_labels(schema: Schema, config: ModelConfig, seed: int) -> None:
    model = make_model(schema, config, seed)
    records = np.concatenate(list(imputation.sample_records(model, 9, seed)))
    assert np.array_equal(np.isnan(records), np.broadcast_to(schema.is_context, records.shape))
    for f, feature in enumerate(schema.features):
        if feature.labels:
            assert set(records[:, f]) <= set(range(len(feature.labels)))
    np.testing.assert_allclose(records, np.concatenate(list(imputation.sample_records(model, 9, seed))))


def test_cache_bytes_bound_the_batch_size() -> None:
    model = make_small_model()
    batches = list(imputation.sample_records(model, 10, 0, cache_bytes=1))
    assert [len(batch) for batch in batches] == [1] * 10
    assert sum(map(len, imputation.sample_records(model, 2500, 0))) == 2500
    assert list(imputation.sample_records(model, 0, 0)) == []


def test_first_sampled_readings_follow_their_conditional_distribution() -> None:
    schema = Schema((Feature("x", "continuous"), Feature("k", "discrete", labels=("a", "b", "c"))))
    config = ModelConfig(d_model=16, layers=1, heads=1, feedforward=16, mixtures=2, hidden=(8,))
    model = make_model(schema, config, 3, torch.float32)
    num_records = imputation.MAX_RECORDS_PER_BATCH
    records = np.concatenate(list(imputation.sample_records(model, num_records, 1)))
    with torch.inference_mode():
        conditional = model.conditionals(torch.tensor([[0]]), torch.zeros(1, 1))
    first_code = np.argsort(np.random.default_rng(1).random((num_records, 2)), 1)[:, 0]  # the orders of sample_records
    x = torch.from_numpy(records[first_code == 0, 0]).float()
    u = np.sort(conditional[0].cdf(x[:, None]).numpy()[:, 0])
    assert np.abs(u - np.linspace(0, 1, len(u))).max() < KOLMOGOROV_SMIRNOV_BOUND / np.sqrt(len(u))


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
def test_values_are_rounded_to_the_quantum(
    quantum: float | None, low: float | None, value: float, expected: float
) -> None:
    schema = Schema((Feature("a", "continuous"), Feature("x", "continuous", quantum=quantum, low=low)))
    rounded = imputation.round_to_quantum(schema, np.array([1, 0]), np.array([value, value]))
    assert rounded.tolist() == [pytest.approx(expected, abs=1e-12), value]


def test_rounded_values_have_short_decimal_representations() -> None:
    values = imputation.round_to_quantum(SCHEMA, np.zeros(200, np.int64), np.linspace(5.0, 35.0, 200))
    assert SCHEMA.features[0].quantum == 0.1
    assert all(float(f"{value:.1f}") == value for value in values.tolist())


def test_cache_pages_are_initialised_with_zeros() -> None:
    """Attention gives unused places of a page the weight 0, and 0 · NaN would be NaN."""
    model = make_small_model()
    for _ in range(20):
        garbage = [torch.full((size,), float("nan")) for size in (100, 1000, 10_000, 100_000)]
        del garbage
        cache = TorchKVCache(model, 300_000)
        assert all(not pool.any() for pool in (*cache.keys, *cache.values))
        assert all(pool.data_ptr() % 64 == 0 for pool in (*cache.keys, *cache.values))
