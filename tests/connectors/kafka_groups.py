"""Consumers for tests of the Kafka connector, and the groups that they form."""

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
from kafka.structs import ConsumerGroupMetadata, OffsetAndMetadata

from connectors.kafka import (
    Delivery,
    KafkaSink,
    KafkaSource,
    StateTopic,
    describe_output_topics,
    ensure_topics,
    produce,
)
from connectors.kafka.client import load_client
from connectors.kafka.ports import CommittedOffset, OutgoingMessage
from connectors.kafka.ports import TopicPartition as Partition
from connectors.kafka.state import parse_model
from deformer_stream.codec.payloads import Messages, Payload
from deformer_stream.errors import DeformerError
from deformer_stream.runtime.ports import NO_STATE, PartitionState, PollResult, RestoredPartition, SourceCallbacks
from tests.conftest import get_client_library, make_cluster
from tests.connectors.kafka_helpers import (
    TIMEOUT_SECONDS,
    FakeAlertEncoder,
    make_alert,
    make_effects,
    make_messages,
    open_admin,
    read_topic,
    wait_for_transactions,
    wait_until,
)

MODES = ("exactly-once", "at-least-once")


def get_member_id(source: KafkaSource) -> str:
    """Return the id that the consumer group has given to a source."""
    consumer: Any = source._consumer
    if get_client_library() == "librdkafka":
        return str(consumer._client.memberid())
    return str(consumer.membership.member_id)


def get_client_classes() -> tuple[Any, Any]:
    """Return the classes of the consumer and of the producer of the client library with which a test runs."""
    module: Any = load_client(make_cluster("unused:1"))
    return module.open_consumer, module.open_producer


def describe_group_without_members(bootstrap: str, name: str) -> Any:
    """Return a consumer group without members, for `Producer.send_offsets`."""
    if get_client_library() == "librdkafka":
        import confluent_kafka

        consumer = confluent_kafka.Consumer({"bootstrap.servers": bootstrap, "group.id": name})
        group = consumer.consumer_group_metadata()
        consumer.close()
        return group
    return ConsumerGroupMetadata(name, -1, "", None)


class Reader:
    """A source together with the messages and partitions that its polls have returned.

    Attributes:
        source: The source.
        delivery: The delivery that belongs to the source, or None.
        messages_by_partition: Offset, key and payload of each message, by partition.
        revoked: Partitions that were revoked, in order.
        restored: The state of each partition that was restored.
        caught_up: Partitions whose history has been read.
    """

    def __init__(self, source: KafkaSource, delivery: Delivery | None = None) -> None:
        self.source, self.delivery = source, delivery
        self.messages_by_partition: dict[int, list[tuple[int, bytes | None, bytes | None]]] = defaultdict(list)
        self.revoked: list[int] = []
        self.restored: dict[int, RestoredPartition] = {}
        self.caught_up: set[int] = set()  # partitions whose history is over

    def poll(self, timeout: float = 0.2) -> PollResult:
        """Poll the source once and record what it returns."""
        polled = self.source.poll(timeout)
        self.revoked += polled.revoked_partitions
        self.restored |= {restored.partition: restored for restored in polled.restored_partitions}
        self.caught_up = self.caught_up - set(polled.revoked_partitions) | set(polled.caught_up_partitions)
        if polled.data is not None:
            assert isinstance(polled.data, Messages)
            d = polled.data
            for p, o, k, v in zip(d.partitions.tolist(), d.offsets.tolist(), d.keys, d.payloads, strict=True):
                self.messages_by_partition[p].append((o, k, v))
        return polled

    def __len__(self) -> int:
        """Return the number of messages that were read."""
        return sum(map(len, self.messages_by_partition.values()))

    def read(self, count: int) -> None:
        """Poll until `count` messages were read."""

        def enough() -> bool:
            self.poll()
            return len(self) >= count

        wait_until(enough, f"{count} messages, got {len(self)}")

    def poll_until_assigned(self, *partitions: int) -> None:
        """Poll until exactly the given partitions are assigned and their histories have been read."""

        def ours() -> bool:
            self.poll()
            return self.caught_up == set(partitions) == self.source.assigned_partitions

        wait_until(ours, f"partitions {partitions}, has {sorted(self.source.assigned_partitions)}")

    def list_payloads(self) -> list[bytes | None]:
        """Return the payloads of all messages, partition by partition."""
        return [v for rows in self.messages_by_partition.values() for _, _, v in rows]

    def close(self) -> None:
        """Close the source and its delivery."""
        self.source.close()
        if self.delivery is not None:
            self.delivery.close()


