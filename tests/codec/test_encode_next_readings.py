"""Tests of the JSON of suspicious records."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from deformer_stream.codec.encode_next_readings import (
    MAX_MESSAGE_BYTES,
    decode_suspicious_record,
    encode_suspicious_record,
    encode_withdrawn_record,
)
from deformer_stream.engine.events import NO_TIME, SuggestedReading
from deformer_stream.errors import InputError
from tests.codec.next_reading_examples import RECORD


def test_the_keys_are_those_of_the_public_format() -> None:
    assert json.loads(encode_suspicious_record(RECORD)) == {
        "record": "hall-2/pump-07@2020-03-09T10:34:30Z",
        "device": "hall-2/pump-07",
        "partition": 3,
        "time": "2020-03-09T10:34:33.500000Z",
        "p_value": 0.0421,
        "features_seen": 5,
        "features_expected": 8,
        "next_reading": {"feature": "flow", "alpha": 0.01, "alert_probability": 0.42, "score_rise": 2.5},
        "expires": "2020-03-09T10:35:03.500000Z",
        "model": "0123456789abcdef",
    }
    assert json.loads(encode_withdrawn_record(3, "r")) == {"record": "r", "partition": 3, "next_reading": None}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"time": NO_TIME, "expires": None},
        {"next_reading": SuggestedReading("<b>", None, None, -0.5)},
        {"record": "r", "p_value": 1.0, "features_seen": 0},
    ],
)
def test_a_record_is_decoded_as_it_was_encoded(changes: dict[str, Any]) -> None:
    record = replace(RECORD, **changes)
    assert decode_suspicious_record(encode_suspicious_record(record)) == record


def test_keys_of_a_later_release_are_ignored() -> None:
    document = json.loads(encode_suspicious_record(RECORD))
    document["later"] = document["next_reading"]["later"] = [1]
    assert decode_suspicious_record(json.dumps(document).encode()) == RECORD


@pytest.mark.parametrize(
    "changes",
    [
        {"p_value": 1.5},
        {"p_value": "0.1"},
        {"features_seen": -1},
        {"record": None},
        {"time": "yesterday"},
        {"expires": "2020-13-01T00:00:00Z"},
        {"next_reading": None},
        {"next_reading": {"feature": "flow", "alert_probability": 2}},
        {"next_reading": {"alpha": 0.1}},
    ],
)
def test_other_messages_are_refused(changes: dict[str, Any]) -> None:
    document = json.loads(encode_suspicious_record(RECORD)) | changes
    with pytest.raises(InputError, match="not a suspicious record"):
        decode_suspicious_record(json.dumps(document).encode())


@pytest.mark.parametrize("payload", [b"", b"null", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(payload: bytes) -> None:
    with pytest.raises(InputError, match="not a suspicious record"):
        decode_suspicious_record(payload)


def test_large_messages_are_refused() -> None:
    with pytest.raises(InputError, match="at most"):
        decode_suspicious_record(b" " * (MAX_MESSAGE_BYTES + 1))
