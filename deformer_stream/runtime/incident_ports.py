"""Protocols of the processes around incidents: logs of incidents and of labels, and receivers of notifications."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from deformer_stream.incidents.events import FeedbackLabel, Incident


class IncidentLog(Protocol):
    """A reader of the log of incidents, for example of the topic `TOPIC-incidents`.

    The first polls return the incidents that the log holds, later ones what is added. Only the last message of an id
    counts.
    """

    def poll(self, timeout: float) -> Sequence[Incident]:
        """Return messages that were not returned before, after at most `timeout` seconds; empty if there are none."""

    @property
    def is_caught_up(self) -> bool:
        """Whether `poll` has returned everything that the log held when it was opened."""

    def close(self) -> None:
        """Release the reader's resources."""


class FeedbackLog(Protocol):
    """A log of labels, for example the topic `TOPIC-feedback`: the labels of operators are appended and read."""

    def append(self, label: FeedbackLabel) -> None:
        """Append a label. Blocks until it is durable.

        Raises:
            Unavailable: It could not be stored.
        """

    def poll(self, timeout: float) -> Sequence[FeedbackLabel]:
        """Return labels that were not returned before, after at most `timeout` seconds; empty if there are none."""

    @property
    def is_caught_up(self) -> bool:
        """Whether `poll` has returned everything that the log held when it was opened."""

    def close(self) -> None:
        """Release the log's resources."""


@dataclass(frozen=True, slots=True)
class Notification:
    """A message about an incident for a receiver.

    Attributes:
        incident: The state of the incident.
        action: "open" when the incident has opened or was reopened, "update" for a change, "resolve" when it is over or
            was silenced.
        body: The incident as JSON, exactly as the log holds it.
        url: Address of the incident on the operator's page, None without `--external-url`.
    """

    incident: Incident
    action: Literal["open", "update", "resolve"]
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


class Receiver(Protocol):
    """A system that is notified of incidents, such as Alertmanager.

    Attributes:
        name: Name of the receiver in metrics and logs, without secrets.
        wants_updates: Whether it gets updates, not only openings and resolutions.
        resend_seconds: Seconds after which an open incident is sent again, None if it is sent once.
    """

    name: str
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
