"""Helpers that the tests of the Kafka connector share: messages, sinks, and functions that look at topics from
outside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition

from connectors.kafka import (
    Delivery,
    KafkaCluster,
    KafkaSink,
    KafkaSource,
    StateTopic,
    count_partitions,
    describe_output_topics,
    ensure_topics,
)
from connectors.kafka.client import load_client
from connectors.kafka.ports import ConsumerOptions, ReceivedMessage
from connectors.kafka.state import RESERVED_BYTES
from deformer_stream.codec.output_formats import OutputReader
from deformer_stream.codec.payloads import Payload
from deformer_stream.engine.events import Alert, ClosedRecords, Effects, EventBatch, Rejection, ScoredReadings
from deformer_stream.errors import Unavailable
from tests.integration import programs

TIMEOUT_SECONDS = 30.0
FIRST_TIMESTAMP_MS = time.time_ns() // 1_000_000
"""Timestamp of the first message of `make_messages`. It is the present time, because a topic deletes messages that
are older than a week by their own timestamps.
"""

Topic = Callable[..., str]


class FakeAlertEncoder:
    """An encoder that returns a value of N bytes if the alert's record is the number N, otherwise the alert's id and
    record.
    """

    def encode_alert(self, alert: Alert, data: Payload | None) -> bytes:
        """Return the encoded alert."""
        return b"x" * int(alert.record) if alert.record.isdigit() else f"{alert.id}:{alert.record}".encode()


class FlushingSink(KafkaSink):
    """A sink without a source. Its `flush` sends what was written, as the source's commit would."""

    def flush(self) -> None:
        """Send all messages without committing offsets."""
        self._delivery.seal_pending()
        self._delivery.send([])
        self._delivery.mark_committed()


class NoDelivery(Delivery):
    """A delivery without a producer, for a source whose commits consist of offsets only."""

    def __init__(self, cluster: KafkaCluster) -> None:
        super().__init__(cluster, {})

    def _open_producer(self) -> None:
        """Do nothing: nothing is sent."""


class NoState(StateTopic):
    """A state topic in which no state is saved. It has the name of the topic that is consumed, so that it exists."""

    def __init__(self, cluster: KafkaCluster, topic: str) -> None:
        super().__init__(cluster, topic, 2 * RESERVED_BYTES)

    def find_written_partitions(self, partitions: Collection[int], on_wait: Callable[[], None]) -> set[int]:
        """Return no partitions."""
        return set()


def open_plain_source(cluster: KafkaCluster, topic: str, group: str, **options: Any) -> KafkaSource:
    """Return a source that commits offsets only: it sends no messages and saves no state."""
    return KafkaSource(cluster, topic, group, delivery=NoDelivery(cluster), state=NoState(cluster, topic), **options)


def make_sink(
    cluster: KafkaCluster, alerts: str | None, letters: str | None, encoder: Any, partitions: int = 1
) -> FlushingSink:
    """Return a sink, after creating its topics as `consume` does.

    Args:
        cluster: The broker.
        alerts: The topic of alerts, or None.
        letters: The topic of dead letters, or None.
        encoder: The encoder of alerts.
        partitions: Number of partitions of the topics.
    """
    specs = describe_output_topics(alerts or "no alerts", letters or "no letters", "no state", partitions)
    topics = {name: specs[name] for name in (alerts, letters) if name is not None}
    limits = ensure_topics(cluster, topics)
    return FlushingSink(alerts, letters, encoder, Delivery(cluster, limits))


def make_alert(record: str, message: int = 0) -> Alert:
    """Return an alert of a record; `message` is the index of the message that raised it."""
    return Alert("id-" + record, record, 1, 1, 8, 0, 0.001, 0.01, 9.0, -20.0, "model", message, ())


def make_effects(alerts: list[Alert], rejected: list[Rejection]) -> Effects:
    """Return effects that consist of alerts and rejections."""
    return Effects(EventBatch.empty(), ScoredReadings.empty(), alerts, rejected, ClosedRecords.concatenate([]))


