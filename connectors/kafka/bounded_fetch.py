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
_DECOMPRESS_BY_CODEC = {
    DefaultRecordBatch.CODEC_GZIP: cramjam.gzip.decompress_into,
    DefaultRecordBatch.CODEC_LZ4: cramjam.lz4.decompress_into,
    DefaultRecordBatch.CODEC_ZSTD: cramjam.zstd.decompress_into,
}


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits on the sizes of what a consumer accepts, so that its memory stays bounded.

    Attributes:
        batch_bytes: Largest size of a batch after decompression, in bytes. A larger one is replaced by an
            unreadable message.
        message_bytes: Largest size of a message with its key and headers, in bytes. A larger one is replaced by an
            unreadable message.
        poll_bytes: Size in bytes of the messages that one poll returns. The last message of a poll may exceed it.
    """

    batch_bytes: int = 64 * 2**20
    message_bytes: int = 2 * 2**20
    poll_bytes: int = 2 * 2**20

    @staticmethod
    def for_messages_of(max_message_bytes: int) -> FetchLimits:
        """Return limits that admit messages of `max_message_bytes` bytes and their overhead.

        Each limit is at least its default value.
        """
        default = FetchLimits()
        needed_bytes = 2 * max_message_bytes  # twice the size, because keys, headers and the batch need bytes too
        return FetchLimits(
            max(default.batch_bytes, needed_bytes),
            max(default.message_bytes, needed_bytes),
            max(default.poll_bytes, needed_bytes),
        )


def limit_fetches(consumer: KafkaConsumer, limits: FetchLimits | None = None) -> None:
    """Make a consumer fetch with bounded memory, and make its `poll` return `MessageColumns`.

    `MessageColumns` holds many messages as columns. So `poll` returns a list of them for each partition, in place of a
    list of record objects.

    Args:
        consumer: A consumer of kafka-python that has not polled yet.
        limits: The largest sizes of batches, messages and polls, or None for the defaults.
    """
    fetcher = consumer._fetcher
    fetcher.__class__ = _Fetcher  # the consumer has created its fetcher already, with the class of kafka-python
    fetcher.limits = limits or FetchLimits()
    fetcher.prefetch_future = None
    # An unused buffer takes no memory: the operating system provides each page of it only at the first write.
    fetcher.decompression_buffer = np.empty(fetcher.limits.batch_bytes, np.uint8).data


class _TooLarge(Exception):  # noqa: N818  (control flow)
    """An error: a batch is larger than `FetchLimits.batch_bytes` when it is decompressed."""


class _Fetcher(Fetcher):  # type: ignore[misc]  # the client ships no types
    """kafka-python's fetcher, changed so that the memory for fetched messages is bounded.

    Attributes:
        limits: The largest sizes of batches, messages and polls.
        decompression_buffer: A buffer of `limits.batch_bytes` bytes, into which batches are decompressed one by one.
        bytes_left: Bytes of messages that the current poll may still return.
        prefetch_future: The future of the fetch request that `prefetch` started. It is done as soon as the request is
            sent, not when it is answered. None before `prefetch`, and again after the next poll has begun.
    """

    limits: FetchLimits
    decompression_buffer: memoryview
    bytes_left: int
    prefetch_future: Future | None

    def prefetch(self) -> None:
        """Request the messages that are available, without waiting for them; the next poll returns them."""
        self.prefetch_future = self._net.call_soon_with_future(self._send_fetches_async)

    def fetch_records(self, max_records: int, update_offsets: bool = True, timeout_ms: float | None = None) -> Any:
        """Return messages that were fetched, or request messages and wait for them. It overrides kafka-python's method.

        kafka-python's method sends a request as soon as it returns the last message that was fetched. The response
        then misses the messages that arrive a moment later. This method sends a request when no fetched messages are
        left, or earlier by `prefetch`. There is one exception: if a poll returns only a part of the last response,
        the next request is sent at once.

        Args:
            max_records: Maximum number of messages to return.
            update_offsets: Whether the consumer's positions advance.
            timeout_ms: Maximum time to wait in milliseconds, or None for no limit.

        Returns:
            A pair. The first element is the messages by partition. The second is whether there was no request to wait
            for; the caller should then sleep before it polls again.
        """
        prefetch_future, self.prefetch_future = self.prefetch_future, None
        if prefetch_future is not None:  # wait until that request is sent; this raises an error if sending failed
            self._net.run(self._manager.wait_for, prefetch_future, None)
        messages, has_unparsed_responses = self.fetched_records(max_records, update_offsets=update_offsets)
        if messages:
            has_messages_left = bool(self._next_partition_records)  # of a response that was parsed in part
            # The messages left are the last ones that were fetched. Further ones are requested now, so that they arrive
            # while the caller processes those it has.
            if has_messages_left and not has_unparsed_responses:
                self.send_fetches()
            return messages, False
        has_waited = self._net.run(self._request_and_wait, timeout_ms)
        messages, _ = self.fetched_records(max_records, update_offsets=update_offsets)
        return messages, not has_waited

    async def _request_and_wait(self, timeout_ms: float | None) -> bool:
        """Request messages from all brokers and wait for the first response.

        Both happen in one coroutine, because each call into the client's event loop takes as long as a response of the
        broker.

        Args:
            timeout_ms: Maximum time to wait in milliseconds, or None for no limit.

        Returns:
            Whether a request was awaited; False if none was under way.
        """
        await self._send_fetches_async()
        # The reset task looks up the start of partitions without a position; messages can be requested after it.
        tasks = [*self._fetch_futures, *([] if self._reset_task is None else [self._reset_task])]
        pending = [future for future in tasks if not future.is_done]
        first_response = Future()
        for future in pending:
            future.add_both(lambda _: None if first_response.is_done else first_response.success(None))
        if pending:
            with suppress(errors.KafkaTimeoutError):
                await self._manager.wait_for(first_response, timeout_ms)
        return bool(pending)

    def fetched_records(self, *args: Any, **kwargs: Any) -> Any:
        """Return messages that were fetched, at most `limits.poll_bytes` bytes of them. It requests nothing.

        The arguments are those of kafka-python's method: the largest number of messages, and whether the consumer's
        positions advance.

        Returns:
            A pair. The first element is the messages by partition. The second is whether there are responses left that
            were not parsed yet.
        """
        self.bytes_left = self.limits.poll_bytes
        return super().fetched_records(*args, **kwargs)

    def _append(self, drained: Any, part: Any, max_records: int, update_offsets: bool) -> int:
        """Append messages of one partition to the result of a poll.

        Args:
            drained: The result so far: messages by partition.
            part: The fetched messages of the partition.
            max_records: Maximum number of messages to append.
            update_offsets: Whether the consumer's position advances.

        Returns:
            The number of appended messages. If the poll's limit in bytes is reached, `max_records`, so that the calling
            loop ends as if it had enough messages.
        """
        num_appended = super()._append(drained, part, max_records, update_offsets)
        return int(num_appended) if self.bytes_left > 0 else max_records

    def PartitionRecords(self, fetch_offset: int, tp: Any, records: Any, **kwargs: Any) -> Any:  # noqa: N802
        """Create a `_PartitionRecords`. The method replaces kafka-python's inner class of this name.

        Args:
            fetch_offset: Offset of the first message that was requested.
            tp: The topic and partition.
            records: The fetched batches, a `MemoryRecords`.
            **kwargs: Further arguments of kafka-python's class.
        """
        return _PartitionRecords(self, fetch_offset, tp, _PartitionBatches(records, self), **kwargs)


class _PartitionRecords(Fetcher.PartitionRecords):  # type: ignore[misc]
    """The fetched messages of one partition that were not returned by a poll yet.

    kafka-python iterates over record objects. Here each record object holds a chunk: a `MessageColumns` with up to
    about a thousand messages.
    """

    def __init__(self, fetcher: _Fetcher, *args: Any, **kwargs: Any) -> None:
        self._fetcher = fetcher
        self._remaining: MessageColumns | None = None  # messages of the last chunk that were not returned yet
        super().__init__(*args, **kwargs)

    def take(self, n: int) -> _ColumnsAsList | tuple[()]:
        """Return the next messages: at most `n`, from one chunk, and within the poll's limit in bytes.

        Returns:
            The messages, or an empty tuple if none are left or the limit in bytes was reached before.
        """
        if self._fetcher.bytes_left <= 0:
            return ()
        chunk = self._remaining or self._read_next_chunk()  # first what the previous call has left of its chunk
        if chunk is None:
            return ()
        total_bytes = np.cumsum(chunk.sizes + MESSAGE_OVERHEAD)
        # The first message that reaches the limit is still returned, so that every poll makes progress.
        num_within_limit = int(np.searchsorted(total_bytes, self._fetcher.bytes_left)) + 1
        count = min(n, len(chunk), num_within_limit)
        self._fetcher.bytes_left -= int(total_bytes[count - 1])
        self._remaining = chunk.slice(count, len(chunk)) if count < len(chunk) else None
        selected = chunk.slice(0, count)
        self.next_fetch_offset = int(selected.offsets[-1]) + 1
        return _ColumnsAsList(selected)

    def _read_next_chunk(self) -> MessageColumns | None:
        """Return the next messages of the fetched batches, or None if none are left.

        A batch is fetched as a whole, so its messages before the requested offset are dropped.
        """
        try:
            record = next(self.record_iterator, None)
        except errors.KafkaError:
            self.drain()  # otherwise the client would call an exhausted iterator forever
            raise
        if record is None:
            return None
        if isinstance(record.value, MessageColumns):
            chunk = record.value
        else:  # a batch in an older message format holds single messages
            chunk = MessageColumns.from_records([_convert_legacy_record(record)])
        # `argmax` gives the index of the first true element. There is one, because kafka-python skips record objects
        # whose offset, which is that of the chunk's last message, is less than the requested offset.
        first = int(np.argmax(chunk.offsets >= self.fetch_offset))
        return chunk.slice(first, len(chunk))

    def drain(self) -> None:
        """Drop the remaining messages."""
        self._remaining = None
        super().drain()


class _ColumnsAsList:
    """An adapter of a `MessageColumns` to the list of messages that kafka-python expects.

    Its length is the number of messages, but iterating over it yields the `MessageColumns` once. So when kafka-python
    extends its list of messages with the adapter, the list gets one element.
    """

    def __init__(self, chunk: MessageColumns) -> None:
        self._chunk = chunk

    def __len__(self) -> int:
        """Return the number of messages."""
        return len(self._chunk)

    def __iter__(self) -> Iterator[MessageColumns]:
        """Yield one element, the `MessageColumns` that holds all messages."""
        return iter((self._chunk,))


class _PartitionBatches:
    """An iterator over the fetched batches of one partition, which reads consecutive small batches together.

    It has the interface of kafka-python's `MemoryRecords`.
    """

    def __init__(self, records: MemoryRecords, fetcher: _Fetcher) -> None:
        self._records, self._fetcher = records, fetcher

    def next_batch(self) -> Any:
        """Return the next batch, or several small batches as one, or None if there are no more."""
        records = self._records
        if not records.has_next():
            return None
        # `_pos` is the position after the next batch, which the client has sliced from the buffer already.
        next_position = records._pos - len(records._next_slice)
        small_batches = read_small_batches(records._buffer, next_position)
        if small_batches is not None:
            # Let the client continue after these batches.
            records._pos = small_batches.end_position
            records._cache_next()
            return _SmallBatchesAdapter(small_batches, self._fetcher)
        batch = records.next_batch()
        # A batch in a format before version 2 holds one message, because brokers since Kafka 3.0 convert it.
        return batch if batch.magic < 2 else _BoundedBatch(batch, self._fetcher)


class _SmallBatchesAdapter:
    """An adapter that presents several small batches to kafka-python as one batch.

    `read_small_batches` has read these batches together, which is faster than one by one.
    """

    is_control_batch = False
    magic = 2

    def __init__(self, small_batches: SmallBatches, fetcher: _Fetcher) -> None:
        self._chunk, self._fetcher = small_batches.chunk, fetcher
        self.next_offset, self.leader_epoch = small_batches.next_offset, small_batches.leader_epoch

    def validate_crc(self) -> bool:
        """Return True: the checksums were verified when the batches were read."""
        return True

    def has_producer_id(self) -> bool:
        """Return False, also for batches with a producer id, so that the client does not look for aborted transactions.

        Small batches are read only outside transactions, so none of their messages can be aborted.
        """
        return False

    def __iter__(self) -> Iterator[DefaultRecord]:
        """Yield one record object that holds all messages of the batches as `MessageColumns`."""
        yield _wrap_as_record(_replace_large_messages(self._chunk, self._fetcher.limits.message_bytes))


class _BoundedBatch:
    """A wrapper of kafka-python's batch, which limits the memory for reading it and raises no errors.

    Iterating over it yields an unreadable message in place of contents that are damaged or too large. All other
    attributes are those of the wrapped batch.
    """

    def __init__(self, batch: DefaultRecordBatch, fetcher: _Fetcher) -> None:
        self._batch, self._fetcher = batch, fetcher

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped batch."""
        return getattr(self._batch, name)

    def __next__(self) -> Any:
        """Return the next record of the wrapped batch; used for control batches only, which brokers write."""
        return next(self._batch)

    def __iter__(self) -> Iterator[DefaultRecord]:
        """Yield the messages in chunks: record objects whose value is a `MessageColumns` with several messages.

        If the batch, or the rest of it, cannot be read, the last chunk is one message with an `UnreadablePayload` that
        states the reason. So reading a damaged batch raises nothing, and the consumer continues after it.
        """
        batch = self._batch
        num_read, last_offset = 0, batch.base_offset - 1
        try:
            _decompress(batch, self._fetcher.decompression_buffer)
            for chunk in read_batch(batch):
                num_read, last_offset = num_read + len(chunk), int(chunk.offsets[-1])
                yield _wrap_as_record(_replace_large_messages(chunk, self._fetcher.limits.message_bytes))
        except _TooLarge:
            limit = self._fetcher.limits.batch_bytes
            detail = (
                f"the batch of {batch.size_in_bytes} compressed bytes is larger than the limit of {limit} bytes when "
                "decompressed"
            )
            yield self._create_placeholder(num_read, last_offset, RejectionReason.TOO_LARGE, detail)
        except (*PARSE_ERRORS, cramjam.DecompressionError) as error:
            is_incomplete = last_offset < batch.last_offset  # otherwise only bytes after the last message are damaged
            if is_incomplete:
                # `repr` escapes line breaks; the slice removes its quotation mark and bounds the length.
                reason_text = repr(f"{type(error).__name__}: {error}")[1:120]
                detail = f"the batch cannot be decoded ({reason_text})"
                # NOT_JSON is the category of everything that cannot be decoded, whatever its format.
                yield self._create_placeholder(num_read, last_offset, RejectionReason.NOT_JSON, detail)

    def _create_placeholder(
        self, num_read: int, last_offset: int, reason: RejectionReason, detail: str
    ) -> DefaultRecord:
        """Return one message that replaces all messages of the batch that could not be read.

        Its offset is the last offset of the batch, so that the consumer continues after the batch.

        Args:
            num_read: Number of messages of the batch that were read before the error.
            last_offset: Offset of the last message that was read.
            reason: The category of the error, which the decoder counts.
            detail: The error in words.

        Returns:
            A record object that wraps a `MessageColumns` with one message, whose value is an `UnreadablePayload`.
        """
        batch = self._batch
        num_unread = max(1, batch.records_count - num_read)  # the count in the header may be wrong
        affected = f"{num_unread} messages, offsets {last_offset + 1} to {batch.last_offset}"
        payload = UnreadablePayload(reason, f"{affected}: {detail}", num_unread)
        record = DefaultRecord(
            size_in_bytes=0,
            offset=batch.last_offset,
            timestamp=batch.max_timestamp,
            timestamp_type=0,
            key=None,
            value=payload,
            headers=[],
        )
        return _wrap_as_record(MessageColumns.from_records([record]))


