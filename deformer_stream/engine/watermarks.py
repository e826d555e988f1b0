"""Watermarks (latest event times) of devices, which decide when the windows of a device are closed.

A window is a record that collects the readings of one device within an interval of event time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class Watermarks:
    """The latest event time (watermark) of each device, and the deadlines of the device's open windows.

    A window is a record that collects the readings of one device within an interval of event time. It closes when the
    watermark of the device reaches the deadline of the window. If the record is complete before, the window counts as
    complete until its deadline. Times are microseconds since 1970.

    Args:
        max_devices: Largest number of devices whose watermark is kept; that of the latest event is kept in any case. If
            there are more, the watermark of the device that has sent no event for the longest time is dropped, with its
            complete windows. Its open windows stay registered. The next event of this device starts a new watermark.

    Attributes:
        watermark_by_device: The watermark of each device, ordered by when the last event of the device was processed,
            the latest at the end.
    """

    def __init__(self, max_devices: int) -> None:
        self.max_devices = max(max_devices, 1)
        self.watermark_by_device: OrderedDict[str, int] = OrderedDict()
        self._deadlines_by_device: dict[str, dict[str, int]] = {}  # deadlines by record id
        self._device_by_record: dict[str, str] = {}
        # The same for the complete windows: deadlines by device and record id, and devices by record id.
        self._complete_deadlines_by_device: dict[str, dict[str, int]] = {}
        self._device_by_complete_record: dict[str, str] = {}

    def __len__(self) -> int:
        """Return the number of open windows."""
        return len(self._device_by_record)

    def advance(self, device: str, time: int) -> tuple[int, list[str]]:
        """Advance the watermark (latest event time) of a device with a new event, and return the windows that end.

        A window is a record that collects the readings of one device within an interval of event time. The watermark
        stays as it is if the event is earlier. The first event of a device starts its watermark. If there are
        `max_devices` others, the watermark of the device that has sent no event for the longest time is dropped.

        Args:
            device: The device that sent the event.
            time: Event time of the event, microseconds since 1970.

        Returns:
            First the watermark of the device after the event. Second the record ids of its open windows whose deadline
            is at or before the watermark, ordered by deadline and then by id. Each call for the device returns such a
            window again, until `close_window` removes it.
        """
        watermark = self.watermark_by_device.get(device)
        if watermark is None and len(self.watermark_by_device) >= self.max_devices:
            # The first device is the one that has sent no event for the longest time. Only its watermark is dropped.
            # Its open windows are kept, and its next event starts a new watermark.
            silent_device, _ = self.watermark_by_device.popitem(last=False)
            self._drop_complete_windows(silent_device)
        watermark = time if watermark is None else max(watermark, time)
        self.watermark_by_device[device] = watermark
        self.watermark_by_device.move_to_end(device)
        if device in self._complete_deadlines_by_device:
            self._drop_complete_windows(device, watermark)
        deadline_by_record = self._deadlines_by_device.get(device, {})
        ended = [(deadline, record_id) for record_id, deadline in deadline_by_record.items() if deadline <= watermark]
        return watermark, [record_id for _, record_id in sorted(ended)]

    def open_window(self, device: str, record_id: str, deadline: int) -> None:
        """Register a window (a record of the readings of one device within an interval of event time) as open.

        Nothing changes if the window is registered already.

        Args:
            device: The device.
            record_id: Id of the window's record.
            deadline: When the window ends: as soon as the device sends an event with this event time or a later one.
                Microseconds since 1970.
        """
        if record_id not in self._device_by_record:
            self._device_by_record[record_id] = device
            self._deadlines_by_device.setdefault(device, {})[record_id] = deadline

    def windows_of(self, device: str) -> list[str]:
        """Return the record ids of the open windows of a device, in order of opening."""
        return list(self._deadlines_by_device.get(device, ()))

    def device_of(self, record_id: str) -> str | None:
        """Return the device of an open window, or None if the record is not an open window."""
        return self._device_by_record.get(record_id)

    def deadline_of(self, record_id: str) -> int:
        """Return the event time at which an open window ends, microseconds since 1970."""
        return self._deadlines_by_device[self._device_by_record[record_id]][record_id]

    def complete_window(self, record_id: str) -> None:
        """Register that the record of an open window is complete, so that the window is no longer open.

        Every later reading of the window repeats an earlier one. `is_complete` returns true until the watermark of the
        device reaches the deadline of the window. Nothing happens if the record is not an open window.
        """
        device = self._device_by_record.get(record_id)
        if device is None:
            return
        deadline = self._deadlines_by_device[device][record_id]
        self.close_window(record_id)
        # Without a watermark nothing would remove the window again.
        if device in self.watermark_by_device:
            self._complete_deadlines_by_device.setdefault(device, {})[record_id] = deadline
            self._device_by_complete_record[record_id] = device

    def is_complete(self, record_id: str) -> bool:
        """Return whether the record is a complete window whose deadline its device has not reached yet."""
        return record_id in self._device_by_complete_record

    def complete_windows(self) -> list[tuple[str, str, int]]:
        """Return the record id, the device and the deadline of each complete window, in order of completion.

        The deadline is the event time, in microseconds since 1970, at which the window ends.
        """
        return [
            (record_id, device, self._complete_deadlines_by_device[device][record_id])
            for record_id, device in self._device_by_complete_record.items()
        ]

    def _drop_complete_windows(self, device: str, until: int | None = None) -> None:
        """Remove the complete windows of a device whose deadline is at or before a time, or all if there is no time."""
        deadline_by_record = self._complete_deadlines_by_device.get(device, {})
        for record_id in [r for r, deadline in deadline_by_record.items() if until is None or deadline <= until]:
            self._close_complete_window(record_id)

    def _close_complete_window(self, record_id: str) -> None:
        """Remove a complete window, so that `is_complete` returns false."""
        device = self._device_by_complete_record.pop(record_id)
        deadline_by_record = self._complete_deadlines_by_device[device]
        del deadline_by_record[record_id]
        if not deadline_by_record:
            del self._complete_deadlines_by_device[device]

    def open_windows(self) -> list[tuple[str, str, int]]:
        """Return the record id, the device and the deadline of each open window, in order of opening.

        The deadline is the event time, in microseconds since 1970, at which the window ends.
        """
        return [
            (record_id, device, self._deadlines_by_device[device][record_id])
            for record_id, device in self._device_by_record.items()
        ]

    def restore(
        self, watermarks: Iterable[tuple[str, int]], complete_windows: Iterable[tuple[str, str, int]] = ()
    ) -> None:
        """Load the watermarks (latest event times of devices) and the complete windows of a snapshot.

        A snapshot is the state of the previous run. Open windows are not changed.

        Args:
            watermarks: Pairs of a device and its watermark in microseconds since 1970, ordered by when the last event
                of the device was processed. If there are more than `max_devices`, the first ones are dropped.
            complete_windows: Record id, device and deadline of each window whose record is complete, from
                `complete_windows`. Those of devices without a watermark are dropped.
        """
        self.watermark_by_device = OrderedDict(watermarks)
        while len(self.watermark_by_device) > self.max_devices:
            self.watermark_by_device.popitem(last=False)
        for record_id, device, deadline in complete_windows:
            if device in self.watermark_by_device:
                self._complete_deadlines_by_device.setdefault(device, {})[record_id] = deadline
                self._device_by_complete_record[record_id] = device

    def close_window(self, record_id: str) -> None:
        """Remove the window of a closed record, so that `advance` no longer returns it and it is not complete.

        Nothing happens if the record is neither an open nor a complete window.
        """
        if record_id in self._device_by_complete_record:
            self._close_complete_window(record_id)
        device = self._device_by_record.pop(record_id, None)
        if device is None:
            return
        deadline_by_record = self._deadlines_by_device[device]
        del deadline_by_record[record_id]
        if not deadline_by_record:  # so that devices without open windows occupy no memory
            del self._deadlines_by_device[device]
