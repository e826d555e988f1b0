"""Event sources that read files or standard input in bounded memory.

The sources end, unlike a Kafka topic. They keep no offsets: a commit does nothing, and each run starts at the first
event.
"""

from __future__ import annotations

import os
import selectors
import sys
import time as clock
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from connectors.files.file_threads import Prefetcher
from connectors.files.lines import BLOCK_BYTES, LineSplitter, read_lines
from connectors.files.open_tables import log_bad_rows, log_dialects, make_record_prefixes, open_table_files
from connectors.files.reorder import reorder_lines, reorder_rows
from deformer_stream import log
from deformer_stream.codec import ROW_NUMBER_COLUMN, FieldNames, Order, WindowAssigner
from deformer_stream.codec.columns import convert_ids, to_python_values
from deformer_stream.codec.payloads import LongRows, Messages, Payload, UnreadablePayload, WideRows
from deformer_stream.codec.tables import RECORD_LABEL_COLUMN
from deformer_stream.engine.events import NO_TIME, RejectionReason
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model.schema import Feature, Schema
from deformer_stream.runtime.ports import PollResult, SourceCallbacks
from deformer_stream.settings.base import Layout
from deformer_stream.tables.csv_rows import BadRow
from deformer_stream.tables.data_files import DataFile, RemoteFile
from deformer_stream.tables.discovery import JSON_LINES, find_data_files, has_ending
from deformer_stream.tables.labels import encode_labels
from deformer_stream.tables.table import (
    DEFAULT_RECORD_COLUMN,
    CellForm,
    Table,
    TableOptions,
    join_names,
)
from deformer_stream.tables.unpivot import unpivot_rows

STANDARD_INPUT = "-"
"""The name of standard input among the inputs of a command."""

MAX_PENDING_BAD_ROWS = 10_000
"""Largest number of consecutive malformed rows of a CSV file of which each becomes a message of its own."""

DEFAULT_DEVICE_COLUMN = "device"
"""The column of devices in wide tables unless another one is chosen. A table need not have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How input files are read.

    Attributes:
        layout: The layout of all tables, "wide" or "long". None chooses it for each table by its column names.
        order: The order of the readings within a record: "arrival" for that of the input, "schema" for that of the
            features in the model, or "random". The codec (decoder of events) must get the same value, because it orders
            the readings of wide tables. For long tables and JSON lines, an order other than "arrival" needs complete
            records, so all of these files are read into memory first.
        seed: The seed of the order "random"; the codec must get the same value.
        field_names: Names of the fields of JSON events and of the columns of long tables.
        record_column: The column of record ids of wide tables. In a table without it, the number of the row is the
            record id ("0", "1", …). If there are several files, it is the name of the file and the number ("file:0").
            Unless it has the default name, the column must exist, and is no feature even if the model has one of its
            name.
        time_column: The time column of wide tables. None selects the first column with timestamps.
        device_column: The column of devices of wide tables, if records are time windows. In a table without it, the
            name of the file is the device.
        table_options: How tables are read: dialect of CSV files and zone of times.
        batch_events: Approximate number of events that one poll returns.
        max_message_bytes: Maximum length of a line; the codec rejects a longer one as too large.
        window_assigner: If records are time windows of a device's readings, it assigns readings to windows. It needs
            the order "arrival" for long tables and JSON lines. None if records are not time windows.
        model_column: If there are several models, the column of tables that determines the model of a row.
        label_column: The column of tables with the label of the record of a row, which becomes the column
            `codec.tables.RECORD_LABEL_COLUMN` of the rows. None if labels are not read.
    """

    layout: Layout | None = None
    order: Order = "arrival"
    seed: int = 0
    field_names: FieldNames = field(default_factory=FieldNames)
    record_column: str = DEFAULT_RECORD_COLUMN
    time_column: str | None = None
    device_column: str = DEFAULT_DEVICE_COLUMN
    table_options: TableOptions = field(default_factory=TableOptions)
    batch_events: int = 8192
    max_message_bytes: int = 1_048_576
    window_assigner: WindowAssigner | None = None
    model_column: str | None = None
    label_column: str | None = None


DEFAULT_READ_OPTIONS = ReadOptions()
"""How input files are read if no option is set."""


def open_source(
    inputs: Sequence[str | Path], schemas: Sequence[Schema], options: ReadOptions = DEFAULT_READ_OPTIONS
) -> FileSource | StandardInput:
    """Return a source of the events in Parquet, CSV and JSON lines files, or on standard input.

    The files are read one after the other. All tables are opened and checked before the function returns. A table is
    wide (a row is a record, a column is a feature) or long (a row is one reading). If records are time windows and a
    wide table has a column of times, each cell is a reading of a device. The device is that of the row, or that of the
    file.

    Args:
        inputs: Paths of files and folders, patterns, or "-" alone for JSON lines on standard input.
        schemas: The features of each model.
        options: How the files are read.

    Raises:
        InputError: A file is missing or unreadable, or its columns do not fit the model or the options.
        ConfigError: The options contradict each other.
    """
    if STANDARD_INPUT in map(str, inputs):
        if len(inputs) > 1:
            raise ConfigError(
                "standard input (-) cannot be combined with other inputs; write it to a file first, and name the file"
            )
        if options.order != "arrival":
            raise ConfigError(
                f"--order {options.order} cannot be used with standard input (-), because reordering needs the whole "
                "input; write it to a file first, and name the file"
            )
        return StandardInput(max_message_bytes=options.max_message_bytes, batch_events=options.batch_events)
    files = open_input_files(inputs, schemas, options)
    payloads = files.iterate() if options.order == "arrival" else files.iterate_reordered()
    return FileSource(payloads, files.num_rows, files.ignored_columns, files.missing_columns, files.has_labels)


