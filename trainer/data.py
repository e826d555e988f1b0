"""Prepare a training table: convert Parquet files to a matrix of normalised values and split its records.

The input is read three times, one batch at a time. The first pass counts the records. The second collects the
statistics from which the kind of each feature is inferred; it uses training records only, so that validation and
calibration records stay unseen. The third writes the normalised values to a memory-mapped matrix, so tables may be
larger than memory.
"""

from __future__ import annotations

import enum
import hashlib
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from deformer_stream.calibration.conformal import TiePolicy
from deformer_stream.engine.events import NO_TIME
from deformer_stream.errors import ConfigError, InputError, map_write_errors
from deformer_stream.model.schema import Feature, FeatureKind, Schema, format_label
from deformer_stream.model.time_slots import collapse_time_slots, expand_time_slots
from deformer_stream.model.windows import Window, format_duration
from trainer.feature_kinds import ColumnStatistics, ExcludedColumn, check_old_feature, infer_feature
from trainer.tables import (
    DEVICE,
    FEATURE,
    RECORD,
    TIME,
    VALUE,
    FeatureReadings,
    InputTables,
    Layout,
    classify_type,
    encode_labels,
    index_records,
    open_tables,
    parse_numbers,
)


class Split(enum.IntEnum):
    """The part of the table to which a record belongs, as stored in `PreparedTable.split`.

    Weights are fitted to TRAIN records and chosen on VALIDATION records. The alert rule is calibrated on CALIBRATION
    records. LEFT_OUT records are suspected anomalies that training must not see. TEST records, which only experiments
    have, are used for their final figures.
    """

    TRAIN = 0
    VALIDATION = 1
    CALIBRATION = 2
    LEFT_OUT = 3
    TEST = 4


VALIDATION_SHARE = 0.1
"""Share of the records that are not used for calibration."""

MIN_RECORDS = 20
"""Smallest number of records that is accepted for training."""

MAX_FEATURES = 4096
"""Largest number of features of a record. The time to score a record grows with the square of their number."""

CHUNK_ROWS = 16_384
"""Rows of a matrix that are processed at once, so that a large matrix need not fit into memory."""


@dataclass(frozen=True, slots=True)
class DataOptions:
    """How to read the training tables. Columns are given by name.

    Attributes:
        layout: The layout of the tables. None to infer it from the column names.
        label: The column that tells normal records from others, never a feature.
        normal: The value of the label in normal records; other records are dropped.
        exclude: Columns that are not used.
        context: Features that condition the others and are never scored.
        discrete: Features whose values are labels.
        continuous: Features whose values are measurements.
        cycle: Features whose values are positions on a cycle, each with its period.
        calibration_share: Share of the records that are set aside for calibration.
        seed: Seed of the split.
        window: The window of time that makes a record. None if records are given by name.
        once: Sensors that report once in a window that is cut into time slots.
        base: Schema of the model that is adapted (`--init-from`). Its features come first and stay as they are.
        ties: Whether readings of one record with the same time are scored in their logged order or together.
    """

    layout: Layout | None = None
    label: str | None = None
    normal: str | None = None
    exclude: tuple[str, ...] = ()
    context: tuple[str, ...] = ()
    discrete: tuple[str, ...] = ()
    continuous: tuple[str, ...] = ()
    cycle: tuple[tuple[str, float], ...] = ()
    calibration_share: float = 0.2
    seed: int = 0
    window: Window | None = None
    once: tuple[str, ...] = ()
    base: Schema | None = None
    ties: TiePolicy = "arrival"


