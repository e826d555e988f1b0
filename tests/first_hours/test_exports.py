"""Files as plants export them: CSV dialects, wide tables with windows, slots, globs, Hive folders and local times."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from tests.first_hours.conftest import TypeCommand, count_alerts, find_row
from tests.first_hours.plant_data import (
    TAGS,
    melt,
    record_pump_seconds,
    record_pump_station,
    write_historian_csv,
)

pytestmark = pytest.mark.slow


def test_semicolons_and_decimal_commas(terminal: TypeCommand) -> None:
    table = record_pump_station(1000)
    write_historian_csv(table[:600], Path("normal.csv"))
    write_historian_csv(table[600:], Path("next.csv"))
    trained = terminal("deformer-train normal.csv --out model --preset tiny --epochs 1")
    assert "delimiter ';'" in trained.text
    assert "decimal comma" in trained.text
    for tag in TAGS:
        assert "continuous" in find_row(trained.out, tag)
    replayed = terminal("deformer-stream replay next.csv --model model --records records.parquet")
    assert "0 refused" in replayed.err
    assert pq.read_table("records.parquet").num_rows == 400
    assert count_alerts(replayed) <= 20


def test_a_wide_historian_table_with_windows(terminal: TypeCommand) -> None:
    """The same readings as a wide CSV file and as a long Parquet table give the same model and the same records."""
    table = record_pump_seconds(6000)
    write_historian_csv(table, Path("pump-7.csv"))
    melt(table, "pump-7").to_parquet("long.parquet", index=False)
    options = "--window 10s --slots 10 --timezone UTC --preset tiny --epochs 1"
    terminal(f"deformer-train pump-7.csv --out model {options}")
    terminal(f"deformer-train long.parquet --out model-of-long {options}")
    wide, long = (json.loads((Path(name) / "manifest.json").read_text()) for name in ("model", "model-of-long"))
    assert wide["training"]["fingerprint"] == long["training"]["fingerprint"]
    command = "deformer-stream replay pump-7.csv --model model --timezone UTC"
    replayed = terminal(f"{command} --records records.parquet --output scores.parquet")
    assert "0 refused" in replayed.err
    assert pq.read_table("scores.parquet").num_rows == 3 * 6000
    records = pq.read_table("records.parquet")
    assert 600 <= records.num_rows <= 601
    assert all(name.startswith("pump-7@") for name in records["record"].to_pylist())


def test_readings_each_second_in_slots_of_two_seconds(terminal: TypeCommand) -> None:
    melt(record_pump_seconds(4000), "pump-7").to_parquet("normal.parquet", index=False)
    options = "--window 60s --slots 30 --preset tiny --epochs 1"
    trained = terminal(f"deformer-train normal.parquet --out model {options}")
    line = next(line for line in trained.out.splitlines() if "share a time slot" in line)
    assert "--slots 60" in line
    assert "--per-slot" in line
    replayed = terminal("deformer-stream replay normal.parquet --model model --rejected rejected.jsonl")
    reasons = {json.loads(line)["reason"] for line in Path("rejected.jsonl").read_text().splitlines()}
    assert not reasons & {"duplicate", "late"}
    assert "time slot" in replayed.text
    averaged = terminal(f"deformer-train normal.parquet --out averaged --per-slot mean {options}")
    assert "share a time slot" not in averaged.text
    terminal("deformer-stream replay normal.parquet --model averaged --records records.parquet")
    assert pq.read_table("records.parquet").num_rows >= 66


def test_a_quoted_glob_names_many_files(terminal: TypeCommand) -> None:
    table = record_pump_station(900)
    Path("logs").mkdir()
    for day in range(3):
        table[300 * day : 300 * (day + 1)].to_csv(f"logs/2026-01-0{day + 1}.csv", index=False)
    terminal("deformer-train 'logs/*.csv' --out model --preset tiny --epochs 1")
    terminal("deformer-stream replay 'logs/2026-01-0[23].csv' --model model --records records.parquet")
    assert pq.read_table("records.parquet").num_rows == 600
    missing = terminal("deformer-train 'lgos/*.csv' --out model", code=3)
    assert len(missing.lines) == 1
    assert "lgos/*.csv" in missing.err


def test_columns_in_the_names_of_folders(terminal: TypeCommand) -> None:
    table = record_pump_station(1200)[TAGS]
    for site, part in (("north", table[:600]), ("south", table[600:] + 30)):
        Path(f"lake/site={site}").mkdir(parents=True)
        part.to_parquet(f"lake/site={site}/part-0.parquet", index=False)
    trained = terminal("deformer-train lake --out model --preset tiny --epochs 1")
    assert "north, south" in find_row(trained.out, "site")
    replayed = terminal("deformer-stream replay lake --model model --output scores.parquet")
    assert "0 refused" in replayed.err
    scored = pq.read_table("scores.parquet", columns=["feature", "label"]).to_pandas()
    assert set(scored[scored.feature == "site"].label) == {"north", "south"}


def test_times_without_a_zone_are_asked_for_where_they_matter(terminal: TypeCommand) -> None:
    table = record_pump_seconds(3000)
    melt(table, "pump-7").to_csv("normal.csv", index=False)
    options = "--out model --window 10s --preset tiny --epochs 1"
    refused = terminal(f"deformer-train normal.csv {options}", code=3)
    assert len(refused.lines) == 1
    assert "--timezone" in refused.err
    terminal(f"deformer-train normal.csv {options} --timezone Europe/Berlin")
    terminal(
        "deformer-stream replay normal.csv --model model --timezone Europe/Berlin --output scores.parquet "
        "--records records.parquet"
    )
    first = pd.Timestamp(pq.read_table("scores.parquet")["time"][0].as_py())
    # In March, Berlin is one hour ahead of UTC.
    assert first == pd.Timestamp(table["Timestamp"][0], tz="UTC") - timedelta(hours=1)