def open_input_files(
    inputs: Sequence[str | Path],
    schemas: Sequence[Schema],
    options: ReadOptions = DEFAULT_READ_OPTIONS,
    choose: Callable[[Sequence[DataFile]], Sequence[DataFile]] | None = None,
) -> InputFiles:
    """Return the input files of a command, opened and checked.

    Args:
        inputs: As for `open_source`.
        schemas: As for `open_source`.
        options: As for `open_source`.
        choose: Returns those of the files to open; None for all of them.

    Raises:
        InputError: A file is missing or unreadable, or its columns do not fit the model or the options.
        ConfigError: The options contradict each other.
    """
    reading = _Reading.from_options(options, tuple(schemas))
    files: Sequence[DataFile] = find_data_files(inputs)
    files = files if choose is None else choose(files)
    prefix_by_file = make_record_prefixes(files)
    table_by_file = _open_table_files(files, reading)
    contents: list[_Content | None] = []
    for path in files:
        table = table_by_file.get(path)
        if table is None:
            contents.append(path if has_ending(path, JSON_LINES) else None)  # None: no row has the chosen condition
            continue
        id_column, feature_column, value_column = reading.list_required_columns(table)[:3]
        if table.choose_layout(options.layout, id_column, feature_column, value_column) == "long":
            contents.append(_LongTable.check(table, reading))
        elif window_time := reading.choose_window_time(table):
            contents.append(_WindowedTable.check(table, window_time, reading))
        else:
            contents.append(_WideTable.check(table, prefix_by_file[path], reading))
    opened = InputFiles(tuple(files), tuple(contents), reading)
    if options.order != "arrival" and opened.needs_reordering:
        if len(reading.schemas) > 1:
            raise ConfigError(
                f"--order {options.order} puts the readings of one model in another order, but there are several "
                "models: use --order arrival"
            )
        if options.window_assigner is not None:
            raise ConfigError(
                f"--order {options.order} cannot be used if records are time windows, because readings are assigned to "
                "windows in order of arrival; use --order arrival"
            )
    log_dialects(table_by_file.values())
    if any(isinstance(content, _WideTable) and content.ids_are_feature for content in contents):
        log.get_logger("files").info(
            "record_column_is_no_feature",
            column=options.record_column,
            message=f"--record-column {options.record_column} is also a feature of the model: its cells are the record "
            "ids, and records are scored without this feature",
        )
    return opened


def _open_table_files(files: Sequence[DataFile], options: _Reading) -> dict[DataFile, Table]:
    """Open the tables among the input files.

    Args:
        files: All input files.
        options: How the files are read.

    Returns:
        The table of each file that is not JSON lines.

    Raises:
        InputError: A table cannot be read.
    """
    where = options.table_options.where
    tested_columns = () if where is None else where.columns
    kept_columns = options.table_options.kept_columns | options.list_chosen_columns() | frozenset(tested_columns)
    return open_table_files(files, replace(options.table_options, kept_columns=kept_columns))


@dataclass(frozen=True, slots=True)
class InputFiles:
    """The input files of a command, opened and checked. Each file can be read once, alone or with others.

    Attributes:
        files: The files, in the order in which they are read.
    """

    files: tuple[DataFile, ...]
    _contents: tuple[_Content | None, ...]  # for each file, None if no row of it has the chosen condition
    _options: _Reading

    @property
    def num_rows(self) -> int | None:
        """Total number of rows; None if it is not known in advance."""
        counts = [content.num_rows if isinstance(content, _OPENED_TABLES) else None for content in self._contents]
        return None if None in counts else sum(count for count in counts if count is not None)

    @property
    def ignored_columns(self) -> tuple[str, ...]:
        """Columns of the tables that are not read, because they are not features of the model."""
        return tuple(dict.fromkeys(name for table in self._tables for name in table.ignored_columns))

    @property
    def has_labels(self) -> bool:
        """Whether a table has labels of records that are read."""
        return any(table.label_columns for table in self._tables)

    @property
    def missing_columns(self) -> tuple[str, ...]:
        """Features of the model for which no table has a column; empty if other contents could have them."""
        tables = [content for content in self._contents if content is not None]
        if not tables or len(self._options.schemas) > 1:
            return ()
        columns: set[str] = set()
        for table in tables:
            if not isinstance(table, _WideTable | _WindowedTable):
                return ()
            columns.update(table.feature_columns)
            if isinstance(table, _WideTable) and table.ids_are_feature:  # it was logged
                columns.add(table.record_column or "")
        has_windows = isinstance(tables[0], _WindowedTable)
        names = self._options.features.by_sensor if has_windows else self._options.features.by_name
        return tuple(name for name in names if name not in columns)

    @property
    def needs_reordering(self) -> bool:
        """Whether the readings of a record may be anywhere in the files, so that another order needs all of them."""
        return any(content is not None and not isinstance(content, _WideTable) for content in self._contents)

    @property
    def _tables(self) -> list[_OpenedTable]:
        return [content for content in self._contents if isinstance(content, _OPENED_TABLES)]

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Payload]:
        """Yield the rows and lines of files in batches, in order. At the end, malformed rows are logged.

        Args:
            start: Index of the first file.
            stop: Index after that of the last file; None for all further files.
        """
        contents = self._contents[start:stop]
        for content in contents:
            if isinstance(content, _OPENED_TABLES):
                yield from _insert_bad_rows(content.iterate_rows(), [content.bad_rows])
            elif content is not None:
                yield from _iterate_messages(content, self._options)
        log_bad_rows([content.table for content in contents if isinstance(content, _OPENED_TABLES)])

    def iterate_reordered(self) -> Iterator[Payload]:
        """Yield the contents of all files with the readings of each record in another order than that of arrival.

        All files but wide tables are read into memory first. The order of the readings of a row of a wide table is left
        to the codec.
        """
        wide_tables = [content for content in self._contents if isinstance(content, _WideTable)]
        long_tables = [content for content in self._contents if isinstance(content, _LongTable | _WindowedTable)]
        line_files = [content for content in self._contents if isinstance(content, Path | RemoteFile)]
        yield from chain.from_iterable(_reorder_payloads(wide_tables, long_tables, line_files, self._options))
        log_bad_rows([table.table for table in self._tables])


