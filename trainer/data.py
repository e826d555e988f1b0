"""Prepare a training table: convert tables to a matrix of normalised values and split its records.

The tables are read three times, one batch at a time. The first pass counts the records. The second collects the
statistics from which the kind of each feature (measurement or label) is inferred. It uses training records only, so
that validation and calibration records stay unseen. The third writes the normalised values to a memory-mapped matrix,
so tables may be larger than memory.
"""

from __future__ import annotations

import enum
import hashlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from deformer_stream.calibration.conformal import TiePolicy, choose_num_calibration
from deformer_stream.codec.columns import are_numbers
from deformer_stream.codec.number_texts import is_no_value
from deformer_stream.counts import format_count
from deformer_stream.engine.events import NO_TIME
from deformer_stream.errors import ConfigError, InputError, map_write_errors
from deformer_stream.model.schema import SECONDS_PER_DAY, Feature, FeatureKind, Schema
from deformer_stream.model.time_slots import collapse_time_slots, expand_time_slots
from deformer_stream.model.windows import Window, format_duration
from deformer_stream.record_limits import MAX_FEATURES
from deformer_stream.runtime.repeated_readings import compute_max_slots
from deformer_stream.settings.base import Layout
from deformer_stream.tables.labels import encode_labels, normalize_number_text
from deformer_stream.tables.table import TableOptions, describe_bad_rows, join_names
from trainer.feature_kinds import (
    ColumnStatistics,
    ExcludedColumn,
    check_old_feature,
    has_few_integers,
    infer_feature,
    is_measured,
)
from trainer.reading_time import MAX_SAMPLE_SHARE, MIN_SAMPLED_RECORDS, ReadingMonitor, ReadingTooSlow
from trainer.repeated_readings import ReadingIntervals, SlotCounts, describe_repeated_readings, suggest_num_slots
from trainer.settings import TrainConfig, parse_periods, split_names
from trainer.slot_values import FirstReadings, SlotAggregator, check_rule_for_cycles
from trainer.tables import (
    DEVICE,
    FEATURE,
    RECORD,
    VALUE,
    EventReadings,
    FeatureReadings,
    InputTables,
    TableSource,
    TooFewRecordsError,
    ValueForm,
    classify_type,
    convert_to_numbers,
    index_records,
    open_training_input,
)


class Split(enum.IntEnum):
    """The part of the table to which a record belongs, as stored in `PreparedTable.split`.

    Weights are fitted to TRAIN records, and the best weights are chosen on VALIDATION records. The alert rule is
    calibrated on CALIBRATION records. LEFT_OUT records are suspected anomalies that training must not see. TEST
    records exist only in experiments, which compute their final figures from them. EMPTY records have no reading of a
    feature. A stream never opens them, and their anomaly score of 0 would lower the threshold of alerts.
    """

    TRAIN = 0
    VALIDATION = 1
    CALIBRATION = 2
    LEFT_OUT = 3
    TEST = 4
    EMPTY = 5


VALIDATION_SHARE = 0.1
"""Share of validation records among the records that are not used for calibration."""

EMPTY_RECORDS = "records without a usable reading"
"""The reason for leaving a record of `Split.EMPTY` out."""

MIN_VALIDATION = 4
"""Smallest number of validation records, so that even a small table has some."""

MIN_RECORDS = 20
"""Smallest number of normal records that a training table must have."""

CHUNK_ROWS = 16_384
"""Rows of a matrix on disk that are processed at once, so that a large matrix need not fit into memory."""


