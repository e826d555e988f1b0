"""Tests of sensors that report several times per record: the time slot of a reading, in messages and in all tables."""

from __future__ import annotations

import json
import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.codec import Codec, WindowAssigner
from deformer_stream.engine.events import EventBatch, Rejection, RejectionReason
from deformer_stream.errors import ConfigError
from deformer_stream.model.schema import Feature, Schema
from deformer_stream.model.time_slots import expand_time_slots
from deformer_stream.model.windows import Window
from tests.codec.arrow_examples import make_stream
from tests.codec.json_examples import make_messages
from tests.codec.table_examples import decode_long

SECOND = 1_000_000
PLAIN = Schema(
    (
        Feature("temp", "continuous"),
        Feature("mode", "discrete", labels=("idle", "run")),
        Feature("site", "discrete", labels=("a", "b")),
    )
)
SCHEMA = expand_time_slots(PLAIN, Window(60 * SECOND, 4), ["site"])
CODEC = Codec(SCHEMA, window_assigner=WindowAssigner.from_options(SCHEMA, None, 2 * SECOND))
Reading = tuple[str, str, float | str | None]


def decode(*documents: Any, codec: Codec = CODEC) -> tuple[EventBatch, list[Rejection]]:
    """Return the events and rejections of JSON documents."""
    return codec.decode(make_messages(*(json.dumps(document).encode() for document in documents)))


def list_readings(batch: EventBatch) -> list[Reading]:
    """Return the events as (record id, feature name, value) tuples."""
    values = [batch.unseen_labels.get(i, None if math.isnan(v) else v) for i, v in enumerate(batch.values.tolist())]
    return list(zip(batch.record_ids, (SCHEMA.names[code] for code in batch.features.tolist()), values, strict=True))


def make_event(time: float, feature: str = "temp", value: Any = 1.0, **more: Any) -> dict[str, Any]:
    """Return an event of a device."""
    return {"device": "p", "feature": feature, "value": value, "time": time, **more}


@pytest.mark.parametrize(
    ("time", "start", "slot"),
    [
        (0.0, "1970-01-01T00:00:00Z", "0s"),
        (14.999999, "1970-01-01T00:00:00Z", "0s"),
        (15.0, "1970-01-01T00:00:00Z", "15s"),
        (59.999999, "1970-01-01T00:00:00Z", "45s"),
        (60.0, "1970-01-01T00:01:00Z", "0s"),
        (-0.000001, "1969-12-31T23:59:00Z", "45s"),
        (-60.0, "1969-12-31T23:59:00Z", "0s"),
        ("2020-03-09T10:34:33Z", "2020-03-09T10:34:00Z", "30s"),
    ],
)
def test_time_slot_selects_the_feature(time: Any, start: str, slot: str) -> None:
    batch, rejections = decode(
        make_event(time), make_event(time, "mode", "run"), make_event(time, "site", "b"), make_event(time, value=None)
    )
    device = f"p@{start}"
    assert rejections == []
    assert list_readings(batch) == [
        (device, f"temp+{slot}", 1.0),
        (device, f"mode+{slot}", 1.0),
        (device, "site", 1.0),
        (device, f"temp+{slot}", None),
    ]


def test_windows_of_the_model_take_precedence() -> None:
    assert (
        WindowAssigner.from_options(SCHEMA, 60 * SECOND, 0)
        == WindowAssigner.from_options(SCHEMA, None, 0)
        == WindowAssigner(60 * SECOND)
    )
    assert WindowAssigner.from_options(PLAIN, 10 * SECOND, SECOND) == WindowAssigner(10 * SECOND, SECOND)
    assert WindowAssigner.from_options(PLAIN, None, 0) is None
    with pytest.raises(
        ConfigError, match=r"--window 10s contradicts the model, which was trained on windows of 1m; omit the option"
    ):
        WindowAssigner.from_options(SCHEMA, 10 * SECOND, 0)
    with pytest.raises(ConfigError, match="--grace 2s needs --window"):
        WindowAssigner.from_options(PLAIN, None, 2 * SECOND)


