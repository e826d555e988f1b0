"""The benchmark of encoders of tie groups: training and scores on one table, costs, and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import tie_encoders
from benchmarks.ablation import TableCase
from deformer_stream.errors import ConfigError


@pytest.fixture
def case(tmp_path: Path) -> tie_encoders.TieCase:
    """A table of five features that nearly agree; the anomalies break the relation."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 1)) + 0.1 * rng.normal(size=(500, 5))
    is_anomaly = np.arange(500) % 10 == 0
    x[is_anomaly] = rng.normal(size=(50, 5))
    columns = {f"x{i}": column for i, column in enumerate(x.T)} | {"label": is_anomaly.astype(np.int64)}
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table(columns), path)
    (tmp_path / "work").mkdir()
    return tie_encoders.TieCase(TableCase("t", path, 0, tmp_path / "work"), path, 2)


def test_methods_learn_the_density_and_rank_anomalies(case: tie_encoders.TieCase) -> None:
    lines = tie_encoders.measure_network(case, None, False, 60_000)
    lines += tie_encoders.measure_network(case, "attention", False, 60_000)
    assert [line["method"] for line in lines] == ["one random order", "canonical order", "four orders", "attention"]
    independent = 0.5 * (1 + np.log(2 * np.pi))
    for line in lines:
        assert line["nats"] < independent - 0.3
        assert min(line["auroc"], line["auroc_nll"]) > 0.9
    assert len({line["steps"] for line in lines}) == 1, "all networks have the same number of steps"
    assert len({line["nats"] for line in lines}) == 4, "all methods differ"


def test_only_the_order_of_arrival_can_change_a_score(case: tie_encoders.TieCase) -> None:
    values, orders = (
        tie_encoders.read_all_rows(case.table.held_out),
        case.draw_orders(len(case.table.held_out.split), 0),
    )
    swapped = orders[:, [1, 0, 3, 2, 4]]
    for encoding in (None, "transformer"):
        model = case.create_model(encoding, False)
        for name, method in tie_encoders.make_methods(model, encoding, case).items():
            before, after = (tie_encoders.score_in_batches(method, values, order)[0] for order in (orders, swapped))
            is_same = np.allclose(before, after, rtol=1e-4, atol=1e-4)
            assert is_same == (name != "one random order"), name


def test_costs_are_those_of_all_methods(case: tie_encoders.TieCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tie_encoders, "NUM_TIMED_ROUNDS", 1)
    line = tie_encoders.measure_costs(case, [None, "order", "mean"], False)
    microseconds = line["microseconds"]
    methods = {"one random order", "canonical order", "four orders", "canonical order, learnt", "pooled by mean"}
    assert microseconds.keys() == methods
    assert min(microseconds.values()) > 0


def test_report_has_differences_from_four_orders() -> None:
    def line(method: str, seed: int, nats: float, auroc: float) -> dict[str, Any]:
        key = {"table": "a", "seed": seed, "prior": "none", "method": method}
        return key | {"nats": nats, "auroc": auroc, "auroc_nll": 0.75}

    lines = [
        line("four orders", 0, 0.5, 0.8),
        line("four orders", 1, 0.7, 0.9),
        line("attention", 0, 0.6, 0.9),
        line("attention", 1, 0.6, 0.9),
        line("pooled by mean", 1, 0.6, 0.9),
        {"table": "a", "prior": "none", "microseconds": {"four orders": 40.0, "attention": 12.34}},
    ]
    rows = tie_encoders.format_report(lines, "conditions").splitlines()
    assert rows[-3] == "| a | four orders | 0.6000 |  | 0.850 |  | 0.750 | 40.0 | 2 |"
    expected = "| a | attention | 0.6000 | +0.0000 ± 0.1000 | 0.900 | +0.050 ± 0.050 | 0.750 | 12.3 | 2 |"
    assert rows[-2] == expected
    assert rows[-1] == "| a | pooled by mean | 0.6000 | -0.1000 | 0.900 | +0.000 | 0.750 |  | 1 |"


def test_an_unknown_encoder_is_refused() -> None:
    with pytest.raises(ConfigError, match="--encoders median: there is no such name; available are attention, mean"):
        tie_encoders.parse_names("attention,median", ("attention", "mean"), "--encoders")
