"""The time for which devices were observed, by which numbers of false incidents are divided.

A budget such as `1 per 30d` is about 30 days of a device in operation, whatever the number of its records. A record
stands for the time since the record before it, so windows of any length and sparse records count in full. After
`MAX_GAP` without a record, a device counts as switched off. It is the length of the longest segments: with segments of
a day, a day with a record is an observed day as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deformer_stream.calibration.incident_segments import SEGMENT_LENGTHS
from deformer_stream.durations import MICROS_PER_HOUR

MAX_GAP = SEGMENT_LENGTHS[0]
"""Longest time between two records that counts in full, in microseconds."""

SINGLE_RECORD = MICROS_PER_HOUR
"""Time that the only record of a device counts, in microseconds."""


@dataclass(slots=True)
class ObservedTime:
    """The sum of the observed times of all devices.

    The records of a device come in order of time. One that is earlier than the one before it adds nothing.

    Attributes:
        max_gap: Longest time between two records of a device that counts in full, in microseconds.
    """

    max_gap: int = MAX_GAP
    _total: int = 0
    _last_by_device: dict[str, int] = field(default_factory=dict)
    _single_devices: set[str] = field(default_factory=set)  # those with records at one time only

    @property
    def num_devices(self) -> int:
        """The number of devices with records."""
        return len(self._last_by_device)

    @property
    def micros(self) -> int:
        """The sum of the observed times in microseconds."""
        return self._total + SINGLE_RECORD * len(self._single_devices)

    def add(self, device: str, time: int) -> None:
        """Add a record.

        Args:
            device: The device.
            time: Event time in microseconds since 1970.
        """
        last = self._last_by_device.get(device)
        if last is None:
            self._last_by_device[device] = time
            self._single_devices.add(device)
        elif time > last:
            observed = min(time - last, self.max_gap)
            if device in self._single_devices:
                self._single_devices.remove(device)
                observed *= 2  # the first record stands for as much time as the second one
            self._total += observed
            self._last_by_device[device] = time
