"""The benchmark of ties: the engine's statistics by record, blocks shuffled, what is written down."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks import ties
from benchmarks.early import Case
from deformer_stream.calibration.torch_scoring import compute_max_statistics
from tests.engine.worlds import normalised, records_of
from tests.models import small_model


def case_of(calibrated: int, tested: int) -> Case:
    model = small_model()
    codes, raw = records_of(model.schema, calibrated + tested, 3)
    rows = np.empty_like(raw)
    np.put_along_axis(rows, codes, normalised(model.schema, codes, raw), 1)
    nothing = np.empty((0, 6))
    anomaly = np.arange(tested) % 3 == 0
    return Case(model, rows[:calibrated], rows[calibrated:], nothing, nothing, nothing, anomaly)


def test_statistics_are_those_of_the_engine() -> None:
    case, rng = case_of(40, 0), np.random.default_rng(0)
    codes = np.argsort(rng.random((40, 6)), 1)
    values = np.take_along_axis(case.calibration, codes, 1)
    arrival, seconds = ties.statistics(case.model, "arrival", case.calibration, codes, 2)
    assert seconds > 0
    np.testing.assert_allclose(arrival[:, -1], compute_max_statistics(case.model, codes, values), rtol=1e-3)
    held = [
        ties.statistics(case.model, "hold", case.calibration, c, 2)[0] for c in (codes, ties.shuffled(codes, 2, rng))
    ]
    np.testing.assert_allclose(*held, rtol=1e-4, atol=1e-4)
    assert not np.allclose(held[0], arrival)


def test_blocks_are_shuffled_within() -> None:
    codes = np.tile(np.arange(7), (50, 1))
    again = ties.shuffled(codes, 3, np.random.default_rng(0))
    assert (again // 3 == codes // 3).all()
    assert (again != codes).any(0)[:6].all()


def test_what_is_counted() -> None:
    run: dict[str, Any] = ties.measure(case_of(40, 60), 0, 3)
    assert [at["alpha"] for at in run["hold"]["alphas"]] == [0.05]
    assert run["hold"]["alphas"][0]["flips"] == 0, "held, a shuffle changes nothing"
    lines = [{"table": "here", "block": 3, "runs": [run, run]}]
    rows = ties.report(lines, "today").splitlines()
    assert rows[-1].startswith("| here | 0.05 | hold | ")
    assert rows[-2].startswith("| here | 0.05 | arrival | ")
    assert len({row.count("|") for row in rows[4:]}) == 1