def make_messages(count: int, keys: int = 10, first: int = 0) -> list[tuple[bytes, bytes, int | None]]:
    """Return numbered messages as triples of key, value and timestamp; the value is the number.

    Args:
        count: Number of messages.
        keys: Number of different keys, which are used in turn.
        first: The first number.
    """
    return [(b"key-%d" % (i % keys), b"%d" % i, FIRST_TIMESTAMP_MS + i) for i in range(first, first + count)]


wait_until = partial(programs.wait_until, patience=TIMEOUT_SECONDS, pause=0.01)


def read_committed_offsets(kafka: SimpleNamespace, topic: str, group: str = "g") -> dict[int, int]:
    """Return the committed offset of each partition of a topic, for a group that `open_reader` has created."""
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    offsets = admin.list_group_offsets([f"{group}-{topic}"])
    admin.close()
    return {tp.partition: o.offset for tp, o in offsets[f"{group}-{topic}"].items()}


@contextmanager
def open_admin(bootstrap: str) -> Iterator[KafkaAdminClient]:
    """Open an admin client and close it at the end of the block."""
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        yield admin
    finally:
        admin.close()


def read_topic(bootstrap: str, topic: str, isolation: str = "read_committed") -> list[Any]:
    """Return all messages of a topic.

    Args:
        bootstrap: The broker.
        topic: The topic.
        isolation: "read_committed" waits for the messages of transactions that are committed at the moment.
    """
    reader = KafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", isolation_level=isolation)
    partitions = [TopicPartition(topic, p) for p in sorted(reader.partitions_for_topic(topic))]
    reader.assign(partitions)
    ends = reader.end_offsets(partitions)
    found: list[Any] = []

    def reached() -> bool:
        for records in reader.poll(timeout_ms=100).values():
            found.extend(records)
        return all(reader.position(tp) >= ends[tp] for tp in partitions)

    wait_until(reached, f"the end of {topic}")
    reader.close()
    return found


def wait_for_transactions(bootstrap: str, topic: str) -> None:
    """Wait until no transaction is open in a topic. Messages become visible shortly after their commit."""
    committed, all_ = (
        KafkaConsumer(bootstrap_servers=bootstrap, isolation_level=f"read_{level}")
        for level in ("committed", "uncommitted")
    )
    partitions = [TopicPartition(topic, p) for p in sorted(all_.partitions_for_topic(topic))]
    wait_until(lambda: committed.end_offsets(partitions) == all_.end_offsets(partitions), f"no transaction in {topic}")
    for reader in (committed, all_):
        reader.close()


def read_messages(cluster: KafkaCluster, topic: str) -> list[ReceivedMessage]:
    """Return all messages of a topic, read with the client library of the cluster."""
    consumer = load_client(cluster).open_consumer(cluster, ConsumerOptions())
    try:
        tps = [TopicPartition(topic, p) for p in range(count_partitions(cluster, topic))]
        ends = consumer.fetch_end_offsets(tps, TIMEOUT_SECONDS)
        consumer.assign(consumer.fetch_first_offsets(tps, TIMEOUT_SECONDS))
        messages: list[ReceivedMessage] = []

        def has_read_all() -> bool:
            messages.extend(consumer.poll_messages(0.1))
            return all((consumer.get_position(tp) or 0) >= end for tp, end in ends.items())

        wait_until(has_read_all, f"all messages of {topic}")
    finally:
        consumer.close()
    return sorted(messages, key=lambda message: (message.partition, message.offset))


class InterruptedReader(OutputReader):
    """A reader of values whose schema registry is away at the first and at the third call.

    Attributes:
        num_values: Number of values that were to be read so far.
    """

    num_values = 0

    def __call__(self, value: bytes) -> bytes:
        """Return the value."""
        self.num_values += 1
        if self.num_values in (1, 3):
            raise Unavailable("the schema registry does not respond")
        return super().__call__(value)
