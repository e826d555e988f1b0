"""Tests of times of day, which are seconds since midnight in messages and in tables of every layout."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.codec import Codec
from deformer_stream.codec.columns import convert_times_of_day
from deformer_stream.codec.payloads import WideRows
from deformer_stream.codec.timestamps import parse_time_of_day
from deformer_stream.engine.events import EventBatch, Rejection, RejectionReason
from deformer_stream.errors import InputError
from deformer_stream.model.schema import SECONDS_PER_DAY, Feature, Schema
from tests.codec.arrow_examples import make_stream
from tests.codec.json_examples import make_messages
from tests.codec.table_examples import decode_long

CLOCK = Feature("clock", "continuous", True, location=43_000.0, scale=25_000.0, period=SECONDS_PER_DAY)
SCHEMA = Schema(
    (
        CLOCK,
        replace(CLOCK, name="hour", period=24.0),
        Feature("load", "continuous"),
        Feature("mode", "discrete", labels=("a",)),
    )
)
CODEC = Codec(SCHEMA)
KINDS = [pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")]
NOON = dt.time(12, 0, 1)


def decode_rows(*list_readings: tuple[str, Any]) -> tuple[list[float], list[Rejection]]:
    """Return the values of the events of a table, and its rejections."""
    documents = (json.dumps({"record": "r", "feature": name, "value": value}).encode() for name, value in list_readings)
    batch, rejections = CODEC.decode(make_messages(*documents))
    return batch.values.tolist(), rejections


def make_wide_rows(**columns: pa.Array) -> tuple[EventBatch, list[Rejection]]:
    """Return a table in wide layout with one column."""
    table = pa.RecordBatch.from_pydict(columns)
    return CODEC.decode(WideRows("t.parquet", table, [str(i) for i in range(len(table))], 0))


@given(st.times(), st.sampled_from(["auto", "minutes", "seconds", "milliseconds", "microseconds"]))
def test_time_texts_and_time_columns_become_seconds(time: dt.time, detail: str) -> None:
    text = time.isoformat(timespec=detail)
    cut = dt.time.fromisoformat(text)
    seconds = 3600 * cut.hour + 60 * cut.minute + cut.second + cut.microsecond / 1e6
    assert parse_time_of_day(text) == pytest.approx(seconds, abs=1e-9)
    assert convert_times_of_day(pa.array([cut, None], pa.time64("us"))).to_pylist() == [
        pytest.approx(seconds, abs=1e-9),
        None,
    ]


@pytest.mark.parametrize("text", ["", "24:00", "1:00", "12:60", "12:00:60", "12:00Z", "12:00:00.", " 12:00", "١٢:00"])
def test_other_text_is_not_a_time_of_day(text: str) -> None:
    assert parse_time_of_day(text) is None
    values, (decode_rejected,) = decode_rows(("clock", text))
    assert (values, decode_rejected.reason) == ([], RejectionReason.WRONG_TYPE)


def test_messages_hold_numbers_or_times_of_day() -> None:
    values, decode_rejected = decode_rows(
        ("clock", 86340), ("clock", "23:59"), ("clock", "00:01:00.5"), ("hour", 23.5), ("clock", -60)
    )
    assert (values, decode_rejected) == ([86340.0, 86340.0, 60.5, 23.5, -60.0], [])
    values, decode_rejected = decode_rows(("hour", "23:59"), ("load", "23:59"), ("mode", "a"))
    assert (values, [r.reason for r in decode_rejected]) == ([0.0], [RejectionReason.WRONG_TYPE] * 2)


@pytest.mark.parametrize("kind", KINDS)
def test_time_columns_in_every_table_layout(kind: pa.DataType) -> None:
    column = pa.array([NOON, None], kind)
    batch, decode_rejected = make_wide_rows(clock=column, load=pa.array([0.5, 1.5]))
    assert batch.values[batch.features == 0].tolist() == [43_201.0, pytest.approx(float("nan"), nan_ok=True)]
    assert decode_rejected == []
    batch, decode_rejected = decode_long(
        CODEC, record=["a", "b"], feature=["clock"] * 2, value=pa.array([NOON, NOON], kind)
    )
    assert (batch.values.tolist(), decode_rejected) == ([43_201.0] * 2, [])
    batch, decode_rejected = decode_long(
        CODEC, record=["a", "b"], feature=["clock", "load"], value=["12:00:01", "12:00:01"]
    )
    assert (batch.values.tolist(), [r.message_index for r in decode_rejected]) == ([43_201.0], [1])
    batch, decode_rejected = CODEC.decode(
        make_messages(make_stream({"record": pa.array(["a"]), "clock": pa.array([NOON], kind)}))
    )
    assert (batch.values.tolist(), decode_rejected) == ([43_201.0], [])


def test_time_columns_are_not_labels() -> None:
    column = pa.array([NOON], pa.time32("s"))
    with pytest.raises(InputError, match="cannot be read as labels"):
        make_wide_rows(mode=column)
    batch, (decode_rejected,) = CODEC.decode(make_messages(make_stream({"record": pa.array(["a"]), "mode": column})))
    assert (len(batch), decode_rejected.reason) == (0, RejectionReason.WRONG_TYPE)
