"""Caches of attention keys and values of open records, in fixed-size pages within a bound of memory.

A cached record scores its next reading without computing its earlier readings again. The cache only accelerates: a
record that is evicted is computed again from its log of readings, with the same scores. `PagePool` decides which pages
a record gets and which records are evicted. `TorchKVCache` and `CpuKVCache` hold the pages, for PyTorch and for the
compiled kernels.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deformer_stream.errors import InvariantViolated
from deformer_stream.kernels.abi import KV_PAGE_TOKENS, PRIOR_LANES, ROW_EXTRA_VECTORS
from deformer_stream.model.deformer import DEformer, KVCacheView, StepOutput
from deformer_stream.ragged import ragged_indices

Ints = NDArray[np.int64]

CACHE_LINE_BYTES = 64
"""Pages begin at a multiple of this, so that no vector of a page lies in two cache lines of the processor."""


class PagePool:
    """A pool of pages of one size, with a page table that says which pages each record has.

    Records are named by their index in the engine's record table. A record may have pages of several kinds, for example
    of keys and values and of Cholesky factors. Its row of the page table holds first the pages of the first kind, then
    those of the second, and so on. If there are too few free pages, the least recently used records are evicted.

    Args:
        max_readings: The largest number of readings of a record.
        num_pages_by_kind: For each kind a function from numbers of readings, (R,), to numbers of pages, (R,). It must
            not decrease.
        page_bytes: The size of a page.
        max_bytes: The bytes that all pages together may have; the pool always has the pages of one record.

    Attributes:
        num_pages: The number of pages of the pool.
        pages_per_record: The number of pages of a record with `max_readings` readings, the width of the page table.
        page_table: (records, pages_per_record) the numbers of each record's pages.
        num_cached_readings: (records,) readings of each record whose keys and values are cached; 0 if it is evicted.
        num_free_pages: The number of free pages.
        high_water: The largest number of pages that were ever in use at once. Pages are reused last in, first out, so
            memory beyond it was never touched.
    """

    def __init__(
        self, max_readings: int, num_pages_by_kind: Sequence[Callable[[Ints], Ints]], page_bytes: int, max_bytes: int
    ) -> None:
        widths = [int(num_pages(np.array([max_readings]))[0]) for num_pages in num_pages_by_kind]
        self.num_pages_by_kind = num_pages_by_kind
        self.first_columns = np.cumsum([0, *widths])
        self.pages_per_record = sum(widths)
        self.page_bytes = page_bytes
        self.num_pages = max(self.pages_per_record, max_bytes // page_bytes)
        self.free_pages = np.arange(self.num_pages - 1, -1, -1)
        self.num_free_pages = self.num_pages
        self.high_water = 0
        self.page_table = np.zeros((0, self.pages_per_record), np.int64)
        self.num_cached_readings = np.zeros(0, np.int64)
        self.last_used = np.zeros(0, np.int64)
        self.clock = 0

    @property
    def bytes_in_use(self) -> int:
        """Return the size of all pages that are in use."""
        return int(self.num_pages - self.num_free_pages) * self.page_bytes

    def ensure_capacity(self, num_records: int) -> None:
        """Extend the page table so that it has a row for each record index below `num_records`."""
        num_missing = num_records - len(self.num_cached_readings)
        if num_missing > 0:
            rows = np.zeros((num_missing, self.pages_per_record), np.int64)
            self.page_table = np.concatenate([self.page_table, rows])
            self.num_cached_readings = np.concatenate([self.num_cached_readings, np.zeros(num_missing, np.int64)])
            self.last_used = np.concatenate([self.last_used, np.zeros(num_missing, np.int64)])

    def num_pages_for(self, num_readings: Ints) -> Ints:
        """Return the number of pages of all kinds that records with these numbers of readings need, (R,) → (R,)."""
        first, *others = self.num_pages_by_kind
        return sum((num_pages(num_readings) for num_pages in others), first(num_readings))

    def needs_untouched_pages(self, record_index: Ints, num_readings: Ints) -> bool:
        """Return whether these records need pages that were never in use before.

        Args:
            record_index: (R,) the records.
            num_readings: (R,) how many readings each of them is to have.
        """
        num_more = self.num_pages_for(num_readings) - self.num_pages_for(self.num_cached_readings[record_index])
        num_free_touched = self.high_water - (self.num_pages - self.num_free_pages)
        return int(num_more.sum()) > num_free_touched

    def mark_in_use(self, record_index: Ints) -> None:
        """Protect these records, and only these, from eviction until the next call."""
        self.clock += 1
        self.last_used[record_index] = self.clock

    def allocate(self, record_index: Ints, num_new: Ints) -> NDArray[np.bool_]:
        """Give records the pages that their new readings need, and evict other records if necessary.

        Args:
            record_index: (R,) the records.
            num_new: (R,) how many readings each of them gets.

        Returns:
            (R,) whether the record got its pages. Records are served in order until the pages are used up.
        """
        before = self.num_cached_readings[record_index]
        after = before + num_new
        growth = self._page_growth(before, after)
        num_needed = sum((added for _, added in growth[1:]), growth[0][1])
        total = int(num_needed.sum())
        fits = np.ones(len(record_index), bool)
        if total > self.num_free_pages:
            self._evict(total - self.num_free_pages)
            fits = num_needed.cumsum() <= self.num_free_pages
            growth = self._page_growth(np.where(fits, before, after), after)
        row, column = self._table_places(growth)
        self.num_free_pages -= len(row)
        new_pages = self.free_pages[self.num_free_pages : self.num_free_pages + len(row)]
        self.page_table[record_index[row], column] = new_pages
        self.high_water = max(self.high_water, self.num_pages - self.num_free_pages)
        return fits

    def allocate_all(self, record_index: Ints, num_new: Ints) -> None:
        """Give records the pages that their new readings need, see `allocate`.

        Raises:
            InvariantViolated: There are too few pages. Callers choose batches that fit, so this is a bug.
        """
        fits = self.allocate(record_index, num_new)
        if not fits.all():
            raise InvariantViolated(
                f"the KV cache has no pages for {int((~fits).sum())} of {len(fits)} records that are scored together: "
                f"this is a bug in the choice of batches, please report it"
            )

    def free(self, record_index: Ints) -> None:
        """Free the pages of these records; their readings are computed again when the records are next scored."""
        if not len(record_index):
            return
        nothing = np.zeros(len(record_index), np.int64)
        row, column = self._table_places(self._page_growth(nothing, self.num_cached_readings[record_index]))
        self.free_pages[self.num_free_pages : self.num_free_pages + len(row)] = self.page_table[
            record_index[row], column
        ]
        self.num_free_pages += len(row)
        self.num_cached_readings[record_index] = 0

    def _page_growth(self, before: Ints, after: Ints) -> list[tuple[Ints, Ints]]:
        """Return for each kind of page how many R records have, (R,), and how many more they need, (R,).

        Args:
            before: (R,) readings that the records have.
            after: (R,) readings that they are to have.
        """
        counts = [(num_pages(before), num_pages(after)) for num_pages in self.num_pages_by_kind]
        return [(have, need - have) for have, need in counts]

    def _table_places(self, growth: list[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
        """Return where the additional pages go in the page table: rows among the R records, and columns."""
        rows, columns = [], []
        for (have, added), first_column in zip(growth, self.first_columns.tolist(), strict=False):
            row, place = ragged_indices(added)
            rows.append(row)
            columns.append(place + (have[row] + first_column))
        return np.concatenate(rows), np.concatenate(columns)

    def _evict(self, num_pages: int) -> None:
        """Free the least recently used records until `num_pages` pages are free or only protected records are left."""
        candidates = np.flatnonzero((self.num_cached_readings > 0) & (self.last_used < self.clock))
        candidates = candidates[np.argsort(self.last_used[candidates], kind="stable")]
        freed = np.cumsum(self.num_pages_for(self.num_cached_readings[candidates]))
        self.free(candidates[: int(np.searchsorted(freed, num_pages)) + 1])


def allocate_zeroed(num_bytes: int) -> NDArray[np.uint8]:
    """Return an array of zero bytes whose memory becomes resident only when it is touched.

    A cache can thus reserve its bound at once. The memory consists of huge pages if the system has them, because caches
    are read at random places. The array begins at a multiple of `CACHE_LINE_BYTES`.

    Raises:
        MemoryError: The system refuses to reserve so much memory.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        raw = np.zeros(num_bytes + CACHE_LINE_BYTES, np.uint8)
        first = -raw.ctypes.data % CACHE_LINE_BYTES
        return raw[first : first + num_bytes]
    try:
        area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system refuses {num_bytes} bytes for a KV cache: lower its size ({error})") from error
    with contextlib.suppress(OSError):  # raised by systems without huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, np.uint8)


