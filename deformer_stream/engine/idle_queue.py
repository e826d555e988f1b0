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
    """A part of the queue: E entries in ascending order of time. An entry is a record and a time.

    Attributes:
        record_indices: (E,) rows of the records in the record table.
        open_orders: (E,) numbers that are larger the later a record was opened. Each record has its own.
        times: (E,) when an event of each record was accepted, microseconds since 1970. It was the record's last event
            when the entry was made.
        is_ordered: Whether entries with equal times are also ordered by partition and then by when the records were
            opened. If not, `IdleQueue._ordered` sorts them when they are needed.
    """

    def __init__(self, record_indices: NDArray[np.int32], open_orders: Ints, times: Ints, is_ordered: bool) -> None:
        self.record_indices, self.open_orders, self.times = record_indices, open_orders, times
        self.is_ordered = is_ordered

    def __len__(self) -> int:
        return len(self.record_indices)

    def split(self, num_first: int) -> tuple[_Chunk, _Chunk]:
        """Return two chunks: the first `num_first` entries, and the entries after them."""
        return self.take(slice(None, num_first)), self.take(slice(num_first, None))

    def filter(self, is_kept: Bools) -> _Chunk:
        """Return a chunk of those of the E entries for which `is_kept`, (E,), is true."""
        return self if is_kept.all() else self.take(is_kept)

    def take(self, entries: Bools | Ints | slice, is_ordered: bool | None = None) -> _Chunk:
        """Return a chunk of some entries.

        Args:
            entries: A slice, a mask (E,), or indices of entries in the order of the new chunk.
            is_ordered: Whether the new chunk is ordered; by default as this chunk is.
        """
        is_ordered = self.is_ordered if is_ordered is None else is_ordered
        return _Chunk(self.record_indices[entries], self.open_orders[entries], self.times[entries], is_ordered)


