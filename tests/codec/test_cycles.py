"""Times of day are seconds since midnight, in messages and tables of every form."""

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
from tests.codec.test_arrow_messages import stream
from tests.codec.test_json_messages import messages
from tests.codec.test_tables import long

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


def told(*readings: tuple[str, Any]) -> tuple[list[float], list[Rejection]]:
    documents = (json.dumps({"record": "r", "feature": name, "value": value}).encode() for name, value in readings)
    batch, rejected = CODEC.decode(messages(*documents))
    return batch.values.tolist(), rejected


def wide(**columns: pa.Array) -> tuple[EventBatch, list[Rejection]]:
    table = pa.RecordBatch.from_pydict(columns)
    return CODEC.decode(WideRows("t.parquet", table, [str(i) for i in range(len(table))], 0))


@given(st.times(), st.sampled_from(["auto", "minutes", "seconds", "milliseconds", "microseconds"]))
def test_text_and_columns_are_seconds_since_midnight(time: dt.time, detail: str) -> None:
    text = time.isoformat(timespec=detail)
    cut = dt.time.fromisoformat(text)
    seconds = 3600 * cut.hour + 60 * cut.minute + cut.second + cut.microsecond / 1e6
    assert parse_time_of_day(text) == pytest.approx(seconds, abs=1e-9)
    assert convert_times_of_day(pa.array([cut, None], pa.time64("us"))).to_pylist() == [
        pytest.approx(seconds, abs=1e-9),
        None,
    ]


@pytest.mark.parametrize("text", ["", "24:00", "1:00", "12:60", "12:00:60", "12:00Z", "12:00:00.", " 12:00", "١٢:00"])
def test_what_is_no_time_of_day(text: str) -> None:
    assert parse_time_of_day(text) is None
    values, (refused,) = told(("clock", text))
    assert (values, refused.reason) == ([], RejectionReason.WRONG_TYPE)


def test_messages_say_numbers_or_times_of_day() -> None:
    values, refused = told(
        ("clock", 86340), ("clock", "23:59"), ("clock", "00:01:00.5"), ("hour", 23.5), ("clock", -60)
    )
    assert (values, refused) == ([86340.0, 86340.0, 60.5, 23.5, -60.0], [])
    values, refused = told(("hour", "23:59"), ("load", "23:59"), ("mode", "a"))
    assert (values, [r.reason for r in refused]) == ([0.0], [RejectionReason.WRONG_TYPE] * 2)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_times_in_every_form_of_table(kind: pa.DataType) -> None:
    column = pa.array([NOON, None], kind)
    batch, refused = wide(clock=column, load=pa.array([0.5, 1.5]))
    assert batch.values[batch.features == 0].tolist() == [43_201.0, pytest.approx(float("nan"), nan_ok=True)]
    assert refused == []
    batch, refused = long(CODEC, record=["a", "b"], feature=["clock"] * 2, value=pa.array([NOON, NOON], kind))
    assert (batch.values.tolist(), refused) == ([43_201.0] * 2, [])
    batch, refused = long(CODEC, record=["a", "b"], feature=["clock", "load"], value=["12:00:01", "12:00:01"])
    assert (batch.values.tolist(), [r.message_index for r in refused]) == ([43_201.0], [1])
    batch, refused = CODEC.decode(messages(stream({"record": pa.array(["a"]), "clock": pa.array([NOON], kind)})))
    assert (batch.values.tolist(), refused) == ([43_201.0], [])


def test_times_are_no_labels() -> None:
    column = pa.array([NOON], pa.time32("s"))
    with pytest.raises(InputError, match="cannot be read as labels"):
        wide(mode=column)
    batch, (refused,) = CODEC.decode(messages(stream({"record": pa.array(["a"]), "mode": column})))
    assert (len(batch), refused.reason) == (0, RejectionReason.WRONG_TYPE)
