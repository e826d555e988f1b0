"""A priority queue of open records, the longest idle first, which needs no work for records that stay open.

A record becomes the last in the queue each time one of its events is accepted. Moving it would need a search, so the
queue only appends: each poll adds one chunk of entries (record index and time of the last accepted event). An entry is
outdated once its record has a later event or is closed. Outdated entries are dropped when they reach the front.
Each entry is appended once and dropped once, so the cost per accepted event does not depend on the number of records.
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
"""Below this number of entries, outdated ones are not searched for: they cost too little memory."""
GROWTH_TO_COMPACT = 4
"""Outdated entries are removed when the queue has grown by this factor since the last time."""
SLICE_SIZE = 4_096
"""Entries of a chunk that are examined at once if only its first ones are wanted."""


class _Chunk:
    """Entries in ascending order of time.

    Attributes:
        record_indices: (E,) rows of the record table.
        times: (E,) when the last event of each record was accepted, microseconds.
        is_ordered: Whether entries with equal times are in their final order, too.
    """

    def __init__(self, record_indices: NDArray[np.int32], times: Ints, is_ordered: bool) -> None:
        self.record_indices, self.times, self.is_ordered = record_indices, times, is_ordered

    def __len__(self) -> int:
        return len(self.record_indices)

    def split(self, num_first: int) -> tuple[_Chunk, _Chunk]:
        """Return the first `num_first` entries and the others."""
        return (
            _Chunk(self.record_indices[:num_first], self.times[:num_first], self.is_ordered),
            _Chunk(self.record_indices[num_first:], self.times[num_first:], self.is_ordered),
        )

    def filter(self, is_kept: Bools) -> _Chunk:
        """Return the entries for which `is_kept`, (E,), is true."""
        return self if is_kept.all() else _Chunk(self.record_indices[is_kept], self.times[is_kept], self.is_ordered)


class IdleQueue:
    """The open records of a table, ordered by the time of their last accepted event.

    Records with the same time are ordered by partition and then by when they were opened. The order therefore does not
    depend on the rows that records happen to have.

    Records of some partitions can be excluded from a selection (they are being restored and may not be closed yet).
    They are set aside and return to the queue when their partition is no longer excluded.

    Args:
        is_current: For record indices (E,) and times (E,), returns whether each record is open, and its last event was
            accepted at that time.
        partitions_of: For record indices (E,), returns the partition of each.
        open_order_of: For record indices (E,), returns a number that is larger the later a record was opened.
    """

    def __init__(
        self,
        is_current: Callable[[Ints, Ints], Bools],
        partitions_of: Callable[[Ints], NDArray[np.int32]],
        open_order_of: Callable[[Ints], Ints],
    ) -> None:
        self._is_current, self._partitions_of, self._open_order_of = is_current, partitions_of, open_order_of
        self._chunks: list[tuple[int, int, _Chunk]] = []  # heap by first time; the number avoids comparing chunks
        self._chunk_number = count()
        self._excluded: dict[int, IdleQueue] = {}  # by partition
        self._num_entries = 0
        self._compact_at = MIN_ENTRIES_TO_COMPACT

    def push(self, record_indices: Ints, times: int | Ints) -> None:
        """Append records whose last event was accepted now.

        Args:
            record_indices: (E,) rows of the record table.
            times: When the last event was accepted, microseconds: one time for all records or (E,) in any order.
        """
        if isinstance(times, int):
            # A single number with stride 0 stands for all entries: no memory, and faster than `np.broadcast_to`.
            times = np.ndarray(len(record_indices), np.int64, np.array([times]), strides=(0,))
        else:
            order = times.argsort(kind="stable")
            record_indices, times = record_indices[order], times[order]
        self._push_chunk(_Chunk(record_indices.astype(np.int32), times, is_ordered=False))
        if self._num_entries > self._compact_at:
            self._compact()

    def select_until(self, time: int, excluded_partitions: Collection[int] = ()) -> Ints:
        """Return the records whose last event was accepted at or before `time`, the longest idle first.

        They stay in the queue until they are closed.
        """
        self._include_all_but(excluded_partitions)
        parts = []
        while self._chunks and self._chunks[0][0] <= time:
            chunk = self._pop_chunk()
            selected, later = chunk.split(int(chunk.times.searchsorted(time, "right")))
            self._push_chunk(later)
            parts.append(self._exclude(self._drop_outdated(selected), excluded_partitions))
        selected = self._ordered(_concatenate(parts))
        self._push_chunk(selected)
        return selected.record_indices.astype(np.int64)

    def select_first(self, num_records: int, excluded_partitions: Collection[int] = ()) -> Ints:
        """Return the `num_records` records that have been idle for longest, the longest idle first.

        They stay in the queue until they are closed.
        """
        self._include_all_but(excluded_partitions)
        parts: list[_Chunk] = []
        rests: list[_Chunk] = []
        num_found, latest = 0, None
        while num_records > 0 and self._chunks and (latest is None or self._chunks[0][0] <= latest):
            chunk = self._pop_chunk()
            if not chunk.is_ordered:
                chunk = self._ordered(self._drop_outdated(chunk))
            found, rest = self._take_first(chunk, num_records, excluded_partitions)
            parts.append(found)
            rests.append(rest)
            num_found += len(found)
            if num_found >= num_records:
                parts = [self._ordered(_concatenate(parts))]
                num_found = len(parts[0])  # less than before if a record was there twice
            if num_found >= num_records:
                latest = int(parts[0].times[num_records - 1])  # no later entry can be among the selected ones
        selected, surplus = self._ordered(_concatenate(parts)).split(num_records)
        for chunk in (selected, surplus, *rests):
            self._push_chunk(chunk)
        return selected.record_indices.astype(np.int64)

    def earliest_time(self, selected: Ints) -> int | None:
        """Return the time of the longest idle record that is not in `selected`, the result of `select_until`.

        Excluded records count. The result is None if there is no such record.
        """
        queues = [self, *self._excluded.values()]
        times = [time for queue in queues if (time := queue._first_time_besides(selected)) is not None]
        return min(times, default=None)

    def _first_time_besides(self, selected: Ints) -> int | None:
        """Return the first time in this queue, without the excluded partitions, of a record not in `selected`."""
        examined: list[_Chunk] = []
        earliest: int | None = None
        # The first entries of a chunk may be outdated, so the next chunk may have an earlier one that is not.
        while self._chunks and (earliest is None or self._chunks[0][0] < earliest):
            rest, time = self._pop_chunk(), None
            while len(rest) and time is None:
                head, rest = rest.split(SLICE_SIZE)
                head = self._drop_outdated(head)
                examined.append(head)
                is_other = ~np.isin(head.record_indices, selected)
                if is_other.any():
                    time = int(head.times[is_other.argmax()])
            examined.append(rest)
            if time is not None and (earliest is None or time < earliest):
                earliest = time
        for chunk in examined:
            self._push_chunk(chunk)
        return earliest

    def _take_first(
        self, chunk: _Chunk, num_records: int, excluded_partitions: Collection[int]
    ) -> tuple[_Chunk, _Chunk]:
        """Return the first current entries of an ordered chunk, at least `num_records` if it has them, and the rest."""
        parts, num_found = [], 0
        while len(chunk) and num_found < num_records:
            head, chunk = chunk.split(max(SLICE_SIZE, num_records))
            parts.append(self._exclude(self._drop_outdated(head), excluded_partitions))
            num_found += len(parts[-1])
        return _concatenate(parts), chunk

    def _push_chunk(self, chunk: _Chunk) -> None:
        if len(chunk):
            heapq.heappush(self._chunks, (int(chunk.times[0]), next(self._chunk_number), chunk))
            self._num_entries += len(chunk)

    def _pop_chunk(self) -> _Chunk:
        """Remove and return the chunk whose first entry is the earliest."""
        chunk = heapq.heappop(self._chunks)[2]
        self._num_entries -= len(chunk)
        return chunk

    def _drop_outdated(self, chunk: _Chunk) -> _Chunk:
        return chunk.filter(self._is_current(chunk.record_indices.astype(np.int64), chunk.times))

    def _exclude(self, chunk: _Chunk, partitions: Collection[int]) -> _Chunk:
        """Set the entries of these partitions aside and return the others."""
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
        """Return the entries to the queue that are set aside and whose partition is no longer excluded."""
        for partition in self._excluded.keys() - set(excluded_partitions):
            for chunk in self._excluded.pop(partition).pop_chunks():
                self._push_chunk(chunk)

    def pop_chunks(self) -> Iterator[_Chunk]:
        """Remove and yield all chunks, the one with the earliest first entry first."""
        while self._chunks:
            yield self._pop_chunk()

    def _ordered(self, chunk: _Chunk) -> _Chunk:
        """Return the entries in their final order, each record once."""
        indices = chunk.record_indices.astype(np.int64)
        order = np.lexsort((self._open_order_of(indices), self._partitions_of(indices), chunk.times))
        indices = indices[order]
        is_first = np.ones(len(order), np.bool_)
        # An index is twice in the queue if a record had events in two polls of the same microsecond.
        np.not_equal(indices[1:], indices[:-1], out=is_first[1:])
        order = order[is_first]
        return _Chunk(chunk.record_indices[order], chunk.times[order], is_ordered=True)

    def _compact(self) -> None:
        """Remove all outdated entries, so that memory is bounded if nothing is ever selected."""
        chunk = _concatenate([self._drop_outdated(chunk) for chunk in self.pop_chunks()])
        order = chunk.times.argsort(kind="stable")
        chunk = _Chunk(chunk.record_indices[order], chunk.times[order], is_ordered=False)
        self._push_chunk(chunk)
        self._compact_at = max(MIN_ENTRIES_TO_COMPACT, GROWTH_TO_COMPACT * len(chunk))


def _concatenate(chunks: list[_Chunk]) -> _Chunk:
    """Return the entries of several chunks, one chunk after the other."""
    if not chunks:
        return _Chunk(np.empty(0, np.int32), np.empty(0, np.int64), is_ordered=True)
    return _Chunk(
        np.concatenate([chunk.record_indices for chunk in chunks]),
        np.concatenate([chunk.times for chunk in chunks]),
        is_ordered=len(chunks) == 1 and chunks[0].is_ordered,
    )
