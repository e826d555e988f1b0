"""Files as event sources: poll by poll, in bounded memory, one file after the other.

A finite source: there is nothing to commit, a run over it starts at its beginning.
"""

from __future__ import annotations

import os
import selectors
import sys
import time as clock
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from connectors.files.background import Prefetcher
from connectors.files.reorder import reordered_lines, reordered_rows
from connectors.files.tables import (
    BLOCK,
    LINES,
    PARQUET,
    RECORD,
    Layout,
    LineSplitter,
    Table,
    csv_type,
    enumerated,
    find,
    lines,
)
from deformer_stream.codec import FieldNames, Order, WindowAssigner
from deformer_stream.codec.columns import convert_ids, is_text, to_python_values
from deformer_stream.codec.payloads import LongRows, Messages, Payload, WideRows
from deformer_stream.engine.events import NO_TIME
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model.schema import Schema
from deformer_stream.runtime.ports import PollResult

STANDARD_INPUT = "-"


def open_source(
    inputs: Sequence[str | Path],
    schema: Schema,
    *,
    layout: Layout | None = None,
    order: Order = "arrival",
    seed: int = 0,
    fields: FieldNames | None = None,
    record_column: str = RECORD,
    time_column: str | None = None,
    batch_events: int = 8192,
    max_message_bytes: int = 1_048_576,
    windows: WindowAssigner | None = None,
) -> FileSource | StandardInput:
    """The events of Parquet, CSV and JSON lines files and folders, one after the other; or of standard input, for "-".

    layout: of tables; by default long where columns record, feature and value are there. order, seed: of the readings
    within a record; pass the same to the codec, which orders wide rows. In long tables and JSON lines an order other
    than arrival needs whole records, so that all of these are read into memory before the first event comes. fields:
    JSON fields, and columns of long tables. record_column, time_column: of wide tables; without the first a table
    numbers its rows ("0", "1", …, with several files "file:0", …), and the time is by default the first timestamp.
    batch_events: about how many events one poll returns. windows: a device and a time stand for a record, as in the
    codec; this takes the order of arrival.

    Every file is opened and checked at once. Raises `InputError` naming the file and the remedy.
    """
    settings = _Reading(
        schema,
        order,
        seed,
        fields or FieldNames(),
        record_column,
        time_column,
        batch_events,
        max_message_bytes,
        windows,
    )
    if STANDARD_INPUT in map(str, inputs):
        if len(inputs) > 1 or order != "arrival":
            raise ConfigError("standard input (-) is read alone and in order of arrival; write it to a file first")
        return StandardInput(max_message_bytes=max_message_bytes, batch_events=batch_events)
    files = find(inputs)
    names = names_of(files)
    wide: list[_WideTable] = []
    long: list[_LongTable] = []
    texts: list[Path] = []
    parts: list[Iterator[Payload]] = []
    for path in files:
        if path.suffix.lower() in LINES:
            texts.append(path)
            parts.append(_messages(path, settings))
            continue
        table = Table.open(path)
        owner, feature, value = settings.needed(table)[:3]
        if table.layout(layout, owner, feature, value) == "wide":
            wide.append(_WideTable.of(table, names[path], settings))
            parts.append(wide[-1].rows())
        else:
            long.append(_LongTable.of(table, settings))
            parts.append(long[-1].rows())
    if order != "arrival" and windows is not None and (long or texts):
        raise ConfigError(f"order {order} needs whole records, and windows take shape as events arrive: use arrival")
    if order != "arrival":
        parts = [part.rows() for part in wide]
        if long:
            parts.append(
                reordered_rows([part.rows for part in long], schema, settings.fields, order, seed, batch_events)
            )
        if texts:
            parts.append(reordered_lines(texts, schema, settings.fields, order, seed, batch_events, max_message_bytes))
    tables: list[_WideTable | _LongTable] = [*wide, *long]
    known = [table.table.rows for table in tables if table.table.rows is not None]
    total = sum(known) if len(known) == len(files) else None
    ignored = dict.fromkeys(name for table in tables for name in table.ignored)
    return FileSource(chain.from_iterable(parts), total, tuple(ignored))


