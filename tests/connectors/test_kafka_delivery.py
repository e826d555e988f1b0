"""Tests of what is sent with a commit: all of it becomes visible together with the offsets, or nothing does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kafka.structs import ConsumerGroupMetadata

from connectors.kafka import Delivery, client
from connectors.kafka.delivery import make_transactional_id
from connectors.kafka.kafka_python_client import KafkaPythonConsumer, KafkaPythonProducer
from connectors.kafka.ports import (
    CommittedOffset,
    OutgoingMessage,
    ProducerFenced,
    RebalanceInProgress,
    TopicPartition,
)
from deformer_stream.errors import ConfigError, DeformerError, Unavailable
from tests.conftest import CLIENT_VARIABLE
from tests.connectors.kafka_groups import Group, Member, list_alert_keys, poll_in_background
from tests.connectors.kafka_helpers import read_topic, wait_for_transactions, wait_until

pytestmark = pytest.mark.kafka

Open = Callable[..., Delivery]


@pytest.fixture(autouse=True)
def client_of_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use kafka-python, because these tests replace functions of its consumer and producer."""
    monkeypatch.setenv(CLIENT_VARIABLE, "kafka-python")


@pytest.fixture
def opened() -> Iterator[list[Delivery]]:
    """Return a list of deliveries that are closed at the end of the test."""
    deliveries: list[Delivery] = []
    yield deliveries
    for delivery in deliveries:
        delivery.close()


def open_delivery(group: Group, opened: list[Delivery], name: str = "one") -> Delivery:
    """Open a delivery whose transactional id contains a name."""
    opened.append(group.open_delivery(name))
    return opened[-1]


def make_alert_message(group: Group, i: int, source: int = 0) -> OutgoingMessage:
    """Return a message of the alerts topic with number `i`, caused by partition `source`."""
    return OutgoingMessage(source, group.alerts_topic, b"key-%d" % source, b"%d" % i, [("source", b"%d" % source)])


def make_state_message(group: Group, i: int) -> OutgoingMessage:
    """Return a message of the state topic with number `i`."""
    return OutgoingMessage(0, group.state_topic, b"key", b"state %d" % i, [], 0)


def list_alert_values(group: Group, isolation: str = "read_committed") -> list[int]:
    """Return the values of all messages of the alerts topic."""
    return [int(record.value) for record in read_topic(group.bootstrap, group.alerts_topic, isolation)]


def send_and_mark_committed(group: Group, delivery: Delivery) -> None:
    """Send everything that was put and record that it is committed."""
    group.commit(delivery)
    delivery.mark_committed()
    wait_for_transactions(group.bootstrap, group.alerts_topic)


def test_messages_of_a_transaction_become_visible_at_its_end(
    group: Callable[..., Group], opened: list[Delivery]
) -> None:
    world = group()
    delivery = open_delivery(world, opened)
    for i in range(3):
        delivery.put(make_alert_message(world, i))

    def check_visibility() -> None:
        assert list_alert_values(world, "read_uncommitted") == [0, 1, 2], "the messages are in the log"
        assert list_alert_values(world) == [], "but they are not visible"
        assert world.read_positions() == {}

    assert world.commit(
        delivery, [make_state_message(world, 0), make_state_message(world, 1)], meanwhile=check_visibility
    ) == [0, 1]
    wait_for_transactions(world.bootstrap, world.alerts_topic)
    assert list_alert_values(world) == [0, 1, 2]
    assert [(r.offset, r.value) for r in read_topic(world.bootstrap, world.state_topic)] == [
        (0, b"state 0"),
        (1, b"state 1"),
    ]
    committed = world.read_committed()[0]
    assert (committed.offset, committed.metadata) == (7, "some metadata")


def test_messages_without_transaction_are_visible_immediately(
    group: Callable[..., Group], opened: list[Delivery]
) -> None:
    world = group(mode="at-least-once")
    delivery = open_delivery(world, opened)
    delivery.put(make_alert_message(world, 0))
    assert world.commit(delivery, [make_state_message(world, 0)]) == [0]
    assert list_alert_values(world) == [0]
    assert world.commit(delivery, [make_state_message(world, 1)]) == [1]
    assert list_alert_values(world) == [0, 0], "messages that are not committed are sent again"
    delivery.mark_committed()
    assert world.commit(delivery) == []
    assert list_alert_values(world) == [0, 0]


def test_messages_that_are_put_after_sending_belong_to_the_next_commit(
    either: Callable[..., Group], opened: list[Delivery]
) -> None:
    """The outcome of a commit may become known when there are more messages already."""
    world = either()
    delivery = open_delivery(world, opened)
    delivery.put(make_alert_message(world, 0))
    world.commit(delivery)
    delivery.put(make_alert_message(world, 1))
    delivery.mark_committed()
    send_and_mark_committed(world, delivery)
    assert list_alert_values(world) == [0, 1]


