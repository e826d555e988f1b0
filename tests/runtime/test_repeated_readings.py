"""The share of readings that repeat an earlier one of their time slot: when it is reported, and what is suggested."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from structlog.testing import capture_logs

from deformer_stream.codec import Codec, WindowAssigner
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.engine_set import EngineSet
from deformer_stream.engine.events import ClosedRecords, Effects, EventBatch, Rejection, RejectionReason, ScoredReadings
from deformer_stream.model.schema import Feature, Schema
from deformer_stream.model.time_slots import expand_time_slots
from deformer_stream.model.windows import Window
from deformer_stream.runtime import pipeline_report
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.pipeline import Pipeline
from deformer_stream.runtime.repeated_readings import RepeatedReadingsMonitor
from deformer_stream.testing import ManualClock, MemorySink, MemorySource
from tests.engine.restarts import make_calibrated_model

SECOND = 1_000_000
SENSORS = Schema((Feature("flow", "continuous"), Feature("heat", "continuous")))
SERIES = expand_time_slots(SENSORS, Window(60 * SECOND, 30))


def make_effects(num_scored: int, num_repeated: int, num_late: int = 0) -> Effects:
    """Return effects with these numbers of scored, repeated and late readings."""
    numbers, ints = np.zeros(num_scored), np.zeros(num_scored, np.int32)
    scored = ScoredReadings(np.zeros(num_scored, np.int64), ints, *[numbers] * 4, np.zeros(num_scored, bool))
    rejections = [
        Rejection(0, RejectionReason.REPEATED, "", num_repeated),
        Rejection(1, RejectionReason.LATE, "", num_late),
    ]
    return Effects(EventBatch.empty(), scored, [], rejections, ClosedRecords.empty())


@pytest.mark.parametrize(
    ("num_scored", "num_repeated", "words"),
    [
        (500, 500, "half of the readings (500 of 1,000) share a time slot of 2s with an earlier reading of their"),
        (500, 500, "left out: train with --slots 60, or --per-slot last|mean|min|max"),
        (650, 1350, "68% of the readings (1,350 of 2,000)"),
        (650, 1350, "--slots 90, "),
        (100, 99_900, "left out: train with --per-slot last|mean|min|max"),
    ],
)
def test_report_states_the_share_and_suggests_slots(num_scored: int, num_repeated: int, words: str) -> None:
    monitor = RepeatedReadingsMonitor(SERIES)
    monitor.add(make_effects(num_scored, num_repeated, num_late=7))
    report = monitor.summarize()
    assert report is not None
    assert words in report.describe()


def test_few_repeated_readings_are_not_reported() -> None:
    monitor = RepeatedReadingsMonitor(SERIES)
    monitor.add(make_effects(1000, 10))
    assert monitor.summarize() is None
    monitor.add(make_effects(0, 1))
    assert monitor.summarize() is not None
    without_window = RepeatedReadingsMonitor(SENSORS)
    without_window.add(make_effects(1, 100))
    assert without_window.summarize() is None


def test_last_minute_starts_with_the_call_before() -> None:
    monitor = RepeatedReadingsMonitor(Schema(SENSORS.features, Window(10 * SECOND)))
    monitor.add(make_effects(0, 100))
    assert monitor.check_last_minute() is not None
    monitor.add(make_effects(100, 0))
    assert monitor.check_last_minute() is None
    monitor.add(make_effects(100, 300))
    report = monitor.check_last_minute()
    assert report is not None
    assert "75% of the readings of the last minute (300 of 400) share a window of 10s" in report.describe()
    assert "--slots 4" in report.describe()


def test_live_stream_logs_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a minute it is checked whether there is a reason; the first one is logged, and no other."""
    monkeypatch.setattr(pipeline_report, "SUMMARY_SECONDS", 0.0)
    engine = Engine(*make_calibrated_model(schema=SERIES), "model", 0.1)
    codec = Codec(SERIES, window_assigner=WindowAssigner.from_options(SERIES, None, 0))
    events = [{"device": "p", "feature": "flow", "value": 0.5, "time": float(second)} for second in range(100)]
    source = MemorySource([json.dumps(event).encode() for event in events], chunk=20)
    metrics = Metrics()
    run = Pipeline(
        source, codec, EngineSet.of_only_model(engine), [MemorySink()], ManualClock(), metrics, is_finite=False
    )
    with capture_logs() as lines:
        totals = run.run(threading.Event())
    assert (totals.events, totals.rejected) == (50, {"repeated": 50})
    warnings = [line for line in lines if line["event"] == "readings_repeated"]
    assert [(warning["log_level"], warning["share"]) for warning in warnings] == [("warning", 0.5)]
    assert "of the last minute" in warnings[0]["message"]
    assert totals.repeated_readings is not None
    assert metrics.registry.get_sample_value("deformer_events_rejected_total", {"reason": "repeated"}) == 50
