"""A schema with a codec, and JSON messages of its readings, for tests of decoders."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from deformer_stream.codec import Codec
from deformer_stream.codec.payloads import Messages
from deformer_stream.engine.events import EventBatch, Rejection
from deformer_stream.model.schema import Feature, Schema

SCHEMA = Schema(
    (
        Feature("Pressure", "continuous"),
        Feature("Current", "continuous"),
        Feature("state", "discrete", labels=("off", "on", "3", "true")),
    )
)
CODEC = Codec(SCHEMA)
BROKER_TIME = 1_700_000_000_000_000


def make_messages(*payloads: bytes | None, keys: list[bytes | None] | None = None) -> Messages:
    """Return a poll of messages with these payloads."""
    n = len(payloads)
    offsets = np.arange(n, dtype=np.int64) + 100
    return Messages("t", keys or [None] * n, list(payloads), np.full(n, BROKER_TIME), np.full(n, 2, np.int32), offsets)


def decode(
    *documents: Any, codec: Codec = CODEC, keys: list[bytes | None] | None = None
) -> tuple[EventBatch, list[Rejection]]:
    """Return the events and rejections of documents. Bytes and None are used as they are; all others are encoded as
    JSON.
    """
    raw = [d if d is None or isinstance(d, bytes) else json.dumps(d).encode() for d in documents]
    return codec.decode(make_messages(*raw, keys=keys))


def list_readings(batch: EventBatch) -> list[tuple[str, str, float | None]]:
    """Return the events as (record id, feature name, value) tuples, with None for NaN."""
    rows = zip(batch.record_ids, batch.features.tolist(), batch.values.tolist(), strict=True)
    return [(record, SCHEMA.names[code], None if math.isnan(value) else value) for record, code, value in rows]


def make_reading(value: Any, feature: Any = "Pressure", record: Any = "r", **more: Any) -> dict[str, Any]:
    """Return an event with one reading."""
    return {"record": record, "feature": feature, "value": value, **more}
