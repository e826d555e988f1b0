"""Tests that records are read as the client's own parser reads them, also if they are damaged."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator
from typing import Any

import crc32c
import kafka.errors as errors
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch

from connectors.kafka import record_columns
from connectors.kafka.record_columns import MessageColumns, read_batch, read_small_batches
from tests.connectors.raw_batches import encode_batch, encode_record, encode_varint

text = st.one_of(st.none(), st.binary(max_size=20), st.integers(60, 70).map(bytes), st.integers(8185, 8200).map(bytes))
headers = st.lists(st.tuples(st.sampled_from([b"h", b"", "é".encode(), b"\xff"]), st.binary(max_size=5)), max_size=2)
plain = st.tuples(text, text, st.just([]))
Row = tuple[Any, ...]


def parse_with_client(data: bytes) -> tuple[list[Row], bool]:
    """Return the records that the client's parser reads, and whether it reads all of them."""
    found: list[Row] = []
    try:
        for one in DefaultRecordBatch(data):
            found.append((one.offset, one.timestamp, one.size_in_bytes, one.key, one.value))
    except (errors.KafkaError, ValueError, struct.error):
        return found, False
    return found, True


def read_rows(data: bytes) -> tuple[list[Row], bool]:
    """Return the records that `read_batch` reads, and whether it reads all of them."""
    found: list[Row] = []
    try:
        for run in read_batch(DefaultRecordBatch(data)):
            found += list_rows(run)
    except (errors.KafkaError, ValueError, struct.error):
        return found, False
    return found, True


def list_rows(run: MessageColumns) -> list[Row]:
    """Return the messages of a chunk as rows."""
    columns = run.offsets.tolist(), run.times.tolist(), run.sizes.tolist(), run.keys, run.values
    return list(zip(*columns, strict=True))


