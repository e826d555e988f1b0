"""Tests of revoked partitions, and of what the consumer reports about their offsets, with a cluster in memory."""

from __future__ import annotations

from structlog.testing import capture_logs

from connectors.kafka.ports import CommittedOffset, OutgoingMessage, TopicPartition
from connectors.kafka.source import KafkaSource
from deformer_stream.errors import Unavailable
from tests.connectors.fake_kafka import Clock, FakeConsumer, FakeKafka
from tests.connectors.kafka_helpers import open_plain_source

TPS = [TopicPartition("events", number) for number in range(2)]


def open_source(kafka: FakeKafka, num_messages: int = 5) -> tuple[KafkaSource, FakeConsumer]:
    """Return a source that has read two partitions with messages and not committed them, and its consumer."""
    kafka.num_partitions = {"events": len(TPS)}
    for tp in TPS:
        kafka.messages[tp] += [OutgoingMessage(0, "events", b"k", b"1")] * num_messages
    source = open_plain_source(kafka.cluster, "events", "group")
    (consumer,) = kafka.consumers
    consumer.give(*TPS)
    for _ in range(3):  # restore, read, and record what was read as written
        source.poll(0.0)
    return source, consumer


def test_partition_that_is_given_back_within_one_poll_is_restored(fake_kafka: FakeKafka, clock: Clock) -> None:
    """The consumer reports the end of the commit of a revoked partition when it is assigned again already."""
    source, consumer = open_source(fake_kafka)
    offsets = source.on_revoked(frozenset(TPS[:1]))
    assert offsets == dict.fromkeys(TPS, CommittedOffset(5))
    source.on_assigned(frozenset(TPS[:1]))
    consumer.commit(offsets, 1.0)
    source.on_revoked_committed(None)
    polled = source.poll(0.0)
    assert polled.revoked_partitions == (0,)
    assert [restored.partition for restored in polled.restored_partitions] == [0]


def test_offsets_that_the_consumer_could_not_commit_are_committed_again(fake_kafka: FakeKafka, clock: Clock) -> None:
    """Without transactions, the consumer commits the offsets of a commit in progress with those of the revocation."""
    source, consumer = open_source(fake_kafka)
    source._prepare_commit({})
    assert source._commits.has_commit
    offsets = source.on_revoked(frozenset(TPS[:1]))
    assert offsets == dict.fromkeys(TPS, CommittedOffset(5))
    consumer.take(TPS[0])
    source.on_revoked_committed(Unavailable("no response"))
    assert fake_kafka.committed == {}
    source.commit()
    assert fake_kafka.committed == {TPS[1]: CommittedOffset(5)}


def test_partitions_of_another_topic_are_neither_read_nor_committed(fake_kafka: FakeKafka, clock: Clock) -> None:
    """Kafka assigns the partitions of the previous topic to a process that restarts under its name with another one."""
    source, consumer = open_source(fake_kafka)
    source.leave_out(frozenset([2]))
    others = [TopicPartition("earlier-events", number) for number in range(3)]
    with capture_logs() as logs:
        consumer.give(*others)
    assert [entry["others"] for entry in logs if entry["event"] == "partitions_of_another_topic"] == [
        ["earlier-events-0", "earlier-events-1", "earlier-events-2"]
    ]
    polled = source.poll(0.0)
    assert polled.restored_partitions == ()
    assert source.assigned_partitions == {0, 1}
    source.commit()
    assert fake_kafka.committed == dict.fromkeys(TPS, CommittedOffset(5))
    assert source.on_revoked(frozenset(others[:2])) == {}
    source.on_revoked_committed(None)
    source.on_lost(frozenset(others[2:]))
    consumer.take(*others)
    assert source.poll(0.0).revoked_partitions == (), "the partitions of the same numbers are still owned"
