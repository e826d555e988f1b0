"""Tests of the clock of the pipeline and of the rate limit, with a simulated clock."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from deformer_stream.runtime import timing
from deformer_stream.runtime.timing import WallClock, limit_rate


class FakeTime:
    """A replacement for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.system = 1_783_750_073.0

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return round(self.now * 1e9)

    def time_ns(self) -> int:
        return round(self.system * 1e9)

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    made = FakeTime()
    monkeypatch.setattr(timing, "time", made)
    return made


def test_items_are_yielded_at_the_given_rate(clock: FakeTime) -> None:
    idle: list[float] = []
    came = [(item, clock.now) for item in limit_rate("abcd", 4.0, lambda: idle.append(clock.now))]
    assert came == [("a", 100.0), ("b", 100.25), ("c", 100.5), ("d", 100.75)]
    assert idle == [100.0, 100.25, 100.5]


def test_late_item_does_not_delay_the_following_items(clock: FakeTime) -> None:
    def slow() -> Iterator[int]:
        for i in range(5):
            clock.now += 0.7 if i == 1 else 0.0
            yield i

    assert [clock.now for _ in limit_rate(slow(), 4.0)] == pytest.approx([100.0, 100.7, 100.7, 100.75, 101.0])


def test_no_rate_means_no_waiting(clock: FakeTime) -> None:
    assert list(limit_rate(range(1000), None)) == list(range(1000))
    assert clock.now == 100.0


def test_a_system_clock_that_is_set_back_slows_the_wall_clock_and_does_not_stop_it(clock: FakeTime) -> None:
    wall = WallClock()

    def elapse(seconds: float, step: float = 0.0) -> float:
        """Let time pass, set the system clock, and return by how many seconds the wall clock has advanced."""
        before = wall.at(np.zeros(0, np.int64))
        clock.now += seconds
        clock.system += seconds + step
        return (wall.at(np.zeros(0, np.int64)) - before) / 1e6

    assert wall.at(np.zeros(0, np.int64)) == clock.time_ns() // 1000
    assert elapse(10.0) == pytest.approx(10.0)
    assert elapse(10.0, step=60.0) == pytest.approx(70.0)
    assert elapse(0.0, step=-60.0) == 0.0
    assert [elapse(100.0) for _ in range(6)] == pytest.approx([90.0] * 6)
    assert elapse(100.0) == pytest.approx(100.0)  # the system clock has caught up
    assert wall.at(np.zeros(0, np.int64)) == clock.time_ns() // 1000
    elapse(0.0, step=-50 * 365 * 86_400.0)
    assert elapse(100.0) == pytest.approx(90.0)
