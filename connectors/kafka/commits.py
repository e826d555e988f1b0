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

from connectors.kafka import client
from connectors.kafka.delivery import Delivery
from connectors.kafka.ports import CommittedOffset, Consumer, Offsets, OutgoingMessage, TopicPartition
from connectors.kafka.state import CommitAttempt, StateReference, StateTopic, make_model_metadata
from deformer_stream.runtime.ports import PartitionState, do_nothing


class CommitRequest(NamedTuple):
    """What a commit makes durable, in addition to the messages that sinks have put into the `Delivery` buffer.

    Attributes:
        positions: For each partition, the offset of the next event to read.
        states: The state to save, by partition number.
        confirm_unchanged: Whether to commit also offsets that are the same as at the last commit. The broker refuses
            them if this process was replaced in the group.
    """

    positions: dict[TopicPartition, int]
    states: dict[int, PartitionState]
    confirm_unchanged: bool


class CommitPayload(NamedTuple):
    """What a commit makes durable, with the states encoded as messages of the state topic.

    Attributes:
        request: The request from which the messages and references were made.
        messages: The messages for the state topic.
        references: For each partition, where its state is stored once the commit has taken effect.
        snapshot_starts: For each new snapshot (complete state), its partition and the index of its first message in
            `messages`. The reference must state the offset that this message gets.
    """

    request: CommitRequest
    messages: list[OutgoingMessage]
    references: dict[TopicPartition, StateReference]
    snapshot_starts: list[tuple[TopicPartition, int]]


