"""Records of Kafka batches as columns, without an object per record.

Batches are read in chunks of at most `MAX_RECORDS` records. A record has the common form if it has no headers, and its
numbers need at most `MAX_LENGTH_BYTES` and `MAX_VARINT_BYTES` bytes. A chunk whose records all have the common form is
read by compiled code (`records.c`). Without compiled code, Python finds the bounds of the records one by one, and NumPy
decodes the rest for all records together. A chunk with any other record is parsed by kafka-python, record by record;
kafka-python also reports what is wrong with a damaged record. The format is described at
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
_START, _END, _TIME, _OFFSET, _KEY_START, _KEY_LENGTH, _VALUE_START, _VALUE_LENGTH = range(8)
"""Rows of the array in which the fields of N records are returned. Start and end are byte positions in the buffer; the
start is after the number that states the record's length. A length of -1 stands for a null key or value."""
NUM_FIELDS = 8
"""The number of these rows."""
PARSE_ERRORS = (errors.KafkaError, ValueError, struct.error)
"""Exceptions that the client's parser raises for damaged records."""


@dataclass(frozen=True, slots=True)
class MessageColumns:
    """N consecutive messages of one partition, as columns.

    Attributes:
        offsets: (N,) the offset of each message in its partition, ascending.
        times: (N,) the timestamp of each message in milliseconds since 1970. The sender or the broker has set it; any
            number is possible.
        sizes: (N,) the size of each message in bytes, key and headers included.
        keys: N message keys; None for a message without key.
        values: N message values; None for a tombstone, an `UnreadablePayload` for a message that could not be read.
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
        """Return the messages from index `start` (inclusive) to `stop` (exclusive)."""
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
        """Convert records that kafka-python has parsed; timestamps outside the range of int64 are clipped to it."""
        int64 = np.iinfo(np.int64)
        times = (min(max(record.timestamp, int64.min), int64.max) for record in records)
        num_records = len(records)
        return MessageColumns(
            np.fromiter((record.offset for record in records), np.int64, num_records),
            np.fromiter(times, np.int64, num_records),
            np.fromiter((record.size_in_bytes for record in records), np.int64, num_records),
            [record.key for record in records],
            [record.value for record in records],
        )


def read_batch(batch: DefaultRecordBatch) -> Iterator[MessageColumns]:
    """Yield all records of an uncompressed batch, in chunks of at most `MAX_RECORDS` records.

    Args:
        batch: A batch of kafka-python, uncompressed or decompressed already. Its reading position advances.

    Raises:
        Exception: One of `PARSE_ERRORS` if a record is damaged. The records before it are yielded first.
    """
    batch._buffer = bytes(batch._buffer)  # the compiled reader accepts only bytes, not a memoryview
    while (num_left := batch._num_records - batch._next_record_index) > 0:
        count = min(num_left, MAX_RECORDS)
        result = _read_common_form(batch, count)
        if result is None:
            yield from _parse_with_client(batch, count)
        else:
            # Advance the position from which kafka-python would continue.
            chunk, batch._pos = result
            batch._next_record_index += count
            yield chunk
    # After the last record, kafka-python checks the end of the batch: it raises an error if bytes are left over.
    next(batch, None)


def _parse_with_client(batch: DefaultRecordBatch, count: int) -> Iterator[MessageColumns]:
    """Parse the next records of a batch with kafka-python, one by one, and yield them as one chunk.

    Args:
        batch: The batch, whose reading position advances.
        count: Number of records to parse.

    Raises:
        Exception: One of `PARSE_ERRORS` if a record is damaged, after the records before it were yielded.
    """
    records: list[DefaultRecord] = []
    failure: Exception | None = None
    try:
        # If parsing raises, `extend` has already appended the records before the damaged one.
        records.extend(next(batch) for _ in range(count))
    except PARSE_ERRORS as error:
        failure = error
    if records:
        yield MessageColumns.from_records(records)
    if failure is not None:
        raise failure


@dataclass(frozen=True, slots=True)
class SmallBatches:
    """The records of several consecutive batches that were read together.

    Attributes:
        chunk: The records of all these batches.
        end_position: Byte position in the buffer after the last of these batches.
        next_offset: The offset that follows the last of these batches.
        leader_epoch: Leader epoch of the last of these batches, as its header states it.
    """

    chunk: MessageColumns
    end_position: int
    next_offset: int
    leader_epoch: int


def read_small_batches(buffer: bytes, position: int) -> SmallBatches | None:
    """Read consecutive small batches with one call of the compiled code.

    Reading them one by one would be slow, because even a small batch takes as long as a large one. At most
    `MAX_RECORDS` records are read.

    The reading ends before the first batch that is not supported. A batch is not supported if it is compressed, belongs
    to a transaction, has a wrong checksum, or has a record with headers or unusually large numbers.

    Args:
        buffer: Bytes that the broker has returned for one partition: batches one after another.
        position: Byte position of the first batch to read.

    Returns:
        The records of these batches. None if the first batch is not supported, or if there is no compiled code.
    """
    library = _load_library()
    if library is None:
        return None
    out = np.empty((NUM_FIELDS, MAX_RECORDS), np.int64)
    after = np.empty(3, np.int64)  # written by the library: end position, next offset, leader epoch
    limits = MAX_RECORDS, MAX_LENGTH_BYTES, MAX_VARINT_BYTES
    count = library.read_batches(buffer, len(buffer), position, *limits, out.ctypes.data, after.ctypes.data)
    if count == 0:
        return None
    fields = out[:, :count]
    # Unlike `_find_fields`, `read_batches` writes absolute offsets and times, because each batch has its own base.
    return SmallBatches(_make_columns(buffer, fields, fields[_OFFSET], fields[_TIME]), *after.tolist())


def _read_common_form(batch: DefaultRecordBatch, count: int) -> tuple[MessageColumns, int] | None:
    """Read the next records of a batch, if they all have the common form (no headers, no unusually large numbers).

    Args:
        batch: An uncompressed batch of kafka-python; its reading position stays.
        count: Number of records to read.

    Returns:
        The records and the byte position after them, or None if a record does not have the common form.
    """
    fields = np.empty((NUM_FIELDS, count), np.int64)
    if not _find_fields(batch._buffer, batch._pos, fields):
        return None
    if batch.timestamp_type == DefaultRecordBatch.LOG_APPEND_TIME:
        times = np.full(count, batch.max_timestamp)  # the broker has set one timestamp for the whole batch
    else:
        times = batch.first_timestamp + fields[_TIME]
    offsets = batch.base_offset + fields[_OFFSET]
    end_position = int(fields[_END, -1])
    return _make_columns(batch._buffer, fields, offsets, times), end_position


def _make_columns(buffer: bytes, fields: Ints, offsets: Ints, times: Ints) -> MessageColumns:
    """Build the columns of N records from their byte positions.

    Args:
        buffer: The bytes that hold the records.
        fields: (8, N) for each record: start, end, (time and offset, not used), start and length of the key, start and
            length of the value. Positions and lengths are in bytes.
        offsets: (N,) offsets of the records in their partition.
        times: (N,) timestamps in milliseconds since 1970.
    """
    return MessageColumns(
        offsets,
        times,
        fields[_END] - fields[_START],
        _slice_bytes(buffer, fields[_KEY_START], fields[_KEY_LENGTH]),
        _slice_bytes(buffer, fields[_VALUE_START], fields[_VALUE_LENGTH]),
    )


@cache
def _load_library(*extra_flags: str) -> ctypes.CDLL | None:
    """Return the library compiled from `records.c`, or None if it cannot be compiled.

    Args:
        *extra_flags: Further flags for the C compiler, used by tests.
    """
    consequence = "messages are read without compiled code, more slowly"  # logged if the library cannot be compiled
    library = build.build_library(Path(__file__).parent, consequence, *extra_flags)
    if library is not None:
        # Buffer, its length, start position, number of records; the two limits on the bytes of numbers; output array.
        library.read_records.argtypes = [ctypes.c_char_p, *[ctypes.c_int64] * 3, *[ctypes.c_int32] * 2, ctypes.c_void_p]
        library.read_batches.argtypes = [*library.read_records.argtypes, ctypes.c_void_p]
        library.read_batches.restype = ctypes.c_int64
    return library


def _find_fields(buffer: bytes, position: int, out: Ints) -> bool:
    """Find the fields of the next N records of a batch and write them into `out`.

    Args:
        buffer: The bytes of the batch.
        position: Byte position of the first record.
        out: (8, N) output. Its rows are: start and end of the record, time and offset relative to the batch's first
            record, start and length of the key, start and length of the value. The start of a record is after the
            number that states its length. A length of -1 stands for null. Times are in milliseconds.

    Returns:
        Whether all records have the common form (no headers, no unusually large numbers). If not, `out` is undefined.
    """
    num_records = out.shape[1]
    library = _load_library()
    if library is not None:
        limits = num_records, MAX_LENGTH_BYTES, MAX_VARINT_BYTES
        return bool(library.read_records(buffer, len(buffer), position, *limits, out.ctypes.data))
    bounds = _find_record_bounds(buffer, position, num_records)
    if bounds is None:
        return False
    out[_START], out[_END] = bounds
    data = np.frombuffer(buffer, np.uint8)
    try:
        # A record begins with one byte of attributes, which is unused; 128 and more is never written.
        is_common_form = data[out[_START]] < 128
        # Each field begins after the previous one. `positions` is where the next field of each record begins.
        out[_TIME], positions, is_short = _decode_varints(data, out[_START] + 1)
        is_common_form &= is_short
        out[_OFFSET], positions, is_short = _decode_varints(data, positions)
        is_common_form &= is_short
        for start_row, length_row in ((_KEY_START, _KEY_LENGTH), (_VALUE_START, _VALUE_LENGTH)):
            out[length_row], out[start_row], is_short = _decode_varints(data, positions)
            is_common_form &= is_short & (out[length_row] >= -1)
            positions = out[start_row] + np.maximum(out[length_row], 0)
        has_no_headers = data[positions] == 0  # the last field is the number of headers
        is_end_correct = positions + 1 == out[_END]
        return bool((is_common_form & has_no_headers & is_end_correct).all())
    except IndexError:
        return False


def _find_record_bounds(buffer: bytes, position: int, count: int) -> tuple[list[int], list[int]] | None:
    """Return the byte positions at which each of the next records starts and ends.

    A record is preceded by its length, a zigzag varint: 7 bits per byte, lowest first; the highest bit of a byte is set
    if another follows. The resulting number is twice the length, or odd if the length is negative.

    Args:
        buffer: The bytes of the batch.
        position: Byte position of the length of the first record.
        count: Number of records.

    Returns:
        `count` start positions (after the length) and `count` end positions. None if a length is negative, has more
        than `MAX_LENGTH_BYTES` bytes, or exceeds the buffer.
    """
    starts: list[int] = []
    ends: list[int] = []
    append_start, append_end = starts.append, ends.append
    try:
        for _ in range(count):
            double_length = buffer[position]
            position += 1
            # If the highest bit of a byte is set, it has added 128. The byte after it is worth 128 times as much, so
            # subtracting 1 from that byte corrects this.
            if double_length >= 128:
                second = buffer[position]
                double_length += (second - 1) << 7
                position += 1
                if second >= 128:
                    # There is a fourth byte even if the length has three, because the record follows.
                    third, fourth = buffer[position], buffer[position + 1]
                    double_length += (third - 1) << 14
                    position += 1
                    if third >= 128:
                        if fourth >= 128:  # the length has more than `MAX_LENGTH_BYTES` bytes
                            return None
                        double_length += (fourth - 1) << 21
                        position += 1
            if double_length & 1:  # the length is negative
                return None
            append_start(position)
            position += double_length >> 1
            append_end(position)
    except IndexError:
        return None
    return None if position > len(buffer) else (starts, ends)


def _decode_varints(data: NDArray[np.uint8], positions: Ints) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Decode one zigzag varint (variable-length integer) of each record, for all records together.

    A varint has 7 bits per byte, lowest first; the highest bit of a byte is set if another follows. Zigzag coding maps
    0, -1, 1, -2, ... to 0, 1, 2, 3, ...

    Args:
        data: The bytes of the batch.
        positions: (N,) byte positions at which the varints begin.

    Returns:
        Three arrays of shape (N,): the numbers, the byte positions after them, and whether each number is valid, which
        means that it has at most `MAX_VARINT_BYTES` bytes.

    Raises:
        IndexError: A number extends past the end of the batch.
    """
    current = data[positions].astype(np.int64)
    positions = positions + 1
    zigzag, has_more = current & 127, current >= 128
    for byte_index in range(1, MAX_VARINT_BYTES):
        if not has_more.any():
            break
        # For numbers that are complete, a zero byte is added and the position stays.
        current = np.where(has_more, data[positions], 0).astype(np.int64)
        positions = positions + has_more
        zigzag |= (current & 127) << 7 * byte_index
        has_more &= current >= 128
    numbers = (zigzag >> 1) ^ -(zigzag & 1)  # halve the code; if it was odd, invert all bits of the half
    return numbers, positions, ~has_more


