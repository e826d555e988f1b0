"""Notification of receivers of incidents, such as Alertmanager: one worker thread for each receiver.

    TOPIC-incidents ─► DeliveryLog ─► Backlog ─► Receiver.send
    TOPIC-feedback  ─► labels ────────►

A worker reads the log with the receiver's own progress. A receiver that hangs, refuses notifications or cannot be
reached therefore holds up neither the detection of incidents nor other receivers. Nothing is lost: what the receiver
has missed is sent when it answers again, also after a restart. Delivery is at least once. A notification that is sent
again has the same key.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from deformer_stream import log
from deformer_stream.errors import DeformerError
from deformer_stream.incidents.overlay import Overlay
from deformer_stream.runtime.incident_metrics import DELIVERED, FAILED, REFUSED, DeliveryMetrics, OpenIncidentMetrics
from deformer_stream.runtime.incident_ports import (
    BatchReceiver,
    DeliveryLog,
    DeliveryProgress,
    FeedbackLog,
    IncidentLog,
    LoggedIncident,
    Notification,
    PermanentFailure,
    Receiver,
    TemporaryFailure,
)
from deformer_stream.runtime.notification_backlog import Backlog, Entry

FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 300.0
"""Seconds until the second attempt, and largest number of seconds between attempts. The time doubles each time."""

MAX_RETRY_AFTER_SECONDS = 3600.0
"""Longest time that a receiver can ask to wait."""

REFUSED_RETRY_SECONDS = 3600.0
"""Seconds until a refused notification is sent again."""

COMMIT_SECONDS = 1.0
"""Shortest time between two commits of the progress."""

POLL_SECONDS = 1.0
"""Longest time that a worker waits for messages."""

MAX_SENT_IN_SEQUENCE = 16
"""Number of notifications after which the log is polled again."""


def compute_backoff(num_failures: int, key: str) -> float:
    """Return the seconds to wait after a failed attempt, from half of to all of the exponential time.

    The fraction is a hash of the key and of the number of failures. So senders do not all try again at the same moment,
    and tests need no random numbers.

    Args:
        num_failures: Number of failed attempts in sequence, at least 1.
        key: Key of the notification.
    """
    seconds = min(FIRST_RETRY_SECONDS * 2.0 ** min(num_failures - 1, 32), MAX_RETRY_SECONDS)
    digest = hashlib.sha256(f"{key}:{num_failures}".encode()).digest()
    return seconds * (0.5 + 0.5 * int.from_bytes(digest[:4], "big") / 2**32)


class ReceiverWorker:
    """Notifies one receiver of the incidents of a log. Only the thread that calls `run_once` may use it.

    Args:
        receiver: The receiver.
        incidents: The log of incidents, with the progress of this receiver.
        labels: The log of labels, None without labels.
        metrics: Metrics of all receivers.
        url: Address of the operator's page, None without links.
        now: Returns monotonic seconds.
    """

    def __init__(
        self,
        receiver: Receiver,
        incidents: DeliveryLog,
        labels: FeedbackLog | None,
        metrics: DeliveryMetrics,
        url: str | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._receiver, self._incidents, self._labels = receiver, incidents, labels
        self._metrics, self._url, self._now = metrics, url, now
        self._max_batch = receiver.max_batch if isinstance(receiver, BatchReceiver) else 1
        self._log = log.get_logger("notification")
        self._overlay = Overlay()
        self._generation = incidents.generation
        self._backlog: Backlog | None = None  # None until partitions are assigned and their progress is loaded
        self._unadded: deque[LoggedIncident] = deque()  # messages that were polled and are not in the backlog yet
        self._has_started = False  # whether the backlog has everything that the logs held at the start
        self._num_failures = 0  # of the receiver, in sequence
        self._paused_until = float("-inf")
        self._stored: dict[int, DeliveryProgress] = {}
        self._stored_at = float("-inf")
        metrics.add_receiver(receiver.name, self._count_pending, self._measure_oldest)

    def run_once(self) -> None:
        """Read the logs, send notifications that are due, and store the progress.

        Blocks for at most `POLL_SECONDS`, and as long as the receiver takes to answer.

        Raises:
            Unavailable: A log cannot be read or the progress cannot be stored. A later call continues.
        """
        messages = self._incidents.poll(0.0 if self._has_work() else self._find_pause())
        if self._incidents.generation != self._generation:
            # Other partitions were assigned: load their progress, and read the log from its beginning.
            self._generation = self._incidents.generation
            self._backlog, self._has_started = None, False
            self._unadded.clear()
        self._unadded.extend(messages)
        if self._backlog is None:
            self._backlog = self._load_backlog()
        while self._unadded:
            self._backlog.add(self._unadded.popleft(), self._now())
        for label in () if self._labels is None else self._labels.poll(0.0):
            self._backlog.add_label(label, self._now())
        if not self._has_started:
            # Without all labels, an incident that a person has silenced would be sent again.
            if not self._incidents.is_caught_up or not (self._labels is None or self._labels.is_caught_up):
                return
            self._has_started = True
            self._backlog.start(self._now())
            self._store_progress(self._backlog)
        for _ in range(MAX_SENT_IN_SEQUENCE):
            if not self._send_next(self._backlog):
                break
        if self._now() - self._stored_at >= COMMIT_SECONDS:
            self._store_progress(self._backlog)

    def _load_backlog(self) -> Backlog:
        """Return the backlog with the progress of an earlier run; what was polled meanwhile is not in it yet.

        Raises:
            Unavailable: The progress cannot be loaded, or that of a first start cannot be stored.
        """
        self._stored = dict(self._incidents.load_progress())
        backlog = Backlog(
            self._receiver.wants_updates,
            self._stored,
            self._incidents.first_positions,
            self._overlay,
            self._url,
            self._receiver.resend_seconds,
        )
        self._store_first_positions()
        return backlog

    def close(self) -> None:
        """Store the progress and close the logs and the receiver.

        Raises:
            Unavailable: The progress could not be stored. What was sent since it was last stored is sent again.
        """
        try:
            if self._backlog is not None and self._has_started:
                self._store_progress(self._backlog)
        finally:
            self._incidents.close()
            if self._labels is not None:
                self._labels.close()
            self._receiver.close()

    def _list_next(self, backlog: Backlog) -> list[Entry]:
        """Return the incidents whose notifications are sent now, none if the receiver is paused."""
        now = self._now()
        return [] if now < self._paused_until else backlog.list_due(now, self._max_batch)

    def _has_work(self) -> bool:
        """Return whether a notification can be sent now."""
        return self._backlog is not None and self._has_started and bool(self._list_next(self._backlog))

    def _find_pause(self) -> float:
        """Return the seconds until the next notification is due, at most `POLL_SECONDS`."""
        if self._backlog is None or not self._has_started:
            return POLL_SECONDS
        next_time = max(self._backlog.find_next_time(self._now()), self._paused_until)
        return min(max(next_time - self._now(), 0.0), POLL_SECONDS)

    def _send_next(self, backlog: Backlog) -> bool:
        """Send the notifications that are due, as many as one request can have, and return whether there were any."""
        entries = self._list_next(backlog)
        if entries:
            self._send_entries(backlog, entries)
        return bool(entries)

    def _send_entries(self, backlog: Backlog, entries: Sequence[Entry]) -> None:
        """Send the notifications of incidents in one request. If it is refused, send each in a request of its own."""
        sent = [(entry, backlog.make_notification(entry), entry.is_uncertain) for entry in entries]
        uncertain = [entry for entry, notification, was in sent if notification.action != "update" and not was]
        if uncertain:
            # The process may be killed before the next commit. If the incident then changes before the next start, the
            # progress must say that the receiver may have been notified.
            for entry in uncertain:
                backlog.mark_uncertain(entry)
            try:
                self._store_progress(backlog)
            except Exception:  # nothing was sent, and the next attempt must store it again
                for entry in uncertain:
                    entry.is_uncertain = False
                raise
        try:
            if len(sent) > 1 and isinstance(self._receiver, BatchReceiver):
                self._receiver.send_batch([notification for _, notification, _ in sent])
            else:
                self._receiver.send(sent[0][1])
        except TemporaryFailure as failure:
            self._handle_failure(backlog, [(entry, notification) for entry, notification, _ in sent], failure)
        except PermanentFailure as failure:
            self._num_failures = 0
            if len(sent) > 1:  # find the one that is refused; the others are accepted again without effect
                for entry in entries:
                    if self._now() >= self._paused_until:
                        self._send_entries(backlog, [entry])
                return
            ((entry, notification, was_uncertain),) = sent
            backlog.mark_refused(entry, self._now() + REFUSED_RETRY_SECONDS, was_uncertain)
            self._metrics.record(self._receiver.name, REFUSED)
            self._report("error", "notification_refused", notification, str(failure), REFUSED_RETRY_SECONDS)
        else:
            if self._num_failures:
                self._log.info("receiver_answers_again", receiver=self._receiver.name)
            self._num_failures = 0
            for entry, notification, _ in sent:
                backlog.mark_sent(entry, notification, self._now())
                self._metrics.record(self._receiver.name, DELIVERED)

    def _handle_failure(
        self, backlog: Backlog, sent: Sequence[tuple[Entry, Notification]], failure: TemporaryFailure
    ) -> None:
        """Determine when the receiver gets the next notification, and when those of a request are sent again."""
        self._num_failures += 1
        now = self._now()
        pause = compute_backoff(self._num_failures, self._receiver.name)
        if failure.retry_after is not None:
            pause = max(pause, min(failure.retry_after, MAX_RETRY_AFTER_SECONDS))
        self._paused_until = now + pause
        for entry, notification in sent:
            # The next attempt is made with another notification, if there is one: this one might be the cause.
            backlog.mark_failed(entry, now + max(pause, compute_backoff(entry.num_failures + 1, notification.key)))
            self._metrics.record(self._receiver.name, FAILED)
        self._report("warning", "notification_failed", sent[0][1], str(failure), pause)

    def _report(self, level: str, event: str, notification: Notification, problem: str, pause: float) -> None:
        """Log that a notification was not accepted."""
        getattr(self._log, level)(
            event,
            receiver=self._receiver.name,
            incident=notification.incident.id,
            action=notification.action,
            problem=problem,
            retry_seconds=round(pause, 1),
        )

    def _store_first_positions(self) -> None:
        """Store at the first start which messages are older than the receiver, so that a kill changes nothing."""
        first_positions = self._incidents.first_positions
        missing = {
            partition: DeliveryProgress(0, {}, first_positions.get(partition, 0))
            for partition in self._incidents.positions
            if partition not in self._stored
        }
        if missing:
            self._incidents.store_progress(missing)

    def _store_progress(self, backlog: Backlog) -> None:
        """Store the progress if it has changed."""
        progress = backlog.make_progress(self._incidents.positions)
        if progress != self._stored:
            self._incidents.store_progress(progress)
            self._stored = progress
        self._stored_at = self._now()

    def _count_pending(self) -> float:
        """Return the number of incidents of which the receiver has not been notified; called by other threads."""
        backlog = self._backlog
        return 0 if backlog is None else backlog.num_pending

    def _measure_oldest(self) -> float:
        """Return the seconds for which the oldest of them has been waiting; called by other threads."""
        backlog = self._backlog
        return 0.0 if backlog is None else backlog.measure_oldest(self._now())


class OpenIncidentCounter:
    """Counts the incidents that are open, for metrics.

    Args:
        incidents: The log of incidents.
        labels: The log of labels, None without labels.
        metrics: The metrics that are set.
    """

    def __init__(self, incidents: IncidentLog, labels: FeedbackLog | None, metrics: OpenIncidentMetrics) -> None:
        self._incidents, self._labels, self._metrics = incidents, labels, metrics

    def run_once(self) -> None:
        """Read the logs and set the metrics. Blocks for `POLL_SECONDS` at most.

        Raises:
            Unavailable: A log cannot be read. A later call continues.
        """
        incidents = self._incidents.poll(POLL_SECONDS)
        if incidents:
            self._metrics.update(incidents, ())  # before the labels are read, which can fail
        labels = () if self._labels is None else self._labels.poll(0.0)
        if labels:
            self._metrics.update((), labels)

    def close(self) -> None:
        """Close the logs."""
        self._incidents.close()
        if self._labels is not None:
            self._labels.close()


class Worker(Protocol):
    """An object whose `run_once` a thread of its own calls repeatedly, such as a `ReceiverWorker`."""

    def run_once(self) -> None:
        """Do the work that is due."""

    def close(self) -> None:
        """Release the resources."""


class WorkerThread:
    """A thread that runs a worker until it is stopped. The worker is created, used and closed in this thread.

    An error of the worker is logged, and the worker continues after a while: notification must not end because a broker
    was away for a moment.

    Args:
        name: Name of the thread, also in logs.
        create: Creates the worker.
    """

    def __init__(self, name: str, create: Callable[[], Worker]) -> None:
        self._name, self._create = name, create
        self._log = log.get_logger("notification")
        self._stop_requested = threading.Event()
        self._created = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def name(self) -> str:
        """Name of the thread."""
        return self._name

    def start(self) -> None:
        """Start the thread, and wait until the worker is created.

        Raises:
            DeformerError: The worker cannot be created, for example because no broker responds.
        """
        self._thread.start()
        self._created.wait()
        if self._error is not None:
            raise self._error

    def request_stop(self) -> None:
        """Make the thread end after the notification that it is sending."""
        self._stop_requested.set()

    def join(self, timeout: float) -> bool:
        """Wait for the end of the thread, for at most `timeout` seconds, and return whether it has ended.

        A thread that was not started counts as ended.
        """
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        """Create the worker, run it until a stop is requested, and close it."""
        try:
            worker = self._create()
        except BaseException as error:  # `start` raises it in the thread that waits
            self._error = error
            return
        finally:
            self._created.set()
        num_errors = 0
        while not self._stop_requested.is_set():
            try:
                worker.run_once()
                num_errors = 0
            except Exception as error:
                num_errors += 1
                pause = compute_backoff(min(num_errors, 6), self._name)
                self._log_error("delivery_interrupted", error, retry_seconds=round(pause, 1))
                self._stop_requested.wait(pause)
        try:
            worker.close()
        except Exception as error:
            self._log_error("delivery_not_closed", error)

    def _log_error(self, event: str, error: Exception, **fields: float) -> None:
        """Log an error of the worker, with its type if it is not one of this program."""
        problem = str(error) if isinstance(error, DeformerError) else repr(error)
        self._log.error(event, worker=self._name, problem=problem, **fields)


class Notifier:
    """The worker threads of all receivers.

    Args:
        workers: The worker threads.
    """

    def __init__(self, workers: Sequence[WorkerThread]) -> None:
        self._workers = list(workers)

    def start(self) -> None:
        """Start all threads.

        Raises:
            DeformerError: A worker cannot be created. No thread runs then.
        """
        try:
            for worker in self._workers:
                worker.start()
        except BaseException:
            self.close(timeout=0.0)
            raise

    def close(self, timeout: float) -> None:
        """Stop all threads, and wait for at most `timeout` seconds.

        A thread whose receiver hangs longer ends with the process. What it was sending is sent again after the next
        start.
        """
        for worker in self._workers:
            worker.request_stop()
        deadline = time.monotonic() + timeout
        hanging = [worker.name for worker in self._workers if not worker.join(max(0.0, deadline - time.monotonic()))]
        if hanging:
            log.get_logger("notification").warning(
                "workers_not_stopped",
                workers=hanging,
                seconds=timeout,
                message="what they were sending is sent again after the next start",
            )
