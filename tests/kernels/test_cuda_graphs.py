"""What is recorded says what operators say one by one, whatever it is padded with; and it can be recorded."""

from __future__ import annotations

import weakref
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.kernels import cuda_graphs
from deformer_stream.kernels.cuda_graphs import Capture, CudaGraphs, ForwardInputs, ForwardPass, round_up_shape
from deformer_stream.kernels.kv_cache import TorchKVCache
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.schema import Schema
from tests.engine.fake_gpu import CapturableOnly, capture_on_cpu, fake_gpu, move_to_fake_gpu
from tests.engine.random_models import configs, draw_records, make_model, schemas
from tests.engine.test_engine import CONFIG, ENOUGH_CACHE_BYTES, SCHEMA, Collected, batch_of, run_stream
from tests.kernels.test_cpu import PRECISIONS, Precision


def scored(
    model: DEformer,
    record: Capture | None,
    seed: int = 0,
    most: int = 40,
    cache: int = ENOUGH_CACHE_BYTES,
    records: int = 30,
) -> tuple[Collected, Engine]:
    """The records' readings, interleaved and cut at random, through an engine that records so."""
    codes, raw = draw_records(model.schema, records, seed, missing_share=0.2)
    with patch.object(cuda_graphs, "recorder", lambda device: record):
        engine = Engine(
            model, Calibration.from_statistics(np.arange(100.0), "random"), "fp", 0.05, Limits(cache_bytes=cache)
        )
        return run_stream(codes, raw, engine, seed, most), engine


def recorded(engine: Engine) -> dict[cuda_graphs.BatchShape, cuda_graphs.CapturedGraph]:
    assert engine.current_version._graph_runner is not None
    return engine.current_version._graph_runner.graph_by_shape


def same(a: Collected, b: Collected) -> None:
    assert a.readings.keys() == b.readings.keys()
    for record, rows in a.readings.items():
        np.testing.assert_allclose(b.readings[record], rows, atol=1e-9, equal_nan=True)
    for record, closed in a.closed.items():
        np.testing.assert_allclose(np.array(closed[1:], float), np.array(b.closed[record][1:], float), atol=1e-8)


@settings(max_examples=25)
@given(
    schema=schemas(max_features=24, context=True),
    config=configs,
    seed=st.integers(0, 2**16),
    most=st.integers(1, 60),
    cache=st.sampled_from([ENOUGH_CACHE_BYTES, 100_000, 0]),
    records=st.sampled_from([1, 9, 40]),
)
def test_what_is_recorded_says_what_operators_say_one_by_one(
    schema: Schema, config: ModelConfig, seed: int, most: int, cache: int, records: int
) -> None:
    """Records of mixed lengths, in pieces and evicted between them; with and without what is guided, and labels."""
    model = make_model(schema, config, seed)
    plain, _ = scored(model, None, seed, most, cache, records)
    quick, engine = scored(model, capture_on_cpu, seed, most, cache, records)
    assert recorded(engine) or most > cuda_graphs.MAX_READINGS
    same(plain, quick)


def test_only_shapes_used_last_stay_recorded() -> None:
    model = make_model(SCHEMA, CONFIG)
    plain, _ = scored(model, None)
    with patch.object(cuda_graphs, "MOST_RECORDED", 2):
        quick, engine = scored(model, capture_on_cpu)
    assert len(recorded(engine)) == 2
    same(plain, quick)


def test_shapes_are_rounded_up() -> None:
    def shape(records: int, readings: int, pages: int) -> cuda_graphs.BatchShape | None:
        new, seen = np.zeros((records, readings), np.int64), np.zeros((records, pages), np.int64)
        return round_up_shape(ForwardInputs(new, new.astype(float), seen, seen[:, :0], new))

    assert shape(1, 1, 0) == (16, 1, 1)
    assert shape(17, 3, 5) == (32, 4, 8)
    assert shape(1024, 4, 8) == (1024, 4, 8)
    assert shape(1025, 1, 1) is shape(1, 5, 1) is None