def _slice_bytes(buffer: bytes, starts: Ints, lengths: Ints) -> list[bytes | None]:
    """Return the byte string at each of the given positions, or None where the length is negative."""
    spans = zip(starts.tolist(), lengths.tolist(), strict=True)
    return [buffer[start : start + length] if length >= 0 else None for start, length in spans]


def to_messages(topic: str, fetched: Mapping[TopicPartition, list[MessageColumns]]) -> Messages | None:
    """Concatenate the messages of one poll, partition by partition, into the form that the decoders accept.

    Args:
        topic: The topic of all messages.
        fetched: For each partition, its messages in chunks, in order.

    Returns:
        The messages, with timestamps in microseconds; a timestamp before 1970 or of 2⁵³ milliseconds or more counts as
        missing. None if there are no messages.
    """
    pairs = [(tp.partition, chunk) for tp, chunks in fetched.items() for chunk in chunks]
    if not pairs:
        return None
    millis = np.concatenate([chunk.times for _, chunk in pairs])
    is_plausible = (millis >= 0) & (millis < 2**53)  # senders may state any number; larger ones would overflow
    partitions, sizes = [partition for partition, _ in pairs], [len(chunk) for _, chunk in pairs]
    return Messages(
        topic=topic,
        keys=[key for _, chunk in pairs for key in chunk.keys],
        payloads=[value for _, chunk in pairs for value in chunk.values],
        times=np.where(is_plausible, millis * 1000, NO_TIME),
        partitions=np.repeat(np.array(partitions, np.int32), sizes),
        offsets=np.concatenate([chunk.offsets for _, chunk in pairs]),
    )
