"""Measure what a receiver that hangs changes about scoring, and whether it gets all incidents in the end.

    python -m benchmarks.incident_delivery [--hang 600] [--before 60]

Simulated devices send records through a real Kafka; some have faults. `consume` scores them and raises alerts,
`incidents` makes incidents and notifies two webhooks. One of them answers at once. The other one answers for --before
seconds, then hangs for --hang seconds, and then answers again. For each phase the first table has the time from sending
a record to receiving its alert. The second table has the incidents, and how many of their openings and resolutions each
webhook has received. The exit status is 1 if one is missing.

The incidents of the benchmark are found by the e-detector, because they are to come often.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np
import orjson

from benchmarks.command import describe_machine, format_today, publish_results
from benchmarks.feed import OUTLIER_VALUE, make_model, make_quiet_calibration
from benchmarks.stream_kafka import AlertReader
from benchmarks.tables import format_markdown_header, format_markdown_row
from connectors.kafka import KafkaCluster, KafkaIncidentLog, ensure_topics
from connectors.kafka.client import DELIVERY_SECONDS, load_client
from connectors.kafka.ports import OutgoingMessage
from deformer_stream import model_store
from deformer_stream.codec.encode_incidents import decode_incident
from tests.conftest import load_broker_script
from tests.connectors.receiving_server import Answer, ReceivingServer
from tests.integration.programs import RunningConsumer

NUM_FEATURES, NUM_DEVICES = 8, 20
FAULT_EVERY, FAULT_SECONDS = 5.0, 3.0
"""Every 5 seconds the next device has a fault of 3 seconds."""
QUIET_SECONDS = 3
MAX_MESSAGE_BYTES = 2**20
WARM_SECONDS = 10.0
"""Seconds at the beginning that do not count, because the broker's Java compiler is still at work then."""
PATIENCE_SECONDS = 900.0
"""Longest time to wait for the receiver to get everything. It contains the longest pause between attempts, 300 s."""


class Plant(threading.Thread):
    """A thread that sends the records of the devices, each as one message, at a steady rate.

    Args:
        bootstrap: The broker.
        topic: The topic of events.
        rate: Records per second.

    Attributes:
        is_over: Set to end the thread.
        has_faults: Whether devices have faults.
        sent_at_by_record: When each faulty record was sent, in seconds since 1970.
        num_sent: Number of records.
    """

    def __init__(self, bootstrap: str, topic: str, rate: float) -> None:
        super().__init__(daemon=True)
        cluster = KafkaCluster(bootstrap)
        self._producer = load_client(cluster).open_producer(cluster, None, DELIVERY_SECONDS, MAX_MESSAGE_BYTES)
        self._topic, self._rate = topic, rate
        self.is_over, self.has_faults = threading.Event(), True
        self.sent_at_by_record: dict[str, float] = {}
        self.num_sent = 0

    def run(self) -> None:
        """Send records until `is_over` is set."""
        rng = np.random.default_rng(0)
        start = time.monotonic()
        while not self.is_over.is_set():
            elapsed = time.monotonic() - start
            while self.num_sent < elapsed * self._rate:
                self._send(self.num_sent, self.num_sent / self._rate, rng)
                self.num_sent += 1
            self.is_over.wait(0.002)
        self._producer.flush(DELIVERY_SECONDS)
        self._producer.close()

    def _send(self, number: int, seconds: float, rng: np.random.Generator) -> None:
        """Send a record."""
        device = number % NUM_DEVICES
        is_faulty = (
            self.has_faults
            and int(seconds / FAULT_EVERY) % NUM_DEVICES == device
            and seconds % FAULT_EVERY < FAULT_SECONDS
        )
        values = dict(zip((f"f{i}" for i in range(NUM_FEATURES)), rng.normal(size=NUM_FEATURES).tolist(), strict=True))
        record = f"pump-{device:02d}/{number:08d}"
        if is_faulty:
            values["f0"] = OUTLIER_VALUE
            self.sent_at_by_record[record] = time.time()
        value = orjson.dumps({"record": record, "values": values})
        self._producer.enqueue(OutgoingMessage(0, self._topic, record.encode(), value))


def count_received(server: ReceivingServer) -> dict[tuple[str, int], set[str]]:
    """Return the actions that a webhook has accepted, by incident and number of its reopenings."""
    actions: dict[tuple[str, int], set[str]] = {}
    for request in list(server.accepted):
        incident = decode_incident(request.body)
        actions.setdefault((incident.id, incident.num_reopened), set()).add(request.headers["ce-action"])
    return actions


def count_missing(server: ReceivingServer, expected: dict[tuple[str, int], set[str]]) -> int:
    """Return the number of messages that a webhook has not accepted."""
    received = count_received(server)
    return sum(len(actions - received.get(key, set())) for key, actions in expected.items())


def read_incidents(bootstrap: str, topic: str) -> dict[tuple[str, int], set[str]]:
    """Return the actions that each webhook must receive, by incident and number of its reopenings."""
    log, actions = KafkaIncidentLog(KafkaCluster(bootstrap), topic), dict[tuple[str, int], set[str]]()
    while not log.is_caught_up:
        for incident in log.poll(1.0):
            wanted = {"open", "resolve"} if incident.state == "resolved" else {"open"}
            actions.setdefault((incident.id, incident.num_reopened), set()).update(wanted)
    log.close()
    return actions


