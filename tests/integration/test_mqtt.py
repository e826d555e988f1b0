"""`deformer-stream consume` with a real Mosquitto and without Kafka."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.codec.sparkplug_messages import SimulatedNode
from tests.effort import IS_LONG
from tests.integration.programs import RunningConsumer, run_successfully, wait_until
from tests.models import SCHEMA, draw_rows
from tests.mosquitto import Mosquitto, open_publisher, publish, run_mosquitto

PATTERN = ("--pattern", "plant/{device}/{feature}")
SCORING = ("--window", "10s", "--alpha", "0.3", "--record-timeout", "1h")
NUM_DEVICES = 4
NUM_KILLS, RESTARTS = (10, (3, 7)) if IS_LONG else (3, (1,))
"""Number of kills of the consumer, and the kills after which Mosquitto is restarted."""

START = 1_600_000_000


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Mosquitto]:
    """Return a running MQTT broker."""
    with run_mosquitto(tmp_path / "mosquitto") as broker:
        yield broker


def check_equal(alert: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that two alerts differ only in the position of their message, and in the last bits of attributions.

    Attributions are computed for several readings together, and their last bits depend on which these are.
    """
    others = [{k: v for k, v in a.items() if k not in ("source", "contributions")} for a in (alert, expected)]
    assert others[0] == others[1]
    for found, wanted in zip(alert["contributions"], expected["contributions"], strict=True):
        assert (found["feature"], found["value"]) == (wanted["feature"], wanted["value"])
        assert found["suspect"] == wanted["suspect"]
        for name in ("surprise", "attribution"):
            assert found[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-4)


def check_all_equal(alerts: dict[str, dict[str, Any]], expected: dict[str, dict[str, Any]]) -> None:
    """Check that two sets of alerts, by id, are equal."""
    assert alerts.keys() == expected.keys()
    for alert_id, alert in alerts.items():
        check_equal(alert, expected[alert_id])


class AlertSubscriber:
    """A client that receives alerts with a session that outlives its connections.

    Attributes:
        received: Topics and alerts in order of arrival.
    """

    def __init__(self, port: int) -> None:
        self.received: list[tuple[str, dict[str, Any]]] = []
        self._client = Client(CallbackAPIVersion.VERSION2, "alerts", protocol=MQTTProtocolVersion.MQTTv5)
        self._client.on_message = self._on_message
        has_subscribed = threading.Event()
        self._client.on_subscribe = lambda *_: has_subscribed.set()
        properties = Properties(PacketTypes.CONNECT)
        properties.SessionExpiryInterval = 3600
        self._client.connect("127.0.0.1", port, clean_start=False, properties=properties)
        self._client.subscribe("deformer-stream/alerts/#", qos=1)
        self._client.loop_start()
        assert has_subscribed.wait(60.0)

    def _on_message(self, _client: Client, _userdata: Any, message: Any) -> None:
        self.received.append((message.topic, json.loads(message.payload)))

    def collect(self) -> dict[str, dict[str, Any]]:
        """Return the alerts by id, after checking that repetitions are equal."""
        alerts: dict[str, dict[str, Any]] = {}
        for _, alert in self.received:
            check_equal(alerts.setdefault(alert["id"], alert), alert)
        return alerts

    def close(self) -> None:
        """Close the connection."""
        self._client.disconnect()
        self._client.loop_stop()


@pytest.fixture
def subscriber(mosquitto: Mosquitto) -> Iterator[AlertSubscriber]:
    """Return a client that receives alerts."""
    client = AlertSubscriber(mosquitto.port)
    yield client
    client.close()


def start_consumer(log: Path, mosquitto: Mosquitto, model: Path, *options: object) -> RunningConsumer:
    """Start `consume`, whose state is in a folder beside its log."""
    source = f"mqtt://127.0.0.1:{mosquitto.port}/plant/#"
    words = ("--source", source, "--model", model, "--state-dir", log.parent / "state", "--alerts", "")
    return RunningConsumer(log, *words, *PATTERN, *SCORING, *options)


