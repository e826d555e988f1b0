"""The attribution benchmark: injected faults, the Gaussian method, the choice of tables, and the report."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from benchmarks.attribution import FAULTS, METHODS, Gaussian, choose_tables, format_quality_table, inject_fault

Floats = NDArray[np.float64]


def draw_dependent_rows(n: int, seed: int = 0, noise: float = 0.1) -> Floats:
    """Draw rows of five features that are linear functions of two hidden variables, plus noise."""
    rng = np.random.default_rng(seed)
    weights = np.array([[1.0, 1, 0, 2, 1], [0, 1, 1, -1, 3]])
    return np.asarray(rng.normal(size=(n, 2)) @ weights + noise * rng.normal(size=(n, 5)))


@pytest.mark.parametrize("fault", FAULTS)
def test_injected_fault_changes_the_faulty_features_only(fault: str) -> None:
    rows, train = draw_dependent_rows(200, 1), draw_dependent_rows(300, 2)
    faulty_rows, faulty = inject_fault(fault, rows, rows, train, np.random.default_rng(0))
    assert faulty.shape[1] == (1 if fault in FAULTS[:3] else 2)
    is_faulty = np.zeros(rows.shape, bool)
    np.put_along_axis(is_faulty, faulty, True, 1)
    assert (faulty_rows == rows)[~is_faulty].all()
    new, old = np.take_along_axis(faulty_rows, faulty, 1), np.take_along_axis(rows, faulty, 1)
    std, mean = train.std(0)[faulty], train.mean(0)[faulty]
    if "shift" in fault:
        assert ((np.abs(new - old) / std >= 3) & (np.abs(new - old) / std <= 6)).all()
    elif "broken" in fault:
        assert all(np.isin(faulty_rows[:, f], rows[:, f]).all() for f in range(5))
        assert (new != old).mean() > 0.9
    elif "stuck" in fault:
        assert all(len(np.unique(faulty_rows[is_faulty[:, f], f])) == 1 for f in range(5))
    else:
        np.testing.assert_allclose((new - mean) / std, ((old - mean) / std)[:, ::-1])


def test_gaussian_residual_is_largest_for_the_faulty_reading() -> None:
    train = draw_dependent_rows(2000, 3)
    gaussian, record = Gaussian.fit(train), draw_dependent_rows(1, 4)[0]
    record[3] += 3.0
    codes = np.array([4, 3, 0, 1])
    residuals = np.abs(gaussian.compute_leave_one_out(codes, record[codes]))
    assert residuals.argmax() == 1
    normal = [gaussian.compute_leave_one_out(np.arange(5), row) for row in draw_dependent_rows(300, 5)]
    assert np.median(np.abs(normal)) < 1.0


def test_tables_are_chosen_by_the_dependence_of_their_features() -> None:
    def make_table(rows: Floats) -> pa.Table:
        columns = {f"f{i}": column for i, column in enumerate(rows.T)}
        return pa.table(columns | {"label": np.zeros(len(rows), np.int64)})

    independent = np.random.default_rng(0).normal(size=(1200, 3))
    tables = {
        "independent": make_table(independent),
        "weakly dependent": make_table(draw_dependent_rows(1200, 1, 1.0)),
        "strongly dependent": make_table(draw_dependent_rows(1200, 1)),
        "too few rows": make_table(draw_dependent_rows(500, 1)),
        "too few values": make_table(np.column_stack([draw_dependent_rows(1200, 1), np.round(independent[:, 0])])),
    }
    names = [name for name in choose_tables(tables, 0) if name != "independent"]
    assert names == ["strongly dependent", "weakly dependent"]


def test_quality_table_has_a_row_for_each_fault_and_table() -> None:
    measured = {"explained": 7, "seen": 3.5} | {m: {"first": 0.5, "top_two": 1.0} for m in METHODS}
    without_alerts = {"explained": 0, "seen": None} | {m: {"first": None, "top_two": None} for m in METHODS}
    lines = [
        {"table": "a", "faults": dict.fromkeys(FAULTS, measured)},
        {"table": "b", "faults": dict.fromkeys(FAULTS, without_alerts)},
    ]
    rows = format_quality_table(lines, "first").splitlines()
    assert len(rows) == 2 + 3 * len(FAULTS)
    assert rows[2] == "| shift | a | 7 | 3.5 | 50 | 50 | 50 | 50 | 50 | 50 |"
    assert rows[4].startswith("| **shift** | **mean** |  |  | **50** |")
