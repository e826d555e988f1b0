"""Outgoing messages, packed into record batches per partition and into requests per broker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kafka.codec import has_lz4
from kafka.record.default_records import DefaultRecordBatchBuilder
from kafka.record.memory_records import MemoryRecordsBuilder
from kafka.structs import TopicPartition

BATCH_BYTES = 131_072
"""Largest batch in bytes; a message that is larger forms a batch of its own."""

REQUEST_BYTES = 1_048_576
"""Largest sum of batches in one request to a broker, in bytes."""

NUM_SEQUENCES = 2**31
"""Sequence numbers of a producer start again from 0 after this many."""
MAGIC = 2
"""Version of the record batch format."""


Header = tuple[str, bytes]


class OutgoingMessage(NamedTuple):
    """A message to be sent.

    Attributes:
        source_partition: Number of the consumed partition whose events caused the message. If that partition moves to
            another process before the message is committed, the message is dropped.
        topic: The topic to send to.
        key: The key, or None.
        value: The value, or None for a tombstone.
        headers: Pairs of name and value.
        partition: Number of the partition of `topic` to send to. None chooses it by a murmur2 hash of the key, as
            Kafka clients do by default.
    """

    source_partition: int
    topic: str
    key: bytes | None
    value: bytes | None
    headers: list[Header]
    partition: int | None = None


def estimate_size(message: OutgoingMessage) -> int:
    """Return an upper bound of the bytes that the message takes in the topic's log, as kafka-python estimates it."""
    return int(DefaultRecordBatchBuilder.estimate_size_in_bytes(message.key, message.value, message.headers))


class Batch(NamedTuple):
    """An encoded record batch, which holds messages for one partition.

    Attributes:
        topic_partition: The topic and partition to send the batch to.
        records: The encoded record batch.
        message_indexes: For each record of the batch, in order, the index of its message in the list of messages that
            was given to `BatchBuilder.build`.
    """

    topic_partition: TopicPartition
    records: bytearray
    message_indexes: list[int]


class BatchBuilder:
    """Encodes messages of one producer into record batches with consecutive sequence numbers per partition.

    A broker recognises a batch that is sent twice by its sequence numbers. Batches are compressed with lz4 if that
    package is installed.

    Args:
        producer: The producer id that the broker has assigned.
        epoch: The producer epoch that the broker has assigned.
        limits: For each topic, the size in bytes of the largest batch that it accepts.
    """

    def __init__(self, producer: int, epoch: int, limits: Mapping[str, int]) -> None:
        self._producer, self._epoch, self._limits = producer, epoch, limits
        self._compression = DefaultRecordBatchBuilder.CODEC_LZ4 if has_lz4() else DefaultRecordBatchBuilder.CODEC_NONE
        self._next_sequence: dict[TopicPartition, int] = defaultdict(int)

    def build(
        self, messages: Sequence[OutgoingMessage], choose_partition: Callable[[OutgoingMessage], TopicPartition]
    ) -> list[Batch]:
        """Return batches that hold all messages; messages of one partition keep their order.

        Args:
            messages: The messages to encode.
            choose_partition: A function that returns the topic and partition to which a message goes.
        """
        indexes_by_partition: dict[TopicPartition, list[int]] = defaultdict(list)
        for i, message in enumerate(messages):
            indexes_by_partition[choose_partition(message)].append(i)
        batches: list[Batch] = []
        for tp, indexes in indexes_by_partition.items():
            batches += self._build_for_partition(tp, messages, indexes)
        return batches

    def _build_for_partition(
        self, tp: TopicPartition, messages: Sequence[OutgoingMessage], indexes: Sequence[int]
    ) -> Iterator[Batch]:
        """Yield the batches of one partition, each as large as `BATCH_BYTES` and the limit of its topic allow.

        Args:
            tp: The topic and partition that the batches go to.
            messages: All messages, also those of other partitions.
            indexes: Indexes in `messages` of the messages that go to this partition, in order.
        """
        first = 0  # position in `indexes` of the first message of the next batch
        while first < len(indexes):
            builder = MemoryRecordsBuilder(
                MAGIC,
                self._compression,
                min(BATCH_BYTES, self._limits[tp.topic]),
                transactional=True,
                producer_id=self._producer,
                producer_epoch=self._epoch,
                base_sequence=self._next_sequence[tp],
            )
            end = first
            while end < len(indexes):
                message = messages[indexes[end]]
                # The timestamp None stands for the present time. The first message always fits, whatever its size.
                is_full = builder.append(None, message.key, message.value, message.headers) is None
                if is_full:
                    break
                end += 1
            builder.close()
            yield Batch(tp, builder.buffer(), list(indexes[first:end]))
            num_records = end - first
            # Each record takes one sequence number; after the largest one, they start again from 0.
            self._next_sequence[tp] = (self._next_sequence[tp] + num_records) % NUM_SEQUENCES
            first = end


def plan_requests(batches: Sequence[Batch], get_leader: Callable[[TopicPartition], int]) -> list[dict[int, list[int]]]:
    """Divide batches among produce requests that are sent in rounds: in each round at most one request per broker.

    The protocol allows one batch per partition in a request, so a partition's second batch goes into a later round than
    its first. A request with several batches holds at most `REQUEST_BYTES` bytes of them.

    Args:
        batches: The batches; those of one partition are sent in this order.
        get_leader: A function that returns the id of the broker that leads a partition.

    Returns:
        For each round, a mapping from the broker's id to the indexes in `batches` that its request contains.
    """
    rounds: list[dict[int, list[int]]] = []
    request_bytes: list[dict[int, int]] = []  # for each round, the size of the request by broker
    earliest_round: dict[TopicPartition, int] = defaultdict(int)  # the round after the partition's last batch
    for batch_index, batch in enumerate(batches):
        leader, size = get_leader(batch.topic_partition), len(batch.records)
        round_index = earliest_round[batch.topic_partition]
        # Skip rounds whose request to this broker would become too large.
        while (
            round_index < len(rounds)
            and leader in rounds[round_index]
            and request_bytes[round_index][leader] + size > REQUEST_BYTES
        ):
            round_index += 1
        if round_index == len(rounds):
            rounds.append(defaultdict(list))
            request_bytes.append(defaultdict(int))
        rounds[round_index][leader].append(batch_index)
        request_bytes[round_index][leader] += size
        earliest_round[batch.topic_partition] = round_index + 1
    return rounds


def list_offsets(batches: Sequence[Batch], base_offsets: Sequence[int]) -> list[int]:
    """Return the offset that each message got in its partition, in the order given to `BatchBuilder.build`.

    Args:
        batches: All batches that `BatchBuilder.build` made of the messages.
        base_offsets: For each batch, the offset that the broker assigned to its first record.
    """
    offset_by_message: dict[int, int] = {}
    for batch, base_offset in zip(batches, base_offsets, strict=True):
        for record_index, message_index in enumerate(batch.message_indexes):
            offset_by_message[message_index] = base_offset + record_index
    return [offset_by_message[i] for i in range(len(offset_by_message))]
