"""The benchmark of the Tennessee Eastman process: windows, thresholds, found faults and the report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import command, faults, incidents, tep
from benchmarks.incidents import Case
from deformer_stream import Detector, train
from deformer_stream.errors import ConfigError

NUM_VARIABLES = 5


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """Return the case of simulated files with two faults, of which only the first one is large."""
    rng = np.random.default_rng(0)

    def write(name: str, num_rows: int, shift: float) -> None:
        rows = rng.normal(size=(num_rows, 1)) + 0.3 * rng.normal(size=(num_rows, NUM_VARIABLES))
        rows[incidents.TEP_FAULT_ROW :, 0] += shift
        columns = {f"x{index}": rows[:, index] for index in range(NUM_VARIABLES)}
        pq.write_table(
            pa.table(columns | {"fault": np.zeros(num_rows, np.int64)}), tmp_path / "tep" / f"{name}.parquet"
        )

    (tmp_path / "tep").mkdir()
    monkeypatch.setenv("DEFORMER_DATA", str(tmp_path))
    write("normal_train", 300, 0.0)
    write("normal_test", 960, 0.0)  # 12 segments, as the budget of incidents needs
    write("fault01", 260, 8.0)
    write("fault03", 260, 0.0)
    return incidents.make_tep_case()


def test_windows_are_means_and_a_fault_begins_in_the_first_window_with_a_faulty_row(case: Case) -> None:
    windows = tep.make_window_case(case, 4)
    rows, means = case.folds[0].tests["fault01"], windows.folds[0].tests["fault01"]
    assert len(means) == len(rows) - 3
    np.testing.assert_allclose(means[0], rows[:4].mean(0))
    assert windows.faults == {"normal": None, "fault01": (157, 257), "fault03": (157, 257)}
    np.testing.assert_allclose(means[157], rows[157:161].mean(0))
    assert tep.make_window_case(case, 1).faults == case.faults


def test_a_threshold_is_exceeded_by_at_most_alpha() -> None:
    scores = np.random.default_rng(0).permutation(np.arange(200.0))
    assert tep.compute_threshold(scores, 0.01) == 198.0  # 201 ranks, of which 2 are above it
    assert tep.compute_threshold(scores, 0.001) == float("inf")


def test_a_fault_is_found_at_the_first_of_six_alerts_in_a_row() -> None:
    is_alert = np.zeros(30, bool)
    is_alert[3:14] = True  # the first run begins before the fault
    is_alert[[5, 20, 21, 22, 23, 24, 25]] = False, True, True, True, True, True, True
    assert tep.find_first_run(is_alert, 5) == 1
    assert tep.find_first_run(is_alert, 10) == 10
    assert tep.find_first_run(is_alert, 22) is None
    assert tep.find_first_run(is_alert, 28) is None


def test_the_classifier_of_faults_gets_the_same_rows(case: Case) -> None:
    table = faults.make_tep_case()
    fold = case.folds[0]
    assert (len(table.normal), len(table.records)) == (780, 200)
    assert table.normal["x1"].to_pylist() == [*fold.fit[:, 1], *fold.held_out["normal" + incidents.HELD_OUT][:, 1]]
    assert table.records["x1"].to_pylist()[100:] == fold.tests["fault03"][160:, 1].tolist()
    assert table.faults.tolist() == ["fault01"] * 100 + ["fault03"] * 100
    assert table.parts.tolist() == np.repeat(range(5), 20).tolist() * 2


@pytest.mark.filterwarnings("ignore:training did not improve")
def test_the_benchmark_finds_the_large_fault_and_writes_its_report(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(tep, "RESULTS", tmp_path)

    def train_briefly(table: pa.Table, folder: Path, max_time: str, **options: Any) -> Detector:
        return train(table, folder, epochs=2, **options)

    monkeypatch.setattr(incidents, "train", train_briefly)
    tep.run(argparse.Namespace(windows="2", max_time="90s", seed=0, models=tmp_path / "models", note=""))
    lines = [json.loads(line) for line in (tmp_path / "tep.jsonl").read_text().splitlines()]
    by_method = {line["method"]: line for line in lines}
    for method in (tep.ALERTS, "PCA Q", "GMM"):
        for rule in tep.RULES:
            figures = by_method[method][rule]
            assert figures["normal"] < 0.05
            assert figures["faults"]["fault01"]["detected"] > 0.9
            assert figures["faults"]["fault01"]["delay"] <= 6.0
            assert figures["faults"]["fault03"]["detected"] < 0.2
            assert figures["faults"]["fault03"]["delay"] is None
    assert by_method[tep.ALERTS]["incidents"]["fault01"]["incidents"] == 1
    curve = by_method["prefixes"]["curves"][incidents.OURS]
    assert len(curve) == NUM_VARIABLES
    assert curve == sorted(curve)
    text = (tmp_path / "tep.md").read_text()
    assert "## Means of 2 rows (6 minutes)" in text
    assert "of 2 faults" in text
    page = (tmp_path / "tep.html").read_text()
    assert page.count("<figure") == 3
    assert "NaN" not in page


@pytest.mark.parametrize("widths", ["", "0", "1,x", "50"])
def test_invalid_windows_are_rejected(widths: str) -> None:
    with pytest.raises(ConfigError, match="--windows"):
        tep.parse_widths(widths)
