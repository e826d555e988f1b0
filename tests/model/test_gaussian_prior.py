"""What Gaussians expect along an order is what linear algebra says of the whole."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import MultivariateNormal

from deformer_stream.model.gaussian_prior import VALUE_REACH, GaussianPrior
from deformer_stream.model.schema import Feature, Schema

NUMBERS = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(5)))
MIXED = Schema((*NUMBERS.features[:3], Feature("state", "discrete", labels=("a", "b")), *NUMBERS.features[3:]))
seeds = st.integers(0, 2**16)


def random_gaussians(schema: Schema, components: int, seed: int, variants: int = 1) -> GaussianPrior:
    gaussians = GaussianPrior(schema, components, variants)
    generator = torch.Generator().manual_seed(seed)
    shape = gaussians.covariances.shape
    mixing = torch.randn(shape, generator=generator, dtype=torch.float64)
    gaussians.covariances.copy_(mixing @ mixing.mT / shape[-1] + 0.1 * torch.eye(shape[-1]))
    gaussians.means.copy_(torch.randn(shape[:-1], generator=generator))
    gaussians.log_weights.copy_(torch.log_softmax(torch.randn(shape[:2], generator=generator), 1))
    return gaussians


def log_density(gaussians: GaussianPrior, x: torch.Tensor, variant: int = 0) -> torch.Tensor:
    """ln of the mixture's density at x (N, D) in the schema's order."""
    parts = [
        weight + MultivariateNormal(mean, covariance).log_prob(x)
        for weight, mean, covariance in zip(
            gaussians.log_weights[variant], gaussians.means[variant], gaussians.covariances[variant], strict=True
        )
    ]
    return torch.logsumexp(torch.stack(parts), 0)


def chain(
    gaussians: GaussianPrior, features: torch.Tensor, values: torch.Tensor, **which: torch.Tensor
) -> torch.Tensor:
    """Σ ln p(v_k | earlier) of what the guide says."""
    guide = gaussians(features, values, **which)
    z = (values.unsqueeze(-1) - guide.means) / guide.scales
    terms = guide.log_weights - 0.5 * z * z - guide.scales.log() - 0.5 * math.log(2 * math.pi)
    return (torch.logsumexp(terms, -1) * guide.known).sum(1)


@settings(max_examples=30, deadline=None)
@given(components=st.integers(1, 4), seed=seeds)
def test_the_chain_rule_gives_the_joint_density_in_every_order(components: int, seed: int) -> None:
    gaussians = random_gaussians(NUMBERS, components, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    order = torch.argsort(torch.rand(4, 5, generator=generator), 1)
    torch.testing.assert_close(chain(gaussians, order, x.gather(1, order)), log_density(gaussians, x))


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_padding_and_labels_change_nothing_wherever_they_stand(seed: int) -> None:
    gaussians = random_gaussians(MIXED, 3, seed)
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    plain = gaussians(torch.tensor([[4, 0, 5]] * 2), x)
    between = torch.zeros(2, 6, dtype=torch.float64)
    between[:, [1, 3, 4]] = x
    guide = gaussians(torch.tensor([[-1, 4, 3, 0, 5, -1]] * 2), between)
    assert guide.known.tolist() == [[False, True, False, True, True, False]] * 2
    for got, expected in zip(guide[:, [1, 3, 4]].as_features(), plain.as_features(), strict=True):
        torch.testing.assert_close(got, expected)
    assert not guide.as_features()[~guide.known].any()


def test_each_record_hears_its_own_variant() -> None:
    gaussians = random_gaussians(NUMBERS, 2, 3, variants=3)
    x = torch.randn(3, 5, dtype=torch.float64)
    got = chain(gaussians, torch.arange(5).repeat(3, 1), x, variant=torch.tensor([2, 0, 1]))
    expected = [log_density(gaussians, x[i : i + 1], v) for i, v in enumerate((2, 0, 1))]
    torch.testing.assert_close(got, torch.cat(expected))


def test_a_wild_reading_does_not_carry_the_others_away() -> None:
    gaussians = random_gaussians(NUMBERS, 2, 5)
    features = torch.tensor([[0, 1]] * 2)
    wild = gaussians(features, torch.tensor([[1e9, 0.0], [VALUE_REACH, 0.0]]))
    torch.testing.assert_close(wild.means[0, 1], wild.means[1, 1])
    assert torch.isfinite(wild.as_features()).all()


def test_missing_readings_are_drawn_from_their_law_given_the_others() -> None:
    gaussians = GaussianPrior(NUMBERS, 1)
    covariance = torch.eye(5, dtype=torch.float64)
    covariance[0, 1] = covariance[1, 0] = 0.8
    gaussians.covariances.copy_(covariance)
    x = torch.full((20_000, 5), torch.nan, dtype=torch.float64)
    x[:, 0] = 2.0
    drawn = gaussians.draw_missing(x, torch.Generator().manual_seed(0))
    assert (drawn[:, 0] == 2.0).all()
    assert float(drawn[:, 1].mean()) == pytest.approx(1.6, abs=0.02)
    assert float(drawn[:, 1].std()) == pytest.approx(0.6, abs=0.02)
    assert float(drawn[:, 2].std()) == pytest.approx(1.0, abs=0.03)


def test_what_is_no_covariance_is_refused() -> None:
    state = random_gaussians(NUMBERS, 2, 0).state_dict()
    state["covariances"][0, 1, 2, 2] = -1.0
    with pytest.raises(ValueError, match="positive definite"):
        GaussianPrior(NUMBERS, 2).load_state_dict(state)


def test_numbers_told_have_the_size_a_network_likes() -> None:
    gaussians = random_gaussians(NUMBERS, 4, 1)
    told = gaussians(torch.arange(5).repeat(50, 1), 3 * torch.randn(50, 5)).as_features()
    assert told.shape == (50, 5, 12)
    assert float(told.abs().max()) <= 4.0
    assert np.isfinite(told.numpy()).all()
