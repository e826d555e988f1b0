"""Fetching with bounded memory, in which no damaged batch can stop the stream.

Kafka bounds the compressed size of a batch; its content can be a thousand times larger (gzip), or ten thousand times
(zstd). kafka-python 3.0.12 decompresses a batch as a whole. If it cannot decode a batch, its `poll` raises once and
then
never returns. A header whose name is not UTF-8 is enough for that, and brokers accept it.

`limit_fetches` changes this for one consumer. If a batch, or the rest of it, cannot be delivered, one message takes its
place at its last offset, so that the position advances. The payload of this message is an `Unreadable`, which the codec
rejects.

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

_SNAPPY_BLOCKS = b"\x82SNAPPY\0"
_SNAPPY_HEAD = 16
_INFLATE = {
    DefaultRecordBatch.CODEC_GZIP: cramjam.gzip.decompress_into,
    DefaultRecordBatch.CODEC_LZ4: cramjam.lz4.decompress_into,
    DefaultRecordBatch.CODEC_ZSTD: cramjam.zstd.decompress_into,
}


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits on what a consumer accepts, in bytes.

    Attributes:
        batch: Size of a batch after decompression.
        message: Size of a message with its key and headers.
        poll: Size of everything that one poll returns, give or take one message.
    """

    batch: int = 64 * 2**20
    message: int = 2 * 2**20
    poll: int = 2 * 2**20

    @staticmethod
    def for_messages_of(message: int) -> FetchLimits:
        """Return limits for messages of at most `message` bytes, with their keys and headers."""
        least = FetchLimits()
        return FetchLimits(max(least.batch, 2 * message), max(least.message, 2 * message), max(least.poll, 2 * message))


def limit_fetches(consumer: KafkaConsumer, bounds: FetchLimits | None = None) -> None:
    """Make a consumer fetch with bounded memory and return `MessageColumns` from `poll`."""
    fetcher = consumer._fetcher
    fetcher.__class__ = _Fetcher
    fetcher.bounds = bounds or FetchLimits()
    fetcher.prefetched = None
    fetcher.memory = np.empty(
        fetcher.bounds.batch, np.uint8
    ).data  # the operating system allocates its pages when they are written


class _TooLarge(Exception):  # noqa: N818  (control flow)
    """The batch exceeds the limit when it is decompressed."""


class _Fetcher(Fetcher):  # type: ignore[misc]  # the client ships no types
    """The client's fetcher, with bounded memory.

    Attributes:
        bounds: The limits.
        memory: Buffer for decompressed batches.
        bytes_left: Bytes that the current poll may still return.
        prefetched: Done when the broker was asked for more, if `prefetch` was called since the last poll.
    """

    bounds: FetchLimits
    memory: memoryview
    bytes_left: int
    prefetched: Future | None

    def prefetch(self) -> None:
        """Request the available messages without waiting for them."""
        self.prefetched = self._net.call_soon_with_future(self._send_fetches_async)

    def fetch_records(self, max_records: int, update_offsets: bool = True, timeout_ms: float | None = None) -> Any:
        """Return fetched records, requesting more only when that is useful.

        The client requests more whenever it returns the last of its messages. The response then holds only messages
        that existed
        at that moment, and later ones wait for one more poll. Here only a poll that leaves messages behind requests
        ahead; other
        polls request when they begin, or earlier through `prefetch`.
        """
        asked, self.prefetched = self.prefetched, None
        if asked is not None:
            self._net.run(self._manager.wait_for, asked, None)
        records, partial = self.fetched_records(max_records, update_offsets=update_offsets)
        if records:
            if self._next_partition_records and not partial:
                self.send_fetches()
            return records, False
        waited = self._net.run(self._wait_for_first_response, timeout_ms)
        return self.fetched_records(max_records, update_offsets=update_offsets)[0], not waited

    async def _wait_for_first_response(self, timeout_ms: float | None) -> bool:
        """Request messages and wait for the first response of any broker; return False if there is no broker to wait
        for.

        All in one call, because each call into the client's thread costs as much as a response of the broker.
        """
        await self._send_fetches_async()
        awaited = [*self._fetch_futures, *([] if self._reset_task is None else [self._reset_task])]
        awaited = [future for future in awaited if not future.is_done]
        first = Future()
        for future in awaited:
            future.add_both(lambda _: None if first.is_done else first.success(None))
        if awaited:
            with suppress(errors.KafkaTimeoutError):
                await self._manager.wait_for(first, timeout_ms)
        return bool(awaited)

    def fetched_records(self, *args: Any, **kwargs: Any) -> Any:
        """Return fetched records of at most `bounds.poll` bytes."""
        self.bytes_left = self.bounds.poll
        return super().fetched_records(*args, **kwargs)

    def _append(self, drained: Any, part: Any, max_records: int, update_offsets: bool) -> int:
        """Append records to the result, and stop when the byte limit of the poll is reached."""
        taken = super()._append(drained, part, max_records, update_offsets)
        return int(taken) if self.bytes_left > 0 else max_records  # stop, as if enough records were returned

    def PartitionRecords(self, fetch_offset: int, tp: Any, records: Any, **kwargs: Any) -> Any:  # noqa: N802
        """Replace the client's inner class of this name."""
        return _PartitionRecords(self, fetch_offset, tp, _PartitionBatches(records, self), **kwargs)


