"""Tests that messages of a schema registry give the readings and the rejections of the same JSON messages."""

from __future__ import annotations

import errno
import json
import math
import os
import tracemalloc
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.codec import Codec
from deformer_stream.codec.payloads import Messages
from deformer_stream.codec.schema_formats import RegisteredSchema, SchemaFormat, frame
from deformer_stream.engine.events import RejectionReason
from deformer_stream.errors import ConfigError, Unavailable
from tests.codec.arrow_examples import BROKER, SCHEMA, list_readings
from tests.codec.registered_schemas import avro, decode, make_codec, write_avro
from tests.schema_registry import make_message_class

READING: dict[str, Any] = {
    "type": "record",
    "name": "Reading",
    "fields": [
        {"name": "record", "type": "string"},
        {"name": "feature", "type": "string"},
        {"name": "value", "type": ["null", "boolean", "long", "double", "string"]},
        {"name": "time", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}], "default": None},
    ],
}
MANY: dict[str, Any] = {
    "type": "record",
    "name": "Readings",
    "fields": [
        {"name": "record", "type": "string"},
        {"name": "values", "type": {"type": "map", "values": ["null", "double", "string"]}},
    ],
}
PROTO = """
syntax = "proto3";
package plant;
import "google/protobuf/timestamp.proto";
enum Mode { idle = 0; run = 1; }
message Reading {
  string record = 1;
  string feature = 2;
  double value = 3;
  google.protobuf.Timestamp time = 4;
}
message Readings {
  string record = 1;
  map<string, double> values = 2;
  message Pump { optional double Pressure = 1; optional double Current = 2; optional Mode mode = 3; }
}
message Pump {
  string record = 1;
  Readings.Pump values = 2;
}
"""


value = st.one_of(st.none(), st.booleans(), st.floats(), st.integers(-(2**60), 2**60), st.sampled_from(["run", "off"]))


@given(
    record=st.text(max_size=3),
    feature=st.sampled_from(["Pressure", "Current", "mode", "other"]),
    value=value,
    micros=st.one_of(st.none(), st.integers(0, 4 * 10**15)),
)
def test_avro_gives_the_readings_of_json(record: str, feature: str, value: Any, micros: int | None) -> None:
    document = {"record": record, "feature": feature, "value": value}
    time = None if micros is None else datetime.fromtimestamp(micros / 1e6, UTC)
    payload = frame(1, write_avro(READING, {**document, "time": time}))
    if time is not None:
        document["time"] = time.timestamp()
    found, rejections = decode(make_codec("avro", avro(READING)), payload)
    expected, expected_rejections = decode(Codec(SCHEMA), json.dumps(document).encode())
    assert str(list_readings(found)) == str(list_readings(expected))
    assert rejections == expected_rejections


def test_reading_that_is_not_finite_is_rejected_by_name() -> None:
    codec = make_codec("avro", avro(MANY))
    payload = frame(1, write_avro(MANY, {"record": "a", "values": {"Pressure": math.nan, "Current": 1.5}}))
    events, (rejection,) = decode(codec, payload)
    assert [(code, number) for _, code, number, *_ in list_readings(events)] == [("Current", 1.5)]
    assert rejection.reason is RejectionReason.NOT_FINITE
    assert "Pressure" in rejection.detail


