"""Prepare a training table: convert tables to a matrix of normalised values and split its records.

The tables are read three times, one batch at a time. The first pass counts the records. The second collects the
statistics from which the kind of each feature (measurement or label) is inferred. It uses training records only, so
that validation and calibration records stay unseen. The third writes the normalised values to a memory-mapped matrix,
so tables may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deformer_stream.counts import format_count
from deformer_stream.durations import format_duration
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model.schema import Schema
from deformer_stream.model.time_slots import expand_time_slots
from deformer_stream.model.windows import Window
from deformer_stream.record_limits import MAX_FEATURES, MAX_NAME_CHARS
from deformer_stream.runtime.repeated_readings import compute_max_slots
from deformer_stream.tables.table import describe_bad_rows, join_names
from trainer.array_files import CHUNK_ROWS
from trainer.data import MIN_RECORDS, DataOptions, PreparedTable, assign_split, compute_fingerprint, mark_empty_records
from trainer.feature_choice import choose_columns, choose_kinds, collect_statistics, collect_texts, count_missing
from trainer.feature_kinds import ColumnStatistics, ExcludedColumn
from trainer.fill_values import ChosenFillValues, describe_fill_values, find_fill_values
from trainer.reading_time import MAX_SAMPLE_SHARE, MIN_SAMPLED_RECORDS, ReadingMonitor, ReadingTooSlow
from trainer.repeated_readings import SlotCounts, describe_repeated_readings, suggest_num_slots
from trainer.slot_values import check_rule_for_cycles
from trainer.tables import (
    FEATURE,
    RECORD,
    VALUE,
    InputTables,
    TableSource,
    TooFewRecordsError,
    index_records,
    open_training_input,
)
from trainer.value_matrix import encode_table


@dataclass(frozen=True, slots=True)
class CollectedInput:
    """The input of a training after two passes: its records are numbered and split, its features are chosen.

    Attributes:
        tables: The input.
        schema: One feature for each sensor, without a window.
        excluded_columns: Columns that are not features, with the reason.
        split: (N,) uint8, the value of `Split` of each record.
        statistics: The statistics of the columns that became features, by the name of the sensor.
        num_input_records: Number of normal records of the input, of which N are used.
    """

    tables: InputTables
    schema: Schema
    excluded_columns: tuple[ExcludedColumn, ...]
    split: NDArray[np.uint8]
    statistics: dict[str, ColumnStatistics]
    num_input_records: int

    def describe(self) -> dict[str, Any]:
        """Return those facts of the `TrainingTable` that follow from the first two passes, by attribute name."""
        tables, statistics = self.tables, self.statistics
        return {
            "excluded_columns": self.excluded_columns,
            "split": self.split,
            "layout": tables.layout,
            "time_column": tables.time_column,
            "missing_by_feature": count_missing(self.schema, statistics),
            "infinite_by_feature": {
                name: column.num_infinite for name, column in statistics.items() if column.num_infinite
            },
            "texts_by_feature": collect_texts(self.schema, statistics),
            "num_input_records": self.num_input_records,
            "time_span": tables.time_span,
            "notes": tuple(_describe_reading(tables)),
        }


def prepare_table(
    sources: Sequence[TableSource],
    options: DataOptions,
    folder: Path,
    monitor: ReadingMonitor | None = None,
    max_rows: int | None = None,
) -> PreparedTable:
    """Read tables, infer the features, split the records, and write the matrix of normalised values.

    Args:
        sources: Files, folders and patterns of files, and tables in memory.
        options: How to read them.
        folder: An existing folder, in which the files of the matrix are created.
        monitor: Reports the progress, and limits the time for reading. If all records take longer, a random sample of
            them is used. By default the time is not limited, and no progress is reported.
        max_rows: Largest number of rows of the input that are read. None to read all rows.

    Raises:
        InputError: A file cannot be used.
        ConfigError: An option does not fit the files.
        Unavailable: The disk has no space for the matrix.
    """
    window, once = choose_window(options)
    collected = collect_input(sources, options, window, monitor, max_rows)
    tables = collected.tables
    schema = repeat_by_time_slot(collected.schema, window, once).with_units({**tables.units, **options.units})
    schema = schema.with_fill_values(tables.fill_values.list_values)
    check_names(schema, tables)
    if options.base is None:  # an old model keeps its rule
        check_rule_for_cycles(schema)
    tables.monitor.start_pass("converting the records")
    slot_counts = SlotCounts()
    values, arrival_ranks = encode_table(tables, schema, folder, options.ties, slot_counts)  # third pass
    has_readings, num_missing = _count_missing_values(values)
    with _explain_layout(tables, options):
        split = mark_empty_records(collected.split, has_readings, tables.skipped_by_reason)
    facts = collected.describe() | {"split": split}
    if arrival_ranks is not None:  # a reading that never came has no cell
        facts["missing_by_feature"] = _sum_by_sensor(schema, num_missing)
    return PreparedTable(
        **facts,
        schema=schema,
        values=values,
        arrival_ranks=arrival_ranks,
        skipped_by_reason=tables.skipped_by_reason,
        fingerprint=compute_fingerprint(schema, values, arrival_ranks, split),
        ties=options.ties,
        part_by_record=tables.part_by_record,
        warnings=(*check_input(collected), *_check_slots(tables, schema, once, slot_counts)),
    )


def _count_missing_values(values: NDArray[np.float32]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which records have readings, and how many of these records lack each feature.

    Args:
        values: (N, F) values of N records and F features, NaN if missing.

    Returns:
        (has_readings, num_missing), of shapes (N,) and (F,).
    """
    has_readings = np.zeros(len(values), bool)
    num_missing = np.zeros(values.shape[1], np.int64)
    for start in range(0, len(values), CHUNK_ROWS):
        is_missing = np.isnan(values[start : start + CHUNK_ROWS])
        is_used = ~is_missing.all(1)
        has_readings[start : start + CHUNK_ROWS] = is_used
        num_missing += is_missing[is_used].sum(0)
    return has_readings, num_missing


