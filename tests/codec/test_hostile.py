"""Tests of input that senders get wrong, by mistake or on purpose.

The cases are deep nesting, sizes, numbers and times beyond all limits, unusual text, and clocks that are ahead.
"""

from __future__ import annotations

import json
import math
import time
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest

from deformer_stream.codec import MAX_TEXT_CHARS, Codec, WindowAssigner, encode_alert, encode_rejected, get_message
from deformer_stream.codec.encode_alerts import MAX_ALERT_BYTES
from deformer_stream.codec.payloads import Messages, UnreadablePayload, WideRows
from deformer_stream.engine.events import NO_TIME, Alert, Contribution, ExpectedRange, Rejection, RejectionReason
from tests.codec.json_examples import BROKER_TIME, CODEC, SCHEMA, decode, list_readings, make_messages, make_reading
from tests.codec.table_examples import decode_long

GOOD = b'{"record":"r","feature":"Pressure","value":1'
SECOND = 1_000_000


def make_nested(depth: int, inside: bytes = b"") -> bytes:
    """Return a JSON document with lists nested to the given depth."""
    return b"[" * depth + inside + b"]" * depth


# --- JSON itself


@pytest.mark.parametrize("depth", [1100, 5000, 100_000])
@pytest.mark.parametrize("end", [b"", b',"y":NaN'])
def test_deep_nesting_is_rejected_by_both_parsers(depth: int, end: bytes) -> None:
    """NaN makes the lenient parser read the message."""
    batch, (rejections,) = decode(GOOD + b',"x":' + make_nested(depth) + end + b"}")
    assert (len(batch), rejections.reason) == (0, RejectionReason.NOT_JSON)


def test_accepted_nesting_does_no_harm() -> None:
    batch, rejections = decode(GOOD + b',"x":' + make_nested(900) + b"}", make_reading([[[1]]]))
    assert list_readings(batch) == [("r", "Pressure", 1)]
    assert [r.reason for r in rejections] == [RejectionReason.WRONG_TYPE]
    _, (rejections,) = decode(GOOD + b',"x":' + make_nested(500) + b',"values":{"Pressure":NaN}}')
    assert rejections.reason is RejectionReason.NOT_JSON


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"0." + b"3" * 1_000_000, 1 / 3),
        (b"1" + b"0" * 300_000 + b"e-300000", 1.0),
        (b"1e-999999999999", 0.0),
        (b"5e-324", 5e-324),
        (b"-0.0", 0.0),
        (b"-0", 0.0),
        (b"18446744073709551616", 2.0**64),
        (b"-9223372036854775809", -(2.0**63)),
    ],
)
def test_numbers_with_many_digits(value: bytes, said: float) -> None:
    document = b'{"record":"r","feature":"Pressure","value":' + value + b"}"
    batch, rejections = decode(document, document[:-1] + b',"x":NaN}')
    assert (batch.values.tolist(), rejections) == ([said, said], [])


@pytest.mark.parametrize("value", [b"9" * 1_000_000, b"-" + b"9" * 401, b"1e400", b"1e99999999999999999999"])
def test_numbers_beyond_float64_are_rejected(value: bytes) -> None:
    batch, (rejections,) = decode(b'{"record":"r","feature":"Pressure","value":' + value + b"}")
    assert (len(batch), rejections.reason) == (0, RejectionReason.NOT_FINITE)


def test_last_of_two_equal_keys_counts() -> None:
    batch, rejections = decode(
        GOOD + b',"value":2}',
        b'{"record":"q","record":"r","feature":"Current","feature":"Pressure","value":NaN,"value":3}',
        b'{"record":"r","values":{"Pressure":4,"Pressure":5}}',
        b'{"record":"r","record":null,"feature":"Pressure","value":6}',
        keys=[None, None, None, b"k"],
    )
    assert list_readings(batch) == [
        ("r", "Pressure", 2),
        ("r", "Pressure", 3),
        ("r", "Pressure", 5),
        ("k", "Pressure", 6),
    ]
    assert rejections == []


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig"])
def test_other_text_encodings_are_not_json(encoding: str) -> None:
    text = '{"record":"é","feature":"Pressure","value":1}'
    batch, (rejections,) = decode(text.encode(encoding))
    assert (len(batch), rejections.reason) == (0, RejectionReason.NOT_JSON)


