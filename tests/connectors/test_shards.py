"""Tests of shards of input: rows keep their order and their positions, and the rows of a record stay together."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.files.shards import PollTimes, ShardWriter, get_shard_path, read_shard, shard_rows
from deformer_stream.codec import Codec, WindowAssigner
from deformer_stream.codec.payloads import LongRows, Messages, Payload, UnreadablePayload, WideRows
from deformer_stream.engine.events import NO_TIME, RejectionReason
from tests.models import SCHEMA

RECORDS = st.sampled_from(["r1", "r2", "ä/3", "17", "bad\udcff"])
CODEC = Codec(SCHEMA)


@st.composite
def draw_payload(draw: st.DrawFn) -> Payload:
    """Draw rows of a wide or a long table, or messages, some of which could not be read."""
    ids = draw(st.lists(RECORDS, max_size=12))
    numbers = np.array(sorted(draw(st.sets(st.integers(0, 99), min_size=len(ids), max_size=len(ids)))), np.int64)
    first, kind = int(numbers[0]) if len(ids) else 0, draw(st.sampled_from(["wide", "long", "labels", "messages"]))
    values = pa.array(range(len(ids)), pa.int64())
    if kind == "wide":
        return WideRows("w.csv", pa.RecordBatch.from_arrays([values], ["pressure"]), ids, first, "at", numbers)
    if kind == "messages":
        payloads: list[bytes | None] = [f'{{"record":"{i % 3}","feature":"pressure"}}'.encode() for i in numbers]
        payloads = [None if i % 5 == 0 else payload for i, payload in enumerate(payloads)]
        if payloads:
            payloads[-1] = UnreadablePayload(RejectionReason.MALFORMED_ROW, "line 7", 3, b"1;2")
        size = len(ids)
        return Messages("e.jsonl", [None] * size, payloads, np.full(size, NO_TIME), np.zeros(size, np.int32), numbers)
    texts = pa.array([one.encode("utf-8", "replace").decode() for one in ids], pa.string())
    names = pa.array(["pressure"] * len(ids), pa.string())
    columns = [texts, names.dictionary_encode() if kind == "labels" else names, values]
    return LongRows("l.parquet", pa.RecordBatch.from_arrays(columns, ["record", "feature", "value"]), first, numbers)


def list_rows(payload: Payload) -> list[tuple[Any, ...]]:
    """Return each row with everything that the pipeline can see of it."""
    if isinstance(payload, Messages):
        return [
            (payload.topic, body, getattr(body, "detail", None), getattr(body, "content", None), offset)
            for body, offset in zip(payload.payloads, payload.offsets.tolist(), strict=True)
        ]
    ids = payload.record_ids if isinstance(payload, WideRows) else [None] * len(payload)
    time_column = payload.time_column if isinstance(payload, WideRows) else None
    rows = payload.table.to_pylist()
    return [(payload.origin, time_column, ids[i], payload.get_row_number(i), rows[i]) for i in range(len(payload))]


@given(st.lists(draw_payload(), max_size=6), st.integers(1, 4), st.booleans())
def test_the_rows_of_a_shard_are_those_of_the_input_in_order(
    payloads: list[Payload], num_shards: int, keeps_polls: bool
) -> None:
    expected: list[list[tuple[int, tuple[Any, ...]]]] = [[] for _ in range(num_shards)]
    with tempfile.TemporaryDirectory() as name:
        writer = ShardWriter(Path(name), num_shards, keeps_polls)
        for poll, payload in enumerate(payloads):
            shards = shard_rows(payload, num_shards, CODEC, False)
            for shard, row in zip(shards.tolist(), list_rows(payload), strict=True):
                expected[shard].append((poll, row))
            writer.write(payload, shards)
            if poll == 2:
                writer.flush()
        writer.flush()
        for shard in range(num_shards):
            found = list(read_shard(get_shard_path(Path(name), shard), 8))
            rows = [(poll, row) for poll, payload in found for row in list_rows(payload)]
            assert [row for _, row in rows] == [row for _, row in expected[shard]]
            assert writer.num_rows[shard] == len(rows)
            if keeps_polls:
                assert rows == expected[shard]
                assert len({poll for poll, _ in found}) == len(found)


def test_rows_of_a_record_are_in_one_shard_in_all_formats() -> None:
    ids = [f"r{i}" for i in range(50)]
    wide = WideRows("w", pa.RecordBatch.from_arrays([pa.array(range(50))], ["pressure"]), ids, 0)
    numbers = pa.RecordBatch.from_arrays([pa.array(range(50))], ["record"])
    texts = pa.RecordBatch.from_arrays([pa.array([str(i) for i in range(50)])], ["record"])
    long = pa.RecordBatch.from_arrays([pa.array(ids), pa.array(["pressure"] * 50)], ["record", "feature"])
    lines: list[bytes | None] = [
        f'{{"record":"{one}","values":{{"pressure":1,"vibration":2}}}}'.encode() for one in ids
    ]
    messages = Messages("e", [None] * 50, lines, np.full(50, NO_TIME), np.zeros(50, np.int32), np.arange(50))
    shards = [shard_rows(payload, 7, CODEC, False).tolist() for payload in (wide, LongRows("l", long, 0), messages)]
    assert shards[0] == shards[1] == shards[2]
    assert set(shards[0]) == set(range(7))
    # A number and its text are the same id.
    by_number, by_text = (shard_rows(LongRows("l", rows, 0), 7, CODEC, False) for rows in (numbers, texts))
    assert (by_number == by_text).all()


@pytest.mark.parametrize("device", ["pump-7", "pump@hall-2", "@"])
def test_windows_of_a_device_are_in_one_shard(device: str) -> None:
    codec = Codec(SCHEMA, window_assigner=WindowAssigner(10_000_000))
    devices = pa.array([device, None, device, None, "pump-8"])
    records = pa.array([None, f"{device}@2020-03-09T10:34:30Z", None, "mine", None])
    rows = LongRows("l", pa.RecordBatch.from_arrays([devices, records], ["device", "record"]), 0)
    shards = shard_rows(rows, 1000, codec, True)
    assert shards[0] == shards[1] == shards[2]
    assert len(set(shards.tolist())) == 3
    line = f'{{"device":"{device}","feature":"pressure","value":1.0,"time":1583750073}}'
    messages = Messages("e", [None], [line.encode()], np.full(1, NO_TIME), np.zeros(1, np.int32), np.arange(1))
    assert shard_rows(messages, 1000, codec, True).tolist() == [shards[0]]


def test_a_shard_without_rows_has_no_file(tmp_path: Path) -> None:
    assert list(read_shard(get_shard_path(tmp_path, 0), 100)) == []


@pytest.mark.parametrize("polls", [[], [1], [0, 3]])
def test_all_polls_are_repeated_with_the_time_of_the_input(polls: list[int]) -> None:
    rows = LongRows("l", pa.RecordBatch.from_arrays([pa.array(["a"])], ["record"]), 0)
    clock, seen = PollTimes(), []
    for payload in clock.iterate_polls(np.array([5, NO_TIME, 3, 9]), iter([(poll, rows) for poll in polls])):
        seen.append((payload is not None, clock.at(np.array([100]))))
    assert seen == [(poll in polls, time) for poll, time in enumerate([5, 5, 5, 9])]
