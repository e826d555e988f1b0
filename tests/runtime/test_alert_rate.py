"""Tests of the bound on alerts per second."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from connectors.files import AlertLines, TerminalAlerts
from deformer_stream.codec import Codec, encode_storm
from deformer_stream.engine import alerts as alert_building
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.engine_set import EngineSet
from deformer_stream.engine.events import Alert, ClosedRecords, Effects, EventBatch, ScoredReadings
from deformer_stream.engine.explain import ExplanationEffort
from deformer_stream.incidents.make_evidence import make_evidence
from deformer_stream.model_store import Artifact
from deformer_stream.runtime import alert_rate
from deformer_stream.runtime.alert_rate import AlertLimiter, TokenBucket, take_tokens
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.pipeline import Pipeline
from deformer_stream.testing import ManualClock, MemorySink, MemorySource
from tests.runtime import group_members
from tests.runtime.group_members import PARTITIONS, GroupMember, make_cluster, run_member
from tests.runtime.pipelines import ALPHA, make_engine, make_record_messages


def make_alerts(num_alerts: int, alphas: Sequence[float] = (0.01,), first: int = 0) -> list[Alert]:
    """Return alerts of different records of three partitions; the alphas repeat."""
    return [
        Alert(
            f"id{i}",
            f"r{i}",
            1,
            1,
            6,
            1_000_000,
            0.001,
            alphas[i % len(alphas)],
            9.0,
            -3.0,
            "m",
            0,
            (),
            partition=i % 3,
        )
        for i in range(first, first + num_alerts)
    ]


def make_effects(alerts: list[Alert]) -> Effects:
    """Return effects with these alerts."""
    return Effects(EventBatch.empty(), ScoredReadings.empty(), alerts, [], ClosedRecords.empty(), model="m")


@given(
    rate=st.floats(0.1, 100),
    burst=st.floats(1, 50),
    requests=st.lists(st.tuples(st.floats(0, 3), st.integers(0, 40)), max_size=30),
)
def test_a_token_bucket_permits_the_burst_and_the_rate_in_any_interval(
    rate: float, burst: float, requests: list[tuple[float, int]]
) -> None:
    bucket, now = TokenBucket(burst, 0.0), 0.0
    taken: list[tuple[float, int]] = []
    for pause, num_requested in requests:
        now += pause
        bucket, num_taken = take_tokens(bucket, num_requested, now, rate, burst)
        assert 0 <= num_taken <= num_requested
        assert num_taken == num_requested or bucket.num_tokens < 1, "no token is left over"
        taken.append((now, num_taken))
    for i in range(len(taken)):
        for j in range(i, len(taken)):
            assert sum(n for _, n in taken[i : j + 1]) <= burst + rate * (taken[j][0] - taken[i][0]) + 1e-6


def test_alerts_beyond_the_burst_are_held_back_and_summarised() -> None:
    clock = [100.0]
    limiter = AlertLimiter(2.0, lambda: clock[0])
    effects = limiter.limit(make_effects(make_alerts(25)), 7)
    assert [alert.id for alert in effects.alerts] == [f"id{i}" for i in range(20)]
    assert [alert.id for alert in effects.held_back_alerts] == [f"id{i}" for i in range(20, 25)]
    assert [alert.id for alert in effects.raised_alerts] == [f"id{i}" for i in range(25)]
    (notice,) = effects.storm_notices
    assert (notice.time, notice.max_rate, notice.num_held_back, notice.model) == (7, 2.0, 5, "m")
    assert notice.num_by_partition == {0: 2, 1: 1, 2: 2}
    assert notice.records == ("r20", "r21", "r22", "r23", "r24")
    clock[0] += 1.0
    effects = limiter.limit(make_effects(make_alerts(9, first=30)), 8)
    assert [len(effects.alerts), len(effects.held_back_alerts)] == [2, 7]
    assert effects.storm_notices == [], "one notice in ten seconds"
    clock[0] += alert_rate.NOTICE_SECONDS
    effects = limiter.limit(make_effects([]), 9)
    (second,) = effects.storm_notices
    assert (second.num_held_back, second.records[0]) == (7, "r32")
    assert second.id != notice.id
    clock[0] += alert_rate.NOTICE_SECONDS
    untouched = make_effects(make_alerts(20, first=50))
    assert limiter.limit(untouched, 10) is untouched


def test_the_last_notice_does_not_wait() -> None:
    clock = [0.0]
    limiter = AlertLimiter(0.1, lambda: clock[0])
    assert limiter.limit(make_effects(make_alerts(2)), 0).storm_notices[0].num_held_back == 1
    assert not limiter.limit(make_effects(make_alerts(2, first=2)), 0).storm_notices
    assert limiter.limit(make_effects([]), 0, is_final=True).storm_notices[0].num_held_back == 2
    assert not limiter.limit(make_effects([]), 0, is_final=True).storm_notices


def test_the_most_severe_alerts_of_a_batch_are_sent() -> None:
    limiter = AlertLimiter(0.3, lambda: 0.0)
    effects = limiter.limit(make_effects(make_alerts(9, (0.1, 0.001, 0.01))), 0)
    assert [alert.id for alert in effects.alerts] == ["id1", "id4", "id7"]
    assert [alert.id for alert in effects.held_back_alerts] == ["id0", "id2", "id3", "id5", "id6", "id8"]


def test_held_back_alerts_are_evidence_and_decisions() -> None:
    alerts = [replace(alert, is_record_closed=False) for alert in make_alerts(30)]
    limited = AlertLimiter(0.1, lambda: 0.0).limit(make_effects(alerts), 0)
    assert len(limited.alerts) == 1
    assert limited.decisions() == make_effects(alerts).decisions()
    evidence, _ = make_evidence(limited)
    assert sum(len(batch.alerts) for batch in evidence) == 30


def test_notices_are_written_to_the_outputs_of_alerts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    effects = AlertLimiter(0.1, lambda: 0.0).limit(make_effects(make_alerts(8)), 1_583_750_073_000_000)
    lines = AlertLines(tmp_path / "alerts.jsonl")
    for sink in (lines, TerminalAlerts()):
        sink.write(effects, None)
        sink.close()
    *alerts, storm = map(json.loads, (tmp_path / "alerts.jsonl").read_text().splitlines())
    assert [alert["id"] for alert in alerts] == ["id0"]
    assert storm == json.loads(encode_storm(effects.storm_notices[0]))
    assert storm == {
        "kind": "storm",
        "id": effects.storm_notices[0].id,
        "time": "2020-03-09T10:34:33Z",
        "model": "m",
        "held_back": 7,
        "partitions": {"0": 2, "1": 3, "2": 2},
        "records": ["r1", "r2", "r3", "r4", "r5"],
        "max_alert_rate": 0.1,
    }
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert "storm: 7 alerts were held back" in printed[1]


def run_with_limit(loaded: Artifact, max_alert_rate: float | None) -> tuple[MemorySink, Metrics, list[Any]]:
    """Run the pipeline over a live stream with many alerts."""
    sink, metrics = MemorySink(), Metrics()
    source, engine = MemorySource(make_record_messages(loaded), chunk=16), make_engine(loaded)
    with capture_logs() as lines:
        Pipeline(
            *(source, Codec(loaded.schema), EngineSet.of_only_model(engine), [sink], ManualClock(), metrics),
            is_finite=False,
            max_alert_rate=max_alert_rate,
        ).run(threading.Event())
    return sink, metrics, [line for line in lines if line["event"] in ("alert_raised", "alerts_held_back")]


def test_the_pipeline_holds_alerts_back_and_counts_them(loaded: Artifact) -> None:
    unlimited, metrics, _ = run_with_limit(loaded, None)
    num_alerts = len(unlimited.alerts)
    assert num_alerts > 5
    assert metrics.registry.get_sample_value("deformer_alerts_held_back_total") == 0
    sink, metrics, lines = run_with_limit(loaded, 0.3)
    assert len(sink.alerts) == 3
    notices = [notice for effects in sink.effects for notice in effects.storm_notices]
    assert sum(notice.num_held_back for notice in notices) == num_alerts - 3
    assert sink.flushed == len(sink.effects)
    assert metrics.registry.get_sample_value("deformer_alerts_total") == num_alerts
    assert metrics.registry.get_sample_value("deformer_alerts_held_back_total") == num_alerts - 3
    events = Counter(line["event"] for line in lines)
    assert events == {"alert_raised": 3, "alerts_held_back": len(notices)}
    assert sum(line["held_back"] for line in lines if "held_back" in line) == num_alerts - 3


def explain_storm(
    loaded: Artifact, effort: ExplanationEffort, max_alert_rate: float | None, chunk: int = 16
) -> tuple[dict[str, Alert], dict[str, Alert]]:
    """Return the alerts that the pipeline has sent, and those that it has held back, by id."""
    sink = MemorySink()
    engine = Engine(loaded.model, loaded.calibration, loaded.fingerprint, ALPHA, Limits(), effort=effort)
    Pipeline(
        *(
            MemorySource(make_record_messages(loaded), chunk=chunk),
            Codec(loaded.schema),
            EngineSet.of_only_model(engine),
            [sink],
            ManualClock(),
        ),
        Metrics(),
        is_finite=False,
        max_alert_rate=max_alert_rate,
    ).run(threading.Event())
    held_back = {alert.id: alert for effects in sink.effects for alert in effects.held_back_alerts}
    return {alert.id: alert for alert in sink.alerts}, held_back


def list_features(alert: Alert) -> list[str]:
    """Return the features of an alert's readings, the most suspicious first."""
    return [contribution.feature for contribution in alert.contributions]


