"""Record batches as they are unpacked: in bounded memory, and never the end of the stream.

Kafka bounds what a batch takes compressed; what it holds can be a thousand times that (gzip), or ten thousand (zstd).
kafka-python 3.0.12 inflates a batch whole, with packages that may be missing. When it cannot unpack one, its `poll`
raises once and then never returns; for that a header whose name is no UTF-8 will do, which no broker looks at.

`guard` changes that for one consumer. Where a batch, or the rest of it, cannot be handed over, one message stands for
it, at its last offset, so that the position moves on; its payload is an `Unreadable`, which the codec refuses.

A guarded consumer's `poll` returns runs (`runs.Run`), many messages each, in place of an object for every message: what
the client spends on those would be most of what a message costs.
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
"""Bytes that a message takes beside its own."""

_SNAPPY_BLOCKS = b"\x82SNAPPY\0"
_SNAPPY_HEAD = 16
_INFLATE = {
    DefaultRecordBatch.CODEC_GZIP: cramjam.gzip.decompress_into,
    DefaultRecordBatch.CODEC_LZ4: cramjam.lz4.decompress_into,
    DefaultRecordBatch.CODEC_ZSTD: cramjam.zstd.decompress_into,
}


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """What a consumer takes, in bytes. batch: of a batch, inflated. message: of one, with its key and headers. poll: of
    all that one poll returns, give or take a message."""

    batch: int = 64 * 2**20
    message: int = 2 * 2**20
    poll: int = 2 * 2**20

    @staticmethod
    def for_messages_of(message: int) -> FetchLimits:
        """Wide enough for messages of so many bytes, with their keys and headers."""
        least = FetchLimits()
        return FetchLimits(max(least.batch, 2 * message), max(least.message, 2 * message), max(least.poll, 2 * message))


def limit_fetches(consumer: KafkaConsumer, bounds: FetchLimits | None = None) -> None:
    """From now on the consumer unpacks in bounded memory, its `poll` returns runs, and what it cannot unpack comes as
    `Unreadable`."""
    fetcher = consumer._fetcher
    fetcher.__class__ = _Fetcher
    fetcher.bounds = bounds or FetchLimits()
    fetcher.asked = None
    fetcher.memory = np.empty(fetcher.bounds.batch, np.uint8).data  # pages are taken as they are written


class _TooLarge(Exception):  # noqa: N818  (control flow)
    """The batch inflates past the bound."""


class _Fetcher(Fetcher):  # type: ignore[misc]  # the client ships no types
    """bounds, memory: set by `guard`. room: bytes that this poll may still return. asked: done when the broker has been
    asked, where `ask` was called since the last poll."""

    bounds: FetchLimits
    memory: memoryview
    bytes_left: int
    prefetched: Future | None

    def prefetch(self) -> None:
        """Ask the broker for what there is, without waiting for anything: the next poll will want it soon."""
        self.prefetched = self._net.call_soon_with_future(self._send_fetches_async)

    def fetch_records(self, max_records: int, update_offsets: bool = True, timeout_ms: float | None = None) -> Any:
        """The client asks the broker ahead, whenever it hands out the last of what it has. The answer holds what was
        there by then, so all that came while those messages were dealt with would wait for the poll after the next:
        here only a poll that leaves messages behind asks ahead, the others ask when they begin, or were asked for."""
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
        """Ask, and wait for the first answer of any broker; false where there is none to be had. In one go, for each
        time the client's thread is asked for something costs as much as an answer of the broker."""
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
        self.bytes_left = self.bounds.poll
        return super().fetched_records(*args, **kwargs)

    def _append(self, drained: Any, part: Any, max_records: int, update_offsets: bool) -> int:
        taken = super()._append(drained, part, max_records, update_offsets)
        return int(taken) if self.bytes_left > 0 else max_records  # as if no more were wanted

    def PartitionRecords(self, fetch_offset: int, tp: Any, records: Any, **kwargs: Any) -> Any:  # noqa: N802
        """Stands in for the client's inner class of that name."""
        return _PartitionRecords(self, fetch_offset, tp, _PartitionBatches(records, self), **kwargs)


class _PartitionRecords(Fetcher.PartitionRecords):  # type: ignore[misc]
    """What the class above iterates over as a record is here a run, as its value."""

    def __init__(self, fetcher: _Fetcher, *args: Any, **kwargs: Any) -> None:
        self._fetcher = fetcher
        self._rest: MessageColumns | None = None
        super().__init__(*args, **kwargs)

    def take(self, n: int) -> _ColumnsAsList | tuple[()]:
        """At most `n` messages, of one run; none where nothing is left, or room."""
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
        try:
            record = next(self.record_iterator, None)
        except errors.KafkaError:
            self.drain()  # or the client would ask an iterator that has ended for ever
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
    """A run where the client expects a list of messages: it counts as many, and is put into its list as one."""

    def __init__(self, run: MessageColumns) -> None:
        self._run = run

    def __len__(self) -> int:
        return len(self._run)

    def __iter__(self) -> Iterator[MessageColumns]:
        return iter((self._run,))


