"""Prepare a table of irregular readings (`--irregular`): ragged arrays of normalised values with their own times.

A sensor reports any number of times in a record, and no reading is assigned to a time slot. The readings of a record
are in the order in which a stream would deliver them (`choose_reading_order`). If the input looks like an order of
arrival, with some late readings, its order is kept. Otherwise the readings are sorted by time. Only these are left out:
nulls, values that a stream rejects, readings without a time, readings of sensors that are no features, and exact
repetitions of a reading. A repetition has the same record, sensor, time and value: a sender has delivered it twice.
Each kind is counted.

The tables are read three times, as tables of other records are (`trainer.prepare`). The third pass appends the readings
to files. They are then placed by record and sorted in chunks, so tables may be larger than memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from deformer_stream.engine.events import NO_TIME
from deformer_stream.errors import ConfigError, map_write_errors
from deformer_stream.model.reading_times import ReadingTimes
from deformer_stream.model.schema import Schema
from deformer_stream.model.windows import Window, floor_to_window
from deformer_stream.ragged import ragged_indices
from trainer.array_files import create_array_file
from trainer.data import DataOptions, Split, TrainingTable, mark_empty_records
from trainer.prepare import check_input, check_names, collect_input
from trainer.reading_time import ReadingMonitor
from trainer.tables import InputTables, TableSource
from trainer.value_matrix import parse_readings

CHUNK_READINGS = 2_000_000
"""Readings that are sorted or processed at once, so that a large table need not fit into memory."""

DURATION_QUANTILE = 0.99
"""The duration of a record is this quantile of the durations of the training records, unless records are windows."""

MAX_LATE_SHARE = 0.5
"""The order of the input is one of arrival only if at most this share of the readings is late. A reading is late if its
record has an earlier row with a later time. Of the readings of two sensors, one after the other, half are late."""

MAX_MEAN_LATENESS = 0.1
"""Late readings of an order of arrival are late by this share of the duration of their record on average, or less. In a
table that is sorted by sensors, it is about a half."""

RESOLUTION_QUANTILE = 0.05
"""The resolution of times is this quantile of the intervals between different times of a training record."""

MAX_TIMED_READINGS = 1_000_000
"""Largest number of readings of training records from which the resolution of times is estimated."""

REPEATED = "repeated readings (same record, sensor, time and value)"
NO_VALUE = "readings without a usable value"
UNTIMED = "readings without a time"
UNKNOWN = "readings of sensors that are no features"
"""The reasons for leaving a reading out."""

# The columns of the temporary files, with their types.
_TEMPORARY_COLUMNS = {"row": np.int32, "code": np.int16, "value": np.float64, "time": np.int64, "event": np.int64}


@dataclass(frozen=True, slots=True)
class ReadingOrder:
    """The order of the readings of each record in a table.

    Attributes:
        name: "arrival" for the order of the input, "time" for that of the times.
        late_share: Share of the readings that are late in the order of the input: an earlier row of their record has a
            later time.
        mean_lateness: Mean over the late readings of the time by which they are late, as a share of the duration of
            their record; 0 if no reading is late.
        is_requested: Whether the user has chosen the order (`--order`).
    """

    name: Literal["arrival", "time"]
    late_share: float
    mean_lateness: float
    is_requested: bool

    def describe(self) -> str:
        """Return a sentence for the user."""
        if not self.late_share:
            return "the rows of each record are in order of time, so the model learns no late readings"
        found = f"{self.late_share:.1%} of the readings have a row after one with a later time"
        if self.name == "arrival":
            reason = " (--order arrival)" if self.is_requested else "; --order time sorts them by time"
            return f"{found}: the order of the rows is learnt as the order of arrival{reason}"
        if self.is_requested:
            return f"{found}: readings are sorted by time (--order time)"
        return (
            f"{found}, by {self.mean_lateness:.0%} of the duration of their record, which is no order of arrival: "
            "readings are sorted by time; --order arrival keeps the order of the rows"
        )


def choose_reading_order(
    requested: Literal["arrival", "time"] | None, late_share: float, mean_lateness: float
) -> ReadingOrder:
    """Return the order of the readings of a table.

    Without a request, it is that of the input if few readings are late, and not by much: at most `MAX_LATE_SHARE` of
    them, by at most `MAX_MEAN_LATENESS` of the duration of their record on average.

    Args:
        requested: The order that the user wants, None to choose it.
        late_share: Share of the readings that are late (see `ReadingOrder`).
        mean_lateness: Mean share of the duration by which they are late.
    """
    is_arrival = late_share <= MAX_LATE_SHARE and mean_lateness <= MAX_MEAN_LATENESS
    name = requested or ("arrival" if is_arrival else "time")
    return ReadingOrder(name, late_share, mean_lateness, requested is not None)


@dataclass(frozen=True, kw_only=True)
class IrregularTable(TrainingTable):
    """A training table of N records with M irregular readings, as ragged arrays on disk.

    The readings of record i have the indexes `offsets[i]` to `offsets[i + 1]` − 1, in the order `order`.

    Attributes:
        codes: (M,) int16 feature codes.
        values: (M,) float32 normalised numbers or label codes.
        ages: (M,) float64 seconds from the origin of the record: the start of its window, or its first reading. The age
            of a late reading is negative if its time is before the origin.
        offsets: (N + 1,) int64 index of the first reading of each record; the last entry is M.
        origins: (N,) int64 origin of each record in microseconds since 1970.
        order: The order of the readings of a record.
    """

    codes: NDArray[np.int16]
    values: NDArray[np.float32]
    ages: NDArray[np.float64]
    offsets: NDArray[np.int64]
    origins: NDArray[np.int64]
    order: ReadingOrder

    @property
    def num_readings(self) -> NDArray[np.int64]:
        """(N,) number of readings of each record."""
        return np.diff(self.offsets)

    def summarize(self) -> dict[str, Any]:
        """Return the facts about the table that are stored in the model's manifest, as JSON values."""
        order = {"name": self.order.name, "late_share": round(self.order.late_share, 6)}
        return super().summarize() | {"readings": int(self.offsets[-1]), "order": order}


