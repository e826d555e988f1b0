"""A simulated fleet of pumps with asynchronous sensors, and faults that begin at known times.

    python -m benchmarks.fleet --shifts 400 --max-time 5m --peer-time 180 --deformer

A record is a shift of two hours of one pump. Each sensor reports on its own schedule, with jitter and gaps; the valve
reports when it moves. The speed follows set-points of the operator, the flow and the pressure follow speed and valve,
the current follows the power, and the temperatures follow the losses with delays of 10 and 20 minutes. Pumps differ in
their pump curve and in the offsets of their sensors. Shifts are drawn independently, so normal ones are exchangeable.

Each faulty shift has one fault, which begins between a quarter and 60% of the shift:

    drift          the flow transmitter's error grows to 12% within 20 minutes
    stuck          flow, pressure, current or motor temperature repeats its last value
    swapped        the temperatures of motor and bearing exchange their names
    blocked        the pipe is partly blocked: 25% less flow for this valve opening, within 5 minutes
    bearing        vibration grows by 60% and the bearing becomes 8 K warmer, within 30 minutes
    cooling        the motor's fan is dirty: its temperature rise grows by 40%
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import build_parser, describe_machine, format_today, publish_results, run_benchmark
from benchmarks.irregular_alerts import (
    ALPHAS,
    Case,
    average_lines,
    format_auroc,
    format_detections,
    format_false_alarms,
)
from benchmarks.irregular_contenders import (
    add_contender_options,
    describe_times,
    measure_cases,
)
from benchmarks.irregular_records import FaultyReadings, Readings, make_readings
from benchmarks.tables import parse_seeds, require_scikit_learn
from deformer_stream.errors import ConfigError

Floats = NDArray[np.float64]

MINUTE = 60.0
SHIFT_SECONDS = 7200.0
STEP = 10.0
"""Seconds of a step of the simulation."""

NUM_PUMPS = 12

FAULTS = ("drift", "stuck", "swapped", "blocked", "bearing", "cooling")
STICKING_SENSORS = ("flow", "pressure", "current", "motor_temperature")

SENSORS: dict[str, tuple[float, float, float]] = {
    "speed": (40.0, 1.0, 3.0),
    "flow": (30.0, 0.1, 0.4),
    "pressure": (60.0, 0.01, 0.015),
    "current": (60.0, 0.1, 0.08),
    "power": (120.0, 0.01, 0.03),
    "vibration": (90.0, 0.01, 0.0),
    "motor_temperature": (300.0, 0.1, 0.2),
    "bearing_temperature": (240.0, 0.1, 0.2),
    "ambient_temperature": (900.0, 0.5, 0.1),
}
"""The mean seconds between the readings, the resolution, and the standard deviation of the noise of each sensor.