def test_integer_ids_are_exact_in_both_parsers() -> None:
    for number in (2**63, 2**64 - 1, -(2**63)):
        document = b'{"record":%d,"values":{"Pressure":1,"Current":NaN}}' % number
        batch, rejections = decode(document)
        assert list_readings(batch) == [(str(number), "Pressure", 1)]
        assert [r.reason for r in rejections] == [RejectionReason.NOT_FINITE]
    _, (rejections,) = decode(b'{"record":%d,"feature":"Pressure","value":1}' % 2**64)
    assert rejections.reason is RejectionReason.WRONG_TYPE


# --- text: ids and labels end in keys, headers, JSON lines and logs

ODD_TEXTS = [
    "a\nb",
    "\0",
    "\x1b[2J",
    "\u2028\u2029\x85",
    "\u202eevil",
    "\ufeff",
    "e\u0301",
    "\U0001f4a7" * MAX_TEXT_CHARS,
    "\\",
    '"',
]


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_unusual_text_is_kept_and_written_on_one_line(text: str) -> None:
    batch, rejections = decode(
        make_reading(1.0, record=text), make_reading(text, "state"), make_reading(1.0, text), make_reading(text)
    )
    assert batch.record_ids[0] == text
    assert batch.unseen_labels == {1: text}
    assert [r.reason for r in rejections] == [RejectionReason.UNKNOWN_FEATURE, RejectionReason.WRONG_TYPE]
    alert = Alert(
        "id",
        text,
        1,
        1,
        3,
        NO_TIME,
        0.01,
        0.01,
        1.0,
        -1.0,
        "m",
        0,
        (Contribution(text, text, 1.0, ExpectedRange(None, text, None)),),
    )
    line = encode_alert(alert, None)
    assert b"\n" not in line
    assert json.loads(line)["record"] == json.loads(line)["contributions"][0]["value"] == text
    for rejection in rejections:
        assert rejection.detail.isprintable()
        assert len(rejection.detail.encode()) < 800


def test_alert_with_many_long_labels_fits_into_a_message() -> None:
    long_label = "\U0001f4a7" * MAX_TEXT_CHARS
    parts = tuple(
        Contribution(str(i), long_label, 300.0 - i, ExpectedRange(None, long_label, None)) for i in range(300)
    )
    alert = Alert("id", long_label, 1, 1, 3, NO_TIME, 0.01, 0.01, 1.0, -1.0, "m", 0, parts)
    line = encode_alert(alert, None)
    assert len(line) <= MAX_ALERT_BYTES
    kept = json.loads(line)["contributions"]
    assert [c["feature"] for c in kept] == [str(i) for i in range(len(kept))]
    assert len(kept) > 30


@pytest.mark.parametrize(
    ("key", "record"),
    [
        (b"\0", "\0"),
        (b" ", " "),
        (b"k" * MAX_TEXT_CHARS, "k" * MAX_TEXT_CHARS),
        ("é" * MAX_TEXT_CHARS, "é" * MAX_TEXT_CHARS),
    ],
)
def test_message_key_replaces_a_missing_record_id(key: bytes | str, record: str) -> None:
    raw = key.encode() if isinstance(key, str) else key
    batch, rejections = decode({"feature": "Pressure", "value": 1.0}, keys=[raw])
    assert (batch.record_ids, rejections) == ([record], [])


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (b"", RejectionReason.MISSING_FIELD),
        (None, RejectionReason.MISSING_FIELD),
        (b"\xed\xa0\x80", RejectionReason.MISSING_FIELD),
        (b"k" * (MAX_TEXT_CHARS + 1), RejectionReason.TOO_LARGE),
        (b"k" * 2**21, RejectionReason.TOO_LARGE),
    ],
)
def test_message_keys_that_cannot_be_record_ids(key: bytes | None, reason: RejectionReason) -> None:
    batch, (rejections,) = decode({"feature": "Pressure", "value": 1.0}, keys=[key])
    assert (len(batch), rejections.reason) == (0, reason)
    assert len(rejections.detail) < 250


# --- a message has one refusal for each reason, however many readings it has


