"""The simulated pumps: normal records obey physics, each fault breaks a coupling, and readings arrive as specified."""

import itertools
from typing import get_args

import numpy as np
import orjson
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from deformer_stream.demo.simulate import (
    BAR,
    DENSITY,
    FEATURES,
    GRAVITY,
    MAX_DELAY,
    MEANING_BY_FAULT,
    MODES,
    RATED_SPEED,
    SENSORS,
    VALVE_POSITIONS,
    SimulatedFleet,
    simulate,
)
from tests.demo.arrival_orders import Order, simulate_in_order

NUMERIC = tuple(name for name in FEATURES if name != "mode")


def columns(table: pa.Table) -> dict[str, NDArray[np.float64]]:
    """Return the numeric columns, with NaN for missing readings."""
    return {name: table.column(name).cast(pa.float64()).to_numpy() for name in NUMERIC}


@pytest.fixture(scope="module")
def normal_records() -> pa.Table:
    return simulate(20_000, seed=1).select_normal_records()


@pytest.fixture(scope="module")
def faulty_fleet() -> SimulatedFleet:
    return simulate(8_000, seed=2, fault_share=1.0)


def compute_residuals(target: str, by: list[str], train: pa.Table, test: pa.Table) -> NDArray[np.float64]:
    """Return the residuals of `target` in `test`, in robust standard deviations of the residuals in `train`.

    The fit is least squares on second-order terms of the readings `by`, so it does not use the simulator's equations.
    """

    def design(table: pa.Table) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        c = columns(table)
        x = np.stack([(c[name] - mean[name]) / scale[name] for name in by], 1)
        pairs = [x[:, i] * x[:, j] for i, j in itertools.combinations_with_replacement(range(len(by)), 2)]
        return np.column_stack([np.ones(len(x)), x, *pairs]), c[target]

    base = columns(train)
    mean = {name: np.nanmean(base[name]) for name in by}
    scale = {name: np.nanstd(base[name]) for name in by}
    a, b = design(train)
    use = np.isfinite(a).all(1) & np.isfinite(b)
    weights = np.linalg.lstsq(a[use], b[use], rcond=None)[0]
    spread = 1.4826 * np.median(np.abs(b[use] - a[use] @ weights))
    a, b = design(test)
    use = np.isfinite(a).all(1) & np.isfinite(b)
    return (b[use] - a[use] @ weights) / spread


def test_equal_seeds_give_equal_records_and_order_changes_only_delays() -> None:
    one, two = simulate(500, seed=3, fault_share=0.1), simulate(500, seed=3, fault_share=0.1)
    assert one.table.equals(two.table)
    assert (one.delays == two.delays).all()
    assert simulate_in_order(500, seed=3, order="bursty").table.equals(simulate(500, seed=3).table)
    assert not simulate(500, seed=4, fault_share=0.1).table.equals(one.table)


def test_readings_are_missing_at_random(normal_records: pa.Table) -> None:
    lost = {name: normal_records.column(name).null_count / len(normal_records) for name in FEATURES}
    assert all(0.02 <= sensor.missing_share <= 0.05 for sensor in SENSORS.values())
    assert lost == pytest.approx({name: sensor.missing_share for name, sensor in SENSORS.items()}, abs=0.006)
    gone = np.stack([normal_records.column(name).is_null().to_numpy() for name in FEATURES], 1)
    together = np.corrcoef(gone.T) - np.eye(len(FEATURES))
    assert np.abs(together).max() < 0.04  # 5 standard errors of independent losses


def test_sensors_have_their_resolution(normal_records: pa.Table) -> None:
    for name, values in columns(normal_records).items():
        steps = values[np.isfinite(values)] / SENSORS[name].resolution
        assert np.abs(steps - np.round(steps)).max() < 1e-6, name
        assert len(np.unique(np.round(steps))) >= 8, name
    assert set(normal_records.column("mode").to_pylist()) == {None, *MODES}
    assert set(normal_records.column("valve").to_pylist()) == {None, *VALVE_POSITIONS.tolist()}


def test_ids_are_unique_and_times_increase() -> None:
    table = simulate(3_000, seed=5, num_pumps=7).table
    ids = table.column("record").to_pylist()
    assert len(set(ids)) == 3_000
    assert {name.split("/")[0] for name in ids} == {f"pump-{k:02d}" for k in range(1, 8)}
    of_one = [name for name in ids if name.startswith("pump-03/")]
    assert of_one == [f"pump-03/{k:06d}" for k in range(len(of_one))]
    assert (np.diff(table.column("time").cast(pa.int64()).to_numpy()) > 0).all()


