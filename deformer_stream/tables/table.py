"""A table with a schema that yields batches of rows: a Parquet file, a CSV file, or a table in memory.

All differences between the formats end here. Cells that a file holds as text, which all cells of a CSV file are, are
converted to numbers and times when they are read, by one conversion for all formats (`deformer_stream.tables.conversion`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from deformer_stream.tables.csv_dialect import CsvDialect, CsvOptions

Layout = Literal["wide", "long"]
"""wide: a row is a record and a column is a feature. long: a row is one reading of one feature of a record."""

CellForm = Literal["number", "mixed", "text", "time"]
"""What the cells of a column are to be, if the table holds them as text. Columns of other types stay as they are.

    number  numbers: the batch has float64. If a cell of the batch spells no number, the batch has text instead, in
            which numbers have a decimal point and texts such as "No Data" are null; so one bad cell can be rejected.
    mixed   numbers and labels (the values of a long table): text, in which numbers have a decimal point
    text    labels, names and ids: text, unchanged
    time    times: timestamps in microseconds and UTC. If a cell of the batch is no time, the batch has text instead, in
            which times are written as RFC 3339. A column of timestamps without a zone gets one as well.
"""


@dataclass(frozen=True, slots=True)
class TableOptions:
    """How tables are read, by the options that all commands share.

    Attributes:
        csv: The properties of CSV files that the user has set. `decimal` holds for numbers that a Parquet file holds as
            text, too.
        timezone: The zone of times that are written without one, such as "Europe/Berlin". None if the user has set
            none: text times then count as UTC or are refused (see `Table.iterate_batches`), and timestamps count as UTC.
        kept_columns: Columns that are not left out although they are the index of a pandas data frame, because an
            option or the model names them.
    """

    csv: CsvOptions = field(default_factory=CsvOptions)
    timezone: str | None = None
    kept_columns: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose columns are known and whose rows can be read, any number of times.

    Attributes:
        name: The path of the file, or the name of a table in memory, for messages.
        schema: Names and types of the columns, without metadata. The types of a CSV file are guessed from its
            beginning: a later cell may not fit, and the batch then has text (see `CellForm`). Columns of the path
            (`site=north/`) come last.
        num_rows: Number of rows, or None for a CSV file, whose rows are not counted in advance.
        units: The units of columns by name, as the file states them; columns without a unit have no entry.
        index_columns: Names of columns that are the index of a pandas data frame and not in `schema`.
        partition_columns: Names of the columns that come from the path.
        dialect: The dialect of a CSV file, None for other formats.
        options: How the table is read.
    """

    name: str
    schema: pa.Schema
    num_rows: int | None
    units: Mapping[str, str] = field(default_factory=dict)
    index_columns: tuple[str, ...] = ()
    partition_columns: tuple[str, ...] = ()
    dialect: CsvDialect | None = None
    options: TableOptions = TableOptions()

    @staticmethod
    def open(path: Path, options: TableOptions | None = None) -> Table:
        """Open a Parquet or CSV file to find out the names and types of its columns; no rows are returned.

        Args:
            path: The file. A name that ends as in `deformer_stream.tables.discovery.CSV` means CSV, all others Parquet.
            options: How to read it; None for the defaults.

        Raises:
            InputError: The file cannot be read, or two of its columns have the same name.
        """
        raise NotImplementedError

    @staticmethod
    def open_all(paths: Sequence[Path], options: TableOptions | None = None) -> list[Table]:
        """Open several files; columns of their paths (`site=north/`) have one type in all of them.

        Args:
            paths: The files.
            options: How to read them; None for the defaults.

        Raises:
            InputError: A file cannot be read.
        """
        raise NotImplementedError

    @staticmethod
    def from_arrow(table: pa.Table, name: str = "the data frame", options: TableOptions | None = None) -> Table:
        """Return a table in memory, such as a converted data frame.

        Args:
            table: The rows. Index columns of pandas are left out, as in a Parquet file.
            name: What messages call the table.
            options: How to read it; None for the defaults.

        Raises:
            InputError: Two columns have the same name.
        """
        raise NotImplementedError

    @property
    def stem(self) -> str:
        """The file's name without its folder and ending: the device of a table without a column of devices."""
        raise NotImplementedError

    def iterate_batches(
        self,
        columns: Sequence[str],
        max_rows: int,
        forms: Mapping[str, CellForm] | None = None,
        *,
        refuse_local_times: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the given columns in batches, in bounded memory.

        Args:
            columns: Names of the columns to read.
            max_rows: Maximum number of rows of a batch.
            forms: For columns that the table holds as text, what their cells are to be. The default is what `schema`
                says; a text column of a Parquet file stays text. The type of a column may differ between batches.
            refuse_local_times: Whether to raise an error if the first times of a column of form "time" are texts
                without a zone and the user has set none. If False, such times count as UTC.

        Raises:
            InputError: The file cannot be read to its end, or times without a zone are refused.
        """
        raise NotImplementedError
