"""Caches of attention keys and values of open records, in fixed-size pages within a bound of memory.

With the keys and values of a record's earlier readings in the cache, only its new readings go through the network. The
cache changes no score: an evicted record is computed again from its stored readings. `PagePool` decides which pages a
record gets and which records are evicted. Two subclasses hold the contents of the pages: `CpuKVCache` for the compiled
kernels (C code that scores on the CPU), and `torch_kv_cache.TorchKVCache` for PyTorch.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Sequence
from functools import partial, reduce

import numpy as np
from numpy.typing import NDArray

from deformer_stream.errors import InvariantViolated
from deformer_stream.kernels.abi import KV_PAGE_TOKENS, PRIOR_LANES, READING_BYTES, ROW_EXTRA_VECTORS
from deformer_stream.model.parameters import Model, ModelParameters
from deformer_stream.ragged import ragged_indices

Ints = NDArray[np.int64]

INTERVAL_WEIGHT = 0.25
"""Weight of the latest interval between two uses of a record in its average interval."""

OVERDUE_FACTOR = 2.0
"""A record that has not been used for this many average intervals has probably ended."""

MIN_REMAINING_FACTOR = 0.25
"""Expected time to the next use of a record that is due, in average intervals. Arrivals are seldom exactly regular."""

CACHE_LINE_BYTES = 64
"""Pages begin at an address that is a multiple of this, so that no vector of a page lies in two cache lines of the
processor."""


class PagePool:
    """A pool of pages of equal size, and a page table that lists the pages of each record.

    A page is a block of cache memory of fixed size. A record is identified by its row in the engine's table of open
    records. It can have pages for two purposes, each with its own range of columns in the page table. The first pages
    hold attention keys and values. If the model has a Gaussian prior (an input of the network), further pages hold
    numbers from which the prior is computed. If there are too few free pages, those records are evicted whose next use
    is expected to be the latest. Their pages become free. What the pages held is computed again from the readings when
    it is next needed.

    The next use is predicted from the average interval between the uses of a record. Eviction of the least recently
    used records would be bad if records report in turn and need slightly more pages than there are. Each record would
    be evicted just before it is needed.

    Args:
        max_readings: The largest number of readings of a record.
        page_count_functions: One function for each purpose. It maps numbers of readings, (R,) for R records, to the
            numbers of pages that they need, (R,), and must not decrease with the number of readings.
        page_bytes: The size of a page in bytes.
        max_bytes: The largest size of all pages together in bytes. The pool is larger only if it would otherwise not
            hold one record of `max_readings` readings.

    Attributes:
        num_pages: The number of pages of the pool, free or not.
        pages_per_record: The number of pages of a record with `max_readings` readings, the width of the page table.
        first_columns: The first column of each purpose in the page table, then the width of the table.
        free_pages: (num_pages,) page indexes, of which the first `num_free_pages` are free.
        num_free_pages: The number of free pages.
        page_table: (rows, pages_per_record) the page indexes of the record in each row of the engine's table. Columns
            beyond the record's own pages have no meaning.
        num_cached_readings: (rows,) the number of readings of each record in the cache; 0 if the record is evicted.
        last_used: (rows,) the value of `clock` when each record was last protected by `mark_in_use`.
        use_interval: (rows,) the average number of steps of `clock` between two uses of each record, 0 if it was used
            at most once.
        clock: The number of calls of `mark_in_use`.
        high_water: The largest number of pages that were ever in use at once. The page that was freed last is used
            first, so memory beyond this number of pages was never touched.
    """

    def __init__(
        self, max_readings: int, page_count_functions: Sequence[Callable[[Ints], Ints]], page_bytes: int, max_bytes: int
    ) -> None:
        # A record has pages for one or two purposes: keys and values, and the Gaussian prior. For each purpose, the
        # longest record determines the number of columns in the page table.
        widths = [int(count_pages(np.array([max_readings]))[0]) for count_pages in page_count_functions]
        self.page_count_functions = page_count_functions
        self.first_columns = np.cumsum([0, *widths])
        self.pages_per_record = sum(widths)
        self.page_bytes = page_bytes
        self.num_pages = max(self.pages_per_record, max_bytes // page_bytes)  # at least the pages of one record
        self.free_pages = np.arange(self.num_pages - 1, -1, -1)  # pages are taken from the end, so page 0 first
        self.num_free_pages = self.num_pages
        self.high_water = 0
        self.page_table = np.zeros((0, self.pages_per_record), np.int64)
        self.num_cached_readings = np.zeros(0, np.int64)
        self.last_used = np.zeros(0, np.int64)
        self.use_interval = np.zeros(0, np.float32)
        self.clock = 0

    @property
    def bytes_in_use(self) -> int:
        """Return the size in bytes of all pages that belong to a record."""
        return int(self.num_pages - self.num_free_pages) * self.page_bytes

    def ensure_capacity(self, num_records: int) -> None:
        """Extend the page table, if necessary, so that it has at least `num_records` rows (one per open record)."""
        num_missing = num_records - len(self.num_cached_readings)
        if num_missing > 0:
            rows = np.zeros((num_missing, self.pages_per_record), np.int64)
            self.page_table = np.concatenate([self.page_table, rows])
            self.num_cached_readings = np.concatenate([self.num_cached_readings, np.zeros(num_missing, np.int64)])
            self.last_used = np.concatenate([self.last_used, np.zeros(num_missing, np.int64)])
            self.use_interval = np.concatenate([self.use_interval, np.zeros(num_missing, np.float32)])

    def num_pages_for(self, num_readings: Ints) -> Ints:
        """Return how many pages each of R records needs, (R,).

        Pages for all purposes are counted: for keys and values, and for the Gaussian prior of the model, if it has one.

        Args:
            num_readings: (R,) the number of readings of each record.
        """
        num_pages: Ints = reduce(np.add, (count_pages(num_readings) for count_pages in self.page_count_functions))
        return num_pages

    def needs_untouched_pages(self, record_index: Ints, num_readings: Ints) -> bool:
        """Return whether R records need pages that were never in use, so that the process would need more memory.

        Args:
            record_index: (R,) the row of each record in the page table.
            num_readings: (R,) how many readings of each record shall be cached, at least as many as are cached now.
        """
        num_more = self.num_pages_for(num_readings) - self.num_pages_for(self.num_cached_readings[record_index])
        num_in_use = self.num_pages - self.num_free_pages
        num_free_touched = self.high_water - num_in_use  # free pages that were in use before
        return int(num_more.sum()) > num_free_touched

    def mark_in_use(self, record_index: Ints) -> None:
        """Protect the given records, and no others, from eviction until the next call of this method.

        Args:
            record_index: (R,) the row of each record in the page table.
        """
        self.clock += 1
        last_used, average = self.last_used[record_index], self.use_interval[record_index]
        interval = self.clock - last_used
        updated = np.where(average > 0, average + INTERVAL_WEIGHT * (interval - average), interval)
        self.use_interval[record_index] = np.where(last_used > 0, updated, 0)
        self.last_used[record_index] = self.clock

    def allocate(self, record_index: Ints, num_new: Ints) -> NDArray[np.bool_]:
        """Allocate the pages that R records need for new readings, and evict other records if necessary.

        Only records that `mark_in_use` does not protect are evicted. The caller must add the new readings to
        `num_cached_readings` after it has written them.

        Args:
            record_index: (R,) the row of each record in the page table.
            num_new: (R,) the number of new readings of each record.

        Returns:
            (R,) whether each record got its pages. Records get pages in the given order until no page is free.
        """
        before = self.num_cached_readings[record_index]
        after = before + num_new
        growth = self._page_growth(before, after)
        # (R,) pages to add, those for keys and values and those for the Gaussian prior together.
        num_needed = reduce(np.add, [num_added for _, num_added in growth])
        total = int(num_needed.sum())
        fits = np.ones(len(record_index), bool)
        if total > self.num_free_pages:
            self._evict(total - self.num_free_pages)
            fits = num_needed.cumsum() <= self.num_free_pages
            # A record that does not fit gets no page: its growth is computed from `after` to `after`.
            growth = self._page_growth(np.where(fits, before, after), after)
        row, column = self._table_entries(growth)
        # `free_pages` is a stack: the pages that were freed last are used first.
        self.num_free_pages -= len(row)
        new_pages = self.free_pages[self.num_free_pages : self.num_free_pages + len(row)]
        self.page_table[record_index[row], column] = new_pages
        self.high_water = max(self.high_water, self.num_pages - self.num_free_pages)
        return fits

    def allocate_all(self, record_index: Ints, num_new: Ints) -> None:
        """Allocate the pages that R records need for new readings, as `allocate` does, but fail if pages are missing.

        Args:
            record_index: (R,) the row of each record in the page table.
            num_new: (R,) the number of new readings of each record.

        Raises:
            InvariantViolated: There are too few pages. Callers choose batches that fit, so this is a bug.
        """
        fits = self.allocate(record_index, num_new)
        if not fits.all():
            raise InvariantViolated(
                f"the KV cache has no pages for {int((~fits).sum())} of {len(fits)} records that are scored together, "
                f"although the batch was chosen so that they fit: this is a bug, please report it"
            )

    def free(self, record_index: Ints) -> None:
        """Free all pages of R records, whose keys and values are computed again when the records are next scored.

        Args:
            record_index: (R,) the row of each record in the page table.
        """
        if not len(record_index):
            return
        no_readings = np.zeros(len(record_index), np.int64)
        # All pages of a record are those that growth from no reading to the cached ones has required.
        row, column = self._table_entries(self._page_growth(no_readings, self.num_cached_readings[record_index]))
        pages = self.page_table[record_index[row], column]
        self.free_pages[self.num_free_pages : self.num_free_pages + len(pages)] = pages
        self.num_free_pages += len(pages)
        self.num_cached_readings[record_index] = 0
        if len(pages):
            self._clear_pages(pages)

    def remove(self, record_index: Ints) -> None:
        """Free all pages of R closed records, and clear the statistics of their use.

        New records may get their rows afterwards.

        Args:
            record_index: (R,) the row of each record in the page table.
        """
        self.free(record_index)
        self.last_used[record_index] = 0
        self.use_interval[record_index] = 0

    def _clear_pages(self, pages: Ints) -> None:
        """Prepare pages that were just freed for their next record.

        This method does nothing. A subclass overrides it if the old contents of its pages could do harm.

        Args:
            pages: Indexes of at least one page.
        """

    def _page_growth(self, before: Ints, after: Ints) -> list[tuple[Ints, Ints]]:
        """Return how many pages R records have, and how many more they need if their numbers of readings grow.

        A record has separate pages for each purpose: for keys and values, and for the Gaussian prior of the model, if
        it has one.

        Args:
            before: (R,) the number of cached readings that each record has.
            after: (R,) the number of cached readings that each record shall have.

        Returns:
            A list with one pair of arrays for each purpose. The first array, (R,), is the number of pages that each
            record has. The second array, (R,), is the number of pages to add.
        """
        counts = [(count_pages(before), count_pages(after)) for count_pages in self.page_count_functions]
        return [(num_before, num_after - num_before) for num_before, num_after in counts]

    def _table_entries(self, growth: list[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
        """Return the entries of the page table in which the additional pages of R records are listed.

        Args:
            growth: The result of `_page_growth`. It has a pair of arrays for each purpose of pages (keys and values,
                Gaussian prior). They are (R,) how many pages each record has, and (R,) how many are added.

        Returns:
            Two arrays with one element per added page: the index of its record among the R records, and the column of
            the page table.
        """
        rows, columns = [], []
        # Each purpose has its own range of columns. `first_columns` has one more entry, the end of the last range.
        for (num_before, num_added), first_column in zip(growth, self.first_columns.tolist(), strict=False):
            # For each added page: its record, and its number (from 0) among the pages that are added to this record.
            row, offset = ragged_indices(num_added)
            rows.append(row)
            columns.append(first_column + num_before[row] + offset)
        return np.concatenate(rows), np.concatenate(columns)

    def _evict(self, num_pages: int) -> None:
        """Free the pages of the records whose next use is expected to be the latest.

        Records that `mark_in_use` protects are not evicted, so fewer pages than requested may become free.

        Args:
            num_pages: The number of pages that shall become free.
        """
        is_unprotected = self.last_used < self.clock  # not given to the latest call of `mark_in_use`
        candidates = np.flatnonzero((self.num_cached_readings > 0) & is_unprotected)
        expected_wait = self._predict_wait(candidates)
        if num_pages < len(candidates):
            # Each record has at least one page, so this number suffices. To sort all records would take longer.
            latest = np.argpartition(-expected_wait, num_pages - 1)[:num_pages]
            candidates, expected_wait = candidates[latest], expected_wait[latest]
        # Of equal waits, the least recently used record is evicted.
        candidates = candidates[np.lexsort((self.last_used[candidates], -expected_wait))]
        # Free the fewest records, beginning with the latest expected use, that have enough pages together.
        # Entry n of `num_freed` is the number of pages that become free if the first n + 1 candidates are evicted.
        num_freed = np.cumsum(self.num_pages_for(self.num_cached_readings[candidates]))
        num_evicted = int(np.searchsorted(num_freed, num_pages)) + 1
        self.free(candidates[:num_evicted])

    def _predict_wait(self, record_index: Ints) -> NDArray[np.float64]:
        """Return in how many steps of `clock` the next use of each of R records is expected, (R,).

        A record is expected one average interval after its last use. If it is overdue, or was used only once, it is
        expected to stay unused for as long as it has been unused. Such records are evicted in the order of their last
        use.

        Args:
            record_index: (R,) the row of each record in the page table.
        """
        unused_for = (self.clock - self.last_used[record_index]).astype(np.float64)
        interval = self.use_interval[record_index]
        is_expected = unused_for <= OVERDUE_FACTOR * interval
        return np.where(is_expected, np.maximum(interval - unused_for, MIN_REMAINING_FACTOR * interval), unused_for)


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple


def allocate_zeroed(num_bytes: int) -> NDArray[np.uint8]:
    """Return an array of `num_bytes` zero bytes whose memory becomes resident only when it is touched.

    A cache can thus reserve its largest size at once. If the operating system has huge pages, the memory consists of
    them, because that makes reads at random addresses faster. The address of the array is a multiple of
    `CACHE_LINE_BYTES`.

    Raises:
        MemoryError: The system refuses to reserve this many bytes.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        raw = np.zeros(num_bytes + CACHE_LINE_BYTES, np.uint8)
        num_skipped = -raw.ctypes.data % CACHE_LINE_BYTES  # up to the next multiple of CACHE_LINE_BYTES
        return raw[num_skipped : num_skipped + num_bytes]
    try:
        # Anonymous memory (-1: no file) begins at a page of the operating system, so its address needs no alignment.
        area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"the operating system refuses to reserve {num_bytes} bytes for the KV cache: set a smaller cache size "
            f"({error})"
        ) from error
    with contextlib.suppress(OSError):  # a kernel without huge pages refuses the advice
        area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, np.uint8)


