"""A table as the asynchronous event stream that its readings would have been: what `produce` sends."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from connectors.files.sources import names_of
from connectors.files.tables import LINES, RECORD, Layout, Table, find, lines, reading
from deformer_stream.codec.columns import (
    convert_ids,
    convert_times_of_day,
    is_scalar,
    is_time_of_day,
    parse_number,
    parse_times,
)
from deformer_stream.codec.timestamps import parse_rfc3339, seconds_to_micros
from deformer_stream.codec.validation import RejectionError
from deformer_stream.engine.events import NO_TIME
from deformer_stream.errors import ConfigError, InputError

Sent = tuple[bytes, bytes, int]
"""Key (the id of the record or the device in UTF-8), message (JSON), and the time at which it is due, microseconds
since 1970 or `NO_TIME`."""

HELD = 1_000_000
"""Most messages held back at once while they wait for their time; past it the earliest goes out."""

ROWS = 4096
"""Rows of a table that are read at a time."""

LONGEST = 64 * 2**20
"""Bytes of the longest JSON line that passes whole."""


def events_of(
    inputs: Sequence[str | Path],
    *,
    shuffle_within: float = 0.0,
    seed: int = 0,
    layout: Layout | None = None,
    record_column: str = RECORD,
    time_column: str | None = None,
    exclude: Sequence[str] = (),
    features: Sequence[str] | None = None,
    prefix: str = "",
) -> Iterator[Sent]:
    """One message of one reading for every cell that holds a value, in the order of their times.

    A reading's time is its row's (a wide table's first timestamp column, a long table's column `time`, or the column
    named by `time_column`) plus a delay drawn uniformly below `shuffle_within` seconds, so that records interleave; a
    row without a time takes that of the row before. Where there is no time column, the input's row n is at n seconds
    since 1970. Tables are taken to be in order of time; a row that is not goes out as soon as it is read. Equal seeds
    give equal streams.

    A long table without records has devices: its messages name them, for `--window`.

    record_column: of record ids in wide tables; without it rows are named as in `open_source`. prefix: put before every
    id. exclude: columns (or features of a long table) to leave out; features: the only ones to send. JSON lines pass as
    they are, without delay. A null or a number that is not finite is a gap: no message.

    Raises `InputError` naming the file, and `ConfigError` for an excluded column that no table has, before the first
    message is asked for where it can be known by then.
    """
    if shuffle_within < 0 or not isfinite(shuffle_within):
        raise InputError(f"a delay of {shuffle_within} seconds is impossible; give 0 or more")
    files = find(inputs)
    if exclude:
        _check_excluded(exclude, files, layout)
    wanted = _Wanted(frozenset(exclude), None if features is None else frozenset(features))
    delay, random = round(shuffle_within * 1e6), np.random.default_rng(seed)
    return _events(files, delay, random, layout, record_column, time_column, wanted, prefix)


def _check_excluded(exclude: Sequence[str], files: Sequence[Path], layout: Layout | None) -> None:
    """Of wide tables, whose columns are known beforehand; any other file may have anything."""
    if any(path.suffix.lower() in LINES for path in files):
        return
    tables = [Table.open(path) for path in files]
    if any(table.layout(layout, _owner(table)) == "long" for table in tables):
        return
    known = {name for table in tables for name in table.schema.names}
    for name in exclude:
        if name not in known:
            raise ConfigError(f"--exclude {name}: {files[0]} has no such column; check the name")


def _owner(table: Table) -> str:
    """What the readings of a long table belong to."""
    return "record" if "record" in table.schema.names or "device" not in table.schema.names else "device"


def _events(
    files: Sequence[Path],
    delay: int,
    random: np.random.Generator,
    layout: Layout | None,
    record_column: str,
    time_column: str | None,
    wanted: _Wanted,
    prefix: str,
) -> Iterator[Sent]:
    """`events_of`, message by message. delay: microseconds."""
    names = names_of(files)
    waiting: list[tuple[int, int, bytes, dict[str, Any]]] = []
    count = 0
    seconds = itertools.count(0, 1_000_000)
    for path in files:
        if path.suffix.lower() in LINES:
            yield from (_message(*heapq.heappop(waiting)) for _ in range(len(waiting)))
            yield from _passed(path)
            continue
        table = Table.open(path)
        owner = _owner(table)
        if table.layout(layout, owner) == "long":
            rows = _long(table, owner, time_column, wanted, seconds)
        else:
            owner = "record"
            rows = _wide(table, names[path], record_column, time_column, wanted, seconds)
        for now, id_, readings in _text_checked(path, rows):
            # Nothing that is still to come is due before this row.
            while waiting and (waiting[0][0] <= now or len(waiting) > HELD):
                yield _message(*heapq.heappop(waiting))
            delays = random.integers(0, delay + 1, len(readings)).tolist() if delay else [0] * len(readings)
            for (feature, value), late in zip(readings, delays, strict=True):
                due = now + late
                document = {owner: prefix + id_, "feature": feature, "value": value, "time": due / 1e6}
                heapq.heappush(waiting, (due, count, (prefix + id_).encode(), document))
                count += 1
    while waiting:
        yield _message(*heapq.heappop(waiting))


def _text_checked(path: Path, rows: Iterator[Row]) -> Iterator[Row]:
    """The same rows; text in them that is no UTF-8 is the file's fault."""
    with reading(path):
        yield from rows


