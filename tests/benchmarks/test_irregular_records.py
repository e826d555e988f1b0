"""Records with irregular readings of the benchmarks: reading, splits, units, and injected faults."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import fleet, hydraulic
from benchmarks.irregular_records import (
    Readings,
    compute_log_slopes,
    draw_grid_noise,
    find_exchangeable_pairs,
    fit_units,
    inject_faults,
    make_readings,
    restore_decimals,
    split_records,
)


def draw_readings(num_records: int = 30, seed: int = 0) -> Readings:
    """Return records of three sensors with integer values; the ranges of a and b overlap, that of c is far away."""
    rng = np.random.default_rng(seed)
    num_readings = 60
    sensors = rng.choice(np.array(["a", "b", "c"], object), num_records * num_readings)
    centre = np.select([sensors == "a", sensors == "b"], [50.0, 55.0], 500.0)
    values = np.round(centre + 10 * rng.normal(size=len(sensors)))
    records = np.array([f"r{i:02d}" for i in range(num_records)], object).repeat(num_readings)
    return make_readings(records, sensors, values, np.round(rng.random(len(sensors)) * 1000))


def test_readings_are_sorted_by_record_and_time() -> None:
    records, sensors = ["y", "x", "y", "x", "y"], ["a", "b", "a", "a", "b"]
    readings = make_readings(records, sensors, np.arange(5.0), np.array([3.0, 1.0, 2.0, 1.0, 3.0]))
    assert (readings.records, readings.sensors) == (("x", "y"), ("a", "b"))
    assert readings.values.tolist() == [1, 3, 2, 0, 4]  # readings of one instant keep their order
    assert readings.offsets.tolist() == [0, 2, 5]
    assert readings.find_previous_of_sensor().tolist() == [-1, -1, -1, 2, -1]
    second = readings.select([1, 0])
    assert (second.records, second.values.tolist()) == (("y", "x"), [2, 0, 4, 1, 3])
    table = second.to_table()
    assert table["record"].to_pylist() == ["y", "y", "y", "x", "x"]
    assert table["feature"].to_pylist() == ["a", "a", "b", "b", "a"]
    assert (table["time"][1].as_py() - table["time"][0].as_py()).total_seconds() == 1.0


def test_split_is_deterministic_and_complete() -> None:
    is_normal = np.arange(100) % 5 != 0
    split = split_records(is_normal, seed=1)
    assert [len(part) for part in (split.train, split.calibration, split.test, split.abnormal)] == [56, 8, 16, 20]
    parts = np.concatenate([split.train, split.calibration, split.test, split.abnormal])
    assert sorted(parts.tolist()) == list(range(100))
    assert not is_normal[split.abnormal].any()
    assert (split_records(is_normal, seed=1).train == split.train).all()
    assert set(split_records(is_normal, seed=2).train.tolist()) != set(split.train.tolist())


def test_single_precision_values_get_their_decimals_back() -> None:
    assert restore_decimals(np.array([45.8, 7.37, 43.0], np.float32)).tolist() == [45.8, 7.37, 43.0]


def test_units_contain_the_quantum_and_the_slope() -> None:
    readings = draw_readings()
    units = fit_units(readings)
    assert [feature.quantum for feature in units.features] == [1.0, 1.0, 1.0]
    noise = draw_grid_noise(units, readings.codes, seed=0)
    scale = np.array([feature.scale for feature in units.features])[readings.codes]
    assert np.abs(noise * scale).max() <= 0.5
    assert np.abs(noise * scale).max() > 0.45
    values = np.array([50.0, 500.0, -1000.0])
    codes = np.zeros(3, np.int64)  # the last two values are beyond the linear range
    change = 1e-4
    slopes = (units.normalise(codes, values + change) - units.normalise(codes, values - change)) / (2 * change)
    assert compute_log_slopes(units, codes, values) == pytest.approx(np.log(slopes), rel=1e-4)


def test_sensors_with_overlapping_ranges_can_be_swapped() -> None:
    assert find_exchangeable_pairs(draw_readings(), ["a", "b", "c"]) == [(0, 1)]


@pytest.mark.parametrize("kind", ["shifted", "stuck", "swapped"])
def test_faults_change_one_sensor_after_the_onset(kind: str) -> None:
    readings = draw_readings()
    units = fit_units(readings)
    onsets = [300.0, 500.0]
    faults = inject_faults(readings, kind, units, onsets, ["a", "b"], [(0, 1)], seed=3)  # type: ignore[arg-type]
    assert len(faults.rows) == len(faults.onsets) == len(faults.readings.records) >= 25
    assert set(faults.onsets.tolist()) == set(onsets)
    before = readings.select(faults.rows)
    assert (before.times == faults.readings.times).all()
    onset = faults.onsets[before.record_index]
    value_changed = before.values != faults.readings.values
    code_changed = before.codes != faults.readings.codes
    assert not (value_changed | code_changed)[before.times < onset].any()
    for row in range(len(faults.rows)):
        part = slice(before.offsets[row], before.offsets[row + 1])
        is_after = before.times[part] >= faults.onsets[row]
        old, new = before.values[part], faults.readings.values[part]
        codes, changed = before.codes[part], (value_changed | code_changed)[part]
        if kind == "swapped":
            assert not value_changed[part].any()
            assert (changed == (is_after & (codes != 2))).all()
            assert (faults.readings.codes[part][changed] == 1 - codes[changed]).all()
            continue
        (code,) = set(codes[changed].tolist())  # only one sensor
        assert code in (0, 1)
        is_faulty = is_after & (codes == code)
        if kind == "stuck":
            assert set(new[is_faulty].tolist()) == {old[~is_after & (codes == code)][-1]}
        else:
            feature = units.features[code]
            assert feature.low is not None
            assert feature.high is not None
            assert ((new >= feature.low) & (new <= feature.high))[is_faulty].all()
            is_clipped = (new == feature.low) | (new == feature.high)
            steps = set((new - old)[is_faulty & ~is_clipped].tolist())
            assert steps <= {round(3 * feature.scale)} or steps <= {-round(3 * feature.scale)}
    again = inject_faults(readings, kind, units, onsets, ["a", "b"], [(0, 1)], seed=3)  # type: ignore[arg-type]
    assert (again.readings.values == faults.readings.values).all()
    assert (again.onsets == faults.onsets).all()


def test_records_in_which_no_sensor_can_be_faulty_are_left_out() -> None:
    readings = make_readings(["x"] * 4 + ["y"] * 4, ["a", "b"] * 4, np.arange(8.0), np.tile(np.arange(4.0), 2))
    units = fit_units(readings)
    faults = inject_faults(readings, "shifted", units, [3.0], ["a", "b"], [], seed=0)
    assert len(faults.rows) == len(faults.readings) == 0


def test_neighbouring_cycles_stay_in_one_part() -> None:
    is_normal = np.zeros(200, bool)
    is_normal[[*range(10, 95), *range(120, 140), 150]] = True
    tested = []
    for fold in range(hydraulic.NUM_FOLDS):
        split = hydraulic.split_blocks(is_normal, fold)
        parts = [set(part.tolist()) for part in (split.train, split.calibration, split.test)]
        assert set.union(*parts) == set(np.flatnonzero(is_normal).tolist())
        assert sum(map(len, parts)) == is_normal.sum()
        for start in range(10, 90, 10):
            assert sum(not part.isdisjoint(range(start, start + 10)) for part in parts) == 1
        tested += sorted(parts[2])
    assert sorted(tested) == np.flatnonzero(is_normal).tolist()  # each normal cycle is tested in one fold


def test_classes_have_one_degraded_component(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two cycles after each change of the cooler are left out."""
    monkeypatch.setattr(hydraulic, "SETTLING_CYCLES", 2)
    conditions = {
        "cooler": np.repeat([100, 3, 20, 100], [4, 4, 3, 4]),
        "valve": np.array([100, 100, 100, 73, 100, 100, 73, 100, 100, 100, 100, 73, 100, 73, 100]),
        "pump_leakage": np.array([0] * 14 + [2]),
    }
    is_normal, rows_by_class = hydraulic.classify_cycles(conditions)
    assert np.flatnonzero(is_normal).tolist() == [2]
    assert {name: rows.tolist() for name, rows in rows_by_class.items()} == {
        "cooler 3": [7],
        "cooler 20": [10],
        "valve 73": [3, 13],
        "pump_leakage 2": [14],
    }


