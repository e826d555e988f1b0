"""Captured graphs give the scores of single operators, whatever the padding; and a forward pass can be captured."""

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
from deformer_stream.kernels.torch_kv_cache import TorchKVCache
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.schema import Schema
from tests.effort import num_examples
from tests.engine.fake_gpu import CapturableOnly, capture_on_cpu, fake_gpu, move_to_fake_gpu
from tests.engine.random_models import configs, draw_records, make_model, schemas
from tests.engine.streams import CONFIG, ENOUGH_CACHE_BYTES, SCHEMA, Collected, batch_of, run_stream
from tests.kernels.precisions import PRECISIONS, Precision


def stream_records(
    model: DEformer,
    capture: Capture | None,
    seed: int = 0,
    max_batch: int = 40,
    cache_bytes: int = ENOUGH_CACHE_BYTES,
    num_records: int = 30,
) -> tuple[Collected, Engine]:
    """Run the records' readings, interleaved and cut at random, through an engine that captures in this way."""
    codes, raw = draw_records(model.schema, num_records, seed, missing_share=0.2)
    with patch.object(cuda_graphs, "create_capture", lambda device: capture):
        calibration, limits = Calibration.from_statistics(np.arange(100.0), "random"), Limits(cache_bytes=cache_bytes)
        engine = Engine(model, calibration, "fp", 0.05, limits, effort="fast")
        return run_stream(codes, raw, engine, seed, max_batch), engine


def captured_graphs(engine: Engine) -> dict[cuda_graphs.BatchShape, cuda_graphs.CapturedGraph]:
    assert engine.current_version.torch_scorer.graph_runner is not None
    return engine.current_version.torch_scorer.graph_runner.graph_by_shape


def assert_same_results(a: Collected, b: Collected) -> None:
    assert a.readings.keys() == b.readings.keys()
    for record, rows in a.readings.items():
        np.testing.assert_allclose(b.readings[record], rows, atol=1e-9, equal_nan=True)
    for record, closed in a.closed.items():
        np.testing.assert_allclose(np.array(closed[1:], float), np.array(b.closed[record][1:], float), atol=1e-8)


@settings(max_examples=num_examples(25))
@given(
    schema=schemas(max_features=24, context=True),
    config=configs,
    seed=st.integers(0, 2**16),
    max_batch=st.integers(1, 60),
    cache_bytes=st.sampled_from([ENOUGH_CACHE_BYTES, 100_000, 0]),
    num_records=st.sampled_from([1, 9, 40]),
)
def test_graphs_give_the_scores_of_single_operators(
    schema: Schema, config: ModelConfig, seed: int, max_batch: int, cache_bytes: int, num_records: int
) -> None:
    """Records of mixed lengths, in pieces and evicted in between; with and without a Gaussian prior and labels."""
    model = make_model(schema, config, seed)
    plain, _ = stream_records(model, None, seed, max_batch, cache_bytes, num_records)
    replayed, engine = stream_records(model, capture_on_cpu, seed, max_batch, cache_bytes, num_records)
    assert captured_graphs(engine) or max_batch > cuda_graphs.MAX_READINGS
    assert_same_results(plain, replayed)


def test_only_the_most_recently_used_graphs_are_kept() -> None:
    model = make_model(SCHEMA, CONFIG)
    plain, _ = stream_records(model, None)
    with patch.object(cuda_graphs, "MAX_GRAPHS", 2):
        replayed, engine = stream_records(model, capture_on_cpu)
    assert len(captured_graphs(engine)) == 2
    assert_same_results(plain, replayed)


def test_shapes_are_rounded_up() -> None:
    def shape(num_records: int, num_readings: int, num_pages: int) -> cuda_graphs.BatchShape | None:
        codes, pages = np.zeros((num_records, num_readings), np.int64), np.zeros((num_records, num_pages), np.int64)
        return round_up_shape(ForwardInputs(codes, codes.astype(float), pages, pages[:, :0], codes))

    assert shape(1, 1, 0) == (16, 1, 1)
    assert shape(17, 3, 5) == (32, 4, 8)
    assert shape(1024, 4, 8) == (1024, 4, 8)
    assert shape(1025, 1, 1) is shape(1, 5, 1) is None


