"""What is sent with a commit: all of it becomes visible with the positions, or nothing does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kafka import KafkaConsumer, TopicPartition
from kafka import errors as refusals
from kafka.structs import ConsumerGroupMetadata, OffsetAndMetadata

from connectors.kafka import Delivery
from connectors.kafka.batches import OutgoingMessage
from connectors.kafka.transactions import Transactions
from deformer_stream.errors import ConfigError
from tests.connectors.kafka_members import Group, Member, following, of_each
from tests.connectors.kafka_world import read, settle, until

pytestmark = pytest.mark.kafka

Open = Callable[..., Delivery]


@pytest.fixture
def opened() -> Iterator[list[Delivery]]:
    """Deliveries to be closed with the test."""
    deliveries: list[Delivery] = []
    yield deliveries
    for delivery in deliveries:
        delivery.close()


def start(group: Group, opened: list[Delivery], name: str = "one") -> Delivery:
    opened.append(group.delivery(name))
    return opened[-1]


def message(group: Group, i: int, source: int = 0) -> OutgoingMessage:
    return OutgoingMessage(source, group.alerts_topic, b"key-%d" % source, b"%d" % i, [("source", b"%d" % source)])


def kept(group: Group, i: int) -> OutgoingMessage:
    return OutgoingMessage(0, group.state_topic, b"key", b"state %d" % i, [], 0)


def values(group: Group, isolation: str = "read_committed") -> list[int]:
    return [int(record.value) for record in read(group.bootstrap, group.alerts_topic, isolation)]


def deliver(group: Group, delivery: Delivery) -> None:
    group.commit(delivery)
    delivery.mark_committed()
    settle(group.bootstrap, group.alerts_topic)


def test_a_transaction_shows_nothing_before_its_end_and_everything_after(
    group: Callable[..., Group], opened: list[Delivery]
) -> None:
    world = group()
    delivery = start(world, opened)
    for i in range(3):
        delivery.put(message(world, i))

    def look() -> None:
        assert values(world, "read_uncommitted") == [0, 1, 2], "it is there"
        assert values(world) == [], "and cannot be seen"
        assert world.positions() == {}

    assert world.commit(delivery, [kept(world, 0), kept(world, 1)], meanwhile=look) == [0, 1]
    settle(world.bootstrap, world.alerts_topic)
    assert values(world) == [0, 1, 2]
    assert [(r.offset, r.value) for r in read(world.bootstrap, world.state_topic)] == [(0, b"state 0"), (1, b"state 1")]
    committed = world.committed()[0]
    assert (committed.offset, committed.metadata) == (7, "as said")


def test_without_transactions_what_is_transmitted_is_there(group: Callable[..., Group], opened: list[Delivery]) -> None:
    world = group(mode="at-least-once")
    delivery = start(world, opened)
    delivery.put(message(world, 0))
    assert world.commit(delivery, [kept(world, 0)]) == [0]
    assert values(world) == [0]
    assert world.commit(delivery, [kept(world, 1)]) == [1]
    assert values(world) == [0, 0], "what is not settled goes again"
    delivery.mark_committed()
    assert world.commit(delivery) == []
    assert values(world) == [0, 0]


def test_what_is_put_after_the_transmission_is_not_settled_with_it(
    either: Callable[..., Group], opened: list[Delivery]
) -> None:
    """The answer to a commit may come, or be found out, when there is more to send already."""
    world = either()
    delivery = start(world, opened)
    delivery.put(message(world, 0))
    world.commit(delivery)
    delivery.put(message(world, 1))
    delivery.mark_committed()
    deliver(world, delivery)
    assert values(world) == [0, 1]


def stale_group(world: Group, delivery: Delivery, opened: list[Delivery]) -> None:
    world.commit(delivery, [kept(world, 0)], ConsumerGroupMetadata(world.name, 999, "nobody", None))


def closed_producer(world: Group, delivery: Delivery, opened: list[Delivery]) -> None:
    assert isinstance(delivery._producer, Transactions)
    delivery._producer.close()
    world.commit(delivery, [kept(world, 0)])


def fenced(world: Group, delivery: Delivery, opened: list[Delivery]) -> None:
    def take_over() -> None:
        other = start(world, opened)  # the same name: a successor of this process, or a misconfigured neighbour
        other.put(message(world, 100))
        deliver(world, other)

    world.commit(delivery, [kept(world, 0)], meanwhile=take_over)


@pytest.mark.parametrize(
    ("fail", "error"),
    [
        (stale_group, refusals.CommitFailedError),
        (closed_producer, refusals.KafkaConnectionError),
        (fenced, refusals.ProducerFencedError),
    ],
)
def test_a_failed_transaction_shows_nothing_and_is_sent_once_after_renewal(
    group: Callable[..., Group],
    opened: list[Delivery],
    fail: Callable[[Group, Delivery, list[Delivery]], None],
    error: type[Exception],
) -> None:
    world = group()
    delivery = start(world, opened)
    for i in range(3):
        delivery.put(message(world, i))
    with pytest.raises(error):
        fail(world, delivery, opened)
    assert delivery.has_failed
    with pytest.raises(refusals.KafkaError):  # a producer that has failed is not used again
        world.commit(delivery)
    delivery.renew_producer()
    assert not delivery.has_failed
    settle(world.bootstrap, world.alerts_topic)
    others = [value for value in values(world) if value == 100]
    assert values(world) == others, "of the failed transaction nothing can be seen"
    assert read(world.bootstrap, world.state_topic) == []
    delivery.put(message(world, 3))
    deliver(world, delivery)
    assert values(world) == [*others, 0, 1, 2, 3]
    deliver(world, delivery)
    assert values(world) == [*others, 0, 1, 2, 3]


def test_a_commit_that_does_not_come_back_is_left_behind(group: Callable[..., Group], opened: list[Delivery]) -> None:
    """A broker may be silent for ever. Who does not wait for it any longer is rid of it, and so is the thread."""
    world = group()
    delivery = start(world, opened)
    delivery.put(message(world, 0))
    before, go = threading.active_count(), threading.Event()
    delivery.seal_pending()
    stranger = ConsumerGroupMetadata(world.name, -1, "", None)

    def hang(sent: Callable[[], list[int]]) -> dict[TopicPartition, OffsetAndMetadata]:
        go.wait(60.0)
        return {}

    delivery.begin(delivery.transaction([], hang, stranger))
    with pytest.raises(refusals.KafkaTimeoutError):
        delivery.end(timeout=0.2)
    delivery.renew_producer()
    deliver(world, delivery)
    go.set()
    until(lambda: threading.active_count() <= before, "the end of the one that was left behind")
    assert values(world) == [0]


def test_producers_that_failed_leave_no_threads(either: Callable[..., Group], opened: list[Delivery]) -> None:
    world = either()
    before = threading.active_count()
    delivery = start(world, opened)
    with_one = threading.active_count()
    for i in range(3):
        delivery.put(message(world, i))
        world.commit(delivery)
        delivery.renew_producer()

    def ended() -> bool:
        time.sleep(0.05)
        return threading.active_count() <= with_one

    until(ended, "the end of the producers that were renewed")
    delivery.close()
    delivery.close()
    until(lambda: threading.active_count() <= before, "the end of the last producer")


def test_messages_of_partitions_that_moved_are_forgotten(either: Callable[..., Group], opened: list[Delivery]) -> None:
    world = either(3)
    delivery = start(world, opened)
    for i in range(6):
        delivery.put(message(world, i, source=i % 3))
    delivery.drop_partitions([1, 7])
    deliver(world, delivery)
    assert sorted(values(world)) == [0, 2, 3, 5]


def test_messages_of_a_failed_transaction_are_forgotten_too(
    group: Callable[..., Group], opened: list[Delivery]
) -> None:
    """A commit fails because partitions have moved: the others' messages are sent again, theirs are not."""
    world = group(2)
    delivery = start(world, opened)
    for i in range(4):
        delivery.put(message(world, i, source=i % 2))
    with pytest.raises(refusals.CommitFailedError):
        stale_group(world, delivery, opened)
    delivery.drop_partitions([0])
    delivery.renew_producer()
    deliver(world, delivery)
    assert values(world) == [1, 3]


