"""The anomaly score of records with many readings: cumulative sums of evidence that fade when a fault has gone.

Fisher's combination of all p-values of a record (`conformal`) hardly rises after hundreds of normal readings, however
wrong the next ones are. Cumulative sums (CUSUM; Page, "Continuous inspection schemes", 1954) forget: they fall while
readings are as predicted, never below 0. There are sums of five kinds for each sensor s, and one for the record:

    improbable   S_s ← max(0, S_s + ln κ + (1 − κ) min(−ln p, c))    readings that the model finds improbable
    offset       O_s ← max(0, O_s + ln λ + (1 − λ) min(−ln p', c))   readings that differ from what other sensors imply
    repeated     R_s ← R_s + min(−ln P, d) if the sensor repeats its last value, else 0
    level        L_s ← max(0, L_s + ln κ + (1 − κ) min(−ln p″, c))   readings that are unusual, whatever came before
    step         D_s ← max(0, D_s + ln λ + (1 − λ) min(−ln p‴, c))   unusual steps from the sensor's last value
    record       T   ← max(0, T + ln λ + (1 − λ) min(−ln p, c))      improbable readings of any sensors

A sixth kind of evidence of each sensor is the reading itself, which a sum would count as one reading of many:

    extreme      E   = min(−ln p, e)                                 a single reading that is very improbable

p is the highest-density p-value of the reading (the probability of a value that is at most as likely), and p' is the
same given the readings of the other sensors only. P is the probability of its value at the resolution of the sensor. p″
is its p-value in the distribution of all normal readings of the sensor (`marginals`), and p‴ that of the step from the
previous value of the sensor among its normal steps (`steps`). A sum is updated with each reading of its sensor. A
sensor that is shifted soon becomes predictable from its own readings, which the sum "offset" does not use. A sensor
that is stuck makes all of its readings likely, which only "repeated" sees. If several sensors are shifted from the
beginning of the record, all readings are as the others imply, which only "level" sees. A sensor that jumps at certain
times of each record is hardly predicted by a network with little training. Jumps of another size are seen by "step".

An increment ln κ + (1 − κ)(−ln p) is the logarithm of κ p^(κ − 1), whose mean is 1 if p is uniform (Vovk and Wang,
"E-values: calibration, combination and applications", 2021). The increment of "repeated" is the logarithm of a
likelihood ratio: a stuck sensor repeats its value with a probability of 1. So all sums are in nats, and if the model is
right, a sum exceeds x at a given reading with a probability of the order of e^−x.

The model is not equally right for all sensors. So a sum x is compared with the largest values that it reaches in normal
records. Their tail is described by an exponential distribution, P(largest value ≥ x) = a e^(−(x − u)/b). It is fitted
to training records (`fit_scale`). A record has one sum "record", and as many sums of the other kinds as it has sensors.
The largest of many exceeds a threshold more often than one does. So a constant is added to the statistics −ln P of each
kind. With it, the largest one of a record exceeds −ln s in a share s of the normal records. Without it, the sum of the
record hardly counts beside those of 40 sensors. "extreme" gets a larger constant (`EXTREME_BONUS`), because no other
kind sees a fault in its first reading.

The statistic of a reading is the largest one over the kinds. The largest statistic so far is the anomaly score of the
record. It is calibrated as any other (`conformal.Calibration`), so the false-alarm rate does not depend on these
descriptions.

A reading raises an alert only if it raises the anomaly score. The kind with its largest statistic is the evidence of
the alert (`find_largest_kinds`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.marginals import Marginals
from deformer_stream.calibration.sensor_steps import Steps
from deformer_stream.model.schema import Schema
from deformer_stream.ragged import find_previous_in_group

Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]
Ints = NDArray[np.int64]
Codes = NDArray[np.int8]
Bools = NDArray[np.bool_]

SUM_KINDS = ("improbable", "offset", "repeated")
"""The kinds of sums of each sensor that all scales have, in the order of the state."""

KINDS = (*SUM_KINDS, "extreme", "level", "step")
"""The kinds of evidence of each sensor, in the order of `CusumScale.slopes`."""

EVIDENCE_KINDS = (*KINDS, "record")
"""The kinds of all evidence, in the order of their codes from 0."""

NO_KIND = -1
"""The code for readings that have not raised the anomaly score of their record."""

TIE_TOLERANCE = 1e-4
"""Statistics of one reading that differ by at most this number of nats count as equal, so that rounding does not decide
which kind is the evidence. The sum of the record and a sum "offset" are often equal after the first readings."""

SENSOR_KAPPA = 0.2
"""κ of the sums "improbable" and "level". A sum rises at p-values below κ^(1/(1 − κ)), here 13%."""

OFFSET_KAPPA = RECORD_KAPPA = STEP_KAPPA = 0.1
"""λ of the sums "offset" and "step" and of the sum of the record, which rise at p-values below 8%."""

MAX_SURPRISE = 12.0
"""Largest −ln p that a sum counts, in nats. A single reading adds no more, because tails of models are uncertain."""

MAX_EXTREME = 20.0
"""Largest −ln p of the evidence "extreme", in nats."""

MAX_REPETITION = 5.0
"""Largest increment of the sum "repeated" in nats. Values of sensors without a known resolution have no probability."""

TAIL_SHARE = 0.1
"""Share of the records to whose largest sums the exponential tail is fitted."""

MIN_TAIL_RECORDS = 5
"""Smallest number of records in that tail."""

MIN_FITTED_RECORDS = 20
"""Smallest number of largest sums to which a tail is fitted. A sensor that has fewer gets the tail of all sensors."""

MIN_TAIL_SCALE = 1.0
"""Smallest scale b of a tail, in nats. It is that of a sum if the model is right."""

LEVEL_DISCOUNT = 0.5
"""Factor of the statistics of "level". Readings of a record have similar levels, so the sums of a few normal records
are far larger than the tail that is fitted to the others. They would otherwise set the threshold at a small α."""

BALANCED_SHARE = 0.05
"""The share s of the normal records in which the largest statistic of each kind exceeds −ln s. A usual α is best,
because the kinds then raise equally many false alarms at it."""

EXTREME_BONUS = math.log(2.0)
"""Number of nats that is added to the balanced statistics of "extreme", which then raise about twice as many false
alarms as those of another kind. It finds more faults within their first readings, and costs hardly any later ones."""

NEVER = -1e9
"""Intercept of a kind of evidence that a scale does not have. Its statistic is never the largest."""


@dataclass(frozen=True, slots=True)
class CusumScale:
    """The straight lines that turn the evidence of F sensors and of the record into statistics, intercept + slope · x.

    With the tail a e^(−(x − u)/b), the slope is 1/b, and the intercept −u/b − ln a, plus the constant of the kind.

    Attributes:
        slopes: (6, F) slopes of the evidence of each sensor, a row for each of `KINDS`.
        intercepts: (6, F) their intercepts.
        record_slope: The slope of the sum of the record.
        record_intercept: Its intercept.
        marginals: The distributions of the sensors' readings, for the sums "level", which stay 0 without them.
        steps: The distributions of the sensors' steps, for the sums "step", which stay 0 without them.

    Raises:
        ValueError: The arrays have other shapes, or a number is not finite.
    """

    slopes: Floats
    intercepts: Floats
    record_slope: float
    record_intercept: float
    marginals: Marginals | None = None
    steps: Steps | None = None

    def __post_init__(self) -> None:
        if self.slopes.ndim != 2 or len(self.slopes) != len(KINDS) or self.slopes.shape != self.intercepts.shape:
            raise ValueError(
                f"slopes and intercepts of cumulative sums must be arrays of {len(KINDS)} rows, but have the shapes "
                f"{self.slopes.shape} and {self.intercepts.shape}"
            )
        numbers = [*self.slopes.ravel(), *self.intercepts.ravel(), self.record_slope, self.record_intercept]
        if not np.isfinite(numbers).all():
            raise ValueError("slopes and intercepts of cumulative sums must be finite numbers")
        if self.marginals is not None and len(self.marginals.edges) != self.slopes.shape[1]:
            raise ValueError("the distributions of readings must be those of all sensors")
        if self.steps is not None and len(self.steps.slopes) != self.slopes.shape[1]:
            raise ValueError("the distributions of steps must be those of all sensors")

    @property
    def num_sensors(self) -> int:
        """The number F of sensors."""
        return int(self.slopes.shape[1])

    @staticmethod
    def neutral(num_sensors: int) -> CusumScale:
        """Return the scale that is right if the model is: slopes of 1 and intercepts of 0."""
        shape = len(KINDS), num_sensors
        return CusumScale(np.ones(shape), np.zeros(shape), 1.0, 0.0)

    def to_json(self) -> dict[str, Any]:
        """Return the scale as a JSON object for the manifest of a model directory.

        A kind of evidence that the scale does not have is left out.
        """
        lines: dict[str, Any] = {
            kind: {"slopes": self.slopes[row].tolist(), "intercepts": self.intercepts[row].tolist()}
            for row, kind in enumerate(KINDS)
            if kind in SUM_KINDS or (self.intercepts[row] > NEVER).any()
        }
        if self.marginals is not None:
            lines["marginals"] = self.marginals.to_json()
        if self.steps is not None:
            lines["steps"] = self.steps.to_json()
        return lines | {"record": {"slope": self.record_slope, "intercept": self.record_intercept}}

    @staticmethod
    def from_json(document: dict[str, Any]) -> CusumScale:
        """Return the scale that an object from `to_json` describes.

        Scales of early models do not have the kinds "extreme", "level" and "step". Their statistics are then never the
        largest.

        Raises:
            KeyError: A key is missing.
            ValueError: A value is not valid.
        """
        num_sensors = len(document[KINDS[0]]["slopes"])
        absent = {"slopes": [0.0] * num_sensors, "intercepts": [NEVER] * num_sensors}
        lines = [document[kind] if kind in SUM_KINDS else document.get(kind, absent) for kind in KINDS]
        slopes, intercepts = (np.array([line[name] for line in lines], np.float64) for name in ("slopes", "intercepts"))
        record = document["record"]
        marginals = Marginals.from_json(document["marginals"]) if "marginals" in document else None
        steps = Steps.from_json(document["steps"]) if "steps" in document else None
        return CusumScale(slopes, intercepts, float(record["slope"]), float(record["intercept"]), marginals, steps)


def compute_log_resolutions(schema: Schema) -> Floats:
    """Return ln of the resolution of each sensor (the smallest step between its values) in normalised units, (F,).

    The probability of a value is its density times the resolution. The result is 0 for labels, whose probabilities the
    model gives directly. It is −inf for sensors without a known resolution, of which each repetition then counts as
    `MAX_REPETITION`.
    """
    widths = [
        1.0 if is_discrete else (feature.quantum or 0.0) / feature.scale
        for feature, is_discrete in zip(schema.features, schema.is_discrete.tolist(), strict=True)
    ]
    with np.errstate(divide="ignore"):
        return np.log(np.array(widths, np.float64))


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Where the numbers are in the state of a record with F sensors.

    The numbers of all sensors that belong together are next to each other, in the order of the sensor codes. The
    properties are the index of the first of them. The compiled kernels and saved states have the same order.

    Attributes:
        num_sensors: The number F of sensors.
    """

    num_sensors: int

    @staticmethod
    def of_states(states: Floats32) -> StateLayout:
        """Return the layout of the states of records, (R, W)."""
        return StateLayout((states.shape[1] - 1) // (len(SUM_KINDS) + 3))

    @property
    def improbable(self) -> int:
        """The index of the first sum "improbable"."""
        return SUM_KINDS.index("improbable") * self.num_sensors

    @property
    def offset(self) -> int:
        """The index of the first sum "offset"."""
        return SUM_KINDS.index("offset") * self.num_sensors

    @property
    def repeated(self) -> int:
        """The index of the first sum "repeated"."""
        return SUM_KINDS.index("repeated") * self.num_sensors

    @property
    def last_value(self) -> int:
        """The index of the first last value of a sensor. A last value is infinite before the sensor's first reading."""
        return len(SUM_KINDS) * self.num_sensors

    @property
    def record(self) -> int:
        """The index of the sum of the record, a single number."""
        return self.last_value + self.num_sensors

    @property
    def level(self) -> int:
        """The index of the first sum "level"."""
        return self.record + 1

    @property
    def step(self) -> int:
        """The index of the first sum "step"."""
        return self.level + self.num_sensors

    @property
    def width(self) -> int:
        """The number W of numbers in the state of a record: 6F + 1."""
        return self.step + self.num_sensors


def create_states(num_records: int, num_sensors: int) -> Floats32:
    """Return the states of records without readings, (R, W) float32."""
    layout = StateLayout(num_sensors)
    states = np.zeros((num_records, layout.width), np.float32)
    states[:, layout.last_value : layout.record] = np.inf
    return states


@dataclass(frozen=True, slots=True)
class CusumReadings:
    """The inputs of the cumulative sums: up to L new readings of each of R records, padded.

    Attributes:
        codes: (R, L) sensor codes, any valid code for padding.
        values: (R, L) normalised values or label codes, as the network reads them.
        log_p: (R, L) ln of the highest-density p-value (the probability of a value that is at most as likely), given
            all readings of the context.
        log_p_others: (R, L) the same given the readings of other sensors only; None if it is not computed.
        log_masses: (R, L) ln of the probability of the value at the resolution of the sensor; −inf if that is unknown.
        is_counted: (R, L) false for padding and for readings that are not scored.
        log_p_level: (R, L) ln of the p-value among all normal readings of the sensor; None without `marginals`.
        log_p_step: (R, L) ln of the p-value of the step from the previous value (`find_previous_values`) among the
            normal steps of the sensor; None without `steps`.
    """

    codes: Ints
    values: Floats32
    log_p: Floats
    log_p_others: Floats | None
    log_masses: Floats
    is_counted: Bools
    log_p_level: Floats | None = None
    log_p_step: Floats | None = None


def find_previous_values(states: Floats32, codes: Ints, values: Floats32, is_counted: Bools) -> Floats32:
    """Return the previous counted value of the sensor of each reading, (R, L); infinite if there is none.

    Args:
        states: (R, W) the states of the records before the readings (`StateLayout`), which contain earlier values.
        codes: (R, L) sensor codes of up to L new readings of each record.
        values: (R, L) normalised values or label codes.
        is_counted: (R, L) false for padding and for readings that are not scored.
    """
    layout = StateLayout.of_states(states)
    record, place = np.nonzero(is_counted)
    code = codes[record, place]
    earlier = find_previous_in_group(record * layout.num_sensors + code)
    stored = states[record, layout.last_value + code]
    previous = np.full(codes.shape, np.inf, np.float32)
    previous[record, place] = np.where(earlier >= 0, values[record, place][earlier], stored)
    return previous


def advance_sums(states: Floats32, readings: CusumReadings) -> tuple[Floats, Floats]:
    """Add up to L readings to the sums of R records. The compiled `advance_statistics` computes the same.

    Sums are stored in float32 after each reading, so the result does not depend on how the readings are divided over
    calls.

    Args:
        states: (R, W) the states of the records (`StateLayout`), which are updated.
        readings: The readings.

    Returns:
        First (6, R, L): the evidence of the reading's sensor after each reading, a row for each of `KINDS`. Second
        (R, L): the sum of the record. Both are undefined for readings that are not counted.
    """
    num_records, num_readings = readings.codes.shape
    layout = StateLayout.of_states(states)
    sum_places = (layout.improbable, layout.offset, layout.repeated, layout.level, layout.step)
    sum_kinds = [KINDS.index(kind) for kind in ("improbable", "offset", "repeated", "level", "step")]
    sensor_sums = np.zeros((len(KINDS), num_records, num_readings))
    record_sums = np.zeros((num_records, num_readings))
    sensor_bets = compute_increments(readings.log_p, SENSOR_KAPPA)
    record_bets = compute_increments(readings.log_p, RECORD_KAPPA)
    log_p_others = np.zeros_like(readings.log_p) if readings.log_p_others is None else readings.log_p_others
    offset_bets = compute_increments(log_p_others, OFFSET_KAPPA)
    log_p_level = np.zeros_like(readings.log_p) if readings.log_p_level is None else readings.log_p_level
    level_bets = compute_increments(log_p_level, SENSOR_KAPPA)
    log_p_step = np.zeros_like(readings.log_p) if readings.log_p_step is None else readings.log_p_step
    step_bets = compute_increments(log_p_step, STEP_KAPPA)
    repetitions = np.clip(-readings.log_masses, 0.0, MAX_REPETITION)
    sensor_sums[KINDS.index("extreme")] = np.clip(-readings.log_p, 0.0, MAX_EXTREME)
    for column in range(num_readings):
        rows = np.flatnonzero(readings.is_counted[:, column])
        code, value = readings.codes[rows, column], readings.values[rows, column]
        improbable = np.maximum(states[rows, layout.improbable + code] + sensor_bets[rows, column], 0.0)
        offset = np.maximum(states[rows, layout.offset + code] + offset_bets[rows, column], 0.0)
        is_repeated = states[rows, layout.last_value + code] == value
        repeated = np.where(is_repeated, states[rows, layout.repeated + code] + repetitions[rows, column], 0.0)
        level = np.maximum(states[rows, layout.level + code] + level_bets[rows, column], 0.0)
        step = np.maximum(states[rows, layout.step + code] + step_bets[rows, column], 0.0)
        record = np.maximum(states[rows, layout.record] + record_bets[rows, column], 0.0).astype(np.float32)
        for place, kind, sums in zip(sum_places, sum_kinds, (improbable, offset, repeated, level, step), strict=True):
            sums_to_store = sums.astype(np.float32)
            states[rows, place + code] = sums_to_store
            sensor_sums[kind, rows, column] = sums_to_store
        states[rows, layout.last_value + code] = value
        states[rows, layout.record] = record
        record_sums[rows, column] = record
    return sensor_sums, record_sums


def compute_increments(log_p: Floats, kappa: float) -> Floats:
    """Return the increments of a sum at p-values p, ln κ + (1 − κ) min(−ln p, c), of the same shape."""
    surprise = np.clip(-log_p, 0.0, MAX_SURPRISE)  # rounding can make ln p positive
    return np.asarray(math.log(kappa) + (1.0 - kappa) * surprise)


def compute_statistics(scale: CusumScale, codes: Ints, sensor_sums: Floats, record_sums: Floats) -> Floats:
    """Return the statistic of each reading, (R, L); larger is more anomalous.

    Args:
        scale: The lines that turn sums into statistics.
        codes: (R, L) sensor codes.
        sensor_sums: (6, R, L) the evidence of each reading's sensor after the reading (`advance_sums`).
        record_sums: (R, L) the sums of the records after each reading.
    """
    return np.asarray(compute_statistics_by_kind(scale, codes, sensor_sums, record_sums).max(0))


def compute_statistics_by_kind(scale: CusumScale, codes: Ints, sensor_sums: Floats, record_sums: Floats) -> Floats:
    """Return the statistic of each kind of evidence, (7, R, L), a row for each of `EVIDENCE_KINDS`.

    The arguments are those of `compute_statistics`.
    """
    sensor_statistics = scale.intercepts[:, codes] + scale.slopes[:, codes] * sensor_sums
    record_statistics = scale.record_intercept + scale.record_slope * record_sums
    return np.concatenate([sensor_statistics, record_statistics[None]])


def find_largest_kinds(statistics_by_kind: Floats) -> Codes:
    """Return the code of the kind with the largest statistic, (R, L); the first one of those that count as equal.

    Args:
        statistics_by_kind: (7, R, L) the statistics of each reading (`compute_statistics_by_kind`).
    """
    is_largest = statistics_by_kind >= statistics_by_kind.max(0) - TIE_TOLERANCE
    return np.asarray(is_largest.argmax(0), np.int8)


def fit_scale(
    largest_sums: Floats,
    largest_record_sums: Floats,
    has_readings: Bools,
    marginals: Marginals | None = None,
    steps: Steps | None = None,
) -> CusumScale:
    """Fit the tails of the largest evidence in N normal records, and balance the kinds.

    A sensor with readings in fewer than `MIN_FITTED_RECORDS` of them gets the tail of all sensors. If there are fewer
    records, the kinds are not balanced.

    Args:
        largest_sums: (6, N, F) the largest evidence of each kind over the readings of a record.
        largest_record_sums: (N,) the largest value of the sum of the record.
        has_readings: (N, F) whether the sensor has readings in the record.
        marginals: The distributions from which the sums "level" were computed.
        steps: The distributions of steps of all records.
    """
    num_sensors = has_readings.shape[1]
    scale = CusumScale.neutral(num_sensors)
    slopes, intercepts = scale.slopes.copy(), scale.intercepts.copy()
    for kind in range(len(KINDS)):
        line_of_all = _fit_line(largest_sums[kind][has_readings], (1.0, 0.0))
        for sensor in range(num_sensors):
            sums = largest_sums[kind, has_readings[:, sensor], sensor]
            slopes[kind, sensor], intercepts[kind, sensor] = _fit_line(sums, line_of_all)
        if KINDS[kind] == "level":
            slopes[kind] *= LEVEL_DISCOUNT
            intercepts[kind] *= LEVEL_DISCOUNT
        statistics = np.where(has_readings, intercepts[kind] + slopes[kind] * largest_sums[kind], -np.inf)
        intercepts[kind] += _compute_balance(statistics.max(1), bool(largest_sums[kind].any()))
        if KINDS[kind] == "extreme":
            intercepts[kind] += EXTREME_BONUS
    slope, intercept = _fit_line(largest_record_sums, (1.0, 0.0))
    intercept += _compute_balance(intercept + slope * largest_record_sums, bool(largest_record_sums.any()))
    return CusumScale(slopes, intercepts, slope, intercept, marginals, steps)


def _compute_balance(largest_statistics: Floats, has_evidence: bool) -> float:
    """Return the constant to add to the statistics of a kind, so that a share s of the records exceeds −ln s.

    Args:
        largest_statistics: (N,) the largest statistic of the kind in each record; −inf in records without readings.
        has_evidence: Whether there is any evidence of the kind. If there is none, the constant is 0.
    """
    finite = largest_statistics[np.isfinite(largest_statistics)]
    if not has_evidence or len(finite) < MIN_FITTED_RECORDS:
        return 0.0
    return -math.log(BALANCED_SHARE) - float(np.quantile(finite, 1.0 - BALANCED_SHARE))


def _fit_line(largest_sums: Floats, default: tuple[float, float]) -> tuple[float, float]:
    """Return slope and intercept of the line that turns a sum x into −ln P(largest sum of a normal record ≥ x).

    Args:
        largest_sums: (N,) the largest sums of the normal records with readings of the sensor.
        default: Slope and intercept if there are too few sums.
    """
    count = len(largest_sums)
    if count < MIN_FITTED_RECORDS:
        return default
    num_tail = max(MIN_TAIL_RECORDS, int(TAIL_SHARE * count))
    ordered = np.sort(largest_sums)
    threshold = float(ordered[-num_tail - 1])
    tail_scale = max(float((ordered[-num_tail:] - threshold).mean()), MIN_TAIL_SCALE)
    return 1.0 / tail_scale, -threshold / tail_scale - math.log(num_tail / count)
