"""Write tables with values from the model: missing values that were imputed, or complete records that were drawn.

`deformer-stream impute` fills the gaps of a wide table (a row is a record). `deformer-stream sample` draws new records.
Both read and write a limited number of rows at a time, so tables may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from connectors.files.imputed_tables import (
    ROWS_PER_BATCH,
    BadCells,
    ImputeOptions,
    LabelSpellings,
    ReportProgress,
    check_columns,
    compute_columns,
    copy_column,
    get_value_type,
    make_nullable,
    make_output_schema,
    open_imputed_tables,
    unify_column_types,
)
from connectors.files.open_tables import log_bad_rows, log_dialects
from connectors.files.sinks import write_rows
from connectors.files.sources import choose_cell_forms
from deformer_stream import log
from deformer_stream.codec import Codec
from deformer_stream.codec.columns import convert_times_of_day, decode_dictionary, is_text, parse_numbers
from deformer_stream.codec.payloads import WideRows
from deformer_stream.engine import imputation
from deformer_stream.errors import InputError
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.schema import Feature
from deformer_stream.tables.table import Table, TableOptions, join_names

MAX_LOGGED_FEATURES = 8
"""Maximum number of feature names in a log event."""

Floats = NDArray[np.float64]


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
    values have the type of the column. Labels are written as the column writes them, such as True for the label "true".

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
    tables = open_imputed_tables(sources, "a wide table (one row per record)", table_options, model.schema.names)
    continuous_columns = [feature.name for feature in model.schema.features if _is_continuous_reading(feature)]
    for table in tables:
        _check_features(table, model)
        check_columns(table, tables[0], continuous_columns, options)
    log_dialects(tables)
    feature_by_name = {name: model.schema.features[code] for name, code in model.schema.code_by_name.items()}
    columns = tables[0].schema.names
    feature_columns = [name for name in columns if name in feature_by_name]
    fields = _make_fields(unify_column_types(tables, feature_by_name), feature_by_name)
    output_schema = make_output_schema(fields, continuous_columns, options)
    codec = Codec(model.schema, order="schema")
    has_column = np.isin(np.arange(len(model.schema)), [model.schema.code_by_name[name] for name in feature_columns])
    labels_by_column = _find_spellings(tables, feature_by_name)
    num_filled = first_row = 0
    bad_cells = BadCells()
    with write_rows(output, output_schema) as sink:
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
                labels = labels_by_column.get(name, feature.labels)
                filled = fill_gaps(column.take(rows), feature, new_values[:, code], description, labels)
                arrays.append(copy_column(filled, output_schema.field(name).type))
                if _is_continuous_reading(feature):
                    arrays += [make_nullable(added[:, code]) for added in added_columns]
            if options.draws:
                arrays.append(pa.array(np.tile(np.arange(options.draws), batch.num_rows)))
            sink.append(pa.RecordBatch.from_arrays(arrays, schema=output_schema))
            first_row += batch.num_rows
            if report_progress is not None:
                report_progress(batch.num_rows)
    _log_features_without_column(feature_by_name, feature_columns)
    bad_cells.log()
    log_bad_rows(tables)
    return num_filled


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


def _find_spellings(tables: Sequence[Table], feature_by_name: dict[str, Feature]) -> dict[str, list[str]]:
    """Return the labels of each discrete feature whose column holds texts, in the spelling of the column.

    The columns are read once more, because a gap can come before the first cell with its label.

    Args:
        tables: The tables.
        feature_by_name: The features of the model by name.
    """
    features = [feature for feature in feature_by_name.values() if feature.labels and not feature.context]
    spellings_by_column = {feature.name: LabelSpellings(feature) for feature in features}
    for table in tables:
        names = [name for name in table.schema.names if name in spellings_by_column and table.is_text_column(name)]
        if not names:
            continue
        for batch in table.iterate_batches(names, ROWS_PER_BATCH, dict.fromkeys(names, "mixed")):
            for name in names:
                spellings_by_column[name].add(batch.column(name))
    return {name: spellings.list_labels() for name, spellings in spellings_by_column.items()}


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
        seed = options.derive_seed(first_row)
        draws = imputation.sample_completions(model, values, is_gap, options.draws, seed)  # (draws, N, F)
        drawn_values = np.where(is_gap, draws, np.nan)
        # (draws, N, F) to (N, draws, F) to (N · draws, F)
        return drawn_values.transpose(1, 0, 2).reshape(-1, drawn_values.shape[2]), []
    impute = partial(imputation.impute, model, values, is_gap)
    impute_quantiles = partial(imputation.impute_quantiles, model, values, is_gap)
    new_values, *added_columns = compute_columns(impute, impute_quantiles, options)
    return new_values, added_columns


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
        [pa.field(feature.name, get_value_type(feature), metadata=_make_unit_metadata(feature)) for feature in features]
    )
    with write_rows(output, output_schema) as sink:
        for values in imputation.sample_records(model, count, seed):
            arrays = [
                _decode_labels(feature.labels, column) if feature.labels else make_nullable(column)
                for feature, column in zip(features, values.T, strict=True)
            ]
            sink.append(pa.RecordBatch.from_arrays(arrays, schema=output_schema))
            if report_progress is not None:
                report_progress(len(values))


def _check_features(table: Table, model: DEformer) -> None:
    """Check that columns of a wide table are features.

    Args:
        table: The table.
        model: The network, whose features are looked for among the columns.

    Raises:
        InputError: The table has no feature of the model, or a column of a continuous feature does not hold numbers.
    """
    columns = set(table.schema.names)
    features = [feature for feature in model.schema.features if feature.name in columns]
    if not features and model.schema.window is not None:
        raise InputError(
            f"{table.name}: no column is a feature of the model, whose records are windows (the columns are "
            f"{table.format_column_names()}, the features are {join_names(model.schema.names)}); make a wide table "
            "with a row for each window and a column for each feature, or train a model with --irregular, which "
            "imputes readings at their times"
        )
    if not features:
        raise InputError(
            f"{table.name}: no column is a feature of the model (the columns are {table.format_column_names()}, "
            f"the features are {join_names(model.schema.names)}); choose another model or another table"
            f"{table.describe_delimiter()}"
        )
    table.check_number_columns([feature.name for feature in features if not feature.labels])


def _is_continuous_reading(feature: Feature) -> bool:
    """Return whether prediction intervals can be computed for a feature: it is continuous and has a distribution.

    Context features condition the others, but the model has no distribution for them.
    """
    return not feature.context and not feature.labels


def _make_fields(type_by_column: Mapping[str, pa.DataType], feature_by_name: Mapping[str, Feature]) -> list[pa.Field]:
    """Return the Arrow fields of the table's columns in the output, with the units of features.

    Args:
        type_by_column: The type of each column of the table, as its cells are read.
        feature_by_name: The features of the model by name.
    """
    fields: list[pa.Field] = []
    for name, column_type in type_by_column.items():
        feature = feature_by_name.get(name)
        if feature is not None and not feature.context:  # other columns are copied
            column_type = _get_filled_type(column_type, feature)
        fields.append(pa.field(name, column_type, metadata=None if feature is None else _make_unit_metadata(feature)))
    return fields


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
    return get_value_type(feature) if is_replaced else value_type


def fill_gaps(
    column: pa.Array, feature: Feature, values: Floats, description: str, labels: Sequence[str] | None = None
) -> pa.Array:
    """Return a column of a table with its gaps (missing values) filled.

    Args:
        column: The N cells of the column.
        feature: The feature of the column.
        values: (N,) a value for each gap, NaN for all other cells. For a discrete feature it is the index of a label.
        description: Name of the file and of the column for error messages.
        labels: The labels of a discrete feature in the spelling of the column. None finds it in these cells.

    Raises:
        InputError: The column's type cannot hold the values.
    """
    if labels is None:
        labels = _find_spelling(column, feature)
    filled_type = _get_filled_type(column.type, feature)
    try:
        if pa.types.is_integer(filled_type) and not feature.labels:
            # An estimate may have a fraction, or lie outside the range of a small integer type.
            limits = np.iinfo(filled_type.to_pandas_dtype())
            values = np.clip(np.round(values), limits.min, limits.max)
        new_cells = _decode_labels(labels, values) if feature.labels else make_nullable(values)
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


def _find_spelling(column: pa.Array, feature: Feature) -> Sequence[str]:
    """Return the labels of a feature in the spelling of a column, if it holds texts."""
    if not feature.labels or not is_text(decode_dictionary(column).type):
        return feature.labels
    spellings = LabelSpellings(feature)
    spellings.add(column)
    return spellings.list_labels()


def _decode_labels(labels: Sequence[str], codes: Floats) -> pa.Array:
    """Return the labels of a discrete feature as N texts, null where the code is NaN.

    Args:
        labels: The labels.
        codes: (N,) indexes into the labels, or NaN.
    """
    is_missing = np.isnan(codes)
    # NaN cannot be converted to an integer, so it is replaced by 0 and masked.
    label_indexes = pa.array(np.where(is_missing, 0, codes).astype(np.int64), mask=is_missing)
    return pa.array(labels, pa.string()).take(label_indexes)
