"""Event time, device by device: how records are cut out of it, how far it has come, and which open records are windows
of it.

A watermark belongs to a device and is moved by that device's own events, one by one in order of arrival. So which
events are late depends on nothing but the device's own stream, which one partition carries: not on polls, or the clocks
of others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

MARK = "@"
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


def start_of(times: Times, width: int) -> Times:
    """Where the windows of this width (microseconds) around these times begin."""
    return times // width * width


def duration(micros: int) -> str:
    """As the options take it, in the largest unit that leaves no fraction: `90s`, `2m`; microseconds as `0.5ms`."""
    if not micros:
        return "0s"
    for unit, size in _UNITS:
        if micros % size == 0:
            return f"{micros // size}{unit}"
    return f"{micros // 1000}.{micros % 1000:03}".rstrip("0") + "ms"


class Watermarks:
    """The latest event time of each device, and the deadlines of its open windows. Times are microseconds.

    remembered: of so many devices, those heard from last, the watermark is known.
    """

    def __init__(self, remembered: int) -> None:
        self.remembered = remembered
        self.marks: OrderedDict[str, int] = OrderedDict()
        self._deadlines: dict[str, dict[str, int]] = {}  # device → record → deadline
        self._device: dict[str, str] = {}  # record → device

    def __len__(self) -> int:
        """Open windows."""
        return len(self._device)

    def advance(self, device: str, time: int) -> tuple[int, list[str]]:
        """The device's watermark after an event of this time; and the records that it closes, the earliest deadline
        first, which are open until `close`."""
        mark = self.marks.get(device)
        if mark is None and len(self.marks) >= self.remembered:
            self.marks.popitem(last=False)
        mark = time if mark is None else max(mark, time)
        self.marks[device] = mark
        self.marks.move_to_end(device)
        over = [(deadline, record) for record, deadline in self._deadlines.get(device, {}).items() if deadline <= mark]
        return mark, [record for _, record in sorted(over)]

    def open(self, device: str, record: str, deadline: int) -> None:
        """The record is a window of this device and closes at this deadline; to say so again changes nothing."""
        if record not in self._device:
            self._device[record] = device
            self._deadlines.setdefault(device, {})[record] = deadline

    def windows(self) -> list[tuple[str, str, int]]:
        """The open windows: record, device, deadline."""
        return [(record, device, self._deadlines[device][record]) for record, device in self._device.items()]

    def restore(self, marks: Iterable[tuple[str, int]]) -> None:
        """Begin with these watermarks, the device heard from last at the end."""
        self.marks = OrderedDict(marks)
        while len(self.marks) > self.remembered:
            self.marks.popitem(last=False)

    def close(self, record: str) -> None:
        """The record has ended, of whatever cause; it need not be a window."""
        device = self._device.pop(record, None)
        if device is not None:
            del self._deadlines[device][record]
            if not self._deadlines[device]:
                del self._deadlines[device]
