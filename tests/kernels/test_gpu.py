"""A GPU gives the scores, alerts and models of the CPU. Only these tests are skipped if a device is missing."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import deformer_stream
from deformer_stream import model_store
from deformer_stream.calibration.conformal import Calibration, TiePolicy
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import EventBatch
from deformer_stream.engine.explain import explain_records
from deformer_stream.kernels import cuda_graphs
from deformer_stream.model.deformer import DEformer, ModelConfig
from tests.commands import RunCommand
from tests.engine.fake_gpu import needs_gpu
from tests.engine.max_statistics import compute_max_statistics
from tests.engine.random_models import draw_records, make_model, normalise_values
from tests.engine.streams import SCHEMA, Collected, run_stream
from tests.models import write_model
from tests.trainer.tables import mixed, write

pytestmark = [pytest.mark.gpu, needs_gpu]

GPU = "cuda"
CONFIG = ModelConfig(d_model=64, layers=2, heads=4, feedforward=96, mixtures=3, hidden=(24,))
CONFIG_CHANGES: list[dict[str, Any]] = [
    {},
    {"gaussians": 4},
    {"memory": "all", "gaussians": 4},
    {"tokens": "single", "gaussians": 4},
    {"tokens": "single"},
    {"precision": "bfloat16"},
    {"norm": "post", "activation": "relu"},
]
FLOAT32_TOLERANCE = 1e-3
"""The largest difference of scores of the two devices in float32."""
BFLOAT16_TOLERANCE = 5e-2
"""The same in bfloat16, where a sum in another order may round to another number."""
NUM_RECORDS = 60


def models_on_both(change: dict[str, Any]) -> tuple[DEformer, DEformer]:
    """Return the same model on the CPU and on the GPU."""
    model = make_model(SCHEMA, replace(CONFIG, **change), dtype=torch.float32)
    return model, copy.deepcopy(model).to(GPU)


def tolerance_of(change: dict[str, Any]) -> float:
    return BFLOAT16_TOLERANCE if "precision" in change else FLOAT32_TOLERANCE


def stream_records(
    model: DEformer, calibration: Calibration, max_batch: int = 40, **limits: Any
) -> tuple[Collected, Engine]:
    """Run a stream of records through an engine, in batches of at most `max_batch` readings."""
    engine = Engine(model, calibration, "fp", (0.05, 0.2), Limits(**limits))
    return run_stream(*draw_records(SCHEMA, NUM_RECORDS, 1, missing_share=0.2), engine, 2, max_batch), engine


def calibrate(model: DEformer, ties: TiePolicy = "arrival") -> Calibration:
    codes, raw = draw_records(SCHEMA, 200, seed=99)
    statistics = compute_max_statistics(model, codes, normalise_values(SCHEMA, codes, raw))
    return Calibration.from_statistics(statistics, "random", tie_policy=ties)


def assert_same_readings(a: Collected, b: Collected, tolerance: float) -> None:
    assert a.readings.keys() == b.readings.keys()
    for record, rows in a.readings.items():
        np.testing.assert_allclose(np.array(b.readings[record])[:, :3], np.array(rows)[:, :3], atol=tolerance)


@pytest.mark.parametrize("change", CONFIG_CHANGES)
def test_complete_records_have_the_cpus_scores(change: dict[str, Any]) -> None:
    on_cpu, on_gpu = models_on_both(change)
    codes, raw = draw_records(SCHEMA, NUM_RECORDS, 1, missing_share=0.2)
    features, values = torch.from_numpy(codes), torch.from_numpy(normalise_values(SCHEMA, codes, raw)).float()
    with torch.inference_mode():
        expected = on_cpu.log_prob(features, values)
        found = on_gpu.log_prob(features.to(GPU), values.to(GPU)).cpu()
    np.testing.assert_allclose(found, expected, atol=tolerance_of(change))


@pytest.mark.parametrize("change", CONFIG_CHANGES)
@pytest.mark.parametrize(("max_batch", "cache_bytes"), [(1, 2**28), (40, 2**28), (40, 200_000), (5000, 2**28)])
def test_streamed_records_have_the_cpus_scores_and_alerts(
    change: dict[str, Any], max_batch: int, cache_bytes: int
) -> None:
    on_cpu, on_gpu = models_on_both(change)
    calibration = calibrate(on_cpu)
    cpu_results, _ = stream_records(on_cpu, calibration, max_batch, cache_bytes=cache_bytes)
    gpu_results, engine = stream_records(on_gpu, calibration, max_batch, cache_bytes=cache_bytes)
    runner = engine.current_version.torch_scorer.graph_runner
    assert runner is not None
    assert runner.graph_by_shape or max_batch > NUM_RECORDS, "no graph was captured"
    assert_same_readings(cpu_results, gpu_results, tolerance_of(change))
    if "precision" not in change:
        # A p-value is a rank, so it may change if a score moves past one of the calibration scores.
        assert len(cpu_results.alert_by_level.keys() ^ gpu_results.alert_by_level.keys()) <= 1
    assert cpu_results.alert_by_level
    assert cpu_results.closed.keys() == gpu_results.closed.keys()


@pytest.mark.parametrize("change", CONFIG_CHANGES)
def test_graphs_give_the_scores_of_single_operators(change: dict[str, Any]) -> None:
    _, on_gpu = models_on_both(change)
    calibration = Calibration.from_statistics(np.arange(100.0), "random")
    with patch.object(cuda_graphs, "create_capture", lambda device: None):
        cpu_results, _ = stream_records(on_gpu, calibration)
    gpu_results, engine = stream_records(on_gpu, calibration)
    assert engine.current_version.torch_scorer.graph_runner is not None
    assert len(engine.current_version.torch_scorer.graph_runner.graph_by_shape) > 1
    assert_same_readings(cpu_results, gpu_results, tolerance_of(change))


def test_tie_groups_have_the_cpus_scores() -> None:
    on_cpu, on_gpu = models_on_both({"gaussians": 4})
    calibration = calibrate(on_cpu, "hold")
    codes, raw = draw_records(SCHEMA, 20, 3)
    n = len(codes)
    ids, place = [f"{row}" for row in range(n)] * codes.shape[1], np.tile(np.arange(n, dtype=np.int32), codes.shape[1])
    times = np.repeat(np.arange(codes.shape[1]) // 3, n).astype(np.int64)
    batch = EventBatch(ids, codes.T.ravel().astype(np.int32), raw.T.ravel(), times, place, np.zeros_like(place))
    found = []
    for model in (on_cpu, on_gpu):
        engine = Engine(model, calibration, "fp", 0.05)
        found.append([engine.handle(batch, 0).closed, engine.finish().closed])
    for expected, closed in zip(*found, strict=True):
        np.testing.assert_allclose(closed.score, expected.score, atol=FLOAT32_TOLERANCE)


def test_alerts_have_the_cpus_explanations() -> None:
    on_cpu, on_gpu = models_on_both({"gaussians": 4})
    codes, raw = draw_records(SCHEMA, 5, 4)
    explanations = []
    for model in (on_cpu, on_gpu):
        explanations.append(explain_records(model, codes, raw, [{}] * 5, "abcde", lambda scores, names: scores > 1.0))
    for expected, found in zip(*explanations, strict=True):
        by_name = {part.feature: part for part in found.contributions}
        for part in expected.contributions:
            assert by_name[part.feature].surprise == pytest.approx(part.surprise, abs=1e-2)


def test_models_are_portable_between_devices(tmp_path: Path) -> None:
    """A model directory that was written on one device is read on the other."""
    first = write_model(tmp_path / "first")
    on_gpu = model_store.read(first, GPU)
    assert on_gpu.model.device.type == torch.device(GPU).type
    model_store.write(
        tmp_path / "second", on_gpu.model, on_gpu.calibration, {"epochs": 1}, "<!doctype html><p>report</p>"
    )
    record = {"temperature": 21.0, "state": "run", "pressure": 1.7, "valve": True}
    scores = [
        deformer_stream.load(folder, device).score([record])
        for folder, device in ((first, "cpu"), (first, GPU), (tmp_path / "second", "cpu"), (tmp_path / "second", GPU))
    ]
    for score in scores[1:]:
        np.testing.assert_allclose(score.log_likelihood, scores[0].log_likelihood, atol=FLOAT32_TOLERANCE)
        np.testing.assert_allclose(score.anomaly_score, scores[0].anomaly_score, atol=FLOAT32_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_training_on_a_gpu_improves_a_model_that_the_cpu_scores_alike(
    tmp_path: Path, cli: RunCommand, optimizer: str
) -> None:
    """Train for a minute; the validation loss falls, and both devices give the same scores."""
    table, config = write(tmp_path / "table.parquet", mixed(np.random.default_rng(11), 3000)), tmp_path / "train.toml"
    config.write_text(f'optimizer = "{optimizer}"\n')
    out, options = tmp_path / "model", ("--config", config, "--device", GPU, "--preset", "tiny")
    done = cli(table, "--out", out, *options, "--max-time", "60s", program="deformer-train")
    assert done.code == 0, done.err
    trained = model_store.read(out)
    history = trained.manifest["training"]["history"]
    assert min(row["validation"] for row in history) < history[0]["validation"]
    records = pq.read_table(table).slice(0, 50).to_pylist()
    on_cpu, on_gpu = (deformer_stream.load(out, device).score(records) for device in ("cpu", GPU))
    np.testing.assert_allclose(on_gpu.log_likelihood, on_cpu.log_likelihood, atol=FLOAT32_TOLERANCE)
