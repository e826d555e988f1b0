"""Ingestion of events: which readings of a batch are accepted, and which are rejected.

`ingest` enters a batch of events into a `RecordTable`. It opens records and accepts or rejects each event. It closes
the records that are complete or whose window is over. There are two implementations with the same result. A batch
without windows and rejections is processed by array operations. Any other batch is processed event by event, and its
accepted readings are collected by a `ReadingCollector`.

The rules differ if readings are irregular (`deformer_stream.engine.irregular_ingest`), or if the readings of a time
slot are combined (`deformer_stream.engine.slot_ingest`). Both use the collector, too.
"""

from __future__ import annotations

from itertools import pairwise, repeat

import numpy as np
from numpy.typing import NDArray

from deformer_stream.engine.events import NO_TIME, CloseReason, EventBatch, Rejection, RejectionReason
from deformer_stream.engine.partition import Partition
from deformer_stream.engine.records import AcceptedReadings, RecordTable
from deformer_stream.ragged import run_boundaries

Ints = NDArray[np.int64]

MAX_ID_LENGTH_IN_DETAIL = 100
"""Longest part of a record id, in characters, that the message about a rejected event repeats."""


def ingest(
    records: RecordTable, batch: EventBatch, now: int, model_version: int
) -> tuple[AcceptedReadings, list[Rejection]]:
    """Store the readings of a batch of events in a record table, and open the records that are new.

    An event whose record id is neither open nor closed opens a record. An event is rejected if its record is closed, or
    if its record has the feature already. If no event is rejected or belongs to a window, the batch is processed by
    array operations. Otherwise it is processed event by event, which is slower and has the same result. A window is a
    record that collects the readings of one device within an interval of time.

    Args:
        records: The table.
        batch: Events in the order of arrival.
        now: Time of arrival, microseconds since 1970.
        model_version: Number of the model version that scores the records that are opened.

    Returns:
        The accepted readings and the rejections.
    """
    if not len(batch):
        return AcceptedReadings.empty(), []
    # The row of each event's record. None if an event belongs to a window or would be rejected.
    owners = _open_owners(records, batch, model_version) if batch.windows is None else None
    if owners is None:
        return ingest_sequential(ReadingCollector(records), batch, now, model_version)
    return _ingest_vectorized(records, batch, owners, now), []


def _open_owners(records: RecordTable, batch: EventBatch, model_version: int) -> Ints | None:
    """Find the record of each of N events, and open the records that are new.

    If any event of the batch would be rejected, nothing is changed.

    Args:
        records: The table.
        batch: The N events.
        model_version: Number of the model version that scores the records that are opened.

    Returns:
        (N,) the owner of each event, which is the row of its record in the table; None if an event would be rejected.
    """
    num_features, capacity = len(records.schema), records.capacity
    # Events from one row of an input table are of one record, so ids are looked up once per input row.
    ids, input_row_by_event = batch.records_of_rows()
    partitions = batch.partitions if batch.row_boundaries is None else batch.partitions[batch.row_boundaries[:-1]]
    partition_ids, indices = partitions.tolist(), list[int]()
    # Neighbouring ids are mostly of one partition, so each run of them is looked up in the mapping of that partition.
    for begin, end in pairwise(run_boundaries(partitions).tolist()):
        index_by_id = records.partition(partition_ids[begin]).record_index_by_id
        indices += map(index_by_id.get, ids[begin:end], repeat(-1))
    record_indices = np.array(indices, np.int64)
    # New records have provisional indices beyond the capacity until it is certain that no event is rejected.
    provisional_index: dict[tuple[int, str], int] = {}
    for i in (record_indices < 0).nonzero()[0].tolist():
        partition_id, record_id = partition_ids[i], ids[i]
        index = provisional_index.get((partition_id, record_id))
        if index is None:
            if record_id in records.partitions[partition_id].closed_ids:
                return None
            index = provisional_index[partition_id, record_id] = capacity + len(provisional_index)
        record_indices[i] = index
    owners = record_indices if batch.row_boundaries is None else record_indices[input_row_by_event]
    reading_keys = owners * num_features + batch.features  # a number that is unique for each record and feature
    reading_keys.sort()  # equal keys are neighbours then
    if (reading_keys[1:] == reading_keys[:-1]).any():
        return None  # the batch has a feature of a record twice
    # Only records that were open before this batch can have the feature of an event already.
    is_old = owners < capacity if provisional_index else slice(None)
    if records.has_any_feature(owners[is_old], batch.features[is_old]):
        return None  # a record has the feature already
    if provisional_index:
        allocated = [
            records.allocate(record_id, partition_id, records.partitions[partition_id])
            for partition_id, record_id in provisional_index
        ]
        new_indices = np.array(allocated, np.int64)
        new_partitions = np.array([partition_id for partition_id, _ in provisional_index], np.int32)
        records.initialize(new_indices, new_partitions, model_version)
        is_new = owners >= capacity
        owners[is_new] = new_indices[owners[is_new] - capacity]
    return owners


