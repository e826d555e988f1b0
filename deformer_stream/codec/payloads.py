"""What a decoder receives: messages and rows of tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa

    from deformer_stream.engine.events import RejectionReason


class Unreadable(bytes):
    """In place of a payload, and as empty as what is there of it: why the connector cannot hand it over. messages: how
    many, where their number is all that is known of some."""

    reason: RejectionReason
    detail: str
    messages: int

    def __new__(cls, reason: RejectionReason, detail: str, messages: int = 1) -> Unreadable:
        new = super().__new__(cls)
        new.reason, new.detail, new.messages = reason, detail, messages
        return new


@dataclass(frozen=True, slots=True)
class Messages:
    """N messages as they came: one JSON document each.

    keys, payloads: N byte strings (a key may be None, a payload None for a tombstone, or `Unreadable`). times: (N,)
    int64 microseconds since 1970 given by the broker, or `NO_TIME`. partitions: (N,) int32. offsets: (N,) int64.
    """

    topic: str
    keys: list[bytes | None]
    payloads: list[bytes | None]
    times: NDArray[np.int64]
    partitions: NDArray[np.int32]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.payloads)

    def take(self, chosen: NDArray[np.int64]) -> Messages:
        """The messages at these indices, in that order."""
        index = chosen.tolist()
        return Messages(
            self.topic,
            [self.keys[i] for i in index],
            [self.payloads[i] for i in index],
            self.times[chosen],
            self.partitions[chosen],
            self.offsets[chosen],
        )


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
