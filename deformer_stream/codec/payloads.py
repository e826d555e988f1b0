"""The input of the decoders: messages of a broker, or rows of a table.

Each poll of a connector returns one of these values, and `deformer_stream.codec.Codec` decodes it into events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa

    from deformer_stream.engine.events import RejectionReason


ARROW_PREFIX = b"\xff\xff\xff\xff"
"""First bytes of an Arrow IPC stream. No JSON document starts with them."""


def is_arrow_stream(payload: bytes | None) -> TypeGuard[bytes]:
    """Return whether the value of a message is an Arrow IPC stream, and no JSON document or tombstone."""
    return payload is not None and payload[:4] == ARROW_PREFIX


class UnreadablePayload(bytes):
    """An empty payload in place of messages that the connector could not read, such as those of a damaged batch.

    It subclasses `bytes`, so that it can be an element of `Messages.payloads`. The decoder rejects it with the given
    reason and detail.

    Attributes:
        reason: Why the messages were not readable.
        detail: One line that describes the problem.
        content: What was read of the messages, for their dead letter; empty if nothing was.
        num_messages: How many messages it replaces. It is more than 1 if only the number of messages in a damaged batch
            is known.
    """

    reason: RejectionReason
    detail: str
    num_messages: int
    content: bytes

    def __new__(
        cls, reason: RejectionReason, detail: str, num_messages: int = 1, content: bytes = b""
    ) -> UnreadablePayload:
        payload = super().__new__(cls)  # empty, so that the decoder does not take the content for a message
        payload.content = content
        payload.reason, payload.detail, payload.num_messages = reason, detail, num_messages
        return payload


@dataclass(frozen=True, slots=True)
class Messages:
    """N messages of one topic, in order of arrival. Each holds one JSON document or one Arrow stream.

    Attributes:
        topic: The topic, or the name of the file for JSON lines.
        keys: N message keys, None for a message without a key.
        payloads: N message values. None is a tombstone (a Kafka message without a value), and an `UnreadablePayload`
            replaces messages that could not be read.
        times: (N,) broker timestamps in microseconds since 1970, `NO_TIME` for a message without one.
        partitions: (N,) partition number of each message.
        offsets: (N,) offset of each message within its partition.
    """

    topic: str
    keys: list[bytes | None]
    payloads: list[bytes | None]
    times: NDArray[np.int64]
    partitions: NDArray[np.int32]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        """Return the number of messages."""
        return len(self.payloads)

    def take(self, indices: NDArray[np.int64]) -> Messages:
        """Return the messages at these indices, (K,) integers from 0 to N − 1, in the order of the indices."""
        index_list = indices.tolist()
        return Messages(
            self.topic,
            [self.keys[i] for i in index_list],
            [self.payloads[i] for i in index_list],
            self.times[indices],
            self.partitions[indices],
            self.offsets[indices],
        )

    @staticmethod
    def concatenate(parts: Sequence[Messages]) -> Messages:
        """Return the messages of several polls of one topic as one value, in the order of `parts`, which has some."""
        if len(parts) == 1:
            return parts[0]
        return Messages(
            parts[0].topic,
            [key for part in parts for key in part.keys],
            [payload for part in parts for payload in part.payloads],
            np.concatenate([part.times for part in parts]),
            np.concatenate([part.partitions for part in parts]),
            np.concatenate([part.offsets for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class LongRows:
    """N rows of a table in long layout: one reading per row, in columns such as `record`, `feature` and `value`.

    Attributes:
        origin: The file of the table, for error messages and source positions.
        table: The N rows.
        first_row: The row number of the first row within its file.
        row_numbers: (N,) row numbers within the file, if not all rows of the file are read. None if they are
            consecutive.
    """

    origin: str
    table: pa.RecordBatch
    first_row: int
    row_numbers: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self.table.num_rows)

    def get_row_number(self, index: int) -> int:
        """Return the number within the file of the row at an index from 0 to N − 1."""
        return self.first_row + index if self.row_numbers is None else int(self.row_numbers[index])

    def take(self, indices: NDArray[np.int64]) -> LongRows:
        """Return the rows at these indices, (K,) integers from 0 to N − 1, in the order of the indices."""
        numbers = self.first_row + indices if self.row_numbers is None else self.row_numbers[indices]
        return LongRows(self.origin, self.table.take(indices), self.first_row, numbers)


@dataclass(frozen=True, slots=True)
class WideRows:
    """N rows of a table in wide layout: one record per row, one column per feature; null means "not observed".

    Attributes:
        origin: The file of the table, for error messages and source positions.
        table: The N rows.
        record_ids: The N record ids.
        first_row: The row number of the first row within its file.
        time_column: The name of the column with the time of the record, or None if the table has no times.
        row_numbers: (N,) row numbers within the file, if not all rows of the file are read. None if they are
            consecutive.
    """

    origin: str
    table: pa.RecordBatch
    record_ids: list[str]
    first_row: int
    time_column: str | None = None
    row_numbers: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self.table.num_rows)

    def get_row_number(self, index: int) -> int:
        """Return the number within the file of the row at an index from 0 to N − 1."""
        return self.first_row + index if self.row_numbers is None else int(self.row_numbers[index])

    def take(self, indices: NDArray[np.int64]) -> WideRows:
        """Return the rows at these indices, (K,) integers from 0 to N − 1, in the order of the indices."""
        numbers = self.first_row + indices if self.row_numbers is None else self.row_numbers[indices]
        record_ids = [self.record_ids[index] for index in indices.tolist()]
        return WideRows(self.origin, self.table.take(indices), record_ids, self.first_row, self.time_column, numbers)


Payload = Messages | LongRows | WideRows