def prepare_irregular_table(
    sources: Sequence[TableSource],
    options: DataOptions,
    folder: Path,
    monitor: ReadingMonitor | None = None,
    max_rows: int | None = None,
) -> IrregularTable:
    """Read tables, infer the features, split the records, and write their readings to disk.

    Args:
        sources: Files, folders and patterns of files, and tables in memory.
        options: How to read them.
        folder: An existing folder, in which the files of the readings are created.
        monitor: Reports the progress, and limits the time for reading, as in `prepare.prepare_table`.
        max_rows: Largest number of rows of the input that are read. None to read all rows.

    Raises:
        InputError: A file cannot be used.
        ConfigError: An option does not fit the files, or the readings have no times.
        Unavailable: The disk has no space.
    """
    collected = collect_input(sources, options, options.window, monitor, max_rows)
    tables = collected.tables
    if not tables.has_reading_rows or tables.time_column is None:
        raise ConfigError(
            f"--irregular cannot be used, because {tables.description} does not contain the time of each reading; "
            "give a long table with a column of times (--time-column), or make each window of time a record "
            "with --window"
        )
    schema = collected.schema.with_units({**tables.units, **options.units})
    schema = replace(schema.with_fill_values(tables.fill_values.list_values), window=options.window)
    check_names(schema, tables)
    tables.monitor.start_pass("converting the readings")
    is_training = collected.split == Split.TRAIN
    order, codes, values, ages, offsets, origins = _write_readings(tables, schema, folder, options.order)
    schema = replace(schema, reading_times=_choose_reading_times(options.window, ages, offsets, is_training))
    split = mark_empty_records(collected.split, np.diff(offsets) > 0, tables.skipped_by_reason)
    return IrregularTable(
        **collected.describe() | {"split": split},
        schema=schema,
        skipped_by_reason=tables.skipped_by_reason,
        fingerprint=_compute_fingerprint(schema, (codes, values, ages, offsets, split)),
        warnings=tuple(check_input(collected)),
        codes=codes,
        values=values,
        ages=ages,
        offsets=offsets,
        origins=origins,
        order=order,
    )


