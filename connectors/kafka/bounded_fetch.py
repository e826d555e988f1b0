"""Fetching with bounded memory, in which no damaged batch can stop the stream.

Kafka bounds the compressed size of a batch; its content can be a thousand times larger (gzip), or ten thousand times
(zstd). kafka-python 3.0.12 decompresses a batch as a whole. If it cannot decode a batch, its `poll` raises once and
then never returns. A header whose name is not UTF-8 is enough for that, and brokers accept it.

`limit_fetches` changes this for one consumer. If a batch, or the rest of it, cannot be delivered, one message takes its
place at its last offset, so that the position advances. The payload of this message is an `UnreadablePayload`, which
the codec rejects.

The `poll` of such a consumer returns `MessageColumns`, many messages at once, instead of an object per message. These
objects would be most of the cost of a message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import cramjam
import kafka.errors as errors
import numpy as np
from kafka import KafkaConsumer
from kafka.consumer.fetcher import Fetcher
from kafka.future import Future
from kafka.record.default_records import DefaultRecord, DefaultRecordBatch
from kafka.record.memory_records import MemoryRecords

from connectors.kafka.record_columns import PARSE_ERRORS, MessageColumns, SmallBatches, read_batch, read_small_batches
from deformer_stream.codec.payloads import UnreadablePayload
from deformer_stream.engine.events import RejectionReason

MESSAGE_OVERHEAD = 100
"""Bytes that a message takes in memory beside its content."""

_SNAPPY_MAGIC = b"\x82SNAPPY\0"
_SNAPPY_HEADER_BYTES = 16
_INFLATE = {
    DefaultRecordBatch.CODEC_GZIP: cramjam.gzip.decompress_into,
    DefaultRecordBatch.CODEC_LZ4: cramjam.lz4.decompress_into,
    DefaultRecordBatch.CODEC_ZSTD: cramjam.zstd.decompress_into,
}


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits on what a consumer accepts, in bytes.

    Attributes:
        batch_bytes: Size of a batch after decompression.
        message_bytes: Size of a message with its key and headers.
        poll_bytes: Size of everything that one poll returns, give or take one message.
    """

    batch_bytes: int = 64 * 2**20
    message_bytes: int = 2 * 2**20
    poll_bytes: int = 2 * 2**20

    @staticmethod
    def for_messages_of(message: int) -> FetchLimits:
        """Return limits for messages of at most `message` bytes, with their keys and headers."""
        default = FetchLimits()
        return FetchLimits(
            max(default.batch_bytes, 2 * message),
            max(default.message_bytes, 2 * message),
            max(default.poll_bytes, 2 * message),
        )


def limit_fetches(consumer: KafkaConsumer, limits: FetchLimits | None = None) -> None:
    """Make a consumer fetch with bounded memory and return `MessageColumns` from `poll`."""
    fetcher = consumer._fetcher
    fetcher.__class__ = _Fetcher
    fetcher.limits = limits or FetchLimits()
    fetcher.prefetched = None
    # The operating system allocates the memory only when it is written.
    fetcher.memory = np.empty(fetcher.limits.batch_bytes, np.uint8).data


class _TooLarge(Exception):  # noqa: N818  (control flow)
    """The batch exceeds the limit when it is decompressed."""


