"""Fill the missing values of long tables for models of irregular readings: each row is a reading with a time.

A row without a value requests the value of its sensor at its time. The observed readings of its record are then in
other rows, perhaps of other files. So the tables are read twice:

1. All rows are decoded, and written in columns to temporary files beside the output. An index groups them by record.
2. Records are loaded one chunk after the other, their requested values are computed and written to temporary files.
   Then the tables are read again, and the rows are written with the filled values.

Memory is bounded by the readings of the longest record and by the ids of the records.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from connectors.files.imputed_tables import (
    DRAW_COLUMN,
    ROWS_PER_BATCH,
    BadCells,
    ImputeOptions,
    ReportProgress,
    check_columns,
    compute_columns,
    copy_column,
    make_nullable,
    make_output_schema,
    open_imputed_tables,
    unify_column_types,
)
from connectors.files.open_tables import log_bad_rows, log_dialects
from connectors.files.sinks import write_rows
from deformer_stream import log
from deformer_stream.codec import Codec, FieldNames, WindowAssigner
from deformer_stream.codec.columns import decode_dictionary, is_text
from deformer_stream.codec.payloads import LongRows
from deformer_stream.engine.events import NO_TIME, EventBatch
from deformer_stream.engine.irregular_imputation import (
    ObservedReadings,
    Targets,
    draw_at_times,
    impute_at_times,
    impute_quantiles_at_times,
)
from deformer_stream.errors import InputError
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.schema import Schema
from deformer_stream.ragged import ragged_indices
from deformer_stream.tables.table import CellForm, Table, TableOptions

CHUNK_ROWS = 500_000
"""Number of rows whose records are imputed together, and of rows that are placed by record at a time."""

UNUSED, OBSERVED, REQUESTED = 0, 1, 2
"""What a row is: neither of the others, an observed reading, or a request for a value."""

_COLUMNS = {"record": np.int32, "code": np.int16, "kind": np.int8, "value": np.float64, "time": np.int64}
"""The columns of the temporary files, with their types. The record is −1 in rows that were not accepted."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def impute_reading_tables(
    sources: Sequence[str | Path],
    output: Path,
    model: DEformer,
    options: ImputeOptions,
    report_progress: ReportProgress | None = None,
    table_options: TableOptions | None = None,
    time_column: str = "time",
) -> int:
    """Fill the values of long tables whose readings are irregular, and write the tables as Parquet.

    The columns are those of training: `record` (or `device`, if records are windows of time), `feature`, `value`,
    perhaps `label`, and a time. A row without a value requests the value of its sensor at its time, given the observed
    readings of its record before and after it. All tables must have the same columns. The output has the rows of all of
    them in the order of the input.

    A value of a continuous sensor is the estimate of `options.estimate`. That of a discrete sensor is the most probable
    label, in the column `label` if there is one. `value__low` and `value__high` are the bounds of the central interval,
    and `value__q0.05` a quantile. They are null in rows that requested nothing, and for labels. If `options.draws` is
    set, each row is repeated once for each draw, and the column `draw` numbers the draws from 0. The values of a draw
    are drawn jointly. Columns with other names are copied. A column of integers becomes one of float64.

    Rows that cannot be used, such as those of unknown sensors or without a time, stay as they are. A warning is logged
    with their number.

    Args:
        sources: Parquet and CSV files, folders of such files, and patterns.
        output: The Parquet file to write.
        model: The network, in evaluation mode, for irregular readings.
        options: How to fill the values.
        report_progress: A function that is called after each batch, with the number of its rows.
        table_options: How tables are read: dialect of CSV files and zone of times. None for the defaults.
        time_column: Name of the column of times.

    Returns:
        The number of values that were filled.

    Raises:
        InputError: A table cannot be read, is not long, lacks a column, or has a column that is added; or the tables
            have different columns.
    """
    tables = open_imputed_tables(sources, "a table", table_options, {time_column})
    for table in tables:
        _check_long_columns(table, model.schema, time_column)
        check_columns(table, tables[0], ["value"], options)
    log_dialects(tables)
    output_schema = make_output_schema(_make_fields(tables), ["value"], options)
    with (
        write_rows(output, output_schema) as sink,
        tempfile.TemporaryDirectory(prefix=".impute-", dir=output.absolute().parent) as folder,
    ):
        rows = _RowStore(Path(folder))
        bad_cells = _append_rows(tables, rows, model.schema, time_column)
        rows.close()
        num_requests = int((rows.columns["kind"] == REQUESTED).sum())
        filled = _fill_records(rows, model, options, report_progress)
        for batch in _make_batches(tables, rows, filled, model.schema, options, output_schema):
            sink.append(batch)
        if report_progress is not None:
            report_progress(int((rows.columns["record"] < 0).sum()))
    bad_cells.log()
    log_bad_rows(tables)
    return num_requests