def test_order_is_kept(either: Callable[..., Group], opened: list[Delivery]) -> None:
    world = either(3)
    delivery = start(world, opened)
    for i in range(900):
        delivery.put(message(world, i, source=i % 5))
        if i % 300 == 299:
            deliver(world, delivery)
    found: dict[bytes, list[int]] = {}
    for record in read(world.bootstrap, world.alerts_topic):
        found.setdefault(record.key, []).append(int(record.value))
    assert found == {b"key-%d" % source: list(range(source, 900, 5)) for source in range(5)}


def test_too_large_a_message_is_refused_when_it_is_put(either: Callable[..., Group], opened: list[Delivery]) -> None:
    world = either()
    delivery = start(world, opened)
    delivery.put(message(world, 0))
    limit = world.limits[world.alerts_topic]
    with pytest.raises(ConfigError, match=r"too large for its topic: raise the topic's max.message.bytes"):
        delivery.put(message(world, 1)._replace(value=b"x" * limit))
    largest = message(world, 1)._replace(key=None, headers=[], value=b"1" * (limit - 200))
    delivery.put(largest)
    deliver(world, delivery)
    found = [record.value for record in read(world.bootstrap, world.alerts_topic)]
    assert found == [b"0", largest.value]


# --- a commit whose answer got lost -----------------------------------------------------------------------------------


