"""Gamma functions of NumPy arrays in float64. NumPy itself has none, and SciPy would be a large dependency for two."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_TOLERANCE = 1e-16
"""Relative change of a series at which its computation ends."""
_FRACTION_TOLERANCE = 2.0**-51
"""Relative change of a continued fraction at which its computation ends: two units in the last place of 1. Where the
argument is huge, rounding keeps each change one unit away from 0, so a smaller number would never be reached."""
_MAX_TERMS = 10_000
"""Largest number of terms of a continued fraction; fewer than a hundred are usual."""


def log_gamma(x: NDArray[np.floating] | NDArray[np.integer]) -> Floats:
    """Return ln |Γ(x)| of each entry of an array of any shape, with the standard library's function."""
    distinct, index = np.unique(x, return_inverse=True)
    values = np.array([math.lgamma(entry) for entry in distinct.tolist()], np.float64)
    return values[index].reshape(np.shape(x))


def log_gamma_sf(shape: NDArray[np.floating], x: NDArray[np.floating]) -> Floats:
    """Return ln P(X > x), the log survival function of Gamma(shape, scale 1), without underflow however large x is.

    For x below a + 1, where a is the shape, the series of 1 − P is summed (DLMF 8.11.4). Otherwise Legendre's continued
    fraction is evaluated by Lentz's algorithm (DLMF 8.9.2). The compiled kernels use the same formulas
    (csrc/gamma_tail.h). The result of an entry does not depend on the other entries.

    Args:
        shape: The shape parameters a, positive.
        x: The arguments, of the same size. The result is 0 for arguments that are not positive.

    Returns:
        Natural logarithms, of the same size. NaN if an argument is NaN, or if a shape parameter is not finite.
    """
    a, x = np.broadcast_arrays(np.asarray(shape, np.float64), np.asarray(x, np.float64))
    flat_a, flat_x = a.ravel(), x.ravel()
    is_nan = np.isnan(flat_x) | ~np.isfinite(flat_a)
    result = np.select([is_nan, np.isposinf(flat_x)], [np.nan, -np.inf], 0.0)
    is_positive = (flat_x > 0) & np.isfinite(flat_x) & ~is_nan
    is_near = is_positive & (flat_x < flat_a + 1)
    for is_member, compute in ((is_near, _sum_series), (is_positive & ~is_near, _evaluate_fraction)):
        if is_member.any():
            member_a, member_x = flat_a[is_member], flat_x[is_member]
            log_factor = member_a * np.log(member_x) - member_x - log_gamma(member_a)
            result[is_member] = compute(member_a, member_x, log_factor)
    return result.reshape(x.shape)


def _sum_series(a: Floats, x: Floats, log_factor: Floats) -> Floats:
    """Return ln P(X > x) by the series of 1 − P, whose terms decrease if x < a + 1.

    Args:
        a: (M,) shape parameters.
        x: (M,) arguments.
        log_factor: (M,) ln of the factor before the series.
    """
    term = 1.0 / a
    total, n = term.copy(), a.copy()
    # Further terms are less than the last digit of the sum, and do not change it. So the result of an entry does not
    # depend on how many terms the other entries need.
    while (term > _TOLERANCE * total).any():
        n += 1.0
        term *= x / n
        total += term
    # Rounding must not make the probability 0.
    return np.asarray(np.log1p(-np.minimum(np.exp(log_factor) * total, 1.0 - 1e-16)))


def _evaluate_fraction(a: Floats, x: Floats, log_factor: Floats) -> Floats:
    """Return ln P(X > x) by a continued fraction, which converges fast if x ≥ a + 1.

    Args:
        a: (M,) shape parameters.
        x: (M,) finite arguments.
        log_factor: (M,) ln of the factor before the fraction.
    """
    value = np.zeros_like(x)
    # Only entries that have not converged are computed further: (index, a, b, c, d, h) with the names of Lentz's
    # algorithm, where h is the value so far, which each step multiplies by c d.
    index, b = np.arange(len(x)), x + 1.0 - a
    c, d = np.full_like(b, 1e300), 1.0 / b
    h = d.copy()
    for i in range(1, _MAX_TERMS):
        if not len(index):
            break
        term = i * (a - i)
        b = b + 2.0
        d = 1.0 / (term * d + b)
        c = b + term / c
        step = c * d
        h = h * step
        is_active = np.abs(step - 1.0) > _FRACTION_TOLERANCE
        value[index[~is_active]] = h[~is_active]
        index = index[is_active]
        a, b, c, d, h = a[is_active], b[is_active], c[is_active], d[is_active], h[is_active]
    value[index] = h
    return np.asarray(log_factor + np.log(value))
