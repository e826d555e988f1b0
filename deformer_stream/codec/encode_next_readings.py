"""Suspicious records as JSON: the messages of `TOPIC-next-readings` and the lines of `replay --suspicious-records`.

A message of the topic is valid until the next one with the same key, the record id. A message without a value says that
the record has changed, and that no reading is stated for it. In a file, a line with `"next_reading": null` says so.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import orjson

from deformer_stream.codec.timestamps import format_rfc3339, parse_rfc3339
from deformer_stream.codec.validation import RejectionError, quote
from deformer_stream.engine.events import NO_TIME, SuggestedReading, SuspiciousRecord
from deformer_stream.errors import InputError
from deformer_stream.incidents.device import extract_device

MAX_MESSAGE_BYTES = 2**17
"""Maximum size of a message that is decoded. It exceeds what this program writes, for messages of later releases."""

_Probability = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _NextReadingJson(msgspec.Struct, frozen=True):
    """The reading to take next."""

    feature: str
    alpha: _Probability | None = None
    alert_probability: _Probability | None = None
    score_rise: float = 0.0


class _SuspiciousRecordJson(msgspec.Struct, frozen=True):
    """A suspicious record as JSON. Keys that a later release adds are ignored."""

    record: str
    p_value: _Probability
    features_seen: _Count
    features_expected: _Count
    next_reading: _NextReadingJson
    partition: _Count = 0
    time: str | None = None
    expires: str | None = None
    model: str = ""


_DECODER = msgspec.json.Decoder(_SuspiciousRecordJson)


def encode_suspicious_record(record: SuspiciousRecord) -> bytes:
    """Return a suspicious record as a JSON object, with its keys in the order of the public format."""
    document: dict[str, Any] = {
        "record": record.record,
        "device": extract_device(record.record),
        "partition": record.partition,
        "time": format_rfc3339(record.time),
        "p_value": record.p_value,
        "features_seen": record.features_seen,
        "features_expected": record.features_expected,
        "next_reading": record.next_reading,
        "expires": None if record.expires is None else format_rfc3339(record.expires),
        "model": record.model,
    }
    return orjson.dumps(document)


def encode_withdrawn_record(partition: int, record: str) -> bytes:
    """Return the line of a file that says that no reading is stated for a record any more."""
    return orjson.dumps({"record": record, "partition": partition, "next_reading": None})


def decode_suspicious_record(payload: bytes) -> SuspiciousRecord:
    """Return the suspicious record of a JSON object. Keys that are unknown are ignored.

    Raises:
        InputError: The payload is not a suspicious record.
    """
    if len(payload) > MAX_MESSAGE_BYTES:
        raise InputError(
            f"the message has {len(payload)} bytes, a suspicious record has at most {MAX_MESSAGE_BYTES}: check that "
            "the topic holds suspicious records"
        )
    try:
        message = _DECODER.decode(payload)
        return SuspiciousRecord(
            message.record,
            message.partition,
            time=NO_TIME if message.time is None else parse_rfc3339(message.time),
            p_value=message.p_value,
            features_seen=message.features_seen,
            features_expected=message.features_expected,
            next_reading=SuggestedReading(
                message.next_reading.feature,
                message.next_reading.alpha,
                message.next_reading.alert_probability,
                message.next_reading.score_rise,
            ),
            expires=None if message.expires is None else parse_rfc3339(message.expires),
            model=message.model,
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, RejectionError, ValueError) as error:
        raise InputError(
            f"the message is not a suspicious record ({quote(str(error), 200)}): check that the topic holds "
            "suspicious records"
        ) from None
