"""Ingestion of events for models that combine the readings of a time slot.

A window (a record of one device's readings within an interval of event time) can be divided into time slots. If the
rule of a sensor is not "first" (`Window.per_slot`), its readings wait for the end of their slot and become one reading
(`deformer_stream.engine.slot_readings`).

`ingest_slots` does for these models what `ingest` does for all others. A combined reading is stored in its
record directly before the event that ends its slot, so that it precedes the closing of its window. `release_slots`
stores the waiting readings of records that end for another reason, such as a timeout. `find_settled_features` says
which features of open records await no reading.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deformer_stream.engine.events import CloseReason, EventBatch, Rejection, RejectionReason
from deformer_stream.engine.ingest import ReadingCollector, ingest, reject
from deformer_stream.engine.partition import Partition
from deformer_stream.engine.records import AcceptedReadings, RecordTable
from deformer_stream.engine.slot_readings import SlotReading
from deformer_stream.model.cycles import Cycle
from deformer_stream.model.windows import PerSlot, Window

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class _BatchBuilder:
    """A builder of a batch that contains the events of another batch, and the combined readings of time slots.

    Args:
        batch: The other batch.
    """

    def __init__(self, batch: EventBatch) -> None:
        self._batch = batch
        self._origins: list[int] = []  # index of each event in the other batch, −1 for a combined reading
        # The columns of the combined readings.
        self._record_ids: list[str] = []
        self._features: list[int] = []
        self._values: list[float] = []
        self._times: list[int] = []
        self._message_indices: list[int] = []
        self._partitions: list[int] = []
        self._unseen_labels: dict[int, str] = {}  # by index in the new batch

    def add_event(self, event_index: int) -> int:
        """Append an event of the other batch, given by its index there, and return its index in the new batch."""
        self._origins.append(event_index)
        return len(self._origins) - 1

    def add_reading(
        self,
        record_id: str,
        partition_id: int,
        reading: SlotReading,
        rule: PerSlot,
        cycle: Cycle | None,
        message_index: int,
    ) -> int:
        """Append a combined reading, and return its index in the new batch.

        Args:
            record_id: Id of the record.
            partition_id: Number of its partition.
            reading: The combined reading.
            rule: The rule with which it was combined.
            cycle: The cycle on which it was averaged, or None.
            message_index: Index of the message that has ended its time slot, −1 if no message has.
        """
        self._origins.append(-1)
        new_index = len(self._origins) - 1
        self._record_ids.append(record_id)
        self._features.append(reading.feature)
        self._values.append(reading.combined_value(rule, cycle))
        self._times.append(reading.time)
        self._message_indices.append(message_index)
        self._partitions.append(partition_id)
        if reading.unseen_label is not None:
            self._unseen_labels[new_index] = reading.unseen_label
        return new_index

    def build(self) -> EventBatch:
        """Return the new batch, or the other batch itself if no combined reading was added."""
        batch = self._batch
        if not self._record_ids:
            return batch
        origins = np.array(self._origins, np.int64)
        # Rows of a table of both: the events of the other batch, followed by the combined readings.
        rows = origins.copy()
        is_combined = origins < 0
        rows[is_combined] = len(batch) + np.arange(len(self._record_ids))
        record_ids = [*batch.record_ids, *self._record_ids]
        new_index_by_event = {event: i for i, event in enumerate(self._origins) if event >= 0}
        unseen_labels = {new_index_by_event[event]: text for event, text in batch.unseen_labels.items()}
        return EventBatch(
            [record_ids[row] for row in rows.tolist()],
            np.append(batch.features, np.array(self._features, np.int32))[rows],
            np.append(batch.values, np.array(self._values, np.float64))[rows],
            np.append(batch.times, np.array(self._times, np.int64))[rows],
            np.append(batch.message_indices, np.array(self._message_indices, np.int32))[rows],
            np.append(batch.partitions, np.array(self._partitions, np.int32))[rows],
            unseen_labels | self._unseen_labels,
        )


def ingest_slots(
    records: RecordTable, batch: EventBatch, now: int, model_version: int
) -> tuple[EventBatch, AcceptedReadings, list[Rejection], int]:
    """Store the readings of events, and combine those that share a time slot.

    Args:
        records: The record table of a model that combines readings (`RecordTable.slot_rules` is not None).
        batch: Events in the order of arrival.
        now: Time of arrival, microseconds since 1970.
        model_version: Number of the model version that scores the records that are opened.

    Returns:
        Four results. First the batch with an additional event for each combined reading whose time slot is over.
        Second the accepted readings, which refer to this batch. Third the rejections. Fourth the number of readings
        that were combined with an earlier one of the same time slot.
    """
    window, rules = records.schema.window, records.slot_rules
    has_waiting = any(len(partition.slot_readings) for partition in records.partitions.values())
    if window is None or rules is None or (batch.windows is None and not has_waiting):
        accepted, rejections = ingest(records, batch, now, model_version)
        return batch, accepted, rejections, 0
    ingestion = _SlotIngestion(records, batch, window, rules)
    partition_ids = batch.partitions.tolist()
    columns = (
        range(len(batch)),
        batch.record_ids,
        partition_ids,
        [records.partition(partition_id) for partition_id in partition_ids],
        batch.features.tolist(),
        batch.values.tolist(),
        batch.times.tolist(),
        [""] * len(batch) if batch.windows is None else batch.windows.devices,
        [0] * len(batch) if batch.windows is None else batch.windows.deadlines.tolist(),
    )
    for event in map(_Event._make, zip(*columns, strict=True)):
        ingestion.add(event)
    extended, accepted = ingestion.store(now, model_version)
    return extended, accepted, ingestion.rejections, ingestion.num_combined


class _Event(NamedTuple):
    """An event of a batch.

    Attributes:
        event_index: Index in the batch.
        record_id: Id of its record.
        partition_id: Number of its partition.
        partition: The open and closed records of this partition.
        feature: Feature code.
        value: Raw value, NaN if the feature is declared as "will not be observed".
        time: Event time, microseconds since 1970.
        device: Device of the window that is its record. Empty if the event names its record itself.
        deadline: Event time at which this window closes, microseconds since 1970; 0 without a window.
    """

    event_index: int
    record_id: str
    partition_id: int
    partition: Partition
    feature: int
    value: float
    time: int
    device: str
    deadline: int


class _SlotIngestion:
    """The ingestion of one batch of events for a model that combines the readings of a time slot.

    Args:
        records: The record table.
        batch: The batch.
        window: The window of the model.
        rules: By feature code, which value stands for several readings of a time slot.

    Attributes:
        rejections: The rejected readings so far.
        num_combined: Number of readings so far that were combined with an earlier one of the same time slot.
    """

    def __init__(self, records: RecordTable, batch: EventBatch, window: Window, rules: Sequence[PerSlot]) -> None:
        self._records, self._batch, self._window, self._rules = records, batch, window, rules
        self._cycles = records.schema.slot_mean_cycles
        self._collector, self._builder = ReadingCollector(records), _BatchBuilder(batch)
        self._waiting_rows: list[int] = []  # the row of the record of each reading that waits
        self.rejections: list[Rejection] = []
        self.num_combined = 0

    def add(self, event: _Event) -> None:
        """Accept or reject the reading of an event, or let it wait for the end of its time slot."""
        reason = self._end_slots_and_windows(event) if event.device else _find_closed_reason(event)
        new_index = self._builder.add_event(event.event_index)
        if reason is not None:
            self._reject(event, reason)
        elif event.device and self._rules[event.feature] != "first":
            self._combine(event, new_index)
        else:
            self._accept(event, new_index, self._open_record(event))

    def store(self, now: int, model_version: int) -> tuple[EventBatch, AcceptedReadings]:
        """Store the accepted readings in the table, after the last event.

        Args:
            now: Time of arrival, microseconds since 1970.
            model_version: Number of the model version that scores the records that are opened.

        Returns:
            The batch with an additional event for each combined reading, and the accepted readings.
        """
        extended = self._builder.build()
        accepted = self._collector.store(extended, now, model_version)
        return extended, replace(accepted, waiting_record_indices=np.array(self._waiting_rows, np.int64))

    def _end_slots_and_windows(self, event: _Event) -> RejectionReason | None:
        """Accept the combined readings of slots that are over at the time of an event, and close windows that are over.

        Returns:
            Why the event is rejected, None if it is not.
        """
        partition, message_index = event.partition, int(self._batch.message_indices[event.event_index])
        for record_id, reading in partition.pop_finished_slots(event.device, event.time):
            record_index = partition.record_index_by_id[record_id]
            rule, cycle = self._rules[reading.feature], self._cycles[reading.feature]
            new_index = self._builder.add_reading(record_id, event.partition_id, reading, rule, cycle, message_index)
            _accept_reading(self._collector, new_index, record_index, partition, reading)
        reason, ended = partition.advance_watermark(event.record_id, event.device, event.deadline, event.time)
        self._collector.close_reasons |= dict.fromkeys(ended, CloseReason.WINDOW)
        return reason

    def _combine(self, event: _Event, new_index: int) -> None:
        """Combine the reading of an event with the others of its time slot, or reject it if the slot is over.

        If the record has a reading of the feature already, which has not waited, the reading is handled as any other.

        Args:
            event: The event of a window.
            new_index: Its index in the new batch.
        """
        partition, record_id, feature = event.partition, event.record_id, event.feature
        slot_deadline = _slot_deadline(self._window, event.deadline, event.time, partition, record_id)
        if slot_deadline <= partition.watermarks.watermark_by_device[event.device]:
            self._reject(event, RejectionReason.LATE, "its time slot is over")
            if record_id not in partition.record_index_by_id:
                # `advance_watermark` has registered a window, but it gets no record.
                partition.watermarks.close_window(record_id)
            return
        record_index = self._open_record(event)
        if self._collector.has_feature(record_index, feature):
            self._accept(event, new_index, record_index)
            return
        self._collector.touch(record_index)
        self._waiting_rows.append(record_index)
        self.num_combined += partition.slot_readings.add(
            event.device,
            record_id,
            feature,
            rule=self._rules[feature],
            value=event.value,
            time=event.time,
            deadline=slot_deadline,
            unseen_label=self._batch.unseen_labels.get(event.event_index),
            cycle=self._cycles[feature],
        )

    def _open_record(self, event: _Event) -> int:
        """Return the row of the record of an event, which is opened if it is not open."""
        record_index = event.partition.record_index_by_id.get(event.record_id)
        if record_index is not None:
            return record_index
        return self._collector.open_record(event.record_id, event.partition_id, event.partition)

    def _accept(self, event: _Event, new_index: int, record_index: int) -> None:
        """Accept the reading of an event, unless its record has one of this feature already.

        Args:
            event: The event.
            new_index: Its index in the new batch.
            record_index: Row of its record.
        """
        partition, feature = event.partition, event.feature
        # An event that names its record itself must not repeat a reading that waits for the end of its slot.
        is_waiting = partition.slot_readings.has(event.record_id, feature)
        unseen_label = self._batch.unseen_labels.get(event.event_index)
        if is_waiting or not self._collector.accept(
            new_index, record_index, partition, feature, math.isnan(event.value), unseen_label
        ):
            self._reject(event, RejectionReason.REPEATED if event.device else RejectionReason.DUPLICATE)

    def _reject(self, event: _Event, reason: RejectionReason, cause: str | None = None) -> None:
        """Reject the reading of an event.

        Args:
            event: The event.
            reason: The reason.
            cause: What the message says about the cause; None for the usual text.
        """
        self.rejections.append(reject(self._records, self._batch, event.event_index, reason, cause))


def _find_closed_reason(event: _Event) -> RejectionReason | None:
    """Return why an event that names its record itself is rejected: its record is closed. None if it is not."""
    partition = event.partition
    is_closed = event.record_id not in partition.record_index_by_id and event.record_id in partition.closed_ids
    return RejectionReason.LATE if is_closed else None


def find_settled_features(records: RecordTable, record_indices: Ints) -> Bools:
    """Return which features of R open records have a reading that waits for the end of its time slot, or a slot that is
    over, (R, F). A further reading of such a feature cannot become a reading of its record.

    Args:
        records: The record table.
        record_indices: (R,) rows of the records.
    """
    is_settled = np.zeros((len(record_indices), len(records.schema)), np.bool_)
    window, rules = records.schema.window, records.slot_rules
    if window is None or rules is None:
        return is_settled
    # By feature code: how long before the end of the window the slot of the feature ends. A feature without time slots,
    # or whose first reading counts, is awaited until the end.
    lead = np.zeros(len(records.schema), np.int64)
    for first_code, code_step in records.schema.slot_layout_by_sensor.values():
        if code_step and rules[first_code] != "first":
            ends = [window.time_slot_offset(slot + 1) for slot in range(window.slots)]
            lead[first_code : first_code + window.slots] = window.width - np.array(ends, np.int64)
    partition_ids = records.partition_ids[record_indices].tolist()
    for i, (row, partition_id) in enumerate(zip(record_indices.tolist(), partition_ids, strict=True)):
        record_id, partition = records.record_ids[row], records.partitions[partition_id]
        device = partition.watermarks.device_of(record_id)
        if device is None:
            continue  # an event has named the record itself
        is_settled[i, partition.slot_readings.features_of(record_id)] = True
        watermark = partition.watermarks.watermark_by_device.get(device)
        if watermark is not None:
            is_settled[i] |= partition.watermarks.deadline_of(record_id) - lead <= watermark
    return is_settled


def _slot_deadline(window: Window, window_deadline: int, time: int, partition: Partition, record_id: str) -> int:
    """Return the event time at which the time slot of a reading is over: its end plus the grace period.

    Args:
        window: The window of the model.
        window_deadline: Event time at which the window of the reading closes: its end plus the grace period.
        time: Event time of the reading, microseconds since 1970.
        partition: The partition of the record.
        record_id: Id of the record, which must be an open window.
    """
    next_slot_offset = window.time_slot_offset(window.time_slot_index(time) + 1)
    slot_deadline = window_deadline - (window.width - next_slot_offset)
    # The window may have been opened with a shorter grace period, before a restart. Its slots end with it.
    return min(slot_deadline, partition.watermarks.deadline_of(record_id))


def _accept_reading(
    collector: ReadingCollector,
    event_index: int,
    record_index: int,
    partition: Partition | None,
    reading: SlotReading,
) -> None:
    """Accept the combined reading of a time slot; if no reading of the slot has a value, declare the feature missing.

    Args:
        collector: The collector of accepted readings.
        event_index: Index of the combined reading in the batch.
        record_index: Row of the record in the table.
        partition: The partition of the record, to close the record if it is complete. None if the caller closes it.
        reading: The combined reading.
    """
    is_missing = reading.num_values == 0
    collector.accept(event_index, record_index, partition, reading.feature, is_missing, reading.unseen_label)


def release_slots(
    records: RecordTable, batch: EventBatch, accepted: AcceptedReadings, ending: Iterable[int], now: int
) -> tuple[EventBatch, AcceptedReadings]:
    """Store the readings of ending records that still wait for the end of their time slot.

    Args:
        records: The record table.
        batch: The batch of events.
        accepted: The readings that were accepted from the batch.
        ending: Rows of records that the caller closes.
        now: Current time, microseconds since 1970.

    Returns:
        The batch and the accepted readings, both extended by the combined readings. Their message index is −1. If no
        reading waits, both are returned without change.
    """
    rules, cycles = records.slot_rules, records.schema.slot_mean_cycles
    if rules is None:
        return batch, accepted
    released: list[tuple[int, SlotReading]] = []  # row of the record, and the reading
    for record_index in ending:
        record_id = records.record_ids[record_index]
        partition = records.partitions[int(records.partition_ids[record_index])]
        # If the record was closed within the batch, none of its readings waits.
        if partition.record_index_by_id.get(record_id) == record_index:
            released += ((record_index, reading) for reading in partition.slot_readings.pop_record(record_id))
    if not released:
        return batch, accepted
    collector, builder = ReadingCollector(records), _BatchBuilder(batch)
    for i in range(len(batch)):
        builder.add_event(i)
    for record_index, reading in released:
        record_id, partition_id = records.record_ids[record_index], int(records.partition_ids[record_index])
        rule, cycle = rules[reading.feature], cycles[reading.feature]
        event_index = builder.add_reading(record_id, partition_id, reading, rule, cycle, -1)
        _accept_reading(collector, event_index, record_index, None, reading)
    extended = builder.build()
    stored = collector.store(extended, now, model_version=0)  # no record is opened
    return extended, replace(
        accepted,
        event_indices=np.append(accepted.event_indices, stored.event_indices),
        record_indices=np.append(accepted.record_indices, stored.record_indices),
        seq=np.append(accepted.seq, stored.seq),
        missing_event_indices=np.append(accepted.missing_event_indices, stored.missing_event_indices),
        missing_record_indices=np.append(accepted.missing_record_indices, stored.missing_record_indices),
    )
