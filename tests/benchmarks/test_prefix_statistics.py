"""Prefix statistics with the distance to training records, and the false alarms of four rules for p-values."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import betabinom

from benchmarks import command, prefix_statistics
from benchmarks.early import Case
from benchmarks.prefix_statistics import (
    RULES,
    NatsScale,
    PrefixStatistics,
    compute_p_values,
    compute_prefix_distances,
    compute_statistics,
    measure_deals,
    scale_positions,
)
from deformer_stream.errors import InputError
from deformer_stream.model.schema import Feature, Schema
from tests.engine.random_models import make_model
from tests.models import CONFIG, SCHEMA

Floats = NDArray[np.float64]

NUMBERS = Schema(
    (Feature("a", "continuous"), Feature("b", "continuous", location=2.0, scale=4.0), Feature("c", "continuous"))
)


def list_p_values_of_each(rule: str, values: Floats, uniform: Floats) -> Floats:
    """Return the p-value of each value with the others as its calibration, (n + 1, U) for U uniform numbers."""
    return np.concatenate(
        [
            compute_p_values(rule, np.delete(values, i), np.full((1, len(uniform)), values[i]), uniform[None])
            for i in range(len(values))
        ]
    )


@pytest.mark.parametrize("values", [np.arange(40.0) ** 3, np.repeat(np.arange(8.0), 5), np.ones(40)])
def test_share_of_exchangeable_records_with_an_alert_is_at_most_alpha(values: Floats) -> None:
    """Each of the exchangeable values is equally likely to be the new one, so the mean over them is the probability."""
    uniform = (np.arange(2000) + 0.5) / 2000
    by_ranks, smoothed, interpolated = (
        list_p_values_of_each(rule, values, uniform) for rule in ("ranks", "smoothed", "interpolated")
    )
    for alpha in (0.01, 0.03, 0.05, 0.11, 0.5):
        assert (by_ranks <= alpha).mean() <= alpha
        assert (smoothed <= alpha).mean() == pytest.approx(alpha, abs=1 / 2000)
        assert (interpolated <= alpha + 1e-12).mean() <= alpha + 1 / len(values) + 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_p_value_never_rises_with_the_statistic(rule: str) -> None:
    rng = np.random.default_rng(0)
    calibration = np.round(rng.exponential(size=50), 1)  # with ties
    statistics = np.sort(rng.exponential(2.0, 400))[None]
    p = compute_p_values(rule, calibration, statistics, np.array([[0.3]]))
    assert (np.diff(p) <= 0).all()
    assert p.min() > 0
    assert p.max() <= 1


@pytest.mark.parametrize(("rule", "num_calibration", "alpha"), [("interpolated", 165, 0.01), ("tail", 36, 0.01)])
def test_rules_that_assume_an_exponential_tail_are_exact_with_it(rule: str, num_calibration: int, alpha: float) -> None:
    rng = np.random.default_rng(1)
    num_trials, num_new = 4000, 50
    rates = np.empty(num_trials)
    for i in range(num_trials):
        scale = rng.uniform(0.2, 5.0)
        draws = rng.exponential(scale, num_calibration + num_new)
        new = draws[num_calibration:, None]
        rates[i] = (compute_p_values(rule, draws[:num_calibration], new, np.zeros_like(new)) <= alpha).mean()
    assert rates.mean() == pytest.approx(alpha, abs=4 * rates.std() / np.sqrt(num_trials))


def test_tail_reaches_alphas_below_the_smallest_rank() -> None:
    calibration = np.random.default_rng(2).exponential(size=36)
    p = compute_p_values("tail", calibration, np.array([[3.0, 100.0]]), np.zeros((1, 1)))
    assert p[0, 1] < 0.001 < 1 / 37


def test_distance_of_a_prefix_uses_the_features_that_have_arrived() -> None:
    rng = np.random.default_rng(3)
    exemplars, records = rng.normal(size=(20, 3)), rng.normal(size=(4, 3))
    codes = np.argsort(rng.random((4, 3)), 1)
    scaled, others = scale_positions(NUMBERS, exemplars, records)
    assert scaled.std(0) == pytest.approx(np.ones(3), rel=1e-3)  # no exemplar is beyond 8 units
    distances = compute_prefix_distances(scaled, others, codes)
    for i, k in ((0, 1), (2, 2), (3, 3)):
        prefix = codes[i, :k]
        nearest = np.sort(np.abs(scaled[:, prefix] - others[i, prefix]).sum(1))[:3]
        assert distances[i, k - 1] == pytest.approx(nearest.mean(), rel=1e-5)
    own = np.arange(20)
    without_own = compute_prefix_distances(scaled, scaled, np.tile(np.arange(3), (20, 1)), own)
    assert without_own[:, -1].min() > 0


def test_labels_without_an_order_are_refused() -> None:
    with pytest.raises(InputError, match="leave out columns"):
        scale_positions(SCHEMA, np.zeros((4, len(SCHEMA))))


def test_nats_are_minus_the_logarithm_of_the_share_of_reference_records() -> None:
    reference = np.random.default_rng(4).exponential(3.0, (20_000, 1))
    nats = NatsScale(reference).convert(np.array([[0.5], [3.0], [9.0], [60.0]]))
    assert nats[:, 0] == pytest.approx([0.5 / 3, 1.0, 3.0, 20.0], rel=0.05)


def make_case(rng: np.random.Generator, num_calibration: int, num_normal: int) -> tuple[Case, Floats]:
    """Return a case with a random network whose normal records all have one distribution, and its training rows.

    The last five test records are anomalies, far from all others.
    """
    model = make_model(NUMBERS, CONFIG, dtype=torch.float32)
    calibration, normal, training = (rng.standard_t(3, (size, 3)) for size in (num_calibration, num_normal, 200))
    test = np.concatenate([normal, rng.normal(40.0, 1.0, (5, 3))])
    is_anomaly = np.arange(len(test)) >= num_normal
    return Case(model, calibration, test, training, calibration, test, is_anomaly), training


def test_false_alarms_of_all_statistics_are_within_their_bounds() -> None:
    """The network knows nothing of the records, and the statistics compare with training records: alpha is kept."""
    rng = np.random.default_rng(5)
    num_calibration, num_normal, num_cases, alpha = 59, 400, 12, 0.05
    num_alarms = dict.fromkeys(("g", "g + 2 D r^0.3"), 0)
    for _ in range(num_cases):
        statistics = compute_statistics(*make_case(rng, num_calibration, num_normal), rng)
        assert list(statistics.calibration) == list(num_alarms)
        for name in num_alarms:
            calibration, normal, anomalous = (
                part[name].max(1) for part in (statistics.calibration, statistics.normal, statistics.anomalous)
            )
            p = compute_p_values("ranks", calibration, normal[:, None], np.zeros((num_normal, 1)))
            num_alarms[name] += int((p <= alpha).sum())
            assert anomalous.min() > calibration.max()
    # k = 3 of 60 ranks raise an alert. The number of each case is beta-binomial, so its variance is known.
    distribution = betabinom(num_normal, 3, num_calibration + 1 - 3)
    mean, deviation = num_cases * distribution.mean(), (num_cases * distribution.var()) ** 0.5
    assert mean == pytest.approx(alpha * num_cases * num_normal)
    for count in num_alarms.values():
        assert abs(count - mean) < 4 * deviation


def test_deals_count_alerts_of_normal_records_and_of_anomalies() -> None:
    """One anomaly of two exceeds all normal records at the third of four features."""
    normal = np.random.default_rng(6).random((400, 4))
    anomalous = np.array([[0.1, 0.1, 9.0, 0.1], [0.1, 0.1, 0.1, 0.1]])
    statistics = PrefixStatistics({"g": normal[:100]}, {"g": normal[100:]}, {"g": anomalous})
    by_rule = measure_deals(statistics, "g", (0.01, 0.05), 99, 400)
    assert list(by_rule) == list(RULES)
    for rule, figures in by_rule.items():
        assert [f["detected"] for f in figures] == [[0, 0, 0.5, 0.5]] * 2
        if rule != "tail":
            assert [f["false_alarms"] for f in figures] == pytest.approx([0.01, 0.05], rel=0.15)


def test_report_separates_tables_that_chose_the_constants() -> None:
    figures = [{"alpha": alpha, "detected": [0.1, 0.2, 0.3, 0.4], "false_alarms": alpha} for alpha in (0.01, 0.05)]
    runs = [{"g": dict.fromkeys(RULES, figures)}]
    lines = [
        {"table": name, "features": 4, "calibrated": num_calibration, "runs": runs}
        for name, num_calibration in (("cardio", 165), ("fault", 127), ("WDBC", 36))
    ]
    report = prefix_statistics.format_report(lines, "Conditions.")
    assert "## α = 1%: of them, tables on which the constants were chosen (1)" in report
    assert "## α = 1%: tables on which α is out of reach by ranks (1)" in report
    assert "| g | tail | 10.0% | 20.0% | 30.0% | 40.0% | 5.00% |" in report
    assert "cardio 20 / 40, fault 20 / 40, WDBC 20 / 40" in report


def test_program_measures_a_table_and_stores_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    case, training = make_case(rng, 120, 200)
    rows = np.concatenate([training, case.calibration, case.test])
    columns = {f"f{i}": rows[:, i] for i in range(3)} | {"label": np.arange(len(rows)) >= len(rows) - 5}
    (tmp_path / "adbench").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "adbench" / "small.parquet")
    monkeypatch.setenv("DEFORMER_DATA", str(tmp_path))
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    monkeypatch.setattr("sys.argv", ["prefix_statistics", "--max-time", "2s", "--deals", "5"])
    prefix_statistics.main()
    (line,) = [json.loads(text) for text in (tmp_path / "results" / "prefix_statistics.jsonl").read_text().splitlines()]
    assert line["table"] == "small"
    assert line["features"] == 3
    assert list(line["runs"][0]) == ["g", "g + 2 D r^0.3"]
    assert "g + 2 D r^0.3" in (tmp_path / "results" / "prefix_statistics.md").read_text()
