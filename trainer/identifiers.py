"""Recognise numeric columns that identify rows instead of measuring something: row numbers, ids, counters and clocks.

Such a column must not become a feature. The values of new records would lie outside of those that were learnt, so every
new record would look anomalous. The rules use the order of the rows, because a counter or a clock only rises. They also
use the number of repeated values, because measured integers repeat by chance and ids do not.

A measurement must not be lost. Values with fractions are therefore measurements, even if all are different. Integers
that are all different are measurements if their range is so wide that repetitions would be improbable. Random ids from
such a range cannot be told from measurements, and need not be: new ones come from the same range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from deformer_stream.codec.number_texts import MAX_EXACT_INTEGER
from deformer_stream.durations import UNITS_PER_SECOND, TimeUnit

MIN_VALUES = 10
"""Smallest number of values from which a rule draws a conclusion."""

MAX_STEPS = 20_000
"""Largest number of steps between neighbouring rows that are kept, from the start of the table."""

MIN_RISES = 20
"""Smallest number of rises without a fall that shows a total or a counter, if the rows are in the order of time.

A value that neither drifts nor counts falls about as often as it rises, so that 20 rises in a row are no coincidence.
"""

MIN_SHARE_OF_RISES = 0.95
"""Smallest share of the steps that must rise in a column of ids or clock times. The others may be repeated rows."""

MIN_SHARE_OF_EVEN_STEPS = 0.9
"""Smallest share of the steps that must be whole multiples of the usual step in a row number or an even clock."""

MAX_STEPS_PER_ROW = 4.0
"""Largest mean distance, in usual steps, between neighbouring rows of a row number or an even clock.

It exceeds 1, because records for validation and calibration, and those that are not normal, are left out.
"""

MAX_PROBABILITY = 1e-6
"""Integers are ids if measured ones would have so few repetitions with at most this probability."""

UNIX_UNITS: tuple[TimeUnit, ...] = ("s", "ms", "us", "ns")
"""The units in which numbers are recognised as Unix times, in the order in which they are tried.

