"""Files of evidence, as `replay --evidence` writes them, as input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from connectors.files.lines import read_lines
from deformer_stream.codec.encode_evidence import MAX_EVIDENCE_BYTES, decode_evidence
from deformer_stream.errors import InputError
from deformer_stream.incidents.events import EvidenceBatch
from deformer_stream.tables.discovery import JSON_LINES, find_files
from deformer_stream.tables.table import map_read_errors

EVIDENCE_PREFIX, EVIDENCE_KEY = b'{"v":', b'"closed":'
"""The beginning of a line of evidence, and one of its keys. An event has neither, unless its fields are named so."""

MAX_LINE_BYTES = 2 * MAX_EVIDENCE_BYTES
"""Longest line that is read. It exceeds what this program writes, for files of later releases."""


def is_evidence(path: str | Path) -> bool:
    """Return whether a file holds evidence and no events, by its first line. A missing file holds none."""
    if not Path(path).is_file():
        return False
    with map_read_errors(Path(path)), Path(path).open("rb") as file:
        if file.read(len(EVIDENCE_PREFIX)) != EVIDENCE_PREFIX:
            return False
        return EVIDENCE_KEY in file.readline(MAX_LINE_BYTES)


def read_evidence(inputs: Sequence[str | Path]) -> Iterator[EvidenceBatch]:
    """Yield the batches of files of evidence, one file after the other.

    Args:
        inputs: Paths of files and folders, and patterns.

    Raises:
        InputError: A file is missing, cannot be read, or has a line that is no evidence.
    """
    for path in find_files(inputs, JSON_LINES):
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
