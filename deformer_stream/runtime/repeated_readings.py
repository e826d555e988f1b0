"""The share of readings that repeat an earlier one of their time slot, and what to do if there are many.

A time slot is a part of a window (a record of one device's readings within an interval of event time). A model with the
rule "first" (`Window.per_slot`) scores the first reading of a sensor in each slot, as it was trained. If sensors
report more often, further readings have no effect. This is no mistake of the sender, but mostly one in the choice of
the time slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from deformer_stream.durations import format_duration
from deformer_stream.engine.events import Effects, RejectionReason
from deformer_stream.model.schema import Schema
from deformer_stream.model.windows import Window
from deformer_stream.record_limits import MAX_FEATURES, MAX_SLOTS

MIN_SHARE = 0.01
"""Smallest share of repeated readings that is reported."""

ROUNDING = 0.1
"""If a slot has up to this many readings more than a whole number on average, fewer slots are suggested."""


def compute_max_slots(num_repeating: int, num_single: int) -> int:
    """Return the largest number of time slots with which a model can be trained.

    Args:
        num_repeating: Number of sensors that get a feature for each time slot.
        num_single: Number of sensors that report once in a window, which get a single feature.
    """
    return min(MAX_SLOTS, (MAX_FEATURES - num_single) // max(1, num_repeating))


@dataclass(frozen=True, slots=True)
class RepeatedReadingsReport:
    """A share of repeated readings that is worth a warning.

    Attributes:
        num_readings: Number of readings that were scored or repeated.
        num_repeated: Number of repeated readings.
        window: The window of the model.
        num_slots: A number of time slots with which most readings would be scored; None if there is no good one.
        is_last_minute: Whether the numbers are those of the last minute, and not of the whole run.
    """

    num_readings: int
    num_repeated: int
    window: Window
    num_slots: int | None
    is_last_minute: bool = False

    @property
    def share(self) -> float:
        """Share of the readings that are repeated, from 0 to 1."""
        return self.num_repeated / self.num_readings

    def describe(self) -> str:
        """Return one line for the user: the share of the readings, and how to train a model that uses them."""
        part = "half" if abs(self.share - 0.5) < 0.005 else f"{self.share:.0%}"
        period = " of the last minute" if self.is_last_minute else ""
        place = (
            f"a time slot of {format_duration(round(self.window.width / self.window.slots))}"
            if self.window.slots > 1
            else f"a window of {format_duration(self.window.width)}"
        )
        slots = f"--slots {self.num_slots}, or " if self.num_slots is not None else ""
        return (
            f"{part} of the readings{period} ({self.num_repeated:,} of {self.num_readings:,}) share {place} with an "
            f"earlier reading of their sensor and are left out: train with {slots}--per-slot last|mean|min|max"
        )

    def to_log_fields(self) -> dict[str, Any]:
        """Return the report as a dictionary, whose keys become the keys of a log line."""
        return {
            "share": round(self.share, 4),
            "readings": self.num_readings,
            "repeated": self.num_repeated,
            "message": self.describe(),
        }


class RepeatedReadingsMonitor:
    """A monitor of the share of repeated readings. It decides what is reported, and logs nothing itself.

    Args:
        schema: The features of the model.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._num_readings = self._num_repeated = 0  # of the whole run
        self._num_readings_before = self._num_repeated_before = 0  # before the last minute

    def add(self, effects: Effects) -> None:
        """Count the scored and the repeated readings of one batch."""
        num_repeated = sum(r.num_readings for r in effects.rejections if r.reason is RejectionReason.REPEATED)
        self._num_repeated += num_repeated
        self._num_readings += num_repeated + len(effects.scored)

    def check_last_minute(self) -> RepeatedReadingsReport | None:
        """Return a report about the readings since the last call, None if few of them are repeated."""
        num_readings = self._num_readings - self._num_readings_before
        num_repeated = self._num_repeated - self._num_repeated_before
        self._num_readings_before, self._num_repeated_before = self._num_readings, self._num_repeated
        return self._report(num_readings, num_repeated, is_last_minute=True)

    def summarize(self) -> RepeatedReadingsReport | None:
        """Return a report about all readings of the run, None if few of them are repeated."""
        return self._report(self._num_readings, self._num_repeated, is_last_minute=False)

    def _report(self, num_readings: int, num_repeated: int, is_last_minute: bool) -> RepeatedReadingsReport | None:
        """Return a report about these numbers, None if the share of repeated readings is below `MIN_SHARE`."""
        window = self._schema.window
        if window is None or not num_repeated or num_repeated < MIN_SHARE * num_readings:
            return None
        readings_per_slot = num_readings / max(num_readings - num_repeated, 1)
        num_slots = window.slots * ceil(readings_per_slot - ROUNDING)
        # Sensors with a single feature report once in a window, if other sensors have a feature for each time slot.
        num_sensors = len(self._schema.sensor_names)
        num_single = sum(f.sensor is None for f in self._schema.features) if window.slots > 1 else 0
        max_slots = compute_max_slots(num_sensors - num_single, num_single)
        is_useful = window.slots < num_slots <= max_slots
        return RepeatedReadingsReport(
            num_readings, num_repeated, window, num_slots if is_useful else None, is_last_minute
        )
