"""Tests of /healthz and /readyz over real HTTP during outages, restores and changes of the model.

The clocks of these tests advance only when the source says so, so that no test depends on the speed of the machine.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from deformer_stream.codec import Codec
from deformer_stream.codec.payloads import Messages
from deformer_stream.codec.state import encode_snapshot
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.engine_set import EngineSet
from deformer_stream.engine.events import NO_TIME, ONLY_MODEL
from deformer_stream.model_store import Artifact
from deformer_stream.runtime import http_server
from deformer_stream.runtime import pipeline as pipeline_module
from deformer_stream.runtime import recovery as recovery_module
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.pipeline import RECOVERY_SECONDS, Pipeline
from deformer_stream.runtime.ports import PollResult, RestoredPartition
from deformer_stream.runtime.process_metrics import STALL_SECONDS
from deformer_stream.testing import ManualClock, MemorySink
from tests.conftest import find_free_port
from tests.models import draw_rows
from tests.runtime.http_requests import request
from tests.runtime.pipelines import ScriptedSource, make_engine, make_model_reload

POLL_INTERVAL = 45.0
"""Seconds without a poll after which a group takes partitions away, with the default settings."""


class Clock:
    """A clock in monotonic seconds that advances only when it is told to."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Probes:
    """Requests to the HTTP server of a process.

    Args:
        measures: The metrics of the process.
    """

    def __init__(self, measures: Metrics) -> None:
        self.port = find_free_port()
        self.stop = http_server.start_http_server(f":{self.port}", measures)

    def ask(self) -> tuple[int, int]:
        """Return the statuses of /healthz and /readyz."""
        return request(self.port, "/healthz")[0], request(self.port, "/readyz")[0]


@pytest.fixture
def probes_of() -> Iterator[Callable[[Metrics], Probes]]:
    """Start an HTTP server for some metrics; it is stopped after the test."""
    started: list[Probes] = []

    def start(measures: Metrics) -> Probes:
        started.append(Probes(measures))
        return started[-1]

    yield start
    for probes in started:
        probes.stop()


def make_messages(lines: list[bytes], partition: int = 0, first_offset: int = 0) -> Messages:
    """Return messages of one partition."""
    n = len(lines)
    return Messages(
        *("t", [None] * n, lines, np.full(n, NO_TIME)),
        np.full(n, partition, np.int32),
        np.arange(first_offset, first_offset + n),
    )


def make_lines(loaded: Artifact, num_records: int, seed: int, num_readings: int = 3) -> list[bytes]:
    """Return messages with the first readings of records, which stay open."""
    rows = draw_rows(loaded.schema, num_records, seed)
    return [
        json.dumps({"record": f"r{i}", "values": dict(list(row.items())[:num_readings])}).encode()
        for i, row in enumerate(rows)
    ]


def make_snapshot(loaded: Artifact, lines: list[bytes], partition: int) -> bytes:
    """Return a snapshot of a partition after some messages."""
    engine = make_engine(loaded)
    engine.handle(Codec(loaded.schema).decode(make_messages(lines, partition))[0], 0)
    return encode_snapshot(engine.snapshot(partition, 0))


def make_pipeline(
    loaded: Artifact,
    source: ScriptedSource,
    measures: Metrics,
    take_new_model: Callable[[], tuple[str, Artifact] | None] | None = None,
) -> tuple[Pipeline, MemorySink]:
    """Return a pipeline from a source to a sink, and the sink."""
    sink = MemorySink()
    engine = Engine(loaded.model, loaded.calibration, loaded.fingerprint, 0.3, Limits(), effort="off")
    pipeline = Pipeline(
        *(source, Codec(loaded.schema), EngineSet.of_only_model(engine), [sink], ManualClock(), measures),
        is_finite=False,
        open_records="rescore",
        model_reload=None if take_new_model is None else make_model_reload(take_new_model),
    )
    return pipeline, sink


def get_engine(pipeline: Pipeline) -> Engine:
    """Return the engine of a pipeline with one model."""
    return pipeline.engines.engine_by_name[ONLY_MODEL]


