"""Tests of invariant 5: after any restarts and hand-overs, the committed effects equal those of one uninterrupted
run.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from deformer_stream.codec import Codec
from deformer_stream.codec.payloads import Messages, Payload
from deformer_stream.codec.state import encode_snapshots
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.engine_set import EngineSet
from deformer_stream.engine.events import NO_TIME, ONLY_MODEL, EventBatch, Rejection
from deformer_stream.errors import StateError, StoppedWaiting
from deformer_stream.model_store import Artifact
from deformer_stream.runtime import pipeline as pipeline_module
from deformer_stream.runtime import process
from deformer_stream.runtime import recovery as recovery_module
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.pipeline import Pipeline
from deformer_stream.runtime.ports import RestoredPartition
from deformer_stream.runtime.recovery import Recovery
from deformer_stream.testing import ManualClock
from tests.codec.saved_state import decode_snapshot
from tests.effort import num_examples
from tests.runtime.group_members import (
    ALPHA,
    PARTITIONS,
    AsyncGroupMember,
    GroupMember,
    RewindableGroupMember,
    WaitingGroupMember,
    make_cluster,
    run_member,
)


@settings(max_examples=num_examples(15))
@given(
    seed=st.integers(0, 2**20),
    snapshot_interval=st.sampled_from([0.0, 0.03, 100.0]),
    kind=st.sampled_from([GroupMember, AsyncGroupMember]),
)
def test_many_runs_commit_the_same_as_one_run(
    loaded: Artifact, seed: int, snapshot_interval: float, kind: type[GroupMember]
) -> None:
    # These messages have notices of drift.
    uninterrupted, interrupted = (make_cluster(loaded, (0, 2, 3)[seed % 3], records=25) for _ in range(2))
    run_member(uninterrupted, loaded, set(range(PARTITIONS)), 0, 0.0, 0.0, 100.0)
    assert uninterrupted.done
    num_runs = 0
    while not interrupted.done:
        rest = {p for p, kept in interrupted.kept.items() if kept.position < len(interrupted.events[p])}
        run_member(interrupted, loaded, rest, seed + num_runs, 0.04, 0.03, snapshot_interval, kind)
        num_runs += 1
        assert num_runs < 500
    assert len(uninterrupted.alerts) > 10
    assert uninterrupted.notices
    assert Counter(interrupted.alerts) == Counter(uninterrupted.alerts)
    assert Counter(interrupted.letters) == Counter(uninterrupted.letters)
    assert Counter(interrupted.notices) == Counter(uninterrupted.notices)
    assert len(uninterrupted.evidence) > 10
    assert Counter(interrupted.evidence) == Counter(uninterrupted.evidence)


@pytest.mark.parametrize("snapshot_interval", [0.0, 0.03, 100.0])
@pytest.mark.parametrize("seed", range(num_examples(4)))
def test_runs_that_end_while_they_wait_for_a_service_commit_the_same_as_one_run(
    loaded: Artifact, seed: int, snapshot_interval: float
) -> None:
    """Decoding waits for the schema registry, also of messages of the history and of those that follow it."""
    uninterrupted, interrupted = (make_cluster(loaded, seed % 5, records=25) for _ in range(2))
    run_member(uninterrupted, loaded, set(range(PARTITIONS)), 0, 0.0, 0.0, 100.0)
    num_runs = num_returned = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery_module, "REPLAYED_MESSAGES", 1 + seed % 7)
        patch.setattr(pipeline_module, "RECOVERY_SECONDS", 0.0)
        while not interrupted.done:
            rest = {p for p, kept in interrupted.kept.items() if kept.position < len(interrupted.events[p])}
            member = run_member(
                *(interrupted, loaded, rest, seed + num_runs, 0.005, 0.01, snapshot_interval, RewindableGroupMember),
                waits=0.15,
            )
            assert isinstance(member, RewindableGroupMember)
            num_runs, num_returned = num_runs + 1, num_returned + member.num_returned
            assert num_runs < 1000
    assert num_returned > 0
    assert Counter(interrupted.alerts) == Counter(uninterrupted.alerts)
    assert Counter(interrupted.letters) == Counter(uninterrupted.letters)
    assert Counter(interrupted.notices) == Counter(uninterrupted.notices)
    assert Counter(interrupted.evidence) == Counter(uninterrupted.evidence)


def test_run_that_ends_while_it_waits_for_a_service_commits_what_was_processed(loaded: Artifact) -> None:
    world = make_cluster(loaded, 1)
    member, stop = RewindableGroupMember(world, {0}, 0, 0.0, 0.0), threading.Event()
    decoded: list[int] = []

    class StoppingCodec(Codec):
        def decode(self, data: Payload) -> tuple[EventBatch, list[Rejection]]:
            if len(decoded) == 3:
                stop.set()
                raise StoppedWaiting("the registry does not respond")
            decoded.append(len(data))
            return super().decode(data)

    codec = StoppingCodec(loaded.schema)
    engine = Engine(loaded.model, loaded.calibration, loaded.fingerprint, ALPHA, Limits())
    options: dict[str, Any] = {"is_finite": False, "commit_interval": 100.0}
    with capture_logs() as logs:
        totals = Pipeline(
            member, codec, EngineSet.of_only_model(engine), [member], ManualClock(), Metrics(), **options
        ).run(stop)
    kept = world.kept[0]
    assert kept.position == kept.taken == sum(decoded) > 0
    assert kept.snapshot is not None
    assert totals.events + sum(totals.rejected.values()) == sum(decoded)
    (line,) = (line for line in logs if line["event"] == "decoding_stopped")
    assert line["messages"] == member.num_returned > 0


def test_source_that_takes_no_messages_back_ends_with_the_error(loaded: Artifact) -> None:
    """Otherwise the last commit would include messages that were not processed."""
    world = make_cluster(loaded, 1)
    with pytest.raises(StoppedWaiting):
        run_member(world, loaded, {0}, 0, 0.0, 0.0, 100.0, WaitingGroupMember, waits=1.0)
    assert world.kept[0].position == 0


@settings(max_examples=num_examples(15))
@given(seed=st.integers(0, 2**20), snapshot_interval=st.sampled_from([0.0, 0.03, 100.0]))
def test_restores_in_parts_commit_the_same_as_one_run(loaded: Artifact, seed: int, snapshot_interval: float) -> None:
    """Runs use different models with equal weights, so all records are scored again, a few between two polls."""
    uninterrupted, interrupted = (make_cluster(loaded, seed % 5, records=25) for _ in range(2))
    run_member(uninterrupted, loaded, set(range(PARTITIONS)), 0, 0.0, 0.0, 100.0)
    num_runs = num_waits = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery_module, "RESCORED_READINGS", 3 + seed % 40)
        patch.setattr(recovery_module, "REPLAYED_MESSAGES", 1 + seed % 7)
        patch.setattr(pipeline_module, "RECOVERY_SECONDS", 0.0)
        while not interrupted.done:
            rest = {p for p, kept in interrupted.kept.items() if kept.position < len(interrupted.events[p])}
            kind, change_model = WaitingGroupMember, 0.02
            member = run_member(
                *(interrupted, loaded, rest, seed + num_runs, 0.01, 0.01, snapshot_interval, kind, change_model)
            )
            assert isinstance(member, WaitingGroupMember)
            num_runs, num_waits = num_runs + 1, num_waits + member.num_waits
            assert num_runs < 1000
    assert num_waits > num_runs
    # The id of an alert names the model, and the evidence of drift and its notices belong to a model.
    assert Counter(alert[1:] for alert in interrupted.alerts) == Counter(alert[1:] for alert in uninterrupted.alerts)
    assert Counter(interrupted.letters) == Counter(uninterrupted.letters)
    assert Counter(interrupted.evidence) == Counter(uninterrupted.evidence)


def test_times_of_records_are_saved_only_for_evidence(loaded: Artifact) -> None:
    """Earlier releases can read snapshots without them."""
    for saves_event_times in (False, True):
        world = make_cluster(loaded, 2)
        member = GroupMember(world, {0}, 0, 0.0, 0.0)
        engine = Engine(loaded.model, loaded.calibration, loaded.fingerprint, ALPHA, Limits())
        Pipeline(
            *(member, Codec(loaded.schema), EngineSet.of_only_model(engine), [member], ManualClock(), Metrics()),
            is_finite=False,
            saves_event_times=saves_event_times,
        ).run(threading.Event())
        saved = world.kept[0].snapshot
        assert saved is not None
        assert (decode_snapshot(saved).latest_event_time is not None) == saves_event_times


def test_replay_has_no_effects(loaded: Artifact) -> None:
    """The second run only replays history, so it has no output."""
    world = make_cluster(loaded, 3)
    run_member(world, loaded, {0, 1, 2}, 0, 0.0, 0.0, 100.0)
    before = list(world.alerts), list(world.letters)
    for kept in world.kept.values():  # as if the final snapshot had not been taken
        kept.snapshot, kept.taken, kept.decisions = None, 0, ()
    run_member(world, loaded, {0, 1, 2}, 1, 0.0, 0.0, 100.0)
    assert (world.alerts, world.letters) == before


def test_damaged_snapshot_raises_state_error(loaded: Artifact) -> None:
    world = make_cluster(loaded, 4)
    run_member(world, loaded, {0, 1, 2}, 0, 0.0, 0.0, 100.0)
    kept = world.kept[1]
    assert kept.snapshot is not None
    kept.snapshot = kept.snapshot[:-1]
    with pytest.raises(StateError):
        run_member(world, loaded, {0, 1, 2}, 1, 0.0, 0.0, 100.0)


def test_snapshot_metrics_follow_the_partition(loaded: Artifact) -> None:
    world = make_cluster(loaded, 2)
    metrics = Metrics()
    member = GroupMember(world, {0, 1}, 0, 0.0, 0.0)
    engine = Engine(loaded.model, loaded.calibration, loaded.fingerprint, ALPHA, Limits())
    pipeline = Pipeline(
        member, Codec(loaded.schema), EngineSet.of_only_model(engine), [member], ManualClock(), metrics, is_finite=False
    )
    pipeline.run(threading.Event())
    size: Any = metrics.registry.get_sample_value
    assert size("deformer_snapshot_bytes", {"partition": "0"}) > 100
    assert 0 <= size("deformer_snapshot_age_seconds", {"partition": "1"}) < 60
    pipeline.recovery.drop_partitions([0])
    assert size("deformer_snapshot_bytes", {"partition": "0"}) is None
    assert size("deformer_snapshot_bytes", {"partition": "1"}) > 100


def test_wrongly_keyed_input_is_logged_once(loaded: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    """All partitions of the cluster use the same record ids."""
    metrics = Metrics()
    member = GroupMember(make_cluster(loaded, 1), {0, 1, 2}, 0, 0.0, 0.0)
    engine = Engine(loaded.model, loaded.calibration, loaded.fingerprint, ALPHA, Limits())
    Pipeline(
        member, Codec(loaded.schema), EngineSet.of_only_model(engine), [member], ManualClock(), metrics, is_finite=False
    ).run(threading.Event())
    assert metrics.registry.get_sample_value("deformer_records_misrouted_total") == engine.records.num_misrouted > 1
    assert capsys.readouterr().out.count("key messages by record id") == 1


def test_refused_messages_are_followed_by_a_snapshot(loaded: Artifact) -> None:
    """Otherwise a restart would process all of them again, and a journal of them would grow without limit."""
    engine = Engine(loaded.model, loaded.calibration, loaded.fingerprint, ALPHA, Limits())
    codec = Codec(loaded.schema)
    seconds = [0.0]
    recovery = Recovery(EngineSet.of_only_model(engine), Metrics(), interval=1.0, now=lambda: seconds[0])
    recovery.start_restore(RestoredPartition(0, 0))
    recovery.mark_caught_up(0)
    recovery.advance(codec, 0)
    recovery.mark_committed(recovery.collect_state(0))
    assert recovery.collect_state(0) == {}
    refused = Messages("t", [None], [b"refused"], np.full(1, NO_TIME), np.zeros(1, np.int32), np.arange(1))
    seconds[0] = 2.0
    assert recovery.enqueue(refused) is refused
    batch, rejections = codec.decode(refused)
    assert len(rejections) == 1
    recovery.record_effects(engine.handle(batch, 0))
    assert recovery.collect_state(0)[0].snapshot is not None


def test_history_is_followed_by_a_snapshot_of_an_idle_partition(loaded: Artifact) -> None:
    """Otherwise a restart after retention has deleted the history would be refused."""
    codec, lines = Codec(loaded.schema), make_cluster(loaded, 1).events[0][:3]
    n = len(lines)
    data = Messages("t", [None] * n, lines, np.full(n, NO_TIME), np.zeros(n, np.int32), np.arange(n))
    for num_committed, snapshot_follows in ((n, True), (0, False)):
        seconds = [0.0]
        engine = Engine(loaded.model, loaded.calibration, loaded.fingerprint, ALPHA, Limits())
        recovery = Recovery(
            EngineSet.of_only_model(engine), Metrics(), interval=1.0, now=lambda seconds=seconds: seconds[0]
        )
        snapshot = encode_snapshots({ONLY_MODEL: engine.snapshot(0, 0)})
        recovery.start_restore(RestoredPartition(0, num_committed, snapshot))
        if num_committed:
            recovery.enqueue(data)
        recovery.mark_caught_up(0)
        assert recovery.advance(codec, 0) == []
        seconds[0] = 2.0
        assert (0 in recovery.collect_state(0)) == snapshot_follows


def test_rebuilt_records_do_not_alert_again(loaded: Artifact) -> None:
    """With `--lost-state rebuild` there is only the history, and no saved decision says which records have alerted."""
    codec, lines = Codec(loaded.schema), make_cluster(loaded, 1).events[0]
    n, half = len(lines), len(lines) // 2
    data = Messages("t", [None] * n, lines, np.full(n, NO_TIME), np.zeros(n, np.int32), np.arange(n))

    def make_engine() -> Engine:
        return Engine(loaded.model, loaded.calibration, loaded.fingerprint, ALPHA, Limits(), effort="fast")

    def list_alerts(engine: Engine, first: int, last: int) -> list[str]:
        parts = [codec.decode(data.take(np.array([i])))[0] for i in range(first, last)]
        return [alert.id for part in parts for alert in engine.handle(part, 0).alerts]

    uninterrupted = make_engine()
    before, after = list_alerts(uninterrupted, 0, half), list_alerts(uninterrupted, half, n)
    rebuilt = make_engine()
    recovery = Recovery(EngineSet.of_only_model(rebuilt), Metrics())
    recovery.start_restore(RestoredPartition(0, half))
    recovery.enqueue(data.take(np.arange(half)))
    recovery.mark_caught_up(0)
    recovery.advance(codec, 0)
    assert len(before) > 0
    assert list_alerts(rebuilt, half, n) == after


def test_partition_that_is_scored_again_gets_a_new_snapshot(loaded: Artifact) -> None:
    """Otherwise each restart would score the records of an idle partition again."""
    codec, lines = Codec(loaded.schema), make_cluster(loaded, 1).events[0][:3]
    engine = Engine(loaded.model, loaded.calibration, "old", ALPHA, Limits())
    n = len(lines)
    data = Messages("t", [None] * n, lines, np.full(n, NO_TIME), np.zeros(n, np.int32), np.arange(n))
    engine.handle(codec.decode(data)[0], 0)
    snapshot = encode_snapshots({ONLY_MODEL: engine.snapshot(0, 0)})
    for fingerprint in ("old", "new"):
        seconds = [0.0]
        engine = Engine(loaded.model, loaded.calibration, fingerprint, ALPHA, Limits())
        recovery = Recovery(
            EngineSet.of_only_model(engine), Metrics(), interval=1.0, now=lambda seconds=seconds: seconds[0]
        )
        recovery.start_restore(RestoredPartition(0, n, snapshot))
        recovery.mark_caught_up(0)
        recovery.advance(codec, 0)
        assert recovery.collect_state(0) == {}
        seconds[0] = 2.0
        saved = recovery.collect_state(0)
        assert bool(saved) == (fingerprint == "new")
        if saved:
            assert saved[0].snapshot is not None
            assert decode_snapshot(saved[0].snapshot).models == ("new",)


def test_decisions_are_saved_only_after_a_committed_snapshot(loaded: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first snapshot is not committed, as if partitions moved at that moment. Free memory is released after each
    snapshot.
    """
    releases = list[None]()
    monkeypatch.setattr(process, "release_free_memory", lambda: releases.append(None))
    lines = make_cluster(loaded, 1).events[0]
    engine = Engine(loaded.model, loaded.calibration, loaded.fingerprint, ALPHA, Limits())
    recovery = Recovery(EngineSet.of_only_model(engine), Metrics(), interval=100.0)
    recovery.start_restore(RestoredPartition(0, 0))
    recovery.mark_caught_up(0)
    recovery.advance(Codec(loaded.schema), 0)

    def handle(some: list[bytes]) -> None:
        n = len(some)
        data = Messages("t", [None] * n, list(some), np.full(n, NO_TIME), np.zeros(n, np.int32), np.arange(n))
        recovery.record_effects(engine.handle(Codec(loaded.schema).decode(data)[0], 0))

    handle(lines[: len(lines) // 2])
    assert recovery.collect_state(0)[0].snapshot is not None
    saved = recovery.collect_state(0)
    assert saved[0].snapshot is not None, "decisions would follow nothing"
    recovery.mark_committed(saved)
    handle(lines[len(lines) // 2 :])
    assert recovery.collect_state(0)[0].decisions is not None
    assert len(releases) == 2


def test_partitions_that_wait_again_keep_their_messages(loaded: Artifact) -> None:
    """A new model is loaded between two steps, and one partition is scored again before the other one."""
    waiting: list[int] = []
    engine = Engine(loaded.model, loaded.calibration, loaded.fingerprint, ALPHA, Limits())

    class RescoredEngines(EngineSet):
        @property
        def partitions_to_rescore(self) -> frozenset[int]:
            return frozenset(waiting)

        def rescore(self, max_readings: int) -> None:
            waiting.pop(0)

    seconds = itertools.count()
    recovery = Recovery(RescoredEngines({ONLY_MODEL: engine}), Metrics(), now=lambda: float(next(seconds)))
    codec, lines = Codec(loaded.schema), make_cluster(loaded, 1).events[0]
    for partition in (0, 1):
        recovery.start_restore(RestoredPartition(partition, 5))
    recovery.advance(codec, 0)
    for partition, offsets in ((1, (4, 5)), (0, (3, 4))):
        times, partitions = np.full(2, NO_TIME), np.full(2, partition, np.int32)
        recovery.enqueue(Messages("t", [None, None], lines[:2], times, partitions, np.array(offsets)))
        recovery.mark_caught_up(partition)
    returned: list[int] = []
    changes = {1: [0, 1]}
    for step in range(12):
        waiting.extend(changes.get(step, ()))
        for messages in recovery.advance(codec, 0, seconds=0):
            assert recovery.restoring_partitions.isdisjoint(messages.partitions.tolist())
            returned += messages.offsets.tolist()
    assert returned == [5]
    assert recovery.restored_partitions == {0, 1}
