"""The Gaussians that guide the network: expectation and maximisation, their number by cross-validation.

A network that is shown, while it learns, what Gaussians fitted to the very same records expect of them trusts them too
much, the more the fewer records there are. So training records are dealt into folds, and each fold is guided by a
variant that was refitted without it (`Guides.folds`); scoring uses the one fitted to all of them.
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
from trainer.data import TRAIN, PreparedTable
from trainer.sampling import Noise, read_rows, seeded

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_FOLDS = 5
ROWS = 6000
"""More records than this do not make the Gaussians better by much, only slower."""
MAX_FEATURES = 64
"""With more features on a line the Cholesky factors cost more than the network, so there is no guide."""
ROWS_PER_COMPONENT = 4
NUMBERS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Of components, one after the other."""
GAIN = 0.01
"""Nats a record that more components must gain."""
ROUNDS, REFITTED = 60, 4
"""Most rounds of expectation and maximisation; rounds without a fold, from the fit to all."""
CONVERGED = 1e-3
"""Nats a record that a round must gain for another one to follow."""
RIDGE = 1e-3
"""Standard deviation added to every feature, normalised units, so that a covariance can be inverted."""
DIAGONALS = (0.02, 0.2)
"""How far the covariance common to all components may be drawn to its diagonal."""
ALIKE, WIDTH = 0.1, 0.05
"""Share of a feature's readings that lie within so many of its standard deviations: a value that keeps coming back."""
APART = 2.0
"""Standard deviations, in the first clustering, between being such a reading and not."""
STRONGEST, WEAKEST = 10.0, 1e-5
"""Records' worth of the common covariance that are added to each component's own."""
DRAWS_BY_ONE, DRAWS = 20, 2
"""How often missing readings are drawn anew: from a single Gaussian first, then from the mixture."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """log_weights: (K,). means: (K, D). covariances: (K, D, D)."""

    log_weights: Floats
    means: Floats
    covariances: Floats

    def log_densities(self, x: Floats) -> Floats:
        """x: (N, D) → (N, K) ln of weight times density. One matrix product for all components."""
        (K, D), factors = self.means.shape, np.linalg.cholesky(self.covariances)
        whiten = np.linalg.inv(factors)
        z = x @ whiten.reshape(K * D, D).T - (whiten @ self.means[:, :, None]).reshape(K * D)
        size = np.log(np.diagonal(factors, axis1=1, axis2=2)).sum(1) + 0.5 * D * np.log(2 * np.pi)
        out: Floats = self.log_weights - size - 0.5 * (z * z).reshape(-1, K, D).sum(2)
        return out


@dataclass(frozen=True, slots=True)
class Shrinkage:
    """strength: records' worth of the common covariance. diagonal: share of its diagonal in that one."""

    strength: float
    diagonal: float


@dataclass(frozen=True, slots=True)
class CrossFittedPriors:
    """whole: fitted to all training records. folds: variants of it, each refitted without one fold. fold_of: (N,) fold
    of each record of the table, by row number. nll: cross-validated −ln p of a record's numbers, nats."""

    full: GaussianPrior
    by_fold: GaussianPrior
    fold_by_row: Ints
    nll: float

    @property
    def num_components(self) -> int:
        return self.full.components

    def compute_conditionals(self, features: Tensor, values: Tensor, rows: Ints) -> PriorConditional:
        """What records of the table, by row number (B,), are guided by in training; see `Gaussians.forward`."""
        with torch.no_grad():
            guide: PriorConditional = self.by_fold(
                features, values, torch.from_numpy(self.fold_by_row[rows]).to(features.device)
            )
        return guide


