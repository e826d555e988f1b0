"""Time until a consumer is ready again after kill -9, with many open records: `python -m benchmarks.recovery`.

The benchmark uses a real Kafka broker and the real program in a process of its own. The consumer is ready when
`/readyz` says so: its partitions are assigned, their snapshots are restored, and the log since then has been replayed.
The start of the program without any open record is measured in the same run for comparison. At the end the consumer is
killed once more and started with another model, which scores all open readings again. The longest time between two
polls of that process, of which the group takes partitions away if it is too long, is read from its histogram.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.command import describe_machine, format_today, publish_results
from benchmarks.tables import format_markdown_header, format_markdown_row
from connectors.kafka import KafkaCluster, TopicSpec, ensure_topics, produce
from tests.conftest import load_broker_script
from tests.integration.programs import Cluster, RunningConsumer
from tests.models import SCHEMA, draw_rows, write_model

TIMEOUT_SECONDS = 600.0
"""Time after which a consumer that is not ready fails the benchmark."""

SNAPSHOT_SECONDS = 6.0
"""Pause before a kill, in which the consumer writes a snapshot of every partition (it does so every five seconds)."""


@dataclass(slots=True)
class Measurements:
    """Measurements of several restarts.

    Attributes:
        ready_seconds: Seconds from each start with open records until the consumer is ready.
        ready_seconds_without_records: The same for starts without open records.
        open_records: Number of open records that were restored at the last start.
        snapshot_bytes: Bytes of all snapshots before the last kill.
        open_readings: Number of readings of the open records.
        partitions: Number of partitions that they are divided among.
        client: Kafka client.
        scored_again_seconds: Seconds from the start with another model until all open readings are scored again.
        poll_gap_seconds: A bound that no time between two polls of that process exceeds, in seconds.
    """

    ready_seconds: list[float] = field(default_factory=list)
    ready_seconds_without_records: list[float] = field(default_factory=list)
    open_records: int = 0
    snapshot_bytes: int = 0
    open_readings: int = 0
    partitions: int = 0
    client: str = ""
    scored_again_seconds: float = 0.0
    poll_gap_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the JSON line."""
        median = statistics.median(self.ready_seconds)
        return {
            "open_records": self.open_records,
            "ready_seconds": [round(seconds, 2) for seconds in self.ready_seconds],
            "ready_seconds_without_records": [round(seconds, 2) for seconds in self.ready_seconds_without_records],
            "median": round(median, 2),
            "ratio": round(median / statistics.median(self.ready_seconds_without_records), 2),
            "snapshot_bytes": self.snapshot_bytes,
            "open_readings": self.open_readings,
            "partitions": self.partitions,
            "client": self.client,
            "scored_again_seconds": round(self.scored_again_seconds, 2),
            "poll_gap_seconds": self.poll_gap_seconds,
        }


def generate_messages(num_records: int, num_readings: int) -> Iterator[tuple[bytes, bytes, None]]:
    """Yield key, value and time (none) of messages with the first readings of each record, which stays open."""
    rows = draw_rows(SCHEMA, 1000, 0, missing_share=0.0)
    for i in range(num_records):
        record_id = f"device-{i % 997}/{i}"
        for name, value in list(rows[i % 1000].items())[:num_readings]:
            event = {"record": record_id, "feature": name, "value": value}
            yield record_id.encode(), json.dumps(event).encode(), None


def measure_ready_seconds(consumer: RunningConsumer, start: float) -> float:
    """Wait until the consumer is ready and return the seconds since `start`, a time of `time.monotonic`."""
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{consumer.port}/readyz", timeout=1):
                return time.monotonic() - start
        except (urllib.error.URLError, OSError):
            assert consumer.process.poll() is None, consumer.read_log()
            assert time.monotonic() - start < TIMEOUT_SECONDS, consumer.read_log()
            time.sleep(0.02)


def find_poll_gap_bound(metrics: dict[str, float]) -> float:
    """Return the smallest bound of the histogram `poll_gap_seconds` that no observation exceeds, in seconds."""
    name = "deformer_poll_gap_seconds"
    total = metrics[f"{name}_count"]
    bounds = [
        float(key.split('le="')[1].split('"')[0])
        for key, count in metrics.items()
        if key.startswith(f"{name}_bucket") and count == total
    ]
    return min(bounds)


