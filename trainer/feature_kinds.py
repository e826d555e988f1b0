"""What kind of feature a column is: streamed statistics, the sensor's resolution, and the reason in words.

Statistics see training rows only (calibration and validation rows must stay unseen); what is refused or missing is
counted over all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from deformer_stream.errors import ConfigError
from deformer_stream.model.schema import DAY, LINEAR, MOST_TURNS, Feature, Kind, label_of
from trainer.tables import ValueForm, encode_labels, classify_type, parse_numbers

SAMPLE = 20_000
"""Readings kept per column: location and scale are known to within about half a percent, exactly for smaller tables."""
MOST_LABELS = 1000
FEW = 10
"""Numbers with at most this many distinct values, each repeated often, are discrete."""
OFTEN = 20
LEVELS = 5
"""Fractions on an even grid of at least this many levels are a coarse sensor, not a code: they stay continuous."""
ON_GRID = 0.999
ATOM = 0.2
"""Share of one value from which on it is said."""
CLIP = (0.001, 0.999)
"""Location and scale are taken between these quantiles, so that a few wild readings do not flatten all others."""


@dataclass
class ColumnStatistics:
    """What one pass over a column finds out.

    readings: finite values or labels in training rows; missing (null or NaN) and infinite: over all rows. low and high:
    range; whole: all numbers are integers. numbers, labels: count of each distinct value, None once there are more than
    `MOST_LABELS`. words: texts that are no numbers; mixed: texts may be numbers. The sample is the `SAMPLE` readings
    whose rows have the smallest hashes, so it does not depend on layout or batches.
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
    _keys: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    _sample: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    def add(self, values: pa.Array, rows: NDArray[np.int64], train: NDArray[np.bool_], parse_text: bool) -> None:
        """values: M readings; rows: (M,) their records; train: (M,) whether they may be looked at.

        mixed: the column holds the values of several features (long layout), so that texts may be numbers.
        """
        if pa.types.is_null(values.type):
            self.num_missing += len(values)
            return
        form, self.has_numbers_as_text = classify_type(values.type), parse_text
        if form in ("time", "other"):
            self.form = form
            return
        if form in ("number", "clock") or (form == "text" and parse_text):
            numbers, bad = parse_numbers(values)
            self.num_non_numeric += int((bad & train).sum())
            self._add_numbers(numbers, rows, train, int(bad.sum()))
        self.form = form
        if form not in ("number", "clock"):
            self._add_labels(values, train, count_missing=not parse_text)

    def _add_numbers(self, x: NDArray[np.float64], rows: NDArray[np.int64], train: NDArray[np.bool_], bad: int) -> None:
        infinite = np.isinf(x)
        self.num_infinite += int(infinite.sum())
        self.num_missing += int(np.isnan(x).sum()) - bad
        use = train & np.isfinite(x)
        x, rows = x[use], rows[use]
        if not len(x):
            return
        self.num_readings += len(x)
        self.minimum, self.maximum = min(self.minimum, float(x.min())), max(self.maximum, float(x.max()))
        self.is_integer = self.is_integer and bool((x == np.round(x)).all())
        if self.count_by_number is not None:
            for value, count in zip(*np.unique(x, return_counts=True), strict=True):
                self.count_by_number[float(value)] = self.count_by_number.get(float(value), 0) + int(count)
                if len(self.count_by_number) > MOST_LABELS:
                    self.count_by_number = None
                    break
        keys = hash_rows(rows)
        if len(self._keys) == SAMPLE:
            near = keys < self._keys.max()
            keys, x = keys[near], x[near]
        keys, x = np.concatenate([self._keys, keys]), np.concatenate([self._sample, x])
        kept = np.argpartition(keys, SAMPLE - 1)[:SAMPLE] if len(keys) > SAMPLE else slice(None)
        self._keys, self._sample = keys[kept], x[kept]

    def _add_labels(self, values: pa.Array, train: NDArray[np.bool_], count_missing: bool) -> None:
        codes, labels = encode_labels(values)
        if count_missing:
            self.num_missing += int((codes < 0).sum())
            self.num_readings += int((train & (codes >= 0)).sum())
        if self.count_by_label is None:
            return
        counts = np.bincount(codes[train & (codes >= 0)], minlength=len(labels))
        for text, count in zip(labels, counts.tolist(), strict=True):
            if count:
                self.count_by_label[text] = self.count_by_label.get(text, 0) + count
        if len(self.count_by_label) > MOST_LABELS:
            self.count_by_label = None

    @property
    def is_numeric(self) -> bool:
        """Whether all readings are numbers, perhaps written as text, or times of day."""
        return self.form in ("number", "clock") or (
            self.form == "text" and self.has_numbers_as_text and self.num_readings > 0 and not self.num_non_numeric
        )

    @property
    def sorted_sample(self) -> NDArray[np.float64]:
        """Sorted readings of the sample."""
        return np.sort(self._sample)


