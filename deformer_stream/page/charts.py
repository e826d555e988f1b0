"""The geometry of the charts of an incident, which `templates/charts.html` draws as SVG.

Positions are percentages of the plot area, from the left and from the top, so that a chart fits any width while its
text keeps its size. Paths have coordinates from 0 to 1000 in both directions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from deformer_stream.durations import MICROS_PER_DAY, MICROS_PER_HOUR, MICROS_PER_MINUTE, MICROS_PER_SECOND
from deformer_stream.incidents.events import Incident, SuspectReadings, Timeline
from deformer_stream.incidents.series import MAX_TIMELINE_POINTS
from deformer_stream.page.texts import Clock, describe_readings, format_evidence
from deformer_stream.report.pages import format_number

MIN_TICK_DIGITS, MAX_TICK_DIGITS = 3, 9
"""Smallest and largest number of significant digits of a number at an axis."""
PATH_SIZE = 1000
"""Width and height of the coordinates of paths."""
MAX_READING_MARKS = MAX_TIMELINE_POINTS
"""Maximum number of readings that a chart shows, whatever the message of an incident contains.

If a message has more, all n-th readings are shown, and the last one. The evidence has at most `MAX_TIMELINE_POINTS`
points: of neighbouring points, the one with the largest evidence is shown, and the last point always.
"""
MAX_TICKS, MAX_TICKS_OF_READINGS = 4, 3
"""Maximum number of intervals between ticks, so that their texts fit on a phone. Charts of readings are narrower."""
MIN_TICK_DISTANCE = 22.0
"""Smallest distance of the texts of two ticks of time, in per cent of the width."""

_TIME_STEPS = (
    *(n * MICROS_PER_SECOND for n in (1, 2, 5, 10, 15, 30)),
    *(n * MICROS_PER_MINUTE for n in (1, 2, 5, 10, 15, 30)),
    *(n * MICROS_PER_HOUR for n in (1, 2, 3, 6, 12)),
    *(n * MICROS_PER_DAY for n in (1, 2, 7, 14, 28, 91, 365, 3650)),
)


@dataclass(frozen=True, slots=True)
class Tick:
    """A tick of an axis: its position in per cent of the plot area, and its text."""

    position: float
    text: str

    @property
    def anchor(self) -> str:
        """Which part of the text of a time is at the position, so that the text stays within the chart."""
        return "start" if self.position < 8 else "end" if self.position > 92 else "middle"


@dataclass(frozen=True, slots=True)
class TimelineChart:
    """The evidence of an incident over time.

    Attributes:
        line: SVG path of the evidence.
        area: SVG path of the area between the evidence and the lower end of the plot.
        threshold: Position of the threshold from the top.
        last: Position of the last point, from the left and from the top.
        time_ticks: Ticks of the axis of time.
        ticks: Ticks of the axis of evidence.
        description: What the chart shows, for people who do not see it.
    """

    line: str
    area: str
    threshold: float
    last: tuple[float, float]
    time_ticks: tuple[Tick, ...]
    ticks: tuple[Tick, ...]
    description: str


@dataclass(frozen=True, slots=True)
class ReadingMark:
    """A reading of a suspect.

    Attributes:
        left: Position of the reading from the left.
        top: Position of its value from the top.
        band: Positions of the upper and the lower end of the expected range from the top, None if it is unknown.
        is_outside: Whether the value lies outside the expected range.
        text: Time, value and expected range.
    """

    left: float
    top: float
    band: tuple[float, float] | None
    is_outside: bool
    text: str


@dataclass(frozen=True, slots=True)
class ReadingsChart:
    """The readings of a suspect over time, each with the range that was expected.

    Attributes:
        marks: The readings.
        time_ticks: Ticks of the axis of time.
        ticks: Ticks of the axis of values.
        description: What the chart shows, for people who do not see it.
    """

    marks: tuple[ReadingMark, ...]
    time_ticks: tuple[Tick, ...]
    ticks: tuple[Tick, ...]
    description: str


@dataclass(frozen=True, slots=True)
class _Scale:
    """A linear scale from values to positions in per cent."""

    low: float
    high: float

    def place(self, value: float) -> float:
        """Return the position of a value from the lower end of the scale, from 0 to 100."""
        return round(min(max(100 * (value - self.low) / (self.high - self.low), 0), 100), 2)

    def place_from_top(self, value: float) -> float:
        """Return the position of a value from the upper end of the scale, from 0 to 100."""
        return round(100 - self.place(value), 2)


def draw_timeline(incident: Incident, clock: Clock) -> TimelineChart | None:
    """Return the chart of the evidence of an incident; None without points."""
    points = _select_finite(incident.timeline)
    if not points or not math.isfinite(incident.threshold):
        return None
    values = [evidence for _, evidence in points]
    # The scale starts at 0, where there is no evidence, and has room for the threshold and its text.
    scale = _make_scale([0.0, *values, incident.threshold * 1.15])
    times = _make_time_scale([time for time, _ in points])
    if scale is None:
        return None
    places = [(times.place(time), scale.place_from_top(max(value, 0.0))) for time, value in points]
    line = _draw_path(places)
    return TimelineChart(
        line=line,
        area=f"{line}V{PATH_SIZE}H{_to_path(places[0][0])}Z",
        threshold=scale.place_from_top(incident.threshold),
        last=places[-1],
        time_ticks=_choose_time_ticks(times, clock),
        ticks=_choose_ticks(scale),
        description=f"Evidence from {clock.format_time(points[0][0])} to {clock.format_time(points[-1][0])}: "
        f"largest {format_evidence(max(values))}, last {format_evidence(values[-1])}, "
        f"threshold {format_evidence(incident.threshold)}.",
    )


def draw_sparkline(timeline: Timeline, threshold: float) -> tuple[str, float] | None:
    """Return the SVG path of the evidence and the position of the threshold from the top in per cent.

    None if there are fewer than two points.
    """
    points = _select_finite(timeline)
    scale = _make_scale([0.0, threshold, *(evidence for _, evidence in points)])
    if len(points) < 2 or scale is None or not math.isfinite(threshold):
        return None
    times = _make_time_scale([time for time, _ in points])
    line = _draw_path([(times.place(time), scale.place_from_top(max(value, 0.0))) for time, value in points])
    return line, scale.place_from_top(threshold)


def draw_readings(
    feature: str,
    readings: SuspectReadings,
    unit: str | None,
    clock: Clock,
    span: Sequence[int] = (),
) -> ReadingsChart | None:
    """Return the chart of the readings of a suspect; None if no reading has a number.

    Args:
        feature: Name of the feature.
        readings: Its readings.
        unit: Unit of its values, None if they have none.
        clock: The time zone of the texts.
        span: Times that the chart includes, so that the charts of an incident have the same axis of time.
    """
    rows = [
        (time, value, low, high)
        for time, value, low, high in zip(readings.times, readings.values, readings.lows, readings.highs, strict=True)
        if value is not None and math.isfinite(value)
    ]
    rows = rows[::-1][:: max(1, -(-len(rows) // MAX_READING_MARKS))][::-1]
    shown = [number for _, value, low, high in rows for number in (value, low, high) if number is not None]
    scale = _make_scale(shown)
    if scale is None:
        return None
    times = _make_time_scale([*(time for time, *_ in rows), *span])
    marks = []
    num_outside = 0
    for time, value, low, high in rows:
        is_known = low is not None and high is not None and math.isfinite(low) and math.isfinite(high)
        band = None
        is_outside = False
        if is_known and low is not None and high is not None:
            band = scale.place_from_top(high), scale.place_from_top(low)
            is_outside = not low <= value <= high
        num_outside += is_outside
        came, expected = describe_readings(value, value, low, high, unit)
        text = f"{clock.format_time(time)}: {came}" + (f", expected {expected}" if band else "")
        marks.append(ReadingMark(times.place(time), scale.place_from_top(value), band, is_outside, text))
    return ReadingsChart(
        marks=tuple(marks),
        time_ticks=_choose_time_ticks(times, clock, MAX_TICKS_OF_READINGS),
        ticks=_choose_ticks(scale),
        description=f"{feature} from {clock.format_time(rows[0][0])} to {clock.format_time(rows[-1][0])}: "
        f"{num_outside} of {len(rows)} readings outside the expected range.",
    )


def _select_finite(timeline: Timeline) -> list[tuple[int, float]]:
    """Return the points of a timeline whose evidence is finite, in order of time; at most `MAX_TIMELINE_POINTS`."""
    pairs = zip(timeline.times, timeline.evidence, strict=True)
    points = sorted((time, evidence) for time, evidence in pairs if math.isfinite(evidence))
    if len(points) <= MAX_TIMELINE_POINTS:
        return points
    stride = -(-(len(points) - 1) // (MAX_TIMELINE_POINTS - 1))
    groups = [points[start : min(start + stride, len(points) - 1)] for start in range(0, len(points) - 1, stride)]
    return [max(group, key=lambda point: point[1]) for group in groups] + points[-1:]


def _make_scale(values: Sequence[float]) -> _Scale | None:
    """Return a scale that includes all values, with a margin; None if that is impossible."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    span = high - low
    if not math.isfinite(span):
        return None
    if span < sys.float_info.min:  # a fraction of it could be 0; integers that were read as float64 are so small
        span = 0.0
    margin = 0.06 * span if span else max(abs(low) * 0.05, 0.5)
    bottom = low if low == 0 else low - margin  # an axis that starts at 0 needs no margin there
    scale = _Scale(bottom, high + margin)
    return scale if math.isfinite(scale.high - scale.low) and scale.high > scale.low else None