@dataclass(frozen=True, slots=True)
class DataOptions:
    """How to read the training tables. Columns and features are given by name.

    Attributes:
        layout: "wide" if a row is a record, "long" if it is a reading. None to infer it from the column names.
        label: The column that distinguishes normal records from others. It is never a feature.
        normal: The value of the column `label` in normal records. Other records are not used.
        exclude: Columns that are not used.
        context: Features that help to predict other features and are never scored themselves.
        discrete: Features whose values are labels.
        continuous: Features whose values are measurements.
        cycle: Features whose values are positions on a cycle, each with its period in the unit of the values.
        calibration_share: Share (0 to 1) of the records that are set aside for calibration. None for about a fifth
            (`choose_num_calibration`).
        seed: Seed of the random split of the records.
        window: The window of time: all readings of a device in one window are a record. None if a column names the
            record of each reading, or if a row is a record.
        once: Features that report once in a window, although the window is divided into time slots.
        base: Schema of the old model that is adapted to the table (`--init-from`). Its features come first and stay
            unchanged. None to train a new model.
        ties: "arrival" if readings of one record with the same time are scored one after the other in their logged
            order, "hold" if they are scored together.
        time_column: The column with the time of readings or records. None to find it (see `open_training_input`).
        device_column: The column with the device of readings, for windows. None to find it.
        reading: How tables are read: the dialect of CSV files, and the zone of times without one.
        units: Units of features, which replace those in the metadata of the columns.
        order: Order of irregular readings: "arrival" for that of the input, "time" for that of their times. None to
            choose it (`irregular_table.choose_reading_order`).
        part_sizes: Numbers of records of consecutive parts of the input, such as one part for each type of machine.
            Each part is split by itself, as it is split if it is the whole input. So a model of one part can be adapted
            from a model of all parts, and its calibration records are new to both. One element stands for all records,
            which are then split before a sample is drawn. Empty to split the records that are used.
    """

    layout: Layout | None = None
    label: str | None = None
    normal: str | None = None
    exclude: tuple[str, ...] = ()
    context: tuple[str, ...] = ()
    discrete: tuple[str, ...] = ()
    continuous: tuple[str, ...] = ()
    cycle: tuple[tuple[str, float], ...] = ()
    calibration_share: float | None = None
    seed: int = 0
    window: Window | None = None
    once: tuple[str, ...] = ()
    base: Schema | None = None
    ties: TiePolicy = "arrival"
    units: Mapping[str, str] = field(default_factory=dict)
    time_column: str | None = None
    device_column: str | None = None
    reading: TableOptions = field(default_factory=TableOptions)
    order: Literal["arrival", "time"] | None = None
    part_sizes: tuple[int, ...] = ()

    @property
    def named_columns(self) -> frozenset[str]:
        """The columns that the user has named to be features."""
        return frozenset((*self.discrete, *self.continuous, *self.context, *dict(self.cycle)))


@dataclass(frozen=True, kw_only=True)
class TrainingTable:
    """Facts about the input of a training: its features and the split of its N records.

    Attributes:
        schema: The F features.
        excluded_columns: Columns that are not features, with the reason.
        split: (N,) uint8, the value of `Split` of each record.
        layout: "wide" if a row of the input is a record, "long" if it is a reading.
        time_column: Name of the input's column with the time. None if there is none.
        missing_by_feature: By feature name, the number of missing readings over all records. If rows are readings, or
            records are windows, records of `Split.EMPTY` are left out.
        infinite_by_feature: By feature name, the number of infinite readings, which are treated as missing.
        skipped_by_reason: By reason as text, the number of input records or readings that were left out.
        fingerprint: Hexadecimal digest of schema, values, order or times of the readings, and split.
        texts_by_feature: By feature name, the number of texts among numbers, which are treated as missing, and the most
            frequent of them.
        num_input_records: Number of normal records of the input. N is smaller if a time limit permits only a sample. 0
            if it is not known.
        time_span: The first and the last time in the normal records, in microseconds since 1970. None if the input has
            no times.
        warnings: Warnings about the input, each a constant code for programs and a sentence for people.
        notes: Lines for people on how the input was read, such as the dialect of a CSV file.
    """

    schema: Schema
    excluded_columns: tuple[ExcludedColumn, ...]
    split: NDArray[np.uint8]
    layout: Layout
    time_column: str | None
    missing_by_feature: dict[str, int]
    infinite_by_feature: dict[str, int]
    skipped_by_reason: dict[str, int]
    fingerprint: str = field(repr=False)
    texts_by_feature: dict[str, tuple[int, str]] = field(default_factory=dict)
    num_input_records: int = 0
    time_span: tuple[int, int] | None = None
    warnings: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_used(self) -> NDArray[np.bool_]:
        """(N,) whether a record belongs to a part of the split that training or calibration uses."""
        return ~np.isin(self.split, (Split.LEFT_OUT, Split.EMPTY))

    def select_rows(self, part: Split) -> NDArray[np.int64]:
        """Return the row numbers of the records in one part of the split, such as `Split.TRAIN`, ascending."""
        return np.flatnonzero(self.split == part)

    def summarize(self) -> dict[str, Any]:
        """Return the facts about the table that are stored in the model's manifest: counts, reasons and fingerprint.

        The values can be written as JSON.
        """
        rows_by_part = {
            "train": int((self.split == Split.TRAIN).sum()),
            "validation": int((self.split == Split.VALIDATION).sum()),
            "calibration": int((self.split == Split.CALIBRATION).sum()),
        }
        if num_left_out := int((self.split == Split.LEFT_OUT).sum()):
            rows_by_part["left_out"] = num_left_out
        return {
            "fingerprint": self.fingerprint,
            "layout": self.layout,
            "rows": rows_by_part,
            "missing": self.missing_by_feature,
            "refused": self.infinite_by_feature,  # key of the manifest's format: infinite readings
            "skipped": self.skipped_by_reason,
            "excluded": {column.name: column.reason for column in self.excluded_columns},
        }


