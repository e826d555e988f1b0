"""Tests of the detectors with the interfaces of scikit-learn, PyOD and River, with these libraries themselves."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import polars as pl
import pytest
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import deformer_stream
from deformer_stream import DeformerDetector, PyODDetector, RiverDetector
from tests.models import draw_linear_records

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # short trainings are reported as such
FAST: dict[str, Any] = {"max_time": None, "preset": "tiny", "epochs": 2}


def make_table(num_records: int = 300, num_outliers: int = 0, seed: int = 0) -> NDArray[np.float64]:
    """Return records with y = 2x + 1 and an independent z. In the outliers, which come last, y is too large by 4."""
    rng = np.random.default_rng(seed)
    values = np.column_stack([draw_linear_records(num_records, seed)[:, :2], rng.uniform(size=num_records)])
    values[num_records - num_outliers :, 1] += 4.0
    return values


@pytest.fixture(scope="module")
def fitted() -> DeformerDetector:
    """Return a detector that was fitted to a data frame with labels and gaps."""
    return DeformerDetector(alpha=0.05, **FAST, random_state=1).fit(make_frame(400))


def make_frame(num_records: int, seed: int = 0) -> pd.DataFrame:
    """Return records with numbers, labels and gaps as a pandas data frame."""
    values = draw_linear_records(num_records, seed)
    frame = pd.DataFrame({"x": values[:, 0], "y": values[:, 1], "sign": np.where(values[:, 2] > 0, "plus", "minus")})
    frame.loc[::7, "y"] = np.nan
    return frame


@pytest.mark.slow
def test_scikit_learn_checks_the_estimator() -> None:
    """All checks of scikit-learn pass. The only one that it skips itself needs an environment variable."""
    results = check_estimator(DeformerDetector(alpha=0.05, max_time=None, preset="tiny", epochs=1), on_skip=None)
    assert len(results) > 40
    not_passed = {result["check_name"]: result["status"] for result in results if result["status"] != "passed"}
    assert not_passed == {"check_array_api_input": "skipped"}


def test_threshold_has_the_false_alarm_rate() -> None:
    detector = DeformerDetector(alpha=0.1, **FAST, random_state=0).fit(make_table(1000))
    assert detector.alpha_ == 0.1
    is_outlier = detector.predict(make_table(4000, seed=1)) == -1
    assert 0.03 < is_outlier.mean() < 0.17  # a beta distribution with mean 0.1 and standard deviation 0.02
    outliers = make_table(200, 200, seed=2)
    assert (detector.decision_function(outliers) < 0).mean() > 0.9
    np.testing.assert_array_equal(detector.predict(outliers), np.where(detector.decision_function(outliers) < 0, -1, 1))


def test_score_does_not_depend_on_other_records(fitted: DeformerDetector) -> None:
    frame = make_frame(20, seed=3)
    scores = fitted.score_samples(frame)
    np.testing.assert_allclose(fitted.score_samples(frame[::-1])[::-1], scores, atol=1e-6)
    np.testing.assert_allclose(
        np.concatenate([fitted.score_samples(frame[i : i + 1]) for i in range(20)]), scores, atol=1e-6
    )
    np.testing.assert_allclose(fitted.score_samples(pl.from_pandas(frame)), scores, atol=1e-6)


def test_frames_have_names_and_labels(fitted: DeformerDetector) -> None:
    assert fitted.n_features_in_ == 3
    assert fitted.feature_names_in_.tolist() == ["x", "y", "sign"]
    assert fitted.detector_.schema.names == ("x", "y", "sign")
    assert fitted.detector_.impute({"x": 0.5}).keys() == {"y", "sign"}
    with pytest.raises(ValueError, match="feature names"):
        fitted.predict(make_frame(5).rename(columns={"x": "other"}))
    with pytest.raises(ValueError, match=r"row 1, column 'x' .*'warm'"):
        fitted.predict(pd.DataFrame({"x": [1.0, "warm"], "y": [1.0, 2.0], "sign": ["plus", "plus"]}))
    with pytest.raises(ValueError, match="0 samples"):
        fitted.predict(make_frame(0))


@pytest.mark.parametrize("names", [["x1", "x2"], ["flow", "speed"], [0, 1]])
def test_columns_without_names_are_those_of_fit_in_their_order(names: list[Any]) -> None:
    """Scikit-learn warns if only one of both has names that are texts."""
    array = np.random.default_rng(0).normal(size=(60, 2)) * [1.0, 5.0]
    frame = pd.DataFrame(array, columns=names)
    options = {"epochs": 1, "max_time": None, "random_state": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_name, by_position = (DeformerDetector(**options).fit(records) for records in (frame, array))
        expected = by_name.decision_function(frame)
        assert (by_name.decision_function(array) == expected).all()
        assert (by_position.decision_function(frame) == by_position.decision_function(array)).all()


def test_equal_seeds_give_equal_results() -> None:
    values = make_table(60)
    first, second, other = (
        DeformerDetector(**FAST, random_state=seed).fit(values).score_samples(values) for seed in (3, 3, 4)
    )
    np.testing.assert_array_equal(first, second)
    assert not np.allclose(first, other)


def test_few_records_and_unused_columns_are_warnings() -> None:
    with pytest.warns(UserWarning, match="10 records are too few"):
        DeformerDetector(alpha=0.3, **FAST).fit(make_table(10))
    with pytest.warns(UserWarning, match=r"alpha 0\.01 is out of reach with 19 calibration records.* rate 0\.05;"):
        detector = DeformerDetector(**FAST).fit(make_table(100))
    assert detector.alpha_ == pytest.approx(1 / 20)
    values = make_table(100)
    values[:, 2] = np.arange(100)
    with pytest.warns(UserWarning, match=r"columns are not used: 'x2' \(.*differ"):
        assert np.isfinite(DeformerDetector(**FAST).fit(values).score_samples(values)).all()


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": "1%"}, "alpha is '1%', but it must be one false-alarm rate"),
        ({"preset": "huge"}, "--preset"),
        ({"options": {"exclude": "nothing"}}, "nothing"),
        ({"options": {"foo": 1}}, "unknown option 'foo'"),
    ],
)
def test_wrong_parameters_are_value_errors(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DeformerDetector(**{**FAST, **parameters}).fit(make_table(60))


def test_pipeline_and_search() -> None:
    values = make_table(240, num_outliers=24)
    labels = np.r_[np.ones(216, int), -np.ones(24, int)]
    order = np.random.default_rng(0).permutation(240)
    values, labels = values[order], labels[order]
    pipeline = make_pipeline(StandardScaler(), DeformerDetector(alpha=0.1, **FAST, random_state=0))
    assert set(pipeline.fit(values).predict(values)) == {-1, 1}
    assert roc_auc_score(labels, pipeline.decision_function(values)) > 0.7
    search = GridSearchCV(
        DeformerDetector(alpha=0.1, **FAST, random_state=0), {"epochs": [1, 3]}, scoring="roc_auc", cv=2
    ).fit(values, labels)
    assert search.best_params_["epochs"] in (1, 3)
    assert search.best_score_ > 0.7
    scores = cross_val_score(DeformerDetector(alpha=0.1, **FAST), values, labels, scoring="roc_auc", cv=2, n_jobs=2)
    assert scores.shape == (2,)
    assert np.isfinite(scores).all()


@pytest.mark.parametrize("copy", [clone, pickle.loads, joblib.load], ids=["clone", "pickle", "joblib"])
def test_copies(fitted: DeformerDetector, copy: Callable[[Any], Any], tmp_path: Path) -> None:
    frame = make_frame(20, seed=3)
    if copy is clone:
        copied = clone(fitted)
        assert not hasattr(copied, "detector_")
        assert copied.get_params() == fitted.get_params()
        return
    joblib.dump(fitted, tmp_path / "dumped")
    copied = joblib.load(tmp_path / "dumped") if copy is joblib.load else pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(copied.score_samples(frame), fitted.score_samples(frame))
    np.testing.assert_array_equal(copied.predict(frame), fitted.predict(frame))


def test_several_processes(fitted: DeformerDetector) -> None:
    frame = make_frame(40, seed=3)
    parts = joblib.Parallel(n_jobs=2)(joblib.delayed(fitted.score_samples)(frame[i : i + 20]) for i in (0, 20))
    np.testing.assert_allclose(np.concatenate(parts), fitted.score_samples(frame), atol=1e-6)


def test_pyod_detector_has_the_attributes_of_pyod() -> None:
    values = make_table(300)
    values[-30:, 1] += np.linspace(20, 40, 30)  # far enough for a model that was trained for an instant
    detector = PyODDetector(contamination=0.1, **FAST, random_state=0).fit(values)
    assert detector.decision_scores_.shape == (300,)
    assert detector.labels_.sum() == 30
    assert detector.labels_[-30:].mean() > 0.5
    np.testing.assert_array_equal(detector.labels_, detector.decision_scores_ > detector.threshold_)
    assert (detector.predict(values) == detector.labels_).mean() > 0.9
    probabilities = detector.predict_proba(values)
    assert probabilities.shape == (300, 2)
    assert ((probabilities >= 0) & (probabilities <= 1)).all()
    assert detector.predict_confidence(values).shape == (300,)
    assert detector.get_params()["contamination"] == 0.1
    restored = pickle.loads(pickle.dumps(detector))
    np.testing.assert_array_equal(restored.decision_function(values), detector.decision_function(values))


def test_threshold_of_pyod_holds_for_new_records() -> None:
    """Training records are not compared with themselves; before, 15% of new normal records were outliers."""
    values = make_table(1000)
    detector = PyODDetector(contamination=0.1, **FAST, random_state=0).fit(values)
    share = detector.predict(make_table(4000, seed=1)).mean()
    assert 0.07 < share < 0.13  # the mean is 0.1, the standard deviation 0.01
    rises = detector.decision_scores_ - detector.decision_function(values)
    num_stored = detector.estimator_.detector_.artifact.scoring_model.config.exemplars
    assert num_stored > 500
    assert (rises > 0).sum() == num_stored
    assert (rises >= 0).all()


def test_equal_training_records_are_compared_with_each_other() -> None:
    from deformer_stream.library.training_scores import find_own_exemplars
    from deformer_stream.model.exemplars import Exemplars

    values = np.repeat(make_table(100), 3, axis=0).round(1)
    detector = PyODDetector(contamination=0.1, **FAST, random_state=0).fit(values)
    parameters = detector.estimator_.detector_.artifact.scoring_model.extract_parameters()
    exemplars = Exemplars.from_parameters(parameters)
    assert exemplars is not None
    codes = np.broadcast_to(np.arange(3), values.shape)
    own = find_own_exemplars(exemplars, parameters.schema.normalise(codes, values))
    assert sorted(own[own >= 0].tolist()) == list(range(len(exemplars.positions)))
    assert np.isfinite(detector.decision_scores_).all()


def test_river_detector_learns_from_its_first_records() -> None:
    from river import anomaly, compose

    detector = RiverDetector(training_records=200, alpha=0.1, options={"preset": "tiny", "epochs": 3})
    records = [dict(zip("xyz", row, strict=True)) for row in make_table(230).tolist()]
    for record in records[:200]:
        assert detector.score_one(record) == 0.0
        assert not detector.predict_one(record)
        detector.learn_one(record)
    assert detector.is_trained
    outlier = {**records[-1], "y": 50.0}
    assert detector.score_one(outlier) > max(map(detector.score_one, records[200:]))
    assert detector.predict_one(outlier)
    assert np.isfinite(detector.score_one({"x": 0.5}))  # a partial record
    pipeline = compose.Select("x", "y", "z") | detector.clone()
    pipeline.learn_one(records[0])
    assert pipeline.score_one(records[0]) == 0.0
    filtered = anomaly.ThresholdFilter(detector, threshold=1e6)
    assert filtered.score_one(outlier) == detector.score_one(outlier)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [({}, "1m"), ({"max_time": None}, None), ({"options": {"max_time": "5s", "preset": "tiny"}}, "5s")],
)
def test_training_of_river_has_a_time_limit(
    parameters: dict[str, Any], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        "deformer_stream.adapters.river.train", lambda records, **options: given.append(options["max_time"])
    )
    RiverDetector(training_records=1, **parameters).learn_one({"x": 1.0})
    assert given == [expected]


def test_river_detector_uses_a_trained_model() -> None:
    trained = deformer_stream.train(make_table(60), preset="tiny", epochs=1)
    detector = RiverDetector(trained)
    detector.learn_one({"x0": 1.0})
    record = {"x0": 1.0, "x1": 3.0}
    assert detector.score_one(record) == trained.score(record).anomaly_score[0]


@pytest.mark.parametrize(
    ("name", "module", "remedy"),
    [
        ("DeformerDetector", "sklearn", "pip install 'deformer-stream[sklearn]'"),
        ("PyODDetector", "pyod", "pip install pyod"),
        ("RiverDetector", "river", "pip install river"),
    ],
)
def test_missing_library_is_one_line_with_the_remedy(name: str, module: str, remedy: str) -> None:
    program = (
        f"import sys; sys.modules[{module!r}] = None; import deformer_stream\n"
        f"deformer_stream.load\ndeformer_stream.{name}"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    last_line = ended.stderr.strip().splitlines()[-1]
    assert last_line.startswith(f"ImportError: {name} needs")
    assert remedy in last_line
