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

from connectors.kafka.batches import Batch, BatchBuilder, OutgoingMessage, list_offsets, plan_requests
from connectors.kafka.broker_client import LEADER_MOVED, BrokerClient, raise_for_code

NO_PRODUCER = -1
"""The producer id and epoch before the broker has assigned any."""

Offsets = Mapping[TopicPartition, OffsetAndMetadata]


class Transactions:
    """The only process that writes under a transactional id, one transaction after another.

    If a call raises, the transaction may be open, ended or aborted, and this object must not be used again. Opening
    another one with the same id ends what was left open. Calls belong to one thread at a time, except `leave`. They
    raise the client's errors, and KafkaTimeoutError after `patience` seconds.

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
        self._client = BrokerClient(patience, kafka_client, bootstrap_timeout_ms, **options)
        self._cluster, self._partitioner = self._client.cluster, DefaultPartitioner()
        self._producer, self._epoch = NO_PRODUCER, NO_PRODUCER
        self._batch_builder = BatchBuilder(NO_PRODUCER, NO_PRODUCER, limits)
        self._coordinator: Any = None  # the broker that coordinates our transactions
        self._groups: dict[str, Any] = {}  # consumer group → the broker that coordinates it

    def open(self) -> None:
        """Request a producer id, so that this process is the only one that may write under the transactional id.

        When the method returns, the broker has ended the transaction that a predecessor left open.
        """
        self._client.run(self._open)

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
                returns them in the order of the messages.
            group: The consumer group.
        """
        self._client.run(lambda: self._commit(records, offsets, group))

    def close(self) -> None:
        """Close the connections; a call that runs in another thread raises soon. May be called from any thread."""
        self._client.abandon()

    # --- the steps of a commit ----------------------------------------------------------------------------------------

    def _commit(
        self,
        records: Sequence[OutgoingMessage],
        offsets: Callable[[Callable[[], list[int]]], Offsets],
        group: ConsumerGroupMetadata,
    ) -> None:
        """Send the requests of one transaction in order; the arguments are those of `commit`."""
        batches = self._batch_builder.build(records, self._choose_partition)
        wait_for_group = self.add_partitions_and_group({batch.topic_partition for batch in batches}, group.group_id)
        wait_for_base_offsets = self.write(batches)
        committed = offsets(lambda: list_offsets(batches, wait_for_base_offsets()))
        wait_for_group()
        wait_for_offset_commit = self.send_offsets(committed, group)
        wait_for_base_offsets()
        wait_for_offset_commit()
        self.end()

    def add_partitions_and_group(self, partitions: Iterable[TopicPartition], group_id: str) -> Callable[[], None]:
        """Add partitions and a consumer group to the transaction, which begins it.

        Returns:
            A function that waits until the group is added. The partitions are added on return.
        """
        topics = defaultdict(list)
        for tp in sorted(partitions):
            topics[tp.topic].append(tp.partition)

        def add_partitions() -> Any:
            entry = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic
            return self._client.send(
                self._coordinator,
                AddPartitionsToTxnRequest(
                    v3_and_below_transactional_id=self._id,
                    v3_and_below_producer_id=self._producer,
                    v3_and_below_producer_epoch=self._epoch,
                    v3_and_below_topics=[entry(name=name, partitions=numbers) for name, numbers in topics.items()],
                    max_version=3,  # later versions are for requests between brokers
                ),
            )

        def add_group() -> Any:
            return self._client.send(
                self._coordinator,
                AddOffsetsToTxnRequest(**self._signature, group_id=group_id, max_version=4),
            )

        future = add_partitions() if topics else None
        group_future = add_group()
        if future is not None:
            self._client.request_until_accepted(
                future, add_partitions, _get_partition_error_code, self._find_coordinator
            )
        return lambda: self._client.request_until_accepted(
            group_future, add_group, _get_error_code, self._find_coordinator
        )

    def write(self, batches: Sequence[Batch]) -> Callable[[], list[int]]:
        """Send batches to the leaders of their partitions; batches of one partition are sent in order.

        Returns:
            A function that waits for the responses and returns the offset of the first record of each batch.
        """
        base_offset_by_index: dict[int, int] = {}
        index_by_partition: dict[tuple[str, int], int] = {}
        futures: list[Any] = []
        started_at = time.monotonic()

        def send(leader: int, indexes: Sequence[int]) -> None:
            index_by_partition.update({tuple(batches[i].topic_partition): i for i in indexes})
            futures.append(self._client.send(leader, self._make_produce_request(batches[i] for i in indexes)))

        def iterate_responses() -> Iterator[tuple[int, Any]]:
            """Yield the index of each batch with the broker's response."""
            for future in futures:
                for topic in self._client.wait_for(future).responses:
                    for response in topic.partition_responses:
                        yield index_by_partition.pop((topic.name, response.index)), response

        def wait_for_responses() -> None:
            """Wait until all batches that were sent are written; send rejected ones to the new leader."""
            while futures:
                rejected_indexes: list[int] = []
                for batch_index, response in iterate_responses():
                    if response.error_code in LEADER_MOVED:
                        rejected_indexes.append(batch_index)
                    else:
                        raise_for_code(response.error_code)
                        base_offset_by_index[batch_index] = int(response.base_offset)
                futures.clear()
                if rejected_indexes:  # sending again is harmless: the broker recognises a batch by its sequence number
                    self._client.pause_since(started_at)
                    self._client.refresh_metadata()
                for batch_index in rejected_indexes:
                    send(self._find_leader(batches[batch_index].topic_partition), [batch_index])
            if index_by_partition:
                raise errors.KafkaError(f"the broker did not acknowledge the batches of {sorted(index_by_partition)}")

        def wait_for_base_offsets() -> list[int]:
            """Return the offset of the first record of each batch."""
            wait_for_responses()
            return [base_offset_by_index[i] for i in range(len(batches))]

        for requests_by_leader in plan_requests(batches, self._find_leader):
            wait_for_responses()
            for leader, indexes in requests_by_leader.items():
                send(leader, indexes)
        return wait_for_base_offsets

    def send_offsets(self, offsets: Offsets, group: ConsumerGroupMetadata) -> Callable[[], None]:
        """Commit offsets of the consumer group within the transaction, if the group accepts them from this member.

        Returns:
            A function that waits for the response.
        """
        if not offsets:
            return lambda: None
        entry = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
        topics = defaultdict(list)
        for tp, offset in offsets.items():
            topics[tp.topic].append(
                entry.TxnOffsetCommitRequestPartition(
                    partition_index=tp.partition,
                    committed_offset=offset.offset,
                    committed_leader_epoch=offset.leader_epoch,
                    committed_metadata=offset.metadata,
                )
            )

        def send_request() -> Any:
            return self._client.send(
                self._find_group_coordinator(group.group_id),
                TxnOffsetCommitRequest(
                    **self._signature,
                    group_id=group.group_id,
                    generation_id=group.generation_id,
                    member_id=group.member_id,
                    group_instance_id=group.group_instance_id,
                    topics=[entry(name=name, partitions=partitions) for name, partitions in topics.items()],
                    max_version=4,  # from version 3 on, the broker rejects offsets of a non-member
                ),
            )

        def get_error_code(response: Any) -> int:
            """Return the first error code among the partitions, or 0."""
            code_by_partition = {
                (t.name, p.partition_index): int(p.error_code) for t in response.topics for p in t.partitions
            }
            return next((code_by_partition[tp] for tp in offsets if code_by_partition[tp]), 0)

        future = send_request()
        return lambda: self._client.request_until_accepted(
            future, send_request, get_error_code, lambda: self._groups.pop(group.group_id, None)
        )

    def end(self) -> None:
        """Commit the transaction."""

        def send_request() -> Any:
            return self._client.send(self._coordinator, EndTxnRequest(**self._signature, committed=True, max_version=4))

        self._client.request_until_accepted(send_request(), send_request, _get_error_code, self._find_coordinator)

    @property
    def _signature(self) -> dict[str, Any]:
        """The fields that identify the producer in every request of a transaction."""
        return {"transactional_id": self._id, "producer_id": self._producer, "producer_epoch": self._epoch}

    # --- producer id, coordinators and leaders ------------------------------------------------------------------------

    def _open(self) -> None:
        """Request a producer id; see `open`."""
        self._cluster.set_topics(self._limits)
        response = self._client.retry(self._init_producer)
        self._producer, self._epoch = response.producer_id, response.producer_epoch
        self._batch_builder = BatchBuilder(self._producer, self._epoch, self._limits)

    def _init_producer(self) -> Any:
        """Request a producer id and epoch from the coordinator, which fences any predecessor."""
        self._client.refresh_metadata()
        self._find_coordinator()
        request = InitProducerIdRequest(
            transactional_id=self._id,
            transaction_timeout_ms=int(1000 * self._timeout),
            producer_id=NO_PRODUCER,
            producer_epoch=NO_PRODUCER,
            max_version=4,
        )
        response = self._client.wait_for(self._client.send(self._coordinator, request))
        raise_for_code(response.error_code)
        return response

    def _find_coordinator(self) -> None:
        """Find the broker that coordinates the transactions of this producer."""
        find = partial(self._client.find_coordinator, CoordinatorType.TRANSACTION, self._id)
        self._coordinator = self._client.retry(find)

    def _choose_partition(self, record: OutgoingMessage) -> TopicPartition:
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

    def _make_produce_request(self, batches: Iterable[Batch]) -> ProduceRequest:
        """Return the request that writes batches."""
        entry = ProduceRequest.TopicProduceData
        topics = defaultdict(list)
        for tp, records, _ in batches:
            topics[tp.topic].append(entry.PartitionProduceData(index=tp.partition, records=records))
        return ProduceRequest(
            transactional_id=self._id,
            acks=-1,
            timeout_ms=int(1000 * self._patience),
            topic_data=[entry(name=name, partition_data=partitions) for name, partitions in topics.items()],
            min_version=3,
            max_version=11,  # later versions add partitions to the transaction implicitly
        )

    def _find_leader(self, tp: TopicPartition) -> int:
        """Return the broker that leads a partition; wait while it has none."""

        def get_leader() -> int:
            leader = self._cluster.leader_for_partition(tp)
            if leader is None or leader < 0:
                raise errors.LeaderNotAvailableError()
            return int(leader)

        return self._client.retry(get_leader, between=self._client.refresh_metadata)

    def _find_group_coordinator(self, group: str) -> Any:
        """Return the broker that coordinates a consumer group."""
        if group not in self._groups:
            self._groups[group] = self._client.retry(
                partial(self._client.find_coordinator, CoordinatorType.GROUP, group)
            )
        return self._groups[group]


def _get_error_code(response: Any) -> int:
    """Return the error code of a response."""
    return int(response.error_code)


def _get_partition_error_code(response: Any) -> int:
    """Return the error code that explains why partitions were not added to the transaction, or 0.

    If one partition is refused, the broker does not attempt the others; their code says nothing about the reason.
    """
    codes = {p.partition_error_code for t in response.results_by_topic_v3_and_below for p in t.results_by_partition}
    codes.discard(0)
    return int(min(codes, key=lambda code: code == errors.OperationNotAttemptedError.errno, default=0))