def test_event_with_record_id_must_name_the_time_slot() -> None:
    mine = {"record": "mine", "time": 20.0}
    batch, rejections = decode(
        {**mine, "feature": "temp+45s", "value": 2.0},
        {**mine, "values": {"temp+0s": 1.0, "mode+15s": "odd", "site": "a"}},
        {**mine, "feature": "temp", "value": 2.0},
        make_event(20.0, "temp+15s"),
        make_event(20.0, "nope"),
    )
    assert list_readings(batch) == [
        ("mine", "temp+45s", 2.0),
        ("mine", "temp+0s", 1.0),
        ("mine", "mode+15s", "odd"),
        ("mine", "site", 0.0),
    ]
    assert [(r.message_index, r.reason) for r in rejections] == [
        (i, RejectionReason.UNKNOWN_FEATURE) for i in (2, 3, 4)
    ]
    assert (
        "send device and time instead of the record, or name the time slot, for example 'temp+0s'"
        in rejections[0].detail
    )
    assert "'temp+15s' is unknown to the model" in rejections[1].detail


TIMES = st.integers(-120 * SECOND, 120 * SECOND)
CELLS = st.one_of(st.none(), st.floats(-9, 9).map(lambda x: round(x, 3)))


@given(
    st.lists(st.tuples(st.sampled_from([None, "r"]), st.sampled_from(["temp", "temp+15s"]), CELLS, TIMES), max_size=8)
)
def test_long_tables_equal_messages(rows: list[tuple[str | None, str, float | None, int]]) -> None:
    documents = [
        {"record": record, "device": "p", "feature": name, "value": value, "time": time / 1e6}
        for record, name, value, time in rows
    ]
    batch, rejections = decode(*documents)
    if not rows:
        return
    records, names, values, times = zip(*rows, strict=True)
    columns = {
        "record": pa.array(records, pa.string()),
        "device": pa.array(["p"] * len(rows)),
        "feature": pa.array(names),
        "value": pa.array(values, pa.float64()),
        "time": pa.array([time / 1e6 for time in times]),
    }
    table, bad_rows = decode_long(CODEC, **columns)
    arrow, bad_cells = CODEC.decode(make_messages(make_stream(columns)))
    assert list_readings(batch) == list_readings(table) == list_readings(arrow)
    assert batch.times.tolist() == table.times.tolist() == arrow.times.tolist()
    assert [(r.message_index, r.detail) for r in rejections] == [(r.message_index, r.detail) for r in bad_rows]
    assert sum(r.num_readings for r in bad_cells) == len(rejections)
    for found in (batch, table, arrow):
        devices = [""] * len(batch) if found.windows is None else found.windows.devices
        assert devices == ["" if name == "r" else "p" for name in batch.record_ids]


def test_wide_arrow_rows_equal_messages() -> None:
    columns = {
        "device": pa.array(["p", "p", "q"]),
        "record": pa.array([None, None, "r"]),
        "time": pa.array([0.0, 15.0, 0.0]),
        "temp": pa.array([1.0, None, None]),
        "mode": pa.array(["run", "odd", None]),
        "site": pa.array(["a", None, "b"]),
        "temp+45s": pa.array([None, None, 4.0]),
    }
    batch, rejections = CODEC.decode(make_messages(make_stream(columns)))
    window = "p@1970-01-01T00:00:00Z"
    assert list_readings(batch) == [
        (window, "temp+0s", 1.0),
        (window, "mode+0s", 1.0),
        (window, "site", 0.0),
        (window, "temp+15s", None),
        (window, "mode+15s", "odd"),
        (window, "site", None),
        ("r", "site", 1.0),
        ("r", "temp+45s", 4.0),
    ]
    assert [(r.reason, r.num_readings) for r in rejections] == [(RejectionReason.UNKNOWN_FEATURE, 4)], (
        "names of the other form"
    )


def test_window_with_one_time_slot_keeps_feature_names() -> None:
    schema = expand_time_slots(PLAIN, Window(60 * SECOND))
    codec = Codec(schema, window_assigner=WindowAssigner.from_options(schema, None, 0))
    batch, rejections = decode(make_event(59.0), {"record": "r", "feature": "temp", "value": 2.0}, codec=codec)
    assert rejections == []
    assert [schema.names[code] for code in batch.features] == ["temp", "temp"]
    assert batch.record_ids == ["p@1970-01-01T00:00:00Z", "r"]
