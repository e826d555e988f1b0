"""Learn the weight of the Gaussian prior's density in the ranking of complete records, for each table, without labels.

On some tables the density of the Gaussian prior ranks anomalies better than the distance to the nearest exemplars
(stored training records), on others worse. Which of the two is better is estimated from interpolated records:
t·a + (1 − t)·b of two normal records a and b. They are unusual if normal records lie in clusters or on curved surfaces.
The weight follows from a difference δ of two AUROCs. One states how well −ln p of the prior separates interpolated from
normal records, the other how well the distance does (docs/experiments/30-density-of-the-prior-in-the-ranking.md).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.auroc import compute_auroc
from deformer_stream.model.exemplars import Exemplars
from deformer_stream.model.positions import compute_positions
from deformer_stream.model.schema import Schema
from trainer.data import PreparedTable, Split
from trainer.gaussian_prior import CrossFittedPriors

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_WEIGHT = 0.5
"""The largest weight. That of the distance to the nearest exemplars is 1."""

DIFFERENCE_SCALE = 0.02
"""The weight is `MAX_WEIGHT` / (1 + exp(−δ / `DIFFERENCE_SCALE`)), where δ is the difference of the two AUROCs."""

MIN_WEIGHT = 0.01
"""A smaller weight becomes 0. It would hardly change a ranking, but cost time for each record."""

MIN_RECORDS = 50
"""The smallest number of interpolated records from which a weight is estimated. With fewer, it is 0."""

INTERPOLATION_RANGE = (0.3, 0.7)
"""The range of t, from which it is drawn uniformly."""

WEIGHT_SEED = 0x5E1F
"""Constant that is combined with the user's seed, so that this module's random numbers differ from those of others."""


class PriorWeightEstimator:
    """Collects the distances and densities of normal and of interpolated records, and estimates the weight from them.

    Normal records are training records that are exemplars. Each one, a, is interpolated with another one, b, of its
    fold. The densities of both are those of the variant of the prior that was fitted without the fold. The distances of
    both leave out the exemplar a, so that they are comparable.

    Args:
        exemplars: The exemplars, of which the last M are records of the table.
        data: The prepared table.
        exemplar_rows: (M,) row numbers of these records.
        priors: The Gaussian prior with its variants.
        seed: Seed of the random choices.
    """

    def __init__(
        self, exemplars: Exemplars, data: PreparedTable, exemplar_rows: Ints, priors: CrossFittedPriors, seed: int
    ) -> None:
        self._exemplars, self._data, self._priors = exemplars, data, priors
        self._exemplar_rows, self._num_old = exemplar_rows, len(exemplars.positions) - len(exemplar_rows)
        self._rng = np.random.default_rng([seed, WEIGHT_SEED])
        is_training = data.split[exemplar_rows] == Split.TRAIN
        folds = np.where(is_training, priors.fold_by_row[exemplar_rows], -1)
        self._partners = _draw_partners(folds, self._rng)
        self._normal: list[Floats] = []
        self._interpolated: list[Floats] = []

    def add(self, exemplar_indexes: Ints, distances: Floats) -> None:
        """Interpolate the training records among R exemplars, and compute distances and densities.

        Args:
            exemplar_indexes: (R,) indexes of exemplars that are records of the table.
            distances: (R,) the mean distance of each to its nearest other exemplars; NaN for those without a common
                feature, which are ignored.
        """
        partners = self._partners[exemplar_indexes - self._num_old]
        has_partner = (partners >= 0) & ~np.isnan(distances)
        if not has_partner.any():
            return
        indexes = exemplar_indexes[has_partner]
        rows = self._exemplar_rows[indexes - self._num_old]
        values = np.asarray(self._data.values[rows], np.float64)
        others = np.asarray(self._data.values[self._exemplar_rows[partners[has_partner]]], np.float64)
        interpolated = interpolate_records(self._data.schema, values, others, self._rng)
        positions = compute_positions(self._data.schema, np.nan_to_num(interpolated)) / self._exemplars.deviations
        interpolated_distances = self._exemplars.compute_distances(positions, ~np.isnan(interpolated), indexes)
        self._normal.append(np.stack([distances[has_partner], self._compute_nll(values, rows)]))
        self._interpolated.append(np.stack([interpolated_distances, self._compute_nll(interpolated, rows)]))

    def _compute_nll(self, values: Floats, rows: Ints) -> Floats:
        """Return −ln p of records (R, F), under the variants that were fitted without the folds of the given rows."""
        return self._priors.compute_neg_log_density(values[:, self._data.schema.is_linear], rows)

    def estimate_weight(self) -> float:
        """Return the weight of the density of the Gaussian prior, from 0 to `MAX_WEIGHT`."""
        if sum(part.shape[1] for part in self._normal) < MIN_RECORDS:
            return 0.0
        normal, interpolated = np.concatenate(self._normal, 1), np.concatenate(self._interpolated, 1)
        auroc_of_distance, auroc_of_prior = map(compute_auroc, normal, interpolated)
        difference = auroc_of_prior - auroc_of_distance
        weight = MAX_WEIGHT / (1.0 + math.exp(-difference / DIFFERENCE_SCALE))
        return weight if weight >= MIN_WEIGHT else 0.0


def _draw_partners(folds: Ints, rng: np.random.Generator) -> Ints:
    """Return for each record the index of a random other record of its fold, −1 if there is none.

    Args:
        folds: (M,) the folds of the records, −1 for records that get no partner.
        rng: The source of randomness.
    """
    partners = np.full(len(folds), -1)
    for fold in np.unique(folds[folds >= 0]):
        members = np.flatnonzero(folds == fold)
        if len(members) > 1:
            steps = rng.integers(1, len(members), len(members))
            partners[members] = members[(np.arange(len(members)) + steps) % len(members)]
    return partners


def interpolate_records(schema: Schema, a: Floats, b: Floats, rng: np.random.Generator) -> Floats:
    """Return t·a + (1 − t)·b of R pairs of records, (R, F), with one random t for each pair.

    Labels and cyclic values are those of the record to which the interpolated one is nearer. Readings that a lacks are
    missing. Where only b lacks a reading, it is that of a. So an interpolated record lacks the readings that a lacks.

    Args:
        schema: The F features.
        a: (R, F) normalised values and label codes, NaN if missing.
        b: (R, F) those of the other records.
        rng: The source of randomness.
    """
    t = rng.uniform(*INTERPOLATION_RANGE, (len(a), 1))
    interpolated = np.where(schema.is_linear, t * a + (1.0 - t) * b, np.where(t >= 0.5, a, b))
    return np.where(np.isnan(a) | np.isnan(b), a, interpolated)
