"""Compiled code says what the plain network says, and the same bits however records are cut and mixed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, replace
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import (
    P_VALUE_EXPONENT,
    Calibration,
    PrefixState,
    advance_prefix_state,
    compute_running_sums,
)
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import Contribution
from deformer_stream.engine.explain import explain_records
from deformer_stream.engine.order_trees import build_order_tree, compute_tree_conditionals
from deformer_stream.engine.records import INITIAL_RUNNING
from deformer_stream.kernels import build
from deformer_stream.kernels.cpu import CpuKernels, RaggedBatch, is_supported
from deformer_stream.kernels.kv_cache import CpuKVCache
from deformer_stream.model.deformer import PRESETS, DEformer, ModelConfig
from deformer_stream.model.distributions import Conditional
from deformer_stream.model.schema import Feature, Schema
from tests.engine.random_models import draw_records, make_model, normalise_values, schemas
from tests.engine.test_engine import ENOUGH_CACHE_BYTES, Collected, batch_of, run_stream

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Precision = Literal["float32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
CONFIG = ModelConfig(d_model=64, layers=2, heads=4, feedforward=96, mixtures=3, hidden=(24,))
SHAPES = st.builds(
    ModelConfig,
    d_model=st.sampled_from([64, 128]),
    layers=st.integers(1, 3),
    heads=st.sampled_from([1, 2, 4]),
    feedforward=st.sampled_from([32, 96]),
    mixtures=st.integers(1, 20),
    norm=st.sampled_from(["pre", "post"]),
    activation=st.sampled_from(["gelu", "relu"]),
    memory=st.sampled_from(["all", "values"]),
    hidden=st.just((24,)),
    gaussians=st.sampled_from([0, 1, 11]),
)
# Of ln p, the score and the record's excess. The larger one allows for sums that round to another bfloat16 in one order
# than in another, at some places of a record.
TOLERANCE: dict[Precision, float] = {"float32": 2e-3, "bfloat16": 5e-2}


@pytest.fixture(autouse=True, scope="module")
def two_threads() -> Iterator[None]:
    """They share the work, and must not be seen in the numbers. Other tests are content with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def compiled(model: DEformer) -> DEformer:
    model.kernel_library = build.load_kernels(model.config.precision == "bfloat16")
    assert model.kernel_library is not None, "the tests of compiled code need a C compiler"
    return model


def scored(
    model: DEformer, codes: Ints, raw: Floats, seed: int, most: int = 40, cache: int = ENOUGH_CACHE_BYTES
) -> Collected:
    """The records' readings, interleaved and cut at random, through an engine."""
    calibration = Calibration.from_statistics(np.arange(100.0), "random")
    return run_stream(codes, raw, Engine(model, calibration, "fp", 0.05, Limits(cache_bytes=cache)), seed, most)


def numbers(found: Collected, records: int) -> Floats:
    """(M, 3) ln p, 0 for context, its running sum and the score of each reading, record after record."""
    rows = [np.array(found.readings[str(r)])[:, 1:4] for r in range(records)]
    return np.nan_to_num(np.concatenate(rows))


@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=25)
@given(schema=schemas(max_features=24, context=True), shape=SHAPES, seed=st.integers(0, 2**16), most=st.integers(1, 60))
def test_what_compiled_code_says_is_what_the_network_says(
    precision: Precision, schema: Schema, shape: ModelConfig, seed: int, most: int
) -> None:
    """Laws 1 and 2, for records that arrive in pieces, beside others."""
    model = compiled(make_model(schema, replace(shape, precision=precision), seed, torch.float32))
    codes, raw = draw_records(schema, 9, seed, missing_share=0.2)
    features, values = torch.from_numpy(codes), torch.from_numpy(normalise_values(schema, codes, raw)).float()
    with torch.inference_mode():
        expected = model.log_prob(features, values).double().numpy()
        excess = model.conditionals(features, values).score(values)[1].double().numpy()
    found = scored(model, codes, raw, seed, most)
    tolerance = TOLERANCE[precision]
    np.testing.assert_allclose(numbers(found, 9)[:, 0], expected[codes >= 0], atol=tolerance)
    excess = np.where((codes >= 0) & ~schema.is_context[codes], excess, 0.0).sum(1)
    np.testing.assert_allclose([found.closed[str(r)][4] for r in range(9)], excess, atol=5 * tolerance)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("gaussians", [0, 5])