The valve is not contained, because it reports when it moves.
"""

GAP_SHARE = 0.03
"""Share of the readings that never arrive."""

DELAYS = tuple(minutes * MINUTE for minutes in (2, 5, 10, 20, 40))
AUROC_SECONDS = tuple(minutes * MINUTE for minutes in (30, 60, 90, 120))


def simulate_states(pump: int, fault: str, onset: float, rng: np.random.Generator) -> dict[str, Floats]:
    """Return the true value of each sensor on the grid of time steps.

    Args:
        pump: Number of the pump, which decides about its pump curve.
        fault: The kind of fault, "" for none. The faults of transmitters are not contained in true values.
        onset: Seconds since the beginning of the shift at which the fault begins.
        rng: Source of random numbers.
    """
    curve = np.random.default_rng([pump, 0xF1]).normal(1.0, 0.02, 4)
    num_steps = int(SHIFT_SECONDS / STEP) + 1
    times = STEP * np.arange(num_steps)
    setpoint = np.repeat(rng.choice(np.arange(1500, 2901, 50), 40), 1 + rng.poisson(90, 40))[:num_steps].astype(float)
    speed = _follow(setpoint, 30.0)
    positions = np.clip(60 + 10 * np.cumsum(rng.choice([-1, 0, 1], 60)), 30, 100)
    valve = np.repeat(positions, 1 + rng.poisson(40, 60))[:num_steps].astype(float)
    ambient = rng.normal(18, 5) + 2 * np.sin(2 * np.pi * (times / 86_400 + rng.random()))

    def ramp(minutes: float) -> Floats:
        return np.clip((times - onset) / (minutes * MINUTE), 0.0, 1.0)

    opening = valve * (1 - 0.25 * ramp(5)) if fault == "blocked" else valve
    r = speed / 2900
    # Pump curve H = 44 r² − k Q² and system curve H = 4 + (k_s + k_v / v²) Q².
    k_pump, k_system = 1.6e-3 * curve[0], 1.5e-3 + 9e-4 / (opening / 100) ** 2
    flow = np.sqrt(np.maximum(44 * curve[1] * r**2 - 4, 0.05) / (k_pump + k_system))
    head = 44 * curve[1] * r**2 - k_pump * flow**2
    phi = np.clip(flow / (80 * np.maximum(r, 0.1)), 0.05, 1.8)
    efficiency = 0.78 * curve[2] * phi * (2 - phi) + 0.02
    power = 998 * 9.81 * flow / 3600 * head / efficiency / 1000 + 0.3 * r + 0.25
    current = np.hypot(1.55 * power * curve[3], 6.0)
    rise = 50 * (current / 17.5) ** 2 / (0.5 + 0.5 * r) * (1.4 if fault == "cooling" else 1.0)
    if fault == "cooling":
        rise = np.where(times < onset, rise / 1.4, rise)
    motor = ambient + _follow(rise, 1200.0)
    bearing = ambient + _follow(14 * r + 1.7 * power, 600.0)
    vibration = 2.2 * (0.25 + 0.6 * r**2 + 0.03 * power + r**2 * (1 - phi) ** 2)
    if fault == "bearing":
        bearing = bearing + 8 * ramp(30)
        vibration = vibration * (1 + 0.6 * ramp(30))
    return {
        "speed": speed,
        "flow": flow,
        "pressure": 0.0979 * head,
        "current": current,
        "power": power,
        "vibration": vibration,
        "motor_temperature": motor,
        "bearing_temperature": bearing,
        "ambient_temperature": ambient,
        "valve": valve,
    }


def _follow(target: Floats, seconds: float) -> Floats:
    """Return a first-order lag of the target with this time constant, which begins at the first value."""
    from scipy.signal import lfilter

    decay = np.exp(-STEP / seconds)
    state, _ = lfilter([1 - decay], [1, -decay], target, zi=np.array([decay * target[0]]))
    return np.asarray(state)


def read_sensors(
    pump: int, states: Mapping[str, Floats], rng: np.random.Generator
) -> tuple[list[str], list[float], list[float]]:
    """Return the names, values and times of the readings of a shift, without faults of transmitters."""
    offsets = dict(zip(SENSORS, np.random.default_rng([pump, 0x0F]).normal(size=len(SENSORS)), strict=True))
    names, values, times = [], [], []
    grid = STEP * np.arange(len(states["speed"]))
    for name, (period, resolution, noise) in SENSORS.items():
        num_periods = int(SHIFT_SECONDS / period) + 2
        own_times = (rng.random() + np.arange(num_periods) + rng.uniform(-0.3, 0.3, num_periods)) * period
        own_times = np.round(own_times[(own_times >= 0) & (own_times < SHIFT_SECONDS)], 1)
        own_times = own_times[rng.random(len(own_times)) >= GAP_SHARE]
        true = np.interp(own_times, grid, states[name])
        if name == "vibration":
            true = true * np.exp(rng.normal(0, 0.1, len(true)))
        own_values = true + offsets[name] * noise + rng.normal(0, 1, len(true)) * noise
        own_values = np.round(np.round(own_values / resolution) * resolution, 6)
        names += [name] * len(own_times)
        values += own_values.tolist()
        times += own_times.tolist()
    moves = np.flatnonzero(np.diff(states["valve"], prepend=np.nan) != 0)
    names += ["valve"] * len(moves)
    values += states["valve"][moves].tolist()
    times += np.round(grid[moves] + rng.uniform(0, STEP / 2, len(moves)), 1).tolist()
    return names, values, times


def break_transmitters(
    names: list[str], values: list[float], times: list[float], fault: str, onset: float, rng: np.random.Generator
) -> None:
    """Change the readings of a shift in place if the fault is one of a transmitter."""
    name_array, value_array, time_array = np.array(names), np.array(values), np.array(times)
    is_after = time_array >= onset
    if fault == "drift":
        is_own = is_after & (name_array == "flow")
        ramp = np.clip((time_array - onset) / (20 * MINUTE), 0.0, 1.0)
        value_array = np.where(is_own, np.round(value_array * (1 + 0.12 * ramp), 1), value_array)
    elif fault == "stuck":
        name = rng.choice(STICKING_SENSORS)
        before = np.flatnonzero(~is_after & (name_array == name))
        last = before[time_array[before].argmax()]
        value_array = np.where(is_after & (name_array == name), value_array[last], value_array)
    elif fault == "swapped":
        pair = ("motor_temperature", "bearing_temperature")
        is_first, is_second = is_after & (name_array == pair[0]), is_after & (name_array == pair[1])
        name_array = np.where(is_first, pair[1], np.where(is_second, pair[0], name_array))
    names[:], values[:] = name_array.tolist(), value_array.tolist()


def simulate_shifts(count: int, fault: str, seed: int) -> FaultyReadings:
    """Return shifts with one fault each, without faults if `fault` is empty.

    Args:
        count: Number of shifts.
        fault: The kind of fault.
        seed: Seed of the shifts; the pumps are the same for all seeds.
    """
    rng = np.random.default_rng([seed, FAULTS.index(fault) + 1 if fault else 0, 0xF1EE])
    records: list[str] = []
    names: list[str] = []
    values: list[float] = []
    times: list[float] = []
    onsets = np.round(SHIFT_SECONDS * rng.uniform(0.25, 0.6, count), 1)
    for i in range(count):
        pump = int(rng.integers(NUM_PUMPS))
        readings = read_sensors(pump, simulate_states(pump, fault, float(onsets[i]), rng), rng)
        break_transmitters(*readings, fault, float(onsets[i]), rng)
        records += [f"pump-{pump}/{fault or 'normal'}-{i:05d}"] * len(readings[0])
        names += readings[0]
        values += readings[1]
        times += readings[2]
    shifts = make_readings(np.array(records, object), np.array(names, object), np.array(values), np.array(times))
    order = np.argsort([int(record.rsplit("-", 1)[1]) for record in shifts.records])
    return FaultyReadings(shifts.select(order), onsets, np.arange(count))


def make_case(num_shifts: int, seed: int) -> Case:
    """Simulate a fleet.

    Args:
        num_shifts: Number of normal shifts. Half of them train, a quarter calibrates, the others are tested. Each kind
            of fault has an eighth of this number of shifts.
        seed: Seed of the shifts.
    """
    normal: Readings = simulate_shifts(num_shifts, "", seed).readings
    rows = np.arange(num_shifts)
    half, calibrated = num_shifts // 2, num_shifts // 2 + num_shifts // 4
    faulty = {fault: simulate_shifts(max(1, num_shifts // 8), fault, seed) for fault in FAULTS}
    return Case(
        normal.select(rows[:half]),
        normal.select(rows[half:calibrated]),
        normal.select(rows[calibrated:]),
        faulty,
        DELAYS,
        {fault: shifts.readings for fault, shifts in faulty.items()},
        AUROC_SECONDS,
    )


def format_report(lines: list[dict[str, Any]], conditions: str) -> str:
    """Return the report in Markdown."""
    averages = average_lines(lines)
    sections = [f"# A simulated fleet of pumps\n\n{conditions}", format_false_alarms(averages)]
    for alpha in ALPHAS:
        title = f"## Detections within minutes after the onset of a fault, α = {alpha:.0%}"
        sections.append(f"{title}\n\n{format_detections(averages, alpha, DELAYS, MINUTE, 'min')}")
    titles = [f"{seconds / MINUTE:g} min" for seconds in AUROC_SECONDS]
    title = "## AUROC of the largest statistic so far, by time since the beginning of the shift"
    return "\n\n".join([*sections, f"{title}\n\n{format_auroc(averages, titles)}"]) + "\n"


def run(arguments: argparse.Namespace) -> None:
    """Simulate a fleet for each seed, measure all contenders and publish the results."""
    require_scikit_learn()
    if arguments.shifts < 16:
        raise ConfigError(f"--shifts {arguments.shifts}: at least 16 shifts are needed to train, calibrate and test")
    lines, case = measure_cases(
        arguments, "fleet", "seed", parse_seeds(arguments.seeds), partial(make_case, arguments.shifts), 10 * MINUTE
    )
    mean_readings = len(case.train) / len(case.train.records)
    conditions = (
        f"{describe_machine()}, {format_today()}; {arguments.shifts} normal shifts with {mean_readings:.0f} readings "
        f"on average, {len(case.train.records)} train, {len(case.calibration.records)} calibrate, "
        f"{len(case.test.records)} are tested, seeds {arguments.seeds}. {describe_times(arguments, lines)}"
    )
    publish_results("fleet", format_report(lines, conditions), lines)


def main() -> None:
    """Run the program."""
    options = build_parser(__doc__, tables="", seeds="0", max_time="5m")
    options.add_argument("--shifts", type=int, default=800, help="number of normal shifts; 800 by default")
    run_benchmark("fleet", run, add_contender_options(options, 180.0))


if __name__ == "__main__":
    main()
