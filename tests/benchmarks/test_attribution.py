"""The attribution benchmark's faults, peers and rule for choosing tables."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from benchmarks import attribution
from benchmarks.attribution import FAULTS, METHODS, Gaussian, chosen, inject, quality_table


def tied(n: int, seed: int = 0, noise: float = 0.1) -> np.ndarray:
    """Five features that follow two hidden ones."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 2)) @ np.array([[1.0, 1, 0, 2, 1], [0, 1, 1, -1, 3]]) + noise * rng.normal(size=(n, 5))


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_change_what_they_say(fault: str) -> None:
    rows, train = tied(200, 1), tied(300, 2)
    out, faulty = inject(fault, rows, rows, train, np.random.default_rng(0))
    assert faulty.shape[1] == (1 if fault in FAULTS[:3] else 2)
    changed = np.zeros(rows.shape, bool)
    np.put_along_axis(changed, faulty, True, 1)
    assert (out == rows)[~changed].all()
    new, old = np.take_along_axis(out, faulty, 1), np.take_along_axis(rows, faulty, 1)
    std, mean = train.std(0)[faulty], train.mean(0)[faulty]
    if "shift" in fault:
        assert ((np.abs(new - old) / std >= 3) & (np.abs(new - old) / std <= 6)).all()
    elif "broken" in fault:
        assert all(np.isin(out[:, f], rows[:, f]).all() for f in range(5))
        assert (new != old).mean() > 0.9
    elif "stuck" in fault:
        assert all(len(np.unique(out[(faulty == f).any(1), f])) == 1 for f in range(5))
    else:
        np.testing.assert_allclose((new - mean) / std, ((old - mean) / std)[:, ::-1])


def test_a_gaussian_finds_what_does_not_fit() -> None:
    train = tied(2000, 3)
    by, record = Gaussian.of(train), tied(1, 4)[0]
    record[3] += 3.0
    codes = np.array([4, 3, 0, 1])
    residuals = np.abs(by.leave_one_out(codes, record[codes]))
    assert residuals.argmax() == 1
    assert np.median(np.abs([by.leave_one_out(np.arange(5), row) for row in tied(300, 5)])) < 1.0


def test_tables_are_chosen_by_the_dependence_of_their_features() -> None:
    def table(rows: np.ndarray) -> pa.Table:
        columns = {f"f{i}": column for i, column in enumerate(rows.T)}
        return pa.table(columns | {"label": np.zeros(len(rows), np.int64)})

    free = np.random.default_rng(0).normal(size=(1200, 3))
    tables = {
        "free": table(free),
        "loose": table(tied(1200, 1, 1.0)),
        "tight": table(tied(1200, 1)),
        "small": table(tied(500, 1)),
        "coarse": table(np.column_stack([tied(1200, 1), np.round(free[:, 0])])),
    }
    assert [name for name in chosen(tables, 0) if name != "free"] == ["tight", "loose"]


def test_tables_of_results_have_a_row_for_each_fault_and_table() -> None:
    of = {"judged": 7, "seen": 3.5} | {m: {"first": 0.5, "top_two": 1.0} for m in METHODS}
    none = {"judged": 0, "seen": None} | {m: {"first": None, "top_two": None} for m in METHODS}
    lines = [{"table": "a", "faults": dict.fromkeys(FAULTS, of)}, {"table": "b", "faults": dict.fromkeys(FAULTS, none)}]
    rows = quality_table(lines, "first").splitlines()
    assert len(rows) == 2 + 3 * len(FAULTS)
    assert rows[2] == "| shift | a | 7 | 3.5 | 50 | 50 | 50 | 50 | 50 | 50 |"
    assert rows[4].startswith("| **shift** | **mean** |  |  | **50** |")
    assert attribution.row_of(["x", "y"]) == "| x | y |"
