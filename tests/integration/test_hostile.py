"""Hostile senders at a real Kafka and the real program: nothing ends it, everything is counted and kept."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connectors.kafka import ensure_topics, produce
from tests.connectors.raw import GZIP, LZ4, SNAPPY, ZSTD, batch, bomb, compressed, record, send
from tests.integration.programs import Cluster, Consume
from tests.models import SCHEMA

pytestmark = pytest.mark.kafka
MIB = 2**20
VALUES: dict[str, Any] = {"temperature": 20, "pressure": 1, "vibration": 0, "state": "run", "valve": True, "load": 50}


def event(name: str, feature: str = "pressure", **more: Any) -> bytes:
    return json.dumps({"record": name, "feature": feature, "value": VALUES[feature], **more}).encode()


def letters_of(cluster: Cluster, name: str) -> list[tuple[int, str, str]]:
    """Offset, reason and detail of the dead letters, by offset."""
    found = []
    for letter in cluster.read(f"{name}-dead-letter"):
        headers = {key: value.decode() for key, value in letter.headers}
        assert headers["detail"].isprintable()
        found.append((int(headers["offset"]), headers["reason"], headers["detail"]))
    return sorted(found)


def options(cluster: Cluster, name: str, model: Path, *more: object) -> list[object]:
    return [*("--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap, "--model", model), *more]


def peak_memory(process: int) -> int:
    """The most bytes that a process has held at once; 0 where the system does not say."""
    status = Path(f"/proc/{process}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def test_batches_that_would_end_a_consumer(
    cluster: Cluster, topic: Callable[..., str], model_dir: Path, tmp_path: Path
) -> None:
    """Bombs, large messages in small batches, headers that are no UTF-8, and every way of compressing."""
    name = topic(1)
    ensure_topics(cluster.bootstrap, {f"{name}-dead-letter": {"num_partitions": 1}})  # takes 1 MiB, as any by default

    def events(n: int, at: int = 0) -> bytes:
        return b"".join(record(i, None, event(f"{name}-{at}-{i}")) for i in range(n))

    large = b"x" * (3 * MIB)
    spoiled = record(0, b"k", event("before")) + record(1, b"k", event("x"), [(b"\xff", b"")]) + record(2, b"k", b"{}")
    sent = [
        batch(events(2, 1), 2),
        batch(bomb(ZSTD, 1500 * MIB), 1, ZSTD),
        batch(bomb(GZIP, 200 * MIB), 1, GZIP),
        *[batch(compressed(codec, events(3, 10 + codec)), 3, codec) for codec in (GZIP, SNAPPY, LZ4, ZSTD)],
        batch(compressed(GZIP, record(0, large, event("x")) + record(1, b"k", large)), 2, GZIP),
        batch(spoiled, 3),
        batch(compressed(GZIP, record(0, b"k" * (3 * MIB // 2), b"junk")), 1, GZIP),
        batch(events(2, 20), 2),
    ]
    offsets = [send(cluster.bootstrap, name, one) for one in sent]
    with Consume(tmp_path / "log", *options(cluster, name, model_dir, "--record-timeout", "1h")) as consumer:
        consumer.wait_for(cluster.all_consumed(name, name), "all events consumed")
        memory = peak_memory(consumer.process.pid)
        totals = consumer.stop()
    assert totals["events"] == 2 + 12 + 1 + 2
    assert totals["rejected"] == {"too_large": 4, "not_json": 3}
    letters = letters_of(cluster, name)
    expected = [(offsets[1], "too_large"), (offsets[2], "too_large")]
    expected += [(offsets[7], "too_large"), (offsets[7] + 1, "too_large"), (offsets[8] + 2, "not_json")]
    expected += [(offsets[9], "not_json")]
    assert [(offset, reason) for offset, reason, _ in letters] == expected
    assert f"2 messages, offsets {offsets[8] + 1} to {offsets[8] + 2}: cannot be read" in letters[-2][2]
    (keyless,) = [dict(m.headers) for m in cluster.read(f"{name}-dead-letter") if dict(m.headers).get("key_bytes")]
    assert (keyless["key_bytes"], keyless["payload_bytes"]) == (b"%d" % (3 * MIB // 2), b"4")
    assert memory < 1500 * MIB, "inflating all of it would have taken more"


def test_a_clock_that_leaps_ahead_harms_no_window(
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
    produce(cluster.bootstrap, name, sent)
    words = options(cluster, name, model_dir, "--window", "10s", "--max-ahead", "1h", "--record-timeout", "1h")
    with Consume(tmp_path / "log", *words) as consumer:
        consumer.wait_for(cluster.all_consumed(name, name), "all events consumed")
        closed = consumer.metrics()['deformer_records_closed_total{reason="window"}']
        totals = consumer.stop()
    assert (totals["events"], totals["rejected"]) == (5, {"future": 2})
    assert closed == 1, "the window of the first four, by the event that is just not too far ahead"
    letters = letters_of(cluster, name)
    assert [(offset, reason) for offset, reason, _ in letters] == [(1, "future"), (2, "future")]
    assert all("more than 3600 s ahead" in detail for _, _, detail in letters)


def test_repeated_and_reordered_messages_and_ids_without_end(
    cluster: Cluster, topic: Callable[..., str], model_dir: Path, tmp_path: Path
) -> None:
    """Readings in any order, each up to three times, among a flood of records that never go on."""
    name = topic(4)
    r = random.Random(3)  # noqa: S311
    whole = [(f"whole-{i}", feature) for i in range(100) for feature in SCHEMA.names]
    repeated = [reading for reading in whole for _ in range(r.randrange(1, 4))]
    r.shuffle(repeated)
    flood = [(f"{i}-\0\n\x1b[2J\u2028" + "\U0001f4a7" * 500, "pressure") for i in range(2000)]
    sent = [(record.encode(), event(record, feature), None) for record, feature in [*repeated, *flood]]
    produce(cluster.bootstrap, name, sent, partitions=4)
    words = options(cluster, name, model_dir, "--max-open-records", 300, "--record-timeout", "1h")
    with Consume(tmp_path / "log", *words) as consumer:
        consumer.wait_for(cluster.all_consumed(name, name), "all events consumed")
        metrics = consumer.metrics()
        totals = consumer.stop()
    assert totals["events"] == len(whole) + len(flood)
    assert sum(totals["rejected"].values()) == len(repeated) - len(whole)
    assert set(totals["rejected"]) <= {"duplicate", "late"}
    assert metrics["deformer_records_open"] <= 300
    assert metrics['deformer_records_closed_total{reason="complete"}'] == 100
    assert metrics['deformer_records_closed_total{reason="evicted"}'] == len(flood) - metrics["deformer_records_open"]
    assert Counter(reason for _, reason, _ in letters_of(cluster, name)) == totals["rejected"]
    assert "\x1b" not in consumer.said(), "nothing that a sender wrote reaches the log as it is"
