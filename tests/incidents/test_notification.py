"""Notification of receivers: order, retries, silence, restarts, and threads. The clock is set by the tests."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from deformer_stream.codec.encode_incidents import decode_incident
from deformer_stream.errors import ConfigError, Unavailable
from deformer_stream.incidents.events import FeedbackLabel, Incident
from deformer_stream.incidents.overlay import Overlay
from deformer_stream.runtime import notification_backlog
from deformer_stream.runtime.incident_metrics import DeliveryMetrics, OpenIncidentMetrics
from deformer_stream.runtime.incident_ports import (
    DeliveryProgress,
    LoggedIncident,
    PermanentFailure,
    ReceiverState,
    TemporaryFailure,
)
from deformer_stream.runtime.memory_logs import MemoryFeedbackLog, MemoryIncidentLog
from deformer_stream.runtime.notification import (
    MAX_RETRY_SECONDS,
    REFUSED_RETRY_SECONDS,
    Notifier,
    OpenIncidentCounter,
    ReceiverWorker,
    WorkerThread,
    compute_backoff,
)
from deformer_stream.runtime.notification_backlog import MAX_FULL_IDS, MAX_NOTED_INCIDENTS, Backlog, Entry
from tests.effort import num_examples
from tests.incidents.delivery import ManualClock, ScriptedBatchReceiver, ScriptedReceiver, Topic, TopicReader
from tests.incidents.examples import MINUTE, make_fleet_incident, make_incident, make_incidents, make_label

WAIT_SECONDS = 60.0
"""Limit of a wait for a thread. It decides no test: a test that reaches it has failed."""


class Delivery:
    """A topic, labels, and a receiver with its worker, which can be restarted."""

    def __init__(self, receiver: ScriptedReceiver | None = None, url: str | None = None) -> None:
        self.receiver = receiver or ScriptedReceiver()
        self.topic, self.labels, self.clock, self.url = Topic(), list[FeedbackLabel](), ManualClock(), url
        self.start()

    def start(self) -> None:
        """Create the worker, as after a start of the process. The one before is not closed: it was killed."""
        self.registry = CollectorRegistry()
        self.reader, self.label_log = TopicReader(self.topic), MemoryFeedbackLog(self.labels)
        self.worker = ReceiverWorker(
            self.receiver, self.reader, self.label_log, DeliveryMetrics(self.registry), self.url, self.clock
        )

    def add_label(self, label: str, incident: Incident, time: int = 1, **fields: Any) -> None:
        """Add a label of an incident."""
        made = make_label(label, time, incident=incident.id, **fields)  # type: ignore[arg-type]
        self.labels.append(made)
        self.label_log.append(made)

    def add_window(self, label: str, incident: Incident, minutes: tuple[int, int], time: int) -> None:
        """Add a maintenance window of the device of an incident, or take it back, in minutes after its opening."""
        start, end = (incident.opened + minute * MINUTE for minute in minutes)
        made = make_label(label, time, device=incident.device, start=start, end=end)  # type: ignore[arg-type]
        self.labels.append(made)
        self.label_log.append(made)

    def list_keys(self) -> list[str]:
        """Return the keys of the accepted notifications."""
        return [notification.key for notification in self.receiver.accepted]

    def run(self, seconds: float = 0.0) -> None:
        """Run the worker until it has nothing to do, then for some seconds more, in steps."""
        end = self.clock.seconds + seconds
        while True:
            for _ in range(100):
                before = (len(self.receiver.attempts), self.reader.positions)
                self.worker.run_once()
                if before == (len(self.receiver.attempts), self.reader.positions):
                    break
            if self.clock.seconds >= end:
                return
            self.clock.seconds = min(self.clock.seconds + 1.0, end)

    def measure(self, name: str, **labels: str) -> float | None:
        """Return the value of a metric."""
        return self.registry.get_sample_value(f"deformer_{name}", {"receiver": self.receiver.name, **labels})


def make_states(number: int = 0) -> tuple[Incident, Incident, Incident]:
    """Return the messages of an incident: open, updated and resolved."""
    opened = make_incident(number, device="pump-1")
    updated = replace(opened, state="updated", revision=1, num_records=2)
    return opened, updated, replace(updated, state="resolved", revision=2, resolved=updated.last, resolution="quiet")


def test_opening_and_resolution_are_sent() -> None:
    delivery = Delivery()
    for state in make_states():
        delivery.topic.append(state)
        delivery.run()
    assert delivery.receiver.list_actions() == ["open", "resolve"]
    assert [decode_incident(notification.body) for notification in delivery.receiver.accepted] == [
        make_states()[0],
        make_states()[2],
    ]


def test_updates_are_sent_to_a_receiver_that_wants_them() -> None:
    delivery = Delivery(ScriptedReceiver(wants_updates=True))
    for state in make_states():
        delivery.topic.append(state)
        delivery.run()
    assert delivery.receiver.list_actions() == ["open", "update", "resolve"]


def test_latest_message_counts_but_opening_and_resolution_are_both_sent() -> None:
    delivery = Delivery(ScriptedReceiver(wants_updates=True))
    delivery.run()
    for state in make_states():
        delivery.topic.append(state)
    delivery.run()
    assert delivery.receiver.list_actions() == ["open", "resolve"]
    opening = delivery.receiver.accepted[0]
    assert (opening.incident.revision, opening.incident.state, opening.incident.resolved) == (2, "updated", None)
    assert decode_incident(opening.body) == opening.incident


def test_link_to_the_page() -> None:
    delivery = Delivery(url="https://plant.example/")
    delivery.topic.append(make_states()[0])
    delivery.run()
    assert delivery.receiver.accepted[0].url == f"https://plant.example/incidents/{make_states()[0].id}"


def test_first_start_sends_open_incidents_and_not_the_history() -> None:
    delivery = Delivery()
    for incident in make_incidents(30):
        delivery.topic.append(incident)
    delivery.start()
    delivery.run()
    expected = [incident.id for incident in make_incidents(30) if incident.state != "resolved"]
    assert [notification.incident.id for notification in delivery.receiver.accepted] == expected
    assert set(delivery.receiver.list_actions()) == {"open"}


def test_incidents_that_are_over_before_the_log_is_read_are_sent() -> None:
    """The process writes incidents while the worker of a new receiver still waits for its partitions."""
    delivery = Delivery()
    for state in make_states():
        delivery.topic.append(state)
    delivery.run()
    assert delivery.receiver.list_actions() == ["open", "resolve"]
    killed = Delivery()
    killed.worker.run_once()  # nothing but the first position is stored
    for state in make_states():
        killed.topic.append(state)
    killed.start()
    killed.run()
    assert killed.receiver.list_actions() == ["open", "resolve"]


def test_a_receiver_that_is_down_gets_everything_later() -> None:
    delivery = Delivery()
    delivery.run()
    delivery.receiver.is_down = True
    for number in range(50):
        for state in make_states(number):
            delivery.topic.append(state)
        delivery.run(7.0)
    assert delivery.receiver.accepted == []
    assert delivery.measure("delivery_pending") == 50
    assert delivery.measure("delivery_oldest_seconds") == 350
    assert delivery.measure("receiver_up") == 0
    delivery.receiver.is_down = False
    delivery.run(MAX_RETRY_SECONDS)
    for number in range(50):
        assert delivery.receiver.list_actions(make_states(number)[0].id) == ["open", "resolve"]
    assert delivery.measure("delivery_pending") == 0
    assert delivery.measure("delivery_oldest_seconds") == 0
    assert delivery.measure("receiver_up") == 1
    assert delivery.measure("deliveries_total", outcome="delivered") == 100


def test_attempts_become_rarer() -> None:
    delivery = Delivery()
    delivery.receiver.is_down = True
    delivery.topic.append(make_states()[0])
    times = []
    for _ in range(3000):
        num_attempts = len(delivery.receiver.attempts)
        delivery.run()
        times += [delivery.clock.seconds] * (len(delivery.receiver.attempts) - num_attempts)
        delivery.clock.seconds += 1.0
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(pause >= 0.5 * min(2.0**k, MAX_RETRY_SECONDS) for k, pause in enumerate(pauses))
    assert all(pause <= min(2.0**k, MAX_RETRY_SECONDS) + 1 for k, pause in enumerate(pauses))
    assert max(pauses) > 100


def test_backoff_is_bounded_and_differs_by_key() -> None:
    assert all(0.5 <= compute_backoff(1, f"{i}") <= 1.0 for i in range(100))
    assert len({compute_backoff(3, f"{i}") for i in range(100)}) == 100
    assert compute_backoff(10_000, "a") <= MAX_RETRY_SECONDS


def test_retry_after_is_respected() -> None:
    delivery = Delivery()
    delivery.receiver.script = [TemporaryFailure("wait", retry_after=120.0)]
    for number in range(3):
        delivery.topic.append(make_states(number)[0])
    delivery.run(119.0)
    assert len(delivery.receiver.attempts) == 1
    delivery.run(2.0)
    assert len(delivery.receiver.accepted) == 3


def test_an_excessive_retry_after_is_bounded() -> None:
    delivery = Delivery()
    delivery.receiver.script = [TemporaryFailure("wait", retry_after=1e9)]
    delivery.topic.append(make_states()[0])
    delivery.run()
    delivery.clock.seconds += 3600.0
    delivery.run()
    assert delivery.receiver.list_actions() == ["open"]


def test_one_notification_that_fails_does_not_hold_the_others_back() -> None:
    delivery = Delivery()
    broken, fine = make_states(0)[0], make_states(1)[0]

    class Poisoned(ScriptedReceiver):
        def send(self, notification: Any) -> None:
            if notification.incident.id == broken.id:
                raise TemporaryFailure("HTTP 500")
            super().send(notification)

    delivery.receiver = Poisoned()
    delivery.start()
    delivery.topic.append(broken)
    delivery.topic.append(fine)
    delivery.run(5.0)
    assert [notification.incident.id for notification in delivery.receiver.accepted] == [fine.id]


def test_refused_notification_is_tried_again_every_hour_and_never_lost() -> None:
    delivery = Delivery()
    refused, accepted = make_states(0), make_states(1)
    delivery.receiver.refused = {refused[0].id}
    delivery.topic.append(refused[0])
    delivery.topic.append(accepted[0])
    delivery.run(REFUSED_RETRY_SECONDS - 1)
    assert len(delivery.receiver.attempts) == 2
    assert delivery.measure("deliveries_total", outcome="refused") == 1
    assert delivery.measure("delivery_pending") == 1
    assert delivery.measure("receiver_up") == 1
    delivery.run(2.0)
    assert len(delivery.receiver.attempts) == 3
    delivery.start()  # a restart keeps it, and sends nothing else again
    delivery.receiver.refused = set()
    delivery.run()
    assert [notification.incident.id for notification in delivery.receiver.accepted] == [accepted[0].id, refused[0].id]


def test_a_change_of_a_refused_incident_is_sent_at_once() -> None:
    delivery = Delivery()
    states = make_states()
    delivery.receiver.script = [PermanentFailure("too long")]
    delivery.topic.append(states[0])
    delivery.run()
    delivery.topic.append(states[1])
    delivery.run()
    assert delivery.receiver.list_actions() == ["open"]


def test_open_incidents_are_sent_again_until_they_are_resolved() -> None:
    delivery = Delivery(ScriptedReceiver(resend_seconds=60.0))
    states = make_states()
    delivery.topic.append(states[0])
    delivery.run(181.0)
    assert delivery.receiver.list_actions() == ["open", "update", "update", "update"]
    delivery.topic.append(states[2])
    delivery.run(300.0)
    assert delivery.receiver.list_actions() == ["open", "update", "update", "update", "resolve"]
    assert delivery.measure("delivery_pending") == 0


def test_resends_pause_while_the_receiver_is_down() -> None:
    delivery = Delivery(ScriptedReceiver(resend_seconds=60.0))
    delivery.topic.append(make_states()[0])
    delivery.run()
    delivery.receiver.is_down = True
    delivery.run(3600.0)
    assert 5 < len(delivery.receiver.attempts) < 40
    delivery.receiver.is_down = False
    delivery.run(MAX_RETRY_SECONDS)
    assert delivery.receiver.list_actions()[-1] == "update"


def test_labels_silence_and_take_it_back() -> None:
    delivery = Delivery()
    states = make_states()
    delivery.topic.append(states[0])
    delivery.run()
    delivery.add_label("false-alarm", states[0], 1)
    delivery.run()
    assert delivery.receiver.list_actions() == ["open", "resolve"]
    assert delivery.receiver.accepted[-1].presentation.silenced == "false-alarm"
    assert delivery.receiver.accepted[-1].incident.state == "open"
    delivery.add_label("maintenance", states[0], 2)
    delivery.run()
    delivery.add_label("cleared", states[0], 3)
    delivery.run()
    assert delivery.receiver.list_actions() == ["open", "resolve", "open"]
    keys = [notification.key for notification in delivery.receiver.accepted]
    assert len(set(keys)) == 3, "a receiver that recognises repeated keys shows the incident again"
    delivery.topic.append(states[2])
    delivery.run()
    assert delivery.receiver.list_actions() == ["open", "resolve", "open", "resolve"]


def test_silenced_incident_is_not_sent() -> None:
    delivery = Delivery()
    states = make_states()
    delivery.labels.append(
        make_label("maintenance", 1, device="pump-1", start=states[0].opened - MINUTE, end=states[0].opened + MINUTE)
    )
    delivery.start()
    for state in states:
        delivery.topic.append(state)
        delivery.run()
    assert delivery.receiver.attempts == []
    delivery.add_label("cleared", states[0])
    delivery.run()
    assert delivery.receiver.attempts == [], "nobody is called for an incident that is over"


def test_a_maintenance_window_that_is_entered_late_resolves() -> None:
    delivery = Delivery()
    opened = make_states()[0]
    delivery.topic.append(opened)
    delivery.run()
    delivery.label_log.append(
        make_label("maintenance", 1, device="pump-1", start=opened.opened, end=opened.opened + MINUTE)
    )
    delivery.run()
    assert delivery.receiver.list_actions() == ["open", "resolve"]


def test_a_window_that_is_taken_back_opens_with_another_key() -> None:
    delivery = Delivery()
    states = make_states()
    delivery.topic.append(states[0])
    delivery.run()
    for time, label in enumerate(["maintenance", "cleared"] * 3, 1):
        delivery.add_window(label, states[0], (-1, 100), time)
        delivery.run()
    delivery.topic.append(states[2])
    delivery.run()
    assert delivery.receiver.list_actions() == ["open", "resolve"] * 4
    keys = delivery.list_keys()
    assert len(set(keys)) == len(keys), "a receiver ignores keys that it has seen"


@pytest.mark.parametrize("names_former", [True, False])
def test_a_member_whose_fleet_incident_is_gone_opens_with_another_key(names_former: bool) -> None:
    """Messages of earlier releases do not name the former fleet incident."""
    delivery = Delivery()
    opened, updated, _ = make_states()
    former = "f" * 32 if names_former else None
    for message in (
        opened,
        replace(updated, parent="f" * 32),
        replace(updated, revision=2, former_parent=former),
        replace(updated, revision=3, former_parent=former, parent="e" * 32),
        replace(updated, revision=4, former_parent="e" * 32 if names_former else None),
    ):
        delivery.topic.append(message)
        delivery.run()
    assert delivery.receiver.list_actions() == ["open", "resolve", "open", "resolve", "open"]
    assert len(set(delivery.list_keys())) == 5


@pytest.mark.parametrize("is_compacted", [False, True])
def test_an_opening_that_is_sent_again_after_a_silence_has_an_equal_key(is_compacted: bool) -> None:
    """The process is killed after the opening was sent, and before its progress was stored."""
    for silence in ("window", "fleet"):
        delivery = Delivery()
        opened, updated, _ = make_states()
        delivery.topic.append(opened)
        delivery.run()
        if silence == "window":
            delivery.add_window("maintenance", opened, (-1, 100), 1)
            delivery.run(1.0)
            delivery.add_window("cleared", opened, (-1, 100), 2)
        else:
            delivery.topic.append(replace(updated, parent="f" * 32))
            delivery.run(1.0)
            delivery.topic.append(replace(updated, revision=2, former_parent="f" * 32))
        progress = dict(delivery.topic.progress)
        delivery.run()
        delivery.topic.progress = progress
        if is_compacted:
            delivery.topic.compact()
        delivery.start()
        delivery.run()
        assert delivery.receiver.list_actions() == ["open", "resolve", "open", "open"], silence
        keys = delivery.list_keys()
        assert keys[3] == keys[2] != keys[0], silence


def test_reopened_incident_is_opened_again_with_another_key() -> None:
    delivery = Delivery()
    states = make_states()
    reopened = replace(states[1], revision=3, num_reopened=1)
    for state in (states[0], states[2], reopened, replace(states[2], revision=4, num_reopened=1)):
        delivery.topic.append(state)
        delivery.run()
    assert delivery.receiver.list_actions() == ["open", "resolve", "open", "resolve"]
    assert len({notification.key for notification in delivery.receiver.accepted}) == 4


def test_a_labelled_incident_that_is_reopened_or_rises_is_sent_again() -> None:
    delivery = Delivery()
    opened, updated, _ = make_states()
    first = replace(opened, severity=1)
    delivery.topic.append(first)
    delivery.run()
    delivery.label_log.append(
        make_label("false-alarm", 1, incident=first.id, severity=1, num_reopened=first.num_reopened)
    )
    delivery.run()
    delivery.topic.append(replace(updated, severity=2))
    delivery.run()
    assert delivery.receiver.list_actions() == ["open", "resolve", "open"]
    assert len({notification.key for notification in delivery.receiver.accepted}) == 3


def test_several_notifications_are_sent_in_one_request() -> None:
    receiver = ScriptedBatchReceiver(wants_updates=True, resend_seconds=60.0)
    delivery = Delivery(receiver)
    incidents = [make_incident(number) for number in range(20)]
    for incident in incidents:
        delivery.topic.append(incident)
    receiver.is_down = True
    delivery.run()
    receiver.is_down, receiver.batch_sizes = False, []
    delivery.clock.seconds += 600.0
    delivery.run()
    assert receiver.batch_sizes == [8, 8, 4]
    assert receiver.list_actions() == ["open"] * 20
    receiver.refused.add(incidents[3].id)
    delivery.run(61.0)
    assert {notification.incident.id for notification in receiver.accepted[20:]} == {
        incident.id for incident in incidents if incident.id not in receiver.refused
    }, "one that is refused does not hold the others back"
    receiver.refused.clear()
    receiver.is_down = True
    num_accepted = len(receiver.accepted)
    delivery.run(61.0)
    receiver.is_down = False
    delivery.run(600.0)
    assert len({notification.incident.id for notification in receiver.accepted[num_accepted:]}) >= 19


def test_the_work_for_a_request_does_not_grow_with_the_number_of_open_incidents() -> None:
    steps_by_count = {}
    for count in (500, 4000):
        backlog = Backlog(True, {}, {0: count}, Overlay(), None, 60.0)
        for number in range(count):
            backlog.add(LoggedIncident(make_incident(number), 0, number), 0.0)
        backlog.start(0.0)
        entries = CountingEntries(backlog._entry_by_id)
        backlog._entry_by_id = entries
        backlog._pending = pending = CountingEntries(backlog._pending)
        for now in range(100):
            for entry in backlog.list_due(float(now), 1):
                backlog.mark_sent(entry, backlog.make_notification(entry), float(now))
            backlog.find_next_time(float(now))
        steps_by_count[count] = entries.num_scans + pending.num_scans
    assert steps_by_count == {500: 0, 4000: 0}


class CountingEntries(dict[str, Entry]):
    """A dictionary that counts how often all of its values are read."""

    num_scans = 0

    def values(self) -> Any:
        """Return the values, and count it."""
        self.num_scans += 1
        return super().values()


def test_receivers_get_one_notification_for_a_fleet() -> None:
    delivery = Delivery()
    members = [replace(make_incident(number), state="open", parent=None) for number in range(4)]
    fleet = make_fleet_incident(9, members)
    for message in (
        *members[:2],
        replace(fleet, state="open", revision=0),
        *(replace(member, state="updated", revision=1, parent=fleet.id) for member in members),
    ):
        delivery.topic.append(message)
        delivery.run()
    sent = [(notification.incident.kind, notification.action) for notification in delivery.receiver.accepted]
    assert sent == [("device", "open")] * 2 + [("fleet", "open")] + [("device", "resolve")] * 2
    assert {notification.presentation.silenced for notification in delivery.receiver.accepted[-2:]} == {"fleet"}
    for member in members:
        delivery.topic.append(replace(member, state="resolved", revision=2, parent=fleet.id, resolved=member.last))
    delivery.topic.append(replace(fleet, state="resolved", revision=3, resolved=fleet.last))
    delivery.run()
    assert len(delivery.receiver.accepted) == 6
    assert delivery.receiver.accepted[-1].incident.id == fleet.id


def test_further_message_of_a_resolved_incident_is_not_sent() -> None:
    delivery = Delivery()
    states = make_states()
    for state in (*states, replace(states[2], revision=3, parent="f" * 32)):
        delivery.topic.append(state)
        delivery.run()
    assert delivery.receiver.list_actions() == ["open", "resolve"]


def test_restart_sends_nothing_again() -> None:
    delivery = Delivery(ScriptedReceiver(wants_updates=True))
    silenced = make_incident(77)
    for incident in [*make_incidents(40), silenced]:
        delivery.topic.append(incident)
    delivery.add_label("false-alarm", silenced)
    delivery.run(2.0)
    num_attempts = len(delivery.receiver.attempts)
    delivery.start()
    delivery.run(2.0)
    assert len(delivery.receiver.attempts) == num_attempts
    delivery.topic.append(replace(silenced, state="resolved", revision=1))
    delivery.run(2.0)
    assert len(delivery.receiver.attempts) == num_attempts


def test_restart_resolves_what_was_open_and_is_compacted() -> None:
    delivery = Delivery()
    states = make_states()
    delivery.topic.append(states[0])
    delivery.run(2.0)
    delivery.topic.append(states[2])
    delivery.topic.compact()
    delivery.start()
    delivery.run()
    # Whether the opening was sent cannot be known any more; it is sent again with its key.
    assert delivery.receiver.list_actions() == ["open", "open", "resolve"]
    assert delivery.receiver.accepted[0].key == delivery.receiver.accepted[1].key


def test_label_that_was_given_while_the_process_was_away_resolves() -> None:
    delivery = Delivery()
    states = make_states()
    delivery.topic.append(states[0])
    delivery.run(2.0)
    delivery.labels.append(make_label("false-alarm", 1, incident=states[0].id))
    delivery.start()
    delivery.run(2.0)
    assert delivery.receiver.list_actions() == ["open", "resolve"]
    delivery.start()
    delivery.run(2.0)
    assert delivery.receiver.list_actions() == ["open", "resolve"]


def test_progress_is_bounded() -> None:
    delivery = Delivery()
    delivery.run()
    delivery.receiver.is_down = True
    for number in range(2 * MAX_NOTED_INCIDENTS):
        delivery.topic.append(make_states(number)[0])
    delivery.run(5.0)
    progress = delivery.topic.progress[0]
    assert len(progress.state_by_id) == MAX_NOTED_INCIDENTS == progress.position


@pytest.mark.parametrize("count", [MAX_FULL_IDS, MAX_FULL_IDS + 1, 200])
def test_incidents_that_are_silenced_are_sent_after_a_restart_if_they_are_not_silenced_any_more(count: int) -> None:
    delivery = Delivery()
    delivery.run()
    silenced = [make_states(number)[0] for number in range(count)]
    delivery.labels.append(make_label("maintenance", 1, device="pump-1", start=0, end=2**52))
    delivery.start()
    for incident in silenced:
        delivery.topic.append(incident)
    delivery.run(2.0)
    delivery.start()
    delivery.run(2.0)
    assert delivery.receiver.attempts == []
    delivery.labels.append(make_label("cleared", 2, device="pump-1", start=0, end=2**52))
    delivery.start()
    delivery.run(2.0)
    assert [(made.action, made.incident.id) for made in delivery.receiver.accepted] == [
        ("open", incident.id) for incident in silenced
    ]
    delivery.start()
    delivery.run(2.0)
    assert len(delivery.receiver.accepted) == count


@pytest.mark.parametrize("is_restarted", [False, True])
def test_devices_that_join_a_labelled_fleet_incident_open_it_again(is_restarted: bool) -> None:
    """A restart sends nothing again, and what follows from the logs does not depend on it."""
    fleet = make_fleet_incident(9, [make_incident(number, device=f"pump-{number}") for number in range(3)])
    members = [
        replace(make_incident(number, state="updated", device=f"pump-{number}"), parent=fleet.id) for number in range(5)
    ]
    delivery = Delivery()

    def proceed() -> None:
        delivery.run(2.0)  # the progress is stored after a second
        if is_restarted:
            delivery.start()
            delivery.run()

    for incident in (*members[:3], fleet):
        delivery.topic.append(incident)
    proceed()
    delivery.add_label("false-alarm", fleet, 1, severity=3, num_reopened=0, members=fleet.members)
    proceed()
    assert delivery.receiver.list_actions() == ["open", "resolve"]
    delivery.topic.append(members[3])
    proceed()
    assert delivery.receiver.list_actions() == ["open", "resolve", "open"]
    opened = delivery.receiver.accepted[-1]
    assert (opened.incident.id, opened.incident.members) == (fleet.id, tuple(one.id for one in members[:4]))
    assert opened.incident.devices == tuple(one.device for one in members[:4])
    assert opened.presentation.num_new_members == 1
    delivery.topic.append(members[4])
    delivery.topic.append(replace(fleet, revision=2, members=tuple(one.id for one in members)))
    proceed()
    assert delivery.receiver.list_actions() == ["open", "resolve", "open"], "it is open already"
    delivery.add_label("maintenance", fleet, 2, severity=3, num_reopened=0, members=tuple(one.id for one in members))
    proceed()
    assert delivery.receiver.list_actions() == ["open", "resolve", "open", "resolve"]
    assert len({notification.key for notification in delivery.receiver.accepted}) == 4


def test_a_fleet_incident_that_is_resolved_before_its_new_member_is_listed_is_sent() -> None:
    fleet = make_fleet_incident(9, [make_incident(number, device=f"pump-{number}") for number in range(3)])
    delivery = Delivery()
    delivery.topic.append(fleet)
    delivery.run()
    delivery.add_label("false-alarm", fleet, 1, severity=3, num_reopened=0, members=fleet.members)
    delivery.run()
    late = make_incident(4, device="pump-4")
    delivery.topic.append(
        replace(fleet, revision=2, members=(*fleet.members, late.id), state="resolved", resolved=fleet.last)
    )
    delivery.run()
    assert delivery.receiver.list_actions() == ["open", "resolve", "open", "resolve"]


def test_members_of_fleet_incidents_need_no_place_in_the_progress() -> None:
    delivery = Delivery()
    delivery.run()
    members = [replace(make_states(number)[0], parent="f" * 32) for number in range(2 * MAX_NOTED_INCIDENTS)]
    for member in members:
        delivery.topic.append(member)
    delivery.run(2.0)
    assert delivery.topic.progress[0] == DeliveryProgress(len(members), {}, 0)
    delivery.start()
    delivery.run(2.0)
    assert delivery.receiver.attempts == []
    for member in members:  # while the process runs, and they leave the fleet incident
        delivery.topic.append(replace(member, parent=None, state="updated", revision=1))
    delivery.run(2.0)
    assert [made.incident.id for made in delivery.receiver.accepted] == [member.id for member in members]


def test_more_incidents_than_the_progress_can_list_are_not_lost() -> None:
    delivery = Delivery()
    delivery.run()
    delivery.labels.append(make_label("maintenance", 1, device="pump-1", start=0, end=2**52))
    delivery.start()
    silenced = [make_states(number)[0] for number in range(MAX_NOTED_INCIDENTS + 40)]
    for incident in silenced:
        delivery.topic.append(incident)
    delivery.run(2.0)
    assert delivery.topic.progress[0].position == MAX_NOTED_INCIDENTS
    delivery.labels.append(make_label("cleared", 2, device="pump-1", start=0, end=2**52))
    delivery.start()
    delivery.run(2.0)
    assert [made.incident.id for made in delivery.receiver.accepted] == [incident.id for incident in silenced]
    assert set(delivery.receiver.list_actions()) == {"open"}


@pytest.mark.parametrize("num_listed", [MAX_FULL_IDS, MAX_FULL_IDS + 1])
def test_progress_of_an_earlier_release_is_read(num_listed: int) -> None:
    """A list of 80 full ids may be incomplete: incidents after the position may be shown although it lacks them."""
    incidents = [make_states(number)[0] for number in range(num_listed + 1)]
    progress = {0: DeliveryProgress(num_listed, {incident.id: "hidden" for incident in incidents[:-1]}, 0)}
    label = make_label("false-alarm", 1, incident=incidents[-1].id)
    backlog = Backlog(False, progress, {0: 0}, Overlay([label]))
    for offset, incident in enumerate(incidents):
        backlog.add(LoggedIncident(incident, 0, offset), 0.0)
    backlog.start(0.0)
    pending = {entry.incident.id: entry.pending for entry in backlog.list_due(0.0, 1000)}
    may_be_shown = num_listed > MAX_FULL_IDS
    assert pending == dict.fromkeys([one.id for one in incidents[:-1]], "open") | (
        {incidents[-1].id: "resolve"} if may_be_shown else {}
    )


def test_progress_is_stored_only_if_it_has_changed() -> None:
    delivery = Delivery()
    delivery.topic.append(make_states()[0])
    delivery.run(100.0)
    assert delivery.reader.num_stored <= 5


def test_new_assignment_continues_from_the_stored_progress() -> None:
    delivery = Delivery()
    states = make_states()
    delivery.topic.append(states[0])
    delivery.run(2.0)
    delivery.reader.reassign()
    delivery.topic.append(states[2])
    delivery.run(2.0)
    assert delivery.receiver.list_actions() == ["open", "resolve"]


def test_unavailable_log_loses_nothing() -> None:
    delivery = Delivery()
    delivery.run()
    delivery.topic.append(make_states()[0])
    delivery.topic.is_available = False
    with pytest.raises(Unavailable):
        delivery.run()
    delivery.topic.is_available = True
    delivery.run()
    assert delivery.receiver.list_actions() == ["open"]


@pytest.mark.parametrize("method", ["load_progress", "store_progress"])
def test_messages_that_were_read_before_the_progress_are_sent(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is read first, and whoever stores the progress of the group can be away at that moment."""
    delivery = Delivery()
    delivery.topic.append(make_states()[0])
    answers = [Unavailable("away"), Unavailable("away")]
    original = getattr(delivery.reader, method)

    def answer(*arguments: Any) -> Any:
        if answers:
            raise answers.pop()
        return original(*arguments)

    monkeypatch.setattr(delivery.reader, method, answer)
    for _ in range(2):
        with pytest.raises(Unavailable):
            delivery.worker.run_once()
    delivery.run(2.0)
    assert delivery.receiver.list_actions() == ["open"]
    assert delivery.topic.progress[0].first_position == 0  # nothing was there when the receiver started


