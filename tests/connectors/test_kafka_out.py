"""Alerts, dead letters and produced events in Kafka, against a real broker."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition

from connectors.kafka import KafkaSink, ensure_topics, produce
from deformer_stream.codec import Codec
from deformer_stream.codec.payloads import Messages
from deformer_stream.codec.encode_events import Packing
from deformer_stream.engine.events import RejectionReason, Rejection
from deformer_stream.errors import ConfigError
from tests.codec.test_arrow_messages import SCHEMA
from tests.connectors.kafka_world import Bytes, Topic, alert, effects, numbered, sink_of
from tests.contracts.effects import make_drift_notice

pytestmark = pytest.mark.kafka


@pytest.fixture
def open_sink(kafka: SimpleNamespace) -> Iterator[Callable[..., KafkaSink]]:
    opened: list[KafkaSink] = []

    def make(alerts: str | None, letters: str | None, **options: Any) -> KafkaSink:
        opened.append(sink_of(kafka.bootstrap, alerts, letters, Bytes(), **options))
        return opened[-1]

    yield make
    for sink in opened:
        sink.close()


def records_of(kafka: SimpleNamespace, topic: str, count: int) -> list[Any]:
    """The first `count` messages of a topic with their headers, by partition."""
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
        effects([alert("pump-1"), alert("pumpe-ä")], [Rejection(0, RejectionReason.LATE, "no topic for these")]), None
    )
    sink.flush()
    found = {r.key: r.value for r in records_of(kafka, name, 2)}
    assert found == {b"pump-1": b"id-pump-1:pump-1", "pumpe-ä".encode(): "id-pumpe-ä:pumpe-ä".encode()}


def test_a_notice_of_drift_goes_among_the_alerts(kafka: SimpleNamespace, topic: Topic, open_sink: Any) -> None:
    name = topic(1, "alerts")
    sink = open_sink(name, None)
    sink.write(replace(effects([alert("pump-1")], []), drift_notices=[make_drift_notice(0)]), None)
    sink.flush()
    first, second = records_of(kafka, name, 2)
    assert (first.key, second.key) == (b"pump-1", b"r7")
    document = json.loads(second.value)
    assert (document["kind"], document["id"], document["partition"]) == ("drift", "id-of-it", 0)


def test_missing_topics_are_created(kafka: SimpleNamespace, topic: Topic, open_sink: Any) -> None:
    name = topic(1)
    open_sink(name + "-alerts", name + "-dead-letter", partitions=3)
    open_sink(name + "-alerts", name + "-dead-letter", partitions=5)  # there already: left as they are
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    found = {t["name"]: len(t["partitions"]) for t in admin.describe_topics([name + "-alerts", name + "-dead-letter"])}
    admin.close()
    assert found == {name + "-alerts": 3, name + "-dead-letter": 3}


def poll_of(payloads: list[bytes | None], keys: list[bytes | None]) -> Messages:
    n = len(payloads)
    place = np.arange(n)
    return Messages("events", keys, payloads, place * 0, np.full(n, 2, np.int32), place + 1840)


def test_dead_letters_are_unchanged_and_say_why(kafka: SimpleNamespace, topic: Topic, open_sink: Any) -> None:
    name = topic(1, "letters")
    sink = open_sink(None, name)
    data = poll_of([b"{", b"\xff\xfe", None, None], [b"k", None, b"k", None])
    details = ["Zeile 1: größer", "not UTF-8", "null", "nothing at all"]
    sink.write(effects([], [Rejection(i, RejectionReason.NOT_JSON, text) for i, text in enumerate(details)]), data)
    sink.flush()
    found = records_of(kafka, name, 4)
    # A message without key and value cannot be sent by the client; an empty value stands for it.
    assert [(r.key, r.value) for r in found] == [(b"k", b"{"), (None, b"\xff\xfe"), (b"k", None), (None, b"")]
    for i, record in enumerate(found):
        headers = {k: v.decode() for k, v in record.headers}
        place = {"topic": "events", "partition": "2", "offset": str(1840 + i)}
        assert headers == {"reason": "not_json", "detail": details[i], **place}


def test_too_large_a_dead_letter_goes_without_its_payload(kafka: SimpleNamespace, topic: Topic, open_sink: Any) -> None:
    name = topic(1, "letters", **{"max.message.bytes": "2000"})
    sink = open_sink(None, name)
    data = poll_of([b"x" * 5000, b"small"], [b"big", b"small"])
    sink.write(effects([], [Rejection(i, RejectionReason.TOO_LARGE, "large") for i in range(2)]), data)
    sink.flush()
    found = {r.key: r for r in records_of(kafka, name, 2)}
    assert found[b"small"].value == b"small"
    assert found[b"big"].value == b""
    assert ("payload_bytes", b"5000") in found[b"big"].headers
    sink.flush()  # nothing is left over


def test_our_dead_letter_topics_take_the_largest_event(kafka: SimpleNamespace, topic: Topic, open_sink: Any) -> None:
    events = topic(1)
    largest = b"x" * (2**20 - 200)  # with its key and framing just what a topic takes by default
    produce(kafka.bootstrap, events, [(b"k", largest, None)])
    sink = open_sink(None, events + "-dead-letter")
    sink.write(effects([], [Rejection(0, RejectionReason.TOO_LARGE, "large " * 100)]), poll_of([largest], [b"k"]))
    sink.flush()
    assert records_of(kafka, events + "-dead-letter", 1)[0].value == largest


def test_an_alert_that_is_too_large_is_an_error_and_no_harm(
    kafka: SimpleNamespace, topic: Topic, open_sink: Any
) -> None:
    name = topic(1, "alerts")
    sink = open_sink(name, None)
    with pytest.raises(ConfigError, match=r"too large for its topic: raise the topic's max.message.bytes"):
        sink.write(effects([alert("2000000")], []), None)
    sink.write(effects([alert("a")], []), None)
    sink.flush()
    assert [r.value for r in records_of(kafka, name, 1)] == [b"id-a:a"]


def test_produce_keeps_the_rate_and_reports(kafka: SimpleNamespace, topic: Topic) -> None:
    name = topic(1) + "-new"
    seen: list[int] = []
    began = time.monotonic()
    assert produce(kafka.bootstrap, name, numbered(100), rate=100, partitions=3, progress=seen.append) == 100
    assert 0.99 <= time.monotonic() - began < 20
    assert seen == sorted(seen)
    assert seen[-1] == 100
    assert len(seen) >= 5
    assert len(records_of(kafka, name, 100)) == 100


def test_produce_raises_when_a_message_is_refused(kafka: SimpleNamespace, topic: Topic) -> None:
    name = topic(1, "events", **{"max.message.bytes": "1000"})
    with pytest.raises(ConfigError, match="too large"):
        produce(kafka.bootstrap, name, [(b"k", b"x" * 5000, None)])


def test_produce_lets_errors_of_its_input_through(kafka: SimpleNamespace, topic: Topic) -> None:
    def broken() -> Iterator[tuple[bytes, bytes, None]]:
        yield b"k", b"v", None
        raise OSError("the disk is gone")

    name = topic(1)
    with pytest.raises(OSError, match="the disk is gone"):
        produce(kafka.bootstrap, name, broken())
    assert len(records_of(kafka, name, 1)) == 1


def test_topics_are_made_once_even_by_many(kafka: SimpleNamespace, topic: Topic) -> None:
    name = topic(1) + "-raced"
    failures: list[BaseException] = []

    def make() -> None:
        try:
            ensure_topics(kafka.bootstrap, {name: {"num_partitions": 2}})
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("packing", ["json-many", "arrow"])
def test_gathered_readings_stay_in_the_partition_of_their_record(
    kafka: SimpleNamespace, topic: Topic, packing: Packing
) -> None:
    apart, together = topic(3), topic(3)
    names = [f"r{i}" for i in range(40)]
    lines = [
        (name.encode(), b'{"record":"%b","feature":"%b","value":%d}' % (name.encode(), feature, i), None)
        for i, name in enumerate(names)
        for feature in (b"Pressure", b"Current")
    ]
    assert produce(kafka.bootstrap, apart, lines) == 80
    assert produce(kafka.bootstrap, together, lines, packing=packing) == 80
    where = {message.key.decode(): message.partition for message in records_of(kafka, apart, 80)}
    found = records_of(kafka, together, 40 if packing == "json-many" else len(set(where.values())))
    ints = np.zeros(len(found), np.int64)
    data = Messages("t", [m.key for m in found], [m.value for m in found], ints, ints.astype(np.int32), ints)
    batch, rejected = Codec(SCHEMA).decode(data)
    assert (len(batch), rejected) == (80, [])
    at = [found[message].partition for message in batch.message_indices.tolist()]
    assert dict(zip(batch.record_ids, at, strict=True)) == where
