"""The benchmark of the pretrained density: the figures of one table, noise on its values, and the report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import pretrained
from experiments.pretrained.network import InContextDensity


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of 160 normal rows on a curve and 20 anomalies, with a label of two values and a rounded column."""
    rng = np.random.default_rng(0)
    angle = rng.uniform(0.0, 6.0, 180)
    x, y = np.cos(angle), np.sin(angle)
    y[160:] *= 0.2
    columns = {
        "x": x + 0.02 * rng.normal(size=180),
        "y": y + 0.02 * rng.normal(size=180),
        "rounded": np.round(20.0 * x) / 20.0,
        "mode": np.where(rng.random(180) < 0.3, "low", "high"),
        "label": (np.arange(180) >= 160).astype(np.int64),
    }
    path = tmp_path / "curve.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def test_network_is_likelier_than_one_gaussian_on_a_curve(table: Path) -> None:
    network = InContextDensity(num_heads=2, width=16)
    line = pretrained.measure(network, network, "curve", table, seed=0, smoothing=0.0, max_rows=40)
    assert (line["features"], line["rows"], line["scored"]) == (3, 80, 40)
    assert line["network"] == pytest.approx(line["untrained"])
    assert line["network"] < line["gaussian"] - 0.5
    assert line["gain"] == pytest.approx(line["guide"] - line["network"])
    assert 0.5 < line["labels_nll"] < 0.8  # two labels with shares of .3 and .7
    text = pretrained.format_results([line])
    assert "| curve | 3 | 80 | 40 |" in text


def test_noise_of_the_values_makes_them_less_likely(table: Path) -> None:
    network = InContextDensity(num_heads=2, width=16)
    plain, noisy = (
        pretrained.measure(network, network, "curve", table, 0, smoothing, max_rows=20) for smoothing in (0.0, 0.5)
    )
    assert noisy["guide"] > plain["guide"]
    assert noisy["network"] > plain["network"]
