"""The data of a training: how its tables are read, the split of the records, and the facts about a prepared table.

`trainer.prepare` and `trainer.irregular_table` read the tables.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import TiePolicy, choose_num_calibration
from deformer_stream.counts import format_count
from deformer_stream.errors import ConfigError
from deformer_stream.model.schema import Schema
from deformer_stream.model.windows import Window
from deformer_stream.settings.base import Layout
from deformer_stream.tables.table import TableOptions
from trainer.array_files import CHUNK_ROWS
from trainer.feature_kinds import ExcludedColumn
from trainer.settings import TrainConfig
from trainer.tables import DEVICE, TooFewRecordsError

VALIDATION_SHARE = 0.1
"""Share of validation records among the records that are not used for calibration."""

EMPTY_RECORDS = "records without a usable reading"
"""The reason for leaving a record of `Split.EMPTY` out."""

MIN_VALIDATION = 4
"""Smallest number of validation records, so that even a small table has some."""

MIN_RECORDS = 20
"""Smallest number of normal records that a training table must have."""


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
        fill_values: Values that stand for a missing reading, each with its feature; None for all features.
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
    fill_values: tuple[tuple[str | None, str], ...] = ()
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
    def features_with_fill_values(self) -> tuple[str, ...]:
        """The features with fill values of their own."""
        return tuple(dict.fromkeys(name for name, _ in self.fill_values if name is not None))

    @property
    def named_columns(self) -> frozenset[str]:
        """The columns that the user has named to be features."""
        return frozenset((*self.discrete, *self.continuous, *self.context, *dict(self.cycle)))


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
        exclude=settings.exclude,
        context=settings.context,
        discrete=settings.discrete,
        continuous=settings.continuous,
        cycle=settings.cycle,
        fill_values=settings.fill_values,
        # With --folds, the calibration records of the first model are one fold.
        calibration_share=1 / settings.folds if settings.folds else settings.calibration_share,
        seed=settings.seed,
        window=window,
        once=settings.once,
        base=base,
        ties=settings.ties,
        order=settings.order if settings.order in ("arrival", "time") else None,
        units=settings.units,
        time_column=settings.time_column,
        device_column=None if settings.device_column == DEVICE else settings.device_column,
        reading=TableOptions.from_settings(settings),
    )


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
