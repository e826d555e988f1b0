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

from deformer_stream.calibration.conformal import Ties
from deformer_stream.engine.events import NO_TIME
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model.schema import Feature, Kind, Schema, label_of
from deformer_stream.model.time_slots import repeated, single
from deformer_stream.model.windows import Window, format_duration
from trainer.feature_kinds import ColumnStatistics, Excluded, adoptable, infer
from trainer.scratch import mapped
from trainer.tables import (
    DEVICE,
    FEATURE,
    RECORD,
    TIME,
    VALUE,
    Block,
    Layout,
    Source,
    encode_labels,
    form_of,
    index_records,
    open_source,
    parse_numbers,
)

TRAIN, VALIDATION, CALIBRATION, LEFT_OUT = 0, 1, 2, 3
VALIDATION_SHARE = 0.1
FEWEST = 20
"""Fewest records worth training on."""
CHUNK = 16_384
MOST_FEATURES = 4096
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
    ties: Ties = "arrival"


@dataclass(frozen=True)
class Prepared:
    """The table, ready to be sampled.

    values: (N, F) float32 on disk, in normalised units or label codes, NaN where missing. ranks: (N, F) int16 on disk,
    place of each reading in its record's order of arrival, −1 where missing; None for the wide layout, which knows no
    order. ties: with "hold" readings of one time have one place. split: (N,) uint8, TRAIN, VALIDATION, CALIBRATION or
    LEFT_OUT. missing and refused: per feature, over all records; refused readings are infinite. skipped: what else was
    left out, by reason. time: the column with the time. fingerprint: hex digest of schema, matrix and order.
    """

    schema: Schema
    excluded: tuple[Excluded, ...]
    values: NDArray[np.float32]
    ranks: NDArray[np.int16] | None
    split: NDArray[np.uint8]
    layout: Layout
    time: str | None
    missing: dict[str, int]
    refused: dict[str, int]
    skipped: dict[str, int]
    fingerprint: str = field(repr=False)
    ties: Ties = "arrival"

    def rows(self, part: int) -> NDArray[np.int64]:
        """Row numbers of a part of the split, ascending."""
        return np.flatnonzero(self.split == part)

    def summary(self) -> dict[str, Any]:
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
            "missing": self.missing,
            "refused": self.refused,
            "skipped": self.skipped,
            "excluded": {e.name: e.reason for e in self.excluded},
        }


def prepare(tables: Sequence[Path], options: DataOptions, folder: Path) -> Prepared:
    """Read the tables and write the encoded matrix into `folder`, which must exist.

    Raises InputError for files that cannot be used and ConfigError for options that do not fit them.
    """
    window, once = _windows(options)
    source = open_source(tables, options.layout, options.label, options.normal, window)
    excluded = _choose_columns(source, options)
    index_records(source)
    if source.records < FEWEST:
        raise InputError(
            f"{source.files[0]}: {source.records} records to train on are too few; bring at least {FEWEST}, better 1000"
        )
    split = assign_split(source.records, options.calibration_share, options.seed)
    statistics = gather(source, split, options.exclude)
    schema, more = choose_kinds(list(statistics.values()), options)
    schema = in_slots(schema, window, once)
    values, ranks = encode(source, schema, folder, options.ties)
    return Prepared(
        schema=schema,
        excluded=(*excluded, *more),
        values=values,
        ranks=ranks,
        split=split,
        layout=source.layout,
        time=source.time,
        missing={name: s.missing for name, s in statistics.items() if s.missing and name in schema.sources},
        refused={name: s.infinite for name, s in statistics.items() if s.infinite and name in schema.sources},
        skipped=source.skipped,
        fingerprint=fingerprint(schema, values, ranks, split),
        ties=options.ties,
    )


def assign_split(records: int, calibration_share: float, seed: int) -> NDArray[np.uint8]:
    """(N,) the part each record belongs to: shares are exact, the choice depends on N and seed alone."""
    calibration = max(1, round(calibration_share * records))
    validation = max(4, round(VALIDATION_SHARE * (records - calibration)))
    if records - calibration - validation < FEWEST // 2:
        raise ConfigError(f"--calibration-share {calibration_share:g} leaves too few of {records} records to train on")
    split = np.full(records, TRAIN, np.uint8)
    split[:calibration] = CALIBRATION
    split[calibration : calibration + validation] = VALIDATION
    np.random.default_rng([seed, 0x5B117]).shuffle(split)
    return split


def _choose_columns(source: Source, options: DataOptions) -> list[Excluded]:
    """Which columns may be features (wide layout); sets `source.columns` and `source.time`."""
    names = source.schema.names
    asked = {"exclude": options.exclude, "context": options.context}
    asked |= {"discrete": options.discrete, "continuous": options.continuous, "cycle": tuple(dict(options.cycle))}
    if options.ties == "hold" and (source.layout == "wide" or TIME not in names):
        raise ConfigError("--ties hold: the table knows no time of each reading; use a long table with a column time")
    if source.layout == "long":
        source.time = TIME if TIME in names else None
        owner = RECORD if source.window is None else DEVICE
        others = [n for n in names if n not in (owner, FEATURE, VALUE, source.time, source.label)]
        return [Excluded(n, "not a column of the long layout") for n in others]
    for option, columns in asked.items():
        for column in columns:
            if column not in names:
                raise ConfigError(f"--{option} {column}: {source.files[0]} has no such column; it has {_some(names)}")
    excluded = []
    for name in names:
        form = form_of(source.schema.field(name).type)
        if name in options.exclude:
            excluded.append(Excluded(name, "asked for by --exclude"))
        elif name == source.label:
            excluded.append(Excluded(name, f"the label; kept are rows where it is {source.normal}"))
        elif name == RECORD:
            excluded.append(Excluded(name, "the record's id"))
        elif (
            form == "time"
            and source.time is None
            and name not in (*options.discrete, *options.continuous, *asked["cycle"])
        ):
            source.time = name
            excluded.append(Excluded(name, "the record's time"))
        else:
            source.columns.append(name)
    if not source.columns:
        raise InputError(f"{source.files[0]}: no column is left that could be a feature; columns: {_some(names)}")
    return excluded


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")


