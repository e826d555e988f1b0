"""The benchmark of wide records: the simulated plant, its broken records, and the report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import command, wide
from benchmarks.time_limit import Case
from deformer_stream import train
from deformer_stream.errors import ConfigError


def test_a_plant_is_the_same_in_training_and_test() -> None:
    first, second = wide.simulate_plant(50, 4000, 0), wide.simulate_plant(50, 4000, 1)
    assert first.is_label.sum() == 2
    is_number = ~first.is_label
    correlations = [np.corrcoef(plant.numbers[:, is_number].T) for plant in (first, second)]
    assert np.abs(correlations[0] - correlations[1]).max() < 0.1
    assert np.abs(correlations[0] - np.eye(is_number.sum())).max() > 0.8
    np.testing.assert_array_equal(first.noise, second.noise)
    table = first.to_table()
    assert table["tag0019"].type == "string"
    assert first.to_matrix().shape == (4000, 48 + 3 * 2)


@pytest.mark.parametrize("kind", wide.KINDS)
def test_three_numeric_tags_of_one_unit_are_broken(kind: str) -> None:
    plant = wide.simulate_plant(100, 200, 0)
    broken = wide.break_records(plant, kind, 0)
    rows, tags = np.nonzero(broken.numbers != plant.numbers)
    assert not plant.is_label[tags].any()
    counts = np.bincount(rows, minlength=200)
    assert counts.max() == wide.NUM_BROKEN
    assert counts.mean() > 2.5  # rounded tags can have equal values in two records
    units = tags // wide.UNIT_TAGS
    assert all(len(set(units[rows == row])) == 1 for row in np.unique(rows))
    if kind == "shifted":
        sizes = np.abs(broken.numbers - plant.numbers)[rows, tags] / plant.noise[tags]
        np.testing.assert_allclose(sizes, wide.SHIFT)
    else:
        row, tag = rows[0], tags[0]
        assert broken.numbers[row, tag] in plant.numbers[:, tag]


@pytest.mark.filterwarnings("ignore:training did not improve")
@pytest.mark.filterwarnings("ignore:.*only .* training steps")
def test_the_benchmark_measures_a_plant_and_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is as short as possible; the prior alone finds broken relations better than PCA T²."""
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(wide, "MAX_TESTED", 40)

    def run_briefly(case: Case, folder: Path, verbose: bool, uses_processor_time: bool) -> dict[str, Any]:
        train(folder / "table.parquet", folder / "model", preset="tiny", layers=1, epochs=1)
        phases = {"start": 1.0, "reading": 1.0, "prior": 1.0, "planning": 0.0, "training": 1.0, "report": 1.0}
        figures = {"limit": case.limit, "used": 5.0, "ratio": 0.1, "steps": 4, "calibrated": 120, "load": 1.0}
        return figures | {"phases": phases}

    monkeypatch.setattr(wide, "run_case", run_briefly)
    options = {
        "widths": "75",
        "records": 600,
        "seed": 0,
        "max_time": "1m",
        "processor_time": True,
        "without_prior": False,
    }
    wide.run(argparse.Namespace(**options, verbose=False, name="wide"))
    (line,) = [json.loads(text) for text in (tmp_path / "wide.jsonl").read_text().splitlines()]
    assert line["factors"] >= 4
    assert line["gaussians"] == 0
    for kind in wide.KINDS:
        assert line["auroc"]["ours, alerts"][kind] > line["auroc"]["PCA T²"][kind]
    assert line["alerts"]["normals"] == 40
    assert line["costs"]["record_KiB"] > 0
    assert wide.describe_prior(line) == f"{line['factors']} factors"
    assert wide.describe_prior(line | {"factors": 0}) == "none"
    text = (tmp_path / "wide.md").read_text()
    assert "| 75 | 60 s | 5.0 s | 0.10 |" in text
    assert "nan" not in text


def test_options_are_checked() -> None:
    assert wide.parse_widths("500,100") == [100, 500]
    assert wide.parse_seconds("2m") == 120.0
    for widths in ("", "10", "x"):
        with pytest.raises(ConfigError, match="--widths"):
            wide.parse_widths(widths)
    for duration in ("", "60", "1y"):
        with pytest.raises(ConfigError, match="--max-time"):
            wide.parse_seconds(duration)
