"""Watermarks of devices."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class Watermarks:
    """The latest event time of each device, and the deadlines of its open windows. Times are microseconds.

    remembered: of so many devices, those heard from last, the watermark is known.
    """

    def __init__(self, remembered: int) -> None:
        self.max_devices = remembered
        self.watermark_by_device: OrderedDict[str, int] = OrderedDict()
        self._deadlines: dict[str, dict[str, int]] = {}  # device → record → deadline
        self._device: dict[str, str] = {}  # record → device

    def __len__(self) -> int:
        """Open windows."""
        return len(self._device)

    def advance(self, device: str, time: int) -> tuple[int, list[str]]:
        """The device's watermark after an event of this time; and the records that it closes, the earliest deadline
        first, which are open until `close`."""
        mark = self.watermark_by_device.get(device)
        if mark is None and len(self.watermark_by_device) >= self.max_devices:
            self.watermark_by_device.popitem(last=False)
        mark = time if mark is None else max(mark, time)
        self.watermark_by_device[device] = mark
        self.watermark_by_device.move_to_end(device)
        over = [(deadline, record) for record, deadline in self._deadlines.get(device, {}).items() if deadline <= mark]
        return mark, [record for _, record in sorted(over)]

    def open_window(self, device: str, record: str, deadline: int) -> None:
        """The record is a window of this device and closes at this deadline; to say so again changes nothing."""
        if record not in self._device:
            self._device[record] = device
            self._deadlines.setdefault(device, {})[record] = deadline

    def open_windows(self) -> list[tuple[str, str, int]]:
        """The open windows: record, device, deadline."""
        return [(record, device, self._deadlines[device][record]) for record, device in self._device.items()]

    def restore(self, marks: Iterable[tuple[str, int]]) -> None:
        """Begin with these watermarks, the device heard from last at the end."""
        self.watermark_by_device = OrderedDict(marks)
        while len(self.watermark_by_device) > self.max_devices:
            self.watermark_by_device.popitem(last=False)

    def close_window(self, record: str) -> None:
        """The record has ended, of whatever cause; it need not be a window."""
        device = self._device.pop(record, None)
        if device is not None:
            del self._deadlines[device][record]
            if not self._deadlines[device]:
                del self._deadlines[device]
