"""Tests that complete records and cached steps give equal conditionals, and that no reading depends on a later one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.model.config import PRESETS
from deformer_stream.model.constants import ACTIVATION_CODES
from deformer_stream.model.deformer import DEformer, KVCacheView, ModelConfig, apply_layer
from deformer_stream.model.layers import ACTIVATIONS, get_activation
from deformer_stream.model.parameters import count_state_values, describe_tensors
from deformer_stream.model.schema import Feature, Schema
from tests.effort import num_examples
from tests.engine.random_models import configs, draw_records, make_model, normalise_values, schemas

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
seeds = st.integers(0, 2**16)


def make_continuous_schema(num_features: int) -> Schema:
    return Schema(tuple(Feature(f"f{i}", "continuous") for i in range(num_features)))


def log_prob_by_steps(model: DEformer, features: torch.Tensor, values: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """Return the log-likelihoods (N, L) from calls of `forward_cached` for the parts of records between the cuts."""
    parts, cache, start = [], None, 0
    for stop in [*cuts, features.shape[1]]:
        if stop == start:
            continue
        f, v = features[:, start:stop], values[:, start:stop]
        output = model.prefill(f, v) if cache is None else model.forward_cached(f, v, cache)
        parts.append(output.conditional.log_prob(v))
        if cache is None:
            cached_keys, cached_values, readings = list(output.keys), list(output.values), output.readings
        else:
            cached_keys = [torch.cat(pair, 2) for pair in zip(cache.keys, output.keys, strict=True)]
            cached_values = [torch.cat(pair, 2) for pair in zip(cache.values, output.values, strict=True)]
            if readings is not None and output.readings is not None:
                readings = torch.cat([readings, output.readings], 1)
        lengths = torch.full((len(features),), cached_keys[0].shape[2])
        cache = KVCacheView(cached_keys, cached_values, lengths, readings)
        start = stop
    return torch.cat(parts, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@settings(max_examples=num_examples(100), deadline=None)
@given(data=st.data(), schema=schemas(), config=configs, seed=seeds)
def test_any_split_into_prefill_and_steps_equals_log_prob(
    dtype: torch.dtype, data: st.DataObject, schema: Schema, config: ModelConfig, seed: int
) -> None:
    model = make_model(schema, config, seed, dtype)
    codes, raw = draw_records(schema, 3, seed)
    features, values = torch.from_numpy(codes), torch.from_numpy(normalise_values(schema, codes, raw)).to(dtype)
    with torch.inference_mode():
        expected = model.log_prob(features, values)
        num_features = len(schema)
        random_cuts = data.draw(st.lists(st.integers(1, num_features), max_size=4).map(sorted))
        for cuts in (list(range(1, num_features)), random_cuts):
            actual = log_prob_by_steps(model, features, values, cuts)
            assert (actual.sum(1) - expected.sum(1)).abs().max() < TOLERANCE[dtype]
            torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[dtype])


@settings(max_examples=num_examples(25), deadline=None)
@given(schema=schemas(max_features=12, context=True), config=configs, seed=seeds)
def test_padding_and_missing_features_do_not_change_scores(schema: Schema, config: ModelConfig, seed: int) -> None:
    model = make_model(schema, config, seed)
    codes, raw = draw_records(schema, 4, seed, missing_share=0.4)
    values = normalise_values(schema, codes, raw)
    with torch.inference_mode():
        padded = model.log_prob(torch.from_numpy(codes), torch.from_numpy(values)).numpy()
        for i in range(4):
            n = int((codes[i] >= 0).sum())
            alone = model.log_prob(torch.from_numpy(codes[i : i + 1, :n]), torch.from_numpy(values[i : i + 1, :n]))
            np.testing.assert_allclose(padded[i, :n], alone.numpy()[0], atol=1e-10)
            assert (padded[i, n:] == 0).all()
            assert (padded[i, :n][schema.is_context[codes[i, :n]]] == 0).all()


@settings(max_examples=num_examples(20), deadline=None)
@given(schema=schemas(max_features=8), config=configs, seed=seeds)
def test_no_reading_depends_on_a_later_one(schema: Schema, config: ModelConfig, seed: int) -> None:
    """Check that gradients of log-likelihoods by later values are zero, and that later identities have no effect."""
    model = make_model(schema, config, seed)
    codes, raw = draw_records(schema, 2, seed)
    features = torch.from_numpy(codes)
    values = torch.from_numpy(normalise_values(schema, codes, raw)).requires_grad_()
    log_prob = model.log_prob(features, values)
    for k in range(len(schema)):
        (gradient,) = torch.autograd.grad(log_prob[:, k].sum(), values, retain_graph=True, allow_unused=True)
        if gradient is not None:
            assert (gradient[:, k + 1 :] == 0).all()
    # Discrete values have no gradient, so also change the identities and values of the second half.
    half = len(schema) // 2
    changed_values, changed_features = values.detach().clone(), features.clone()
    changed_features[:, half:] = changed_features[:, half:].flip(1)
    changed_values[:, half:] = changed_values[:, half:].flip(1) + 1.0
    changed = model.log_prob(changed_features, changed_values)
    assert torch.equal(changed[:, :half].round(decimals=10), log_prob[:, :half].round(decimals=10))


@pytest.mark.parametrize(("memory", "tokens"), [("all", "pair"), ("values", "pair"), ("all", "single")])
def test_every_reading_depends_on_all_earlier_values(
    memory: Literal["all", "values"], tokens: Literal["pair", "single"]
) -> None:
    config = ModelConfig(d_model=16, layers=1, heads=2, feedforward=32, mixtures=3, memory=memory, tokens=tokens)
    schema = make_continuous_schema(5)
    model = make_model(schema, config)
    codes, raw = draw_records(schema, 1, 3)
    values = torch.from_numpy(raw).requires_grad_()
    log_prob = model.log_prob(torch.from_numpy(codes), values)
    for k in range(5):
        (gradient,) = torch.autograd.grad(log_prob[0, k], values, retain_graph=True)
        assert (gradient[0, : k + 1].abs() > 0).all()


def test_arrival_order_changes_scores_and_batch_order_does_not() -> None:
    schema = make_continuous_schema(6)
    model = make_model(schema, PRESETS["tiny"])
    codes, raw = draw_records(schema, 8, 1)
    features, values = torch.from_numpy(codes), torch.from_numpy(raw)
    shuffle = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(
            model.log_prob(features[shuffle], values[shuffle]), model.log_prob(features, values)[shuffle]
        )
        reverse_order = model.log_prob(features.flip(1), values.flip(1)).sum(1)
        assert (reverse_order - model.log_prob(features, values).sum(1)).abs().min() > 1e-9


def test_scores_of_extreme_values_are_finite_in_float32() -> None:
    schema = Schema((Feature("a", "continuous", scale=0.01), Feature("b", "continuous")))
    model = make_model(schema, PRESETS["tiny"], dtype=torch.float32)
    raw = np.array([[1e300, 0.0], [-1e308, 1e30], [40.0, -1e9]])
    codes = np.tile(np.arange(2), (3, 1))
    log_prob = model.log_prob(torch.from_numpy(codes), torch.from_numpy(schema.normalise(codes, raw)).float())
    assert torch.isfinite(log_prob).all()
    assert (log_prob[:, 0] < -20).all()


def test_presets_are_ordered_by_size_and_the_largest_is_that_of_the_paper() -> None:
    """The model of the paper has about 19 million parameters."""
    schema = make_continuous_schema(6)
    sizes = {name: sum(p.numel() for p in DEformer(schema, config).parameters()) for name, config in PRESETS.items()}
    assert list(sizes) == ["tiny", "small", "base", "paper"]
    assert sorted(sizes.values()) == list(sizes.values())
    assert 18.5e6 < sizes["paper"] < 20e6


@settings(max_examples=num_examples(60), deadline=None)
@given(schema=schemas(max_features=12), config=configs, exemplars=st.sampled_from([0, 5]))
def test_description_of_the_tensors_equals_the_state_dict(schema: Schema, config: ModelConfig, exemplars: int) -> None:
    has_prior_term = exemplars > 0 and config.gaussians > 0 and schema.is_linear.any()
    config = replace(config, exemplars=exemplars, prior_weight=0.5 if has_prior_term else 0.0)
    config = replace(config, marginal_weight=0.5 if exemplars and schema.is_discrete.any() else 0.0)
    if not schema.is_linear.any():
        config = replace(config, alert_prior=False)  # there is no Gaussian prior
    state_dict = DEformer(schema, config).state_dict()
    expected = {name: (tuple(t.shape), t.detach().numpy().dtype) for name, t in state_dict.items()}
    assert describe_tensors(schema, config) == expected
    assert count_state_values(schema, config) == sum(tensor.numel() for tensor in state_dict.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_model": 30}, "multiple"),
        ({"norm": "mid"}, "norm must be one of pre, post"),
        ({"activation": "silu"}, "activation must be one of gelu, relu"),
        ({"identity": "name"}, "identity must be one of embedding, coordinates, both"),
        ({"memory": "none"}, "memory must be one of all, values"),
        ({"tokens": "triple"}, "tokens must be one of pair, single"),
        ({"precision": "float16"}, "precision must be one of float32, bfloat16"),
        ({"layers": 0}, "layers must be an integer of at least 1"),
        ({"alert_prior": True}, "alert_prior needs gaussians or neighbors of at least 1"),
        ({"alert_prior": 1, "gaussians": 1}, "alert_prior is 1, but it must be true or false"),
        ({"layers": 2.5}, "layers must be an integer of at least 1"),
        ({"layers": True}, "layers must be an integer of at least 1"),
        ({"hidden": (16, 0)}, "each width in the hyperparameter hidden must be an integer of at least 1"),
        ({"gaussians": -1}, "gaussians must be an integer of at least 0"),
        ({"dropout": 1.0}, "dropout"),
        ({"prior_weight": -0.1, "gaussians": 1, "exemplars": 1}, "prior_weight is -0.1"),
        ({"prior_weight": float("nan"), "gaussians": 1, "exemplars": 1}, "prior_weight is nan"),
        ({"prior_weight": 0.5, "gaussians": 1}, "prior_weight needs gaussians and exemplars"),
        ({"prior_weight": 0.5, "exemplars": 1}, "prior_weight needs gaussians and exemplars"),
        ({"marginal_weight": -0.1, "exemplars": 1}, "marginal_weight is -0.1"),
        ({"marginal_weight": float("inf"), "exemplars": 1}, "marginal_weight is inf"),
        ({"marginal_weight": 0.5}, "marginal_weight needs exemplars"),
    ],
)
def test_invalid_hyperparameter_is_rejected_with_the_allowed_values(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{"d_model": 32, "heads": 4, **change})  # type: ignore[arg-type]


def test_unknown_activation_is_rejected_with_the_known_names() -> None:
    """An unknown name must not silently select another function, in PyTorch or in the compiled kernels."""
    with pytest.raises(ValueError, match="activation 'silu' is unknown: use one of gelu, relu"):
        get_activation("silu")


def test_activations_are_those_that_hyperparameters_allow() -> None:
    configs_by_name = {name: ModelConfig(activation=name) for name in ACTIVATIONS}  # type: ignore[arg-type]
    assert [config.activation for config in configs_by_name.values()] == list(ACTIVATIONS)
    assert ACTIVATION_CODES.keys() == ACTIVATIONS.keys()
    assert len(set(ACTIVATION_CODES.values())) == len(ACTIVATIONS)


@pytest.mark.parametrize(
    ("change", "num_tokens"), [({"memory": "values"}, 1), ({"memory": "all"}, 2), ({"tokens": "single"}, 1)]
)
def test_prefill_returns_as_many_cache_entries_per_reading_as_the_model_states(
    change: dict[str, Any], num_tokens: int
) -> None:
    config = ModelConfig(d_model=16, layers=2, heads=2, feedforward=16, mixtures=2, **change)
    model = make_model(make_continuous_schema(3), config)
    output = model.prefill(torch.tensor([[0, 1]]), torch.zeros((1, 2), dtype=torch.float64))
    assert [t.shape[2] for t in (*output.keys, *output.values)] == [2 * num_tokens] * 4
    assert model.cached_tokens_per_reading == num_tokens


@pytest.mark.parametrize("change", [{"tokens": "single"}, {"gaussians": 2}, {"neighbors": 2, "process_scales": 1}])
def test_cache_without_the_readings_that_the_model_needs_is_rejected(change: dict[str, Any]) -> None:
    config = ModelConfig(d_model=16, layers=1, heads=2, feedforward=16, mixtures=2, **change)
    model = make_model(make_continuous_schema(3), config)
    codes, values = torch.tensor([[0, 1]]), torch.zeros((1, 2), dtype=torch.float64)
    output = model.prefill(codes[:, :1], values[:, :1])
    cache = KVCacheView(output.keys, output.values, torch.tensor([1]))
    with pytest.raises(ValueError, match="has no readings"):
        model.forward_cached(codes[:, 1:], values[:, 1:], cache)


def test_identity_by_coordinates_is_rejected_if_features_have_none() -> None:
    with pytest.raises(ValueError, match="coordinates"):
        DEformer(Schema((Feature("a", "continuous"),)), ModelConfig(identity="both"))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("change", [{}, {"memory": "all"}, {"tokens": "single"}])
def test_layers_are_compiled_without_interruption(change: dict[str, Any]) -> None:
    """Compiled layers give the same densities, for records of several lengths; a part that is not compiled fails."""
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(6)))
    model = make_model(schema, ModelConfig(d_model=16, layers=2, heads=2, feedforward=32, mixtures=2, **change))
    records = [(torch.arange(n).repeat(3, 1), torch.randn(3, n, dtype=model.dtype)) for n in (6, 4, 5)]
    expected = [model.log_prob(*record) for record in records]
    model.apply_layer = torch.compile(apply_layer, backend="aot_eager", fullgraph=True)
    for record, values in zip(records, expected, strict=True):
        torch.testing.assert_close(model.log_prob(*record), values)
