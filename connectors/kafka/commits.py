"""What one commit makes durable: offsets, the saved state of their partitions, and the messages of the sinks.

There is one commit at a time. It lasts from `begin` until it has taken effect (`conclude`), over as many attempts as
that takes. Messages that sinks send after `begin` belong to the next commit, so the consumer may poll meanwhile.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kafka import KafkaConsumer
from kafka.structs import OffsetAndMetadata, TopicPartition

from connectors.kafka.batches import OutgoingMessage
from connectors.kafka.client import DELIVERY_SECONDS
from connectors.kafka.delivery import Delivery
from connectors.kafka.state import CommitAttempt, StateReference, StateTopic
from deformer_stream.runtime.ports import PartitionState

Offsets = dict[TopicPartition, OffsetAndMetadata]


class CommitRequest(NamedTuple):
    """What a commit should make durable.

    Attributes:
        positions: Offset of the next event to read, by partition.
        saved: State to save, by partition number.
        confirm_unchanged: Whether offsets that have not changed are committed too.
    """

    positions: dict[TopicPartition, int]
    saved: dict[int, PartitionState]
    confirm_unchanged: bool


class CommitPayload(NamedTuple):
    """A commit request, encoded as messages of the state topic.

    Attributes:
        request: The request.
        messages: Messages of the state topic.
        references: For each partition, the messages that hold its state once the commit has taken effect.
        first_messages: Partition and index of the first message of each new snapshot.
    """

    request: CommitRequest
    messages: list[OutgoingMessage]
    references: dict[TopicPartition, StateReference]
    first_messages: list[tuple[TopicPartition, int]]


class CommitManager:
    """The commit in progress and its attempts.

    Methods that send requests raise the client's errors; `recover` raises ours too.

    Args:
        consumer: The consumer whose offsets are committed.
        delivery: Sends messages with a commit, or None to commit offsets only.
        state: Encodes saved state, or None to save none.

    Attributes:
        kept: For each partition, the messages of the state topic that hold its saved state.
        begun: Whether there is a commit that is not known to have taken effect.
        confirmed: `time.monotonic()` of the last commit that included offsets.
    """

    def __init__(self, consumer: KafkaConsumer, delivery: Delivery | None, state: StateTopic | None) -> None:
        self._consumer, self._delivery, self._state = consumer, delivery, state
        self.kept: dict[TopicPartition, StateReference] = {}
        self._committed: dict[TopicPartition, int] = {}
        self.begun = False
        self._request = CommitRequest({}, {}, False)
        self._payload = CommitPayload(self._request, [], {}, [])  # of the last attempt
        self._attempt: CommitAttempt | None = None  # it may have taken effect
        self._run_id, self._number = uuid.uuid4().hex[:12], 0  # together they name our commits uniquely
        self.confirmed = time.monotonic()

    @property
    def failed(self) -> bool:
        """Whether `recover` must run before another attempt. Without transactions sending twice is allowed."""
        delivery = self._delivery
        if delivery is None:
            return False
        return delivery.failed or (
            delivery.exactly_once and not delivery.is_in_background and self._attempt is not None
        )

    @property
    def under_way(self) -> bool:
        """Whether an attempt runs in the background."""
        return self._delivery is not None and self._delivery.is_in_background

    @property
    def over(self) -> bool:
        """Whether the attempt in the background has ended, successfully or not."""
        return self._delivery is not None and self._delivery.is_finished

    def begin(
        self, positions: Mapping[TopicPartition, int], saved: Mapping[int, PartitionState], confirm: bool = False
    ) -> None:
        """Begin a commit with everything that was put into the delivery before.

        Args:
            positions: Offset of the next event to read, by partition.
            saved: State to save, by partition number.
            confirm: Whether offsets that have not changed are committed too.
        """
        self.begun, self._request = True, CommitRequest(dict(positions), dict(saved), confirm)
        if self._delivery is not None:
            self._delivery.seal_pending()

    def begin_sending(self, group: Any, ended: Callable[[], None]) -> bool:
        """Start the first attempt in the background.

        Args:
            group: The consumer group, as the client describes it.
            ended: Called in the background after the attempt has taken effect.

        Returns:
            Whether an attempt was started; False if there is nothing to send in a transaction.
        """
        delivery = self._delivery
        if delivery is None or not delivery.exactly_once or delivery.failed or self._attempt is not None:
            return False
        payload = self._encode_request()
        if not _needs_transaction(delivery, payload):
            return False
        delivery.begin(delivery.transaction(payload.messages, self._offsets_function(payload), group, ended))
        return True

    def _offsets_function(self, payload: CommitPayload) -> Callable[[Callable[[], list[int]]], Offsets]:
        """Return the function that computes the offsets to commit, for `Delivery.transaction`.

        It waits for the offsets of the state messages only if a new snapshot needs them.
        """

        def offsets(sent: Callable[[], list[int]]) -> Offsets:
            attempt = self._plan_attempt(payload, sent() if payload.first_messages else [])
            if payload is self._payload:  # otherwise a later attempt has replaced this one
                self._attempt = attempt
            return dict(attempt.offsets)

        return offsets

    def send(self, group: Any, within: float | None = None) -> Offsets | None:
        """Make one attempt as far as the delivery is concerned, or wait for the one in the background.

        Args:
            group: The consumer group, as the client describes it.
            within: Seconds to wait, or None for the default.

        Returns:
            The offsets that the consumer must still commit, or None if the transaction has committed them.
        """
        delivery = self._delivery
        if delivery is not None and self.under_way:
            delivery.end(within)
            return None
        payload = self._encode_request()
        if delivery is not None and _needs_transaction(delivery, payload):
            transaction = delivery.transaction(payload.messages, self._offsets_function(payload), group)
            if within is None:
                delivery.commit(transaction)
            else:
                delivery.begin(transaction)
                delivery.end(within)
            return None
        self._attempt = self._plan_attempt(payload, [] if delivery is None else delivery.send(payload.messages, within))
        return self._attempt.offsets

    def renew(self) -> None:
        """End the transaction that a failed attempt has left open. Until then readers of committed offsets wait."""
        if self._delivery is not None and self._delivery.failed:
            self._delivery.renew()

    def recover(self) -> None:
        """After a failed attempt: end what is open, and find out whether the attempt took effect."""
        self.renew()
        if self._attempt is not None:
            self._learn_outcome(self._attempt)

    def conclude(self) -> None:
        """Record that the last attempt, and with it the commit, has taken effect."""
        if self._attempt is not None:
            self._apply_effect(self._attempt)
        self.begun = False

    def give_up(self) -> None:
        """Abandon the commit; its messages go with the next one."""
        self.begun = False

    def lose(self, partitions: Iterable[TopicPartition]) -> None:
        """Remove partitions that have moved to another process from the commit in progress."""
        for tp in partitions:
            self.kept.pop(tp, None)
            self._committed.pop(tp, None)
            if self._attempt is not None:
                self._attempt.offsets.pop(tp, None)
            self._request.positions.pop(tp, None)
            self._request.saved.pop(tp.partition, None)
        if self._delivery is not None:
            self._delivery.drop(tp.partition for tp in partitions)

    def _encode_request(self) -> CommitPayload:
        """Return the request in progress as messages of the state topic, under a new commit name."""
        self._number += 1
        commit = f"{self._run_id}-{self._number}"
        kept = dict(self.kept)
        messages: list[OutgoingMessage] = []
        begins: list[tuple[TopicPartition, int]] = []
        for tp, position in self._request.positions.items():
            saved = self._request.saved.get(tp.partition)
            if self._state is not None and saved is not None:
                if saved.snapshot is not None:
                    begins.append((tp, len(messages)))
                more, kept[tp] = self._state.messages(tp.partition, position, saved, kept.get(tp), commit)
                messages += more
        kept = {tp: replace(k, commit=commit) for tp, k in kept.items()}
        self._payload = CommitPayload(
            self._request._replace(positions=dict(self._request.positions)), messages, kept, begins
        )
        return self._payload

    def _plan_attempt(self, payload: CommitPayload, sent: list[int]) -> CommitAttempt:
        """Return what is to be committed once the state messages have these offsets.

        Args:
            payload: The encoded request.
            sent: Offsets of the state messages.
        """
        (positions, saved, confirm), kept = payload.request, payload.references
        for tp, first in payload.first_messages:
            kept[tp] = replace(kept[tp], at=sent[first])
        offsets = {
            tp: OffsetAndMetadata(at, kept[tp].metadata() if tp in kept else "", -1)
            for tp, at in positions.items()
            if confirm or self._committed.get(tp) != at or tp.partition in saved
        }
        return CommitAttempt(offsets, kept, saved)

    def _learn_outcome(self, attempt: CommitAttempt) -> None:
        """Find out whether an attempt whose response was lost took effect, by the metadata of the committed offsets."""
        for tp in attempt.offsets.keys() & attempt.references.keys():
            found = self._consumer.committed(tp, metadata=True, timeout_ms=DELIVERY_SECONDS * 1000)
            if found is not None and found.metadata == attempt.references[tp].metadata():
                return self._apply_effect(attempt)

    def _apply_effect(self, attempt: CommitAttempt) -> None:
        """Update the own bookkeeping after an attempt has taken effect."""
        self._attempt = None
        if attempt.offsets:
            self.confirmed = time.monotonic()
        for tp in attempt.offsets.keys() & self._request.positions.keys():  # partitions lost meanwhile are skipped
            self._committed[tp] = attempt.offsets[tp].offset
            if tp in attempt.references:
                self.kept[tp] = attempt.references[tp]
        if self._request.saved is attempt.saved:
            self._request = self._request._replace(saved={})
        if self._delivery is not None:
            self._delivery.mark_committed()


def _needs_transaction(delivery: Delivery, payload: CommitPayload) -> bool:
    """Return whether there is anything to send in a transaction."""
    return delivery.exactly_once and (delivery.has_unsent or bool(payload.messages))
