"""Fit the Gaussian prior: a mixture of Gaussians whose exact conditionals are given to the network as input.

The mixture is fitted by expectation-maximisation before the network is trained. The number of components is chosen by
cross-validation. If the network were trained with conditionals from a mixture that was fitted to the same records, it
would trust them too much, the more so the fewer records there are. Therefore the training records are divided into
folds. In training, each record gets the conditionals of a variant that was refitted without its fold. A model that
scores uses the mixture that was fitted to all training records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deformer_stream.model.gaussian_prior import GaussianPrior, PriorConditional
from deformer_stream.model.schema import Schema
from trainer.data import PreparedTable, Split
from trainer.sampling import Noise, create_generator, read_rows

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_FOLDS = 5

MAX_ROWS = 6000
"""Training records to which the mixture is fitted. More records improve it little and take longer."""

MAX_FEATURES = 64
"""With more continuous features, the Cholesky factors cost more than the network, so there is no prior."""

MIN_ROWS_PER_COMPONENT = 4

COMPONENT_COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of components that are tried, one after the other."""

MIN_GAIN = 0.01
"""Decrease of the cross-validated −ln p, in nats per record, from which a larger number of components is preferred."""

MAX_ROUNDS = 60
"""Rounds of expectation-maximisation for a mixture that is fitted to all records."""

MAX_REFIT_ROUNDS = 4
"""Rounds of expectation-maximisation for a variant without one fold, which begins with the mixture of all records."""

MIN_ROUND_GAIN = 1e-3
"""Increase of the log-likelihood, in nats per record, from which another round follows."""

RIDGE = 1e-3
"""Standard deviation that is added to each feature, in normalised units, so that covariances can be inverted."""

DIAGONAL_SHARES = (0.02, 0.2)
"""Candidates for `Shrinkage.diagonal_share`."""

REPEATED_SHARE = 0.1
"""Share of a feature's readings that must be nearly equal for their value to count as a repeated value."""

REPEATED_WIDTH = 0.05
"""Readings within this many standard deviations of the feature are nearly equal."""

REPEATED_DISTANCE = 2.0
"""Distance, in the first clustering, between readings that are a repeated value and all others."""

MAX_STRENGTH, MIN_STRENGTH = 10.0, 1e-5
"""Largest and smallest `Shrinkage.strength`."""

NUM_DRAWS_ONE_COMPONENT, NUM_DRAWS_MIXTURE = 20, 2
"""How often missing readings are imputed at random: first from a single Gaussian, then from the mixture."""

FIT_SEED, DRAW_SEED = 0x6A55, 0x6A56
"""Constants that separate the random numbers of this module from others of the same seed."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of K Gaussians over D features.

    Attributes:
        log_weights: (K,) natural logarithm of the components' probabilities.
        means: (K, D), in normalised units.
        covariances: (K, D, D), positive definite.
    """

    log_weights: Floats
    means: Floats
    covariances: Floats

    def compute_log_densities(self, x: Floats) -> Floats:
        """Return ln(weight · density) of each of N records in each component, (N, K). x: (N, D)."""
        K, D = self.means.shape
        cholesky_factors = np.linalg.cholesky(self.covariances)
        inverse_factors = np.linalg.inv(cholesky_factors)
        # One matrix product whitens the records for all components at once.
        whitened_means = (inverse_factors @ self.means[:, :, None]).reshape(K * D)
        whitened = x @ inverse_factors.reshape(K * D, D).T - whitened_means
        half_log_determinants = np.log(np.diagonal(cholesky_factors, axis1=1, axis2=2)).sum(1)
        log_normalizers = half_log_determinants + 0.5 * D * np.log(2 * np.pi)
        squared_distances = (whitened * whitened).reshape(-1, K, D).sum(2)
        log_densities: Floats = self.log_weights - log_normalizers - 0.5 * squared_distances
        return log_densities


@dataclass(frozen=True, slots=True)
class Shrinkage:
    """How far the covariances of the components are moved towards a common one.

    Attributes:
        strength: Weight of the common covariance, as a number of records that are added to each component.
        diagonal_share: Share of the diagonal in the common covariance; 1 would remove all correlations.
    """

    strength: float
    diagonal_share: float


