"""Tests of the clock of a live stream and of the rate limit, with a simulated clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from deformer_stream.engine.engine import Limits
from deformer_stream.engine.events import NO_TIME, Effects, StormNotice, SuggestedReading, SuspiciousRecord
from deformer_stream.runtime import timing
from deformer_stream.runtime.timing import SystemTimeSink, WallClock, limit_rate
from deformer_stream.testing import MemorySink
from tests.engine.restarts import Event, make_batch, make_engine


class FakeTime:
    """A replacement for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.system = 1_783_750_073.0

    def monotonic(self) -> float:
        return self.now

    CLOCK_BOOTTIME = 7

    def clock_gettime_ns(self, number: int) -> int:
        assert number == self.CLOCK_BOOTTIME
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


NO_TIMES = np.empty(0, np.int64)


@pytest.mark.parametrize("step", [3600.0, -3600.0, 50 * 365 * 86_400.0])
def test_steps_of_the_system_clock_do_not_move_the_clock_of_a_stream(clock: FakeTime, step: float) -> None:
    wall = WallClock()
    start = wall.at(NO_TIMES)
    assert start == clock.time_ns() // 1000
    clock.now += 10.0
    clock.system += 10.0 + step
    assert wall.at(NO_TIMES) - start == pytest.approx(10e6, abs=1)


def test_no_record_times_out_because_of_a_step_of_the_system_clock(clock: FakeTime) -> None:
    wall = WallClock()
    engine = make_engine(Limits(record_timeout=600_000_000))
    opened = make_batch([Event(0, f"record {i}", False, NO_TIME, 0, 1.0) for i in range(3)])
    engine.handle(opened, wall.at(NO_TIMES))
    clock.system += 3600.0
    assert len(engine.handle(make_batch([]), wall.at(NO_TIMES)).closed) == 0
    snapshot = engine.snapshot(0, wall.at(NO_TIMES))
    assert snapshot.idle_micros.tolist() == [0, 0, 0]  # what is saved is how long records were idle, for any clock
    clock.now += 600.0
    assert len(engine.handle(make_batch([]), wall.at(NO_TIMES)).closed) == 3


def test_times_for_people_are_those_of_the_system_clock(clock: FakeTime) -> None:
    wall, memory = WallClock(), MemorySink()
    sink = SystemTimeSink(memory, wall)
    suggestion = SuggestedReading("pressure", 0.01, 0.5, 1.0)
    record = SuspiciousRecord("r", 0, NO_TIME, 0.1, 1, 2, suggestion, wall.at(NO_TIMES) + 30_000_000, "m")
    endless = replace(record, expires=None)
    notice = StormNotice("s", 0, wall.at(NO_TIMES), {0: 1}, ("r",), 1.0, "m")
    effects = replace(Effects.empty("m"), suspicious_records=[record, endless], storm_notices=[notice])
    sink.write(effects, None)
    assert memory.effects[-1] is effects
    clock.system -= 3600.0
    sink.write(effects, None)
    sent = memory.effects[-1]
    now = clock.time_ns() // 1000
    assert [one.expires for one in sent.suspicious_records] == [now + 30_000_000, None]
    assert [one.time for one in sent.storm_notices] == [now]
    sink.flush()
    sink.close()
    assert (memory.flushed, memory.closed) == (2, True)
