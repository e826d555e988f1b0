"""Tie groups: readings of one record with the same event time, which are scored together because their order has no
meaning.

If the tie policy of the engine is "hold", a reading is written to the log of its record when it arrives, but it is
scored only when its tie group is decided. A group is decided by the first reading of the record that has another time,
by the end of the record, or by `Limits.tie_wait` microseconds without a further reading. A decided group is stored in
canonical order (context features first, then by feature code), so later scores do not depend on its order of arrival.
A reading without an event time forms a group of its own.

`decide_tie_groups` selects the readings that a batch decides. `average_over_orders` scores a group over K orders of its
readings: the canonical one, and others in pairs of an order and its reverse. For a group b after the readings s:

    ln p(b | s) = logmeanexp_o Σ_i ln p(b_i | s, readings before i in order o)

This is the log-density of a mixture of K densities. The ln p of one reading is its mean over the orders plus an equal
share of the difference between ln p(b | s) and the sum of these means. The p-value of a reading is its smallest one
over the orders; calibration uses the same rule. Context features stand first in every order, because they condition the
others and are not scored.
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

MAX_ORDERS = 4
"""Orders of a tie group that are averaged. Eight gave the same result at twice the cost
(docs/experiments/14-tie-groups.md).
"""

ScoreBranches = Callable[[Ints, Ints, Ints, Ints, Floats], Floats]
"""Returns the score terms of B branches, which are alternative continuations of open records.

Its arguments are the record index of each branch (B,), the number of earlier readings of the record that the branch
follows (B,), the number of readings in the branch (B,), and the feature codes and raw values of all readings, one
branch after the other, (T,) each. It returns (3, T): ln p, ln of the p-value, and centered NLL."""

SplitPlaces = Callable[[int], Collection[int]]
"""Returns, for a record index, the places in the record's log at which a timeout of the previous run ended a group."""