def test_bad_readings_of_a_message_give_one_rejection_per_reason() -> None:
    values: dict[str, Any] = {f"unknown-{i}": i for i in range(4000)}
    values |= {"Pressure": "high", "Current": math.inf, "state": "on"}
    batch, rejections = decode(make_reading(1.0), {"record": "r", "values": values}, make_reading(1.0, "nope"))
    assert list_readings(batch) == [("r", "Pressure", 1), ("r", "state", 1)]
    assert [(r.message_index, r.reason, r.num_readings) for r in rejections] == [
        (1, RejectionReason.UNKNOWN_FEATURE, 4000),
        (1, RejectionReason.WRONG_TYPE, 1),
        (1, RejectionReason.NOT_FINITE, 1),
        (2, RejectionReason.UNKNOWN_FEATURE, 1),
    ]
    assert rejections[0].detail == "feature 'unknown-0' is unknown to the model (and 3999 more of this message)"
    assert "more of this" not in rejections[1].detail


def test_merged_rejections_keep_message_order_and_counts() -> None:
    late, twice = RejectionReason.LATE, RejectionReason.DUPLICATE
    mixed = [Rejection(2, late, "a"), Rejection(0, late, "b"), Rejection(2, twice, "c"), Rejection(2, late, "d", 3)]
    assert Rejection.merge_by_message(mixed) == [
        Rejection(0, late, "b"),
        Rejection(2, late, "a (and 3 more of this message)", 4),
        Rejection(2, twice, "c"),
    ]
    assert Rejection.merge_by_message([]) == []


def test_unreadable_payload_is_rejected_with_its_reason() -> None:
    data = make_messages(
        GOOD + b"}", UnreadablePayload(RejectionReason.TOO_LARGE, "3 messages of 5 GB", 3), GOOD + b"}"
    )
    batch, rejections = CODEC.decode(data)
    assert batch.message_indices.tolist() == [0, 2]
    assert rejections == [Rejection(1, RejectionReason.TOO_LARGE, "3 messages of 5 GB", 3)]
    assert get_message(data, 1) == (None, b"")
    assert orjson.loads(encode_rejected(rejections[0], data))["payload"] == ""


# --- times


@pytest.mark.parametrize(
    ("when", "micros"),
    [
        ("2016-12-31T23:59:60Z", 1_483_228_800_000_000),
        ("2017-01-01T00:59:60.25+01:00", 1_483_228_800_250_000),
        ("9999-12-31T23:59:59Z", 253_402_300_799_000_000),
        ("0001-01-01T00:00:00Z", -62_135_596_800_000_000),
        (5e-324, 0),
        (-62135596800.0, -62_135_596_800_000_000),
        (253402300799.0, 253_402_300_799_000_000),
    ],
)
def test_first_and_last_possible_times(when: Any, micros: int) -> None:
    batch, rejections = decode(make_reading(1.0, time=when))
    assert (batch.times.tolist(), rejections) == ([micros], [])


@pytest.mark.parametrize(
    ("when", "expected_text"),
    [
        (1583750073000, "set --time-unit ms if all times are milliseconds"),
        (1583750073000000, "set --time-unit us if all times are microseconds"),
        (1583750073000000000, "set --time-unit ns if all times are nanoseconds"),
        (1583750073000.25, "set --time-unit ms if all times are milliseconds"),
        (1e300, "send seconds since 1970"),
        (-1e17, "send seconds since 1970"),
        ("0000-01-01T00:00:00Z", "not RFC 3339"),
        ("10000-01-01T00:00:00Z", "not RFC 3339"),
        ("2020-03-09T10:34:33+99:99", "not RFC 3339"),
        ("2020-03-09T10:34:60Z", "not RFC 3339"),
        ("9999-12-31T23:59:60Z", "not RFC 3339"),
        ("2020-02-30T00:00:00Z", "not RFC 3339"),
        ("1583750073", "not RFC 3339"),
        ("２０２０-03-09T10:34:33Z", "not RFC 3339"),
        ("2" * 1_000_000, "not RFC 3339"),
        ("9999-12-31T23:59:59-01:00", "outside the years 1 to 9999"),
    ],
)
def test_impossible_times_are_rejected(when: Any, expected_text: str) -> None:
    batch, (rejections,) = decode(make_reading(1.0, time=when))
    assert (len(batch), rejections.reason) == (0, RejectionReason.WRONG_TYPE)
    assert expected_text in rejections.detail
    assert len(rejections.detail) < 250


