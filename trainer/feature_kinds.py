"""Infer from the values of each column whether it is a measurement, a label or no feature.

A measurement (continuous feature) also has a resolution (the step of the grid on which its sensor reports) and perhaps
the period of a cycle. A label is a discrete feature. The reason for each decision is kept as text for the table that
`deformer-train` prints. The statistics are collected batch by batch, so that tables may be larger than memory. They use
training records only, so that calibration and validation records stay unseen. Only missing and infinite values are
counted over all records.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from deformer_stream.codec.columns import format_cell, list_exact_numbers, to_python_values
from deformer_stream.codec.number_texts import BAD_VALUE_TEXTS, MAX_EXACT_INTEGER
from deformer_stream.codec.tables import mix_bits
from deformer_stream.errors import ConfigError
from deformer_stream.model.schema import (
    LINEAR_LIMIT,
    MAX_PERIODS_PER_SCALE,
    SECONDS_PER_DAY,
    Feature,
    FeatureKind,
    format_label,
)
from deformer_stream.record_limits import MAX_NAME_CHARS
from deformer_stream.tables.labels import encode_labels
from trainer.fill_values import MAX_FAR_SHARE, NumberSample, find_main_part, get_overflow_divisor, is_at_rest
from trainer.identifiers import MIN_RISES, OrderStatistics, describe_identifier, describe_trend
from trainer.tables import ValueForm, classify_type, convert_to_numbers, has_leading_zeros

MAX_SAMPLE = 20_000
"""Largest number of readings of a column that are kept as a random sample.

The mean and the standard deviation of such a sample have an error of about 0.5% of the standard deviation.
"""

MAX_LABELS = 1000
"""Largest number of distinct labels of a discrete feature."""

MAX_DISCRETE_NUMBERS = 10
"""Largest number of distinct values of a numeric column that is inferred to be discrete."""

MIN_READINGS_PER_LABEL = 20
"""Smallest number of readings per distinct value, on average, of a numeric column that is inferred to be discrete."""

MIN_GRID_LEVELS = 5
"""Smallest number of distinct fractional values on an even grid that are taken for readings of a coarse sensor.

Such a column is continuous, even if it has only few distinct values.
"""

NUM_LEVEL_ORDERS, MAX_ORDER_P_VALUE = 400, 0.02
"""Number of random orders of the levels of a column with which its own order is compared (`has_ordered_levels`).

The second number is the largest share of them in which neighbouring levels are as alike as in the order of the numbers.

Five levels have 60 orders that are not the reverse of another, so that a smaller share could not be reached.
"""

MIN_LEVEL_READINGS = 200
"""Smallest number of records that two columns must share for `has_ordered_levels`."""

MAX_LEVEL_READINGS, MAX_COMPARED_COLUMNS = 5000, 30
"""Largest number of records, and of other columns, that `has_ordered_levels` compares."""

MIN_SHARE_ON_GRID = 0.999
"""Smallest share of the readings that must lie on a grid for its step to be the resolution of the sensor."""

FREQUENT_SHARE = 0.2
"""A value is mentioned as frequent in the table of features if at least this share of the readings is equal to it."""

MAX_SHARE_OF_OTHER_TEXTS = 0.1
"""Largest share of other texts, such as "Bad", in a column of texts that is inferred to contain measurements."""

MAX_SHARE_OF_LEADING_ZEROS = 0.01
"""Largest share of texts such as "007" among the numbers of a column of measurements. Such texts are codes or ids."""

MAX_OTHER_TEXTS = 100
"""Largest number of different other texts in a column of numbers that are counted, to show the most frequent one."""

CLIP_QUANTILES = (0.001, 0.999)
"""Readings are clipped to these quantiles before mean and standard deviation are computed.

Otherwise a few extreme values could make the standard deviation so large that all other values become nearly equal.
"""

MIN_FAR_RATIO, MAX_SCALE_RATIO = 20.0, 3.0
"""Values behind a gap of the first number of ranges of all other values are left out of the location and the scale, if
the scale would otherwise be larger by more than the second number.