def restore_at_once(source: ScriptedSource, partitions: set[int]) -> Callable[[], PollResult]:
    """Return a poll that assigns new partitions without any state."""

    def poll() -> PollResult:
        source.assigned_partitions |= partitions
        restored = tuple(RestoredPartition(partition, 0) for partition in sorted(partitions))
        return PollResult(None, (), restored, tuple(sorted(partitions)))

    return poll


def test_a_process_lives_through_an_outage_that_its_source_waits_for(
    loaded: Artifact, probes_of: Callable[[Metrics], Probes]
) -> None:
    """The brokers are away for 90 s. The process stays healthy and ready. It is unhealthy only if it hangs."""
    clock, seen = Clock(), dict[float, tuple[int, int]]()
    measures = Metrics(now=clock)
    probes = probes_of(measures)

    def outage() -> PollResult:
        for _ in range(45):
            clock.seconds += 2.0
            source.callbacks.on_wait()
            seen[clock.seconds] = probes.ask()
        return PollResult(None)

    def hang() -> PollResult:
        start = clock.seconds
        for seconds in (STALL_SECONDS - 1, STALL_SECONDS):
            clock.seconds = start + seconds
            seen[seconds - 1000] = probes.ask()
        return PollResult(None)

    source = ScriptedSource([])
    source.turns = [restore_at_once(source, {0}), outage, hang]
    pipeline, _ = make_pipeline(loaded, source, measures)
    assert probes.ask() == (200, 503)
    pipeline.run(threading.Event())
    assert set(list(seen.values())[:45]) == {(200, 200)}
    assert clock.seconds >= 90
    assert [seen[STALL_SECONDS - 1001], seen[STALL_SECONDS - 1000]] == [(200, 200), (503, 503)]
    assert probes.ask() == (200, 200)


def test_a_source_that_does_not_report_its_waits_counts_as_stalled(
    loaded: Artifact, probes_of: Callable[[Metrics], Probes]
) -> None:
    clock, seen = Clock(), list[tuple[int, int]]()
    measures = Metrics(now=clock)
    probes = probes_of(measures)

    def wait() -> PollResult:
        clock.seconds += STALL_SECONDS
        seen.append(probes.ask())
        return PollResult(None)

    source = ScriptedSource([])
    source.turns = [restore_at_once(source, {0}), wait]
    make_pipeline(loaded, source, measures)[0].run(threading.Event())
    assert seen == [(503, 503)]


def test_a_spare_member_is_ready_once_it_has_joined(loaded: Artifact, probes_of: Callable[[Metrics], Probes]) -> None:
    """It loses its readiness while partitions that it takes over are restored."""
    measures = Metrics()
    probes, seen = probes_of(measures), list[tuple[int, int]]()
    lines = make_lines(loaded, 4, seed=1)

    def ask_and(
        has_joined: bool, result: PollResult, assigned: frozenset[int] = frozenset()
    ) -> Callable[[], PollResult]:
        def poll() -> PollResult:
            seen.append(probes.ask())
            source.has_joined, source.assigned_partitions = has_joined, assigned
            return result

        return poll

    source = ScriptedSource([])
    zero = frozenset({0})
    source.turns = [
        ask_and(False, PollResult(None)),
        ask_and(True, PollResult(None)),
        ask_and(True, PollResult(None), zero),  # assigned, and its state is not read yet
        ask_and(True, PollResult(None, (), (RestoredPartition(0, 4),)), zero),
        ask_and(True, PollResult(make_messages(lines), (), (), (0,)), zero),
        ask_and(True, PollResult(None), zero),
        ask_and(True, PollResult(None, (0,))),  # another member takes it over
        ask_and(True, PollResult(None)),
    ]
    make_pipeline(loaded, source, measures)[0].run(threading.Event())
    assert [ready for _, ready in seen] == [503, 503, 200, 503, 503, 200, 200, 200]
    assert {healthy for healthy, _ in seen} == {200}