class _Wanted:
    """Which features are sent."""

    def __init__(self, exclude: frozenset[str], features: frozenset[str] | None) -> None:
        self._exclude = exclude
        self._features = features

    def __call__(self, name: object) -> bool:
        return name not in self._exclude and (self._features is None or name in self._features)


Row = tuple[int, str, list[tuple[str, Any]]]
"""Time in microseconds, id of the record or the device, and the readings: feature and value."""


def _wide(
    table: Table, name: str | None, record: str, time: str | None, wanted: _Wanted, seconds: Iterator[int]
) -> Iterator[Row]:
    columns = table.schema.names
    table.demand(time, record)
    id_column = record if record in columns else None
    stamps = [c for c in columns if pa.types.is_timestamp(table.schema.field(c).type)]
    time = time or next(iter(stamps), None)
    kinds = dict(zip(columns, table.schema.types, strict=True))
    used = [
        c
        for c in columns
        if c not in (id_column, time) and wanted(c) and (is_scalar(kinds[c]) or is_time_of_day(kinds[c]))
    ]
    if not used:
        raise InputError(f"{table.path}: no column to send (of {table.shown()}); check --exclude and --model")
    first, last = 0, 0
    extra = [c for c in (id_column, time) if c is not None]
    for batch in table.batches([*used, *extra], ROWS, _text(id_column)):
        n = batch.num_rows
        ids = [str(row) if name is None else f"{name}:{row}" for row in range(first, first + n)]
        if id_column is not None:
            ids = _ids(table, batch, id_column)
        times = _times(table, batch, time, first, seconds)
        cells = [[_cell(value) for value in convert_times_of_day(batch.column(c)).to_pylist()] for c in used]
        for i in range(n):
            last = times[i] if times[i] != NO_TIME else last
            yield last, ids[i], [(c, cell[i]) for c, cell in zip(used, cells, strict=True) if cell[i] is not None]
        first += n


def _long(table: Table, owner: str, time: str | None, wanted: _Wanted, seconds: Iterator[int]) -> Iterator[Row]:
    """owner: the column that says whose a reading is."""
    columns = table.schema.names
    for column in (owner, "feature", "value"):
        if column not in columns:
            raise InputError(f"{table.path}: a long table needs a column {column!r}; rename one, or use --layout wide")
    table.demand(time)
    time = time or ("time" if "time" in columns else None)
    used = [c for c in (owner, "feature", "value", "label", time) if c is not None and c in columns]
    first, last = 0, 0
    for batch in table.batches(used, ROWS, _text(owner)):
        times = _times(table, batch, time, first, seconds)
        values = [_spelled(_cell(value)) for value in convert_times_of_day(batch.column("value")).to_pylist()]
        if "label" in used:
            labels = [_cell(value) for value in batch.column("label").to_pylist()]
            values = [value if label is None else label for value, label in zip(values, labels, strict=True)]
        names = batch.column("feature").to_pylist()
        for i, id_ in enumerate(_ids(table, batch, owner)):
            last = times[i] if times[i] != NO_TIME else last
            if values[i] is not None and wanted(names[i]):
                yield last, id_, [(names[i], values[i])]
        first += batch.num_rows


def _times(table: Table, batch: pa.RecordBatch, time: str | None, first: int, seconds: Iterator[int]) -> list[int]:
    """Microseconds by row, `NO_TIME` where null; without a time column the next seconds."""
    if time is None:
        return list(itertools.islice(seconds, batch.num_rows))
    times, bad = parse_times(batch.column(time), f"{table.path}: column {time!r}")
    for row, refusal in bad.items():
        raise InputError(f"{table.path}: row {first + row}: column {time!r}: {refusal.detail}")
    return [int(t) for t in times]


def _ids(table: Table, batch: pa.RecordBatch, column: str) -> list[str]:
    ids = convert_ids(batch.column(column), f"{table.path}: column {column!r}")
    if ids.null_count:
        raise InputError(f"{table.path}: column {column!r} has a null; every row needs a record id")
    return [str(name) for name in ids.to_pylist()]


def _text(column: str | None) -> dict[str, pa.DataType]:
    """A CSV's record ids are text, lest `007` become 7."""
    return {} if column is None else {column: pa.string()}


def _cell(value: Any) -> Any:
    """A value that JSON can carry, or None for a gap."""
    if value is None or isinstance(value, bool | int | str):
        return value
    number = float(value)
    return number if isfinite(number) else None


def _spelled(value: Any) -> Any:
    """In a column that mixes numbers and labels, all are text: what spells a number is one."""
    if not isinstance(value, str):
        return value
    spelled = parse_number(value)
    return value if spelled is None or not isfinite(spelled) else spelled


def _message(due: int, count: int, key: bytes, document: dict[str, Any]) -> Sent:
    return key, orjson.dumps(document), due


def _due(document: Any) -> int:
    """The time a message states, `NO_TIME` where it states none that can be read."""
    time = document.get("time") if isinstance(document, dict) else None
    try:
        if isinstance(time, str):
            return parse_rfc3339(time)
        return seconds_to_micros(time) if isinstance(time, int | float) else NO_TIME
    except RejectionError:
        return NO_TIME


def _passed(path: Path) -> Iterator[Sent]:
    """JSON lines as they are, keyed by their record where they have one, due at the time they state."""
    for block in lines(path, LONGEST):
        for line in block:
            if line and not line.isspace():
                try:
                    document = orjson.loads(line)
                except orjson.JSONDecodeError:
                    document = None
                record = document.get("record") if isinstance(document, dict) else None
                key = str(record).encode() if isinstance(record, str | int) else b""
                yield key, line, _due(document)
