"""Tables with one reading per row, decoded for tests."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from deformer_stream.codec import Codec
from deformer_stream.codec.payloads import LongRows
from deformer_stream.engine.events import EventBatch, Rejection
from tests.codec.json_examples import CODEC


def decode_long(codec: Codec = CODEC, first: int = 0, **columns: Any) -> tuple[EventBatch, list[Rejection]]:
    """Return the events and rejections of a table in long layout, given by its columns."""
    arrays = {name: c if isinstance(c, pa.Array) else pa.array(c) for name, c in columns.items()}
    return codec.decode(LongRows("log.parquet", pa.RecordBatch.from_pydict(arrays), first))
