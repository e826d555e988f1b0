"""Messages whose schema is in a schema registry: Avro, Protobuf and JSON Schema.

Such a message begins with a zero byte and the id of its schema, four bytes in big-endian order (the Confluent wire
format). A Protobuf message continues with the path of its type within the schema. `SchemaTranslator` converts messages
to JSON, so that the rules, the field names and the rejections are those of JSON messages.

The formats have libraries of their own, which are imported when the first message of the format arrives. They are
fastavro (extra `avro`), and protobuf with the compiler of grpcio-tools (extra `protobuf`).
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

import orjson

from deformer_stream.codec.avro_schemas import make_avro_parser
from deformer_stream.codec.payloads import Messages, UnreadablePayload
from deformer_stream.codec.protobuf_schemas import make_protobuf_parser
from deformer_stream.codec.validation import RejectionError, quote
from deformer_stream.engine.events import RejectionReason
from deformer_stream.errors import ConfigError, Unavailable, summarize_error
from deformer_stream.extras import format_remedy, is_installed

SchemaFormat = Literal["avro", "protobuf", "json-schema"]
"""Formats of messages whose schema is in a registry."""

HEADER_BYTES = 5
"""Length of the zero byte and the schema id at the beginning of a message."""

_TYPE_BY_FORMAT: Mapping[str, str] = {"avro": "AVRO", "protobuf": "PROTOBUF", "json-schema": "JSON"}
"""Name of each format in the answers of a registry."""

_PACKAGE_BY_FORMAT: Mapping[str, str] = {"avro": "fastavro", "protobuf": "grpc_tools"}
"""A module of the extra that a format needs, if it needs one."""

_SHORTAGES = frozenset((errno.ENOSPC, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE))
"""Errors of the operating system that say nothing about a schema: no space, memory, processes or files are left."""

Parser = Callable[[bytes], Any]
"""Converts what follows the header of a message to the values that `json.loads` returns, or to values of
`_to_json_type`. Raises any exception if the message does not fit its schema."""


@dataclass(frozen=True, slots=True)
class RegisteredSchema:
    """A schema of a registry.

    Attributes:
        type: "AVRO", "PROTOBUF" or "JSON".
        text: The schema.
        references: The schemas that it refers to, each after those that it refers to itself, by the name that the
            reference uses.
    """

    type: str
    text: str
    references: Mapping[str, str]


FetchSchema = Callable[[int], RegisteredSchema]
"""Returns the schema with an id. It blocks while the registry cannot be reached.

