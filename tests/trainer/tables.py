"""Small tables for the trainer's tests."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trainer.data import DataOptions, PreparedTable
from trainer.prepare import prepare_table


def write(path: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=997)
    return path


def correlated(rng: np.random.Generator, n: int, features: int = 4) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return n samples of a Gaussian with strongly correlated neighbouring features, and its covariance."""
    place = np.arange(features)
    covariance = 0.9 ** np.abs(place[:, None] - place)
    return rng.multivariate_normal(np.zeros(features), covariance, n), covariance


def entropy(covariance: NDArray[np.float64], scales: NDArray[np.float64]) -> float:
    """Return the entropy of a Gaussian in nats, in units of the given scales."""
    k = len(covariance)
    return 0.5 * (k * math.log(2 * math.pi * math.e) + np.linalg.slogdet(covariance)[1]) - float(np.log(scales).sum())


def mixed(rng: np.random.Generator, n: int) -> dict[str, Any]:
    """Return a table with numbers, a coarse sensor, labels that depend on a number, and missing readings."""
    x, _ = correlated(rng, n)
    state = np.where(x[:, 0] > 0.5, "high", np.where(x[:, 0] < -0.5, "low", "middle"))
    return {
        "a": pa.array(x[:, 0], mask=rng.random(n) < 0.1),
        "b": x[:, 1],
        "c": np.round(x[:, 2], 1),
        "state": pa.array(state.tolist()),
    }


def prepared(folder: Path, columns: dict[str, Any], **options: Any) -> PreparedTable:
    table = write(folder / "table.parquet", columns)
    work = folder / "work"
    work.mkdir(exist_ok=True)
    return prepare_table([table], DataOptions(**options), work)


def numbers(folder: Path, x: np.ndarray, **columns: Any) -> PreparedTable:  # type: ignore[type-arg]
    return prepared(folder, {f"x{i}": column for i, column in enumerate(x.T)} | columns)
