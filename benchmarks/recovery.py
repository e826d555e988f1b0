"""How long a consumer takes, after kill -9, to be ready again with its open records: `python -m benchmarks.recovery`.

A real Kafka and the real program as a process. Ready is what `/readyz` says: partitions assigned, snapshots read, the
log since then handled again. The program's start without any open record, in the same run, is what to compare with.
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
from collections.abc import Iterator
from pathlib import Path

from benchmarks.command import machine, publish, today
from connectors.kafka import ensure_topics, produce
from deformer_stream.cli_utils import limit_thread_spinning
from tests.conftest import load_broker_script
from tests.integration.programs import Cluster, Consume
from tests.models import SCHEMA, rows_of, write_model

PATIENCE = 600.0


def readings(records: int, each: int) -> Iterator[tuple[bytes, bytes, None]]:
    """The first `each` readings of so many records."""
    rows = rows_of(SCHEMA, 1000, 0, missing=0.0)
    for i in range(records):
        key = f"device-{i % 997}/{i}"
        for name, value in list(rows[i % 1000].items())[:each]:
            yield key.encode(), json.dumps({"record": key, "feature": name, "value": value}).encode(), None


def ready_after(consumer: Consume, began: float) -> float:
    """Seconds from `began` until `/readyz` says so."""
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{consumer.port}/readyz", timeout=1):
                return time.monotonic() - began
        except (urllib.error.URLError, OSError):
            assert consumer.process.poll() is None, consumer.said()
            assert time.monotonic() - began < PATIENCE, consumer.said()
            time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--readings", type=int, default=3)
    parser.add_argument("--kills", type=int, default=3)
    args = parser.parse_args()
    limit_thread_spinning()
    folder = Path(tempfile.mkdtemp(prefix="deformer-recovery-"))
    with load_broker_script().start() as broker:
        cluster, topic, empty = Cluster(broker.bootstrap), f"events-{uuid.uuid4().hex[:6]}", "empty"
        ensure_topics(broker.bootstrap, {name: {"num_partitions": 8} for name in (topic, empty)})
        model = write_model(folder / "model")

        def start(name: str, number: int) -> Consume:
            words = ["--topic", name, "--group", name, "--bootstrap-servers", broker.bootstrap, "--model", model]
            rest = ["--alerts", "", "--record-timeout", "1d", "--instance", "one"]
            return Consume(folder / f"{name}-{number}.log", *words, *rest)

        sent = produce(broker.bootstrap, topic, readings(args.records, args.readings))
        print(f"{sent} readings of {args.records} records sent", file=sys.stderr, flush=True)
        full, bare, history = [], [], []
        consumer = start(topic, 0)
        consumer.wait_for(cluster.all_consumed(topic, topic), "all events", PATIENCE)
        for number in range(1, args.kills + 1):
            time.sleep(6)  # a snapshot of each partition
            consumer.process.kill()
            consumer.process.wait()
            began = time.monotonic()
            consumer = start(topic, number)
            full.append(ready_after(consumer, began))
            restored = consumer.events("partition restored")
            history.append(sum(line["records"] for line in restored))
            began = time.monotonic()
            with start(empty, number) as other:
                bare.append(ready_after(other, began))
                other.stop()
        size = sum(v for k, v in consumer.metrics().items() if k.startswith("deformer_snapshot_bytes"))
        consumer.stop()
        cluster.close()
    figures = {
        "open_records": history[-1],
        "ready_seconds": [round(s, 2) for s in full],
        "ready_seconds_without_records": [round(s, 2) for s in bare],
        "median": round(statistics.median(full), 2),
        "ratio": round(statistics.median(full) / statistics.median(bare), 2),
        "snapshot_bytes": int(size),
    }
    print(json.dumps(figures))
    text = f"""# Recovery

{machine()}, {today()}; seconds from the start of the process to `/readyz`, after kill -9.

| open records | bytes of their snapshots | ready after (each kill) | without open records | ratio of medians |
|---|---|---|---|---|
| {figures["open_records"]:,} | {figures["snapshot_bytes"]:,} | {_list(full)} | {_list(bare)} | {figures["ratio"]} |
"""
    publish("recovery", text, [figures])


def _list(seconds: list[float]) -> str:
    return ", ".join(f"{s:.1f}" for s in seconds)


if __name__ == "__main__":
    main()
