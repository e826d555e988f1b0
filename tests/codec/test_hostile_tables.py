"""Tables from files that cannot be trusted: text that is no UTF-8, columns of any type, rows that nobody can show."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from deformer_stream.codec import encode_rejected, get_message
from deformer_stream.codec.payloads import LongRows, WideRows
from deformer_stream.engine.events import RejectionReason
from deformer_stream.errors import InputError
from tests.codec.test_json_messages import CODEC, readings
from tests.codec.test_tables import long


def bad_text(*cells: bytes | None) -> pa.Array:
    """A column of text as a file may have it: nobody has looked whether it is UTF-8."""
    return pa.array(cells, pa.binary()).view(pa.string())


@pytest.mark.parametrize("packed", [False, True])
def test_text_in_tables_that_is_no_utf8_is_refused_row_by_row(packed: bool) -> None:
    good, bad = b"r", b"\xff\xed\xa0\x80"
    columns = {
        "record": bad_text(bad, good, good, good, good, good),
        "feature": bad_text(b"Pressure", bad, b"state", b"Pressure", b"Pressure", b"state"),
        "value": bad_text(b"1", b"1", bad, bad, b"1", b"on"),
        "time": bad_text(None, None, None, None, bad, None),
    }
    batch, rejected = long(**{name: c.dictionary_encode() if packed else c for name, c in columns.items()})
    assert readings(batch) == [("r", "state", 1)]
    assert [(r.message_index, r.reason) for r in rejected] == [
        (0, RejectionReason.WRONG_TYPE),
        (1, RejectionReason.UNKNOWN_FEATURE),
        (2, RejectionReason.WRONG_TYPE),
        (3, RejectionReason.WRONG_TYPE),
        (4, RejectionReason.WRONG_TYPE),
    ]
    data = LongRows("f", pa.RecordBatch.from_pydict(columns), 0)
    for refusal in rejected:
        assert refusal.detail.isprintable()
        json.loads(encode_rejected(refusal, data))
    assert json.loads(get_message(data, 0)[1])["record"] == "\\udcff\\udced\\udca0\\udc80"


def test_labels_and_ids_of_wide_tables_that_are_no_utf8() -> None:
    table = pa.RecordBatch.from_pydict({"state": bad_text(b"\xff", b"on", b"off")})
    data = WideRows("f", table, ["a", "\udcff", "c"], 0)
    batch, rejected = CODEC.decode(data)
    assert {r for r, f in zip(batch.record_ids, batch.features.tolist(), strict=True) if f == 2} == {"c"}
    assert [(r.message_index, r.reason) for r in rejected] == [
        (0, RejectionReason.WRONG_TYPE),
        (1, RejectionReason.WRONG_TYPE),
    ]
    assert get_message(data, 1)[0] == b"\xff"


def test_labels_beside_values_that_are_no_utf8() -> None:
    batch, rejected = long(
        record=["r"] * 2, feature=["state"] * 2, value=bad_text(b"\xff", b"\xff"), label=["on", None]
    )
    assert (batch.message_indices.tolist(), [r.message_index for r in rejected]) == ([0], [1])


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
        pa.ListArray.from_arrays([0, 1], bad_text(b"\xff")),
    ],
)
def test_a_row_becomes_a_dead_letter_whatever_is_in_it(cell: pa.Array) -> None:
    data = WideRows("f", pa.RecordBatch.from_arrays([cell, pa.array([1.0])], ["odd", "Pressure"]), [""], 0)
    _, (rejected,) = CODEC.decode(data)
    assert json.loads(json.loads(encode_rejected(rejected, data))["payload"])["Pressure"] == 1.0


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.struct([("a", pa.int64())]), pa.binary(), pa.duration("s")])
def test_columns_of_no_use_are_the_tables_fault(kind: pa.DataType) -> None:
    columns = {"record": ["r"], "feature": ["Pressure"], "value": [1.0], "time": [1.0]}
    for name in columns:
        with pytest.raises(InputError):
            long(**columns | {name: pa.nulls(1, kind)})