@dataclass(frozen=True)
class PreparedTable:
    """A training table of N records with F features, ready to be sampled.

    Attributes:
        schema: The features.
        excluded_columns: Columns that are no features, with the reason.
        values: (N, F) float32 on disk: normalised numbers or label codes, NaN if missing.
        arrival_ranks: (N, F) int16 on disk: position of each reading in its record's order of arrival, −1 if missing.
            None for a wide table, which has no arrival order.
        split: (N,) uint8, the `Split` of each record.
        layout: The layout of the input.
        time_column: The column with the time, if there is one.
        missing_by_feature: Number of missing readings by feature, over all records.
        infinite_by_feature: Number of infinite readings by feature, which are treated as missing.
        skipped_by_reason: Number of records or readings that were left out, by reason.
        fingerprint: Hexadecimal digest of schema, values, arrival order and split.
        ties: With "hold", readings of a record with the same time have the same arrival rank.
    """

    schema: Schema
    excluded_columns: tuple[ExcludedColumn, ...]
    values: NDArray[np.float32]
    arrival_ranks: NDArray[np.int16] | None
    split: NDArray[np.uint8]
    layout: Layout
    time_column: str | None
    missing_by_feature: dict[str, int]
    infinite_by_feature: dict[str, int]
    skipped_by_reason: dict[str, int]
    fingerprint: str = field(repr=False)
    ties: TiePolicy = "arrival"

    def select_rows(self, part: Split) -> NDArray[np.int64]:
        """Return the row numbers of the records in one part of the split, ascending."""
        return np.flatnonzero(self.split == part)

    def summarize(self) -> dict[str, Any]:
        """Return the facts about the data that the model's manifest records, ready for JSON."""
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
            "refused": self.infinite_by_feature,
            "skipped": self.skipped_by_reason,
            "excluded": {column.name: column.reason for column in self.excluded_columns},
        }


def prepare_table(paths: Sequence[Path], options: DataOptions, folder: Path) -> PreparedTable:
    """Read Parquet files, infer the features, and write the matrix of normalised values.

    Args:
        paths: Parquet files and folders of Parquet files.
        options: How to read them.
        folder: An existing folder for the matrix files.

    Raises:
        InputError: A file cannot be used.
        ConfigError: An option does not fit the files.
        Unavailable: The disk has no space for the matrix.
    """
    window, once = _choose_window(options)
    tables = open_tables(paths, options.layout, options.label, options.normal, window)
    excluded = _choose_columns(tables, options)
    index_records(tables)
    if tables.num_records < MIN_RECORDS:
        raise InputError(
            f"{tables.files[0]}: {tables.num_records} records to train on are too few; "
            f"give at least {MIN_RECORDS}, better 1000"
        )
    split = assign_split(tables.num_records, options.calibration_share, options.seed)
    statistics = collect_statistics(tables, split, options.exclude)
    schema, excluded_by_values = choose_kinds(list(statistics.values()), options)
    schema = repeat_by_time_slot(schema, window, once)
    values, arrival_ranks = encode_table(tables, schema, folder, options.ties)
    used = {name: column for name, column in statistics.items() if name in schema.sensor_names}
    return PreparedTable(
        schema=schema,
        excluded_columns=(*excluded, *excluded_by_values),
        values=values,
        arrival_ranks=arrival_ranks,
        split=split,
        layout=tables.layout,
        time_column=tables.time_column,
        missing_by_feature={name: column.num_missing for name, column in used.items() if column.num_missing},
        infinite_by_feature={name: column.num_infinite for name, column in used.items() if column.num_infinite},
        skipped_by_reason=tables.skipped_by_reason,
        fingerprint=compute_fingerprint(schema, values, arrival_ranks, split),
        ties=options.ties,
    )


def assign_split(num_records: int, calibration_share: float, seed: int) -> NDArray[np.uint8]:
    """Assign each of N records at random to training, validation or calibration.

    Returns:
        (N,) `Split` values. The shares are exact; the choice depends on the number of records and the seed alone.

    Raises:
        ConfigError: Too few records would be left for training.
    """
    num_calibration = max(1, round(calibration_share * num_records))
    num_validation = max(4, round(VALIDATION_SHARE * (num_records - num_calibration)))
    if num_records - num_calibration - num_validation < MIN_RECORDS // 2:
        raise ConfigError(
            f"--calibration-share {calibration_share:g} leaves too few of {num_records} records to train on; "
            "lower it or give more records"
        )
    split = np.full(num_records, Split.TRAIN, np.uint8)
    split[:num_calibration] = Split.CALIBRATION
    split[num_calibration : num_calibration + num_validation] = Split.VALIDATION
    np.random.default_rng([seed, 0x5B117]).shuffle(split)
    return split


