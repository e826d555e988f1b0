"""The rows of each value of the column `--per` of `deformer-train`: options, checks, and one file for each value.

This module imports no PyTorch, so that `--dry-run` reports a wrong column at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from deformer_stream.codec.columns import decode_dictionary
from deformer_stream.counts import format_count
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.tables.data_files import RemoteFile
from deformer_stream.tables.labels import encode_labels
from deformer_stream.tables.parts import encode_values, split_table
from deformer_stream.tables.table import Table, describe_bad_rows
from trainer.data import DataOptions, create_data_options
from trainer.prepare import open_with_options
from trainer.settings import TrainConfig
from trainer.tables import FEATURE, RECORD, VALUE, InputTables, TableSource, iterate_record_values

PARTS_FOLDER = ".parts"
"""Name of the folder in `--out` with the rows of each value, which is deleted at the end."""

BATCH_ROWS = 65_536
"""Number of rows that are read at once to find out which features a value has."""


@dataclass
class ValueRows:
    """One value and its rows.

    Attributes:
        value: The value.
        tables: Its rows, one table for each input table that has rows of it.
        num_records: Number of its normal records. None for irregular readings, whose records are not counted before.
        digest: Hexadecimal digest of the rows.
    """

    value: str
    tables: list[Table] = field(default_factory=list)
    num_records: int | None = None
    digest: str = ""


def create_options(settings: TrainConfig, column: str) -> DataOptions:
    """Return the options for reading the tables, in which the column `--per` is no feature and is not left out."""
    options = create_data_options(settings)
    for option in ("context", "discrete", "continuous"):
        if column in getattr(options, option):
            raise ConfigError(f"--{option} {column}: the column of --per is no feature; name it in one option only")
    reading = replace(options.reading, kept_columns=options.reading.kept_columns | {column})
    return replace(options, reading=reading, exclude=tuple(name for name in options.exclude if name != column))


def open_tables_with_column(sources: Sequence[TableSource], options: DataOptions, column: str) -> InputTables:
    """Open the tables and check that they have the column `--per`.

    Raises:
        ConfigError: There is no such column, or it has another meaning.
        InputError: A table cannot be used.
    """
    tables = open_with_options(sources, options, options.window)
    if column not in tables.schema.names:
        raise ConfigError(
            f"--per {column}: {tables.tables[0].name} has no such column; "
            f"give one of its columns: {', '.join(tables.schema.names)}"
        )
    roles: dict[str | None, str] = {options.label: "the label", tables.time_column: "the time"}
    if tables.layout == "long":
        roles |= {RECORD: "the record's id", FEATURE: "the feature", VALUE: "the value"}
    if column in roles:
        raise ConfigError(f"--per {column}: this column is {roles[column]}; name one such as the type of a machine")
    return tables


def split_by_value(
    tables: InputTables, column: str, folder: Path, on_message: Callable[[str], None]
) -> list[ValueRows]:
    """Write the rows of each value to files of their own.

    Args:
        tables: The tables.
        column: The column with the value.
        folder: The folder for the files.
        on_message: Called with a line of text about rows that are left out.

    Returns:
        The values in alphabetical order, each with its rows.

    Raises:
        InputError: A table cannot be read, or the column has no value or too many.
    """
    on_message(f"splitting the rows by {column}")
    rows_by_value: dict[str, ValueRows] = {}
    num_left_out = 0
    keep_column = column == tables.device_column  # windows of time need their device
    for number, table in enumerate(tables.tables):
        paths: dict[str, Path] = {}

        def make_path(value: str, number: int = number, paths: dict[str, Path] = paths) -> Path:
            """Return the path of the file of a value, and keep it in `paths`."""
            paths[value] = folder / f"{number}-{len(paths)}.parquet"
            return paths[value]

        parts, num_without_value = split_table(table, column, make_path, keep_column=keep_column)
        num_left_out += num_without_value
        for value, part in parts.items():
            value_rows = rows_by_value.setdefault(value, ValueRows(value))
            value_rows.tables.append(part)
            # A table whose value comes from its path is not written to a file of its own.
            value_rows.digest = hash_texts([value_rows.digest, *_describe_content(table, paths.get(value))])
    if bad_rows := describe_bad_rows(tables.tables):
        on_message(bad_rows)
    if num_left_out:
        on_message(f"left out: {format_count(num_left_out, 'row')} without {column}")
    if not rows_by_value:
        raise InputError(f"the column {column!r} of --per has no value in any row: choose another column")
    return [rows_by_value[value] for value in sorted(rows_by_value)]


def _describe_content(table: Table, part: Path | None) -> tuple[str, ...]:
    """Return texts that identify the rows of a value in a table.

    Args:
        table: The table.
        part: The file with its rows of the value, whose content is hashed. None if the value of all rows is part of the
            path of the table. Its name, its size and the time of its last change are then returned.
    """
    if part is not None:
        with part.open("rb") as file:
            return (hashlib.file_digest(file, "blake2b").hexdigest(),)
    if isinstance(table.path, RemoteFile):
        return table.name, str(table.path.size), str(table.path.modified)
    if table.path is None:  # tables in memory have no path that states a value
        return (table.name,)
    status = table.path.stat()
    return table.name, str(status.st_size), str(status.st_mtime_ns)


def hash_texts(texts: Iterable[str]) -> str:
    """Return a hexadecimal digest of texts."""
    return hashlib.blake2b(json.dumps(list(texts)).encode(), digest_size=16).hexdigest()


def check_records_have_one_value(tables: InputTables, column: str) -> None:
    """Check that all rows of a record have the same value in a column, or none.

    Otherwise the readings of the record would be divided between the models of its values.

    Args:
        tables: The tables. Nothing is read if a row is a record, or if the column is the device of windows of time.
        column: The column.

    Raises:
        InputError: The rows of a record have several values.
    """
    if column == tables.device_column or (tables.layout == "wide" and tables.window is None):
        return
    code_by_value: dict[str, int] = {}
    code_by_record = np.empty(0, np.int64)  # of the value that was seen first, −1 for none so far
    for records, values, table in iterate_record_values(tables, column):
        codes, texts = encode_values(values)
        codes = np.array([*(code_by_value.setdefault(text, len(code_by_value)) for text in texts), -1])[codes]
        is_known = (records >= 0) & (codes >= 0)
        records, codes = records[is_known], codes[is_known]
        num_new = int(records.max(initial=-1)) + 1 - len(code_by_record)
        code_by_record = np.append(code_by_record, np.full(max(0, num_new), -1))
        unseen = np.flatnonzero(code_by_record[records] < 0)[::-1]  # reversed, so that the first row of a record counts
        code_by_record[records[unseen]] = codes[unseen]
        differing = np.flatnonzero(code_by_record[records] != codes)
        if len(differing):
            names = list(code_by_value)
            first, other = names[code_by_record[records[differing[0]]]], names[codes[differing[0]]]
            raise InputError(
                f"{table.name}: the rows of one record have different values in the column {column!r} of --per, "
                f"{first!r} and {other!r}, so its model is not clear; correct the column, or choose one with the same "
                "value in all rows of a record"
            )


def find_features(parts: Sequence[Table], tables: InputTables) -> frozenset[str]:
    """Return the features that occur in tables: the columns with a value or, in the long layout, the named features.

    Args:
        parts: The rows of one value.
        tables: The tables with all rows, which state the layout and the columns that are no features.
    """
    found: set[str] = set()
    others = {RECORD, tables.label_column, tables.time_column, tables.device_column}
    for table in parts:
        if tables.layout == "long":
            for batch in table.iterate_batches([FEATURE], BATCH_ROWS, {FEATURE: "text"}):
                found.update(encode_labels(batch.column(0))[1])
            continue
        names = [name for name in table.schema.names if name not in others]
        for batch in table.iterate_batches(names, BATCH_ROWS):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                if name not in found and _has_value(tables.fill_values.remove(name, column)):
                    found.add(name)
    return frozenset(found)


def _has_value(column: pa.Array) -> bool:
    """Return whether a column has a cell that is neither null nor NaN."""
    values = decode_dictionary(column)
    is_missing = values.is_null(nan_is_null=True)
    return not np.asarray(is_missing.to_numpy(zero_copy_only=False)).all()
