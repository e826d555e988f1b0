"""Tests of messages that are Arrow streams: they give the same readings and rejections as JSON, and never raise."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.codec import Codec, WindowAssigner
from deformer_stream.codec.arrow_messages import MAX_READINGS
from deformer_stream.codec.payloads import Messages
from deformer_stream.engine.events import EventBatch, Rejection, RejectionReason
from tests.codec.arrow_examples import BROKER, SCHEMA, list_readings, make_stream, make_views


def decode(
    *payloads: bytes, key: bytes | None = b"key", codec: Codec | None = None
) -> tuple[EventBatch, list[Rejection]]:
    """Return the events and rejections of one message."""
    n = len(payloads)
    ints = np.arange(n)
    data = Messages("t", [key] * n, list(payloads), np.full(n, BROKER), ints.astype(np.int32) + 5, ints)
    return (codec or Codec(SCHEMA)).decode(data)


def decode_rejected(*payloads: bytes, **options: Any) -> Rejection:
    """Return the only rejection of a message that gives no event."""
    batch, (rejections,) = decode(*payloads, **options)
    assert len(batch) == 0
    return rejections


reading = st.one_of(
    st.tuples(st.sampled_from(["Pressure", "Current", "unheard of"]), st.one_of(st.none(), st.floats(-1e9, 1e9))),
    st.tuples(st.just("mode"), st.sampled_from(["idle", "run", "walk", None])),
)
event = st.tuples(st.sampled_from(["a", "b", "", None]), reading, st.one_of(st.none(), st.integers(0, 10**9)))


@given(st.lists(st.lists(event, min_size=1, max_size=6), min_size=1, max_size=4), st.booleans())
def test_long_stream_equals_json_messages(messages: list[list[Any]], packed: bool) -> None:
    tables, singles, origin = [], [], []
    for i, events in enumerate(messages):
        features = pa.array([feature for _, (feature, _), _ in events])
        labels = [value if isinstance(value, str) else None for _, (_, value), _ in events]
        numbers = [None if isinstance(value, str) else value for _, (_, value), _ in events]
        columns = {
            "record": pa.array([record for record, _, _ in events], pa.string()),
            "feature": features.dictionary_encode() if packed else features,
            "value": pa.array(numbers, pa.float64()),
            "label": pa.array(labels, pa.string()),
            "time": pa.array([at for _, _, at in events], pa.float64()),
        }
        tables.append(make_stream(columns))
        for record, (feature, value), at in events:
            document = {"record": record, "feature": feature, "value": value, "time": at}
            singles.append(orjson.dumps(document))
            origin.append(i)
    batch, rejections = decode(*tables)
    alike, alone = decode(*singles)
    moved = [(*row[:4], origin[row[4]], row[5]) for row in list_readings(alike)]
    assert list_readings(batch) == moved
    assert (batch.partitions == batch.message_indices + 5).all()
    merged = Rejection.merge_by_message(
        [Rejection(origin[r.message_index], r.reason, r.detail, r.num_readings) for r in alone]
    )
    assert [(r.message_index, r.reason, r.num_readings) for r in rejections] == [
        (r.message_index, r.reason, r.num_readings) for r in merged
    ]


@given(st.lists(st.lists(st.one_of(st.none(), st.floats(-1e9, 1e9)), min_size=2, max_size=2), min_size=1, max_size=5))
def test_wide_stream_equals_json_objects(cells: list[list[float | None]]) -> None:
    """A feature without a column is not mentioned; null declares that the feature will not be observed."""
    names = [f"r{i}" for i in range(len(cells))]
    columns = {"record": names, "Current": pa.array([c[0] for c in cells], pa.float64())}
    columns["Pressure"] = pa.array([c[1] for c in cells], pa.float64())
    batch, rejections = decode(make_stream(columns))
    documents = [{"record": n, "values": {"Current": a, "Pressure": b}} for n, (a, b) in zip(names, cells, strict=True)]
    alike, _ = decode(*map(orjson.dumps, documents))
    assert [row[:4] for row in list_readings(batch)] == [row[:4] for row in list_readings(alike)]
    assert rejections == []


def test_streams_and_json_messages_keep_their_order() -> None:
    single = b'{"record":"j","feature":"Current","value":1}'
    table = make_stream({"feature": ["Pressure", "mode"], "value": pa.array(["2", "new"])})
    batch, rejections = decode(single, table, single.replace(b"1", b"3"))
    assert [(row[0], row[1], row[2], row[4]) for row in list_readings(batch)] == [
        ("j", "Current", 1.0, 0),
        ("key", "Pressure", 2.0, 1),
        ("key", "mode", 2.0, 1),
        ("j", "Current", 3.0, 2),
    ]
    assert batch.unseen_labels == {2: "new"}
    assert (rejections, batch.times.tolist()) == ([], [BROKER] * 4)


def test_stream_with_several_record_batches() -> None:
    part = {"record": ["a"], "feature": ["Pressure"], "value": [1.0]}
    batch, _ = decode(make_stream(part, part, {**part, "record": ["b"]}))
    assert batch.record_ids == ["a", "a", "b"]


def test_bad_cell_is_rejected_alone() -> None:
    columns = {
        "record": ["a", "b", "c"],
        "Pressure": pa.array([1.0, float("nan"), None]),
        "mode": ["idle", "x" * 2000, "new"],
        "speed": [1, 2, 3],
    }
    batch, rejections = decode(make_stream(columns))
    assert [row[:3] + row[5:] for row in list_readings(batch)] == [
        ("a", "Pressure", 1.0, None),
        ("a", "mode", 0.0, None),
        ("c", "Pressure", None, None),
        ("c", "mode", 2.0, "new"),
    ]
    found = {r.reason: (r.num_readings, r.message_index) for r in rejections}
    assert found == {
        RejectionReason.NOT_FINITE: (1, 0),
        RejectionReason.TOO_LARGE: (1, 0),
        RejectionReason.UNKNOWN_FEATURE: (3, 0),
    }


def test_rows_of_devices_are_assigned_to_windows() -> None:
    codec = Codec(SCHEMA, window_assigner=WindowAssigner(10_000_000), max_ahead_micros=3_600_000_000)
    at = BROKER / 1e6
    long = make_stream(
        {"device": ["p", None], "feature": ["Pressure"] * 2, "value": [1.0, 2.0], "time": [at + 10, None]}
    )
    wide = make_stream({"device": ["p"], "record": pa.array([None], pa.string()), "Current": [1.0]})
    batch, rejections = decode(long, wide, codec=codec)
    names = ["p@2020-03-09T10:34:40Z", "key@2020-03-09T10:34:30Z", "p@2020-03-09T10:34:30Z"]
    assert (batch.record_ids, rejections) == (names, [])
    assert batch.windows is not None
    assert batch.windows.devices == ["p", "key", "p"]
    early = make_stream({"record": ["r"], "feature": ["Pressure"], "value": [1.0], "time": [at + 7200]})
    assert decode_rejected(early, codec=codec).reason is RejectionReason.FUTURE


GOOD = {"record": ["a"], "feature": ["Pressure"], "value": [1.0]}


@pytest.mark.parametrize(
    ("payload", "reason", "said"),
    [
        (b"\xff\xff\xff\xff", RejectionReason.NOT_JSON, "not a readable Arrow stream"),
        (b"\xff\xff\xff\xff\x10\0\0\0" + b"\0" * 64, RejectionReason.NOT_JSON, "not a readable Arrow stream"),
        (make_stream(GOOD)[:-40], RejectionReason.NOT_JSON, "not a readable Arrow stream"),
        (make_stream(GOOD, compression="zstd"), RejectionReason.TOO_LARGE, "use the compression of the Kafka producer"),
        (
            make_stream({**GOOD, "feature": pa.array(["Pressure"]).dictionary_encode()}, compression="lz4"),
            RejectionReason.TOO_LARGE,
            "",
        ),
        (make_stream({**GOOD, "value": [[1.0]]}), RejectionReason.WRONG_TYPE, "column 'value' has the type 'list"),
        (make_stream({**GOOD, "record": [1.5]}), RejectionReason.WRONG_TYPE, "record ids are text"),
        (make_stream({**GOOD, "feature": [1]}), RejectionReason.WRONG_TYPE, "feature names must be text"),
        (make_stream({**GOOD, "time": [True]}), RejectionReason.WRONG_TYPE, "a timestamp, epoch seconds"),
        (
            make_stream({"record": ["a"], "feature": ["Pressure"]}),
            RejectionReason.UNKNOWN_FEATURE,
            "'feature' is unknown",
        ),
        (make_stream({"record": ["a"]}), RejectionReason.MISSING_FIELD, "or columns with the names of features"),
        (make_stream({"Pressure": pa.array([], pa.float64())}), RejectionReason.MISSING_FIELD, "has no rows"),
        (make_stream({"Pressure": pa.nulls(MAX_READINGS + 1)}), RejectionReason.TOO_LARGE, "more than 65536 readings"),
        (make_stream({"Pressure": ["x"]}), RejectionReason.WRONG_TYPE, "a number is expected"),
        (
            make_stream({"Pressure": pa.array([1], pa.timestamp("s"))}),
            RejectionReason.WRONG_TYPE,
            "the column has the type 'timestamp",
        ),
        (make_stream({**GOOD, "record": pa.array([b"\xff"]).view(pa.string())}), RejectionReason.NOT_JSON, "UTF"),
        (
            make_stream({**GOOD, "record": pa.array(["x"] * 200_000)[:1], "value": [1.0]}) + b"x" * 2**20,
            RejectionReason.TOO_LARGE,
            "bytes",
        ),
    ],
)
def test_rejections_of_streams(payload: bytes, reason: RejectionReason, said: str) -> None:
    rejections = decode_rejected(payload)
    assert rejections.reason is reason
    assert said in rejections.detail
    assert rejections.detail.isprintable()


def test_row_without_record_and_key_is_rejected() -> None:
    table = make_stream({"feature": ["Pressure"] * 3, "value": [1.0, 2.0, 3.0]})
    assert decode_rejected(table, key=None).num_readings == 3
    assert decode_rejected(table, key=b"\xff").reason is RejectionReason.MISSING_FIELD


def make_dictionary(num_rows: int, text: str) -> pa.Array:
    """Return a column whose cells share a text, as a dictionary."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(num_rows, np.int8)), pa.array([text]))


