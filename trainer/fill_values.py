"""The values that stand for a missing reading, and the search for values that probably do.

A fill value, such as 99999 or -9999, stands for a missing reading. A small share of them would make the standard
deviation of a column so large that all other values become nearly equal. The search finds values that are far from all
other values of their column. A group of values counts as far away if the gap between it and all other values is many
times as large as the range of the others. So the tails of skewed distributions, saturated sensors and the modes of a
machine are usually not far away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from deformer_stream.codec.fill_values import FillValues
from deformer_stream.model.schema import Schema
from deformer_stream.settings.base import Layout

MAX_FAR_SHARE = 0.05
"""Largest share of the values, at each end of the range, that can be far from all others. More are another mode."""

MIN_OTHER_VALUES = 5
"""Smallest number of distinct values among the others, whose range is compared with the gap."""

MIN_SHARED_RATIO, MIN_TYPICAL_RATIO, MIN_SINGLE_RATIO = 10.0, 2.0, 50.0
"""How many times as large as the range of all other values the gap to a fill value is, at least.

The first number is for a value that occurs in several columns, the second for one that is written as fill values often
are (`_is_typical`), the third for any other value.
"""

MAX_TYPICAL_SHARE = 0.5
"""Largest share of a column's readings that may be a typical fill value, as of a sensor that is often off."""

MIN_OCCURRENCES = 5
"""Smallest number of occurrences, over all columns, of a fill value."""

MAX_LISTED_COLUMNS, MAX_LISTED_VALUES = 5, 3
"""Largest number of columns, and of fill values, that a message lists."""

_TYPE_LIMITS = frozenset({32767, 65535, 2147483647, 4294967295, 32768, 2147483648})
"""Magnitudes of the limits of integer types, which devices write if they have no value."""

_HUGE = 1e30
"""Magnitude from which a value is a fill value, such as the largest float."""

_LARGEST_SQUARED = 1e150
"""Values up to this magnitude can be squared, and the squares added, without overflow."""


@dataclass(frozen=True)
class ChosenFillValues:
    """The values that stand for a missing reading in a training: those of the options, and those of an old model.

    Attributes:
        chosen: Each value (`--fill-values`) with the name of its feature, None for all features.
        base: The schema of the old model that is adapted (`--init-from`), None for a new model.
    """

    chosen: tuple[tuple[str | None, str], ...] = ()
    base: Schema | None = None

    @cached_property
    def _values_by_feature(self) -> dict[str, FillValues]:
        """The fill values of the features whose readings have been looked at."""
        return {}

    @cached_property
    def _old_values(self) -> dict[str, tuple[str, ...]]:
        """The fill values in the old model, by the name of the feature in the input."""
        features = () if self.base is None else self.base.features
        return {feature.sensor_name: feature.fill_values for feature in features}

    def __bool__(self) -> bool:
        """Return whether there are any, in the options or in the old model."""
        return bool(self.chosen) or any(self._old_values.values())

    def list_values(self, feature_name: str) -> tuple[str, ...]:
        """Return the fill values of a feature, as `Feature.fill_values` lists them."""
        chosen = (value for name, value in self.chosen if name in (None, feature_name))
        return tuple(dict.fromkeys((*self._old_values.get(feature_name, ()), *chosen)))

    def find(self, feature_name: str, cells: pa.Array) -> NDArray[np.bool_]:
        """Return for each of N cells of a feature whether it has a fill value, (N,)."""
        return self._get_values(feature_name).find(cells)

    def remove(self, feature_name: str, cells: pa.Array) -> pa.Array:
        """Return cells of a feature, in which fill values are null."""
        return self._get_values(feature_name).remove(cells)

    def _get_values(self, feature_name: str) -> FillValues:
        """Return the fill values of a feature."""
        values = self._values_by_feature.get(feature_name)
        if values is None:
            values = self._values_by_feature[feature_name] = FillValues(self.list_values(feature_name))
        return values


@dataclass(frozen=True, slots=True)
class NumberSample:
    """The numbers of a column.

    Attributes:
        name: Name of the column or sensor.
        values: A random sample of the numbers, in ascending order.
        num_readings: Number of all numbers.
    """

    name: str
    values: NDArray[np.float64]
    num_readings: int


@dataclass(frozen=True, slots=True)
class FillValue:
    """A value that probably stands for a missing reading.

    Attributes:
        value: The value.
        columns: The columns in which it occurs.
        num_occurrences: How often it occurs in these columns.
        is_exact: Whether the occurrences were counted, and not estimated from samples.
    """

    value: float
    columns: tuple[str, ...]
    num_occurrences: int
    is_exact: bool

    def describe(self, layout: Layout) -> str:
        """Return how often the value occurs, and in which columns, as text for the user.

        Args:
            layout: "wide" if a column of the table is a feature, "long" if a row is one reading.
        """
        noun = "column" if layout == "wide" else "sensor"
        listed = ", ".join(self.columns[:MAX_LISTED_COLUMNS])
        if len(self.columns) > MAX_LISTED_COLUMNS:
            listed += ", …"
        where = f"in {noun} {listed}" if len(self.columns) == 1 else f"in {len(self.columns)} {noun}s ({listed})"
        about = "" if self.is_exact else "about "
        return f"{format_number(self.value)} occurs {about}{self.num_occurrences:,} times {where}"


