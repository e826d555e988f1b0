"""Infer the kind of each feature from streamed statistics of its values.

A feature is a measurement (continuous) or a label (discrete). A measurement also has a resolution (the step of the grid
on which a sensor reports) and perhaps the period of a cycle. The reason for each decision is kept as text, because the
user reads it in the table that `deformer-train` prints. Kinds are inferred from training records only, so that
calibration and validation records stay unseen; missing and infinite values are counted over all records.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from deformer_stream.errors import ConfigError
from deformer_stream.model.schema import (
    LINEAR_LIMIT,
    MAX_PERIODS_PER_SCALE,
    SECONDS_PER_DAY,
    Feature,
    FeatureKind,
    format_label,
)
from trainer.tables import ValueForm, classify_type, encode_labels, parse_numbers

MAX_SAMPLE = 20_000
"""Readings of a column that are kept as a sample. Its mean and standard deviation have an error of about 0.5%."""

MAX_LABELS = 1000
"""Largest number of distinct labels of a discrete feature."""

MAX_DISCRETE_NUMBERS = 10
"""A numeric column with at most this many distinct values may be discrete, if each of them occurs often."""

MIN_READINGS_PER_LABEL = 20
"""Mean number of readings of each distinct value from which values count as occurring often."""

MIN_GRID_LEVELS = 5
"""Fractional numbers on an even grid of at least this many levels come from a coarse sensor, so they stay
continuous."""

MIN_SHARE_ON_GRID = 0.999
"""Share of the readings that must be multiples of a step for it to be the resolution."""

FREQUENT_SHARE = 0.2
"""Share of the readings from which a single value is mentioned as frequent."""

CLIP_QUANTILES = (0.001, 0.999)
"""Readings are clipped to these quantiles before mean and standard deviation are computed, so that a few extreme values
do not compress all others."""


@dataclass
class ColumnStatistics:
    """Statistics of one column that are updated batch by batch in a single pass.

    The sample consists of the `MAX_SAMPLE` readings whose row numbers have the smallest hashes. Therefore it depends
    neither on the table's layout nor on the size of the batches.

    Attributes:
        name: Name of the column or feature.
        form: The form of its values.
        num_readings: Number of finite values or labels in training records.
        num_missing: Number of nulls and NaN, over all records.
        num_infinite: Number of infinite numbers, over all records.
        num_non_numeric: Number of texts in training records that are no numbers.
        minimum: Smallest number in training records.
        maximum: Largest number in training records.
        count_by_number: Number of occurrences of each number. None if there are more than `MAX_LABELS` numbers.
        count_by_label: Number of occurrences of each label. None if there are more than `MAX_LABELS` labels.
        is_integer: Whether all numbers are integers.
        has_numbers_as_text: Whether texts may be numbers, as in the long layout.
    """

    name: str
    form: ValueForm = "number"
    num_readings: int = 0
    num_missing: int = 0
    num_infinite: int = 0
    num_non_numeric: int = 0
    minimum: float = np.inf
    maximum: float = -np.inf
    count_by_number: dict[float, int] | None = field(default_factory=dict)
    count_by_label: dict[str, int] | None = field(default_factory=dict)
    is_integer: bool = True
    has_numbers_as_text: bool = False
    _row_hashes: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    _sample: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    def add(self, values: pa.Array, rows: NDArray[np.int64], is_training: NDArray[np.bool_], parse_text: bool) -> None:
        """Add a batch of M values.

        Args:
            values: M values of the column.
            rows: (M,) row of the training matrix to which each value belongs.
            is_training: (M,) whether the record is a training record.
            parse_text: Whether texts may be numbers, because the column holds the values of several features.
        """
        if pa.types.is_null(values.type):
            self.num_missing += len(values)
            return
        form, self.has_numbers_as_text = classify_type(values.type), parse_text
        if form in ("time", "other"):
            self.form = form
            return
        if form in ("number", "clock") or (form == "text" and parse_text):
            numbers, is_other_text = parse_numbers(values)
            self.num_non_numeric += int((is_other_text & is_training).sum())
            self._add_numbers(numbers, rows, is_training, int(is_other_text.sum()))
        self.form = form
        if form not in ("number", "clock"):
            self._add_labels(values, is_training, count_missing=not parse_text)

    def _add_numbers(
        self,
        numbers: NDArray[np.float64],
        rows: NDArray[np.int64],
        is_training: NDArray[np.bool_],
        num_other_texts: int,
    ) -> None:
        """Add M numbers, NaN if missing.

        `num_other_texts` of them are NaN because they are texts that are no numbers.
        """
        self.num_infinite += int(np.isinf(numbers).sum())
        self.num_missing += int(np.isnan(numbers).sum()) - num_other_texts
        usable = is_training & np.isfinite(numbers)
        numbers, rows = numbers[usable], rows[usable]
        if not len(numbers):
            return
        self.num_readings += len(numbers)
        self.minimum = min(self.minimum, float(numbers.min()))
        self.maximum = max(self.maximum, float(numbers.max()))
        self.is_integer = self.is_integer and bool((numbers == np.round(numbers)).all())
        if self.count_by_number is not None:
            for number, count in zip(*np.unique(numbers, return_counts=True), strict=True):
                self.count_by_number[float(number)] = self.count_by_number.get(float(number), 0) + int(count)
                if len(self.count_by_number) > MAX_LABELS:
                    self.count_by_number = None
                    break
        self._add_to_sample(numbers, rows)

    def _add_to_sample(self, numbers: NDArray[np.float64], rows: NDArray[np.int64]) -> None:
        """Keep the readings with the smallest row hashes among the sample and M new readings."""
        hashes = hash_rows(rows)
        if len(self._row_hashes) == MAX_SAMPLE:
            can_enter = hashes < self._row_hashes.max()
            hashes, numbers = hashes[can_enter], numbers[can_enter]
        hashes = np.concatenate([self._row_hashes, hashes])
        numbers = np.concatenate([self._sample, numbers])
        if len(hashes) > MAX_SAMPLE:
            kept = np.argpartition(hashes, MAX_SAMPLE - 1)[:MAX_SAMPLE]
            hashes, numbers = hashes[kept], numbers[kept]
        self._row_hashes, self._sample = hashes, numbers

    def _add_labels(self, values: pa.Array, is_training: NDArray[np.bool_], count_missing: bool) -> None:
        """Add M labels. `count_missing` is false if readings and missing values were counted as numbers already."""
        codes, labels = encode_labels(values)
        if count_missing:
            self.num_missing += int((codes < 0).sum())
            self.num_readings += int((is_training & (codes >= 0)).sum())
        if self.count_by_label is None:
            return
        counts = np.bincount(codes[is_training & (codes >= 0)], minlength=len(labels))
        for label, count in zip(labels, counts.tolist(), strict=True):
            if count:
                self.count_by_label[label] = self.count_by_label.get(label, 0) + count
        if len(self.count_by_label) > MAX_LABELS:
            self.count_by_label = None

    @property
    def is_numeric(self) -> bool:
        """Whether all readings are numbers, perhaps written as text, or times of day."""
        has_only_number_texts = self.has_numbers_as_text and self.num_readings > 0 and not self.num_non_numeric
        return self.form in ("number", "clock") or (self.form == "text" and has_only_number_texts)

    @property
    def sorted_sample(self) -> NDArray[np.float64]:
        """The sampled readings in ascending order."""
        return np.sort(self._sample)


def hash_rows(rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a pseudo-random 64-bit hash of each row number.

    This is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014).
    """
    with np.errstate(over="ignore"):
        x = rows.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def find_quantum(sample: NDArray[np.float64], is_integer: bool = False) -> float | None:
    """Find the resolution of a sensor: the largest step of which at least 99.9% of the readings are multiples.

    Candidates are tried in descending order: differences between neighbouring values; simple fractions of the smallest
    differences, because readings may be sparse on their grid; powers of ten; and for integers their greatest common
    divisor.

    Args:
        sample: Readings in ascending order.
        is_integer: Whether all readings are integers.

    Returns:
        The step, or None if readings seldom repeat or lie on no grid.
    """
    values, counts = np.unique(sample, return_counts=True)
    if len(values) < 2 or len(values) > 0.9 * len(sample):
        return None
    offsets = values - values[np.argmax(counts)]  # the most frequent reading is certainly on the grid
    rounding_error = 64 * float(np.spacing(np.abs(values).max()))
    min_step = max(1e-9 * float(np.abs(offsets).max()), rounding_error)
    gaps = np.diff(values)
    gaps = np.sort(gaps[gaps > min_step])
    if not len(gaps):
        return None
    gap_quantiles = gaps[[int(share * (len(gaps) - 1)) for share in (0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75)]]
    measured_steps = {*gap_quantiles.tolist(), *(gap_quantiles[0] / np.array([2, 3, 4, 5, 10])).tolist()}
    exponents = np.arange(np.ceil(np.log10(min_step)), np.floor(np.log10(gaps[-1])) + 1)
    exact_steps = set((10.0**exponents).tolist())
    if is_integer:
        integer_offsets = np.abs(offsets[np.abs(offsets) < 2**53]).astype(np.int64)
        exact_steps.add(float(np.gcd.reduce(integer_offsets)))
    for step in sorted(measured_steps | exact_steps, reverse=True):
        if step > min_step:
            refined = step if step in exact_steps else _refine_step(offsets, step)
            if _is_on_grid(offsets, counts, refined):
                return _shorten_step(offsets, counts, refined)
    return None


