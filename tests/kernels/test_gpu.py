"""On a GPU the same scores, the same alerts, the same models. The only tests that are skipped where none is there."""

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
from deformer_stream.calibration.torch_scoring import compute_max_statistics
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import EventBatch
from deformer_stream.engine.explain import explain_records
from deformer_stream.kernels import cuda_graphs
from deformer_stream.model.deformer import DEformer, ModelConfig
from tests.commands import RunCommand
from tests.engine.fake_gpu import needs_gpu
from tests.engine.random_models import draw_records, make_model, normalise_values
from tests.engine.test_engine import SCHEMA, Collected, run_stream
from tests.models import write_model
from tests.trainer.tables import mixed, write

pytestmark = [pytest.mark.gpu, needs_gpu]

GPU = "cuda"
CONFIG = ModelConfig(d_model=64, layers=2, heads=4, feedforward=96, mixtures=3, hidden=(24,))
KINDS: list[dict[str, Any]] = [
    {},
    {"gaussians": 4},
    {"memory": "all", "gaussians": 4},
    {"tokens": "single", "gaussians": 4},
    {"tokens": "single"},
    {"precision": "bfloat16"},
    {"norm": "post", "activation": "relu"},
]
NEAR = 1e-3
"""How far scores may be apart; where factors are rounded to bfloat16, sums that round otherwise may be `ROUNDED`."""
ROUNDED = 5e-2
RECORDS = 60


def models(change: dict[str, Any]) -> tuple[DEformer, DEformer]:
    """The same on the CPU and on the GPU."""
    model = make_model(SCHEMA, replace(CONFIG, **change), dtype=torch.float32)
    return model, copy.deepcopy(model).to(GPU)


def tolerance(change: dict[str, Any]) -> float:
    return ROUNDED if "precision" in change else NEAR


def followed(model: DEformer, calibration: Calibration, most: int = 40, **limits: Any) -> tuple[Collected, Engine]:
    """What a stream of records leads to, in polls of up to so many readings."""
    engine = Engine(model, calibration, "fp", (0.05, 0.2), Limits(**limits))
    return run_stream(*draw_records(SCHEMA, RECORDS, 1, missing_share=0.2), engine, 2, most), engine


def calibrated(model: DEformer, ties: TiePolicy = "arrival") -> Calibration:
    codes, raw = draw_records(SCHEMA, 200, seed=99)
    statistics = compute_max_statistics(model, codes, normalise_values(SCHEMA, codes, raw))
    return Calibration.from_statistics(statistics, "random", tie_policy=ties)


def same_readings(a: Collected, b: Collected, near: float) -> None:
    assert a.readings.keys() == b.readings.keys()
    for record, rows in a.readings.items():
        np.testing.assert_allclose(np.array(b.readings[record])[:, :3], np.array(rows)[:, :3], atol=near)


@pytest.mark.parametrize("change", KINDS)
def test_whole_records_have_the_scores_that_they_have_on_a_cpu(change: dict[str, Any]) -> None:
    here, there = models(change)
    codes, raw = draw_records(SCHEMA, RECORDS, 1, missing_share=0.2)
    features, values = torch.from_numpy(codes), torch.from_numpy(normalise_values(SCHEMA, codes, raw)).float()
    with torch.inference_mode():
        expected = here.log_prob(features, values)
        found = there.log_prob(features.to(GPU), values.to(GPU)).cpu()
    np.testing.assert_allclose(found, expected, atol=tolerance(change))


@pytest.mark.parametrize("change", KINDS)
@pytest.mark.parametrize(("most", "cache"), [(1, 2**28), (40, 2**28), (40, 200_000), (5000, 2**28)])
def test_a_stream_has_the_scores_and_alerts_that_it_has_on_a_cpu(change: dict[str, Any], most: int, cache: int) -> None:
    here, there = models(change)
    calibration = calibrated(here)
    plain, _ = followed(here, calibration, most, cache_bytes=cache)
    quick, engine = followed(there, calibration, most, cache_bytes=cache)
    assert engine.current_version._graph_runner is not None
    assert engine.current_version._graph_runner.graph_by_shape or most > RECORDS, "a graph could not be recorded"
    same_readings(plain, quick, tolerance(change))
    if (
        "precision" not in change
    ):  # a p-value is a rank: it may change where a score moves past one of the calibration's
        assert len(plain.alert_by_level.keys() ^ quick.alert_by_level.keys()) <= 1
    assert plain.alert_by_level
    assert plain.closed.keys() == quick.closed.keys()


