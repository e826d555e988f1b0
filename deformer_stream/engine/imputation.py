"""Impute missing readings and draw records from the model.

The model is a density of whole records. So besides scoring it answers two further questions: how a missing reading is
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

from deformer_stream.engine.estimates import find_likeliest_labels, round_to_quantum
from deformer_stream.engine.passes import MAX_READINGS_PER_PASS
from deformer_stream.engine.single_readings import check_single_readings
from deformer_stream.kernels.torch_kv_cache import TorchKVCache
from deformer_stream.model.deformer import DEformer, KVCacheView, StepOutput, to_tensor
from deformer_stream.model.distributions import Conditional
from deformer_stream.model.schema import Schema

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_RECORDS_PER_BATCH = 1024
"""Largest number of records that are drawn at the same time; more are not faster."""

CACHE_BYTES = 256 * 2**20
"""Default bound, in bytes, on the memory of the network's cached keys and values while records are drawn."""


@dataclass(frozen=True, slots=True)
class ImputedValues:
    """Estimates of missing readings: of N records with F features, or of T targets (`engine.irregular_imputation`).

    Each attribute has shape (N, F) or (T,), with NaN for readings that were not imputed. Values are in raw units.
    They are clipped to the range of the training values, extended by its width on either side. For discrete
    features, all attributes but `median` are NaN.

    Attributes:
        median: Median of the reading given the present readings of its record. It minimises the expected absolute
            error. For a discrete feature, it is the code of the most probable label.
        low: Lower bound of the central prediction interval.
        high: Upper bound of the central prediction interval.
        mean: Mean given the present readings, which minimises the expected squared error.
        mode: Most probable value given the present readings. It maximises the density in normalised units. Like the
            median, it is rounded to the resolution of the sensor (the step between its values).
    """

    median: Floats
    low: Floats
    high: Floats
    mean: Floats
    mode: Floats


def impute(model: DEformer, values: Floats, is_requested: NDArray[np.bool_], interval: float = 0.9) -> ImputedValues:
    """Estimate missing readings, each from all present readings of its record and not from other imputed ones.

    Args:
        model: The network, in evaluation mode.
        values: (N, F) values of N records and F features in raw units or label codes, NaN if missing.
        is_requested: (N, F) which readings to impute. Present readings are skipped, and so are context features, which
            have no distribution.
        interval: Probability that a value lies in the central prediction interval, between 0 and 1. Values below and
            above the interval are equally probable.

    Returns:
        Median, mean, mode and prediction interval of each requested reading.
    """
    statistics = np.full((5, *values.shape), np.nan)
    for rows, codes, conditional in iterate_conditionals(model, values, is_requested):
        statistics[:, rows, codes] = describe_conditional(model.schema, codes, conditional, interval)
    return ImputedValues(*statistics)


def describe_conditional(schema: Schema, codes: Ints, conditional: Conditional, interval: float) -> Floats:
    """Return the statistics of distributions that `ImputedValues` contains.

    Args:
        schema: Describes the features.
        codes: (M,) feature codes (indexes in the schema).
        conditional: The distributions, of shape (M,).
        interval: Probability of the central prediction interval.

    Returns:
        (5, M) median, lower and upper bound of the interval, mean and mode, in the order of `ImputedValues`.
    """
    probabilities = (0.5, (1 - interval) / 2, (1 + interval) / 2)
    normalised = conditional.quantiles(probabilities).double().cpu().numpy()
    median, low, high = denormalise_within_bounds(schema, codes, normalised)
    # Quadrature: the mean in raw units is a weighted sum over P points of the distribution, (M, P) for M readings. The
    # points are converted before they are added, because the conversion to raw units is not linear.
    points, weights = (tensor.double().cpu().numpy() for tensor in conditional.quadrature_points())
    mean = (weights * denormalise_within_bounds(schema, codes[:, None], points)).sum(-1)
    mode = denormalise_within_bounds(schema, codes, conditional.mode().double().cpu().numpy())
    # These two should look like values of the sensor.
    median, mode = (round_to_quantum(schema, codes, estimate) for estimate in (median, mode))
    # A discrete feature has no numbers, only a most probable label.
    is_discrete = schema.is_discrete[codes]
    labels = find_likeliest_labels(schema, codes, conditional.log_mass.double().cpu().numpy())
    others = [np.where(is_discrete, np.nan, statistic) for statistic in (low, high, mean, mode)]
    return np.stack([np.where(is_discrete, labels, median), *others])


