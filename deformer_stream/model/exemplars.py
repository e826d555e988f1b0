"""Ranking of complete records by how anomalous they are, above all by their distance to the nearest exemplars.

Exemplars are stored training records. The centered NLL (negative log-likelihood of the readings minus its expectation)
is a second term. If training has found it useful for the table, the density of the record under the Gaussian prior is a
further one (`trainer.prior_weight`). For tables with mostly labels, so is the density of the readings without regard to
one another (`marginal_density`): distances count all differences of labels alike, however rare a label is.

Shapes use these letters: R is the number of records, F the number of features, M the number of exemplars (stored
training records).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deformer_stream.model.marginal_density import MarginalDensity
from deformer_stream.model.mixture import Mixture
from deformer_stream.model.parameters import ModelParameters
from deformer_stream.model.positions import compute_label_positions, compute_positions, has_unordered_labels
from deformer_stream.model.schema import Schema

Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]
Bools = NDArray[np.bool_]

NUM_NEIGHBORS = 3
"""The number of nearest exemplars over which the distance of a record is averaged."""
CENTERED_NLL_WEIGHT = 0.25
"""The weight in the ranking score of the centered NLL (negative log-likelihood minus its expectation).

The weight of the distance to the nearest exemplars is 1.
"""
MAX_DIFFERENCES = 65_536
"""The largest number of differences between readings of one feature that are computed at once."""


@dataclass(frozen=True, slots=True)
class Exemplars:
    """The stored training records of a model, with which complete records are compared.

    Attributes:
        schema: The F features.
        positions: (M, F) the positions of the readings of the exemplars (`compute_positions`), divided by `deviations`;
            one feature after the other in memory.
        known: (M, F) false where the exemplar has no reading of the feature.
        deviations: (F,) the typical difference of each feature (`trainer.exemplars.compute_deviations`).
        typical: (2, 2) statistics of normal records. Row 0 is for the distance, row 1 for the centered NLL; column 0 is
            the median, column 1 the difference between the 90% quantile and the median, or the standard deviation if
            they are equal. A further row is for −ln p of the record under the `prior`, and the last one for −ln p under
            `marginals`, if these are terms.
        prior: The Gaussian prior, whose density is a term of the ranking; None if it is none.
        prior_weight: The weight of this term, 0 without a prior.
        marginals: The density of the readings without regard to one another; None if it is no term of the ranking.
        marginal_weight: The weight of this term, 0 without it.
        is_text_label: (F,) whether a feature has labels without an order.
        is_complete: Whether all exemplars have readings of all features.
    """

    schema: Schema
    positions: Floats32
    known: Bools
    deviations: Floats32
    typical: Floats
    prior: Mixture | None = None
    prior_weight: float = 0.0
    marginals: MarginalDensity | None = None
    marginal_weight: float = 0.0
    is_text_label: Bools = field(init=False)
    is_complete: bool = field(init=False)

    def __post_init__(self) -> None:
        is_text_label = np.array([has_unordered_labels(feature) for feature in self.schema.features])
        object.__setattr__(self, "positions", np.asfortranarray(self.positions))
        object.__setattr__(self, "is_text_label", is_text_label)
        object.__setattr__(self, "is_complete", bool(self.known.all()))

    @staticmethod
    def from_parameters(parameters: ModelParameters) -> Exemplars | None:
        """Return the exemplars of a model, None if it has none."""
        if "ranking.positions" not in parameters.arrays:
            return None
        names = "positions", "known", "deviations", "typical"
        positions, known, deviations, typical = (parameters.arrays[f"ranking.{name}"] for name in names)
        prior, prior_weight = None, parameters.config.prior_weight
        if prior_weight:
            # A trained model has one variant of the prior, at index 0.
            prior_names = "log_weights", "means", "covariances"
            prior = Mixture(*(parameters.arrays[f"gaussians.{name}"][0] for name in prior_names))
        marginals, marginal_weight = None, parameters.config.marginal_weight
        if marginal_weight:
            marginals = estimate_marginals(parameters.schema, positions, known, deviations)
        return Exemplars(
            parameters.schema,
            positions,
            known,
            deviations,
            typical,
            prior,
            prior_weight,
            marginals,
            marginal_weight,
        )

    def score(
        self,
        codes: NDArray[np.int64],
        values: Floats,
        centered_nll: Floats,
        excluded_exemplar: NDArray[np.int64] | None = None,
        prior_nll: Floats | None = None,
    ) -> Floats:
        """Return the anomaly score of complete records; larger is more anomalous.

        The score is the distance to the nearest exemplars, plus `CENTERED_NLL_WEIGHT` times the centered NLL, plus
        `prior_weight` times −ln p of the record under the Gaussian prior, plus `marginal_weight` times −ln p of the
        readings without regard to one another. The terms are first standardised: 0 is the median of normal records, 1
        is their 90% quantile. In −ln p, a missing reading counts by its expectation.

        Args:
            codes: (R, L), for each of R records the feature codes (indexes in the schema) of at most L readings in any
                order; −1 for padding.
            values: (R, L), the normalised values of continuous features and the label codes of discrete ones.
            centered_nll: (R,), the sum of the centered NLLs of the record's readings.
            excluded_exemplar: As in `compute_distances`.
            prior_nll: (R,), −ln p of the records under the Gaussian prior, for records to which the prior was fitted.
                By default it is computed with the prior of the model.

        Returns:
            (R,), the scores of the records.
        """
        num_features = len(self.schema)
        # Sort the readings of each record by feature. Padding is written to an extra column.
        columns = np.where(codes < 0, num_features, codes)
        value_by_feature = np.zeros((len(codes), num_features + 1))
        known = np.zeros((len(codes), num_features + 1), bool)
        np.put_along_axis(value_by_feature, columns, values, 1)
        np.put_along_axis(known, columns, codes >= 0, 1)
        value_by_feature, known = value_by_feature[:, :num_features], known[:, :num_features]
        positions = compute_positions(self.schema, value_by_feature) / self.deviations
        distances = self.compute_distances(positions, known, excluded_exemplar)
        # A record that shares no feature with an exemplar gets the typical distance.
        distances = np.where(np.isnan(distances), self.typical[0, 0], distances)
        (distance_median, distance_spread), (nll_median, nll_spread) = self.typical[:2]
        distance_score = (distances - distance_median) / distance_spread
        nll_score = (centered_nll - nll_median) / nll_spread
        score: Floats = distance_score + CENTERED_NLL_WEIGHT * nll_score
        if self.prior is not None:
            if prior_nll is None:
                is_linear = self.schema.is_linear
                x = np.where(known[:, is_linear], value_by_feature[:, is_linear], np.nan)
                prior_nll = self.prior.compute_neg_log_density(x)
            prior_median, prior_spread = self.typical[2]
            score += self.prior_weight * (prior_nll - prior_median) / prior_spread
        if self.marginals is not None:
            marginal_nll = self.marginals.compute_nll(value_by_feature.astype(np.int64), positions, known)
            marginal_median, marginal_spread = self.typical[-1]
            score += self.marginal_weight * (marginal_nll - marginal_median) / marginal_spread
        return score

    def compute_distances(
        self, positions: Floats32, known: Bools, excluded_exemplar: NDArray[np.int64] | None = None
    ) -> Floats:
        """Return the mean distance of each record to its nearest exemplars, (R,).

        The distance of two records is the sum of the absolute differences of positions over the features that both
        records have. It is multiplied by F / (number of these features), so that records with missing readings are
        comparable. Two values of a cyclic feature, such as times of day, differ by the shorter way around the cycle.
        Two different labels that are not numbers differ by 1, divided by the deviation of the feature. Exemplars
        without a common feature are left out. The result is NaN if no other remains.

        Args:
            positions: (R, F) the positions of the readings of R records, divided by the attribute `deviations`.
            known: (R, F) false where the record has no reading of the feature. Its position is then ignored.
            excluded_exemplar: (R,) the index of the exemplar that each record is itself, which is left out; −1 if it
                is none. By default no record is an exemplar.
        """
        num_records, num_features = positions.shape
        num_neighbors = min(NUM_NEIGHBORS, len(self.positions) - (excluded_exemplar is not None))
        rows_at_once = max(1, MAX_DIFFERENCES // max(1, len(self.positions)))
        distances = np.empty(num_records)
        for start in range(0, num_records, rows_at_once):
            rows = slice(start, start + rows_at_once)
            of_exemplars, num_shared = self._sum_differences(positions[rows], known[rows])
            of_exemplars *= np.float32(num_features) / np.maximum(num_shared, 1)
            if not num_shared.all():
                of_exemplars[np.broadcast_to(num_shared == 0, of_exemplars.shape)] = np.inf
            if excluded_exemplar is not None:
                is_exemplar = np.flatnonzero(excluded_exemplar[rows] >= 0)
                of_exemplars[is_exemplar, excluded_exemplar[rows][is_exemplar]] = np.inf
            nearest = _pop_smallest(of_exemplars, num_neighbors)
            num_finite = np.isfinite(nearest).sum(1)
            if num_neighbors and (num_finite == num_neighbors).all():
                distances[rows] = nearest.mean(1)
            else:
                sums = np.where(np.isfinite(nearest), nearest, 0.0).sum(1)
                distances[rows] = np.where(num_finite > 0, sums / np.maximum(num_finite, 1), np.nan)
        return distances

    def _sum_differences(self, positions: Floats32, known: Bools) -> tuple[Floats32, Floats32]:
        """Return the sum of the differences of each record to each exemplar over the features that both have, (R, M).

        One feature after the other, so that the sums stay in the processor's cache.

        Args:
            positions: (R, F) as in `compute_distances`, for few records.
            known: (R, F) as in `compute_distances`.

        Returns:
            The sums, and the numbers of these features: (R, M), or (R, 1) if they are equal for all exemplars.
        """
        sums = np.zeros((len(positions), len(self.positions)), np.float32)
        num_shared = known.sum(1, keepdims=True, dtype=np.float32) if self.is_complete else np.zeros_like(sums)
        for feature in range(positions.shape[1]):
            differences = np.abs(positions[:, feature, None] - self.positions[:, feature])
            if self.is_text_label[feature]:
                differences = (differences > 0) / self.deviations[feature]
            elif self.schema.is_cyclic[feature]:
                cycle_length = np.float32(self.schema.cycle_lengths[feature]) / self.deviations[feature]
                np.mod(differences, cycle_length, out=differences)
                np.minimum(differences, cycle_length - differences, out=differences)
            if not self.is_complete:
                both_known = known[:, feature, None] & self.known[:, feature]
                num_shared += both_known
                differences *= both_known
            elif not known[:, feature].all():
                differences *= known[:, feature, None]
            sums += differences
        return sums, num_shared


def _pop_smallest(distances: Floats32, count: int) -> Floats32:
    """Return the `count` smallest entries of each row, ascending, and replace them by infinity in `distances`.

    Unlike `alert_distance.average_nearest`, it does not average, because entries can be infinite: those of exemplars
    without a common feature. A few searches for the minimum take less time than a partition of the rows.
    """
    every_row = np.arange(len(distances))
    smallest = np.empty((len(distances), count), np.float32)
    for i in range(count):
        columns = distances.argmin(1)
        smallest[:, i] = distances[every_row, columns]
        distances[every_row, columns] = np.inf
    return smallest


def estimate_marginals(schema: Schema, positions: Floats32, known: Bools, deviations: Floats32) -> MarginalDensity:
    """Return the density of the readings of M exemplars without regard to one another.

    Args:
        schema: The F features.
        positions: (M, F) the positions of the readings, divided by `deviations`.
        known: (M, F) false where an exemplar has no reading.
        deviations: (F,) the typical difference of each feature.
    """
    of_labels = [compute_label_positions(feature) for feature in schema.features]
    scaled = [
        labels if labels is None else labels / deviation
        for labels, deviation in zip(of_labels, deviations, strict=True)
    ]
    return MarginalDensity.estimate(positions, known, scaled)


def find_merged_labels(parameters: ModelParameters) -> str | None:
    """Return the name of a feature whose labels all have the same stored position, None if there is none.

    Earlier releases took labels such as "1000234" for numbers, and all of them had the position `MAX_POSITION` or its
    negative. The stored positions of labels without an order are their codes now.
    """
    if "ranking.positions" not in parameters.arrays:
        return None
    names = "positions", "known", "deviations"
    positions, known, deviations = (parameters.arrays[f"ranking.{name}"] for name in names)
    for code, feature in enumerate(parameters.schema.features):
        if has_unordered_labels(feature):
            stored = np.abs(positions[known[:, code], code]) * deviations[code]
            if stored.max(initial=0) > len(feature.labels) + 0.5:
                return feature.name
    return None
