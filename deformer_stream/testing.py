"""An in-memory source, an in-memory sink and a manual clock, to run the pipeline without files, brokers or waiting.

They are for tests, and for programs that pass events to the pipeline from their own code.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deformer_stream.codec.payloads import Messages, Payload
from deformer_stream.engine.events import NO_TIME, Alert, ClosedRecords, Effects, Rejection
from deformer_stream.runtime.ports import PollResult

Message = bytes | tuple[bytes | None, bytes | None]
"""A message value, or a key and a value. A value of None is a tombstone (a message without a value)."""


class MemorySource:
    """A source that returns messages from an iterable, in order.

    Args:
        messages: The messages. The iterable is read only as far as it is polled.
        chunk: Number of messages per poll.
        topic: Name of the topic.
        partitions: Number of partitions. The CRC-32 of a message's key selects the partition; messages without a key go
            to partition 0. Offsets count up from 0 in each partition.
        time: Broker timestamp of all messages in microseconds since 1970, or `NO_TIME`.

    Attributes:
        committed: The offset after the last committed message, by partition.
        closed: Whether the source was closed.
    """

    def __init__(
        self,
        messages: Iterable[Message],
        *,
        chunk: int = 1024,
        topic: str = "memory",
        partitions: int = 1,
        time: int = NO_TIME,
    ) -> None:
        if chunk < 1 or partitions < 1:
            raise ValueError("chunk and partitions must be at least 1")
        self.committed: dict[int, int] = {}
        self.closed = False
        self._messages: Iterator[Message] = iter(messages)
        self._chunk = chunk
        self._topic = topic
        self._num_partitions = partitions
        self._time = time
        self._next_offsets: Counter[int] = Counter()
        self._is_exhausted = False

    @property
    def is_exhausted(self) -> bool:
        """Whether the end of the iterable was reached."""
        return self._is_exhausted

    def poll(self, timeout: float) -> PollResult:
        """Return the next `chunk` messages immediately; the timeout is ignored."""
        keys: list[bytes | None] = []
        payloads: list[bytes | None] = []
        partitions: list[int] = []
        offsets: list[int] = []
        while len(payloads) < self._chunk:
            try:
                message = next(self._messages)
            except StopIteration:
                self._is_exhausted = True
                break
            key, payload = message if isinstance(message, tuple) else (None, message)
            partition = zlib.crc32(key) % self._num_partitions if key else 0
            keys.append(key)
            payloads.append(payload)
            partitions.append(partition)
            offsets.append(self._next_offsets[partition])
            self._next_offsets[partition] += 1
        if not payloads:
            return PollResult(None)
        times = np.full(len(payloads), self._time, np.int64)
        partition_array, offset_array = np.array(partitions, np.int32), np.array(offsets, np.int64)
        return PollResult(Messages(self._topic, keys, payloads, times, partition_array, offset_array))

    def commit(self) -> None:
        """Store the offsets after all polled messages in `committed`."""
        self.committed = dict(self._next_offsets)

    def close(self) -> None:
        """Set `closed`."""
        self.closed = True


@dataclass
class MemorySink:
    """A sink that keeps all effects in lists.

    Attributes:
        effects: The effects that were written, one element per batch.
        data: The poll of each batch.
        flushed: How many of the effects had been written at the last flush.
        closed: Whether the sink was closed.
    """

    effects: list[Effects] = field(default_factory=list)
    data: list[Payload | None] = field(default_factory=list)
    flushed: int = 0
    closed: bool = False

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Append the effects of one batch and its poll to the lists."""
        self.effects.append(effects)
        self.data.append(data)

    def flush(self) -> None:
        """Update `flushed`."""
        self.flushed = len(self.effects)

    def close(self) -> None:
        """Set `closed`."""
        self.closed = True

    @property
    def alerts(self) -> list[Alert]:
        """All alerts."""
        return [alert for effects in self.effects for alert in effects.alerts]

    @property
    def rejected(self) -> list[Rejection]:
        """All rejections."""
        return [rejection for effects in self.effects for rejection in effects.rejections]

    @property
    def closings(self) -> list[ClosedRecords]:
        """The closed records of each batch that closed any."""
        return [effects.closed for effects in self.effects if len(effects.closed)]

    @property
    def scored(self) -> list[tuple[str, int, int, float, float, float]]:
        """One tuple per scored event: record id, feature code, place in the record, log-likelihood, score, p-value."""
        rows: list[tuple[str, int, int, float, float, float]] = []
        for effects in self.effects:
            scored, batch = effects.scored, effects.batch
            record_ids = [batch.record_ids[i] for i in scored.event_indices.tolist()]
            features = batch.features[scored.event_indices]
            columns = (features, scored.seq, scored.log_likelihood, scored.score, scored.p_value)
            rows += zip(record_ids, *(column.tolist() for column in columns), strict=True)
        return rows


class ManualClock:
    """A clock that moves only when `advance` is called.

    Attributes:
        time: Microseconds since 1970, UTC.
    """

    def __init__(self, start: int = 0) -> None:
        self.time = start

    def at(self, times: NDArray[np.int64]) -> int:
        """Return the clock's time; the event times are ignored."""
        return self.time

    def advance(self, seconds: float) -> int:
        """Move the clock forward and return the new time."""
        self.time += round(seconds * 1e6)
        return self.time
