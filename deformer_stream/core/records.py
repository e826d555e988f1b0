"""Open records: id → slot, the log of accepted readings, duplicates, completion and time-outs.

A record's state of truth is its log, the readings accepted so far. Everything here is bookkeeping in arrays indexed by
slot; the time of day is passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deformer_stream.core.batch import Closed, Closing, EventBatch, Reason, Rejected, Windowed
from deformer_stream.core.conformal import PrefixState
from deformer_stream.core.schema import Schema
from deformer_stream.core.windows import Watermarks

REMEMBERED = 200_000
"""Ids of closed records that are remembered, so that their late events are refused rather than opening them anew; and
of devices whose watermarks are."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """M readings accepted from one batch, in order: index into the batch, slot, place in the record from 0.

    ended: slots of records that await nothing more or whose window is over, in order, and which of the two; their ids
    are closed already, their arrays readable until `release`.
    """

    events: NDArray[np.int64]
    slots: NDArray[np.int64]
    seq: NDArray[np.int64]
    ended: dict[int, Closing]


class Records:
    """The open records of one consumer."""

    def __init__(self, schema: Schema, remembered: int = REMEMBERED) -> None:
        self.schema = schema
        self.everything = (1 << len(schema)) - 1
        self.remembered = remembered
        self.slot_of: dict[str, int] = {}
        self.closed_ids: OrderedDict[str, None] = OrderedDict()
        self.watermarks = Watermarks(remembered)
        self.ids: list[str] = []
        self.settled: list[int] = []  # bit f is set when feature f was observed or declared as never coming
        self.free: list[int] = []
        self._columns: dict[str, NDArray[Any]] = {}
        n = len(schema)
        self.is_open = self._column("is_open", np.zeros(0, bool))
        self.count = self._column("count", np.zeros(0, np.int64))
        self.absent = self._column("absent", np.zeros(0, np.int64))
        self.source = self._column("source", np.zeros(0, np.int32))
        self.last = self._column("last", np.zeros(0, np.int64))
        self.log_feature = self._column("log_feature", np.zeros((0, n), np.int16))
        self.log_value = self._column("log_value", np.zeros((0, n)))
        self.log_likelihood = self._column("log_likelihood", np.zeros(0))
        self.scored = self._column("scored", np.zeros(0, np.int64))
        self.total = self._column("total", np.zeros(0))
        self.least = self._column("least", np.zeros(0))
        self.peak = self._column("peak", np.zeros(0))
        self.excess = self._column("excess", np.zeros(0))
        self.p_value = self._column("p_value", np.zeros(0))
        self.alert_seq = self._column("alert_seq", np.zeros(0, np.int32))
        self.unseen: dict[int, dict[int, str]] = {}

    def _column(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        self._columns[name] = array
        return array

    def __len__(self) -> int:
        return len(self.slot_of)

    @property
    def capacity(self) -> int:
        """Slots that exist, open or free."""
        return len(self.ids)

    def _grow(self) -> None:
        """Double the slots; every array gets rows of zeros."""
        old = self.capacity
        new = max(64, 2 * old)
        for name, array in self._columns.items():
            bigger = np.zeros((new, *array.shape[1:]), array.dtype)
            bigger[:old] = array
            self._columns[name] = bigger
            setattr(self, name, bigger)
        self.ids.extend([""] * (new - old))
        self.settled.extend([0] * (new - old))
        self.free.extend(range(new - 1, old - 1, -1))

    def _open(self, record: str, source: int) -> int:
        if not self.free:
            self._grow()
        slot = self.free.pop()
        self.slot_of[record] = slot
        self.is_open[slot] = True
        self.ids[slot] = record
        self.settled[slot] = 0
        sums = (self.log_likelihood, self.excess, self.total, self.least, self.peak)
        for array in (self.count, self.absent, self.scored, *sums):
            array[slot] = 0
        self.p_value[slot] = 1.0
        self.alert_seq[slot] = -1
        self.source[slot] = source
        return slot

    def accept(self, batch: EventBatch, now: int) -> tuple[Accepted, list[Rejected]]:
        """Enter a batch into the logs; what is a duplicate or late is refused. now: microseconds."""
        events: list[int] = []
        slots: list[int] = []
        seq: list[int] = []
        rejected: list[Rejected] = []
        ended: dict[int, Closing] = {}
        touched: set[int] = set()
        counts: dict[int, int] = {}
        slot_of, settled, everything = self.slot_of, self.settled, self.everything
        codes, absent = batch.features.tolist(), np.isnan(batch.values).tolist()
        windowed = batch.windowed
        for i, record in enumerate(batch.records):
            if windowed is not None and windowed.devices[i] and self._is_late(batch, windowed, i, ended):
                rejected.append(self._refuse(batch, i, Reason.LATE))
                continue
            slot = slot_of.get(record)
            if slot is None:
                if record in self.closed_ids:
                    rejected.append(self._refuse(batch, i, Reason.LATE))
                    continue
                slot = self._open(record, int(batch.sources[i]))
            code = codes[i]
            bit = 1 << code
            if settled[slot] & bit:
                rejected.append(self._refuse(batch, i, Reason.DUPLICATE))
                continue
            settled[slot] |= bit
            touched.add(slot)
            if absent[i]:
                self.absent[slot] += 1
            else:
                place = counts.get(slot)
                place = int(self.count[slot]) if place is None else place
                counts[slot] = place + 1
                events.append(i)
                slots.append(slot)
                seq.append(place)
                if i in batch.unseen:
                    self.unseen.setdefault(slot, {})[place] = batch.unseen[i]
            if settled[slot] == everything:
                ended[slot] = Closing.COMPLETE
                self._remember(record)
        accepted = Accepted(np.array(events, np.int64), np.array(slots, np.int64), np.array(seq, np.int64), ended)
        self.log_feature[accepted.slots, accepted.seq] = batch.features[accepted.events]
        self.log_value[accepted.slots, accepted.seq] = batch.values[accepted.events]
        self.count[list(counts)] = list(counts.values())
        self.last[list(touched)] = now
        return accepted, rejected

    def _is_late(self, batch: EventBatch, windowed: Windowed, i: int, ended: dict[int, Closing]) -> bool:
        """Let the event's time move its device's watermark, which ends windows, and say whether its own is closed."""
        record, device, deadline = batch.records[i], windowed.devices[i], int(windowed.deadlines[i])
        mark, over = self.watermarks.advance(device, int(batch.times[i]))
        for name in over:
            ended[self.slot_of[name]] = Closing.WINDOW
            self._remember(name)
        late = deadline <= mark or (record not in self.slot_of and record in self.closed_ids)
        if not late:
            self.watermarks.open(device, record, deadline)
        return late

    def _refuse(self, batch: EventBatch, i: int, reason: Reason) -> Rejected:
        name = self.schema.names[batch.features[i]]
        why = "its record is closed" if reason is Reason.LATE else "the record has this feature already"
        return Rejected(int(batch.messages[i]), reason, f"record {batch.records[i]!r}, feature {name!r}: {why}")

    def _remember(self, record: str) -> None:
        """From now on the id is closed."""
        self._shut(record)
        self.closed_ids[record] = None
        if len(self.closed_ids) > self.remembered:
            self.closed_ids.popitem(last=False)

    def _shut(self, record: str) -> None:
        self.is_open[self.slot_of.pop(record)] = False
        self.watermarks.close(record)

    def state(self, slots: NDArray[np.int64]) -> PrefixState:
        return PrefixState(self.scored[slots], self.total[slots], self.least[slots], self.peak[slots])

    def store(self, slots: NDArray[np.int64], state: PrefixState) -> None:
        self.scored[slots], self.total[slots] = state.count, state.total
        self.least[slots], self.peak[slots] = state.least, state.peak

    def readings(
        self, slots: NDArray[np.int64], places: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Feature codes and raw values at these places (R, L) of R records, each (R, L)."""
        rows = slots[:, None]
        return self.log_feature[rows, places].astype(np.int64), self.log_value[rows, places]

    def idle(self, before: int) -> tuple[list[int], int | None]:
        """Slots of open records whose last accepted event is at or before this time (microseconds), and the earliest
        last event among the others."""
        slots = np.flatnonzero(self.is_open)
        last = self.last[slots]
        over = last <= before
        rest = last[~over]
        return slots[over].tolist(), int(rest.min()) if len(rest) else None

    def stalest(self, excess: int) -> list[int]:
        """The `excess` open slots that have been silent for longest."""
        slots = np.flatnonzero(self.is_open)
        chosen: list[int] = slots[np.argsort(self.last[slots], kind="stable")[:excess]].tolist()
        return chosen

    def of_sources(self, sources: Iterable[int]) -> list[int]:
        """Open slots whose record came from one of these partitions."""
        return np.flatnonzero(self.is_open & np.isin(self.source, list(sources))).tolist()

    def close(self, slots: list[int], reason: Closing | Sequence[Closing]) -> Closed:
        """End these records, for one reason or each for its own. A record that merely moves to another consumer
        (REVOKED) may come back: it is not remembered as closed. The slots' arrays stay readable until `release`."""
        reasons = [reason] * len(slots) if isinstance(reason, Closing) else list(reason)
        for slot, why in zip(slots, reasons, strict=True):
            if self.slot_of.get(self.ids[slot]) == slot:
                if why is Closing.REVOKED:
                    self._shut(self.ids[slot])
                else:
                    self._remember(self.ids[slot])
        index = np.array(slots, np.int64)
        return Closed(
            [self.ids[slot] for slot in slots],
            reasons,
            self.count[index].astype(np.int32),
            np.array([self.settled[slot] == self.everything for slot in slots], bool),
            self.log_likelihood[index],
            self.excess[index],
            self.p_value[index],
            self.alert_seq[index],
        )

    def release(self, slots: list[int]) -> None:
        """Give closed slots to new records."""
        for slot in slots:
            self.unseen.pop(slot, None)
        self.free.extend(slots)
