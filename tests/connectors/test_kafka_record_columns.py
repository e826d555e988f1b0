"""Records read as columns are those that the client's own parser reads, and where it fails, so do they."""

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
from connectors.kafka.record_columns import MessageColumns, read_small_batches, read_batch
from tests.connectors.raw import batch, record, varint

text = st.one_of(st.none(), st.binary(max_size=20), st.integers(60, 70).map(bytes), st.integers(8185, 8200).map(bytes))
headers = st.lists(st.tuples(st.sampled_from([b"h", b"", "é".encode(), b"\xff"]), st.binary(max_size=5)), max_size=2)
plain = st.tuples(text, text, st.just([]))
Row = tuple[Any, ...]


def expected(data: bytes) -> tuple[list[Row], bool]:
    """What the client's parser reads, and whether it reads to the end."""
    found: list[Row] = []
    try:
        for one in DefaultRecordBatch(data):
            found.append((one.offset, one.timestamp, one.size_in_bytes, one.key, one.value))
    except (errors.KafkaError, ValueError, struct.error):
        return found, False
    return found, True


def read(data: bytes) -> tuple[list[Row], bool]:
    found: list[Row] = []
    try:
        for run in read_batch(DefaultRecordBatch(data)):
            found += rows_of(run)
    except (errors.KafkaError, ValueError, struct.error):
        return found, False
    return found, True


def rows_of(run: MessageColumns) -> list[Row]:
    columns = run.offsets.tolist(), run.times.tolist(), run.sizes.tolist(), run.keys, run.values
    return list(zip(*columns, strict=True))


@pytest.fixture(autouse=True, scope="module", params=["compiled", "compiled for any processor", "numpy"])
def library(request: pytest.FixtureRequest) -> Iterator[Any]:
    """What reads, with so short runs that a few records are several; None where that is NumPy."""
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
    """stamped: 8 says that times are the broker's."""
    data = batch(b"".join(record(i, *message) for i, message in enumerate(messages)), len(messages), stamped, 1234)
    assert read(data) == expected(data)


@given(st.data())
def test_numbers_of_every_size(data: st.DataObject) -> None:
    number = st.one_of(st.integers(-200, 200), st.integers(-(2**40), 2**40), st.sampled_from([2**34 - 1, -(2**34)]))
    bodies = []
    for _ in range(data.draw(st.integers(1, 9))):
        time, offset = data.draw(number), data.draw(number)
        bodies.append(b"\0" + varint(time) + varint(offset) + b"\1\2x\0")
    whole = batch(b"".join(varint(len(body)) + body for body in bodies), len(bodies), 0, 10**12)
    assert read(whole) == expected(whole)
    assert expected(whole)[1]


@given(st.lists(plain, min_size=1, max_size=9), st.data())
def test_damaged_records(messages: list[tuple[bytes | None, bytes | None, list[Any]]], data: st.DataObject) -> None:
    """Whatever stands there, both read the same, as far as both come."""
    whole = bytearray(batch(b"".join(record(i, *message) for i, message in enumerate(messages)), len(messages)))
    head = DefaultRecordBatch.HEADER_STRUCT.size
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(head, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(whole)), st.integers(head, len(whole))))
    count = data.draw(st.one_of(st.just(len(messages)), st.integers(-1, 20)))
    struct.pack_into(">i", whole, head - 4, count)
    assert read(bytes(whole[:cut])) == expected(bytes(whole[:cut]))


several = st.lists(st.tuples(st.lists(plain, min_size=1, max_size=3), st.sampled_from([0, 8])), min_size=1, max_size=4)
COUNT, CHECKSUM, ATTRIBUTES = 57, 17, 21


def in_succession(of: list[Any]) -> list[bytearray]:
    """A batch of each, as they follow each other in a partition."""
    wholes, first = [], 7
    for leader_epoch, (messages, stamped) in enumerate(of):
        records = b"".join(record(i, *message) for i, message in enumerate(messages))
        whole = bytearray(batch(records, len(messages), stamped, 1000 + first))
        struct.pack_into(">q", whole, 0, first)
        struct.pack_into(">i", whole, 12, leader_epoch)
        wholes.append(whole)
        first += len(messages)
    return wholes


def sealed(whole: bytearray) -> bytearray:
    """With the checksum that belongs to it now."""
    struct.pack_into(">I", whole, CHECKSUM, crc32c.crc32c(whole[ATTRIBUTES:]))
    return whole


