"""A steady rate, on a clock of our own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deformer_stream.runtime import timing
from deformer_stream.runtime.timing import limit_rate


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    return made


def test_every_item_has_its_turn(clock: Clock) -> None:
    idle: list[float] = []
    came = [(item, clock.now) for item in limit_rate("abcd", 4.0, lambda: idle.append(clock.now))]
    assert came == [("a", 100.0), ("b", 100.25), ("c", 100.5), ("d", 100.75)]
    assert idle == [100.0, 100.25, 100.5]


def test_what_comes_late_is_caught_up_with(clock: Clock) -> None:
    def slow() -> Iterator[int]:
        for i in range(5):
            clock.now += 0.7 if i == 1 else 0.0
            yield i

    assert [clock.now for _ in limit_rate(slow(), 4.0)] == pytest.approx([100.0, 100.7, 100.7, 100.75, 101.0])


def test_without_a_rate_nobody_waits(clock: Clock) -> None:
    assert list(limit_rate(range(1000), None)) == list(range(1000))
    assert clock.now == 100.0
