"""The compiled kernels give PyTorch's scores, and the same bits however records are cut into batches and mixed."""

from __future__ import annotations

import ctypes
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
from deformer_stream.calibration.cusum import (
    MAX_EXTREME,
    MAX_REPETITION,
    MAX_SURPRISE,
    NO_KIND,
    OFFSET_KAPPA,
    RECORD_KAPPA,
    SENSOR_KAPPA,
    STEP_KAPPA,
    TIE_TOLERANCE,
    CusumReadings,
    CusumScale,
    advance_sums,
    compute_statistics_by_kind,
    create_states,
    find_largest_kinds,
    find_previous_values,
)
from deformer_stream.calibration.marginals import Marginals
from deformer_stream.calibration.sensor_steps import Steps
from deformer_stream.engine.conditionals import compute_conditionals
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import Contribution
from deformer_stream.engine.explain import explain_records
from deformer_stream.engine.order_trees import build_order_tree
from deformer_stream.engine.records import INITIAL_RUNNING, PREFIX_FIELDS
from deformer_stream.kernels import library
from deformer_stream.kernels.cpu import CpuKernels, CusumArguments, RaggedBatch, is_supported
from deformer_stream.kernels.kv_cache import CpuKVCache
from deformer_stream.kernels.library import load_library
from deformer_stream.model.alert_prior import AlertPrior, PriorPValues
from deformer_stream.model.conditional_arrays import ConditionalArrays
from deformer_stream.model.config import PRESETS
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.distributions import Conditional
from deformer_stream.model.schema import Feature, Schema
from tests.effort import num_examples
from tests.engine.random_models import draw_records, make_config, make_model, normalise_values, schemas
from tests.engine.streams import ENOUGH_CACHE_BYTES, Collected, batch_of, run_stream
from tests.kernels.precisions import PRECISIONS, Precision

pytestmark = pytest.mark.usefixtures("two_threads")

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
CONFIG = ModelConfig(d_model=64, layers=2, heads=4, feedforward=96, mixtures=3, hidden=(24,))
PRIORS: tuple[dict[str, int], ...] = (
    *({}, {"gaussians": 1}, {"gaussians": 11}, {"neighbors": 5, "process_rank": 2, "process_scales": 1}),
)
SHAPES = st.builds(
    make_config,
    prior=st.sampled_from(PRIORS),
    d_model=st.sampled_from([64, 128]),
    layers=st.integers(1, 3),
    heads=st.sampled_from([1, 2, 4]),
    feedforward=st.sampled_from([32, 96]),
    mixtures=st.integers(1, 20),
    norm=st.sampled_from(["pre", "post"]),
    activation=st.sampled_from(["gelu", "relu"]),
    memory=st.sampled_from(["all", "values"]),
    hidden=st.just((24,)),
    alert_prior=st.booleans(),
)
# Absolute tolerance of log-densities and scores. In bfloat16, a sum in another order may round to another number.
TOLERANCE: dict[Precision, float] = {"float32": 2e-3, "bfloat16": 5e-2}


def attach_kernels(model: DEformer) -> DEformer:
    """Attach the compiled kernels of the model's precision, and return the model."""
    model.kernel_library = load_library(model.config.precision == "bfloat16")
    assert model.kernel_library is not None, "the tests need compiled kernels: run `make kernels`"
    return model


def to_torch(arrays: ConditionalArrays) -> Conditional:
    """Return distributions as those of PyTorch, in float32."""
    names = "log_weights", "means", "scales", "log_mass"
    tensors = (torch.from_numpy(np.ascontiguousarray(getattr(arrays, name), np.float32)) for name in names)
    prior = None if arrays.prior is None else to_torch(arrays.prior)
    return replace(Conditional(torch.from_numpy(arrays.discrete), *tensors), prior=prior)


def to_arrays(conditional: Conditional) -> ConditionalArrays:
    """Return distributions of PyTorch as arrays."""
    names = "discrete", "log_weights", "means", "scales", "log_mass"
    prior = None if conditional.prior is None else to_arrays(conditional.prior)
    return ConditionalArrays(*(getattr(conditional, name).numpy() for name in names), prior)


def kernels_of(model: DEformer) -> CpuKernels:
    """Return the compiled kernels with the weights of a model."""
    kernels = CpuKernels.for_model(attach_kernels(model))
    assert kernels is not None
    return kernels