@pytest.mark.parametrize("is_other_model", [False, True])
def test_64_partitions_are_restored_within_the_poll_interval(
    loaded: Artifact, monkeypatch: pytest.MonkeyPatch, probes_of: Callable[[Metrics], Probes], is_other_model: bool
) -> None:
    """The source is slow, and loading each snapshot takes 2 s, as does each part of the work after it."""
    clock, seen, poll_times = Clock(), list[tuple[int, int]](), list[float]()
    measures = Metrics(now=clock)
    probes = probes_of(measures)
    num_partitions, lines, new_lines = 64, make_lines(loaded, 5, 1), make_lines(loaded, 5, 1, num_readings=4)
    snapshot = make_snapshot(loaded, lines, 0)
    model = replace(loaded, fingerprint="other") if is_other_model else loaded

    def poll_slowly() -> PollResult:
        poll_times.append(clock.seconds)
        seen.append(probes.ask())
        clock.seconds += 1.0
        if len(poll_times) == 1:  # all partitions are assigned together
            source.assigned_partitions = frozenset(range(num_partitions))
            restored = tuple(RestoredPartition(partition, 8, snapshot) for partition in range(num_partitions))
            return PollResult(None, (), restored)
        # The three messages up to the committed offset, and two new ones.
        readable = sorted(unread - source.waiting_partitions)
        unread.difference_update(readable)
        if not unread:
            source.turns = source.turns or ([poll_slowly] if source.waiting_partitions or readable else [])
        else:
            source.turns = [poll_slowly]
        parts = [make_messages(new_lines, partition, 5) for partition in readable]
        return PollResult(Messages.concatenate(parts) if parts else None, (), (), tuple(readable))

    unread = set(range(num_partitions))
    source = ScriptedSource([poll_slowly, poll_slowly])
    pipeline, sink = make_pipeline(model, source, measures)
    pipeline.recovery._now = clock
    decode, decode_messages, rescore = (
        recovery_module.decode_snapshots,
        pipeline.codec.decode,
        get_engine(pipeline).rescore,
    )

    def take_time(function: Callable[..., object]) -> Callable[..., object]:
        def slow(*arguments: object) -> object:
            clock.seconds += 2.0
            return function(*arguments)

        return slow

    monkeypatch.setattr(recovery_module, "decode_snapshots", take_time(decode))
    monkeypatch.setattr(get_engine(pipeline), "rescore", take_time(rescore))
    monkeypatch.setattr(pipeline.codec, "decode", take_time(decode_messages))
    pipeline.run(threading.Event())
    gaps = np.diff(poll_times)
    assert clock.seconds > 2 * num_partitions > POLL_INTERVAL
    assert gaps.max() <= 1.0 + RECOVERY_SECONDS + 2 * 2.0 < POLL_INTERVAL, "a part of the restore, and new messages"
    assert pipeline.recovery.restored_partitions == source.assigned_partitions
    assert {healthy for healthy, _ in seen} == {200}
    readiness = [ready for _, ready in seen]
    assert readiness == sorted(readiness, reverse=True), "ready at the end"
    assert readiness.count(503) > num_partitions
    assert probes.ask() == (200, 200)
    assert len(sink.scored) == 2 * num_partitions * (4 - 3), (
        "the first three readings are known, and three messages old"
    )


