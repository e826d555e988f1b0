"""Partition assignment for a consumer group whose members must all score with the same model.

Each member sends its model's fingerprint when it joins. The member that assigns partitions gives none to a newcomer
whose model differs from the models of members that already hold partitions, and sends it the reason. Members that
hold partitions are never refused, so the model can be changed in one process after the other.
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
        refused_by: The group's model, if this member was refused because its model differs.
    """

    name = "deformer-cooperative-sticky"

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = model
        self.refused_by: str | None = None

    def check(self) -> None:
        """Raise `ConfigError` if the group refused this member."""
        if self.refused_by is not None:
            raise ConfigError(
                f"the consumer group uses model {self.refused_by}, this process has model {self.model}: give both the "
                "same model, or choose another --group"
            )

    def leave(self) -> None:
        """Clear the own assignment after the group has continued without this member.

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
        """Assign partitions to the members whose model agrees with the group; the others get none and the reason."""
        model_by_member = {member.member_id: bytes(member.metadata.user_data or b"") for member in members}
        holding = {m.member_id for m in members if any(tp.partitions for tp in m.metadata.owned_partitions or ())}
        accepted_models = {model_by_member[member] for member in holding} or {self.model.encode()}
        admitted = [m for m in members if m.member_id in holding or model_by_member[m.member_id] in accepted_models]
        assignments: dict[str, ConsumerProtocolAssignment] = super().assign(cluster, admitted)
        for member in members:
            if member.member_id not in assignments:
                group_model = sorted(accepted_models)[0]
                assignments[member.member_id] = ConsumerProtocolAssignment(self.version, [], group_model)
        return assignments

    def on_assignment(self, assignment: ConsumerProtocolAssignment, generation: int) -> None:
        """Store the assignment, and the group's model if this member was refused."""
        super().on_assignment(assignment, generation)
        self.refused_by = bytes(assignment.user_data).decode() if assignment.user_data else None


class RebalanceListener(AsyncConsumerRebalanceListener):  # type: ignore[misc]  # the client ships no types
    """Callbacks for partitions that are assigned, revoked or lost.

    They are awaited on the client's thread, so they may commit.
    """

    def __init__(
        self,
        gain: Callable[[Partitions], None],
        give_up: Callable[[Partitions], Awaitable[None]],
        lose: Callable[[Partitions], None],
    ) -> None:
        self._gain, self._give_up, self._lose = gain, give_up, lose

    async def on_partitions_assigned(self, assigned: Partitions) -> None:
        self._gain(assigned)

    async def on_partitions_revoked(self, revoked: Partitions) -> None:
        await self._give_up(revoked)

    async def on_partitions_lost(self, lost: Partitions) -> None:
        self._lose(lost)