def measure_restarts(
    num_records: int, num_readings: int, num_kills: int, num_partitions: int, client: str
) -> Measurements:
    """Start a broker, open records, and kill and restart a consumer several times, the last time with another model."""
    measurements = Measurements(open_readings=num_records * num_readings, partitions=num_partitions, client=client)
    folder = Path(tempfile.mkdtemp(prefix="deformer-recovery-"))
    with load_broker_script().start() as broker:
        cluster = Cluster(broker.bootstrap)
        topic, empty_topic = f"events-{uuid.uuid4().hex[:6]}", "empty"
        topics: dict[str, TopicSpec] = {name: {"num_partitions": num_partitions} for name in (topic, empty_topic)}
        ensure_topics(KafkaCluster(broker.bootstrap), topics)
        model, other_model = write_model(folder / "model"), write_model(folder / "other-model", seed=1)

        def start_consumer(name: str, number: int, model: Path = model) -> RunningConsumer:
            options = ["--topic", name, "--group", name, "--bootstrap-servers", broker.bootstrap, "--model", model]
            options += ["--alerts", "", "--record-timeout", "1d", "--instance", "one", "--client", client]
            return RunningConsumer(folder / f"{name}-{number}.log", *options)

        def kill_and_start(number: int, model: Path) -> tuple[RunningConsumer, float]:
            """Return the next consumer, and when it was started."""
            consumer.process.kill()
            consumer.process.wait()
            start = time.monotonic()
            return start_consumer(topic, number, model), start

        num_sent = produce(KafkaCluster(broker.bootstrap), topic, generate_messages(num_records, num_readings))
        print(f"sent {num_sent} readings of {num_records} records", file=sys.stderr, flush=True)
        consumer = start_consumer(topic, 0)
        consumer.wait_for(cluster.is_consumed(topic, topic), "all events", TIMEOUT_SECONDS)
        for number in range(1, num_kills + 1):
            time.sleep(SNAPSHOT_SECONDS)
            # The metric has to be read before the kill, because the next run starts at 0 bytes.
            measurements.snapshot_bytes = sum_snapshot_bytes(consumer)
            consumer, start = kill_and_start(number, model)
            measurements.ready_seconds.append(measure_ready_seconds(consumer, start))
            restored = consumer.list_log_events("partition_restored")
            measurements.open_records = sum(line["open_records"] for line in restored)
            start = time.monotonic()
            with start_consumer(empty_topic, number) as empty_consumer:
                measurements.ready_seconds_without_records.append(measure_ready_seconds(empty_consumer, start))
                empty_consumer.stop()
        time.sleep(SNAPSHOT_SECONDS)
        consumer, start = kill_and_start(num_kills + 1, other_model)
        measure_ready_seconds(consumer, start)
        consumer.wait_for(
            lambda: consumer.read_metrics()["deformer_partitions_restoring"] == 0, "all readings", TIMEOUT_SECONDS
        )
        measurements.scored_again_seconds = time.monotonic() - start
        measurements.poll_gap_seconds = find_poll_gap_bound(consumer.read_metrics())
        consumer.stop()
        cluster.close()
    return measurements


def sum_snapshot_bytes(consumer: RunningConsumer) -> int:
    """Return the bytes of the snapshots of all partitions, from the consumer's metrics."""
    metrics = consumer.read_metrics()
    return int(sum(value for name, value in metrics.items() if name.startswith("deformer_snapshot_bytes")))


def format_report(measurements: Iterable[Measurements]) -> str:
    """Return the report in Markdown."""
    titles = ["client", "partitions", "open records", "their readings", "bytes of their snapshots"]
    titles += ["ready after (each kill)", "without open records", "ratio of medians"]
    titles += ["scored again by another model after", "no two polls further apart than"]
    rows = [
        format_markdown_row(
            [
                one.client,
                str(one.partitions),
                f"{one.open_records:,}",
                f"{one.open_readings:,}",
                f"{one.snapshot_bytes:,}",
                ", ".join(f"{seconds:.1f}" for seconds in one.ready_seconds),
                ", ".join(f"{seconds:.1f}" for seconds in one.ready_seconds_without_records),
                str(one.to_json()["ratio"]),
                f"{one.scored_again_seconds:.1f}",
                f"{one.poll_gap_seconds:g}",
            ]
        )
        for one in measurements
    ]
    table = "\n".join([*format_markdown_header(titles), *rows])
    conditions = f"{describe_machine()}, {format_today()}"
    explanation = "Seconds from the start of the process until `/readyz` is successful, after kill -9."
    explanation += " The last column is a bound of a bucket of the metric `poll_gap_seconds`."
    return f"# Recovery\n\n{conditions}. {explanation}\n\n{table}\n"


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    records_help = "number of open records; 100000 by default"
    parser.add_argument("--records", type=int, default=100_000, help=records_help)
    readings_help = "number of readings of each record; 3 by default"
    parser.add_argument("--readings", type=int, default=3, help=readings_help)
    parser.add_argument("--kills", type=int, default=3, help="number of restarts; 3 by default")
    partitions_help = "number of partitions of the topic; 8 by default"
    parser.add_argument("--partitions", type=int, default=8, help=partitions_help)
    client_help = "Kafka clients of the consumer, comma-separated, one row each; both by default"
    parser.add_argument("--client", default="kafka-python,librdkafka", help=client_help)
    arguments = parser.parse_args()
    measurements = []
    for client in arguments.client.split(","):
        measurements.append(
            measure_restarts(arguments.records, arguments.readings, arguments.kills, arguments.partitions, client)
        )
        print(json.dumps(measurements[-1].to_json()), flush=True)
    publish_results("recovery", format_report(measurements), [one.to_json() for one in measurements])


if __name__ == "__main__":
    main()