def _choose_columns(tables: InputTables, options: DataOptions) -> list[ExcludedColumn]:
    """Set the columns that may be features (wide layout) and the time column.

    Returns:
        The columns that are no features, with the reason.

    Raises:
        ConfigError: An option names a column that does not exist, or needs times that the table does not have.
        InputError: No column is left that could be a feature.
    """
    column_names = tables.schema.names
    if options.ties == "hold" and (tables.layout == "wide" or TIME not in column_names):
        raise ConfigError("--ties hold: the table has no time of each reading; use a long table with a column time")
    if tables.layout == "long":
        tables.time_column = TIME if TIME in column_names else None
        owner = RECORD if tables.window is None else DEVICE
        used = (owner, FEATURE, VALUE, tables.time_column, tables.label_column)
        return [ExcludedColumn(name, "not a column of the long layout") for name in column_names if name not in used]
    cyclic = tuple(dict(options.cycle))
    columns_by_option = {"exclude": options.exclude, "context": options.context, "discrete": options.discrete}
    columns_by_option |= {"continuous": options.continuous, "cycle": cyclic}
    for option, columns in columns_by_option.items():
        for column in columns:
            if column not in column_names:
                raise ConfigError(
                    f"--{option} {column}: {tables.files[0]} has no such column; it has {_list_names(column_names)}"
                )
    excluded = []
    for name in column_names:
        form = classify_type(tables.schema.field(name).type)
        has_chosen_kind = name in (*options.discrete, *options.continuous, *cyclic)
        if name in options.exclude:
            excluded.append(ExcludedColumn(name, "excluded by --exclude"))
        elif name == tables.label_column:
            excluded.append(ExcludedColumn(name, f"the label; rows where it is {tables.normal_label} are used"))
        elif name == RECORD:
            excluded.append(ExcludedColumn(name, "the record's id"))
        elif form == "time" and tables.time_column is None and not has_chosen_kind:
            tables.time_column = name
            excluded.append(ExcludedColumn(name, "the record's time"))
        else:
            tables.feature_columns.append(name)
    if not tables.feature_columns:
        raise InputError(
            f"{tables.files[0]}: no column is left that could be a feature; columns: {_list_names(column_names)}"
        )
    return excluded


def _list_names(names: Sequence[str]) -> str:
    """Return up to eight names separated by commas, with an ellipsis if there are more."""
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")


def collect_statistics(
    tables: InputTables, split: NDArray[np.uint8], excluded_features: Sequence[str]
) -> dict[str, ColumnStatistics]:
    """Collect the statistics of each feature from the training records: the second pass over the input.

    Args:
        tables: The input.
        split: (N,) `Split` of each record.
        excluded_features: Features that are skipped.

    Returns:
        Statistics by feature name, in order of first appearance.
    """
    statistics = {name: ColumnStatistics(name) for name in tables.feature_columns}
    for readings in tables.iterate_readings():
        name = readings.feature_name
        if name in excluded_features:
            continue
        column = statistics.setdefault(name, ColumnStatistics(name))
        is_training = split[readings.rows] == Split.TRAIN
        column.add(readings.values, readings.rows, is_training, parse_text=tables.layout == "long")
    return statistics


