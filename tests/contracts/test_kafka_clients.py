"""The contract of a Kafka client library, `connectors.kafka.ports`, tested with both libraries and a real broker."""

from __future__ import annotations

import base64
import itertools
import json
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from kafka import KafkaConsumer

from connectors.kafka import client as shared
from connectors.kafka.blocking_calls import BackgroundCall
from connectors.kafka.client import load_client
from connectors.kafka.ports import (
    Admin,
    ClientLibrary,
    ClientModule,
    CommittedOffset,
    Consumer,
    ConsumerOptions,
    KafkaCluster,
    OffsetOutOfRange,
    Offsets,
    OutgoingMessage,
    Producer,
    ProducerFenced,
    RebalanceInProgress,
    ReceivedMessage,
    TopicPartition,
)
from deformer_stream.errors import ConfigError, DeformerError, Unavailable
from tests.conftest import find_free_port, start_broker
from tests.integration.secured_broker import PASSWORD, WRONG_PASSWORD, SecuredBroker

pytestmark = pytest.mark.kafka

LIBRARIES: tuple[ClientLibrary, ...] = ("kafka-python", "librdkafka")
SECONDS = 30.0
"""Time limit of requests, and of waiting for a condition."""
MAX_MESSAGE_BYTES = 1_000_000


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> ClientLibrary:
    """Return the name of each library in turn."""
    name: ClientLibrary = request.param
    return name


class Clients:
    """Clients of one library, which are closed at the end of a test.

    Args:
        cluster: The brokers and the library.
        stack: Closes the clients.
    """

    def __init__(self, cluster: KafkaCluster, stack: ExitStack) -> None:
        self.cluster, self._stack = cluster, stack
        self.module: ClientModule = load_client(cluster)
        self.admin: Admin = self.module.open_admin(cluster)
        stack.callback(self.admin.close)

    def open_consumer(self, **options: Any) -> Consumer:
        """Return a consumer with the given options."""
        consumer = self.module.open_consumer(self.cluster, ConsumerOptions(**options))
        self._stack.callback(consumer.close)
        return consumer

    def open_producer(self, transactional_id: str | None = None, transaction_seconds: float = 60.0) -> Producer:
        """Return a producer; with a transactional id, it is ready to begin a transaction."""
        producer = self.module.open_producer(self.cluster, transactional_id, transaction_seconds, MAX_MESSAGE_BYTES)
        self._stack.callback(producer.close)
        if transactional_id is not None:
            producer.open_transactions(SECONDS)
        return producer

    def create_topic(self, num_partitions: int = 1, **settings: str) -> str:
        """Create a topic and return its name."""
        name = f"client-{uuid.uuid4().hex[:8]}"
        settings = {key.replace("_", "."): value for key, value in settings.items()}
        assert self.admin.create_topic(name, num_partitions, settings, SECONDS)
        return name

    def open_member(self, topic: str, group: str, offsets: Offsets | None = None, **options: Any) -> Member:
        """Return a consumer that has subscribed to a topic, with the handler that records its rebalances."""
        return Member(self.open_consumer(group=group, session_seconds=10.0, **options), topic, offsets or {})


class Member:
    """A member of a consumer group that records what its consumer calls.

    Attributes:
        consumer: The consumer.
        calls: Name of each method that was called, with the numbers of the partitions.
        offsets: The offsets that `on_revoked` returns, as far as the partitions are revoked.
        commit_errors: The arguments of `on_revoked_committed`.
        before_return: Called by `on_revoked`.
        messages: What `poll` has returned: partition number and offset of each message.
    """

    def __init__(self, consumer: Consumer, topic: str, offsets: Offsets) -> None:
        self.consumer, self.topic, self.offsets = consumer, topic, dict(offsets)
        self.calls: list[tuple[str, list[int]]] = []
        self.commit_errors: list[Exception | None] = []
        self.before_return: Callable[[], None] = lambda: None
        self.messages: list[tuple[int, int]] = []
        consumer.subscribe(topic, self)

    def on_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        self.calls.append(("assigned", sorted(tp.partition for tp in partitions)))

    def on_revoked(self, partitions: frozenset[TopicPartition]) -> Mapping[TopicPartition, CommittedOffset]:
        self.calls.append(("revoked", sorted(tp.partition for tp in partitions)))
        self.before_return()
        return {tp: offset for tp, offset in self.offsets.items() if tp in partitions}

    def on_revoked_committed(self, error: Exception | None) -> None:
        self.commit_errors.append(error)

    def on_lost(self, partitions: frozenset[TopicPartition]) -> None:
        self.calls.append(("lost", sorted(tp.partition for tp in partitions)))

    def on_wait(self) -> None: ...

    @property
    def numbers(self) -> set[int]:
        """The numbers of the partitions that the consumer owns."""
        return {tp.partition for tp in self.consumer.assignment}

    def poll(self, timeout: float = 0.1) -> None:
        """Poll once and store the messages."""
        columns = self.consumer.poll(timeout)
        if columns is not None:
            self.messages += zip(columns.partitions.tolist(), columns.offsets.tolist(), strict=True)

    def start_all(self, offset: int = 0) -> None:
        """Start all partitions that the consumer owns."""
        for tp in self.consumer.assignment:
            self.consumer.start(tp, offset)


@pytest.fixture
def clients(kafka: SimpleNamespace, library: ClientLibrary) -> Iterator[Clients]:
    """Return clients of a library, connected to the broker of the tests."""
    with ExitStack() as stack:
        yield Clients(KafkaCluster(kafka.bootstrap, library=library), stack)


def wait_for(condition: Callable[[], bool], *polled: Member) -> None:
    """Poll members at the same time, each in a thread, until a condition holds.

    If they were polled in turn, members of kafka-python might never join: a join that is completed between two polls of
    a member is begun again, see `JOIN_SECONDS` of the client.
    """
    deadline = time.monotonic() + SECONDS
    with ThreadPoolExecutor(max(1, len(polled))) as pool:
        while not condition():
            assert time.monotonic() < deadline, f"the condition does not hold; calls: {[m.calls for m in polled]}"
            for poll in [pool.submit(member.poll) for member in polled]:
                poll.result()
            if not polled:
                time.sleep(0.05)


def make_message(topic: str, value: bytes | None, partition: int | None = 0, **parts: Any) -> OutgoingMessage:
    """Return a message to be sent; its key is "k" if `parts` names no other."""
    return OutgoingMessage(0, topic, parts.pop("key", b"k"), value, partition=partition, **parts)


def send_values(producer: Producer, topic: str, num_messages: int, partition: int = 0) -> list[int]:
    """Send messages with the values "0", "1" and so on, and return their offsets."""
    messages = [make_message(topic, str(number).encode(), partition) for number in range(num_messages)]
    return producer.send(messages, SECONDS)


