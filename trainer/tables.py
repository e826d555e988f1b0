"""Read training tables from Parquet files, one batch of rows at a time.

Tables have one of two layouts. In the wide layout a row is a record and a column is a feature. In the long layout a row
is one reading, with columns for the record, the feature, the value and perhaps the time. Both layouts are converted to
the same sequence of `FeatureReadings`, so that other modules need not distinguish them. Only one batch is in memory at
a time. For the long layout, the ids of the records and the record number of each reading are in memory as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from deformer_stream.codec import columns
from deformer_stream.codec.columns import convert_times_of_day, is_time_of_day
from deformer_stream.engine.events import NO_TIME
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model.schema import format_label
from deformer_stream.model.windows import Window, floor_to_window
from deformer_stream.tables.discovery import list_data_files
from trainer.identifiers import OrderStatistics
from trainer.reading_time import ReadingMonitor

Layout = Literal["wide", "long"]
"""wide: a row is a record. long: a row is one reading of one feature of a record."""

ValueForm = Literal["number", "boolean", "text", "clock", "time", "other"]
"""What the values of a column are, according to its Parquet type.

"clock" is a time of day, which is converted to seconds since midnight. "time" is a date or a timestamp. Columns of form
"other", such as lists, cannot be features.
"""

RECORD, FEATURE, VALUE, TIME, DEVICE = "record", "feature", "value", "time", "device"
"""Column names of the long layout."""

BATCH_CELLS = 4_000_000
"""Approximate number of values (rows times columns) of a batch, so that wide tables need no more memory."""

MAX_LISTED_LABELS = 50
"""Largest number of distinct labels of one batch that are counted for an error message."""

_NUMBER_PATTERN = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$|^[+-]?(?i:nan|inf|infinity)$"
"""Regular expression of a text that represents a number."""

_LEADING_ZERO_PATTERN = r"^\s*[+-]?0[0-9]+\s*$"
"""Regular expression of an integer with leading zeros, such as "007". It is a code or an id and not a measurement."""

RecordKey = str | tuple[str, int]
"""What identifies a record: its id; or, if a record is a window of time, the device and the start of the window in
microseconds since 1970."""


@dataclass(frozen=True, slots=True)
class FeatureReadings:
    """The M readings of one feature in one batch of the table.

    Attributes:
        feature_name: The feature's name.
        rows: (M,) number (from 0) of the record to which each reading belongs. It is the record's row in the training
            matrix.
        values: M values in the type of the Parquet column.
        times: (M,) times in microseconds since 1970, `NO_TIME` if unknown. None for the wide layout.
        event_indexes: (M,) position of each reading in the input, over all files. None for the wide layout.
        time_slots: (M,) index of the time slot (equal part of the record's window of time) of each reading. 0 if
            records are not windows. None for the wide layout.
        file_index: The number of the file that contains the readings, from 0.
    """

    feature_name: str
    rows: NDArray[np.int64]
    values: pa.Array
    times: NDArray[np.int64] | None = None
    event_indexes: NDArray[np.int64] | None = None
    time_slots: NDArray[np.int64] | None = None
    file_index: int = 0


@dataclass
class InputTables:
    """The Parquet files of a training run, how to read them, and which of their records are normal.

    Attributes:
        files: The files, in the order in which they are read.
        schema: The Arrow schema of the first file. The other files have the same columns.
        layout: "wide" if a row is a record, "long" if it is a reading.
        label_column: The column that distinguishes normal records from others. None if all records are normal.
        normal_label: The value of `label_column` in normal records.
        window: The window of time: all readings of a device in one window are a record. None if a column names the
            record of each reading, or if a row is a record.
        feature_columns: The columns that may be features (wide layout only).
        time_column: The column with the time of the record (wide) or of the reading (long). None if there is none.
        num_records: Number of normal records. `index_records` sets it.
        skipped_by_reason: By reason as text, the number of records or readings that were left out.
        row_by_event: (E,) for each of the E readings of a long table, the number (from 0) of its record among the
            normal records; −1 if the reading is left out. None for a wide table and before `index_records` is called.
        time_order: How the times of the normal records (wide) or of their readings (long) change in the order of the
            input. `iterate_readings` sets it anew. It is empty if there is no time column.
        row_by_record: (N,) for each of the N normal records of a wide table, its number among the records of a random
            sample; −1 if it is not in the sample. None if all records are used.
        time_span: The first and the last time of a normal record or reading, in microseconds since 1970. None if there
            are no times. It is set while the readings are iterated.
        monitor: Counts the rows that are read, and stops a pass that takes too long.
    """

    files: list[Path]
    schema: pa.Schema
    layout: Layout
    label_column: str | None
    normal_label: str | None
    window: Window | None = None
    feature_columns: list[str] = field(default_factory=list)
    time_column: str | None = None
    num_records: int = 0
    skipped_by_reason: dict[str, int] = field(default_factory=dict)
    row_by_event: NDArray[np.int64] | None = None
    time_order: OrderStatistics = field(default_factory=OrderStatistics)
    row_by_record: NDArray[np.int64] | None = None
    time_span: tuple[int, int] | None = None
    monitor: ReadingMonitor = field(default_factory=ReadingMonitor)

    @property
    def description(self) -> str:
        """The first file and, if there are more, their number, for messages that concern all of them."""
        num_others = len(self.files) - 1
        others = {0: "", 1: " and 1 other file"}.get(num_others, f" and {num_others} other files")
        return f"{self.files[0]}{others}"

    @property
    def units(self) -> dict[str, str]:
        """The units of columns by name, from the metadata of the columns in the first file."""
        unit_by_name = {}
        for column in self.schema:
            metadata = column.metadata or {}
            if unit := (metadata.get(b"unit") or metadata.get(b"units") or b"").decode("utf-8", "replace").strip():
                unit_by_name[column.name] = unit
        return unit_by_name

    def iterate_readings(self) -> Iterator[FeatureReadings]:
        """Yield the readings of all normal records, batch by batch in the order of the input, grouped by feature."""
        self.time_order = OrderStatistics()
        return _iterate_wide_readings(self) if self.layout == "wide" else _iterate_long_readings(self)

    def sample_records(self, num_records: int, seed: int) -> None:
        """Use only a random sample of the normal records from now on. They are numbered anew, in the same order.

        Args:
            num_records: Number of records of the sample, smaller than `self.num_records`.
            seed: Seed of the random choice.
        """
        # The constant in the seed makes this sample independent of others with the same seed.
        chosen = np.random.default_rng([seed, 0x5A4C]).choice(self.num_records, num_records, replace=False)
        row_by_record = np.full(self.num_records + 1, -1)  # the last element is for left-out readings, whose row is −1
        row_by_record[np.sort(chosen)] = np.arange(num_records)
        if self.row_by_event is not None:
            self.row_by_event = row_by_record[self.row_by_event]
        else:
            self.row_by_record = row_by_record[:-1]
        self.skipped_by_reason["records, because of --max-time"] = self.num_records - num_records
        self.num_records = num_records

    def extend_time_span(self, times: NDArray[np.int64]) -> None:
        """Extend `time_span` so that it contains the given times in microseconds since 1970, except `NO_TIME`."""
        known = times[times != NO_TIME]
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


def find_files(tables: Sequence[Path]) -> list[Path]:
    """Return the given files, and for each folder the `*.parquet` files in it and its subfolders, sorted by path.

    Files and folders whose name begins with a dot or an underscore are ignored inside a folder.

    Raises:
        InputError: A path does not exist, a folder contains no Parquet file, or a folder is a Delta Lake or Iceberg
            table that may contain outdated files.
    """
    files: list[Path] = []
    for path in tables:
        if path.is_dir():
            in_folder = list_data_files(path, (".parquet",))
            if not in_folder:
                raise InputError(f"{path}: the folder contains no *.parquet file; give another folder or the files")
            files.extend(in_folder)
        elif path.is_file():
            files.append(path)
        else:
            raise InputError(f"{path}: no such file or folder; check the path")
    return files


def open_tables(
    tables: Sequence[Path],
    layout: Layout | None,
    label_column: str | None,
    normal_label: str | None,
    window: Window | None = None,
) -> InputTables:
    """Find the Parquet files of a training run, and check that their columns fit each other and the options.

    Only the metadata of the files is read.

    Args:
        tables: Parquet files and folders of Parquet files.
        layout: "wide" if a row is a record, "long" if it is a reading. None to infer it from the column names.
        label_column: The column that distinguishes normal records from others (`--label`).
        normal_label: The value of that column in normal records (`--normal`).
        window: The window of time (`--window`): all readings of a device in one window are a record. None if the input
            contains record ids, or if a row is a record.

    Returns:
        The files, the layout and the options. The records are not counted yet (see `index_records`).

    Raises:
        InputError: A file is unreadable or lacks a column, or the files have different columns.
        ConfigError: An option does not fit the columns.
    """
    files = find_files(tables)
    schema = _read_schema(files[0])
    for path in files[1:]:
        _check_same_columns(schema, _read_schema(path), files[0], path)
    layout = _check_layout(files[0], schema.names, layout, window)
    if (label_column is None) != (normal_label is None):
        missing, meaning = (
            ("--normal", f"the value of the column {label_column!r} in normal rows")
            if normal_label is None
            else ("--label", f"the name of the column that contains {normal_label!r} in normal rows")
        )
        raise ConfigError(f"--label and --normal belong together, but {missing} is missing; set it to {meaning}")
    if label_column is not None and label_column not in schema.names:
        raise ConfigError(
            f"--label {label_column}: {files[0]} has no such column; give one of its columns: {', '.join(schema.names)}"
        )
    return InputTables(files, schema, layout, label_column, normal_label, window)


def _check_layout(path: Path, column_names: list[str], layout: Layout | None, window: Window | None) -> Layout:
    """Infer the layout of a table if it is None, and check that the columns fit the layout and the window.

    Args:
        path: The file, for error messages.
        column_names: The columns of the file.
        layout: "wide" if a row is a record, "long" if it is a reading, or None.
        window: The windows of time that are the records (`--window`). None if the option is not given.

    Returns:
        The layout. It is "long" if the table has all columns of the long layout and the user has not chosen "wide".

    Raises:
        InputError: A column of the long layout is missing.
        ConfigError: The option `--window` is missing or does not fit the columns.
    """
    # The columns of the long layout. A table with all of them is long by default.
    required = (RECORD, FEATURE, VALUE) if window is None else (DEVICE, FEATURE, VALUE, TIME)
    missing = [column for column in required if column not in column_names]
    if layout is None:
        # A table of readings of devices has no records unless --window makes them.
        if window is None and {DEVICE, FEATURE, VALUE, TIME} <= set(column_names) and missing:
            raise ConfigError(
                f"{path}: the rows seem to be readings of devices, but no column {RECORD!r} says to which records "
                "they belong; add --window, such as 60s, to make records of them, or --layout wide if each row is a "
                "record"
            )
        layout = "wide" if missing else "long"
    if window is not None and (layout == "wide" or RECORD in column_names):
        conflict = f"its column {RECORD!r} already defines them" if layout == "long" else "its rows are records already"
        raise ConfigError(
            f"--window cannot make records from {path}, because {conflict}; remove --window, or give a table whose "
            f"columns are {', '.join(required)}"
        )
    if layout == "long" and missing:
        column_list = f"{', '.join(required[:-1])} and {required[-1]}"
        raise InputError(
            f"{path}: column {missing[0]!r} is missing, but the long layout needs the columns {column_list}; "
            "add or rename the column"
        )
    return layout


def _read_schema(path: Path) -> pa.Schema:
    """Return the Arrow schema of a Parquet file; raise InputError if it is unreadable or repeats a column name."""
    try:
        schema = pq.read_schema(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(
            f"{path}: the file is not a readable Parquet file ({_first_line(error)}); convert or remove it"
        ) from error
    if len(set(schema.names)) < len(schema.names):
        repeated = next(name for name in schema.names if schema.names.count(name) > 1)
        raise InputError(f"{path}: two columns are called {repeated!r}; rename one of them")
    return schema


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message, for use inside another message.

    A full stop at its end is removed. If the error has no message, the name of its type is returned.
    """
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__


def _check_same_columns(first: pa.Schema, other: pa.Schema, first_path: Path, other_path: Path) -> None:
    """Check that two files have columns of the same names with the same form of values, such as numbers or texts.

    A column without any value in one of the files fits every form.

    Raises:
        InputError: A column is missing in one of the files, or its values have different forms.
    """
    for name in first.names:
        if name not in other.names:
            raise InputError(
                f"{other_path}: column {name!r} is missing, but {first_path} has it; "
                "train on files with the same columns"
            )
        first_type, other_type = first.field(name).type, other.field(name).type
        is_empty = pa.types.is_null(first_type) or pa.types.is_null(other_type)
        if classify_type(first_type) != classify_type(other_type) and not is_empty:
            raise InputError(
                f"{other_path}: column {name!r} is of type {other_type}, but in {first_path} it is {first_type}; "
                "convert the column of one file to the type of the other"
            )
    for name in other.names:
        if name not in first.names:
            raise InputError(
                f"{other_path}: column {name!r} does not exist in {first_path}; train on files with the same columns"
            )


def _iterate_batches(tables: InputTables, column_names: list[str]) -> Iterator[tuple[Path, pa.RecordBatch]]:
    """Read some columns of all files, batch by batch in the order of the input.

    Yields:
        The path of the file, and a batch of its rows with the columns in the order of `column_names`.

    Raises:
        InputError: A file cannot be read to its end.
    """
    # The more columns, the fewer rows in a batch, so that a batch of a wide table needs no more memory.
    batch_rows = int(np.clip(BATCH_CELLS // max(len(column_names), 1), 1024, 65_536))
    for path in tables.files:
        try:
            # With pre_buffer, all data that was read would stay in memory until the file is closed.
            with pq.ParquetFile(path, pre_buffer=False) as file:
                for batch in file.iter_batches(batch_rows, columns=column_names):
                    tables.monitor.begin_batch()
                    yield path, batch
                    tables.monitor.end_batch(len(batch))
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(
                f"{path}: the file cannot be read to its end ({_first_line(error)}); restore it from its source"
            ) from error


def match_normal_label(values: pa.Array, normal_label: str) -> NDArray[np.bool_]:
    """Return for each of N values of the label column whether it marks a normal record.

    Values are compared as text. A number matches in every spelling: the value 0.0 matches the option `--normal 0`.

    Args:
        values: N values of the column that `--label` names.
        normal_label: The value of the option `--normal`.

    Returns:
        (N,) bool, False for null.
    """
    spellings = {normal_label}
    with contextlib.suppress(ValueError):  # the normal label need not be a number
        spellings.add(format_label(float(normal_label)))  # the spelling that `encode_labels` returns
    label_indexes, labels = encode_labels(values)
    # The index of a null is −1, which selects the last element.
    is_normal_label = np.array([label in spellings for label in labels] + [False])
    is_normal: NDArray[np.bool_] = is_normal_label[label_indexes]
    return is_normal


def encode_labels(values: pa.Array) -> tuple[NDArray[np.int64], list[str]]:
    """Replace N labels by indexes into a list of their distinct labels.

    Args:
        values: N labels: numbers, booleans or texts, perhaps dictionary-encoded.

    Returns:
        (indexes, labels). `indexes` has shape (N,) and contains −1 for null and NaN. `labels` are texts. Equal numbers
        have the same text, such as "1" for 1 and 1.0. Some labels may not occur in `values`.
    """
    encoded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    is_numeric = classify_type(encoded.dictionary.type) == "number"
    if is_numeric and not pa.types.is_null(encoded.dictionary.type):
        # As floats, integers and decimals get the same spelling.
        labels = [format_label(float(value)) for value in encoded.dictionary.to_pylist()]
    else:
        labels = [format_label(value.as_py()) for value in encoded.dictionary]
    indexes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    if is_numeric and "nan" in labels:  # NaN is a missing value like null
        is_nan = np.array([label == "nan" for label in labels] + [False])  # the index −1 selects the last element
        indexes = np.where(is_nan[indexes], -1, indexes)
    return indexes, labels


def parse_times(values: pa.Array, where: str, first_row: int = 0) -> NDArray[np.int64]:
    """Convert a column of times to microseconds since 1970.

    The same forms are accepted as in event streams: timestamps (UTC if they have no zone), dates, numbers (seconds
    since 1970), and RFC 3339 texts with a zone.

    Args:
        values: N times.
        where: File and column for error messages, such as "log.parquet: column 'time'".
        first_row: Row number of the first value in the file, for error messages.

    Returns:
        (N,) int64, `NO_TIME` for null and NaN.

    Raises:
        InputError: A text is no RFC 3339 time with a zone, a time lies outside the years 1 to 9999, or the type of the
            column is none of these.
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
    times, error_by_row = columns.parse_times(values, where)
    if error_by_row:
        row = min(error_by_row)
        raise InputError(
            f"{where}, row {first_row + row}: the time cannot be parsed ({error_by_row[row]}); "
            "write times with a zone, such as 2020-03-09T10:34:33Z, or as timestamps or epoch seconds"
        )
    return times


def index_records(tables: InputTables) -> None:
    """Count the normal records of the input and number them. This is the first of three passes over the input.

    The results are stored in `tables.num_records`, `tables.skipped_by_reason` and, for the long layout,
    `tables.row_by_event`.

    Raises:
        InputError: No record has the normal label, or a time of a long table is malformed.
    """
    tables.monitor.num_rows = sum(pq.read_metadata(path).num_rows for path in tables.files)
    if tables.layout == "long":
        _index_long_records(tables)
    elif tables.label_column is None:  # every row is a normal record
        tables.num_records = tables.monitor.num_rows
    else:
        # `open_tables` has checked that there is a normal label if there is a label column.
        _count_normal_rows(tables, tables.label_column, tables.normal_label or "")


def _count_normal_rows(tables: InputTables, label_column: str, normal_label: str) -> None:
    """Count the rows of a wide table that have the normal label, and store the number in `tables.num_records`.

    Args:
        tables: The input. The number of other rows is stored in its `skipped_by_reason`.
        label_column: The column that distinguishes normal records from others (`--label`).
        normal_label: The value of that column in normal records (`--normal`).

    Raises:
        InputError: No row has the normal label.
    """
    num_rows = 0
    count_by_label: dict[str, int] = {}
    for _, batch in _iterate_batches(tables, [label_column]):
        values = batch.column(0)
        num_rows += len(batch)
        tables.num_records += int(match_normal_label(values, normal_label).sum())
        for label, count in _count_labels(values):
            count_by_label[label] = count_by_label.get(label, 0) + count
    tables.skipped_by_reason["rows that are not normal"] = num_rows - tables.num_records
    if not tables.num_records:
        first_labels = list(count_by_label.items())[:10]
        contents = ", ".join(f"{label} ({count} rows)" for label, count in first_labels) or "nothing"
        raise InputError(
            f"no row of {tables.description} has {label_column} = {normal_label}; the column contains {contents}: "
            "give one of these values to --normal"
        )


def _count_labels(values: pa.Array) -> list[tuple[str, int]]:
    """Return the first `MAX_LISTED_LABELS` distinct labels of a column, each with its number of occurrences."""
    label_indexes, labels = encode_labels(values)
    first_labels = labels[:MAX_LISTED_LABELS]
    return [(label, int((label_indexes == index).sum())) for index, label in enumerate(first_labels)]


def _index_long_records(tables: InputTables) -> None:
    """Find the normal records of a long table and store the record number of each reading in `tables.row_by_event`.

    Normal records are numbered from 0 in the order of their first readings. A record is normal if each of its readings
    has the normal label. The number is −1 for readings of other records, and for readings that have no record or no
    feature. The counts in `tables.num_records` and `tables.skipped_by_reason` are also set.

    Raises:
        InputError: No record is normal, or a time is malformed.
    """
    number_by_key: dict[RecordKey, int] = {}
    is_normal: list[bool] = []  # by record number
    numbers_by_batch: list[NDArray[np.int64]] = []  # for each batch the record number of each reading
    num_unusable, first_row, current_path = 0, 0, None
    column_names = [FEATURE, *([RECORD] if tables.window is None else [DEVICE, TIME])]
    for path, batch in _iterate_batches(tables, column_names + ([tables.label_column] if tables.label_column else [])):
        first_row = first_row if path == current_path else 0
        current_path = path
        # Readings without a feature are left out first, so that a record that has no others does not count.
        has_feature = batch.column(FEATURE).is_valid()
        named, is_named = batch.filter(has_feature), has_feature.to_numpy(zero_copy_only=False)
        numbers = np.full(len(batch), -1)
        if tables.window is None:
            numbers[is_named] = _number_named_records(named, number_by_key)
        else:
            times = parse_times(batch.column(TIME), f"{path}: column {TIME!r}", first_row)
            numbers[is_named] = _number_windows(named, times[is_named], number_by_key, tables.window)
        num_unusable += int((numbers < 0).sum())
        is_normal.extend([True] * (len(number_by_key) - len(is_normal)))
        if tables.label_column is not None and tables.normal_label is not None:
            has_normal_label = match_normal_label(batch.column(tables.label_column), tables.normal_label)
            for number in np.unique(numbers[~has_normal_label]):
                if number >= 0:
                    is_normal[number] = False
        numbers_by_batch.append(numbers)
        first_row += len(batch)
    is_normal_record = np.array(is_normal, bool)
    # Number the normal records without gaps. The number −1 of an unusable reading selects the last element, −1.
    row_by_number = np.append(np.where(is_normal_record, np.cumsum(is_normal_record) - 1, -1), -1)
    has_batches = bool(numbers_by_batch)
    tables.row_by_event = row_by_number[np.concatenate(numbers_by_batch)] if has_batches else np.empty(0, np.int64)
    tables.num_records = int(is_normal_record.sum())
    if num_unusable:
        owner = "record" if tables.window is None else "device, time"
        tables.skipped_by_reason[f"events without {owner} or feature"] = num_unusable
    if not is_normal_record.all():
        tables.skipped_by_reason["records that are not normal"] = int((~is_normal_record).sum())
    if len(is_normal_record) and not is_normal_record.any():
        raise InputError(
            f"no record of {tables.description} has {tables.label_column} = {tables.normal_label} in all of its rows; "
            "give another value to --normal"
        )


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
    record_ids = encoded.dictionary.to_pylist()
    # `setdefault` returns the number of a known record, and adds a new one with the number of records so far.
    number_by_code = [number_by_key.setdefault(record_id, len(number_by_key)) for record_id in record_ids]
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    # The code of a null is −1, which selects the last element.
    numbers: NDArray[np.int64] = np.array([*number_by_code, -1], np.int64)[codes]
    return numbers


def _number_windows(
    batch: pa.RecordBatch, times: NDArray[np.int64], number_by_key: dict[RecordKey, int], window: Window
) -> NDArray[np.int64]:
    """Return the record number of each of N readings if all readings of a device in one window of time are a record.

    Args:
        batch: N readings with a column `device`.
        times: (N,) times in microseconds since 1970, `NO_TIME` if unknown.
        number_by_key: Record numbers by device and start of the window (microseconds since 1970), of all batches so
            far. New windows get the next free numbers and are added to it.
        window: The window, whose width divides time into records.

    Returns:
        (N,) record numbers from 0, −1 if the reading has no device or no time.
    """
    encoded = batch.column(DEVICE).cast(pa.string()).dictionary_encode()
    devices = encoded.dictionary.to_pylist()  # the distinct devices of this batch; a code is an index into them
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
        number_by_unique_key[i] = number_by_key.setdefault((devices[device_code], window_start), len(number_by_key))
    numbers = np.full(len(times), -1)
    # NumPy 2.0 returns these indexes with two dimensions, other versions with one.
    numbers[usable_indexes] = number_by_unique_key[unique_key_indexes.reshape(-1)]
    return numbers


def _iterate_wide_readings(tables: InputTables) -> Iterator[FeatureReadings]:
    """Yield each feature's values in each batch of a wide table, for the rows with the normal label only.

    The normal rows are numbered from 0 over all files.
    """
    first_row = 0  # number of normal rows in the batches so far
    column_names = tables.feature_columns + [name for name in (tables.label_column, tables.time_column) if name]
    for path, batch in _iterate_batches(tables, column_names):
        if tables.label_column is not None and tables.normal_label is not None:
            is_normal = match_normal_label(batch.column(tables.label_column), tables.normal_label)
            batch = batch.filter(pa.array(is_normal))
        rows = np.arange(first_row, first_row + len(batch), dtype=np.int64)
        first_row += len(batch)
        file_index = tables.files.index(path)
        if tables.time_column:
            times = batch.column(tables.time_column).drop_null().cast(pa.int64())
            tables.time_order.add(times.to_numpy(zero_copy_only=False).astype(np.float64), file_index)
            tables.extend_time_span(parse_times(batch.column(tables.time_column), f"{path}: {tables.time_column!r}"))
        if tables.row_by_record is not None:  # only a sample of the records is used
            rows = tables.row_by_record[rows]
            batch, rows = batch.filter(pa.array(rows >= 0)), rows[rows >= 0]
        for name in tables.feature_columns:
            yield FeatureReadings(name, rows, batch.column(name), file_index=file_index)


def _iterate_long_readings(tables: InputTables) -> Iterator[FeatureReadings]:
    """Yield the readings of normal records in each batch of a long table, grouped by feature.

    A reading is also called an event; its index is its position in the input, over all files.

    Raises:
        ValueError: `index_records` has not been called before.
        InputError: A time is malformed.
    """
    if tables.row_by_event is None:
        raise ValueError("the records of a long table must be numbered before its readings: call index_records first")
    num_events, first_row, current_path = 0, 0, None
    column_names = [FEATURE, VALUE] + ([tables.time_column] if tables.time_column else [])
    for path, batch in _iterate_batches(tables, column_names):
        first_row = first_row if path == current_path else 0  # row in the file of the first reading of this batch
        current_path = path
        event_indexes = np.arange(num_events, num_events + len(batch), dtype=np.int64)
        rows = tables.row_by_event[event_indexes]
        times = np.full(len(batch), NO_TIME)
        if tables.time_column:
            where = f"{path}: column {tables.time_column!r}"
            times = parse_times(batch.column(tables.time_column), where, first_row)
            used_times = times[(rows >= 0) & (times != NO_TIME)].astype(np.float64)
            tables.time_order.add(used_times, tables.files.index(path))
            tables.extend_time_span(times[rows >= 0])
        time_slots = np.zeros_like(times) if tables.window is None else tables.window.time_slot_index(times)
        num_events += len(batch)
        first_row += len(batch)
        encoded = batch.column(FEATURE).cast(pa.string()).dictionary_encode()
        feature_codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        feature_codes[rows < 0] = -1  # leave out readings of records that are not normal
        # Sort the readings by feature. Those of feature k are then order[bounds[k]] to order[bounds[k + 1] - 1].
        order = np.argsort(feature_codes, kind="stable")
        bounds = np.searchsorted(feature_codes[order], np.arange(len(encoded.dictionary) + 1))
        for code, name in enumerate(encoded.dictionary.to_pylist()):
            selected = order[bounds[code] : bounds[code + 1]]
            if len(selected):
                yield FeatureReadings(
                    name,
                    rows[selected],
                    batch.column(VALUE).take(pa.array(selected)),
                    times[selected],
                    event_indexes[selected],
                    time_slots[selected],
                    tables.files.index(path),
                )


def parse_numbers(values: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Convert N numbers, texts or times of day to floats.

    Args:
        values: N numbers, texts that may represent numbers, or times of day (converted to seconds since midnight).

    Returns:
        (numbers, is_other_text), both of shape (N,). A number is NaN if the value is null or does not represent a
        number. `is_other_text` is True for texts that do not represent a number.
    """
    if classify_type(values.type) != "text":
        return _convert_to_floats(values), np.zeros(len(values), bool)
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    text = pc.utf8_trim_whitespace(values.cast(pa.string()))
    is_number = pc.match_substring_regex(text, _NUMBER_PATTERN)
    is_other_text = pc.invert(is_number).fill_null(False).to_numpy(zero_copy_only=False)
    number_text = pc.if_else(is_number, pc.replace_substring_regex(text, r"^\+", ""), None)  # Arrow accepts no plus
    return _convert_to_floats(number_text), is_other_text


def has_leading_zeros(values: pa.Array) -> NDArray[np.bool_]:
    """Return for each of N texts whether it is an integer with leading zeros, such as "007"; False for null."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    is_padded = pc.match_substring_regex(values.cast(pa.string()), _LEADING_ZERO_PATTERN)
    result: NDArray[np.bool_] = is_padded.fill_null(False).to_numpy(zero_copy_only=False)
    return result


def _convert_to_floats(values: pa.Array) -> NDArray[np.float64]:
    """Return N numbers, texts that represent numbers, or times of day (in seconds since midnight) as floats.

    A null becomes NaN.
    """
    seconds_or_numbers = convert_times_of_day(values).cast(pa.float64(), safe=False)
    floats: NDArray[np.float64] = seconds_or_numbers.to_numpy(zero_copy_only=False).astype(np.float64)
    return floats