def choose_kinds(statistics: list[ColumnStatistics], options: DataOptions) -> tuple[Schema, list[ExcludedColumn]]:
    """Decide for each column whether it is a measurement, a label or no feature.

    Args:
        statistics: The statistics of each column.
        options: The kinds that the user has chosen, and the model that is adapted.

    Returns:
        The schema, and the columns that cannot be features.

    Raises:
        ConfigError: The options contradict each other or do not fit the values.
        InputError: No feature is left that could be scored.
    """
    statistics_by_name = {column.name: column for column in statistics}
    periods = dict(options.cycle)
    kinds = _collect_chosen_kinds(options)
    for name in (*kinds, *periods, *options.context, *options.once):
        if name not in statistics_by_name:
            raise ConfigError(f"no feature is called {name}; there are {_list_names(sorted(statistics_by_name))}")
    old_features = collapse_time_slots(options.base).features if options.base is not None else ()
    old_names = {feature.name for feature in old_features}
    kept = tuple(
        check_old_feature(feature, statistics_by_name[feature.name]) if feature.name in statistics_by_name else feature
        for feature in old_features
    )
    inferred = [
        infer_feature(column, kinds.get(column.name), column.name in options.context, periods.get(column.name))
        for column in statistics
        if column.name not in old_names
    ]
    features = kept + tuple(feature for feature in inferred if isinstance(feature, Feature))
    excluded = [column for column in inferred if isinstance(column, ExcludedColumn)]
    if all(feature.context for feature in features):
        reasons = "; ".join(f"{column.name}: {column.reason}" for column in excluded[:5])
        raise InputError(
            f"no feature is left to be scored ({reasons or 'all features are --context'}); "
            "give other columns or change the options"
        )
    return Schema(features), excluded


def _collect_chosen_kinds(options: DataOptions) -> dict[str, FeatureKind]:
    """Return the kind that the user has chosen by feature name; raise ConfigError if a feature has two."""
    kinds: dict[str, FeatureKind] = dict.fromkeys(options.continuous, "continuous")
    for name in options.discrete:
        if name in kinds:
            raise ConfigError(f"--discrete and --continuous both name {name}; choose one")
        if name in dict(options.cycle):
            raise ConfigError(f"--discrete and --cycle both name {name}; choose one")
        kinds[name] = "discrete"
    return kinds


def _choose_window(options: DataOptions) -> tuple[Window | None, frozenset[str]]:
    """Return the window that makes a record and the sensors that report once in it.

    Both come from the model that is adapted (`--init-from`) if there is one.

    Raises:
        ConfigError: The options ask for another window than that of the model that is adapted.
    """
    base = options.base
    if base is None:
        return options.window, frozenset(options.once)
    if options.window not in (None, base.window):
        old_records = "given by name" if base.window is None else f"windows of {format_duration(base.window.width)}"
        old_slots = f" in {base.window.slots} slots" if base.window is not None and base.window.slots > 1 else ""
        raise ConfigError(
            f"--init-from: the old model's records are {old_records}{old_slots}; leave --window and --slots out"
        )
    return base.window, frozenset(options.once) | {feature.name for feature in base.features if feature.sensor is None}


def repeat_by_time_slot(schema: Schema, window: Window | None, once: Collection[str]) -> Schema:
    """Return a schema in which a sensor has one feature for each time slot of the window.

    Args:
        schema: A schema with one feature for each sensor.
        window: The window that makes a record, cut into time slots. None returns the schema unchanged.
        once: Sensors that report once in a window and so keep one feature.

    Raises:
        ConfigError: There would be too many features, or two of the same name.
    """
    if window is None:
        return schema
    num_features = len(schema) * window.slots
    if num_features > MAX_FEATURES:
        raise ConfigError(
            f"--slots {window.slots}: {num_features} features, at most {MAX_FEATURES}; choose fewer slots"
        )
    try:
        return expand_time_slots(schema, window, once)
    except ValueError as error:
        raise ConfigError(f"--slots {window.slots}: {error}; rename a feature") from None


