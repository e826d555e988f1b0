"""Threads that read the logs of incidents, labels and suspicious records, and add what they return to the store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from deformer_stream import log
from deformer_stream.errors import DeformerError
from deformer_stream.page.store import IncidentStore
from deformer_stream.runtime.incident_ports import FeedbackLog, IncidentLog, NextReadingLog

POLL_SECONDS = 0.25
"""Longest time that a poll waits. It bounds the time that stopping takes."""
RETRY_SECONDS = 2.0
"""Time after which a log is read again if it could not be read."""

LOGGER = log.get_logger("page.followers")


@dataclass(frozen=True, slots=True)
class LogStatus:
    """Whether a log can be read.

    Attributes:
        name: What the log holds, such as "incidents".
        is_caught_up: Whether everything has been read that the log held at the start.
        num_messages: Number of messages that were read.
        last_success: When a poll last returned, microseconds since 1970; None before.
        failure: Why the log cannot be read now, None if it can.
        failing_since: Since when it cannot be read, None if it can.
    """

    name: str
    is_caught_up: bool = False
    num_messages: int = 0
    last_success: int | None = None
    failure: str | None = None
    failing_since: int | None = None


class _Log(Protocol):
    """The methods of a log that a follower uses."""

    def poll(self, timeout: float) -> Sequence[Any]:
        """Return new messages."""

    @property
    def is_caught_up(self) -> bool:
        """Whether everything has been returned that the log held at the start."""


class LogFollower:
    """A thread that reads a log until it is stopped. If the log cannot be read, the thread tries again.

    Args:
        name: What the log holds.
        message_log: The log.
        add: Adds messages to the store.
        store: The store, whose listeners are notified if the status of the log changes.
    """

    def __init__(
        self, name: str, message_log: _Log, add: Callable[[Sequence[Any]], None], store: IncidentStore
    ) -> None:
        self._log, self._add, self._store = message_log, add, store
        self._status = LogStatus(name)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"follow-{name}", daemon=True)

    @property
    def status(self) -> LogStatus:
        """Whether the log can be read."""
        return self._status

    @property
    def is_running(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        """Read the log until the follower is stopped."""
        while not self._stop.is_set():
            try:
                messages = self._log.poll(POLL_SECONDS)
                self._add(messages)
                self._set_read(len(messages))
            except DeformerError as error:
                self._set_failed(str(error))
                self._stop.wait(RETRY_SECONDS)
            except Exception as error:  # shown on the page and logged; the page stays up and the log is tried again
                LOGGER.exception("log_reader_failed", log=self._status.name)
                self._set_failed(f"{type(error).__name__}: {error}")
                self._stop.wait(RETRY_SECONDS)

    def _set_read(self, num_messages: int) -> None:
        """Update the status after a poll that has returned."""
        earlier = self._status
        self._status = replace(
            earlier,
            is_caught_up=earlier.is_caught_up or self._log.is_caught_up,
            num_messages=earlier.num_messages + num_messages,
            last_success=self._store.now(),
            failure=None,
            failing_since=None,
        )
        if earlier.failure is not None:
            LOGGER.info("log_readable_again", log=earlier.name)
        if earlier.failure is not None or self._status.is_caught_up != earlier.is_caught_up:
            self._store.touch()

    def _set_failed(self, failure: str) -> None:
        """Update the status after a poll that has failed."""
        earlier = self._status
        self._status = replace(earlier, failure=failure, failing_since=earlier.failing_since or self._store.now())
        if failure != earlier.failure:
            LOGGER.warning("log_not_readable", log=earlier.name, error=failure)
            self._store.touch()


def follow_logs(
    store: IncidentStore, incident_log: IncidentLog, feedback_log: FeedbackLog, next_reading_log: NextReadingLog
) -> tuple[LogFollower, ...]:
    """Start to read all logs into a store, and return the followers."""
    followers = (
        LogFollower("incidents", incident_log, store.add_incidents, store),
        LogFollower("labels", feedback_log, store.add_labels, store),
        LogFollower("suspicious records", next_reading_log, store.add_suspicious_records, store),
    )
    for follower in followers:
        follower.start()
    return followers
