"""Tests of the public event format: what is accepted, what is rejected and why, and that decoding never raises."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.codec import (
    MAX_TEXT_CHARS,
    Codec,
    FieldNames,
    encode_rejected,
    format_rfc3339,
    get_message,
    get_position,
)
from deformer_stream.codec.columns import parse_labels
from deformer_stream.codec.payloads import WideRows
from deformer_stream.engine.events import NO_TIME, Rejection, RejectionReason
from deformer_stream.model.schema import Feature, Schema
from tests.codec.json_examples import BROKER_TIME, CODEC, SCHEMA, decode, list_readings, make_messages, make_reading

# --- messages that are accepted


def test_message_with_one_reading() -> None:
    batch, rejections = decode(make_reading(0.25, time=1583750073.25))
    assert list_readings(batch) == [("r", "Pressure", 0.25)]
    assert (batch.times.tolist(), batch.message_indices.tolist(), batch.partitions.tolist()) == (
        [1583750073250000],
        [0],
        [2],
    )
    assert rejections == []


def test_message_with_many_readings() -> None:
    values = {"Pressure": 1.5, "state": "on", "Current": None}
    batch, rejections = decode(make_reading(7), {"record": "q", "time": "2020-03-09T10:34:33Z", "values": values})
    assert list_readings(batch) == [
        ("r", "Pressure", 7),
        ("q", "Pressure", 1.5),
        ("q", "state", 1),
        ("q", "Current", None),
    ]
    assert batch.message_indices.tolist() == [0, 1, 1, 1]
    assert batch.times.tolist() == [BROKER_TIME] + [1583750073000000] * 3
    assert rejections == []


@pytest.mark.parametrize(
    ("time", "micros"),
    [
        (1583750073, 1583750073000000),
        (1583750073.000001, 1583750073000001),
        (-0.5, -500000),
        ("2020-03-09T10:34:33Z", 1583750073000000),
        ("2020-03-09t10:34:33z", 1583750073000000),
        ("2020-03-09 11:34:33.5+01:00", 1583750073500000),
        ("2020-03-09T10:34:33.123456789Z", 1583750073123456),
        (None, BROKER_TIME),
    ],
)
def test_times_of_all_forms(time: Any, micros: int) -> None:
    batch, rejections = decode(make_reading(1.0, time=time))
    assert batch.times.tolist() == [micros]
    assert rejections == []


@pytest.mark.parametrize(
    ("value", "code", "unseen"),
    [
        ("off", 0, {}),
        (3, 2, {}),
        (3.0, 2, {}),
        (True, 3, {}),
        ("true", 3, {}),
        ("broken", 4, {0: "broken"}),
        (False, 4, {0: "false"}),
        (2.5, 4, {0: "2.5"}),
        ("", 4, {0: ""}),
    ],
)
def test_labels_are_canonical_and_unseen_labels_are_kept(value: Any, code: int, unseen: dict[int, str]) -> None:
    batch, rejections = decode(make_reading(value, "state"))
    assert (batch.values.tolist(), batch.unseen_labels, rejections) == ([code], unseen, [])


@pytest.mark.parametrize("labels", [("false", "true"), ("0", "1")])
@pytest.mark.parametrize(
    ("value", "code"), [(False, 0), (True, 1), (0, 0), (1, 1), (1.0, 1), ("0", 0), ("true", 1), (2, 2), ("yes", 2)]
)
def test_booleans_may_be_numbers(labels: tuple[str, str], value: object, code: int) -> None:
    """One program writes false and true, and another one 0 and 1: in messages and in tables."""
    schema = Schema((Feature("valve", "discrete", labels=labels),))
    batch, rejections = decode({"record": "r", "feature": "valve", "value": value}, codec=Codec(schema))
    assert (batch.values.tolist(), rejections) == ([code], [])
    assert parse_labels(pa.array([value, None]), schema.code_by_label[0], "valve")[0].tolist()[0] == code


def test_only_booleans_may_be_numbers() -> None:
    assert parse_labels(pa.array([0, 1]), {"false": 0, "true": 1, "unknown": 2}, "x")[0].tolist() == [0, 1]
    assert parse_labels(pa.array([True, False]), {"0": 0, "1": 1, "true": 2}, "x")[0].tolist() == [2, 0]
    assert parse_labels(pa.array([0, 1]), {"a": 0, "true": 1}, "x")[0].tolist() == [2, 2]


def test_null_declares_that_a_feature_will_not_be_observed() -> None:
    batch, rejections = decode(make_reading(None), make_reading(None, "state"))
    assert list_readings(batch) == [("r", "Pressure", None), ("r", "state", None)]
    assert rejections == []


def test_record_ids_are_text_integers_or_the_message_key() -> None:
    absent = {"feature": "Pressure", "value": 1.0}
    batch, rejections = decode(
        make_reading(1.0, record=17), absent, {**absent, "record": None}, keys=[b"k", "é".encode(), b"k2"]
    )
    assert batch.record_ids == ["17", "é", "k2"]
    assert rejections == []


def test_field_names_are_configurable() -> None:
    fields = FieldNames(record="id", feature="sensor", value="v", values="all", time="at")
    codec = Codec(SCHEMA, fields)
    batch, rejections = decode(
        {"id": "a", "sensor": "Pressure", "v": 1, "at": 5},
        {"id": "b", "all": {"Current": 2}},
        make_reading(1.0),
        codec=codec,
    )
    assert list_readings(batch) == [("a", "Pressure", 1), ("b", "Current", 2)]
    assert [(r.message_index, r.reason) for r in rejections] == [(2, RejectionReason.MISSING_FIELD)]


def test_field_names_need_not_be_distinct() -> None:
    codec = Codec(SCHEMA, FieldNames(value="v", values="v"))
    batch, rejections = decode({"record": "a", "v": {"Pressure": 1.5}}, codec=codec)
    assert list_readings(batch) == [("a", "Pressure", 1.5)]
    assert rejections == []


@pytest.mark.parametrize("unknown_field", [b'"x":"\xff"', b'"\xff":1', b'"x":"\xed\xa0\x80"', b'"x":"\\ud800"'])
def test_invalid_text_in_an_unknown_field_is_rejected(unknown_field: bytes) -> None:
    batch, rejections = decode(b'{"record":"r","feature":"Pressure","value":1.5,' + unknown_field + b"}")
    assert len(batch) == 0
    assert [r.reason for r in rejections] == [RejectionReason.NOT_JSON]


def test_numbers_at_the_limits_of_float64() -> None:
    batch, rejections = decode(
        make_reading(2**64 - 1), b'{"record":"r","feature":"Pressure","value":' + b"1" * 300 + b"}", make_reading(-0.0)
    )
    assert batch.values.tolist() == [float(2**64 - 1), float("1" * 300), 0.0]
    assert rejections == []


def test_impossible_broker_times_are_ignored() -> None:
    data = make_messages(b'{"record":"r","feature":"Pressure","value":1}')
    for time in (NO_TIME, -(2**62), 2**62):
        data.times[0] = time
        assert CODEC.decode(data)[0].times.tolist() == [NO_TIME]


# --- messages that are rejected: every reason, with what it says

SURROGATE = b'{"record":"\\ud800","feature":"state","value":"on"}'
REJECTED: list[tuple[Any, RejectionReason, str]] = [
    (None, RejectionReason.NOT_JSON, "tombstone"),
    (b"", RejectionReason.NOT_JSON, "zero-length"),
    (b"pressure=3", RejectionReason.NOT_JSON, "unexpected"),
    (b'{"record":"r"', RejectionReason.NOT_JSON, ""),
    (b'{"record":"\xff","feature":"Pressure","value":1}', RejectionReason.NOT_JSON, "UTF-8"),
    (b"\xef\xbb\xbf{}", RejectionReason.NOT_JSON, "BOM"),
    (b"[1, 2]", RejectionReason.NOT_JSON, "the message is a list; a JSON object is expected"),
    (b'"text"', RejectionReason.NOT_JSON, "the message is text; a JSON object"),
    (b"NaN", RejectionReason.NOT_JSON, "the message is a number; a JSON object"),
    (b"null", RejectionReason.NOT_JSON, "the message is null; a JSON object"),
    (b"[" * 100_000, RejectionReason.NOT_JSON, "depth"),
    (b'{"a":' * 20_000 + b"1" + b"}" * 20_000, RejectionReason.NOT_JSON, "depth"),
    (SURROGATE, RejectionReason.NOT_JSON, "surrogate"),
    (SURROGATE.replace(b"on", b"\\udfff"), RejectionReason.NOT_JSON, "surrogate"),
    ({}, RejectionReason.MISSING_FIELD, "'record' is missing"),
    ({}, RejectionReason.MISSING_FIELD, 'send {"record": …, "values": {"NAME": VALUE}}, or feature and value'),
    ({"Pressure": 1.0}, RejectionReason.MISSING_FIELD, "; the field 'Pressure' is a feature: it belongs into 'values'"),
    (
        {"Pressure": 1.0, "x": 1, "state": "on"},
        RejectionReason.MISSING_FIELD,
        "'record' is missing, and no message key replaces it (lines of files have none)",
    ),
    (
        {"record": "r", "Pressure": 1.0, "x": 1, "state": "on"},
        RejectionReason.MISSING_FIELD,
        "are both missing; send one of them; 2 fields, such as 'Pressure', are features: they belong into 'values'",
    ),
    (make_reading(1.0, record=""), RejectionReason.MISSING_FIELD, "'record' is empty"),
    ({"record": "r", "value": 1.0}, RejectionReason.MISSING_FIELD, "'feature' and 'values' are both missing"),
    ({"record": "r", "feature": "Pressure"}, RejectionReason.MISSING_FIELD, "'value' is missing"),
    ({"record": "r", "values": {}}, RejectionReason.MISSING_FIELD, "'values' is empty"),
    (make_reading(1.0, "Presure"), RejectionReason.UNKNOWN_FEATURE, "feature 'Presure' is unknown to the model"),
    (make_reading(1.0, "x\ny" + "z" * 5000), RejectionReason.UNKNOWN_FEATURE, "feature 'x\\ny"),
    (make_reading(1.0, record=1.5), RejectionReason.WRONG_TYPE, "'record' is a number"),
    (make_reading(1.0, record=True), RejectionReason.WRONG_TYPE, "'record' is a boolean"),
    (make_reading(1.0, record=["r"]), RejectionReason.WRONG_TYPE, "'record' is a list"),
    (make_reading(1.0, 5), RejectionReason.WRONG_TYPE, "'feature' is a number"),
    (make_reading(1.0, ["Pressure"]), RejectionReason.WRONG_TYPE, "'feature' is a list"),
    (make_reading("0.5"), RejectionReason.WRONG_TYPE, "feature 'Pressure': the value is text; a number is expected"),
    (make_reading(True), RejectionReason.WRONG_TYPE, "feature 'Pressure': the value is a boolean; a number"),
    (make_reading([1.0]), RejectionReason.WRONG_TYPE, "feature 'Pressure': the value is a list; a number"),
    (make_reading({"a": 1}, "state"), RejectionReason.WRONG_TYPE, "feature 'state': the value is an object; a label"),
    ({"record": "r", "values": [1]}, RejectionReason.WRONG_TYPE, "'values' is a list"),
    (make_reading(1.0, values={"Pressure": 1}), RejectionReason.WRONG_TYPE, "'feature' and 'values' are both present"),
    (make_reading(1.0, time=True), RejectionReason.WRONG_TYPE, "'time' is a boolean"),
    (make_reading(1.0, time=[1]), RejectionReason.WRONG_TYPE, "'time' is a list"),
    (make_reading(1.0, time="yesterday"), RejectionReason.WRONG_TYPE, "not RFC 3339"),
    (make_reading(1.0, time="2020-03-09T10:34:33"), RejectionReason.WRONG_TYPE, "no UTC offset"),
    (make_reading(1.0, time=1583750073000), RejectionReason.WRONG_TYPE, "send seconds since 1970"),
    (make_reading(1.0, time="0001-01-01T00:00:00+23:00"), RejectionReason.WRONG_TYPE, "years 1 to 9999"),
    (make_reading(1.0, time=math.nan), RejectionReason.NOT_FINITE, "time is not finite"),
    (make_reading(math.nan), RejectionReason.NOT_FINITE, "feature 'Pressure': nan is not a finite number"),
    (make_reading(-math.inf), RejectionReason.NOT_FINITE, "-inf"),
    (make_reading(math.inf, "state"), RejectionReason.NOT_FINITE, "feature 'state': inf"),
    (b'{"record":"r","feature":"Pressure","value":1e999}', RejectionReason.NOT_FINITE, "inf"),
    (b'{"record":"r","feature":"Pressure","value":-' + b"9" * 100_000 + b"}", RejectionReason.NOT_FINITE, "inf"),
    (make_reading(1.0, record="r" * (MAX_TEXT_CHARS + 1)), RejectionReason.TOO_LARGE, "1025 characters"),
    (make_reading("x" * (MAX_TEXT_CHARS + 1), "state"), RejectionReason.TOO_LARGE, "label has 1025 characters"),
    (make_reading(1.0, padding="x" * 2**20), RejectionReason.TOO_LARGE, "at most 1048576 are accepted"),
    ({"record": "r", "values": {f"f{i}": 1 for i in range(5000)}}, RejectionReason.TOO_LARGE, "5000 readings"),
]


@pytest.mark.parametrize(("document", "reason", "expected_text"), REJECTED)
def test_rejections_state_reason_and_detail(document: Any, reason: RejectionReason, expected_text: str) -> None:
    good = make_reading(1.0, record="good")
    batch, rejections = decode(good, document, good)
    assert [(r.message_index, r.reason) for r in rejections] == [(1, reason)]
    assert expected_text in rejections[0].detail
    assert "\n" not in rejections[0].detail
    assert len(rejections[0].detail) < 250
    assert batch.message_indices.tolist() == [0, 2]  # its neighbours are unharmed


def test_binary_message_key_cannot_replace_the_record_id() -> None:
    batch, rejections = decode({"feature": "Pressure", "value": 1.0}, keys=[b"\xff"])
    assert (len(batch), rejections[0].reason, "UTF-8" in rejections[0].detail) == (
        0,
        RejectionReason.MISSING_FIELD,
        True,
    )


@pytest.mark.parametrize("bad", ['"text"', "NaN", "1e999", "true", "[]"])
def test_one_bad_reading_among_many_is_rejected_alone(bad: str) -> None:
    payload = f'{{"record":"r","values":{{"Pressure":{bad},"Current":2.5,"nope":1,"state":"on"}}}}'.encode()
    batch, rejections = decode(payload)
    assert list_readings(batch) == [("r", "Current", 2.5), ("r", "state", 1)]
    assert "'Pressure'" in rejections[0].detail
    assert rejections[1].reason is RejectionReason.UNKNOWN_FEATURE


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
words = st.sampled_from(["record", "feature", "value", "values", "time", "Pressure", "state", "on"])
objects = st.dictionaries(words, json_values | words | st.dictionaries(words, json_values, max_size=4), max_size=6)
good_bytes = objects.map(lambda document: json.dumps(document).encode())
mutated = st.builds(
    lambda data, at, junk: data[: at % (len(data) + 1)] + junk + data[at % (len(data) + 1) + len(junk) // 2 :],
    good_bytes,
    st.integers(0, 500),
    st.binary(max_size=4),
)


@given(
    st.lists(st.none() | st.binary(max_size=40) | good_bytes | mutated, max_size=8), st.none() | st.binary(max_size=6)
)
def test_decoding_never_raises_and_accounts_for_every_message(payloads: list[bytes | None], key: bytes | None) -> None:
    data = make_messages(*payloads, keys=[key] * len(payloads))
    batch, rejections = CODEC.decode(data)
    assert set(batch.message_indices.tolist()) | {r.message_index for r in rejections} == set(range(len(payloads)))
    assert np.isfinite(batch.values[~np.isnan(batch.values)]).all()
    assert len(batch) == len(batch.features) == len(batch.values) == len(batch.times) == len(batch.partitions)
    assert batch.message_indices.tolist() == sorted(batch.message_indices.tolist())
    for text in [*batch.record_ids, *batch.unseen_labels.values(), *(r.detail for r in rejections)]:
        assert len(text.encode()) > 0 or text in batch.unseen_labels.values()
    for rejection in rejections:
        assert json.loads(encode_rejected(rejection, data))["source"] == {
            "topic": "t",
            "partition": 2,
            "offset": 100 + rejection.message_index,
        }


@given(
    st.text(min_size=1, max_size=20).filter(lambda t: not any("\ud800" <= c <= "\udfff" for c in t)),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_finite_values_are_decoded_exactly(record: str, value: float) -> None:
    batch, rejections = decode(make_reading(value, record=record), {"record": record, "values": {"Current": value}})
    assert (batch.record_ids, batch.values.tolist(), rejections) == ([record] * 2, [value] * 2, [])


# --- outward


def test_position_and_content_of_messages_and_rows() -> None:
    data = make_messages(b"a", None, keys=[b"k", None])
    assert [get_position(data, i) for i in range(2)] == [("t", 2, 100), ("t", 2, 101)]
    assert [get_message(data, i) for i in range(2)] == [(b"k", b"a"), (None, b"")]
    table = pa.RecordBatch.from_pydict(
        {"Pressure": [1.0, math.nan], "when": pa.array([1, 1_500_000_001], pa.timestamp("ns")), "raw": [b"\xff", b""]}
    )
    rows = WideRows("f.parquet", table, ["a", "b"], 40)
    assert get_position(rows, 1) == ("f.parquet", 0, 41)
    key, row = get_message(rows, 1)
    assert key == b"b"
    assert orjson.loads(row) == {"Pressure": None, "when": "1970-01-01T00:00:01.500000", "raw": "b''"}


def test_format_rfc3339() -> None:
    assert format_rfc3339(1583750073000000) == "2020-03-09T10:34:33Z"
    assert format_rfc3339(1583750073000001) == "2020-03-09T10:34:33.000001Z"
    assert format_rfc3339(-62135596800000000) == "0001-01-01T00:00:00Z"
    assert format_rfc3339(NO_TIME) is None


def test_binary_dead_letter_is_base64() -> None:
    letter = orjson.loads(
        encode_rejected(Rejection(0, RejectionReason.NOT_JSON, "why"), make_messages(b"\xff\x00", keys=[b"\xfe"]))
    )
    assert letter == {
        "reason": "not_json",
        "detail": "why",
        "source": {"topic": "t", "partition": 2, "offset": 100},
        "key_base64": "/g==",
        "payload_base64": "/wA=",
    }
