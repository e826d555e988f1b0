"""Tests of tables from untrusted files: text that is not UTF-8, columns of any type, rows that cannot be shown."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from deformer_stream.codec import encode_rejected, get_message
from deformer_stream.codec.payloads import LongRows, WideRows
from deformer_stream.engine.events import RejectionReason
from deformer_stream.errors import InputError
from tests.codec.json_examples import CODEC, list_readings
from tests.codec.table_examples import decode_long


def make_unchecked_text(*cells: bytes | None) -> pa.Array:
    """Return a text column as a file may contain it, without a check that it is valid UTF-8."""
    return pa.array(cells, pa.binary()).view(pa.string())


@pytest.mark.parametrize("packed", [False, True])
def test_invalid_utf8_in_a_table_is_rejected_row_by_row(packed: bool) -> None:
    good, bad = b"r", b"\xff\xed\xa0\x80"
    columns = {
        "record": make_unchecked_text(bad, good, good, good, good, good),
        "feature": make_unchecked_text(b"Pressure", bad, b"state", b"Pressure", b"Pressure", b"state"),
        "value": make_unchecked_text(b"1", b"1", bad, bad, b"1", b"on"),
        "time": make_unchecked_text(None, None, None, None, bad, None),
    }
    batch, rejections = decode_long(**{name: c.dictionary_encode() if packed else c for name, c in columns.items()})
    assert list_readings(batch) == [("r", "state", 1)]
    assert [(r.message_index, r.reason) for r in rejections] == [
        (0, RejectionReason.WRONG_TYPE),
        (1, RejectionReason.UNKNOWN_FEATURE),
        (2, RejectionReason.WRONG_TYPE),
        (3, RejectionReason.WRONG_TYPE),
        (4, RejectionReason.WRONG_TYPE),
    ]
    data = LongRows("f", pa.RecordBatch.from_pydict(columns), 0)
    for rejection in rejections:
        assert rejection.detail.isprintable()
        json.loads(encode_rejected(rejection, data))
    assert json.loads(get_message(data, 0)[1])["record"] == "\\udcff\\udced\\udca0\\udc80"


def test_invalid_utf8_in_labels_and_ids_of_wide_tables() -> None:
    table = pa.RecordBatch.from_pydict({"state": make_unchecked_text(b"\xff", b"on", b"off")})
    data = WideRows("f", table, ["a", "\udcff", "c"], 0)
    batch, rejections = CODEC.decode(data)
    assert {r for r, f in zip(batch.record_ids, batch.features.tolist(), strict=True) if f == 2} == {"c"}
    assert [(r.message_index, r.reason) for r in rejections] == [
        (0, RejectionReason.WRONG_TYPE),
        (1, RejectionReason.WRONG_TYPE),
    ]
    assert get_message(data, 1)[0] == b"\xff"


def test_invalid_utf8_in_a_label_column() -> None:
    batch, rejections = decode_long(
        record=["r"] * 2, feature=["state"] * 2, value=make_unchecked_text(b"\xff", b"\xff"), label=["on", None]
    )
    assert (batch.message_indices.tolist(), [r.message_index for r in rejections]) == ([0], [1])


@pytest.mark.parametrize(
    "cell",
    [
        pa.array([2**62], pa.timestamp("s")),
        pa.array([1], pa.timestamp("us", "No/Where")),
        pa.array([2**31 - 1], pa.date32()),
        pa.array([[float("nan")]]),
        pa.array([{"a": b"\xff"}]),
        pa.array([b"\xff"]),
        pa.array([2**62], pa.duration("s")),
        pa.array([[b"\xff"]], pa.list_(pa.binary())).cast(pa.list_(pa.binary())),
        pa.ListArray.from_arrays([0, 1], make_unchecked_text(b"\xff")),
    ],
)
def test_any_row_can_become_a_dead_letter(cell: pa.Array) -> None:
    data = WideRows("f", pa.RecordBatch.from_arrays([cell, pa.array([1.0])], ["odd", "Pressure"]), [""], 0)
    _, (rejections,) = CODEC.decode(data)
    assert json.loads(json.loads(encode_rejected(rejections, data))["payload"])["Pressure"] == 1.0


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.struct([("a", pa.int64())]), pa.binary(), pa.duration("s")])
def test_columns_of_unusable_types_raise_input_error(kind: pa.DataType) -> None:
    columns = {"record": ["r"], "feature": ["Pressure"], "value": [1.0], "time": [1.0]}
    for name in columns:
        with pytest.raises(InputError):
            decode_long(**columns | {name: pa.nulls(1, kind)})
