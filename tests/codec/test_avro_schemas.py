"""Tests that no message of a registered Avro schema ends the process, fills the memory or blocks the stream."""

from __future__ import annotations

import json
import tracemalloc
from decimal import Decimal
from io import BytesIO
from typing import Any

import fastavro
import pytest

from deformer_stream.codec.avro_schemas import MAX_DECIMAL_BYTES, MAX_VALUES, make_avro_parser
from deformer_stream.codec.schema_formats import frame
from deformer_stream.engine.events import RejectionReason
from tests.codec.registered_schemas import avro, decode, make_codec, write_avro

EMPTY: dict[str, Any] = {
    "type": "record",
    "name": "Empty",
    "fields": [{"name": "x", "type": {"type": "fixed", "name": "Nothing", "size": 0}}, {"name": "y", "type": "null"}],
}


def make_record(name: str, field_type: Any) -> dict[str, Any]:
    """Return a record with one field."""
    return {"type": "record", "name": name, "fields": [{"name": "values", "type": field_type}]}


@pytest.mark.parametrize(
    "schema",
    [
        make_record("List", ["null", "List"]),
        make_record("Tree", {"type": "array", "items": "Tree"}),
        make_record("Tree", {"type": "map", "values": ["double", "Tree"]}),
        make_record("Same", "Same"),
        make_record("Outer", make_record("Inner", ["null", "Outer"])),
    ],
)
def test_a_type_that_contains_itself_is_refused(schema: dict[str, Any]) -> None:
    """The compiled reader calls itself for each level of a message, and the stack of a thread is limited."""
    message = frame(1, b"\x02" * 200_000 + b"\0")
    events, (rejection,) = decode(make_codec("avro", avro(schema)), message)
    assert len(events) == 0
    assert rejection.reason is RejectionReason.UNKNOWN_SCHEMA
    assert "contains itself" in rejection.detail


def test_a_type_that_contains_itself_by_a_reference_is_refused() -> None:
    reference = json.dumps(make_record("List", ["null", "List"]))
    with pytest.raises(ValueError, match="List contains itself"):
        make_avro_parser(json.dumps(make_record("Event", "List")), {"List": reference})


@pytest.mark.parametrize("items", ["null", EMPTY, {"type": "fixed", "name": "F", "size": 0}])
def test_an_array_whose_items_take_no_bytes_is_refused(items: Any) -> None:
    """Otherwise a message of ten bytes could have 2^60 items."""
    schema = make_record("Event", {"type": "array", "items": items})
    _, (rejection,) = decode(make_codec("avro", avro(schema)), frame(1, b"\xfe\xff\xff\x07\0"))
    assert rejection.reason is RejectionReason.UNKNOWN_SCHEMA
    assert "items take no bytes" in rejection.detail


def test_types_that_are_used_twice_and_arrays_of_small_items_are_read() -> None:
    schema = {
        "type": "record",
        "name": "Event",
        "fields": [
            {"name": "first", "type": EMPTY},
            {"name": "second", "type": "Empty"},
            {"name": "flags", "type": {"type": "array", "items": ["null", "boolean"]}},
            {"name": "maps", "type": {"type": "array", "items": {"type": "map", "values": "Empty"}}},
            {"name": "modes", "type": {"type": "array", "items": {"type": "enum", "name": "M", "symbols": ["a"]}}},
        ],
    }
    empty = {"x": b"", "y": None}
    document = {"first": empty, "second": empty, "flags": [None, True], "maps": [{"k": empty}, {}], "modes": ["a", "a"]}
    assert make_avro_parser(json.dumps(schema), {})(write_avro(schema, document)) == document


@pytest.mark.parametrize(("container", "kind"), [("array", "record"), ("map", "record"), ("name", "error")])
def test_records_that_take_a_byte_do_not_fill_the_memory(container: str, kind: str) -> None:
    """Each item takes one byte or a few, and becomes an object with a hundred fields: gigabytes for 1 MiB."""
    nothing = [{"name": f"n{i}", "type": "null"} for i in range(99)]
    item: Any = {"type": kind, "name": "Item", "fields": [{"name": "flag", "type": "boolean"}, *nothing]}
    first = [{"name": "first", "type": item}] if container == "name" else []
    kept = {"type": "map", "values": item} if container == "map" else {"type": "array", "items": item}
    if first:
        kept["items"] = "Item"
    schema = {"type": "record", "name": "Event", "fields": [*first, {"name": "values", "type": kept}]}
    parse = make_avro_parser(json.dumps(schema), {})

    def write(num_items: int) -> bytes:
        items = (
            b"".join(b"\x06%03x\x01" % (i % 4096) for i in range(num_items))
            if container == "map"
            else b"\x01" * num_items
        )
        block = BytesIO()
        fastavro.schemaless_writer(block, "long", num_items)
        return b"\x01" * len(first) + block.getvalue() + items + b"\0"

    num_allowed = MAX_VALUES // 101 - len(first)
    for _ in range(2):  # each message is counted anew
        assert len(parse(write(num_allowed))["values"]) == num_allowed
    with pytest.raises(ValueError, match=f"more than {MAX_VALUES} fields in total: send smaller messages"):
        parse(write(num_allowed + 1))
    large = write(200_000)
    tracemalloc.start()
    _, (rejection,) = decode(make_codec("avro", avro(schema)), frame(1, large))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * 2**20
    assert rejection.reason is RejectionReason.NOT_JSON
    assert "send smaller messages" in rejection.detail


@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_decimal_number_has_a_limited_size(is_fixed: bool) -> None:
    """Its conversion takes a time that grows with the square of the size: minutes for a message of 1 MiB."""
    size = 5_000
    kind = {"type": "fixed", "name": "Number", "size": size} if is_fixed else {"type": "bytes"}
    schema = make_record("Event", {**kind, "logicalType": "decimal", "precision": 10, "scale": 2})
    raw = make_record("Event", kind)  # without the logical type, so that bytes can be written
    _, (rejection,) = decode(make_codec("avro", avro(schema)), frame(1, write_avro(raw, {"values": b"w" * size})))
    assert rejection.reason is RejectionReason.NOT_JSON
    assert f"at most {MAX_DECIMAL_BYTES}" in rejection.detail


def test_decimal_numbers_of_databases_are_read() -> None:
    kind = {"type": "bytes", "logicalType": "decimal", "precision": 76, "scale": 38}
    stream = BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(make_record("Event", kind)), {"values": Decimal("9" * 38)})
    parse = make_avro_parser(json.dumps(make_record("Event", kind)), {})
    assert parse(stream.getvalue()) == {"values": Decimal("9" * 38)}