class FileSource:
    """A source of the rows and lines of files, which a background thread reads ahead.

    Args:
        payloads: The rows and lines of the files in batches; each poll returns one batch.
        num_rows: Total number of rows, for progress reports. None if it is not known in advance.
        ignored_columns: Columns of the tables that are not read, because they are not features of the model.
        missing_columns: Features of the model for which no table has a column.
        has_labels: Whether a table has labels of records that are read.
    """

    def __init__(
        self,
        payloads: Iterator[Payload],
        num_rows: int | None,
        ignored_columns: tuple[str, ...],
        missing_columns: tuple[str, ...] = (),
        has_labels: bool = False,
    ) -> None:
        self.num_rows, self.has_labels = num_rows, has_labels
        self.ignored_columns, self.missing_columns = ignored_columns, missing_columns
        self._payloads = Prefetcher(payloads)
        self._is_exhausted = False

    def set_callbacks(self, callbacks: SourceCallbacks) -> None:
        """Do nothing: no call waits for long."""

    @property
    def is_exhausted(self) -> bool:
        """Whether all rows and lines were returned. It becomes true with the first poll that returns no data."""
        return self._is_exhausted

    def poll(self, timeout: float) -> PollResult:
        """Return the next rows or lines, or no data if all were returned.

        Args:
            timeout: Not used, because data of a file need not be waited for.
        """
        data = None if self._is_exhausted else next(self._payloads, None)
        self._is_exhausted = data is None
        return PollResult(data)

    def commit(self) -> None:
        """Do nothing, because each run reads its files from the beginning."""

    def close(self) -> None:
        """Stop reading; further polls return no data."""
        self._is_exhausted = True
        self._payloads.close()


class StandardInput:
    """A source of JSON lines that arrive on standard input or on another file descriptor, until its end.

    Args:
        descriptor: The file descriptor to read, by default that of standard input.
        max_message_bytes: Maximum length of a line; a longer one is rejected by the codec as too large.
        batch_events: Maximum number of lines that one poll returns.

    Attributes:
        num_rows: Always None, because the number of lines is not known in advance.
        ignored_columns: Always empty, because lines have no columns.
        missing_columns: Always empty.
        has_labels: Always False.
    """

    num_rows: int | None = None
    ignored_columns: tuple[str, ...] = ()
    missing_columns: tuple[str, ...] = ()
    has_labels: bool = False

    def __init__(
        self, descriptor: int | None = None, *, max_message_bytes: int = 1_048_576, batch_events: int = 8192
    ) -> None:
        self._descriptor = sys.stdin.fileno() if descriptor is None else descriptor
        self._splitter = LineSplitter(max_message_bytes)
        self._batch_events = batch_events
        self._pending: list[tuple[int, bytes]] = []  # lines that were read but not yet returned, with their numbers
        self._num_lines = 0  # lines read so far, to number the next ones
        self._is_at_end = False
        # poll(2), unlike epoll, accepts a regular file, as in `deformer-stream replay - < events.jsonl`.
        self._selector = selectors.PollSelector()
        self._selector.register(self._descriptor, selectors.EVENT_READ)

    def set_callbacks(self, callbacks: SourceCallbacks) -> None:
        """Do nothing: no call waits for long."""

    @property
    def is_exhausted(self) -> bool:
        """Whether the input has ended and all of its lines were returned."""
        return self._is_at_end and not self._pending

    def poll(self, timeout: float) -> PollResult:
        """Return the lines that have arrived, at most `batch_events` of them; no data if there are none.

        Args:
            timeout: Maximum number of seconds to wait for the first line. Further lines are not waited for.
        """
        deadline = clock.monotonic() + timeout
        while not self._is_at_end and len(self._pending) < self._batch_events:
            seconds_left = 0.0 if self._pending else max(0.0, deadline - clock.monotonic())
            has_input = self._selector.select(seconds_left)
            if not has_input:
                break
            block = os.read(self._descriptor, BLOCK_BYTES)
            self._is_at_end = not block  # an empty block means the end of the input
            new_lines = self._splitter.finish() if self._is_at_end else self._splitter.feed(block)
            self._pending += _number_lines(new_lines, self._num_lines)
            self._num_lines += len(new_lines)
        numbered_lines, self._pending = self._pending[: self._batch_events], self._pending[self._batch_events :]
        return PollResult(_make_messages(STANDARD_INPUT, numbered_lines) if numbered_lines else None)

    def commit(self) -> None:
        """Do nothing, because lines that were read from a pipe cannot be read again."""

    def close(self) -> None:
        """Stop reading and drop the lines that were not yet returned. The file descriptor stays open."""
        self._selector.close()
        self._is_at_end, self._pending = True, []