@dataclass(frozen=True, kw_only=True)
class PreparedTable(TrainingTable):
    """A training table of N records with F features, each with at most one reading, as a matrix of values on disk.

    Attributes:
        values: (N, F) float32 on disk: normalised numbers or label codes, NaN if missing.
        arrival_ranks: (N, F) int16 on disk: position (from 0) of each reading in its record's order of arrival, −1 if
            missing. None for a wide table, which has no arrival order.
        ties: With "hold", readings of a record with the same time have the same arrival rank. With "arrival", all ranks
            of a record are different.
        part_by_record: (N,) number of the part of each record (`DataOptions.part_sizes`); None if there is one part.
        left_out: Why the records of `Split.LEFT_OUT` were left out (`trainer.outliers.Suspects.summarize`). None
            without `--contamination auto`.
    """

    values: NDArray[np.float32]
    arrival_ranks: NDArray[np.int16] | None
    ties: TiePolicy = "arrival"
    part_by_record: NDArray[np.int64] | None = None
    left_out: dict[str, Any] | None = None


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
            "missing_by_feature": _count_missing(self.schema, statistics),
            "infinite_by_feature": {
                name: column.num_infinite for name, column in statistics.items() if column.num_infinite
            },
            "texts_by_feature": _collect_texts(self.schema, statistics),
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
    window, once = _choose_window(options)
    collected = collect_input(sources, options, window, monitor, max_rows)
    tables = collected.tables
    schema = repeat_by_time_slot(collected.schema, window, once).with_units({**tables.units, **options.units})
    if options.base is None:  # an old model keeps its rule
        check_rule_for_cycles(schema)
    tables.monitor.start_pass("converting the records")
    slot_counts = SlotCounts()
    values, arrival_ranks = encode_table(tables, schema, folder, options.ties, slot_counts)  # third pass
    has_readings, num_missing = _count_missing_values(values)
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
        warnings=(*check_rows(tables), *_check_slots(tables, schema, once, slot_counts)),
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


def mark_empty_records(
    split: NDArray[np.uint8], has_readings: NDArray[np.bool_], skipped_by_reason: dict[str, int]
) -> NDArray[np.uint8]:
    """Return the split of N records with `Split.EMPTY` for those without readings.

    Args:
        split: (N,) values of `Split`.
        has_readings: (N,) whether a record has readings of features.
        skipped_by_reason: The number of empty records is stored in it.

    Raises:
        TooFewRecordsError: Too few records have readings.
    """
    num_empty = int((~has_readings).sum())
    if not num_empty:
        return split
    skipped_by_reason[EMPTY_RECORDS] = num_empty
    num_left = len(split) - num_empty
    split = np.where(has_readings, split, np.uint8(Split.EMPTY)).astype(np.uint8)
    # By chance, too few validation records can be left. Training records may take their place, calibration records not.
    train = np.flatnonzero(split == Split.TRAIN)
    num_moved = min(len(train), max(0, MIN_VALIDATION - int((split == Split.VALIDATION).sum())))
    split[train[np.linspace(0, len(train) - 1, num_moved).astype(np.int64)]] = Split.VALIDATION
    is_train_short = len(train) - num_moved < MIN_RECORDS // 2
    if num_left < MIN_RECORDS or is_train_short or not (split == Split.CALIBRATION).any():
        raise TooFewRecordsError(
            f"{format_count(num_left, 'record')} with a reading of a feature to train on "
            f"{'is' if num_left == 1 else 'are'} too few, and {format_count(num_empty, 'record')} "
            f"{'has' if num_empty == 1 else 'have'} none; give at least {MIN_RECORDS} normal records, better 1000"
        )
    return split


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
    excluded_by_name = _choose_columns(tables, options)
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
    schema, excluded_by_values = choose_kinds(list(statistics.values()), options, tables.time_order.only_rises)
    # Statistics of the columns that became features. The names in the input are those of sensors.
    feature_statistics = {name: column for name, column in statistics.items() if name in schema.sensor_names}
    excluded_columns = (*excluded_by_name, *excluded_by_values)
    return CollectedInput(tables, schema, excluded_columns, split, feature_statistics, num_input_records)


def check_rows(tables: InputTables) -> list[tuple[str, str]]:
    """Return warnings about rows that are left out, or that are not in the order of their times."""
    message_by_code = {
        "malformed_rows": describe_bad_rows(tables.tables),
        "unreadable_times": tables.unreadable_times.describe(),
        "newest_first": _describe_order(tables),
    }
    return [(code, message) for code, message in message_by_code.items() if message is not None]


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
        return [f"{texts[0]} (and {len(texts) - 1} more files)"]
    return texts


