"""Several readings of a sensor in one time slot: which one is the value of the slot, or how they are combined.

The rules are those of `deformer_stream.model.windows.Window.per_slot`. A window without time slots counts as one slot.
The classes write to matrices that have one row per record and one column per feature. They may be memory-mapped.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deformer_stream.errors import ConfigError
from deformer_stream.model.cycles import compute_circular_mean
from deformer_stream.model.schema import SECONDS_PER_DAY, Feature, Schema
from deformer_stream.tables.table import join_names
from trainer.tables import EventReadings, convert_to_numbers


def check_rule_for_cycles(schema: Schema) -> None:
    """Check that no positions on a cycle, such as angles, are combined by "min" or "max".

    Args:
        schema: The features with the window and its rule.

    Raises:
        ConfigError: The rule of a cyclic feature is "min" or "max".
    """
    rule_by_sensor = schema.per_slot_by_sensor
    cyclic_sensors = dict.fromkeys(f.sensor_name for f in schema.features if f.cycle is not None)
    names = [name for name in cyclic_sensors if rule_by_sensor[name] in ("min", "max")]
    if names:
        rule = rule_by_sensor[names[0]]
        raise ConfigError(
            f"--per-slot {rule} cannot combine the readings of {join_names(names)}, because positions on a cycle have "
            "no smallest or largest one; use --per-slot mean or last, or name the columns in --once or --exclude"
        )


class FirstReadings:
    """Keeps the first reading of each sensor in each time slot, as a stream does.

    Args:
        schema: The F features.
        values: (N, F) float32 normalised values or label codes, which are set.
        event_indexes: (N, F) position in the input of the reading that is kept, −1 if there is none yet.
        times: (N, F) its time in microseconds since 1970.
        has_unpivoted_rows: Whether the readings are cells of a wide table. A cell that stands for "no value" is no
            reading, but a null in a long table is one.

    Attributes:
        num_repeated: Number of readings whose time slot had another reading before.
    """

    def __init__(
        self,
        schema: Schema,
        values: NDArray[np.float32],
        event_indexes: NDArray[np.int64],
        times: NDArray[np.int64],
        has_unpivoted_rows: bool,
    ) -> None:
        self.schema, self.has_unpivoted_rows = schema, has_unpivoted_rows
        self.values, self.event_indexes, self.times = values, event_indexes, times
        self.num_repeated = 0

    def add(self, readings: EventReadings, codes: NDArray[np.int64], encoded: NDArray[np.float32]) -> None:
        """Add M readings of one sensor, in the order of the input.

        Args:
            readings: The M readings.
            codes: (M,) column of each reading in the matrices.
            encoded: (M,) normalised readings or label codes, NaN if missing or infinite.
        """
        is_rejected = np.isnan(encoded) if self.has_unpivoted_rows else self._find_rejected(readings, encoded)
        accepted = np.flatnonzero(~is_rejected)
        # Keep the first reading of each matrix element in this batch, unless an earlier batch has set the element.
        cells = readings.rows[accepted] * self.values.shape[1] + codes[accepted]
        first_indexes = accepted[np.unique(cells, return_index=True)[1]]
        is_element_empty = self.event_indexes[readings.rows[first_indexes], codes[first_indexes]] < 0
        kept = first_indexes[is_element_empty]
        self.num_repeated += len(accepted) - len(kept)
        elements = readings.rows[kept], codes[kept]
        self.values[elements] = encoded[kept]
        self.event_indexes[elements] = readings.event_indexes[kept]
        self.times[elements] = readings.times[kept]

    def _find_rejected(self, readings: EventReadings, encoded: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Return for each of M readings whether a stream rejects it: texts among numbers, infinite numbers.

        A rejected reading does not count as the first reading of its time slot, while a null does.

        Args:
            readings: The M readings.
            encoded: (M,) the normalised readings, NaN if missing.
        """
        feature = _get_feature(self.schema, readings)
        if feature.kind == "discrete" or not np.isnan(encoded).any():
            return np.zeros(len(encoded), bool)
        numbers, is_bad = convert_to_numbers(readings.values, feature.period == SECONDS_PER_DAY)
        return is_bad | np.isinf(numbers)


