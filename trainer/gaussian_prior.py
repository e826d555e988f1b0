"""Fit the Gaussian prior: a mixture of Gaussians whose exact conditionals are given to the network as input.

The mixture is fitted by expectation-maximisation before the network is trained. The number of components (Gaussians) is
chosen by cross-validation. A mixture predicts the records to which it was fitted better than other records. If the
network were trained with such predictions, it would rely on them too much. Therefore the training records are divided
into folds. In training, each record gets the conditionals of a variant of the mixture that was refitted without its
fold. A trained model uses the mixture that was fitted to all training records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deformer_stream.model.gaussian_prior import GaussianPrior, PriorConditional
from deformer_stream.model.mixture import Mixture
from deformer_stream.model.schema import Schema
from trainer.data import PreparedTable, Split
from trainer.sampling import Noise, create_generator, read_rows

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_FOLDS = 5
"""Number of parts into which the training records are divided for cross-validation."""

MAX_ROWS = 6000
"""Largest number of training records to which the mixture is fitted. More records improve it little."""

MAX_MIXTURE_FEATURES = 64
"""Largest number of continuous features for which a prior is fitted.

With more features, its Cholesky factors would take longer to compute than the network.
"""

MIN_ROWS_PER_COMPONENT = 4
"""Smallest number of training records per component (Gaussian) of a mixture."""

COMPONENT_COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of components (Gaussians) that are tried after a single one, in this order."""

MIN_GAIN = 0.01
"""A larger number of components is preferred if it decreases the cross-validated −ln p by more than this, in nats per
record."""

MAX_ROUNDS = 60
"""Largest number of rounds of expectation-maximisation for a mixture that is fitted to all records."""

MAX_REFIT_ROUNDS = 4
"""Largest number of rounds of expectation-maximisation for a variant that is refitted without one fold.

It needs few rounds, because it begins with the mixture that was fitted to all records.
"""

MIN_ROUND_GAIN = 1e-3
"""Expectation-maximisation ends if a round increases the log-likelihood by less than this, in nats per record."""

RIDGE = 1e-3
"""Standard deviation of the noise that is added to each covariance, in normalised units, so that it is invertible."""

DIAGONAL_SHARES = (0.02, 0.2)
"""Candidates for `Shrinkage.diagonal_share`, of which cross-validation selects one."""

REPEATED_SHARE = 0.1
"""A value is a repeated value if at least this share of the feature's readings is nearly equal to it."""

REPEATED_WIDTH = 0.05
"""Readings that differ by at most this many standard deviations of the feature are nearly equal."""

REPEATED_DISTANCE = 2.0
"""Weight of the indicators of repeated values as additional features of the first clustering.

The other features have a standard deviation of 1 there.
"""

MAX_STRENGTH, MIN_STRENGTH = 10.0, 1e-5
"""Largest and smallest `Shrinkage.strength`, as a number of records."""

NUM_DRAWS_ONE_COMPONENT, NUM_DRAWS_MIXTURE = 20, 2
"""How often missing readings are imputed at random: first from a single Gaussian, then from the mixture."""

FIT_SEED, DRAW_SEED = 0x6A55, 0x6A56
"""Constants that are combined with the user's seed, so that this module's random numbers differ from others."""


@dataclass(frozen=True, slots=True)
class Shrinkage:
    """How far the covariances of a mixture's components are moved towards a common one, against overfitting.

    The common covariance is computed from all records. Each record counts by its difference from the mean of its
    component.

    Attributes:
        strength: Weight of the common covariance in each component, as a number of records.
        diagonal_share: How far correlations in the common covariance are reduced: they are multiplied by
            1 − `diagonal_share`.
    """

    strength: float
    diagonal_share: float


