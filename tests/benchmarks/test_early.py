"""The benchmark of early detection: prefix statistics, the rule, what is counted, what is written down."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.stats import betabinom, chi2

from benchmarks import early, early_report
from deformer_stream.calibration.torch_scoring import compute_max_statistics
from deformer_stream.demo.report import false_alarm_bound
from tests.engine.worlds import normalised, records_of
from tests.models import small_model


def test_our_prefix_statistics_peak_where_the_rule_looks() -> None:
    """The largest over a life is what calibration uses."""
    model = small_model()
    codes, raw = records_of(model.schema, 300, 3, missing=0.0)
    ordered = normalised(model.schema, codes, raw)
    values = np.empty_like(ordered)
    np.put_along_axis(values, codes, ordered, 1)
    g = early.ours(model, codes, values)
    assert g.shape == codes.shape
    assert g.max(1) == pytest.approx(compute_max_statistics(model, codes, ordered), rel=1e-5)
    assert (np.diff(g, axis=1) < 0).any()  # not the largest so far


def test_a_gaussian_judges_a_prefix_by_its_own_covariance() -> None:
    rng = np.random.default_rng(0)
    fitted = rng.normal(size=(400, 4)) @ rng.normal(size=(4, 4))
    rows, codes = rng.normal(size=(5, 4)) * 3, np.argsort(rng.random((5, 4)), 1)
    g = early.gaussian(fitted, codes, rows)
    for i, k in ((0, 1), (1, 2), (4, 4)):
        some = codes[i, :k]
        x = rows[i, some] - fitted.mean(0)[some]
        distance = x @ np.linalg.solve(np.atleast_2d(np.cov(fitted.T)[np.ix_(some, some)]), x)
        assert g[i, k - 1] == pytest.approx(-chi2.logsf(distance, k), rel=1e-3)
    wild = early.gaussian(fitted, codes, rows * 1e5)
    assert np.isfinite(wild).all()
    assert (wild > 1e6).all()


def test_what_is_not_there_yet_is_the_mean() -> None:
    seen: list[np.ndarray] = []

    def score(rows: np.ndarray) -> np.ndarray:
        seen.append(rows.copy())
        return rows.sum(1)

    out = early.imputed(score, np.array([[2, 0, 1], [1, 2, 0]]), np.array([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]))
    assert [rows.tolist() for rows in seen[:2]] == [[[0, 0, 4], [0, 16, 0]], [[1, 0, 4], [0, 16, 32]]]
    assert out.tolist() == [[4, 5, 7], [16, 48, 56]]


def test_every_statistic_is_judged_by_the_same_rule() -> None:
    rng = np.random.default_rng(1)
    calibration, test = rng.exponential(size=(99, 5)), rng.exponential(size=(50, 5))
    judged = early.judge(calibration, test)
    for i, k in ((0, 0), (7, 2), (49, 4)):
        reached = int((calibration.max(1) >= test[i, : k + 1].max()).sum())
        assert judged.p[i, k] == pytest.approx((1 + reached) / 100)
    assert judged.complete[3] == pytest.approx((1 + int((calibration[:, -1] >= test[3, -1]).sum())) / 100)
    assert (np.diff(judged.p, axis=1) <= 0).all()


def test_alerts_are_counted_by_what_was_observed() -> None:
    """Eight features; of four anomalies one is alerted at the second, one at the fifth, one at the last feature."""
    p = np.full((7, 8), 0.5)
    p[1, 3:] = p[3, 1:] = p[4, 4:] = p[5, 7:] = 0.01
    anomaly = np.arange(7) >= 3
    complete = np.array([0.5, 0.01, 0.5, 0.01, 0.5, 0.01, 0.5])
    found = early.worth(early.Judged(p, complete), anomaly, calibrated=199, alpha=0.01)
    assert (found.alarms, found.normals, found.detected, found.complete) == (1, 3, 0.75, 0.5)
    assert found.at_shares == (0.25, 0.25, 0.5, 0.75)
    assert found.seen == pytest.approx((2 + 5 + 8) / 3 / 8)
    nothing = early.worth(early.Judged(np.ones((7, 8)), np.ones(7)), anomaly, calibrated=199, alpha=0.01)
    assert (nothing.alarms, nothing.detected, nothing.seen) == (0, 0.0, None)


def test_bounds_hold_what_chance_allows() -> None:
    low, high = early.bounds(0.05, 199, 400)
    mass = betabinom(400, 10, 190).pmf(np.arange(low, high + 1)).sum()
    assert 0.99 <= mass < 0.995
    assert early.bounds(0.01, 98, 400) == (0, 0)
    assert false_alarm_bound(0.05, 199, 400) <= high


def test_laws_of_arrival() -> None:
    rng = np.random.default_rng(0)
    for name, law in early.LAWS.items():
        codes = law(6, 5, rng)
        assert all(len(set(row)) == len(row) and set(row) <= set(range(5)) for row in codes.tolist()), name
    assert early.LAWS["first half only"](6, 5, rng).shape == (6, 2)
    assert early.LAWS["reversed"](1, 3, rng).tolist() == [[2, 1, 0]]


def test_a_shifted_law_is_judged_by_its_own_group() -> None:
    """Statistics twice as large in schema order: false alarms abound by the random calibration, not by group."""
    rng = np.random.default_rng(2)

    def statistic(part: str, codes: np.ndarray) -> np.ndarray:
        shifted = bool((codes == np.arange(codes.shape[1])).all())
        return rng.exponential(2.0 if shifted else 1.0, codes.shape)

    values = np.zeros((400, 3))
    case = early.Case(small_model(), values, values, values, values, values, np.arange(400) >= 300)
    usual = early.LAWS["random"](400, 3, rng)
    found = early.shifted(statistic, usual, case, rng)["schema"]
    worth = {how: next(w for w in at if w["alpha"] == 0.05) for how, at in found.items()}
    assert not worth["random"]["within"]
    assert worth["group"]["within"]
    assert worth["random"]["alarms"] > 2 * worth["group"]["alarms"]


def line(name: str, calibrated: int, detected: float) -> dict[str, object]:
    def found(hits: float, alarms: int) -> list[dict[str, object]]:
        worth = {"alpha": 0.01, "alarms": alarms, "normals": 200, "low": 0, "high": 6, "within": alarms <= 6}
        curve = [hits / 4, hits / 2, hits, hits]
        return [worth | {"detected": hits, "at_shares": curve, "seen": 0.5 if hits else None, "complete": 0.5}]

    reached = calibrated >= 99
    ours, forest = (found(detected, 7), found(0.0, 1)) if reached else ([], [])
    point = {"alpha": 0.01, "realised": 1.2, "low": 0.1, "high": 2.0}
    shifted = {"schema": {"random": ours, "group": ours}}
    run = {"seed": 0, "calibrated": calibrated, "contenders": {"ours": ours, "forest": forest}}
    return {"table": name, "features": 4, "runs": [run | {"reliability": [point] * reached, "shifted": shifted}]}


def test_the_report_averages_tables_within_reach() -> None:
    lines = [line("one", 120, 0.4), line("two", 200, 0.8), line("small", 40, 0.0)]
    means = early_report.summary(lines, 0.01)
    assert means["ours"]["curve"] == pytest.approx([0.15, 0.3, 0.6, 0.6])
    assert (means["ours"]["outside"], means["ours"]["runs"], means["forest"]["seen"]) == (2, 2, None)
    assert json.loads(json.dumps(means, allow_nan=False)) == means
    text, page = early_report.report(lines, "Today.", 0.01, early.SHARES)
    assert "| **ours** | 15% | 30% | 60% | 60% | 50% | 50% | 1.20 | 3.50% | 2 of 2 |" in text.replace(".0%", "%")
    assert "| small | 40 | out of reach | out of reach | out of reach |" in text
    assert text.count("7 of 200 (3.5%) | 0 … 6 **outside**") == 2
    assert page.count("<svg xmlns") == 3 + 3  # detection: the mean and two tables; reliability: each table
    assert "NaN" not in page
