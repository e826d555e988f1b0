"""The compiled kernels score irregular readings as PyTorch does, and the same bits however contexts are cut."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from deformer_stream.engine.engine import Limits
from deformer_stream.engine.order_trees import build_order_tree
from deformer_stream.kernels import abi
from deformer_stream.kernels import cpu as kernels_of_cpu
from deformer_stream.kernels.cpu import CpuKernels, RaggedBatch, is_supported
from deformer_stream.kernels.kv_cache import CpuKVCache, max_cached_readings
from deformer_stream.kernels.library import load_library
from deformer_stream.model.conditional_arrays import PriorArrays
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.gaussian_prior import PriorConditional
from deformer_stream.model.reading_times import ReadingTimes
from deformer_stream.model.schema import Feature, Schema
from tests.effort import num_examples
from tests.engine.irregular_streams import compute_expected_log_prob, draw_readings, make_engine
from tests.engine.irregular_streams import score as score_stream
from tests.engine.random_models import make_model, schemas
from tests.model.irregular_models import SCHEMA as STREAM_SCHEMA

pytestmark = pytest.mark.usefixtures("two_threads")

Ints = NDArray[np.int64]
Floats32 = NDArray[np.float32]
Precision = Literal["float32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
TOLERANCE: dict[Precision, float] = {"float32": 2e-3, "bfloat16": 5e-2}
TIMES = ReadingTimes(duration=48 * 3_600_000_000, resolution=60_000_000)
SCHEMA = Schema(
    (
        *(Feature(f"sensor{i}", "continuous", context=i == 3) for i in range(5)),
        Feature("direction", "continuous", period=360.0, scale=90.0),
        Feature("mode", "discrete", labels=("off", "on")),
    ),
    reading_times=TIMES,
)
CONFIG = ModelConfig(
    d_model=64,
    layers=2,
    heads=4,
    feedforward=96,
    mixtures=3,
    hidden=(24,),
    neighbors=4,
    process_rank=2,
    process_scales=3,
    context_recent=12,
    context_block=24,
)
SHAPES = st.builds(
    replace,
    st.just(CONFIG),
    d_model=st.sampled_from([64, 128]),
    layers=st.integers(1, 3),
    heads=st.sampled_from([1, 4]),
    norm=st.sampled_from(["pre", "post"]),
    memory=st.sampled_from(["all", "values"]),
    hidden=st.sampled_from([(), (24,), (40, 64)]),
    neighbors=st.sampled_from([0, 1, 7, 8, 16, 32]),
    neighbor_decay=st.sampled_from([1.0, 0.8, 0.05]),
    process_scales=st.integers(1, 4),
)
seeds = st.integers(0, 2**16)


def make_irregular_model(schema: Schema, config: ModelConfig, seed: int) -> DEformer:
    """Return a model in float32 with compiled kernels, whose weights and Gaussian process are random."""
    if not config.neighbors:
        config = replace(config, process_rank=0, process_scales=0)
    model = make_model(replace(schema, reading_times=TIMES), config, seed, torch.float32)
    if model.process is not None:
        # Parameters of the process are float64, whatever the dtype of the network.
        process, generator = model.process.double(), torch.Generator().manual_seed(seed)

        def draw(like: Tensor) -> Tensor:
            return torch.randn(like.shape, generator=generator, dtype=torch.float64)

        process.means.copy_(0.3 * draw(process.means))
        process.factors.copy_(0.5 * draw(process.factors))
        process.deviations.copy_(0.3 * draw(process.deviations).abs())
        process.noise.copy_(0.05 + 0.3 * draw(process.noise).abs())
        process.outlier_share.copy_(draw(process.outlier_share).sigmoid())
        process.outlier_factor.copy_(draw(process.outlier_factor).exp())
        process.scales.copy_(torch.logspace(2, 6, len(process.scales), dtype=torch.float64))
    model.kernel_library = load_library(config.precision == "bfloat16")
    assert model.kernel_library is not None, "the tests need compiled kernels: run `make kernels`"
    return model


def kernels_for(model: DEformer) -> CpuKernels:
    kernels = CpuKernels.for_model(model)
    assert kernels is not None
    return kernels


def draw_contexts(schema: Schema, num_records: int, num_readings: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, values and ages of contexts whose sensors report several times.

    Some readings are late, some have the same time, some values are extreme, and some labels were not seen in training.
    """
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, len(schema), (num_records, num_readings))
    values = rng.standard_t(3, codes.shape)
    label_codes = rng.integers(0, 1 + schema.label_counts[codes])
    values = np.where(schema.label_counts[codes] > 0, label_codes, values)
    ages = np.sort(rng.integers(0, 2880, codes.shape), 1) * 60.0
    ages += np.where(rng.random(codes.shape) < 0.2, -7200.0, 0.0)
    return torch.from_numpy(codes), torch.from_numpy(values).float(), torch.from_numpy(ages)


