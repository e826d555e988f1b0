"""A priority queue of open records, ordered by how long they have been idle.

A record moves to the end of the queue each time one of its events is accepted. Moving its entry would need a search, so
the queue only appends: each poll adds one chunk of entries. An entry holds the record's row in the record table, its
order of opening, and the time of the accepted event. It is outdated if the record has a later event or is closed. A row
is reused after its record is closed; the order of opening shows which record an entry belongs to. Outdated entries are
dropped when they reach the front. Each entry is appended once and dropped once, so the cost per accepted event does not
depend on the number of records.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator
from itertools import count

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MIN_ENTRIES_TO_COMPACT = 65_536
"""A queue with at most this number of entries is not compacted (its outdated entries are not removed), because they
need little memory."""
GROWTH_TO_COMPACT = 4
"""The queue is compacted (its outdated entries are removed) when it has grown by this factor since the last time."""
SLICE_SIZE = 4_096
"""Number of entries at the front of a chunk that are examined in one step, if only its first current entries are
needed."""


class _Chunk:
    """A part of an `IdleQueue`: E entries in ascending order of time.

    An entry states when an event of a record was accepted. It is outdated when the record has a later event or is
    closed.

    Attributes:
        record_indices: (E,) rows of the records in the record table. The row of a closed record is used again.
        open_orders: (E,) a unique number of each record. Records that were opened later have larger numbers. The number
            shows whether the row still belongs to the record of the entry.
        times: (E,) when the event of each entry was accepted, microseconds since 1970.
        is_ordered: Whether entries with equal times are also ordered by partition and then by when the records were
            opened. If not, `IdleQueue._sort_and_deduplicate` sorts them when they are needed.
    """

    def __init__(self, record_indices: NDArray[np.int32], open_orders: Ints, times: Ints, is_ordered: bool) -> None:
        self.record_indices, self.open_orders, self.times = record_indices, open_orders, times
        self.is_ordered = is_ordered

    def __len__(self) -> int:
        return len(self.record_indices)

    def split(self, num_first: int) -> tuple[_Chunk, _Chunk]:
        """Divide the chunk after its first `num_first` entries, and return both parts."""
        return self.take(slice(None, num_first)), self.take(slice(num_first, None))

    def filter(self, is_kept: Bools) -> _Chunk:
        """Return a chunk of those of the E entries for which `is_kept`, (E,), is true."""
        return self if is_kept.all() else self.take(is_kept)

    def take(self, entries: Bools | Ints | slice, is_ordered: bool | None = None) -> _Chunk:
        """Return a chunk of some of the E entries.

        Args:
            entries: A slice, a mask (E,), or indices of entries in the order of the new chunk.
            is_ordered: Whether entries of the new chunk with equal times are ordered by partition and then by when the
                records were opened. By default the same as for this chunk.
        """
        is_ordered = self.is_ordered if is_ordered is None else is_ordered
        return _Chunk(self.record_indices[entries], self.open_orders[entries], self.times[entries], is_ordered)


class IdleQueue:
    """The open records of a table, ordered by the time of their last accepted event.

    It is used to close the records that have been idle for longest. Records with the same time are ordered by partition
    and then by when they were opened. The order therefore does not depend on their rows in the record table, and is the
    same after a restart.

    Partitions can be excluded from a selection. After a restart, the earlier events of a partition are read again, and
    its records must not be closed before that is done. Entries of excluded partitions move to separate queues. They
    return to this queue in the first selection that does not exclude their partition.

    Args:
        is_current: A function of rows of the record table, (E,), and times, (E,). It returns (E,) whether the record in
            each row is open and its last event was accepted at that time. If not, the entry is outdated. The function
            can have further conditions, so that the queue holds only some of the open records.
        partitions_of: A function of rows, (E,). It returns (E,) the partition number of the record in each row.
        open_order_of: A function of rows, (E,). It returns (E,) a unique number of the record in each row. Records that
            were opened later have larger numbers.
    """

    def __init__(
        self,
        is_current: Callable[[Ints, Ints], Bools],
        partitions_of: Callable[[Ints], NDArray[np.int32]],
        open_order_of: Callable[[Ints], Ints],
    ) -> None:
        # The arguments are functions of rows of the record table. `is_current` also receives the time of an event for
        # each row. It returns whether the record is open and has no later event, so that this entry is not outdated.
        self._is_current = is_current
        # `partitions_of` returns the partition number of each record. `open_order_of` returns a unique number of each
        # record; records that were opened later have larger numbers.
        self._partitions_of, self._open_order_of = partitions_of, open_order_of
        # A heap of (time of the first entry, number of the chunk, chunk). The number is unique, so that chunks with
        # equal times are never compared with each other, which `_Chunk` does not support.
        self._chunks: list[tuple[int, int, _Chunk]] = []
        self._chunk_number = count()
        # By partition number, the entries of each partition that the last selection excluded.
        self._excluded_queues: dict[int, IdleQueue] = {}
        self._num_entries = 0
        # If there are more entries than this, `push` removes all outdated ones.
        self._max_entries = MIN_ENTRIES_TO_COMPACT

    def push(self, record_indices: Ints, times: int | Ints) -> None:
        """Move E records to their new places in the queue, because an event of each has been accepted.

        An entry is added for each record. Earlier entries of the same record become outdated and are dropped later.

        Args:
            record_indices: (E,) rows of the records in the record table.
            times: When the event of each record was accepted, microseconds since 1970. Either one time for all records,
                or (E,) times in any order.
        """
        if isinstance(times, int):
            # An array of E equal elements (stride 0), which occupies the memory of one. `np.broadcast_to` is slower.
            times = np.ndarray(len(record_indices), np.int64, np.array([times]), strides=(0,))
        else:
            order = times.argsort(kind="stable")
            record_indices, times = record_indices[order], times[order]
        # Records with equal times are not sorted here. Most entries become outdated before they are needed, so only the
        # selected ones are sorted, by `_sort_and_deduplicate`.
        open_orders = self._open_order_of(record_indices)
        self._push_chunk(_Chunk(record_indices.astype(np.int32), open_orders, times, is_ordered=False))
        if self._num_entries > self._max_entries:
            self._compact()

    def select_until(self, time: int, excluded_partitions: Collection[int] = ()) -> Ints:
        """Return the records whose last event was accepted at or before a time, the longest idle first.

        The records stay in the queue until they are closed.

        Args:
            time: Microseconds since 1970.
            excluded_partitions: Partitions whose records are not selected.

        Returns:
            Rows of the record table, ordered by the time of the last event, then by partition and order of opening.
        """
        self._include_all_but(excluded_partitions)
        selected_chunks = []
        # A chunk is sorted by time, so only chunks whose first entry is early enough contain records to select.
        while self._chunks and self._chunks[0][0] <= time:
            chunk = self._pop_chunk()
            selected, later = chunk.split(int(chunk.times.searchsorted(time, "right")))
            self._push_chunk(later)
            selected_chunks.append(self._exclude(self._drop_outdated(selected), excluded_partitions))
        selected = self._sort_and_deduplicate(_concatenate(selected_chunks))
        self._push_chunk(selected)  # selected records stay in the queue
        return selected.record_indices.astype(np.int64)

    def select_first(self, num_records: int, excluded_partitions: Collection[int] = ()) -> Ints:
        """Return the records that have been idle for longest, the longest idle first.

        The records stay in the queue until they are closed.

        Args:
            num_records: Number of records to return; fewer are returned if there are not enough.
            excluded_partitions: Partitions whose records are not selected.

        Returns:
            Rows of the record table, ordered by the time of the last event, then by partition and order of opening.
        """
        self._include_all_but(excluded_partitions)
        candidates: list[_Chunk] = []
        remainders: list[_Chunk] = []
        # The heap returns the chunk with the earliest first entry. As soon as there are enough candidates,
        # `latest_time` is the time of the last one that would be selected. A chunk that begins later cannot contain an
        # earlier record, so the search ends there.
        num_candidates, latest_time = 0, None
        while num_records > 0 and self._chunks and (latest_time is None or self._chunks[0][0] <= latest_time):
            chunk = self._pop_chunk()
            if not chunk.is_ordered:  # entries with equal times are not sorted by partition and opening yet
                chunk = self._sort_and_deduplicate(self._drop_outdated(chunk))
            first_current, remainder = self._take_first(chunk, num_records, excluded_partitions)
            candidates.append(first_current)
            remainders.append(remainder)
            num_candidates += len(first_current)
            if num_candidates >= num_records:
                candidates = [self._sort_and_deduplicate(_concatenate(candidates))]
                num_candidates = len(candidates[0])  # smaller than before if a record had entries in two chunks
            if num_candidates >= num_records:
                latest_time = int(candidates[0].times[num_records - 1])
        selected, surplus = self._sort_and_deduplicate(_concatenate(candidates)).split(num_records)
        # All entries that were removed stay in the queue, except outdated ones.
        for chunk in (selected, surplus, *remainders):
            self._push_chunk(chunk)
        return selected.record_indices.astype(np.int64)

    def earliest_time(self, selected: Ints) -> int | None:
        """Return when the last event of the record that has been idle for longest was accepted.

        The records in `selected` are ignored, because the caller closes them now. Records of partitions that were
        excluded from the selection are not ignored. The caller computes from the result when the next record times out.

        Args:
            selected: Rows of records in the record table, which `select_until` has returned.

        Returns:
            Microseconds since 1970. None if the queue has no record that is not in `selected`.
        """
        # The records of excluded partitions are in separate queues.
        queues = [self, *self._excluded_queues.values()]
        times = [time for queue in queues if (time := queue._earliest_time_without(selected)) is not None]
        return min(times, default=None)

    def _earliest_time_without(self, selected: Ints) -> int | None:
        """Return the earliest time of a current entry whose record is not in `selected`; None if there is none.

        An entry is current if its record is open and has no later event. Only this queue is searched, not the separate
        queues of excluded partitions.

        Args:
            selected: Rows of the record table.
        """
        examined: list[_Chunk] = []
        earliest: int | None = None
        # `_chunks[0][0]` is the time of the first entry of the next chunk of the heap. The first entries of a chunk may
        # be outdated. Its first current entry may therefore be later than a current entry of the next chunk. The search
        # ends at a chunk that does not begin before the earliest time so far.
        while self._chunks and (earliest is None or self._chunks[0][0] < earliest):
            remainder, time = self._pop_chunk(), None
            # The chunk is examined slice by slice, because one of its first entries is usually current.
            while len(remainder) and time is None:
                head, remainder = remainder.split(SLICE_SIZE)
                head = self._drop_outdated(head)
                examined.append(head)
                is_unselected = ~np.isin(head.record_indices, selected)
                if is_unselected.any():
                    first_unselected = is_unselected.argmax()
                    time = int(head.times[first_unselected])
            examined.append(remainder)
            if time is not None and (earliest is None or time < earliest):
                earliest = time
        for chunk in examined:
            self._push_chunk(chunk)  # without the outdated entries that were found
        return earliest

    def _take_first(
        self, chunk: _Chunk, num_records: int, excluded_partitions: Collection[int]
    ) -> tuple[_Chunk, _Chunk]:
        """Return the first current entries of a chunk, without examining more of the chunk than necessary.

        An entry is current if its record is open and has no later event. Other entries are dropped.

        Args:
            chunk: A chunk in which entries with equal times are ordered, too (`_Chunk.is_ordered`).
            num_records: At least this number of entries is returned, if the chunk has them.
            excluded_partitions: Partitions whose entries are moved to their separate queues and not returned.

        Returns:
            The first current entries; and the rest of the chunk, which was not examined.
        """
        current_chunks, num_current, remainder = [], 0, chunk
        while len(remainder) and num_current < num_records:
            head, remainder = remainder.split(max(SLICE_SIZE, num_records))
            current = self._exclude(self._drop_outdated(head), excluded_partitions)
            current_chunks.append(current)
            num_current += len(current)
        return _concatenate(current_chunks), remainder

    def _push_chunk(self, chunk: _Chunk) -> None:
        """Add a chunk (entries of the queue in ascending order of time) to the heap, unless it is empty."""
        if len(chunk):
            heapq.heappush(self._chunks, (int(chunk.times[0]), next(self._chunk_number), chunk))
            self._num_entries += len(chunk)

    def _pop_chunk(self) -> _Chunk:
        """Remove from the heap, and return, the chunk whose first entry has the earliest time."""
        chunk = heapq.heappop(self._chunks)[2]
        self._num_entries -= len(chunk)
        return chunk

    def _drop_outdated(self, chunk: _Chunk) -> _Chunk:
        """Return a chunk without the outdated entries: those of records that are closed or have a later event."""
        indices = chunk.record_indices.astype(np.int64)
        is_same_record = self._open_order_of(indices) == chunk.open_orders
        return chunk.filter(is_same_record & self._is_current(indices, chunk.times))

    def _exclude(self, chunk: _Chunk, partitions: Collection[int]) -> _Chunk:
        """Return the entries of a chunk without those of some partitions, whose records must not be selected now.

        The entries of these partitions move to a separate queue for each partition.

        Args:
            chunk: Entries of the queue.
            partitions: Numbers of the partitions to exclude.
        """
        if not partitions or not len(chunk):
            return chunk
        partition_ids = self._partitions_of(chunk.record_indices.astype(np.int64))
        for partition in partitions:
            is_excluded = partition_ids == partition
            if is_excluded.any():
                if partition not in self._excluded_queues:
                    separate_queue = IdleQueue(self._is_current, self._partitions_of, self._open_order_of)
                    self._excluded_queues[partition] = separate_queue
                self._excluded_queues[partition]._push_chunk(chunk.filter(is_excluded))
        return chunk.filter(~np.isin(partition_ids, list(partitions)))

    def _include_all_but(self, excluded_partitions: Collection[int]) -> None:
        """Move entries back to this queue from the separate queues of partitions that are no longer excluded.

        Args:
            excluded_partitions: Partitions that stay excluded. Their entries are not moved.
        """
        for partition in self._excluded_queues.keys() - set(excluded_partitions):
            for chunk in self._excluded_queues.pop(partition).pop_chunks():
                self._push_chunk(chunk)

    def pop_chunks(self) -> Iterator[_Chunk]:
        """Remove and yield all chunks (parts of the queue). The chunk with the earliest first entry comes first."""
        while self._chunks:
            yield self._pop_chunk()

    def _sort_and_deduplicate(self, chunk: _Chunk) -> _Chunk:
        """Return one entry of each record, sorted by time, then by partition, then by when the record was opened.

        A record can have two entries with the same time, if two calls of `push` had the same time. The second entry is
        dropped.

        Args:
            chunk: Entries in any order, without outdated ones (of closed records, or of records with a later event).
                All entries of a record therefore have the same time.
        """
        indices = chunk.record_indices.astype(np.int64)
        # The last key of `lexsort` is the primary one.
        order = np.lexsort((chunk.open_orders, self._partitions_of(indices), chunk.times))
        # Entries of the same record have equal keys, so they are neighbours now.
        sorted_indices = indices[order]
        is_first_of_record = np.ones(len(order), np.bool_)
        np.not_equal(sorted_indices[1:], sorted_indices[:-1], out=is_first_of_record[1:])
        return chunk.take(order[is_first_of_record], is_ordered=True)

    def _compact(self) -> None:
        """Remove all outdated entries, so that the queue's memory is bounded even if nothing is ever selected.

        An entry is outdated if its record has a later event or is closed.
        """
        chunk = _concatenate([self._drop_outdated(chunk) for chunk in self.pop_chunks()])
        chunk = chunk.take(chunk.times.argsort(kind="stable"), is_ordered=False)
        self._push_chunk(chunk)
        # Compact again after the queue has grown by a factor, so that the cost per pushed entry is bounded.
        self._max_entries = max(MIN_ENTRIES_TO_COMPACT, GROWTH_TO_COMPACT * len(chunk))


def _concatenate(chunks: list[_Chunk]) -> _Chunk:
    """Return a chunk with the entries of several chunks, one chunk after the other.

    The entries of more than one chunk are in general not sorted by time; the caller must sort them.
    """
    if not chunks:
        return _Chunk(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int64), is_ordered=True)
    return _Chunk(
        np.concatenate([chunk.record_indices for chunk in chunks]),
        np.concatenate([chunk.open_orders for chunk in chunks]),
        np.concatenate([chunk.times for chunk in chunks]),
        is_ordered=len(chunks) == 1 and chunks[0].is_ordered,
    )
