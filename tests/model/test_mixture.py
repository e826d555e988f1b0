"""Tests of the density of whole records under the Gaussian prior without PyTorch, also with missing readings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.model import mixture
from deformer_stream.model.constants import MAX_CONDITIONING_VALUE
from deformer_stream.model.mixture import Mixture
from tests.model.gaussian_priors import CONTINUOUS, chain_log_density, joint_log_density, make_random_prior
from trainer.gaussian_prior import extract_mixture

seeds = st.integers(0, 2**16)


def gaussian_entropy(covariance: np.ndarray) -> float:  # type: ignore[type-arg]
    """Return the entropy of a Gaussian in nats."""
    return 0.5 * (len(covariance) * np.log(2 * np.pi * np.e) + np.linalg.slogdet(covariance)[1])


@settings(max_examples=30, deadline=None)
@given(num_components=st.integers(1, 4), seed=seeds)
def test_density_of_complete_records_is_that_of_pytorch(num_components: int, seed: int) -> None:
    prior = make_random_prior(CONTINUOUS, num_components, seed)
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    actual = extract_mixture(prior).compute_neg_log_density(x.numpy())
    np.testing.assert_allclose(actual, -joint_log_density(prior, x).numpy(), rtol=1e-9)


@settings(max_examples=40, deadline=None)
@given(num_components=st.integers(1, 4), missing_share=st.floats(0.0, 1.0), seed=seeds)
def test_missing_readings_count_by_their_entropy_given_the_observed_ones(
    num_components: int, missing_share: float, seed: int
) -> None:
    """The observed readings count as the chain rule of PyTorch's conditionals counts them, in a random order."""
    prior = make_random_prior(CONTINUOUS, num_components, seed)
    rng = np.random.default_rng(seed)
    x, is_missing = rng.normal(size=(7, 5)), rng.random((7, 5)) < missing_share
    x[is_missing] = np.nan
    actual = extract_mixture(prior).compute_neg_log_density(x)
    log_weights, means, covariances = (
        tensor[0].numpy() for tensor in (prior.log_weights, prior.means, prior.covariances)
    )
    for row, value in zip(x, actual, strict=True):
        observed, missing = np.flatnonzero(~np.isnan(row)), np.flatnonzero(np.isnan(row))
        order = rng.permutation(observed)
        codes, values = torch.from_numpy(order[None]), torch.from_numpy(row[None, order])
        nll = -float(chain_log_density(prior, codes, values)[0]) if len(observed) else 0.0
        log_posterior = log_weights.copy()
        entropies = np.zeros(num_components)
        for k, (mean, covariance) in enumerate(zip(means, covariances, strict=True)):
            of_observed = covariance[np.ix_(observed, observed)]
            difference = row[observed] - mean[observed]
            log_posterior[k] -= 0.5 * (
                difference @ np.linalg.solve(of_observed, difference) + np.linalg.slogdet(of_observed)[1]
            )
            gain = covariance[np.ix_(missing, observed)] @ np.linalg.inv(of_observed)
            given_observed = covariance[np.ix_(missing, missing)] - gain @ covariance[np.ix_(observed, missing)]
            entropies[k] = gaussian_entropy(given_observed)
        posterior = np.exp(log_posterior - np.logaddexp.reduce(log_posterior))
        assert value == pytest.approx(nll + posterior @ entropies, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("distance", [0.0, 30.0])
def test_missing_readings_count_by_the_mean_over_their_draws(distance: float) -> None:
    """The expectation is exact for one Gaussian, and for components that do not overlap."""
    prior = make_random_prior(CONTINUOUS, 2 if distance else 1, 3)
    if distance:
        prior.means.copy_(torch.tensor([[[-distance / 2] * 5, [distance / 2] * 5]]))
    x = np.full((1, 5), np.nan)
    x[0, [0, 3]] = prior.means[0, 0, [0, 3]].numpy() + np.array([0.4, -0.7])
    records = torch.from_numpy(np.repeat(x, 40_000, 0))
    completed = prior.sample_missing(records, torch.Generator().manual_seed(0)).numpy()
    prior_mixture = extract_mixture(prior)
    expected = prior_mixture.compute_neg_log_density(completed).mean()
    assert prior_mixture.compute_neg_log_density(x)[0] == pytest.approx(expected, abs=0.03)


def test_missing_readings_neither_raise_nor_lower_the_typical_density() -> None:
    """Records of the mixture with and without gaps have the same mean, so they can be ranked together."""
    prior = make_random_prior(CONTINUOUS, 1, 5)
    records = torch.full((20_000, 5), torch.nan, dtype=torch.float64)
    x = prior.sample_missing(records, torch.Generator().manual_seed(0)).numpy()
    with_gaps = np.where(np.random.default_rng(0).random(x.shape) < 0.4, np.nan, x)
    complete, incomplete = (extract_mixture(prior).compute_neg_log_density(rows).mean() for rows in (x, with_gaps))
    assert incomplete == pytest.approx(complete, abs=0.05)


def test_records_count_alike_alone_and_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x = np.where(rng.random((50, 5)) < 0.3, np.nan, rng.normal(size=(50, 5)))
    prior_mixture: Mixture = extract_mixture(make_random_prior(CONTINUOUS, 3, 0))
    together = prior_mixture.compute_neg_log_density(x)
    alone = [prior_mixture.compute_neg_log_density(row[None])[0] for row in x]
    np.testing.assert_allclose(together, alone, rtol=1e-12)
    monkeypatch.setattr(mixture, "MAX_WHITENED", 1)
    np.testing.assert_allclose(prior_mixture.compute_neg_log_density(x), together, rtol=1e-12)
    assert prior_mixture.compute_neg_log_density(x[:0]).shape == (0,)


def test_extreme_values_are_clipped_like_those_of_conditionals() -> None:
    prior_mixture = extract_mixture(make_random_prior(CONTINUOUS, 2, 1))
    extreme, limit = (np.array([[value, 0.0, 0.0, 0.0, 0.0]]) for value in (1e9, MAX_CONDITIONING_VALUE))
    assert prior_mixture.compute_neg_log_density(extreme) == prior_mixture.compute_neg_log_density(limit)
