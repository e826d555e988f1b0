"""Records of Kafka batches as columns, without an object per record.

Batches are read in chunks of at most `MAX_RECORDS` records. A chunk whose records all have the common form (no headers,
numbers of the usual size) is read by compiled code (`records.c`). Without compiled code only the bounds of the records
are found one by one, and the rest is decoded by NumPy for all records together. A chunk with any other record is parsed
by the client, record by record; the client also reports what is wrong with a damaged record. The format is described at
https://kafka.apache.org/documentation/#recordbatch.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import kafka.errors as errors
import numpy as np
from kafka import TopicPartition
from kafka.record.default_records import DefaultRecord, DefaultRecordBatch
from numpy.typing import NDArray

from deformer_stream.codec.payloads import Messages
from deformer_stream.engine.events import NO_TIME
from deformer_stream.kernels import build

Ints = NDArray[np.int64]

MAX_RECORDS = 1024
"""Largest number of records in a chunk: enough to amortise the cost per chunk, few enough to hold in memory twice."""
MAX_LENGTH_BYTES, MAX_VARINT_BYTES = 4, 5
"""Bytes of a record's length and of its other numbers in the common form; longer ones would mean more than 128 MiB, or
seven weeks of one batch."""
PARSE_ERRORS = (errors.KafkaError, ValueError, struct.error)
"""Exceptions that the client's parser raises for damaged records."""


@dataclass(frozen=True, slots=True)
class MessageColumns:
    """N consecutive messages of one partition, as columns.

    Attributes:
        offsets: (N,) offsets.
        times: (N,) milliseconds since 1970 as the sender or the broker states them; any number is possible.
        sizes: (N,) bytes, key and headers included.
        keys: N keys or None.
        values: N values or None.
    """

    offsets: Ints
    times: Ints
    sizes: Ints
    keys: list[bytes | None]
    values: list[bytes | None]

    def __len__(self) -> int:
        """Return the number of messages."""
        return len(self.values)

    def slice(self, start: int, stop: int) -> MessageColumns:
        """Return the messages from index `start` to before `stop`."""
        if start == 0 and stop >= len(self):
            return self
        selected = slice(start, stop)
        return MessageColumns(
            self.offsets[selected],
            self.times[selected],
            self.sizes[selected],
            self.keys[selected],
            self.values[selected],
        )

    @staticmethod
    def from_records(records: Sequence[DefaultRecord]) -> MessageColumns:
        """Convert records that the client's parser has made."""
        bound = np.iinfo(np.int64)
        times = (min(max(r.timestamp, bound.min), bound.max) for r in records)
        n = len(records)
        return MessageColumns(
            np.fromiter((r.offset for r in records), np.int64, n),
            np.fromiter(times, np.int64, n),
            np.fromiter((r.size_in_bytes for r in records), np.int64, n),
            [r.key for r in records],
            [r.value for r in records],
        )


def read_batch(batch: DefaultRecordBatch) -> Iterator[MessageColumns]:
    """Yield all records of an uncompressed batch in chunks.

    Raises:
        Exception: One of `PARSE_ERRORS`, after the records before the damaged one were yielded.
    """
    batch._buffer = bytes(batch._buffer)
    while (num_left := batch._num_records - batch._next_record_index) > 0:
        count = min(num_left, MAX_RECORDS)
        result = _read_common_form(batch, count)
        if result is None:
            yield from _parse_with_client(batch, count)
        else:
            chunk, batch._pos = result
            batch._next_record_index += count
            yield chunk
    next(batch, None)  # raises an error if bytes are left over


def _parse_with_client(batch: DefaultRecordBatch, count: int) -> Iterator[MessageColumns]:
    """Yield records parsed by the client; raise its error after those that could be parsed."""
    records: list[DefaultRecord] = []
    failure: Exception | None = None
    try:
        records.extend(next(batch) for _ in range(count))
    except PARSE_ERRORS as error:
        failure = error
    if records:
        yield MessageColumns.from_records(records)
    if failure is not None:
        raise failure