@dataclass(frozen=True, slots=True)
class CrossFittedPriors:
    """The Gaussian prior of a model and the variants of it that are used in training.

    Attributes:
        full: The prior that was fitted to all training records.
        by_fold: Variants of it, each refitted without one fold of the training records.
        fold_by_row: (N,) the fold of each record of the table, by row number.
        nll: Cross-validated −ln p of a record's continuous features, in nats. Smaller is better.
    """

    full: GaussianPrior
    by_fold: GaussianPrior
    fold_by_row: Ints
    nll: float

    @property
    def num_components(self) -> int:
        """The number of Gaussians."""
        return self.full.num_components

    def compute_conditionals(self, features: Tensor, values: Tensor, rows: Ints) -> PriorConditional:
        """Return the conditionals that B training records get, each from the variant fitted without the record's fold.

        Args:
            features: (B, L) feature codes in arrival order, −1 for padding.
            values: (B, L) values in normalised units.
            rows: (B,) row numbers of the records.
        """
        folds = torch.from_numpy(self.fold_by_row[rows]).to(features.device)
        with torch.no_grad():
            conditionals: PriorConditional = self.by_fold(features, values, folds)
        return conditionals


def fit_priors(
    data: PreparedTable, max_components: int, seed: int, is_time_short: Callable[[], bool] = lambda: False
) -> CrossFittedPriors | None:
    """Fit a mixture of Gaussians to the continuous features of the training records.

    Missing readings are imputed at random from the mixture that was fitted before, so that they do not make the
    covariances too small.

    Args:
        data: The prepared table.
        max_components: Largest number of Gaussians; 0 for no prior.
        seed: Seed of folds, noise and imputed readings.
        is_time_short: Called before a larger number of Gaussians is tried. If true, the best mixture so far is used.

    Returns:
        The prior, or None if there is no continuous feature or more than `MAX_FEATURES`.
    """
    linear_codes = np.flatnonzero(data.schema.is_linear)
    rng = np.random.default_rng([seed, FIT_SEED])
    fold_by_row = rng.integers(0, NUM_FOLDS, len(data.split))
    rows = data.select_rows(Split.TRAIN)
    if len(rows) > MAX_ROWS:
        rows = np.sort(rng.choice(rows, MAX_ROWS, replace=False))
    if max_components < 1 or not 0 < len(linear_codes) <= MAX_FEATURES:
        return None
    values, _ = read_rows(data, rows)
    noisy, _ = Noise.from_schema(data.schema).apply(values, create_generator(seed, FIT_SEED))
    x = noisy[:, linear_codes].double().numpy()
    is_missing = np.isnan(x)
    x = _impute_from_columns(x, is_missing, rng)
    folds = fold_by_row[rows]

    def impute(mixture: Mixture, draw: int) -> Floats:
        """Return the records with missing readings drawn from a mixture, given the readings that are there."""
        observed = torch.from_numpy(np.where(is_missing, np.nan, x))
        prior = build_prior(data.schema, [mixture])
        return np.asarray(prior.sample_missing(observed, create_generator(seed, DRAW_SEED, draw)))

    if is_missing.any():
        for draw in range(NUM_DRAWS_ONE_COMPONENT):
            one_component = np.ones((len(x), 1))
            x = impute(_maximize(x, one_component, Shrinkage(1.0, DIAGONAL_SHARES[0])), draw)
    best = _select_mixture(x, folds, max_components, seed, is_time_short)
    if is_missing.any():
        for draw in range(NUM_DRAWS_MIXTURE):  # the number of components and the shrinkage stay as selected
            x = impute(best.full, NUM_DRAWS_ONE_COMPONENT + draw)
            num_components = len(best.full.means)
            best = _cross_validate(x, folds, num_components, best.shrinkage, seed, best.separates_repeated)
    return CrossFittedPriors(
        build_prior(data.schema, [best.full]), build_prior(data.schema, best.by_fold), fold_by_row, best.nll
    )


def _impute_from_columns(x: Floats, is_missing: NDArray[np.bool_], rng: np.random.Generator) -> Floats:
    """Return (N, D) records with missing readings drawn from the observed readings of the same feature.

    A feature without any reading, such as a time slot in which a sensor never reports, gets standard normal values, as
    normalised readings have mean 0 and standard deviation 1.
    """
    x = x.copy()
    for column, is_gap in zip(x.T, is_missing.T, strict=True):
        if is_gap.any():
            num_gaps = int(is_gap.sum())
            column[is_gap] = rng.normal(size=num_gaps) if is_gap.all() else rng.choice(column[~is_gap], num_gaps)
    return x


@dataclass(frozen=True, slots=True)
class _CandidateMixture:
    """A fitted mixture with its cross-validation result.

    Attributes:
        nll: Cross-validated −ln p of a record, nats. Smaller is better.
        shrinkage: The shrinkage with which it was fitted.
        separates_repeated: Whether the first clustering separated repeated values from others.
        full: The mixture fitted to all records.
        by_fold: The mixtures refitted without one fold each.
    """

    nll: float
    shrinkage: Shrinkage
    separates_repeated: bool
    full: Mixture
    by_fold: list[Mixture]


