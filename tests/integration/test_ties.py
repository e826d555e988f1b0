"""Tie groups with a real Kafka broker: waiting readings survive a restart and are scored after the timeout.

A tie group is the readings of one record with the same event time; they wait for each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from connectors.kafka import produce
from tests.integration.programs import Cluster, RunningConsumer

pytestmark = pytest.mark.kafka


def test_waiting_readings_survive_a_restart_and_alert(
    cluster: Cluster, topic: Callable[..., str], model_dir: Path, tmp_path: Path
) -> None:
    """The first run waits for an hour; the second one waits for 200 ms and alerts, although nothing else comes."""
    name = topic(1)
    options = ["--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap, "--model", model_dir]
    options += ["--ties", "hold", "--alpha", "0.3", "--tie-wait"]
    readings = [
        {"record": "r", "feature": f, "value": v, "time": 5} for f, v in (("vibration", -9e3), ("pressure", 9e3))
    ]
    with RunningConsumer(tmp_path / "first.log", *options, "1h") as consumer:
        consumer.wait_until_ready()
        produce(cluster.brokers, name, [(b"r", json.dumps(reading).encode(), None) for reading in readings], None)
        consumer.wait_for(cluster.is_consumed(name, name), "the readings to be consumed")
        assert consumer.stop()["alerts"] == 0
    with RunningConsumer(tmp_path / "second.log", *options, "200ms") as consumer:
        consumer.wait_for(lambda: bool(consumer.list_log_events("alert_raised")), "the alert after the timeout")
        assert consumer.stop()["alerts"] == 1
        assert consumer.list_log_events("ready")[0]["model"]
    (message,) = cluster.read_topic(f"{name}-alerts")
    alert = json.loads(message.value)
    assert (alert["record"], alert["raised_at"], alert["source"]) == ("r", 2, None)
    assert alert["time"] == "1970-01-01T00:00:05Z"
    assert {part["feature"] for part in alert["contributions"]} == {"vibration", "pressure"}
