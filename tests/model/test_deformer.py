"""Laws 1 to 3: whole records and cached steps agree, and nothing looks ahead."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.model.deformer import PRESETS, DEformer, KVCacheView, ModelConfig
from deformer_stream.model.schema import Feature, Schema
from tests.engine.worlds import configs, model_of, normalised, records_of, schemas

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
seeds = st.integers(0, 2**16)


def grown(model: DEformer, features: torch.Tensor, values: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """Log-likelihoods by `extend` over the pieces between the cuts."""
    parts, past, start = [], None, 0
    for stop in [*cuts, features.shape[1]]:
        if stop == start:
            continue
        f, v = features[:, start:stop], values[:, start:stop]
        extension = model.prefill(f, v) if past is None else model.forward_cached(f, v, past)
        parts.append(extension.conditional.log_prob(v))
        if past is None:
            keys, vals, readings = list(extension.keys), list(extension.values), extension.readings
        else:
            keys = [torch.cat([a, b], 2) for a, b in zip(past.keys, extension.keys, strict=True)]
            vals = [torch.cat([a, b], 2) for a, b in zip(past.values, extension.values, strict=True)]
            if readings is not None and extension.readings is not None:
                readings = torch.cat([readings, extension.readings], 1)
        past = KVCacheView(keys, vals, torch.full((len(features),), keys[0].shape[2]), readings)
        start = stop
    return torch.cat(parts, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@settings(max_examples=100, deadline=None)
@given(data=st.data(), schema=schemas(), config=configs, seed=seeds)
def test_steps_and_prefills_sum_to_log_prob(
    dtype: torch.dtype, data: st.DataObject, schema: Schema, config: ModelConfig, seed: int
) -> None:
    model = model_of(schema, config, seed, dtype)
    codes, raw = records_of(schema, 3, seed)
    features, values = torch.from_numpy(codes), torch.from_numpy(normalised(schema, codes, raw)).to(dtype)
    with torch.inference_mode():
        whole = model.log_prob(features, values)
        F = len(schema)
        cuts = data.draw(st.lists(st.integers(1, F), max_size=4).map(sorted))
        for pieces in (list(range(1, F)), cuts):
            parts = grown(model, features, values, pieces)
            assert (parts.sum(1) - whole.sum(1)).abs().max() < TOLERANCE[dtype]
            torch.testing.assert_close(parts, whole, rtol=0, atol=TOLERANCE[dtype])


@settings(max_examples=25, deadline=None)
@given(schema=schemas(most=12, context=True), config=configs, seed=seeds)
def test_padding_and_absence_change_nothing(schema: Schema, config: ModelConfig, seed: int) -> None:
    model = model_of(schema, config, seed)
    codes, raw = records_of(schema, 4, seed, missing=0.4)
    values = normalised(schema, codes, raw)
    with torch.inference_mode():
        padded = model.log_prob(torch.from_numpy(codes), torch.from_numpy(values)).numpy()
        for i in range(4):
            n = int((codes[i] >= 0).sum())
            alone = model.log_prob(torch.from_numpy(codes[i : i + 1, :n]), torch.from_numpy(values[i : i + 1, :n]))
            np.testing.assert_allclose(padded[i, :n], alone.numpy()[0], atol=1e-10)
            assert (padded[i, n:] == 0).all()
            assert (padded[i, :n][schema.context[codes[i, :n]]] == 0).all()


@settings(max_examples=20, deadline=None)
@given(schema=schemas(most=8), config=configs, seed=seeds)
def test_no_reading_depends_on_a_later_one(schema: Schema, config: ModelConfig, seed: int) -> None:
    """Law 3: the gradient of an earlier log-likelihood by a later value is zero, and later identities do not matter."""
    model = model_of(schema, config, seed)
    codes, raw = records_of(schema, 2, seed)
    features = torch.from_numpy(codes)
    values = torch.from_numpy(normalised(schema, codes, raw)).requires_grad_()
    out = model.log_prob(features, values)
    for k in range(len(schema)):
        (gradient,) = torch.autograd.grad(out[:, k].sum(), values, retain_graph=True, allow_unused=True)
        if gradient is not None:
            assert (gradient[:, k + 1 :] == 0).all()
    # Discrete values have no gradient: change the later half outright, identities and all.
    half = len(schema) // 2
    changed, order = values.detach().clone(), features.clone()
    order[:, half:] = order[:, half:].flip(1)
    changed[:, half:] = changed[:, half:].flip(1) + 1.0
    again = model.log_prob(order, changed)
    assert torch.equal(again[:, :half].round(decimals=10), out[:, :half].round(decimals=10))


@pytest.mark.parametrize(("memory", "tokens"), [("all", "pair"), ("values", "pair"), ("all", "single")])
def test_every_earlier_value_is_used(memory: Literal["all", "values"], tokens: Literal["pair", "single"]) -> None:
    """The mask hides nothing it should not: each reading's log-likelihood depends on every earlier value."""
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(5)))
    config = ModelConfig(d_model=16, layers=1, heads=2, feedforward=32, mixtures=3, memory=memory, tokens=tokens)
    model = model_of(schema, config)
    codes, raw = records_of(schema, 1, 3)
    values = torch.from_numpy(raw).requires_grad_()
    out = model.log_prob(torch.from_numpy(codes), values)
    for k in range(5):
        (gradient,) = torch.autograd.grad(out[0, k], values, retain_graph=True)
        assert (gradient[0, : k + 1].abs() > 0).all()