@pytest.mark.parametrize("change", KINDS)
def test_what_is_recorded_says_what_operators_say_one_by_one(change: dict[str, Any]) -> None:
    _, there = models(change)
    calibration = Calibration.from_statistics(np.arange(100.0), "random")
    with patch.object(cuda_graphs, "recorder", lambda device: None):
        plain, _ = followed(there, calibration)
    quick, engine = followed(there, calibration)
    assert engine.current_version._graph_runner is not None
    assert len(engine.current_version._graph_runner.graph_by_shape) > 1
    same_readings(plain, quick, tolerance(change))


def test_blocks_of_ties_have_the_scores_that_they_have_on_a_cpu() -> None:
    here, there = models({"gaussians": 4})
    calibration = calibrated(here, "hold")
    codes, raw = draw_records(SCHEMA, 20, 3)
    n = len(codes)
    ids, place = [f"{row}" for row in range(n)] * codes.shape[1], np.tile(np.arange(n, dtype=np.int32), codes.shape[1])
    times = np.repeat(np.arange(codes.shape[1]) // 3, n).astype(np.int64)
    batch = EventBatch(ids, codes.T.ravel().astype(np.int32), raw.T.ravel(), times, place, np.zeros_like(place))
    found = []
    for model in (here, there):
        engine = Engine(model, calibration, "fp", 0.05)
        found.append([engine.handle(batch, 0).closed, engine.finish().closed])
    for expected, closed in zip(*found, strict=True):
        np.testing.assert_allclose(closed.score, expected.score, atol=NEAR)


def test_alerts_are_explained_as_on_a_cpu() -> None:
    here, there = models({"gaussians": 4})
    codes, raw = draw_records(SCHEMA, 5, 4)
    told = []
    for model in (here, there):
        told.append(explain_records(model, codes, raw, [{}] * 5, "abcde", lambda scores, names: scores > 1.0))
    for expected, found in zip(*told, strict=True):
        by_name = {part.feature: part for part in found.contributions}
        for part in expected.contributions:
            assert by_name[part.feature].surprise == pytest.approx(part.surprise, abs=1e-2)


def test_models_go_both_ways(tmp_path: Path) -> None:
    """One that was written by a CPU is read onto a GPU, and back."""
    first = write_model(tmp_path / "first")
    there = model_store.read(first, GPU)
    assert there.model.device.type == torch.device(GPU).type
    model_store.write(
        tmp_path / "second", there.model, there.calibration, {"epochs": 1}, "<!doctype html><p>report</p>"
    )
    record = {"temperature": 21.0, "state": "run", "pressure": 1.7, "valve": True}
    scores = [
        deformer_stream.load(folder, device).score([record])
        for folder, device in ((first, "cpu"), (first, GPU), (tmp_path / "second", "cpu"), (tmp_path / "second", GPU))
    ]
    for score in scores[1:]:
        np.testing.assert_allclose(score.log_likelihood, scores[0].log_likelihood, atol=NEAR)
        np.testing.assert_allclose(score.anomaly_score, scores[0].anomaly_score, atol=NEAR)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_minute_of_training(tmp_path: Path, cli: RunCommand, optimizer: str) -> None:
    """It learns, and what it has learnt is the same on a CPU."""
    table, config = write(tmp_path / "table.parquet", mixed(np.random.default_rng(11), 3000)), tmp_path / "train.toml"
    config.write_text(f'optimizer = "{optimizer}"\n')
    out, options = tmp_path / "model", ("--config", config, "--device", GPU, "--preset", "tiny")
    done = cli(table, "--out", out, *options, "--max-time", "60s", program="deformer-train")
    assert done.code == 0, done.err
    trained = model_store.read(out)
    history = trained.manifest["training"]["history"]
    assert min(row["validation"] for row in history) < history[0]["validation"]
    records = pq.read_table(table).slice(0, 50).to_pylist()
    here, there = (deformer_stream.load(out, device).score(records) for device in ("cpu", GPU))
    np.testing.assert_allclose(there.log_likelihood, here.log_likelihood, atol=NEAR)