def num_token_pages(tokens_per_reading: int, page_tokens: int, num_readings: Ints) -> Ints:
    """Return how many pages the cached tokens of each of R records need, (R,).

    This is not a method of the caches, because a pool would then refer to itself through its list of functions. Only
    the garbage collector would free such a pool, some time after its last use. If the model is replaced, the old and
    the new cache would be in memory together until then.

    Args:
        tokens_per_reading: The number of cached tokens of a reading.
        page_tokens: The number of tokens of a page.
        num_readings: (R,) the number of cached readings of each record.
    """
    num_tokens = num_readings * tokens_per_reading
    # The quotient, rounded up.
    return -(-num_tokens // page_tokens)


def max_cached_readings(model: Model) -> int:
    """Return the largest number of readings of a record that the KV cache of a model holds.

    A sensor has at most one reading in a record. If readings are irregular, the cache holds the context of the next
    reading, whose size the hyperparameters limit.

    Raises:
        ValueError: Readings are irregular, and the hyperparameters do not limit the context.
    """
    limit = model.config.context_limit
    if model.schema.reading_times is None:
        return len(model.schema)
    if limit is None:
        raise ValueError(
            "a KV cache needs a largest size of contexts, but the hyperparameters set none for irregular readings: "
            "set context_block"
        )
    return limit.max_readings(len(model.schema))


CacheShape = tuple[object, ...]
"""The properties of a model that determine the layout of its KV cache. Models with equal ones can share a cache.

If a model is replaced by one with the same properties, the new model can use the memory of the old cache.
"""


def cpu_cache_shape(parameters: ModelParameters) -> CacheShape:
    """Return the properties of a model that determine the layout of its `CpuKVCache`."""
    config = parameters.config
    num_mixture_components = parameters.num_prior_components if parameters.has_mixture else 0
    network = config.layers, config.heads, config.d_model, num_mixture_components
    has_readings = parameters.schema.reading_times is not None or parameters.has_process
    sensors = len(parameters.schema), has_readings, config.context_limit
    return "kernels", *sensors, parameters.cached_tokens_per_reading, *network, config.precision


class CpuKVCache(PagePool):
    """A cache that the compiled kernels (C code for the CPU) read and write, with the pages of all layers in one array.

    A page holds the keys and values of some tokens for all layers. If the model has a Gaussian prior (a mixture whose
    exact conditionals are inputs of the network), a record has further pages. They hold the Cholesky factors of the
    covariances of its readings: one row per reading, in float32, for all components of the mixture. If readings are
    irregular, or if the prior is a Gaussian process, a page also holds the readings of its tokens. Time inputs and the
    prior are computed from them.

    Args:
        parameters: The model whose keys and values are cached.
        item_bytes: The size of a cached number in bytes: 4, or 2 in bfloat16.
        max_bytes: The largest size of all pages together in bytes. The cache is larger only if it would otherwise not
            hold one record of `max_readings` readings.
        max_readings: The largest number of readings of a record; by default the number that the model needs.

    Raises:
        ValueError: `max_readings` is None, and the model does not limit the context of irregular readings.

    Attributes:
        row_page: (largest number of readings of a record,) only with a mixture as the prior. Entry k is the column of
            the page table in which the page with the Cholesky row of a record's reading k is listed.
        row_place: Of the same shape and also only with a mixture as the prior. Entry k is the position of the same row
            in its page, in units of one double per component.
        pool: (bytes of all pages,) uint8, the contents of all pages.
    """

    PAGE_TOKENS = KV_PAGE_TOKENS
    """Tokens of a page: the attention scores of these tokens fill one vector of the processor."""

    def __init__(
        self, parameters: ModelParameters, item_bytes: int, max_bytes: int, max_readings: int | None = None
    ) -> None:
        config = parameters.config
        max_readings = max_cached_readings(parameters) if max_readings is None else max_readings
        # A key and a value of width d_model for each token and layer.
        page_bytes = 2 * config.layers * config.d_model * self.PAGE_TOKENS * item_bytes
        if parameters.schema.reading_times is not None or parameters.has_process:
            page_bytes += self.PAGE_TOKENS * READING_BYTES  # a multiple of the cache line, as the rest of the page is
        count_token_pages = partial(num_token_pages, parameters.cached_tokens_per_reading, self.PAGE_TOKENS)
        page_count_functions: list[Callable[[Ints], Ints]] = [count_token_pages]
        if parameters.has_mixture:
            # The Gaussian prior stores one row of its Cholesky factors per reading. A row consists of vectors with one
            # double (8 bytes) per component of the prior.
            padded_components = round_up(parameters.num_prior_components, PRIOR_LANES)
            vector_bytes = 8 * padded_components
            # A page must hold the longest row, because no row is split. Pages are whole cache lines.
            longest_row_bytes = (max_readings + ROW_EXTRA_VECTORS) * vector_bytes
            page_bytes = round_up(max(page_bytes, longest_row_bytes), CACHE_LINE_BYTES)
            self.row_page, self.row_place = _place_rows(max_readings, page_bytes // vector_bytes)
            num_row_pages = np.concatenate([[0], self.row_page + 1])  # entry n: the pages that n readings need
            page_count_functions.append(lambda num_readings: num_row_pages[num_readings])
        super().__init__(max_readings, page_count_functions, page_bytes, max_bytes)
        if parameters.has_mixture:
            # In the page table, the pages with rows follow those with keys and values.
            self.row_page += self.first_columns[1]
        self.pool = allocate_zeroed(self.num_pages * page_bytes)

    def copy_from(self, other: CpuKVCache, record_index: Ints, num_readings: Ints, num_new: Ints) -> None:
        """Replace the contents of this cache by copies of the first readings of R records of another cache.

        The copies are used to score possible further readings of open records without a change of these records. They
        get the rows 0 to R − 1 of this cache's page table, and pages for the further readings.

        Args:
            other: The cache to copy from, created for the same model.
            record_index: (R,) the row of each record in the page table of `other`.
            num_readings: (R,) how many readings of each record are copied.
            num_new: (R,) for how many further readings each copy gets pages.

        Raises:
            InvariantViolated: This cache has too few pages.
        """
        self.free(np.arange(len(self.num_cached_readings)))  # all previous contents
        self.ensure_capacity(len(record_index))
        own_index = np.arange(len(record_index))
        self.allocate_all(own_index, num_readings + num_new)
        # The pages to copy are those that growth from no reading to `num_readings` requires.
        row, column = self._table_entries(self._page_growth(np.zeros_like(num_readings), num_readings))
        own_pages, other_pages = (cache.pool.reshape(cache.num_pages, -1) for cache in (self, other))
        own_pages[self.page_table[row, column]] = other_pages[other.page_table[record_index[row], column]]
        # The further readings are counted although they are not computed yet, so that `free` also frees their pages.
        self.num_cached_readings[own_index] = num_readings + num_new


def _place_rows(num_readings: int, vectors_per_page: int) -> tuple[Ints, Ints]:
    """Assign the rows of a record's Cholesky factors to pages, so that each row lies in a single page.

    The Gaussian prior (a mixture of Gaussians) needs one row per reading of a record. A row consists of vectors with
    one double per component of the mixture. Row k, from 0, has k vectors of the factor, and `ROW_EXTRA_VECTORS` more.

    Args:
        num_readings: The number of rows, one for each reading of the longest record.
        vectors_per_page: The number of vectors of a page, enough for the longest row.

    Returns:
        Two arrays of shape (num_readings,). The first holds the index of each row's page among those pages of the
        record that hold rows. The second holds the position of the row's first vector in its page.
    """
    page, first_vector, places = 0, 0, []
    for k in range(num_readings):
        row_vectors = k + ROW_EXTRA_VECTORS
        if first_vector + row_vectors > vectors_per_page:
            page, first_vector = page + 1, 0
        places.append((page, first_vector))
        first_vector += row_vectors
    row_page, row_place = np.array(places, np.int64).reshape(-1, 2).T
    return np.ascontiguousarray(row_page), np.ascontiguousarray(row_place)
