"""The open records of a consumer: which records are open, their readings, and the running numbers of their scores.

A record is the unit that is scored; its readings arrive one by one. The accepted readings of a record are the truth
about it. Everything else in this module can be computed from them and from the recorded decisions of the engine.

`RecordTable` holds one row per open record in arrays. `Partition` holds what belongs to one partition of the input.
`ingest` enters a batch of events into the table. Only this module changes the arrays of the table. The compiled
kernels write into `RecordTable.running`, which the table hands out for that purpose.

States of a record, and what leads from one to the next:

    state        | how the table shows it                        | next state, and when
    -------------|-----------------------------------------------|----------------------------------------------------
    unknown      | its id is in no mapping of its partition      | open, when its first event is accepted
    open         | `is_open`, and `num_pending` is 0             | pending, when a reading arrives that waits for ties
                 |                                               | closed, see below
    pending      | `is_open`, and `num_pending` is positive      | open, when its tie group is decided
                 |                                               | closed, see below; its tie group is decided first
    closed       | id in `closed_ids`, the row is still readable | released, when its last scores have been computed
    released     | id in `closed_ids`, the row is free           | unknown, when newer ids displace it in `closed_ids`

A record is closed when it is complete, its window is over, it is idle for too long, too many records are open, its
partition is revoked, or the input ends (`CloseReason`). A pending record has readings of one event time (a tie group)
that are scored together once the group is complete (`deformer_stream.engine.ties`). An event of a closed record is
rejected as late.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deformer_stream.engine.events import (
    NO_ALERT,
    NO_TIME,
    AlertState,
    ClosedRecords,
    CloseReason,
    EventBatch,
    Rejection,
    RejectionReason,
)
from deformer_stream.engine.id_set import BoundedIdSet
from deformer_stream.engine.idle_queue import IdleQueue
from deformer_stream.engine.reading_log import ReadingLog
from deformer_stream.engine.watermarks import Watermarks
from deformer_stream.model.schema import Schema
from deformer_stream.ragged import ragged_indices, run_boundaries

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MAX_CLOSED_IDS = 200_000
"""How many ids of closed records a partition keeps, so that their late events are rejected instead of opening the
records again. It keeps the watermarks of as many devices."""

RUNNING_DTYPE = np.dtype(
    [
        ("scored", np.int64),
        ("total", np.float64),
        ("least", np.float64),
        ("peak", np.float64),
        ("log_likelihood", np.float64),
        ("excess", np.float64),
        ("p_value", np.float64),
    ]
)
"""The running numbers of a record, updated with each scored reading.

`scored` counts the scored readings. `total`, `least` and `peak` belong to the prefix statistic: the sum of the log
p-values, the smallest of them, and the largest statistic so far (`PrefixState`). `log_likelihood` is the sum of ln p,
`excess` that of the centered NLL, and `p_value` is the record's p-value. `kernels/csrc/statistics.c` has the same
layout; snapshots store the fields under these names."""

INITIAL_RUNNING = np.array((0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0), RUNNING_DTYPE)
"""The running numbers of a record before its first reading."""

MISROUTED_CHECK_INTERVAL = 17
"""After this many opened records, the table checks whether the same id is open in another partition. The number is
prime, so that regular patterns in the input do not always pass between two checks."""

MAX_ID_LENGTH_IN_DETAIL = 100
"""Characters of a record id that the detail of a rejection repeats."""

MIN_CAPACITY = 64
"""Rows of the smallest record table."""

ID_BYTES = 200
"""Estimated bytes of a record's id as a Python string and of its entry in the mapping of its partition."""


class Partition:
    """What is known about one partition of the input.

    Everything here follows from the partition's own log and decisions. Other partitions have no influence, so a
    partition can be restored on another consumer.

    Attributes:
        record_index_by_id: Rows of the open records, in the order in which they were opened.
        closed_ids: The latest ids of closed records.
        watermarks: Event time of each device, for records that are windows of a device's time.
    """

    def __init__(self, max_closed_ids: int = MAX_CLOSED_IDS) -> None:
        self.record_index_by_id: dict[str, int] = {}
        self.closed_ids = BoundedIdSet(max_closed_ids)
        self.watermarks = Watermarks(max_closed_ids)

    def advance_watermark(self, record_id: str, device: str, deadline: int, time: int) -> tuple[bool, list[int]]:
        """Advance the watermark of a device, and close the ids of its windows that end thereby.

        Args:
            record_id: The window that the event belongs to.
            device: The device that sent the event.
            deadline: Event time at which that window closes, microseconds.
            time: Event time, microseconds.

        Returns:
            Whether the event is late, and the record indices of the closed windows.
        """
        watermark, ended_windows = self.watermarks.advance(device, time)
        ended_indices = [self.close(window) for window in ended_windows]
        is_late = deadline <= watermark or (record_id not in self.record_index_by_id and record_id in self.closed_ids)
        if not is_late:
            self.watermarks.open_window(device, record_id, deadline)
        return is_late, [record_index for record_index in ended_indices if record_index is not None]

    def close(self, record_id: str) -> int | None:
        """Mark an id as closed and return the row of its record, or None if the record was not open."""
        record_index = self.record_index_by_id.pop(record_id, None)
        self.watermarks.close_window(record_id)
        if record_index is not None or record_id not in self.closed_ids:
            self.closed_ids.add(record_id)
        return record_index