They are a small share of the readings (`fill_values.MAX_FAR_SHARE`), such as a fill value that is more frequent than
`CLIP_QUANTILES` permits.
"""


_AMBIGUOUS_NUMBER = re.compile(r"\s*[+-]?\d{1,3},\d{3}\s*")
"""A number with a comma that may be a decimal comma, or may separate groups of three digits."""


_DATE = re.compile(r"\s*(?:\d{4}([-/.])\d{1,2}\1\d{1,2}|\d{1,2}([-/.])\d{1,2}\2(?:\d{4}|\d{2}))(?:[ T].*)?")
"""A date, perhaps followed by a time, in any order of day, month and year."""


@dataclass(frozen=True)
class _Sample:
    """A random sample of numbers: those with the smallest hashes, at most `MAX_SAMPLE`.

    Attributes:
        hashes: (K,) the hash of each number.
        numbers: (K,) the numbers.
    """

    hashes: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    numbers: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    def add(self, hashes: NDArray[np.uint64], numbers: NDArray[np.float64]) -> _Sample:
        """Return the sample of these numbers and M further ones."""
        if len(self.hashes) == MAX_SAMPLE:
            # A number with a larger hash than all of the full sample cannot replace any of them.
            is_candidate = hashes < self.hashes.max()
            hashes, numbers = hashes[is_candidate], numbers[is_candidate]
        hashes, numbers = np.concatenate([self.hashes, hashes]), np.concatenate([self.numbers, numbers])
        if len(hashes) > MAX_SAMPLE:
            indexes_of_smallest = np.argpartition(hashes, MAX_SAMPLE - 1)[:MAX_SAMPLE]
            hashes, numbers = hashes[indexes_of_smallest], numbers[indexes_of_smallest]
        return _Sample(hashes, numbers)


@dataclass
class ColumnStatistics:
    """Statistics of the values of one column or feature, collected batch by batch in one pass over the table.

    They contain random samples of the numbers. One has the `MAX_SAMPLE` readings whose row numbers have the smallest
    hashes, so it depends neither on the table's layout nor on the size of the batches. If records have several
    readings, it has all readings of few records. A second sample of single readings then represents the numbers.

    Attributes:
        name: Name of the column or feature.
        form: What the values are, such as numbers or texts, according to the Parquet type.
        num_readings: Number of finite values or labels in training records.
        num_missing: Number of nulls and NaN, over all records.
        num_infinite: Number of infinite numbers, over all records.
        num_non_numeric: Number of texts in training records that do not represent a number.
        num_leading_zeros: Number of texts in training records that are integers with leading zeros, such as "007".
        count_by_other_text: Number of occurrences of each text that does not represent a number, over all records. At
            most `MAX_OTHER_TEXTS` different texts are counted, those that appear first.
        num_other_texts: Number of all texts that do not represent a number, over all records.
        minimum: Smallest finite number in training records.
        maximum: Largest finite number in training records.
        count_by_number: Number of occurrences of each number in training records. Integers that float64 would round are
            ints. None if there are more than `MAX_LABELS` different numbers.
        count_by_label: Number of occurrences of each label in training records. None if there are more than
            `MAX_LABELS` different labels.
        is_integer: Whether all numbers in training records are integers.
        has_large_floats: Whether a number in training records is a float of at least 2^53. Each such float is an
            integer, although it may be a measurement.
        origin: A number that is subtracted from all numbers before they are compared with each other, because float64
            would round large integers. 0 if the first number is no such integer.
        order: How the numbers in training records change from row to row.
        num_label_runs: Number of runs of equal labels in successive training records.
    """

    name: str
    form: ValueForm = "number"
    num_readings: int = 0
    num_missing: int = 0
    num_infinite: int = 0
    num_non_numeric: int = 0
    num_leading_zeros: int = 0
    num_other_texts: int = 0
    count_by_other_text: dict[str, int] = field(default_factory=dict)
    minimum: float = np.inf
    maximum: float = -np.inf
    count_by_number: dict[float | int, int] | None = field(default_factory=dict)
    count_by_label: dict[str, int] | None = field(default_factory=dict)
    is_integer: bool = True
    has_large_floats: bool = False
    origin: int = 0
    order: OrderStatistics = field(default_factory=OrderStatistics)
    num_label_runs: int = 0
    _last_label: str | None = None
    _by_record: _Sample = field(default_factory=_Sample)
    _by_reading: _Sample | None = None  # begins when a record may have a second reading
    _largest_row: int = -1

    def add(
        self, values: pa.Array, rows: NDArray[np.int64], is_training: NDArray[np.bool_], file_index: int = 0
    ) -> None:
        """Update the statistics with a batch of M values.

        Args:
            values: M values of the column, in the order of the input.
            rows: (M,) number of the record to which each value belongs.
            is_training: (M,) whether that record is a training record.
            file_index: The number of the file that contains the values, from 0.
        """
        if pa.types.is_null(values.type):  # a batch without any value says nothing about the form
            self.num_missing += len(values)
            return
        form = classify_type(values.type)
        if form in ("time", "other"):  # such columns cannot be features, so nothing is counted
            self.form = form
            return
        # Whether the texts of a column are numbers is known only at the end. Until then they are counted as both
        # numbers and labels.
        are_numbers_counted = form in ("number", "clock", "text")
        if are_numbers_counted:
            numbers, is_other_text = convert_to_numbers(values, "clock" in (form, self.form))
            if form == "text":
                self._add_texts(values, is_other_text, is_training)
            exact_numbers = list_exact_numbers(values, numbers)
            self._add_numbers(numbers, exact_numbers, rows, is_training, int(is_other_text.sum()), file_index)
        # A part of a CSV column of times of day is text if one of its cells is no time.
        self.form = "clock" if "clock" in (form, self.form) and form == "text" else form
        if form not in ("number", "clock"):
            self._add_labels(values, is_training, count_missing=not are_numbers_counted)

    def _add_texts(self, values: pa.Array, is_other_text: NDArray[np.bool_], is_training: NDArray[np.bool_]) -> None:
        """Count the texts that show that a column of M texts contains other things than numbers.

        Args:
            values: M texts.
            is_other_text: (M,) whether the text does not represent a number.
            is_training: (M,) whether the text belongs to a training record.
        """
        self.num_non_numeric += int((is_other_text & is_training).sum())
        self.num_leading_zeros += int((has_leading_zeros(values) & is_training).sum())
        self.num_other_texts += int(is_other_text.sum())
        if is_other_text.any():
            counted = values.filter(pa.array(is_other_text)).value_counts()
            texts, counts = to_python_values(counted.field("values")), counted.field("counts").to_pylist()
            for text, count in zip(map(format_cell, texts), counts, strict=True):
                if text in self.count_by_other_text or len(self.count_by_other_text) < MAX_OTHER_TEXTS:
                    self.count_by_other_text[text] = self.count_by_other_text.get(text, 0) + count

    def _add_numbers(
        self,
        numbers: NDArray[np.float64],
        exact_numbers: NDArray[Any] | None,
        rows: NDArray[np.int64],
        is_training: NDArray[np.bool_],
        num_other_texts: int,
        file_index: int,
    ) -> None:
        """Update the statistics of numbers with a batch of M values, which were converted to numbers.

        Args:
            numbers: (M,) numbers. NaN stands for a missing value or for a text that does not represent a number.
            exact_numbers: (M,) the same numbers with all digits of large integers (`list_exact_numbers`), None if
                `numbers` are exact.
            rows: (M,) number of the record to which each number belongs.
            is_training: (M,) whether that record is a training record.
            num_other_texts: How many elements of `numbers` are NaN because of such a text. They are not counted as
                missing.
            file_index: The number of the file that contains the numbers, from 0.
        """
        # Infinite and missing values are counted in all records, everything else in training records only.
        self.num_infinite += int(np.isinf(numbers).sum())
        self.num_missing += int(np.isnan(numbers).sum()) - num_other_texts
        is_usable = is_training & np.isfinite(numbers)
        numbers, rows = numbers[is_usable], rows[is_usable]
        exact_numbers = numbers if exact_numbers is None else exact_numbers[is_usable]
        if not len(numbers):
            return
        first = exact_numbers[0]
        if not self.num_readings and not isinstance(first, float) and abs(first) >= MAX_EXACT_INTEGER:
            self.origin = int(first)
        offsets = _subtract(exact_numbers, self.origin)
        self.num_readings += len(numbers)
        self.order.add(offsets, file_index)
        self.minimum = min(self.minimum, float(numbers.min()))
        self.maximum = max(self.maximum, float(numbers.max()))
        self.is_integer = self.is_integer and bool((numbers == np.round(numbers)).all())
        self.has_large_floats = self.has_large_floats or _has_large_floats(exact_numbers)
        if self.count_by_number is not None:  # None: an earlier batch had too many different numbers
            distinct_numbers, counts = np.unique(exact_numbers, return_counts=True)
            for number, count in zip(distinct_numbers.tolist(), counts.tolist(), strict=True):
                self.count_by_number[number] = self.count_by_number.get(number, 0) + count
                if len(self.count_by_number) > MAX_LABELS:
                    self.count_by_number = None
                    break
        self._add_to_samples(offsets, rows)

    def _add_to_samples(self, numbers: NDArray[np.float64], rows: NDArray[np.int64]) -> None:
        """Merge M readings into the random samples of the column's readings.

        Args:
            numbers: (M,) finite numbers minus `origin`, which `num_readings` counts already.
            rows: (M,) number of the record to which each number belongs.
        """
        has_new_records = rows[0] > self._largest_row and bool((np.diff(rows) > 0).all())
        self._largest_row = max(self._largest_row, int(rows.max()))
        if not has_new_records and self._by_reading is None:
            self._by_reading = self._by_record  # until now, each record has one reading
        self._by_record = self._by_record.add(hash_rows(rows), numbers)
        if self._by_reading is not None:
            # `~`, so that no reading has the hash of a record.
            places = ~np.arange(self.num_readings - len(numbers), self.num_readings)
            self._by_reading = self._by_reading.add(hash_rows(places), numbers)

    def _add_labels(self, values: pa.Array, is_training: NDArray[np.bool_], count_missing: bool) -> None:
        """Update the statistics of labels with a batch of M values.

        Args:
            values: M labels.
            is_training: (M,) whether the label belongs to a training record.
            count_missing: Whether to update the numbers of readings and of missing values. False if `_add_numbers` has
                counted the same values.
        """
        if self.count_by_label is None and not count_missing:
            return
        label_indexes, labels = encode_labels(values)  # the index of a missing value is −1
        is_usable = is_training & (label_indexes >= 0)
        if count_missing:
            self.num_missing += int((label_indexes < 0).sum())
            self.num_readings += int(is_usable.sum())
        if self.count_by_label is None:  # an earlier batch had too many different labels
            return
        used_indexes = label_indexes[is_usable]
        if len(used_indexes):
            is_new_run = int(labels[used_indexes[0]] != self._last_label)
            self.num_label_runs += is_new_run + int((np.diff(used_indexes) != 0).sum())
            self._last_label = labels[used_indexes[-1]]
        counts = np.bincount(label_indexes[is_usable], minlength=len(labels))
        for label, count in zip(labels, counts.tolist(), strict=True):
            if count:
                self.count_by_label[label] = self.count_by_label.get(label, 0) + count
        if len(self.count_by_label) > MAX_LABELS:
            self.count_by_label = None

    def is_numeric(self, kind: FeatureKind | None = None) -> bool:
        """Return whether the values of the column are used as numbers.

        Numbers are, and times of day as seconds since midnight. Texts are used as numbers if they represent numbers.
        A few other texts among them count as missing values of a measurement. So does any number of the texts that
        historians write in place of a value, such as "Bad". Among few different integers they are labels like these.
        Integers with leading zeros, such as "007", are codes or ids.

        Args:
            kind: The kind of the feature, if the user has chosen it. None to infer it.
        """
        if self.form != "text":
            return self.form in ("number", "clock")
        if not self.num_readings:
            return False
        if kind == "continuous":
            return self.num_readings >= self.num_non_numeric
        if self.num_leading_zeros > MAX_SHARE_OF_LEADING_ZEROS * self.num_readings:
            return False
        if not self.num_non_numeric:
            return True
        are_many_numbers = self.count_by_number is None or len(self.count_by_number) > MAX_DISCRETE_NUMBERS
        num_texts = self.num_readings + self.num_non_numeric
        are_few_others = self.num_non_numeric <= MAX_SHARE_OF_OTHER_TEXTS * num_texts
        are_known_others = all(text.strip().lower() in BAD_VALUE_TEXTS for text in self.count_by_other_text)
        are_measured = are_many_numbers or not self.is_integer
        return kind is None and are_measured and (are_few_others or are_known_others)

    @property
    def most_frequent_text(self) -> str:
        """The most frequent text that does not represent a number, empty if there is none."""
        return max(self.count_by_other_text, key=self.count_by_other_text.__getitem__, default="")

    @cached_property
    def record_sample(self) -> tuple[NDArray[np.uint64], NDArray[np.float64]]:
        """The mean of the sampled numbers of some records, in the order of the records' hashes.

        It is complete only when all batches have been added. Two columns of a table have the same records, apart from
        those in which one of them has no number.

        Returns:
            (hashes, means), at most `MAX_LEVEL_READINGS` of each.
        """
        hashes, index = np.unique(self._by_record.hashes, return_inverse=True)
        sums = np.bincount(index, self._by_record.numbers, len(hashes))
        return hashes[:MAX_LEVEL_READINGS], (sums / np.bincount(index, minlength=len(hashes)))[:MAX_LEVEL_READINGS]

    @property
    def levels_of_records(self) -> NDArray[np.float64]:
        """The distinct numbers in the records of `record_sample`, in ascending order."""
        return np.unique(self._by_record.numbers)

    @cached_property
    def sorted_offsets(self) -> NDArray[np.float64]:
        """A random sample of the numbers in training records minus `origin`, in ascending order.

        It is complete only when all batches have been added.
        """
        sample, hashes = self._by_record, self._by_record.hashes
        if self._by_reading is not None and len(np.unique(hashes)) < len(hashes):  # records have several readings
            sample = self._by_reading
        return np.sort(sample.numbers)

    @property
    def sorted_sample(self) -> NDArray[np.float64]:
        """A random sample of the numbers in training records, in ascending order."""
        return self.sorted_offsets + float(self.origin) if self.origin else self.sorted_offsets

    def describe_identifier(self, is_in_time_order: bool) -> str | None:
        """Return why the numbers identify rows instead of measuring something; None if they do not.

        Args:
            is_in_time_order: Whether the rows of the table are known to be in the order of time.
        """
        is_integer = self.is_integer and not self.has_large_floats
        return describe_identifier(self.sorted_offsets, self.order, is_integer, is_in_time_order, self.origin)

    @property
    def number_sample(self) -> NumberSample:
        """The sample of the numbers, in the form in which fill values are searched."""
        return NumberSample(self.name, self.sorted_sample, self.num_readings)


def _subtract(numbers: NDArray[Any], origin: int) -> NDArray[np.float64]:
    """Return N numbers minus an origin as floats; the difference of large integers is exact.

    Args:
        numbers: (N,) floats, 64-bit integers, or int and float objects.
        origin: The number that is subtracted.
    """
    if not origin:
        return numbers.astype(np.float64, copy=False)
    is_in_range = numbers.dtype == np.int64 and abs(origin) < 2**63 and (np.sign(numbers) == np.sign(origin)).all()
    return np.asarray((numbers if is_in_range else numbers.astype(object)) - origin, np.float64)


def _has_large_floats(numbers: NDArray[Any]) -> bool:
    """Return whether some of N numbers are floats of at least 2^53.

    Args:
        numbers: (N,) floats, 64-bit integers, or int and float objects.
    """
    if numbers.dtype == object:
        return any(isinstance(number, float) and abs(number) >= MAX_EXACT_INTEGER for number in numbers)
    return numbers.dtype == np.float64 and bool((np.abs(numbers) >= MAX_EXACT_INTEGER).any())


def has_few_integers(column: ColumnStatistics) -> bool:
    """Return whether the numbers of a column are integers that are so few that they may be labels."""
    counts = column.count_by_number
    return column.is_integer and counts is not None and MIN_GRID_LEVELS <= len(counts) <= MAX_DISCRETE_NUMBERS


def has_ordered_levels(column: ColumnStatistics, others: Iterable[ColumnStatistics]) -> bool:
    """Return whether the few distinct integers of a column are an ordered quantity, and not codes without an order.

    If they are ordered, other columns of the same records change little from one level to the next. Level 4 is then
    more like 5 than like 9. The means of other columns by level are compared in the order of the numbers and in random
    orders. The result is True if neighbouring levels are hardly ever as alike in a random order.

    Columns that follow from the level alone do not count. They can be copies of a code, or groups of codes.

    The cost is bounded: a sample of the records is compared, and at most `MAX_COMPARED_COLUMNS` other columns, chosen
    by a hash of their names. Columns with several readings of a record are compared by their means.

    Args:
        column: The statistics of the column. The result is False if its numbers differ within a record.
        others: The statistics of numeric columns of the table. The column itself is ignored.
    """
    hashes, column_values = column.record_sample
    levels = column.levels_of_records
    if not MIN_GRID_LEVELS <= len(levels) <= MAX_DISCRETE_NUMBERS or not np.isin(column_values, levels).all():
        return False
    rng = np.random.default_rng(0)
    shuffled = np.array([rng.permutation(len(levels)) for _ in range(NUM_LEVEL_ORDERS)])
    orders = np.concatenate([np.arange(len(levels))[None], shuffled])
    roughness = np.zeros(len(orders))
    compared = (other for other in others if other.name != column.name)
    for other in sorted(compared, key=lambda other: zlib.crc32(other.name.encode()))[:MAX_COMPARED_COLUMNS]:
        other_hashes, values = other.record_sample
        _, rows, other_rows = np.intersect1d(hashes, other_hashes, assume_unique=True, return_indices=True)
        if len(rows) < MIN_LEVEL_READINGS:
            continue
        index = np.searchsorted(levels, column_values[rows])
        counts = np.bincount(index, minlength=len(levels))
        # Extreme values count no more than others.
        ranks = np.unique(values[other_rows], return_inverse=True)[1]
        deviation = ranks.std()
        # A column that follows from the level alone is a copy of it, or a group of codes, such as their first digit.
        is_copy = len(np.unique(index * len(ranks) + ranks)) == len(levels)
        if not counts.all() or not deviation > 0 or is_copy:
            continue
        means = np.bincount(index, (ranks - ranks.mean()) / deviation, len(levels)) / counts
        first, second = orders[:, :-1], orders[:, 1:]
        # The variance of a difference of two means is proportional to 1/n + 1/m.
        weights = counts[first] * counts[second] / (counts[first] + counts[second])
        roughness += (weights * (means[first] - means[second]) ** 2).sum(1)
    is_as_smooth = roughness[1:] <= roughness[0] * (1 + 1e-9)
    return bool(roughness[0] > 0 and is_as_smooth.mean() <= MAX_ORDER_P_VALUE)


def hash_rows(rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a pseudo-random 64-bit hash of each row number.

    The hashes select a random sample of rows that is the same in every run.
    """
    return mix_bits(rows.astype(np.uint64))


