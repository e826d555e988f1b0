"""Messages in the formats of a schema registry, and codecs that decode them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import fastavro
import numpy as np

from deformer_stream.codec import Codec
from deformer_stream.codec.payloads import Messages
from deformer_stream.codec.schema_formats import RegisteredSchema, SchemaFormat, SchemaTranslator
from deformer_stream.engine.events import EventBatch, Rejection
from tests.codec.arrow_examples import BROKER, SCHEMA
from tests.schema_registry import fetch_from


def write_avro(schema: Mapping[str, Any], document: Mapping[str, Any]) -> bytes:
    """Return a document in Avro, without a header."""
    stream = BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(dict(schema)), document)
    return stream.getvalue()


def make_codec(schema_format: SchemaFormat, *schemas: RegisteredSchema, max_bytes: int = 1_048_576) -> Codec:
    """Return a codec whose registry has these schemas; the first one has the id 1."""
    return Codec(SCHEMA, translator=SchemaTranslator(schema_format, fetch_from(*schemas), max_bytes))


def avro(schema: Mapping[str, Any], **references: str) -> RegisteredSchema:
    """Return an Avro schema of a registry."""
    return RegisteredSchema("AVRO", json.dumps(schema), references)


def decode(codec: Codec, *payloads: bytes | None) -> tuple[EventBatch, list[Rejection]]:
    """Return the events and rejections of messages without keys."""
    n = len(payloads)
    numbers = np.arange(n)
    data = Messages("t", [None] * n, list(payloads), np.full(n, BROKER), numbers.astype(np.int32), numbers)
    return codec.decode(data)