def test_tables_reject_times_with_the_same_messages() -> None:
    _, rejections = decode_long(
        record=["r"] * 3, feature=["Pressure"] * 3, value=[1.0] * 3, time=[1583750073000.0, 1e300, math.inf]
    )
    assert [r.reason for r in rejections] == [
        RejectionReason.WRONG_TYPE,
        RejectionReason.WRONG_TYPE,
        RejectionReason.NOT_FINITE,
    ]
    assert "set --time-unit ms if all times are milliseconds" in rejections[0].detail


# --- clocks that are ahead

AHEAD = Codec(SCHEMA, window_assigner=WindowAssigner(10 * SECOND), max_ahead_micros=60 * SECOND)
NOW = BROKER_TIME // SECOND


@pytest.mark.parametrize("event", [{"record": "r"}, {"device": "d"}])
@pytest.mark.parametrize("form", [float, int, lambda s: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(s))])
def test_event_time_too_far_after_broker_time_is_rejected(event: dict[str, Any], form: Any) -> None:
    documents = [
        make_reading(1.0, **{"record": None, "time": form(NOW + s)} | event) for s in (-1e9, 0, 59, 60, 61, 1e9)
    ]
    batch, rejections = decode(*documents, codec=AHEAD)
    assert batch.message_indices.tolist() == [0, 1, 2, 3]
    assert [(r.message_index, r.reason) for r in rejections] == [
        (4, RejectionReason.FUTURE),
        (5, RejectionReason.FUTURE),
    ]
    assert rejections[0].detail == (
        "the time 2023-11-14T22:14:21Z lies more than 60 s after the arrival of the message at 2023-11-14T22:13:20Z; "
        "check the clock of the sender"
    )
    assert decode(*documents)[0].message_indices.tolist() == ([0, 1, 2, 3, 4, 5] if "record" in event else []), (
        "only when set"
    )


def test_event_without_own_time_is_never_ahead() -> None:
    data = make_messages(GOOD + b"}", GOOD + b',"time":null}')
    data.times[:] = (time.time_ns() // 1000 + 10**12, BROKER_TIME)
    assert AHEAD.decode(data)[1] == []


@pytest.mark.parametrize(
    "stamp", [NO_TIME, 2**62, 0, 1_764_270_000_000]
)  # the last two: 0, and seconds as milliseconds
def test_wall_clock_is_used_without_broker_time(stamp: int) -> None:
    now = time.time()
    data = make_messages(*(GOOD + b',"time":%f}' % (now + s) for s in (-1e9, 0.0, 3600.0)))
    data.times[:] = stamp
    batch, rejections = AHEAD.decode(data)
    assert batch.message_indices.tolist() == [0, 1]
    assert [(r.message_index, r.reason) for r in rejections] == [(2, RejectionReason.FUTURE)]


def test_table_rows_ahead_of_the_wall_clock_are_rejected() -> None:
    now = time.time()
    batch, rejections = decode_long(
        AHEAD, record=["r"] * 3, feature=["Pressure"] * 3, value=[1.0] * 3, time=[now - 1e9, now + 3600, None]
    )
    assert batch.message_indices.tolist() == [0, 2]
    assert [(r.message_index, r.reason) for r in rejections] == [(1, RejectionReason.FUTURE)]
    table = pa.RecordBatch.from_pydict({"Pressure": [1.0, 2.0], "at": [now + 3600, now - 3600]})
    batch, rejections = AHEAD.decode(WideRows("f", table, ["a", "b"], 0, "at"))
    assert set(batch.record_ids) == {"b"}
    assert [(r.message_index, r.reason) for r in rejections] == [(0, RejectionReason.FUTURE)]


def test_accepted_messages_keep_their_times_beside_rejected_ones() -> None:
    data = make_messages(*[GOOD + b"}", b"junk"] * 3)
    times = np.arange(6) * SECOND + BROKER_TIME
    batch, _ = CODEC.decode(Messages("t", data.keys, data.payloads, times, data.partitions, data.offsets))
    assert batch.times.tolist() == times[::2].tolist()
