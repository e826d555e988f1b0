"""Fit the Gaussian prior of wide records: a factor analysis, whose conditionals are given to the network as input.

A mixture of Gaussians with full covariances (`trainer.gaussian_prior`) costs time that grows with the square of the
number of earlier readings. For records with more features than `gaussian_prior.MAX_MIXTURE_FEATURES`, the covariance is
that of a factor analysis in its place: A = B Bᵀ + diag(ψ), where the R columns of B say how each feature follows R
common factors. It needs few records, because it has few parameters. It is fitted by expectation-maximisation (Rubin and
Thayer, "EM algorithms for ML factor analysis", 1982), and the likelihood of held-out records chooses R.

Scoring conditions a reading on the `NEIGHBORS` earlier readings that are most correlated with it. This is the Gaussian
process of irregular readings (`model.gaussian_process`) in which all readings of a record have the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deformer_stream.model.gaussian_process import GaussianProcessPrior
from trainer.data import PreparedTable, Split
from trainer.sampling import Noise, create_generator, read_rows

Floats = NDArray[np.float64]

NEIGHBORS = 32
"""Number of earlier readings on which a reading is conditioned, the most that the compiled kernels support."""

MAX_ROWS = 2000
"""Largest number of training records to which the factors are fitted."""

RANKS = (4, 8, 16, 32, 64)
"""Numbers of factors that are tried, in this order."""

NUM_ROUNDS = 12
"""Rounds of expectation-maximisation. They are few, because they begin with the principal components."""

HELD_OUT_SHARE = 0.2
"""Share of the records whose likelihood chooses the number of factors."""

MIN_GAIN = 0.01
"""A larger number of factors is preferred if it decreases −ln p by more than this, in nats per record."""

MIN_VARIANCE = 1e-4
"""Smallest variance of a feature's own noise, in normalised units."""

MAX_COMMUNALITY = 0.9
"""Largest share of the variance of a feature that the factors explain in the beginning."""

MAX_DIFFERENT_ROWS = 500
"""Largest number of records with missing values whose likelihood is computed at once."""

OUTLIER_SHARE, OUTLIER_FACTOR = 0.02, 3.0
"""Probability of the wider Gaussian of a conditional, and its standard deviation relative to that of the other."""

MEAN_STRENGTH = 2.0
"""Weight of an old mean as a number of records when a model is adapted, as in `trainer.finetune`."""

FIT_SEED = 0xFAC7
"""Constant that is combined with the user's seed, so that this module's random numbers differ from others."""


