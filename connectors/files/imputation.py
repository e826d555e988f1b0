"""Write tables with values from the model: missing values that were imputed, or complete records that were drawn.

`deformer-stream impute` fills the gaps of a wide table (a row is a record). `deformer-stream sample` draws new records.
Both read and write a limited number of rows at a time, so tables may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from connectors.files.sinks import ParquetSink
from connectors.files.sources import choose_cell_forms, log_bad_rows, log_dialects
from deformer_stream import log
from deformer_stream.codec import Codec
from deformer_stream.codec.columns import convert_times_of_day, decode_dictionary, is_text, parse_numbers
from deformer_stream.codec.payloads import WideRows
from deformer_stream.engine import imputation
from deformer_stream.engine.events import Rejection
from deformer_stream.errors import InputError
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.schema import Feature
from deformer_stream.tables.discovery import JSON_LINES, find_data_files, has_ending
from deformer_stream.tables.table import CellForm, Table, TableOptions, join_names

ROWS_PER_BATCH = 4096
"""Number of rows that are read and imputed at a time."""
MAX_PENDING_BYTES = 64 * 2**20
"""A row group is written when it has this size, even if it has few rows."""
MAX_LOGGED_FEATURES = 8
"""Maximum number of feature names in a log event."""
DRAW_COLUMN = "draw"
"""The column with the number of the draw, if gaps are filled by random draws."""

ReportProgress = Callable[[int], None]
"""Receives the number of rows that were finished since the last call."""
Floats = NDArray[np.float64]


class RowsParquet(ParquetSink):
    """A Parquet file to which rows are appended in batches.

    Rows are written when enough of them, or enough bytes, have been collected. The limit of bytes bounds the memory if
    rows have many columns.
    """

    def append(self, batch: pa.RecordBatch) -> None:
        """Append rows. They are written in the background when enough rows or bytes have been collected."""
        self._add(batch)
        if sum(pending.nbytes for pending in self._pending) > MAX_PENDING_BYTES:
            self._write_pending()


@dataclass(frozen=True, slots=True)
class ImputeOptions:
    """How missing values (gaps) are filled. Each gap has a distribution, given the present values of its row.

    Attributes:
        interval: Probability of the central prediction interval. The bounds of this interval, in which the missing
            value lies with this probability, are written to two additional columns.
        estimate: Which statistic of the distribution fills the gap of a continuous feature.
        quantiles: Probabilities of quantiles to compute, such as 0.05. Each quantile is written to an additional
            column.
        draws: If not None, gaps are filled with random draws from the distribution instead of the estimate. Each row is
            then repeated this number of times, and no columns for the interval and the quantiles are added.
        seed: The seed of the random draws.
    """

    interval: float = 0.9
    estimate: Literal["median", "mean", "mode"] = "median"
    quantiles: tuple[float, ...] = ()
    draws: int | None = None
    seed: int = 0

    def list_added_columns(self, name: str) -> list[str]:
        """Return the names of the columns that are added after the column `name` of a continuous feature.

        There are none if each row is repeated with random draws.
        """
        if self.draws:
            return []
        bounds = [f"{name}__{bound}" for bound in ("low", "high")]
        return bounds + [f"{name}__q{quantile:g}" for quantile in sorted(self.quantiles)]


def impute_tables(
    sources: Sequence[str | Path],
    output: Path,
    model: DEformer,
    options: ImputeOptions,
    report_progress: ReportProgress | None = None,
    table_options: TableOptions | None = None,
) -> int:
    """Fill the nulls and NaNs in the feature columns of wide tables (one record per row), and write them as Parquet.

    All tables must have the same columns. The output is one table with the rows of all of them, in the order of the
    input.

    A missing value (gap) is filled from the distribution of its feature given the present features of its row. A
    continuous feature gets the estimate of `options.estimate`, a discrete feature its most probable label. Filled
    values have the type of the column.

    Each continuous column is followed by COLUMN__low and COLUMN__high, the bounds of the central interval, and by one
    column per quantile, such as COLUMN__q0.05. These columns are null in rows whose reading was present. The unit of a
    feature is in the metadata of its columns (key "unit"). If
    `options.draws` is set, each row is repeated once per random draw, and the column `draw` numbers the draws from 0.
    Columns that are not features are copied, and so are context features (they condition the others, but the model has
    no distribution for them).

    Cells that cannot be read, such as a text in a column of numbers, are not filled. They become null, and the readings
    of their row are filled without them. A warning is logged with their number. Rows of a CSV file with a wrong number
    of cells are left out, with a warning as well.

    Args:
        sources: Parquet and CSV files, folders of such files, and patterns.
        output: The Parquet file to write.
        model: The network, in evaluation mode.
        options: How to fill the gaps.
        report_progress: A function that is called after each batch, with the number of rows of the batch.
        table_options: How tables are read: dialect of CSV files and zone of times. None for the defaults.

    Returns:
        The number of gaps that were filled.

    Raises:
        InputError: A table cannot be read or has no feature of the model. Or a column of a table has the name of a
            column that is added, or the tables have different columns.
    """
    tables = _open_tables(sources, model, options, table_options or TableOptions())
    log_dialects(tables)
    feature_by_name = {name: model.schema.features[code] for name, code in model.schema.code_by_name.items()}
    columns = tables[0].schema.names
    feature_columns = [name for name in columns if name in feature_by_name]
    type_by_column = _unify_column_types(tables, feature_by_name)
    output_schema = _make_output_schema(type_by_column, feature_by_name, options)
    codec = Codec(model.schema, order="schema")
    has_column = np.isin(np.arange(len(model.schema)), [model.schema.code_by_name[name] for name in feature_columns])
    num_filled = first_row = 0
    bad_cells = BadCells()
    sink = RowsParquet(output, output_schema)
    try:
        for table, batch, row_numbers in _iterate_batches(tables, columns, feature_by_name):
            row_ids = [str(row) for row in range(first_row, first_row + batch.num_rows)]
            events, rejections = codec.decode(WideRows(table.name, batch, row_ids, 0, row_numbers=row_numbers))
            bad_cells.add(table, row_numbers, rejections)
            # The codec decodes a null as an event with the value NaN, and rejects infinite values and bad texts.
            values = np.full((batch.num_rows, len(model.schema)), np.nan)
            is_accepted = np.zeros(values.shape, bool)  # false for a rejected cell: neither present nor a gap
            values[events.message_indices, events.features] = events.values
            is_accepted[events.message_indices, events.features] = True
            is_gap = has_column & is_accepted & np.isnan(values)
            num_filled += int((is_gap & ~model.schema.is_context).sum())
            new_values, added_columns = _compute_values(model, values, is_gap, options, first_row)
            rows = pa.array(np.repeat(np.arange(batch.num_rows), options.draws or 1))
            arrays: list[pa.Array] = []
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                feature, code = feature_by_name.get(name), model.schema.code_by_name.get(name)
                if feature is None or feature.context or code is None:
                    arrays.append(copy_column(column.take(rows), output_schema.field(name).type))
                    continue
                description = f"{table.name}: column {name!r}"
                filled = fill_gaps(column.take(rows), feature, new_values[:, code], description)
                arrays.append(copy_column(filled, output_schema.field(name).type))
                if _is_continuous_reading(feature):
                    arrays += [make_nullable(added[:, code]) for added in added_columns]
            if options.draws:
                arrays.append(pa.array(np.tile(np.arange(options.draws), batch.num_rows)))
            sink.append(pa.RecordBatch.from_arrays(arrays, schema=output_schema))
            first_row += batch.num_rows
            if report_progress is not None:
                report_progress(batch.num_rows)
        sink.close()
    finally:
        sink.discard()  # does nothing after `close`; after an error it deletes the incomplete file
    _log_features_without_column(feature_by_name, feature_columns)
    bad_cells.log()
    log_bad_rows(tables)
    return num_filled


@dataclass(slots=True)
class BadCells:
    """The cells of features that cannot be read.

    Attributes:
        num_cells: Number of these cells.
        first: Which cell was the first one, and what is wrong with it; "" if there is none.
    """

    num_cells: int = 0
    first: str = ""

    def add(self, table: Table, rows: NDArray[np.int64], rejections: Sequence[Rejection]) -> None:
        """Count the cells that were rejected in some rows.

        Args:
            table: The table.
            rows: (N,) numbers of these rows in the table.
            rejections: The rejections of the codec.
        """
        self.num_cells += sum(rejection.num_readings for rejection in rejections)
        if rejections and not self.first:
            row = int(rows[min(rejection.message_index for rejection in rejections)])
            first = min(rejections, key=lambda rejection: rejection.message_index)
            self.first = f"{table.name}: row {row}, {first.detail}"

    def log(self) -> None:
        """Log a warning if there are such cells."""
        if self.num_cells:
            log.get_logger("impute").warning(
                "cells_not_read",
                cells=self.num_cells,
                first=self.first,
                remedy="correct these cells, or empty them to have them filled",
            )


def _iterate_batches(
    tables: Sequence[Table], columns: Sequence[str], feature_by_name: dict[str, Feature]
) -> Iterator[tuple[Table, pa.RecordBatch, NDArray[np.int64]]]:
    """Yield the rows of all tables in batches, each with its table and the numbers of its rows in this table.

    Args:
        tables: The tables.
        columns: Names of the columns to read.
        feature_by_name: The features of the model by name.
    """
    for table in tables:
        for batch, rows in table.iterate_numbered(columns, ROWS_PER_BATCH, choose_cell_forms(table, feature_by_name)):
            yield table, batch, rows


def _log_features_without_column(feature_by_name: dict[str, Feature], feature_columns: list[str]) -> None:
    """Log the features of the model that are not imputed, because the table has no column for them.

    Args:
        feature_by_name: The features of the model by name.
        feature_columns: The columns of the table that are features.
    """
    missing = [name for name, feature in feature_by_name.items() if name not in feature_columns and not feature.context]
    if missing:
        log.get_logger("impute").info(
            "features_without_column_not_imputed",
            features=missing[:MAX_LOGGED_FEATURES],
            remedy="add a column of nulls for each feature to impute",
        )


def _compute_values(
    model: DEformer, values: Floats, is_gap: NDArray[np.bool_], options: ImputeOptions, first_row: int
) -> tuple[Floats, list[Floats]]:
    """Compute the values that fill the gaps (missing values) of N records of a model with F features.

    Args:
        model: The network, in evaluation mode.
        values: (N, F) readings in raw units, and label codes of discrete features; NaN if missing.
        is_gap: (N, F) whether the value is missing and must be computed.
        options: How to fill the gaps.
        first_row: Number of the first record in the table. It makes the random draws of each batch independent.

    Returns:
        A pair. First, the values of the gaps, NaN elsewhere: (N, F), or (N · draws, F) if `options.draws` is set, with
        the draws of a record in successive rows. Second, a list of arrays (N, F) for the added columns: the lower and
        the upper bound of the interval, then the quantiles in ascending order. The list is empty if `options.draws` is
        set.
    """
    if options.draws:
        batch_seed = np.random.SeedSequence([options.seed, first_row]).generate_state(1, np.uint64)[0]
        seed = int(batch_seed >> 1)  # 63 bits, so that it fits into a signed integer
        draws = imputation.sample_completions(model, values, is_gap, options.draws, seed)  # (draws, N, F)
        drawn_values = np.where(is_gap, draws, np.nan)
        # (draws, N, F) to (N, draws, F) to (N · draws, F)
        return drawn_values.transpose(1, 0, 2).reshape(-1, drawn_values.shape[2]), []
    imputed = imputation.impute(model, values, is_gap, options.interval)
    new_values = {"median": imputed.median, "mean": imputed.mean, "mode": imputed.mode}[options.estimate]
    # A discrete feature has no mean or mode; its most probable label is stored as the median.
    new_values = np.where(np.isnan(new_values), imputed.median, new_values)
    quantiles: list[Floats] = []
    if options.quantiles:
        quantiles = list(imputation.impute_quantiles(model, values, is_gap, sorted(options.quantiles)))
    return new_values, [imputed.low, imputed.high, *quantiles]


def write_samples(
    output: Path, model: DEformer, count: int, seed: int, report_progress: ReportProgress | None = None
) -> None:
    """Draw random records from the model and write them as a wide Parquet table (one record per row).

    The table has one column per feature, in raw units, with labels as text. The columns of context features, which
    only condition the others, are null, because the model has no distribution for them.

    Args:
        output: The Parquet file to write.
        model: The network, in evaluation mode.
        count: Number of records to draw.
        seed: The seed of the random numbers.
        report_progress: A function that is called after each batch, with the number of records of the batch.
    """
    features = model.schema.features
    output_schema = pa.schema(
        [
            pa.field(feature.name, _get_value_type(feature), metadata=_make_unit_metadata(feature))
            for feature in features
        ]
    )
    sink = RowsParquet(output, output_schema)
    try:
        for values in imputation.sample_records(model, count, seed):
            arrays = [
                _decode_labels(feature, column) if feature.labels else make_nullable(column)
                for feature, column in zip(features, values.T, strict=True)
            ]
            sink.append(pa.RecordBatch.from_arrays(arrays, schema=output_schema))
            if report_progress is not None:
                report_progress(len(values))
        sink.close()
    finally:
        sink.discard()  # does nothing after `close`; after an error it deletes the incomplete file


def _open_tables(
    sources: Sequence[str | Path], model: DEformer, options: ImputeOptions, table_options: TableOptions
) -> list[Table]:
    """Open wide tables (one record per row) and check that their gaps can be filled.

    Args:
        sources: Parquet and CSV files, folders and patterns.
        model: The network, whose features are looked for among the columns.
        options: How to fill the gaps (missing values). This determines the columns that are added to the output.
        table_options: How to read the tables.

    Raises:
        InputError: An input is no table or has no feature of the model. Or a column of a table has the name of a column
            that is added, or the tables have different columns.
    """
    files = find_data_files(sources)
    for path in files:
        if has_ending(path, JSON_LINES):
            raise InputError(
                f"{path}: this input is not a wide table (one row per record), as imputation needs; "
                "name Parquet or CSV files"
            )
    tables = Table.open_all(files, replace(table_options, kept_columns=frozenset(model.schema.names)))
    for table in tables:
        _check_table(table, model, options)
        if set(table.schema.names) != set(tables[0].schema.names):
            different = sorted(set(table.schema.names) ^ set(tables[0].schema.names))
            raise InputError(
                f"{table.name}: this table and {tables[0].name} have different columns ({join_names(different)}); "
                "impute them one by one"
            )
    return tables


def _check_table(table: Table, model: DEformer, options: ImputeOptions) -> None:
    """Check that the gaps of a wide table can be filled.

    Args:
        table: The table.
        model: The network, whose features are looked for among the columns.
        options: How to fill the gaps (missing values). This determines the columns that are added to the output.

    Raises:
        InputError: The table has no feature of the model, or a column has the name of a column that is added.
    """
    columns = set(table.schema.names)
    features = [feature for feature in model.schema.features if feature.name in columns]
    if not features:
        raise InputError(
            f"{table.name}: no column is a feature of the model (the columns are {table.format_column_names()}, "
            f"the features are {join_names(model.schema.names)}); choose another model or another table"
        )
    table.check_number_columns([feature.name for feature in features if not feature.labels])
    added_column_sets = [
        set(options.list_added_columns(feature.name)) for feature in features if _is_continuous_reading(feature)
    ]
    if options.draws:
        added_column_sets.append({DRAW_COLUMN})
    for added_columns in added_column_sets:
        conflicts = columns & added_columns
        if conflicts:
            raise InputError(
                f"{table.name}: imputation adds a column {min(conflicts)!r}, but the table already has a column of "
                "this name; rename or remove the column of the table"
            )


def _get_value_type(feature: Feature) -> pa.DataType:
    """Return the Arrow type of a feature's values: text for a discrete feature with labels, else float64."""
    return pa.string() if feature.labels else pa.float64()


