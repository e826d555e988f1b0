"""`deformer-stream bridge` with a real Mosquitto and a real Kafka."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.codec.sparkplug_messages import SimulatedNode
from tests.conftest import KafkaOfTests, find_free_port, start_broker
from tests.effort import IS_LONG
from tests.integration.programs import Cluster, RunningConsumer, run, wait_until
from tests.mosquitto import Mosquitto, open_publisher, publish, run_mosquitto

pytestmark = pytest.mark.kafka

NUM_KILLS, RESTARTS = (10, (3, 7)) if IS_LONG else (3, (1,))
"""Number of kills of the bridge, and the kills after which Mosquitto is restarted."""


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Mosquitto]:
    """Return a running MQTT broker."""
    with run_mosquitto(tmp_path / "mosquitto") as broker:
        yield broker


@pytest.fixture
def cluster(kafka: KafkaOfTests) -> Iterator[Cluster]:
    """Return a view of the Kafka cluster from outside."""
    view = Cluster(kafka.bootstrap)
    yield view
    view.close()


class Bridge(RunningConsumer):
    """A running bridge."""

    def __init__(self, log: Path, kafka: KafkaOfTests, source: str, topic: str, *options: object) -> None:
        words = ("--source", source, "--topic", topic, "--bootstrap-servers", kafka.bootstrap, *options)
        super().__init__(log, *words, command="bridge")

    def wait_until_ready(self) -> None:
        """Wait until it has subscribed."""
        self.wait_for(lambda: bool(self.list_log_events("ready")), "the subscription")


def read_events(cluster: Cluster, topic: str) -> list[dict[str, Any]]:
    """Return the events of a topic."""
    return [json.loads(message.value) for message in cluster.read_topic(topic)]


def wait_for_readings(bridge: Bridge, count: int) -> None:
    """Wait until Kafka has acknowledged a number of readings of a bridge."""
    bridge.wait_for(lambda: bridge.read_metrics()["deformer_bridge_readings_total"] >= count, f"{count} readings")


def test_values_become_events(
    kafka: KafkaOfTests, cluster: Cluster, mosquitto: Mosquitto, topic: Callable[..., str], tmp_path: Path
) -> None:
    name = topic(2)
    source = f"mqtt://127.0.0.1:{mosquitto.port}/plant/#"
    with Bridge(tmp_path / "log", kafka, source, name, "--pattern", "plant/{device}/{feature}") as bridge:
        bridge.wait_until_ready()
        publish(
            mosquitto.port,
            [
                ("plant/pump-1/flow", "12.5"),
                ("plant/pump-1/state", "running"),
                ("plant/pump-2/flow", '{"value": 3, "time": 1583750073.25}'),
                ("plant/pump-2/all", '{"values": {"flow": 1, "power": 2.5}, "time": "2020-03-09T10:34:33Z"}'),
                ("plant/pump-2", "1"),
                ("plant/pump-2/flow", "{"),
                ("plant/pump-2/flow", b"\xff"),
            ],
        )
        wait_for_readings(bridge, 5)
        bridge.wait_for(lambda: bridge.read_metrics()["deformer_bridge_messages_total"] == 7, "all messages")
        bridge.wait_for(
            lambda: bridge.read_metrics()["deformer_bridge_unacknowledged_messages"] == 0, "acknowledgement"
        )
        metrics = bridge.read_metrics()
        bridge.stop()
    assert metrics['deformer_bridge_refused_total{reason="unknown_topic"}'] == 1
    assert metrics['deformer_bridge_refused_total{reason="not_json"}'] == 2
    messages = cluster.read_topic(name)
    events = [json.loads(message.value) for message in messages]
    assert [message.key.decode() for message in messages] == [event["device"] for event in events]
    by_device = {device: [e for e in events if e["device"] == device] for device in ("pump-1", "pump-2")}
    flow, state = by_device["pump-1"]
    assert (flow["feature"], flow["value"], state["feature"], state["value"]) == ("flow", 12.5, "state", "running")
    assert abs(flow["time"] - time.time()) < 600
    assert by_device["pump-2"] == [
        {"device": "pump-2", "feature": "flow", "value": 3, "time": 1583750073.25},
        {"device": "pump-2", "values": {"flow": 1, "power": 2.5}, "time": 1583750073.0},
    ]
    letters = cluster.read_topic(f"{name}-bridge-dead-letter")
    found = [(dict(m.headers)["reason"], dict(m.headers)["source_topic"], m.value) for m in letters]
    assert found == [
        (b"unknown_topic", b"plant/pump-2", b"1"),
        (b"not_json", b"plant/pump-2/flow", b"{"),
        (b"not_json", b"plant/pump-2/flow", b"\xff"),
    ]
    # With a pattern that fits, the message becomes an event. The others are rejected again.
    words = ("--topic", name, "--dead-letter-topic", f"{name}-bridge-dead-letter", "--pattern", "{device}/{feature}")
    done = run("deformer-stream", "dead-letters", "replay", *words, "--bootstrap-servers", kafka.bootstrap)
    assert done.stdout.startswith("1 message was sent again; 2 messages of the bridge are rejected again")
    (sent,) = [event for event in read_events(cluster, name) if event["device"] == "plant"]
    assert (sent["feature"], sent["value"]) == ("pump-2", 1)
    arrival = int(dict(letters[0].headers)["timestamp_us"]) / 1e6
    assert sent["time"] == arrival


def test_messages_wait_in_the_broker_while_no_bridge_runs(
    kafka: KafkaOfTests, cluster: Cluster, mosquitto: Mosquitto, topic: Callable[..., str], tmp_path: Path
) -> None:
    name = topic()
    source = f"mqtt://127.0.0.1:{mosquitto.port}/plant/#"
    with Bridge(tmp_path / "first", kafka, source, name) as bridge:
        bridge.wait_until_ready()
        bridge.stop()
    publish(mosquitto.port, [("plant/p/flow", str(i)) for i in range(3000)])
    with Bridge(tmp_path / "second", kafka, source, name) as bridge:
        bridge.wait_until_ready()
        wait_for_readings(bridge, 3000)
        assert bridge.list_log_events("connected")[0]["resumed"]
        bridge.stop()
    events = read_events(cluster, name)
    assert [event["value"] for event in events] == list(range(3000)), "in order, and each once"
    assert {event["device"] for event in events} == {"plant/p"}


def test_nothing_is_lost_when_bridge_and_broker_are_killed(
    kafka: KafkaOfTests, cluster: Cluster, mosquitto: Mosquitto, topic: Callable[..., str], tmp_path: Path
) -> None:
    name = topic(2)
    source = f"mqtt://127.0.0.1:{mosquitto.port}/plant/#"
    numbers, draw = range(2_000 * NUM_KILLS), random.Random(7)  # noqa: S311 - no secret
    has_ended = threading.Event()

    def send() -> None:
        """Publish each number to one of four devices, and hold back while the broker has many unacknowledged."""
        with open_publisher(mosquitto.port, "sender") as client:
            acknowledged: set[int] = set()
            client.on_publish = lambda _client, _userdata, mid, _reason, _properties: acknowledged.add(mid)
            for number in numbers:
                payload = json.dumps({"value": number, "time": 1_600_000_000 + number})
                client.publish(f"plant/p{number % 4}/n", payload, qos=1)
                if number % 100 == 99:
                    time.sleep(0.05)
            wait_until(lambda: len(acknowledged) == len(numbers), "acknowledgements by Mosquitto")
        has_ended.set()

    sender = threading.Thread(target=send)
    with ExitStack() as cleanup:
        bridge = cleanup.enter_context(Bridge(tmp_path / "0", kafka, source, name))
        bridge.wait_until_ready()
        sender.start()
        for kill in range(NUM_KILLS):
            time.sleep(draw.uniform(0.2, 1.5))  # when it is killed decides nothing
            bridge.process.kill()
            bridge.process.wait()
            if kill in RESTARTS:
                mosquitto.stop(signal.SIGTERM)
                mosquitto.start()
            bridge = cleanup.enter_context(Bridge(tmp_path / f"{kill + 1}", kafka, source, name))
            bridge.wait_until_ready()
        sender.join(300.0)
        assert has_ended.is_set()
        bridge.wait_for(
            lambda: {event["value"] for event in read_events(cluster, name)} == set(numbers), "every number", pause=1.0
        )
        bridge.wait_for(
            lambda: bridge.read_metrics()["deformer_bridge_unacknowledged_messages"] == 0, "acknowledgement"
        )
        repeated = bridge.read_metrics()["deformer_bridge_repeated_total"]
        bridge.stop()
    counts = Counter(event["value"] for event in read_events(cluster, name))
    assert set(counts) == set(numbers)
    print(f"{sum(counts.values()) - len(counts)} duplicates, {repeated:g} repeated messages in the last run")


def test_consume_counts_each_reading_once_if_messages_come_twice(
    kafka: KafkaOfTests,
    cluster: Cluster,
    mosquitto: Mosquitto,
    topic: Callable[..., str],
    model_dir: Path,
    tmp_path: Path,
) -> None:
    name = topic(2)
    source = f"mqtt://127.0.0.1:{mosquitto.port}/plant/#"
    messages = [
        (f"plant/pump-{i % 5}/temperature", json.dumps({"value": 20 + i % 3, "time": 1_600_000_000 + 10 * i}))
        for i in range(200)
    ]
    with Bridge(tmp_path / "bridge", kafka, source, name, "--pattern", "plant/{device}/{feature}") as bridge:
        bridge.wait_until_ready()
        publish(mosquitto.port, [message for message in messages for _ in range(2)])
        wait_for_readings(bridge, 400)
        bridge.stop()
    options = ("--topic", name, "--model", model_dir, "--window", "10s", "--group", name)
    words = (*options, "--bootstrap-servers", kafka.bootstrap, "--alerts", "")
    with RunningConsumer(tmp_path / "consume", *words) as consumer:
        consumer.wait_until_ready()
        consumer.wait_for(cluster.is_consumed(name, name), "all events")
        metrics = consumer.read_metrics()
        consumer.stop()
    assert metrics["deformer_events_total"] == 200
    rejected = {key: count for key, count in metrics.items() if "events_rejected_total" in key and count}
    assert rejected == {'deformer_events_rejected_total{reason="duplicate"}': 200}


def test_a_sparkplug_node_dies_and_is_reborn_while_the_bridge_is_killed(
    kafka: KafkaOfTests, cluster: Cluster, mosquitto: Mosquitto, topic: Callable[..., str], tmp_path: Path
) -> None:
    name = topic()
    source = f"mqtt://127.0.0.1:{mosquitto.port}/spBv1.0/#"
    node = SimulatedNode()
    requests: list[tuple[str, bytes]] = []
    with ExitStack() as cleanup:
        listener = cleanup.enter_context(open_publisher(mosquitto.port))
        listener.on_message = lambda _client, _userdata, message: requests.append((message.topic, message.payload))
        listener.subscribe("spBv1.0/plant/NCMD/#")
        bridge = cleanup.enter_context(Bridge(tmp_path / "1", kafka, source, name))
        bridge.wait_until_ready()
        publish(mosquitto.port, [node.birth({"x": 0.0}), node.birth({"n": -1}, device="d"), node.data({"x": 1.0})])
        wait_for_readings(bridge, 3)
        bridge.wait_for(lambda: bridge.read_metrics()["deformer_bridge_unacknowledged_messages"] == 0, "the end")
        bridge.process.kill()
        bridge.process.wait()
        publish(mosquitto.port, [node.data({"n": -2}, device="d")])
        bridge = cleanup.enter_context(Bridge(tmp_path / "2", kafka, source, name))
        bridge.wait_until_ready()
        wait_for_readings(bridge, 1)
        assert requests == [], "the births were restored"
        publish(mosquitto.port, [node.death()])
        bridge.wait_for(lambda: bridge.read_metrics()["deformer_sparkplug_nodes_online"] == 0, "the death")
        publish(mosquitto.port, [node.data({"x": 2.0})])
        bridge.wait_for(lambda: len(requests) == 1, "the request for a new birth")
        node.birth_sequence += 1
        publish(mosquitto.port, [node.birth({"x": 3.0}), node.data({"x": 4.0})])
        wait_for_readings(bridge, 3)
        metrics = bridge.read_metrics()
        bridge.stop()
    assert requests[0][0] == "spBv1.0/plant/NCMD/line-1"
    assert metrics["deformer_sparkplug_nodes_online"] == 1
    assert metrics['deformer_bridge_refused_total{reason="unknown_alias"}'] == 1
    assert metrics['deformer_sparkplug_messages_total{type="NDEATH"}'] == 1
    found = [(event["device"], event["feature"], event["value"]) for event in read_events(cluster, name)]
    line, device = "plant/line-1", "plant/line-1/d"
    assert found == [
        (line, "x", 0.0),
        (device, "n", -1),
        (line, "x", 1.0),
        (device, "n", -2),
        (line, "x", 3.0),
        (line, "x", 4.0),
    ]


def test_a_source_that_is_away_at_the_start_is_waited_for(
    kafka: KafkaOfTests, mosquitto: Mosquitto, topic: Callable[..., str], tmp_path: Path
) -> None:
    name = topic()
    mosquitto.stop()
    source = f"mqtt://127.0.0.1:{mosquitto.port}/plant/#"
    with Bridge(tmp_path / "log", kafka, source, name, "--patience", "5m") as bridge:
        bridge.wait_for(lambda: bool(bridge.list_log_events("connection_failed_retrying")), "a failed attempt")
        assert bridge.read_metrics()["deformer_ready"] == 0
        mosquitto.start()
        bridge.wait_until_ready()
        publish(mosquitto.port, [("plant/p/flow", "1")])
        wait_for_readings(bridge, 1)
        bridge.stop()
    assert {line["logger"] for line in bridge.list_log_events("connection_failed_retrying")} == {"mqtt"}
    with Bridge(tmp_path / "opcua", kafka, f"opc.tcp://127.0.0.1:{find_free_port()}", name) as bridge:
        bridge.wait_for(lambda: bool(bridge.list_log_events("connection_failed_retrying")), "a failed attempt")
        bridge.stop()


def test_without_health_checks_a_source_that_is_away_ends_the_command(
    kafka: KafkaOfTests, topic: Callable[..., str]
) -> None:
    """For a person at a terminal, a wrong address is likelier than an outage."""
    source = f"mqtt://127.0.0.1:{find_free_port()}/plant/#"
    words = ("--source", source, "--topic", topic(), "--bootstrap-servers", kafka.bootstrap)
    done = run("deformer-stream", "bridge", *words)
    assert done.returncode == 4
    assert "check --source" in done.stderr


def test_messages_wait_while_kafka_is_away(mosquitto: Mosquitto, tmp_path: Path) -> None:
    name = f"events-{time.monotonic_ns()}"
    source = f"mqtt://127.0.0.1:{mosquitto.port}/plant/#"
    with start_broker() as broker:
        own = KafkaOfTests(broker.bootstrap)
        with Bridge(tmp_path / "log", own, source, name) as bridge:
            bridge.wait_until_ready()
            publish(mosquitto.port, [("plant/p/x", "1")])
            wait_for_readings(bridge, 1)
            broker.kill(1)
            publish(mosquitto.port, [("plant/p/x", str(i)) for i in range(2, 500)])
            bridge.wait_for(lambda: bridge.read_metrics()["deformer_bridge_unacknowledged_messages"] == 498, "messages")
            broker.start_node(1)
            wait_for_readings(bridge, 499)
            bridge.stop()
        view = Cluster(broker.bootstrap)
        assert {event["value"] for event in read_events(view, name)} == set(range(1, 500))
        view.close()
