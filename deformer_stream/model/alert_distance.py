"""The distance of an open record to stored training records, which is a term of the alert's prefix statistic.

The distance of a prefix (the first k readings of a record) to a stored record is the sum of the absolute differences of
their readings, each divided by the typical difference of its feature. d is its mean over the `NUM_NEIGHBORS` nearest
stored records. The term is

    w · max((k/K)^a · −ln S_k(d) − c, 0)

where S_k(d) is the share of training records whose first k readings, in the order of arrival, are at least as far from
the other stored records, and K is the number of features that are scored. w is `WEIGHT` or `WEIGHT_WITH_PRIOR`, a is
`EXPONENT`, and c is `MIN_NATS`. S_k is an exponential tail, so the term is a straight line in d, above a distance that
few normal records reach.

The stored records are training records only. So the statistic is a fixed function of the record, and the guarantee of
the alert rule holds as without the term. No state is kept: the term is computed from all readings of the prefix.

Shapes use these letters: R is the number of records, F the number of features, K the number of those that are scored, L
the number of readings, E the number of stored records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deformer_stream.model.exemplars import NUM_NEIGHBORS
from deformer_stream.model.parameters import Model
from deformer_stream.model.positions import Positions, has_unordered_labels
from deformer_stream.model.prefix_lines import compute_line_terms
from deformer_stream.model.schema import Schema

Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]
Ints = NDArray[np.int64]
Codes = NDArray[np.int8]

WEIGHT = 0.5
"""Weight w of the distance in nats, if the Gaussian prior is no term of the alert; that of the combined p-values of the
readings is 1."""
WEIGHT_WITH_PRIOR = 1.5
"""Weight w if the Gaussian prior is a term of the alert (`alert_prior`). That term detects the broken relations that a
larger weight of the distance costs (docs/experiments/33)."""
EXPONENT = 0.1
"""Power a of the share of readings by which a distance in nats is multiplied. Distances of short prefixes have the
heaviest tails."""
MIN_NATS = 3.0
"""The distance c in nats from which the term is positive. 5% of normal records reach it.

