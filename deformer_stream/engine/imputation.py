"""Impute missing readings and draw records from the model.

The model is a density of whole records, so besides scoring it answers two further questions: how a missing reading is
distributed given the present ones, and which records are probable.

Matrices of values have shape (N, F), N records with F features, in raw units: a number, the code of a label, or NaN if
the reading is missing. Context features only condition the others. They have no distribution, so they are neither
imputed nor drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.kernels.kv_cache import TorchKVCache
from deformer_stream.model.deformer import DEformer, KVCacheView, StepOutput, to_tensor
from deformer_stream.model.distributions import Conditional
from deformer_stream.model.schema import Schema

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_READINGS_PER_PASS = 8192
"""Largest number of readings in one forward pass: enough to use all cores, and it bounds the memory of a pass."""

MAX_RECORDS_PER_BATCH = 1024
"""Largest number of records that are drawn at the same time; more are not faster."""

CACHE_BYTES = 256 * 2**20
"""Default bound on the memory of cached keys and values while records are drawn, in bytes."""


@dataclass(frozen=True, slots=True)
class ImputedValues:
    """Estimates of missing readings, each (N, F) in raw units, NaN where no value was requested.

    All values lie within the bounds of `compute_raw_bounds`. For discrete features all attributes but `median` are NaN.

    Attributes:
        median: Conditional median, rounded to the sensor's resolution; for a discrete feature the code of the most
            probable label. It minimises the expected absolute error.
        low: Lower bound of the central prediction interval.
        high: Upper bound of the central prediction interval.
        mean: Conditional mean, which minimises the expected squared error.
        mode: Most probable value (of the normalised reading), rounded to the sensor's resolution.
    """

    median: Floats
    low: Floats
    high: Floats
    mean: Floats
    mode: Floats


def impute(model: DEformer, values: Floats, is_requested: NDArray[np.bool_], interval: float = 0.9) -> ImputedValues:
    """Estimate each requested reading from all present readings of its record, not from other imputed ones.

    Args:
        model: The network, in evaluation mode.
        values: (N, F) raw values, NaN if missing.
        is_requested: (N, F) which readings to impute. Present readings and context features are skipped.
        interval: Probability of the central prediction interval.
    """
    imputed = ImputedValues(*(np.full(values.shape, np.nan) for _ in range(5)))
    probabilities = ((1 - interval) / 2, 0.5, (1 + interval) / 2)
    schema = model.schema
    for rows, codes, conditional in iterate_conditionals(model, values, is_requested):
        cells = rows, codes
        quantiles = conditional.quantiles(probabilities).double().cpu().numpy()
        for target, quantile in zip((imputed.low, imputed.median, imputed.high), quantiles, strict=True):
            target[cells] = denormalise_within_bounds(schema, codes, quantile)
        points, weights = (part.double().cpu().numpy() for part in conditional.quadrature_points())
        imputed.mean[cells] = (weights * denormalise_within_bounds(schema, codes[:, None], points)).sum(-1)
        mode = conditional.mode().double().cpu().numpy()
        imputed.mode[cells] = denormalise_within_bounds(schema, codes, mode)
        for target in (imputed.median, imputed.mode):
            target[cells] = round_to_quantum(schema, codes, target[cells])
        is_discrete = schema.is_discrete[codes]
        labels = find_likeliest_labels(schema, codes, conditional)
        imputed.median[cells] = np.where(is_discrete, labels, imputed.median[cells])
        for target in (imputed.low, imputed.high, imputed.mean, imputed.mode):
            target[cells] = np.where(is_discrete, np.nan, target[cells])
    return imputed


def impute_quantiles(
    model: DEformer, values: Floats, is_requested: NDArray[np.bool_], probabilities: Sequence[float]
) -> Floats:
    """Return quantiles of requested continuous readings given all present readings of their records.

    Args:
        model: The network, in evaluation mode.
        values: (N, F) raw values, NaN if missing.
        is_requested: (N, F) which readings to impute. Present, discrete and context readings are skipped.
        probabilities: Q probabilities between 0 and 1.

    Returns:
        (Q, N, F) quantiles in raw units, within the bounds of `compute_raw_bounds`, NaN where none was computed.
    """
    quantiles = np.full((len(probabilities), *values.shape), np.nan)
    is_continuous = ~model.schema.is_discrete
    for rows, codes, conditional in iterate_conditionals(model, values, is_requested & is_continuous):
        normalised = conditional.quantiles(probabilities).double().cpu().numpy()
        quantiles[:, rows, codes] = denormalise_within_bounds(model.schema, codes, normalised)
    return quantiles


def iterate_conditionals(
    model: DEformer, values: Floats, is_requested: NDArray[np.bool_]
) -> Iterator[tuple[Ints, Ints, Conditional]]:
    """Yield the distributions of the requested readings given all present readings of their records.

    Records with equally many present readings are processed together. Their present readings pass through the network
    once; each further pass then computes one requested feature of each record.

    Args:
        model: The network, in evaluation mode.
        values: (N, F) raw values, NaN if missing.
        is_requested: (N, F) which readings to compute. Present readings and context features are skipped.

    Yields:
        For M requested readings at a time: their rows, (M,), their feature codes, (M,), and their conditionals, (M,).
    """
    is_present = ~np.isnan(values)
    is_requested = is_requested & ~is_present & ~model.schema.is_context
    num_present = is_present.sum(1)
    for group in _group_by_key(num_present, np.flatnonzero(is_requested.any(1))):
        batch_size = max(1, MAX_READINGS_PER_PASS // (int(num_present[group[0]]) + 1))
        for start in range(0, len(group), batch_size):
            rows = group[start : start + batch_size]
            present_codes = np.nonzero(is_present[rows])[1].reshape(len(rows), -1)
            present_values = np.take_along_axis(values[rows], present_codes, 1)
            past = _cache_readings(model, present_codes, present_values)
            # (len(rows), F): the codes of each record, requested features first.
            ordered_codes = np.argsort(~is_requested[rows], 1, kind="stable")
            for i in range(int(is_requested[rows].sum(1).max())):
                remaining = np.flatnonzero(is_requested[rows, ordered_codes[:, i]])
                codes = ordered_codes[remaining, i]
                selected = past if len(remaining) == len(rows) else _select_rows(past, remaining, model)
                yield rows[remaining], codes, _compute_conditionals(model, codes, selected)


def _group_by_key(keys: Ints, rows: Ints) -> Iterator[Ints]:
    """Yield the rows of each distinct key in ascending order of keys.

    Args:
        keys: (N,) one key per row.
        rows: The rows to group, a subset of 0 … N − 1.
    """
    for key in np.unique(keys[rows]).tolist():
        yield rows[keys[rows] == key]


def _cache_readings(model: DEformer, codes: Ints, values: Floats) -> KVCacheView | None:
    """Return the keys and values of R records with K readings each, None if K is 0.

    Args:
        model: The network.
        codes: (R, K) feature codes.
        values: (R, K) raw values.
    """
    if not codes.shape[1]:
        return None
    with torch.inference_mode():
        normalised = to_tensor(model.schema.normalise(codes, values), model)
        output = model.prefill(to_tensor(codes, model), normalised)
        num_tokens = codes.shape[1] * model.cached_tokens_per_reading
        lengths = torch.full((len(codes),), num_tokens, device=model.device)
    return KVCacheView(output.keys, output.values, lengths, output.readings)


def _select_rows(past: KVCacheView | None, rows: Ints, model: DEformer) -> KVCacheView | None:
    """Return the cached keys and values of some of the records."""
    if past is None:
        return None
    index = to_tensor(rows, model)
    keys, values = ([layer[index] for layer in layers] for layers in (past.keys, past.values))
    return KVCacheView(keys, values, past.lengths[index], None if past.readings is None else past.readings[index])


def _compute_conditionals(model: DEformer, codes: Ints, past: KVCacheView | None) -> Conditional:
    """Return the distribution of one feature per record given its cached readings, of shape (R,).

    Args:
        model: The network.
        codes: (R,) the feature of each record.
        past: The cached readings of the R records, None if there are none.
    """
    with torch.inference_mode():
        inputs = to_tensor(codes[:, None], model)
        # A query token depends on the feature only, so any value serves here.
        placeholders = torch.zeros(inputs.shape, dtype=model.dtype, device=model.device)
        if past is None:
            output = model.prefill(inputs, placeholders)
        else:
            output = model.forward_cached(inputs, placeholders, past)
        return output.conditional[:, 0]


def find_likeliest_labels(schema: Schema, codes: Ints, conditional: Conditional) -> Ints:
    """Return the code of the most probable label of each reading, without the mass of labels unseen in training.

    Args:
        schema: The features.
        codes: Feature codes, of any shape.
        conditional: The distributions, of the same shape.

    Returns:
        Label codes of the same shape, 0 for continuous features.
    """
    log_mass = conditional.log_mass.double().cpu().numpy()
    is_own_label = np.arange(log_mass.shape[-1]) < np.maximum(schema.label_counts[codes], 1)[..., None]
    return np.asarray(np.where(is_own_label, log_mass, -np.inf).argmax(-1), np.int64)


def compute_raw_bounds(schema: Schema) -> tuple[Floats, Floats]:
    """Return the lowest and the highest raw value that may be imputed for each feature, both (F,).

    The bounds are the range of the training values, extended by its width on either side. They are needed because
    normalisation is logarithmic far from the centre, so a Gaussian there has unbounded raw values. One outlier among
    the present readings must not cause an imputed value of a thousand standard deviations.
    """
    low = np.array([-np.inf if f.low is None or f.high is None else f.low for f in schema.features])
    high = np.array([np.inf if f.low is None or f.high is None else f.high for f in schema.features])
    return low - (high - low), high + (high - low)


def denormalise_within_bounds(schema: Schema, codes: Ints, values: Floats) -> Floats:
    """Convert normalised values to raw units and clip them to the bounds of `compute_raw_bounds`.

    Args:
        schema: The features.
        codes: Feature codes that broadcast to the shape of `values`.
        values: Normalised values.
    """
    low, high = compute_raw_bounds(schema)
    return np.clip(schema.denormalise(codes, values), low[codes], high[codes])


def round_to_quantum(schema: Schema, codes: Ints, values: Floats) -> Floats:
    """Round raw values to the resolution of their sensors; values of sensors without a known quantum stay the same.

    Args:
        schema: The features.
        codes: Feature codes in the shape of `values`.
        values: Raw values.
    """
    quanta = np.array([f.quantum or np.nan for f in schema.features])
    lowest = np.array([f.low or 0.0 for f in schema.features])
    # A sensor's possible values are origin + k · quantum. The origin is 0 if the lowest value is a multiple of the
    # quantum, so that rounding errors of the lowest value do not shift the others.
    remainder = lowest - quanta * np.round(lowest / quanta)
    origins = np.where(np.abs(remainder) < 1e-6 * quanta, 0.0, lowest)
    origin, quantum = origins[codes], quanta[codes]
    with np.errstate(invalid="ignore"):
        steps = np.round((values - origin) / quantum)
        # 3 steps of 0.1 are computed as 3 / 10, because 3 · 0.1 is not 0.3 in floating point.
        steps_per_unit = np.round(1 / quantum)
        divides_unit = (steps_per_unit > 0) & (np.abs(steps_per_unit * quantum - 1) < 1e-9)
        offset = np.where(divides_unit, steps / np.where(divides_unit, steps_per_unit, 1.0), steps * quantum)
        rounded = origin + offset
    return np.where(np.isnan(quantum), values, rounded)


def sample_records(
    model: DEformer, num_records: int, seed: int = 0, cache_bytes: int = CACHE_BYTES
) -> Iterator[Floats]:
    """Draw complete records, each in a random order of its own, through the key-value cache.

    Args:
        model: The network, in evaluation mode.
        num_records: Number of records to draw.
        seed: Equal arguments draw equal records.
        cache_bytes: Bound on the memory of cached keys and values.

    Yields:
        Batches of n records, (n, F) in raw units, `num_records` in all.
    """
    order_rng, generator = np.random.default_rng(seed), torch.Generator(model.device).manual_seed(seed)
    all_missing = np.full((num_records, len(model.schema)), np.nan)
    drawable_codes = np.flatnonzero(~model.schema.is_context)
    for batch in _split_into_batches(model, num_records, cache_bytes):
        keys = order_rng.random((batch.stop - batch.start, len(drawable_codes)))
        codes = drawable_codes[np.argsort(keys, 1)]
        yield _draw_readings(model, all_missing[batch], codes, 0, generator)


def sample_completions(
    model: DEformer,
    values: Floats,
    is_requested: NDArray[np.bool_],
    num_draws: int,
    seed: int = 0,
    cache_bytes: int = CACHE_BYTES,
) -> Floats:
    """Draw the requested readings of each record jointly, given its present readings.

    The readings of a draw follow one another in a random order, each conditioned on the present ones and on those drawn
    before, so dependences between missing readings are preserved.

    Args:
        model: The network, in evaluation mode.
        values: (N, F) raw values, NaN if missing.
        is_requested: (N, F) which readings to draw. Present readings and context features are skipped.
        num_draws: Number of draws per record.
        seed: Equal arguments give equal draws.
        cache_bytes: Bound on the memory of cached keys and values.

    Returns:
        (num_draws, N, F) raw values: present readings as they are, drawn ones within the bounds of
        `compute_raw_bounds`, NaN elsewhere.
    """
    order_rng, generator = np.random.default_rng(seed), torch.Generator(model.device).manual_seed(seed)
    is_present = ~np.isnan(values)
    is_requested = is_requested & ~is_present & ~model.schema.is_context
    low, high = compute_raw_bounds(model.schema)
    draws = np.repeat(values[None], num_draws, 0)
    flat_draws = draws.reshape(num_draws * len(values), -1)  # a view: row i is a draw of record i mod N
    # Records with the same numbers of present and of requested readings are drawn together.
    keys = is_present.sum(1) * (values.shape[1] + 1) + is_requested.sum(1)
    for group in _group_by_key(np.tile(keys, num_draws), np.flatnonzero(np.tile(is_requested.any(1), num_draws))):
        for batch in _split_into_batches(model, len(group), cache_bytes):
            rows = group[batch]
            records = rows % len(values)
            present_codes = np.nonzero(is_present[records])[1].reshape(len(rows), -1)
            requested_codes = np.nonzero(is_requested[records])[1].reshape(len(rows), -1)
            random_order = np.argsort(order_rng.random(requested_codes.shape), 1)
            requested_codes = np.take_along_axis(requested_codes, random_order, 1)
            codes = np.concatenate([present_codes, requested_codes], 1)
            drawn = _draw_readings(model, flat_draws[rows], codes, present_codes.shape[1], generator)
            flat_draws[rows] = np.where(is_requested[records], np.clip(drawn, low, high), drawn)
    return draws


def _split_into_batches(model: DEformer, num_records: int, cache_bytes: int) -> Iterator[slice]:
    """Yield slices of as many records as fit into the cache at the same time."""
    probe = TorchKVCache(model, 0)
    bytes_per_record = probe.pages_per_record * probe.page_bytes
    batch_size = int(np.clip(cache_bytes // bytes_per_record, 1, MAX_RECORDS_PER_BATCH))
    for start in range(0, num_records, batch_size):
        yield slice(start, min(start + batch_size, num_records))


def _draw_readings(model: DEformer, values: Floats, codes: Ints, num_given: int, generator: torch.Generator) -> Floats:
    """Return records in which further readings are drawn one after the other.

    Args:
        model: The network.
        values: (n, F) raw values of n records.
        codes: (n, K) feature codes in the order in which the network receives them.
        num_given: The number of leading codes whose values are present; the values of the others are drawn.
        generator: Source of random numbers.

    Returns:
        (n, F) raw values with the drawn readings, not clipped.
    """
    schema, tokens_per_reading, num_records = model.schema, model.cached_tokens_per_reading, len(values)
    probe = TorchKVCache(model, 0)
    cache = TorchKVCache(model, num_records * probe.pages_per_record * probe.page_bytes)
    cache.ensure_capacity(num_records)
    record_indexes = np.arange(num_records)
    drawn = values.copy()
    normalised = np.zeros(codes.shape)
    given_codes = codes[:, :num_given]
    normalised[:, :num_given] = schema.normalise(given_codes, np.take_along_axis(values, given_codes, 1))
    num_cached = 0
    for k in range(num_given, codes.shape[1]):
        # Each pass adds the readings that are not cached yet, and queries reading k, whose value has no influence.
        inputs, num_new = slice(num_cached, k + 1), k - num_cached
        with torch.inference_mode():
            output = model.forward_cached(
                to_tensor(codes[:, inputs], model),
                to_tensor(normalised[:, inputs], model),
                cache.gather(record_indexes),
            )
            if num_new:
                end = num_new * tokens_per_reading
                keys, cached_values = ([layer[:, :, :end] for layer in part] for part in (output.keys, output.values))
                readings = None if output.readings is None else output.readings[:, :end]
                new_output = StepOutput(output.conditional, keys, cached_values, readings)
                cache.append(record_indexes, new_output, np.full(num_records, num_new))
                num_cached = k
            sample = output.conditional[:, -1].sample(generator).double().cpu().numpy()
        raw_values = round_to_quantum(schema, codes[:, k], schema.denormalise(codes[:, k], sample))
        drawn[record_indexes, codes[:, k]] = raw_values
        normalised[:, k] = schema.normalise(codes[:, k], raw_values)
    return drawn