@pytest.mark.parametrize("failure", [Unavailable("away"), ConfigError("not permitted")])
def test_a_request_is_noted_before_it_is_sent_also_after_a_failure(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery = Delivery()
    delivery.run()
    noted: list[Any] = []
    send = delivery.receiver.send

    def note_and_send(notification: Any) -> None:
        noted.append(dict(delivery.topic.progress[0].state_by_id))
        send(notification)

    monkeypatch.setattr(delivery.receiver, "send", note_and_send)
    delivery.topic.append(make_states()[0])
    store = delivery.reader.store_progress
    failures = [failure]

    def store_later(progress: Any) -> None:
        if failures:
            raise failures.pop()
        store(progress)

    monkeypatch.setattr(delivery.reader, "store_progress", store_later)
    with pytest.raises(type(failure)):
        delivery.run()
    assert noted == []
    delivery.run()
    assert [list(state) for state in noted] == [[make_states()[0].id]]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("message"), st.integers(0, 3), st.sampled_from(["next", "resolve", "join", "leave"])),
        st.tuples(st.just("label"), st.integers(0, 3), st.sampled_from(["true", "false-alarm", "cleared"])),
        st.tuples(
            st.just("window"),
            st.integers(0, 3),
            st.tuples(
                st.sampled_from(["maintenance", "cleared"]),
                st.sampled_from([(-5, 5), (-5, 15), (-5, 100), (5, 15), (10, 30)]),
            ),
        ),
        st.tuples(st.just("run"), st.sampled_from([0.0, 1.0, 5.0]), st.just("")),
        st.tuples(st.just("outcome"), st.sampled_from(["down", "up", "refuse", "accept"]), st.integers(0, 3)),
        st.tuples(st.just("kill"), st.booleans(), st.just("")),
        st.tuples(st.just("reassign"), st.just(0), st.just("")),
    ),
    max_size=40,
)