@dataclass(frozen=True, slots=True)
class SmallBatches:
    """The records of consecutive batches, as one chunk.

    Attributes:
        chunk: The records.
        end_position: Position in the buffer after the last batch.
        next_offset: Offset after the last batch.
        leader_epoch: Leader epoch of the last batch.
    """

    chunk: MessageColumns
    end_position: int
    next_offset: int
    leader_epoch: int


def read_small_batches(buffer: bytes, position: int) -> SmallBatches | None:
    """Read consecutive small batches in one call, because reading each by itself costs as much as a large batch.

    Only batches that are uncompressed, outside transactions, of the common form, and with a correct checksum are read.

    Args:
        buffer: The fetched bytes.
        position: Position of the first batch.

    Returns:
        The records, or None if the first batch does not qualify or there is no compiled code.
    """
    library = _load_library()
    if library is None:
        return None
    out, after = np.empty((8, MAX_RECORDS), np.int64), np.empty(3, np.int64)
    limits = MAX_RECORDS, MAX_LENGTH_BYTES, MAX_VARINT_BYTES
    count = library.read_batches(buffer, len(buffer), position, *limits, out.ctypes.data, after.ctypes.data)
    if count == 0:
        return None
    rows = out[:, :count]
    return SmallBatches(_make_columns(buffer, rows, rows[3], rows[2]), *after.tolist())


def _read_common_form(batch: DefaultRecordBatch, count: int) -> tuple[MessageColumns, int] | None:
    """Read the next records of a batch.

    Returns:
        The records and the position after them, or None if a record is not of the common form.
    """
    out = np.empty((8, count), np.int64)
    if not _read(batch._buffer, batch._pos, out):
        return None
    _, ends, millis, numbers, *_ = out
    if batch.timestamp_type == DefaultRecordBatch.LOG_APPEND_TIME:
        times = np.full(count, batch.max_timestamp)
    else:
        times = batch.first_timestamp + millis
    return _make_columns(batch._buffer, out, batch.base_offset + numbers, times), int(ends[-1])


def _make_columns(buffer: bytes, rows: Ints, offsets: Ints, times: Ints) -> MessageColumns:
    """Build the columns of N records.

    Args:
        buffer: The bytes of the batch.
        rows: (8, N) fields of the records, see `_read`.
        offsets: (N,) offsets.
        times: (N,) milliseconds since 1970.
    """
    starts, ends, _, _, key, key_size, value, value_size = rows
    return MessageColumns(
        offsets, times, ends - starts, _slice_bytes(buffer, key, key_size), _slice_bytes(buffer, value, value_size)
    )


@cache
def _load_library(*more: str) -> ctypes.CDLL | None:
    """Return the compiled reader, or None if it cannot be compiled.

    Args:
        *more: Further flags for the compiler.
    """
    library = build.build_library(Path(__file__).parent, "messages are read without compiled code, more slowly", *more)
    if library is not None:
        library.read_records.argtypes = [ctypes.c_char_p, *[ctypes.c_int64] * 3, *[ctypes.c_int32] * 2, ctypes.c_void_p]
        library.read_batches.argtypes = [*library.read_records.argtypes, ctypes.c_void_p]
        library.read_batches.restype = ctypes.c_int64
    return library


def _read(buffer: bytes, position: int, out: Ints) -> bool:
    """Find the fields of the next N records and write them into `out`.

    Args:
        buffer: The bytes of the batch.
        position: Position of the first record.
        out: (8, N) output. Its rows are: position after the record's length, end position, time and offset relative to
            the batch's first, position of the key, length of the key (-1 for none), position and length of the value.

    Returns:
        Whether all records are of the common form.
    """
    library = _load_library()
    if library is not None:
        limits = out.shape[1], MAX_LENGTH_BYTES, MAX_VARINT_BYTES
        return bool(library.read_records(buffer, len(buffer), position, *limits, out.ctypes.data))
    bounds = _find_record_bounds(buffer, position, out.shape[1])
    if bounds is None:
        return False
    out[:2] = bounds
    starts, ends = out[:2]
    data = np.frombuffer(buffer, np.uint8)
    try:
        is_common_form = data[starts] < 128  # the attributes of a record, which are one unused byte
        out[2], positions, is_short = _decode_varints(data, starts + 1)
        out[3], positions, is_time_short = _decode_varints(data, positions)
        is_common_form &= is_short & is_time_short
        for row in (4, 6):
            out[row + 1], out[row], is_short = _decode_varints(data, positions)
            is_common_form &= is_short & (out[row + 1] >= -1)
            positions = out[row] + np.maximum(out[row + 1], 0)
        return bool((is_common_form & (data[positions] == 0) & (positions + 1 == ends)).all())  # no headers
    except IndexError:
        return False