Raises `RejectionError` if the registry has no such schema, or not all schemas that it refers to.
"""


class SchemaTranslator:
    """Converts the messages of a topic to JSON, each with the schema that its header names.

    Args:
        schema_format: The format of the messages.
        fetch_schema: Requests a schema of the registry. It is called for each message with an id that has no usable
            schema, so it should store such ids for a while.
        max_bytes: Maximum size of a message in bytes; a larger one is rejected.

    Raises:
        ConfigError: The libraries of the format are not installed.
    """

    def __init__(self, schema_format: SchemaFormat, fetch_schema: FetchSchema, max_bytes: int) -> None:
        package = _PACKAGE_BY_FORMAT.get(schema_format)
        if package is not None and not is_installed(package):
            raise ConfigError(
                f"--format {schema_format} needs packages that are not installed: {format_remedy(schema_format)}"
            )
        self._format, self._fetch_schema, self._max_bytes = schema_format, fetch_schema, max_bytes
        self._parser_by_id: dict[int, Parser | RejectionError] = {}

    def translate(self, data: Messages) -> Messages:
        """Return messages with JSON in place of their payloads.

        A message that cannot be converted becomes an `UnreadablePayload` with the reason. Tombstones stay as they are.
        A key that has a schema of its own is left out, because its bytes are not the name of a record or a device.

        Args:
            data: The messages of a poll.
        """
        keys = [None if key is not None and _is_framed(key) else key for key in data.keys]
        return replace(data, keys=keys, payloads=[self._translate(payload) for payload in data.payloads])

    def _translate(self, payload: bytes | None) -> bytes | None:
        """Return a payload as JSON, or the reason why it cannot be converted."""
        if payload is None or isinstance(payload, UnreadablePayload):
            return payload
        try:
            if len(payload) > self._max_bytes:
                raise RejectionError(
                    RejectionReason.TOO_LARGE,
                    f"the message has {len(payload)} bytes; at most {self._max_bytes} are accepted; send smaller "
                    "messages",
                )
            if not _is_framed(payload):
                raise RejectionError(
                    RejectionReason.NOT_JSON,
                    f"the message is not {self._format} of a schema registry: it does not begin with a zero byte and "
                    "a schema id of four bytes; check --format",
                )
            schema_id = int.from_bytes(payload[1:HEADER_BYTES], "big")
            parser = self._get_parser(schema_id)
            content = payload[HEADER_BYTES:]
            if self._format == "json-schema":
                return content
            return _parse(parser, content, self._format, schema_id)
        except RejectionError as error:
            return UnreadablePayload(error.reason, error.detail)

    def _get_parser(self, schema_id: int) -> Parser:
        """Return the parser of messages with a schema.

        Raises:
            RejectionError: The registry has no such schema, or it is of another format or not valid.
            Unavailable: This machine has too little space, memory or processes to compile the schema.
        """
        parser = self._parser_by_id.get(schema_id)
        if parser is None:
            parser = self._parser_by_id[schema_id] = self._make_parser(schema_id, self._fetch_schema(schema_id))
        if isinstance(parser, RejectionError):
            # A new object, because the traceback of one that is raised for every message would grow with each of them.
            raise RejectionError(parser.reason, parser.detail)
        return parser

    def _make_parser(self, schema_id: int, schema: RegisteredSchema) -> Parser | RejectionError:
        """Return the parser of messages with a schema, or why they are rejected.

        Raises:
            Unavailable: This machine has too little space, memory or processes to compile the schema.
        """
        if schema.type != _TYPE_BY_FORMAT[self._format]:
            return RejectionError(
                RejectionReason.UNKNOWN_SCHEMA,
                f"schema {schema_id} of the registry is of the type {schema.type}, but the option is --format "
                f"{self._format}; check which format the topic has",
            )
        try:
            match self._format:
                case "avro":
                    return make_avro_parser(schema.text, schema.references)
                case "protobuf":
                    return make_protobuf_parser(schema.text, schema.references)
                case "json-schema":
                    return orjson.loads
        except Exception as error:  # the libraries have no common base class of errors
            if isinstance(error, OSError) and error.errno in _SHORTAGES:
                # The schema may be valid. If it were refused, all its messages would be dead letters until a restart.
                raise Unavailable(
                    f"schema {schema_id} of the registry cannot be compiled ({error.strerror}): free memory, processes "
                    "or space for temporary files, and start again"
                ) from error
            return RejectionError(
                RejectionReason.UNKNOWN_SCHEMA,
                f"schema {schema_id} of the registry is not valid: {quote(summarize_error(error), 200)}",
            )


def _parse(parser: Parser, content: bytes, schema_format: str, schema_id: int) -> bytes:
    """Return the content of a message as JSON.

    A number that is not finite is written as `NaN` or `Infinity`, which is not JSON. The decoder of JSON messages
    then rejects the reading, and names its feature.

    Args:
        parser: The parser of its schema.
        content: What follows the header.
        schema_format: Name of the format, for the error message.
        schema_id: The id of the schema, for the error message.

    Raises:
        RejectionError: The content does not fit the schema.
    """
    try:
        document = parser(content)
        try:
            text = orjson.dumps(document, _to_json_type, orjson.OPT_PASSTHROUGH_DATETIME)
        except orjson.JSONEncodeError:  # such as a map whose keys are numbers
            text = b""
        if not text or b"null" in text:  # orjson writes a number that is not finite like a missing value
            text = json.dumps(document, default=_to_json_type).encode()
        return text
    except Exception as error:  # a damaged message can raise anything in the libraries
        raise RejectionError(
            RejectionReason.NOT_JSON,
            f"the message does not fit schema {schema_id} ({schema_format}): {quote(summarize_error(error), 200)}",
        ) from None


def _to_json_type(value: Any) -> float | str | list[Any]:
    """Return a value that JSON does not have as the number or text with the same meaning.

    Points in time become seconds since 1970; one without a time zone is in UTC. Times of day and dates become text.
    Other values, such as bytes, become an empty list. The decoder of JSON messages rejects a reading with such a value,
    and ignores it in other fields.
    """
    match value:
        case datetime():
            return (value if value.tzinfo is not None else value.replace(tzinfo=UTC)).timestamp()
        case date() | time() | UUID():
            return str(value)
        case Decimal():
            return float(value)
    return []


def _is_framed(content: bytes) -> bool:
    """Return whether a payload or a key begins with a zero byte and a schema id."""
    return len(content) >= HEADER_BYTES and content[0] == 0


def frame(schema_id: int, content: bytes) -> bytes:
    """Return a message of the Confluent wire format.

    Args:
        schema_id: The id of the schema in the registry.
        content: The content, encoded with the schema.
    """
    return b"\0" + schema_id.to_bytes(HEADER_BYTES - 1, "big") + content
