"""Tables that the density completes or makes up: `impute` and `sample`, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from connectors.files.sinks import _ParquetSink
from connectors.files.tables import LINES, Table, find
from deformer_stream.codec import Codec
from deformer_stream.codec.columns import plain
from deformer_stream.core import query
from deformer_stream.core.model import DEformer
from deformer_stream.core.schema import Feature
from deformer_stream.errors import InputError
from deformer_stream.ports import WideRows

ROWS = 4096
"""Rows read at a time."""
PENDING_BYTES = 64 * 2**20
"""A row group ends here however few rows it has."""

Advance = Callable[[int], None]


class _Rows(_ParquetSink):
    """A Parquet file that takes its name when it is complete."""

    def add(self, batch: pa.RecordBatch) -> None:
        self._add(batch)
        if sum(pending.nbytes for pending in self._pending) > PENDING_BYTES:
            self._write()


def impute(source: Path, output: Path, model: DEformer, interval: float, advance: Advance | None = None) -> int:
    """Fill the nulls (and NaNs) of a wide table's feature columns; returns how many cells were filled.

    A cell gets the conditional median or the likeliest label given the present features of its row, in its column's
    type. After each continuous column come COLUMN__low and COLUMN__high, the bounds of the central interval, null where
    the reading was there. Context and columns that are no features pass as they are. Raises `InputError`.
    """
    table = _open(source, model)
    features = {name: model.schema.features[code] for name, code in model.schema.codes.items()}
    present = [name for name in table.schema.names if name in features]
    types = {name: _csv_type(features[name]) for name in present} if table.rows is None else {}
    kinds = {field.name: types.get(field.name, field.type) for field in table.schema}
    columns = pa.schema([out for name in table.schema.names for out in _fields(name, kinds[name], features.get(name))])
    codec = Codec(model.schema, order="schema")
    asked = np.isin(np.arange(len(model.schema)), [model.schema.codes[name] for name in present])
    cells = first = 0
    sink = _Rows(output, columns)
    try:
        for batch in table.batches(table.schema.names, ROWS, types):
            ids = [str(row) for row in range(first, first + batch.num_rows)]
            events, _ = codec.decode(WideRows(str(table.path), batch, ids, first))
            values = np.full((batch.num_rows, len(model.schema)), np.nan)
            told = np.zeros(values.shape, bool)  # an infinite reading is refused: neither present nor missing
            values[events.messages, events.features] = events.values
            told[events.messages, events.features] = True
            filled = query.fill(model, values, asked & told & np.isnan(values), interval)
            arrays: list[pa.Array] = []
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                where = f"{table.path}: column {name!r}"
                arrays += _complete(column, features.get(name), filled, model.schema.codes.get(name, -1), where)
            sink.add(pa.RecordBatch.from_arrays(arrays, schema=columns))
            cells += int((~np.isnan(filled.value)).sum())
            first += batch.num_rows
            if advance is not None:
                advance(batch.num_rows)
        sink.close()
    finally:
        sink.discard()
    return cells


def sample(output: Path, model: DEformer, count: int, seed: int, advance: Advance | None = None) -> None:
    """Draw records: a column per feature, raw units, labels as text; context, which is not modelled, is null."""
    features = model.schema.features
    columns = pa.schema([(f.name, pa.string() if f.labels else pa.float64()) for f in features])
    sink = _Rows(output, columns)
    try:
        for block in query.sample(model, count, seed):
            arrays = [_texts(f, x) if f.labels else _numbers(x) for f, x in zip(features, block.T, strict=True)]
            sink.add(pa.RecordBatch.from_arrays(arrays, schema=columns))
            if advance is not None:
                advance(len(block))
        sink.close()
    finally:
        sink.discard()


def _open(source: Path, model: DEformer) -> Table:
    """A table with at least one feature of the model and no column that the result would need. Raises `InputError`."""
    files = find([source])
    if len(files) > 1 or files[0].suffix.lower() in LINES:
        raise InputError(f"{source}: one wide table is filled at a time; name one Parquet or CSV file")
    table = Table.open(files[0])
    names = set(table.schema.names)
    if len(names) < len(table.schema.names):
        raise InputError(f"{source}: two columns have the same name; rename one")
    known = [f for f in model.schema.features if f.name in names]
    if not known:
        want = ", ".join(model.schema.names[:8])
        raise InputError(f"{source}: no column is a feature of the model ({want} …); check the model")
    for taken in (names & {f"{f.name}__low", f"{f.name}__high"} for f in known if _bounded(f)):
        if taken:
            raise InputError(f"{source}: the column {min(taken)!r} is there already; rename it, or leave it out")
    return table


def _csv_type(feature: Feature) -> pa.DataType:
    return pa.string() if feature.labels else pa.float64()


def _bounded(feature: Feature | None) -> bool:
    return feature is not None and not feature.context and not feature.labels


def _fields(name: str, kind: pa.DataType, feature: Feature | None) -> list[pa.Field]:
    if feature is None or feature.context:
        return [pa.field(name, kind)]
    bounds = [pa.field(f"{name}__{end}", pa.float64()) for end in ("low", "high")] if _bounded(feature) else []
    return [pa.field(name, _type(kind, feature)), *bounds]


def _type(kind: pa.DataType, feature: Feature) -> pa.DataType:
    """The type of a column that was filled: as before, but without a dictionary and with values."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return _csv_type(feature) if pa.types.is_null(kind) else kind


def _complete(column: pa.Array, feature: Feature | None, filled: query.Filled, code: int, where: str) -> list[pa.Array]:
    """The column with its gaps filled, and the interval's bounds."""
    if feature is None or feature.context:
        return [column]
    values, kind = filled.value[:, code], _type(column.type, feature)
    try:
        if pa.types.is_integer(kind) and not feature.labels:
            limits = np.iinfo(kind.to_pandas_dtype())
            values = np.clip(np.round(values), limits.min, limits.max)
        new = (_texts(feature, values) if feature.labels else _numbers(values)).cast(kind, safe=False)
        whole = pc.if_else(new.is_valid(), new, plain(column).cast(kind))
    except pa.ArrowException as error:
        line = str(error).splitlines()[0]
        raise InputError(f"{where} is {column.type} and cannot hold what is missing ({line}); convert it") from error
    bounds = (filled.low, filled.high) if _bounded(feature) else ()
    return [whole, *(_numbers(bound[:, code]) for bound in bounds)]


def _numbers(values: NDArray[np.float64]) -> pa.Array:
    return pa.array(values, pa.float64(), mask=np.isnan(values))


def _texts(feature: Feature, codes: NDArray[np.float64]) -> pa.Array:
    """Label texts of label codes, null where NaN."""
    none = np.isnan(codes)
    places = pa.array(np.where(none, 0, codes).astype(np.int64), mask=none)
    return pa.array(feature.labels, pa.string()).take(places)
