"""Tests of commits in the background: the consumer continues, and later messages belong to the next commit."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from connectors.kafka.ports import Producer
from deformer_stream.errors import Unavailable
from tests.connectors.kafka_groups import Group, Member, get_client_classes, list_alert_keys, poll_in_background
from tests.connectors.kafka_helpers import wait_until

pytestmark = pytest.mark.kafka


class DelayedTransactions:
    """Transactions of this process whose last step waits.

    Attributes:
        go: Set it to let the transactions continue.
        failing: Number of transactions that fail.
        waiting: Is set when a transaction waits.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go, self.failing = threading.Event(), 0
        self.waiting = threading.Event()
        _, producer_class = get_client_classes()
        original_end = producer_class.commit_transaction

        def end_delayed(producer: Producer, timeout: float) -> None:
            self.waiting.set()
            assert self.go.wait(60.0), "the test must set the event `go`"
            if self.failing:
                self.failing -= 1
                raise Unavailable("no response")
            original_end(producer, timeout)

        patch.setattr(producer_class, "commit_transaction", end_delayed)


@pytest.fixture
def delayed(monkeypatch: pytest.MonkeyPatch) -> DelayedTransactions:
    """Return the control of transactions whose last step waits."""
    return DelayedTransactions(monkeypatch)


def begin_delayed_commit(member: Member, world: Group, delayed: DelayedTransactions) -> list[bool]:
    """Begin to commit forty messages, and wait until the transaction waits.

    Returns:
        A list to which True is appended when the commit has taken effect.
    """
    world.produce(40)
    member.read(len(member.handled_offsets) + 40)
    ended: list[bool] = []
    member.begin_commit(lambda: ended.append(True))
    assert delayed.waiting.wait(60.0)
    assert ended == []
    return ended


def test_messages_that_are_handled_during_a_commit_belong_to_the_next_one(
    group: Callable[..., Group], delayed: DelayedTransactions
) -> None:
    world = group(2)
    member = world.add_member()
    ended = begin_delayed_commit(member, world, delayed)
    before = sum(world.read_positions().values())
    world.produce(40)
    member.read(80)
    assert sum(world.read_positions().values()) == before, "nothing is committed yet"
    delayed.go.set()
    wait_until(lambda: bool(member.poll()) and ended == [True], "the end of the commit")
    at = world.read_positions()
    assert sum(at.values()) == 40
    assert sorted(world.list_alerts()) == list_alert_keys(at)
    member.commit()
    world.check_effects(member)


@pytest.mark.parametrize("by", ["poll", "commit"])
def test_failed_background_commit_is_repeated(
    group: Callable[..., Group], delayed: DelayedTransactions, by: str
) -> None:
    world = group(2)
    member = world.add_member()
    delayed.failing = 2
    begin_delayed_commit(member, world, delayed)
    world.produce(40)
    member.read(80)  # these do not belong to the commit in progress
    delayed.go.set()
    if by == "poll":
        wait_until(
            lambda: bool(member.poll()) and sum(world.read_positions().values()) == 40, "the commit of forty messages"
        )
        assert sorted(world.list_alerts()) == list_alert_keys(world.read_positions())
    else:
        member.commit()
        assert sum(world.read_positions().values()) == 80
    assert delayed.failing == 0
    world.check_effects(member)


def test_commit_in_progress_ends_before_partitions_are_handed_over(
    group: Callable[..., Group], delayed: DelayedTransactions
) -> None:
    """The group deals out partitions anew while a commit is under way: it ends, then what came since goes as well."""
    world = group(4)
    first = world.add_member()
    begin_delayed_commit(first, world, delayed)
    world.produce(40)
    first.read(80)
    second = world.add_member()
    threading.Timer(0.5, delayed.go.set).start()
    with poll_in_background(second.poll):
        wait_until(lambda: bool(first.poll()) and len(first.source.assigned_partitions) == 2, "the revocation")
        wait_until(lambda: bool(first.poll()) and world.has_consumed_all(first, second), "all messages")
    assert second.handled_offsets == [], "all handled messages were committed"
    world.check_effects(first, second)


def test_commit_of_a_killed_process_has_no_effect(group: Callable[..., Group], delayed: DelayedTransactions) -> None:
    world = group(2)
    first = world.add_member("one")
    begin_delayed_commit(first, world, delayed)
    world.produce(40)
    first.read(80)
    second = world.add_member("one")  # the next run of the same process; the first run does nothing more
    delayed.failing = 1
    delayed.go.set()
    second.read(80)
    second.commit()
    world.check_effects(second)


def test_commit_without_transactions_ends_immediately(group: Callable[..., Group]) -> None:
    world = group(2, mode="at-least-once")
    world.produce(40)
    member = world.add_member()
    member.read(40)
    ended: list[bool] = []
    member.begin_commit(lambda: ended.append(True))
    assert ended == [True]
    assert sum(world.read_positions().values()) == 40
    world.check_effects(member)