def fit_priors(data: PreparedTable, max_components: int, seed: int, is_time_short: Callable[[], bool] = lambda: False) -> CrossFittedPriors | None:
    """Up to `most` Gaussians for the features on a line, as many as cross-validation on training records likes best.

    hurry: asked before more Gaussians are tried, whether time is short. None where there is nothing to guide: no
    such feature, or more than `WIDEST_TABLE`."""
    linear = np.flatnonzero(data.schema.linear)
    rng = np.random.default_rng([seed, 0x6A55])
    fold_of = rng.integers(0, NUM_FOLDS, len(data.split))
    rows = data.select_rows(TRAIN)
    rows = np.sort(rng.choice(rows, ROWS, replace=False)) if len(rows) > ROWS else rows
    if max_components < 1 or not 0 < len(linear) <= MAX_FEATURES:
        return None
    values, _ = read_rows(data, rows)
    spread, _ = Noise.of(data.schema).apply(values, seeded(seed, 0x6A55))
    x = spread[:, linear].double().numpy()
    missing = np.isnan(x)
    x = _filled_at_random(x, missing, rng)
    folds = fold_of[rows]

    def drawn(mixture: Mixture, draw: int) -> Floats:
        known = torch.from_numpy(np.where(missing, np.nan, x))
        return np.asarray(build_prior(data.schema, [mixture]).draw_missing(known, seeded(seed, 0x6A56, draw)))

    for draw in range(DRAWS_BY_ONE if missing.any() else 0):
        x = drawn(_maximised(x, np.ones((len(x), 1)), Shrinkage(1.0, DIAGONALS[0])), draw)
    best = _best(x, folds, max_components, seed, is_time_short)
    for draw in range(DRAWS if missing.any() else 0):  # number and shrinkage are settled
        x = drawn(best.whole, DRAWS_BY_ONE + draw)
        best = _fitted(x, folds, len(best.whole.means), best.shrinkage, seed, best.apart)
    return CrossFittedPriors(
        build_prior(data.schema, [best.whole]), build_prior(data.schema, best.parts), fold_of, best.nll
    )


def _filled_at_random(x: Floats, missing: NDArray[np.bool_], rng: np.random.Generator) -> Floats:
    """Missing readings of each column drawn from those that are there, to begin with; where none is, as in the slots
    of a sensor that never reports then, they are what normalised readings are: of mean 0 and deviation 1."""
    x = x.copy()
    for column, gaps in zip(x.T, missing.T, strict=True):
        if gaps.any():
            count = int(gaps.sum())
            column[gaps] = rng.normal(size=count) if gaps.all() else rng.choice(column[~gaps], count)
    return x


def _best(x: Floats, folds: Ints, most: int, seed: int, hurry: Callable[[], bool]) -> _Fitted:
    """The mixture with the least cross-validated −ln p. Where a value keeps coming back, as the zeros of a flow that
    rests, clusters seldom find it by themselves: then they begin once with it apart, and once without regard to it."""
    plain = _grown(x, folds, most, seed, hurry, apart=False)
    if not _repeated(x).shape[1] or hurry():
        return plain
    return min((plain, _grown(x, folds, most, seed, hurry, apart=True)), key=lambda one: one.nll)


def _grown(x: Floats, folds: Ints, most: int, seed: int, hurry: Callable[[], bool], apart: bool) -> _Fitted:
    """As many components as cross-validation likes. How far the common covariance is drawn to its diagonal is seen
    with one component; then their number grows until that has failed to pay twice, with the strength of shrinkage
    that is best so far and with a tenth of it: a narrow cluster bears but little of what is common to all."""
    first = (_fitted(x, folds, 1, Shrinkage(STRONGEST, d), seed, apart) for d in DIAGONALS)
    best = min(first, key=lambda one: one.nll)
    failures = 0
    for components in NUMBERS:
        if failures == 2 or components > most or components * ROWS_PER_COMPONENT > len(x) or hurry():
            break
        tried = (best.shrinkage, replace(best.shrinkage, strength=max(best.shrinkage.strength / 10.0, WEAKEST)))
        found = min((_fitted(x, folds, components, s, seed, apart) for s in set(tried)), key=lambda one: one.nll)
        better = found.nll < best.nll - GAIN
        best, failures = (found, 0) if better else (best, failures + 1)
    return best


@dataclass(frozen=True, slots=True)
class _Fitted:
    nll: float
    shrinkage: Shrinkage
    apart: bool
    whole: Mixture
    parts: list[Mixture]


def _fitted(x: Floats, folds: Ints, components: int, shrinkage: Shrinkage, seed: int, apart: bool) -> _Fitted:
    whole = _expectation_maximisation(x, _start(x, components, seed, apart), shrinkage, ROUNDS)
    parts = [_refitted(x[folds != f], whole, shrinkage) for f in range(NUM_FOLDS)]
    inside = [np.logaddexp.reduce(part.log_densities(x[folds == f]), 1) for f, part in enumerate(parts)]
    return _Fitted(-float(np.concatenate(inside).mean()), shrinkage, apart, whole, parts)