MESSAGE, RUN = ("message", 0, "next"), ("run", 0.0, "")
SILENCE, RESOLVE = ("label", 0, "false-alarm"), ("message", 0, "resolve")
JOIN, LEAVE = ("message", 0, "join"), ("message", 0, "leave")
WINDOW, BACK = ("window", 0, ("maintenance", (-5, 100))), ("window", 0, ("cleared", (-5, 100)))


@given(STEPS)
@example([MESSAGE, RUN, SILENCE, ("kill", False, "")])  # silenced after an opening that no commit states
@example([MESSAGE, RUN, RESOLVE, RUN, ("kill", False, ""), MESSAGE])  # reopened after such a resolution
@example([MESSAGE, RUN, MESSAGE, ("kill", True, ""), SILENCE])  # the opening is compacted
@example([MESSAGE, RUN, ("reassign", 0, ""), ("outcome", "refuse", 0), RUN, SILENCE])  # accepted, then refused
@example([MESSAGE, RUN, WINDOW, RUN, BACK])
@example([MESSAGE, RUN, JOIN, RUN, ("kill", True, ""), LEAVE, ("kill", True, "")])  # the fleet incident is compacted
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_happens_the_receiver_shows_what_is_open_in_the_end(steps: list[tuple[Any, Any, Any]]) -> None:
    """After failures, refusals, labels and kills, the receiver shows exactly the incidents that are open and not
    silenced. The first message of each is its opening, and messages are repeated only with equal keys."""
    check_steps(steps)


