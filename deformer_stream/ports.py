"""What the road needs of the world, as protocols. Connectors implement them; `runtime` knows nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa

    from deformer_stream.core.batch import Effects


@dataclass(frozen=True, slots=True)
class Messages:
    """N messages as they came: one JSON document each.

    keys, payloads: N byte strings (a key may be None, a payload None for a tombstone). times: (N,) int64 microseconds
    since 1970 given by the broker, or `NO_TIME`. partitions: (N,) int32. offsets: (N,) int64.
    """

    topic: str
    keys: list[bytes | None]
    payloads: list[bytes | None]
    times: NDArray[np.int64]
    partitions: NDArray[np.int32]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.payloads)


@dataclass(frozen=True, slots=True)
class LongRows:
    """N events as a table with columns `record, feature, value` and perhaps `time`; `first` is its row number."""

    topic: str
    table: pa.RecordBatch
    first: int

    def __len__(self) -> int:
        return int(self.table.num_rows)


@dataclass(frozen=True, slots=True)
class WideRows:
    """N whole records, a column per feature, a null is "not observed"; `ids` are their N record ids.

    `first` is the row number of the first; `time` names the column with the record's time, if any.
    """

    topic: str
    table: pa.RecordBatch
    ids: list[str]
    first: int
    time: str | None = None

    def __len__(self) -> int:
        return int(self.table.num_rows)


Payload = Messages | LongRows | WideRows


@dataclass(frozen=True, slots=True)
class Polled:
    """One poll: the data, if any came, and the partitions that were taken away since the last poll."""

    data: Payload | None
    revoked: tuple[int, ...] = ()


class EventSource(Protocol):
    """Where events come from.

    `poll` waits at most `timeout` seconds and returns whatever is there; it never blocks for longer, so that time-outs
    of records fire on silent inputs. Calling it again says that the effects of earlier polls are flushed: a partition
    that is taken away is committed up to there. After the last event of a finite source `exhausted` is true.
    """

    @property
    def exhausted(self) -> bool: ...

    def poll(self, timeout: float) -> Polled: ...

    def commit(self) -> None:
        """Say that everything polled so far has been dealt with and its effects are safe; blocks until it is."""

    def close(self) -> None:
        """Let go of the source without committing anything more."""


class Sink(Protocol):
    """Where effects go. `write` may buffer; after `flush` returns, everything written is safe."""

    def write(self, effects: Effects, data: Payload | None) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Clock(Protocol):
    """The time a batch is handled at, microseconds since 1970, UTC; never runs backwards.

    `times` are those of the batch's events, (N,) int64 microseconds or `NO_TIME`: a live clock ignores them, the clock
    of a replay follows them.
    """

    def at(self, times: NDArray[np.int64]) -> int: ...