def create_data_options(settings: TrainConfig, base: Schema | None = None) -> DataOptions:
    """Return the options for reading the training tables, converted from the options of the command line.

    Args:
        settings: All options of `deformer-train`.
        base: The schema of the model that is adapted (`--init-from`), or None. Its features are kept.
    """
    window = None
    if settings.window is not None:  # in seconds
        window = Window(round(settings.window * 1e6), settings.slots or 1, settings.per_slot)
    return DataOptions(
        layout=settings.layout,
        label=settings.label,
        normal=settings.normal,
        exclude=split_names(settings.exclude),
        context=split_names(settings.context),
        discrete=split_names(settings.discrete),
        continuous=split_names(settings.continuous),
        cycle=parse_periods(settings.cycle),
        # With --folds, the calibration records of the first model are one fold.
        calibration_share=1 / settings.folds if settings.folds else settings.calibration_share,
        seed=settings.seed,
        window=window,
        once=split_names(settings.once),
        base=base,
        ties=settings.ties,
        order=settings.order if settings.order in ("arrival", "time") else None,
        units=settings.units,
        time_column=settings.time_column,
        device_column=None if settings.device_column == DEVICE else settings.device_column,
        reading=TableOptions.from_settings(settings),
    )


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
    window, _ = _choose_window(options)
    tables = open_with_options(sources, options, window)
    _choose_columns(tables, options)
    index_records(tables)
    return tables.num_records


def _find_columns_with_texts(schema: Schema, statistics: dict[str, ColumnStatistics]) -> list[ColumnStatistics]:
    """Return the statistics of those measurements whose columns contain texts that are not numbers."""
    kind_by_sensor = {feature.sensor_name: feature.kind for feature in schema.features}
    columns = statistics.values()
    return [column for column in columns if column.num_other_texts and kind_by_sensor[column.name] == "continuous"]


def _collect_texts(schema: Schema, statistics: dict[str, ColumnStatistics]) -> dict[str, tuple[int, str]]:
    """Return for each measurement the number of texts among its numbers and the most frequent one, if there are any."""
    return {
        column.name: (column.num_other_texts, column.most_frequent_text)
        for column in _find_columns_with_texts(schema, statistics)
    }


def _count_missing(schema: Schema, statistics: dict[str, ColumnStatistics]) -> dict[str, int]:
    """Return for each feature the number of missing readings, if there are any.

    Texts among the numbers of a measurement count as missing. Names of features are those of sensors.
    """
    num_missing = {name: column.num_missing for name, column in statistics.items()}
    for column in _find_columns_with_texts(schema, statistics):
        num_missing[column.name] += column.num_other_texts
    return {name: count for name, count in num_missing.items() if count}


def assign_split(num_records: int, calibration_share: float | None, seed: int) -> NDArray[np.uint8]:
    """Assign each of N records at random to training, validation or calibration.

    Args:
        num_records: The number N.
        calibration_share: Share (0 to 1) of the records that are for calibration. None for about a fifth
            (`choose_num_calibration`).
        seed: Seed of the random choice. Only the seed and the number of records determine the choice.

    Returns:
        (N,) uint8 values of `Split`. The size of each part is its share of N, rounded. Only the assignment of the
        records to the parts is random.

    Raises:
        ConfigError: Too few records would be left for training.
    """
    if calibration_share is None:
        num_calibration = choose_num_calibration(num_records)
    else:
        num_calibration = max(1, round(calibration_share * num_records))
    num_validation = max(MIN_VALIDATION, round(VALIDATION_SHARE * (num_records - num_calibration)))
    if num_records - num_calibration - num_validation < MIN_RECORDS // 2:
        raise ConfigError(
            f"{num_calibration} of {num_records} records for calibration leave too few for training; choose a smaller "
            "--calibration-share or give more records"
        )
    # Fill the parts with their exact numbers of records, then shuffle. The constant in the seed makes these random
    # numbers independent of others with the same seed.
    split = np.full(num_records, Split.TRAIN, np.uint8)
    split[:num_calibration] = Split.CALIBRATION
    split[num_calibration : num_calibration + num_validation] = Split.VALIDATION
    np.random.default_rng([seed, 0x5B117]).shuffle(split)
    return split


