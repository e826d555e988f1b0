"""Tests of invariant 5: after any restarts and hand-overs, the committed effects equal those of one uninterrupted
run.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deformer_stream.codec import Codec
from deformer_stream.codec.payloads import Messages, Payload
from deformer_stream.codec.state import decode_snapshot
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import NO_TIME, Effects
from deformer_stream.errors import StateError
from deformer_stream.incidents.make_evidence import make_evidence
from deformer_stream.model_store import Artifact
from deformer_stream.runtime import pipeline as pipeline_module
from deformer_stream.runtime import process
from deformer_stream.runtime import recovery as recovery_module
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.pipeline import Pipeline
from deformer_stream.runtime.ports import NO_STATE, CollectState, PartitionState, PollResult, RestoredPartition
from deformer_stream.runtime.recovery import Recovery
from deformer_stream.testing import ManualClock
from tests.effort import num_examples
from tests.models import draw_rows

ALPHA = (0.3, 0.1, 0.02)
PARTITIONS = 3
DRIFT = 1.1
"""A level that the evidence of nearly every partition reaches at some time by chance."""


PendingCommit = tuple[dict[int, int], Mapping[int, PartitionState], list[tuple[Effects, Payload | None]]]
"""A commit: offsets by partition, saved state by partition, and effects."""


class CrashError(Exception):
    """The simulated crash of a process."""


@dataclass
class SavedPartition:
    """What was committed for a partition.

    Attributes:
        position: Offset after the last committed message.
        taken: Offset at which the snapshot was taken.
        snapshot: The last snapshot.
        decisions: The decisions that were saved after it.
    """

    position: int = 0
    taken: int = 0
    snapshot: bytes | None = None
    decisions: tuple[bytes, ...] = ()


@dataclass
class Cluster:
    """What survives a crash: the events, the saved state of each partition, and the committed output."""

    events: list[list[bytes]]
    kept: dict[int, SavedPartition]
    alerts: list[tuple[str, str, int]] = field(default_factory=list)
    letters: list[tuple[int, int, str]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    held_back: list[tuple[str, str, int]] = field(default_factory=list)
    evidence: list[tuple[int, str, int, float, bool]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether all events are committed."""
        return all(kept.position == len(self.events[p]) for p, kept in self.kept.items())


