"""Durations: what is parsed, and how each of the formatters writes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deformer_stream.durations import (
    MICROS_PER_DAY,
    MICROS_PER_HOUR,
    MICROS_PER_MINUTE,
    MICROS_PER_SECOND,
    format_duration,
    format_elapsed_time,
    format_period,
    format_rough_duration,
    parse_duration,
    parse_period,
    round_up_duration,
    to_micros,
)


@given(st.integers(1, 10**15), st.sampled_from([format_duration, format_period]))
def test_an_exact_duration_is_parsed_to_the_same_duration(micros: int, format_exactly: Callable[[int], str]) -> None:
    assert to_micros(parse_duration(format_exactly(micros))) == micros


def test_a_number_without_a_unit_is_in_seconds_but_refused_as_a_period() -> None:
    assert parse_duration("30") == 30.0
    assert parse_period("1w") == 604_800_000_000
    for text, cause in ((" 30 ", "no unit"), ("30y", "not a duration"), ("9" * 400 + "w", "too long")):
        with pytest.raises(ValueError, match=cause):
            parse_period(text)


@pytest.mark.parametrize(
    ("micros", "text"),
    [
        (0, "0s"),
        (500, "0.5ms"),
        (1500, "1.5ms"),
        (1_500_000, "1500ms"),
        (20 * MICROS_PER_SECOND, "20s"),
        (90 * MICROS_PER_SECOND, "90s"),
        (120 * MICROS_PER_SECOND, "2m"),
        (2 * MICROS_PER_DAY, "48h"),
    ],
)
def test_a_duration_has_the_largest_unit_without_a_fraction(micros: int, text: str) -> None:
    assert format_duration(micros) == text


@pytest.mark.parametrize(
    ("micros", "text"),
    [
        (30 * MICROS_PER_DAY, "30d"),
        (8 * MICROS_PER_HOUR, "8h"),
        (36 * MICROS_PER_HOUR, "36h"),
        (1_500_000, "1.5s"),
        (1, "0.000001s"),
    ],
)
def test_a_period_has_the_largest_unit_from_days_to_seconds(micros: int, text: str) -> None:
    assert format_period(micros) == text


@pytest.mark.parametrize(
    ("micros", "text"),
    [
        (7_198_412_000, "120 min"),
        (1_000_000, "1 s"),
        (90_000_000, "90 s"),
        (172_800_000_000, "2 days"),
        (1500, "1.5 ms"),
        (300_000, "300 ms"),
        (0, "0 s"),
        (-90_000_000, "−90 s"),
        (999 * MICROS_PER_DAY, "999 days"),
        (1234 * MICROS_PER_DAY, "1,234 days"),
    ],
)
def test_rough_durations_have_three_digits(micros: int, text: str) -> None:
    assert format_rough_duration(micros) == text


@pytest.mark.parametrize(
    ("micros", "text"),
    [
        (0, "0 s"),
        (59 * MICROS_PER_SECOND, "59 s"),
        (61 * MICROS_PER_SECOND, "1 min"),
        (MICROS_PER_HOUR, "1 h"),
        (MICROS_PER_HOUR + 5 * MICROS_PER_MINUTE, "1 h 5 min"),
        (2 * MICROS_PER_DAY + 4 * MICROS_PER_HOUR, "2 d 4 h"),
        (30 * MICROS_PER_DAY + MICROS_PER_HOUR, "30 d"),
        (-5, "0 s"),
    ],
)
def test_elapsed_times_have_at_most_two_units(micros: int, text: str) -> None:
    assert format_elapsed_time(micros) == text


@pytest.mark.parametrize(
    ("micros", "count", "unit"),
    [
        (MICROS_PER_DAY, 1, "day"),
        (2 * MICROS_PER_DAY + 1, 3, "days"),
        (MICROS_PER_DAY + 1, 25, "hours"),
        (MICROS_PER_HOUR, 1, "hour"),
        (MICROS_PER_HOUR + 1, 61, "minutes"),
    ],
)
def test_a_duration_is_rounded_up_to_whole_units(micros: int, count: int, unit: str) -> None:
    assert round_up_duration(micros) == (count, unit)
