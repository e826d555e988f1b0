"""What one commit makes durable: offsets, the saved state of their partitions, and the messages of the sinks.

There is one commit at a time. It lasts from `begin` until it has taken effect (`mark_committed`), which may need
several attempts. Messages that sinks send after `begin` belong to the next commit, so the consumer may poll meanwhile.
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
        states: State to save, by partition number.
        confirm_unchanged: Whether offsets that have not changed are committed too.
    """

    positions: dict[TopicPartition, int]
    states: dict[int, PartitionState]
    confirm_unchanged: bool


class CommitPayload(NamedTuple):
    """A commit request, encoded as messages of the state topic.

    Attributes:
        request: The request.
        messages: Messages of the state topic.
        references: For each partition, the messages that hold its state once the commit has taken effect.
        snapshot_starts: For each new snapshot, its partition and the index of its first message in `messages`.
    """

    request: CommitRequest
    messages: list[OutgoingMessage]
    references: dict[TopicPartition, StateReference]
    snapshot_starts: list[tuple[TopicPartition, int]]


class CommitManager:
    """The commit in progress and its attempts.

    Methods that send requests raise the client's errors; `recover` raises ours too.

    Args:
        consumer: The consumer whose offsets are committed.
        delivery: Sends messages with a commit, or None to commit offsets only.
        state: Encodes saved state, or None to save none.

    Attributes:
        reference_by_partition: For each partition, the messages of the state topic that hold its saved state.
        has_commit: Whether there is a commit that is not known to have taken effect.
        confirmed_at: `time.monotonic()` of the last commit that included offsets.
    """

    def __init__(self, consumer: KafkaConsumer, delivery: Delivery | None, state: StateTopic | None) -> None:
        self._consumer, self._delivery, self._state = consumer, delivery, state
        self.reference_by_partition: dict[TopicPartition, StateReference] = {}
        self._committed_positions: dict[TopicPartition, int] = {}
        self.has_commit = False
        self._request = CommitRequest({}, {}, False)
        self._payload = CommitPayload(self._request, [], {}, [])  # of the last attempt
        self._attempt: CommitAttempt | None = None  # an attempt that may have taken effect
        self._run_id, self._num_attempts = uuid.uuid4().hex[:12], 0  # together a unique name of each attempt
        self.confirmed_at = time.monotonic()

    @property
    def has_failed(self) -> bool:
        """Whether `recover` must run before another attempt.

        Without transactions it need not, because messages may then be sent twice.
        """
        delivery = self._delivery
        if delivery is None:
            return False
        is_outcome_unknown = delivery.is_transactional and not delivery.is_in_background and self._attempt is not None
        return delivery.has_failed or is_outcome_unknown

    @property
    def is_in_background(self) -> bool:
        """Whether an attempt runs in the background."""
        return self._delivery is not None and self._delivery.is_in_background

    @property
    def is_finished(self) -> bool:
        """Whether the attempt in the background has ended, successfully or not."""
        return self._delivery is not None and self._delivery.is_finished

    def begin(
        self,
        positions: Mapping[TopicPartition, int],
        states: Mapping[int, PartitionState],
        confirm_unchanged: bool = False,
    ) -> None:
        """Begin a commit with all messages that are in the delivery.

        Args:
            positions: Offset of the next event to read, by partition.
            states: State to save, by partition number.
            confirm_unchanged: Whether offsets that have not changed are committed too.
        """
        self.has_commit = True
        self._request = CommitRequest(dict(positions), dict(states), confirm_unchanged)
        if self._delivery is not None:
            self._delivery.seal_pending()

    def begin_sending(self, group: Any, on_committed: Callable[[], None]) -> bool:
        """Start the first attempt in the background.

        Args:
            group: The consumer group, as the client describes it.
            on_committed: Called in the background after the attempt has taken effect.

        Returns:
            Whether an attempt was started; False if there is nothing to send in a transaction.
        """
        delivery = self._delivery
        if delivery is None or not delivery.is_transactional or delivery.has_failed or self._attempt is not None:
            return False
        payload = self._encode_request()
        if not _needs_transaction(delivery, payload):
            return False
        compute_offsets = self._make_offsets_function(payload)
        delivery.begin(delivery.transaction(payload.messages, compute_offsets, group, on_committed))
        return True

    def _make_offsets_function(self, payload: CommitPayload) -> Callable[[Callable[[], list[int]]], Offsets]:
        """Return the function that computes the offsets to commit, for `Delivery.transaction`.

        The function waits for the offsets of the state messages only if a new snapshot needs them.
        """

        def compute_offsets(wait_for_message_offsets: Callable[[], list[int]]) -> Offsets:
            attempt = self._plan_attempt(payload, wait_for_message_offsets() if payload.snapshot_starts else [])
            if payload is self._payload:  # otherwise a later attempt has replaced this one
                self._attempt = attempt
            return dict(attempt.offsets)

        return compute_offsets

    def send(self, group: Any, timeout: float | None = None) -> Offsets | None:
        """Make one attempt as far as the delivery is concerned, or wait for the attempt in the background.

        Args:
            group: The consumer group, as the client describes it.
            timeout: Seconds to wait, or None for the default.

        Returns:
            The offsets that the consumer must still commit, or None if the transaction has committed them.
        """
        delivery = self._delivery
        if delivery is not None and self.is_in_background:
            delivery.end(timeout)
            return None
        payload = self._encode_request()
        if delivery is not None and _needs_transaction(delivery, payload):
            transaction = delivery.transaction(payload.messages, self._make_offsets_function(payload), group)
            if timeout is None:
                delivery.commit(transaction)
            else:
                delivery.begin(transaction)
                delivery.end(timeout)
            return None
        message_offsets = [] if delivery is None else delivery.send(payload.messages, timeout)
        self._attempt = self._plan_attempt(payload, message_offsets)
        return self._attempt.offsets

    def renew_producer(self) -> None:
        """End the transaction that a failed attempt has left open, because it blocks readers of committed messages."""
        if self._delivery is not None and self._delivery.has_failed:
            self._delivery.renew_producer()

    def recover(self) -> None:
        """End the transaction of a failed attempt, and find out whether the attempt took effect."""
        self.renew_producer()
        if self._attempt is not None:
            self._check_outcome(self._attempt)

    def mark_committed(self) -> None:
        """Record that the last attempt, and with it the commit, has taken effect."""
        if self._attempt is not None:
            self._apply_effect(self._attempt)
        self.has_commit = False

    def give_up(self) -> None:
        """Abandon the commit; its messages are sent with the next one."""
        self.has_commit = False

    def remove_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        """Remove partitions that have moved to another process from the commit in progress."""
        for tp in partitions:
            self.reference_by_partition.pop(tp, None)
            self._committed_positions.pop(tp, None)
            if self._attempt is not None:
                self._attempt.offsets.pop(tp, None)
            self._request.positions.pop(tp, None)
            self._request.states.pop(tp.partition, None)
        if self._delivery is not None:
            self._delivery.drop_partitions(tp.partition for tp in partitions)

    def _encode_request(self) -> CommitPayload:
        """Return the request in progress as messages of the state topic, under a new commit name."""
        self._num_attempts += 1
        commit_name = f"{self._run_id}-{self._num_attempts}"
        references = dict(self.reference_by_partition)
        messages: list[OutgoingMessage] = []
        snapshot_starts: list[tuple[TopicPartition, int]] = []
        for tp, position in self._request.positions.items():
            state = self._request.states.get(tp.partition)
            if self._state is not None and state is not None:
                if state.snapshot is not None:
                    snapshot_starts.append((tp, len(messages)))
                state_messages, references[tp] = self._state.encode(
                    tp.partition, position, state, references.get(tp), commit_name
                )
                messages += state_messages
        references = {tp: replace(reference, commit=commit_name) for tp, reference in references.items()}
        request = self._request._replace(positions=dict(self._request.positions))
        self._payload = CommitPayload(request, messages, references, snapshot_starts)
        return self._payload

    def _plan_attempt(self, payload: CommitPayload, message_offsets: list[int]) -> CommitAttempt:
        """Return what is to be committed, given the offsets of the state messages.

        Args:
            payload: The encoded request.
            message_offsets: Offsets of the state messages. They may be empty if the payload has no new snapshot.
        """
        (positions, states, confirm_unchanged), references = payload.request, payload.references
        for tp, message_index in payload.snapshot_starts:
            references[tp] = replace(references[tp], first_offset=message_offsets[message_index])
        offsets = {
            tp: OffsetAndMetadata(position, references[tp].to_metadata() if tp in references else "", -1)
            for tp, position in positions.items()
            if confirm_unchanged or self._committed_positions.get(tp) != position or tp.partition in states
        }
        return CommitAttempt(offsets, references, states)

    def _check_outcome(self, attempt: CommitAttempt) -> None:
        """Check whether an attempt whose response was lost took effect, by the metadata of the committed offsets."""
        for tp in attempt.offsets.keys() & attempt.references.keys():
            committed = self._consumer.committed(tp, metadata=True, timeout_ms=DELIVERY_SECONDS * 1000)
            if committed is not None and committed.metadata == attempt.references[tp].to_metadata():
                return self._apply_effect(attempt)

    def _apply_effect(self, attempt: CommitAttempt) -> None:
        """Record the committed offsets and states after an attempt has taken effect."""
        self._attempt = None
        if attempt.offsets:
            self.confirmed_at = time.monotonic()
        # Partitions that moved to another process since the attempt are skipped.
        for tp in attempt.offsets.keys() & self._request.positions.keys():
            self._committed_positions[tp] = attempt.offsets[tp].offset
            if tp in attempt.references:
                self.reference_by_partition[tp] = attempt.references[tp]
        if self._request.states is attempt.states:
            self._request = self._request._replace(states={})
        if self._delivery is not None:
            self._delivery.mark_committed()


def _needs_transaction(delivery: Delivery, payload: CommitPayload) -> bool:
    """Return whether there is anything to send in a transaction."""
    return delivery.is_transactional and (delivery.has_unsent or bool(payload.messages))
