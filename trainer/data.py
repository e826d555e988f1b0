"""From Parquet tables to what training samples from: an encoded matrix on disk and a split fixed from the start.

Three passes stream over the files: which records there are, what kind each column is (`kinds`, training rows only), and
the encoding of every reading into the model's units. Nothing but one batch, one byte a record and (long layout) the
records' ids is held in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import TiePolicy
from deformer_stream.engine.events import NO_TIME
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model.schema import Feature, Kind, Schema, label_of
from deformer_stream.model.time_slots import repeated, single
from deformer_stream.model.windows import Window, format_duration
from trainer.feature_kinds import ColumnStatistics, ExcludedColumn, check_old_feature, infer_feature
from trainer.scratch import mapped
from trainer.tables import (
    DEVICE,
    FEATURE,
    RECORD,
    TIME,
    VALUE,
    FeatureReadings,
    Layout,
    InputTables,
    encode_labels,
    classify_type,
    index_records,
    open_tables,
    parse_numbers,
)

TRAIN, VALIDATION, CALIBRATION, LEFT_OUT = 0, 1, 2, 3
VALIDATION_SHARE = 0.1
MIN_RECORDS = 20
"""Fewest records worth training on."""
CHUNK = 16_384
MAX_FEATURES = 4096
"""Of a record; what a model does with them grows with their square."""


@dataclass(frozen=True, slots=True)
class DataOptions:
    """How the tables are to be read; column names as tuples, those of cycles with their periods. layout None: seen from
    the columns. window: records are windows of a device's time, in whose slots all sensors report but those in `once`.
    base: of the model that is adapted; its features come first, as they were. ties: what readings of one record and
    time are."""

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
    """The table, ready to be sampled.

    values: (N, F) float32 on disk, in normalised units or label codes, NaN where missing. ranks: (N, F) int16 on disk,
    place of each reading in its record's order of arrival, −1 where missing; None for the wide layout, which knows no
    order. ties: with "hold" readings of one time have one place. split: (N,) uint8, TRAIN, VALIDATION, CALIBRATION or
    LEFT_OUT. missing and refused: per feature, over all records; refused readings are infinite. skipped: what else was
    left out, by reason. time: the column with the time. fingerprint: hex digest of schema, matrix and order.
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

    def select_rows(self, part: int) -> NDArray[np.int64]:
        """Row numbers of a part of the split, ascending."""
        return np.flatnonzero(self.split == part)

    def summarize(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "fingerprint": self.fingerprint,
            "layout": self.layout,
            "rows": {
                "train": int((self.split == TRAIN).sum()),
                "validation": int((self.split == VALIDATION).sum()),
                "calibration": int((self.split == CALIBRATION).sum()),
                **({"left_out": int(left_out)} if (left_out := (self.split == LEFT_OUT).sum()) else {}),
            },
            "missing": self.missing_by_feature,
            "refused": self.infinite_by_feature,
            "skipped": self.skipped_by_reason,
            "excluded": {e.name: e.reason for e in self.excluded_columns},
        }


def prepare_table(tables: Sequence[Path], options: DataOptions, folder: Path) -> PreparedTable:
    """Read the tables and write the encoded matrix into `folder`, which must exist.

    Raises InputError for files that cannot be used and ConfigError for options that do not fit them.
    """
    window, once = _windows(options)
    source = open_tables(tables, options.layout, options.label, options.normal, window)
    excluded = _choose_columns(source, options)
    index_records(source)
    if source.num_records < MIN_RECORDS:
        raise InputError(
            f"{source.files[0]}: {source.num_records} records to train on are too few; bring at least {MIN_RECORDS}, better 1000"
        )
    split = assign_split(source.num_records, options.calibration_share, options.seed)
    statistics = collect_statistics(source, split, options.exclude)
    schema, more = choose_kinds(list(statistics.values()), options)
    schema = repeat_by_time_slot(schema, window, once)
    values, ranks = encode_table(source, schema, folder, options.ties)
    return PreparedTable(
        schema=schema,
        excluded_columns=(*excluded, *more),
        values=values,
        arrival_ranks=ranks,
        split=split,
        layout=source.layout,
        time_column=source.time_column,
        missing_by_feature={name: s.num_missing for name, s in statistics.items() if s.num_missing and name in schema.sources},
        infinite_by_feature={name: s.num_infinite for name, s in statistics.items() if s.num_infinite and name in schema.sources},
        skipped_by_reason=source.skipped_by_reason,
        fingerprint=compute_fingerprint(schema, values, ranks, split),
        ties=options.ties,
    )