def _sum_by_sensor(schema: Schema, counts: NDArray[np.int64]) -> dict[str, int]:
    """Return for each sensor the sum of the counts of its features, if there are any.

    Args:
        schema: The F features.
        counts: (F,) counts.
    """
    count_by_sensor = dict.fromkeys(schema.sensor_names, 0)
    for feature, count in zip(schema.features, counts.tolist(), strict=True):
        count_by_sensor[feature.sensor_name] += count
    return {name: count for name, count in count_by_sensor.items() if count}


def collect_input(
    sources: Sequence[TableSource],
    options: DataOptions,
    window: Window | None,
    monitor: ReadingMonitor | None = None,
    max_rows: int | None = None,
) -> CollectedInput:
    """Read tables twice: number and split the records, and infer the features from the training records.

    Args:
        sources: Files, folders and patterns of files, and tables in memory.
        options: How to read them.
        window: The window of time that is a record, None if the input contains record ids.
        monitor: As for `prepare_table`.
        max_rows: Largest number of rows of the input that are read. None to read all rows.

    Raises:
        InputError: A file cannot be used.
        ConfigError: An option does not fit the files.
    """
    tables = open_with_options(sources, options, window)
    tables.monitor, tables.max_rows = monitor or ReadingMonitor(), max_rows
    choice = choose_columns(tables, options)
    tables.time_column, tables.feature_columns = choice.time_column, choice.feature_columns
    with _explain_layout(tables, options):
        return _collect(tables, options, choice.excluded)


