"""Tests of hostile messages with a real Kafka and the complete program.

No message ends the program, and every rejected one is counted and becomes a dead letter. Only a batch that the client
library cannot read ends it, with the reason.
"""

from __future__ import annotations

import gzip
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connectors.kafka import ensure_topics, produce
from tests.commands import RunCommand
from tests.connectors.raw_batches import (
    GZIP,
    encode_batch,
    encode_record,
    send_batch,
)
from tests.integration.programs import Cluster, RunningConsumer
from tests.models import SCHEMA

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("client_library")]

MIB = 2**20
VALUES: dict[str, Any] = {"temperature": 20, "pressure": 1, "vibration": 0, "state": "run", "valve": True, "load": 50}


def encode_event(name: str, feature: str = "pressure", **more: Any) -> bytes:
    """Return a reading as JSON, with further fields."""
    return json.dumps({"record": name, "feature": feature, "value": VALUES[feature], **more}).encode()


def read_dead_letters(cluster: Cluster, name: str) -> list[tuple[int, str, str]]:
    """Return offset, reason and detail of the dead letters, sorted by offset."""
    found = []
    for letter in cluster.read_topic(f"{name}-dead-letter"):
        headers = {key: value.decode() for key, value in letter.headers}
        assert headers["detail"].isprintable()
        found.append((int(headers["offset"]), headers["reason"], headers["detail"]))
    return sorted(found)