def commit_with_outdated_membership(world: Group, delivery: Delivery, opened: list[Delivery]) -> None:
    """Commit for a member that the group does not know."""
    world.commit(delivery, [make_state_message(world, 0)], ConsumerGroupMetadata(world.name, 999, "nobody", None))


def commit_with_closed_producer(world: Group, delivery: Delivery, opened: list[Delivery]) -> None:
    """Commit with connections that are closed."""
    assert delivery._producer is not None
    delivery._producer.close()
    world.commit(delivery, [make_state_message(world, 0)])


def commit_after_takeover(world: Group, delivery: Delivery, opened: list[Delivery]) -> None:
    """Commit while another process uses the same transactional id."""

    def take_over() -> None:
        other = open_delivery(world, opened)  # the same transactional id, as of a restarted process
        other.put(make_alert_message(world, 100))
        send_and_mark_committed(world, other)

    world.commit(delivery, [make_state_message(world, 0)], meanwhile=take_over)


@pytest.mark.parametrize(
    ("fail", "error"),
    [
        (commit_with_outdated_membership, RebalanceInProgress),
        (commit_with_closed_producer, DeformerError),
        (commit_after_takeover, ProducerFenced),
    ],
)
def test_messages_of_a_failed_transaction_are_sent_once_by_the_new_producer(
    group: Callable[..., Group],
    opened: list[Delivery],
    fail: Callable[[Group, Delivery, list[Delivery]], None],
    error: type[Exception],
) -> None:
    world = group()
    delivery = open_delivery(world, opened)
    for i in range(3):
        delivery.put(make_alert_message(world, i))
    with pytest.raises(error):
        fail(world, delivery, opened)
    assert delivery.has_failed
    with pytest.raises(Unavailable):  # a producer that has failed is not used again
        world.commit(delivery)
    delivery.renew_producer()
    assert not delivery.has_failed
    wait_for_transactions(world.bootstrap, world.alerts_topic)
    others = [value for value in list_alert_values(world) if value == 100]
    assert list_alert_values(world) == others, "no message of the failed transaction is visible"
    assert read_topic(world.bootstrap, world.state_topic) == []
    delivery.put(make_alert_message(world, 3))
    send_and_mark_committed(world, delivery)
    assert list_alert_values(world) == [*others, 0, 1, 2, 3]
    send_and_mark_committed(world, delivery)
    assert list_alert_values(world) == [*others, 0, 1, 2, 3]


