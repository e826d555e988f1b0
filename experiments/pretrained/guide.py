"""The guides on which the pretrained model builds: a mixture of Gaussians, and a single Gaussian.

The network begins with the conditionals of a mixture of Gaussians that is fitted to all training rows in seconds, the
Gaussian prior of the product. A second fit leaves out one fold of the rows. On the rows of this fold, the network
sees how well the guide and its own components predict rows to which they were not fitted.

For a real table, the mixture is that of `trainer.gaussian_prior.fit_priors`, chosen by cross-validation among many. For
a synthetic table, `fit_guide` chooses among three, because it must take a fraction of a second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deformer_stream.model.mixture import Mixture
from trainer.gaussian_prior import initialize_memberships

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_ROUNDS, NUM_REFIT_ROUNDS = 12, 3
"""Rounds of expectation-maximisation of a fit, and of a refit that begins with it."""

RIDGE = 1e-3
"""Standard deviation of the noise that is added to each covariance, as in `trainer.gaussian_prior`."""

STRENGTHS = (10.0, 1.0, 0.1)
"""Weights of the common covariance in each component, as numbers of records."""

DIAGONAL_SHARE = 0.02
"""How far correlations in the common covariance are reduced, as in `trainer.gaussian_prior.Shrinkage`."""

FOLD_SHARE = 0.2
"""Share of the rows in the fold that the second fit leaves out."""


@dataclass(frozen=True, slots=True)
class Guide:
    """The mixtures and single Gaussians that were fitted to N rows of a table with D features.

    Attributes:
        mixture: The mixture fitted to all rows.
        gaussian: A single Gaussian fitted to all rows.
        mixture_without_fold: The mixture fitted without the rows of the fold.
        gaussian_without_fold: The single Gaussian fitted without the rows of the fold.
        is_in_fold: (N,) whether each row is in the fold.
    """

    mixture: Mixture
    gaussian: Mixture
    mixture_without_fold: Mixture
    gaussian_without_fold: Mixture
    is_in_fold: NDArray[np.bool_]


def fit_guide(x: Floats, rng: np.random.Generator) -> Guide:
    """Fit a guide to the rows of a synthetic table, (N, D), in a fraction of a second.

    Mixtures of two random sizes and a single Gaussian are fitted without the fold. The one that predicts the fold best
    is refitted to all rows.
    """
    is_in_fold = rng.random(len(x)) < FOLD_SHARE
    is_in_fold[:2] = [True, False]
    rest, fold = x[~is_in_fold], x[is_in_fold]
    gaussian_without_fold = fit_gaussian(rest)
    best, best_nll, best_strength = gaussian_without_fold, compute_nll(gaussian_without_fold, fold), STRENGTHS[0]
    for num_components in rng.choice([2, 3, 4, 6, 8, 12, 16], 2, replace=False):
        if num_components * max(4, x.shape[1] // 3) > len(rest):
            continue
        strength = float(rng.choice(STRENGTHS))
        memberships = initialize_memberships(rest, int(num_components), int(rng.integers(1 << 30)), False)
        mixture = run_expectation_maximization(rest, memberships, strength, NUM_ROUNDS)
        nll = compute_nll(mixture, fold)
        if nll < best_nll:
            best, best_nll, best_strength = mixture, nll, strength
    gaussian = fit_gaussian(x)
    if best is gaussian_without_fold:
        return Guide(gaussian, gaussian, best, gaussian_without_fold, is_in_fold)
    memberships = compute_memberships(best, x)
    mixture = run_expectation_maximization(x, memberships, best_strength, NUM_REFIT_ROUNDS)
    return Guide(mixture, gaussian, best, gaussian_without_fold, is_in_fold)


def fit_gaussian(x: Floats) -> Mixture:
    """Return a single Gaussian, fitted to the rows (N, D), as a mixture of one component."""
    return maximize(x, np.ones((len(x), 1)), STRENGTHS[0])


def compute_nll(mixture: Mixture, x: Floats) -> float:
    """Return the mean −ln p of the rows (N, D), in nats."""
    return -float(np.logaddexp.reduce(mixture.compute_log_densities(x), 1).mean())


def compute_memberships(mixture: Mixture, x: Floats) -> Floats:
    """Return the probability that each row belongs to each component, (N, K)."""
    log_densities = mixture.compute_log_densities(x)
    return np.asarray(np.exp(log_densities - np.logaddexp.reduce(log_densities, 1)[:, None]))


def run_expectation_maximization(x: Floats, memberships: Floats, strength: float, num_rounds: int) -> Mixture:
    """Fit a mixture of K Gaussians to rows (N, D), beginning with memberships (N, K)."""
    mixture = maximize(x, memberships, strength)
    for _ in range(num_rounds):
        mixture = maximize(x, compute_memberships(mixture, x), strength)
    return mixture


def maximize(x: Floats, memberships: Floats, strength: float) -> Mixture:
    """Return the mixture that fits rows for given memberships, with covariances moved towards a common one.

    Args:
        x: (N, D) rows.
        memberships: (N, K) share of each row that belongs to each component.
        strength: Weight of the common covariance in each component, as a number of rows.
    """
    num_rows, num_features = x.shape
    sizes = memberships.sum(0) + 1e-9
    means = memberships.T @ x / sizes[:, None]
    scatter = np.stack([x.T @ (x * weights[:, None]) for weights in memberships.T])
    scatter -= sizes[:, None, None] * means[:, :, None] * means[:, None, :]
    common = (scatter.sum(0) + 0.1 * np.diag(x.var(0) + 1e-9)) / (num_rows + 1.0)
    common = (1 - DIAGONAL_SHARE) * common + DIAGONAL_SHARE * np.diag(np.diag(common))
    covariances = (scatter + strength * common) / (sizes + strength)[:, None, None]
    weights = (sizes + 1.0) / (sizes.sum() + len(sizes))
    return Mixture(np.log(weights), means, covariances + RIDGE**2 * np.eye(num_features))


@dataclass(frozen=True, slots=True)
class GuideTensors:
    """The parameters of a mixture of K Gaussians over D features, float64.

    Attributes:
        log_weights: (K,) natural logarithms of the probabilities.
        means: (K, D) means.
        covariances: (K, D, D) covariances.
    """

    log_weights: Tensor
    means: Tensor
    covariances: Tensor

    @staticmethod
    def from_mixture(mixture: Mixture) -> GuideTensors:
        """Return the parameters of a mixture as tensors."""
        return GuideTensors(
            *(
                torch.as_tensor(np.asarray(part, np.float64))
                for part in (mixture.log_weights, mixture.means, mixture.covariances)
            )
        )

    @staticmethod
    def compute_normal_score(x: Tensor, log_weights: Tensor, means: Tensor, scales: Tensor) -> Tensor:
        """Return the normal score of each value under its conditional mixture, of the shape of the values, float32.

        Args:
            x: (B, D) values.
            log_weights, means, scales: (B, D, K) results of `condition`.
        """
        weights, z = log_weights.double().exp(), (x.unsqueeze(-1).double() - means) / scales
        lower = (weights * _compute_upper_tail(-z)).sum(-1).clamp(1e-300, 1.0)
        upper = (weights * _compute_upper_tail(z)).sum(-1).clamp(1e-300, 1.0)
        return torch.where(lower < upper, torch.special.ndtri(lower), -torch.special.ndtri(upper)).float()

    def factorize(self, order: Tensor) -> tuple[Tensor, Tensor]:
        """Return means (B, K, D) and Cholesky factors (B, K, D, D) with features in the order (B, D) of each row."""
        means = self.means[:, order].transpose(0, 1)
        covariances = self.covariances[:, order.unsqueeze(2), order.unsqueeze(1)].transpose(0, 1)
        return means, torch.linalg.cholesky(covariances)

    def compute_normal_scores(self, references: Tensor, order: Tensor) -> Tensor:
        """Return the normal scores of reference rows, given their earlier values in the order of each of B rows.

        A normal score is Φ⁻¹(F(r_j)), where F is the mixture's conditional distribution function. The scores of rows
        that have the distribution of the mixture are standard normal.

        Args:
            references: (R, D) reference rows.
            order: (B, D) feature indexes.

        Returns:
            (B, D, R) scores from −6 to 6, float32.
        """
        means, factors = self.factorize(order)
        difference = references.T[order].unsqueeze(1) - means.float().unsqueeze(-1)  # (B, K, D, R)
        factors = factors.float()
        z = torch.linalg.solve_triangular(factors, difference, upper=False)
        log_likelihood = -0.5 * z * z - factors.diagonal(dim1=-2, dim2=-1).log().unsqueeze(-1)
        earlier = log_likelihood.cumsum(2) - log_likelihood
        weights = torch.softmax(self.log_weights.float()[:, None, None] + earlier, 1)
        # The distribution function is taken on the side with the smaller tail, so that it is accurate there.
        lower = (weights * _compute_upper_tail(-z)).sum(1).clamp(1e-30, 1.0)
        upper = (weights * _compute_upper_tail(z)).sum(1).clamp(1e-30, 1.0)
        scores = torch.where(lower < upper, torch.special.ndtri(lower), -torch.special.ndtri(upper))
        return scores.clamp(-6.0, 6.0)

    def condition(self, x: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the distribution of each value given the earlier values of its row: a mixture of K Gaussians.

        Args:
            x: (B, D) values in the order of each row.
            order: (B, D) feature indexes.

        Returns:
            Log-weights, means and standard deviations, (B, D, K) each, float32.
        """
        means, factors = self.factorize(order)
        x = x.double().unsqueeze(1)
        z = torch.linalg.solve_triangular(factors, (x - means).unsqueeze(-1), upper=False).squeeze(-1)
        scales = factors.diagonal(dim1=-2, dim2=-1)
        log_likelihood = -0.5 * z * z - scales.log()
        earlier = torch.nn.functional.pad(log_likelihood, (1, 0))[..., :-1].cumsum(-1)
        log_posterior = torch.log_softmax(self.log_weights.unsqueeze(-1) + earlier, 1)
        parts = (log_posterior, x - z * scales, scales)
        log_weights, conditional_means, deviations = (part.transpose(1, 2).float() for part in parts)
        return log_weights, conditional_means, deviations


def _compute_upper_tail(z: Tensor) -> Tensor:
    """Return the probability that a standard normal variable exceeds z, accurate in the tail.

    `torch.special.ndtr(-z)` is computed from erf, so it is 0 from z = 8.3 on even in float64.
    """
    tail: Tensor = 0.5 * torch.special.erfc(z / math.sqrt(2.0))
    return tail
