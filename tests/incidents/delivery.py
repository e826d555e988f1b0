"""A log of incidents with progress in memory, a receiver with a script, and a clock that tests set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deformer_stream.errors import Unavailable
from deformer_stream.incidents.events import Incident
from deformer_stream.runtime.incident_ports import (
    DeliveryProgress,
    LoggedIncident,
    Notification,
    PermanentFailure,
    TemporaryFailure,
)


class ManualClock:
    """A clock that advances when a test says so.

    Attributes:
        seconds: The time.
    """

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.seconds


@dataclass
class Topic:
    """The incidents of a topic with one partition, and the progress of a receiver. Both survive a restart.

    Attributes:
        messages: The messages, None for those that compaction has removed.
        progress: The stored progress.
        is_available: Whether it can be read and written.
    """

    messages: list[Incident | None] = field(default_factory=list)
    progress: dict[int, DeliveryProgress] = field(default_factory=dict)
    is_available: bool = True

    def append(self, incident: Incident) -> None:
        """Append a message."""
        self.messages.append(incident)

    def compact(self) -> None:
        """Remove the messages that have a later one of the same incident."""
        last = {message.id: offset for offset, message in enumerate(self.messages) if message is not None}
        self.messages = [
            message if message is not None and last[message.id] == offset else None
            for offset, message in enumerate(self.messages)
        ]


class TopicReader:
    """A `DeliveryLog` that reads a `Topic` and never waits."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._end = len(topic.messages)
        self.first_positions = {0: self._end}
        self._position = 0
        self.generation = 0
        self.num_stored = 0
        self.is_closed = False

    def poll(self, timeout: float) -> Sequence[LoggedIncident]:
        """Return at most three messages."""
        self._check_available()
        start, self._position = self._position, min(self._position + 3, len(self._topic.messages))
        return [
            LoggedIncident(message, 0, offset)
            for offset, message in enumerate(self._topic.messages[start : self._position], start)
            if message is not None
        ]

    def reassign(self) -> None:
        """Start again from the beginning, as if the partition was given to this reader again."""
        self.generation += 1
        self._position, self._end = 0, len(self._topic.messages)

    @property
    def is_caught_up(self) -> bool:
        """Whether everything was returned that was there when the reader was created."""
        return self._position >= self._end

    @property
    def positions(self) -> Mapping[int, int]:
        """The offset after the last message that was returned."""
        return {0: self._position}

    def load_progress(self) -> Mapping[int, DeliveryProgress]:
        """Return the stored progress."""
        self._check_available()
        return dict(self._topic.progress)

    def store_progress(self, progress: Mapping[int, DeliveryProgress]) -> None:
        """Store the progress."""
        self._check_available()
        self.num_stored += 1
        self._topic.progress.update(progress)

    def close(self) -> None:
        """Record that the reader was closed."""
        self.is_closed = True

    def _check_available(self) -> None:
        """Raise `Unavailable` if the topic is not available."""
        if not self._topic.is_available:
            raise Unavailable("the broker is away: start it")


class ScriptedReceiver:
    """A receiver that fails as its script says, and records what it has accepted.

    Attributes:
        name: Its name.
        wants_updates: Whether it gets updates.
        resend_seconds: Seconds after which open incidents are sent again.
        script: The outcomes of the next requests: an exception or None. Without an entry, a request succeeds.
        refused: Ids of incidents that are always refused.
        accepted: The notifications that were accepted.
        attempts: All notifications.
    """

    def __init__(
        self, name: str = "scripted", *, wants_updates: bool = False, resend_seconds: float | None = None
    ) -> None:
        self.identity = name
        self.name, self.wants_updates, self.resend_seconds = name, wants_updates, resend_seconds
        self.script: list[TemporaryFailure | PermanentFailure | None] = []
        self.refused: set[str] = set()
        self.is_down = False
        self.accepted: list[Notification] = []
        self.attempts: list[Notification] = []
        self.is_closed = False

    def send(self, notification: Notification) -> None:
        """Accept a notification, or fail as the script says."""
        self.attempts.append(notification)
        outcome = self.script.pop(0) if self.script else None
        if outcome is not None:
            raise outcome
        if self.is_down:
            raise TemporaryFailure("the receiver is down")
        if notification.incident.id in self.refused:
            raise PermanentFailure("the receiver refuses this incident")
        self.accepted.append(notification)

    def close(self) -> None:
        """Record that the receiver was closed."""
        self.is_closed = True

    def list_actions(self, identifier: str | None = None) -> list[str]:
        """Return the accepted actions, of one incident or of all."""
        return [
            notification.action
            for notification in self.accepted
            if identifier is None or notification.incident.id == identifier
        ]


class ScriptedBatchReceiver(ScriptedReceiver):
    """A `ScriptedReceiver` that takes several notifications in one request.

    Attributes:
        max_batch: Largest number of notifications in one request.
        batch_sizes: Number of notifications of each request with more than one.
    """

    max_batch = 8

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.batch_sizes: list[int] = []

    def send_batch(self, notifications: Sequence[Notification]) -> None:
        """Accept the notifications, or some of them and then fail as the script says."""
        assert 1 < len(notifications) <= self.max_batch
        self.batch_sizes.append(len(notifications))
        for notification in notifications:
            self.send(notification)
