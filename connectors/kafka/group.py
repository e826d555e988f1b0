"""Who may be in a consumer group: processes that score with the same model.

Each member says its model's fingerprint when it joins. The member that deals out partitions gives none to a newcomer
with another model than those that hold partitions, and tells it why. Members that hold partitions are never refused, so
that a model can be changed under way in one process after the other.
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
    """Cooperative sticky assignment (KIP-429) among members that agree on `model`, a fingerprint."""

    name = "deformer-cooperative-sticky"

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = model
        self.refused_by: str | None = None
        """The group's model, if it is another than ours."""

    def check(self) -> None:
        """Raise ConfigError if the group has refused us."""
        if self.refused_by is not None:
            raise ConfigError(
                f"the consumer group scores with model {self.refused_by}, this process has {self.model}: give them the "
                "same model, or choose another --group"
            )

    def leave(self) -> None:
        """The group went on without us: when we come back we claim nothing, for others have our partitions. The client
        would claim what it had, and two members would have a partition at once."""
        self.member_assignment = None

    def metadata(self, topics: set[str]) -> ConsumerProtocolSubscription:
        subscription = super().metadata(topics)
        subscription.user_data = self.model.encode()
        return subscription

    def assign(self, cluster: Any, members: list[Any]) -> dict[str, ConsumerProtocolAssignment]:
        models = {member.member_id: bytes(member.metadata.user_data or b"") for member in members}
        holding = {m.member_id for m in members if any(tp.partitions for tp in m.metadata.owned_partitions or ())}
        accepted = {models[member] for member in holding} or {self.model.encode()}
        welcome = [m for m in members if m.member_id in holding or models[m.member_id] in accepted]
        assignments: dict[str, ConsumerProtocolAssignment] = super().assign(cluster, welcome)
        for member in members:
            if member.member_id not in assignments:
                why = sorted(accepted)[0]
                assignments[member.member_id] = ConsumerProtocolAssignment(self.version, [], why)
        return assignments

    def on_assignment(self, assignment: ConsumerProtocolAssignment, generation: int) -> None:
        super().on_assignment(assignment, generation)
        self.refused_by = bytes(assignment.user_data).decode() if assignment.user_data else None


class RebalanceListener(AsyncConsumerRebalanceListener):  # type: ignore[misc]  # the client ships no types
    """Tells a source what it gains, gives up and has lost. Awaited on the client's thread, so that it can commit."""

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
