"""Measure how many readings a second are passed from Mosquitto on to Kafka, or scored without Kafka.

    python -m benchmarks.mqtt [--rate 20000] [--seconds 30] [--backlog 400000]
    python -m benchmarks.mqtt --targets consume --backlog 100000 --seconds 5 --results build/small       a small trial

A real Mosquitto, a real Kafka and one of the --targets run on this machine:

- bridge: `deformer-stream bridge` passes the readings on to Kafka.
- consume: `deformer-stream consume --source mqtt://…` scores them, in windows of a second, with a model of random
  weights (--preset), which are as fast as trained ones. It saves them in a folder. One reading in 10,000 raises an
  alert, which is published.

Messages have QoS 1. Each is one value, a JSON object of eight values, or Sparkplug B data of eight metrics with
aliases. There are two measurements of each:

- backlog: the messages wait in Mosquitto, and the process begins. The rate is from its first connection until
  everything is acknowledged, by Kafka or to Mosquitto, so the sender takes no part of the machine.
- live: a sender publishes --rate readings a second. The table has the rate at which they were acknowledged, the time
  from sending the last one to the acknowledgement of all, and the cores that the process has used.

The exit status is 1 if a reading is missing: from the topic, or among those that were accepted.
"""

from __future__ import annotations

import argparse
import itertools
import socket
import struct
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from benchmarks.command import RESULTS, describe_machine, format_today, publish_results
from benchmarks.feed import OUTLIER_VALUE, make_model, make_quiet_calibration
from benchmarks.tables import format_markdown_header, format_markdown_row
from connectors.kafka import KafkaCluster, ensure_topics
from connectors.kafka.topic_reader import TopicReader
from deformer_stream import model_store
from deformer_stream.runtime.existing_messages import read_existing
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
TARGETS = ("bridge", "consume")
READINGS_PER_ALERT = 10_000


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


def make_messages(kind: str, num_readings: int, is_scored: bool = False) -> Iterator[tuple[str, bytes]]:
    """Yield messages with a number of readings, after the births of Sparkplug.

    Args:
        kind: The kind of the messages.
        num_readings: The number of readings.
        is_scored: Whether each message has a time, and its values suit a model. The readings of one second are then a
            record of each device. Otherwise the value of a reading is its number.
    """
    features = [f"f{i}" for i in range(NUM_FEATURES)]
    if kind == "value":
        for number in range(num_readings):
            topic = f"plant/pump-{number % NUM_DEVICES}/{features[number // NUM_DEVICES % NUM_FEATURES]}"
            second = START_SECOND + number // (NUM_DEVICES * NUM_FEATURES)
            document = {"value": _choose_value(number, is_scored), "time": second}
            yield topic, orjson.dumps(document) if is_scored else b"%d" % number
        return
    nodes = [SimulatedNode(f"line-{i}") for i in range(NUM_DEVICES)]
    if kind == "sparkplug":
        for node in nodes:
            yield node.birth({})
            yield node.birth(dict.fromkeys(features, -1.0), (START_SECOND - 1) * 1000, "pump")
    for step, first in enumerate(range(0, num_readings, NUM_FEATURES)):
        numbers = range(first, min(first + NUM_FEATURES, num_readings))
        values = {feature: _choose_value(number, is_scored) for feature, number in zip(features, numbers, strict=False)}
        second = START_SECOND + step // NUM_DEVICES
        if kind == "object":
            yield f"plant/pump-{step % NUM_DEVICES}/all", orjson.dumps({"values": values, "time": second})
        else:
            yield nodes[step % NUM_DEVICES].data(values, second * 1000, "pump")


def _choose_value(number: int, is_scored: bool) -> float:
    """Return the value of the reading with a number; see `make_messages`."""
    if not is_scored:
        return float(number)
    return OUTLIER_VALUE if number % READINGS_PER_ALERT == READINGS_PER_ALERT - 1 else number % 97 / 97