def test_normal_records_obey_affinity_laws_and_energy_balance(normal_records: pa.Table) -> None:
    c = columns(normal_records)
    head = (c["discharge_pressure"] - c["suction_pressure"]) * BAR / (DENSITY * GRAVITY)
    r = c["speed"] / RATED_SPEED
    # H / r² is a function of Q / r alone, up to the pumps' own wear and calibration.
    use = np.isfinite(head) & np.isfinite(r) & np.isfinite(c["flow"])
    a = np.column_stack([np.ones(use.sum()), (c["flow"] / r)[use] ** 2])
    reduced = head[use] / r[use] ** 2
    weights = np.linalg.lstsq(a, reduced, rcond=None)[0]
    assert np.std(reduced - a @ weights) < 0.03 * np.mean(reduced)
    assert weights[1] < 0
    hydraulic = DENSITY * GRAVITY * c["flow"] / 3600 * head / 1000
    efficiency = hydraulic / c["power"]
    efficiency = efficiency[np.isfinite(efficiency)]
    assert efficiency.min() > 0.3
    assert efficiency.max() < 0.8
    apparent = np.sqrt(3) * c["voltage"] * c["current"] / 1000
    factor = (c["power"] / apparent)[np.isfinite(c["power"] / apparent)]
    assert factor.min() > 0.15
    assert factor.max() < 0.97
    assert np.nanmin(c["winding_temperature"] - c["ambient_temperature"]) > 0


@pytest.mark.parametrize(
    ("target", "by"),
    [
        ("speed", ["speed_setpoint"]),
        ("flow", ["speed", "discharge_pressure", "suction_pressure"]),
        ("power", ["speed", "flow"]),
        ("current", ["power", "voltage"]),
        ("winding_temperature", ["current", "ambient_temperature", "speed"]),
        ("bearing_temperature", ["power", "ambient_temperature", "speed"]),
        ("vibration", ["speed", "flow", "power"]),
    ],
)
def test_readings_of_normal_records_are_coupled(normal_records: pa.Table, target: str, by: list[str]) -> None:
    """The other readings explain most of a reading, also for records that were not fitted."""
    half = len(normal_records) // 2
    residuals = compute_residuals(target, by, normal_records.slice(0, half), normal_records.slice(half))
    assert np.mean(np.abs(residuals) > 5) < 0.01
    values, fitted = _fitted(target, by, normal_records)
    assert np.corrcoef(values, fitted)[0, 1] ** 2 > 0.75


def _fitted(target: str, by: list[str], table: pa.Table) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    c = columns(table)
    x = np.stack([c[name] for name in by], 1)
    use = np.isfinite(x).all(1) & np.isfinite(c[target])
    x = (x[use] - x[use].mean(0)) / x[use].std(0)
    pairs = [x[:, i] * x[:, j] for i, j in itertools.combinations_with_replacement(range(len(by)), 2)]
    a = np.column_stack([np.ones(len(x)), x, *pairs])
    return c[target][use], a @ np.linalg.lstsq(a, c[target][use], rcond=None)[0]


@pytest.mark.parametrize(
    ("fault", "target", "by", "min_share"),
    [
        ("cavitation", "vibration", ["speed", "flow", "power"], 0.9),
        ("worn impeller", "discharge_pressure", ["speed", "flow", "suction_pressure"], 0.9),
        ("blocked discharge", "flow", ["speed", "valve"], 0.9),
        ("bearing wear", "bearing_temperature", ["power", "ambient_temperature", "speed"], 0.9),
        ("bearing wear", "vibration", ["speed", "flow", "power"], 0.6),
        ("phase imbalance", "current", ["power", "voltage"], 0.9),
        ("stuck sensor", "flow", ["speed", "discharge_pressure", "suction_pressure"], 0.15),
        ("sensor drift", "current", ["power", "voltage"], 0.15),
        ("swapped sensors", "bearing_temperature", ["power", "ambient_temperature", "speed"], 0.4),
    ],
)
def test_fault_breaks_its_coupling(
    normal_records: pa.Table, faulty_fleet: SimulatedFleet, fault: str, target: str, by: list[str], min_share: float
) -> None:
    """At least a share `min_share` of the faulty records deviates by more than 4 robust standard deviations.

    Only some of the transmitter faults affect this reading.
    """
    of_kind = faulty_fleet.table.filter(pa.compute.equal(faulty_fleet.table.column("fault"), fault))
    assert np.mean(np.abs(compute_residuals(target, by, normal_records, of_kind)) > 4) > min_share
    assert np.mean(np.abs(compute_residuals(target, by, normal_records, normal_records)) > 4) < 0.02


def test_most_faulty_readings_are_in_the_normal_range(normal_records: pa.Table, faulty_fleet: SimulatedFleet) -> None:
    """Limits on single sensors detect few faults, so a density model is needed."""
    usual, strange = columns(normal_records), columns(faulty_fleet.table)
    outside = np.zeros(len(faulty_fleet.table), bool)
    for name in NUMERIC:
        low, high = np.nanquantile(usual[name], [0.0005, 0.9995])
        outside |= (strange[name] < low) | (strange[name] > high)
    faults = np.array(faulty_fleet.table.column("fault").to_pylist())
    assert outside.mean() < 0.5
    for fault in ("stuck sensor", "sensor drift", "worn impeller", "phase imbalance"):
        assert outside[faults == fault].mean() < 0.45, fault