@dataclass(frozen=True, slots=True)
class AcceptedReadings:
    """M readings that were accepted from a batch, in the order of acceptance.

    Attributes:
        event_indices: (M,) index of each reading's event in the batch.
        record_indices: (M,) row of each reading's record.
        seq: (M,) place of each reading in its record, from 0.
        close_reasons: Rows of the records that the batch has ended, in order, with the reason: they are complete, or
            their window is over. Their ids are closed already. Their rows stay readable until `RecordTable.release`.
        missing_event_indices: (D,) index in the batch of each accepted event that declares a feature as missing.
        missing_record_indices: (D,) row of the record of each such event.
    """

    event_indices: Ints
    record_indices: Ints
    seq: Ints
    close_reasons: dict[int, CloseReason]
    missing_event_indices: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    missing_record_indices: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    @staticmethod
    def empty() -> AcceptedReadings:
        """Return no readings."""
        nothing = np.empty(0, np.int64)
        return AcceptedReadings(nothing, nothing, nothing, {})


class RecordTable:
    """The open records of one consumer, one row (record index) each.

    Arrays have one element per row. Ids are unique within a partition: the same id in two partitions is two records.
    Times are microseconds since 1970 and are passed in.

    Args:
        schema: The features that records have.
        max_closed_ids: Ids of closed records, and devices, that are kept per partition.
        holds_ties: Whether readings of one record with the same event time wait for each other and are scored together.

    Attributes:
        partitions: `Partition` by its number.
        num_misrouted: Opened records whose id was open in another partition too, of those that were checked.
        misrouted_example: Id, partition and other partition of the latest of them, or None.
        record_ids: Id of each row.
        unseen_labels: By record index and place of the reading: the text of a label that the model does not have.
        log: The accepted readings.
        is_open: Whether the row holds an open record.
        partition_ids: Partition of the record.
        open_order: Number that is larger the later the record was opened.
        model_version: Number of the model that scores the record.
        last_accepted_at: Time of the last accepted event.
        num_readings: Accepted readings.
        num_declared_missing: Features that an event has declared as "will not be observed".
        observed_mask: (rows, bytes) bit set of features that were observed or declared missing. Feature f is bit f % 8,
            counted from the least significant, of byte f // 8.
        num_pending: The last so many readings wait for the decision of their tie group and are not scored yet.
        tie_time: Event time of the last tie group.
        running: Running numbers of the record's scores, of dtype `RUNNING_DTYPE`. Kernels update them in place.
        alert_seq: Place of the reading that raised the first alert, -1 if there is none.
        alert_alpha: The strictest alpha at which the record has alerted, `NO_ALERT` if there is none.
    """

    def __init__(self, schema: Schema, max_closed_ids: int = MAX_CLOSED_IDS, holds_ties: bool = False) -> None:
        self.schema = schema
        self.max_closed_ids = max_closed_ids
        self.holds_ties = holds_ties
        self.partitions: dict[int, Partition] = {}
        self.num_misrouted = 0
        self.misrouted_example: tuple[str, int, int] | None = None
        self.record_ids: list[str] = []
        self.unseen_labels: dict[int, dict[int, str]] = {}
        self.log = ReadingLog(len(schema), holds_ties)
        self._num_opened = 0
        self._num_late_tie_groups = 0
        self._free_indices: list[int] = []
        self._idle_queue = IdleQueue(self._is_latest_event, self._partitions_of, self._open_order_of)
        self._pending_queue = IdleQueue(self._is_latest_pending, self._partitions_of, self._open_order_of)
        self._array_names: list[str] = []
        self.is_open: Bools = self._add_array("is_open", np.bool_)
        self.partition_ids: NDArray[np.int32] = self._add_array("partition_ids", np.int32)
        self.open_order: Ints = self._add_array("open_order", np.int64)
        self.model_version: Ints = self._add_array("model_version", np.int64)
        self.last_accepted_at: Ints = self._add_array("last_accepted_at", np.int64)
        self.num_readings: Ints = self._add_array("num_readings", np.int64)
        self.num_declared_missing: Ints = self._add_array("num_declared_missing", np.int64)
        self.observed_mask: NDArray[np.uint8] = self._add_array("observed_mask", np.uint8, (-(-len(schema) // 8),))
        self.num_pending: Ints = self._add_array("num_pending", np.int64)
        self.tie_time: Ints = self._add_array("tie_time", np.int64)
        self.running: NDArray[np.void] = self._add_array("running", RUNNING_DTYPE)
        self.alert_seq: NDArray[np.int32] = self._add_array("alert_seq", np.int32)
        self.alert_alpha: Floats = self._add_array("alert_alpha", np.float64)
        arrays = [getattr(self, name) for name in self._array_names]
        row_widths = [array.dtype.itemsize * int(np.prod(array.shape[1:])) for array in arrays]
        self._row_bytes: int = sum(row_widths) + self.log.row_bytes + ID_BYTES

    def _add_array(self, name: str, dtype: Any, row_shape: tuple[int, ...] = ()) -> NDArray[Any]:
        """Register an array of the table, which grows with it, and return it without rows."""
        self._array_names.append(name)
        return np.zeros((0, *row_shape), dtype)

    def __len__(self) -> int:
        """Return the number of open records."""
        return sum(len(partition.record_index_by_id) for partition in self.partitions.values())

    @property
    def capacity(self) -> int:
        """Rows that exist, used or free."""
        return len(self.record_ids)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows in use and of their readings, ids included.

        The number depends on the records only, so that a restarted consumer evicts the same records. Arrays are
        enlarged by doubling, so the process may have up to twice as much allocated.
        """
        return (self.capacity - len(self._free_indices)) * self._row_bytes + self.log.num_bytes

    def bytes_of(self, record_indices: Ints) -> Ints:
        """Return the bytes that each of R records occupies, (R,)."""
        num_bytes: Ints = self.log.extent_bytes(record_indices) + self._row_bytes
        return num_bytes

    def partition(self, partition_id: int) -> Partition:
        """Return a partition, which is created empty if it is new."""
        partition = self.partitions.get(partition_id)
        if partition is None:
            partition = self.partitions[partition_id] = Partition(self.max_closed_ids)
        return partition

    # Opening and closing records

    def allocate(self, record_id: str, partition_id: int, partition: Partition) -> int:
        """Return a free row for a new record and register its id.

        Of the row's arrays only `observed_mask` is ready; call `initialize` for the others. Both steps are separate,
        because a batch opens many records one by one and initializes them at once.
        """
        if not self._free_indices:
            self._grow()
        record_index = self._free_indices.pop()
        self.record_ids[record_index] = record_id
        partition.record_index_by_id[record_id] = record_index
        self._num_opened += 1
        if self._num_opened % MISROUTED_CHECK_INTERVAL == 0 and len(self.partitions) > 1:
            self._check_misrouted(record_id, partition_id)
        return record_index

    def _grow(self) -> None:
        """Double the number of rows. New rows are filled with zeros."""
        old_capacity = self.capacity
        new_capacity = max(MIN_CAPACITY, 2 * old_capacity)
        for name in self._array_names:
            array = getattr(self, name)
            larger = np.zeros((new_capacity, *array.shape[1:]), array.dtype)
            larger[:old_capacity] = array
            setattr(self, name, larger)
        self.log.resize(new_capacity)
        self.record_ids.extend([""] * (new_capacity - old_capacity))
        self._free_indices.extend(range(new_capacity - 1, old_capacity - 1, -1))

    def _check_misrouted(self, record_id: str, partition_id: int) -> None:
        """Count the record as misrouted if its id is open in another partition.

        The cause is a producer that does not use the record id as the message key: the readings of one record are
        then spread over partitions and scored as several records.
        """
        for other_id, partition in self.partitions.items():
            if other_id != partition_id and record_id in partition.record_index_by_id:
                self.num_misrouted += 1
                self.misrouted_example = record_id, partition_id, other_id
                return

    def initialize(self, record_indices: Ints, partition_ids: NDArray[np.int32], model_version: int | Ints) -> None:
        """Set the rows of R new records, which have no readings yet.

        Args:
            record_indices: (R,) rows that `allocate` has returned last, in that order.
            partition_ids: (R,) partition of each record.
            model_version: Number of the model that scores them, one for all or (R,).
        """
        self.is_open[record_indices] = True
        self.partition_ids[record_indices] = partition_ids
        self.open_order[record_indices] = np.arange(self._num_opened - len(record_indices), self._num_opened)
        self.model_version[record_indices] = model_version
        self.num_readings[record_indices] = 0
        self.num_declared_missing[record_indices] = 0
        self.alert_seq[record_indices] = -1
        self.alert_alpha[record_indices] = NO_ALERT
        self.num_pending[record_indices] = 0
        self.tie_time[record_indices] = NO_TIME
        self.reset_scores(record_indices)

    def close(self, record_indices: Sequence[int], reason: CloseReason | Sequence[CloseReason]) -> ClosedRecords:
        """Close records and return what is known about them at their end.

        Their ids become closed ids. The rows stay readable until `release`.

        Args:
            record_indices: Rows of R records.
            reason: One reason for all, or one for each.
        """
        reasons = [reason] * len(record_indices) if isinstance(reason, CloseReason) else list(reason)
        rows = np.array(record_indices, np.int64)
        ids = [self.record_ids[record_index] for record_index in record_indices]
        for record_index, record_id, partition_id in zip(
            record_indices, ids, self.partition_ids[rows].tolist(), strict=True
        ):
            partition = self.partitions[partition_id]
            # The id of a record that a batch has completed is closed already and may belong to a new record.
            if partition.record_index_by_id.get(record_id) == record_index:
                partition.close(record_id)
        self.is_open[rows] = False
        return ClosedRecords(
            record_ids=ids,
            reasons=reasons,
            partitions=self.partition_ids[rows],
            num_readings=self.num_readings[rows].astype(np.int32),
            is_complete=self.is_complete(rows),
            log_likelihood=self.running["log_likelihood"][rows],
            anomaly_score=self.running["excess"][rows],
            p_value=self.running["p_value"][rows],
            alert_seq=self.alert_seq[rows],
            alert_alpha=self.alert_alpha[rows],
            score=self.running["peak"][rows],
        )

    def close_ids(self, partition_id: int, record_ids: Iterable[str]) -> list[int]:
        """Close ids of a partition, whether their records are open or not, and return the rows of the open ones."""
        partition = self.partition(partition_id)
        closed_indices = [index for record_id in record_ids if (index := partition.close(record_id)) is not None]
        self.is_open[closed_indices] = False
        return closed_indices

    def release(self, record_indices: Collection[int]) -> None:
        """Free the rows of closed records for new ones."""
        rows = np.fromiter(record_indices, np.int64, len(record_indices))
        self.observed_mask[rows] = 0
        self.log.free(rows)
        self._free_indices.extend(record_indices)
        if self.unseen_labels:
            for record_index in record_indices:
                self.unseen_labels.pop(record_index, None)

    def drop_partitions(self, partition_ids: Iterable[int]) -> None:
        """Drop partitions that have no open record, with their closed ids and watermarks."""
        for partition_id in partition_ids:
            self.partitions.pop(partition_id, None)

    def empty_copy(self, schema: Schema, holds_ties: bool) -> RecordTable:
        """Return a table for another model without records; only statistics about the input are carried over."""
        records = RecordTable(schema, self.max_closed_ids, holds_ties)
        records.num_misrouted, records.misrouted_example = self.num_misrouted, self.misrouted_example
        records._num_late_tie_groups = self._num_late_tie_groups
        return records

    # Reading the table

    def ingest(self, batch: EventBatch, now: int, model_version: int = 0) -> tuple[AcceptedReadings, list[Rejection]]:
        """Enter a batch of events into the table; see the function `ingest`."""
        return ingest(self, batch, now, model_version)

    def is_complete(self, record_indices: Ints) -> Bools:
        """Return whether every feature of R records was observed or declared missing, (R,)."""
        num_known = self.num_readings[record_indices] + self.num_declared_missing[record_indices]
        is_complete: Bools = num_known == len(self.schema)
        return is_complete

    def readings_of(self, record_index: int) -> tuple[Ints, Floats]:
        """Return copies of the feature codes and raw values of one record's readings, each (L,)."""
        return self.log.gather(np.int64(record_index), np.arange(int(self.num_readings[record_index])))

    def missing_features(self, record_indices: Ints) -> tuple[Ints, Ints]:
        """Return the features of R records that were declared missing.

        Returns:
            (A,) position of the record among the R, and (A,) feature code, ordered by both.
        """
        position = np.flatnonzero(self.num_declared_missing[record_indices] > 0)
        rows = record_indices[position]
        mask = np.unpackbits(self.observed_mask[rows], axis=1, count=len(self.schema), bitorder="little")
        is_missing = mask.astype(np.bool_)
        row, place = ragged_indices(self.num_readings[rows])
        is_missing[row, self.log.gather_features(rows[row], place)] = False
        row, code = np.nonzero(is_missing)
        return position[row], code

    def indices_of_partitions(self, partition_ids: Iterable[int] | None = None) -> list[int]:
        """Return the open records of some or all partitions, ordered by partition and then by when they were opened."""
        is_member = self.is_open
        if partition_ids is not None:
            is_member = is_member & np.isin(self.partition_ids, list(partition_ids))
        rows = np.flatnonzero(is_member)
        order = np.lexsort((self.open_order[rows], self.partition_ids[rows]))
        record_indices: list[int] = rows[order].tolist()
        return record_indices

    def reading_counts(self, record_indices: Iterable[int]) -> dict[int, dict[str, int]]:
        """Return the number of readings of each record, by partition and record id."""
        counts: dict[int, dict[str, int]] = {}
        for record_index in record_indices:
            of_partition = counts.setdefault(int(self.partition_ids[record_index]), {})
            of_partition[self.record_ids[record_index]] = int(self.num_readings[record_index])
        return counts

    # Finding records that have been idle

    def _partitions_of(self, record_indices: Ints) -> NDArray[np.int32]:
        return self.partition_ids[record_indices]

    def _open_order_of(self, record_indices: Ints) -> Ints:
        return self.open_order[record_indices]

    def _is_latest_event(self, record_indices: Ints, times: Ints) -> Bools:
        """Return whether each record is open and its last event was accepted at the given time."""
        is_latest: Bools = self.is_open[record_indices] & (self.last_accepted_at[record_indices] == times)
        return is_latest

    def _is_latest_pending(self, record_indices: Ints, times: Ints) -> Bools:
        """Return the same as `_is_latest_event`, and false for records without readings that wait for their ties."""
        is_latest: Bools = self._is_latest_event(record_indices, times) & (self.num_pending[record_indices] > 0)
        return is_latest

    def select_idle(
        self, until: int, excluded_partitions: Collection[int] = (), pending_only: bool = False
    ) -> tuple[list[int], int | None]:
        """Return the open records whose last event was accepted at or before a time.

        Args:
            until: The time, microseconds.
            excluded_partitions: Partitions whose records are not selected, because they are being restored.
            pending_only: Select only records with readings that wait for the decision of their tie group.

        Returns:
            Their rows, the longest idle first, then by partition and opening; and the time of the last event of the
            longest idle record among the others, None if there is none.
        """
        queue = self._pending_queue if pending_only else self._idle_queue
        selected = queue.select_until(until, excluded_partitions)
        return selected.tolist(), queue.earliest_time(selected)

    def select_longest_idle(
        self,
        num_records: int,
        excluded_partitions: Collection[int] = (),
        num_bytes: int = 0,
        skipped: Collection[int] = (),
    ) -> list[int]:
        """Return the records that have been idle for longest, enough of them to free records and bytes.

        Args:
            num_records: At least this many records are selected.
            excluded_partitions: Partitions whose records are not selected, because they are being restored.
            num_bytes: At least this many bytes are freed by closing the selected records.
            skipped: Rows that are not selected and do not count, because they are being closed anyway.

        Returns:
            Their rows, the longest idle first, then by partition and opening. All records of the table that may be
            selected, if they are not enough.
        """
        num_wanted = max(num_records, -(-num_bytes // self._row_bytes), 1)
        while True:
            candidates = self._idle_queue.select_first(num_wanted + len(skipped), excluded_partitions)
            is_last_try = len(candidates) < num_wanted + len(skipped)
            if skipped:
                candidates = candidates[~np.isin(candidates, list(skipped))]
            freed_bytes = np.cumsum(self.bytes_of(candidates))
            num_for_bytes = int(np.searchsorted(freed_bytes, num_bytes)) + 1 if num_bytes > 0 else 0
            num_selected = max(num_records, num_for_bytes)
            if num_selected <= len(candidates) or is_last_try:
                selected: list[int] = candidates[:num_selected].tolist()
                return selected
            num_wanted *= 2

    # Changing what is known about a record

    def touch(self, record_indices: Ints, now: int) -> None:
        """Store that events of these records were accepted now (microseconds)."""
        self.last_accepted_at[record_indices] = now
        self._idle_queue.push(record_indices, now)
        if self.holds_ties:
            # A feature that is declared missing postpones the time-out of readings that wait, like a further reading.
            self._pending_queue.push(record_indices[self.num_pending[record_indices] > 0], now)

    def reset_scores(self, record_indices: Ints) -> None:
        """Set the running numbers of records to those before their first reading."""
        self.running[record_indices] = INITIAL_RUNNING

    def set_p_values(self, record_indices: Ints, p_values: Floats) -> None:
        """Store the current p-values of R records, (R,)."""
        self.running["p_value"][record_indices] = p_values

    def mark_alerted(self, record_index: int, alert: AlertState) -> None:
        """Store that a record has alerted; the place of its first alert and the strictest alpha are kept."""
        if self.alert_seq[record_index] < 0:
            self.alert_seq[record_index] = alert.seq
        self.alert_alpha[record_index] = min(self.alert_alpha[record_index], alert.alpha)

    def set_pending(self, record_indices: Ints, num_pending: Ints, tie_time: Ints) -> None:
        """Store how many of the last readings of R records wait for their tie group, and its event time, each (R,)."""
        self.num_pending[record_indices] = num_pending
        self.tie_time[record_indices] = tie_time
        waiting = record_indices[num_pending > 0]
        self._pending_queue.push(waiting, self.last_accepted_at[waiting])

    def clear_pending(self, record_indices: Ints) -> None:
        """Store that no reading of these records waits any more, because their tie groups are decided."""
        self.num_pending[record_indices] = 0

    def add_late_tie_groups(self, num_groups: int) -> None:
        """Count tie groups that began after the group of their event time had been decided."""
        self._num_late_tie_groups += num_groups

    def pop_late_tie_groups(self) -> int:
        """Return the number of late tie groups since the last call."""
        num_groups, self._num_late_tie_groups = self._num_late_tie_groups, 0
        return num_groups

    def add_unseen_label(self, record_index: int, place: int, text: str) -> None:
        """Store the text of a label that the model does not have, for the reading at this place of the record."""
        self.unseen_labels.setdefault(record_index, {})[place] = text

    def reorder_readings(self, record_indices: Ints, places: Ints, order: Ints) -> None:
        """Rearrange readings within their records.

        Args:
            record_indices: (M,) rows of the record table.
            places: (M,) places of the readings.
            order: (M,) index of the reading that belongs at each of these places, of the same record.
        """
        features, values = self.log.gather(record_indices, places)
        self.log.write(record_indices, places, features[order], values[order])
        moved = np.flatnonzero(order != np.arange(len(order)))
        text_by_target = {}
        for target, origin in zip(moved.tolist(), order[moved].tolist(), strict=True):
            text = self.unseen_labels.get(int(record_indices[origin]), {}).pop(int(places[origin]), None)
            if text is not None:
                text_by_target[target] = text
        for target, text in text_by_target.items():
            self.unseen_labels[int(record_indices[target])][int(places[target])] = text

    def restore_records(
        self,
        record_indices: Ints,
        *,
        last_accepted_at: Ints,
        num_readings: NDArray[np.int32],
        features: NDArray[np.int16],
        values: Floats,
        num_declared_missing: NDArray[np.int32],
        missing_features: NDArray[np.int16],
        running: Mapping[str, NDArray[Any]],
        alert_seq: NDArray[np.int32],
        alert_alpha: Floats,
    ) -> None:
        """Fill the rows of R initialized records from a snapshot.

        Args:
            record_indices: (R,) rows.
            last_accepted_at: (R,) time of the last accepted event, microseconds.
            num_readings: (R,) readings of each record.
            features: (T,) feature codes of the readings, one record after the other.
            values: (T,) raw values of the readings.
            num_declared_missing: (R,) features of each record that will not be observed.
            missing_features: (A,) their codes, one record after the other.
            running: (R,) arrays by field of `RUNNING_DTYPE`.
            alert_seq: (R,) place of the first alert, -1 if there is none.
            alert_alpha: (R,) strictest alpha of an alert, `NO_ALERT` if there is none.
        """
        self.last_accepted_at[record_indices] = last_accepted_at
        self.num_readings[record_indices] = num_readings
        self.num_declared_missing[record_indices] = num_declared_missing
        self.log.reserve(record_indices, np.zeros(len(record_indices), np.int64), num_readings.astype(np.int64))
        record, place = ragged_indices(num_readings)
        self.log.write(record_indices[record], place, features, values)
        if self.holds_ties:
            self.log.mark_tied(record_indices[record], place, np.zeros(len(record), np.bool_))
        is_known = np.zeros((len(record_indices), len(self.schema)), np.bool_)
        is_known[record, features] = True
        is_known[ragged_indices(num_declared_missing)[0], missing_features] = True
        self.observed_mask[record_indices] = np.packbits(is_known, axis=1, bitorder="little")
        for name in RUNNING_DTYPE.names or ():
            self.running[name][record_indices] = running[name]
        self.alert_seq[record_indices] = alert_seq
        self.alert_alpha[record_indices] = alert_alpha
        self._idle_queue.push(record_indices, last_accepted_at)

    def restore_ties(
        self, record_indices: Ints, is_tied: Bools, num_pending: NDArray[np.int32], tie_time: Ints
    ) -> None:
        """Fill the tie groups of R restored records.

        Args:
            record_indices: (R,) rows.
            is_tied: (T,) whether each reading belongs to the tie group of the one before it, record after record.
            num_pending: (R,) how many of the last readings wait for the decision of their tie group.
            tie_time: (R,) event time of the last tie group, microseconds.
        """
        record, place = ragged_indices(self.num_readings[record_indices])
        self.log.mark_tied(record_indices[record], place, is_tied)
        self.set_pending(record_indices, num_pending.astype(np.int64), tie_time)


def ingest(
    records: RecordTable, batch: EventBatch, now: int, model_version: int
) -> tuple[AcceptedReadings, list[Rejection]]:
    """Enter a batch of events into a record table.

    An event of an id that is neither open nor closed opens a record. An event is rejected if its record is closed, or
    if its record has the feature already. A batch without rejections and windows is entered by array operations;
    any other batch is entered event by event, with the same result.

    Args:
        records: The table.
        batch: Events in the order of arrival.
        now: Time of arrival, microseconds.
        model_version: Number of the model that scores the records that are opened.

    Returns:
        The accepted readings and the rejections.
    """
    if not len(batch):
        return AcceptedReadings.empty(), []
    owners = _open_owners(records, batch, model_version) if batch.windows is None else None
    if owners is None:
        return _ingest_sequential(records, batch, now, model_version)
    return _ingest_vectorized(records, batch, owners, now), []


def _open_owners(records: RecordTable, batch: EventBatch, model_version: int) -> Ints | None:
    """Return the record index of each of N events, (N,), and open the records that are new.

    If any event of the batch would be rejected, nothing is changed and None is returned.
    """
    num_features, capacity = len(records.schema), records.capacity
    ids, row = batch.records_of_rows()
    partitions = batch.partitions if batch.row_boundaries is None else batch.partitions[batch.row_boundaries[:-1]]
    partition_ids, indices = partitions.tolist(), list[int]()
    # Events of one partition mostly stand together, so look up each run of them in one mapping.
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
    owners = record_indices if batch.row_boundaries is None else record_indices[row]
    reading_keys = owners * num_features + batch.features
    reading_keys.sort()
    if (reading_keys[1:] == reading_keys[:-1]).any():
        return None  # the batch has a feature of a record twice
    is_old = owners < capacity if provisional_index else slice(None)
    byte, bit = _mask_bits(records, owners[is_old], batch.features[is_old])
    if (records.observed_mask.reshape(-1)[byte] & bit).any():
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


def _mask_bits(
    records: RecordTable, record_indices: Ints, features: NDArray[np.int32]
) -> tuple[Ints, NDArray[np.uint8]]:
    """Return where the flags of M features are in the flattened `observed_mask`: byte index and bit, each (M,)."""
    byte = record_indices * records.observed_mask.shape[1] + (features >> 3)
    return byte, np.left_shift(1, features & 7).astype(np.uint8)


def _ingest_vectorized(records: RecordTable, batch: EventBatch, owners: Ints, now: int) -> AcceptedReadings:
    """Enter N events, of which none is rejected, into the records `owners`, (N,)."""
    is_reading = ~np.isnan(batch.values)
    by_record = owners.argsort(kind="stable")
    boundaries, is_reading_by_record = run_boundaries(owners[by_record]), is_reading[by_record]
    begin, num_events = boundaries[:-1], boundaries[1:] - boundaries[:-1]
    touched = owners[by_record[begin]]
    num_before = records.num_readings[touched]
    seq = np.empty(len(owners), np.int64)
    readings_before = is_reading_by_record.cumsum() - is_reading_by_record
    seq[by_record] = readings_before + (num_before - readings_before[begin]).repeat(num_events)
    num_new = np.add.reduceat(is_reading_by_record, begin, dtype=np.int64)

    event_indices = is_reading.nonzero()[0]
    missing_indices = (~is_reading).nonzero()[0]
    accepted = AcceptedReadings(
        event_indices, owners[event_indices], seq[event_indices], {}, missing_indices, owners[missing_indices]
    )
    np.bitwise_or.at(records.observed_mask.reshape(-1), *_mask_bits(records, owners, batch.features))
    records.log.reserve(touched, num_before, num_before + num_new)
    records.log.write(accepted.record_indices, accepted.seq, batch.features[event_indices], batch.values[event_indices])
    for event, text in batch.unseen_labels.items():
        records.add_unseen_label(int(owners[event]), int(seq[event]), text)
    records.num_readings[touched] += num_new
    records.num_declared_missing[touched] += num_events - num_new
    records.touch(touched, now)

    complete = records.is_complete(touched).nonzero()[0]
    last_event = by_record[boundaries[complete + 1] - 1]
    closed = touched[complete[last_event.argsort()]]
    for record_index, partition_id in zip(closed.tolist(), records.partition_ids[closed].tolist(), strict=True):
        accepted.close_reasons[record_index] = CloseReason.COMPLETE
        records.partitions[partition_id].close(records.record_ids[record_index])
    records.is_open[closed] = False
    return accepted


def _ingest_sequential(
    records: RecordTable, batch: EventBatch, now: int, model_version: int
) -> tuple[AcceptedReadings, list[Rejection]]:
    """Enter events one by one, because some are rejected or belong to windows of a device's time."""
    event_indices: list[int] = []
    record_indices: list[int] = []
    seq: list[int] = []
    rejections: list[Rejection] = []
    close_reasons: dict[int, CloseReason] = {}
    new_counts: dict[int, int] = {}  # readings of the records that have accepted events
    num_awaited: dict[int, int] = {}  # features of these records that are still to come
    opened_by_event: dict[int, int] = {}  # record index to event index
    missing_events: list[int] = []  # events that declare a feature as missing
    missing_records: list[int] = []
    unseen_labels, windows, num_features = batch.unseen_labels, batch.windows, len(records.schema)
    features, is_missing = batch.features.tolist(), np.isnan(batch.values).tolist()
    mask, mask_width = records.observed_mask.reshape(-1).data, records.observed_mask.shape[1]
    current_id, partition = -1, Partition(0)
    index_by_id, closed_ids = partition.record_index_by_id, partition.closed_ids
    for i, (record_id, partition_id) in enumerate(zip(batch.record_ids, batch.partitions.tolist(), strict=True)):
        if partition_id != current_id:
            current_id, partition = partition_id, records.partition(partition_id)
            index_by_id, closed_ids = partition.record_index_by_id, partition.closed_ids
        if windows is not None and windows.devices[i]:
            deadline, time = int(windows.deadlines[i]), int(batch.times[i])
            is_late, ended = partition.advance_watermark(record_id, windows.devices[i], deadline, time)
            close_reasons |= dict.fromkeys(ended, CloseReason.WINDOW)
            if is_late:
                rejections.append(_reject(records, batch, i, RejectionReason.LATE))
                continue
        record_index = index_by_id.get(record_id)
        if record_index is None:
            if record_id in closed_ids:
                rejections.append(_reject(records, batch, i, RejectionReason.LATE))
                continue
            record_index = records.allocate(record_id, partition_id, partition)
            mask = records.observed_mask.reshape(-1).data  # the table may have grown
            opened_by_event[record_index], new_counts[record_index] = i, 0
            num_awaited[record_index] = num_features
        feature = features[i]
        byte, bit = record_index * mask_width + (feature >> 3), 1 << (feature & 7)
        if mask[byte] & bit:
            rejections.append(_reject(records, batch, i, RejectionReason.DUPLICATE))
            continue
        mask[byte] |= bit
        place = new_counts.get(record_index)
        if place is None:
            place = int(records.num_readings[record_index])
            num_awaited[record_index] = num_features - place - int(records.num_declared_missing[record_index])
        num_awaited[record_index] -= 1
        if is_missing[i]:
            missing_records.append(record_index)
            missing_events.append(i)
            new_counts[record_index] = place
        else:
            new_counts[record_index] = place + 1
            event_indices.append(i)
            record_indices.append(record_index)
            seq.append(place)
            if i in unseen_labels:
                records.add_unseen_label(record_index, place, unseen_labels[i])
        if not num_awaited[record_index]:
            close_reasons[record_index] = CloseReason.COMPLETE
            partition.close(record_id)

    opened = np.array(list(opened_by_event), np.int64)
    records.initialize(opened, batch.partitions[list(opened_by_event.values())], model_version)
    accepted = AcceptedReadings(
        np.array(event_indices, np.int64),
        np.array(record_indices, np.int64),
        np.array(seq, np.int64),
        close_reasons,
        np.array(missing_events, np.int64),
        np.array(missing_records, np.int64),
    )
    _store_accepted(records, batch, accepted, new_counts, now)
    return accepted, rejections


def _store_accepted(
    records: RecordTable, batch: EventBatch, accepted: AcceptedReadings, new_counts: dict[int, int], now: int
) -> None:
    """Store what `_ingest_sequential` has accepted in the arrays of the table.

    Args:
        records: The table, in which new records are initialized already.
        batch: The batch of events.
        accepted: The accepted readings, declared missing features and closed records of the batch.
        new_counts: By record index, the number of readings of each record that has accepted events.
        now: Time of arrival, microseconds.
    """
    touched = np.array(list(new_counts), np.int64)
    counts = np.array(list(new_counts.values()), np.int64)
    records.log.reserve(touched, records.num_readings[touched], counts)
    features, values = batch.features[accepted.event_indices], batch.values[accepted.event_indices]
    records.log.write(accepted.record_indices, accepted.seq, features, values)
    np.add.at(records.num_declared_missing, accepted.missing_record_indices, 1)
    records.num_readings[touched] = counts
    records.touch(touched, now)
    records.is_open[list(accepted.close_reasons)] = False


def _reject(records: RecordTable, batch: EventBatch, event_index: int, reason: RejectionReason) -> Rejection:
    """Return the rejection of an event that is late or a duplicate, with a sentence about the cause."""
    feature = records.schema.names[batch.features[event_index]]
    cause = "its record is closed" if reason is RejectionReason.LATE else "the record has this feature already"
    record_id = batch.record_ids[event_index]
    if len(record_id) > MAX_ID_LENGTH_IN_DETAIL:
        record_id = record_id[:MAX_ID_LENGTH_IN_DETAIL] + "…"
    detail = f"record {record_id!r}, feature {feature!r}: {cause}"
    return Rejection(int(batch.message_indices[event_index]), reason, detail)
