"""A Kafka cluster in memory, for tests of what happens if single requests fail, with a clock that tests move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from connectors.kafka.ports import (
    CommittedOffset,
    ConsumerOptions,
    GroupMember,
    KafkaCluster,
    MessageColumns,
    Offsets,
    OutgoingMessage,
    RebalanceHandler,
    ReceivedMessage,
    TopicDescription,
    TopicPartition,
)


class Clock:
    """A clock in place of the module `time`, which sleeping and the test move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Return the present time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Move the time."""
        self.now += seconds


class FakeKafka:
    """A cluster with topics, committed offsets, and functions that the test can let fail.

    Attributes:
        cluster: The cluster as its users name it.
        messages: The messages of each partition; the index is the offset.
        hidden: The number of messages at the end of a partition that belong to an open transaction.
        committed: The committed offsets.
        num_partitions: The number of partitions of each topic.
        before: A function that is called before each request, with its name and its partitions. It may raise an error.
        consumers: The consumers that were opened.
        clock: The clock, which polls without messages move.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.cluster = KafkaCluster("fake:1")
        self.messages: dict[TopicPartition, list[OutgoingMessage]] = defaultdict(list)
        self.hidden: dict[TopicPartition, int] = {}
        self.committed: dict[TopicPartition, CommittedOffset] = {}
        self.num_partitions: dict[str, int] = {}
        self.before: Callable[[str, set[TopicPartition]], None] = lambda name, tps: None
        self.consumers: list[FakeConsumer] = []

    def open_consumer(self, cluster: KafkaCluster, options: ConsumerOptions) -> FakeConsumer:
        """Return a new consumer."""
        self.before("open_consumer", set())
        self.consumers.append(FakeConsumer(self))
        return self.consumers[-1]

    def open_admin(self, cluster: KafkaCluster) -> FakeAdmin:
        """Return a new admin client."""
        self.before("open_admin", set())
        return FakeAdmin(self)

    def get_visible_end(self, tp: TopicPartition) -> int:
        """Return the offset after the last message of a partition that no open transaction hides."""
        return len(self.messages[tp]) - self.hidden.get(tp, 0)


class FakeConsumer:
    """A consumer of a `FakeKafka`, see `ports.Consumer`.

    Attributes:
        handler: The handler of rebalances, if the consumer has subscribed.
        is_closed: Whether it was closed.
        membership: What the property of the protocol returns.
    """

    def __init__(self, kafka: FakeKafka) -> None:
        self._kafka = kafka
        self.handler: RebalanceHandler | None = None
        self.is_closed = False
        self.membership: Any = object()
        self.member_id = "member"
        self._assigned: set[TopicPartition] = set()
        self._started: set[TopicPartition] = set()
        self._positions: dict[TopicPartition, int] = {}

    def subscribe(self, topic: str, handler: RebalanceHandler) -> None:
        self.handler = handler

    def give(self, *tps: TopicPartition) -> None:
        """Assign partitions, as the group does."""
        assert self.handler is not None
        self._assigned |= set(tps)
        self.handler.on_assigned(frozenset(tps))

    def take(self, *tps: TopicPartition) -> None:
        """Drop partitions that were revoked."""
        self._assigned -= set(tps)
        self._started -= set(tps)

    def assign(self, start_offsets: Mapping[TopicPartition, int]) -> None:
        self._assigned = self._started = set(start_offsets)
        self._positions = dict(start_offsets)

    @property
    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self._assigned)

    def start(self, tp: TopicPartition, offset: int) -> None:
        self._kafka.before("start", {tp})
        self._started.add(tp)
        self._positions[tp] = offset

    def stop(self, tps: Iterable[TopicPartition]) -> None:
        stopped = set(tps)
        self._kafka.before("stop", stopped)
        self._started -= stopped

    def poll(self, timeout: float) -> MessageColumns | None:
        received = self.poll_messages(timeout)
        if not received:
            return None
        return MessageColumns(
            [message.key for message in received],
            [message.value for message in received],
            np.array([message.time for message in received], np.int64),
            np.array([message.partition for message in received], np.int32),
            np.array([message.offset for message in received], np.int64),
        )

    def poll_messages(self, timeout: float) -> Sequence[ReceivedMessage]:
        self._kafka.before("poll", self._started)
        received = []
        for tp in sorted(self._started):
            end = self._kafka.get_visible_end(tp)
            for offset in range(self._positions[tp], end):
                sent = self._kafka.messages[tp][offset]
                received.append(ReceivedMessage(*tp, offset, 0, sent.key, sent.value, sent.headers))
            self._positions[tp] = max(end, self._positions[tp])
        if not received:
            self._kafka.clock.sleep(timeout)
        return received

    def serve_group(self, timeout: float) -> None:
        self._kafka.before("serve_group", set())

    def get_position(self, tp: TopicPartition) -> int | None:
        return self._positions.get(tp)

    def get_known_end(self, tp: TopicPartition) -> int | None:
        return None

    def fetch_committed(
        self, tps: Iterable[TopicPartition], timeout: float
    ) -> dict[TopicPartition, CommittedOffset | None]:
        requested = list(tps)
        self._kafka.before("fetch_committed", set(requested))
        return {tp: self._kafka.committed.get(tp) for tp in requested}

    def fetch_first_offsets(self, tps: Iterable[TopicPartition], timeout: float) -> dict[TopicPartition, int]:
        requested = list(tps)
        self._kafka.before("fetch_first_offsets", set(requested))
        return dict.fromkeys(requested, 0)

    def fetch_end_offsets(self, tps: Iterable[TopicPartition], timeout: float) -> dict[TopicPartition, int]:
        requested = list(tps)
        self._kafka.before("fetch_end_offsets", set(requested))
        return {tp: self._kafka.get_visible_end(tp) for tp in requested}

    def commit(self, offsets: Offsets, timeout: float) -> None:
        self._kafka.before("commit", set(offsets))
        self._kafka.committed |= offsets

    def close(self) -> None:
        self.is_closed = True


class FakeAdmin:
    """An admin client of a `FakeKafka`, see `ports.Admin`."""

    def __init__(self, kafka: FakeKafka) -> None:
        self._kafka = kafka

    def describe_topics(self, names: Iterable[str], timeout: float) -> dict[str, TopicDescription]:
        self._kafka.before("describe_topics", set())
        sizes = self._kafka.num_partitions
        return {name: TopicDescription(sizes[name]) for name in names if name in sizes}

    def fetch_log_ends(self, tps: Iterable[TopicPartition], timeout: float) -> dict[TopicPartition, int]:
        requested = list(tps)
        self._kafka.before("fetch_log_ends", set(requested))
        return {tp: len(self._kafka.messages[tp]) for tp in requested}

    def describe_group(self, group: str, timeout: float) -> list[GroupMember]:
        """Return no members: the process of the test is the only one, and has not joined when it asks."""
        self._kafka.before("describe_group", set())
        return []

    def close(self) -> None: ...