@dataclass(frozen=True, slots=True)
class _Features:
    """The features of one or several models, by which columns of tables are recognised.

    Attributes:
        by_name: The features by name. If models differ in the kind of a feature, it is the discrete one, whose cells
            are read as text.
        by_sensor: The first feature of each sensor, likewise.
        is_irregular: Whether a model is for irregular readings.
    """

    by_name: dict[str, Feature]
    by_sensor: dict[str, Feature]
    is_irregular: bool

    @staticmethod
    def from_schemas(schemas: Sequence[Schema]) -> _Features:
        """Return the features of the models with these schemas."""
        by_name: dict[str, Feature] = {}
        by_sensor: dict[str, Feature] = {}
        for schema in schemas:
            sensors = {name: schema.features[code] for name, (code, _) in schema.slot_layout_by_sensor.items()}
            for known, found in ((by_name, {f.name: f for f in schema.features}), (by_sensor, sensors)):
                for name, feature in found.items():
                    if name not in known or feature.kind == "discrete":
                        known[name] = feature
        return _Features(by_name, by_sensor, any(schema.reading_times is not None for schema in schemas))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading(ReadOptions):
    """How input files are read, together with the features of the models.

    Attributes:
        schemas: The schema of each model.
        features: The features of all models.
    """

    schemas: tuple[Schema, ...]
    features: _Features

    @staticmethod
    def from_options(options: ReadOptions, schemas: tuple[Schema, ...]) -> _Reading:
        """Return the options for the models with these schemas."""
        values = {attribute.name: getattr(options, attribute.name) for attribute in fields(options)}
        return _Reading(**values, schemas=schemas, features=_Features.from_schemas(schemas))

    def list_chosen_columns(self) -> frozenset[str]:
        """Return the columns that the model or an option names."""
        names = self.field_names
        chosen = {names.record, names.device, names.feature, names.value, names.label, names.time}
        chosen |= {self.record_column, self.device_column, *self.features.by_name, *self.features.by_sensor}
        chosen.update(name for name in (self.model_column, self.label_column, self.time_column) if name is not None)
        return frozenset(chosen)

    def choose_window_time(self, table: Table) -> str | None:
        """Return the time column of a wide table whose cells are readings of devices, which windows make records of.

        None if the rows of the table are records: if records are no windows, a column names the record, or there are no
        times.

        Args:
            table: The table.
        """
        if self.window_assigner is None or self.record_column in table.schema.names:
            return None
        return self.time_column or table.choose_time_column(tuple(self.features.by_sensor), has_windows=True)

    def list_required_columns(self, table: Table) -> tuple[str, ...]:
        """Return the columns that a table must have to be a long table (a row is one reading).

        Args:
            table: The table.

        Returns:
            The names of the column that identifies the record or the device, of the columns of features and values, and
            possibly of the time column.
        """
        names = self.choose_field_names(table)
        return names.required_columns(table.schema.names, self.window_assigner is not None)

    def choose_field_names(self, table: Table) -> FieldNames:
        """Return the names of the columns of a reading, if a table has one reading per row.

        They are those of the options, or the default names if only these columns exist. So a table that `init` has made
        of messages is read with the options for the messages.
        """
        names, defaults, columns = self.field_names, FieldNames(), set(table.schema.names)
        has_default_names = columns >= {defaults.feature, defaults.value}
        return defaults if has_default_names and not columns >= {names.feature, names.value} else names

    def rename_fields(self, names: FieldNames) -> dict[str, str]:
        """Return by name of a column the name that the options give to this field.

        Args:
            names: The names of the columns of a table.
        """
        return {getattr(names, field.name): getattr(self.field_names, field.name) for field in fields(FieldNames)}

    def get_sensor(self, name: str) -> Feature:
        """Return the first feature of a sensor; all of its features have the same kind and labels."""
        return self.features.by_sensor[name]

    def find_model_column(self, table: Table, others: Collection[str | None]) -> list[str]:
        """Return the column that determines the model, as a list of names that are read in addition.

        The list is empty if there is one model, or if the column is read anyway.

        Args:
            table: The table.
            others: The columns that are read anyway, and names that are made for each row, such as the record id.

        Raises:
            InputError: The table does not have the column.
        """
        if self.model_column is None or self.model_column in others:
            return []
        if self.model_column not in table.schema.names:
            raise InputError(
                f"{table.name}: there is no column {self.model_column!r}, which determines the model of a row; choose "
                f"one of the columns {table.format_column_names()} with --model-by"
            )
        return [self.model_column]

    def find_label_column(self, table: Table, reading_columns: Collection[str] = ()) -> list[str]:
        """Return the column with the labels of records, as a list of names; empty if labels are not read.

        Args:
            table: The table. It may lack the column.
            reading_columns: Columns that are parts of a reading, which label no record.
        """
        name = self.label_column
        return [name] if name is not None and name in table.schema.names and name not in reading_columns else []