def score_stream(
    model: DEformer,
    codes: Ints,
    raw_values: Floats,
    seed: int,
    max_batch: int = 40,
    cache_bytes: int = ENOUGH_CACHE_BYTES,
) -> Collected:
    """Run the records' readings, interleaved and cut at random into batches, through an engine."""
    calibration = Calibration.from_statistics(np.arange(100.0), "random")
    engine = Engine(model, calibration, "fp", 0.05, Limits(cache_bytes=cache_bytes), effort="fast")
    return run_stream(codes, raw_values, engine, seed, max_batch)


def scores_by_record(collected: Collected, num_records: int) -> Floats:
    """Return (M, 3) ln p (0 for context features), its running sum and the score of M readings, record by record."""
    rows = [np.array(collected.readings[str(record)])[:, 1:4] for record in range(num_records)]
    return np.nan_to_num(np.concatenate(rows))


@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=num_examples(25))
@given(
    schema=schemas(max_features=24, context=True),
    shape=SHAPES,
    seed=st.integers(0, 2**16),
    max_batch=st.integers(1, 60),
)
def test_streamed_scores_equal_pytorchs_scores_of_complete_records(
    precision: Precision, schema: Schema, shape: ModelConfig, seed: int, max_batch: int
) -> None:
    """Invariants 1 and 2, for records that arrive in pieces, among others."""
    model = attach_kernels(make_model(schema, replace(shape, precision=precision), seed, torch.float32))
    codes, raw_values = draw_records(schema, 9, seed, missing_share=0.2)
    features, values = torch.from_numpy(codes), torch.from_numpy(normalise_values(schema, codes, raw_values)).float()
    with torch.inference_mode():
        expected = model.log_prob(features, values).double().numpy()
        centered_nll = model.conditionals(features, values).score(values)[1].double().numpy()
    collected = score_stream(model, codes, raw_values, seed, max_batch)
    tolerance = TOLERANCE[precision]
    # Far from the mean, ln p is -z²/2: if the mean is off by e standard deviations, ln p is off by e·sqrt(2·|ln p|).
    allowed = tolerance * np.sqrt(np.maximum(1.0, 2 * np.abs(expected[codes >= 0])))
    assert (np.abs(scores_by_record(collected, 9)[:, 0] - expected[codes >= 0]) <= allowed).all()
    record_sums = np.where((codes >= 0) & ~schema.is_context[codes], centered_nll, 0.0).sum(1)
    streamed_sums = [collected.closed[str(record)][4] for record in range(9)]
    np.testing.assert_allclose(streamed_sums, record_sums, atol=5 * tolerance)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("prior", [PRIORS[0], PRIORS[2], PRIORS[3]])
@pytest.mark.parametrize("memory", ["all", "values"])
def test_scores_do_not_depend_on_batches_or_eviction(
    precision: Precision, prior: dict[str, int], memory: Literal["all", "values"]
) -> None:
    config = replace(CONFIG, precision=precision, memory=memory, **prior)  # type: ignore[arg-type]
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(21)))
    model = attach_kernels(make_model(schema, config, dtype=torch.float32))
    codes, raw_values = draw_records(schema, 60, 1, missing_share=0.2)
    expected = scores_by_record(score_stream(model, codes, raw_values, 2, 5000), 60)
    for max_batch, cache_bytes in ((40, ENOUGH_CACHE_BYTES), (1, ENOUGH_CACHE_BYTES), (40, 1_000_000), (300, 0)):
        scores = scores_by_record(score_stream(model, codes, raw_values, 2, max_batch, cache_bytes), 60)
        np.testing.assert_allclose(scores, expected, atol=TOLERANCE[precision])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("memory", ["all", "values"])