def find_quantum(sample: NDArray[np.float64], is_integer: bool = False) -> float | None:
    """Return the resolution of a sensor: the step of the coarsest grid on which at least 99.9% of the readings lie.

    A grid is the set of all values a + k · step with a constant a and any integer k.

    Args:
        sample: Readings in ascending order.
        is_integer: Whether all readings are integers.

    Returns:
        The step in the unit of the readings. None if the readings lie on no grid, or if more than 90% of them are
        distinct.
    """
    values, counts = np.unique(sample, return_counts=True)
    if len(values) < 2 or len(values) > 0.9 * len(sample):  # readings on a grid would repeat
        return None
    offsets = values - values[np.argmax(counts)]  # the most frequent reading is certainly on the grid
    # Smaller steps cannot be distinguished from rounding errors of the readings (64 times the spacing of floats).
    rounding_error = 64 * float(np.spacing(np.abs(values).max()))
    min_step = max(1e-9 * float(np.abs(offsets).max()), rounding_error)
    inexact_steps, exact_steps = _list_candidate_steps(values, offsets, min_step, is_integer)
    for step in sorted(inexact_steps | exact_steps, reverse=True):  # the largest step is the coarsest grid
        if step > min_step:
            refined_step = step if step in exact_steps else _refine_step(offsets, step)
            if _is_on_grid(offsets, counts, refined_step):
                return _shorten_step(offsets, counts, refined_step)
    return None