def assign_split(records: int, calibration_share: float, seed: int) -> NDArray[np.uint8]:
    """(N,) the part each record belongs to: shares are exact, the choice depends on N and seed alone."""
    calibration = max(1, round(calibration_share * records))
    validation = max(4, round(VALIDATION_SHARE * (records - calibration)))
    if records - calibration - validation < MIN_RECORDS // 2:
        raise ConfigError(f"--calibration-share {calibration_share:g} leaves too few of {records} records to train on")
    split = np.full(records, TRAIN, np.uint8)
    split[:calibration] = CALIBRATION
    split[calibration : calibration + validation] = VALIDATION
    np.random.default_rng([seed, 0x5B117]).shuffle(split)
    return split


def _choose_columns(source: InputTables, options: DataOptions) -> list[ExcludedColumn]:
    """Which columns may be features (wide layout); sets `source.columns` and `source.time`."""
    names = source.schema.names
    asked = {"exclude": options.exclude, "context": options.context}
    asked |= {"discrete": options.discrete, "continuous": options.continuous, "cycle": tuple(dict(options.cycle))}
    if options.ties == "hold" and (source.layout == "wide" or TIME not in names):
        raise ConfigError("--ties hold: the table knows no time of each reading; use a long table with a column time")
    if source.layout == "long":
        source.time_column = TIME if TIME in names else None
        owner = RECORD if source.window is None else DEVICE
        others = [n for n in names if n not in (owner, FEATURE, VALUE, source.time_column, source.label_column)]
        return [ExcludedColumn(n, "not a column of the long layout") for n in others]
    for option, columns in asked.items():
        for column in columns:
            if column not in names:
                raise ConfigError(f"--{option} {column}: {source.files[0]} has no such column; it has {_some(names)}")
    excluded = []
    for name in names:
        form = classify_type(source.schema.field(name).type)
        if name in options.exclude:
            excluded.append(ExcludedColumn(name, "asked for by --exclude"))
        elif name == source.label_column:
            excluded.append(ExcludedColumn(name, f"the label; kept are rows where it is {source.normal_label}"))
        elif name == RECORD:
            excluded.append(ExcludedColumn(name, "the record's id"))
        elif (
            form == "time"
            and source.time_column is None
            and name not in (*options.discrete, *options.continuous, *asked["cycle"])
        ):
            source.time_column = name
            excluded.append(ExcludedColumn(name, "the record's time"))
        else:
            source.feature_columns.append(name)
    if not source.feature_columns:
        raise InputError(f"{source.files[0]}: no column is left that could be a feature; columns: {_some(names)}")
    return excluded


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")


def collect_statistics(source: InputTables, split: NDArray[np.uint8], exclude: Sequence[str]) -> dict[str, ColumnStatistics]:
    """Pass 1: the statistics of every column (wide) or feature (long), in order of first appearance."""
    statistics = {name: ColumnStatistics(name) for name in source.feature_columns}
    for block in source.iterate_readings():
        if block.feature_name in exclude:
            continue
        column = statistics.setdefault(block.feature_name, ColumnStatistics(block.feature_name))
        column.add(block.values, block.rows, split[block.rows] == TRAIN, parse_text=source.layout == "long")
    return statistics


