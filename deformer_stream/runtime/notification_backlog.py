"""The notifications that a receiver still has to get, computed from the log of incidents, the labels and its progress.

The last message of an incident determines what the receiver has to show:

    incident open and not silenced   the receiver must show it:      "open", and "update" if it wants updates
    resolved or silenced             the receiver must not show it:  "resolve"

If an incident was resolved before the receiver was notified of its opening, the opening and the resolution are both
sent. An incident that was silenced all the time is not sent at all. `Backlog._choose_action` decides by this table:

    in the log      silenced   at the receiver       pending
    open            no         hidden                open
    open            no         opening, resolving    open       (again, with the same key)
    open            no         shown                 update, if it wants updates and this one was not sent; else nothing
    open            yes        hidden                nothing
    open            yes        any other             resolve
    resolved        no         hidden, opening       open, and then resolve; nothing if finished
    resolved        no         shown, resolving      resolve
    resolved        yes        hidden                nothing
    resolved        yes        any other             resolve

The four states at the receiver (`incident_ports.ReceiverState`) are made of two flags of an `Entry`:

                        is_shown = False     is_shown = True
    is_uncertain = False    hidden               shown
    is_uncertain = True     opening              resolving

The other terms of this module are:

    pending     the receiver has not accepted this notification yet
    shown       the receiver shows the incident as open
    uncertain   a request was sent, and it is not known whether the receiver has accepted it
    finished    nothing is pending for this resolved incident
    noted       the incident is listed in the progress, because its state at the receiver is not that of the log
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping
from dataclasses import dataclass, replace

from deformer_stream.codec.encode_incidents import encode_incident
from deformer_stream.incidents.events import FeedbackLabel, Incident
from deformer_stream.incidents.overlay import Overlay
from deformer_stream.runtime.incident_ports import Action, DeliveryProgress, LoggedIncident, Notification, ReceiverState

MAX_NOTED_INCIDENTS = 300
"""Largest number of incidents that the progress of a partition lists. Kafka stores at most 4,096 bytes with an offset.
"""

MAX_FULL_IDS = 79
"""Largest number of incidents that the progress lists by their full ids. The ids of more are shortened (`shorten_id`).