def create_array_file(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """Create a memory-mapped array of zeros in a new npy file.

    Disk space is allocated at once. Otherwise a write to a page of a full disk would end the process by SIGBUS, without
    an error message.

    Raises:
        Unavailable: The disk has no space.
    """
    with map_write_errors(path):
        array = np.lib.format.open_memmap(path, "w+", np.dtype(dtype), shape)
        if hasattr(os, "posix_fallocate"):
            with path.open("rb+") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def encode_table(
    tables: InputTables, schema: Schema, folder: Path, ties: TiePolicy = "arrival"
) -> tuple[NDArray[np.float32], NDArray[np.int16] | None]:
    """Write the matrix of normalised values: the third pass over the input.

    Args:
        tables: The input.
        schema: The features.
        folder: The folder for the matrix files.
        ties: Whether readings of one record with the same time get different arrival ranks ("arrival") or the same.

    Returns:
        `PreparedTable.values` and `PreparedTable.arrival_ranks`.
    """
    if tables.layout == "long":
        return _encode_long_table(tables, schema, folder, ties)
    values = create_array_file(folder / "values.npy", np.float32, (tables.num_records, len(schema)))
    _fill_in_chunks(values, np.nan)
    for readings in tables.iterate_readings():
        code = schema.code_by_name.get(readings.feature_name)
        if code is not None:
            values[readings.rows, code] = encode_readings(schema, code, readings, parse_text=False)
    values.flush()
    return values, None


def _encode_long_table(
    tables: InputTables, schema: Schema, folder: Path, ties: TiePolicy
) -> tuple[NDArray[np.float32], NDArray[np.int16]]:
    """Write the matrices of values and arrival ranks of a long table; arguments and result as in `encode_table`.

    If a record has several readings of one feature, the first one counts, as in a stream.
    """
    num_features = len(schema)
    shape = (tables.num_records, num_features)
    values = create_array_file(folder / "values.npy", np.float32, shape)
    event_indexes = create_array_file(folder / "events.npy", np.int64, shape)
    times = create_array_file(folder / "times.npy", np.int64, shape)
    _fill_in_chunks(values, np.nan)
    _fill_in_chunks(event_indexes, -1)
    num_repeated = 0
    for readings in tables.iterate_readings():
        is_feature = readings.feature_name in schema.slot_layout_by_sensor
        if not is_feature or readings.event_indexes is None or readings.time_slots is None:
            continue
        first_code, code_step = schema.slot_layout_by_sensor[readings.feature_name]
        feature_codes = first_code + code_step * readings.time_slots
        cells = readings.rows * num_features + feature_codes
        _, first = np.unique(cells, return_index=True)
        first = first[event_indexes[readings.rows[first], feature_codes[first]] < 0]  # not set by an earlier batch
        num_repeated += len(readings.rows) - len(first)
        rows, feature_codes = readings.rows[first], feature_codes[first]
        values[rows, feature_codes] = encode_readings(schema, first_code, readings, parse_text=True)[first]
        event_indexes[rows, feature_codes] = readings.event_indexes[first]
        if readings.times is not None:
            times[rows, feature_codes] = readings.times[first]
    if num_repeated:
        tables.skipped_by_reason["repeated events (record and feature)"] = num_repeated
    arrival_ranks = _rank_arrivals(values, event_indexes, times, folder, ties)
    for name in ("events.npy", "times.npy"):
        (folder / name).unlink()
    values.flush()
    return values, arrival_ranks


def _fill_in_chunks(matrix: NDArray[Any], value: float) -> None:
    """Set all elements of a matrix on disk to a value, a part at a time to limit memory."""
    for start in range(0, len(matrix), CHUNK_ROWS):
        matrix[start : start + CHUNK_ROWS] = value


def encode_readings(
    schema: Schema, feature_code: int, readings: FeatureReadings, parse_text: bool
) -> NDArray[np.float32]:
    """Convert M readings of one feature to the model's units.

    Args:
        schema: The features.
        feature_code: Index of the feature in the schema.
        readings: M readings.
        parse_text: Whether numbers may be written as text, as in the long layout.

    Returns:
        (M,) normalised numbers or label codes, NaN if missing. The code of a label that did not occur in training is
        the number of labels.
    """
    feature = schema.features[feature_code]
    if feature.kind == "continuous":
        numbers, _ = parse_numbers(readings.values)
        numbers[np.isinf(numbers)] = np.nan
        normalised: NDArray[np.float64] = schema.normalise(np.full(len(numbers), feature_code), numbers)
        return normalised.astype(np.float32)
    label_indexes, labels = encode_labels(readings.values)
    code_by_label, unseen_code = schema.code_by_label[feature_code], len(feature.labels)
    # An infinite number is a missing reading, while the word "inf" may be a label.
    are_numbers = parse_text or classify_type(readings.values.type) == "number"
    codes: list[float] = []
    for label in labels:
        if are_numbers and label in ("inf", "-inf"):
            codes.append(np.nan)
        elif parse_text:
            codes.append(code_by_label.get(label, code_by_label.get(_normalize_number_text(label), unseen_code)))
        else:
            codes.append(code_by_label.get(label, unseen_code))
    return np.array([*codes, np.nan])[label_indexes].astype(np.float32)  # index −1 selects the last element


def _normalize_number_text(text: str) -> str:
    """Return a number's text as labels spell it ("1" for "1.0"), and any other text unchanged."""
    try:
        return format_label(float(text))
    except ValueError:
        return text


def _rank_arrivals(
    values: NDArray[np.float32],
    event_indexes: NDArray[np.int64],
    times: NDArray[np.int64],
    folder: Path,
    ties: TiePolicy,
) -> NDArray[np.int16]:
    """Write the arrival rank of each reading in its record.

    Readings are ranked by time. Readings with the same time, and those without one, keep their order in the input.

    Args:
        values: (N, F) values, NaN if missing.
        event_indexes: (N, F) position of each reading in the input.
        times: (N, F) microseconds since 1970 or `NO_TIME`.
        folder: The folder for the matrix file.
        ties: With "hold", readings of a record with the same time get the same rank.

    Returns:
        (N, F) ranks from 0, −1 if missing.
    """
    ranks = create_array_file(folder / "ranks.npy", np.int16, values.shape)
    missing_time = np.iinfo(np.int64).max  # missing readings are sorted to the end
    unknown_time = missing_time - 1
    for start in range(0, len(values), CHUNK_ROWS):
        chunk = slice(start, start + CHUNK_ROWS)
        is_present = np.isfinite(values[chunk])
        time = np.where(times[chunk] == NO_TIME, unknown_time, times[chunk])
        order = np.lexsort((event_indexes[chunk], np.where(is_present, time, missing_time)), axis=1)
        positions = np.broadcast_to(np.arange(order.shape[1]), order.shape)
        if ties == "hold":
            sorted_time = np.take_along_axis(time, order, 1)
            is_new_time = np.diff(sorted_time, axis=1, prepend=sorted_time[:, :1] - 1) != 0
            positions = np.cumsum(is_new_time | (sorted_time == unknown_time), 1) - 1
        chunk_ranks = np.empty_like(order)
        np.put_along_axis(chunk_ranks, order, positions, 1)
        ranks[chunk] = np.where(is_present, chunk_ranks, -1)
    ranks.flush()
    return ranks


def compute_fingerprint(
    schema: Schema,
    values: NDArray[np.float32],
    arrival_ranks: NDArray[np.int16] | None,
    split: NDArray[np.uint8],
) -> str:
    """Return a hexadecimal digest of everything that training reads, to tell whether the data has changed."""
    digest = hashlib.blake2b(schema.fingerprint.encode(), digest_size=8)
    for matrix in (values, arrival_ranks, split):
        if matrix is not None:
            for start in range(0, len(matrix), CHUNK_ROWS):
                digest.update(np.ascontiguousarray(matrix[start : start + CHUNK_ROWS]).data)
    return digest.hexdigest()