def choose_kinds(statistics: list[ColumnStatistics], options: DataOptions) -> tuple[Schema, list[ExcludedColumn]]:
    """The schema and the columns that cannot be features."""
    known = {s.name for s in statistics}
    wanted: dict[str, Kind] = dict.fromkeys(options.continuous, "continuous")
    for name in options.discrete:
        if name in wanted:
            raise ConfigError(f"--discrete and --continuous both name {name}; choose one")
        wanted[name] = "discrete"
    periods = dict(options.cycle)
    for name in options.discrete:
        if name in periods:
            raise ConfigError(f"--discrete and --cycle both name {name}; choose one")
    for name in (*wanted, *periods, *options.context, *options.once):
        if name not in known:
            raise ConfigError(f"no feature is called {name}; there are {_some(sorted(known))}")
    old = {f.name: f for f in single(options.base).features} if options.base is not None else {}
    columns = {s.name: s for s in statistics}
    kept = tuple(check_old_feature(f, columns[f.name]) if f.name in columns else f for f in old.values())
    decided = [
        infer_feature(s, wanted.get(s.name), s.name in options.context, periods.get(s.name))
        for s in statistics
        if s.name not in old
    ]
    features = kept + tuple(d for d in decided if isinstance(d, Feature))
    excluded = [d for d in decided if isinstance(d, ExcludedColumn)]
    if all(f.context for f in features):
        reasons = "; ".join(f"{e.name}: {e.reason}" for e in excluded[:5]) or "all features are --context"
        raise InputError(f"no feature is left to be scored ({reasons}); bring other columns or change the options")
    return Schema(features), excluded


def _windows(options: DataOptions) -> tuple[Window | None, frozenset[str]]:
    """What records are cut out of, and what reports once in them: as asked for, or as the model has it that is adapted.
    Raises ConfigError where that is another."""
    old = options.base
    if old is None:
        return options.window, frozenset(options.once)
    if options.window not in (None, old.window):
        was = "given by name" if old.window is None else f"windows of {format_duration(old.window.width)}"
        slots = f" in {old.window.slots} slots" if old.window is not None and old.window.slots > 1 else ""
        raise ConfigError(f"--init-from: the old model's records are {was}{slots}; leave --window and --slots out")
    return old.window, frozenset(options.once) | {f.name for f in old.features if f.sensor is None}


def repeat_by_time_slot(schema: Schema, window: Window | None, once: Collection[str]) -> Schema:
    """The schema of records: where these are windows, a sensor is a feature for each slot, but those that report once.
    Raises ConfigError."""
    if window is None:
        return schema
    count = len(schema) * window.slots
    if count > MAX_FEATURES:
        raise ConfigError(f"--slots {window.slots}: {count} features, at most {MAX_FEATURES}; take fewer slots")
    try:
        return repeated(schema, window, once)
    except ValueError as error:
        raise ConfigError(f"--slots {window.slots}: {error}; rename a feature") from None


def encode_table(
    source: InputTables, schema: Schema, folder: Path, ties: TiePolicy = "arrival"
) -> tuple[NDArray[np.float32], NDArray[np.int16] | None]:
    """Pass 2: the matrix of normalised values and, for the long layout, the order of arrival, as files in `folder`."""
    shape = (source.num_records, len(schema))
    values = mapped(folder / "values.npy", np.float32, shape)
    _fill(values, np.nan)
    if source.layout == "wide":
        for block in source.iterate_readings():
            if block.feature_name in schema.codes:
                code = schema.codes[block.feature_name]
                values[block.rows, code] = encode_readings(schema, code, block, mixed=False)
        values.flush()
        return values, None
    events = mapped(folder / "events.npy", np.int64, shape)
    times = mapped(folder / "times.npy", np.int64, shape)
    _fill(events, -1)
    duplicates = 0
    for block in source.iterate_readings():
        if block.feature_name not in schema.places or block.event_indexes is None or block.time_slots is None:
            continue
        code, step = schema.places[block.feature_name]
        column = code + step * block.time_slots
        cells = block.rows * len(schema) + column
        _, first = np.unique(cells, return_index=True)  # the first event of a record and feature counts
        first = first[events[block.rows[first], column[first]] < 0]
        duplicates += len(block.rows) - len(first)
        rows, column = block.rows[first], column[first]
        values[rows, column] = encode_readings(schema, code, block, mixed=True)[first]
        events[rows, column] = block.event_indexes[first]
        if block.times is not None:
            times[rows, column] = block.times[first]
    if duplicates:
        source.skipped_by_reason["repeated events (record and feature)"] = duplicates
    ranks = _ranks(values, events, times, folder, ties)
    for name in ("events.npy", "times.npy"):
        (folder / name).unlink()
    values.flush()
    return values, ranks


