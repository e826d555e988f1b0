"""Cross-conformal calibration scores each record once, by a model that was trained without it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deformer_stream import model_store
from tests.trainer.tables import mixed, write
from trainer.calibrate import split_folds
from trainer.data import DataOptions, Split
from trainer.job import train
from trainer.prepare import prepare_table
from trainer.settings import TrainConfig

SMALL = {"d_model": 16, "layers": 1, "heads": 2, "feedforward": 32, "mixtures": 4, "hidden": (16,), "gaussians": 2}


@pytest.mark.parametrize("folds", [2, 5])
def test_each_record_is_held_out_by_one_fold(tmp_path: Path, rng: np.random.Generator, folds: int) -> None:
    table = write(tmp_path / "table.parquet", mixed(rng, 101))
    (tmp_path / "work").mkdir()
    data = prepare_table([table], DataOptions(calibration_share=1 / folds), tmp_path / "work")
    parts = [data, *split_folds(data, folds, seed=3)]
    assert len(parts) == folds
    held_out = np.stack([part.split == Split.CALIBRATION for part in parts])
    assert (held_out.sum(0) == 1).all()
    assert max(held_out.sum(1)) - min(held_out.sum(1)) <= 1
    for part in parts[1:]:
        assert (part.split == Split.VALIDATION).sum() == (data.split == Split.VALIDATION).sum()
        assert (part.split == Split.TRAIN).sum() >= (data.split == Split.TRAIN).sum() - 1


def test_folds_calibrate_on_suspected_anomalies(tmp_path: Path, rng: np.random.Generator) -> None:
    """Each model leaves suspects out of its training. Calibration then leaves out the stated share once, not twice."""
    x = rng.normal(size=(100, 2))
    x[::20] += 50.0
    table = write(tmp_path / "table.parquet", {"a": x[:, 0], "b": x[:, 1]})
    output = train([table], TrainConfig(out=tmp_path / "model", folds=4, contamination=0.1, epochs=1, **SMALL))
    used, available = output.summary["records_used"], output.summary["records_available"]
    assert available["calibration"] == 100
    assert (used["calibration"], used["calibration_trimmed"]) == (90, 10)


def test_folds_calibrate_on_all_records(tmp_path: Path, rng: np.random.Generator) -> None:
    """The model equals that of a training without folds with the same calibration share."""
    table = write(tmp_path / "table.parquet", mixed(rng, 90))
    messages: list[str] = []
    options = {**SMALL, "epochs": 1, "device": "cpu", "preset": "tiny"}
    train([table], TrainConfig(out=tmp_path / "folds", folds=3, **options), on_message=messages.append)
    train([table], TrainConfig(out=tmp_path / "split", calibration_share=1 / 3, **options))
    many, few = (model_store.read(tmp_path / name) for name in ("folds", "split"))
    assert [line for line in messages if "fold" in line] == ["fold 2 of 3", "fold 3 of 3"]
    assert (len(many.calibration.scores), len(few.calibration.scores)) == (90, 30)
    record_scores = many.calibration.record_scores, few.calibration.record_scores
    assert [None if scores is None else len(scores) for scores in record_scores] == [90, 30]
    assert np.isin(few.calibration.scores, many.calibration.scores).all()
    for name, tensor in few.model.state_dict().items():
        assert (many.model.state_dict()[name] == tensor).all()
    assert many.manifest["training"]["rows"]["calibration"] == 30
    assert not (tmp_path / "folds.training").exists()