def _is_continuous_reading(feature: Feature | None) -> bool:
    """Return whether prediction intervals can be computed for a feature: it is continuous and has a distribution.

    Context features condition the others, but the model has no distribution for them.

    Args:
        feature: The feature, or None for a column that is not a feature.
    """
    return feature is not None and not feature.context and not feature.labels


def _unify_column_types(tables: Sequence[Table], feature_by_name: dict[str, Feature]) -> dict[str, pa.DataType]:
    """Return the type of each column, which fits its cells in all tables.

    Args:
        tables: The tables, which have the same columns.
        feature_by_name: The features of the model by name.

    Raises:
        InputError: A column has types in two tables that do not fit each other.
    """
    type_by_column: dict[str, pa.DataType] = {}
    for table in tables:
        types = find_column_types(table, choose_cell_forms(table, feature_by_name), feature_by_name)
        for name, column_type in types.items():
            fields = [pa.field(name, known) for known in (type_by_column.get(name, column_type), column_type)]
            try:
                unified = pa.unify_schemas([pa.schema([field]) for field in fields], promote_options="permissive")
            except pa.ArrowException as error:
                raise InputError(
                    f"{table.name}: column {name!r} has the type {column_type}, but another table has "
                    f"{type_by_column[name]}; convert the columns to the same type, or impute the tables one by one"
                ) from error
            type_by_column[name] = unified.field(name).type
    return {name: type_by_column[name] for name in tables[0].schema.names}