def hash_rows(rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A well-mixed 64-bit hash of row numbers (the finaliser of splitmix64; Steele, Lea and Flood, OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        x = rows.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def find_quantum(sample: NDArray[np.float64], is_integer: bool = False) -> float | None:
    """The resolution of a sensor: the largest step of which at least 99.9% of the readings are multiples.

    sample: sorted readings. None where readings do not clearly repeat or lie on no grid. Candidates, largest first, are
    gaps between neighbouring values, simple fractions of the smallest gaps (readings may be sparse on their grid),
    powers of ten and, for integers (`whole`), their greatest common divisor.
    """
    values, counts = np.unique(sample, return_counts=True)
    if len(values) < 2 or len(values) > 0.9 * len(sample):
        return None
    offsets = values - values[np.argmax(counts)]  # the commonest reading surely lies on the grid
    least = max(1e-9 * float(np.abs(offsets).max()), 64 * float(np.spacing(np.abs(values).max())))
    gaps = np.diff(values)
    gaps = np.sort(gaps[gaps > least])
    if not len(gaps):
        return None
    steps = gaps[[int(share * (len(gaps) - 1)) for share in (0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75)]]
    measured = {*steps.tolist(), *(steps[0] / np.array([2, 3, 4, 5, 10])).tolist()}
    exact = {*(10.0 ** np.arange(np.ceil(np.log10(least)), np.floor(np.log10(gaps[-1])) + 1)).tolist()}
    if is_integer:
        exact.add(float(np.gcd.reduce(np.abs(offsets[np.abs(offsets) < 2**53]).astype(np.int64))))
    for step in sorted(measured | exact, reverse=True):
        if step > least:
            refined = step if step in exact else _refine(offsets, step)
            if _on_grid(offsets, counts, refined):
                return _round(offsets, counts, refined)
    return None


def _refine(offsets: NDArray[np.float64], step: float) -> float:
    """A step measured between two neighbours, fitted by least squares over ever wider spans."""
    size, span = np.abs(offsets), 16.0 * step
    while True:
        k = np.round(offsets / step)
        use = (size <= span) & (np.abs(offsets / step - k) < 0.1)
        if (weight := float((k[use] ** 2).sum())) > 0:
            step = float((k[use] * offsets[use]).sum()) / weight
        if span >= size.max():
            return step
        span *= 4.0


def _on_grid(offsets: NDArray[np.float64], counts: NDArray[np.int64], step: float) -> bool:
    """Whether enough readings are multiples of the step, and different readings different multiples."""
    k = np.round(offsets / step)
    on = np.abs(offsets / step - k) < 0.05
    return bool(counts[on].sum() >= ON_GRID * counts.sum() and len(np.unique(k[on])) >= 0.99 * on.sum())


def _round(offsets: NDArray[np.float64], counts: NDArray[np.int64], step: float) -> float:
    """0.001 rather than 0.00099999998, where the readings allow it."""
    for digits in range(1, 8):
        short = float(f"{step:.{digits}g}")
        if abs(short / step - 1) < 1e-4 and _on_grid(offsets, counts, short):
            return short
    return step


def compute_location_and_scale(sample: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and standard deviation of the readings clipped to their 0.1% and 99.9% quantiles.

    The quantiles are rounded inwards: at least the lowest and the highest reading are clipped to their neighbours.
    """
    low, high = np.quantile(sample, CLIP[0], method="higher"), np.quantile(sample, CLIP[1], method="lower")
    clipped = np.clip(sample, min(low, high), max(low, high))
    location, scale = float(clipped.mean()), float(clipped.std())
    if scale <= 1e-12 * float(np.abs(clipped).max()):  # all the same but for the clipped few
        location, scale = float(sample.mean()), float(sample.std())
    return location, scale if scale > 1e-300 else max(abs(location), 1.0)


@dataclass(frozen=True, slots=True)
class ExcludedColumn:
    """A column that is no feature, and why."""

    name: str
    reason: str


def infer_feature(
    stats: ColumnStatistics, wanted: Kind | None, context: bool, period: float | None = None
) -> Feature | ExcludedColumn:
    """Choose the kind of a feature. period: it is asked to be a cycle. Raises ConfigError where `wanted` cannot be."""
    option = f"--{wanted} {stats.name}"
    if period is not None:
        return _cycle(stats, context, period)
    if stats.form in ("time", "other"):
        if wanted:
            raise ConfigError(f"{option}: its values are neither numbers nor labels; convert the column")
        return ExcludedColumn(stats.name, "times are no features" if stats.form == "time" else "neither numbers nor labels")
    if not stats.num_readings and not stats.count_by_label:
        return ExcludedColumn(stats.name, "no values in the training rows")
    if stats.form == "clock":
        if wanted == "discrete":
            raise ConfigError(f"{option}: times of day are no labels; leave it to be inferred")
        if wanted is None:
            reason = "time of day, a cycle of 24 h: others are judged by it"
            return replace(_continuous(stats, context=True, reason=reason), period=DAY)
    if wanted == "continuous":
        if not stats.is_numeric:
            raise ConfigError(f"{option}: the column holds text; leave it to be inferred")
        return _continuous(stats, context, "asked for")
    if not stats.is_numeric:
        return _text(stats, wanted, context)
    if wanted == "discrete":
        if stats.count_by_number is None:
            raise ConfigError(f"{option}: more than {MOST_LABELS} distinct values; leave it continuous or exclude it")
        return _discrete(stats, context, "asked for")
    return _number(stats, context)


def _cycle(stats: ColumnStatistics, context: bool, period: float) -> Feature | ExcludedColumn:
    """As `--cycle` asks for."""
    option = f"--cycle {stats.name}={period:g}"
    if not stats.is_numeric:
        raise ConfigError(f"{option}: its values are no numbers; convert the column or leave it to be inferred")
    if not stats.num_readings:
        return ExcludedColumn(stats.name, "no values in the training rows")
    feature = _continuous(stats, context, "asked for")
    if feature.scale > MOST_TURNS * period:
        raise ConfigError(f"{option}: its values spread over more than {MOST_TURNS:g} periods; check the unit")
    return replace(feature, period=period)


def check_old_feature(old: Feature, column: ColumnStatistics) -> Feature:
    """The old feature, where the column can be it. Raises ConfigError otherwise."""
    if old.kind == "continuous" and column.num_readings and not column.is_numeric:
        raise ConfigError(f"--init-from: {old.name} is a measurement in the old model and text here; rename the column")
    if old.kind == "discrete":
        known = set(old.labels)
        texts = {label_of(x) for x in column.count_by_number or ()} | set(column.count_by_label or ())
        if texts and not texts & known:
            raise ConfigError(
                f"--init-from: no value of {old.name} is a label the old model knows ({', '.join(old.labels[:5])}); "
                f"rename the column"
            )
    return old


def _number(stats: ColumnStatistics, context: bool) -> Feature:
    distinct = len(stats.count_by_number) if stats.count_by_number is not None else MOST_LABELS + 1
    if distinct == 1:
        return _discrete(stats, context, "always the same number")
    quantum = find_quantum(stats.sorted_sample, stats.is_integer)
    sensor = quantum is not None and distinct >= LEVELS and not stats.is_integer
    if distinct <= FEW and stats.num_readings >= OFTEN * distinct and not sensor:
        return _discrete(stats, context, f"numbers with only {distinct} distinct values")
    grid = f"numbers on a grid of {quantum:g}" if quantum is not None else "numbers"
    return _continuous(stats, context, grid + _shape(stats.sorted_sample))


def _shape(sample: NDArray[np.float64]) -> str:
    """What is unusual about sorted readings, in words: one value that is very frequent, tails that reach far out."""
    values, counts = np.unique(sample, return_counts=True)
    location, scale = compute_location_and_scale(sample)
    words = ""
    if counts.max() >= ATOM * len(sample):
        words += f", {counts.max() / len(sample):.0%} of them {values[np.argmax(counts)]:g}"
    if np.abs(sample - location).max() > LINEAR * scale:
        words += f", tails beyond {LINEAR:g} standard deviations are logarithmic"
    return words


def _text(stats: ColumnStatistics, wanted: Kind | None, context: bool) -> Feature | ExcludedColumn:
    many = stats.count_by_label is None
    if many and wanted:
        raise ConfigError(f"--discrete {stats.name}: more than {MOST_LABELS} distinct texts; group or exclude them")
    if stats.count_by_label is None:
        return ExcludedColumn(stats.name, f"more than {MOST_LABELS} distinct texts")
    total = sum(stats.count_by_label.values())
    if not wanted and total >= OFTEN and len(stats.count_by_label) > total / 2:
        return ExcludedColumn(stats.name, "most texts occur once: an identifier or a remark")
    return _discrete(stats, context, "boolean" if stats.form == "boolean" else "asked for" if wanted else "text")


def _continuous(stats: ColumnStatistics, context: bool, reason: str) -> Feature:
    location, scale = compute_location_and_scale(stats.sorted_sample)
    quantum = find_quantum(stats.sorted_sample, stats.is_integer)
    return Feature(
        stats.name, "continuous", context, None, location, scale, quantum, stats.minimum, stats.maximum, reason=reason
    )


def _discrete(stats: ColumnStatistics, context: bool, reason: str) -> Feature:
    if stats.is_numeric:
        counts = {label_of(value): count for value, count in sorted((stats.count_by_number or {}).items())}
    else:
        counts = dict(sorted((stats.count_by_label or {}).items()))
    # Laplace's rule of succession: after n readings a value never seen before has a chance of about 1/(n + 2).
    unseen = float(np.clip(1.0 / (sum(counts.values()) + 2), 1e-6, 1e-2))
    return Feature(stats.name, "discrete", context, labels=tuple(counts), unseen=unseen, reason=reason)