def _collect(tables: InputTables, options: DataOptions, excluded_by_name: Sequence[ExcludedColumn]) -> CollectedInput:
    """Number and split the records of the input, and infer the features, as `collect_input` does.

    Args:
        tables: The input, whose columns are chosen.
        options: How to read it.
        excluded_by_name: The columns that cannot be features because of their names, types and options.

    Raises:
        InputError: A file cannot be used.
        ConfigError: An option does not fit the files.
    """
    tables.monitor.start_pass("counting the records")
    index_records(tables)  # first pass over the input: numbers the records
    if tables.num_records < MIN_RECORDS:
        bad_rows = describe_bad_rows(tables.tables)
        raise TooFewRecordsError(
            f"{tables.description}: {format_count(tables.num_records, 'record')} to train on "
            f"{'is' if tables.num_records == 1 else 'are'} too few; "
            f"give at least {MIN_RECORDS} normal records, better 1000{f' ({bad_rows})' if bad_rows else ''}"
        )
    num_input_records = tables.num_records
    split, statistics = _collect_within_time(tables, options)  # second pass
    schema, excluded_by_values = choose_kinds(
        list(statistics.values()), options, tables.time_order.only_rises, tables.tables[0].describe_delimiter()
    )
    # Statistics of the columns that became features. The names in the input are those of sensors.
    feature_statistics = {name: column for name, column in statistics.items() if name in schema.sensor_names}
    excluded_columns = (*excluded_by_name, *excluded_by_values)
    return CollectedInput(tables, schema, excluded_columns, split, feature_statistics, num_input_records)


@contextmanager
def _explain_layout(tables: InputTables, options: DataOptions) -> Iterator[None]:
    """Add to errors about the input that it was taken for a long table because of the names of its columns.

    Args:
        tables: The input.
        options: How to read it.

    Raises:
        InputError: The block raises it.
    """
    try:
        yield
    except InputError as error:
        if tables.layout != "long" or options.layout is not None or tables.window is not None:
            raise
        raise type(error)(
            f"{error} (each row was read as one reading, because the table has the columns {RECORD}, {FEATURE} and "
            f"{VALUE}; if each row is a record, set --layout wide, in Python layout='wide')"
        ) from error


def check_input(collected: CollectedInput) -> list[tuple[str, str]]:
    """Return warnings about rows that are left out or not in the order of their times, and about fill values."""
    tables = collected.tables
    measured = {feature.name for feature in collected.schema.features if feature.kind == "continuous"}
    samples = [column.number_sample for name, column in collected.statistics.items() if name in measured]
    message_by_code = {
        "malformed_rows": describe_bad_rows(tables.tables),
        "unreadable_times": tables.unreadable_times.describe(),
        "newest_first": _describe_order(tables),
        "fill_values": describe_fill_values(find_fill_values(samples), tables.layout),
    }
    return [(code, message) for code, message in message_by_code.items() if message is not None]


def check_names(schema: Schema, tables: InputTables) -> None:
    """Check that a model can store the names and units of its features.

    Args:
        schema: The features.
        tables: The input, for error messages.

    Raises:
        InputError: A name is empty, or a name or a unit is too long.
    """
    is_long = tables.layout == "long"
    for feature in schema.features:
        if not feature.sensor_name:
            place = "a row names no feature" if is_long else "a column has an empty name"
            remedy = f"write a name into the column {FEATURE}" if is_long else "give the column a name"
            raise InputError(f"{tables.description}: {place}; {remedy}, or leave it out of the table")
        if len(feature.name) > MAX_NAME_CHARS:
            raise InputError(
                f"{tables.description}: the name of the feature that begins with {feature.name[:40]!r} has "
                f"{len(feature.name):,} characters, but at most {MAX_NAME_CHARS:,} are accepted; rename it, or leave "
                "it out with --exclude"
            )
        if feature.unit is not None and len(feature.unit) > MAX_NAME_CHARS:
            raise InputError(
                f"{tables.description}: the unit of the feature {feature.name!r} has {len(feature.unit):,} characters, "
                f"but at most {MAX_NAME_CHARS:,} are accepted; give a shorter one with --units"
            )