def find_column_types(
    table: Table, forms: dict[str, CellForm], feature_by_name: dict[str, Feature]
) -> dict[str, pa.DataType]:
    """Return the type of each column of the table, as its cells are read.

    The types of a CSV file are guessed from its beginning. It is read once more here, because a column that is copied
    must have a type that fits all of its cells. Features keep the type of their values.

    Args:
        table: The table.
        forms: What the cells of features are to be.
        feature_by_name: The features of the model by name.
    """
    type_by_column: dict[str, pa.DataType] = dict(zip(table.schema.names, table.schema.types, strict=True))
    for name, form in forms.items():
        if table.is_text_column(name) and (form == "number" or table.dialect is not None):
            type_by_column[name] = _get_value_type(feature_by_name[name])
    if table.dialect is None:
        return type_by_column
    copied_columns = [name for name in table.schema.names if name not in forms and name not in table.partition_values]
    types_by_column: dict[str, set[pa.DataType]] = {name: set() for name in copied_columns}
    for batch in table.iterate_batches(copied_columns, ROWS_PER_BATCH) if copied_columns else ():
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if column.null_count < len(column):
                types_by_column[name].add(column.type)
    for name, types in types_by_column.items():
        if types <= {pa.int64(), pa.float64()} and len(types) > 1:
            type_by_column[name] = pa.float64()
        elif types:
            type_by_column[name] = types.pop() if len(types) == 1 else pa.string()
    return type_by_column


