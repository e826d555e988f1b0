"""The ablation benchmark: variants are compared on the same table, seed and number of readings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import ablation


def make_line(table: str, seed: int, variant: str, nats: float) -> dict[str, object]:
    """Return a JSON line with −ln p in random orders."""
    return {"table": table, "seed": seed, "variant": variant, "random": nats}


def test_differences_are_between_runs_with_the_same_table_and_seed() -> None:
    lines = [make_line("a", 0, "default", 5.0), make_line("a", 1, "default", 9.0), make_line("b", 0, "default", -1.0)]
    lines += [make_line("a", 0, "other", 4.0), make_line("a", 1, "other", 8.5), make_line("b", 0, "other", -0.5)]
    lines += [make_line("a", 1, "half", 9.5)]  # measured on one table and seed only
    text = ablation.format_differences(lines, "random", "default").splitlines()
    assert text[2:] == [
        "| default, nats | 7.00 | -1.00 |  |",
        "| other | -0.75 | +0.50 | 2 of 3 |",
        "| half | +0.50 |  | 0 of 1 |",
    ]


def test_variants_start_from_the_same_weights_and_lagged_orders_differ_by_feature(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3))
    columns = {f"x{i}": column for i, column in enumerate(x.T)} | {"label": np.zeros(400, np.int64)}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    (tmp_path / "work").mkdir()
    case = ablation.TableCase("t", tmp_path / "t.parquet", 0, tmp_path / "work")
    first, second = (
        case.create_run(case.data, options, 3000) for options in ({}, {"smoothing": 0.1, "optimizer": "adamw"})
    )
    assert (first.steps, first.batch_size) == (second.steps, second.batch_size)
    for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert p.equal(q)
    line = ablation.measure_variant(case, "lags: logged only", 3000)
    assert {"random", "logged", "steps"} <= line.keys()
    ranks = ablation.add_lagged_orders(case.data, 0).arrival_ranks
    assert ranks is not None
    assert (np.sort(ranks, 1) == np.arange(3)).all()
    assert np.ptp(ranks.mean(0)) > 0.2  # features differ in their mean rank; by chance it would be about 0.1
