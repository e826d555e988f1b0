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
    """A transactional producer, which writes messages and commits consumed offsets in one transaction after another.

    If a method raises, the transaction may be open, committed or aborted, and this object must not be used again. A new
    object with the same transactional id ends the open transaction. Only one thread at a time may call methods other
    than `close`. Methods raise kafka-python's exceptions, and KafkaTimeoutError after `call_timeout` seconds.

    Args:
        transactional_id: Identifies the producer to the broker. Of several processes with the same id, only the one
            that called `open` last may write.
        limits: For each topic that messages are sent to, the size in bytes of the largest batch that it accepts.
        transaction_timeout: Seconds after which the broker aborts a transaction that was not ended.
        call_timeout: Seconds that one call of a method may take.
        kafka_client: A function that creates kafka-python's network client (`KafkaNetClient`) from keyword arguments.
        bootstrap_timeout_ms: Milliseconds that the first connection may take.
        **options: Further keyword arguments for `kafka_client`, such as the brokers' addresses.
    """

    def __init__(
        self,
        transactional_id: str,
        limits: Mapping[str, int],
        transaction_timeout: float,
        call_timeout: float,
        kafka_client: Callable[..., Any],
        bootstrap_timeout_ms: int,
        **options: Any,
    ) -> None:
        self._id = transactional_id
        self._limits = limits  # for each topic, the size of the largest batch in bytes
        self._transaction_timeout, self._call_timeout = transaction_timeout, call_timeout  # seconds
        # `kafka_client` creates kafka-python's network client; `options` are its arguments, such as the addresses.
        self._client = BrokerClient(call_timeout, kafka_client, bootstrap_timeout_ms, **options)
        self._cluster, self._partitioner = self._client.cluster, DefaultPartitioner()
        self._producer, self._epoch = NO_PRODUCER, NO_PRODUCER  # assigned by the broker in `open`
        self._batch_builder = BatchBuilder(NO_PRODUCER, NO_PRODUCER, limits)
        self._coordinator: Any = None  # the broker that coordinates our transactions
        self._coordinator_by_group: dict[str, Any] = {}  # consumer group → the broker that coordinates it

    def open(self) -> None:
        """Request a producer id, so that this process is the only one that may write under the transactional id.

        Before the method returns, the broker aborts a transaction that an earlier producer with the same id left open.
        """
        self._client.run(self._open)

    def commit(
        self,
        messages: Sequence[OutgoingMessage],
        compute_offsets: Callable[[Callable[[], list[int]]], Offsets],
        group: ConsumerGroupMetadata,
    ) -> None:
        """Write messages and commit offsets of a consumer group in one transaction; return when it is committed.

        Args:
            messages: The messages to write.
            compute_offsets: A function that returns the consumed offsets to commit, with their metadata. Its argument
                is another function, which waits until the messages are written and returns the offsets that they got,
                in the order of `messages`. The metadata may state these offsets.
            group: The consumer group whose offsets are committed, with this member's id and generation.
        """
        self._client.run(lambda: self._commit(messages, compute_offsets, group))

    def close(self) -> None:
        """Close the connections; may be called from any thread.

        A method that another thread is executing then raises KafkaConnectionError.
        """
        self._client.close()

    # --- the steps of a commit ----------------------------------------------------------------------------------------

    def _commit(
        self,
        messages: Sequence[OutgoingMessage],
        compute_offsets: Callable[[Callable[[], list[int]]], Offsets],
        group: ConsumerGroupMetadata,
    ) -> None:
        """Send the requests of one transaction in the order that the protocol requires, see `commit`.

        `add_partitions_and_group`, `write` and `send_offsets` send requests and return a function that waits for the
        responses. So several requests are under way at the same time, and a commit waits for fewer responses in
        sequence.
        """
        batches = self._batch_builder.build(messages, self._choose_partition)
        wait_for_group = self.add_partitions_and_group({batch.topic_partition for batch in batches}, group.group_id)
        wait_for_base_offsets = self.write(batches)
        offsets = compute_offsets(lambda: list_offsets(batches, wait_for_base_offsets()))
        wait_for_group()  # the broker accepts offsets only of a group that was added to the transaction
        wait_for_offset_commit = self.send_offsets(offsets, group)
        wait_for_base_offsets()  # raises if a message was not written
        wait_for_offset_commit()
        self.end()

    def add_partitions_and_group(self, partitions: Iterable[TopicPartition], group_id: str) -> Callable[[], None]:
        """Begin a transaction: declare the partitions that it writes to and the group whose offsets it commits.

        The method returns when the broker has accepted the partitions, so that messages may be written to them.

        Args:
            partitions: The partitions that messages are written to; may be empty.
            group_id: The consumer group.

        Returns:
            A function that waits until the broker has accepted the group.
        """
        partitions_by_topic = defaultdict(list)
        for tp in sorted(partitions):
            partitions_by_topic[tp.topic].append(tp.partition)

        def add_partitions() -> Any:
            """Send the partitions to the coordinator of the transaction, and return the future of its response."""
            entry = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic
            return self._client.send(
                self._coordinator,
                AddPartitionsToTxnRequest(
                    v3_and_below_transactional_id=self._id,
                    v3_and_below_producer_id=self._producer,
                    v3_and_below_producer_epoch=self._epoch,
                    v3_and_below_topics=[
                        entry(name=name, partitions=numbers) for name, numbers in partitions_by_topic.items()
                    ],
                    # kafka-python would choose a later version; those are for requests between brokers.
                    max_version=3,
                ),
            )

        def add_group() -> Any:
            """Send the group to the coordinator of the transaction, and return the future of its response."""
            return self._client.send(
                self._coordinator,
                AddOffsetsToTxnRequest(**self._signature, group_id=group_id, max_version=4),
            )

        # Both requests are sent before the first response is awaited.
        partitions_future = add_partitions() if partitions_by_topic else None
        group_future = add_group()
        if partitions_future is not None:
            self._client.request_until_accepted(
                partitions_future, add_partitions, _get_partition_error_code, self._find_coordinator
            )
        return lambda: self._client.request_until_accepted(
            group_future, add_group, _get_error_code, self._find_coordinator
        )

    def write(self, batches: Sequence[Batch]) -> Callable[[], list[int]]:
        """Send batches to the leaders of their partitions; batches of one partition are sent in order.

        The method returns when the last requests are sent, before their responses have arrived.

        Args:
            batches: The encoded batches.

        Returns:
            A function that waits until all batches are written. It then returns the offset of the first record of each
            batch, in the order of `batches`.
        """
        base_offset_by_index: dict[int, int] = {}  # by index of the batch
        awaited_index_by_partition: dict[tuple[str, int], int] = {}  # (topic, partition) → batch without response
        pending_futures: list[Any] = []  # of the requests without response
        started_at = time.monotonic()

        def send_batches(leader: int, indexes: Sequence[int]) -> None:
            """Send the batches with these indexes to a broker in one request, and note that they await a response."""
            awaited_index_by_partition.update({tuple(batches[i].topic_partition): i for i in indexes})
            pending_futures.append(self._client.send(leader, self._make_produce_request(batches[i] for i in indexes)))

        def iterate_responses() -> Iterator[tuple[int, Any]]:
            """Wait for all requests, and yield the index of each batch with the response for its partition."""
            for future in pending_futures:
                for topic in self._client.wait_for(future).responses:
                    for response in topic.partition_responses:
                        yield awaited_index_by_partition.pop((topic.name, response.index)), response

        def wait_for_responses() -> None:
            """Wait until all batches that were sent are written; send a batch again if its partition has a new leader.

            Raises:
                KafkaError: The broker rejected a batch for another reason, or its response does not mention it.
            """
            while pending_futures:  # of requests without response
                rejected_indexes: list[int] = []
                for batch_index, response in iterate_responses():
                    if response.error_code in LEADER_MOVED:
                        rejected_indexes.append(batch_index)
                    else:
                        raise_for_code(response.error_code)
                        base_offset_by_index[batch_index] = int(response.base_offset)
                pending_futures.clear()
                if rejected_indexes:  # sending again is harmless: the broker recognises a batch by its sequence number
                    self._client.pause_since(started_at)
                    self._client.refresh_metadata()
                for batch_index in rejected_indexes:
                    send_batches(self._find_leader(batches[batch_index].topic_partition), [batch_index])
            # `iterate_responses` has removed each batch that a response mentions.
            if awaited_index_by_partition:
                raise errors.KafkaError(
                    "the Kafka broker did not acknowledge the messages to these partitions (topic, number): "
                    f"{sorted(awaited_index_by_partition)}: check the log of the broker"
                )

        def wait_for_base_offsets() -> list[int]:
            """Wait until all batches are written, and return the offset of the first record of each."""
            wait_for_responses()
            return [base_offset_by_index[i] for i in range(len(batches))]

        for indexes_by_leader in plan_requests(batches, self._find_leader):
            wait_for_responses()  # of the previous round, so that batches of one partition stay in order
            for leader, indexes in indexes_by_leader.items():
                send_batches(leader, indexes)
        return wait_for_base_offsets

    def send_offsets(self, offsets: Offsets, group: ConsumerGroupMetadata) -> Callable[[], None]:
        """Send a request to commit offsets of the consumer group as part of the transaction.

        Args:
            offsets: The offset to commit for each partition; if there are none, no request is sent.
            group: The consumer group, with this member's id and generation.

        Returns:
            A function that waits for the response. It raises CommitFailedError if this process is no longer a member of
            the group, or the group has rebalanced.
        """
        if not offsets:
            return lambda: None
        entry = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
        entries_by_topic = defaultdict(list)
        for tp, offset in offsets.items():
            entries_by_topic[tp.topic].append(
                entry.TxnOffsetCommitRequestPartition(
                    partition_index=tp.partition,
                    committed_offset=offset.offset,
                    committed_leader_epoch=offset.leader_epoch,
                    committed_metadata=offset.metadata,
                )
            )

        def send_request() -> Any:
            """Send the offsets to the coordinator of the group, and return the future of its response."""
            return self._client.send(
                self._find_group_coordinator(group.group_id),
                TxnOffsetCommitRequest(
                    **self._signature,
                    group_id=group.group_id,
                    generation_id=group.generation_id,
                    member_id=group.member_id,
                    group_instance_id=group.group_instance_id,
                    topics=[entry(name=name, partitions=entries) for name, entries in entries_by_topic.items()],
                    # From version 3 on, the broker checks that the process is a member of the group. From version 5 on,
                    # it also adds the group to the transaction, which `add_partitions_and_group` does here.
                    max_version=4,
                ),
            )

        def get_error_code(response: Any) -> int:
            """Return the error code of the first partition whose offset was not committed, or 0 if there is none."""
            code_by_partition = {
                (topic.name, partition.partition_index): int(partition.error_code)
                for topic in response.topics
                for partition in topic.partitions
            }
            return next((code_by_partition[tp] for tp in offsets if code_by_partition[tp]), 0)

        future = send_request()
        # Without the stored coordinator, `send_request` requests the new one.
        return lambda: self._client.request_until_accepted(
            future, send_request, get_error_code, lambda: self._coordinator_by_group.pop(group.group_id, None)
        )

    def end(self) -> None:
        """Request that the broker commits the open transaction, and wait until it has accepted the request."""

        def send_request() -> Any:
            """Send the request to the coordinator of the transaction, and return the future of its response."""
            # From version 5 on, the broker would change the producer's epoch after each transaction.
            return self._client.send(self._coordinator, EndTxnRequest(**self._signature, committed=True, max_version=4))

        self._client.request_until_accepted(send_request(), send_request, _get_error_code, self._find_coordinator)

    @property
    def _signature(self) -> dict[str, Any]:
        """The fields that identify the producer in the requests of a transaction."""
        return {"transactional_id": self._id, "producer_id": self._producer, "producer_epoch": self._epoch}

    # --- producer id, coordinators and leaders ------------------------------------------------------------------------

    def _open(self) -> None:
        """Request a producer id, see `open`, and begin again with sequence number 0 in every partition."""
        self._cluster.set_topics(self._limits)  # the topics whose partitions and leaders are requested
        response = self._client.retry(self._init_producer)
        self._producer, self._epoch = response.producer_id, response.producer_epoch
        self._batch_builder = BatchBuilder(self._producer, self._epoch, self._limits)

    def _init_producer(self) -> Any:
        """Request a producer id and epoch from the transaction coordinator, and return the response.

        From then on, the coordinator rejects requests of earlier producers with the same transactional id.
        """
        self._client.refresh_metadata()
        self._find_coordinator()
        request = InitProducerIdRequest(
            transactional_id=self._id,
            transaction_timeout_ms=int(1000 * self._transaction_timeout),
            producer_id=NO_PRODUCER,  # -1 in both fields requests new values
            producer_epoch=NO_PRODUCER,
            max_version=4,  # later versions add only error codes and two-phase commits, which are not used here
        )
        response = self._client.wait_for(self._client.send(self._coordinator, request))
        raise_for_code(response.error_code)
        return response

    def _find_coordinator(self) -> None:
        """Request which broker coordinates the transactions of this producer, and store its id."""
        find = partial(self._client.find_coordinator, CoordinatorType.TRANSACTION, self._id)
        self._coordinator = self._client.retry(find)

    def _choose_partition(self, message: OutgoingMessage) -> TopicPartition:
        """Return the topic and partition that a message goes to.

        It is the partition that the message states, or else the one that the hash of its key selects.

        Raises:
            TopicAuthorizationFailedError: This user may not write to the topic.
            UnknownTopicOrPartitionError: The topic does not exist.
        """
        topic, key, value = message.topic, message.key, message.value
        if topic in self._cluster.unauthorized_topics:
            raise errors.TopicAuthorizationFailedError()
        if not self._cluster.partitions_for_topic(topic):
            raise errors.UnknownTopicOrPartitionError()
        if message.partition is not None:
            return TopicPartition(topic, message.partition)
        # The partitioner takes key and value twice, before and after serialisation; here both are bytes already.
        return TopicPartition(topic, self._partitioner.partition(topic, key, key, value, value, self._cluster))

    def _make_produce_request(self, batches: Iterable[Batch]) -> ProduceRequest:
        """Return the request that writes batches, at most one per partition."""
        entry = ProduceRequest.TopicProduceData
        entries_by_topic = defaultdict(list)
        for tp, records, _ in batches:
            entries_by_topic[tp.topic].append(entry.PartitionProduceData(index=tp.partition, records=records))
        return ProduceRequest(
            transactional_id=self._id,
            acks=-1,  # acknowledged by all in-sync replicas
            timeout_ms=int(1000 * self._call_timeout),
            topic_data=[entry(name=name, partition_data=entries) for name, entries in entries_by_topic.items()],
            min_version=3,  # the first version that supports transactions
            max_version=11,  # later versions add partitions to the transaction implicitly
        )

    def _find_leader(self, tp: TopicPartition) -> int:
        """Return the id of the broker that leads a partition.

        If no leader is known, the metadata is requested again until there is one.
        """

        def get_leader() -> int:
            """Return the leader according to the stored metadata."""
            leader = self._cluster.leader_for_partition(tp)
            if leader is None or leader < 0:
                raise errors.LeaderNotAvailableError()
            return int(leader)

        return self._client.retry(get_leader, between=self._client.refresh_metadata)

    def _find_group_coordinator(self, group: str) -> Any:
        """Return the id of the broker that coordinates a consumer group; request it only if it is not known yet."""
        if group not in self._coordinator_by_group:
            find = partial(self._client.find_coordinator, CoordinatorType.GROUP, group)
            self._coordinator_by_group[group] = self._client.retry(find)
        return self._coordinator_by_group[group]


def _get_error_code(response: Any) -> int:
    """Return the error code of a response."""
    return int(response.error_code)


def _get_partition_error_code(response: Any) -> int:
    """Return the error code that explains why partitions were not added to the transaction, or 0 for success.

    If the broker refuses one partition, all others get the code OperationNotAttempted. That code is returned only if
    there is no other.
    """
    codes = {
        partition.partition_error_code
        for topic in response.results_by_topic_v3_and_below
        for partition in topic.results_by_partition
    }
    codes.discard(0)
    # Because False sorts before True, `min` returns OperationNotAttempted only if there is no other code.
    return int(min(codes, key=lambda code: code == errors.OperationNotAttemptedError.errno, default=0))
