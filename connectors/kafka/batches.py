"""Messages as they are sent: record batches of one partition, and which of them go together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kafka.codec import has_lz4
from kafka.record.default_records import DefaultRecordBatchBuilder
from kafka.record.memory_records import MemoryRecordsBuilder
from kafka.structs import TopicPartition

BATCH_BYTES = 131_072
"""Messages that go to one partition together; a larger one goes by itself."""

REQUEST_BYTES = 1_048_576
"""Batches that go to one broker together."""

SEQUENCES = 2**31
MAGIC = 2


Header = tuple[str, bytes]


class OutgoingMessage(NamedTuple):
    """A message on its way. source: the partition of events that it comes from. partition: of `topic`, None is by key,
    as every Kafka client has it (murmur2)."""

    source: int
    topic: str
    key: bytes | None
    value: bytes | None
    headers: list[Header]
    partition: int | None = None


def estimate_size(message: OutgoingMessage) -> int:
    """An upper bound of what the message takes in the topic's log, by the client's own estimate."""
    return int(DefaultRecordBatchBuilder.estimate_size_in_bytes(message.key, message.value, message.headers))


class Batch(NamedTuple):
    """Records of one partition as they are sent. places: where they stand among the records of the commit."""

    topic_partition: TopicPartition
    records: bytearray
    message_indexes: list[int]


class BatchBuilder:
    """Makes batches of one producer, each record of a partition with the number that is next there: by these the broker
    knows what it has. limits: topic → largest batch in bytes. Compresses with lz4 where that package is installed."""

    def __init__(self, producer: int, epoch: int, limits: Mapping[str, int]) -> None:
        self._producer, self._epoch, self._limits = producer, epoch, limits
        self._compression = DefaultRecordBatchBuilder.CODEC_LZ4 if has_lz4() else DefaultRecordBatchBuilder.CODEC_NONE
        self._next: dict[TopicPartition, int] = defaultdict(int)

    def build(
        self, records: Sequence[OutgoingMessage], partition_of: Callable[[OutgoingMessage], TopicPartition]
    ) -> list[Batch]:
        """All of the records, each partition's in their order."""
        places: dict[TopicPartition, list[int]] = defaultdict(list)
        for i, record in enumerate(records):
            places[partition_of(record)].append(i)
        return [batch for to, of_one in places.items() for batch in self._build_for_partition(to, records, of_one)]

    def _build_for_partition(
        self, to: TopicPartition, records: Sequence[OutgoingMessage], places: Sequence[int]
    ) -> Iterator[Batch]:
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
    """Which batches are sent together: for each turn, broker → numbers of batches. A request has one batch of a
    partition at most, for so the protocol has it, and `REQUEST_BYTES`; a partition's batches keep their order."""
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
    """Offsets of the records in their order, from the first offset of each batch."""
    found = {
        at: base + i for batch, base in zip(batches, first, strict=True) for i, at in enumerate(batch.message_indexes)
    }
    return [found[at] for at in range(len(found))]