@pytest.mark.parametrize("chunk", [16, 1000])
def test_only_alerts_that_are_sent_are_explained_in_full(loaded: Artifact, chunk: int) -> None:
    """What an alert that is sent states does not depend on the storm, nor on the polls."""
    full, _ = explain_storm(loaded, "full", None)
    fast, _ = explain_storm(loaded, "fast", None)
    sent, held_back = explain_storm(loaded, "full", 0.3, chunk)
    assert len(sent) == 3
    assert held_back
    assert {**sent, **held_back}.keys() == full.keys()
    for alert in sent.values():
        assert alert.contributions == full[alert.id].contributions
        assert alert.silenced_by == full[alert.id].silenced_by
    for alert in held_back.values():
        assert list_features(alert) == list_features(fast[alert.id])
        assert all(contribution.attribution is None for contribution in alert.contributions)
        assert alert.silenced_by is None
    assert any(item.attribution is not None for alert in sent.values() for item in alert.contributions)


def test_progress_is_reported_while_alerts_are_explained(loaded: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """The explanations of one poll can take longer than a process may be without progress."""
    monkeypatch.setattr(alert_building, "EXPLAINED_AT_ONCE", 2)
    reports: list[int] = []
    engine = make_engine(loaded)
    data = MemorySource(make_record_messages(loaded), chunk=1000).poll(0.0).data
    assert data is not None
    batch, _ = Codec(loaded.schema).decode(data)
    effects = engine.handle(batch, 0, on_progress=lambda: reports.append(1))
    assert len(reports) >= len({alert.record for alert in effects.alerts}) / 2 > 1


def test_the_number_of_alerts_of_one_batch_is_bounded() -> None:
    """Each alert is explained before it is sent, and the group waits for the next poll."""
    limiter = AlertLimiter(5000.0, lambda: 0.0)
    num_permitted = limiter.count_permitted()
    assert num_permitted == alert_rate.MAX_ALERTS_AT_ONCE
    effects = limiter.limit(make_effects(make_alerts(num_permitted + 5)), 0, num_permitted=num_permitted)
    assert [len(effects.alerts), len(effects.held_back_alerts)] == [num_permitted, 5]


class StormMember(GroupMember):
    """A member of a group that also keeps the ids of committed alerts that were held back."""

    def _take_effect(self, positions: Any, saved: Any, pending: Any) -> None:
        super()._take_effect(positions, saved, pending)
        for effects, _ in pending:
            held_back = [(alert.id, alert.record, alert.raised_at) for alert in effects.held_back_alerts]
            self.world.held_back += held_back


def test_restarts_neither_lose_nor_double_an_alert_of_a_storm(
    loaded: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each alert of an uninterrupted run is sent once or held back once, whatever was restarted in between."""
    uninterrupted = make_cluster(loaded, 1, records=25)
    run_member(uninterrupted, loaded, set(range(PARTITIONS)), 0, 0.0, 0.0, 100.0)

    def make_limited_pipeline(*args: Any, **options: Any) -> Pipeline:
        return Pipeline(*args, **options, max_alert_rate=0.2)

    monkeypatch.setattr(group_members, "Pipeline", make_limited_pipeline)
    interrupted = make_cluster(loaded, 1, records=25)
    num_runs = 0
    while not interrupted.done:
        rest = {p for p, kept in interrupted.kept.items() if kept.position < len(interrupted.events[p])}
        run_member(interrupted, loaded, rest, num_runs, 0.04, 0.03, 0.03, StormMember)
        num_runs += 1
        assert num_runs < 500
    assert num_runs > 3
    assert interrupted.held_back
    assert interrupted.alerts
    assert Counter([*interrupted.alerts, *interrupted.held_back]) == Counter(uninterrupted.alerts)
