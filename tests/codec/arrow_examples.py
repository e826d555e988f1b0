"""A schema, and Arrow streams of its readings, for tests of decoders."""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa

from deformer_stream.engine.events import EventBatch
from deformer_stream.model.schema import Feature, Schema

SCHEMA = Schema(
    (
        Feature("Pressure", "continuous"),
        Feature("Current", "continuous"),
        Feature("mode", "discrete", labels=("idle", "run")),
    )
)
BROKER = 1_583_750_073_000_000


def make_stream(columns: dict[str, Any], *more: dict[str, Any], **options: Any) -> bytes:
    """Return an Arrow stream with one record batch per mapping of column names to arrays."""
    batches = [pa.record_batch(list(part.values()), list(part)) for part in (columns, *more)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def list_readings(batch: EventBatch) -> list[tuple[Any, ...]]:
    """Return the events as (record id, feature name, value or label) tuples."""
    names = [SCHEMA.names[code] for code in batch.features.tolist()]
    values = [None if value != value else value for value in batch.values.tolist()]
    unseen = [batch.unseen_labels.get(i) for i in range(len(batch))]
    return list(
        zip(batch.record_ids, names, values, batch.times.tolist(), batch.message_indices.tolist(), unseen, strict=True)
    )


def make_views(num_rows: int, text: str) -> pa.Array:
    """Return a column of different views of a text: from each of its first characters to the end, or nearly."""
    views = b"".join(struct.pack("<i4sii", len(text) - num_rows, b"xxxx", 0, start) for start in range(num_rows))
    return pa.Array.from_buffers(pa.string_view(), num_rows, [None, pa.py_buffer(views), pa.py_buffer(text.encode())])
