"""Threads that read the logs of incidents, labels and suspicious records, and add what they return to the store.

A poll that returns nothing does not show that a log can be read: the clients of Kafka return nothing while no broker
responds. Therefore a log without new messages is asked at intervals whether it has any.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deformer_stream import log
from deformer_stream.errors import DeformerError, Unavailable
from deformer_stream.page.store import IncidentStore
from deformer_stream.runtime.incident_ports import FeedbackLog, FollowedLog, IncidentLog, NextReadingLog

POLL_SECONDS = 0.25
"""Longest time that a poll waits. It bounds the time that stopping takes."""
RETRY_SECONDS = 2.0
"""Time after which a log is read again if it could not be read."""
CHECK_SECONDS = 5.0
"""Time without messages after which a log is asked whether it has any."""
RESPONSE_SECONDS = 5.0
"""Longest time that the answer may take."""
UNREAD_SECONDS = 30.0
"""Longest time for which a log may have messages that no poll returns."""

LOGGER = log.get_logger("page.followers")


@dataclass(frozen=True, slots=True)
class LogStatus:
    """Whether a log can be read.

    Attributes:
        name: What the log holds, such as "incidents".
        is_caught_up: Whether everything has been read that the log held at the start.
        num_messages: Number of messages that were read.
        last_success: When messages last arrived, or the log last answered that it has no others, microseconds since
            1970; None before.
        failure: Why the log cannot be read now, None if it can.
        failing_since: The last success before the failure: messages since then may be missing. None if the log can be
            read.
    """

    name: str
    is_caught_up: bool = False
    num_messages: int = 0
    last_success: int | None = None
    failure: str | None = None
    failing_since: int | None = None


class LogFollower:
    """A thread that reads a log until it is stopped. If the log cannot be read, the thread tries again.

    Args:
        name: What the log holds.
        message_log: The log.
        add: Adds messages to the store.
        store: The store, whose listeners are notified if the status of the log changes.
    """

    def __init__(
        self, name: str, message_log: FollowedLog[Any], add: Callable[[Sequence[Any]], None], store: IncidentStore
    ) -> None:
        self._log, self._add, self._store = message_log, add, store
        self._status = LogStatus(name)
        self._stop = threading.Event()
        # Monotonic seconds of the last success, and of the last question whether there are messages.
        self._read_at, self._checked_at = time.monotonic(), float("-inf")
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
                self._record_poll(len(messages))
                if messages or self._check_end():
                    self._set_read()
            except DeformerError as error:
                self._set_failed(str(error))
                self._stop.wait(RETRY_SECONDS)
            except Exception as error:  # shown on the page and logged; the page stays up and the log is tried again
                LOGGER.exception("log_reader_failed", log=self._status.name)
                self._set_failed(f"{type(error).__name__}: {error}")
                self._stop.wait(RETRY_SECONDS)

    def _record_poll(self, num_messages: int) -> None:
        """Update the status after a poll that has returned."""
        earlier = self._status
        self._status = replace(
            earlier,
            is_caught_up=earlier.is_caught_up or self._log.is_caught_up,
            num_messages=earlier.num_messages + num_messages,
        )
        if self._status.is_caught_up != earlier.is_caught_up:
            self._store.touch()

    def _check_end(self) -> bool:
        """Return whether the log has just answered that it has no further messages. It is asked at intervals.

        Raises:
            Unavailable: The log does not answer, or has had messages that no poll returns for `UNREAD_SECONDS`.
        """
        now = time.monotonic()
        if self._status.failure is None and now - self._checked_at < CHECK_SECONDS:
            return False
        self._checked_at = now
        if self._log.has_read_to_end(RESPONSE_SECONDS):
            return True
        if time.monotonic() - self._read_at >= UNREAD_SECONDS:
            raise Unavailable(
                f"it has messages that have not arrived for {UNREAD_SECONDS:g} s: check the brokers that hold it"
            )
        return False

    def _set_read(self) -> None:
        """Update the status after messages have arrived, or it is known that there are no others."""
        self._read_at = self._checked_at = time.monotonic()
        earlier = self._status
        self._status = replace(earlier, last_success=self._store.now(), failure=None, failing_since=None)
        if earlier.failure is not None:
            LOGGER.info("log_readable_again", log=earlier.name)
            self._store.touch()

    def _set_failed(self, failure: str) -> None:
        """Update the status after a poll that has failed."""
        earlier = self._status
        since = earlier.failing_since or earlier.last_success or self._store.now()
        self._status = replace(earlier, failure=failure, failing_since=since)
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
