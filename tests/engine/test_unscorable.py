"""Readings without a finite score are ignored and counted, by the compiled kernels as by PyTorch."""

from __future__ import annotations

import json
import math
import threading
from typing import Any, Literal

import numpy as np
import pytest
import torch

from deformer_stream import log
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.codec import Codec
from deformer_stream.engine.engine import Engine, UnscorableReadings
from deformer_stream.engine.engine_set import EngineSet
from deformer_stream.engine.events import Effects
from deformer_stream.kernels import packing
from deformer_stream.kernels.library import load_library
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.parameters import compute_scale_floors
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.pipeline import Pipeline
from deformer_stream.runtime.timing import WallClock
from deformer_stream.testing import MemorySink, MemorySource
from tests.engine.random_models import make_model
from tests.engine.restarts import SCHEMA, Event, make_batch

Path = Literal["torch", "kernels"]
Ties = Literal["arrival", "hold"]
CONFIG = ModelConfig(d_model=64, layers=2, heads=2, feedforward=32, mixtures=3, hidden=(24,))
FLOW, MODE, HEAT, SITE = range(4)


def build_model(path: Path) -> DEformer:
    """Return a model with random weights that is scored by the kernels or by PyTorch."""
    model = make_model(SCHEMA, CONFIG, dtype=torch.float32)
    model.kernel_library = load_library(False) if path == "kernels" else None
    assert path == "torch" or model.kernel_library is not None, "the tests need compiled kernels: run `make kernels`"
    return model


def damage(model: DEformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the conditionals of the feature "flow" have scales that are not numbers, in PyTorch and in the kernels."""
    floors = compute_scale_floors(model.schema)
    floors[FLOW] = math.nan
    model.head.scale_floor[:] = torch.from_numpy(floors)
    monkeypatch.setattr(packing, "compute_scale_floors", lambda schema: floors)


def build_engine(model: DEformer, ties: Ties = "arrival") -> Engine:
    """Return an engine with one alert level that an extreme reading reaches."""
    return Engine(model, Calibration.from_statistics(np.arange(50.0), "random"), "fingerprint", 0.1, ties=ties)


def score(engine: Engine) -> tuple[list[Effects], dict[int, Any]]:
    """Score a record in two batches, with an extreme value of the feature "flow".

    Returns:
        The effects, and by feature code: log-likelihood, its running sum, score and p-value.
    """
    events = [
        Event(0, "r", False, 1, HEAT, 0.3),
        Event(0, "r", False, 2, FLOW, 900.0),
        Event(0, "r", False, 2, MODE, 1.0),
        Event(0, "r", False, 3, SITE, 0.5),
    ]
    effects = [engine.handle(make_batch(events[:2]), 0), engine.handle(make_batch(events[2:]), 0), engine.finish()]
    rows: dict[int, Any] = {}
    for effect in effects:
        scored = effect.scored
        for i, event in enumerate(scored.event_indices.tolist()):
            columns = scored.log_likelihood, scored.running_log_likelihood, scored.score, scored.p_value
            rows[int(effect.batch.features[event])] = [float(column[i]) for column in columns]
    return effects, rows


@pytest.mark.parametrize("ties", ["arrival", "hold"])
@pytest.mark.parametrize("path", ["torch", "kernels"])
def test_reading_without_finite_score_changes_no_statistic(
    path: Path, ties: Ties, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other readings of the record keep their scores, and the record does not alert."""
    effects, expected = score(build_engine(build_model(path), ties))
    assert [alert.record for effect in effects for alert in effect.alerts] == ["r"], "an intact model raises an alert"
    damaged = build_model(path)
    damage(damaged, monkeypatch)
    engine = build_engine(damaged, ties)
    effects, rows = score(engine)
    assert not [alert for effect in effects for alert in effect.alerts]
    assert math.isnan(rows[FLOW][0])
    assert math.isnan(rows[SITE][0]), "context is not scored, and not counted"
    for feature in (HEAT, MODE) if ties == "arrival" else (HEAT,):
        assert rows[feature][0] == pytest.approx(expected[feature][0], abs=1e-5)
    if ties == "arrival":
        assert rows[FLOW][1:] == rows[HEAT][1:], "running sum, score and p-value stay what they were"
    assert rows[MODE][1] == pytest.approx(rows[HEAT][0] + rows[MODE][0], abs=1e-5)
    (closed,) = (effect.closed for effect in effects if len(effect.closed))
    assert np.isfinite([closed.anomaly_score[0], closed.log_likelihood[0], closed.score[0], closed.p_value[0]]).all()
    assert closed.p_value[0] > 0.1
    assert engine.pop_unscorable() == UnscorableReadings(1, "fingerprint", "r", "flow")
    assert engine.pop_unscorable() is None


@pytest.mark.parametrize("ties", ["arrival", "hold"])
def test_kernels_and_torch_agree_on_a_damaged_model(ties: Ties, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for path in ("torch", "kernels"):
        model = build_model(path)  # type: ignore[arg-type]
        damage(model, monkeypatch)
        effects, rows = score(build_engine(model, ties))
        closed = effects[1].closed if len(effects[1].closed) else effects[2].closed
        results.append([*(rows[feature] for feature in range(4)), [*closed.score, *closed.p_value]])
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-4, equal_nan=True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("path", ["torch", "kernels"])
def test_model_without_finite_weights_never_alerts(path: Path, value: float) -> None:
    model = build_model(path)
    with torch.no_grad():
        model.head.project.weight.fill_(value)
    engine = build_engine(model)
    effects, rows = score(engine)
    assert not [alert for effect in effects for alert in effect.alerts]
    assert {row[3] for row in rows.values()} == {1.0}
    unscorable = engine.pop_unscorable()
    assert unscorable is not None
    assert (unscorable.num_readings, unscorable.feature) == (3, "heat")


def test_replayed_readings_are_not_counted_again() -> None:
    model = build_model("torch")
    model.head.scale_floor[FLOW] = math.nan
    engine = build_engine(model)
    engine.replay(make_batch([Event(0, "r", False, 1, FLOW, 1.0)]), 0)
    assert engine.pop_unscorable() is None


def test_pipeline_logs_and_counts_scores_that_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("torch")
    model.head.scale_floor[FLOW] = math.nan
    errors: list[tuple[str, dict[str, Any]]] = []

    class Logger:
        """A logger that keeps errors and drops everything else."""

        def error(self, event: str, **data: Any) -> None:
            errors.append((event, data))

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **data: None

    monkeypatch.setattr(log, "get_logger", lambda name: Logger())
    rows = [json.dumps({"record": f"r{i}", "feature": "flow", "value": 1.0}).encode() for i in range(3)]
    metrics, source = Metrics(), MemorySource(rows)
    pipeline = Pipeline(
        source, Codec(SCHEMA), EngineSet.of_only_model(build_engine(model)), [MemorySink()], WallClock(), metrics, True
    )
    pipeline.run(threading.Event())
    assert metrics.registry.get_sample_value("deformer_scores_not_finite_total") == 3
    data = {"readings": 3, "model": "fingerprint", "record": "r0", "feature": "flow"}
    assert errors == [("score_not_finite", data)]