def draw_orders(record_id: str, codes: Ints, num_context: int) -> Ints:
    """Return the orders of a tie group over which its scores are averaged, without the canonical order.

    The orders depend on the record id and the feature codes only, so every run draws the same ones.

    Args:
        record_id: Id of the record.
        codes: (m,) feature codes of the group in canonical order.
        num_context: Number of context features, which come first in `codes` and keep their places.

    Returns:
        (K − 1, m) indexes into `codes`, one order per row. K is 1 or 2 if at most two readings can be permuted.
    """
    num_permuted = len(codes) - num_context
    if num_permuted <= 2:
        orders = np.arange(num_permuted)[None, ::-1][: num_permuted - 1]
    else:
        seed_text = record_id.encode("utf-8", "surrogatepass") + b"\0" + codes.astype(">i8").tobytes()
        seed = int.from_bytes(hashlib.blake2b(seed_text, digest_size=8).digest())
        rng = np.random.default_rng(seed)
        permutations = [rng.permutation(num_permuted) for _ in range(MAX_ORDERS // 2 - 1)]
        forward = np.stack([np.arange(num_permuted), *permutations])
        orders = np.concatenate([forward[1:], forward[:, ::-1]])
    context_places = np.tile(np.arange(num_context), (len(orders), 1))
    return np.concatenate([context_places, orders + num_context], 1)


def average_over_orders(
    records: RecordTable,
    record_index: Ints,
    place: Ints,
    is_tied: Bools,
    canonical_terms: Floats,
    score_branches: ScoreBranches,
) -> Floats:
    """Return score terms of M readings that do not depend on the order within a tie group.

    The readings form complete tie groups, one after the other, each in canonical order. A reading with a term that is
    not finite in any order gets NaN terms and does not influence the other readings of its group.

    Args:
        records: The table of open records.
        record_index: (M,) row of the record in the table.
        place: (M,) position of the reading in the log of the record.
        is_tied: (M,) whether a reading belongs to the same tie group as the reading before it.
        canonical_terms: (3, M) ln p, ln of the p-value, and centered NLL of the readings in canonical order.
        score_branches: Scores the readings of a group in another order.

    Returns:
        (3, M) the same terms, combined over the orders.
    """
    group_start = np.flatnonzero(~is_tied)
    group_size = np.diff(np.append(group_start, len(is_tied)))
    codes = records.log.gather_features(record_index, place)
    is_context = records.schema.is_context[codes]
    num_context = np.add.reduceat(is_context.astype(np.int64), group_start)
    permuted_groups = np.flatnonzero(group_size - num_context > 1)
    if not len(permuted_groups):
        return canonical_terms
    rows_by_branch: list[Ints] = []
    num_orders = np.ones(len(group_start), np.int64)
    for group in permuted_groups.tolist():
        start, size = int(group_start[group]), int(group_size[group])
        record_id = records.record_ids[record_index[start]]
        orders = draw_orders(record_id, codes[start : start + size], int(num_context[group]))
        num_orders[group] += len(orders)
        rows_by_branch.append((orders + start).ravel())
    row = np.concatenate(rows_by_branch)
    branch_group = np.repeat(permuted_groups, num_orders[permuted_groups] - 1)
    first, length = group_start[branch_group], group_size[branch_group]
    _, values = records.log.gather(record_index[row], place[row])
    branch_terms = score_branches(record_index[first], place[first], length, codes[row], values)
    branches = _Branches(branch_terms, row, np.cumsum(length) - length, branch_group)
    return _combine_orders(canonical_terms, branches, group_start, num_orders, is_context)


@dataclass(frozen=True, slots=True)
class _Branches:
    """Score terms of tie groups in orders other than the canonical one. A branch is one group in one order.

    Attributes:
        terms: (3, T) ln p, ln of the p-value, and centered NLL of all readings, one branch after the other.
        row: (T,) index of the same reading among the readings in canonical order.
        start: (B,) index of the first reading of each branch.
        group: (B,) index of the tie group of each branch.
    """

    terms: Floats
    row: Ints
    start: Ints
    group: Ints


def _combine_orders(
    canonical_terms: Floats, branches: _Branches, group_start: Ints, num_orders: Ints, is_context: Bools
) -> Floats:
    """Return the terms of M readings in G tie groups, combined over the orders of each group.

    Args:
        canonical_terms: (3, M) terms in canonical order: ln p, ln of the p-value, and centered NLL.
        branches: The terms in the other orders.
        group_start: (G,) index of the first reading of each group.
        num_orders: (G,) number of orders of each group, the canonical one included.
        is_context: (M,) whether the reading is of a context feature.

    Returns:
        (3, M) mean ln p plus an equal share of what the mixture over orders adds, smallest ln p-value, mean centered
        NLL.
    """
    row, branch_terms = branches.row, branches.terms
    is_not_finite: Bools = ~np.all(np.isfinite(canonical_terms), axis=0)
    is_not_finite[row[~np.all(np.isfinite(branch_terms), axis=0)]] = True
    is_excluded = is_context | is_not_finite
    if is_not_finite.any():
        canonical_terms = np.where(is_not_finite, 0.0, canonical_terms)
        branch_terms = np.where(is_not_finite[row], 0.0, branch_terms)
    combined = canonical_terms.copy()
    for term in (0, 2):
        np.add.at(combined[term], row, branch_terms[term])
    np.minimum.at(combined[1], row, branch_terms[1])
    group_size = np.diff(np.append(group_start, len(is_context)))
    group = np.arange(len(group_start)).repeat(group_size)
    combined[[0, 2]] /= num_orders[group]
    log_mixture = np.add.reduceat(np.where(is_excluded, 0.0, canonical_terms[0]), group_start)
    branch_log_p = np.add.reduceat(np.where(is_excluded[row], 0.0, branch_terms[0]), branches.start)
    np.logaddexp.at(log_mixture, branches.group, branch_log_p)
    log_mixture -= np.log(num_orders)
    log_mixture -= np.add.reduceat(np.where(is_excluded, 0.0, combined[0]), group_start)
    num_scored = group_size - np.add.reduceat(is_excluded.astype(np.int64), group_start)
    combined[0] += (log_mixture / np.maximum(num_scored, 1))[group]
    combined[:, is_not_finite] = np.nan
    return combined


def decide_tie_groups(
    records: RecordTable,
    batch: EventBatch,
    accepted: AcceptedReadings,
    ending_indices: Ints,
    split_places: SplitPlaces | None = None,
) -> tuple[EventBatch, AcceptedReadings]:
    """Select the readings whose tie group is decided by a batch, and store these groups in canonical order.

    A group is decided if its record has got a reading with another time, or if its record is in `ending_indices`.

    Args:
        records: The table of open records, whose logs hold the accepted readings already.
        batch: The batch of events.
        accepted: The readings that were accepted from the batch.
        ending_indices: (R,) rows of the records whose pending readings are all decided now.
        split_places: If the events are replayed, the places at which the previous run ended a group by a timeout.

    Returns:
        The batch, followed by the decided readings of earlier batches; and the decided readings, in the order in which
        their groups were completed. A reading of an earlier batch gets the message index of the event that decided its
        group, or −1 if no event of this batch did.
    """
    runs = _mark_ties(records, batch, accepted, split_places)
    runs = runs.extend(np.setdiff1d(ending_indices, runs.record_indices), records)
    records.clear_pending(ending_indices)
    first_undecided = runs.first_new_place - runs.num_waiting
    row, offset = ragged_indices(
        records.num_readings[runs.record_indices] - records.num_pending[runs.record_indices] - first_undecided
    )
    record_index, place = runs.record_indices[row], first_undecided[row] + offset
    event_index = np.full(len(row), -1)
    is_new = place >= runs.first_new_place[row]
    event_index[is_new] = runs.event_indices[(runs.start[row] + place - runs.first_new_place[row])[is_new]]
    is_tied = records.log.is_tied(record_index, place)
    group = np.cumsum(~is_tied) - 1
    event_index = event_index[_sort_groups(records, record_index, place, group)]
    last_event = np.maximum.reduceat(event_index, np.flatnonzero(~is_tied)) if len(event_index) else event_index
    sort_keys = place, records.open_order[record_index], records.partition_ids[record_index], last_event[group]
    order = np.lexsort(sort_keys)
    row, record_index, place, event_index = row[order], record_index[order], place[order], event_index[order]
    is_earlier = event_index < 0
    event_index[is_earlier] = len(batch) + np.arange(int(is_earlier.sum()))
    run = row[is_earlier]
    batch = _append_readings(
        batch, records, record_index[is_earlier], place[is_earlier], runs.tie_time[run], runs.message_index[run]
    )
    return batch, AcceptedReadings(event_index, record_index, place, accepted.close_reasons)


@dataclass(frozen=True, slots=True)
class _RecordRuns:
    """The readings that a batch has added to R records, sorted by record; some of these records may have got none.

    Attributes:
        event_indices: (M,) index of each added reading in the batch, record by record.
        record_indices: (R,) row of each record in the table.
        first_new_place: (R,) place in the log of the first reading that the batch has added.
        start: (R,) index of that reading in `event_indices`.
        num_waiting: (R,) readings of earlier batches whose tie group was not decided yet.
        tie_time: (R,) event time of these waiting readings, microseconds.
        message_index: (R,) message of the event that decides the waiting readings, −1 if no event does.
    """

    event_indices: Ints
    record_indices: Ints
    first_new_place: Ints
    start: Ints
    num_waiting: Ints
    tie_time: Ints
    message_index: Ints

    def extend(self, record_indices: Ints, records: RecordTable) -> _RecordRuns:
        """Return these runs followed by records to which the batch has added nothing."""
        zeros = np.zeros(len(record_indices), np.int64)
        num_readings, num_pending = records.num_readings[record_indices], records.num_pending[record_indices]
        added = record_indices, num_readings, zeros, num_pending, records.tie_time[record_indices], zeros - 1
        own = (
            *(self.record_indices, self.first_new_place, self.start),
            *(self.num_waiting, self.tie_time, self.message_index),
        )
        columns = [np.concatenate(pair) for pair in zip(own, added, strict=True)]
        return _RecordRuns(self.event_indices, *columns)


def _mark_ties(
    records: RecordTable, batch: EventBatch, accepted: AcceptedReadings, split_places: SplitPlaces | None
) -> _RecordRuns:
    """Mark which accepted readings join the tie group of the reading before them, and update the pending readings.

    The function also counts groups whose event time was decided already, except in a replay, because the previous run
    has counted them.

    Args:
        records: The table of open records. Its tie columns are updated.
        batch: The batch of events.
        accepted: The readings that were accepted from the batch.
        split_places: If the events are replayed, the places at which the previous run ended a group by a timeout.

    Returns:
        The accepted readings, sorted by record.
    """
    order = np.lexsort((accepted.seq, accepted.record_indices))
    event_indices, owners, places = (a[order] for a in (accepted.event_indices, accepted.record_indices, accepted.seq))
    times, rows = batch.times[event_indices], np.arange(len(event_indices))
    start = np.flatnonzero(np.diff(owners, prepend=-1))
    record_indices = owners[start]
    if not len(start):
        return _RecordRuns(event_indices, *[start] * 6)
    tie_time, num_waiting = records.tie_time[record_indices], records.num_pending[record_indices]
    time_before = np.append(NO_TIME, times[:-1])
    time_before[start] = tie_time
    has_time = times != NO_TIME
    is_tied = (times == time_before) & has_time
    is_tied[start] &= num_waiting > 0
    if split_places is not None:
        for row in np.flatnonzero(is_tied).tolist():
            is_tied[row] = int(places[row]) not in split_places(int(owners[row]))
    records.log.mark_tied(owners, places, is_tied)
    if split_places is None:
        # A group that starts at a time that the record has reached or passed before has come too late to be joined.
        records.add_late_tie_groups(int((~is_tied & (times <= time_before) & has_time).sum()))
    last = np.append(start[1:], len(owners)) - 1
    # Row at which the last group of each record starts, −1 if it started before this batch.
    last_group_start = np.maximum.reduceat(np.where(is_tied, -1, rows), start)
    num_pending = np.where(last_group_start < 0, num_waiting + last - start, last - last_group_start) + 1
    records.set_pending(
        record_indices,
        np.where(has_time[last], num_pending, 0),
        np.where(has_time[last], times[last], tie_time),
    )
    first_untied = np.minimum.reduceat(np.where(is_tied, len(rows), rows), start)
    deciding_event = event_indices[np.minimum(first_untied, last)]
    message_index = batch.message_indices[deciding_event].astype(np.int64)
    return _RecordRuns(event_indices, record_indices, places[start], start, num_waiting, tie_time, message_index)


def _append_readings(
    batch: EventBatch, records: RecordTable, record_indices: Ints, places: Ints, times: Ints, message_indices: Ints
) -> EventBatch:
    """Return the batch followed by readings of earlier batches, which are copied from the logs of their records.

    Args:
        batch: The batch of events.
        records: The table of open records.
        record_indices: (N,) row of the record of each reading.
        places: (N,) place of each reading in the log of its record.
        times: (N,) event time of each reading, microseconds.
        message_indices: (N,) index of the message that decided the reading, −1 for none.
    """
    if not len(record_indices):
        return batch
    unseen_labels = dict(batch.unseen_labels)
    for i, (record_index, place) in enumerate(zip(record_indices.tolist(), places.tolist(), strict=True)):
        label = records.unseen_labels.get(record_index, {}).get(place)
        if label is not None:
            unseen_labels[len(batch) + i] = label
    features, values = records.log.gather(record_indices, places)
    return EventBatch(
        batch.record_ids + [records.record_ids[record_index] for record_index in record_indices.tolist()],
        np.append(batch.features, features).astype(np.int32),
        np.append(batch.values, values),
        np.append(batch.times, times),
        np.append(batch.message_indices, message_indices).astype(np.int32),
        np.append(batch.partitions, records.partition_ids[record_indices]),
        unseen_labels,
    )


def _sort_groups(records: RecordTable, record_index: Ints, place: Ints, group: Ints) -> Ints:
    """Store the readings of each tie group in canonical order: context features first, then by feature code.

    Args:
        records: The table of open records, whose logs are changed.
        record_index: (M,) row of the record of each reading.
        place: (M,) place of each reading in the log of its record.
        group: (M,) number of the tie group of each reading, ascending.

    Returns:
        (M,) for each place, the index of the reading that is stored there now.
    """
    codes = records.log.gather_features(record_index, place)
    order = np.lexsort((codes, ~records.schema.is_context[codes], group))
    if (order != np.arange(len(order))).any():
        records.reorder_readings(record_index, place, order)
    return order