def _refine_step(offsets: NDArray[np.float64], step: float) -> float:
    """Return a more precise step, fitted by least squares to multiples over ever wider spans.

    Args:
        offsets: Distances of the distinct readings from a reading on the grid.
        step: The difference of two neighbouring readings, which has a rounding error.
    """
    distances, span = np.abs(offsets), 16.0 * step
    while True:
        multiples = np.round(offsets / step)
        is_used = (distances <= span) & (np.abs(offsets / step - multiples) < 0.1)
        sum_of_squares = float((multiples[is_used] ** 2).sum())
        if sum_of_squares > 0:
            step = float((multiples[is_used] * offsets[is_used]).sum()) / sum_of_squares
        if span >= distances.max():
            return step
        span *= 4.0


def _is_on_grid(offsets: NDArray[np.float64], counts: NDArray[np.int64], step: float) -> bool:
    """Return whether enough readings are multiples of a step, and distinct readings are distinct multiples.

    Args:
        offsets: Distances of the distinct readings from a reading on the grid.
        counts: Number of occurrences of each distinct reading.
        step: The step of the grid.
    """
    multiples = np.round(offsets / step)
    is_multiple = np.abs(offsets / step - multiples) < 0.05
    has_enough = counts[is_multiple].sum() >= MIN_SHARE_ON_GRID * counts.sum()
    return bool(has_enough and len(np.unique(multiples[is_multiple])) >= 0.99 * is_multiple.sum())


