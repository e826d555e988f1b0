"""Tests of transactions: contents and offsets, older brokers, and brokers that stop and start."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import kafka.errors as refusals
import pytest
from kafka import KafkaProducer, TopicPartition
from kafka.structs import ConsumerGroupMetadata, OffsetAndMetadata

from connectors.kafka import Delivery, KafkaCluster, ensure_topics
from connectors.kafka.batches import OutgoingMessage
from connectors.kafka.transactions import Transactions
from tests.conftest import start_broker
from tests.connectors.kafka_groups import Group, poll_in_background
from tests.connectors.kafka_helpers import open_admin, read_topic, wait_for_transactions, wait_until

pytestmark = pytest.mark.kafka

PREFERRED = 0
Sent = dict[tuple[str, int], list[tuple[int, bytes]]]


def commit(delivery: Delivery, state: list[OutgoingMessage], position: int = 1, group: str = "nobody's") -> list[int]:
    """Commit messages with an offset of a group without members, and return the offsets of the messages."""
    found: list[int] = []

    def offsets(sent: Callable[[], list[int]]) -> dict[TopicPartition, OffsetAndMetadata]:
        found.extend(sent())
        return {TopicPartition(state[0].topic, 0): OffsetAndMetadata(position, "", -1)}

    delivery.seal_pending()
    delivery.begin(delivery.transaction(state, offsets, ConsumerGroupMetadata(group, -1, "", None)))
    delivery.end()
    delivery.mark_committed()
    return found


def make_random_messages(topics: list[str], count: int, dice: random.Random) -> list[OutgoingMessage]:
    """Return messages of all sizes for random partitions, each with a unique value."""
    return [
        OutgoingMessage(
            0,
            dice.choice(topics),
            None,
            b"%s %s" % (uuid.uuid4().hex.encode(), b"x" * dice.choice([0, 10, 1000, 30_000])),
            [],
            dice.randrange(3),
        )
        for _ in range(count)
    ]


def test_messages_are_at_the_offsets_that_were_returned(
    kafka: SimpleNamespace, topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of several topics and partitions are written in many batches, once and in order. Sequence numbers
    continue from commit to commit.
    """
    monkeypatch.setattr("connectors.kafka.batches.BATCH_BYTES", 3_000)
    monkeypatch.setattr("connectors.kafka.batches.REQUEST_BYTES", 9_000)
    dice, topics = random.Random(1), [topic(3) for _ in range(3)]  # noqa: S311
    delivery = Delivery(kafka.bootstrap, None, dict.fromkeys(topics, 100_000), topics[0])
    sent: Sent = defaultdict(list)
    for turn in range(6):
        state = make_random_messages(topics, dice.choice([1, 20, 100]), dice)
        for m, offset in zip(state, commit(delivery, state, turn), strict=True):
            sent[m.topic, m.partition].append((offset, m.value))
    delivery.close()
    for name in topics:
        wait_for_transactions(kafka.bootstrap, name)
        found: Sent = defaultdict(list)
        for record in read_topic(kafka.bootstrap, name):
            found[name, record.partition].append((record.offset, record.value))
        assert found == {to: messages for to, messages in sent.items() if to[0] == name}


def test_messages_equal_those_of_the_client(kafka: SimpleNamespace, topic: Callable[..., str]) -> None:
    """The partition of a key, timestamps, headers and null values are compared."""
    ours, theirs = topic(5), topic(5)
    keys = [b"key-%d" % i for i in range(40)] + [b"", "é".encode()]
    delivery = Delivery(kafka.bootstrap, None, {ours: 100_000}, ours)
    sender = KafkaProducer(bootstrap_servers=kafka.bootstrap)
    began = time.time() * 1000
    for key in keys:
        value, headers = (None if key == b"key-0" else b"v"), [("name", key), ("more", b"")]
        delivery.put(OutgoingMessage(0, ours, key, value, headers))
        sender.send(theirs, key=key, value=value, headers=headers)
    sender.close()
    commit(delivery, [OutgoingMessage(0, ours, None, b"of any partition", [])])
    delivery.close()
    wait_for_transactions(kafka.bootstrap, ours)
    written = {
        name: {r.key: (r.partition, r.value, r.headers) for r in read_topic(kafka.bootstrap, name) if r.key is not None}
        for name in (ours, theirs)
    }
    assert written[ours] == written[theirs]
    assert written[ours].keys() == set(keys)
    assert all(began - 1 <= r.timestamp <= time.time() * 1000 + 1 for r in read_topic(kafka.bootstrap, ours))