def test_scores_do_not_depend_on_the_instruction_set(precision: Precision, memory: Literal["all", "values"]) -> None:
    """The pages have the same size, too, if the processor multiplies rounded numbers as pairs of bfloat16."""
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(21)))
    model = make_model(schema, replace(CONFIG, precision=precision, memory=memory), dtype=torch.float32)
    codes, raw_values = draw_records(schema, 60, 1, missing_share=0.2)
    is_low = precision == "bfloat16"
    instruction_sets = library.list_instruction_sets(is_low)
    assert instruction_sets, "the tests need compiled kernels: run `make kernels`"
    scores, bytes_per_record = [], set()
    for instruction_set in instruction_sets:
        model.kernel_library = ctypes.CDLL(str(library.library_path(instruction_set, is_low)))
        bytes_per_record.add(CpuKernels(model, model.kernel_library).bytes_per_record)
        scores.append(scores_by_record(score_stream(model, codes, raw_values, 2), 60))
    for other_scores in scores[1:]:
        np.testing.assert_allclose(other_scores, scores[0], atol=TOLERANCE[precision])
    assert len(bytes_per_record) == 1


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("prior", [PRIORS[0], PRIORS[2], PRIORS[3]])
@pytest.mark.parametrize("memory", ["all", "values"])
def test_rebuilt_cache_equals_the_cache_of_single_steps(
    precision: Precision, prior: dict[str, int], memory: Literal["all", "values"]
) -> None:
    """The pages and the scores of the next reading are the same bits, although a rebuild computes less."""
    config = replace(CONFIG, precision=precision, memory=memory, layers=3, **prior)  # type: ignore[arg-type]
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(21)))
    model, num_records = attach_kernels(make_model(schema, config, dtype=torch.float32)), 30
    codes, raw_values = draw_records(schema, num_records, 1)
    results = []
    for is_evicted in (False, True):
        limits = Limits(cache_bytes=20_000_000)
        calibration = Calibration.from_statistics(np.arange(100.0), "random")
        engine = Engine(model, calibration, "fp", 0.05, limits, effort="fast")
        assert isinstance(engine.cache, CpuKVCache)
        for k in range(20):
            if is_evicted and k == 19:
                engine.cache.free(np.arange(num_records))
                engine.cache.pool[:] = 0
            step = batch_of([(str(r), int(codes[r, k]), float(raw_values[r, k])) for r in range(num_records)])
            scored = engine.handle(step, 0).scored
        assert engine.pop_cache_rebuilds() == num_records * is_evicted
        page_numbers = engine.cache.page_table[:num_records].ravel()
        pages = engine.cache.pool.reshape(engine.cache.num_pages, -1)[page_numbers]
        results.append((scored.log_likelihood, scored.score, pages))
    for expected, rebuilt in zip(*results, strict=True):
        np.testing.assert_array_equal(rebuilt, expected)


@settings(max_examples=num_examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**16),
    max_readings=st.sampled_from([1, 3, 40, 900]),
    is_masked=st.booleans(),
    has_prior=st.booleans(),
)
def test_running_statistics_follow_their_definition(
    seed: int, max_readings: int, is_masked: bool, has_prior: bool
) -> None:
    """Readings from likely to extreme, in two batches; records at any index, some without a reading in a batch."""
    kernels = kernels_of(make_model(Schema((Feature("a", "continuous"),)), CONFIG, dtype=torch.float32))
    rng, R = np.random.default_rng(seed), 6
    lines = None
    if has_prior:  # fewer lines than readings: the last one counts for all longer prefixes
        lines = AlertPrior(rng.uniform(0, 3, (2, 20)), rng.uniform(0.2, 2, (2, 20)))
    record_index, running = rng.permutation(9)[:R], np.full(9, INITIAL_RUNNING)
    batches = []
    for _ in range(2):
        boundaries = np.append(0, np.cumsum(rng.integers(0, max_readings + 1, R)))
        M = int(boundaries[-1])
        terms = -(rng.exponential(size=(4, M)) * 10.0 ** rng.choice([-3, 0, 0, 0, 0, 1, 6, 30], (4, M)))
        is_scored, is_decision_point = rng.random((2, M)) < 0.7 if is_masked else (None, None)
        score_rows = np.empty((4, M))
        prior = None if lines is None else PriorPValues(terms[3], lines)
        kernels.advance(
            running,
            record_index=record_index,
            boundaries=boundaries,
            score_terms=terms,
            is_scored=is_scored,
            is_decision_point=is_decision_point,
            score_rows=score_rows,
            p_value_exponent=P_VALUE_EXPONENT,
            prior=prior,
        )
        batches.append((boundaries, terms, is_scored, is_decision_point, score_rows))
    for i, index in enumerate(record_index.tolist()):
        state, sums = PrefixState.initial(1), np.zeros((2, 1))
        for boundaries, terms, is_scored, is_decision_point, score_rows in batches:
            span = slice(boundaries[i], boundaries[i + 1])
            if span.start == span.stop:
                continue
            counts = np.ones(terms.shape[1], bool) if is_scored is None else is_scored
            own_terms = np.where(counts, terms, 0.0)[:, None, span]
            own_points = None if is_decision_point is None else is_decision_point[None, span]
            prior = None if lines is None else PriorPValues(own_terms[3], lines)
            score, state = advance_prefix_state(state, own_terms[1], counts[None, span], own_points, prior=prior)
            log_likelihood = compute_running_sums(sums[0], own_terms[0])
            sums = np.stack([log_likelihood[:, -1], compute_running_sums(sums[1], own_terms[2])[:, -1]])
            np.testing.assert_array_equal(score_rows[0, span], np.where(counts, terms[0], np.nan)[span])
            np.testing.assert_allclose(score_rows[1:3, span], [log_likelihood[0], score[0]], rtol=1e-10, atol=1e-12)
        got = [running[name][index] for name in (*PREFIX_FIELDS, "log_likelihood", "centered_nll")]
        np.testing.assert_allclose(got, np.array([*astuple(state), *sums]).ravel(), rtol=1e-10, atol=1e-12)