def test_partitions_are_processed_while_another_one_is_scored_again(
    loaded: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition with the records of another model waits for its turn, without stopping the others."""
    monkeypatch.setattr(pipeline_module, "RECOVERY_SECONDS", 0.0)
    monkeypatch.setattr(recovery_module, "RESCORED_READINGS", 3)
    num_records = 12
    lines = make_lines(loaded, num_records, 1)
    snapshot = make_snapshot(replace(loaded, fingerprint="earlier"), lines, 1)
    source = ScriptedSource([])
    waiting: list[frozenset[int]] = []

    def poll() -> PollResult:
        waiting.append(source.waiting_partitions)
        if source.waiting_partitions or len(waiting) < 3:
            source.turns = [poll]
        line = json.dumps({"record": f"live{len(waiting)}", "feature": "pressure", "value": 1.0}).encode()
        return PollResult(make_messages([line], 0, len(waiting)))

    def assign() -> PollResult:
        source.assigned_partitions = frozenset({0, 1})
        restored = RestoredPartition(0, 0), RestoredPartition(1, num_records, snapshot)
        return PollResult(None, (), restored, (0, 1))

    source.turns = [assign, poll]
    pipeline, sink = make_pipeline(loaded, source, Metrics())
    pipeline.run(threading.Event())
    assert waiting.count(frozenset({1})) >= num_records, "three readings are scored again between two polls"
    assert waiting[-1] == frozenset()
    num_live = sum(record.startswith("live") for record, *_ in sink.scored)
    assert num_live >= num_records
    assert pipeline.recovery.restored_partitions == {0, 1}
    for states in source.committed[:-1]:
        assert 1 not in states or states[1].snapshot is not None
    states = get_engine(pipeline).snapshot(1, 0)
    expected = make_engine(loaded)
    expected.handle(Codec(loaded.schema).decode(make_messages(lines, 1))[0], 0)
    np.testing.assert_allclose(states.running["p_value"], expected.snapshot(1, 0).running["p_value"], rtol=1e-4)


def test_a_change_of_the_model_is_spread_over_polls_and_commits_nothing_of_what_waits(
    loaded: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was processed before is committed before. A partition that is revoked while it waits is not committed."""
    monkeypatch.setattr(pipeline_module, "RECOVERY_SECONDS", 0.0)
    monkeypatch.setattr(recovery_module, "RESCORED_READINGS", 3)
    lines = make_lines(loaded, 8, 1)
    models = [replace(loaded, fingerprint="other")]
    source = ScriptedSource([])
    turns: list[tuple[frozenset[int], int]] = []  # after the change: waiting partitions, and the number of commits

    def assign() -> PollResult:
        source.assigned_partitions = frozenset({0, 1})
        parts = [make_messages(lines, partition) for partition in (0, 1)]
        restored = RestoredPartition(0, 0), RestoredPartition(1, 0)
        return PollResult(Messages.concatenate(parts), (), restored, (0, 1))

    def poll() -> PollResult:
        revoked: tuple[int, ...] = ()
        if get_engine(pipeline).fingerprint == "other":
            turns.append((source.waiting_partitions, len(source.committed)))
        if source.waiting_partitions or len(turns) < 3:
            source.turns = [poll]
        if len(turns) == 2:
            assert 1 in source.waiting_partitions
            assert source.callbacks.collect_state(frozenset({1})).keys() == set()
            source.assigned_partitions, revoked = frozenset({0}), (1,)
        return PollResult(None, revoked)

    source.turns = [assign, poll]
    pipeline, _ = make_pipeline(
        *(loaded, source, Metrics(), lambda: (ONLY_MODEL, models.pop()) if models and pipeline.totals.events else None)
    )
    pipeline.run(threading.Event())
    assert turns[0][0] == {0, 1}
    assert turns[0][1] >= 1, "everything was committed before the records are scored again"
    assert sum(bool(waiting) for waiting, _ in turns) >= 8
    assert get_engine(pipeline).records.partitions.keys() == {0}
    after = [states for states in source.committed[turns[0][1] :] if states]
    assert {partition for states in after for partition in states} == {0}
    assert any(states[0].snapshot is not None for states in after)


def test_stop_does_not_wait_for_scoring_again(loaded: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """The partition keeps what was committed before."""
    monkeypatch.setattr(pipeline_module, "RECOVERY_SECONDS", 0.0)
    monkeypatch.setattr(recovery_module, "RESCORED_READINGS", 3)
    stop, source = threading.Event(), ScriptedSource([])
    snapshot = make_snapshot(replace(loaded, fingerprint="earlier"), make_lines(loaded, 8, 1), 0)

    def assign() -> PollResult:
        source.assigned_partitions = frozenset({0})
        return PollResult(None, (), (RestoredPartition(0, 8, snapshot),), (0,))

    def end() -> PollResult:
        stop.set()
        return PollResult(None)

    source.turns = [assign, end, end, end]
    pipeline, _ = make_pipeline(loaded, source, Metrics())
    pipeline.run(stop)
    assert len(source.turns) == 2
    assert source.waiting_partitions == {0}
    assert [dict(states) for states in source.committed] == [{}] * len(source.committed)