@pytest.mark.parametrize("limit", [1, 2])
@given(STEPS)
@settings(max_examples=num_examples(400), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_same_holds_if_the_progress_can_list_few_incidents(limit: int, steps: list[tuple[Any, Any, Any]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(notification_backlog, "MAX_NOTED_INCIDENTS", limit)
        patch.setattr(notification_backlog, "MAX_FULL_IDS", 0)
        check_steps(steps, is_truncated=True)


def check_steps(steps: list[tuple[Any, Any, Any]], is_truncated: bool = False) -> None:
    """Run a receiver through the steps, and check what it shows in the end.

    Args:
        steps: The steps.
        is_truncated: Whether the progress may be too short. It is then unknown whether incidents were sent.
    """
    delivery = Delivery(ScriptedReceiver(wants_updates=True))
    delivery.run()
    last_by_number: dict[int, Incident] = {}
    num_labels = num_fleets = 0
    for kind, argument, detail in steps:
        if kind == "message":
            last = last_by_number.get(argument)
            if last is None:
                message = make_incident(argument, device=f"pump-{argument}")
            elif last.state == "resolved":
                message = replace(
                    last, state="updated", resolved=None, revision=last.revision + 1, num_reopened=last.num_reopened + 1
                )
            else:
                state = "resolved" if detail == "resolve" else "updated"
                message = replace(last, state=state, revision=last.revision + 1)  # type: ignore[arg-type]
            message = replace(message, last=message.last + 5 * MINUTE)
            if detail == "join":  # a fleet incident
                num_fleets += message.parent is None
                message = replace(message, parent=message.parent or f"{num_fleets:032x}")
            elif detail == "leave" and message.parent is not None:
                message = replace(message, parent=None, former_parent=message.parent)
            last_by_number[argument] = message
            delivery.topic.append(message)
        elif kind == "label":
            num_labels += 1
            delivery.add_label(detail, make_incident(argument), num_labels)
        elif kind == "window":
            num_labels += 1
            delivery.add_window(detail[0], make_incident(argument, device=f"pump-{argument}"), detail[1], num_labels)
        elif kind == "run":
            delivery.run(argument)
        elif kind == "outcome":
            receiver = delivery.receiver
            if argument in ("down", "up"):
                receiver.is_down = argument == "down"
            elif argument == "refuse":
                receiver.refused.add(make_incident(detail).id)
            else:
                receiver.refused.discard(make_incident(detail).id)
        elif kind == "kill":
            if argument:
                delivery.topic.compact()
            delivery.start()
        else:
            delivery.reader.reassign()
    delivery.receiver.is_down, delivery.receiver.refused = False, set()
    delivery.run()
    delivery.clock.seconds += REFUSED_RETRY_SECONDS
    delivery.run()
    assert delivery.measure("delivery_pending") == 0
    overlay = Overlay(delivery.labels)
    for number, last in last_by_number.items():
        distinct: list[str] = []
        actions: list[str] = []
        for notification in delivery.receiver.accepted:
            if notification.incident.id == last.id:
                if notification.key not in distinct:
                    actions.append(notification.action)
                distinct.append(notification.key)
        is_shown = bool(actions) and [action for action in actions if action != "update"][-1] == "open"
        assert is_shown == (last.state != "resolved" and overlay.present_to_receivers(last).silenced is None), (
            number,
            actions,
        )
        attempts = [made.action for made in delivery.receiver.attempts if made.incident.id == last.id]
        # After compaction, it may be unknown whether the opening of a silenced incident was sent.
        assert attempts[:1] in ([], ["open"]) or ("kill", True, "") in steps or is_truncated
        if not delivery.labels and not any(detail == "join" for _, _, detail in steps):
            assert actions, "every incident is sent"


def test_backlog_reads_history_without_sending() -> None:
    """Before the start nothing is pending, so that a later message in the log can change it."""
    backlog = Backlog(False, {}, {0: 3}, Overlay())
    for offset, state in enumerate(make_states()):
        backlog.add(LoggedIncident(state, 0, offset), 0.0)
    assert not backlog.list_due(0.0, 1)
    backlog.start(0.0)
    assert not backlog.list_due(0.0, 1)


class HangingReceiver(ScriptedReceiver):
    """A receiver that answers only after it was released."""

    def __init__(self) -> None:
        super().__init__("hanging")
        self.is_called, self.release = threading.Event(), threading.Event()

    def send(self, notification: Any) -> None:
        """Wait for the release."""
        self.is_called.set()
        assert self.release.wait(WAIT_SECONDS)
        super().send(notification)


def test_a_hanging_receiver_does_not_block_the_others() -> None:
    topic = Topic([make_states(number)[0] for number in range(5)])
    has_all = threading.Event()

    class Counting(ScriptedReceiver):
        def send(self, notification: Any) -> None:
            super().send(notification)
            if len(self.accepted) == 5:
                has_all.set()

    hanging, healthy = HangingReceiver(), Counting("healthy")
    metrics = DeliveryMetrics(CollectorRegistry())
    notifier = Notifier(
        [
            WorkerThread(
                receiver.name,
                lambda receiver=receiver: ReceiverWorker(  # type: ignore[misc]
                    receiver, TopicReader(Topic(topic.messages)), None, metrics
                ),
            )
            for receiver in (hanging, healthy)
        ]
    )
    notifier.start()
    assert hanging.is_called.wait(WAIT_SECONDS)
    assert has_all.wait(WAIT_SECONDS)
    assert hanging.accepted == []
    with structlog.testing.capture_logs() as lines:
        notifier.close(0.0)
    (line,) = (line for line in lines if line["event"] == "workers_not_stopped")
    assert "hanging" in line["workers"]
    hanging.release.set()
    with structlog.testing.capture_logs() as lines:
        notifier.close(WAIT_SECONDS)
    assert not lines, "all workers have stopped"
    assert healthy.is_closed
    assert hanging.is_closed


def test_thread_survives_errors_of_its_worker() -> None:
    class Failing:
        num_runs = 0
        is_done = threading.Event()

        def run_once(self) -> None:
            self.num_runs += 1
            if self.num_runs == 1:
                raise Unavailable("the broker is away")
            self.is_done.set()

        def close(self) -> None:
            raise Unavailable("the broker is away")

    worker = Failing()
    thread = WorkerThread("failing", lambda: worker)
    thread.start()
    assert worker.is_done.wait(WAIT_SECONDS)
    thread.request_stop()
    assert thread.join(WAIT_SECONDS)


def test_a_worker_that_cannot_be_created_ends_the_start() -> None:
    def create() -> Any:
        raise Unavailable("no broker responds: start it")

    running = WorkerThread(
        "running", lambda: OpenIncidentCounter(MemoryIncidentLog(), None, OpenIncidentMetrics(CollectorRegistry()))
    )
    notifier = Notifier([running, WorkerThread("broken", create), WorkerThread("not started", create)])
    with pytest.raises(Unavailable):
        notifier.start()
    assert running.join(WAIT_SECONDS)


@pytest.mark.parametrize(
    ("is_resolved", "is_silenced", "state", "pending"),
    [
        (False, False, "hidden", "open"),
        (False, False, "opening", "open"),
        (False, False, "resolving", "open"),
        (False, False, "shown", None),
        (False, True, "hidden", None),
        (False, True, "opening", "resolve"),
        (False, True, "shown", "resolve"),
        (False, True, "resolving", "resolve"),
        (True, False, "hidden", "open"),
        (True, False, "opening", "open"),
        (True, False, "shown", "resolve"),
        (True, False, "resolving", "resolve"),
        (True, True, "hidden", None),
        (True, True, "opening", "resolve"),
        (True, True, "shown", "resolve"),
        (True, True, "resolving", "resolve"),
    ],
)
def test_the_table_of_states(is_resolved: bool, is_silenced: bool, state: ReceiverState, pending: str | None) -> None:
    """The table in the docstring of `notification_backlog`."""
    incident = make_states(1)[2 if is_resolved else 0]
    labels = [make_label("false-alarm", 1, incident=incident.id)] if is_silenced else []
    progress = {0: DeliveryProgress(1, {incident.id: state})}
    backlog = Backlog(False, progress, {0: 0}, Overlay(labels))
    backlog.add(LoggedIncident(incident, 0, 0), 0.0)
    backlog.start(0.0)
    entry = next(iter(backlog.list_due(0.0, 1)), None)
    assert (None if entry is None else entry.pending) == pending


def test_numbers_of_open_and_silenced_incidents() -> None:
    registry = CollectorRegistry()
    incidents, labels = MemoryIncidentLog(), MemoryFeedbackLog()
    counter = OpenIncidentCounter(incidents, labels, OpenIncidentMetrics(registry))
    for number in range(4):
        incidents.append(make_states(number)[0])
    incidents.append(make_states(0)[2])
    labels.append(make_label("false-alarm", 1, incident=make_states(1)[0].id))
    counter.run_once()

    def measure(name: str, **fields: str) -> float | None:
        return registry.get_sample_value(f"deformer_{name}", fields)

    assert [measure("incidents_open", severity=str(severity)) for severity in (1, 2, 3)] == [1, 2, 0]
    assert measure("incidents_silenced", reason="false-alarm") == 1
    assert measure("incidents_silenced", reason="maintenance") == 0


def test_incidents_are_counted_if_labels_cannot_be_read() -> None:
    class AbsentLabels(MemoryFeedbackLog):
        def poll(self, timeout: float) -> Any:
            raise Unavailable("away")

    registry = CollectorRegistry()
    incidents = MemoryIncidentLog(make_states()[:1])
    counter = OpenIncidentCounter(incidents, AbsentLabels(), OpenIncidentMetrics(registry))
    with pytest.raises(Unavailable):
        counter.run_once()
    assert registry.get_sample_value("deformer_incidents_open", {"severity": str(make_states()[0].severity)}) == 1
