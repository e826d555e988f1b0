"""Parquet in, column by column: what a training table says, streamed from disk a batch at a time.

Both layouts become the same thing, a sequence of `Block`s: some readings of one feature, with the records they belong
to. A record is known by its *row*, its place among the records that are kept, in order of first appearance. Memory
holds one batch at a time and, for the long layout, the ids of the records.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from deformer_stream.codec.columns import daytime, in_seconds
from deformer_stream.engine.events import NO_TIME
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model.schema import label_of
from deformer_stream.model.windows import Window, window_start

Layout = Literal["wide", "long"]
ValueForm = Literal["number", "boolean", "text", "clock", "time", "other"]
"""clock: times of day, which are read as seconds since midnight."""

RECORD, FEATURE, VALUE, TIME, DEVICE = "record", "feature", "value", "time", "device"
BATCH_CELLS = 4_000_000
"""A batch holds about this many values, so that wide tables do not need more memory than narrow ones."""


@dataclass(frozen=True, slots=True)
class FeatureReadings:
    """M readings of one feature. rows: (M,) the records they belong to. values: M values as they stand in the file.

    Long layout only: times (M,) int64 microseconds since 1970 or `NO_TIME`; events (M,) place in the input; slots (M,)
    of the window, 0 where records are given by name.
    """

    feature_name: str
    rows: NDArray[np.int64]
    values: pa.Array
    times: NDArray[np.int64] | None = None
    event_indexes: NDArray[np.int64] | None = None
    time_slots: NDArray[np.int64] | None = None


@dataclass
class InputTables:
    """The input tables and how they are to be read.

    columns: the features' columns (wide layout). time: the column with the record's (wide) or event's (long) time.
    records: number of records kept; counts of what was left out are in `skipped`, by reason. window: records are
    windows of a device's time (long layout); None where they are given by name.
    """

    files: list[Path]
    schema: pa.Schema
    layout: Layout
    label_column: str | None
    normal_label: str | None
    window: Window | None = None
    feature_columns: list[str] = field(default_factory=list)
    time_column: str | None = None
    num_records: int = 0
    skipped_by_reason: dict[str, int] = field(default_factory=dict)
    row_by_event: NDArray[np.int64] | None = None  # long layout: (E,) row of each event, −1 where it is left out

    def iterate_readings(self) -> Iterator[FeatureReadings]:
        """All readings of the records that are kept, in the order of the input."""
        return _wide_blocks(self) if self.layout == "wide" else _long_blocks(self)


def classify_type(kind: pa.DataType) -> ValueForm:
    """What the values of an Arrow type are, as far as features go."""
    if pa.types.is_dictionary(kind):
        return "text" if classify_type(kind.value_type) in ("text", "number", "boolean") else "other"
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind):
        return "number"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "text"
    if daytime(kind):
        return "clock"
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return "time"
    return "other"


def find_files(tables: Sequence[Path]) -> list[Path]:
    """Files as given; folders give their *.parquet in order of name, hidden ones left out."""
    files: list[Path] = []
    for path in tables:
        if path.is_dir():
            found = [p for p in sorted(path.rglob("*.parquet")) if not _hidden(p.relative_to(path))]
            if not found:
                raise InputError(f"{path}: the folder holds no *.parquet file; give another folder or the files")
            files.extend(found)
        elif path.is_file():
            files.append(path)
        else:
            raise InputError(f"{path}: no such file or folder; check the path")
    return files


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def open_tables(
    tables: Sequence[Path],
    layout: Layout | None,
    label: str | None,
    normal: str | None,
    window: Window | None = None,
) -> InputTables:
    """Find the files and check that they hold the same columns of the same kind.

    Raises InputError naming file and column where they do not, ConfigError where an option names no column of theirs.
    """
    files = find_files(tables)
    schema = _read_schema(files[0])
    for path in files[1:]:
        _check_same(schema, _read_schema(path), files[0], path)
    needed = (RECORD, FEATURE, VALUE) if window is None else (DEVICE, FEATURE, VALUE, TIME)
    missing = [column for column in needed if column not in schema.names]
    if layout is None:
        if window is None and {DEVICE, FEATURE, VALUE, TIME} <= set(schema.names) and missing:
            raise ConfigError(
                f"{files[0]}: a row is a reading of a device: add --window, such as 60s, to make records of them, or "
                "--layout wide if it is a record"
            )
        layout = "wide" if missing else "long"
    if window is not None and (layout == "wide" or RECORD in schema.names):
        fault = f"has a column {RECORD!r}" if layout == "long" else "has rows that are records"
        raise ConfigError(
            f"--window makes records of columns {', '.join(needed)}, and {files[0]} {fault}; leave one of them out"
        )
    if layout == "long" and missing:
        words = f"{', '.join(needed[:-1])} and {needed[-1]}"
        raise InputError(f"{files[0]}: column {missing[0]!r} is missing, the long layout needs {words}")
    if (label is None) != (normal is None):
        raise ConfigError("--label and --normal belong together: the column and the value that marks a normal row")
    if label is not None and label not in schema.names:
        raise ConfigError(f"--label {label}: {files[0]} has no such column; it has {', '.join(schema.names)}")
    return InputTables(files, schema, layout, label, normal, window)


def _read_schema(path: Path) -> pa.Schema:
    try:
        schema = pq.read_schema(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path}: not a readable Parquet file ({_first_line(error)}); convert or remove it") from error
    if len(set(schema.names)) < len(schema.names):
        twice = next(name for name in schema.names if schema.names.count(name) > 1)
        raise InputError(f"{path}: two columns are called {twice!r}; rename one")
    return schema


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__


def _check_same(first: pa.Schema, other: pa.Schema, first_path: Path, path: Path) -> None:
    for name in first.names:
        if name not in other.names:
            raise InputError(f"{path}: column {name!r} is missing, {first_path} has it; train on tables of one kind")
        a, b = first.field(name).type, other.field(name).type
        if classify_type(a) != classify_type(b) and not (pa.types.is_null(a) or pa.types.is_null(b)):
            raise InputError(f"{path}: column {name!r} is {b}, in {first_path} it is {a}; convert one of them")
    for name in other.names:
        if name not in first.names:
            raise InputError(f"{path}: column {name!r} is new, {first_path} lacks it; train on tables of one kind")


def _batches(source: InputTables, columns: list[str]) -> Iterator[pa.RecordBatch]:
    size = int(np.clip(BATCH_CELLS // max(len(columns), 1), 1024, 65_536))
    for path in source.files:
        try:
            with pq.ParquetFile(path, pre_buffer=False) as file:  # or all that was read is held to the end
                yield from file.iter_batches(size, columns=columns)
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(f"{path}: cannot be read to its end ({_first_line(error)}); restore the file") from error


def match_normal_label(values: pa.Array, normal: str) -> NDArray[np.bool_]:
    """(N,) whether a label equals NORMAL, compared as text by `label_of`; a null never does."""
    wanted = {normal}
    with contextlib.suppress(ValueError):  # NORMAL may be a word
        wanted.add(label_of(float(normal)))
    codes, labels = encode_labels(values)
    hit: NDArray[np.bool_] = np.array([label in wanted for label in labels] + [False])[codes]
    return hit


def encode_labels(values: pa.Array) -> tuple[NDArray[np.int64], list[str]]:
    """(N,) index into the distinct labels, −1 for null and NaN, and the labels' texts."""
    encoded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    labels = [label_of(v.as_py()) for v in encoded.dictionary]
    if classify_type(encoded.dictionary.type) == "number" and not pa.types.is_null(encoded.dictionary.type):
        labels = [label_of(float(v)) for v in encoded.dictionary.to_pylist()]
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    if "nan" in labels and classify_type(encoded.dictionary.type) == "number":
        nan = np.array([label == "nan" for label in labels] + [False])
        codes = np.where(nan[codes], -1, codes)
    return codes, labels


