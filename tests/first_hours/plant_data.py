"""Data as the users of the trials have it: an imaginary pump station, and public data sets written as CSV exports."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

TAGS = ["flow", "pressure", "power", "speed", "temperature", "vibration"]
"""The measurements of the pump station."""

FIRST_ID = 100_000
"""The integer id of the first row that the pump station recorded."""


def record_pump_station(num_rows: int, first_row: int = 0, seed: int = 1) -> pd.DataFrame:
    """Return consecutive rows of a messy table: all of them are normal.

    Six measurements depend on three hidden causes, and 5% of their cells are empty. The table also has an integer id, a
    time, a constant and a code.

    Args:
        num_rows: Number of rows.
        first_row: Number of the first row, from which its id and its time follow.
        seed: Seed of the random values.
    """
    rng = np.random.default_rng(seed)
    effects = np.random.default_rng(0).normal(size=(len(TAGS), 3))
    measured = rng.normal(size=(num_rows, 3)) @ effects.T + 0.3 * rng.normal(size=(num_rows, len(TAGS)))
    rows = first_row + np.arange(num_rows)
    columns: dict[str, object] = {
        "id": FIRST_ID + rows,
        "timestamp": pd.Timestamp("2026-01-01") + pd.to_timedelta(60 * rows, unit="s"),
        "plant": ["North"] * num_rows,
        "recipe": rng.choice(["A7", "B2", "C1"], num_rows),
    }
    for tag, values in zip(TAGS, measured.T, strict=True):
        cells = np.round(50 + 10 * values, 3)
        cells[rng.random(num_rows) < 0.05] = np.nan
        columns[tag] = cells
    return pd.DataFrame(columns)


def break_flow(table: pd.DataFrame, num_rows: int) -> pd.DataFrame:
    """Return a copy of a table of the pump station in which the flow of the first rows is far too high."""
    broken = table.copy()
    broken.loc[: num_rows - 1, "flow"] = 500.0
    return broken


def record_pump_seconds(num_seconds: int, seed: int = 1) -> pd.DataFrame:
    """Return a wide historian table without ids: a time each second, and three tags that move slowly and together."""
    rng = np.random.default_rng(seed)
    load = np.convolve(rng.normal(size=num_seconds + 30), np.ones(30) / 30**0.5, "valid")[:num_seconds]
    start = datetime(2026, 3, 9, 10, 14, 33)
    return pd.DataFrame(
        {
            "Timestamp": [start + timedelta(seconds=second) for second in range(num_seconds)],
            "P101.Flow": np.round(120 + 5 * load + 0.5 * rng.normal(size=num_seconds), 3),
            "P101.Pressure": np.round(3 + 0.4 * load + 0.05 * rng.normal(size=num_seconds), 4),
            "P101.Current": np.round(1.3 + 0.1 * load + 0.02 * rng.normal(size=num_seconds), 5),
        }
    )


def melt(table: pd.DataFrame, device: str) -> pd.DataFrame:
    """Return a wide historian table as a long one, with columns device, feature, value and time, in order of time."""
    long = table.melt("Timestamp", var_name="feature", value_name="value").rename(columns={"Timestamp": "time"})
    return long.assign(device=device).sort_values("time", kind="stable")[["device", "feature", "value", "time"]]


def write_historian_csv(table: pd.DataFrame, path: Path) -> None:
    """Write a table as a historian of Central Europe exports it: semicolons, decimal commas, cp1252, local times."""
    table.to_csv(path, sep=";", decimal=",", encoding="cp1252", date_format="%d.%m.%Y %H:%M:%S", index=False)


def read_skab(data_dir: Path, name: str) -> pd.DataFrame:
    """Return an experiment of SKAB, such as "valve1/0": a pump, one row per second, labels in the column `anomaly`."""
    frame: pd.DataFrame = pq.read_table(data_dir / "skab" / f"{name}.parquet").to_pandas()
    return frame


def read_tennessee_eastman(data_dir: Path, fault: int) -> pd.DataFrame:
    """Return 960 normal rows of the simulated plant Tennessee Eastman, and 960 rows in which a fault begins at row 160.

    A row is written every three minutes, as in the simulation. The column `fault` has the number of the fault, 0 for a
    normal row.

    Args:
        data_dir: Folder of the public data sets.
        fault: The number of the fault.
    """
    normal = pq.read_table(data_dir / "tep" / "normal_test.parquet").to_pandas().assign(fault=0)
    faulty = pq.read_table(data_dir / "tep" / f"fault{fault:02d}.parquet").to_pandas()
    table = pd.concat([normal, faulty], ignore_index=True)
    times = pd.Timestamp("2026-05-04 06:00") + pd.to_timedelta(180 * np.arange(len(table)), unit="s")
    table.insert(0, "Timestamp", times)
    return table
