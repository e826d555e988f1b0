"""The time for which devices were observed."""

from __future__ import annotations

import pytest

from deformer_stream.calibration.observed_time import MAX_GAP, ObservedTime

HOUR = 3_600_000_000
DAY = 24 * HOUR


def observe(times: list[int], max_gap: int = MAX_GAP, device: str = "pump") -> ObservedTime:
    observed = ObservedTime(max_gap)
    for time in times:
        observed.add(device, time)
    return observed


@pytest.mark.parametrize("window", [1_000_000, 600_000_000, HOUR, 8 * HOUR, DAY])
def test_windows_of_any_length_count_in_full(window: int) -> None:
    assert observe([number * window for number in range(5, 45)]).micros == 40 * window


def test_a_window_longer_than_the_longest_gap_counts_in_full_if_the_gap_is_as_long() -> None:
    times = [number * 7 * DAY for number in range(10)]
    assert observe(times).micros == 10 * DAY
    assert observe(times, max_gap=7 * DAY).micros == 70 * DAY


def test_a_device_that_is_switched_off_is_not_observed() -> None:
    before = [number * HOUR for number in range(10)]
    after = [60 * DAY + number * HOUR for number in range(10)]
    assert observe(before + after).micros == 10 * HOUR + DAY + 9 * HOUR


def test_records_at_one_time_and_late_ones_add_nothing() -> None:
    assert observe([0, 0, HOUR, HOUR, HOUR // 2, 2 * HOUR]).micros == 3 * HOUR


def test_the_only_record_of_a_device_counts_an_hour() -> None:
    observed = observe([5 * DAY, 5 * DAY])
    assert observed.micros == HOUR
    observed.add("other", 0)
    assert (observed.num_devices, observed.micros) == (2, 2 * HOUR)
