"""The imputation benchmark: choice of tables, missing readings, other methods, and the report."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import command, imputation
from deformer_stream import load
from tests.models import draw_linear_records, write_model

CONTENDERS = ("ours", *imputation.NAME_BY_PEER)


def make_line(name: str, own_error: float, peer_error: float) -> dict[str, object]:
    """Return the JSON line of a table with made-up errors."""
    runs = []
    for share in imputation.MISSING_SHARES:
        peer_figures = {"rmse": peer_error, "mae": peer_error / 2}
        run: dict[str, object] = {"seed": 0, "share": share} | dict.fromkeys(imputation.NAME_BY_PEER, peer_figures)
        run["ours"] = {"rmse": own_error, "mae": own_error, "coverage": 0.9, "width": 1.5}
        runs.append(run)
    return {"table": name, "features": 3, "records": 50, "date": "2026-01-01", "runs": runs}


def test_every_second_table_by_number_of_features_is_chosen() -> None:
    num_features_by_table = {"e": 9, "D": 6, "b": 30, "c": 6, "a": 7, "f": 30}
    assert imputation.choose_tables(num_features_by_table) == ["D", "e", "f"]


def test_masks_grow_with_the_share_and_depend_on_the_seed_only() -> None:
    masks = imputation.draw_masks((4000, 5), seed=3)
    small, medium, large = (masks[share] for share in imputation.MISSING_SHARES)
    assert not (small & ~medium).any()
    assert not (medium & ~large).any()
    for share, mask in masks.items():
        np.testing.assert_allclose(mask.mean(0), share, atol=0.03)
        assert (mask == imputation.draw_masks((4000, 5), seed=3)[share]).all()


def test_other_methods_learn_from_complete_rows() -> None:
    """For y = 2x + 1 the mean has large errors, nearest neighbours and regressions have small ones."""
    train, test = draw_linear_records(600, 1)[:, :2], draw_linear_records(100, 2)[:, :2]
    is_missing = np.arange(200).reshape(100, 2) % 4 == 1
    rows_by_peer = imputation.impute_by_peers(train, {0.1: np.where(is_missing, np.nan, test)}, seed=0)
    error = {peer: float(np.abs(rows[0.1] - test)[is_missing].mean()) for peer, rows in rows_by_peer.items()}
    assert all((rows[0.1][~is_missing] == test[~is_missing]).all() for rows in rows_by_peer.values())
    assert error["mean"] > 1.0
    assert error["iterative"] < 0.12
    assert error["neighbours"] < 0.2


def test_iterative_imputer_performs_several_rounds() -> None:
    """Two of three equal readings are missing: after one round, the first of them would be half-way from its mean."""
    x = np.random.default_rng(0).normal(size=(400, 1))
    train = np.hstack([x, x, x]) + 0.1 * np.random.default_rng(1).normal(size=(400, 3))
    rows_by_peer = imputation.impute_by_peers(train, {0.5: np.array([[np.nan, np.nan, 2.0]])}, seed=0)
    assert rows_by_peer["iterative"][0.5][0] == pytest.approx([2.0, 2.0, 2.0], abs=0.15)


def test_labels_are_converted_to_codes(tmp_path: Path) -> None:
    schema = load(write_model(tmp_path / "model")).schema
    columns = {name: pa.array([1.0, 2.0]) for name in schema.names if name not in ("state", "valve")}
    table = pa.table(columns | {"state": pa.array([0.0, 1.0]), "valve": pa.array([1.0, 0.0])})
    readings = imputation.convert_readings(schema, table)
    assert readings[:, schema.code_by_name["pressure"]].tolist() == [1.0, 2.0]
    assert readings[:, schema.code_by_name["state"]].tolist() == [3.0, 3.0]  # the code of unseen labels


def test_errors_and_interval_figures() -> None:
    truth = np.array([0.0, 1.0, 2.0, 3.0])
    medians = truth - np.array([0.0, 0.0, 0.0, 4.0])
    assert imputation.compute_errors(truth, truth + 2.0, medians) == {"rmse": 2.0, "mae": 1.0}
    low, high = truth - np.array([1.0, -0.5, 1.0, 0.0]), truth + np.array([1.0, 1.5, -0.5, 0.0])
    figures = imputation.evaluate_intervals(truth, low, high)
    assert figures == {"coverage": 0.5, "width": (2.0 + 1.0 + 0.5 + 0.0) / 4}


def test_report_counts_wins_and_marks_the_smallest_error() -> None:
    lines = [make_line("one", 0.5, 1.0), make_line("two", 0.8, 0.7)]
    assert imputation.count_wins(lines, 0.3, "rmse", "mean") == 1
    text = imputation.format_report(lines, {"machine": "a machine", "max_time": "1s", "seeds": "0"})
    assert "| one | 3 | 10% | **0.500** | 1.000 | 1.000 | 1.000 |" in text
    assert "| two | 3 | 50% | 0.800 | **0.700** | **0.700** | **0.700** |" in text
    assert "| **our error is smaller** |  | 30% |  | 1 of 2 | 1 of 2 | 1 of 2 |" in text
    assert "| **mean** | 90.0% | 90.0% | 90.0% | 1.50 | 1.50 | 1.50 |" in text


def test_stored_models_are_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw_linear_records(300, 4)[:, :2]
    pq.write_table(pa.table({"x": x[:, 0], "y": x[:, 1], "label": [0] * 300}), tmp_path / "line.parquet")
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(imputation, "find_tables", lambda requested: {"line": tmp_path / "line.parquet"})

    def run(again: bool) -> None:
        options = {"tables": "line", "seeds": "0", "max_time": "2s", "models": tmp_path / "models", "again": again}
        imputation.run(argparse.Namespace(**options))

    run(again=False)
    (line,) = command.ResultStore("imputation", {"seeds": "0"}).lines
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["line-0-2s"]
    monkeypatch.setattr(imputation, "train_detector", None)
    run(again=True)
    (repeated,) = command.ResultStore("imputation", {"seeds": "0"}).lines
    assert repeated["runs"] == line["runs"]
    figures = imputation.average_over_seeds(line, 0.1)
    assert set(figures) == set(CONTENDERS)
    assert figures["ours"]["rmse"] < figures["mean"]["rmse"] / 2
    assert "| line | 2 | 10% |" in (tmp_path / "results" / "imputation.md").read_text()