class GroupMember:
    """One run of a consumer: a source and a sink that commit together.

    At random it crashes, or gives partitions up.
    """

    def __init__(self, world: Cluster, assigned: set[int], seed: int, crash: float, move: float) -> None:
        self.world, self.rng, self.crash, self.move = world, np.random.default_rng(seed), crash, move
        self.collect_state: CollectState = lambda partitions: NO_STATE
        self.model_fingerprint = ""
        self._new = sorted(assigned)
        self._assigned = set(assigned)
        self._recovering: dict[int, int] = {}
        self._next: dict[int, int] = {}
        self._pending: list[tuple[Effects, Payload | None]] = []

    def _happens(self, share: float) -> bool:
        """Return True with a given probability, reduced during replay so that runs can finish it."""
        return bool(self.rng.random() < (share / 10 if self._recovering else share))

    @property
    def is_exhausted(self) -> bool:
        return not self._new and all(self._next[p] == len(self.world.events[p]) for p in self._assigned)

    @property
    def assigned_partitions(self) -> frozenset[int]:
        return frozenset(self._assigned)

    def get_lag(self) -> dict[tuple[str, int], int]:
        return {}

    def poll(self, timeout: float) -> PollResult:
        if self._happens(self.crash):
            raise CrashError
        revoked: tuple[int, ...] = ()
        if self._next and self._happens(self.move):
            gone = int(self.rng.choice(sorted(self._assigned)))
            self._commit(self.collect_state(frozenset({gone})))
            self._assigned.discard(gone)
            for known in (self._next, self._recovering):
                known.pop(gone, None)
            revoked = (gone,)
        restored = []
        for p in self._new:
            kept = self.world.kept[p]
            restored.append(RestoredPartition(p, kept.position, kept.snapshot, kept.decisions))
            self._next[p], self._recovering[p] = kept.taken, kept.position
        self._new = []
        data = self._take_messages()
        recovered = tuple(p for p, until in self._recovering.items() if self._next[p] >= until)
        for p in recovered:
            del self._recovering[p]
        return PollResult(data, revoked, tuple(restored), recovered)

    def _list_readable(self) -> list[int]:
        """Return the partitions that a poll may return messages of."""
        return sorted(self._assigned)

    def _take_messages(self) -> Messages | None:
        """Return the next messages of the assigned partitions."""
        rows: list[tuple[int, int, bytes]] = []
        for p in self._list_readable():
            take = int(self.rng.integers(0, 9))
            for offset in range(self._next[p], min(self._next[p] + take, len(self.world.events[p]))):
                rows.append((p, offset, self.world.events[p][offset]))
                self._next[p] = offset + 1
        if not rows:
            return None
        partitions, offsets = np.array([r[0] for r in rows], np.int32), np.array([r[1] for r in rows], np.int64)
        # Later messages can be older, so that the latest time of a record is not that of its last reading.
        times = 1_583_750_073_000_000 + 1000 * (offsets ^ 7)
        return Messages("t", [None] * len(rows), [r[2] for r in rows], times, partitions, offsets)

    def commit(self, saved: Mapping[int, PartitionState] = NO_STATE) -> None:
        if self._happens(self.crash):
            raise CrashError
        self._commit(saved)
        if self._happens(self.crash):
            raise CrashError

    def _commit(self, saved: Mapping[int, PartitionState]) -> None:
        self._take_effect(*self._make_commit(saved))

    def _make_commit(self, saved: Mapping[int, PartitionState]) -> PendingCommit:
        run_member = self._assigned - self._recovering.keys() - set(self._new)
        pending, self._pending = self._pending, []
        return {p: self._next[p] for p in run_member}, saved, pending

    def _take_effect(
        self,
        positions: Mapping[int, int],
        saved: Mapping[int, PartitionState],
        pending: Sequence[tuple[Effects, Payload | None]],
    ) -> None:
        """Apply a commit to the cluster."""
        for p, position in positions.items():
            kept = self.world.kept[p]
            kept.position = position
            new = saved.get(p, PartitionState())
            if new.snapshot is not None:
                kept.snapshot, kept.taken, kept.decisions = new.snapshot, kept.position, ()
            elif new.decisions is not None:
                kept.decisions += (new.decisions,)
        for effects, data in pending:
            for alert in effects.alerts:
                self.world.alerts.append((alert.id, alert.record, alert.raised_at))
            self.world.notices += [notice.id for notice in effects.drift_notices]
            for batch in make_evidence(effects)[0]:
                closed = batch.closed
                columns = (closed.times, closed.p_values, closed.is_alerted)
                rows = zip(closed.record_ids, *(column.tolist() for column in columns), strict=True)
                self.world.evidence += [(batch.partition, *row) for row in rows]
            for refusal in effects.rejections:
                assert isinstance(data, Messages)
                place = int(data.partitions[refusal.message_index]), int(data.offsets[refusal.message_index])
                self.world.letters.append((*place, refusal.reason.value))

    def write(self, effects: Effects, data: Payload | None) -> None:
        self._pending.append((effects, data))

    def flush(self) -> None: ...

    def close(self) -> None: ...


class AsyncGroupMember(GroupMember):
    """A member whose commits take effect later, at the latest with the next commit, or never if it crashes before."""

    _begun: PendingCommit | None = None

    def begin_commit(self, saved: Mapping[int, PartitionState], ended: Callable[[], None]) -> None:
        self._end()
        self._begun = self._make_commit(saved)
        ended()

    def poll(self, timeout: float) -> PollResult:
        if self._happens(0.5):
            self._end()
        return super().poll(timeout)

    def _commit(self, saved: Mapping[int, PartitionState]) -> None:
        self._end()
        super()._commit(saved)

    def _end(self) -> None:
        if self._begun is not None:
            if self._happens(self.crash):
                raise CrashError
            self._take_effect(*self._begun)
            self._begun = None


class WaitingGroupMember(AsyncGroupMember):
    """A member that leaves out partitions for as long as the pipeline wishes. It commits nothing for them.

    Attributes:
        num_waits: Number of polls during which partitions were waiting.
    """

    waiting_partitions: frozenset[int] = frozenset()
    has_joined = True
    num_waits = 0

    def _list_readable(self) -> list[int]:
        self.num_waits += bool(self.waiting_partitions)
        return sorted(self._assigned - self.waiting_partitions)

    def _make_commit(self, saved: Mapping[int, PartitionState]) -> PendingCommit:
        positions, saved, pending = super()._make_commit(saved)
        assert not saved.keys() & self.waiting_partitions
        for effects, _ in pending:
            assert not {alert.partition for alert in effects.alerts} & self.waiting_partitions
            assert not set(effects.decisions()) & self.waiting_partitions
        return {p: position for p, position in positions.items() if p not in self.waiting_partitions}, saved, pending