@dataclass(frozen=True, slots=True)
class CrossFittedPriors:
    """The Gaussian prior of a model and the variants of it that are used in training.

    The Gaussian prior is a mixture of Gaussians whose conditionals are inputs of the network. The training records are
    divided into folds. In training, each record gets the conditionals of the variant that was fitted without its fold.

    Attributes:
        full: The prior that was fitted to all training records. The trained model uses it.
        by_fold: A prior with one variant for each fold. Variant k was refitted without the training records of fold k.
        fold_by_row: (N,) the fold of each of the N records of the table, by row number.
        nll: Cross-validated −ln p of a record's continuous features, mean over the records, in nats. Smaller is better.
    """

    full: GaussianPrior
    by_fold: GaussianPrior
    fold_by_row: Ints
    nll: float

    @property
    def num_components(self) -> int:
        """The number of Gaussians in the mixture."""
        return self.full.num_components

    def compute_conditionals(self, features: Tensor, values: Tensor, rows: Ints) -> PriorConditional:
        """Return the conditional distributions that are given to the network in training.

        The conditional of a reading is its distribution under the mixture, given the earlier readings of the record.
        Each record gets the conditionals of the variant that was fitted without the record's fold.

        Args:
            features: (B, L) feature codes of B records in arrival order, where L is the number of readings of the
                longest record; −1 as padding.
            values: (B, L) values in normalised units, arbitrary at padding.
            rows: (B,) row numbers of the records in the table.

        Returns:
            The conditionals of all readings of the B records.
        """
        folds = torch.from_numpy(self.fold_by_row[rows]).to(features.device)
        with torch.no_grad():
            conditionals: PriorConditional = self.by_fold(features, values, folds)
        return conditionals

    def compute_neg_log_density(self, x: Floats, rows: Ints) -> Floats:
        """Return −ln p of whole records in nats, (N,), under the variants that were fitted without their folds.

        Args:
            x: (N, D) normalised values of the features of the mixture, NaN if missing.
            rows: (N,) row numbers of the records in the table.
        """
        result = np.empty(len(x))
        for fold in range(NUM_FOLDS):
            is_in_fold = self.fold_by_row[rows] == fold
            if is_in_fold.any():
                mixture = extract_mixture(self.by_fold, fold)
                result[is_in_fold] = mixture.compute_neg_log_density(x[is_in_fold])
        return result


def fit_priors(
    data: PreparedTable,
    max_components: int,
    seed: int,
    is_time_short: Callable[[], bool] = lambda: False,
    max_rows: int = MAX_ROWS,
) -> CrossFittedPriors | None:
    """Fit a mixture of Gaussians to the continuous features of the training records, except cyclic ones.

    Missing readings are imputed several times, each time at random from the mixture that was fitted before. Imputing
    the expected values would make the covariances too small.

    Args:
        data: The prepared table.
        max_components: Largest number of Gaussians; 0 for no prior.
        seed: Seed of folds, noise and imputed readings.
        is_time_short: Called before a larger number of Gaussians is tried. If it returns True, the best mixture so far
            is used.
        max_rows: Largest number of training records to which the mixture is fitted.

    Returns:
        The prior and its variants. The records are divided at random into `NUM_FOLDS` folds, and each variant is fitted
        without the records of one fold. None if `max_components` is 0, or if there are no continuous features or more
        than `MAX_MIXTURE_FEATURES`.
    """
    linear_codes = np.flatnonzero(data.schema.is_linear)
    rng = np.random.default_rng([seed, FIT_SEED])
    fold_by_row = rng.integers(0, NUM_FOLDS, len(data.split))
    rows = data.select_rows(Split.TRAIN)
    if len(rows) > max_rows:
        rows = np.sort(rng.choice(rows, max_rows, replace=False))
    if max_components < 1 or not 0 < len(linear_codes) <= MAX_MIXTURE_FEATURES:
        return None
    values, _ = read_rows(data, rows)
    # Readings of a sensor with a limited resolution get uniform noise of the width of its step, as in training.
    noisy, _ = Noise.from_schema(data.schema).apply(values, create_generator(seed, FIT_SEED))
    x = noisy[:, linear_codes].double().numpy()
    is_missing = np.isnan(x)
    x = _impute_from_columns(x, is_missing, rng)  # a first rough imputation
    folds = fold_by_row[rows]

    def impute(mixture: Mixture, draw: int) -> Floats:
        """Return the training records, with missing readings drawn at random from a mixture given the observed ones.

        Args:
            mixture: The mixture of Gaussians.
            draw: Number of the draw. Each draw gets other random numbers.
        """
        observed = torch.from_numpy(np.where(is_missing, np.nan, x))
        prior = build_prior(data.schema, [mixture])
        return np.asarray(prior.sample_missing(observed, create_generator(seed, DRAW_SEED, draw)))

    if is_missing.any():
        all_in_one_component = np.ones((len(x), 1))
        for draw in range(NUM_DRAWS_ONE_COMPONENT):
            single_gaussian = _maximize(x, all_in_one_component, Shrinkage(1.0, DIAGONAL_SHARES[0]))
            x = impute(single_gaussian, draw)
    best = _select_mixture(x, folds, max_components, seed, is_time_short)
    if is_missing.any():
        # Impute again from the better mixture and refit it. The number of components and the shrinkage stay the same.
        for draw in range(NUM_DRAWS_MIXTURE):
            x = impute(best.full, NUM_DRAWS_ONE_COMPONENT + draw)
            num_components = len(best.full.means)
            best = _cross_validate(x, folds, num_components, best.shrinkage, seed, best.separates_repeated)
    return CrossFittedPriors(
        build_prior(data.schema, [best.full]), build_prior(data.schema, best.by_fold), fold_by_row, best.nll
    )