@pytest.mark.parametrize("timeout", [0.2, None])
def test_commit_without_response_is_abandoned_with_its_thread(
    timeout: float | None, group: Callable[..., Group], opened: list[Delivery], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a request ignores its time limit, as in issue 5456 of librdkafka."""
    monkeypatch.setattr("connectors.kafka.delivery.ANSWER_SECONDS", 1.0 - client.DELIVERY_SECONDS)
    world = group()
    delivery = open_delivery(world, opened)
    delivery.put(make_alert_message(world, 0))
    before, go = threading.active_count(), threading.Event()
    delivery.seal_pending()
    no_membership = ConsumerGroupMetadata(world.name, -1, "", None)

    def hang(sent: list[int]) -> dict[TopicPartition, CommittedOffset]:
        go.wait(60.0)
        return {}

    delivery.begin(delivery.transaction([], hang, no_membership))
    with pytest.raises(Unavailable):
        delivery.end(timeout)
    delivery.renew_producer()
    send_and_mark_committed(world, delivery)
    go.set()
    wait_until(lambda: threading.active_count() <= before, "the end of the abandoned thread")
    assert list_alert_values(world) == [0]


def test_failed_producers_leave_no_threads(either: Callable[..., Group], opened: list[Delivery]) -> None:
    world = either()
    before = threading.active_count()
    delivery = open_delivery(world, opened)
    with_one = threading.active_count()
    for i in range(3):
        delivery.put(make_alert_message(world, i))
        world.commit(delivery)
        delivery.renew_producer()

    def ended() -> bool:
        time.sleep(0.05)
        return threading.active_count() <= with_one

    wait_until(ended, "the end of the producers that were renewed")
    delivery.close()
    delivery.close()
    wait_until(lambda: threading.active_count() <= before, "the end of the last producer")


def test_messages_of_revoked_partitions_are_dropped(either: Callable[..., Group], opened: list[Delivery]) -> None:
    world = either(3)
    delivery = open_delivery(world, opened)
    for i in range(6):
        delivery.put(make_alert_message(world, i, source=i % 3))
    delivery.drop_partitions([1, 7])
    send_and_mark_committed(world, delivery)
    assert sorted(list_alert_values(world)) == [0, 2, 3, 5]


def test_messages_of_revoked_partitions_are_dropped_from_a_failed_transaction(
    group: Callable[..., Group], opened: list[Delivery]
) -> None:
    """If a commit fails because partitions have moved, only the messages of the remaining partitions are sent again."""
    world = group(2)
    delivery = open_delivery(world, opened)
    for i in range(4):
        delivery.put(make_alert_message(world, i, source=i % 2))
    with pytest.raises(RebalanceInProgress):
        commit_with_outdated_membership(world, delivery, opened)
    delivery.drop_partitions([0])
    delivery.renew_producer()
    send_and_mark_committed(world, delivery)
    assert list_alert_values(world) == [1, 3]


def test_messages_keep_their_order(either: Callable[..., Group], opened: list[Delivery]) -> None:
    world = either(3)
    delivery = open_delivery(world, opened)
    for i in range(900):
        delivery.put(make_alert_message(world, i, source=i % 5))
        if i % 300 == 299:
            send_and_mark_committed(world, delivery)
    found: dict[bytes, list[int]] = {}
    for record in read_topic(world.bootstrap, world.alerts_topic):
        found.setdefault(record.key, []).append(int(record.value))
    assert found == {b"key-%d" % source: list(range(source, 900, 5)) for source in range(5)}


def test_message_that_is_too_large_is_rejected_by_put(either: Callable[..., Group], opened: list[Delivery]) -> None:
    world = either()
    delivery = open_delivery(world, opened)
    delivery.put(make_alert_message(world, 0))
    limit = world.max_bytes_by_topic[world.alerts_topic]
    with pytest.raises(ConfigError, match=r"too large for its topic: raise the topic's max.message.bytes"):
        delivery.put(make_alert_message(world, 1)._replace(value=b"x" * limit))
    largest = make_alert_message(world, 1)._replace(key=None, headers=[], value=b"1" * (limit - 200))
    delivery.put(largest)
    send_and_mark_committed(world, delivery)
    found = [record.value for record in read_topic(world.bootstrap, world.alerts_topic)]
    assert found == [b"0", largest.value]


# --- a commit whose answer got lost -----------------------------------------------------------------------------------


class LostResponse:
    """A failure of the last step of the next commit, which takes effect before it fails or not.

    Attributes:
        times: Number of failures that are left.
    """

    def __init__(self, member: Member, patch: pytest.MonkeyPatch, takes_effect: bool) -> None:
        self.times = 1
        last = "commit_transaction" if member.delivery.is_transactional else "commit"
        client: Any = KafkaPythonProducer if member.delivery.is_transactional else KafkaPythonConsumer
        original = getattr(client, last)

        def act(*args: Any, **options: Any) -> None:
            lost = self.times > 0
            self.times -= 1
            if takes_effect or not lost:
                original(*args, **options)
            if lost:
                raise Unavailable("no response")

        patch.setattr(client, last, act)


@pytest.mark.parametrize("takes_effect", [True, False], ids=["committed", "not-committed"])
def test_commit_whose_response_is_lost_takes_effect_once(
    either: Callable[..., Group], takes_effect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt finds out whether the commit took effect, and sends only the messages that were not
    committed.
    """
    world = either(2)
    world.produce(40)
    member = world.add_member()
    member.read(40)
    member.commit()
    world.produce(40)
    member.read(80)
    failure = LostResponse(member, monkeypatch, takes_effect)
    member.commit()
    assert failure.times <= 0
    once = world.mode == "exactly-once"
    assert sum(world.read_positions().values()) == 80
    if takes_effect or once:
        assert sorted(world.list_alerts()) == list_alert_keys(world.read_positions())
    else:
        assert set(world.list_alerts()) == set(list_alert_keys(world.read_positions())), (
            "repeated alerts have equal ids"
        )
    member.close()
    successor = world.add_member()
    successor.poll_until_assigned(0, 1)
    assert successor.is_state_complete()
    assert successor.handled_offsets == []


@pytest.mark.parametrize("takes_effect", [True, False], ids=["committed", "not-committed"])
def test_messages_without_new_offsets_are_sent_once(
    group: Callable[..., Group], takes_effect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a notice about alerts that were held back, when no further message has arrived."""
    world = group(2)
    world.produce(40)
    member = world.add_member()
    member.read(40)
    member.commit()
    failure = LostResponse(member, monkeypatch, takes_effect)
    member.delivery.put(OutgoingMessage(None, world.alerts_topic, b"notice", b"0", []))
    member.commit()
    assert failure.times <= 0
    member.commit()
    assert [record.key for record in read_topic(world.bootstrap, world.alerts_topic)].count(b"notice") == 1
    member.close()


@pytest.mark.parametrize("takes_effect", [True, False], ids=["committed", "not-committed"])
def test_revoked_partitions_whose_commit_has_no_response(
    group: Callable[..., Group], takes_effect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During a rebalance, the outcome is not checked. The next commit finds it out and sends what was written since."""
    world = group(2)
    world.produce(40)
    first = world.add_member()
    first.read(40)
    failure = LostResponse(first, monkeypatch, takes_effect)
    second = world.add_member()
    with poll_in_background(second.poll):
        wait_until(lambda: bool(first.poll()) and failure.times == 0, "the revocation")
        assert not first.delivery.has_failed, "no transaction is left open"
        world.produce(40)
        handled = len(first.handled_offsets)
        first.read(handled + 1)
        first.commit()
        wait_until(lambda: bool(first.poll()) and world.has_consumed_all(first, second), "all messages")
    world.check_effects(first, second)


def test_second_revocation_before_the_outcome_of_the_first_is_known(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first commit took effect, so its messages must not be sent again."""
    world = group(3)
    world.produce(60)
    first = world.add_member()
    first.read(60)
    failure = LostResponse(first, monkeypatch, takes_effect=True)
    second = world.add_member()
    with poll_in_background(second.poll):
        wait_until(lambda: bool(first.poll()) and failure.times == 0, "the first revocation")
        third = world.add_member()
        with poll_in_background(third.poll):
            wait_until(
                lambda: bool(first.poll()) and len(first.source.assigned_partitions) == 1, "the second revocation"
            )
            first.commit()
            wait_until(lambda: bool(first.poll()) and world.has_consumed_all(first, second, third), "all messages")
    world.check_effects(first, second, third)


# --- two processes with one transactional id --------------------------------------------------------------------------


def test_process_whose_transactional_id_is_used_by_another_one_ends(group: Callable[..., Group]) -> None:
    """Otherwise it would take the id back, and the two would abort each other's transactions."""
    world = group(2)
    world.produce(40)
    first = world.add_member()
    first.read(40)
    other = Delivery(world.cluster, world.max_bytes_by_topic, first.delivery._transactional_id)
    with pytest.raises(ProducerFenced, match="give each process its own --instance"):
        first.commit()
    world.commit(other, [make_state_message(world, 0)])  # the other one can still write
    other.close()


def test_transaction_that_the_broker_has_ended_is_repeated(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pause of the process, the broker has aborted its transaction, and refuses the producer as if another
    process had its id.
    """
    world = group(2)
    world.produce(40)
    member = world.add_member()
    member.read(40)
    original, refused = KafkaPythonProducer.send_offsets, []

    def refuse_once(*args: Any, **options: Any) -> None:
        if not refused:
            refused.append(True)
            time.sleep(1.1)  # longer than the time-out of the transaction
            raise ProducerFenced("another process writes under the same transactional id")
        original(*args, **options)

    monkeypatch.setattr(KafkaPythonProducer, "send_offsets", refuse_once)
    monkeypatch.setattr("connectors.kafka.delivery.TRANSACTION_SECONDS", 1.0)
    member.commit()
    assert refused
    monkeypatch.setattr("connectors.kafka.delivery.TRANSACTION_SECONDS", 30.0)
    world.check_effects(member)


@pytest.mark.usefixtures("client_library")
def test_process_that_paused_within_a_transaction_does_not_fence_its_successor(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process with the same instance name has taken over, while the old one was frozen for a long time."""
    monkeypatch.setattr("connectors.kafka.delivery.TRANSACTION_SECONDS", 2.0)
    world = group(2)
    world.produce(40)
    first = world.add_member("one")
    first.read(40)
    producer = first.delivery._producer
    assert producer is not None
    successors = []

    def freeze(*args: Any) -> None:
        """Let another process take over, as during a pause that is longer than the session."""
        time.sleep(2.1)  # longer than the time-out of the transaction
        successors.append(world.add_member("one"))
        successors[0].read(40)
        successors[0].commit()
        type(producer).send_offsets(producer, *args)

    monkeypatch.setattr(producer, "send_offsets", freeze)
    with pytest.raises(ConfigError, match="give each process its own --instance"):
        first.commit()
    (successor,) = successors
    world.produce(20)
    successor.read(60)
    world.check_effects(successor)


def test_transactional_ids_of_different_names_differ() -> None:
    names = [("a-b", "c"), ("a", "b-c"), ("a/b", "c"), ("a", "b/c"), ("a%2Fb", "c")]
    ids = {make_transactional_id("group", *pair) for pair in names}
    assert len(ids) == len(names)
    assert all(name.startswith("group/") for name in ids)
