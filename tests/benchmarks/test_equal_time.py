"""The benchmark of equal-time encoders: splits that share no rows, and one measurement from records to F1."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from benchmarks import equal_time
from benchmarks.faults import Case as FaultCase
from benchmarks.irregular_records import Readings
from trainer.event_sets import make_event_sets


def make_case(num_records: int) -> equal_time.Case:
    """Return records of six events whose level is their class."""
    rng = np.random.default_rng(0)
    classes = np.arange(num_records) % 2
    records = np.arange(num_records).repeat(6)
    events = (rng.normal(size=(len(records), 3)) + 3 * classes[records][:, None]).astype(np.float32)
    ordered = make_event_sets(events, records, np.arange(len(records)))
    return equal_time.Case(ordered, classes, 3, [1], None)


def test_random_split_has_every_record_once() -> None:
    parts = make_case(50).split(3)
    assert [len(part) for part in parts] == [35, 5, 10]
    assert sorted(np.concatenate(parts).tolist()) == list(range(50))


def test_windows_of_tep_lie_within_a_block_of_time_and_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    row = np.arange(200)  # two faults of 100 rows, in blocks of 20 rows
    parts = row % 100 // 20
    source = FaultCase("tep", pa.table({}), pa.table({"x": row.astype(float)}), (row // 100).astype(str), parts)
    monkeypatch.setattr(equal_time, "make_tep_case", lambda: source)
    case = equal_time.make_tep()
    assert case.parts is not None
    windows = case.ordered.events.reshape(-1, equal_time.TEP_RECORD_ROWS)
    assert windows[:, 0].tolist() == list(range(0, 200, 20))  # 20 rows are one window of 20
    assert (np.diff(windows) == 1).all()
    assert case.classes.tolist() == [0] * 5 + [1] * 5
    train, validation, test = case.split(4)
    assert case.parts[test].tolist() == [4, 4]
    assert case.parts[validation].tolist() == [0, 0]
    assert set(case.parts[train].tolist()) == {1, 2, 3}


def test_units_of_stays_are_those_of_the_training_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.array([1.0, 3.0, 2.0, 1e6])  # the last one is that of another stay
    stays = Readings(("x",), ("a", "b"), np.array([0, 3, 4]), np.zeros(4, np.int64), values, np.arange(4) * 60.0)
    monkeypatch.setattr(equal_time, "read_stays", lambda folder: (stays, np.array([True, False])))
    case = equal_time.make_icu()
    assert case.classes.tolist() == [0, 1]
    encoded = case.normalise(np.array([0])).ordered.events
    assert encoded[:, 0].tolist() == [1.0] * 4
    assert np.abs(encoded[:3, 1]).max() < 2
    assert encoded[3, 1] > 10


@pytest.mark.parametrize("system", ["ordered, LSTM", "trans-trans with T"])
def test_a_system_is_trained_and_tested(system: str) -> None:
    line = equal_time.measure_system(make_case(60), system, 0, math.inf)
    assert line["f1"] > 0.9
    assert line["auroc"] > 0.9


def test_report_has_the_deviation_over_seeds() -> None:
    def line(system: str, seed: int, f1: float) -> dict[str, Any]:
        return {"case": "tep", "system": system, "seed": seed, "f1": f1, "auroc": 0.5, "seconds": 2.0}

    lines = [line("trans-LSTM", 0, 0.4), line("trans-LSTM", 1, 0.6), line("ordered, LSTM", 0, 0.7)]
    text = equal_time.format_report(lines, "conditions")
    assert "| ordered, LSTM | 0.700 ± 0.000 |  |  | 0.500 ± 0.000 | 2 | 1 |\n| trans-LSTM | 0.500 ± 0.100 |" in text
    lines += [line("avg-LSTM", 1, 0.1), line("avg-LSTM", 0, 0.5)]
    text = equal_time.format_report(lines, "conditions")
    assert "| trans-LSTM | 0.500 ± 0.100 | +0.200 ± 0.300 | 1 of 2 | 0.500 ± 0.000 | 2 | 2 |" in text
    assert "| avg-LSTM | 0.300 ± 0.200 |  |  |" in text
