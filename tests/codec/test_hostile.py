"""What senders do by mistake or by intent: depth, sizes, numbers and times beyond bounds, odd text, clocks ahead."""

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
from deformer_stream.codec.encode_outputs import MAX_ALERT_BYTES
from deformer_stream.codec.payloads import Messages, UnreadablePayload, WideRows
from deformer_stream.engine.events import NO_TIME, Alert, Contribution, ExpectedRange, Rejection, RejectionReason
from tests.codec.test_json_messages import BROKER_TIME, CODEC, SCHEMA, decode, messages, readings, single
from tests.codec.test_tables import long

GOOD = b'{"record":"r","feature":"Pressure","value":1'
SECOND = 1_000_000


def nested(depth: int, inside: bytes = b"") -> bytes:
    return b"[" * depth + inside + b"]" * depth


# --- JSON itself


@pytest.mark.parametrize("depth", [1100, 5000, 100_000])
@pytest.mark.parametrize("end", [b"", b',"y":NaN'])
def test_depth_is_refused_by_either_parser(depth: int, end: bytes) -> None:
    """NaN sends a message to the less strict parser."""
    batch, (rejected,) = decode(GOOD + b',"x":' + nested(depth) + end + b"}")
    assert (len(batch), rejected.reason) == (0, RejectionReason.NOT_JSON)


def test_depth_that_the_parser_takes_does_no_harm() -> None:
    batch, rejected = decode(GOOD + b',"x":' + nested(900) + b"}", single([[[1]]]))
    assert readings(batch) == [("r", "Pressure", 1)]
    assert [r.reason for r in rejected] == [RejectionReason.WRONG_TYPE]
    _, (rejected,) = decode(GOOD + b',"x":' + nested(500) + b',"values":{"Pressure":NaN}}')
    assert rejected.reason is RejectionReason.NOT_JSON


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
def test_numbers_of_any_length(value: bytes, said: float) -> None:
    document = b'{"record":"r","feature":"Pressure","value":' + value + b"}"
    batch, rejected = decode(document, document[:-1] + b',"x":NaN}')
    assert (batch.values.tolist(), rejected) == ([said, said], [])


@pytest.mark.parametrize("value", [b"9" * 1_000_000, b"-" + b"9" * 401, b"1e400", b"1e99999999999999999999"])
def test_numbers_beyond_any_float(value: bytes) -> None:
    batch, (rejected,) = decode(b'{"record":"r","feature":"Pressure","value":' + value + b"}")
    assert (len(batch), rejected.reason) == (0, RejectionReason.NOT_FINITE)


def test_of_a_key_that_comes_twice_the_last_counts() -> None:
    batch, rejected = decode(
        GOOD + b',"value":2}',
        b'{"record":"q","record":"r","feature":"Current","feature":"Pressure","value":NaN,"value":3}',
        b'{"record":"r","values":{"Pressure":4,"Pressure":5}}',
        b'{"record":"r","record":null,"feature":"Pressure","value":6}',
        keys=[None, None, None, b"k"],
    )
    assert readings(batch) == [("r", "Pressure", 2), ("r", "Pressure", 3), ("r", "Pressure", 5), ("k", "Pressure", 6)]
    assert rejected == []


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig"])
def test_other_encodings_are_no_json(encoding: str) -> None:
    text = '{"record":"é","feature":"Pressure","value":1}'
    batch, (rejected,) = decode(text.encode(encoding))
    assert (len(batch), rejected.reason) == (0, RejectionReason.NOT_JSON)


