"""Cumulative sums of evidence: their rules, their division over calls, and the scale fitted to normal records."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from deformer_stream.calibration import cusum
from deformer_stream.calibration.cusum import (
    BALANCED_SHARE,
    EXTREME_BONUS,
    KINDS,
    LEVEL_DISCOUNT,
    MAX_EXTREME,
    MAX_REPETITION,
    MAX_SURPRISE,
    OFFSET_KAPPA,
    RECORD_KAPPA,
    SENSOR_KAPPA,
    STEP_KAPPA,
    CusumReadings,
    CusumScale,
    StateLayout,
    advance_sums,
    compute_log_resolutions,
    compute_statistics,
    create_states,
    find_previous_values,
    fit_scale,
)
from deformer_stream.calibration.marginals import Marginals
from deformer_stream.calibration.sensor_steps import Steps
from deformer_stream.model.schema import Feature, Schema

NUM_SENSORS = 3


def make_readings(num_records: int, num_readings: int, seed: int, p_exponent: float = 1.0) -> CusumReadings:
    """Return normal readings of random sensors, whose p-values are uniform to the power of `p_exponent`."""
    rng = np.random.default_rng(seed)
    shape = num_records, num_readings
    return CusumReadings(
        codes=rng.integers(0, NUM_SENSORS, shape),
        values=rng.integers(0, 4, shape).astype(np.float32),
        log_p=p_exponent * np.log(rng.random(shape)),
        log_p_others=np.log(rng.random(shape)),
        log_masses=np.log(rng.random(shape)),
        is_counted=rng.random(shape) < 0.9,
        log_p_level=p_exponent * np.log(rng.random(shape)),
        log_p_step=p_exponent * np.log(rng.random(shape)),
    )


def take(readings: CusumReadings, columns: slice) -> CusumReadings:
    """Return the readings of some columns."""
    assert readings.log_p_others is not None
    assert readings.log_p_level is not None
    assert readings.log_p_step is not None
    return CusumReadings(
        readings.codes[:, columns],
        readings.values[:, columns],
        readings.log_p[:, columns],
        readings.log_p_others[:, columns],
        readings.log_masses[:, columns],
        readings.is_counted[:, columns],
        readings.log_p_level[:, columns],
        readings.log_p_step[:, columns],
    )


def advance_by_definition(readings: CusumReadings) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what `advance_sums` should, reading by reading with the formulas of its module."""
    assert readings.log_p_others is not None
    assert readings.log_p_level is not None
    assert readings.log_p_step is not None
    num_records, num_readings = readings.codes.shape
    sums, records = np.zeros((6, num_records, num_readings)), np.zeros((num_records, num_readings))
    for r in range(num_records):
        improbable, offset, repeated, level, step = ([0.0] * NUM_SENSORS for _ in range(5))
        last: list[float | None] = [None] * NUM_SENSORS
        total = 0.0
        for k in np.flatnonzero(readings.is_counted[r]).tolist():
            s, value = int(readings.codes[r, k]), float(readings.values[r, k])
            surprise, other, unusual, jump = (
                min(-float(log_p[r, k]), MAX_SURPRISE)
                for log_p in (readings.log_p, readings.log_p_others, readings.log_p_level, readings.log_p_step)
            )
            improbable[s] = max(0.0, improbable[s] + math.log(SENSOR_KAPPA) + (1 - SENSOR_KAPPA) * surprise)
            level[s] = max(0.0, level[s] + math.log(SENSOR_KAPPA) + (1 - SENSOR_KAPPA) * unusual)
            step[s] = max(0.0, step[s] + math.log(STEP_KAPPA) + (1 - STEP_KAPPA) * jump)
            offset[s] = max(0.0, offset[s] + math.log(OFFSET_KAPPA) + (1 - OFFSET_KAPPA) * other)
            rise = min(-float(readings.log_masses[r, k]), MAX_REPETITION)
            repeated[s] = repeated[s] + rise if last[s] == value else 0.0
            last[s] = value
            total = max(0.0, total + math.log(RECORD_KAPPA) + (1 - RECORD_KAPPA) * surprise)
            extreme = min(-float(readings.log_p[r, k]), MAX_EXTREME)
            of_sensor = improbable[s], offset[s], repeated[s], extreme, level[s], step[s]
            sums[:, r, k], records[r, k] = of_sensor, total
    return sums, records


