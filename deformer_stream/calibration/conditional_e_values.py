"""E-values that are valid given the calibration records, with which all records of a stream are compared.

A conformal p-value is uniform on average over the calibration records. All records of a stream are compared with the
same n calibration records. Given these, the p-value r/(n + 1) has the probability D_r, and for continuous scores

    (D_1, …, D_{n+1}) ~ Dirichlet(1, …, 1)

because the D_r are the spacings of n uniform variables. The mean of an e-value given the calibration records is

    E_κ = Σ_r D_r L_κ(r / (n + 1)).

It exceeds 1 for many calibration sets, and the mean number of records to a false incident is then smaller than the
detector's threshold. The distribution of E_κ depends on n only. Let q_κ be its quantile at 1 − δ/5, with 5 exponents.
Then with probability 1 − δ over the calibration records, all L_κ/q_κ have a mean of at most 1 given them. The detector
therefore keeps its bound for all records that are independent given the calibration. Ties between scores only lower the
e-values.

The quantile comes from draws with a fixed seed. Ranks beyond the first ones are drawn in blocks of neighbouring ranks.
Within a block every rank counts with the largest e-value, so the quantile is never too small because of this.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.incident_evidence import (
    NUM_EXPONENTS,
    LogState,
    compute_log_e_values,
)

Floats = NDArray[np.float64]

DEFAULT_DELTA = 0.01
"""Probability over the calibration records that a normalised e-value has a mean above 1."""

NUM_DRAWS = 20_000
"""Number of random calibration sets."""

_NUM_SINGLE_RANKS = 100
_BLOCK_GROWTH = 1.01
"""From `_NUM_SINGLE_RANKS` on, the ranks of a block differ by at most this factor."""

_DRAWS_AT_ONCE = 2_000


@functools.lru_cache(maxsize=256)
def compute_log_normalisers(num_calibration_records: int, delta: float = DEFAULT_DELTA) -> LogState:
    """Return ln q_κ for each exponent: the numbers by which e-values are divided.

    Args:
        num_calibration_records: The number n of calibration records with which p-values are computed.
        delta: Probability over the calibration records that any of the normalised e-values has a mean above 1.
    """
    means = draw_conditional_means(num_calibration_records, NUM_DRAWS, seed=0)
    # A further draw exceeds the k-th largest of N draws with probability k/(N + 1).
    num_above = max(1, math.floor(delta / NUM_EXPONENTS * (NUM_DRAWS + 1)))
    quantiles = np.sort(means, 0)[-num_above]
    return tuple(float(value) for value in np.log(quantiles))


def draw_conditional_means(num_calibration_records: int, num_draws: int, seed: int) -> Floats:
    """Return upper bounds of E_κ for random calibration sets, (num_draws, `NUM_EXPONENTS`).

    Args:
        num_calibration_records: The number n of calibration records.
        num_draws: Number of calibration sets.
        seed: Seed of the draws.
    """
    first_ranks, sizes = _divide_ranks(num_calibration_records + 1)
    e_values = np.exp(compute_log_e_values(first_ranks / (num_calibration_records + 1.0)))
    generator = np.random.default_rng([seed, num_calibration_records])
    means = np.empty((num_draws, NUM_EXPONENTS))
    for start in range(0, num_draws, _DRAWS_AT_ONCE):
        count = min(_DRAWS_AT_ONCE, num_draws - start)
        # The spacings of a block sum to a gamma variable with the block's size as its shape, divided by the sum of
        # the gamma variables of all blocks.
        gammas = generator.standard_gamma(sizes, (count, len(sizes)))
        means[start : start + count] = (gammas @ e_values) / gammas.sum(1, keepdims=True)
    return means


def _divide_ranks(num_ranks: int) -> tuple[Floats, Floats]:
    """Return the first rank of each block of neighbouring ranks, and the number of ranks in each block."""
    firsts = list(range(1, min(num_ranks, _NUM_SINGLE_RANKS) + 1))
    while firsts[-1] < num_ranks and len(firsts) >= _NUM_SINGLE_RANKS:
        following = max(firsts[-1] + 1, math.floor(firsts[-1] * _BLOCK_GROWTH))
        if following > num_ranks:
            break
        firsts.append(following)
    first_ranks = np.array(firsts, np.float64)
    return first_ranks, np.diff(first_ranks, append=num_ranks + 1.0)
