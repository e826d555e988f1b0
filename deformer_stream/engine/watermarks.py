"""Watermarks (latest event times) of devices, which decide when the windows of a device are closed.

A window is a record that collects the readings of one device within an interval of event time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class Watermarks:
    """The latest event time (watermark) of each device, and the deadlines of the device's open windows.

    A window is a record that collects the readings of one device within an interval of event time. It closes when the
    watermark of the device reaches the deadline of the window. Times are microseconds since 1970.

    Args:
        max_devices: Largest number of devices whose watermark is kept. If there are more, the device whose last event
            was processed the longest time ago is dropped.

    Attributes:
        watermark_by_device: The watermark of each device. The device whose event was processed last is the last one.
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
        """Advance the watermark of a device to the time of an event, unless the watermark is later already.

        Args:
            device: The device that sent the event.
            time: Time of the event.

        Returns:
            The new watermark, and the record ids of the device's open windows whose deadline it has reached. The ids
            are ordered by deadline and then alphabetically. The windows stay registered until `close_window`.
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
        """Register a window (a record with the readings of one device within an interval of time) as open.

        A window that is registered already keeps its deadline.

        Args:
            device: The device.
            record_id: Id of the window's record.
            deadline: Event time at which the window closes, microseconds since 1970.
        """
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
        """Replace all watermarks by those of a snapshot.

        Args:
            watermarks: Pairs of a device and its watermark in microseconds since 1970. The device whose event was
                processed last is the last one. If there are more than `max_devices`, the first ones are dropped.
        """
        self.watermark_by_device = OrderedDict(watermarks)
        while len(self.watermark_by_device) > self.max_devices:
            self.watermark_by_device.popitem(last=False)

    def close_window(self, record_id: str) -> None:
        """Remove the window of a closed record, so that `advance` no longer returns it.

        A record that is not an open window is ignored.
        """
        device = self._device_by_record.pop(record_id, None)
        if device is None:
            return
        deadlines = self._deadlines_by_device[device]
        del deadlines[record_id]
        if not deadlines:
            del self._deadlines_by_device[device]