def copy_column(column: pa.Array, column_type: pa.DataType) -> pa.Array:
    """Return a column that is not imputed, in the type that it has in the output."""
    return column if column.type == column_type else column.cast(column_type)


def _make_output_schema(
    type_by_column: dict[str, pa.DataType], feature_by_name: dict[str, Feature], options: ImputeOptions
) -> pa.Schema:
    """Return the Arrow schema of the output: the table's columns, each followed by the columns that are added for it.

    Args:
        type_by_column: The type of each column of the table, as its cells are read.
        feature_by_name: The features of the model by name.
        options: How the gaps (missing values) are filled. This determines the added columns.
    """
    fields: list[pa.Field] = []
    for name, column_type in type_by_column.items():
        feature = feature_by_name.get(name)
        unit = None if feature is None else _make_unit_metadata(feature)
        if feature is None or feature.context:  # the column is copied
            fields.append(pa.field(name, column_type, metadata=unit))
            continue
        fields.append(pa.field(name, _get_filled_type(column_type, feature), metadata=unit))
        if _is_continuous_reading(feature):
            fields += [pa.field(added, pa.float64(), metadata=unit) for added in options.list_added_columns(name)]
    if options.draws:
        fields.append(pa.field(DRAW_COLUMN, pa.int64()))
    return pa.schema(fields)