def describe_latency(phase: str, sent: dict[str, float], received: dict[str, float]) -> dict[str, Any]:
    """Return the row of a phase."""
    milliseconds = [1000 * (received[record] - at) for record, at in sent.items() if record in received]
    percentiles = quantiles(milliseconds, n=100) if len(milliseconds) > 1 else [float("nan")] * 99
    return {
        "phase": phase,
        "alerts": len(milliseconds),
        "without_an_alert": len(sent) - len(milliseconds),
        "median_ms": round(percentiles[49], 1),
        "p90_ms": round(percentiles[89], 1),
        "p99_ms": round(percentiles[98], 1),
        "largest_ms": round(max(milliseconds, default=float("nan")), 1),
    }


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a function returns True, for at most `seconds`, and return whether it has."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def measure(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run all processes, and yield the rows of both tables."""
    model = folder / "model"
    model_store.write(model, make_model("tiny", NUM_FEATURES, 0), make_quiet_calibration(), {}, "")
    topic = f"sensors-{uuid.uuid4().hex[:8]}"
    with ExitStack() as cleanup:
        bootstrap = cleanup.enter_context(load_broker_script().start(is_long_running=True)).bootstrap
        ensure_topics(KafkaCluster(bootstrap), {topic: {"num_partitions": 4}})
        servers = {"answers": ReceivingServer(), "hangs": ReceivingServer()}
        for server in servers.values():
            cleanup.callback(server.close)
        kafka = ["--topic", topic, "--group", topic, "--bootstrap-servers", bootstrap]
        consumer = cleanup.enter_context(
            RunningConsumer(folder / "consume.log", *kafka, "--model", model, "--alerts", "", "--evidence", "on")
        )
        consumer.wait_until_ready()
        rule = ["--incident-rule", "e-detector", "--records-per-day", 86_400, "--fleet", "off"]
        times = ["--quiet", f"{QUIET_SECONDS}s", "--gap", "0s"]
        webhooks = ["--webhook", ",".join(server.url for server in servers.values())]
        incidents = cleanup.enter_context(
            RunningConsumer(
                folder / "incidents.log", *kafka, "--model", model, *rule, *times, *webhooks, command="incidents"
            )
        )
        incidents.wait_until_ready()
        alerts = AlertReader(bootstrap, f"{topic}-alerts")
        alerts.start()
        plant = Plant(bootstrap, topic, options.rate)
        plant.start()
        boundaries = [time.time() + WARM_SECONDS]
        time.sleep(WARM_SECONDS + options.before)
        boundaries.append(time.time())
        servers["hangs"].default = Answer(behaviour="hang")
        time.sleep(options.hang)
        boundaries.append(time.time())
        metrics = incidents.read_metrics()
        pending = {
            name: metrics[f'deformer_delivery_pending{{receiver="webhook {server.url.removeprefix("http://")}"}}']
            for name, server in servers.items()
        }
        # No more faults, so that all incidents are resolved. The records go on, because they resolve incidents.
        plant.has_faults = False
        servers["hangs"].default = Answer()
        time.sleep(5 * QUIET_SECONDS)
        expected = read_incidents(bootstrap, f"{topic}-incidents")
        wait_until(lambda: not any(count_missing(server, expected) for server in servers.values()), PATIENCE_SECONDS)
        seconds_to_deliver = time.time() - boundaries[-1]
        expected = read_incidents(bootstrap, f"{topic}-incidents")
        plant.is_over.set()
        plant.join()
        alerts.is_over.set()
        alerts.join()
        consumer.stop()
        incidents.stop()
    for phase, begin, end in zip(("before", "hangs"), boundaries, boundaries[1:], strict=False):
        sent = {record: at for record, at in plant.sent_at_by_record.items() if begin <= at < end}
        row = describe_latency(phase, sent, alerts.received_at_by_record)
        yield {"table": "latency", "seconds": round(end - begin), "records_/s": options.rate, **row}
    for name, server in servers.items():
        num_missing = count_missing(server, expected)
        keys = [
            request.headers["webhook-id"] for request in server.accepted if request.headers["ce-action"] != "update"
        ]
        yield {
            "table": "receivers",
            "webhook": name,
            "incidents": len(expected),
            "messages_expected": sum(map(len, expected.values())),
            "missing": num_missing,
            "requests": len(server.requests),
            "sent_again": len(keys) - len(set(keys)),
            "pending_at_the_end_of_the_hang": int(pending[name]),
            "seconds_until_all_were_delivered": round(seconds_to_deliver),
        }


def format_report(rows: Sequence[Mapping[str, Any]], conditions: str) -> str:
    """Return the report: the conditions, and a table for the latency and one for the receivers."""
    parts = ["# A receiver that hangs", conditions]
    for table in ("latency", "receivers"):
        shown = [
            {name: value for name, value in row.items() if name != "table"} for row in rows if row["table"] == table
        ]
        header = format_markdown_header([name.replace("_", " ") for name in shown[0]])
        parts.append("\n".join([*header, *(format_markdown_row(list(map(str, row.values()))) for row in shown)]))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Run the benchmark, print its tables, and store the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hang", type=float, default=600.0, help="seconds for which the receiver hangs")
    parser.add_argument("--before", type=float, default=60.0, help="seconds before, for comparison")
    parser.add_argument("--rate", type=float, default=400.0, help="records per second")
    parser.add_argument("--store", action="store_true", help="write the tables and the rows to the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = list(measure(options, Path(folder)))
    common = {"date": format_today(), "machine": describe_machine(), "hang": options.hang}
    text = format_report(rows, f"{common['machine']}, {common['date']}; the receiver hangs for {options.hang:g} s.")
    if options.store:
        publish_results("incident_delivery", text, [{**common, **row} for row in rows])
    else:
        print(text)
    if any(row.get("missing") for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
