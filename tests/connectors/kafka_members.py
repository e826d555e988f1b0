"""Consumers of Kafka for tests, of the simplest kind, and the groups that they are in."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import orjson
from kafka.admin import MemberToRemove
from kafka.errors import KafkaError, RetriableError
from kafka.structs import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition

from connectors.kafka import Delivery, KafkaSink, KafkaSource, StateTopic, ensure_topics, produce, describe_output_topics
from connectors.kafka.batches import OutgoingMessage
from deformer_stream.codec.payloads import Messages, Payload
from deformer_stream.errors import DeformerError
from deformer_stream.runtime.ports import NO_STATE, PollResult, RestoredPartition, PartitionState
from tests.connectors.kafka_world import PATIENCE, Bytes, admin_of, alert, effects, numbered, read, settle, until

MODES = ("exactly-once", "at-least-once")


class Reader:
    """A source and everything that came out of it: `got` maps a partition to its (offset, key, payload)."""

    def __init__(self, source: KafkaSource, delivery: Delivery | None = None) -> None:
        self.source, self.delivery = source, delivery
        self.got: dict[int, list[tuple[int, bytes | None, bytes | None]]] = defaultdict(list)
        self.revoked: list[int] = []
        self.restored: dict[int, RestoredPartition] = {}
        self.live: set[int] = set()  # partitions whose history is over

    def poll(self, timeout: float = 0.2) -> PollResult:
        polled = self.source.poll(timeout)
        self.revoked += polled.revoked_partitions
        self.restored |= {restored.partition: restored for restored in polled.restored_partitions}
        self.live = self.live - set(polled.revoked_partitions) | set(polled.caught_up_partitions)
        if polled.data is not None:
            assert isinstance(polled.data, Messages)
            d = polled.data
            for p, o, k, v in zip(d.partitions.tolist(), d.offsets.tolist(), d.keys, d.payloads, strict=True):
                self.got[p].append((o, k, v))
        return polled

    def __len__(self) -> int:
        return sum(map(len, self.got.values()))

    def read(self, count: int) -> None:
        def enough() -> bool:
            self.poll()
            return len(self) >= count

        until(enough, f"{count} messages, got {len(self)}")

    def settle_on(self, *partitions: int) -> None:
        """Poll until exactly these partitions are ours and their histories are over."""

        def ours() -> bool:
            self.poll()
            return self.live == set(partitions) == self.source.assigned_partitions

        until(ours, f"partitions {partitions}, has {sorted(self.source.assigned_partitions)}")

    def payloads(self) -> list[bytes | None]:
        return [v for rows in self.got.values() for _, _, v in rows]

    def close(self) -> None:
        self.source.close()
        if self.delivery is not None:
            self.delivery.close()


@contextmanager
def following(turn: Callable[[], object]) -> Iterator[None]:
    """Let a consumer follow its topic in a thread of its own, as another process would. What it raises is raised."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def follow() -> None:
        try:
            while not stop.is_set():
                turn()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]


