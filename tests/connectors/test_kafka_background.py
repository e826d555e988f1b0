"""A commit that the broker is still at: the consumer goes on, and what it does meanwhile goes with the next one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from kafka import errors as refusals

from connectors.kafka.transactions import Transactions
from tests.connectors.kafka_members import Group, Member, following, of_each
from tests.connectors.kafka_world import until

pytestmark = pytest.mark.kafka


class Held:
    """Transactions of this process are committed when `go` is set, and fail as long as `failing` says."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go, self.failing = threading.Event(), 0
        self.waiting = threading.Event()
        really = Transactions.end

        def act(transactions: Transactions) -> None:
            self.waiting.set()
            assert self.go.wait(60.0), "the test lets it go"
            if self.failing:
                self.failing -= 1
                raise refusals.KafkaTimeoutError()
            really(transactions)

        patch.setattr(Transactions, "end", act)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


def begun(member: Member, world: Group, held: Held) -> list[bool]:
    """Forty messages are being committed, and wait; whether that has ended, once it has."""
    world.produce(40)
    member.read(len(member.handled) + 40)
    ended: list[bool] = []
    member.begin_commit(lambda: ended.append(True))
    assert held.waiting.wait(60.0)
    assert ended == []
    return ended


def test_the_consumer_goes_on_and_what_it_does_goes_with_the_next_commit(
    group: Callable[..., Group], held: Held
) -> None:
    world = group(2)
    member = world.join()
    ended = begun(member, world, held)
    before = sum(world.positions().values())
    world.produce(40)
    member.read(80)
    assert sum(world.positions().values()) == before, "nothing is committed yet"
    held.go.set()
    until(lambda: bool(member.turn()) and ended == [True], "the end of the commit")
    at = world.positions()
    assert sum(at.values()) == 40
    assert sorted(world.alerts()) == of_each(at)
    member.commit()
    world.check(member)


@pytest.mark.parametrize("by", ["poll", "commit"])
def test_a_commit_that_failed_is_tried_again(group: Callable[..., Group], held: Held, by: str) -> None:
    world = group(2)
    member = world.join()
    held.failing = 2
    begun(member, world, held)
    world.produce(40)
    member.read(80)  # these are not in it
    held.go.set()
    if by == "poll":
        until(lambda: bool(member.turn()) and sum(world.positions().values()) == 40, "the forty")
        assert sorted(world.alerts()) == of_each(world.positions())
    else:
        member.commit()
        assert sum(world.positions().values()) == 80
    assert held.failing == 0
    world.check(member)


def test_partitions_that_go_take_it_along(group: Callable[..., Group], held: Held) -> None:
    """The group deals out partitions anew while a commit is under way: it ends, then what came since goes as well."""
    world = group(4)
    first = world.join()
    begun(first, world, held)
    world.produce(40)
    first.read(80)
    second = world.join()
    threading.Timer(0.5, held.go.set).start()
    with following(second.turn):
        until(lambda: bool(first.turn()) and len(first.source.assigned_partitions) == 2, "the hand-over")
        until(lambda: bool(first.turn()) and world.consumed(first, second), "all messages")
    assert second.handled == [], "all that was handled was committed"
    world.check(first, second)


def test_nothing_of_it_is_seen_when_the_process_dies_meanwhile(group: Callable[..., Group], held: Held) -> None:
    world = group(2)
    first = world.join("one")
    begun(first, world, held)
    world.produce(40)
    first.read(80)
    second = world.join("one")  # its next life: the first does nothing more
    held.failing = 1
    held.go.set()
    second.read(80)
    second.commit()
    world.check(second)


def test_without_transactions_it_is_over_at_once(group: Callable[..., Group]) -> None:
    world = group(2, mode="at-least-once")
    world.produce(40)
    member = world.join()
    member.read(40)
    ended: list[bool] = []
    member.begin_commit(lambda: ended.append(True))
    assert ended == [True]
    assert sum(world.positions().values()) == 40
    world.check(member)
