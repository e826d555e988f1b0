"""The benchmark of density compares like with like."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import command, density
from tests.trainer.tables import correlated, entropy, prepared, write
from trainer.data import Prepared


def a_line(name: str, ours: float, mixture: float, paper: float) -> dict[str, object]:
    run = {"ours": ours, "mixture": mixture, "paper": paper, "gaussians": 4, "components": 2}
    return {"table": name, "features": 3, "records": 50, "runs": [run, run]}


def test_the_mixture_reaches_the_entropy_of_a_gaussian_in_our_units(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (x, covariance), (held, _) = correlated(rng, 3000), correlated(rng, 3000)
    data = prepared(tmp_path, {f"x{i}": column for i, column in enumerate(x.T)})
    other = held_of(data, tmp_path, {f"x{i}": column for i, column in enumerate(held.T)})
    components, nats = density.mixture(data, other, seed=0)
    assert components == 1
    truth = entropy(covariance, np.array([f.scale for f in data.schema.features]))
    assert nats == pytest.approx(truth, abs=0.06)


def held_of(data: Prepared, folder: Path, columns: dict[str, object]) -> Prepared:
    place = folder / "held"
    place.mkdir()
    return density.encoded(data, write(folder / "held.parquet", columns), place)


def test_held_out_records_are_in_the_units_of_training(tmp_path: Path) -> None:
    data = prepared(tmp_path, {"x": np.linspace(0.0, 10.0, 100), "state": ["a", "b"] * 50})
    held = held_of(data, tmp_path, {"state": ["b", "never"], "other": [1.0, 2.0], "x": [5.0, 10.0]})
    x, state = (data.schema.codes[name] for name in ("x", "state"))
    feature = data.schema.features[x]
    np.testing.assert_allclose(held.values[:, x], (np.array([5.0, 10.0]) - feature.location) / feature.scale, rtol=1e-6)
    assert held.values[:, state].tolist() == [1.0, 2.0]


def test_labels_are_spread_over_their_cells_and_grids_over_their_quantum(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    data = prepared(tmp_path, {"coarse": np.round(rng.normal(size=400), 1), "state": rng.integers(0, 3, 400)})
    rows = np.arange(400)
    moved = density.spread(data, rows, 0) - data.values[rows]
    coarse, state = (data.schema.codes[name] for name in ("coarse", "state"))
    assert np.abs(moved[:, state]).max() == pytest.approx(0.5, abs=0.02)
    assert np.abs(moved[:, coarse]).max() == pytest.approx(0.05 / data.schema.features[coarse].scale, rel=0.05)


def test_halves_train_and_test_on_normal_records_only(tmp_path: Path) -> None:
    table = pa.table({"f": np.arange(30.0), "label": [0] * 21 + [1] * 9})
    pq.write_table(table, tmp_path / "t.parquet")
    train, held = density.halves("t", tmp_path / "t.parquet", seed=1)
    assert (len(train), len(held)) == (10, 11)
    assert sorted(train["f"].to_pylist() + held["f"].to_pylist()) == list(range(21))


def test_wins_and_the_least_in_bold() -> None:
    lines = [a_line("one", 1.0, 2.0, 0.5), a_line("two", 1.0, 2.0, 3.0)]
    assert (density.wins(lines, "mixture"), density.wins(lines, "paper")) == (2, 1)
    rows = density.table_of(lines).splitlines()
    assert rows[2] == "| one | 3 | 50 | 1.00 | 2.00 | **0.50** | 4, 4 | 2, 2 |"
    assert rows[3].startswith("| two | 3 | 50 | **1.00** |")


def test_a_run_goes_on_with_the_tables_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(train: pa.Table, held: pa.Table, seed: int, max_time: str) -> dict[str, object]:
        measured.append(train.column_names)
        return {"seed": seed, "ours": 1.0, "mixture": 2.0, "paper": 3.0, "gaussians": 1, "components": 1}

    for name in ("one", "two"):
        pq.write_table(pa.table({name: np.arange(40.0), "label": [0] * 40}), tmp_path / f"{name}.parquet")
    found = {name: tmp_path / f"{name}.parquet" for name in ("one", "two")}
    monkeypatch.setattr(density, "measure", measure)
    monkeypatch.setattr(density, "need_peers", lambda: None)
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(density, "sources", lambda wanted: {n: p for n, p in found.items() if wanted in ("", n)})

    def run(tables: str = "", max_time: str = "60s", again: bool = False) -> None:
        density.run(argparse.Namespace(tables=tables, seeds="0", max_time=max_time, again=again))

    run("one")
    run()
    assert measured == [["one"], ["two"]]
    assert "on 2 and than the paper's recipe on 2 of 2 tables" in (tmp_path / "results" / "density.md").read_text()
    run(max_time="5s")
    run(again=True)
    assert len(measured) == 6