def _list_candidate_steps(
    values: NDArray[np.float64], offsets: NDArray[np.float64], min_step: float, is_integer: bool
) -> tuple[set[float], set[float]]:
    """Return the candidates for the step of the grid on which a sensor reports.

    Args:
        values: Distinct readings in ascending order.
        offsets: The same readings minus a reading that is certainly on the grid.
        min_step: Differences up to this one are rounding errors.
        is_integer: Whether all readings are integers.

    Returns:
        (inexact, exact). Inexact candidates have a rounding error. They are quantiles of the differences between
        neighbouring readings, and simple fractions of the smallest difference. The fractions are needed if readings
        occupy only few points of their grid. Exact candidates are powers of ten, which are usual resolutions, and the
        greatest common divisor of integers.
    """
    gaps = np.diff(values)
    gaps = np.sort(gaps[gaps > min_step])
    if not len(gaps):
        return set(), set()
    quantile_indexes = [int(share * (len(gaps) - 1)) for share in (0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75)]
    gap_quantiles, smallest_gap = gaps[quantile_indexes], gaps[0]
    fractions_of_smallest = smallest_gap / np.array([2, 3, 4, 5, 10])
    inexact_steps = {*gap_quantiles.tolist(), *fractions_of_smallest.tolist()}
    # All powers of ten from the smallest step to the largest gap.
    exponents = np.arange(np.ceil(np.log10(min_step)), np.floor(np.log10(gaps[-1])) + 1)
    exact_steps = set((10.0**exponents).tolist())
    if is_integer:
        integer_offsets = np.abs(offsets[np.abs(offsets) < 2**53]).astype(np.int64)  # larger floats are not exact
        exact_steps.add(float(np.gcd.reduce(integer_offsets)))
    return inexact_steps, exact_steps


