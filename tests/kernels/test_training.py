"""Compiled layers train as the network's own do: the same densities and the same gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deformer_stream.kernels import build
from deformer_stream.kernels.training import Layers, fits
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.schema import Feature, Schema
from tests.engine.worlds import model_of, normalised, records_of, schemas

CONFIG = ModelConfig(d_model=64, layers=2, heads=4, feedforward=96, mixtures=3, hidden=(24,))
SHAPES = st.builds(
    replace,
    st.just(CONFIG),
    layers=st.integers(1, 3),
    heads=st.sampled_from([1, 2, 4]),
    activation=st.sampled_from(["gelu", "relu"]),
    gaussians=st.sampled_from([0, 3]),
)


def gradients(model: DEformer, features: Tensor, values: Tensor, rounded: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """ln p of each reading, and the gradient of its mean by each of the model's weights."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
        log_p = model.train().log_prob(features, values)
    torch.autograd.backward(log_p.mean())
    return log_p.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("rounded", [False, True])
@settings(max_examples=25, deadline=None)
@given(schema=schemas(most=70), shape=SHAPES, records=st.integers(1, 9), seed=st.integers(0, 2**16))
def test_densities_and_gradients_are_those_of_the_layers(
    rounded: bool, schema: Schema, shape: ModelConfig, records: int, seed: int
) -> None:
    """Records with gaps, of any length, several and partial units of them."""
    model = model_of(schema, shape, seed, torch.float32)
    codes, raw = records_of(schema, records, seed, missing=0.2)
    features, values = torch.from_numpy(codes), torch.from_numpy(normalised(schema, codes, raw)).float()
    exact, wanted = gradients(model, features, values, rounded=False)
    plainly, by_autocast = gradients(model, features, values, rounded)
    library = build.library(rounded)
    assert library is not None, "the tests of compiled code need a C compiler"
    model.fast_layers = Layers(model, library)
    found, ours = gradients(model, features, values, rounded)
    assert ours.keys() == wanted.keys()
    if not rounded:
        torch.testing.assert_close(found, exact, atol=1e-4, rtol=1e-4)
        for name, gradient in wanted.items():
            torch.testing.assert_close(ours[name], gradient, atol=1e-5, rtol=1e-3)
    else:  # as far from the exact ones as autocast is, about
        assert float((found - exact).norm()) <= 3 * float((plainly - exact).norm()) + 1e-2
        off, its = (torch.cat([(g[n] - wanted[n]).flatten() for n in wanted]).norm() for g in (ours, by_autocast))
        assert float(off) <= 2 * float(its) + 1e-2 * float(torch.cat([g.flatten() for g in wanted.values()]).norm())


def test_gradients_must_be_taken_before_the_next_call() -> None:
    """What the way back needs is kept once."""
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(5)))
    model, library = model_of(schema, CONFIG, 0, torch.float32).train(), build.library(False)
    assert library is not None
    model.fast_layers = Layers(model, library)
    features, values = torch.arange(5).repeat(3, 1), torch.randn(3, 5)
    first, second = (model.log_prob(features, values).mean() for _ in range(2))
    with pytest.raises(RuntimeError, match="called again"):
        torch.autograd.backward(first)
    torch.autograd.backward(second)


@pytest.mark.parametrize(
    "change",
    [{"norm": "post"}, {"memory": "all"}, {"tokens": "single"}, {"dropout": 0.1}, {"d_model": 96, "heads": 6}],
)
def test_other_networks_train_by_their_own_layers(change: dict[str, Any]) -> None:
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(5)))
    assert fits(model_of(schema, CONFIG, dtype=torch.float32))
    assert not fits(model_of(schema, replace(CONFIG, **change), dtype=torch.float32))
