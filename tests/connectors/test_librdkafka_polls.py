"""Tests of polls of librdkafka that fail after messages were taken from its queue, with a client in memory."""

from __future__ import annotations

from collections.abc import Callable

import confluent_kafka as rd
import pytest
from confluent_kafka import KafkaError, KafkaException

from connectors.kafka.librdkafka_client import LibrdkafkaConsumer
from connectors.kafka.librdkafka_connection import ClientEvents, connect
from connectors.kafka.ports import ConsumerOptions, KafkaCluster, OffsetOutOfRange, TopicPartition
from deformer_stream.errors import Unavailable

TP, OTHER = TopicPartition("events", 0), TopicPartition("events", 1)


class FakeClient:
    """A consumer of confluent-kafka with a queue.

    Attributes:
        queue: The messages and events that the next calls return.
        after_consume: A function that `consume` calls after it has taken messages. It may raise an error.
        num_messages: The number of messages that each partition holds.
        can_seek: Whether `seek` succeeds.
    """

    def __init__(self) -> None:
        self.queue: list[rd.Message] = []
        self.after_consume: Callable[[], None] = lambda: None
        self.num_messages = 6
        self.can_seek = True

    def assign(self, partitions: list[rd.TopicPartition]) -> None:
        for partition in partitions:
            self.seek(partition)

    def seek(self, partition: rd.TopicPartition) -> None:
        if not self.can_seek:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        number = partition.partition
        self.queue = [message for message in self.queue if message.partition() != number]
        self.queue += [make_message(number, offset) for offset in range(partition.offset, self.num_messages)]
        self.queue.append(make_event(KafkaError._PARTITION_EOF, number, self.num_messages))

    def resume(self, partitions: list[rd.TopicPartition]) -> None: ...

    def pause(self, partitions: list[rd.TopicPartition]) -> None: ...

    def poll(self, timeout: float) -> rd.Message | None:
        return self.queue.pop(0) if self.queue else None

    def consume(self, num_messages: int, timeout: float) -> list[rd.Message]:
        taken, self.queue = self.queue[:num_messages], self.queue[num_messages:]
        self.after_consume()
        return taken


def make_message(partition: int, offset: int) -> rd.Message:
    """Return a message whose value is its offset."""
    return rd.Message("events", partition, offset, b"k", b"%d" % offset)


def make_event(code: int, partition: int, offset: int) -> rd.Message:
    """Return an event about a partition."""
    return rd.Message("events", partition, offset, error=KafkaError(code))


def raise_once(client: FakeClient) -> None:
    """Let the next call of `consume` raise an error."""

    def fail() -> None:
        client.after_consume = lambda: None
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    client.after_consume = fail


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    """Return the client that a consumer uses."""
    client = FakeClient()
    events = ClientEvents(KafkaCluster("fake:1", library="librdkafka"))
    monkeypatch.setattr("connectors.kafka.librdkafka_client.connect", lambda *_: (client, events))
    return client


def open_consumer(max_messages: int = 4) -> LibrdkafkaConsumer:
    """Return a consumer of two partitions."""
    consumer = LibrdkafkaConsumer(KafkaCluster("fake:1"), ConsumerOptions(max_messages=max_messages))
    consumer.assign({TP: 0, OTHER: 0})
    return consumer


def poll_offsets(consumer: LibrdkafkaConsumer, tp: TopicPartition = TP) -> list[int]:
    """Poll once, and return the offsets of a partition's messages."""
    columns = consumer.poll(0.0)
    return [] if columns is None else columns.offsets[columns.partitions == tp.partition].tolist()


def test_messages_before_an_error_are_read_again(client: FakeClient) -> None:
    consumer = open_consumer()
    assert poll_offsets(consumer) == [0, 1, 2, 3]
    raise_once(client)
    with pytest.raises(Unavailable):
        consumer.poll(0.0)
    assert consumer.get_position(TP) == 4
    client.can_seek = False
    assert poll_offsets(consumer) == []
    client.can_seek = True
    assert [offset for _ in range(9) for offset in poll_offsets(consumer)] == [4, 5]
    assert consumer.get_position(TP) == 6


def test_partition_that_is_started_after_an_error_is_not_read_again(client: FakeClient) -> None:
    consumer = open_consumer()
    raise_once(client)
    with pytest.raises(Unavailable):
        consumer.poll(0.0)
    consumer.stop([OTHER])
    consumer.start(TP, 5)
    assert poll_offsets(consumer) == []  # those of the other one that are still in the queue of this client
    assert poll_offsets(consumer) == [5]


def test_messages_before_what_cannot_be_read_are_returned_once(client: FakeClient) -> None:
    consumer = open_consumer(max_messages=100)
    client.queue[2] = make_event(KafkaError._BAD_MSG, 0, 2)
    assert poll_offsets(consumer) == [0, 1]
    assert consumer.get_position(TP) == 2, "what comes after it must not be committed"
    with pytest.raises(Unavailable, match="partition 0, offset 2"):
        consumer.poll(0.0)
    assert poll_offsets(consumer) == [2, 3, 4, 5]  # it can be read now


@pytest.mark.parametrize(
    ("code", "error"), [(KafkaError._AUTO_OFFSET_RESET, OffsetOutOfRange), (KafkaError._BAD_MSG, Unavailable)]
)
def test_errors_are_raised_although_other_partitions_have_messages(
    client: FakeClient, code: int, error: type[Unavailable]
) -> None:
    consumer = open_consumer(max_messages=2)
    client.queue.insert(1, make_event(code, 0, 9))
    client.queue += [make_message(1, offset) for offset in range(100)]
    assert poll_offsets(consumer) == [0]
    with pytest.raises(error):
        consumer.poll(0.0)


def test_an_error_that_no_option_explains_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.kafka.client.check_reachable", lambda cluster: None)

    def fail(*_: object, **__: object) -> rd.Consumer:
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        connect(fail, KafkaCluster("fake:1"), {})
