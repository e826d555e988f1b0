"""What the first rows of an unknown table show: columns, kinds, times, rate, devices, and columns that may be labels.

`deformer-stream init` prints it and derives its questions from it. PyTorch is not imported, so that it takes a second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from deformer_stream.cli.init.column_names import (
    ANSWER_NAME,
    DEVICE_NAME,
    ID_NAME,
    RECORD_NAME,
    SENSOR_NAME,
    TIME_NAME,
    VALUE_NAME,
    may_be_label,
    simplify_name,
)
from deformer_stream.cli.init.label_columns import (
    LabelColumn,
    find_label_columns,
    find_quality_column,
    has_quality_name,
)
from deformer_stream.codec.columns import is_numeric, is_present, parse_times, to_float64
from deformer_stream.codec.time_columns import UTC_MICROSECONDS, has_local_texts
from deformer_stream.codec.timestamps import guess_unit
from deformer_stream.durations import TimeUnit
from deformer_stream.engine.events import NO_TIME
from deformer_stream.errors import InputError
from deformer_stream.model.schema import Feature
from deformer_stream.model.windows import Window
from deformer_stream.settings.base import Layout
from deformer_stream.tables.discovery import TABLES, find_files, has_ending
from deformer_stream.tables.labels import encode_labels
from deformer_stream.tables.table import (
    DEFAULT_RECORD_COLUMN,
    SAMPLE_ROWS,
    CellForm,
    Table,
    TableOptions,
    map_read_errors,
)
from trainer.feature_kinds import ColumnStatistics, infer_feature
from trainer.fill_values import FillValue, find_fill_values
from trainer.identifiers import MIN_RISES, MIN_SHARE_OF_RISES, MIN_VALUES, find_unix_unit
from trainer.tables import DEVICE, FEATURE, TIME, VALUE, ValueForm, classify_type

MAX_ROWS, MAX_CELLS = 20_000, 1_000_000
"""Largest number of rows, and of cells (rows times columns), that are read."""

MAX_ID_LENGTH = 100
"""Largest number of characters of an id that names a record."""

MAX_DEVICES = 1000
"""Largest number of devices that are counted."""

SAMPLE_BYTES = 1 << 20
"""Number of bytes at the beginning of a CSV file from which the number of its rows is estimated."""

REGULAR_GAP_RATIO = 1.25
"""Gaps between the readings of a sensor count as regular if they differ from the usual gap by this factor at most."""

MAX_IRREGULAR_SHARE = 0.2
"""Share of the gaps that may be irregular in a table of regular readings, because some readings are missing."""


@dataclass(frozen=True, slots=True)
class ColumnView:
    """What the first rows show about one column, or about one sensor of a table with one reading per row.

    Attributes:
        name: Name of the column or sensor.
        kind: "continuous" (a measurement), "discrete" (a label), "time", or "left out" if it cannot be a feature.
        reason: Why, as text for the user.
        values: A few of its values, or their range, as text.
        unit: The unit that the file states; empty if there is none.
    """

    name: str
    kind: str
    reason: str
    values: str = ""
    unit: str = ""


@dataclass(frozen=True, slots=True)
class ReadingTimes:
    """The times of the M readings of the rows that were looked at.

    Attributes:
        times: (M,) microseconds since 1970.
        sources: (M,) int64 number of the sensor of a device or record that each reading is from.
    """

    times: NDArray[np.int64]
    sources: NDArray[np.int64]

    def compute_repeated_share(self, window: Window) -> float:
        """Return the share of the readings that have an earlier reading of their sensor in their time slot.

        Args:
            window: The window and its time slots.
        """
        if not len(self.times):
            return 0.0
        slots = self.times // window.width * window.slots + window.time_slot_index(self.times)
        order = np.lexsort((slots, self.sources))
        is_repeated = (np.diff(slots[order]) == 0) & (np.diff(self.sources[order]) == 0)
        return float(is_repeated.sum()) / len(self.times)

    @property
    def is_irregular(self) -> bool:
        """Whether the readings do not come at equal intervals that are about the same for all sensors."""
        order = np.lexsort((self.times, self.sources))
        gaps = np.diff(self.times[order])[np.diff(self.sources[order]) == 0]
        gaps = gaps[gaps > 0]
        if not len(gaps):
            return False
        ratio = gaps / np.median(gaps)
        is_regular = (ratio <= REGULAR_GAP_RATIO) & (ratio >= 1 / REGULAR_GAP_RATIO)
        return float((~is_regular).mean()) > MAX_IRREGULAR_SHARE


@dataclass(frozen=True, slots=True)
class TableView:
    """What the first rows of a table show.

    Attributes:
        inputs: The files, folders and patterns as the user has named them.
        num_files: Number of files.
        num_rows: Number of rows of all files, estimated if `is_exact` is false.
        is_exact: Whether `num_rows` is counted.
        num_rows_read: Number of rows that were looked at, from the beginning of the first file.
        layout: "wide" if a column is a feature, "long" if a row is one reading.
        columns: The columns (or sensors), in the order of the table.
        time_column: The column with the time, None if there is none.
        time_option: The column with the time, if commands do not find it without the option --time-column.
        time_unit: The unit of times that are numbers.
        has_local_times: Whether the times are texts without a time zone.
        interval: Usual time in seconds between two readings of a sensor. None if there are no times.
        span: Time in seconds between the first and the last time. None if there are no times.
        device_column: The column with the device, None if there is none.
        devices: The devices, sorted.
        record_column: The column with the id of the record, None if there is none.
        repeated_in_record: Share of the readings that have an earlier reading of their sensor in their record, from 0
            to 1. 0 if a row is not one reading, or if there is no column with the id of the record.
        label_columns: The columns that may say whether a row is normal, the most likely one first.
        quality_column: The column that says whether a reading is valid, its usual value, and the share of readings with
            another one; None if there is no such column.
        id_column: The column of a wide table that probably names the record of each row, None if there is none.
        fill_values: Values such as 99999 that probably stand for missing readings.
        suggested_exclusions: Columns that became features and probably should not: ids and answers.
        dialect: How a CSV file is read, as one line; None for other formats.
        reading_times: The times of the readings. None if there are no times.
        is_newest_first: Whether most rows are earlier than the row before.
        time_error: Why the first of the times that cannot be read cannot be; None if all can be read.
    """

    inputs: tuple[str, ...]
    num_files: int
    num_rows: int
    is_exact: bool
    num_rows_read: int
    layout: Layout
    columns: tuple[ColumnView, ...]
    time_column: str | None = None
    time_option: str | None = None
    time_unit: TimeUnit = "s"
    has_local_times: bool = False
    interval: float | None = None
    span: float | None = None
    device_column: str | None = None
    devices: tuple[str, ...] = ()
    record_column: str | None = None
    repeated_in_record: float = 0.0
    label_columns: Mapping[str, LabelColumn] = field(default_factory=dict)
    quality_column: tuple[str, str, float] | None = None
    id_column: str | None = None
    fill_values: tuple[FillValue, ...] = ()
    suggested_exclusions: tuple[str, ...] = ()
    dialect: str | None = None
    reading_times: ReadingTimes | None = None
    is_newest_first: bool = False
    time_error: str | None = None

    @property
    def feature_names(self) -> list[str]:
        """The names of the columns or sensors that can be features."""
        return [column.name for column in self.columns if column.kind in ("continuous", "discrete")]

    @property
    def label_counts(self) -> dict[str, Mapping[str, int]]:
        """By column that says, with strong evidence, whether a row is normal: the number of rows by value."""
        return {
            name: column.count_by_value for name, column in self.label_columns.items() if column.evidence == "strong"
        }

    @property
    def are_all_rows_read(self) -> bool:
        """Whether all rows of all files were looked at."""
        return self.is_exact and self.num_rows_read == self.num_rows


def look_at_tables(
    inputs: Sequence[str],
    options: TableOptions,
    time_column: str | None = None,
    device_column: str | None = None,
    label: str | None = None,
) -> TableView:
    """Look at the first rows of tables.

    Args:
        inputs: Files, folders and patterns of Parquet and CSV files.
        options: How they are read.
        time_column: The column with the time, None to find it.
        device_column: The column with the device, None to find it.
        label: The column that says whether a row is normal, None to find it.

    Raises:
        InputError: A file does not exist or cannot be read, a column does not exist, or the table has one reading per
            row under column names that training does not know.
    """
    files = find_files(inputs, TABLES)
    # Only the first file is opened.
    table = Table.open_all(files[:1], options)[0]
    return look_at_table(table, tuple(inputs), files, time_column, device_column, label)


def look_at_table(
    table: Table,
    inputs: tuple[str, ...],
    files: Sequence[Path] = (),
    time_column: str | None = None,
    device_column: str | None = None,
    label: str | None = None,
) -> TableView:
    """Look at the first rows of a table.

    Args:
        table: The table, which is the first of the files.
        inputs: The files, folders and patterns as the user has named them.
        files: All files; empty for a table in memory.
        time_column: The column with the time, None to find it.
        device_column: The column with the device, None to find it.
        label: The column that says whether a row is normal, None to find it.

    Raises:
        InputError: The table cannot be read or has no rows, a column does not exist, or the table has one reading per
            row under column names that training does not know.
    """
    table.check_columns(time=time_column, device=device_column)
    layout = _choose_layout(table)
    is_long = layout == "long"
    timed = _choose_time_column(table, time_column, is_long)
    table, time_column = timed.table, timed.column
    batch, num_rows_read, is_end = _read_first_rows(table, _choose_forms(table, time_column, is_long, label))
    is_complete = len(files) <= 1 and is_end
    num_rows = num_rows_read if is_complete else _estimate_rows(files, table, num_rows_read)
    devices = _find_devices(batch, device_column, is_long)
    # The readings of a record are from one device, even if no column names it.
    owners = devices.device_of_row
    if owners is None and is_long and DEFAULT_RECORD_COLUMN in batch.schema.names:
        owners = [str(record) for record in batch.column(DEFAULT_RECORD_COLUMN).to_pylist()]
    row_times = _RowTimes.parse(batch, time_column, table.name)
    interval, span = row_times.measure([owners, batch.column(FEATURE).to_pylist() if is_long else None])
    if span is not None:
        span *= num_rows / batch.num_rows  # as if the rate stays the same in the other rows
    statistics = _collect_statistics(batch, is_long, {time_column, devices.column if is_long else None})
    views, features = _describe_columns(table, batch, statistics, time_column, is_long, row_times.are_in_order)
    not_labels = {time_column, *((FEATURE, VALUE, DEVICE, DEFAULT_RECORD_COLUMN) if is_long else ())}
    sensors = [name for name in features if is_long or name != devices.column]
    return TableView(
        inputs=tuple(inputs),
        num_files=max(1, len(files)),
        num_rows=num_rows,
        is_exact=is_complete or (len(files) <= 1 and table.num_rows is not None),
        num_rows_read=batch.num_rows,
        layout=layout,
        columns=tuple(views),
        time_column=time_column,
        time_option=timed.option,
        time_unit=table.options.time_format.unit,
        has_local_times=timed.has_local_times,
        interval=interval,
        span=span,
        device_column=devices.column,
        devices=devices.list_names(),
        record_column=DEFAULT_RECORD_COLUMN if DEFAULT_RECORD_COLUMN in table.schema.names else None,
        repeated_in_record=_compute_repeated_in_record(batch) if is_long else 0.0,
        label_columns=find_label_columns(batch, not_labels, is_long, label),
        quality_column=find_quality_column(batch) if is_long else None,
        id_column=None if is_long or len(files) > 1 else _find_id_column(batch, features),
        fill_values=_find_fill_values(views, statistics),
        suggested_exclusions=() if is_long else _suggest_exclusions(features),
        dialect=table.describe_dialect(),
        reading_times=_collect_reading_times(batch, row_times.times, owners, sensors),
        is_newest_first=row_times.are_mostly_falling,
        time_error=row_times.error,
    )


@dataclass(frozen=True, slots=True)
class _TimedTable:
    """A table whose column of times was chosen.

    Attributes:
        table: The table, with the unit of its times.
        column: The column with the time, None if there is none.
        option: The column with the time, if commands do not find it without the option --time-column.
        has_local_times: Whether the times are texts without a time zone.
    """

    table: Table
    column: str | None
    option: str | None = None
    has_local_times: bool = False


def _choose_time_column(table: Table, named_column: str | None, is_long: bool) -> _TimedTable:
    """Choose the column of times of a table, and the unit of its times.

    Args:
        table: The table.
        named_column: The column that the user has named, None to find it.
        is_long: Whether a row is one reading. The column is then `time`.
    """
    option = named_column
    column = named_column or (TIME if TIME in table.schema.names else None)
    if column is None and not is_long:
        column = table.choose_time_column() or _find_date_column(table)
        if column is None:
            column = option = _find_unix_times(table)
    if column is None:
        return _TimedTable(table, None, option)
    table = _recognize_unit(table, column)
    has_local_times = table.options.time_format.timezone is None and _has_local_times(table, column)
    return _TimedTable(table, column, option, has_local_times)


def _choose_forms(table: Table, time_column: str | None, is_long: bool, label: str | None) -> dict[str, CellForm]:
    """Return what the cells of some columns are to be, if the table holds them as text.

    Args:
        table: The table.
        time_column: The column with the time, None if there is none.
        is_long: Whether a row is one reading.
        label: The column that says whether a row is normal, None if the user has named none.
    """
    forms: dict[str, CellForm] = {VALUE: "mixed"} if is_long else {}
    if time_column is not None:
        forms[time_column] = "time"
    for name in table.schema.names:  # a text such as "none" among codes is a label, and no missing number
        if (
            (may_be_label(name) or name == label)
            and table.is_text_column(name)
            and classify_type(table.schema.field(name).type) == "number"
        ):
            forms.setdefault(name, "mixed")
    return forms


@dataclass(frozen=True, slots=True)
class _RowTimes:
    """The times of the N rows that were looked at.

    Attributes:
        times: (N,) microseconds since 1970, `NO_TIME` if unknown; None if the table has no times.
        error: Why the first of the times that cannot be read cannot be; None if all can be read.
    """

    times: NDArray[np.int64] | None
    error: str | None = None

    @classmethod
    def parse(cls, batch: pa.RecordBatch, time_column: str | None, name: str) -> _RowTimes:
        """Return the times of some rows.

        Args:
            batch: The rows.
            time_column: The column with the time, None if there is none.
            name: Name of the table, for messages.
        """
        if time_column is None:
            return cls(None)
        times, error_by_row = parse_times(batch.column(time_column), name)
        return cls(times, str(error_by_row[min(error_by_row)]) if error_by_row else None)

    @property
    def _steps(self) -> NDArray[np.int64]:
        """Differences in microseconds between the known times of consecutive rows."""
        known = np.empty(0, np.int64) if self.times is None else self.times[self.times != NO_TIME]
        return np.diff(known)

    @property
    def are_in_order(self) -> bool:
        """Whether the rows are in the order of time, as training decides it."""
        steps = self._steps
        return int((steps > 0).sum()) >= MIN_RISES and bool((steps >= 0).all())

    @property
    def are_mostly_falling(self) -> bool:
        """Whether most rows are earlier than the row before."""
        steps = self._steps
        return int((steps < 0).sum()) > int((steps > 0).sum())

    def measure(self, groups: Sequence[Sequence[str | None] | None]) -> tuple[float | None, float | None]:
        """Return the usual time between two rows of the same groups, and the whole time, both in seconds.

        Args:
            groups: For each grouping (by device, by sensor) the group of each of the N rows; None if there is no
                grouping.

        Returns:
            (interval, span); None for each that the times do not show.
        """
        times = self.times
        if times is None:
            return None, None
        keys = [
            np.unique([str(name) for name in group], return_inverse=True)[1] for group in groups if group is not None
        ]
        order = np.lexsort((times, *keys))
        is_known = times[order] != NO_TIME
        order = order[is_known]
        if len(order) < 2:
            return None, None
        steps = np.diff(times[order])
        is_same = np.ones(len(steps), bool)
        for key in keys:
            is_same &= np.diff(key[order]) == 0
        positive = steps[is_same & (steps > 0)]
        known = times[order]
        span = float(known.max() - known.min()) / 1e6
        return (float(np.median(positive)) / 1e6 if len(positive) else None), span or None


def _find_fill_values(views: Sequence[ColumnView], statistics: Mapping[str, ColumnStatistics]) -> tuple[FillValue, ...]:
    """Return the values of measurements that probably stand for missing readings, such as 99999.

    Args:
        views: The descriptions of the columns.
        statistics: The statistics of each column or sensor.
    """
    measured = {view.name for view in views if view.kind == "continuous"}
    return tuple(find_fill_values([column.number_sample for name, column in statistics.items() if name in measured]))


def _suggest_exclusions(features: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of a wide table that became features and probably should not: ids and answers."""
    simple_names = {name: simplify_name(name) for name in features}
    return tuple(name for name, simple in simple_names.items() if ID_NAME.search(simple) or ANSWER_NAME.search(simple))