def describe_fill_values(fill_values: Sequence[FillValue], layout: Layout) -> str | None:
    """Return a sentence about fill values for the user, with what to do; None if there are none.

    Args:
        fill_values: The values, the most important ones first.
        layout: "wide" if a column of the table is a feature, "long" if a row is one reading.
    """
    if not fill_values:
        return None
    occurrences = "; ".join(fill.describe(layout) for fill in fill_values[:MAX_LISTED_VALUES])
    question = "is it a fill value" if len(fill_values) == 1 else "are these fill values"
    option = ",".join(format_number(fill.value) for fill in fill_values[:MAX_LISTED_VALUES])
    return f"{occurrences}, far from all other values: {question}? If so, train with --fill-values {option}"


def find_main_part(values: NDArray[np.float64], max_share: float, min_ratio: float) -> slice:
    """Return the part of a sample without values that are far from all others, at both ends.

    Args:
        values: The sample, in ascending order.
        max_share: Largest share of the values that may be left out at each end.
        min_ratio: The gap between these values and the others must be at least this number of ranges of the others.

    Returns:
        The indexes of the other values. These are all indexes if no value is far away, or if there are fewer than
        `MIN_OTHER_VALUES` distinct others.
    """
    num_values = len(values)
    num_at_end = int(max_share * num_values)
    if not num_at_end:
        return slice(0, num_values)
    scaled = values / get_overflow_divisor(values)
    gaps = np.diff(scaled)
    start = int(np.argmax(gaps[:num_at_end])) + 1
    stop = num_values - 1 - int(np.argmax(gaps[::-1][:num_at_end]))
    for part in (slice(start, stop), slice(start, num_values), slice(0, stop)):
        others = scaled[part]
        if len(others) < 2:
            continue
        cuts = [gaps[cut - 1] for cut in (part.start, part.stop) if 0 < cut < num_values]
        is_far = min(cuts) >= min_ratio * (others[-1] - others[0])
        if is_far and len(np.unique(values[part])) >= MIN_OTHER_VALUES:
            return part
    return slice(0, num_values)


def get_overflow_divisor(values: NDArray[np.float64]) -> float:
    """Return a number by which values are divided so that their sums and squares do not overflow, usually 1.

    Args:
        values: At least one finite value.
    """
    largest = float(np.abs(values).max())
    return largest if largest > _LARGEST_SQUARED else 1.0


def is_at_rest(values: NDArray[np.float64], main_part: slice) -> bool:
    """Return whether most of the values outside of the main part are 0, a normal reading of many machines at rest.

    Args:
        values: The sample, in ascending order.
        main_part: The indexes of the values that are not far from the others, by `find_main_part`.
    """
    far = np.concatenate([values[: main_part.start], values[main_part.stop :]])
    return len(far) > 0 and float((far == 0).mean()) >= 0.5


def find_fill_values(samples: Iterable[NumberSample]) -> list[FillValue]:
    """Return the values that probably stand for missing readings, those in most columns first.

    Zero is none: it is a normal reading of many machines at rest.

    Args:
        samples: The numbers of each column that becomes a measurement.
    """
    counts: dict[float, dict[str, int]] = defaultdict(dict)
    single: set[float] = set()  # values that need no second column
    estimated: set[float] = set()
    for sample in samples:
        for ratio, max_share in (
            (MIN_SINGLE_RATIO, MAX_FAR_SHARE),
            (MIN_SHARED_RATIO, MAX_FAR_SHARE),
            (MIN_TYPICAL_RATIO, MAX_TYPICAL_SHARE),
        ):
            for value, count in _list_far_values(sample.values, max_share, ratio):
                if ratio == MIN_TYPICAL_RATIO and not _is_typical(value):
                    continue
                if ratio != MIN_SHARED_RATIO:
                    single.add(value)
                if len(sample.values) < sample.num_readings:
                    estimated.add(value)
                num_occurrences = round(count * sample.num_readings / len(sample.values))
                counts[value].setdefault(sample.name, num_occurrences)
    found = [
        FillValue(value, tuple(by_column), sum(by_column.values()), value not in estimated)
        for value, by_column in counts.items()
        if (value in single or len(by_column) > 1) and sum(by_column.values()) >= MIN_OCCURRENCES
    ]
    return sorted(found, key=lambda fill: (-len(fill.columns), -fill.num_occurrences))


def _list_far_values(values: NDArray[np.float64], max_share: float, min_ratio: float) -> list[tuple[float, int]]:
    """Return the value, with its number of occurrences, that most of the far values at each end are equal to.

    An end has none if its far values differ, and if the value is 0.
    """
    part = find_main_part(values, max_share, min_ratio)
    found = []
    for far in (values[: part.start], values[part.stop :]):
        distinct, counts = np.unique(far, return_counts=True)
        if len(far) and 2 * counts.max() >= len(far) and (value := float(distinct[np.argmax(counts)])):
            found.append((value, int(counts.max())))
    return found


def _is_typical(value: float) -> bool:
    """Return whether a value is written as fill values often are: 9999, -999.25, 32767 or 1e30."""
    magnitude = abs(value)
    if magnitude >= _HUGE or magnitude in _TYPE_LIMITS or magnitude == 999.25:
        return True
    digits = format_number(magnitude).replace(".", "")
    return len(digits) >= 3 and set(digits) == {"9"}


def format_number(value: float) -> str:
    """Return a number as people write it: an integer without a fraction, up to 15 digits."""
    return f"{value:.15g}"
