"""What a batch brings to open records: all at once where nothing is refused, else one event after the other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deformer_stream.core.batch import Closing, EventBatch, Reason, Rejected
from deformer_stream.core.partition import Partition
from deformer_stream.core.snapshot import runs

if TYPE_CHECKING:
    from deformer_stream.core.records import Records

Ints = NDArray[np.int64]

LONGEST_SHOWN = 100
"""Characters of an id in the detail of a refusal."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """M readings accepted from one batch, in order: index into the batch, slot, place in the record from 0.

    ended: slots of records that await nothing more or whose window is over, in order, and which of the two; their ids
    are closed already, their arrays readable until `release`.
    """

    events: Ints
    slots: Ints
    seq: Ints
    ended: dict[int, Closing]

    @staticmethod
    def none() -> Accepted:
        nothing = np.empty(0, np.int64)
        return Accepted(nothing, nothing, nothing, {})


def enter(records: Records, batch: EventBatch, now: int, generation: int) -> tuple[Accepted, list[Rejected]]:
    """See `Records.accept`."""
    if not len(batch):
        return Accepted.none(), []
    found = None if batch.windowed is not None else _owners(records, batch, generation)
    if found is not None:
        return _together(records, batch, found, now), []
    return _one_by_one(records, batch, now, generation)


def _owners(records: Records, batch: EventBatch, generation: int) -> Ints | None:
    """(N,) the slots of the events' records, which are open by then; None, and nothing is done, where an event would be
    refused."""
    n, capacity = len(records.schema), records.capacity
    ids, row = batch.names()
    origin = batch.sources if batch.rows is None else batch.sources[batch.rows[:-1]]
    sources, found = origin.tolist(), list[int]()
    for begin, end in pairwise(runs(origin).tolist()):  # what comes of one partition stands together, mostly
        found += map(records.partition(sources[begin]).slot_of.get, ids[begin:end], repeat(-1))
    slots = np.array(found, np.int64)
    new: dict[tuple[int, str], int] = {}  # beyond all slots until it is known that they are needed
    for i in (slots < 0).nonzero()[0].tolist():
        source, record = sources[i], ids[i]
        opens = new.get((source, record))
        if opens is None:
            if record in records.partitions[source].closed:
                return None
            opens = new[source, record] = capacity + len(new)
        slots[i] = opens
    owner = slots if batch.rows is None else slots[row]
    reading = owner * n + batch.features
    reading.sort()
    if (reading[1:] == reading[:-1]).any():
        return None
    open_ = owner < capacity if new else slice(None)
    byte, bit = _bits(records, owner[open_], batch.features[open_])
    if (records.settled.reshape(-1)[byte] & bit).any():
        return None
    if new:
        taken = np.array([records.take(record, source, records.partitions[source]) for source, record in new], np.int64)
        records.begin(taken, np.array([source for source, _ in new], np.int32), generation)
        opening = owner >= capacity
        owner[opening] = taken[owner[opening] - capacity]
    return owner


def _bits(records: Records, slots: Ints, codes: NDArray[np.int32]) -> tuple[Ints, NDArray[np.uint8]]:
    """Which byte of `Records.settled` says of features whether they are, and by which bit."""
    return slots * records.settled.shape[1] + (codes >> 3), np.left_shift(1, codes & 7).astype(np.uint8)


def _together(records: Records, batch: EventBatch, owner: Ints, now: int) -> Accepted:
    """Enter events into the logs of their records' slots, (N,)."""
    known = ~np.isnan(batch.values)
    order = owner.argsort(kind="stable")
    edges, there = runs(owner[order]), known[order]
    begin, size = edges[:-1], edges[1:] - edges[:-1]
    touched = owner[order[begin]]
    place = np.empty(len(owner), np.int64)
    before = there.cumsum() - there
    place[order] = before + (records.count[touched] - before[begin]).repeat(size)
    events = known.nonzero()[0]
    accepted = Accepted(events, owner[events], place[events], {})
    np.bitwise_or.at(records.settled.reshape(-1), *_bits(records, owner, batch.features))
    records.log_feature[accepted.slots, accepted.seq] = batch.features[events]
    records.log_value[accepted.slots, accepted.seq] = batch.values[events]
    for event, text in batch.unseen.items():
        records.unseen.setdefault(int(owner[event]), {})[int(place[event])] = text
    came = np.add.reduceat(there, begin, dtype=np.int64)
    records.count[touched] += came
    records.absent[touched] += size - came
    records.last[touched] = now
    whole = records.whole(touched).nonzero()[0]
    whole = whole[order[edges[whole + 1] - 1].argsort()]  # in the order of their last events
    done = touched[whole]
    for slot, source in zip(done.tolist(), records.source[done].tolist(), strict=True):
        accepted.ended[slot] = Closing.COMPLETE
        records.partitions[source].close(records.ids[slot])
    records.is_open[done] = False
    return accepted


