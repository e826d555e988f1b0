"""Parsers of Avro messages whose schema is a text, as schema registries store it.

The messages are read by fastavro, whose compiled code calls itself for each level of a message and creates each item of
an array. So the schema is checked first, and records are counted while they are read: a small message could otherwise
end the process or fill the memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from io import BytesIO
from typing import Any, cast

MAX_DECIMAL_BYTES = 256
"""Largest size of a decimal number. It has about 600 digits, and float64 holds 309 digits before the point. The time to
convert a number grows with the square of its size."""

MAX_VALUES = 262_144
"""Largest number of records and of their fields that a message has in total. A record in an array can take one byte,
and become an object with any number of fields, which take none."""

_RECORD_TYPES = ("record", "error")

_COUNTED = "deformer-counted"
"""A logical type that is added to each record of a schema, so that fastavro calls `_count_record` after reading one."""


class _ValueCount:
    """The number of records and fields that were read of the present message."""

    def __init__(self) -> None:
        self._num_values = 0

    def reset(self) -> None:
        """Begin a message."""
        self._num_values = 0

    def add(self, num_fields: int) -> None:
        """Count a record.

        Raises:
            ValueError: The message has more than `MAX_VALUES`.
        """
        self._num_values += 1 + num_fields
        if self._num_values > MAX_VALUES:
            raise ValueError(f"its records have more than {MAX_VALUES} fields in total: send smaller messages")


def make_avro_parser(text: str, references: Mapping[str, str]) -> Callable[[bytes], Any]:
    """Return a function that converts the content of a message to its value.

    Args:
        text: The schema.
        references: The schemas that it refers to, each after those that it refers to itself.

    Raises:
        Exception: The schema is not valid, or its messages cannot be read safely.
    """
    import fastavro

    _register_readers()
    named_types: dict[str, Any] = {}
    for reference in references.values():
        fastavro.parse_schema(json.loads(reference), named_schemas=named_types)
    parsed = fastavro.parse_schema(json.loads(text), named_schemas=named_types)
    _SchemaCheck(named_types).can_be_empty(parsed)
    count = _ValueCount()
    for definition in named_types.values():
        if definition["type"] in _RECORD_TYPES:
            definition.update({"logicalType": _COUNTED, _COUNTED: count})

    def parse(content: bytes) -> Any:
        """Return the value of a message, whose whole content must be used."""
        stream = BytesIO(content)
        count.reset()
        document = fastavro.schemaless_reader(stream, cast("Any", parsed), None)
        if stream.tell() < len(content):
            raise ValueError(f"{len(content) - stream.tell()} bytes follow its last field")
        return document

    return parse


class _SchemaCheck:
    """Checks that the messages of a schema have a limited depth, and that each item of an array takes a byte.

    Args:
        named_types: The records, fixed and enumerated types by full name, as fastavro has parsed them.
    """

    def __init__(self, named_types: Mapping[str, Any]) -> None:
        self._named_types = named_types
        self._open_names: set[str] = set()
        self._can_be_empty_by_name: dict[str, bool] = {}

    def can_be_empty(self, schema: Any) -> bool:
        """Return whether a value of a type can take no bytes, after checking the type.

        Args:
            schema: The type, as fastavro has parsed it.

        Raises:
            ValueError: The type contains itself, or an array whose items can take no bytes.
        """
        match schema:
            case str():
                return schema == "null" or (schema in self._named_types and self._can_name_be_empty(schema))
            case list():
                for option in schema:
                    self.can_be_empty(option)
                return False  # a value begins with the index of its type
        match schema["type"]:
            case kind if kind in _RECORD_TYPES:
                return self._can_name_be_empty(schema["name"])
            case "fixed":
                return bool(schema["size"] == 0)
            case "array":
                if self.can_be_empty(schema["items"]):
                    raise ValueError(
                        "it has an array whose items take no bytes, so that a small message could have any number of "
                        "items"
                    )
                return False
            case "map":
                self.can_be_empty(schema["values"])
                return False
            case basic_type:  # perhaps with a logical type; or an enumerated type
                return bool(basic_type == "null")

    def _can_name_be_empty(self, name: str) -> bool:
        """Return whether a value of a named type can take no bytes, after checking the type once."""
        known = self._can_be_empty_by_name.get(name)
        if known is not None:
            return known
        if name in self._open_names:
            raise ValueError(f"the type {name} contains itself, so that a message could have any depth")
        definition = self._named_types[name]
        if definition["type"] not in _RECORD_TYPES:
            return self.can_be_empty(definition)
        self._open_names.add(name)
        can_fields_be_empty = [self.can_be_empty(field["type"]) for field in definition["fields"]]
        self._open_names.remove(name)
        self._can_be_empty_by_name[name] = all(can_fields_be_empty)
        return self._can_be_empty_by_name[name]


@cache
def _register_readers() -> None:
    """Make fastavro count records, and refuse decimal numbers of more than `MAX_DECIMAL_BYTES`."""
    import fastavro.read

    readers: dict[str, Any] = fastavro.read.LOGICAL_READERS
    readers.update({f"{name}-{_COUNTED}": _count_record for name in _RECORD_TYPES})
    for name in ("bytes-decimal", "fixed-decimal"):
        readers[name] = partial(_read_decimal, readers[name])


def _count_record(record: dict[str, Any], schema: Mapping[str, Any], _: Any = None) -> dict[str, Any]:
    """Return a record after counting it.

    Args:
        record: The record.
        schema: Its schema.

    Raises:
        ValueError: The message has too many.
    """
    schema[_COUNTED].add(len(record))
    return record


def _read_decimal(read: Callable[..., Any], data: bytes, *schemas: Any) -> Any:
    """Return a decimal number.

    Args:
        read: The function of fastavro that converts its bytes.
        data: Its bytes.
        schemas: The schemas of the writer and of the reader.

    Raises:
        ValueError: It is too large.
    """
    if len(data) > MAX_DECIMAL_BYTES:
        raise ValueError(f"a decimal number has {len(data)} bytes; at most {MAX_DECIMAL_BYTES} are accepted")
    return read(data, *schemas)
