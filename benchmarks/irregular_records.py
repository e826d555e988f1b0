"""Records whose sensors report at any times, for the benchmarks `icu`, `hydraulic` and `fleet`.

The three benchmarks read or simulate readings, split the records, and inject faults with this module. Peers and metrics
are in `irregular_peers`, `gru_d` and `irregular_alerts`.

All contenders are compared in the same units. A sensor's location and scale are the mean and the standard deviation of
its training readings, after these are clipped to their 1% and 99% quantiles. Beyond `LINEAR_LIMIT` the units are
logarithmic (`Schema.normalise`). A sensor with a limited resolution reports multiples of a step, its quantum. Peers are
fitted to readings with uniform noise of the width of the quantum, because a density could otherwise grow without bound
at repeated values. Densities are evaluated at the readings without noise, as in live scoring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from deformer_stream.model.schema import LINEAR_LIMIT, Feature, Schema
from trainer.feature_kinds import find_quantum

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

FaultKind = Literal["shifted", "stuck", "swapped"]
FAULT_KINDS: tuple[FaultKind, ...] = ("shifted", "stuck", "swapped")

SHIFT = 3.0
"""Size of the fault "shifted" in scales of the sensor."""

MIN_FAULTY_READINGS = 3
"""Smallest number of readings of a faulty sensor after the onset of its fault."""

MAX_SCALE_SAMPLE = 50_000
"""Largest number of readings of a sensor from which its location, scale and quantum are computed."""

FIRST_TIME = 1_325_376_000
"""Seconds since 1970 at which all records begin in tables for the commands: 2012-01-01."""


@dataclass(frozen=True, slots=True)
class Readings:
    """M readings of R records with S sensors, record after record, in order of time within each record.

    Attributes:
        sensors: The names of the sensors; a sensor's code is its index.
        records: The R ids of the records.
        offsets: (R + 1,) index of each record's first reading; the last entry is M.
        codes: (M,) sensor codes.
        values: (M,) raw values.
        times: (M,) seconds since the origin of the record.
    """

    sensors: tuple[str, ...]
    records: tuple[str, ...]
    offsets: Ints
    codes: Ints
    values: Floats
    times: Floats

    def __len__(self) -> int:
        """Return the number of readings."""
        return len(self.codes)

    @property
    def record_index(self) -> Ints:
        """The record of each reading, (M,)."""
        return np.arange(len(self.records)).repeat(np.diff(self.offsets))

    def select(self, records: Sequence[int] | NDArray[np.integer]) -> Readings:
        """Return the readings of the given records, in the given order."""
        rows = np.asarray(records, np.int64)
        lengths = np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        index = np.arange(offsets[-1]) + np.repeat(self.offsets[rows] - offsets[:-1], lengths)
        ids = tuple(self.records[row] for row in rows.tolist())
        return Readings(self.sensors, ids, offsets, self.codes[index], self.values[index], self.times[index])

    def find_previous_of_sensor(self) -> Ints:
        """Return the index of each reading's previous reading of the same sensor and record, −1 if none, (M,)."""
        sensor = self.record_index * len(self.sensors) + self.codes
        order = np.argsort(sensor, kind="stable")
        previous = np.full(len(self), -1)
        is_same = sensor[order][1:] == sensor[order][:-1]
        previous[order[1:][is_same]] = order[:-1][is_same]
        return previous

    def to_table(self) -> pa.Table:
        """Return a long table with the columns record, feature, value and time, as the commands read it."""
        record_ids = pa.DictionaryArray.from_arrays(pa.array(self.record_index, pa.int32()), pa.array(self.records))
        features = pa.DictionaryArray.from_arrays(pa.array(self.codes, pa.int32()), pa.array(self.sensors))
        microseconds = np.round((self.times + FIRST_TIME) * 1e6).astype(np.int64)
        return pa.table(
            {
                "record": record_ids.cast(pa.string()),
                "feature": features.cast(pa.string()),
                "value": self.values,
                "time": pa.array(microseconds, pa.timestamp("us", tz="UTC")),
            }
        )


