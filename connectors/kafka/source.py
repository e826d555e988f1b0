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
"""Seconds between heartbeats; so soon does a member learn that partitions will move."""

RETRY_SECONDS = 0.5
"""Seconds to wait after a failed poll or commit before the next attempt."""
CONFIRM_SECONDS = 10.0
"""Seconds after which unchanged offsets are committed again, so that a process whose instance name was taken learns of
it.
"""


def _keep_nothing(partitions: frozenset[int]) -> Mapping[int, PartitionState]:
    """Return no state to save; the default before the pipeline sets its own function."""
    return NO_STATE


class KafkaSource:
    """A topic as an endless source of events, shared by the members of a consumer group.

    Only `commit` commits offsets. They are the offset of the next event to read. When a partition moves to another
    member,
    the events of all polls but the last are committed with its state (see `poll`), the next `PollResult` reports it,
    and it is
    never committed again. Partitions move one by one (cooperative assignment). Messages of aborted transactions are
    skipped.

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
        lost: What to do if the saved state is gone.
        model: Fingerprint of the model; the members of a group must agree on it.
        instance: A name of this process that stays the same over restarts, so that a restart moves no partitions.
        patience: Seconds without a response after which the brokers count as unavailable.
        bounds: Limits on the size of messages and batches.

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
        lost: LostState = "refuse",
        model: str = "",
        instance: str | None = None,
        patience: float = 120.0,
        bounds: FetchLimits | None = None,
    ) -> None:
        self.topic = topic
        self.collect_state: CollectState = _keep_nothing
        self._servers, self._start = bootstrap_servers, start
        self._state, self._lost = state, lost
        self._session, self._patience = session_seconds, patience
        self._assignor = SameModelAssignor(model)
        self._polled: dict[TopicPartition, int] = {}  # offset of the next event, after all polls
        self._settled: dict[
            TopicPartition, int
        ] = {}  # offset of the next event, after the polls whose effects are written
        self._gained: dict[TopicPartition, float] = {}  # assigned but not restored, since when
        self._restore_error = ""  # the last logged reason why a restore failed
        self._recovering: dict[TopicPartition, int] = {}  # offset at which the history of a partition ends
        self._revoked: list[int] = []
        self._closed = False
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
        limit_fetches(self._consumer, bounds)
        self._commits = CommitManager(self._consumer, delivery, state)
        self._liveness = LivenessCheck(self._consumer, bootstrap_servers, topic, patience)
        try:
            with translate_errors(bootstrap_servers, f"looking for topic {topic!r}", ValueError, TypeError):
                self._consumer.subscribe([topic], listener=RebalanceListener(self._gain, self._give_up, self._leave))
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
        """Whether the source has ended: never, a topic is endless."""
        return False

    @property
    def assigned_partitions(self) -> frozenset[int]:
        """The numbers of the partitions that this process owns."""
        return frozenset(tp.partition for tp in self._consumer.assignment())

    def poll(self, timeout: float) -> PollResult:
        """Return the events that are available, after at most `timeout` seconds, in order within each partition.

        Calling it states that the effects of all earlier polls are written. A partition that is revoked during the call
        is
        committed up to there. `PollResult.revoked_partitions` were revoked before `PollResult.data` arrived.

        Raises:
            ConfigError: The group uses another model.
            StateError: The saved state of a partition is gone.
            Unavailable: The brokers have not responded for longer than `patience`.
        """
        self._settled = dict(self._polled)
        commits = self._commits
        if commits.over or (commits.begun and (self._gained or not commits.under_way or self._group() is None)):
            self.end_commit()
        fetched = self._fetch(timeout)
        self._end_failed()
        self._assignor.check()
        for partition, runs in fetched.items():
            self._polled[partition] = int(runs[-1].offsets[-1]) + 1
        revoked, self._revoked = tuple(sorted(self._revoked)), []
        restored = tuple(self._restore_gained())
        with translate_errors(self._servers, f"reading topic {self.topic!r}"):
            self._liveness.check_progress()
            recovered = self._take_recovered()
        return PollResult(to_messages(self.topic, fetched), revoked, restored, recovered)

    def prefetch(self) -> None:
        """Start fetching for the next `poll`, without waiting."""
        self._consumer._fetcher.prefetch()

    def _poll(self, timeout: float) -> dict[TopicPartition, list[MessageColumns]]:
        """Poll the client; if an exception came from our own rebalance callback, raise it instead of the client's
        wrapper.
        """
        try:
            return dict(self._consumer.poll(timeout_ms=timeout * 1000))
        except errors.KafkaError as error:
            if type(error) is errors.KafkaError and error.__cause__ is not None:
                raise error.__cause__ from None  # raised by our own rebalance callback
            raise

    def _fetch(self, timeout: float) -> dict[TopicPartition, list[MessageColumns]]:
        """Poll the client and handle its errors.

        Partitions whose offset is gone are restored again. If the brokers are away, nothing is returned.
        """
        try:
            fetched = self._poll(timeout)
            self._liveness.record_success()
            return fetched
        except errors.OffsetOutOfRangeError as error:
            # Messages expired before they were read, or the topic was replaced: these partitions are restored again.
            (gone,) = error.args
            log.get_logger("kafka").warning("offset_out_of_range", offsets={tp.partition: gone[tp] for tp in gone})
            self._lose(gone)
            self._gain(gone)
        except (errors.KafkaError, OSError) as error:
            self._liveness.record_failure(error)
            time.sleep(min(timeout, RETRY_SECONDS))
        return {}

    def _end_failed(self) -> None:
        """End the transaction that a failed hand-over has left open, because readers of committed offsets wait for it.

        If the broker does not respond, the next poll or commit tries again.
        """
        if self._commits.failed and not self._commits.begun:
            try:
                self._commits.renew()
            except Unavailable as error:
                log.get_logger("kafka").debug("producer_renewal_failed", error=str(error))

    def _take_recovered(self) -> tuple[int, ...]:
        """Return and remove the partitions whose history has been read completely.

        After the history there may be transaction markers, which are never returned by a poll.
        """
        over = [tp for tp, until in self._recovering.items() if self._position(tp) >= until]
        for tp in over:
            del self._recovering[tp]
            self._polled[tp] = self._position(tp)
        return tuple(tp.partition for tp in over)

    def _restore_gained(self) -> Iterator[RestoredPartition]:
        """Restore the assigned partitions one after another.

        If the brokers do not respond, the next poll tries again.
        """
        for tp in sorted(self._gained):
            try:
                yield self._restore(tp)
            except Unavailable as error:
                if time.monotonic() - self._gained[tp] > self._patience:
                    raise
                if str(error) != self._restore_error:
                    self._restore_error = str(error)
                    log.get_logger("kafka").warning("restore_failed_retrying", partition=tp.partition, error=str(error))
                return
            del self._gained[tp]
            self._restore_error = ""

    def _restore(self, tp: TopicPartition) -> RestoredPartition:
        """Restore one partition and set the reader to the first event that it needs."""
        with translate_errors(self._servers, f"restoring partition {tp.partition} of topic {self.topic!r}"):
            start = find_start(self._consumer, tp, self._start, self._state, self._lost)
            self._consumer.seek(tp, start.position)
            self._consumer.resume(tp)
        if start.reference is not None:
            self._commits.kept[tp] = start.reference
        self._recovering[tp] = start.restored.committed_offset
        return start.restored

    def _position(self, tp: TopicPartition) -> int:
        """Return the offset of the next event of a partition, or -1 if it is unknown."""
        position = self._consumer.position(tp, timeout_ms=0)
        return -1 if position is None else int(position)

    def commit(self, saved: Mapping[int, PartitionState] = NO_STATE) -> None:
        """Commit the offsets of all partitions with their saved state and the messages of the sinks; block until it is
        done.

        During a rebalance the broker accepts no commits. The rebalance is then completed first, without accepting new
        messages,
        and the partitions that remain are committed. The next poll reports the others.

        Raises:
            Unavailable: The commit has failed for longer than `patience`.
        """
        self._begin_commit(saved)
        self.end_commit()

    def begin_commit(
        self, saved: Mapping[int, PartitionState] = NO_STATE, ended: Callable[[], None] = lambda: None
    ) -> None:
        """Begin a commit, and if it is a transaction, return before it has ended.

        The next `poll` may be called meanwhile; what sinks send then belongs to the next commit. A failed attempt is
        repeated by
        the next `poll` or commit.

        Args:
            saved: State to save, by partition number.
            ended: Called when the first attempt has taken effect, possibly from another thread.
        """
        self._begin_commit(saved)
        group = self._group()
        if group is None or not self._commits.begin_sending(group, ended):
            self.end_commit()
            ended()

    def _begin_commit(self, saved: Mapping[int, PartitionState]) -> None:
        """Wait for the previous commit and begin the next one."""
        self._settled = dict(self._polled)
        self.end_commit()
        confirm = time.monotonic() - self._commits.confirmed > CONFIRM_SECONDS
        self._commits.begin(self._positions(), saved, confirm)

    def end_commit(self) -> None:
        """Wait until the commit that was begun, if any, has taken effect.

        Raises what `commit` raises; the commit is then abandoned.
        """
        deadline = time.monotonic() + self._patience
        logged: set[str] = set()
        is_retry = False
        while self._commits.begun:
            try:
                if is_retry:
                    self._finish_rebalance()
                self._try_to_commit()
            except (errors.KafkaError, OSError, Unavailable) as error:
                translated = error if isinstance(error, Unavailable) else translate(error, self._servers, "committing")
                if not isinstance(translated, Unavailable) or time.monotonic() > deadline:
                    self._commits.give_up()
                    raise translated from error
                if (kind := type(error).__name__) not in logged:
                    log.get_logger("kafka").warning("commit_failed_retrying", error=kind)
                    logged.add(kind)
                if not isinstance(error, _REBALANCING):
                    time.sleep(RETRY_SECONDS)
                is_retry = True

    def _try_to_commit(self) -> None:
        """Make one attempt to commit; raise the client's errors and ours."""
        group = None
        if not self._commits.under_way:
            if (group := self._group()) is None:
                raise errors.RebalanceInProgressError()
            self._commits.recover()
        offsets = self._commits.send(group)
        if offsets is not None:
            self._consumer.commit(offsets, timeout_ms=DELIVERY_SECONDS * 1000)
        self._commits.conclude()

    def _group(self) -> ConsumerGroupMetadata | None:
        """Return our membership in the group, or None during a rebalance."""
        group = self._consumer.group_metadata()
        return None if self._consumer.assignment() and group.state is not MemberState.STABLE else group

    def _positions(self) -> dict[TopicPartition, int]:
        """Return the offset of the next event of each partition, except those that are still being restored."""
        live = [tp for tp in self._consumer.assignment() if tp not in self._recovering and tp not in self._gained]
        return {tp: at for tp in live if (at := self._position(tp)) >= 0}

    def _finish_rebalance(self) -> None:
        """Let the client rejoin its group while all partitions are paused, so that no messages are delivered."""
        paused = [tp for tp in self._consumer.assignment() if tp not in self._consumer.paused()]
        self._consumer.pause(*paused)
        try:
            if self._poll(0.1):
                raise InvariantViolated("a paused partition has delivered messages; this is a bug, please report it")
        finally:
            ours = self._consumer.assignment() - self._gained.keys()  # those wait for `_restore`
            self._consumer.resume(*[tp for tp in paused if tp in ours])

    def get_lag(self) -> dict[tuple[str, int], int]:
        """Return the number of unread messages by (topic, partition), where the client knows it without a request."""
        lags = {}
        for tp in self._consumer.assignment():
            end, here = self._consumer.highwater(tp), self._consumer.position(tp, timeout_ms=0)
            if end is not None and here is not None:
                lags[tp.topic, tp.partition] = max(0, end - here)
        return lags

    def close(self) -> None:
        """Leave the group without committing, so that others take over at once. With an instance name the membership is
        kept.
        """
        self._closed = True
        with translate_errors(self._servers, "closing the consumer"):
            self._consumer.close(autocommit=False, timeout_ms=CONNECT_SECONDS * 1000)

    # Called by `RebalanceListener` on the client's thread, while ours waits.

    def _gain(self, partitions: Iterable[TopicPartition]) -> None:
        """Pause newly assigned partitions; `_restore` restores and resumes them."""
        for tp in partitions:
            self._consumer.seek(tp, 0)
            self._consumer.pause(tp)
            self._gained[tp] = time.monotonic()
        numbers = sorted(tp.partition for tp in partitions)
        log.get_logger("kafka").info("partitions_assigned", topic=self.topic, partitions=numbers)

    async def _give_up(self, partitions: Iterable[TopicPartition]) -> None:
        """Commit the written events of revoked partitions with their state, so that the next owner begins there.

        Nothing is committed while the source is being closed.
        """
        leaving = {tp: self._settled[tp] for tp in partitions if tp in self._settled and tp not in self._recovering}
        if leaving and not self._closed:
            deadline = time.monotonic() + self._session / 2  # no heartbeat is sent while this waits
            try:
                if self._commits.begun:  # its state comes before the state of the partitions that are handed over
                    await self._commit_within(deadline)
                saved = self.collect_state(frozenset(tp.partition for tp in leaving))
                settled = {tp: at for tp, at in self._settled.items() if tp not in self._recovering}
                self._commits.begin(settled, saved)
                try:
                    await self._commit_within(deadline)
                finally:
                    self._commits.give_up()
            except (errors.KafkaError, DeformerError) as error:
                # The next owner repeats these messages. Raising here would end the group's rebalance instead.
                log.get_logger("kafka").warning("revoked_partitions_not_committed", error=type(error).__name__)
        self._lose(partitions)

    async def _commit_within(self, deadline: float) -> None:
        """Make one attempt to commit before the deadline, without finding out how an earlier attempt ended."""
        if self._commits.failed:
            raise errors.KafkaConnectionError("the previous commit has not ended")
        offsets = self._commits.send(self._consumer.group_metadata(), deadline - time.monotonic())
        if offsets is not None:
            await self._consumer.commit_async(offsets)
        self._commits.conclude()

    def _leave(self, partitions: Iterable[TopicPartition]) -> None:
        """Remove all partitions after the group has continued without this member."""
        self._assignor.leave()
        self._lose(partitions)

    def _lose(self, partitions: Iterable[TopicPartition]) -> None:
        """Remove partitions that now belong to another process."""
        for tp in partitions:
            for known in (self._polled, self._settled, self._recovering, self._gained):
                known.pop(tp, None)
            self._revoked.append(tp.partition)
        self._commits.lose(partitions)
