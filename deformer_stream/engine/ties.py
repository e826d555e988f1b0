"""Tie groups: readings of one record with the same event time, which are scored together because their order has no
meaning.

If the tie policy of the engine is "hold", a reading is stored in its record when it arrives. But it waits for further
readings with the same event time. It is scored when its tie group is decided, that is when no further reading is
expected to join the group. A group is decided by the first reading of the record that has another time, by the end of
the record, or by `Limits.tie_wait` microseconds without a further reading. A decided group is stored in canonical
order: context features first, then by feature code. So later scores do not depend on its order of arrival. A reading
without an event time forms a group of its own.

`decide_tie_groups` selects the readings that a batch decides. `average_over_orders` scores a group over K orders of its
readings: the canonical one, and others in pairs of an order and its reverse. For a group b after the readings s:

    ln p(b | s) = logmeanexp_o Σ_i ln p(b_i | s, readings before i in order o)

where o is one of the K orders and i a reading of the group. This is the log-density of a mixture of K densities. The
ln p of one reading is its mean over the orders plus an equal share of the difference between ln p(b | s) and the sum of
these means. The p-value of a reading is its smallest one over the orders; calibration uses the same rule. Context
features stand first in every order, because they condition the others and are not scored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deformer_stream.engine.events import NO_TIME, EventBatch
from deformer_stream.engine.records import AcceptedReadings, RecordTable
from deformer_stream.model.score_terms import CENTERED_NLL, LOG_PROB
from deformer_stream.ragged import ragged_indices

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MAX_ORDERS = 4
"""Largest number of orders of a tie group over which its scores are averaged. Eight gave the same result at twice the
cost (docs/experiments/14-tie-groups.md).
"""

ScoreBranches = Callable[[Ints, Ints, Ints, Ints, Floats], Floats]
"""A function that scores B branches. A branch is a tie group of an open record in another order than the stored one.

Its arguments are the record's row in the table for each branch, (B,); the number of readings of the record before the
branch, (B,); the number of readings in the branch, (B,), T in total; and the feature codes and raw values of the
readings, one branch after the other, (T,) each. It returns the score terms of the readings, (3 or 4, T)
(`model.score_terms`).
"""

GetTimeoutPlaces = Callable[[int], Collection[int]]
"""A function that returns where timeouts of the previous run have ended tie groups of a record.