def _write_readings(
    tables: InputTables, schema: Schema, folder: Path, requested_order: Literal["arrival", "time"] | None
) -> tuple[
    ReadingOrder,
    NDArray[np.int16],
    NDArray[np.float32],
    NDArray[np.float64],
    NDArray[np.int64],
    NDArray[np.int64],
]:
    """Write the readings of all records to disk. This is the third pass over the input.

    Args:
        tables: The input with N records, which `index_records` has numbered. The numbers of readings that are left out
            are stored in its `skipped_by_reason`.
        schema: The features, one for each sensor.
        folder: An existing folder.
        requested_order: The order that the user wants, None to choose it.

    Returns:
        order, codes, values, ages, offsets and origins, as in `IrregularTable`.
    """
    num_readings = _append_readings(tables, schema, folder)
    placed, first = _place_by_record(folder, num_readings, tables.num_records)
    chosen_order = choose_reading_order(requested_order, *_measure_lateness(placed, first))
    shape = (int(num_readings.sum()),)
    codes = create_array_file(folder / "codes.npy", np.int16, shape)
    values = create_array_file(folder / "values.npy", np.float32, shape)
    ages = create_array_file(folder / "ages.npy", np.float64, shape)
    num_kept = np.zeros(tables.num_records, np.int64)
    origins = np.full(tables.num_records, NO_TIME)
    num_written = 0
    for records in iterate_record_chunks(first):
        chunk = slice(int(first[records.start]), int(first[records.stop]))
        rows = np.repeat(np.arange(records.start, records.stop), np.diff(first[records.start : records.stop + 1]))
        code, value, time = (np.array(placed[name][chunk]) for name in ("code", "value", "time"))
        by_time = (time,) if chosen_order.name == "time" else ()
        order = np.lexsort((placed["event"][chunk], *by_time, rows))
        rows, code, value, time = rows[order], code[order], value[order], time[order]
        is_kept = ~find_repetitions(rows, code, value, time)
        rows, code, value, time = rows[is_kept], code[is_kept], value[is_kept], time[is_kept]
        num_kept[records] = np.bincount(rows - records.start, minlength=records.stop - records.start)
        if tables.window is None:
            found, first_of_row = np.unique(rows, return_index=True)
            origins[found] = time[first_of_row]  # the first one, as in a stream
        else:
            origins[rows] = floor_to_window(time, tables.window.width)
        written = slice(num_written, num_written + len(rows))
        codes[written], ages[written] = code, (time - origins[rows]) / 1e6
        values[written] = schema.normalise(code, value)
        num_written += len(rows)
    del placed
    for name in _TEMPORARY_COLUMNS:
        for path in (folder / f"{name}.appended", folder / f"{name}.npy"):
            path.unlink(missing_ok=True)
    if shape[0] > num_written:
        tables.skipped_by_reason[REPEATED] = shape[0] - num_written
    offsets = np.concatenate([[0], np.cumsum(num_kept)])
    for array in (codes, values, ages):
        array.flush()
    return chosen_order, codes[:num_written], values[:num_written], ages[:num_written], offsets, origins