def make_options(cluster: Cluster, name: str, model: Path, *more: object) -> list[object]:
    """Return the options of a consumer whose group has the name of the topic."""
    return [*("--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap, "--model", model), *more]


def get_peak_memory(process: int) -> int:
    """Return the maximum memory of a process in bytes, or 0 if the system does not state it."""
    status = Path(f"/proc/{process}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def test_oversized_messages_become_dead_letters(
    cluster: Cluster, topic: Callable[..., str], model_dir: Path, tmp_path: Path
) -> None:
    name = topic(1)
    ensure_topics(cluster.brokers, {f"{name}-dead-letter": {"num_partitions": 1}})  # accepts 1 MiB by default

    def events(n: int, at: int = 0) -> bytes:
        return b"".join(encode_record(i, None, encode_event(f"{name}-{at}-{i}")) for i in range(n))

    sent = [
        encode_batch(events(2, 1), 2),
        encode_batch(gzip.compress(events(3, 10)), 3, GZIP),
        encode_batch(gzip.compress(encode_record(0, b"k", b"x" * (3 * MIB))), 1, GZIP),
        encode_batch(gzip.compress(encode_record(0, b"k" * (3 * MIB // 2), b"junk")), 1, GZIP),
        encode_batch(events(2, 20), 2),
    ]
    offsets = [send_batch(cluster.bootstrap, name, one) for one in sent]
    with RunningConsumer(
        tmp_path / "log", *make_options(cluster, name, model_dir, "--record-timeout", "1h")
    ) as consumer:
        consumer.wait_for(cluster.is_consumed(name, name), "all events consumed")
        totals = consumer.stop()
    assert totals["events"] == 2 + 3 + 2
    assert totals["rejected"] == {"too_large": 1, "not_json": 1}
    letters = read_dead_letters(cluster, name)
    assert [(offset, reason) for offset, reason, _ in letters] == [(offsets[2], "too_large"), (offsets[3], "not_json")]
    (keyless,) = [
        dict(m.headers) for m in cluster.read_topic(f"{name}-dead-letter") if dict(m.headers).get("key_bytes")
    ]
    assert (keyless["key_bytes"], keyless["payload_bytes"]) == (b"%d" % (3 * MIB // 2), b"4")


def test_times_in_the_future_close_no_window(
    cluster: Cluster, topic: Callable[..., str], model_dir: Path, tmp_path: Path
) -> None:
    name = topic(1)
    now = int(time.time()) // 10 * 10 - 60
    good = [(s, f) for s, f in zip((0, 1, 2, 3), SCHEMA.names, strict=False)]

    def of(device: str, second: float, feature: str) -> tuple[bytes, bytes, int]:
        document = {"device": device, "feature": feature, "value": VALUES[feature], "time": now + second}
        return device.encode(), json.dumps(document).encode(), now * 1000

    leap = [of("a", 86_400, "pressure"), of("a", 3600.5, "state")]
    sent = [of("a", *good[0]), *leap, *(of("a", *reading) for reading in good[1:]), of("a", 3599, "pressure")]
    produce(cluster.brokers, name, sent)
    words = make_options(cluster, name, model_dir, "--window", "10s", "--record-timeout", "1h")
    with RunningConsumer(tmp_path / "log", *words) as consumer:
        consumer.wait_for(cluster.is_consumed(name, name), "all events consumed")
        closed = consumer.read_metrics()['deformer_records_closed_total{reason="window"}']
        totals = consumer.stop()
    assert (totals["events"], totals["rejected"]) == (5, {"future": 2})
    assert closed == 1, "the event that is just not too far ahead closes the window of the first four"
    letters = read_dead_letters(cluster, name)
    assert [(offset, reason) for offset, reason, _ in letters] == [(1, "future"), (2, "future")]
    assert all("lies more than 3600 s after" in detail for _, _, detail in letters)


def test_repeated_readings_and_many_record_ids(
    cluster: Cluster, topic: Callable[..., str], model_dir: Path, tmp_path: Path
) -> None:
    """Readings come in any order and up to three times, among many records that are never completed."""
    name = topic(4)
    r = random.Random(3)  # noqa: S311
    whole = [(f"whole-{i}", feature) for i in range(100) for feature in SCHEMA.names]
    repeated = [reading for reading in whole for _ in range(r.randrange(1, 4))]
    r.shuffle(repeated)
    flood = [(f"{i}-\0\n\x1b[2J\u2028" + "\U0001f4a7" * 500, "pressure") for i in range(2000)]
    sent = [(record.encode(), encode_event(record, feature), None) for record, feature in [*repeated, *flood]]
    produce(cluster.brokers, name, sent, partitions=4)
    words = make_options(cluster, name, model_dir, "--max-open-records", 300, "--record-timeout", "1h")
    with RunningConsumer(tmp_path / "log", *words) as consumer:
        consumer.wait_for(cluster.is_consumed(name, name), "all events consumed")
        metrics = consumer.read_metrics()
        totals = consumer.stop()
    assert totals["events"] == len(whole) + len(flood)
    assert sum(totals["rejected"].values()) == len(repeated) - len(whole)
    assert set(totals["rejected"]) <= {"duplicate", "late"}
    assert metrics["deformer_records_open"] <= 300
    assert metrics['deformer_records_closed_total{reason="complete"}'] == 100
    assert metrics['deformer_records_closed_total{reason="evicted"}'] == len(flood) - metrics["deformer_records_open"]
    assert Counter(reason for _, reason, _ in read_dead_letters(cluster, name)) == totals["rejected"]
    assert "\x1b" not in consumer.read_log(), "texts of senders are escaped in the log"


def test_refused_messages_are_sent_again(
    cluster: Cluster, topic: Callable[..., str], model_dir: Path, tmp_path: Path, cli: RunCommand
) -> None:
    """Readings with another field name are rejected, listed, and scored by a consumer of another topic."""
    name, repaired = topic(2), topic(2)
    time_ms = time.time_ns() // 1_000_000 - 3_600_000  # Kafka soon deletes messages that are older than a week
    events = [(b"r%d" % i, encode_event(f"r{i}"), time_ms + i) for i in range(20)]
    renamed = [(key, value.replace(b'"feature"', b'"sensor"'), sent_at) for key, value, sent_at in events]
    produce(cluster.brokers, name, [*events[:10], *renamed[10:], (b"k", b"nonsense", None)])
    with RunningConsumer(tmp_path / "first.log", *make_options(cluster, name, model_dir)) as consumer:
        consumer.wait_for(cluster.is_consumed(name, name), "the messages")
        assert consumer.stop()["rejected"] == {"missing_field": 10, "not_json": 1}
    brokers = ["--topic", name, "--bootstrap-servers", cluster.bootstrap]
    listed = cli("dead-letters", "list", *brokers).out.splitlines()
    assert [line.split()[:2] for line in listed[1:]] == [["10", "missing_field"], ["1", "not_json"]]
    shown = cli("dead-letters", "show", "--reason", "not_json", *brokers).out
    assert json.loads(shown)["value"] == "nonsense"
    replay = ["dead-letters", "replay", "--reason", "missing_field", "--to", repaired, *brokers]
    assert cli(*replay, "--dry-run").out == "10 messages would be sent again\n"
    assert cluster.read_topic(repaired) == []
    assert cli(*replay).out == "10 messages were sent again\n"
    assert sum(cluster.read_end_offsets(repaired).values()) == 10
    options = make_options(cluster, repaired, model_dir, "--feature-field", "sensor")
    with RunningConsumer(tmp_path / "second.log", *options) as consumer:
        consumer.wait_for(cluster.is_consumed(repaired, repaired), "the messages that were sent again")
        totals = consumer.stop()
        assert (totals["events"], totals["rejected"]) == (10, {})
    sent = {(message.key, message.value, message.timestamp) for message in cluster.read_topic(repaired)}
    assert sent == set(renamed[10:])