def score_in_parts(
    kernels: CpuKernels,
    contexts: tuple[Tensor, Tensor, Tensor],
    num_new: Ints,
    is_shuffled: bool = False,
    has_others: bool = False,
) -> Floats32:
    """Score contexts in several calls of the kernels.

    Args:
        kernels: The kernels.
        contexts: Codes, values and ages, (N, L) each.
        num_new: (calls, N) the number of readings of each context that each call scores.
        is_shuffled: Whether the contexts have another order in each call.
        has_others: Whether to return a fourth row, ln of the p-values given the readings of other sensors.

    Returns:
        (3, N, L) score terms, or (4, N, L).
    """
    codes, values, ages = (t.numpy() for t in contexts)
    N, L = codes.shape
    cache = kernels.create_cache(N * kernels.bytes_per_record)
    cache.ensure_capacity(N)
    terms, rng = np.full((4 if has_others else 3, N, L), np.nan, np.float32), np.random.default_rng(0)
    for counts in num_new:
        records = rng.permutation(N) if is_shuffled else np.arange(N)
        records = records[counts[records] > 0]
        if not len(records):
            continue
        cache.mark_in_use(records)
        before = cache.num_cached_readings[records]
        cache.allocate_all(records, counts[records])
        places = [(r, k) for r, start in zip(records, before, strict=True) for k in range(start, start + counts[r])]
        row, column = np.array(places).T
        batch = RaggedBatch(
            codes[row, column],
            values[row, column],
            np.append(0, np.cumsum(counts[records])),
            before,
            cache.page_table[records],
            ages=ages[row, column],
        )
        terms[:, row, column] = kernels.score(cache, batch, has_others)
        cache.num_cached_readings[records] += counts[records]
    assert not np.isnan(terms).any()
    return terms


@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=num_examples(40), deadline=None)
@given(schema=schemas(max_features=12, context=True), shape=SHAPES, seed=seeds, num_readings=st.integers(1, 40))
def test_conditionals_equal_pytorchs(
    precision: Precision, schema: Schema, shape: ModelConfig, seed: int, num_readings: int
) -> None:
    if schema.has_repeating_sensors:
        schema = SCHEMA
    model = make_irregular_model(schema, replace(shape, precision=precision), seed)
    codes, values, ages = draw_contexts(schema, 3, num_readings, seed)
    with torch.inference_mode():
        expected = model.conditionals(codes, values, ages=ages).log_prob(values)
        conditional = kernels_for(model).conditionals_of_records(codes, values, ages=ages)
        actual = torch.from_numpy(conditional.log_prob(values))
    # Far from the mean, ln p is -z²/2: if the mean is off by e standard deviations, ln p is off by e·sqrt(2·|ln p|).
    allowed = TOLERANCE[precision] * (2 * expected.abs()).clamp(min=1.0).sqrt()
    assert ((actual - expected).abs() <= allowed).all()