def _repeated(x: Floats) -> Floats:
    """(N, A) for each feature with a value that keeps coming back, 1 where a reading is it and 0 elsewhere."""
    columns = []
    for column in x.T:
        ordered, width = np.sort(column), WIDTH * column.std()
        count = np.searchsorted(ordered, ordered + width, "right") - np.arange(len(x))
        low = ordered[count.argmax()]
        if ALIKE * len(x) <= count.max() < len(x):
            columns.append((column >= low) & (column <= low + width))
    return np.array(columns, np.float64).reshape(-1, len(x)).T


def _start(x: Floats, components: int, seed: int, apart: bool) -> Floats:
    """(N, K) memberships: k-means from centres far apart (k-means++, Arthur and Vassilvitskii, SODA 2007).

    apart: whether values that keep coming back are features of their own there."""
    rng = np.random.default_rng([seed, components])
    x = x / (x.std(0) + 1e-9)
    if apart:
        marks = _repeated(x)
        x = np.concatenate([x, APART * marks / (marks.std(0) + 1e-9)], 1)
    centres = x[rng.integers(len(x), size=1)]
    while len(centres) < components:
        far = _squared(x, centres).min(1)
        far = far if far.sum() > 0 else np.ones(len(x))
        centres = np.concatenate([centres, x[rng.choice(len(x), 1, p=far / far.sum())]])
    for _ in range(10):
        nearest = _squared(x, centres).argmin(1)
        centres = np.stack([x[nearest == k].mean(0) if (nearest == k).any() else c for k, c in enumerate(centres)])
    return np.asarray(np.eye(components)[_squared(x, centres).argmin(1)])


def _squared(x: Floats, centres: Floats) -> Floats:
    """(N, K) squared distances."""
    products = x @ centres.T
    distances: Floats = (x**2).sum(1)[:, None] - 2 * products + (centres**2).sum(1)
    return np.maximum(distances, 0.0)


def _expectation_maximisation(x: Floats, memberships: Floats, shrinkage: Shrinkage, rounds: int) -> Mixture:
    before = -np.inf
    for _ in range(rounds):
        mixture = _maximised(x, memberships, shrinkage)
        densities = mixture.log_densities(x)
        total = np.logaddexp.reduce(densities, 1)
        if total.mean() < before + CONVERGED:
            break
        before = float(total.mean())
        memberships = np.exp(densities - total[:, None])
    return mixture


def _refitted(x: Floats, start: Mixture, shrinkage: Shrinkage) -> Mixture:
    """A few rounds on fewer records. Components keep their meaning, as they must: the network knows them by number."""
    densities = start.log_densities(x)
    memberships = np.exp(densities - np.logaddexp.reduce(densities, 1)[:, None])
    return _expectation_maximisation(x, memberships, shrinkage, REFITTED)


def _maximised(x: Floats, memberships: Floats, shrinkage: Shrinkage) -> Mixture:
    (N, D), K = x.shape, memberships.shape[1]
    size = memberships.sum(0) + 1e-9
    means = memberships.T @ x / size[:, None]
    scatter = np.stack([x.T @ (x * w[:, None]) for w in memberships.T]) - size[:, None, None] * _outer(means)
    common = (scatter.sum(0) + 0.1 * np.diag(x.var(0) + 1e-9)) / (N + 1.0)
    diagonal = np.diag(np.diag(common))
    common = common + shrinkage.diagonal * (diagonal - common)
    strength = shrinkage.strength
    covariances = (scatter + strength * common) / (size + strength)[:, None, None] + RIDGE**2 * np.eye(D)
    return Mixture(np.log((size + 1.0) / (size.sum() + K)), means, covariances)


def _outer(rows: Floats) -> Floats:
    """(K, D) → (K, D, D)"""
    return np.asarray(rows[:, :, None] * rows[:, None, :])


def extract_mixture(gaussians: GaussianPrior) -> Mixture:
    """The first variant."""
    parts = (gaussians.log_weights[0], gaussians.means[0], gaussians.covariances[0])
    return Mixture(*(part.double().cpu().numpy() for part in parts))


def build_prior(schema: Schema, variants: list[Mixture]) -> GaussianPrior:
    module = GaussianPrior(schema, len(variants[0].means), len(variants))
    for name in ("log_weights", "means", "covariances"):
        setattr(module, name, torch.from_numpy(np.stack([getattr(mixture, name) for mixture in variants])))
    return module