@contextmanager
def poll_in_background(turn: Callable[[], object]) -> Iterator[None]:
    """Call a function again and again in a thread, as another process would do, until the block ends.

    Args:
        turn: The function, usually the `poll` of a consumer. An exception that it raises is raised at the end of the
            block.
    """
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
    """A member of a consumer group with a minimal engine, in which every message raises an alert.

    Its state of a partition consists of two lists. One is the offsets that were seen, which can be rebuilt from the
    log. The other one is the decisions (offsets that are multiples of three), which must be saved. Both must be
    complete after any number of rebalances (`is_state_complete`).
    """

    def __init__(self, source: KafkaSource, delivery: Delivery, sink: KafkaSink) -> None:
        self.source, self.delivery, self.sink = source, delivery, sink
        self.seen_offsets: dict[int, list[int]] = {}
        self.decided_offsets: dict[int, list[int]] = {}
        self.handled_offsets: list[tuple[int, int]] = []  # partition and offset of the messages that had effects
        self.restored: list[RestoredPartition] = []
        self.revoked: list[int] = []
        self._history: dict[int, RestoredPartition] = {}
        self._unsaved: dict[int, list[int]] = {}  # decisions since the last commit, of the live partitions
        self._based: set[int] = set()  # partitions that have a snapshot
        source.set_callbacks(SourceCallbacks(self.collect_state))

    def poll(self, timeout: float = 0.1) -> PollResult:
        """Poll, update the state, and write the effects of the messages."""
        polled = self.source.poll(timeout)
        self.revoked += polled.revoked_partitions
        for partition in polled.revoked_partitions:
            for known in (self.seen_offsets, self.decided_offsets, self._history, self._unsaved):
                known.pop(partition, None)
            self._based.discard(partition)
        for restored in polled.restored_partitions:
            self._restore(restored)
        live = self._replay(polled.data)
        for partition in polled.caught_up_partitions:
            for decisions in self._history.pop(partition).decisions:
                self.decided_offsets[partition] += orjson.loads(decisions)
            self._unsaved[partition] = []
        self._act(live)
        return polled

    def _restore(self, restored: RestoredPartition) -> None:
        """Take over the state of a partition that was assigned."""
        partition = restored.partition
        assert partition not in self.seen_offsets, f"partition {partition} comes though it is ours"
        self.restored.append(restored)
        kept = {"seen": [], "decided": []} if restored.snapshot is None else orjson.loads(restored.snapshot)
        self.seen_offsets[partition], self.decided_offsets[partition] = kept["seen"], kept["decided"]
        self._history[partition] = restored
        if restored.snapshot is not None:
            self._based.add(partition)

    def _replay(self, data: Payload | None) -> Messages | None:
        """Add the messages that are history to the state, and return the other messages."""
        if data is None:
            return None
        assert isinstance(data, Messages)
        places = list(zip(data.partitions.tolist(), data.offsets.tolist(), strict=True))
        past = np.array([p in self._history and o < self._history[p].committed_offset for p, o in places])
        for i in np.flatnonzero(past).tolist():
            partition, offset = places[i]
            self.seen_offsets[partition].append(offset)
        return data.take(np.flatnonzero(~past))

    def _act(self, data: Messages | None) -> None:
        """Add new messages to the state, and write an alert for each."""
        if data is None:
            return
        alerts = []
        for i, (partition, offset) in enumerate(zip(data.partitions.tolist(), data.offsets.tolist(), strict=True)):
            self.seen_offsets[partition].append(offset)
            self.handled_offsets.append((partition, offset))
            alerts.append(make_alert(f"{partition}-{offset}", i))
            if offset % 3 == 0:
                self.decided_offsets[partition].append(offset)
                self._unsaved[partition].append(offset)
        self.sink.write(make_effects(alerts, []), data)

    def collect_state(self, partitions: frozenset[int]) -> dict[int, PartitionState]:
        """Return the state to save, with snapshots of the given partitions."""
        return self._saved(partitions)

    def _saved(self, snapshots: Iterable[int]) -> dict[int, PartitionState]:
        """Return snapshots of the given partitions and of partitions without one, and the new decisions of all
        others.
        """
        saved = {}
        for partition, decisions in self._unsaved.items():
            if partition in snapshots or partition not in self._based:
                kept = {"seen": self.seen_offsets[partition], "decided": self.decided_offsets[partition]}
                saved[partition] = PartitionState(snapshot=orjson.dumps(kept))
            elif decisions:
                saved[partition] = PartitionState(decisions=orjson.dumps(decisions))
        return saved

    def commit(self, snapshots: Iterable[int] = ()) -> None:
        """Commit with the decisions, and with snapshots of the given partitions and of partitions without one."""
        saved = self._saved(frozenset(snapshots))
        self.sink.flush()
        self.source.commit(saved)
        self._keep(saved)

    def begin_commit(self, ended: Callable[[], None] = lambda: None) -> None:
        """Begin a commit without waiting for its end.

        Args:
            ended: Called when the commit has taken effect.
        """
        saved = self._saved(())
        self.sink.flush()
        self.source.begin_commit(saved, ended)
        self._keep(saved)

    def _keep(self, saved: Mapping[int, PartitionState]) -> None:
        """Record what was saved, so that the next commit does not save it again."""
        for partition, kept in saved.items():
            if partition in self._unsaved:
                self._unsaved[partition] = []
                if kept.snapshot is not None:
                    self._based.add(partition)

    def read(self, count: int) -> None:
        """Poll until `count` messages have had effects in this process."""

        def enough() -> bool:
            self.poll()
            return len(self.handled_offsets) >= count

        wait_until(enough, f"{count} messages, got {len(self.handled_offsets)}")

    def poll_until_assigned(self, *partitions: int) -> None:
        """Poll until exactly the given partitions are assigned and their histories have been read."""

        def ours() -> bool:
            self.poll()
            return self.caught_up == set(partitions) == self.source.assigned_partitions

        wait_until(ours, f"partitions {partitions}, has {sorted(self.source.assigned_partitions)}")

    @property
    def caught_up(self) -> set[int]:
        """The partitions whose history has been read."""
        return set(self._unsaved)

    def is_state_complete(self) -> bool:
        """Return whether the state of every caught-up partition equals that of an uninterrupted process."""
        return all(
            self.seen_offsets[p] == list(range(len(self.seen_offsets[p])))
            and sorted(set(self.decided_offsets[p])) == [o for o in self.seen_offsets[p] if o % 3 == 0]
            for p in self._unsaved
        )

    def close(self) -> None:
        """Leave the group and close the connections."""
        self.source.close()
        self.delivery.close()


