"""Intensive-care stays with irregular readings: PhysioNet/CinC Challenge 2012, set a.

    python -m benchmarks.icu --max-time 10m --peer-time 600 --deformer

A stay has readings of up to 41 parameters in 48 hours, each at its own minute. 70% of the stays that survived train the
contenders, 10% calibrate the alert rule, the others and all stays with a death are tested. The peers are described in
`irregular_peers` and `gru_d`. With --deformer, `deformer-train --irregular` trains a model on the same stays.

- NLL: the mean −ln p(reading | earlier readings of the stay) on held-out stays, in the units of `irregular_records`.
  Parameters that are constant in a stay or in the table are left out.
- False alarms on held-out stays at each α, with the bounds that contain their number with 99% probability.
- Detections of injected faults. Each held-out stay gets one fault from a random hour on: a parameter shifted by three
  standard deviations, a parameter stuck at its last value, or two parameters with overlapping ranges swapped. Beside
  them stands the share of the same stays without the fault that raise an alert in the same hours.
- AUROC of the largest statistic so far for the label `died`, by hours since admission. The label is weak: a patient who
  dies later need not have unusual readings, and the statistic is made for unusual readings, not for risk.
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
from benchmarks.irregular_records import (
    FAULT_KINDS,
    Bools,
    Readings,
    find_exchangeable_pairs,
    fit_units,
    inject_faults,
    make_readings,
    restore_decimals,
    split_records,
)
from benchmarks.tables import get_tables_folder, parse_seeds, require_scikit_learn
from deformer_stream.errors import InputError

HOUR = 3600.0

CONSTANT_PARAMETERS = ("Age", "Gender", "Height", "ICUType", "MechVent")
"""Parameters that are read once in a stay, and one whose readings are all 1."""

ONSET_HOURS = np.arange(6, 37)
"""Hours since admission from which the onset of a fault is drawn."""

DELAYS = tuple(hours * HOUR for hours in (1, 2, 4, 8, 12, 24))
"""Seconds after the onset at which detections are counted."""

AUROC_HOURS = (1, 2, 4, 8, 12, 24, 36, 48)


def read_stays(folder: Path) -> tuple[Readings, Bools]:
    """Return the readings of all stays, and which of the R patients survived, (R,)."""
    if not (folder / "events.parquet").exists():
        raise InputError(f"no stays in {folder}: set DEFORMER_DATA to the folder that contains icu2012/")
    events = pq.read_table(folder / "events.parquet")
    stays = make_readings(
        events["record"].to_numpy(),
        events["feature"].cast("string").to_numpy(),
        restore_decimals(events["value"].to_numpy()),
        events["minute"].to_numpy() * 60.0,
    )
    outcomes = pq.read_table(folder / "outcomes.parquet")
    died = dict(zip(outcomes["record"].to_pylist(), outcomes["died"].to_pylist(), strict=True))
    return stays, np.array([died[record] == 0 for record in stays.records])


def make_case(stays: Readings, has_survived: Bools, seed: int) -> Case:
    """Split the stays and inject faults into the held-out ones."""
    split = split_records(has_survived, seed)
    train, test = stays.select(split.train), stays.select(split.test)
    units = fit_units(train)
    sensors = [name for name in stays.sensors if name not in CONSTANT_PARAMETERS]
    pairs = find_exchangeable_pairs(train, sensors)
    faulty = {kind: inject_faults(test, kind, units, ONSET_HOURS * HOUR, sensors, pairs, seed) for kind in FAULT_KINDS}
    return Case(
        train,
        stays.select(split.calibration),
        test,
        faulty,
        DELAYS,
        {"died": stays.select(split.abnormal)},
        tuple(hours * HOUR for hours in AUROC_HOURS),
        CONSTANT_PARAMETERS,
        has_injected_faults=True,
    )


def format_report(lines: list[dict[str, Any]], conditions: str) -> str:
    """Return the report in Markdown."""
    sections = [f"# Intensive-care stays (ICU 2012)\n\n{conditions}", format_false_alarms(lines)]
    for alpha in ALPHAS:
        title = f"## Detections within hours after the onset of a fault, α = {alpha:.0%} (stays without the fault)"
        sections.append(f"{title}\n\n{format_detections(lines, alpha, DELAYS, HOUR, 'h')}")
    title = "## AUROC of the largest statistic so far for the weak label `died`, by hours since admission"
    sections.append(f"{title}\n\n{format_auroc(lines, [f'{hours} h' for hours in AUROC_HOURS])}")
    return "\n\n".join(sections) + "\n"


def run(arguments: argparse.Namespace) -> None:
    """Measure all contenders on each split and publish the results."""
    require_scikit_learn()
    stays, has_survived = read_stays(get_tables_folder().parent / "icu2012")
    lines, case = measure_cases(
        arguments, "icu", "seed", parse_seeds(arguments.seeds), partial(make_case, stays, has_survived), HOUR
    )
    conditions = (
        f"{describe_machine()}, {format_today()}; {len(stays.records)} stays with {len(stays)} readings, "
        f"{len(case.train.records)} train, {len(case.calibration.records)} calibrate, {len(case.test.records)} are "
        f"tested, seeds {arguments.seeds}. {describe_times(arguments, lines)}"
    )
    publish_results("icu", format_report(average_lines(lines), conditions), lines)


def main() -> None:
    """Run the program."""
    options = build_parser(__doc__, tables="", seeds="0", max_time="10m")
    run_benchmark("icu", run, add_contender_options(options, 600.0))


if __name__ == "__main__":
    main()