@settings(max_examples=num_examples(40), deadline=None)
@given(seed=st.integers(0, 2**16), has_others=st.booleans(), is_masked=st.booleans(), has_cells=st.booleans())
def test_cumulative_sums_equal_those_of_the_reference(
    seed: int, has_others: bool, is_masked: bool, has_cells: bool
) -> None:
    """Statistics and states of records at any index, with readings from likely to extreme."""
    kernels = kernels_of(make_model(Schema((Feature("a", "continuous"),)), CONFIG, dtype=torch.float32))
    rng, num_sensors = np.random.default_rng(seed), 4
    num_readings = rng.integers(0, 30, 5)
    record_index, boundaries = rng.permutation(8)[:5], np.append(0, np.cumsum(num_readings))
    M = int(boundaries[-1])
    terms = -(rng.exponential(size=(3, M)) * 10.0 ** rng.choice([-1, 0, 0, 0, 1, 3], (3, M)))
    is_scored = rng.random(M) < 0.8 if is_masked else None
    marginals = Marginals(
        np.sort(rng.integers(-3, 5, (num_sensors, 9)), 1).astype(np.float64), np.array([0, 9, 200, 7])
    )
    # Slopes with few digits, so that no rounding error moves a step over an edge.
    steps = Steps(
        np.array([0.5, 0.0, 1.0, -0.25]),
        np.sort(rng.integers(-3, 4, (num_sensors, 7)), 1) - 0.125,
        rng.integers(0, 9, (num_sensors, 6)),
        np.array([40, 0, 3, 25]),
    )
    slopes, intercepts = rng.random((6, num_sensors)), rng.normal(size=(6, num_sensors))
    scale = CusumScale(slopes, intercepts, 0.3, -0.5, *((marginals, steps) if has_cells else ()))
    log_resolutions = np.array([-np.inf, -3.0, 0.0, 0.5])
    states, running = create_states(8, num_sensors), np.full(8, INITIAL_RUNNING)
    arguments = CusumArguments(
        cusum_states=states,
        codes=rng.integers(0, num_sensors, M),
        values=rng.integers(0, 3, M).astype(np.float32),
        log_p_others=-3 * rng.exponential(size=M) if has_others else None,
        log_resolutions=log_resolutions,
        slopes=scale.slopes,
        intercepts=scale.intercepts,
        level_edges=marginals.edges if has_cells else None,
        level_log_p=marginals.compute_log_p_by_cell() if has_cells else None,
        step_slopes=steps.slopes if has_cells else None,
        step_edges=steps.edges if has_cells else None,
        step_log_p=steps.compute_log_p_by_cell() if has_cells else None,
        largest_kinds=np.full(M, 9, np.int8),
        record_slope=scale.record_slope,
        record_intercept=scale.record_intercept,
        sensor_kappa=SENSOR_KAPPA,
        offset_kappa=OFFSET_KAPPA,
        step_kappa=STEP_KAPPA,
        record_kappa=RECORD_KAPPA,
        max_surprise=MAX_SURPRISE,
        max_repetition=MAX_REPETITION,
        max_extreme=MAX_EXTREME,
        tie_tolerance=TIE_TOLERANCE,
    )
    score_rows = np.empty((3, M))
    kernels.advance(
        running,
        record_index=record_index,
        boundaries=boundaries,
        score_terms=terms,
        is_scored=is_scored,
        is_decision_point=None,
        score_rows=score_rows,
        p_value_exponent=P_VALUE_EXPONENT,
        cusums=arguments,
    )
    expected_states = create_states(8, num_sensors)
    for i, index in enumerate(record_index.tolist()):
        own = np.arange(boundaries[i], boundaries[i + 1])[None]
        counted = np.ones(own.shape, bool) if is_scored is None else is_scored[own]
        codes, values = arguments.codes[own], arguments.values[own]
        previous = find_previous_values(expected_states[[index]], codes, values, counted)
        readings = CusumReadings(
            codes,
            values,
            terms[1, own],
            None if arguments.log_p_others is None else arguments.log_p_others[own],
            terms[0, own] + log_resolutions[codes],
            counted,
            marginals.compute_log_p(codes, values) if has_cells else None,
            steps.compute_log_p(codes, values, previous) if has_cells else None,
        )
        state = expected_states[[index]]
        sums = advance_sums(state, readings)
        expected_states[[index]] = state
        by_kind = compute_statistics_by_kind(scale, codes, *sums)
        statistics = np.where(counted, by_kind.max(0), 0.0)
        expected = np.maximum.accumulate(np.maximum(statistics, 0.0), 1)
        is_raised = statistics > np.concatenate([np.zeros((1, 1)), expected], 1)[:, :-1]
        expected_kinds = np.where(is_raised, find_largest_kinds(by_kind), NO_KIND)
        np.testing.assert_array_equal(arguments.largest_kinds[own], expected_kinds)
        np.testing.assert_allclose(score_rows[2, own], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(
            running["max_statistic"][index], expected[0, -1] if own.size else 0.0, rtol=1e-5, atol=1e-5
        )
    np.testing.assert_allclose(states, expected_states, rtol=1e-5, atol=1e-5)


@settings(max_examples=num_examples(40), deadline=None)
@given(
    schema=schemas(max_features=24, context=True),
    shape=SHAPES,
    hidden=st.sampled_from([(), (24,), (40, 64)]),
    identity=st.sampled_from(["embedding", "coordinates", "both"]),
    is_extreme=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_score_terms_and_conditionals_equal_pytorchs(
    schema: Schema,
    shape: ModelConfig,
    hidden: tuple[int, ...],
    identity: Literal["embedding", "coordinates", "both"],
    is_extreme: bool,
    seed: int,
) -> None:
    """Log-density, p-value and centered NLL, also of extreme values, for every kind of token encoder."""
    model = attach_kernels(make_model(schema, replace(shape, hidden=hidden, identity=identity), seed, torch.float32))
    codes, raw_values = draw_records(schema, 4, seed)
    if is_extreme:
        factors = 10.0 ** np.random.default_rng(seed).integers(-2, 9, raw_values.shape)
        raw_values = np.where(schema.is_linear[codes], raw_values * factors, raw_values)
    features, values = torch.from_numpy(codes), torch.from_numpy(normalise_values(schema, codes, raw_values)).float()
    kernels, L = kernels_of(model), len(schema)
    cache = kernels.create_cache(1 << 24)
    cache.ensure_capacity(4)
    cache.allocate_all(np.arange(4), np.full(4, L))
    no_past = np.zeros(4, np.int64)
    batch = RaggedBatch(codes.ravel(), values.numpy().ravel(), L * np.arange(5), no_past, cache.page_table)
    with torch.inference_mode():
        by_pytorch = model.conditionals(features, values)
        arrays = kernels.conditionals(cache, batch).reshape(4, L)
        by_kernels = to_torch(arrays)
        expected = by_pytorch.compute_score_terms(values, by_pytorch.compute_surprisal(values))
        of_conditionals = by_kernels.compute_score_terms(values, by_kernels.compute_surprisal(values))
    of_arrays = arrays.compute_score_terms(values, kernels.surprisal)
    np.testing.assert_allclose(arrays.log_prob(values), expected.log_prob.numpy(), rtol=1e-3, atol=2e-3)
    num_terms = 4 if model.config.alert_prior else 3  # the fourth is ln of the p-value under the prior alone
    terms = kernels.score(cache, batch, scores_prior=num_terms == 4).reshape(num_terms, 4, L)
    all_terms = zip(terms, *(astuple(t)[:num_terms] for t in (expected, of_conditionals, of_arrays)), strict=True)
    for term, pytorch_term, conditional_term, array_term in all_terms:
        np.testing.assert_allclose(term, pytorch_term.numpy(), rtol=1e-3, atol=2e-3)
        np.testing.assert_allclose(array_term, conditional_term.numpy(), rtol=1e-4, atol=2e-3)
        # At the mode, ln p-value falls like the square root of the surprisal minus its minimum. This difference has the
        # rounding errors of float32, of the order of 1e-6, so those of ln p-value are of the order of 1e-3.
        np.testing.assert_allclose(term, conditional_term.numpy(), rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("num_cached", [0, 5])
def test_conditionals_of_sensors_that_repeat_others_equal_pytorchs(num_cached: int) -> None:
    """Sixteen sensors mix three quantities, up to one part in a million of the variance. One sensor is off."""
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(16)))
    model = make_model(schema, replace(CONFIG, gaussians=1, alert_prior=True), dtype=torch.float32)
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(3, 16))
    mixing /= np.linalg.norm(mixing, axis=0)
    assert model.gaussians is not None
    model.gaussians.covariances.copy_(torch.from_numpy(mixing.T @ mixing + 1e-6 * np.eye(16)))
    model.gaussians.means.zero_()
    records = rng.normal(size=(20, 3)) @ mixing + 1e-3 * rng.normal(size=(20, 16))
    records[:, 3] += 3.0
    codes = np.argsort(rng.random((20, 16)), 1)
    values = torch.from_numpy(np.take_along_axis(records, codes, 1)).float()
    with torch.inference_mode():
        conditional = model.conditionals(torch.from_numpy(codes), values)
        expected = conditional.compute_score_terms(values, conditional.compute_surprisal(values)).stack().numpy()
    kernels = kernels_of(model)
    cache, page_table = kernels.create_cache_of_records(20, 16)
    terms = np.empty((4, 20, 16))
    for start, end in ((0, num_cached), (num_cached, 16)):
        part = slice(start, end)
        offsets = (end - start) * np.arange(21)
        batch = RaggedBatch(
            codes[:, part].ravel(), values[:, part].numpy().ravel(), offsets, np.full(20, start), page_table
        )
        if end > start:
            terms[:, :, part] = kernels.score(cache, batch, scores_prior=True).reshape(4, 20, -1)
    np.testing.assert_allclose(terms[0], expected[0], rtol=1e-6, atol=1e-3)
    np.testing.assert_allclose(terms[2], expected[2], rtol=1e-6, atol=1e-3)
    np.testing.assert_allclose(terms[3], expected[3], rtol=1e-3, atol=0.1)  # at the mode as above