def _measure_lateness(placed: dict[str, NDArray[Any]], first: NDArray[np.int64]) -> tuple[float, float]:
    """Return the share of late readings, and by which share of the duration of their record they are late on average.

    Args:
        placed: The columns "time" and "event" of the readings, record after record.
        first: (N + 1,) index of the first reading of each record.
    """
    num_late, sum_lateness = 0, 0.0
    for records in iterate_record_chunks(first):
        chunk = slice(int(first[records.start]), int(first[records.stop]))
        rows = np.repeat(np.arange(records.start, records.stop), np.diff(first[records.start : records.stop + 1]))
        in_order = np.lexsort((placed["event"][chunk], rows))
        rows, time = rows[in_order], np.array(placed["time"][chunk])[in_order]
        by_time = np.lexsort((time, rows))
        rank = np.empty(len(time), np.int64)
        rank[by_time] = np.arange(len(time))
        # Ranks of later records are larger, so the largest rank so far belongs to the reading's own record.
        latest = time[by_time][np.maximum.accumulate(rank)]
        lateness = latest - time
        is_late = lateness > 0
        bounds = first[records.start : records.stop] - chunk.start
        durations = np.zeros(len(first) - 1)
        found = records.start + np.flatnonzero(np.diff(first[records.start : records.stop + 1]))
        starts = bounds[found - records.start]
        sorted_time = time[by_time]
        ends = np.append(starts[1:], len(time)) - 1
        durations[found] = sorted_time[ends] - sorted_time[starts]
        num_late += int(is_late.sum())
        sum_lateness += float((lateness[is_late] / durations[rows[is_late]]).sum())
    return num_late / max(int(first[-1]), 1), sum_lateness / max(num_late, 1)


def _append_readings(tables: InputTables, schema: Schema, folder: Path) -> NDArray[np.int64]:
    """Append the usable readings to temporary files, in the order in which they are read.

    Returns:
        (N,) number of readings of each record.
    """
    num_readings = np.zeros(tables.num_records, np.int64)
    num_without_value = num_untimed = num_unknown = 0
    paths = {name: folder / f"{name}.appended" for name in _TEMPORARY_COLUMNS}
    with map_write_errors(paths["row"]):
        files = {name: path.open("wb") for name, path in paths.items()}
        try:
            for readings in tables.iterate_event_readings():
                code = schema.code_by_name.get(readings.feature_name)
                if code is None:
                    num_unknown += len(readings.values) - readings.values.null_count
                    continue
                values = parse_readings(schema, code, readings)
                has_value, has_time = ~np.isnan(values), readings.times != NO_TIME
                num_without_value += int((~has_value).sum())
                num_untimed += int((has_value & ~has_time).sum())
                kept = np.flatnonzero(has_value & has_time)
                batch = {
                    "row": readings.rows[kept],
                    "code": np.full(len(kept), code),
                    "value": values[kept],  # in raw units, in which repetitions are recognised
                    "time": readings.times[kept],
                    "event": readings.event_indexes[kept],
                }
                for name, dtype in _TEMPORARY_COLUMNS.items():
                    batch[name].astype(dtype).tofile(files[name])
                num_readings += np.bincount(batch["row"], minlength=len(num_readings))
        finally:
            for file in files.values():
                file.close()
    if num_without_value:
        tables.skipped_by_reason[NO_VALUE] = num_without_value
    if num_untimed:
        tables.skipped_by_reason[UNTIMED] = num_untimed
    if num_unknown:
        tables.skipped_by_reason[UNKNOWN] = num_unknown
    return num_readings


def _place_by_record(
    folder: Path, num_readings: NDArray[np.int64], num_records: int
) -> tuple[dict[str, NDArray[Any]], NDArray[np.int64]]:
    """Move the readings from the temporary files to arrays on disk in which they are grouped by record.

    Args:
        folder: The folder of the temporary files.
        num_readings: (N,) number of readings of each record.
        num_records: The number N.

    Returns:
        The arrays of the columns by name, and (N + 1,) the index of the first reading of each record.
    """
    first = np.concatenate([[0], np.cumsum(num_readings)])
    total = int(first[-1])
    names = [name for name in _TEMPORARY_COLUMNS if name != "row"]
    placed: dict[str, NDArray[Any]] = {
        name: create_array_file(folder / f"{name}.npy", _TEMPORARY_COLUMNS[name], (total,)) for name in names
    }
    if not total:
        return placed, first
    appended = {
        name: np.memmap(folder / f"{name}.appended", dtype, "r", shape=(total,))
        for name, dtype in _TEMPORARY_COLUMNS.items()
    }
    next_index = first[:-1].copy()  # where the next reading of each record is written
    for start in range(0, total, CHUNK_READINGS):
        chunk = slice(start, start + CHUNK_READINGS)
        rows = np.asarray(appended["row"][chunk])
        order = np.argsort(rows, kind="stable")
        counts = np.bincount(rows, minlength=num_records)
        position = np.empty(len(rows), np.int64)
        group, place_in_group = ragged_indices(counts)
        position[order] = next_index[group] + place_in_group
        next_index += counts
        for name in names:
            placed[name][position] = appended[name][chunk]
    return placed, first