def test_sequence_numbers_wrap_around(kafka: SimpleNamespace, topic: Callable[..., str]) -> None:
    """They wrap around after 2³¹ messages of a partition, in this test after ten."""
    name = topic(1)
    delivery = Delivery(kafka.bootstrap, None, {name: 100_000}, name)
    assert isinstance(delivery._producer, Transactions)
    delivery._producer._batch_builder._next_sequence[TopicPartition(name, 0)] = 2**31 - 10
    for _ in range(4):
        commit(delivery, [OutgoingMessage(0, name, None, b"%d" % i, [], 0) for i in range(8)])
    delivery.close()
    wait_for_transactions(kafka.bootstrap, name)
    assert [int(r.value) for r in read_topic(kafka.bootstrap, name)] == [*range(8)] * 4


def test_consecutive_commits_without_pause(kafka: SimpleNamespace, topic: Callable[..., str]) -> None:
    """The broker is still ending a transaction when the next one begins."""
    name = topic(2)
    delivery = Delivery(kafka.bootstrap, None, {name: 100_000}, name)
    for i in range(30):
        assert commit(delivery, [OutgoingMessage(0, name, None, b"%d" % i, [], i % 2)], i)
    delivery.close()
    wait_for_transactions(kafka.bootstrap, name)
    assert sorted(int(r.value) for r in read_topic(kafka.bootstrap, name)) == [*range(30)]


def test_commit_waits_for_a_partition_that_is_being_created(kafka: SimpleNamespace, topic: Callable[..., str]) -> None:
    """Brokers learn one after the other that there is a partition, and who leads it: the commit waits for that."""
    name = topic(1)
    delivery = Delivery(kafka.bootstrap, None, {name: 100_000}, name)
    with open_admin(kafka.bootstrap) as admin:
        creation = threading.Timer(0.3, lambda: admin.create_partitions({name: 2}))
        creation.start()
        assert commit(delivery, [OutgoingMessage(0, name, None, b"early", [], 1)]) == [0]
        creation.join()
    assert not delivery.has_failed
    delivery.close()
    wait_for_transactions(kafka.bootstrap, name)
    assert [(r.partition, r.value) for r in read_topic(kafka.bootstrap, name)] == [(1, b"early")]


def test_newer_producer_fences_the_older_one(kafka: SimpleNamespace, topic: Callable[..., str]) -> None:
    """The later one is in charge: the earlier one writes nothing more, in no transaction that is yet to begin."""
    name = topic(1)
    first, second = (Delivery(kafka.bootstrap, None, {name: 100_000}, name) for _ in range(2))
    with pytest.raises(refusals.ProducerFencedError):
        commit(first, [OutgoingMessage(0, name, None, b"first", [], 0)])
    assert first.has_failed
    commit(second, [OutgoingMessage(0, name, None, b"second", [], 0)])
    for delivery in (first, second):
        delivery.close()
    wait_for_transactions(kafka.bootstrap, name)
    assert [r.value for r in read_topic(kafka.bootstrap, name)] == [b"second"]
    assert len(read_topic(kafka.bootstrap, name, "read_uncommitted")) == 1


# --- brokers that change ----------------------------------------------------------------------------------------------


