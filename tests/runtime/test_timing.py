"""Tests of the rate limit, with a simulated clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deformer_stream.runtime import timing
from deformer_stream.runtime.timing import limit_rate


class FakeTime:
    """A replacement for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

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
