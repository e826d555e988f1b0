"""Several readings of a sensor in one time slot: count them, and suggest time slots with one reading each.

A window without time slots counts as one slot.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deformer_stream.model.windows import Window
from deformer_stream.runtime.repeated_readings import MIN_SHARE, RepeatedReadingsReport

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
