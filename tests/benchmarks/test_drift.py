"""The benchmark of drift: exchangeable lives, what changes in the others, what is counted."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from benchmarks import drift
from benchmarks.early import LAWS, Case
from deformer_stream.calibration.torch_scoring import compute_max_statistics
from tests.engine.worlds import normalised, records_of
from tests.models import small_model


@pytest.fixture(scope="module")
def case() -> Case:
    """Records of an untrained model; as anomalies the same far away."""
    model = small_model()
    codes, raw = records_of(model.schema, 1600, 3, missing=0.0)
    ordered = normalised(model.schema, codes, raw)
    values = np.empty_like(ordered)
    np.put_along_axis(values, codes, ordered, 1)
    anomaly = np.arange(1100) >= 1000
    test = np.where(anomaly[:, None] & ~model.schema.discrete[None], values[500:] + 6.0, values[500:])
    return Case(model, values[:500], test, *(np.empty((0, 0)),) * 3, anomaly)


def test_quiet_lives_are_exchangeable_so_few_have_a_notice() -> None:
    statistics = np.random.default_rng(0).exponential(size=drift.LEAST)
    found = drift.quiet(statistics, 500, {"level 10": drift.ours(10.0)}, seed=0)
    assert found["level 10"] <= binom.ppf(0.999, drift.LIVES, 0.1)


def test_what_changes_is_found_and_named(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "CHANGED_LIVES", 3)
    normals = drift.held_out(case)
    assert normals.shape == (1500, len(case.model.schema))
    codes = LAWS["random"](*normals.shape, np.random.default_rng(0))
    statistics = compute_max_statistics(case.model, codes, np.take_along_axis(normals, codes, 1))
    contenders = {"ours": drift.ours(1000.0), "deaf": lambda calibration, stream: None}
    found = drift.drifting(case, statistics, "anomalies 30%", 500, contenders, seed=0)
    assert found["delays"]["deaf"] == [None] * 3
    assert found["named"] == []
    assert all(delay is not None and 0 < delay <= drift.DRIFTED for delay in found["delays"]["ours"])


def test_a_shift_moves_one_feature_by_its_spread() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(50, 4))
    moved, feature = drift.changed("shift 2", rows, rows[:0], np.array([1.0, 2.0, 3.0, 4.0]), rng)
    step = np.zeros(4)
    step[feature] = 2.0 * (feature + 1)
    assert moved == pytest.approx(rows + step)
    noisy, feature = drift.changed("noise 1", rows, rows[:0], np.ones(4), rng)
    assert np.flatnonzero((noisy != rows).any(0)).tolist() == [feature]
    mixed, feature = drift.changed("anomalies 10%", rows, rows[:1] + 100, np.ones(4), rng)
    assert feature == -1
    assert (mixed > 50).all(1).sum() == 5


def test_a_notice_names_the_feature_that_changed(case: Case) -> None:
    feature = int(np.flatnonzero(~case.model.schema.discrete)[0])
    rows = drift.held_out(case)[-drift.RECENT :].copy()
    codes = np.tile(np.arange(rows.shape[1]), (len(rows), 1))
    rows[:, feature] += 8.0
    assert drift.named_first(case, np.arange(500), feature, codes, rows)


def test_a_table_says_how_many_lives_and_how_soon() -> None:
    assert drift.delay_of([10, None, 30, 20]) == "75% · 20"
    assert drift.delay_of([None, None]) == "0%"
