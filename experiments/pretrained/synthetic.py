"""Draw synthetic tables: the only training data of the pretrained model.

A table has one of five structures: a mixture of Gaussians with low-rank covariances, a structural causal model, a
copula of a few common factors, a curved surface in the space of the features, or one of the last three in several
regimes. Its columns then get marginal distributions as sensors have them: skewed, heavy-tailed, bounded, with many
equal values, or rounded to a resolution (quantum). As in training of the product, readings with a known quantum are
spread uniformly over it.

A table depends on its seed, its number and its difficulty alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MIN_FEATURES, MAX_FEATURES = 4, 32
"""Bounds of the number of features of a table."""

MIN_ROWS, MAX_ROWS = 80, 1600
"""Bounds of the number of rows to which the guide is fitted."""

MAX_VALUE = 10.0
"""Values are clipped to this number of standard deviations."""

MIN_NOISE = 2e-3
"""Standard deviation of the noise on all columns, in standard deviations, so that no density is unbounded."""

TABLE_SEED = 0x7AB1
"""Constant that is combined with the user's seed, so that this module's random numbers differ from others."""


@dataclass(frozen=True, slots=True)
class SyntheticTable:
    """A table in normalised units: each column has mean 0 and standard deviation 1 in the first rows.

    Attributes:
        rows: (N, D) rows to which the guide is fitted.
        held_out: (Q, D) further rows of the same distribution.
        quantum_widths: (D,) resolution of each column, 0 if it has none.
    """

    rows: Floats
    held_out: Floats
    quantum_widths: Floats


def draw_table(seed: int, number: int, difficulty: float, num_held_out: int) -> SyntheticTable:
    """Draw a table.

    Args:
        seed: Seed of all tables.
        number: Number of the table. Each number gives another table.
        difficulty: From 0 (few features, smooth structures) to 1.
        num_held_out: Number Q of held-out rows.
    """
    rng = np.random.default_rng([seed, TABLE_SEED, number])
    max_features = round(10 + (MAX_FEATURES - 10) * difficulty)
    num_features = round(np.exp(rng.uniform(np.log(MIN_FEATURES), np.log(max_features + 0.49))))
    num_rows = round(np.exp(rng.uniform(np.log(MIN_ROWS), np.log(MAX_ROWS))))
    total = num_rows + num_held_out
    structures: list[Callable[[np.random.Generator, int, int], Floats]] = [
        draw_mixture,
        draw_causal_model,
        draw_copula,
        draw_surface,
        draw_regimes,
    ]
    structure = structures[rng.choice(5, p=[0.15, 0.25, 0.15, 0.25, 0.2])]
    x = _standardize(structure(rng, total, num_features), total)
    # Which kinds of marginal distributions occur, and how often, is a property of the table.
    transformed_share = rng.uniform(0.0, 0.4 + 0.6 * difficulty)
    rounded_share = rng.choice([0.0, rng.random(), 1.0], p=[0.4, 0.3, 0.3])
    quantum_widths = np.zeros(num_features)
    for column in range(num_features):
        if rng.random() < transformed_share:
            x[:, column] = change_marginal(rng, x[:, column])
        if rng.random() < rounded_share:
            deviation = x[:num_rows, column].std() + 1e-9
            quantum_widths[column] = deviation * np.exp(rng.uniform(np.log(2e-3), np.log(0.5)))
    has_quantum = quantum_widths > 0
    safe = np.where(has_quantum, quantum_widths, 1.0)
    rounded = (np.round(x / safe) + rng.random(x.shape) - 0.5) * safe
    x = np.where(has_quantum, rounded, x)
    location, scale = x[:num_rows].mean(0), x[:num_rows].std(0) + 1e-6
    x = np.clip((x - location) / scale, -MAX_VALUE, MAX_VALUE)
    x = x + MIN_NOISE * rng.normal(size=x.shape)
    return SyntheticTable(x[:num_rows], x[num_rows:], quantum_widths / scale)


def _standardize(x: Floats, num_rows: int) -> Floats:
    """Return columns with mean 0 and standard deviation 1 in the first rows, without values far outside."""
    z: Floats = (x - x[:num_rows].mean(0)) / (x[:num_rows].std(0) + 1e-9)
    return np.clip(np.nan_to_num(z), -8.0, 8.0)


def draw_mixture(rng: np.random.Generator, num_rows: int, num_features: int) -> Floats:
    """Draw rows of a mixture of Gaussians with low-rank covariances and unequal weights, (N, D)."""
    num_components = int(rng.integers(1, 13))
    weights = rng.dirichlet(np.full(num_components, rng.choice([0.5, 1.0, 5.0])))
    labels = rng.choice(num_components, num_rows, p=weights)
    spread, rank = rng.uniform(0.5, 3.0), int(rng.integers(1, min(num_features, 6) + 1))
    means = spread * rng.normal(size=(num_components, num_features))
    factors = rng.normal(size=(num_components, rank, num_features)) / np.sqrt(rank)
    factors *= np.exp(0.5 * rng.normal(size=(num_components, 1, num_features)))
    noise = np.exp(rng.uniform(np.log(0.03), np.log(0.6), size=(num_components, num_features)))
    latent = rng.normal(size=(num_rows, rank))
    x = means[labels] + noise[labels] * rng.normal(size=(num_rows, num_features))
    return np.asarray(x + np.einsum("nr,nrd->nd", latent, factors[labels]))


def _draw_noise(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Draw noise of variance of about 1: Gaussian, Laplace, uniform, skewed or heavy-tailed."""
    kind = rng.integers(5)
    if kind == 0:
        return np.asarray(rng.laplace(size=shape) / np.sqrt(2.0))
    if kind == 1:
        return rng.uniform(-1.7, 1.7, size=shape)
    if kind == 2:
        return rng.exponential(size=shape) - 1.0
    if kind == 3:
        return np.asarray(rng.standard_t(4, size=shape) / np.sqrt(2.0))
    return rng.normal(size=shape)


