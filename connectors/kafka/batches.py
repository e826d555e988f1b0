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
        source_partition: Partition of the events topic that caused the message. If it moves to another process before
            the message is committed, the message is dropped.
        topic: The topic to send to.
        key: The key, or None.
        value: The value, or None for a tombstone.
        headers: Pairs of name and value.
        partition: Partition of `topic`, or None to choose it by the key with murmur2, as all Kafka clients do.
    """

    source_partition: int
    topic: str
    key: bytes | None
    value: bytes | None
    headers: list[Header]
    partition: int | None = None


def estimate_size(message: OutgoingMessage) -> int:
    """Return an upper bound, by the client's own estimate, of the bytes that the message takes in the topic's log."""
    return int(DefaultRecordBatchBuilder.estimate_size_in_bytes(message.key, message.value, message.headers))


class Batch(NamedTuple):
    """Encoded records of one partition.

    Attributes:
        topic_partition: The partition they go to.
        records: The encoded record batch.
        message_indexes: The index of each record among the messages of the commit.
    """

    topic_partition: TopicPartition
    records: bytearray
    message_indexes: list[int]


class BatchBuilder:
    """Encodes messages of one producer into record batches with consecutive sequence numbers per partition.

    A broker recognises repeated batches by the sequence numbers. Batches are compressed with lz4 if that package is
    installed.

    Args:
        producer: The producer id that the broker has assigned.
        epoch: The producer epoch that the broker has assigned.
        limits: Largest batch in bytes, by topic.
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
            messages: The messages.
            choose_partition: Returns the partition of a message.
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
        """Yield the batches of one partition.

        Args:
            tp: The partition.
            messages: All messages of the commit.
            indexes: Indexes of the messages that go to this partition.
        """
        first = 0
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
                is_full = builder.append(None, message.key, message.value, message.headers) is None
                if is_full:
                    break
                end += 1
            builder.close()
            yield Batch(tp, builder.buffer(), list(indexes[first:end]))
            self._next_sequence[tp] = (self._next_sequence[tp] + end - first) % NUM_SEQUENCES
            first = end


def plan_requests(batches: Sequence[Batch], get_leader: Callable[[TopicPartition], int]) -> list[dict[int, list[int]]]:
    """Return which batches are sent together, as a list of rounds.

    The protocol allows one batch per partition in a request, and a request is at most `REQUEST_BYTES` long. Batches of
    one partition keep their order.

    Args:
        batches: The batches.
        get_leader: Returns the id of the broker that leads a partition.

    Returns:
        For each round, the indexes of batches by broker.
    """
    rounds: list[dict[int, list[int]]] = []
    bytes_by_round: list[dict[int, int]] = []
    next_round: dict[TopicPartition, int] = defaultdict(int)
    for i, batch in enumerate(batches):
        leader, size, round_index = (
            get_leader(batch.topic_partition),
            len(batch.records),
            next_round[batch.topic_partition],
        )
        while (
            round_index < len(rounds)
            and leader in rounds[round_index]
            and bytes_by_round[round_index][leader] + size > REQUEST_BYTES
        ):
            round_index += 1
        if round_index == len(rounds):
            rounds.append(defaultdict(list))
            bytes_by_round.append(defaultdict(int))
        rounds[round_index][leader].append(i)
        bytes_by_round[round_index][leader] += size
        next_round[batch.topic_partition] = round_index + 1
    return rounds


def list_offsets(batches: Sequence[Batch], base_offsets: Sequence[int]) -> list[int]:
    """Return the offset of each message, in the order of the messages.

    Args:
        batches: The batches that hold the messages.
        base_offsets: The offset of the first record of each batch.
    """
    offset_by_message: dict[int, int] = {}
    for batch, base_offset in zip(batches, base_offsets, strict=True):
        for i, message_index in enumerate(batch.message_indexes):
            offset_by_message[message_index] = base_offset + i
    return [offset_by_message[i] for i in range(len(offset_by_message))]
