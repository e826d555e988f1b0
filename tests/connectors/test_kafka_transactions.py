"""Transactions by our own requests: all is where it belongs, on older brokers too, and while brokers come and go."""

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

from connectors.kafka import Delivery, ensure_topics
from connectors.kafka.batches import OutgoingMessage
from connectors.kafka.transactions import Transactions
from tests.conftest import start_broker
from tests.connectors.kafka_members import Group, following
from tests.connectors.kafka_world import admin_of, read, settle, until

pytestmark = pytest.mark.kafka

PREFERRED = 0
Sent = dict[tuple[str, int], list[tuple[int, bytes]]]


def commit(delivery: Delivery, state: list[OutgoingMessage], position: int = 1, group: str = "nobody's") -> list[int]:
    """Commit what was put and `state` with a position of a group that has no members; offsets of `state`."""
    found: list[int] = []

    def offsets(sent: Callable[[], list[int]]) -> dict[TopicPartition, OffsetAndMetadata]:
        found.extend(sent())
        return {TopicPartition(state[0].topic, 0): OffsetAndMetadata(position, "", -1)}

    delivery.seal_pending()
    delivery.begin(delivery.transaction(state, offsets, ConsumerGroupMetadata(group, -1, "", None)))
    delivery.end()
    delivery.mark_committed()
    return found


def mixture(topics: list[str], count: int, dice: random.Random) -> list[OutgoingMessage]:
    """Messages of all sizes, for partitions in no order; each says who it is."""
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


