"""Readings that wait for the end of their time slot, because all readings of the slot become one.

A window (a record that collects the readings of one device within an interval of event time) can be divided into time
slots. A model states what happens to several readings of a sensor in one slot (`Window.per_slot`). With "first", the
first reading is scored when it arrives. With "last", "mean", "min" and "max", the value of a slot is known when the
slot is over. Until then, its readings are combined in one `SlotReading`.

A slot is over when an event of its device has a time at least the grace period after the end of the slot. This follows
from the log of the partition alone, so a consumer that reads the log again combines the same readings. If the record
ends earlier, for example by a timeout, its slots end with it. A reading that arrives after the end of its slot is late.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan
from sys import float_info

from deformer_stream.model.cycles import Cycle, compute_circular_mean
from deformer_stream.model.windows import PerSlot

SLOT_READING_BYTES = 300
"""Estimated bytes of a `SlotReading` with its entries in dictionaries, for the memory limit of open records."""


@dataclass(slots=True)
class SlotReading:
    """The readings of one sensor in one time slot that have arrived so far, combined to one.

    Attributes:
        feature: Feature code of the sensor in this time slot.
        deadline: Event time at which the slot is over, microseconds since 1970: the end of the slot plus the grace
            period.
        num_values: Number of readings that have a value. 0 if there are only declarations that the feature will not
            be observed.
        value: The combined value so far: the last value, the smallest, the largest, or the sum if the mean is computed.
            It is the last value, too, if the circular mean is computed. NaN if no reading has a value.
        time: The latest event time of these readings, microseconds since 1970.
        arrival_index: Position of the reading with the latest time in the order of arrival. Later ones have larger
            numbers.
        unseen_label: Text of the value if it is a label that the model does not have, otherwise None.
        sine: Sum of the sines of the readings if the circular mean is computed, otherwise 0.
        cosine: Sum of their cosines if the circular mean is computed, otherwise 0.
    """

    feature: int
    deadline: int
    num_values: int
    value: float
    time: int
    arrival_index: int
    unseen_label: str | None = None
    sine: float = 0.0
    cosine: float = 0.0

    def add(
        self,
        rule: PerSlot,
        value: float,
        time: int,
        arrival_index: int,
        unseen_label: str | None,
        cycle: Cycle | None = None,
    ) -> None:
        """Combine one more reading of the sensor in the same time slot with those before.

        Args:
            rule: Which value stands for the time slot.
            value: Value of the reading, or its label code. NaN declares that the feature will not be observed; it is
                ignored if another reading of the slot has a value.
            time: Event time of the reading, microseconds since 1970.
            arrival_index: Position of the reading in the order of arrival, larger than that of all readings before.
            unseen_label: Text of the label if the model does not have it, otherwise None.
            cycle: The cycle of the readings if the rule is "mean" and they are positions on a cycle, otherwise None.
        """
        if isnan(value):
            return
        is_first, is_latest = self.num_values == 0, time >= self.time
        self.num_values += 1
        if cycle is not None:
            self._add_components(value, cycle)
        if is_first:
            self.value, self.unseen_label = value, unseen_label
            self.time, self.arrival_index = time, arrival_index
            return
        if rule == "mean" and cycle is None:
            # A sum beyond the range of float64 stays at its end, because a value that is scored must be finite.
            self.value = min(max(self.value + value, -float_info.max), float_info.max)
        elif rule == "min":
            self.value = min(self.value, value)
        elif rule == "max":
            self.value = max(self.value, value)
        elif is_latest:
            self.value, self.unseen_label = value, unseen_label
        if is_latest:
            self.time, self.arrival_index = time, arrival_index

    def _add_components(self, value: float, cycle: Cycle) -> None:
        """Add the sine and the cosine of a value to their sums."""
        sine, cosine = cycle.compute_components(value)
        self.sine += float(sine)
        self.cosine += float(cosine)

    def combined_value(self, rule: PerSlot, cycle: Cycle | None = None) -> float:
        """Return the value that stands for the time slot, NaN if no reading has a value.

        Args:
            rule: The rule with which the readings were added.
            cycle: The cycle with which they were added, or None.
        """
        if cycle is not None:
            mean = compute_circular_mean(self.sine, self.cosine, self.num_values, self.value, cycle.period, cycle.start)
            return float(mean)
        return self.value / self.num_values if rule == "mean" and self.num_values else self.value

    @property
    def _order(self) -> tuple[int, int]:
        """The key by which readings whose slots are over are sorted: the latest event time, then the arrival."""
        return self.time, self.arrival_index


class SlotReadings:
    """The readings of one partition that wait for the end of their time slot, by record and feature."""

    def __init__(self) -> None:
        self._readings_by_record: dict[str, dict[int, SlotReading]] = {}
        # At or before the earliest deadline of the waiting readings of each device.
        self._next_deadline_by_device: dict[str, int] = {}
        self._num_arrived = 0
        self._num_slots = 0

    def __len__(self) -> int:
        """Return the number of time slots with waiting readings; each sensor has its own time slots."""
        return self._num_slots

    def count(self, record_id: str) -> int:
        """Return the number of time slots of a record with waiting readings; each sensor has its own time slots."""
        return len(self._readings_by_record.get(record_id, ()))

    def has(self, record_id: str, feature: int) -> bool:
        """Return whether a reading of this record and this feature code waits."""
        return feature in self._readings_by_record.get(record_id, ())

    def features_of(self, record_id: str) -> list[int]:
        """Return the feature codes of the readings of a record that wait."""
        return list(self._readings_by_record.get(record_id, ()))

    def add(
        self,
        device: str,
        record_id: str,
        feature: int,
        rule: PerSlot,
        value: float,
        time: int,
        deadline: int,
        unseen_label: str | None = None,
        cycle: Cycle | None = None,
    ) -> bool:
        """Add a reading to its time slot.

        Args:
            device: The device that sent the reading.
            record_id: Id of the record.
            feature: Feature code of the sensor in this time slot.
            rule: Which value stands for the time slot.
            value: Value of the reading, or its label code; NaN declares that the feature will not be observed.
            time: Event time of the reading, microseconds since 1970.
            deadline: Event time at which the slot is over, microseconds since 1970.
            unseen_label: Text of the label if the model does not have it, otherwise None.
            cycle: The cycle on which the readings of the sensor are averaged, None if they are not
                (`Schema.slot_mean_cycles`).

        Returns:
            Whether the slot had a reading already, with which this one was combined.
        """
        readings = self._readings_by_record.setdefault(record_id, {})
        reading = readings.get(feature)
        self._num_arrived += 1
        if reading is None:
            num_values = 0 if isnan(value) else 1
            reading = SlotReading(feature, deadline, num_values, value, time, self._num_arrived, unseen_label)
            if cycle is not None and num_values:
                reading._add_components(value, cycle)
            readings[feature] = reading
            self._register_deadline(device, deadline)
            self._num_slots += 1
            return False
        reading.add(rule, value, time, self._num_arrived, unseen_label, cycle)
        return True

    def _register_deadline(self, device: str, deadline: int) -> None:
        """Store that a slot of the device is over at an event time, so that `pop_finished` looks for it then."""
        self._next_deadline_by_device[device] = min(deadline, self._next_deadline_by_device.get(device, deadline))

    def pop_finished(self, device: str, record_ids: Iterable[str], watermark: int) -> list[tuple[str, SlotReading]]:
        """Remove and return the readings of a device whose time slots are over.

        Args:
            device: The device.
            record_ids: Ids of the open windows of the device.
            watermark: The latest event time of the device, microseconds since 1970.

        Returns:
            Pairs of the record id and the reading, in the order of the latest times of the readings.
        """
        next_deadline = self._next_deadline_by_device.get(device)
        if next_deadline is None or watermark < next_deadline:
            return []
        del self._next_deadline_by_device[device]
        finished: list[tuple[str, SlotReading]] = []
        for record_id in record_ids:
            readings = self._readings_by_record.get(record_id, {})
            for reading in list(readings.values()):
                if reading.deadline <= watermark:
                    finished.append((record_id, readings.pop(reading.feature)))
                else:
                    self._register_deadline(device, reading.deadline)
            if not readings:
                self._readings_by_record.pop(record_id, None)
        self._num_slots -= len(finished)
        return sorted(finished, key=lambda entry: entry[1]._order)

    def pop_record(self, record_id: str) -> list[SlotReading]:
        """Remove and return all waiting readings of a record, in the order of the latest times of the readings."""
        readings = self._readings_by_record.pop(record_id, {})
        self._num_slots -= len(readings)
        return sorted(readings.values(), key=lambda reading: reading._order)

    def drop_device(self, device: str) -> None:
        """Drop what is stored about a device without waiting readings, so that it occupies no memory."""
        self._next_deadline_by_device.pop(device, None)

    def entries(self) -> list[tuple[str, SlotReading]]:
        """Return pairs of a record id and a waiting reading, in the order of arrival of the readings."""
        entries = [
            (record_id, reading)
            for record_id, readings in self._readings_by_record.items()
            for reading in readings.values()
        ]
        return sorted(entries, key=lambda entry: entry[1].arrival_index)

    def restore(self, device: str, record_id: str, reading: SlotReading) -> None:
        """Add a waiting reading from a snapshot of the previous run's state.

        The readings must be added in the order of `entries`.

        Args:
            device: The device whose window the record is.
            record_id: Id of the record.
            reading: The reading. Its `arrival_index` is replaced.
        """
        self._num_arrived += 1
        self._num_slots += 1
        reading.arrival_index = self._num_arrived
        self._readings_by_record.setdefault(record_id, {})[reading.feature] = reading
        self._register_deadline(device, reading.deadline)
