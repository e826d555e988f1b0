"""Recovery of partitions after a restart or a rebalance, by snapshots, saved decisions and replay.

The state of a partition is determined by its messages and by a few decisions that the messages do not determine (alerts
raised, records closed by a time-out or evicted). Every commit therefore saves the decisions made since the last one.
Every few seconds it saves a snapshot, which replaces everything before. A process that takes over the partition
continues exactly where the previous one stopped, in three steps:

    1. start_restore    load the snapshot
    2. replay_history   process the messages up to the committed offset again, without effects
    3. finish_restore   apply the saved decisions; from now on messages have effects
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
from deformer_stream.runtime.ports import PartitionState, RestoredPartition

MAX_SNAPSHOT_TIME_SHARE = 0.05
"""Maximum share of the running time that is spent on snapshots. If the state is large, snapshots are taken less often,
and a restart has more messages to replay."""


class Recovery:
    """Restores the engine's partitions and collects the state that is saved with each commit.

    A source whose partitions never move, such as a file, restores nothing; then nothing is saved either.

    Args:
        engine: The engine that holds the partitions.
        metrics: Receives the size and age of snapshots.
        interval: Seconds between two snapshots of a partition.
        now: Returns monotonic seconds.
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
        self._restoring: dict[int, RestoredPartition] = {}
        self._unsaved_decisions: dict[int, Decisions] = {}  # of every live partition, since the last commit
        self._next_snapshot: dict[int, float] = {}  # when the next snapshot of a live partition is due
        self._changed: set[int] = set()  # partitions that changed since their last snapshot
        self._has_snapshot: set[int] = set()  # partitions with a saved snapshot, to which decisions can be added

    @property
    def restoring_partitions(self) -> frozenset[int]:
        """The partitions whose history is not completely replayed."""
        return frozenset(self._restoring)

    def start_restore(self, restored: RestoredPartition, now: int) -> None:
        """Load the saved snapshot of a partition, if there is one.

        Args:
            restored: The partition and its saved state.
            now: The pipeline's time, microseconds since 1970.

        Raises:
            StateError: If the saved state cannot be read.
        """
        if restored.snapshot is not None:
            snapshot = decode_snapshot(restored.snapshot, _describe("snapshot", restored))
            self._engine.restore(restored.partition, snapshot, now)
        for decisions in self._decode_decisions(restored):
            self._engine.preload_decisions(restored.partition, decisions)
        self._restoring[restored.partition] = restored

    def replay_history(self, data: Payload | None, codec: Codec, now: int) -> Payload | None:
        """Process those messages again that a previous run has processed already.

        Args:
            data: What the source returned, or None.
            codec: Decodes the messages.
            now: The pipeline's time, microseconds since 1970.

        Returns:
            The messages that are new, or None if there are none.
        """
        if not self._restoring or not isinstance(data, Messages):
            return data
        committed_offsets = np.zeros(int(data.partitions.max()) + 1, np.int64)
        for partition, restored in self._restoring.items():
            if partition < len(committed_offsets):
                committed_offsets[partition] = restored.committed_offset
        is_history = data.offsets < committed_offsets[data.partitions]
        if is_history.any():
            events, _ = codec.decode(data.take(np.flatnonzero(is_history)))
            self._engine.replay(events, now)
            data = data.take(np.flatnonzero(~is_history))
        return data if len(data) else None

    def finish_restore(self, partition: int) -> None:
        """Apply the saved decisions of a partition whose history is replayed. From now on its events have effects."""
        restored = self._restoring.pop(partition)
        for decisions in self._decode_decisions(restored):
            self._engine.apply_decisions(partition, decisions)
        self._unsaved_decisions[partition] = Decisions()
        if restored.snapshot is None:
            self._next_snapshot[partition] = self._now()
            self._changed.add(partition)
        else:
            self._metrics.set_snapshot(partition, len(restored.snapshot))
            self._has_snapshot.add(partition)
            # Spread over the interval, so that one commit does not have to save all partitions.
            self._next_snapshot[partition] = self._now() + self._interval * (0.5 + partition % 8 / 16)
        log.get_logger("recovery").info(
            "partition_restored",
            partition=partition,
            open_records=len(self._engine.records.partition(partition).record_index_by_id),
            committed_offset=restored.committed_offset,
        )

    def _decode_decisions(self, restored: RestoredPartition) -> list[Decisions]:
        """Return the saved decisions of a partition, in order. Raises `StateError` if they cannot be read."""
        return [decode_decisions(data, _describe("decisions", restored)) for data in restored.decisions]

    def drop_partitions(self, partitions: Iterable[int]) -> None:
        """Remove everything about partitions that were revoked."""
        for partition in partitions:
            self._restoring.pop(partition, None)
            self._unsaved_decisions.pop(partition, None)
            self._next_snapshot.pop(partition, None)
            self._changed.discard(partition)
            self._has_snapshot.discard(partition)
            self._metrics.remove_snapshot(partition)

    def record_effects(self, effects: Effects) -> None:
        """Keep the decisions of a batch, and which partitions it changed, until the next commit saves them."""
        if not self._unsaved_decisions:
            return
        for partition, decisions in effects.decisions().items():
            if partition in self._unsaved_decisions:
                self._unsaved_decisions[partition] += decisions
                self._changed.add(partition)
        if len(effects.batch):
            self._changed.update(np.unique(effects.batch.partitions).tolist())

    def collect_state(self, now: int, final_partitions: Iterable[int] = ()) -> dict[int, PartitionState]:
        """Return what the next commit must save with the offsets as they are.

        Args:
            now: The pipeline's time, microseconds since 1970.
            final_partitions: Partitions that this process gives up. They get a snapshot, so that the process that takes
                them over has nothing to replay.

        Returns:
            A snapshot of each partition that needs one, and the unsaved decisions of each other partition.
        """
        final = set(final_partitions)
        states: dict[int, PartitionState] = {}
        for partition, decisions in self._unsaved_decisions.items():
            is_due = (
                partition in final
                or partition not in self._has_snapshot
                or self._now() >= self._next_snapshot[partition]
            )
            if is_due and partition in self._changed:
                states[partition] = PartitionState(snapshot=self._take_snapshot(partition, now))
            elif decisions:
                states[partition] = PartitionState(decisions=encode_decisions(decisions))
        return states

    def request_snapshots(self) -> None:
        """Let the next commit save a snapshot of every partition."""
        for partition in self._next_snapshot:
            self._next_snapshot[partition] = self._now()
            self._changed.add(partition)

    def _take_snapshot(self, partition: int, now: int) -> bytes:
        """Return the encoded state of a partition, and set when its next snapshot is due."""
        start = self._now()
        snapshot = encode_snapshot(self._engine.snapshot(partition, now))
        process.release_free_memory()  # encoding uses several times the size of the snapshot
        duration = self._now() - start
        # All partitions together must not exceed the share of time.
        min_interval = duration * len(self._unsaved_decisions) / MAX_SNAPSHOT_TIME_SHARE
        self._next_snapshot[partition] = self._now() + max(self._interval, min_interval)
        log.get_logger("recovery").info(
            "snapshot_taken", partition=partition, bytes=len(snapshot), seconds=round(duration, 4)
        )
        return snapshot

    def mark_committed(self, states: Mapping[int, PartitionState]) -> None:
        """Record that a commit has saved these states, by partition."""
        for partition, state in states.items():
            if partition not in self._unsaved_decisions:
                continue
            self._unsaved_decisions[partition] = Decisions()
            if state.snapshot is not None:
                self._has_snapshot.add(partition)
                self._changed.discard(partition)
                self._metrics.set_snapshot(partition, len(state.snapshot))


def _describe(kind: str, restored: RestoredPartition) -> str:
    """Return what to call saved state in an error message, for example "snapshot of partition 3 at offset 17"."""
    return f"saved {kind} of partition {restored.partition} at offset {restored.committed_offset}"
