"""A simulated cluster, and consumers that are members of a group, for tests of recovery."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from deformer_stream.codec import Codec
from deformer_stream.codec.payloads import Messages, Payload
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.engine_set import EngineSet
from deformer_stream.engine.events import ONLY_MODEL, Effects, EventBatch, Rejection
from deformer_stream.errors import StoppedWaiting
from deformer_stream.incidents.make_evidence import make_evidence
from deformer_stream.model.schema import Schema
from deformer_stream.model_store import Artifact
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.pipeline import Pipeline
from deformer_stream.runtime.ports import NO_STATE, PartitionState, PollResult, RestoredPartition, SourceCallbacks
from deformer_stream.testing import ManualClock
from tests.models import draw_rows
from tests.runtime.pipelines import make_model_reload

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
        self.callbacks = SourceCallbacks()
        self._new = sorted(assigned)
        self._assigned = set(assigned)
        self._recovering: dict[int, int] = {}
        self._next: dict[int, int] = {}
        self._pending: list[tuple[Effects, Payload | None]] = []

    def _happens(self, share: float) -> bool:
        """Return True with a given probability, reduced during replay so that runs can finish it."""
        return bool(self.rng.random() < (share / 10 if self._recovering else share))

    def set_callbacks(self, callbacks: SourceCallbacks) -> None:
        self.callbacks = callbacks

    def set_model_fingerprint(self, fingerprint: str) -> None: ...

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
            self._commit(self.callbacks.collect_state(frozenset({gone})))
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
            assert position >= kept.position
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

    def leave_out(self, partitions: frozenset[int]) -> None:
        self.waiting_partitions = partitions

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


class RewindableGroupMember(WaitingGroupMember):
    """A member that takes messages back.

    Attributes:
        num_returned: Number of messages that it has taken back.
    """

    num_returned = 0

    def return_messages(self, messages: Messages) -> None:
        self.num_returned += len(messages)
        for p in set(messages.partitions.tolist()):
            self._next[p] = int(messages.offsets[messages.partitions == p].min())


class WaitingCodec(Codec):
    """A codec that at random waits for a service until the process must end.

    Args:
        schema: The features of the model.
        stop: Set before it waits.
        seed: Seed of its random decisions.
        share: Probability that it waits.
    """

    def __init__(self, schema: Schema, stop: threading.Event, seed: int, share: float) -> None:
        super().__init__(schema)
        self._stop, self._share = stop, share
        self._rng = np.random.default_rng(seed)

    def decode(self, data: Payload) -> tuple[EventBatch, list[Rejection]]:
        if self._rng.random() < self._share:
            self._stop.set()
            raise StoppedWaiting("the registry does not respond")
        return super().decode(data)


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
    waits: float = 0.0,
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
        waits: Probability that decoding waits until the process must end.

    Returns:
        The member.
    """
    member, rng = kind(world, assigned, seed, crash, move), np.random.default_rng(seed)

    def take_new_model() -> tuple[str, Artifact] | None:
        if rng.random() >= change_model:
            return None
        return ONLY_MODEL, replace(loaded, fingerprint=f"model-{rng.integers(2**40)}")

    (_, model), stop = take_new_model() or (ONLY_MODEL, loaded), threading.Event()

    def make_codec(artifact: Artifact) -> Codec:
        return WaitingCodec(artifact.schema, stop, seed, waits)

    engine = Engine(model.model, model.calibration, model.fingerprint, ALPHA, Limits(), drift=DRIFT, effort="off")
    pipeline = Pipeline(
        member,
        make_codec(loaded),
        EngineSet.of_only_model(engine),
        [member],
        ManualClock(),
        Metrics(),
        is_finite=False,
        commit_interval=float(np.random.default_rng(seed).choice([0.0, 0.02])),
        snapshot_interval=snapshot_interval,
        open_records="rescore",
        model_reload=make_model_reload(take_new_model, make_codec),
        saves_event_times=True,
    )
    with suppress(CrashError):
        pipeline.run(stop)
    return member