def _find_record_bounds(buffer: bytes, position: int, count: int) -> tuple[list[int], list[int]] | None:
    """Return the start (after the length) and the end of each of the next records.

    Args:
        buffer: The bytes of the batch.
        position: Position of the first record.
        count: Number of records.

    Returns:
        `count` start positions and `count` end positions, or None if a record is not of the common form.
    """
    starts: list[int] = []
    ends: list[int] = []
    append_start, append_end = starts.append, ends.append
    try:
        for _ in range(count):
            length = buffer[position]
            position += 1
            if length >= 128:
                second = buffer[position]
                length += (second - 1) << 7
                position += 1
                if second >= 128:
                    third, fourth = buffer[position], buffer[position + 1]
                    length += (third - 1) << 14
                    position += 1
                    if third >= 128:
                        if fourth >= 128:
                            return None
                        length += (fourth - 1) << 21
                        position += 1
            if length & 1:
                return None
            append_start(position)
            position += length >> 1
            append_end(position)
    except IndexError:
        return None
    return None if position > len(buffer) else (starts, ends)


def _decode_varints(data: NDArray[np.uint8], positions: Ints) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Decode one zigzag varint per record, for all records together.

    Args:
        data: The bytes of the batch.
        positions: (N,) positions of the numbers.

    Returns:
        (N,) numbers, (N,) positions after them, and (N,) whether each has at most `MAX_VARINT_BYTES` bytes.

    Raises:
        IndexError: A number extends past the end of the batch.
    """
    bytes_ = data[positions].astype(np.int64)
    positions = positions + 1
    numbers, has_more = bytes_ & 127, bytes_ >= 128
    for byte_index in range(1, MAX_VARINT_BYTES):
        if not has_more.any():
            break
        bytes_ = np.where(has_more, data[positions], 0).astype(np.int64)
        positions = positions + has_more
        numbers |= (bytes_ & 127) << 7 * byte_index
        has_more &= bytes_ >= 128
    return (numbers >> 1) ^ -(numbers & 1), positions, ~has_more


def _slice_bytes(buffer: bytes, starts: Ints, lengths: Ints) -> list[bytes | None]:
    """Return the byte strings at these positions; None for a negative length."""
    spans = zip(starts.tolist(), lengths.tolist(), strict=True)
    return [buffer[start : start + length] if length >= 0 else None for start, length in spans]


def to_messages(topic: str, fetched: Mapping[TopicPartition, list[MessageColumns]]) -> Messages | None:
    """Concatenate the records of a poll, partition by partition; return None if there are none."""
    pairs = [(tp.partition, chunk) for tp, chunks in fetched.items() for chunk in chunks]
    if not pairs:
        return None
    millis = np.concatenate([chunk.times for _, chunk in pairs])
    partitions, sizes = [partition for partition, _ in pairs], [len(chunk) for _, chunk in pairs]
    return Messages(
        topic=topic,
        keys=[key for _, chunk in pairs for key in chunk.keys],
        payloads=[value for _, chunk in pairs for value in chunk.values],
        times=np.where((millis < 0) | (millis >= 2**53), NO_TIME, millis * 1000),  # senders may state any number
        partitions=np.repeat(np.array(partitions, np.int32), sizes),
        offsets=np.concatenate([chunk.offsets for _, chunk in pairs]),
    )
