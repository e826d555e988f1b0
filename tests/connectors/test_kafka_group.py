"""Processes that share a topic: who may, who has which partition, and what becomes of the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from kafka import errors as refusals
from kafka.protocol.consumer.metadata import ConsumerProtocolSubscription

from connectors.kafka import KafkaSource, produce
from connectors.kafka.group import SameModelAssignor
from deformer_stream.errors import ConfigError, DeformerError
from deformer_stream.runtime.ports import PartitionState
from tests.connectors.kafka_members import MODES, Group, Member, following, of_each
from tests.connectors.kafka_world import numbered, until

pytestmark = pytest.mark.kafka


def refused(member: Member) -> str:
    """What a member says that the group does not take."""
    with pytest.raises(ConfigError) as caught:
        until(lambda: bool(member.turn()) and False, "a refusal")
    member.close()
    return str(caught.value)


# --- one model for all ------------------------------------------------------------------------------------------------


def test_another_model_is_refused_with_the_reason(group: Callable[..., Group]) -> None:
    world, ours, theirs = group(2), "b", "a"
    first = world.join(model=ours)
    first.settle_on(0, 1)
    with following(first.turn):
        said = refused(world.join(model=theirs))
        assert said == (
            f"the consumer group uses model {ours}, this process has model {theirs}: give both the same model, or "
            "choose another --group"
        )
        second = world.join(model=ours)
        until(lambda: bool(second.turn()) and len(second.source.assigned_partitions) == 1, "a share for the same model")
    assert len(first.source.assigned_partitions) == 1


def test_of_two_models_that_start_together_one_is_refused(group: Callable[..., Group]) -> None:
    world = group(4)
    members = [world.join(model=model) for model in "ab"]
    failed: dict[int, DeformerError] = {}
    served = threading.Event()

    def live(i: int) -> None:
        try:
            until(lambda: bool(members[i].turn()) and (served.is_set() or bool(failed)), "a refusal")
        except DeformerError as error:
            failed[i] = error
            members[i].close()

    threads = [threading.Thread(target=live, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failed) == 1
    ((loser, error),) = failed.items()
    assert isinstance(error, ConfigError)
    assert f"the consumer group uses model {'ab'[1 - loser]}" in str(error)
    members[1 - loser].settle_on(0, 1, 2, 3)


def test_a_model_is_changed_in_one_process_after_the_other(group: Callable[..., Group]) -> None:
    """Who holds partitions keeps them, whatever the model; newcomers may have that of any of these."""
    world = group(6)
    first = world.join(model="old")
    first.settle_on(*range(6))
    with following(first.turn):
        second = world.join(model="old")
        until(lambda: bool(second.turn()) and len(second.source.assigned_partitions) == 3, "3 + 3")
        first.source.model_fingerprint = "new"
        with following(second.turn):
            third = world.join(model="new")
            until(lambda: bool(third.turn()) and len(third.source.assigned_partitions) == 2, "2 + 2 + 2")
            with following(third.turn):
                assert "uses model" in refused(world.join(model="newer"))
            second.source.model_fingerprint = "new"
            third.close()
            assert "uses model new, this process has model old" in refused(world.join(model="old"))
            until(lambda: len(first.source.assigned_partitions) == len(second.source.assigned_partitions) == 3, "3 + 3 again")


# --- instances that keep their place ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "ending"), [(MODES[0], "closed"), (MODES[0], "killed"), (MODES[1], "killed")])
def test_an_instance_that_comes_back_has_its_partitions_and_moves_nobody(
    group: Callable[..., Group], mode: str, ending: str
) -> None:
    world = group(4, mode)
    world.produce(40)
    first, second = world.join("one"), world.join("two")
    with following(second.turn):
        until(lambda: bool(first.turn()) and len(first.source.assigned_partitions) == len(second.source.assigned_partitions) == 2, "2 + 2")
        world.produce(40)  # whoever had all partitions for a while may have read those before
        first.read(1)
        first.commit()
        ours, theirs = first.source.assigned_partitions, second.source.assigned_partitions
        moved = list(second.revoked)
        if ending == "closed":
            first.close()
        again = world.join("one")
        again.settle_on(*ours)
        again.commit()
        assert second.source.assigned_partitions == theirs
        assert second.revoked == moved
    until(lambda: bool(second.turn() and again.turn()) and world.consumed(second, again), "the rest")
    second.commit()
    again.commit()
    assert again.complete()
    assert second.complete()
    assert sum(world.positions().values()) == world.sent
    assert sorted(set(world.alerts())) == of_each(world.positions())
    assert world.mode == "at-least-once" or len(world.alerts()) == world.sent


@pytest.mark.parametrize(("mode", "events"), [(MODES[0], "events"), (MODES[0], "silence"), (MODES[1], "silence")])
def test_of_two_processes_with_one_name_the_older_is_told(
    group: Callable[..., Group], mode: str, events: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.kafka.source.CONFIRM_SECONDS", 1.0)
    world = group(2, mode)
    produce(world.bootstrap, world.topic, numbered(40))
    older = world.join("one")
    older.read(40)
    older.commit()
    newer = world.join("one")

    def live() -> None:
        newer.turn()
        newer.commit()

    with following(live):
        until(lambda: newer.source.assigned_partitions == {0, 1}, "the partitions")
        if events == "events":
            produce(world.bootstrap, world.topic, numbered(40, first=40))

        def told() -> bool:
            older.turn()
            older.commit()
            return False

        with pytest.raises(ConfigError, match="another process of the group uses this instance name: give each process its own"):
            until(told, "that there is another process")
        older.close()
        produce(world.bootstrap, world.topic, numbered(40, first=80))
        until(lambda: sum(world.positions().values()) == (120 if events == "events" else 80), "everything consumed")
    assert newer.complete()
    assert sorted(set(world.alerts())) == of_each(world.positions())
    assert world.mode == "at-least-once" or sorted(world.alerts()) == of_each(world.positions())


# --- partitions that move ---------------------------------------------------------------------------------------------


def test_a_partition_is_handed_over_with_its_state(either: Callable[..., Group]) -> None:
    """What the first has handled and never committed by itself is committed as it gives the partition up."""
    world = either(2)
    world.produce(40)
    first = world.join()
    first.read(40)
    second = world.join()
    with following(second.turn):
        until(lambda: bool(first.turn()) and len(second.live) == 1, "a share")
    (moved,) = second.live
    assert first.revoked == [moved]
    assert second.handled == []
    (begun,) = second.restored
    assert begun.snapshot is not None
    assert begun.committed_offset == world.positions()[moved] == len(second.seen[moved])
    world.check(first, second)


def test_a_partition_moves_while_a_commit_is_tried_again(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker refuses the commit because the group rebalances; what stays is committed afterwards, what went as it
    went."""
    world = group(2)
    world.produce(40)
    first = world.join()
    first.read(40)
    second = world.join()
    attempts: list[frozenset[int]] = []
    really = KafkaSource._try_to_commit

    def refuse(source: KafkaSource) -> None:
        if source is first.source and len(source.assigned_partitions) == 2:
            attempts.append(source.assigned_partitions)
            raise refusals.RebalanceInProgressError()
        really(source)

    monkeypatch.setattr(KafkaSource, "_try_to_commit", refuse)
    with following(second.turn):
        first.commit()
        assert attempts
        assert len(first.source.assigned_partitions) == 1
        until(lambda: bool(first.turn()) and len(second.live) == 1, "a share")
        assert len(first.revoked) == 1
        world.produce(40)
        until(lambda: bool(first.turn()) and world.consumed(first, second), "the rest")
    world.check(first, second)