def _format_record_labels(column: pa.Array) -> pa.Array:
    """Return labels of records, which have any type, as an Arrow array of text."""
    indexes, labels = encode_labels(column)
    return pa.array(labels, pa.string()).take(pa.array(indexes, mask=indexes < 0))


@dataclass(frozen=True, slots=True)
class _WideTable:
    """A table in which a row is a record and a column is a feature. Its columns were checked.

    Attributes:
        table: The file.
        id_prefix: If the table has no record ids, they are made of this text and the row number ("prefix:0"). None
            makes them of the row number alone.
        feature_columns: Names of the columns that are features of the model, in the order of the file.
        record_column: Name of the column of record ids, or None if there is none.
        time_column: Name of the column of times, or None if there is none.
        model_columns: Name of the column that determines the model, if it is none of these columns; else empty.
        label_columns: Name of the column with the label of the record; empty if there is none.
        ignored_columns: Names of all other columns.
        options: How to read the table.
        bad_rows: The rows of the file that are malformed.
    """

    table: Table
    id_prefix: str | None
    feature_columns: list[str]
    record_column: str | None
    time_column: str | None
    model_columns: list[str]
    label_columns: list[str]
    ignored_columns: list[str]
    options: _Reading
    bad_rows: _BadRows

    @staticmethod
    def check(table: Table, id_prefix: str | None, options: _Reading) -> _WideTable:
        """Return a `_WideTable` for a table, after choosing the columns of features, of record ids and of times.

        Args:
            table: The table.
            id_prefix: Text before the row numbers, of which record ids are made if there is no record column. None
                makes them of the row number alone.
            options: How to read the table.

        Raises:
            InputError: No column is a feature of the model, or a column that the user chose does not exist. Or the
                readings of the model are irregular, and the table has no record ids or no times.
        """
        columns, feature_by_name = table.schema.names, options.features.by_name
        # A chosen column holds record ids, as in `produce`. The default one does unless the model has it as a feature.
        chosen_record_column = None if options.record_column == DEFAULT_RECORD_COLUMN else options.record_column
        feature_columns = [name for name in columns if name in feature_by_name and name != chosen_record_column]
        if not feature_columns:
            raise _make_no_feature_error(table, tuple(feature_by_name))
        table.check_columns(options.time_column, options.record_column)
        table.check_number_columns([name for name in feature_columns if not feature_by_name[name].labels])
        time_column = options.time_column or table.choose_time_column(feature_columns)
        # The default record column is optional; a column that the user chose was checked above.
        has_default_column = DEFAULT_RECORD_COLUMN in columns and DEFAULT_RECORD_COLUMN not in feature_by_name
        record_column = chosen_record_column or (DEFAULT_RECORD_COLUMN if has_default_column else None)
        if options.features.is_irregular and (record_column is None or time_column is None):
            raise InputError(
                f"{table.name}: the model is for irregular readings, so the rows of a record need its id and their "
                "times; name the columns (--record-column, --time-column), or give a long table (columns record, "
                "feature, value and time)"
            )
        used_columns = (*feature_columns, record_column, time_column)
        model_columns = options.find_model_column(table, (*used_columns, options.field_names.record))
        label_columns = options.find_label_column(table)
        used_columns += (*model_columns, *label_columns)
        ignored_columns = [column for column in columns if column not in used_columns]
        return _WideTable(
            table,
            id_prefix,
            feature_columns,
            record_column=record_column,
            time_column=time_column,
            model_columns=model_columns,
            label_columns=label_columns,
            ignored_columns=ignored_columns,
            options=options,
            bad_rows=_BadRows(table),
        )

    @property
    def num_rows(self) -> int | None:
        """Number of rows that `iterate_rows` yields, None if it is not known."""
        return self.table.num_rows

    def iterate_rows(self) -> Iterator[WideRows]:
        """Yield the rows of the table in batches of about `options.batch_events` events; each cell is one event."""
        forms = choose_cell_forms(self.table, self.options.features.by_name)
        columns = [*self.feature_columns, *self.model_columns]
        forms |= dict.fromkeys(self.model_columns, "text")
        if self.record_column is not None:
            columns.append(self.record_column)
            forms[self.record_column] = "text"
        if self.time_column is not None:
            columns.append(self.time_column)
            forms[self.time_column] = "time"
        columns += [name for name in self.label_columns if name not in columns]
        num_features = max(len(schema) for schema in self.options.schemas)
        batch_size = max(1, self.options.batch_events // num_features)  # rows; each has an event per feature
        for batch, rows in self.table.iterate_numbered(columns, batch_size, forms, self.bad_rows.add):
            record_ids = self._make_record_ids(batch, rows)
            first_row = int(rows[0]) if len(rows) else 0
            for name in self.label_columns:
                batch = batch.append_column(RECORD_LABEL_COLUMN, _format_record_labels(batch.column(name)))
            if self.ids_are_feature and self.record_column != self.options.model_column:
                batch = batch.select([name for name in batch.schema.names if name != self.record_column])
            yield WideRows(self.table.name, batch, record_ids, first_row, self.time_column, rows)

    @property
    def ids_are_feature(self) -> bool:
        """Whether the model has a feature with the name of the column of record ids, which is not read."""
        return self.record_column is not None and self.record_column in self.options.features.by_name

    def _make_record_ids(self, batch: pa.RecordBatch, rows: NDArray[np.int64]) -> list[str]:
        """Return the record id of each row: the cell of the record column, or a text made of the row number.

        A null in the record column becomes "", which the codec rejects.

        Args:
            batch: Rows of the table.
            rows: (N,) numbers of these rows in the table.
        """
        if self.record_column is not None:
            description = f"{self.table.name}: column {self.record_column!r}"
            record_ids = convert_ids(batch.column(self.record_column), description)
            return [str(record_id) for record_id in to_python_values(record_ids.fill_null(""))]
        if self.id_prefix is None:
            return [str(row) for row in rows.tolist()]
        return [f"{self.id_prefix}:{row}" for row in rows.tolist()]


@dataclass(frozen=True, slots=True)
class _LongTable:
    """A table in which a row is one reading of one feature of a record. Its columns were checked.

    Attributes:
        table: The file.
        field_names: Names of the columns of a reading in this table.
        columns: Names of the columns that are read.
        label_columns: Name of the column with the label of the record, which is one of them; empty if there is none.
        ignored_columns: Names of all other columns.
        options: How to read the table.
        bad_rows: The rows of the file that are malformed.
    """

    table: Table
    field_names: FieldNames
    columns: list[str]
    label_columns: list[str]
    ignored_columns: list[str]
    options: _Reading
    bad_rows: _BadRows

    @staticmethod
    def check(table: Table, options: _Reading) -> _LongTable:
        """Return a `_LongTable` for a table, after checking its columns and choosing those to read.

        Args:
            table: The table.
            options: How to read the table.

        Raises:
            InputError: A required column is missing, or feature names are not text.
        """
        names, columns = options.choose_field_names(table), table.schema.names
        for name in options.list_required_columns(table):
            if name not in columns:
                raise InputError(
                    f"{table.name}: there is no column {name!r}, which a long table (each row is one reading) needs; "
                    f"rename a column to {name!r}, or use --layout wide if each row is a record"
                )
            # The cells of a CSV file are text, whatever type the schema guesses.
            if name == names.feature and not table.is_text_column(name):
                raise InputError(
                    f"{table.name}: column {name!r} has the type {table.schema.field(name).type}, but feature names "
                    "are text; convert the column to text"
                )
        if names.time in columns:
            table.check_time_zone(names.time)
        # A device identifies the record only if records are time windows.
        id_columns = (names.record,) if options.window_assigner is None else (names.record, names.device)
        known_columns = (*id_columns, names.feature, names.value, names.label, names.time)
        used_columns = [name for name in known_columns if name in columns]
        name_by_column = options.rename_fields(names)
        used_columns += options.find_model_column(table, [name_by_column.get(name, name) for name in used_columns])
        label_columns = options.find_label_column(table, (names.feature, names.value, names.label))
        used_columns += [name for name in label_columns if name not in used_columns]
        ignored_columns = [name for name in columns if name not in used_columns]
        return _LongTable(table, names, used_columns, label_columns, ignored_columns, options, _BadRows(table))

    @property
    def num_rows(self) -> int | None:
        """Number of rows that `iterate_rows` yields, None if it is not known."""
        return self.table.num_rows

    def iterate_rows(self) -> Iterator[LongRows]:
        """Yield the rows of the table in batches of at most `options.batch_events` rows."""
        names, name_by_column = self.field_names, self.options.rename_fields(self.field_names)
        # Values are not converted to numbers here, so that labels such as "007" are not changed.
        forms: dict[str, CellForm] = dict.fromkeys(
            (names.record, names.device, names.feature, names.value, names.label), "text"
        )
        forms |= {names.value: "mixed", names.time: "time"}
        if self.options.model_column is not None:
            forms.setdefault(self.options.model_column, "text")
        forms = {name: form for name, form in forms.items() if name in self.columns}
        batches = self.table.iterate_numbered(self.columns, self.options.batch_events, forms, self.bad_rows.add)
        for batch, rows in batches:
            first_row = int(rows[0]) if len(rows) else 0
            labels = [_format_record_labels(batch.column(name)) for name in self.label_columns]
            batch = batch.rename_columns([name_by_column.get(name, name) for name in batch.schema.names])
            for column in labels:
                batch = batch.append_column(RECORD_LABEL_COLUMN, column)
            yield LongRows(self.table.name, batch, first_row, rows)


@dataclass(frozen=True, slots=True)
class _WindowedTable:
    """A wide table whose cells are readings of devices, which are assigned to time windows. Its columns were checked.

    Attributes:
        table: The file.
        feature_columns: Names of the columns that are sensors of the model, in the order of the file.
        time_column: Name of the column of times.
        device_column: Name of the column of devices. None if the name of the file is the device.
        model_columns: Name of the column that determines the model; empty if there is none, or if it is the device.
        label_columns: Name of the column with the label of the row; empty if there is none.
        ignored_columns: Names of all other columns.
        options: How to read the table.
        bad_rows: The rows of the file that are malformed.
    """

    table: Table
    feature_columns: list[str]
    time_column: str
    device_column: str | None
    model_columns: list[str]
    label_columns: list[str]
    ignored_columns: list[str]
    options: _Reading
    bad_rows: _BadRows

    @staticmethod
    def check(table: Table, time_column: str, options: _Reading) -> _WindowedTable:
        """Return a `_WindowedTable` for a table, after choosing the columns of sensors and devices.

        Args:
            table: The table.
            time_column: Name of the column of times.
            options: How to read the table.

        Raises:
            InputError: No column is a sensor of the model, or a column that the user chose does not exist. Or the
                column that determines the model has the name of a field of readings.
        """
        columns, sensors = table.schema.names, options.features.by_sensor
        feature_columns = [column for column in columns if column in sensors]
        if not feature_columns:
            raise _make_no_feature_error(table, tuple(sensors))
        is_default = options.device_column == DEFAULT_DEVICE_COLUMN
        table.check_columns(time_column, device=None if is_default else options.device_column)
        table.check_time_zone(time_column)
        table.check_number_columns([name for name in feature_columns if not options.get_sensor(name).labels])
        device_column = options.device_column if options.device_column in columns else None
        used_columns = (*feature_columns, time_column, device_column)
        # The readings have columns of their own. Of these, only the device can determine the model.
        model_columns = options.find_model_column(table, (options.field_names.device,))
        if not set(model_columns).isdisjoint(_list_reading_columns(options.field_names)):
            raise InputError(
                f"{table.name}: the column {model_columns[0]!r} cannot determine the model, because each cell "
                "becomes a reading, and a reading has a field of its own with this name; rename the column in the "
                "table, and give its new name with --model-by"
            )
        label_columns = options.find_label_column(table)
        used_columns += (*model_columns, *label_columns)
        ignored_columns = [column for column in columns if column not in used_columns]
        return _WindowedTable(
            table,
            feature_columns,
            time_column,
            device_column=device_column,
            model_columns=model_columns,
            label_columns=label_columns,
            ignored_columns=ignored_columns,
            options=options,
            bad_rows=_BadRows(table),
        )

    @property
    def num_rows(self) -> None:
        """None, because it is not known how many readings the rows of the table have."""

    def iterate_rows(self) -> Iterator[LongRows]:
        """Yield the readings of the table in batches of at most `options.batch_events` readings."""
        names = self.options.field_names
        forms = choose_cell_forms(self.table, {name: self.options.get_sensor(name) for name in self.feature_columns})
        forms[self.time_column] = "time"
        columns = [*self.feature_columns, self.time_column]
        if self.device_column is not None and self.device_column not in columns:
            columns.append(self.device_column)
            forms[self.device_column] = "text"
        for name in self.model_columns:
            if name not in columns:
                columns.append(name)
                forms[name] = "text"
        columns += [name for name in self.label_columns if name not in columns]
        discrete_columns = {name for name in self.feature_columns if self.options.get_sensor(name).labels}
        long_names = _list_reading_columns(names)
        batch_size = max(1, self.options.batch_events // len(self.feature_columns))  # rows of the wide table
        for batch, rows in self.table.iterate_numbered(columns, batch_size, forms, self.bad_rows.add):
            if self.device_column is None:
                devices = self.table.stem
            else:
                description = f"{self.table.name}: column {self.device_column!r}"
                devices = convert_ids(batch.column(self.device_column), description)
            readings = unpivot_rows(batch, self.feature_columns, discrete_columns, self.time_column, devices, rows)
            readings = readings.rename_columns(long_names)
            column_by_name = {name: batch.column(name) for name in self.model_columns}
            for name in self.label_columns:
                column_by_name[RECORD_LABEL_COLUMN] = _format_record_labels(batch.column(name))
            row_of_reading = pa.array(np.searchsorted(rows, readings.column(ROW_NUMBER_COLUMN).to_numpy()))
            for name, column in column_by_name.items():
                readings = readings.append_column(name, column.take(row_of_reading))
            yield LongRows(self.table.name, readings, 0)


def _list_reading_columns(names: FieldNames) -> list[str]:
    """Return the columns of the readings of a wide table, in the order in which `unpivot_rows` returns them."""
    return [names.device, names.feature, names.value, names.label, names.time, ROW_NUMBER_COLUMN]


_OpenedTable = _WideTable | _LongTable | _WindowedTable
_OPENED_TABLES = (_WideTable, _LongTable, _WindowedTable)
_Content = _OpenedTable | DataFile
"""What is read of an input file: the rows of a table, or the lines of a file of JSON lines."""


@dataclass(slots=True)
class _BadRows:
    """The rows of a CSV file that have a wrong number of cells, until they are returned as messages.

    At most `MAX_PENDING_BAD_ROWS` rows are kept at a time. Further ones are only counted.

    Attributes:
        table: The file.
    """

    table: Table
    _pending: deque[BadRow] = field(default_factory=deque)
    _num_further: int = 0
    _located: Iterator[tuple[int, BadRow]] = field(init=False)

    def __post_init__(self) -> None:
        self._located = self.table.find_bad_rows(self._take_pending())

    def add(self, row: BadRow) -> None:
        """Add a row that was found."""
        if len(self._pending) < MAX_PENDING_BAD_ROWS:
            self._pending.append(row)
        else:
            self._num_further += 1

    def take_messages(self) -> Messages | None:
        """Return the rows that were added since the last call as messages that the codec rejects; None without any.

        The offset of a message is the number of its line in the file, from 0, as for a file of JSON lines.
        """
        located = [next(self._located) for _ in range(len(self._pending))]
        if not located:
            return None
        payloads: list[bytes | None] = []
        for line, row in located:
            detail = f"line {line} of the file has {row.describe()}"
            payloads.append(UnreadablePayload(RejectionReason.MALFORMED_ROW, detail, 1, row.text.encode()))
        if self._num_further:
            detail = f"{self._num_further} further rows of the file, after line {located[-1][0]}, are like this one"
            payloads.append(UnreadablePayload(RejectionReason.MALFORMED_ROW, detail, self._num_further))
            located.append(located[-1])
            self._num_further = 0
        num_rows = len(payloads)
        offsets = np.array([line - 1 for line, _ in located], np.int64)
        partitions, times = np.zeros(num_rows, np.int32), np.full(num_rows, NO_TIME)
        return Messages(self.table.name, [None] * num_rows, payloads, times, partitions, offsets)

    def _take_pending(self) -> Iterator[BadRow]:
        """Yield the rows in the order in which they were added. The caller knows how many there are."""
        while True:
            yield self._pending.popleft()


def _insert_bad_rows(payloads: Iterator[Payload], bad_rows: Sequence[_BadRows]) -> Iterator[Payload]:
    """Yield the rows of tables, and the rows that are malformed as messages that the codec rejects.

    Args:
        payloads: The rows of the tables.
        bad_rows: The malformed rows of each table, which are found while the others are read.
    """
    for payload in chain(payloads, [None]):  # the last bad rows are found when the other rows have ended
        yield from (messages for rows in bad_rows if (messages := rows.take_messages()) is not None)
        if payload is not None and len(payload):
            yield payload


def choose_cell_forms(table: Table, feature_by_column: Mapping[str, Feature]) -> dict[str, CellForm]:
    """Return what the cells of those columns of a table are to be that are features, as training reads them.

    It concerns tables that hold the cells as text. Columns of times of day have no entry: they are recognised anyway.

    Args:
        table: The table.
        feature_by_column: The features by the names of their columns, of which the table may lack some.
    """
    forms: dict[str, CellForm] = {}
    for column in table.schema:
        feature = feature_by_column.get(column.name)
        if feature is not None and (feature.labels or not pa.types.is_time(column.type)):
            forms[column.name] = "mixed" if feature.labels else "number"
    return forms


def _make_no_feature_error(table: Table, features: Sequence[str]) -> InputError:
    """Return the error for a table without any column that is a feature of the model.

    Args:
        table: The table.
        features: The names of the model's features.
    """
    return InputError(
        f"{table.name}: no column is a feature of the model (the columns are {table.format_column_names()}, "
        f"the features are {join_names(features)}); choose another model or another table{table.describe_delimiter()}"
    )


def _reorder_payloads(
    wide_tables: list[_WideTable],
    long_tables: list[_LongTable | _WindowedTable],
    line_files: list[DataFile],
    options: _Reading,
) -> list[Iterator[Payload]]:
    """Return iterators over the contents of all files, in which the readings of each record are in `options.order`.

    The rows of wide tables are unchanged, because the codec (decoder of events) orders the readings within a row.

    Args:
        wide_tables: Tables in which a row is a record.
        long_tables: Tables in which a row is one reading.
        line_files: JSON lines files.
        options: How to read the files.
    """
    # Several models have no files that must be reordered.
    schema, names, order, seed = options.schemas[0], options.field_names, options.order, options.seed
    payload_iterators: list[Iterator[Payload]] = [
        _insert_bad_rows(table.iterate_rows(), [table.bad_rows]) for table in wide_tables
    ]
    if long_tables:
        row_iterators = [table.iterate_rows() for table in long_tables]
        reordered = reorder_rows(row_iterators, schema, names, order, seed, options.batch_events)
        payload_iterators.append(_insert_bad_rows(reordered, [table.bad_rows for table in long_tables]))
    if line_files:
        payload_iterators.append(
            reorder_lines(line_files, schema, names, order, seed, options.batch_events, options.max_message_bytes)
        )
    return payload_iterators


def _iterate_messages(path: DataFile, options: _Reading) -> Iterator[Messages]:
    """Yield the lines of a JSON lines file as messages, at most `options.batch_events` at a time."""
    num_lines = 0
    for block in read_lines(path, options.max_message_bytes):
        numbered_lines = _number_lines(block, num_lines)
        num_lines += len(block)
        for start in range(0, len(numbered_lines), options.batch_events):
            yield _make_messages(str(path), numbered_lines[start : start + options.batch_events])


def _number_lines(lines: list[bytes], first_number: int) -> list[tuple[int, bytes]]:
    """Return the lines that are not blank, each as a pair of its line number and the line.

    Args:
        lines: Consecutive lines, without line ends.
        first_number: The number of the first of these lines. Blank lines are counted, too.
    """
    return [(number, line) for number, line in enumerate(lines, first_number) if line and not line.isspace()]


def _make_messages(topic: str, numbered_lines: list[tuple[int, bytes]]) -> Messages:
    """Return lines as messages without keys and times, in partition 0; the offset of a message is its line number.

    Args:
        topic: The topic of the messages: the name of the file, for error messages.
        numbered_lines: Pairs of line number and line.
    """
    num_messages = len(numbered_lines)
    offsets = np.array([number for number, _ in numbered_lines], np.int64)
    payloads: list[bytes | None] = [line for _, line in numbered_lines]
    times = np.full(num_messages, NO_TIME)
    return Messages(topic, [None] * num_messages, payloads, times, np.zeros(num_messages, np.int32), offsets)
