"""Tests of the pipeline: revoked partitions, stopping, clocks, time-outs, and when it commits."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from deformer_stream import model_store
from deformer_stream.codec import Codec, WindowAssigner
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.engine_set import EngineSet
from deformer_stream.engine.events import NO_TIME, ONLY_MODEL, CloseReason
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.schema import Schema
from deformer_stream.model.windows import Window
from deformer_stream.model_store import Artifact
from deformer_stream.runtime import pipeline
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.pipeline import Pipeline
from deformer_stream.runtime.ports import NO_STATE, PartitionState, PollResult
from deformer_stream.runtime.timing import CommitSchedule, EventClock, WallClock
from deformer_stream.testing import ManualClock, MemorySink, MemorySource
from tests.irregular_tables import write_irregular_model
from tests.models import TRAINING_SUMMARY
from tests.runtime.pipelines import ALPHA, RECORDS, make_engine, make_model_reload, make_record_messages


class RevokingSource(MemorySource):
    """A source that takes partition 1 away with its second poll."""

    turn = 0

    def poll(self, timeout: float) -> PollResult:
        self.turn += 1
        polled = super().poll(timeout)
        return PollResult(polled.data, (1,) if self.turn == 2 else ())


def test_records_of_revoked_partitions_are_closed(loaded: Artifact) -> None:
    """They are closed before new data is scored, and the same record ids may open again."""

    def event(record: str, feature: str) -> tuple[bytes, bytes]:
        return record.encode(), json.dumps({"record": record, "feature": feature, "value": 1.0}).encode()

    import zlib

    there = next(f"r{i}" for i in range(99) if zlib.crc32(f"r{i}".encode()) % 2 == 1)
    here = next(f"r{i}" for i in range(99) if zlib.crc32(f"r{i}".encode()) % 2 == 0)
    messages = [event(there, "pressure"), event(here, "pressure"), event(there, "pressure"), event(here, "pressure")]
    sink = MemorySink()
    source = RevokingSource(messages, chunk=2, partitions=2)
    Pipeline(
        source,
        Codec(loaded.schema),
        EngineSet.of_only_model(make_engine(loaded)),
        [sink],
        ManualClock(),
        Metrics(),
        False,
    ).run(threading.Event())
    assert [(closed.record_ids, closed.reasons) for closed in sink.closings] == [([there], [CloseReason.REVOKED])]
    assert [(record, seq) for record, _, seq, *_ in sink.scored] == [(there, 0), (here, 0), (there, 0)]
    assert [r.reason.value for r in sink.rejected] == ["duplicate"]
    assert sink.flushed == len(sink.effects)


def test_stop_finishes_and_commits_the_current_poll(loaded: Artifact) -> None:
    """When `stop` is set, the pipeline finishes and commits what it polled, and leaves open records open."""
    stop = threading.Event()

    class StoppingSource(MemorySource):
        """A source that sets `stop` during its poll."""

        def poll(self, timeout: float) -> PollResult:
            stop.set()
            return super().poll(timeout)

    row = json.dumps({"record": "r", "feature": "pressure", "value": 1.0}).encode()
    source, sink = StoppingSource([row, row], chunk=1), MemorySink()
    engine = make_engine(loaded)
    for finite in (True, False):
        totals = Pipeline(
            source, Codec(loaded.schema), EngineSet.of_only_model(engine), [sink], ManualClock(), Metrics(), finite
        ).run(stop)
        stop.clear() if finite else None
    assert source.committed == {0: 2}
    assert (totals.events, totals.rejected["duplicate"], totals.closed) == (0, 1, 0)
    assert len(engine.records) == 1
    assert sink.flushed == len(sink.effects) == 2


@pytest.mark.parametrize(
    ("is_finite", "pause", "expected"), [(False, 1e9, [1, 0, 0]), (False, 0.0, [1, 1, 1]), (True, 1e9, [1, 1, 1])]
)
def test_a_live_stream_pauses_after_rankings(
    loaded: Artifact, monkeypatch: pytest.MonkeyPatch, is_finite: bool, pause: float, expected: list[int]
) -> None:
    """Records that would be ranked in the pause wait. The output of a replay does not depend on the time."""
    monkeypatch.setattr(pipeline, "RANKING_PAUSE", pause)
    rows = [{"record": f"r{number}", "feature": "pressure", "value": 1.0} for number in range(3)]
    source, sink = MemorySource([json.dumps(row).encode() for row in rows], chunk=1), MemorySink()
    engine = Engine(loaded.model, loaded.calibration, "f", 1e-6, max_suggested=8, suspicious=1.0)
    Pipeline(
        source, Codec(loaded.schema), EngineSet.of_only_model(engine), [sink], ManualClock(), Metrics(), is_finite
    ).run(threading.Event())
    assert [len(effects.suspicious_records) for effects in sink.effects[:3]] == expected


def test_stop_before_start_processes_nothing(loaded: Artifact) -> None:
    stop = threading.Event()
    stop.set()
    source = MemorySource([b"{}"])
    totals = Pipeline(
        source, Codec(loaded.schema), EngineSet.of_only_model(make_engine(loaded)), [], WallClock(), Metrics(), True
    ).run(stop)
    assert (totals.events, dict(totals.rejected), source.committed) == (0, {}, {})


@pytest.mark.parametrize("finite", [True, False])
def test_end_of_finite_input_closes_open_records(loaded: Artifact, finite: bool) -> None:
    row = json.dumps({"record": "r", "feature": "pressure", "value": 1.0}).encode()
    sink = MemorySink()
    pipeline = Pipeline(
        MemorySource([row]),
        Codec(loaded.schema),
        EngineSet.of_only_model(make_engine(loaded)),
        [sink],
        WallClock(),
        Metrics(),
        finite,
    )
    totals = pipeline.run(threading.Event())
    assert totals.closed == int(finite)
    assert [reason for closed in sink.closings for reason in closed.reasons] == [CloseReason.END] * finite


def test_records_time_out_without_new_events(loaded: Artifact) -> None:
    clock, sink = ManualClock(), MemorySink()

    class SilentSource(MemorySource):
        """A source that returns nothing between its first and last poll."""

        turn = 0

        def poll(self, timeout: float) -> PollResult:
            clock.advance(10.0)
            self.turn += 1
            return super().poll(timeout) if self.turn in (1, 5) else PollResult(None)

    row = json.dumps({"record": "r", "feature": "pressure", "value": 1.0}).encode()
    engine = make_engine(loaded, record_timeout=25_000_000)
    Pipeline(
        SilentSource([row], chunk=1),
        Codec(loaded.schema),
        EngineSet.of_only_model(engine),
        [sink],
        clock,
        Metrics(),
        False,
    ).run(threading.Event())
    assert [closed.reasons for closed in sink.closings] == [[CloseReason.TIMEOUT]]
    assert len(sink.effects) == 5


def test_rejections_are_in_message_order(loaded: Artifact) -> None:
    row = json.dumps({"record": "r", "feature": "pressure", "value": 1.0}).encode()
    sink = MemorySink()
    source = MemorySource([row, b"no", row, b"{}"])
    totals = Pipeline(
        source, Codec(loaded.schema), EngineSet.of_only_model(make_engine(loaded)), [sink], WallClock(), Metrics(), True
    ).run(threading.Event())
    assert [r.message_index for r in sink.rejected] == [1, 2, 3]
    assert totals.rejected == {"not_json": 1, "duplicate": 1, "missing_field": 1}
    assert totals.to_log_fields()["rejected"] == dict(totals.rejected)


def test_progress_and_metrics_are_reported(loaded: Artifact) -> None:
    seen: list[int] = []
    metrics = Metrics()
    source = MemorySource(make_record_messages(loaded), chunk=16)
    Pipeline(
        source,
        Codec(loaded.schema),
        EngineSet.of_only_model(make_engine(loaded)),
        [MemorySink()],
        WallClock(),
        metrics,
        True,
        report_progress=seen.append,
    ).run(threading.Event())
    assert sum(seen) == len(make_record_messages(loaded))
    count = metrics.registry.get_sample_value
    assert count("deformer_records_closed_total", {"reason": "end"}) == RECORDS - (
        count("deformer_records_closed_total", {"reason": "complete"}) or 0
    )
    assert count("deformer_records_open") == 0
    assert (count("deformer_commit_seconds_count") or 0) >= 1
    assert count("deformer_model_info", {"fingerprint": loaded.fingerprint}) == 1


def test_model_with_other_windows_is_rejected(loaded: Artifact, tmp_path: Path) -> None:
    """The pipeline uses windows of 10 s, and the new model was trained on windows of a minute."""
    schema = Schema(loaded.schema.features, Window(60_000_000))
    model = DEformer(schema, loaded.model.config)
    model_store.write(tmp_path / "m", model, loaded.calibration, TRAINING_SUMMARY, "<p>")
    found = [model_store.read(tmp_path / "m")]
    engine, sink = make_engine(loaded), MemorySink()

    def codec_of(one: Artifact) -> Codec:
        return Codec(one.schema, window_assigner=WindowAssigner.from_options(one.schema, 10_000_000, 0))

    Pipeline(
        MemorySource(make_record_messages(loaded), chunk=16),
        codec_of(loaded),
        EngineSet.of_only_model(engine),
        [sink],
        WallClock(),
        Metrics(),
        True,
        model_reload=make_model_reload(lambda: (ONLY_MODEL, found.pop()) if found else None, codec_of),
    ).run(threading.Event())
    assert not found
    assert engine.fingerprint == loaded.fingerprint
    assert {alert.model for alert in sink.alerts} == {loaded.fingerprint}


def test_model_that_cannot_hold_ties_is_rejected(loaded: Artifact, tmp_path: Path) -> None:
    """The run holds readings of the same time, and readings of the new model are irregular."""
    found = [model_store.read(write_irregular_model(tmp_path / "m"))]
    engine = Engine(loaded.model, loaded.calibration, loaded.fingerprint, ALPHA, ties="hold")
    with capture_logs() as logs:
        Pipeline(
            MemorySource(make_record_messages(loaded), chunk=16),
            Codec(loaded.schema),
            EngineSet.of_only_model(engine),
            [MemorySink()],
            WallClock(),
            Metrics(),
            True,
            model_reload=make_model_reload(lambda: (ONLY_MODEL, found.pop()) if found else None),
        ).run(threading.Event())
    assert not found
    assert engine.fingerprint == loaded.fingerprint
    assert [line["event"] for line in logs].count("model_rejected") == 1


def test_event_clock_follows_the_latest_event() -> None:
    clock = EventClock()
    batches = ([], [NO_TIME], [5, 3], [4, NO_TIME], [7])
    assert [clock.at(np.array(times, np.int64)) for times in batches] == [0, 0, 5, 5, 7]


def test_alert_is_committed_at_once_unless_the_pipeline_is_behind() -> None:
    now = [0.0]
    schedule = CommitSchedule(1.0, lambda: now[0])
    with schedule.time_commit():
        now[0] += 0.02
    assert not schedule.is_due(False, lambda: False)
    assert schedule.is_due(True, lambda: False)
    assert not schedule.is_due(True, lambda: True)
    now[0] += 0.09
    assert schedule.is_due(False, lambda: True), "the alert still waits, and committing would take less than a fifth"
    with schedule.time_commit():
        pass
    assert not schedule.is_due(False, lambda: False)
    now[0] += 1.0
    assert schedule.is_due(False, lambda: True)


class AsyncSource(MemorySource):
    """A source with asynchronous commits that records which commits were waited for.

    Attributes:
        unread: The lag, in messages.
        waited: For each commit, whether the pipeline waited for it.
    """

    assigned_partitions = frozenset({0})
    unread = 0

    def __init__(self, messages: list[bytes]) -> None:
        super().__init__(messages, chunk=1)
        self.waited: list[bool] = []

    def set_model_fingerprint(self, fingerprint: str) -> None: ...

    def get_lag(self) -> dict[tuple[str, int], int]:
        return {("memory", 0): self.unread}

    def commit(self, saved: Mapping[int, PartitionState] = NO_STATE) -> None:
        self.waited.append(True)

    def begin_commit(self, saved: Mapping[int, PartitionState], ended: Callable[[], None]) -> None:
        self.waited.append(False)
        ended()


@pytest.mark.parametrize("unread", [0, 100_000])
def test_pipeline_waits_for_commits_with_alerts(loaded: Artifact, unread: int) -> None:
    """It does not wait if it is behind. It always waits for the last commit."""
    source, sink = AsyncSource(make_record_messages(loaded)), MemorySink()
    source.unread = unread
    codec, engine = Codec(loaded.schema), make_engine(loaded)
    Pipeline(
        source, codec, EngineSet.of_only_model(engine), [sink], ManualClock(), Metrics(), False, commit_interval=0.0
    ).run(threading.Event())
    alerting = [bool(effects.alerts) for effects in sink.effects]
    assert any(alerting)
    assert not all(alerting)
    assert source.waited == [alert and not unread for alert in alerting] + [True]


@pytest.mark.parametrize("log_alerts", [True, False])
def test_logged_alert_names_device_reading_and_expected_range(loaded: Artifact, log_alerts: bool) -> None:
    event = json.dumps({"record": "hall/pump-7/12", "feature": "pressure", "value": 1e6}).encode()
    sink = MemorySink()
    pipeline = Pipeline(
        *(
            MemorySource([event]),
            Codec(loaded.schema),
            EngineSet.of_only_model(make_engine(loaded)),
            [sink],
            ManualClock(),
            Metrics(),
            False,
        ),
        log_alerts=log_alerts,
    )
    with capture_logs() as lines:
        pipeline.run(threading.Event())
    raised = [line for line in lines if line["event"] == "alert_raised"]
    (alert,) = sink.alerts
    expected = alert.contributions[0].expected
    assert len(raised) == log_alerts
    for line in raised:
        assert (line["record"], line["device"]) == ("hall/pump-7/12", "hall/pump-7")
        assert (line["feature"], line["value"]) == ("pressure", 1e6)
        assert (line["expected_low"], line["expected_high"]) == (expected.low, expected.high)
