"""Tables that the density completes or makes up: `impute` and `sample`, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from connectors.files.sinks import _ParquetSink
from connectors.files.tables import LINES, Table, csv_type, enumerated, find, type_of
from deformer_stream import log
from deformer_stream.codec import Codec
from deformer_stream.codec.columns import convert_times_of_day, decode_dictionary
from deformer_stream.codec.payloads import WideRows
from deformer_stream.engine import imputation
from deformer_stream.errors import InputError
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.schema import Feature

ROWS = 4096
"""Rows read at a time."""
PENDING_BYTES = 64 * 2**20
"""A row group ends here however few rows it has."""

SHOWN = 8
"""Features named in the log."""
DRAW = "draw"
"""The column with a draw's number."""

Advance = Callable[[int], None]
Floats = NDArray[np.float64]


class _Rows(_ParquetSink):
    """A Parquet file that takes its name when it is complete."""

    def add(self, batch: pa.RecordBatch) -> None:
        self._add(batch)
        if sum(pending.nbytes for pending in self._pending) > PENDING_BYTES:
            self._write()


@dataclass(frozen=True, slots=True)
class Filling:
    """How gaps are filled. estimate: what a measurement becomes; quantiles: further columns; draws: joint draws of each
    row in place of both. seed: of the draws."""

    interval: float = 0.9
    estimate: Literal["median", "mean", "mode"] = "median"
    quantiles: tuple[float, ...] = ()
    draws: int | None = None
    seed: int = 0

    def ends(self, name: str) -> list[str]:
        """The columns that follow a measurement's."""
        bounds = [] if self.draws else [f"{name}__{end}" for end in ("low", "high")]
        return bounds + [f"{name}__q{q:g}" for q in sorted(self.quantiles)]


def impute(source: Path, output: Path, model: DEformer, how: Filling, advance: Advance | None = None) -> int:
    """Fill the nulls (and NaNs) of a wide table's feature columns; returns how many cells were filled.

    A cell gets the conditional median (mean, mode) or the likeliest label given the present features of its row, in its
    column's type. After each continuous column come COLUMN__low and COLUMN__high, the bounds of the central interval,
    and COLUMN__q0.05 and so on, null where the reading was there. With draws each row comes so many times, its gaps
    drawn jointly, and the column `draw` counts from 0. Context and columns that are no features pass as they are.
    Raises `InputError`.
    """
    table = _open(source, model, how)
    features = {name: model.schema.features[code] for name, code in model.schema.code_by_name.items()}
    present = [name for name in table.schema.names if name in features]
    types = {name: csv_type(table, features[name]) for name in present} if table.rows is None else {}
    kinds = {field.name: types.get(field.name, field.type) for field in table.schema}
    fields = [out for name in table.schema.names for out in _fields(name, kinds[name], features.get(name), how)]
    columns = pa.schema(fields + ([pa.field(DRAW, pa.int64())] if how.draws else []))
    codec = Codec(model.schema, order="schema")
    asked = np.isin(np.arange(len(model.schema)), [model.schema.code_by_name[name] for name in present])
    cells = first = 0
    sink = _Rows(output, columns)
    try:
        for batch in table.batches(table.schema.names, ROWS, types):
            ids = [str(row) for row in range(first, first + batch.num_rows)]
            events, _ = codec.decode(WideRows(str(table.path), batch, ids, first))
            values = np.full((batch.num_rows, len(model.schema)), np.nan)
            told = np.zeros(values.shape, bool)  # an infinite reading is refused: neither present nor missing
            values[events.message_indices, events.features] = events.values
            told[events.message_indices, events.features] = True
            gaps = asked & told & np.isnan(values)
            cells += int((gaps & ~model.schema.is_context).sum())
            rows = np.repeat(np.arange(batch.num_rows), how.draws or 1)
            new, ends = _answers(model, values, gaps, how, first)
            arrays: list[pa.Array] = []
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                where = f"{table.path}: column {name!r}"
                feature, code = features.get(name), model.schema.code_by_name.get(name)
                if feature is None or feature.context or code is None:
                    arrays.append(column.take(pa.array(rows)))
                    continue
                arrays.append(_complete(column.take(pa.array(rows)), feature, new[:, code], where))
                arrays += [_numbers(end[:, code]) for end in ends] if _bounded(feature) else []
            arrays += [pa.array(np.tile(np.arange(how.draws), batch.num_rows))] if how.draws else []
            sink.add(pa.RecordBatch.from_arrays(arrays, schema=columns))
            first += batch.num_rows
            if advance is not None:
                advance(batch.num_rows)
        sink.close()
    finally:
        sink.discard()
    if absent := [name for name, feature in features.items() if name not in present and not feature.context]:
        log.get_logger("impute").info(
            "features without a column are not filled in: add it, with nulls", features=absent[:SHOWN]
        )
    return cells


