"""Protocols that connectors implement: sources of events, sinks of effects, and clocks.

The pipeline uses nothing else of a connector. The contract tests in `tests/contracts` run against every implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from deformer_stream.codec.payloads import Payload
    from deformer_stream.engine.events import Effects


@dataclass(frozen=True, slots=True)
class PartitionState:
    """The encoded state of one partition that is saved with a commit; either a snapshot or decisions.

    Attributes:
        snapshot: The complete state. It replaces everything that was saved before.
        decisions: What was decided since the last commit and cannot be derived from the partition's messages
            (time-outs, evictions, alerts raised). It is saved in addition to what was saved before.
    """

    snapshot: bytes | None = None
    decisions: bytes | None = None


@dataclass(frozen=True, slots=True)
class RestoredPartition:
    """A partition that was assigned to this process, with its saved state.

    The source returns the partition's messages from the snapshot's offset on. Those before `committed_offset` are its
    history: they rebuild the state and have no other effect, because their effects were written by a previous run.

    Attributes:
        partition: Number of the partition.
        committed_offset: Offset of the first message whose effects were not committed.
        snapshot: The last saved snapshot, or None if there is none.
        decisions: The decisions that were saved after the snapshot, in order.
    """

    partition: int
    committed_offset: int
    snapshot: bytes | None = None
    decisions: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class PollResult:
    """The result of one poll.

    Attributes:
        data: The messages or table rows, or None if there are none.
        revoked_partitions: Partitions that were taken away since the last poll, before `data` was read.
        restored_partitions: Partitions that were assigned since the last poll. Their messages come with this poll or
            later ones.
        caught_up_partitions: Partitions whose history ends with `data` or ended before it.
    """

    data: Payload | None
    revoked_partitions: tuple[int, ...] = ()
    restored_partitions: tuple[RestoredPartition, ...] = ()
    caught_up_partitions: tuple[int, ...] = ()


NO_STATE: Mapping[int, Any] = MappingProxyType({})
"""The state to save with a commit if no partition has any."""

CollectState = Callable[[frozenset[int]], Mapping[int, PartitionState]]
"""Returns the state to save, by partition, before the given partitions are handed over to another consumer."""


class EventSource(Protocol):
    """A connector that delivers events."""

    @property
    def is_exhausted(self) -> bool:
        """Whether the last event has been returned. Always False for a source that does not end, such as a topic."""

    def poll(self, timeout: float) -> PollResult:
        """Return what is available, after at most `timeout` seconds.

        It must not block for longer, so that records time out even if no events arrive. Calling it again states that
        the effects of the earlier polls have been written to the sinks.
        """

    def commit(self) -> None:
        """Record that all polled events are processed and their effects are safe. Blocks until this is durable.

        After a restart the source continues after the last commit. A source without offsets, such as a file, does
        nothing.
        """

    def close(self) -> None:
        """Release the source's resources without committing anything.

        Events that were polled but not committed are delivered again in the next run.
        """


@runtime_checkable
class PartitionedSource(EventSource, Protocol):
    """A source whose partitions are shared with other consumers and keep the state that is saved with their offsets.

    Partitions may be revoked and assigned at any poll. A partition that is revoked during a poll is first committed, as
    far as its effects are written, with the state that `collect_state` returns for it.

    Attributes:
        collect_state: Set by the pipeline; the source calls it before it gives up partitions.
        model_fingerprint: The model in use. All consumers that share the partitions must use the same one.
    """

    collect_state: CollectState
    model_fingerprint: str

    @property
    def assigned_partitions(self) -> frozenset[int]:
        """The partitions that belong to this process now."""

    def commit(self, states: Mapping[int, PartitionState] = NO_STATE) -> None:
        """Commit the offsets of all polled messages, the given states, and what sinks wrote to the same transaction.

        Either all of it takes effect or nothing. Blocks until it has taken effect.

        Args:
            states: State to save, by partition.
        """

    def get_lag(self) -> dict[tuple[str, int], int]:
        """Return the number of messages that are not yet read, by topic and partition, as far as it is known."""


@runtime_checkable
class AsyncCommitSource(PartitionedSource, Protocol):
    """A source that fetches messages in the background and can be polled while a commit is running."""

    def prefetch(self) -> None:
        """Start to fetch messages in the background, so that the next `poll` returns sooner. Does not block."""

    def begin_commit(self, states: Mapping[int, PartitionState], on_committed: Callable[[], None]) -> None:
        """Start a commit as `commit` does, without waiting for its end.

        The source may be polled while the commit is running. What sinks write in the meantime belongs to the next
        commit, which first waits for this one.

        Args:
            states: State to save, by partition.
            on_committed: Called when the commit has taken effect, possibly from another thread. It is not called if the
                commit needed more than one attempt.
        """


class Sink(Protocol):
    """A connector that receives the effects of the engine, for example alerts."""

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Accept the effects of one batch; they may stay in a buffer.

        Args:
            effects: What the engine returned.
            data: The poll that the effects refer to, or None if they have no poll.
        """

    def flush(self) -> None:
        """Make everything that was written durable; blocks until it is.

        A sink that shares a transaction with the source may leave this to the source's next commit.
        """

    def close(self) -> None:
        """Release the sink's resources. What was not flushed may be lost."""


class Clock(Protocol):
    """The time at which a batch is handled. It never runs backwards."""

    def at(self, times: NDArray[np.int64]) -> int:
        """Return the present time in microseconds since 1970, UTC.

        Args:
            times: (N,) the event times of the batch in microseconds, or `NO_TIME`. A wall clock ignores them; the clock
                of a replay follows them.
        """