def parse_times(values: pa.Array) -> NDArray[np.int64]:
    """(N,) times in microseconds since 1970: timestamps, epoch seconds, or RFC 3339 texts; `NO_TIME` for null."""
    form = classify_type(values.type)
    if form == "number":
        seconds = values.cast(pa.float64(), safe=False).fill_null(np.nan).to_numpy(zero_copy_only=False)
        known = np.isfinite(seconds)
        return np.where(known, np.round(np.where(known, seconds, 0.0) * 1e6), NO_TIME).astype(np.int64)
    if form == "text":
        values = values.cast(pa.timestamp("us", "UTC"))
    stamps = values.cast(pa.timestamp("us", getattr(values.type, "tz", None)), safe=False)
    micros: NDArray[np.int64] = stamps.cast(pa.int64()).fill_null(NO_TIME).to_numpy(zero_copy_only=False)
    return micros


def index_records(source: InputTables) -> None:
    """Pass 0: how many records there are and which are kept (`--label`); long layout: the row of every event."""
    if source.layout == "long":
        _index_long(source)
    elif source.label_column is None:
        source.num_records = sum(pq.read_metadata(path).num_rows for path in source.files)
    else:
        assert source.normal_label is not None  # noqa: S101 - open_source refuses one without the other
        total, seen = 0, dict[str, int]()
        for batch in _batches(source, [source.label_column]):
            total += len(batch)
            source.num_records += int(match_normal_label(batch.column(0), source.normal_label).sum())
            for text, count in _label_counts(batch.column(0)):
                seen[text] = seen.get(text, 0) + count
        source.skipped_by_reason["rows that are not normal"] = total - source.num_records
        if not source.num_records:
            known = ", ".join(f"{text} ({count})" for text, count in list(seen.items())[:10]) or "nothing"
            raise InputError(
                f"no row of {source.files[0]} has {source.label_column} = {source.normal_label}; the column holds {known}"
            )


