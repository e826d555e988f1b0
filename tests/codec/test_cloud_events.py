"""Tests of the CloudEvents attributes of messages."""

from __future__ import annotations

from deformer_stream.codec.cloud_events import make_attributes, make_headers, make_source
from deformer_stream.engine.events import NO_TIME


def test_headers_of_a_kafka_message() -> None:
    assert make_headers("alert", "6e0a", make_source("sensors", 2), 1_583_750_073_500_000) == [
        ("ce_specversion", b"1.0"),
        ("ce_id", b"6e0a"),
        ("ce_source", b"/sensors/2"),
        ("ce_type", b"io.deformer.alert.v1"),
        ("ce_time", b"2020-03-09T10:34:33.500000Z"),
        ("content-type", b"application/json"),
    ]


def test_unknown_time_and_unknown_content_are_left_out() -> None:
    for time in (None, NO_TIME):
        assert "time" not in make_attributes("incident", "1", "/sensors", time)
    names = [name for name, _ in make_headers("dead-letter", "1", "/sensors", content_type=None)]
    assert names == ["ce_specversion", "ce_id", "ce_source", "ce_type"]


def test_source_is_a_uri_reference() -> None:
    assert make_source("sensors") == "/sensors"
    assert make_source("/data/März 7?.jsonl", 0) == "/data/M%C3%A4rz%207%3F.jsonl/0"


def test_id_with_any_text_can_be_encoded() -> None:
    assert dict(make_headers("alert", "ä\ud800", "/s"))["ce_id"] == "ä\\ud800".encode()