def draw_causal_model(rng: np.random.Generator, num_rows: int, num_features: int) -> Floats:
    """Draw rows of a structural causal model, (N, D): each column is a function of earlier ones, plus noise.

    The functions are linear, products, steps, waves or small networks. The deviation of the noise depends on the
    parents in some columns.
    """
    x = np.zeros((num_rows, num_features))
    smallest_noise = np.exp(rng.uniform(np.log(0.01), np.log(0.5)))
    for column in range(num_features):
        num_parents = min(column, int(rng.integers(0, 4)))
        noise = _draw_noise(rng, (num_rows,))
        if not num_parents:
            x[:, column] = noise
            if rng.random() < 0.2:  # a mode of operation
                x[:, column] = 2.0 * rng.integers(0, rng.integers(2, 5), num_rows) + 0.1 * noise
            x[:, column] = _standardize(x[:, column : column + 1], num_rows)[:, 0]
            continue
        parents = x[:, rng.choice(column, num_parents, replace=False)]
        direction = rng.normal(size=num_parents)
        linear = parents @ direction / (np.linalg.norm(direction) + 1e-9)
        kind = rng.integers(6)
        if kind == 0:
            signal = parents[:, 0] * parents[:, -1] if num_parents > 1 else linear**2
        elif kind == 1:
            signal = np.where(linear > rng.normal(), 1.0, 0.0) + 0.2 * linear
        elif kind == 2:
            signal = np.sin(rng.uniform(1.0, 3.0) * linear + rng.uniform(0.0, 6.0))
        elif kind == 3:
            hidden = np.tanh(parents @ rng.normal(size=(num_parents, 8)) * 1.5 + rng.normal(size=8))
            signal = hidden @ rng.normal(size=8)
        else:
            signal = linear
        signal = (signal - signal.mean()) / (signal.std() + 1e-9)
        deviation = np.exp(rng.uniform(np.log(smallest_noise), 0.0)) * np.ones(num_rows)
        if rng.random() < 0.4:
            deviation = deviation * np.exp(rng.uniform(0.3, 1.0) * np.clip(parents[:, 0], -3, 3))
        x[:, column] = _standardize((signal + deviation * noise)[:, None], num_rows)[:, 0]
    return x[:, rng.permutation(num_features)]


def draw_copula(rng: np.random.Generator, num_rows: int, num_features: int) -> Floats:
    """Draw rows of a Gaussian copula or a t copula of a few common factors, (N, D)."""
    rank = int(rng.integers(1, min(num_features, 8) + 1))
    loadings = rng.normal(size=(rank, num_features)) * (rng.random((rank, num_features)) < rng.uniform(0.3, 1.0))
    specific = np.exp(rng.uniform(np.log(0.1), np.log(1.5), num_features))
    x = rng.normal(size=(num_rows, rank)) @ loadings + specific * rng.normal(size=(num_rows, num_features))
    if rng.random() < 0.4:
        degrees = rng.uniform(3.0, 10.0)
        x = x * np.sqrt(degrees / rng.chisquare(degrees, num_rows))[:, None]
    return np.asarray(x)