def _answers(
    model: DEformer, values: Floats, gaps: NDArray[np.bool_], how: Filling, first: int
) -> tuple[Floats, list[Floats]]:
    """What fills the gaps of (N, F) readings, (N, F) or (N · draws, F), and what goes into the columns beside them.
    first: row of the table, so that every batch draws by itself."""
    if how.draws:
        seed = int(np.random.SeedSequence([how.seed, first]).generate_state(1, np.uint64)[0] >> 1)
        drawn = imputation.sample_completions(model, values, gaps, how.draws, seed)
        drawn = np.where(gaps, drawn, np.nan)
        return drawn.transpose(1, 0, 2).reshape(-1, drawn.shape[2]), []
    filled = imputation.impute(model, values, gaps, how.interval)
    new = {"median": filled.median, "mean": filled.mean, "mode": filled.mode}[how.estimate]
    new = np.where(np.isnan(new), filled.median, new)  # labels
    ends = list(imputation.impute_quantiles(model, values, gaps, sorted(how.quantiles))) if how.quantiles else []
    return new, [filled.low, filled.high, *ends]


def sample(output: Path, model: DEformer, count: int, seed: int, advance: Advance | None = None) -> None:
    """Draw records: a column per feature, raw units, labels as text; context, which is not modelled, is null."""
    features = model.schema.features
    columns = pa.schema([(f.name, pa.string() if f.labels else pa.float64()) for f in features])
    sink = _Rows(output, columns)
    try:
        for block in imputation.sample_records(model, count, seed):
            arrays = [_texts(f, x) if f.labels else _numbers(x) for f, x in zip(features, block.T, strict=True)]
            sink.add(pa.RecordBatch.from_arrays(arrays, schema=columns))
            if advance is not None:
                advance(len(block))
        sink.close()
    finally:
        sink.discard()


def _open(source: Path, model: DEformer, how: Filling) -> Table:
    """A table with at least one feature of the model and no column that the result would need. Raises `InputError`."""
    files = find([source])
    if len(files) > 1 or files[0].suffix.lower() in LINES:
        raise InputError(f"{source}: one wide table is filled at a time; name one Parquet or CSV file")
    table = Table.open(files[0])
    names = set(table.schema.names)
    known = [f for f in model.schema.features if f.name in names]
    if not known:
        want = enumerated(model.schema.names)
        raise InputError(
            f"{source}: no column is a feature of the model ({table.shown()} against {want}); check the model"
        )
    needed = [set(how.ends(f.name)) for f in known if _bounded(f)] + ([{DRAW}] if how.draws else [])
    for taken in (names & some for some in needed):
        if taken:
            raise InputError(f"{source}: the column {min(taken)!r} is there already; rename it, or leave it out")
    return table


def _bounded(feature: Feature | None) -> bool:
    return feature is not None and not feature.context and not feature.labels


def _fields(name: str, kind: pa.DataType, feature: Feature | None, how: Filling) -> list[pa.Field]:
    if feature is None or feature.context:
        return [pa.field(name, kind)]
    ends = [pa.field(end, pa.float64()) for end in how.ends(name)] if _bounded(feature) else []
    return [pa.field(name, _type(kind, feature)), *ends]


def _type(kind: pa.DataType, feature: Feature) -> pa.DataType:
    """The type of a column that was filled: as before, but without a dictionary and with values;
    times of day become seconds."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return type_of(feature) if pa.types.is_null(kind) or pa.types.is_time(kind) else kind


def _complete(column: pa.Array, feature: Feature, values: Floats, where: str) -> pa.Array:
    """The column with its gaps filled. values: one for each gap, NaN elsewhere."""
    kind = _type(column.type, feature)
    try:
        if pa.types.is_integer(kind) and not feature.labels:
            limits = np.iinfo(kind.to_pandas_dtype())
            values = np.clip(np.round(values), limits.min, limits.max)
        new = (_texts(feature, values) if feature.labels else _numbers(values)).cast(kind, safe=False)
        return pc.if_else(new.is_valid(), new, decode_dictionary(convert_times_of_day(column)).cast(kind))
    except pa.ArrowException as error:
        line = str(error).splitlines()[0]
        raise InputError(f"{where} is {column.type} and cannot hold what is missing ({line}); convert it") from error


def _numbers(values: NDArray[np.float64]) -> pa.Array:
    return pa.array(values, pa.float64(), mask=np.isnan(values))


def _texts(feature: Feature, codes: NDArray[np.float64]) -> pa.Array:
    """Label texts of label codes, null where NaN."""
    none = np.isnan(codes)
    places = pa.array(np.where(none, 0, codes).astype(np.int64), mask=none)
    return pa.array(feature.labels, pa.string()).take(places)