@settings(max_examples=num_examples(40), deadline=None)
@given(shape=SHAPES, seed=seeds, num_readings=st.integers(1, 40))
def test_prior_equals_pytorchs(shape: ModelConfig, seed: int, num_readings: int) -> None:
    """The kernels compute in float64, as PyTorch does."""
    model = make_irregular_model(SCHEMA, replace(shape, neighbors=max(1, shape.neighbors)), seed)
    codes, values, ages = draw_contexts(SCHEMA, 3, num_readings, seed)
    assert model.process is not None
    assert_priors_are_close(compute_prior(kernels_for(model), codes, values, ages), model.process(codes, values, ages))


@settings(max_examples=num_examples(40), deadline=None)
@given(shape=SHAPES, seed=seeds, num_readings=st.integers(1, 40), is_split=st.booleans())
def test_p_values_given_other_sensors_equal_pytorchs(
    shape: ModelConfig, seed: int, num_readings: int, is_split: bool
) -> None:
    """In one call or in two, of which the second one reads the context from the cache."""
    model = make_irregular_model(SCHEMA, replace(shape, neighbors=max(1, shape.neighbors)), seed)
    contexts = draw_contexts(SCHEMA, 3, num_readings, seed)
    assert model.process is not None
    expected = model.process.compute_log_p_others(*contexts)
    num_first = num_readings // 2 if is_split else 0
    num_new = np.array([[num_first] * 3, [num_readings - num_first] * 3])
    terms = score_in_parts(kernels_for(model), contexts, num_new, has_others=True)
    # Where p is tiny, its logarithm is -x²/2: a relative error of x counts twice.
    torch.testing.assert_close(torch.from_numpy(terms[3]).double(), expected, rtol=1e-5, atol=1e-5)
    assert (terms[:3] == score_in_parts(kernels_for(model), contexts, num_new)).all()


def assert_priors_are_close(actual: PriorArrays, expected: PriorConditional) -> None:
    for one, other in zip(astuple(actual), expected.tensors[:3], strict=True):
        np.testing.assert_allclose(one.reshape(other.shape), other.numpy(), rtol=1e-6, atol=1e-6)


def compute_prior(
    kernels: CpuKernels, codes: Tensor, values: Tensor, ages: Tensor, depths: Ints | None = None
) -> PriorArrays:
    """Return the prior's distributions of the readings of N contexts, as the kernels compute them."""
    N, L = codes.shape
    cache = kernels.create_cache(N * kernels.bytes_per_record * 3, 3 * max_cached_readings(kernels.parameters))
    batch = RaggedBatch(
        codes.flatten().numpy(),
        values.flatten().numpy(),
        L * np.arange(N + 1),
        np.zeros(N, np.int64),
        np.arange(N * cache.pages_per_record).reshape(N, -1),
        depths=None if depths is None else np.tile(depths, N),
        ages=ages.flatten().numpy(),
    )
    prior = kernels._score_batch(cache, batch, hidden=np.empty((N * L, kernels.parameters.config.d_model), np.float32))
    assert prior is not None
    return prior


@pytest.mark.parametrize("decay", [1.0, 0.8])
def test_neighbors_of_equal_correlations_are_the_latest_readings(decay: float) -> None:
    """All readings of one sensor at one time have the same correlation, and those of an unfitted process have none."""
    for is_fitted in (True, False):
        model = make_irregular_model(SCHEMA, replace(CONFIG, neighbor_decay=decay), 3)
        assert model.process is not None
        if not is_fitted:
            model.process.factors.zero_()
            model.process.deviations.zero_()
        codes = torch.randint(0, 2, (4, 30), generator=torch.Generator().manual_seed(1))
        values = torch.randn(4, 30, generator=torch.Generator().manual_seed(2))
        ages = torch.full((4, 30), 60.0, dtype=torch.float64)
        prior = compute_prior(kernels_for(model), codes, values, ages)
        assert_priors_are_close(prior, model.process(codes, values, ages))
        # Another value of a reading that is not among the four latest ones of its sensor changes nothing.
        values[:, 0] += 1.0
        other = compute_prior(kernels_for(model), codes, values, ages)
        assert np.array_equal(other.means.reshape(4, 30, 2)[:, 24:], prior.means.reshape(4, 30, 2)[:, 24:])


