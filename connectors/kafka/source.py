"""Events in: a topic as an endless source, shared with the other members of a consumer group."""

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
"""How soon a member hears that partitions are to move."""

RETRY_SECONDS = 0.5
CONFIRM_SECONDS = 10.0
"""Positions that have not changed are committed again after so long: who lost his place to a namesake must learn it."""


def _keep_nothing(partitions: frozenset[int]) -> Mapping[int, PartitionState]:
    return NO_STATE


class KafkaSource:
    """A topic as an endless source of events; one of a group that share its partitions.

    Offsets are committed by `commit` alone and are true positions: the next message to read. A partition that goes to
    another member is committed up to the last poll but this one (see `poll`), reported by the next `PollResult`, and never
    committed again. Partitions move one by one (cooperative assignment); messages of aborted transactions are not seen.

    bootstrap_servers: "host:port,…". start: where a group without committed offsets begins. security: arguments of the
    client (security_protocol, ssl_cafile, sasl_mechanism, …), never logged. delivery: what sends messages with a
    commit; state: where what is kept goes, both or neither. lost: what to do where what is needed is gone. model: its
    fingerprint; members of one group must agree on it. instance: a name that stays the same over restarts, so that
    they move no partitions. patience: seconds without an answer after which the broker counts as gone. bounds: what a
    batch may unpack to. Belongs to the thread that made it. Raises Unavailable where no broker answers or the topic
    does not exist, ConfigError where the broker refuses us.
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
        self._same_model = SameModelAssignor(model)
        self._polled: dict[TopicPartition, int] = {}  # next positions of what was polled
        self._settled: dict[TopicPartition, int] = {}  # next positions of what was polled and dealt with
        self._gained: dict[TopicPartition, float] = {}  # partition that has not begun → since when
        self._unrestored = ""  # why not, as it was said last
        self._recovering: dict[TopicPartition, int] = {}  # partition → where its history ends
        self._revoked: list[int] = []
        self._closed = False
        self._consumer: KafkaConsumer = connect(
            KafkaConsumer,
            bootstrap_servers,
            security,
            group_id=group,
            group_instance_id=instance,
            enable_auto_commit=False,
            auto_offset_reset="none",  # where a partition begins is decided in `restored`
            isolation_level="read_committed",
            allow_auto_create_topics=False,
            partition_assignment_strategy=[self._same_model],
            max_poll_records=max_poll_records,
            session_timeout_ms=int(session_seconds * 1000),
            # A process that hangs loses its place in half the time that the others' commits wait for it.
            max_poll_interval_ms=int(max(session_seconds, patience / 2) * 1000),
            heartbeat_interval_ms=int(HEARTBEAT_SECONDS * 1000),
        )
        limit_fetches(self._consumer, bounds)
        self._commits = CommitManager(self._consumer, delivery, state)
        self._watch = LivenessCheck(self._consumer, bootstrap_servers, topic, patience)
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
    def model(self) -> str:
        """The fingerprint that we say when the group next deals out partitions."""
        return self._same_model.model

    @model.setter
    def model(self, fingerprint: str) -> None:
        self._same_model.model = fingerprint

    @property
    def exhausted(self) -> bool:
        """Never: more may always come."""
        return False

    @property
    def assigned(self) -> frozenset[int]:
        """The partitions that are ours now."""
        return frozenset(tp.partition for tp in self._consumer.assignment())

    def poll(self, timeout: float) -> PollResult:
        """Whatever is there, after at most `timeout` seconds; ordered within each partition.

        To call it says that the effects of everything polled before are written: a partition taken away during this
        call is committed up to there. `revoked` were taken away before `data` came. Raises ConfigError where the group
        works with another model, `StateError` where what is kept of a partition cannot be had.
        """
        self._settled = dict(self._polled)
        commits = self._commits
        if commits.over or (commits.begun and (self._gained or not commits.under_way or self._group() is None)):
            self.end_commit()
        fetched = self._fetch(timeout)
        self._end_failed()
        self._same_model.check()
        for partition, runs in fetched.items():
            self._polled[partition] = int(runs[-1].offsets[-1]) + 1
        revoked, self._revoked = tuple(sorted(self._revoked)), []
        begun = tuple(self._begin_gained())
        with translate_errors(self._servers, f"reading topic {self.topic!r}"):
            self._watch.check_progress()
            recovered = self._take_recovered()
        return PollResult(to_messages(self.topic, fetched), revoked, begun, recovered)

    def prefetch(self) -> None:
        """Begin to fetch what there is now, for the next `poll`."""
        self._consumer._fetcher.prefetch()

    def _poll(self, timeout: float) -> dict[TopicPartition, list[MessageColumns]]:
        try:
            return dict(self._consumer.poll(timeout_ms=timeout * 1000))
        except errors.KafkaError as error:
            if type(error) is errors.KafkaError and error.__cause__ is not None:
                raise error.__cause__ from None  # it came from our own `Rebalance`, so it is no fault of Kafka's
            raise

    def _fetch(self, timeout: float) -> dict[TopicPartition, list[MessageColumns]]:
        try:
            fetched = self._poll(timeout)
            self._watch.record_success()
            return fetched
        except errors.OffsetOutOfRangeError as error:
            # Messages have expired before we came to them, or the topic has been replaced: those partitions begin anew.
            (gone,) = error.args
            log.get("kafka").warning(
                "there is no message at our position", offsets={tp.partition: gone[tp] for tp in gone}
            )
            self._lose(gone)
            self._gain(gone)
        except (errors.KafkaError, OSError) as error:
            self._watch.record_failure(error)
            time.sleep(min(timeout, RETRY_SECONDS))
        return {}

    def _end_failed(self) -> None:
        """What a hand-over that failed has left open is ended now, or everyone would wait for it who begins with a
        partition. Where the broker does not answer, the next poll or commit tries again."""
        if self._commits.failed and not self._commits.begun:
            try:
                self._commits.renew()
            except Unavailable as error:
                log.get("kafka").debug("the producer is not renewed yet", why=str(error))

    def _take_recovered(self) -> tuple[int, ...]:
        """The partitions whose history is over; what follows it may be transaction markers, which are never polled."""
        over = [tp for tp, until in self._recovering.items() if self._position(tp) >= until]
        for tp in over:
            del self._recovering[tp]
            self._polled[tp] = self._position(tp)
        return tuple(tp.partition for tp in over)

    def _begin_gained(self) -> Iterator[RestoredPartition]:
        """Begin with the partitions that came. Where the broker does not answer, the next poll tries again, until the
        patience is over."""
        for tp in sorted(self._gained):
            try:
                yield self._begin(tp)
            except Unavailable as error:
                if time.monotonic() - self._gained[tp] > self._patience:
                    raise
                if str(error) != self._unrestored:
                    self._unrestored = str(error)
                    log.get("kafka").warning(
                        "not restored, will be tried again", partition=tp.partition, why=str(error)
                    )
                return
            del self._gained[tp]
            self._unrestored = ""

    def _begin(self, tp: TopicPartition) -> RestoredPartition:
        """Place the reader where the partition's history, or else its new messages, begin."""
        with translate_errors(self._servers, f"restoring partition {tp.partition} of topic {self.topic!r}"):
            begun = find_start(self._consumer, tp, self._start, self._state, self._lost)
            self._consumer.seek(tp, begun.position)
            self._consumer.resume(tp)
        if begun.reference is not None:
            self._commits.kept[tp] = begun.reference
        self._recovering[tp] = begun.restored.until
        return begun.restored

    def _position(self, tp: TopicPartition) -> int:
        position = self._consumer.position(tp, timeout_ms=0)
        return -1 if position is None else int(position)

    def commit(self, saved: Mapping[int, PartitionState] = NO_STATE) -> None:
        """Commit the positions of all partitions that are ours, with what is kept of them and what sinks have put into
        the delivery. Blocks until the broker has it.

        While the group is rebalancing the broker takes no commit: the rebalance is then finished first, without taking
        new messages, and what is still ours is committed. What was lost meanwhile is reported by the next poll. A
        failure is tried again until the patience is over: then Unavailable is raised.
        """
        self._begin_commit(saved)
        self.end_commit()

    def begin_commit(
        self, saved: Mapping[int, PartitionState] = NO_STATE, ended: Callable[[], None] = lambda: None
    ) -> None:
        """As `commit`, and where the commit is a transaction it need not be over on return: the next `poll` may be
        called, and what sinks put meanwhile goes with the next commit. One that failed is tried again, as long as it
        takes, by the next `poll` or commit after its end. ended: called when it has taken effect at its first attempt,
        perhaps from another thread."""
        self._begin_commit(saved)
        group = self._group()
        if group is None or not self._commits.begin_sending(group, ended):
            self.end_commit()
            ended()

    def _begin_commit(self, saved: Mapping[int, PartitionState]) -> None:
        self._settled = dict(self._polled)
        self.end_commit()
        confirm = time.monotonic() - self._commits.confirmed > CONFIRM_SECONDS
        self._commits.begin(self._positions(), saved, confirm)

    def end_commit(self) -> None:
        """Return when the commit that was begun, if any, has taken effect. Raises as `commit` does, and lets it be."""
        deadline = time.monotonic() + self._patience
        said: set[str] = set()
        again = False
        while self._commits.begun:
            try:
                if again:
                    self._finish_rebalance()
                self._try_to_commit()
            except (errors.KafkaError, OSError, Unavailable) as error:
                ours = error if isinstance(error, Unavailable) else translate(error, self._servers, "committing")
                if not isinstance(ours, Unavailable) or time.monotonic() > deadline:
                    self._commits.give_up()
                    raise ours from error
                if (kind := type(error).__name__) not in said:
                    log.get("kafka").warning("commit failed, will be tried again", error=kind)
                    said.add(kind)
                if not isinstance(error, _REBALANCING):
                    time.sleep(RETRY_SECONDS)
                again = True

    def _try_to_commit(self) -> None:
        """One attempt. Raises the client's errors and ours."""
        group = None
        if not self._commits.under_way:
            if (group := self._group()) is None:
                raise errors.RebalanceInProgressError()
            self._commits.recover()
        rest = self._commits.send(group)
        if rest is not None:
            self._consumer.commit(rest, timeout_ms=DELIVERY_SECONDS * 1000)
        self._commits.conclude()

    def _group(self) -> ConsumerGroupMetadata | None:
        """Our place in the group; None while that is being dealt out anew."""
        group = self._consumer.group_metadata()
        return None if self._consumer.assignment() and group.state is not MemberState.STABLE else group

    def _positions(self) -> dict[TopicPartition, int]:
        """Where our partitions are; not of those whose history is not over, their commit stands."""
        live = [tp for tp in self._consumer.assignment() if tp not in self._recovering and tp not in self._gained]
        return {tp: at for tp in live if (at := self._position(tp)) >= 0}

    def _finish_rebalance(self) -> None:
        """Let the client rejoin its group while nothing is delivered: partitions are paused, new ones as they come."""
        paused = [tp for tp in self._consumer.assignment() if tp not in self._consumer.paused()]
        self._consumer.pause(*paused)
        try:
            if self._poll(0.1):
                raise InvariantViolated("a paused partition has delivered messages; report this")
        finally:
            ours = self._consumer.assignment() - self._gained.keys()  # those wait for `_begin`
            self._consumer.resume(*[tp for tp in paused if tp in ours])

    def lag(self) -> dict[tuple[str, int], int]:
        """(topic, partition) → messages not read yet, for the partitions whose end is known. Asks nobody."""
        lags = {}
        for tp in self._consumer.assignment():
            end, here = self._consumer.highwater(tp), self._consumer.position(tp, timeout_ms=0)
            if end is not None and here is not None:
                lags[tp.topic, tp.partition] = max(0, end - here)
        return lags

    def close(self) -> None:
        """Leave the group, so that others take over at once (with an instance name the place is kept instead). Commits
        nothing."""
        self._closed = True
        with translate_errors(self._servers, "closing the consumer"):
            self._consumer.close(autocommit=False, timeout_ms=CONNECT_SECONDS * 1000)

    # Called by `Rebalance` on the client's thread, while ours waits.

    def _gain(self, partitions: Iterable[TopicPartition]) -> None:
        """Nothing is delivered of them before `_begin`."""
        for tp in partitions:
            self._consumer.seek(tp, 0)
            self._consumer.pause(tp)
            self._gained[tp] = time.monotonic()
        numbers = sorted(tp.partition for tp in partitions)
        log.get("kafka").info("partitions assigned", topic=self.topic, partitions=numbers)

    async def _give_up(self, partitions: Iterable[TopicPartition]) -> None:
        """Commit what is settled of them, and keep what is to be kept; the next owner begins there. Not on closing:
        `close` commits nothing."""
        leaving = {tp: self._settled[tp] for tp in partitions if tp in self._settled and tp not in self._recovering}
        if leaving and not self._closed:
            deadline = time.monotonic() + self._session / 2  # while we wait here, no heartbeat goes out
            try:
                if self._commits.begun:  # what it keeps comes before what we hand over
                    await self._commit_within(deadline)
                saved = self.collect_state(frozenset(tp.partition for tp in leaving))
                settled = {tp: at for tp, at in self._settled.items() if tp not in self._recovering}
                self._commits.begin(settled, saved)
                try:
                    await self._commit_within(deadline)
                finally:
                    self._commits.give_up()
            except (errors.KafkaError, DeformerError) as error:
                # The next owner repeats these messages. To raise here would end the group's rebalance instead.
                log.get("kafka").warning("revoked partitions not committed", error=type(error).__name__)
        self._lose(partitions)

    async def _commit_within(self, deadline: float) -> None:
        """One attempt, without asking how an earlier one went. Raises the client's errors and ours."""
        if self._commits.failed:
            raise errors.KafkaConnectionError("an earlier commit has not ended")
        rest = self._commits.send(self._consumer.group_metadata(), deadline - time.monotonic())
        if rest is not None:
            await self._consumer.commit_async(rest)
        self._commits.conclude()

    def _leave(self, partitions: Iterable[TopicPartition]) -> None:
        self._same_model.leave()
        self._lose(partitions)

    def _lose(self, partitions: Iterable[TopicPartition]) -> None:
        for tp in partitions:
            for known in (self._polled, self._settled, self._recovering, self._gained):
                known.pop(tp, None)
            self._revoked.append(tp.partition)
        self._commits.lose(partitions)
