"""Labelled records of known faults for tests, and a model directory whose model has learnt the normal records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from deformer_stream import model_store
from deformer_stream.calibration.conformal import Calibration
from tests.engine.max_statistics import compute_max_statistics
from tests.models import TRAINING_SUMMARY, draw_linear_records, train_linear_model

SHIFT_BY_FAULT = {"offset ü/\"'": 3.0, "dr\nop": -3.0, "label": 0.0}
"""The change of y of each fault. The fault "label" has the wrong sign instead. Names may have any characters."""


def write_linear_model(directory: Path) -> Path:
    """Write the directory of a model that has learnt y = 2x + 1 and the sign of x, calibrated in random orders."""
    model = train_linear_model()
    rng = np.random.default_rng(11)
    rows = draw_linear_records(399, 12)
    codes = np.argsort(rng.random(rows.shape), 1)
    values = model.schema.normalise(codes, np.take_along_axis(rows, codes, 1))
    calibration = Calibration.from_statistics(compute_max_statistics(model, codes, values), "random")
    model_store.write(directory, model, calibration, TRAINING_SUMMARY, "<!doctype html><p>report</p>")
    return directory


def draw_fault(name: str, num_records: int, seed: int) -> NDArray[np.float64]:
    """Return records with a fault, (N, 3): x, y and the code of the sign."""
    rows = draw_linear_records(num_records, seed)
    rows[:, 1] += SHIFT_BY_FAULT[name]
    if name == "label":
        rows[:, 2] = 1 - rows[:, 2]
    return rows


def make_table(rows: NDArray[np.float64], faults: list[str | None]) -> pa.Table:
    """Return records as a wide table with a column of labels."""
    signs = np.array(["minus", "plus"])[rows[:, 2].astype(int)]
    return pa.table({"x": rows[:, 0], "y": rows[:, 1], "sign": signs, "fault": pa.array(faults, pa.string())})


def write_labelled(
    path: Path, num_by_fault: dict[str, int], num_normal: int = 30, seed: int = 20, normal: str | None = None
) -> Path:
    """Write a table with labelled records of faults and with normal records, and return its path."""
    parts = [draw_fault(name, count, seed + i) for i, (name, count) in enumerate(num_by_fault.items())]
    faults: list[str | None] = [name for name, count in num_by_fault.items() for _ in range(count)]
    rows = np.concatenate([*parts, draw_linear_records(num_normal, seed + 99)])
    pq.write_table(make_table(rows, [*faults, *[normal] * num_normal]), path)
    return path
