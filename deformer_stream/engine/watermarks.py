"""Watermarks of devices, which decide when the windows of a device's event time are closed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class Watermarks:
    """The latest event time (watermark) of each device, and the deadlines of the device's open windows.

    A window is a record that collects the readings of one device within an interval of event time. It closes when the
    watermark of the device reaches its deadline. Times are microseconds since 1970.

    Args:
        max_devices: Watermarks of so many devices are kept. Above it, the device whose last event is the oldest is
            dropped.

    Attributes:
        watermark_by_device: Watermarks, the device with the latest event last.
    """

    def __init__(self, max_devices: int) -> None:
        self.max_devices = max_devices
        self.watermark_by_device: OrderedDict[str, int] = OrderedDict()
        self._deadlines_by_device: dict[str, dict[str, int]] = {}  # deadlines by record id
        self._device_by_record: dict[str, str] = {}

    def __len__(self) -> int:
        """Return the number of open windows."""
        return len(self._device_by_record)

    def advance(self, device: str, time: int) -> tuple[int, list[str]]:
        """Advance the watermark of a device to the time of an event, if it is not later already.

        Returns:
            The watermark, and the ids of the device's windows whose deadline it has reached, the earliest deadline
            first. They stay open until `close_window`.
        """
        watermark = self.watermark_by_device.get(device)
        if watermark is None and len(self.watermark_by_device) >= self.max_devices:
            self.watermark_by_device.popitem(last=False)
        watermark = time if watermark is None else max(watermark, time)
        self.watermark_by_device[device] = watermark
        self.watermark_by_device.move_to_end(device)
        deadlines = self._deadlines_by_device.get(device, {})
        ended = [(deadline, record_id) for record_id, deadline in deadlines.items() if deadline <= watermark]
        return watermark, [record_id for _, record_id in sorted(ended)]

    def open_window(self, device: str, record_id: str, deadline: int) -> None:
        """Register a window of a device with its deadline. A window that is registered already keeps its deadline."""
        if record_id not in self._device_by_record:
            self._device_by_record[record_id] = device
            self._deadlines_by_device.setdefault(device, {})[record_id] = deadline

    def open_windows(self) -> list[tuple[str, str, int]]:
        """Return record id, device and deadline of each open window, in the order in which they were opened."""
        return [
            (record_id, device, self._deadlines_by_device[device][record_id])
            for record_id, device in self._device_by_record.items()
        ]

    def restore(self, watermarks: Iterable[tuple[str, int]]) -> None:
        """Replace all watermarks by these pairs of device and time, the device with the latest event last."""
        self.watermark_by_device = OrderedDict(watermarks)
        while len(self.watermark_by_device) > self.max_devices:
            self.watermark_by_device.popitem(last=False)

    def close_window(self, record_id: str) -> None:
        """Remove the window of a closed record. A record that is not an open window is ignored."""
        device = self._device_by_record.pop(record_id, None)
        if device is None:
            return
        deadlines = self._deadlines_by_device[device]
        del deadlines[record_id]
        if not deadlines:
            del self._deadlines_by_device[device]
