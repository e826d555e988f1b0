"""The benchmark of early detection: prefix statistics, p-values, counted alerts, and the report."""

from __future__ import annotations

import json

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import betabinom, chi2

from benchmarks import early, early_report
from deformer_stream.demo.report import bound_false_alarms
from tests.engine.max_statistics import compute_max_statistics
from tests.engine.random_models import draw_records, normalise_values
from tests.models import make_small_model

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def test_largest_prefix_statistic_equals_that_of_calibration() -> None:
    model = make_small_model()
    codes, raw_values = draw_records(model.schema, 300, 3, missing_share=0.0)
    ordered = normalise_values(model.schema, codes, raw_values)
    values = np.empty_like(ordered)
    np.put_along_axis(values, codes, ordered, 1)
    statistics = early.compute_model_statistics(model, codes, values)
    assert statistics.shape == codes.shape
    assert statistics.max(1) == pytest.approx(compute_max_statistics(model, codes, ordered), rel=1e-5)
    assert (np.diff(statistics, axis=1) < 0).any(), "the statistics are running maxima"


def test_gaussian_statistic_uses_the_covariance_of_the_prefix() -> None:
    rng = np.random.default_rng(0)
    train_rows = rng.normal(size=(400, 4)) @ rng.normal(size=(4, 4))
    rows, codes = rng.normal(size=(5, 4)) * 3, np.argsort(rng.random((5, 4)), 1)
    statistics = early.compute_gaussian_statistics(train_rows, codes, rows)
    covariance, mean = np.cov(train_rows.T), train_rows.mean(0)
    for i, k in ((0, 1), (1, 2), (4, 4)):
        prefix = codes[i, :k]
        x = rows[i, prefix] - mean[prefix]
        distance = x @ np.linalg.solve(np.atleast_2d(covariance[np.ix_(prefix, prefix)]), x)
        assert statistics[i, k - 1] == pytest.approx(-chi2.logsf(distance, k), rel=1e-3)
    far_out = early.compute_gaussian_statistics(train_rows, codes, rows * 1e5)
    assert np.isfinite(far_out).all()
    assert (far_out > 1e6).all()