def _choose_layout(table: Table) -> Layout:
    """Return the layout of a table: "long" if a row is one reading, "wide" if a row has a column for each sensor.

    Raises:
        InputError: A row seems to be one reading, but the columns do not have the names that training expects.
    """
    names = table.schema.names
    if FEATURE in names and VALUE in names:
        return "long"
    sensor_column = next((name for name in names if SENSOR_NAME.match(simplify_name(name))), None)
    if sensor_column is not None and table.schema.field(sensor_column).type == pa.string() and len(names) <= 6:
        raise InputError(
            f"{table.name}: this looks like a table with one reading per row, whose sensor is in the column "
            f"{sensor_column!r}; {_describe_renaming(table, sensor_column)}"
        )
    return "wide"


def _describe_renaming(table: Table, sensor_column: str) -> str:
    """Return which columns of a table of readings must be renamed for training, and what to do about the others.

    Args:
        table: The table.
        sensor_column: The column with the sensor.
    """
    role_by_column = {sensor_column: FEATURE}
    form_by_column = {column.name: classify_type(column.type) for column in table.schema}
    others = [name for name in table.schema.names if name != sensor_column and not has_quality_name(name)]
    patterns: tuple[tuple[str, re.Pattern[str], ValueForm | None], ...] = (
        (TIME, TIME_NAME, "time"),
        (VALUE, VALUE_NAME, "number"),
        (DEVICE, DEVICE_NAME, None),
    )
    for role, pattern, form in patterns:  # by its name or, if no name fits, by the type of its cells
        named = [name for name in others if pattern.match(simplify_name(name))]
        typed = [name for name in others if form_by_column[name] == form]
        if chosen := (named or typed)[:1]:
            role_by_column[chosen[0]] = role
            others.remove(chosen[0])
    renamed = [f"{name} to {role}" for name, role in role_by_column.items() if name != role]
    missing = [role for role in (VALUE, TIME) if role not in role_by_column.values()]
    text = f"rename {', '.join(renamed)}"
    if missing:
        text += "".join(f", and the column with the {role} to {role}" for role in missing)
    if DEVICE not in role_by_column.values():
        text += "; add a column device (if the sensors' names contain it, divide them)"
    quality = next((name for name in table.schema.names if has_quality_name(name)), None)
    if quality is not None:
        text += f"; keep {quality}, and choose the valid readings with an option such as --where \"{quality} = 'Good'\""
    return text