def _impute_from_columns(x: Floats, is_missing: NDArray[np.bool_], rng: np.random.Generator) -> Floats:
    """Replace each missing reading by a random observed reading of the same feature.

    A feature without any reading, such as a time slot in which a sensor never reports, gets standard normal values. The
    reason is that normalised readings have mean 0 and standard deviation 1.

    Args:
        x: (N, D) records with D features.
        is_missing: (N, D) which readings are missing.
        rng: The source of random numbers.

    Returns:
        (N, D) a copy of the records without missing readings.
    """
    x = x.copy()
    for column, is_gap in zip(x.T, is_missing.T, strict=True):  # a column is a view, so assigning to it changes x
        num_gaps = int(is_gap.sum())
        if num_gaps == len(column):
            column[is_gap] = rng.normal(size=num_gaps)
        elif num_gaps:
            column[is_gap] = rng.choice(column[~is_gap], num_gaps)
    return x


@dataclass(frozen=True, slots=True)
class _CandidateMixture:
    """A fitted mixture with its cross-validation result.

    Attributes:
        nll: Cross-validated −ln p of a record, mean over the records, in nats. Smaller is better.
        shrinkage: The shrinkage of covariances with which it was fitted.
        separates_repeated: Whether the clustering that initialised it separated repeated values (a value that many
            readings of a feature share) from others.
        full: The mixture fitted to all records.
        by_fold: For each fold, the mixture refitted without the records of the fold.
    """

    nll: float
    shrinkage: Shrinkage
    separates_repeated: bool
    full: Mixture
    by_fold: list[Mixture]


def _select_mixture(
    x: Floats, folds: Ints, max_components: int, seed: int, is_time_short: Callable[[], bool]
) -> _CandidateMixture:
    """Fit mixtures with different numbers of components (Gaussians), and return the one that predicts records best.

    The best mixture has the smallest cross-validated −ln p. A value that many readings share, such as the zeros of a
    flow meter while a pump is off, should have a component of its own. The clustering that initialises a mixture
    seldom finds such values. If there are any, mixtures are also fitted from a clustering that separates them.

    Args:
        x: (N, D) records with D features, without missing values.
        folds: (N,) fold of each record, from 0 to `NUM_FOLDS` − 1.
        max_components: Largest number of components.
        seed: Seed of the clustering.
        is_time_short: Called before a further mixture is tried. If it returns True, the best one so far is returned.
    """
    plain = _increase_components(x, folds, max_components, seed, is_time_short, separates_repeated=False)
    num_features_with_repeated_value = _mark_repeated_values(x).shape[1]
    if not num_features_with_repeated_value or is_time_short():
        return plain
    separated = _increase_components(x, folds, max_components, seed, is_time_short, separates_repeated=True)
    return min((plain, separated), key=lambda candidate: candidate.nll)


