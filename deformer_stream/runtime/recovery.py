"""What outlives this process: per partition a snapshot now and then, and the decisions that its log cannot tell.

A partition's state is a function of its log and of a few decisions (alerts raised, records closed by the clock or for
want of room). So with each commit goes what was decided since the last one, and every few seconds a snapshot, which
stands for everything before. Whoever takes the partition over begins with the snapshot, handles the messages up to the
committed position again without any effect (the history), applies the decisions, and goes on as if nothing had been.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from deformer_stream import log
from deformer_stream.codec import Codec
from deformer_stream.codec.payloads import Messages, Payload
from deformer_stream.codec.state import decode_decisions, decode_snapshot, encode_decisions, encode_snapshot
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.events import Decisions, Effects
from deformer_stream.runtime import process
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.ports import RestoredPartition, PartitionState

OCCUPIED = 0.05
"""Largest share of the time that snapshots may take: large states are saved less often, their history is longer."""


class Recovery:
    """Keeps the engine's partitions in step with what is saved of them.

    interval: seconds between two snapshots of a partition. now: monotonic seconds. A source whose partitions do not
    move (a file) restores nothing, and then nothing is saved.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        interval: float = 5.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._metrics = engine, metrics
        self._interval, self._now = interval, now
        self._history: dict[int, RestoredPartition] = {}
        self._decided: dict[int, Decisions] = {}  # of the partitions that are live, since the last commit
        self._due: dict[int, float] = {}
        self._changed: set[int] = set()  # since their last snapshot
        self._based: set[int] = set()  # these have a snapshot, which decisions can follow

    @property
    def restoring(self) -> frozenset[int]:
        """The partitions whose history is not over."""
        return frozenset(self._history)

    def restore(self, restored: RestoredPartition, at: int) -> None:
        """Begin with what is kept of a partition. at: the clock's time. Raises `StateError` for a snapshot that cannot
        be read."""
        if restored.snapshot is not None:
            self._engine.restore(restored.partition, decode_snapshot(restored.snapshot), at)
        for decisions in restored.decisions:
            self._engine.preload_decisions(restored.partition, decode_decisions(decisions))
        self._history[restored.partition] = restored

    def replay(self, data: Payload | None, codec: Codec, at: int) -> Payload | None:
        """Handle the messages of `data` that are history; what is left of it."""
        if not self._history or not isinstance(data, Messages):
            return data
        until = np.zeros(int(data.partitions.max()) + 1, np.int64)
        for partition, restored in self._history.items():
            if partition < len(until):
                until[partition] = restored.until
        past = data.offsets < until[data.partitions]
        if past.any():
            self._engine.replay(codec.decode(data.take(np.flatnonzero(past)))[0], at)
            data = data.take(np.flatnonzero(~past))
        return data if len(data) else None

    def go_live(self, partition: int) -> None:
        """The history of this partition is over: apply what was decided in it. From now on its events have effects."""
        restored = self._history.pop(partition)
        for decisions in restored.decisions:
            self._engine.apply_decisions(partition, decode_decisions(decisions))
        self._decided[partition] = Decisions()
        if restored.snapshot is None:
            self._due[partition] = self._now()
            self._changed.add(partition)
        else:
            self._metrics.saved(partition, len(restored.snapshot))
            self._based.add(partition)
            # Spread over the interval, so that not all partitions are saved in one commit.
            self._due[partition] = self._now() + self._interval * (0.5 + partition % 8 / 16)
        log.get("recovery").info(
            "partition restored",
            partition=partition,
            records=len(self._engine.records.partition(partition).record_index_by_id),
            until=restored.until,
        )

    def forget(self, partitions: Iterable[int]) -> None:
        """These partitions are no longer ours."""
        for partition in partitions:
            for kept in (self._history, self._decided, self._due):
                kept.pop(partition, None)
            self._changed.discard(partition)
            self._based.discard(partition)
            self._metrics.unsaved(partition)

    def note(self, effects: Effects) -> None:
        """Remember what was decided, and which partitions have changed, until it is saved."""
        if not self._decided:
            return
        for partition, decisions in effects.decisions().items():
            if partition in self._decided:
                self._decided[partition] += decisions
                self._changed.add(partition)
        if len(effects.batch):
            self._changed.update(np.unique(effects.batch.partitions).tolist())

    def saved(self, at: int, finally_of: Iterable[int] = ()) -> dict[int, PartitionState]:
        """What is to be kept with the positions as they are: snapshots of the partitions whose time has come and of
        `finally_of`, decisions of the others."""
        final = set(finally_of)
        saved: dict[int, PartitionState] = {}
        for partition, decided in self._decided.items():
            due = partition in final or partition not in self._based or self._now() >= self._due[partition]
            if due and partition in self._changed:
                saved[partition] = PartitionState(snapshot=self._snapshot(partition, at))
            elif decided:
                saved[partition] = PartitionState(decisions=encode_decisions(decided))
        return saved

    def save_soon(self) -> None:
        """Let the next commit take snapshots of all partitions."""
        for partition in self._due:
            self._due[partition] = self._now()
            self._changed.add(partition)

    def _snapshot(self, partition: int, at: int) -> bytes:
        began = self._now()
        snapshot = encode_snapshot(self._engine.snapshot(partition, at))
        process.release_free_memory()  # it took many times its size, and polls leave much, too
        took = self._now() - began
        self._due[partition] = self._now() + max(self._interval, took * len(self._decided) / OCCUPIED)
        log.get("recovery").info("snapshot", partition=partition, bytes=len(snapshot), seconds=round(took, 4))
        return snapshot

    def keep(self, saved: Mapping[int, PartitionState]) -> None:
        """Say that this was committed."""
        for partition, kept in saved.items():
            if partition in self._decided:
                self._decided[partition] = Decisions()
                if kept.snapshot is not None:
                    self._based.add(partition)
                    self._changed.discard(partition)
                    self._metrics.saved(partition, len(kept.snapshot))
