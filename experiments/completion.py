"""Fill missing readings with joint draws, as the paper does with images (section 4.1).

The known readings of a record come first in the order. The missing ones follow one by one, each drawn given all
readings before it. If no reading is known, this generates records.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.engine.estimates import round_to_quantum
from deformer_stream.kernels.torch_kv_cache import TorchKVCache
from deformer_stream.model.deformer import DEformer, to_tensor
from trainer.fit import Interrupted

Floats = NDArray[np.float64]

MAX_CACHE_BYTES = 2**30
"""Largest size of the keys and values of the records that are filled in one batch."""


def fill_missing(model: DEformer, values: Floats, seed: int, should_stop: Callable[[], bool] = lambda: False) -> Floats:
    """Return records in which one joint draw, given the known readings, replaces the missing ones.

    The order of the missing readings is random, and different for each record.

    Args:
        model: The model to draw from.
        values: (N, F) records in raw units, NaN for missing. All records have the same number of missing readings.
        seed: Seed of the orders and of the draws.
        should_stop: Returns whether to stop.

    Raises:
        ValueError: The records have different numbers of missing readings.
        Interrupted: `should_stop` returned true.
    """
    num_missing = np.isnan(values).sum(1)
    if len(values) and (num_missing != num_missing[0]).any():
        raise ValueError("every record needs the same number of missing readings; fill the others in another call")
    cache = TorchKVCache(model, 0)
    batch_size = max(1, MAX_CACHE_BYTES // (cache.pages_per_record * cache.page_bytes))
    order_generator, draw_generator = np.random.default_rng(seed), torch.Generator(model.device).manual_seed(seed)
    batches = [
        _fill_batch(model, values[i : i + batch_size], order_generator, draw_generator, should_stop)
        for i in range(0, len(values), batch_size)
    ]
    return np.concatenate(batches) if batches else values


def _fill_batch(
    model: DEformer,
    values: Floats,
    order_generator: np.random.Generator,
    draw_generator: torch.Generator,
    should_stop: Callable[[], bool],
) -> Floats:
    """Fill the missing readings of records whose keys and values fit into memory; see `fill_missing`."""
    num_records, schema = len(values), model.schema
    record_indexes = np.arange(num_records)
    # Known readings get keys below 1, so they come before the missing ones.
    codes = np.argsort(order_generator.random(values.shape) + np.isnan(values), 1)
    raw = np.take_along_axis(values, codes, 1)
    normalised = schema.normalise(codes, raw)
    num_known = int((~np.isnan(values[0])).sum())
    cache = TorchKVCache(model, 0)
    cache = TorchKVCache(model, num_records * cache.pages_per_record * cache.page_bytes)
    cache.ensure_capacity(num_records)
    num_cached = 0
    for k in range(num_known, values.shape[1]):
        # A step adds the readings that are not cached yet and returns the conditional of reading k. The conditional of
        # a reading does not depend on its own value, so any number can stand for the value that is still missing.
        new = slice(num_cached, k + 1)
        with torch.inference_mode():
            inputs = to_tensor(np.nan_to_num(normalised[:, new]), model)
            step = model.forward_cached(to_tensor(codes[:, new], model), inputs, cache.gather(record_indexes))
            cache.append(record_indexes, step, np.full(num_records, k - num_cached))
            draw = step.conditional[:, -1].sample(draw_generator).double().cpu().numpy()
        num_cached = k
        raw[:, k] = round_to_quantum(schema, codes[:, k], schema.denormalise(codes[:, k], draw))
        normalised[:, k] = schema.normalise(codes[:, k], raw[:, k])
        if should_stop():
            raise Interrupted
    filled = values.copy()
    np.put_along_axis(filled, codes, raw, 1)
    return filled
