"""The incidents and labels in memory: order, filters, limits, and what labels change."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from deformer_stream.errors import Unavailable
from deformer_stream.incidents.events import FeedbackLabel, Incident, IncidentState, Timeline
from deformer_stream.incidents.overlay import Overlay, Presentation
from deformer_stream.page.followers import LogFollower
from deformer_stream.page.store import MAX_LABELS_PER_INCIDENT, SPARKLINE_POINTS, IncidentFilter, IncidentStore
from deformer_stream.runtime.memory_logs import MemoryIncidentLog
from tests.incidents.examples import make_fleet_incident, make_incident, make_incidents, make_label
from tests.page.pages import NOW, SilentLog


def make_store(incidents: list[Incident], **options: int) -> IncidentStore:
    """Return a store with incidents."""
    store = IncidentStore(now=lambda: NOW, **options)
    store.add_incidents(incidents)
    return store


def make_false_label(incident: Incident, time: int = NOW, label: str = "false-alarm") -> FeedbackLabel:
    """Return a label of an incident."""
    return make_label(label, time, by="anna", incident=incident.id)  # type: ignore[arg-type]


def list_ids(store: IncidentStore, wanted: IncidentFilter) -> list[str]:
    """Return the ids of all incidents that a filter selects."""
    return [shown.incident.id for shown in store.search(wanted, 1, 10_000).rows]


def test_an_incident_is_returned_as_it_was_added() -> None:
    incidents = make_incidents(60)
    store = make_store(incidents)
    for incident in incidents:
        shown = store.get(incident.id)
        assert shown is not None
        if incident.kind == "device":  # a fleet incident has the present numbers of its members
            assert shown.incident == incident


def test_the_last_message_of_an_id_replaces_the_earlier_ones() -> None:
    incident = make_incident(1, state="open")
    store = make_store([incident, replace(incident, state="updated", num_records=7)])
    assert (store.num_incidents, store.num_open) == (1, 1)
    resolved = replace(incident, state="resolved", resolved=incident.last, num_records=8)
    store.add_incidents([resolved])
    assert (store.num_incidents, store.num_open) == (1, 0)
    assert store.list_last_resolved(5)[0].incident.num_records == 8
    store.add_incidents([replace(incident, state="updated", num_reopened=1)])
    assert store.num_open == 1


def test_lists_begin_with_the_incident_that_opened_last_whatever_the_order_of_the_messages() -> None:
    incidents = make_incidents(200)
    shuffled = incidents[:]
    random.Random(3).shuffle(shuffled)  # noqa: S311 - not for cryptography
    store = make_store(shuffled)
    expected = [incident.id for incident in sorted(incidents, key=lambda one: (one.opened, one.id), reverse=True)]
    assert list_ids(store, IncidentFilter()) == expected


def test_filters_select_what_a_scan_of_all_incidents_selects() -> None:
    incidents = make_incidents(150)
    store = make_store(incidents)
    labels = [make_false_label(incident) for incident in incidents[::4]]
    labels += [make_false_label(incident, label="true") for incident in incidents[1::4]]
    labels += [make_false_label(incident, NOW + 1, "cleared") for incident in incidents[::8]]
    store.add_labels(labels)
    label_by_id = {label.incident: label.label for label in sorted(labels, key=lambda one: one.time)}
    start, end = incidents[20].opened, incidents[90].opened
    wanted = IncidentFilter("PUMP-0", start, end, "false-alarm", "resolved")
    expected = {
        incident.id
        for incident in incidents
        if "pump-0" in incident.device.casefold()
        and start <= incident.opened < end
        and label_by_id.get(incident.id) == "false-alarm"
        and incident.state == "resolved"
    }
    assert expected
    assert set(list_ids(store, wanted)) == expected
    without_label = {one.id for one in incidents if label_by_id.get(one.id) in (None, "cleared")}
    assert set(list_ids(store, IncidentFilter(label="none"))) == without_label
    assert set(list_ids(store, IncidentFilter(state="open"))) == {
        one.id for one in incidents if one.state != "resolved"
    }


def test_pages_together_hold_each_incident_once() -> None:
    store = make_store(make_incidents(123))
    pages = [store.search(IncidentFilter(), number, 50) for number in (1, 2, 3)]
    assert [len(page.rows) for page in pages] == [50, 50, 23]
    ids = [shown.incident.id for page in pages for shown in page.rows]
    assert len(set(ids)) == 123
    beyond = store.search(IncidentFilter(), 99, 50)
    assert (beyond.page, beyond.num_pages, len(beyond.rows)) == (3, 3, 23)
    assert store.search(IncidentFilter(device="nobody"), 1, 50).num_pages == 1


def test_a_full_store_drops_resolved_incidents_before_open_ones() -> None:
    old_open = replace(make_incident(0, state="open"), opened=1)
    resolved = [make_incident(number, state="resolved") for number in range(1, 6)]
    store = make_store([old_open, *resolved], max_incidents=4)
    assert store.num_dropped == 2
    assert store.get(old_open.id) is not None
    assert [store.get(incident.id) is None for incident in resolved] == [True, True, False, False, False]
    assert len(list_ids(store, IncidentFilter())) == 4
    store.add_incidents([make_incident(number, state="open") for number in range(10, 20)])
    assert store.num_incidents == 4
    assert store.num_open == 4


def test_a_label_counts_until_it_is_taken_back() -> None:
    incident = make_incident(1)
    store = make_store([incident])
    label = make_label("true", NOW, by="anna", incident=incident.id, name="dry run")
    store.add_labels([label, label])
    shown = store.get_summary(incident.id)
    assert shown is not None
    assert (shown.presentation.label, shown.presentation.name) == ("true", "dry run")
    store.add_labels([make_false_label(incident, NOW + 1, "cleared")])
    cleared = store.get_summary(incident.id)
    assert cleared is not None
    assert cleared.presentation.label is None
    assert [one.label for one in store.list_labels(incident.id)] == ["cleared", "true"]
    assert store.list_fault_names() == ["dry run"]


def test_the_history_of_labels_is_bounded() -> None:
    incident = make_incident(1)
    store = make_store([incident])
    store.add_labels([make_false_label(incident, NOW + i) for i in range(MAX_LABELS_PER_INCIDENT + 20)])
    labels = store.list_labels(incident.id)
    assert len(labels) == MAX_LABELS_PER_INCIDENT
    assert labels[0].time == NOW + MAX_LABELS_PER_INCIDENT + 19


def test_a_maintenance_window_silences_an_incident_without_a_label() -> None:
    incident = make_incident(1)
    store = make_store([incident])
    window = make_label("maintenance", NOW, device=incident.device, start=incident.opened - 1, end=incident.last + 1)
    store.add_labels([window])
    shown = store.get_summary(incident.id)
    assert shown is not None
    assert (shown.presentation.label, shown.presentation.silenced) == (None, "maintenance")
    assert store.count_labels(0).num_maintenance == 1


def test_counts_leave_out_fleet_incidents_and_count_their_members() -> None:
    members = [make_incident(number) for number in range(3)]
    store = make_store([*members, make_fleet_incident(9, members)])
    store.add_labels([make_false_label(members[0]), make_false_label(members[1], label="true")])
    counts = store.count_labels(0)
    assert (counts.num_false, counts.num_unlabelled) == (1, 1)
    assert counts.first_opened == members[0].opened
    assert counts.num_devices == len({member.device for member in members})
    assert store.count_labels(members[2].opened).num_unlabelled == 1


def test_a_list_has_a_short_timeline_that_ends_with_the_last_point() -> None:
    incident = make_incident(4)
    assert len(incident.timeline.times) == 240
    summary = make_store([incident]).list_open()[0].incident
    assert len(summary.timeline.times) <= SPARKLINE_POINTS
    assert summary.timeline.times[-1] == incident.timeline.times[-1]
    assert summary.timeline.evidence[-1] == incident.timeline.evidence[-1]
    assert {feature: one.values for feature, one in summary.readings.items()} == {}
    with_suspects = make_store([make_incident(3)]).list_open()[0].incident
    assert with_suspects.readings["flow"].values == make_incident(3).readings["flow"].values[-1:]


def test_listeners_are_called_after_each_change_only() -> None:
    store = make_store([])
    versions: list[int] = []
    unsubscribe = store.subscribe(lambda: versions.append(store.version))
    incident = make_incident(1)
    label = make_false_label(incident)
    store.add_incidents([incident])
    store.add_incidents([])
    store.add_labels([label])
    store.add_labels([label])
    unsubscribe()
    store.add_incidents([make_incident(2)])
    assert versions == [1, 2]
    assert store.get_version(incident.id) == 2
    assert store.get_version("unknown") == 0


class FailingLog(MemoryIncidentLog):
    """A log whose polls fail until it is repaired."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error: Exception | None = error

    def poll(self, timeout: float) -> list[Incident]:
        """Return new messages, or fail."""
        if self.error is not None:
            raise self.error
        return list(super().poll(timeout))


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SilentLog, LogFollower, Callable[[], None]]]:
    """Follow a silent log whose answers are requested with each poll; return a function that waits for a change."""
    monkeypatch.setattr("deformer_stream.page.followers.RETRY_SECONDS", 0.01)
    monkeypatch.setattr("deformer_stream.page.followers.POLL_SECONDS", 0.01)
    monkeypatch.setattr("deformer_stream.page.followers.CHECK_SECONDS", 0.0)
    store, log, times = make_store([]), SilentLog(), itertools.count(NOW)
    store.now = lambda: next(times)
    follower = LogFollower("incidents", log, store.add_incidents, store)
    changed = threading.Semaphore(0)
    store.subscribe(changed.release)

    def wait() -> None:
        assert changed.acquire(timeout=60), "the store has not changed in a minute"

    follower.start()
    wait()  # everything was read that the log held at the start
    yield log, follower, wait
    follower.stop()