def _check_long_columns(table: Table, schema: Schema, time_column: str) -> None:
    """Check that a table has the columns of a long table, and that its times have a zone.

    Args:
        table: The table.
        schema: The features of the model.
        time_column: Name of the column of times.

    Raises:
        InputError: A column is missing, or times have no zone.
    """
    columns = set(table.schema.names)
    is_named = "record" in columns or (schema.window is not None and "device" in columns)
    if not is_named or not {"feature", "value", time_column} <= columns:
        name = "device (or record)" if schema.window is not None else "record"
        raise InputError(
            f"{table.name}: the model is for irregular readings, so imputation needs a long table with the columns "
            f"{name}, feature, value and {time_column}, but the columns are {table.format_column_names()}; give a "
            "row without a value for each value to fill"
        )
    table.check_time_zone(time_column)


class _RowStore:
    """The decoded rows of all tables in temporary files, in the order of the input.

    Args:
        folder: An existing folder for the files.

    Attributes:
        columns: After `close`, the columns of `_COLUMNS` by name, one entry for each row.
        origins: After `close`, for each record the time from which ages are counted, microseconds since 1970.
        num_records: The number of records.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = {name: (folder / name).open("wb") for name in _COLUMNS}
        self._index_by_id: dict[str, int] = {}
        self._window_starts: list[int] = []  # by record, NO_TIME if it is not a window
        self.columns: dict[str, NDArray[Any]] = {}
        self.origins = np.zeros(0, np.int64)

    @property
    def num_records(self) -> int:
        """The number of records."""
        return len(self._window_starts)

    def append(self, num_rows: int, events: EventBatch, is_context: NDArray[np.bool_]) -> None:
        """Append rows.

        Args:
            num_rows: The number of rows. Those without an event were not accepted.
            events: Their events, at most one for each row.
            is_context: (F,) which features only condition others; their values are not requested.
        """
        columns = {name: np.zeros(num_rows, kind) for name, kind in _COLUMNS.items()}
        columns["record"][:] = -1
        rows = events.message_indices
        columns["record"][rows] = self._index_records(events)
        columns["code"][rows], columns["value"][rows] = events.features, events.values
        columns["time"][rows] = events.times
        kind = np.where(np.isnan(events.values), np.where(is_context[events.features], UNUSED, REQUESTED), OBSERVED)
        columns["kind"][rows] = np.where(events.times == NO_TIME, UNUSED, kind)
        for name, column in columns.items():
            column.tofile(self._files[name])

    def _index_records(self, events: EventBatch) -> Ints:
        """Return the number of the record of each event."""
        records = np.empty(len(events), np.int64)
        windows = events.windows
        for i, record_id in enumerate(events.record_ids):
            index = self._index_by_id.get(record_id)
            if index is None:
                index = self._index_by_id[record_id] = len(self._window_starts)
                is_window = windows is not None and windows.starts is not None and windows.devices[i] != ""
                self._window_starts.append(int(windows.starts[i]) if is_window else NO_TIME)  # type: ignore[union-attr,index]
            records[i] = index
        return records

    def close(self) -> None:
        """Finish appending: map the files into memory and find the origins of the records."""
        for name, file in self._files.items():
            file.close()
            is_empty = not (self.folder / name).stat().st_size
            dtype = _COLUMNS[name]
            self.columns[name] = np.zeros(0, dtype) if is_empty else np.memmap(self.folder / name, dtype, "r")
        # The origin of a record is the start of its window, else the time of its earliest observed reading. A record
        # without one counts from its first request.
        earliest = {kind: np.full(self.num_records, np.iinfo(np.int64).max) for kind in (OBSERVED, REQUESTED)}
        for start in range(0, len(self.columns["record"]), CHUNK_ROWS):
            record, kind, time = (self.columns[name][start : start + CHUNK_ROWS] for name in ("record", "kind", "time"))
            for value, times in earliest.items():
                is_of_kind = kind == value
                np.minimum.at(times, record[is_of_kind], time[is_of_kind])
        window_starts = np.array(self._window_starts, np.int64)
        has_reading = earliest[OBSERVED] < np.iinfo(np.int64).max
        origins = np.where(has_reading, earliest[OBSERVED], earliest[REQUESTED])
        self.origins = np.where(window_starts == NO_TIME, origins, window_starts)

    def iterate_record_chunks(self) -> Iterator[tuple[Ints, Ints]]:
        """Yield pairs (records, rows): some records, and all of their rows grouped by record, in the order of input."""
        counts = np.zeros(self.num_records, np.int64)
        record = self.columns["record"]
        for start in range(0, len(record), CHUNK_ROWS):
            part = record[start : start + CHUNK_ROWS]
            counts += np.bincount(part[part >= 0], minlength=self.num_records)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        if not offsets[-1]:
            return
        placed = np.memmap(self.folder / "placed", np.int64, "w+", shape=(int(offsets[-1]),))
        next_place = offsets[:-1].copy()
        for start in range(0, len(record), CHUNK_ROWS):
            part = record[start : start + CHUNK_ROWS]
            rows = np.flatnonzero(part >= 0)
            rows = rows[np.argsort(part[rows], kind="stable")]
            num_rows = np.bincount(part[rows], minlength=self.num_records)
            group, place = ragged_indices(num_rows)
            placed[next_place[group] + place] = start + rows
            next_place += num_rows
        first = 0
        while first < self.num_records:
            last = int(np.searchsorted(offsets, offsets[first] + CHUNK_ROWS, side="right")) - 1
            last = min(max(last, first + 1), self.num_records)
            yield np.arange(first, last), np.array(placed[offsets[first] : offsets[last]])
            first = last


def _append_rows(tables: Sequence[Table], rows: _RowStore, schema: Schema, time_column: str) -> BadCells:
    """Decode the rows of all tables. Return those that were not accepted."""
    bad_cells = BadCells()
    assigner = WindowAssigner.from_options(schema, None, 0)
    names = FieldNames(time=time_column)
    codec = Codec(schema, names, window_assigner=assigner)
    used = [names.record, *([] if assigner is None else [names.device]), names.feature, names.value, names.label]
    forms: dict[str, CellForm] = {
        **dict.fromkeys((names.record, names.device, names.feature, names.label), "text"),
        names.value: "mixed",
        names.time: "time",
    }
    num_untimed = 0
    for table in tables:
        columns = [name for name in (*used, names.time) if name in table.schema.names]
        forms_of_table = {name: form for name, form in forms.items() if name in columns}
        for batch, row_numbers in table.iterate_numbered(columns, ROWS_PER_BATCH, forms_of_table):
            events, rejections = codec.decode_requests(
                LongRows(table.name, batch, int(row_numbers[0]) if len(row_numbers) else 0, row_numbers)
            )
            bad_cells.add(table, row_numbers, rejections)
            num_untimed += int((events.times == NO_TIME).sum())
            rows.append(batch.num_rows, events, schema.is_context)
    if num_untimed:
        log.get_logger("impute").warning(
            "rows_without_time_not_used", rows=num_untimed, remedy="give each row a time; a value cannot be filled else"
        )
    return bad_cells


def _fill_records(
    rows: _RowStore, model: DEformer, options: ImputeOptions, report_progress: ReportProgress | None
) -> NDArray[np.float64]:
    """Compute the requested values, record after record.

    Returns:
        (K, N): for each of the N rows that request a value, the estimate and then the added columns (K = 1 + their
        number), or K draws. The other rows have NaN. It is mapped to a temporary file.
    """
    num_columns = options.draws or 1 + len(options.list_added_columns("value"))
    num_rows = len(rows.columns["record"])
    if not num_rows:
        return np.zeros((num_columns, 0))
    filled = np.memmap(rows.folder / "filled", np.float64, "w+", shape=(num_columns, num_rows))
    for k in range(num_columns):
        for start in range(0, num_rows, CHUNK_ROWS):
            filled[k, start : start + CHUNK_ROWS] = np.nan
    for records, rows_of_records in rows.iterate_record_chunks():
        column = {name: np.asarray(rows.columns[name][rows_of_records]) for name in _COLUMNS}
        record = column["record"].astype(np.int64) - records[0]
        ages = (column["time"] - rows.origins[column["record"]]) / 1e6
        is_observed, is_requested = column["kind"] == OBSERVED, column["kind"] == REQUESTED
        if is_requested.any():
            codes = column["code"].astype(np.int64)
            observed = ObservedReadings.sort(
                record[is_observed], codes[is_observed], column["value"][is_observed], ages[is_observed], len(records)
            )
            targets = Targets(record[is_requested], codes[is_requested], ages[is_requested])
            filled[:, rows_of_records[is_requested]] = _compute_values(
                model, observed, targets, options, int(records[0])
            )
        if report_progress is not None:
            report_progress(len(rows_of_records))
    return filled


def _compute_values(
    model: DEformer, observed: ObservedReadings, targets: Targets, options: ImputeOptions, first_record: int
) -> Floats:
    """Return the values of T targets, (K, T) as in `_fill_records`.

    Args:
        model: The network.
        observed: The observed readings.
        targets: The targets.
        options: How to fill the values.
        first_record: Number of the first record, which makes the draws of each chunk independent.
    """
    if options.draws:
        return draw_at_times(model, observed, targets, options.draws, options.derive_seed(first_record))
    impute = partial(impute_at_times, model, observed, targets)
    impute_quantiles = partial(impute_quantiles_at_times, model, observed, targets)
    return np.stack(compute_columns(impute, impute_quantiles, options))


def _make_fields(tables: Sequence[Table]) -> list[pa.Field]:
    """Return the Arrow fields of the columns of the tables in the output.

    Raises:
        InputError: A column has types in two tables that do not fit each other.
    """
    fields: list[pa.Field] = []
    for name, column_type in unify_column_types(tables, {}).items():
        if name == "value":
            column_type = get_filled_type(column_type)
        elif name == "label" and pa.types.is_null(column_type):
            column_type = pa.string()
        elif name == "label" and pa.types.is_dictionary(column_type):
            column_type = column_type.value_type
        fields.append(pa.field(name, column_type))
    return fields


def get_filled_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the column of values in the output: that of the input if it is text or a float."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return kind if is_text(kind) or pa.types.is_floating(kind) else pa.float64()


def _make_batches(
    tables: Sequence[Table],
    rows: _RowStore,
    filled: Floats,
    schema: Schema,
    options: ImputeOptions,
    output_schema: pa.Schema,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of all tables with the filled values."""
    names = tables[0].schema.names
    num_draws = options.draws or 1
    first_row = 0
    for table in tables:
        for batch in table.iterate_batches(names, ROWS_PER_BATCH, {}):
            rows_of_batch = slice(first_row, first_row + batch.num_rows)
            first_row += batch.num_rows
            repeated = np.repeat(np.arange(batch.num_rows), num_draws)
            requests = RequestedValues(
                # With draws, those of a row are in successive rows of the output.
                np.asarray(rows.columns["code"][rows_of_batch]).astype(np.int64)[repeated],
                (np.asarray(rows.columns["kind"][rows_of_batch]) == REQUESTED)[repeated],
                np.asarray(filled[:num_draws, rows_of_batch]).T.reshape(-1),
            )
            cells = {name: batch.column(name).take(pa.array(repeated)) for name in names}
            value_type = output_schema.field("value").type
            cells |= requests.fill_columns(cells, schema, value_type, f"{table.name}: column 'value'")
            added = options.list_added_columns("value")
            extra = np.asarray(filled[num_draws:, rows_of_batch])
            cells |= {name: make_nullable(column) for name, column in zip(added, extra, strict=True)}
            if options.draws:
                cells[DRAW_COLUMN] = pa.array(np.tile(np.arange(num_draws), batch.num_rows))
            arrays = [copy_column(cells[field.name], field.type) for field in output_schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=output_schema)


