"""Tests of events that name a device: the window that they belong to, in messages and tables, and their rejections."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from deformer_stream.codec import MAX_TEXT_CHARS, Codec, FieldNames, WindowAssigner
from deformer_stream.codec.payloads import LongRows, Messages
from deformer_stream.engine.events import NO_TIME, EventBatch, Rejection, RejectionReason
from deformer_stream.errors import ConfigError, InputError
from tests.codec.json_examples import BROKER_TIME, CODEC, SCHEMA, decode, list_readings, make_messages, make_reading
from tests.codec.table_examples import decode_long

SECOND = 1_000_000
WINDOWS = WindowAssigner(10 * SECOND, 2 * SECOND)
WINDOWED = Codec(SCHEMA, window_assigner=WINDOWS)
TIME = 1583750073.0  # 2020-03-09T10:34:33Z
START = "2020-03-09T10:34:30Z"


def make_event(device: Any = "pump-7", time: Any = TIME, **more: Any) -> dict[str, Any]:
    """Return an event of a device."""
    event = {"device": device, "feature": "Pressure", "value": 0.5, "time": time, **more}
    return {name: value for name, value in event.items() if value is not ...}


def list_windows(batch: EventBatch) -> list[tuple[str, int | None]]:
    """Return device and deadline of each event, ("", None) if it is in no window."""
    if batch.windows is None:
        return [("", None)] * len(batch)
    pairs = zip(batch.windows.devices, batch.windows.deadlines.tolist(), strict=True)
    return [(device, deadline if device else None) for device, deadline in pairs]


def test_record_id_is_device_and_window_start() -> None:
    batch, rejections = decode(make_event(), make_reading(1.0), make_event(7, "2020-03-09T10:34:40Z"), codec=WINDOWED)
    assert rejections == []
    assert batch.record_ids == [f"pump-7@{START}", "r", "7@2020-03-09T10:34:40Z"]
    end = 1583750080 * SECOND
    assert list_windows(batch) == [("pump-7", end + 2 * SECOND), ("", None), ("7", end + 12 * SECOND)]
    assert batch.times.tolist() == [1583750073 * SECOND, BROKER_TIME, end]


def test_readings_of_a_message_share_a_window() -> None:
    event = {"device": "d", "time": TIME, "values": {"Pressure": 1.5, "state": "odd", "nope": 1}}
    batch, rejections = decode(make_reading(1.0), event, codec=WINDOWED)
    assert list_readings(batch)[1:] == [(f"d@{START}", "Pressure", 1.5), (f"d@{START}", "state", 4)]
    assert batch.unseen_labels == {2: "odd"}
    assert [device for device, _ in list_windows(batch)] == ["", "d", "d"]
    assert [r.reason for r in rejections] == [RejectionReason.UNKNOWN_FEATURE]


@pytest.mark.parametrize(
    ("width", "time", "start"),
    [
        (10 * SECOND, 0, "1970-01-01T00:00:00Z"),
        (10 * SECOND, 9.999999, "1970-01-01T00:00:00Z"),
        (10 * SECOND, 10, "1970-01-01T00:00:10Z"),
        (10 * SECOND, -0.000001, "1969-12-31T23:59:50Z"),
        (500_000, 1.75, "1970-01-01T00:00:01.500000Z"),
        (500_000, 2.25, "1970-01-01T00:00:02Z"),
        (7 * 86400 * SECOND, TIME, "2020-03-05T00:00:00Z"),
        (10 * SECOND, "2020-03-09T11:34:33+01:00", START),
    ],
)
def test_windows_are_aligned_to_1970(width: int, time: Any, start: str) -> None:
    batch, _ = decode(make_event(time=time), codec=Codec(SCHEMA, window_assigner=WindowAssigner(width)))
    assert batch.record_ids == [f"pump-7@{start}"]
    assert batch.windows is not None
    begin = batch.windows.deadlines[0] - width
    assert begin <= batch.times[0] < begin + width
    assert begin % width == 0


def test_broker_time_replaces_a_missing_time() -> None:
    batch, rejections = decode(make_event(time=...), make_event(time=None), codec=WINDOWED)
    assert (batch.record_ids, rejections) == (["pump-7@2023-11-14T22:13:20Z"] * 2, [])


def test_explicit_record_id_takes_precedence() -> None:
    events = [make_event(record="mine"), make_event(record=4), make_event(record=None)]
    batch, rejections = decode(*events, codec=WINDOWED, keys=[b"k", b"k", b"k"])
    assert (batch.record_ids, rejections) == (["mine", "4", f"pump-7@{START}"], [])
    assert [device for device, _ in list_windows(batch)] == ["", "", "pump-7"]
    batch, _ = decode(make_event(record=f"pump-7@{START}"), codec=WINDOWED)
    assert (batch.record_ids, batch.windows) == ([f"pump-7@{START}"], None)


def test_message_key_replaces_the_device() -> None:
    events = [make_event(...), make_event(None), make_event(), make_reading(1.0)]
    batch, rejections = decode(*events, codec=WINDOWED, keys=[b"p", b"p", b"p", b"p"])
    assert (batch.record_ids, rejections) == ([f"p@{START}", f"p@{START}", f"pump-7@{START}", "r"], [])
    batch, rejections = decode(make_event(...), make_event(), keys=[b"p", b"p"])
    assert (batch.record_ids, batch.windows, rejections) == (["p", "p"], None, []), "without windows it is the record"


def decode_rejected(
    *documents: Any, codec: Codec = WINDOWED, keys: list[bytes | None] | None = None
) -> list[Rejection]:
    """Return the rejections of documents that give no event."""
    batch, rejections = decode(*documents, codec=codec, keys=keys)
    assert len(batch) == 0
    assert [r.message_index for r in rejections] == list(range(len(documents)))
    return rejections


@pytest.mark.parametrize(
    ("event", "reason", "words"),
    [
        (make_event(...), RejectionReason.MISSING_FIELD, "'device' is missing"),
        (make_event(None), RejectionReason.MISSING_FIELD, "'device' is missing"),
        (make_event(""), RejectionReason.MISSING_FIELD, "'device' is empty"),
        (make_event(record=""), RejectionReason.MISSING_FIELD, "'record' is empty"),
        (make_event(["p"]), RejectionReason.WRONG_TYPE, "'device' is a list"),
        (make_event(True), RejectionReason.WRONG_TYPE, "'device' is a boolean"),
        (make_event("x" * 1025), RejectionReason.TOO_LARGE, "'device' has 1025 characters"),
        (make_event("x" * (MAX_TEXT_CHARS - len(START))), RejectionReason.TOO_LARGE, "has 1025 characters"),
        (make_event(time=True), RejectionReason.WRONG_TYPE, "'time' is a boolean"),
        (make_event(time="noon"), RejectionReason.WRONG_TYPE, "not RFC 3339"),
        (make_event(time=float("nan")), RejectionReason.NOT_FINITE, "time"),
        (make_event(time=-62135596800), RejectionReason.WRONG_TYPE, "before the year 1"),
        (make_event(feature="nope"), RejectionReason.UNKNOWN_FEATURE, "nope"),
    ],
)
def test_rejections_of_device_events(event: dict[str, Any], reason: RejectionReason, words: str) -> None:
    week = Codec(SCHEMA, window_assigner=WindowAssigner(7 * 86400 * SECOND)) if "year 1" in words else WINDOWED
    (rejections,) = decode_rejected(event, codec=week)
    assert rejections.reason is reason
    assert words in rejections.detail


def test_missing_time_is_a_missing_field() -> None:
    data = make_messages(b'{"device": "p", "feature": "Pressure", "value": 1}')
    data = Messages("t", data.keys, data.payloads, np.full(1, NO_TIME), data.partitions, data.offsets)
    batch, (rejections,) = WINDOWED.decode(data)
    assert (len(batch), rejections.reason) == (0, RejectionReason.MISSING_FIELD)
    assert "'time' is missing" in rejections.detail


def test_binary_message_key_is_a_missing_field() -> None:
    (rejections,) = decode_rejected(make_event(...), keys=[b"\xff"])
    assert rejections.reason is RejectionReason.MISSING_FIELD
    assert "'device' is missing, and the Kafka message key" in rejections.detail


def test_device_without_windows_is_rejected() -> None:
    (rejections,) = decode_rejected(make_event(), codec=CODEC)
    assert rejections.reason is RejectionReason.MISSING_FIELD
    assert "'record' is missing" in rejections.detail


def test_device_field_is_configurable() -> None:
    codec = Codec(SCHEMA, FieldNames(device="asset", time="at"), window_assigner=WINDOWS)
    batch, _ = decode({"asset": "p", "at": TIME, "feature": "Pressure", "value": 1}, codec=codec)
    assert batch.record_ids == [f"p@{START}"]


def test_impossible_windows_raise_config_error() -> None:
    for width, grace in ((0, 0), (-1, 0), (1, -1)):
        with pytest.raises(ConfigError):
            WindowAssigner(width, grace)


# long tables


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
def test_long_rows_with_devices(kind: pa.DataType) -> None:
    batch, rejections = decode_long(
        codec=WINDOWED,
        device=pa.array(["p", "q", None, "", "p", "x" * 1020, "p", None], pa.string()).cast(kind),
        feature=["Pressure"] * 6 + ["nope", "Pressure"],
        value=[1.0] * 8,
        time=pa.array([33, 40, 33, 33, None, 33, 33, None], pa.timestamp("s")),
    )
    assert batch.record_ids == ["p@1970-01-01T00:00:30Z", "q@1970-01-01T00:00:40Z"]
    assert list_windows(batch) == [("p", 42 * SECOND), ("q", 52 * SECOND)]
    assert [(r.message_index, r.reason) for r in rejections] == [
        (2, RejectionReason.MISSING_FIELD),
        (3, RejectionReason.MISSING_FIELD),
        (4, RejectionReason.MISSING_FIELD),
        (5, RejectionReason.TOO_LARGE),
        (6, RejectionReason.UNKNOWN_FEATURE),
        (7, RejectionReason.MISSING_FIELD),
    ]
    assert ["device" in r.detail for r in rejections] == [True, True, False, True, False, True]
    assert "'time' is missing" in rejections[2].detail


def test_long_rows_with_and_without_a_record() -> None:
    columns: dict[str, Any] = {
        "record": ["mine", None, None, "", "mine"],
        "device": ["p", "p", None, "p", None],
        "feature": ["Pressure", "state", "Pressure", "Pressure", "Current"],
        "value": ["1", "odd", "1", "1", "1"],
        "time": ["1970-01-01T00:00:33Z"] * 4 + ["noon"],
    }
    batch, rejections = decode_long(codec=WINDOWED, **columns)
    assert batch.record_ids == ["mine", "p@1970-01-01T00:00:30Z"]
    assert list_windows(batch) == [("", None), ("p", 42 * SECOND)]
    assert batch.unseen_labels == {1: "odd"}
    assert [(r.message_index, r.reason) for r in rejections] == [
        (2, RejectionReason.MISSING_FIELD),
        (3, RejectionReason.MISSING_FIELD),
        (4, RejectionReason.WRONG_TYPE),
    ]
    columns["time"][1] = "noon"
    _, rejections = decode_long(codec=WINDOWED, **columns)
    assert (rejections[0].message_index, rejections[0].reason) == (1, RejectionReason.WRONG_TYPE)
    batch, rejections = decode_long(**columns)
    assert batch.record_ids == ["mine"]
    assert batch.windows is None
    assert [r.message_index for r in rejections] == [1, 2, 3, 4], "without windows a device is no record"


def test_long_tables_with_missing_columns() -> None:
    for missing in ("device", "time", "feature", "value"):
        columns: dict[str, Any] = {"device": ["p"], "feature": ["Pressure"], "value": [1.0], "time": [1.0]}
        del columns[missing]
        with pytest.raises(InputError, match=f"column '{missing}' is missing"):
            decode_long(codec=WINDOWED, **columns)
    batch, _ = decode_long(codec=WINDOWED, record=["r"], feature=["Pressure"], value=[1.0])
    assert (batch.record_ids, batch.windows) == (["r"], None)


def test_messages_and_long_rows_agree() -> None:
    times = [0.0, 33.25, -7.5, TIME]
    devices = ["a", "b", "a", "ü"]
    rows = pa.RecordBatch.from_pydict(
        {"device": devices, "feature": ["Pressure"] * 4, "value": [1.0] * 4, "time": times}
    )
    by_row, _ = WINDOWED.decode(LongRows("t", rows, 0))
    by_message, _ = decode(*(make_event(d, t, value=1.0) for d, t in zip(devices, times, strict=True)), codec=WINDOWED)
    assert by_row.record_ids == by_message.record_ids
    assert by_row.times.tolist() == by_message.times.tolist()
    assert list_windows(by_row) == list_windows(by_message)
