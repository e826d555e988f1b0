"""Simulate centrifugal pumps: physically coupled sensors, several kinds of fault, readings that arrive asynchronously.

A record is one measurement of one pump, with up to fourteen readings, one of each sensor. Pump, duty (mode of
operation, speed and valve), weather and noise are drawn independently for every record. So normal records are
exchangeable, and a guaranteed false-alarm rate can be tested on them. (Consecutive measurements of a real pump are
similar. This is left out on purpose.) The pumps with their wear, piping and calibration errors depend on the argument
`fleet` only, so two seeds give two periods of operation of the same pumps.

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
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Columns = dict[str, Any]

DENSITY, GRAVITY = 998.0, 9.81  # ρ of water in kg/m³, g in m/s²
RATED_SPEED, RATED_POWER, RATED_CURRENT, BEST_FLOW = 2900.0, 9.3, 17.5, 80.0  # n_0 in rpm, kW, I_0 in A, Q_best in m³/h
PUMP_CURVE, SUCTION_LOSS, VALVE_LOSS = 1.6e-3, 1.0e-4, 6.0e-4  # k, k_s and k_v in m / (m³/h)²
FIXED_LOSS, COPPER_LOSS, MAGNETISING = 0.25, 0.006, 6.0  # P_0 in kW, c in 1/kW, I_m in A at 400 V
BAR = 1e5  # in pascal

MODES: dict[str, tuple[float, int, int]] = {
    "idle": (0.15, 1300, 1500),
    "normal": (0.65, 1900, 2600),
    "boost": (0.20, 2700, 2900),
}
"""For each mode of operation the share of the records, and the lowest and highest speed set-point in rpm."""

SETPOINT_STEP = 50
"""Speed set-points are multiples of this number, in rpm."""

VALVE_POSITIONS = np.arange(30, 101, 10)
"""Possible openings of the valve in per cent."""


@dataclass(frozen=True, slots=True)
class Sensor:
    """The properties of a sensor, which are the same for all pumps.

    Attributes:
        unit: Unit of its readings, "" if they are labels.
        resolution: Smallest difference of two readings, in the unit; 0 if they are labels.
        noise: Standard deviation of the noise of each reading, in the unit.
        offset: Standard deviation over pumps of the sensor's calibration error (a constant for each pump), in the unit.
        missing_share: Share of readings that never arrive, from 0 to 1.
        device: Name of the device that sends the readings of this sensor. A device sends those of several sensors.
    """

    unit: str
    resolution: float
    noise: float
    offset: float
    missing_share: float
    device: str


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
"""The sensors of each pump by name."""
FEATURES = tuple(SENSORS)
"""The names of the sensors; the index of a name is the feature index in arrays of this module."""

MEANING_BY_FAULT: dict[str, str] = {
    "cavitation": "a clogged strainer reduces the suction: head and flow decrease, the pump vibrates",
    "worn impeller": "head and efficiency decrease: less flow at the same power",
    "blocked discharge": "the pipe is partly blocked: little flow at high pressure for this valve position",
    "bearing wear": "vibration and bearing temperature rise together",
    "stuck sensor": "a transmitter repeats an old reading: plausible alone, wrong together with the others",
    "sensor drift": "the readings of a transmitter are wrong by 10 to 25%",
    "phase imbalance": "one phase draws more or less than its share, and the winding becomes hot",
    "swapped sensors": "two transmitters are wired to each other's channel",
}
"""The effect of each kind of fault."""

# The sensors with the faults "stuck sensor" and "sensor drift", and the pairs with the fault "swapped sensors".
SENSORS_THAT_STICK = ("flow", "discharge_pressure", "current", "winding_temperature")
SWAPPED_PAIRS = (
    ("winding_temperature", "bearing_temperature"),
    ("suction_pressure", "discharge_pressure"),
    ("ambient_temperature", "bearing_temperature"),
)

START_TIME = datetime(2026, 3, 2, 6, 0, tzinfo=UTC)
INTERVAL = 0.2
"""Seconds between two consecutive records, of whichever pump."""

MAX_DELAY = 4.0
"""Longest time from a measurement to the arrival of a reading, in seconds, so about twenty records are open at once."""


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """Simulated records of several pumps, and the delays with which their readings arrive.

    Attributes:
        table: One row per record, N rows. The columns are `record` (the id), `time` (of the measurement), one column
            for each of the F features (null if the reading never arrives), and `fault` (kind of fault, "" for normal).
        delays: Seconds from the measurement of a record to the arrival of each of its readings, (N, F), with the
            features in the order of `FEATURES`.
    """

    table: pa.Table
    delays: Floats

    def select_normal_records(self) -> pa.Table:
        """Return the normal records without the column `fault`, to train a model on."""
        return self.table.filter(pc.equal(self.table.column("fault"), "")).drop_columns(["fault"])

    def sort_by_arrival(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return all E readings of the table that arrive (are not null), in order of arrival.

        Returns:
            Three arrays of shape (E,): row of the reading in the table, index of its feature in `FEATURES`, and arrival
            time in microseconds since 1970.
        """
        measured_at = self.table.column("time").cast(pa.int64()).to_numpy()  # microseconds since 1970
        arrival_times = measured_at[:, None] + np.round(self.delays * 1e6).astype(np.int64)
        is_observed = np.stack([self.table.column(name).is_valid().to_numpy() for name in FEATURES], 1)
        rows, features = np.nonzero(is_observed)
        times = arrival_times[rows, features]
        order = np.argsort(times, kind="stable")
        return rows[order], features[order], times[order]

    def iterate_messages(self) -> Iterator[bytes]:
        """Yield one JSON message per reading in order of arrival, in the format that the consumer decodes.

        A message has the keys `record`, `feature`, `value`, and `time` (of the arrival, in seconds since 1970).
        """
        records = self.table.column("record").to_pylist()
        columns = [self.table.column(name).to_pylist() for name in FEATURES]
        rows, features, times = (array.tolist() for array in self.sort_by_arrival())
        for row, feature, time in zip(rows, features, times, strict=True):
            event = {
                "record": records[row],
                "feature": FEATURES[feature],
                "value": columns[feature][row],
                "time": time / 1e6,  # microseconds to seconds
            }
            yield orjson.dumps(event)