def _fill(matrix: NDArray[Any], value: float) -> None:
    for start in range(0, len(matrix), CHUNK):
        matrix[start : start + CHUNK] = value


def encode_readings(schema: Schema, code: int, block: FeatureReadings, mixed: bool) -> NDArray[np.float32]:
    """(M,) readings in the model's units: normalised, or label codes with the number of labels for an unseen one."""
    feature = schema.features[code]
    if feature.kind == "continuous":
        x, _ = parse_numbers(block.values)
        x[np.isinf(x)] = np.nan
        z = schema.normalise(np.full(len(x), code), x)
        result: NDArray[np.float32] = z.astype(np.float32)
        return result
    codes, labels = encode_labels(block.values)
    known, unseen = schema.label_codes[code], len(feature.labels)
    lookup = [known.get(text, known.get(_as_number(text), unseen) if mixed else unseen) for text in labels]
    numbers = mixed or classify_type(block.values.type) == "number"  # an infinite number is no label, the word "inf" may be
    table = [np.nan if numbers and text in ("inf", "-inf") else c for text, c in zip(labels, lookup, strict=True)]
    return np.array([*table, np.nan])[codes].astype(np.float32)


def _as_number(text: str) -> str:
    """`1` for `1.0`: in the long layout numbers may be written as text."""
    try:
        return label_of(float(text))
    except ValueError:
        return text


def _ranks(
    values: NDArray[np.float32], events: NDArray[np.int64], times: NDArray[np.int64], folder: Path, ties: TiePolicy
) -> NDArray[np.int16]:
    """(N, F) place of each reading in its record: by time, ties and unknown times by place in the input. With ties held
    readings of one time have one place."""
    ranks = mapped(folder / "ranks.npy", np.int16, values.shape)
    for start in range(0, len(values), CHUNK):
        part = slice(start, start + CHUNK)
        present = np.isfinite(values[part])
        last = np.iinfo(np.int64).max
        time = np.where(times[part] == NO_TIME, last - 1, times[part])
        order = np.lexsort((events[part], np.where(present, time, last)), axis=1)
        rank, place = np.empty_like(order), np.broadcast_to(np.arange(order.shape[1]), order.shape)
        if ties == "hold":
            time = np.take_along_axis(time, order, 1)
            alone = np.diff(time, axis=1, prepend=time[:, :1] - 1) != 0
            place = np.cumsum(alone | (time == last - 1), 1) - 1
        np.put_along_axis(rank, order, place, 1)
        ranks[part] = np.where(present, rank, -1)
    ranks.flush()
    return ranks


def compute_fingerprint(
    schema: Schema, values: NDArray[np.float32], ranks: NDArray[np.int16] | None, split: NDArray[np.uint8]
) -> str:
    """Hex digest of everything training looks at."""
    digest = hashlib.blake2b(schema.fingerprint.encode(), digest_size=8)
    for matrix in (values, ranks, split):
        if matrix is not None:
            for start in range(0, len(matrix), CHUNK):
                digest.update(np.ascontiguousarray(matrix[start : start + CHUNK]).data)
    return digest.hexdigest()