If distances of all normal records counted, the threshold of the alert would rise, and broken relations between two
sensors, which change no distance, would be detected less often (docs/experiments/32).
"""
MISSING_DIFFERENCE = 1.0
"""Difference to a stored record that lacks the feature, in typical differences."""

NUMBER, LABEL, CYCLIC, IGNORED = 0, 1, 2, 3
"""Kinds of features: numbers, labels without an order, numbers on a cycle, and context features, which are ignored. The
compiled kernels have the same codes."""


@dataclass(frozen=True, slots=True)
class AlertDistance:
    """The stored training records and the distribution of distances.

    Attributes:
        schema: The F features.
        positions: (F, E) positions of the readings of the stored records, divided by `deviations`; NaN where a record
            lacks a feature.
        deviations: (F,) the typical difference of each feature.
        starts: (K,) for prefixes of 1, 2, …, K readings the mean distance from which the term is positive.
        slopes: (K,) by how much the term rises with the distance from there on; not negative.
        kinds: (F,) the kind of each feature.
        extents: (F,) difference of two labels, or length of the cycle, divided by `deviations`; 0 for numbers.
        position_table: Computes the positions of readings.
    """

    schema: Schema
    positions: Floats32
    deviations: Floats32
    starts: Floats
    slopes: Floats
    kinds: Codes
    extents: Floats32
    position_table: Positions

    @staticmethod
    def create(
        schema: Schema, positions: Floats32, deviations: Floats32, starts: Floats, slopes: Floats
    ) -> AlertDistance:
        """Return the distance with the kinds and extents that follow from the schema."""
        kinds = np.full(len(schema), NUMBER, np.int8)
        kinds[[has_unordered_labels(feature) for feature in schema.features]] = LABEL
        kinds[schema.is_cyclic] = CYCLIC
        extents = np.zeros(len(schema), np.float32)
        extents[kinds == LABEL] = 1.0 / deviations[kinds == LABEL]
        extents[kinds == CYCLIC] = (schema.cycle_lengths.astype(np.float32) / deviations)[kinds == CYCLIC]
        kinds[schema.is_context] = IGNORED
        return AlertDistance(
            schema,
            np.ascontiguousarray(positions, np.float32),
            np.ascontiguousarray(deviations, np.float32),
            np.ascontiguousarray(starts, np.float64),
            np.ascontiguousarray(slopes, np.float64),
            kinds,
            extents,
            Positions(schema),
        )

    @staticmethod
    def from_model(model: Model) -> AlertDistance | None:
        """Return the stored training records of a model, None if it has none for the alert."""
        if not model.config.alert_exemplars:
            return None  # before the parameters of a network on a GPU are copied
        arrays = model.extract_parameters().arrays
        names = "positions", "known", "deviations", "starts", "slopes"
        positions, known, *others = (arrays[f"alert_distance.{name}"] for name in names)
        return AlertDistance.create(model.schema, np.where(known, positions, np.float32(np.nan)), *others)

    @property
    def num_counted_features(self) -> int:
        """The number K of features that are scored."""
        return len(self.slopes)

    def compute_positions(self, codes: Ints, values: Floats) -> Floats32:
        """Return the position of each reading, divided by the deviation of its feature; of the shape of `codes`.

        It is that of `positions.compute_positions`.

        Args:
            codes: The features of the readings, of any shape; −1 for padding, whose positions are meaningless.
            values: Their normalised values or label codes, of the same shape.
        """
        return self.compute_positions_of_raw(codes, self.schema.denormalise(np.maximum(codes, 0), values))

    def compute_positions_of_raw(self, codes: Ints, values: Floats) -> Floats32:
        """Return the positions of readings as `compute_positions` does, from raw values or label codes."""
        known = np.maximum(codes, 0)
        return np.asarray(self.position_table.compute(known, values) / self.deviations[known])

    def compute_differences(self, codes: Ints, positions: Floats32) -> Floats32:
        """Return the difference of each of M readings to each stored record, (M, E).

        Args:
            codes: (M,) features of the readings.
            positions: (M,) their positions.
        """
        differences = np.abs(positions[:, None] - self.positions[codes])
        kinds, extents = self.kinds[codes][:, None], self.extents[codes][:, None]
        if (kinds == CYCLIC).any():
            cycles = np.where(kinds == CYCLIC, extents, np.float32(1.0))
            remainders = np.mod(differences, cycles)
            differences = np.where(kinds == CYCLIC, np.minimum(remainders, cycles - remainders), differences)
        if (kinds == LABEL).any():
            of_labels = np.where(differences > 0, extents, differences)  # NaN stays NaN
            differences = np.where(kinds == LABEL, of_labels, differences)
        differences = np.where(np.isnan(differences), np.float32(MISSING_DIFFERENCE), differences)
        return np.where(kinds == IGNORED, np.float32(0.0), differences).astype(np.float32, copy=False)

    def compute_terms_of_distances(self, distances: Floats, num_counted: Ints) -> Floats:
        """Return the term of the statistic of M prefixes, (M,), from their mean distances to the nearest records.

        Args:
            distances: (M,) mean distances.
            num_counted: (M,) number of readings of each prefix, without those of context features.
        """
        return compute_line_terms(self.starts, self.slopes, distances, num_counted)

    @property
    def num_stored(self) -> int:
        """The number E of stored records."""
        return int(self.positions.shape[1])

    def compute_terms(self, codes: Ints, values: Floats, measure: DistanceFunction | None = None) -> Floats:
        """Return the term of the statistic after each reading of R records, (R, L); 0 for padding.

        Args:
            codes: (R, L) features in order of arrival, −1 as padding at the end.
            values: (R, L) normalised values or label codes.
            measure: Computes the distances: that of the compiled kernels, or by default `measure_distances`, which
                gives the same bits.
        """
        is_reading = codes >= 0
        offsets = np.append(0, np.cumsum(is_reading.sum(1)))
        flat_codes = codes[is_reading]
        positions = self.compute_positions(flat_codes, values[is_reading])
        counts = ((codes >= 0) & (self.kinds[codes] != IGNORED)).cumsum(1)[is_reading]
        prefixes = Prefixes(flat_codes, positions, offsets, bounds=self.find_bounds(counts))
        distances = (measure or measure_distances)(self, prefixes)
        terms = np.zeros(codes.shape)
        terms[is_reading] = self.compute_terms_of_distances(distances, counts)
        return terms

    def find_bounds(self, num_counted: Ints) -> Floats:
        """Return the largest distance of M prefixes with which their term is 0, (M,).

        Args:
            num_counted: (M,) number of readings of each prefix, without those of context features.
        """
        bounds = self.starts[np.clip(num_counted, 1, self.num_counted_features) - 1]
        return np.asarray(np.where(num_counted > 0, bounds, np.inf))

    def sum_differences(self, values: Floats) -> tuple[Floats32, Ints]:
        """Return what readings without an order contribute to distances.

        Args:
            values: (R, F) normalised values or label codes, NaN for missing readings.

        Returns:
            (R, E) the sums of differences of each record to each stored record, and (R,) the numbers of readings,
            without those of context features.
        """
        codes = np.broadcast_to(np.arange(len(self.schema)), values.shape)
        is_counted = ~np.isnan(values) & (self.kinds != IGNORED)
        positions = self.compute_positions(codes, np.nan_to_num(values))
        sums = np.zeros((len(values), self.positions.shape[1]), np.float32)
        for row in range(len(values)):
            known = np.flatnonzero(is_counted[row])
            sums[row] = self.compute_differences(known, positions[row, known]).sum(0, dtype=np.float32)
        return sums, is_counted.sum(1)

    def compute_terms_of_further_readings(
        self, sums: Floats32, num_counted: Ints, record: Ints, codes: Ints, values: Floats
    ) -> Floats:
        """Return the term of the statistic of M records with one further reading each, (M,).

        Args:
            sums: (R, E) the first result of `sum_differences` for R records.
            num_counted: (R,) the second one.
            record: (M,) the record that each of M readings would belong to.
            codes: (M,) the features of the readings.
            values: (M,) their normalised values or label codes.
        """
        differences = self.compute_differences(codes, self.compute_positions(codes, values))
        return self.compute_terms_of_sums(
            sums[record] + differences, num_counted[record] + (self.kinds[codes] != IGNORED)
        )

    def compute_terms_of_sums(self, sums: Floats32, num_counted: Ints) -> Floats:
        """Return the term of the statistic of M prefixes, (M,).

        Args:
            sums: (M, E) sums of differences of each prefix to each stored record.
            num_counted: (M,) number of readings of each prefix, without those of context features.
        """
        return self.compute_terms_of_distances(average_nearest(sums), num_counted)


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The prefixes of R records with M readings in total, whose distances are measured.

    Attributes:
        codes: (M,) features of the readings, one record after the other, each from its first reading.
        positions: (M,) their positions (`AlertDistance.compute_positions`).
        offsets: (R + 1,) index of the first reading of each record, followed by M.
        num_before: (R,) number of first readings of each record whose distances are not needed, and 0 in the result;
            None if all are needed.
        excluded: (R,) index of a stored record that is left out, −1 for none; None if none is.
        bounds: (M,) for each prefix a distance of which it is enough to know that it is not exceeded. The result may be
            any number between the distance and the bound then. None if all distances are needed.
    """

    codes: Ints
    positions: Floats32
    offsets: Ints
    num_before: Ints | None = None
    excluded: Ints | None = None
    bounds: Floats | None = None


