"""Tests of processes that share a topic: admission of members, assignment and revocation of partitions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor

from connectors.kafka import KafkaSource, ensure_topics, produce
from connectors.kafka.client import HEARTBEAT_SECONDS
from connectors.kafka.membership import GroupMembership
from connectors.kafka.ports import CommittedOffset, KafkaCluster, RebalanceInProgress, TopicPartition
from connectors.kafka.state import make_model_metadata
from deformer_stream.errors import ConfigError, DeformerError
from deformer_stream.runtime.ports import PartitionState, SourceCallbacks
from tests.conftest import make_cluster, start_broker
from tests.connectors.kafka_groups import MODES, Group, Member, list_alert_keys, poll_in_background
from tests.connectors.kafka_helpers import TIMEOUT_SECONDS, make_messages, wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("client_library")]


def get_refusal(world: Group, model: str) -> str:
    """Return the error of a process with a model that the group refuses."""
    with pytest.raises(ConfigError) as caught:
        world.add_member(model=model)
    return str(caught.value)


# --- one model for all ------------------------------------------------------------------------------------------------


def test_process_with_another_model_is_refused(group: Callable[..., Group]) -> None:
    world, ours, theirs = group(2), "b", "a"
    first = world.add_member(model=ours)
    first.poll_until_assigned(0, 1)
    first.commit()
    with poll_in_background(first.poll):
        said = get_refusal(world, theirs)
        assert said == (
            f"the consumer group uses model {ours}, this process has model {theirs}: give both the same model, or "
            "choose another --group"
        )
        assert first.source.assigned_partitions == {0, 1}
        second = world.add_member(model=ours)
        wait_until(
            lambda: bool(second.poll()) and len(second.source.assigned_partitions) == 1,
            "an assignment for the same model",
        )
    assert len(first.source.assigned_partitions) == 1


def test_process_with_another_model_that_has_joined_already_is_refused(group: Callable[..., Group]) -> None:
    """When it joined, no offset was committed yet that would have stated the model of the group."""
    world = group(4)
    first, second = world.add_member(model="a"), world.add_member(model="b")
    first.poll_until_assigned(0, 1, 2, 3)
    first.commit()
    with poll_in_background(first.poll), pytest.raises(ConfigError, match="the consumer group uses model a"):
        wait_until(lambda: bool(second.poll()) and False, "a refusal")
    second.close()
    first.poll_until_assigned(0, 1, 2, 3)


def test_one_of_two_models_that_start_a_group_together_stays(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both get partitions before either has committed an offset, which would have stated its model.

    The broker of the tests does not wait for further members before it assigns partitions. So the model in the offset
    that the first process commits when it gives partitions up is hidden.
    """
    monkeypatch.setattr("connectors.kafka.restore.parse_model", lambda metadata: "")
    monkeypatch.setattr("connectors.kafka.source.CONFIRM_SECONDS", 0.2)
    monkeypatch.setattr("connectors.kafka.membership.NEW_GROUP_SECONDS", 3.0)
    world = group(4)
    members = {model: world.add_member(model=model) for model in ("a", "b")}

    def poll_all() -> bool:
        for member in members.values():
            member.poll()
        return all(len(member.source.assigned_partitions) == 2 for member in members.values())

    wait_until(poll_all, "partitions for both")
    owner = next(model for model, member in members.items() if 0 in member.source.assigned_partitions)
    other = "ab".replace(owner, "")

    def turn(model: str) -> bool:
        members[model].poll()
        members[model].commit()
        return False

    def keep_going() -> None:
        turn(owner)

    with poll_in_background(keep_going):
        with pytest.raises(ConfigError, match=f"the consumer group uses model {owner}, this process has model {other}"):
            wait_until(lambda: turn(other), "a refusal")
        members[other].close()
        wait_until(lambda: len(members[owner].source.assigned_partitions) == 4, "all partitions for the other one")