def _ingest_vectorized(records: RecordTable, batch: EventBatch, owners: Ints, now: int) -> AcceptedReadings:
    """Store the readings of N events by array operations, if none of them is rejected or belongs to a window.

    A window is a record that collects the readings of one device within an interval of time.

    Args:
        records: The record table, in which all records of the events are open.
        batch: The N events.
        owners: (N,) row of each event's record in the table, from `_open_owners`.
        now: Time of arrival, microseconds since 1970.

    Returns:
        The accepted readings. Records that are complete now are closed.
    """
    is_reading = ~np.isnan(batch.values)  # NaN declares a feature as missing
    # Sort the events by record, so that the events of each record are one run of `by_record`.
    by_record = owners.argsort(kind="stable")
    boundaries, is_reading_by_record = run_boundaries(owners[by_record]), is_reading[by_record]
    begin, num_events = boundaries[:-1], boundaries[1:] - boundaries[:-1]
    touched = owners[by_record[begin]]
    num_before = records.num_readings[touched]
    # A reading's position is the number of earlier readings of its record. These are the ones stored before this batch,
    # and the ones before it in the record's run (all earlier ones in sorted order minus those before the run).
    seq = np.empty(len(owners), np.int64)
    readings_before = is_reading_by_record.cumsum() - is_reading_by_record
    seq[by_record] = readings_before + (num_before - readings_before[begin]).repeat(num_events)
    num_new = np.add.reduceat(is_reading_by_record, begin, dtype=np.int64)

    event_indices = is_reading.nonzero()[0]
    missing_indices = (~is_reading).nonzero()[0]
    accepted = AcceptedReadings(
        event_indices, owners[event_indices], seq[event_indices], {}, missing_indices, owners[missing_indices]
    )
    records.mark_features(owners, batch.features)
    for event, text in batch.unseen_labels.items():
        records.add_unseen_label(int(owners[event]), int(seq[event]), text)
    records.add_readings(accepted, batch, touched, num_before + num_new, now)

    # Close complete records in the order of their last events, as if the events were entered one by one.
    complete = records.is_complete(touched).nonzero()[0]
    last_event = by_record[boundaries[complete + 1] - 1]
    closed = touched[complete[last_event.argsort()]]
    for record_index, partition_id in zip(closed.tolist(), records.partition_ids[closed].tolist(), strict=True):
        accepted.close_reasons[record_index] = CloseReason.COMPLETE
        records.partitions[partition_id].close(records.record_ids[record_index], records.has_windows)
    records.mark_closed(closed)
    return accepted


def ingest_sequential(
    collector: ReadingCollector, batch: EventBatch, now: int, model_version: int
) -> tuple[AcceptedReadings, list[Rejection]]:
    """Store the readings of events one by one, because some are rejected or belong to windows.

    A window is a record that collects the readings of one device within an interval of time.

    Args:
        collector: A new collector, which decides which readings are accepted.
        batch: Events in the order of arrival.
        now: Time of arrival, microseconds since 1970.
        model_version: Number of the model version that scores the records that are opened.

    Returns:
        The accepted readings and the rejections. Records that are complete, or whose window is over, are closed.
    """
    records = collector.records
    rejections: list[Rejection] = []
    unseen_labels, windows = batch.unseen_labels, batch.windows
    devices = [""] * len(batch) if windows is None else windows.devices
    features, is_missing = batch.features.tolist(), np.isnan(batch.values).tolist()
    has_time = [True] * len(batch) if not records.is_irregular else (batch.times != NO_TIME).tolist()
    current_id, partition = -1, Partition(max_closed_ids=0)  # placeholders, replaced at the first event
    index_by_id, closed_ids = partition.record_index_by_id, partition.closed_ids
    for i, (record_id, partition_id) in enumerate(zip(batch.record_ids, batch.partitions.tolist(), strict=True)):
        if not has_time[i]:
            rejections.append(reject(records, batch, i, RejectionReason.MISSING_FIELD))
            continue
        if partition_id != current_id:
            current_id, partition = partition_id, records.partition(partition_id)
            index_by_id, closed_ids = partition.record_index_by_id, partition.closed_ids
        device = devices[i]
        if windows is not None and device:
            deadline, time = int(windows.deadlines[i]), int(batch.times[i])
            reason, ended = partition.advance_watermark(record_id, device, deadline, time)
            collector.close_reasons |= dict.fromkeys(ended, CloseReason.WINDOW)
            if reason is not None:
                rejections.append(reject(records, batch, i, reason))
                continue
        record_index = index_by_id.get(record_id)
        if record_index is None:
            if record_id in closed_ids:
                rejections.append(reject(records, batch, i, RejectionReason.LATE))
                continue
            record_index = collector.open_record(record_id, partition_id, partition)
        if not collector.accept(i, record_index, partition, features[i], is_missing[i], unseen_labels.get(i)):
            reason, cause = collector.explain_rejection(record_index, features[i], is_in_window=bool(device))
            rejections.append(reject(records, batch, i, reason, cause))
    return collector.store(batch, now, model_version), rejections