def test_bfloat16_changes_scores_a_little() -> None:
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(12)))
    codes, raw_values = draw_records(schema, 50, 3)
    features, values = torch.from_numpy(codes), torch.from_numpy(normalise_values(schema, codes, raw_values)).float()
    exact, rounded = (
        make_model(schema, replace(PRESETS["tiny"], precision=precision), dtype=torch.float32).log_prob(
            features, values
        )
        for precision in PRECISIONS
    )
    assert 0 < float((exact - rounded).abs().max().detach()) < 2e-2
    training = make_model(schema, replace(PRESETS["tiny"], precision="bfloat16"), dtype=torch.float32).train()
    assert torch.equal(training.log_prob(features, values), exact), "training does not round"


@pytest.mark.parametrize(
    "change", [{"d_model": 96, "heads": 6}, {"heads": 8}, {"feedforward": 40}, {"tokens": "single"}]
)
def test_models_of_unsupported_shapes_are_left_to_pytorch(change: dict[str, Any]) -> None:
    model = make_model(Schema((Feature("a", "continuous"),)), replace(CONFIG, **change), dtype=torch.float32)
    assert not is_supported(model)
    assert is_supported(make_model(Schema((Feature("a", "continuous"),)), CONFIG, dtype=torch.float32))


def test_surprisals_of_extreme_mixtures_equal_pytorchs() -> None:
    """The components are narrow or far apart, and some have almost no weight."""
    kernels = kernels_of(make_model(Schema((Feature("a", "continuous"),)), CONFIG, dtype=torch.float32))
    generator = torch.Generator().manual_seed(0)
    for J in (1, 16, 150):
        weights, means, scales = (torch.randn((40, J), generator=generator) for _ in range(3))
        no_labels = torch.zeros((40, 1))
        log_weights = torch.log_softmax(30 * weights, -1)
        mixture = Conditional(no_labels[:, 0] > 0, log_weights, 5 * means, (2 * scales).exp(), no_labels)
        values = 10 * torch.randn(40, generator=generator)
        expected, got = mixture.compute_surprisal(values), kernels.surprisal(to_arrays(mixture), values)
        assert expected is not None
        assert got is not None
        for a, b in zip(astuple(got), astuple(expected), strict=True):
            np.testing.assert_allclose(a, b.numpy(), rtol=1e-4, atol=1e-4)