def _num_token_pages(tokens_per_reading: int, page_tokens: int, num_readings: Ints) -> Ints:
    """Return how many pages the tokens of records with these numbers of readings need, (R,) → (R,).

    It is no method of the caches, because a pool that refers to itself is freed late, by the garbage collector, and two
    caches would be in memory when the model changes.
    """
    return -(-num_readings * tokens_per_reading // page_tokens)


CacheShape = tuple[object, ...]
"""The properties that two models must have in common to use one cache."""


def cache_shape(model: DEformer) -> CacheShape:
    """Return the properties of a model on which the layout of its cache depends."""
    config = model.config
    num_prior_components = 0 if model.gaussians is None else model.gaussians.num_components
    network = config.layers, config.heads, config.d_model, num_prior_components, model.has_cached_readings
    return len(model.schema), model.cached_tokens_per_reading, *network, model.dtype, model.device


class TorchKVCache(PagePool):
    """A cache of keys and values that PyTorch reads and writes, with one pool of pages per layer.

    Methods on NumPy arrays decide which pages are used (`locate_tokens`, `allocate_tokens`). Methods on tensors read
    and write those pages on the model's device (`gather_pages`, `gather_readings`, `write`). The operations of the
    latter do not depend on what the tensors hold, so they can be captured in a CUDA graph.

    Args:
        model: The model whose keys and values are cached.
        max_bytes: The bytes that all pages may have together; the pages of one record always fit.

    Attributes:
        tokens_per_reading: Cached tokens of a reading.
        padding_page: The number of an additional page, to which padding is written.
    """

    PAGE_TOKENS = 8
    """Tokens of a page: few enough that short records waste little, enough that gathering copies long stretches."""

    def __init__(self, model: DEformer, max_bytes: int) -> None:
        config = model.config
        self.tokens_per_reading, self.heads = model.cached_tokens_per_reading, config.heads
        self.device = model.device
        numbers_per_token = 2 * config.layers * config.d_model + 2 * model.has_cached_readings
        page_bytes = numbers_per_token * self.PAGE_TOKENS * model.dtype.itemsize
        num_pages = partial(_num_token_pages, self.tokens_per_reading, self.PAGE_TOKENS)
        super().__init__(len(model.schema), (num_pages,), page_bytes, max_bytes)
        self.padding_page = self.num_pages
        # Heads before tokens, so that a record's pages of one head are gathered into one contiguous matrix.
        shape = (self.num_pages + 1, config.heads, self.PAGE_TOKENS, config.d_model // config.heads)
        self.keys, self.values = ([_zeros(shape, model) for _ in range(config.layers)] for _ in range(2))
        self.readings = _zeros((self.num_pages + 1, self.PAGE_TOKENS, 2), model) if model.has_cached_readings else None

    def locate_tokens(self, record_index: Ints, num_readings: Ints | None = None) -> tuple[Ints, Ints]:
        """Return where the cached tokens of R records are.

        Args:
            record_index: (R,) the records.
            num_readings: (R,) how many of each record's first readings are wanted; by default all cached ones.

        Returns:
            (R, P) page numbers, where P is the number of pages of the longest record, and (R,) numbers of tokens.
        """
        num_readings = self.num_cached_readings[record_index] if num_readings is None else num_readings
        num_pages = int(self.num_pages_for(num_readings.max(keepdims=True))[0]) if len(record_index) else 0
        return self.page_table[record_index, :num_pages], num_readings * self.tokens_per_reading

    def allocate_tokens(self, record_index: Ints, num_new: Ints, num_tokens: int) -> tuple[Ints, Ints]:
        """Allocate pages for the first new readings of R records.

        Args:
            record_index: (R,) the records. A record for which there are no pages is freed.
            num_new: (R,) how many new readings of each record are to be cached; the rest is padding.
            num_tokens: The number T of tokens that a forward pass computes for each record, padding included.

        Returns:
            (R, T) the place of each token in the pools, on the padding page if it is not cached; and (R,) how many new
            readings of each record are cached.
        """
        fits = self.allocate(record_index, num_new)
        num_new = np.where(fits, num_new, 0)
        column = np.arange(num_tokens)
        token = (self.num_cached_readings[record_index] * self.tokens_per_reading)[:, None] + column
        is_cached = column < (num_new * self.tokens_per_reading)[:, None]
        table_column = np.where(is_cached, token // self.PAGE_TOKENS, 0)
        page = np.take_along_axis(self.page_table[record_index], table_column, 1)
        places = np.where(is_cached, page, self.padding_page) * self.PAGE_TOKENS + token % self.PAGE_TOKENS
        self.free(record_index[~fits])
        return places, num_new

    def gather_pages(self, pages: Tensor, num_tokens: Tensor) -> KVCacheView:
        """Return copies of the keys and values in these pages, padded to the longest record.

        Args:
            pages: (R, P) page numbers, see `locate_tokens`.
            num_tokens: (R,) cached tokens of each record.
        """
        R, P = pages.shape
        # (R, H, P) in that order: index (page, head) pairs of the pools.
        pairs = pages.unsqueeze(1) * self.heads + torch.arange(self.heads, device=pages.device).unsqueeze(1)

        def gather_pool(pool: Tensor) -> Tensor:
            rows = pool.view(len(pool) * self.heads, -1).index_select(0, pairs.flatten())
            return rows.view(R, self.heads, P * self.PAGE_TOKENS, pool.shape[-1])

        keys, values = ([gather_pool(pool) for pool in pools] for pools in (self.keys, self.values))
        return KVCacheView(keys, values, num_tokens, self.gather_readings(pages))

    def gather_readings(self, pages: Tensor) -> Tensor | None:
        """Return the readings that belong to the tokens in (R, P) pages, (R, P · PAGE_TOKENS, 2) codes and values.

        None if the model does not cache readings.
        """
        if self.readings is None:
            return None
        R, P = pages.shape
        return self.readings.index_select(0, pages.flatten()).view(R, P * self.PAGE_TOKENS, 2)

    def write(self, output: StepOutput, places: Tensor) -> None:
        """Write the keys and values of a forward pass to places in the pools, (R, T), see `allocate_tokens`."""
        heads = torch.arange(self.heads, device=places.device).unsqueeze(1)
        page, within = places.unsqueeze(1) // self.PAGE_TOKENS, places.unsqueeze(1) % self.PAGE_TOKENS
        flat = ((page * self.heads + heads) * self.PAGE_TOKENS + within).flatten()
        for pools, layers in ((self.keys, output.keys), (self.values, output.values)):
            for pool, layer in zip(pools, layers, strict=True):
                pool.view(-1, pool.shape[-1]).index_copy_(0, flat, layer.reshape(-1, pool.shape[-1]))
        if self.readings is not None and output.readings is not None:
            self.readings.view(-1, 2).index_copy_(0, places.flatten(), output.readings.reshape(-1, 2))

    def gather(self, record_index: Ints, num_readings: Ints | None = None) -> KVCacheView:
        """Return the cached keys and values of R records, or of the first `num_readings` readings of each, (R,)."""
        pages, num_tokens = self.locate_tokens(record_index, num_readings)
        return self.gather_pages(self._to_device(pages), self._to_device(num_tokens))

    def append(self, record_index: Ints, output: StepOutput, num_new: Ints) -> None:
        """Cache the first `num_new` (R,) new readings of each record; a record without free pages is freed."""
        places, num_new = self.allocate_tokens(record_index, num_new, output.keys[0].shape[2])
        self.write(output, self._to_device(places))
        self.num_cached_readings[record_index] += num_new

    def _to_device(self, array: Ints) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _zeros(shape: tuple[int, ...], model: DEformer) -> Tensor:
    """Return zeros of the model's dtype and device.

    Zeros are needed, because unused tokens of a page are multiplied by a weight of 0, and 0 · NaN is NaN.
    """
    if model.device.type != "cpu":
        return torch.zeros(shape, dtype=model.dtype, device=model.device)
    raw = torch.from_numpy(allocate_zeroed(math.prod(shape) * model.dtype.itemsize))
    return raw.view(model.dtype).view(shape)


class CpuKVCache(PagePool):
    """A cache that the compiled kernels read and write: keys and values of all layers in one pool of pages.

    A model with a Gaussian prior has a second kind of pages, which hold the rows of each record's Cholesky factor (one
    row per reading, in float32, for all components of the prior).

    Args:
        model: The model whose keys and values are cached.
        item_bytes: The size of a cached number: 4, or 2 in bfloat16.
        max_bytes: The bytes that all pages may have together; the pages of one record always fit.

    Attributes:
        row_page: (readings of a record,) the column of the page table whose page has the k-th reading's row.
        row_place: (readings of a record,) the first vector of that row in the page.
        pool: The bytes of all pages.
    """

    PAGE_TOKENS = KV_PAGE_TOKENS
    """Tokens of a page: the scores of a page's tokens fill one vector of the processor."""

    def __init__(self, model: DEformer, item_bytes: int, max_bytes: int) -> None:
        config, max_readings = model.config, len(model.schema)
        page_bytes = 2 * config.layers * config.d_model * self.PAGE_TOKENS * item_bytes
        num_token_pages = partial(_num_token_pages, model.cached_tokens_per_reading, self.PAGE_TOKENS)
        num_pages_by_kind: list[Callable[[Ints], Ints]] = [num_token_pages]
        if model.gaussians is not None:
            vector_bytes = 4 * -(-model.gaussians.num_components // PRIOR_LANES) * PRIOR_LANES
            longest_row_bytes = (max_readings + ROW_EXTRA_VECTORS) * vector_bytes
            page_bytes = -(-max(page_bytes, longest_row_bytes) // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
            self.row_page, self.row_place = _place_rows(max_readings, page_bytes // vector_bytes)
            num_row_pages = np.concatenate([[0], self.row_page + 1])
            num_pages_by_kind.append(lambda num_readings: num_row_pages[num_readings])
        super().__init__(max_readings, num_pages_by_kind, page_bytes, max_bytes)
        if model.gaussians is not None:
            self.row_page += self.first_columns[1]
        self.pool = allocate_zeroed(self.num_pages * page_bytes)

    def copy_from(self, other: CpuKVCache, record_index: Ints, num_readings: Ints, num_new: Ints) -> None:
        """Replace the contents of this cache by the first readings of R records of another cache.

        The records get the indexes 0 to R − 1 here, and pages for further readings.

        Args:
            other: The cache to copy from, of the same shape.
            record_index: (R,) the records there.
            num_readings: (R,) how many of each record's readings are copied.
            num_new: (R,) for how many further readings each record gets pages.

        Raises:
            InvariantViolated: This cache has too few pages.
        """
        self.free(np.arange(len(self.num_cached_readings)))
        self.ensure_capacity(len(record_index))
        own_index = np.arange(len(record_index))
        self.allocate_all(own_index, num_readings + num_new)
        row, column = self._table_places(self._page_growth(np.zeros_like(num_readings), num_readings))
        own_pages, other_pages = (cache.pool.reshape(cache.num_pages, -1) for cache in (self, other))
        own_pages[self.page_table[row, column]] = other_pages[other.page_table[record_index[row], column]]
        self.num_cached_readings[own_index] = num_readings + num_new


def _place_rows(num_readings: int, vectors_per_page: int) -> tuple[Ints, Ints]:
    """Return page and place of the rows of a record's Cholesky factor, (num_readings,) each; no row lies in two pages.

    Row k has k vectors of the factor, and `ROW_EXTRA_VECTORS` more.
    """
    page, place, places = 0, 0, []
    for k in range(num_readings):
        row_vectors = k + ROW_EXTRA_VECTORS
        if place + row_vectors > vectors_per_page:
            page, place = page + 1, 0
        places.append((page, place))
        place += row_vectors
    columns = np.array(places, np.int64).reshape(-1, 2).T
    return np.ascontiguousarray(columns[0]), np.ascontiguousarray(columns[1])
