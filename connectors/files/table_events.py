"""Convert a table to the asynchronous event stream that its readings could have been, for `deformer-stream produce`.

Each cell with a value becomes one event. Its time is that of the row plus a random delay, so that the readings of
different records interleave as they would if different devices sent them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from connectors.files.lines import read_lines
from connectors.files.message_form import DEFAULT_MESSAGE_FORM, MessageForm
from connectors.files.open_tables import log_bad_rows, log_dialects, make_record_prefixes, open_table_files
from connectors.files.sources import DEFAULT_DEVICE_COLUMN
from deformer_stream.codec.columns import (
    convert_ids,
    convert_times_of_day,
    decode_dictionary,
    is_numeric,
    is_scalar,
    is_text,
    is_time_of_day,
    parse_times,
)
from deformer_stream.codec.number_texts import parse_exact_number
from deformer_stream.codec.timestamps import TimeFormat
from deformer_stream.codec.validation import RejectionError, is_json_number
from deformer_stream.engine.events import NO_TIME
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.settings.base import Layout
from deformer_stream.tables.data_files import DataFile
from deformer_stream.tables.discovery import find_data_files
from deformer_stream.tables.table import (
    DEFAULT_RECORD_COLUMN,
    CellForm,
    Table,
    TableOptions,
    map_read_errors,
)

OutgoingEvent = tuple[bytes, bytes, int]
"""Key (the id of the record or the device in UTF-8, empty for none), message (JSON), and event time in microseconds
since 1970, or `NO_TIME`."""

RowReadings = tuple[int, str, list[tuple[str, Any]], Any]
"""Time of a row in microseconds, id of the record or the device, the readings as pairs of feature and value, and the
value that determines the model, None if there is none."""

MAX_DELAYED = 1_000_000
"""Maximum number of events that are held back because their delayed time has not been reached. If there are more, the
earliest is sent."""

ROWS_PER_BATCH = 4096
"""Number of rows of a table that are read at a time."""

MAX_LINE_BYTES = 64 * 2**20
"""Maximum length of a JSON line; a longer one is sent cut."""


@dataclass(slots=True)
class SkippedRows:
    """The rows of tables that are not sent, because their time or their record id cannot be read.

    Attributes:
        num_rows: Number of these rows.
        first: Which row was the first one, and why it was not sent; "" if there is none.
    """

    num_rows: int = 0
    first: str = ""

    def add(self, description: str) -> None:
        """Count a row.

        Args:
            description: Which row it is, and why it is not sent.
        """
        self.num_rows += 1
        self.first = self.first or description

    def describe(self) -> str:
        """Return the number of rows and the first one: "2 rows were left out, the first one: pumps.csv: row 7, …"."""
        if self.num_rows == 1:
            return f"1 row was left out: {self.first}"
        return f"{self.num_rows} rows were left out, the first one: {self.first}"


@dataclass(frozen=True, slots=True)
class SendOptions:
    """Which readings of tables are sent, and how.

    Attributes:
        shuffle_within: Maximum delay of a reading in seconds.
        seed: The seed of the delays; equal options give equal streams.
        layout: The layout of all tables, "wide" or "long". None chooses it for each table by its column names.
        record_column: The column of record ids of wide tables. In a table without it, records are named as in
            `open_source`.
        time_column: The column of times. None selects the first column with timestamps of a wide table, and the column
            `time` of a long table.
        exclude: Columns of wide tables, or features of long tables, that are not sent.
        features: The only features that are sent, or None for all. A set, if there are many.
        prefix: Text that is put before each record id or device.
        table_options: How tables are read: dialect of CSV files and zone of times.
        device_column: The column of devices of wide tables, if records are time windows. None for `device`, if there is
            such a column; otherwise the name of the file is the device.
        has_windows: Whether records are time windows of devices, which the consumer forms.
        form: The key of messages, and the field that determines their model.
    """

    shuffle_within: float = 0.0
    seed: int = 0
    layout: Layout | None = None
    record_column: str = DEFAULT_RECORD_COLUMN
    time_column: str | None = None
    exclude: Sequence[str] = ()
    features: Collection[str] | None = None
    prefix: str = ""
    table_options: TableOptions = field(default_factory=TableOptions)
    device_column: str | None = None
    has_windows: bool = False
    form: MessageForm = DEFAULT_MESSAGE_FORM

    def is_sent(self, feature: object) -> bool:
        """Return whether readings of a feature are sent. With several models, it also depends on the row (`form`)."""
        sends_all = self.features is None or self.form.features_by_model is not None
        return feature not in self.exclude and (sends_all or feature in (self.features or ()))

    def choose_window_time(self, table: Table) -> str | None:
        """Return the time column of a wide table whose readings are those of devices; None if its rows are records."""
        if not self.has_windows or self.record_column in table.schema.names:
            return None
        # A feature of the model is no column of times.
        return self.time_column or table.choose_time_column(self.features or (), has_windows=True)


DEFAULT_SEND_OPTIONS = SendOptions()
"""All readings are sent, without a delay."""


def iterate_events(
    inputs: Sequence[str | Path],
    options: SendOptions = DEFAULT_SEND_OPTIONS,
    skipped_rows: SkippedRows | None = None,
) -> Iterator[OutgoingEvent]:
    """Return the readings of tables as events of one reading each, in the order of their times.

    The time of a reading is the time of its row plus a random delay, uniform between 0 and `options.shuffle_within`. A
    row without a time gets that of the row before. If a table has no time column, row n of the input is at n seconds
    since 1970. Rows must be sorted by time; the readings of a row that is out of order are sent as soon as it is read.
    Nulls and numbers that are not finite give no event. Rows whose time or record id cannot be read are left out.

    A table is wide (a row is a record) or long (a row is one reading). If a long table has a column of devices instead
    of records, its events name the device, so that the consumer can assign them to time windows (`--window`). The
    events of a wide table name the device if `options.has_windows` is true, unless it has a column of record ids, or
    has no times. JSON lines are passed on unchanged and without a delay.

    Args:
        inputs: Paths of files and folders.
        options: Which readings are sent, and how.
        skipped_rows: Counts the rows that are left out.

    Raises:
        InputError: A file is missing or unreadable, or a table lacks a column. Problems with a table are raised by the
            iterator when it reaches them.
        ConfigError: No table has a column that was excluded.
    """
    shuffle_within, table_options = options.shuffle_within, options.table_options
    if shuffle_within < 0 or not isfinite(shuffle_within):
        raise InputError(f"--shuffle-within {shuffle_within}: the maximum delay must be finite and at least 0 seconds")
    files = find_data_files(inputs)
    prefix_by_file = make_record_prefixes(files)
    chosen_columns = {options.record_column, *(options.features or ())}
    chosen_columns.update(filter(None, (options.time_column, options.device_column, options.form.model_field)))
    kept_columns = table_options.kept_columns | chosen_columns
    table_by_file = open_table_files(files, replace(table_options, kept_columns=kept_columns))
    if table_options.where is not None:  # other files have no rows to send
        files = list(table_by_file)
    if options.exclude:
        _check_excluded(options.exclude, files, table_by_file, options.layout)
    log_dialects(table_by_file.values())
    return _iterate_delayed(
        {path: prefix_by_file[path] for path in files},
        table_by_file,
        options,
        SkippedRows() if skipped_rows is None else skipped_rows,
    )


def _check_excluded(
    exclude: Sequence[str], files: Sequence[DataFile], table_by_file: Mapping[DataFile, Table], layout: Layout | None
) -> None:
    """Check that each excluded column exists in at least one table.

    The check is skipped if an input is JSON lines or a long table (a row is one reading). Their features are known only
    after reading them.

    Args:
        exclude: Names of the excluded columns.
        files: All input files.
        table_by_file: The table of each file that is not JSON lines.
        layout: The layout of all tables, or None to choose it for each table.

    Raises:
        ConfigError: No table has a column of this name.
    """
    tables = table_by_file.values()
    if len(tables) < len(files):  # there are JSON lines
        return
    if any(table.choose_layout(layout, _choose_id_column(table)) == "long" for table in tables):
        return
    columns = {name for table in tables for name in table.schema.names}
    if len(files) == 1:
        failure = f"{files[0]} has no such column"
    else:
        failure = f"none of the {len(files)} input files has such a column"
    for name in exclude:
        if name not in columns:
            raise ConfigError(f"--exclude {name}: {failure}; check the name")


def _choose_id_column(table: Table) -> str:
    """Return the name of the column that says to which record or device a reading of a long table belongs.

    It is "device" if the table has this column and no column "record", and "record" otherwise.
    """
    has_only_device = "device" in table.schema.names and "record" not in table.schema.names
    return "device" if has_only_device else "record"


def _iterate_delayed(
    prefix_by_file: Mapping[DataFile, str | None],
    table_by_file: Mapping[DataFile, Table],
    options: SendOptions,
    skipped_rows: SkippedRows,
) -> Iterator[OutgoingEvent]:
    """Yield the readings of all files as events in the order of their times, which include a random delay.

    An event is a triple of its key (record id or device), its message (JSON) and its time in microseconds since 1970.
    Rows must be sorted by time. Events are kept in a heap until a row with a later time is read, or the heap is full.
    Lines of JSON lines files are not delayed.

    Args:
        prefix_by_file: The files in the order in which they are read, with the texts that distinguish their records.
        table_by_file: The table of each file that is not JSON lines.
        options: Which readings are sent, and how.
        skipped_rows: Counts the rows that are left out.
    """
    # Times are written in the same unit as in the tables and in JSON lines.
    time_format = options.table_options.time_format
    micros_per_unit = 1e6 / time_format.units_per_second
    max_delay, rng = round(options.shuffle_within * 1e6), np.random.default_rng(options.seed)
    # A heap of delayed events: time, number of the event (which keeps the order of equal times), key and document.
    delayed: list[tuple[int, int, bytes, dict[str, Any]]] = []
    num_events = 0
    default_times = itertools.count(0, 1_000_000)  # one second per row, for tables without times
    for path, record_prefix in prefix_by_file.items():
        table = table_by_file.get(path)
        if table is None:
            # Lines are not delayed, so the events before them are sent first.
            yield from (_encode_event(*heapq.heappop(delayed)) for _ in range(len(delayed)))
            yield from _iterate_json_lines(path, time_format, options.form)
            continue
        id_field = _choose_id_column(table)
        if table.choose_layout(options.layout, id_field) == "long":
            rows = _iterate_long_rows(table, id_field, options, skipped_rows, default_times)
        else:
            id_field = "record" if options.choose_window_time(table) is None else "device"
            rows = _iterate_wide_rows(table, record_prefix, options, skipped_rows, default_times)
        for row_time, row_id, row_readings, model in _map_row_errors(path, rows):
            # Rows are sorted by time, so no later row has an event before `row_time`. A full heap is emptied earlier,
            # to bound the memory.
            while delayed and (delayed[0][0] <= row_time or len(delayed) > MAX_DELAYED):
                yield _encode_event(*heapq.heappop(delayed))
            owner = options.prefix + row_id
            key = options.form.make_key(id_field, owner)
            owner_fields = {id_field: owner, **options.form.make_model_fields(id_field, model)}
            model = owner if options.form.model_field == id_field else model
            readings = options.form.select_readings(model, row_readings)
            num_readings = len(readings)
            delays = rng.integers(0, max_delay + 1, num_readings).tolist() if max_delay else [0] * num_readings
            for (feature, value), delay in zip(readings, delays, strict=True):
                time = row_time + delay
                document = {**owner_fields, "feature": feature, "value": value, "time": time / micros_per_unit}
                heapq.heappush(delayed, (time, num_events, key, document))
                num_events += 1
    while delayed:
        yield _encode_event(*heapq.heappop(delayed))
    log_bad_rows(table_by_file.values())


def _map_row_errors(path: DataFile, rows: Iterator[RowReadings]) -> Iterator[RowReadings]:
    """Yield the same rows; if reading them fails, raise `InputError` with the name of the file.

    Args:
        path: The file.
        rows: An iterator that reads the rows of the file.
    """
    with map_read_errors(str(path)):
        yield from rows


def _iterate_wide_rows(
    table: Table,
    id_prefix: str | None,
    options: SendOptions,
    skipped_rows: SkippedRows,
    default_times: Iterator[int],
) -> Iterator[RowReadings]:
    """Yield the time, the record id or the device, the readings and the model of each row of a wide table.

    A row is a record, or it holds readings of a device that the consumer assigns to a time window.

    Args:
        table: The table.
        id_prefix: If the table has no record ids, they are made of this text and the row number ("prefix:0"). None
            makes them of the row number alone.
        options: Which readings are sent.
        skipped_rows: Counts the rows that are left out.
        default_times: An iterator over the times of rows in a table without a time column, in microseconds.

    Raises:
        InputError: The table lacks a column or has nothing to send.
    """
    columns, time_column = table.schema.names, options.time_column
    window_time = options.choose_window_time(table)
    if window_time is None:
        table.check_columns(time_column, options.record_column)
        id_column = options.record_column if options.record_column in columns else None
    else:
        time_column = window_time
        table.check_columns(time_column, device=options.device_column)
        table.check_time_zone(time_column)
        device_column = options.device_column or DEFAULT_DEVICE_COLUMN
        id_column = device_column if device_column in columns else None
    type_by_column = dict(zip(columns, table.schema.types, strict=True))
    time_column = time_column or table.choose_time_column()
    model_column = options.form.find_model_column(table, "record" if window_time is None else "device")
    feature_columns = [
        name
        for name in columns
        if name not in (id_column, time_column)
        and (name != model_column or name in (options.features or ()))
        and options.is_sent(name)
        and (is_scalar(type_by_column[name]) or is_time_of_day(type_by_column[name]))
    ]
    if not feature_columns:
        raise InputError(
            f"{table.name}: there is no column to send as a feature (the columns are {table.format_column_names()}); "
            "check --exclude and --model"
        )
    other_columns = (name for name in (id_column, time_column, model_column) if name is not None)
    read_columns = list(dict.fromkeys((*feature_columns, *other_columns)))
    forms = _choose_forms(id_column, time_column, model_column)
    row_filter = _RowFilter(table, id_column, time_column, default_times, skipped_rows)
    for batch, rows in table.iterate_numbered(read_columns, ROWS_PER_BATCH, forms):
        if id_column is not None:
            ids = _get_ids(table, batch, id_column)
        elif window_time is not None:
            ids = [table.stem] * batch.num_rows
        else:
            ids = [str(row) if id_prefix is None else f"{id_prefix}:{row}" for row in rows.tolist()]
        models = _get_models(batch, model_column)
        cells_by_column = [_list_cells(table, batch.column(name), name) for name in feature_columns]
        for i, time, row_id in row_filter.iterate(batch, rows, ids):
            readings = [
                (name, cells[i])
                for name, cells in zip(feature_columns, cells_by_column, strict=True)
                if cells[i] is not None
            ]
            yield time, row_id, readings, models[i]


def _iterate_long_rows(
    table: Table,
    id_column: str,
    options: SendOptions,
    skipped_rows: SkippedRows,
    default_times: Iterator[int],
) -> Iterator[RowReadings]:
    """Yield the time, the record id or device, the reading and the model of each row of a table with a reading per row.

    Rows without a value are skipped.

    Args:
        table: The table.
        id_column: The column with the record or the device of a reading.
        options: Which readings are sent.
        skipped_rows: Counts the rows that are left out.
        default_times: An iterator over the times of rows in a table without a time column, in microseconds.

    Raises:
        InputError: The table lacks a column.
    """
    columns, time_column = table.schema.names, options.time_column
    for name in (id_column, "feature", "value"):
        if name not in columns:
            raise InputError(
                f"{table.name}: there is no column {name!r}, which a long table (each row is one reading) needs; "
                f"rename a column to {name!r}, or use --layout wide if each row is a record"
            )
    table.check_columns(time_column)
    time_column = time_column or ("time" if "time" in columns else None)
    model_column = options.form.find_model_column(table, id_column)
    known_columns = (id_column, "feature", "value", "label", time_column, model_column)
    read_columns = list(dict.fromkeys(name for name in known_columns if name is not None and name in columns))
    forms = _choose_forms(id_column, time_column, model_column) | {"value": "mixed"}
    if "label" in read_columns:
        forms["label"] = "text"
    if time_column is not None:
        table.check_time_zone(time_column)
    row_filter = _RowFilter(table, id_column, time_column, default_times, skipped_rows)
    for batch, rows in table.iterate_numbered(read_columns, ROWS_PER_BATCH, forms):
        models = _get_models(batch, model_column)
        cells = convert_times_of_day(batch.column("value")).to_pylist()
        values = [_convert_number_text(_to_json_value(cell)) for cell in cells]
        if "label" in read_columns:  # the reading of a discrete feature is in this column
            labels = [_to_json_value(label) for label in batch.column("label").to_pylist()]
            values = [value if label is None else label for value, label in zip(values, labels, strict=True)]
        feature_names = batch.column("feature").to_pylist()
        for i, time, row_id in row_filter.iterate(batch, rows, _get_ids(table, batch, id_column)):
            if values[i] is not None and options.is_sent(feature_names[i]):
                yield time, row_id, [(feature_names[i], values[i])], models[i]


class _RowFilter:
    """Selects the rows of a table that can be sent, which have an id and no invalid time.

    Args:
        table: The table.
        id_column: The column of record ids or devices. None if the table has none, so that all rows have an id.
        time_column: The column of times, or None if the table has none.
        default_times: An iterator over the times of rows in a table without a time column, in microseconds.
        skipped_rows: Counts the rows that are left out.
    """

    def __init__(
        self,
        table: Table,
        id_column: str | None,
        time_column: str | None,
        default_times: Iterator[int],
        skipped_rows: SkippedRows,
    ) -> None:
        self._table, self._id_column, self._time_column = table, id_column, time_column
        self._default_times, self._skipped_rows = default_times, skipped_rows
        self._last_time = 0  # of the row before, in microseconds since 1970

    def iterate(
        self, batch: pa.RecordBatch, row_numbers: NDArray[np.int64], ids: Sequence[str | None]
    ) -> Iterator[tuple[int, int, str]]:
        """Yield the index in the batch, the time in microseconds since 1970, and the id of each row that can be sent.

        A row without a time has the time of the row before.

        Args:
            batch: The next N rows of the table.
            row_numbers: (N,) Numbers of the rows, for messages.
            ids: N record ids or devices, None for a null.
        """
        times, error_by_row = self._get_times(batch)
        for i, row_id in enumerate(ids):
            fault = None
            if row_id is None:
                fault = f"column {self._id_column!r}, has no id of a record or device"
            elif i in error_by_row:
                fault = f"column {self._time_column!r}, holds no valid time ({error_by_row[i].detail})"
            if row_id is None or fault is not None:
                self._skipped_rows.add(f"{self._table.name}: row {row_numbers[i]}, {fault}")
                continue
            if times[i] != NO_TIME:
                self._last_time = times[i]
            yield i, self._last_time, row_id

    def _get_times(self, batch: pa.RecordBatch) -> tuple[list[int], dict[int, RejectionError]]:
        """Return the time of each row in microseconds since 1970, and by row the errors of times that cannot be read.

        The time is `NO_TIME` for a null and for a time that cannot be read.
        """
        if self._time_column is None:
            return list(itertools.islice(self._default_times, batch.num_rows)), {}
        name = f"{self._table.name}: column {self._time_column!r}"
        times, error_by_row = parse_times(batch.column(self._time_column), name)
        return times.tolist(), error_by_row


def _get_ids(table: Table, batch: pa.RecordBatch, column: str) -> list[str | None]:
    """Return the record id or the device of each row as text, None for a null.

    Args:
        table: The table, for error messages.
        batch: Rows of the table.
        column: The column of record ids or devices.
    """
    ids = convert_ids(batch.column(column), f"{table.name}: column {column!r}")
    return [None if row_id is None else str(row_id) for row_id in ids.to_pylist()]


def _get_models(batch: pa.RecordBatch, column: str | None) -> list[Any]:
    """Return the value of each row that determines its model, None for a null, or if there is no such column."""
    if column is None:
        return [None] * batch.num_rows
    return [_to_json_value(value) for value in decode_dictionary(batch.column(column)).to_pylist()]


def _choose_forms(
    id_column: str | None, time_column: str | None, model_column: str | None = None
) -> dict[str, CellForm]:
    """Return what the cells of the columns of ids, times and models are to be, if the table holds them as text.

    Args:
        id_column: The column of record ids or devices, or None if there is none. The id 007 must not become 7.
        time_column: The column of times, or None if there is none.
        model_column: The column that determines the model, or None if there is none. It is read as ids are.
    """
    forms: dict[str, CellForm] = {name: "text" for name in (id_column, model_column) if name is not None}
    return forms if time_column is None else forms | {time_column: "time"}


def _list_cells(table: Table, column: pa.Array, name: str) -> list[Any]:
    """Return the cells of a column of a wide table as values that JSON can express, None for null, NaN or infinite.

    Args:
        table: The table.
        column: The cells.
        name: Name of the column.
    """
    cells = [_to_json_value(value) for value in convert_times_of_day(column).to_pylist()]
    # In a column of numbers with a bad cell, the numbers of the batch are text as well.
    holds_numbers = is_numeric(table.schema.field(name).type) and is_text(column.type)
    return [_convert_number_text(cell) for cell in cells] if holds_numbers else cells


def _to_json_value(value: Any) -> Any:
    """Return a cell of a table as a value that JSON can express, or None if it is null, NaN or infinite."""
    if value is None or isinstance(value, bool | int | str):
        return value
    number = float(value)
    return number if isfinite(number) else None


def _convert_number_text(value: Any) -> Any:
    """Return the number that a text represents, such as "2.5"; return any other value unchanged.

    A column that holds numbers and labels is read as text, so its numbers must be converted back.
    """
    if not isinstance(value, str):
        return value
    number = parse_exact_number(value)
    if isinstance(number, int):  # one that float64 would round; the encoder of JSON has integers of 64 bits
        return number if -(2**63) <= number < 2**64 else value
    return value if number is None or not isfinite(number) else number


def _encode_event(time: int, number: int, key: bytes, document: dict[str, Any]) -> OutgoingEvent:
    """Return a delayed event as a triple of its key, its message (JSON) and its time in microseconds since 1970.

    Args:
        time: The event time, delay included.
        number: Not used. It is the second element of an entry in the heap of delayed events, whose elements are the
            arguments of this function.
        key: The message key.
        document: The content of the message.
    """
    return key, orjson.dumps(document), time


def _parse_event_time(document: Any, time_format: TimeFormat) -> int:
    """Return the time of a JSON event in microseconds since 1970, or `NO_TIME` if it has no valid time.

    Args:
        document: The decoded JSON, usually an object with the field `time`.
        time_format: How the time is written.
    """
    time = document.get("time") if isinstance(document, dict) else None
    if not isinstance(time, str) and not is_json_number(time):
        return NO_TIME
    try:
        return time_format.parse(time)
    except RejectionError:
        return NO_TIME


def _iterate_json_lines(path: DataFile, time_format: TimeFormat, form: MessageForm) -> Iterator[OutgoingEvent]:
    """Yield each line of a JSON lines file as a triple of its key, the unchanged line and its time.

    A line without a valid record id or device has an empty key. The time is in microseconds since 1970, or `NO_TIME`.
    """
    for block in read_lines(path, MAX_LINE_BYTES):
        for line in block:
            if line and not line.isspace():
                try:
                    document = orjson.loads(line)
                except orjson.JSONDecodeError:
                    document = None
                yield form.make_key_of_line(document), line, _parse_event_time(document, time_format)
