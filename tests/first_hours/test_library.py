"""Data frames of pandas, polars, Arrow and NumPy in, results of the same kind out; scikit-learn and joblib."""

from __future__ import annotations

import warnings
from pathlib import Path

import joblib
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from sklearn.impute import SimpleImputer
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import deformer_stream
from tests.first_hours.plant_data import TAGS, break_flow, record_pump_station

pytestmark = pytest.mark.slow

NUM_BROKEN = 5
"""Number of rows, from the first, with a broken flow in the frames of the trials."""


@pytest.fixture(scope="module")
def detector(station: Path) -> deformer_stream.Detector:
    """Return the detector of the pump station."""
    return deformer_stream.load(station / "model")


@pytest.fixture
def frame() -> pd.DataFrame:
    """Return 200 rows with an index of their own and a column that the model does not have; five rows are broken."""
    table = break_flow(record_pump_station(200, first_row=1500, seed=3), NUM_BROKEN)
    return table.drop(columns=["id", "timestamp"]).assign(operator="Ada").set_index(np.arange(1000, 1200))


def assert_broken_rows_rank_first(scores: np.ndarray) -> None:
    """Assert that the broken rows, which are the first ones, have the largest anomaly scores."""
    assert set(np.argsort(-np.asarray(scores))[:NUM_BROKEN]) == set(range(NUM_BROKEN))


def test_pandas(detector: deformer_stream.Detector, frame: pd.DataFrame) -> None:
    with pytest.warns(UserWarning, match="operator") as caught:
        scores = detector.score(frame)
    assert len(caught) == 1
    assert isinstance(scores, pd.DataFrame)
    assert scores.index.equals(frame.index)
    assert_broken_rows_rank_first(scores["anomaly_score"])
    known = frame.drop(columns="operator")
    filled = detector.impute(known)
    assert isinstance(filled, pd.DataFrame)
    assert not filled[TAGS].isna().any().any()
    one = detector.score(known.iloc[0].dropna().to_dict())
    assert one.anomaly_score[0] == pytest.approx(scores["anomaly_score"].iloc[0], rel=1e-4)


def test_numpy(detector: deformer_stream.Detector, frame: pd.DataFrame) -> None:
    matrix = frame[list(detector.schema.names)].to_numpy(dtype=object)  # the recipe is a text
    assert_broken_rows_rank_first(detector.score(matrix).anomaly_score)


def test_polars(detector: deformer_stream.Detector, frame: pd.DataFrame) -> None:
    known = pl.from_pandas(frame.drop(columns="operator"))
    scores = detector.score(known)
    assert isinstance(scores, pl.DataFrame)
    assert_broken_rows_rank_first(scores["anomaly_score"].to_numpy())


def test_arrow(detector: deformer_stream.Detector, frame: pd.DataFrame) -> None:
    known = pa.Table.from_pandas(frame.drop(columns="operator"), preserve_index=False)
    scores = detector.score(known)
    assert isinstance(scores, pa.Table)
    assert_broken_rows_rank_first(scores["anomaly_score"].to_numpy())


def test_training_on_a_data_frame(tmp_path: Path) -> None:
    detector = deformer_stream.train(record_pump_station(300)[TAGS], preset="tiny", epochs=1)
    assert set(detector.schema.names) == set(TAGS)
    detector.save(tmp_path / "model")
    assert deformer_stream.load(tmp_path / "model").fingerprint == detector.fingerprint


@pytest.mark.filterwarnings("ignore::UserWarning")  # the training is so short that it warns
def test_a_pipeline_of_scikit_learn(frame: pd.DataFrame) -> None:
    normal = record_pump_station(300)[TAGS]
    pipeline = make_pipeline(
        SimpleImputer(), StandardScaler(), deformer_stream.DeformerDetector(preset="tiny", epochs=1, alpha=0.05)
    )
    predictions = pipeline.fit(normal).predict(frame[TAGS])
    assert (predictions[:NUM_BROKEN] == -1).all()
    assert (predictions == 1).mean() > 0.8
    labels = np.where(np.arange(len(frame)) < NUM_BROKEN, -1, 1)
    order = np.random.default_rng(0).permutation(len(frame))
    scores = cross_val_score(pipeline, frame[TAGS].iloc[order], labels[order], cv=2, scoring="accuracy")
    assert scores.shape == (2,)
    assert np.isfinite(scores).all()


def test_joblib(detector: deformer_stream.Detector, frame: pd.DataFrame, tmp_path: Path) -> None:
    known = frame.drop(columns="operator")
    joblib.dump(detector, tmp_path / "detector.joblib")
    copy = joblib.load(tmp_path / "detector.joblib")
    expected = detector.score(known)["anomaly_score"]
    assert np.array_equal(copy.score(known)["anomaly_score"], expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts = joblib.Parallel(n_jobs=2)(
            joblib.delayed(detector.score)(part) for part in (known.iloc[:100], known.iloc[100:])
        )
    assert np.allclose(pd.concat(parts)["anomaly_score"], expected)