@pytest.mark.parametrize("ending", ["refused", "changed as well", "changed back"])
def test_a_new_group_may_change_its_model_at_once(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    """The owner of the first partition has read a new model before this process, which gets time to do so as well."""
    monkeypatch.setattr("connectors.kafka.membership.NEW_GROUP_SECONDS", 0.0)
    first = TopicPartition("t", 0)
    committed: dict[TopicPartition, CommittedOffset | None] = {first: None, TopicPartition("t", 1): None}
    consumer: Any = SimpleNamespace(membership=object(), fetch_committed=lambda tps, timeout: committed)
    commits: Any = SimpleNamespace(model="a")
    membership = GroupMembership(consumer, commits, KafkaCluster("b:9092"), "t", 2, "g", None, lambda: None)
    membership.note_new_group()
    committed[first] = CommittedOffset(7, make_model_metadata("b", 2))
    membership.check_new_group()
    if ending == "refused":
        with pytest.raises(ConfigError, match="the consumer group uses model b, this process has model a"):
            membership.check_new_group()
        return
    if ending == "changed as well":
        commits.model = "b"
    else:
        committed[first] = CommittedOffset(8, make_model_metadata("a", 2))
    for _ in range(3):
        membership.check_new_group()


def test_group_whose_processes_have_ended_takes_another_model(group: Callable[..., Group]) -> None:
    world = group(2)
    first = world.add_member(model="a")
    first.poll_until_assigned(0, 1)
    first.commit()
    first.close()
    world.add_member(model="b").poll_until_assigned(0, 1)


def test_model_can_be_changed_in_one_process_after_the_other(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that own partitions keep them with any model. A new one may have the model of any of them."""
    monkeypatch.setattr("connectors.kafka.source.CONFIRM_SECONDS", 0.0)
    world = group(6)
    first = world.add_member(model="old")
    first.poll_until_assigned(*range(6))
    first.commit()

    def turn(member: Member) -> None:
        member.poll()
        member.commit()

    with poll_in_background(lambda: turn(first)):
        second = world.add_member(model="old")
        wait_until(lambda: turn(second) is None and len(second.source.assigned_partitions) == 3, "3 + 3")
        first.source.set_model_fingerprint("new")
        with poll_in_background(lambda: turn(second)):
            wait_until(lambda: world.read_models() == {"new", "old"}, "commits with both models")
            third = world.add_member(model="new")
            wait_until(lambda: turn(third) is None and len(third.source.assigned_partitions) == 2, "2 + 2 + 2")
            with poll_in_background(lambda: turn(third)):
                assert "uses model" in get_refusal(world, "newer")
            second.source.set_model_fingerprint("new")
            third.close()
            wait_until(
                lambda: len(first.source.assigned_partitions) == len(second.source.assigned_partitions) == 3,
                "3 + 3 again",
            )
            wait_until(lambda: world.read_models() == {"new"}, "commits with the new model")
            assert "uses model new, this process has model old" in get_refusal(world, "old")


# --- instances that keep their place ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "ending"), [(MODES[0], "closed"), (MODES[0], "killed"), (MODES[1], "killed")])
def test_restarted_instance_keeps_its_partitions(group: Callable[..., Group], mode: str, ending: str) -> None:
    world = group(4, mode)
    world.produce(40)
    first, second = world.add_member("one"), world.add_member("two")
    with poll_in_background(second.poll):
        wait_until(
            lambda: (
                bool(first.poll())
                and len(first.source.assigned_partitions) == len(second.source.assigned_partitions) == 2
            ),
            "2 + 2",
        )
        world.produce(40)  # the messages before may have been read by the member that first had all partitions
        first.read(1)
        first.commit()
        ours, theirs = first.source.assigned_partitions, second.source.assigned_partitions
        moved = list(second.revoked)
        if ending == "closed":
            first.close()
        again = world.add_member("one")
        again.poll_until_assigned(*ours)
        again.commit()
        assert second.source.assigned_partitions == theirs
        assert second.revoked == moved
    wait_until(
        lambda: bool(second.poll() and again.poll()) and world.has_consumed_all(second, again), "the remaining messages"
    )
    second.commit()
    again.commit()
    assert again.is_state_complete()
    assert second.is_state_complete()
    assert sum(world.read_positions().values()) == world.num_sent
    assert sorted(set(world.list_alerts())) == list_alert_keys(world.read_positions())
    assert world.mode == "at-least-once" or len(world.list_alerts()) == world.num_sent


def test_restart_with_another_topic_reads_that_topic(group: Callable[..., Group]) -> None:
    """Kafka gives a process the partitions of its predecessor, which are those of the previous topic."""
    former, world = group(2), group(2)
    world.name = former.name
    former.produce(20)
    world.produce(30)
    first = former.add_member("one", session_seconds=60.0)
    first.read(20)
    first.commit()
    first.close()
    second = world.add_member("one", session_seconds=60.0)
    second.read(30)
    second.commit()
    assert second.source.assigned_partitions == {0, 1}
    world.check_effects(second)
    assert sum(former.read_positions().values()) == 20


@pytest.mark.parametrize("instance", [None, "two"])
def test_restart_within_a_rebalance_leaves_no_partition_without_a_member(
    group: Callable[..., Group], instance: str | None
) -> None:
    """A process is killed after it was asked to give up a partition, and before the group could assign it to another.

    The group gives its successor the partitions that it was to keep, without a rebalance.
    """
    world = group(3)
    world.produce(30)
    first = world.add_member("one", session_seconds=60.0)
    first.poll_until_assigned(0, 1, 2)
    first.read(30)
    first.commit()
    is_asked, may_end = threading.Event(), threading.Event()

    def hang(partitions: frozenset[int]) -> dict[int, PartitionState]:
        """Take part in nothing any more, like a process that was killed."""
        is_asked.set()
        may_end.wait()
        raise RebalanceInProgress("the test is over")

    def poll_until_asked() -> None:
        with suppress(DeformerError):
            while not may_end.is_set():
                first.poll()

    first.source.set_callbacks(SourceCallbacks(hang))
    thread = threading.Thread(target=poll_until_asked)
    thread.start()
    try:
        second = world.add_member(instance, session_seconds=60.0)
        with poll_in_background(second.poll):
            assert is_asked.wait(TIMEOUT_SECONDS)
            assert second.source.assigned_partitions == set()
            again = world.add_member("one", session_seconds=60.0)
            wait_until(
                lambda: (
                    bool(again.poll())
                    and again.source.assigned_partitions | second.source.assigned_partitions == {0, 1, 2}
                ),
                "an owner of each partition",
            )
            assert len(again.source.assigned_partitions) + len(second.source.assigned_partitions) == 3
            world.produce(30)
            wait_until(lambda: bool(again.poll()) and world.has_consumed_all(second, again), "all messages")
        world.check_effects(again, second)
    finally:
        may_end.set()
        thread.join()


@pytest.mark.parametrize(("mode", "events"), [(MODES[0], "events"), (MODES[0], "silence"), (MODES[1], "silence")])
def test_older_of_two_processes_with_one_instance_name_ends(
    group: Callable[..., Group], mode: str, events: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.kafka.source.CONFIRM_SECONDS", 1.0)
    world = group(2, mode)
    produce(world.cluster, world.topic, make_messages(40))
    older = world.add_member("one")
    older.read(40)
    older.commit()
    newer = world.add_member("one")

    def poll_and_commit() -> None:
        newer.poll()
        newer.commit()

    with poll_in_background(poll_and_commit):
        wait_until(lambda: newer.source.assigned_partitions == {0, 1}, "the partitions")
        if events == "events":
            produce(world.cluster, world.topic, make_messages(40, first=40))

        def poll_older() -> bool:
            older.poll()
            older.commit()
            return False

        with pytest.raises(
            ConfigError,
            match=r"another process .* this instance name|the same transactional id: give each process its own",
        ):
            wait_until(poll_older, "an error because of the other process")
        older.close()
        produce(world.cluster, world.topic, make_messages(40, first=80))
        wait_until(
            lambda: sum(world.read_positions().values()) == (120 if events == "events" else 80), "everything consumed"
        )
    assert newer.is_state_complete()
    assert sorted(set(world.list_alerts())) == list_alert_keys(world.read_positions())
    assert world.mode == "at-least-once" or sorted(world.list_alerts()) == list_alert_keys(world.read_positions())


def test_only_process_of_an_instance_name_joins_again_after_an_outage(client_library: str) -> None:
    """It waits during the outage, for example for a commit, without polling, so that its session times out."""
    with start_broker() as broker:
        topic = "events"
        ensure_topics(make_cluster(broker.bootstrap), {topic: {"num_partitions": 2}})
        world = Group(broker.bootstrap, topic, 2, MODES[1])
        member = world.add_member("one", session_seconds=6.0, patience=120.0)
        world.produce(40)
        member.read(40)
        member.commit()
        broker.kill(1)
        if client_library == "librdkafka":
            consumer: Any = member.source._consumer
            wait_until(lambda: consumer._client.memberid() is None, "the end of the session")
        broker.start_node(1)
        time.sleep(1.5 * HEARTBEAT_SECONDS)  # the outcome must be the same without it
        world.produce(40)
        member.read(80)
        world.check_effects(member)
        world.close()


# --- partitions that move ---------------------------------------------------------------------------------------------


def test_revoked_partition_is_committed_with_its_state(either: Callable[..., Group]) -> None:
    """Messages that the first member has handled but not committed are committed when the partition is revoked."""
    world = either(2)
    world.produce(40)
    first = world.add_member()
    first.read(40)
    second = world.add_member()
    with poll_in_background(second.poll):
        wait_until(lambda: bool(first.poll()) and len(second.caught_up) == 1, "an assignment")
    (moved,) = second.caught_up
    assert first.revoked == [moved]
    assert second.handled_offsets == []
    (state,) = second.restored
    assert state.snapshot is not None
    assert state.committed_offset == world.read_positions()[moved] == len(second.seen_offsets[moved])
    world.check_effects(first, second)


def test_partition_is_revoked_while_a_commit_is_repeated(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker refuses the commit during the rebalance. The remaining partitions are committed afterwards."""
    world = group(2)
    world.produce(40)
    first = world.add_member()
    first.read(40)
    second = world.add_member()
    attempts: list[frozenset[int]] = []
    original = KafkaSource._try_to_commit

    def refuse(source: KafkaSource) -> None:
        if source is first.source and len(source.assigned_partitions) == 2:
            attempts.append(source.assigned_partitions)
            raise RebalanceInProgress("refused")
        original(source)

    monkeypatch.setattr(KafkaSource, "_try_to_commit", refuse)
    with poll_in_background(second.poll):
        first.commit()
        assert attempts
        assert len(first.source.assigned_partitions) == 1
        wait_until(lambda: bool(first.poll()) and len(second.caught_up) == 1, "an assignment")
        assert len(first.revoked) == 1
        world.produce(40)
        wait_until(lambda: bool(first.poll()) and world.has_consumed_all(first, second), "the remaining messages")
    world.check_effects(first, second)


def test_commit_of_revoked_partitions_has_a_deadline(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No heartbeat is sent during that commit, so a broker without response must not cost the process its
    membership.
    """
    world = group(2)
    world.produce(40)
    first = world.add_member(session_seconds=6.0)
    first.read(40)
    second = world.add_member(session_seconds=6.0)  # with librdkafka, it joins the group before its first poll
    hanging = threading.Event()
    monkeypatch.setattr(first.delivery._producer, "commit_transaction", lambda timeout: hanging.wait(30.0) or None)

    def poll_first() -> None:
        first.poll()
        if first.revoked:
            first.commit()

    with poll_in_background(second.poll):
        wait_until(lambda: poll_first() is None and len(second.caught_up) == 1, "an assignment")
        hanging.set()
        assert len(first.revoked) == len(first.source.assigned_partitions) == 1, "the other partition is kept"
        wait_until(lambda: bool(second.handled_offsets), "the messages again, because they were not committed")
    world.check_effects(first, second)


def test_exception_of_collect_state_is_raised(group: Callable[..., Group]) -> None:
    """Exceptions of the pipeline must not be treated as failures of the broker and retried."""
    world = group(2)
    world.produce(40)
    first = world.add_member()
    first.read(40)
    second = world.add_member()

    def fail(partitions: frozenset[int]) -> dict[int, PartitionState]:
        raise ZeroDivisionError

    first.source.set_callbacks(SourceCallbacks(fail))
    with poll_in_background(second.poll), pytest.raises(ZeroDivisionError):
        wait_until(lambda: bool(first.poll()) and False, "the end")


def test_lost_partitions_are_neither_committed_nor_written(either: Callable[..., Group]) -> None:
    """A process that did not respond for too long has lost its partitions to other members."""
    world = either(4)
    world.produce(40)
    first, second = world.add_member(), world.add_member()
    with poll_in_background(second.poll):
        wait_until(lambda: bool(first.poll()) and len(first.caught_up) == len(second.caught_up) == 2, "2 + 2")
        first.commit()
        world.produce(40)
        wait_until(lambda: bool(first.poll()) and world.has_consumed_all(first, second), "the remaining messages")
        ours = first.source.assigned_partitions
        world.remove_member(first)  # it has handled messages that are not committed
        wait_until(lambda: second.caught_up == {0, 1, 2, 3} and world.has_consumed_all(second), "everything")
        first.commit()
        wait_until(lambda: bool(first.poll()) and set(first.revoked) >= ours, "a report of the lost partitions")
        wait_until(lambda: bool(first.poll()) and len(first.caught_up) == len(second.caught_up) == 2, "2 + 2 again")
        world.produce(40)
        wait_until(lambda: bool(first.poll()) and world.has_consumed_all(first, second), "the remaining messages")
    world.check_effects(first, second)


@pytest.mark.parametrize("client_library", ["kafka-python"], indirect=True)  # librdkafka has an assignor of its own
def test_member_that_rejoins_claims_no_partitions(group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two members would own a partition, because the assignor trusts the claims of the members."""
    world = group(4)
    member = world.add_member()
    member.poll_until_assigned(0, 1, 2, 3)
    claims: list[list[int]] = []
    original = CooperativeStickyAssignor.metadata

    def metadata(assignor: CooperativeStickyAssignor, topics: set[str]) -> Any:
        subscription = original(assignor, topics)
        claims.append(sorted(p for claim in subscription.owned_partitions for p in claim.partitions))
        return subscription

    monkeypatch.setattr(CooperativeStickyAssignor, "metadata", metadata)
    world.remove_member(member)
    wait_until(
        lambda: bool(member.poll()) and sorted(member.revoked) == [0, 1, 2, 3], "a report of the lost partitions"
    )
    member.poll_until_assigned(0, 1, 2, 3)
    assert claims
    assert not any(claims)


def test_group_grows_and_shrinks_while_events_arrive(group: Callable[..., Group]) -> None:
    world = group(8)
    world.produce(200)
    stops = [threading.Event() for _ in range(4)]
    members: list[Member] = []
    failed: list[BaseException] = []

    def consume(member: Member, stop: threading.Event, is_killed: bool) -> None:
        turns = 0
        try:
            while not stop.is_set():
                member.poll(0.05)
                assert member.is_state_complete()
                turns += 1
                member.commit(snapshots=[turns % 8])
            if is_killed:
                member.poll()
                world.remove_member(member)
            else:
                member.commit(snapshots=range(8))
                member.close()
        except BaseException as error:
            failed.append(error)

    threads = []
    for i, stop in enumerate(stops):
        members.append(world.add_member(max_poll_records=50))
        threads.append(threading.Thread(target=consume, args=(members[-1], stop, i == 2)))
        threads[-1].start()
        world.produce(100)
        share = 8 // (i + 1)
        wait_until(lambda share=share: all(len(m.caught_up) >= share for m in members) or bool(failed), f"{share} each")
        assert not failed
    for stop, thread in list(zip(stops, threads, strict=True))[:0:-1]:
        world.produce(100)
        stop.set()
        thread.join()
        wait_until(
            lambda: sum(len(m.caught_up) for m in members if not stops[members.index(m)].is_set()) == 8 or bool(failed),
            "8",
        )
        assert not failed
    wait_until(lambda: world.has_consumed_all(members[0]) or bool(failed), "the remaining messages")
    stops[0].set()
    threads[0].join()
    assert failed == []
    last = world.add_member()
    last.poll_until_assigned(*range(8))
    assert last.handled_offsets == []
    world.check_effects(last)


def test_hanging_process_delays_others_for_a_limited_time(group: Callable[..., Group]) -> None:
    """The process sends heartbeats, but does not take part in a rebalance."""
    world = group(2)
    quick = {"session_seconds": 6.0, "patience": 14.0}
    first, second = world.add_member(**quick), world.add_member(**quick)
    with poll_in_background(second.poll):
        wait_until(lambda: bool(first.poll()) and len(first.caught_up) == len(second.caught_up) == 1, "1 + 1")
    third = world.add_member(**quick)
    with poll_in_background(third.poll):
        world.produce(40)
        wait_until(
            lambda: bool(first.poll()) and len(third.caught_up) == 1 and world.has_consumed_all(first, third),
            "everything",
        )
        first.commit()
    world.check_effects(first, third)