def gather(source: Source, split: NDArray[np.uint8], exclude: Sequence[str]) -> dict[str, ColumnStatistics]:
    """Pass 1: the statistics of every column (wide) or feature (long), in order of first appearance."""
    statistics = {name: ColumnStatistics(name) for name in source.columns}
    for block in source.blocks():
        if block.name in exclude:
            continue
        column = statistics.setdefault(block.name, ColumnStatistics(block.name))
        column.add(block.values, block.rows, split[block.rows] == TRAIN, mixed=source.layout == "long")
    return statistics


def choose_kinds(statistics: list[ColumnStatistics], options: DataOptions) -> tuple[Schema, list[Excluded]]:
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
    kept = tuple(adoptable(f, columns[f.name]) if f.name in columns else f for f in old.values())
    decided = [
        infer(s, wanted.get(s.name), s.name in options.context, periods.get(s.name))
        for s in statistics
        if s.name not in old
    ]
    features = kept + tuple(d for d in decided if isinstance(d, Feature))
    excluded = [d for d in decided if isinstance(d, Excluded)]
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


def in_slots(schema: Schema, window: Window | None, once: Collection[str]) -> Schema:
    """The schema of records: where these are windows, a sensor is a feature for each slot, but those that report once.
    Raises ConfigError."""
    if window is None:
        return schema
    count = len(schema) * window.slots
    if count > MOST_FEATURES:
        raise ConfigError(f"--slots {window.slots}: {count} features, at most {MOST_FEATURES}; take fewer slots")
    try:
        return repeated(schema, window, once)
    except ValueError as error:
        raise ConfigError(f"--slots {window.slots}: {error}; rename a feature") from None


def encode(
    source: Source, schema: Schema, folder: Path, ties: Ties = "arrival"
) -> tuple[NDArray[np.float32], NDArray[np.int16] | None]:
    """Pass 2: the matrix of normalised values and, for the long layout, the order of arrival, as files in `folder`."""
    shape = (source.records, len(schema))
    values = mapped(folder / "values.npy", np.float32, shape)
    _fill(values, np.nan)
    if source.layout == "wide":
        for block in source.blocks():
            if block.name in schema.codes:
                code = schema.codes[block.name]
                values[block.rows, code] = encode_block(schema, code, block, mixed=False)
        values.flush()
        return values, None
    events = mapped(folder / "events.npy", np.int64, shape)
    times = mapped(folder / "times.npy", np.int64, shape)
    _fill(events, -1)
    duplicates = 0
    for block in source.blocks():
        if block.name not in schema.places or block.events is None or block.slots is None:
            continue
        code, step = schema.places[block.name]
        column = code + step * block.slots
        cells = block.rows * len(schema) + column
        _, first = np.unique(cells, return_index=True)  # the first event of a record and feature counts
        first = first[events[block.rows[first], column[first]] < 0]
        duplicates += len(block.rows) - len(first)
        rows, column = block.rows[first], column[first]
        values[rows, column] = encode_block(schema, code, block, mixed=True)[first]
        events[rows, column] = block.events[first]
        if block.times is not None:
            times[rows, column] = block.times[first]
    if duplicates:
        source.skipped["repeated events (record and feature)"] = duplicates
    ranks = _ranks(values, events, times, folder, ties)
    for name in ("events.npy", "times.npy"):
        (folder / name).unlink()
    values.flush()
    return values, ranks


def _fill(matrix: NDArray[Any], value: float) -> None:
    for start in range(0, len(matrix), CHUNK):
        matrix[start : start + CHUNK] = value


def encode_block(schema: Schema, code: int, block: Block, mixed: bool) -> NDArray[np.float32]:
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
    numbers = mixed or form_of(block.values.type) == "number"  # an infinite number is no label, the word "inf" may be
    table = [np.nan if numbers and text in ("inf", "-inf") else c for text, c in zip(labels, lookup, strict=True)]
    return np.array([*table, np.nan])[codes].astype(np.float32)


def _as_number(text: str) -> str:
    """`1` for `1.0`: in the long layout numbers may be written as text."""
    try:
        return label_of(float(text))
    except ValueError:
        return text


def _ranks(
    values: NDArray[np.float32], events: NDArray[np.int64], times: NDArray[np.int64], folder: Path, ties: Ties
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


def fingerprint(
    schema: Schema, values: NDArray[np.float32], ranks: NDArray[np.int16] | None, split: NDArray[np.uint8]
) -> str:
    """Hex digest of everything training looks at."""
    digest = hashlib.blake2b(schema.fingerprint.encode(), digest_size=8)
    for matrix in (values, ranks, split):
        if matrix is not None:
            for start in range(0, len(matrix), CHUNK):
                digest.update(np.ascontiguousarray(matrix[start : start + CHUNK]).data)
    return digest.hexdigest()
