"""The Gaussians that guide the network: expectation and maximisation, their number by cross-validation.

A network that is shown, while it learns, what Gaussians fitted to the very same records expect of them trusts them too
much, the more the fewer records there are. So training records are dealt into folds, and each fold is guided by a
variant that was refitted without it (`Guides.folds`); scoring uses the one fitted to all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deformer_stream.core.gaussians import Gaussians, Guide
from deformer_stream.core.schema import Schema
from trainer.data import TRAIN, Prepared
from trainer.sampling import Noise, read_rows, seeded

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FOLDS = 5
ROWS = 3000
"""More records than this do not make the Gaussians better by much, only slower."""
WIDEST_TABLE = 64
"""With more continuous features the Cholesky factors cost more than the network, so there is no guide."""
ROWS_PER_COMPONENT = 4
ROUNDS, REFITTED = 40, 4
"""Most rounds of expectation and maximisation; rounds without a fold, from the fit to all."""
CONVERGED = 1e-3
"""Nats a record that a round must gain for another one to follow."""
RIDGE = 1e-3
"""Standard deviation added to every feature, normalised units, so that a covariance can be inverted."""
SHRINKAGES = ((1.0, 0.02), (1.0, 0.2), (10.0, 0.02), (10.0, 0.2))
"""To choose from: records' worth of the covariance common to all components added to each, and how far that one is
drawn to its diagonal."""
DRAWS_BY_ONE, DRAWS = 20, 2
"""How often missing readings are drawn anew: from a single Gaussian first, then from the mixture."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """log_weights: (K,). means: (K, D). covariances: (K, D, D)."""

    log_weights: Floats
    means: Floats
    covariances: Floats

    def log_densities(self, x: Floats) -> Floats:
        """x: (N, D) → (N, K) ln of weight times density."""
        out = np.empty((len(x), len(self.means)))
        for k, (mean, covariance) in enumerate(zip(self.means, self.covariances, strict=True)):
            factor = np.linalg.cholesky(covariance)
            z = np.linalg.solve(factor, (x - mean).T)
            out[:, k] = -0.5 * (z * z).sum(0) - np.log(np.diag(factor)).sum()
        out += self.log_weights - 0.5 * x.shape[1] * np.log(2 * np.pi)
        return out


@dataclass(frozen=True, slots=True)
class Shrinkage:
    """strength: records' worth of the common covariance. diagonal: share of its diagonal in that one."""

    strength: float
    diagonal: float


@dataclass(frozen=True, slots=True)
class Guides:
    """whole: fitted to all training records. folds: variants of it, each refitted without one fold. fold_of: (N,) fold
    of each record of the table, by row number. nll: cross-validated −ln p of a record's numbers, nats."""

    whole: Gaussians
    folds: Gaussians
    fold_of: Ints
    nll: float

    @property
    def components(self) -> int:
        return self.whole.components

    def without_own_fold(self, features: Tensor, values: Tensor, rows: Ints) -> Guide:
        """What records of the table, by row number (B,), are guided by in training; see `Gaussians.forward`."""
        with torch.no_grad():
            guide: Guide = self.folds(features, values, torch.from_numpy(self.fold_of[rows]).to(features.device))
        return guide


