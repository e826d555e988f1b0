"""Trials that take minutes. pytest collects this file only if it is named, as `make first-hours` does."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.first_hours.conftest import TypeCommand, count_alerts
from tests.first_hours.plant_data import read_skab, record_pump_station


def test_two_million_rows_within_the_time_limit(new_terminal: TypeCommand, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    causes = rng.normal(size=(2_000_000, 3))
    effects = rng.normal(size=(3, 10))
    measured = causes @ effects + 0.3 * rng.normal(size=(2_000_000, 10))
    pq.write_table(pa.table({f"x{i}": measured[:, i] for i in range(10)}), tmp_path / "normal.parquet")
    started = time.monotonic()
    trained = new_terminal("deformer-train normal.parquet --out model --max-time 25s")
    seconds = time.monotonic() - started
    assert seconds <= 27.5, f"{seconds:.1f} s"
    assert "of 2,000,000" in trained.text


def test_the_messy_table_with_half_a_minute_of_training(new_terminal: TypeCommand, tmp_path: Path) -> None:
    record_pump_station(3000).to_csv(tmp_path / "normal.csv", index=False)
    record_pump_station(2000, first_row=3000, seed=2).to_csv(tmp_path / "next.csv", index=False)
    new_terminal("deformer-train normal.csv --out model --max-time 30s")
    replayed = new_terminal("deformer-stream replay next.csv --model model --records records.parquet")
    assert count_alerts(replayed) <= 33


@pytest.mark.data
def test_another_day_is_reported_as_such(new_terminal: TypeCommand, tmp_path: Path, data_dir: Path) -> None:
    read_skab(data_dir, "anomaly-free/anomaly-free").to_csv(tmp_path / "normal.csv", index=False)
    read_skab(data_dir, "valve1/0").drop(columns=["anomaly", "changepoint"]).to_csv(tmp_path / "today.csv", index=False)
    new_terminal("deformer-train normal.csv --out model --max-time 30s")
    replayed = new_terminal("deformer-stream replay today.csv --model model --records records.parquet")
    assert count_alerts(replayed) > 500
    match = re.search(r"(\d+)% of records alerted, 1% is allowed", replayed.err)
    assert match, replayed.err
    assert int(match[1]) > 40
