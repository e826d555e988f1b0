"""Fixed windows of event time, which can serve as records.

If a stream has no record ids, each device's event time is cut into windows of equal width, and each window is one
record. A window can be divided into time slots, so that a sensor can report once in each slot. Times and widths are
integers in microseconds, which keeps the arithmetic exact.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

WINDOW_SEPARATOR = "@"
"""Separator between the device and the start of the window in the id of a record that is a window."""

PerSlot = Literal["first", "last", "mean", "min", "max"]
"""Which value stands for the readings of a sensor that share a time slot (see `Window.per_slot`)."""

IntOrArray = TypeVar("IntOrArray", int, NDArray[np.int64])
"""One integer or an int64 array of any shape."""


@dataclass(frozen=True, slots=True)
class Window:
    """The width of tumbling windows of event time, and the number of time slots into which each is divided.

    Each window of a device's readings is one record. The windows are aligned to 1970-01-01T00:00:00Z. A window includes
    its start and excludes its end. The names of the attributes are also the keys of the entry `window` in the manifest
    of a model directory.

    Attributes:
        width: The width of a window in microseconds.
        slots: The number of time slots, at least 1. Time slot k = 0, 1, … begins ⌈k · width / slots⌉ microseconds after
            the start of the window.
        per_slot: Which value stands for a time slot if a sensor has several readings in it. "first" is the first
            reading in the order of the input. The others combine all finite readings of the slot, when it is over:
            "last" is the reading with the latest time (of equal times, the last one in the input). "min" and "max" are
            the smallest and the largest number. "mean" is the sum of the numbers in float64, added in the order of the
            input, divided by their count. For positions on a cycle, such as angles, it is the circular mean
            (`deformer_stream.model.cycles`). The combined reading arrives at the time and the place in the input of the
            reading that is "last". `Schema.per_slot_by_sensor` says which of the rules applies to which sensor.

    Raises:
        ValueError: The width or the number of slots is not a positive integer, there are more slots than microseconds,
            or their product exceeds 64 bits. Or `per_slot` is none of its five values.
    """

    width: int
    slots: int = 1
    per_slot: PerSlot = "first"

    def __post_init__(self) -> None:
        # JSON yields floats and booleans too, and a boolean is an instance of int.
        if type(self.width) is not int or type(self.slots) is not int or not 1 <= self.slots <= self.width:
            raise ValueError(
                f"a window of {self.width!r} microseconds cannot have {self.slots!r} time slots: both numbers must be "
                "positive integers, and each time slot must be at least one microsecond wide"
            )
        # `time_slot_index` computes products up to this one in int64.
        if self.width * self.slots >= 2**63:
            raise ValueError(
                f"the product of the window width, {self.width} microseconds, and the number of time slots, "
                f"{self.slots}, exceeds 64 bits: use a shorter window or fewer time slots"
            )
        if self.per_slot not in get_args(PerSlot):
            raise ValueError(
                f"the readings of a time slot cannot be combined by {self.per_slot!r}: use one of "
                f"{', '.join(get_args(PerSlot))}"
            )

    def time_slot_index(self, times: IntOrArray) -> IntOrArray:
        """Return the index of the time slot in which each time lies, counted from 0 at the start of its window.

        Args:
            times: One time or an array of times, in microseconds since 1970.

        Returns:
            One index if `times` is one time, otherwise an array of indexes of the same shape.
        """
        time_since_window_start = times % self.width
        return time_since_window_start * self.slots // self.width

    def time_slot_offset(self, slot_index: int) -> int:
        """Return the number of microseconds from the start of a window to the start of a time slot.

        It is rounded up, so that `time_slot_index` of the result is `slot_index`.

        Args:
            slot_index: The index of the time slot in the window, from 0.
        """
        # The operator // rounds down. The two minus signs make it round up.
        return -(-slot_index * self.width // self.slots)

    def to_json(self) -> dict[str, Any]:
        """Return {"width": …, "slots": …}, for the manifest (manifest.json) of a model directory.

        The key "per_slot" is added if it is not "first". So the fingerprints of models without it stay as they are.
        """
        row = asdict(self)
        if self.per_slot == "first":
            del row["per_slot"]
        return row

    @staticmethod
    def from_json(row: dict[str, Any] | None) -> Window | None:
        """Return the window from the JSON object that `to_json` returned, or None if `row` is None.

        Args:
            row: The entry `window` of the manifest of a model directory. It is None if the records of the model are not
                windows of event time, but have ids in the input messages.

        Raises:
            ValueError: The width, the number of slots or the rule `per_slot` is not allowed (see `Window`).
            TypeError: A key is missing or unknown.
        """
        return None if row is None else Window(**row)


def floor_to_window(times: IntOrArray, width: int) -> IntOrArray:
    """Return the start of the window that contains each time.

    Args:
        times: One time or an array of times, in microseconds since 1970.
        width: The width of the windows in microseconds. A window starts at each multiple of the width.

    Returns:
        One start if `times` is one time, otherwise an array of the same shape; in microseconds since 1970.
    """
    return times // width * width
