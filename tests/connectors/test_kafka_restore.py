"""Tests of restores while single requests fail, with a cluster in memory."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from connectors.kafka.client import DELIVERY_SECONDS, REQUEST_SECONDS, RETRY_SECONDS
from connectors.kafka.membership import PARTITIONS_PER_STEP
from connectors.kafka.ports import CommittedOffset, TopicPartition
from connectors.kafka.source import STOP_SECONDS, KafkaSource
from connectors.kafka.state import MAX_VISIBILITY_SECONDS, StateTopic
from deformer_stream.errors import StateError, Unavailable
from deformer_stream.runtime.ports import PartitionState, SourceCallbacks
from tests.connectors.fake_kafka import Clock, FakeConsumer, FakeKafka
from tests.connectors.kafka_helpers import NoDelivery, open_plain_source

PATIENCE = 120.0
STATE_TOPIC = "events-state"


def save_state(kafka: FakeKafka, partition: int, snapshot: bytes = b"saved") -> None:
    """Write the state of a partition, and commit the offset 0 that refers to it."""
    state = StateTopic(kafka.cluster, STATE_TOPIC, 10_000)
    messages, reference = state.encode(partition, 0, PartitionState(snapshot=snapshot), None, "commit", "writer")
    kafka.messages[TopicPartition(STATE_TOPIC, partition)] += messages
    metadata = replace(reference, num_partitions=1).to_metadata()
    kafka.committed[TopicPartition("events", partition)] = CommittedOffset(0, metadata)


def open_source(kafka: FakeKafka, num_partitions: int, patience: float = PATIENCE) -> tuple[KafkaSource, FakeConsumer]:
    """Return a source to which all partitions are assigned, and its consumer."""
    kafka.num_partitions = {"events": num_partitions, STATE_TOPIC: num_partitions}
    state = StateTopic(kafka.cluster, STATE_TOPIC, 10_000)
    source = KafkaSource(
        kafka.cluster, "events", "group", delivery=NoDelivery(kafka.cluster), state=state, patience=patience
    )
    (consumer,) = kafka.consumers
    consumer.give(*(TopicPartition("events", number) for number in range(num_partitions)))
    return source, consumer


def poll_restored(source: KafkaSource) -> list[int]:
    """Poll once, and return the partitions that are restored."""
    return [restored.partition for restored in source.poll(0.0).restored_partitions]


def test_patience_of_a_restore_begins_with_its_first_failure(fake_kafka: FakeKafka, clock: Clock) -> None:
    """A restore may last for longer than the patience while it makes progress."""
    save_state(fake_kafka, 0)
    source, _ = open_source(fake_kafka, 1)
    tp = TopicPartition(STATE_TOPIC, 0)
    fake_kafka.hidden[tp] = 1
    for _ in range(10):
        assert poll_restored(source) == []
        clock.sleep(PATIENCE / 4)

    def fail(name: str, tps: set[TopicPartition]) -> None:
        if tp in tps:
            raise Unavailable("no response")

    answer = fake_kafka.before
    for _ in range(3):
        fake_kafka.before = fail
        assert poll_restored(source) == []
        clock.sleep(PATIENCE - 2 * RETRY_SECONDS)
        assert poll_restored(source) == []
        fake_kafka.before = answer
        assert poll_restored(source) == []
    fake_kafka.before = fail
    assert poll_restored(source) == []
    clock.sleep(PATIENCE)
    with pytest.raises(Unavailable, match="no response"):
        source.poll(0.0)


def test_a_process_that_is_to_end_does_not_retry_a_commit_for_its_patience(fake_kafka: FakeKafka, clock: Clock) -> None:
    """A supervisor would kill it. Nothing is lost: the next run handles the messages again."""
    fake_kafka.num_partitions = {"events": 1}
    source = open_plain_source(fake_kafka.cluster, "events", "group", patience=1000.0)
    stop = threading.Event()
    source.set_callbacks(SourceCallbacks(stop=stop))
    (consumer,) = fake_kafka.consumers
    consumer.give(TopicPartition("events", 0))
    assert poll_restored(source) == [0]

    def fail(name: str, tps: set[TopicPartition]) -> None:
        if name == "commit":
            clock.sleep(1.0)
            if clock.now > stopped_at:
                stop.set()
            raise Unavailable("no response")

    fake_kafka.before, stopped_at = fail, clock.now + 100.0
    with pytest.raises(Unavailable, match="no response"):
        source.commit()
    assert 0 < clock.now - stopped_at < DELIVERY_SECONDS + STOP_SECONDS + 10


def test_state_is_not_called_incomplete_after_an_outage(fake_kafka: FakeKafka, clock: Clock) -> None:
    """The marker of its transaction may be written only after the brokers have returned."""
    save_state(fake_kafka, 0)
    source, _ = open_source(fake_kafka, 1, patience=1000.0)
    tp = TopicPartition(STATE_TOPIC, 0)
    fake_kafka.hidden[tp] = 1
    assert poll_restored(source) == []

    def fail(name: str, tps: set[TopicPartition]) -> None:
        if tp in tps:
            raise Unavailable("no response")

    answer, fake_kafka.before = fake_kafka.before, fail
    for _ in range(10):
        assert poll_restored(source) == []
        clock.sleep(MAX_VISIBILITY_SECONDS / 5)
    fake_kafka.before = answer
    assert poll_restored(source) == []
    clock.sleep(2 * MAX_VISIBILITY_SECONDS)  # the process was suspended, or another call has taken that long
    assert poll_restored(source) == []
    for _ in range(8):
        clock.sleep(MAX_VISIBILITY_SECONDS / 10)
        assert poll_restored(source) == []
    del fake_kafka.hidden[tp]
    assert poll_restored(source) == [0]


def test_state_is_incomplete_if_it_stays_hidden_although_the_brokers_respond(
    fake_kafka: FakeKafka, clock: Clock
) -> None:
    save_state(fake_kafka, 0)
    source, _ = open_source(fake_kafka, 1)
    fake_kafka.hidden[TopicPartition(STATE_TOPIC, 0)] = 1
    deadline = clock.now + MAX_VISIBILITY_SECONDS

    def poll_until_incomplete() -> None:
        while True:
            assert poll_restored(source) == []
            clock.sleep(MAX_VISIBILITY_SECONDS / 10)

    with pytest.raises(StateError, match="saved state of partition 0 is incomplete"):
        poll_until_incomplete()
    assert deadline < clock.now < deadline + MAX_VISIBILITY_SECONDS / 5


def test_partition_whose_committed_offset_is_hidden_does_not_stop_the_restore_of_others(
    fake_kafka: FakeKafka, clock: Clock
) -> None:
    """Kafka returns no committed offsets of a partition while a transaction that changes them is open."""
    num_partitions = PARTITIONS_PER_STEP + 1
    for number in range(num_partitions):
        save_state(fake_kafka, number)
    source, _ = open_source(fake_kafka, num_partitions)
    last = TopicPartition("events", PARTITIONS_PER_STEP)

    def fail(name: str, tps: set[TopicPartition]) -> None:
        if name == "fetch_committed" and last in tps:
            raise Unavailable("no response")

    answer, fake_kafka.before = fake_kafka.before, fail
    assert poll_restored(source) == list(range(PARTITIONS_PER_STEP))
    fake_kafka.before = answer
    assert poll_restored(source) == [PARTITIONS_PER_STEP]


@pytest.mark.parametrize("seconds", [0.0, REQUEST_SECONDS])
def test_hidden_committed_offset_of_the_first_partition_does_not_stop_the_restore_of_later_ones(
    fake_kafka: FakeKafka, clock: Clock, seconds: float
) -> None:
    """Also if the request for it takes all time that a poll may spend on restoring partitions."""
    num_partitions = 3 * PARTITIONS_PER_STEP + 1
    for number in range(num_partitions):
        save_state(fake_kafka, number)
    source, _ = open_source(fake_kafka, num_partitions)
    first = TopicPartition("events", 0)

    def fail(name: str, tps: set[TopicPartition]) -> None:
        if name == "fetch_committed" and first in tps:
            clock.sleep(seconds)
            raise Unavailable("no response")

    answer, fake_kafka.before = fake_kafka.before, fail
    restored = [number for _ in range(6) for number in poll_restored(source)]
    assert sorted(restored) == list(range(PARTITIONS_PER_STEP, num_partitions))
    fake_kafka.before = answer
    assert poll_restored(source) == list(range(PARTITIONS_PER_STEP))


def test_partitions_that_cannot_begin_are_restored_by_a_later_poll(fake_kafka: FakeKafka, clock: Clock) -> None:
    for number in range(3):
        save_state(fake_kafka, number, b"state of %d" % number)
    source, _ = open_source(fake_kafka, 3)

    def fail(name: str, tps: set[TopicPartition]) -> None:
        if name == "start" and TopicPartition("events", 0) in tps:
            raise Unavailable("no response")

    answer, fake_kafka.before = fake_kafka.before, fail
    assert poll_restored(source) == [1, 2]
    assert poll_restored(source) == []
    fake_kafka.before = answer
    (restored,) = source.poll(0.0).restored_partitions
    assert (restored.partition, restored.snapshot) == (0, b"state of 0")
    assert all(consumer.is_closed for consumer in fake_kafka.consumers[1:])


def test_partition_is_begun_once_although_another_one_cannot_begin(fake_kafka: FakeKafka, clock: Clock) -> None:
    num_partitions = PARTITIONS_PER_STEP + 1
    source, _ = open_source(fake_kafka, num_partitions)
    failures = [Unavailable("no response")]

    def fail(name: str, tps: set[TopicPartition]) -> None:
        if name == "start" and TopicPartition("events", 5) in tps and failures:
            raise failures.pop()

    fake_kafka.before = fail
    assert poll_restored(source) == list(range(num_partitions))


def test_states_that_were_read_before_a_failed_request_are_returned(fake_kafka: FakeKafka, clock: Clock) -> None:
    for number in range(2):
        save_state(fake_kafka, number)
    source, _ = open_source(fake_kafka, 2)
    hidden = TopicPartition(STATE_TOPIC, 1)
    fake_kafka.hidden[hidden] = 1

    def fail(name: str, tps: set[TopicPartition]) -> None:
        if name == "fetch_end_offsets" and hidden in tps:
            raise Unavailable("no response")

    answer, fake_kafka.before = fake_kafka.before, fail
    assert poll_restored(source) == [0]
    fake_kafka.before = answer
    del fake_kafka.hidden[hidden]
    assert poll_restored(source) == [1]


def test_connections_of_a_restore_are_closed_if_its_partitions_are_revoked(fake_kafka: FakeKafka, clock: Clock) -> None:
    save_state(fake_kafka, 0)
    source, _ = open_source(fake_kafka, 1)
    fake_kafka.hidden[TopicPartition(STATE_TOPIC, 0)] = 1
    assert poll_restored(source) == []
    reader = fake_kafka.consumers[1]
    assert not reader.is_closed
    source.on_lost(frozenset({TopicPartition("events", 0)}))
    assert poll_restored(source) == []
    assert reader.is_closed


def test_partition_is_given_up_although_the_reader_of_its_state_cannot_stop_it(
    fake_kafka: FakeKafka, clock: Clock
) -> None:
    """The client library calls the handler, which must not raise."""
    for number in range(2):
        save_state(fake_kafka, number)
        fake_kafka.hidden[TopicPartition(STATE_TOPIC, number)] = 1
    source, consumer = open_source(fake_kafka, 2)
    assert poll_restored(source) == []
    tp = TopicPartition("events", 0)

    def fail(name: str, tps: set[TopicPartition]) -> None:
        if name == "stop":
            raise Unavailable("no response")

    answer, fake_kafka.before = fake_kafka.before, fail
    source.on_revoked(frozenset({tp}))
    consumer.take(tp)
    source.on_revoked_committed(None)
    fake_kafka.hidden.clear()
    assert poll_restored(source) == []
    fake_kafka.before = answer
    assert poll_restored(source) == [1]


def test_progress_is_reported_while_partitions_are_added_to_the_state_topic(
    fake_kafka: FakeKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.kafka.blocking_calls.WAIT_SECONDS", 0.01)
    source, consumer = open_source(fake_kafka, 1)
    has_waited = threading.Event()

    def wait(name: str, tps: set[TopicPartition]) -> None:
        if name == "describe_topics":
            assert has_waited.wait(30.0)

    fake_kafka.before = wait
    source.set_callbacks(SourceCallbacks(on_wait=has_waited.set))
    fake_kafka.num_partitions = {"events": 2, STATE_TOPIC: 2}
    consumer.give(TopicPartition("events", 1))
    assert poll_restored(source) == [0, 1]
    assert has_waited.is_set()
