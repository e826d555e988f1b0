"""Event time, device by device: how records are cut out of it, how far it has come, and which open records are windows
of it.

A watermark belongs to a device and is moved by that device's own events, one by one in order of arrival. So which
events are late depends on nothing but the device's own stream, which one partition carries: not on polls, or the clocks
of others.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

WINDOW_SEPARATOR = "@"
"""Stands between the device and the beginning of the window in the id of a record that is a window."""

Times = TypeVar("Times", int, NDArray[np.int64])
"""A time, or (N,) of them: microseconds since 1970."""

_UNITS = (("h", 3_600_000_000), ("m", 60_000_000), ("s", 1_000_000), ("ms", 1_000))


@dataclass(frozen=True, slots=True)
class Window:
    """Tumbling windows of a device's time, aligned to 1970-01-01T00:00:00Z, each with its start and without its end,
    cut into equal slots: a record is a window, and a sensor may report once in each of its slots.

    width: microseconds. slots: at least 1; slot k begins ⌈k · width / slots⌉ after the start. Raises ValueError.
    """

    width: int
    slots: int = 1

    def __post_init__(self) -> None:
        if type(self.width) is not int or type(self.slots) is not int or not 1 <= self.slots <= self.width:
            raise ValueError("a window has a width in whole microseconds and at least one slot, each of a microsecond")
        if self.width * self.slots >= 2**63:
            raise ValueError("a window has fewer slots, or is shorter")

    def slot(self, times: Times) -> Times:
        """In which slots of their windows these times lie, from 0."""
        return times % self.width * self.slots // self.width

    def offset(self, slot: int) -> int:
        """Microseconds from the window's start to that of the slot."""
        return -(-slot * self.width // self.slots)

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @staticmethod
    def from_json(row: dict[str, Any] | None) -> Window | None:
        return None if row is None else Window(**row)


def window_start(times: Times, width: int) -> Times:
    """Where the windows of this width (microseconds) around these times begin."""
    return times // width * width


def format_duration(micros: int) -> str:
    """As the options take it, in the largest unit that leaves no fraction: `90s`, `2m`; microseconds as `0.5ms`."""
    if not micros:
        return "0s"
    for unit, size in _UNITS:
        if micros % size == 0:
            return f"{micros // size}{unit}"
    return f"{micros // 1000}.{micros % 1000:03}".rstrip("0") + "ms"
