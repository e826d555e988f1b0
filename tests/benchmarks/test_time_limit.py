"""The benchmark of the time limit of training: its tables, and the cases that need data."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks import time_limit


def test_cases_whose_data_is_not_there_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEFORMER_DATA", str(tmp_path))
    (tmp_path / "icu2012").mkdir()
    missing = {case.name: time_limit.find_missing_data(case) for case in time_limit.CASES}
    assert [path for path in missing.values() if path] == [tmp_path / "hydraulic"]
    assert any("stays" in name for name, path in missing.items() if path is None)


def test_generated_tables_are_written_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "BATCH_ROWS", 40)
    time_limit.generate(100, time_limit.draw_sensor_readings(5, 2))(tmp_path / "table.parquet")
    table = pq.read_table(tmp_path / "table.parquet")
    assert table.num_rows == 100
    assert table["feature"].to_pylist()[:6] == ["s0", "s1", "s2", "s3", "s4", "s0"]
    assert table["time"].is_valid().to_pylist() == [True] * 100