class _PartitionBatches:
    """The batches of a fetched partition, as the client's own class for them has it; small ones several at a time."""

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
        # Only version 2 holds many messages here: brokers have converted older ones since Kafka 3.0.
        return batch if batch.magic < 2 else _BoundedBatch(batch, self._fetcher)


class _SmallBatchesAdapter:
    """Several batches as one, whose checksums are right."""

    is_control_batch = False
    magic = 2

    def __init__(self, found: SmallBatches, fetcher: _Fetcher) -> None:
        self._run, self._fetcher = found.run, fetcher
        self.next_offset, self.leader_epoch = found.next_offset, found.leader_epoch

    def validate_crc(self) -> bool:
        return True

    def has_producer_id(self) -> bool:
        return False  # that would matter in a transaction

    def __iter__(self) -> Iterator[DefaultRecord]:
        yield _wrap_as_record(_refuse_large_messages(self._run, self._fetcher.bounds.message))


class _BoundedBatch:
    """A batch that can always be iterated over; in all else it is the client's."""

    def __init__(self, batch: DefaultRecordBatch, fetcher: _Fetcher) -> None:
        self._batch, self._fetcher = batch, fetcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def __next__(self) -> Any:
        return next(self._batch)  # of control batches, which are the broker's own

    def __iter__(self) -> Iterator[DefaultRecord]:
        batch = self._batch
        given, last = 0, batch.base_offset - 1
        try:
            _inflate(batch, self._fetcher.memory)
            for run in read_batch(batch):
                given, last = given + len(run), int(run.offsets[-1])
                yield _wrap_as_record(_refuse_large_messages(run, self._fetcher.bounds.message))
        except _TooLarge:
            detail = f"compressed to {batch.size_in_bytes} bytes; at most {self._fetcher.bounds.batch} are accepted"
            yield self._placeholder_for_rest(given, last, RejectionReason.TOO_LARGE, detail)
        except (*PARSE_ERRORS, cramjam.DecompressionError) as error:
            if last < batch.last_offset:
                detail = f"cannot be read ({repr(f'{type(error).__name__}: {error}')[1:120]})"
                yield self._placeholder_for_rest(given, last, RejectionReason.NOT_JSON, detail)

    def _placeholder_for_rest(self, given: int, last: int, reason: RejectionReason, detail: str) -> DefaultRecord:
        """One message for all that has not come of the batch."""
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
    """The run, with `Unreadable` for the messages of more than so many bytes."""
    for i in np.flatnonzero(run.sizes > most).tolist():
        detail = f"{run.sizes[i]} bytes with key and headers; at most {most} are accepted"
        run.keys[i], run.values[i], run.sizes[i] = None, UnreadablePayload(RejectionReason.TOO_LARGE, detail), 0
    return run


def _wrap_as_record(run: MessageColumns) -> DefaultRecord:
    """A run as the record that the client's own class takes it for."""
    return DefaultRecord(int(run.sizes.sum()), int(run.offsets[-1]), 0, 0, None, run, [])


def _convert_legacy_record(record: Any) -> DefaultRecord:
    """A message of a batch of an older version."""
    size = max(0, record.serialized_key_size) + max(0, record.serialized_value_size)
    return DefaultRecord(size, record.offset, record.timestamp, 0, record.key, record.value, [])


def _inflate(batch: DefaultRecordBatch, memory: memoryview) -> None:
    """Let the batch be as if it had come uncompressed. Raises `_TooLarge` or what says that it cannot be read."""
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
            raise errors.UnsupportedCodecError(f"compression {codec} is unknown")
    except cramjam.DecompressionError as error:
        if "whole buffer" in str(error) or "smaller than required" in str(error):
            raise _TooLarge from None
        raise
    batch._buffer, batch._pos, batch._decompressed = bytes(memory[:size]), 0, True


def _inflate_snappy(data: memoryview, memory: memoryview) -> int:
    """One block, or, as Java clients write it, a head and several blocks, each after its length."""
    if bytes(data[: len(_SNAPPY_BLOCKS)]) != _SNAPPY_BLOCKS:
        return int(cramjam.snappy.decompress_raw_into(data, memory))
    at, size = _SNAPPY_HEAD, 0
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        block = data[at + 4 : at + 4 + length]
        size += int(cramjam.snappy.decompress_raw_into(block, memory[size:]))
        at += 4 + length
    return size
