"""Incident budgets: how they are written, which rule keeps them, and the confidence interval of the realised rate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from deformer_stream.calibration.conditional_e_values import compute_log_normalisers
from deformer_stream.calibration.incident_budget import (
    MAX_NORMALISERS,
    IncidentBudget,
    bound_realised_rate,
    count_required_segments,
    describe_plan,
    parse_budget,
    plan_budget,
)
from deformer_stream.calibration.incident_evidence import ScoreTail
from deformer_stream.calibration.incident_segments import SegmentCalibration
from deformer_stream.durations import MICROS_PER_DAY, MICROS_PER_HOUR
from deformer_stream.errors import ConfigError

MONTH = parse_budget("1 per 30d")


def make_segments(num_days: int, **lengths: int) -> list[SegmentCalibration]:
    """Return calibrations with segments of a day, of 8 hours and of an hour from a number of device-days."""
    micros = {"1d": 24, "8h": 8, "1h": 1}
    return [
        SegmentCalibration(
            hours * MICROS_PER_HOUR,
            tuple(map(float, range(num_days * 24 // hours))),
            3600.0 * hours,
            1,
            ScoreTail(5.0, 0.01, 1.0),
        )
        for hours in micros.values()
    ]


@pytest.mark.parametrize(
    ("text", "count", "days"),
    [
        ("1 per 30d", 1, 30),
        ("  2   per  1.5 w ", 2, 10.5),
        ("0.5 per d", 0.5, 1),
        ("10 per 12h", 10, 0.5),
        ("1 per 90m", 1, 0.0625),
        ("3 per 86400s", 3, 1),
        ("1 per 1d12h", 1, 1.5),
        ("2 per 6h 30m", 2, 6.5 / 24),
    ],
)
def test_a_budget_is_a_number_of_incidents_and_a_time(text: str, count: float, days: float) -> None:
    assert parse_budget(text) == IncidentBudget(count, round(days * MICROS_PER_DAY))


@pytest.mark.parametrize(
    "text",
    [
        *("", "1", "30d", "1 per", "1/30d", "1 per 30", "1 per 30y", "1 per 2h 30d", "one per 30d"),
        *("0 per 30d", "-1 per 30d", "1 per 0d", "1e9 per 30d", "nan per 30d", "1 per 9999999999999999w"),
        *(f"1 per {9 * 10**400}d", "1 per 0.0000001s"),
        "1 per \N{FULLWIDTH DIGIT THREE}0d",
    ],
)
def test_nonsense_is_not_a_budget(text: str) -> None:
    with pytest.raises(ConfigError, match="--incident-budget"):
        parse_budget(text)


@given(st.integers(1, 1000), st.integers(1, 10_000), st.sampled_from("smhdw"))
def test_a_budget_is_read_back_from_its_text(count: int, number: int, unit: str) -> None:
    budget = parse_budget(f"{count} per {number}{unit}")
    assert parse_budget(str(budget)) == budget


@given(st.floats(1e-6, 0.99))
def test_with_the_required_segments_alpha_is_in_reach_and_with_one_less_it_is_not(alpha: float) -> None:
    num_required = count_required_segments(alpha)
    for num_segments, is_in_reach in ((num_required, True), (num_required - 1, False)):
        if num_segments >= 0:
            calibration = SegmentCalibration(1, tuple(map(float, range(num_segments))), 1.0, 1)
            assert math.isfinite(calibration.compute_log_threshold(alpha)) == is_in_reach


def test_a_month_needs_29_device_days_or_719_device_hours() -> None:
    assert count_required_segments(1 / 30) == 29
    assert count_required_segments(1 / 720) == 719


def test_the_longest_segment_in_reach_is_taken() -> None:
    assert plan_budget(MONTH, make_segments(29)).segment == MICROS_PER_DAY
    plan = plan_budget(MONTH, make_segments(29))
    assert (plan.rule, plan.is_kept, plan.num_segments, plan.num_required) == ("segments", True, 29, 29)
    assert plan.log_threshold == 28.0
    assert plan.tail == ScoreTail(5.0, 0.01, 1.0)
    # A budget of a day is not longer than a device-day.
    assert plan_budget(parse_budget("1 per 1d"), make_segments(29)).segment == 8 * MICROS_PER_HOUR
    assert plan_budget(MONTH, make_segments(40), segment_length=MICROS_PER_HOUR).segment == MICROS_PER_HOUR


def test_with_too_few_segments_the_e_detector_is_taken_and_the_shortage_is_stated() -> None:
    plan = plan_budget(MONTH, make_segments(12), [1000])
    assert plan.rule == "e-detector"
    assert plan.log_threshold == pytest.approx(math.log(30 * 86_400))  # the rate of the segments: 3600 an hour
    assert plan.log_normalisers is not None
    text = describe_plan(plan)
    assert "12 of 29 device-days" in text
    assert "17 more days" in text
    assert "independent" in text


def test_the_description_of_a_kept_plan_names_its_numbers_and_assumption() -> None:
    text = describe_plan(plan_budget(MONTH, make_segments(36)))
    assert "36 device-days, at least 29 needed" in text
    assert "exchangeable" in text
    assert "times of a day are alike" in describe_plan(
        plan_budget(MONTH, make_segments(36), segment_length=28_800_000_000)
    )


def test_a_requested_rule_is_taken_or_refused() -> None:
    assert plan_budget(MONTH, make_segments(36), requested="e-detector").rule == "e-detector"
    with pytest.raises(ConfigError, match="12 of 29"):
        plan_budget(MONTH, make_segments(12), requested="segments")
    with pytest.raises(ConfigError, match="calibrate --incidents"):
        plan_budget(MONTH, [], requested="segments", records_per_day=100.0)


def test_without_segments_the_number_of_records_of_a_day_must_be_known() -> None:
    with pytest.raises(ConfigError, match="--records-per-day"):
        plan_budget(MONTH)
    plan = plan_budget(MONTH, records_per_day=1000.0)
    assert plan.records_per_period == pytest.approx(30_000)
    assert plan.is_reached(math.log(30_001))
    assert not plan.is_reached(math.log(29_999))


def test_a_plan_by_segments_has_the_e_detector_for_other_models() -> None:
    plan = plan_budget(MONTH, make_segments(36), [500, 100], model="16e9")
    assert plan.model == "16e9"
    assert plan.fallback is not None
    assert plan.fallback.rule == "e-detector"
    assert plan.is_reached(plan.log_threshold + 1e-9)
    assert not plan.is_reached(plan.log_threshold)  # at most alpha includes ties


@pytest.mark.parametrize("num_false", [0, 1, 3, 20, 500])
def test_the_interval_of_a_rate_is_that_of_garwood(num_false: int) -> None:
    low, high = bound_realised_rate(num_false, 2.0, 0.99)
    assert high == pytest.approx(chi2.ppf(0.995, 2 * num_false + 2) / 2 / 2.0)
    assert low == pytest.approx(chi2.ppf(0.005, 2 * num_false) / 2 / 2.0 if num_false else 0.0)


def test_without_observed_time_any_rate_is_possible() -> None:
    assert bound_realised_rate(0, 0.0) == (0.0, math.inf)


def test_e_values_are_normalised_for_the_largest_and_the_smallest_calibration_of_a_fleet() -> None:
    num_misses = compute_log_normalisers.cache_info().misses
    sizes = [1000, *range(101, 600)]
    plan = plan_budget(MONTH, num_calibration_records=sizes, records_per_day=1000.0)
    assert plan.log_normalisers is not None
    assert compute_log_normalisers.cache_info().misses - num_misses <= MAX_NORMALISERS
    for size in (101, 1000):
        assert all(a >= b for a, b in zip(plan.log_normalisers, compute_log_normalisers(size), strict=True))
