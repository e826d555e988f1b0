"""Events in: a topic as an endless source, shared with the other members of a consumer group."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Literal

import kafka.errors as errors
import numpy as np
from kafka import AsyncConsumerRebalanceListener, KafkaConsumer
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.structs import OffsetAndMetadata, TopicPartition

from connectors.kafka.client import CONNECT_SECONDS, DELIVERY_SECONDS, connect, mapped
from deformer_stream import log
from deformer_stream.core.batch import NO_TIME
from deformer_stream.errors import DeformerError, Unavailable
from deformer_stream.ports import Messages, Polled


class _Rebalance(AsyncConsumerRebalanceListener):  # type: ignore[misc]  # the client ships no types
    """Tells the source what it gains and gives up. Awaited on the client's thread, so that it can commit."""

    def __init__(self, source: KafkaSource) -> None:
        self._source = source

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        self._source._gained(assigned)

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        await self._source._give_up(revoked)

    async def on_partitions_lost(self, lost: Iterable[TopicPartition]) -> None:
        self._source._lose(lost)


_REBALANCING = (
    errors.RebalanceInProgressError,
    errors.CommitFailedError,
    errors.IllegalGenerationError,
    errors.UnknownMemberIdError,
)


class KafkaSource:
    """A topic as an endless source of events; one of a group that share its partitions.

    Offsets are committed by `commit` alone and are true positions: the next message to read. A partition that goes to
    another member is committed up to the last poll but this one (see `poll`), reported by the next `Polled`, and never
    committed again. Partitions move one by one (cooperative assignment); messages of aborted transactions are not seen.

    bootstrap_servers: "host:port,…". start: where a group without committed offsets begins. security: arguments of the
    client (security_protocol, ssl_cafile, sasl_mechanism, …), never logged. Belongs to the thread that made it.
    Raises Unavailable where no broker answers or the topic does not exist, ConfigError where the broker refuses us.
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
    ) -> None:
        self.topic = topic
        self._servers = bootstrap_servers
        self._settled: dict[TopicPartition, int] = {}  # next positions of what was polled and dealt with
        self._polled: dict[TopicPartition, int] = {}  # next positions of what was polled
        self._committed: dict[TopicPartition, int] = {}
        self._revoked: list[int] = []
        self._holding = False  # inside `commit`: partitions gained now deliver nothing yet
        self._closed = False
        self._consumer: KafkaConsumer = connect(
            KafkaConsumer,
            bootstrap_servers,
            security,
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset=start,
            isolation_level="read_committed",
            allow_auto_create_topics=False,
            partition_assignment_strategy=[CooperativeStickyAssignor],
            max_poll_records=max_poll_records,
            session_timeout_ms=int(session_seconds * 1000),
            heartbeat_interval_ms=1000,  # how soon a member hears that partitions are to move
        )
        try:
            with mapped(bootstrap_servers, f"looking for topic {topic!r}", ValueError, TypeError):
                self._consumer.subscribe([topic], listener=_Rebalance(self))
                self.partitions = len(self._consumer.partitions_for_topic(topic))
            if not self.partitions:
                raise Unavailable(f"topic {topic!r} does not exist on {bootstrap_servers}: create it or check --topic")
        except DeformerError:
            self.close()
            raise

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

        To call it says that the effects of everything polled before are safe (the road flushes before it polls again):
        a partition taken away during this call is committed up to there. `revoked` were taken away before `data` came.
        """
        self._settled = dict(self._polled)
        with mapped(self._servers, f"reading topic {self.topic!r}"):
            fetched = self._consumer.poll(timeout_ms=timeout * 1000)
        for partition, records in fetched.items():
            self._polled[partition] = records[-1].offset + 1
        revoked, self._revoked = tuple(sorted(self._revoked)), []
        return Polled(self._messages([r for records in fetched.values() for r in records]), revoked)

    def _messages(self, records: list[Any]) -> Messages | None:
        if not records:
            return None
        n = len(records)
        millis = np.fromiter((r.timestamp for r in records), np.int64, n)
        return Messages(
            topic=self.topic,
            keys=[r.key for r in records],
            payloads=[r.value for r in records],
            times=np.where(millis < 0, NO_TIME, millis * 1000),
            partitions=np.fromiter((r.partition for r in records), np.int32, n),
            offsets=np.fromiter((r.offset for r in records), np.int64, n),
        )

    def commit(self) -> None:
        """Commit the positions of all partitions that are ours. Blocks until the broker has them.

        While the group is rebalancing the broker takes no commit: the rebalance is then finished first, without taking
        new messages, and what is still ours is committed. What was lost meanwhile is reported by the next poll. Should
        the other members keep the group waiting, the positions are left to the next commit: nothing is lost by that,
        work may be repeated. Raises Unavailable where the broker does not answer.
        """
        self._settled = dict(self._polled)
        deadline = time.monotonic() + DELIVERY_SECONDS
        with mapped(self._servers, "committing offsets"):
            while time.monotonic() < deadline:
                ours = self._consumer.assignment()
                positions = {tp: self._consumer.position(tp, timeout_ms=0) for tp in ours}
                new = {tp: p for tp, p in positions.items() if p is not None and self._committed.get(tp) != p}
                if not new:
                    return
                try:
                    self._consumer.commit(_offsets(new), timeout_ms=(deadline - time.monotonic()) * 1000)
                except _REBALANCING:
                    self._finish_rebalance()
                else:
                    self._committed.update(new)
                    return
        log.get("kafka").warning("offsets not committed: the group keeps rebalancing", topic=self.topic)

    def _finish_rebalance(self) -> None:
        """Let the client rejoin its group while nothing is delivered: partitions are paused, new ones as they come."""
        self._holding = True
        self._consumer.pause(*self._consumer.assignment())
        try:
            self._consumer.poll(timeout_ms=100)
        finally:
            self._holding = False
            self._consumer.resume(*self._consumer.assignment())

    def lag(self) -> dict[tuple[str, int], int]:
        """(topic, partition) → messages not read yet, for the partitions whose end is known. Asks nobody."""
        lags = {}
        for tp in self._consumer.assignment():
            end, here = self._consumer.highwater(tp), self._consumer.position(tp, timeout_ms=0)
            if end is not None and here is not None:
                lags[tp.topic, tp.partition] = max(0, end - here)
        return lags

    def close(self) -> None:
        """Leave the group, so that others take over at once. Commits nothing."""
        self._closed = True
        with mapped(self._servers, "closing the consumer"):
            self._consumer.close(autocommit=False, timeout_ms=CONNECT_SECONDS * 1000)

    # Called by `_Rebalance` on the client's thread, while ours waits.

    def _gained(self, partitions: Iterable[TopicPartition]) -> None:
        if self._holding:
            self._consumer.pause(*partitions)
        numbers = sorted(tp.partition for tp in partitions)
        log.get("kafka").info("partitions assigned", topic=self.topic, partitions=numbers)

    async def _give_up(self, partitions: Iterable[TopicPartition]) -> None:
        """Commit what is settled of them; the next owner begins there. Not on closing: `close` commits nothing."""
        settled = {tp: self._settled[tp] for tp in partitions if tp in self._settled}
        unsaved = {tp: p for tp, p in settled.items() if self._committed.get(tp) != p}
        if unsaved and not self._closed:
            try:
                await self._consumer.commit_async(_offsets(unsaved))
            except errors.KafkaError as error:
                # The next owner repeats these messages. To raise here would end the group's rebalance instead.
                log.get("kafka").warning("offsets of revoked partitions not committed", error=type(error).__name__)
        self._lose(partitions)

    def _lose(self, partitions: Iterable[TopicPartition]) -> None:
        for tp in partitions:
            for positions in (self._polled, self._settled, self._committed):
                positions.pop(tp, None)
            self._revoked.append(tp.partition)


def _offsets(positions: dict[TopicPartition, int]) -> dict[TopicPartition, OffsetAndMetadata]:
    return {tp: OffsetAndMetadata(position, "", -1) for tp, position in positions.items()}
