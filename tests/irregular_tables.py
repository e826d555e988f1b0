"""Tables and small models of irregular readings for tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from deformer_stream import model_store
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.windows import Window
from tests.model.irregular_models import SCHEMA, make_config, randomize_process

START = 1_600_000_000
"""Event time of the first reading, in seconds since 1970."""


def write_irregular_model(directory: Path, window: Window | None = None, **changes: int) -> Path:
    """Write a model directory with random weights, for which many records raise alerts, and return its path.

    Args:
        directory: The directory.
        window: The window of the model, if its records are windows.
        changes: Hyperparameters with other values; `d_model=64` is supported by the compiled kernels.
    """
    import torch

    config = replace(make_config(), context_recent=3, context_block=4, **changes)
    torch.manual_seed(1)
    model = DEformer(replace(SCHEMA, window=window), config).eval()
    assert model.process is not None
    randomize_process(model.process, torch.Generator().manual_seed(1))
    calibration = Calibration.from_statistics(np.random.default_rng(0).exponential(3.0, 300), "arrival")
    model_store.write(directory, model, calibration, {}, "")
    return directory


def make_long_table(num_readings: int, id_column: str) -> pa.Table:
    """Return readings of three records or devices in order of time; the last row is a redelivery."""
    rng = np.random.default_rng(4)
    rows = [
        {
            id_column: f"r{i % 3}",
            "feature": f"sensor{rng.integers(3)}",
            "value": float(rng.normal()) + 30.0 * (i > num_readings // 2),
            "time": float(START + 10 * i),
        }
        for i in range(num_readings)
    ]
    return pa.Table.from_pylist([*rows, rows[-1]])
