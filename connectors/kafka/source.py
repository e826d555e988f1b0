"""Events in: a topic as an endless source, shared with the other members of a consumer group."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import kafka.errors as errors
from kafka import KafkaConsumer
from kafka.structs import MemberState, OffsetAndMetadata, TopicPartition

from connectors.kafka.client import CONNECT_SECONDS, DELIVERY_SECONDS, connect, mapped, translate
from connectors.kafka.delivery import Delivery, Outgoing
from connectors.kafka.group import Rebalance, SameModel
from connectors.kafka.incoming import messages_of
from connectors.kafka.restore import LostState, restored
from connectors.kafka.runs import Run
from connectors.kafka.state import Attempt, Kept, StateTopic
from connectors.kafka.unpacking import Bounds, guard
from connectors.kafka.watch import Watch
from deformer_stream import log
from deformer_stream.errors import DeformerError, InvariantViolated, Unavailable
from deformer_stream.ports import NOTHING, HandOver, Polled, Restored, Saved

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


def _keep_nothing(partitions: frozenset[int]) -> Mapping[int, Saved]:
    return NOTHING


class KafkaSource:
    """A topic as an endless source of events; one of a group that share its partitions.

    Offsets are committed by `commit` alone and are true positions: the next message to read. A partition that goes to
    another member is committed up to the last poll but this one (see `poll`), reported by the next `Polled`, and never
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
        bounds: Bounds | None = None,
    ) -> None:
        self.topic = topic
        self.hand_over: HandOver = _keep_nothing
        self._servers, self._start = bootstrap_servers, start
        self._delivery, self._state, self._lost = delivery, state, lost
        self._session, self._patience = session_seconds, patience
        self._same_model = SameModel(model)
        self._polled: dict[TopicPartition, int] = {}  # next positions of what was polled
        self._settled: dict[TopicPartition, int] = {}  # next positions of what was polled and dealt with
        self._committed: dict[TopicPartition, int] = {}
        self._kept: dict[TopicPartition, Kept] = {}  # what is in force
        self._saved: dict[int, Saved] = {}  # what is to go with the next commit
        self._gained: dict[TopicPartition, float] = {}  # partition that has not begun → since when
        self._unrestored = ""  # why not, as it was said last
        self._recovering: dict[TopicPartition, int] = {}  # partition → where its history ends
        self._revoked: list[int] = []
        self._life, self._commits = uuid.uuid4().hex[:12], 0  # these name our commits
        self._attempt: Attempt | None = None
        self._confirmed = time.monotonic()
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
        guard(self._consumer, bounds)
        self._watch = Watch(self._consumer, bootstrap_servers, topic, patience)
        try:
            with mapped(bootstrap_servers, f"looking for topic {topic!r}", ValueError, TypeError):
                self._consumer.subscribe([topic], listener=Rebalance(self._gain, self._give_up, self._leave))
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

    def poll(self, timeout: float) -> Polled:
        """Whatever is there, after at most `timeout` seconds; ordered within each partition.

        To call it says that the effects of everything polled before are written: a partition taken away during this
        call is committed up to there. `revoked` were taken away before `data` came. Raises ConfigError where the group
        works with another model, `StateError` where what is kept of a partition cannot be had.
        """
        self._settled = dict(self._polled)
        fetched = self._fetch(timeout)
        self._same_model.check()
        for partition, runs in fetched.items():
            self._polled[partition] = int(runs[-1].offsets[-1]) + 1
        revoked, self._revoked = tuple(sorted(self._revoked)), []
        begun = tuple(self._begin_gained())
        with mapped(self._servers, f"reading topic {self.topic!r}"):
            self._watch.look()
            recovered = self._take_recovered()
        return Polled(messages_of(self.topic, fetched), revoked, begun, recovered)

    def _poll(self, timeout: float) -> dict[TopicPartition, list[Run]]:
        try:
            return dict(self._consumer.poll(timeout_ms=timeout * 1000))
        except errors.KafkaError as error:
            if type(error) is errors.KafkaError and error.__cause__ is not None:
                raise error.__cause__ from None  # it came from our own `Rebalance`, so it is no fault of Kafka's
            raise

    def _fetch(self, timeout: float) -> dict[TopicPartition, list[Run]]:
        try:
            fetched = self._poll(timeout)
            self._watch.worked()
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
            self._watch.failed(error)
            time.sleep(min(timeout, RETRY_SECONDS))
        return {}

    def _take_recovered(self) -> tuple[int, ...]:
        """The partitions whose history is over; what follows it may be transaction markers, which are never polled."""
        over = [tp for tp, until in self._recovering.items() if self._position(tp) >= until]
        for tp in over:
            del self._recovering[tp]
            self._polled[tp] = self._position(tp)
        return tuple(tp.partition for tp in over)

    def _begin_gained(self) -> Iterator[Restored]:
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

    def _begin(self, tp: TopicPartition) -> Restored:
        """Place the reader where the partition's history, or else its new messages, begin."""
        with mapped(self._servers, f"restoring partition {tp.partition} of topic {self.topic!r}"):
            begun = restored(self._consumer, tp, self._start, self._state, self._lost)
            self._consumer.seek(tp, begun.position)
            self._consumer.resume(tp)
        if begun.kept is not None:
            self._kept[tp] = begun.kept
        self._recovering[tp] = begun.restored.until
        return begun.restored

    def _position(self, tp: TopicPartition) -> int:
        position = self._consumer.position(tp, timeout_ms=0)
        return -1 if position is None else int(position)

    def commit(self, saved: Mapping[int, Saved] = NOTHING) -> None:
        """Commit the positions of all partitions that are ours, with what is kept of them and what sinks have put into
        the delivery. Blocks until the broker has it.

        While the group is rebalancing the broker takes no commit: the rebalance is then finished first, without taking
        new messages, and what is still ours is committed. What was lost meanwhile is reported by the next poll. A
        failure is tried again until the patience is over: then Unavailable is raised.
        """
        self._settled = dict(self._polled)
        self._saved = dict(saved)
        deadline = time.monotonic() + self._patience
        said: set[str] = set()
        again = False
        while True:
            try:
                if again:
                    self._finish_rebalance()
                return self._try_to_commit()
            except (errors.KafkaError, OSError, Unavailable) as error:
                ours = error if isinstance(error, Unavailable) else translate(error, self._servers, "committing")
                if not isinstance(ours, Unavailable) or time.monotonic() > deadline:
                    raise ours from error
                if (kind := type(error).__name__) not in said:
                    log.get("kafka").warning("commit failed, will be tried again", error=kind)
                    said.add(kind)
                if not isinstance(error, _REBALANCING):
                    time.sleep(RETRY_SECONDS)
                again = True

    def _try_to_commit(self) -> None:
        """One attempt. Raises the client's errors and ours."""
        group = self._consumer.group_metadata()
        if self._consumer.assignment() and group.state is not MemberState.STABLE:
            raise errors.RebalanceInProgressError()
        if self._delivery is not None and self._delivery.failed:
            self._delivery.renew()
        if self._attempt is not None:
            self._learn_outcome(self._attempt)
        self._attempt = attempt = self._prepare(self._positions())
        if self._delivery is None or not self._delivery.seal(attempt.offsets, group):
            self._consumer.commit(attempt.offsets, timeout_ms=DELIVERY_SECONDS * 1000)
        self._conclude(attempt)

    def _learn_outcome(self, attempt: Attempt) -> None:
        """Whether the commit whose answer got lost took effect, as the broker tells now that nothing is open."""
        for tp in attempt.offsets.keys() & attempt.kept.keys():
            found = self._consumer.committed(tp, metadata=True, timeout_ms=DELIVERY_SECONDS * 1000)
            if found is not None and found.metadata == attempt.kept[tp].metadata():
                return self._conclude(attempt)

    def _positions(self) -> dict[TopicPartition, int]:
        """Where our partitions are; not of those whose history is not over, their commit stands."""
        live = [tp for tp in self._consumer.assignment() if tp not in self._recovering and tp not in self._gained]
        return {tp: at for tp in live if (at := self._position(tp)) >= 0}

    def _prepare(self, positions: dict[TopicPartition, int], within: float | None = None) -> Attempt:
        """Transmit what goes with these positions, within so many seconds; what is to be committed then."""
        self._commits += 1
        commit = f"{self._life}-{self._commits}"
        kept = dict(self._kept)
        messages: list[Outgoing] = []
        begins: list[tuple[TopicPartition, int]] = []
        for tp, position in positions.items():
            saved = self._saved.get(tp.partition)
            if self._state is not None and saved is not None:
                if saved.snapshot is not None:
                    begins.append((tp, len(messages)))
                more, kept[tp] = self._state.messages(tp.partition, position, saved, kept.get(tp), commit)
                messages += more
        kept = {tp: replace(k, commit=commit) for tp, k in kept.items()}
        if self._delivery is not None:
            sent = self._delivery.transmit(messages, within)
            for tp, first in begins:
                kept[tp] = replace(kept[tp], at=sent[first])
        again = time.monotonic() - self._confirmed > CONFIRM_SECONDS
        offsets = {
            tp: OffsetAndMetadata(at, kept[tp].metadata() if tp in kept else "", -1)
            for tp, at in positions.items()
            if again or self._committed.get(tp) != at or tp.partition in self._saved
        }
        return Attempt(offsets, kept, self._saved)

    def _conclude(self, attempt: Attempt) -> None:
        """It has taken effect."""
        self._attempt = None
        if attempt.offsets:
            self._confirmed = time.monotonic()
        self._committed.update({tp: offset.offset for tp, offset in attempt.offsets.items()})
        self._kept.update({tp: attempt.kept[tp] for tp in attempt.offsets if tp in attempt.kept})
        if self._saved is attempt.saved:
            self._saved = {}
        if self._delivery is not None:
            self._delivery.settled()

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
        with mapped(self._servers, "closing the consumer"):
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
            self._saved = dict(self.hand_over(frozenset(tp.partition for tp in leaving)))
            settled = {tp: at for tp, at in self._settled.items() if tp not in self._recovering}
            try:
                if self._delivery is not None and self._delivery.failed:
                    raise errors.KafkaConnectionError("an earlier commit has not ended")
                self._attempt = attempt = self._prepare(settled, deadline - time.monotonic())
                group, left = self._consumer.group_metadata(), deadline - time.monotonic()
                if self._delivery is None or not self._delivery.seal(attempt.offsets, group, left):
                    await self._consumer.commit_async(attempt.offsets)
                self._conclude(attempt)
            except (errors.KafkaError, DeformerError) as error:
                # The next owner repeats these messages. To raise here would end the group's rebalance instead.
                log.get("kafka").warning("revoked partitions not committed", error=type(error).__name__)
        self._lose(partitions)

    def _leave(self, partitions: Iterable[TopicPartition]) -> None:
        self._same_model.leave()
        self._lose(partitions)

    def _lose(self, partitions: Iterable[TopicPartition]) -> None:
        for tp in partitions:
            for known in (self._polled, self._settled, self._committed, self._kept, self._recovering, self._gained):
                known.pop(tp, None)
            if self._attempt is not None:
                self._attempt.offsets.pop(tp, None)
            self._saved.pop(tp.partition, None)
            self._revoked.append(tp.partition)
        if self._delivery is not None:
            self._delivery.drop(tp.partition for tp in partitions)
