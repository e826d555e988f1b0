"""Times of events: epoch seconds and RFC 3339 text ↔ microseconds since 1970, and how far ahead they may lie."""

from __future__ import annotations

import re
import time as clock
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from deformer_stream.codec.validation import Refusal, brief
from deformer_stream.engine.events import NO_TIME, RejectionReason

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FIRST_SECOND, LAST_SECOND = -62_135_596_800, 253_402_300_799
"""Times lie in the years 1 to 9999, which every format we write can express. Milliseconds taken for seconds fall
outside."""

_MICROSECOND, _SECOND = timedelta(microseconds=1), timedelta(seconds=1)
_FINER = (("milliseconds", 1e3), ("microseconds", 1e6), ("nanoseconds", 1e9))
_YEAR_2100 = 4_102_444_800
_LEAP_SECOND = re.compile(r"(.{10}[T ]\d\d:\d\d:)60((?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d))", re.ASCII)

_CLOCK = re.compile(r"([01]\d|2[0-3]):([0-5]\d)(?::([0-5]\d(?:\.\d{1,9})?))?", re.ASCII)


def rfc3339(micros: int) -> str | None:
    """Microseconds since 1970 as RFC 3339 text in UTC, with a fraction only where there is one; None for no time."""
    if not FIRST_SECOND * 1_000_000 <= micros <= LAST_SECOND * 1_000_000:
        return None
    return (EPOCH + timedelta(microseconds=micros)).isoformat().replace("+00:00", "Z")


def micros(seconds: float) -> int:
    """Epoch seconds to microseconds. Raises `Refusal`."""
    if not isfinite(seconds):
        raise Refusal(RejectionReason.NOT_FINITE, "time is not finite")
    if not FIRST_SECOND <= seconds <= LAST_SECOND:
        raise Refusal(RejectionReason.WRONG_TYPE, f"time {seconds!r} {_outside(seconds)}")
    return round(seconds * 1e6)


def _outside(seconds: float) -> str:
    likely = next((f", these look like {unit}" for unit, n in _FINER if 0 < seconds / n <= _YEAR_2100), "")
    return f"lies outside the years 1 to 9999; send seconds since 1970{likely}"


def micros_of_text(text: str) -> int:
    """RFC 3339 text to microseconds; a leap second counts as the second after it, as in POSIX. Raises `Refusal`."""
    try:
        moment = _moment(text.upper())
    except (ValueError, OverflowError):
        raise Refusal(RejectionReason.WRONG_TYPE, f"time {brief(text)} is not RFC 3339, such as 2020-03-09T10:34:33Z") from None
    if moment.tzinfo is None:
        raise Refusal(RejectionReason.WRONG_TYPE, f"time {brief(text)} has no offset; end it with Z or +hh:mm")
    time = (moment - EPOCH) // _MICROSECOND
    if not FIRST_SECOND * 1_000_000 <= time <= LAST_SECOND * 1_000_000:
        raise Refusal(RejectionReason.WRONG_TYPE, f"time {brief(text)} lies outside the years 1 to 9999")
    return time


def _moment(text: str) -> datetime:
    """Raises ValueError or OverflowError."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        leap = _LEAP_SECOND.fullmatch(text)
        if leap is None:
            raise
    after = datetime.fromisoformat(f"{leap[1]}59{leap[2]}") + _SECOND
    if (after - EPOCH) % timedelta(days=1) >= _SECOND:
        raise ValueError("leap seconds are the last of a day")
    return after


def seconds_of_day(text: str) -> float | None:
    """`HH:MM`, `HH:MM:SS` or with a fraction → seconds since midnight; None for any other text."""
    found = _CLOCK.fullmatch(text)
    return None if found is None else 3600.0 * int(found[1]) + 60.0 * int(found[2]) + float(found[3] or 0)


def sane(times: NDArray[np.int64]) -> NDArray[np.int64]:
    """(N,) the broker's times without those that no calendar can express: they come from producers' clocks."""
    within = (times >= FIRST_SECOND * 1_000_000) & (times <= LAST_SECOND * 1_000_000)
    return np.where(within, times, NO_TIME)


@dataclass(frozen=True, slots=True)
class MaxAhead:
    """How far an event's own time may lie ahead of the broker's time of its message, or of the wall clock where there
    is none. The broker's comes first, so that a message which is read again meets the same fate.

    micros: at least 0.
    """

    micros: int

    def references(self, broker: NDArray[np.int64]) -> NDArray[np.int64]:
        """(N,) what each of N events' own times are held against, microseconds."""
        return np.where(broker == NO_TIME, clock.time_ns() // 1000, broker)

    def check(self, time: int, broker: int) -> None:
        """time: the event's own; broker: of its message, or `NO_TIME`. Raises `Refusal`."""
        reference = clock.time_ns() // 1000 if broker == NO_TIME else broker
        if time - reference > self.micros:
            detail = f"time {rfc3339(time)} lies more than {self.micros / 1e6:g} s ahead of {rfc3339(reference)}"
            raise Refusal(RejectionReason.FUTURE, f"{detail}, when it came")
