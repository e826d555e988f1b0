"""The benchmarks of incidents: run rules, what counts as found and as false, and the simulated fleets."""

from __future__ import annotations

import argparse
import math

import numpy as np
import pytest

from benchmarks.incident_guarantee import (
    PROCESSES,
    RULES,
    draw_calibration,
    measure_seed,
    simulate_scores,
    summarise,
)
from benchmarks.incidents import (
    HELD_OUT,
    Case,
    CaseScores,
    DeviceScores,
    calibrate_run_rule,
    compute_run_statistic,
    cut_segments,
    describe_missed,
    detect_by_evidence,
    detect_by_run_rule,
    measure_hindsight_delay,
    measure_incidents,
    rank_among_others,
    score_by_mahalanobis,
    score_by_pca,
)
from deformer_stream.calibration.incident_budget import parse_budget

NUM_DEVICES = 40


@pytest.fixture(scope="module")
def case() -> Case:
    """Return a case with a fault in rows 50 to 150 of each device; the last one has none."""
    faults: dict[str, tuple[int, int] | None] = {f"d{i}": (50, 150) for i in range(NUM_DEVICES - 1)}
    faults[f"d{NUM_DEVICES - 1}"] = None
    return Case("test", ("x",), [], faults, 1.0, 100, parse_budget("1 per 2000s"), False)


@pytest.fixture(scope="module")
def scores() -> CaseScores:
    """Return exponential scores, which are larger by 8 within faults."""
    rng = np.random.default_rng(0)
    held_out = {f"d{i}{HELD_OUT}": DeviceScores(rng.exponential(1.0, 100)) for i in range(NUM_DEVICES)}
    tests = {}
    for i in range(NUM_DEVICES):
        values = rng.exponential(1.0, 300)
        if i < NUM_DEVICES - 1:
            values[50:150] += 8.0
        tests[f"d{i}"] = DeviceScores(values)
    return CaseScores(held_out, tests)


def test_the_run_statistic_is_reached_by_k_of_the_last_n_scores() -> None:
    scores = np.array([1.0, 5.0, 3.0, 4.0, 0.0])
    np.testing.assert_array_equal(compute_run_statistic(scores, 2, 3), [-math.inf, 1.0, 3.0, 4.0, 3.0])
    np.testing.assert_array_equal(compute_run_statistic(scores, 1, 1), scores)


def test_faults_are_found_once_and_soon_by_evidence(case: Case, scores: CaseScores) -> None:
    rows_by_device, plan = detect_by_evidence(case, rank_among_others(scores))
    figures = measure_incidents(case, rows_by_device, dict.fromkeys(case.faults, 300))
    assert figures["found"] == figures["one"] == NUM_DEVICES - 1
    assert figures["median_delay"] <= 3
    # 201 normal segments of the tested rows at 1/20.
    assert figures["false"] <= 20
    assert figures["normal_hours"] == pytest.approx((300 * NUM_DEVICES - 100 * (NUM_DEVICES - 1)) / 3600)
    assert plan.alpha == pytest.approx(1 / 20)


def test_faults_are_found_by_a_run_rule_at_the_same_budget(case: Case, scores: CaseScores) -> None:
    threshold = calibrate_run_rule(case, scores, 3, 3)
    rows_by_device = detect_by_run_rule(case, scores, 3, 3, threshold)
    figures = measure_incidents(case, rows_by_device, dict.fromkeys(case.faults, 300))
    assert figures["found"] == NUM_DEVICES - 1
    assert figures["median_delay"] == 2
    assert figures["false"] <= 20


def test_openings_in_normal_rows_are_false_and_the_first_one_in_a_fault_finds_it(case: Case) -> None:
    rows: dict[str, list[int]] = {name: [] for name in case.faults}
    rows["d0"] = [10, 60, 70, 200]
    rows["d1"] = [149]
    rows["d2"] = [150]
    rows[f"d{NUM_DEVICES - 1}"] = [60]
    figures = measure_incidents(case, rows, dict.fromkeys(case.faults, 300))
    assert (figures["found"], figures["one"], figures["at_most_two"], figures["false"]) == (2, 1, 2, 4)
    assert figures["delays"] == [10.0, 99.0]
    assert "d2" in figures["missed"]
    assert "d0" not in figures["missed"]


