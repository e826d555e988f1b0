"""The formats of the values of outgoing messages: JSON, or Avro with a schema of a registry.

Alerts, notices, evidence, suspicious records and incidents are encoded as JSON first. `AvroFormat` converts that JSON
to Avro in the Confluent wire format, and `OutputReader` converts it back. So there is one definition of each message,
and both formats have the same fields and the same numbers. Avro differs in two ways. A field that JSON leaves out is
null, or has its default value. A time that is text in JSON is a timestamp in microseconds.

The schemas are the files in the folder `avro`. A release may add a field with a default value, and nothing else. Then
earlier programs read the messages of later ones, and later programs those of earlier ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import resources
from io import BytesIO
from typing import Any, Literal, Protocol

import orjson

from deformer_stream.codec.cloud_events import JSON_CONTENT_TYPE, EventKind
from deformer_stream.codec.schema_formats import HEADER_BYTES, FetchSchema, frame
from deformer_stream.codec.timestamps import format_rfc3339, parse_rfc3339
from deformer_stream.codec.validation import RejectionError, quote
from deformer_stream.errors import ConfigError, DeformerError, InputError, summarize_error
from deformer_stream.extras import format_remedy, is_installed

AVRO_CONTENT_TYPE = "application/avro"

OutputSchema = Literal["alerts", "evidence", "next-readings", "incidents"]
"""Names of the schemas: the files in the folder `avro`, without their ending."""

_NAME_BY_KIND: Mapping[EventKind, str] = {
    "alert": "io.deformer.Alert",
    "drift": "io.deformer.DriftNotice",
    "storm": "io.deformer.StormNotice",
}
"""Names of the records of the schema of alerts, which is a union."""

_TIME_KEYS = frozenset({"time", "opened", "last", "resolved", "expires"})
"""Keys of times, which are text in JSON. No key that the input determines has a text as its value."""

_EVIDENCE_NAME = "io.deformer.Evidence"
"""Name of the only record whose times are numbers in JSON, too."""


class OutputFormat(Protocol):
    """A format of the values of outgoing messages.

    Attributes:
        content_type: The header `content-type` of the messages.
        max_growth: Largest ratio of the size of a value to the size of its JSON, for columns of numbers.
    """

    content_type: str
    max_growth: float

    def convert(self, kind: EventKind, value: bytes) -> bytes:
        """Return the value of a message in this format.

        Args:
            kind: The kind of the message.
            value: The message as JSON.
        """


class JsonFormat:
    """The format of values that stay JSON, an `OutputFormat`."""

    content_type = JSON_CONTENT_TYPE
    max_growth = 1.0

    def convert(self, kind: EventKind, value: bytes) -> bytes:
        """Return the JSON unchanged."""
        return value


JSON_FORMAT: OutputFormat = JsonFormat()


class AvroFormat:
    """Avro in the Confluent wire format, an `OutputFormat`.

    Args:
        schema_text: The schema, of which `load_schema` returns the text.
        schema_id: Its id in the registry.
    """

    content_type = AVRO_CONTENT_TYPE
    max_growth = 1.25  # a closed record with an empty id has at least 39 bytes as JSON, and 47 as Avro

    def __init__(self, schema_text: str, schema_id: int) -> None:
        import fastavro

        self._schema, self._schema_id = fastavro.parse_schema(json.loads(schema_text)), schema_id
        self._is_union = isinstance(self._schema, list)
        self._write = fastavro.schemaless_writer

    def convert(self, kind: EventKind, value: bytes) -> bytes:
        """Return the value of a message in this format."""
        document = orjson.loads(value)
        if kind != "evidence":
            _convert_times(document, str, parse_rfc3339)
        stream = BytesIO()
        # A key that the schema lacks is an error, so that no information is lost.
        datum = (_NAME_BY_KIND[kind], document) if self._is_union else document
        self._write(stream, self._schema, datum, strict_allow_default=True)
        return frame(self._schema_id, stream.getvalue())


class OutputReader:
    """Converts values of messages that this program has written, JSON or Avro, to JSON. Any thread may use it.

    Args:
        fetch_schema: Requests a schema of the registry, None if no registry is known. It is called once for each
            schema that is found.

    Raises:
        ConfigError: A registry is known, but fastavro is not installed.
    """

    def __init__(self, fetch_schema: FetchSchema | None = None) -> None:
        if fetch_schema is not None:
            check_avro_package("--schema-registry")
        self._fetch_schema = fetch_schema
        self._schema_by_id: dict[int, Any] = {}

    def __call__(self, value: bytes) -> bytes:
        """Return the value of a message as JSON.

        Raises:
            InputError: It is neither JSON nor Avro that fits its schema.
            ConfigError: It is Avro, and no registry is known, the registry does not have the schema, or it refuses the
                request.
            Unavailable: The registry does not respond.
        """
        if not value.startswith(b"\0"):
            return value
        if len(value) < HEADER_BYTES:
            raise InputError(f"the message is neither JSON nor Avro: it has {len(value)} bytes and begins with zero")
        if self._fetch_schema is None:
            raise ConfigError(
                "the topic holds Avro messages, which need the schema registry: give its address with --schema-registry"
            )
        import fastavro

        schema_id = int.from_bytes(value[1:HEADER_BYTES], "big")
        try:
            if schema_id not in self._schema_by_id:
                self._schema_by_id[schema_id] = _parse_plain_schema(self._fetch_schema(schema_id).text)
            schema = self._schema_by_id[schema_id]
            document: Any = fastavro.schemaless_reader(BytesIO(value[HEADER_BYTES:]), schema, None)
            if not (isinstance(schema, dict) and schema.get("name") == _EVIDENCE_NAME):
                _convert_times(document, int, format_rfc3339)
            return orjson.dumps(document)
        except RejectionError as error:
            # To skip the message would lose what another registry can read.
            raise ConfigError(
                f"{error.detail}: give the registry of the process that has written the topic, with --schema-registry"
            ) from None
        except DeformerError:
            raise
        except Exception as error:  # a damaged message can raise anything in the library
            raise InputError(
                f"the message does not fit schema {schema_id} of the registry: {quote(summarize_error(error), 200)}"
            ) from None


JSON_READER = OutputReader()
"""The reader of topics that hold JSON only."""


def check_avro_package(option: str) -> None:
    """Raise `ConfigError` if fastavro is not installed.

    Args:
        option: The option that needs it.
    """
    if not is_installed("fastavro"):
        raise ConfigError(f"{option} needs packages that are not installed: {format_remedy('avro')}")


def load_schema(name: OutputSchema) -> str:
    """Return the Avro schema of a topic as text."""
    return resources.files(__package__).joinpath("avro", f"{name}.avsc").read_text("utf-8")


def _parse_plain_schema(text: str) -> Any:
    """Return a schema whose timestamps are read as integers, so that they keep all microseconds.

    Raises:
        ValueError: The text is not JSON.
        fastavro.schema.SchemaParseException: It is not a schema.
    """
    import fastavro

    return fastavro.parse_schema(_drop_logical_types(json.loads(text)))


def _drop_logical_types(schema: Any) -> Any:
    """Return a schema without its logical types."""
    if isinstance(schema, dict):
        return {key: _drop_logical_types(value) for key, value in schema.items() if key != "logicalType"}
    return [_drop_logical_types(part) for part in schema] if isinstance(schema, list) else schema


def _convert_times(value: Any, source: type, convert: Callable[[Any], Any]) -> None:
    """Convert the times of a document in place.

    Args:
        value: The document.
        source: The type of times in it.
        convert: Converts a time.
    """
    if isinstance(value, dict):
        for key, part in value.items():
            if isinstance(part, source):
                if key in _TIME_KEYS:
                    value[key] = convert(part)
            else:
                _convert_times(part, source, convert)
    elif isinstance(value, list) and value and isinstance(value[0], dict | list):
        for part in value:
            _convert_times(part, source, convert)