@pytest.mark.parametrize("memory", ["all", "values"])
def test_scores_do_not_depend_on_cuts_nor_on_eviction(
    precision: Precision, gaussians: int, memory: Literal["all", "values"]
) -> None:
    config = replace(CONFIG, precision=precision, gaussians=gaussians, memory=memory)
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(21)))
    model = compiled(make_model(schema, config, dtype=torch.float32))
    codes, raw = draw_records(schema, 60, 1, missing_share=0.2)
    whole = numbers(scored(model, codes, raw, 2, 5000), 60)
    for most, cache in ((40, ENOUGH_CACHE_BYTES), (1, ENOUGH_CACHE_BYTES), (40, 1_000_000), (300, 0)):
        again = numbers(scored(model, codes, raw, 2, most, cache), 60)
        np.testing.assert_allclose(again, whole, atol=TOLERANCE[precision])


@pytest.mark.parametrize("memory", ["all", "values"])
def test_rounded_factors_say_the_same_in_pairs_and_singly(memory: Literal["all", "values"]) -> None:
    """In the same pages: a cache is no larger where the processor takes them one by one."""
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(21)))
    model = make_model(schema, replace(CONFIG, precision="bfloat16", memory=memory), dtype=torch.float32)
    codes, raw = draw_records(schema, 60, 1, missing_share=0.2)
    found, pages = [], []
    for singly in (False, True):
        model.kernel_library = build.build_library(
            build.SOURCES, "", build.BFLOAT16_FLAG, *[build.NO_BFLOAT16_DOT_FLAG] * singly
        )
        assert model.kernel_library is not None, "the tests of compiled code need a C compiler"
        pages.append(CpuKernels(model, model.kernel_library).bytes_per_record)
        found.append(numbers(scored(model, codes, raw, 2), 60))
    np.testing.assert_allclose(found[1], found[0], atol=TOLERANCE["bfloat16"])
    assert pages[0] == pages[1]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("gaussians", [0, 5])
@pytest.mark.parametrize("memory", ["all", "values"])
def test_what_is_rebuilt_is_what_steps_have_left(
    precision: Precision, gaussians: int, memory: Literal["all", "values"]
) -> None:
    """Bit by bit, whatever a rebuild leaves out; and so is what is said of the reading that comes next."""
    config = replace(CONFIG, precision=precision, gaussians=gaussians, memory=memory, layers=3)
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(21)))
    model, records = compiled(make_model(schema, config, dtype=torch.float32)), 30
    codes, raw = draw_records(schema, records, 1)
    found = []
    for evicted in (False, True):
        limits = Limits(cache_bytes=20_000_000)
        engine = Engine(model, Calibration.from_statistics(np.arange(100.0), "random"), "fp", 0.05, limits)
        assert isinstance(engine.cache, CpuKVCache)
        for k in range(20):
            if evicted and k == 19:
                engine.cache.free(np.arange(records))
                engine.cache.pool[:] = 0
            step = batch_of([(str(r), int(codes[r, k]), float(raw[r, k])) for r in range(records)])
            said = engine.handle(step, 0).scored
        assert engine.pop_cache_rebuilds() == records * evicted
        pages = engine.cache.pool.reshape(engine.cache.num_pages, -1)[engine.cache.page_table[:records].ravel()]
        found.append((said.log_likelihood, said.score, pages))
    for kept, rebuilt in zip(*found, strict=True):
        np.testing.assert_array_equal(rebuilt, kept)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**16), most=st.sampled_from([1, 3, 40, 900]), masked=st.booleans())