def _label_counts(values: pa.Array) -> list[tuple[str, int]]:
    codes, labels = encode_labels(values)
    return [(text, int((codes == i).sum())) for i, text in enumerate(labels[:50])]


def _index_long(source: InputTables) -> None:
    ids: dict[str | tuple[str, int], int] = {}
    normal: list[bool] = []
    rows, unusable = [], 0
    columns = [FEATURE, *([RECORD] if source.window is None else [DEVICE, TIME])]
    for batch in _batches(source, columns + ([source.label_column] if source.label_column else [])):
        row = _named(batch, ids) if source.window is None else _windowed(batch, ids, source.window)
        row[batch.column(FEATURE).is_null().to_numpy(zero_copy_only=False)] = -1
        unusable += int((row < 0).sum())
        normal.extend([True] * (len(ids) - len(normal)))
        if source.label_column is not None and source.normal_label is not None:
            for bad in np.unique(row[~match_normal_label(batch.column(source.label_column), source.normal_label)]):
                if bad >= 0:
                    normal[bad] = False  # a record is normal when every one of its events is
        rows.append(row)
    keep = np.array(normal, bool)
    compact = np.append(np.where(keep, np.cumsum(keep) - 1, -1), -1)
    source.row_by_event = compact[np.concatenate(rows)] if rows else np.empty(0, np.int64)
    source.num_records = int(keep.sum())
    if unusable:
        owner = "record" if source.window is None else "device, time"
        source.skipped_by_reason[f"events without {owner} or feature"] = unusable
    if not keep.all():
        source.skipped_by_reason["records that are not normal"] = int((~keep).sum())
    if len(keep) and not keep.any():
        raise InputError(f"no record of {source.files[0]} has {source.label_column} = {source.normal_label} in all of its events")