def read_at_once(wholes: list[bytearray]) -> int:
    """How many batches are read as one; these are what each of them is by itself."""
    data = b"any" + b"".join(wholes)
    found = read_small_batches(data, 3)
    if found is None:
        return 0
    ends = list(itertools.accumulate(map(len, wholes), initial=3))
    read = wholes[: ends.index(found.end_position)]
    assert rows_of(found.chunk) == [row for whole in read for row in expected(bytes(whole))[0]]
    last = DefaultRecordBatch(read[-1])
    assert (found.next_offset, found.leader_epoch) == (last.next_offset, last.leader_epoch)
    return len(read)


@given(several)
def test_small_batches_are_read_as_one(library: Any, of: list[Any]) -> None:
    """As many as a run holds records."""
    wholes = [sealed(whole) for whole in in_succession(of)]
    counts = itertools.accumulate(len(messages) for messages, _ in of)
    assert read_at_once(wholes) == (0 if library is None else sum(count <= 4 for count in counts))


NOT_SMALL = {
    "wrong checksum": lambda whole: whole.__setitem__(-1, whole[-1] ^ 1),
    "a record more": lambda whole: (struct.pack_into(">i", whole, COUNT, 3), sealed(whole)),
    "a record less": lambda whole: (struct.pack_into(">i", whole, COUNT, 1), sealed(whole)),
    "no records": lambda whole: (struct.pack_into(">i", whole, COUNT, 0), sealed(whole)),
    "fewer than none": lambda whole: (struct.pack_into(">i", whole, COUNT, -1), sealed(whole)),
    "compressed": lambda whole: (struct.pack_into(">h", whole, ATTRIBUTES, 3), sealed(whole)),
    "of a transaction": lambda whole: (struct.pack_into(">h", whole, ATTRIBUTES, 16), sealed(whole)),
    "of the broker": lambda whole: (struct.pack_into(">h", whole, ATTRIBUTES, 32), sealed(whole)),
    "of a kind to come": lambda whole: (struct.pack_into(">h", whole, ATTRIBUTES, -32768), sealed(whole)),
    "older": lambda whole: struct.pack_into(">b", whole, 16, 1),
    "longer than what is there": lambda whole: struct.pack_into(">i", whole, 8, len(whole) - 11),
    "shorter than its head": lambda whole: struct.pack_into(">i", whole, 8, 48),
    "of no length": lambda whole: struct.pack_into(">i", whole, 8, -1),
    "cut off": lambda whole: whole.__delitem__(slice(-1, None)),
    "cut off in its head": lambda whole: whole.__delitem__(slice(60, None)),
    "of another form": lambda whole: (whole.__setitem__(62, 128), sealed(whole)),
}


@pytest.mark.parametrize("change", NOT_SMALL.values(), ids=NOT_SMALL)
@pytest.mark.parametrize("before", [0, 1])
def test_anything_else_is_left_to_be_read_by_itself(library: Any, change: Callable[[Any], Any], before: int) -> None:
    wholes = [sealed(whole) for whole in in_succession([([(b"k", b"v", [])] * 2, 0)] * (before + 1))]
    assert read_at_once(wholes) == (0 if library is None else before + 1)
    change(wholes[-1])
    assert read_at_once(wholes) == (0 if library is None else before)


def test_a_part_of_a_run() -> None:
    data = batch(b"".join(record(i, b"k%d" % i, None) for i in range(3)), 3, 0, 7)
    (run,) = read_batch(DefaultRecordBatch(data))
    assert run.slice(0, 9) is run
    part = run.slice(1, 2)
    assert (part.offsets.tolist(), part.times.tolist(), part.keys, part.values) == ([1], [7], [b"k1"], [None])
    assert len(part) == 1
    assert sum(len(piece.values) for piece in (run.slice(0, 1), run.slice(1, 3))) == len(run)


def test_times_that_no_clock_shows() -> None:
    """A sender may state any; past 64 bits they are as good as the last one."""
    body = b"\0" + varint(2**40) + varint(0) + b"\1\1\0"
    data = batch(varint(len(body)) + body, 1, 0, 2**63 - 1)
    (run,) = read_batch(DefaultRecordBatch(data))
    assert isinstance(run, MessageColumns)
    assert run.times.tolist() == [2**63 - 1]