def test_whole_numbers_are_exact_ids_by_either_parser() -> None:
    for number in (2**63, 2**64 - 1, -(2**63)):
        document = b'{"record":%d,"values":{"Pressure":1,"Current":NaN}}' % number
        batch, rejected = decode(document)
        assert readings(batch) == [(str(number), "Pressure", 1)]
        assert [r.reason for r in rejected] == [RejectionReason.NOT_FINITE]
    _, (rejected,) = decode(b'{"record":%d,"feature":"Pressure","value":1}' % 2**64)
    assert rejected.reason is RejectionReason.WRONG_TYPE


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
def test_odd_text_stays_what_it_is_and_breaks_no_line(text: str) -> None:
    batch, rejected = decode(single(1.0, record=text), single(text, "state"), single(1.0, text), single(text))
    assert batch.record_ids[0] == text
    assert batch.unseen_labels == {1: text}
    assert [r.reason for r in rejected] == [RejectionReason.UNKNOWN_FEATURE, RejectionReason.WRONG_TYPE]
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
    for refusal in rejected:
        assert refusal.detail.isprintable()
        assert len(refusal.detail.encode()) < 800


def test_an_alert_with_ever_so_many_long_labels_fits_its_topic() -> None:
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
def test_keys_that_stand_for_the_record(key: bytes | str, record: str) -> None:
    raw = key.encode() if isinstance(key, str) else key
    batch, rejected = decode({"feature": "Pressure", "value": 1.0}, keys=[raw])
    assert (batch.record_ids, rejected) == ([record], [])


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
def test_keys_that_cannot(key: bytes | None, reason: RejectionReason) -> None:
    batch, (rejected,) = decode({"feature": "Pressure", "value": 1.0}, keys=[key])
    assert (len(batch), rejected.reason) == (0, reason)
    assert len(rejected.detail) < 250


# --- a message has one refusal for each reason, however many readings it has


def test_many_bad_readings_are_one_refusal_for_each_reason() -> None:
    values: dict[str, Any] = {f"unknown-{i}": i for i in range(4000)}
    values |= {"Pressure": "high", "Current": math.inf, "state": "on"}
    batch, rejected = decode(single(1.0), {"record": "r", "values": values}, single(1.0, "nope"))
    assert readings(batch) == [("r", "Pressure", 1), ("r", "state", 1)]
    assert [(r.message_index, r.reason, r.num_readings) for r in rejected] == [
        (1, RejectionReason.UNKNOWN_FEATURE, 4000),
        (1, RejectionReason.WRONG_TYPE, 1),
        (1, RejectionReason.NOT_FINITE, 1),
        (2, RejectionReason.UNKNOWN_FEATURE, 1),
    ]
    assert rejected[0].detail == "feature 'unknown-0' is unknown to the model (and 3999 more of this message)"
    assert "more of this" not in rejected[1].detail


def test_merging_keeps_messages_in_order_and_counts_all() -> None:
    late, twice = RejectionReason.LATE, RejectionReason.DUPLICATE
    mixed = [Rejection(2, late, "a"), Rejection(0, late, "b"), Rejection(2, twice, "c"), Rejection(2, late, "d", 3)]
    assert Rejection.merge_by_message(mixed) == [
        Rejection(0, late, "b"),
        Rejection(2, late, "a (and 3 more of this message)", 4),
        Rejection(2, twice, "c"),
    ]
    assert Rejection.merge_by_message([]) == []


def test_what_the_connector_could_not_hand_over() -> None:
    data = messages(GOOD + b"}", UnreadablePayload(RejectionReason.TOO_LARGE, "3 messages of 5 GB", 3), GOOD + b"}")
    batch, rejected = CODEC.decode(data)
    assert batch.message_indices.tolist() == [0, 2]
    assert rejected == [Rejection(1, RejectionReason.TOO_LARGE, "3 messages of 5 GB", 3)]
    assert get_message(data, 1) == (None, b"")
    assert orjson.loads(encode_rejected(rejected[0], data))["payload"] == ""


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
def test_times_at_the_edges(when: Any, micros: int) -> None:
    batch, rejected = decode(single(1.0, time=when))
    assert (batch.times.tolist(), rejected) == ([micros], [])