DistanceFunction = Callable[[AlertDistance, Prefixes], Floats]
"""A function that measures distances: `measure_distances`, or that of the compiled kernels."""


def measure_distances(distance: AlertDistance, prefixes: Prefixes) -> Floats:
    """Return the mean distance of each prefix to its nearest stored records, (M,); bounds have no effect.

    Sums of differences are float32 and run in order of arrival, so a distance does not depend on the calls in which the
    readings of its record arrive.
    """
    codes, positions, offsets = prefixes.codes, prefixes.positions, prefixes.offsets
    num_before, excluded = prefixes.num_before, prefixes.excluded
    distances = np.zeros(len(codes))
    starts = offsets[:-1] if num_before is None else offsets[:-1] + num_before
    for row, (first, start, end) in enumerate(zip(offsets[:-1], starts, offsets[1:], strict=True)):
        if end == start:
            continue
        sums = distance.compute_differences(codes[first:end], positions[first:end]).cumsum(0)[start - first :]
        if excluded is not None and excluded[row] >= 0:
            sums = np.delete(sums, excluded[row], 1)
        distances[start:end] = average_nearest(sums)
    return distances


def average_nearest(sums: Floats32) -> Floats:
    """Return the mean of the `NUM_NEIGHBORS` smallest entries of each row of (M, E) distances, (M,).

    Unlike the mean in `Exemplars.compute_distances`, it is summed in ascending order in float64, so that the compiled
    kernels give the same bits. All distances are finite.
    """
    num_neighbors = min(NUM_NEIGHBORS, sums.shape[1])
    nearest = np.sort(np.partition(sums, num_neighbors - 1, 1)[:, :num_neighbors], 1).astype(np.float64)
    return np.asarray(nearest.cumsum(1)[:, -1] / num_neighbors)