def draw_surface(rng: np.random.Generator, num_rows: int, num_features: int) -> Floats:
    """Draw rows near a curved surface of one to four dimensions, (N, D): a random network of a latent position."""
    num_dimensions, num_hidden = int(rng.integers(1, 5)), 24
    latent = (
        rng.normal(size=(num_rows, num_dimensions))
        if rng.random() < 0.5
        else rng.uniform(-1.7, 1.7, (num_rows, num_dimensions))
    )
    if rng.random() < 0.4:  # clusters on the surface
        centres = rng.normal(size=(int(rng.integers(2, 10)), num_dimensions))
        latent = centres[rng.integers(len(centres), size=num_rows)] + rng.uniform(0.1, 0.6) * latent
    curvature = rng.uniform(0.3, 2.5)
    hidden = np.tanh(curvature * (latent @ rng.normal(size=(num_dimensions, num_hidden))) + rng.normal(size=num_hidden))
    if rng.random() < 0.5:
        hidden = np.tanh(hidden @ rng.normal(size=(num_hidden, num_hidden)) * 0.5)
    x = hidden @ rng.normal(size=(num_hidden, num_features))
    if rng.random() < 0.4:  # neighbouring columns resemble each other, as along a curve or in an image
        kernel = np.exp(-0.5 * (np.subtract.outer(np.arange(num_features), np.arange(num_features)) / 1.5) ** 2)
        x = x @ kernel
    x = x / (x.std(0) + 1e-9)
    noise = np.exp(rng.uniform(np.log(0.02), np.log(0.6))) * np.exp(0.5 * rng.normal(size=num_features))
    return np.asarray(x + noise * rng.normal(size=x.shape))


def draw_regimes(rng: np.random.Generator, num_rows: int, num_features: int) -> Floats:
    """Draw rows of two to six regimes, each with a structure of its own, (N, D)."""
    num_regimes = int(rng.integers(2, 7))
    labels = rng.choice(num_regimes, num_rows, p=rng.dirichlet(np.full(num_regimes, 2.0)))
    x, spread = np.zeros((num_rows, num_features)), rng.uniform(0.3, 2.5)
    for regime in range(num_regimes):
        rows = np.flatnonzero(labels == regime)
        if not len(rows):
            continue
        structure = (draw_causal_model, draw_copula, draw_surface)[rng.integers(3)]
        scales = np.exp(0.5 * rng.normal(size=num_features))
        part = structure(rng, len(rows) + 20, num_features)[: len(rows)] * scales
        x[rows] = part + spread * rng.normal(size=num_features) * (rng.random(num_features) < 0.7)
    return x


def change_marginal(rng: np.random.Generator, x: Floats) -> Floats:
    """Return a column with another marginal distribution, (N,). The order of most values stays.

    Args:
        rng: The source of random numbers.
        x: (N,) values with mean 0 and standard deviation of about 1.
    """
    sign = rng.choice([-1.0, 1.0])
    z = sign * x
    kind = rng.integers(8)
    if kind <= 1:  # skewed to one side
        z = np.exp(rng.uniform(0.3, 1.3) * np.clip(z, -5, 4))
    elif kind == 2:  # zero below a threshold, as a flow meter of a pump that is off
        z = np.maximum(z - rng.uniform(-1.0, 1.0), 0.0)
    elif kind == 3:  # saturates at one side or both
        z = np.clip(z, -rng.uniform(0.3, 2.0), rng.uniform(0.3, 2.0))
    elif kind == 4:  # bounded without equal values
        z = np.tanh(rng.uniform(0.7, 3.0) * z)
    elif kind == 5:  # heavy tails on both sides
        z = np.sinh(rng.uniform(0.5, 1.2) * np.clip(z, -4, 4))
    elif kind == 6:  # few levels with some noise
        z = np.round(z * rng.uniform(0.5, 2.0)) + rng.uniform(0.01, 0.2) * rng.normal(size=len(z))
    else:  # a constant value that single readings leave
        z = np.where(rng.random(len(z)) < rng.uniform(0.2, 0.95), rng.normal(), z)
    return np.asarray(sign * z)
