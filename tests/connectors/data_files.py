"""Files of records, and the events that are read from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from connectors.files import ReadOptions, open_source
from deformer_stream.codec import Codec, Order, get_position
from deformer_stream.engine.events import Rejection
from deformer_stream.model.schema import Feature, Schema

SCHEMA = Schema(
    (
        Feature("a", "continuous"),
        Feature("b", "continuous"),
        Feature("state", "discrete", labels=("off", "on", "3")),
    )
)

Event = tuple[str, str, Any]


def read_events(
    inputs: Sequence[Path], order: Order = "arrival", seed: int = 0, **options: Any
) -> tuple[list[Event], list[Rejection], list[tuple[str, int, int]]]:
    """Read all inputs and decode them.

    Returns:
        The events as (record, feature, value), the rejections, and the (file, partition, offset) of each event.
    """
    source = open_source(inputs, [SCHEMA], ReadOptions(order=order, seed=seed, **options))
    codec = Codec(SCHEMA, order=order, seed=seed, window_assigner=options.get("window_assigner"))
    events: list[Event] = []
    refused: list[Rejection] = []
    places: list[tuple[str, int, int]] = []
    while not source.is_exhausted:
        data = source.poll(0.0).data
        if data is None:
            continue
        batch, rejected = codec.decode(data)
        refused += rejected
        for i, record in enumerate(batch.record_ids):
            code, value = int(batch.features[i]), float(batch.values[i])
            label = batch.unseen_labels.get(
                i, (*SCHEMA.features[code].labels, "?")[int(value)] if code == 2 and value == value else None
            )
            events.append((record, SCHEMA.names[code], label if code == 2 else None if value != value else value))
            places.append(
                (
                    Path(get_position(data, int(batch.message_indices[i]))[0]).name,
                    *get_position(data, int(batch.message_indices[i]))[1:],
                )
            )
    return events, refused, places


def write_parquet(path: Path, **columns: Any) -> Path:
    """Write columns as a Parquet file, creating its folder."""
    path.parent.mkdir(exist_ok=True, parents=True)
    pq.write_table(pa.table(columns), path)
    return path
