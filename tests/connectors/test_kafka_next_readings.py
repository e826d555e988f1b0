"""Tests of the topic of suspicious records, with a real broker."""

from __future__ import annotations

import uuid
from dataclasses import replace
from types import SimpleNamespace

import pytest

from connectors.kafka import (
    Delivery,
    KafkaCluster,
    KafkaNextReadingLog,
    KafkaNextReadingSink,
    describe_next_reading_topic,
    ensure_topics,
    next_reading_topic,
    produce,
)
from deformer_stream.engine.events import SuspiciousRecord
from deformer_stream.runtime.incident_ports import NextReadingMessage
from tests.codec.next_reading_examples import RECORD
from tests.connectors.kafka_helpers import make_effects, read_messages, wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("client_library")]


def write(kafka: SimpleNamespace, topic: str, stated: list[SuspiciousRecord], withdrawn: list[tuple[int, str]]) -> None:
    """Create the topic if it does not exist, and send one batch to it."""
    delivery = Delivery(kafka.cluster, ensure_topics(kafka.cluster, describe_next_reading_topic(topic)))
    sink = KafkaNextReadingSink(topic, delivery, "sensors")
    sink.write(replace(make_effects([], []), suspicious_records=stated, withdrawn_records=withdrawn), None)
    delivery.seal_pending()
    delivery.send([])
    delivery.mark_committed()
    delivery.close()


def test_records_are_stated_and_withdrawn(kafka: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log begins before its topic exists, as the page may start before the first `consume --next-reading`."""
    monkeypatch.setattr(next_reading_topic, "LOOK_SECONDS", 0.0)
    topic = f"n-{uuid.uuid4().hex[:8]}"
    log = KafkaNextReadingLog(kafka.cluster, topic)
    assert log.poll(0.0) == ()
    assert log.is_caught_up
    other = replace(RECORD, record="Pumpe-ü/1", partition=0)
    write(kafka, topic, [RECORD, other], [])
    found: list[NextReadingMessage] = []

    def read(count: int) -> bool:
        found.extend(log.poll(0.1))
        return len(found) >= count

    wait_until(lambda: read(2), "two records")
    assert found == [(RECORD.record, RECORD), (other.record, other)]
    assert log.is_caught_up
    produce(kafka.cluster, topic, [(b"x", b"no suspicious record", None)])
    later = replace(RECORD, features_seen=6)
    write(kafka, topic, [later], [(0, other.record)])
    wait_until(lambda: read(4), "the later messages")
    assert found[2:] == [(other.record, None), (RECORD.record, later)]
    log.close()
    messages = read_messages(kafka.cluster, topic)
    headers = {name: value.decode() for name, value in messages[0].headers}
    assert headers["ce_type"] == "io.deformer.next-reading.v1"
    assert headers["ce_source"] == "/sensors/3"
    assert headers["ce_time"] == "2020-03-09T10:34:33.500000Z"
    assert [(one.key or b"").decode() for one in messages] == [
        RECORD.record,
        other.record,
        "x",
        other.record,
        RECORD.record,
    ]


def test_a_missing_topic_is_looked_for_once_in_a_while(kafka: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    num_looks = 0
    has_topic = next_reading_topic.has_topic

    def count(cluster: KafkaCluster, topic: str) -> bool:
        nonlocal num_looks
        num_looks += 1
        return has_topic(cluster, topic)

    monkeypatch.setattr(next_reading_topic, "has_topic", count)
    monkeypatch.setattr(next_reading_topic, "LOOK_SECONDS", 3600.0)
    log = KafkaNextReadingLog(kafka.cluster, f"missing-{uuid.uuid4().hex[:8]}")
    for _ in range(3):
        assert log.poll(0.0) == ()
    assert num_looks == 1
    log.close()