def _find_id_column(batch: pa.RecordBatch, features: Sequence[str]) -> str | None:
    """Return the column that names the record of each row, None if there is none or if several may do so.

    Its name is that of an id, it is no feature, and its values are short texts or integers that are all different.

    Args:
        batch: The first rows.
        features: The columns that became features.
    """
    if DEFAULT_RECORD_COLUMN in batch.schema.names:
        return None
    found = []
    for name in batch.schema.names:
        column = batch.column(name)
        if name in features or not RECORD_NAME.match(simplify_name(name)) or column.null_count:
            continue
        is_short = pa.types.is_integer(column.type)
        if pa.types.is_string(column.type):
            is_short = all(0 < len(text) <= MAX_ID_LENGTH for text in column.to_pylist())
        if is_short and len(column) >= MIN_VALUES and len(column.unique()) == len(column):
            found.append(name)
    return found[0] if len(found) == 1 else None


def _find_date_column(table: Table) -> str | None:
    """Return the first column of dates, None if there is none."""
    return next((column.name for column in table.schema if classify_type(column.type) == "time"), None)


def _find_unix_times(table: Table) -> str | None:
    """Return the first column of numbers, with the name of a time, that are Unix times and mostly rise; None if there
    is none.
    """
    numeric: list[str] = [
        column.name
        for column in table.schema
        if is_numeric(column.type) and TIME_NAME.match(simplify_name(column.name))
    ]
    batch = next(table.iterate_batches(numeric, SAMPLE_ROWS), None) if numeric else None
    if batch is None:
        return None
    for name in numeric:
        times = to_float64(batch.column(name)) if is_numeric(batch.column(name).type) else np.empty(0)
        times = times[np.isfinite(times)]
        if len(times) < MIN_VALUES or find_unix_unit(times.min(), times.max()) is None:
            continue
        if (np.diff(times) >= 0).mean() >= MIN_SHARE_OF_RISES:
            return name
    return None