class ReadingCollector:
    """A collector of the readings that are accepted from a batch of events one by one.

    `accept` checks and marks each reading, and closes records that are complete. `store` writes all of them at once to
    the arrays of the record table.

    Attributes:
        records: The record table.
        close_reasons: The records that the batch has ended, with the reason, by row of the table.
    """

    def __init__(self, records: RecordTable) -> None:
        self.close_reasons: dict[int, CloseReason] = {}
        self.records = records
        self._num_features = len(records.schema)
        self._event_indices: list[int] = []
        self._record_indices: list[int] = []
        self._seq: list[int] = []
        self._missing_events: list[int] = []  # events that declare a feature as missing
        self._missing_records: list[int] = []
        # By row of the table, for records with accepted events: the number of readings, old and new ones together, and
        # the number of features that are neither observed nor declared as missing yet.
        self._new_counts: dict[int, int] = {}
        self._num_awaited: dict[int, int] = {}
        self._partition_by_opened: dict[int, int] = {}  # by row of each new record: number of its partition
        # The bits of observed or missing features as a flat memoryview, whose single bytes are accessed faster.
        self._mask, self._mask_width = records.view_mask()

    def open_record(self, record_id: str, partition_id: int, partition: Partition) -> int:
        """Return the row of the table for a new record.

        Args:
            record_id: Id of the record, which must be neither open nor closed.
            partition_id: Number of its partition.
            partition: The `Partition` of this number.
        """
        record_index = self.records.allocate(record_id, partition_id, partition)
        self._mask, _ = self.records.view_mask()  # the table may have grown
        self._partition_by_opened[record_index], self._new_counts[record_index] = partition_id, 0
        self._num_awaited[record_index] = self._num_features
        return record_index

    def has_feature(self, record_index: int, feature: int) -> bool:
        """Return whether a feature of a record was observed or declared as missing before.

        Args:
            record_index: Row of the record in the table.
            feature: Feature code.
        """
        # Feature f is bit f % 8 of byte f // 8 in the row of its record.
        return bool(self._mask[record_index * self._mask_width + (feature >> 3)] & 1 << (feature & 7))

    def touch(self, record_index: int) -> int:
        """Include a record among those with accepted events, and return the number of its readings.

        Args:
            record_index: Row of the record in the table.
        """
        count = self._new_counts.get(record_index)
        if count is None:  # the first accepted event of a record that was open before this batch
            count = self._new_counts[record_index] = int(self.records.num_readings[record_index])
            num_missing = int(self.records.num_declared_missing[record_index])
            self._num_awaited[record_index] = self._num_features - count - num_missing
        return count

    def accept(
        self,
        event_index: int,
        record_index: int,
        partition: Partition | None,
        feature: int,
        is_missing: bool,
        unseen_label: str | None,
    ) -> bool:
        """Add one reading, or the declaration that a feature will not be observed, to its record.

        Args:
            event_index: Index of the event in the batch that is passed to `store`.
            record_index: Row of the record in the table.
            partition: The partition of the record, to close the record if it is complete afterwards. None if the caller
                closes the record anyway.
            feature: Feature code.
            is_missing: Whether the event declares the feature as missing.
            unseen_label: Text of the value if it is a label that the model does not have, otherwise None.

        Returns:
            False if the feature was observed or declared missing before. Nothing is changed then.
        """
        # Feature f is bit f % 8 of byte f // 8 in the row of its record.
        mask, byte, bit = self._mask, record_index * self._mask_width + (feature >> 3), 1 << (feature & 7)
        if mask[byte] & bit:
            return False
        mask[byte] |= bit
        place = self._new_counts.get(record_index)  # position of the next reading: the number of earlier ones
        if place is None:
            place = self.touch(record_index)
        num_awaited = self._num_awaited[record_index] = self._num_awaited[record_index] - 1
        if is_missing:
            self._missing_records.append(record_index)
            self._missing_events.append(event_index)
        else:
            self._new_counts[record_index] = place + 1
            self._event_indices.append(event_index)
            self._record_indices.append(record_index)
            self._seq.append(place)
            if unseen_label is not None:
                self.records.add_unseen_label(record_index, place, unseen_label)
        if not num_awaited and partition is not None:
            self.close_complete(record_index, partition)
        return True

    def close_complete(self, record_index: int, partition: Partition) -> None:
        """Close a record that is complete.

        Args:
            record_index: Row of the record in the table.
            partition: The partition of the record.
        """
        self.close_reasons[record_index] = CloseReason.COMPLETE
        partition.close(self.records.record_ids[record_index], self.records.has_windows)

    def explain_rejection(
        self, record_index: int, feature: int, is_in_window: bool
    ) -> tuple[RejectionReason, str | None]:
        """Return why `accept` has returned False, and the cause that the message about the rejection states.

        Args:
            record_index: Row of the record in the table.
            feature: Feature code.
            is_in_window: Whether the event belongs to a window.

        Returns:
            The reason; and the cause, None for the usual text (`CAUSE_BY_REASON`).
        """
        is_repeated = self.records.has_windows and is_in_window
        return RejectionReason.REPEATED if is_repeated else RejectionReason.DUPLICATE, None

    def store(self, batch: EventBatch, now: int, model_version: int) -> AcceptedReadings:
        """Write the accepted readings to the arrays of the table, and return them.

        Args:
            batch: The events to which the event indices refer.
            now: Time of arrival, microseconds since 1970.
            model_version: Number of the model version that scores the records that were opened.
        """
        opened = np.array(list(self._partition_by_opened), np.int64)
        partition_ids = np.array(list(self._partition_by_opened.values()), np.int32)
        self.records.initialize(opened, partition_ids, model_version)
        accepted = AcceptedReadings(
            np.array(self._event_indices, np.int64),
            np.array(self._record_indices, np.int64),
            np.array(self._seq, np.int64),
            self.close_reasons,
            np.array(self._missing_events, np.int64),
            np.array(self._missing_records, np.int64),
        )
        touched = np.array(list(self._new_counts), np.int64)
        num_readings = np.array(list(self._new_counts.values()), np.int64)
        self.records.add_readings(accepted, batch, touched, num_readings, now)
        self.records.mark_closed(np.array(list(self.close_reasons), np.int64))  # the keys are rows of the table
        return accepted


