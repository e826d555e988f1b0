"""The SKAB benchmark: windows, the rule inside the training rows, points and delays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import skab
from deformer_stream.errors import InputError


def test_windows_are_means_of_the_last_rows() -> None:
    values = np.array([[1.0, 10], [2, 20], [6, 60], [4, 40]])
    assert skab.windows(values, 3)[:, 0, 0].tolist() == [1, 1.5, 3, 4]
    assert (skab.windows(values, 1)[:, 0] == values).all()
    assert skab.windows(values, 4, slots=2)[:, :, 1].tolist() == [[10, 10], [10, 15], [10, 40], [15, 50]]


def test_only_what_no_calibration_window_reached_is_called() -> None:
    rng = np.random.default_rng(0)
    statistic = rng.exponential(size=600)
    statistic[:210] = 1e6  # windows that reach back into the rows that trained do not count
    most = statistic[209 + 1 : 400].max()
    statistic[400:403] = most * 0.99, most * 1.01, most * 5
    calls = skab.called(statistic, width=11)
    assert len(calls) == 200
    assert calls[:3].tolist() == [False, True, True]
    assert (calls[3:] == (statistic[403:] > most)).all()


def test_rates_and_delays() -> None:
    anomaly = np.array([0, 0, 1, 1, 1, 0, 0, 1, 1, 0]) > 0
    called = np.array([1, 0, 0, 1, 1, 1, 0, 0, 0, 0]) > 0
    counts = skab.Counts.of(called, anomaly)
    assert (counts.hits, counts.false, counts.missed, counts.quiet) == (2, 2, 3, 3)
    assert counts.rates() == {"f1": pytest.approx(4 / 9), "far": 0.4, "mar": 0.6}
    assert (counts + counts).rates() == counts.rates()
    assert skab.delays(called, anomaly) == [1, None]
    assert skab.delays(np.ones(4, bool), np.ones(4, bool)) == [0]


@pytest.mark.parametrize(("width", "slots"), [(5, 1), (6, 2)])
def test_a_fault_of_a_made_up_bed_is_found(width: int, slots: int) -> None:
    """The last sensor leaves its range after row 500."""
    rng = np.random.default_rng(0)
    common = rng.normal(size=(700, 1))
    values = common + 0.1 * rng.normal(size=(700, len(skab.SENSORS)))
    anomaly = np.arange(700) >= 500
    values[anomaly, -1] += 8.0
    line = skab.measure(skab.Experiment("valve1/0", values, anomaly), width, 0, 4, slots)
    for contender in skab.CONTENDERS:
        assert line[contender]["counts"].rates()["mar"] < 0.1
        assert line[contender]["delays"][0] <= 10
    s = skab.summary([line, line], "ours")
    assert (s["anomalies"], s["found"]) == (2, 2)
    assert "| **ours** |" in skab.table_of([line])
    assert "| valve1/0 |" in skab.by_experiment([line])


def test_errors_name_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="DEFORMER_DATA"):
        skab.read(tmp_path)