def test_quantiles_have_the_requested_mass_below_them() -> None:
    kernels = kernels_of(make_model(Schema((Feature("a", "continuous"),)), CONFIG, dtype=torch.float32))
    probabilities = (0.05, 0.5, 0.95)
    generator = torch.Generator().manual_seed(0)
    for J in (1, 16, 40):
        weights, means, scales = (torch.randn((2, 20, J), generator=generator) for _ in range(3))
        no_labels = torch.zeros((2, 20, 1))
        log_weights = torch.log_softmax(2 * weights, -1)
        mixture = Conditional(no_labels[..., 0] > 0, log_weights, 3 * means, scales.exp(), no_labels)
        for p, quantiles in zip(probabilities, kernels.quantiles(to_arrays(mixture), probabilities), strict=True):
            mass = mixture.cdf(torch.from_numpy(quantiles).float())
            torch.testing.assert_close(mass, torch.full((2, 20), p), rtol=0, atol=2e-6)


@settings(max_examples=num_examples(25), deadline=None)
@given(schema=schemas(max_features=20), shape=SHAPES, seed=st.integers(0, 2**16), is_mirrored=st.booleans())
def test_conditionals_of_order_trees_equal_pytorchs(
    schema: Schema, shape: ModelConfig, seed: int, is_mirrored: bool
) -> None:
    model, num_readings = attach_kernels(make_model(schema, shape, seed, torch.float32)), len(schema)
    codes, raw_values = draw_records(schema, 3, seed)
    values = torch.from_numpy(normalise_values(schema, codes, raw_values)).float()
    num_fixed, num_extra = (num_readings // 3, num_readings // 4) if seed % 2 else (0, 0)
    tree = build_order_tree(num_fixed, num_readings - num_fixed - num_extra, num_extra, is_mirrored)
    arguments = codes, values.double().numpy(), None, tree
    node_values = values[:, tree.reading_index].numpy()
    got = compute_conditionals(model, kernels_of(model), *arguments).log_prob(node_values)
    expected = compute_conditionals(model, None, *arguments).log_prob(node_values)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3)