def test_sums_follow_their_definitions() -> None:
    readings = make_readings(4, 60, 0, p_exponent=5.0)
    states = create_states(4, NUM_SENSORS)
    sensor_sums, record_sums = advance_sums(states, readings)
    expected_sums, expected_records = advance_by_definition(readings)
    counted = readings.is_counted
    np.testing.assert_allclose(sensor_sums[:, counted], expected_sums[:, counted], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(record_sums[counted], expected_records[counted], rtol=1e-5, atol=1e-5)
    assert (expected_sums[:, counted].max(1) > 1.0).all()
    assert (expected_sums[3, counted] == MAX_EXTREME).any()


@pytest.mark.parametrize("cut", [0, 1, 17, 60])
def test_splitting_the_readings_gives_the_same_bits(cut: int) -> None:
    readings, states = make_readings(5, 60, 1), create_states(5, NUM_SENSORS)
    whole = advance_sums(states, readings)
    split_states = create_states(5, NUM_SENSORS)
    parts = [advance_sums(split_states, take(readings, part)) for part in (slice(0, cut), slice(cut, 60))]
    np.testing.assert_array_equal(states, split_states)
    np.testing.assert_array_equal(np.concatenate([part[0] for part in parts], 2), whole[0])
    np.testing.assert_array_equal(np.concatenate([part[1] for part in parts], 1), whole[1])


@pytest.mark.parametrize("cut", [0, 1, 17, 60])
def test_previous_values_are_those_of_the_state_or_of_earlier_counted_readings(cut: int) -> None:
    readings, states = make_readings(5, 60, 3), create_states(5, NUM_SENSORS)
    last = np.full((5, NUM_SENSORS), np.inf)
    expected = np.full((5, 60), np.inf)
    for r, k in zip(*np.nonzero(readings.is_counted), strict=True):
        code = readings.codes[r, k]
        expected[r, k], last[r, code] = last[r, code], readings.values[r, k]
    found = []
    for part in (take(readings, slice(0, cut)), take(readings, slice(cut, 60))):
        found.append(find_previous_values(states, part.codes, part.values, part.is_counted))
        advance_sums(states, part)
    np.testing.assert_array_equal(np.concatenate(found, 1), expected)


def test_evidence_fades_when_the_fault_has_gone_and_returns_with_it() -> None:
    """A sensor with improbable readings raises its sum; normal readings take it back to zero."""
    log_p = np.log(np.concatenate([np.full(20, 0.5), np.full(6, 1e-3), np.full(40, 0.5), np.full(6, 1e-3)]))[None]
    readings = CusumReadings(
        codes=np.zeros(log_p.shape, np.int64),
        values=np.arange(72, dtype=np.float32)[None],
        log_p=log_p,
        log_p_others=None,
        log_masses=np.full(log_p.shape, -3.0),
        is_counted=np.ones(log_p.shape, bool),
    )
    sums = advance_sums(create_states(1, 1), readings)[0][0, 0]
    rise = 6 * (math.log(SENSOR_KAPPA) + (1 - SENSOR_KAPPA) * math.log(1e3))
    assert sums[19] == 0.0
    assert sums[25] == pytest.approx(rise, rel=1e-5)
    assert sums[65] == 0.0
    assert sums[71] == pytest.approx(rise, rel=1e-5)


def test_stuck_sensor_is_seen_by_repetitions_alone() -> None:
    """Each repetition of a value with the probability P is evidence of −ln P, and another value ends it."""
    values = np.array([[1.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0]], np.float32)
    log_masses = np.log(np.array([[0.5, 0.5, 0.1, 0.1, 1e-9, 0.5, 0.5]]))
    readings = CusumReadings(
        np.zeros((1, 7), np.int64), values, np.zeros((1, 7)), None, log_masses, np.ones((1, 7), bool)
    )
    sums = advance_sums(create_states(1, 1), readings)[0][:, 0]
    tenth = math.log(10.0)
    np.testing.assert_allclose(sums[2], [0, 0, tenth, 2 * tenth, 2 * tenth + MAX_REPETITION, 0, math.log(2)], rtol=1e-5)
    assert not sums[:2].any()


def test_resolutions_give_probabilities_of_values() -> None:
    schema = Schema(
        (
            Feature("grid", "continuous", scale=2.0, quantum=0.5),
            Feature("fine", "continuous"),
            Feature("state", "discrete", labels=("on", "off")),
        )
    )
    np.testing.assert_allclose(compute_log_resolutions(schema), [math.log(0.25), -math.inf, 0.0])


def test_fitted_scale_states_the_probability_of_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Largest sums with exponential tails of several scales: the statistic exceeds x in a share e^−x of the records.

    This is before the kinds are balanced, which adds one number to the statistics of a kind.
    """
    monkeypatch.setattr(cusum, "_compute_balance", lambda largest_statistics, has_evidence: 0.0)
    rng, num_records = np.random.default_rng(3), 20_000
    tail_scales = np.array([1.0, 2.5, 6.0])
    largest = rng.exponential(tail_scales, (len(KINDS), num_records, NUM_SENSORS))
    scale = fit_scale(largest, rng.exponential(3.0, num_records), np.ones((num_records, NUM_SENSORS), bool))
    statistics = scale.intercepts[:, None] + scale.slopes[:, None] * largest
    statistics[KINDS.index("level")] /= LEVEL_DISCOUNT
    statistics[KINDS.index("extreme")] -= EXTREME_BONUS
    for x in (3.0, 5.0):
        np.testing.assert_allclose((statistics > x).mean(1), math.exp(-x), rtol=0.35)
    assert scale.record_slope == pytest.approx(1 / 3.0, rel=0.1)


def test_scale_of_rare_sensors_is_that_of_all_sensors() -> None:
    """A sensor of few records gets the tail of all sums; a sum that never rises is not divided by zero."""
    rng = np.random.default_rng(0)
    largest = np.zeros((len(KINDS), 100, 3))
    largest[0, :, 1] = rng.exponential(5.0, 100)
    has_readings = np.ones((100, 3), bool)
    has_readings[10:, 0] = False
    largest[:, :10, 0] = 300.0
    scale = fit_scale(largest, np.zeros(100), has_readings)
    assert scale.slopes[0, 0] < 0.1  # 10 of 210 sums are 300
    assert scale.slopes[0, 1] == pytest.approx(0.2, rel=0.5)
    np.testing.assert_array_equal(scale.slopes[:, 2], [1.0, 1.0, 1.0, 1.0, LEVEL_DISCOUNT, 1.0])
    # Without enough sums of all sensors, the scale is that of a right model.
    few = fit_scale(largest[:, :6], np.zeros(6), has_readings[:6])
    np.testing.assert_array_equal(few.slopes[:4], 1.0)
    np.testing.assert_array_equal(few.intercepts[[0, 1, 2, 4, 5]], 0.0)
    np.testing.assert_array_equal(few.intercepts[3], EXTREME_BONUS)


def test_kinds_of_evidence_raise_equally_many_false_alarms() -> None:
    """The largest of many sums and the sum of the record exceed the same threshold in the same share of the records."""
    rng, num_records, num_sensors = np.random.default_rng(1), 4000, 30
    largest = rng.exponential(2.0, (len(KINDS), num_records, num_sensors))
    largest[2] = 0.0  # evidence that never rises
    record = rng.exponential(7.0, num_records)
    has_readings = rng.random((num_records, num_sensors)) < 0.8
    scale = fit_scale(largest, record, has_readings)
    statistics = np.where(has_readings, scale.intercepts[:, None] + scale.slopes[:, None] * largest, -np.inf).max(2)
    statistics[3] -= EXTREME_BONUS
    for kind in (0, 1, 3, 4, 5):
        assert (statistics[kind] > -math.log(BALANCED_SHARE)).mean() == pytest.approx(BALANCED_SHARE, abs=1e-3)
    is_alarm = scale.record_intercept + scale.record_slope * record > -math.log(BALANCED_SHARE)
    assert is_alarm.mean() == pytest.approx(BALANCED_SHARE, abs=1e-3)
    np.testing.assert_allclose(scale.intercepts[2], math.log(10.0), rtol=0.01)


def test_scale_without_single_readings_is_read_and_never_uses_them() -> None:
    """Models from before the kinds "extreme", "level" and "step" keep their statistics."""
    scale = CusumScale(np.full((6, 2), 0.5), np.zeros((6, 2)), 0.25, 4.0)
    document = scale.to_json()
    del document["extreme"], document["level"], document["step"]
    old = CusumScale.from_json(document)
    sums = np.full((6, 1, 1), 3.0)
    sums[3:] = MAX_EXTREME
    assert compute_statistics(old, np.zeros((1, 1), np.int64), sums, np.zeros((1, 1))) == 4.0
    assert compute_statistics(scale, np.zeros((1, 1), np.int64), sums, np.zeros((1, 1))) == 0.5 * MAX_EXTREME
    assert old.to_json() == document


def test_statistic_is_the_largest_over_the_sums_of_the_sensor_and_the_record() -> None:
    scale = replace(CusumScale.neutral(2), record_slope=0.5, record_intercept=1.0)
    scale.slopes[1, 1], scale.intercepts[2, 0] = 3.0, -1.0
    sums = np.array([[[2.0, 0.0]], [[0.0, 1.5]], [[9.0, 0.0]], [[3.0, 4.0]], [[0.0, 1.0]], [[0.0, 2.0]]])
    statistics = compute_statistics(scale, np.array([[0, 1]]), sums, np.array([[0.0, 0.0]]))
    np.testing.assert_allclose(statistics, [[8.0, 4.5]])
    np.testing.assert_allclose(compute_statistics(scale, np.array([[0, 1]]), sums, np.array([[40.0, 40.0]])), 21.0)


def test_scale_is_stored_as_json_and_checked() -> None:
    marginals = Marginals(np.arange(6.0).reshape(2, 3), np.array([100, 0]))
    steps = Steps(np.array([0.5, 0.0]), marginals.edges, np.array([[3, 9], [0, 0]]), np.array([12, 0]))
    scale = CusumScale(np.full((6, 2), 0.5), np.arange(12.0).reshape(6, 2), 0.25, 4.0, marginals, steps)
    copy = CusumScale.from_json(scale.to_json())
    assert copy.marginals is not None
    np.testing.assert_array_equal(copy.marginals.edges, marginals.edges)
    np.testing.assert_array_equal(copy.marginals.num_readings, marginals.num_readings)
    assert copy.steps is not None
    for name in ("slopes", "edges", "counts", "num_steps"):
        np.testing.assert_array_equal(getattr(copy.steps, name), getattr(steps, name))
    np.testing.assert_array_equal(copy.slopes, scale.slopes)
    np.testing.assert_array_equal(copy.intercepts, scale.intercepts)
    assert (copy.record_slope, copy.record_intercept) == (0.25, 4.0)
    with pytest.raises(ValueError, match="6 rows"):
        CusumScale(np.ones((2, 2)), np.ones((2, 2)), 1.0, 0.0)
    with pytest.raises(ValueError, match="finite"):
        CusumScale(np.full((6, 2), np.nan), np.ones((6, 2)), 1.0, 0.0)
    for distributions in ((marginals, None), (None, steps)):
        with pytest.raises(ValueError, match="of all sensors"):
            CusumScale(np.ones((6, 3)), np.ones((6, 3)), 1.0, 0.0, *distributions)
    assert StateLayout(2).width == create_states(1, 2).shape[1] == 13