def test_statistics_go_on_as_the_rule_says(seed: int, most: int, masked: bool) -> None:
    """From mild to very wild readings, in two pieces; of records in any slots, some without a reading in a piece."""
    model = compiled(make_model(Schema((Feature("a", "continuous"),)), CONFIG, dtype=torch.float32))
    assert model.kernel_library is not None
    rng, code, R = np.random.default_rng(seed), CpuKernels(model, model.kernel_library), 6
    slots, running = rng.permutation(9)[:R], np.full(9, INITIAL_RUNNING)
    pieces = []
    for _ in range(2):
        edges = np.append(0, np.cumsum(rng.integers(0, most + 1, R)))
        M = int(edges[-1])
        surprises = -(rng.exponential(size=(3, M)) * 10.0 ** rng.choice([-3, 0, 0, 0, 0, 1, 6, 30], (3, M)))
        scored, decided = rng.random((2, M)) < 0.7 if masked else (None, None)
        columns = np.empty((4, M))
        code.advance(running, slots, edges, surprises, scored, decided, columns, P_VALUE_EXPONENT)
        pieces.append((edges, surprises, scored, decided, columns))
    for i, slot in enumerate(slots.tolist()):
        state, sums = PrefixState.initial(1), np.zeros((2, 1))
        for edges, surprises, scored, decided, columns in pieces:
            at = slice(edges[i], edges[i + 1])
            if at.start == at.stop:
                continue
            on = np.ones(surprises.shape[1], bool) if scored is None else scored
            said = np.where(on, surprises, 0.0)[:, None, at]
            score, state = advance_prefix_state(
                state, said[1], on[None, at], None if decided is None else decided[None, at]
            )
            log_likelihood = compute_running_sums(sums[0], said[0])
            sums = np.stack([log_likelihood[:, -1], compute_running_sums(sums[1], said[2])[:, -1]])
            np.testing.assert_array_equal(columns[0, at], np.where(on, surprises[0], np.nan)[at])
            np.testing.assert_allclose(columns[1:3, at], [log_likelihood[0], score[0]], rtol=1e-10, atol=1e-12)
        expected = state.num_scored, state.neg_log_p_sum, state.min_log_p, state.max_statistic, *sums
        got = [running[name][slot] for name in ("scored", "total", "least", "peak", "log_likelihood", "excess")]
        np.testing.assert_allclose(got, np.array(expected).ravel(), rtol=1e-10, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    schema=schemas(max_features=24, context=True),
    shape=SHAPES,
    hidden=st.sampled_from([(), (24,), (40, 64)]),
    identity=st.sampled_from(["embedding", "coordinates", "both"]),
    wild=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_readings_are_judged_as_the_plain_network_judges_them(
    schema: Schema,
    shape: ModelConfig,
    hidden: tuple[int, ...],
    identity: Literal["embedding", "coordinates", "both"],
    wild: bool,
    seed: int,
) -> None:
    """ln p, p-value and excess, of wild values as well, whatever leads to the tokens; and the conditionals."""
    model = compiled(make_model(schema, replace(shape, hidden=hidden, identity=identity), seed, torch.float32))
    codes, raw = draw_records(schema, 4, seed)
    if wild:
        raw = np.where(
            schema.is_linear[codes], raw * 10.0 ** np.random.default_rng(seed).integers(-2, 9, raw.shape), raw
        )
    features, values = torch.from_numpy(codes), torch.from_numpy(normalise_values(schema, codes, raw)).float()
    assert model.kernel_library is not None
    code, L = CpuKernels(model, model.kernel_library), len(schema)
    cache = code.create_cache(1 << 24)
    cache.ensure_capacity(4)
    cache.allocate(np.arange(4), np.full(4, L))
    ragged = RaggedBatch(
        codes.ravel(), values.numpy().ravel(), L * np.arange(5), np.zeros(4, np.int64), cache.page_table
    )
    with torch.inference_mode():
        plain, other = model.conditionals(features, values), code.conditionals(cache, ragged)
        expected = plain.compute_score_terms(values, plain.compute_surprisal(values))
        again = other.reshape(4, L)
        twice = again.compute_score_terms(values, again.compute_surprisal(values))
    found = code.score(cache, ragged).reshape(3, 4, L)
    for one, two, three in zip(found, astuple(expected), astuple(twice), strict=True):
        np.testing.assert_allclose(one, two.numpy(), rtol=1e-3, atol=2e-3)
        np.testing.assert_allclose(one, three.numpy(), rtol=1e-4, atol=1e-3)


def test_rounding_moves_scores_by_little_and_does_something() -> None:
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(12)))
    codes, raw = draw_records(schema, 50, 3)
    features, values = torch.from_numpy(codes), torch.from_numpy(normalise_values(schema, codes, raw)).float()
    exact, near = (
        make_model(schema, replace(PRESETS["tiny"], precision=precision), dtype=torch.float32).log_prob(
            features, values
        )
        for precision in PRECISIONS
    )
    assert 0 < float((exact - near).abs().max().detach()) < 2e-2
    training = make_model(schema, replace(PRESETS["tiny"], precision="bfloat16"), dtype=torch.float32).train()
    assert torch.equal(training.log_prob(features, values), exact), "training sees all digits"


@pytest.mark.parametrize(
    "change", [{"d_model": 96, "heads": 6}, {"heads": 8}, {"feedforward": 40}, {"tokens": "single"}]
)
def test_other_shapes_are_left_to_the_plain_network(change: dict[str, Any]) -> None:
    model = make_model(Schema((Feature("a", "continuous"),)), replace(CONFIG, **change), dtype=torch.float32)
    assert not is_supported(model)
    assert is_supported(make_model(Schema((Feature("a", "continuous"),)), CONFIG, dtype=torch.float32))