def _select_mixture(
    x: Floats, folds: Ints, max_components: int, seed: int, is_time_short: Callable[[], bool]
) -> _CandidateMixture:
    """Return the mixture with the smallest cross-validated −ln p.

    A value that many readings share, such as the zeros of a flow meter while a pump is off, is seldom found by
    clustering. If there is such a value, the mixture is also fitted with a first clustering that separates it.
    """
    plain = _increase_components(x, folds, max_components, seed, is_time_short, separates_repeated=False)
    if not _mark_repeated_values(x).shape[1] or is_time_short():
        return plain
    separated = _increase_components(x, folds, max_components, seed, is_time_short, separates_repeated=True)
    return min((plain, separated), key=lambda candidate: candidate.nll)


def _increase_components(
    x: Floats, folds: Ints, max_components: int, seed: int, is_time_short: Callable[[], bool], separates_repeated: bool
) -> _CandidateMixture:
    """Return the best mixture found by increasing the number of components until this fails to help twice.

    The share of the diagonal is selected with one component. Each larger number of components is tried with the best
    strength of shrinkage so far and with a tenth of it, because a narrow cluster is blurred by a strong common
    covariance.
    """
    single = (
        _cross_validate(x, folds, 1, Shrinkage(MAX_STRENGTH, share), seed, separates_repeated)
        for share in DIAGONAL_SHARES
    )
    best = min(single, key=lambda candidate: candidate.nll)
    num_failures = 0
    for num_components in COMPONENT_COUNTS:
        is_too_large = num_components > max_components or num_components * MIN_ROWS_PER_COMPONENT > len(x)
        if num_failures == 2 or is_too_large or is_time_short():
            break
        weaker = replace(best.shrinkage, strength=max(best.shrinkage.strength / 10.0, MIN_STRENGTH))
        candidates = (
            _cross_validate(x, folds, num_components, shrinkage, seed, separates_repeated)
            for shrinkage in {best.shrinkage, weaker}
        )
        candidate = min(candidates, key=lambda candidate: candidate.nll)
        if candidate.nll < best.nll - MIN_GAIN:
            best, num_failures = candidate, 0
        else:
            num_failures += 1
    return best


def _cross_validate(
    x: Floats, folds: Ints, num_components: int, shrinkage: Shrinkage, seed: int, separates_repeated: bool
) -> _CandidateMixture:
    """Fit a mixture to all records, refit it without each fold, and evaluate each refit on the records of its fold."""
    memberships = _initialize_memberships(x, num_components, seed, separates_repeated)
    full = _run_expectation_maximization(x, memberships, shrinkage, MAX_ROUNDS)
    by_fold = [_refit(x[folds != fold], full, shrinkage) for fold in range(NUM_FOLDS)]
    log_likelihoods = [
        np.logaddexp.reduce(mixture.compute_log_densities(x[folds == fold]), 1) for fold, mixture in enumerate(by_fold)
    ]
    nll = -float(np.concatenate(log_likelihoods).mean())
    return _CandidateMixture(nll, shrinkage, separates_repeated, full, by_fold)


def _mark_repeated_values(x: Floats) -> Floats:
    """Return one indicator column for each feature that has a repeated value.

    Args:
        x: (N, D) records.

    Returns:
        (N, A), for each of the A features with a repeated value 1 if a reading is nearly equal to it, otherwise 0.
    """
    indicators = []
    for column in x.T:
        ordered, width = np.sort(column), REPEATED_WIDTH * column.std()
        counts = np.searchsorted(ordered, ordered + width, "right") - np.arange(len(x))
        lowest = ordered[counts.argmax()]
        if REPEATED_SHARE * len(x) <= counts.max() < len(x):
            indicators.append((column >= lowest) & (column <= lowest + width))
    return np.array(indicators, np.float64).reshape(-1, len(x)).T


def _initialize_memberships(x: Floats, num_components: int, seed: int, separates_repeated: bool) -> Floats:
    """Assign each of N records to one of K components by k-means, and return (N, K) memberships that are 0 or 1.

    The centres are initialised by k-means++ (Arthur and Vassilvitskii, SODA 2007).

    Args:
        x: (N, D) records.
        num_components: The number K.
        seed: Seed of the first centres.
        separates_repeated: Whether indicators of repeated values are features of the clustering.
    """
    rng = np.random.default_rng([seed, num_components])
    x = x / (x.std(0) + 1e-9)
    if separates_repeated:
        indicators = _mark_repeated_values(x)
        x = np.concatenate([x, REPEATED_DISTANCE * indicators / (indicators.std(0) + 1e-9)], 1)
    centres = x[rng.integers(len(x), size=1)]
    while len(centres) < num_components:
        weights = _compute_squared_distances(x, centres).min(1)
        weights = weights if weights.sum() > 0 else np.ones(len(x))
        centres = np.concatenate([centres, x[rng.choice(len(x), 1, p=weights / weights.sum())]])
    for _ in range(10):
        nearest = _compute_squared_distances(x, centres).argmin(1)
        centres = np.stack(
            [x[nearest == k].mean(0) if (nearest == k).any() else centre for k, centre in enumerate(centres)]
        )
    return np.asarray(np.eye(num_components)[_compute_squared_distances(x, centres).argmin(1)])


