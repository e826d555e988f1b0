"""Clocks of the pipeline, the schedule of commits, and a rate limit for load generators."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from deformer_stream.codec.payloads import Payload
from deformer_stream.engine.events import NO_TIME, Effects
from deformer_stream.runtime.ports import Sink

Item = TypeVar("Item")

MIN_STEP_MICROS = 1_000_000
"""Smallest difference from the system clock that is a step, in microseconds."""


def read_elapsed_time() -> int:
    """Return microseconds since an unknown moment: they include times of suspension, if the system can count them.

    Steps of the system clock do not change them.
    """
    if hasattr(time, "CLOCK_BOOTTIME"):  # Linux
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
    return time.monotonic_ns() // 1000


class WallClock:
    """A clock of a live stream, in microseconds since 1970: the system's time at its start, and the time since then.

    It never runs backwards, and does not follow steps of the system clock. Otherwise a step forward, such as that of a
    device that learns the time after its start, would time all open records out, and none would time out for long after
    a step back. `to_system_time` converts its times for people and other processes.
    """

    def __init__(self) -> None:
        self._offset = time.time_ns() // 1000 - read_elapsed_time()

    def at(self, times: NDArray[np.int64]) -> int:
        """Return the present time in microseconds since 1970. The event times of a batch (`times`) are ignored."""
        return self._offset + read_elapsed_time()

    def to_system_time(self, effects: Effects) -> Effects:
        """Return effects with times of the system clock, microseconds since 1970, in place of times of this clock.

        These are the ends of the statements about suspicious records, and the times of notices that alerts were held
        back. All others are event times.
        """
        if not effects.suspicious_records and not effects.storm_notices:
            return effects
        step = time.time_ns() // 1000 - self.at(effects.batch.times)
        if abs(step) < MIN_STEP_MICROS:
            return effects
        return replace(
            effects,
            suspicious_records=[
                record if record.expires is None else replace(record, expires=record.expires + step)
                for record in effects.suspicious_records
            ],
            storm_notices=[replace(notice, time=notice.time + step) for notice in effects.storm_notices],
        )


class SystemTimeSink:
    """A sink that passes effects on with times of the system clock in place of those of the pipeline's clock.

    Args:
        sink: The sink that gets them.
        clock: The clock of the pipeline.
    """

    def __init__(self, sink: Sink, clock: WallClock) -> None:
        self._sink, self._clock = sink, clock

    def write(self, effects: Effects, data: Payload | None) -> None:
        """Pass the effects of one batch on."""
        self._sink.write(self._clock.to_system_time(effects), data)

    def flush(self) -> None:
        """Make everything durable that was written."""
        self._sink.flush()

    def close(self) -> None:
        """Release the sink's resources."""
        self._sink.close()


class EventClock:
    """A clock that shows the latest event time so far, in microseconds since 1970, and 0 before the first event.

    A replay uses it, so that records time out as they would have done when the events were recorded.
    """

    def __init__(self) -> None:
        self._now = 0

    def at(self, times: NDArray[np.int64]) -> int:
        """Return the latest event time so far, including the next batch, in microseconds since 1970.

        Args:
            times: (N,) the event times of the next batch, in microseconds since 1970 or `NO_TIME`.
        """
        known_times = times[times != NO_TIME]
        if len(known_times):
            self._now = max(self._now, int(known_times.max()))
        return self._now


class CommitSchedule:
    """A schedule of commits: at regular intervals, and at once for an alert, which becomes visible with its commit.

    If the pipeline is behind (more messages are unread than one poll returns), throughput has priority. Commits for
    alerts then take at most a fifth of the time.

    Args:
        interval: Seconds between two commits.
        now: Returns monotonic seconds.

    Attributes:
        is_urgent: Whether an alert waits for the next commit.
    """

    def __init__(self, interval: float, now: Callable[[], float] = time.monotonic) -> None:
        self._interval, self._now = interval, now
        self._last_end, self._last_duration = now(), 0.0
        self.is_urgent = False

    def is_due(self, has_alert: bool, is_behind: Callable[[], bool]) -> bool:
        """Return whether to commit now.

        Args:
            has_alert: Whether an alert was raised since the last call.
            is_behind: Returns whether more messages are unread than one poll returns. It is called only if the result
                depends on it.
        """
        self.is_urgent = has_alert or self.is_urgent
        elapsed = self._now() - self._last_end
        if elapsed >= self._interval:
            return True
        # If the pipeline is behind, a commit of duration d follows 4d without a commit, so that commits take at most a
        # fifth of the time.
        return self.is_urgent and (elapsed >= 4 * self._last_duration or not is_behind())

    @contextmanager
    def time_commit(self) -> Iterator[None]:
        """Measure how long the commit inside the context takes.

        The commit makes all alerts visible, so `is_urgent` is False afterwards.
        """
        start = self._now()
        yield
        self._last_end = self._now()
        self._last_duration, self.is_urgent = self._last_end - start, False


def limit_rate(
    items: Iterable[Item], rate: float | None, before_wait: Callable[[], object] = lambda: None
) -> Iterator[Item]:
    """Yield items at a steady rate.

    Item i is due i / rate seconds after the start. An item that is yielded late does not delay the items after it. Each
    item is requested from the iterable only after the previous one was consumed.

    Args:
        items: The items.
        rate: Items per second, or None for no limit.
        before_wait: Called before each wait, for example to flush a buffer.
    """
    start = time.monotonic()
    for i, item in enumerate(items):
        if rate is not None:
            wait_seconds = start + i / rate - time.monotonic()
            if wait_seconds > 0:
                before_wait()
                time.sleep(wait_seconds)
        yield item
