"""The benchmark of Synthesizer attention and span corruption: variants on one table, and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import synthesizer
from benchmarks.ablation import TableCase


def test_variants_are_trained_and_evaluated_in_random_orders(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 1)) + 0.1 * rng.normal(size=(300, 4))  # four features that nearly agree
    columns = {f"x{i}": column for i, column in enumerate(x.T)} | {"label": np.zeros(300, np.int64)}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    (tmp_path / "work").mkdir()
    case = TableCase("t", tmp_path / "t.parquet", 0, tmp_path / "work")
    lines = [
        synthesizer.measure_variant(case, attention, objective, 20_000)
        for attention, objective in (("Synthesizer", "any order"), ("dot product", "span corruption, then any order"))
    ]
    independent = 4 * 0.5 * (1 + np.log(2 * np.pi))
    assert all(line["nats"] < independent - 0.5 for line in lines)
    assert lines[0]["parameters"] != lines[1]["parameters"]


def test_report_has_means_and_deviations_by_attention_and_objective() -> None:
    def line(seed: int, nats: float, attention: str) -> dict[str, Any]:
        return {"table": "a", "seed": seed, "attention": attention, "objective": "any order", "nats": nats} | {
            "seconds": 3.0
        }

    lines = [
        line(0, 1.0, "dot product"),
        line(1, 3.0, "dot product"),
        line(0, 4.0, "Synthesizer"),
        line(1, 5.0, "Synthesizer"),
    ]
    text = synthesizer.format_report(lines, "conditions").splitlines()
    assert text[-2:] == [
        "| dot product | any order | 2.00 ± 1.00 |  | 3 |",
        "| Synthesizer | any order | 4.50 ± 0.50 | +2.50 ± 0.50 | 3 |",
    ]
