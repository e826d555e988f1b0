"""The benchmark of ties: statistics from the engine, shuffled tie groups, and the report."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks import ties
from benchmarks.early import Case
from tests.engine.max_statistics import compute_max_statistics
from tests.engine.random_models import draw_records, normalise_values
from tests.models import make_small_model


def make_case(num_calibration: int, num_test: int) -> Case:
    """Return random records of an untrained model, every third test record labelled as an anomaly."""
    model = make_small_model()
    codes, raw_values = draw_records(model.schema, num_calibration + num_test, 3)
    rows = np.empty_like(raw_values)
    np.put_along_axis(rows, codes, normalise_values(model.schema, codes, raw_values), 1)
    empty = np.empty((0, 6))
    is_anomaly = np.arange(num_test) % 3 == 0
    return Case(model, rows[:num_calibration], rows[num_calibration:], empty, empty, empty, is_anomaly)


def test_statistics_equal_those_of_calibration_and_hold_ignores_the_order() -> None:
    case, rng = make_case(40, 0), np.random.default_rng(0)
    codes = np.argsort(rng.random((40, 6)), 1)
    values = np.take_along_axis(case.calibration, codes, 1)
    arrival, seconds = ties.compute_engine_statistics(case.model, "arrival", case.calibration, codes, 2)
    assert seconds > 0
    np.testing.assert_allclose(arrival[:, -1], compute_max_statistics(case.model, codes, values), rtol=1e-3)
    shuffled = ties.shuffle_within_groups(codes, 2, rng)
    held, held_shuffled = (
        ties.compute_engine_statistics(case.model, "hold", case.calibration, orders, 2)[0]
        for orders in (codes, shuffled)
    )
    np.testing.assert_allclose(held, held_shuffled, rtol=1e-4, atol=1e-4)
    assert not np.allclose(held, arrival)


def test_readings_are_shuffled_within_their_tie_groups() -> None:
    codes = np.tile(np.arange(7), (50, 1))
    shuffled = ties.shuffle_within_groups(codes, 3, np.random.default_rng(0))
    assert (shuffled // 3 == codes // 3).all()
    assert (shuffled != codes).any(0)[:6].all()


def test_report_has_a_row_for_each_tie_policy() -> None:
    run: dict[str, Any] = ties.measure_table(make_case(40, 60), 0, 3)
    assert [figures["alpha"] for figures in run["hold"]["alphas"]] == [0.05]
    assert run["hold"]["alphas"][0]["flips"] == 0, "the order within a tie group has changed an alert"
    lines = [{"table": "here", "group_size": 3, "runs": [run, run]}]
    rows = ties.format_report(lines, "today").splitlines()
    assert rows[-1].startswith("| here | 0.05 | hold | ")
    assert rows[-2].startswith("| here | 0.05 | arrival | ")
    assert len({row.count("|") for row in rows[4:]}) == 1