def _make_time_scale(times: Sequence[int]) -> _Scale:
    """Return a scale of times. If there is only one time, it is in the middle."""
    first, last = min(times), max(times)
    return _Scale(first, last) if last > first else _Scale(first - MICROS_PER_SECOND, first + MICROS_PER_SECOND)


def _to_path(position: float) -> str:
    """Return a position in per cent as a coordinate of a path."""
    return f"{position * PATH_SIZE / 100:.0f}"


def _draw_path(places: Sequence[tuple[float, float]]) -> str:
    """Return the SVG path through positions in per cent."""
    return "M" + "L".join(f"{_to_path(left)},{_to_path(top)}" for left, top in places)


def _choose_ticks(scale: _Scale) -> tuple[Tick, ...]:
    """Return ticks at round numbers within a scale, at most `MAX_TICKS` + 1."""
    raw_step = (scale.high - scale.low) / MAX_TICKS
    power = 10.0 ** math.floor(math.log10(raw_step))
    step = next((power * factor for factor in (1, 2, 5, 10) if power * factor >= raw_step), power * 10)
    first = math.ceil(scale.low / step - 1e-9)
    last = math.floor(scale.high / step + 1e-9)
    values = [number * step for number in range(first, min(last, first + 2 * MAX_TICKS) + 1)]
    largest = max(map(abs, values), default=0.0)
    # As many digits as the largest number has from its first one to that of the step.
    num_digits = math.floor(math.log10(largest)) - math.floor(math.log10(step) + 1e-9) + 1 if largest else 1
    num_digits = min(max(num_digits, MIN_TICK_DIGITS), MAX_TICK_DIGITS)
    return tuple(Tick(scale.place_from_top(value), format_number(value, num_digits)) for value in values)


