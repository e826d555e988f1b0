"""Tests of feature kinds on tables as they occur in practice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from tests.trainer.tables import prepared, write
from trainer.job import train
from trainer.settings import TrainConfig

SMALL: dict[str, Any] = {"d_model": 16, "layers": 1, "heads": 2, "feedforward": 32, "mixtures": 4, "hidden": (16,)}


def test_reason_mentions_frequent_values_and_long_tails(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    dry = rng.random(900) < 0.6
    columns = {
        "rain": np.where(dry, 0.0, rng.gamma(2.0, 3.0, 900)),
        "delay": rng.standard_t(1.5, 900),
        "calm": rng.normal(size=900),
    }
    reasons = {f.name: f.reason for f in prepared(tmp_path, columns).schema.features}
    assert "% of them 0" in reasons["rain"]
    assert "tails beyond 8" in reasons["delay"]
    assert reasons["calm"] == "numbers"


def test_column_without_values_is_excluded_with_a_reason(tmp_path: Path) -> None:
    data = prepared(
        tmp_path, {"x": np.sin(np.arange(50.0)), "gone": pa.nulls(50), "empty": pa.array([None] * 50, pa.float64())}
    )
    assert data.schema.names == ("x",)
    assert {e.name: e.reason for e in data.excluded_columns} == dict.fromkeys(
        ("gone", "empty"), "no values in the training rows"
    )


@pytest.mark.parametrize("wild", [50.0, -1e4, 1e30])
def test_nll_of_extreme_outliers_is_large_and_finite(tmp_path: Path, wild: float) -> None:
    table = write(tmp_path / "t.parquet", {"x": np.random.default_rng(1).normal(size=200)})
    model = train([table], TrainConfig(out=tmp_path / "model", epochs=5, **SMALL)).model
    code = np.zeros(2, np.int64)
    values = torch.from_numpy(model.schema.normalise(code, np.array([0.5, wild]))).float().unsqueeze(1)
    with torch.no_grad():
        usual, odd = (-model.log_prob(torch.zeros(2, 1, dtype=torch.long), values)).squeeze(1).tolist()
    assert usual < 3.0
    assert 20.0 < odd < 1e6


def test_table_with_five_hundred_features_can_be_trained(tmp_path: Path) -> None:
    x = np.random.default_rng(2).normal(size=(40, 500))
    table = write(tmp_path / "t.parquet", {f"x{i}": column for i, column in enumerate(x.T)})
    result = train([table], TrainConfig(out=tmp_path / "model", epochs=1, batch=8, exemplars=0, **SMALL))
    assert len(result.data.schema) == 500
    assert np.isfinite(result.held_out.mean_nll)
    assert len(result.calibration.scores) == 8


def test_few_integers_are_numbers_if_other_columns_follow_their_order(tmp_path: Path) -> None:
    """A count of pixels is an ordered number on a grid; a product code, on which others depend as strongly, is not."""
    rng = np.random.default_rng(3)
    size, product = rng.normal(size=1500), rng.integers(0, 8, 1500)
    columns = {
        "width": np.clip(np.round(4.5 + 2 * size), 0, 9).astype(int),
        "height": np.clip(np.round(4.5 + 2 * size + rng.normal(size=1500)), 0, 9).astype(int),
        "product": product,
        "weight": np.array([3.0, -1.0, 2.0, -2.5, 1.0, -3.0, 2.5, 0.0])[product] + 0.1 * rng.normal(size=1500),
        "die": rng.integers(1, 7, 1500),
        "switch": (size > 0).astype(int),
    }
    features = {f.name: f for f in prepared(tmp_path, columns).schema.features}
    assert {name: f.kind for name, f in features.items()} == {
        "width": "continuous",
        "height": "continuous",
        "product": "discrete",
        "weight": "continuous",
        "die": "discrete",
        "switch": "discrete",
    }
    assert features["width"].quantum == 1.0
    assert features["width"].reason.startswith("10 ordered levels: numbers on a grid of 1")
    chosen = prepared(tmp_path, columns, discrete=("width",)).schema.features
    assert chosen[0].kind == "discrete"
