"""The segment rule: thresholds from segments of normal operation, and their guarantee."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.calibration.incident_evidence import (
    INITIAL_STATE,
    ScoreTail,
    advance_detector,
    compute_log_statistic,
)
from deformer_stream.calibration.incident_segments import MAX_OPEN_ALERTS, SegmentCalibration, SegmentCollector
from deformer_stream.durations import MICROS_PER_HOUR
from tests.calibration.segments import calibrate_segments

DAY = 24 * MICROS_PER_HOUR


def make_calibration(statistics: list[float], **options: Any) -> SegmentCalibration:
    """Return a calibration of segments with these statistics."""
    return SegmentCalibration(DAY, tuple(sorted(statistics)), 100.0, 1, **options)


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=60), st.floats(0.01, 0.99))
def test_of_n_plus_1_exchangeable_segments_at_most_a_share_alpha_opens_an_incident(
    statistics: list[int], alpha: float
) -> None:
    # Each segment in turn is the new one. This is the whole proof of the guarantee, with ties.
    num_open = 0
    for index, statistic in enumerate(statistics):
        others = make_calibration([float(value) for value in statistics[:index] + statistics[index + 1 :]])
        num_open += statistic > others.compute_log_threshold(alpha)
    assert num_open <= alpha * len(statistics) + 1e-9


def test_the_threshold_is_the_statistic_of_that_rank() -> None:
    calibration = make_calibration([float(value) for value in range(99)])
    assert calibration.compute_log_threshold(0.01) == 98.0  # one segment of 100 may open an incident
    assert calibration.compute_log_threshold(0.05) == 94.0
    assert calibration.compute_log_threshold(0.009) == math.inf
    assert calibration.compute_log_threshold(1.0) == -math.inf


def test_segments_begin_anew_and_have_their_largest_statistic() -> None:
    p_values = [0.01, 0.5, 0.001, 0.9, 0.3, 0.02]
    times = [0, 1, 2, DAY, DAY + 1, DAY + 2]
    (calibration,) = calibrate_segments(["pump"] * 6, times, p_values, [0.0] * 6, [DAY])
    expected = []
    for part in (p_values[:3], p_values[3:]):
        state, largest = INITIAL_STATE, -math.inf
        for p_value in part:
            state = advance_detector(state, p_value)
            largest = max(largest, compute_log_statistic(state))
        expected.append(largest)
    assert calibration.log_statistics == tuple(sorted(expected))
    assert calibration.records_per_segment == 3
    assert (calibration.start, calibration.end) == (0, 2 * DAY)


def test_devices_do_not_mix() -> None:
    devices, times = ["a", "b"] * 3, [0, 0, 1, 1, 2, 2]
    p_values = [0.001, 0.9] * 3
    (calibration,) = calibrate_segments(devices, times, p_values, [0.0] * 6, [DAY])
    assert calibration.num_segments == calibration.num_devices == 2
    assert calibration.log_statistics[0] < 0 < calibration.log_statistics[1]


def test_segments_with_few_records_are_left_out() -> None:
    collector = SegmentCollector(DAY)
    for day, count in enumerate([89, 49, 51, 100, 100, 100, 100, 100, 91]):
        for index in range(count):
            collector.add("pump", day * DAY + index, 0.5, 0.0)
    calibration = collector.calibrate()
    # The first day is incomplete (below 90%), and the second one has less than half of the records.
    assert (calibration.num_segments, calibration.num_left_out) == (7, 2)
    assert calibration.records_per_segment == 100


def test_records_of_an_earlier_segment_count_for_the_last_one_as_in_the_tracker() -> None:
    collector = SegmentCollector(DAY)
    collector.add("pump", DAY, 0.5, 0.0)
    collector.add("pump", 0, 0.0001, 0.0)
    assert collector.calibrate().records_per_segment == 2
    assert collector.calibrate().log_statistics[0] > 0


def test_alerts_of_open_records_count_until_they_close() -> None:
    collector = SegmentCollector(DAY, opens_early=True)
    collector.add("pump", 0, 0.5, 0.0, "a")
    collector.add_alert("pump", 1, 0.001, None, "b")
    collector.add_alert("pump", 2, 0.001, None, "c")
    state = INITIAL_STATE
    for p_value in (0.5, 0.001, 0.001):
        state = advance_detector(state, p_value)
    (statistic,) = collector.calibrate().log_statistics
    assert statistic == compute_log_statistic(state)
    collector.add("pump", 3, 0.001, 0.0, "b")  # b counts once
    collector.add_alert("pump", 4, 0.001, None, "c")
    assert collector.calibrate().log_statistics == (pytest.approx(statistic),)
    assert collector.calibrate().opens_early
    # The open records of a segment do not count for the next one.
    collector.add_alert("pump", DAY, 0.9, None, "d")
    collector.add("pump", DAY + 1, 0.9, 0.0, "d")
    collector.add("pump", DAY + 2, 0.9, 0.0, "e")
    assert collector.calibrate().log_statistics[0] < 0


def test_no_more_open_records_count_than_the_bound() -> None:
    collector = SegmentCollector(DAY, opens_early=True)
    for number in range(MAX_OPEN_ALERTS + 5):
        collector.add_alert("pump", number, 0.1, None, f"r{number}")
    collector.add("pump", 100, 1.0, 0.0, "other")
    state = INITIAL_STATE
    for _ in range(MAX_OPEN_ALERTS):
        state = advance_detector(state, 0.1)
    assert collector.calibrate().log_statistics == (pytest.approx(compute_log_statistic(state)),)


def test_the_tail_raises_the_statistics_of_segments() -> None:
    tail = ScoreTail(10.0, 0.01, 1.0)
    arguments = (["pump"] * 3, [0, 1, 2], [0.01] * 3, [20.0] * 3, [DAY])
    (without,), (with_tail,) = calibrate_segments(*arguments), calibrate_segments(*arguments, tail)
    assert with_tail.log_statistics[0] > without.log_statistics[0] + 10
    assert with_tail.tail == tail


def test_a_calibration_survives_json() -> None:
    tail = ScoreTail(1.0, 0.25, 2.0, ScoreTail(-0.5, 0.2, 1.0))
    calibration = make_calibration([1 / 3, -2.5, 1e-17], tail=tail, group="hall", num_left_out=3)
    assert "early" not in calibration.to_json()
    early = replace(calibration, opens_early=True)
    assert SegmentCalibration.from_json(json.loads(json.dumps(early.to_json()))) == early
    assert SegmentCalibration.from_json(json.loads(json.dumps(calibration.to_json()))) == calibration


FORGERIES: list[dict[str, Any]] = [
    {"length": 0},
    {"length": "long"},
    {"statistics": [2.0, 1.0]},
    {"statistics": [math.nan]},
    {"statistics": [math.inf]},
    {"statistics": None},
    {"records_per_segment": -1.0},
    {"records_per_segment": math.nan},
    {"detector": "other"},
    {"tail": {"start": 1.0, "p": 0.0, "scale": 1.0}},
    {"tail": {"start": 1.0, "p": 0.5, "scale": -1.0}},
    {"tail": {"start": math.nan, "p": 0.5, "scale": 1.0}},
    {"tail": 7},
    {"tail": {"start": 1.0, "p": 0.5, "scale": 1.0, "records": {"start": 1.0, "p": 0.5, "scale": 0.0}}},
]


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_calibration_is_refused(forgery: dict[str, Any]) -> None:
    document = make_calibration([1.0, 2.0]).to_json() | forgery
    with pytest.raises(ValueError):  # noqa: PT011 - the reader of the file adds the path and the remedy
        SegmentCalibration.from_json(document)


def test_a_calibration_without_a_key_is_refused() -> None:
    for key in make_calibration([1.0]).to_json():
        document = make_calibration([1.0]).to_json()
        del document[key]
        with pytest.raises(ValueError, match="incomplete"):
            SegmentCalibration.from_json(document)


def test_whatever_happens_within_segments_the_share_of_segments_with_an_incident_is_bounded() -> None:
    # Strongly dependent p-values: one level for the whole segment.
    rng = np.random.default_rng(0)
    alpha, num_calibration, num_new = 0.1, 19, 20
    num_opened = 0
    for _ in range(60):
        levels = rng.random(num_calibration + num_new) ** 3
        maxima = []
        for level in levels.tolist():
            state, largest = INITIAL_STATE, -math.inf
            for p_value in np.clip(level * rng.uniform(0.5, 1.0, 30), 1e-3, 1.0).tolist():
                state = advance_detector(state, p_value)
                largest = max(largest, compute_log_statistic(state))
            maxima.append(largest)
        threshold = make_calibration(maxima[:num_calibration]).compute_log_threshold(alpha)
        num_opened += sum(maximum > threshold for maximum in maxima[num_calibration:])
    assert 0.05 < num_opened / (60 * num_new) < 0.15