def count_births(kind: str) -> int:
    """Return the number of readings that the births of Sparkplug add."""
    return NUM_DEVICES * NUM_FEATURES if kind == "sparkplug" else 0


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
    """One Mosquitto, one Kafka if it is needed, and the processes that receive messages.

    Args:
        bootstrap: The Kafka broker; empty without `bridge`.
        port: The port of Mosquitto.
        folder: A folder for logs, models and states.
        preset: The preset of the model.
    """

    def __init__(self, bootstrap: str, port: int, folder: Path, preset: str) -> None:
        self._cluster, self._port, self._folder = KafkaCluster(bootstrap, library="librdkafka"), port, folder
        model_store.write(folder / "model", make_model(preset, NUM_FEATURES, 0), make_quiet_calibration(), {}, "")

    def open_process(self, target: str, kind: str, name: str) -> RunningConsumer:
        """Start a process; its session of Mosquitto, its topic of Kafka and its state have the given name."""
        filter = "spBv1.0/#" if kind == "sparkplug" else "plant/#"
        words: list[object] = ["--source", f"mqtt://127.0.0.1:{self._port}/{filter}", "--client-id", name]
        words += ["--pattern", "plant/{device}/{feature}"]
        if target == "bridge":
            words += ["--topic", name, "--bootstrap-servers", self._cluster.servers]
        else:
            words += ["--model", self._folder / "model", "--window", "1s", "--alerts", ""]
            words += ["--state-dir", self._folder / f"{name}-state"]
        variables = {"DEFORMER_CLIENT": "librdkafka"} if target == "bridge" else {"OMP_NUM_THREADS": "1"}
        return RunningConsumer(self._folder / f"{name}.log", *words, variables=variables, command=target)

    def make_session(self, target: str, kind: str) -> str:
        """Create a session of Mosquitto that receives the messages, and a topic for `bridge`; return their name."""
        name = f"{kind}-{uuid.uuid4().hex[:8]}"
        if target == "bridge":
            ensure_topics(self._cluster, {name: {"num_partitions": NUM_PARTITIONS}})
        with self.open_process(target, kind, name) as process:
            wait_until_ready(process)
            process.stop()
        return name

    def end_session(self, name: str) -> None:
        """Remove a session from Mosquitto, which would otherwise store the messages of later measurements for it."""
        client = Client(CallbackAPIVersion.VERSION2, name, protocol=MQTTProtocolVersion.MQTTv5)
        client.connect("127.0.0.1", self._port, clean_start=True)  # the session ends with this connection
        client.disconnect()

    def measure_backlog(self, target: str, kind: str, num_readings: int) -> dict[str, Any]:
        """Measure how fast a process handles messages that wait in Mosquitto."""
        name, sender = self.make_session(target, kind), Sender(self._port)
        batch: list[tuple[str, bytes]] = []
        for message in make_messages(kind, num_readings, target == "consume"):
            batch.append(message)
            if len(batch) == 500:
                sender.send(batch)
                batch = []
        sender.send(batch)
        sender.finish()
        with self.open_process(target, kind, name) as process:
            wait_until_ready(process)
            started_at = time.monotonic()
            wait_for_readings(process, target, num_readings + count_births(kind))
            seconds = time.monotonic() - started_at
            metrics = process.read_metrics()
            process.stop()
        cores = metrics["process_cpu_seconds_total"] / seconds
        return self._describe("backlog", target, kind, name, num_readings, num_readings / seconds, 0.0, cores, metrics)

    def measure_live(self, target: str, kind: str, rate: float, seconds: float) -> dict[str, Any]:
        """Measure whether a process handles messages as fast as they are sent."""
        name, num_readings = self.make_session(target, kind), int(rate * seconds)
        per_message = 1 if kind == "value" else NUM_FEATURES
        with self.open_process(target, kind, name) as process:
            wait_until_ready(process)
            cpu_before = process.read_metrics()["process_cpu_seconds_total"]
            sender, num_sent = Sender(self._port), 0
            messages = make_messages(kind, num_readings, target == "consume")
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
            wait_for_readings(process, target, num_readings + count_births(kind))
            ended_at = time.monotonic()
            metrics = process.read_metrics()
            process.stop()
        taken = ended_at - started_at
        cores = (metrics["process_cpu_seconds_total"] - cpu_before) / taken
        rate, delay = num_readings / taken, ended_at - sent_at
        return self._describe("live", target, kind, name, num_readings, rate, delay, cores, metrics)

    def _describe(
        self,
        phase: str,
        target: str,
        kind: str,
        name: str,
        num_readings: int,
        rate: float,
        delay: float,
        cores: float,
        metrics: dict[str, float],
    ) -> dict[str, Any]:
        """Return the row of a measurement, and end its session."""
        self.end_session(name)
        if target == "bridge":
            missing, repeated = count_missing(self._cluster, name, num_readings)
        else:
            missing = round(num_readings + count_births(kind) - metrics["deformer_events_total"])
            repeated = round(_count_rejected(metrics))
        return {
            "target": target,
            "phase": phase,
            "messages": kind,
            "readings": num_readings,
            "readings_per_second": round(rate),
            "seconds_behind": round(delay, 2),
            "cores": round(cores, 2),
            "missing": missing,
            "repeated": repeated,
        }


