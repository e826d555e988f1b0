"""A simulated fleet of centrifugal pumps: physically coupled readings, several kinds of fault, asynchronous arrival.

A record is one look at one pump: up to fourteen readings of as many sensors. Normal records are exchangeable: pump,
duty, weather and noise are drawn independently for every record, so a false-alarm guarantee can be tested on them.
(A real pump's next minute resembles its last one; that is left out on purpose.) The pumps themselves, with their
wear, piping and calibration errors, depend on `fleet` alone: two seeds are two periods of operation of the same pumps.

Equations. Q flow [m³/h], n speed, r = n/n_0 relative speed, ρ = 998 kg/m³, g = 9.81 m/s²; heads h, H in metres:

    pump curve and affinity laws   H = r² h_0 − k Q²                       (Q ∝ r, H ∝ r², P ∝ r³ at equal duty)
    system curve                   H = z − h_t + (k_s + k_p + k_v / v²) Q²  z lift, h_t level in the suction tank,
                                                                           v valve opening, Q ∝ v √Δp of a linear valve
    suction, discharge             p_s = ρ g (h_t − k_s Q²),  p_d = p_s + ρ g H
    efficiency                     η = η_max φ (2 − φ),  φ = Q / (r Q_best)  a parabola around the best point
    shaft power                    P = ρ g Q H / η + P_f r                  P_f friction of bearings and seals
    electrical power               P_e = P + P_0 + c P²                     constant and copper losses
    line current                   I = √(I_p² + I_m²),  I_p = P_e / (√3 U), I_m ∝ U   the power factor is I_p / I
    winding                        T = T_amb + 65 K (I / I_0)² / (0.4 + 0.6 r)        cooled by a fan on the shaft
    bearing                        T = T_amb + 14 K r + 16 K P / P_rated
    vibration                      v = v_0 (0.25 + 0.6 r² + 0.25 P / P_rated + r² (1 − φ)²)   grows off the best point

Sources: J. F. Gülich, Centrifugal Pumps, 3rd ed. 2014, ch. 4 (curves, affinity) and 10 (vibration off the best point);
I. J. Karassik et al., Pump Handbook, 4th ed. 2008, ch. 2; for the motor the equivalent circuit of any textbook of
electrical machines, reduced to a constant magnetising current. The numbers are those of an 11 kW pump at 400 V.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Order = Literal["random", "fixed", "bursty"]
Floats = NDArray[np.float64]
Columns = dict[str, Any]

DENSITY, GRAVITY = 998.0, 9.81
RATED_SPEED, RATED_POWER, RATED_CURRENT, BEST_FLOW = 2900.0, 9.3, 17.5, 80.0
PUMP_CURVE, SUCTION_LOSS, VALVE_LOSS = 1.6e-3, 1.0e-4, 6.0e-4  # k, k_s and k_v in m / (m³/h)²
FIXED_LOSS, COPPER_LOSS, MAGNETISING = 0.25, 0.006, 6.0  # P_0 in kW, c in 1/kW, I_m in A at 400 V
BAR = 1e5

MODES: dict[str, tuple[float, int, int]] = {
    "idle": (0.15, 1300, 1500),
    "normal": (0.65, 1900, 2600),
    "boost": (0.20, 2700, 2900),
}
"""Share of the records, lowest and highest speed set-point in rpm (in steps of 50)."""

VALVE_STEPS = np.arange(30, 101, 10)  # per cent open


@dataclass(frozen=True, slots=True)
class Sensor:
    """unit; step: resolution in that unit; noise: standard deviation, in the unit; offset: standard deviation of the
    calibration error over pumps; missing: share of readings that never come; group: the device that sends it."""

    unit: str
    step: float
    noise: float
    offset: float
    missing: float
    group: str


SENSORS: dict[str, Sensor] = {
    "mode": Sensor("", 0, 0, 0, 0.02, "drive"),
    "speed_setpoint": Sensor("rpm", 50, 0, 0, 0.02, "drive"),
    "speed": Sensor("rpm", 1, 3.0, 2.0, 0.02, "drive"),
    "valve": Sensor("%", 10, 0, 0, 0.03, "process"),
    "flow": Sensor("m³/h", 0.1, 0.35, 0.3, 0.04, "process"),
    "suction_pressure": Sensor("bar", 0.001, 0.003, 0.003, 0.03, "process"),
    "discharge_pressure": Sensor("bar", 0.01, 0.012, 0.01, 0.03, "process"),
    "voltage": Sensor("V", 1, 0.3, 0.5, 0.02, "motor"),
    "current": Sensor("A", 0.1, 0.06, 0.05, 0.02, "motor"),
    "power": Sensor("kW", 0.01, 0.03, 0.02, 0.03, "motor"),
    "winding_temperature": Sensor("°C", 0.1, 0.6, 0.5, 0.03, "motor"),
    "ambient_temperature": Sensor("°C", 0.5, 0.2, 0.2, 0.05, "condition"),
    "bearing_temperature": Sensor("°C", 0.5, 0.4, 0.4, 0.04, "condition"),
    "vibration": Sensor("mm/s", 0.01, 0.0, 0.0, 0.04, "condition"),
}
FEATURES = tuple(SENSORS)

FAULTS: dict[str, str] = {
    "cavitation": "a clogged strainer starves the suction: head and flow sag, the pump rattles",
    "worn impeller": "less head and efficiency: less flow for the power",
    "blocked discharge": "something narrows the pipe: little flow at high pressure for this valve position",
    "bearing wear": "vibration and bearing temperature rise together",
    "stuck sensor": "a transmitter repeats a reading from another time: plausible alone, wrong in company",
    "sensor drift": "a transmitter reads some 10 to 25% wrong",
    "phase imbalance": "one phase draws more or less than its share, the winding heats up",
    "swapped sensors": "two transmitters are wired to each other's channel",
}
"""Kind of fault → what it does."""

STICKING = ("flow", "discharge_pressure", "current", "winding_temperature")
SWAPS = (
    ("winding_temperature", "bearing_temperature"),
    ("suction_pressure", "discharge_pressure"),
    ("ambient_temperature", "bearing_temperature"),
)

START = datetime(2026, 3, 2, 6, 0, tzinfo=UTC)
INTERVAL = 0.2
"""Seconds between the records of the fleet."""
SPREAD = 4.0
"""The longest a reading is under way, seconds; so some twenty records are open at once."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """N records. table: `record`, `time`, the features (null: never observed) and `fault` ("" for normal). delays:
    (N, F) seconds from a record's time to each reading's arrival, columns as in `FEATURES`."""

    table: pa.Table
    delays: Floats

    def normals(self) -> pa.Table:
        """The normal records without the `fault` column: what a model is trained on."""
        return self.table.filter(pc.equal(self.table.column("fault"), "")).drop_columns(["fault"])

    def arrivals(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Observed readings in order of arrival: (E,) row, (E,) feature, (E,) microseconds since 1970."""
        start = self.table.column("time").cast(pa.int64()).to_numpy()
        times = start[:, None] + np.round(self.delays * 1e6).astype(np.int64)
        seen = np.stack([self.table.column(name).is_valid().to_numpy() for name in FEATURES], 1)
        rows, features = np.nonzero(seen)
        order = np.argsort(times[rows, features], kind="stable")
        return rows[order], features[order], times[rows, features][order]

    def events(self) -> pa.Table:
        """Long layout in order of arrival: `record`, `feature`, `value` (text: modes stand beside numbers), `time`."""
        rows, features, times = self.arrivals()
        texts = np.stack([self.table.column(name).cast(pa.string()).to_numpy() for name in FEATURES], 1)
        return pa.table(
            {
                "record": self.table.column("record").take(pa.array(rows)),
                "feature": pa.array(np.array(FEATURES, object)[features], pa.string()),
                "value": pa.array(texts[rows, features], pa.string()),
                "time": pa.array(times, pa.timestamp("us", "UTC")),
            }
        )

    def messages(self) -> Iterator[bytes]:
        """One JSON message per reading in order of arrival, as a device would send it."""
        records = self.table.column("record").to_pylist()
        columns = [self.table.column(name).to_pylist() for name in FEATURES]
        for row, feature, time in zip(*(part.tolist() for part in self.arrivals()), strict=True):
            event = {
                "record": records[row],
                "feature": FEATURES[feature],
                "value": columns[feature][row],
                "time": time / 1e6,
            }
            yield orjson.dumps(event)


