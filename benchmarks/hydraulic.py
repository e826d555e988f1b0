"""Condition monitoring of a hydraulic rig: which component is degraded, and how early in a cycle is it seen?

    python -m benchmarks.hydraulic --folds 0,1,2,3,4 --max-time 2m --peer-time 60 --deformer

The data (UCI 447, Helwig, Pignanelli and Schütze, 2015) are 2,205 cycles of 60 s with eight sensors at 1 Hz, and the
conditions of four components. A record is a cycle. Normal cycles have the best cooler, valve and pump, with any state
of the accumulator. A class of anomalies consists of the cycles in which only one component is degraded, to one degree.
The first 20 cycles after a change of the cooler are left out, because the oil has not reached its temperature: it falls
by 8 K within the first ten normal cycles.

Neighbouring cycles are alike. So blocks of up to ten neighbouring normal cycles are dealt to five parts, of which three
train, one calibrates and one is tested, in five folds. With about 58 calibration cycles, α = 1% is out of reach. The
blocks differ from each other, so cycles are not exchangeable, and the false alarms are measured, not guaranteed.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.command import build_parser, describe_machine, format_today, publish_results, run_benchmark
from benchmarks.irregular_alerts import (
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
from benchmarks.irregular_records import (
    Bools,
    FaultyReadings,
    Ints,
    Readings,
    RecordSplit,
    make_readings,
    restore_decimals,
)
from benchmarks.tables import get_tables_folder, parse_seeds, require_scikit_learn
from deformer_stream.errors import ConfigError, InputError

ALPHA = 0.05
CYCLE_SECONDS = 60
BLOCK_CYCLES = 10
NUM_FOLDS = 5

SETTLING_CYCLES = 20
"""Number of cycles after a change of the cooler that are left out."""

BEST_BY_COMPONENT = {"cooler": 100, "valve": 100, "pump_leakage": 0}
"""The condition of each component in normal cycles."""

SEEN_SECONDS = (6, 15, 30, 60)
"""Seconds of the cycle after which detections and the AUROC are computed."""

INTERVAL = 6.0
"""Width of the intervals of the Gaussian mixture in seconds."""


def read_cycles(folder: Path) -> tuple[Readings, dict[str, Ints]]:
    """Return the readings of the R cycles in order of time, and the condition of each component, (R,)."""
    if not (folder / "readings.parquet").exists():
        raise InputError(f"no cycles in {folder}: set DEFORMER_DATA to the folder that contains hydraulic/")
    table = pq.read_table(folder / "readings.parquet")
    cycles = make_readings(
        table["record"].to_numpy(),
        table["feature"].cast("string").to_numpy(),
        restore_decimals(table["value"].to_numpy()),
        table["second"].to_numpy().astype(np.float64),
    )
    conditions = pq.read_table(folder / "conditions.parquet").sort_by("record")
    assert tuple(conditions["record"].to_pylist()) == cycles.records
    return cycles, {name: conditions[name].to_numpy() for name in BEST_BY_COMPONENT}


def classify_cycles(condition_by_component: dict[str, Ints]) -> tuple[Bools, dict[str, Ints]]:
    """Return which cycles are normal, (R,), and the row numbers of the cycles of each class of anomalies.

    Args:
        condition_by_component: (R,) the condition of each component in each cycle, in order of time.
    """
    cooler = condition_by_component["cooler"]
    changes = np.flatnonzero(np.diff(cooler, prepend=-1))
    is_settled = np.arange(len(cooler)) - np.repeat(changes, np.diff(changes, append=len(cooler))) >= SETTLING_CYCLES
    is_degraded = {name: condition_by_component[name] != best for name, best in BEST_BY_COMPONENT.items()}
    num_degraded = np.sum(list(is_degraded.values()), 0)
    rows_by_class = {}
    for name, best in BEST_BY_COMPONENT.items():
        conditions = condition_by_component[name]
        for condition in sorted(set(conditions.tolist()) - {best}):
            rows_by_class[f"{name} {condition}"] = np.flatnonzero(
                is_settled & (num_degraded == 1) & (conditions == condition)
            )
    return is_settled & (num_degraded == 0), rows_by_class


def split_blocks(is_normal: Bools, fold: int, seed: int = 0) -> RecordSplit:
    """Split the normal cycles by blocks of neighbours.

    Args:
        is_normal: (R,) whether each cycle is normal, in order of time.
        fold: The part that is tested, from 0 to 4; the next one calibrates, the others train.
        seed: Seed of the order in which the blocks are dealt to the parts.
    """
    normal = np.flatnonzero(is_normal)
    runs = np.split(normal, np.flatnonzero(np.diff(normal) > 1) + 1)
    blocks = [run[start : start + BLOCK_CYCLES] for run in runs for start in range(0, len(run), BLOCK_CYCLES)]
    parts: list[list[int]] = [[] for _ in range(NUM_FOLDS)]
    for i in np.random.default_rng([seed, 0xB10C]).permutation(len(blocks)).tolist():
        min(parts, key=len).extend(blocks[i].tolist())
    calibration = (fold + 1) % NUM_FOLDS
    train = [row for i, part in enumerate(parts) if i not in (fold, calibration) for row in part]
    sorted_parts = (np.array(sorted(part), np.int64) for part in (train, parts[calibration], parts[fold]))
    return RecordSplit(*sorted_parts, np.flatnonzero(~is_normal))


def make_case(cycles: Readings, condition_by_component: dict[str, Ints], fold: int) -> Case:
    """Return the records of a fold. The anomalies of all folds are the same, and begin with their cycles."""
    is_normal, rows_by_class = classify_cycles(condition_by_component)
    split = split_blocks(is_normal, fold)
    faulty = {
        name: FaultyReadings(cycles.select(rows), np.zeros(len(rows)), rows) for name, rows in rows_by_class.items()
    }
    return Case(
        cycles.select(split.train),
        cycles.select(split.calibration),
        cycles.select(split.test),
        faulty,
        [seconds - 1 for seconds in SEEN_SECONDS],  # the first readings have the second 0
        {name: faults.readings for name, faults in faulty.items()},
        [seconds - 1 for seconds in SEEN_SECONDS],
    )


def format_report(lines: list[dict[str, Any]], conditions: str) -> str:
    """Return the report in Markdown."""
    averages = average_lines(lines)
    delays = [seconds - 1 for seconds in SEEN_SECONDS]
    detections = format_detections(averages, ALPHA, delays, CYCLE_SECONDS / 100, "% of the cycle", 1)
    titles = [f"{seconds / CYCLE_SECONDS:.0%}" for seconds in SEEN_SECONDS]
    return (
        f"# Hydraulic rig\n\n{conditions}\n\n{format_false_alarms(averages)}\n\n"
        f"## Detections by share of the cycle seen, α = {ALPHA:.0%}\n\n{detections}\n\n"
        f"## AUROC of the largest statistic so far, by share of the cycle seen\n\n{format_auroc(averages, titles)}\n"
    )


def run(arguments: argparse.Namespace) -> None:
    """Measure all contenders on each fold and publish the results."""
    require_scikit_learn()
    cycles, condition_by_component = read_cycles(get_tables_folder().parent / "hydraulic")
    folds = parse_seeds(arguments.folds)
    if not set(folds) <= set(range(NUM_FOLDS)):
        raise ConfigError(f"--folds {arguments.folds}: expected numbers from 0 to {NUM_FOLDS - 1}")
    lines, case = measure_cases(
        arguments, "hydraulic", "fold", folds, partial(make_case, cycles, condition_by_component), INTERVAL
    )
    conditions = (
        f"{describe_machine()}, {format_today()}; folds {arguments.folds}, in the last one {len(case.train.records)} "
        f"cycles train, {len(case.calibration.records)} calibrate, {len(case.test.records)} normal ones are tested. "
        f"False alarms and their bounds are sums over the folds, other figures are means. "
        f"{describe_times(arguments, lines)}"
    )
    publish_results("hydraulic", format_report(lines, conditions), lines)


def main() -> None:
    """Run the program."""
    options = build_parser(__doc__, tables="", max_time="2m")
    options.add_argument("--folds", default="0,1,2,3,4", help="comma-separated folds from 0 to 4; all by default")
    run_benchmark("hydraulic", run, add_contender_options(options, 60.0))


if __name__ == "__main__":
    main()