class SlotAggregator:
    """Combines the readings of sensors whose rule for a time slot is not "first".

    Args:
        schema: The F features.
        values: (N, F) float32 normalised values or label codes, which are set.
        event_indexes: (N, F) position in the input of the reading that is "last", −1 if there is none yet.
        times: (N, F) its time in microseconds since 1970.
        numbers: (N, F) float64, zeros: sums, minima or maxima in raw units; sums of cosines for circular means.
        counts: (N, F) int32, zeros: numbers of readings.
        sines: (N, F) float64, zeros: sums of sines for circular means. None if the schema has no circular means
            (`Schema.slot_mean_cycles`).

    Attributes:
        num_repeated: Number of readings whose time slot had another reading before.
    """

    def __init__(
        self,
        schema: Schema,
        values: NDArray[np.float32],
        event_indexes: NDArray[np.int64],
        times: NDArray[np.int64],
        numbers: NDArray[np.float64],
        counts: NDArray[np.int32],
        sines: NDArray[np.float64] | None = None,
    ) -> None:
        self.schema = schema
        self.values, self.event_indexes, self.times = values, event_indexes, times
        self.numbers, self.counts, self.sines = numbers, counts, sines
        self.num_repeated = 0

    def add(self, readings: EventReadings, codes: NDArray[np.int64], encoded: NDArray[np.float32]) -> None:
        """Add M readings of one sensor, in the order of the input.

        Args:
            readings: The M readings.
            codes: (M,) column of each reading in the matrices.
            encoded: (M,) normalised readings or label codes, NaN if missing or infinite. Such readings are ignored.
        """
        rule = self.schema.per_slot_by_sensor[readings.feature_name]
        feature = _get_feature(self.schema, readings)
        numbers = np.full(len(encoded), np.nan)
        if feature.kind == "continuous":
            numbers, _ = convert_to_numbers(readings.values, feature.period == SECONDS_PER_DAY)
        is_usable = np.isfinite(encoded)
        rows, codes, numbers, encoded = (
            readings.rows[is_usable],
            codes[is_usable],
            numbers[is_usable],
            encoded[is_usable],
        )
        event_indexes, times = readings.event_indexes[is_usable], readings.times[is_usable]
        cells = rows * self.values.shape[1] + codes
        counts, combined = self.counts.reshape(-1), self.numbers.reshape(-1)  # views
        distinct_cells = np.unique(cells)
        new_cells = distinct_cells[counts[distinct_cells] == 0]
        np.add.at(counts, cells, 1)
        # All columns belong to the same sensor, so they have the same cycle.
        cycle = self.schema.slot_mean_cycles[codes[0]] if len(codes) else None
        if cycle is not None and self.sines is not None:
            sines, cosines = cycle.compute_components(numbers)
            np.add.at(self.sines.reshape(-1), cells, sines)
            np.add.at(combined, cells, cosines)
        elif rule == "mean":
            np.add.at(combined, cells, numbers)  # one after the other, in the order of the input
        elif rule in ("min", "max"):
            combined[new_cells] = np.inf if rule == "min" else -np.inf
            (np.minimum if rule == "min" else np.maximum).at(combined, cells, numbers)
        # The latest reading of each cell; of equal times, the last one in the input.
        order = np.lexsort((event_indexes, times, cells))
        is_latest = np.append(cells[order][1:] != cells[order][:-1], True)[: len(order)]
        latest = order[is_latest]
        all_events, all_times = self.event_indexes.reshape(-1), self.times.reshape(-1)
        is_later = (all_events[cells[latest]] < 0) | (times[latest] >= all_times[cells[latest]])
        latest = latest[is_later]
        all_events[cells[latest]], all_times[cells[latest]] = event_indexes[latest], times[latest]
        self.values.reshape(-1)[cells[latest]] = encoded[latest]  # final for "last", replaced by `finish` for others
        self.num_repeated += len(cells) - len(new_cells)

    def finish(self, chunk_rows: int) -> None:
        """Set the values of sensors whose rule is "mean", "min" or "max", some rows at a time to limit memory.

        Args:
            chunk_rows: Number of rows that are processed at once.
        """
        rule_by_sensor = self.schema.per_slot_by_sensor
        rules = [rule_by_sensor[feature.sensor_name] for feature in self.schema.features]
        codes = np.array([code for code, rule in enumerate(rules) if rule in ("mean", "min", "max")], np.int64)
        is_mean = np.array([rules[code] == "mean" for code in codes], bool)
        cycles = [self.schema.slot_mean_cycles[code] for code in codes]
        # Means that are not circular have the period 0.
        periods = np.array([0.0 if cycle is None else cycle.period for cycle in cycles])
        starts = np.array([0.0 if cycle is None else cycle.start for cycle in cycles])
        for start in range(0, len(self.values) if len(codes) else 0, chunk_rows):
            chunk = slice(start, start + chunk_rows)
            counts, numbers = self.counts[chunk][:, codes], self.numbers[chunk][:, codes]
            combined = np.where(is_mean, numbers / np.maximum(counts, 1), numbers)
            rows, columns = np.nonzero(counts)
            values = self.values[chunk]
            if self.sines is not None:
                is_circular = periods[columns] > 0
                cells = rows[is_circular], columns[is_circular]
                sums = self.sines[chunk][:, codes][cells], numbers[cells], counts[cells]
                latest = np.full(len(cells[0]), np.nan)
                combined[cells] = compute_circular_mean(*sums, latest, periods[cells[1]], starts[cells[1]])
                # The latest reading, which stands for these cells, is in `values` already.
                is_replaced = ~np.isnan(combined[rows, columns])
                rows, columns = rows[is_replaced], columns[is_replaced]
            normalised = self.schema.normalise(codes[columns], combined[rows, columns])
            values[rows, codes[columns]] = normalised.astype(np.float32)
            self.values[chunk] = values


def _get_feature(schema: Schema, readings: EventReadings) -> Feature:
    """Return the feature of readings; with time slots, the first one of their sensor, as all are normalised alike."""
    first_code, _ = schema.slot_layout_by_sensor[readings.feature_name]
    return schema.features[first_code]