class _PartitionRecords(Fetcher.PartitionRecords):  # type: ignore[misc]
    """Fetched records of one partition; what the client treats as one record is here a chunk of records."""

    def __init__(self, fetcher: _Fetcher, *args: Any, **kwargs: Any) -> None:
        self._fetcher = fetcher
        self._rest: MessageColumns | None = None
        super().__init__(*args, **kwargs)

    def take(self, n: int) -> _ColumnsAsList | tuple[()]:
        """Return at most `n` messages of one chunk, or nothing if none are left or the byte limit is reached."""
        if self._fetcher.bytes_left <= 0 or (run := self._rest or self._next_run()) is None:
            return ()
        weights = np.cumsum(run.sizes + MESSAGE_OVERHEAD)
        count = min(n, len(run), int(np.searchsorted(weights, self._fetcher.bytes_left)) + 1)
        self._fetcher.bytes_left -= int(weights[count - 1])
        self._rest = run.slice(count, len(run)) if count < len(run) else None
        taken = run.slice(0, count)
        self.next_fetch_offset = int(taken.offsets[-1]) + 1
        return _ColumnsAsList(taken)

    def _next_run(self) -> MessageColumns | None:
        """Return the next chunk from the fetch offset on, or None at the end."""
        try:
            record = next(self.record_iterator, None)
        except errors.KafkaError:
            self.drain()  # otherwise the client would call an exhausted iterator forever
            raise
        if record is None:
            return None
        run = (
            record.value
            if isinstance(record.value, MessageColumns)
            else MessageColumns.from_records([_convert_legacy_record(record)])
        )
        return run.slice(int(np.argmax(run.offsets >= self.fetch_offset)), len(run))

    def drain(self) -> None:
        self._rest = None
        super().drain()


class _ColumnsAsList:
    """A chunk in place of the list of messages that the client expects: its length counts messages, iteration yields
    the chunk.
    """

    def __init__(self, run: MessageColumns) -> None:
        self._run = run

    def __len__(self) -> int:
        return len(self._run)

    def __iter__(self) -> Iterator[MessageColumns]:
        return iter((self._run,))


class _PartitionBatches:
    """The batches of a fetched partition, with the interface of the client's class; consecutive small ones are read
    together.
    """

    def __init__(self, records: MemoryRecords, fetcher: _Fetcher) -> None:
        self._records, self._fetcher = records, fetcher

    def next_batch(self) -> Any:
        records = self._records
        if not records.has_next():
            return None
        found = read_small_batches(records._buffer, records._pos - len(records._next_slice))
        if found is not None:
            records._pos = found.place
            records._cache_next()
            return _SmallBatchesAdapter(found, self._fetcher)
        batch = records.next_batch()
        # Batches of older format versions hold one message each: brokers convert them since Kafka 3.0.
        return batch if batch.magic < 2 else _BoundedBatch(batch, self._fetcher)


