"""Tests of feature kinds on tables as they occur in practice."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import csv

from tests.trainer.tables import prepared, write
from trainer.data import DataOptions
from trainer.feature_kinds import MAX_COMPARED_COLUMNS, ColumnStatistics, has_ordered_levels
from trainer.job import train
from trainer.prepare import prepare_table
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


def make_statistics(name: str, numbers: np.ndarray, rows: np.ndarray) -> ColumnStatistics:
    """Return the statistics of the numbers of a column, which all belong to training records."""
    column = ColumnStatistics(name)
    column.add(pa.array(numbers), rows, np.ones(len(rows), bool), 0)
    return column


def test_order_of_levels_is_compared_with_few_other_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of hundreds of integer columns, such as a questionnaire, must not take minutes."""
    rng = np.random.default_rng(0)
    size, rows = rng.normal(size=1000), np.arange(1000)
    columns = [
        make_statistics(f"item-{i}", np.clip(np.round(3 + size + rng.normal(size=1000)), 1, 5), rows) for i in range(80)
    ]
    calls = []
    intersect = np.intersect1d
    monkeypatch.setattr(np, "intersect1d", lambda *args, **named: calls.append(1) or intersect(*args, **named))
    assert has_ordered_levels(columns[0], columns)
    assert len(calls) == MAX_COMPARED_COLUMNS


def test_copies_and_groups_of_codes_show_no_order_of_levels() -> None:
    rng = np.random.default_rng(0)
    rows, code = np.arange(1000), rng.integers(1, 9, 1000)
    columns = [
        make_statistics(name, numbers, rows)
        for name, numbers in {
            "code": code,
            "copy": 100 * code,
            "group": (code - 1) // 4,
            "x": rng.normal(size=1000),
        }.items()
    ]
    assert not has_ordered_levels(columns[0], columns)
    assert has_ordered_levels(columns[0], [make_statistics("y", code + rng.normal(size=1000), rows), *columns])


def test_order_of_levels_does_not_depend_on_the_order_of_readings() -> None:
    rng = np.random.default_rng(0)
    rows = np.arange(600).repeat(3)
    level = rng.integers(1, 7, 600).repeat(3)
    values = level + rng.normal(size=1800)
    order = rng.permutation(1800)
    other, shuffled = make_statistics("x", values, rows), make_statistics("x", values[order], rows[order])
    for a, b in zip(other.record_sample, shuffled.record_sample, strict=True):
        assert a == pytest.approx(b)
    assert has_ordered_levels(make_statistics("level", level, rows), [shuffled])
    # The mean of numbers that change within a record is no level.
    assert not has_ordered_levels(make_statistics("level", rng.integers(1, 7, 1800), rows), [other])


def test_identifiers_show_no_order_of_levels(tmp_path: Path) -> None:
    """A campaign that is replaced in the course of time follows the row number, and is a code all the same."""
    columns = {
        "campaign": np.arange(1200) // 200 + 1,
        "serial": np.arange(1200) + 5000,
        "x": np.random.default_rng(0).normal(size=1200),
    }
    kinds = {f.name: f.kind for f in prepared(tmp_path, columns).schema.features}
    assert "serial" not in kinds
    assert kinds["campaign"] == "discrete"


SERIALS = [2**53 + 1, 2**53 + 2, 2**53 + 3, 2**60 + 1]


@pytest.mark.parametrize("form", ["int64", "uint64", "decimal", "text", "category"])
@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_large_integers_are_exact_labels(tmp_path: Path, form: str, ending: str) -> None:
    numbers = np.array(SERIALS)[np.arange(400) % 4].tolist()
    column = {
        "int64": pa.array(numbers),
        "uint64": pa.array(numbers, pa.uint64()),
        "decimal": pa.array(map(Decimal, numbers)),
        "text": pa.array(map(str, numbers)),
        "category": pa.array(numbers).dictionary_encode(),
    }[form]
    table = pa.table({"x": np.sin(np.arange(400.0)), "serial": column})
    path = tmp_path / f"t.{ending}"
    if ending == "csv":
        csv.write_csv(table.set_column(1, "serial", column.cast(pa.string())), path)
    else:
        pq.write_table(table, path)
    data = prepare_table([path], DataOptions(), tmp_path)
    assert data.schema.features[1].labels == tuple(map(str, SERIALS))
    np.testing.assert_array_equal(data.values[:, 1], np.arange(400) % 4)


@pytest.mark.parametrize("missing", [None, "NA"])
def test_integers_beyond_64_bits_are_exact_labels(tmp_path: Path, missing: str | None) -> None:
    serials = [str(10**24 + 1), str(10**24 + 2), missing, "7"]
    texts = [serials[i % 4] for i in range(400)]
    csv.write_csv(pa.table({"x": np.sin(np.arange(400.0)), "serial": texts}), tmp_path / "t.csv")
    write(tmp_path / "t.parquet", {"x": np.sin(np.arange(400.0)), "serial": texts})
    for name in ("t.csv", "t.parquet"):
        data = prepare_table([tmp_path / name], DataOptions(), tmp_path)
        assert data.schema.features[1].labels == ("7", serials[0], serials[1])
        np.testing.assert_array_equal(data.values[:4, 1], [1, 2, np.nan, 0])