@dataclass(frozen=True, slots=True)
class Factors:
    """A factor analysis of D features with R factors.

    Attributes:
        means: (D,) means in normalised units.
        loadings: (D, R) the matrix B.
        variances: (D,) the variances ψ of each feature's own noise.
    """

    means: Floats
    loadings: Floats
    variances: Floats

    def compute_nll(self, x: Floats) -> float:
        """Return the mean −ln p of the values of records, (N, D), in nats. Missing values are NaN, and do not count."""
        (num_features, rank), is_known = self.loadings.shape, ~np.isnan(x)
        if not is_known.all() and len(x) > MAX_DIFFERENT_ROWS:
            parts = [x[start : start + MAX_DIFFERENT_ROWS] for start in range(0, len(x), MAX_DIFFERENT_ROWS)]
            return float(np.average([self.compute_nll(part) for part in parts], weights=[len(part) for part in parts]))
        centred = np.where(is_known, x - self.means, 0.0)
        weighted = self.loadings / self.variances[:, None]  # (D, R)
        # The precision of the factors given a record, (N, R, R); one for all records without missing values.
        known_rows = np.ones((1, num_features)) if is_known.all() else is_known.astype(np.float64)
        products = (weighted[:, :, None] * self.loadings[:, None]).reshape(num_features, -1)
        factor = np.linalg.cholesky(np.eye(rank) + (known_rows @ products).reshape(-1, rank, rank))
        explained = np.linalg.solve(factor, (centred @ weighted)[:, :, None])
        squares = (centred**2 / self.variances).sum(1) - (explained**2).sum((1, 2))
        log_determinants = known_rows @ np.log(self.variances)
        log_determinants += 2 * np.log(np.diagonal(factor, axis1=1, axis2=2)).sum(1)
        num_known = is_known.sum(1).mean()
        return float(0.5 * (squares.mean() + log_determinants.mean() + num_known * math.log(2 * math.pi)))

    def to_state(self, is_linear: NDArray[np.bool_]) -> dict[str, Tensor]:
        """Return the factor analysis as the state of a `GaussianProcessPrior` with one time scale.

        Args:
            is_linear: (F,) which features of the schema are the D features.
        """
        num_features, rank = len(is_linear), self.loadings.shape[1]
        means, noise = np.zeros(num_features), np.ones(num_features)
        factors = np.zeros((1, num_features, rank))
        means[is_linear], noise[is_linear], factors[0, is_linear] = self.means, np.sqrt(self.variances), self.loadings
        arrays = {
            "means": means,
            "factors": factors,
            "deviations": np.zeros((1, num_features)),
            "noise": noise,
            "scales": np.ones(1),
            "outlier_share": np.full(num_features, OUTLIER_SHARE),
            "outlier_factor": np.full(num_features, OUTLIER_FACTOR),
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def fit_factors(
    data: PreparedTable,
    seed: int,
    max_rows: int = MAX_ROWS,
    is_time_short: Callable[[], bool] = lambda: False,
    rank: int | None = None,
) -> Factors:
    """Fit factors to the continuous features of the training records, except cyclic ones.

    Args:
        data: The prepared table, with at least one such feature.
        seed: Seed of the records that are chosen, of noise and of imputed readings.
        max_rows: Largest number of training records that are used.
        is_time_short: Called before a larger number of factors is tried. If it returns True, the best one so far is
            used.
        rank: The number of factors, None to choose it.

    Returns:
        The factors. Missing readings are imputed at random, from the factors as soon as there are any.
    """
    rng = np.random.default_rng([seed, FIT_SEED])
    rows = data.select_rows(Split.TRAIN)
    if len(rows) > max_rows:
        rows = np.sort(rng.choice(rows, max_rows, replace=False))
    values, _ = read_rows(data, rows)
    # Readings of a sensor with a limited resolution get uniform noise of the width of its step, as in training.
    noisy, _ = Noise.from_schema(data.schema).apply(values, create_generator(seed, FIT_SEED))
    x = noisy[:, np.flatnonzero(data.schema.is_linear)].double().numpy()
    has_readings = ~np.isnan(x).all(0)
    x = x[:, has_readings]
    is_missing = np.isnan(x)
    for column, is_gap in zip(x.T, is_missing.T, strict=True):  # a column is a view, so assigning to it changes x
        column[is_gap] = rng.choice(column[~is_gap], int(is_gap.sum()))
    rank = _choose_rank(x, is_missing, rng, is_time_short) if rank is None else rank
    # A run that is continued has the rank already, and must get the same factors. So they do not depend on the search
    # for the rank.
    fitted = _fit(x, is_missing, rank, np.random.default_rng([seed, FIT_SEED, 1]))
    # Normalised readings have mean 0 and variance 1, so a feature without readings gets them, and follows no factor.
    num_features = len(has_readings)
    factors = Factors(np.zeros(num_features), np.zeros((num_features, rank)), np.ones(num_features))
    factors.means[has_readings] = fitted.means
    factors.loadings[has_readings] = fitted.loadings
    factors.variances[has_readings] = fitted.variances
    return factors


def _choose_rank(
    x: Floats, is_missing: NDArray[np.bool_], rng: np.random.Generator, is_time_short: Callable[[], bool]
) -> int:
    """Return the number of factors with which held-out records are most probable."""
    is_held_out = rng.random(len(x)) < HELD_OUT_SHARE
    if is_held_out.all() or not is_held_out.any():
        return 1
    # Values that were imputed at random contradict the relations, so that more factors would seem to predict worse.
    held_out = np.where(is_missing, np.nan, x)[is_held_out]
    best_rank, best_nll = 1, math.inf
    for rank in RANKS:
        if rank >= min((~is_held_out).sum(), x.shape[1]) or (best_nll < math.inf and is_time_short()):
            break
        nll = _fit(x[~is_held_out], is_missing[~is_held_out], rank, rng).compute_nll(held_out)
        if nll > best_nll - MIN_GAIN:
            break
        best_rank, best_nll = rank, nll
    return best_rank


def _fit(x: Floats, is_missing: NDArray[np.bool_], rank: int, rng: np.random.Generator) -> Factors:
    """Return a factor analysis of records with R factors, by expectation-maximisation.

    Args:
        x: (N, D) records, with imputed values where they are missing.
        is_missing: (N, D) which values are missing. They are imputed again in each round.
        rank: The number R.
        rng: The source of random numbers.
    """
    num_rows = len(x)
    means = x.mean(0)
    centred = x - means
    totals = (centred**2).mean(0)
    loadings = _find_components(centred, rank, rng)
    if is_missing.any():
        # Values that were imputed at random follow no factor. This reduces the components by the share of known values.
        known_shares = 1.0 - is_missing.mean(0)
        loadings *= np.divide(1.0, known_shares, out=np.zeros(len(means)), where=known_shares > 0)[:, None]
        communalities = (loadings**2).sum(1) / np.maximum(totals, 1e-12)
        loadings *= np.sqrt(MAX_COMMUNALITY / np.maximum(communalities, MAX_COMMUNALITY))[:, None]
    variances = np.maximum(totals - (loadings**2).sum(1), np.maximum(0.1 * totals, MIN_VARIANCE))
    for _ in range(NUM_ROUNDS):
        weighted = loadings / variances[:, None]
        covariance = np.linalg.inv(np.eye(rank) + weighted.T @ loadings)  # (R, R) of the factors given a record
        factors = centred @ weighted @ covariance  # (N, R) their means
        if is_missing.any():
            drawn = factors + rng.normal(size=factors.shape) @ np.linalg.cholesky(covariance).T
            noise = np.sqrt(variances) * rng.normal(size=centred.shape)
            centred = np.where(is_missing, drawn @ loadings.T + noise, centred)
            totals = (centred**2).mean(0)
        products = centred.T @ factors  # (D, R)
        moments = num_rows * covariance + factors.T @ factors
        loadings = np.linalg.solve(moments, products.T).T
        variances = np.maximum(totals - (loadings * products).sum(1) / num_rows, MIN_VARIANCE)
    # The factors fit the noise of the records, too, as a regression with R regressors does.
    return Factors(means, loadings, variances / max(1.0 - rank / num_rows, 0.5))


def _find_components(centred: Floats, rank: int, rng: np.random.Generator) -> Floats:
    """Return the first R principal components of records, (D, R), scaled by their standard deviations.

    They are found by subspace iteration (Halko, Martinsson and Tropp, "Finding structure with randomness", 2011).
    """
    basis = rng.normal(size=(centred.shape[1], min(rank + 8, *centred.shape)))
    for _ in range(4):
        basis, _ = np.linalg.qr(centred.T @ (centred @ basis))
    _, deviations, components = np.linalg.svd(centred @ basis, full_matrices=False)
    components = basis @ components.T[:, :rank] * (deviations[:rank] / math.sqrt(len(centred)))
    return np.pad(components, ((0, 0), (0, rank - components.shape[1])))


def adapt_factors(old: GaussianProcessPrior, data: PreparedTable, num_old_features: int) -> dict[str, Tensor]:
    """Return the state of the process of an old model for the records of another machine, with more features.

    The means are moved towards those of the new records. Covariances stay, because machines differ in the means of
    their measurements more than in the correlations. New features get their own variance and follow no factor.

    Args:
        old: The process of the old model.
        data: The prepared table, whose schema begins with the features of the old model.
        num_old_features: Number of features of the old model.
    """
    values, _ = read_rows(data, data.select_rows(Split.TRAIN))
    x = values.double()
    counts, means = (~x.isnan()).sum(0), x.nanmean(0).nan_to_num(0.0)
    deviations = (x - means).square().nanmean(0).sqrt().nan_to_num(1.0).clamp(min=math.sqrt(MIN_VARIANCE))
    state = {name: buffer.cpu() for name, buffer in old.state_dict().items()}
    num_new = len(data.schema) - num_old_features
    widened = {
        "means": torch.cat([state["means"], means[num_old_features:]]),
        "factors": torch.nn.functional.pad(state["factors"], (0, 0, 0, num_new)),
        "deviations": torch.nn.functional.pad(state["deviations"], (0, num_new)),
        "noise": torch.cat([state["noise"], deviations[num_old_features:]]),
        "scales": state["scales"],
        "outlier_share": torch.nn.functional.pad(state["outlier_share"], (0, num_new), value=OUTLIER_SHARE),
        "outlier_factor": torch.nn.functional.pad(state["outlier_factor"], (0, num_new), value=OUTLIER_FACTOR),
    }
    is_linear = torch.from_numpy(data.schema.is_linear.copy())
    moved = (counts * means + MEAN_STRENGTH * widened["means"]) / (counts + MEAN_STRENGTH)
    widened["means"] = torch.where(is_linear, moved, widened["means"])
    return widened