def _one_by_one(records: Records, batch: EventBatch, now: int, generation: int) -> tuple[Accepted, list[Rejected]]:
    events: list[int] = []
    slots: list[int] = []
    seq: list[int] = []
    rejected: list[Rejected] = []
    ended: dict[int, Closing] = {}
    counts: dict[int, int] = {}  # slots with an accepted event → readings
    left: dict[int, int] = {}  # and how many features they wait for
    opened: dict[int, int] = {}  # slot → event
    absent: list[int] = []
    unseen, windowed, n = batch.unseen, batch.windowed, len(records.schema)
    codes, missing = batch.features.tolist(), np.isnan(batch.values).tolist()
    settled, width = records.settled.reshape(-1).data, records.settled.shape[1]
    source, partition = -1, Partition(0)
    slot_of, closed = partition.slot_of, partition.closed
    for i, (record, origin) in enumerate(zip(batch.records, batch.sources.tolist(), strict=True)):
        if origin != source:
            source, partition = origin, records.partition(origin)
            slot_of, closed = partition.slot_of, partition.closed
        if windowed is not None and windowed.devices[i]:
            deadline, time = int(windowed.deadlines[i]), int(batch.times[i])
            late, over = partition.arrive(record, windowed.devices[i], deadline, time)
            ended |= dict.fromkeys(over, Closing.WINDOW)
            if late:
                rejected.append(_refused(records, batch, i, Reason.LATE))
                continue
        slot = slot_of.get(record)
        if slot is None:
            if record in closed:
                rejected.append(_refused(records, batch, i, Reason.LATE))
                continue
            slot = records.take(record, source, partition)
            settled = records.settled.reshape(-1).data  # there may be more slots now
            opened[slot], counts[slot], left[slot] = i, 0, n
        code = codes[i]
        byte, bit = slot * width + (code >> 3), 1 << (code & 7)
        if settled[byte] & bit:
            rejected.append(_refused(records, batch, i, Reason.DUPLICATE))
            continue
        settled[byte] |= bit
        place = counts.get(slot)
        if place is None:
            place = int(records.count[slot])
            left[slot] = n - place - int(records.absent[slot])
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
                records.unseen.setdefault(slot, {})[place] = unseen[i]
        if not left[slot]:
            ended[slot] = Closing.COMPLETE
            partition.close(record)
    records.begin(np.array(list(opened), np.int64), batch.sources[list(opened.values())], generation)
    accepted = Accepted(np.array(events, np.int64), np.array(slots, np.int64), np.array(seq, np.int64), ended)
    records.log_feature[accepted.slots, accepted.seq] = batch.features[accepted.events]
    records.log_value[accepted.slots, accepted.seq] = batch.values[accepted.events]
    np.add.at(records.absent, absent, 1)
    touched = list(counts)
    records.count[touched] = list(counts.values())
    records.last[touched] = now
    records.is_open[list(ended)] = False
    return accepted, rejected


def _refused(records: Records, batch: EventBatch, i: int, reason: Reason) -> Rejected:
    name = records.schema.names[batch.features[i]]
    why = "its record is closed" if reason is Reason.LATE else "the record has this feature already"
    record = batch.records[i] if len(batch.records[i]) <= LONGEST_SHOWN else batch.records[i][:LONGEST_SHOWN] + "…"
    return Rejected(int(batch.messages[i]), reason, f"record {record!r}, feature {name!r}: {why}")