@pytest.mark.parametrize("column", ["record", "device", "feature", "value", "label", "time"])
@pytest.mark.parametrize("make_column", [make_dictionary, make_views])
def test_long_text_that_many_cells_share_is_rejected_without_copies(
    column: str, make_column: Callable[[int, str], pa.Array]
) -> None:
    """A message of a megabyte would take two gigabytes."""
    num_rows = 2_000
    columns = {
        "record": pa.array(["a"] * num_rows),
        "feature": pa.array(["Pressure"] * num_rows),
        "value": pa.array([1.0] * num_rows),
        column: make_column(num_rows, "x" * 900_000),
    }
    rejection = decode_rejected(make_stream(columns), codec=Codec(SCHEMA, window_assigner=WindowAssigner(60_000_000)))
    assert rejection.reason is RejectionReason.TOO_LARGE
    assert "texts of more than" in rejection.detail


def test_short_texts_that_many_cells_share_are_read() -> None:
    num_rows = 30_000
    texts = pa.array(["a" * 900, None, "b" * 900])
    record = pa.DictionaryArray.from_arrays(pa.array(np.arange(num_rows) % 3, pa.int8()), texts)
    columns = {"record": record, "Pressure": pa.array(np.ones(num_rows))}
    batch, (rejection,) = decode(make_stream(columns), key=None)
    assert len(batch) + rejection.num_readings == num_rows
    assert set(batch.record_ids) == {"a" * 900, "b" * 900}


