"""Tests of broker outages and of partitions that deliver nothing: the consumer retries, and then reports the reason."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from connectors.kafka import KafkaCluster, ensure_topics, produce
from connectors.kafka.client import load_client
from connectors.kafka.liveness import LivenessCheck
from connectors.kafka.ports import Consumer, ConsumerOptions, TopicPartition
from deformer_stream.errors import Unavailable
from tests.conftest import start_broker
from tests.connectors.kafka_groups import MODES, Group, poll_in_background
from tests.connectors.kafka_helpers import Topic, make_messages, wait_until

# The client leaves the sockets with which it could not connect to the garbage collector.
pytestmark = [pytest.mark.kafka, pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")]

PATIENCE_SECONDS = 0.3


@pytest.fixture(autouse=True)
def check_with_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the liveness check request end offsets with every call."""
    monkeypatch.setattr("connectors.kafka.liveness.PROBE_SECONDS", 0.0)
    monkeypatch.setattr("connectors.kafka.liveness.RESPONSE_SECONDS", 1.0)


# --- a partition that delivers nothing --------------------------------------------------------------------------------


@pytest.fixture
def consumer(kafka: SimpleNamespace) -> Iterator[Consumer]:
    consumer = load_client(kafka.cluster).open_consumer(kafka.cluster, ConsumerOptions())
    yield consumer
    consumer.close()


def assign_at(consumer: Consumer, tp: TopicPartition, position: int) -> None:
    """Assign a partition to a consumer at an offset."""
    consumer.assign({tp: position})


def test_partition_that_delivers_nothing_is_reported(kafka: SimpleNamespace, topic: Topic, consumer: Consumer) -> None:
    """The partition has messages, but the test does not poll."""
    tp = TopicPartition(topic(1), 0)
    produce(kafka.cluster, tp.topic, make_messages(3))
    assign_at(consumer, tp, 1)
    check = LivenessCheck(consumer, kafka.cluster, tp.topic, PATIENCE_SECONDS)
    check.check_progress([tp])
    time.sleep(PATIENCE_SECONDS)
    with pytest.raises(
        Unavailable, match=r"partition 0 delivers nothing from offset 1 on, although its end offset is 3"
    ) as caught:
        wait_until(lambda: check.check_progress([tp]) is None and time.sleep(0.05) is not None, "an error")
    assert tp.topic in str(caught.value)
    assign_at(consumer, tp, 2)
    check.check_progress([tp])  # the position has changed


def test_partition_without_messages_is_not_reported(kafka: SimpleNamespace, topic: Topic, consumer: Consumer) -> None:
    """The first message after a long pause does not count as delayed."""
    tp = TopicPartition(topic(1), 0)
    produce(kafka.cluster, tp.topic, make_messages(3))
    assign_at(consumer, tp, 3)
    check = LivenessCheck(consumer, kafka.cluster, tp.topic, 1.0)
    for _ in range(6):
        check.check_progress([tp])
        time.sleep(0.25)
    produce(kafka.cluster, tp.topic, make_messages(1))
    check.check_progress([tp])


def test_messages_of_a_pause_of_the_process_are_not_reported(
    kafka: SimpleNamespace, topic: Topic, consumer: Consumer
) -> None:
    """The process was suspended for longer than its patience, and messages have arrived meanwhile."""
    tp = TopicPartition(topic(1), 0)
    produce(kafka.cluster, tp.topic, make_messages(3))
    assign_at(consumer, tp, 3)
    check = LivenessCheck(consumer, kafka.cluster, tp.topic, PATIENCE_SECONDS)
    check.check_progress([tp])
    check.check_progress([tp])
    time.sleep(2 * PATIENCE_SECONDS)
    produce(kafka.cluster, tp.topic, make_messages(1))
    check.check_progress([tp])


