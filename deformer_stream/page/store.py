"""The incidents, labels and suspicious records that the operator's page shows, in memory, updated from their logs.

The series of an incident are kept compressed, because a page shows those of one incident at a time. What a list shows
is kept as an `Incident` without series. So ten thousand incidents need some tens of megabytes.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Literal, TypeVar

import cramjam

from deformer_stream.codec.encode_incidents import decode_incident, encode_incident
from deformer_stream.codec.incident_text import keep_typical_reading
from deformer_stream.engine.events import SuspiciousRecord
from deformer_stream.feedback_labels import IncidentLabel, Label
from deformer_stream.incidents.events import NO_READINGS, FeedbackLabel, Incident, Timeline
from deformer_stream.incidents.label_times import LabelTimes
from deformer_stream.incidents.overlay import Overlay, Presentation, takes_back
from deformer_stream.runtime.incident_ports import NextReadingMessage

MAX_INCIDENTS = 50_000
"""Maximum number of incidents in memory. If there are more, resolved ones are dropped first, the oldest one first."""
MAX_LABELS_PER_INCIDENT = 100
"""Maximum number of labels of one incident that are listed on its page. Older ones stay valid."""
MAX_WINDOWS = 1_000
"""Maximum number of maintenance windows, and of labels that take them back, that are listed. Older ones stay valid."""
MAX_RECORD_LABELS = 1_000
"""Maximum number of labels of single records that are listed. Older ones stay valid."""
MAX_FAULT_NAMES = 200
"""Maximum number of names of faults that are offered for a label."""
MAX_SUSPICIOUS_RECORDS = 10_000
"""Maximum number of suspicious records in memory. If there are more, the least suspicious ones are dropped."""
SPARKLINE_POINTS = 30
"""Maximum number of points of the timeline that a list shows."""

NUM_LISTED_SUSPECTS = 3
"""Number of suspects that a list shows."""

Value = TypeVar("Value")
StateFilter = Literal["all", "open", "resolved"]
LabelFilter = Literal["all", "none", IncidentLabel]


@dataclass(frozen=True, slots=True)
class IncidentFilter:
    """A filter of incidents.

    Attributes:
        device: Part of the name of the device, in upper or lower case; "" for all devices.
        start: Only incidents that opened at this time or later, None without a limit.
        end: Only incidents that opened before this time, None without a limit.
        label: Only incidents with this label; "none" for those without a label.
        state: Only open or only resolved incidents.
    """

    device: str = ""
    start: int | None = None
    end: int | None = None
    label: LabelFilter = "all"
    state: StateFilter = "all"


@dataclass(frozen=True, slots=True)
class ShownIncident:
    """An incident with its label.

    Attributes:
        incident: The incident. In lists, its timeline is short, and it has only a typical reading of each suspect and
            no ids of records and alerts.
        presentation: Its label, and whether it is silenced.
    """

    incident: Incident
    presentation: Presentation


@dataclass(frozen=True, slots=True)
class SearchResult:
    """One page of a search.

    Attributes:
        rows: The incidents of the page, the one that opened last first.
        num_found: Number of incidents on all pages.
        page: Number of the page, from 1.
        num_pages: Number of pages, at least 1.
    """

    rows: tuple[ShownIncident, ...]
    num_found: int
    page: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class LabelCounts:
    """Number of incidents in a span of time by label.

    Attributes:
        num_false: Number of incidents with the label "false-alarm".
        num_maintenance: Number of incidents that are maintenance, by a label or by a maintenance window.
        num_unlabelled: Number of incidents without a label.
        first_opened: When the first of them opened, None if there is none.
        num_devices: Number of devices that have incidents.
    """

    num_false: int
    num_maintenance: int
    num_unlabelled: int
    first_opened: int | None
    num_devices: int


@dataclass(frozen=True, slots=True)
class ShownWindow:
    """A maintenance window of a device.

    Attributes:
        window: Its label.
        num_silenced: Number of incidents that it silences.
        taken_back: The times within the window that were taken back, as pairs of a start and an end, in order.
    """

    window: FeedbackLabel
    num_silenced: int
    taken_back: tuple[tuple[int, int], ...] = ()

    @property
    def is_taken_back(self) -> bool:
        """Whether the whole window was taken back."""
        return self.taken_back == ((self.window.start, self.window.end),)

    def is_over(self, now: int) -> bool:
        """Return whether the window silences nothing at a time and later."""
        end = self.window.end or 0
        if self.taken_back and self.taken_back[-1][1] == end:
            end = self.taken_back[-1][0]
        return self.is_taken_back or end <= now


@dataclass(frozen=True, slots=True)
class _Entry:
    """A stored incident: a summary for lists, and the whole incident as compressed JSON."""

    summary: Incident
    compressed: bytes


def _now_in_micros() -> int:
    """Return the present time in microseconds since 1970."""
    return time.time_ns() // 1000


class IncidentStore:
    """Incidents and their labels, with the indexes that the page needs. All methods may be called from any thread.

    Args:
        max_incidents: Maximum number of incidents that are kept.
        now: Returns the present time in microseconds since 1970.

    Attributes:
        now: The same function, for the parts of the page that need the time.
    """

    def __init__(self, max_incidents: int = MAX_INCIDENTS, now: Callable[[], int] = _now_in_micros) -> None:
        self.now = now
        self._max_incidents = max_incidents
        self._lock = threading.RLock()
        self._version = 0
        self._entry_by_id: dict[str, _Entry] = {}
        self._version_by_id: dict[str, int] = {}
        self._order: list[tuple[int, str]] = []  # (time of opening, id) of all incidents, ascending
        self._open_ids: set[str] = set()
        self._order_by_device: dict[str, list[tuple[int, str]]] = {}  # in order of opening
        self._overlay = Overlay()
        self._label_ids: set[str] = set()
        self._label_times = LabelTimes()  # also of labels that are not listed
        self._labels_by_incident: dict[str, deque[FeedbackLabel]] = {}
        self._window_labels: deque[FeedbackLabel] = deque(maxlen=MAX_WINDOWS)
        self._record_labels: deque[FeedbackLabel] = deque(maxlen=MAX_RECORD_LABELS)
        self._fault_names: dict[str, None] = {}  # the last used one is the last key
        self._suspicious_by_id: dict[str, SuspiciousRecord] = {}
        self._incidents_version = 0
        self._num_dropped = 0
        self._last_change: int | None = None
        self._listeners: list[Callable[[], None]] = []

    # Changes

    def add_incidents(self, incidents: Sequence[Incident]) -> None:
        """Add messages of the log of incidents. The last message of an id replaces earlier ones."""
        if not incidents:
            return
        last_by_id = {incident.id: incident for incident in incidents}
        entries = [_make_entry(incident) for incident in last_by_id.values()]  # compressed without the lock
        with self._lock:
            changed = set(last_by_id)
            for entry in entries:
                self._add_entry(entry)
                if self._overlay.add_incident(entry.summary) and entry.summary.parent is not None:
                    changed.add(entry.summary.parent)  # it has a further member
            self._drop_oldest()
            self._set_changed(changed)
        self._notify()

    def add_labels(self, labels: Sequence[FeedbackLabel]) -> None:
        """Add labels. A label that was added before has no effect."""
        with self._lock:
            label_by_id = {label.id: label for label in labels}
            new_labels = [label for label in label_by_id.values() if label.id not in self._label_ids]
            for label in new_labels:
                self._label_ids.add(label.id)
                self._overlay.add(label)
                self._label_times.add(label)
                if label.incident is not None:
                    history = self._labels_by_incident.setdefault(label.incident, deque(maxlen=MAX_LABELS_PER_INCIDENT))
                    history.append(label)
                if label.record is not None:
                    self._record_labels.append(label)
                if label.device is not None:
                    self._window_labels.append(label)
                if label.label == "true" and label.name:
                    self._fault_names.pop(label.name, None)
                    self._fault_names[label.name] = None
            while len(self._fault_names) > MAX_FAULT_NAMES:
                del self._fault_names[next(iter(self._fault_names))]
            if new_labels:
                self._set_changed([label.incident for label in new_labels if label.incident is not None])
        if new_labels:
            self._notify()

    def add_suspicious_records(self, messages: Sequence[NextReadingMessage]) -> None:
        """Add messages of the log of suspicious records, of each record the last one, and drop those that are over."""
        now = self.now()
        with self._lock:
            records = self._suspicious_by_id
            num_before = len(records)
            for record_id, record in messages:
                if record is None:
                    records.pop(record_id, None)
                else:
                    records[record_id] = record
            self._suspicious_by_id = {id_: one for id_, one in records.items() if not _is_expired(one, now)}
            if len(self._suspicious_by_id) > MAX_SUSPICIOUS_RECORDS:
                kept = sorted(self._suspicious_by_id.values(), key=_rank_suspicious)[:MAX_SUSPICIOUS_RECORDS]
                self._suspicious_by_id = {one.record: one for one in kept}
            is_changed = bool(messages) or len(self._suspicious_by_id) < num_before
            if is_changed:
                self._version += 1
        if is_changed:
            self._notify()

    def touch(self) -> None:
        """Notify listeners of a change that is not a change of an incident, such as that of the status of a log."""
        with self._lock:
            self._version += 1
            self._incidents_version = self._version
        self._notify()

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call a function after each change, from the thread that made it; return a function that ends this."""
        with self._lock:
            self._listeners.append(listener)

        def unsubscribe() -> None:
            with self._lock:
                self._listeners.remove(listener)

        return unsubscribe

    def _add_entry(self, entry: _Entry) -> None:
        """Add an incident or replace its earlier state, and update the indexes."""
        incident = entry.summary
        earlier = self._entry_by_id.get(incident.id)
        if earlier is not None:
            self._remove_from_indexes(earlier.summary)
        self._entry_by_id[incident.id] = entry
        insort(self._order, (incident.opened, incident.id))
        insort(self._order_by_device.setdefault(incident.device, []), (incident.opened, incident.id))
        if incident.state != "resolved":
            self._open_ids.add(incident.id)

    def _remove_from_indexes(self, incident: Incident) -> None:
        """Remove an incident from all indexes."""
        del self._order[bisect_left(self._order, (incident.opened, incident.id))]
        self._open_ids.discard(incident.id)
        order = self._order_by_device[incident.device]
        del order[bisect_left(order, (incident.opened, incident.id))]
        if not order:
            del self._order_by_device[incident.device]

    def _drop_oldest(self) -> None:
        """Drop incidents beyond the maximum number: the resolved ones that opened first, then open ones."""
        surplus = len(self._order) - self._max_incidents
        if surplus <= 0:
            return
        ids = [incident_id for _, incident_id in self._order]
        resolved = [incident_id for incident_id in ids if incident_id not in self._open_ids]
        dropped = (resolved + [incident_id for incident_id in ids if incident_id in self._open_ids])[:surplus]
        for incident_id in dropped:
            self._remove_from_indexes(self._entry_by_id.pop(incident_id).summary)
            self._version_by_id.pop(incident_id, None)
        self._num_dropped += len(dropped)

    def _set_changed(self, incident_ids: Iterable[str]) -> None:
        """Count a change of the given incidents."""
        self._version += 1
        self._incidents_version = self._version
        self._last_change = self.now()
        for incident_id in incident_ids:
            if incident_id in self._entry_by_id:
                self._version_by_id[incident_id] = self._version

    def _notify(self) -> None:
        """Call the listeners."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    # Queries

    @property
    def version(self) -> int:
        """The number of changes so far."""
        with self._lock:
            return self._version

    @property
    def incidents_version(self) -> int:
        """The value that `version` had after the last change of anything but suspicious records."""
        with self._lock:
            return self._incidents_version

    def get_version(self, incident_id: str) -> int:
        """Return the value that `version` had after the last change of an incident; 0 if it is not stored."""
        with self._lock:
            return self._version_by_id.get(incident_id, 0)

    @property
    def last_change(self) -> int | None:
        """When incidents or labels were last added, microseconds since 1970; None before."""
        with self._lock:
            return self._last_change

    @property
    def num_incidents(self) -> int:
        """Number of incidents that are stored."""
        with self._lock:
            return len(self._order)

    @property
    def num_dropped(self) -> int:
        """Number of incidents that were dropped because the store was full."""
        with self._lock:
            return self._num_dropped

    @property
    def num_open(self) -> int:
        """Number of open incidents."""
        with self._lock:
            return len(self._open_ids)

    def list_devices(self) -> list[str]:
        """Return the devices that have incidents, in alphabetical order."""
        with self._lock:
            return sorted(self._order_by_device)

    def list_fault_names(self) -> list[str]:
        """Return the names of faults that labels have used, the last used one first."""
        with self._lock:
            return list(reversed(self._fault_names))

    def list_open(self) -> list[ShownIncident]:
        """Return the open incidents, the one that opened last first."""
        with self._lock:
            incidents = [self._entry_by_id[incident_id].summary for incident_id in self._open_ids]
            shown = [self._show(incident) for incident in incidents]
        return sorted(shown, key=lambda one: (-one.incident.opened, one.incident.id))

    def list_suspicious_records(self, count: int) -> tuple[list[SuspiciousRecord], int]:
        """Return the most suspicious open records without an alert, at most `count` of them, and how many there are."""
        now = self.now()
        with self._lock:
            records = [one for one in self._suspicious_by_id.values() if not _is_expired(one, now)]
        return sorted(records, key=_rank_suspicious)[:count], len(records)

    def list_last_resolved(self, count: int) -> list[ShownIncident]:
        """Return the resolved incidents that opened last, at most `count` of them."""
        return list(self.search(IncidentFilter(state="resolved"), 1, count).rows)

    def get(self, incident_id: str) -> ShownIncident | None:
        """Return an incident with its series, None if it is not stored."""
        with self._lock:
            entry = self._entry_by_id.get(incident_id)
            if entry is None:
                return None
            shown = self._show(decode_incident(bytes(cramjam.zstd.decompress(entry.compressed))))
        return shown

    def get_summary(self, incident_id: str) -> ShownIncident | None:
        """Return an incident as in lists, None if it is not stored."""
        with self._lock:
            entry = self._entry_by_id.get(incident_id)
            return None if entry is None else self._show(entry.summary)

    def _show(self, incident: Incident) -> ShownIncident:
        """Return an incident with its label. A fleet incident has all its members and their present numbers.

        Messages about it are rarer than those about its members, so that its own numbers can be a minute old. They
        have no timeline, so it gets the largest evidence of its members over time.
        """
        presentation = self._overlay.present(incident)
        if incident.kind == "fleet":
            incident = self._overlay.complete(incident)
            members = [self._entry_by_id[id_].summary for id_ in incident.members if id_ in self._entry_by_id]
            if members and len(members) == len(incident.members):  # none of them was dropped
                incident = replace(
                    incident,
                    timeline=_merge_timelines(members),
                    num_records=sum(member.num_records for member in members),
                    num_alerted=sum(member.num_alerted for member in members),
                    evidence=max(member.evidence for member in members),
                    last=max(member.last for member in members),
                )
        return ShownIncident(incident, presentation)

    def list_labels(self, incident_id: str) -> list[FeedbackLabel]:
        """Return the labels of an incident, the last one first; at most `MAX_LABELS_PER_INCIDENT`."""
        with self._lock:
            labels = list(self._labels_by_incident.get(incident_id, ()))
        return sorted(labels, key=lambda label: (label.time, label.id), reverse=True)

    def choose_label_time(
        self, incident: str | None = None, record: str | None = None, device: str | None = None
    ) -> int:
        """Return the time of a new label: now, but after all labels so far about the same subject.

        They may come from a machine whose clock is ahead, and the latest label counts. Labels of the fleet incident of
        an incident, and of its members, count as well.

        Args:
            incident: The incident of the label.
            record: The record of the label.
            device: The device of the maintenance window.
        """
        with self._lock:
            related, devices = set[str](), set[str]()
            if incident is not None:
                entry = self._entry_by_id.get(incident)
                parent = None if entry is None else entry.summary.parent
                members = self._overlay.list_members(incident)
                related = {*members, *([] if parent is None else [parent])}
                entries = (self._entry_by_id.get(id_) for id_ in (incident, *members))
                devices = {one.summary.device for one in entries if one is not None}
            return self._label_times.choose(
                self.now(), incident=incident, record=record, device=device, related=related, devices=devices
            )

    def list_record_labels(self) -> list[FeedbackLabel]:
        """Return the valid labels of single records, the last one first; of at most `MAX_RECORD_LABELS` labels."""
        with self._lock:
            labels = sorted(self._record_labels, key=lambda label: (label.time, label.id))
        last_by_record = {label.record: label for label in labels}
        valid = [label for label in last_by_record.values() if label.label != "cleared"]
        return sorted(valid, key=lambda label: (label.time, label.id), reverse=True)

    def list_windows(self) -> list[ShownWindow]:
        """Return the maintenance windows of devices, the one that begins last first; at most `MAX_WINDOWS`."""
        with self._lock:
            found = self._find_windows()
            shown = [ShownWindow(window, self._count_silenced(window), taken_back) for window, taken_back in found]
        return sorted(shown, key=lambda one: (one.window.start or 0, one.window.time, one.window.id), reverse=True)

    def count_active_windows(self, now: int) -> int:
        """Return the number of maintenance windows that include a time and were not taken back there."""
        with self._lock:
            found = self._find_windows()
        return sum(
            (window.start or 0) <= now < (window.end or 0) and not any(start <= now < end for start, end in taken_back)
            for window, taken_back in found
        )

    def _find_windows(self) -> list[tuple[FeedbackLabel, tuple[tuple[int, int], ...]]]:
        """Return the maintenance windows, each with the times that were taken back (see `ShownWindow.taken_back`)."""
        labels_by_device: dict[str | None, list[FeedbackLabel]] = {}
        for label in self._window_labels:
            labels_by_device.setdefault(label.device, []).append(label)
        found = []
        for window in self._window_labels:
            if window.label == "maintenance":
                labels = labels_by_device[window.device]
                overlapping = [one for one in labels if _overlaps(one, window) and takes_back(one, window, labels)]
                found.append((window, _find_spans(overlapping, window)))
        return found

    def _count_silenced(self, window: FeedbackLabel) -> int:
        """Return the number of incidents that a maintenance window silences."""
        start, end = window.start or 0, window.end or 0
        order = self._order_by_device.get(window.device or "", [])
        within = order[bisect_left(order, (start, "")) : bisect_left(order, (end, ""))]
        incidents = [self._entry_by_id[incident_id].summary for _, incident_id in within]
        silencing = [self._overlay.find_silencing_window(incident) for incident in incidents]
        return sum(one is not None and one.id == window.id for one in silencing)

    def search(self, wanted: IncidentFilter, page: int, page_size: int) -> SearchResult:
        """Return one page of the incidents that a filter selects, the one that opened last first.

        Args:
            wanted: The filter.
            page: Number of the page, from 1. A number beyond the last page gives the last page.
            page_size: Number of incidents of a page.
        """
        with self._lock:
            found = self._find(wanted)
            num_pages = max(1, -(-len(found) // page_size))
            page = min(max(page, 1), num_pages)
            rows = [self._entry_by_id[incident_id].summary for incident_id in found[(page - 1) * page_size :]]
            shown = tuple(self._show(row) for row in rows[:page_size])
        return SearchResult(shown, len(found), page, num_pages)

    def count_labels(self, since: int) -> LabelCounts:
        """Return the number of incidents by label, of those that opened at a given time or later.

        Members of a fleet incident count one by one, and the fleet incident itself does not count, because the budget
        is that of one device.

        Args:
            since: The time, microseconds since 1970.
        """
        count_by_label: dict[Label | None, int] = {}
        devices, first_opened = set(), None
        with self._lock:
            for opened, incident_id in self._order[bisect_left(self._order, (since, "")) :]:
                incident = self._entry_by_id[incident_id].summary
                if incident.kind == "fleet":
                    continue
                first_opened = opened if first_opened is None else first_opened
                devices.add(incident.device)
                presentation = self._overlay.present(incident)
                label: Label | None = presentation.label or (
                    "maintenance" if presentation.silenced == "maintenance" else None
                )
                count_by_label[label] = count_by_label.get(label, 0) + 1
        return LabelCounts(
            num_false=count_by_label.get("false-alarm", 0),
            num_maintenance=count_by_label.get("maintenance", 0),
            num_unlabelled=count_by_label.get(None, 0),
            first_opened=first_opened,
            num_devices=len(devices),
        )

    def _find(self, wanted: IncidentFilter) -> list[str]:
        """Return the ids of the incidents that a filter selects, the one that opened last first."""
        start = 0 if wanted.start is None else bisect_left(self._order, (wanted.start, ""))
        end = len(self._order) if wanted.end is None else bisect_left(self._order, (wanted.end, ""))
        ids = [incident_id for _, incident_id in reversed(self._order[start:end])]
        if wanted.state != "all":
            ids = [incident_id for incident_id in ids if (incident_id in self._open_ids) == (wanted.state == "open")]
        if wanted.device:
            part = wanted.device.casefold()
            ids = [one for one in ids if part in self._entry_by_id[one].summary.device.casefold()]
        if wanted.label != "all":
            label = None if wanted.label == "none" else wanted.label
            ids = [one for one in ids if self._overlay.present(self._entry_by_id[one].summary).label == label]
        return ids


def _is_expired(record: SuspiciousRecord, now: int) -> bool:
    """Return whether a suspicious record was closed by now, unless it has got a further event."""
    return record.expires is not None and record.expires <= now


def _rank_suspicious(record: SuspiciousRecord) -> tuple[float, str]:
    """Return the sort key of suspicious records: the smallest p-value first."""
    return record.p_value, record.record


def _merge_timelines(incidents: Sequence[Incident]) -> Timeline:
    """Return the largest evidence of several incidents over time.

    An incident counts from its first point on with the evidence of its last point before a time. A resolved incident
    counts until its last point.
    """
    points = sorted(
        (time, index, place, evidence, p_value)
        for index, incident in enumerate(incidents)
        for place, (time, evidence, p_value) in enumerate(
            zip(incident.timeline.times, incident.timeline.evidence, incident.timeline.p_values, strict=True)
        )
    )
    last_place = [len(one.timeline.times) - 1 if one.state == "resolved" else -1 for one in incidents]
    latest = [-1] * len(incidents)  # place of the last point of each incident so far
    largest: list[tuple[float, int, int]] = []  # a heap of (−evidence, index, place), whose outdated entries stay
    merged: list[tuple[int, float, float]] = []
    for time_, index, place, evidence, p_value in points:
        latest[index] = place
        heappush(largest, (-evidence, index, place))
        while latest[largest[0][1]] != largest[0][2]:
            heappop(largest)
        merged.append((time_, -largest[0][0], p_value))
        if place == last_place[index]:
            latest[index] = -1
    columns = zip(*merged, strict=True) if merged else ((), (), ())
    return Timeline(*(tuple(column) for column in columns))


def _overlaps(label: FeedbackLabel, window: FeedbackLabel) -> bool:
    """Return whether the times of a label of a device and those of a maintenance window overlap."""
    if label.start is None or label.end is None or window.start is None or window.end is None:
        return False
    return label.start < window.end and window.start < label.end


def _find_spans(labels: Sequence[FeedbackLabel], window: FeedbackLabel) -> tuple[tuple[int, int], ...]:
    """Return the times of a maintenance window that labels include, as separate pairs of a start and an end, in order.

    Args:
        labels: Labels whose times overlap those of the window.
        window: The window.
    """
    first, last = window.start or 0, window.end or 0
    joined: list[tuple[int, int]] = []
    for start, end in sorted((max(label.start or 0, first), min(label.end or 0, last)) for label in labels):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple(joined)


def _make_entry(incident: Incident) -> _Entry:
    """Return an incident as it is stored."""
    stride = max(1, -(-len(incident.timeline.times) // SPARKLINE_POINTS))
    timeline = Timeline(
        _thin(incident.timeline.times, stride),
        _thin(incident.timeline.evidence, stride),
        _thin(incident.timeline.p_values, stride),
    )
    suspects = incident.suspects[:NUM_LISTED_SUSPECTS]
    readings = {
        suspect.feature: keep_typical_reading(incident.readings[suspect.feature])
        for suspect in suspects
        if suspect.feature in incident.readings
    }
    summary = replace(
        incident,
        timeline=timeline,
        readings=MappingProxyType(readings) if readings else NO_READINGS,
        record_ids=(),
        alert_ids=(),
        suspects=suspects,
    )
    return _Entry(summary, bytes(cramjam.zstd.compress(encode_incident(incident), 3)))


def _thin(column: tuple[Value, ...], stride: int) -> tuple[Value, ...]:
    """Return every n-th point of a column, the last one included."""
    return column[::-1][::stride][::-1]