def test_types_of_avro_become_those_of_json() -> None:
    schema = {
        "type": "record",
        "name": "All",
        "fields": [
            {"name": "record", "type": {"type": "string", "logicalType": "uuid"}},
            {"name": "time", "type": {"type": "long", "logicalType": "local-timestamp-millis"}},
            {
                "name": "values",
                "type": {
                    "type": "record",
                    "name": "Values",
                    "fields": [
                        {
                            "name": "Pressure",
                            "type": {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2},
                        },
                        {"name": "Current", "type": "float"},
                        {"name": "mode", "type": {"type": "enum", "name": "Mode", "symbols": ["idle", "run"]}},
                    ],
                },
            },
            {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        ],
    }
    identifier = uuid.UUID(int=7)
    document = {
        "record": identifier,
        "time": datetime(2020, 3, 9, 10, 34, 33),  # a local time has no zone
        "values": {"Pressure": Decimal("12.25"), "Current": 0.5, "mode": "run"},
        "day": date(2020, 3, 9),
    }
    events, rejections = decode(make_codec("avro", avro(schema)), frame(1, write_avro(schema, document)))
    assert rejections == []
    assert [(record, feature, number, time) for record, feature, number, time, *_ in list_readings(events)] == [
        (str(identifier), "Pressure", 12.25, 1_583_750_073_000_000),
        (str(identifier), "Current", 0.5, 1_583_750_073_000_000),
        (str(identifier), "mode", 1.0, 1_583_750_073_000_000),
    ]


def test_bytes_are_refused_as_readings_and_ignored_in_other_fields() -> None:
    values = {"name": "Values", "type": "record"}
    values["fields"] = [{"name": "Pressure", "type": "bytes"}, {"name": "Current", "type": "double"}]
    fields = [*MANY["fields"][:1], {"name": "values", "type": values}]
    fields += [{"name": "frame", "type": {"type": "map", "values": {"type": "fixed", "name": "Word", "size": 2}}}]
    schema = {"type": "record", "name": "Raw", "fields": fields}
    document = {"record": "a", "values": {"Pressure": b"\x01", "Current": 1.5}, "frame": {"raw": b"ab"}}
    events, (rejection,) = decode(make_codec("avro", avro(schema)), frame(1, write_avro(schema, document)))
    assert [(code, number) for _, code, number, *_ in list_readings(events)] == [("Current", 1.5)]
    assert (rejection.reason, "Pressure" in rejection.detail) == (RejectionReason.WRONG_TYPE, True)


def test_a_key_with_a_schema_is_no_record_id() -> None:
    schema = {"type": "record", "name": "R", "fields": READING["fields"][1:]}
    payload = frame(1, write_avro(schema, {"feature": "Pressure", "value": 1.0}))
    keys = [b"a", frame(7, b"\x02a")]
    data = Messages("t", keys, [payload] * 2, np.full(2, BROKER), np.zeros(2, np.int32), np.arange(2))
    events, (rejection,) = make_codec("avro", avro(schema)).decode(data)
    assert events.record_ids == ["a"]
    assert (rejection.message_index, rejection.reason) == (1, RejectionReason.MISSING_FIELD)
    assert data.keys == keys  # dead letters have the key as it was sent


def test_schemas_of_one_topic_may_differ_and_refer_to_others() -> None:
    mode = {"type": "enum", "name": "Mode", "symbols": ["idle", "run"]}
    third = {
        "type": "record",
        "name": "ModeReading",
        "fields": [
            {"name": "record", "type": "string"},
            {"name": "feature", "type": "string"},
            {"name": "value", "type": "Mode"},
        ],
    }
    evolved = {**READING, "fields": [*READING["fields"], {"name": "site", "type": "string", "default": ""}]}
    evolved["fields"][2] = {"name": "value", "type": "float"}  # another type, and one more field
    codec = make_codec("avro", avro(READING), avro(evolved), avro(third, Mode=json.dumps(mode)))
    stream = BytesIO()
    named: dict[str, Any] = {}
    fastavro.parse_schema(mode, named_schemas=named)
    fastavro.schemaless_writer(
        stream,
        fastavro.parse_schema(third, named_schemas=named),
        {"record": "c", "feature": "mode", "value": "run"},
    )
    events, rejections = decode(
        codec,
        frame(1, write_avro(READING, {"record": "a", "feature": "Pressure", "value": 1.0})),
        frame(2, write_avro(evolved, {"record": "b", "feature": "Pressure", "value": 2.0, "site": "north"})),
        frame(3, stream.getvalue()),
        frame(1, write_avro(READING, {"record": "d", "feature": "Pressure", "value": 4.0})),
    )
    assert rejections == []
    assert [(record, number) for record, _, number, *_ in list_readings(events)] == [
        ("a", 1.0),
        ("b", 2.0),
        ("c", 1.0),
        ("d", 4.0),
    ]


CONTENT = write_avro(READING, {"record": "a", "feature": "Pressure", "value": 1.0})


@pytest.mark.parametrize(
    ("payload", "reason", "text"),
    [
        (b"", RejectionReason.NOT_JSON, "schema id"),
        (b"\0\0\0", RejectionReason.NOT_JSON, "schema id"),
        (b'{"record":"a","feature":"Pressure","value":1}', RejectionReason.NOT_JSON, "check --format"),
        (frame(99, CONTENT), RejectionReason.UNKNOWN_SCHEMA, "99"),
        (frame(2, CONTENT), RejectionReason.UNKNOWN_SCHEMA, "PROTOBUF"),
        (frame(3, CONTENT), RejectionReason.UNKNOWN_SCHEMA, "not valid"),
        (frame(1, CONTENT[:-3]), RejectionReason.NOT_JSON, "does not fit schema 1"),
        (frame(1, CONTENT + b"x"), RejectionReason.NOT_JSON, "follow its last field"),
        (frame(1, b"\xff" * 20), RejectionReason.NOT_JSON, "does not fit schema 1"),
        (frame(4, write_avro({"type": "string"}, "text")), RejectionReason.NOT_JSON, "JSON object"),
        (frame(5, write_avro({"type": "bytes"}, b"x")), RejectionReason.NOT_JSON, "JSON object"),
        (None, RejectionReason.NOT_JSON, "tombstone"),
        (b"\0" * 2000, RejectionReason.TOO_LARGE, "2000 bytes"),
    ],
)
def test_message_that_cannot_be_read_is_rejected(payload: bytes | None, reason: RejectionReason, text: str) -> None:
    codec = make_codec(
        "avro",
        avro(READING),
        RegisteredSchema("PROTOBUF", PROTO, {}),
        RegisteredSchema("AVRO", '{"type": "nothing"}', {}),
        avro({"type": "string"}),
        avro({"type": "bytes"}),
        max_bytes=1000,
    )
    good = frame(1, CONTENT)
    events, (rejection,) = decode(codec, good, payload, good)
    assert len(events) == 2
    assert (rejection.message_index, rejection.reason) == (1, reason)
    assert text in rejection.detail
    assert "\n" not in rejection.detail


def test_messages_with_a_schema_that_is_not_valid_take_no_memory() -> None:
    """An exception that is raised again and again would keep a traceback of every time."""
    codec = make_codec("avro", RegisteredSchema("AVRO", "{}", {}))
    payload = frame(1, CONTENT)

    def measure(num_messages: int) -> int:
        tracemalloc.start()
        for _ in range(num_messages):
            decode(codec, payload)
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return size

    measure(10)
    assert measure(500) < measure(50) + 20_000


@given(content=st.binary(max_size=60), schema_format=st.sampled_from(["avro", "protobuf", "json-schema"]))
def test_no_message_raises(content: bytes, schema_format: SchemaFormat) -> None:
    schema = {
        "avro": avro(READING),
        "protobuf": RegisteredSchema("PROTOBUF", "", {}),
        "json-schema": RegisteredSchema("JSON", "{}", {}),
    }
    codec = make_codec(schema_format, schema[schema_format])
    if schema_format == "protobuf":
        codec = PROTOBUF_CODEC
    for payload in (content, frame(1, content)):
        events, rejections = decode(codec, payload)
        assert len(events) + len(rejections) >= 1


# --- Protobuf ---------------------------------------------------------------------------------------------------------

PROTOBUF_CODEC = make_codec("protobuf", RegisteredSchema("PROTOBUF", PROTO, {}))


@pytest.fixture(scope="module")
def make_message() -> Callable[..., Any]:
    """Return a function that returns a message of `PROTO` with the given fields."""

    def make(name: str, **fields: Any) -> Any:
        return make_message_class(PROTO, f"plant.{name}")(**fields)

    return make


def frame_protobuf(message: Any, path: bytes) -> bytes:
    """Return a Protobuf message with the path of its type."""
    return frame(1, path + message.SerializeToString())


def test_protobuf_gives_readings(make_message: Callable[..., Any]) -> None:
    reading = make_message("Reading", record="a", feature="Pressure", value=0.0)
    reading.time.FromMicroseconds(1_583_750_073_250_000)
    many = make_message("Readings", record="b", values={"Pressure": 1.5, "Current": -2.0})
    pump = make_message("Pump", record="c")
    pump.values.Pressure, pump.values.mode = 3.25, 1
    events, rejections = decode(
        PROTOBUF_CODEC,
        frame_protobuf(reading, b"\0"),  # short for the first type
        frame_protobuf(reading, b"\x02\0"),  # one index, 0
        frame_protobuf(many, b"\x02\x02"),
        frame_protobuf(pump, b"\x02\x04"),
    )
    assert rejections == []
    found = sorted(
        (index, record, feature, number, time) for record, feature, number, time, index, _ in list_readings(events)
    )
    time = 1_583_750_073_250_000
    assert found == [
        (0, "a", "Pressure", 0.0, time),
        (1, "a", "Pressure", 0.0, time),
        (2, "b", "Current", -2.0, BROKER),
        (2, "b", "Pressure", 1.5, BROKER),
        (3, "c", "Pressure", 3.25, BROKER),
        (3, "c", "mode", 1.0, BROKER),
    ]


@pytest.mark.parametrize("path", [b"", b"\x01", b"\x02\x01", b"\x02\x40", b"\x04\x02", b"\xff" * 9, b"\x04\0\0"])
def test_path_that_is_not_valid_is_rejected(make_message: Callable[..., Any], path: bytes) -> None:
    message = make_message("Reading", record="a", feature="Pressure", value=1.0) if len(path) > 1 else None
    content = path + (b"" if message is None else message.SerializeToString())
    events, (rejection,) = decode(PROTOBUF_CODEC, frame(1, content))
    assert len(events) == 0
    assert rejection.reason is RejectionReason.NOT_JSON
    assert "schema 1" in rejection.detail


def test_lists_of_protobuf_have_a_limited_number_of_items() -> None:
    """An empty item takes two bytes, and becomes an object with all fields: gigabytes for a message of 1 MiB."""
    fields = " ".join(f"double f{number} = {number};" for number in range(1, 101))
    text = f"""syntax = "proto3"; message Item {{ {fields} }} message Items {{ repeated Item items = 1; }}
    message Event {{ string record = 1; map<string, double> values = 2; repeated Items more = 3; }}"""
    codec = make_codec("protobuf", RegisteredSchema("PROTOBUF", text, {}))
    reading = b"\x02\x04" + b"\x0a\x01a" + b"\x12\x13\x0a\x08Pressure\x11" + np.array([1.0]).tobytes()
    items = b"\x1a\xc8\x01" + b"\x0a\x00" * 100
    events, rejections = decode(codec, frame(1, reading + items), frame(1, reading + items * 1000), frame(1, reading))
    assert [(record, feature, index) for record, feature, _, _, index, _ in list_readings(events)] == [
        ("a", "Pressure", 0),
        ("a", "Pressure", 2),
    ]
    (rejection,) = rejections
    assert rejection.reason is RejectionReason.NOT_JSON
    assert "more than 65536 items" in rejection.detail


def test_schema_of_protobuf_may_change() -> None:
    """Both schemas are in use: a type is widened, a field is added, and one that the earlier schema has is missing."""
    fields = "string record = 1; string feature = 2; int32 value = 3;"
    texts = [
        f'syntax = "proto3"; message Event {{ {fields} bool valid = 4; }}',
        f'syntax = "proto3"; message Event {{ {fields.replace("int32", "int64")} string site = 5; }}',
    ]
    codec = make_codec("protobuf", *(RegisteredSchema("PROTOBUF", text, {}) for text in texts))
    first, second = (make_message_class(text) for text in texts)
    reading = {"record": "a", "feature": "Pressure"}
    events, rejections = decode(
        codec,
        frame(1, b"\0" + first(**reading, value=-1, valid=True).SerializeToString()),
        frame(2, b"\0" + second(**reading, value=2**40, site="north").SerializeToString()),
        frame(1, b"\0" + first(**reading, value=2**30).SerializeToString()),
    )
    assert rejections == []
    assert events.values.tolist() == [-1.0, 2.0**40, 2.0**30]


def test_imports_of_protobuf_are_compiled() -> None:
    common = 'syntax = "proto3"; package common; message Values { double Pressure = 1; }'
    text = 'syntax = "proto3"; import "plant/common.proto"; message R { string record = 1; common.Values values = 2; }'
    codec = make_codec("protobuf", RegisteredSchema("PROTOBUF", text, {"plant/common.proto": common}))
    # record = "a"; values = {Pressure = 1.0}
    content = b"\0" + b"\x0a\x01a" + b"\x12\x09\x09" + np.array([1.0]).tobytes()
    events, rejections = decode(codec, frame(1, content))
    assert rejections == []
    assert [(record, feature, number) for record, feature, number, *_ in list_readings(events)] == [
        ("a", "Pressure", 1.0)
    ]


@pytest.mark.parametrize("name", ["grpc_tools/__init__.py", "grpc_tools/protoc.py", "grpc_tools.py", "runpy.py"])
def test_a_schema_with_the_name_of_a_module_is_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The text is valid Protobuf, and Python would execute it. Producers may register schemas, and run no code."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((".", "")))
    marker = tmp_path / "executed"
    reference = f'syntax = "proto3" // open({str(marker)!r}, "w")\n"";\n'
    codec = make_codec("protobuf", RegisteredSchema("PROTOBUF", PROTO, {name: reference}))
    events, rejections = decode(codec, frame(1, b"\0" + b"\x0a\x01a" + b"\x12\x08Pressure"))
    assert not marker.exists()
    assert (len(events), rejections) == (1, [])


@pytest.mark.parametrize(
    ("text", "references", "word"),
    [
        ("message {", {}, "Expected"),
        ('syntax = "proto3"; import "missing.proto";', {}, "missing.proto"),
        (PROTO, {"../escape.proto": ""}, "leaves its folder"),
        (PROTO, {"c:/escape.proto": ""}, "leaves its folder"),
        (PROTO, {"..\\escape.proto": ""}, "leaves its folder"),
    ],
)
def test_schema_that_cannot_be_compiled_is_named(text: str, references: dict[str, str], word: str) -> None:
    events, (rejection,) = decode(
        make_codec("protobuf", RegisteredSchema("PROTOBUF", text, references)), frame(1, b"\0")
    )
    assert len(events) == 0
    assert rejection.reason is RejectionReason.UNKNOWN_SCHEMA
    assert word in rejection.detail


def test_a_full_disk_is_no_fault_of_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema that is refused once stays refused until the next start, and its messages are dead letters."""

    def fail(*_: Any) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    codec = make_codec("protobuf", RegisteredSchema("PROTOBUF", PROTO, {}))
    content = frame(1, b"\0" + b"\x0a\x01a" + b"\x12\x08Pressure")
    with monkeypatch.context() as full:
        full.setattr("deformer_stream.codec.protobuf_schemas.compile_schema", fail)
        with pytest.raises(Unavailable, match=r"schema 1 .*No space left"):
            decode(codec, content)
    events, rejections = decode(codec, content)
    assert (len(events), rejections) == (1, [])


# --- JSON Schema ------------------------------------------------------------------------------------------------------


def test_json_with_a_schema_id_is_json() -> None:
    codec = make_codec("json-schema", RegisteredSchema("JSON", '{"type": "object"}', {}))
    document = orjson.dumps({"record": "a", "feature": "Pressure", "value": 1.0})
    events, rejections = decode(codec, frame(1, document), frame(1, b"{"), frame(7, document))
    assert list_readings(events)[0][:3] == ("a", "Pressure", 1.0)
    assert [rejection.reason for rejection in rejections] == [RejectionReason.NOT_JSON, RejectionReason.UNKNOWN_SCHEMA]


def test_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deformer_stream.codec.schema_formats.is_installed", lambda _: False)
    for name, extra in (("avro", "avro"), ("protobuf", "protobuf")):
        with pytest.raises(ConfigError, match=rf"--format {name}.*deformer-stream\[{extra}\]"):
            make_codec(name)  # type: ignore[arg-type]
