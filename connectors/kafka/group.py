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
    """Cooperative sticky assignment (KIP-429) among members with equal models.

    Attributes:
        model: The fingerprint of this member's model.
        conflicting_model: The group's model, if this member was refused because its model differs. Otherwise None.
    """

    name = "deformer-cooperative-sticky"

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = model
        self.conflicting_model: str | None = None

    def check_admission(self) -> None:
        """Raise `ConfigError` if the group refused this member because its model differs from the group's."""
        if self.conflicting_model is not None:
            raise ConfigError(
                f"the consumer group uses model {self.conflicting_model}, this process has model {self.model}: "
                "give both the same model, or choose another --group"
            )

    def clear_assignment(self) -> None:
        """Clear this member's assignment after the group has continued without it.

        The client would otherwise claim its previous partitions when it rejoins, and two members would own one
        partition.
        """
        self.member_assignment = None

    def metadata(self, topics: set[str]) -> ConsumerProtocolSubscription:
        """Return the subscription of this member, with the fingerprint of its model as user data."""
        subscription = super().metadata(topics)
        subscription.user_data = self.model.encode()
        return subscription

    def assign(self, cluster: Any, members: list[Any]) -> dict[str, ConsumerProtocolAssignment]:
        """Assign partitions to the members whose model agrees with the group.

        Args:
            cluster: The client's metadata of the cluster.
            members: The members with their subscriptions.

        Returns:
            The assignment by member id. A member with another model gets no partitions, but the group's model.
        """
        model_by_member = {member.member_id: bytes(member.metadata.user_data or b"") for member in members}
        owners = {m.member_id for m in members if any(tp.partitions for tp in m.metadata.owned_partitions or ())}
        accepted_models = {model_by_member[member_id] for member_id in owners} or {self.model.encode()}
        admitted = [m for m in members if m.member_id in owners or model_by_member[m.member_id] in accepted_models]
        assignments: dict[str, ConsumerProtocolAssignment] = super().assign(cluster, admitted)
        for member in members:
            if member.member_id not in assignments:
                group_model = sorted(accepted_models)[0]
                assignments[member.member_id] = ConsumerProtocolAssignment(self.version, [], group_model)
        return assignments

    def on_assignment(self, assignment: ConsumerProtocolAssignment, generation: int) -> None:
        """Store the assignment, and the group's model if this member was refused."""
        super().on_assignment(assignment, generation)
        self.conflicting_model = bytes(assignment.user_data).decode() if assignment.user_data else None


class RebalanceListener(AsyncConsumerRebalanceListener):  # type: ignore[misc]  # the client ships no types
    """Callbacks for partitions that are assigned, revoked or lost.

    The client awaits them on its own thread, so they may commit.

    Args:
        on_assigned: Called with partitions that were assigned to this member.
        on_revoked: Awaited with partitions that this member must give up; it may still commit them.
        on_lost: Called with partitions that other members own already.
    """

    def __init__(
        self,
        on_assigned: Callable[[Partitions], None],
        on_revoked: Callable[[Partitions], Awaitable[None]],
        on_lost: Callable[[Partitions], None],
    ) -> None:
        self._on_assigned, self._on_revoked, self._on_lost = on_assigned, on_revoked, on_lost

    async def on_partitions_assigned(self, assigned: Partitions) -> None:
        """Pass assigned partitions on."""
        self._on_assigned(assigned)

    async def on_partitions_revoked(self, revoked: Partitions) -> None:
        """Pass revoked partitions on and wait until they are given up."""
        await self._on_revoked(revoked)

    async def on_partitions_lost(self, lost: Partitions) -> None:
        """Pass lost partitions on."""
        self._on_lost(lost)