def make_readings(
    records: Sequence[str] | NDArray[np.object_],
    sensors: Sequence[str] | NDArray[np.object_],
    values: Floats,
    times: Floats,
) -> Readings:
    """Return readings that are given in any order, one entry for each reading.

    Readings of one record with the same time keep their order.

    Args:
        records: (M,) ids of the records.
        sensors: (M,) names of the sensors.
        values: (M,) raw values.
        times: (M,) seconds since the origin of the record.
    """
    record_ids, row = np.unique(np.asarray(records, object), return_inverse=True)
    names, codes = np.unique(np.asarray(sensors, object), return_inverse=True)
    order = np.lexsort((np.arange(len(values)), times, row))
    offsets = np.searchsorted(row[order], np.arange(len(record_ids) + 1))
    return Readings(
        tuple(names.tolist()), tuple(record_ids.tolist()), offsets, codes[order], values[order], times[order]
    )


def restore_decimals(values: NDArray[np.float32]) -> Floats:
    """Return the numbers with the fewest decimals that become these values in single precision, in double precision.

    Otherwise the readings of a sensor with a resolution of 0.1 would not lie on a grid in double precision.
    """
    distinct, index = np.unique(values, return_inverse=True)
    return np.array([float(str(value)) for value in distinct])[index]


@dataclass(frozen=True, slots=True)
class RecordSplit:
    """Row numbers of the records by use.

    Attributes:
        train: The normal records to which the contenders are fitted.
        calibration: The normal records from which the alert rule is calibrated.
        test: The other normal records.
        abnormal: All records that are not normal.
    """

    train: Ints
    calibration: Ints
    test: Ints
    abnormal: Ints


def split_records(is_normal: Bools, seed: int, train_share: float = 0.7, calibration_share: float = 0.1) -> RecordSplit:
    """Split the normal records at random. Numbers of records are rounded down; the rest is tested."""
    normal = np.random.default_rng([seed, 0x5917]).permutation(np.flatnonzero(is_normal))
    num_train = int(train_share * len(normal) + 1e-9)
    num_fitted = num_train + int(calibration_share * len(normal) + 1e-9)
    parts = (normal[:num_train], normal[num_train:num_fitted], normal[num_fitted:], np.flatnonzero(~is_normal))
    return RecordSplit(*(np.sort(part) for part in parts))


