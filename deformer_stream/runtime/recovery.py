"""Recovery of partitions after a restart or a rebalance, by snapshots, saved decisions and replay.

The state of a partition is determined by its messages and by a few decisions that the messages do not determine (alerts
raised, records closed by a time-out or evicted). Every commit therefore saves the decisions made since the last one.
Every few seconds a commit saves a snapshot (the complete state of a partition), which replaces everything saved before.
A process to which the partition is assigned continues exactly where the previous one stopped, in three steps:

    1. start_restore    load the snapshot
    2. replay_history   process the messages between the snapshot and the committed offset again, without effects
    3. finish_restore   apply the saved decisions; all later messages have effects
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

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
"""Maximum share of the running time that is spent on snapshots. If the state is large, snapshots are therefore taken
less often, and after a restart more messages must be processed again."""


class Recovery:
    """Restores the engine's partitions from saved state, and collects the state that is saved with each commit.

    The saved state of a partition is a snapshot (its complete state) and the decisions since then (alerts raised,
    records closed by a time-out or evicted), which its messages do not determine.

    A source that saves no state, such as a file, has no partitions to restore. Then `collect_state` returns an empty
    dictionary.

    Args:
        engine: The engine with the state of the partitions.
        metrics: Receives the size and age of snapshots.
        interval: Seconds between two snapshots of a partition.
        now: Returns monotonic seconds.
        saves_event_times: Whether snapshots have the latest event time of each record, which evidence needs. Snapshots
            without them can be read by earlier releases.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        interval: float = 5.0,
        now: Callable[[], float] = time.monotonic,
        saves_event_times: bool = False,
    ) -> None:
        self._saves_event_times = saves_event_times
        self._engine, self._metrics = engine, metrics
        self._interval, self._now = interval, now
        # Partitions whose history (messages that a previous run has processed) is still being read, by number.
        self._restoring: dict[int, RestoredPartition] = {}
        # All partitions that are assigned and not being restored, with their decisions since the last commit.
        self._unsaved_decisions: dict[int, Decisions] = {}
        self._next_snapshot: dict[int, float] = {}  # when the next snapshot of such a partition is due, by `now`
        self._changed: set[int] = set()  # partitions that changed since their last snapshot
        self._has_snapshot: set[int] = set()  # partitions with a saved snapshot, to which decisions can be added

    @property
    def restoring_partitions(self) -> frozenset[int]:
        """The partitions whose history (messages that a previous run has processed) is still being read.

        Their records must not be closed yet.
        """
        return frozenset(self._restoring)

    def start_restore(self, restored: RestoredPartition, now: int) -> None:
        """Load the saved snapshot (complete state) of a partition, if there is one, and its saved decisions.

        Args:
            restored: The partition and its saved state.
            now: The time of the pipeline's clock, microseconds since 1970.

        Raises:
            StateError: If the saved state cannot be decoded.
        """
        if restored.snapshot is not None:
            snapshot = decode_snapshot(restored.snapshot, _describe("snapshot", restored))
            self._engine.restore(restored.partition, snapshot, now)
        # Some decisions must be loaded before the history is processed, because they determine which of its readings
        # are scored together. `finish_restore` applies the others.
        for decisions in self._decode_decisions(restored):
            self._engine.preload_decisions(restored.partition, decisions)
        self._restoring[restored.partition] = restored

    def replay_history(self, data: Payload | None, codec: Codec, now: int) -> Payload | None:
        """Process the history of partitions that are being restored, and return the other messages.

        The history of a partition is the messages below its committed offset, which a previous run has processed. They
        only rebuild the state of the engine, and no score or alert is written again.

        Args:
            data: The messages or table rows that the source returned, which may contain history, or None.
            codec: Decodes the messages.
            now: The time of the pipeline's clock, microseconds since 1970.

        Returns:
            The messages that are not history, or None if there are none.
        """
        if not self._restoring or not isinstance(data, Messages):  # table rows have no partition
            return data
        # The committed offset by partition number. Messages below it are history. It is 0 for a partition that is not
        # being restored, so that none of its messages are history.
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
        """End the restoration of a partition, and apply its saved decisions, such as records closed by a time-out.

        From now on its events have effects (scores and alerts).

        Args:
            partition: Number of the partition. All messages before its committed offset have been processed again.
        """
        restored = self._restoring.pop(partition)
        for decisions in self._decode_decisions(restored):
            self._engine.apply_decisions(partition, decisions)
        self._unsaved_decisions[partition] = Decisions()
        if restored.snapshot is None:  # the first commit must save a snapshot, since decisions alone are not enough
            self._next_snapshot[partition] = self._now()
            self._changed.add(partition)
        else:
            self._metrics.set_snapshot(partition, len(restored.snapshot))
            self._has_snapshot.add(partition)
            # The next snapshots of partitions that are restored together are due after 8/16 to 15/16 of the interval,
            # so that no commit has to save all of them.
            self._next_snapshot[partition] = self._now() + self._interval * (8 + partition % 8) / 16
        log.get_logger("recovery").info(
            "partition_restored",
            partition=partition,
            open_records=len(self._engine.records.partition(partition).record_index_by_id),
            committed_offset=restored.committed_offset,
        )

    def _decode_decisions(self, restored: RestoredPartition) -> list[Decisions]:
        """Return the saved decisions of a partition (such as records closed by a time-out), one element per commit.

        Raises:
            StateError: If they cannot be decoded.
        """
        return [decode_decisions(data, _describe("decisions", restored)) for data in restored.decisions]

    def drop_partitions(self, partitions: Iterable[int]) -> None:
        """Remove the unsaved decisions, the times of the next snapshots and the metrics of revoked partitions."""
        for partition in partitions:
            self._restoring.pop(partition, None)
            self._unsaved_decisions.pop(partition, None)
            self._next_snapshot.pop(partition, None)
            self._changed.discard(partition)
            self._has_snapshot.discard(partition)
            self._metrics.remove_snapshot(partition)

    def record_effects(self, effects: Effects) -> None:
        """Keep the decisions of a batch of events, and which partitions it changed, until the next commit saves them.

        Decisions are what messages do not determine: alerts raised, records closed by a time-out or evicted.

        Args:
            effects: The results of the engine for the batch.
        """
        if not self._unsaved_decisions:  # no partition is assigned, or the source saves no state
            return
        for partition, decisions in effects.decisions().items():
            if partition in self._unsaved_decisions:
                self._unsaved_decisions[partition] += decisions
                self._changed.add(partition)
        if len(effects.batch):
            self._changed.update(np.unique(effects.batch.partitions).tolist())

    def collect_state(self, now: int, final_partitions: Iterable[int] = ()) -> dict[int, PartitionState]:
        """Return the state that a commit of the present offsets must save.

        Args:
            now: The time of the pipeline's clock, microseconds since 1970.
            final_partitions: Partitions that this process gives up. Their snapshot is saved if they have changed, so
                that the process to which they are assigned next has no messages to process again.

        Returns:
            By partition, a snapshot (complete state) if one is due, otherwise the unsaved decisions if there are any.
        """
        final = set(final_partitions)
        states: dict[int, PartitionState] = {}
        for partition, decisions in self._unsaved_decisions.items():
            is_snapshot_due = (
                partition in final
                or partition not in self._has_snapshot  # decisions can only be added to a snapshot
                or self._now() >= self._next_snapshot[partition]
            )
            if is_snapshot_due and partition in self._changed:
                states[partition] = PartitionState(snapshot=self._take_snapshot(partition, now))
            elif decisions:
                states[partition] = PartitionState(decisions=encode_decisions(decisions))
        return states

    def request_snapshots(self) -> None:
        """Let the next commit save a snapshot (complete state) of every partition, because the model has changed."""
        for partition in self._next_snapshot:
            self._next_snapshot[partition] = self._now()
            self._changed.add(partition)

    def _take_snapshot(self, partition: int, now: int) -> bytes:
        """Return the encoded snapshot (complete state) of a partition, and set when its next snapshot is due.

        Args:
            partition: Number of the partition.
            now: The time of the pipeline's clock, microseconds since 1970.
        """
        start = self._now()
        state = self._engine.snapshot(partition, now)
        snapshot = encode_snapshot(state if self._saves_event_times else replace(state, latest_event_time=None))
        process.release_free_memory()  # encoding uses several times the size of the snapshot
        duration = self._now() - start
        # Snapshots of all partitions together may take at most this share of the time. `min_interval` is the interval
        # of a partition's snapshots at which they take exactly this share, if all take as long as this one.
        num_partitions = len(self._unsaved_decisions)
        min_interval = duration * num_partitions / MAX_SNAPSHOT_TIME_SHARE
        self._next_snapshot[partition] = self._now() + max(self._interval, min_interval)
        log.get_logger("recovery").info(
            "snapshot_taken", partition=partition, bytes=len(snapshot), seconds=round(duration, 4)
        )
        return snapshot

    def mark_committed(self, states: Mapping[int, PartitionState]) -> None:
        """Record that a commit has saved the result of `collect_state`, so that it is not saved again.

        Args:
            states: The saved states by partition.
        """
        for partition, state in states.items():
            if partition not in self._unsaved_decisions:  # it may have been revoked in the meantime
                continue
            self._unsaved_decisions[partition] = Decisions()
            if state.snapshot is not None:
                self._has_snapshot.add(partition)
                self._changed.discard(partition)
                self._metrics.set_snapshot(partition, len(state.snapshot))


def _describe(kind: str, restored: RestoredPartition) -> str:
    """Return a name for saved state in error messages, such as "saved snapshot of partition 3 at offset 17".

    Args:
        kind: "snapshot" or "decisions".
        restored: The partition and its committed offset.
    """
    return f"saved {kind} of partition {restored.partition} at offset {restored.committed_offset}"
