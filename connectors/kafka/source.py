"""The event source: a topic whose partitions are shared with the other members of a consumer group."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from connectors.kafka import client
from connectors.kafka.client import INVALID_NAME, check_reachable, load_client, make_error
from connectors.kafka.commits import CommitManager
from connectors.kafka.delivery import Delivery
from connectors.kafka.failure_limit import FailureLimit
from connectors.kafka.liveness import LivenessCheck
from connectors.kafka.membership import GroupMembership
from connectors.kafka.ports import (
    Consumer,
    ConsumerOptions,
    KafkaCluster,
    MessageColumns,
    OffsetOutOfRange,
    Offsets,
    ProducerFenced,
    RebalanceInProgress,
    TopicPartition,
)
from connectors.kafka.restore import PartitionRestorer
from connectors.kafka.start_point import LostState, StartPoint
from connectors.kafka.state import StateTopic
from connectors.kafka.topics import count_partitions
from deformer_stream import log
from deformer_stream.codec.payloads import Messages
from deformer_stream.engine.events import NO_TIME
from deformer_stream.errors import DeformerError, Unavailable
from deformer_stream.runtime.ports import (
    NO_STATE,
    PartitionState,
    PollResult,
    RestoredPartition,
    SourceCallbacks,
    do_nothing,
)

CONFIRM_SECONDS = 10.0
"""Seconds after which unchanged offsets are committed again. If another process uses the same instance name, the broker
refuses the commit, so that this process ends. The metadata of all partitions then state the models in use."""

STOP_SECONDS = 10.0
"""Seconds for which a commit is retried if the process is to end. Supervisors kill a process that takes too long, with
the Helm chart after 60 s, and a running attempt can take 35 s before it fails."""

_VALID_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")


@dataclass(slots=True)
class _Progress:
    """How far a partition has been read.

    Attributes:
        start: Offset at which the reading began.
        history_end: The committed offset while the events before it (the history) are read again, None afterwards.
        polled: Offset of the next event after all polls; None before the first event or the end of the history.
        written: The same after the polls whose effects are written.
        stopped_at: Offset of the next event while nothing is read, because the partition is left out; otherwise None.
    """

    start: int
    history_end: int | None
    polled: int | None = None
    written: int | None = None
    stopped_at: int | None = None


class KafkaSource:
    """A Kafka topic as an endless source of events, whose partitions are shared by the members of a consumer group.

    Offsets are committed by `commit` and `begin_commit`, and when a partition moves to another member. In the latter
    case, the partition's state is committed with the offsets of all polls whose effects are written to the sinks. The
    next `PollResult` then lists the partition as revoked. Partitions move one by one (cooperative assignment). Messages
    of aborted transactions are skipped.

    Only the thread that created the object may use it.

    Args:
        cluster: The brokers and the client library.
        topic: The topic to consume.
        group: Name of the consumer group.
        start: Where a group without committed offsets begins: with the earliest event of each partition, or with the
            first event that is sent after the start. Partitions that are added after the group has begun, whether or
            not a process was running, begin with their first event.
        max_poll_records: Largest number of messages in one poll.
        session_seconds: If the group receives no heartbeat of this member for this long, its partitions go to others.
        delivery: Buffers outgoing messages and sends them with a commit.
        state: The topic that stores the state of open records.
        on_lost_state: What to do if saved state, or events that it needs, are gone; see `LostState`.
        model: Fingerprint (hash) of the model. A process whose model differs from the group's is refused.
        instance: A name of this process that stays the same over restarts, so that a restart moves no partitions. None
            if there is no such name.
        patience: Seconds without a response after which the brokers count as unavailable and an error is raised.
        creates_partitions: Whether partitions are added to the state topic if `topic` gets more of them.

    Attributes:
        topic: The topic that is consumed.
        partitions: Number of its partitions when the object was created.
        callbacks: The callbacks of the pipeline; by default they do nothing. Once `callbacks.stop` is set, failed
            commits are retried for `STOP_SECONDS` only.

    Raises:
        MissingTopic: The topic does not exist.
        Unavailable: No broker responds.
        ConfigError: The broker refuses the connection, or the group uses another model.
    """

    def __init__(
        self,
        cluster: KafkaCluster,
        topic: str,
        group: str,
        start: Literal["earliest", "latest"] = "earliest",
        max_poll_records: int = 8192,
        session_seconds: float = 45.0,
        *,
        delivery: Delivery,
        state: StateTopic,
        on_lost_state: LostState = "refuse",
        model: str = "",
        instance: str | None = None,
        patience: float = 120.0,
        creates_partitions: bool = True,
    ) -> None:
        self.topic = topic
        self.callbacks = SourceCallbacks()
        self._left_out: frozenset[int] = frozenset()  # numbers of partitions
        self._cluster, self._session, self._patience = cluster, session_seconds, patience
        # Of the assigned partitions whose reading has begun. The others wait for their saved state. Another thread may
        # remove entries, see "rebalances" below.
        self._progress: dict[TopicPartition, _Progress] = {}
        self._poll_failures = FailureLimit(patience, "poll_failed_retrying")
        self._revoked: list[int] = []  # revoked since the last poll
        # For each revocation whose end the consumer has not reported yet, whether it has offsets to commit.
        self._revocations: deque[bool] = deque()
        self._fatal_error: Exception | None = None  # of a commit of revoked partitions; raised by the next poll
        self._has_joined = self._is_closed = False
        options = ConsumerOptions(
            group=group,
            instance=instance,
            session_seconds=session_seconds,
            # A process that hangs loses its membership in half of the time that the commits of the others wait for it.
            max_poll_seconds=max(session_seconds, patience / 2),
            max_messages=max_poll_records,
        )
        self._consumer, self.partitions = _open_consumer(cluster, topic, options)
        self._commits = CommitManager(self._consumer, delivery, state, model)
        self._liveness = LivenessCheck(self._consumer, cluster, topic, patience)
        self._membership = GroupMembership(
            self._consumer, self._commits, cluster, topic, self.partitions, group, instance, self.on_wait
        )
        self._restorer = PartitionRestorer(
            self._membership,
            self._consumer,
            self._commits,
            state,
            self._begin,
            start=start,
            on_lost_state=on_lost_state,
            patience=patience,
            creates_partitions=creates_partitions,
            on_wait=self.on_wait,
        )
        try:
            self._membership.check_before_joining()
            self._consumer.subscribe(topic, self)
        except DeformerError:
            self.close()
            raise

    def on_wait(self) -> None:
        """Call `on_wait` of the present callbacks."""
        self.callbacks.on_wait()

    def set_callbacks(self, callbacks: SourceCallbacks) -> None:
        """Use the callbacks of a run of a pipeline from now on."""
        self.callbacks = callbacks

    def set_model_fingerprint(self, fingerprint: str) -> None:
        """Use the fingerprint of another model, which the metadata of the next commits state."""
        self._commits.model = fingerprint

    def leave_out(self, partitions: frozenset[int]) -> None:
        """Return no messages of these partitions and commit nothing for them, until the next call of this method."""
        self._left_out = partitions

    @property
    def is_exhausted(self) -> bool:
        """Whether the source has ended. It is always False, because a topic is endless."""
        return False

    @property
    def assigned_partitions(self) -> frozenset[int]:
        """The numbers of the partitions that this process owns."""
        return frozenset(tp.partition for tp in self._assignment)

    @property
    def _assignment(self) -> frozenset[TopicPartition]:
        """The partitions of the topic that this process owns."""
        return self._select_own(self._consumer.assignment)

    @property
    def _own_progress(self) -> dict[TopicPartition, _Progress]:
        """How far each partition has been read that this process owns and has begun to read."""
        return {tp: self._progress[tp] for tp in self._assignment if tp in self._progress}

    def _select_own(self, partitions: Iterable[TopicPartition]) -> frozenset[TopicPartition]:
        """Return those of the given partitions that belong to the topic of this source.

        A process that restarts with another topic and the same instance name gets the partitions of the previous
        process at first, because Kafka does not rebalance the group then. `GroupMembership.check_owners` joins again.
        """
        return frozenset(tp for tp in partitions if tp.topic == self.topic)

    @property
    def has_joined(self) -> bool:
        """Whether the group has accepted this process as a member, with or without partitions."""
        self._has_joined = self._has_joined or self._consumer.membership is not None
        return self._has_joined

    def poll(self, timeout: float) -> PollResult:
        """Return the events that are available, in order within each partition.

        Call it only after the effects of all earlier polls (such as alerts) are written to the sinks. So if a partition
        is revoked during the call, the events of these polls are committed.

        Assigned partitions are restored for at most `restore.RESTORE_SECONDS` in one call; the next calls continue.

        Args:
            timeout: Maximum time to wait for events, in seconds.

        Returns:
            The events, with the partitions that were revoked, restored, or read to the end of their history since the
            last call.

        Raises:
            ConfigError: Another process uses the same transactional id, or the broker refuses a request.
            StateError: The saved state of a partition is gone.
            Unavailable: The brokers have not responded for longer than the constructor's `patience` (in seconds).
        """
        self._mark_written()
        if self._must_end_commit():
            self.end_commit()
        self._stop_left_out()
        self._membership.check_owners()
        self._membership.check_new_group()
        # Partitions may be assigned, and revoked ones committed, during this call.
        columns = self._fetch(0.0 if self._restorer.unrestored else timeout)
        if self._fatal_error is not None:
            raise self._fatal_error
        self._end_failed_transaction()
        if columns is not None:
            for number in np.unique(columns.partitions).tolist():
                progress = self._progress.get(TopicPartition(self.topic, number))
                if progress is not None:  # the partition was not revoked during the call
                    progress.polled = int(columns.offsets[columns.partitions == number].max()) + 1
        revoked, self._revoked = tuple(sorted(self._revoked)), []
        restored = self._restorer.restore()
        own = self._own_progress
        active = [tp for tp, progress in own.items() if progress.stopped_at is None]
        self._liveness.check_progress(active, own.keys() - active)
        data = None if columns is None else make_messages(self.topic, columns)
        return PollResult(data, revoked, tuple(restored), self._pop_caught_up())

    def _mark_written(self) -> None:
        """Record that the effects of all polls are written to the sinks."""
        for progress in list(self._progress.values()):
            progress.written = progress.polled

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
        has_unrestored_partitions = bool(self._restorer.unrestored)
        if has_unrestored_partitions or not commits.is_in_background:
            return True
        is_rebalancing = self._consumer.membership is None
        return is_rebalancing

    def _stop_left_out(self) -> None:
        """Stop reading the partitions that are left out, and continue with those that are not any more."""
        for tp, progress in self._own_progress.items():
            is_left_out = tp.partition in self._left_out
            if is_left_out and progress.stopped_at is None:
                position = self._consumer.get_position(tp)
                progress.stopped_at = progress.start if position is None else position
                self._consumer.stop([tp])
            elif not is_left_out and progress.stopped_at is not None:
                position, progress.stopped_at = progress.stopped_at, None
                self._consumer.start(tp, position)

    def return_messages(self, messages: Messages) -> None:
        """Take messages back that have no effects, and all later ones of their partitions.

        The next commits do not include them, and the next poll reads them again.

        Args:
            messages: Messages of the last polls whose effects were not written.
        """
        for number in np.unique(messages.partitions).tolist():
            tp = TopicPartition(self.topic, number)
            progress = self._own_progress.get(tp)
            if progress is not None:
                self._consumer.stop([tp])
                progress.stopped_at = progress.polled = int(messages.offsets[messages.partitions == number].min())

    def _fetch(self, timeout: float) -> MessageColumns | None:
        """Poll the consumer and handle its errors.

        Partitions whose next offset no longer exists are restored again from their committed offset.

        Args:
            timeout: Maximum time to wait for messages, in seconds.

        Returns:
            The messages, or None if there are none, or if the poll failed and a later one may succeed.

        Raises:
            DeformerError: The error is permanent, or polls have failed for longer than the constructor's `patience` (in
                seconds).
        """
        try:
            columns = self._consumer.poll(timeout)
            self._poll_failures.record_success()
            return columns
        except OffsetOutOfRange as error:
            # Messages expired before they were read, or the topic was replaced.
            offsets = {tp.partition: offset for tp, offset in error.offset_by_partition.items()}
            log.get_logger("kafka").warning("offset_out_of_range", offsets=offsets)
            # Treat the partitions as if they were revoked and assigned again.
            partitions = frozenset(error.offset_by_partition) & self._assignment
            self._consumer.stop(partitions)
            self._remove_partitions(partitions)
            self._restorer.add_gone({tp: error.offset_by_partition[tp] for tp in partitions})
            self.on_assigned(partitions)
        except DeformerError as error:
            self._poll_failures.record_failure(error)
            time.sleep(min(timeout, client.RETRY_SECONDS))
        return None

    def _end_failed_transaction(self) -> None:
        """End the transaction that a failed commit of revoked partitions has left open.

        An open transaction hides later messages from consumers that read only committed messages. If the broker does
        not respond, the next poll or commit tries again.
        """
        # With a commit in progress, its next attempt ends the transaction.
        if self._commits.has_failed and not self._commits.has_commit:
            try:
                self._membership.confirm_instance()
                self._commits.renew_producer(self.on_wait)
            except Unavailable as error:
                log.get_logger("kafka").debug("producer_renewal_failed", error=str(error))

    def _begin(self, tp: TopicPartition, start: StartPoint) -> RestoredPartition:
        """Begin to read a partition, and return its state for the engine."""
        self._consumer.start(tp, start.position)
        if start.reference is not None:
            self._commits.reference_by_partition[tp] = start.reference
        # The events before the committed offset only rebuild the state.
        self._progress[tp] = _Progress(start.position, history_end=start.restored.committed_offset)
        return start.restored

    def _pop_caught_up(self) -> tuple[int, ...]:
        """Return the numbers of the partitions whose history was read to its end since the last call.

        The history of a partition is the events before its committed offset, which are read again to restore its state.
        """
        # The client's position is compared, because it passes transaction markers, which no poll returns. Without
        # history it is not needed. kafka-python needs time for all partitions to return that of one.
        caught_up = []
        for tp, progress in list(self._progress.items()):
            if progress.history_end is None:
                continue
            if progress.start < progress.history_end:
                position = self._consumer.get_position(tp)
            else:
                position = progress.start if progress.polled is None else progress.polled
            if position is not None and position >= progress.history_end:
                progress.history_end, progress.polled = None, position
                caught_up.append(tp.partition)
        return tuple(caught_up)

    # --- commits ------------------------------------------------------------------------------------------------------

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
        self, states: Mapping[int, PartitionState] = NO_STATE, on_committed: Callable[[], None] = do_nothing
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
        membership = self._consumer.membership
        # Without membership (during a rebalance), or if no background attempt was started, commit before returning.
        if membership is None or not self._commits.begin_sending(membership, on_committed):
            self.end_commit()
            on_committed()

    def _prepare_commit(self, states: Mapping[int, PartitionState]) -> None:
        """Wait for the end of the previous commit and prepare the next one, without sending anything.

        Args:
            states: The state to save, by partition number.
        """
        self._mark_written()
        self.end_commit()
        # From time to time unchanged offsets are committed too. If another process uses the same instance name, the
        # broker refuses the commit, so that this process ends.
        confirm_unchanged = time.monotonic() - self._commits.confirmed_at > CONFIRM_SECONDS
        positions = self._collect_positions()
        self._advance_references(positions)
        self._commits.begin(positions, states, confirm_unchanged)

    def _advance_references(self, positions: Mapping[TopicPartition, int]) -> None:
        """Let snapshots begin at the present position of partitions that have returned no event since.

        The position also passes what no poll returns: markers and aborted messages of transactions. Without this, a
        restart would need them, and would be refused once retention has deleted them.

        Args:
            positions: The offset of the next event to read from each partition.
        """
        references = self._commits.reference_by_partition
        for tp, position in positions.items():
            reference, progress = references.get(tp), self._progress.get(tp)
            if reference is None or progress is None or progress.polled is None:
                continue
            if progress.polled <= reference.position < position:
                references[tp] = replace(reference, position=position)

    def end_commit(self) -> None:
        """Wait until the commit in progress, if any, has taken effect; repeat it after errors that may pass.

        Raises:
            Unavailable: The commit has failed for longer than the constructor's `patience` (in seconds), or for
                `STOP_SECONDS` if the process is to end. No further attempt is made.
            ConfigError: The broker refuses the commit, or another process uses the same transactional id. No further
                attempt is made.
        """
        deadline = time.monotonic() + self._patience
        logged_errors: set[str] = set()  # each kind of error is logged once per commit
        is_retry, serve_seconds = False, 0.1
        is_ending = False
        while self._commits.has_commit:
            began_at = time.monotonic()
            try:
                if self._fatal_error is not None:
                    raise self._fatal_error
                if is_retry:  # a rebalance may have caused the failure
                    self._consumer.serve_group(serve_seconds)
                    serve_seconds = min(2 * serve_seconds, 1.0)
                self._try_to_commit()
            except DeformerError as error:
                is_permanent = not isinstance(error, Unavailable)
                if self.callbacks.stop.is_set() and not is_ending:  # an attempt that has taken long was the last one
                    is_ending, deadline = True, min(deadline, began_at + STOP_SECONDS)
                if is_permanent or time.monotonic() > deadline:
                    self._commits.give_up()
                    if isinstance(error, RebalanceInProgress):  # an outage ends the membership, and is then the reason
                        check_reachable(self._cluster)
                    raise
                error_name = type(error.__cause__ or error).__name__
                if error_name not in logged_errors:
                    log.get_logger("kafka").warning("commit_failed_retrying", error=str(error))
                    logged_errors.add(error_name)
                if not isinstance(error, RebalanceInProgress):  # `serve_group` waits for the end of a rebalance
                    time.sleep(client.RETRY_SECONDS)
                is_retry = True
                self.on_wait()

    def _try_to_commit(self) -> None:
        """Make one attempt to commit, or wait for the attempt in the background.

        Raises:
            Unavailable: The attempt failed, or the producer could not be replaced after a failed attempt.
        """
        membership = None  # an attempt in the background received the membership when it was started
        if not self._commits.is_in_background:
            membership = self._consumer.membership
            if membership is None and self._consumer.assignment:
                # `end_commit` completes the rebalance and tries again.
                raise RebalanceInProgress(
                    f"Kafka at {self._cluster.servers}: the consumer group is rebalancing, so no offsets can be "
                    "committed now"
                )
            self._membership.confirm_instance()
            self._commits.recover(self.on_wait)  # does nothing if no earlier attempt has failed
        offsets = self._commits.send(membership, on_wait=self.on_wait)
        if offsets:  # they were not committed in a transaction
            self._commit_offsets(offsets)
        self._commits.mark_committed()

    def _commit_offsets(self, offsets: Offsets) -> None:
        """Commit offsets without a transaction; repeat the request until `client.DELIVERY_SECONDS` have passed."""
        deadline = time.monotonic() + min(client.DELIVERY_SECONDS, self._patience)
        while True:
            try:
                return self._consumer.commit(offsets, client.REQUEST_SECONDS)
            except RebalanceInProgress:
                raise
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
            self.on_wait()

    def _collect_positions(self) -> dict[TopicPartition, int]:
        """Return the offset of the next event to read from each partition, except partitions that cannot be committed.

        A partition cannot be committed while it is being restored. The restore ends when its saved state is loaded, and
        the events before its committed offset have been read again to bring that state up to date. Partitions that are
        left out cannot be committed either.
        """
        # A partition that is no longer left out is stopped until the next poll, which starts it where it was stopped.
        positions = {
            tp: self._consumer.get_position(tp) if progress.stopped_at is None else progress.stopped_at
            for tp, progress in self._own_progress.items()
            if self._is_committable(tp)
        }
        return {tp: position for tp, position in positions.items() if position is not None}

    def _collect_written(self) -> dict[TopicPartition, int]:
        """Return the offset of the next event whose effects are not written, of partitions that can be committed."""
        return {
            tp: progress.written
            for tp, progress in self._progress.items()
            if progress.written is not None and self._is_committable(tp)
        }

    def _is_committable(self, tp: TopicPartition) -> bool:
        """Return whether the state of a partition is complete, so that its offset may be committed."""
        progress = self._progress.get(tp)
        is_restored = progress is not None and progress.history_end is None
        return is_restored and tp.partition not in self._left_out

    def get_lag(self) -> dict[tuple[str, int], int]:
        """Return the number of unread messages of each assigned partition, as far as it is known without a request.

        The end of a partition is known from two sources. The last response with its messages is old while many are
        unread. The requests of `LivenessCheck` are sent every ten seconds.

        Returns:
            A mapping from (topic, partition number) to the number of messages.
        """
        lag_by_partition = {}
        for tp in self._assignment:
            position = self._consumer.get_position(tp)
            # The response with messages can be older than the last request for end offsets.
            ends = (self._consumer.get_known_end(tp), self._liveness.end_offsets.get(tp))
            known_ends = [end_offset for end_offset in ends if end_offset is not None]
            if position is not None and known_ends:
                lag_by_partition[tp.topic, tp.partition] = max(0, max(known_ends) - position)
        return lag_by_partition

    def close(self) -> None:
        """Close the consumer without committing.

        Without an instance name, this process leaves the group, and its partitions move to other members at once. With
        an instance name, it stays a member until its session times out, so that a restart moves no partitions.
        """
        self._is_closed = True  # `on_revoked`, which the consumer may call while it closes, then commits nothing
        self._consumer.close()
        self._restorer.close()

    # --- rebalances: `ports.RebalanceHandler` -------------------------------------------------------------------------
    # The consumer calls the following methods, possibly in another thread, while our thread waits inside a call.

    def on_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        """Note newly assigned partitions, which the next polls restore. Those of another topic are left out."""
        assigned = self._select_own(partitions)
        for tp in assigned:  # nothing may be committed for them before their reading has begun again
            self._progress.pop(tp, None)
        self._restorer.add(assigned)
        numbers = sorted(tp.partition for tp in assigned)
        log.get_logger("kafka").info("partitions_assigned", topic=self.topic, partitions=numbers)
        if others := sorted(partitions - assigned):
            log.get_logger("kafka").warning(
                "partitions_of_another_topic", topic=self.topic, others=[f"{tp.topic}-{tp.partition}" for tp in others]
            )

    def on_revoked(self, partitions: frozenset[TopicPartition]) -> Offsets:
        """Commit the offsets and the state of revoked partitions, so that the next owner continues there.

        Only events whose effects are written are committed. Nothing is committed while the source is being closed.

        Args:
            partitions: The partitions that this process must give up.

        Returns:
            The offsets that the consumer must commit; none if a transaction has committed them.
        """
        committable = partitions & self._collect_written().keys()
        offsets = {} if self._is_closed or not committable else self._commit_revoked(committable)
        self._revocations.append(bool(offsets))
        # At once, because the partitions can be assigned again before the consumer has committed their offsets.
        self._remove_partitions(self._select_own(partitions))
        return offsets

    def _commit_revoked(self, revoked: Iterable[TopicPartition]) -> Offsets:
        """Send a commit with the state of revoked partitions, after the commit in progress.

        Args:
            revoked: The partitions.

        Returns:
            The offsets that the consumer must commit; none if a transaction has committed them, or if it failed.
        """
        deadline = time.monotonic() + self._session / 2  # perhaps no heartbeat is sent during this commit
        offsets: dict[TopicPartition, Any] = {}
        try:
            # A commit in progress is older than the state of the revoked partitions, so it comes first.
            if self._commits.has_commit:
                offsets |= self._send_within(deadline)
                # Its messages are written. If the consumer cannot commit its offsets, `give_up` is called.
                self._commits.mark_committed()
            states = self.callbacks.collect_state(frozenset(tp.partition for tp in revoked))
            self._commits.begin(self._collect_written(), states)
            try:
                offsets |= self._send_within(deadline)
            except DeformerError:
                self._commits.give_up()  # no later attempt could commit these partitions
                raise
            if not offsets:
                self._commits.mark_committed()
        except DeformerError as error:
            # The next owner repeats these messages. Raising here would end the group's rebalance instead.
            log.get_logger("kafka").warning("revoked_partitions_not_committed", error=str(error))
            if isinstance(error, ProducerFenced):
                self._fatal_error = error
            return {}
        except Exception as error:  # a bug in the function that collects the state
            self._fatal_error = error
            return {}
        return offsets

    def _send_within(self, deadline: float) -> Offsets:
        """Send a commit once, before a deadline. If it already runs in the background, wait for that instead.

        Args:
            deadline: The deadline, as `time.monotonic()`.

        Returns:
            The offsets that must be committed; none if a transaction has committed them.

        Raises:
            Unavailable: The commit failed or took too long. It is also raised if an earlier commit has an unknown
                outcome, because too little time is left to find it out.
        """
        if self._commits.has_failed:
            # `_commit_revoked` logs this. Nothing is lost: the next owner processes the uncommitted messages again.
            raise Unavailable(
                "cannot commit offsets, because the outcome of the previous commit is unknown: nothing is lost, the "
                "next owner of the partitions processes their messages again"
            )
        return self._commits.send(self._consumer.membership, deadline - time.monotonic(), self.on_wait) or {}

    def on_revoked_committed(self, error: Exception | None) -> None:
        """End the commit of revoked partitions."""
        if self._revocations.popleft():
            if error is None:
                self._commits.mark_committed()
            else:
                log.get_logger("kafka").warning("revoked_partitions_not_committed", error=str(error))
                self._commits.give_up()  # no later attempt could commit these partitions

    def on_lost(self, partitions: frozenset[TopicPartition]) -> None:
        """Remove partitions that other members own already, because the group has removed this member.

        Args:
            partitions: The partitions that this process owned.
        """
        self._remove_partitions(self._select_own(partitions))

    def _remove_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        """Delete what is stored about partitions that now belong to another process, and list them as revoked."""
        self._restorer.remove(partitions)
        for tp in partitions:
            self._progress.pop(tp, None)
            self._revoked.append(tp.partition)
        self._commits.remove_partitions(partitions)


def make_messages(topic: str, columns: MessageColumns) -> Messages:
    """Return the messages of one poll in the form that the decoders accept.

    Args:
        topic: The topic of all messages.
        columns: The messages.

    Returns:
        The messages, with timestamps in microseconds; a timestamp before 1970 or of 2⁵³ milliseconds or more counts as
        missing.
    """
    millis = columns.times
    is_plausible = (millis >= 0) & (millis < 2**53)  # senders may state any number; larger ones would overflow
    return Messages(
        topic=topic,
        keys=columns.keys,
        payloads=list(columns.values),
        times=np.where(is_plausible, millis * 1000, NO_TIME),
        partitions=columns.partitions,
        offsets=columns.offsets,
    )


def _open_consumer(cluster: KafkaCluster, topic: str, options: ConsumerOptions) -> tuple[Consumer, int]:
    """Return a consumer that has not subscribed to the topic yet, and the number of partitions of the topic.

    Raises:
        MissingTopic: The topic does not exist.
        Unavailable: No broker responds.
        ConfigError: The name is not that of a topic, or the broker refuses the connection.
    """
    if not _VALID_TOPIC.fullmatch(topic):
        raise make_error(INVALID_NAME, cluster.servers, f"looking for topic {topic!r}", "InvalidTopic")
    consumer: Consumer = load_client(cluster).open_consumer(cluster, options)
    try:
        return consumer, count_partitions(cluster, topic)
    except DeformerError:
        consumer.close()
        raise
