"""Recovery of partitions after a restart or a rebalance, by snapshots, saved decisions and replay.

The state of a partition follows from its messages and from a few decisions, which do not follow from the messages:
alerts that were raised, and records that were closed by a time-out, evicted or completed by a new model. Every commit
therefore saves the decisions made since the last one. Every few seconds a commit saves a snapshot (the complete state
of a partition), which replaces everything saved before. A process to which the partition is assigned continues exactly
where the previous one stopped, in three steps:

    1. load the snapshot; if another model has scored its records, score them again
    2. process the messages between the snapshot and the committed offset again, without effects
    3. apply the saved decisions; all later messages have effects

All of this can take longer than a consumer group waits for the next poll. `Recovery.advance` therefore does it step by
step, within a given time. In between, the source is polled, and the partitions that are restored already are processed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from deformer_stream import log
from deformer_stream.codec.model_choice import ModelDecoder
from deformer_stream.codec.payloads import Messages, Payload
from deformer_stream.codec.state import (
    decode_decisions_by_model,
    decode_snapshots,
    describe_other_kind,
    encode_decisions_by_model,
    encode_snapshots,
)
from deformer_stream.engine.engine_set import EngineSet
from deformer_stream.engine.events import Decisions, Effects
from deformer_stream.errors import StateError
from deformer_stream.runtime import process
from deformer_stream.runtime.metrics import Metrics
from deformer_stream.runtime.ports import PartitionState, RestoredPartition

MAX_SNAPSHOT_TIME_SHARE = 0.05
"""Maximum share of the running time that is spent on snapshots. If the state is large, snapshots are therefore taken
less often, and after a restart more messages must be processed again."""

RESCORED_READINGS = 8_192
"""About how many readings one step of `Recovery.advance` scores again."""

REPLAYED_MESSAGES = 1_024
"""Largest number of messages that one step of `Recovery.advance` processes again."""


@dataclass(slots=True)
class _Restoring:
    """A partition whose history (messages that a previous run has processed) is still being read.

    Attributes:
        saved: Its saved state.
        is_loaded: Whether its snapshot is loaded.
        is_caught_up: Whether the source has returned its whole history.
        has_other_scores: Whether its loaded snapshot had scores of another model.
        has_history: Whether its history contained messages.
    """

    saved: RestoredPartition
    is_loaded: bool = False
    is_caught_up: bool = False
    has_other_scores: bool = False
    has_history: bool = False

    @property
    def is_rebuilt(self) -> bool:
        """Whether nothing was saved, so that the history alone shows which records have alerted."""
        return self.saved.snapshot is None and not self.saved.decisions


@dataclass(slots=True)
class _Restored:
    """A partition that is assigned and restored.

    Attributes:
        next_snapshot: When its next snapshot is due, by the clock of `Recovery`.
        has_snapshot: Whether it has a saved snapshot, to which decisions can be added.
        is_changed: Whether its last snapshot, if it has one, is out of date.
        unsaved: Its decisions since the last commit, by the name of the model.
    """

    next_snapshot: float
    has_snapshot: bool
    is_changed: bool
    unsaved: dict[str, Decisions] = field(default_factory=dict)


class Recovery:
    """Restores the engine's partitions from saved state, and collects the state that is saved with each commit.

    The saved state of a partition is a snapshot (its complete state) and the decisions since then, which its messages
    do not determine. Decisions are alerts raised, and records closed by a time-out, evicted or completed by a new
    model.

    A source that saves no state, such as a file, has no partitions to restore. Then `collect_state` returns an empty
    dictionary.

    Args:
        engines: The engines with the state of the partitions.
        metrics: Receives the size and age of snapshots.
        interval: Seconds between two snapshots of a partition.
        now: Returns monotonic seconds.
        saves_event_times: Whether snapshots have the latest event time of each record, which evidence needs. Snapshots
            without them can be read by earlier releases.
    """

    def __init__(
        self,
        engines: EngineSet,
        metrics: Metrics,
        interval: float = 5.0,
        now: Callable[[], float] = time.monotonic,
        saves_event_times: bool = False,
    ) -> None:
        self._saves_event_times = saves_event_times
        self._engines = engines
        self._metrics = metrics
        self._interval, self._now = interval, now
        # The assigned partitions by number, in the order in which their restores were started or have ended.
        self._restoring: dict[int, _Restoring] = {}
        self._restored: dict[int, _Restored] = {}
        # Polled messages of restoring partitions that are not processed yet: all of them, and those after the history.
        self._queue: deque[Messages] = deque()
        self._later_messages: list[Messages] = []

    @property
    def restoring_partitions(self) -> frozenset[int]:
        """The partitions whose history (messages that a previous run has processed) is still being read.

        Their records must not be closed yet.
        """
        return frozenset(self._restoring)

    @property
    def restored_partitions(self) -> frozenset[int]:
        """The partitions that are assigned and restored."""
        return frozenset(self._restored)

    @property
    def waiting_partitions(self) -> frozenset[int]:
        """The partitions whose further messages cannot be processed before `advance` has done more of its work."""
        has_queue = bool(self._queue or self._later_messages)
        return self._unready_partitions | (self.restoring_partitions if has_queue else frozenset())

    @property
    def _unready_partitions(self) -> frozenset[int]:
        """The partitions whose snapshot is not loaded, or whose records are not all scored by the current model."""
        return frozenset(r.saved.partition for r in self._unloaded) | self._engines.partitions_to_rescore

    @property
    def _unloaded(self) -> list[_Restoring]:
        """The partitions whose snapshot is not loaded, in the order in which the snapshots are loaded."""
        return [restoring for restoring in self._restoring.values() if not restoring.is_loaded]

    def start_restore(self, restored: RestoredPartition) -> None:
        """Begin to restore a partition; `advance` does the work.

        Args:
            restored: The partition and its saved state.
        """
        self._restoring[restored.partition] = _Restoring(restored)

    def enqueue(self, data: Payload | None) -> Payload | None:
        """Keep the messages of partitions that are being restored for `advance`, and return the other messages.

        Args:
            data: The messages or table rows that the source has returned, or None.

        Returns:
            The messages of other partitions, or None if there are none.
        """
        if not isinstance(data, Messages):  # table rows have no partition
            return data
        if self._restoring:
            is_restoring = np.isin(data.partitions, list(self._restoring))
            if is_restoring.any():
                self._queue.append(data.take(np.flatnonzero(is_restoring)))
                data = data.take(np.flatnonzero(~is_restoring))
        self._mark_changed(data)
        return data if len(data) else None

    def _mark_changed(self, messages: Messages) -> None:
        """Record that messages follow the last snapshot of their partitions, whether or not they are rejected.

        Without a new snapshot, a restart would process them again, however many there are.
        """
        if self._restored:  # otherwise no partition is restored, or the source saves no state
            self._mark_partitions_changed(messages.partitions)

    def _mark_partitions_changed(self, partitions: NDArray[np.int32]) -> None:
        """Record that restored partitions have changed since their last snapshot.

        Args:
            partitions: The partitions of messages or readings, with repetitions. Those that are not restored are left
                out.
        """
        for partition in np.unique(partitions).tolist():
            if partition in self._restored:
                self._restored[partition].is_changed = True

    def mark_caught_up(self, partition: int) -> None:
        """Record that the source has returned all messages of a partition's history."""
        self._restoring[partition].is_caught_up = True

    def advance(self, codec: ModelDecoder, now: int, seconds: float = math.inf) -> list[Messages]:
        """Restore partitions and score open records again, as far as the given time permits, but at least one step.

        Args:
            codec: Decodes the messages.
            now: The time of the pipeline's clock, microseconds since 1970.
            seconds: After this time no further step is begun. A step takes a fraction of a second, except for loading a
                large snapshot.

        Returns:
            Messages of partitions whose restore has ended, which follow their history and were not processed yet.

        Raises:
            StateError: If saved state cannot be decoded.
        """
        deadline = self._now() + seconds
        while self._take_step(codec, now):
            self._metrics.record_progress()
            if self._now() >= deadline:
                break
        if self._queue:
            return []
        unready = self._unready_partitions
        for partition in [p for p, r in self._restoring.items() if r.is_caught_up and p not in unready]:
            self._finish_restore(partition)
        later_messages, self._later_messages = self._later_messages, []
        if self._restoring:
            # Partitions that wait for `rescore` again keep their messages.
            kept = _leave_out(later_messages, self.restored_partitions)
            later_messages = _leave_out(later_messages, self.restoring_partitions)
            self._later_messages = kept
        for messages in later_messages:
            self._mark_changed(messages)
        return later_messages

    def _take_step(self, codec: ModelDecoder, now: int) -> bool:
        """Do a part of the work of `advance`.

        Returns:
            Whether there was any work.
        """
        unready = self._unready_partitions
        if self._queue and unready.isdisjoint(np.unique(self._queue[0].partitions).tolist()):
            self._replay_part(codec, now)
        elif self._unloaded:
            self._load(self._unloaded[0], now)
        elif unready:
            self._engines.rescore(RESCORED_READINGS)
        else:
            return False
        return True

    def _load(self, restoring: _Restoring, now: int) -> None:
        """Load the saved snapshot (complete state) of a partition, if there is one, and its saved decisions.

        Args:
            restoring: The partition.
            now: The time of the pipeline's clock, microseconds since 1970.

        Raises:
            StateError: If the saved state cannot be decoded.
        """
        saved = restoring.saved
        if saved.snapshot is not None:
            description = _describe("snapshot", saved)
            snapshot_by_model = decode_snapshots(saved.snapshot, description)
            self._check_names(snapshot_by_model, description)
            for name in snapshot_by_model.keys() - self._engines.engine_by_name.keys():
                log.get_logger("recovery").warning(
                    "model_missing",
                    model=name,
                    partition=saved.partition,
                    dropped_records=len(snapshot_by_model[name]),
                )
            self._engines.restore(saved.partition, snapshot_by_model, now)
            if saved.partition in self._engines.partitions_to_rescore:
                restoring.has_other_scores = True
        # Some decisions must be loaded before the history is processed, because they determine which of its readings
        # are scored together. `_finish_restore` applies the others.
        for decisions in self._decode_decisions(saved):
            self._engines.preload_decisions(saved.partition, decisions)
        restoring.is_loaded = True

    def _check_names(self, state_by_model: Mapping[str, object], description: str) -> None:
        """Check that saved state is that of one model if the process has one, and that of several if it has several.

        Args:
            state_by_model: The saved state by the name of the model.
            description: What the error message calls the state.

        Raises:
            StateError: It is the other kind.
        """
        other_kind = describe_other_kind(state_by_model, self._engines.has_one_model)
        if other_kind is not None:
            raise StateError(f"{description} {other_kind}: choose another --group or --state-dir")

    def _replay_part(self, codec: ModelDecoder, now: int) -> None:
        """Process the history among the next messages of the queue, and keep those after the history for later.

        The history of a partition is the messages below its committed offset, which a previous run has processed. They
        only rebuild the state of the engine, and no score or alert is written again.

        Args:
            codec: Decodes the messages.
            now: The time of the pipeline's clock, microseconds since 1970.
        """
        messages = self._queue.popleft()
        if len(messages) > REPLAYED_MESSAGES:
            self._queue.appendleft(messages.take(np.arange(REPLAYED_MESSAGES, len(messages))))
            messages = messages.take(np.arange(REPLAYED_MESSAGES))
        committed_offsets = np.array([self._restoring[p].saved.committed_offset for p in messages.partitions.tolist()])
        is_history = messages.offsets < committed_offsets
        rebuilt = [number for number, restoring in self._restoring.items() if restoring.is_rebuilt]
        is_rebuilt = np.isin(messages.partitions, rebuilt)
        for marks_alerts, is_replayed in ((False, is_history & ~is_rebuilt), (True, is_history & is_rebuilt)):
            if is_replayed.any():
                history = messages.take(np.flatnonzero(is_replayed))
                for partition in np.unique(history.partitions).tolist():
                    self._restoring[partition].has_history = True
                batch_by_model, _ = codec.decode_by_model(history)
                self._engines.replay(batch_by_model, now, marks_alerts)
        if not is_history.all():
            self._later_messages.append(messages.take(np.flatnonzero(~is_history)))

    def _finish_restore(self, partition: int) -> None:
        """End the restoration of a partition, and apply its saved decisions, such as records closed by a time-out.

        From now on its events have effects (scores and alerts).

        Args:
            partition: Number of the partition. All messages before its committed offset have been processed again.
        """
        restoring = self._restoring.pop(partition)
        saved = restoring.saved
        for decisions in self._decode_decisions(saved):
            self._engines.apply_decisions(partition, decisions)
        if saved.snapshot is None:  # the first commit must save a snapshot, since decisions alone are not enough
            self._restored[partition] = _Restored(self._now(), has_snapshot=False, is_changed=True)
        else:
            self._metrics.set_snapshot(partition, len(saved.snapshot), partial(self._has_changed, partition))
            self._restored[partition] = _Restored(
                # For partitions that are restored together, the next snapshots are due after 8/16 to 15/16 of the
                # interval. So no commit has to save all of them.
                next_snapshot=self._now() + self._interval * (8 + partition % 8) / 16,
                has_snapshot=True,
                # Without a new snapshot, each restart of an idle partition would do the same work again. It would be
                # refused once retention has deleted the history.
                is_changed=restoring.has_other_scores or restoring.has_history or bool(saved.decisions),
            )
        log.get_logger("recovery").info(
            "partition_restored",
            partition=partition,
            open_records=self._engines.count_open_records(partition),
            committed_offset=saved.committed_offset,
        )

    def _decode_decisions(self, saved: RestoredPartition) -> list[dict[str, Decisions]]:
        """Return the saved decisions of a partition (such as records closed by a time-out), one element per commit.

        Each element has the decisions by the name of the model.

        Raises:
            StateError: If they cannot be decoded.
        """
        return [decode_decisions_by_model(data, _describe("decisions", saved)) for data in saved.decisions]

    def drop_partitions(self, partitions: Iterable[int]) -> None:
        """Remove the messages, the state and the metrics of revoked partitions."""
        revoked = set(partitions)
        self._queue = deque(_leave_out(self._queue, revoked))
        self._later_messages = _leave_out(self._later_messages, revoked)
        for partition in revoked:
            self._restoring.pop(partition, None)
            self._restored.pop(partition, None)
            self._metrics.remove_snapshot(partition)

    def record_effects(self, effects: Effects) -> None:
        """Keep the decisions of a batch of events, and which partitions it changed, until the next commit saves them.

        Decisions are what messages do not determine: alerts raised, and records closed by a time-out, evicted or
        completed by a new model.

        Args:
            effects: The results of the engine for the batch.
        """
        if not self._restored:  # no partition is restored, or the source saves no state
            return
        for partition, decisions in effects.decisions().items():
            restored = self._restored.get(partition)
            if restored is not None:
                previous = restored.unsaved.get(effects.model_name, Decisions())
                restored.unsaved[effects.model_name] = previous + decisions
                restored.is_changed = True
        self._mark_partitions_changed(effects.batch.partitions)

    def collect_state(self, now: int, final_partitions: Iterable[int] = ()) -> dict[int, PartitionState]:
        """Return the state that a commit of the present offsets must save.

        Args:
            now: The time of the pipeline's clock, microseconds since 1970.
            final_partitions: Partitions that this process gives up. Their snapshot is saved if they have changed, so
                that the process to which they are assigned next has no messages to process again.

        Returns:
            By partition, a snapshot if one is due, otherwise the unsaved decisions if there are any. Partitions whose
            records are being scored again are left out, because nothing is committed for them.
        """
        final = set(final_partitions)
        states: dict[int, PartitionState] = {}
        for partition, restored in self._restored.items():
            if partition in self._engines.partitions_to_rescore:
                continue
            is_snapshot_due = (
                partition in final
                or not restored.has_snapshot  # decisions can only be added to a snapshot
                or self._now() >= restored.next_snapshot
            )
            if is_snapshot_due and restored.is_changed:
                states[partition] = PartitionState(snapshot=self._take_snapshot(partition, now))
            elif restored.unsaved:
                states[partition] = PartitionState(decisions=encode_decisions_by_model(restored.unsaved))
        return states

    def _has_changed(self, partition: int) -> bool:
        """Return whether a partition is restored and has changed since its last snapshot."""
        restored = self._restored.get(partition)
        return restored is not None and restored.is_changed

    def request_snapshots(self) -> None:
        """Let the next commit save a snapshot of every partition, because the model has changed."""
        for restored in self._restored.values():
            restored.next_snapshot = self._now()
            restored.is_changed = True

    def _take_snapshot(self, partition: int, now: int) -> bytes:
        """Return the encoded snapshot of a partition, and set when its next snapshot is due.

        Args:
            partition: Number of the partition.
            now: The time of the pipeline's clock, microseconds since 1970.
        """
        start = self._now()
        states = self._engines.snapshot(partition, now)
        if not self._saves_event_times:
            states = {name: replace(state, latest_event_time=None) for name, state in states.items()}
        snapshot = encode_snapshots(states)
        process.release_free_memory()  # encoding uses several times the size of the snapshot
        self._metrics.record_progress()  # there may be many partitions
        duration = self._now() - start
        # Snapshots of all partitions together may take at most this share of the time. `min_interval` is the interval
        # of a partition's snapshots at which they take exactly this share, if all take as long as this one.
        num_partitions = len(self._restored)
        min_interval = duration * num_partitions / MAX_SNAPSHOT_TIME_SHARE
        self._restored[partition].next_snapshot = self._now() + max(self._interval, min_interval)
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
            restored = self._restored.get(partition)
            if restored is None:  # it may have been revoked in the meantime
                continue
            restored.unsaved = {}
            if state.snapshot is not None:
                restored.has_snapshot, restored.is_changed = True, False
                self._metrics.set_snapshot(partition, len(state.snapshot), partial(self._has_changed, partition))


def _describe(kind: str, saved: RestoredPartition) -> str:
    """Return a name for saved state in error messages, such as "saved snapshot of partition 3 at offset 17".

    Args:
        kind: "snapshot" or "decisions".
        saved: The partition and its committed offset.
    """
    return f"saved {kind} of partition {saved.partition} at offset {saved.committed_offset}"


def _leave_out(parts: Iterable[Messages], partitions: Collection[int]) -> list[Messages]:
    """Return messages without those of some partitions."""
    kept = [part.take(np.flatnonzero(~np.isin(part.partitions, list(partitions)))) for part in parts]
    return [part for part in kept if len(part)]