class _Fetcher(Fetcher):  # type: ignore[misc]  # the client ships no types
    """The client's fetcher, with bounded memory.

    Attributes:
        limits: The limits.
        memory: Buffer for decompressed batches.
        bytes_left: Bytes that the current poll may still return.
        prefetched: A future that is done when the request of `prefetch` was sent, or None.
    """

    limits: FetchLimits
    memory: memoryview
    bytes_left: int
    prefetched: Future | None

    def prefetch(self) -> None:
        """Request the available messages without waiting for them."""
        self.prefetched = self._net.call_soon_with_future(self._send_fetches_async)

    def fetch_records(self, max_records: int, update_offsets: bool = True, timeout_ms: float | None = None) -> Any:
        """Return fetched records, requesting more only when that is useful.

        The client requests more whenever it returns the last of its messages. The response then holds only messages
        that existed at that moment, and later ones wait for one more poll. Here only a poll that leaves messages behind
        requests ahead; other polls request when they begin, or earlier through `prefetch`.
        """
        prefetched, self.prefetched = self.prefetched, None
        if prefetched is not None:
            self._net.run(self._manager.wait_for, prefetched, None)
        records, partial = self.fetched_records(max_records, update_offsets=update_offsets)
        if records:
            if self._next_partition_records and not partial:
                self.send_fetches()
            return records, False
        has_waited = self._net.run(self._wait_for_first_response, timeout_ms)
        return self.fetched_records(max_records, update_offsets=update_offsets)[0], not has_waited

    async def _wait_for_first_response(self, timeout_ms: float | None) -> bool:
        """Request messages and wait for the first response of any broker.

        Both happen in one call, because each call into the client's thread costs as much as a response of the broker.

        Args:
            timeout_ms: Maximum time to wait in milliseconds.

        Returns:
            False if there is no broker to wait for.
        """
        await self._send_fetches_async()
        pending = [*self._fetch_futures, *([] if self._reset_task is None else [self._reset_task])]
        pending = [future for future in pending if not future.is_done]
        first_response = Future()
        for future in pending:
            future.add_both(lambda _: None if first_response.is_done else first_response.success(None))
        if pending:
            with suppress(errors.KafkaTimeoutError):
                await self._manager.wait_for(first_response, timeout_ms)
        return bool(pending)

    def fetched_records(self, *args: Any, **kwargs: Any) -> Any:
        """Return fetched records of at most `limits.poll_bytes` bytes."""
        self.bytes_left = self.limits.poll_bytes
        return super().fetched_records(*args, **kwargs)

    def _append(self, drained: Any, part: Any, max_records: int, update_offsets: bool) -> int:
        """Append records to the result, and stop when the byte limit of the poll is reached."""
        num_appended = super()._append(drained, part, max_records, update_offsets)
        return int(num_appended) if self.bytes_left > 0 else max_records  # stop, as if enough records were returned

    def PartitionRecords(self, fetch_offset: int, tp: Any, records: Any, **kwargs: Any) -> Any:  # noqa: N802
        """Replace the client's inner class of this name."""
        return _PartitionRecords(self, fetch_offset, tp, _PartitionBatches(records, self), **kwargs)


class _PartitionRecords(Fetcher.PartitionRecords):  # type: ignore[misc]
    """Fetched records of one partition; what the client treats as one record is here a chunk of records."""

    def __init__(self, fetcher: _Fetcher, *args: Any, **kwargs: Any) -> None:
        self._fetcher = fetcher
        self._remaining: MessageColumns | None = None
        super().__init__(*args, **kwargs)

    def take(self, n: int) -> _ColumnsAsList | tuple[()]:
        """Return at most `n` messages of one chunk, or nothing if none are left or the byte limit is reached."""
        if self._fetcher.bytes_left <= 0 or (chunk := self._remaining or self._read_next_chunk()) is None:
            return ()
        weights = np.cumsum(chunk.sizes + MESSAGE_OVERHEAD)
        count = min(n, len(chunk), int(np.searchsorted(weights, self._fetcher.bytes_left)) + 1)
        self._fetcher.bytes_left -= int(weights[count - 1])
        self._remaining = chunk.slice(count, len(chunk)) if count < len(chunk) else None
        selected = chunk.slice(0, count)
        self.next_fetch_offset = int(selected.offsets[-1]) + 1
        return _ColumnsAsList(selected)

    def _read_next_chunk(self) -> MessageColumns | None:
        """Return the next chunk from the fetch offset on, or None at the end."""
        try:
            record = next(self.record_iterator, None)
        except errors.KafkaError:
            self.drain()  # otherwise the client would call an exhausted iterator forever
            raise
        if record is None:
            return None
        chunk = (
            record.value
            if isinstance(record.value, MessageColumns)
            else MessageColumns.from_records([_convert_legacy_record(record)])
        )
        return chunk.slice(int(np.argmax(chunk.offsets >= self.fetch_offset)), len(chunk))

    def drain(self) -> None:
        """Drop the remaining messages."""
        self._remaining = None
        super().drain()


