"""A cache of attention keys and values of open records that PyTorch reads and writes.

`kv_cache.PagePool` decides which pages a record gets and which records are evicted.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deformer_stream.kernels.kv_cache import (
    CacheShape,
    PagePool,
    allocate_zeroed,
    max_cached_readings,
    num_token_pages,
)
from deformer_stream.model.deformer import DEformer, KVCacheView, StepOutput

Ints = NDArray[np.int64]


def torch_cache_shape(model: DEformer) -> CacheShape:
    """Return the properties of a model that determine the layout of its `TorchKVCache`."""
    config = model.config
    num_prior_components = 0 if model.gaussians is None else model.gaussians.num_components
    network = config.layers, config.heads, config.d_model, num_prior_components, model.has_cached_readings
    sensors = len(model.schema), model.schema.reading_times is not None, config.context_limit
    return "torch", *sensors, model.cached_tokens_per_reading, *network, model.dtype, model.device


class TorchKVCache(PagePool):
    """A cache of attention keys and values that PyTorch reads and writes, with one pool of pages per layer.

    Methods on NumPy arrays decide which pages are used (`locate_tokens`, `allocate_tokens`). Methods on tensors read
    and write those pages on the device of the model (`gather_pages`, `gather_readings`, `write`). The operations of
    the methods on tensors do not depend on the contents of the tensors, so that a CUDA graph can capture them.

    Padding is read with an attention weight of 0. Because 0 · NaN is NaN, padding must contain only finite numbers.
    Otherwise, a record for which a damaged model computed NaN would change the scores of other records. Therefore
    padding is written to one page and read from another. Values in pages are set to zero when the pages are freed.

    Args:
        model: The model whose keys and values are cached.
        max_bytes: The largest size of all pages together in bytes; the pages of one record always fit.

    Attributes:
        tokens_per_reading: The number of cached tokens of a reading: 2 if its query token z (which feature) is cached
            beside its observation token u (feature and value), else 1.
        padding_page: The index of an additional page, to which padding is written. It is never read for a record.
        blank_page: The index of an additional page, from which padding is read. It is never written and holds zeros.
        keys: One tensor per layer, (pages, heads, PAGE_TOKENS, width of a head).
        values: One tensor per layer, of the same shape as the keys.
        readings: (pages, PAGE_TOKENS, 2) for each token the feature code and the normalised value of its reading; None
            if the model does not need them.
        ages: (pages, PAGE_TOKENS) float64, for each token the seconds from the origin of the record to its reading;
            None if readings are not irregular.
    """

    PAGE_TOKENS = 8
    """Tokens of a page: few, so that short records waste little; not fewer, so that pages are copied in long pieces."""

    def __init__(self, model: DEformer, max_bytes: int) -> None:
        config = model.config
        self.tokens_per_reading, self.heads = model.cached_tokens_per_reading, config.heads
        self.device = model.device
        # Per token: a key and a value of width d_model in each layer. If the model needs the readings again, also two
        # numbers for the feature code and the value of the token's reading.
        numbers_per_token = 2 * config.layers * config.d_model + (2 if model.has_cached_readings else 0)
        # Ages are float64 whatever the dtype of the model, because they can be large.
        age_bytes = 8 if model.schema.reading_times is not None else 0
        page_bytes = (numbers_per_token * model.dtype.itemsize + age_bytes) * self.PAGE_TOKENS
        count_pages = partial(num_token_pages, self.tokens_per_reading, self.PAGE_TOKENS)
        super().__init__(max_cached_readings(model), (count_pages,), page_bytes, max_bytes)
        # Two additional pages, which belong to no record.
        self.padding_page, self.blank_page = self.num_pages, self.num_pages + 1
        num_all_pages = self.num_pages + 2
        # Heads before tokens, so that a record's pages of one head are gathered into one contiguous matrix.
        shape = (num_all_pages, config.heads, self.PAGE_TOKENS, config.d_model // config.heads)
        self.keys = [_zeros(shape, model) for _ in range(config.layers)]
        self.values = [_zeros(shape, model) for _ in range(config.layers)]
        self.readings = _zeros((num_all_pages, self.PAGE_TOKENS, 2), model) if model.has_cached_readings else None
        self.ages: Tensor | None = None
        if model.schema.reading_times is not None:
            self.ages = torch.zeros((num_all_pages, self.PAGE_TOKENS), dtype=torch.float64, device=model.device)

    def locate_tokens(self, record_index: Ints, num_readings: Ints | None = None) -> tuple[Ints, Ints]:
        """Return which pages hold the cached tokens of R records.

        Args:
            record_index: (R,) the row of each record in the page table.
            num_readings: (R,) how many of each record's first readings to locate; by default all cached ones.

        Returns:
            A pair of arrays. The first, (R, P), holds page indexes in the order of the tokens. P is the number of
            pages of the longest record; shorter records are padded with the index of a page of zeros. The second,
            (R,), is the number of tokens of each record.
        """
        num_readings = self.num_cached_readings[record_index] if num_readings is None else num_readings
        num_pages = self.num_pages_for(num_readings)
        column = np.arange(int(num_pages.max(initial=0)))
        pages = self.page_table[record_index, : len(column)]
        # This does not change the page table: indexing it with the array `record_index` has returned a copy.
        pages[column >= num_pages[:, None]] = self.blank_page
        return pages, num_readings * self.tokens_per_reading

    def allocate_tokens(self, record_index: Ints, num_new: Ints, num_tokens: int) -> tuple[Ints, Ints]:
        """Allocate pages for new readings of R records, and return where to write the tokens of a forward pass.

        If there are too few pages for a record, all its pages are freed and its new readings are not cached.

        Args:
            record_index: (R,) the row of each record in the page table.
            num_new: (R,) how many new readings of each record to cache.
            num_tokens: The number T of tokens that the forward pass computes for each record. Those after the tokens
                of a record's new readings are padding.

        Returns:
            A pair of arrays. The first, (R, T), is for each token the index of its page times `PAGE_TOKENS`, plus its
            position in the page. Tokens that are not cached get a page that belongs to no record. The second, (R,), is
            the number of new readings of each record that are cached.
        """
        fits = self.allocate(record_index, num_new)
        num_new = np.where(fits, num_new, 0)
        new_token = np.arange(num_tokens)
        num_cached_tokens = self.num_cached_readings[record_index] * self.tokens_per_reading
        token = num_cached_tokens[:, None] + new_token  # (R, T) position in the record
        is_cached = new_token < (num_new * self.tokens_per_reading)[:, None]
        # Column 0 stands in for tokens that are not cached, whose page is replaced below.
        table_column = np.where(is_cached, token // self.PAGE_TOKENS, 0)
        page = np.take_along_axis(self.page_table[record_index], table_column, 1)
        page = np.where(is_cached, page, self.padding_page)
        token_places = page * self.PAGE_TOKENS + token % self.PAGE_TOKENS
        # A record without pages for its new readings would have a gap in the cache, so it is removed completely.
        self.free(record_index[~fits])
        return token_places, num_new

    def gather_pages(self, pages: Tensor, num_tokens: Tensor) -> KVCacheView:
        """Return copies of the cached keys and values of R records, padded to the same number of tokens.

        Args:
            pages: (R, P) the indexes of the pages that hold each record's tokens, from `locate_tokens`.
            num_tokens: (R,) the number of cached tokens of each record; those after them are padding.

        Returns:
            The keys and the values of each layer, (R, heads, P · PAGE_TOKENS, width of a head); the number of tokens
            of each record; and the readings to which the tokens belong, as `gather_readings` and `gather_ages` return
            them.
        """
        R, P = pages.shape
        # A pool (the tensor with all keys, or all values, of a layer) is an array of blocks, one per page and head. The
        # blocks of the records' pages are copied in the order (R, heads, P).
        heads = torch.arange(self.heads, device=pages.device).unsqueeze(1)
        block_index = pages.unsqueeze(1) * self.heads + heads

        def gather_pool(pool: Tensor) -> Tensor:
            gathered = pool.view(len(pool) * self.heads, -1).index_select(0, block_index.flatten())
            return gathered.view(R, self.heads, P * self.PAGE_TOKENS, pool.shape[-1])

        keys, values = ([gather_pool(pool) for pool in pools] for pools in (self.keys, self.values))
        return KVCacheView(keys, values, num_tokens, self.gather_readings(pages), self.gather_ages(pages))

    def gather_readings(self, pages: Tensor) -> Tensor | None:
        """Return the readings to which the cached tokens of R records belong.

        Args:
            pages: (R, P) the indexes of the pages that hold each record's tokens, from `locate_tokens`.

        Returns:
            (R, P · PAGE_TOKENS, 2) for each token the feature code and the normalised value of its reading; None if the
            model does not cache readings.
        """
        if self.readings is None:
            return None
        R, P = pages.shape
        return self.readings.index_select(0, pages.flatten()).view(R, P * self.PAGE_TOKENS, 2)

    def gather_ages(self, pages: Tensor) -> Tensor | None:
        """Return the ages of the readings to which the cached tokens of R records belong.

        Args:
            pages: (R, P) the indexes of the pages that hold each record's tokens, from `locate_tokens`.

        Returns:
            (R, P · PAGE_TOKENS) float64 seconds from the origin of the record; None if readings are not irregular.
        """
        if self.ages is None:
            return None
        return self.ages.index_select(0, pages.flatten()).view(len(pages), -1)

    def write(self, output: StepOutput, token_places: Tensor) -> None:
        """Write the keys and values of a forward pass into the pages.

        Args:
            output: The result of the pass, with T tokens for each of R records.
            token_places: (R, T) the place in the cache for each token, from `allocate_tokens`: the index of its page
                times `PAGE_TOKENS`, plus its position in the page.
        """
        heads = torch.arange(self.heads, device=token_places.device).unsqueeze(1)
        page = token_places.unsqueeze(1) // self.PAGE_TOKENS
        position = token_places.unsqueeze(1) % self.PAGE_TOKENS
        # (R, heads, T) flat index of each token in a pool (the tensor with all keys, or all values, of a layer), whose
        # first dimensions are (pages, heads, PAGE_TOKENS).
        index = ((page * self.heads + heads) * self.PAGE_TOKENS + position).flatten()
        for pools, new_by_layer in ((self.keys, output.keys), (self.values, output.values)):
            for pool, new in zip(pools, new_by_layer, strict=True):
                width = pool.shape[-1]
                pool.view(-1, width).index_copy_(0, index, new.reshape(-1, width))
        if self.readings is not None and output.readings is not None:
            self.readings.view(-1, 2).index_copy_(0, token_places.flatten(), output.readings.reshape(-1, 2))
        if self.ages is not None and output.ages is not None:
            self.ages.view(-1).index_copy_(0, token_places.flatten(), output.ages.flatten())

    def gather(self, record_index: Ints, num_readings: Ints | None = None) -> KVCacheView:
        """Return copies of the cached keys and values of R records, padded to the same number of tokens.

        Args:
            record_index: (R,) the row of each record in the page table.
            num_readings: (R,) how many of each record's first readings to include; by default all cached ones.

        Returns:
            The view of the cache that `gather_pages` returns.
        """
        pages, num_tokens = self.locate_tokens(record_index, num_readings)
        return self.gather_pages(self._to_device(pages), self._to_device(num_tokens))

    def append(self, record_index: Ints, output: StepOutput, num_new: Ints) -> None:
        """Write the keys and values of new readings of R records, which a forward pass has computed, into the cache.

        If there are too few pages for a record, all its readings are removed from the cache.

        Args:
            record_index: (R,) the row of each record in the page table.
            output: The result of the forward pass. It has equally many tokens for each record. Those after the tokens
                of a record's new readings are padding.
            num_new: (R,) how many new readings of each record to cache.
        """
        # Keys have the shape (R, heads, tokens of each record with padding, width of a head).
        num_tokens = output.keys[0].shape[2]
        token_places, num_cached_new = self.allocate_tokens(record_index, num_new, num_tokens)
        self.write(output, self._to_device(token_places))
        # `num_cached_new` is 0 for the records that `allocate_tokens` has removed.
        self.num_cached_readings[record_index] += num_cached_new

    def _clear_pages(self, pages: Ints) -> None:
        """Set the attention values in freed pages to zero.

        If the next record of a page fills only a part of it, the rest is read as padding. Padding has the attention
        weight 0, but 0 · NaN is NaN. Keys need not be cleared: attention scores of padded keys are replaced by −∞.

        Args:
            pages: Page indexes.
        """
        page_index = self._to_device(pages)
        with torch.inference_mode():
            for pool in self.values:
                pool.index_fill_(0, page_index, 0.0)

    def _to_device(self, array: Ints) -> Tensor:
        """Return an array as a tensor on the device of the model."""
        return torch.from_numpy(array).to(self.device)


def _zeros(shape: tuple[int, ...], model: DEformer) -> Tensor:
    """Return a tensor of zeros with the dtype and the device of the model.

    On the CPU its memory becomes resident only when it is touched. The tensor must not be uninitialised, because
    unused places are read with an attention weight of 0, and 0 · NaN is NaN.
    """
    if model.device.type != "cpu":
        return torch.zeros(shape, dtype=model.dtype, device=model.device)
    zero_bytes = torch.from_numpy(allocate_zeroed(math.prod(shape) * model.dtype.itemsize))
    return zero_bytes.view(model.dtype).view(shape)
