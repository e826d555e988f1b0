"""Parsers of Protobuf messages whose schema is a text, as schema registries store it.

The text is compiled by the compiler of grpcio-tools, in a process of its own, because it writes errors to standard
error. The messages are read with the descriptors of the protobuf library, without generated code.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

COMPILE_SECONDS = 60.0
"""Seconds after which the compilation of a schema has failed."""

MAX_ITEMS = 65_536
"""Largest number of items that the lists and maps of a message have in total. An empty item takes two bytes, and can
have any number of fields with defaults."""

_FILE = "registered_schema.proto"
_WRAPPERS = frozenset(
    f"google.protobuf.{kind}Value"
    for kind in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)
"""Messages that wrap one value, which may be missing."""


def make_protobuf_parser(text: str, references: Mapping[str, str]) -> Callable[[bytes], dict[str, Any]]:
    """Return a function that converts the content of a message to its fields by name.

    The content begins with the path of the message's type: the indexes of nested types, as zigzag varints after their
    number. A single zero is the first type of the schema.

    Args:
        text: The schema.
        references: The schemas that it imports, by their file names.

    Raises:
        ValueError: The schema cannot be compiled.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    pool = descriptor_pool.DescriptorPool()
    files = descriptor_pb2.FileDescriptorSet.FromString(compile_schema(text, references))
    for file in files.file:  # each one after those that it imports
        pool.Add(file)
    schema = pool.FindFileByName(_FILE)
    types = list(schema.message_types_by_name.values())
    readers = _Readers()
    parser_by_path: dict[tuple[int, ...], tuple[Any, Read]] = {}

    def parse(content: bytes) -> dict[str, Any]:
        """Return the fields of a message by name."""
        path, start = _read_path(content)
        if path not in parser_by_path:
            descriptor = types[path[0]]
            for index in path[1:]:
                descriptor = descriptor.nested_types[index]
            message_class = message_factory.GetMessageClass(descriptor)
            parser_by_path[path] = message_class.FromString, readers.make_reader(descriptor)
        from_bytes, list_fields = parser_by_path[path]
        readers.num_items = 0
        return list_fields(from_bytes(content[start:]))

    return parse