def _replace_large_messages(chunk: MessageColumns, max_bytes: int) -> MessageColumns:
    """Replace each message of more than `max_bytes` bytes, in place, by one that the decoder rejects as too large.

    Returns:
        The same object, in which those messages have no key and an `UnreadablePayload` as value.
    """
    for i in np.flatnonzero(chunk.sizes > max_bytes).tolist():
        detail = f"{chunk.sizes[i]} bytes with key and headers, more than the limit of {max_bytes}"
        chunk.keys[i], chunk.values[i], chunk.sizes[i] = None, UnreadablePayload(RejectionReason.TOO_LARGE, detail), 0
    return chunk


def _wrap_as_record(chunk: MessageColumns) -> DefaultRecord:
    """Return one record object whose value is a chunk of many messages, so that kafka-python returns it unchanged.

    The size of the record object is the size of all messages together. Its offset is the offset of the last message.
    """
    return DefaultRecord(
        size_in_bytes=int(chunk.sizes.sum()),
        offset=int(chunk.offsets[-1]),
        timestamp=0,  # not used; the chunk holds the timestamps of its messages
        timestamp_type=0,
        key=None,
        value=chunk,
        headers=[],
    )


def _convert_legacy_record(record: Any) -> DefaultRecord:
    """Convert a record of a message format before version 2 to a record of the present format, without headers."""
    size = max(0, record.serialized_key_size) + max(0, record.serialized_value_size)  # -1 stands for null
    return DefaultRecord(size, record.offset, record.timestamp, 0, record.key, record.value, [])


