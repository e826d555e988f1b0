"""Read training tables, one batch of rows at a time: Parquet and CSV files, and Arrow tables in memory.

Tables have one of two layouts. In the wide layout a row is a record and a column is a feature. In the long layout a row
is one reading, with columns for the record, the feature, the value and perhaps the time. If records are windows of
time, a row of a wide table holds readings of one device at one time. It is read like the same readings in a long table.
All layouts are converted to sequences of `FeatureReadings`, so that other modules need not distinguish them.
Only one batch is in memory at a time. For the long layout and for windows, the ids of the records and the record number
of each row are in memory as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from deformer_stream.codec import columns
from deformer_stream.codec.columns import (
    convert_times_of_day,
    format_cell,
    is_time_of_day,
    to_python_values,
)
from deformer_stream.codec.validation import RejectionError
from deformer_stream.counts import format_count
from deformer_stream.engine.events import NO_TIME
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model.windows import Window, floor_to_window
from deformer_stream.settings.base import Layout
from deformer_stream.tables.discovery import TABLES, find_data_files, is_delta_table
from deformer_stream.tables.labels import encode_labels, match_normal_label, normalize_label
from deformer_stream.tables.table import CellForm, Table, TableOptions, join_names
from trainer.fill_values import ChosenFillValues
from trainer.identifiers import OrderStatistics
from trainer.reading_time import ReadingMonitor
from trainer.repeated_readings import ReadingIntervals

ValueForm = Literal["number", "boolean", "text", "clock", "time", "other"]
"""What the values of a column are, according to its Arrow type.

