"""Keys and values of open records as torch sees them: what `DEformer.extend` asks for and leaves behind."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deformer_stream.core.model import DEformer, Extension, Past
from deformer_stream.core.pages import Ints, Pages, zeroed

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
    Positions are counted in readings; a reading leaves `DEformer.tokens_kept` tokens.

    What is decided about pages is decided on arrays (`seen`, `room`), what is read and written on the device is a
    function of tensors, without a look at what they hold (`past`, `keep`): so it can be recorded (`core.passes`)."""

    def __init__(self, model: DEformer, memory: int) -> None:
        config, kept = model.config, model.tokens_kept
        self.kept, self.heads, self.device = kept, config.heads, model.device
        page_bytes = (
            (2 * config.layers * config.d_model + 2 * model.keeps_readings) * PAGE_TOKENS * model.dtype.itemsize
        )
        super().__init__(len(model.schema), (lambda n: -(-n * kept // PAGE_TOKENS),), page_bytes, memory)
        self.nowhere = self.pages  # a page more, where padding goes
        # Heads before tokens, so that a record's pages of one head come out of a gather as one contiguous matrix.
        shape = (self.pages + 1, config.heads, PAGE_TOKENS, config.d_model // config.heads)
        self.keys, self.values = ([_zeros(shape, model) for _ in range(config.layers)] for _ in range(2))
        self.readings = _zeros((self.pages + 1, PAGE_TOKENS, 2), model) if model.keeps_readings else None

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

    def past(self, pages: Tensor, tokens: Tensor) -> Past:
        """What is there, see `seen`, padded to the longest."""
        R, P = pages.shape
        # (R, H, P) in that order: index (page, head) pairs of the pools.
        pairs = pages.unsqueeze(1) * self.heads + torch.arange(self.heads, device=pages.device).unsqueeze(1)

        def gathered(pool: Tensor) -> Tensor:
            rows = pool.view(len(pool) * self.heads, -1).index_select(0, pairs.flatten())
            return rows.view(R, self.heads, P * PAGE_TOKENS, pool.shape[-1])

        keys, values = ([gathered(pool) for pool in pools] for pools in (self.keys, self.values))
        return Past(keys, values, tokens, self.told(pages))

    def told(self, pages: Tensor) -> Tensor | None:
        """`Past.readings`, alone."""
        if self.readings is None:
            return None
        R, P = pages.shape
        return self.readings.index_select(0, pages.flatten()).view(R, P * PAGE_TOKENS, 2)

    def keep(self, extension: Extension, places: Tensor) -> None:
        """Keep what readings have left at these places, see `room`."""
        heads = torch.arange(self.heads, device=places.device).unsqueeze(1)
        page, within = places.unsqueeze(1) // PAGE_TOKENS, places.unsqueeze(1) % PAGE_TOKENS
        flat = ((page * self.heads + heads) * PAGE_TOKENS + within).flatten()
        for pools, added in ((self.keys, extension.keys), (self.values, extension.values)):
            for pool, block in zip(pools, added, strict=True):
                pool.view(-1, pool.shape[-1]).index_copy_(0, flat, block.reshape(-1, pool.shape[-1]))
        if self.readings is not None and extension.readings is not None:
            self.readings.view(-1, 2).index_copy_(0, places.flatten(), extension.readings.reshape(-1, 2))

    def gather(self, slots: Ints, lengths: Ints | None = None) -> Past:
        """The pasts of R slots, padded to the longest; or their first so many readings, (R,)."""
        pages, tokens = self.seen(slots, lengths)
        return self.past(self._sent(pages), self._sent(tokens))

    def append(self, slots: Ints, extension: Extension, counts: Ints) -> None:
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


def tensor(array: NDArray[np.generic], model: DEformer) -> Tensor:
    """An array on the model's device, numbers in its dtype."""
    t = torch.from_numpy(array)
    return t.to(model.device, model.dtype) if t.is_floating_point() else t.to(model.device)