def iterate_record_chunks(offsets: NDArray[np.int64]) -> Iterator[slice]:
    """Yield slices of the N records that have about `CHUNK_READINGS` readings together, in their order.

    Args:
        offsets: (N + 1,) index of the first reading of each record; the last entry is the number of readings.
    """
    num_records = len(offsets) - 1
    start = 0
    while start < num_records:
        stop = int(np.searchsorted(offsets, offsets[start] + CHUNK_READINGS, side="right")) - 1
        stop = min(max(stop, start + 1), num_records)
        yield slice(start, stop)
        start = stop


def find_repetitions(
    rows: NDArray[np.int64], codes: NDArray[np.int16], values: NDArray[np.float64], times: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return which of M readings, (M,), repeat an earlier one with the same record, sensor, time and value.

    Values are compared in raw units and in float64, as in a stream.
    """
    order = np.lexsort((np.arange(len(rows)), values, times, codes, rows))
    is_same = np.ones(max(len(rows) - 1, 0), bool)
    for column in (rows, codes, values, times):
        is_same &= column[order[1:]] == column[order[:-1]]
    is_repetition = np.zeros(len(rows), bool)
    is_repetition[order[1:]] = is_same
    return is_repetition


def _choose_reading_times(
    window: Window | None, ages: NDArray[np.float64], offsets: NDArray[np.int64], is_training: NDArray[np.bool_]
) -> ReadingTimes:
    """Return the time scales of the training records.

    The duration is the width of the window, or else the quantile `DURATION_QUANTILE` of the durations of the records.
    The resolution is the quantile `RESOLUTION_QUANTILE` of the intervals between different times of a record.

    Args:
        window: The window of time that is a record, or None.
        ages: (M,) seconds since the origins of the records.
        offsets: (N + 1,) index of the first reading of each record.
        is_training: (N,) whether the record is for training.
    """
    has_readings = np.diff(offsets) > 0
    records = np.flatnonzero(is_training & has_readings)
    starts = offsets[:-1][has_readings]
    spans = np.zeros(len(has_readings))
    if len(starts):
        spans[has_readings] = np.maximum.reduceat(ages, starts) - np.minimum.reduceat(ages, starts)
    durations = spans[records]
    duration = 1.0
    if window is not None:
        duration = float(window.width)
    elif len(records):
        duration = max(1.0, round(1e6 * float(np.quantile(durations, DURATION_QUANTILE))))
    # The records are in random order, so the first ones are a random sample.
    shuffled = np.random.default_rng(0x71E5).permutation(records)
    num_readings = np.cumsum(offsets[shuffled + 1] - offsets[shuffled])
    sampled = shuffled[: max(1, int(np.searchsorted(num_readings, MAX_TIMED_READINGS)))]
    intervals = [np.diff(np.sort(ages[offsets[record] : offsets[record + 1]])) for record in np.sort(sampled).tolist()]
    positive = np.concatenate([np.empty(0), *(interval[interval > 0] for interval in intervals)])
    resolution = 1e6 * float(np.quantile(positive, RESOLUTION_QUANTILE)) if len(positive) else duration
    return ReadingTimes(int(duration), int(np.clip(round(resolution), 1, duration)))


def _compute_fingerprint(schema: Schema, arrays: Sequence[NDArray[Any]]) -> str:
    """Return a hexadecimal digest of the schema and of arrays on disk, which are read in chunks."""
    digest = hashlib.blake2b(schema.fingerprint.encode(), digest_size=8)
    for array in arrays:
        for start in range(0, len(array), CHUNK_READINGS):
            digest.update(np.ascontiguousarray(array[start : start + CHUNK_READINGS]).data)
    return digest.hexdigest()