@pytest.fixture(autouse=True, scope="module", params=["compiled", "compiled for any processor", "numpy"])
def library(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Select the reader and let a chunk have few records; the value is None for the NumPy reader."""
    found = None
    if request.param != "numpy":
        found = record_columns._load_library(*["-DPORTABLE"] * (request.param != "compiled"))
        assert found is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_columns, "MAX_RECORDS", 4)
        patch.setattr(record_columns, "_load_library", lambda: found)
        yield found


@given(st.lists(st.one_of(plain, plain, st.tuples(text, text, headers)), max_size=12), st.sampled_from([0, 8]))
def test_every_form_of_record(messages: list[tuple[bytes | None, bytes | None, list[Any]]], stamped: int) -> None:
    """Records of every form are read as the client reads them.

    Args:
        messages: Keys, values and headers.
        stamped: The attributes of the batch; 8 means that the broker has stated the times.
    """
    data = encode_batch(
        b"".join(encode_record(i, *message) for i, message in enumerate(messages)), len(messages), stamped, 1234
    )
    assert read_rows(data) == parse_with_client(data)


@given(st.data())
def test_numbers_of_every_size_are_read(data: st.DataObject) -> None:
    number = st.one_of(st.integers(-200, 200), st.integers(-(2**40), 2**40), st.sampled_from([2**34 - 1, -(2**34)]))
    bodies = []
    for _ in range(data.draw(st.integers(1, 9))):
        time, offset = data.draw(number), data.draw(number)
        bodies.append(b"\0" + encode_varint(time) + encode_varint(offset) + b"\1\2x\0")
    whole = encode_batch(b"".join(encode_varint(len(body)) + body for body in bodies), len(bodies), 0, 10**12)
    assert read_rows(whole) == parse_with_client(whole)
    assert parse_with_client(whole)[1]


@given(st.lists(plain, min_size=1, max_size=9), st.data())
def test_damaged_records_are_read_as_by_the_client(
    messages: list[tuple[bytes | None, bytes | None, list[Any]]], data: st.DataObject
) -> None:
    """Both readers return the same records before the damaged one."""
    whole = bytearray(
        encode_batch(b"".join(encode_record(i, *message) for i, message in enumerate(messages)), len(messages))
    )
    head = DefaultRecordBatch.HEADER_STRUCT.size
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(head, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(whole)), st.integers(head, len(whole))))
    count = data.draw(st.one_of(st.just(len(messages)), st.integers(-1, 20)))
    struct.pack_into(">i", whole, head - 4, count)
    assert read_rows(bytes(whole[:cut])) == parse_with_client(bytes(whole[:cut]))


several = st.lists(st.tuples(st.lists(plain, min_size=1, max_size=3), st.sampled_from([0, 8])), min_size=1, max_size=4)
COUNT, CHECKSUM, ATTRIBUTES = 57, 17, 21


def encode_consecutive_batches(of: list[Any]) -> list[bytearray]:
    """Return one encoded batch per element, with consecutive offsets."""
    wholes, first = [], 7
    for leader_epoch, (messages, stamped) in enumerate(of):
        records = b"".join(encode_record(i, *message) for i, message in enumerate(messages))
        whole = bytearray(encode_batch(records, len(messages), stamped, 1000 + first))
        struct.pack_into(">q", whole, 0, first)
        struct.pack_into(">i", whole, 12, leader_epoch)
        wholes.append(whole)
        first += len(messages)
    return wholes


def update_checksum(whole: bytearray) -> bytearray:
    """Return a batch with the checksum of its present content."""
    struct.pack_into(">I", whole, CHECKSUM, crc32c.crc32c(whole[ATTRIBUTES:]))
    return whole


def count_batches_read_together(wholes: list[bytearray]) -> int:
    """Return how many batches `read_small_batches` reads; their records must be those that the client reads."""
    data = b"any" + b"".join(wholes)
    found = read_small_batches(data, 3)
    if found is None:
        return 0
    ends = list(itertools.accumulate(map(len, wholes), initial=3))
    read_rows = wholes[: ends.index(found.end_position)]
    assert list_rows(found.chunk) == [row for whole in read_rows for row in parse_with_client(bytes(whole))[0]]
    last = DefaultRecordBatch(read_rows[-1])
    assert (found.next_offset, found.leader_epoch) == (last.next_offset, last.leader_epoch)
    return len(read_rows)


@given(several)
def test_small_batches_are_read_together(library: Any, of: list[Any]) -> None:
    """A chunk contains as many complete batches as fit into it."""
    wholes = [update_checksum(whole) for whole in encode_consecutive_batches(of)]
    counts = itertools.accumulate(len(messages) for messages, _ in of)
    assert count_batches_read_together(wholes) == (0 if library is None else sum(count <= 4 for count in counts))


NOT_SMALL = {
    "wrong checksum": lambda whole: whole.__setitem__(-1, whole[-1] ^ 1),
    "a record more": lambda whole: (struct.pack_into(">i", whole, COUNT, 3), update_checksum(whole)),
    "a record less": lambda whole: (struct.pack_into(">i", whole, COUNT, 1), update_checksum(whole)),
    "no records": lambda whole: (struct.pack_into(">i", whole, COUNT, 0), update_checksum(whole)),
    "fewer than none": lambda whole: (struct.pack_into(">i", whole, COUNT, -1), update_checksum(whole)),
    "compressed": lambda whole: (struct.pack_into(">h", whole, ATTRIBUTES, 3), update_checksum(whole)),
    "of a transaction": lambda whole: (struct.pack_into(">h", whole, ATTRIBUTES, 16), update_checksum(whole)),
    "of the broker": lambda whole: (struct.pack_into(">h", whole, ATTRIBUTES, 32), update_checksum(whole)),
    "of a kind to come": lambda whole: (struct.pack_into(">h", whole, ATTRIBUTES, -32768), update_checksum(whole)),
    "older": lambda whole: struct.pack_into(">b", whole, 16, 1),
    "longer than what is there": lambda whole: struct.pack_into(">i", whole, 8, len(whole) - 11),
    "shorter than its head": lambda whole: struct.pack_into(">i", whole, 8, 48),
    "of no length": lambda whole: struct.pack_into(">i", whole, 8, -1),
    "cut off": lambda whole: whole.__delitem__(slice(-1, None)),
    "cut off in its head": lambda whole: whole.__delitem__(slice(60, None)),
    "of another form": lambda whole: (whole.__setitem__(62, 128), update_checksum(whole)),
}


@pytest.mark.parametrize("change", NOT_SMALL.values(), ids=NOT_SMALL)
@pytest.mark.parametrize("before", [0, 1])
def test_batch_that_is_not_small_is_not_read_together_with_others(
    library: Any, change: Callable[[Any], Any], before: int
) -> None:
    wholes = [
        update_checksum(whole) for whole in encode_consecutive_batches([([(b"k", b"v", [])] * 2, 0)] * (before + 1))
    ]
    assert count_batches_read_together(wholes) == (0 if library is None else before + 1)
    change(wholes[-1])
    assert count_batches_read_together(wholes) == (0 if library is None else before)


def test_slice_of_a_chunk() -> None:
    data = encode_batch(b"".join(encode_record(i, b"k%d" % i, None) for i in range(3)), 3, 0, 7)
    (run,) = read_batch(DefaultRecordBatch(data))
    assert run.slice(0, 9) is run
    part = run.slice(1, 2)
    assert (part.offsets.tolist(), part.times.tolist(), part.keys, part.values) == ([1], [7], [b"k1"], [None])
    assert len(part) == 1
    assert sum(len(piece.values) for piece in (run.slice(0, 1), run.slice(1, 3))) == len(run)


def test_times_beyond_64_bits_are_clipped() -> None:
    """A sender may state any time."""
    body = b"\0" + encode_varint(2**40) + encode_varint(0) + b"\1\1\0"
    data = encode_batch(encode_varint(len(body)) + body, 1, 0, 2**63 - 1)
    (run,) = read_batch(DefaultRecordBatch(data))
    assert isinstance(run, MessageColumns)
    assert run.times.tolist() == [2**63 - 1]
