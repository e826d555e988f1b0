"""What tests of commands share: a table of records, its events, and what a command that fails looks like."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from tests.models import SCHEMA, rows_of

Run = Callable[..., SimpleNamespace]
N = 80


def table_of_records() -> pa.Table:
    """Whole records with gaps, a column that is no feature, and a time."""
    rows = rows_of(SCHEMA, N, 9)
    columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in SCHEMA.names}
    columns["temperature"] = [None if x is None else round(x, 1) for x in columns["temperature"]]
    columns["record"] = [f"r{i}" for i in range(N)]
    columns["note"] = [f"note {i}" for i in range(N)]
    columns["at"] = pa.array([1_700_000_000_000_000 + 10**6 * i for i in range(N)], pa.timestamp("us", "UTC"))
    return pa.table(columns)


def events_of(table: pa.Table) -> list[dict[str, Any]]:
    """Single readings, all records interleaved, each record in the order of the columns."""
    rows = table.to_pylist()
    return [
        {"record": row["record"], "feature": name, "value": row[name], "time": row["at"].timestamp()}
        for name in SCHEMA.names
        for row in rows
        if row[name] is not None
    ]


def documents(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def failed(ended: SimpleNamespace, code: int, *words: object) -> None:
    assert (ended.code, ended.out, len(ended.lines)) == (code, "", 1), ended.err
    for word in words:
        assert str(word) in ended.lines[0]
