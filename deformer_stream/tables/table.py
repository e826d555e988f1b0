"""A table with a schema that yields batches of rows: a Parquet file, a CSV file, or a table in memory.

All differences between the formats end here. Cells that a file holds as text, as a CSV file does, are converted to
numbers and times when they are read. All formats have the same conversion (`deformer_stream.tables.conversion`).
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from deformer_stream.codec.columns import decode_texts, is_text
from deformer_stream.codec.number_texts import Decimal, guess_decimal, parse_number_texts, standardize_number_texts
from deformer_stream.codec.time_columns import convert_times, has_local_texts
from deformer_stream.codec.timestamps import DEFAULT_TIME_FORMAT, TimeFormat
from deformer_stream.errors import ConfigError, InputError, summarize_error
from deformer_stream.settings.base import Layout
from deformer_stream.settings.tables import TableSettings
from deformer_stream.tables import conversion
from deformer_stream.tables.csv_dialect import DELIMITERS, CsvDialect, CsvOptions, guess_dialect, read_sample
from deformer_stream.tables.csv_rows import BadRow, BadRowCounter, CsvRows, OnBadRow, find_bad_rows
from deformer_stream.tables.data_files import DataFile
from deformer_stream.tables.discovery import CSV, get_stem, has_ending
from deformer_stream.tables.filters import BoundFilter, RowFilter, ValueRange, parse_where
from deformer_stream.tables.iceberg import IcebergFile
from deformer_stream.tables.partitions import Value, choose_partition_type, convert_partition, read_partitions

CellForm = Literal["number", "mixed", "text", "time"]
"""The type to which the cells of a column are converted, if the table holds them as text. Columns of other types stay
as they are.

    number  numbers: the batch has float64. If a cell of the batch spells no number, or an integer that float64 rounds,
            the batch has text instead, in which numbers have a decimal point and texts such as "No Data" are null; so
            one bad cell can be rejected, and labels are exact.
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
        time_format: The unit of times that are numbers, and the zone of times that are written without one. If the user
            has set no zone, timestamps count as UTC, and text times count as UTC or are refused
            (`Table.check_time_zone`).
        kept_columns: Columns that are not left out although they are the index of a pandas data frame, because an
            option or the model names them.
        where: A condition that chooses rows. None for all rows.
    """

    csv: CsvOptions = field(default_factory=CsvOptions)
    time_format: TimeFormat = DEFAULT_TIME_FORMAT
    kept_columns: frozenset[str] = frozenset()
    where: RowFilter | None = None

    @staticmethod
    def from_settings(settings: TableSettings, kept_columns: Iterable[str] = ()) -> TableOptions:
        """Return the options that the user has set.

        Args:
            settings: Options of a command that reads tables.
            kept_columns: Names of columns that are kept although they are the index of a data frame.

        Raises:
            ConfigError: The condition of --where cannot be parsed.
        """
        has_header = False if settings.no_header else settings.header
        time_format = TimeFormat.from_names(settings.time_unit, settings.timezone)
        csv = CsvOptions(settings.delimiter, settings.decimal, settings.encoding, has_header)
        where = None if settings.where is None else parse_where(settings.where)
        return TableOptions(csv, time_format, frozenset(kept_columns), where)


SAMPLE_ROWS = 1024
"""Number of rows from which the decimal character of a column of texts is guessed."""

DEFAULT_RECORD_COLUMN = "record"
"""The column of record ids in wide tables unless another one is chosen. A table need not have it."""

OPENING_THREADS = 16
"""Number of files of an object store that are opened at the same time."""

MAX_LISTED_NAMES = 8
"""Number of names in an error message, after which the rest is left out."""

_MEANINGFUL_COLUMNS = frozenset({"record", "device", "feature", "value", "label", "time"})
"""Columns of long tables, which are kept even if they are the index of a data frame."""

_INDEX_NAME = re.compile(r"__index_level_\d+__")
_CSV_INDEX_NAMES = ("", "Unnamed: 0")  # what pandas writes above an index without a name, and reads from it


@contextmanager
def map_read_errors(name: str | Path) -> Iterator[None]:
    """Convert errors of the operating system and of Arrow in a `with` block to `InputError` with the file's name.

    Args:
        name: The file that the `with` block reads.
    """
    try:
        yield
    except PermissionError as error:
        raise InputError(
            f"{name}: the file cannot be read (permission denied); make it readable for this user"
        ) from error
    except (OSError, EOFError, zlib.error, pa.ArrowException, UnicodeError) as error:
        reason = summarize_error(error)
        raise InputError(f"{name}: the file cannot be read ({reason}); repair it, or leave it out") from error


def join_names(names: Sequence[str]) -> str:
    """Return the first `MAX_LISTED_NAMES` names as text for an error message, or "none" if there are no names."""
    ending = ", …" if len(names) > MAX_LISTED_NAMES else ""
    return (", ".join(names[:MAX_LISTED_NAMES]) + ending) or "none"


def describe_bad_rows(tables: Iterable[Table]) -> str | None:
    """Return a sentence about the rows of CSV files that have a wrong number of cells; None if there are none.

    It states their number, the line of the first one, and what to do.

    Args:
        tables: The tables, of any format, whose rows were read.
    """
    first_rows = [(table, table.bad_rows.first) for table in tables if table.bad_rows.first is not None]
    if not first_rows:
        return None
    num_rows = sum(table.bad_rows.num_rows for table, _ in first_rows)
    table, row = first_rows[0]
    line, _ = next(table.find_bad_rows([row]))
    where = f"line {line} of {table.name} has {row.describe()}"
    if num_rows == 1:
        return f"1 row was left out because of a wrong number of cells: {where}; correct it, or check --delimiter"
    files = f" of {len(first_rows)} files" if len(first_rows) > 1 else ""
    return (
        f"{num_rows} rows{files} were left out because of a wrong number of cells, the first one: {where}; "
        "correct them, or check --delimiter"
    )


class _Rows(Protocol):
    """The rows of one format, which can be read any number of times."""

    def read(
        self, columns: Sequence[str], max_rows: int, on_bad_row: OnBadRow | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the given columns, in this order, in batches of at most `max_rows` rows."""