"clock" is a time of day, which is converted to seconds since midnight. "time" is a date or a timestamp. Columns of form
"other", such as lists, cannot be features.
"""

RECORD, FEATURE, VALUE, TIME, DEVICE = "record", "feature", "value", "time", "device"
"""Column names of the long layout."""

BATCH_CELLS = 4_000_000
"""Approximate number of values (rows times columns) of a batch, so that wide tables need no more memory."""

TableSource = Path | Table
"""A training table: a file, a folder or a quoted pattern of files, or a table in memory."""

MAX_LISTED_LABELS = 50
"""Largest number of distinct labels of one batch that are counted for an error message."""

_LEADING_ZERO_PATTERN = r"^\s*[+-]?0[0-9]+\s*$"
"""Regular expression of an integer with leading zeros, such as "007". It is a code or an id and not a measurement."""

RecordKey = str | tuple[str, int]
"""What identifies a record: its id; or, if a record is a window of time, the device and the start of the window in
microseconds since 1970."""


class TooFewRecordsError(InputError):
    """The rows that were read contain too few normal records, or none."""


@dataclass(frozen=True, slots=True)
class FeatureReadings:
    """The M readings of one feature in one batch of the table.

    Attributes:
        feature_name: The feature's name.
        rows: (M,) number (from 0) of the record to which each reading belongs. It is the record's row in the training
            matrix.
        values: M values in the type of the column.
        file_index: The number of the file that contains the readings, from 0.
    """

    feature_name: str
    rows: NDArray[np.int64]
    values: pa.Array
    file_index: int


@dataclass(frozen=True, slots=True)
class EventReadings(FeatureReadings):
    """The M readings of one feature in one batch of a table whose rows are readings and not records.

    Attributes:
        times: (M,) times in microseconds since 1970, `NO_TIME` if unknown.
        event_indexes: (M,) position of each reading in the input, over all files.
        time_slots: (M,) index of the time slot (equal part of the record's window of time) of each reading. 0 if
            records are not windows.
    """

    times: NDArray[np.int64]
    event_indexes: NDArray[np.int64]
    time_slots: NDArray[np.int64]


@dataclass
class UnreadableTimes:
    """The rows whose time cannot be read. They are left out, as a stream rejects such readings.

    Attributes:
        num_rows: Number of rows.
        first: Table, column, row and reason of the first one; "" if there are none.
        has_timezone: Whether the user has set the zone of times that are written without one.
    """

    num_rows: int = 0
    first: str = ""
    has_timezone: bool = False
    _first_by_file: dict[int, str] = field(default_factory=dict, init=False)
    _readable_files: set[int] = field(default_factory=set, init=False)

    def add(self, rows: _Rows, where: str, times: NDArray[np.int64], errors: Mapping[int, RejectionError]) -> None:
        """Count the rows of a batch.

        Args:
            rows: N rows.
            where: Their table and the column of times.
            times: (N,) microseconds since 1970, `NO_TIME` if unknown.
            errors: Why a time cannot be read, by index of the row.
        """
        if (times != NO_TIME).any():
            self._readable_files.add(rows.file_index)
        if not errors:
            return
        index = min(errors)
        text = f"{where}, row {rows.row_numbers[index]}: the time cannot be parsed ({errors[index]})"
        self.first = self.first or text
        self._first_by_file.setdefault(rows.file_index, text)
        self.num_rows += len(errors)

    def check(self, has_condition: bool) -> None:
        """Check that each table with times that cannot be read has others that can.

        Args:
            has_condition: Whether rows were chosen by a condition. A table may then have few of them, so only all
                tables together are checked.

        Raises:
            InputError: No time of a table can be read, so the column or the time zone is probably wrong.
        """
        if has_condition and self._readable_files:
            return
        for file_index, text in self._first_by_file.items():
            if file_index not in self._readable_files:
                remedy = "write times with a zone, such as 2020-03-09T10:34:33Z, set their zone with --timezone"
                if self.has_timezone:
                    remedy = "write times such as 2020-03-09T10:34:33Z or 09.03.2020 10:34:33"
                raise InputError(
                    f"{text}; no time of the table can be read: {remedy}, or name another column with --time-column"
                )

    def describe(self) -> str | None:
        """Return a sentence about the rows that are left out, None if there are none."""
        if not self.num_rows:
            return None
        are_left_out = "is left out, because its" if self.num_rows == 1 else "are left out, because their"
        return f"{format_count(self.num_rows, 'row')} {are_left_out} time cannot be read, the first: {self.first}"


@dataclass(frozen=True, slots=True)
class NormalLabel:
    """The label of normal records, which are used; others are left out.

    Attributes:
        column: The column that distinguishes normal records from others (`--label`).
        value: The value of that column in normal records (`--normal`).
    """

    column: str
    value: str

    @staticmethod
    def from_options(column: str | None, value: str | None) -> NormalLabel | None:
        """Return the label of the options `--label` and `--normal`, None without them.

        Raises:
            ConfigError: Only one of them is given.
        """
        if column is None and value is None:
            return None
        if value is None:
            missing, meaning = "--normal", f"the value of the column {column!r} in normal rows"
        elif column is None:
            missing, meaning = "--label", f"the name of the column that contains {value!r} in normal rows"
        else:
            return NormalLabel(column, value)
        raise ConfigError(f"--label and --normal belong together, but {missing} is missing; set it to {meaning}")

    def match(self, batch: pa.RecordBatch) -> NDArray[np.bool_]:
        """Return for each of N rows whether it has the label, (N,)."""
        return match_normal_label(batch.column(self.column), self.value)

    def __str__(self) -> str:
        return f"{self.column} = {self.value}"


@dataclass
class InputTables:
    """The tables of a training run, how to read them, and which of their records are normal.

    Attributes:
        tables: The files and the tables in memory, in the order in which they are read.
        schema: The Arrow schema of the first table. The other tables have the same columns.
        layout: "wide" if a column is a feature, "long" if a row is a reading. A row of a wide table is a record or,
            with a window, holds readings of a device at one time.
        normal_label: The label of normal records. None if all records are normal.
        window: The window of time: all readings of a device in one window are a record. None if a column names the
            record of each reading, or if a row is a record.
        feature_columns: The columns that may be features (wide layout only).
        time_column: The column with the time of the record (wide) or of the readings. None if there is none.
        device_column: The column with the device whose readings a row holds. None if records are not windows, or if
            the device is the name of the table without its ending.
        num_records: Number of normal records. `index_records` sets it.
        skipped_by_reason: By reason as text, the number of records or readings that were left out.
        row_by_event: (E,) for each of the E rows, the number (from 0) of its record among the normal records; −1 if the
            row is left out. The table is a long one, or its records are windows. None if a row is a record, and before
            `index_records` is called.
        time_order: How the times of the normal records (wide) or of their readings (long) change in the order of the
            input. `iterate_readings` sets it anew. It is empty if there is no time column.
        part_by_record: (N,) for each of the N normal records, the number (from 0) of its part of the input
            (`DataOptions.part_sizes`). None if there are no parts.
        row_by_record: (N,) for each of the N normal records of a wide table, its number among the records of a random
            sample; −1 if it is not in the sample. None if all records are used.
        time_span: The first and the last time of a normal record or reading, in microseconds since 1970. None if there
            are no times. It is set while the readings are iterated.
        monitor: Counts the rows that are read, and stops a pass that takes too long.
        max_rows: Largest number of rows that are read. None to read all rows.
        interval_by_sensor: The intervals between the readings of each sensor, if records are windows.
        excluded_features: Names of columns (wide layout) or features (long layout) that are not used.
        unreadable_times: The rows that are left out because their time cannot be read.
        fill_values: The values that stand for a missing reading.
    """

    tables: list[Table]
    schema: pa.Schema
    layout: Layout
    normal_label: NormalLabel | None
    window: Window | None = None
    feature_columns: list[str] = field(default_factory=list)
    time_column: str | None = None
    device_column: str | None = None
    num_records: int = 0
    skipped_by_reason: dict[str, int] = field(default_factory=dict)
    row_by_event: NDArray[np.int64] | None = None
    time_order: OrderStatistics = field(default_factory=OrderStatistics)
    part_by_record: NDArray[np.int64] | None = None
    row_by_record: NDArray[np.int64] | None = None
    time_span: tuple[int, int] | None = None
    monitor: ReadingMonitor = field(default_factory=ReadingMonitor)
    max_rows: int | None = None
    interval_by_sensor: dict[str, ReadingIntervals] = field(default_factory=dict)
    excluded_features: frozenset[str] = frozenset()
    unreadable_times: UnreadableTimes = field(default_factory=UnreadableTimes)
    fill_values: ChosenFillValues = field(default_factory=ChosenFillValues)

    @property
    def description(self) -> str:
        """The first file and, if there are more, their number, for messages that concern all of them."""
        num_others = len(self.tables) - 1
        others = {0: "", 1: " and 1 other file"}.get(num_others, f" and {num_others} other files")
        return f"{self.tables[0].name}{others}"

    @property
    def label_column(self) -> str | None:
        """The column that distinguishes normal records from others. None if all records are normal."""
        return None if self.normal_label is None else self.normal_label.column

    @property
    def has_reading_rows(self) -> bool:
        """Whether a row holds readings of a record, and is no record: a long table, or records that are windows."""
        return self.layout == "long" or self.window is not None

    @property
    def has_unpivoted_rows(self) -> bool:
        """Whether a row holds readings of a device at one time: a wide table whose records are windows of time."""
        return self.layout == "wide" and self.window is not None

    @property
    def index_columns(self) -> tuple[str, ...]:
        """The columns of any table that are left out because they are the index of a data frame."""
        return tuple(dict.fromkeys(name for table in self.tables for name in table.index_columns))

    @property
    def units(self) -> dict[str, str]:
        """The units of columns by name, as the tables state them; the first table that states one counts.

        A text without a letter, digit or sign of a unit, such as "-", says that there is no unit.
        """
        units = ((name, unit) for table in reversed(self.tables) for name, unit in table.units.items())
        return {name: unit for name, unit in units if unit.strip("-–—[]() ")}

    def iterate_readings(self) -> Iterator[FeatureReadings]:
        """Yield the readings of all normal records, batch by batch in the order of the input, grouped by feature."""
        if self.has_reading_rows:
            return self.iterate_event_readings()
        self.time_order = OrderStatistics()
        return _iterate_wide_readings(self)

    def iterate_event_readings(self) -> Iterator[EventReadings]:
        """Yield what `iterate_readings` yields, if rows are readings (`has_reading_rows`)."""
        self.time_order = OrderStatistics()
        return _iterate_unpivoted_readings(self) if self.has_unpivoted_rows else _iterate_long_readings(self)

    def sample_records(self, num_records: int, seed: int) -> NDArray[np.int64]:
        """Use only a random sample of the normal records from now on. They are numbered anew, in the same order.

        Args:
            num_records: Number of records of the sample, smaller than `self.num_records`.
            seed: Seed of the random choice.

        Returns:
            (num_records,) the former numbers of the records of the sample, ascending.
        """
        # The constant in the seed makes this sample independent of others with the same seed.
        chosen = np.sort(np.random.default_rng([seed, 0x5A4C]).choice(self.num_records, num_records, replace=False))
        row_by_record = np.full(self.num_records + 1, -1)  # the last element is for left-out readings, whose row is −1
        row_by_record[chosen] = np.arange(num_records)
        if self.row_by_event is not None:
            self.row_by_event = row_by_record[self.row_by_event]
        else:
            self.row_by_record = row_by_record[:-1]
        if self.part_by_record is not None:
            self.part_by_record = self.part_by_record[chosen]
        self.skipped_by_reason["records, because of --max-time"] = self.num_records - num_records
        self.num_records = num_records
        return np.asarray(chosen, np.int64)

    def note_times(self, times: NDArray[np.int64], file_index: int) -> None:
        """Extend `time_span` and `time_order` by the times of the next rows.

        Args:
            times: Times in microseconds since 1970 in the order of the input. `NO_TIME` is ignored.
            file_index: The number of the table that contains the rows, from 0.
        """
        known = times[times != NO_TIME]
        self.time_order.add(known.astype(np.float64), file_index)
        if len(known):
            first, last = int(known.min()), int(known.max())
            if self.time_span is not None:
                first, last = min(first, self.time_span[0]), max(last, self.time_span[1])
            self.time_span = first, last


def classify_type(arrow_type: pa.DataType) -> ValueForm:
    """Return what the values of an Arrow type are.

    Returns:
        "number", "boolean", "text", "clock" (a time of day), "time" (a date or timestamp), or "other". A column that
        contains only nulls counts as numbers. A dictionary-encoded column counts as text, as its values are categories.
    """
    if pa.types.is_dictionary(arrow_type):
        return "text" if classify_type(arrow_type.value_type) in ("text", "number", "boolean") else "other"
    if pa.types.is_boolean(arrow_type):
        return "boolean"
    numeric_tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_null)
    if any(is_type(arrow_type) for is_type in numeric_tests):
        return "number"
    if pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type) or pa.types.is_string_view(arrow_type):
        return "text"
    if is_time_of_day(arrow_type):
        return "clock"
    if pa.types.is_timestamp(arrow_type) or pa.types.is_date(arrow_type):
        return "time"
    return "other"


def open_training_input(
    sources: Sequence[TableSource],
    layout: Layout | None,
    label_column: str | None,
    normal_label: str | None,
    window: Window | None = None,
    *,
    time_column: str | None = None,
    device_column: str | None = None,
    exclude: Collection[str] = (),
    fill_values: ChosenFillValues | None = None,
    options: TableOptions | None = None,
) -> InputTables:
    """Find the tables of a training run, and check that their columns fit each other and the options.

    Only the metadata of Parquet files and the beginning of CSV files are read.

    Args:
        sources: Files, folders and patterns of files, and tables in memory.
        layout: "wide" if a column is a feature, "long" if a row is a reading. None to infer it from the column names.
        label_column: The column that distinguishes normal records from others (`--label`).
        normal_label: The value of that column in normal records (`--normal`).
        window: The window of time (`--window`): all readings of a device in one window are a record. None if the input
            contains record ids, or if a row is a record.
        time_column: The column with the time (`--time-column`). None for `time` or, in a wide table, the first column
            of dates or timestamps.
        device_column: The column with the device (`--device-column`). None for `device` if there is such a column.
        exclude: Columns or features that are not used (`--exclude`). They may differ between the tables.
        fill_values: The values that stand for a missing reading. None for none.
        options: How tables are read. None for the defaults.

    Returns:
        The tables, the layout and the options. The records are not counted yet (see `index_records`).

    Raises:
        InputError: A table is unreadable or lacks a column, or the tables have different columns.
        ConfigError: An option does not fit the columns.
    """
    options = options or TableOptions()
    named = {name for name in (label_column, time_column, device_column) if name is not None}
    options = replace(options, kept_columns=options.kept_columns | named)
    tables = _fill_delta_columns(_open_sources(sources, options), sources)
    first = tables[0]
    # Columns that say what a row is are read even if they are excluded as features.
    roles = {RECORD, FEATURE, VALUE, TIME, DEVICE, *named}
    unused = set(exclude) - roles
    if layout != "wide" and {FEATURE, VALUE} <= set(first.schema.names):  # a long table
        unused |= {name for table in tables for name in table.schema.names} - roles
    for table in tables[1:]:
        _check_same_columns(first, table, unused)
    for option, column in (
        ("--time-column", time_column),
        ("--device-column", device_column),
        ("--label", label_column),
    ):
        if column is not None and column not in first.schema.names:
            raise ConfigError(
                f"{option} {column}: {first.name} has no such column; "
                f"give one of its columns: {', '.join(first.schema.names)}{first.describe_delimiter()}"
            )
    layout = _check_layout(first, layout, window, time_column, device_column)
    input_tables = InputTables(
        tables,
        first.schema,
        layout,
        NormalLabel.from_options(label_column, normal_label),
        window,
        time_column=time_column,
        excluded_features=frozenset(exclude),
        unreadable_times=UnreadableTimes(has_timezone=options.time_format.timezone is not None),
        fill_values=fill_values or ChosenFillValues(),
    )
    if input_tables.has_reading_rows:
        input_tables.time_column = time_column or _find_time_column(first, is_long=layout == "long")
    if window is not None and (device_column is not None or DEVICE in first.schema.names):
        input_tables.device_column = device_column or DEVICE
    return input_tables


def _open_sources(sources: Sequence[TableSource], options: TableOptions) -> list[Table]:
    """Open files, folders and patterns of files; tables in memory are used as they are.

    Raises:
        InputError: A file does not exist or cannot be read.
    """
    tables: list[Table] = []
    paths = [source for source in sources if not isinstance(source, Table)]
    opened = iter(Table.open_all(find_data_files(paths, TABLES), options) if paths else [])
    tables.extend(opened)
    tables.extend(source for source in sources if isinstance(source, Table))
    return tables


def _fill_delta_columns(tables: list[Table], sources: Sequence[TableSource]) -> list[Table]:
    """Return the tables with the columns that were added to their Delta Lake table after they were written.

    As in the Delta Lake table, these columns have no value there.

    Args:
        tables: The opened files and tables in memory.
        sources: Files, folders and patterns of files, and tables in memory.
    """
    if len({frozenset(table.schema.names) for table in tables}) == 1:
        return tables
    for source in sources:
        if isinstance(source, Table) or not is_delta_table(source):
            continue
        files = set(find_data_files([source]))
        fields = [field for table in tables if table.path in files for field in table.schema]
        tables = [table.add_null_columns(fields) if table.path in files else table for table in tables]
    return tables


def _find_time_column(table: Table, is_long: bool) -> str | None:
    """Return the column with the time of readings if no option names it; None if there is none.

    Args:
        table: The table.
        is_long: Whether a row is a reading, whose time is in the column `time` only.
    """
    if is_long:
        return TIME if TIME in table.schema.names else None
    return table.choose_time_column(has_windows=True)


def _check_layout(
    table: Table, layout: Layout | None, window: Window | None, time_column: str | None, device_column: str | None
) -> Layout:
    """Infer the layout of a table if it is None, and check that the columns fit the layout and the window.

    Args:
        table: The first table.
        layout: "wide" if a column is a feature, "long" if a row is a reading, or None.
        window: The windows of time that are the records (`--window`). None if the option is not given.
        time_column: The column that `--time-column` names, or None.
        device_column: The column that `--device-column` names, or None.

    Returns:
        The layout. It is "long" if the table has all columns of the long layout and the user has not chosen "wide".

    Raises:
        InputError: A column of the long layout is missing.
        ConfigError: The option `--window` is missing or does not fit the columns.
    """
    column_names = table.schema.names
    # The columns of the long layout. A table with all of them is long by default.
    device, time = device_column or DEVICE, time_column or TIME
    required = (RECORD, FEATURE, VALUE) if window is None else (device, FEATURE, VALUE, time)
    missing = [column for column in required if column not in column_names]
    if layout is None:
        # A table of readings of devices has no records unless --window makes them.
        if window is None and {device, FEATURE, VALUE, time} <= set(column_names) and missing:
            raise ConfigError(
                f"{table.name}: the rows seem to be readings of devices, but no column {RECORD!r} says to which "
                "records they belong; add --window, such as 60s, to make records of them, or --layout wide if each row "
                "is a record"
            )
        layout = "wide" if missing else "long"
    if window is not None and RECORD in column_names:
        raise ConfigError(
            f"--window cannot make records from {table.name}, because its column {RECORD!r} already defines them; "
            f"remove --window, or give a table without this column"
        )
    if layout == "long" and missing:
        column_list = f"{', '.join(required[:-1])} and {required[-1]}"
        raise InputError(
            f"{table.name}: column {missing[0]!r} is missing, but the long layout needs the columns {column_list}; "
            f"add or rename the column{table.describe_delimiter()}"
        )
    has_time = time_column is not None or _find_time_column(table, is_long=False) is not None
    if layout == "wide" and window is not None and not has_time:
        raise ConfigError(
            f"--window needs the time of each row, but no column of {table.name} contains dates or timestamps; "
            f"name the column with the time in --time-column: {', '.join(column_names)}{table.describe_delimiter()}"
        )
    return layout


def _check_same_columns(first: Table, other: Table, unused: Collection[str]) -> None:
    """Check that two tables have columns of the same names with the same form of values, such as numbers or texts.

    A column without any value in one of the tables fits every form. A CSV file states no types. Its columns of numbers
    and texts therefore fit each other, because numbers are recognised in texts.

    Args:
        first: A table.
        other: Another one.
        unused: Columns that are not read.

    Raises:
        InputError: A column is missing in one of the tables, or its values have different forms.
    """
    for name in first.schema.names:
        if name in unused:
            continue
        if name not in other.schema.names:
            raise InputError(
                f"{other.name}: column {name!r} is missing, but {first.name} has it; "
                "train on files with the same columns"
            )
        first_type, other_type = first.schema.field(name).type, other.schema.field(name).type
        forms = {classify_type(first_type), classify_type(other_type)}
        is_empty = pa.types.is_null(first_type) or pa.types.is_null(other_type)
        has_untyped_numbers = forms == {"number", "text"} and not (first.dialect is None and other.dialect is None)
        if len(forms) > 1 and not is_empty and not has_untyped_numbers:
            raise InputError(
                f"{other.name}: column {name!r} is of type {other_type}, but in {first.name} it is {first_type}; "
                "convert the column of one file to the type of the other"
            )
    for name in other.schema.names:
        if name not in first.schema.names and name not in unused:
            raise InputError(
                f"{other.name}: column {name!r} does not exist in {first.name}; train on files with the same columns"
            )


@dataclass(frozen=True, slots=True)
class _Rows:
    """A batch of rows of one table.

    Attributes:
        batch: The rows.
        table: The table that contains them.
        file_index: The number of the table, from 0.
        row_numbers: (N,) the numbers of the rows in their table, from 0.
        first_index: The number of the first row in the input, over all tables.
    """

    batch: pa.RecordBatch
    table: Table
    file_index: int
    row_numbers: NDArray[np.int64]
    first_index: int

    def describe_column(self, name: str) -> str:
        """Return the name of the table and of a column, for messages."""
        return f"{self.table.name}: column {name!r}"


def _iterate_batches(tables: InputTables, column_names: Sequence[str]) -> Iterator[_Rows]:
    """Read some columns of all tables, batch by batch in the order of the input, at most `tables.max_rows` rows.

    Raises:
        InputError: A table cannot be read to its end.
        ReadingTooSlow: The pass would take too long.
    """
    # The more columns, the fewer rows in a batch, so that a batch of a wide table needs no more memory.
    batch_rows = int(np.clip(BATCH_CELLS // max(len(column_names), 1), 1024, 65_536))
    num_rows = 0
    for file_index, table in enumerate(tables.tables):
        forms = {name: form for name in column_names if (form := _choose_form(tables, table, name)) is not None}
        for batch, row_numbers in table.iterate_numbered(column_names, batch_rows, forms):
            if tables.max_rows is not None:
                batch = batch.slice(0, tables.max_rows - num_rows)
            tables.monitor.begin_batch()
            yield _Rows(_unify_columns(tables, batch), table, file_index, row_numbers, num_rows)
            tables.monitor.end_batch(len(batch))
            num_rows += len(batch)
            if num_rows == tables.max_rows:
                return


def _choose_form(tables: InputTables, table: Table, name: str) -> CellForm | None:
    """Return how the texts of a column are read (see `CellForm`). None to read the column as its type says."""
    if name == tables.time_column:
        # If the times of readings matter, each text must state its zone, unless the user has set one.
        # `parse_training_times` rejects others.
        is_zone_needed = tables.has_reading_rows and table.options.time_format.timezone is None
        is_number = classify_type(table.schema.field(name).type) == "number"
        return "text" if is_zone_needed and not is_number else "time"
    if name in (RECORD, FEATURE, tables.device_column) and tables.layout == "long":
        return "text"
    if name == tables.device_column:
        return "text"
    is_text = table.is_text_column(name)
    # Whether the texts of a column are numbers is decided when all of them have been seen.
    return "mixed" if is_text and classify_type(table.schema.field(name).type) in ("number", "text") else None


def _unify_columns(tables: InputTables, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch in which columns that are texts in another table are texts as well.

    Otherwise the values of one column could be numbers in one batch and labels in another.
    """
    for index, name in enumerate(batch.schema.names):
        if name in (tables.label_column, tables.time_column) or classify_type(batch.column(index).type) != "number":
            continue
        if any(table.is_text_column(name) for table in tables.tables) and not pa.types.is_null(
            batch.column(index).type
        ):
            label_indexes, labels = encode_labels(batch.column(index))
            indexes = pa.array(label_indexes, mask=label_indexes < 0)
            texts = pa.array(labels, pa.string()).take(indexes)
            batch = batch.set_column(index, name, texts)
    return batch


def parse_training_times(values: pa.Array, where: str) -> tuple[NDArray[np.int64], dict[int, RejectionError]]:
    """Convert a column of times to microseconds since 1970.

    The same forms are accepted as in event streams: timestamps (UTC if they have no zone), dates, numbers (seconds
    since 1970), and RFC 3339 texts with a zone.

    Args:
        values: N times.
        where: File and column for error messages, such as "log.parquet: column 'time'".

    Returns:
        (times, error_by_row). `times` (N,) int64 is `NO_TIME` for null, NaN, and times that cannot be read: texts that
        are no RFC 3339 time with a zone, and times outside the years 1 to 9999. Their errors are in `error_by_row`.

    Raises:
        InputError: The type of the column is none of these.
    """
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    form = classify_type(values.type)
    if form not in ("number", "text", "time"):
        raise InputError(
            f"{where} is of type {values.type}, which cannot be converted to times; "
            "convert it to timestamps, epoch seconds or RFC 3339 text such as 2020-03-09T10:34:33Z"
        )
    if form == "text":
        # Arrow's parser is fast, but it rejects leap seconds and its errors do not contain the row. The parser of event
        # streams is used for texts that it cannot parse.
        with contextlib.suppress(pa.ArrowInvalid):
            values = values.cast(pa.timestamp("us", "UTC"))
    elif pa.types.is_floating(values.type):  # NaN means an unknown time, like null
        values = pc.if_else(pc.is_nan(values), None, values)
    return columns.parse_times(values, where)


def index_records(tables: InputTables) -> None:
    """Count the normal records of the input and number them. This is the first of three passes over the input.

    The results are stored in `tables.num_records`, `tables.skipped_by_reason` and, for the long layout,
    `tables.row_by_event`.

    Raises:
        InputError: No record has the normal label, or no time of a long table can be read.
        ConfigError: `--exclude` names a feature that does not occur in a long table.
    """
    num_rows = _count_rows(tables)
    tables.monitor.num_rows = num_rows or 0
    if tables.has_reading_rows:
        _index_readings(tables)
    elif tables.normal_label is None:  # every row is a normal record
        if num_rows is None:
            num_rows = sum(len(rows.batch) for rows in _iterate_batches(tables, tables.schema.names[:1]))
        tables.num_records = tables.monitor.num_rows = num_rows
    else:
        _count_normal_rows(tables, tables.normal_label)


def _count_rows(tables: InputTables) -> int | None:
    """Return the number of rows that will be read; None if it is not known, because there are CSV files."""
    counts = [table.num_rows for table in tables.tables]
    if any(count is None for count in counts):
        return None
    num_rows = sum(count for count in counts if count is not None)
    return num_rows if tables.max_rows is None else min(num_rows, tables.max_rows)


def _count_normal_rows(tables: InputTables, normal_label: NormalLabel) -> None:
    """Count the rows of a wide table that have the normal label, and store the number in `tables.num_records`.

    Args:
        tables: The input. The number of other rows is stored in its `skipped_by_reason`.
        normal_label: The label.

    Raises:
        InputError: No row has the normal label.
    """
    num_rows = 0
    count_by_label: dict[str, int] = {}
    for rows in _iterate_batches(tables, [normal_label.column]):
        num_rows += len(rows.batch)
        tables.num_records += int(normal_label.match(rows.batch).sum())
        for label, count in _count_labels(rows.batch.column(0)):
            count_by_label[label] = count_by_label.get(label, 0) + count
    tables.monitor.num_rows = num_rows
    tables.skipped_by_reason["rows that are not normal"] = num_rows - tables.num_records
    if not tables.num_records:
        first_labels = list(count_by_label.items())[:10]
        contents = ", ".join(f"{label} ({format_count(count, 'row')})" for label, count in first_labels) or "nothing"
        raise TooFewRecordsError(
            f"no row of {tables.description} has {normal_label}; the column contains {contents}: "
            "give one of these values to --normal"
        )


def _count_labels(values: pa.Array) -> list[tuple[str, int]]:
    """Return the first `MAX_LISTED_LABELS` distinct labels of a column, each with its number of occurrences."""
    label_indexes, labels = encode_labels(values)
    first_labels = labels[:MAX_LISTED_LABELS]
    return [(label, int((label_indexes == index).sum())) for index, label in enumerate(first_labels)]


def _index_readings(tables: InputTables) -> None:
    """Find the normal records of readings, and store the record number of each row in `tables.row_by_event`.

    A row is a reading (long layout), or holds the readings of a device at one time (wide layout with windows). Normal
    records are numbered from 0 in the order of their first readings. A record is normal if each of its rows has the
    normal label. The number is −1 for rows of other records, for rows that have no record or no reading, and for rows
    whose time cannot be read. The counts in `tables.num_records` and `tables.skipped_by_reason` are also set.

    Raises:
        InputError: No record is normal, or no time of a table can be read.
        ConfigError: `--exclude` names a feature that does not occur.
    """
    number_by_key: dict[RecordKey, int] = {}
    is_normal: list[bool] = []  # by record number
    numbers_by_batch: list[NDArray[np.int64]] = []  # for each batch the record number of each row
    num_unusable = num_fill_values = 0
    owner_column = RECORD if tables.window is None else tables.device_column
    value_columns = tables.feature_columns if tables.layout == "wide" else [FEATURE]
    # In a window, the sensor may report again, so that a fill value is no reading.
    has_fill_values = tables.layout == "long" and tables.window is not None and bool(tables.fill_values)
    column_names = [*value_columns, owner_column, tables.time_column, tables.label_column]
    if has_fill_values:
        column_names.append(VALUE)
    features = _ExcludedFeatures(tables)
    for rows in _iterate_batches(tables, list(dict.fromkeys(name for name in column_names if name))):
        batch = rows.batch
        # Rows without a reading are left out first, so that a record that has no others does not count.
        has_reading = np.zeros(len(batch), bool)
        for name in value_columns:
            cells = batch.column(name)
            # In a long table, the column is that of the names of features.
            has_reading |= _has_value(tables.fill_values.remove(name, cells) if tables.layout == "wide" else cells)
        times, is_unreadable = _parse_row_times(tables, rows, tables.unreadable_times)
        is_skipped = is_unreadable
        if tables.layout == "long":
            is_skipped = is_skipped | features.find(batch)
        if has_fill_values:
            is_fill = _find_fill_values(tables, batch)
            num_fill_values += int((is_fill & ~is_skipped).sum())
            is_skipped = is_skipped | is_fill
        has_reading &= ~is_skipped
        numbers = np.full(len(batch), -1)
        if tables.window is None:
            numbers[has_reading] = _number_named_records(batch.filter(pa.array(has_reading)), number_by_key)
        else:
            devices = _get_devices(tables, rows).filter(pa.array(has_reading))
            numbers[has_reading] = _number_windows(devices, times[has_reading], number_by_key, tables.window)
        # In the wide layout, an empty row is no error: no sensor has reported.
        is_expected = ~is_skipped if tables.layout == "long" else has_reading
        num_unusable += int((numbers[is_expected] < 0).sum())
        is_normal.extend([True] * (len(number_by_key) - len(is_normal)))
        if tables.normal_label is not None:
            for number in np.unique(numbers[~tables.normal_label.match(batch)]):
                if number >= 0:
                    is_normal[number] = False
        numbers_by_batch.append(numbers)
    tables.unreadable_times.check(any(table.options.where is not None for table in tables.tables))
    features.check()
    is_normal_record = np.array(is_normal, bool)
    # Number the normal records without gaps. The number −1 of an unusable row selects the last element, −1.
    row_by_number = np.append(np.where(is_normal_record, np.cumsum(is_normal_record) - 1, -1), -1)
    has_batches = bool(numbers_by_batch)
    tables.row_by_event = row_by_number[np.concatenate(numbers_by_batch)] if has_batches else np.empty(0, np.int64)
    tables.monitor.num_rows = len(tables.row_by_event)
    tables.num_records = int(is_normal_record.sum())
    if num_unusable:
        owner = "record" if tables.window is None else "device, time"
        kind = "rows without device or time" if tables.layout == "wide" else f"events without {owner} or feature"
        tables.skipped_by_reason[kind] = num_unusable
    if num_fill_values:
        tables.skipped_by_reason["readings with fill values"] = num_fill_values
    if tables.unreadable_times.num_rows:
        tables.skipped_by_reason["rows whose time cannot be read"] = tables.unreadable_times.num_rows
    if not is_normal_record.all():
        tables.skipped_by_reason["records that are not normal"] = int((~is_normal_record).sum())
    if len(is_normal_record) and not is_normal_record.any():
        raise TooFewRecordsError(
            f"no record of {tables.description} has {tables.normal_label} in all of its rows; "
            "give another value to --normal"
        )


def iterate_record_values(tables: InputTables, column: str) -> Iterator[tuple[NDArray[np.int64], pa.Array, Table]]:
    """Yield for the rows of each batch their records and their cells in a column.

    Args:
        tables: A long table, or a wide one with windows of time.
        column: The column.

    Yields:
        (records, cells, table): (N,) the number from 0 of the record of each row, −1 if it has none; N cells.

    Raises:
        InputError: A table cannot be read.
    """
    number_by_key: dict[RecordKey, int] = {}
    owner_columns = [RECORD] if tables.window is None else [tables.device_column, tables.time_column]
    # The column may be the one with the records.
    for rows in _iterate_batches(tables, list(dict.fromkeys(name for name in [*owner_columns, column] if name))):
        if tables.window is None:
            numbers = _number_named_records(rows.batch, number_by_key)
        else:
            times, _ = _parse_row_times(tables, rows)
            numbers = _number_windows(_get_devices(tables, rows), times, number_by_key, tables.window)
        yield numbers, rows.batch.column(column), rows.table


def read_record_labels(tables: InputTables, column: str) -> tuple[NDArray[np.int64], list[str], NDArray[np.bool_]]:
    """Return the label of each of the N records of tables, which `index_records` has numbered.

    Args:
        tables: The tables.
        column: The column with the labels.

    Returns:
        (label_indexes, labels, has_several): (N,) the index of each record's label in `labels`, −1 if it has none; the
        distinct labels without the white space around them; (N,) whether rows of the record have different labels, or
        some have none.

    Raises:
        InputError: A table cannot be read.
    """
    index_by_label: dict[str, int] = {}
    # The smallest and the largest index of the labels of each record's rows.
    smallest = np.full(tables.num_records, np.iinfo(np.int64).max)
    largest = np.full(tables.num_records, -1)
    first_row = 0
    for rows in _iterate_batches(tables, [column]):
        codes, labels = encode_labels(rows.batch.column(0))
        # In one spelling, because numbers of a CSV file are read as text, and a label can be no number.
        indexes = [index_by_label.setdefault(normalize_label(label), len(index_by_label)) for label in labels]
        codes = np.array([*indexes, -1])[codes]
        last_row = first_row + len(codes)
        records = (
            np.arange(first_row, last_row) if tables.row_by_event is None else tables.row_by_event[first_row:last_row]
        )
        first_row = last_row
        np.minimum.at(smallest, records[records >= 0], codes[records >= 0])
        np.maximum.at(largest, records[records >= 0], codes[records >= 0])
    return largest, list(index_by_label), smallest != largest


def _has_value(values: pa.Array) -> NDArray[np.bool_]:
    """Return for each of N values whether it is neither null nor NaN."""
    has_value = columns.is_present(values)
    if pa.types.is_floating(values.type):
        has_value = has_value & ~np.isnan(values.to_numpy(zero_copy_only=False))
    return has_value


def _get_devices(tables: InputTables, rows: _Rows) -> pa.Array:
    """Return the device of each row, or the name of the table without its ending if there is no column of devices."""
    if tables.device_column is None:
        return pa.repeat(rows.table.stem, len(rows.batch))
    return rows.batch.column(tables.device_column)


def _parse_row_times(
    tables: InputTables, rows: _Rows, unreadable: UnreadableTimes | None = None
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the time of each of N rows, and whether it cannot be read.

    Args:
        tables: The input.
        rows: The N rows.
        unreadable: Counts the times that cannot be read. None if they were counted in an earlier pass.

    Returns:
        (times, is_unreadable): (N,) microseconds since 1970, `NO_TIME` if the time is unknown or cannot be read; (N,).

    Raises:
        InputError: The type of the column is none of times.
    """
    is_unreadable = np.zeros(len(rows.batch), bool)
    if tables.time_column is None:
        return np.full(len(rows.batch), NO_TIME), is_unreadable
    where = rows.describe_column(tables.time_column)
    times, error_by_row = parse_training_times(rows.batch.column(tables.time_column), where)
    is_unreadable[list(error_by_row)] = True
    if unreadable is not None:
        unreadable.add(rows, where, times, error_by_row)
    return times, is_unreadable


class _ExcludedFeatures:
    """Finds the readings of features of a long table that `--exclude` names, so that no record consists of them."""

    def __init__(self, tables: InputTables) -> None:
        self._excluded = tables.excluded_features if tables.layout == "long" else frozenset[str]()
        # Some of several models, or of the first rows, may lack a feature that others have.
        self._is_complete = tables.max_rows is None and all(table.options.where is None for table in tables.tables)
        self._seen: set[str] = set()
        self._columns = {name for table in tables.tables for name in table.schema.names}

    def find(self, batch: pa.RecordBatch) -> NDArray[np.bool_]:
        """Return for each of N readings whether its feature is excluded, (N,)."""
        if not self._excluded:
            return np.zeros(len(batch), bool)
        encoded = batch.column(FEATURE).cast(pa.string()).dictionary_encode()
        names = _list_texts(encoded)
        self._seen.update(names)
        # The code of a null is −1, which selects the last element.
        is_excluded_name = np.array([*(name in self._excluded for name in names), False])
        is_excluded: NDArray[np.bool_] = is_excluded_name[encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)]
        return is_excluded

    def check(self) -> None:
        """Check that each excluded feature has occurred.

        Raises:
            ConfigError: A feature does not exist.
        """
        unknown = sorted(self._excluded - self._seen - self._columns) if self._is_complete else []
        if unknown:
            raise ConfigError(
                f"--exclude {unknown[0]}: no feature is called so; give one of these names: "
                f"{join_names(sorted(self._seen))}"
            )


def _find_fill_values(tables: InputTables, batch: pa.RecordBatch) -> NDArray[np.bool_]:
    """Return for each of N readings of a long table whether its value is a fill value of its feature, (N,)."""
    encoded = batch.column(FEATURE).cast(pa.string()).dictionary_encode()
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    is_fill = np.zeros(len(batch), bool)
    for code, name in enumerate(_list_texts(encoded)):
        rows = np.flatnonzero(codes == code)
        is_fill[rows] = tables.fill_values.find(name, batch.column(VALUE).take(pa.array(rows)))
    return is_fill


def _list_texts(encoded: pa.DictionaryArray) -> list[str]:
    """Return the distinct texts of a column in valid UTF-8, in the order of their codes."""
    return list(map(format_cell, to_python_values(encoded.dictionary)))


def _number_named_records(batch: pa.RecordBatch, number_by_key: dict[RecordKey, int]) -> NDArray[np.int64]:
    """Return the record number of each of N readings whose record id is in the column `record`.

    Args:
        batch: N readings.
        number_by_key: Record numbers by record id, of all batches so far. New records get the next free numbers and are
            added to it.

    Returns:
        (N,) record numbers from 0, −1 if the reading has no record id.
    """
    encoded = batch.column(RECORD).cast(pa.string()).dictionary_encode()
    # `setdefault` returns the number of a known record, and adds a new one with the number of records so far.
    number_by_code = [number_by_key.setdefault(record_id, len(number_by_key)) for record_id in _list_texts(encoded)]
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    # The code of a null is −1, which selects the last element.
    numbers: NDArray[np.int64] = np.array([*number_by_code, -1], np.int64)[codes]
    return numbers


def _number_windows(
    devices: pa.Array, times: NDArray[np.int64], number_by_key: dict[RecordKey, int], window: Window
) -> NDArray[np.int64]:
    """Return the record number of each of N readings if all readings of a device in one window of time are a record.

    Args:
        devices: The N devices of the readings, null if unknown.
        times: (N,) times in microseconds since 1970, `NO_TIME` if unknown.
        number_by_key: Record numbers by device and start of the window (microseconds since 1970), of all batches so
            far. New windows get the next free numbers and are added to it.
        window: The window, whose width divides time into records.

    Returns:
        (N,) record numbers from 0, −1 if the reading has no device or no time.
    """
    encoded = devices.cast(pa.string()).dictionary_encode()
    names = _list_texts(encoded)  # the distinct devices of this batch; a code is an index into them
    device_codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    usable_indexes = np.flatnonzero((device_codes >= 0) & (times != NO_TIME))
    window_starts = floor_to_window(times[usable_indexes], window.width)
    keys = np.stack([device_codes[usable_indexes], window_starts], 1)  # one row for each usable reading
    # For each distinct key the index of its first reading, and for each reading the index of its distinct key.
    _, first_indexes, unique_key_indexes = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    number_by_unique_key = np.empty(len(first_indexes), np.int64)
    for i in np.argsort(first_indexes).tolist():  # new windows are numbered in the order of their first readings
        device_code, window_start = keys[first_indexes[i]].tolist()
        # `setdefault` returns the number of a known window, and adds a new one with the number of windows so far.
        number_by_unique_key[i] = number_by_key.setdefault((names[device_code], window_start), len(number_by_key))
    numbers = np.full(len(times), -1)
    # NumPy 2.0 returns these indexes with two dimensions, other versions with one.
    numbers[usable_indexes] = number_by_unique_key[unique_key_indexes.reshape(-1)]
    return numbers


def _iterate_wide_readings(tables: InputTables) -> Iterator[FeatureReadings]:
    """Yield each feature's values in each batch of a wide table, for the rows with the normal label only.

    The normal rows are numbered from 0 over all files.
    """
    first_record = 0  # number of normal rows in the batches so far
    column_names = tables.feature_columns + [name for name in (tables.label_column, tables.time_column) if name]
    for rows in _iterate_batches(tables, column_names):
        batch = rows.batch
        if tables.normal_label is not None:
            batch = batch.filter(pa.array(tables.normal_label.match(batch)))
        records = np.arange(first_record, first_record + len(batch), dtype=np.int64)
        first_record += len(batch)
        if tables.time_column:
            # The time of a record is not used for training, so a malformed one is ignored.
            times, _ = columns.parse_times(batch.column(tables.time_column), rows.describe_column(tables.time_column))
            tables.note_times(times, rows.file_index)
        if tables.row_by_record is not None:  # only a sample of the records is used
            records = tables.row_by_record[records]
            batch, records = batch.filter(pa.array(records >= 0)), records[records >= 0]
        for name in tables.feature_columns:
            values = tables.fill_values.remove(name, batch.column(name))
            yield FeatureReadings(name, records, values, rows.file_index)


def _get_records(tables: InputTables, rows: _Rows) -> NDArray[np.int64]:
    """Return the record number of each row of a batch, −1 if the row is left out.

    Raises:
        ValueError: `index_records` has not been called before.
    """
    if tables.row_by_event is None:
        raise ValueError("the records must be numbered before their readings are read: call index_records first")
    return tables.row_by_event[rows.first_index : rows.first_index + len(rows.batch)]


def _iterate_unpivoted_readings(tables: InputTables) -> Iterator[EventReadings]:
    """Yield the readings of normal records in each batch of a wide table whose records are windows of time.

    They are the readings that a long table would contain, row by row, and within a row in the order of the columns.
    Cells without a value are left out. Features that appear first are yielded first, as in a long table.

    Raises:
        ValueError: `index_records` has not been called before.
    """
    owner_columns = [name for name in (tables.device_column, tables.time_column) if name]
    num_columns = len(tables.feature_columns)
    for rows in _iterate_batches(tables, [*tables.feature_columns, *owner_columns]):
        records = _get_records(tables, rows)
        times, _ = _parse_row_times(tables, rows)
        tables.note_times(times[records >= 0], rows.file_index)
        time_slots = np.zeros_like(times) if tables.window is None else tables.window.time_slot_index(times)
        readings_by_first_event: dict[int, EventReadings] = {}
        for column_index, name in enumerate(tables.feature_columns):
            values = tables.fill_values.remove(name, rows.batch.column(name))
            selected = np.flatnonzero(_has_value(values) & (records >= 0))
            event_indexes = (rows.first_index + selected) * num_columns + column_index
            if len(selected):
                readings_by_first_event[int(event_indexes[0])] = EventReadings(
                    name,
                    records[selected],
                    values.take(pa.array(selected)),
                    rows.file_index,
                    times=times[selected],
                    event_indexes=event_indexes,
                    time_slots=time_slots[selected],
                )
        for first_event in sorted(readings_by_first_event):
            yield readings_by_first_event[first_event]


def _iterate_long_readings(tables: InputTables) -> Iterator[EventReadings]:
    """Yield the readings of normal records in each batch of a long table, grouped by feature.

    A reading is also called an event; its index is its position in the input, over all files.

    Raises:
        ValueError: `index_records` has not been called before.
    """
    column_names = [FEATURE, VALUE] + ([tables.time_column] if tables.time_column else [])
    for rows in _iterate_batches(tables, column_names):
        batch, records = rows.batch, _get_records(tables, rows)
        times, _ = _parse_row_times(tables, rows)
        tables.note_times(times[records >= 0], rows.file_index)
        event_indexes = np.arange(rows.first_index, rows.first_index + len(batch), dtype=np.int64)
        time_slots = np.zeros_like(times) if tables.window is None else tables.window.time_slot_index(times)
        encoded = batch.column(FEATURE).cast(pa.string()).dictionary_encode()
        feature_codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        feature_codes[records < 0] = -1  # leave out readings of records that are not normal
        # Sort the readings by feature. Those of feature k are then order[bounds[k]] to order[bounds[k + 1] - 1].
        order = np.argsort(feature_codes, kind="stable")
        bounds = np.searchsorted(feature_codes[order], np.arange(len(encoded.dictionary) + 1))
        for code, name in enumerate(_list_texts(encoded)):
            selected = order[bounds[code] : bounds[code + 1]]
            if len(selected):
                yield EventReadings(
                    name,
                    records[selected],
                    tables.fill_values.remove(name, batch.column(VALUE).take(pa.array(selected))),
                    rows.file_index,
                    times=times[selected],
                    event_indexes=event_indexes[selected],
                    time_slots=time_slots[selected],
                )


def convert_to_numbers(
    values: pa.Array, has_times_of_day: bool = False
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Convert N numbers, texts or times of day to floats. Booleans are not numbers, as in a stream.

    Args:
        values: N numbers, texts that may represent numbers, or times of day (converted to seconds since midnight).
        has_times_of_day: Whether texts such as "13:45" represent times of day. A part of a CSV column of times of day
            is text if one of its cells is no time.

    Returns:
        (numbers, is_bad), both of shape (N,). A number is NaN if the value is null, stands for "no value" such as
        "N/A", or does not represent a number. In the last case `is_bad` is True. Callers may change the numbers.
    """
    numbers, is_bad = columns.parse_number_cells(convert_times_of_day(values), has_times_of_day)
    return numbers.copy(), is_bad  # the copy can be changed


def has_leading_zeros(values: pa.Array) -> NDArray[np.bool_]:
    """Return for each of N texts whether it is an integer with leading zeros, such as "007"; False for null."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    is_padded = pc.match_substring_regex(values.cast(pa.string()), _LEADING_ZERO_PATTERN)
    result: NDArray[np.bool_] = is_padded.fill_null(False).to_numpy(zero_copy_only=False)
    return result
