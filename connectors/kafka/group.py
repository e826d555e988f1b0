"""Partition assignment for a consumer group whose members must all score with the same model.

Each member sends its model's fingerprint when it joins. The member that assigns partitions gives none to a newcomer
whose model differs from the models of members that already hold partitions, and sends it the reason. Members that hold
partitions are never refused, so the model can be changed in one process after the other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from kafka import AsyncConsumerRebalanceListener, TopicPartition
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.protocol.consumer.metadata import ConsumerProtocolAssignment, ConsumerProtocolSubscription

from deformer_stream.errors import ConfigError

Partitions = Iterable[TopicPartition]


class SameModelAssignor(CooperativeStickyAssignor):  # type: ignore[misc]  # the client ships no types
    """Cooperative sticky assignment (KIP-429) of partitions among the group members that score with the same model.

    A model is identified by its fingerprint, a hash. A new member whose model differs from the group's gets no
    partitions.

    Attributes:
        model: The fingerprint of this member's model.
        conflicting_model: The fingerprint of the group's model, if this member got no partitions because its model
            differs. Otherwise None.
    """

    name = "deformer-cooperative-sticky"

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = model
        self.conflicting_model: str | None = None

    def check_admission(self) -> None:
        """Raise `ConfigError` if this member got no partitions, because its model differs from the group's."""
        if self.conflicting_model is not None:
            raise ConfigError(
                f"the consumer group uses model {self.conflicting_model}, this process has model {self.model}: "
                "give both the same model, or choose another --group"
            )

    def clear_assignment(self) -> None:
        """Drop the list of partitions that this member owns; called after the group has removed this member.

        Otherwise kafka-python would claim these partitions when it rejoins, and two members would own one partition.
        """
        self.member_assignment = None

    def metadata(self, topics: set[str]) -> ConsumerProtocolSubscription:
        """Return the subscription that this member sends when it joins the group.

        Its user data hold the fingerprint (hash) of this member's model.

        Args:
            topics: The topics to subscribe to.
        """
        subscription = super().metadata(topics)
        subscription.user_data = self.model.encode()
        return subscription

    def assign(self, cluster: Any, members: list[Any]) -> dict[str, ConsumerProtocolAssignment]:
        """Assign the partitions to the members; called in the member that the group has elected its leader.

        Members that own partitions keep taking part. A newcomer takes part only if its model is that of an owner.

        Args:
            cluster: kafka-python's metadata of the cluster.
            members: The members with the subscriptions that `metadata` returned in each of them.

        Returns:
            The assignment by member id. For a newcomer with another model, it has no partitions, and its user data hold
            the fingerprint (hash) of the group's model.
        """
        model_by_member = {member.member_id: bytes(member.metadata.user_data or b"") for member in members}
        owners = {
            member.member_id
            for member in members
            if any(owned.partitions for owned in member.metadata.owned_partitions or ())
        }
        # A new group has no owners; then the leader's own model counts.
        group_models = {model_by_member[member_id] for member_id in owners} or {self.model.encode()}
        admitted = [
            member
            for member in members
            if member.member_id in owners or model_by_member[member.member_id] in group_models
        ]
        assignments: dict[str, ConsumerProtocolAssignment] = super().assign(cluster, admitted)
        for member in members:
            if member.member_id not in assignments:
                # While the model is being changed, the owners may have several; one is enough for the error message.
                assignments[member.member_id] = ConsumerProtocolAssignment(self.version, [], min(group_models))
        return assignments

    def on_assignment(self, assignment: ConsumerProtocolAssignment, generation: int) -> None:
        """Store the assignment, and the group's model if this member got no partitions because its model differs.

        Args:
            assignment: What `assign` returned for this member. It has user data, the fingerprint (hash) of the group's
                model, only if the models differ.
            generation: The group's generation, a number that increases with each rebalance.
        """
        super().on_assignment(assignment, generation)
        self.conflicting_model = bytes(assignment.user_data).decode() if assignment.user_data else None


class RebalanceListener(AsyncConsumerRebalanceListener):  # type: ignore[misc]  # the client ships no types
    """A rebalance listener of kafka-python that calls the given functions.

    Args:
        on_assigned: Called with the partitions that were assigned to this member.
        on_revoked: Awaited with the partitions that this member must give up. Until it returns, this member may still
            commit their offsets.
        on_lost: Called with the partitions that other members own already, so that nothing may be committed.
    """

    def __init__(
        self,
        on_assigned: Callable[[Partitions], None],
        on_revoked: Callable[[Partitions], Awaitable[None]],
        on_lost: Callable[[Partitions], None],
    ) -> None:
        self._on_assigned, self._on_revoked, self._on_lost = on_assigned, on_revoked, on_lost

    async def on_partitions_assigned(self, assigned: Partitions) -> None:
        """Call `on_assigned` with the partitions that were assigned to this member."""
        self._on_assigned(assigned)

    async def on_partitions_revoked(self, revoked: Partitions) -> None:
        """Await `on_revoked` with the partitions that this member must give up."""
        await self._on_revoked(revoked)

    async def on_partitions_lost(self, lost: Partitions) -> None:
        """Call `on_lost` with the partitions that other members own already."""
        self._on_lost(lost)