CAUSE_BY_REASON = {
    RejectionReason.LATE: "its record is closed",
    RejectionReason.DUPLICATE: "the record has this feature already",
    RejectionReason.REPEATED: "the window has a reading of this sensor already, in the same time slot",
    RejectionReason.MISSING_FIELD: "irregular readings need times, and this event has none",
}
"""What the message about a rejected event says for each reason."""


def reject(
    records: RecordTable, batch: EventBatch, event_index: int, reason: RejectionReason, cause: str | None = None
) -> Rejection:
    """Return the rejection of one event, with a message that names its record, its feature and the cause.

    Args:
        records: The record table.
        batch: The batch of events.
        event_index: Index of the event in the batch.
        reason: `LATE` if the event's record is closed; `DUPLICATE` if its record has the feature already, or `REPEATED`
            if this record is a window of a model with windows; `MISSING_FIELD` if the event has no time, which
            irregular readings need.
        cause: What the message says about the cause; by default the text of `CAUSE_BY_REASON`.
    """
    feature = records.schema.names[batch.features[event_index]]
    cause = cause or CAUSE_BY_REASON[reason]
    record_id = batch.record_ids[event_index]
    if len(record_id) > MAX_ID_LENGTH_IN_DETAIL:
        record_id = record_id[:MAX_ID_LENGTH_IN_DETAIL] + "…"
    detail = f"record {record_id!r}, feature {feature!r}: {cause}"
    return Rejection(int(batch.message_indices[event_index]), reason, detail)