def _choose_columns(tables: InputTables, options: DataOptions) -> list[ExcludedColumn]:
    """Decide from names, types and options which columns of the input are the time or may be features.

    The result is stored in `tables.time_column` and, for the wide layout, `tables.feature_columns`.

    Returns:
        The columns that cannot be features, with the reason.

    Raises:
        ConfigError: An option names a column that does not exist, or needs times that the table does not have.
        InputError: No column is left that could be a feature.
    """
    column_names = tables.schema.names
    if options.ties == "hold" and not (tables.has_reading_rows and tables.time_column):
        raise ConfigError(
            "--ties hold cannot be used, because the table does not contain the time of each reading; "
            "give a long table with a column named time"
        )
    index_columns = [ExcludedColumn(name, "index of the data frame") for name in tables.index_columns]
    if tables.layout == "long":
        owner_column = RECORD if tables.window is None else tables.device_column
        used_columns = (owner_column, FEATURE, VALUE, tables.time_column, tables.label_column)
        unused_columns = [name for name in column_names if name not in used_columns]
        return [*(ExcludedColumn(name, "not a column of the long layout") for name in unused_columns), *index_columns]
    columns_by_option = {"exclude": options.exclude, "context": options.context, "discrete": options.discrete}
    columns_by_option |= {"continuous": options.continuous, "cycle": tuple(dict(options.cycle))}
    known_columns = {name for table in tables.tables for name in table.schema.names}.union(tables.index_columns)
    for option, columns in columns_by_option.items():
        for column in columns:
            if column == tables.device_column and option != "exclude":
                raise ConfigError(
                    f"--{option} {column}: the column is the device of the windows, and no feature; leave the option "
                    "out (deformer-stream calibrate --group-by device gives each device thresholds of its own)"
                )
            if column not in known_columns:
                raise ConfigError(
                    f"--{option} {column}: {tables.tables[0].name} has no such column; "
                    f"give one of its columns: {join_names(column_names)}"
                )
    excluded = []
    for name in column_names:
        form = classify_type(tables.schema.field(name).type)
        has_chosen_kind = name in (*options.discrete, *options.continuous, *dict(options.cycle))
        if name in options.exclude:
            excluded.append(ExcludedColumn(name, "excluded by --exclude"))
        elif tables.normal_label is not None and name == tables.normal_label.column:
            excluded.append(ExcludedColumn(name, f"the label; rows where it is {tables.normal_label.value} are used"))
        elif name == tables.device_column:
            excluded.append(ExcludedColumn(name, "the device"))
        elif name == tables.time_column:
            excluded.append(ExcludedColumn(name, f"the {'reading' if tables.has_reading_rows else 'record'}'s time"))
        elif name == RECORD:
            excluded.append(ExcludedColumn(name, "the record's id"))
        elif form == "time" and tables.time_column is None and not has_chosen_kind:
            tables.time_column = name  # the first column of dates or timestamps
            excluded.append(ExcludedColumn(name, "the record's time"))
        else:
            tables.feature_columns.append(name)
    if not tables.feature_columns:
        raise InputError(
            f"{tables.description}: none of the columns ({join_names(column_names)}) can be a feature; "
            "name fewer columns in --exclude, or add columns to the table"
        )
    return [*excluded, *index_columns]


def collect_statistics(
    tables: InputTables, split: NDArray[np.uint8], excluded_features: Sequence[str]
) -> dict[str, ColumnStatistics]:
    """Collect the statistics from which the kind of each feature is inferred. This is the second pass over the input.

    Args:
        tables: The input with N records, which `index_records` has numbered.
        split: (N,) `Split` of each record. Most statistics use only training records.
        excluded_features: Names of features that are skipped.

    Returns:
        Statistics by feature name, in the order in which the features first appear in the input.
    """
    statistics: dict[str, ColumnStatistics] = {}
    # A row that is a record has one column for each feature. In other tables the features are found as they appear.
    if not tables.has_reading_rows:
        # If a cell of a column of times of day is none, a part of the column is text.
        fields = [field for table in tables.tables for field in table.schema]
        clocks = {field.name for field in fields if classify_type(field.type) == "clock"}
        forms: dict[str, ValueForm] = dict.fromkeys(clocks, "clock")
        statistics = {name: ColumnStatistics(name, forms.get(name, "number")) for name in tables.feature_columns}
    for readings in tables.iterate_readings():
        name = readings.feature_name
        if name in excluded_features:
            continue
        column = statistics.setdefault(name, ColumnStatistics(name))
        if tables.window is not None and isinstance(readings, EventReadings):
            tables.interval_by_sensor.setdefault(name, ReadingIntervals()).add(readings.rows, readings.times)
        is_training = split[readings.rows] == Split.TRAIN
        column.add(readings.values, readings.rows, is_training, readings.file_index)
    for name in tables.feature_columns:  # columns without any reading
        statistics.setdefault(name, ColumnStatistics(name))
    return statistics