def test_handing_over_has_a_deadline(group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that does not answer must not cost a process its place: no heartbeat goes out while it waits."""
    world = group(2)
    world.produce(40)
    first, second = world.join(session_seconds=6.0), world.join(session_seconds=6.0)
    first.read(40)
    hanging = threading.Event()
    monkeypatch.setattr(first.delivery._producer, "end", lambda: hanging.wait(30.0) or None)

    def live() -> None:
        first.turn()
        if first.revoked:
            first.commit()

    with following(second.turn):
        until(lambda: live() is None and len(second.live) == 1, "a share")
        hanging.set()
        assert len(first.revoked) == len(first.source.assigned_partitions) == 1, "it has kept the other"
        until(lambda: bool(second.handled), "they are repeated, for they were never committed")
    world.check(first, second)


def test_a_fault_of_ours_in_handing_over_is_no_fault_of_the_broker(group: Callable[..., Group]) -> None:
    """The client wraps what its listener raises; it must not be tried again until the patience is over."""
    world = group(2)
    world.produce(40)
    first, second = world.join(), world.join()
    first.read(40)

    def fail(partitions: frozenset[int]) -> dict[int, PartitionState]:
        raise ZeroDivisionError

    first.source.collect_state = fail
    with following(second.turn), pytest.raises(ZeroDivisionError):
        until(lambda: bool(first.turn()) and False, "the end")


def test_what_is_lost_is_neither_committed_nor_sent(either: Callable[..., Group]) -> None:
    """A process that was away for too long finds that others have done its work."""
    world = either(4)
    world.produce(40)
    first, second = world.join(), world.join()
    with following(second.turn):
        until(lambda: bool(first.turn()) and len(first.live) == len(second.live) == 2, "2 + 2")
        first.commit()
        world.produce(40)
        until(lambda: bool(first.turn()) and world.consumed(first, second), "the rest")
        ours = first.source.assigned_partitions
        world.abandon(first)  # it has handled messages that were never committed
        until(lambda: second.live == {0, 1, 2, 3} and world.consumed(second), "everything")
        first.commit()
        until(lambda: bool(first.turn()) and set(first.revoked) >= ours, "the loss reported")
        until(lambda: bool(first.turn()) and len(first.live) == len(second.live) == 2, "2 + 2 again")
        world.produce(40)
        until(lambda: bool(first.turn()) and world.consumed(first, second), "the rest")
    world.check(first, second)


def test_who_comes_back_claims_nothing(group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch) -> None:
    """Or two members would have a partition at once: who deals out partitions believes what members say they have."""
    world = group(4)
    member = world.join()
    member.settle_on(0, 1, 2, 3)
    said: list[list[int]] = []
    really = SameModelAssignor.metadata

    def metadata(assignor: SameModelAssignor, topics: set[str]) -> ConsumerProtocolSubscription:
        subscription = really(assignor, topics)
        said.append(sorted(p for claim in subscription.owned_partitions for p in claim.partitions))
        return subscription

    monkeypatch.setattr(SameModelAssignor, "metadata", metadata)
    world.abandon(member)
    until(lambda: bool(member.turn()) and sorted(member.revoked) == [0, 1, 2, 3], "the loss reported")
    member.settle_on(0, 1, 2, 3)
    assert said
    assert not any(said)


def test_from_one_to_four_and_back_while_events_flow(group: Callable[..., Group]) -> None:
    world = group(8)
    world.produce(200)
    stops = [threading.Event() for _ in range(4)]
    members: list[Member] = []
    failed: list[BaseException] = []

    def live(member: Member, stop: threading.Event, killed: bool) -> None:
        turns = 0
        try:
            while not stop.is_set():
                member.turn(0.05)
                assert member.complete()
                turns += 1
                member.commit(snapshots=[turns % 8])
            if killed:
                member.turn()
                world.abandon(member)
            else:
                member.commit(snapshots=range(8))
                member.close()
        except BaseException as error:
            failed.append(error)

    threads = []
    for i, stop in enumerate(stops):
        members.append(world.join(max_poll_records=50))
        threads.append(threading.Thread(target=live, args=(members[-1], stop, i == 2)))
        threads[-1].start()
        world.produce(100)
        share = 8 // (i + 1)
        until(lambda share=share: all(len(m.live) >= share for m in members) or bool(failed), f"{share} each")
        assert not failed
    for stop, thread in list(zip(stops, threads, strict=True))[:0:-1]:
        world.produce(100)
        stop.set()
        thread.join()
        until(
            lambda: sum(len(m.live) for m in members if not stops[members.index(m)].is_set()) == 8 or bool(failed), "8"
        )
        assert not failed
    until(lambda: world.consumed(members[0]) or bool(failed), "the rest")
    stops[0].set()
    threads[0].join()
    assert failed == []
    last = world.join()
    last.settle_on(*range(8))
    assert last.handled == []
    world.check(last)


def test_a_process_that_hangs_stops_nobody_for_long(group: Callable[..., Group]) -> None:
    """It is alive, for its client answers, and does not take part when partitions are to move."""
    world = group(2)
    quick = {"session_seconds": 6.0, "patience": 14.0}
    first, second = world.join(**quick), world.join(**quick)
    with following(second.turn):
        until(lambda: bool(first.turn()) and len(first.live) == len(second.live) == 1, "1 + 1")
    third = world.join(**quick)
    with following(third.turn):
        world.produce(40)
        until(lambda: bool(first.turn()) and len(third.live) == 1 and world.consumed(first, third), "everything")
        first.commit()
    world.check(first, third)