def compile_schema(text: str, references: Mapping[str, str]) -> bytes:
    """Return the serialized descriptors of a schema and of the files that it imports.

    Raises:
        ValueError: The schema cannot be compiled.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in {**references, _FILE: text}.items():
            relative = PurePosixPath(file)
            if relative.is_absolute() or ".." in relative.parts or not {"\\", ":"}.isdisjoint(file):  # also of Windows
                raise ValueError(f"the name of the import {file!r} leaves its folder")
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            (folder / relative).write_text(content, encoding="utf-8")
        output = folder / "descriptors"
        # The folder holds files whose names and contents others have registered, such as grpc_tools/protoc.py. Python
        # must not import from it, so it is not the current folder, and -P excludes the current folder from the search.
        # The module adds the folder with the files of Google, such as timestamp.proto.
        command = [sys.executable, "-P", "-m", "grpc_tools.protoc", f"-I{folder}", "--include_imports"]
        result = subprocess.run(  # noqa: S603 - the text is a file, not a part of the command
            [*command, f"--descriptor_set_out={output}", str(folder / _FILE)],
            capture_output=True,
            text=True,
            timeout=COMPILE_SECONDS,
            check=False,
        )
        if result.returncode:
            # Other lines are messages of the library that the compiler uses.
            problems = [line for line in result.stderr.splitlines() if ".proto:" in line]
            raise ValueError(problems[0] if problems else "the compiler failed")
        return output.read_bytes()


def _read_path(content: bytes) -> tuple[tuple[int, ...], int]:
    """Return the path of a message's type, and the number of bytes that it takes.

    Raises:
        ValueError: The path is not valid.
    """
    count, position = _read_index(content, 0)
    if count == 0:
        return (0,), position
    path = []
    for _ in range(count):
        index, position = _read_index(content, position)
        path.append(index)
    return tuple(path), position


def _read_index(content: bytes, position: int) -> tuple[int, int]:
    """Return a number of the path of a message's type (a zigzag varint), and the position after it.

    Raises:
        ValueError: There is no such number, or it is negative or too large to be an index.
    """
    number = shift = 0
    while True:
        if position >= len(content) or shift > 28:
            raise ValueError("the path of the message's type is not valid")
        byte = content[position]
        number |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            break
    if number & 1:  # zigzag encoding: odd numbers are negative
        raise ValueError("the path of the message's type is not valid")
    return number >> 1, position


Convert = Callable[[Any], Any]
"""Converts a value of a field to a value of JSON."""

Read = Callable[[Any], dict[str, Any]]
"""Returns the fields of a message by name, as values of JSON."""


class _Readers:
    """Functions from messages to their fields.

    Attributes:
        num_items: Number of items of the lists and maps of the present message that were converted so far.
    """

    def __init__(self) -> None:
        self.num_items = 0
        self._reader_by_type: dict[str, Read] = {}  # by full name; a type may contain itself

    def make_reader(self, descriptor: Any) -> Read:
        """Return a function from a message to its fields by name.

        A field that states its presence (a message, `optional`, `oneof`) is left out if it is missing. Any other field
        that is missing has its default, such as 0, because the message does not say whether it was sent. The entries of
        a map are sorted: they have no order, and scores must not depend on that of the library.

        Args:
            descriptor: The type of the message.
        """
        known = self._reader_by_type.get(descriptor.full_name)
        if known is not None:
            return known
        plan: list[tuple[str, bool, Convert | None]] = []

        def read(message: Any) -> dict[str, Any]:
            """Return the fields of a message."""
            return {
                name: getattr(message, name) if convert is None else convert(getattr(message, name))
                for name, has_presence, convert in plan
                if not has_presence or message.HasField(name)
            }

        self._reader_by_type[descriptor.full_name] = read
        plan += [(field.name, field.has_presence, self._make_field_converter(field)) for field in descriptor.fields]
        return read

    def _make_field_converter(self, field: Any) -> Convert | None:
        """Return the function that converts a field with all its values; None if the value stays as it is."""
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            convert_entry = self._make_converter(kind.fields_by_name["value"]) or _keep
            return lambda entries: {key: convert_entry(entries[key]) for key in sorted(self._count(entries))}
        convert = self._make_converter(field)
        if field.is_repeated:
            convert_item = convert or _keep
            return lambda items: [convert_item(item) for item in self._count(items)]
        return convert

    def _make_converter(self, field: Any) -> Convert | None:
        """Return the function that converts one value of a field; None if it stays as it is.

        An enumerated value becomes its name, a timestamp a number of seconds, another message its fields.
        """
        if field.enum_type is not None:
            name_by_number = {number: value.name for number, value in field.enum_type.values_by_number.items()}
            return lambda number: name_by_number.get(number, number)
        if field.message_type is None:
            return None
        name = field.message_type.full_name
        if name in _WRAPPERS:
            return lambda wrapper: wrapper.value
        known: dict[str, Convert] = {
            "google.protobuf.Timestamp": lambda time: time.seconds + time.nanos / 1e9,
            "google.protobuf.Struct": _convert_struct,
            "google.protobuf.Value": _convert_struct_value,
        }
        return known.get(name) or self.make_reader(field.message_type)

    def _count(self, items: Any) -> Any:
        """Return items of a list or a map after counting them.

        Raises:
            ValueError: The message has more than `MAX_ITEMS`.
        """
        self.num_items += len(items)
        if self.num_items > MAX_ITEMS:
            raise ValueError(f"its lists and maps have more than {MAX_ITEMS} items: send smaller messages")
        return items


def _keep(value: Any) -> Any:
    """Return a value as it is."""
    return value


def _convert_struct(value: Any) -> dict[str, Any]:
    """Return the fields of a `google.protobuf.Struct`, sorted by name, because a map has no order."""
    return {key: _convert_struct_value(value.fields[key]) for key in sorted(value.fields)}


def _convert_struct_value(value: Any) -> Any:
    """Return a `google.protobuf.Value`, which is like a value of JSON."""
    kind = value.WhichOneof("kind")
    match kind:
        case None | "null_value":
            return None
        case "struct_value":
            return _convert_struct(value.struct_value)
        case "list_value":
            return [_convert_struct_value(part) for part in value.list_value.values]
    return getattr(value, kind)  # a number, a text or a boolean
