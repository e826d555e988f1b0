"""Keys and values of open records as torch sees them: what `DEformer.extend` asks for and leaves behind."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deformer_stream.core.model import DEformer, Extension, Past
from deformer_stream.core.pages import Pages, zeroed

PAGE_TOKENS = 8
"""Tokens a page holds: small records waste little, and gathering stays a few large copies."""

Shape = tuple[object, ...]
"""What two models must have in common to keep their keys and values in one cache."""


def shape_of(model: DEformer) -> Shape:
    config = model.config
    guides = 0 if model.gaussians is None else model.gaussians.components
    network = config.layers, config.heads, config.d_model, guides, model.keeps_readings
    return len(model.schema), model.tokens_kept, *network, model.dtype, model.device


class KeyValueCache(Pages):
    """A pool of pages per layer. memory: bytes all pages may take together (at least one record always fits).
    Positions are counted in readings; a reading leaves `DEformer.tokens_kept` tokens."""

    def __init__(self, model: DEformer, memory: int) -> None:
        config = model.config
        self.kept, self.heads, self.device = model.tokens_kept, config.heads, model.device
        page_bytes = (
            (2 * config.layers * config.d_model + 2 * model.keeps_readings) * PAGE_TOKENS * model.dtype.itemsize
        )
        super().__init__(len(model.schema), (lambda n: -(-n * self.kept // PAGE_TOKENS),), page_bytes, memory)
        # Heads before tokens, so that a record's pages of one head come out of a gather as one contiguous matrix.
        shape = (self.pages, config.heads, PAGE_TOKENS, config.d_model // config.heads)
        self.keys, self.values = ([_zeros(shape, model) for _ in range(config.layers)] for _ in range(2))
        self.readings = _zeros((self.pages, PAGE_TOKENS, 2), model) if model.keeps_readings else None

    def gather(self, slots: NDArray[np.int64], lengths: NDArray[np.int64] | None = None) -> Past:
        """The pasts of R slots, padded to the longest; or their first so many readings, (R,)."""
        lengths = self.length[slots] if lengths is None else lengths
        pages = int(self.held(lengths.max(keepdims=True))[0]) if len(slots) else 0
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
        fits = self.reserve(slots, counts)
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


def _zeros(shape: tuple[int, ...], model: DEformer) -> Tensor:
    """Zeros, for what a page does not hold yet is multiplied by a weight of 0, and 0 · NaN is NaN."""
    if model.device.type != "cpu":
        return torch.zeros(shape, dtype=model.dtype, device=model.device)
    raw = torch.from_numpy(zeroed(math.prod(shape) * model.dtype.itemsize))
    return raw.view(model.dtype).view(shape)


def tensor(array: NDArray[np.generic], model: DEformer) -> Tensor:
    """An array on the model's device, numbers in its dtype."""
    t = torch.from_numpy(array)
    return t.to(model.device, model.dtype) if t.is_floating_point() else t.to(model.device)
