"""Is the incident budget kept? Simulated fleets in normal operation, with independent and dependent records.

    python -m benchmarks.incident_guarantee --seeds 150

A device gives a record every 30 seconds. The score of a record has a standard normal distribution over all records,
with one of these kinds of dependence:

    independent    records are independent
    AR(1)          each score is 0.9 times the previous one plus noise; days are independent
    daily drift    a slow wave is added, with a random amplitude and phase for each device-day

No network is involved. For every seed, new calibration records are drawn, with which all p-values of the seed are
computed, and new device-days for the segments. The budget is one false incident in 30 days of a device:

    segments       an incident opens above the threshold of the calibration's device-days, which allows a share of 1/30
    e-detector     an incident opens if the statistic reaches the number of records in 30 days; with the e-values that
                   hold given the calibration records (`conditional_e_values`), and with plain e-values

The share of normal device-days in which an incident opens is compared with 1/30. Its 99% interval is computed from the
differences between seeds, because the device-days of a seed share a calibration.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import build_parser, describe_machine, format_today, publish_results, run_benchmark
from benchmarks.incident_detectors import advance_detectors, compute_p_values
from benchmarks.tables import format_markdown_header, format_markdown_row
from deformer_stream.calibration.conditional_e_values import compute_log_normalisers
from deformer_stream.calibration.incident_budget import parse_budget
from deformer_stream.calibration.incident_evidence import NUM_EXPONENTS, compute_log_e_values
from deformer_stream.calibration.incident_segments import SegmentCalibration
from deformer_stream.durations import MICROS_PER_DAY

Floats = NDArray[np.float64]

BUDGET = parse_budget("1 per 30d")
SEGMENT_ALPHA = BUDGET.count * MICROS_PER_DAY / BUDGET.period

PROCESSES = ("independent", "AR(1)", "daily drift")
AR_COEFFICIENT = 0.9
DRIFT_SCALE = 0.5
"""Mean amplitude of the wave of a day, in standard deviations of the noise. Amplitudes are exponential."""

RULES = ("segments", "e-detector", "e-detector, plain e-values")

NORMAL_QUANTILE = 2.5758
"""Half the width of a 99% interval, in standard errors."""


def simulate_scores(process: str, num_records: int, num_days: int, rng: np.random.Generator) -> Floats:
    """Return the scores of normal device-days, (num_records, num_days); larger is more anomalous.

    Args:
        process: One of `PROCESSES`.
        num_records: Number of records of a day.
        num_days: Number of device-days.
        rng: Source of randomness.
    """
    noise = rng.standard_normal((num_records, num_days))
    if process == "AR(1)":
        scores = np.empty_like(noise)
        scores[0] = noise[0]
        for index in range(1, num_records):
            innovation = math.sqrt(1.0 - AR_COEFFICIENT**2) * noise[index]
            scores[index] = AR_COEFFICIENT * scores[index - 1] + innovation
        return scores
    if process == "daily drift":
        amplitudes = rng.exponential(DRIFT_SCALE, num_days)
        phases = rng.uniform(0.0, 2.0 * math.pi, num_days)
        wave = amplitudes * np.sin(2.0 * math.pi * np.arange(num_records)[:, None] / num_records + phases)
        return noise + wave
    return noise


def draw_calibration(process: str, num_records: int, rng: np.random.Generator) -> Floats:
    """Return the sorted scores of calibration records: one record of each of `num_records` independent days."""
    scores = rng.standard_normal(num_records)
    if process == "daily drift":
        scores += rng.exponential(DRIFT_SCALE, num_records) * np.sin(rng.uniform(0.0, 2.0 * math.pi, num_records))
    return np.sort(scores)


def compute_day_maxima(p_values: Floats) -> Floats:
    """Return ln of the largest statistic of each device-day, (D,), from p-values, (R, D), beginning anew each day."""
    state = np.full((p_values.shape[1], NUM_EXPONENTS), -np.inf)
    maxima = np.full(p_values.shape[1], -np.inf)
    for row in p_values:
        state, statistic = advance_detectors(state, compute_log_e_values(row))
        np.maximum(maxima, statistic, out=maxima)
    return maxima


def measure_seed(process: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the number of device-days and, by rule, the numbers of incidents and of days with an incident."""
    rng = np.random.default_rng([seed, PROCESSES.index(process)])
    num_records, num_devices = arguments.records_per_day, arguments.devices
    calibration = draw_calibration(process, arguments.calibration_records, rng)
    scores = simulate_scores(process, num_records, arguments.calibration_days, rng)
    maxima = compute_day_maxima(compute_p_values(scores, calibration))
    segments = SegmentCalibration(MICROS_PER_DAY, tuple(np.sort(maxima).tolist()), num_records, num_devices)
    threshold = segments.compute_log_threshold(SEGMENT_ALPHA)
    log_records = math.log(num_records * BUDGET.period / BUDGET.count / MICROS_PER_DAY)
    normalisers = np.array(compute_log_normalisers(arguments.calibration_records))

    # The detectors of all devices: with segments, and the two e-detectors, which continue from day to day.
    state = np.full((3, num_devices, NUM_EXPONENTS), -np.inf)
    num_incidents, num_days = np.zeros(3, int), np.zeros(3, int)
    for _ in range(arguments.days):
        p_values = compute_p_values(simulate_scores(process, num_records, num_devices, rng), calibration)
        state[0] = -np.inf
        has_incident = np.zeros((3, num_devices), bool)
        for row in p_values:
            log_e_values = np.broadcast_to(compute_log_e_values(row), state.shape).copy()
            log_e_values[1] -= normalisers
            flat_state, flat_statistic = advance_detectors(
                state.reshape(-1, NUM_EXPONENTS), log_e_values.reshape(-1, NUM_EXPONENTS)
            )
            state, statistic = flat_state.reshape(state.shape), flat_statistic.reshape(3, num_devices)
            is_open = np.concatenate([statistic[:1] > threshold, statistic[1:] >= log_records])
            if is_open.any():
                num_incidents += is_open.sum(1)
                has_incident |= is_open
                state[is_open] = -np.inf
        num_days += has_incident.sum(1)
    line: dict[str, Any] = {"process": process, "seed": seed, "device_days": num_devices * arguments.days}
    for index, rule in enumerate(RULES):
        line[rule] = {"incidents": int(num_incidents[index]), "days": int(num_days[index])}
    return line