class _ColumnsAsList:
    """A chunk in place of the list of messages that the client expects.

    Its length is the number of messages; iterating over it yields the chunk.
    """

    def __init__(self, chunk: MessageColumns) -> None:
        self._chunk = chunk

    def __len__(self) -> int:
        """Return the number of messages."""
        return len(self._chunk)

    def __iter__(self) -> Iterator[MessageColumns]:
        """Yield the chunk."""
        return iter((self._chunk,))


class _PartitionBatches:
    """The batches of a fetched partition, with the interface of the client's class.

    Consecutive small batches are read together.
    """

    def __init__(self, records: MemoryRecords, fetcher: _Fetcher) -> None:
        self._records, self._fetcher = records, fetcher

    def next_batch(self) -> Any:
        """Return the next batch, or None if there are no more."""
        records = self._records
        if not records.has_next():
            return None
        small_batches = read_small_batches(records._buffer, records._pos - len(records._next_slice))
        if small_batches is not None:
            records._pos = small_batches.end_position
            records._cache_next()
            return _SmallBatchesAdapter(small_batches, self._fetcher)
        batch = records.next_batch()
        # Batches of older format versions hold one message each: brokers convert them since Kafka 3.0.
        return batch if batch.magic < 2 else _BoundedBatch(batch, self._fetcher)


class _SmallBatchesAdapter:
    """Several small batches with the interface of one batch of the client. Their checksums were verified."""

    is_control_batch = False
    magic = 2

    def __init__(self, small_batches: SmallBatches, fetcher: _Fetcher) -> None:
        self._chunk, self._fetcher = small_batches.chunk, fetcher
        self.next_offset, self.leader_epoch = small_batches.next_offset, small_batches.leader_epoch

    def validate_crc(self) -> bool:
        """Return True, because the checksums were verified when the batches were read."""
        return True

    def has_producer_id(self) -> bool:
        """Return False; the client asks only to find aborted transactions, and these batches are in none."""
        return False

    def __iter__(self) -> Iterator[DefaultRecord]:
        """Yield all messages as one chunk, wrapped as a record."""
        yield _wrap_as_record(_refuse_large_messages(self._chunk, self._fetcher.limits.message_bytes))


class _BoundedBatch:
    """A batch that can always be iterated; all other attributes are those of the client's batch."""

    def __init__(self, batch: DefaultRecordBatch, fetcher: _Fetcher) -> None:
        self._batch, self._fetcher = batch, fetcher

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the client's batch."""
        return getattr(self._batch, name)

    def __next__(self) -> Any:
        """Return the next record. Only control batches, which brokers write, are read in this way."""
        return next(self._batch)  # for control batches, which the broker writes

    def __iter__(self) -> Iterator[DefaultRecord]:
        """Yield the messages in chunks, each wrapped as a record; a placeholder stands for messages that cannot be
        read.
        """
        batch = self._batch
        num_read, last_offset = 0, batch.base_offset - 1
        try:
            _inflate(batch, self._fetcher.memory)
            for chunk in read_batch(batch):
                num_read, last_offset = num_read + len(chunk), int(chunk.offsets[-1])
                yield _wrap_as_record(_refuse_large_messages(chunk, self._fetcher.limits.message_bytes))
        except _TooLarge:
            limit = self._fetcher.limits.batch_bytes
            detail = f"the batch of {batch.size_in_bytes} compressed bytes exceeds {limit} bytes uncompressed"
            yield self._placeholder_for_rest(num_read, last_offset, RejectionReason.TOO_LARGE, detail)
        except (*PARSE_ERRORS, cramjam.DecompressionError) as error:
            if last_offset < batch.last_offset:
                detail = f"the batch cannot be decoded ({repr(f'{type(error).__name__}: {error}')[1:120]})"
                yield self._placeholder_for_rest(num_read, last_offset, RejectionReason.NOT_JSON, detail)

    def _placeholder_for_rest(
        self, num_read: int, last_offset: int, reason: RejectionReason, detail: str
    ) -> DefaultRecord:
        """Return one message that stands for the messages of the batch that could not be read.

        Args:
            num_read: Number of messages that were read.
            last_offset: Offset of the last message that was read.
            reason: Why the rest is refused.
            detail: The reason in words.
        """
        batch = self._batch
        count = max(1, batch.records_count - num_read)
        where = f"{count} messages, offsets {last_offset + 1} to {batch.last_offset}"
        payload = UnreadablePayload(reason, f"{where}: {detail}", count)
        return _wrap_as_record(
            MessageColumns.from_records(
                [DefaultRecord(0, batch.last_offset, batch.max_timestamp, 0, None, payload, [])]
            )
        )