def fit_units(train: Readings) -> Schema:
    """Return a schema with the location, scale, quantum and range of each sensor's training readings."""
    features = []
    for code, name in enumerate(train.sensors):
        values = np.sort(train.values[train.codes == code])
        if not len(values):
            values = np.zeros(1)
        sample = values[:: -(-len(values) // MAX_SCALE_SAMPLE)]
        clipped = np.clip(sample, *np.quantile(sample, [0.01, 0.99]))
        # A sensor that is constant in training gets the scale 1.
        scale = float(clipped.std()) if clipped.std() > 1e-9 * max(1.0, abs(float(clipped.mean()))) else 1.0
        quantum = find_quantum(sample, bool((sample == np.round(sample)).all()))
        location, low, high = float(clipped.mean()), float(values[0]), float(values[-1])
        features.append(
            Feature(name, "continuous", location=location, scale=scale, quantum=quantum, low=low, high=high)
        )
    return Schema(tuple(features))


def draw_grid_noise(units: Schema, codes: Ints, seed: int) -> Floats:
    """Return uniform noise of the width of each reading's quantum in normalised units, 0 without a quantum, (M,)."""
    width = np.array([(feature.quantum or 0.0) / feature.scale for feature in units.features])
    noise: Floats = (np.random.default_rng([seed, 0x40]).random(len(codes)) - 0.5) * width[codes]
    return noise


def compute_log_slopes(units: Schema, codes: Ints, values: Floats) -> Floats:
    """Return ln(dz/dx) of the normalised values z at the raw values x, (M,).

    A log-density in normalised units plus this number is the log-density in raw units.
    """
    scale = np.array([feature.scale for feature in units.features])[codes]
    location = np.array([feature.location for feature in units.features])[codes]
    excess = np.maximum(np.abs((values - location) / scale) - LINEAR_LIMIT, 0.0)
    slopes: Floats = -np.log(scale) - np.log1p(excess)
    return slopes


@dataclass(frozen=True, slots=True)
class FaultyReadings:
    """Records with one injected fault each.

    Attributes:
        readings: The readings with the faults.
        onsets: (R,) seconds since the origin of each record at which its fault begins.
        rows: (R,) row number of each record among the records without faults.
    """

    readings: Readings
    onsets: Floats
    rows: Ints


def find_exchangeable_pairs(train: Readings, sensors: Sequence[str]) -> list[tuple[int, int]]:
    """Return pairs of sensor codes whose medians each lie within the 1% and 99% quantiles of the other sensor.

    If such sensors are swapped, no reading is improbable on its own.

    Args:
        train: The readings from which the quantiles are computed.
        sensors: The names of the sensors that may be swapped.
    """
    codes = [train.sensors.index(name) for name in sensors]
    quantiles = {code: np.quantile(train.values[train.codes == code], [0.01, 0.5, 0.99]) for code in codes}
    return [
        (a, b)
        for i, a in enumerate(codes)
        for b in codes[i + 1 :]
        if quantiles[a][0] <= quantiles[b][1] <= quantiles[a][2]
        and quantiles[b][0] <= quantiles[a][1] <= quantiles[b][2]
    ]


def inject_faults(
    readings: Readings,
    kind: FaultKind,
    units: Schema,
    onset_choices: Sequence[float] | Floats,
    sensors: Sequence[str],
    pairs: Sequence[tuple[int, int]],
    seed: int,
) -> FaultyReadings:
    """Inject one fault into each record, from a random time to the end of the record.

    - shifted: the values of one sensor move by `SHIFT` scales, in the direction that keeps more of them within the
      range of the training readings. The shift is a multiple of the quantum. Values are limited to that range.
    - stuck: one sensor repeats its last value before the onset.
    - swapped: the readings of two sensors exchange their names.

    The sensor or pair is drawn among those with at least `MIN_FAULTY_READINGS` readings after the onset. Records in
    which no sensor qualifies are left out.

    Args:
        readings: The records without faults, which stay unchanged.
        kind: The kind of the faults.
        units: Location, scale, quantum and range of each sensor.
        onset_choices: Seconds since the origin of a record, from which the onset is drawn.
        sensors: Names of the sensors that can be shifted or stuck.
        pairs: Codes of the sensors that can be swapped.
        seed: Seed of the random choices.
    """
    rng = np.random.default_rng([seed, FAULT_KINDS.index(kind), 0xFA])
    codes, values = readings.codes.copy(), readings.values.copy()
    allowed = np.array([readings.sensors.index(name) for name in sensors])
    rows, onsets = [], []
    for row in range(len(readings.records)):
        part = slice(readings.offsets[row], readings.offsets[row + 1])
        onset = float(rng.choice(np.asarray(onset_choices)))
        is_after = readings.times[part] >= onset
        counts = np.bincount(codes[part][is_after], minlength=len(readings.sensors))
        if kind == "swapped":
            pair_choices = [pair for pair in pairs if min(counts[list(pair)]) >= MIN_FAULTY_READINGS]
            if not pair_choices:
                continue
            a, b = pair_choices[rng.integers(len(pair_choices))]
            own = codes[part]
            codes[part] = np.where(is_after & (own == a), b, np.where(is_after & (own == b), a, own))
        else:
            choices = allowed[counts[allowed] >= MIN_FAULTY_READINGS]
            if kind == "stuck":
                choices = np.array([c for c in choices if _can_stick(codes[part], values[part], is_after, c)], np.int64)
            if not len(choices):
                continue
            code = int(rng.choice(choices))
            is_faulty = is_after & (codes[part] == code)
            own_values = values[part]
            if kind == "stuck":
                own_values[is_faulty] = own_values[~is_after & (codes[part] == code)][-1]
            else:
                own_values[is_faulty] = _shift(own_values[is_faulty], units.features[code])
        rows.append(row)
        onsets.append(onset)
    faulty = replace(readings, codes=codes, values=values)
    return FaultyReadings(faulty.select(rows), np.array(onsets), np.array(rows, np.int64))


def _can_stick(codes: Ints, values: Floats, is_after: Bools, code: int) -> bool:
    """Return whether a sensor has a value before the onset, and another value after it."""
    before, after = values[~is_after & (codes == code)], values[is_after & (codes == code)]
    return len(before) > 0 and bool((after != before[-1]).any())


def _shift(values: Floats, feature: Feature) -> Floats:
    """Return the values of a shifted sensor; see `inject_faults`."""
    quantum = feature.quantum or feature.scale / 100
    step = max(1.0, round(SHIFT * feature.scale / quantum)) * quantum
    assert feature.low is not None
    assert feature.high is not None
    low, high = feature.low, feature.high
    upward, downward = values + step, values - step
    is_upward = (upward <= high).sum() >= (downward >= low).sum()
    return np.clip(upward if is_upward else downward, low, high)