def simulate(
    records: int,
    seed: int,
    fault_share: float = 0.0,
    pumps: int = 12,
    order: Order = "random",
    fleet: int = 0,
) -> Fleet:
    """Draw `records` records, of which round(fault_share · records) are faulty, kinds as evenly as can be, in random
    places. `order` is the law by which the readings of a record arrive: "random" (independent uniform delays), "fixed"
    (always as in `FEATURES`), or "bursty" (the sensors of a device send together, in random order, after a delay of
    their own). The same arguments give the same fleet; `order` changes nothing but the delays, `seed` not the pumps.

    Raises ValueError where a number is out of range.
    """
    if records < 0 or pumps < 1 or not 0 <= fault_share <= 1:
        raise ValueError("simulate: records >= 0, pumps >= 1 and 0 <= fault_share <= 1 are needed")
    rng = np.random.default_rng([seed, 1])
    site = _pumps(pumps, np.random.default_rng([fleet, 2]))
    pump = rng.integers(pumps, size=records)
    faults = _faults(records, round(fault_share * records), rng)
    readings = _measure(_operate(_duty(records, rng), _of(site, pump), _damage(faults, rng)), _of(site, pump), rng)
    other = _measure(_operate(_duty(records, rng), _of(site, pump), {}), _of(site, pump), rng)
    _miswire(readings, other, faults, rng)
    missing = rng.random((records, len(FEATURES))) < [sensor.missing for sensor in SENSORS.values()]
    counter = _count_within(pump)
    time = int(START.timestamp() * 1e6) + np.round(np.arange(records) * INTERVAL * 1e6).astype(np.int64)
    columns: dict[str, pa.Array] = {
        "record": pa.array(
            [f"pump-{p + 1:02d}/{k:06d}" for p, k in zip(pump.tolist(), counter.tolist(), strict=True)], pa.string()
        ),
        "time": pa.array(time, pa.timestamp("us", "UTC")),
    }
    for i, name in enumerate(FEATURES):
        columns[name] = pa.array(readings[name], mask=missing[:, i], type=pa.string() if name == "mode" else None)
    columns["fault"] = pa.array(faults.tolist(), pa.string())
    return Fleet(pa.table(columns), _delays(records, order, np.random.default_rng([seed, 3])))


