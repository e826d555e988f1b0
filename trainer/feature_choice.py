"""Choose the features of a training table: which columns they are, and of which kind (measurement or label).

Columns are left out because of their names, types and options, before their values are read. The kinds follow from the
statistics of the values in training records, which are collected in the second pass over the input (`trainer.prepare`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model.schema import Feature, FeatureKind, Schema
from deformer_stream.model.time_slots import collapse_time_slots
from deformer_stream.tables.table import join_names
from trainer.data import DataOptions, Split
from trainer.feature_kinds import (
    ColumnStatistics,
    ExcludedColumn,
    check_old_feature,
    has_few_integers,
    infer_feature,
    is_measured,
)
from trainer.repeated_readings import ReadingIntervals
from trainer.tables import FEATURE, RECORD, VALUE, EventReadings, InputTables, ValueForm, classify_type


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """What the columns of the input are, as far as names, types and options show it.

    Attributes:
        time_column: The column with the time of the record (wide) or of the readings. None if there is none.
        feature_columns: The columns that may be features. Empty for the long layout, whose features are values.
        excluded: The columns that cannot be features, with the reason.
    """

    time_column: str | None
    feature_columns: list[str]
    excluded: list[ExcludedColumn]


def choose_columns(tables: InputTables, options: DataOptions) -> ColumnChoice:
    """Decide from names, types and options which columns of the input are the time or may be features.

    Raises:
        ConfigError: An option names a column that does not exist, or needs times that the table does not have.
        InputError: No column is left that could be a feature.
    """
    column_names, time_column = tables.schema.names, tables.time_column
    if options.ties == "hold" and not (tables.has_reading_rows and time_column):
        raise ConfigError(
            "--ties hold cannot be used, because the table does not contain the time of each reading; "
            "give a long table with a column named time"
        )
    index_columns = [ExcludedColumn(name, "index of the data frame") for name in tables.index_columns]
    if tables.layout == "long":
        owner_column = RECORD if tables.window is None else tables.device_column
        used_columns = (owner_column, FEATURE, VALUE, time_column, tables.label_column)
        unused_columns = [name for name in column_names if name not in used_columns]
        excluded = [ExcludedColumn(name, "not a column of the long layout") for name in unused_columns]
        return ColumnChoice(time_column, [], [*excluded, *index_columns])
    _check_named_columns(tables, options)
    if time_column is None:
        time_column = _find_time_column(tables, options)
    excluded, feature_columns = [], []
    for name in column_names:
        reason = _explain_exclusion(name, time_column, tables, options)
        if reason is None:
            feature_columns.append(name)
        else:
            excluded.append(ExcludedColumn(name, reason))
    if not feature_columns:
        raise InputError(
            f"{tables.description}: none of the columns ({join_names(column_names)}) can be a feature; "
            "name fewer columns in --exclude, or add columns to the table"
        )
    return ColumnChoice(time_column, feature_columns, [*excluded, *index_columns])


def _check_named_columns(tables: InputTables, options: DataOptions) -> None:
    """Check that the columns of a wide table that options name exist and can be features.

    Raises:
        ConfigError: An option names another column.
    """
    columns_by_option = {"exclude": options.exclude, "context": options.context, "discrete": options.discrete}
    columns_by_option |= {"continuous": options.continuous, "cycle": tuple(dict(options.cycle))}
    columns_by_option["fill-values"] = options.features_with_fill_values
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
                    f"give one of its columns: {join_names(tables.schema.names)}"
                )


def _find_time_column(tables: InputTables, options: DataOptions) -> str | None:
    """Return the first column of dates or timestamps that no option makes a feature or excludes, None without one."""
    features = {*options.discrete, *options.continuous, *dict(options.cycle)}
    for column in tables.schema:
        is_time = classify_type(column.type) == "time" and column.name not in features
        if is_time and _explain_exclusion(column.name, None, tables, options) is None:
            return str(column.name)
    return None


def _explain_exclusion(name: str, time_column: str | None, tables: InputTables, options: DataOptions) -> str | None:
    """Return why a column of a wide table cannot be a feature, None if it can.

    Args:
        name: The column.
        time_column: The column with the time, None if there is none.
        tables: The input.
        options: The options of the user.
    """
    if name in options.exclude:
        return "excluded by --exclude"
    if tables.normal_label is not None and name == tables.normal_label.column:
        return f"the label; rows where it is {tables.normal_label.value} are used"
    if name == tables.device_column:
        return "the device"
    if name == time_column:
        return f"the {'reading' if tables.has_reading_rows else 'record'}'s time"
    return "the record's id" if name == RECORD else None


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
    statistics: list[ColumnStatistics], options: DataOptions, is_in_time_order: bool = False, remark: str = ""
) -> tuple[Schema, list[ExcludedColumn]]:
    """Decide for each column or feature of the input whether it is a measurement, a label or no feature.

    Args:
        statistics: The statistics of each column (wide layout) or feature (long layout).
        options: The kinds that the user has chosen, and the schema of the old model that is adapted.
        is_in_time_order: Whether the rows of the table are known to be in the order of time.
        remark: What to check as well if no feature is left.

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
    named = (*kind_by_name, *period_by_name, *options.context, *options.once, *options.features_with_fill_values)
    for name in named:
        if name not in statistics_by_name:
            raise ConfigError(
                f"--discrete, --continuous, --cycle, --fill-values, --context or --once names {name}, "
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
    excluded = [
        replace(decision, has_unsuitable_values=True) for decision in decisions if isinstance(decision, ExcludedColumn)
    ]
    if all(feature.context for feature in features):  # context features are never scored
        reasons = "; ".join(f"{column.name}: {column.reason}" for column in excluded[:5])
        raise InputError(
            f"no feature is left that could be scored ({reasons or 'all features are --context'}); "
            f"give a table with other columns, or name fewer columns in --context and --exclude{remark}"
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


def count_missing(schema: Schema, statistics: dict[str, ColumnStatistics]) -> dict[str, int]:
    """Return for each feature the number of missing readings, if there are any.

    Texts among the numbers of a measurement count as missing. Names of features are those of sensors.
    """
    num_missing = {name: column.num_missing for name, column in statistics.items()}
    for column in _find_columns_with_texts(schema, statistics):
        num_missing[column.name] += column.num_other_texts
    return {name: count for name, count in num_missing.items() if count}


def collect_texts(schema: Schema, statistics: dict[str, ColumnStatistics]) -> dict[str, tuple[int, str]]:
    """Return for each measurement the number of texts among its numbers and the most frequent one, if there are any."""
    return {
        column.name: (column.num_other_texts, column.most_frequent_text)
        for column in _find_columns_with_texts(schema, statistics)
    }


def _find_columns_with_texts(schema: Schema, statistics: dict[str, ColumnStatistics]) -> list[ColumnStatistics]:
    """Return the statistics of those measurements whose columns contain texts that are not numbers."""
    kind_by_sensor = {feature.sensor_name: feature.kind for feature in schema.features}
    columns = statistics.values()
    return [column for column in columns if column.num_other_texts and kind_by_sensor[column.name] == "continuous"]