def _make_unit_metadata(feature: Feature) -> dict[str, str] | None:
    """Return the metadata of a feature's column in Arrow and Parquet, which contains its unit; None if it has none."""
    return None if feature.unit is None else {"unit": feature.unit}


def _get_filled_type(column_type: pa.DataType, feature: Feature) -> pa.DataType:
    """Return the type that the column of a feature has in the output, after its gaps (missing values) are filled.

    It is the column's type in the input, with two exceptions. A dictionary-encoded column gets the type of its values.
    A column of nulls, of times of day, or of numbers that are stored as text, gets the type of the feature's values:
    float64 or text. Times of day become seconds since midnight.

    Args:
        column_type: The type of the column in the input.
        feature: The feature.
    """
    value_type = column_type.value_type if pa.types.is_dictionary(column_type) else column_type
    is_number_text = is_text(value_type) and not feature.labels
    is_replaced = pa.types.is_null(value_type) or pa.types.is_time(value_type) or is_number_text
    return _get_value_type(feature) if is_replaced else value_type


def fill_gaps(column: pa.Array, feature: Feature, values: Floats, description: str) -> pa.Array:
    """Return a column of a table with its gaps (missing values) filled.

    Args:
        column: The N cells of the column.
        feature: The feature of the column.
        values: (N,) a value for each gap, NaN for all other cells. For a discrete feature it is the index of a label.
        description: Name of the file and of the column for error messages.

    Raises:
        InputError: The column's type cannot hold the values.
    """
    filled_type = _get_filled_type(column.type, feature)
    try:
        if pa.types.is_integer(filled_type) and not feature.labels:
            # An estimate may have a fraction, or lie outside the range of a small integer type.
            limits = np.iinfo(filled_type.to_pandas_dtype())
            values = np.clip(np.round(values), limits.min, limits.max)
        new_cells = _decode_labels(feature, values) if feature.labels else make_nullable(values)
        # Null if the cell is not a gap. With safe=False, a number may be rounded to the precision of the column.
        new_cells = new_cells.cast(filled_type, safe=False)
        old_cells = decode_dictionary(convert_times_of_day(column))
        if is_text(old_cells.type) and not feature.labels:  # texts that spell no number become null
            old_cells = make_nullable(parse_numbers(old_cells, feature)[0])
        return pc.if_else(new_cells.is_valid(), new_cells, old_cells.cast(filled_type))
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"{description} has the type {column.type}, which cannot hold the imputed values ({reason}); convert "
            "numbers to float64, and labels to text"
        ) from error


def make_nullable(values: Floats) -> pa.Array:
    """Return numbers as an Arrow array of float64 with nulls in place of NaN."""
    return pa.array(values, pa.float64(), mask=np.isnan(values))


def _decode_labels(feature: Feature, codes: Floats) -> pa.Array:
    """Return the labels of a discrete feature as N texts, null where the code is NaN.

    Args:
        feature: The feature.
        codes: (N,) indexes into the feature's labels, or NaN.
    """
    is_missing = np.isnan(codes)
    # NaN cannot be converted to an integer, so it is replaced by 0 and masked.
    label_indexes = pa.array(np.where(is_missing, 0, codes).astype(np.int64), mask=is_missing)
    return pa.array(feature.labels, pa.string()).take(label_indexes)
