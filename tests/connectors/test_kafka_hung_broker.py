"""Tests of a broker that hangs or is down: a poll returns nothing, as if there were no messages."""

from __future__ import annotations

import gc
import logging
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from connectors.kafka import (
    KafkaIncidentLog,
    KafkaNextReadingLog,
    describe_incident_topics,
    describe_next_reading_topic,
    ensure_topics,
    produce,
)
from connectors.kafka.client import load_client
from connectors.kafka.ports import Consumer, ConsumerOptions, KafkaCluster, TopicPartition
from deformer_stream.codec.encode_incidents import encode_incident
from deformer_stream.errors import Unavailable
from tests.conftest import make_cluster, start_broker
from tests.connectors.kafka_helpers import wait_until
from tests.incidents.examples import make_incident

# The client leaves the sockets with which it could not connect to the garbage collector.
pytestmark = [
    pytest.mark.kafka,
    pytest.mark.usefixtures("client_library"),
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]

RESPONSE_SECONDS = 2.0
SECONDS = 60.0


@pytest.fixture(scope="module")
def own_broker() -> Iterator[Any]:
    """Start a broker that the tests suspend."""
    with start_broker() as broker:
        yield broker
    gc.collect()


@pytest.fixture
def cluster(own_broker: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[KafkaCluster]:
    """Return the settings of the connection to the broker, which continues at the end of the test."""
    monkeypatch.setattr(logging.getLogger("kafka"), "propagate", False)
    yield make_cluster(own_broker.bootstrap)
    own_broker.resume(1)


def test_a_log_that_cannot_be_read_is_told_from_one_without_messages(own_broker: Any, cluster: KafkaCluster) -> None:
    name = f"i-{uuid.uuid4().hex[:8]}"
    ensure_topics(cluster, describe_incident_topics(name, f"{name}-feedback"))
    incidents = [make_incident(number) for number in range(3)]

    def send(number: int) -> None:
        incident = incidents[number]
        produce(cluster, name, [(incident.id.encode(), encode_incident(incident), None)])

    send(0)
    log = KafkaIncidentLog(cluster, name)
    assert not log.has_read_to_end(SECONDS)
    found = []
    wait_until(lambda: bool(found.extend(log.poll(0.1)) or found), "the first incident")
    wait_until(lambda: bool(log.poll(0.1)) or log.has_read_to_end(SECONDS), "the end of the log")
    send(1)
    assert not log.has_read_to_end(SECONDS), "the second incident was not polled"
    wait_until(lambda: bool(found.extend(log.poll(0.1)) or len(found) == 2), "the second incident")
    own_broker.suspend(1)
    assert log.poll(0.1) == []
    with pytest.raises(Unavailable, match="did not respond in time"):
        log.has_read_to_end(RESPONSE_SECONDS)
    own_broker.resume(1)
    send(2)
    wait_until(lambda: bool(found.extend(log.poll(0.1)) or len(found) == 3), "the third incident")
    wait_until(lambda: bool(log.poll(0.1)) or log.has_read_to_end(SECONDS), "the end of the log")
    log.close()
    assert found == incidents


def test_offsets_of_a_broker_that_hangs_are_unavailable(own_broker: Any, cluster: KafkaCluster) -> None:
    name = f"e-{uuid.uuid4().hex[:8]}"
    ensure_topics(cluster, {name: {"num_partitions": 1}})
    consumer = load_client(cluster).open_consumer(cluster, ConsumerOptions())
    tp = TopicPartition(name, 0)
    assert consumer.fetch_end_offsets([tp], SECONDS) == consumer.fetch_first_offsets([tp], SECONDS) == {tp: 0}
    own_broker.suspend(1)
    for fetch in (consumer.fetch_end_offsets, consumer.fetch_first_offsets):
        with pytest.raises(Unavailable, match="did not respond in time"):
            fetch([tp], RESPONSE_SECONDS)
    own_broker.resume(1)
    assert consumer.fetch_end_offsets([tp], SECONDS) == {tp: 0}
    consumer.close()


def test_a_topic_of_a_broker_that_is_down_does_not_count_as_missing(own_broker: Any, cluster: KafkaCluster) -> None:
    name = f"e-{uuid.uuid4().hex[:8]}"
    ensure_topics(cluster, {name: {"num_partitions": 1}})
    consumer = load_client(cluster).open_consumer(cluster, ConsumerOptions())
    tp = TopicPartition(name, 0)
    assert consumer.fetch_end_offsets([tp], SECONDS) == {tp: 0}
    own_broker.kill(1)
    for _ in range(2):
        with pytest.raises(Unavailable) as caught:
            consumer.fetch_end_offsets([tp], RESPONSE_SECONDS)
        assert "does not exist" not in str(caught.value)
    own_broker.start_node(1)
    wait_until(lambda: find_end(consumer, tp) == 0, "the end offset")
    with pytest.raises(Unavailable):
        consumer.fetch_end_offsets([TopicPartition("no-such-topic", 0)], RESPONSE_SECONDS)
    consumer.close()


def find_end(consumer: Consumer, tp: TopicPartition) -> int | None:
    """Return the end offset of a partition, None if no broker has answered."""
    try:
        return consumer.fetch_end_offsets([tp], RESPONSE_SECONDS)[tp]
    except Unavailable:
        return None


def test_a_missing_topic_is_told_from_a_broker_that_hangs(
    own_broker: Any, cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.kafka.client.CONNECT_SECONDS", RESPONSE_SECONDS)
    name = f"n-{uuid.uuid4().hex[:8]}"
    log = KafkaNextReadingLog(cluster, name)
    assert log.has_read_to_end(SECONDS)
    own_broker.suspend(1)
    with pytest.raises(Unavailable):
        log.has_read_to_end(RESPONSE_SECONDS)
    own_broker.resume(1)
    ensure_topics(cluster, describe_next_reading_topic(name))
    assert log.has_read_to_end(SECONDS)
    log.close()
