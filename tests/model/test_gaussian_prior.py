"""Tests that the conditionals of the Gaussian prior are those of the joint mixture density, in any order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.model.constants import MAX_CONDITIONING_VALUE
from deformer_stream.model.gaussian_prior import GaussianPrior
from deformer_stream.model.schema import Feature, Schema
from tests.effort import num_examples
from tests.model.gaussian_priors import CONTINUOUS, chain_log_density, joint_log_density, make_random_prior

STATE = Feature("state", "discrete", labels=("a", "b"))
MIXED = Schema((*CONTINUOUS.features[:3], STATE, *CONTINUOUS.features[3:]))
seeds = st.integers(0, 2**16)


@settings(max_examples=num_examples(30), deadline=None)
@given(num_components=st.integers(1, 4), seed=seeds)
def test_chain_rule_gives_the_joint_density_in_every_order(num_components: int, seed: int) -> None:
    prior = make_random_prior(CONTINUOUS, num_components, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    order = torch.argsort(torch.rand(4, 5, generator=generator), 1)
    torch.testing.assert_close(chain_log_density(prior, order, x.gather(1, order)), joint_log_density(prior, x))


@settings(max_examples=num_examples(30), deadline=None)
@given(seed=seeds)
def test_padding_and_labels_at_any_position_do_not_change_conditionals(seed: int) -> None:
    prior = make_random_prior(MIXED, 3, seed)
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = prior(torch.tensor([[4, 0, 5]] * 2), x)
    x_with_gaps = torch.zeros(2, 6, dtype=torch.float64)
    x_with_gaps[:, [1, 3, 4]] = x
    actual = prior(torch.tensor([[-1, 4, 3, 0, 5, -1]] * 2), x_with_gaps)
    assert actual.has_prior.tolist() == [[False, True, False, True, True, False]] * 2
    actual_inputs = actual[:, [1, 3, 4]].to_network_input()
    for actual_row, expected_row in zip(actual_inputs, expected.to_network_input(), strict=True):
        torch.testing.assert_close(actual_row, expected_row)
    assert not actual.to_network_input()[~actual.has_prior].any()


def test_each_record_uses_its_own_variant() -> None:
    prior = make_random_prior(CONTINUOUS, 2, 3, num_variants=3)
    x = torch.randn(3, 5, dtype=torch.float64)
    actual = chain_log_density(prior, torch.arange(5).repeat(3, 1), x, torch.tensor([2, 0, 1]))
    expected = [joint_log_density(prior, x[i : i + 1], variant) for i, variant in enumerate((2, 0, 1))]
    torch.testing.assert_close(actual, torch.cat(expected))


def test_extreme_value_is_clipped_if_others_are_conditioned_on_it() -> None:
    prior = make_random_prior(CONTINUOUS, 2, 5)
    features = torch.tensor([[0, 1]] * 2)
    conditional = prior(features, torch.tensor([[1e9, 0.0], [MAX_CONDITIONING_VALUE, 0.0]]))
    torch.testing.assert_close(conditional.means[0, 1], conditional.means[1, 1])
    assert torch.isfinite(conditional.to_network_input()).all()


def test_missing_values_are_sampled_from_their_conditional_distribution() -> None:
    prior = GaussianPrior(CONTINUOUS, 1)
    covariance = torch.eye(5, dtype=torch.float64)
    covariance[0, 1] = covariance[1, 0] = 0.8
    prior.covariances.copy_(covariance)
    x = torch.full((20_000, 5), torch.nan, dtype=torch.float64)
    x[:, 0] = 2.0
    completed = prior.sample_missing(x, torch.Generator().manual_seed(0))
    assert (completed[:, 0] == 2.0).all()
    assert float(completed[:, 1].mean()) == pytest.approx(1.6, abs=0.02)
    assert float(completed[:, 1].std()) == pytest.approx(0.6, abs=0.02)
    assert float(completed[:, 2].std()) == pytest.approx(1.0, abs=0.03)


def test_loading_rejects_a_matrix_that_is_not_a_covariance() -> None:
    state = make_random_prior(CONTINUOUS, 2, 0).state_dict()
    state["covariances"][0, 1, 2, 2] = -1.0
    with pytest.raises(ValueError, match="positive definite"):
        GaussianPrior(CONTINUOUS, 2).load_state_dict(state)


def test_network_input_is_finite_and_of_moderate_size() -> None:
    prior = make_random_prior(CONTINUOUS, 4, 1)
    network_input = prior(torch.arange(5).repeat(50, 1), 3 * torch.randn(50, 5)).to_network_input()
    assert network_input.shape == (50, 5, 12)
    assert float(network_input.abs().max()) <= 4.0
    assert np.isfinite(network_input.numpy()).all()
