"""Anomalies among the training records are detected without a model, even if they are similar to each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deformer_stream import model_store
from tests.trainer.tables import mixed, prepared, write
from trainer.calibrate import split_folds
from trainer.data import PreparedTable, Split
from trainer.job import train
from trainer.outliers import compute_median_distances, drop_outliers
from trainer.settings import TrainConfig

SMALL = {"d_model": 16, "layers": 1, "heads": 2, "feedforward": 32, "mixtures": 4, "hidden": (16,), "gaussians": 2}


@pytest.fixture
def contaminated(tmp_path: Path, rng: np.random.Generator) -> PreparedTable:
    """Return 400 records of which the first 40 are anomalies that are close to each other."""
    columns = mixed(rng, 400)
    columns["b"][:40] = 4.0 + 0.05 * rng.normal(size=40)
    columns["c"][:40] = -4.0
    return prepared(tmp_path, columns)


def test_cluster_of_similar_anomalies_is_distant(contaminated: PreparedTable) -> None:
    far = compute_median_distances(contaminated, 0)
    assert np.isfinite(far).all()
    assert (far[:40].min() > np.sort(far[40:])[: int(0.95 * 360)]).all()


def test_suspected_anomalies_are_removed_from_training_only(contaminated: PreparedTable) -> None:
    clean = drop_outliers(contaminated, 0.1, 0)
    out = clean.split == Split.LEFT_OUT
    assert out[:40].sum() + (contaminated.split[:40] == Split.CALIBRATION).sum() >= 36
    assert out.sum() <= 40
    assert ((clean.split == Split.CALIBRATION) == (contaminated.split == Split.CALIBRATION)).all()
    assert clean.summarize()["rows"]["left_out"] == out.sum()
    assert drop_outliers(contaminated, 0.0, 0) is contaminated
    for fold in split_folds(clean, 3, 0):
        assert ((fold.split == Split.LEFT_OUT) == out).all()


def test_suspected_anomalies_are_neither_trained_on_nor_exemplars(tmp_path: Path, rng: np.random.Generator) -> None:
    columns = mixed(rng, 200)
    columns["b"][:20] = 50.0
    table = write(tmp_path / "table.parquet", columns)
    settings = TrainConfig(out=tmp_path / "m", contamination=0.1, epochs=1, device="cpu", preset="tiny", **SMALL)
    train([table], settings)
    loaded = model_store.read(tmp_path / "m")
    rows = loaded.manifest["training"]["rows"]
    assert rows["left_out"] > 10
    assert loaded.model.config.exemplars == rows["train"] + rows["validation"]
    assert len(loaded.calibration.scores) == 40 - 4