def test_mean_replaces_features_that_have_not_arrived() -> None:
    scored_rows: list[Floats] = []

    def score_rows(rows: Floats) -> Floats:
        scored_rows.append(rows.copy())
        return np.asarray(rows.sum(1))

    codes, values = np.array([[2, 0, 1], [1, 2, 0]]), np.array([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    statistics = early.compute_imputed_statistics(score_rows, codes, values)
    assert [rows.tolist() for rows in scored_rows[:2]] == [[[0, 0, 4], [0, 16, 0]], [[1, 0, 4], [0, 16, 32]]]
    assert statistics.tolist() == [[4, 5, 7], [16, 48, 56]]


def test_p_values_are_ranks_among_calibration_maxima() -> None:
    rng = np.random.default_rng(1)
    calibration, test = rng.exponential(size=(99, 5)), rng.exponential(size=(50, 5))
    p_values = early.compute_p_values(calibration, test)
    for i, k in ((0, 0), (7, 2), (49, 4)):
        num_at_least = int((calibration.max(1) >= test[i, : k + 1].max()).sum())
        assert p_values.by_prefix[i, k] == pytest.approx((1 + num_at_least) / 100)
    num_at_least = int((calibration[:, -1] >= test[3, -1]).sum())
    assert p_values.complete[3] == pytest.approx((1 + num_at_least) / 100)
    assert (np.diff(p_values.by_prefix, axis=1) <= 0).all()


def test_alerts_are_counted_by_the_share_of_observed_features() -> None:
    """Of four anomalies, one raises an alert at the second of eight features, one at the fifth, one at the last."""
    p = np.full((7, 8), 0.5)
    p[1, 3:] = p[3, 1:] = p[4, 4:] = p[5, 7:] = 0.01
    is_anomaly = np.arange(7) >= 3
    complete = np.array([0.5, 0.01, 0.5, 0.01, 0.5, 0.01, 0.5])
    figures = early.count_alerts(early.PValues(p, complete), is_anomaly, num_calibration=199, alpha=0.01)
    assert (figures.alarms, figures.normals, figures.detected, figures.complete) == (1, 3, 0.75, 0.5)
    assert figures.at_shares == (0.25, 0.25, 0.5, 0.75)
    assert figures.seen == pytest.approx((2 + 5 + 8) / 3 / 8)


def test_figures_without_alerts_are_zero() -> None:
    p_values = early.PValues(np.ones((7, 8)), np.ones(7))
    figures = early.count_alerts(p_values, np.arange(7) >= 3, num_calibration=199, alpha=0.01)
    assert (figures.alarms, figures.detected, figures.seen) == (0, 0.0, None)


def test_false_alarm_bounds_contain_99_percent() -> None:
    low, high = early.compute_false_alarm_bounds(0.05, 199, 400)
    probability = betabinom(400, 10, 190).pmf(np.arange(low, high + 1)).sum()
    assert 0.99 <= probability < 0.995
    assert early.compute_false_alarm_bounds(0.01, 98, 400) == (0, 0)
    assert bound_false_alarms(0.05, 199, 400) <= high


def test_arrival_orders_contain_each_feature_at_most_once() -> None:
    rng = np.random.default_rng(0)
    for name, draw_orders in early.DRAW_ORDERS_BY_NAME.items():
        codes = draw_orders(6, 5, rng)
        assert all(len(set(row)) == len(row) and set(row) <= set(range(5)) for row in codes.tolist()), name
    assert early.DRAW_ORDERS_BY_NAME["first half only"](6, 5, rng).shape == (6, 2)
    assert early.DRAW_ORDERS_BY_NAME["reversed"](1, 3, rng).tolist() == [[2, 1, 0]]


def test_calibration_by_group_keeps_alpha_in_other_orders() -> None:
    """Statistics are twice as large in schema order: only the calibration on random orders has many false alarms."""
    rng = np.random.default_rng(2)

    def compute_statistics(part: str, codes: Ints) -> Floats:
        is_schema_order = bool((codes == np.arange(codes.shape[1])).all())
        return rng.exponential(2.0 if is_schema_order else 1.0, codes.shape)

    values = np.zeros((400, 3))
    case = early.Case(make_small_model(), values, values, values, values, values, np.arange(400) >= 300)
    random_codes = early.DRAW_ORDERS_BY_NAME["random"](400, 3, rng)
    by_calibration = early.measure_other_orders(compute_statistics, random_codes, case, rng)["schema"]
    figures = {how: next(f for f in entries if f["alpha"] == 0.05) for how, entries in by_calibration.items()}
    assert not figures["random"]["within"]
    assert figures["group"]["within"]
    assert figures["random"]["alarms"] > 2 * figures["group"]["alarms"]


def make_line(name: str, num_calibration: int, detected: float) -> dict[str, object]:
    """Return the JSON line of a table with made-up figures."""

    def make_figures(share: float, num_alarms: int) -> list[dict[str, object]]:
        alarms = {"alpha": 0.01, "alarms": num_alarms, "normals": 200, "low": 0, "high": 6, "within": num_alarms <= 6}
        curve = [share / 4, share / 2, share, share]
        seen = 0.5 if share else None
        return [alarms | {"detected": share, "at_shares": curve, "seen": seen, "complete": 0.5}]

    is_reachable = num_calibration >= 99
    ours, forest = (make_figures(detected, 7), make_figures(0.0, 1)) if is_reachable else ([], [])
    point = {"alpha": 0.01, "realised": 1.2, "low": 0.1, "high": 2.0}
    run = {
        "seed": 0,
        "calibrated": num_calibration,
        "contenders": {"ours": ours, "forest": forest},
        "reliability": [point] * is_reachable,
        "shifted": {"schema": {"random": ours, "group": ours}},
    }
    return {"table": name, "features": 4, "runs": [run]}


def test_report_averages_the_tables_with_enough_calibration_records() -> None:
    lines = [make_line("one", 120, 0.4), make_line("two", 200, 0.8), make_line("small", 40, 0.0)]
    means = early_report.summarise_contenders(lines, 0.01)
    assert means["ours"]["curve"] == pytest.approx([0.15, 0.3, 0.6, 0.6])
    assert (means["ours"]["outside"], means["ours"]["runs"], means["forest"]["seen"]) == (2, 2, None)
    assert json.loads(json.dumps(means, allow_nan=False)) == means
    text, page = early_report.format_report(lines, "Today.", 0.01, early.OBSERVED_SHARES)
    assert "| **ours** | 15% | 30% | 60% | 60% | 50% | 50% | 1.20 | 3.50% | 2 of 2 |" in text.replace(".0%", "%")
    not_reached = early_report.NOT_REACHED
    assert f"| small | 40 | {not_reached} | {not_reached} | {not_reached} |" in text
    assert text.count("7 of 200 (3.5%) | 0 … 6 **outside**") == 2
    assert page.count("<figure") == 3 + 3  # detections: the mean and two tables; reliability: three tables
    assert "NaN" not in page