class FileSource:
    """Payloads from files. total: rows in all, None if not known. ignored: columns that are no features of the
    model."""

    def __init__(self, payloads: Iterator[Payload], total: int | None, ignored: tuple[str, ...]) -> None:
        self.total = total
        self.ignored = ignored
        self._payloads = Prefetcher(payloads)
        self._exhausted = False

    @property
    def is_exhausted(self) -> bool:
        return self._exhausted

    def poll(self, timeout: float) -> PollResult:
        """The next rows or lines; what is there is there at once, so that the timeout plays no part."""
        data = None if self._exhausted else next(self._payloads, None)
        self._exhausted = data is None
        return PollResult(data)

    def commit(self) -> None:
        """Nothing to do: a file keeps no position."""

    def close(self) -> None:
        self._exhausted = True
        self._payloads.close()


class StandardInput:
    """JSON lines from a file descriptor, by default standard input, as they come. Exhausted at end of file."""

    total: int | None = None
    ignored: tuple[str, ...] = ()

    def __init__(
        self, descriptor: int | None = None, *, max_message_bytes: int = 1_048_576, batch_events: int = 8192
    ) -> None:
        self._descriptor = sys.stdin.fileno() if descriptor is None else descriptor
        self._splitter = LineSplitter(max_message_bytes)
        self._batch_events = batch_events
        self._numbered: list[tuple[int, bytes]] = []
        self._count = 0
        self._ended = False
        # poll(2), unlike epoll, also takes a regular file, as in `deformer-stream replay - < events.jsonl`.
        self._selector = selectors.PollSelector()
        self._selector.register(self._descriptor, selectors.EVENT_READ)

    @property
    def is_exhausted(self) -> bool:
        return self._ended and not self._numbered

    def poll(self, timeout: float) -> PollResult:
        """What has come so far; waits at most `timeout` seconds for the first line and not at all for a second."""
        deadline = clock.monotonic() + timeout
        while not self._ended and len(self._numbered) < self._batch_events:
            wait = 0.0 if self._numbered else max(0.0, deadline - clock.monotonic())
            if not self._selector.select(wait):
                break
            block = os.read(self._descriptor, BLOCK)
            new = self._splitter.feed(block) if block else self._splitter.finish()
            self._ended = not block
            self._numbered += _numbered(new, self._count)
            self._count += len(new)
        now, self._numbered = self._numbered[: self._batch_events], self._numbered[self._batch_events :]
        return PollResult(_as_messages(STANDARD_INPUT, now) if now else None)

    def commit(self) -> None:
        """Nothing to do: what was read from a pipe is gone."""

    def close(self) -> None:
        self._selector.close()
        self._ended, self._numbered = True, []


@dataclass(frozen=True, slots=True)
class _Reading:
    """How files are read; see `open_source`."""

    schema: Schema
    order: Order
    seed: int
    fields: FieldNames
    record: str
    time: str | None
    batch_events: int
    max_message_bytes: int
    windows: WindowAssigner | None

    def needed(self, table: Table) -> tuple[str, ...]:
        return self.fields.required_columns(table.schema.names, self.windows is not None)


