"""The formats of tables that are written: Parquet, or CSV if the name ends in .csv or .tsv."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from deformer_stream.errors import ConfigError
from deformer_stream.tables.discovery import CSV, JSON_LINES, has_ending

DELIMITER_BY_ENDING = {".csv": ",", ".tsv": "\t"}
"""The endings of names of files that are written as CSV, with the character between cells."""

OTHER_FORMATS = (
    *CSV,  # compressed
    *JSON_LINES,
    *(".xlsx", ".xls", ".xlsm", ".xlsb", ".ods", ".txt", ".html", ".htm", ".xml", ".md", ".pdf"),
    *(".feather", ".arrow", ".ipc", ".orc", ".avro", ".h5", ".hdf5", ".npy", ".npz", ".pkl", ".pickle", ".mat"),
    *(".db", ".sqlite", ".sqlite3", ".duckdb", ".safetensors", ".toml", ".yaml", ".yml"),
    *(".gz", ".bz2", ".xz", ".zst", ".zip", ".7z", ".tar"),
)
"""Endings of the names of files in formats that are not written. A program that opens a file by its ending would not
find a table there."""


class TableWriter(Protocol):
    """An open table file, to which rows are appended."""

    def write_table(self, table: pa.Table) -> None:
        """Append rows."""

    def close(self) -> None:
        """Write the end of the file."""


class CsvWriter:
    """A CSV file with a line of column names, a `TableWriter`. Texts are quoted, so that an empty text is not a null.

    Args:
        path: The file.
        columns: Names and types of the columns.
        delimiter: The character between cells.
    """

    def __init__(self, path: Path, columns: pa.Schema, delimiter: str) -> None:
        # CSV has no dictionaries, so their values are written.
        self._columns = pa.schema([pa.field(column.name, _get_plain_type(column.type)) for column in columns])
        self._writer = pacsv.CSVWriter(path, self._columns, write_options=pacsv.WriteOptions(delimiter=delimiter))

    def write_table(self, table: pa.Table) -> None:
        """Append rows."""
        self._writer.write_table(table.cast(self._columns))

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def check_table_path(path: Path, columns: pa.Schema) -> None:
    """Check that a table can be written in the format that the ending of a name states.

    Args:
        path: The name of the file. Without an ending, or with an unknown one, it is written as Parquet.
        columns: Names and types of the columns.

    Raises:
        ConfigError: It cannot.
    """
    if _find_delimiter(path) is not None:
        nested = [column.name for column in columns if pa.types.is_nested(_get_plain_type(column.type))]
        if nested:
            raise ConfigError(
                f"{path}: CSV cannot hold the column {nested[0]!r} of the type {columns.field(nested[0]).type}; choose "
                "a name that ends in .parquet"
            )
    elif has_ending(path, OTHER_FORMATS):
        raise ConfigError(
            f"{path}: tables are written as Parquet or CSV; choose a name that ends in .parquet, .csv or .tsv"
        )


def open_table(partial_path: Path, path: Path, columns: pa.Schema) -> TableWriter:
    """Return the writer of a table.

    Args:
        partial_path: The name under which the file is written.
        path: The name that it gets at the end, which determines its format (`check_table_path`).
        columns: Names and types of the columns.
    """
    delimiter = _find_delimiter(path)
    if delimiter is not None:
        return CsvWriter(partial_path, columns, delimiter)
    # Floating-point numbers rarely repeat, so a dictionary would slow down the writing and enlarge the file.
    dictionary_columns = [column.name for column in columns if not pa.types.is_floating(column.type)]
    writer: TableWriter = pq.ParquetWriter(partial_path, columns, compression="zstd", use_dictionary=dictionary_columns)
    return writer


def read_written_table(path: Path, columns: pa.Schema) -> pa.Table:
    """Return columns of a table that `open_table` has written.

    Args:
        path: The file.
        columns: Names and types of the columns to read.
    """
    delimiter = _find_delimiter(path)
    if delimiter is None:
        return pq.read_table(path, columns=columns.names)
    types = pacsv.ConvertOptions(
        include_columns=columns.names, column_types=columns, strings_can_be_null=True, quoted_strings_can_be_null=False
    )
    return pacsv.read_csv(path, parse_options=pacsv.ParseOptions(delimiter=delimiter), convert_options=types)


def _find_delimiter(path: Path) -> str | None:
    """Return the character between cells, if the ending of a name is one of CSV; None for Parquet."""
    return next((char for ending, char in DELIMITER_BY_ENDING.items() if has_ending(path, (ending,))), None)


def _get_plain_type(column_type: pa.DataType) -> pa.DataType:
    """Return the type of the values of a column, also if these are encoded by a dictionary."""
    return column_type.value_type if pa.types.is_dictionary(column_type) else column_type