class _SmallBatchesAdapter:
    """Several small batches with the interface of one batch of the client. Their checksums were verified."""

    is_control_batch = False
    magic = 2

    def __init__(self, found: SmallBatches, fetcher: _Fetcher) -> None:
        self._run, self._fetcher = found.run, fetcher
        self.next_offset, self.leader_epoch = found.next_offset, found.leader_epoch

    def validate_crc(self) -> bool:
        return True

    def has_producer_id(self) -> bool:
        return False  # only relevant in a transaction

    def __iter__(self) -> Iterator[DefaultRecord]:
        yield _wrap_as_record(_refuse_large_messages(self._run, self._fetcher.bounds.message))


class _BoundedBatch:
    """A batch that can always be iterated; all other attributes are those of the client's batch."""

    def __init__(self, batch: DefaultRecordBatch, fetcher: _Fetcher) -> None:
        self._batch, self._fetcher = batch, fetcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def __next__(self) -> Any:
        return next(self._batch)  # for control batches, which the broker writes

    def __iter__(self) -> Iterator[DefaultRecord]:
        batch = self._batch
        given, last = 0, batch.base_offset - 1
        try:
            _inflate(batch, self._fetcher.memory)
            for run in read_batch(batch):
                given, last = given + len(run), int(run.offsets[-1])
                yield _wrap_as_record(_refuse_large_messages(run, self._fetcher.bounds.message))
        except _TooLarge:
            limit = self._fetcher.bounds.batch
            detail = f"the batch of {batch.size_in_bytes} compressed bytes exceeds {limit} bytes uncompressed"
            yield self._placeholder_for_rest(given, last, RejectionReason.TOO_LARGE, detail)
        except (*PARSE_ERRORS, cramjam.DecompressionError) as error:
            if last < batch.last_offset:
                detail = f"the batch cannot be decoded ({repr(f'{type(error).__name__}: {error}')[1:120]})"
                yield self._placeholder_for_rest(given, last, RejectionReason.NOT_JSON, detail)

    def _placeholder_for_rest(self, given: int, last: int, reason: RejectionReason, detail: str) -> DefaultRecord:
        """Return one message that stands for the messages of the batch that could not be read.

        Args:
            given: Number of messages that were read.
            last: Offset of the last message that was read.
            reason: Why the rest is refused.
            detail: The reason in words.
        """
        batch = self._batch
        count = max(1, batch.records_count - given)
        where = f"{count} messages, offsets {last + 1} to {batch.last_offset}"
        payload = UnreadablePayload(reason, f"{where}: {detail}", count)
        return _wrap_as_record(
            MessageColumns.from_records(
                [DefaultRecord(0, batch.last_offset, batch.max_timestamp, 0, None, payload, [])]
            )
        )


def _refuse_large_messages(run: MessageColumns, most: int) -> MessageColumns:
    """Replace messages of more than `most` bytes by `Unreadable`."""
    for i in np.flatnonzero(run.sizes > most).tolist():
        detail = f"{run.sizes[i]} bytes with key and headers, more than the limit of {most}"
        run.keys[i], run.values[i], run.sizes[i] = None, UnreadablePayload(RejectionReason.TOO_LARGE, detail), 0
    return run


def _wrap_as_record(run: MessageColumns) -> DefaultRecord:
    """Wrap a chunk as a record object, which the client's classes pass through."""
    return DefaultRecord(int(run.sizes.sum()), int(run.offsets[-1]), 0, 0, None, run, [])


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
    if bytes(data[: len(_SNAPPY_BLOCKS)]) != _SNAPPY_BLOCKS:
        return int(cramjam.snappy.decompress_raw_into(data, memory))
    at, size = _SNAPPY_HEAD, 0
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        block = data[at + 4 : at + 4 + length]
        size += int(cramjam.snappy.decompress_raw_into(block, memory[size:]))
        at += 4 + length
    return size
