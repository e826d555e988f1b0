"""Tests of suspicious records with the real programs and a real broker, over kills and restarts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from connectors.kafka import produce
from deformer_stream import load
from deformer_stream.codec.encode_next_readings import decode_suspicious_record
from deformer_stream.engine.events import SuspiciousRecord
from tests.integration.programs import Cluster, RunningConsumer, consume_with_kills
from tests.models import SCHEMA, draw_rows

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("client_library")]

NUM_RECORDS, NUM_LEFT_OUT = 150, 2
SUSPICIOUS = 0.4


def make_readings() -> tuple[list[tuple[str, str, float | str]], list[tuple[str, str, float | str]]]:
    """Return the first readings of records, which interleave, and the readings that complete the records."""
    rows = draw_rows(SCHEMA, NUM_RECORDS, 4, missing_share=0.0)
    first, last = [], []
    for number, row in enumerate(rows):
        readings = [(f"pump-{number % 3}/{number}", name, value) for name, value in row.items()]
        first += readings[:-NUM_LEFT_OUT]
        last += readings[-NUM_LEFT_OUT:]
    order = np.argsort(np.arange(len(first)) + np.random.default_rng(0).uniform(0, 200, len(first)))
    return [first[i] for i in order.tolist()], last


def encode(readings: list[tuple[str, str, float | str]]) -> list[tuple[bytes, bytes, None]]:
    return [
        (record.encode(), json.dumps({"record": record, "feature": name, "value": value}).encode(), None)
        for record, name, value in readings
    ]


def read_stated(cluster: Cluster, topic: str) -> dict[str, SuspiciousRecord]:
    """Return the records that the topic states: of each key the last message, unless it is a tombstone."""
    stated: dict[str, SuspiciousRecord] = {}
    for message in cluster.read_topic(topic):
        if message.value is None:
            stated.pop(message.key.decode(), None)
        else:
            stated[message.key.decode()] = decode_suspicious_record(message.value)
    return stated


def test_the_topic_states_exactly_the_suspicious_records_over_kills(
    cluster: Cluster, topic: Callable[..., str], model_dir: Path, tmp_path: Path
) -> None:
    """What the runs before a kill have stated is withdrawn by the runs after it."""
    name, (first, last) = topic(2), make_readings()
    options = [
        *("--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap, "--model", model_dir),
        *("--instance", "a", "--snapshot-interval", "300ms", "--record-timeout", "1h", "--alpha", "0.05"),
        *("--explanations", "off", "--max-poll-records", "40", "--alerts", ""),
        *("--next-reading", "1000", "--suspicious", SUSPICIOUS),
    ]
    sender = threading.Thread(target=produce, args=(cluster.brokers, name, encode(first), 150.0))
    sender.start()
    consume_with_kills(tmp_path, options, sender, cluster, name)
    scorer = load(model_dir).scorer(alpha=0.05)
    num_readings: dict[str, int] = {}
    for record, feature, value in first:
        scorer.update(record, feature, value)
        num_readings[record] = num_readings.get(record, 0) + 1
    expected = {record: ranking for record, ranking in scorer.next_readings(suspicious=SUSPICIOUS).items() if ranking}
    # Another process takes the records over, and states those that still waited when the last one ended.
    with RunningConsumer(tmp_path / "wait.log", *options) as consumer:
        consumer.wait_until_ready()  # nothing may be missing any more, and then the process would be ended too early
        consumer.wait_for(
            lambda: read_stated(cluster, f"{name}-next-readings").keys() == expected.keys(), "all suspicious records"
        )
        consumer.stop()
    stated = read_stated(cluster, f"{name}-next-readings")
    assert stated.keys() == expected.keys()
    assert len(stated) > 10
    for record, one in stated.items():
        assert one.features_seen == num_readings[record]
        assert one.p_value <= SUSPICIOUS
        assert one.next_reading.feature in {reading.feature for reading in expected[record]}
        assert one.expires is not None
    # The other readings complete the records while another process runs, which has stated none of them itself.
    produce(cluster.brokers, name, encode(last))
    with RunningConsumer(tmp_path / "complete.log", *options) as consumer:
        consumer.wait_until_ready()
        consumer.wait_for(cluster.is_consumed(name, name), "all messages")
        consumer.stop()
    assert read_stated(cluster, f"{name}-next-readings") == {}


def test_without_the_option_there_is_no_topic(
    cluster: Cluster, topic: Callable[..., str], model_dir: Path, tmp_path: Path
) -> None:
    name = topic(1)
    options = ["--topic", name, "--group", name, "--bootstrap-servers", cluster.bootstrap, "--model", model_dir]
    with RunningConsumer(tmp_path / "log", *options) as consumer:
        consumer.wait_until_ready()
        consumer.stop()
    assert f"{name}-next-readings" not in cluster.list_topics()