def read_messages(clients: Clients, topic: str, num_messages: int, num_partitions: int = 1) -> list[ReceivedMessage]:
    """Return the messages of a topic from its beginning."""
    reader = clients.open_consumer()
    reader.assign({TopicPartition(topic, number): 0 for number in range(num_partitions)})
    messages: list[ReceivedMessage] = []
    deadline = time.monotonic() + SECONDS
    while len(messages) < num_messages and time.monotonic() < deadline:
        messages += reader.poll_messages(0.2)
    reader.close()
    return messages


# --- messages ---------------------------------------------------------------------------------------------------------


def test_messages_are_returned_with_all_their_parts(clients: Clients) -> None:
    topic = clients.create_topic(2)
    sent = [
        make_message(topic, b"value", 1, key=b"key", headers=(("a", b"1"), ("a", b"\x00\xff")), time=1_700_000_000_123),
        make_message(topic, None, 0, time=1_700_000_000_124),
        make_message(topic, b"", 1, key=None),
        make_message(topic, b"\x00" * 100_000, 1, key=b""),
    ]
    began_ms = int(time.time() * 1000)
    assert clients.open_producer().send(sent, SECONDS) == [0, 0, 1, 2]
    received = {(m.partition, m.offset): m for m in read_messages(clients, topic, 4, 2)}
    expected = {(1, 0): sent[0], (0, 0): sent[1], (1, 1): sent[2], (1, 2): sent[3]}
    assert received.keys() == expected.keys()
    for place, message in expected.items():
        found = received[place]
        assert (found.topic, found.key, found.value) == (topic, message.key, message.value)
        assert list(found.headers) == list(message.headers)
        assert found.time == message.time if message.time else found.time >= began_ms - 1000

    reader = clients.open_consumer(max_messages=2)
    reader.assign({TopicPartition(topic, 1): 1})
    deadline = time.monotonic() + SECONDS
    columns = None
    while columns is None and time.monotonic() < deadline:
        columns = reader.poll(0.2)
    assert columns is not None
    assert len(columns.values) == 2
    assert (columns.keys, columns.values) == ([None, b""], [b"", b"\x00" * 100_000])
    assert columns.partitions.tolist() == [1, 1]
    assert columns.offsets.tolist() == [1, 2]
    assert (columns.times >= began_ms - 1000).all()
    assert (str(columns.times.dtype), str(columns.partitions.dtype), str(columns.offsets.dtype)) == (
        "int64",
        "int32",
        "int64",
    )


