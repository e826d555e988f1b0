"""Joint draws of what is missing: the known readings first, then the others one by one, each given all before it.

That is how the paper fills in images (section 4.1); with nothing known it generates whole records.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.engine.queries import on_grid
from deformer_stream.kernels.kv_cache import KeyValueCache
from deformer_stream.model.deformer import DEformer, to_tensor
from trainer.fit import Interrupted

Floats = NDArray[np.float64]
BLOCK_BYTES = 2**30
"""Most bytes of keys and values of the records that are drawn side by side."""


def complete(model: DEformer, values: Floats, seed: int, stop: Callable[[], bool] = lambda: False) -> Floats:
    """Records with their NaN replaced by one joint draw given the rest, in a random order of each record's own.

    values: (N, F) raw units, equally many NaN in each record. Raises ValueError otherwise, `Interrupted` when `stop`
    says so.
    """
    missing = np.isnan(values).sum(1)
    if len(values) and (missing != missing[0]).any():
        raise ValueError("every record needs the same number of missing readings")
    cache = KeyValueCache(model, 0)
    block = max(1, BLOCK_BYTES // (cache.pages_per_record * cache.page_bytes))
    orders, draws = np.random.default_rng(seed), torch.Generator(model.device).manual_seed(seed)
    parts = [_block(model, values[i : i + block], orders, draws, stop) for i in range(0, len(values), block)]
    return np.concatenate(parts) if parts else values


def _block(
    model: DEformer, values: Floats, orders: np.random.Generator, draws: torch.Generator, stop: Callable[[], bool]
) -> Floats:
    n, schema = len(values), model.schema
    slots = np.arange(n)
    codes = np.argsort(orders.random(values.shape) + np.isnan(values), 1)  # known ones lie below 1
    raw = np.take_along_axis(values, codes, 1)
    known = schema.normalise(codes, raw)
    first = int((~np.isnan(values[0])).sum())
    cache = KeyValueCache(model, 0)
    cache = KeyValueCache(model, n * cache.pages_per_record * cache.page_bytes)
    cache.grow(n)
    fed = 0
    for k in range(first, values.shape[1]):
        # A pass brings what is new and asks for the next reading, whose value it never looks at.
        new = slice(fed, k + 1)
        with torch.inference_mode():
            asked = to_tensor(np.nan_to_num(known[:, new]), model)
            seen = model.forward_cached(to_tensor(codes[:, new], model), asked, cache.gather(slots))
            cache.append(slots, seen, np.full(n, k - fed))
            draw = seen.conditional[:, -1].sample(draws).double().cpu().numpy()
        fed = k
        raw[:, k] = on_grid(schema, codes[:, k], schema.denormalise(codes[:, k], draw))
        known[:, k] = schema.normalise(codes[:, k], raw[:, k])
        if stop():
            raise Interrupted
    drawn = values.copy()
    np.put_along_axis(drawn, codes, raw, 1)
    return drawn