def choose_kinds(
    statistics: list[ColumnStatistics], options: DataOptions, is_in_time_order: bool = False
) -> tuple[Schema, list[ExcludedColumn]]:
    """Decide for each column or feature of the input whether it is a measurement, a label or no feature.

    Args:
        statistics: The statistics of each column (wide layout) or feature (long layout).
        options: The kinds that the user has chosen, and the schema of the old model that is adapted.
        is_in_time_order: Whether the rows of the table are known to be in the order of time.

    Returns:
        The schema, in which the features of the old model come first; and the columns that cannot be features, with the
        reason.

    Raises:
        ConfigError: The options contradict each other or do not fit the values.
        InputError: No feature is left that could be scored.
    """
    statistics_by_name = {column.name: column for column in statistics}
    period_by_name = dict(options.cycle)
    kind_by_name = _collect_chosen_kinds(options)
    for name in (*kind_by_name, *period_by_name, *options.context, *options.once):
        if name not in statistics_by_name:
            raise ConfigError(
                f"--discrete, --continuous, --cycle, --context or --once names {name}, "
                f"but no feature is called {name}; "
                f"give one of these names: {join_names(sorted(statistics_by_name))}"
            )
    # With `--init-from`, the features of the old model are kept, even if the new table has no values of them.
    old_features = collapse_time_slots(options.base).features if options.base is not None else ()
    for feature in old_features:
        if feature.name in statistics_by_name:
            check_old_feature(feature, statistics_by_name[feature.name])
    old_names = {feature.name for feature in old_features}
    # Each decision is a feature or, if the column cannot be a feature, an excluded column with the reason.
    decisions = []
    measured: list[ColumnStatistics] = []  # only needed to decide whether few integers are ordered
    if any(map(has_few_integers, statistics)):
        measured = [column for column in statistics if is_measured(column, is_in_time_order)]
    for column in statistics:
        if column.name not in old_names:
            is_context = column.name in options.context
            kind, period = kind_by_name.get(column.name), period_by_name.get(column.name)
            decisions.append(infer_feature(column, kind, is_context, period, is_in_time_order, measured))
    features = old_features + tuple(decision for decision in decisions if isinstance(decision, Feature))
    excluded = [decision for decision in decisions if isinstance(decision, ExcludedColumn)]
    if all(feature.context for feature in features):  # context features are never scored
        reasons = "; ".join(f"{column.name}: {column.reason}" for column in excluded[:5])
        raise InputError(
            f"no feature is left that could be scored ({reasons or 'all features are --context'}); "
            "give a table with other columns, or name fewer columns in --context and --exclude"
        )
    return Schema(features), excluded


def _collect_chosen_kinds(options: DataOptions) -> dict[str, FeatureKind]:
    """Return by feature name the kind that the user has chosen with `--discrete` or `--continuous`.

    Raises:
        ConfigError: One feature is named in `--discrete` and also in `--continuous` or `--cycle`.
    """
    kinds: dict[str, FeatureKind] = dict.fromkeys(options.continuous, "continuous")
    for name in options.discrete:
        if name in kinds:
            raise ConfigError(f"--discrete and --continuous both name {name}; remove it from one of the two options")
        if name in dict(options.cycle):
            raise ConfigError(f"--discrete and --cycle both name {name}; remove it from one of the two options")
        kinds[name] = "discrete"
    return kinds


def _choose_window(options: DataOptions) -> tuple[Window | None, frozenset[str]]:
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


