"""Series of an incident with a bounded number of points, however long the incident lasts.

Points are thinned deterministically: if a series is full, neighbouring points are merged, and from then on each point
stands for twice as many records. The fields are lists of numbers, so that the state can be stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from deformer_stream.calibration.incident_evidence import LN_10
from deformer_stream.durations import MICROS_PER_MINUTE
from deformer_stream.incidents.events import SuspectReadings, Timeline

MAX_TIMELINE_POINTS = 240
"""Largest number of points of the evidence of an incident over time."""

MAX_READINGS = 120
"""Largest number of readings of a suspect in an incident."""

MAX_RESOLVED_POINTS = 60
"""Largest number of points of each series of a resolved incident."""


def to_log10(log_value: float) -> float:
    """Return log10 of a number whose natural logarithm is given, with 4 decimals and within the range of JSON."""
    return round(max(min(log_value / LN_10, 1e9), -1e9), 4)


def compute_message_interval(age: int) -> int:
    """Return the time between two messages about an open incident: a minute, and more if it is open for long.

    Args:
        age: Time since the opening, in microseconds.
    """
    return max(MICROS_PER_MINUTE, age // 100)


@dataclass(slots=True)
class TimelineSeries:
    """The evidence over time. A point has the largest evidence and the smallest p-value of its records.

    Attributes:
        times: Event time of the last record of each point.
        evidence: log10 of the detector's statistic.
        p_values: p-values.
        stride: Number of records of a point.
        num_in_last: Number of records of the last point so far.
    """

    times: list[int] = field(default_factory=list)
    evidence: list[float] = field(default_factory=list)
    p_values: list[float] = field(default_factory=list)
    stride: int = 1
    num_in_last: int = 0

    def add(self, time: int, evidence: float, p_value: float) -> None:
        """Add a record."""
        if self.times and self.num_in_last < self.stride:
            self.times[-1] = time
            self.evidence[-1] = max(self.evidence[-1], evidence)
            self.p_values[-1] = min(self.p_values[-1], p_value)
            self.num_in_last += 1
            return
        if len(self.times) >= MAX_TIMELINE_POINTS:
            self._merge_neighbours()
        self.times.append(time)
        self.evidence.append(evidence)
        self.p_values.append(p_value)
        self.num_in_last = 1

    def shorten(self, num_points: int) -> None:
        """Merge neighbours until there are at most this number of points."""
        while len(self.times) > num_points:
            self._merge_neighbours()

    def _merge_neighbours(self) -> None:
        """Merge each point with an even index and the one after it."""
        if len(self.times) % 2 == 0:
            self.num_in_last += self.stride  # otherwise the last point has no partner, and can take further records
        ends = range(0, len(self.times), 2)
        self.times = [self.times[min(i + 1, len(self.times) - 1)] for i in ends]
        self.evidence = [max(self.evidence[i : i + 2]) for i in ends]
        self.p_values = [min(self.p_values[i : i + 2]) for i in ends]
        self.stride *= 2

    def to_timeline(self) -> Timeline:
        """Return the series as part of an incident."""
        return Timeline(tuple(self.times), tuple(self.evidence), tuple(self.p_values))


@dataclass(slots=True)
class ReadingSeries:
    """The readings of a suspect in alerts. Of each `stride` successive readings, the first one is kept.

    Attributes:
        times: Event time of each alert.
        values: Value of each reading, None for labels.
        lows: Lower end of each expected range, None for labels.
        highs: Upper end of each expected range, None for labels.
        stride: Number of successive readings of which one is kept.
        num_skipped: Number of readings since the last one that was kept.
    """

    times: list[int] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)
    lows: list[float | None] = field(default_factory=list)
    highs: list[float | None] = field(default_factory=list)
    stride: int = 1
    num_skipped: int = 0

    def add(self, time: int, value: float | None, low: float | None, high: float | None) -> None:
        """Add a reading."""
        if self.times and self.num_skipped + 1 < self.stride:
            self.num_skipped += 1
            return
        if len(self.times) >= MAX_READINGS:
            self.shorten(MAX_READINGS // 2)
        self.times.append(time)
        self.values.append(value)
        self.lows.append(low)
        self.highs.append(high)
        self.num_skipped = 0

    def shorten(self, num_points: int) -> None:
        """Drop every second reading until there are at most this number."""
        while len(self.times) > num_points:
            self.times, self.values = self.times[::2], self.values[::2]
            self.lows, self.highs = self.lows[::2], self.highs[::2]
            self.stride *= 2

    def compute_expected_range(self) -> tuple[float | None, float | None]:
        """Return the medians of the lower and of the upper ends of the expected ranges, None if there are none."""
        lows = [low for low in self.lows if low is not None]
        highs = [high for high in self.highs if high is not None]
        return (median(lows) if lows else None), (median(highs) if highs else None)

    def to_readings(self) -> SuspectReadings:
        """Return the series as part of an incident."""
        return SuspectReadings(tuple(self.times), tuple(self.values), tuple(self.lows), tuple(self.highs))