@dataclass(frozen=True, slots=True)
class _ParquetRows:
    """The rows of a Parquet file.

    Attributes:
        path: The file.
    """

    path: DataFile

    def read(
        self, columns: Sequence[str], max_rows: int, on_bad_row: OnBadRow | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the given columns, in this order, in batches of at most `max_rows` rows."""
        names = list(columns)
        if isinstance(self.path, Path):
            # With pre_buffer, Arrow would keep all row groups in memory until the file is closed.
            with pq.ParquetFile(self.path, pre_buffer=False) as file:
                for batch in file.iter_batches(batch_size=max_rows, columns=names):
                    yield batch.select(names)
            return
        with self.path.open_for_seeking() as source:
            metadata = pq.read_metadata(source)
            for row_group in range(metadata.num_row_groups):
                # The columns of a row group are requested together, which is faster than one request for each.
                with pq.ParquetFile(source, metadata=metadata, pre_buffer=True) as file:
                    for batch in file.iter_batches(batch_size=max_rows, row_groups=[row_group], columns=names):
                        yield batch.select(names)
        self.path.check_version()

    def read_matching(
        self, columns: Sequence[str], max_rows: int, condition: BoundFilter
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the rows of those row groups that may have rows for which a condition is true.

        Args:
            columns: Names of the columns.
            max_rows: Maximum number of rows of a batch.
            condition: The condition, which is not applied to the rows.

        Yields:
            The number of the first row of a batch in the file, and the batch.
        """
        names = list(columns)
        with self.path.open("rb") if isinstance(self.path, Path) else self.path.open_for_seeking() as source:
            metadata = pq.read_metadata(source)
            first_row = 0
            for index in range(metadata.num_row_groups):
                row_group = metadata.row_group(index)
                if condition.may_match(_get_ranges(row_group, metadata.schema.to_arrow_schema())):
                    with pq.ParquetFile(source, metadata=metadata, pre_buffer=True) as file:
                        row = first_row
                        for batch in file.iter_batches(batch_size=max_rows, row_groups=[index], columns=names):
                            yield row, batch.select(names)
                            row += batch.num_rows
                first_row += row_group.num_rows
        if not isinstance(self.path, Path):
            self.path.check_version()


def _get_ranges(row_group: pq.RowGroupMetaData, schema: pa.Schema) -> dict[str, ValueRange]:
    """Return what the statistics of a Parquet row group state about its columns.

    Args:
        row_group: The metadata of the row group.
        schema: The schema of the file.
    """
    ranges = {}
    columns = [row_group.column(index) for index in range(row_group.num_columns)]
    num_by_path = Counter(column.path_in_schema for column in columns)
    for column in columns:
        statistics, name = column.statistics, column.path_in_schema
        field_index = schema.get_field_index(name)
        # The field "b" of a structure "a" has the same path as a column "a.b".
        if statistics is None or field_index < 0 or num_by_path[name] > 1:
            continue
        value_type = schema.field(field_index).type
        value_type = value_type.value_type if pa.types.is_dictionary(value_type) else value_type
        # Statistics of floats do not count NaN, which is a missing value.
        may_be_null = pa.types.is_floating(value_type) or not statistics.has_null_count or statistics.null_count > 0
        if statistics.has_min_max:
            try:
                values = pa.array([statistics.min, statistics.max], value_type)
            except (pa.ArrowException, TypeError, ValueError, UnicodeError):  # a type that Python cannot express
                continue
            ranges[name] = ValueRange(values, may_be_null)
        elif statistics.has_null_count and statistics.null_count == row_group.num_rows:
            ranges[name] = ValueRange(pa.nulls(2, value_type), may_be_null=True)
    return ranges


@dataclass(frozen=True, slots=True)
class _IcebergRows:
    """The rows of a data file of an Iceberg table.

    Attributes:
        path: The file.
    """

    path: IcebergFile

    def read(
        self, columns: Sequence[str], max_rows: int, on_bad_row: OnBadRow | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the given columns, in this order, in batches of at most `max_rows` rows."""
        yield from self.path.read(columns, max_rows)


@dataclass(frozen=True, slots=True)
class _MemoryRows:
    """The rows of a table in memory.

    Attributes:
        table: The rows.
    """

    table: pa.Table

    def read(
        self, columns: Sequence[str], max_rows: int, on_bad_row: OnBadRow | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the given columns, in this order, in batches of at most `max_rows` rows."""
        yield from self.table.select(list(columns)).to_batches(max_chunksize=max_rows)


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose columns are known and whose rows can be read, any number of times.

    Attributes:
        name: The path of the file, or the name of a table in memory, for messages.
        schema: Names and types of the columns, without metadata. The types of a CSV file are guessed from its
            beginning: a later cell may not fit, and the batch then has text (see `CellForm`). Columns of the path
            (`site=north/`) come last.
        num_rows: Number of rows, or None for a CSV file, whose rows are not counted in advance, and with a condition
            that chooses rows.
        units: The units of columns by name, as the file states them; columns without a unit have no entry.
        index_columns: Names of columns that are the index of a pandas data frame and not in `schema`.
        partition_values: The columns that come from the path, each with its value in all rows.
        dialect: The dialect of a CSV file, None for other formats.
        options: How the table is read.
        path: The file, None for a table in memory.
    """

    name: str
    schema: pa.Schema
    num_rows: int | None
    units: Mapping[str, str]
    index_columns: tuple[str, ...]
    partition_values: Mapping[str, Value]
    dialect: CsvDialect | None
    options: TableOptions
    _rows: _Rows = field(repr=False)
    _decimals: Mapping[str, Decimal | None] = field(repr=False)  # of the columns of a CSV file
    path: DataFile | None = None
    _condition: BoundFilter | None = field(default=None, repr=False)
    _absent_types: Mapping[str, pa.DataType] = field(default_factory=dict, repr=False)  # of columns of the condition

    @staticmethod
    def open(path: DataFile, options: TableOptions | None = None) -> Table:
        """Open a Parquet or CSV file to find out the names and types of its columns; no rows are returned.

        Args:
            path: The file. A name that ends as in `deformer_stream.tables.discovery.CSV` means CSV, all others Parquet.
            options: How to read it; None for the defaults.

        Raises:
            InputError: The file cannot be read, or two of its columns have the same name.
        """
        return Table.open_all([path], options)[0]

    @staticmethod
    def open_all(paths: Sequence[DataFile], options: TableOptions | None = None) -> list[Table]:
        """Open several files; a column of their paths (`site=north/`) has one type in all of them.

        Args:
            paths: The files.
            options: How to read them; None for the defaults.

        Returns:
            The tables in the order of the files. Files whose folders state that the condition of the options is true
            for none of their rows are not opened, and have no table. But if an opened file has such a column itself,
            all files are opened, because a column of a file has precedence. It is not noticed if only files that are
            left out have the column. A file without a column of the condition has no value in it, if another file has
            the column.

        Raises:
            InputError: A file cannot be read, two of its columns have the same name, or no file can have rows for which
                the condition is true.
            ConfigError: The condition does not fit the columns.
        """
        options = options or TableOptions()
        texts_by_path = {path: read_partitions(path) for path in paths}
        type_by_column = {
            name: choose_partition_type([texts[name] for texts in texts_by_path.values() if name in texts])
            for name in dict.fromkeys(name for texts in texts_by_path.values() for name in texts)
        }

        def open_one(path: DataFile) -> Table:
            """Open one of the files."""
            if isinstance(path, IcebergFile):
                table = _make_table(str(path), path.schema, path.num_rows, options, _IcebergRows(path))
            else:
                table = (_open_csv if has_ending(path, CSV) else _open_parquet)(path, options)
            types = {name: (type_by_column[name], text) for name, text in texts_by_path[path].items()}
            return replace(table, path=path)._add_partitions(types)

        tested = () if options.where is None else tuple(options.where.columns)
        if options.where is None:
            tables = _map_on_threads(open_one, paths)
        else:
            chosen = _choose_matching(paths, options.where, options.time_format, texts_by_path, type_by_column)
            first = chosen or paths[:1]
            tables = _map_on_threads(open_one, first)
            # The columns of a file have precedence over those of its path, and decide about each row.
            of_paths = type_by_column.keys() & tested
            if len(chosen) < len(paths) and any(table._has_own_column(of_paths) for table in tables):
                table_by_path = dict(zip(first, tables, strict=True))
                rest = [path for path in paths if path not in table_by_path]
                table_by_path |= zip(rest, _map_on_threads(open_one, rest), strict=True)
                tables = [table_by_path[path] for path in paths]
            elif paths and not chosen:
                raise InputError(f"no file can have rows with --where {options.where.text}; check the condition")
        columns = [table.schema.field(name) for table in tables for name in tested if name in table.schema.names]
        types = {column.name: column.type for column in columns}
        return [table._bind_condition(types) for table in tables]

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
        opened = _make_table(name, table.schema, table.num_rows, options or TableOptions(), _MemoryRows(table))
        return opened._bind_condition()

    @property
    def stem(self) -> str:
        """The file's name without its folder and ending: the device of a table without a column of devices."""
        return get_stem(self.name)

    def describe_dialect(self) -> str | None:
        """Return how a CSV file is read, "pumps.csv: delimiter ';', decimal comma, …"; None for other formats."""
        return None if self.dialect is None else f"{self.name}: {self.dialect.describe()}"

    @property
    def bad_rows(self) -> BadRowCounter:
        """The number of rows of a CSV file that were left out when it was read, because of a wrong number of cells."""
        return self._rows.bad_rows if isinstance(self._rows, CsvRows) else BadRowCounter()

    def find_bad_rows(self, rows: Iterable[BadRow]) -> Iterator[tuple[int, BadRow]]:
        """Yield bad rows, each with the number of the line in which it begins, counted from 1.

        Args:
            rows: Bad rows of this table in the order of the file, from `iterate_batches`.

        Raises:
            InputError: The file cannot be read.
        """
        if isinstance(self._rows, CsvRows):
            with map_read_errors(self.name):
                yield from find_bad_rows(self._rows, rows)

    def check_columns(
        self, time: str | None = None, record: str = DEFAULT_RECORD_COLUMN, device: str | None = None
    ) -> None:
        """Check that the columns that the user chose for times, record ids and devices exist.

        Args:
            time: Name of the column of times, or None if the user chose none.
            record: Name of the column of record ids. The default name is not checked, because that column is optional.
            device: Name of the column of devices, or None if it need not exist.

        Raises:
            InputError: A chosen column does not exist.
        """
        chosen_record = None if record == DEFAULT_RECORD_COLUMN else record
        for role, name in (("time", time), ("record", chosen_record), ("device", device)):
            if name is not None and name not in self.schema.names:
                columns = ", ".join(self.schema.names)
                raise InputError(
                    f"{self.name}: there is no {role} column {name!r}; choose one of the columns {columns}"
                )

    def describe_delimiter(self) -> str:
        """Return a remark for error messages if the delimiter of a CSV file is probably wrong; otherwise ""."""
        if self.dialect is None:
            return ""
        names = self.dialect.column_names
        others = [other for other in DELIMITERS if other != self.dialect.delimiter]
        if len(names) == 1:
            reason = "the file has one column"
        elif any(other in name for name in names for other in others):
            reason = "the names of its columns contain another delimiter"
        elif (
            self.options.csv.delimiter is not None
            and not self.dialect.has_header
            and self.options.csv.has_header is None
        ):
            reason = "no line with the names of the columns was found"
        else:
            return ""
        return f"; check --delimiter, because {reason}"

    def format_column_names(self) -> str:
        """Return the names of the first `MAX_LISTED_NAMES` columns as text for an error message."""
        return join_names(self.schema.names)

    def choose_layout(
        self,
        requested: Layout | None,
        record: str = DEFAULT_RECORD_COLUMN,
        feature: str = "feature",
        value: str = "value",
    ) -> Layout:
        """Return the layout of the table: "wide" (a row is a record) or "long" (a row is one reading).

        Args:
            requested: The layout that the user chose, which is returned. None chooses "long" if the table has the three
                columns below, and "wide" otherwise.
            record: Name of the column that identifies the record or the device, in a long table.
            feature: Name of the column with the names of features, in a long table.
            value: Name of the column with values, in a long table.
        """
        if requested is not None:
            return requested
        has_long_columns = {record, feature, value} <= set(self.schema.names)
        return "long" if has_long_columns else "wide"

    def choose_time_column(self, other_than: Collection[str] = (), has_windows: bool = False) -> str | None:
        """Return the column of times: the first one of timestamps, None if there is none.

        Args:
            other_than: Columns that are not considered, such as features.
            has_windows: Whether records are windows of time, so that there must be a time. Then a column called `time`
                has precedence, and texts that are times count as well, or else dates.
        """
        names = [name for name in self.schema.names if name not in other_than]
        if has_windows and "time" in names:
            return "time"
        timestamps = [name for name in names if pa.types.is_timestamp(self.schema.field(name).type)]
        if timestamps or not has_windows:
            return next(iter(timestamps), None)
        text_columns = [name for name in names if self.dialect is None and self.is_text_column(name)]
        samples = self._read_sample(text_columns)
        dates = (name for name in names if pa.types.is_date(self.schema.field(name).type))
        return next((name for name, column in samples.items() if conversion.are_times(column)), next(dates, None))

    def is_text_column(self, name: str) -> bool:
        """Return whether the table holds a column as text: each column of a CSV file that is not part of the path."""
        if name in self.partition_values:
            return False
        return self.dialect is not None or is_text(self.schema.field(name).type)

    def check_number_columns(self, columns: Sequence[str]) -> None:
        """Check that columns of texts in a Parquet file or in memory spell numbers.

        A single bad cell is no error, but a column without any number in its first rows is probably the wrong one.

        Args:
            columns: Columns that must hold numbers.

        Raises:
            InputError: The first rows of a column have texts, and none of them is a number or a known text such as
                "Bad" that historians write in place of one.
        """
        if self.dialect is not None:
            return
        text_columns = [name for name in columns if self.is_text_column(name)]
        for name, column in self._read_sample(text_columns).items():
            texts = column.drop_null()
            _, is_bad = parse_number_texts(texts)
            if len(texts) and is_bad.all() and not conversion.are_bad_value_texts(texts):
                raise InputError(
                    f"{self.name}: column {name!r} has the type {self.schema.field(name).type}, but the model expects "
                    "numbers; convert the column, or train on tables with this column type"
                )

    def check_time_zone(self, name: str) -> None:
        """Check that the times of a column have a zone, if they are texts.

        Without a zone they count as UTC (see `iterate_batches`), which matters if the times decide about windows or are
        compared with other times.

        Args:
            name: A column of times.

        Raises:
            InputError: The first time of the column is a text without a zone, and the user has set none.
        """
        if self.options.time_format.timezone is not None or not self.is_text_column(name):
            return
        texts = self._read_sample([name]).get(name, pa.nulls(0, pa.string())).drop_null()
        if has_local_texts(texts):
            raise InputError(
                f"{self.name}: the times in column {name!r}, such as {texts[0]}, have no time zone; add --timezone, "
                "such as --timezone Europe/Berlin or --timezone UTC"
            )

    def iterate_batches(
        self,
        columns: Sequence[str],
        max_rows: int,
        forms: Mapping[str, CellForm] | None = None,
        on_bad_row: OnBadRow | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the given columns in batches, in bounded memory.

        Rows of a CSV file with a wrong number of cells are left out and counted (`bad_rows`).

        Args:
            columns: Names of the columns to read.
            max_rows: Maximum number of rows of a batch.
            forms: What to convert the cells of text columns to, by name of the column. By default they are converted to
                the type in `schema`; a text column of a Parquet file stays text. The type of a column may differ
                between batches.
            on_bad_row: Receives each row of a CSV file that is left out, before the batch with the rows around it. With
                this function, batches without rows may be yielded.

        Raises:
            InputError: The file cannot be read to its end.
        """
        for batch, _ in self.iterate_numbered(columns, max_rows, forms, on_bad_row):
            yield batch

    def iterate_numbered(
        self,
        columns: Sequence[str],
        max_rows: int,
        forms: Mapping[str, CellForm] | None = None,
        on_bad_row: OnBadRow | None = None,
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[np.int64]]]:
        """Yield batches as `iterate_batches` does, each with the numbers of its rows in the table, from 0.

        With a condition that chooses rows, the numbers have gaps: they are those of the table without the condition.

        Args:
            columns: Names of the columns to read.
            max_rows: Maximum number of rows of a batch.
            forms: As for `iterate_batches`.
            on_bad_row: As for `iterate_batches`.

        Raises:
            InputError: The file cannot be read to its end.
        """
        forms = forms or {}
        file_columns = [name for name in columns if name not in self.partition_values]
        with map_read_errors(self.name):
            converters = {name: self._choose_converter(name, forms.get(name)) for name in file_columns}
            decimals = self._guess_decimals([name for name, form in forms.items() if name in file_columns], forms)
            # A file without any column to read is read for its number of rows.
            for batch, numbers in self._read_rows(file_columns or self._choose_any_column(), max_rows, on_bad_row):
                arrays: dict[str, pa.Array] = {}
                for name, column in zip(batch.schema.names, batch.columns, strict=True):
                    converter = converters.get(name)
                    arrays[name] = column if converter is None else self._convert(column, converter, decimals.get(name))
                for name in columns:
                    if name in self.partition_values:
                        arrays[name] = self._make_partition_column(name, batch.num_rows)
                yield pa.RecordBatch.from_arrays([arrays[name] for name in columns], list(columns)), numbers

    def _read_rows(
        self, columns: Sequence[str], max_rows: int, on_bad_row: OnBadRow | None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[np.int64]]]:
        """Yield the rows for which the condition of the options is true, with their numbers; cells are not converted.

        Args:
            columns: Columns of the file.
            max_rows: Maximum number of rows of a batch.
            on_bad_row: As for `iterate_batches`.
        """
        condition = self._condition
        if condition is None:
            for first_row, batch in _number_batches(self._rows.read(columns, max_rows, on_bad_row)):
                yield batch, np.arange(first_row, first_row + batch.num_rows)
            return
        nothing = {name: ValueRange(pa.nulls(2, absent_type)) for name, absent_type in self._absent_types.items()}
        if not condition.may_match(nothing):
            return
        tested = [] if self.options.where is None else list(self.options.where.columns)
        not_in_file = {**self.partition_values, **self._absent_types}
        file_columns = [*dict.fromkeys([*columns, *(name for name in tested if name not in not_in_file)])]
        if isinstance(self._rows, _ParquetRows):
            numbered = self._rows.read_matching(file_columns, max_rows, condition)
        else:
            numbered = _number_batches(self._rows.read(file_columns, max_rows, on_bad_row))
        converters = {name: self._choose_converter(name, None) for name in file_columns if name in tested}
        for first_row, batch in numbered:
            cells = {}
            for name in tested:
                if name in self.partition_values:
                    cells[name] = self._make_partition_column(name, batch.num_rows)
                    continue
                if name in self._absent_types:
                    cells[name] = pa.nulls(batch.num_rows, self._absent_types[name])
                    continue
                converter, column = converters[name], batch.column(name)
                decimal = self._decimals.get(name)
                cells[name] = column if converter is None else self._convert(column, converter, decimal)
            rows = np.flatnonzero(condition.mask(cells))
            if len(rows) or on_bad_row is not None:
                yield batch.select(list(columns)).take(pa.array(rows)), rows + first_row

    def _bind_condition(self, types: Mapping[str, pa.DataType] = MappingProxyType({})) -> Table:
        """Return the table with the condition of its options, which is checked against its columns.

        Args:
            types: The types of columns of the condition that this table or others have. Columns of others that this
                table lacks have no value in its rows.

        Raises:
            ConfigError: The table lacks a column of the condition that no other table has, or has it with values of
                another kind.
        """
        where = self.options.where
        if where is None:
            return self
        absent = {name: types[name] for name in where.columns if name in types and name not in self.schema.names}
        for name in where.columns:
            if name not in self.schema.names and name not in absent:
                raise ConfigError(
                    f"{where.get_flag(name)}: {self.name} has no column {name!r}; choose one of its columns: "
                    f"{self.format_column_names()}"
                )
        type_by_column = dict(zip(self.schema.names, self.schema.types, strict=True))
        condition = where.bind(type_by_column | absent, self.options.time_format)
        return replace(self, num_rows=None, _condition=condition, _absent_types=absent)

    def iterate_cells(self, columns: Sequence[str], max_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of columns of the file in batches, with their cells as the file holds them, not converted.

        Args:
            columns: Names of columns that do not come from the path.
            max_rows: Maximum number of rows of a batch.

        Raises:
            InputError: The file cannot be read to its end.
        """
        with map_read_errors(self.name):
            for batch, _ in self._read_rows(columns, max_rows, None):
                yield batch

    def select(self, columns: Sequence[str]) -> Table:
        """Return the table with only some of its columns.

        Args:
            columns: Names of columns, in the order of `schema`.
        """
        return replace(self, schema=pa.schema([self.schema.field(name) for name in columns]))

    def add_null_columns(self, fields: Iterable[pa.Field]) -> Table:
        """Return the table with those columns that it lacks, without any value.

        Args:
            fields: Names and types of columns.
        """
        # They are like columns of the path, which have the same value in all rows.
        table = self._add_partitions({field.name: (field.type, None) for field in fields})
        return replace(table, partition_values={**self.partition_values, **table.partition_values})

    def read_from(self, path: Path, num_rows: int) -> Table:
        """Return a table that reads its cells from a Parquet file, and that is otherwise equal to this one.

        Args:
            path: A file with cells of this table as `iterate_cells` returns them.
            num_rows: Number of rows of the file.
        """
        options = replace(self.options, where=None)  # `iterate_cells` has chosen the rows
        rows = _ParquetRows(path)
        return replace(self, path=path, num_rows=num_rows, options=options, _rows=rows, _condition=None)

    def _choose_any_column(self) -> list[str]:
        """Return the first column of the file, as a list."""
        return [name for name in self.schema.names if name not in self.partition_values][:1]

    def _make_partition_column(self, name: str, num_rows: int) -> pa.Array:
        """Return `num_rows` rows of a partition column. The path of the file states its value, the same in each row."""
        return pa.repeat(pa.scalar(self.partition_values[name], self.schema.field(name).type), num_rows)

    def _choose_converter(self, name: str, form: CellForm | None) -> _Converter | None:
        """Return how the cells of a column are converted; None if they stay as they are.

        Args:
            name: The column, which does not come from the path.
            form: The type to which its cells are converted, None for the type in the schema.
        """
        column_type = self.schema.field(name).type
        if form == "time":  # timestamps without a zone are converted as well
            return "time"
        if not self.is_text_column(name) or form == "text":
            return None
        if form is not None or self.dialect is None:
            return form
        if pa.types.is_timestamp(column_type):
            return "time"
        converters: list[tuple[_Converter, bool]] = [
            ("integer", pa.types.is_integer(column_type)),
            ("number", pa.types.is_floating(column_type)),
            ("boolean", pa.types.is_boolean(column_type)),
            ("date", pa.types.is_date(column_type)),
            ("clock", pa.types.is_time(column_type)),
        ]
        return next((converter for converter, fits in converters if fits), None)

    def _convert(self, column: pa.Array, converter: _Converter, decimal: Decimal | None) -> pa.Array:
        """Return a column of a batch with its cells converted.

        Args:
            column: The cells.
            converter: How to convert them.
            decimal: The decimal character of the column, None if it is not known.
        """
        if converter == "time":
            return convert_times(column, self.options.time_format)
        column = decode_texts(column)
        if converter == "number":
            return conversion.convert_numbers(column, decimal)
        if converter == "mixed":
            return standardize_number_texts(column, decimal)
        if converter == "integer":
            return conversion.convert_integers(column, decimal)
        convert = {
            "boolean": conversion.convert_booleans,
            "date": conversion.convert_dates,
            "clock": conversion.convert_clock_times,
        }
        return convert[converter](column)

    def _guess_decimals(self, columns: Sequence[str], forms: Mapping[str, CellForm]) -> Mapping[str, Decimal | None]:
        """Return the decimal character of columns of texts: the one that the user has set, or else a guess.

        Args:
            columns: Columns of the file.
            forms: The types to which their cells are converted.
        """
        if self.dialect is not None:
            return self._decimals
        number_columns = [name for name in columns if forms[name] in ("number", "mixed") and self.is_text_column(name)]
        if self.options.csv.decimal is not None:
            return dict.fromkeys(number_columns, self.options.csv.decimal)
        sample = self._read_sample(number_columns)
        return {name: guess_decimal(column.to_pylist()) for name, column in sample.items()}

    def _read_sample(self, columns: Sequence[str]) -> dict[str, pa.Array]:
        """Return the first cells of columns of texts, at most `SAMPLE_ROWS` of each."""
        if not columns:
            return {}
        with map_read_errors(self.name):
            batch = next(self._rows.read(columns, SAMPLE_ROWS), None)
        if batch is None:
            return {}
        return {name: decode_texts(batch.column(name)) for name in columns}

    def _has_own_column(self, names: Iterable[str]) -> bool:
        """Return whether the file itself has one of these columns, and not only its path."""
        return any(name in self.schema.names and name not in self.partition_values for name in names)

    def _add_partitions(self, text_by_column: Mapping[str, tuple[pa.DataType, str | None]]) -> Table:
        """Return the table with the columns of its path as well; a column of the file has precedence.

        Args:
            text_by_column: The type and the value (as text) of each column of the path.
        """
        new = {name: entry for name, entry in text_by_column.items() if name not in self.schema.names}
        schema = self.schema
        for name, (column_type, _) in new.items():
            schema = schema.append(pa.field(name, column_type))
        values = {name: convert_partition(text, column_type) for name, (column_type, text) in new.items()}
        return replace(self, schema=schema, partition_values=values)


def _number_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield batches of consecutive rows, each with the number of its first row."""
    first_row = 0
    for batch in batches:
        yield first_row, batch
        first_row += batch.num_rows


def _map_on_threads(open_one: Callable[[DataFile], Table], paths: Sequence[DataFile]) -> list[Table]:
    """Return the tables of files, those of an object store opened at the same time: its latency is most of the work."""
    num_threads = min(OPENING_THREADS, sum(not isinstance(path, Path) for path in paths))
    if num_threads < 2:
        return [open_one(path) for path in paths]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(open_one, paths))


def _choose_matching(
    paths: Sequence[DataFile],
    where: RowFilter,
    time_format: TimeFormat,
    texts_by_path: Mapping[DataFile, Mapping[str, str | None]],
    type_by_column: Mapping[str, pa.DataType],
) -> Sequence[DataFile]:
    """Return the files whose folders do not state that a condition is true for none of their rows.

    Args:
        paths: The files.
        where: The condition.
        time_format: The zone of times that have none; without a zone they count as UTC.
        texts_by_path: The columns that the folders of each file state, with their values as texts.
        type_by_column: The types of these columns.
    """
    try:
        condition = where.bind(type_by_column, time_format)
    except ConfigError:  # the files may have columns of these names and of another type, which have precedence
        return paths
    return [path for path in paths if condition.may_match(_get_path_ranges(texts_by_path[path], type_by_column))]


def _get_path_ranges(
    texts: Mapping[str, str | None], type_by_column: Mapping[str, pa.DataType]
) -> dict[str, ValueRange]:
    """Return what the folders of a path state about its columns: the same value in all rows.

    Args:
        texts: The value of each column as text.
        type_by_column: The type of each column.
    """
    ranges = {}
    for name, text in texts.items():
        value = convert_partition(text, type_by_column[name])
        ranges[name] = ValueRange(pa.array([value, value], type_by_column[name]), may_be_null=value is None)
    return ranges


_Converter = CellForm | Literal["integer", "boolean", "date", "clock"]
"""How the cells of a column of texts are converted."""


def _open_parquet(path: DataFile, options: TableOptions) -> Table:
    """Open a Parquet file.

    Args:
        path: The file.
        options: How to read it.

    Raises:
        InputError: The file cannot be read, or two of its columns have the same name.
    """
    with map_read_errors(str(path)):
        try:
            with path.open("rb") if isinstance(path, Path) else path.open_for_seeking() as source:
                metadata = pq.read_metadata(source)
            schema, num_rows = metadata.schema.to_arrow_schema(), metadata.num_rows
        except pa.ArrowInvalid as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise InputError(
                f"{path}: the file cannot be read, because it is not a readable Parquet file ({reason}); repair it, or "
                "leave it out"
            ) from error
    return _make_table(str(path), schema, num_rows, options, _ParquetRows(path))


def _open_csv(path: DataFile, options: TableOptions) -> Table:
    """Open a CSV file and guess its dialect and the types of its columns.

    Args:
        path: The file.
        options: How to read it.

    Raises:
        InputError: The file cannot be read, or two of its columns have the same name.
    """
    with map_read_errors(str(path)):
        dialect = guess_dialect(read_sample(path), options.csv, str(path))
        names = dialect.column_names
        _check_unique_names([name for name in names if name], str(path))
        if names[0] in _CSV_INDEX_NAMES and len(names) > 1:
            # An index without a name gets one, so that it can be used if it holds times.
            names = ("__index_level_0__", *names[1:])
        rows = CsvRows(path, dialect, names)
        block = rows.read_first_block()
    decimals: dict[str, Decimal | None] = {}
    fields: list[pa.Field] = []
    units = dict(zip(names, dialect.units, strict=bool(dialect.units)))
    for name, column in zip(block.schema.names, block.columns, strict=True):
        sample = column[:SAMPLE_ROWS].to_pylist() if options.csv.decimal is None else []
        # A column may differ from the rest of the file.
        decimals[name] = options.csv.decimal or guess_decimal(sample) or dialect.decimal
        unit = {"unit": units[name]} if units.get(name) else None
        fields.append(pa.field(name, conversion.infer_type(column, decimals[name]), metadata=unit))
    table = _make_table(str(path), pa.schema(fields), None, options, rows)
    return replace(table, dialect=dialect, _decimals=decimals)


def _make_table(name: str, schema: pa.Schema, num_rows: int | None, options: TableOptions, rows: _Rows) -> Table:
    """Return a table without the columns that are the index of a data frame.

    Args:
        name: The path of the file, or the name of a table in memory.
        schema: The columns, with the metadata of the file.
        num_rows: Number of rows, None if it is not known.
        options: How to read the table.
        rows: The rows.

    Raises:
        InputError: Two columns have the same name.
    """
    _check_unique_names(schema.names, name)
    index_columns = _find_index_columns(schema, options.kept_columns)
    fields = [column for column in schema if column.name not in index_columns]
    units = {}
    for column in fields:
        metadata = column.metadata or {}
        unit = (metadata.get(b"unit") or metadata.get(b"units") or b"").decode("utf-8", "replace").strip()
        if unit:
            units[column.name] = unit
    plain_schema = pa.schema([pa.field(column.name, column.type) for column in fields])
    return Table(
        name,
        schema=plain_schema,
        num_rows=num_rows,
        units=units,
        index_columns=index_columns,
        partition_values={},
        dialect=None,
        options=options,
        _rows=rows,
        _decimals={},
    )


def _check_unique_names(names: Sequence[str], table: str) -> None:
    """Raise `InputError` if two columns of a table have the same name."""
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{table}: two columns are called {duplicate!r}; rename one of them")


def _find_index_columns(schema: pa.Schema, kept_columns: Collection[str]) -> tuple[str, ...]:
    """Return the columns that are the index of a pandas data frame and hold no data of their own.

    An index without a name may have become a first column with an empty name. An index of times is kept, because it is
    the time of the rows. The columns of long tables, and those that an option or the model names, are kept as well.

    Args:
        schema: The columns, with the metadata of the file.
        kept_columns: Columns that are kept although they are an index.
    """
    try:
        metadata = json.loads((schema.metadata or {}).get(b"pandas", b"{}"))
        # The entry of an index that only counts the rows is no name but an object.
        names = [entry for entry in metadata.get("index_columns", []) if isinstance(entry, str)]
    except (ValueError, AttributeError):  # metadata of an unknown program
        names = []
    names += [name for name in schema.names[:1] if not name and len(schema) > 1]
    return tuple(
        column.name
        for column in schema
        if (column.name in names or _INDEX_NAME.fullmatch(column.name))
        and column.name not in kept_columns
        and column.name not in _MEANINGFUL_COLUMNS
        and not (pa.types.is_timestamp(column.type) or pa.types.is_date(column.type))
    )
