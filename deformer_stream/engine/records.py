"""What the log of one partition tells: which of its records are open, which were closed, how far its devices are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deformer_stream.engine.events import NO_ALERT, NO_TIME, AlertState, ClosedRecords, CloseReason, EventBatch, RejectionReason, Rejection
from deformer_stream.engine.id_set import BoundedIdSet
from deformer_stream.engine.watermarks import Watermarks
from deformer_stream.model.schema import Schema
from deformer_stream.ragged import run_boundaries

MAX_CLOSED_IDS = 200_000
"""Ids of closed records that are remembered per partition, so that their late events are refused rather than opening
them anew; and devices whose watermarks are."""


class Partition:
    """One partition of the input. Whatever is in here follows from the partition's own log and decisions, in order;
    what other partitions do plays no part, so it can be rebuilt from them.

    slot_of: open records, in the order of their opening. closed: remembered ids.
    """

    def __init__(self, remembered: int = MAX_CLOSED_IDS) -> None:
        self.record_index_by_id: dict[str, int] = {}
        self.closed_ids = BoundedIdSet(remembered)
        self.watermarks = Watermarks(remembered)

    def advance_watermark(self, record: str, device: str, deadline: int, time: int) -> tuple[bool, list[int]]:
        """An event of a window moves its device's watermark: whether the event is late, and the slots of the windows
        that are over now, whose ids are closed."""
        mark, over = self.watermarks.advance(device, time)
        ended = [self.close(name) for name in over]
        late = deadline <= mark or (record not in self.record_index_by_id and record in self.closed_ids)
        if not late:
            self.watermarks.open_window(device, record, deadline)
        return late, [slot for slot in ended if slot is not None]

    def close(self, record: str) -> int | None:
        """From now on the id is closed; its slot, if it was open."""
        slot = self.record_index_by_id.pop(record, None)
        self.watermarks.close_window(record)
        if slot is not None or record not in self.closed_ids:
            self.closed_ids.add(record)
        return slot


# Open records: id → slot, the log of accepted readings, duplicates, completion and time-outs.
#
# A record's state of truth is its log, the readings accepted so far. Everything here is bookkeeping in arrays indexed by
# slot; the time of day is passed in. Ids belong to a partition: the same id in two partitions is two records.


_SUMS = "total", "least", "peak", "log_likelihood", "excess", "p_value"
RUNNING_DTYPE = np.dtype([("scored", np.int64), *((name, np.float64) for name in _SUMS)])
"""What a record carries from reading to reading: the parts of `PrefixState`; beside them the sums of ln p and of the
excess of the surprisals, and the p-value. Compiled code knows it, too (`kernels.build/statistics.c`)."""
INITIAL_RUNNING = np.array((0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0), RUNNING_DTYPE)
"""Before the first reading."""

MISROUTED_CHECK_INTERVAL = 17
"""Every so many openings it is looked whether the id is open in another partition; a prime, so that no regular input
keeps step with it."""


class RecordTable:
    """The open records of one consumer, by partition.

    remembered: closed ids and devices' watermarks known per partition. misrouted: openings of an id that was open in
    another partition too, of those that were looked at; an example is id, partition, other partition. ties: readings of
    one time wait for each other (`engine.ties`); late_ties: blocks that began when their instant was over.
    """

    def __init__(self, schema: Schema, remembered: int = MAX_CLOSED_IDS, ties: bool = False) -> None:
        self.schema = schema
        self.max_closed_ids = remembered
        self.partitions: dict[int, Partition] = {}
        self.num_opened = 0
        self.num_misrouted = 0
        self.misrouted_example: tuple[str, int, int] | None = None
        self.holds_ties, self.num_late_ties = ties, 0
        self.record_ids: list[str] = []
        self.free_indices: list[int] = []
        self.unseen_labels: dict[int, dict[int, str]] = {}  # slot → place → text of a label the model does not know
        self._columns: dict[str, NDArray[Any]] = {}
        n = len(schema)
        self.is_open = self._column("is_open", np.zeros(0, bool))
        self.partition_ids = self._column("partition_ids", np.zeros(0, np.int32))
        self.open_order = self._column("open_order", np.zeros(0, np.int64))
        self.model_version = self._column("model_version", np.zeros(0, np.int64))
        self.last_accepted_at = self._column("last_accepted_at", np.zeros(0, np.int64))
        self.num_readings = self._column("num_readings", np.zeros(0, np.int64))
        self.num_declared_missing = self._column("num_declared_missing", np.zeros(0, np.int64))
        # Bit f, the least significant of a byte first, is set when feature f was observed or declared as never coming.
        self.observed_mask = self._column("observed_mask", np.zeros((0, -(-n // 8)), np.uint8))
        self.log_feature = self._column("log_feature", np.zeros((0, n), np.int16))
        self.log_value = self._column("log_value", np.zeros((0, n)))
        # The reading belongs to the block of the one before it. Of the last ones so many are not judged yet, with time:
        self.log_tied = self._column("log_tied", np.zeros((0, n if ties else 0), bool))
        self.num_pending = self._column("num_pending", np.zeros(0, np.int64))
        self.tie_time = self._column("tie_time", np.zeros(0, np.int64))
        self.running = self._column("running", np.zeros(0, RUNNING_DTYPE))
        self.alert_seq = self._column("alert_seq", np.zeros(0, np.int32))
        self.alert_alpha = self._column("alert_alpha", np.zeros(0))

    def _column(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        self._columns[name] = array
        return array

    def __len__(self) -> int:
        return sum(len(partition.record_index_by_id) for partition in self.partitions.values())

    @property
    def capacity(self) -> int:
        """Slots that exist, open or free."""
        return len(self.record_ids)

    def partition(self, source: int) -> Partition:
        partition = self.partitions.get(source)
        if partition is None:
            partition = self.partitions[source] = Partition(self.max_closed_ids)
        return partition

    def _grow(self) -> None:
        """Double the slots; every array gets rows of zeros."""
        old = self.capacity
        new = max(64, 2 * old)
        for name, array in self._columns.items():
            bigger = np.zeros((new, *array.shape[1:]), array.dtype)
            bigger[:old] = array
            self._columns[name] = bigger
            setattr(self, name, bigger)
        self.record_ids.extend([""] * (new - old))
        self.free_indices.extend(range(new - 1, old - 1, -1))

    def allocate(self, record: str, source: int, partition: Partition) -> int:
        """A slot for a new record, in which no feature is settled; its other arrays are as they were until `begin`."""
        if not self.free_indices:
            self._grow()
        slot = self.free_indices.pop()
        self.record_ids[slot] = record
        partition.record_index_by_id[record] = slot
        self.num_opened += 1
        if self.num_opened % MISROUTED_CHECK_INTERVAL == 0 and len(self.partitions) > 1:
            self._look_for(record, source)
        return slot

    def _look_for(self, record: str, source: int) -> None:
        """A record that is open in two partitions is fed by a producer that does not key its readings by record."""
        for other, partition in self.partitions.items():
            if other != source and record in partition.record_index_by_id:
                self.num_misrouted += 1
                self.misrouted_example = record, source, other
                return

    def initialize(self, slots: NDArray[np.int64], sources: NDArray[np.int32], generation: int | NDArray[np.int64]) -> None:
        """These slots, taken in this order, hold records without a reading."""
        self.is_open[slots] = True
        self.partition_ids[slots] = sources
        self.open_order[slots] = np.arange(self.num_opened - len(slots), self.num_opened)
        self.model_version[slots] = generation
        self.num_readings[slots] = 0
        self.num_declared_missing[slots] = 0
        self.alert_seq[slots], self.alert_alpha[slots] = -1, NO_ALERT
        self.num_pending[slots], self.tie_time[slots] = 0, NO_TIME
        self.reset_scores(slots)

    def reset_scores(self, slots: NDArray[np.int64]) -> None:
        """The running numbers of these records are those before their first reading."""
        self.running[slots] = INITIAL_RUNNING

    def ingest(self, batch: EventBatch, now: int, generation: int = 0) -> tuple[AcceptedReadings, list[Rejection]]:
        """Enter a batch into the logs; what is a duplicate or late is refused. now: microseconds. generation: of the
        records that open."""
        return ingest(self, batch, now, generation)

    def mark_alerted(self, slot: int, told: AlertState) -> None:
        """An earlier life has raised these alerts of a record."""
        if self.alert_seq[slot] < 0:
            self.alert_seq[slot] = told.seq
        self.alert_alpha[slot] = min(self.alert_alpha[slot], told.alpha)

    def gather_readings(
        self, slots: NDArray[np.int64], places: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Feature codes and raw values at these places (R, L) of R records, each (R, L)."""
        rows = slots[:, None]
        return self.log_feature[rows, places].astype(np.int64), self.log_value[rows, places]

    def readings_of(self, slot: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Feature codes and raw values of one record, each (L,), that stay when the slot goes to another."""
        n = int(self.num_readings[slot])
        return self.log_feature[slot, :n].astype(np.int64), self.log_value[slot, :n].copy()

    def indices_of_partitions(self, sources: Iterable[int] | None = None) -> list[int]:
        """Open slots of these partitions, or of all, in the order of their opening within each."""
        mine = self.is_open if sources is None else self.is_open & np.isin(self.partition_ids, list(sources))
        slots: list[int] = self._ordered(np.flatnonzero(mine)).tolist()
        return slots

    def reading_counts(self, slots: Iterable[int]) -> dict[int, dict[str, int]]:
        """By partition, ids and numbers of readings of these records."""
        counts: dict[int, dict[str, int]] = {}
        for slot in slots:
            counts.setdefault(int(self.partition_ids[slot]), {})[self.record_ids[slot]] = int(self.num_readings[slot])
        return counts

    def _ordered(self, slots: NDArray[np.int64], *first_by: NDArray[np.int64]) -> NDArray[np.int64]:
        """Open slots in an order that does not depend on which slots records happen to have."""
        return slots[np.lexsort((self.open_order[slots], self.partition_ids[slots], *first_by))]

    def select_idle(self, before: int, holding: Collection[int] = (), waiting: bool = False) -> tuple[list[int], int | None]:
        """Slots of open records whose last accepted event is at or before this time (microseconds), the longest silent
        first, but those of partitions held; and the earliest last event among the others. waiting: only of records in
        which readings wait for others of their time."""
        slots = np.flatnonzero(self.is_open & (self.num_pending > 0) if waiting else self.is_open)
        over = (self.last_accepted_at[slots] <= before) & ~np.isin(self.partition_ids[slots], list(holding))
        rest, slots = self.last_accepted_at[slots[~over]], slots[over]
        return self._ordered(slots, self.last_accepted_at[slots]).tolist(), int(rest.min()) if len(rest) else None

    def select_longest_idle(self, excess: int, holding: Collection[int] = ()) -> list[int]:
        """The `excess` open slots that have been silent for longest, but those of partitions held."""
        slots = np.flatnonzero(self.is_open & ~np.isin(self.partition_ids, list(holding)))
        chosen: list[int] = self._ordered(slots, self.last_accepted_at[slots])[:excess].tolist()
        return chosen

    def close(self, slots: Sequence[int], reason: CloseReason | Sequence[CloseReason]) -> ClosedRecords:
        """End these records, for one reason or each for its own; their ids are remembered. The slots' arrays stay
        readable until `release`."""
        reasons = [reason] * len(slots) if isinstance(reason, CloseReason) else list(reason)
        index = np.array(slots, np.int64)
        ids = [self.record_ids[slot] for slot in slots]
        for slot, record, source in zip(slots, ids, self.partition_ids[index].tolist(), strict=True):
            partition = self.partitions[source]
            if partition.record_index_by_id.get(record) == slot:  # else its id was closed when it ended
                partition.close(record)
        self.is_open[index] = False
        return ClosedRecords(
            ids,
            reasons,
            self.partition_ids[index],
            self.num_readings[index].astype(np.int32),
            self.is_complete(index),
            self.running["log_likelihood"][index],
            self.running["excess"][index],
            self.running["p_value"][index],
            self.alert_seq[index],
            self.alert_alpha[index],
            self.running["peak"][index],
        )

    def is_complete(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these records await nothing more."""
        complete: NDArray[np.bool_] = self.num_readings[slots] + self.num_declared_missing[slots] == len(self.schema)
        return complete

    def close_ids(self, source: int, records: Iterable[str]) -> list[int]:
        """These ids are closed, whether their records are open or not; the slots of those that were."""
        partition = self.partition(source)
        slots = [slot for record in records if (slot := partition.close(record)) is not None]
        self.is_open[slots] = False
        return slots

    def drop_partitions(self, sources: Iterable[int]) -> None:
        """These partitions, without an open record, are unknown from now on: closed ids and watermarks, too."""
        for source in sources:
            self.partitions.pop(source, None)

    def empty_copy(self, schema: Schema, ties: bool) -> RecordTable:
        """Nothing but what was found out about the input."""
        records = RecordTable(schema, self.max_closed_ids, ties)
        records.num_misrouted, records.misrouted_example = self.num_misrouted, self.misrouted_example
        records.num_late_ties = self.num_late_ties
        return records

    def release(self, slots: Collection[int]) -> None:
        """Give closed slots to new records."""
        self.observed_mask[list(slots)] = 0
        self.free_indices.extend(slots)
        if self.unseen_labels:
            for slot in slots:
                self.unseen_labels.pop(slot, None)


# What a batch brings to open records: all at once where nothing is refused, else one event after the other.


Ints = NDArray[np.int64]

LONGEST_SHOWN = 100
"""Characters of an id in the detail of a refusal."""


@dataclass(frozen=True, slots=True)
class AcceptedReadings:
    """M readings accepted from one batch, in order: index into the batch, slot, place in the record from 0.

    ended: slots of records that await nothing more or whose window is over, in order, and which of the two; their ids
    are closed already, their arrays readable until `release`.
    """

    event_indices: Ints
    record_indices: Ints
    seq: Ints
    close_reasons: dict[int, CloseReason]

    @staticmethod
    def empty() -> AcceptedReadings:
        nothing = np.empty(0, np.int64)
        return AcceptedReadings(nothing, nothing, nothing, {})


def ingest(
    records: RecordTable, batch: EventBatch, now: int, generation: int
) -> tuple[AcceptedReadings, list[Rejection]]:
    """See `Records.accept`."""
    if not len(batch):
        return AcceptedReadings.empty(), []
    found = None if batch.windows is not None else _owners(records, batch, generation)
    if found is not None:
        return _ingest_vectorized(records, batch, found, now), []
    return _ingest_sequential(records, batch, now, generation)


def _owners(records: RecordTable, batch: EventBatch, generation: int) -> Ints | None:
    """(N,) the slots of the events' records, which are open by then; None, and nothing is done, where an event would be
    refused."""
    n, capacity = len(records.schema), records.capacity
    ids, row = batch.records_of_rows()
    origin = batch.partitions if batch.row_boundaries is None else batch.partitions[batch.row_boundaries[:-1]]
    sources, found = origin.tolist(), list[int]()
    for begin, end in pairwise(run_boundaries(origin).tolist()):  # what comes of one partition stands together, mostly
        found += map(records.partition(sources[begin]).record_index_by_id.get, ids[begin:end], repeat(-1))
    slots = np.array(found, np.int64)
    new: dict[tuple[int, str], int] = {}  # beyond all slots until it is known that they are needed
    for i in (slots < 0).nonzero()[0].tolist():
        source, record = sources[i], ids[i]
        opens = new.get((source, record))
        if opens is None:
            if record in records.partitions[source].closed_ids:
                return None
            opens = new[source, record] = capacity + len(new)
        slots[i] = opens
    owner = slots if batch.row_boundaries is None else slots[row]
    reading = owner * n + batch.features
    reading.sort()
    if (reading[1:] == reading[:-1]).any():
        return None
    open_ = owner < capacity if new else slice(None)
    byte, bit = _bits(records, owner[open_], batch.features[open_])
    if (records.observed_mask.reshape(-1)[byte] & bit).any():
        return None
    if new:
        taken = np.array([records.allocate(record, source, records.partitions[source]) for source, record in new], np.int64)
        records.initialize(taken, np.array([source for source, _ in new], np.int32), generation)
        opening = owner >= capacity
        owner[opening] = taken[owner[opening] - capacity]
    return owner


def _bits(records: RecordTable, slots: Ints, codes: NDArray[np.int32]) -> tuple[Ints, NDArray[np.uint8]]:
    """Which byte of `Records.settled` says of features whether they are, and by which bit."""
    return slots * records.observed_mask.shape[1] + (codes >> 3), np.left_shift(1, codes & 7).astype(np.uint8)


def _ingest_vectorized(records: RecordTable, batch: EventBatch, owner: Ints, now: int) -> AcceptedReadings:
    """Enter events into the logs of their records' slots, (N,)."""
    known = ~np.isnan(batch.values)
    order = owner.argsort(kind="stable")
    edges, there = run_boundaries(owner[order]), known[order]
    begin, size = edges[:-1], edges[1:] - edges[:-1]
    touched = owner[order[begin]]
    place = np.empty(len(owner), np.int64)
    before = there.cumsum() - there
    place[order] = before + (records.num_readings[touched] - before[begin]).repeat(size)
    events = known.nonzero()[0]
    accepted = AcceptedReadings(events, owner[events], place[events], {})
    np.bitwise_or.at(records.observed_mask.reshape(-1), *_bits(records, owner, batch.features))
    records.log_feature[accepted.record_indices, accepted.seq] = batch.features[events]
    records.log_value[accepted.record_indices, accepted.seq] = batch.values[events]
    for event, text in batch.unseen_labels.items():
        records.unseen_labels.setdefault(int(owner[event]), {})[int(place[event])] = text
    came = np.add.reduceat(there, begin, dtype=np.int64)
    records.num_readings[touched] += came
    records.num_declared_missing[touched] += size - came
    records.last_accepted_at[touched] = now
    whole = records.is_complete(touched).nonzero()[0]
    whole = whole[order[edges[whole + 1] - 1].argsort()]  # in the order of their last events
    done = touched[whole]
    for slot, source in zip(done.tolist(), records.partition_ids[done].tolist(), strict=True):
        accepted.close_reasons[slot] = CloseReason.COMPLETE
        records.partitions[source].close(records.record_ids[slot])
    records.is_open[done] = False
    return accepted


def _ingest_sequential(
    records: RecordTable, batch: EventBatch, now: int, generation: int
) -> tuple[AcceptedReadings, list[Rejection]]:
    events: list[int] = []
    slots: list[int] = []
    seq: list[int] = []
    rejected: list[Rejection] = []
    ended: dict[int, CloseReason] = {}
    counts: dict[int, int] = {}  # slots with an accepted event → readings
    left: dict[int, int] = {}  # and how many features they wait for
    opened: dict[int, int] = {}  # slot → event
    absent: list[int] = []
    unseen, windowed, n = batch.unseen_labels, batch.windows, len(records.schema)
    codes, missing = batch.features.tolist(), np.isnan(batch.values).tolist()
    settled, width = records.observed_mask.reshape(-1).data, records.observed_mask.shape[1]
    source, partition = -1, Partition(0)
    slot_of, closed = partition.record_index_by_id, partition.closed_ids
    for i, (record, origin) in enumerate(zip(batch.record_ids, batch.partitions.tolist(), strict=True)):
        if origin != source:
            source, partition = origin, records.partition(origin)
            slot_of, closed = partition.record_index_by_id, partition.closed_ids
        if windowed is not None and windowed.devices[i]:
            deadline, time = int(windowed.deadlines[i]), int(batch.times[i])
            late, over = partition.advance_watermark(record, windowed.devices[i], deadline, time)
            ended |= dict.fromkeys(over, CloseReason.WINDOW)
            if late:
                rejected.append(_refused(records, batch, i, RejectionReason.LATE))
                continue
        slot = slot_of.get(record)
        if slot is None:
            if record in closed:
                rejected.append(_refused(records, batch, i, RejectionReason.LATE))
                continue
            slot = records.allocate(record, source, partition)
            settled = records.observed_mask.reshape(-1).data  # there may be more slots now
            opened[slot], counts[slot], left[slot] = i, 0, n
        code = codes[i]
        byte, bit = slot * width + (code >> 3), 1 << (code & 7)
        if settled[byte] & bit:
            rejected.append(_refused(records, batch, i, RejectionReason.DUPLICATE))
            continue
        settled[byte] |= bit
        place = counts.get(slot)
        if place is None:
            place = int(records.num_readings[slot])
            left[slot] = n - place - int(records.num_declared_missing[slot])
        left[slot] -= 1
        if missing[i]:
            absent.append(slot)
            counts[slot] = place
        else:
            counts[slot] = place + 1
            events.append(i)
            slots.append(slot)
            seq.append(place)
            if i in unseen:
                records.unseen_labels.setdefault(slot, {})[place] = unseen[i]
        if not left[slot]:
            ended[slot] = CloseReason.COMPLETE
            partition.close(record)
    records.initialize(np.array(list(opened), np.int64), batch.partitions[list(opened.values())], generation)
    accepted = AcceptedReadings(np.array(events, np.int64), np.array(slots, np.int64), np.array(seq, np.int64), ended)
    records.log_feature[accepted.record_indices, accepted.seq] = batch.features[accepted.event_indices]
    records.log_value[accepted.record_indices, accepted.seq] = batch.values[accepted.event_indices]
    np.add.at(records.num_declared_missing, absent, 1)
    touched = list(counts)
    records.num_readings[touched] = list(counts.values())
    records.last_accepted_at[touched] = now
    records.is_open[list(ended)] = False
    return accepted, rejected


def _refused(records: RecordTable, batch: EventBatch, i: int, reason: RejectionReason) -> Rejection:
    name = records.schema.names[batch.features[i]]
    why = "its record is closed" if reason is RejectionReason.LATE else "the record has this feature already"
    record = batch.record_ids[i] if len(batch.record_ids[i]) <= LONGEST_SHOWN else batch.record_ids[i][:LONGEST_SHOWN] + "…"
    return Rejection(int(batch.message_indices[i]), reason, f"record {record!r}, feature {name!r}: {why}")