def test_polls_return_fewer_messages_if_they_are_large(clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "FIRST_POLL_MESSAGES", 2)
    topic = clients.create_topic()
    large = [make_message(topic, bytes([number]) * 300_000) for number in range(20)]
    small = [make_message(topic, b"%d" % number) for number in range(500)]
    clients.open_producer().send([*large, *small], SECONDS)
    reader = clients.open_consumer()
    reader.assign({TopicPartition(topic, 0): 0})
    polls: list[list[bytes | None]] = []
    deadline = time.monotonic() + SECONDS
    while sum(map(len, polls)) < 520 and time.monotonic() < deadline:
        columns = reader.poll(0.2)
        if columns is not None:
            polls.append(columns.values)
    assert [value for values in polls for value in values] == [message.value for message in (*large, *small)]
    assert len(polls[0]) <= 2
    assert all(len(values) <= shared.POLL_BYTES // 300_000 for values in polls if len(values[0] or b"") == 300_000)
    assert max(len(values) for values in polls) > 100  # small ones are not read one by one


def test_both_libraries_send_a_key_to_the_same_partition(kafka: SimpleNamespace) -> None:
    partitions_by_library = {}
    keys = [f"device-{number}".encode() for number in range(100)]
    with ExitStack() as stack:
        for library in LIBRARIES:
            clients = Clients(KafkaCluster(kafka.bootstrap, library=library), stack)
            topic = clients.create_topic(7)
            clients.open_producer().send([make_message(topic, b"", None, key=key) for key in keys], SECONDS)
            found = read_messages(clients, topic, len(keys), 7)
            partitions_by_library[library] = {message.key: message.partition for message in found}
    assert partitions_by_library["kafka-python"].keys() == set(keys)
    assert partitions_by_library["kafka-python"] == partitions_by_library["librdkafka"]


def test_enqueued_messages_arrive_in_order(clients: Clients) -> None:
    topic, producer = clients.create_topic(), clients.open_producer()
    for number in range(1000):
        producer.enqueue(make_message(topic, str(number).encode()))
    producer.flush(SECONDS)
    assert [int(m.value or b"-1") for m in read_messages(clients, topic, 1000)] == list(range(1000))


def test_message_that_is_too_large_for_its_topic_is_refused(clients: Clients) -> None:
    topic = clients.create_topic(max_message_bytes="1000")
    with pytest.raises(ConfigError, match=r"max\.message\.bytes"):
        clients.open_producer().send([make_message(topic, os.urandom(10_000))], SECONDS)
    producer = clients.open_producer()
    producer.enqueue(make_message(topic, os.urandom(10_000)))
    with pytest.raises(ConfigError, match=r"max\.message\.bytes"):
        producer.flush(SECONDS)


# --- positions --------------------------------------------------------------------------------------------------------


def test_position_at_the_end_is_after_transaction_markers(clients: Clients) -> None:
    topic = clients.create_topic()
    tp = TopicPartition(topic, 0)
    producer = clients.open_producer(f"{topic}/writer")
    for must_commit in (True, False):
        producer.begin_transaction()
        send_values(producer, topic, 3)
        (producer.commit_transaction if must_commit else producer.abort_transaction)(SECONDS)
    member = clients.open_member(topic, topic)
    wait_for(lambda: member.numbers == {0}, member)
    consumer = member.consumer
    consumer.start(tp, 0)
    assert consumer.get_position(tp) == 0
    wait_for(lambda: consumer.get_position(tp) == 8, member)  # 3 messages and a marker, twice
    assert member.messages == [(0, 0), (0, 1), (0, 2)]  # those of the aborted transaction are left out
    assert consumer.fetch_end_offsets([tp], SECONDS) == {tp: 8}
    wait_for(lambda: consumer.get_known_end(tp) == 8, member)

    # Messages of an open transaction are beyond the end.
    producer.begin_transaction()
    send_values(producer, topic, 2)
    assert consumer.fetch_end_offsets([tp], SECONDS) == {tp: 8}
    assert clients.admin.fetch_log_ends([tp], SECONDS) == {tp: 10}
    member.poll(0.5)
    assert consumer.get_position(tp) == 8
    producer.commit_transaction(SECONDS)
    wait_for(lambda: consumer.get_position(tp) == 11, member)
    assert member.messages[3:] == [(0, 8), (0, 9)]


def open_member_of_two(clients: Clients) -> Member:
    """Return a member that owns both partitions of a topic with 10 messages each, and polls up to 3 of them."""
    topic = clients.create_topic(2)
    producer = clients.open_producer()
    for number in (0, 1):
        send_values(producer, topic, 10, number)
    member = clients.open_member(topic, topic, max_messages=3)
    wait_for(lambda: member.numbers == {0, 1}, member)
    return member


def test_partition_delivers_only_after_start(clients: Clients) -> None:
    member = open_member_of_two(clients)
    consumer = member.consumer
    first, second = sorted(consumer.assignment)
    member.poll(0.5)
    assert member.messages == []
    assert consumer.get_position(first) is None
    consumer.start(second, 4)
    wait_for(lambda: len(member.messages) == 6, member)
    assert member.messages == [(1, offset) for offset in range(4, 10)]

    # What was fetched of a stopped partition is dropped, and it is read again from another offset.
    consumer.start(first, 0)
    wait_for(lambda: (0, 0) in member.messages, member)
    consumer.stop([first])
    num_messages = len(member.messages)
    member.poll(0.5)
    assert len(member.messages) == num_messages
    consumer.start(first, 8)
    wait_for(lambda: len(member.messages) == num_messages + 2, member)
    assert member.messages[num_messages:] == [(0, 8), (0, 9)]
    assert consumer.get_position(first) == 10


def test_stopped_partition_continues_after_another_was_read(clients: Clients) -> None:
    """A part of its fetched messages was returned when it was stopped."""
    member = open_member_of_two(clients)
    consumer = member.consumer
    for tp in consumer.assignment:
        consumer.start(tp, 0)
    wait_for(lambda: bool(member.messages), member)
    stopped = member.messages[-1][0]
    (tp,) = (tp for tp in consumer.assignment if tp.partition == stopped)
    position = consumer.get_position(tp)
    assert position is not None
    assert position < 10
    consumer.stop([tp])
    other = 1 - stopped
    wait_for(lambda: (other, 9) in member.messages, member)
    member.poll(0.5)
    consumer.start(tp, position)
    wait_for(lambda: (stopped, 9) in member.messages, member)
    assert sorted(member.messages) == [(number, offset) for number in (0, 1) for offset in range(10)]


def test_taking_part_in_a_rebalance_returns_and_loses_no_messages(clients: Clients) -> None:
    topic = clients.create_topic()
    send_values(clients.open_producer(), topic, 10)
    member = clients.open_member(topic, topic, max_messages=3)
    wait_for(lambda: member.numbers == {0}, member)
    member.consumer.start(TopicPartition(topic, 0), 2)
    member.consumer.serve_group(0.3)
    assert member.consumer.get_position(TopicPartition(topic, 0)) == 2
    wait_for(lambda: len(member.messages) >= 3, member)
    member.consumer.serve_group(0.3)
    wait_for(lambda: len(member.messages) >= 8, member)
    assert member.messages == [(0, offset) for offset in range(2, 10)]


def test_offset_that_does_not_exist_is_reported(clients: Clients) -> None:
    topic = clients.create_topic(2)
    producer = clients.open_producer()
    for number in (0, 1):
        send_values(producer, topic, 5, number)
    member = clients.open_member(topic, topic)
    wait_for(lambda: member.numbers == {0, 1}, member)
    gone, tp = TopicPartition(topic, 0), TopicPartition(topic, 1)
    member.consumer.start(gone, 1000)
    member.consumer.start(tp, 0)
    with pytest.raises(OffsetOutOfRange) as caught:
        wait_for(lambda: False, member)
    assert caught.value.offset_by_partition == {gone: 1000}
    member.consumer.start(gone, 3)
    wait_for(lambda: len(member.messages) == 7, member)
    assert sorted(member.messages) == [(0, 3), (0, 4), *((1, offset) for offset in range(5))]


# --- commits and transactions -----------------------------------------------------------------------------------------


def test_committed_metadata_are_read_back(clients: Clients) -> None:
    topic = clients.create_topic(3)
    member = clients.open_member(topic, topic)
    wait_for(lambda: len(member.numbers) == 3, member)
    plain, transactional, none = (TopicPartition(topic, number) for number in range(3))
    text = '{"größe": "' + "x" * 1000 + '"}'
    member.consumer.commit({plain: CommittedOffset(7, text)}, SECONDS)
    producer = clients.open_producer(f"{topic}/writer")
    producer.begin_transaction()
    send_values(producer, topic, 1)
    producer.send_offsets({transactional: CommittedOffset(9, text)}, member.consumer.membership, SECONDS)
    producer.commit_transaction(SECONDS)
    expected = {plain: CommittedOffset(7, text), transactional: CommittedOffset(9, text), none: None}
    assert member.consumer.fetch_committed(expected, SECONDS) == expected
    stranger = clients.open_consumer(group=topic)  # it owns none of the partitions
    assert stranger.fetch_committed(expected, SECONDS) == expected
    member.consumer.commit({plain: CommittedOffset(8)}, SECONDS)
    assert stranger.fetch_committed([plain], SECONDS) == {plain: CommittedOffset(8, "")}


def test_both_libraries_read_the_same_metadata(kafka: SimpleNamespace) -> None:
    with ExitStack() as stack:
        writers = [Clients(KafkaCluster(kafka.bootstrap, library=library), stack) for library in LIBRARIES]
        topic = writers[0].create_topic(len(writers))
        expected = {
            TopicPartition(topic, number): CommittedOffset(number, '{"a": 1}') for number in range(len(writers))
        }
        for clients, (tp, committed) in zip(writers, expected.items(), strict=True):
            clients.open_consumer(group=topic).commit({tp: committed}, SECONDS)
        for clients in writers:
            assert clients.open_consumer(group=topic).fetch_committed(expected, SECONDS) == expected


def test_metadata_of_every_length_are_read_by_both_libraries(kafka: SimpleNamespace, library: ClientLibrary) -> None:
    """librdkafka copies metadata without a terminating zero, unless they were committed with one."""
    with ExitStack() as stack:
        writer = Clients(KafkaCluster(kafka.bootstrap, library=library), stack)
        topic = writer.create_topic(64)
        expected = {
            TopicPartition(topic, number): CommittedOffset(number, json.dumps({"a": "x" * number}))
            for number in range(64)
        }
        writer.open_consumer(group=topic).commit(expected, SECONDS)
        for reading_library in LIBRARIES:
            reader = Clients(KafkaCluster(kafka.bootstrap, library=reading_library), stack).open_consumer(group=topic)
            for _ in range(5):
                assert reader.fetch_committed(expected, SECONDS) == expected


def test_aborted_transaction_commits_neither_messages_nor_offsets(clients: Clients) -> None:
    topic = clients.create_topic()
    tp = TopicPartition(topic, 0)
    member = clients.open_member(topic, topic)
    wait_for(lambda: member.numbers == {0}, member)
    producer = clients.open_producer(f"{topic}/writer")
    producer.begin_transaction()
    send_values(producer, topic, 2)
    producer.send_offsets({tp: CommittedOffset(5)}, member.consumer.membership, SECONDS)
    producer.abort_transaction(SECONDS)
    assert member.consumer.fetch_committed([tp], SECONDS) == {tp: None}
    producer.begin_transaction()  # the same producer can go on
    assert send_values(producer, topic, 1) == [3]
    producer.commit_transaction(SECONDS)
    assert [message.offset for message in read_messages(clients, topic, 1)] == [3]


def test_new_producer_ends_the_transaction_of_its_predecessor_and_fences_it(clients: Clients) -> None:
    topic = clients.create_topic()
    old = clients.open_producer(f"{topic}/writer")
    old.begin_transaction()
    send_values(old, topic, 2)
    new = clients.open_producer(f"{topic}/writer")
    with pytest.raises(ProducerFenced, match="--instance"):
        send_values(old, topic, 1)
    with pytest.raises(DeformerError):
        old.commit_transaction(SECONDS)
    new.begin_transaction()
    send_values(new, topic, 1)
    new.commit_transaction(SECONDS)
    # The offsets 0 and 1 and the marker at 2 are of the transaction that was ended.
    assert [message.offset for message in read_messages(clients, topic, 1)] == [3]


def test_fenced_producer_cannot_commit(clients: Clients) -> None:
    topic = clients.create_topic()
    old = clients.open_producer(f"{topic}/writer")
    old.begin_transaction()
    send_values(old, topic, 2)
    clients.open_producer(f"{topic}/writer")
    with pytest.raises(ProducerFenced, match="--instance"):
        old.commit_transaction(SECONDS)


def test_transaction_that_the_broker_has_ended_counts_as_fenced(clients: Clients) -> None:
    topic = clients.create_topic()
    producer = clients.open_producer(f"{topic}/writer", transaction_seconds=2.0)
    producer.begin_transaction()
    send_values(producer, topic, 1)
    tp = TopicPartition(topic, 0)
    reader = clients.open_consumer()
    wait_for(lambda: reader.fetch_end_offsets([tp], SECONDS) == {tp: 2})  # the marker of the broker is written
    with pytest.raises(ProducerFenced):
        producer.commit_transaction(SECONDS)


def test_offsets_of_a_former_member_are_refused(clients: Clients) -> None:
    topic = clients.create_topic()
    tp = TopicPartition(topic, 0)
    first = clients.open_member(topic, topic)
    wait_for(lambda: first.numbers == {0}, first)
    stale = first.consumer.membership
    first.consumer.close()
    second = clients.open_member(topic, topic)
    wait_for(lambda: second.numbers == {0}, second)
    producer = clients.open_producer(f"{topic}/writer")
    producer.begin_transaction()
    send_values(producer, topic, 1)
    with pytest.raises(RebalanceInProgress):
        producer.send_offsets({tp: CommittedOffset(1)}, stale, SECONDS)
    producer.abort_transaction(SECONDS)
    assert second.consumer.fetch_committed([tp], SECONDS) == {tp: None}


# --- groups -----------------------------------------------------------------------------------------------------------


def test_partitions_move_one_by_one_with_what_was_committed(clients: Clients) -> None:
    topic = clients.create_topic(4)
    producer = clients.open_producer()
    for number in range(4):
        send_values(producer, topic, 10, number)
    partitions = [TopicPartition(topic, number) for number in range(4)]
    first = clients.open_member(topic, topic, {tp: CommittedOffset(6, "saved") for tp in partitions})
    wait_for(lambda: len(first.numbers) == 4, first)
    assert first.calls == [("assigned", [0, 1, 2, 3])]
    first.start_all()
    wait_for(lambda: len(first.messages) == 40, first)
    second = clients.open_member(topic, topic)
    wait_for(lambda: len(second.numbers) == 2, first, second)
    revoked = sorted(set(range(4)) - first.numbers)
    assert first.calls[1:] in ([("revoked", revoked)], [("revoked", revoked), ("assigned", [])])
    assert first.commit_errors == [None]
    assert [call for call in second.calls if call[1]] == [("assigned", revoked)]
    moved = [TopicPartition(topic, number) for number in revoked]
    assert second.consumer.fetch_committed(moved, SECONDS) == dict.fromkeys(moved, CommittedOffset(6, "saved"))
    assert second.messages == []
    second.start_all(6)
    wait_for(lambda: len(second.messages) == 8, first, second)
    assert sorted(second.messages) == [(number, offset) for number in revoked for offset in range(6, 10)]
    assert len(first.messages) == 40

    # The second member leaves; its partitions return, and they deliver nothing until they are started.
    second.consumer.close()
    wait_for(lambda: len(first.numbers) == 4, first)
    first.poll(0.5)
    assert len(first.messages) == 40
    first.start_all(9)
    wait_for(lambda: len(first.messages) == 44, first)


def test_offsets_are_committed_in_a_transaction_while_partitions_are_revoked(clients: Clients) -> None:
    topic = clients.create_topic(2)
    first = clients.open_member(topic, topic)
    wait_for(lambda: len(first.numbers) == 2, first)
    producer = clients.open_producer(f"{topic}/writer")
    errors: list[Exception] = []

    def commit() -> None:
        _, numbers = first.calls[-1]
        try:
            producer.begin_transaction()
            send_values(producer, topic, 1)
            offsets = {TopicPartition(topic, number): CommittedOffset(3, "revoked") for number in numbers}
            producer.send_offsets(offsets, first.consumer.membership, SECONDS)
            producer.commit_transaction(SECONDS)
        except DeformerError as error:
            errors.append(error)

    first.before_return = commit
    second = clients.open_member(topic, topic)
    wait_for(lambda: len(second.numbers) == 1, first, second)
    assert errors == []
    assert first.commit_errors == [None]
    (tp,) = second.consumer.assignment
    assert second.consumer.fetch_committed([tp], SECONDS) == {tp: CommittedOffset(3, "revoked")}
    first.before_return = lambda: None


def test_closing_revokes_the_partitions_and_commits_their_offsets(clients: Clients) -> None:
    topic = clients.create_topic()
    tp = TopicPartition(topic, 0)
    member = clients.open_member(topic, topic, {tp: CommittedOffset(4)})
    wait_for(lambda: member.numbers == {0}, member)
    member.consumer.close()
    assert member.calls[-1] == ("revoked", [0])
    assert member.commit_errors == [None]
    assert clients.open_consumer(group=topic).fetch_committed([tp], SECONDS) == {tp: CommittedOffset(4)}
    assert clients.admin.describe_group(topic, SECONDS) == []
    member.consumer.close()  # a second call does nothing


def test_member_that_does_not_poll_loses_its_partitions(clients: Clients) -> None:
    topic = clients.create_topic()
    tp = TopicPartition(topic, 0)
    options = ConsumerOptions(group=topic, session_seconds=6.0, max_poll_seconds=6.0)
    consumer = clients.module.open_consumer(clients.cluster, options)
    try:
        member = Member(consumer, topic, {tp: CommittedOffset(4)})
        wait_for(lambda: member.numbers == {0}, member)
        wait_for(lambda: clients.admin.describe_group(topic, SECONDS) == [])  # without polls
        with pytest.raises(RebalanceInProgress):
            consumer.commit({tp: CommittedOffset(2)}, SECONDS)
        assert consumer.fetch_committed([tp], SECONDS) == {tp: None}
        wait_for(lambda: ("lost", [0]) in member.calls, member)
        assert ("revoked", [0]) not in member.calls
        wait_for(lambda: member.numbers == {0}, member)  # it joins again
        consumer.commit({tp: CommittedOffset(2)}, SECONDS)
    finally:
        consumer.close()


def test_members_of_both_libraries_form_one_group(kafka: SimpleNamespace) -> None:
    with ExitStack() as stack:
        one, other = (Clients(KafkaCluster(kafka.bootstrap, library=library), stack) for library in LIBRARIES)
        topic = one.create_topic(4)
        first = one.open_member(topic, topic)
        wait_for(lambda: len(first.numbers) == 4, first)
        second = other.open_member(topic, topic)
        wait_for(lambda: len(second.numbers) == 2 and len(first.numbers) == 2, first, second)
        assert first.numbers | second.numbers == {0, 1, 2, 3}
        first.consumer.close()
        wait_for(lambda: len(second.numbers) == 4, second)


def test_restart_with_an_instance_name_moves_no_partitions(clients: Clients) -> None:
    topic = clients.create_topic(2)
    first = clients.open_member(topic, topic, instance="first")
    second = clients.open_member(topic, topic, instance="second")
    wait_for(lambda: len(first.numbers) == len(second.numbers) == 1, first, second)
    owned = first.consumer.assignment
    first.consumer.close()
    num_calls = len(second.calls)
    members = {member.instance: member.partitions for member in clients.admin.describe_group(topic, SECONDS)}
    assert members == {"first": owned, "second": second.consumer.assignment}
    again = clients.open_member(topic, topic, instance="first")
    wait_for(lambda: again.consumer.assignment == owned, again, second)
    assert [call for call in second.calls[num_calls:] if call[1]] == []


@pytest.mark.parametrize("instance", [None, "first"])
def test_member_that_joins_anew_gets_partitions_again(clients: Clients, instance: str | None) -> None:
    """The group forgets also a member with an instance name, and assigns all partitions."""
    topic = clients.create_topic(2)
    first = clients.open_member(topic, topic, instance=instance)
    second = clients.open_member(topic, topic)
    wait_for(lambda: len(first.numbers) == len(second.numbers) == 1, first, second)
    (before,) = {member.id for member in clients.admin.describe_group(topic, SECONDS)} - {second.consumer.member_id}
    num_calls = len(first.calls)
    first.consumer.rejoin()
    wait_for(lambda: first.consumer.member_id not in (None, before), first, second)
    wait_for(lambda: len(first.numbers) == len(second.numbers) == 1, first, second)
    assert first.numbers | second.numbers == {0, 1}
    assert first.calls[num_calls][0] in ("lost", "revoked")
    ids = {member.id for member in clients.admin.describe_group(topic, SECONDS)}
    assert ids == {first.consumer.member_id, second.consumer.member_id}


def test_second_process_with_an_instance_name_ends_the_first(clients: Clients) -> None:
    topic = clients.create_topic()
    first = clients.open_member(topic, topic, instance="same")
    wait_for(lambda: first.numbers == {0}, first)
    second = clients.open_member(topic, topic, instance="same")
    wait_for(lambda: second.numbers == {0}, second)

    def try_to_commit() -> bool:
        try:
            first.consumer.commit({TopicPartition(topic, 0): CommittedOffset(1)}, SECONDS)
        except RebalanceInProgress:  # librdkafka learns the reason from its next heartbeat
            first.consumer.serve_group(0.1)
        return False

    with pytest.raises(ConfigError, match="--instance"):
        wait_for(try_to_commit)


def test_added_partitions_are_assigned(clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "METADATA_SECONDS", 1.0)
    topic = clients.create_topic(1)
    member = clients.open_member(topic, topic)
    wait_for(lambda: member.numbers == {0}, member)
    clients.admin.add_partitions(topic, 3, SECONDS)
    assert clients.admin.describe_topics([topic], SECONDS)[topic].num_partitions == 3
    wait_for(lambda: member.numbers == {0, 1, 2}, member)
    clients.admin.add_partitions(topic, 2, SECONDS)  # it has more already
    assert clients.admin.describe_topics([topic], SECONDS)[topic].num_partitions == 3


def test_metadata_of_other_topics_are_not_requested(kafka: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """kafka-python's functions for that wait without a limit, and a cluster may have thousands of topics."""

    def fail(*_: object) -> None:
        pytest.fail("the metadata of all topics are requested")

    monkeypatch.setattr(KafkaConsumer, "topics", fail)
    monkeypatch.setattr(KafkaConsumer, "partitions_for_topic", fail)
    with ExitStack() as stack:
        clients = Clients(KafkaCluster(kafka.bootstrap, library="kafka-python"), stack)
        topic = clients.create_topic(2)
        member = clients.open_member(topic, topic)
        assert clients.admin.describe_topics([topic + "-missing"], SECONDS) == {}
        wait_for(lambda: member.numbers == {0, 1}, member)
        wait_for(lambda: member.consumer.membership is not None, member)
        assert [name for name, _ in member.calls] == ["assigned"], "it has joined once"


@pytest.mark.parametrize("poll_seconds", [0.0, 0.01])
def test_added_partitions_are_assigned_between_short_polls(
    clients: Clients, monkeypatch: pytest.MonkeyPatch, poll_seconds: float
) -> None:
    """Polls end while the group moves partitions, as on a busy machine."""
    calls = check_added_partitions(clients, monkeypatch, poll_seconds)
    assert not [name for name, _ in calls if name == "lost"]


def test_added_partitions_are_assigned_with_an_unchecked_version(
    kafka: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the attribute that is not public, the process joins the group anew after the time of a session."""
    monkeypatch.setattr("connectors.kafka.kafka_python_client.kafka_version", "3.0.999")
    monkeypatch.setattr("connectors.kafka.kafka_python_client.JOIN_SECONDS", 0.0)  # so that polls stop the join
    with ExitStack() as stack:
        clients = Clients(KafkaCluster(kafka.bootstrap, library="kafka-python"), stack)
        check_added_partitions(clients, monkeypatch, poll_seconds=0.0)


def check_added_partitions(
    clients: Clients, monkeypatch: pytest.MonkeyPatch, poll_seconds: float
) -> list[tuple[str, list[int]]]:
    """Add partitions to a topic, check that a member gets them although its polls are short, and return its calls."""
    monkeypatch.setattr(shared, "METADATA_SECONDS", 1.0)
    topic = clients.create_topic(1)
    member = clients.open_member(topic, topic)
    wait_for(lambda: member.numbers == {0}, member)
    clients.admin.add_partitions(topic, 3, SECONDS)
    deadline = time.monotonic() + 2 * SECONDS
    while member.numbers != {0, 1, 2}:
        assert time.monotonic() < deadline, f"the partitions are not assigned; calls: {member.calls}"
        member.poll(poll_seconds)
    wait_for(lambda: member.consumer.membership is not None, member)
    return member.calls


# --- admin ------------------------------------------------------------------------------------------------------------


def test_topics_are_created_and_described(clients: Clients) -> None:
    name, admin = f"client-{uuid.uuid4().hex[:8]}", clients.admin
    assert admin.describe_topics([name], SECONDS) == {}
    assert admin.create_topic(name, 3, {"cleanup.policy": "compact", "max.message.bytes": "12345"}, SECONDS)
    assert not admin.create_topic(name, 5, {}, SECONDS)
    description = admin.describe_topics([name, "no-such-topic"], SECONDS)
    assert description.keys() == {name}
    assert description[name].num_partitions == 3
    operations = description[name].operations
    assert operations is None or {"READ", "WRITE"} <= operations
    settings = admin.fetch_settings([name], SECONDS)[name]
    assert (settings["cleanup.policy"], settings["max.message.bytes"]) == ("compact", "12345")
    assert settings["segment.bytes"] == "1073741824"  # a default
    assert "no-such-topic" not in admin.describe_topics(["no-such-topic"], SECONDS)  # nobody has created it
    with pytest.raises(ConfigError):
        admin.create_topic("a/b", 1, {}, SECONDS)


def test_offsets_of_partitions_are_fetched(clients: Clients) -> None:
    topic = clients.create_topic(3)
    producer = clients.open_producer()
    send_values(producer, topic, 5, 1)
    send_values(producer, topic, 2, 2)
    partitions = [TopicPartition(topic, number) for number in range(3)]
    consumer = clients.open_consumer()
    assert consumer.fetch_first_offsets(partitions, SECONDS) == dict.fromkeys(partitions, 0)
    expected = dict(zip(partitions, (0, 5, 2), strict=True))
    assert consumer.fetch_end_offsets(partitions, SECONDS) == expected
    assert clients.admin.fetch_log_ends(partitions, SECONDS) == expected
    with pytest.raises(Unavailable):
        consumer.fetch_end_offsets([TopicPartition("no-such-topic", 0)], 3.0)


def test_members_of_a_group_are_described(clients: Clients) -> None:
    topic = clients.create_topic(2)
    assert clients.admin.describe_group(topic, SECONDS) == []
    member = clients.open_member(topic, topic, instance="named")
    wait_for(lambda: len(member.numbers) == 2, member)
    (described,) = clients.admin.describe_group(topic, SECONDS)
    assert described.instance == "named"
    assert described.partitions == member.consumer.assignment


# --- refusals ---------------------------------------------------------------------------------------------------------


def open_each(cluster: KafkaCluster) -> Iterator[Callable[[], Any]]:
    """Yield functions that open each kind of client."""
    module = load_client(cluster)
    yield lambda: module.open_consumer(cluster, ConsumerOptions(group="any"))
    yield lambda: module.open_producer(cluster, None, 60.0, MAX_MESSAGE_BYTES)
    yield lambda: module.open_admin(cluster)


def get_refusal(cluster: KafkaCluster, error_type: type[DeformerError], num_kinds: int = 3) -> str:
    """Return the message with which a client refuses to connect; it is one line without a secret.

    Args:
        cluster: The settings of the connection.
        error_type: The type of the error.
        num_kinds: Number of kinds of clients that are tried. All must give the same message.
    """
    if cluster.library == "kafka-python":  # it tries to connect again until this time is over, whatever the reason
        cluster = replace(cluster, options={**cluster.options, "bootstrap_timeout_ms": "2000"})
    messages = set()
    for open_client in itertools.islice(open_each(cluster), num_kinds):
        began = time.monotonic()
        with pytest.raises(error_type) as caught:
            open_client()
        assert time.monotonic() - began < 60
        messages.add(str(caught.value))
    (message,) = messages
    assert "\n" not in message
    assert PASSWORD not in message
    assert WRONG_PASSWORD not in message
    return message


def test_unreachable_broker_is_reported(library: ClientLibrary) -> None:
    port = find_free_port()
    message = get_refusal(KafkaCluster(f"127.0.0.1:{port}", library=library), Unavailable)
    assert f"127.0.0.1:{port}" in message
    assert "cannot be reached" in message
    message = get_refusal(KafkaCluster("127.0.0.1", library=library), ConfigError)
    assert "host:port" in message


def test_options_that_are_functions_are_refused(kafka: SimpleNamespace) -> None:
    for name in ("stats_cb", "throttle_cb", "oauth_cb", "on_commit", "default.topic.config"):
        message = get_refusal(
            KafkaCluster(kafka.bootstrap, library="librdkafka", options={name: "letmein"}), ConfigError, 1
        )
        assert "--client-option " + name in message
        assert "letmein" not in message


def test_warnings_of_kafka_python_are_forwarded_without_secrets(kafka: SimpleNamespace) -> None:
    from connectors.kafka import kafka_python_client

    options = {"sasl_kerberos_name": "letmein-please", "ssl_password": "abc", "client_id": "plant"}
    cluster = KafkaCluster("127.0.0.1:1", {"sasl_plain_password": PASSWORD}, options=options)
    with suppress(Unavailable):
        kafka_python_client.open_admin(cluster)
    with structlog.testing.capture_logs() as logs:
        logging.getLogger("kafka.test").warning("%s and letmein-please, abc, plant", PASSWORD)
    assert [line["message"] for line in logs] == ["*** and ***, ***, plant"]


def test_options_that_the_library_rejects_are_refused(kafka: SimpleNamespace) -> None:
    for name, value in (("no.such.option", "letmein"), ("fetch.max.bytes", "letmein"), ("isolation.level", "letmein")):
        cluster = KafkaCluster(kafka.bootstrap, library="librdkafka", options={name: value})
        message = get_refusal(cluster, ConfigError)
        assert f"--client-option {name}" in message
        assert "letmein" not in message


@pytest.mark.parametrize(
    ("library", "name"),
    [
        *(("librdkafka", name) for name in ("isolation.level", "acks", "transactional.id", "group.id")),
        *(("librdkafka", name) for name in ("security.protocol", "enable.ssl.certificate.verification", "logger")),
        *(("kafka-python", name) for name in ("isolation_level", "acks", "transactional_id", "group_id")),
        *(("kafka-python", name) for name in ("enable_auto_commit", "ssl_context", "value_deserializer")),
    ],
)
def test_options_on_which_the_guarantees_rely_are_refused(library: ClientLibrary, name: str) -> None:
    """They are refused before a broker is contacted, by each kind of client."""
    cluster = KafkaCluster("127.0.0.1:1", library=library, options={name: "letmein"})
    module = load_client(cluster)
    for open_client in (
        lambda: module.open_consumer(cluster, ConsumerOptions()),
        lambda: module.open_producer(cluster),
        lambda: module.open_admin(cluster),
    ):
        with pytest.raises(ConfigError, match=f"--client-option {name}: deformer-stream sets this itself") as refusal:
            open_client()
        assert "letmein" not in str(refusal.value)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    """Return a broker with a listener for each kind of encryption and login."""
    server = SecuredBroker(tmp_path_factory.mktemp("broker"))
    with server.broker:
        yield server


def make_secured_cluster(
    server: SecuredBroker, library: ClientLibrary, listener: str, **security: object
) -> KafkaCluster:
    """Return the settings of a connection to a listener.

    Args:
        server: The broker.
        library: The client library.
        listener: Name of the listener.
        **security: Security options, beside the protocol and the trusted authority.
    """
    protocol = {"LOGIN": "SASL_PLAINTEXT", "TOKEN": "SASL_PLAINTEXT", "BOTH": "SASL_SSL", "PLAIN": "PLAINTEXT"}.get(
        listener, "SSL"
    )
    address = server.broker.bootstrap if listener == "PLAIN" else server.broker.address_by_listener[listener]
    authority = {"ssl_cafile": str(server.authority)} if protocol.endswith("SSL") else {}
    return KafkaCluster(address, {"security_protocol": protocol, **authority, **security}, library)


LOGIN = {"sasl_mechanism": "PLAIN", "sasl_plain_username": "plant", "sasl_plain_password": PASSWORD}


def test_encrypted_connections_with_a_login_are_accepted(server: SecuredBroker, library: ClientLibrary) -> None:
    key = {"ssl_certfile": str(server.certificate), "ssl_keyfile": str(server.locked_key)}
    clusters = [
        make_secured_cluster(server, library, "TLS"),
        make_secured_cluster(server, library, "MUTUAL", **key, ssl_password=server.passphrase.read_text()),
        make_secured_cluster(server, library, "LOGIN", **LOGIN),
        make_secured_cluster(server, library, "BOTH", **LOGIN),
    ]
    for cluster in clusters:
        for open_client in open_each(cluster):
            open_client().close()


def make_token(user: str = "plant", lifetime: float = 300.0) -> str:
    """Return a JSON Web Token without a signature, which the broker of tests accepts."""
    now = int(time.time())
    parts = ({"alg": "none"}, {"sub": user, "iat": now, "exp": now + lifetime})
    return ".".join([*(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts), ""])


def check_login(cluster: KafkaCluster) -> None:
    """Open each kind of client, and check that the broker knows the user, who has no permissions."""
    with ExitStack() as stack:
        clients = Clients(cluster, stack)
        clients.open_producer()
        with pytest.raises(ConfigError, match="this user is not authorized"):
            clients.admin.describe_topics(["a-topic"], SECONDS)
        clients.open_consumer()


def test_login_with_a_token_of_a_file_is_accepted(
    server: SecuredBroker, library: ClientLibrary, tmp_path: Path
) -> None:
    path = tmp_path / "token"
    path.write_text(make_token())
    options = {"sasl_mechanism": "OAUTHBEARER", "sasl_oauth_token_file": str(path)}
    check_login(make_secured_cluster(server, library, "TOKEN", **options))
    path.write_text("not-a-token")
    message = get_refusal(make_secured_cluster(server, library, "TOKEN", **options), ConfigError)
    assert "not-a-token" not in message


def test_login_with_a_token_that_aws_has_signed_is_accepted(
    server: SecuredBroker, library: ClientLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package in place of AWS's signer shows how it is called. What it returns goes to the broker."""
    regions: list[str] = []

    def generate_auth_token(region: str) -> tuple[str, int]:
        regions.append(region)
        return make_token(), int((time.time() + 300) * 1000)

    signer = SimpleNamespace(MSKAuthTokenProvider=SimpleNamespace(generate_auth_token=generate_auth_token))
    session = SimpleNamespace(get_config_variable={"region": "eu-west-1"}.get)
    monkeypatch.setitem(sys.modules, "aws_msk_iam_sasl_signer", signer)
    monkeypatch.setitem(sys.modules, "botocore", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "botocore.session", SimpleNamespace(get_session=lambda: session))
    for region in ({"sasl_aws_region": "us-east-1"}, {}):
        check_login(make_secured_cluster(server, library, "TOKEN", sasl_mechanism="AWS_MSK_IAM", **region))
    assert set(regions) == {"us-east-1", "eu-west-1"}


def test_login_with_a_token_of_an_endpoint_is_accepted(server: SecuredBroker) -> None:
    """librdkafka requests the token as an OAuth client (client credentials). kafka-python cannot."""
    requests: list[tuple[str, str]] = []

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            requests.append((self.headers["Authorization"], body))
            answer = json.dumps({"access_token": make_token(), "token_type": "Bearer", "expires_in": 300}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None: ...

    endpoint = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=endpoint.serve_forever, daemon=True).start()
    options = {
        "sasl_mechanism": "OAUTHBEARER",
        "sasl_oauth_token_endpoint": f"http://127.0.0.1:{endpoint.server_port}/token",
        "sasl_oauth_client_id": "gateway",
        "sasl_oauth_client_secret": "open-sesame",
        "sasl_oauth_scope": "kafka",
    }
    try:
        check_login(make_secured_cluster(server, "librdkafka", "TOKEN", **options))
        message = get_refusal(make_secured_cluster(server, "kafka-python", "TOKEN", **options), ConfigError)
    finally:
        endpoint.shutdown()
        endpoint.server_close()
    assert "use --client librdkafka" in message
    authorization, body = requests[0]
    assert base64.b64decode(authorization.removeprefix("Basic ")) == b"gateway:open-sesame"
    assert "grant_type=client_credentials" in body
    assert "scope=kafka" in body


def test_refused_login_is_reported(server: SecuredBroker, library: ClientLibrary) -> None:
    wrong = {**LOGIN, "sasl_plain_password": WRONG_PASSWORD}
    for listener in ("LOGIN", "BOTH"):
        num_kinds = 3 if listener == "LOGIN" else 1
        message = get_refusal(make_secured_cluster(server, library, listener, **wrong), ConfigError, num_kinds)
        assert "login" in message
        assert "--sasl-username" in message
    unknown = {**LOGIN, "sasl_mechanism": "SCRAM-SHA-256"}
    message = get_refusal(make_secured_cluster(server, library, "LOGIN", **unknown), ConfigError, 1)
    assert "--sasl-mechanism" in message


def test_wrong_encryption_is_reported(server: SecuredBroker, library: ClientLibrary) -> None:
    foreign = make_secured_cluster(server, library, "TLS", ssl_cafile=str(server.foreign))
    assert "--ssl-cafile" in get_refusal(foreign, ConfigError, 1)
    assert "--ssl-certfile" in get_refusal(make_secured_cluster(server, library, "MUTUAL"), ConfigError, 1)
    address = server.broker.address_by_listener["TLS"]
    plain = KafkaCluster(address, {"security_protocol": "PLAINTEXT"}, library)
    assert "--security-protocol" in get_refusal(plain, ConfigError, 1)
    encrypted = KafkaCluster(server.broker.bootstrap, {"security_protocol": "SSL"}, library)
    assert "--security-protocol" in get_refusal(encrypted, ConfigError, 1)


def test_log_of_librdkafka_is_forwarded_without_secrets(server: SecuredBroker) -> None:
    from connectors.kafka.librdkafka_connection import ClientEvents

    security = {"sasl_plain_password": PASSWORD}
    cluster = KafkaCluster("any:1", security, "librdkafka", {"ssl.key.pem": "letmein-please", "retries": "123456"})
    events = ClientEvents(cluster)
    with structlog.testing.capture_logs() as logs:
        events.logger.warning("FAIL dropped while connecting")
        events.is_connected = True
        events.logger.log(logging.ERROR, "FAIL [thrd] %s and letmein-please, 123456", PASSWORD)
        events.logger.warning("CONFWARN [thrd] property is of another client")
        events.logger.info("an unimportant line")
    assert [line["message"] for line in logs] == ["FAIL [thrd] *** and ***, 123456"]


# --- outages ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_clients_survive_a_restart_of_the_broker(library: ClientLibrary) -> None:
    with start_broker() as broker, ExitStack() as stack:
        clients = Clients(KafkaCluster(broker.bootstrap, library=library), stack)
        topic = clients.create_topic()
        tp = TopicPartition(topic, 0)
        producer, member = clients.open_producer(), clients.open_member(topic, topic)
        send_values(producer, topic, 3)
        wait_for(lambda: member.numbers == {0}, member)
        member.start_all()
        wait_for(lambda: len(member.messages) == 3, member)
        writer = clients.open_producer(f"{topic}/writer", 30.0)
        commit_transaction(writer, member)
        # If all brokers fail between the decision to commit and the end of the transaction, Kafka may never end it.
        assert member.consumer.fetch_committed([tp], SECONDS) == {tp: CommittedOffset(1)}
        # Four messages, and the mark of the transaction. The client learns the epoch of the partition's leader.
        assert member.consumer.fetch_end_offsets([tp], SECONDS) == {tp: 5}
        broker.kill(1)
        for request in (
            lambda: member.consumer.commit({tp: CommittedOffset(1)}, 2.0),
            lambda: member.consumer.fetch_committed([tp], 2.0),
            lambda: member.consumer.fetch_end_offsets([tp], 2.0),
            lambda: clients.admin.describe_topics([topic], 2.0),
            lambda: send_values_within(producer, topic, 2.0),
        ):
            began = time.monotonic()
            with pytest.raises(Unavailable):
                request()
            assert time.monotonic() - began < 20
        broker.start_node(1)
        deadline = time.monotonic() + 60

        def try_to_commit() -> bool:
            try:
                member.consumer.commit({tp: CommittedOffset(2)}, 5.0)
                return True
            except Unavailable:
                assert time.monotonic() < deadline
                return False

        def poll() -> None:
            for assigned in member.consumer.assignment:  # the session has timed out, so it was assigned again
                if member.consumer.get_position(assigned) is None:
                    member.consumer.start(assigned, 0)
            try:
                member.poll()
            except Unavailable:
                assert time.monotonic() < deadline

        while not try_to_commit():
            poll()
        assert member.consumer.fetch_committed([tp], SECONDS) == {tp: CommittedOffset(2)}
        while True:  # the restarted broker refuses requests with the earlier epoch of the leader
            with suppress(Unavailable):
                assert member.consumer.fetch_end_offsets([tp], 5.0)[tp] >= 5
                break
            assert time.monotonic() < deadline
        # The producer remembers which broker coordinated the group before, and did nothing since.
        call = BackgroundCall(lambda: commit_transaction(writer, member))
        assert call.wait(SECONDS), "a request of the transaction has no time limit"
        call.get()
        assert member.consumer.fetch_committed([tp], SECONDS) == {tp: CommittedOffset(1)}
        send_values(clients.open_producer(), topic, 2)
        while len({offset for _, offset in member.messages}) < 7:
            poll()
            assert time.monotonic() < deadline
        broker.kill(1)
        began = time.monotonic()
        member.consumer.close()
        producer.close()
        clients.admin.close()
        assert time.monotonic() - began < 30


def commit_transaction(producer: Producer, member: Member) -> None:
    """Commit a transaction with one message and the offset 1."""
    producer.begin_transaction()
    send_values(producer, member.topic, 1)
    producer.send_offsets({TopicPartition(member.topic, 0): CommittedOffset(1)}, member.consumer.membership, SECONDS)
    producer.commit_transaction(SECONDS)


def send_values_within(producer: Producer, topic: str, timeout: float) -> None:
    """Send a message that must be acknowledged within `timeout` seconds."""
    producer.send([make_message(topic, b"late")], timeout)


def test_files_of_tokens_are_read_again(tmp_path: Path) -> None:
    from connectors.kafka.tokens import make_token_provider

    path = tmp_path / "token"
    path.write_text("abc\n")
    provide = make_token_provider({"sasl_mechanism": "OAUTHBEARER", "sasl_oauth_token_file": str(path)})
    assert provide is not None
    token, expires_at = provide()
    assert token == "abc"
    assert time.time() < expires_at <= time.time() + 300
    claims = "eyJleHAiOiAxOTAwMDAwMDAwfQ"  # {"exp": 1900000000}
    path.write_text(f"x.{claims}.y\n")
    assert provide() == (f"x.{claims}.y", 1_900_000_000.0)
    path.write_text("")
    with pytest.raises(ConfigError, match="--sasl-oauth-token-file"):
        provide()
