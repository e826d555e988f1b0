"""Protocols of the delivery of incidents: logs of incidents and of labels, and receivers of notifications."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from deformer_stream.engine.events import SuspiciousRecord
from deformer_stream.incidents.events import FeedbackLabel, Incident
from deformer_stream.incidents.overlay import Presentation
from deformer_stream.runtime.existing_messages import Message, ReadableLog


class FollowedLog(ReadableLog[Message], Protocol):
    """A log that is read to its end, and then further.

    The first polls return the messages that the log holds, later polls those that were added since.
    """

    def has_read_to_end(self, timeout: float) -> bool:
        """Request whether `poll` has returned everything that the log holds now.

        A poll without messages does not show that the log can be read.

        Args:
            timeout: Longest time to wait for the response in seconds.

        Raises:
            Unavailable: The log does not respond.
        """

    def close(self) -> None:
        """Release the resources of the log."""


class IncidentLog(FollowedLog[Incident], Protocol):
    """A log of incidents, such as the topic `TOPIC-incidents`. Of messages with the same id, the last one is valid."""


class FeedbackLog(FollowedLog[FeedbackLabel], Protocol):
    """A log of labels, for example the topic `TOPIC-feedback`: the labels of operators are appended and read."""

    def append(self, label: FeedbackLabel) -> None:
        """Append a label. Blocks until it is durable.

        Raises:
            Unavailable: It could not be stored.
        """


NextReadingMessage = tuple[str, SuspiciousRecord | None]
"""A record id, and what is stated for the record. None withdraws what was stated before."""


class NextReadingLog(FollowedLog[NextReadingMessage], Protocol):
    """A log of suspicious records with the readings to take next, for example the topic `TOPIC-next-readings`."""


@dataclass(frozen=True, slots=True)
class LoggedIncident:
    """A message of the log of incidents, with its position.

    Attributes:
        incident: The state of the incident.
        partition: Number of the partition of the log.
        offset: Offset of the message in its partition.
    """

    incident: Incident
    partition: int
    offset: int


ReceiverState = Literal["hidden", "opening", "shown", "resolving"]
"""The state of an incident at a receiver, according to the notifications that were sent.

    hidden      the receiver does not show the incident as open
    opening     the opening was sent, and it is not known whether the receiver has accepted it
    shown       the receiver shows the incident as open
    resolving   the resolution was sent, and it is not known whether the receiver has accepted it
"""


@dataclass(frozen=True, slots=True)
class DeliveryProgress:
    """How far a receiver was notified of the messages of one partition.

    For an incident whose last message is before `position`, the state at the receiver is that in `state_by_id`. An
    incident that is not in it is hidden there if it is resolved or included in a fleet incident, and shown otherwise.

    Attributes:
        position: Offset of the first message of which the receiver may not have been notified.
        state_by_id: The exceptions: the states at the receiver of the incidents of which it was not notified yet,
            or which are silenced, by id. If there are many, the keys are shortened ids
            (`notification_backlog.shorten_id`).
        first_position: Offset of the first message after the log was opened for the first time. The receiver is not
            notified of an incident that was resolved before.
    """

    position: int
    state_by_id: Mapping[str, ReceiverState] = field(default_factory=dict)
    first_position: int = 0


class DeliveryLog(Protocol):
    """The log of incidents as a receiver's worker reads it: with positions, and with the receiver's progress.

    Every start reads the log from its beginning. If several processes notify the same receiver, each partition is
    given to one of them. `connectors.kafka.incident_deliveries` has the implementation for Kafka.
    """

    def poll(self, timeout: float) -> Sequence[LoggedIncident]:
        """Return messages that were not returned before, after at most `timeout` seconds; empty if there are none.

        Raises:
            Unavailable: The log cannot be read now. A later call may succeed.
        """

    @property
    def is_caught_up(self) -> bool:
        """Whether `poll` has returned everything that the log held when its partitions were assigned."""

    @property
    def generation(self) -> int:
        """A number that changes if other partitions are assigned. The caller then drops what was read before."""

    @property
    def first_positions(self) -> Mapping[int, int]:
        """Offset after the last message that each partition held when the log was opened."""

    @property
    def positions(self) -> Mapping[int, int]:
        """Offset after the last message that `poll` has returned or skipped, by partition."""

    def load_progress(self) -> Mapping[int, DeliveryProgress]:
        """Return the stored progress of the assigned partitions. A partition without progress is left out.

        Raises:
            Unavailable: It cannot be read now.
        """

    def store_progress(self, progress: Mapping[int, DeliveryProgress]) -> None:
        """Store the progress by partition. Progress of partitions that are not assigned any more is not stored.

        Raises:
            Unavailable: It could not be stored.
        """

    def close(self) -> None:
        """Release the log's resources."""


Action = Literal["open", "update", "resolve"]
"""The kind of a notification: "open" if the incident has opened, was reopened, or is not silenced any more, "update" if
it has changed, "resolve" if it was resolved or silenced."""


@dataclass(frozen=True, slots=True)
class Notification:
    """A message about an incident for a receiver.

    Attributes:
        incident: The state of the incident.
        action: The kind of the notification.
        key: Idempotency key: a message that is sent again after a restart has the same key.
        presentation: The label of the incident, and whether and why it is silenced.
        body: The incident as JSON, in the format of the log.
        url: Address of the incident on the operator's page, None without `--external-url`.
    """

    incident: Incident
    action: Action
    key: str
    presentation: Presentation
    body: bytes
    url: str | None = None


class TemporaryFailure(Exception):  # noqa: N818 - a state, not an error of the program
    """A receiver could not take a notification, and may take it later.

    Args:
        message: What failed.
        retry_after: Seconds that the receiver asks to wait, None if it states nothing.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class PermanentFailure(Exception):  # noqa: N818 - a state, not an error of the program
    """A receiver has refused a notification, and would refuse it again."""


@runtime_checkable
class BatchReceiver(Protocol):
    """A `Receiver` that takes several notifications in one request.

    Attributes:
        max_batch: Largest number of notifications in one request.
    """

    max_batch: int

    def send_batch(self, notifications: Sequence[Notification]) -> None:
        """Send notifications of different incidents. Sending them again has no further effect.

        Raises:
            TemporaryFailure: The receiver could not be reached, or asks to try again. Some may have been accepted.
            PermanentFailure: The receiver has refused one of them. Others may have been accepted.
        """


class Receiver(Protocol):
    """A system that is notified of incidents, such as Alertmanager.

    Attributes:
        name: Name of the receiver in metrics and logs, without secrets.
        identity: Name under which the receiver's progress is stored: letters, digits and hyphens. It depends on the
            receiver's address, and not on the other receivers.
        wants_updates: Whether it gets updates, not only openings and resolutions.
        resend_seconds: Seconds after which an open incident is sent again, None if it is sent once.
    """

    name: str
    identity: str
    wants_updates: bool
    resend_seconds: float | None

    def send(self, notification: Notification) -> None:
        """Send a notification. Sending it again has no further effect, unless the receiver cannot recognise it.

        Raises:
            TemporaryFailure: The receiver could not be reached, or asks to try again.
            PermanentFailure: The receiver has refused the notification.
        """

    def close(self) -> None:
        """Release the receiver's resources."""
