"""Vectors of shares: how much of an alert or incident is attributed to each feature, and how alike two of them are.

Only the direction of such a vector matters, so it need not have the length 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

Shares = Mapping[str, float]
"""The share of the attribution by feature."""


def compute_cosine(first: Shares, second: Shares, *, if_empty: float) -> float:
    """Return the cosine of the angle between two vectors of shares, from 0 to 1.

    Args:
        first: A vector of shares.
        second: Another one.
        if_empty: The result if one of them is empty or zero, as that of an alert without attribution is: 1 if it
            counts as similar to any other, 0 if it counts as similar to none.
    """
    norms = _compute_norm(first) * _compute_norm(second)
    if not norms > 0:
        return if_empty
    product = math.fsum(share * second[feature] for feature, share in sorted(first.items()) if feature in second)
    return min(product / norms, 1.0)


def average_directions(vectors: Iterable[Shares]) -> dict[str, float]:
    """Return the mean of vectors of shares by feature, each scaled to the length 1. Zero vectors are left out."""
    sums: dict[str, float] = {}
    count = 0
    for shares in vectors:
        norm = _compute_norm(shares)
        if norm == 0.0:
            continue
        count += 1
        for name, share in shares.items():
            sums[name] = sums.get(name, 0.0) + share / norm
    return {name: total / count for name, total in sorted(sums.items())}


def add_direction(mean: Shares, count: int, shares: Shares) -> dict[str, float]:
    """Return the mean of `average_directions` after one more vector.

    Args:
        mean: The mean so far.
        count: Number of vectors of which it is the mean.
        shares: The further vector. If it is zero, the mean does not change.
    """
    norm = _compute_norm(shares)
    if norm == 0.0:
        return dict(mean)
    names = sorted({*mean, *shares})
    return {name: (mean.get(name, 0.0) * count + shares.get(name, 0.0) / norm) / (count + 1) for name in names}


def _compute_norm(shares: Shares) -> float:
    """Return the Euclidean length of a vector of shares."""
    return math.sqrt(math.fsum(share * share for share in shares.values()))