def _compute_squared_distances(x: Floats, centres: Floats) -> Floats:
    """Return the squared distance of each of N records, (N, D), to each of K centres, (K, D), as (N, K)."""
    products = x @ centres.T
    distances: Floats = (x**2).sum(1)[:, None] - 2 * products + (centres**2).sum(1)
    return np.maximum(distances, 0.0)


def _run_expectation_maximization(x: Floats, memberships: Floats, shrinkage: Shrinkage, max_rounds: int) -> Mixture:
    """Fit a mixture to records, beginning with given memberships.

    Args:
        x: (N, D) records.
        memberships: (N, K) share of each record that belongs to each component.
        shrinkage: How far covariances are moved towards a common one.
        max_rounds: Largest number of rounds; fewer if the likelihood hardly increases.
    """
    previous_mean = -np.inf
    for _ in range(max_rounds):
        mixture = _maximize(x, memberships, shrinkage)
        log_densities = mixture.compute_log_densities(x)
        log_likelihoods = np.logaddexp.reduce(log_densities, 1)
        if log_likelihoods.mean() < previous_mean + MIN_ROUND_GAIN:
            break
        previous_mean = float(log_likelihoods.mean())
        memberships = np.exp(log_densities - log_likelihoods[:, None])
    return mixture


def _refit(x: Floats, initial: Mixture, shrinkage: Shrinkage) -> Mixture:
    """Refit a mixture to fewer records in a few rounds.

    The order of the components stays the same, because the network identifies components by their index.
    """
    log_densities = initial.compute_log_densities(x)
    memberships = np.exp(log_densities - np.logaddexp.reduce(log_densities, 1)[:, None])
    return _run_expectation_maximization(x, memberships, shrinkage, MAX_REFIT_ROUNDS)


def _maximize(x: Floats, memberships: Floats, shrinkage: Shrinkage) -> Mixture:
    """Return the mixture that fits records best for given memberships: the M step of expectation-maximisation.

    Args:
        x: (N, D) records.
        memberships: (N, K) share of each record that belongs to each component.
        shrinkage: How far covariances are moved towards a common one.
    """
    (N, D), K = x.shape, memberships.shape[1]
    sizes = memberships.sum(0) + 1e-9
    means = memberships.T @ x / sizes[:, None]
    second_moments = np.stack([x.T @ (x * weights[:, None]) for weights in memberships.T])
    scatter = second_moments - sizes[:, None, None] * _compute_outer_products(means)
    common = (scatter.sum(0) + 0.1 * np.diag(x.var(0) + 1e-9)) / (N + 1.0)
    diagonal = np.diag(np.diag(common))
    common = common + shrinkage.diagonal_share * (diagonal - common)
    strength = shrinkage.strength
    covariances = (scatter + strength * common) / (sizes + strength)[:, None, None] + RIDGE**2 * np.eye(D)
    return Mixture(np.log((sizes + 1.0) / (sizes.sum() + K)), means, covariances)


def _compute_outer_products(vectors: Floats) -> Floats:
    """Return the outer product of each of K vectors, (K, D), with itself, as (K, D, D)."""
    return np.asarray(vectors[:, :, None] * vectors[:, None, :])


def extract_mixture(prior: GaussianPrior) -> Mixture:
    """Return the first variant of a prior as float64 arrays."""
    tensors = (prior.log_weights[0], prior.means[0], prior.covariances[0])
    return Mixture(*(tensor.double().cpu().numpy() for tensor in tensors))


def build_prior(schema: Schema, mixtures: list[Mixture]) -> GaussianPrior:
    """Return a prior with one variant for each of the given mixtures."""
    prior = GaussianPrior(schema, len(mixtures[0].means), len(mixtures))
    prior.log_weights = torch.from_numpy(np.stack([mixture.log_weights for mixture in mixtures]))
    prior.means = torch.from_numpy(np.stack([mixture.means for mixture in mixtures]))
    prior.covariances = torch.from_numpy(np.stack([mixture.covariances for mixture in mixtures]))
    return prior
