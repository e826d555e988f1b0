"""Files of evidence, as `replay --evidence` writes them: reading, and merging those of shards in order of time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from connectors.files.lines import read_lines
from deformer_stream.codec.encode_evidence import MAX_EVIDENCE_BYTES, decode_evidence, encode_evidence_parts
from deformer_stream.durable_file import replace_file
from deformer_stream.errors import InputError
from deformer_stream.incidents.events import AlertRow, ClosedRows, EvidenceBatch
from deformer_stream.tables.data_files import open_bytes, parse_url
from deformer_stream.tables.discovery import JSON_LINES, find_data_files, has_ending
from deformer_stream.tables.table import map_read_errors

EVIDENCE_PREFIX, EVIDENCE_KEY = b'{"v":', b'"closed":'
"""The beginning of a line of evidence, and one of its keys. An event has neither, unless its fields are named so."""

MAX_LINE_BYTES = 2 * MAX_EVIDENCE_BYTES
"""Longest line that is read. It exceeds what this program writes, for files of later releases."""


ROWS_PER_BATCH = 200
"""Largest number of records and alerts of a batch in order of time. It is so small that a batch is a single line."""

ROWS_PER_CHUNK = 10_000
"""Largest number of rows of all models in order of time of which batches are made together."""


def is_evidence(entry: str | Path) -> bool:
    """Return whether an input is a file of evidence and not of events, by its first line. A missing file is none.

    Args:
        entry: The path or the URL of a file, which may be compressed. Folders and patterns are inputs of events.

    Raises:
        InputError: The file cannot be read.
        ConfigError: A URL contains credentials.
    """
    if not has_ending(entry, JSON_LINES) or (parse_url(entry) is None and not Path(entry).is_file()):
        return False
    (file, *others) = find_data_files([entry], JSON_LINES)
    if others:
        return False
    with map_read_errors(str(file)), open_bytes(file) as stream:
        line = stream.readline(MAX_LINE_BYTES)
    return line.startswith(EVIDENCE_PREFIX) and EVIDENCE_KEY in line


def read_evidence(inputs: Sequence[str | Path]) -> Iterator[EvidenceBatch]:
    """Yield the batches of files of evidence, one file after the other.

    Args:
        inputs: Paths and URLs of files and folders, and patterns.

    Raises:
        InputError: A file is missing, cannot be read, or has a line that is no evidence.
    """
    for path in find_data_files(inputs, JSON_LINES):
        line_number = 0
        for lines in read_lines(path, MAX_LINE_BYTES):
            for line in lines:
                line_number += 1
                if not line.strip():
                    continue
                try:
                    yield decode_evidence(line)
                except InputError as error:
                    raise InputError(f"{path}, line {line_number}: {error}") from None


class _TimedRow(NamedTuple):
    """A closed record or an alert, which compare in order of time.

    Attributes:
        time: Latest event time of the record, or that of the alert.
        is_closed: Whether it is a closed record. An alert comes first, because it must not come after its record.
        record: Id of the record.
        origin: The name and the fingerprint of the model, and the partition.
        sequence: Number of the row in its file, so that nothing else is compared.
        alert: The alert; None for a closed record.
        fields: The other fields of a closed record, in the order of `ClosedRows`; empty for an alert.
    """

    time: int
    is_closed: bool
    record: str
    origin: tuple[str, str, int]
    sequence: int
    alert: AlertRow | None
    fields: tuple[Any, ...]


def sort_evidence_file(path: Path) -> None:
    """Put the rows of a file of evidence in order of time, as `_collect_batches` does. They are read into memory.

    Raises:
        InputError: The file cannot be read.
        Unavailable: It cannot be written.
    """
    rows = sorted(_iterate_rows(path))
    lines = (line for batch in _collect_batches(rows) for line in encode_evidence_parts(batch))
    replace_file(path, b"".join(line + b"\n" for line in lines))


def merge_evidence_files(paths: Sequence[Path]) -> Iterator[EvidenceBatch]:
    """Yield the evidence of files that `sort_evidence_file` has sorted in order of time, in bounded memory.

    The rows of each model are in order of time. Rows of several models are in the order of `_collect_batches`.

    Raises:
        InputError: A file cannot be read.
    """
    # Rows of several files can be equal up to their numbers; alerts cannot be compared.
    return _collect_batches(heapq.merge(*map(_iterate_rows, paths), key=lambda row: row[:5]))


def _iterate_rows(path: Path) -> Iterator[_TimedRow]:
    """Yield the rows of a file of evidence. If `_collect_batches` has made its batches, they are in order of time."""
    numbers = itertools.count()
    rows: list[_TimedRow] = []
    last_origin: tuple[str, str, int] | None = None
    for batch in read_evidence([path]):
        origin, closed = (batch.model_name, batch.model, batch.partition), batch.closed
        if last_origin is not None and origin <= last_origin:  # a new chunk begins
            yield from sorted(rows)
            rows = []
        last_origin = origin
        rows += [_TimedRow(alert.time, False, alert.record, origin, next(numbers), alert, ()) for alert in batch.alerts]
        unknown = np.full(len(closed), np.nan)
        columns = (
            closed.p_values,
            closed.scores,
            closed.num_readings,
            closed.is_alerted,
            unknown if closed.record_p_values is None else closed.record_p_values,
            unknown if closed.record_scores is None else closed.record_scores,
        )
        fields = zip(*(column.tolist() for column in columns), strict=True)
        for record, time, row in zip(closed.record_ids, closed.times.tolist(), fields, strict=True):
            rows.append(_TimedRow(time, True, record, origin, next(numbers), None, row))
    yield from sorted(rows)


def _collect_batches(rows: Iterable[_TimedRow]) -> Iterator[EvidenceBatch]:
    """Yield rows as batches of at most `ROWS_PER_BATCH` rows of the same model and partition.

    The rows of a model stay in order, because its incidents depend on it. Rows of other models may come between those
    of a batch. A chunk of consecutive rows has one batch for each model, and these are in the order of their origins.
    So a batch whose origin does not follow that of the batch before it begins a chunk. By this, `_iterate_rows`
    restores the order of all rows.

    Args:
        rows: The rows in order of time.
    """
    chunk: dict[tuple[str, str], list[_TimedRow]] = {}
    num_rows = 0
    for row in rows:
        of_model = chunk.get(row.origin[:2], [])
        is_full = len(of_model) == ROWS_PER_BATCH or num_rows == ROWS_PER_CHUNK
        if is_full or (of_model and of_model[0].origin != row.origin):
            yield from _make_batches(chunk.values())
            chunk, num_rows = {}, 0
        chunk.setdefault(row.origin[:2], []).append(row)
        num_rows += 1
    yield from _make_batches(chunk.values())


def _make_batches(groups: Iterable[list[_TimedRow]]) -> Iterator[EvidenceBatch]:
    """Yield a batch for each group of rows, which have the same origin, in the order of the origins."""
    for rows in sorted(groups, key=lambda rows: rows[0].origin):
        model_name, model, partition = rows[0].origin
        closed = [row for row in rows if row.is_closed]
        # Without rows, the transposition would have no columns.
        columns = list(zip(*(row.fields for row in closed), strict=True)) or [()] * 6
        p_values, scores, record_p_values, record_scores = (
            np.array(columns[index], np.float64) for index in (0, 1, 4, 5)
        )
        yield EvidenceBatch(
            model,
            partition,
            ClosedRows(
                record_ids=[row.record for row in closed],
                times=np.array([row.time for row in closed], np.int64),
                p_values=p_values,
                scores=scores,
                num_readings=np.array(columns[2], np.int32),
                is_alerted=np.array(columns[3], np.bool_),
                record_p_values=None if np.isnan(record_p_values).all() else record_p_values,
                record_scores=record_scores,
            ),
            tuple(row.alert for row in rows if row.alert is not None),
            model_name,
        )
