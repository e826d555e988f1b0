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
from trainer.outliers import (
    MIN_REFERENCES,
    NUM_REFERENCES,
    choose_num_references,
    compute_median_distances,
    drop_outliers,
)
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


def test_distances_are_medians_of_root_mean_square_differences(tmp_path: Path, rng: np.random.Generator) -> None:
    """Numbers, labels, cyclic features and missing readings, compared with a plain loop over pairs of records."""
    columns = mixed(rng, 60) | {"heading": rng.uniform(0, 360, 60)}
    data = prepared(tmp_path, columns, cycle=(("heading", 360.0),))
    values = np.asarray(data.values, np.float64)
    schema = data.schema
    deviations = np.nanstd(values, 0)
    expected = np.zeros(60)
    for i, record in enumerate(values):
        distances = []
        for other in values:
            squares = []
            for code in np.flatnonzero(~np.isnan(record) & ~np.isnan(other)):
                difference = abs(record[code] - other[code])
                if schema.is_discrete[code]:
                    squares.append(float(difference > 0))
                    continue
                if schema.is_cyclic[code]:
                    difference = min(difference, schema.cycle_lengths[code] - difference)
                squares.append((difference / deviations[code]) ** 2)
            distances.append(np.sqrt(np.mean(squares)))
        expected[i] = np.median(distances)
    assert schema.is_cyclic.any()
    num_done: list[int] = []
    np.testing.assert_allclose(compute_median_distances(data, 0, on_progress=num_done.append), expected, atol=1e-6)
    assert num_done[-1] == 60


def test_short_time_means_fewer_references(tmp_path: Path, rng: np.random.Generator) -> None:
    data = prepared(tmp_path, mixed(rng, 4000))
    now = iter([0.0, 1.0, 5.0, 6.0, 9.0, 9.01])  # two seconds for all records with all references, then 0.02 seconds
    assert choose_num_references(data, 1.0, lambda: next(now)) == 250
    assert choose_num_references(data, 0.01, lambda: next(now)) == MIN_REFERENCES
    assert choose_num_references(data, 1.0, lambda: next(now)) == NUM_REFERENCES


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