def make_cluster(loaded: Artifact, seed: int, records: int = 40) -> Cluster:
    """Return a cluster with interleaved readings.

    Some messages are repeated, some are not JSON, some readings are null, and partitions share record ids.
    """
    rng = np.random.default_rng(seed)
    events: list[list[bytes]] = []
    for p in range(PARTITIONS):
        rows = draw_rows(loaded.schema, records, seed * 10 + p)
        readings = [(f"r{i}", name, value) for i, row in enumerate(rows) for name, value in row.items()]
        readings += [(record, name, None) for record, name, _ in readings if rng.random() < 0.02]
        place = np.arange(len(readings)) + rng.uniform(0, 30, len(readings))
        lines = [
            json.dumps(dict(zip(("record", "feature", "value"), readings[i], strict=True))) for i in place.argsort()
        ]
        lines = [line for line in lines for _ in range(1 + (rng.random() < 0.03))]
        events.append([b"nonsense" if rng.random() < 0.02 else line.encode() for line in lines])
    return Cluster(events, {p: SavedPartition() for p in range(PARTITIONS)})


def run_member(
    world: Cluster,
    loaded: Artifact,
    assigned: set[int],
    seed: int,
    crash: float,
    move: float,
    snapshot_interval: float,
    kind: type[GroupMember] = GroupMember,
    change_model: float = 0.0,
) -> GroupMember:
    """Run one member until the end of the input or its crash.

    Args:
        world: The cluster.
        loaded: The model.
        assigned: The partitions of the member.
        seed: Seed of its random decisions.
        crash: Probability of a crash at each step.
        move: Probability that a poll revokes a partition.
        snapshot_interval: Seconds between snapshots.
        kind: The class of the member.
        change_model: Probability that a poll comes with a new model: one with the same weights, and so with the same
            scores, but with another fingerprint, so that open records are scored again.

    Returns:
        The member.
    """
    member, rng = kind(world, assigned, seed, crash, move), np.random.default_rng(seed)

    def take_new_model() -> Artifact | None:
        if rng.random() >= change_model:
            return None
        return replace(loaded, fingerprint=f"model-{rng.integers(2**40)}")

    model = take_new_model() or loaded
    engine = Engine(model.model, model.calibration, model.fingerprint, ALPHA, Limits(), drift=DRIFT, effort="off")
    pipeline = Pipeline(
        member,
        Codec(loaded.schema),
        engine,
        [member],
        ManualClock(),
        Metrics(),
        is_finite=False,
        commit_interval=float(np.random.default_rng(seed).choice([0.0, 0.02])),
        snapshot_interval=snapshot_interval,
        open_records="rescore",
        take_new_model=take_new_model,
        make_codec=lambda artifact: Codec(artifact.schema),
        saves_event_times=True,
    )
    with suppress(CrashError):
        pipeline.run(threading.Event())
    return member


@settings(max_examples=num_examples(15))
@given(
    seed=st.integers(0, 2**20),
    snapshot_interval=st.sampled_from([0.0, 0.03, 100.0]),
    kind=st.sampled_from([GroupMember, AsyncGroupMember]),
)
def test_many_runs_commit_the_same_as_one_run(
    loaded: Artifact, seed: int, snapshot_interval: float, kind: type[GroupMember]
) -> None:
    uninterrupted, interrupted = (make_cluster(loaded, seed % 5, records=25) for _ in range(2))
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
            *(member, Codec(loaded.schema), engine, [member], ManualClock(), Metrics()),
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
    pipeline = Pipeline(member, Codec(loaded.schema), engine, [member], ManualClock(), metrics, is_finite=False)
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
    Pipeline(member, Codec(loaded.schema), engine, [member], ManualClock(), metrics, is_finite=False).run(
        threading.Event()
    )
    assert metrics.registry.get_sample_value("deformer_records_misrouted_total") == engine.records.num_misrouted > 1
    assert capsys.readouterr().out.count("key messages by record id") == 1


def test_refused_messages_are_followed_by_a_snapshot(loaded: Artifact) -> None:
    """Otherwise a restart would process all of them again, and a journal of them would grow without limit."""
    engine = Engine(loaded.model, loaded.calibration, loaded.fingerprint, ALPHA, Limits())
    codec = Codec(loaded.schema)
    seconds = [0.0]
    recovery = Recovery(engine, Metrics(), interval=1.0, now=lambda: seconds[0])
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


def test_decisions_are_saved_only_after_a_committed_snapshot(loaded: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first snapshot is not committed, as if partitions moved at that moment. Free memory is released after each
    snapshot.
    """
    releases = list[None]()
    monkeypatch.setattr(process, "release_free_memory", lambda: releases.append(None))
    lines = make_cluster(loaded, 1).events[0]
    engine = Engine(loaded.model, loaded.calibration, loaded.fingerprint, ALPHA, Limits())
    recovery = Recovery(engine, Metrics(), interval=100.0)
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