@pytest.mark.parametrize("fault", fleet.FAULTS)
def test_simulated_faults_begin_at_their_onset(fault: str) -> None:
    """A fault changes no true value before its onset, and its effect is seen after it."""
    onset = 3000.0
    normal = fleet.simulate_states(3, "", onset, np.random.default_rng(7))
    faulty = fleet.simulate_states(3, fault, onset, np.random.default_rng(7))
    times = fleet.STEP * np.arange(len(normal["flow"]))
    changed = {name for name in normal if not np.allclose(normal[name], faulty[name])}
    for name in changed:
        assert np.allclose(normal[name][times < onset], faulty[name][times < onset])
    expected = {"cooling": {"motor_temperature"}, "bearing": {"bearing_temperature", "vibration"}}
    if fault == "blocked":
        assert {"flow", "pressure", "current"} <= changed
    else:
        assert changed == expected.get(fault, set())
    names, values, own_times = fleet.read_sensors(3, normal, np.random.default_rng(8))
    old_names, old_values = names.copy(), values.copy()
    fleet.break_transmitters(names, values, own_times, fault, onset, np.random.default_rng(9))
    is_changed = np.array(names) != np.array(old_names)
    is_changed |= np.array(values) != np.array(old_values)
    assert is_changed.any() == (fault in ("drift", "stuck", "swapped"))
    assert not is_changed[np.array(own_times) < onset].any()


def test_shifts_are_in_order_and_have_their_faults() -> None:
    shifts = fleet.simulate_shifts(12, "stuck", seed=0)
    numbers = [int(record.rsplit("-", 1)[1]) for record in shifts.readings.records]
    assert numbers == list(range(12))
    assert (shifts.onsets >= 0.25 * fleet.SHIFT_SECONDS).all()
    for row, onset in enumerate(shifts.onsets.tolist()):
        shift = shifts.readings.select([row])
        is_constant = []
        for name in fleet.STICKING_SENSORS:
            own = shift.values[(shift.codes == shift.sensors.index(name)) & (shift.times >= onset)]
            is_constant.append(len(set(own.tolist())) == 1)
        assert sum(is_constant) == 1
