"""Delivery to a real Alertmanager: it shows each incident once and resolves it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from connectors.receivers.alertmanager import RESEND_SECONDS, Alertmanager
from deformer_stream.incidents.events import Incident
from deformer_stream.runtime.incident_metrics import DeliveryMetrics
from deformer_stream.runtime.memory_logs import MemoryFeedbackLog
from deformer_stream.runtime.notification import ReceiverWorker
from tests.connectors.alertmanager import RunningAlertmanager, list_statuses, run_alertmanager
from tests.connectors.receiving_server import ReceivingServer
from tests.incidents.delivery import ManualClock, Topic, TopicReader
from tests.incidents.examples import make_incident, make_incidents, make_label


@pytest.fixture
def server() -> Iterator[ReceivingServer]:
    """The server that Alertmanager notifies."""
    running = ReceivingServer()
    yield running
    running.close()


@pytest.fixture
def alertmanager(tmp_path: Path, server: ReceivingServer) -> Iterator[RunningAlertmanager]:
    """A running Alertmanager."""
    with run_alertmanager(tmp_path, server.url) as running:
        yield running


class Delivery:
    """A worker that notifies Alertmanager of the incidents of a topic."""

    def __init__(self, alertmanager: RunningAlertmanager) -> None:
        self.topic, self.labels, self.clock = Topic(), MemoryFeedbackLog(), ManualClock()
        self._alertmanager = alertmanager
        self.receivers: list[Alertmanager] = []
        self.start()

    def start(self) -> None:
        """Start the worker again, without closing the one before."""
        self.registry = CollectorRegistry()
        self.receivers.append(Alertmanager(self._alertmanager.url, 30.0))
        self.worker = ReceiverWorker(
            self.receivers[-1],
            TopicReader(self.topic),
            self.labels,
            DeliveryMetrics(self.registry),
            "https://plant.example",
            self.clock,
        )

    def send(self, *incidents: Incident) -> None:
        """Append messages to the topic, and run the worker until it has nothing to do."""
        for incident in incidents:
            self.topic.append(incident)
        for _ in range(3 + len(self.topic.messages)):
            self.worker.run_once()
        name = {"receiver": self.receivers[-1].name}
        assert self.registry.get_sample_value("deformer_delivery_pending", name) == 0
        for outcome in ("failed", "refused"):
            assert self.registry.get_sample_value("deformer_deliveries_total", {**name, "outcome": outcome}) == 0


@pytest.fixture
def delivery(alertmanager: RunningAlertmanager) -> Iterator[Delivery]:
    """The delivery to the running Alertmanager."""
    made = Delivery(alertmanager)
    yield made
    for receiver in made.receivers:
        receiver.close()


def test_each_incident_is_shown_once_and_resolved(
    delivery: Delivery, alertmanager: RunningAlertmanager, server: ReceivingServer
) -> None:
    """Incidents with hostile names and of fleets; updates, repetitions and a restart make no second alert."""
    incidents = [replace(one, state="open", resolved=None) for one in make_incidents(100)]
    ids = {incident.id for incident in incidents}
    delivery.send(*incidents)
    assert {alert["labels"]["incident"] for alert in alertmanager.list_alerts()} == ids
    delivery.send(*(replace(one, state="updated", severity=3, num_records=99, revision=1) for one in incidents))
    delivery.clock.seconds += RESEND_SECONDS
    delivery.send()
    delivery.start()
    delivery.send()
    alerts = alertmanager.list_alerts()
    assert len(alerts) == len(ids)
    assert {alert["annotations"]["severity"] for alert in alerts} == {"3"}
    server.wait_until(lambda _: set(list_statuses(server)) == ids)
    delivery.send(*(replace(one, state="resolved", resolved=one.last, revision=2) for one in incidents))
    server.wait_until(lambda _: all(statuses[-1] == "resolved" for statuses in list_statuses(server).values()))
    assert list_statuses(server) == {identifier: ["firing", "resolved"] for identifier in ids}
    assert alertmanager.list_alerts() == []


def test_silenced_incident_is_resolved_and_fires_again_if_the_label_is_taken_back(
    delivery: Delivery, server: ReceivingServer
) -> None:
    incident = make_incident(3)
    delivery.send(incident)
    server.wait_until(lambda _: list_statuses(server)[incident.id] == ["firing"])
    delivery.labels.append(make_label("false-alarm", 1, incident=incident.id))
    delivery.send()
    server.wait_until(lambda _: list_statuses(server)[incident.id] == ["firing", "resolved"])
    delivery.labels.append(make_label("cleared", 2, incident=incident.id))
    delivery.send()
    server.wait_until(lambda _: list_statuses(server)[incident.id] == ["firing", "resolved", "firing"])


def test_device_whose_clock_runs_ahead(delivery: Delivery, server: ReceivingServer) -> None:
    incident = replace(make_incident(3), opened=int((time.time() + 86_400) * 1e6))
    delivery.send(incident)
    server.wait_until(lambda _: list_statuses(server)[incident.id] == ["firing"])
    delivery.send(replace(incident, state="resolved", revision=1))
    server.wait_until(lambda _: list_statuses(server)[incident.id] == ["firing", "resolved"])