@pytest.mark.parametrize("lag", [0.0, 1e-3, 1e5, 1e8])
def test_prior_of_almost_equal_readings_is_finite(lag: float) -> None:
    """The covariance matrix is almost singular, because the noise is tiny beside the other variances."""
    model = make_irregular_model(SCHEMA, replace(CONFIG, neighbors=32), 3)
    assert model.process is not None
    model.process.noise.zero_()
    model.process.factors.mul_(1e8)
    model.process.scales.mul_(1e6)
    codes, values = torch.zeros(1, 36, dtype=torch.long), torch.zeros(1, 36)
    ages = lag * torch.arange(36, dtype=torch.float64).unsqueeze(0)
    prior = compute_prior(kernels_for(model), codes, values, ages)
    assert all(np.isfinite(array).all() for array in astuple(prior))
    assert (prior.scales[:, 0] >= 0.0099).all(), "a reading has at least the variance of its noise"


@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=num_examples(20), deadline=None)
@given(
    data=st.data(),
    memory=st.sampled_from(["values", "all"]),
    neighbors=st.sampled_from([0, 4, 12]),
    decay=st.sampled_from([1.0, 0.8]),
    seed=seeds,
)
def test_scores_do_not_depend_on_the_split_into_calls(
    precision: Precision, data: st.DataObject, memory: Any, neighbors: int, decay: float, seed: int
) -> None:
    """They are the same bits, also if contexts share a batch with others."""
    config = replace(CONFIG, precision=precision, memory=memory, neighbors=neighbors, neighbor_decay=decay)
    kernels, rng = kernels_for(make_irregular_model(SCHEMA, config, seed)), np.random.default_rng(seed)
    N, L = 7, data.draw(st.integers(1, 40))
    contexts = draw_contexts(SCHEMA, N, L, seed)
    expected = score_in_parts(kernels, contexts, np.full((1, N), L))
    single_steps = score_in_parts(kernels, contexts, np.ones((L, N), np.int64), is_shuffled=True)
    np.testing.assert_array_equal(single_steps, expected)
    cuts = np.sort(rng.integers(0, L + 1, (3, N)), 0)
    random_parts = np.diff(cuts, axis=0, prepend=0, append=L)
    scores = score_in_parts(kernels, contexts, random_parts, is_shuffled=True)
    np.testing.assert_array_equal(scores, expected)


@pytest.mark.parametrize("memory", ["values", "all"])
def test_rebuilt_cache_equals_the_cache_of_single_steps(memory: Any) -> None:
    """Readings that are only written to the cache again change no score and no byte of the pages."""
    kernels = kernels_for(make_irregular_model(SCHEMA, replace(CONFIG, memory=memory), 0))
    N, L = 5, 38
    codes, values, ages = (t.numpy() for t in draw_contexts(SCHEMA, N, L, 4))

    def run(cache: CpuKVCache, start: int, stop: int, num_prefill_only: int) -> Floats32:
        span, counts = np.s_[:, start:stop], np.full(N, stop - start)
        cache.mark_in_use(np.arange(N))
        cache.allocate_all(np.arange(N), counts)
        batch = RaggedBatch(
            codes[span].ravel(),
            values[span].ravel(),
            np.arange(N + 1) * (stop - start),
            np.full(N, start),
            cache.page_table,
            num_prefill_only=np.full(N, num_prefill_only) if num_prefill_only else None,
            ages=ages[span].ravel(),
        )
        terms = kernels.score(cache, batch)
        cache.num_cached_readings[:] = stop
        return terms

    results = []
    for is_rebuilt in (False, True):
        cache = kernels.create_cache(N * kernels.bytes_per_record)
        cache.ensure_capacity(N)
        if is_rebuilt:
            terms = run(cache, 0, L, L - 1)
        else:
            for k in range(L):
                terms = run(cache, k, k + 1, 0)
        num_pages = int(cache.num_pages_for(np.array([L]))[0])
        pages = cache.pool.reshape(cache.num_pages, -1)[cache.page_table[:, :num_pages].ravel()]
        results.append((terms, pages))
    for expected, rebuilt in zip(*results, strict=True):
        np.testing.assert_array_equal(rebuilt, expected)


