"""Exactly-once delivery of what a producer that is not ours has sent, with both client libraries.

The producer compresses its batches in each possible way, commits and aborts transactions, and sends tombstones and
garbage. The consumers are killed within commits.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from tests.chaos.run import list_differences
from tests.commands import RunCommand
from tests.integration.programs import Cluster, consume_with_kills
from tests.models import SCHEMA, draw_rows

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("client_library")]


COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
ENDS = ("without a transaction", "committed", "aborted")
BATCH_MESSAGES = 40

Message = tuple[bytes, bytes | None]


def make_messages() -> list[Message]:
    """Return keys and values: readings of interleaved records, one in a hundred garbage, and some tombstones."""
    rng = random.Random(5)  # noqa: S311 -- no secrets
    rows = draw_rows(SCHEMA, 500, 4)
    readings = [(f"r{i}", feature, value) for i, row in enumerate(rows) for feature, value in row.items()]
    readings = [readings[i] for i in sorted(range(len(readings)), key=lambda i: i + rng.uniform(0, 300))]
    messages: list[Message] = []
    for number, (record, feature, value) in enumerate(readings):
        document = json.dumps({"record": record, "feature": feature, "value": value}).encode()
        messages.append((record.encode(), document))
        if number % 100 == 50:
            messages.append((record.encode(), b"\xff garbage %d" % number))
        if number % 100 == 75:
            messages.append((record.encode(), None))
    return messages


class ForeignProducer:
    """Producers of librdkafka with its defaults, one for each compression, with and without transactions."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._topic = topic
        self._producers: dict[tuple[str, bool], Producer] = {}
        for compression, is_transactional in itertools.product(COMPRESSIONS, (False, True)):
            settings: dict[str, Any] = {"bootstrap.servers": bootstrap, "compression.type": compression}
            if is_transactional:
                settings["transactional.id"] = f"{topic}-{compression}"
            producer = self._producers[compression, is_transactional] = Producer(settings)
            if is_transactional:
                producer.init_transactions(30.0)

    def send(self, messages: list[Message], pause: float) -> None:
        """Send messages in small batches, and in aborted transactions the same keys with other values.

        Args:
            messages: Keys and values.
            pause: Seconds between two batches.
        """
        choices = itertools.product(ENDS, COMPRESSIONS)
        batches = [messages[i : i + BATCH_MESSAGES] for i in range(0, len(messages), BATCH_MESSAGES)]
        for batch, (end, compression) in zip(batches, itertools.cycle(choices), strict=False):
            self._send_batch(batch, compression, end)
            if end == "aborted":  # what was aborted is sent again, as a foreign program would do
                self._send_batch(batch, compression, "committed")
            time.sleep(pause)

    def _send_batch(self, batch: list[Message], compression: str, end: str) -> None:
        producer = self._producers[compression, end != "without a transaction"]
        if end != "without a transaction":
            producer.begin_transaction()
        for key, value in batch:
            producer.produce(self._topic, value, key)
        assert producer.flush(30.0) == 0
        if end == "committed":
            producer.commit_transaction(30.0)
        if end == "aborted":
            producer.abort_transaction(30.0)


def read_alerts(lines: list[bytes]) -> dict[str, dict[str, Any]]:
    """Return alerts by id, each of which must occur once."""
    alerts = [json.loads(line) for line in lines]
    assert not [key for key, count in Counter(alert["id"] for alert in alerts).items() if count > 1]
    return {alert["id"]: alert for alert in alerts}


def test_each_message_of_a_foreign_producer_has_its_effects_once(
    cluster: Cluster, topic: Callable[..., str], model_dir: Path, tmp_path: Path, cli: RunCommand
) -> None:
    """Alerts equal those of a replay to the last bit, and each rejected message is one dead letter."""
    name, messages = topic(2), make_messages()
    words = ("--model", model_dir, "--alpha", "0.3", "--explanations", "off")
    options = [
        *("--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap, *words, "--alerts", ""),
        *("--record-timeout", "1d", "--instance", "a", "--snapshot-interval", "300ms", "--max-poll-records", "100"),
    ]
    sender = threading.Thread(target=ForeignProducer(cluster.bootstrap, name).send, args=(messages, 0.2))
    sender.start()
    consume_with_kills(tmp_path, options, sender, cluster, name)
    committed = cluster.read_topic(name)
    assert Counter((message.key, message.value) for message in committed) == Counter(messages)
    is_reading = [message.value is not None and message.value.startswith(b"{") for message in committed]
    events = [message.value + b"\n" for message, is_one in zip(committed, is_reading, strict=True) if is_one]
    (tmp_path / "events.jsonl").write_bytes(b"".join(events))
    ended = cli("replay", tmp_path / "events.jsonl", *words, "--alerts", tmp_path / "alerts")
    assert ended.code == 0, ended.err
    expected = read_alerts((tmp_path / "alerts").read_bytes().splitlines())
    assert len(expected) > 100
    found = read_alerts([message.value for message in cluster.read_topic(f"{name}-alerts")])
    assert found.keys() == expected.keys()
    assert [d for key, alert in found.items() if (d := list_differences(alert, expected[key]))] == []
    letters = [dict(message.headers) for message in cluster.read_topic(f"{name}-dead-letter")]
    rejected = [
        (message.partition, message.offset) for message, is_one in zip(committed, is_reading, strict=True) if not is_one
    ]
    assert len(rejected) > 40
    assert Counter((int(letter["partition"]), int(letter["offset"])) for letter in letters) == Counter(rejected)