def _shorten_step(offsets: NDArray[np.float64], counts: NDArray[np.int64], step: float) -> float:
    """Return the step with as few decimal digits as the readings allow, such as 0.001 for 0.00099999998."""
    for digits in range(1, 8):
        short_step = float(f"{step:.{digits}g}")
        if abs(short_step / step - 1) < 1e-4 and _is_on_grid(offsets, counts, short_step):
            return short_step
    return step


def compute_location_and_scale(sample: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean and the standard deviation of readings that are clipped to their 0.1% and 99.9% quantiles.

    Quantiles are rounded inwards, so that at least the lowest and the highest reading are clipped to their neighbours.
    If all readings are equal, the scale is their absolute value, and at least 1.
    """
    low = np.quantile(sample, CLIP_QUANTILES[0], method="higher")
    high = np.quantile(sample, CLIP_QUANTILES[1], method="lower")
    clipped = np.clip(sample, min(low, high), max(low, high))
    location, scale = float(clipped.mean()), float(clipped.std())
    if scale <= 1e-12 * float(np.abs(clipped).max()):  # only the clipped readings differ from the others
        location, scale = float(sample.mean()), float(sample.std())
    return location, scale if scale > 1e-300 else max(abs(location), 1.0)


@dataclass(frozen=True, slots=True)
class ExcludedColumn:
    """A column that is no feature, with the reason as text for the user."""

    name: str
    reason: str


def infer_feature(
    column: ColumnStatistics, chosen_kind: FeatureKind | None, is_context: bool, period: float | None = None
) -> Feature | ExcludedColumn:
    """Decide whether a column is a measurement, a label or no feature.

    Args:
        column: The statistics of its values.
        chosen_kind: The kind that the user has chosen. None to infer it.
        is_context: Whether the feature conditions the others and is never scored.
        period: The period that the user has given, if values are positions on a cycle.

    Raises:
        ConfigError: The values do not fit the user's choice.
    """
    if period is not None:
        return _create_cyclic_feature(column, is_context, period)
    option = f"--{chosen_kind} {column.name}"
    if column.form in ("time", "other"):
        if chosen_kind:
            raise ConfigError(f"{option}: its values are neither numbers nor labels; convert the column")
        return ExcludedColumn(
            column.name, "times are no features" if column.form == "time" else "neither numbers nor labels"
        )
    if not column.num_readings and not column.count_by_label:
        return ExcludedColumn(column.name, "no values in the training rows")
    if column.form == "clock":
        if chosen_kind == "discrete":
            raise ConfigError(f"{option}: times of day are no labels; leave it to be inferred")
        if chosen_kind is None:
            reason = "time of day, a cycle of 24 h: context for the other features"
            return replace(_create_continuous(column, is_context=True, reason=reason), period=SECONDS_PER_DAY)
    if chosen_kind == "continuous":
        if not column.is_numeric:
            raise ConfigError(f"{option}: the column holds text; leave it to be inferred")
        return _create_continuous(column, is_context, "chosen by an option")
    if not column.is_numeric:
        return _infer_from_text(column, chosen_kind, is_context)
    if chosen_kind == "discrete":
        if column.count_by_number is None:
            raise ConfigError(f"{option}: more than {MAX_LABELS} distinct values; leave it continuous or exclude it")
        return _create_discrete(column, is_context, "chosen by an option")
    return _infer_from_numbers(column, is_context)


def _create_cyclic_feature(column: ColumnStatistics, is_context: bool, period: float) -> Feature | ExcludedColumn:
    """Return a measurement whose values are positions on a cycle, as the option `--cycle` requests.

    Raises:
        ConfigError: The values are no numbers, or extend over too many periods.
    """
    option = f"--cycle {column.name}={period:g}"
    if not column.is_numeric:
        raise ConfigError(f"{option}: its values are no numbers; convert the column or leave it to be inferred")
    if not column.num_readings:
        return ExcludedColumn(column.name, "no values in the training rows")
    feature = _create_continuous(column, is_context, "chosen by an option")
    if feature.scale > MAX_PERIODS_PER_SCALE * period:
        raise ConfigError(
            f"{option}: its values spread over more than {MAX_PERIODS_PER_SCALE:g} periods; check the unit"
        )
    return replace(feature, period=period)


def check_old_feature(old: Feature, column: ColumnStatistics) -> Feature:
    """Return the feature of the model that is adapted (`--init-from`), if the column's values fit it.

    Raises:
        ConfigError: The column holds text instead of numbers, or no label that the old model was trained on.
    """
    if old.kind == "continuous" and column.num_readings and not column.is_numeric:
        raise ConfigError(f"--init-from: {old.name} is a measurement in the old model and text here; rename the column")
    if old.kind == "discrete":
        new_labels = {format_label(number) for number in column.count_by_number or ()} | set(
            column.count_by_label or ()
        )
        if new_labels and not new_labels & set(old.labels):
            raise ConfigError(
                f"--init-from: no value of {old.name} is a label of the old model ({', '.join(old.labels[:5])}); "
                f"rename the column"
            )
    return old


def _infer_from_numbers(column: ColumnStatistics, is_context: bool) -> Feature:
    """Return a label if there are few distinct numbers that occur often, otherwise a measurement."""
    num_distinct = len(column.count_by_number) if column.count_by_number is not None else MAX_LABELS + 1
    if num_distinct == 1:
        return _create_discrete(column, is_context, "always the same number")
    quantum = find_quantum(column.sorted_sample, column.is_integer)
    is_coarse_sensor = quantum is not None and num_distinct >= MIN_GRID_LEVELS and not column.is_integer
    occur_often = column.num_readings >= MIN_READINGS_PER_LABEL * num_distinct
    if num_distinct <= MAX_DISCRETE_NUMBERS and occur_often and not is_coarse_sensor:
        return _create_discrete(column, is_context, f"numbers with only {num_distinct} distinct values")
    grid = f"numbers on a grid of {quantum:g}" if quantum is not None else "numbers"
    return _create_continuous(column, is_context, grid + _describe_distribution(column.sorted_sample))


def _describe_distribution(sample: NDArray[np.float64]) -> str:
    """Return a note on a very frequent value and on long tails of the readings, empty if there are none.

    Args:
        sample: Readings in ascending order.
    """
    values, counts = np.unique(sample, return_counts=True)
    location, scale = compute_location_and_scale(sample)
    note = ""
    if counts.max() >= FREQUENT_SHARE * len(sample):
        note += f", {counts.max() / len(sample):.0%} of them {values[np.argmax(counts)]:g}"
    if np.abs(sample - location).max() > LINEAR_LIMIT * scale:
        note += f", tails beyond {LINEAR_LIMIT:g} standard deviations are logarithmic"
    return note


def _infer_from_text(
    column: ColumnStatistics, chosen_kind: FeatureKind | None, is_context: bool
) -> Feature | ExcludedColumn:
    """Return a label, or exclude a text column that has too many distinct values to be one.

    Raises:
        ConfigError: The user has chosen a kind, and there are too many distinct texts.
    """
    if column.count_by_label is None:
        if chosen_kind:
            raise ConfigError(f"--discrete {column.name}: more than {MAX_LABELS} distinct texts; group or exclude them")
        return ExcludedColumn(column.name, f"more than {MAX_LABELS} distinct texts")
    num_texts = sum(column.count_by_label.values())
    if not chosen_kind and num_texts >= MIN_READINGS_PER_LABEL and len(column.count_by_label) > num_texts / 2:
        return ExcludedColumn(column.name, "most texts occur once: an identifier or a remark")
    if column.form == "boolean":
        return _create_discrete(column, is_context, "boolean")
    return _create_discrete(column, is_context, "chosen by an option" if chosen_kind else "text")


def _create_continuous(column: ColumnStatistics, is_context: bool, reason: str) -> Feature:
    """Return a measurement whose location, scale and resolution are estimated from the column's sample."""
    location, scale = compute_location_and_scale(column.sorted_sample)
    return Feature(
        column.name,
        "continuous",
        is_context,
        None,
        location,
        scale,
        find_quantum(column.sorted_sample, column.is_integer),
        column.minimum,
        column.maximum,
        reason=reason,
    )


def _create_discrete(column: ColumnStatistics, is_context: bool, reason: str) -> Feature:
    """Return a discrete feature with the labels that occur in training records."""
    if column.is_numeric:
        sorted_counts = sorted((column.count_by_number or {}).items())
        count_by_label = {format_label(number): count for number, count in sorted_counts}
    else:
        count_by_label = dict(sorted((column.count_by_label or {}).items()))
    num_readings = sum(count_by_label.values())
    # Laplace's rule of succession: after n readings the probability of a value never seen before is about 1/(n + 2).
    unseen = float(np.clip(1.0 / (num_readings + 2), 1e-6, 1e-2))
    return Feature(column.name, "discrete", is_context, labels=tuple(count_by_label), unseen=unseen, reason=reason)