@dataclass(frozen=True, slots=True)
class _WideTable:
    """features: the columns that are features, in the file's order. record, time: None where there is no such
    column."""

    table: Table
    name: str | None
    features: list[str]
    record: str | None
    time: str | None
    ignored: list[str]
    settings: _Reading

    @staticmethod
    def of(table: Table, name: str | None, settings: _Reading) -> _WideTable:
        columns, known = table.schema.names, settings.schema.code_by_name
        features = [column for column in columns if column in known]
        if not features:
            want = enumerated(settings.schema.names)
            raise InputError(
                f"{table.path}: no column is a feature of the model ({table.shown()} against {want}); check the model"
            )
        table.demand(settings.time, settings.record)
        rest = [column for column in columns if column not in known]
        stamps = [column for column in rest if pa.types.is_timestamp(table.schema.field(column).type)]
        time = settings.time or next(iter(stamps), None)
        record = settings.record if settings.record in rest else None
        ignored = [column for column in rest if column not in (record, time)]
        return _WideTable(table, name, features, record, time, ignored, settings)

    def rows(self) -> Iterator[WideRows]:
        settings = self.settings
        features = settings.schema.features
        types = {name: csv_type(self.table, features[settings.schema.code_by_name[name]]) for name in self.features}
        extra = [column for column in (self.record, self.time) if column is not None]
        if self.record is not None:
            types[self.record] = pa.string()
        types |= _stamps(self.table, self.time)
        first = 0
        size = max(1, settings.batch_events // len(settings.schema))
        for batch in self.table.batches([*self.features, *extra], size, types):
            yield WideRows(str(self.table.path), batch, self._ids(batch, first), first, self.time)
            first += batch.num_rows

    def _ids(self, batch: pa.RecordBatch, first: int) -> list[str]:
        """Record ids; a null becomes "", which the codec refuses."""
        if self.record is not None:
            ids = convert_ids(batch.column(self.record), f"{self.table.path}: column {self.record!r}")
            return [str(name) for name in to_python_values(ids.fill_null(""))]
        rows = range(first, first + batch.num_rows)
        return [str(row) for row in rows] if self.name is None else [f"{self.name}:{row}" for row in rows]


@dataclass(frozen=True, slots=True)
class _LongTable:
    """columns: those that are read."""

    table: Table
    columns: list[str]
    ignored: list[str]
    settings: _Reading

    @staticmethod
    def of(table: Table, settings: _Reading) -> _LongTable:
        fields, columns = settings.fields, table.schema.names
        for name in settings.needed(table):
            if name not in columns:
                raise InputError(
                    f"{table.path}: a long table needs a column {name!r}; rename one, or use --layout wide"
                )
            kind = table.schema.field(name).type
            if name == fields.feature and table.path.suffix.lower() in PARQUET and not is_text(kind):
                raise InputError(f"{table.path}: column {name!r} is {kind}; feature names are text: convert the column")
        owners = (fields.record,) if settings.windows is None else (fields.record, fields.device)
        wanted = (*owners, fields.feature, fields.value, fields.label, fields.time)
        used = [name for name in wanted if name in columns]
        return _LongTable(table, used, [name for name in columns if name not in used], settings)

    def rows(self) -> Iterator[LongRows]:
        settings, fields = self.settings, self.settings.fields
        # A CSV's values are read as text, so that one bad value is refused alone and labels stay what they are.
        texts = (fields.record, fields.device, fields.feature, fields.value, fields.label)
        types = dict.fromkeys((name for name in texts if name in self.columns), pa.string())
        if fields.time in self.columns:
            types |= _stamps(self.table, fields.time)
        first = 0
        for batch in self.table.batches(self.columns, settings.batch_events, types):
            yield LongRows(str(self.table.path), batch, first)
            first += batch.num_rows


def _stamps(table: Table, time: str | None) -> dict[str, pa.DataType]:
    """Timestamps of a CSV are read in microseconds, for its first block may have shown whole seconds only."""
    if time is None or not pa.types.is_timestamp(table.schema.field(time).type):
        return {}
    return {time: pa.timestamp("us", table.schema.field(time).type.tz)}


def names_of(files: Sequence[Path]) -> dict[Path, str | None]:
    """What a file's unnamed records are called by: None for a single file, its stem if stems differ, else its path
    below the folder that all files share."""
    if len(set(files)) < len(files):
        twice = next(path for path in files if list(files).count(path) > 1)
        raise InputError(f"{twice}: named twice; name every file once")
    if len(files) == 1:
        return {files[0]: None}
    names = {path: path.stem for path in files}
    if len(set(names.values())) < len(files):
        shared = os.path.commonpath([path.resolve().parent for path in files])
        names = {path: path.resolve().relative_to(shared).with_suffix("").as_posix() for path in files}
    if len(set(names.values())) < len(files):
        names = {path: path.resolve().relative_to(shared).as_posix() for path in files}
    return dict(names)


def _messages(path: Path, settings: _Reading) -> Iterator[Messages]:
    count = 0
    for block in lines(path, settings.max_message_bytes):
        numbered = _numbered(block, count)
        count += len(block)
        for start in range(0, len(numbered), settings.batch_events):
            yield _as_messages(str(path), numbered[start : start + settings.batch_events])


def _numbered(block: list[bytes], first: int) -> list[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers."""
    return [(number, line) for number, line in enumerate(block, first) if line and not line.isspace()]


def _as_messages(topic: str, numbered: list[tuple[int, bytes]]) -> Messages:
    n = len(numbered)
    offsets = np.array([number for number, _ in numbered], np.int64)
    payloads: list[bytes | None] = [line for _, line in numbered]
    return Messages(topic, [None] * n, payloads, np.full(n, NO_TIME), np.zeros(n, np.int32), offsets)