def _choose_time_ticks(scale: _Scale, clock: Clock, max_ticks: int = MAX_TICKS) -> tuple[Tick, ...]:
    """Return ticks at round times of the clock's time zone, with at most this many intervals between them."""
    span = scale.high - scale.low
    step = next((step for step in _TIME_STEPS if span / step <= max_ticks), _TIME_STEPS[-1])
    moment = clock.to_datetime(int(scale.low))
    offset = moment.utcoffset() if moment is not None else None
    shift = 0 if offset is None else round(offset.total_seconds()) * MICROS_PER_SECOND  # so that days begin at midnight
    first = -(-(int(scale.low) + shift) // step)
    times = [number * step - shift for number in range(first, first + max_ticks + 1)]
    ticks: list[Tick] = []
    for time in times:
        position = scale.place(time)
        if time <= scale.high and (not ticks or position - ticks[-1].position >= MIN_TICK_DISTANCE):
            ticks.append(Tick(position, _format_tick(time, step, clock)))
    return tuple(ticks)


def _format_tick(time: int, step: int, clock: Clock) -> str:
    """Return the text of a tick: with seconds, as hours and minutes, or as a day, as the distance of ticks requires."""
    moment = clock.to_datetime(time)
    if moment is None:
        return ""
    if step >= MICROS_PER_DAY:
        return f"{moment.day} {moment:%b}"
    return f"{moment:%H:%M:%S}" if step < MICROS_PER_MINUTE else f"{moment:%H:%M}"
