"""Units of time, and durations as text: how options state them, and how messages and reports show them.

Inside the program a duration is an integer number of microseconds. Options are in seconds until they are converted.
"""

from __future__ import annotations

import math
import re
from typing import Literal

MICROS_PER_SECOND = 1_000_000
MICROS_PER_MINUTE = 60 * MICROS_PER_SECOND
MICROS_PER_HOUR = 60 * MICROS_PER_MINUTE
MICROS_PER_DAY = 24 * MICROS_PER_HOUR

TimeUnit = Literal["s", "ms", "us", "ns"]
"""Unit of times that are numbers since 1970."""

UNITS_PER_SECOND: dict[TimeUnit, float] = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
"""For each of these units, the number of them in a second."""

MICROS_BY_UNIT = {
    "w": 7 * MICROS_PER_DAY,
    "d": MICROS_PER_DAY,
    "h": MICROS_PER_HOUR,
    "m": MICROS_PER_MINUTE,
    "s": MICROS_PER_SECOND,
    "ms": 1_000,
}
"""Microseconds of each unit of a duration in the text of an option, the largest unit first."""

CLOCK_UNITS = ("h", "m", "s", "ms")
"""Units of windows, time slots and training times."""

CALENDAR_UNITS = ("d", "h", "m", "s")
"""Units of the period of an incident budget and of segments of normal operation."""

MAX_PERIOD_SECONDS = 2**62 / MICROS_PER_SECOND
"""Upper limit of periods, so that sums of two of them fit in 64 bits."""

_NUMBER = r"\d+(?:\.\d+)?"
_DURATION_PATTERN = "".join(rf"(?:({_NUMBER})\s*{unit}\s*)?" for unit in MICROS_BY_UNIT)
"""Matches a number for each unit of time, the largest unit first. Each unit may be left out."""


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as "250ms", "30s", "10m", "1h30m", "2w" or "30" (seconds).

    Raises:
        ValueError: The text is not a duration.
    """
    stripped = text.strip()
    if re.fullmatch(_NUMBER, stripped, re.ASCII):
        return float(stripped)
    match = re.fullmatch(_DURATION_PATTERN, stripped, re.ASCII)
    if not stripped or not match:
        raise ValueError(
            "this is not a duration; write numbers with the units ms, s, m, h, d or w, like 30s, 1.5h or 1h30m"
        )
    seconds_by_unit = (micros / MICROS_PER_SECOND for micros in MICROS_BY_UNIT.values())
    return sum(float(number or 0) * unit for number, unit in zip(match.groups(), seconds_by_unit, strict=True))


def parse_period(text: str) -> int:
    """Return the microseconds of a duration such as "30d" or "1h30m".

    A number without a unit is refused: in "1 per 30" it is probably not meant in seconds.

    Raises:
        ValueError: The text is not a duration with a unit, or the duration is too long for 64 bits.
    """
    if re.fullmatch(_NUMBER, text.strip(), re.ASCII):
        raise ValueError("this number has no unit; write s, m, h, d or w after it")
    seconds = parse_duration(text)
    if seconds >= MAX_PERIOD_SECONDS:
        raise ValueError("this duration is too long; give a shorter one")
    return to_micros(seconds)


def to_micros(seconds: float) -> int:
    """Return a number of seconds in microseconds, rounded to an integer."""
    return round(seconds * 1e6)


def format_duration(micros: int, units: tuple[str, ...] = CLOCK_UNITS) -> str:
    """Return a duration exactly, as text that options accept, such as "90s", "2m" or "0.5ms".

    The unit is the largest one in which the duration is a whole number. If there is none, the duration is written with
    a decimal point in the smallest unit.

    Args:
        micros: The duration.
        units: The units that may be used, the largest first (`CLOCK_UNITS` or `CALENDAR_UNITS`).
    """
    if not micros:
        return "0s"
    for unit in units:
        if micros % MICROS_BY_UNIT[unit] == 0:
            return f"{micros // MICROS_BY_UNIT[unit]}{unit}"
    num_decimals = len(str(MICROS_BY_UNIT[units[-1]])) - 1  # the smallest units are powers of ten
    whole, remainder = divmod(micros, MICROS_BY_UNIT[units[-1]])
    return f"{whole}." + f"{remainder:0{num_decimals}}".rstrip("0") + units[-1]


def format_period(micros: int) -> str:
    """Return the period of a budget or the length of a segment exactly, such as "30d", "8h" or "1.5s"."""
    return format_duration(micros, CALENDAR_UNITS)


def format_rough_duration(micros: float) -> str:
    """Return a duration with three digits, such as "3 min", "12.5 days" or "−40 s".

    The unit is the largest one in which it is at least two, but milliseconds only below a second.
    """
    magnitude = abs(micros)
    short = ("ms", 1e3) if 0 < magnitude < 1e6 else ("s", 1e6)
    units = (("days", float(MICROS_PER_DAY)), ("h", float(MICROS_PER_HOUR)), ("min", float(MICROS_PER_MINUTE)), short)
    unit, length = next(((unit, length) for unit, length in units if magnitude >= 2 * length), short)
    number = magnitude / length
    text = f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"
    return f"{'−' if micros < 0 else ''}{text} {unit}"


def format_elapsed_time(micros: int) -> str:
    """Return how long something took or how long ago it was, such as "45 s", "12 min", "3 h 5 min" or "2 d 4 h"."""
    seconds = max(0, round(micros / MICROS_PER_SECOND))
    if seconds < 60:
        return f"{seconds} s"
    minutes = seconds // 60
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours and days < 14 else f"{days} d"


def round_up_duration(micros: int) -> tuple[int, str]:
    """Return a duration rounded up to whole days, or hours or minutes if it is short: the number and the unit.

    The unit is "days", "hours" or "minutes". It is "day" or "hour" if the duration is exactly one of them.
    """
    for unit, length in (("day", MICROS_PER_DAY), ("hour", MICROS_PER_HOUR)):
        if micros >= 2 * length or micros == length:
            count = math.ceil(micros / length)
            return count, unit if count == 1 else f"{unit}s"
    return math.ceil(micros / MICROS_PER_MINUTE), "minutes"
