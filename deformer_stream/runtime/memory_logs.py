"""Logs of incidents, labels and suspicious records in memory, for `demo --page` in one process, and for tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Generic, TypeVar

from deformer_stream.codec.payloads import Payload
from deformer_stream.engine.events import Effects
from deformer_stream.incidents.events import FeedbackLabel, Incident
from deformer_stream.runtime.incident_ports import NextReadingMessage

Message = TypeVar("Message")


class _MemoryLog(Generic[Message]):
    """A list of messages that one thread may append to while another one reads it."""

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        self._messages = list(messages)
        self._num_read = 0
        self._changed = threading.Condition()

    def append(self, message: Message) -> None:
        """Append a message and wake a waiting reader."""
        with self._changed:
            self._messages.append(message)
            self._changed.notify_all()

    def poll(self, timeout: float) -> Sequence[Message]:
        """Return messages that were not returned before, after at most `timeout` seconds; empty if there are none."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_read < len(self._messages), timeout)
            messages = self._messages[self._num_read :]
            self._num_read = len(self._messages)
        return messages

    @property
    def is_caught_up(self) -> bool:
        """Whether `poll` has returned all messages."""
        with self._changed:
            return self._num_read == len(self._messages)

    def has_read_to_end(self, timeout: float) -> bool:
        """Return whether `poll` has returned all messages."""
        return self.is_caught_up

    def close(self) -> None:
        """Do nothing; the messages stay readable."""


class MemoryIncidentLog(_MemoryLog[Incident]):
    """A log of incidents in memory, an `IncidentLog`."""


class MemoryFeedbackLog(_MemoryLog[FeedbackLabel]):
    """A log of labels in memory, a `FeedbackLog`."""


class MemoryNextReadingLog(_MemoryLog[NextReadingMessage]):
    """A log of suspicious records in memory, a `NextReadingLog`, and a `Sink` that appends those of a batch to it."""

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Append the suspicious records of one batch, and the withdrawn ones."""
        for _, record in effects.withdrawn_records:
            self.append((record, None))
        for suspicious in effects.suspicious_records:
            self.append((suspicious.record, suspicious))

    def flush(self) -> None:
        """Do nothing; a message can be read when it is appended."""