def _check_slots(
    tables: InputTables, schema: Schema, once: Collection[str], counts: SlotCounts
) -> list[tuple[str, str]]:
    """Return a warning if many readings are left out because their time slot has an earlier one of their sensor."""
    if schema.window is None or schema.window.per_slot != "first":
        return []
    num_single = sum(name in once for name in schema.sensor_names)
    max_slots = compute_max_slots(len(schema.sensor_names) - num_single, num_single)
    num_slots = suggest_num_slots(schema.window, tables.interval_by_sensor, once, max_slots)
    message = describe_repeated_readings(counts, schema.window, num_slots)
    if message is None:
        return []
    labels = [feature.sensor_name for feature in schema.features if feature.labels and tables.has_unpivoted_rows]
    if tables.device_column is None and labels:
        names = join_names(list(dict.fromkeys(labels)))
        message += (
            f"; the rows of a file count as those of one device: if a column such as {names} names their device, give "
            "it with --device-column"
        )
    return [("repeated_readings", message)]


def _describe_order(tables: InputTables) -> str | None:
    """Return a warning if most rows of windows are earlier than the row before, such as the newest row first."""
    order = tables.time_order
    if tables.window is None or order.num_falls <= order.num_rises:
        return None
    return (
        "most rows are earlier than the row before: sort the table by time, because replay and consume reject readings "
        "that come after the end of their window"
    )


def _describe_reading(tables: InputTables) -> list[str]:
    """Return the dialect of each CSV file; only of the first one if all have the same, with their number."""
    texts = [text for table in tables.tables if (text := table.describe_dialect()) is not None]
    dialects = {table.dialect.describe() for table in tables.tables if table.dialect is not None}
    if len(dialects) == 1 and len(texts) > 1:
        return [f"{texts[0]} (and {format_count(len(texts) - 1, 'more file')})"]
    return texts


def open_with_options(sources: Sequence[TableSource], options: DataOptions, window: Window | None) -> InputTables:
    """Open the tables as the options say, and keep the index of a data frame if an option names it."""
    return open_training_input(
        sources,
        options.layout,
        options.label,
        options.normal,
        window,
        time_column=options.time_column,
        device_column=options.device_column,
        exclude=options.exclude,
        fill_values=ChosenFillValues(options.fill_values, options.base),
        options=replace(options.reading, kept_columns=options.reading.kept_columns | options.named_columns),
    )


def _collect_within_time(
    tables: InputTables, options: DataOptions
) -> tuple[NDArray[np.uint8], dict[str, ColumnStatistics]]:
    """Split the records and collect the statistics of the columns, from a sample of the records if time is short.

    Args:
        tables: The input, whose records are numbered. If a sample is used, its records are numbered anew.
        options: How to read the input.

    Returns:
        The split of the records that are used, and the statistics by feature name.
    """
    monitor = tables.monitor
    part_split = _split_parts(tables, options) if options.part_sizes else None

    def sample_records(num_records: int) -> None:
        """Use only a random sample of the records, whose split stays the same if it was made by parts."""
        nonlocal part_split
        chosen = tables.sample_records(num_records, options.seed)
        part_split = None if part_split is None else part_split[chosen]

    def get_split() -> NDArray[np.uint8]:
        """Return the split of the records that are used."""
        if part_split is not None:
            return part_split
        return assign_split(tables.num_records, options.calibration_share, options.seed)

    if monitor.max_records is not None and monitor.max_records < tables.num_records:
        sample_records(monitor.max_records)
    try:
        split = get_split()
        # The pass that converts the records takes about as long as this one, so two passes must fit into the time. An
        # interrupted run that is continued needs the same records as before, however long that takes.
        monitor.start_pass("collecting statistics", num_limited_passes=2 if monitor.max_records is None else 0)
        return split, collect_statistics(tables, split, options.exclude)
    except ReadingTooSlow as stop:
        num_records = max(MIN_SAMPLED_RECORDS, int(stop.share * tables.num_records))
    if num_records <= MAX_SAMPLE_SHARE * tables.num_records:
        monitor.on_message(f"used {num_records:,} of {tables.num_records:,} records, because of --max-time")
        sample_records(num_records)
    split = get_split()
    monitor.start_pass("collecting statistics")
    return split, collect_statistics(tables, split, options.exclude)


