"""Checks of a consumer group: the model of its members, partitions without an owner, and instance names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from connectors.kafka import client
from connectors.kafka.blocking_calls import BackgroundCall
from connectors.kafka.client import INSTANCE_FENCED, load_client, make_error
from connectors.kafka.commits import CommitManager
from connectors.kafka.ports import (
    CommittedOffset,
    Consumer,
    GroupMember,
    KafkaCluster,
    RebalanceInProgress,
    TopicPartition,
)
from connectors.kafka.state import parse_model
from deformer_stream import log
from deformer_stream.errors import ConfigError, Unavailable

PARTITIONS_PER_STEP = 8
"""Number of partitions for which committed offsets are requested at a time. kafka-python sends a request for each, one
after the other, and `client.REQUEST_SECONDS` limits their sum."""


NEW_GROUP_SECONDS = 20.0
"""Seconds from the first partition that a process gets in a new group until it checks the models of the group. By then
each process has committed, see `source.CONFIRM_SECONDS`."""


def divide_into_steps(tps: Sequence[TopicPartition]) -> list[Sequence[TopicPartition]]:
    """Return partitions in lists of at most `PARTITIONS_PER_STEP`."""
    return [tps[i : i + PARTITIONS_PER_STEP] for i in range(0, len(tps), PARTITIONS_PER_STEP)]


class GroupMembership:
    """The place of a process in its consumer group, and what has to be checked about it.

    Args:
        consumer: The consumer of this process.
        commits: The commits of this process, which know its model.
        cluster: The brokers.
        topic: The topic that the group consumes.
        num_partitions: Number of its partitions.
        group: Name of the group.
        instance: The instance name of this process, or None.
        on_wait: A function that is called at least every few seconds while a method waits for the brokers.
    """

    def __init__(
        self,
        consumer: Consumer,
        commits: CommitManager,
        cluster: KafkaCluster,
        topic: str,
        num_partitions: int,
        group: str,
        instance: str | None,
        on_wait: Callable[[], None],
    ) -> None:
        self.cluster, self.topic, self.num_partitions, self.group = cluster, topic, num_partitions, group
        self._consumer, self._commits, self._instance, self._on_wait = consumer, commits, instance, on_wait
        self._must_check_owners = False
        # When the models of a new group are checked (monotonic), and the model of this process when it began.
        self._check_new_group_at: float | None = None
        self._first_model = ""
        self._other_model: str | None = None  # that of the first partition at the last check of a new group
        # The id of this process while the brokers list its instance name with another id, and since when (monotonic).
        self._unlisted_id: str | None = None
        self._unlisted_since = 0.0

    def check_before_joining(self) -> None:
        """Check the model, and note whether the group still lists the previous process of the same instance name.

        Raises:
            ConfigError: The group uses another model.
            Unavailable: No broker responds.
        """
        if not self._commits.model and self._instance is None:  # neither needs the members
            return
        members = self._describe()
        self._check_model(members)
        self._must_check_owners = any(member.instance == self._instance for member in members if member.instance)

    def check_model(self) -> None:
        """Raise `ConfigError` if other processes of the group own partitions, and all of them use another model."""
        self._check_model(self._describe())

    def _check_model(self, members: Iterable[GroupMember]) -> None:
        """Check the model against those of the given members of the group.

        The metadata of the committed offsets state the models. Processes that own partitions commit them again every
        `source.CONFIRM_SECONDS`, so the model can be changed in one process after the other.
        """
        model = self._commits.model
        if not model:
            return
        # After a restart with the same instance name, the group still lists the previous process.
        others = [member for member in members if member.instance is None or member.instance != self._instance]
        ours = self._consumer.assignment
        if not any(member.partitions and not member.partitions & ours for member in others):
            return
        try:
            committed = self.fetch_committed(self.list_partitions())
        except Unavailable:  # for example during a transaction; it is checked again when partitions are assigned
            return
        self._refuse_other_models(self._list_models(committed))

    def note_new_group(self) -> None:
        """Let `check_new_group` check the models later, if no process had committed yet when this one began."""
        self._first_model = self._commits.model
        if self._first_model and not self._list_models(self.fetch_committed(self.list_partitions())):
            self._check_new_group_at = time.monotonic() + NEW_GROUP_SECONDS

    def check_new_group(self) -> None:
        """Raise `ConfigError` if the process that owns the first partition of a new group has another model.

        Processes with different models that start a group at the same moment cannot see each other's model before they
        join. The offset of the partition with the lowest number decides which of them stay, so that all of them decide
        alike. It must be the same at two checks, and a process whose model was changed meanwhile stays: otherwise the
        processes may just be changing to a new model.
        """
        now = time.monotonic()
        if self._check_new_group_at is None or now < self._check_new_group_at or self._consumer.membership is None:
            return
        if self._commits.model != self._first_model:
            self._check_new_group_at = None
            return
        self._check_new_group_at = now + NEW_GROUP_SECONDS  # again if nothing can be found now
        try:
            committed = self.fetch_committed(self.list_partitions())
        except Unavailable as error:
            log.get_logger("kafka").debug("models_not_checked", error=str(error))
            return
        models = self._list_models(committed)
        if models and models[0] == self._other_model:
            self._refuse_other_models(models[:1])
        if models and models[0] == self._first_model:
            self._check_new_group_at = None
        self._other_model = models[0] if models else None

    @staticmethod
    def _list_models(committed: Mapping[TopicPartition, CommittedOffset | None]) -> list[str]:
        """Return the models that committed offsets state, in the order of their partitions."""
        models = (parse_model(offset.metadata) for _, offset in sorted(committed.items()) if offset is not None)
        return [model for model in models if model]

    def _refuse_other_models(self, models: Iterable[str]) -> None:
        """Raise `ConfigError` if the group uses models, and none of them is that of this process."""
        used, model = sorted(set(models)), self._commits.model
        if used and model not in used:
            raise ConfigError(
                f"the consumer group uses model {used[0]}, this process has model {model}: give both the same "
                "model, or choose another --group"
            )

    def list_partitions(self) -> list[TopicPartition]:
        """Return the partitions that the topic had when this process started."""
        return [TopicPartition(self.topic, number) for number in range(self.num_partitions)]

    def fetch_committed(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, CommittedOffset | None]:
        """Return the committed offsets of partitions, requested in several steps."""
        committed: dict[TopicPartition, CommittedOffset | None] = {}
        for step in divide_into_steps(list(tps)):
            committed |= self._consumer.fetch_committed(step, client.REQUEST_SECONDS)
            self._on_wait()
        return committed

    def _describe(self) -> list[GroupMember]:
        """Return the members of the group, as the brokers list them now."""

        def describe() -> list[GroupMember]:
            admin = load_client(self.cluster).open_admin(self.cluster)
            try:
                return admin.describe_group(self.group, client.DELIVERY_SECONDS)
            finally:
                admin.close()

        # Less than the poll interval, after which the group excludes this process.
        return BackgroundCall(describe).result(client.DELIVERY_SECONDS, self._on_wait)

    def check_owners(self) -> None:
        """Join the group again if no member owns some of the partitions, so that the group assigns them.

        It is checked once, if this process has taken the place of a previous one with the same instance name. It gets
        the partitions of that process without a rebalance. If that process has ended after the group had asked it to
        give up other partitions, and before the group could assign them to another member, they would have no owner
        until the next rebalance.
        """
        if not self._must_check_owners or self._consumer.membership is None:
            return
        try:
            owned = {tp for member in self._describe() for tp in member.partitions}
            unowned = [tp.partition for tp in self.list_partitions() if tp not in owned]
            # During a rebalance the brokers state no partitions. It assigns all of them.
            if unowned and owned:
                log.get_logger("kafka").warning("partitions_without_owner", topic=self.topic, partitions=unowned)
                self._consumer.rejoin()
        except Unavailable as error:  # the next poll tries again
            log.get_logger("kafka").debug("owners_not_checked", error=str(error))
        else:
            self._must_check_owners = False

    def confirm_instance(self) -> None:
        """Before a failed producer is replaced, raise an error unless this process still has its instance name.

        The new producer fences every other one with the same transactional id, which contains the instance name. After
        a long pause of this process, or a long loss of its connection, that would be the producer of its successor.

        After an outage, the brokers and the client library can disagree about the id of a member that joins again. So
        another id counts as another process only if it remains for two heartbeats. By then, the broker has returned an
        error to a process that has lost its name.

        Raises:
            RebalanceInProgress: This process is no member of the group now, or the brokers list its instance name with
                another id. It may join again.
            ConfigError: Another process of the group has the instance name.
            Unavailable: No broker responds.
        """
        # Without an instance name, the transactional id belongs to this process alone.
        if self._instance is None or not self._commits.takes_transactional_id:
            return
        action = "replacing the producer"
        our_id = self._consumer.member_id if self._consumer.membership is not None else None
        ids = {member.id for member in self._describe() if member.instance == self._instance} if our_id else set()
        if our_id in ids:
            self._unlisted_id = None
            return
        now = time.monotonic()
        if not ids or our_id != self._unlisted_id:
            self._unlisted_id, self._unlisted_since = (our_id if ids else None), now
        elif now - self._unlisted_since > 2 * client.HEARTBEAT_SECONDS:
            raise make_error(INSTANCE_FENCED, self.cluster.servers, action, "FencedInstanceId")
        raise RebalanceInProgress(
            f"Kafka at {self.cluster.servers}: {action} must wait until this process is a member of the consumer group "
            "again"
        )