class Member:
    """A consumer as the program puts it together, with the simplest engine: every message is an alert.

    Its state of a partition is the offsets that it has seen, which the log tells, and which of them it has decided on,
    the multiples of three, which the log does not tell. However often a partition has changed hands, both must be
    complete (`complete`).
    """

    def __init__(self, source: KafkaSource, delivery: Delivery, sink: KafkaSink) -> None:
        self.source, self.delivery, self.sink = source, delivery, sink
        self.seen: dict[int, list[int]] = {}
        self.decided: dict[int, list[int]] = {}
        self.handled: list[tuple[int, int]] = []  # partition and offset of the messages that had effects
        self.restored: list[RestoredPartition] = []
        self.revoked: list[int] = []
        self._history: dict[int, RestoredPartition] = {}
        self._unsaved: dict[int, list[int]] = {}  # decisions since the last commit, of the live partitions
        self._based: set[int] = set()  # partitions that have a snapshot
        source.collect_state = self.collect_state

    def turn(self, timeout: float = 0.1) -> PollResult:
        """Poll and write the effects."""
        polled = self.source.poll(timeout)
        self.revoked += polled.revoked_partitions
        for partition in polled.revoked_partitions:
            for known in (self.seen, self.decided, self._history, self._unsaved):
                known.pop(partition, None)
            self._based.discard(partition)
        for restored in polled.restored_partitions:
            self._restore(restored)
        live = self._replay(polled.data)
        for partition in polled.caught_up_partitions:
            for decisions in self._history.pop(partition).decisions:
                self.decided[partition] += orjson.loads(decisions)
            self._unsaved[partition] = []
        self._act(live)
        return polled

    def _restore(self, restored: RestoredPartition) -> None:
        partition = restored.partition
        assert partition not in self.seen, f"partition {partition} comes though it is ours"
        self.restored.append(restored)
        kept = {"seen": [], "decided": []} if restored.snapshot is None else orjson.loads(restored.snapshot)
        self.seen[partition], self.decided[partition] = kept["seen"], kept["decided"]
        self._history[partition] = restored
        if restored.snapshot is not None:
            self._based.add(partition)

    def _replay(self, data: Payload | None) -> Messages | None:
        """See the messages that are history; what is left."""
        if data is None:
            return None
        assert isinstance(data, Messages)
        places = list(zip(data.partitions.tolist(), data.offsets.tolist(), strict=True))
        past = np.array([p in self._history and o < self._history[p].committed_offset for p, o in places])
        for i in np.flatnonzero(past).tolist():
            partition, offset = places[i]
            self.seen[partition].append(offset)
        return data.take(np.flatnonzero(~past))

    def _act(self, data: Messages | None) -> None:
        if data is None:
            return
        alerts = []
        for i, (partition, offset) in enumerate(zip(data.partitions.tolist(), data.offsets.tolist(), strict=True)):
            self.seen[partition].append(offset)
            self.handled.append((partition, offset))
            alerts.append(alert(f"{partition}-{offset}", i))
            if offset % 3 == 0:
                self.decided[partition].append(offset)
                self._unsaved[partition].append(offset)
        self.sink.write(effects(alerts, []), data)

    def collect_state(self, partitions: frozenset[int]) -> dict[int, PartitionState]:
        return self._saved(partitions)

    def _saved(self, snapshots: Iterable[int]) -> dict[int, PartitionState]:
        saved = {}
        for partition, decisions in self._unsaved.items():
            if partition in snapshots or partition not in self._based:
                kept = {"seen": self.seen[partition], "decided": self.decided[partition]}
                saved[partition] = PartitionState(snapshot=orjson.dumps(kept))
            elif decisions:
                saved[partition] = PartitionState(decisions=orjson.dumps(decisions))
        return saved

    def commit(self, snapshots: Iterable[int] = ()) -> None:
        """Commit with decisions, and with snapshots of these partitions and of those that have none."""
        saved = self._saved(frozenset(snapshots))
        self.sink.flush()
        self.source.commit(saved)
        self._keep(saved)

    def begin_commit(self, ended: Callable[[], None] = lambda: None) -> None:
        """The same, without waiting for it."""
        saved = self._saved(())
        self.sink.flush()
        self.source.begin_commit(saved, ended)
        self._keep(saved)

    def _keep(self, saved: Mapping[int, PartitionState]) -> None:
        for partition, kept in saved.items():
            if partition in self._unsaved:
                self._unsaved[partition] = []
                if kept.snapshot is not None:
                    self._based.add(partition)

    def read(self, count: int) -> None:
        """Turn until so many messages have had effects in this life."""

        def enough() -> bool:
            self.turn()
            return len(self.handled) >= count

        until(enough, f"{count} messages, got {len(self.handled)}")

    def settle_on(self, *partitions: int) -> None:
        """Turn until exactly these partitions are ours and their histories are over."""

        def ours() -> bool:
            self.turn()
            return self.live == set(partitions) == self.source.assigned_partitions

        until(ours, f"partitions {partitions}, has {sorted(self.source.assigned_partitions)}")

    @property
    def live(self) -> set[int]:
        """The partitions whose history is over."""
        return set(self._unsaved)

    def complete(self) -> bool:
        """Whether the state of every partition whose history is over is that of an uninterrupted life."""
        return all(
            self.seen[p] == list(range(len(self.seen[p])))
            and sorted(set(self.decided[p])) == [o for o in self.seen[p] if o % 3 == 0]
            for p in self._unsaved
        )

    def close(self) -> None:
        self.source.close()
        self.delivery.close()