@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=num_examples(10), deadline=None)
@given(seed=seeds, data=st.data())
def test_streamed_scores_are_those_of_the_definition(precision: Precision, seed: int, data: st.DataObject) -> None:
    """They are the same bits however the stream is cut, and whether or not contexts are evicted from the cache."""
    config = replace(CONFIG, precision=precision, context_recent=3, context_block=4)
    model = make_irregular_model(STREAM_SCHEMA, config, seed)
    readings = list(dict.fromkeys(draw_readings(4, 60, seed)))  # without repeated readings, which are rejected

    def run(cuts: list[int], cache_bytes: int) -> dict[str, list[float]]:
        engine = make_engine(Limits(cache_bytes=cache_bytes), model)
        assert isinstance(engine.cache, CpuKVCache)
        return score_stream(engine, readings, cuts)

    scores = run([], 1 << 24)
    assert run(list(range(1, len(readings))), 1 << 24) == scores
    assert run(sorted(data.draw(st.sets(st.integers(1, len(readings) - 1)))), 0) == scores
    exact_model = make_irregular_model(STREAM_SCHEMA, config, seed).double()
    for record, actual in scores.items():
        _, codes, values, times = zip(*[reading for reading in readings if reading[0] == record], strict=True)
        ages = (np.array(times) - times[0]) / 1e6
        expected = compute_expected_log_prob(exact_model, codes, values, ages.tolist())
        allowed = TOLERANCE[precision] * np.sqrt(np.maximum(1.0, 2 * np.abs(expected)))
        assert (np.abs(np.array(actual) - expected) <= allowed).all()


@settings(max_examples=num_examples(30), deadline=None)
@given(shape=SHAPES, seed=seeds, num_items=st.integers(1, 6), is_mirrored=st.booleans())
def test_conditionals_of_order_trees_equal_those_of_each_order(
    shape: ModelConfig, seed: int, num_items: int, is_mirrored: bool
) -> None:
    """A node's context, time inputs and prior are those of its ancestors."""
    model = make_irregular_model(SCHEMA, shape, seed)
    kernels, num_fixed, num_extra = kernels_for(model), seed % 4, seed % 3
    codes, values, ages = draw_contexts(SCHEMA, 2, num_fixed + num_items + num_extra, seed)
    tree = build_order_tree(num_fixed, num_items, num_extra, is_mirrored)
    nodes_per_part = len(tree.reading_index) // tree.num_parts
    depths = tree.ancestor_mask[:nodes_per_part, :nodes_per_part].sum(1)
    parts = [t[:, tree.reading_index].reshape(-1, nodes_per_part) for t in (codes, values, ages)]
    with torch.inference_mode():
        conditional = kernels.conditionals_of_records(parts[0], parts[1], depths, parts[2])
        actual = torch.from_numpy(conditional.log_prob(parts[1])).float().reshape(2, -1)
        for path in tree.paths:
            nodes = path[path >= 0]
            order = tree.reading_index[nodes]
            own_codes, own_values, own_ages = codes[:, order], values[:, order], ages[:, order]
            expected = model.conditionals(own_codes, own_values, ages=own_ages).log_prob(own_values)
            torch.testing.assert_close(actual[:, nodes], expected, rtol=1e-3, atol=5e-3)


