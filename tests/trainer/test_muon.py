"""The optimiser moves matrices equally far in all directions, and can be continued."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.schema import Feature, Schema
from trainer.muon import Muon, orthogonalised

CONFIG = ModelConfig(d_model=16, layers=2, heads=2, feedforward=24, mixtures=2, hidden=(16,))
SCHEMA = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(4)))


def new_model() -> DEformer:
    torch.manual_seed(0)
    return DEformer(SCHEMA, CONFIG)


def train(model: DEformer, optimiser: torch.optim.Optimizer, steps: range) -> list[float]:
    """On records whose second half repeats the first."""
    losses = []
    for step in steps:
        rng = np.random.default_rng(step)
        x = rng.normal(size=(32, 2))
        values = np.concatenate([x, x + 0.1 * rng.normal(size=x.shape)], 1)
        codes = np.argsort(rng.random(values.shape), 1)
        taken = torch.from_numpy(np.take_along_axis(values, codes, 1)).float()
        loss = -model.log_prob(torch.from_numpy(codes), taken).sum(1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 5, 20), (2, 20, 5)])
def test_orthogonalised(shape: tuple[int, int, int]) -> None:
    """Singular values come near 1, singular vectors stay."""
    x = (
        torch.randn(shape, generator=torch.Generator().manual_seed(1))
        * torch.tensor([1e-3, 1.0, 50.0])[: shape[0], None, None]
    )
    y = orthogonalised(x)
    assert y.shape == x.shape
    assert ((torch.linalg.svdvals(y) > 0.6) & (torch.linalg.svdvals(y) < 1.3)).all()
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    inner = u.mT @ y @ v.mT
    off = inner - torch.diag_embed(inner.diagonal(dim1=1, dim2=2))
    assert off.abs().max() < 1e-3


def test_queries_keys_and_values_move_on_their_own() -> None:
    """Gradients of very different size in the three: none of them is drowned by another."""
    model = new_model()
    before = copy.deepcopy(model.state_dict())
    optimiser = Muon(model, 1e-3, 0.0)
    generator = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        p.grad = torch.randn(p.shape, generator=generator)
        if name.endswith("qkv.weight"):
            p.grad[:16] *= 1e-4
    optimiser.step()
    moved = (model.state_dict()["blocks.0.qkv.weight"] - before["blocks.0.qkv.weight"]).chunk(3)
    lengths = [part.norm().item() for part in moved]
    assert max(lengths) < 1.3 * min(lengths)


def test_it_learns() -> None:
    model = new_model()
    losses = train(model, Muon(model, 2e-3, 0.01), range(60))
    assert np.mean(losses[-10:]) < np.mean(losses[:5]) - 1.0


def test_continued_to_the_bit() -> None:
    whole, part = new_model(), new_model()
    train(whole, Muon(whole, 2e-3, 0.01), range(8))
    first = Muon(part, 2e-3, 0.01)
    train(part, first, range(5))
    second = Muon(part, 2e-3, 0.01)
    saved = copy.deepcopy(first.state_dict())
    assert all(isinstance(t, torch.Tensor) for moments in saved["state"].values() for t in moments.values())
    second.load_state_dict({"state": saved["state"], "param_groups": second.state_dict()["param_groups"]})
    train(part, second, range(5, 8))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), part.parameters(), strict=True))
