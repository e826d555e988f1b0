"""The benchmark of imputation: its tables, its masks, its peers, and what it makes of answers."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import command, imputation
from deformer_stream import load
from tests.models import linear_records, write_model

CONTENDERS = ("ours", *imputation.PEERS)


def a_line(name: str, ours: float, others: float) -> dict[str, object]:
    runs = []
    for share in imputation.SHARES:
        run: dict[str, object] = {who: {"rmse": others, "mae": others / 2} for who in imputation.PEERS}
        run |= {"seed": 0, "share": share, "ours": {"rmse": ours, "mae": ours, "coverage": 0.9, "width": 1.5}}
        runs.append(run)
    return {"table": name, "features": 3, "records": 50, "date": "2026-01-01", "runs": runs}


def test_every_second_table_by_its_features() -> None:
    features = {"e": 9, "D": 6, "b": 30, "c": 6, "a": 7, "f": 30}
    assert imputation.chosen(features) == ["D", "e", "f"]


def test_masks_grow_with_the_share_and_are_equal_each_time() -> None:
    masks = imputation.masks((4000, 5), seed=3)
    few, some, half = (masks[share] for share in imputation.SHARES)
    assert not (few & ~some).any()
    assert not (some & ~half).any()
    for share, mask in masks.items():
        np.testing.assert_allclose(mask.mean(0), share, atol=0.03)
        assert (mask == imputation.masks((4000, 5), seed=3)[share]).all()


def test_peers_learn_from_complete_rows() -> None:
    """y = 2x + 1: the mean knows nothing of it, neighbours and regressions do."""
    train, test = linear_records(600, 1)[:, :2], linear_records(100, 2)[:, :2]
    asked = np.arange(200).reshape(100, 2) % 4 == 1
    filled = imputation.completed(train, {0.1: np.where(asked, np.nan, test)}, seed=0)
    error = {peer: float(np.abs(of[0.1] - test)[asked].mean()) for peer, of in filled.items()}
    assert all((of[0.1][~asked] == test[~asked]).all() for of in filled.values())
    assert error["mean"] > 1.0
    assert error["iterative"] < 0.12
    assert error["neighbours"] < 0.2


def test_iterative_regressions_go_round_until_they_agree() -> None:
    """With two of three equal readings missing, one round would leave the first of them at its mean's half-way."""
    x = np.random.default_rng(0).normal(size=(400, 1))
    train = np.hstack([x, x, x]) + 0.1 * np.random.default_rng(1).normal(size=(400, 3))
    found = imputation.completed(train, {0.5: np.array([[np.nan, np.nan, 2.0]])}, seed=0)["iterative"][0.5]
    assert found[0] == pytest.approx([2.0, 2.0, 2.0], abs=0.15)


def test_labels_are_read_as_codes(tmp_path: Path) -> None:
    schema = load(write_model(tmp_path / "model")).schema
    columns = {name: pa.array([1.0, 2.0]) for name in schema.names if name not in ("state", "valve")}
    table = pa.table(columns | {"state": pa.array([0.0, 1.0]), "valve": pa.array([1.0, 0.0])})
    found = imputation.readings(schema, table)
    assert found[:, schema.codes["pressure"]].tolist() == [1.0, 2.0]
    assert found[:, schema.codes["state"]].tolist() == [3.0, 3.0]  # no label of training's: the code of the unseen


def test_errors_and_intervals() -> None:
    truth = np.array([0.0, 1.0, 2.0, 3.0])
    assert imputation.errors(truth, truth + 2.0, truth - np.array([0.0, 0.0, 0.0, 4.0])) == {"rmse": 2.0, "mae": 1.0}
    found = imputation.held(truth, truth - np.array([1.0, -0.5, 1.0, 0.0]), truth + np.array([1.0, 1.5, -0.5, 0.0]))
    assert found == {"coverage": 0.5, "width": (2.0 + 1.0 + 0.5 + 0.0) / 4}


def test_the_report_counts_tables_and_sets_the_least_in_bold() -> None:
    lines = [a_line("one", 0.5, 1.0), a_line("two", 0.8, 0.7)]
    assert imputation.wins(lines, 0.3, "rmse", "mean") == 1
    text = imputation.report(lines, {"machine": "a machine", "max_time": "1s", "seeds": "0"})
    assert "| one | 3 | 10% | **0.500** | 1.000 | 1.000 | 1.000 |" in text
    assert "| two | 3 | 50% | 0.800 | **0.700** | **0.700** | **0.700** |" in text
    assert "| **ours errs less** |  | 30% |  | 1 of 2 | 1 of 2 | 1 of 2 |" in text
    assert "| **mean** | 90.0% | 90.0% | 90.0% | 1.50 | 1.50 | 1.50 |" in text


def test_from_a_table_to_the_report_and_no_model_is_trained_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = linear_records(300, 4)[:, :2]
    pq.write_table(pa.table({"x": x[:, 0], "y": x[:, 1], "label": [0] * 300}), tmp_path / "line.parquet")
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(imputation, "find_tables", lambda wanted: {"line": tmp_path / "line.parquet"})

    def run(again: bool) -> None:
        chosen = {"tables": "line", "seeds": "0", "max_time": "2s", "models": tmp_path / "models", "again": again}
        imputation.run(argparse.Namespace(**chosen))

    run(again=False)
    (line,) = command.Kept("imputation", {"seeds": "0"}).lines
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["line-0-2s"]
    monkeypatch.setattr(imputation, "learn", None)
    run(again=True)
    (anew,) = command.Kept("imputation", {"seeds": "0"}).lines
    assert anew["runs"] == line["runs"]
    of = imputation.figures(line, 0.1)
    assert set(of) == set(CONTENDERS)
    assert of["ours"]["rmse"] < of["mean"]["rmse"] / 2
    assert "| line | 2 | 10% |" in (tmp_path / "results" / "imputation.md").read_text()
