"""Several readings of a sensor in one time slot: combine them (`--per-slot`), count them, and suggest time slots.

The rules are those of `deformer_stream.model.windows.Window.per_slot`. A window without time slots counts as one slot.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deformer_stream.errors import ConfigError
from deformer_stream.model.cycles import compute_circular_mean
from deformer_stream.model.schema import Schema
from deformer_stream.model.windows import PerSlot, Window
from deformer_stream.runtime.repeated_readings import MIN_SHARE, RepeatedReadingsReport
from deformer_stream.tables.table import join_names

MAX_INTERVALS = 20_000
"""Largest number of intervals between the readings of a sensor that are kept, from the start of the table."""


@dataclass
class ReadingIntervals:
    """The intervals between the readings of one sensor in its records, from which time slots are suggested.

    Attributes:
        microseconds: The first `MAX_INTERVALS` positive intervals between successive readings of one record.
    """

    microseconds: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def add(self, rows: NDArray[np.int64], times: NDArray[np.int64]) -> None:
        """Add the intervals between M readings of the sensor.

        Args:
            rows: (M,) number of the record of each reading.
            times: (M,) times in microseconds since 1970.
        """
        if len(self.microseconds) >= MAX_INTERVALS:
            return
        order = np.lexsort((times, rows))
        intervals = np.diff(times[order])
        are_usable = (np.diff(rows[order]) == 0) & (intervals > 0)
        intervals = intervals[are_usable][: MAX_INTERVALS - len(self.microseconds)]
        self.microseconds = np.concatenate([self.microseconds, intervals])

    @property
    def typical(self) -> float | None:
        """The median interval in microseconds, None if there is none."""
        return float(np.median(self.microseconds)) if len(self.microseconds) else None


@dataclass
class SlotCounts:
    """How many readings share a time slot with an earlier reading of their sensor.

    Attributes:
        num_readings: Number of readings of features in normal records.
        num_repeated: Number of those that are not the first of their sensor in their time slot.
    """

    num_readings: int = 0
    num_repeated: int = 0


def suggest_num_slots(
    window: Window, interval_by_sensor: dict[str, ReadingIntervals], once: Collection[str], max_slots: int
) -> int | None:
    """Return the number of time slots in which each reading of the fastest sensor has a slot of its own.

    Args:
        window: The window of time that is one record.
        interval_by_sensor: The intervals between the readings of each sensor.
        once: Sensors that report once in a window by the option `--once`.
        max_slots: Largest number of time slots that can be used.

    Returns:
        The number. None if it is not larger than the present one, or too large.
    """
    typical = [interval.typical for name, interval in interval_by_sensor.items() if name not in once]
    shortest = min((interval for interval in typical if interval is not None), default=None)
    if shortest is None:
        return None
    num_slots = round(window.width / shortest)
    return num_slots if window.slots < num_slots <= max_slots else None


def describe_repeated_readings(counts: SlotCounts, window: Window, num_slots: int | None) -> str | None:
    """Return a warning about readings that are left out because their time slot has an earlier one; None without need.

    Args:
        counts: The numbers of readings.
        window: The window of time that is one record. It uses the first reading of a time slot.
        num_slots: The number of time slots to suggest, None if there is no good one.
    """
    if not counts.num_repeated or counts.num_repeated < MIN_SHARE * counts.num_readings:
        return None
    return RepeatedReadingsReport(counts.num_readings, counts.num_repeated, window, num_slots).describe()


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


class SlotAggregator:
    """Combines the readings of sensors whose rule for a time slot is not "first".

    The matrices have one row per record and one column per feature. They may be memory-mapped.

    Args:
        schema: The F features.
        values: (N, F) float32 normalised values or label codes, which are set.
        event_indexes: (N, F) position in the input of the reading that is "last", −1 if there is none yet.
        times: (N, F) its time in microseconds since 1970.
        numbers: (N, F) float64, zeros: sums, minima or maxima in raw units; sums of cosines for circular means.
        counts: (N, F) int32, zeros: numbers of readings.
        sines: (N, F) float64, zeros: sums of sines for circular means. None if the schema has no circular means
            (`Schema.slot_mean_cycles`).
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

    def add(
        self,
        rule: PerSlot,
        rows: NDArray[np.int64],
        codes: NDArray[np.int64],
        numbers: NDArray[np.float64],
        encoded: NDArray[np.float32],
        event_indexes: NDArray[np.int64],
        times: NDArray[np.int64],
    ) -> int:
        """Add M readings of one sensor, in the order of the input.

        Args:
            rule: The rule of the sensor, one of "last", "mean", "min" and "max".
            rows: (M,) row of each reading in the matrices.
            codes: (M,) column of each reading.
            numbers: (M,) readings in raw units, NaN for labels.
            encoded: (M,) normalised readings or label codes, NaN if missing or infinite. Such readings are ignored.
            event_indexes: (M,) positions of the readings in the input.
            times: (M,) times in microseconds since 1970.

        Returns:
            The number of readings whose time slot had another reading before.
        """
        is_usable = np.isfinite(encoded)
        rows, codes, numbers, encoded = rows[is_usable], codes[is_usable], numbers[is_usable], encoded[is_usable]
        event_indexes, times = event_indexes[is_usable], times[is_usable]
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
        return len(cells) - len(new_cells)

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
