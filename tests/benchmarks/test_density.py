"""The density benchmark: units of held-out records, spread values, the Gaussian mixture, and stored results."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import command, density
from tests.trainer.tables import correlated, entropy, prepared, write
from trainer.data import PreparedTable


def make_line(name: str, ours: float, mixture: float, paper: float) -> dict[str, object]:
    """Return the JSON line of a table with made-up figures of two seeds."""
    run = {"ours": ours, "mixture": mixture, "paper": paper, "gaussians": 4, "components": 2}
    return {"table": name, "features": 3, "records": 50, "runs": [run, run]}


def encode_held_out(data: PreparedTable, folder: Path, columns: dict[str, object]) -> PreparedTable:
    """Encode a table with these columns as held-out records of a prepared table."""
    (folder / "held").mkdir()
    return density.encode_held_out(data, write(folder / "held.parquet", columns), folder / "held")


def test_mixture_reaches_the_entropy_of_a_gaussian(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (x, covariance), (held_out_x, _) = correlated(rng, 3000), correlated(rng, 3000)
    data = prepared(tmp_path, {f"x{i}": column for i, column in enumerate(x.T)})
    held_out = encode_held_out(data, tmp_path, {f"x{i}": column for i, column in enumerate(held_out_x.T)})
    num_components, nats = density.evaluate_mixture(data, held_out, seed=0)
    assert num_components == 1
    expected = entropy(covariance, np.array([feature.scale for feature in data.schema.features]))
    assert nats == pytest.approx(expected, abs=0.06)


def test_held_out_records_are_in_the_units_of_training(tmp_path: Path) -> None:
    data = prepared(tmp_path, {"x": 5 + 5 * np.sin(np.arange(100.0)), "state": ["a", "b"] * 50})
    held_out = encode_held_out(data, tmp_path, {"state": ["b", "never"], "other": [1.0, 2.0], "x": [5.0, 10.0]})
    x, state = (data.schema.code_by_name[name] for name in ("x", "state"))
    feature = data.schema.features[x]
    expected = (np.array([5.0, 10.0]) - feature.location) / feature.scale
    np.testing.assert_allclose(held_out.values[:, x], expected, rtol=1e-6)
    assert held_out.values[:, state].tolist() == [1.0, 2.0]


def test_labels_are_spread_over_cells_and_numbers_over_their_quantum(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    data = prepared(tmp_path, {"coarse": np.round(rng.normal(size=400), 1), "state": rng.integers(0, 3, 400)})
    rows = np.arange(400)
    offsets = density.spread_values(data, rows, 0) - data.values[rows]
    coarse, state = (data.schema.code_by_name[name] for name in ("coarse", "state"))
    assert np.abs(offsets[:, state]).max() == pytest.approx(0.5, abs=0.02)
    half_quantum = 0.05 / data.schema.features[coarse].scale
    assert np.abs(offsets[:, coarse]).max() == pytest.approx(half_quantum, rel=0.05)


def test_training_and_held_out_records_are_normal(tmp_path: Path) -> None:
    table = pa.table({"f": np.arange(30.0), "label": [0] * 21 + [1] * 9})
    pq.write_table(table, tmp_path / "t.parquet")
    train, held_out = density.split_normal_rows("t", tmp_path / "t.parquet", seed=1)
    assert (len(train), len(held_out)) == (10, 11)
    assert sorted(train["f"].to_pylist() + held_out["f"].to_pylist()) == list(range(21))


def test_report_counts_wins_and_marks_the_smallest_value() -> None:
    lines = [make_line("one", 1.0, 2.0, 0.5), make_line("two", 1.0, 2.0, 3.0)]
    assert (density.count_wins(lines, "mixture"), density.count_wins(lines, "paper")) == (2, 1)
    rows = density.format_results(lines).splitlines()
    assert rows[2] == "| one | 3 | 50 | 1.00 | 2.00 | **0.50** | 4, 4 | 2, 2 |"
    assert rows[3].startswith("| two | 3 | 50 | **1.00** |")


def test_stored_tables_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure_table(train: pa.Table, held_out: pa.Table, seed: int, max_time: str) -> dict[str, object]:
        measured.append(train.column_names)
        return {"seed": seed, "ours": 1.0, "mixture": 2.0, "paper": 3.0, "gaussians": 1, "components": 1}

    path_by_name = {name: tmp_path / f"{name}.parquet" for name in ("one", "two")}
    for name, path in path_by_name.items():
        pq.write_table(pa.table({name: np.arange(40.0), "label": [0] * 40}), path)

    def find_sources(requested: str) -> dict[str, Path]:
        return {name: path for name, path in path_by_name.items() if requested in ("", name)}

    monkeypatch.setattr(density, "measure_table", measure_table)
    monkeypatch.setattr(density, "require_scikit_learn", lambda: None)
    monkeypatch.setattr(density, "find_sources", find_sources)
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")

    def run(tables: str = "", max_time: str = "60s", again: bool = False) -> None:
        density.run(argparse.Namespace(tables=tables, seeds="0", max_time=max_time, again=again))

    run("one")
    run()
    assert measured == [["one"], ["two"]]
    assert "on 2 and than the paper's recipe on 2 of 2 tables" in (tmp_path / "results" / "density.md").read_text()
    run(max_time="5s")
    run(again=True)
    assert len(measured) == 6