class IdleQueue:
    """The open records of a table, ordered by the time of their last accepted event.

    Records with the same time are ordered by partition and then by when they were opened. The order therefore does not
    depend on their rows in the record table, and is the same after a restart.

    A selection can exclude partitions that are being restored. Their history is still being read, so their records must
    not be closed. Entries of excluded partitions move to separate queues, and return to this queue in the first
    selection that does not exclude their partition.

    Args:
        is_current: A function of record indices (E,) and times (E,). It returns (E,) whether the record in each row is
            open and its last event was accepted at that time. Entries for which it returns false are dropped as
            outdated, and so are entries of records whose row another record has now.
        partitions_of: A function of record indices (E,). It returns (E,) the partition of each record.
        open_order_of: A function of record indices (E,). It returns (E,) numbers that are larger the later a record was
            opened.
    """

    def __init__(
        self,
        is_current: Callable[[Ints, Ints], Bools],
        partitions_of: Callable[[Ints], NDArray[np.int32]],
        open_order_of: Callable[[Ints], Ints],
    ) -> None:
        self._is_current, self._partitions_of, self._open_order_of = is_current, partitions_of, open_order_of
        # A heap of (time of the first entry, number of the chunk, chunk). The number is unique, so that chunks with
        # equal times are never compared with each other, which `_Chunk` does not support.
        self._chunks: list[tuple[int, int, _Chunk]] = []
        self._chunk_number = count()
        self._excluded: dict[int, IdleQueue] = {}  # by partition
        self._num_entries = 0
        self._compact_at = MIN_ENTRIES_TO_COMPACT

    def push(self, record_indices: Ints, times: int | Ints) -> None:
        """Add an entry for each of E records, which makes earlier entries of the records outdated.

        Args:
            record_indices: (E,) rows of the records in the record table.
            times: When the last event of each record was accepted, microseconds since 1970. One time for all records
                (those of one poll), or (E,) times that need not be sorted (such as those of a snapshot).
        """
        if isinstance(times, int):
            # A single number with stride 0 stands for all entries: no memory, and faster than `np.broadcast_to`.
            times = np.ndarray(len(record_indices), np.int64, np.array([times]), strides=(0,))
        else:
            order = times.argsort(kind="stable")
            record_indices, times = record_indices[order], times[order]
        # Records with equal times are not sorted here. Most entries become outdated before they are needed, so only the
        # selected ones are sorted, by `_ordered`.
        open_orders = self._open_order_of(record_indices)
        self._push_chunk(_Chunk(record_indices.astype(np.int32), open_orders, times, is_ordered=False))
        if self._num_entries > self._compact_at:
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
        while self._chunks and self._chunks[0][0] <= time:
            chunk = self._pop_chunk()
            selected, later = chunk.split(int(chunk.times.searchsorted(time, "right")))
            self._push_chunk(later)
            selected_chunks.append(self._exclude(self._drop_outdated(selected), excluded_partitions))
        selected = self._ordered(_concatenate(selected_chunks))
        self._push_chunk(selected)
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
        # Chunks are examined by the time of their first entry. When there are enough candidates, `latest_time` is the
        # time of the last one that is selected. A chunk that begins later cannot contain an earlier record.
        num_candidates, latest_time = 0, None
        while num_records > 0 and self._chunks and (latest_time is None or self._chunks[0][0] <= latest_time):
            chunk = self._pop_chunk()
            if not chunk.is_ordered:
                chunk = self._ordered(self._drop_outdated(chunk))
            first_current, remainder = self._take_first(chunk, num_records, excluded_partitions)
            candidates.append(first_current)
            remainders.append(remainder)
            num_candidates += len(first_current)
            if num_candidates >= num_records:
                candidates = [self._ordered(_concatenate(candidates))]
                num_candidates = len(candidates[0])  # smaller than before if a record had entries in two chunks
            if num_candidates >= num_records:
                latest_time = int(candidates[0].times[num_records - 1])
        selected, surplus = self._ordered(_concatenate(candidates)).split(num_records)
        for chunk in (selected, surplus, *remainders):
            self._push_chunk(chunk)
        return selected.record_indices.astype(np.int64)

    def earliest_time(self, selected: Ints) -> int | None:
        """Return when the last event of the longest idle record outside `selected` was accepted.

        The caller uses it to compute when the next record times out. Records of excluded partitions count, too.

        Args:
            selected: Rows of the record table, the result of `select_until`.

        Returns:
            Microseconds since 1970; None if there is no other record.
        """
        queues = [self, *self._excluded.values()]
        times = [time for queue in queues if (time := queue._first_time_besides(selected)) is not None]
        return min(times, default=None)

    def _first_time_besides(self, selected: Ints) -> int | None:
        """Return the earliest time of a current entry whose record is not in `selected`; None if there is none.

        Only this queue is searched, not the separate queues of excluded partitions.

        Args:
            selected: Rows of the record table.
        """
        examined: list[_Chunk] = []
        earliest: int | None = None
        # The first entries of a chunk may be outdated. Its first current entry may therefore be later than one of the
        # next chunk, so the search ends only at a chunk that begins after the earliest time so far.
        while self._chunks and (earliest is None or self._chunks[0][0] < earliest):
            remainder, time = self._pop_chunk(), None
            while len(remainder) and time is None:
                head, remainder = remainder.split(SLICE_SIZE)
                head = self._drop_outdated(head)
                examined.append(head)
                is_other = ~np.isin(head.record_indices, selected)
                if is_other.any():
                    first_other = is_other.argmax()
                    time = int(head.times[first_other])
            examined.append(remainder)
            if time is not None and (earliest is None or time < earliest):
                earliest = time
        for chunk in examined:
            self._push_chunk(chunk)
        return earliest

    def _take_first(
        self, chunk: _Chunk, num_records: int, excluded_partitions: Collection[int]
    ) -> tuple[_Chunk, _Chunk]:
        """Return the first current entries of a chunk, without examining more of the chunk than necessary.

        An entry is current if its record is open and has no later event.

        Args:
            chunk: An ordered chunk.
            num_records: At least this number of entries is returned, if the chunk has them.
            excluded_partitions: Partitions whose entries are moved to their separate queues and not returned.

        Returns:
            The first current entries, and the entries that were not examined.
        """
        examined, num_current = [], 0
        while len(chunk) and num_current < num_records:
            head, chunk = chunk.split(max(SLICE_SIZE, num_records))
            current = self._exclude(self._drop_outdated(head), excluded_partitions)
            examined.append(current)
            num_current += len(current)
        return _concatenate(examined), chunk

    def _push_chunk(self, chunk: _Chunk) -> None:
        """Add a chunk to the heap, unless it is empty."""
        if len(chunk):
            heapq.heappush(self._chunks, (int(chunk.times[0]), next(self._chunk_number), chunk))
            self._num_entries += len(chunk)

    def _pop_chunk(self) -> _Chunk:
        """Remove and return the chunk whose first entry has the earliest time."""
        chunk = heapq.heappop(self._chunks)[2]
        self._num_entries -= len(chunk)
        return chunk

    def _drop_outdated(self, chunk: _Chunk) -> _Chunk:
        """Return the entries whose records are open and have no later event."""
        indices = chunk.record_indices.astype(np.int64)
        is_same_record = self._open_order_of(indices) == chunk.open_orders
        return chunk.filter(is_same_record & self._is_current(indices, chunk.times))

    def _exclude(self, chunk: _Chunk, partitions: Collection[int]) -> _Chunk:
        """Move the entries of some partitions to the separate queues of these partitions, and return the others."""
        if not partitions or not len(chunk):
            return chunk
        partition_ids = self._partitions_of(chunk.record_indices.astype(np.int64))
        for partition in partitions:
            is_excluded = partition_ids == partition
            if is_excluded.any():
                if partition not in self._excluded:
                    self._excluded[partition] = IdleQueue(self._is_current, self._partitions_of, self._open_order_of)
                self._excluded[partition]._push_chunk(chunk.filter(is_excluded))
        return chunk.filter(~np.isin(partition_ids, list(partitions)))

    def _include_all_but(self, excluded_partitions: Collection[int]) -> None:
        """Move the entries of partitions that are no longer excluded from their separate queues back to this queue."""
        for partition in self._excluded.keys() - set(excluded_partitions):
            for chunk in self._excluded.pop(partition).pop_chunks():
                self._push_chunk(chunk)

    def pop_chunks(self) -> Iterator[_Chunk]:
        """Remove and yield all chunks, the one with the earliest first entry first."""
        while self._chunks:
            yield self._pop_chunk()

    def _ordered(self, chunk: _Chunk) -> _Chunk:
        """Return current entries sorted by time, then by partition, then by when their records were opened.

        A record has two current entries if its events were accepted in two polls of the same microsecond. The entries
        are equal and become neighbours, and only the first of them is returned.
        """
        indices = chunk.record_indices.astype(np.int64)
        # The last key of `lexsort` is the primary one.
        order = np.lexsort((chunk.open_orders, self._partitions_of(indices), chunk.times))
        sorted_indices = indices[order]
        is_first_of_record = np.ones(len(order), np.bool_)
        np.not_equal(sorted_indices[1:], sorted_indices[:-1], out=is_first_of_record[1:])
        return chunk.take(order[is_first_of_record], is_ordered=True)

    def _compact(self) -> None:
        """Remove all outdated entries, so that the queue's memory is bounded even if nothing is ever selected."""
        chunk = _concatenate([self._drop_outdated(chunk) for chunk in self.pop_chunks()])
        chunk = chunk.take(chunk.times.argsort(kind="stable"), is_ordered=False)
        self._push_chunk(chunk)
        self._compact_at = max(MIN_ENTRIES_TO_COMPACT, GROWTH_TO_COMPACT * len(chunk))


def _concatenate(chunks: list[_Chunk]) -> _Chunk:
    """Return one chunk with the entries of several chunks, one chunk after the other.

    The entries are in general no longer sorted by time; the caller sorts them.
    """
    if not chunks:
        return _Chunk(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int64), is_ordered=True)
    return _Chunk(
        np.concatenate([chunk.record_indices for chunk in chunks]),
        np.concatenate([chunk.open_orders for chunk in chunks]),
        np.concatenate([chunk.times for chunk in chunks]),
        is_ordered=len(chunks) == 1 and chunks[0].is_ordered,
    )