def test_where_nothing_can_be_recorded_operators_are_started_one_by_one() -> None:
    def refused(work: ForwardPass) -> ForwardPass:
        raise RuntimeError("operation not permitted when stream is capturing")

    model = make_model(SCHEMA, CONFIG)
    plain, _ = scored(model, None)
    with pytest.warns(RuntimeWarning, match="not permitted") as warned:
        quick, engine = scored(model, refused)
    assert len(warned) == 1
    assert not recorded(engine)
    same(plain, quick)


def test_models_do_not_share_what_is_recorded() -> None:
    """Records go on by the model that they began with, both over one cache."""
    first, second = make_model(SCHEMA, CONFIG, seed=1), make_model(SCHEMA, CONFIG, seed=2)
    calibration = Calibration.from_statistics(np.arange(100.0), "random")
    said: list[list[np.ndarray]] = []
    for record in (None, capture_on_cpu):
        with patch.object(cuda_graphs, "recorder", lambda device, record=record: record):
            engine = Engine(first, calibration, "1", 0.05)
            rows = [engine.handle(batch_of([("a", 0, 1.0), ("b", 1, 0.5)]), 0)]
            assert engine.change_model(second, calibration, "2", "finish") == "finish"
            rows += [engine.handle(batch_of([("a", f, 1.0), ("c", f, 1.0)]), f) for f in (2, 3)]
        said.append([effects.scored.log_likelihood for effects in rows])
    for plain, quick in zip(*said, strict=True):
        np.testing.assert_allclose(quick, plain, atol=1e-9)
    assert said[0][1][0] != said[0][1][1]


def test_a_cache_that_was_given_up_is_let_go() -> None:
    """Before the next one takes its memory, although records go on by the model that used it."""
    first, second = make_model(SCHEMA, CONFIG), make_model(SCHEMA, replace(CONFIG, layers=1))
    calibration = Calibration.from_statistics(np.arange(100.0), "random")
    engine = Engine(first, calibration, "1", 0.05)
    engine.handle(batch_of([("a", 0, 1.0)]), 0)
    given_up = weakref.ref(engine.cache)
    assert engine.change_model(second, calibration, "2", "finish") == "finish"
    assert given_up() is None
    assert len(engine.handle(batch_of([("a", 1, 1.0), ("b", 1, 1.0)]), 1).scored) == 2


@settings(max_examples=25)
@given(
    schema=schemas(max_features=12, context=True),
    config=configs,
    readings=st.sampled_from([1, 4]),
    precision=st.sampled_from(PRECISIONS),
)
def test_a_pass_can_be_recorded(schema: Schema, config: ModelConfig, readings: int, precision: Precision) -> None:
    """On a GPU that is not there: no operator is given tensors of two devices, nobody looks at what tensors hold, and,
    but for what the Gaussians are asked beforehand, none is made on the CPU."""
    model = make_model(schema, replace(config, precision=precision), dtype=torch.float32)
    with fake_gpu() as mode, patch.object(cuda_graphs, "recorder", lambda device: None):
        cache = TorchKVCache(move_to_fake_gpu(model, mode), 0)
        new = torch.zeros(16, readings, dtype=torch.long, device="cuda")
        pages, places = new.expand(16, 4), new.repeat(1, model.cached_tokens_per_reading)
        given = ForwardInputs(new, new.float(), pages, new[:, 0], places)
        run = CudaGraphs(model, cache)
        with torch.no_grad():  # in inference mode operators that are made of others are not seen through
            guide = run.compute_prior(given)
            with CapturableOnly():
                out = run.compute_score_terms(given, guide)
    assert (guide is None) == (model.gaussians is None)
    assert (out.shape, out.dtype, out.device.type) == ((3, 16, readings), torch.float64, "cuda")