def simulate(
    num_records: int,
    seed: int,
    fault_share: float = 0.0,
    num_pumps: int = 12,
    fleet: int = 0,
) -> SimulatedFleet:
    """Simulate measurements of pumps, and return them as records. Equal arguments give equal records.

    Each reading arrives after an independent delay, uniform from 0 to `MAX_DELAY` seconds.

    Args:
        num_records: Number of records. A record is one measurement of one pump, which is chosen at random.
        seed: Seed of all random choices except the properties of the pumps. Another seed with the same `fleet` gives
            other measurements of the same pumps.
        fault_share: Share of faulty records, from 0 to 1. They are at random positions, and all kinds of fault are
            equally frequent.
        num_pumps: Number of pumps.
        fleet: Seed of the properties of the pumps (wear, piping, calibration errors).

    Returns:
        The records with the delays of their readings.

    Raises:
        ValueError: If a number is out of range.
    """
    if num_records < 0:
        raise ValueError(f"simulate: num_records is {num_records}; it must be at least 0")
    if num_pumps < 1:
        raise ValueError(f"simulate: num_pumps is {num_pumps}; it must be at least 1")
    if not 0 <= fault_share <= 1:
        raise ValueError(f"simulate: fault_share is {fault_share}; it must be from 0 to 1")
    # The second number of each seed makes the generators of measurements, pumps and delays independent.
    rng = np.random.default_rng([seed, 1])
    properties_by_pump = _draw_pumps(num_pumps, np.random.default_rng([fleet, 2]))
    pump = rng.integers(num_pumps, size=num_records)
    properties = {name: values[pump] for name, values in properties_by_pump.items()}  # of the pump of each record
    faults = _draw_faults(num_records, round(fault_share * num_records), rng)
    duty = _draw_duty(num_records, rng)
    readings = _measure(_solve(duty, properties, _draw_damage(faults, rng)), properties, rng)
    # A stuck sensor repeats a reading of the same pump from another time, when the pump had no fault.
    other_duty = _draw_duty(num_records, rng)
    readings_at_other_time = _measure(_solve(other_duty, properties, {}), properties, rng)
    _apply_sensor_faults(readings, readings_at_other_time, faults, rng)
    missing_shares = [sensor.missing_share for sensor in SENSORS.values()]
    is_missing = rng.random((num_records, len(FEATURES))) < missing_shares
    counter = _count_earlier_records(pump)
    time = int(START_TIME.timestamp() * 1e6) + np.round(np.arange(num_records) * INTERVAL * 1e6).astype(np.int64)
    columns: dict[str, pa.Array] = {
        "record": pa.array(
            [f"pump-{p + 1:02d}/{k:06d}" for p, k in zip(pump.tolist(), counter.tolist(), strict=True)], pa.string()
        ),
        "time": pa.array(time, pa.timestamp("us", "UTC")),
    }
    for i, name in enumerate(FEATURES):
        columns[name] = pa.array(readings[name], mask=is_missing[:, i], type=pa.string() if name == "mode" else None)
    columns["fault"] = pa.array(faults.tolist(), pa.string())
    table = pa.table(columns)
    # A table that states units lets training store them, so that alerts have them.
    fields = [
        field.with_metadata({"unit": SENSORS[field.name].unit}) if field.name in SENSORS else field
        for field in table.schema
    ]
    table = table.cast(pa.schema(fields))
    delays = np.random.default_rng([seed, 3]).uniform(0, MAX_DELAY, (num_records, len(FEATURES)))
    return SimulatedFleet(table, delays)