A tie group consists of the readings of one record with the same event time. The argument is the record's row in the
table. It returns positions in the record, from 0: the first reading after each ended group. During a replay, such a
reading must not join the group before it, even if it has the same event time.
"""


def draw_orders(record_id: str, codes: Ints, num_context: int) -> Ints:
    """Draw random orders of a tie group, over which its scores are averaged in addition to the canonical order.

    A tie group consists of the m readings of a record with the same event time. Its canonical order is by feature code,
    with context features (which are not scored) first. The random numbers depend only on the record id and the feature
    codes, so every run draws the same orders.

    Args:
        record_id: Id of the record.
        codes: (m,) feature codes of the group in canonical order.
        num_context: Number of context features. They come first in every order; only the other readings are permuted.

    Returns:
        (K, m) indexes into `codes`, one order per row, without the canonical one. K is `MAX_ORDERS` − 1 if more than
        two readings are permuted, 1 for two and 0 for fewer.
    """
    num_permuted = len(codes) - num_context
    if num_permuted < 2:
        orders = np.empty((0, num_permuted), np.int64)  # the canonical order is the only one
    elif num_permuted == 2:
        orders = np.array([[1, 0]])
    else:
        # A fixed byte order gives the same seed on every machine. A record id of a program can contain one half of a
        # surrogate pair, which UTF-8 encodes only with "surrogatepass".
        seed_text = record_id.encode("utf-8", "surrogatepass") + b"\0" + codes.astype(">i8").tobytes()
        seed = int.from_bytes(hashlib.blake2b(seed_text, digest_size=8).digest())
        rng = np.random.default_rng(seed)
        # Together with the canonical order, there are MAX_ORDERS / 2 pairs of an order and its reverse. In a pair, each
        # reading precedes each other one once, so the average over the orders varies less.
        random_orders = [rng.permutation(num_permuted) for _ in range(MAX_ORDERS // 2 - 1)]
        forward = np.stack([np.arange(num_permuted), *random_orders])
        orders = np.concatenate([forward[1:], forward[:, ::-1]])  # forward[0] is the canonical order
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
    """Return score terms of M readings that do not depend on the order of readings with the same event time.

    Such readings of one record form a tie group. The M readings are complete groups, one after the other, each in
    canonical order (context features first, then by feature code). Each group is scored in other orders, too, and the
    terms are combined over the orders. If a term of a reading is not finite in some order, its results are NaN, and the
    reading does not influence the results of its group.

    Args:
        records: The table of open records.
        record_index: (M,) the row of the table that belongs to the record of each reading.
        place: (M,) position of each reading in its record, from 0.
        is_tied: (M,) whether a reading belongs to the same tie group as the reading before it.
        canonical_terms: (3 or 4, M) score terms (`model.score_terms`) in the canonical order.
        score_branches: A function that returns the same terms for tie groups in other orders, see `ScoreBranches`.

    Returns:
        (3 or 4, M) the same terms, combined over the orders.
    """
    group_start = np.flatnonzero(~is_tied)
    group_size = np.diff(np.append(group_start, len(is_tied)))
    codes = records.log.gather_features(record_index, place)
    is_context = records.schema.is_context[codes]
    num_context = np.add.reduceat(is_context.astype(np.int64), group_start)
    # Only groups with at least two scored readings have other orders.
    permuted_groups = np.flatnonzero(group_size - num_context > 1)
    if not len(permuted_groups):
        return canonical_terms
    # A branch is a group in one of its other orders. It is described by the indexes of its readings among the M.
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
    """Score terms of tie groups in other orders than the canonical one.

    A tie group consists of the readings of one record with the same event time. M readings of G groups are given in
    canonical order: context features first, then by feature code. A branch is one of these groups in another order; a
    group can have several branches. There are B branches with T readings in total, one branch after the other.

    Attributes:
        score_terms: (3 or 4, T) score terms (`model.score_terms`).
        row: (T,) index of each reading of a branch among the M readings.
        start: (B,) index of the first reading of each branch among the T readings.
        group: (B,) index of the group of each branch among the G groups.
    """

    score_terms: Floats
    row: Ints
    start: Ints
    group: Ints


def _combine_orders(
    canonical_terms: Floats, branches: _Branches, group_start: Ints, num_orders: Ints, is_context: Bools
) -> Floats:
    """Combine the score terms of M readings in G tie groups over the orders in which each group was scored.

    A tie group consists of the readings of one record with the same event time. The probability of a group is its mean
    probability over the orders, as in a mixture of densities. The ln p of its readings must add up to the logarithm of
    this mean. The mean ln p of each reading over the orders is therefore increased by a constant, which is the same for
    all readings of a group.

    Args:
        canonical_terms: (3 or 4, M) score terms (`model.score_terms`) in the canonical order.
        branches: The terms in the other orders.
        group_start: (G,) index of the first reading of each group.
        num_orders: (G,) number of orders of each group, the canonical one included.
        is_context: (M,) whether the reading is of a context feature, which is not scored.

    Returns:
        (3 or 4, M) combined terms. ln p is the mean over the orders plus the constant of the group. Logarithms of
        p-values are the smallest over the orders. The centered NLL is the mean over the orders. All are NaN if a term
        of the reading is not finite in some order.
    """
    row, branch_terms = branches.row, branches.score_terms
    # If a term of a reading is not finite in some order, all its terms are replaced by 0 here and by NaN at the end.
    is_not_finite: Bools = ~np.all(np.isfinite(canonical_terms), axis=0)
    is_not_finite[row[~np.all(np.isfinite(branch_terms), axis=0)]] = True
    is_excluded = is_context | is_not_finite
    if is_not_finite.any():
        canonical_terms = np.where(is_not_finite, 0.0, canonical_terms)
        branch_terms = np.where(is_not_finite[row], 0.0, branch_terms)
    # Sums of ln p and of the centered NLL, and the minima of the p-values, over all orders.
    combined = canonical_terms.copy()
    for term in range(len(combined)):
        combine = np.add if term in (LOG_PROB, CENTERED_NLL) else np.minimum
        combine.at(combined[term], row, branch_terms[term])
    group_size = np.diff(np.append(group_start, len(is_context)))
    group = np.arange(len(group_start)).repeat(group_size)
    combined[[LOG_PROB, CENTERED_NLL]] /= num_orders[group]
    # ln p of each group: the logarithm of the mean of exp(Σ ln p of its readings) over its orders.
    group_log_p = np.add.reduceat(np.where(is_excluded, 0.0, canonical_terms[LOG_PROB]), group_start)
    branch_log_p = np.add.reduceat(np.where(is_excluded[row], 0.0, branch_terms[LOG_PROB]), branches.start)
    np.logaddexp.at(group_log_p, branches.group, branch_log_p)
    group_log_p -= np.log(num_orders)
    # The difference to the sum of the mean ln p is divided equally among the scored readings of the group.
    surplus = group_log_p - np.add.reduceat(np.where(is_excluded, 0.0, combined[LOG_PROB]), group_start)
    num_scored = group_size - np.add.reduceat(is_excluded.astype(np.int64), group_start)
    combined[LOG_PROB] += (surplus / np.maximum(num_scored, 1))[group]
    combined[:, is_not_finite] = np.nan
    return combined


def decide_tie_groups(
    records: RecordTable,
    batch: EventBatch,
    accepted: AcceptedReadings,
    ending_indices: Ints,
    get_timeout_places: GetTimeoutPlaces | None = None,
) -> tuple[EventBatch, AcceptedReadings]:
    """Return the readings that must be scored now because their tie group is decided.

    Readings of one record with the same event time form a tie group. They wait for each other and are scored together.
    A group is decided (no further reading is expected to join it) if its record has received a reading with another
    time, or if its record is in `ending_indices`. Decided groups are stored in canonical order: context features first,
    then by feature code.

    Args:
        records: The table of open records, which holds the accepted readings already.
        batch: The batch of events.
        accepted: The readings that were accepted from the batch.
        ending_indices: (E,) rows of records whose last group is decided, because the record ends or the group has
            timed out.
        get_timeout_places: None, unless earlier events are replayed after a restart. In a replay, a function of a
            record's row in the table. It returns the positions, from 0, at which a new group begins because a timeout
            of the previous run ended the group before.

    Returns:
        First the batch, extended by an event for each decided reading that arrived with an earlier batch. Such an event
        has the message index of the event that decided the group, −1 if no event of this batch did. Second the decided
        readings, in the order in which their groups were completed.
    """
    arrivals = _mark_ties(records, batch, accepted, get_timeout_places)
    # Records that end without a new reading may have waiting ones.
    arrivals = arrivals.extend(np.setdiff1d(ending_indices, arrivals.record_indices), records)
    records.clear_pending(ending_indices)
    # Of each record, the readings from `first_undecided` up to those that wait further are decided now.
    first_undecided = arrivals.first_new_place - arrivals.num_waiting
    num_not_waiting = records.num_readings[arrivals.record_indices] - records.num_pending[arrivals.record_indices]
    owner, offset = ragged_indices(num_not_waiting - first_undecided)  # `owner` indexes the records of `arrivals`
    record_index, place = arrivals.record_indices[owner], first_undecided[owner] + offset
    # The event of each decided reading, −1 for readings of earlier batches.
    event_index = np.full(len(owner), -1)
    offset_in_batch = place - arrivals.first_new_place[owner]
    is_new = offset_in_batch >= 0
    event_index[is_new] = arrivals.event_indices[(arrivals.start[owner] + offset_in_batch)[is_new]]
    is_tied = records.log.is_tied(record_index, place)
    group = np.cumsum(~is_tied) - 1
    event_index = event_index[sort_groups(records, record_index, place, group)]  # events move with their readings
    # Sort by the last event of the group, then by partition, opening of the record, and position in the record.
    last_event = np.maximum.reduceat(event_index, np.flatnonzero(~is_tied)) if len(event_index) else event_index
    sort_keys = place, records.open_order[record_index], records.partition_ids[record_index], last_event[group]
    order = np.lexsort(sort_keys)  # the last key is the primary one
    owner, record_index, place, event_index = owner[order], record_index[order], place[order], event_index[order]
    # Readings of earlier batches become additional events at the end of the batch.
    is_earlier = event_index < 0
    event_index[is_earlier] = len(batch) + np.arange(int(is_earlier.sum()))
    times, message_indices = arrivals.tie_time[owner[is_earlier]], arrivals.message_index[owner[is_earlier]]
    batch = append_readings(batch, records, record_index[is_earlier], place[is_earlier], times, message_indices)
    return batch, AcceptedReadings(event_index, record_index, place, accepted.close_reasons)


@dataclass(frozen=True, slots=True)
class _SortedArrivals:
    """The M readings that a batch has added to R records, sorted by record and then by position in the record.

    Some of the R records may have received no reading. A tie group consists of the readings of one record with the same
    event time, which wait for each other before they are scored.

    Attributes:
        event_indices: (M,) index in the batch of the event of each added reading.
        record_indices: (R,) row of each record in the record table.
        first_new_place: (R,) position in the record, from 0, of the first reading that the batch has added. If it has
            added none, the number of readings of the record.
        start: (R,) index in `event_indices` of the first added reading of each record; arbitrary if there is none.
        num_waiting: (R,) number of readings of earlier batches that waited for their tie group before this batch.
        tie_time: (R,) event time of these waiting readings, microseconds since 1970.
        message_index: (R,) index, within the poll, of the message with the first added reading that does not join the
            group of the waiting readings, and thus ends it. If all added readings join the group, it is the message of
            the last one. −1 if the batch has added no reading to the record.
    """

    event_indices: Ints
    record_indices: Ints
    first_new_place: Ints
    start: Ints
    num_waiting: Ints
    tie_time: Ints
    message_index: Ints

    def extend(self, record_indices: Ints, records: RecordTable) -> _SortedArrivals:
        """Return a copy of these arrivals that also has entries for records to which the batch has added no reading.

        Arrivals are the readings that a batch has added, sorted by record. The additional records have none, but can
        have readings of earlier batches that still wait. A reading waits for further readings of its record with the
        same event time (its tie group), because these readings are scored together.

        Args:
            record_indices: (A,) rows of the additional records in the record table.
            records: The table of open records.
        """
        # A reading that is added later would follow the readings that the record has.
        next_place = records.num_readings[record_indices]
        # As there are no added readings, the index of the first one is never used, and no message ends a group.
        unused_start = np.zeros(len(record_indices), np.int64)
        no_message = np.full(len(record_indices), -1)
        num_waiting = records.num_pending[record_indices]
        return _SortedArrivals(
            self.event_indices,
            record_indices=np.concatenate([self.record_indices, record_indices]),
            first_new_place=np.concatenate([self.first_new_place, next_place]),
            start=np.concatenate([self.start, unused_start]),
            num_waiting=np.concatenate([self.num_waiting, num_waiting]),
            tie_time=np.concatenate([self.tie_time, records.tie_time[record_indices]]),
            message_index=np.concatenate([self.message_index, no_message]),
        )


def _mark_ties(
    records: RecordTable, batch: EventBatch, accepted: AcceptedReadings, get_timeout_places: GetTimeoutPlaces | None
) -> _SortedArrivals:
    """Store in the record table which accepted readings continue a tie group, and which readings wait.

    A tie group consists of the readings of one record with the same event time. A reading joins the group of the
    reading before it, if both have the same time. The last group of a record waits for further readings.

    A new group is late if its time is not after that of the group before it in the record. Late groups are counted for
    a metric, but not in a replay, because the previous run has counted them.

    Args:
        records: The table of open records. It stores the marks, and the number of waiting readings of each record.
        batch: The batch of events.
        accepted: The M readings that were accepted from the batch.
        get_timeout_places: None, unless earlier events are replayed after a restart. In a replay, a function of a
            record's row in the table. It returns the positions, from 0, at which a new group begins because a timeout
            of the previous run ended the group before.

    Returns:
        The accepted readings, sorted by record. For each record, also the number of readings that waited before this
        batch, and the message that ends their group.
    """
    order = np.lexsort((accepted.seq, accepted.record_indices))  # by record, then by position in the record
    event_indices, owners = accepted.event_indices[order], accepted.record_indices[order]
    places, times = accepted.seq[order], batch.times[event_indices]
    rows = np.arange(len(event_indices))
    # `start` and `last` are the first and the last of the sorted readings of each record.
    start = np.flatnonzero(np.diff(owners, prepend=-1))
    record_indices = owners[start]
    if not len(start):
        return _SortedArrivals(event_indices, *[start] * 6)
    tie_time, num_waiting = records.tie_time[record_indices], records.num_pending[record_indices]
    # A reading joins the group of the reading before it in the record if both have the same time. The reading before a
    # record's first new one is from an earlier batch; its group can only be joined if it still waits.
    time_before = np.append(NO_TIME, times[:-1])
    time_before[start] = tie_time
    has_time = times != NO_TIME
    is_tied = (times == time_before) & has_time
    is_tied[start] &= num_waiting > 0
    if get_timeout_places is not None:
        for row in np.flatnonzero(is_tied).tolist():
            is_tied[row] = int(places[row]) not in get_timeout_places(int(owners[row]))
    records.log.mark_tied(owners, places, is_tied)
    if get_timeout_places is None:
        # A new group is late if its time is not after that of the group before it.
        records.add_late_tie_groups(int((~is_tied & (times <= time_before) & has_time).sum()))
    last = np.append(start[1:], len(owners)) - 1
    # Index at which the last group of each record starts, −1 if it started before this batch. That group waits.
    last_group_start = np.maximum.reduceat(np.where(is_tied, -1, rows), start)
    num_pending = np.where(last_group_start < 0, num_waiting + last - start, last - last_group_start) + 1
    # A reading without a time does not wait.
    records.set_pending(
        record_indices,
        np.where(has_time[last], num_pending, 0),
        np.where(has_time[last], times[last], tie_time),
    )
    # The first reading of a new group decides the readings that were waiting before this batch.
    first_untied = np.minimum.reduceat(np.where(is_tied, len(rows), rows), start)
    deciding_event = event_indices[np.minimum(first_untied, last)]
    message_index = batch.message_indices[deciding_event].astype(np.int64)
    return _SortedArrivals(event_indices, record_indices, places[start], start, num_waiting, tie_time, message_index)


def append_readings(
    batch: EventBatch, records: RecordTable, record_indices: Ints, places: Ints, times: Ints, message_indices: Ints
) -> EventBatch:
    """Return a batch extended by events for N readings of earlier batches, which are scored with this batch.

    The features and values of the additional events are copied from the record table.

    Args:
        batch: The batch of events.
        records: The table of open records.
        record_indices: (N,) the row of the table that belongs to the record of each reading.
        places: (N,) position of each reading in its record, from 0.
        times: (N,) event time of each reading, microseconds since 1970.
        message_indices: (N,) index of the message whose event caused the reading to be scored now, −1 for none.

    Returns:
        A new batch, or `batch` itself if N is 0.
    """
    if not len(record_indices):
        return batch
    # Labels that the model does not have are kept as texts, by index of the event.
    unseen_labels = dict(batch.unseen_labels)
    for i, (record_index, place) in enumerate(zip(record_indices.tolist(), places.tolist(), strict=True)):
        label = records.unseen_labels.get(record_index, {}).get(place)
        if label is not None:
            unseen_labels[len(batch) + i] = label
    features, values = records.log.gather(record_indices, places)
    return EventBatch(
        batch.record_ids + [records.record_ids[record_index] for record_index in record_indices.tolist()],
        features=np.append(batch.features, features).astype(np.int32),
        values=np.append(batch.values, values),
        times=np.append(batch.times, times),
        message_indices=np.append(batch.message_indices, message_indices).astype(np.int32),
        partitions=np.append(batch.partitions, records.partition_ids[record_indices]),
        unseen_labels=unseen_labels,
    )


def sort_groups(records: RecordTable, record_index: Ints, place: Ints, group: Ints) -> Ints:
    """Rearrange the readings of tie groups in the record table: context features first, then by feature code.

    A tie group consists of the readings of one record with the same event time. Without this canonical order, later
    scores would depend on the order in which the readings of a group arrived.

    Args:
        records: The table of open records, in which readings are rearranged.
        record_index: (M,) the row of the table that belongs to the record of each reading.
        place: (M,) position of each reading in its record, from 0.
        group: (M,) number of the tie group of each reading, ascending.

    Returns:
        (M,) the permutation of the M readings: reading `order[i]` has moved to the position of reading i.
    """
    codes = records.log.gather_features(record_index, place)
    is_scored = ~records.schema.is_context[codes]
    order = np.lexsort((codes, is_scored, group))  # the last key is the primary one; false precedes true
    is_rearranged = (order != np.arange(len(order))).any()
    if is_rearranged:
        records.reorder_readings(record_index, place, order)
    return order
