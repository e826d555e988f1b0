"""Kafka transactions: messages and the consumed offsets become visible together, or not at all.

Requests, connections, metadata and record encoding are kafka-python's. The order of the requests is ours, because the
client's own producer sends one request of a transaction at a time through a network thread (see
docs/decisions/0025-hand-ordered-transaction-requests.md). One commit is

    AddPartitionsToTxn, AddOffsetsToTxn   to the coordinator of the transaction, together
    Produce                               to the leader of each partition, once the partitions are added
    TxnOffsetCommit                       to the coordinator of the group, once the group is added
    EndTxn                                once all responses have arrived

so a commit waits for three responses in sequence. There is one connection per broker, and a broker answers its requests
in order. So it never checks two requests of one transaction at once, of which it would refuse one.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import kafka.errors as errors
from kafka.partitioner import DefaultPartitioner
from kafka.protocol.metadata import CoordinatorType
from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    ProduceRequest,
    TxnOffsetCommitRequest,
)
from kafka.structs import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition

from connectors.kafka.batches import Batch, BatchBuilder, OutgoingMessage, offsets_in_order, plan_requests
from connectors.kafka.broker_client import LEADER_MOVED, BrokerClient, raise_for_code

NO_ONE = -1
"""The producer id and epoch before the broker has assigned any."""

Offsets = Mapping[TopicPartition, OffsetAndMetadata]


class Transactions:
    """The only process that writes under a transactional id, one transaction after another.

    If a call raises, the transaction may be open, ended or aborted, and this object must not be used again. Opening
    another
    one with the same id ends what was left open. Calls belong to one thread at a time, except `leave`. They raise the
    client's errors, and KafkaTimeoutError after `patience` seconds.

    Args:
        transactional_id: The id; the broker admits one process at a time.
        limits: Largest batch in bytes, by topic.
        timeout: Seconds of silence after which the broker aborts an open transaction.
        patience: Seconds that one call may take.
        kafka_client: Factory of the client's network layer.
        bootstrap_timeout_ms: Milliseconds the first connection may take.
        **options: Further arguments of the client, as `client.connect` passes them.
    """

    def __init__(
        self,
        transactional_id: str,
        limits: Mapping[str, int],
        timeout: float,
        patience: float,
        kafka_client: Callable[..., Any],
        bootstrap_timeout_ms: int,
        **options: Any,
    ) -> None:
        self._id, self._limits = transactional_id, limits
        self._timeout, self._patience = timeout, patience
        self._asking = BrokerClient(patience, kafka_client, bootstrap_timeout_ms, **options)
        self._cluster, self._partitioner = self._asking.cluster, DefaultPartitioner()
        self._producer, self._epoch = NO_ONE, NO_ONE
        self._batcher = BatchBuilder(NO_ONE, NO_ONE, limits)
        self._coordinator: Any = None  # the broker that coordinates our transactions
        self._groups: dict[str, Any] = {}  # consumer group → the broker that coordinates it

    def open(self) -> None:
        """Become the process that writes under the transactional id. On return the broker has ended what a predecessor
        left open.
        """
        self._asking.run(self._open)

    def commit(
        self,
        records: Sequence[OutgoingMessage],
        offsets: Callable[[Callable[[], list[int]]], Offsets],
        group: ConsumerGroupMetadata,
    ) -> None:
        """Write messages and commit offsets of a consumer group in one transaction; return when it is committed.

        Args:
            records: The messages.
            offsets: Returns the offsets to commit. It gets a function that waits for the offsets of the messages and
                returns
                them in the order of the messages.
            group: The consumer group.
        """
        self._asking.run(lambda: self._commit(records, offsets, group))

    def leave(self) -> None:
        """Close the connections; a call that runs in another thread raises soon. May be called from any thread."""
        self._asking.abandon()

    # --- a commit, step by step ---------------------------------------------------------------------------------------

    def _commit(
        self,
        records: Sequence[OutgoingMessage],
        offsets: Callable[[Callable[[], list[int]]], Offsets],
        group: ConsumerGroupMetadata,
    ) -> None:
        batches = self._batcher.build(records, self._partition)
        group_added = self.register({batch.topic_partition for batch in batches}, group.group_id)
        written = self.write(batches)
        committed = offsets(lambda: offsets_in_order(batches, written()))
        group_added()
        offsets_answered = self.send_offsets(committed, group)
        written()
        offsets_answered()
        self.end()

    def register(self, partitions: Iterable[TopicPartition], group_id: str) -> Callable[[], None]:
        """Add partitions and a consumer group to the transaction, which begins it.

        Returns:
            A function that waits until the group is added. The partitions are added on return.
        """
        topics = defaultdict(list)
        for tp in sorted(partitions):
            topics[tp.topic].append(tp.partition)

        def add_partitions() -> Any:
            entry = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic
            return self._asking.send(
                self._coordinator,
                AddPartitionsToTxnRequest(
                    v3_and_below_transactional_id=self._id,
                    v3_and_below_producer_id=self._producer,
                    v3_and_below_producer_epoch=self._epoch,
                    v3_and_below_topics=[entry(name=name, partitions=numbers) for name, numbers in topics.items()],
                    max_version=3,  # later ones are for brokers among themselves
                ),
            )

        def add_group() -> Any:
            return self._asking.send(
                self._coordinator,
                AddOffsetsToTxnRequest(**self._signature, group_id=group_id, max_version=4),
            )

        asked = add_partitions() if topics else None
        group_asked = add_group()
        if asked is not None:
            self._asking.request_until_settled(asked, add_partitions, _worst_of_partitions, self._find_coordinator)
        return lambda: self._asking.request_until_settled(group_asked, add_group, _code, self._find_coordinator)

    def write(self, batches: Sequence[Batch]) -> Callable[[], list[int]]:
        """Send batches to the leaders of their partitions; batches of one partition are sent in order.

        Returns:
            A function that waits for the responses and returns the offset of the first record of each batch.
        """
        base: dict[int, int] = {}
        expected: dict[tuple[str, int], int] = {}
        under_way: list[Any] = []
        began = time.monotonic()

        def send(leader: int, places: Sequence[int]) -> None:
            expected.update({tuple(batches[i].topic_partition): i for i in places})
            under_way.append(self._asking.send(leader, self._produce(batches[i] for i in places)))

        def answers() -> Iterator[tuple[int, Any]]:
            """Yield the index of each batch with the broker's response."""
            for asked in under_way:
                for topic in self._asking.wait_for(asked).responses:
                    for answer in topic.partition_responses:
                        yield expected.pop((topic.name, answer.index)), answer

        def settle() -> None:
            while under_way:
                refused: list[int] = []
                for place, answer in answers():
                    if answer.error_code in LEADER_MOVED:
                        refused.append(place)
                    else:
                        raise_for_code(answer.error_code)
                        base[place] = int(answer.base_offset)
                under_way.clear()
                if refused:  # the broker knows by its number a batch that it has after all
                    self._asking.pause_since(began)
                    self._asking.refresh_metadata()
                for place in refused:
                    send(self._leader(batches[place].topic_partition), [place])
            if expected:  # so that it is not taken for written
                raise errors.KafkaError(f"the broker does not say what became of {sorted(expected)}")

        def offsets() -> list[int]:
            settle()
            return [base[i] for i in range(len(batches))]

        for turn in plan_requests(batches, self._leader):
            settle()
            for leader, places in turn.items():
                send(leader, places)
        return offsets

    def send_offsets(self, offsets: Offsets, group: ConsumerGroupMetadata) -> Callable[[], None]:
        """Commit offsets of the consumer group within the transaction, if the group accepts them from this member.

        Returns:
            A function that waits for the response.
        """
        if not offsets:
            return lambda: None
        entry = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
        topics = defaultdict(list)
        for tp, at in offsets.items():
            topics[tp.topic].append(
                entry.TxnOffsetCommitRequestPartition(
                    partition_index=tp.partition,
                    committed_offset=at.offset,
                    committed_leader_epoch=at.leader_epoch,
                    committed_metadata=at.metadata,
                )
            )

        def ask() -> Any:
            return self._asking.send(
                self._group_coordinator(group.group_id),
                TxnOffsetCommitRequest(
                    **self._signature,
                    group_id=group.group_id,
                    generation_id=group.generation_id,
                    member_id=group.member_id,
                    group_instance_id=group.group_instance_id,
                    topics=[entry(name=name, partitions=partitions) for name, partitions in topics.items()],
                    max_version=4,  # from 3 on with the member in it: a stranger is refused
                ),
            )

        def code_of(answer: Any) -> int:
            said = {(t.name, p.partition_index): int(p.error_code) for t in answer.topics for p in t.partitions}
            return next((said[tp] for tp in offsets if said[tp]), 0)

        asked = ask()
        return lambda: self._asking.request_until_settled(
            asked, ask, code_of, lambda: self._groups.pop(group.group_id, None)
        )

    def end(self) -> None:
        """Commit the transaction."""

        def ask() -> Any:
            return self._asking.send(self._coordinator, EndTxnRequest(**self._signature, committed=True, max_version=4))

        self._asking.request_until_settled(ask(), ask, _code, self._find_coordinator)

    @property
    def _signature(self) -> dict[str, Any]:
        """The fields that identify the producer in every request of a transaction."""
        return {"transactional_id": self._id, "producer_id": self._producer, "producer_epoch": self._epoch}

    # --- what that needs ----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._cluster.set_topics(self._limits)
        answer = self._asking.retry(self._become)
        self._producer, self._epoch = answer.producer_id, answer.producer_epoch
        self._batcher = BatchBuilder(self._producer, self._epoch, self._limits)

    def _become(self) -> Any:
        """Request a producer id and epoch from the coordinator, which fences any predecessor."""
        self._asking.refresh_metadata()
        self._find_coordinator()
        asked = InitProducerIdRequest(
            transactional_id=self._id,
            transaction_timeout_ms=int(1000 * self._timeout),
            producer_id=NO_ONE,
            producer_epoch=NO_ONE,
            max_version=4,
        )
        answer = self._asking.wait_for(self._asking.send(self._coordinator, asked))
        raise_for_code(answer.error_code)
        return answer

    def _find_coordinator(self) -> None:
        find = partial(self._asking.find_coordinator, CoordinatorType.TRANSACTION, self._id)
        self._coordinator = self._asking.retry(find)

    def _partition(self, record: OutgoingMessage) -> TopicPartition:
        """Return the partition that a message goes to."""
        if record.topic in self._cluster.unauthorized_topics:
            raise errors.TopicAuthorizationFailedError()
        if not self._cluster.partitions_for_topic(record.topic):
            raise errors.UnknownTopicOrPartitionError()
        if record.partition is not None:
            return TopicPartition(record.topic, record.partition)
        key, value = record.key, record.value
        return TopicPartition(
            record.topic, self._partitioner.partition(record.topic, key, key, value, value, self._cluster)
        )

    def _produce(self, batches: Iterable[Batch]) -> ProduceRequest:
        """Return the request that writes batches."""
        entry = ProduceRequest.TopicProduceData
        topics = defaultdict(list)
        for to, records, _ in batches:
            topics[to.topic].append(entry.PartitionProduceData(index=to.partition, records=records))
        return ProduceRequest(
            transactional_id=self._id,
            acks=-1,
            timeout_ms=int(1000 * self._patience),
            topic_data=[entry(name=name, partition_data=partitions) for name, partitions in topics.items()],
            min_version=3,
            max_version=11,  # later ones add partitions to the transaction by themselves
        )

    def _leader(self, tp: TopicPartition) -> int:
        """Return the broker that leads a partition; wait while it has none."""

        def known() -> int:
            leader = self._cluster.leader_for_partition(tp)
            if leader is None or leader < 0:
                raise errors.LeaderNotAvailableError()
            return int(leader)

        return self._asking.retry(known, between=self._asking.refresh_metadata)

    def _group_coordinator(self, group: str) -> Any:
        """Return the broker that coordinates a consumer group."""
        if group not in self._groups:
            self._groups[group] = self._asking.retry(
                partial(self._asking.find_coordinator, CoordinatorType.GROUP, group)
            )
        return self._groups[group]


def _code(answer: Any) -> int:
    """Return the error code of a response."""
    return int(answer.error_code)


def _worst_of_partitions(answer: Any) -> int:
    """Return the error code that explains why partitions were not added to the transaction, or 0.

    If one partition is refused, the broker does not attempt the others; their code says nothing about the reason.
    """
    codes = {p.partition_error_code for t in answer.results_by_topic_v3_and_below for p in t.results_by_partition}
    codes.discard(0)
    return int(min(codes, key=lambda code: code == errors.OperationNotAttemptedError.errno, default=0))