def _refuse_large_messages(chunk: MessageColumns, max_bytes: int) -> MessageColumns:
    """Replace messages of more than `max_bytes` bytes by an `UnreadablePayload`."""
    for i in np.flatnonzero(chunk.sizes > max_bytes).tolist():
        detail = f"{chunk.sizes[i]} bytes with key and headers, more than the limit of {max_bytes}"
        chunk.keys[i], chunk.values[i], chunk.sizes[i] = None, UnreadablePayload(RejectionReason.TOO_LARGE, detail), 0
    return chunk


def _wrap_as_record(chunk: MessageColumns) -> DefaultRecord:
    """Wrap a chunk as a record object, which the client's classes pass through."""
    return DefaultRecord(int(chunk.sizes.sum()), int(chunk.offsets[-1]), 0, 0, None, chunk, [])


def _convert_legacy_record(record: Any) -> DefaultRecord:
    """Convert a record of an older message format."""
    size = max(0, record.serialized_key_size) + max(0, record.serialized_value_size)
    return DefaultRecord(size, record.offset, record.timestamp, 0, record.key, record.value, [])


def _inflate(batch: DefaultRecordBatch, memory: memoryview) -> None:
    """Decompress a batch in place.

    Raises:
        _TooLarge: It exceeds the limit.
        Exception: It cannot be decompressed.
    """
    codec = batch.compression_type
    if codec == DefaultRecordBatch.CODEC_NONE:
        return
    data = memoryview(batch._buffer)[batch._pos :]
    try:
        if codec == DefaultRecordBatch.CODEC_SNAPPY:
            size = _inflate_snappy(data, memory)
        elif codec in _INFLATE:
            size = _INFLATE[codec](data, memory)
        else:
            raise errors.UnsupportedCodecError(f"unknown compression codec {codec}")
    except cramjam.DecompressionError as error:
        if "whole buffer" in str(error) or "smaller than required" in str(error):
            raise _TooLarge from None
        raise
    batch._buffer, batch._pos, batch._decompressed = bytes(memory[:size]), 0, True


def _inflate_snappy(data: memoryview, memory: memoryview) -> int:
    """Decompress Snappy data: one block, or the format of Java clients, a header and several length-prefixed blocks."""
    if bytes(data[: len(_SNAPPY_MAGIC)]) != _SNAPPY_MAGIC:
        return int(cramjam.snappy.decompress_raw_into(data, memory))
    position, size = _SNAPPY_HEADER_BYTES, 0
    while position < len(data):
        (length,) = struct.unpack_from(">I", data, position)
        block = data[position + 4 : position + 4 + length]
        size += int(cramjam.snappy.decompress_raw_into(block, memory[size:]))
        position += 4 + length
    return size