def _choose_max_rows(table: Table) -> int:
    """Return the largest number of rows to read, which is smaller for tables with many columns."""
    return max(100, min(MAX_ROWS, MAX_CELLS // max(1, len(table.schema.names))))


def _recognize_unit(table: Table, time_column: str) -> Table:
    """Return the table with the unit of its times, if they are numbers that are out of range in seconds."""
    time_format = table.options.time_format
    batch = next(table.iterate_batches([time_column], SAMPLE_ROWS, {time_column: "time"}), None)
    if batch is None or time_format.unit != "s" or not is_numeric(batch.column(time_column).type):
        return table
    unit = guess_unit(to_float64(batch.column(time_column)))
    return replace(table, options=replace(table.options, time_format=replace(time_format, unit=unit)))


def _has_local_times(table: Table, time_column: str) -> bool:
    """Return whether the first time is a text without a time zone."""
    batch = next(table.iterate_batches([time_column], 100, {time_column: "text"}), None)
    return batch is not None and has_local_texts(batch.column(time_column))


def _read_first_rows(table: Table, forms: Mapping[str, CellForm]) -> tuple[pa.RecordBatch, int, bool]:
    """Return the first rows of a table as one batch, the number of rows that were read, and whether these are all rows.

    The batch has fewer rows than were read if the type of a column changes between them.

    Raises:
        InputError: The file cannot be read, or has no rows.
    """
    max_rows = _choose_max_rows(table)
    batches: list[pa.RecordBatch] = []
    num_rows = 0
    for batch in table.iterate_batches(table.schema.names, max_rows, forms):
        batches.append(batch)
        num_rows += batch.num_rows
        if num_rows >= max_rows:
            break
    if not num_rows:
        raise InputError(f"{table.name}: the table has no rows; give a table with at least some hundred rows")
    # A column whose later cells do not fit has text in later batches. The first batches show enough.
    fitting = [batch for batch in batches if batch.schema == batches[0].schema]
    with map_read_errors(table.name):
        rows = pa.Table.from_batches(fitting).combine_chunks()
        return rows.slice(0, max_rows).to_batches()[0], num_rows, num_rows < max_rows


def _estimate_rows(files: Sequence[Path], table: Table, num_rows_read: int) -> int:
    """Return about how many rows all files have.

    Args:
        files: The files; empty for a table in memory.
        table: The first file, or the table in memory.
        num_rows_read: Number of its rows that were read.
    """
    num_rows = table.num_rows
    if not files:
        return num_rows_read if num_rows is None else num_rows
    sizes = [file.stat().st_size for file in files]
    if num_rows is None:
        with files[0].open("rb") as file:
            sample = file.read(SAMPLE_BYTES)
        if has_ending(files[0], (".gz",)):  # the size says nothing about the number of rows
            num_rows = num_rows_read
        else:
            num_rows = round(sample.count(b"\n") * sizes[0] / len(sample))
    return round(num_rows * sum(sizes) / max(1, sizes[0]))


class _Devices(NamedTuple):
    """The devices of the rows that were looked at.

    Attributes:
        column: The column with the device, None if there is none.
        device_of_row: The device of each row, None for a null; None if there is no column.
    """

    column: str | None = None
    device_of_row: list[str | None] | None = None

    def list_names(self) -> tuple[str, ...]:
        """Return the names of the devices, sorted, `MAX_DEVICES` of them at most."""
        return tuple(sorted({device for device in self.device_of_row or () if device is not None})[:MAX_DEVICES])


def _find_devices(batch: pa.RecordBatch, device_column: str | None, is_long: bool) -> _Devices:
    """Find the column with the device, and return the device of each row.

    Args:
        batch: The first rows.
        device_column: The column that the user has named, None to find it.
        is_long: Whether a row is one reading. The column is then `device`.
    """
    names = batch.schema.names
    if device_column is None and DEVICE in names:
        device_column = DEVICE
    if device_column is None and not is_long:
        for name in names:
            if DEVICE_NAME.match(simplify_name(name)) and classify_type(batch.schema.field(name).type) == "text":
                num_values = len(batch.column(name).unique())
                if num_values <= min(MAX_DEVICES, batch.num_rows / 10):
                    device_column = name
                    break
    if device_column is None:
        return _Devices()
    indexes, labels = encode_labels(batch.column(device_column))
    return _Devices(device_column, [labels[index] if index >= 0 else None for index in indexes])


def _collect_reading_times(
    batch: pa.RecordBatch, times: NDArray[np.int64] | None, owners: Sequence[str | None] | None, sensors: Sequence[str]
) -> ReadingTimes | None:
    """Return the times of the readings of some sensors, None if the table has no times.

    Args:
        batch: The M first rows.
        times: (M,) their times in microseconds since 1970, `NO_TIME` if unknown; None if the table has none.
        owners: The device or record of each row, None if there are neither.
        sensors: Names of the sensors, which are columns unless a row is one reading.
    """
    if times is None:
        return None
    owner_of_row = np.zeros(len(times), np.int64)
    if owners is not None:
        owner_of_row = np.unique([str(name) for name in owners], return_inverse=True)[1].astype(np.int64)
    all_times, all_sources = [], []
    if FEATURE in batch.schema.names and VALUE in batch.schema.names:  # a row is one reading
        sensor_of_row, names = encode_labels(batch.column(FEATURE))
        is_known = (times != NO_TIME) & np.isin(sensor_of_row, [i for i, name in enumerate(names) if name in sensors])
        all_times.append(times[is_known])
        all_sources.append(owner_of_row[is_known] * len(names) + sensor_of_row[is_known])
    else:
        for index, name in enumerate(sensors):
            is_known = (times != NO_TIME) & is_present(batch.column(name))
            all_times.append(times[is_known])
            all_sources.append(owner_of_row[is_known] * len(sensors) + index)
    empty = np.empty(0, np.int64)
    return ReadingTimes(np.concatenate([empty, *all_times]), np.concatenate([empty, *all_sources]))


def _compute_repeated_in_record(batch: pa.RecordBatch) -> float:
    """Return the share of the rows that have an earlier row of the same record and sensor, 0 without record ids.

    Args:
        batch: The first rows, of which each is one reading.
    """
    if DEFAULT_RECORD_COLUMN not in batch.schema.names or not batch.num_rows:
        return 0.0
    records, _ = encode_labels(batch.column(DEFAULT_RECORD_COLUMN))
    sensors, names = encode_labels(batch.column(FEATURE))
    num_different = len(np.unique(np.asarray(records, np.int64) * (len(names) + 1) + sensors))
    return float(1.0 - num_different / batch.num_rows)


def _collect_statistics(
    batch: pa.RecordBatch, is_long: bool, other_columns: set[str | None]
) -> dict[str, ColumnStatistics]:
    """Return the statistics of each column or sensor from which training infers its kind.

    Args:
        batch: The first rows.
        is_long: Whether a row is one reading.
        other_columns: Columns that are no features, such as the time.
    """
    statistics: dict[str, ColumnStatistics] = {}
    rows = np.arange(batch.num_rows)
    if is_long:
        sensors, names = encode_labels(batch.column(FEATURE))
        for index, name in enumerate(names):
            chosen = np.flatnonzero(sensors == index)
            if len(chosen):
                column = statistics.setdefault(name, ColumnStatistics(name))
                column.add(batch.column(VALUE).take(pa.array(chosen)), chosen, np.ones(len(chosen), bool))
        return statistics
    for name in batch.schema.names:
        if name not in other_columns:
            statistics[name] = ColumnStatistics(name)
            statistics[name].add(batch.column(name), rows, np.ones(len(rows), bool))
    return statistics


def _describe_columns(
    table: Table,
    batch: pa.RecordBatch,
    statistics: Mapping[str, ColumnStatistics],
    time_column: str | None,
    is_long: bool,
    is_in_time_order: bool,
) -> tuple[list[ColumnView], list[str]]:
    """Return a description of each column, and the names of those that became features.

    Args:
        table: The table, whose units are described too.
        batch: Its first rows.
        statistics: The statistics of each column or sensor.
        time_column: The column with the time, None if there is none.
        is_long: Whether a row is one reading.
        is_in_time_order: Whether the rows are in the order of time, as training decides it.
    """
    views = [ColumnView(name, "left out", "index of the data frame") for name in table.index_columns]
    features: list[str] = []
    if time_column is not None:
        column = batch.column(time_column).drop_null()
        if is_numeric(column.type):  # seconds since 1970
            times = parse_times(column, table.name)[0]
            column = pa.array(times[times != NO_TIME]).cast(UTC_MICROSECONDS)
        first, last = (str(column[i]).removesuffix(".000000") for i in (0, -1)) if len(column) else ("", "")
        views.append(ColumnView(time_column, "time", "the time", f"{first} to {last}"))
    for name, column_statistics in statistics.items():
        unit = table.units.get(name, "")
        if not is_long and name == DEFAULT_RECORD_COLUMN:
            views.append(ColumnView(name, "left out", "the record's id"))
            continue
        feature = infer_feature(
            column_statistics, None, False, is_in_time_order=is_in_time_order, others=statistics.values()
        )
        if isinstance(feature, Feature):
            features.append(name)
            views.append(ColumnView(name, feature.kind, feature.reason, _describe_values(feature), unit))
        else:
            views.append(ColumnView(name, "left out", feature.reason))
    return views, features


def _describe_values(feature: Feature) -> str:
    """Return the range of a measurement or the first labels of a label, as text."""
    if feature.kind == "continuous":
        return f"{feature.low:g} to {feature.high:g}"
    return ", ".join(feature.labels[:5]) + (", …" if len(feature.labels) > 5 else "")
