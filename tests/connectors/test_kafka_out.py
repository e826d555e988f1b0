"""Tests of alerts, dead letters and produced events in Kafka, with a real broker."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition

from connectors.kafka import KafkaSink, produce
from deformer_stream.codec.payloads import Messages
from deformer_stream.engine.events import Rejection, RejectionReason, StormNotice
from deformer_stream.errors import ConfigError
from tests.connectors.kafka_helpers import FakeAlertEncoder, Topic, make_alert, make_effects, make_sink
from tests.contracts.effects import make_drift_notice

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("client_library")]


@pytest.fixture
def open_sink(kafka: SimpleNamespace) -> Iterator[Callable[..., KafkaSink]]:
    """Return a function that opens a sink for alerts and dead letters."""
    opened: list[KafkaSink] = []

    def make(alerts: str | None, letters: str | None, **options: Any) -> KafkaSink:
        opened.append(make_sink(kafka.cluster, alerts, letters, FakeAlertEncoder(), **options))
        return opened[-1]

    yield make
    for sink in opened:
        sink.close()


def read_records(kafka: SimpleNamespace, topic: str, count: int) -> list[Any]:
    """Return the first `count` messages of a topic with their headers, by partition."""
    reader = KafkaConsumer(bootstrap_servers=kafka.bootstrap, auto_offset_reset="earliest", consumer_timeout_ms=10000)
    reader.assign([TopicPartition(topic, p) for p in sorted(reader.partitions_for_topic(topic))])
    found = list(itertools.islice(reader, count))
    reader.close()
    assert len(found) == count
    return found


def test_alerts_are_keyed_by_record(kafka: SimpleNamespace, topic: Topic, open_sink: Any) -> None:
    name = topic(3, "alerts")
    sink = open_sink(name, None)
    sink.write(
        make_effects(
            [make_alert("pump-1"), make_alert("pumpe-ä")], [Rejection(0, RejectionReason.LATE, "no dead-letter topic")]
        ),
        None,
    )
    sink.flush()
    found = {r.key: r.value for r in read_records(kafka, name, 2)}
    assert found == {b"pump-1": b"id-pump-1:pump-1", "pumpe-ä".encode(): "id-pumpe-ä:pumpe-ä".encode()}


def test_drift_notice_is_sent_to_the_alerts_topic(kafka: SimpleNamespace, topic: Topic, open_sink: Any) -> None:
    name = topic(1, "alerts")
    sink = open_sink(name, None)
    sink.write(replace(make_effects([make_alert("pump-1")], []), drift_notices=[make_drift_notice(0)]), None)
    sink.flush()
    first, second = read_records(kafka, name, 2)
    assert (first.key, second.key) == (b"pump-1", b"r7")
    headers = [{key: value.decode() for key, value in record.headers} for record in (first, second)]
    assert [event["ce_type"] for event in headers] == ["io.deformer.alert.v1", "io.deformer.drift.v1"]
    assert [event["ce_id"] for event in headers] == ["id-pump-1", "id-of-it"]
    assert {event["content-type"] for event in headers} == {"application/json"}
    document = json.loads(second.value)
    assert (document["kind"], document["id"], document["partition"]) == ("drift", "id-of-it", 0)


def test_storm_notice_is_sent_to_the_alerts_topic(kafka: SimpleNamespace, topic: Topic, open_sink: Any) -> None:
    name = topic(1, "alerts")
    sink = open_sink(name, None)
    notice = StormNotice("storm-id", 0, 1_583_750_073_000_000, {0: 5, 2: 7}, ("pump-9", "pump-3"), 1000.0, "m")
    alerts = make_effects([make_alert("pump-1")], [])
    sink.write(replace(alerts, held_back_alerts=[make_alert("pump-9")], storm_notices=[notice]), None)
    sink.flush()
    first, second = read_records(kafka, name, 2)
    assert (first.key, second.key) == (b"pump-1", b"pump-9")
    headers = {key: value.decode() for key, value in second.headers}
    assert (headers["ce_type"], headers["ce_id"]) == ("io.deformer.storm.v1", "storm-id")
    document = json.loads(second.value)
    assert (document["kind"], document["held_back"], document["partitions"]) == ("storm", 12, {"0": 5, "2": 7})


def test_missing_topics_are_created(kafka: SimpleNamespace, topic: Topic, open_sink: Any) -> None:
    name = topic(1)
    open_sink(name + "-alerts", name + "-dead-letter", partitions=3)
    open_sink(name + "-alerts", name + "-dead-letter", partitions=5)  # existing topics are not changed
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    found = {t["name"]: len(t["partitions"]) for t in admin.describe_topics([name + "-alerts", name + "-dead-letter"])}
    admin.close()
    assert found == {name + "-alerts": 3, name + "-dead-letter": 3}


def make_poll(payloads: list[bytes | None], keys: list[bytes | None]) -> Messages:
    """Return messages as a poll of partition 2 would return them."""
    n = len(payloads)
    place = np.arange(n)
    return Messages("events", keys, payloads, place * 0, np.full(n, 2, np.int32), place + 1840)


def test_dead_letter_contains_the_message_and_the_reason(kafka: SimpleNamespace, topic: Topic, open_sink: Any) -> None:
    name = topic(1, "letters")
    sink = open_sink(None, name)
    data = make_poll([b"{", b"\xff\xfe", None, None], [b"k", None, b"k", None])
    details = ["Zeile 1: größer", "not UTF-8", "null", "nothing at all"]
    sink.write(make_effects([], [Rejection(i, RejectionReason.NOT_JSON, text) for i, text in enumerate(details)]), data)
    sink.flush()
    found = read_records(kafka, name, 4)
    # A message without key and value cannot be sent by the client; an empty value stands for it.
    assert [(r.key, r.value) for r in found] == [(b"k", b"{"), (None, b"\xff\xfe"), (b"k", None), (None, b"")]
    for i, record in enumerate(found):
        headers = {k: v.decode() for k, v in record.headers}
        place = {"topic": "events", "partition": "2", "offset": str(1840 + i), "timestamp": "0"}
        event = {"ce_specversion": "1.0", "ce_type": "io.deformer.dead-letter.v1", "ce_source": "/events/2"}
        event["ce_id"] = f"events/2/{1840 + i}/not_json"
        assert headers == {"reason": "not_json", "detail": details[i], **place, **event}


def test_dead_letter_that_is_too_large_is_sent_without_its_payload(
    kafka: SimpleNamespace, topic: Topic, open_sink: Any
) -> None:
    name = topic(1, "letters", **{"max.message.bytes": "2000"})
    sink = open_sink(None, name)
    data = make_poll([b"x" * 5000, b"small"], [b"big", b"small"])
    sink.write(make_effects([], [Rejection(i, RejectionReason.TOO_LARGE, "large") for i in range(2)]), data)
    sink.flush()
    found = {r.key: r for r in read_records(kafka, name, 2)}
    assert found[b"small"].value == b"small"
    assert found[b"big"].value == b""
    assert ("payload_bytes", b"5000") in found[b"big"].headers
    sink.flush()  # no message is left to send


def test_created_dead_letter_topic_accepts_the_largest_event(
    kafka: SimpleNamespace, topic: Topic, open_sink: Any
) -> None:
    events = topic(1)
    largest = b"x" * (2**20 - 200)  # with its key and headers, the largest message of a topic with default settings
    produce(kafka.cluster, events, [(b"k", largest, None)])
    sink = open_sink(None, events + "-dead-letter")
    sink.write(
        make_effects([], [Rejection(0, RejectionReason.TOO_LARGE, "large " * 100)]), make_poll([largest], [b"k"])
    )
    sink.flush()
    assert read_records(kafka, events + "-dead-letter", 1)[0].value == largest


def test_alert_that_is_too_large_is_an_error(kafka: SimpleNamespace, topic: Topic, open_sink: Any) -> None:
    name = topic(1, "alerts")
    sink = open_sink(name, None)
    with pytest.raises(ConfigError, match=r"too large for its topic: raise the topic's max.message.bytes"):
        sink.write(make_effects([make_alert("2000000")], []), None)
    sink.write(make_effects([make_alert("a")], []), None)
    sink.flush()
    assert [r.value for r in read_records(kafka, name, 1)] == [b"id-a:a"]