def _named(batch: pa.RecordBatch, ids: dict[str | tuple[str, int], int]) -> NDArray[np.int64]:
    """(N,) number of each event's record, −1 where it has none; new records get the next numbers."""
    encoded = batch.column(RECORD).cast(pa.string()).dictionary_encode()
    new = np.array([ids.setdefault(text, len(ids)) for text in encoded.dictionary.to_pylist()] + [-1], np.int64)
    rows: NDArray[np.int64] = new[encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)]
    return rows


def _windowed(batch: pa.RecordBatch, ids: dict[str | tuple[str, int], int], window: Window) -> NDArray[np.int64]:
    """Likewise, of devices' windows, known by the device and the window's start."""
    encoded = batch.column(DEVICE).cast(pa.string()).dictionary_encode()
    device = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    times = parse_times(batch.column(TIME))
    known = np.flatnonzero((device >= 0) & (times != NO_TIME))
    pairs = np.stack([device[known], window_start(times[known], window.width)], 1)
    _, first, of = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
    names, numbers = encoded.dictionary.to_pylist(), np.empty(len(first), np.int64)
    for i in np.argsort(first).tolist():  # in order of appearance
        owner, start = pairs[first[i]].tolist()
        numbers[i] = ids.setdefault((names[owner], start), len(ids))
    rows = np.full(len(times), -1)
    rows[known] = numbers[of.reshape(-1)]
    return rows


def _wide_blocks(source: InputTables) -> Iterator[FeatureReadings]:
    start = 0
    for batch in _batches(source, source.feature_columns + ([source.label_column] if source.label_column else [])):
        if source.label_column is not None and source.normal_label is not None:
            batch = batch.filter(pa.array(match_normal_label(batch.column(source.label_column), source.normal_label)))
        rows = np.arange(start, start + len(batch), dtype=np.int64)
        start += len(batch)
        for name in source.feature_columns:
            yield FeatureReadings(name, rows, batch.column(name))


def _long_blocks(source: InputTables) -> Iterator[FeatureReadings]:
    assert source.row_by_event is not None  # noqa: S101 - index_records ran before
    start = 0
    for batch in _batches(source, [FEATURE, VALUE] + ([source.time_column] if source.time_column else [])):
        events = np.arange(start, start + len(batch), dtype=np.int64)
        start += len(batch)
        rows = source.row_by_event[events]
        times = parse_times(batch.column(source.time_column)) if source.time_column else np.full(len(batch), NO_TIME)
        slots = np.zeros_like(times) if source.window is None else source.window.slot(times)
        encoded = batch.column(FEATURE).cast(pa.string()).dictionary_encode()
        codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        codes[rows < 0] = -1
        order = np.argsort(codes, kind="stable")
        bounds = np.searchsorted(codes[order], np.arange(len(encoded.dictionary) + 1))
        for i, name in enumerate(encoded.dictionary.to_pylist()):
            at = order[bounds[i] : bounds[i + 1]]
            if len(at):
                yield FeatureReadings(name, rows[at], batch.column(VALUE).take(pa.array(at)), times[at], events[at], slots[at])


def parse_numbers(values: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """(N,) numbers, NaN where there is none, and (N,) whether a text is neither null nor a number."""
    if classify_type(values.type) == "text":
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        text = pc.utf8_trim_whitespace(values.cast(pa.string()))
        numeric = pc.match_substring_regex(
            text, r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$|^[+-]?(?i:nan|inf|infinity)$"
        )
        bad = pc.invert(numeric).fill_null(False).to_numpy(zero_copy_only=False)
        values = pc.if_else(numeric, pc.replace_substring_regex(text, r"^\+", ""), None)
        return _as_float(values), bad
    return _as_float(values), np.zeros(len(values), bool)


def _as_float(values: pa.Array) -> NDArray[np.float64]:
    x: NDArray[np.float64] = (
        in_seconds(values).cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float64)
    )
    return x
