"""Topics and payloads of MQTT as events, and what is rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest

from deformer_stream.codec import Codec, WindowAssigner
from deformer_stream.codec.bridge_messages import (
    BridgeMessage,
    PrefixTranslator,
    TopicPattern,
    Translation,
    ValueTranslator,
    make_event,
)
from deformer_stream.codec.payloads import Messages
from deformer_stream.codec.timestamps import TimeFormat
from deformer_stream.codec.validation import FieldNames
from deformer_stream.errors import ConfigError
from tests.models import SCHEMA

NOW = 1_700_000_000_250_000


def translate(pattern: str | None, topic: str, payload: bytes | str, **options: Any) -> Translation:
    """Return what follows from one message."""
    translator = ValueTranslator(TopicPattern(pattern), FieldNames(), **options)
    translation = Translation()
    data = payload.encode() if isinstance(payload, str) else payload
    translator.translate(BridgeMessage(topic, data, NOW), translation)
    return translation


def read_event(translation: Translation) -> dict[str, Any]:
    """Return the only event of a translation without rejections."""
    assert translation.rejections == []
    (event,) = translation.events
    document: dict[str, Any] = orjson.loads(event.value)
    assert event.key.decode() == document["device"]
    assert event.num_readings == len(document.get("values", "1"))
    return document


@pytest.mark.parametrize(
    ("payload", "value"),
    [
        ("12.5", 12.5),
        ("-3", -3),
        (" 7 ", 7),
        ("+5", 5.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("1e3", 1000.0),
        ("true", True),
        ("null", None),
        ('"on"', "on"),
        ("on", "on"),
        ("läuft", "läuft"),
        ('{"value": 4}', 4),
        ('{"value": "on"}', "on"),
        ("12,5", "12,5"),
        ("1_000", "1_000"),
    ],
)
def test_values(payload: str, value: Any) -> None:
    event = read_event(translate("plant/{device}/{feature}", "plant/pump/flow", payload))
    assert event == {"device": "pump", "feature": "flow", "value": value, "time": 1_700_000_000.25}
    assert type(event["value"]) is type(value)


@pytest.mark.parametrize(
    ("pattern", "topic", "device", "feature"),
    [
        (None, "plant/hall/pump/flow", "plant/hall/pump", "flow"),
        ("{device}/{feature}", "p/f", "p", "f"),
        ("a/{device}/{device}/{feature}", "a/hall/pump/f", "hall/pump", "f"),
        ("+/{device}/+/{feature}/#", "x/p/y/f/z/z", "p", "f"),
        ("+/{device}/{feature}/#", "x/p/f", "p", "f"),
        ("{feature}/of/{device}", "f/of/p", "p", "f"),
    ],
)
def test_patterns(pattern: str | None, topic: str, device: str, feature: str) -> None:
    event = read_event(translate(pattern, topic, "1"))
    assert (event["device"], event["feature"]) == (device, feature)


@pytest.mark.parametrize(
    ("pattern", "filter"), [(None, "#"), ("a/{device}/+/{feature}", "a/+/+/+"), ("{device}/{feature}/#", "+/+/#")]
)
def test_filter_of_a_pattern(pattern: str | None, filter: str) -> None:
    assert TopicPattern(pattern).filter == filter


@pytest.mark.parametrize("pattern", ["", "a//b", "{x}", "a{device}", "#/a", "a#", "a/{device", "+a", "\0"])
def test_texts_that_are_no_pattern(pattern: str) -> None:
    with pytest.raises(ConfigError, match="--pattern"):
        TopicPattern(pattern)


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ('{"values": {"a": 1, "b": "x"}}', {"values": {"a": 1, "b": "x"}, "time": 1_700_000_000.25}),
        ('{"a": 1, "b": null, "time": 5}', {"values": {"a": 1, "b": None}, "time": 5.0}),
        ('{"feature": "a", "value": 1, "time": "1970-01-01T00:00:05Z"}', {"feature": "a", "value": 1, "time": 5.0}),
    ],
)
def test_objects_of_a_device(payload: str, expected: dict[str, Any]) -> None:
    assert read_event(translate("{device}", "p", payload)) == {"device": "p", **expected}


def test_the_payload_can_name_the_device() -> None:
    assert read_event(translate("in/#", "in/x", '{"device": 7, "a": 1}'))["device"] == "7"


def test_times_without_a_zone() -> None:
    payload = '{"value": 1, "time": "2020-03-09 11:34:33"}'
    berlin = TimeFormat.from_names("s", "Europe/Berlin")
    assert read_event(translate(None, "p/f", payload, time_format=berlin))["time"] == 1583750073.0
    (rejection,) = translate(None, "p/f", payload).rejections
    assert "--timezone" in rejection.detail


@pytest.mark.parametrize(("unit", "number"), [("s", 1583750073.25), ("ms", 1583750073250), ("us", 1583750073250000)])
def test_time_units(unit: Any, number: float) -> None:
    payload = orjson.dumps({"value": 1, "time": number})
    assert read_event(translate(None, "p/f", payload, time_format=TimeFormat(unit)))["time"] == 1583750073.25


@pytest.mark.parametrize(
    ("pattern", "topic", "payload", "reason"),
    [
        (None, "flow", "1", "unknown_topic"),
        ("a/{device}/{feature}", "b/p/f", "1", "unknown_topic"),
        ("a/{device}/{feature}", "a/p", "1", "unknown_topic"),
        ("a/{device}/{feature}", "a/p/f/g", "1", "unknown_topic"),
        (None, "p/" + "f" * 1025, "1", "too_large"),
        (None, "p/", "1", "missing_field"),
        (None, "p/f", "", "missing_field"),
        (None, "p/f", "  ", "missing_field"),
        (None, "p/f", b"\xff\xfe", "not_json"),
        (None, "p/f", '{"value": 1', "not_json"),
        (None, "p/f", "[1", "not_json"),
        (None, "p/f", '{"value": NaN}', "not_json"),
        (None, "p/f", "nan", "not_finite"),
        (None, "p/f", "-Infinity", "not_finite"),
        (None, "p/f", "+1e999", "not_finite"),
        (None, "p/f", "[1, 2]", "wrong_type"),
        (None, "p/f", '{"value": [1]}', "wrong_type"),
        (None, "p/f", '{"value": {"a": 1}}', "wrong_type"),
        (None, "p/f", '{"x": 1}', "missing_field"),
        (None, "p/f", '{"values": 1}', "wrong_type"),
        (None, "p/f", '{"values": {}}', "missing_field"),
        (None, "p/f", '{"values": {"": 1}}', "missing_field"),
        (None, "p/f", "x" * 1025, "too_large"),
        (None, "p/f", "1" * 5000, "too_large"),
        (None, "p/f", '{"value": 1, "time": true}', "wrong_type"),
        (None, "p/f", '{"value": 1, "time": "yesterday"}', "wrong_type"),
        (None, "p/f", '{"value": 1, "time": 1e300}', "wrong_type"),
        (None, "p/f", '{"value": 1, "time": 1583750073250}', "wrong_type"),
        ("{device}", "p", "1", "missing_field"),
        ("{device}", "p", '{"value": 1}', "missing_field"),
        ("{device}", "p", '{"value": 1, "feature": ["a"]}', "wrong_type"),
        ("{device}", "p", '{"time": 1}', "missing_field"),
        ("{feature}", "f", "1", "missing_field"),
        ("{feature}", "f", '{"value": 1, "device": 1.5}', "wrong_type"),
        ("{feature}", "f", '{"value": 1, "device": ""}', "missing_field"),
    ],
)
def test_what_is_rejected(pattern: str | None, topic: str, payload: bytes | str, reason: str) -> None:
    found = translate(pattern, topic, payload, max_bytes=4096)
    assert found.events == []
    (rejection,) = found.rejections
    assert rejection.reason == reason
    assert "\n" not in rejection.detail
    assert rejection.message.topic == topic


def test_one_bad_value_does_not_reject_the_others() -> None:
    found = translate("{device}", "p", '{"a": 1, "b": [2], "c": 3}')
    assert [orjson.loads(event.value)["values"] for event in found.events] == [{"a": 1, "c": 3}]
    assert [rejection.reason for rejection in found.rejections] == ["wrong_type"]


def test_large_numbers_of_readings_are_rejected() -> None:
    payload = orjson.dumps({"values": {str(i): i for i in range(4097)}})
    assert [rejection.reason for rejection in translate(None, "p/f", payload).rejections] == ["too_large"]


def test_consume_reads_the_events_and_no_microsecond_is_lost() -> None:
    codec = Codec(SCHEMA, window_assigner=WindowAssigner(10_000_000, 0))
    for time in (NOW, NOW + 1, -1, 4_102_444_799_999_999):
        event = make_event("pump", {"temperature": 1.5}, time)
        number = np.zeros(1, np.int64)
        poll = Messages("sensors", [event.key], [event.value], number, number.astype(np.int32), number)
        batch, rejections = codec.decode(poll)
        assert rejections == []
        assert batch.times.tolist() == [time]
        assert batch.values.tolist() == [1.5]


def test_topics_with_a_prefix_have_another_translator() -> None:
    first, second = (ValueTranslator(TopicPattern(text), FieldNames()) for text in ("sp/{device}/{feature}", None))
    translation = Translation()
    for topic in ("sp/a/b", "x/sp/a/b"):
        PrefixTranslator({"sp/": first}, second).translate(BridgeMessage(topic, b"1", NOW), translation)
    assert [orjson.loads(event.value)["device"] for event in translation.events] == ["a", "x/sp/a"]