def make_readings(num_records: int, seed: int = 3) -> list[tuple[str, str, Any, float]]:
    """Return readings of several devices in windows of ten seconds: device, feature, value and time."""
    readings = []
    for index, row in enumerate(draw_rows(SCHEMA, num_records, seed)):
        start = START + 10 * (index // NUM_DEVICES)
        readings += [(f"pump-{index % NUM_DEVICES}", name, value, start + 0.5) for name, value in row.items()]
    return readings


def to_message(reading: tuple[str, str, Any, float]) -> tuple[str, str]:
    """Return the topic and the payload of a reading."""
    device, feature, value, moment = reading
    return f"plant/{device}/{feature}", json.dumps({"value": value, "time": moment})


def replay(folder: Path, model: Path, readings: list[tuple[str, str, Any, float]]) -> dict[str, dict[str, Any]]:
    """Return the alerts that `replay` raises for readings, by id."""
    names = ("device", "feature", "value", "time")
    events, alerts = folder / "events.jsonl", folder / "alerts.jsonl"
    events.write_text("".join(json.dumps(dict(zip(names, reading, strict=True))) + "\n" for reading in readings))
    run_successfully("deformer-stream", "replay", events, "--model", model, "--alerts", alerts, *SCORING)
    found = [json.loads(line) for line in alerts.read_text().splitlines()]
    return {alert["id"]: alert for alert in found}


def is_finished(consumer: RunningConsumer, num_events: int) -> bool:
    """Return whether a consumer has accepted or rejected this many readings, and has acknowledged all messages."""
    metrics = consumer.read_metrics()
    handled = metrics["deformer_events_total"]
    handled += sum(count for name, count in metrics.items() if name.startswith("deformer_events_rejected_total"))
    return handled >= num_events and metrics["deformer_bridge_unacknowledged_messages"] == 0


def has_events(consumer: RunningConsumer) -> bool:
    """Return whether a consumer has accepted readings."""
    return consumer.read_metrics()["deformer_events_total"] > 0


def test_alerts_are_those_of_a_replay(
    mosquitto: Mosquitto, subscriber: AlertSubscriber, model_dir: Path, tmp_path: Path
) -> None:
    readings = make_readings(100)
    with start_consumer(tmp_path / "log", mosquitto, model_dir, "--rejected", tmp_path / "rejected.jsonl") as consumer:
        consumer.wait_until_ready()
        publish(mosquitto.port, [*map(to_message, readings), ("plant/pump-1", "1"), ("plant/pump-1/none", "1")])
        consumer.wait_for(lambda: is_finished(consumer, len(readings) + 2), "all readings")
        metrics = consumer.read_metrics()
        totals = consumer.stop()
    expected = replay(tmp_path, model_dir, readings)
    assert len(expected) > 10
    wait_until(lambda: len(subscriber.received) >= len(expected), "all alerts")
    check_all_equal(subscriber.collect(), expected)
    assert len(subscriber.received) == len(expected) == totals["alerts"]
    assert {topic for topic, _ in subscriber.received} <= {
        f"deformer-stream/alerts/pump-{i}" for i in range(NUM_DEVICES)
    }
    assert metrics["deformer_ready"] == 1
    assert totals["rejected"] == {"unknown_topic": 1, "unknown_feature": 1}
    rejected = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()]
    assert {line["reason"] for line in rejected} == {"unknown_topic", "unknown_feature"}
    assert "plant/pump-1" in consumer.list_log_events("message_refused")[0]["detail"]


def test_a_broker_that_is_away_at_the_start_is_waited_for(
    mosquitto: Mosquitto, model_dir: Path, tmp_path: Path
) -> None:
    mosquitto.stop()
    with start_consumer(tmp_path / "log", mosquitto, model_dir, "--patience", "5m") as consumer:
        consumer.wait_for(lambda: bool(consumer.list_log_events("connection_failed_retrying")), "a failed attempt")
        mosquitto.start()
        consumer.wait_until_ready()
        publish(mosquitto.port, map(to_message, make_readings(1)))
        consumer.wait_for(lambda: has_events(consumer), "events")
        consumer.stop()