def _draw_pumps(num_pumps: int, rng: np.random.Generator) -> Columns:
    """Draw the constant properties of each pump: its parameters (wear, piping) and its sensors' calibration errors.

    Returns:
        Arrays of shape (num_pumps,) by name, with the symbols of the equations at the top of this module:
        "head" h_0 (of the pump without flow, m), "efficiency" η_max (the best one, 0 to 1), "best_flow" Q_best (flow
        with the best efficiency, m³/h), "lift" z (height to which water is pumped, m), "piping" k_p (friction of the
        pipes, m / (m³/h)²), "vibration" v_0 (typical vibration, mm/s), "friction" P_f (power lost by friction, kW).
        "offset NAME" is the calibration error of the sensor NAME, in its unit.
    """
    # Each parameter is a typical value times a random factor close to 1, except the lift.
    properties: Columns = {
        "head": 42.0 * rng.normal(1, 0.015, num_pumps),
        "efficiency": 0.76 * rng.normal(1, 0.015, num_pumps),
        "best_flow": BEST_FLOW * rng.normal(1, 0.02, num_pumps),
        "lift": rng.uniform(5.0, 8.0, num_pumps),
        "piping": 1.1e-3 * rng.lognormal(0, 0.15, num_pumps),
        "vibration": 1.6 * rng.lognormal(0, 0.12, num_pumps),
        "friction": 0.25 * rng.lognormal(0, 0.15, num_pumps),
    }
    return properties | {
        f"offset {name}": rng.normal(0, 1, num_pumps) * sensor.offset for name, sensor in SENSORS.items()
    }


