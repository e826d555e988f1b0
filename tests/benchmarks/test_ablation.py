"""The ablation compares like with like: same table, same seed, same readings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import ablation


def a_line(table: str, seed: int, variant: str, nats: float) -> dict[str, object]:
    return {"table": table, "seed": seed, "variant": variant, "random": nats}


def test_differences_are_of_pairs() -> None:
    lines = [a_line("a", 0, "default", 5.0), a_line("a", 1, "default", 9.0), a_line("b", 0, "default", -1.0)]
    lines += [a_line("a", 0, "other", 4.0), a_line("a", 1, "other", 8.5), a_line("b", 0, "other", -0.5)]
    lines += [a_line("a", 1, "half", 9.5)]  # not measured on all
    text = ablation.table_of(lines, "random", "default").splitlines()
    assert text[2:] == [
        "| default, nats | 7.00 | -1.00 |  |",
        "| other | -0.75 | +0.50 | 2 of 3 |",
        "| half | +0.50 |  | 0 of 1 |",
    ]


def test_variants_train_on_the_same_and_lags_are_orders(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3))
    columns = {f"x{i}": column for i, column in enumerate(x.T)} | {"label": np.zeros(400, np.int64)}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    (tmp_path / "work").mkdir()
    table = ablation.Table("t", tmp_path / "t.parquet", 0, tmp_path / "work")
    one, other = (table.fit(table.data, options, 3000) for options in ({}, {"smoothing": 0.1, "optimizer": "adamw"}))
    assert (one.steps, one.batch) == (other.steps, other.batch)
    for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert p.equal(q)
    line = ablation.measure(table, "lags: logged only", 3000)
    assert {"random", "logged", "steps"} <= line.keys()
    ranks = ablation.lagged(table.data, 0).ranks
    assert ranks is not None
    assert (np.sort(ranks, 1) == np.arange(3)).all()
    assert np.ptp(ranks.mean(0)) > 0.2  # some come earlier than others; by chance it would be about 0.1
