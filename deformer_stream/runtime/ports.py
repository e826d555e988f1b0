"""What the road needs of the world, as protocols. Connectors implement them; `runtime` knows nothing else."""

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
class RestoredPartition:
    """A partition that is ours from now on, with what is kept of it.

    snapshot, decisions: what `PartitionState` held when it was committed, None and empty where nothing is kept. Its messages
    come from the snapshot's position on; those before offset `until` are history: their effects are out already.
    """

    partition: int
    until: int
    snapshot: bytes | None = None
    decisions: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class PartitionState:
    """What is to be kept of a partition with its position: a snapshot, which stands for all that was kept before, or
    decisions since the last one; encoded."""

    snapshot: bytes | None = None
    decisions: bytes | None = None


@dataclass(frozen=True, slots=True)
class PollResult:
    """One poll: the data, if any came, and how the partitions moved.

    revoked: taken away since the last poll, before `data` came. restored: given to us, before their data.
    recovered: of these, the ones whose history ends with this `data`, at the latest.
    """

    data: Payload | None
    revoked: tuple[int, ...] = ()
    restored: tuple[RestoredPartition, ...] = ()
    recovered: tuple[int, ...] = ()


NO_STATE: Mapping[int, Any] = MappingProxyType({})
CollectState = Callable[[frozenset[int]], Mapping[int, PartitionState]]
"""What is to be kept of partitions that are about to go to another consumer (and of the others, if need be)."""


class EventSource(Protocol):
    """Where events come from.

    `poll` waits at most `timeout` seconds and returns whatever is there; it never blocks for longer, so that time-outs
    of records fire on silent inputs. After the last event of a finite source `exhausted` is true.
    """

    @property
    def exhausted(self) -> bool: ...

    def poll(self, timeout: float) -> PollResult: ...

    def commit(self) -> None:
        """Say that everything polled so far has been dealt with and its effects are safe; blocks until it is."""

    def close(self) -> None:
        """Let go of the source without committing anything more."""


@runtime_checkable
class PartitionedSource(EventSource, Protocol):
    """A source whose partitions are shared with other consumers, come and go, and remember what is kept of them.

    Calling `poll` again says that the effects of earlier polls are written: a partition that is taken away is committed
    up to there, with what `collect_state` says is to be kept of it. model: the fingerprint that we score with; consumers
    that share the partitions must agree on it.
    """

    collect_state: CollectState
    model: str

    @property
    def assigned(self) -> frozenset[int]:
        """The partitions that are ours now."""

    def commit(self, saved: Mapping[int, PartitionState] = NO_STATE) -> None:
        """Commit the positions of everything polled so far, what is to be kept of the partitions, and what sinks have
        left to this commit, all or nothing; blocks until it is so."""

    def lag(self) -> dict[tuple[str, int], int]:
        """(topic, partition) → messages not read yet, as far as known."""


@runtime_checkable
class AsyncCommitSource(PartitionedSource, Protocol):
    """A source that can be polled while it commits, and fetches while nobody waits for it."""

    def prefetch(self) -> None:
        """Begin to fetch what there is now: the next `poll` comes soon."""

    def begin_commit(self, saved: Mapping[int, PartitionState], ended: Callable[[], None]) -> None:
        """As `commit`, but it need not be over on return. From then on it is the source's: `poll` may be called, and
        what sinks write meanwhile goes with the next commit, which waits for this one. ended: called, perhaps from
        another thread, when it has taken effect; not where that took more than one attempt."""


class Sink(Protocol):
    """Where effects go. `write` may buffer; after `flush` returns, everything written is safe, or will be with the next
    commit of the source, all or nothing, where both belong to one transaction."""

    def write(self, effects: Effects, data: Payload | None) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Clock(Protocol):
    """The time a batch is handled at, microseconds since 1970, UTC; never runs backwards.

    `times` are those of the batch's events, (N,) int64 microseconds or `NO_TIME`: a live clock ignores them, the clock
    of a replay follows them.
    """

    def at(self, times: NDArray[np.int64]) -> int: ...
