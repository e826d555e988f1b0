"""The drift benchmark: simulated streams with and without a change, and the counted delays."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from benchmarks import drift
from benchmarks.early import DRAW_ORDERS_BY_NAME, Case
from tests.engine.max_statistics import compute_max_statistics
from tests.engine.random_models import draw_records, normalise_values
from tests.models import make_small_model


@pytest.fixture(scope="module")
def case() -> Case:
    """Return random records of an untrained model; the anomalies are shifted far away."""
    model = make_small_model()
    codes, raw_values = draw_records(model.schema, 1600, 3, missing_share=0.0)
    ordered = normalise_values(model.schema, codes, raw_values)
    values = np.empty_like(ordered)
    np.put_along_axis(values, codes, ordered, 1)
    is_anomaly = np.arange(1100) >= 1000
    is_shifted = is_anomaly[:, None] & ~model.schema.is_discrete[None]
    test = np.where(is_shifted, values[500:] + 6.0, values[500:])
    return Case(model, values[:500], test, *(np.empty((0, 0)),) * 3, is_anomaly)


def test_few_streams_without_a_change_have_an_alarm() -> None:
    statistics = np.random.default_rng(0).exponential(size=drift.MIN_NORMALS)
    detectors = {"level 10": drift.make_own_detector(10.0)}
    counts = drift.count_false_alarms(statistics, 500, detectors, seed=0)
    assert counts["level 10"] <= binom.ppf(0.999, drift.NUM_UNCHANGED_STREAMS, 0.1)


def test_changes_are_detected_with_their_delay(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "NUM_CHANGED_STREAMS", 3)
    normals = drift.collect_held_out_normals(case)
    assert normals.shape == (1500, len(case.model.schema))
    codes = DRAW_ORDERS_BY_NAME["random"](*normals.shape, np.random.default_rng(0))
    statistics = compute_max_statistics(case.model, codes, np.take_along_axis(normals, codes, 1))
    detectors = {"ours": drift.make_own_detector(1000.0), "silent": lambda calibration, stream: None}
    result = drift.measure_change(case, statistics, "anomalies 30%", 500, detectors, seed=0)
    assert result["delays"]["silent"] == [None] * 3
    assert result["named"] == []
    assert all(delay is not None and 0 < delay <= drift.NUM_AFTER_CHANGE for delay in result["delays"]["ours"])


def test_shift_changes_one_feature_by_its_standard_deviation() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(50, 4))
    shifted, feature = drift.apply_change("shift 2", rows, rows[:0], np.array([1.0, 2.0, 3.0, 4.0]), rng)
    step = np.zeros(4)
    step[feature] = 2.0 * (feature + 1)
    assert shifted == pytest.approx(rows + step)


def test_noise_changes_one_feature() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(50, 4))
    noisy, feature = drift.apply_change("noise 1", rows, rows[:0], np.ones(4), rng)
    assert np.flatnonzero((noisy != rows).any(0)).tolist() == [feature]


def test_anomalies_replace_a_share_of_the_records() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(50, 4))
    mixed, feature = drift.apply_change("anomalies 10%", rows, rows[:1] + 100, np.ones(4), rng)
    assert feature == -1
    assert (mixed > 50).all(1).sum() == 5


def test_notice_names_the_changed_feature(case: Case) -> None:
    feature = int(np.flatnonzero(~case.model.schema.is_discrete)[0])
    rows = drift.collect_held_out_normals(case)[-drift.NUM_RECENT_RECORDS :].copy()
    codes = np.tile(np.arange(rows.shape[1]), (len(rows), 1))
    rows[:, feature] += 8.0
    assert drift.names_feature_first(case, np.arange(500), feature, codes, rows)


def test_delays_are_formatted_as_share_and_median() -> None:
    assert drift.format_delays([10, None, 30, 20]) == "75% · 20"
    assert drift.format_delays([None, None]) == "0%"