def _split_parts(tables: InputTables, options: DataOptions) -> NDArray[np.uint8]:
    """Return the split of the records if each of several consecutive parts is split by itself; number the parts.

    Args:
        tables: The input, whose records are numbered.
        options: Their `part_sizes` are the numbers of records of the parts.

    Raises:
        InputError: The input has another number of records than the parts, as a record belongs to several of them.
    """
    sizes = options.part_sizes if len(options.part_sizes) > 1 else (tables.num_records,)
    if sum(sizes) != tables.num_records:
        raise InputError(
            f"{tables.description}: a model of all values of the column --per cannot be trained; either rows of one "
            "record have different values in the column, or records have readings only of columns that other values "
            "lack: correct the column --per, or leave the columns out with --exclude"
        )
    if len(sizes) > 1:
        tables.part_by_record = np.repeat(np.arange(len(sizes)), sizes)
    return np.concatenate([assign_split(size, options.calibration_share, options.seed) for size in sizes])


def count_records(sources: Sequence[TableSource], options: DataOptions) -> int:
    """Return the number of normal records in training tables. All rows are read once, but not all columns.

    Args:
        sources: Files, folders and patterns of files, and tables in memory.
        options: How to read them.

    Raises:
        InputError: A file cannot be used, or no record is normal.
        ConfigError: An option does not fit the files.
    """
    window, _ = choose_window(options)
    tables = open_with_options(sources, options, window)
    choice = choose_columns(tables, options)
    tables.time_column, tables.feature_columns = choice.time_column, choice.feature_columns
    index_records(tables)
    return tables.num_records


def choose_window(options: DataOptions) -> tuple[Window | None, frozenset[str]]:
    """Return the window of time and the features that report once in it, from the options or the old model.

    If an old model is adapted to the table (`--init-from`), its window is used.

    Returns:
        (window, names). All readings of a device in one window of time are a record; the window is None if the input
        contains record ids. The names are those of features that report once in a window, although it is divided into
        time slots (equal parts).

    Raises:
        ConfigError: The options contain another window than that of the old model.
    """
    base = options.base
    if base is None:
        return options.window, frozenset(options.once)
    if options.window not in (None, base.window):
        if base.window is None:
            old_records = "identified by record ids"
        else:
            old_records = f"windows of {format_duration(base.window.width)}"
            old_records += f" in {base.window.slots} slots" if base.window.slots > 1 else ""
            old_records += f" with --per-slot {base.window.per_slot}" if base.window.per_slot != "first" else ""
        raise ConfigError(
            "--window and --slots do not fit the old model (--init-from), whose records are "
            f"{old_records}; leave --window and --slots out"
        )
    # Features of sensors that report in each time slot have the attribute `sensor`. All others report once.
    old_once = {feature.name for feature in base.features if feature.sensor is None}
    return base.window, frozenset(options.once) | old_once


def repeat_by_time_slot(schema: Schema, window: Window | None, once: Collection[str]) -> Schema:
    """Return a schema in which each sensor has one feature for each time slot of a window.

    A record contains the readings of one window of time. The window is divided into time slots, which are equally long.
    A sensor may report once in each time slot, and each of these readings is a feature of its own.

    Args:
        schema: A schema with one feature for each sensor.
        window: The width and the number of time slots of a window. If it is None, the schema is returned unchanged.
        once: Names of sensors that report only once in a window. Each of them keeps one feature.

    Raises:
        ConfigError: There would be too many features, or two of the same name.
    """
    if window is None:
        return schema
    num_single = sum(feature.name in once for feature in schema.features)
    num_features = num_single + (len(schema) - num_single) * window.slots
    if num_features > MAX_FEATURES:
        raise ConfigError(
            f"--slots {window.slots} would give a record {num_features} features, but it can have at most "
            f"{MAX_FEATURES}; choose fewer slots"
        )
    try:
        return expand_time_slots(schema, window, once)
    except ValueError as error:
        raise ConfigError(
            f"--slots {window.slots} cannot be used, because two features would have the same name ({error}); "
            "rename one of the features in the table"
        ) from None