def summarise(lines: list[dict[str, Any]], process: str, rule: str) -> dict[str, float]:
    """Return the mean share of device-days with an incident, its 99% interval, and the incidents in 30 days."""
    chosen = [line for line in lines if line["process"] == process]
    shares = np.array([line[rule]["days"] / line["device_days"] for line in chosen])
    rates = np.array([line[rule]["incidents"] / line["device_days"] for line in chosen]) * BUDGET.period
    half_width = NORMAL_QUANTILE * float(shares.std(ddof=1)) / math.sqrt(len(shares)) if len(shares) > 1 else math.inf
    mean = float(shares.mean())
    return {
        "share": mean,
        "low": max(0.0, mean - half_width),
        "high": mean + half_width,
        "rate": float(rates.mean()) / MICROS_PER_DAY,
        "above": float((shares > SEGMENT_ALPHA).mean()),
        "largest": float(shares.max()),
    }


def format_results(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table with the share of device-days with a false incident, by rule and process."""
    columns = ["rule", "records", "device-days with a false incident", "99% interval", "largest of a seed"]
    text = format_markdown_header([*columns, "false incidents in 30 days", "kept"])
    for rule in RULES:
        for process in PROCESSES:
            figures = summarise(lines, process, rule)
            cells = [
                f"{figures['share']:.2%}",
                f"{figures['low']:.2%} to {figures['high']:.2%}",
                f"{figures['largest']:.2%}",
                f"{figures['rate']:.2f}",
                "yes" if figures["low"] <= SEGMENT_ALPHA else "**no**",
            ]
            text.append(format_markdown_row([rule, process, *cells]))
    return "\n".join(text)


def run(arguments: argparse.Namespace) -> None:
    """Measure all seeds and publish the results."""
    lines = []
    for seed in range(arguments.seeds):
        lines += [measure_seed(process, seed, arguments) for process in PROCESSES]
    conditions = (
        f"{describe_machine()}, {format_today()}; {arguments.seeds} seeds, each with {arguments.calibration_records:,} "
        f"calibration records, {arguments.calibration_days} device-days for segments, and {arguments.devices} devices "
        f"over {arguments.days} days that are tested; {arguments.records_per_day:,} records of a device in a day."
    )
    text = (
        f"# Is the incident budget kept?\n\n{conditions}\n\n"
        f"Budget: {BUDGET} of a device, so at most {SEGMENT_ALPHA:.2%} of the device-days have a false incident. "
        "Kept means that the interval does not lie above this share.\n\n"
        f"{format_results(lines)}\n"
    )
    publish_results("incident_guarantee", text, lines)


def main() -> None:
    """Run the benchmark."""
    options = build_parser(__doc__, "")
    options.add_argument("--seeds", type=int, default=150, help="number of simulated fleets; 150 by default")
    options.add_argument("--devices", type=int, default=60, help="number of devices that are tested; 60 by default")
    options.add_argument("--days", type=int, default=2, help="number of days that are tested; 2 by default")
    options.add_argument(
        "--records-per-day", type=int, default=2880, help="number of records of a device in a day; 2880 by default"
    )
    options.add_argument(
        "--calibration-records", type=int, default=2000, help="number of calibration records; 2000 by default"
    )
    options.add_argument(
        "--calibration-days", type=int, default=59, help="number of device-days for segments; 59 by default"
    )
    run_benchmark("incident_guarantee", run, options)


if __name__ == "__main__":
    main()
