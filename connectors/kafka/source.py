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
    """A topic as an endless source of events, shared by the members of a consumer group.

    Only `commit` commits offsets. They are the offset of the next event to read. When a partition moves to another
    member, the events of all polls but the last are committed with its state (see `poll`), the next `PollResult`
    reports it, and it is never committed again. Partitions move one by one (cooperative assignment). Messages of
    aborted transactions are skipped.

    The object belongs to the thread that created it.

    Args:
        bootstrap_servers: Comma-separated host:port pairs.
        topic: The events topic.
        group: The consumer group.
        start: Where a group without committed offsets begins.
        security: Arguments of the client for encryption and login. They are never logged.
        max_poll_records: Largest number of messages in one poll.
        session_seconds: Seconds of silence after which the group gives this member's partitions to others.
        delivery: Sends messages with a commit; give `delivery` and `state` together or neither.
        state: Encodes saved state.
        on_lost_state: What to do if the saved state is gone.
        model: Fingerprint of the model; the members of a group must agree on it.
        instance: A name of this process that stays the same over restarts, so that a restart moves no partitions.
        patience: Seconds without a response after which the brokers count as unavailable.
        fetch_limits: Limits on the size of messages and batches.

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
        """The fingerprint that this member sends with the next rebalance."""
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
        """Return the events that are available, after at most `timeout` seconds, in order within each partition.

        Calling it states that the effects of all earlier polls are written. A partition that is revoked during the call
        is committed up to there. `PollResult.revoked_partitions` were revoked before `PollResult.data` arrived.

        Raises:
            ConfigError: The group uses another model.
            StateError: The saved state of a partition is gone.
            Unavailable: The brokers have not responded for longer than `patience`.
        """
        self._written_positions = dict(self._polled_positions)
        if self._must_end_commit():
            self.end_commit()
        fetched = self._fetch(timeout)
        self._end_failed_transaction()
        self._assignor.check_admission()
        for tp, chunks in fetched.items():
            self._polled_positions[tp] = int(chunks[-1].offsets[-1]) + 1
        revoked, self._revoked = tuple(sorted(self._revoked)), []
        restored = tuple(self._restore_assigned())
        with translate_errors(self._servers, f"reading topic {self.topic!r}"):
            self._liveness.check_progress()
            caught_up = self._pop_caught_up()
        return PollResult(to_messages(self.topic, fetched), revoked, restored, caught_up)

    def _must_end_commit(self) -> bool:
        """Return whether the commit in progress must be ended before the next poll.

        This is the case if its background attempt has finished, if it has none, if partitions wait to be restored, or
        during a rebalance.
        """
        commits = self._commits
        if commits.is_finished:
            return True
        if not commits.has_commit:
            return False
        return bool(self._assigned_at) or not commits.is_in_background or self._get_membership() is None

    def prefetch(self) -> None:
        """Start to fetch messages for the next `poll`. Does not block."""
        self._consumer._fetcher.prefetch()

    def _poll(self, timeout: float) -> dict[TopicPartition, list[MessageColumns]]:
        """Poll the client for at most `timeout` seconds and return the messages by partition.

        If a rebalance callback of this class has raised an exception, that exception is raised instead of the client's
        wrapper.
        """
        try:
            return dict(self._consumer.poll(timeout_ms=timeout * 1000))
        except errors.KafkaError as error:
            if type(error) is errors.KafkaError and error.__cause__ is not None:
                raise error.__cause__ from None  # the exception of the callback
            raise

    def _fetch(self, timeout: float) -> dict[TopicPartition, list[MessageColumns]]:
        """Poll the client and handle its errors.

        Partitions whose offset no longer exists are restored again. If the brokers do not respond, nothing is returned.
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
            self._remove_partitions(offset_by_partition)
            self._on_assigned(offset_by_partition)
        except (errors.KafkaError, OSError) as error:
            self._liveness.record_failure(error)
            time.sleep(min(timeout, RETRY_SECONDS))
        return {}

    def _end_failed_transaction(self) -> None:
        """End the transaction that a failed commit of revoked partitions has left open, because it blocks readers.

        If the broker does not respond, the next poll or commit tries again.
        """
        if self._commits.has_failed and not self._commits.has_commit:
            try:
                self._commits.renew_producer()
            except Unavailable as error:
                log.get_logger("kafka").debug("producer_renewal_failed", error=str(error))

    def _pop_caught_up(self) -> tuple[int, ...]:
        """Return the partitions whose history (events before the committed offset) was read since the last call.

        The position of the client counts, because transaction markers at the end of the history are never polled.
        """
        caught_up = [tp for tp, end_offset in self._history_ends.items() if self._get_position(tp) >= end_offset]
        for tp in caught_up:
            del self._history_ends[tp]
            self._polled_positions[tp] = self._get_position(tp)
        return tuple(tp.partition for tp in caught_up)

    def _restore_assigned(self) -> Iterator[RestoredPartition]:
        """Restore the assigned partitions one after another and yield their states.

        If the brokers do not respond, the next poll tries again.

        Raises:
            Unavailable: A partition could not be restored for longer than `patience`.
        """
        for tp in sorted(self._assigned_at):
            try:
                yield self._restore(tp)
            except Unavailable as error:
                if time.monotonic() - self._assigned_at[tp] > self._patience:
                    raise
                if str(error) != self._restore_error:
                    self._restore_error = str(error)
                    log.get_logger("kafka").warning("restore_failed_retrying", partition=tp.partition, error=str(error))
                return
            del self._assigned_at[tp]
            self._restore_error = ""

    def _restore(self, tp: TopicPartition) -> RestoredPartition:
        """Return the saved state of one partition, and let the consumer continue at the first event that it needs."""
        with translate_errors(self._servers, f"restoring partition {tp.partition} of topic {self.topic!r}"):
            start = find_start(self._consumer, tp, self._start, self._state, self._on_lost_state)
            self._consumer.seek(tp, start.position)
            self._consumer.resume(tp)
        if start.reference is not None:
            self._commits.reference_by_partition[tp] = start.reference
        self._history_ends[tp] = start.restored.committed_offset
        return start.restored

    def _get_position(self, tp: TopicPartition) -> int:
        """Return the offset of the next event of a partition, or -1 if it is unknown."""
        position = self._consumer.position(tp, timeout_ms=0)
        return -1 if position is None else int(position)

    def commit(self, states: Mapping[int, PartitionState] = NO_STATE) -> None:
        """Commit the offsets of all partitions, the given states, and what sinks have written; block until it is
        done.

        During a rebalance the broker accepts no commits. The rebalance is then completed first, without accepting new
        messages, and the partitions that remain are committed. The next poll reports the others.

        Args:
            states: State to save, by partition number.

        Raises:
            Unavailable: The commit has failed for longer than `patience`.
        """
        self._prepare_commit(states)
        self.end_commit()

    def begin_commit(
        self, states: Mapping[int, PartitionState] = NO_STATE, on_committed: Callable[[], None] = lambda: None
    ) -> None:
        """Begin a commit, and if it is a transaction, return before it has ended.

        The next `poll` may be called meanwhile; what sinks write then belongs to the next commit. A failed attempt is
        repeated by the next `poll` or commit.

        Args:
            states: State to save, by partition number.
            on_committed: Called when the first attempt has taken effect, possibly from another thread.
        """
        self._prepare_commit(states)
        group = self._get_membership()
        if group is None or not self._commits.begin_sending(group, on_committed):
            self.end_commit()
            on_committed()

    def _prepare_commit(self, states: Mapping[int, PartitionState]) -> None:
        """Wait for the previous commit and begin the next one, without sending anything."""
        self._written_positions = dict(self._polled_positions)
        self.end_commit()
        confirm_unchanged = time.monotonic() - self._commits.confirmed_at > CONFIRM_SECONDS
        self._commits.begin(self._collect_positions(), states, confirm_unchanged)

    def end_commit(self) -> None:
        """Wait until the commit that was begun, if any, has taken effect.

        Raises:
            Unavailable: The commit has failed for longer than `patience`. It is then abandoned.
            ConfigError: The broker refuses the commit. It is then abandoned.
        """
        deadline = time.monotonic() + self._patience
        logged_errors: set[str] = set()
        is_retry = False
        while self._commits.has_commit:
            try:
                if is_retry:
                    self._finish_rebalance()
                self._try_to_commit()
            except (errors.KafkaError, OSError, Unavailable) as error:
                translated = error if isinstance(error, Unavailable) else translate(error, self._servers, "committing")
                if not isinstance(translated, Unavailable) or time.monotonic() > deadline:
                    self._commits.give_up()
                    raise translated from error
                error_name = type(error).__name__
                if error_name not in logged_errors:
                    log.get_logger("kafka").warning("commit_failed_retrying", error=error_name)
                    logged_errors.add(error_name)
                if not isinstance(error, _REBALANCING):
                    time.sleep(RETRY_SECONDS)
                is_retry = True

    def _try_to_commit(self) -> None:
        """Make one attempt to commit, or wait for the attempt in the background.

        Raises:
            KafkaError: The attempt failed; the error is one of the client.
            Unavailable: The producer could not be renewed after a failed attempt.
        """
        group = None
        if not self._commits.is_in_background:
            group = self._get_membership()
            if group is None:
                raise errors.RebalanceInProgressError()
            self._commits.recover()
        offsets = self._commits.send(group)
        if offsets is not None:
            self._consumer.commit(offsets, timeout_ms=DELIVERY_SECONDS * 1000)
        self._commits.mark_committed()

    def _get_membership(self) -> ConsumerGroupMetadata | None:
        """Return this process's membership in the group, or None during a rebalance."""
        group = self._consumer.group_metadata()
        return None if self._consumer.assignment() and group.state is not MemberState.STABLE else group

    def _collect_positions(self) -> dict[TopicPartition, int]:
        """Return the offset of the next event of each partition, except partitions that are still being restored."""
        restored = [
            tp for tp in self._consumer.assignment() if tp not in self._history_ends and tp not in self._assigned_at
        ]
        positions = {tp: self._get_position(tp) for tp in restored}
        return {tp: position for tp, position in positions.items() if position >= 0}

    def _finish_rebalance(self) -> None:
        """Let the client rejoin its group while all partitions are paused, so that no messages are delivered."""
        active = [tp for tp in self._consumer.assignment() if tp not in self._consumer.paused()]
        self._consumer.pause(*active)
        try:
            if self._poll(0.1):
                raise InvariantViolated("a paused partition has delivered messages; this is a bug, please report it")
        finally:
            restored = self._consumer.assignment() - self._assigned_at.keys()  # `_restore` resumes the others
            self._consumer.resume(*[tp for tp in active if tp in restored])

    def get_lag(self) -> dict[tuple[str, int], int]:
        """Return the number of unread messages by topic and partition, as far as it is known without a request."""
        lag_by_partition = {}
        for tp in self._consumer.assignment():
            end_offset, position = self._consumer.highwater(tp), self._consumer.position(tp, timeout_ms=0)
            if end_offset is not None and position is not None:
                lag_by_partition[tp.topic, tp.partition] = max(0, end_offset - position)
        return lag_by_partition

    def close(self) -> None:
        """Leave the group without committing, so that its partitions move to other members at once.

        A process with an instance name stays a member until its session times out, so that a restart moves no
        partitions.
        """
        self._is_closed = True
        with translate_errors(self._servers, "closing the consumer"):
            self._consumer.close(autocommit=False, timeout_ms=CONNECT_SECONDS * 1000)

    # `RebalanceListener` calls the following methods on the client's thread, while the own thread waits.

    def _on_assigned(self, partitions: Iterable[TopicPartition]) -> None:
        """Pause newly assigned partitions; `_restore` restores and resumes them."""
        for tp in partitions:
            self._consumer.seek(tp, 0)
            self._consumer.pause(tp)
            self._assigned_at[tp] = time.monotonic()
        numbers = sorted(tp.partition for tp in partitions)
        log.get_logger("kafka").info("partitions_assigned", topic=self.topic, partitions=numbers)

    async def _on_revoked(self, partitions: Iterable[TopicPartition]) -> None:
        """Commit revoked partitions with their state, so that the next owner continues there.

        Only events whose effects are written are committed. Nothing is committed while the source is being closed.
        """
        leaving = {tp for tp in partitions if tp in self._written_positions and tp not in self._history_ends}
        if leaving and not self._is_closed:
            deadline = time.monotonic() + self._session / 2  # no heartbeat is sent during this commit
            try:
                if self._commits.has_commit:  # it is older than the state of the revoked partitions
                    await self._commit_within(deadline)
                states = self.collect_state(frozenset(tp.partition for tp in leaving))
                positions = {
                    tp: offset for tp, offset in self._written_positions.items() if tp not in self._history_ends
                }
                self._commits.begin(positions, states)
                try:
                    await self._commit_within(deadline)
                finally:
                    self._commits.give_up()
            except (errors.KafkaError, DeformerError) as error:
                # The next owner repeats these messages. Raising here would end the group's rebalance instead.
                log.get_logger("kafka").warning("revoked_partitions_not_committed", error=type(error).__name__)
        self._remove_partitions(partitions)

    async def _commit_within(self, deadline: float) -> None:
        """Make one attempt to commit before the deadline, without finding out how an earlier attempt ended."""
        if self._commits.has_failed:
            raise errors.KafkaConnectionError("the previous commit has not ended")
        offsets = self._commits.send(self._consumer.group_metadata(), deadline - time.monotonic())
        if offsets is not None:
            await self._consumer.commit_async(offsets)
        self._commits.mark_committed()

    def _on_lost(self, partitions: Iterable[TopicPartition]) -> None:
        """Remove all partitions after the group has continued without this member."""
        self._assignor.clear_assignment()
        self._remove_partitions(partitions)

    def _remove_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        """Remove partitions that now belong to another process."""
        for tp in partitions:
            for value_by_partition in (self._polled_positions, self._written_positions, self._history_ends):
                value_by_partition.pop(tp, None)
            self._assigned_at.pop(tp, None)
            self._revoked.append(tp.partition)
        self._commits.remove_partitions(partitions)