@dataclass(frozen=True, slots=True)
class RequestedValues:
    """The values of N rows of a long table that request them.

    Attributes:
        codes: (N,) feature code of each row.
        is_requested: (N,) which rows request a value.
        values: (N,) values in raw units, or label codes; NaN if there is none. Those of other rows have no effect.
    """

    codes: Ints
    is_requested: NDArray[np.bool_]
    values: Floats

    def fill_columns(
        self, cells: Mapping[str, pa.Array], schema: Schema, value_type: pa.DataType, description: str
    ) -> dict[str, pa.Array]:
        """Return the columns `value` and, if there is one, `label` with the values.

        Args:
            cells: The N cells of the columns `value` and perhaps `label` by name.
            schema: The features of the model.
            value_type: The type of the column `value` in the result (`get_filled_type`).
            description: Name of the file and of the column for error messages.

        Raises:
            InputError: A label must be written, but there are only numbers.
        """
        is_filled = self.is_requested & ~np.isnan(self.values)
        is_label = is_filled & schema.is_discrete[np.where(is_filled, self.codes, 0)]
        texts: list[str | None] = [None] * len(self.codes)
        for row in np.flatnonzero(is_label).tolist():
            texts[row] = schema.features[self.codes[row]].labels[int(self.values[row])]
        labels = pa.array(texts, pa.string())
        numbers = make_nullable(np.where(is_filled & ~is_label, self.values, np.nan))
        filled: dict[str, pa.Array] = {}
        if "label" in cells:
            filled["label"] = pc.coalesce(labels, decode_dictionary(cells["label"]).cast(pa.string()))
            labels = pa.nulls(len(labels), pa.string())
        filled["value"] = _fill_value_column(cells["value"], numbers, labels, value_type, description)
        return filled


def _fill_value_column(
    column: pa.Array, numbers: pa.Array, labels: pa.Array, kind: pa.DataType, description: str
) -> pa.Array:
    """Return the column of values with filled numbers and labels.

    Args:
        column: The cells of the table.
        numbers: The filled numbers, null for all other rows.
        labels: The filled labels, null for all other rows.
        kind: The type of the result.
        description: Name of the file and of the column for error messages.

    Raises:
        InputError: A label must be written, but the column holds numbers.
    """
    column = decode_dictionary(column)
    if is_text(kind):
        texts = pa.array([None if number is None else f"{number:.9g}" for number in numbers.to_pylist()], pa.string())
        return pc.coalesce(texts, labels, column.cast(pa.string())).cast(kind)
    try:
        as_numbers = labels.cast(pa.float64())
    except pa.ArrowException:
        raise InputError(
            f"{description} holds numbers, so the label {labels.drop_null()[0].as_py()!r} cannot be written; add a "
            "column of texts named label"
        ) from None
    if is_text(column.type):  # this batch of a CSV file has cells that spell no numbers, which become null
        column = pa.nulls(len(column), kind)
    return pc.coalesce(numbers.cast(kind, safe=False), as_numbers.cast(kind, safe=False), column.cast(kind, safe=False))