def test_a_log_without_messages_is_readable_while_it_answers(silent: Any) -> None:
    _, follower, _ = silent
    first = follower.status.last_success or 0
    while (follower.status.last_success or 0) <= first + 3:
        assert follower.status.failure is None


def test_polls_that_return_nothing_in_an_outage_do_not_count_as_read(silent: Any) -> None:
    log, follower, wait = silent
    while follower.status.last_success is None:
        assert follower.is_running
    log.is_down = True
    wait()
    failed = follower.status
    assert failed.failure == "no broker has answered: start it"
    assert failed.failing_since == failed.last_success, "messages since the last answer may be missing"
    log.append(make_incident(1))
    log.is_down = False
    while follower.status.failure is not None:
        wait()
    assert follower.status.failing_since is None
    assert follower.status.num_messages == 1


def test_messages_that_do_not_arrive_are_reported(silent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log, follower, wait = silent
    log.hides_messages = True
    last_success = follower.status.last_success
    for _ in range(3):
        assert follower.status.failure is None, "they may arrive with a later poll"
    monkeypatch.setattr("deformer_stream.page.followers.UNREAD_SECONDS", 0.0)
    wait()
    assert "messages that have not arrived for 0 s" in str(follower.status.failure)
    assert (follower.status.failing_since or 0) >= (last_success or 0)
    log.hides_messages = False
    wait()
    assert follower.status.failure is None


@pytest.mark.parametrize("error", [Unavailable("the broker does not answer: start it"), RuntimeError("unexpected")])
def test_a_log_that_cannot_be_read_is_reported_and_read_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deformer_stream.page.followers.RETRY_SECONDS", 0.01)
    store = make_store([])
    log = FailingLog(error)
    follower = LogFollower("incidents", log, store.add_incidents, store)
    changed = threading.Semaphore(0)
    store.subscribe(changed.release)
    follower.start()
    try:
        assert changed.acquire(timeout=60)
        assert str(error) in str(follower.status.failure)
        assert follower.status.failing_since == NOW
        log.append(make_incident(1))
        log.error = None
        while store.num_incidents < 1 or follower.status.failure is not None:
            assert changed.acquire(timeout=60)
        assert follower.status.is_caught_up
        assert follower.status.num_messages == 1
    finally:
        follower.stop()


def test_windows_are_listed_without_looking_at_incidents_of_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store([make_incident(number, device=f"pump-{number % 50}") for number in range(500)])
    windows = [
        make_label("maintenance", NOW + number, device=f"pump-{number % 50}", start=0, end=NOW) for number in range(100)
    ]
    store.add_labels([*windows, make_label("cleared", 2 * NOW, device="pump-0", start=0, end=NOW)])
    num_presented = 0
    present = Overlay.present

    def count(overlay: Overlay, incident: Incident) -> Presentation:
        nonlocal num_presented
        num_presented += 1
        return present(overlay, incident)

    monkeypatch.setattr(Overlay, "present", count)
    assert store.count_active_windows(NOW - 1) == 98
    assert num_presented == 0, "metrics need no incidents"
    shown = store.list_windows()
    assert len(shown) == 100
    assert sum(one.is_taken_back for one in shown) == 2
    assert num_presented == 100 * 10, "each window looks at the ten incidents of its device"
    assert sum(one.num_silenced for one in shown) == 490


def test_parts_of_a_window_that_were_taken_back_are_not_in_force() -> None:
    hour = 3_600_000_000
    times = [(0, 10), (2, 3), (4, 6), (5, 7), (9, 12)]
    labels = [
        make_label(
            "cleared" if number else "maintenance", number, device="p", start=NOW + start * hour, end=NOW + end * hour
        )
        for number, (start, end) in enumerate(times)
    ]
    store = make_store([])
    store.add_labels(labels[:1])
    (window,) = store.list_windows()
    assert (window.taken_back, window.is_taken_back) == ((), False)
    store.add_labels(labels[1:])
    (window,) = store.list_windows()
    spans = [((start - NOW) // hour, (end - NOW) // hour) for start, end in window.taken_back]
    assert spans == [(2, 3), (4, 7), (9, 10)]
    in_force = [store.count_active_windows(NOW + time * hour) for time in range(11)]
    assert in_force == [1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 0]
    assert [window.is_over(NOW + time * hour) for time in (8, 9)] == [False, True]
    store.add_labels([make_label("cleared", 9, device="p", start=NOW, end=NOW + 9 * hour)])
    assert store.list_windows()[0].is_taken_back


def test_a_fleet_incident_has_the_present_numbers_of_its_members() -> None:
    members = [replace(make_incident(number, state="updated"), parent="f" * 32) for number in range(3)]
    fleet = replace(make_fleet_incident(9, members[:2]), id="f" * 32, last=0, evidence=1.0)
    store = make_store([*members[:2], fleet])
    later = replace(members[0], num_records=1000, num_alerted=900, evidence=99.0, last=NOW)
    store.add_incidents([later, members[2]])  # the third one has joined since the last message of the fleet incident
    for shown in (store.get(fleet.id), store.get_summary(fleet.id), store.list_open()[0]):
        assert shown is not None
        assert shown.incident.num_records == 1000 + members[1].num_records + members[2].num_records
        assert shown.incident.num_alerted == 900 + members[1].num_alerted + members[2].num_alerted
        assert (shown.incident.evidence, shown.incident.last) == (99.0, NOW)


def test_a_fleet_incident_has_the_largest_evidence_of_its_members_over_time() -> None:
    timelines = [
        Timeline((10, 30, 50), (2.0, 7.0, 3.0), (0.1, 0.01, 0.2)),
        Timeline((20, 40), (5.0, 9.0), (0.02, 0.001)),  # resolved at 40
        Timeline(),
    ]
    states: tuple[IncidentState, ...] = ("updated", "resolved", "updated")
    members = [
        replace(make_incident(number, state=state), timeline=timeline)
        for number, (state, timeline) in enumerate(zip(states, timelines, strict=True))
    ]
    fleet = make_fleet_incident(9, members)
    store = make_store([*members, fleet])
    for shown in (store.get(fleet.id), store.get_summary(fleet.id)):
        assert shown is not None
        assert shown.incident.timeline == Timeline(
            (10, 20, 30, 40, 50), (2.0, 5.0, 7.0, 9.0, 3.0), (0.1, 0.02, 0.01, 0.001, 0.2)
        )
    alone = make_store([fleet]).get(fleet.id)
    assert alone is not None
    assert alone.incident.timeline == Timeline()


def test_a_merged_timeline_is_that_of_a_scan_of_all_points() -> None:
    rng = random.Random(0)  # noqa: S311
    free_times = rng.sample(range(1000), 200)
    members = []
    for number in range(20):
        times = tuple(sorted(free_times.pop() for _ in range(rng.randrange(10))))
        evidence = tuple(float(rng.randrange(-3, 12)) for _ in times)
        incident = make_incident(number, state="resolved" if number % 3 else "updated")
        members.append(replace(incident, timeline=Timeline(times, evidence, (0.1,) * len(times))))
    fleet = make_fleet_incident(99, members)
    shown = make_store([*members, fleet]).get(fleet.id)
    assert shown is not None
    merged = shown.incident.timeline
    assert list(merged.times) == sorted(time for member in members for time in member.timeline.times)
    for time, largest in zip(merged.times, merged.evidence, strict=True):
        found = []
        for member in members:
            points = zip(member.timeline.times, member.timeline.evidence, strict=True)
            before = [value for at, value in points if at <= time]
            if before and not (member.state == "resolved" and member.timeline.times[-1] < time):
                found.append(before[-1])
        assert largest == max(found)