def test_faults_have_the_requested_share_and_equal_frequencies() -> None:
    fleet = simulate(1_650, seed=6, fault_share=150 / 1_650)
    faults = fleet.table.column("fault").to_pylist()
    counts = {kind: faults.count(kind) for kind in MEANING_BY_FAULT}
    assert sum(counts.values()) == 150
    assert max(counts.values()) - min(counts.values()) <= 1
    assert len(fleet.select_normal_records()) == 1_500
    assert "fault" not in fleet.select_normal_records().column_names


def test_normal_records_have_the_same_distribution_for_all_seeds(normal_records: pa.Table) -> None:
    other, mine = columns(simulate(20_000, seed=9).table), columns(normal_records)
    for name in NUMERIC:
        pairs = [(mine[name], other[name]), (mine[name][:10_000], mine[name][10_000:])]
        for a, b in pairs:
            a, b = a[np.isfinite(a)], b[np.isfinite(b)]
            error = np.sqrt(a.var() / len(a) + b.var() / len(b))
            assert abs(a.mean() - b.mean()) < 4.5 * error, name
    assert not np.allclose(
        np.nanmean(other["vibration"]), np.nanmean(columns(simulate(9_000, 9, fleet=1).table)["vibration"]), 1e-3
    )


@pytest.mark.parametrize("order", get_args(Order))
def test_delays_are_within_the_maximum(order: Order) -> None:
    delays = simulate_in_order(300, seed=1, order=order).delays
    assert delays.shape == (300, len(FEATURES))
    assert delays.min() >= 0
    assert delays.max() <= MAX_DELAY


def test_random_order_makes_every_position_equally_likely() -> None:
    ranks = simulate(8_000, seed=1).delays.argsort(1).argsort(1)
    counts = np.stack([np.bincount(ranks[:, i], minlength=len(FEATURES)) for i in range(len(FEATURES))])
    expected = 8_000 / len(FEATURES)
    chi2 = ((counts - expected) ** 2 / expected).sum()
    freedom = (len(FEATURES) - 1) ** 2
    assert abs(chi2 - freedom) < 5 * np.sqrt(2 * freedom)
    assert abs(np.corrcoef(ranks.T)[0, 1] + 1 / (len(FEATURES) - 1)) < 0.06


def test_fixed_order_is_always_the_same() -> None:
    assert (simulate_in_order(50, seed=1, order="fixed").delays.argsort(1) == np.arange(len(FEATURES))).all()


def test_bursty_order_keeps_the_readings_of_a_device_together() -> None:
    sequences = simulate_in_order(400, seed=1, order="bursty").delays.argsort(1)
    groups = np.array([sensor.device for sensor in SENSORS.values()])
    orders = set()
    for sequence in sequences:
        runs = [group for group, _ in itertools.groupby(groups[sequence])]
        assert len(runs) == len(set(groups))
        orders.add(tuple(runs))
    assert len(orders) == 24
    motor = np.flatnonzero(groups == "motor")
    within = {tuple(s for s in sequence if s in motor) for sequence in sequences.tolist()}
    assert len(within) == 24


def test_messages_are_in_order_of_arrival_and_records_overlap() -> None:
    fleet = simulate(200, seed=8, fault_share=0.1)
    events = [orjson.loads(message) for message in fleet.iterate_messages()]
    assert {tuple(event) for event in events} == {("record", "feature", "value", "time")}
    assert (np.diff([event["time"] for event in events]) >= 0).all()
    wide = {row["record"]: row for row in fleet.table.to_pylist()}
    delays = {row["record"]: delay for row, delay in zip(wide.values(), fleet.delays, strict=True)}
    seen: dict[str, list[str]] = {}
    for event in events:
        record, name = event["record"], event["feature"]
        assert event["value"] == wide[record][name]
        arrival = wide[record]["time"].timestamp() + delays[record][FEATURES.index(name)]
        assert event["time"] == pytest.approx(arrival, abs=2e-6)
        seen.setdefault(record, []).append(name)
    for record, row in wide.items():
        assert sorted(seen[record]) == sorted(name for name in FEATURES if row[name] is not None)
    first, last = {}, {}
    for place, event in enumerate(events):
        first.setdefault(event["record"], place)
        last[event["record"]] = place
    middle = len(events) // 2
    assert sum(first[r] <= middle <= last[r] for r in first) > 10
    assert isinstance(next(event["value"] for event in events if event["feature"] == "mode"), str)
    assert isinstance(next(event["value"] for event in events if event["feature"] == "flow"), float)


def test_small_fleets_and_invalid_arguments() -> None:
    empty = simulate(0, seed=0)
    assert len(empty.table) == 0
    assert len(empty.select_normal_records()) == 0
    assert list(empty.iterate_messages()) == []
    assert len(simulate(1, seed=0, num_pumps=1).table) == 1
    for bad in ({"num_records": -1}, {"num_pumps": 0}, {"fault_share": 1.5}):
        with pytest.raises(ValueError, match="simulate: "):
            simulate(**{"num_records": 5, "seed": 0, **bad})  # type: ignore[arg-type]
