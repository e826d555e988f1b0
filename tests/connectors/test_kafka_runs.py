"""Records read as columns are those that the client's own parser reads, and where it fails, so do they."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import kafka.errors as errors
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch

from connectors.kafka import runs
from connectors.kafka.runs import Run, run_of, runs_of
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
        for run in runs_of(DefaultRecordBatch(data)):
            columns = run.offsets.tolist(), run.times.tolist(), run.sizes.tolist(), run.keys, run.values
            found += zip(*columns, strict=True)
    except (errors.KafkaError, ValueError, struct.error):
        return found, False
    return found, True


@pytest.fixture(autouse=True, params=["compiled", "numpy"])
def short_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """So that a few records are several runs; with compiled code and without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "RECORDS", 4)
        if request.param == "numpy":
            patch.setattr(runs, "_compiled", lambda: None)
        else:
            assert runs._compiled() is not None
        yield


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


@given(
    st.lists(st.tuples(st.lists(plain, min_size=1, max_size=5), st.sampled_from([0, 8])), min_size=1, max_size=5),
    st.data(),
)
def test_several_batches_read_as_one(
    several: list[tuple[list[tuple[bytes | None, bytes | None, list[Any]]], int]], data: st.DataObject
) -> None:
    """They are what each of them is by itself, or are left to be read so."""
    wholes, first = [], 0
    for messages, stamped in several:
        records = b"".join(record(i, *message) for i, message in enumerate(messages))
        whole = bytearray(batch(records, len(messages), stamped, 1000 + first))
        struct.pack_into(">q", whole, 0, first)
        wholes.append(whole)
        first += len(messages)
    separate = [row for whole in wholes for row in expected(bytes(whole))[0]]
    run = run_of([DefaultRecordBatch(whole) for whole in wholes])
    assert run is not None
    columns = run.offsets.tolist(), run.times.tolist(), run.sizes.tolist(), run.keys, run.values
    assert list(zip(*columns, strict=True)) == separate

    head = DefaultRecordBatch.HEADER_STRUCT.size
    damaged = data.draw(st.integers(0, len(wholes) - 1))
    count = len(several[damaged][0])
    said = data.draw(st.integers(1, 9).filter(lambda n: n != count))
    struct.pack_into(">i", wholes[damaged], head - 4, said)
    if len(wholes) > 1:  # what one says too many another may say too few
        other = (damaged + 1) % len(wholes)
        struct.pack_into(">i", wholes[other], head - 4, max(1, len(several[other][0]) + count - said))
    assert run_of([DefaultRecordBatch(whole) for whole in wholes]) is None


def test_a_part_of_a_run() -> None:
    data = batch(b"".join(record(i, b"k%d" % i, None) for i in range(3)), 3, 0, 7)
    (run,) = runs_of(DefaultRecordBatch(data))
    assert run.part(0, 9) is run
    part = run.part(1, 2)
    assert (part.offsets.tolist(), part.times.tolist(), part.keys, part.values) == ([1], [7], [b"k1"], [None])
    assert len(part) == 1
    assert sum(len(piece.values) for piece in (run.part(0, 1), run.part(1, 3))) == len(run)


def test_times_that_no_clock_shows() -> None:
    """A sender may state any; past 64 bits they are as good as the last one."""
    body = b"\0" + varint(2**40) + varint(0) + b"\1\1\0"
    data = batch(varint(len(body)) + body, 1, 0, 2**63 - 1)
    (run,) = runs_of(DefaultRecordBatch(data))
    assert isinstance(run, Run)
    assert run.times.tolist() == [2**63 - 1]
