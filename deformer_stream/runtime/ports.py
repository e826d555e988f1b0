"""Protocols that connectors implement: sources of events, sinks of effects, and clocks.

The pipeline uses a connector only through these protocols. The contract tests in `tests/contracts` run against every
implementation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from deformer_stream.codec.payloads import Messages, Payload
    from deformer_stream.engine.events import Effects


@dataclass(frozen=True, slots=True)
class PartitionState:
    """The encoded state of one partition that is saved with a commit: either a snapshot or decisions.

    Attributes:
        snapshot: The complete state, or None. It replaces everything that was saved before.
        decisions: What was decided since the last commit and cannot be derived from the partition's messages
            (time-outs, evictions, records completed by a new model, alerts raised), or None. It is saved in addition to
            what was saved before.
    """

    snapshot: bytes | None = None
    decisions: bytes | None = None


@dataclass(frozen=True, slots=True)
class RestoredPartition:
    """A partition that was assigned to this process, with its saved state.

    The source returns the partition's messages from the snapshot's offset on. The messages before `committed_offset`
    are its history. They only rebuild the state, because a previous run has already written their effects.

    Attributes:
        partition: Number of the partition.
        committed_offset: Offset of the first message whose effects were not committed.
        snapshot: The last saved snapshot (encoded complete state), or None if there is none.
        decisions: The encoded decisions of each commit after the snapshot, in order. Decisions are what the messages do
            not determine: time-outs, evictions, records completed by a new model, and alerts raised.
    """

    partition: int
    committed_offset: int
    snapshot: bytes | None = None
    decisions: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class PollResult:
    """The result of one poll of a source (a connector that reads messages or table rows).

    Attributes:
        data: The messages or table rows that have arrived, or None if there are none.
        revoked_partitions: Partitions that were revoked since the last poll, before `data` was read.
        restored_partitions: Partitions that were assigned since the last poll, with their saved state. Their messages
            are part of `data` or of later polls.
        caught_up_partitions: Assigned partitions whose history (messages that a previous run has processed) ends with
            `data` or ended before it. Each partition is listed once.
    """

    data: Payload | None
    revoked_partitions: tuple[int, ...] = ()
    restored_partitions: tuple[RestoredPartition, ...] = ()
    caught_up_partitions: tuple[int, ...] = ()


NO_STATE: Mapping[int, Any] = MappingProxyType({})
"""The empty mapping: the state by partition for a commit that saves no state."""

CollectState = Callable[[frozenset[int]], Mapping[int, PartitionState]]
"""A function from the partitions that are given up to another consumer to the state that must be saved first, by
partition."""


def _collect_no_state(partitions: frozenset[int]) -> Mapping[int, PartitionState]:
    """Return no state to save."""
    return NO_STATE


def do_nothing() -> None:
    """Do nothing; the default of functions that are called at certain moments."""


@dataclass(frozen=True, slots=True)
class SourceCallbacks:
    """The functions of a pipeline that a source calls during a run, and the event that ends the run.

    Attributes:
        collect_state: Returns the state of partitions. A `PartitionedSource` calls it before it gives them up.
        on_wait: A source calls it every few seconds while one of its calls waits, for example until a broker that
            restarts responds again, so that the process counts as healthy.
        stop: The event that is set when the process receives a signal to end. A source then gives up sooner during an
            outage.
    """

    collect_state: CollectState = _collect_no_state
    on_wait: Callable[[], None] = do_nothing
    stop: threading.Event = field(default_factory=threading.Event)


class EventSource(Protocol):
    """A connector that reads messages or table rows, for example from files or from a Kafka topic."""

    def set_callbacks(self, callbacks: SourceCallbacks) -> None:
        """Use the callbacks of a run of a pipeline, which calls this method before the first poll of the run.

        A source whose calls never wait for long, and that gives up no partitions, ignores them.
        """

    @property
    def is_exhausted(self) -> bool:
        """Whether `poll` has returned all data. Always False for a source that does not end, such as a Kafka topic."""

    def poll(self, timeout: float) -> PollResult:
        """Return the messages or table rows that are available, after at most `timeout` seconds.

        It must not block for longer, so that records time out even if no events arrive. By the next call of `poll`, the
        caller has written the effects of the earlier polls to the sinks. The source may then commit these polls, for
        example before it gives up a partition.

        Args:
            timeout: Maximum time to wait for data, in seconds.
        """

    def commit(self) -> None:
        """Save that all polled messages are processed and their effects are written. Blocks until that is durable.

        After a restart the source continues after the last commit. A source without offsets, such as a file, does
        nothing.
        """

    def close(self) -> None:
        """Release the source's resources without committing anything.

        Events that were polled but not committed are delivered again in the next run.
        """


@runtime_checkable
class PartitionedSource(EventSource, Protocol):
    """A source whose partitions are divided among several consumers. Each commit also saves state of the partitions.

    Partitions may be revoked and assigned at any poll. Before a partition is given up, the source commits the messages
    whose effects are written, together with the state that `SourceCallbacks.collect_state` returns for it.
    """

    def set_model_fingerprint(self, fingerprint: str) -> None:
        """Use the fingerprint of another model from now on. All consumers of the same group must use the same model."""

    @property
    def assigned_partitions(self) -> frozenset[int]:
        """The partitions that are assigned to this process now."""

    def commit(self, states: Mapping[int, PartitionState] = NO_STATE) -> None:
        """Commit the offsets of all polled messages, the states, and what sinks have written to the transaction.

        Either all of this takes effect or nothing. Blocks until it has taken effect.

        Args:
            states: State to save, by partition.
        """

    def get_lag(self) -> dict[tuple[str, int], int]:
        """Return the number of messages that are not yet read, by topic and partition. Unknown numbers are omitted."""


@runtime_checkable
class ConnectedSource(EventSource, Protocol):
    """A source that receives messages only while a connection exists, and restores the connection itself."""

    @property
    def is_connected(self) -> bool:
        """Whether messages can arrive now. If not, the process is not ready."""


@runtime_checkable
class GroupSource(PartitionedSource, Protocol):
    """A source that is a member of a group, and that can leave out partitions for some time."""

    def leave_out(self, partitions: frozenset[int]) -> None:
        """Leave out exactly these partitions until the next call of this method.

        Polls return none of their messages, and nothing is committed for them. If one of them is given up, this happens
        without a commit. Messages that earlier polls have returned may still wait in the pipeline.
        """

    @property
    def has_joined(self) -> bool:
        """Whether the group has accepted this process as a member, with or without partitions."""


@runtime_checkable
class RewindableSource(GroupSource, Protocol):
    """A member of a group to which polled messages can be returned."""

    def return_messages(self, messages: Messages) -> None:
        """Take messages back that have no effects, and all later ones of their partitions.

        The next commits do not include them. Later polls, or those of the next run, return them again.

        Args:
            messages: Messages of the last polls whose effects were not written.
        """


@runtime_checkable
class AsyncCommitSource(PartitionedSource, Protocol):
    """A source that can be polled while a commit is running."""

    def begin_commit(self, states: Mapping[int, PartitionState], on_committed: Callable[[], None]) -> None:
        """Start a commit like `commit`, and return without waiting for its end.

        The source may be polled while the commit is running. Whatever sinks write in the meantime belongs to the next
        commit, which first waits for the end of this one.

        Args:
            states: State to save, by partition.
            on_committed: Called when the commit has taken effect, possibly from another thread, to measure how long it
                took. If the commit needs more than one attempt, it may never be called.
        """


class Sink(Protocol):
    """A connector that writes the effects (results) of the engine, for example sends alerts to a Kafka topic."""

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Write the effects of one batch; they may stay in a buffer until `flush`.

        Args:
            effects: What the engine returned: scores, alerts, closed records, rejections.
            data: The messages or table rows that indices in the effects refer to, or None if there are none.
        """

    def flush(self) -> None:
        """Make everything durable that was written; blocks until it is.

        A sink that shares a transaction with the source may leave this to the source's next commit.
        """

    def close(self) -> None:
        """Release the sink's resources. What was not flushed may be lost."""


class Clock(Protocol):
    """A clock that states the time at which a batch of events is handled. It never runs backwards."""

    def at(self, times: NDArray[np.int64]) -> int:
        """Return the present time in microseconds since 1970, UTC.

        Args:
            times: (N,) the event times of the batch in microseconds since 1970, or `NO_TIME`. A wall clock ignores
                them. The clock of a replay of recorded events returns the latest event time so far.
        """