def _increase_components(
    x: Floats, folds: Ints, max_components: int, seed: int, is_time_short: Callable[[], bool], separates_repeated: bool
) -> _CandidateMixture:
    """Fit mixtures of more and more components (Gaussians), and return the best mixture.

    The search ends when two larger numbers of components in a row bring no improvement. Covariances are moved towards a
    common one (see `Shrinkage`). `Shrinkage.diagonal_share` is selected with one component. `Shrinkage.strength` begins
    with its largest value. Each larger number of components is tried with the best strength so far and with a tenth of
    it, because strong shrinkage makes narrow clusters too wide.

    Args:
        x: (N, D) records with D features, without missing values.
        folds: (N,) fold of each record, from 0 to `NUM_FOLDS` − 1.
        max_components: Largest number of components.
        seed: Seed of the clustering that initialises each mixture.
        is_time_short: Called before each larger number of components. If it returns True, the search ends.
        separates_repeated: Whether the clustering separates repeated values from others.
    """
    single_gaussians = (
        _cross_validate(x, folds, 1, Shrinkage(MAX_STRENGTH, share), seed, separates_repeated)
        for share in DIAGONAL_SHARES
    )
    best = min(single_gaussians, key=lambda candidate: candidate.nll)
    num_failures = 0  # how many larger numbers in a row have brought no improvement
    for num_components in COMPONENT_COUNTS:
        is_too_large = num_components > max_components or num_components * MIN_ROWS_PER_COMPONENT > len(x)
        if num_failures == 2 or is_too_large or is_time_short():
            break
        weaker = replace(best.shrinkage, strength=max(best.shrinkage.strength / 10.0, MIN_STRENGTH))
        candidates = (
            _cross_validate(x, folds, num_components, shrinkage, seed, separates_repeated)
            for shrinkage in {best.shrinkage, weaker}  # one element if the strength is already the smallest
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
    """Fit a mixture to all records, refit it without each fold, and evaluate each refit on the records of its fold.

    Args:
        x: (N, D) records with D features, without missing values.
        folds: (N,) fold of each record, from 0 to `NUM_FOLDS` − 1.
        num_components: Number of components (Gaussians) of the mixture.
        shrinkage: How far covariances are moved towards a common one.
        seed: Seed of the clustering that initialises the mixture.
        separates_repeated: Whether the clustering separates repeated values from others.

    Returns:
        The mixture, its variants without each fold, and the cross-validated −ln p of a record.
    """
    memberships = initialize_memberships(x, num_components, seed, separates_repeated)
    full = _run_expectation_maximization(x, memberships, shrinkage, MAX_ROUNDS)
    by_fold = [_refit(x[folds != fold], full, shrinkage) for fold in range(NUM_FOLDS)]
    nll = compute_cross_validated_nll(x, folds, by_fold)
    return _CandidateMixture(nll, shrinkage, separates_repeated, full, by_fold)


def compute_cross_validated_nll(x: Floats, folds: Ints, by_fold: list[Mixture]) -> float:
    """Return the mean −ln p of the records in nats, each under the mixture that was fitted without its fold.

    Args:
        x: (N, D) records with D features, without missing values.
        folds: (N,) fold of each record, from 0 to `NUM_FOLDS` − 1.
        by_fold: For each fold, the mixture fitted without the records of the fold.
    """
    log_likelihoods = []
    for fold, mixture in enumerate(by_fold):
        log_densities = mixture.compute_log_densities(x[folds == fold])
        log_likelihoods.append(np.logaddexp.reduce(log_densities, 1))
    return -float(np.concatenate(log_likelihoods).mean())


def _mark_repeated_values(x: Floats) -> Floats:
    """Return one indicator column for each feature that has a repeated value.

    A repeated value is a value to which at least `REPEATED_SHARE` of the feature's readings are nearly equal.

    Args:
        x: (N, D) records with D features, without missing values.

    Returns:
        (N, A) float64, one column for each of the A features with a repeated value: 1 if the record's reading is nearly
        equal to the repeated value, otherwise 0.
    """
    indicators = []
    for column in x.T:
        ordered, width = np.sort(column), REPEATED_WIDTH * column.std()
        # Count the readings in the interval [r, r + width] of each reading r. The interval with the largest count
        # contains the repeated value.
        counts = np.searchsorted(ordered, ordered + width, "right") - np.arange(len(x))
        lowest = ordered[counts.argmax()]
        # If the interval contains all readings, the feature is constant and needs no indicator.
        if REPEATED_SHARE * len(x) <= counts.max() < len(x):
            indicators.append((column >= lowest) & (column <= lowest + width))
    return np.array(indicators, np.float64).reshape(-1, len(x)).T  # the shape is (N, 0) if there are no indicators


def initialize_memberships(x: Floats, num_components: int, seed: int, separates_repeated: bool) -> Floats:
    """Assign each record to one of K components (Gaussians) by k-means, as the start of expectation-maximisation.

    The centres are initialised by k-means++ (Arthur and Vassilvitskii, SODA 2007).

    Args:
        x: (N, D) records with D features, without missing values.
        num_components: The number K.
        seed: Seed of the initial centres.
        separates_repeated: Whether the clustering separates repeated values from others. Indicators of such values are
            then additional features.

    Returns:
        (N, K) float64: 1 for the component of the record, 0 for all others.
    """
    rng = np.random.default_rng([seed, num_components])
    x = x / (x.std(0) + 1e-9)  # all features get the same weight
    if separates_repeated:
        indicators = _mark_repeated_values(x)
        # REPEATED_DISTANCE is the standard deviation of these features; that of the others is 1.
        x = np.concatenate([x, REPEATED_DISTANCE * indicators / (indicators.std(0) + 1e-9)], 1)
    centres = x[rng.integers(len(x), size=1)]  # the first centre is a random record
    while len(centres) < num_components:
        # k-means++: the next centre is a record, chosen in proportion to its squared distance to the nearest centre.
        weights = _compute_squared_distances(x, centres).min(1)
        weights = weights if weights.sum() > 0 else np.ones(len(x))  # all distances are 0 if the records are equal
        next_index = rng.choice(len(x), 1, p=weights / weights.sum())
        centres = np.concatenate([centres, x[next_index]])
    for _ in range(10):  # rounds of k-means
        nearest = _compute_squared_distances(x, centres).argmin(1)
        # Each centre moves to the mean of its records. A centre without records stays.
        centres = np.stack(
            [x[nearest == k].mean(0) if (nearest == k).any() else centre for k, centre in enumerate(centres)]
        )
    nearest = _compute_squared_distances(x, centres).argmin(1)
    return np.asarray(np.eye(num_components)[nearest])  # one-hot rows


def _compute_squared_distances(x: Floats, centres: Floats) -> Floats:
    """Return the squared Euclidean distance of each record to each centre.

    Args:
        x: (N, D) N records with D features.
        centres: (K, D) K centres.

    Returns:
        (N, K) squared distances.
    """
    # |x − c|² = |x|² − 2 x·c + |c|². Rounding errors could make it negative.
    products = x @ centres.T
    distances: Floats = (x**2).sum(1)[:, None] - 2 * products + (centres**2).sum(1)
    return np.maximum(distances, 0.0)


def _run_expectation_maximization(x: Floats, memberships: Floats, shrinkage: Shrinkage, max_rounds: int) -> Mixture:
    """Fit a mixture of K Gaussians to records by expectation-maximisation, beginning with given memberships.

    Args:
        x: (N, D) records with D features, without missing values.
        memberships: (N, K) share of each record that belongs to each component. The sum of a row is 1.
        shrinkage: How far covariances are moved towards a common one.
        max_rounds: Largest number of rounds. There are fewer if the likelihood hardly increases.
    """
    previous_mean = -np.inf  # mean log-likelihood after the previous round
    for _ in range(max_rounds):
        mixture = _maximize(x, memberships, shrinkage)  # M step
        log_densities = mixture.compute_log_densities(x)  # (N, K)
        log_likelihoods = np.logaddexp.reduce(log_densities, 1)
        if log_likelihoods.mean() < previous_mean + MIN_ROUND_GAIN:
            break
        previous_mean = float(log_likelihoods.mean())
        # E step: the share of a component is its density divided by the density of the mixture.
        memberships = np.exp(log_densities - log_likelihoods[:, None])
    return mixture


def _refit(x: Floats, initial: Mixture, shrinkage: Shrinkage) -> Mixture:
    """Refit a mixture, which was fitted to all records, to the records outside one fold of a cross-validation.

    A few rounds of expectation-maximisation suffice, because they begin with the given mixture. For the same reason the
    components keep their order, by which the network identifies them.

    Args:
        x: (N, D) records outside the fold with D features, without missing values.
        initial: The mixture that was fitted to all records.
        shrinkage: How far covariances are moved towards a common one.
    """
    # E step: the share of each record that belongs to each component is its density under the component, divided by its
    # density under the mixture.
    log_densities = initial.compute_log_densities(x)  # (N, K), each contains the weight of the component
    memberships = np.exp(log_densities - np.logaddexp.reduce(log_densities, 1)[:, None])
    return _run_expectation_maximization(x, memberships, shrinkage, MAX_REFIT_ROUNDS)


def _maximize(x: Floats, memberships: Floats, shrinkage: Shrinkage) -> Mixture:
    """Return the mixture that fits the records for given memberships: the M step of expectation-maximisation.

    Args:
        x: (N, D) records with D features, without missing values.
        memberships: (N, K) share of each record that belongs to each of K components. The sum of a row is 1.
        shrinkage: How far covariances are moved towards a common one.
    """
    (N, D), K = x.shape, memberships.shape[1]
    sizes = memberships.sum(0) + 1e-9  # (K,) number of records of each component
    means = memberships.T @ x / sizes[:, None]
    # Scatter matrices (K, D, D): Σ membership · (x − mean)(x − mean)ᵀ = Σ membership · x xᵀ − size · mean meanᵀ.
    second_moments = np.stack([x.T @ (x * weights[:, None]) for weights in memberships.T])
    scatter = second_moments - sizes[:, None, None] * _compute_outer_products(means)
    # The common covariance contains a tenth of a record with the variances of all data, so that it is never singular.
    common = (scatter.sum(0) + 0.1 * np.diag(x.var(0) + 1e-9)) / (N + 1.0)
    # Multiply the correlations by 1 − diagonal_share. The variances stay the same.
    diagonal = np.diag(np.diag(common))
    common = common + shrinkage.diagonal_share * (diagonal - common)
    # Each component's covariance counts as `size` records, the common one as `strength` records.
    strength = shrinkage.strength
    covariances = (scatter + strength * common) / (sizes + strength)[:, None, None] + RIDGE**2 * np.eye(D)
    weights = (sizes + 1.0) / (sizes.sum() + K)  # one additional record in each component keeps its weight positive
    return Mixture(np.log(weights), means, covariances)


def _compute_outer_products(vectors: Floats) -> Floats:
    """Return the outer product v vᵀ of each of K vectors v with itself.

    Args:
        vectors: (K, D) K vectors of length D.

    Returns:
        (K, D, D) outer products.
    """
    outer_products: Floats = vectors[:, :, None] * vectors[:, None, :]
    return outer_products


def extract_mixture(prior: GaussianPrior, variant: int = 0) -> Mixture:
    """Return a mixture of Gaussians that a prior contains, as float64 NumPy arrays.

    Args:
        prior: The prior. It can store several mixtures (variants), one after the other in the first dimension of its
            tensors. That of a trained model stores a single one.
        variant: The index of the mixture.
    """
    tensors = (prior.log_weights[variant], prior.means[variant], prior.covariances[variant])
    return Mixture(*(tensor.double().cpu().numpy() for tensor in tensors))


def build_prior(schema: Schema, mixtures: list[Mixture]) -> GaussianPrior:
    """Return a Gaussian prior with one variant for each of the given mixtures.

    The prior computes the conditionals of a mixture, which are inputs of the network.

    Args:
        schema: The features of the model.
        mixtures: Mixtures with the same number of components over the continuous features of the schema, in its order.
    """
    prior = GaussianPrior(schema, num_components=len(mixtures[0].means), num_variants=len(mixtures))
    prior.log_weights = torch.from_numpy(np.stack([mixture.log_weights for mixture in mixtures]))
    prior.means = torch.from_numpy(np.stack([mixture.means for mixture in mixtures]))
    prior.covariances = torch.from_numpy(np.stack([mixture.covariances for mixture in mixtures]))
    return prior