def test_everything_is_where_it_was_said_to_be(
    kafka: SimpleNamespace, topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several topics and partitions, in many batches: in order, once, at the offsets that were told; and sequence
    numbers go on from commit to commit."""
    monkeypatch.setattr("connectors.kafka.batches.BATCH_BYTES", 3_000)
    monkeypatch.setattr("connectors.kafka.batches.REQUEST_BYTES", 9_000)
    dice, topics = random.Random(1), [topic(3) for _ in range(3)]  # noqa: S311
    delivery = Delivery(kafka.bootstrap, None, dict.fromkeys(topics, 100_000), topics[0])
    sent: Sent = defaultdict(list)
    for turn in range(6):
        state = mixture(topics, dice.choice([1, 20, 100]), dice)
        for m, offset in zip(state, commit(delivery, state, turn), strict=True):
            sent[m.topic, m.partition].append((offset, m.value))
    delivery.close()
    for name in topics:
        settle(kafka.bootstrap, name)
        found: Sent = defaultdict(list)
        for record in read(kafka.bootstrap, name):
            found[name, record.partition].append((record.offset, record.value))
        assert found == {to: messages for to, messages in sent.items() if to[0] == name}


def test_messages_are_what_those_of_other_clients_are(kafka: SimpleNamespace, topic: Callable[..., str]) -> None:
    """Partition by key, time, headers, nothing as a value."""
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
    settle(kafka.bootstrap, ours)
    written = {
        name: {r.key: (r.partition, r.value, r.headers) for r in read(kafka.bootstrap, name) if r.key is not None}
        for name in (ours, theirs)
    }
    assert written[ours] == written[theirs]
    assert written[ours].keys() == set(keys)
    assert all(began - 1 <= r.timestamp <= time.time() * 1000 + 1 for r in read(kafka.bootstrap, ours))


def test_sequence_numbers_begin_again_at_zero_after_the_largest(
    kafka: SimpleNamespace, topic: Callable[..., str]
) -> None:
    """After 2³¹ messages of one partition; here after ten."""
    name = topic(1)
    delivery = Delivery(kafka.bootstrap, None, {name: 100_000}, name)
    assert isinstance(delivery._producer, Transactions)
    delivery._producer._batch_builder._next_sequence[TopicPartition(name, 0)] = 2**31 - 10
    for _ in range(4):
        commit(delivery, [OutgoingMessage(0, name, None, b"%d" % i, [], 0) for i in range(8)])
    delivery.close()
    settle(kafka.bootstrap, name)
    assert [int(r.value) for r in read(kafka.bootstrap, name)] == [*range(8)] * 4


def test_commits_in_close_succession(kafka: SimpleNamespace, topic: Callable[..., str]) -> None:
    """The broker is still ending the one before when the next begins."""
    name = topic(2)
    delivery = Delivery(kafka.bootstrap, None, {name: 100_000}, name)
    for i in range(30):
        assert commit(delivery, [OutgoingMessage(0, name, None, b"%d" % i, [], i % 2)], i)
    delivery.close()
    settle(kafka.bootstrap, name)
    assert sorted(int(r.value) for r in read(kafka.bootstrap, name)) == [*range(30)]


def test_a_partition_that_comes_into_being_meanwhile(kafka: SimpleNamespace, topic: Callable[..., str]) -> None:
    """Brokers learn one after the other that there is a partition, and who leads it: the commit waits for that."""
    name = topic(1)
    delivery = Delivery(kafka.bootstrap, None, {name: 100_000}, name)
    with admin_of(kafka.bootstrap) as admin:
        creation = threading.Timer(0.3, lambda: admin.create_partitions({name: 2}))
        creation.start()
        assert commit(delivery, [OutgoingMessage(0, name, None, b"early", [], 1)]) == [0]
        creation.join()
    assert not delivery.has_failed
    delivery.close()
    settle(kafka.bootstrap, name)
    assert [(r.partition, r.value) for r in read(kafka.bootstrap, name)] == [(1, b"early")]


def test_two_that_have_one_name(kafka: SimpleNamespace, topic: Callable[..., str]) -> None:
    """The later one is in charge: the earlier one writes nothing more, in no transaction that is yet to begin."""
    name = topic(1)
    first, second = (Delivery(kafka.bootstrap, None, {name: 100_000}, name) for _ in range(2))
    with pytest.raises(refusals.ProducerFencedError):
        commit(first, [OutgoingMessage(0, name, None, b"first", [], 0)])
    assert first.has_failed
    commit(second, [OutgoingMessage(0, name, None, b"second", [], 0)])
    for delivery in (first, second):
        delivery.close()
    settle(kafka.bootstrap, name)
    assert [r.value for r in read(kafka.bootstrap, name)] == [b"second"]
    assert len(read(kafka.bootstrap, name, "read_uncommitted")) == 1


# --- brokers that change ----------------------------------------------------------------------------------------------


def group_on(bootstrap: str, partitions: int = 2) -> Group:
    name = f"events-{uuid.uuid4().hex[:8]}"
    ensure_topics(bootstrap, {name: {"num_partitions": partitions}})
    return Group(bootstrap, name, partitions)


@pytest.fixture
def older() -> Iterator[Any]:
    """A broker of a cluster that has not come to the second version of transactions (before Kafka 4)."""
    with start_broker(features={"transaction.version": 1}) as broker:
        yield broker


def test_on_an_older_broker_which_restarts_between_commits(older: Any) -> None:
    world = group_on(older.bootstrap)
    member = world.join(patience=60.0)
    for turn in range(3):
        world.produce(40)
        member.read(40 * (turn + 1))
        member.commit()
        if turn == 1:
            older.kill(1)
            older.start_node(1)
    world.check(member)
    world.close()


@pytest.fixture(scope="module")
def three() -> Iterator[Any]:
    with start_broker(brokers=3) as cluster:
        yield cluster


def move(bootstrap: str, *topics: str) -> None:
    """Another broker leads each partition of these topics, and does what goes with it, from now on."""
    with admin_of(bootstrap) as admin:
        replicas = {
            TopicPartition(topic["name"], partition["partition_index"]): partition["replica_nodes"]
            for topic in admin.describe_topics(topics)
            for partition in topic["partitions"]
        }
        refusals_of = admin.alter_partition_reassignments({tp: [*of[1:], of[0]] for tp, of in replicas.items()})
        assert not any(refusals_of.values())
        until(lambda: not admin.list_partition_reassignments(), "the new order of replicas")
        admin.elect_leaders(PREFERRED, list(topics))


def test_brokers_take_over_from_each_other(three: Any) -> None:
    """Who leads partitions, coordinates transactions, coordinates the group: each in its turn becomes another one
    between two commits, which is no reason for a commit to fail."""
    name = f"events-{uuid.uuid4().hex[:8]}"
    ensure_topics(three.bootstrap, {name: {"num_partitions": 3}})
    delivery = Delivery(three.bootstrap, None, {name: 100_000}, name)
    turns = [(), (name,), ("__transaction_state",), ("__consumer_offsets",)]
    turns.append((name, "__transaction_state", "__consumer_offsets"))
    for turn, topics in enumerate(turns):
        if topics:
            move(three.bootstrap, *topics)
        for time_of_turn in range(2):
            state = [OutgoingMessage(0, name, None, b"%d" % turn, [], partition) for partition in range(3)]
            assert commit(delivery, state, 2 * turn + time_of_turn)
            assert not delivery.has_failed
    delivery.close()
    settle(three.bootstrap, name)
    assert sorted(int(r.value) for r in read(three.bootstrap, name)) == sorted([*range(len(turns))] * 6)


@pytest.mark.slow
def test_leaders_and_coordinators_move(three: Any) -> None:
    """Each of three brokers goes once, in order or by a power cut, while two consumers commit without a pause; with it
    go leaders, and the coordinators of the group and of transactions."""
    world = group_on(three.bootstrap, 6)
    members = [world.join(patience=60.0) for _ in range(2)]

    def live(member: Any) -> None:
        member.turn()
        member.commit()

    first, second = members
    with following(lambda: live(second)):
        for node in (1, 2, 3):
            world.produce(60)
            until(lambda: live(first) is None and world.consumed(first, second), "all messages")
            (three.stop_node if node == 2 else three.kill)(node)
            world.produce(60)
            until(lambda: live(first) is None and world.consumed(first, second), "all messages without it")
            three.start_node(node)
    world.check(*members)
    world.close()
