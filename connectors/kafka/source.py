"""The event source: a topic whose partitions are shared with the other members of a consumer group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import kafka.errors as errors
from kafka import KafkaConsumer
from kafka.structs import ConsumerGroupMetadata, MemberState, TopicPartition

from connectors.kafka.bounded_fetch import FetchLimits, limit_fetches
from connectors.kafka.client import CONNECT_SECONDS, DELIVERY_SECONDS, connect, translate, translate_errors
from connectors.kafka.commits import CommitManager
from connectors.kafka.delivery import Delivery
from connectors.kafka.group import RebalanceListener, SameModelAssignor
from connectors.kafka.liveness import LivenessCheck
from connectors.kafka.record_columns import MessageColumns, to_messages
from connectors.kafka.start_point import LostState, find_start
from connectors.kafka.state import StateTopic
from deformer_stream import log
from deformer_stream.errors import DeformerError, InvariantViolated, Unavailable
from deformer_stream.runtime.ports import NO_STATE, CollectState, PartitionState, PollResult, RestoredPartition

_REBALANCING = (
    errors.RebalanceInProgressError,
    errors.CommitFailedError,
    errors.IllegalGenerationError,
    errors.UnknownMemberIdError,
)
HEARTBEAT_SECONDS = 1.0
"""Seconds between heartbeats. A member is informed of a rebalance with the response to a heartbeat."""

RETRY_SECONDS = 0.5
"""Seconds to wait after a failed poll or commit before the next attempt."""
CONFIRM_SECONDS = 10.0
"""Seconds after which unchanged offsets are committed again. If another process uses the same instance name, the broker
refuses the commit, so that this process ends."""


def _collect_no_state(partitions: frozenset[int]) -> Mapping[int, PartitionState]:
    """Return no state to save; the default before the pipeline sets its own function."""
    return NO_STATE


class KafkaSource:
    """A Kafka topic as an endless source of events, whose partitions are shared by the members of a consumer group.

    Offsets are committed by `commit` and `begin_commit`, and when a partition moves to another member. In the latter
    case, the partition's state is committed with the offsets of all polls whose effects are written to the sinks. The
    next `PollResult` then lists the partition as revoked. Partitions move one by one (cooperative assignment). Messages
    of aborted transactions are skipped.

    Only the thread that created the object may use it.

    Args:
        bootstrap_servers: Comma-separated host:port pairs.
        topic: The topic to consume.
        group: Name of the consumer group.
        start: Where a group without committed offsets begins: with the earliest event of each partition, or with the
            first event that is sent after the start.
        security: kafka-python's keyword arguments for encryption and login; None for a plain connection without login.
            They are never logged.
        max_poll_records: Largest number of messages in one poll.
        session_seconds: If the group receives no heartbeat of this member for this long, its partitions go to others.
        delivery: Buffers outgoing messages and sends them with a commit. Give `delivery` and `state` together or
            neither.
        state: The topic that stores the state of open records.
        on_lost_state: What to do if saved state, or events that it needs, are gone; see `LostState`.
        model: Fingerprint (hash) of the model. A member whose model differs from the group's gets no partitions.
        instance: A name of this process that stays the same over restarts, so that a restart moves no partitions. None
            if there is no such name.
        patience: Seconds without a response after which the brokers count as unavailable and an error is raised.
        fetch_limits: Largest sizes of messages and batches, or None for the defaults.

    Raises:
        Unavailable: No broker responds, or the topic does not exist.
        ConfigError: The broker refuses the connection.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        topic: str,
        group: str,
        start: Literal["earliest", "latest"] = "earliest",
        security: dict[str, Any] | None = None,
        max_poll_records: int = 8192,
        session_seconds: float = 45.0,
        *,
        delivery: Delivery | None = None,
        state: StateTopic | None = None,
        on_lost_state: LostState = "refuse",
        model: str = "",
        instance: str | None = None,
        patience: float = 120.0,
        fetch_limits: FetchLimits | None = None,
    ) -> None:
        self.topic = topic
        self.collect_state: CollectState = _collect_no_state
        self._servers, self._start = bootstrap_servers, start
        self._state, self._on_lost_state = state, on_lost_state
        self._session, self._patience = session_seconds, patience
        self._assignor = SameModelAssignor(model)
        # Offset of the next event of each partition, after all polls, and after the polls whose effects are written.
        self._polled_positions: dict[TopicPartition, int] = {}
        self._written_positions: dict[TopicPartition, int] = {}
        # Times at which partitions were assigned that are not restored yet.
        self._assigned_at: dict[TopicPartition, float] = {}
        self._restore_error = ""  # the last logged reason why a restore failed
        # Committed offsets of partitions whose earlier events (the history) are still being read again.
        self._history_ends: dict[TopicPartition, int] = {}
        self._revoked: list[int] = []  # revoked since the last poll
        self._is_closed = False
        self._consumer: KafkaConsumer = connect(
            KafkaConsumer,
            bootstrap_servers,
            security,
            group_id=group,
            group_instance_id=instance,
            enable_auto_commit=False,
            auto_offset_reset="none",  # `find_start` decides where a partition begins
            isolation_level="read_committed",
            allow_auto_create_topics=False,
            partition_assignment_strategy=[self._assignor],
            max_poll_records=max_poll_records,
            session_timeout_ms=int(session_seconds * 1000),
            # A process that hangs loses its membership in half of the time that the commits of the others wait for it.
            max_poll_interval_ms=int(max(session_seconds, patience / 2) * 1000),
            heartbeat_interval_ms=int(HEARTBEAT_SECONDS * 1000),
        )
        limit_fetches(self._consumer, fetch_limits)
        self._commits = CommitManager(self._consumer, delivery, state)
        self._liveness = LivenessCheck(self._consumer, bootstrap_servers, topic, patience)
        try:
            with translate_errors(bootstrap_servers, f"looking for topic {topic!r}", ValueError, TypeError):
                self._consumer.subscribe(
                    [topic], listener=RebalanceListener(self._on_assigned, self._on_revoked, self._on_lost)
                )
                self.partitions = len(self._consumer.partitions_for_topic(topic))
            if not self.partitions:
                raise Unavailable(f"topic {topic!r} does not exist on {bootstrap_servers}: create it or check --topic")
        except DeformerError:
            self.close()
            raise

    @property
    def model_fingerprint(self) -> str:
        """The fingerprint of this member's model, which it sends to the group at the next rebalance."""
        return self._assignor.model

    @model_fingerprint.setter
    def model_fingerprint(self, fingerprint: str) -> None:
        self._assignor.model = fingerprint

    @property
    def is_exhausted(self) -> bool:
        """Whether the source has ended. It is always False, because a topic is endless."""
        return False

    @property
    def assigned_partitions(self) -> frozenset[int]:
        """The numbers of the partitions that this process owns."""
        return frozenset(tp.partition for tp in self._consumer.assignment())

    def poll(self, timeout: float) -> PollResult:
        """Return the events that are available, in order within each partition.

        Call it only after the effects of all earlier polls (such as alerts) are written to the sinks. So if a partition
        is revoked during the call, the events of these polls are committed.

        Args:
            timeout: Maximum time to wait for events, in seconds.

        Returns:
            The events, with the partitions that were revoked, restored, or read to the end of their history since the
            last call.

        Raises:
            ConfigError: The group uses another model.
            StateError: The saved state of a partition is gone.
            Unavailable: The brokers have not responded for longer than the constructor's `patience` (in seconds).
        """
        self._written_positions = dict(self._polled_positions)
        if self._must_end_commit():
            self.end_commit()
        fetched = self._fetch(timeout)  # partitions may be assigned, and revoked ones committed, during this call
        self._end_failed_transaction()
        self._assignor.check_admission()
        for tp, chunks in fetched.items():
            last_offset = int(chunks[-1].offsets[-1])
            self._polled_positions[tp] = last_offset + 1
        revoked, self._revoked = tuple(sorted(self._revoked)), []
        restored = tuple(self._restore_assigned())
        with translate_errors(self._servers, f"reading topic {self.topic!r}"):
            self._liveness.check_progress()
            caught_up = self._pop_caught_up()
        return PollResult(to_messages(self.topic, fetched), revoked, restored, caught_up)

    def _must_end_commit(self) -> bool:
        """Return whether the commit in progress must be ended before the next poll.

        A commit in the background may continue during a poll, which saves time. It must be ended if its attempt has
        finished, if newly assigned partitions wait for their saved state, or during a rebalance. A commit without
        background attempt must be ended too.
        """
        commits = self._commits
        if commits.is_finished:
            return True
        if not commits.has_commit:
            return False
        has_unrestored_partitions = bool(self._assigned_at)
        if has_unrestored_partitions or not commits.is_in_background:
            return True
        is_rebalancing = self._get_membership() is None
        return is_rebalancing

    def prefetch(self) -> None:
        """Start to fetch messages for the next `poll`. Does not block."""
        self._consumer._fetcher.prefetch()

    def _poll(self, timeout: float) -> dict[TopicPartition, list[MessageColumns]]:
        """Poll kafka-python's consumer for at most `timeout` seconds, and return the messages by partition.

        kafka-python wraps an exception that a rebalance callback has raised in a KafkaError. Here the original
        exception is raised.
        """
        try:
            return dict(self._consumer.poll(timeout_ms=timeout * 1000))
        except errors.KafkaError as error:
            original = error.__cause__
            # A wrapped exception is of the class KafkaError itself. All other errors of kafka-python are of subclasses.
            if type(error) is errors.KafkaError and original is not None:
                raise original from None
            raise

    def _fetch(self, timeout: float) -> dict[TopicPartition, list[MessageColumns]]:
        """Poll kafka-python's consumer and handle its errors.

        Partitions whose next offset no longer exists are restored again from their committed offset.

        Args:
            timeout: Maximum time to wait for messages, in seconds.

        Returns:
            The messages by partition; none if the poll failed and a later one may succeed.

        Raises:
            DeformerError: The error is permanent, or polls have failed for longer than the constructor's `patience` (in
                seconds).
        """
        try:
            fetched = self._poll(timeout)
            self._liveness.record_success()
            return fetched
        except errors.OffsetOutOfRangeError as error:
            # Messages expired before they were read, or the topic was replaced.
            (offset_by_partition,) = error.args
            offsets = {tp.partition: offset_by_partition[tp] for tp in offset_by_partition}
            log.get_logger("kafka").warning("offset_out_of_range", offsets=offsets)
            # Treat the partitions as if they were revoked and assigned again.
            self._remove_partitions(offset_by_partition)
            self._on_assigned(offset_by_partition)
        except (errors.KafkaError, OSError) as error:
            self._liveness.record_failure(error)
            time.sleep(min(timeout, RETRY_SECONDS))
        return {}

    def _end_failed_transaction(self) -> None:
        """End the transaction that a failed commit of revoked partitions has left open.

        An open transaction hides later messages from consumers that read only committed messages. If the broker does
        not respond, the next poll or commit tries again.
        """
        # With a commit in progress, its next attempt ends the transaction.
        if self._commits.has_failed and not self._commits.has_commit:
            try:
                self._commits.renew_producer()
            except Unavailable as error:
                log.get_logger("kafka").debug("producer_renewal_failed", error=str(error))

    def _pop_caught_up(self) -> tuple[int, ...]:
        """Return the numbers of the partitions whose history was read to its end since the last call.

        The history of a partition is the events before its committed offset, which are read again to restore its state.
        """
        # kafka-python's position is compared, because it passes transaction markers, which no poll returns.
        caught_up = [tp for tp, end_offset in self._history_ends.items() if self._get_position(tp) >= end_offset]
        for tp in caught_up:
            del self._history_ends[tp]
            self._polled_positions[tp] = self._get_position(tp)
        return tuple(tp.partition for tp in caught_up)

    def _restore_assigned(self) -> Iterator[RestoredPartition]:
        """Restore the partitions that were assigned since the last call, and yield the saved state of each.

        If the brokers do not respond, the remaining partitions are restored by a later call.

        Raises:
            Unavailable: A partition could not be restored for longer than the constructor's `patience` (in seconds).
        """
        for tp in sorted(self._assigned_at):
            try:
                yield self._restore(tp)
            except Unavailable as error:
                if time.monotonic() - self._assigned_at[tp] > self._patience:
                    raise
                if str(error) != self._restore_error:  # log a repeated error once
                    self._restore_error = str(error)
                    log.get_logger("kafka").warning("restore_failed_retrying", partition=tp.partition, error=str(error))
                return
            del self._assigned_at[tp]
            self._restore_error = ""

    def _restore(self, tp: TopicPartition) -> RestoredPartition:
        """Return the saved state of one partition, and set the consumer to the first event that must be read for it."""
        with translate_errors(self._servers, f"restoring partition {tp.partition} of topic {self.topic!r}"):
            start = find_start(self._consumer, tp, self._start, self._state, self._on_lost_state)
            self._consumer.seek(tp, start.position)
            self._consumer.resume(tp)
        if start.reference is not None:
            self._commits.reference_by_partition[tp] = start.reference
        self._history_ends[tp] = start.restored.committed_offset  # events before it only rebuild the state
        return start.restored

    def _get_position(self, tp: TopicPartition) -> int:
        """Return the offset of the next event to read from a partition, or -1 if it is unknown."""
        position = self._consumer.position(tp, timeout_ms=0)
        return -1 if position is None else int(position)

    def commit(self, states: Mapping[int, PartitionState] = NO_STATE) -> None:
        """Commit the offsets of all polled events, the given states, and what sinks have written.

        The method returns when the commit has taken effect. During a rebalance the broker accepts no commits. The
        rebalance is then completed first, without reading new messages, and the partitions that remain are committed.
        The next poll lists the others as revoked.

        Args:
            states: The state to save, by partition number.

        Raises:
            Unavailable: The commit has failed for longer than the constructor's `patience` (in seconds).
            ConfigError: The broker refuses the commit.
        """
        self._prepare_commit(states)
        self.end_commit()

    def begin_commit(
        self, states: Mapping[int, PartitionState] = NO_STATE, on_committed: Callable[[], None] = lambda: None
    ) -> None:
        """Begin a commit like `commit`, and return before it has ended if it can run in the background.

        `poll` may be called meanwhile. What sinks write in the meantime belongs to the next commit. If the attempt in
        the background fails, the next `poll` or commit repeats it.

        Args:
            states: The state to save, by partition number.
            on_committed: A function that is called when the commit has taken effect, possibly by another thread. It is
                not called if the attempt in the background failed and was repeated.
        """
        self._prepare_commit(states)
        group = self._get_membership()
        # Without membership (during a rebalance), or if no background attempt was started, commit before returning.
        if group is None or not self._commits.begin_sending(group, on_committed):
            self.end_commit()
            on_committed()

    def _prepare_commit(self, states: Mapping[int, PartitionState]) -> None:
        """Wait for the end of the previous commit and prepare the next one, without sending anything.

        Args:
            states: The state to save, by partition number.
        """
        self._written_positions = dict(self._polled_positions)
        self.end_commit()
        # From time to time unchanged offsets are committed too. If another process uses the same instance name, the
        # broker refuses the commit, so that this process ends.
        confirm_unchanged = time.monotonic() - self._commits.confirmed_at > CONFIRM_SECONDS
        self._commits.begin(self._collect_positions(), states, confirm_unchanged)

    def end_commit(self) -> None:
        """Wait until the commit in progress, if any, has taken effect; repeat it after errors that may pass.

        Raises:
            Unavailable: The commit has failed for longer than the constructor's `patience` (in seconds). No further
                attempt is made.
            ConfigError: The broker refuses the commit. No further attempt is made.
        """
        deadline = time.monotonic() + self._patience
        logged_errors: set[str] = set()  # each kind of error is logged once per commit
        is_retry = False
        while self._commits.has_commit:
            try:
                if is_retry:  # a rebalance may have caused the failure
                    self._finish_rebalance()
                self._try_to_commit()
            except (errors.KafkaError, OSError, Unavailable) as error:
                translated = error if isinstance(error, Unavailable) else translate(error, self._servers, "committing")
                is_permanent = not isinstance(translated, Unavailable)
                if is_permanent or time.monotonic() > deadline:
                    self._commits.give_up()
                    raise translated from error
                error_name = type(error).__name__
                if error_name not in logged_errors:
                    log.get_logger("kafka").warning("commit_failed_retrying", error=error_name)
                    logged_errors.add(error_name)
                if not isinstance(error, _REBALANCING):  # `_finish_rebalance` waits for the end of a rebalance
                    time.sleep(RETRY_SECONDS)
                is_retry = True

    def _try_to_commit(self) -> None:
        """Make one attempt to commit, or wait for the attempt in the background.

        Raises:
            KafkaError: The attempt failed.
            Unavailable: The producer could not be replaced after a failed attempt.
        """
        group = None  # an attempt in the background received the group when it was started
        if not self._commits.is_in_background:
            group = self._get_membership()
            if group is None:
                raise errors.RebalanceInProgressError()  # `end_commit` completes the rebalance and tries again
            self._commits.recover()  # does nothing if no earlier attempt has failed
        offsets = self._commits.send(group)
        if offsets is not None:  # they were not committed in a transaction
            self._consumer.commit(offsets, timeout_ms=DELIVERY_SECONDS * 1000)
        self._commits.mark_committed()

    def _get_membership(self) -> ConsumerGroupMetadata | None:
        """Return the group's name with this member's id and generation, or None during a rebalance."""
        group = self._consumer.group_metadata()
        is_rebalancing = self._consumer.assignment() and group.state is not MemberState.STABLE
        return None if is_rebalancing else group

    def _collect_positions(self) -> dict[TopicPartition, int]:
        """Return the offset of the next event to read from each partition, except partitions that are being restored.

        A partition is being restored until its saved state is loaded and the events before its committed offset, which
        bring that state up to date, are read again. Until then, its offset must not be committed.
        """
        # `_assigned_at` holds partitions whose saved state is not loaded yet. `_history_ends` holds those whose earlier
        # events are still being read again.
        restored = [
            tp for tp in self._consumer.assignment() if tp not in self._history_ends and tp not in self._assigned_at
        ]
        positions = {tp: self._get_position(tp) for tp in restored}  # -1 if unknown
        return {tp: position for tp, position in positions.items() if position >= 0}

    def _finish_rebalance(self) -> None:
        """Poll kafka-python's consumer once, so that it takes part in a rebalance of its group.

        The poll must return no messages, because the caller is in the middle of a commit. So all partitions are paused
        during the poll and resumed after it.
        """
        active = [tp for tp in self._consumer.assignment() if tp not in self._consumer.paused()]
        self._consumer.pause(*active)
        try:
            if self._poll(0.1):
                raise InvariantViolated(
                    "kafka-python has returned messages of a paused partition; this is a bug, please report it"
                )
        finally:
            # Partitions that were assigned meanwhile stay paused until `_restore` resumes them.
            resumable = self._consumer.assignment() - self._assigned_at.keys()
            self._consumer.resume(*[tp for tp in active if tp in resumable])

    def get_lag(self) -> dict[tuple[str, int], int]:
        """Return the number of unread messages of each assigned partition, as far as it is known without a request.

        Returns:
            A mapping from (topic, partition number) to the number of messages.
        """
        lag_by_partition = {}
        for tp in self._consumer.assignment():
            end_offset, position = self._consumer.highwater(tp), self._consumer.position(tp, timeout_ms=0)
            if end_offset is not None and position is not None:
                lag_by_partition[tp.topic, tp.partition] = max(0, end_offset - position)
        return lag_by_partition

    def close(self) -> None:
        """Close the consumer without committing.

        Without an instance name, this process leaves the group, and its partitions move to other members at once. With
        an instance name, it stays a member until its session times out, so that a restart moves no partitions.
        """
        self._is_closed = True  # `_on_revoked`, which the consumer may call while it closes, then commits nothing
        with translate_errors(self._servers, "closing the consumer"):
            self._consumer.close(autocommit=False, timeout_ms=CONNECT_SECONDS * 1000)

    # `RebalanceListener` calls the following methods in kafka-python's thread, while our thread waits inside a call.

    def _on_assigned(self, partitions: Iterable[TopicPartition]) -> None:
        """Pause newly assigned partitions until the next `poll` has restored their state."""
        for tp in partitions:
            self._consumer.seek(tp, 0)  # any position, so that kafka-python does not look for one
            self._consumer.pause(tp)
            self._assigned_at[tp] = time.monotonic()
        numbers = sorted(tp.partition for tp in partitions)
        log.get_logger("kafka").info("partitions_assigned", topic=self.topic, partitions=numbers)

    async def _on_revoked(self, partitions: Iterable[TopicPartition]) -> None:
        """Commit the offsets and the state of revoked partitions, so that the next owner continues there.

        Only events whose effects are written are committed. Nothing is committed while the source is being closed.

        Args:
            partitions: The partitions that this process must give up.
        """
        # `_history_ends` holds partitions whose state is not restored yet; nothing new can be committed for them.
        committable = {tp for tp in partitions if tp in self._written_positions and tp not in self._history_ends}
        if committable and not self._is_closed:
            deadline = time.monotonic() + self._session / 2  # no heartbeat is sent during this commit
            try:
                # A commit in progress is older than the state of the revoked partitions, so it comes first.
                if self._commits.has_commit:
                    await self._commit_within(deadline)
                states = self.collect_state(frozenset(tp.partition for tp in committable))
                positions = {
                    tp: offset for tp, offset in self._written_positions.items() if tp not in self._history_ends
                }
                self._commits.begin(positions, states)
                try:
                    await self._commit_within(deadline)
                finally:  # no later attempt could commit these partitions, because they belong to the next owner then
                    self._commits.give_up()
            except (errors.KafkaError, DeformerError) as error:
                # The next owner repeats these messages. Raising here would end the group's rebalance instead.
                log.get_logger("kafka").warning("revoked_partitions_not_committed", error=type(error).__name__)
        self._remove_partitions(partitions)

    async def _commit_within(self, deadline: float) -> None:
        """Commit once, before a deadline. If a commit already runs in the background, wait for that one instead.

        Args:
            deadline: The deadline, as `time.monotonic()`.

        Raises:
            KafkaError: The commit failed or took too long. It is also raised if an earlier commit has an unknown
                outcome, because too little time is left to find it out.
        """
        if self._commits.has_failed:
            # `_on_revoked` logs this. Nothing is lost: the next owner processes the uncommitted messages again.
            raise errors.KafkaConnectionError(
                "cannot commit offsets, because the outcome of the previous commit is unknown: nothing is lost, the "
                "next owner of the partitions processes their messages again"
            )
        offsets = self._commits.send(self._consumer.group_metadata(), deadline - time.monotonic())
        if offsets is not None:
            await self._consumer.commit_async(offsets)
        self._commits.mark_committed()

    def _on_lost(self, partitions: Iterable[TopicPartition]) -> None:
        """Remove partitions that other members own already, because the group has removed this member.

        Args:
            partitions: The partitions that this process owned.
        """
        self._assignor.clear_assignment()
        self._remove_partitions(partitions)

    def _remove_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        """Delete what is stored about partitions that now belong to another process, and list them as revoked."""
        for tp in partitions:
            for value_by_partition in (self._polled_positions, self._written_positions, self._history_ends):
                value_by_partition.pop(tp, None)
            self._assigned_at.pop(tp, None)
            self._revoked.append(tp.partition)
        self._commits.remove_partitions(partitions)