def wait_until_ready(process: RunningConsumer) -> None:
    """Wait until Mosquitto has confirmed the subscription of a process."""
    process.wait_for(lambda: bool(process.list_log_events("ready")), "the subscription", pause=0.01)


def wait_for_readings(process: RunningConsumer, target: str, num_readings: int) -> None:
    """Wait until Kafka has acknowledged the readings of `bridge`, or `consume` has acknowledged them to Mosquitto."""

    def has_finished() -> bool:
        metrics = process.read_metrics()
        if target == "bridge":
            return metrics["deformer_bridge_readings_total"] >= num_readings
        num_handled = metrics["deformer_events_total"] + _count_rejected(metrics)
        return num_handled >= num_readings and metrics["deformer_bridge_unacknowledged_messages"] == 0

    process.wait_for(has_finished, "all readings", 900.0, 0.1)


def _count_rejected(metrics: dict[str, float]) -> float:
    """Return the number of readings that `consume` has rejected, most of them because they came twice."""
    return sum(count for name, count in metrics.items() if name.startswith("deformer_events_rejected_total"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rate", type=float, default=20_000.0, help="readings a second of the live measurement")
    options.add_argument("--seconds", type=float, default=30.0, help="duration of the live measurement")
    options.add_argument("--backlog", type=int, default=400_000, help="readings of the backlog")
    options.add_argument("--kinds", default=",".join(KINDS), help="kinds of messages, with commas")
    options.add_argument("--targets", default=",".join(TARGETS), help="bridge or consume, with commas")
    options.add_argument("--preset", default="tiny", help="preset of the model of consume")
    options.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    chosen = options.parse_args(arguments)
    targets, rows = chosen.targets.split(","), list[dict[str, Any]]()
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
        bootstrap = ""
        if "bridge" in targets:
            bootstrap = cleanup.enter_context(load_broker_script().start()).bootstrap
        mosquitto = cleanup.enter_context(run_mosquitto(folder / "mosquitto"))
        bench = Bench(bootstrap, mosquitto.port, folder, chosen.preset)
        for target, kind in itertools.product(targets, chosen.kinds.split(",")):
            rows.append(bench.measure_backlog(target, kind, chosen.backlog))
            print(orjson.dumps(rows[-1]).decode(), flush=True)
            rows.append(bench.measure_live(target, kind, chosen.rate, chosen.seconds))
            print(orjson.dumps(rows[-1]).decode(), flush=True)
    publish_results("mqtt", format_report(rows, chosen.rate), rows, chosen.results)
    return int(any(row["missing"] for row in rows))


def format_report(rows: Sequence[dict[str, Any]], rate: float) -> str:
    """Return the report as Markdown."""
    head = format_markdown_header(list(rows[0]))
    lines = [format_markdown_row([str(value) for value in row.values()]) for row in rows]
    return (
        f"# Readings a second from Mosquitto to Kafka, or scored without Kafka\n\n{format_today()}, "
        f"{describe_machine()}. Live: {rate:g} readings a second were sent.\n\n" + "\n".join([*head, *lines]) + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