class CommitManager:
    """Commits offsets, state and messages, one commit at a time.

    A commit may need several attempts. If the response to an attempt is lost, `recover` reads the committed offsets to
    find out whether the attempt took effect. If it did, its messages are not sent again.

    The order of calls is `begin`, then `send` (or `begin_sending`, then `send`) and `mark_committed`. After a failed
    attempt, `recover` comes first. Methods that send requests raise `DeformerError`.

    Args:
        consumer: The consumer whose offsets are committed.
        delivery: Buffers outgoing messages and sends them with a commit.
        state: The state topic.
        model: Fingerprint of the model, which the metadata of the committed offsets state.

    Attributes:
        model: Fingerprint of the model that the metadata of the next attempts state.
        num_partitions: The number of partitions of the topic when the group began, which they state too; 0 if unknown.
        reference_by_partition: For each partition, where its saved state is stored in the state topic.
        has_commit: Whether a commit is in progress: it was begun, and neither completed nor given up.
        confirmed_at: `time.monotonic()` of the last successful commit that included offsets.
    """

    def __init__(self, consumer: Consumer, delivery: Delivery, state: StateTopic, model: str = "") -> None:
        self._consumer, self._delivery, self._state = consumer, delivery, state
        self.model = model
        self.num_partitions = 0
        self.reference_by_partition: dict[TopicPartition, StateReference] = {}
        self._committed_positions: dict[TopicPartition, int] = {}
        self.has_commit = False
        self._request = CommitRequest({}, {}, confirm_unchanged=False)  # of the commit in progress
        self._payload = CommitPayload(self._request, [], {}, [])  # of the last attempt
        # The last attempt, from the time when its offsets are computed until it is known to have taken effect.
        self._attempt: CommitAttempt | None = None
        self._run_id, self._num_attempts = uuid.uuid4().hex[:12], 0  # together a unique name of each attempt
        self._writer_by_partition: dict[TopicPartition, str] = {}  # unique for the time that the partition is ours
        self.confirmed_at = time.monotonic()

    @property
    def has_failed(self) -> bool:
        """Whether the last attempt failed or its outcome is unknown, so that `recover` must run before the next one.

        Without transactions, only a failed producer counts. An attempt with unknown outcome is then simply repeated,
        because at-least-once delivery permits duplicates.
        """
        delivery = self._delivery
        # The last transaction has computed its offsets and no longer runs, but it was not found to have taken effect.
        is_outcome_unknown = delivery.is_transactional and not delivery.is_in_background and self._attempt is not None
        return delivery.has_failed or is_outcome_unknown

    @property
    def takes_transactional_id(self) -> bool:
        """Whether `recover` and `renew_producer` take the transactional id from every other process that uses it."""
        return self._delivery.is_transactional and self._delivery.has_failed

    @property
    def is_in_background(self) -> bool:
        """Whether `begin_sending` has started an attempt in the background that `send` has not waited for yet."""
        return self._delivery.is_in_background

    @property
    def is_finished(self) -> bool:
        """Whether the attempt in the background has ended, successfully or not, so that `send` returns at once."""
        return self._delivery.is_finished

    def begin(
        self,
        positions: Mapping[TopicPartition, int],
        states: Mapping[int, PartitionState],
        confirm_unchanged: bool = False,
    ) -> None:
        """Begin a commit, without sending anything: fix what it will make durable.

        It includes the messages that sinks have put into the `Delivery` buffer until now. Later ones belong to the next
        commit.

        Args:
            positions: For each partition, the offset of the next event to read.
            states: The state to save, by partition number.
            confirm_unchanged: Whether to commit also offsets that are the same as at the last commit.
        """
        self.has_commit = True
        self._request = CommitRequest(dict(positions), dict(states), confirm_unchanged)
        self._delivery.seal_pending()

    def begin_sending(self, membership: Any, on_committed: Callable[[], None]) -> bool:
        """Start the first attempt to commit in the background, if it is a transaction.

        Args:
            membership: The consumer group, as `Consumer.membership` describes it.
            on_committed: A function that a background thread calls after the attempt has taken effect.

        Returns:
            Whether an attempt was started. False without transactions, without anything to send, or after a failed
            attempt; the caller must then use `send`.
        """
        delivery = self._delivery
        if not delivery.is_transactional:
            return False
        must_recover_first = delivery.has_failed or self._attempt is not None  # an attempt failed, or may have failed
        if must_recover_first:
            return False
        payload = self._encode_request()
        if not _needs_transaction(delivery, payload):
            return False
        compute_offsets = self._make_offsets_function(payload)
        delivery.begin(delivery.transaction(payload.messages, compute_offsets, membership, on_committed))
        return True

    def _make_offsets_function(self, payload: CommitPayload) -> Callable[[list[int]], Offsets]:
        """Return a function that computes the offsets to commit, for `Delivery.transaction`.

        The metadata of a committed offset state where the saved state is stored. A new snapshot is stored by messages
        of the same transaction. So their offsets must be known first.

        Args:
            payload: What the transaction makes durable.

        Returns:
            The function `compute_offsets`. Its argument is the offsets of the state messages.
        """

        def compute_offsets(message_offsets: list[int]) -> Offsets:
            """Return the offsets to commit, and store the attempt in `self._attempt`.

            If the response to the transaction is lost, `recover` compares the attempt with the committed offsets.
            """
            attempt = self._plan_attempt(payload, message_offsets)
            if payload is self._payload:  # otherwise this attempt has timed out and a later one has replaced it
                self._attempt = attempt
            return dict(attempt.offsets)

        return compute_offsets

    def send(
        self, membership: Any, timeout: float | None = None, on_wait: Callable[[], None] = do_nothing
    ) -> Offsets | None:
        """Make one attempt to commit. If `begin_sending` has started one in the background, wait for that one instead.

        A transaction sends the messages and commits the offsets. Without one, the messages are sent, and the caller
        must commit the offsets.

        Args:
            membership: The consumer group, as `Consumer.membership` describes it. It is not used if an attempt is in
                the background.
            timeout: Maximum time to wait in seconds. None waits until the client itself has given up.
            on_wait: A function that is called again and again during the wait.

        Returns:
            The offsets that the caller must commit, or None if the transaction has committed them.
        """
        delivery = self._delivery
        if delivery.is_in_background:
            delivery.end(timeout, on_wait)
            return None
        payload = self._encode_request()
        if _needs_transaction(delivery, payload):
            # The transaction calls `compute_offsets` when it sends the offsets; this also sets `self._attempt`.
            compute_offsets = self._make_offsets_function(payload)
            delivery.begin(delivery.transaction(payload.messages, compute_offsets, membership))
            delivery.end(timeout, on_wait)
            return None
        # Without transactions, or with nothing to send.
        seconds = client.DELIVERY_SECONDS if timeout is None else timeout
        message_offsets = delivery.send(payload.messages, seconds, on_wait)
        # The metadata of the committed offsets state at which offset of the state topic a new snapshot begins.
        self._attempt = self._plan_attempt(payload, message_offsets)
        return self._attempt.offsets

    def renew_producer(self, on_wait: Callable[[], None] = do_nothing) -> None:
        """Replace the producer after a failed attempt to commit; this ends the transaction of that attempt.

        An open transaction would hide later messages from consumers that read only committed messages.
        """
        if self._delivery.has_failed:
            self._delivery.renew_producer(on_wait)

    def recover(self, on_wait: Callable[[], None] = do_nothing) -> None:
        """Prepare the next attempt to commit after one that failed or whose outcome is unknown; otherwise do nothing.

        The transaction of the earlier attempt is ended. If that attempt took effect, its offsets, states and messages
        are recorded as committed. The next attempt then does not send them again.
        """
        self.renew_producer(on_wait)
        if self._attempt is not None:
            self._apply_if_committed(self._attempt)

    def mark_committed(self) -> None:
        """Record that the last attempt to commit has taken effect, which completes the commit."""
        if self._attempt is not None:
            self._apply_effect(self._attempt)
        self.has_commit = False

    def give_up(self) -> None:
        """Stop making attempts for this commit; the next one sends its messages, and commits all offsets again."""
        self.has_commit = False
        self._committed_positions.clear()

    def remove_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        """Remove partitions that have moved to another process from the commit in progress.

        Messages caused by events of these partitions are dropped, because the other process sends them again.
        """
        for tp in partitions:
            self.reference_by_partition.pop(tp, None)
            self._committed_positions.pop(tp, None)
            self._writer_by_partition.pop(tp, None)
            if self._attempt is not None:
                self._attempt.offsets.pop(tp, None)
            self._request.positions.pop(tp, None)
            self._request.states.pop(tp.partition, None)
        self._delivery.drop_partitions(tp.partition for tp in partitions)

    def _encode_request(self) -> CommitPayload:
        """Encode the states of the commit in progress as messages of the state topic, and return the payload to commit.

        Each attempt gets a new name, which its messages carry. So messages of a failed attempt are never mistaken for
        those of the attempt that took effect.
        """
        self._num_attempts += 1
        commit_name = f"{self._run_id}-{self._num_attempts}"
        references = dict(self.reference_by_partition)
        messages: list[OutgoingMessage] = []
        snapshot_starts: list[tuple[TopicPartition, int]] = []
        for tp, position in self._request.positions.items():
            state = self._request.states.get(tp.partition)
            if state is not None:
                if state.snapshot is not None:
                    snapshot_starts.append((tp, len(messages)))
                state_messages, references[tp] = self._state.encode(
                    tp.partition,
                    position,
                    state,
                    references.get(tp),
                    commit_name,
                    self._get_writer(tp),
                    is_transactional=self._delivery.is_transactional,
                )
                messages += state_messages
        # Partitions without new state get the name too, because `_apply_if_committed` recognises the attempt by it.
        references = {
            tp: replace(reference, commit=commit_name, model=self.model, num_partitions=self.num_partitions)
            for tp, reference in references.items()
        }
        # A copy, because `remove_partitions` changes the request while an attempt is in the background.
        request = self._request._replace(positions=dict(self._request.positions))
        self._payload = CommitPayload(request, messages, references, snapshot_starts)
        return self._payload

    def _get_writer(self, tp: TopicPartition) -> str:
        """Return a name of this process that no other process has, and that changes if the partition leaves it."""
        return self._writer_by_partition.setdefault(tp, f"{self._run_id}.{self._num_attempts}")

    def _plan_attempt(self, payload: CommitPayload, message_offsets: list[int]) -> CommitAttempt:
        """Return an attempt: the offsets to commit, with metadata that state where each partition's state is stored.

        Args:
            payload: What the attempt makes durable.
            message_offsets: The offset in the state topic of each message of the payload. It may be empty if the
                payload has no new snapshot.
        """
        positions, states, confirm_unchanged = payload.request
        references = payload.references
        for tp, message_index in payload.snapshot_starts:
            references[tp] = replace(references[tp], first_offset=message_offsets[message_index])
        # An offset is committed if it has changed or if there is new state. With `confirm_unchanged` all are committed,
        # so that the broker checks that this process is still a member of the group. All are committed, too, if there
        # are messages and no offset whose metadata names the attempt: if the response is lost, the attempt would not be
        # recognised, and its messages would be sent again.
        changed = {
            tp
            for tp, position in positions.items()
            if self._committed_positions.get(tp) != position or tp.partition in states
        }
        commits_all = confirm_unchanged or (self._delivery.has_uncommitted_messages and changed.isdisjoint(references))
        offsets = {
            tp: CommittedOffset(
                position,
                references[tp].to_metadata()
                if tp in references
                else make_model_metadata(self.model, self.num_partitions),
            )
            for tp, position in positions.items()
            if commits_all or tp in changed
        }
        return CommitAttempt(offsets, references, states)

    def _apply_if_committed(self, attempt: CommitAttempt) -> None:
        """Read the committed offsets, and call `_apply_effect` if an attempt whose response was lost has set them.

        The metadata of the committed offsets name the attempt that committed them. All offsets of an attempt take
        effect together, so one partition with the attempt's metadata is enough.
        """
        for tp in attempt.offsets.keys() & attempt.references.keys():
            committed = self._consumer.fetch_committed([tp], client.REQUEST_SECONDS)[tp]
            if committed is not None and committed.metadata == attempt.references[tp].to_metadata():
                return self._apply_effect(attempt)

    def _apply_effect(self, attempt: CommitAttempt) -> None:
        """Record the offsets and states of an attempt to commit that has taken effect, and drop its messages.

        The messages are kept until then, so that a failed attempt can be repeated.
        """
        self._attempt = None
        if attempt.offsets:
            self.confirmed_at = time.monotonic()
        # Partitions that moved to another process since the attempt are skipped.
        for tp in attempt.offsets.keys() & self._request.positions.keys():
            self._committed_positions[tp] = attempt.offsets[tp].offset
            if tp in attempt.references:
                self.reference_by_partition[tp] = attempt.references[tp]
        if self._request.states is attempt.states:  # they are saved, so another attempt must not save them again
            self._request = self._request._replace(states={})
        self._delivery.mark_committed()


def _needs_transaction(delivery: Delivery, payload: CommitPayload) -> bool:
    """Return whether the delivery uses transactions and the commit has any message to send."""
    return delivery.is_transactional and (delivery.has_uncommitted_messages or bool(payload.messages))
