"""Shared data and assertions of the tests that run commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from tests.models import SCHEMA, draw_rows

RunCommand = Callable[..., SimpleNamespace]
"""Runs a command in this process.

Its arguments are the words of the command line. The result has the exit status (`code`), standard output (`out`),
standard error (`err`), and the lines of standard error (`lines`).
"""

NUM_RECORDS = 80
"""Number of records of `make_record_table`."""


def make_record_table() -> pa.Table:
    """Return a wide table of records with missing readings, ids, times, and a column `note` that is not a feature."""
    rows = draw_rows(SCHEMA, NUM_RECORDS, 9)
    columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in SCHEMA.names}
    columns["temperature"] = [None if x is None else round(x, 1) for x in columns["temperature"]]
    columns["record"] = [f"r{i}" for i in range(NUM_RECORDS)]
    columns["note"] = [f"note {i}" for i in range(NUM_RECORDS)]
    microseconds = [1_700_000_000_000_000 + 10**6 * i for i in range(NUM_RECORDS)]
    columns["at"] = pa.array(microseconds, pa.timestamp("us", "UTC"))
    return pa.table(columns)


def list_events(table: pa.Table) -> list[dict[str, Any]]:
    """Return the readings of a record table as single events.

    The first readings of all records come first, then the second ones, and so on, in the order of the columns.
    """
    rows = table.to_pylist()
    return [
        {"record": row["record"], "feature": name, "value": row[name], "time": row["at"].timestamp()}
        for name in SCHEMA.names
        for row in rows
        if row[name] is not None
    ]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON documents of a file with one document per line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_command_failed(result: SimpleNamespace, code: int, *words: object) -> None:
    """Assert that a command ended with an exit status and one line on standard error that contains all words."""
    assert (result.code, result.out, len(result.lines)) == (code, "", 1), result.err
    for word in words:
        assert str(word) in result.lines[0]