def _pumps(count: int, rng: np.random.Generator) -> Columns:
    """What makes each pump itself: wear, piping, calibration errors; every entry (count,)."""
    site: Columns = {
        "head": 42.0 * rng.normal(1, 0.015, count),
        "efficiency": 0.76 * rng.normal(1, 0.015, count),
        "best_flow": BEST_FLOW * rng.normal(1, 0.02, count),
        "lift": rng.uniform(5.0, 8.0, count),
        "piping": 1.1e-3 * rng.lognormal(0, 0.15, count),
        "vibration": 1.6 * rng.lognormal(0, 0.12, count),
        "friction": 0.25 * rng.lognormal(0, 0.15, count),
    }
    return site | {f"offset {name}": rng.normal(0, 1, count) * sensor.offset for name, sensor in SENSORS.items()}


def _of(site: Columns, pump: NDArray[np.int64]) -> Columns:
    return {name: values[pump] for name, values in site.items()}


def _duty(records: int, rng: np.random.Generator) -> Columns:
    """What is asked of the pump, and its surroundings: independent draws, every entry (records,)."""
    names = np.array(list(MODES), object)
    shares, low, high = (np.array(column) for column in zip(*MODES.values(), strict=True))
    mode = rng.choice(len(names), size=records, p=shares)
    steps = rng.integers(low[mode] // 50, high[mode] // 50 + 1)
    return {
        "mode": names[mode],
        "speed_setpoint": steps * 50,
        "valve": VALVE_STEPS[np.minimum(rng.binomial(9, 0.62, records), len(VALVE_STEPS) - 1)],
        "level": rng.uniform(1.8, 4.2, records),
        "voltage": rng.normal(400.0, 3.5, records),
        "ambient": rng.normal(19.0, 5.0, records),
        "roughness": rng.lognormal(0, 0.07, records),
    }


def _operate(duty: Columns, site: Columns, damage: Mapping[str, Floats]) -> Columns:
    """Solve the equations of the module for the true quantities; `damage` bends them (see `_damage`)."""

    def bent(name: str, neutral: float) -> Floats | float:
        return damage.get(name, neutral)

    speed = duty["speed_setpoint"] * (1 - 0.004 * duty["speed_setpoint"] / RATED_SPEED)
    r = speed / RATED_SPEED
    level, lift, opening = duty["level"], site["lift"], duty["valve"] / 100
    suction = SUCTION_LOSS * bent("strainer", 1)
    resistance = (site["piping"] + VALVE_LOSS / opening**2) * bent("resistance", 1)
    shut_off = r**2 * site["head"] * bent("head", 1)
    flow = np.sqrt(np.maximum(shut_off - lift + level, 0.05) / (PUMP_CURVE + suction + resistance))
    head = shut_off - PUMP_CURVE * flow**2
    suction_pressure = DENSITY * GRAVITY * (level - suction * flow**2) / BAR
    phi = flow / (r * site["best_flow"])
    efficiency = site["efficiency"] * bent("efficiency", 1) * np.clip(phi * (2 - phi), 0.02, 1)
    shaft = DENSITY * GRAVITY * flow / 3600 * head / efficiency / 1000 + site["friction"] * r * bent("friction", 1)
    electrical = shaft + FIXED_LOSS + COPPER_LOSS * shaft**2
    active = 1000 * electrical / (np.sqrt(3) * duty["voltage"])
    current = np.sqrt(active**2 + (MAGNETISING * duty["voltage"] / 400) ** 2)
    load, ambient = shaft / RATED_POWER, duty["ambient"]
    winding = ambient + 65 * (current / RATED_CURRENT) ** 2 / (0.4 + 0.6 * r) + bent("winding", 0)
    bearing = ambient + 14 * r + 16 * load + bent("bearing", 0)
    shaking = site["vibration"] * (0.25 + 0.6 * r**2 + 0.25 * load + r**2 * (1 - phi) ** 2)
    return {
        "mode": duty["mode"],
        "speed_setpoint": duty["speed_setpoint"],
        "speed": speed,
        "valve": duty["valve"],
        "flow": flow,
        "suction_pressure": suction_pressure,
        "discharge_pressure": suction_pressure + DENSITY * GRAVITY * head / BAR,
        "voltage": duty["voltage"] * bent("voltage", 1),
        "current": current * bent("current", 1),
        "power": electrical,
        "winding_temperature": winding,
        "ambient_temperature": ambient,
        "bearing_temperature": bearing,
        "vibration": shaking * duty["roughness"] * bent("vibration", 1),
    }


def _measure(true: Columns, site: Columns, rng: np.random.Generator) -> Columns:
    """What the transmitters say: calibration error, noise, resolution."""
    readings: Columns = {}
    for name, sensor in SENSORS.items():
        values = true[name]
        if sensor.noise > 0:
            values = values + site[f"offset {name}"] + rng.normal(0, sensor.noise, len(values))
        readings[name] = values if name == "mode" else _quantised(values, sensor.step)
    return readings


def _quantised(values: Floats, step: float) -> Any:
    """Whole numbers as integers, others without the dust of binary fractions."""
    if step >= 1:
        return (np.round(values / step) * step).astype(np.int64)
    return np.round(np.round(values / step) * step, 6)


def _faults(records: int, faulty: int, rng: np.random.Generator) -> NDArray[Any]:
    """(records,) kind of fault, "" for normal."""
    kinds = np.array(list(FAULTS), object)
    faults = np.full(records, "", object)
    faults[rng.permutation(records)[:faulty]] = kinds[np.arange(faulty) % len(kinds)]
    return faults


def _damage(faults: NDArray[Any], rng: np.random.Generator) -> dict[str, Floats]:
    """How faults bend the physics: factors (neutral 1) and rises in kelvin (neutral 0), every entry (records,)."""

    def where(kind: str, low: float, high: float, neutral: float = 1.0) -> Floats:
        return np.where(faults == kind, rng.uniform(low, high, len(faults)), neutral)

    uneven = np.where(
        rng.random(len(faults)) < 0.5, where("phase imbalance", 0.6, 0.8), where("phase imbalance", 1.2, 1.45)
    )
    return {
        "head": where("worn impeller", 0.72, 0.86) * where("cavitation", 0.80, 0.92),
        "efficiency": where("worn impeller", 0.80, 0.90) * where("cavitation", 0.85, 0.95),
        "strainer": where("cavitation", 2.5, 4.5),
        "resistance": where("blocked discharge", 5.0, 25.0),
        "vibration": where("cavitation", 1.8, 3.0)
        * where("bearing wear", 1.5, 2.6)
        * where("phase imbalance", 1.1, 1.4),
        "bearing": where("bearing wear", 8.0, 20.0, 0.0),
        "friction": where("bearing wear", 1.3, 2.5),
        "current": uneven,
        "winding": where("phase imbalance", 6.0, 15.0, 0.0),
        "voltage": where("phase imbalance", 0.97, 0.99),
    }


def _miswire(readings: Columns, other: Columns, faults: NDArray[Any], rng: np.random.Generator) -> None:
    """Faults of the transmitters, in place. other: readings of the same pumps at another, normal time."""
    records = len(faults)
    victim = rng.integers(len(STICKING), size=records)
    factor = np.where(rng.random(records) < 0.5, rng.uniform(0.75, 0.90, records), rng.uniform(1.10, 1.25, records))
    for i, name in enumerate(STICKING):
        stuck = (faults == "stuck sensor") & (victim == i)
        drifting = (faults == "sensor drift") & (victim == i)
        readings[name] = np.where(stuck, other[name], readings[name])
        drifted = _quantised(readings[name] * factor, SENSORS[name].step)
        readings[name] = np.where(drifting, drifted, readings[name])
    pair = rng.integers(len(SWAPS), size=records)
    for i, (one, two) in enumerate(SWAPS):
        swapped = (faults == "swapped sensors") & (pair == i)
        a, b = readings[one], readings[two]
        readings[one], readings[two] = np.where(swapped, b, a), np.where(swapped, a, b)


def _count_within(pump: NDArray[np.int64]) -> NDArray[np.int64]:
    """(N,) how many earlier records the same pump has."""
    order = np.argsort(pump, kind="stable")
    ordered = pump[order]
    first = np.searchsorted(ordered, ordered, "left")
    counter = np.empty(len(pump), np.int64)
    counter[order] = np.arange(len(pump)) - first
    return counter


def _delays(records: int, order: Order, rng: np.random.Generator) -> Floats:
    """(records, F) seconds until each reading arrives, by the arrival law."""
    shape = records, len(FEATURES)
    if order == "random":
        return rng.uniform(0, SPREAD, shape)
    if order == "fixed":
        return np.broadcast_to(np.arange(shape[1]) * SPREAD / shape[1], shape).copy()
    if order == "bursty":
        devices = sorted({sensor.group for sensor in SENSORS.values()})
        device = np.array([devices.index(sensor.group) for sensor in SENSORS.values()])
        # Slots keep the bursts of one record apart, so that a device's readings always come together.
        slots = rng.permuted(np.broadcast_to(np.arange(len(devices)), (records, len(devices))), axis=1)
        width = SPREAD / len(devices)
        burst = (slots + rng.uniform(0, 0.9, slots.shape)) * width
        return burst[:, device] + rng.uniform(0, 0.1 * width, shape)
    raise ValueError(f"simulate: order {order!r} is unknown; use random, fixed or bursty")
