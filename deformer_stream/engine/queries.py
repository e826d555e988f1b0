"""What else the density knows: the missing readings of a record, and records that could have been.

Values are matrices (N, F) in raw units: a number, a label's code, or NaN where nothing was observed. Context conditions
the others but has no distribution of its own, so it is neither filled nor drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.kernels.kv_cache import KeyValueCache
from deformer_stream.model.deformer import DEformer, KVCacheView, StepOutput, to_tensor
from deformer_stream.model.distributions import Conditional
from deformer_stream.model.schema import Schema

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

GROUP_READINGS = 8192
"""Readings that go through the network at once."""
MOST_DRAWN = 1024
"""Records drawn side by side."""
MEMORY = 256 * 2**20
"""Bytes that their keys and values may take."""


@dataclass(frozen=True, slots=True)
class Filled:
    """Missing readings, each (N, F), NaN where none was asked for.

    value: conditional median on the sensor's grid, or the likeliest label's code. low, high: bounds of the central
    interval, mean: conditional mean, mode: likeliest value (of normalised readings) on the sensor's grid, all NaN for
    discrete features. The median has the least absolute error, the mean the least squared one. All are held within
    `reaches`.
    """

    value: Floats
    low: Floats
    high: Floats
    mean: Floats
    mode: Floats


def fill(model: DEformer, values: Floats, asked: NDArray[np.bool_], interval: float = 0.9) -> Filled:
    """Every asked-for reading given all present ones of its record, never given another filled one.

    values: (N, F). asked: (N, F); what is present already, or context, is left out. interval: mass from low to high.
    """
    filled = Filled(*(np.full(values.shape, np.nan) for _ in range(5)))
    for rows, codes, conditional in conditionals(model, values, asked):
        where = rows, codes
        found = conditional.quantiles(((1 - interval) / 2, 0.5, (1 + interval) / 2)).double().cpu().numpy()
        for target, quantile in zip((filled.low, filled.value, filled.high), found, strict=True):
            target[where] = raw_within_reach(model.schema, codes, quantile)
        points, weights = (part.double().cpu().numpy() for part in conditional.nodes())
        filled.mean[where] = (weights * raw_within_reach(model.schema, codes[:, None], points)).sum(-1)
        filled.mode[where] = raw_within_reach(model.schema, codes, conditional.mode().double().cpu().numpy())
        for target in (filled.value, filled.mode):
            target[where] = on_grid(model.schema, codes, target[where])
        discrete = model.schema.discrete[codes]
        labels = likeliest(model.schema, codes, conditional)
        filled.value[where] = np.where(discrete, labels, filled.value[where])
        for target in (filled.low, filled.high, filled.mean, filled.mode):
            target[where] = np.where(discrete, np.nan, target[where])
    return filled


def quantiles(model: DEformer, values: Floats, asked: NDArray[np.bool_], qs: Sequence[float]) -> Floats:
    """(Q, N, F) conditional quantiles of every asked-for continuous reading given all present ones of its record, held
    within `reaches`; NaN elsewhere. values, asked: as for `fill`. qs: between 0 and 1."""
    out = np.full((len(qs), *values.shape), np.nan)
    for rows, codes, conditional in conditionals(model, values, asked & ~model.schema.discrete):
        found = conditional.quantiles(qs).double().cpu().numpy()
        out[:, rows, codes] = raw_within_reach(model.schema, codes, found)
    return out


def conditionals(model: DEformer, values: Floats, asked: NDArray[np.bool_]) -> Iterator[tuple[Ints, Ints, Conditional]]:
    """What is asked for, some at a time: rows, codes and conditionals of shape (M,). values, asked: as for `fill`.

    Records with equally many present readings go together: these are seen once, then each pass asks for one feature
    more."""
    known = ~np.isnan(values)
    asked = asked & ~known & ~model.schema.context
    for _, group in _groups(known.sum(1), np.flatnonzero(asked.any(1))):
        size = max(1, GROUP_READINGS // (int(known[group[0]].sum()) + 1))
        for start in range(0, len(group), size):
            rows = group[start : start + size]
            codes = np.nonzero(known[rows])[1].reshape(len(rows), -1)
            past = _past(model, codes, np.take_along_axis(values[rows], codes, 1))
            wanted = np.argsort(~asked[rows], 1, kind="stable")
            for a in range(int(asked[rows].sum(1).max())):
                some = np.flatnonzero(asked[rows, wanted[:, a]])
                asks = wanted[some, a]
                yield rows[some], asks, _ask(model, asks, past if len(some) == len(rows) else _rows(past, some, model))


def _groups(kind: Ints, rows: Ints) -> Iterator[tuple[int, Ints]]:
    """Rows with the same kind, kind by kind. kind: (N,)."""
    for one in np.unique(kind[rows]).tolist():
        yield one, rows[kind[rows] == one]


def _past(model: DEformer, codes: Ints, values: Floats) -> KVCacheView | None:
    """Keys and values of (R, K) readings, None where there are none."""
    if not codes.shape[1]:
        return None
    with torch.inference_mode():
        normal = to_tensor(model.schema.normalise(codes, values), model)
        seen = model.prefill(to_tensor(codes, model), normal)
        lengths = torch.full((len(codes),), codes.shape[1] * model.tokens_kept, device=model.device)
    return KVCacheView(seen.keys, seen.values, lengths, seen.readings)


def _rows(past: KVCacheView | None, rows: Ints, model: DEformer) -> KVCacheView | None:
    if past is None:
        return None
    index = to_tensor(rows, model)
    keys, values = ([t[index] for t in part] for part in (past.keys, past.values))
    return KVCacheView(keys, values, past.lengths[index], None if past.readings is None else past.readings[index])


def _ask(model: DEformer, asks: Ints, past: KVCacheView | None) -> Conditional:
    """The conditionals of one feature per record, (R,). The value that goes with the question is never looked at."""
    with torch.inference_mode():
        codes = to_tensor(asks[:, None], model)
        nothing = torch.zeros(codes.shape, dtype=model.dtype, device=model.device)
        extension = model.prefill(codes, nothing) if past is None else model.forward_cached(codes, nothing, past)
        return extension.conditional[:, 0]


def likeliest(schema: Schema, codes: Ints, conditional: Conditional) -> Ints:
    """S, the code of the likeliest label that training saw, 0 for continuous features. codes: S."""
    mass = conditional.log_mass.double().cpu().numpy()
    own = np.arange(mass.shape[-1]) < np.maximum(schema.label_counts[codes], 1)[..., None]
    return np.asarray(np.where(own, mass, -np.inf).argmax(-1), np.int64)


def reaches(schema: Schema) -> tuple[Floats, Floats]:
    """(F,) lowest and highest raw value that is filled in: the range seen in training and its width on either side.

    Normalised values far out are logarithms, so that a Gaussian there has raw values without bound: scoring wants that,
    but one reading out of place must not put a thousand standard deviations into the gap beside it."""
    ends = np.array(
        [(-np.inf, np.inf) if f.low is None or f.high is None else (f.low, f.high) for f in schema.features]
    )
    low, high = ends.T
    return low - (high - low), high + (high - low)


def raw_within_reach(schema: Schema, codes: Ints, values: Floats) -> Floats:
    """Normalised values as raw ones within `reaches`. codes: S or what broadcasts to it, values: S."""
    low, high = reaches(schema)
    return np.clip(schema.denormalise(codes, values), low[codes], high[codes])


def on_grid(schema: Schema, codes: Ints, values: Floats) -> Floats:
    """Raw values moved to the nearest one that their sensor can give; others stay. codes, values: S."""
    step = np.array([f.quantum or np.nan for f in schema.features])
    origin = np.array([f.low or 0.0 for f in schema.features])
    rest = origin - step * np.round(origin / step)
    origin, step = np.where(np.abs(rest) < 1e-6 * step, 0.0, origin)[codes], step[codes]
    with np.errstate(invalid="ignore"):
        k = np.round((values - origin) / step)
        parts = np.round(1 / step)
        # Three tenths are 3 / 10 rather than 3 · 0.1, which floating point puts beside 0.3.
        even = (parts > 0) & (np.abs(parts * step - 1) < 1e-9)
        grid = origin + np.where(even, k / np.where(even, parts, 1.0), k * step)
    return np.where(np.isnan(step), values, grid)


def sample(model: DEformer, count: int, seed: int = 0, memory: int = MEMORY) -> Iterator[Floats]:
    """Draw whole records, each in a random order of its own, through the cache; blocks (n, F), `count` rows in all.

    memory: bytes of cached keys and values. Equal arguments draw equal records.
    """
    orders, draws = np.random.default_rng(seed), torch.Generator(model.device).manual_seed(seed)
    nothing = np.full((count, len(model.schema)), np.nan)
    modelled = np.flatnonzero(~model.schema.context)
    for part in _blocks(model, count, memory):
        codes = modelled[np.argsort(orders.random((part.stop - part.start, len(modelled))), 1)]
        yield _draw(model, nothing[part], codes, 0, draws)


def complete(
    model: DEformer, values: Floats, asked: NDArray[np.bool_], draws: int, seed: int = 0, memory: int = MEMORY
) -> Floats:
    """(draws, N, F) joint draws of all asked-for readings of a record given its present ones, each in a random order of
    its own, through the cache; what is present stands there as it is, the rest is NaN.

    values: (N, F). asked: (N, F); what is present already, or context, is left out. Equal arguments draw equal records.
    Drawn values are held within `reaches`, as filled ones are."""
    orders, generator = np.random.default_rng(seed), torch.Generator(model.device).manual_seed(seed)
    known = ~np.isnan(values)
    asked = asked & ~known & ~model.schema.context
    out = np.repeat(values[None], draws, 0)
    flat = out.reshape(draws * len(values), -1)
    shape = known.sum(1) * (values.shape[1] + 1) + asked.sum(1)  # equally many present and asked for
    for _, group in _groups(np.tile(shape, draws), np.flatnonzero(np.tile(asked.any(1), draws))):
        for part in _blocks(model, len(group), memory):
            rows = group[part]
            there, open_ = known[rows % len(values)], asked[rows % len(values)]
            before = np.nonzero(there)[1].reshape(len(rows), -1)
            after = np.nonzero(open_)[1].reshape(len(rows), -1)
            after = np.take_along_axis(after, np.argsort(orders.random(after.shape), 1), 1)
            drawn = _draw(model, flat[rows], np.concatenate([before, after], 1), before.shape[1], generator)
            flat[rows] = np.where(open_, np.clip(drawn, *reaches(model.schema)), drawn)
    return out


def _blocks(model: DEformer, rows: int, memory: int) -> Iterator[slice]:
    """As many records at a time as may be drawn side by side."""
    probe = KeyValueCache(model, 0)
    block = int(np.clip(memory // (probe.pages_per_record * probe.page_bytes), 1, MOST_DRAWN))
    for start in range(0, rows, block):
        yield slice(start, min(start + block, rows))


def _draw(model: DEformer, values: Floats, codes: Ints, given: int, draws: torch.Generator) -> Floats:
    """(n, F) records with more readings. values: (n, F) raw; codes: (n, K) features in the order they are to be seen
    in, of which the first `given` are there and the others are drawn."""
    schema, kept, n = model.schema, model.tokens_kept, len(values)
    cache = KeyValueCache(model, 0)
    cache = KeyValueCache(model, n * cache.pages_per_record * cache.page_bytes)
    cache.grow(n)
    slots = np.arange(n)
    drawn = values.copy()
    normal = np.zeros(codes.shape)
    normal[:, :given] = schema.normalise(codes[:, :given], np.take_along_axis(values, codes[:, :given], 1))
    seen = 0
    for k in range(given, codes.shape[1]):
        # A pass brings the readings not seen yet and asks for the next one, whose value it never looks at.
        new, brought = slice(seen, k + 1), k - seen
        with torch.inference_mode():
            told = model.forward_cached(
                to_tensor(codes[:, new], model), to_tensor(normal[:, new], model), cache.gather(slots)
            )
            if brought:
                end = brought * kept
                keys, kept_values = ([t[:, :, :end] for t in part] for part in (told.keys, told.values))
                readings = None if told.readings is None else told.readings[:, :end]
                cache.append(slots, StepOutput(told.conditional, keys, kept_values, readings), np.full(n, brought))
                seen = k
            draw = told.conditional[:, -1].sample(draws).double().cpu().numpy()
        raw = on_grid(schema, codes[:, k], schema.denormalise(codes[:, k], draw))
        drawn[slots, codes[:, k]] = raw
        normal[:, k] = schema.normalise(codes[:, k], raw)
    return drawn
