"""Tests of the checks of a consumer group, with brokers that list its members as the test states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from connectors.kafka.client import HEARTBEAT_SECONDS
from connectors.kafka.membership import GroupMembership
from connectors.kafka.ports import GroupMember, KafkaCluster, RebalanceInProgress, TopicPartition
from deformer_stream.errors import ConfigError, Unavailable
from tests.connectors.fake_kafka import Clock

TOPIC = "events"


class Brokers:
    """Brokers that list the given members, or do not respond.

    Attributes:
        members: The members, or None while the brokers do not respond.
        num_rejoins: How often the process has left the group and joined it anew.
        refuses_rejoin: Whether the brokers do not respond when it leaves the group.
    """

    def __init__(self) -> None:
        self.members: list[GroupMember] | None = []
        self.num_rejoins = 0
        self.refuses_rejoin = False
        self.consumer: Any = SimpleNamespace(
            membership="some group", member_id="ours", assignment=frozenset(), rejoin=self._rejoin
        )

    def _rejoin(self) -> None:
        if self.refuses_rejoin:
            raise Unavailable("no response")
        self.num_rejoins += 1

    def list(self, instance: str, member_id: str, *numbers: int) -> None:
        """Add a member to the list, with the numbers of its partitions."""
        assert self.members is not None
        self.members.append(GroupMember(member_id, instance, frozenset(TopicPartition(TOPIC, n) for n in numbers)))

    def open_admin(self, cluster: KafkaCluster) -> Any:
        """Return an admin client that lists the members."""
        return SimpleNamespace(describe_group=self._describe, close=lambda: None)

    def _describe(self, group: str, timeout: float) -> list[GroupMember]:
        if self.members is None:
            raise Unavailable("no response")
        return self.members


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> Brokers:
    """Return brokers whose group has no members yet."""
    brokers = Brokers()
    monkeypatch.setattr("connectors.kafka.membership.load_client", lambda cluster: brokers)
    return brokers


@pytest.fixture
def membership(brokers: Brokers, clock: Clock) -> GroupMembership:
    """Return the place of a process with the instance name "one" in a group that consumes three partitions."""
    commits: Any = SimpleNamespace(model="", takes_transactional_id=True)
    return GroupMembership(brokers.consumer, commits, KafkaCluster("fake:1"), TOPIC, 3, "g", "one", lambda: None)


# --- another process with the same instance name ----------------------------------------------------------------------


def test_process_whose_id_the_brokers_list_is_confirmed(brokers: Brokers, membership: GroupMembership) -> None:
    brokers.list("one", "ours", 0)
    brokers.list("two", "theirs", 1, 2)
    membership.confirm_instance()


def test_another_id_that_remains_is_another_process(
    brokers: Brokers, membership: GroupMembership, clock: Clock
) -> None:
    brokers.list("one", "other", 0)
    for _ in range(2):
        with pytest.raises(RebalanceInProgress, match="must wait until this process is a member"):
            membership.confirm_instance()
        clock.sleep(HEARTBEAT_SECONDS)
    clock.sleep(0.1)
    with pytest.raises(ConfigError, match="give each process its own --instance"):
        membership.confirm_instance()


def test_process_that_joins_again_with_another_id_is_confirmed(
    brokers: Brokers, membership: GroupMembership, clock: Clock
) -> None:
    brokers.list("one", "next", 0)
    with pytest.raises(RebalanceInProgress):
        membership.confirm_instance()
    clock.sleep(3 * HEARTBEAT_SECONDS)
    brokers.consumer.member_id = "next"
    membership.confirm_instance()
    brokers.consumer.member_id = "ours"  # the time before does not count
    with pytest.raises(RebalanceInProgress):
        membership.confirm_instance()


def test_process_that_is_no_member_waits(brokers: Brokers, membership: GroupMembership, clock: Clock) -> None:
    brokers.list("one", "other", 0)
    brokers.consumer.membership = None
    for _ in range(3):
        with pytest.raises(RebalanceInProgress):
            membership.confirm_instance()
        clock.sleep(3 * HEARTBEAT_SECONDS)


# --- partitions without an owner --------------------------------------------------------------------------------------


def test_process_in_the_place_of_another_joins_again_if_a_partition_has_no_owner(
    brokers: Brokers, membership: GroupMembership
) -> None:
    brokers.list("one", "previous", 1)
    brokers.list("two", "theirs", 2)
    membership.check_before_joining()
    membership.check_owners()
    membership.check_owners()  # it is checked once
    assert brokers.num_rejoins == 1


@pytest.mark.parametrize("numbers", [(0, 1), ()], ids=["all-owned", "rebalance"])
def test_process_stays_if_all_partitions_are_owned_or_are_being_assigned(
    brokers: Brokers, membership: GroupMembership, numbers: tuple[int, ...]
) -> None:
    brokers.list("one", "previous", *numbers)
    brokers.list("two", "theirs", *([2] if numbers else []))
    membership.check_before_joining()
    membership.check_owners()
    assert brokers.num_rejoins == 0


def test_process_that_takes_no_place_does_not_check(brokers: Brokers, membership: GroupMembership) -> None:
    brokers.list("two", "theirs", 2)
    membership.check_before_joining()
    membership.check_owners()
    assert brokers.num_rejoins == 0


def test_process_that_cannot_leave_the_group_tries_again(brokers: Brokers, membership: GroupMembership) -> None:
    brokers.list("one", "previous", 1)
    membership.check_before_joining()
    brokers.refuses_rejoin = True
    membership.check_owners()
    brokers.refuses_rejoin = False
    membership.check_owners()
    membership.check_owners()
    assert brokers.num_rejoins == 1


def test_check_of_owners_waits_for_the_membership_and_for_the_brokers(
    brokers: Brokers, membership: GroupMembership
) -> None:
    brokers.list("one", "previous", 1)
    membership.check_before_joining()
    members, brokers.members = brokers.members, None
    membership.check_owners()
    brokers.members, brokers.consumer.membership = members, None
    membership.check_owners()
    assert brokers.num_rejoins == 0
    brokers.consumer.membership = "some group"
    membership.check_owners()
    assert brokers.num_rejoins == 1