def test_compression_bomb_is_rejected_without_expansion() -> None:
    """A stream of a kilobyte would expand to a gigabyte."""
    big = {**GOOD, "record": pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), pa.array(["x" * 2**28]))}
    bomb = make_stream(big, compression="zstd")
    assert len(bomb) < 2**16
    before, began = pa.total_allocated_bytes(), time.process_time()
    assert decode_rejected(bomb).reason is RejectionReason.TOO_LARGE
    assert pa.total_allocated_bytes() - before < 2**20
    assert time.process_time() - began < 5


SEEDS = [
    make_stream({**GOOD, "time": [1.0]}),
    make_stream({"record": pa.array(["a", "b"]).dictionary_encode(), "Pressure": [1.0, None], "mode": ["idle", "new"]}),
    make_stream(
        {**GOOD, "record": pa.array(["a"], pa.large_string()), "time": pa.array([1], pa.timestamp("us", "UTC"))}
    ),
]


@given(st.sampled_from(SEEDS), st.data())
def test_damaged_streams_never_raise(seed: bytes, data: st.DataObject) -> None:
    damaged = bytearray(seed)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(4, len(seed) - 8))
        part = data.draw(
            st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\xff" * 8, b"\xff\xff\xff\x7f"]))
        )
        damaged[at : at + len(part)] = part
    batch, rejections = decode(bytes(damaged))
    assert len(batch) or rejections
    assert all(record for record in batch.record_ids)
    assert not np.isinf(batch.values).any()