class Group:
    """A consumer group with a topic of events, and the topics that its members write.

    Args:
        bootstrap: The broker.
        topic: The events topic, which must exist.
        partitions: Number of its partitions.
        mode: The delivery, "exactly-once" or "at-least-once".
        **state: Settings of the state topic.
    """

    def __init__(self, bootstrap: str, topic: str, partitions: int, mode: str = MODES[0], **state: str) -> None:
        self.bootstrap, self.topic, self.mode = bootstrap, topic, mode
        self.cluster = make_cluster(bootstrap)
        self.name = f"g-{topic}"
        self.alerts_topic, self.letters_topic, self.state_topic = f"{topic}-a", f"{topic}-d", f"{topic}-state"
        self.topics = describe_output_topics(self.alerts_topic, self.letters_topic, self.state_topic, partitions)
        self.topics[self.state_topic]["configs"] |= state
        self.max_bytes_by_topic = ensure_topics(self.cluster, self.topics)
        self.members: list[Member | Reader] = []
        self._opened = self.num_sent = 0

    def produce(self, count: int) -> None:
        """Send `count` events; their numbers continue those of the events before."""
        self.num_sent += produce(self.cluster, self.topic, make_messages(count, keys=40, first=self.num_sent))

    def open_delivery(self, name: str | None = None) -> Delivery:
        """Return a delivery; `name` makes its transactional id the same for several of them."""
        self._opened += 1
        transactional_id = f"{self.name}-{name or self._opened}" if self.mode == "exactly-once" else None
        return Delivery(self.cluster, self.max_bytes_by_topic, transactional_id)

    def open_state_topic(self) -> StateTopic:
        """Return the state topic of the group."""
        return StateTopic(self.cluster, self.state_topic, self.max_bytes_by_topic[self.state_topic], group=self.name)

    def open(self, instance: str | None = None, model: str = "m", **options: Any) -> tuple[KafkaSource, Delivery]:
        """Return a source and its delivery, connected as the program connects them."""
        delivery = self.open_delivery(instance)
        shared = {"delivery": delivery, "state": self.open_state_topic(), "model": model, "instance": instance}
        quick = {"session_seconds": 10.0, "patience": TIMEOUT_SECONDS}
        try:
            source = KafkaSource(self.cluster, self.topic, self.name, **{**quick, **shared, **options})
        except DeformerError:
            delivery.close()
            raise
        return source, delivery

    def add_member(self, instance: str | None = None, model: str = "m", **options: Any) -> Member:
        """Add a member with the minimal engine."""
        source, delivery = self.open(instance, model, **options)
        member = Member(source, delivery, KafkaSink(self.alerts_topic, None, FakeAlertEncoder(), delivery))
        self.members.append(member)
        return member

    def add_reader(self, instance: str | None = None, model: str = "m", **options: Any) -> Reader:
        """Add a consumer that only reads."""
        reader = Reader(*self.open(instance, model, **options))
        self.members.append(reader)
        return reader

    def commit(
        self,
        delivery: Delivery,
        state: Sequence[OutgoingMessage] = (),
        member: Any = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> list[int]:
        """Send all sealed messages and then the state messages, and in a transaction also an offset.

        Args:
            delivery: The delivery.
            state: Messages of the state topic.
            member: The group that commits. The default is a group without members.
            meanwhile: Called while the transaction is open.

        Returns:
            The offsets of the state messages.
        """
        delivery.seal_pending()
        if not delivery.is_transactional:
            return delivery.send(state)
        found: list[int] = []

        def offsets(sent: list[int]) -> dict[Partition, CommittedOffset]:
            found.extend(sent)
            meanwhile()
            return {Partition(self.topic, 0): CommittedOffset(7, "some metadata")}

        member = member or describe_group_without_members(self.bootstrap, self.name)
        delivery.begin(delivery.transaction(state, offsets, member))
        delivery.end()
        return found

    def remove_member(self, member: Member | Reader) -> None:
        """Remove a member from the group, as if its process had been killed and its session had timed out."""
        with open_admin(self.bootstrap) as admin:
            admin.remove_group_members(self.name, [MemberToRemove(get_member_id(member.source))])

    def read_committed(self) -> dict[int, OffsetAndMetadata]:
        """Return the committed offset of the topic with its metadata, by partition."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        with open_admin(self.bootstrap) as admin:
            while True:
                try:
                    offsets = admin.list_group_offsets([self.name])[self.name]
                except RetriableError:
                    assert time.monotonic() < deadline, "time-out while reading the committed offsets"
                else:
                    return {
                        tp.partition: offset._replace(metadata=offset.metadata.rstrip("\0"))  # of confluent-kafka
                        for tp, offset in offsets.items()
                        if tp.topic == self.topic and offset.offset >= 0
                    }

    def read_positions(self) -> dict[int, int]:
        """Return the committed offset by partition."""
        return {partition: offset.offset for partition, offset in self.read_committed().items()}

    def read_models(self) -> set[str]:
        """Return the models that the metadata of the committed offsets state."""
        return {parse_model(offset.metadata) for offset in self.read_committed().values()}

    def list_alerts(self) -> list[bytes]:
        """Return the keys of the alerts that a reader of committed messages sees, in order within each partition."""
        wait_for_transactions(self.bootstrap, self.alerts_topic)
        return [record.key for record in read_topic(self.bootstrap, self.alerts_topic)]

    def has_consumed_all(self, *members: Member) -> bool:
        """Return whether the given members together have seen every event, each partition in one of them."""
        return sum(len(member.seen_offsets[p]) for member in members for p in member.caught_up) == self.num_sent

    def check_effects(self, *members: Member) -> None:
        """Let the members commit, and check that every event was consumed and saved, and has an alert.

        With exactly-once delivery each alert must exist once, with at-least-once delivery at least once.
        """
        for member in members:
            with ExitStack() as others:
                for other in members:
                    if other is not member:  # a commit waits for all members while partitions move
                        others.enter_context(poll_in_background(other.poll))
                member.poll()
                member.commit()
            assert member.is_state_complete()
        ends = self.read_positions()
        assert sum(ends.values()) == self.num_sent
        assert sorted(set(self.list_alerts())) == list_alert_keys(ends)
        assert self.mode == "at-least-once" or len(self.list_alerts()) == self.num_sent

    def close(self) -> None:
        """Close all members and ignore errors."""
        for member in self.members:
            with suppress(DeformerError, KafkaError):
                member.close()
        self.members.clear()


def list_alert_keys(counts: Mapping[int, int] = NO_STATE) -> list[bytes]:
    """Return the sorted keys of the alerts for the given number of messages of each partition."""
    return sorted(b"%d-%d" % (partition, offset) for partition, count in counts.items() for offset in range(count))
