"""Readings of open records that a new model drops are logged and counted."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from deformer_stream.codec import Codec
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.engine_set import EngineSet
from deformer_stream.runtime import pipeline_report
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.pipeline import Pipeline
from deformer_stream.runtime.timing import WallClock
from deformer_stream.testing import MemorySink, MemorySource
from tests.engine.restarts import ALPHA, SCHEMA, Event, make_batch, make_calibrated_model, make_engine, rescore_all

FEWER = replace(SCHEMA, features=SCHEMA.features[:2])
"""`SCHEMA` without the features "heat" and "site"."""


def run_pipeline(engine: Engine) -> tuple[list[dict[str, object]], float | None]:
    """Run a pipeline with one message, and return the warnings about dropped readings, and the metric."""
    metrics, source = Metrics(), MemorySource([json.dumps({"record": "s", "feature": "flow", "value": 1.0}).encode()])
    pipeline = Pipeline(
        source, Codec(engine.schema), EngineSet.of_only_model(engine), [MemorySink()], WallClock(), metrics, True
    )
    with capture_logs() as logs:
        pipeline.run(threading.Event())
    warnings = [dict(line) for line in logs if line["event"] == "readings_dropped"]
    return warnings, metrics.registry.get_sample_value("deformer_readings_dropped_total")


@pytest.mark.parametrize("is_restarted", [False, True])
def test_dropped_readings_are_logged_once_with_their_features(
    is_restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a change of the model, and after a restart with another model."""
    monkeypatch.setattr(pipeline_report, "MAX_LOGGED_FEATURES", 1)
    engine = make_engine()
    readings = [("r", 0), ("r", 2), ("r", 3), ("s", 3)]
    engine.handle(make_batch([Event(0, name, False, 0, feature, 1.0) for name, feature in readings]), 0)
    model, calibration = make_calibrated_model(1, schema=FEWER)
    if is_restarted:
        snapshot = engine.snapshot(0, 0)
        engine = Engine(model, calibration, "fewer", ALPHA, effort="off")
        engine.restore(0, snapshot, 0)
    else:
        engine.change_model(model, calibration, "fewer", "finish")
    rescore_all(engine)
    warnings, num_dropped = run_pipeline(engine)
    assert num_dropped == 3
    (warning,) = warnings
    assert (warning["log_level"], warning["readings"], warning["model"]) == ("warning", 3, "fewer")
    assert (warning["features"], warning["num_features"]) == ({"site": 2}, 2)
    assert run_pipeline(engine) == ([], 0), "they are reported once"


def test_nothing_is_logged_if_no_reading_is_dropped() -> None:
    assert run_pipeline(make_engine()) == ([], 0)