def fit(data: Prepared, most: int, seed: int) -> Guides | None:
    """Up to `most` Gaussians for the continuous features, as many as cross-validation on training records likes best.

    None where there is nothing to guide: no continuous feature, or more than `WIDEST_TABLE`."""
    continuous = np.flatnonzero(~data.schema.discrete)
    rng = np.random.default_rng([seed, 0x6A55])
    fold_of = rng.integers(0, FOLDS, len(data.split))
    rows = data.rows(TRAIN)
    rows = np.sort(rng.choice(rows, ROWS, replace=False)) if len(rows) > ROWS else rows
    if most < 1 or not 0 < len(continuous) <= WIDEST_TABLE:
        return None
    values, _ = read_rows(data, rows)
    spread, _ = Noise.of(data.schema).apply(values, seeded(seed, 0x6A55))
    x = spread[:, continuous].double().numpy()
    missing = np.isnan(x)
    x = _filled_at_random(x, missing, rng)
    folds = fold_of[rows]

    def drawn(mixture: Mixture, draw: int) -> Floats:
        known = torch.from_numpy(np.where(missing, np.nan, x))
        return np.asarray(_module(data.schema, [mixture]).draw_missing(known, seeded(seed, 0x6A56, draw)))

    for draw in range(DRAWS_BY_ONE if missing.any() else 0):
        x = drawn(_maximised(x, np.ones((len(x), 1)), Shrinkage(*SHRINKAGES[0])), draw)
    nll, whole, parts = _best(x, folds, most, seed)
    for draw in range(DRAWS if missing.any() else 0):
        x = drawn(whole, DRAWS_BY_ONE + draw)
        nll, whole, parts = _best(x, folds, most, seed)
    return Guides(_module(data.schema, [whole]), _module(data.schema, parts), fold_of, nll)


def _filled_at_random(x: Floats, missing: NDArray[np.bool_], rng: np.random.Generator) -> Floats:
    """Missing readings of each column drawn from those that are there, to begin with; 0 where none is."""
    x = x.copy()
    for column, gaps in zip(x.T, missing.T, strict=True):
        if gaps.any():
            column[gaps] = rng.choice(column[~gaps], int(gaps.sum())) if not gaps.all() else 0.0
    return x


def _best(x: Floats, folds: Ints, most: int, seed: int) -> tuple[float, Mixture, list[Mixture]]:
    """The mixture with the least cross-validated −ln p; numbers of components are doubled until that no longer pays."""
    best: tuple[float, Mixture, list[Mixture]] | None = None
    components = 1
    while components == 1 or (components <= most and components * ROWS_PER_COMPONENT <= len(x)):
        found = []
        for shrinkage in (Shrinkage(*s) for s in SHRINKAGES):
            whole = _expectation_maximisation(x, _start(x, components, seed), shrinkage, ROUNDS)
            parts = [_refitted(x[folds != f], whole, shrinkage) for f in range(FOLDS)]
            inside = [np.logaddexp.reduce(part.log_densities(x[folds == f]), 1) for f, part in enumerate(parts)]
            found.append((-float(np.concatenate(inside).mean()), whole, parts))
        least = min(found, key=lambda one: one[0])
        if best is not None and least[0] >= best[0]:
            break
        best, components = least, 2 * components
    assert best is not None  # noqa: S101 - one component is always tried
    return best


def _start(x: Floats, components: int, seed: int) -> Floats:
    """(N, K) memberships: k-means from centres far apart (k-means++, Arthur and Vassilvitskii, SODA 2007)."""
    rng = np.random.default_rng([seed, components])
    x = x / (x.std(0) + 1e-9)
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
    scatter = np.stack([(x - m).T @ ((x - m) * w[:, None]) for m, w in zip(means, memberships.T, strict=True)])
    common = (scatter.sum(0) + 0.1 * np.diag(x.var(0) + 1e-9)) / (N + 1.0)
    diagonal = np.diag(np.diag(common))
    common = common + shrinkage.diagonal * (diagonal - common)
    strength = shrinkage.strength
    covariances = (scatter + strength * common) / (size + strength)[:, None, None] + RIDGE**2 * np.eye(D)
    return Mixture(np.log((size + 1.0) / (size.sum() + K)), means, covariances)


def _module(schema: Schema, variants: list[Mixture]) -> Gaussians:
    module = Gaussians(schema, len(variants[0].means), len(variants))
    for name in ("log_weights", "means", "covariances"):
        setattr(module, name, torch.from_numpy(np.stack([getattr(mixture, name) for mixture in variants])))
    return module