def test_surprise_of_large_and_of_lopsided_mixtures() -> None:
    """Narrow components, far ones, and some that weigh next to nothing."""
    model = compiled(make_model(Schema((Feature("a", "continuous"),)), CONFIG, dtype=torch.float32))
    assert model.kernel_library is not None
    code = CpuKernels(model, model.kernel_library)
    generator = torch.Generator().manual_seed(0)
    for J in (1, 16, 150):
        weights, means, scales = (torch.randn((40, J), generator=generator) for _ in range(3))
        none = torch.zeros((40, 1))
        log_weights = torch.log_softmax(30 * weights, -1)
        mixture = Conditional(none[:, 0] > 0, log_weights, 5 * means, (2 * scales).exp(), none)
        values = 10 * torch.randn(40, generator=generator)
        expected, got = mixture.compute_surprisal(values), code.surprisal(mixture, values)
        assert expected is not None
        assert got is not None
        for a, b in zip(astuple(got), astuple(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_quantiles_have_so_much_mass_below() -> None:
    model = compiled(make_model(Schema((Feature("a", "continuous"),)), CONFIG, dtype=torch.float32))
    assert model.kernel_library is not None
    code, qs = CpuKernels(model, model.kernel_library), (0.05, 0.5, 0.95)
    generator = torch.Generator().manual_seed(0)
    for J in (1, 16, 40):
        weights, means, scales = (torch.randn((2, 20, J), generator=generator) for _ in range(3))
        none = torch.zeros((2, 20, 1))
        mixture = Conditional(none[..., 0] > 0, torch.log_softmax(2 * weights, -1), 3 * means, scales.exp(), none)
        found = code.quantiles(mixture, qs)
        for q, values in zip(qs, found, strict=True):
            torch.testing.assert_close(mixture.cdf(values), torch.full((2, 20), q), rtol=0, atol=2e-6)


@settings(max_examples=25, deadline=None)
@given(schema=schemas(max_features=20), shape=SHAPES, seed=st.integers(0, 2**16), mirrored=st.booleans())
def test_trees_of_orders_say_what_the_network_says_of_them(
    schema: Schema, shape: ModelConfig, seed: int, mirrored: bool
) -> None:
    model, W = compiled(make_model(schema, shape, seed, torch.float32)), len(schema)
    assert model.kernel_library is not None
    codes, raw = draw_records(schema, 3, seed)
    features, values = torch.from_numpy(codes), torch.from_numpy(normalise_values(schema, codes, raw)).float()
    given_, asked = (W // 3, W // 4) if seed % 2 else (0, 0)
    orders = build_order_tree(given_, W - given_ - asked, asked, mirrored)
    at = values[:, orders.reading_index]
    with torch.inference_mode():
        found = compute_tree_conditionals(
            model, orders, features, values, CpuKernels(model, model.kernel_library)
        ).log_prob(at)
        expected = compute_tree_conditionals(model, orders, features, values).log_prob(at)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def figures(part: Contribution) -> list[float]:
    expected = part.expected
    told = part.surprise, part.relief, part.attribution, expected.low, expected.median, expected.high
    return [number for number in told if isinstance(number, float)]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**16), loud=st.booleans())
def test_explanations_are_the_same(seed: int, loud: bool) -> None:
    continuous = [Feature(f"x{i}", "continuous", context=i == 0) for i in range(6)]
    discrete = [Feature(f"s{i}", "discrete", labels=("a", "b", "c")) for i in range(3)]
    schema = Schema((*continuous, *discrete))
    model = compiled(make_model(schema, replace(CONFIG, gaussians=seed % 3), seed, torch.float32))
    assert model.kernel_library is not None
    codes, raw = draw_records(schema, 5, seed, missing_share=0.2)
    given_ = model, codes, raw, [{}] * 5, list("abcde"), lambda score, _: np.full(score.shape, loud)
    code = CpuKernels(model, model.kernel_library)
    for effort in ("full", "fast"):
        plain, same = explain_records(*given_, effort), explain_records(*given_, effort, code)
        for one, other in zip(plain, same, strict=True):
            assert one.silenced_by == other.silenced_by
            for a, b in zip(*(sorted(of.contributions, key=attrgetter("feature")) for of in (one, other)), strict=True):
                assert (a.feature, a.value, a.suspect) == (b.feature, b.value, b.suspect)
                np.testing.assert_allclose(figures(a), figures(b), rtol=1e-4, atol=1e-3)
