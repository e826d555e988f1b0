"""Keys and values of open records, in pages, within a bound.

The cache is an accelerator and nothing else: a record's log of readings is the truth, and whatever is missing here is
rebuilt by prefill. So it may drop any record at any time, and drops the least recently used ones when it is full.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deformer_stream.core.model import DEformer, Extension, Past

PAGE_TOKENS = 8
"""Tokens a page holds: small records waste little, and gathering stays a few large copies."""
ALIGNED = 64
"""Bytes of a cache line, where pages begin."""


Shape = tuple[object, ...]
"""What two models must have in common to keep their keys and values in one cache."""


def shape_of(model: DEformer) -> Shape:
    config = model.config
    network = config.layers, config.heads, config.d_model, model.gaussians is not None
    return len(model.schema), model.tokens_kept, *network, model.dtype, model.device


class KeyValueCache:
    """A pool of pages per layer, a page table and a length per slot. A slot is a record's place in the engine.

    memory: bytes all pages may take together (at least one record always fits). Positions are counted in readings;
    a reading leaves `DEformer.tokens_kept` tokens.
    """

    def __init__(self, model: DEformer, memory: int) -> None:
        config = model.config
        self.kept = model.tokens_kept
        self.heads = config.heads
        self.pages_per_record = -(-len(model.schema) * self.kept // PAGE_TOKENS)
        guided = model.gaussians is not None
        page_bytes = (2 * config.layers * config.d_model + 2 * guided) * PAGE_TOKENS * model.dtype.itemsize
        self.page_bytes = page_bytes
        self.pages = max(self.pages_per_record, memory // page_bytes)
        # Heads before tokens, so that a record's pages of one head come out of a gather as one contiguous matrix.
        shape = (self.pages, config.heads, PAGE_TOKENS, config.d_model // config.heads)
        self.keys, self.values = ([_zeros(shape, model) for _ in range(config.layers)] for _ in range(2))
        self.readings = _zeros((self.pages, PAGE_TOKENS, 2), model) if guided else None
        self.device = model.device
        self.free = np.arange(self.pages - 1, -1, -1)
        self.free_count = self.pages
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

    def _held(self, readings: NDArray[np.int64]) -> NDArray[np.int64]:
        """Pages that so many readings take."""
        return -(-readings * self.kept // PAGE_TOKENS)

    def pin(self, slots: NDArray[np.int64]) -> None:
        """Say that these slots, and only these, are in use: they are not evicted until the next call."""
        self.clock += 1
        self.used[slots] = self.clock

    def gather(self, slots: NDArray[np.int64]) -> Past:
        """The pasts of R slots, padded to the longest."""
        lengths = self.length[slots]
        pages = int(self._held(lengths.max(keepdims=True))[0]) if len(slots) else 0
        # (R, H, pages) in that order: index (page, head) pairs of the pools.
        pairs = self.table[slots, :pages][:, None, :] * self.heads + np.arange(self.heads)[:, None]
        index = torch.from_numpy(pairs.reshape(-1)).to(self.device)

        def gathered(pool: Tensor) -> Tensor:
            rows = pool.view(self.pages * self.heads, -1).index_select(0, index)
            return rows.view(len(slots), self.heads, pages * PAGE_TOKENS, pool.shape[-1])

        lengths_in_tokens = torch.from_numpy(lengths * self.kept).to(self.device)
        readings = None
        if self.readings is not None:
            held = torch.from_numpy(self.table[slots, :pages].reshape(-1)).to(self.device)
            readings = self.readings.index_select(0, held).view(len(slots), pages * PAGE_TOKENS, 2)
        keys, values = ([gathered(pool) for pool in pools] for pools in (self.keys, self.values))
        return Past(keys, values, lengths_in_tokens, readings)

    def append(self, slots: NDArray[np.int64], extension: Extension, counts: NDArray[np.int64]) -> None:
        """Keep the first `counts` (R,) new readings of each of R slots; a slot that gets no page is dropped."""
        fits = self._reserve(slots, counts)
        self.drop(slots[~fits])
        counts = np.where(fits, counts, 0)
        M = extension.keys[0].shape[2]
        kept = np.arange(M) < (counts * self.kept)[:, None]
        token = np.where(kept, (self.length[slots] * self.kept)[:, None] + np.arange(M), 0)
        page = np.take_along_axis(self.table[slots], token // PAGE_TOKENS, 1)
        # (R, H, M) places of single tokens in the pools.
        head = np.arange(self.heads)[:, None]
        place = (page[:, None] * self.heads + head) * PAGE_TOKENS + (token % PAGE_TOKENS)[:, None]
        everything = bool(kept.all())
        chosen = np.flatnonzero(np.broadcast_to(kept[:, None], place.shape))
        flat = torch.from_numpy(place.reshape(-1)[chosen]).to(self.device)
        source = torch.from_numpy(chosen).to(self.device)
        for pools, added in ((self.keys, extension.keys), (self.values, extension.values)):
            for pool, block in zip(pools, added, strict=True):
                rows = block.reshape(-1, pool.shape[-1])
                pool.view(-1, pool.shape[-1]).index_copy_(0, flat, rows if everything else rows.index_select(0, source))
        if self.readings is not None and extension.readings is not None:
            single = torch.from_numpy((page * PAGE_TOKENS + token % PAGE_TOKENS)[kept]).to(self.device)
            self.readings.view(-1, 2).index_copy_(0, single, extension.readings[torch.from_numpy(kept)])
        self.length[slots] += counts

    def _reserve(self, slots: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Give each slot the pages for so many more readings, evicting others; (R,) bool, whether it got them."""
        have = self._held(self.length[slots])
        need = self._held(self.length[slots] + counts) - have
        short = int(need.sum()) - self.free_count
        if short > 0:
            self._evict(short)
        fits = np.cumsum(need) <= self.free_count
        need = np.where(fits, need, 0)
        taken = int(need.sum())
        pages = self.free[self.free_count - taken : self.free_count]
        self.free_count -= taken
        row = np.repeat(np.arange(len(slots)), need)
        column = np.arange(taken) - np.repeat(np.cumsum(need) - need, need) + np.repeat(have, need)
        self.table[slots[row], column] = pages
        return fits

    def _evict(self, pages: int) -> None:
        """Drop the least recently used slots until at least `pages` pages came free, or only pinned ones are left."""
        slots = np.flatnonzero((self.length > 0) & (self.used < self.clock))
        slots = slots[np.argsort(self.used[slots], kind="stable")]
        enough = int(np.searchsorted(np.cumsum(self._held(self.length[slots])), pages)) + 1
        self.drop(slots[:enough])

    def drop(self, slots: NDArray[np.int64]) -> None:
        """Forget these slots; their readings will be prefilled again if they are asked for."""
        held = self._held(self.length[slots])
        row = np.repeat(np.arange(len(slots)), held)
        column = np.arange(len(row)) - np.repeat(np.cumsum(held) - held, held)
        self.free[self.free_count : self.free_count + len(row)] = self.table[slots[row], column]
        self.free_count += len(row)
        self.length[slots] = 0


def _zeros(shape: tuple[int, ...], model: DEformer) -> Tensor:
    """Zeros, for what a page does not hold yet is multiplied by a weight of 0, and 0 · NaN is NaN.

    NumPy's zeros are not resident until they are touched, so the whole bound can be asked for at once."""
    if model.device.type != "cpu":
        return torch.zeros(shape, dtype=model.dtype, device=model.device)
    size = math.prod(shape) * model.dtype.itemsize
    raw = np.zeros(size + ALIGNED, np.uint8)
    first = -raw.ctypes.data % ALIGNED
    return torch.from_numpy(raw[first : first + size]).view(model.dtype).view(shape)


def tensor(array: NDArray[np.generic], model: DEformer) -> Tensor:
    """An array on the model's device, numbers in its dtype."""
    t = torch.from_numpy(array)
    return t.to(model.device, model.dtype) if t.is_floating_point() else t.to(model.device)
