"""The geometry of charts, and the texts of times and ranges."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.durations import (
    MICROS_PER_DAY,
    MICROS_PER_HOUR,
    MICROS_PER_MINUTE,
    MICROS_PER_SECOND,
)
from deformer_stream.incidents.events import SuspectReadings, Timeline
from deformer_stream.incidents.series import MAX_TIMELINE_POINTS
from deformer_stream.page.charts import (
    MAX_READING_MARKS,
    MAX_TICKS,
    draw_readings,
    draw_sparkline,
    draw_timeline,
)
from deformer_stream.page.texts import (
    Clock,
    count_outside,
    describe_cap,
    describe_readings,
    describe_silencing,
    describe_suspect,
)
from tests.incidents.examples import make_incident
from tests.page.pages import NOW

CLOCK = Clock(NOW, ZoneInfo("Europe/Berlin"))
ANY_TIME = st.integers(-(2**63), 2**63 - 1)
ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True)


def test_times_are_shown_in_the_zone_of_the_page() -> None:
    assert CLOCK.format_time(NOW) == "08:07:53"
    assert CLOCK.format_time(NOW - MICROS_PER_DAY) == "10 Jul 08:07"
    assert CLOCK.format_time(NOW - 365 * MICROS_PER_DAY) == "11 Jul 2025 08:07"
    assert CLOCK.format_full(NOW) == "2026-07-11 08:07:53 CEST"
    assert CLOCK.format_full(NOW - 180 * MICROS_PER_DAY) == "2026-01-12 07:07:53 CET"
    assert CLOCK.format_ago(NOW - 12 * MICROS_PER_MINUTE) == "12 min ago"
    assert CLOCK.format_ago(NOW + 2 * MICROS_PER_HOUR) == "in 2 h"
    assert CLOCK.format_ago(NOW - MICROS_PER_SECOND) == "just now"
    assert (CLOCK.format_time(None), CLOCK.format_time(-(2**63)), CLOCK.format_ago(2**63 - 1)) == ("–", "–", "–")


def test_ticks_of_a_narrow_range_have_different_texts() -> None:
    readings = SuspectReadings((1, 2), (49.97, 50.0), (49.98, 49.98), (50.02, 50.02))
    chart = draw_readings("frequency", readings, "Hz", CLOCK)
    assert chart is not None
    assert [tick.text for tick in chart.ticks] == ["49.98", "50", "50.02"]
    assert chart.marks[0].text.endswith(": 49.97 Hz, expected 49.98 … 50.02")


def test_ranges_and_causes() -> None:
    assert describe_readings(119.0, 127.0, None, 1.0, "m³/h") == ("119 … 127 m³/h", "")
    assert describe_readings(63.2, 63.2, 60.0, 70.0, None) == ("63.2", "60 … 70")
    assert describe_readings(-12.5, -12.5, -20.0, -14.0, "m-1") == ("−12.5 m-1", "−20 … −14")
    assert describe_readings(None, 1.0, 60.0, 70.0, None) == ("", "60 … 70")
    incident = make_incident(3)
    assert describe_suspect(incident, incident.suspects[0]) == "came 32.2 m³/h, expected 119 … 127"
    without = replace(incident, readings={})
    # Most readings are too low, so that the text does not show the last one, which is too high.
    feature = incident.suspects[0].feature
    readings = SuspectReadings((1, 2, 3), (10.0, 11.0, 68.1), (37.0,) * 3, (55.4,) * 3)
    mixed = replace(incident, readings={feature: readings})
    assert describe_suspect(mixed, incident.suspects[0]) == "came 11 m³/h, expected 37 … 55"
    assert count_outside(readings) == "1 too high and 2 too low of 3"
    hertz = SuspectReadings((1,), (49.97,), (49.98,), (50.02,))
    narrow = replace(incident, readings={feature: hertz})
    assert describe_suspect(narrow, incident.suspects[0]) == "came 49.97 m³/h, expected 49.98 … 50.02"
    assert describe_suspect(without, incident.suspects[0]) == "came 31.9 … 33.2 m³/h, expected 119 … 127"
    assert describe_suspect(incident, incident.suspects[2]) == ""
    assert count_outside(incident.readings["flow"]) == "60 too low of 60"
    assert count_outside(None) == ""
    assert describe_silencing(incident) == (
        "With the expected value of flow, 93% of the alerts would not have been raised."
    )


def test_the_timeline_shows_the_evidence_against_the_threshold() -> None:
    incident = make_incident(4)  # from 6.5 to 36.375, the threshold is 6.4
    chart = draw_timeline(incident, CLOCK)
    assert chart is not None
    points = [tuple(map(float, pair.split(","))) for pair in re.findall(r"[\d.]+,[\d.]+", chart.line)]
    assert len(points) == 240
    assert [left for left, _ in points] == sorted(left for left, _ in points)
    assert points[0][0] == 0
    assert points[-1][0] == 1000
    assert points[0][1] == pytest.approx(10 * chart.threshold, abs=10)  # just above the threshold
    assert points[0][1] < 10 * chart.threshold
    assert points[-1][1] < points[0][1]  # evidence grows upwards
    assert "threshold 6.4" in chart.description


def test_readings_are_marked_as_outside_or_within_their_expected_range() -> None:
    readings = SuspectReadings(
        (NOW, NOW + MICROS_PER_SECOND, NOW + 2 * MICROS_PER_SECOND), (5.0, 1.0, None), (4.0, 4.0, 4.0), (6.0, 6.0, None)
    )
    chart = draw_readings("flow", readings, "m³/h", CLOCK)
    assert chart is not None
    assert [mark.is_outside for mark in chart.marks] == [False, True]
    inside, outside = chart.marks
    assert inside.band is not None
    assert inside.band[0] < inside.top < inside.band[1]  # from the top: the upper end comes first
    assert outside.band is not None
    assert outside.top > outside.band[1]
    assert outside.text == "08:07:54: 1 m³/h, expected 4 … 6"
    assert "1 of 2 readings outside" in chart.description


@pytest.mark.parametrize("largest", [5e-324, 1e-323, 1e-310, 2.3e-308])
def test_readings_near_the_smallest_number_are_shown(largest: float) -> None:
    """An integer that a device sends as if it were float64 is such a number."""
    readings = SuspectReadings((NOW, NOW + MICROS_PER_SECOND), (0.0, largest), (None, 4.0), (None, 6.0))
    for shown in (readings, replace(readings, lows=(None, None), highs=(None, None))):
        chart = draw_readings("flow", shown, None, CLOCK)
        assert chart is not None
        assert len(chart.marks) == 2
        assert chart.ticks


def test_labels_have_no_chart() -> None:
    readings = SuspectReadings((NOW,), (None,), (None,), (None,))
    assert draw_readings("mode", readings, None, CLOCK) is None


@given(st.lists(st.tuples(ANY_TIME, ANY_FLOAT), max_size=8), ANY_FLOAT)
def test_any_timeline_gives_a_chart_within_its_frame_or_none(points: list[tuple[int, float]], threshold: float) -> None:
    incident = make_incident(1)
    timeline = Timeline(tuple(t for t, _ in points), tuple(e for _, e in points), (0.1,) * len(points))
    chart = draw_timeline(replace(incident, timeline=timeline, threshold=threshold), CLOCK)
    spark = draw_sparkline(timeline, threshold)
    for line in (chart.line if chart else "", spark[0] if spark else ""):
        assert all(0 <= float(number) <= 1000 for number in re.findall(r"-?\d+(?:\.\d+)?", line))
        assert "nan" not in line
    if chart is not None:
        assert 0 <= chart.threshold <= 100
        assert len(chart.time_ticks) <= MAX_TICKS + 1
        assert all(0 <= tick.position <= 100 for tick in (*chart.ticks, *chart.time_ticks))


@given(st.lists(st.tuples(ANY_TIME, ANY_FLOAT, ANY_FLOAT, ANY_FLOAT), max_size=6))
def test_any_readings_give_marks_within_the_frame_or_no_chart(rows: list[tuple[int, float, float, float]]) -> None:
    columns = [tuple(column) for column in zip(*rows, strict=True)] or [(), (), (), ()]
    chart = draw_readings("flow", SuspectReadings(*columns), None, CLOCK)
    for mark in chart.marks if chart is not None else ():
        positions = (mark.left, mark.top, *(mark.band or ()))
        assert all(0 <= position <= 100 and math.isfinite(position) for position in positions)


def test_charts_have_a_bounded_number_of_points_whatever_the_message_contains() -> None:
    times = tuple(range(0, 50_000 * 1_000_000, 1_000_000))
    evidence = [7.0] * 50_000
    evidence[31_234] = 40.0
    evidence[-1] = 9.0
    incident = replace(make_incident(3), timeline=Timeline(times, tuple(evidence), (0.5,) * 50_000))
    chart = draw_timeline(incident, CLOCK)
    assert chart is not None
    assert chart.line.count("L") + 1 <= MAX_TIMELINE_POINTS
    assert "largest 40.0, last 9.0" in chart.description
    readings = SuspectReadings(times, tuple(map(float, times)), (None,) * 50_000, (None,) * 50_000)
    marks = draw_readings("flow", readings, None, CLOCK)
    assert marks is not None
    assert len(marks.marks) <= MAX_READING_MARKS
    assert marks.marks[-1].left == 100.0


def test_evidence_beyond_the_chart_is_stated() -> None:
    incident = replace(make_incident(3), evidence=55.0, threshold=6.0)
    times = incident.timeline.times
    clamped = replace(incident, timeline=replace(incident.timeline, evidence=(7.3,) * len(times)))
    assert "1.3 above the threshold" in describe_cap(clamped)
    assert "55.0" in describe_cap(clamped)
    assert describe_cap(replace(clamped, evidence=7.3)) == ""
