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

SEQUENCES = 2**31
MAGIC = 2


Header = tuple[str, bytes]


class OutgoingMessage(NamedTuple):
    """A message to be sent.

    Attributes:
        source: Partition of the events topic that caused the message. If this partition moves to another process before
            the
            message is committed, the message is dropped.
        topic: The topic to send to.
        key: The key, or None.
        value: The value, or None for a tombstone.
        headers: Pairs of name and value.
        partition: Partition of `topic`, or None to choose it by the key with murmur2, as all Kafka clients do.
    """

    source: int
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
        self._next: dict[TopicPartition, int] = defaultdict(int)

    def build(
        self, records: Sequence[OutgoingMessage], partition_of: Callable[[OutgoingMessage], TopicPartition]
    ) -> list[Batch]:
        """Return batches that hold all messages; messages of one partition keep their order.

        Args:
            records: The messages.
            partition_of: Returns the partition of a message.
        """
        places: dict[TopicPartition, list[int]] = defaultdict(list)
        for i, record in enumerate(records):
            places[partition_of(record)].append(i)
        return [batch for to, of_one in places.items() for batch in self._build_for_partition(to, records, of_one)]

    def _build_for_partition(
        self, to: TopicPartition, records: Sequence[OutgoingMessage], places: Sequence[int]
    ) -> Iterator[Batch]:
        """Yield the batches of one partition.

        Args:
            to: The partition.
            records: All messages of the commit.
            places: Indexes of the messages that go to this partition.
        """
        first = 0
        while first < len(places):
            builder = MemoryRecordsBuilder(
                MAGIC,
                self._compression,
                min(BATCH_BYTES, self._limits[to.topic]),
                transactional=True,
                producer_id=self._producer,
                producer_epoch=self._epoch,
                base_sequence=self._next[to],
            )
            at = first
            while at < len(places):
                record = records[places[at]]
                if builder.append(None, record.key, record.value, record.headers) is None:
                    break  # it is full
                at += 1
            builder.close()
            yield Batch(to, builder.buffer(), list(places[first:at]))
            self._next[to] = (self._next[to] + at - first) % SEQUENCES
            first = at


def plan_requests(batches: Sequence[Batch], leader_of: Callable[[TopicPartition], int]) -> list[dict[int, list[int]]]:
    """Return which batches are sent together, as a list of rounds.

    The protocol allows one batch per partition in a request, and a request is at most `REQUEST_BYTES` long. Batches of
    one
    partition keep their order.

    Args:
        batches: The batches.
        leader_of: Returns the id of the broker that leads a partition.

    Returns:
        For each round, the indexes of batches by broker.
    """
    turns: list[dict[int, list[int]]] = []
    sizes: list[dict[int, int]] = []
    next_turn: dict[TopicPartition, int] = defaultdict(int)
    for i, batch in enumerate(batches):
        leader, size, turn = leader_of(batch.topic_partition), len(batch.records), next_turn[batch.topic_partition]
        while turn < len(turns) and leader in turns[turn] and sizes[turn][leader] + size > REQUEST_BYTES:
            turn += 1
        if turn == len(turns):
            turns.append(defaultdict(list))
            sizes.append(defaultdict(int))
        turns[turn][leader].append(i)
        sizes[turn][leader] += size
        next_turn[batch.topic_partition] = turn + 1
    return turns


def offsets_in_order(batches: Sequence[Batch], first: Sequence[int]) -> list[int]:
    """Return the offset of each message, in the order of the messages.

    Args:
        batches: The batches that hold the messages.
        first: The offset of the first record of each batch.
    """
    found = {
        at: base + i for batch, base in zip(batches, first, strict=True) for i, at in enumerate(batch.message_indexes)
    }
    return [found[at] for at in range(len(found))]