def test_order_matters_and_a_permuted_schema_does_not() -> None:
    """There are no positions: shuffling the rows of a batch permutes the answers, nothing else."""
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(6)))
    model = model_of(schema, PRESETS["tiny"])
    codes, raw = records_of(schema, 8, 1)
    features, values = torch.from_numpy(codes), torch.from_numpy(raw)
    shuffle = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(
            model.log_prob(features[shuffle], values[shuffle]), model.log_prob(features, values)[shuffle]
        )
        other = model.log_prob(features.flip(1), values.flip(1)).sum(1)
        assert (other - model.log_prob(features, values).sum(1)).abs().min() > 1e-9


def test_far_values_stay_finite_in_float32() -> None:
    schema = Schema((Feature("a", "continuous", scale=0.01), Feature("b", "continuous")))
    model = model_of(schema, PRESETS["tiny"], dtype=torch.float32)
    raw = np.array([[1e300, 0.0], [-1e308, 1e30], [40.0, -1e9]])
    codes = np.tile(np.arange(2), (3, 1))
    out = model.log_prob(torch.from_numpy(codes), torch.from_numpy(schema.normalise(codes, raw)).float())
    assert torch.isfinite(out).all()
    assert (out[:, 0] < -20).all()


def test_presets_and_their_sizes() -> None:
    """The paper's model has about 19 million parameters."""
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(6)))
    sizes = {name: sum(p.numel() for p in DEformer(schema, config).parameters()) for name, config in PRESETS.items()}
    assert list(sizes) == ["tiny", "small", "base", "paper"]
    assert sorted(sizes.values()) == list(sizes.values())
    assert 18.5e6 < sizes["paper"] < 20e6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_model": 30}, "multiple"),
        ({"norm": "mid"}, "norm"),
        ({"layers": 0}, "layers"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_impossible_hyperparameters(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{"d_model": 32, "heads": 4, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "kept"), [({"memory": "values"}, 1), ({"memory": "all"}, 2), ({"tokens": "single"}, 1)]
)
def test_what_a_reading_leaves_behind(change: dict[str, Any], kept: int) -> None:
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(3)))
    model = model_of(schema, ModelConfig(d_model=16, layers=2, heads=2, feedforward=16, mixtures=2, **change))
    seen = model.prefill(torch.tensor([[0, 1]]), torch.zeros((1, 2), dtype=torch.float64))
    assert [t.shape[2] for t in (*seen.keys, *seen.values)] == [2 * kept] * 4
    assert model.tokens_kept == kept


@pytest.mark.parametrize("change", [{"tokens": "single"}, {"gaussians": 2}])
def test_a_past_without_the_readings_that_are_needed(change: dict[str, Any]) -> None:
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(3)))
    model = model_of(schema, ModelConfig(d_model=16, layers=1, heads=2, feedforward=16, mixtures=2, **change))
    codes, values = torch.tensor([[0, 1]]), torch.zeros((1, 2), dtype=torch.float64)
    seen = model.prefill(codes[:, :1], values[:, :1])
    with pytest.raises(ValueError, match="without readings"):
        model.forward_cached(codes[:, 1:], values[:, 1:], KVCacheView(seen.keys, seen.values, torch.tensor([1])))


def test_coordinates_must_be_there() -> None:
    with pytest.raises(ValueError, match="coordinates"):
        DEformer(Schema((Feature("a", "continuous"),)), ModelConfig(identity="both"))
