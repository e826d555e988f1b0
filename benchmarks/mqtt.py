"""Measure how many readings a second `deformer-stream bridge` passes from Mosquitto on to Kafka.

    python -m benchmarks.mqtt [--rate 20000] [--seconds 30] [--backlog 400000]

A real Mosquitto, a real Kafka and the bridge run on this machine. Messages have QoS 1. Each is one value, a JSON object
of eight values, or Sparkplug B data of eight metrics with aliases. There are two measurements of each:

- backlog: the messages wait in Mosquitto, and the bridge begins. The rate is from its first connection until Kafka has
  acknowledged everything, so the sender takes no part of the machine.
- live: a sender publishes --rate readings a second. The table has the rate at which Kafka has acknowledged them, the
  time from sending the last one to the acknowledgement of all, and the cores that the bridge has used.

The exit status is 1 if a reading is missing from the topic.
"""

from __future__ import annotations

import argparse
import socket
import struct
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmarks.command import describe_machine, format_today, publish_results
from benchmarks.tables import format_markdown_header, format_markdown_row
from connectors.kafka import KafkaCluster, ensure_topics
from connectors.kafka.topic_reader import TopicReader
from deformer_stream.runtime.incident_history import read_existing
from tests.codec.sparkplug_messages import SimulatedNode
from tests.conftest import load_broker_script
from tests.integration.programs import RunningConsumer
from tests.mosquitto import run_mosquitto

NUM_DEVICES, NUM_FEATURES = 20, 8
NUM_PARTITIONS = 4
START_SECOND = 1_600_000_000
PERIOD_SECONDS = 0.02
"""Seconds between two steps of the sender."""
MAX_UNACKNOWLEDGED = 20_000
"""Messages that the sender leaves without acknowledgement; an identifier has 16 bits."""
KINDS = ("value", "object", "sparkplug")