def test_partition_that_was_assigned_elsewhere_is_not_reported(
    kafka: SimpleNamespace, topic: Topic, consumer: Consumer
) -> None:
    """The partition is assigned again at the offset at which it was revoked."""
    tp, other = TopicPartition(topic(1), 0), TopicPartition(topic(1), 0)
    produce(kafka.cluster, tp.topic, make_messages(3))
    check = LivenessCheck(consumer, kafka.cluster, tp.topic, 1.0)
    assign_at(consumer, tp, 1)
    check.check_progress([tp])
    check.check_progress([tp])
    assign_at(consumer, other, 0)
    check.check_progress([other])
    time.sleep(1.1)
    assign_at(consumer, tp, 1)
    check.check_progress([tp])


# --- a broker that is away --------------------------------------------------------------------------------------------


@pytest.fixture
def own_broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start a broker that the test stops and starts.

    After the test, all clients must have ended. The client's log is not passed to pytest, which would keep references
    to sockets.
    """
    monkeypatch.setattr(logging.getLogger("kafka"), "propagate", False)
    threads = threading.active_count()
    with start_broker() as broker:
        yield broker

    def ended() -> bool:
        gc.collect()
        time.sleep(0.1)
        return threading.active_count() <= threads

    wait_until(ended, "the end of all clients")
    gc.collect()


@pytest.fixture
def worlds(own_broker: Any) -> Iterator[list[Group]]:
    """Return a group with events for each mode of delivery, and one more."""
    modes = [*MODES, MODES[0]]
    ensure_topics(KafkaCluster(own_broker.bootstrap), {f"events-{i}": {"num_partitions": 2} for i in range(3)})
    groups = [Group(own_broker.bootstrap, f"events-{i}", 2, mode) for i, mode in enumerate(modes)]
    for group in groups:
        group.produce(40)
    yield groups
    for group in groups:
        group.close()


def test_broker_outage(own_broker: Any, worlds: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers with enough patience continue when the broker is back. Others end with the reason.

    When the broker stops, there are handled messages that are not committed, and a rebalance is about to begin.
    """
    monkeypatch.setattr("connectors.kafka.client.DELIVERY_SECONDS", 3.0)
    monkeypatch.setattr("connectors.kafka.client.REQUEST_SECONDS", 2.0)
    *worlds, other = worlds
    patient = [world.add_member(patience=60.0, max_poll_records=20) for world in worlds]
    for member in patient:
        member.read(20)
        member.commit()
        member.read(40)
    impatient = [other.add_member(patience=1.0) for _ in range(3)]  # one of them has no partition
    with (
        poll_in_background(impatient[0].poll),
        poll_in_background(impatient[1].poll),
    ):
        wait_until(
            lambda: bool(impatient[2].poll()) and sorted(len(m.caught_up) for m in impatient) == [0, 1, 1],
            "0 + 1 + 1",
        )
    busy = next(member for member in impatient if member.caught_up)
    newcomers = [world.add_member(patience=60.0) for world in worlds]
    own_broker.kill(1)
    with ThreadPoolExecutor() as pool, capture_logs() as lines:
        commits = [pool.submit(member.commit) for member in patient]
        waiting = [pool.submit(newcomer.poll, 8.0) for newcomer in newcomers]
        for member in impatient:
            with pytest.raises(
                Unavailable, match=f"Kafka at {own_broker.bootstrap} has not responded for \\d+ s: check the brokers"
            ):
                wait_until(lambda member=member: bool(member.poll()) and False, "an end")
        with pytest.raises(Unavailable, match=f"Kafka at {own_broker.bootstrap}"):
            busy.commit(snapshots=range(2))
        assert [commit.exception() for commit in commits if commit.done()] == [], "the commits wait"
        own_broker.start_node(1)
        for future in (*commits, *waiting):
            future.result()
    assert any(line["event"] == "commit_failed_retrying" for line in lines)
    for world, first, second in zip(worlds, patient, newcomers, strict=True):
        with poll_in_background(second.poll):
            wait_until(lambda a=first, b=second: bool(a.poll()) and len(a.caught_up) == len(b.caught_up) == 1, "1 + 1")
            world.produce(40)
            wait_until(lambda w=world, a=first, b=second: bool(a.poll()) and w.has_consumed_all(a, b), "all messages")
        world.check_effects(first, second)
