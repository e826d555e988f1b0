"""Conversion of event times, and the limit on times in the future.

Events state their time as seconds since 1970 or as RFC 3339 text. Inside the program a time is an integer: microseconds
since 1970-01-01T00:00:00Z.
"""

from __future__ import annotations

import re
import time as clock
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from math import isfinite
from zoneinfo import ZoneInfo

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deformer_stream.codec.validation import RejectionError, quote
from deformer_stream.durations import UNITS_PER_SECOND, TimeUnit
from deformer_stream.engine.events import NO_TIME, RejectionReason
from deformer_stream.errors import ConfigError

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MIN_SECOND, MAX_SECOND = -62_135_596_800, 253_402_300_799
"""First and last second of the years 1 to 9999, in seconds since 1970. Every output format can express these years. A
present time that was sent in milliseconds lies outside, so it is rejected instead of read as seconds."""
MIN_MICROS, MAX_MICROS = MIN_SECOND * 1_000_000, MAX_SECOND * 1_000_000
"""The same two times in microseconds since 1970. Both are accepted."""

_MICROSECOND, _SECOND, _DAY = timedelta(microseconds=1), timedelta(seconds=1), timedelta(days=1)
_NAME_BY_FINER_UNIT: dict[TimeUnit, str] = {"ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_YEAR_2100 = 4_102_444_800
_LEAP_SECOND = re.compile(r"(.{10}[T ]\d\d:\d\d:)60((?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d))", re.ASCII)
_CLOCK = (
    r"(?:[T ]\s*(?P<clock>\d\d?:\d\d(?::\d\d(?:[.,]\d{1,9})?)?))?"  # the time of day after a date; midnight without it
)
_LOCAL_TIMES = tuple(
    re.compile(pattern + _CLOCK, re.ASCII | re.IGNORECASE)
    for pattern in (
        r"(?P<year>\d{4})([-/.])(?P<month>\d\d?)\2(?P<day>\d\d?)",
        r"(?P<day>\d\d?)\.(?P<month>\d\d?)\.(?P<year>\d{4})",
        r"(?P<day>\d\d?)([- ])(?P<month>[a-z]{3})\2(?P<year>\d{4}|\d\d)",
    )
)
"""Dates and times without a zone in which the order of day and month is certain. Dates such as 12/31/2025 are not among
them, because 05/06/2025 could be in May or in June."""
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_TIME_OF_DAY = re.compile(r"([01]\d|2[0-3]):([0-5]\d)(?::([0-5]\d(?:\.\d{1,9})?))?", re.ASCII)


def format_rfc3339(micros: int) -> str | None:
    """Return microseconds since 1970 as RFC 3339 text in UTC, or None outside the years 1 to 9999.

    A fraction of a second is written only if there is one. `NO_TIME` (no time is known) lies outside these years, so it
    gives None.
    """
    if not MIN_MICROS <= micros <= MAX_MICROS:
        return None
    return (EPOCH + timedelta(microseconds=micros)).isoformat().replace("+00:00", "Z")


def number_to_micros(number: float, unit: TimeUnit = "s") -> int:
    """Return a number that counts from 1970 as microseconds since 1970, rounded.

    Args:
        number: The time.
        unit: Its unit.

    Raises:
        RejectionError: If the time is not finite, or lies outside the years 1 to 9999.
    """
    seconds = number / UNITS_PER_SECOND[unit]
    if not isfinite(seconds):
        raise RejectionError(
            RejectionReason.NOT_FINITE, f"the time is not finite ({number}); send a number of seconds since 1970"
        )
    if MIN_SECOND <= seconds <= MAX_SECOND:
        return round(seconds * 1e6)
    if unit != "s":
        remedy = f" in {_NAME_BY_FINER_UNIT[unit]}; send such a time, or correct --time-unit"
    elif (finer := _guess_finer_unit(number)) is not None:
        name = _NAME_BY_FINER_UNIT[finer]
        remedy = f"; send seconds since 1970, or set --time-unit {finer} if all times are {name}"
    else:
        remedy = "; send seconds since 1970"
    raise RejectionError(RejectionReason.WRONG_TYPE, f"the time {number!r} lies outside the years 1 to 9999{remedy}")


def _guess_finer_unit(number: float) -> TimeUnit | None:
    """Return the unit that was probably used for a time that is out of range in seconds.

    This is the coarsest unit in which the number is a time between 1970 and 2100, or None if there is no such unit.

    Args:
        number: The time as it was sent, counted from 1970 in an unknown unit.
    """
    # The units are listed from coarse to fine.
    return next((unit for unit in _NAME_BY_FINER_UNIT if 0 < number / UNITS_PER_SECOND[unit] <= _YEAR_2100), None)


def guess_unit(times: ArrayLike) -> TimeUnit:
    """Return the unit of times that are numbers since 1970: seconds, unless most of them would then be out of range.

    Args:
        times: (N,) the times, NaN if unknown.
    """
    known = np.asarray(times, np.float64)
    known = known[np.isfinite(known)]
    median = float(np.median(known)) if len(known) else 0.0
    return (_guess_finer_unit(median) if median > MAX_SECOND else None) or "s"


def parse_rfc3339(text: str, timezone: tzinfo | None = None) -> int:
    """Return RFC 3339 text as microseconds since 1970. A leap second (23:59:60) counts as the second after it.

    Args:
        text: The text.
        timezone: The zone of a text that has no UTC offset; None to reject it.

    Raises:
        RejectionError: If the text is not RFC 3339, lacks a UTC offset, or lies outside the years 1 to 9999.
    """
    try:
        moment = _parse_datetime(text.upper())  # RFC 3339 also permits the letters t and z
    except (ValueError, OverflowError):
        raise RejectionError(
            RejectionReason.WRONG_TYPE,
            f"the time {quote(text)} is not RFC 3339 text; send a time such as 2020-03-09T10:34:33Z",
        ) from None
    if moment.tzinfo is None and timezone is not None:
        return _check_range(localize(moment, timezone), text)
    if moment.tzinfo is None:
        raise RejectionError(
            RejectionReason.WRONG_TYPE,
            f"the time {quote(text)} has no UTC offset; append Z for UTC or an offset such as +01:00, or name the zone "
            "of all such times with --timezone",
        )
    return _check_range((moment - EPOCH) // _MICROSECOND, text)


def _check_range(micros: int, text: str) -> int:
    """Return microseconds since 1970; raise `RejectionError` outside the years 1 to 9999.

    Args:
        micros: The time.
        text: The text that states it.
    """
    if MIN_MICROS <= micros <= MAX_MICROS:
        return micros
    raise RejectionError(
        RejectionReason.WRONG_TYPE,
        f"the time {quote(text)} lies outside the years 1 to 9999 in UTC; send a time in these years",
    )


def _parse_datetime(text: str) -> datetime:
    """Return ISO 8601 text as a datetime. A leap second (second 60 at the end of a day in UTC) becomes the next second.

    Raises:
        ValueError: If the text is not a date and time.
        OverflowError: If the result lies outside the range of `datetime`.
    """
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        leap_second = _LEAP_SECOND.fullmatch(text)
        if leap_second is None:
            raise
    # Group 1 is the text up to the minute, group 2 the fraction and the UTC offset. `datetime` has no second 60, so the
    # result is computed as one second after second 59.
    next_second = datetime.fromisoformat(f"{leap_second[1]}59{leap_second[2]}") + _SECOND
    if (next_second - EPOCH) % _DAY >= _SECOND:  # the second after a leap second is the first one of a day
        # `parse_rfc3339` reports every ValueError as text that is not RFC 3339.
        raise ValueError(
            f"the time {quote(text)} has the second 60 (a leap second), but is not the end of a day in UTC: send a "
            "second from 00 to 59"
        )
    return next_second


def parse_local_time(text: str) -> datetime | None:
    """Return the date and time that a text without a zone spells, without a zone; None for other text.

    These spellings are understood, each with or without seconds and a fraction, or without the time of day (midnight):
    `2025-12-31 23:59:59` (also with `T`, and with slashes or points in the date), `31.12.2025 23:59:59`, and
    `31-Dec-2025 23:59:59` (English names of months, the year also with two digits).
    """
    match = next(filter(None, (pattern.fullmatch(text.strip()) for pattern in _LOCAL_TIMES)), None)
    if match is None:
        return None
    month, year = match["month"].lower(), int(match["year"])
    if month.isalpha() and month not in _MONTHS:
        return None
    month_number = _MONTHS.index(month) + 1 if month.isalpha() else int(month)
    if len(match["year"]) == 2:
        year += 2000
    hours, minutes, seconds = [*(match["clock"] or "0:0").replace(",", ".").split(":"), "0"][:3]
    try:
        midnight = datetime(year, month_number, int(match["day"]), int(hours), int(minutes))
    except ValueError:  # such as the 31st of February
        return None
    whole_seconds, _, fraction = seconds.partition(".")
    if int(whole_seconds) >= 60:
        return None
    return midnight + timedelta(seconds=int(whole_seconds), microseconds=int(fraction[:6].ljust(6, "0")))


def is_time_text(text: str) -> bool:
    """Return whether a text is a date and time, with or without a zone. A number is none."""
    try:
        parse_rfc3339(text.strip())
    except RejectionError:
        return parse_local_time(text) is not None
    return True


def localize(moment: datetime, timezone: tzinfo) -> int:
    """Return a date and time without a zone as microseconds since 1970.

    An hour that occurs twice, at the end of summer time, is taken as the first of the two. An hour that does not occur
    counts as if the clock had not been changed yet.

    Args:
        moment: Date and time in the zone.
        timezone: The zone.
    """
    return (moment.replace(tzinfo=timezone) - EPOCH) // _MICROSECOND


@dataclass(frozen=True, slots=True)
class TimeFormat:
    """How the times of events are written. Both properties are settings, because no single time shows them.

    Attributes:
        unit: Unit of times that are numbers. They count from 1970.
        timezone: The zone of times that are written without one. None if it is not known.
    """

    unit: TimeUnit = "s"
    timezone: tzinfo | None = None

    @staticmethod
    def from_names(unit: TimeUnit, timezone: str | None) -> TimeFormat:
        """Return the format with this unit, and with the zone of this name, such as "Europe/Berlin".

        Raises:
            ConfigError: The zone is unknown.
        """
        try:
            return TimeFormat(unit, None if timezone is None else ZoneInfo(timezone))
        except (KeyError, ValueError, OSError):  # an unknown name, an impossible one, or the name of a folder
            raise ConfigError(
                f"the time zone {quote(timezone or '')} is unknown; write a name such as Europe/Berlin or UTC"
            ) from None

    @property
    def units_per_second(self) -> float:
        """The number by which a time that is a number is divided to get seconds since 1970."""
        return UNITS_PER_SECOND[self.unit]

    def parse(self, time: str | float) -> int:
        """Return a time as microseconds since 1970.

        Args:
            time: A number, RFC 3339 text, or, if the zone is known, a text without a zone (`parse_local_time`).

        Raises:
            RejectionError: The time is malformed, or outside the years 1 to 9999.
        """
        if not isinstance(time, str):
            return number_to_micros(time, self.unit)
        local_time = None if self.timezone is None else parse_local_time(time)
        if self.timezone is None or local_time is None:
            return parse_rfc3339(time, self.timezone)
        return _check_range(localize(local_time, self.timezone), time)


DEFAULT_TIME_FORMAT = TimeFormat()
"""Numbers are seconds since 1970, and the zone of times that are written without one is not known."""


def parse_time_of_day(text: str) -> float | None:
    """Return `HH:MM` or `HH:MM:SS`, with or without a fraction, as seconds since midnight; None for other text."""
    match = _TIME_OF_DAY.fullmatch(text)
    if match is None:
        return None
    hours, minutes, seconds = int(match[1]), int(match[2]), float(match[3] or 0)
    return 3600.0 * hours + 60.0 * minutes + seconds


def drop_impossible_times(times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return broker timestamps, with `NO_TIME` in place of those outside the years 1 to 9999.

    They must be checked, because a Kafka timestamp may come from a producer whose clock is wrong by any amount.

    Args:
        times: (N,) timestamp of each message, microseconds since 1970 or `NO_TIME`.

    Returns:
        (N,) microseconds since 1970, or `NO_TIME`.
    """
    is_possible = (times >= MIN_MICROS) & (times <= MAX_MICROS)
    return np.where(is_possible, times, NO_TIME)


MIN_BROKER_TIME = 946_684_800_000_000
"""The earliest timestamp of a message with which the times of events are compared: 2000-01-01, before Kafka existed."""


@dataclass(frozen=True, slots=True)
class FutureTimeLimit:
    """The rule that rejects events whose own time lies too far in the future.

    An event's time is compared with the broker's timestamp of its message, or with the wall clock if there is no usable
    timestamp. The timestamp is preferred, because it is still the same if the message is read again after a restart. A
    timestamp before `MIN_BROKER_TIME` is not usable: the producer has set 0, or seconds in place of milliseconds.

    Attributes:
        max_micros: Maximum distance into the future in microseconds, at least 0.
    """

    max_micros: int

    def reference_times(self, broker_times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each message the time with which the times stated in it are compared.

        It is the broker's timestamp of the message, or the wall clock if there is no usable one.

        Args:
            broker_times: (N,) broker timestamp of each of N messages in microseconds since 1970, or `NO_TIME`.

        Returns:
            (N,) microseconds since 1970.
        """
        return np.where(broker_times < MIN_BROKER_TIME, clock.time_ns() // 1000, broker_times)

    def check(self, time: int, broker_time: int) -> None:
        """Raise `RejectionError` if an event's own time lies too far in the future.

        Args:
            time: The event's own time, microseconds since 1970.
            broker_time: The broker's timestamp of the message, microseconds since 1970. `NO_TIME`, and a timestamp
                before `MIN_BROKER_TIME`, select the wall clock.
        """
        reference = clock.time_ns() // 1000 if broker_time < MIN_BROKER_TIME else broker_time
        if time - reference > self.max_micros:
            raise RejectionError(
                RejectionReason.FUTURE,
                f"the time {format_rfc3339(time)} lies more than {self.max_micros / 1e6:g} s after the arrival of the "
                f"message at {format_rfc3339(reference)}; check the clock of the sender",
            )