class Group:
    """Consumers that share a topic, and the topics that they write. mode: how they deliver."""

    def __init__(self, bootstrap: str, topic: str, partitions: int, mode: str = MODES[0], **state: str) -> None:
        self.bootstrap, self.topic, self.mode = bootstrap, topic, mode
        self.name = f"g-{topic}"
        self.alerts_topic, self.letters_topic, self.state_topic = f"{topic}-a", f"{topic}-d", f"{topic}-state"
        self.topics = describe_output_topics(self.alerts_topic, self.letters_topic, self.state_topic, partitions)
        self.topics[self.state_topic]["configs"] |= state
        self.limits = ensure_topics(bootstrap, self.topics)
        self.members: list[Member | Reader] = []
        self._opened = self.sent = 0

    def produce(self, count: int) -> None:
        """Events, numbered on."""
        self.sent += produce(self.bootstrap, self.topic, numbered(count, keys=40, first=self.sent))

    def delivery(self, name: str | None = None) -> Delivery:
        self._opened += 1
        transactional_id = f"{self.name}-{name or self._opened}" if self.mode == "exactly-once" else None
        return Delivery(self.bootstrap, None, self.limits, transactional_id)

    def state(self) -> StateTopic:
        return StateTopic(self.bootstrap, self.state_topic, None, self.limits[self.state_topic])

    def open(self, instance: str | None = None, model: str = "m", **options: Any) -> tuple[KafkaSource, Delivery]:
        """Source and delivery as the program connects them."""
        delivery = self.delivery(instance)
        shared = {"delivery": delivery, "state": self.state(), "model": model, "instance": instance}
        quick = {"session_seconds": 10.0, "patience": PATIENCE}
        try:
            source = KafkaSource(self.bootstrap, self.topic, self.name, **{**quick, **shared, **options})
        except DeformerError:
            delivery.close()
            raise
        return source, delivery

    def join(self, instance: str | None = None, model: str = "m", **options: Any) -> Member:
        source, delivery = self.open(instance, model, **options)
        member = Member(source, delivery, KafkaSink(self.alerts_topic, None, Bytes(), delivery))
        self.members.append(member)
        return member

    def reader(self, instance: str | None = None, model: str = "m", **options: Any) -> Reader:
        reader = Reader(*self.open(instance, model, **options))
        self.members.append(reader)
        return reader

    def commit(
        self,
        delivery: Delivery,
        state: Sequence[OutgoingMessage] = (),
        member: ConsumerGroupMetadata | None = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> list[int]:
        """Send everything put and then `state`, with a transaction that commits a position, or without; offsets of the
        latter. member: none is allowed, for a group that has none. meanwhile: done in the open transaction."""
        delivery.seal_pending()
        if not delivery.is_transactional:
            return delivery.send(state)
        found: list[int] = []

        def offsets(sent: Callable[[], list[int]]) -> dict[TopicPartition, OffsetAndMetadata]:
            found.extend(sent())
            meanwhile()
            return {TopicPartition(self.topic, 0): OffsetAndMetadata(7, "as said", -1)}

        delivery.begin(delivery.transaction(state, offsets, member or ConsumerGroupMetadata(self.name, -1, "", None)))
        delivery.end()
        return found

    def abandon(self, member: Member | Reader) -> None:
        """As if the process had been killed and its session were over: it does nothing more, and the group knows."""
        gone = MemberToRemove(member.source._consumer.group_metadata().member_id)
        with admin_of(self.bootstrap) as admin:
            admin.remove_group_members(self.name, [gone])

    def committed(self) -> dict[int, OffsetAndMetadata]:
        deadline = time.monotonic() + PATIENCE
        with admin_of(self.bootstrap) as admin:
            while True:
                try:
                    offsets = admin.list_group_offsets([self.name])[self.name]
                except RetriableError:
                    assert time.monotonic() < deadline, "in vain: the committed offsets"
                else:
                    return {tp.partition: offset for tp, offset in offsets.items() if offset.offset >= 0}

    def positions(self) -> dict[int, int]:
        return {partition: offset.offset for partition, offset in self.committed().items()}

    def alerts(self) -> list[bytes]:
        """Keys of the alerts that a reader of committed messages sees, in order within each partition of events."""
        settle(self.bootstrap, self.alerts_topic)
        return [record.key for record in read(self.bootstrap, self.alerts_topic)]

    def consumed(self, *members: Member) -> bool:
        """Whether these members together have seen every event, each partition in one of them."""
        return sum(len(member.seen[p]) for member in members for p in member.live) == self.sent

    def check(self, *members: Member) -> None:
        """Every event was consumed, is kept, and was alerted on: once, or at least once. Lets the members commit."""
        for member in members:
            with ExitStack() as others:
                for other in members:
                    if other is not member:  # a commit waits for all members while partitions move
                        others.enter_context(following(other.turn))
                member.turn()
                member.commit()
            assert member.complete()
        ends = self.positions()
        assert sum(ends.values()) == self.sent
        assert sorted(set(self.alerts())) == of_each(ends)
        assert self.mode == "at-least-once" or len(self.alerts()) == self.sent

    def close(self) -> None:
        for member in self.members:
            with suppress(DeformerError, KafkaError):
                member.close()
        self.members.clear()


def of_each(counts: Mapping[int, int] = NO_STATE) -> list[bytes]:
    """Keys of the alerts that so many messages of each partition lead to, sorted."""
    return sorted(b"%d-%d" % (partition, offset) for partition, count in counts.items() for offset in range(count))
