"""How a block of tied readings is judged: over several of its orders, so that none of them counts more.

Of a block b after a past s, with K of its orders o (`MOST_ORDERS`, the canonical one first, in pairs of an order and
its reverse; the one pair that two readings have):

    ln p(b | s) = logmeanexp_o Σ_i ln p(b_i | s, those before i in o)

a proper mixture of K densities. A reading's ln p is its mean over the orders and an equal share of what the mixture
adds. What the alert goes by is symmetric, too: a reading's p-value is the smallest that it has in any of the orders, as
a rule one in which many of the others have come before it; calibration takes the same. The canonical order is the past
of what follows. Context stands first in every order, for it conditions and is not judged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deformer_stream.engine.events import NO_TIME, EventBatch
from deformer_stream.engine.records import AcceptedReadings, RecordTable
from deformer_stream.ragged import ragged_indices

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MOST_ORDERS = 4
"""Eight said the same of records at twice the cost (docs/experiments.md)."""

Judge = Callable[[Ints, Ints, Ints, Ints, Floats], Floats]
"""What the network says of B branches that leave the logs of slots (B,) at places (B,), with so many readings each,
(B,); codes and raw values (T,) of all, one branch after the other: ln p, ln of the p-value and excess, (3, T)."""


def orders(record: str, codes: Ints, given: int) -> Ints:
    """Orders of a block besides the canonical one, (K − 1, m). codes: (m,), of which the first `given` keep their
    places. They depend on the record's id and the codes only."""
    n = len(codes) - given
    if n <= 2:
        drawn = np.arange(n)[None, ::-1][: n - 1]
    else:
        text = record.encode("utf-8", "surrogatepass") + b"\0" + codes.astype(">i8").tobytes()
        rng = np.random.default_rng(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()))
        some = np.stack([np.arange(n), *(rng.permutation(n) for _ in range(MOST_ORDERS // 2 - 1))])
        drawn = np.concatenate([some[1:], some[:, ::-1]])
    return np.concatenate([np.tile(np.arange(given), (len(drawn), 1)), drawn + given], 1)


def symmetric(records: RecordTable, slot: Ints, place: Ints, tied: Bools, found: Floats, judge: Judge) -> Floats:
    """What is said of M readings, (3, M): ln p, ln of the p-value and excess, the same for every order of a block.

    The readings are whole blocks in canonical order, (M,) each: slot, place, and whether a reading goes with the one
    before it. found: (3, M), in that order."""
    begin = np.flatnonzero(~tied)
    size = np.diff(np.append(begin, len(tied)))
    codes = records.log_feature[slot, place].astype(np.int64)
    context = records.schema.context[codes]
    given = np.add.reduceat(context.astype(np.int64), begin)
    blocks = np.flatnonzero(size - given > 1)
    if not len(blocks):
        return found
    rows, count = [], np.ones(len(begin), np.int64)
    for one in blocks.tolist():
        at, m = int(begin[one]), int(size[one])
        drawn = orders(records.ids[slot[at]], codes[at : at + m], int(given[one]))
        count[one] += len(drawn)
        rows.append((drawn + at).ravel())
    row, branch = np.concatenate(rows), np.repeat(blocks, count[blocks] - 1)
    where = records.log_value[slot[row], place[row]]
    first, length = begin[branch], size[branch]
    more = judge(slot[first], place[first], length, codes[row], where)
    out = found.copy()
    for kind in (0, 2):
        np.add.at(out[kind], row, more[kind])
    np.minimum.at(out[1], row, more[1])
    block = np.cumsum(~tied) - 1
    out[[0, 2]] /= count[block]
    together = np.add.reduceat(np.where(context, 0.0, found[0]), begin)
    other = np.add.reduceat(np.where(context[row], 0.0, more[0]), np.cumsum(length) - length)
    np.logaddexp.at(together, branch, other)
    together -= np.log(count)
    together -= np.add.reduceat(np.where(context, 0.0, out[0]), begin)
    out[0] += (together / np.maximum(size - given, 1))[block]
    return out


# Ties: readings of one record with one event time, whose order means nothing, wait for each other and are one block.
#
# Under the law "hold" a reading enters its record's log when it comes and is judged when its block is decided: with the
# first reading of the record that has another time, at the record's end, or by the clock (`Limits.tie_wait`). A decided
# block stands in the log in canonical order, context first and then by feature code, so nothing that follows depends on
# the order in which it came. A reading without a time is a block of its own. `engine.ties` says how a block is judged.


Splits = Callable[[int], Collection[int]]
"""Of a slot, the places at which the clock of an earlier life had decided a block."""


def decide(
    records: RecordTable, batch: EventBatch, accepted: AcceptedReadings, ending: Ints, splits: Splits | None = None
) -> tuple[EventBatch, AcceptedReadings]:
    """From what was accepted to what is judged: whole blocks, those whose record has gone on to another time, and
    everything that waits in the slots `ending`, (R,).

    Returns the batch, with the readings that had waited since earlier ones at its end, and the decided readings in
    place of the accepted ones, in the order in which their blocks became whole. A reading that had waited has the
    message of the one that decided it, −1 where the clock did."""
    runs = _enter(records, batch, accepted, splits)
    more = np.setdiff1d(ending, runs.slots)
    runs = runs.beside(more, records)
    records.held[ending] = 0
    row, offset = ragged_indices(records.count[runs.slots] - records.held[runs.slots] - runs.first + runs.waiting)
    slot, place = runs.slots[row], (runs.first - runs.waiting)[row] + offset
    event = np.full(len(row), -1)
    came = place >= runs.first[row]
    event[came] = runs.events[(runs.begin[row] + place - runs.first[row])[came]]
    tied = records.log_tied[slot, place]
    block = np.cumsum(~tied) - 1
    event = event[_arrange(records, slot, place, block)]
    whole = np.maximum.reduceat(event, np.flatnonzero(~tied)) if len(event) else event
    order = np.lexsort((place, records.opened[slot], records.source[slot], whole[block]))
    row, slot, place, event = row[order], slot[order], place[order], event[order]
    waited = event < 0
    event[waited] = len(batch) + np.arange(int(waited.sum()))
    of = row[waited]
    batch = _with_waiting(batch, records, slot[waited], place[waited], runs.instant[of], runs.message[of])
    return batch, AcceptedReadings(event, slot, place, accepted.ended)


@dataclass(frozen=True, slots=True)
class _Runs:
    """What a batch brought to R records, and to others nothing. slots: (R,). first: place of the first reading that
    came now; begin: where it stands in `events`, which has the batch's events record by record. waiting: readings that
    had waited, with the time `instant`; message: of what decided them."""

    events: Ints
    slots: Ints
    first: Ints
    begin: Ints
    waiting: Ints
    instant: Ints
    message: Ints

    def beside(self, slots: Ints, records: RecordTable) -> _Runs:
        """With some that got nothing."""
        none = np.zeros(len(slots), np.int64)
        added = slots, records.count[slots], none, records.held[slots], records.instant[slots], none - 1
        own = self.slots, self.first, self.begin, self.waiting, self.instant, self.message
        columns = [np.concatenate(pair) for pair in zip(own, added, strict=True)]
        return _Runs(self.events, *columns)


def _enter(records: RecordTable, batch: EventBatch, accepted: AcceptedReadings, splits: Splits | None) -> _Runs:
    """Note which accepted readings go with the one before them, and how many of each record wait from now on."""
    order = np.lexsort((accepted.seq, accepted.slots))
    events, slots, places = accepted.events[order], accepted.slots[order], accepted.seq[order]
    times, rows = batch.times[events], np.arange(len(events))
    begin = np.flatnonzero(np.diff(slots, prepend=-1))
    mine = slots[begin]
    if not len(begin):
        return _Runs(events, *[begin] * 6)
    instant, waiting = records.instant[mine], records.held[mine]
    before = np.append(NO_TIME, times[:-1])
    before[begin] = instant
    tied = (times == before) & (times != NO_TIME)
    tied[begin] &= waiting > 0
    if splits is not None:
        for row in np.flatnonzero(tied).tolist():
            tied[row] = int(places[row]) not in splits(int(slots[row]))
    records.log_tied[slots, places] = tied
    if splits is None:  # an earlier life has counted its own
        # A block that begins though its instant, or a later one, was there already: it came too late.
        records.late_ties += int((~tied & (times <= before) & (times != NO_TIME)).sum())
    last = np.append(begin[1:], len(slots)) - 1
    latest = np.maximum.reduceat(np.where(tied, -1, rows), begin)  # where the last block begins; −1 before this batch
    held = np.where(latest < 0, waiting + last - begin, last - latest) + 1
    timed = times[last] != NO_TIME
    records.held[mine] = np.where(timed, held, 0)
    records.instant[mine] = np.where(timed, times[last], instant)
    decider = np.minimum(np.minimum.reduceat(np.where(tied, len(rows), rows), begin), last)
    message = batch.messages[events[decider]].astype(np.int64)
    return _Runs(events, mine, places[begin], begin, waiting, instant, message)


def _with_waiting(
    batch: EventBatch, records: RecordTable, slots: Ints, places: Ints, times: Ints, messages: Ints
) -> EventBatch:
    """The batch with readings of the log at its end."""
    if not len(slots):
        return batch
    unseen = dict(batch.unseen)
    for i, (slot, place) in enumerate(zip(slots.tolist(), places.tolist(), strict=True)):
        text = records.unseen.get(slot, {}).get(place)
        if text is not None:
            unseen[len(batch) + i] = text
    return EventBatch(
        batch.records + [records.ids[slot] for slot in slots.tolist()],
        np.append(batch.features, records.log_feature[slots, places]).astype(np.int32),
        np.append(batch.values, records.log_value[slots, places]),
        np.append(batch.times, times),
        np.append(batch.messages, messages).astype(np.int32),
        np.append(batch.partitions, records.source[slots]),
        unseen,
    )


def _arrange(records: RecordTable, slot: Ints, place: Ints, block: Ints) -> Ints:
    """Put the readings of each block, (M,), into canonical order in the logs; which of them stands where, (M,)."""
    code = records.log_feature[slot, place].astype(np.int64)
    order = np.lexsort((code, ~records.schema.context[code], block))
    moved = np.flatnonzero(order != np.arange(len(order)))
    if len(moved):
        records.log_feature[slot, place] = code[order]
        records.log_value[slot, place] = records.log_value[slot, place][order]
        texts = {}
        for row, source in zip(moved.tolist(), order[moved].tolist(), strict=True):
            text = records.unseen.get(int(slot[row]), {}).pop(int(place[source]), None)
            if text is not None:
                texts[row] = text
        for row, text in texts.items():
            records.unseen[int(slot[row])][int(place[row])] = text
    return order
