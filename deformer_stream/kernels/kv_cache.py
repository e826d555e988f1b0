"""What is kept of open records to score their next reading fast, in pages, within a bound.

The cache is an accelerator and nothing else: a record's log of readings is the truth, and whatever is missing here is
rebuilt by prefill. So it may drop any record at any time, and drops the least recently used ones when it is full.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deformer_stream.model.deformer import DEformer, KVCacheView, StepOutput
from deformer_stream.ragged import ragged_indices

Ints = NDArray[np.int64]

ALIGNED = 64
"""Bytes of a cache line, where pages begin."""


class PagePool:
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
        self.high_water = 0
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

    def blocks_needed(self, slots: Ints, readings: Ints) -> bool:
        """Whether these slots, with so many readings each, (R,), want more pages than are free of those that were ever
        in use."""
        more = self.held(readings) - self.held(self.length[slots])
        return int(more.sum()) > self.high_water - (self.pages - self.free_count)

    def mark_in_use(self, slots: Ints) -> None:
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
        self.high_water = max(self.high_water, self.pages - self.free_count)
        return fits

    def _more(self, have: Ints, want: Ints) -> list[tuple[Ints, Ints]]:
        """For each thing that is kept, pages that R records have for `have` readings, and need more for `want`."""
        pages = [(take(have), take(want)) for take in self.takes]
        return [(before, after - before) for before, after in pages]

    def _places(self, more: list[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
        """Rows and columns of the table for the pages that R records need more, see `_more`."""
        rows, columns = [], []
        for (before, added), begin in zip(more, self.begins.tolist(), strict=False):
            row, place = ragged_indices(added)
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


# Keys and values of open records as torch sees them: what `DEformer.extend` asks for and leaves behind.


PAGE_TOKENS = 8
"""Tokens a page holds: small records waste little, and gathering stays a few large copies."""

Shape = tuple[object, ...]
"""What two models must have in common to keep their keys and values in one cache."""


def shape_of(model: DEformer) -> Shape:
    config = model.config
    guides = 0 if model.gaussians is None else model.gaussians.num_components
    network = config.layers, config.heads, config.d_model, guides, model.has_cached_readings
    return len(model.schema), model.cached_tokens_per_reading, *network, model.dtype, model.device


class KeyValueCache(PagePool):
    """A pool of pages per layer. memory: bytes all pages may take together (at least one record always fits).
    Positions are counted in readings; a reading leaves `DEformer.tokens_kept` tokens.

    What is decided about pages is decided on arrays (`seen`, `room`), what is read and written on the device is a
    function of tensors, without a look at what they hold (`past`, `keep`): so it can be recorded (`kernels.cuda_graphs`)."""

    def __init__(self, model: DEformer, memory: int) -> None:
        config, kept = model.config, model.cached_tokens_per_reading
        self.kept, self.heads, self.device = kept, config.heads, model.device
        page_bytes = (
            (2 * config.layers * config.d_model + 2 * model.has_cached_readings) * PAGE_TOKENS * model.dtype.itemsize
        )
        super().__init__(len(model.schema), (lambda n: -(-n * kept // PAGE_TOKENS),), page_bytes, memory)
        self.nowhere = self.pages  # a page more, where padding goes
        # Heads before tokens, so that a record's pages of one head come out of a gather as one contiguous matrix.
        shape = (self.pages + 1, config.heads, PAGE_TOKENS, config.d_model // config.heads)
        self.keys, self.values = ([_zeros(shape, model) for _ in range(config.layers)] for _ in range(2))
        self.readings = _zeros((self.pages + 1, PAGE_TOKENS, 2), model) if model.has_cached_readings else None

    def seen(self, slots: Ints, lengths: Ints | None = None) -> tuple[Ints, Ints]:
        """Where the cached tokens of R slots are: their pages, (R, P), as many as the longest has, and how many tokens
        are in use, (R,). Of their first `lengths` readings, (R,), or of all."""
        lengths = self.length[slots] if lengths is None else lengths
        pages = int(self.held(lengths.max(keepdims=True))[0]) if len(slots) else 0
        return self.table[slots, :pages], lengths * self.kept

    def room(self, slots: Ints, counts: Ints, tokens: int) -> tuple[Ints, Ints]:
        """Room for the first `counts` (R,) new readings of each of R slots, which bring so many `tokens`: the place of
        each token in the pools, (R, tokens), and how many readings are kept, (R,). A slot that gets no page is dropped
        and keeps none."""
        fits = self.reserve(slots, counts)
        counts = np.where(fits, counts, 0)
        new = np.arange(tokens)
        token = (self.length[slots] * self.kept)[:, None] + new
        kept = new < (counts * self.kept)[:, None]
        page = np.take_along_axis(self.table[slots], np.where(kept, token // PAGE_TOKENS, 0), 1)
        places = np.where(kept, page, self.nowhere) * PAGE_TOKENS + token % PAGE_TOKENS
        self.drop(slots[~fits])
        return places, counts

    def past(self, pages: Tensor, tokens: Tensor) -> KVCacheView:
        """What is there, see `seen`, padded to the longest."""
        R, P = pages.shape
        # (R, H, P) in that order: index (page, head) pairs of the pools.
        pairs = pages.unsqueeze(1) * self.heads + torch.arange(self.heads, device=pages.device).unsqueeze(1)

        def gathered(pool: Tensor) -> Tensor:
            rows = pool.view(len(pool) * self.heads, -1).index_select(0, pairs.flatten())
            return rows.view(R, self.heads, P * PAGE_TOKENS, pool.shape[-1])

        keys, values = ([gathered(pool) for pool in pools] for pools in (self.keys, self.values))
        return KVCacheView(keys, values, tokens, self.told(pages))

    def told(self, pages: Tensor) -> Tensor | None:
        """`Past.readings`, alone."""
        if self.readings is None:
            return None
        R, P = pages.shape
        return self.readings.index_select(0, pages.flatten()).view(R, P * PAGE_TOKENS, 2)

    def keep(self, extension: StepOutput, places: Tensor) -> None:
        """Keep what readings have left at these places, see `room`."""
        heads = torch.arange(self.heads, device=places.device).unsqueeze(1)
        page, within = places.unsqueeze(1) // PAGE_TOKENS, places.unsqueeze(1) % PAGE_TOKENS
        flat = ((page * self.heads + heads) * PAGE_TOKENS + within).flatten()
        for pools, added in ((self.keys, extension.keys), (self.values, extension.values)):
            for pool, block in zip(pools, added, strict=True):
                pool.view(-1, pool.shape[-1]).index_copy_(0, flat, block.reshape(-1, pool.shape[-1]))
        if self.readings is not None and extension.readings is not None:
            self.readings.view(-1, 2).index_copy_(0, places.flatten(), extension.readings.reshape(-1, 2))

    def gather(self, slots: Ints, lengths: Ints | None = None) -> KVCacheView:
        """The pasts of R slots, padded to the longest; or their first so many readings, (R,)."""
        pages, tokens = self.seen(slots, lengths)
        return self.past(self._sent(pages), self._sent(tokens))

    def append(self, slots: Ints, extension: StepOutput, counts: Ints) -> None:
        """Keep the first `counts` (R,) new readings of each of R slots; a slot that gets no page is dropped."""
        places, counts = self.room(slots, counts, extension.keys[0].shape[2])
        self.keep(extension, self._sent(places))
        self.length[slots] += counts

    def _sent(self, array: Ints) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _zeros(shape: tuple[int, ...], model: DEformer) -> Tensor:
    """Zeros, for what a page does not hold yet is multiplied by a weight of 0, and 0 · NaN is NaN."""
    if model.device.type != "cpu":
        return torch.zeros(shape, dtype=model.dtype, device=model.device)
    raw = torch.from_numpy(zeroed(math.prod(shape) * model.dtype.itemsize))
    return raw.view(model.dtype).view(shape)