Earlier releases listed up to 80 incidents, all by their full ids. A list of 80 full ids may
therefore be incomplete.
"""

SHORT_ID_CHARS = 10
"""Number of characters of a shortened id. That one of a million incidents has the shortened id of a listed one has a
probability of 1 in 3,600."""

MAX_FINISHED_INCIDENTS = 10_000
"""Largest number of resolved incidents whose ids are kept, so that a further message of them is not sent."""


@dataclass(slots=True)
class Entry:
    """An incident, and its state at the receiver.

    Attributes:
        incident: Its state in the log.
        partition: Number of the partition of the log.
        offset: Offset of the message with this state.
        is_shown: Whether the receiver shows the incident as open.
        is_uncertain: Whether a request was sent whose outcome is not known. `is_shown` may then be wrong.
        is_finished: Whether the receiver was notified of the resolution, or need not be notified of the incident.
        sent_revision: Revision of the message of which the receiver was last notified, -1 if it was not.
        pending: The notification that has to be sent, None if there is none.
        pending_since: Monotonic seconds since when it is pending.
        pending_offset: Offset of the first message of which the receiver was not notified.
        num_failures: Number of failed attempts in sequence.
        due: Monotonic seconds before which no attempt is made.
        sent_at: Monotonic seconds of the last successful notification, -inf if there was none in this process.
        queue_number: Number of its valid place in the queue of `Backlog`, 0 if it has none.
    """

    incident: Incident
    partition: int
    offset: int
    is_shown: bool = False
    is_uncertain: bool = False
    is_finished: bool = False
    sent_revision: int = -1
    pending: Action | None = None
    pending_since: float = 0.0
    pending_offset: int = 0
    num_failures: int = 0
    due: float = float("-inf")
    sent_at: float = float("-inf")
    queue_number: int = 0


class Backlog:
    """The incidents of which a receiver has to be notified. It has no clock: callers state the time.

    Messages are added in the order of the log, from its beginning. `start` is called once, when everything that the log
    held at the start was added, and before the first notification.

    Args:
        wants_updates: Whether the receiver gets updates, not only openings and resolutions.
        progress: Progress by partition, as it was stored. A partition that is missing has its first start.
        first_positions: Offset after the last message that each partition held when the log was opened. At the first
            start, incidents that were resolved before it are not sent.
        overlay: The labels so far. `add_label` adds to it.
        url: Address of the operator's page, None without links.
        resend_seconds: Seconds after which an open incident is sent again, None if it is sent once.
    """

    def __init__(
        self,
        wants_updates: bool,
        progress: Mapping[int, DeliveryProgress],
        first_positions: Mapping[int, int],
        overlay: Overlay,
        url: str | None = None,
        resend_seconds: float | None = None,
    ) -> None:
        self._resend_seconds = resend_seconds
        self._wants_updates, self._progress, self._overlay, self._url = wants_updates, progress, overlay, url
        self._entry_by_id: dict[str, Entry] = {}
        self._pending: dict[str, Entry] = {}
        # Nothing is pending, and they are not shown, although `_is_shown_by_default` is true: labels silence them.
        self._silenced: dict[str, Entry] = {}
        # Two heaps: the entries whose time has not come, by this time, and the others, in the order of sending. An
        # entry that has changed is put in again with a new number. Its earlier places are skipped when they are found.
        self._waiting: list[tuple[float, int, Entry]] = []
        self._ready: list[tuple[tuple[int, float], int, Entry]] = []
        self._num_enqueued = 0
        self._finished: dict[str, None] = {}  # ids of resolved incidents, the latest ones
        stored = {partition: known.first_position for partition, known in progress.items()}
        self._first_positions = {**first_positions, **stored}
        self._has_started = False

    def add_label(self, label: FeedbackLabel, now: float) -> None:
        """Add a label. It may silence incidents, or take that back."""
        self._overlay.add(label)
        if self._has_started:
            for entry in list(self._entry_by_id.values()):
                if label.incident in (entry.incident.id, entry.incident.parent) or label.device is not None:
                    self._refresh(entry, now)

    def add(self, message: LoggedIncident, now: float) -> None:
        """Add a message of the log of incidents."""
        incident, offset = message.incident, message.offset
        progress = self._progress.get(message.partition)
        entry = self._entry_by_id.get(incident.id)
        if entry is None:
            entry = self._entry_by_id[incident.id] = Entry(incident, message.partition, offset)
            entry.is_finished = incident.id in self._finished
            if not self._has_started and progress is not None:
                # The receiver may have been notified of earlier messages, which the broker has since removed.
                noted = _find_noted_state(progress, incident.id)
                _apply_state(entry, noted or ("opening" if incident.revision > 0 else "hidden"))
        former_parent = entry.incident.parent or entry.incident.former_parent
        if incident.parent is None and incident.former_parent is None and former_parent is not None:
            # A detection process of an earlier release does not state it.
            incident = replace(incident, former_parent=former_parent)
        entry.incident, entry.partition, entry.offset = incident, message.partition, offset
        if incident.state != "resolved":
            entry.is_finished = False
        if progress is not None and offset < progress.position:
            _apply_progress(entry, progress)
        elif not self._has_started:
            self._set_state_at_start(entry, progress)
        has_joined = self._overlay.add_incident(incident)
        if self._has_started:
            entry.due = now  # a refused notification is tried again if the incident has changed
            self._refresh(entry, now)
            fleet = self._entry_by_id.get(incident.parent or "") if has_joined else None
            if fleet is not None:  # a label of it may not cover this member
                self._refresh(fleet, now)

    def _set_state_at_start(self, entry: Entry, progress: DeliveryProgress | None) -> None:
        """Set the state at the receiver of an incident whose last message is after the position of the progress.

        Args:
            entry: The incident.
            progress: The progress of its partition, None at the first start.
        """
        is_resolved = entry.incident.state == "resolved"
        if progress is None:
            entry.is_finished = is_resolved and entry.offset < self._first_positions.get(entry.partition, 0)
            return
        # If more incidents had to be noted than the progress can list, the receiver may have got this one.
        entry.is_uncertain = entry.is_uncertain or _is_truncated(progress)
        if is_resolved and not entry.is_shown and entry.offset < progress.first_position:
            entry.is_finished = True

    def start(self, now: float) -> None:
        """Determine which notifications are pending, after the messages at the start were added."""
        self._has_started = True
        for entry in list(self._entry_by_id.values()):
            self._refresh(entry, now)

    def list_due(self, now: float, count: int) -> list[Entry]:
        """Return the incidents whose notifications are sent next, at most `count`.

        Pending notifications of incidents without failed attempts come first, in the order of the log. One that fails
        again and again therefore does not hold the others back. Then follow incidents that are sent again.
        """
        while self._waiting and self._waiting[0][0] <= now:
            _, number, entry = heapq.heappop(self._waiting)
            if entry.queue_number == number:
                heapq.heappush(self._ready, (_order(entry), number, entry))
        places: list[tuple[tuple[int, float], int, Entry]] = []
        while self._ready and len(places) < count:
            place = heapq.heappop(self._ready)
            if place[2].queue_number == place[1]:
                places.append(place)
        for place in places:
            heapq.heappush(self._ready, place)
        return [entry for _, _, entry in places]

    def find_next_time(self, now: float) -> float:
        """Return the monotonic seconds at which the next notification is due, inf if there is none."""
        if self.list_due(now, 1):
            return now
        while self._waiting and self._waiting[0][2].queue_number != self._waiting[0][1]:
            heapq.heappop(self._waiting)
        return self._waiting[0][0] if self._waiting else float("inf")

    def _enqueue(self, entry: Entry) -> None:
        """Give an entry its place in the queue, after everything that determines it has changed."""
        entry.queue_number = 0
        if entry.pending is not None:
            time = entry.due
        elif entry.is_shown and self._resend_seconds is not None:
            time = max(entry.sent_at + self._resend_seconds, entry.due)
        else:
            return
        self._num_enqueued += 1
        entry.queue_number = self._num_enqueued
        heapq.heappush(self._waiting, (time, entry.queue_number, entry))

    def make_notification(self, entry: Entry) -> Notification:
        """Return the notification of an incident: the pending one, or else its present state once more."""
        action: Action = entry.pending or "update"
        incident = self._overlay.complete(entry.incident)
        presentation = self._overlay.present_to_receivers(incident)
        if action != "resolve" and incident.state == "resolved":
            # It was resolved before its opening was sent. A receiver that reads only the body must see it open.
            incident = replace(incident, state="updated", resolved=None, resolution=None)
        version = f"{incident.revision}" if action == "update" else f"{incident.num_reopened}:{presentation.cause}"
        return Notification(
            incident=incident,
            action=action,
            key=hashlib.sha256(f"{incident.id}:{action}:{version}".encode()).hexdigest()[:32],
            presentation=presentation,
            body=encode_incident(incident),
            url=None if self._url is None else f"{self._url.rstrip('/')}/incidents/{incident.id}",
        )

    def mark_uncertain(self, entry: Entry) -> None:
        """Record that a request is sent now. Until its outcome is known, the receiver may show the incident or not."""
        entry.is_uncertain = True

    def mark_sent(self, entry: Entry, notification: Notification, now: float) -> None:
        """Record that the receiver has accepted a notification."""
        entry.sent_at, entry.due, entry.num_failures = now, now, 0
        entry.sent_revision = notification.incident.revision
        entry.is_shown, entry.is_uncertain = notification.action != "resolve", False
        if entry.pending == notification.action:
            entry.pending = None  # so that the time of what is pending next begins now
            self._pending.pop(entry.incident.id, None)
        if notification.action == "resolve" and entry.incident.state == "resolved":
            entry.is_finished = True
        self._refresh(entry, now)

    def mark_failed(self, entry: Entry, due: float) -> None:
        """Record that an attempt has failed, and that the next one is made at `due` or later."""
        entry.num_failures += 1
        entry.due = due
        self._enqueue(entry)

    def mark_refused(self, entry: Entry, due: float, was_uncertain: bool) -> None:
        """Record that the receiver has refused a notification, and that the next attempt is made at `due` or later.

        Args:
            entry: The incident.
            due: Monotonic seconds.
            was_uncertain: `Entry.is_uncertain` before the request, which has changed nothing.
        """
        self.mark_failed(entry, due)
        entry.is_uncertain = was_uncertain

    @property
    def num_pending(self) -> int:
        """Number of incidents for which a notification is pending."""
        return len(self._pending)

    def measure_oldest(self, now: float) -> float:
        """Return the seconds for which the oldest notification has been pending, 0 if none is pending."""
        # `list` copies in one step, because another thread reads the metrics.
        return max((now - entry.pending_since for entry in list(self._pending.values())), default=0.0)

    def make_progress(self, positions: Mapping[int, int]) -> dict[int, DeliveryProgress]:
        """Return the progress of each partition, from which another process can continue.

        Args:
            positions: Offset after the last message that was added, by partition.
        """
        return {partition: self._make_partition_progress(partition, positions[partition]) for partition in positions}

    def _make_partition_progress(self, partition: int, position: int) -> DeliveryProgress:
        """Return the progress of a partition whose last message was added before `position`."""
        places = [(entry.pending_offset, entry) for entry in self._pending.values() if entry.partition == partition]
        places += [(entry.offset, entry) for entry in self._silenced.values() if entry.partition == partition]
        first = heapq.nsmallest(MAX_NOTED_INCIDENTS + 1, places, key=lambda place: place[0])
        if len(first) > MAX_NOTED_INCIDENTS:
            # The other incidents are read again after a restart. Their notifications then have the same keys.
            position, _ = first.pop()
        has_full_ids = len(first) <= MAX_FULL_IDS
        return DeliveryProgress(
            position,
            {
                entry.incident.id if has_full_ids else shorten_id(entry.incident.id): _describe_state(entry)
                for _, entry in first
            },
            self._first_positions.get(partition, 0),
        )

    def _refresh(self, entry: Entry, now: float) -> None:
        """Determine which notification of an incident is pending."""
        identifier = entry.incident.id
        action = self._choose_action(entry)
        if action is not None and entry.pending is None:
            entry.pending_since, entry.pending_offset = now, entry.offset
        entry.pending = action
        self._enqueue(entry)
        self._silenced.pop(identifier, None)
        if action is not None:
            self._pending[identifier] = entry
            return
        self._pending.pop(identifier, None)
        if _is_shown_by_default(entry.incident) and not entry.is_shown:
            self._silenced[identifier] = entry
        if entry.incident.state == "resolved":
            self._entry_by_id.pop(identifier, None)
            self._finished[identifier] = None
            if len(self._finished) > MAX_FINISHED_INCIDENTS:
                del self._finished[next(iter(self._finished))]

    def _choose_action(self, entry: Entry) -> Action | None:
        """Return the notification of an incident that is pending, None if there is none."""
        is_resolved = entry.incident.state == "resolved"
        is_silenced = self._overlay.present_to_receivers(entry.incident).silenced is not None
        if is_resolved or is_silenced:
            if entry.is_shown or (is_silenced and entry.is_uncertain):
                return "resolve"
            # The opening first; the resolution follows when the receiver has accepted it.
            return "open" if is_resolved and not is_silenced and not entry.is_finished else None
        if not entry.is_shown or entry.is_uncertain:
            return "open"
        return "update" if self._wants_updates and entry.sent_revision != entry.incident.revision else None


def _order(entry: Entry) -> tuple[int, float]:
    """Return the place of an entry among those that are due: pending ones first, then those that are sent again."""
    if entry.pending is None:
        return (2**31, entry.sent_at)
    return (entry.num_failures, entry.pending_offset)


def _apply_progress(entry: Entry, progress: DeliveryProgress) -> None:
    """Set the state at the receiver of an incident whose last message is before the position of the progress."""
    incident = entry.incident
    noted = _find_noted_state(progress, incident.id)
    _apply_state(entry, noted or ("shown" if _is_shown_by_default(incident) else "hidden"))
    entry.is_finished = incident.state == "resolved" and noted is None
    entry.sent_revision = incident.revision if noted is None else -1


def _is_shown_by_default(incident: Incident) -> bool:
    """Return whether an incident that the progress does not list is shown: if it is open and not part of a fleet one.

    Whether labels silence it makes no difference, because labels can change while no process runs.
    """
    return incident.state != "resolved" and incident.parent is None


def shorten_id(identifier: str) -> str:
    """Return a short name of an incident for the progress, if it lists many: `SHORT_ID_CHARS` characters of a hash."""
    return hashlib.sha256(identifier.encode()).hexdigest()[:SHORT_ID_CHARS]


def _find_noted_state(progress: DeliveryProgress, identifier: str) -> ReceiverState | None:
    """Return the state of an incident in a progress, None if the progress does not list it."""
    states = progress.state_by_id
    return states.get(identifier) or (states.get(shorten_id(identifier)) if len(states) > MAX_FULL_IDS else None)


def _is_truncated(progress: DeliveryProgress) -> bool:
    """Return whether there may have been more incidents to list than the progress lists."""
    num_listed = len(progress.state_by_id)
    is_full_of_earlier_release = num_listed == MAX_FULL_IDS + 1 and any(
        len(identifier) != SHORT_ID_CHARS for identifier in progress.state_by_id
    )
    return num_listed >= MAX_NOTED_INCIDENTS or is_full_of_earlier_release


def _apply_state(entry: Entry, state: ReceiverState) -> None:
    """Set the state of an incident at the receiver."""
    entry.is_shown = state in ("shown", "resolving")
    entry.is_uncertain = state in ("opening", "resolving")


def _describe_state(entry: Entry) -> ReceiverState:
    """Return the state of an incident at the receiver."""
    if entry.is_uncertain:
        return "resolving" if entry.is_shown else "opening"
    return "shown" if entry.is_shown else "hidden"