class Sender:
    """A sender of MQTT messages with QoS 1 that costs little, so that it takes little of the machine.

    Args:
        port: The broker's port.
    """

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        body = b"\x00\x04MQTT\x04\x02\x00\x00" + struct.pack(">H", 6) + b"sender"  # MQTT 3.1.1, a clean session
        self._socket.sendall(b"\x10" + bytes([len(body)]) + body)
        assert self._socket.recv(4)[3] == 0, "the connection is refused"
        self._sent = self._acknowledged = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """Publish messages, and wait while too many are without acknowledgement."""
        packets = bytearray()
        for topic, payload in messages:
            name = topic.encode()
            self._sent += 1
            identifier = self._sent % 65_535 + 1
            body = struct.pack(">H", len(name)) + name + struct.pack(">H", identifier) + payload
            packets += b"\x32" + _encode_length(len(body)) + body
        self._socket.sendall(packets)
        with self._changed:
            self._changed.wait_for(lambda: self._sent - self._acknowledged < MAX_UNACKNOWLEDGED, 300.0)

    def finish(self) -> None:
        """Wait until the broker has acknowledged everything, and disconnect."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._sent == self._acknowledged, 300.0), "no acknowledgements"
        self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread

    def _read(self) -> None:
        """Count acknowledgements, which have four bytes each."""
        num_bytes = 0
        with self._socket:
            while data := self._socket.recv(65_536):
                num_bytes += len(data)
                with self._changed:
                    self._acknowledged = num_bytes // 4
                    self._changed.notify_all()


def _encode_length(length: int) -> bytes:
    """Return the length of a packet, seven bits in each byte."""
    encoded = bytearray()
    while True:
        length, digit = divmod(length, 128)
        encoded.append(digit | (128 if length else 0))
        if not length:
            return bytes(encoded)


def make_messages(kind: str, num_readings: int) -> Iterator[tuple[str, bytes]]:
    """Yield messages with a number of readings. The value of a reading is its number."""
    if kind == "value":
        for i in range(num_readings):
            yield f"plant/pump-{i % NUM_DEVICES}/f{i // NUM_DEVICES % NUM_FEATURES}", b"%d" % i
        return
    features = [f"f{i}" for i in range(NUM_FEATURES)]
    nodes = [SimulatedNode(f"line-{i}") for i in range(NUM_DEVICES)]
    if kind == "sparkplug":
        for node in nodes:
            yield node.birth({"ready": True})
            yield node.birth(dict.fromkeys(features, -1.0), START_SECOND * 1000, "pump")
    for step, first in enumerate(range(0, num_readings, NUM_FEATURES)):
        numbers = range(first, min(first + NUM_FEATURES, num_readings))
        values = {feature: float(number) for feature, number in zip(features, numbers, strict=False)}
        if kind == "object":
            document = {"values": values, "time": START_SECOND + step // NUM_DEVICES}
            yield f"plant/pump-{step % NUM_DEVICES}/all", orjson.dumps(document)
        else:
            seconds = START_SECOND + step // NUM_DEVICES
            yield nodes[step % NUM_DEVICES].data(values, seconds * 1000, "pump")


def count_missing(cluster: KafkaCluster, topic: str, num_readings: int) -> tuple[int, int]:
    """Return how many readings are missing from a topic, and how many are there twice."""
    reader = TopicReader(cluster, topic, lambda message: orjson.loads(message.value or b"{}"))
    seen, repeated = bytearray(num_readings), 0
    for document in read_existing(reader):
        for value in document["values"].values() if "values" in document else [document["value"]]:
            if not isinstance(value, bool) and value >= 0:
                repeated += seen[int(value)]
                seen[int(value)] = 1
    reader.close()
    return num_readings - sum(seen), repeated


class Bench:
    """One Kafka, one Mosquitto and the bridges that run between them.

    Args:
        bootstrap: The Kafka broker.
        port: The port of Mosquitto.
        folder: A folder for logs.
    """

    def __init__(self, bootstrap: str, port: int, folder: Path) -> None:
        self._cluster, self._port, self._folder = KafkaCluster(bootstrap, library="librdkafka"), port, folder

    def open_bridge(self, kind: str, topic: str) -> RunningConsumer:
        """Start a bridge."""
        filter = "spBv1.0/#" if kind == "sparkplug" else "plant/#"
        source = f"mqtt://127.0.0.1:{self._port}/{filter}"
        options = ("--source", source, "--topic", topic, "--bootstrap-servers", self._cluster.servers)
        variables = {"DEFORMER_CLIENT": "librdkafka"}
        words = (*options, "--pattern", "plant/{device}/{feature}")
        return RunningConsumer(self._folder / f"{topic}.log", *words, variables=variables, command="bridge")

    def make_topic(self, kind: str) -> str:
        """Create a topic, and a session of Mosquitto that receives its messages."""
        topic = f"{kind}-{uuid.uuid4().hex[:8]}"
        ensure_topics(self._cluster, {topic: {"num_partitions": NUM_PARTITIONS}})
        with self.open_bridge(kind, topic) as bridge:
            bridge.wait_for(lambda: bool(bridge.list_log_events("ready")), "the subscription")
            bridge.stop()
        return topic

    def measure_backlog(self, kind: str, num_readings: int) -> dict[str, Any]:
        """Measure how fast the bridge passes messages on that wait in Mosquitto."""
        topic, sender = self.make_topic(kind), Sender(self._port)
        batch: list[tuple[str, bytes]] = []
        for message in make_messages(kind, num_readings):
            batch.append(message)
            if len(batch) == 500:
                sender.send(batch)
                batch = []
        sender.send(batch)
        sender.finish()
        with self.open_bridge(kind, topic) as bridge:
            bridge.wait_for(lambda: bool(bridge.list_log_events("ready")), "the subscription", pause=0.01)
            started_at = time.monotonic()
            wait_for_readings(bridge, num_readings)
            seconds = time.monotonic() - started_at
            cpu = bridge.read_metrics()["process_cpu_seconds_total"]
            bridge.stop()
        return self._describe("backlog", kind, topic, num_readings, num_readings / seconds, 0.0, cpu / seconds)

    def measure_live(self, kind: str, rate: float, seconds: float) -> dict[str, Any]:
        """Measure whether the bridge passes messages on as fast as they are sent."""
        topic, num_readings = self.make_topic(kind), int(rate * seconds)
        per_message = 1 if kind == "value" else NUM_FEATURES
        with self.open_bridge(kind, topic) as bridge:
            bridge.wait_for(lambda: bool(bridge.list_log_events("ready")), "the subscription")
            cpu_before = bridge.read_metrics()["process_cpu_seconds_total"]
            sender, num_sent = Sender(self._port), 0
            messages = make_messages(kind, num_readings)
            started_at = time.monotonic()
            while num_sent * per_message < num_readings:
                due = int((time.monotonic() - started_at + PERIOD_SECONDS) * rate / per_message)
                batch = [message for _, message in zip(range(max(0, due - num_sent)), messages, strict=False)]
                num_sent += len(batch)
                sender.send(batch)
                time.sleep(PERIOD_SECONDS)
            sender.send(list(messages))
            sender.finish()
            sent_at = time.monotonic()
            wait_for_readings(bridge, num_readings)
            ended_at = time.monotonic()
            cpu = bridge.read_metrics()["process_cpu_seconds_total"] - cpu_before
            bridge.stop()
        taken = ended_at - started_at
        return self._describe("live", kind, topic, num_readings, num_readings / taken, ended_at - sent_at, cpu / taken)

    def _describe(
        self, phase: str, kind: str, topic: str, num_readings: int, rate: float, delay: float, cores: float
    ) -> dict[str, Any]:
        """Return the row of a measurement."""
        missing, repeated = count_missing(self._cluster, topic, num_readings)
        return {
            "phase": phase,
            "messages": kind,
            "readings": num_readings,
            "readings_per_second": round(rate),
            "seconds_behind": round(delay, 2),
            "cores_of_bridge": round(cores, 2),
            "missing": missing,
            "repeated": repeated,
        }


def wait_for_readings(bridge: RunningConsumer, num_readings: int) -> None:
    """Wait until Kafka has acknowledged a number of readings of a bridge; births may add a few."""
    bridge.wait_for(
        lambda: bridge.read_metrics()["deformer_bridge_readings_total"] >= num_readings, "all readings", 900.0, 0.1
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rate", type=float, default=20_000.0, help="readings a second of the live measurement")
    options.add_argument("--seconds", type=float, default=30.0, help="duration of the live measurement")
    options.add_argument("--backlog", type=int, default=400_000, help="readings of the backlog")
    options.add_argument("--kinds", default=",".join(KINDS), help="kinds of messages, with commas")
    chosen = options.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as name,
        load_broker_script().start() as kafka,
        run_mosquitto(Path(name) / "mosquitto") as mosquitto,
    ):
        bench = Bench(kafka.bootstrap, mosquitto.port, Path(name))
        for kind in chosen.kinds.split(","):
            rows.append(bench.measure_backlog(kind, chosen.backlog))
            print(orjson.dumps(rows[-1]).decode(), flush=True)
            rows.append(bench.measure_live(kind, chosen.rate, chosen.seconds))
            print(orjson.dumps(rows[-1]).decode(), flush=True)
    publish_results("mqtt", format_report(rows, chosen.rate), rows)
    return int(any(row["missing"] for row in rows))


def format_report(rows: Sequence[dict[str, Any]], rate: float) -> str:
    """Return the report as Markdown."""
    head = format_markdown_header(list(rows[0]))
    lines = [format_markdown_row([str(value) for value in row.values()]) for row in rows]
    return (
        f"# Readings a second from Mosquitto to Kafka\n\n{format_today()}, {describe_machine()}. Live: {rate:g} "
        f"readings a second were sent.\n\n" + "\n".join([*head, *lines]) + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