def _refine_step(offsets: NDArray[np.float64], step: float) -> float:
    """Return a more precise value of the step of a grid.

    The step s is fitted by least squares to offset ≈ k · s with integers k. The first fit uses only small offsets, for
    which a rough step already gives the right k. Each further fit uses offsets up to four times as large.

    Args:
        offsets: The distinct readings minus a reading that is on the grid.
        step: An approximate step, such as the difference of two neighbouring readings.
    """
    distances, max_distance = np.abs(offsets), 16.0 * step
    while True:
        multiples = np.round(offsets / step)  # k
        is_near_multiple = np.abs(offsets / step - multiples) < 0.1  # leave out readings that are not on the grid
        is_used = (distances <= max_distance) & is_near_multiple
        sum_of_squares = float((multiples[is_used] ** 2).sum())
        if sum_of_squares > 0:
            # Least squares: s = Σ k · offset / Σ k².
            step = float((multiples[is_used] * offsets[is_used]).sum()) / sum_of_squares
        if max_distance >= distances.max():  # this fit used all offsets
            return step
        max_distance *= 4.0


def _is_on_grid(offsets: NDArray[np.float64], counts: NDArray[np.int64], step: float) -> bool:
    """Return whether the readings lie on a grid with the given step.

    At least 99.9% of their offsets must be near to a multiple of the step: at most 5% of the step away from it. If the
    step is too large, several distinct readings are near to the same multiple. Therefore at least 99% of the distinct
    readings must be near to different multiples.

    Args:
        offsets: (V,) the V distinct readings minus a reading that is on the grid.
        counts: (V,) number of occurrences of each distinct reading.
        step: The step of the grid.
    """
    multiples = np.round(offsets / step)
    is_multiple = np.abs(offsets / step - multiples) < 0.05
    has_enough_readings = counts[is_multiple].sum() >= MIN_SHARE_ON_GRID * counts.sum()
    num_different_multiples = len(np.unique(multiples[is_multiple]))
    are_separate = num_different_multiples >= 0.99 * is_multiple.sum()
    return bool(has_enough_readings and are_separate)