def test_p_values_of_a_device_do_not_depend_on_its_own_held_out_rows(scores: CaseScores) -> None:
    changed = CaseScores({**scores.held_out, f"d0{HELD_OUT}": DeviceScores(np.full(100, 99.0))}, scores.tests)
    before, after = rank_among_others(scores), rank_among_others(changed)
    np.testing.assert_array_equal(np.asarray(before.tests["d0"].p_values), np.asarray(after.tests["d0"].p_values))
    assert np.asarray(after.tests["d1"].p_values).min() > np.asarray(before.tests["d1"].p_values).min()


def test_held_out_rows_are_cut_into_segments(case: Case) -> None:
    scores = CaseScores({"a": DeviceScores(np.arange(249.0)), "b": DeviceScores(np.arange(250.0))}, {})
    assert [len(segment.scores) for segment in cut_segments(case, scores)] == [100, 100, 100, 100, 50]


def test_pca_and_mahalanobis_rank_a_broken_correlation_first() -> None:
    rng = np.random.default_rng(0)
    common = rng.normal(size=(500, 1))
    fit = common + 0.1 * rng.normal(size=(500, 4))
    rows = np.vstack([fit[:100], [[2.0, 2.0, -2.0, -2.0]]])
    ((t2, q),) = score_by_pca(fit, [rows])
    (distances,) = score_by_mahalanobis(fit, [rows])
    assert q.argmax() == distances.argmax() == 100
    assert t2.shape == q.shape == (101,)


@pytest.mark.parametrize("process", PROCESSES)
def test_simulated_records_have_the_distribution_of_the_calibration_records(process: str) -> None:
    rng = np.random.default_rng(0)
    scores = simulate_scores(process, 200, 2000, rng)
    calibration = draw_calibration(process, 20_000, rng)
    for quantile in (0.05, 0.5, 0.95):
        assert np.quantile(scores, quantile) == pytest.approx(np.quantile(calibration, quantile), abs=0.06)


def test_the_autocorrelation_is_as_stated() -> None:
    scores = simulate_scores("AR(1)", 2000, 20, np.random.default_rng(0))
    assert np.corrcoef(scores[:-1].ravel(), scores[1:].ravel())[0, 1] == pytest.approx(0.9, abs=0.02)


def test_a_small_simulation_shows_the_failure_of_the_e_detector_under_dependence() -> None:
    arguments = argparse.Namespace(
        records_per_day=400, devices=20, days=2, calibration_records=500, calibration_days=59
    )
    lines = [measure_seed(process, seed, arguments) for seed in range(3) for process in PROCESSES]
    assert summarise(lines, "AR(1)", RULES[1])["share"] > 0.2
    assert summarise(lines, "AR(1)", RULES[0])["share"] < 0.15
    assert summarise(lines, "independent", RULES[1])["share"] < 1 / 30


def test_a_fault_is_visible_when_most_rows_are_above_the_normal_rows_before_it(case: Case) -> None:
    values = np.zeros(300)
    values[20] = 5.0  # a normal row
    values[60] = 6.0  # one row above is not visible
    values[90:150] = 6.0
    scores = CaseScores({}, {name: DeviceScores(values) for name in case.faults})
    assert measure_hindsight_delay(case, scores) == (40.0, NUM_DEVICES - 1, NUM_DEVICES - 1)
    quiet = CaseScores({}, {name: DeviceScores(np.zeros(300)) for name in case.faults})
    assert measure_hindsight_delay(case, quiet) is None


def test_missed_faults_are_counted_by_kind() -> None:
    assert describe_missed(["fold 0, valve 90, run 0", "fold 1, valve 90, run 2", "other/2"]) == (
        "valve 90 (2 times), other/2"
    )
    assert describe_missed([]) == "none"