def test_branches_from_a_copied_cache_do_not_change_it() -> None:
    """Branches overwrite readings of a copy, which has depths below the number of copied readings."""
    model = make_irregular_model(SCHEMA, CONFIG, 2)
    kernels = kernels_for(model)
    codes, values, ages = draw_contexts(SCHEMA, 1, 30, 8)
    cache = kernels.create_cache(1 << 22)
    cache.ensure_capacity(1)
    cache.allocate_all(np.array([0]), np.array([30]))
    arrays = codes[0].numpy(), values[0].numpy()
    kernels.score(cache, RaggedBatch(*arrays, np.array([0, 30]), np.array([0]), cache.page_table, ages=ages[0].numpy()))
    cache.num_cached_readings[:] = 30
    before = cache.pool.copy()
    branch_cache = kernels.create_cache(1 << 22)
    branch_cache.copy_from(cache, np.array([0]), np.array([30]), np.array([0]))
    # Readings 24 to 29 again, in the order 29, 28, …, each with the depth of its place.
    order, depths = np.arange(29, 23, -1), np.arange(24, 30)
    batch = RaggedBatch(
        arrays[0][order],
        arrays[1][order],
        np.array([0, 6]),
        np.array([30]),
        branch_cache.page_table,
        depths=depths,
        ages=ages[0].numpy()[order],
    )
    actual = kernels.score(branch_cache, batch)[0]
    np.testing.assert_array_equal(cache.pool, before)
    whole = np.append(np.arange(24), order)
    with torch.inference_mode():
        expected = model.conditionals(codes[:, whole], values[:, whole], ages=ages[:, whole]).log_prob(values[:, whole])
    np.testing.assert_allclose(actual, expected[0, 24:].numpy(), atol=5e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ages": None}, "does not have an age for each"),
        ({"ages": np.zeros(2)}, "does not have an age for each"),
        ({"ages": np.zeros(3, np.float32)}, "Batch.ages has dtype float32, but the compiled kernels need float64"),
    ],
)
def test_batch_without_fitting_times_is_refused(change: dict[str, Any], message: str) -> None:
    """Compiled code would read wrong memory."""
    kernels = kernels_for(make_irregular_model(SCHEMA, CONFIG, 0))
    cache = kernels.create_cache(1 << 20)
    cache.ensure_capacity(1)
    cache.allocate_all(np.array([0]), np.array([3]))
    arrays = np.arange(3), np.zeros(3, np.float32), np.array([0, 3]), np.array([0])
    batch = RaggedBatch(*arrays, page_table=cache.page_table, ages=np.zeros(3))
    assert np.isfinite(kernels.score(cache, batch)).all()
    with pytest.raises((ValueError, TypeError), match=message):
        kernels.score(cache, replace(batch, **change))


def test_models_that_the_kernels_cannot_score_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_kernels(config: ModelConfig) -> bool:
        return is_supported(make_model(SCHEMA, config, dtype=torch.float32))

    assert has_kernels(CONFIG)
    assert has_kernels(replace(CONFIG, neighbors=abi.MAX_NEIGHBORS, process_scales=abi.MAX_PROCESS_SCALES))
    assert not has_kernels(replace(CONFIG, neighbors=abi.MAX_NEIGHBORS + 1))
    assert not has_kernels(replace(CONFIG, process_scales=abi.MAX_PROCESS_SCALES + 1))
    assert not has_kernels(replace(CONFIG, context_recent=0, context_block=0))
    monkeypatch.setattr(kernels_of_cpu, "MAX_COVARIANCES", 3 * len(SCHEMA) ** 2 - 1)
    assert not has_kernels(CONFIG)


def test_cache_holds_the_largest_context() -> None:
    model = make_irregular_model(SCHEMA, CONFIG, 0)
    assert max_cached_readings(model) == len(SCHEMA) + 12 + 24
    cache = kernels_for(model).create_cache(0)
    assert cache.pages_per_record == 3  # 43 readings on pages of 16
    with pytest.raises(ValueError, match="set context_block"):
        max_cached_readings(make_model(SCHEMA, replace(CONFIG, context_recent=0, context_block=0)))
    assert max_cached_readings(make_model(Schema(SCHEMA.features), ModelConfig())) == len(SCHEMA)