def impute_quantiles(
    model: DEformer, values: Floats, is_requested: NDArray[np.bool_], probabilities: Sequence[float]
) -> Floats:
    """Return quantiles of missing continuous readings given all present readings of their records.

    Args:
        model: The network, in evaluation mode.
        values: (N, F) values of N records and F features in raw units or label codes, NaN if missing.
        is_requested: (N, F) which readings to impute. Present readings and discrete features are skipped, and so are
            context features, which have no distribution.
        probabilities: Q probabilities between 0 and 1.

    Returns:
        (Q, N, F) quantiles in raw units, NaN where none was computed. They are clipped to the range of the training
        values, extended by its width on either side.
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
    """Compute the distributions of missing readings given all present readings of their records.

    Records with equally many present readings are processed together. The network processes their present readings
    once, and the attention keys and values are cached. Each further pass computes one requested feature of each record.

    Args:
        model: The network, in evaluation mode.
        values: (N, F) values of N records and F features in raw units or label codes, NaN if missing.
        is_requested: (N, F) which readings to compute. Present readings are skipped, and so are context features, which
            have no distribution.

    Yields:
        Tuples (rows, codes, conditional) for M requested readings of M different records. `rows`, (M,), is the row of
        each record in `values`. `codes`, (M,), is the feature code of each reading, which is its column in `values`.
        `conditional` holds the distributions of the readings, of shape (M,).

    Raises:
        ConfigError: The readings of the model are irregular.
    """
    check_single_readings(model.schema, "impute")
    is_present = ~np.isnan(values)
    is_requested = is_requested & ~is_present & ~model.schema.is_context
    num_present = is_present.sum(1)
    rows_with_requests = np.flatnonzero(is_requested.any(1))
    for group in _group_by_key(num_present, rows_with_requests):
        num_inputs = int(num_present[group[0]]) + 1  # per record: its present readings and the requested one
        batch_size = max(1, MAX_READINGS_PER_PASS // num_inputs)
        for start in range(0, len(group), batch_size):
            rows = group[start : start + batch_size]
            # Records of a group have equally many present readings, so their codes form a matrix.
            present_codes = np.nonzero(is_present[rows])[1].reshape(len(rows), -1)
            present_values = np.take_along_axis(values[rows], present_codes, 1)
            cache = _cache_readings(model, present_codes, present_values)
            # (len(rows), F): all feature codes for each record, those of its requested features first.
            codes_requested_first = np.argsort(~is_requested[rows], 1, kind="stable")
            max_requested = int(is_requested[rows].sum(1).max())
            for i in range(max_requested):
                # The records that have an i-th requested feature, as indexes into `rows`.
                remaining = np.flatnonzero(is_requested[rows, codes_requested_first[:, i]])
                codes = codes_requested_first[remaining, i]
                remaining_cache = cache if len(remaining) == len(rows) else _select_rows(cache, remaining, model)
                yield rows[remaining], codes, _compute_conditionals(model, codes, remaining_cache)


def _group_by_key(keys: Ints, rows: Ints) -> Iterator[Ints]:
    """Divide row numbers into groups with equal keys.

    Args:
        keys: (N,) the key of each of N rows.
        rows: The row numbers to group, some of 0 … N − 1.

    Yields:
        The row numbers of one group, in the given order. Groups are in ascending order of their keys.
    """
    for key in np.unique(keys[rows]).tolist():
        yield rows[keys[rows] == key]


def _cache_readings(model: DEformer, codes: Ints, values: Floats) -> KVCacheView | None:
    """Run the network on K readings of each of R records, and return the keys and values for attention over them.

    Args:
        model: The network.
        codes: (R, K) feature codes.
        values: (R, K) values in raw units, or label codes.

    Returns:
        The cached attention keys and values of all layers, None if K is 0.
    """
    num_records, num_readings = codes.shape
    if num_readings == 0:
        return None
    with torch.inference_mode():
        normalised = to_tensor(model.schema.normalise(codes, values), model)
        output = model.prefill(to_tensor(codes, model), normalised)
        # All records have the same number of tokens, so the cache has no padding.
        num_tokens = num_readings * model.cached_tokens_per_reading
        lengths = torch.full((num_records,), num_tokens, device=model.device)
    # `output.readings` holds the codes and values of the readings, None if the model does not need them later.
    return KVCacheView(output.keys, output.values, lengths, output.readings)


def _select_rows(cache: KVCacheView | None, rows: Ints, model: DEformer) -> KVCacheView | None:
    """Return the cached attention keys and values of some of R records.

    Args:
        cache: The keys and values of all R records, None if they have no readings.
        rows: Indexes of the selected records, from 0 to R − 1.
        model: The network, on whose device the cache is.

    Returns:
        The keys and values of the selected records, None if `cache` is None.
    """
    if cache is None:
        return None
    index = to_tensor(rows, model)
    keys = [layer_keys[index] for layer_keys in cache.keys]
    values = [layer_values[index] for layer_values in cache.values]
    # The codes and values of the cached readings, None if the model does not need them.
    readings = None if cache.readings is None else cache.readings[index]
    return KVCacheView(keys, values, cache.lengths[index], readings)


def _compute_conditionals(model: DEformer, codes: Ints, cache: KVCacheView | None) -> Conditional:
    """Return the distribution of one feature per record, given the cached readings of the record.

    Args:
        model: The network.
        codes: (R,) for each of R records the code of the feature.
        cache: Cached attention keys and values of the readings of the R records, None if they have no readings.

    Returns:
        Distributions of shape (R,).
    """
    with torch.inference_mode():
        inputs = to_tensor(codes[:, None], model)  # (R, 1): one further reading per record
        # The distribution of a reading does not depend on its own value, so the input can be any number.
        placeholders = torch.zeros(inputs.shape, dtype=model.dtype, device=model.device)
        if cache is None:
            output = model.prefill(inputs, placeholders)
        else:
            output = model.forward_cached(inputs, placeholders, cache)
        conditional = output.conditional  # of shape (R, 1)
        return conditional[:, 0]


def compute_raw_bounds(schema: Schema) -> tuple[Floats, Floats]:
    """Return the lowest and the highest raw value that may be imputed for each of F features, two arrays (F,).

    The bounds are the range of the training values, extended by its width on either side; they are infinite for a
    feature without a known range. They are needed because normalisation is logarithmic for values far from the centre.
    The conversion back to raw units is therefore exponential, and imputed values could become extremely large. One
    outlier among the present readings must not cause an imputed value of a thousand standard deviations.
    """
    low, high = np.full(len(schema.features), -np.inf), np.full(len(schema.features), np.inf)
    for code, feature in enumerate(schema.features):
        if feature.low is not None and feature.high is not None:
            low[code], high[code] = feature.low, feature.high
    with np.errstate(over="ignore"):  # a bound beyond the largest float is none
        width = high - low
        return low - width, high + width


def denormalise_within_bounds(schema: Schema, codes: Ints, values: Floats) -> Floats:
    """Convert normalised values to raw units, and clip them to the values that may be imputed.

    These are the range of the training values, extended by its width on either side (`compute_raw_bounds`).

    Args:
        schema: Describes the features.
        codes: Feature codes of the values, in a shape that broadcasts to that of `values`.
        values: Normalised values, of any shape.

    Returns:
        Raw values, in the shape of `values`.
    """
    low, high = compute_raw_bounds(schema)
    return np.clip(schema.denormalise(codes, values), low[codes], high[codes])


def sample_records(
    model: DEformer, num_records: int, seed: int = 0, cache_bytes: int = CACHE_BYTES
) -> Iterator[Floats]:
    """Draw records from the distribution that the model has learned.

    All features are drawn except context features, which have no distribution. The readings of a record are drawn one
    after the other in a random order, each given those before it.

    Args:
        model: The network, in evaluation mode.
        num_records: Number of records to draw.
        seed: Seed of the random numbers: calls with equal arguments draw equal records.
        cache_bytes: Bound, in bytes, on the memory of cached attention keys and values. It determines how many records
            are drawn at the same time.

    Yields:
        Batches of n records with F features, (n, F), in raw units or label codes, NaN for context features. Together
        they hold `num_records` records.

    Raises:
        ConfigError: The readings of the model are irregular.
    """
    check_single_readings(model.schema, "draw")
    order_rng, generator = np.random.default_rng(seed), torch.Generator(model.device).manual_seed(seed)
    all_missing = np.full((num_records, len(model.schema)), np.nan)
    drawable_codes = np.flatnonzero(~model.schema.is_context)
    for batch in _split_into_batches(model, num_records, cache_bytes):
        # Sorting random keys gives each record a random order of the features.
        sort_keys = order_rng.random((batch.stop - batch.start, len(drawable_codes)))
        codes = drawable_codes[np.argsort(sort_keys, 1)]
        yield _draw_readings(model, all_missing[batch], codes, num_given=0, generator=generator)


def sample_completions(
    model: DEformer,
    values: Floats,
    is_requested: NDArray[np.bool_],
    num_draws: int,
    seed: int = 0,
    cache_bytes: int = CACHE_BYTES,
) -> Floats:
    """Draw the missing readings of each record jointly, several times, given its present readings.

    In each draw, the requested readings are drawn one after the other in a random order, each given the present
    readings and those drawn before. Dependences between missing readings are therefore preserved.

    Args:
        model: The network, in evaluation mode.
        values: (N, F) values of N records and F features in raw units or label codes, NaN if missing.
        is_requested: (N, F) which readings to draw. Present readings are skipped, and so are context features, which
            have no distribution.
        num_draws: Number of draws per record.
        seed: Seed of the random numbers: calls with equal arguments give equal draws.
        cache_bytes: Bound, in bytes, on the memory of cached attention keys and values. It determines how many records
            are drawn at the same time.

    Returns:
        (num_draws, N, F) values in raw units or label codes: present readings as they are, drawn readings, and NaN
        elsewhere. Drawn values are clipped to the range of the training values, extended by its width on either side.

    Raises:
        ConfigError: The readings of the model are irregular.
    """
    check_single_readings(model.schema, "complete")
    order_rng, generator = np.random.default_rng(seed), torch.Generator(model.device).manual_seed(seed)
    is_present = ~np.isnan(values)
    is_requested = is_requested & ~is_present & ~model.schema.is_context
    low, high = compute_raw_bounds(model.schema)
    draws = np.repeat(values[None], num_draws, 0)
    flat_draws = draws.reshape(num_draws * len(values), -1)  # a view: row i is a draw of record i mod N
    # Records with the same numbers of present and of requested readings are drawn together; a key holds both numbers.
    keys = is_present.sum(1) * (values.shape[1] + 1) + is_requested.sum(1)
    rows_to_draw = np.flatnonzero(np.tile(is_requested.any(1), num_draws))
    for group in _group_by_key(np.tile(keys, num_draws), rows_to_draw):
        for batch in _split_into_batches(model, len(group), cache_bytes):
            rows = group[batch]
            records = rows % len(values)
            # All records of a batch have equally many present and requested readings, so their codes form matrices.
            present_codes = np.nonzero(is_present[records])[1].reshape(len(rows), -1)
            requested_codes = np.nonzero(is_requested[records])[1].reshape(len(rows), -1)
            random_order = np.argsort(order_rng.random(requested_codes.shape), 1)
            requested_codes = np.take_along_axis(requested_codes, random_order, 1)
            codes = np.concatenate([present_codes, requested_codes], 1)
            drawn = _draw_readings(
                model, flat_draws[rows], codes, num_given=present_codes.shape[1], generator=generator
            )
            flat_draws[rows] = np.where(is_requested[records], np.clip(drawn, low, high), drawn)
    return draws


def _split_into_batches(model: DEformer, num_records: int, cache_bytes: int) -> Iterator[slice]:
    """Divide records into batches, so that the attention keys and values of one batch fit into a bounded cache.

    Args:
        model: The network.
        num_records: Number of records.
        cache_bytes: Size of the cache in bytes.

    Yields:
        Slices of the records 0 … `num_records` − 1, with at least one and at most `MAX_RECORDS_PER_BATCH` records.
    """
    # The cache is divided into pages of fixed size. An empty cache is created only to compute the bytes of a record.
    empty_cache = TorchKVCache(model, max_bytes=0)
    bytes_per_record = empty_cache.pages_per_record * empty_cache.page_bytes
    batch_size = int(np.clip(cache_bytes // bytes_per_record, 1, MAX_RECORDS_PER_BATCH))
    for start in range(0, num_records, batch_size):
        yield slice(start, min(start + batch_size, num_records))


def _draw_readings(model: DEformer, values: Floats, codes: Ints, num_given: int, generator: torch.Generator) -> Floats:
    """Draw values of missing readings of each record, one reading after the other.

    Each reading is drawn given the present readings of its record and the readings that were drawn before it.

    Args:
        model: The network.
        values: (n, F) values of n records and F features in raw units or label codes.
        codes: (n, K) feature codes of K readings of each record. The first `num_given` belong to the present readings.
            The others belong to the readings to draw, in the order of drawing.
        num_given: Number of present readings, the same for all records. Their values are taken from `values`.
        generator: Source of random numbers.

    Returns:
        (n, F) a copy of `values` that also contains the drawn values. They are rounded to the resolution of their
        sensors, but not clipped to the range of the training values.
    """
    schema, tokens_per_reading, num_records = model.schema, model.cached_tokens_per_reading, len(values)
    # The cache is divided into pages of fixed size. An empty cache is created only to compute the bytes of a record.
    empty_cache = TorchKVCache(model, max_bytes=0)
    cache = TorchKVCache(model, num_records * empty_cache.pages_per_record * empty_cache.page_bytes)
    cache.ensure_capacity(num_records)
    record_indexes = np.arange(num_records)
    drawn = values.copy()
    # Normalised values in the order of `codes`. They are filled in as readings are drawn.
    normalised = np.zeros(codes.shape)
    given_codes = codes[:, :num_given]
    normalised[:, :num_given] = schema.normalise(given_codes, np.take_along_axis(values, given_codes, 1))
    num_cached = 0
    for k in range(num_given, codes.shape[1]):
        # Each pass processes the readings that are not cached yet, followed by reading k, and computes the distribution
        # of reading k. This does not depend on the value of reading k, which is still 0.
        inputs, num_new = slice(num_cached, k + 1), k - num_cached
        with torch.inference_mode():
            output = model.forward_cached(
                to_tensor(codes[:, inputs], model),
                to_tensor(normalised[:, inputs], model),
                cache.gather(record_indexes),
            )
            if num_new:
                # Cache the keys and values of all readings of this pass except reading k, the last one.
                end = num_new * tokens_per_reading
                keys = [layer_keys[:, :, :end] for layer_keys in output.keys]
                cached_values = [layer_values[:, :, :end] for layer_values in output.values]
                readings = None if output.readings is None else output.readings[:, :end]
                new_output = StepOutput(output.conditional, keys, cached_values, readings)
                cache.append(record_indexes, new_output, np.full(num_records, num_new))
                num_cached = k
            sample = output.conditional[:, -1].sample(generator).double().cpu().numpy()
        raw_values = round_to_quantum(schema, codes[:, k], schema.denormalise(codes[:, k], sample))
        drawn[record_indexes, codes[:, k]] = raw_values
        normalised[:, k] = schema.normalise(codes[:, k], raw_values)
    return drawn