def _decompress(batch: DefaultRecordBatch, buffer: memoryview) -> None:
    """Decompress a batch in place, with bounded memory.

    Args:
        batch: A batch of kafka-python, whose content is replaced by the decompressed content.
        buffer: A buffer for the decompressed content. Its size is the limit.

    Raises:
        _TooLarge: The decompressed content does not fit into the buffer.
        cramjam.DecompressionError: The compressed data are damaged.
        UnsupportedCodecError: The compression codec is unknown.
    """
    codec = batch.compression_type
    if codec == DefaultRecordBatch.CODEC_NONE:
        return
    compressed = memoryview(batch._buffer)[batch._pos :]
    try:
        if codec == DefaultRecordBatch.CODEC_SNAPPY:
            size = _decompress_snappy(compressed, buffer)
        elif codec in _DECOMPRESS_BY_CODEC:
            size = _DECOMPRESS_BY_CODEC[codec](compressed, buffer)
        else:
            # The text is short, because `_BoundedBatch.__iter__` reports only its beginning.
            raise errors.UnsupportedCodecError(
                f"the batch has the unknown compression codec {codec}: compress it with gzip, snappy, lz4 or zstd"
            )
    except cramjam.DecompressionError as error:
        # The library states only in words that the buffer is too small.
        if "whole buffer" in str(error) or "smaller than required" in str(error):
            raise _TooLarge from None
        raise
    # The client continues as if it had decompressed the batch itself.
    batch._buffer, batch._pos, batch._decompressed = bytes(buffer[:size]), 0, True


def _decompress_snappy(compressed: memoryview, buffer: memoryview) -> int:
    """Decompress Snappy data into a buffer and return the decompressed size in bytes.

    Two formats are possible: one raw Snappy block, or the format of Java clients. The latter begins with a header that
    starts with `_SNAPPY_MAGIC`. Blocks follow, each prefixed with its compressed length.
    """
    if bytes(compressed[: len(_SNAPPY_MAGIC)]) != _SNAPPY_MAGIC:
        return int(cramjam.snappy.decompress_raw_into(compressed, buffer))
    position, size = _SNAPPY_HEADER_BYTES, 0
    while position < len(compressed):
        (length,) = struct.unpack_from(">I", compressed, position)
        block = compressed[position + 4 : position + 4 + length]
        size += int(cramjam.snappy.decompress_raw_into(block, buffer[size:]))
        position += 4 + length
    return size
