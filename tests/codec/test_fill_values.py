"""Tests of fill values such as 99999: every decoder reads them like an empty cell."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from deformer_stream.codec import Codec, WindowAssigner
from deformer_stream.codec.fill_values import FillValues
from deformer_stream.codec.payloads import WideRows
from deformer_stream.engine.events import EventBatch
from deformer_stream.model.reading_times import ReadingTimes
from deformer_stream.model.schema import Feature, Schema
from deformer_stream.model.windows import Window
from tests.codec.arrow_examples import make_stream
from tests.codec.json_examples import decode
from tests.codec.table_examples import decode_long

FILLS = FillValues(("99999", "-9999.9", "9223372036854775807", "Bad", "true"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (99999, True),
        (99999.0, True),
        (-9999.9, True),
        (float(np.float32(-9999.9)), True),
        (99998.99999, False),
        (math.nan, False),
        (math.inf, False),
        ("99999", True),
        (" 99999.00 ", True),
        ("99999,0", True),
        ("9.9999e4", True),
        ("Bad", True),
        (" Bad ", True),
        ("bad", False),
        ("", False),
        (True, True),
        (False, False),
        (1, False),
        (None, False),
        ([99999], False),
    ],
)
def test_numbers_are_compared_by_value_and_texts_as_they_are_written(value: object, expected: bool) -> None:
    assert FILLS.contains(value) is expected


NOON = dt.datetime(2025, 1, 1, 12, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("cells", "kept"),
    [
        (pa.array([1, 99999, None]), [1, None, None]),
        (pa.array([1, 2**63 - 1]), [1, None]),
        (pa.array([1.5, 99999.0, -9999.9, math.nan]), [1.5, None, None, math.nan]),
        (pa.array([1.5, -9999.9, 99999.0], pa.float32()), [1.5, None, None]),
        (pa.array([Decimal("1.5"), Decimal("-9999.9")]), [Decimal("1.5"), None]),
        (pa.array(["1,5", "99999,0", "Bad", "bad", None]), ["1,5", None, None, "bad", None]),
        (pa.array(["Bad", "on", "Bad"]).dictionary_encode(), [None, "on", None]),
        (pa.array([99999, 1, 99999]).dictionary_encode(), [None, 1, None]),
        (pa.array(["Bad", "on"], pa.string_view()), [None, "on"]),
        (pa.array([True, False, None]), [None, False, None]),
        (pa.array([NOON]), [NOON]),
        (pa.nulls(2), [None, None]),
        (pa.array([], pa.float64()), []),
    ],
)
def test_cells_with_fill_values_become_null(cells: pa.Array, kept: list[Any]) -> None:
    removed = FILLS.remove(cells)
    assert removed.type == (pa.large_string() if pa.types.is_string_view(cells.type) else cells.type)
    np.testing.assert_equal(removed.to_pylist(), kept)
    assert FillValues().remove(cells) is cells


SCHEMA = Schema(
    (
        Feature("flow", "continuous", fill_values=("99999", "-1", "Bad")),
        Feature("level", "continuous", fill_values=("99999",)),
        Feature("mode", "discrete", labels=("0", "1"), fill_values=("255",)),
    )
)
CODEC = Codec(SCHEMA)


def assert_equal(batch: EventBatch, other: EventBatch, values: list[float]) -> None:
    np.testing.assert_array_equal(batch.values, values)
    np.testing.assert_array_equal(other.values, values)
    assert batch.features.tolist() == other.features.tolist()
    assert batch.record_ids == other.record_ids
    assert batch.unseen_labels == other.unseen_labels == {}


def replace_fill(name: str, value: object) -> object:
    """Return None for a fill value of a feature, as a producer would write it that knows what is missing."""
    return None if (name, value) in {("flow", -1), ("flow", "Bad"), ("level", 99999), ("mode", 255)} else value


def test_json_messages_with_one_reading_or_several() -> None:
    nan = math.nan
    filled = [{"record": "r", "feature": "flow", "value": -1}, {"record": "r", "feature": "level", "value": -1.0}]
    filled += [{"record": "s", "values": {"flow": 99999, "level": 99999.0, "mode": 255}}]
    filled += [{"record": "t", "values": {"flow": "Bad", "level": 1, "mode": "255"}}]
    empty = [
        {"record": "r", "feature": "flow", "value": None},
        filled[1],
        {"record": "s", "values": {"flow": None, "level": None, "mode": None}},
        {"record": "t", "values": {"flow": None, "level": 1, "mode": None}},
    ]
    batch, rejections = decode(*filled, codec=CODEC)
    other, _ = decode(*empty, codec=CODEC)
    assert rejections == []
    assert_equal(batch, other, [nan, -1.0, nan, nan, nan, nan, 1.0, nan])


def test_a_text_that_is_no_fill_value_of_the_feature_is_rejected_as_before() -> None:
    _, rejections = decode({"record": "r", "feature": "level", "value": "Bad"}, codec=CODEC)
    assert [rejection.reason for rejection in rejections] == ["wrong_type"]


def make_columns(fill: bool) -> dict[str, Any]:
    cells = {"flow": [-1.0, 2.0], "level": [99999.0, -1.0], "mode": [255, 1]}
    return {
        name: pa.array([cell if fill else replace_fill(name, cell) for cell in column])
        for name, column in cells.items()
    }


def decode_wide_table(fill: bool) -> EventBatch:
    rows = WideRows("log.parquet", pa.RecordBatch.from_pydict(make_columns(fill)), ["r", "s"], 0)
    batch, rejections = CODEC.decode(rows)
    assert rejections == []
    return batch


def decode_wide_stream(fill: bool) -> EventBatch:
    batch, rejections = decode(make_stream({"record": pa.array(["r", "s"])} | make_columns(fill)), codec=CODEC)
    assert rejections == []
    return batch


def list_long_columns(fill: bool) -> dict[str, Any]:
    cells = [("flow", "-1"), ("level", "-1"), ("mode", "255"), ("level", "99999"), ("flow", "Bad"), ("flow", "3.5")]
    fills = {("flow", "-1"), ("level", "99999"), ("mode", "255"), ("flow", "Bad")}
    return {
        "record": pa.array(list("rrrsst")),
        "feature": pa.array([name for name, _ in cells]),
        "value": pa.array([None if cell in fills and not fill else cell[1] for cell in cells]),
        "time": pa.array([NOON] * len(cells)),
    }


def decode_long_table(fill: bool) -> EventBatch:
    batch, rejections = decode_long(CODEC, **list_long_columns(fill))
    assert rejections == []
    return batch


def decode_long_stream(fill: bool) -> EventBatch:
    batch, rejections = decode(make_stream(list_long_columns(fill)), codec=CODEC)
    assert rejections == []
    return batch


WIDE_VALUES = {
    decode_wide_table: [math.nan, math.nan, math.nan, 2.0, -1.0, 1.0],
    decode_wide_stream: [math.nan, math.nan, math.nan, 2.0, -1.0, 1.0],
    decode_long_table: [math.nan, -1.0, math.nan, math.nan, math.nan, 3.5],
    decode_long_stream: [math.nan, -1.0, math.nan, math.nan, math.nan, 3.5],
}


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (pa.array([2**53, 2**53 + 1, 2**53 + 2, None]), [False, True, False, False]),
        (pa.array([str(2**53), str(2**53 + 1), f"{2**53 + 1}.0"]), [False, True, True]),
        (pa.array([9999999999999, 9999999999998], pa.int64()), [True, False]),
        (pa.array([7, 8], pa.uint8()), [True, False]),
        (pa.array([7.0, 9999999999999.0, 9999999999998.0]), [True, True, False]),
    ],
)
def test_large_integers_are_compared_exactly(cells: pa.Array, expected: list[bool]) -> None:
    values = FillValues((str(2**53 + 1), "9999999999999", "7"))
    assert values.find(cells).tolist() == expected
    assert [values.contains(cell) for cell in cells.to_pylist()] == expected


@pytest.mark.parametrize("decode_cells", WIDE_VALUES)
def test_tables_and_arrow_messages(decode_cells: Callable[[bool], EventBatch]) -> None:
    assert_equal(decode_cells(True), decode_cells(False), WIDE_VALUES[decode_cells])


def test_a_label_column_of_a_table_of_readings() -> None:
    columns = {"record": ["r", "r"], "feature": ["mode", "mode"], "value": [None, 1.0], "label": ["255", None]}
    batch, rejections = decode_long(CODEC, **{name: pa.array(cells) for name, cells in columns.items()})
    assert rejections == []
    np.testing.assert_array_equal(batch.values, [math.nan, 1.0])


HOUR = 3600 * 10**6
IRREGULAR = Codec(replace(SCHEMA, reading_times=ReadingTimes(10_000_000, 1_000_000)))
WINDOWS = Codec(replace(SCHEMA, window=Window(HOUR)), window_assigner=WindowAssigner(HOUR))


@pytest.mark.parametrize(("codec", "owner"), [(IRREGULAR, "record"), (WINDOWS, "device")])
def test_fill_value_of_a_sensor_that_may_report_again_is_no_reading(codec: Codec, owner: str) -> None:
    """A null in a message would declare that the sensor reports no more, so that later readings would be refused."""
    long_columns = list_long_columns(True)
    long_columns[owner] = long_columns.pop("record")
    wide_columns = {owner: pa.array(["r", "s"]), "time": pa.array([NOON, NOON])} | make_columns(True)
    json_rows = zip(*(column.to_pylist() for column in long_columns.values()), strict=True)
    documents = [
        {"feature": name, "value": float(value) if value != "Bad" else value, "time": time.isoformat(), owner: record}
        for name, value, time, record in json_rows
    ]
    several = [{owner: "r", "time": NOON.isoformat(), "values": {"flow": -1, "mode": 1}}]
    null = [{owner: "r", "time": NOON.isoformat(), "feature": "flow", "value": None}]
    fill = [{owner: "r", "time": NOON.isoformat(), "feature": "flow", "value": -1}]
    for (batch, rejections), expected in (
        (decode(make_stream(long_columns), codec=codec), [-1.0, 3.5]),
        (decode_long(codec, **long_columns), [-1.0, 3.5]),
        (decode(make_stream(wide_columns), codec=codec), [2.0, -1.0, 1.0]),
        (decode(*documents, codec=codec), [-1.0, 3.5]),
        (decode(*several, codec=codec), [1.0]),
        (decode(*fill, codec=codec), []),
        (decode(*null, codec=codec), [math.nan]),
    ):
        assert rejections == []
        np.testing.assert_array_equal(batch.values, expected)


def test_schemas_without_fill_values_keep_their_form_and_fingerprint() -> None:
    bare = Schema(tuple(replace(feature, fill_values=()) for feature in SCHEMA.features))
    assert all("fill_values" not in row for row in bare.to_json())
    assert bare.fingerprint != SCHEMA.fingerprint
    assert Schema.from_json(SCHEMA.to_json()) == SCHEMA
    assert Schema.from_json(bare.to_json()).fingerprint == bare.fingerprint