A further unit that the commands can read is not one of them. It would take measurements for clocks.
"""

_FIRST_UNIX_SECOND, _LAST_UNIX_SECOND = 315_532_800.0, 4_102_444_800.0  # the years 1980 to 2100


@dataclass
class OrderStatistics:
    """How the values of a column change from row to row, in the order of the input.

    Attributes:
        num_rises: Number of values that are larger than the value before.
        num_falls: Number of values that are smaller than the value before.
        num_equal: Number of values that are equal to the value before.
        num_file_rises: Number of rises from the last value of a file to the first value of the next one, included in
            `num_rises`.
        num_file_falls: The same for falls, included in `num_falls`.
        steps: The first `MAX_STEPS` differences of neighbouring values of the same file.
    """

    num_rises: int = 0
    num_falls: int = 0
    num_equal: int = 0
    num_file_rises: int = 0
    num_file_falls: int = 0
    steps: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    _last_value: float | None = None
    _last_file: int = 0

    def add(self, values: NDArray[np.float64], file_index: int) -> None:
        """Update the statistics with the next M values of the column.

        Args:
            values: (M,) finite values in the order of the input.
            file_index: The number of the file that contains the values, from 0.
        """
        if not len(values):
            return
        if self._last_value is not None:
            if file_index != self._last_file:
                self.num_file_rises += int(values[0] > self._last_value)
                self.num_file_falls += int(values[0] < self._last_value)
                self._count(np.array([values[0] - self._last_value]))
            else:
                values = np.concatenate([[self._last_value], values])
        steps = np.diff(values)
        self._count(steps)
        if len(self.steps) < MAX_STEPS:
            self.steps = np.concatenate([self.steps, steps[: MAX_STEPS - len(self.steps)]])
        self._last_value, self._last_file = float(values[-1]), file_index

    def _count(self, steps: NDArray[np.float64]) -> None:
        """Count the rises, falls and equal values among some steps."""
        self.num_rises += int((steps > 0).sum())
        self.num_falls += int((steps < 0).sum())
        self.num_equal += int((steps == 0).sum())

    @property
    def num_steps(self) -> int:
        """The number of pairs of neighbouring values."""
        return self.num_rises + self.num_falls + self.num_equal

    @property
    def only_rises(self) -> bool:
        """Whether the values rise at least `MIN_RISES` times and never fall."""
        return self.num_rises >= MIN_RISES and not self.num_falls

    @property
    def only_falls(self) -> bool:
        """Whether the values fall at least `MIN_RISES` times and never rise."""
        return self.num_falls >= MIN_RISES and not self.num_rises


def describe_identifier(
    sample: NDArray[np.float64],
    order: OrderStatistics,
    is_integer: bool,
    is_in_time_order: bool,
    origin: int = 0,
) -> str | None:
    """Return why a numeric column identifies rows instead of measuring something; None if it does not.

    Args:
        sample: A random sample of the column's values minus `origin`, in ascending order.
        order: How the values change from row to row.
        is_integer: Whether all values of the column are integers. Floats beyond 2^53 do not count, because they have no
            fractions even if they are measurements.
        is_in_time_order: Whether the rows are known to be in the order of time. Otherwise the table may have been
            sorted by this column, which is then a measurement.
        origin: The number that was subtracted from the values, so that large integers are not rounded.

    Returns:
        The reason as text for the user, without the column's name.
    """
    num_values = order.num_steps + 1
    if num_values < MIN_VALUES or not len(sample) or sample[0] == sample[-1]:
        return None
    if unix_times := _describe_unix_times(sample + float(origin), order):
        return unix_times
    count = f"all {num_values:,} values differ"
    direction = "rise" if order.num_rises >= order.num_falls else "fall"
    if _is_even(order):
        return f"{count} and {direction} evenly: looks like an identifier, a row number or a clock"
    is_strict = max(order.num_rises, order.num_falls) >= MIN_SHARE_OF_RISES * order.num_steps
    if is_integer and is_strict and not min(order.num_rises, order.num_falls):
        differ = count if not order.num_equal else "nearly all values differ"
        return f"{differ} and only {direction}: looks like an identifier or a counter"
    if is_integer and (num_repeated := _count_unlikely_repetitions(sample, origin)) is not None:
        differ = count if not num_repeated else "nearly all values differ"
        return f"{differ}: looks like an identifier"
    if is_in_time_order and (order.only_rises or order.only_falls):
        return f"only {direction}s in the course of time: looks like a total or a counter"
    return None


def describe_trend(order: OrderStatistics) -> str:
    """Return a remark on a column that was kept as a feature although it only rises or falls; empty for others."""
    if order.only_rises or order.only_falls:
        direction = "rises" if order.only_rises else "falls"
        return f", only {direction} from row to row: if it is a total or a counter, name it in --exclude"
    return ""


def _describe_unix_times(sample: NDArray[np.float64], order: OrderStatistics) -> str | None:
    """Return the range of the column's times if its values are Unix times that mostly rise (or fall) row by row.

    Several devices may share a time, and the rows may be sorted by device first. Hence values may repeat, and a small
    share of the steps may go back.
    """
    num_back, num_forth = sorted((order.num_rises, order.num_falls))
    if num_forth < MIN_VALUES or num_back > (1 - MIN_SHARE_OF_RISES) * (num_back + num_forth):
        return None
    unit = find_unix_unit(sample[0], sample[-1])
    if unit is None:
        return None
    first, last = (datetime.fromtimestamp(value / UNITS_PER_SECOND[unit], UTC) for value in (sample[0], sample[-1]))
    return f"Unix times from {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M}: looks like a clock"


def find_unix_unit(smallest: float, largest: float) -> TimeUnit | None:
    """Return the unit in which two numbers are Unix times of the years 1980 to 2100, None if there is none."""
    for unit in UNIX_UNITS:
        units_per_second = UNITS_PER_SECOND[unit]
        if smallest >= _FIRST_UNIX_SECOND * units_per_second and largest <= _LAST_UNIX_SECOND * units_per_second:
            return unit
    return None


def _is_even(order: OrderStatistics) -> bool:
    """Return whether the values rise (or fall) in equal steps within each file, as a row number or a clock does."""
    rises_in_files = order.num_rises - order.num_file_rises
    falls_in_files = order.num_falls - order.num_file_falls
    if order.num_equal or (rises_in_files and falls_in_files) or not len(order.steps):
        return False
    sizes = np.abs(order.steps)
    usual_step = float(np.median(sizes))
    multiples = sizes / usual_step
    are_whole = (np.abs(multiples - np.round(multiples)) < 0.1) & (multiples > 0.5)
    return bool(are_whole.mean() >= MIN_SHARE_OF_EVEN_STEPS and multiples.mean() <= MAX_STEPS_PER_ROW)


def _count_unlikely_repetitions(sample: NDArray[np.float64], origin: int) -> int | None:
    """Return the number of repetitions among integers if measured integers would have far more; otherwise None.

    If n integers are drawn independently from R possible ones, the number of pairs of equal values is about n²/2R on
    average. It is larger if some integers are more frequent than others. So the least is assumed. The number is
    compared with the range of the values on their grid (in multiples of their greatest common divisor).

    Only ids are integers beyond 2^53; no sensor has such a resolution.

    Args:
        sample: A random sample of the values minus `origin`, in ascending order.
        origin: The number that was subtracted from the values.
    """
    num_values, num_repeated = len(sample), len(sample) - len(np.unique(sample))
    if np.abs(sample[[0, -1]] + float(origin)).max() >= MAX_EXACT_INTEGER:
        return None if num_repeated else 0
    if num_repeated > (1 - MIN_SHARE_OF_RISES) * num_values:
        return None
    offsets = (sample - sample[0]).astype(np.int64)
    range_size = offsets[-1] // int(np.gcd.reduce(offsets)) + 1
    expected = num_values * (num_values - 1) / (2 * float(range_size))
    if expected <= num_repeated:
        return None
    # Chernoff's bound of the probability that a Poisson number with this mean is at most `num_repeated`.
    log_probability = num_repeated - expected
    if num_repeated:
        log_probability += num_repeated * math.log(expected / num_repeated)
    return num_repeated if log_probability <= math.log(MAX_PROBABILITY) else None