def _draw_duty(num_records: int, rng: np.random.Generator) -> Columns:
    """Draw the operation and the environment of the pump for each record, independently of the other records.

    Returns:
        Arrays of shape (num_records,) by name: "mode" of operation (a label), "speed_setpoint" (rpm), "valve" opening
        (%), "level" of water in the suction tank (m), "voltage" of the mains (V), "ambient" temperature (°C), and
        "roughness" (random factor of the vibration).
    """
    mode_names = np.array(list(MODES), object)
    shares, lowest_speeds, highest_speeds = (np.array(column) for column in zip(*MODES.values(), strict=True))
    mode = rng.choice(len(mode_names), size=num_records, p=shares)  # index of the mode of each record
    # A uniform multiple of SETPOINT_STEP between the lowest and the highest speed of the mode, both inclusive.
    setpoint_steps = rng.integers(lowest_speeds[mode] // SETPOINT_STEP, highest_speeds[mode] // SETPOINT_STEP + 1)
    # The binomial distribution makes openings of 80 to 90% most frequent and a nearly closed valve rare. It has more
    # values than there are positions, so its largest values become the last position.
    position_index = np.minimum(rng.binomial(9, 0.62, num_records), len(VALVE_POSITIONS) - 1)
    return {
        "mode": mode_names[mode],
        "speed_setpoint": setpoint_steps * SETPOINT_STEP,
        "valve": VALVE_POSITIONS[position_index],
        "level": rng.uniform(1.8, 4.2, num_records),
        "voltage": rng.normal(400.0, 3.5, num_records),
        "ambient": rng.normal(19.0, 5.0, num_records),
        "roughness": rng.lognormal(0, 0.07, num_records),
    }


def _solve(duty: Columns, properties: Columns, damage: Mapping[str, Floats]) -> Columns:
    """Compute the true physical quantities of N records from the equations at the top of this module.

    Args:
        duty: Operation and environment of each record, from `_draw_duty`.
        properties: Properties of the pump of each record, named as in `_draw_pumps`, each of shape (N,).
        damage: Factors and temperature rises by which faults change the equations, from `_draw_damage`. Empty if no
            record has a fault.

    Returns:
        The quantity that each sensor measures, without errors and noise, by the name of the sensor, each of shape (N,)
        and in the unit of the sensor.
    """

    def damaged(name: str, neutral: float) -> Floats | float:
        """Return the factors or temperature rises `name` of `damage`; without these, `neutral`, which has no effect."""
        return damage.get(name, neutral)

    # The motor runs slightly below the set-point, by up to 0.4% (slip).
    speed = duty["speed_setpoint"] * (1 - 0.004 * duty["speed_setpoint"] / RATED_SPEED)
    r = speed / RATED_SPEED
    level, lift, opening = duty["level"], properties["lift"], duty["valve"] / 100
    suction = SUCTION_LOSS * damaged("strainer", 1)
    resistance = (properties["piping"] + VALVE_LOSS / opening**2) * damaged("resistance", 1)
    shut_off_head = r**2 * properties["head"] * damaged("head", 1)
    # The flow at which the pump curve and the system curve have the same head.
    flow = np.sqrt(np.maximum(shut_off_head - lift + level, 0.05) / (PUMP_CURVE + suction + resistance))
    head = shut_off_head - PUMP_CURVE * flow**2
    suction_pressure = DENSITY * GRAVITY * (level - suction * flow**2) / BAR
    phi = flow / (r * properties["best_flow"])
    efficiency = properties["efficiency"] * damaged("efficiency", 1) * np.clip(phi * (2 - phi), 0.02, 1)
    hydraulic_power = DENSITY * GRAVITY * flow / 3600 * head / efficiency / 1000  # m³/h to m³/s, W to kW
    shaft = hydraulic_power + properties["friction"] * r * damaged("friction", 1)
    electrical = shaft + FIXED_LOSS + COPPER_LOSS * shaft**2
    active_current = 1000 * electrical / (np.sqrt(3) * duty["voltage"])
    current = np.sqrt(active_current**2 + (MAGNETISING * duty["voltage"] / 400) ** 2)
    load, ambient = shaft / RATED_POWER, duty["ambient"]
    winding = ambient + 65 * (current / RATED_CURRENT) ** 2 / (0.4 + 0.6 * r) + damaged("winding", 0)
    bearing = ambient + 14 * r + 16 * load + damaged("bearing", 0)
    shaking = properties["vibration"] * (0.25 + 0.6 * r**2 + 0.25 * load + r**2 * (1 - phi) ** 2)
    return {
        "mode": duty["mode"],
        "speed_setpoint": duty["speed_setpoint"],
        "speed": speed,
        "valve": duty["valve"],
        "flow": flow,
        "suction_pressure": suction_pressure,
        "discharge_pressure": suction_pressure + DENSITY * GRAVITY * head / BAR,
        "voltage": duty["voltage"] * damaged("voltage", 1),
        "current": current * damaged("current", 1),
        "power": electrical,
        "winding_temperature": winding,
        "ambient_temperature": ambient,
        "bearing_temperature": bearing,
        "vibration": shaking * duty["roughness"] * damaged("vibration", 1),
    }


def _measure(true_values: Columns, properties: Columns, rng: np.random.Generator) -> Columns:
    """Return the readings of the sensors: true values with calibration error and noise, rounded to the resolution.

    Args:
        true_values: The physical quantities of N records by name of the sensor, each of shape (N,).
        properties: Properties of the pump of each record. The calibration error of the sensor NAME is "offset NAME".
        rng: Source of random numbers for the noise.

    Returns:
        The readings by name of the sensor, each of shape (N,).
    """
    readings: Columns = {}
    for name, sensor in SENSORS.items():
        values = true_values[name]
        # The noise is 0 for labels and set-points, which are exact, and for the vibration, which `_solve` randomises.
        if sensor.noise > 0:
            values = values + properties[f"offset {name}"] + rng.normal(0, sensor.noise, len(values))
        readings[name] = values if name == "mode" else _round_to_resolution(values, sensor.resolution)
    return readings


def _round_to_resolution(values: Floats, resolution: float) -> Any:
    """Return values rounded to multiples of `resolution`: integers if it is at least 1, otherwise float64."""
    if resolution >= 1:
        return (np.round(values / resolution) * resolution).astype(np.int64)
    return np.round(np.round(values / resolution) * resolution, 6)


def _draw_faults(num_records: int, num_faulty: int, rng: np.random.Generator) -> NDArray[Any]:
    """Choose `num_faulty` records at random and assign the kinds of fault to them in turn.

    So all kinds of fault are equally frequent (their numbers of records differ by at most one).

    Returns:
        The kind of fault of each record as a string, "" for normal records, (num_records,).
    """
    kinds = np.array(list(MEANING_BY_FAULT), object)
    faults = np.full(num_records, "", object)
    faulty_rows = rng.permutation(num_records)[:num_faulty]
    faults[faulty_rows] = kinds[np.arange(num_faulty) % len(kinds)]
    return faults


def _draw_damage(faults: NDArray[Any], rng: np.random.Generator) -> dict[str, Floats]:
    """Draw how strongly faults change the physical quantities of N records.

    Args:
        faults: Kind of fault of each record, "" for normal records, (N,).
        rng: Source of random numbers.

    Returns:
        Arrays of shape (N,) by name of the changed quantity, for `_solve`. "bearing" and "winding" are temperature
        rises in kelvin, 0 without a fault. All others are factors, which are 1 without a fault. They multiply the
        pump's "head", its "efficiency", the flow resistance of the "strainer" and of the pipe ("resistance"), the
        "vibration", the "friction" losses, and the measured "current" and "voltage".
    """

    def draw_for(kind: str, low: float, high: float, neutral: float = 1.0) -> Floats:
        """Return a number for each record: random from `low` to `high` if its fault is `kind`, otherwise `neutral`."""
        return np.where(faults == kind, rng.uniform(low, high, len(faults)), neutral)

    # The current is measured in one phase, which draws either less or more than its share.
    is_low_phase = rng.random(len(faults)) < 0.5
    current_factor = np.where(
        is_low_phase, draw_for("phase imbalance", 0.6, 0.8), draw_for("phase imbalance", 1.2, 1.45)
    )
    return {
        "head": draw_for("worn impeller", 0.72, 0.86) * draw_for("cavitation", 0.80, 0.92),
        "efficiency": draw_for("worn impeller", 0.80, 0.90) * draw_for("cavitation", 0.85, 0.95),
        "strainer": draw_for("cavitation", 2.5, 4.5),
        "resistance": draw_for("blocked discharge", 5.0, 25.0),
        "vibration": draw_for("cavitation", 1.8, 3.0)
        * draw_for("bearing wear", 1.5, 2.6)
        * draw_for("phase imbalance", 1.1, 1.4),
        "bearing": draw_for("bearing wear", 8.0, 20.0, 0.0),
        "friction": draw_for("bearing wear", 1.3, 2.5),
        "current": current_factor,
        "winding": draw_for("phase imbalance", 6.0, 15.0, 0.0),
        "voltage": draw_for("phase imbalance", 0.97, 0.99),
    }


def _apply_sensor_faults(
    readings: Columns, readings_at_other_time: Columns, faults: NDArray[Any], rng: np.random.Generator
) -> None:
    """Change the readings of records with the faults "stuck sensor", "sensor drift" and "swapped sensors", in place.

    Args:
        readings: The readings of N records by name of the sensor, each of shape (N,).
        readings_at_other_time: Normal readings of the same pumps at another time, in the same form. A stuck sensor
            repeats them.
        faults: Kind of fault of each record, "" for normal records, (N,).
        rng: Source of random numbers.
    """
    num_records = len(faults)
    # Random numbers are drawn for all records. Those of records without such a fault are not used.
    sensor_index = rng.integers(len(SENSORS_THAT_STICK), size=num_records)  # the sensor that sticks or drifts
    is_too_low = rng.random(num_records) < 0.5
    drift_factor = np.where(is_too_low, rng.uniform(0.75, 0.90, num_records), rng.uniform(1.10, 1.25, num_records))
    for i, name in enumerate(SENSORS_THAT_STICK):
        is_stuck = (faults == "stuck sensor") & (sensor_index == i)
        is_drifting = (faults == "sensor drift") & (sensor_index == i)
        readings[name] = np.where(is_stuck, readings_at_other_time[name], readings[name])
        drifted = _round_to_resolution(readings[name] * drift_factor, SENSORS[name].resolution)
        readings[name] = np.where(is_drifting, drifted, readings[name])
    pair_index = rng.integers(len(SWAPPED_PAIRS), size=num_records)  # the pair of sensors that is swapped
    for i, (first, second) in enumerate(SWAPPED_PAIRS):
        is_swapped = (faults == "swapped sensors") & (pair_index == i)
        first_values, second_values = readings[first], readings[second]
        readings[first] = np.where(is_swapped, second_values, first_values)
        readings[second] = np.where(is_swapped, first_values, second_values)


def _count_earlier_records(pump: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each of N records how many earlier records have the same pump. Record ids contain this number.

    Args:
        pump: Index of the pump of each record, (N,).

    Returns:
        The numbers, (N,). For example, the pumps [5, 7, 5, 5] give [0, 0, 1, 2].
    """
    order = np.argsort(pump, kind="stable")  # groups the records by pump and keeps their order within a pump
    sorted_pump = pump[order]
    # For each sorted record, the position at which the group of its pump starts. The distance from it is the number.
    start_of_group = np.searchsorted(sorted_pump, sorted_pump, "left")
    num_earlier = np.empty(len(pump), np.int64)
    num_earlier[order] = np.arange(len(pump)) - start_of_group
    return num_earlier