class LostAnswer:
    """The last step of a member's commit, in its mode, fails the next time; it takes effect before that or not."""

    def __init__(self, member: Member, patch: pytest.MonkeyPatch, takes_effect: bool) -> None:
        self.times = 1
        last = "end" if member.delivery.is_transactional else "commit"
        client: Any = Transactions if member.delivery.is_transactional else KafkaConsumer
        really = getattr(client, last)

        def act(*args: Any, **options: Any) -> None:
            lost = self.times > 0
            self.times -= 1
            if takes_effect or not lost:
                really(*args, **options)
            if lost:
                raise refusals.KafkaTimeoutError()

        patch.setattr(client, last, act)


@pytest.mark.parametrize("takes_effect", [True, False], ids=["committed", "not-committed"])
def test_a_commit_without_an_answer(
    either: Callable[..., Group], takes_effect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt finds out whether it took effect, and sends again only what did not."""
    world = either(2)
    world.produce(40)
    member = world.join()
    member.read(40)
    member.commit()
    world.produce(40)
    member.read(80)
    answers = LostAnswer(member, monkeypatch, takes_effect)
    member.commit()
    assert answers.times <= 0
    once = world.mode == "exactly-once"
    assert sum(world.positions().values()) == 80
    if takes_effect or once:
        assert sorted(world.alerts()) == of_each(world.positions())
    else:
        assert set(world.alerts()) == set(of_each(world.positions())), "with equal ids"
    member.close()
    successor = world.join()
    successor.settle_on(0, 1)
    assert successor.complete()
    assert successor.handled == []


@pytest.mark.parametrize("takes_effect", [True, False], ids=["committed", "not-committed"])
def test_handing_over_without_an_answer(
    group: Callable[..., Group], takes_effect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for an answer while the group rebalances. It is found out with the next commit, and what was written
    since then goes out as well."""
    world = group(2)
    world.produce(40)
    first = world.join()
    first.read(40)
    answers = LostAnswer(first, monkeypatch, takes_effect)
    second = world.join()
    with following(second.turn):
        until(lambda: bool(first.turn()) and answers.times == 0, "the hand-over")
        assert not first.delivery.has_failed, "nobody has to wait for what it left open"
        world.produce(40)
        handled = len(first.handled)
        first.read(handled + 1)
        first.commit()
        until(lambda: bool(first.turn()) and world.consumed(first, second), "all messages")
    world.check(first, second)


def test_handing_over_again_before_it_is_known_how_the_first_time_went(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took effect: what was sent with it must not be sent again."""
    world = group(3)
    world.produce(60)
    first = world.join()
    first.read(60)
    answers = LostAnswer(first, monkeypatch, takes_effect=True)
    second = world.join()
    with following(second.turn):
        until(lambda: bool(first.turn()) and answers.times == 0, "the first hand-over")
        third = world.join()
        with following(third.turn):
            until(lambda: bool(first.turn()) and len(first.source.assigned_partitions) == 1, "the second hand-over")
            first.commit()
            until(lambda: bool(first.turn()) and world.consumed(first, second, third), "all messages")
    world.check(first, second, third)
