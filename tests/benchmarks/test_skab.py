"""The SKAB benchmark: windows, the decision rule, error rates and delays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import skab
from deformer_stream.errors import InputError


def test_windows_are_means_of_the_last_rows() -> None:
    values = np.array([[1.0, 10], [2, 20], [6, 60], [4, 40]])
    assert skab.compute_windows(values, 3)[:, 0, 0].tolist() == [1, 1.5, 3, 4]
    assert (skab.compute_windows(values, 1)[:, 0] == values).all()
    by_slot = skab.compute_windows(values, 4, num_slots=2)[:, :, 1]
    assert by_slot.tolist() == [[10, 10], [10, 15], [10, 40], [15, 50]]


def test_only_scores_above_all_calibration_windows_are_detected() -> None:
    rng = np.random.default_rng(0)
    scores = rng.exponential(size=600)
    scores[:210] = 1e6  # windows that overlap the rows that train the model are not used
    largest = scores[209 + 1 : 400].max()
    scores[400:403] = largest * 0.99, largest * 1.01, largest * 5
    is_detected = skab.detect_anomalies(scores, width=11)
    assert len(is_detected) == 200
    assert is_detected[:3].tolist() == [False, True, True]
    assert (is_detected[3:] == (scores[403:] > largest)).all()


def test_rates_and_delays() -> None:
    is_anomaly = np.array([0, 0, 1, 1, 1, 0, 0, 1, 1, 0]) > 0
    is_detected = np.array([1, 0, 0, 1, 1, 1, 0, 0, 0, 0]) > 0
    counts = skab.ConfusionCounts.count(is_detected, is_anomaly)
    assert (counts.true_positives, counts.false_positives) == (2, 2)
    assert (counts.false_negatives, counts.true_negatives) == (3, 3)
    assert counts.compute_rates() == {"f1": pytest.approx(4 / 9), "far": 0.4, "mar": 0.6}
    assert (counts + counts).compute_rates() == counts.compute_rates()
    assert skab.measure_delays(is_detected, is_anomaly) == [1, None]
    assert skab.measure_delays(np.ones(4, bool), np.ones(4, bool)) == [0]


@pytest.mark.parametrize(("width", "num_slots"), [(5, 1), (6, 2)])
def test_fault_in_random_data_is_detected(width: int, num_slots: int) -> None:
    """The last sensor leaves its range after row 500."""
    rng = np.random.default_rng(0)
    common = rng.normal(size=(700, 1))
    values = common + 0.1 * rng.normal(size=(700, len(skab.SENSORS)))
    is_anomaly = np.arange(700) >= 500
    values[is_anomaly, -1] += 8.0
    line = skab.measure_experiment(skab.Experiment("valve1/0", values, is_anomaly), width, 0, 4, num_slots)
    for contender in skab.CONTENDERS:
        assert line[contender]["counts"].compute_rates()["mar"] < 0.1
        assert line[contender]["delays"][0] <= 10
    summary = skab.summarise_experiments([line, line], "ours")
    assert (summary["anomalies"], summary["found"]) == (2, 2)
    assert "| **ours** |" in skab.format_results([line])
    assert "| valve1/0 |" in skab.format_experiments([line])


def test_missing_data_error_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="DEFORMER_DATA"):
        skab.read_experiments(tmp_path)
