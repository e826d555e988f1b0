"""From an unknown CSV file to the first alert with three commands, almost without options."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.first_hours.conftest import TypeCommand, run_in_process
from tests.first_hours.plant_data import (
    break_flow,
    read_skab,
    read_tennessee_eastman,
    record_pump_station,
    write_historian_csv,
)

pytestmark = pytest.mark.slow


def read_alerted_rows(path: Path) -> list[int]:
    """Return the row numbers of the records that raised alerts."""
    return [int(json.loads(line)["record"]) for line in path.read_text().splitlines()]


def test_a_table_with_labels(terminal: TypeCommand) -> None:
    table = break_flow(record_pump_station(1200), 40).assign(fault=0)
    table.loc[:39, "fault"] = 1
    write_historian_csv(table, Path("station.csv"))
    looked = terminal("deformer-stream init station.csv --yes")
    assert "deformer-train station.csv" in looked.out
    terminal("deformer-train station.csv --preset tiny --epochs 1")
    terminal("deformer-stream replay station.csv")
    assert set(range(40)) <= set(read_alerted_rows(Path("alerts.jsonl")))


@pytest.mark.data
@pytest.mark.parametrize("name", ["skab", "tep"])
def test_public_data_as_a_historian_exports_it(name: str, tmp_path: Path, data_dir: Path) -> None:
    if name == "skab":
        table = read_skab(data_dir, "valve1/0")
        is_faulty = table["anomaly"].to_numpy() > 0
    else:
        table = read_tennessee_eastman(data_dir, fault=1)
        is_faulty = table["fault"].to_numpy() > 0
    write_historian_csv(table, tmp_path / "plant.csv")
    looked = run_in_process("deformer-stream init plant.csv --yes", tmp_path)
    *_, train, replay = [line.strip() for line in looked.out.splitlines() if line.strip().startswith("deformer-")]
    # The number of steps does not depend on the load of the machine, as the time limit of the configuration would.
    run_in_process(f"{train} --preset tiny --epochs 3", tmp_path)
    run_in_process(replay, tmp_path)
    alerted = read_alerted_rows(tmp_path / "alerts.jsonl")
    assert alerted
    precision = float(np.mean(is_faulty[alerted]))
    assert precision > 0.8, f"{len(alerted)} alerts, {precision:.0%} of them in a fault"
