"""An embedded source, a collecting sink and a settable clock: the road without files, brokers or waiting.

For tests, and for programs that feed the engine from their own code.
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
"""A payload, or a key and a payload; a payload of None is a tombstone."""


class MemorySource:
    """Serves messages from an iterable, `chunk` per poll, in order; the iterable is read no further than it is polled.

    partitions: a keyed message goes to the partition given by its key's CRC-32, all others to partition 0; offsets
    count up per partition. time: the broker's timestamp of every message, microseconds. `committed` holds the next
    offset per partition as of the last commit."""

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
        self._pending: Iterator[Message] = iter(messages)
        self._chunk = chunk
        self._topic = topic
        self._partitions = partitions
        self._time = time
        self._next: Counter[int] = Counter()
        self._exhausted = False

    @property
    def exhausted(self) -> bool:
        return self._exhausted

    def poll(self, timeout: float) -> PollResult:
        """The next `chunk` messages, at once, whatever the timeout."""
        keys: list[bytes | None] = []
        payloads: list[bytes | None] = []
        partitions: list[int] = []
        offsets: list[int] = []
        while len(payloads) < self._chunk:
            try:
                message = next(self._pending)
            except StopIteration:
                self._exhausted = True
                break
            key, payload = message if isinstance(message, tuple) else (None, message)
            partition = zlib.crc32(key) % self._partitions if key else 0
            keys.append(key)
            payloads.append(payload)
            partitions.append(partition)
            offsets.append(self._next[partition])
            self._next[partition] += 1
        if not payloads:
            return PollResult(None)
        times = np.full(len(payloads), self._time, np.int64)
        where = np.array(partitions, np.int32), np.array(offsets, np.int64)
        return PollResult(Messages(self._topic, keys, payloads, times, *where))

    def commit(self) -> None:
        self.committed = dict(self._next)

    def close(self) -> None:
        self.closed = True


@dataclass
class MemorySink:
    """Collects effects. What was written is visible at once; `flushed` counts how many of the effects a flush has
    covered."""

    effects: list[Effects] = field(default_factory=list)
    data: list[Payload | None] = field(default_factory=list)
    flushed: int = 0
    closed: bool = False

    def write(self, effects: Effects, data: Payload | None) -> None:
        self.effects.append(effects)
        self.data.append(data)

    def flush(self) -> None:
        self.flushed = len(self.effects)

    def close(self) -> None:
        self.closed = True

    @property
    def alerts(self) -> list[Alert]:
        return [alert for effects in self.effects for alert in effects.alerts]

    @property
    def rejected(self) -> list[Rejection]:
        return [rejected for effects in self.effects for rejected in effects.rejections]

    @property
    def closings(self) -> list[ClosedRecords]:
        return [effects.closed for effects in self.effects if len(effects.closed)]

    @property
    def scored(self) -> list[tuple[str, int, int, float, float, float]]:
        """Per accepted event: record, feature code, seq, log-likelihood, score, p-value."""
        rows: list[tuple[str, int, int, float, float, float]] = []
        for effects in self.effects:
            s, batch = effects.scored, effects.batch
            records = [batch.record_ids[e] for e in s.event_indices.tolist()]
            numbers = (batch.features[s.event_indices], s.seq, s.log_likelihood, s.score, s.p_value)
            rows += zip(records, *(column.tolist() for column in numbers), strict=True)
        return rows


class ManualClock:
    """A clock that stands still until it is told otherwise. Times are microseconds since 1970, UTC."""

    def __init__(self, start: int = 0) -> None:
        self.time = start

    def at(self, times: NDArray[np.int64]) -> int:
        return self.time

    def advance(self, seconds: float) -> int:
        """Move on, and return the new time."""
        self.time += round(seconds * 1e6)
        return self.time
