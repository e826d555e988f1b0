"""Files of evidence, as `replay --evidence` writes them, as input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from connectors.files.lines import read_lines
from deformer_stream.codec.encode_evidence import MAX_EVIDENCE_BYTES, decode_evidence
from deformer_stream.errors import InputError
from deformer_stream.incidents.events import EvidenceBatch
from deformer_stream.tables.data_files import open_bytes, parse_url
from deformer_stream.tables.discovery import JSON_LINES, find_data_files, has_ending
from deformer_stream.tables.table import map_read_errors

EVIDENCE_PREFIX, EVIDENCE_KEY = b'{"v":', b'"closed":'
"""The beginning of a line of evidence, and one of its keys. An event has neither, unless its fields are named so."""

MAX_LINE_BYTES = 2 * MAX_EVIDENCE_BYTES
"""Longest line that is read. It exceeds what this program writes, for files of later releases."""


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