def create_group(bootstrap: str, partitions: int = 2) -> Group:
    """Return a group with a new topic."""
    name = f"events-{uuid.uuid4().hex[:8]}"
    ensure_topics(KafkaCluster(bootstrap), {name: {"num_partitions": partitions}})
    return Group(bootstrap, name, partitions)


@pytest.fixture
def older_broker() -> Iterator[Any]:
    """Start a broker without the second version of transactions, as before Kafka 4."""
    with start_broker(features={"transaction.version": 1}) as broker:
        yield broker


def test_older_broker_that_restarts_between_commits(older_broker: Any) -> None:
    world = create_group(older_broker.bootstrap)
    member = world.add_member(patience=60.0)
    for turn in range(3):
        world.produce(40)
        member.read(40 * (turn + 1))
        member.commit()
        if turn == 1:
            older_broker.kill(1)
            older_broker.start_node(1)
    world.check_effects(member)
    world.close()


@pytest.fixture(scope="module")
def three_brokers() -> Iterator[Any]:
    """Start a cluster of three brokers."""
    with start_broker(brokers=3) as cluster:
        yield cluster


def move_leaders(bootstrap: str, *topics: str) -> None:
    """Let another broker lead each partition of the given topics."""
    with open_admin(bootstrap) as admin:
        replicas = {
            TopicPartition(topic["name"], partition["partition_index"]): partition["replica_nodes"]
            for topic in admin.describe_topics(topics)
            for partition in topic["partitions"]
        }
        refusals_of = admin.alter_partition_reassignments({tp: [*of[1:], of[0]] for tp, of in replicas.items()})
        assert not any(refusals_of.values())
        wait_until(lambda: not admin.list_partition_reassignments(), "the new order of replicas")
        admin.elect_leaders(PREFERRED, list(topics))


def test_commits_succeed_after_leaders_and_coordinators_have_moved(three_brokers: Any) -> None:
    """The leaders of partitions and the coordinators of transactions and of the group move between commits."""
    name = f"events-{uuid.uuid4().hex[:8]}"
    ensure_topics(KafkaCluster(three_brokers.bootstrap), {name: {"num_partitions": 3}})
    delivery = Delivery(three_brokers.bootstrap, None, {name: 100_000}, name)
    turns = [(), (name,), ("__transaction_state",), ("__consumer_offsets",)]
    turns.append((name, "__transaction_state", "__consumer_offsets"))
    for turn, topics in enumerate(turns):
        if topics:
            move_leaders(three_brokers.bootstrap, *topics)
        for time_of_turn in range(2):
            state = [OutgoingMessage(0, name, None, b"%d" % turn, [], partition) for partition in range(3)]
            assert commit(delivery, state, 2 * turn + time_of_turn)
            assert not delivery.has_failed
    delivery.close()
    wait_for_transactions(three_brokers.bootstrap, name)
    assert sorted(int(r.value) for r in read_topic(three_brokers.bootstrap, name)) == sorted([*range(len(turns))] * 6)


@pytest.mark.slow
def test_commits_succeed_while_brokers_stop_and_start(three_brokers: Any) -> None:
    """Each of three brokers is stopped or killed once while two consumers commit continuously."""
    world = create_group(three_brokers.bootstrap, 6)
    members = [world.add_member(patience=60.0) for _ in range(2)]

    def live(member: Any) -> None:
        member.poll()
        member.commit()

    first, second = members
    with poll_in_background(lambda: live(second)):
        for node in (1, 2, 3):
            world.produce(60)
            wait_until(lambda: live(first) is None and world.has_consumed_all(first, second), "all messages")
            (three_brokers.stop_node if node == 2 else three_brokers.kill)(node)
            world.produce(60)
            wait_until(lambda: live(first) is None and world.has_consumed_all(first, second), "all messages without it")
            three_brokers.start_node(node)
    world.check_effects(*members)
    world.close()
