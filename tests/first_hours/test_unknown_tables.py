"""Tables that nobody prepared: row numbers, clocks, constants, texts, few rows, and calibration on training data."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from tests.first_hours.conftest import TypeCommand, count_alerts, find_row
from tests.first_hours.plant_data import TAGS, break_flow, record_pump_station

pytestmark = pytest.mark.slow

MAX_FALSE_ALERTS = 33
"""Largest number of alerts at alpha = 1% among 2,000 normal records of the messy table."""


def read_features(model: Path) -> list[str]:
    """Return the names of the features of a model directory."""
    return [feature["name"] for feature in json.loads((model / "manifest.json").read_text())["features"]]


def test_a_messy_table_raises_no_flood_of_false_alerts(terminal: TypeCommand) -> None:
    record_pump_station(3000).to_csv("normal.csv", index=False)
    record_pump_station(2000, first_row=3000, seed=2).to_csv("next.csv", index=False)
    trained = terminal("deformer-train normal.csv --out model --preset tiny --epochs 1")
    assert "left out" in find_row(trained.out, "id")
    assert "left out" in find_row(trained.out, "timestamp")
    assert set(TAGS) <= set(read_features(Path("model")))
    assert "id" not in read_features(Path("model"))
    replayed = terminal("deformer-stream replay next.csv --model model --records records.parquet")
    assert pq.read_table("records.parquet").num_rows == 2000
    assert count_alerts(replayed) <= MAX_FALSE_ALERTS
    assert "0 refused" in replayed.err
    # Few alerts are no merit of a model that raises none.
    break_flow(record_pump_station(50, first_row=5000, seed=3), 40).to_csv("broken.csv", index=False)
    replayed = terminal("deformer-stream replay broken.csv --model model")
    assert count_alerts(replayed) >= 40


def test_the_index_of_a_data_frame_is_no_feature(terminal: TypeCommand) -> None:
    table = record_pump_station(2500).drop(columns=["id", "timestamp"])
    # Files are joined and rows are selected, as in a notebook. pandas then stores the index as a column.
    pd.concat([table[:800], table[900:1600]]).to_parquet("normal.parquet")
    pd.concat([table[1600:2000], table[2001:]]).to_parquet("next.parquet")
    assert "__index_level_0__" in pq.read_schema("next.parquet").names
    trained = terminal("deformer-train normal.parquet --out model --preset tiny --epochs 1")
    assert "index of the data frame" in find_row(trained.out, "__index_level_0__")
    assert "__index_level_0__" not in read_features(Path("model"))
    replayed = terminal("deformer-stream replay next.parquet --model model --records records.parquet")
    assert count_alerts(replayed) <= 20  # of 899 records


def test_numbers_that_are_stored_as_text_are_measurements(terminal: TypeCommand) -> None:
    table = record_pump_station(600)[TAGS].map(lambda number: None if pd.isna(number) else f"{number:.3f}")
    table.loc[[10, 20, 30], "flow"] = "I/O Timeout"
    table.to_parquet("normal.parquet")
    trained = terminal("deformer-train normal.parquet --out model --preset tiny --epochs 1")
    for tag in TAGS:
        assert "continuous" in find_row(trained.out, tag)
    assert "3 texts" in trained.text
    assert "I/O Timeout" in trained.text
    table.to_csv("next.csv", index=False)
    replayed = terminal("deformer-stream replay next.csv --model model --records records.parquet")
    assert pq.read_table("records.parquet").num_rows == 600
    assert "3 refused (3 wrong_type)" in replayed.err  # one reading each, not the row or the file


def test_thirty_rows_say_what_is_out_of_reach_and_what_helps(terminal: TypeCommand) -> None:
    record_pump_station(30).to_csv("normal.csv", index=False)
    trained = terminal("deformer-train normal.csv --out model --preset tiny --epochs 1")
    (line,) = [line for line in trained.out.splitlines() if "--folds" in line]
    assert "no alert is possible: alpha 5% needs 19 calibration records, and there are 6" in line
    assert "--folds 5 calibrates on all 30 records" in line


def test_calibrating_on_the_training_data_is_refused(terminal: TypeCommand, station: Path) -> None:
    command = f"deformer-stream calibrate {station}/normal.csv --model {station}/model --out recalibrated"
    refused = terminal(command, code=3)
    assert "were used" in refused.lines[-1]
    assert "--seen-records drop" in refused.lines[-1]
    assert not Path("recalibrated").exists()


def test_a_wrong_path_is_reported_before_anything_heavy_is_imported(terminal: TypeCommand, tmp_path: Path) -> None:
    for line in (
        "deformer-train nromal.csv --out model",
        "deformer-train nromal.csv --dry-run",
        "deformer-stream init nromal.csv --yes",
    ):
        missing = terminal(line, code=3)
        assert len(missing.lines) == 1
        assert "nromal.csv" in missing.err


def test_a_dry_run_prints_the_features_and_writes_nothing(terminal: TypeCommand) -> None:
    record_pump_station(600).to_csv("normal.csv", index=False)
    shown = terminal("deformer-train normal.csv --dry-run")
    assert "left out" in find_row(shown.out, "id")
    assert "continuous" in find_row(shown.out, "flow")
    assert [path.name for path in Path().iterdir()] == ["normal.csv"]