def _shorten_step(offsets: NDArray[np.float64], counts: NDArray[np.int64], step: float) -> float:
    """Return the step rounded to as few decimal digits as the readings allow, such as 0.001 for 0.00099999998.

    Args:
        offsets: (V,) the V distinct readings minus a reading that is on the grid.
        counts: (V,) number of occurrences of each distinct reading.
        step: The step of the grid. It is returned unchanged if no shorter number fits the readings.
    """
    for digits in range(1, 8):
        short_step = float(f"{step:.{digits}g}")
        if abs(short_step / step - 1) < 1e-4 and _is_on_grid(offsets, counts, short_step):
            return short_step
    return step


def compute_location_and_scale(sample: NDArray[np.float64]) -> tuple[float, float]:
    """Return the location and the scale by which a measurement is normalised: (value − location) / scale.

    They are the mean and the standard deviation of the readings after clipping to their 0.1% and 99.9% quantiles, which
    limits the effect of extreme readings. A small share of readings that are very far from all others, such as fill
    values, is left out (`MIN_FAR_RATIO`), unless it is 0. If all readings have the same value x, the scale is the
    larger of |x| and 1.

    Args:
        sample: At least one reading, in any order.

    Returns:
        (location, scale) in the unit of the readings. The scale is positive.
    """
    location, scale = _compute_clipped_moments(sample)
    ordered = np.sort(sample)
    main_part = find_main_part(ordered, MAX_FAR_SHARE, MIN_FAR_RATIO)
    if not is_at_rest(ordered, main_part) and main_part != slice(0, len(sample)):
        main_location, main_scale = _compute_clipped_moments(ordered[main_part])
        if scale > MAX_SCALE_RATIO * main_scale:
            return main_location, main_scale
    return location, scale


def _compute_clipped_moments(sample: NDArray[np.float64]) -> tuple[float, float]:
    """Return the location and the scale of readings without regard to values that are far from all others."""
    # If a quantile lies between two readings, it is rounded to the one nearer to the median. So even in a small sample
    # the smallest and the largest reading are clipped to their neighbours.
    low = np.quantile(sample, CLIP_QUANTILES[0], method="higher")
    high = np.quantile(sample, CLIP_QUANTILES[1], method="lower")
    # With very few readings, this rounding may make `low` larger than `high`.
    clipped = np.clip(sample, min(low, high), max(low, high))
    location, scale = _compute_moments(clipped)
    # If clipping has made all readings equal (up to rounding errors), use the readings without clipping.
    if scale <= 1e-12 * float(np.abs(clipped).max()):
        location, scale = _compute_moments(sample)
    are_all_equal = scale <= 1e-300  # practically 0, so it cannot be a divisor
    return location, max(abs(location), 1.0) if are_all_equal else scale