def list_numbers(part: Contribution) -> list[float]:
    """Return the numbers of a contribution that are present."""
    expected = part.expected
    numbers = part.surprise, part.relief, part.attribution, expected.low, expected.median, expected.high
    return [number for number in numbers if isinstance(number, float)]


@settings(max_examples=num_examples(10), deadline=None)
@given(seed=st.integers(0, 2**16), is_alarming=st.booleans())
def test_explanations_equal_pytorchs(seed: int, is_alarming: bool) -> None:
    continuous = [Feature(f"x{i}", "continuous", context=i == 0) for i in range(6)]
    discrete = [Feature(f"s{i}", "discrete", labels=("a", "b", "c")) for i in range(3)]
    schema = Schema((*continuous, *discrete))
    model = attach_kernels(make_model(schema, replace(CONFIG, gaussians=seed % 3), seed, torch.float32))
    codes, raw_values = draw_records(schema, 5, seed, missing_share=0.2)
    arguments = model, codes, raw_values, [{}] * 5, list("abcde"), lambda score, _: np.full(score.shape, is_alarming)
    kernels = kernels_of(model)
    for effort in ("full", "fast"):
        by_pytorch = explain_records(*arguments, effort)
        by_kernels = explain_records(*arguments, effort, kernels)
        for one, other in zip(by_pytorch, by_kernels, strict=True):
            assert one.silenced_by == other.silenced_by
            for a, b in zip(*(sorted(of.contributions, key=attrgetter("feature")) for of in (one, other)), strict=True):
                assert (a.feature, a.value, a.suspect) == (b.feature, b.value, b.suspect)
                np.testing.assert_allclose(list_numbers(a), list_numbers(b), rtol=1e-4, atol=1e-3)
