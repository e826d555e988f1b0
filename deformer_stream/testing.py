"""An in-memory source, an in-memory sink and a manual clock, to run the pipeline without files, brokers or waiting.

They are for tests, and for programs that pass messages to the pipeline from their own code. The pipeline reads messages
from a source, decodes and scores them, and writes the results to sinks.
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
from deformer_stream.runtime.ports import PollResult, SourceCallbacks

Message = bytes | tuple[bytes | None, bytes | None]
"""A message: only its value, or the tuple (key, value). A value of None is a tombstone (a message without a value)."""


class MemorySource:
    """A source that gives the pipeline the messages of an iterable, in the order of the iterable.

    Args:
        messages: The messages. Each is the message's value (bytes) or a tuple (key, value). The iterable may be lazy:
            each poll takes only the next `chunk` messages from it.
        chunk: Largest number of messages that a poll returns.
        topic: Name of the topic that the messages get.
        partitions: Number of partitions. The CRC-32 of a message's key selects the partition; messages without a key
            belong to partition 0. Offsets count up from 0 in each partition.
        time: Broker timestamp of all messages in microseconds since 1970, or `NO_TIME` for none.

    Attributes:
        committed: The committed offset by partition. `commit` sets it to the offset after the last polled message.
        closed: Whether the source was closed.
    """

    def __init__(
        self,
        messages: Iterable[Message],
        *,
        chunk: int = 1024,  # messages per poll
        topic: str = "memory",
        partitions: int = 1,
        time: int = NO_TIME,  # broker timestamp of all messages, in microseconds since 1970
    ) -> None:
        if chunk < 1 or partitions < 1:
            raise ValueError(
                f"a MemorySource cannot have chunk={chunk} and partitions={partitions}: both must be at least 1"
            )
        self.committed: dict[int, int] = {}
        self.closed = False
        self._messages: Iterator[Message] = iter(messages)
        self._chunk = chunk
        self._topic = topic
        self._num_partitions = partitions
        self._time = time
        self._next_offsets: Counter[int] = Counter()  # the offset of the next message of each partition
        self._is_exhausted = False

    def set_callbacks(self, callbacks: SourceCallbacks) -> None:
        """Do nothing: no call waits."""

    @property
    def is_exhausted(self) -> bool:
        """Whether a poll has reached the end of the iterable, so that no further message follows."""
        return self._is_exhausted

    def poll(self, timeout: float) -> PollResult:
        """Return the next messages of the iterable, at most `chunk` of them.

        Args:
            timeout: Ignored, because the messages are available immediately.

        Returns:
            A result with the messages, or with None in their place if no message is left.
        """
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
        """Commit all polled messages, by storing the offset of the next message of each partition in `committed`."""
        self.committed = dict(self._next_offsets)

    def close(self) -> None:
        """Set the attribute `closed` to True, so that a test can check it. The source needs no other cleanup."""
        self.closed = True


@dataclass
class MemorySink:
    """A sink of the pipeline that stores everything that is written to it in lists.

    The pipeline processes messages in batches. The effects of a batch are its scores, alerts, rejections and closed
    records.

    Attributes:
        effects: The effects that were written, one element per batch.
        data: The polled messages of each batch, in the order of `effects`; None for a batch without messages.
        flushed: The length of `effects` at the last flush.
        closed: Whether the sink was closed.
    """

    effects: list[Effects] = field(default_factory=list)
    data: list[Payload | None] = field(default_factory=list)
    flushed: int = 0
    closed: bool = False

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Append the effects of one batch (its scores, alerts, …) and its polled messages to the lists."""
        self.effects.append(effects)
        self.data.append(data)

    def flush(self) -> None:
        """Store in `flushed` how many batches have been written, so that a test can check when the sink was flushed."""
        self.flushed = len(self.effects)

    def close(self) -> None:
        """Set the attribute `closed` to True, so that a test can check it. The sink needs no other cleanup."""
        self.closed = True

    @property
    def alerts(self) -> list[Alert]:
        """The alerts of all batches, in the order in which they were written."""
        return [alert for effects in self.effects for alert in effects.alerts]

    @property
    def rejected(self) -> list[Rejection]:
        """The rejected readings of all batches with the reasons, in the order in which they were written."""
        return [rejection for effects in self.effects for rejection in effects.rejections]

    @property
    def closings(self) -> list[ClosedRecords]:
        """The records that each batch closed: one element per batch, except for batches that closed no record."""
        return [effects.closed for effects in self.effects if len(effects.closed)]

    @property
    def scored(self) -> list[tuple[str, int, int, float, float, float]]:
        """One tuple for each scored reading, in the order in which the readings were scored.

        A tuple holds the record id, the feature code (index in the schema) and the index of the reading in its record
        (from 0). Then it has the log-likelihood of the reading, and the record's anomaly score and p-value after the
        reading.
        """
        rows: list[tuple[str, int, int, float, float, float]] = []
        for effects in self.effects:
            # `scored` has one entry per scored reading, and refers to the decoded events by their index in `batch`.
            scored, batch = effects.scored, effects.batch
            record_ids = [batch.record_ids[i] for i in scored.event_indices.tolist()]
            features = batch.features[scored.event_indices]
            columns = (features, scored.seq, scored.log_likelihood, scored.score, scored.p_value)
            rows += zip(record_ids, *(column.tolist() for column in columns), strict=True)
        return rows


class ManualClock:
    """A clock of the pipeline whose time changes only when `advance` is called, for tests of time-outs.

    Args:
        start: The first time in microseconds since 1970, UTC.

    Attributes:
        time: The current time in microseconds since 1970, UTC.
    """

    def __init__(self, start: int = 0) -> None:
        self.time = start

    def at(self, times: NDArray[np.int64]) -> int:
        """Return the clock's time in microseconds since 1970, UTC.

        Args:
            times: The event times of a batch; ignored here. Other clocks of the pipeline derive the time from them.
        """
        return self.time

    def advance(self, seconds: float) -> int:
        """Move the clock forward by `seconds`, and return the new time in microseconds since 1970, UTC."""
        self.time += round(seconds * 1e6)
        return self.time
