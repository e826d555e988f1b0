"""Tests of the benchmark of runs in shards: its input, and the sums by which outputs are compared."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.sharded_replay import compute_digest, is_worker, list_children, write_input

NUM_READINGS, NUM_FEATURES, NUM_FILES = 240, 3, 4


@pytest.mark.parametrize("layout", ["long", "wide"])
@pytest.mark.parametrize("source", ["disk", "hive"])
def test_input_has_each_reading_once(tmp_path: Path, layout: str, source: str) -> None:
    options = argparse.Namespace(features=NUM_FEATURES, files=NUM_FILES, layout=layout)
    (folder,) = write_input(tmp_path / "input", options, source, NUM_READINGS, None)
    paths = sorted(Path(folder).rglob("*.parquet"))
    assert len(paths) == NUM_FILES
    assert all((path.parent.name.startswith("day=")) == (source == "hive") for path in paths)
    rows = [row for path in paths for row in pq.ParquetFile(path).read().to_pylist()]
    if layout == "long":
        assert len(rows) == len({(row["record"], row["feature"]) for row in rows}) == NUM_READINGS
    else:
        assert len(rows) == len({row["record"] for row in rows}) == NUM_READINGS // NUM_FEATURES
        assert all({"f0", "f1", "f2"} <= row.keys() for row in rows)


def test_sums_of_parts_in_another_order_are_those_of_the_whole(tmp_path: Path) -> None:
    columns: dict[str, Any] = {
        "record": ["a", "b", None],
        "n": [1, 2, 3],
        "p": [0.5, None, -0.0],
        "ok": [True, False, True],
    }
    table = pa.table(columns)
    whole, parts = tmp_path / "whole.parquet", [tmp_path / "1.parquet", tmp_path / "2.parquet"]
    pq.write_table(table, whole)
    pq.write_table(table.slice(2), parts[0])
    pq.write_table(table.slice(0, 2), parts[1])
    assert compute_digest(parts) == compute_digest([whole])
    assert compute_digest([whole])[0] == 3
    for name in columns:  # two cells are exchanged
        changed = [columns[name][1], columns[name][0], columns[name][2]]
        pq.write_table(pa.table(columns | {name: changed}), whole)
        assert compute_digest(parts) != compute_digest([whole]), name


def test_sums_of_alerts_do_not_depend_on_attributions(tmp_path: Path) -> None:
    alerts = [
        {"id": f"{i}", "record": f"r{i}", "raised_at": i, "p_value": 0.1, "source": {"offset": i}, "contributions": [i]}
        for i in range(3)
    ]
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    whole.write_text("".join(json.dumps(alert) + "\n" for alert in alerts))
    part.write_text("".join(json.dumps(alert | {"contributions": []}) + "\n" for alert in reversed(alerts)))
    assert compute_digest([part]) == compute_digest([whole])
    part.write_text("".join(json.dumps(alert | {"p_value": 0.2}) + "\n" for alert in alerts))
    assert compute_digest([part]) != compute_digest([whole])


def test_workers_are_found_among_the_children() -> None:
    script = """
import multiprocessing, sys, time
worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), daemon=True)
worker.start()
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        while not any(is_worker(pid) for pid in list_children(process.pid)):
            assert process.poll() is None
        assert not is_worker(process.pid)
        process.communicate()
    assert not is_worker(process.pid)
    assert not is_worker(os.getpid())
