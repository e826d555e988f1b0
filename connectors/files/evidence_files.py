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
        origin: The model and the partition.
        sequence: Number of the row in its file, so that nothing else is compared.
        alert: The alert; None for a closed record.
        fields: The other fields of a closed record, in the order of `ClosedRows`; empty for an alert.
    """

    time: int
    is_closed: bool
    record: str
    origin: tuple[str, int]
    sequence: int
    alert: AlertRow | None
    fields: tuple[Any, ...]


def sort_evidence_file(path: Path) -> None:
    """Put the rows of a file of evidence in order of time. They are read into memory.

    Raises:
        InputError: The file cannot be read.
        Unavailable: It cannot be written.
    """
    rows = sorted(_iterate_rows(path))
    lines = (line for batch in _collect_batches(rows) for line in encode_evidence_parts(batch))
    replace_file(path, b"".join(line + b"\n" for line in lines))


def merge_evidence_files(paths: Sequence[Path]) -> Iterator[EvidenceBatch]:
    """Yield the evidence of files that `sort_evidence_file` has sorted in order of time, in bounded memory.

    Raises:
        InputError: A file cannot be read.
    """
    # Rows of several files can be equal up to their numbers; alerts cannot be compared.
    return _collect_batches(heapq.merge(*map(_iterate_rows, paths), key=lambda row: row[:5]))


def _iterate_rows(path: Path) -> Iterator[_TimedRow]:
    """Yield the rows of a file of evidence, batch by batch, those of a batch in order of time."""
    numbers = itertools.count()
    for batch in read_evidence([path]):
        origin, closed = (batch.model, batch.partition), batch.closed
        rows = [_TimedRow(alert.time, False, alert.record, origin, next(numbers), alert, ()) for alert in batch.alerts]
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
    """Yield consecutive rows of the same model and partition as batches of at most `ROWS_PER_BATCH` rows."""
    for (model, partition), of_origin in itertools.groupby(rows, lambda row: row.origin):
        while chunk := list(itertools.islice(of_origin, ROWS_PER_BATCH)):
            closed = [row for row in chunk if row.is_closed]
            # Without rows, the transposition would have no columns.
            columns = list(zip(*(row.fields for row in closed), strict=True)) or [()] * 6
            p_values, scores, record_p_values, record_scores = (
                np.array(columns[index], np.float64) for index in (0, 1, 4, 5)
            )
            yield EvidenceBatch(
                model,
                partition,
                ClosedRows(
                    [row.record for row in closed],
                    np.array([row.time for row in closed], np.int64),
                    p_values,
                    scores,
                    np.array(columns[2], np.int32),
                    np.array(columns[3], np.bool_),
                    None if np.isnan(record_p_values).all() else record_p_values,
                    record_scores,
                ),
                tuple(row.alert for row in chunk if row.alert is not None),
            )
