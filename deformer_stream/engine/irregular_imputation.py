"""Impute and draw values of sensors at given times, in records with irregular readings.

A target is a sensor and a time of a record whose value is estimated. The model is conditioned on observed readings of
the same record, before and after the target. Which ones is decided by this rule, so that the cost of a target does not
depend on the length of its record:

1. The near readings are a run of successive observed readings in order of time, around the target. There are about as
   many as in an example of training: `context_recent` + `context_block` of the model's hyperparameters.
2. The latest reading of each sensor before this run, and the earliest one after it, are added.

Targets whose runs are the same share a context, which the network processes once. A run is shared by the targets in a
quarter of its length. So each target has at least about a third of the run on either side, unless the record begins or
ends there.

If the Gaussian process has as many neighbors as a context has readings, its conditionals are computed for all targets
of a context from one Cholesky factor (`model.process_conditionals`).

The order of a context is that of a training example in random order (`trainer.examples`). The readings outside of the
run come first, in order of time. The readings of the run follow, in an order that is random but always the same.

Targets have shape (T,), all other readings (M,). Values are in raw units, or codes of labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.engine.estimates import round_to_quantum
from deformer_stream.engine.imputation import (
    ImputedValues,
    compute_raw_bounds,
    denormalise_within_bounds,
    describe_conditional,
)
from deformer_stream.engine.passes import MAX_READINGS_PER_PASS
from deformer_stream.errors import ConfigError
from deformer_stream.model.bounded_context import ContextLimit
from deformer_stream.model.deformer import DEformer, KVCacheView, to_tensor
from deformer_stream.model.distributions import Conditional
from deformer_stream.model.gaussian_prior import PriorConditional
from deformer_stream.model.process_conditionals import ProcessContext, is_exact, pad_context
from deformer_stream.ragged import ragged_indices

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DEFAULT_LIMIT = ContextLimit(recent=32, block=64)
"""The size of contexts if the hyperparameters of the model do not limit them."""

ORDER_SEED = 0x1A9
"""Seed of the random order of the readings of a context."""


@dataclass(frozen=True, slots=True)
class ObservedReadings:
    """The observed readings of R records, one record after the other, in order of time in each record.

    Attributes:
        codes: (M,) feature codes.
        values: (M,) values in raw units or label codes.
        ages: (M,) float64 seconds from the origin of the record.
        offsets: (R + 1,) index of the first reading of each record; the last entry is M.
    """

    codes: Ints
    values: Floats
    ages: Floats
    offsets: Ints

    @staticmethod
    def sort(records: Ints, codes: Ints, values: Floats, ages: Floats, num_records: int) -> ObservedReadings:
        """Return readings that are given in any order. Those of the same time stay in this order.

        As in training, exact repetitions (same record, sensor, time and value) are left out.

        Args:
            records: (M,) record of each reading, from 0 to `num_records` − 1.
            codes: (M,) feature codes.
            values: (M,) values in raw units or label codes.
            ages: (M,) seconds from the origin of the record.
            num_records: The number R of records.
        """
        order = np.lexsort((values, ages, codes, records))
        is_new = np.ones(len(order), bool)
        is_same = [column[order[1:]] == column[order[:-1]] for column in (records, codes, ages, values)]
        is_new[1:] = ~np.logical_and.reduce(is_same)
        kept = np.sort(order[is_new])
        records, codes, values, ages = records[kept], codes[kept], values[kept], ages[kept]
        order = np.lexsort((ages, records))
        offsets = np.concatenate([[0], np.cumsum(np.bincount(records, minlength=num_records))])
        return ObservedReadings(codes[order], values[order], ages[order], offsets)


@dataclass(frozen=True, slots=True)
class Targets:
    """Sensors and times at which values are estimated.

    Attributes:
        records: (T,) record of each target, from 0 to R − 1.
        codes: (T,) feature codes.
        ages: (T,) float64 seconds from the origin of the record.
    """

    records: Ints
    codes: Ints
    ages: Floats

    def __len__(self) -> int:
        """Return the number of targets."""
        return len(self.codes)

    def select(self, index: NDArray[np.generic]) -> Targets:
        """Return some of the targets."""
        return Targets(self.records[index], self.codes[index], self.ages[index])


@dataclass(frozen=True, slots=True)
class _Group:
    """Targets that share a context.

    Attributes:
        record: Their record.
        targets: (K,) indexes of the targets in ascending order of their ages.
        start: Position in the record of the first reading of the run (the observed readings nearest to the targets).
        stop: Position of the first reading after the run.
    """

    record: int
    targets: Ints
    start: int
    stop: int


class _ContextSelector:
    """Chooses the observed readings on which targets are conditioned, by the rule of this module.

    Args:
        model: The network.
        observed: The observed readings.
    """

    def __init__(self, model: DEformer, observed: ObservedReadings) -> None:
        limit = model.config.context_limit or DEFAULT_LIMIT
        self.observed = observed
        self.num_features = len(model.schema)
        # The sequence of an example has `recent` + `block` readings, and the last of them is predicted.
        self.num_near = max(1, limit.recent + limit.block - 1)
        self.stride = max(1, self.num_near // 4)
        # One sorted number for each reading: first by record, then by sensor, then by place. A binary search finds the
        # latest reading of a sensor before a place, and the earliest one after it.
        record, _ = ragged_indices(np.diff(observed.offsets))
        self._factor = len(observed.codes) + 1
        sensor_of_record = record * self.num_features + observed.codes
        self._keys = np.sort(sensor_of_record * self._factor + np.arange(len(observed.codes)))

    def divide(self, targets: Targets, index: Ints, max_size: int | None = None) -> list[_Group]:
        """Divide targets into groups that share a context, in ascending order of records and ages.

        Args:
            targets: The targets.
            index: Indexes of the targets to divide.
            max_size: Largest number of targets of a group; None for no limit.
        """
        if not len(index):
            return []
        index = index[np.lexsort((targets.ages[index], targets.records[index]))]
        groups: list[_Group] = []
        records = targets.records[index]
        for part in np.split(index, np.flatnonzero(np.diff(records)) + 1):
            record = int(targets.records[part[0]])
            first, last = self.observed.offsets[record], self.observed.offsets[record + 1]
            num_readings = int(last - first)
            # The number of observed readings before each target decides to which run it belongs.
            place = np.searchsorted(self.observed.ages[first:last], targets.ages[part])
            run = place // self.stride if num_readings > self.num_near else np.zeros(len(part), np.int64)
            for indexes_of_run in np.split(np.arange(len(part)), np.flatnonzero(np.diff(run)) + 1):
                middle = int(run[indexes_of_run[0]]) * self.stride + self.stride // 2
                start = min(max(middle - self.num_near // 2, 0), max(num_readings - self.num_near, 0))
                stop = min(start + self.num_near, num_readings)
                size = len(indexes_of_run) if max_size is None else max_size
                groups += [
                    _Group(record, part[indexes_of_run[k : k + size]], start, stop)
                    for k in range(0, len(indexes_of_run), size)
                ]
        return groups

    def find_outside(self, group: _Group) -> Ints:
        """Return the readings of the context outside of the run, ascending indexes into `observed`.

        They are the latest reading of each sensor before the run, and the earliest one after it.
        """
        first = int(self.observed.offsets[group.record])
        sensors = (group.record * self.num_features + np.arange(self.num_features)) * self._factor
        before = np.searchsorted(self._keys, sensors + first + group.start) - 1
        after = np.searchsorted(self._keys, sensors + first + group.stop)
        found = np.concatenate([before, after])
        found_key = np.append(self._keys, -1)[found]  # −1 belongs to no sensor
        is_own = (found >= 0) & (found_key // self._factor == np.tile(sensors // self._factor, 2))
        return np.unique(found_key[is_own] % self._factor)

    def find_run(self, group: _Group) -> Ints:
        """Return the readings of the run in their random order, indexes into `observed`."""
        first = int(self.observed.offsets[group.record])
        return first + group.start + shuffle(group.stop - group.start)


def shuffle(num_readings: int) -> Ints:
    """Return the numbers 0 … `num_readings` − 1 in an order that is random, but always the same."""
    return np.random.default_rng([ORDER_SEED, num_readings]).permutation(num_readings)


def impute_at_times(
    model: DEformer, observed: ObservedReadings, targets: Targets, interval: float = 0.9
) -> ImputedValues:
    """Estimate values of sensors at given times, each from observed readings and not from other imputed values.

    Args:
        model: The network, in evaluation mode, for irregular readings.
        observed: The observed readings.
        targets: The sensors and times. Those of context features are skipped, because these have no distribution.
        interval: Probability that a value lies in the central prediction interval, between 0 and 1.

    Returns:
        Median, mean, mode and prediction interval of each target, (T,) each.

    Raises:
        ConfigError: The model was not trained on irregular readings.
    """
    statistics = np.full((5, len(targets)), np.nan)
    for index, conditional in iterate_target_conditionals(model, observed, targets):
        statistics[:, index] = describe_conditional(model.schema, targets.codes[index], conditional, interval)
    return ImputedValues(*statistics)


def impute_quantiles_at_times(
    model: DEformer, observed: ObservedReadings, targets: Targets, probabilities: Sequence[float]
) -> Floats:
    """Return quantiles of values of continuous sensors at given times, given observed readings.

    Args:
        model: The network, in evaluation mode, for irregular readings.
        observed: The observed readings.
        targets: The sensors and times. Those of discrete and of context features are skipped.
        probabilities: Q probabilities between 0 and 1.

    Returns:
        (Q, T) quantiles in raw units, NaN for skipped targets. They are clipped to the range of the training values,
        extended by its width on either side.

    Raises:
        ConfigError: The model was not trained on irregular readings.
    """
    quantiles = np.full((len(probabilities), len(targets)), np.nan)
    chosen = np.flatnonzero(~model.schema.is_discrete[targets.codes])
    for index, conditional in iterate_target_conditionals(model, observed, targets.select(chosen)):
        normalised = conditional.quantiles(probabilities).double().cpu().numpy()
        codes = targets.codes[chosen[index]]
        quantiles[:, chosen[index]] = denormalise_within_bounds(model.schema, codes, normalised)
    return quantiles


def iterate_target_conditionals(
    model: DEformer, observed: ObservedReadings, targets: Targets
) -> Iterator[tuple[Ints, Conditional]]:
    """Compute the distributions of values of sensors at given times, given observed readings.

    The targets of a group share a context. The network processes it once and caches its attention keys and values.

    Args:
        model: The network, in evaluation mode, for irregular readings.
        observed: The observed readings.
        targets: The sensors and times. Those of context features are skipped, because these have no distribution.

    Yields:
        Tuples (index, conditional) for K targets: their indexes, (K,), and their distributions, of shape (K,).

    Raises:
        ConfigError: The model was not trained on irregular readings.
    """
    check_irregular(model)
    selector = _ContextSelector(model, observed)
    groups = selector.divide(targets, np.flatnonzero(~model.schema.is_context[targets.codes]))
    contexts = [np.concatenate([selector.find_outside(group), selector.find_run(group)]) for group in groups]
    for batch in _batch_by_length([len(context) for context in contexts]):
        contexts_of_batch = [contexts[i] for i in batch]
        cache = _prefill(
            model,
            [observed.codes[c] for c in contexts_of_batch],
            [observed.values[c] for c in contexts_of_batch],
            [observed.ages[c] for c in contexts_of_batch],
        )
        index = np.concatenate([groups[i].targets for i in batch])
        row = np.repeat(np.arange(len(batch)), [len(groups[i].targets) for i in batch])
        num_rows = max(1, MAX_READINGS_PER_PASS // (cache.ages.shape[1] + 1))
        for start in range(0, len(index), num_rows):
            part = slice(start, start + num_rows)
            chosen = targets.select(index[part])
            yield index[part], _predict(model, chosen.codes, chosen.ages, cache, row[part])


def check_irregular(model: DEformer) -> None:
    """Check that a model is for irregular readings.

    Raises:
        ConfigError: It is not.
    """
    if model.schema.reading_times is None:
        raise ConfigError(
            "values at given times cannot be imputed, because a sensor reports once in a record of this model: give "
            "records with one value of each feature, or train a model with --irregular"
        )


def _batch_by_length(lengths: Sequence[int]) -> Iterator[range]:
    """Divide contexts into batches that have at most `MAX_READINGS_PER_PASS` readings with padding, or one context.

    Args:
        lengths: The number of readings of each context.

    Yields:
        The indexes of the contexts of a batch.
    """
    start = width = 0
    for i, length in enumerate(lengths):
        width = max(width, length, 1)
        if i > start and width * (i + 1 - start) > MAX_READINGS_PER_PASS:
            yield range(start, i)
            start, width = i, max(length, 1)
    if len(lengths):
        yield range(start, len(lengths))


@dataclass(slots=True)
class _ContextCache:
    """The attention keys and values of N contexts, with space for further readings.

    Attributes:
        model: The network.
        keys: For each layer (N, H, P, d_head); P is the number of cached tokens of the longest context.
        values: For each layer (N, H, P, d_head).
        readings: (N, P, 2) feature code and normalised value of each token.
        ages: (N, P) age of each token's reading.
        lengths: (N,) number of tokens of each context.
        process: The same readings for exact conditionals of the Gaussian process; None if it has fewer neighbors.
    """

    model: DEformer
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    readings: torch.Tensor
    ages: torch.Tensor
    lengths: torch.Tensor
    process: ProcessContext | None

    def view(self) -> KVCacheView:
        """Return the cache as the network reads it."""
        return KVCacheView(self.keys, self.values, self.lengths, self.readings, self.ages)

    def select(self, rows: Ints) -> _ContextCache:
        """Return the contexts of some rows, which may be repeated."""
        index = to_tensor(rows, self.model)
        keys, values = ([layer[index] for layer in layers] for layers in (self.keys, self.values))
        return _ContextCache(
            self.model, keys, values, self.readings[index], self.ages[index], self.lengths[index], None
        )

    def condition(self, rows: Ints, codes: torch.Tensor, ages: torch.Tensor) -> PriorConditional | None:
        """Return the exact conditionals of the Gaussian process for further readings, None without a process.

        Args:
            rows: (K,) the context of each reading.
            codes: (K, 1) feature codes.
            ages: (K, 1) seconds from the origin of the record.
        """
        if self.process is None:
            return None
        return self.process.condition(to_tensor(rows, self.model), codes[:, 0], ages[:, 0], self.model.dtype)

    def append(self, codes: Ints, normalised: Floats, ages: Floats, is_new: NDArray[np.bool_]) -> None:
        """Add a reading to some of the contexts. There must be space for it.

        Args:
            codes: (N,) feature codes.
            normalised: (N,) normalised values.
            ages: (N,) seconds from the origin of the record.
            is_new: (N,) which contexts get the reading.
        """
        rows = np.flatnonzero(is_new)
        if not len(rows):
            return
        index, model = to_tensor(rows, self.model), self.model
        inputs = (
            to_tensor(codes[rows, None], model),
            to_tensor(normalised[rows, None], model),
            torch.from_numpy(ages[rows, None]).to(model.device),
        )
        with torch.inference_mode():
            prior = self.condition(rows, inputs[0], inputs[2])
            output = model.forward_cached(inputs[0], inputs[1], self.select(rows).view(), prior, inputs[2])
            if self.process is not None:
                places = self.lengths[index].long() // model.cached_tokens_per_reading
                self.process.append(index, places, *(tensor[:, 0] for tensor in inputs))
            for token in range(model.cached_tokens_per_reading):
                place = self.lengths[index].long() + token
                for layers, new in ((self.keys, output.keys), (self.values, output.values)):
                    for layer, new_layer in zip(layers, new, strict=True):
                        layer[index, :, place] = new_layer[:, :, token]
                if output.readings is not None and output.ages is not None:
                    self.readings[index, place] = output.readings[:, token]
                    self.ages[index, place] = output.ages[:, token]
            self.lengths[index] += model.cached_tokens_per_reading


def _prefill(
    model: DEformer, codes: Sequence[Ints], values: Sequence[Floats], ages: Sequence[Floats], num_further: int = 0
) -> _ContextCache:
    """Run the network on contexts, and return their attention keys and values.

    Args:
        model: The network.
        codes: For each of N contexts the feature codes of its readings, in their order.
        values: For each context the values in raw units or label codes.
        ages: For each context the seconds from the origin of the record.
        num_further: Number of readings that can be added later.
    """
    lengths = np.array([len(context) for context in codes])
    width = max(int(lengths.max(initial=0)), 1)
    row, place = ragged_indices(lengths)
    all_codes, all_values, all_ages = (np.concatenate([np.empty(0), *parts]) for parts in (codes, values, ages))
    features, normalised = np.full((len(codes), width), -1, np.int64), np.zeros((len(codes), width))
    padded_ages = np.zeros((len(codes), width))
    features[row, place] = all_codes
    normalised[row, place] = model.schema.normalise(all_codes.astype(np.int64), all_values)
    padded_ages[row, place] = all_ages
    tokens_per_reading = model.cached_tokens_per_reading
    with torch.inference_mode():
        inputs = (
            to_tensor(features, model),
            to_tensor(normalised, model),
            torch.from_numpy(padded_ages).to(model.device),
        )
        prior = _make_unused_prior(model, features.shape)
        output = model.forward_cached(*inputs[:2], _make_empty_cache(model, len(codes)), prior, inputs[2])
        if output.readings is None or output.ages is None:
            raise ValueError("a model of irregular readings must return the readings and their ages, which are cached")
        num_tokens = num_further * tokens_per_reading
        pad = torch.nn.functional.pad
        return _ContextCache(
            model,
            [pad(layer, (0, 0, 0, num_tokens)) for layer in output.keys],
            [pad(layer, (0, 0, 0, num_tokens)) for layer in output.values],
            pad(output.readings, (0, 0, 0, num_tokens)),
            pad(output.ages, (0, num_tokens)),
            torch.from_numpy(lengths * tokens_per_reading).to(model.device),
            _make_process_context(model, inputs, num_further),
        )


def _make_process_context(
    model: DEformer, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], num_further: int
) -> ProcessContext | None:
    """Return the context for exact conditionals of the Gaussian process, None without one or with few neighbors.

    Args:
        model: The network.
        inputs: Feature codes, values and ages of the contexts, (N, P) each.
        num_further: Number of readings that can be added later.
    """
    if model.process is None or not is_exact(model.process, inputs[0].shape[1] + num_further):
        return None
    return ProcessContext(model.process, *pad_context(*inputs, num_further))


def _make_empty_cache(model: DEformer, num_records: int) -> KVCacheView:
    """Return the cache of records without readings."""
    num_heads = model.config.heads

    def make_zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(num_records, *shape, dtype=model.dtype, device=model.device)

    layers = [make_zeros(num_heads, 0, model.config.d_model // num_heads)] * model.config.layers
    ages = torch.zeros(num_records, 0, dtype=torch.float64, device=model.device)
    return KVCacheView(layers, layers, make_zeros(), make_zeros(0, 2), ages)


def _make_unused_prior(model: DEformer, shape: tuple[int, ...]) -> PriorConditional | None:
    """Return a placeholder for the prior's distributions of context readings if they have no effect, else None.

    Readings of a context are not predicted. If later tokens attend to observation tokens only, which do not depend on
    the prior, its costly computation can be left out.

    Args:
        model: The network.
        shape: (N, L), the shape of the readings.
    """
    if not model.num_prior_components or model.attention_context != "values":
        return None
    ones = torch.ones(*shape, model.num_prior_components, dtype=model.dtype, device=model.device)
    has_prior = torch.zeros(*shape, dtype=torch.bool, device=model.device)
    return PriorConditional(0.0 * ones, 0.0 * ones, ones, has_prior)


def _predict(model: DEformer, codes: Ints, ages: Floats, cache: _ContextCache, rows: Ints) -> Conditional:
    """Return the distribution of one further reading of each of K contexts, of shape (K,).

    Args:
        model: The network.
        codes: (K,) feature codes.
        ages: (K,) seconds from the origin of the record.
        cache: The contexts.
        rows: (K,) the context of each reading.
    """
    with torch.inference_mode():
        features = to_tensor(codes[:, None], model)
        # The distribution of a reading does not depend on its own value, so the input can be any number.
        placeholders = torch.zeros(features.shape, dtype=model.dtype, device=model.device)
        target_ages = torch.from_numpy(ages[:, None]).to(model.device)
        prior = cache.condition(rows, features, target_ages)
        view = cache.select(rows).view()
        return model.forward_cached(features, placeholders, view, prior, target_ages).conditional[:, 0]


def draw_at_times(
    model: DEformer, observed: ObservedReadings, targets: Targets, num_draws: int, seed: int = 0
) -> Floats:
    """Draw values of sensors at given times jointly, several times, given observed readings of their records.

    By the chain rule, each value is drawn given observed readings and values that were drawn before it. The targets of
    a record are drawn in groups, in order of time. Within a group, the order is random. The context of a group has half
    as many observed and drawn readings around it as a training example. It also has the readings of each sensor outside
    of them (see the docstring of the module). Each value of the group is added to the context of the next one.

    Args:
        model: The network, in evaluation mode, for irregular readings.
        observed: The observed readings. A record need not have any.
        targets: The sensors and times. Those of context features are skipped, because these have no distribution.
        num_draws: Number of draws.
        seed: Seed of the random numbers: calls with equal arguments give equal draws.

    Returns:
        (num_draws, T) values in raw units or label codes, NaN for skipped targets. They are clipped to the range of the
        training values, extended by its width on either side.

    Raises:
        ConfigError: The model was not trained on irregular readings.
    """
    check_irregular(model)
    drawn = np.full((num_draws, len(targets)), np.nan)
    order_rng, generator = np.random.default_rng(seed), torch.Generator(model.device).manual_seed(seed)
    selector = _ContextSelector(model, observed)
    max_size = max(1, (selector.num_near + 1) // 2)
    groups = selector.divide(targets, np.flatnonzero(~model.schema.is_context[targets.codes]), max_size)
    orders = [order_rng.permutation(len(group.targets)) for group in groups]
    groups = [replace(group, targets=group.targets[order]) for group, order in zip(groups, orders, strict=True)]
    # Groups of a record depend on each other. So the first groups of all records are drawn together, then the second
    # ones, and so on.
    records = np.array([group.record for group in groups], np.int64)
    _, turn = ragged_indices(np.bincount(records)) if len(groups) else (records, records)
    earlier_of_record: dict[int, Ints] = {}  # by record, the latest targets that were drawn
    for current in range(int(turn.max(initial=-1)) + 1):
        groups_of_turn = [groups[i] for i in np.flatnonzero(turn == current).tolist()]
        contexts = [
            _JoinedContext.choose(selector, targets, group, earlier_of_record.get(group.record))
            for group in groups_of_turn
        ]
        # Row d of a group is its draw d.
        rows = [(i, draw) for i in range(len(groups_of_turn)) for draw in range(num_draws)]
        lengths = [len(contexts[i].codes) + len(groups_of_turn[i].targets) for i, _ in rows]
        for batch in _batch_by_length(lengths):
            part = [rows[i] for i in batch]
            _draw_groups(model, targets, [(groups_of_turn[i], contexts[i], draw) for i, draw in part], drawn, generator)
        for group in groups_of_turn:
            earlier = np.concatenate([earlier_of_record.get(group.record, np.empty(0, np.int64)), group.targets])
            earlier_of_record[group.record] = earlier[-2 * selector.num_near :]
    return drawn


@dataclass(frozen=True, slots=True)
class _JoinedContext:
    """The context of a group of targets that are drawn: observed readings and values that were drawn before.

    Attributes:
        codes: (C,) feature codes.
        values: (C,) observed values in raw units, meaningless for drawn ones.
        ages: (C,) seconds from the origin of the record.
        drawn: (C,) index of the target of each drawn value, −1 for observed readings.
    """

    codes: Ints
    values: Floats
    ages: Floats
    drawn: Ints

    @staticmethod
    def choose(selector: _ContextSelector, targets: Targets, group: _Group, earlier: Ints | None) -> _JoinedContext:
        """Return the context of a group.

        Args:
            selector: Chooses observed readings.
            targets: All targets.
            group: The group.
            earlier: Indexes of targets of its record that were drawn before; None if there are none.
        """
        observed = selector.observed
        run = np.sort(selector.find_run(group))
        before = np.empty(0, np.int64) if earlier is None else earlier
        codes = np.concatenate([observed.codes[run], targets.codes[before]])
        ages = np.concatenate([observed.ages[run], targets.ages[before]])
        values = np.concatenate([observed.values[run], np.full(len(before), np.nan)])
        drawn = np.concatenate([np.full(len(run), -1), before])
        # Of both kinds, those nearest in time are used.
        target_ages = targets.ages[group.targets]
        distance = np.maximum(np.maximum(target_ages.min() - ages, ages - target_ages.max()), 0.0)
        num_used = max(1, selector.num_near + 1 - len(group.targets))
        used = np.argsort(distance, kind="stable")[:num_used]
        # The observed ones among them are the run, outside of which each sensor has a latest and an earliest reading.
        observed_places = used[used < len(run)]
        start, stop = (observed_places.min(), observed_places.max() + 1) if len(observed_places) else (0, len(run))
        outside = selector.find_outside(replace(group, start=group.start + start, stop=group.start + stop))
        used = used[shuffle(len(used))]
        return _JoinedContext(
            np.concatenate([observed.codes[outside], codes[used]]),
            np.concatenate([observed.values[outside], values[used]]),
            np.concatenate([observed.ages[outside], ages[used]]),
            np.concatenate([np.full(len(outside), -1), drawn[used]]),
        )


def _draw_groups(
    model: DEformer,
    targets: Targets,
    rows: Sequence[tuple[_Group, _JoinedContext, int]],
    drawn: Floats,
    generator: torch.Generator,
) -> None:
    """Draw the values of groups, one target of each group after the other.

    Args:
        model: The network.
        targets: All targets.
        rows: For each of N rows a group, its context, and the number of the draw.
        drawn: (num_draws, T) the drawn values, to which those of the groups are added.
        generator: Source of random numbers.
    """
    schema = model.schema
    low, high = compute_raw_bounds(schema)
    sizes = np.array([len(group.targets) for group, _, _ in rows])
    values = [np.where(c.drawn >= 0, drawn[draw, c.drawn], c.values) for _, c, draw in rows]
    cache = _prefill(model, [c.codes for _, c, _ in rows], values, [c.ages for _, c, _ in rows], int(sizes.max()))
    draws = np.array([draw for _, _, draw in rows])
    for k in range(int(sizes.max())):
        remaining = np.flatnonzero(sizes > k)
        index = np.array([rows[i][0].targets[k] for i in remaining.tolist()])
        codes, ages = targets.codes[index], targets.ages[index]
        conditional = _predict(model, codes, ages, cache, remaining)
        sample = conditional.sample(generator).double().cpu().numpy()
        raw = round_to_quantum(schema, codes, schema.denormalise(codes, sample))
        raw = np.clip(raw, low[codes], high[codes])
        drawn[draws[remaining], index] = raw
        all_codes, normalised, all_ages = np.zeros(len(rows), np.int64), np.zeros(len(rows)), np.zeros(len(rows))
        all_codes[remaining], all_ages[remaining] = codes, ages
        normalised[remaining] = schema.normalise(codes, raw)
        cache.append(all_codes, normalised, all_ages, sizes > k + 1)