def test_births_of_sparkplug_survive_a_kill(mosquitto: Mosquitto, model_dir: Path, tmp_path: Path) -> None:
    """After a restart, data that name their metrics by aliases are read without a request for a new birth."""
    node = SimulatedNode()
    start = 1000 * START
    source = f"mqtt://127.0.0.1:{mosquitto.port}/spBv1.0/#"
    words = ("--source", source, "--model", model_dir, "--state-dir", tmp_path / "state", "--alerts", "", *SCORING)
    requests: list[str] = []
    with ExitStack() as cleanup:
        listener = cleanup.enter_context(open_publisher(mosquitto.port))
        listener.on_message = lambda _client, _userdata, message: requests.append(message.topic)
        listener.subscribe("spBv1.0/plant/NCMD/#")
        consumer = cleanup.enter_context(RunningConsumer(tmp_path / "1", *words))
        consumer.wait_until_ready()
        publish(mosquitto.port, [node.birth({"temperature": 20.0, "pressure": 1.0}, start)])
        consumer.wait_for(lambda: is_finished(consumer, 2), "the birth")
        consumer.process.kill()
        consumer.process.wait()
        publish(mosquitto.port, [node.data({"temperature": 21.0}, start + 10_000)])
        consumer = cleanup.enter_context(RunningConsumer(tmp_path / "2", *words))
        consumer.wait_until_ready()
        consumer.wait_for(lambda: is_finished(consumer, 1), "the data")
        assert consumer.read_metrics()["deformer_sparkplug_nodes_online"] == 1
        assert requests == [], "the birth was restored"
        node.data({"temperature": 0.0})  # lost
        publish(mosquitto.port, [node.data({"temperature": 22.0}, start + 20_000)])
        consumer.wait_for(lambda: len(requests) == 1, "the request for a new birth")
        node.birth_sequence += 1
        publish(mosquitto.port, [node.birth({"temperature": 23.0, "pressure": 1.1}, start + 30_000)])
        consumer.wait_for(lambda: is_finished(consumer, 4), "the new birth")
        totals = consumer.stop()
    assert totals["rejected"] == {"unknown_alias": 1}


def test_nothing_is_lost_when_consumer_and_broker_are_killed(
    mosquitto: Mosquitto, subscriber: AlertSubscriber, model_dir: Path, tmp_path: Path
) -> None:
    readings = make_readings(80 * NUM_KILLS)
    draw = random.Random(11)  # noqa: S311 - no secret

    def send(part: list[tuple[str, str, Any, float]]) -> None:
        """Publish readings in order, some of them in each twentieth of a second, whether or not the broker runs."""
        for index, reading in enumerate(part):
            sent.append(client.publish(*to_message(reading), qos=1))
            if index % 15 == 14:
                time.sleep(0.05)

    acknowledged: set[int] = set()
    sent: list[Any] = []
    offsets: list[int] = []
    size = len(readings) // NUM_KILLS + 1
    with ExitStack() as cleanup:
        client = cleanup.enter_context(open_publisher(mosquitto.port, "sender"))
        client.on_publish = lambda _client, _userdata, mid, _reason, _properties: acknowledged.add(mid)
        consumer = cleanup.enter_context(start_consumer(tmp_path / "0", mosquitto, model_dir))
        consumer.wait_until_ready()
        for kill in range(NUM_KILLS):
            sender = threading.Thread(target=send, args=(readings[kill * size : (kill + 1) * size],))
            sender.start()
            consumer.wait_for(partial(has_events, consumer), "readings")
            time.sleep(draw.uniform(0.0, 1.0))  # when it is killed decides nothing
            consumer.process.kill()
            consumer.process.wait()
            if kill in RESTARTS:
                mosquitto.stop(signal.SIGTERM)
                mosquitto.start()
            sender.join(300.0)
            consumer = cleanup.enter_context(
                start_consumer(tmp_path / f"{kill + 1}", mosquitto, model_dir, "--snapshot-interval", "1s")
            )
            consumer.wait_until_ready()
            offsets += [entry["committed_offset"] for entry in consumer.list_log_events("partition_restored")]
        wait_until(lambda: all(info.mid in acknowledged for info in sent), "acknowledgements by Mosquitto")
        expected = replay(tmp_path, model_dir, readings)
        wait_until(lambda: subscriber.collect().keys() >= expected.keys(), "every alert")
        consumer.wait_for(
            lambda: consumer.read_metrics()["deformer_bridge_unacknowledged_messages"] == 0, "acknowledgement"
        )
        consumer.stop()
    check_all_equal(subscriber.collect(), expected)
    assert offsets == sorted(offsets)
    assert len(set(offsets)) > NUM_KILLS // 2, "most runs have committed something"
    num_repeated = len(subscriber.received) - len(expected)
    print(f"{len(expected)} alerts, {num_repeated} repeated; committed offsets {offsets}")
