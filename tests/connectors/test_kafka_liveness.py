"""A broker that is away, or a partition that delivers nothing: the consumer waits for a while, and says so."""

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
from kafka import KafkaConsumer, TopicPartition
from structlog.testing import capture_logs

from connectors.kafka import ensure_topics, produce
from connectors.kafka.liveness import LivenessCheck
from deformer_stream.errors import Unavailable
from tests.conftest import start_broker
from tests.connectors.kafka_members import MODES, Group, following
from tests.connectors.kafka_world import Topic, numbered, until

# The client leaves the sockets with which it could not connect to the garbage collector.
pytestmark = [pytest.mark.kafka, pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")]

SOON = 0.3


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch asks with every call."""
    monkeypatch.setattr("connectors.kafka.liveness.PROBE_SECONDS", 0.0)
    monkeypatch.setattr("connectors.kafka.liveness.ANSWER_SECONDS", 1.0)


# --- a partition that delivers nothing --------------------------------------------------------------------------------


@pytest.fixture
def consumer(kafka: SimpleNamespace) -> Iterator[KafkaConsumer]:
    consumer = KafkaConsumer(bootstrap_servers=kafka.bootstrap, enable_auto_commit=False)
    yield consumer
    consumer.close()


def place(consumer: KafkaConsumer, tp: TopicPartition, position: int) -> None:
    consumer.assign([tp])
    consumer.seek(tp, position)


def test_a_partition_that_delivers_nothing(kafka: SimpleNamespace, topic: Topic, consumer: KafkaConsumer) -> None:
    """Though it has messages: here because nobody polls."""
    tp = TopicPartition(topic(1), 0)
    produce(kafka.bootstrap, tp.topic, numbered(3))
    place(consumer, tp, 1)
    watch = LivenessCheck(consumer, kafka.bootstrap, tp.topic, SOON)
    watch.check_progress()
    time.sleep(SOON)
    with pytest.raises(
        Unavailable, match=r"partition 0 delivers nothing from offset 1 on, although it ends at 3"
    ) as caught:
        until(lambda: watch.check_progress() is None and time.sleep(0.05) is not None, "a complaint")
    assert tp.topic in str(caught.value)
    place(consumer, tp, 2)
    watch.check_progress()  # it has moved


def test_a_silent_partition_may_be_silent(kafka: SimpleNamespace, topic: Topic, consumer: KafkaConsumer) -> None:
    """The first message after a long silence is not late at once."""
    tp = TopicPartition(topic(1), 0)
    produce(kafka.bootstrap, tp.topic, numbered(3))
    place(consumer, tp, 3)
    watch = LivenessCheck(consumer, kafka.bootstrap, tp.topic, 1.0)
    for _ in range(6):
        watch.check_progress()
        time.sleep(0.25)
    produce(kafka.bootstrap, tp.topic, numbered(1))
    watch.check_progress()


def test_a_partition_that_was_elsewhere_is_not_late(
    kafka: SimpleNamespace, topic: Topic, consumer: KafkaConsumer
) -> None:
    """It comes back at the position where it was when it left."""
    tp, other = TopicPartition(topic(1), 0), TopicPartition(topic(1), 0)
    produce(kafka.bootstrap, tp.topic, numbered(3))
    watch = LivenessCheck(consumer, kafka.bootstrap, tp.topic, 1.0)
    place(consumer, tp, 1)
    watch.check_progress()
    watch.check_progress()
    place(consumer, other, 0)
    watch.check_progress()
    time.sleep(1.1)
    place(consumer, tp, 1)
    watch.check_progress()


# --- a broker that is away --------------------------------------------------------------------------------------------


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A broker of our own, to be stopped and started. Afterwards nothing is left of clients that could not connect;
    what pytest keeps of the client's log would hold their sockets."""
    monkeypatch.setattr(logging.getLogger("kafka"), "propagate", False)
    threads = threading.active_count()
    with start_broker() as broker:
        yield broker

    def ended() -> bool:
        gc.collect()
        time.sleep(0.1)
        return threading.active_count() <= threads

    until(ended, "the end of all clients")
    gc.collect()


@pytest.fixture
def worlds(own: Any) -> Iterator[list[Group]]:
    """A group for each mode, with events, and one more."""
    modes = [*MODES, MODES[0]]
    ensure_topics(own.bootstrap, {f"events-{i}": {"num_partitions": 2} for i in range(3)})
    groups = [Group(own.bootstrap, f"events-{i}", 2, mode) for i, mode in enumerate(modes)]
    for group in groups:
        group.produce(40)
    yield groups
    for group in groups:
        group.close()


def test_a_broker_that_is_away(own: Any, worlds: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has patience goes on when it comes back, though messages were handled and not committed when it went, and a
    partition was about to move; who has none ends with the reason."""
    for module in ("client", "delivery", "source", "start_point"):
        monkeypatch.setattr(f"connectors.kafka.{module}.DELIVERY_SECONDS", 3.0)
    monkeypatch.setattr("connectors.kafka.delivery.FLUSH_SECONDS", 2.0)
    *worlds, other = worlds
    patient = [world.join(patience=60.0, max_poll_records=20) for world in worlds]
    for member in patient:
        member.read(20)
        member.commit()
        member.read(40)
    impatient = [other.join(patience=1.0) for _ in range(3)]  # one of them has no partition
    with following(impatient[0].turn), following(impatient[1].turn):  # they join together, as processes do
        until(
            lambda: bool(impatient[2].turn()) and sorted(len(m.live) for m in impatient) == [0, 1, 1],
            "0 + 1 + 1",
        )
    busy = next(member for member in impatient if member.live)
    newcomers = [world.join(patience=60.0) for world in worlds]
    own.kill(1)
    with ThreadPoolExecutor() as pool, capture_logs() as lines:
        commits = [pool.submit(member.commit) for member in patient]
        waiting = [pool.submit(newcomer.turn, 8.0) for newcomer in newcomers]
        for member in impatient:
            with pytest.raises(
                Unavailable, match=f"Kafka at {own.bootstrap} has not responded for \\d+ s: check the brokers"
            ):
                until(lambda member=member: bool(member.turn()) and False, "an end")
        with pytest.raises(Unavailable, match=f"Kafka at {own.bootstrap}"):
            busy.commit(snapshots=range(2))
        assert [commit.exception() for commit in commits if commit.done()] == [], "they wait"
        own.start_node(1)
        for future in (*commits, *waiting):
            future.result()
    assert any(line["event"] == "commit_failed_retrying" for line in lines)
    for world, first, second in zip(worlds, patient, newcomers, strict=True):
        with following(second.turn):
            until(lambda a=first, b=second: bool(a.turn()) and len(a.live) == len(b.live) == 1, "1 + 1")
            world.produce(40)
            until(lambda w=world, a=first, b=second: bool(a.turn()) and w.consumed(a, b), "all messages")
        world.check(first, second)