@pytest.mark.parametrize(
    ("when", "says"),
    [
        (1583750073000, "these look like milliseconds"),
        (1583750073000000, "these look like microseconds"),
        (1583750073000000000, "these look like nanoseconds"),
        (1583750073000.25, "these look like milliseconds"),
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
def test_times_that_are_none(when: Any, says: str) -> None:
    batch, (rejected,) = decode(single(1.0, time=when))
    assert (len(batch), rejected.reason) == (0, RejectionReason.WRONG_TYPE)
    assert says in rejected.detail
    assert len(rejected.detail) < 250


def test_tables_say_it_in_the_same_words() -> None:
    _, rejected = long(
        record=["r"] * 3, feature=["Pressure"] * 3, value=[1.0] * 3, time=[1583750073000.0, 1e300, math.inf]
    )
    assert [r.reason for r in rejected] == [
        RejectionReason.WRONG_TYPE,
        RejectionReason.WRONG_TYPE,
        RejectionReason.NOT_FINITE,
    ]
    assert "these look like milliseconds" in rejected[0].detail


# --- clocks that are ahead

AHEAD = Codec(SCHEMA, window_assigner=WindowAssigner(10 * SECOND), max_ahead_micros=60 * SECOND)
NOW = BROKER_TIME // SECOND


@pytest.mark.parametrize("event", [{"record": "r"}, {"device": "d"}])
@pytest.mark.parametrize("form", [float, int, lambda s: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(s))])
def test_a_time_too_far_ahead_of_the_brokers(event: dict[str, Any], form: Any) -> None:
    documents = [single(1.0, **{"record": None, "time": form(NOW + s)} | event) for s in (-1e9, 0, 59, 60, 61, 1e9)]
    batch, rejected = decode(*documents, codec=AHEAD)
    assert batch.message_indices.tolist() == [0, 1, 2, 3]
    assert [(r.message_index, r.reason) for r in rejected] == [(4, RejectionReason.FUTURE), (5, RejectionReason.FUTURE)]
    assert rejected[0].detail == (
        "time 2023-11-14T22:14:21Z lies more than 60 s after 2023-11-14T22:13:20Z, the time at which the message arrived"
    )
    assert decode(*documents)[0].message_indices.tolist() == ([0, 1, 2, 3, 4, 5] if "record" in event else []), (
        "only when set"
    )


def test_without_a_time_of_its_own_an_event_is_not_ahead() -> None:
    data = messages(GOOD + b"}", GOOD + b',"time":null}')
    data.times[:] = (time.time_ns() // 1000 + 10**12, BROKER_TIME)
    assert AHEAD.decode(data)[1] == []


@pytest.mark.parametrize("stamp", [NO_TIME, 2**62])
def test_without_a_time_of_the_broker_the_wall_clock_counts(stamp: int) -> None:
    now = time.time()
    data = messages(*(GOOD + b',"time":%f}' % (now + s) for s in (-1e9, 0.0, 3600.0)))
    data.times[:] = stamp
    batch, rejected = AHEAD.decode(data)
    assert batch.message_indices.tolist() == [0, 1]
    assert [(r.message_index, r.reason) for r in rejected] == [(2, RejectionReason.FUTURE)]


def test_rows_of_tables_that_are_ahead() -> None:
    now = time.time()
    batch, rejected = long(
        AHEAD, record=["r"] * 3, feature=["Pressure"] * 3, value=[1.0] * 3, time=[now - 1e9, now + 3600, None]
    )
    assert batch.message_indices.tolist() == [0, 2]
    assert [(r.message_index, r.reason) for r in rejected] == [(1, RejectionReason.FUTURE)]
    table = pa.RecordBatch.from_pydict({"Pressure": [1.0, 2.0], "at": [now + 3600, now - 3600]})
    batch, rejected = AHEAD.decode(WideRows("f", table, ["a", "b"], 0, "at"))
    assert set(batch.record_ids) == {"b"}
    assert [(r.message_index, r.reason) for r in rejected] == [(0, RejectionReason.FUTURE)]


def test_neighbours_of_refused_messages_keep_their_own_times() -> None:
    data = messages(*[GOOD + b"}", b"junk"] * 3)
    times = np.arange(6) * SECOND + BROKER_TIME
    batch, _ = CODEC.decode(Messages("t", data.keys, data.payloads, times, data.partitions, data.offsets))
    assert batch.times.tolist() == times[::2].tolist()
