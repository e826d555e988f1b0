"""Tests of the benchmark of delivery: what counts as delivered, and the latency of alerts."""

from __future__ import annotations

import pytest

from benchmarks.incident_delivery import count_missing, describe_latency, format_report
from connectors.receivers.webhook import Webhook
from deformer_stream.codec.encode_incidents import encode_incident
from deformer_stream.incidents.overlay import Presentation
from deformer_stream.runtime.incident_ports import Notification, TemporaryFailure
from tests.connectors.receiving_server import Answer, ReceivingServer
from tests.incidents.examples import make_incident


def test_latency_of_alerts() -> None:
    sent = {f"r{i}": float(i) for i in range(100)}
    row = describe_latency("before", sent, {f"r{i}": i + 0.001 * i for i in range(99)})
    assert (row["alerts"], row["without_an_alert"], row["largest_ms"]) == (99, 1, 98.0)
    assert 48 <= row["median_ms"] <= 50
    assert describe_latency("before", {}, {})["alerts"] == 0


def test_only_accepted_requests_count() -> None:
    server = ReceivingServer()
    incident = make_incident(1)
    webhook = Webhook(server.url, None, "sensors", 30.0)
    expected = {(incident.id, 0): {"open", "resolve"}, ("another", 0): {"open"}}
    server.script.append(Answer(500))
    notification = Notification(incident, "open", "a" * 32, Presentation(), encode_incident(incident))
    with pytest.raises(TemporaryFailure):
        webhook.send(notification)
    assert count_missing(server, expected) == 3
    webhook.send(notification)
    webhook.close()
    server.close()
    assert count_missing(server, expected) == 2


def test_report_has_both_tables() -> None:
    rows = [
        {"table": "latency", "phase": "before", "median_ms": 8.5},
        {"table": "receivers", "webhook": "hangs", "missing": 0},
    ]
    text = format_report(rows, "a machine")
    assert "| phase | median ms |\n" in text
    assert "| before | 8.5 |\n" in text
    assert "| hangs | 0 |\n" in text
