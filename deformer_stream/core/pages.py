"""What is kept of open records to score their next reading fast, in pages, within a bound.

The cache is an accelerator and nothing else: a record's log of readings is the truth, and whatever is missing here is
rebuilt by prefill. So it may drop any record at any time, and drops the least recently used ones when it is full.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from deformer_stream.core.snapshot import ragged

Ints = NDArray[np.int64]

ALIGNED = 64
"""Bytes of a cache line, where pages begin."""


class Pages:
    """A pool of equal pages, a page table and a length per slot. A slot is a record's place in the engine.

    readings: most of a record. takes: for each thing that is kept, how many pages it takes for so many readings, never
    fewer for more; a row of the table holds the pages of the first, then those of the second, and so on. page_bytes:
    size of a page; memory: bytes all pages may take together (at least one record always fits).
    """

    def __init__(self, readings: int, takes: Sequence[Callable[[Ints], Ints]], page_bytes: int, memory: int) -> None:
        widths = [int(take(np.array([readings]))[0]) for take in takes]
        self.takes = takes
        self.begins = np.cumsum([0, *widths])
        self.pages_per_record = sum(widths)
        self.page_bytes = page_bytes
        self.pages = max(self.pages_per_record, memory // page_bytes)
        self.free = np.arange(self.pages - 1, -1, -1)
        self.free_count = self.pages
        # Most that were ever in use at once: the last to come free go first, so memory of the others was never touched.
        self.most = 0
        self.table = np.zeros((0, self.pages_per_record), np.int64)
        self.length = np.zeros(0, np.int64)
        self.used = np.zeros(0, np.int64)
        self.clock = 0

    @property
    def bytes(self) -> int:
        """Bytes of the pages in use."""
        return int(self.pages - self.free_count) * self.page_bytes

    def grow(self, slots: int) -> None:
        """Make room for slot numbers below `slots`."""
        more = slots - len(self.length)
        if more > 0:
            self.table = np.concatenate([self.table, np.zeros((more, self.pages_per_record), np.int64)])
            self.length = np.concatenate([self.length, np.zeros(more, np.int64)])
            self.used = np.concatenate([self.used, np.zeros(more, np.int64)])

    def held(self, readings: Ints) -> Ints:
        """Pages that so many readings take."""
        return sum((take(readings) for take in self.takes[1:]), self.takes[0](readings))

    def short_of(self, slots: Ints, readings: Ints) -> bool:
        """Whether these slots, with so many readings each, (R,), want more pages than are free of those that were ever
        in use."""
        more = self.held(readings) - self.held(self.length[slots])
        return int(more.sum()) > self.most - (self.pages - self.free_count)

    def pin(self, slots: Ints) -> None:
        """Say that these slots, and only these, are in use: they are not evicted until the next call."""
        self.clock += 1
        self.used[slots] = self.clock

    def reserve(self, slots: Ints, counts: Ints) -> NDArray[np.bool_]:
        """Give each slot the pages for so many more readings, evicting others; (R,) bool, whether it got them."""
        have = self.length[slots]
        want = have + counts
        more = self._more(have, want)
        need = sum((added for _, added in more[1:]), more[0][1])
        most = int(need.sum())
        fits = np.ones(len(slots), bool)
        if most > self.free_count:
            self._evict(most - self.free_count)
            fits = need.cumsum() <= self.free_count
            more = self._more(np.where(fits, have, want), want)
        row, column = self._places(more)
        self.free_count -= len(row)
        self.table[slots[row], column] = self.free[self.free_count : self.free_count + len(row)]
        self.most = max(self.most, self.pages - self.free_count)
        return fits

    def _more(self, have: Ints, want: Ints) -> list[tuple[Ints, Ints]]:
        """For each thing that is kept, pages that R records have for `have` readings, and need more for `want`."""
        pages = [(take(have), take(want)) for take in self.takes]
        return [(before, after - before) for before, after in pages]

    def _places(self, more: list[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
        """Rows and columns of the table for the pages that R records need more, see `_more`."""
        rows, columns = [], []
        for (before, added), begin in zip(more, self.begins.tolist(), strict=False):
            row, place = ragged(added)
            rows.append(row)
            columns.append(place + (before[row] + begin))
        return np.concatenate(rows), np.concatenate(columns)

    def _evict(self, pages: int) -> None:
        """Drop the least recently used slots until at least `pages` pages came free, or only pinned ones are left."""
        slots = np.flatnonzero((self.length > 0) & (self.used < self.clock))
        slots = slots[np.argsort(self.used[slots], kind="stable")]
        enough = int(np.searchsorted(np.cumsum(self.held(self.length[slots])), pages)) + 1
        self.drop(slots[:enough])

    def drop(self, slots: Ints) -> None:
        """Forget these slots; their readings will be prefilled again if they are asked for."""
        if not len(slots):
            return
        row, column = self._places(self._more(np.zeros(len(slots), np.int64), self.length[slots]))
        self.free[self.free_count : self.free_count + len(row)] = self.table[slots[row], column]
        self.free_count += len(row)
        self.length[slots] = 0


def zeroed(size: int) -> NDArray[np.uint8]:
    """So many bytes, aligned, not resident until they are touched, so that all of a bound can be asked for at once; in
    large pages of memory where the system has them, since the places of many records are looked up. Raises MemoryError.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        raw = np.zeros(size + ALIGNED, np.uint8)
        first = -raw.ctypes.data % ALIGNED
        return raw[first : first + size]
    try:
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes cannot be had") from error
    with contextlib.suppress(OSError):  # a kernel without large pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, np.uint8)