def _compute_moments(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean and the standard deviation of at least one number."""
    divisor = get_overflow_divisor(values)
    scaled = values / divisor
    return float(scaled.mean()) * divisor, float(scaled.std()) * divisor


@dataclass(frozen=True, slots=True)
class ExcludedColumn:
    """A column that is not used as a feature.

    Attributes:
        name: Name of the column.
        reason: Why it is not used, as text for the user.
        has_unsuitable_values: Whether that is because of its values, and not because of its name or an option.
    """

    name: str
    reason: str
    has_unsuitable_values: bool = False


def infer_feature(
    column: ColumnStatistics,
    chosen_kind: FeatureKind | None,
    is_context: bool,
    period: float | None = None,
    is_in_time_order: bool = False,
    others: Iterable[ColumnStatistics] = (),
) -> Feature | ExcludedColumn:
    """Decide whether a column is a measurement, a label or no feature.

    Args:
        column: The statistics of its values.
        chosen_kind: The kind that the user has chosen with `--discrete` or `--continuous`. None to infer it.
        is_context: Whether the feature only helps to predict others and is never scored itself (`--context`).
        period: The period that the user has given with `--cycle`. None if the values are not positions on a cycle.
        is_in_time_order: Whether the rows of the table are known to be in the order of time.
        others: The statistics of the numeric columns of the table that are no identifiers, which show whether few
            integers are ordered.

    Returns:
        The feature; or the column with the reason if it cannot be a feature.

    Raises:
        ConfigError: The values do not fit the user's choice.
    """
    if period is not None:
        return _create_cyclic_feature(column, is_context, period)
    option = f"--{chosen_kind} {column.name}"
    if column.form in ("time", "other"):
        if chosen_kind:
            raise ConfigError(
                f"{option}: the values of the column are neither numbers nor labels; "
                "convert them to numbers or texts, or remove the option"
            )
        is_time = column.form == "time"
        return ExcludedColumn(column.name, "times are no features" if is_time else "neither numbers nor labels")
    has_labels = column.count_by_label is None or bool(column.count_by_label)  # None: too many to count
    if not column.num_readings and (column.form == "clock" or not has_labels):
        return ExcludedColumn(column.name, "no values in the training rows")
    if column.form == "clock":
        if chosen_kind == "discrete":
            raise ConfigError(f"{option}: times of day are no labels; remove the column from the option --discrete")
        if chosen_kind is None:
            reason = "time of day, a cycle of 24 h: context for the other features"
            return replace(_create_continuous(column, is_context=True, reason=reason), period=SECONDS_PER_DAY)
    if chosen_kind == "continuous":
        if column.form == "boolean":
            raise ConfigError(f"{option}: the column contains true and false, no numbers; remove it from the option")
        if not column.is_numeric(chosen_kind):
            raise ConfigError(
                f"{option}: the column contains texts that are not numbers, such as {column.most_frequent_text!r}; "
                "remove it from the option --continuous or correct its values"
            )
        return _create_continuous(column, is_context, "chosen by an option")
    if not column.is_numeric(chosen_kind):
        return _infer_from_text(column, chosen_kind, is_context, is_in_time_order)
    if chosen_kind == "discrete":
        if column.count_by_number is None:
            raise ConfigError(
                f"{option}: the column has more than {MAX_LABELS} distinct numbers, which are too many for labels; "
                "remove it from the option --discrete, or add it to --exclude"
            )
        return _create_discrete(column, is_context, "chosen by an option")
    if not is_context:  # a column that the user has named for any purpose is used
        identity = column.describe_identifier(is_in_time_order)
        if identity is not None:
            return ExcludedColumn(column.name, f"{identity}; --continuous {column.name} trains on it")
    return _infer_from_numbers(column, is_context, others)


def _create_cyclic_feature(column: ColumnStatistics, is_context: bool, period: float) -> Feature | ExcludedColumn:
    """Return a measurement whose values are positions on a cycle, as the option `--cycle` requests.

    Args:
        column: The statistics of the values.
        is_context: Whether the feature only helps to predict others and is never scored itself.
        period: The period of the cycle, in the unit of the values.

    Returns:
        The feature; or the column with the reason if training records have no values of it.

    Raises:
        ConfigError: The values are not numbers, or extend over too many periods.
    """
    option = f"--cycle {column.name}={period:g}"
    if not column.is_numeric("continuous"):
        raise ConfigError(
            f"{option}: the values of the column are not numbers; convert them to numbers, or remove the option"
        )
    if not column.num_readings:
        return ExcludedColumn(column.name, "no values in the training rows")
    feature = _create_continuous(column, is_context, "chosen by an option")
    if feature.scale > MAX_PERIODS_PER_SCALE * period:  # the scale is the standard deviation of the values
        raise ConfigError(
            f"{option}: the values of the column spread over more than {MAX_PERIODS_PER_SCALE:g} periods; "
            "give the period in the same unit as the values"
        )
    return replace(feature, period=period)


def is_measured(column: ColumnStatistics, is_in_time_order: bool) -> bool:
    """Return whether a column consists of numbers that identify no rows.

    Args:
        column: The statistics of the column.
        is_in_time_order: Whether the rows of the table are known to be in the order of time.
    """
    if not column.is_numeric() or not column.num_readings:
        return False
    return column.describe_identifier(is_in_time_order) is None


def check_old_feature(old: Feature, column: ColumnStatistics) -> None:
    """Check that a column's values fit a feature of the old model, which is adapted to a new table (`--init-from`).

    Args:
        old: The feature of the old model.
        column: The statistics of the new table's column of the same name.

    Raises:
        ConfigError: The column contains text instead of numbers, or none of the labels of the old model.
    """
    has_values = column.num_readings or column.num_non_numeric
    if old.kind == "continuous" and has_values and not column.is_numeric(old.kind):
        raise ConfigError(
            f"--init-from: {old.name} is a measurement in the old model, but text in the new table; "
            "rename the column in the new table, so that it becomes a new feature"
        )
    if old.kind == "discrete":
        # New labels are allowed, but at least one must be known to the old model.
        numbers_as_labels = {format_label(number) for number in column.count_by_number or ()}
        new_labels = numbers_as_labels | set(column.count_by_label or ())
        if new_labels and not new_labels & set(old.labels):
            raise ConfigError(
                f"--init-from: no value of {old.name} is a label of the old model ({', '.join(old.labels[:5])}); "
                "rename the column in the new table, so that it becomes a new feature"
            )


def _infer_from_numbers(column: ColumnStatistics, is_context: bool, others: Iterable[ColumnStatistics]) -> Feature:
    """Return the feature of a numeric column for which the user has not chosen a kind.

    It is a label if there are few distinct numbers that occur often, otherwise a measurement. Fractional numbers on an
    even grid are measurements of a coarse sensor, even if there are few distinct ones. So are integers whose order
    other columns follow (`has_ordered_levels`).

    Args:
        column: The statistics of the numbers.
        is_context: Whether the feature only helps to predict others and is never scored itself.
        others: The statistics of the numeric columns of the table that are no identifiers.
    """
    # Distinct numbers are counted up to MAX_LABELS only.
    num_distinct = len(column.count_by_number) if column.count_by_number is not None else MAX_LABELS + 1
    if num_distinct == 1:
        return _create_discrete(column, is_context, "always the same number")
    quantum = find_quantum(column.sorted_sample, column.is_integer)  # the step of the grid, if there is one
    is_on_grid = quantum is not None and num_distinct >= MIN_GRID_LEVELS
    occur_often = column.num_readings >= MIN_READINGS_PER_LABEL * num_distinct
    are_few = num_distinct <= MAX_DISCRETE_NUMBERS and occur_often
    are_ordered = is_on_grid and (not column.is_integer or (are_few and has_ordered_levels(column, others)))
    if are_few and not are_ordered:
        return _create_discrete(column, is_context, f"numbers with only {num_distinct} distinct values")
    grid = f"numbers on a grid of {quantum:g}" if quantum is not None else "numbers"
    if are_few and column.is_integer:
        grid = f"{num_distinct} ordered levels: {grid}"
    note = _describe_distribution(column.sorted_sample) + describe_trend(column.order)
    return _create_continuous(column, is_context, grid + note)


def _describe_distribution(sample: NDArray[np.float64]) -> str:
    """Return a note for the user about a very frequent value and about extreme values; empty if there are none.

    The note is appended to the reason why the column is a measurement, so it begins with a comma.

    Args:
        sample: At least one reading, in any order.
    """
    values, counts = np.unique(sample, return_counts=True)
    location, scale = compute_location_and_scale(sample)  # mean and standard deviation without extreme values
    note = ""
    if counts.max() >= FREQUENT_SHARE * len(sample):
        note += f", {counts.max() / len(sample):.0%} of them {values[np.argmax(counts)]:g}"
    # Values are normalised linearly up to LINEAR_LIMIT standard deviations, and logarithmically beyond.
    if np.abs(sample - location).max() > LINEAR_LIMIT * scale:
        note += f", tails beyond {LINEAR_LIMIT:g} standard deviations are logarithmic"
    return note


def _infer_from_text(
    column: ColumnStatistics, chosen_kind: FeatureKind | None, is_context: bool, is_in_time_order: bool
) -> Feature | ExcludedColumn:
    """Return the discrete feature of a column of texts or booleans, or the reason why the column is excluded.

    A column is excluded if it has too many distinct texts, or texts that are too long for labels. Unless the user has
    named it, it is also excluded if new records will have other texts. These are identifiers and remarks (more than
    half of the texts are distinct), dates, and numbers of batches (no text is repeated later).

    Args:
        column: The statistics of the values.
        chosen_kind: "discrete" if the user has chosen it, None otherwise.
        is_context: Whether the feature only helps to predict others and is never scored itself.
        is_in_time_order: Whether the rows of the table are known to be in the order of time.

    Raises:
        ConfigError: The user has chosen the kind, and there are too many distinct texts, or they are too long.
    """
    if column.count_by_label is None:  # there are too many distinct texts to count them
        if chosen_kind:
            raise ConfigError(
                f"--discrete {column.name}: the column has more than {MAX_LABELS} distinct texts; "
                "replace rare texts by a common one such as 'other', or add the column to --exclude"
            )
        return ExcludedColumn(column.name, f"more than {MAX_LABELS} distinct texts{_describe_ambiguity(column)}")
    if any(len(label) > MAX_NAME_CHARS for label in column.count_by_label):
        if chosen_kind:
            raise ConfigError(
                f"--discrete {column.name}: the column has texts of more than {MAX_NAME_CHARS:,} characters, which are "
                "too long for labels; shorten them, or add the column to --exclude"
            )
        return ExcludedColumn(column.name, f"texts of more than {MAX_NAME_CHARS:,} characters are no labels")
    num_texts = sum(column.count_by_label.values())
    # Fewer texts than MIN_READINGS_PER_LABEL do not show whether texts repeat.
    are_mostly_distinct = num_texts >= MIN_READINGS_PER_LABEL and len(column.count_by_label) > num_texts / 2
    if not chosen_kind and are_mostly_distinct:
        reason = f"most texts occur once: an identifier or a remark{_describe_ambiguity(column)}"
        return ExcludedColumn(column.name, reason)
    if column.form == "boolean":
        return _create_discrete(column, is_context, "boolean")
    if not chosen_kind and not is_context:
        option = f"--discrete {column.name} trains on it"
        if all(_DATE.fullmatch(label) for label in column.count_by_label):
            return ExcludedColumn(column.name, f"texts of dates are no features; {option}")
        comes_back = column.num_label_runs > len(column.count_by_label)
        if is_in_time_order and not comes_back and len(column.count_by_label) >= MIN_RISES:
            return ExcludedColumn(column.name, f"no text comes back: looks like the number of a batch; {option}")
    return _create_discrete(column, is_context, "chosen by an option" if chosen_kind else "text")


def _describe_ambiguity(column: ColumnStatistics) -> str:
    """Return a remark if the texts of a column may be numbers such as "1,234", whose comma has two meanings."""
    text = column.most_frequent_text
    return f"; {text!r} may be a number: add --decimal , or --decimal ." if _AMBIGUOUS_NUMBER.fullmatch(text) else ""


def _create_continuous(column: ColumnStatistics, is_context: bool, reason: str) -> Feature:
    """Return a continuous feature whose location, scale and resolution are estimated from the column's sample.

    Args:
        column: The statistics of the numbers, of which there is at least one.
        is_context: Whether the feature only helps to predict others and is never scored itself.
        reason: Why the column is a measurement, as text for the user.
    """
    location, scale = compute_location_and_scale(column.sorted_sample)
    return Feature(
        column.name,
        "continuous",
        is_context,
        location=location,
        scale=scale,
        quantum=find_quantum(column.sorted_sample, column.is_integer),
        low=column.minimum,
        high=column.maximum,
        reason=reason,
    )


def _create_discrete(column: ColumnStatistics, is_context: bool, reason: str) -> Feature:
    """Return a discrete feature with the labels that occur in training records.

    Args:
        column: The statistics of the labels, or of the numbers that are labels.
        is_context: Whether the feature only helps to predict others and is never scored itself.
        reason: Why the column is a label, as text for the user.
    """
    if column.is_numeric("discrete"):
        sorted_counts = sorted((column.count_by_number or {}).items())
        count_by_label = {format_label(number): count for number, count in sorted_counts}
    else:
        count_by_label = dict(sorted((column.count_by_label or {}).items()))
    num_readings = sum(count_by_label.values())
    # Laplace's rule of succession: after n readings, a label that never occurred has the probability 1 / (n + 2).
    unseen_probability = float(np.clip(1.0 / (num_readings + 2), 1e-6, 1e-2))
    labels = tuple(count_by_label)
    return Feature(column.name, "discrete", is_context, labels=labels, unseen=unseen_probability, reason=reason)