def create_array_file(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """Create a memory-mapped array of zeros in a new npy file.

    Disk space is allocated at once. Otherwise, if the disk became full later, a write to the array would end the
    process by the signal SIGBUS, without an error message.

    Args:
        path: The file. An existing file is replaced.
        dtype: Type of the elements.
        shape: Shape of the array.

    Raises:
        Unavailable: The disk has no space.
    """
    with map_write_errors(path):
        array = np.lib.format.open_memmap(path, "w+", np.dtype(dtype), shape)
        if hasattr(os, "posix_fallocate"):  # not on macOS
            with path.open("rb+") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


@contextmanager
def temporary_array_file(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> Iterator[np.memmap[Any, Any]]:
    """Return a context in which there is an array file as by `create_array_file`. It is deleted at the end."""
    try:
        yield create_array_file(path, dtype, shape)
    finally:
        path.unlink(missing_ok=True)


def encode_table(
    tables: InputTables,
    schema: Schema,
    folder: Path,
    ties: TiePolicy = "arrival",
    slot_counts: SlotCounts | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int16] | None]:
    """Write the matrix of normalised values to disk. This is the third pass over the input.

    Args:
        tables: The input with N records, which `index_records` has numbered.
        schema: The F features.
        folder: An existing folder, in which the files of the matrices are created.
        ties: "arrival" if readings of one record with the same time get different arrival ranks, "hold" if they get the
            same rank.
        slot_counts: The numbers of readings and of repeated ones are added to it.

    Returns:
        (values, ranks), both of shape (N, F). `values` are normalised numbers or label codes, NaN if missing. `ranks`
        are the positions of the readings in their record's order of arrival, −1 if missing. They are None if a row of
        the table is a record.
    """
    if tables.has_reading_rows:
        return _encode_readings_table(tables, schema, folder, ties, slot_counts or SlotCounts())
    values = create_array_file(folder / "values.npy", np.float32, (tables.num_records, len(schema)))
    _fill_in_chunks(values, np.nan)
    for readings in tables.iterate_readings():
        code = schema.code_by_name.get(readings.feature_name)
        if code is not None:
            values[readings.rows, code] = encode_readings(schema, code, readings)
    values.flush()
    return values, None


def _encode_readings_table(
    tables: InputTables, schema: Schema, folder: Path, ties: TiePolicy, slot_counts: SlotCounts
) -> tuple[NDArray[np.float32], NDArray[np.int16]]:
    """Write the matrices of values and arrival ranks of a table whose rows are not records.

    If a record has several readings of one feature, the first one in the input is used, as in a stream, or they are
    combined as `Window.per_slot` says. The number of readings that are left out is stored in
    `tables.skipped_by_reason`.

    Args:
        tables: The input with N records, which `index_records` has numbered.
        schema: The F features.
        folder: An existing folder, in which the files of the matrices are created.
        ties: "arrival" if readings of one record with the same time get different arrival ranks, "hold" if they get the
            same rank.
        slot_counts: The numbers of readings and of repeated ones are added to it.

    Returns:
        (values, ranks), both of shape (N, F). `values` are normalised numbers or label codes, NaN if missing. `ranks`
        are the positions of the readings in their record's order of arrival, −1 if missing.
    """
    shape = (tables.num_records, len(schema))
    values = create_array_file(folder / "values.npy", np.float32, shape)
    _fill_in_chunks(values, np.nan)
    with ExitStack() as stack:

        def create_temporary(name: str, dtype: DTypeLike) -> NDArray[Any]:
            """Create a matrix that is deleted when all readings are written."""
            return stack.enter_context(temporary_array_file(folder / f"{name}.npy", dtype, shape))

        # Matrices from which the arrival ranks are computed: position in the input, and event time.
        event_indexes, times = create_temporary("events", np.int64), create_temporary("times", np.int64)
        _fill_in_chunks(event_indexes, -1)  # −1: there is no reading yet
        first_readings = FirstReadings(schema, values, event_indexes, times, tables.has_unpivoted_rows)
        slots_by_sensor: dict[str, FirstReadings | SlotAggregator] = dict.fromkeys(schema.sensor_names, first_readings)
        aggregator: SlotAggregator | None = None
        combined_sensors = [name for name, rule in schema.per_slot_by_sensor.items() if rule != "first"]
        if combined_sensors:
            has_circular_means = any(cycle is not None for cycle in schema.slot_mean_cycles)
            aggregator = SlotAggregator(
                schema,
                values,
                event_indexes,
                times,
                numbers=create_temporary("slot_numbers", np.float64),
                counts=create_temporary("slot_counts", np.int32),
                sines=create_temporary("slot_sines", np.float64) if has_circular_means else None,
            )
            slots_by_sensor |= dict.fromkeys(combined_sensors, aggregator)
        for readings in tables.iterate_event_readings():
            slots = slots_by_sensor.get(readings.feature_name)
            if slots is None:  # it is no feature
                continue
            # The code (matrix column) of a sensor's feature for time slot k is first_code + k * code_step.
            first_code, code_step = schema.slot_layout_by_sensor[readings.feature_name]
            # All features of a sensor are normalised alike, so the first one is used to encode the readings.
            encoded = encode_readings(schema, first_code, readings)
            slots.add(readings, first_code + code_step * readings.time_slots, encoded)
            slot_counts.num_readings += len(encoded)
        slot_counts.num_repeated += first_readings.num_repeated
        if aggregator is not None:
            aggregator.finish(CHUNK_ROWS)
            slot_counts.num_repeated += aggregator.num_repeated
        if first_readings.num_repeated:
            tables.skipped_by_reason["repeated events (record and feature)"] = first_readings.num_repeated
        arrival_ranks = _rank_arrivals(values, event_indexes, times, folder, ties)
    values.flush()
    return values, arrival_ranks


def _fill_in_chunks(matrix: NDArray[Any], value: float) -> None:
    """Set all elements of a matrix on disk to `value`, `CHUNK_ROWS` rows at a time to limit the memory in use."""
    for start in range(0, len(matrix), CHUNK_ROWS):
        matrix[start : start + CHUNK_ROWS] = value


def encode_readings(schema: Schema, feature_code: int, readings: FeatureReadings) -> NDArray[np.float32]:
    """Convert M readings of one feature to normalised numbers or label codes, (M,) float32, NaN if missing.

    The arguments are those of `parse_readings`.
    """
    values = parse_readings(schema, feature_code, readings)
    return schema.normalise(np.full(len(values), feature_code), values).astype(np.float32)


def parse_readings(schema: Schema, feature_code: int, readings: FeatureReadings) -> NDArray[np.float64]:
    """Convert M readings of one feature to numbers in raw units or label codes.

    Args:
        schema: The features.
        feature_code: Index of the feature in the schema.
        readings: The M readings. Numbers may be written as text.

    Returns:
        (M,) numbers (measurements) or label codes, NaN if missing. A label's code is its index among the feature's
        labels. A label that is not among them has the number of labels as its code.
    """
    feature = schema.features[feature_code]
    if feature.kind == "continuous":
        numbers, _ = convert_to_numbers(readings.values, feature.period == SECONDS_PER_DAY)
        numbers[np.isinf(numbers)] = np.nan  # infinite readings are treated as missing
        return numbers
    # `labels` are the distinct labels of these readings, and `label_indexes` the index of each reading's label in them.
    label_indexes, labels = encode_labels(readings.values)
    code_by_label, unseen_code = schema.code_by_label[feature_code], len(feature.labels)
    labels_are_numbers = are_numbers(feature.labels)
    codes: list[float] = []  # the feature's code of each distinct label
    for label in labels:
        # "1.0" is the label "1", unless it is a label itself.
        code = code_by_label.get(label, code_by_label.get(normalize_number_text(label)))
        # An infinite number is treated as missing, and so is a text for "no value" among numbers.
        if code is None and (label in ("inf", "-inf") or (labels_are_numbers and is_no_value(label))):
            codes.append(np.nan)
        else:
            codes.append(unseen_code if code is None else code)
    # A missing value has the index −1, which selects the last element.
    return np.array([*codes, np.nan])[label_indexes]


def _rank_arrivals(
    values: NDArray[np.float32],
    event_indexes: NDArray[np.int64],
    times: NDArray[np.int64],
    folder: Path,
    ties: TiePolicy,
) -> NDArray[np.int16]:
    """Write to disk the arrival rank of each reading: its position in its record's order of arrival.

    Readings are ranked by time, and readings of the same time by their order in the input. Readings without a time come
    last, in the order of the input.

    Args:
        values: (N, F) values of N records and F features, NaN if missing.
        event_indexes: (N, F) position of each reading in the input, −1 if missing.
        times: (N, F) times in microseconds since 1970, `NO_TIME` if unknown.
        folder: The folder in which the file is created.
        ties: With "hold", readings of a record with the same time get the same rank. Readings without a time get
            different ranks in any case.

    Returns:
        (N, F) int16 ranks from 0, −1 if missing.
    """
    ranks = create_array_file(folder / "ranks.npy", np.int16, values.shape)
    # Sort keys that are later than any real time: readings without a time come last, then missing readings.
    missing_key = np.iinfo(np.int64).max
    unknown_time_key = missing_key - 1
    for start in range(0, len(values), CHUNK_ROWS):
        chunk = slice(start, start + CHUNK_ROWS)
        is_present = np.isfinite(values[chunk])
        time_keys = np.where(times[chunk] == NO_TIME, unknown_time_key, times[chunk])
        sort_keys = np.where(is_present, time_keys, missing_key)
        # In each row: the columns (features) of the record in order of arrival. `lexsort` sorts by its last key first,
        # so the position in the input decides only between equal times.
        columns_by_arrival = np.lexsort((event_indexes[chunk], sort_keys), axis=1)
        # In each row: the ranks of the readings in order of arrival, 0, 1, 2, ... if all ranks are different.
        ranks_by_arrival = np.broadcast_to(np.arange(columns_by_arrival.shape[1]), columns_by_arrival.shape)
        if ties == "hold":
            # The rank increases at each new time, and at each reading without a time. `prepend` makes the first time a
            # new one, so that the first rank is 0. Ranks of missing readings, which are last, are replaced below.
            times_by_arrival = np.take_along_axis(time_keys, columns_by_arrival, 1)
            is_new_time = np.diff(times_by_arrival, axis=1, prepend=times_by_arrival[:, :1] - 1) != 0
            ranks_by_arrival = np.cumsum(is_new_time | (times_by_arrival == unknown_time_key), 1) - 1
        chunk_ranks = np.empty_like(columns_by_arrival)
        np.put_along_axis(chunk_ranks, columns_by_arrival, ranks_by_arrival, 1)  # back to the order of features
        ranks[chunk] = np.where(is_present, chunk_ranks, -1)
    ranks.flush()
    return ranks


def compute_fingerprint(
    schema: Schema,
    values: NDArray[np.float32],
    arrival_ranks: NDArray[np.int16] | None,
    split: NDArray[np.uint8],
) -> str:
    """Return a hexadecimal digest of all data that training reads.

    It is used to check that an interrupted run is continued with the same data.

    Args:
        schema: The F features.
        values: (N, F) normalised values of N records.
        arrival_ranks: (N, F) positions of the readings in their record's order of arrival. None for a wide table.
        split: (N,) `Split` of each record.
    """
    digest = hashlib.blake2b(schema.fingerprint.encode(), digest_size=8)
    for matrix in (values, arrival_ranks, split):
        if matrix is not None:
            # The matrices may be larger than memory, so they are read in chunks.
            for start in range(0, len(matrix), CHUNK_ROWS):
                digest.update(np.ascontiguousarray(matrix[start : start + CHUNK_ROWS]).data)
    return digest.hexdigest()