def test_failed_capture_warns_once_and_falls_back_to_single_operators() -> None:
    def fail(forward_pass: ForwardPass) -> ForwardPass:
        raise RuntimeError("operation not permitted when stream is capturing")

    model = make_model(SCHEMA, CONFIG)
    plain, _ = stream_records(model, None)
    with pytest.warns(RuntimeWarning, match="not permitted") as warnings:
        fallen_back, engine = stream_records(model, fail)
    assert len(warnings) == 1
    assert not captured_graphs(engine)
    assert_same_results(plain, fallen_back)


def test_models_do_not_share_graphs() -> None:
    """Each record is scored by the model with which it began, and both models use one cache."""
    first, second = make_model(SCHEMA, CONFIG, seed=1), make_model(SCHEMA, CONFIG, seed=2)
    calibration = Calibration.from_statistics(np.arange(100.0), "random")
    scores: list[list[np.ndarray]] = []
    for capture in (None, capture_on_cpu):
        with patch.object(cuda_graphs, "create_capture", lambda device, capture=capture: capture):
            engine = Engine(first, calibration, "1", 0.05)
            rows = [engine.handle(batch_of([("a", 0, 1.0), ("b", 1, 0.5)]), 0)]
            assert engine.change_model(second, calibration, "2", "finish") == "finish"
            rows += [engine.handle(batch_of([("a", f, 1.0), ("c", f, 1.0)]), f) for f in (2, 3)]
        scores.append([effects.scored.log_likelihood for effects in rows])
    for plain, replayed in zip(*scores, strict=True):
        np.testing.assert_allclose(replayed, plain, atol=1e-9)
    assert scores[0][1][0] != scores[0][1][1]


def test_cache_of_the_previous_model_is_released() -> None:
    """It must be released before the next cache is created, although open records still use the previous model."""
    first, second = make_model(SCHEMA, CONFIG), make_model(SCHEMA, replace(CONFIG, layers=1))
    calibration = Calibration.from_statistics(np.arange(100.0), "random")
    engine = Engine(first, calibration, "1", 0.05)
    engine.handle(batch_of([("a", 0, 1.0)]), 0)
    previous_cache = weakref.ref(engine.cache)
    assert engine.change_model(second, calibration, "2", "finish") == "finish"
    assert previous_cache() is None
    assert len(engine.handle(batch_of([("a", 1, 1.0), ("b", 1, 1.0)]), 1).scored) == 2


@settings(max_examples=num_examples(25))
@given(
    schema=schemas(max_features=12, context=True),
    config=configs,
    num_readings=st.sampled_from([1, 4]),
    precision=st.sampled_from(PRECISIONS),
)
def test_forward_pass_can_be_captured(
    schema: Schema, config: ModelConfig, num_readings: int, precision: Precision
) -> None:
    """Checked on a simulated GPU: no operator mixes devices, none depends on what tensors hold, and none creates a
    tensor on the CPU, except for the Gaussian prior, which is computed before."""
    model = make_model(schema, replace(config, precision=precision), dtype=torch.float32)
    with fake_gpu() as mode, patch.object(cuda_graphs, "create_capture", lambda device: None):
        cache = TorchKVCache(move_to_fake_gpu(model, mode), 0)
        codes = torch.zeros(16, num_readings, dtype=torch.long, device="cuda")
        pages, places = codes.expand(16, 4), codes.repeat(1, model.cached_tokens_per_reading)
        inputs = ForwardInputs(codes, codes.float(), pages, codes[:, 0], places)
        graphs = CudaGraphs(model, cache)
        with torch.no_grad():  # inference mode would hide the operators of which composite operators consist
            prior = graphs.compute_prior(inputs)
            with CapturableOnly():
                terms = graphs.compute_score_terms(inputs, prior)
    assert (prior is None) == (model.num_prior_components == 0)
    num_terms = 4 if model.config.alert_prior else 3
    assert (terms.shape, terms.dtype, terms.device.type) == ((num_terms, 16, num_readings), torch.float64, "cuda")
