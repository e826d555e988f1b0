"""The time scales of records with irregular readings: sensors report at any times, and any number of times.

A reading then keeps its own time, which the network gets as an input (`time_inputs`). No reading has to be assigned to
a time slot (`time_slots`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

MAX_OCTAVES = 12
"""Largest number of periods of the sines and cosines that encode the age of a record."""

NUM_GAP_INPUTS = 3
"""Number of inputs of the network that describe the time since the previous reading of the same sensor."""


@dataclass(frozen=True, slots=True)
class ReadingTimes:
    """The time scales of records with irregular readings.

    The names of the attributes are the keys of the entry `reading_times` in the manifest of a model directory.

    Attributes:
        duration: The usual duration of a record in microseconds. It is the width of the window if records are windows.
        resolution: The usual smallest time between two readings of a record in microseconds.

    Raises:
        ValueError: The attributes are not positive integers, or the resolution exceeds the duration.
    """

    duration: int
    resolution: int

    def __post_init__(self) -> None:
        # JSON yields floats and booleans too, and a boolean is an instance of int.
        has_integers = type(self.duration) is int and type(self.resolution) is int
        if not has_integers or not 1 <= self.resolution <= self.duration:
            raise ValueError(
                f"a record of {self.duration!r} microseconds cannot have readings at a resolution of "
                f"{self.resolution!r} microseconds: both must be positive integers, and the resolution must not exceed "
                "the duration"
            )

    @property
    def num_octaves(self) -> int:
        """Number of periods of the sines and cosines that encode an age: duration, duration / 2, duration / 4, ….

        The shortest one is longer than two times the resolution. There is always at least one.
        """
        octaves = [k for k in range(MAX_OCTAVES) if self.duration / 2**k > 2 * self.resolution]
        return max(1, len(octaves))

    @property
    def num_inputs(self) -> int:
        """The number T of inputs of the network that `time_inputs.encode_times` computes for each reading."""
        return 1 + 2 * self.num_octaves + NUM_GAP_INPUTS

    def to_json(self) -> dict[str, int]:
        """Return {"duration": …, "resolution": …}, for the manifest (manifest.json) of a model directory."""
        return asdict(self)

    @staticmethod
    def from_json(row: dict[str, Any] | None) -> ReadingTimes | None:
        """Return the time scales from the JSON object that `to_json` returned, or None if `row` is None.

        Raises:
            ValueError: The attributes are not allowed (see `ReadingTimes`).
            TypeError: A key is missing or unknown.
        """
        return None if row is None else ReadingTimes(**row)
