"""Random Gaussian priors, and their densities by other computations."""

from __future__ import annotations

import math

import torch
from torch.distributions import MultivariateNormal

from deformer_stream.model.gaussian_prior import GaussianPrior
from deformer_stream.model.schema import Feature, Schema

CONTINUOUS = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(5)))


def make_random_prior(schema: Schema, num_components: int, seed: int, num_variants: int = 1) -> GaussianPrior:
    prior = GaussianPrior(schema, num_components, num_variants)
    generator = torch.Generator().manual_seed(seed)
    shape = prior.covariances.shape
    mixing = torch.randn(shape, generator=generator, dtype=torch.float64)
    prior.covariances.copy_(mixing @ mixing.mT / shape[-1] + 0.1 * torch.eye(shape[-1]))
    prior.means.copy_(torch.randn(shape[:-1], generator=generator))
    prior.log_weights.copy_(torch.log_softmax(torch.randn(shape[:2], generator=generator), 1))
    return prior


def joint_log_density(prior: GaussianPrior, x: torch.Tensor, variant: int = 0) -> torch.Tensor:
    """Return the log-density of the mixture at x (N, D), features in the order of the schema."""
    parts = [
        weight + MultivariateNormal(mean, covariance).log_prob(x)
        for weight, mean, covariance in zip(
            prior.log_weights[variant], prior.means[variant], prior.covariances[variant], strict=True
        )
    ]
    return torch.logsumexp(torch.stack(parts), 0)


def chain_log_density(
    prior: GaussianPrior, features: torch.Tensor, values: torch.Tensor, variant: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum over readings of ln p(v_k | earlier readings), (N,), from the conditionals of the prior."""
    conditional = prior(features, values, variant)
    z = (values.unsqueeze(-1) - conditional.means) / conditional.scales
    log_density = -0.5 * z * z - conditional.scales.log() - 0.5 * math.log(2 * math.pi)
    return (torch.logsumexp(conditional.log_weights + log_density, -1) * conditional.has_prior).sum(1)
