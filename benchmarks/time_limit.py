"""Measure whether `deformer-train --max-time` keeps its limit on tables of very different shapes.

    python -m benchmarks.time_limit

Each case is a table, a limit and further options. The command runs in a new process, with the threads that a user has.
The measured time is that of the whole process: start, imports, training, model directory, end. The column "ratio" is
this time divided by the limit. It should be at most 1.1, and not much less than 1 if more training is useful. The least
limit is that of the command itself: a smaller limit cannot be kept, and the command then prints how long it needs.

Cases of irregular readings (`--irregular`) are simulated, intensive-care stays and cycles of the hydraulic rig
(`benchmarks.icu`, `benchmarks.hydraulic`). Cases whose data is not there are left out, and named.

Other load on the machine makes each phase slower, also the phases whose costs were measured before. Therefore the load
average before each case is printed, and the seconds of the command's start (3 s on an idle machine), which are nearly
all imports. `--repeat` runs each case several times.

On a busy machine, `--processor-time` measures what one idle core would take: the command uses one thread, and its clock
is the processor time of its process. Then the load of the machine has nearly no influence.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.command import (
    build_parser,
    describe_machine,
    format_today,
    publish_results,
    read_child_cpu_seconds,
    run_benchmark,
)
from benchmarks.fleet import simulate_shifts
from benchmarks.hydraulic import make_case as make_cycles_case
from benchmarks.hydraulic import read_cycles
from benchmarks.icu import read_stays
from benchmarks.icu_imputation import PARAMETERS, TRAINING_SETTINGS, make_stay_readings, read_grids
from benchmarks.tables import format_markdown_header, format_markdown_row, get_tables_folder

BATCH_ROWS = 100_000
"""Rows of a table that are generated and written at once."""

PROCESSOR_CLOCK = """
import os, sys, time
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
time.monotonic = time.process_time
time.clock_gettime = lambda clock: started + time.process_time()
from trainer.cli import main
main()
"""
"""A program that runs the command with the processor time of its process as the clock, also for the process's age."""

TITLES = ("case", "limit", "used", "ratio", "start", "records", "steps", "calibrated on", "preset", "load")


@dataclass(frozen=True, slots=True)
class Case:
    """One table with the options of the training command.

    Attributes:
        name: A short description of the table and of the options.
        limit: The value of `--max-time` in seconds.
        write: Writes the table as a Parquet file to a path.
        options: Further options of the command.
        settings: Keys of the file of `--config`, with their values.
    """

    name: str
    limit: float
    write: Callable[[Path], None]
    options: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


def generate(num_rows: int, draw: Callable[[np.random.Generator, int, int], dict[str, Any]]) -> Callable[[Path], None]:
    """Return a function that writes a generated table, one batch at a time.

    Args:
        num_rows: Number of rows of the table.
        draw: Generates the columns of a batch from a random number generator, the first row and the number of rows.
    """

    def write(path: Path) -> None:
        rng = np.random.default_rng(0)
        writer = None
        for first_row in range(0, num_rows, BATCH_ROWS):
            batch = pa.table(draw(rng, first_row, min(BATCH_ROWS, num_rows - first_row)))
            writer = writer or pq.ParquetWriter(path, batch.schema)
            writer.write_table(batch)
        if writer is not None:
            writer.close()

    return write


def draw_measurements(num_columns: int) -> Callable[[np.random.Generator, int, int], dict[str, Any]]:
    """Return a generator of correlated measurements with the given number of columns."""

    def draw(rng: np.random.Generator, first_row: int, num_rows: int) -> dict[str, Any]:
        causes = rng.normal(size=(num_rows, 4))
        weights = np.random.default_rng(1).normal(size=(4, num_columns))  # the same in each batch
        values = causes @ weights + 0.3 * rng.normal(size=(num_rows, num_columns))
        return {f"x{column}": values[:, column] for column in range(num_columns)}

    return draw


def draw_bits(num_columns: int) -> Callable[[np.random.Generator, int, int], dict[str, Any]]:
    """Return a generator of binary columns, such as the pixels of an image."""

    def draw(rng: np.random.Generator, first_row: int, num_rows: int) -> dict[str, Any]:
        causes = rng.normal(size=(num_rows, 4))
        weights = np.random.default_rng(1).normal(size=(4, num_columns))  # the same in each batch
        bits = causes @ weights + rng.normal(size=(num_rows, num_columns)) > 1.0
        return {f"pixel{column}": bits[:, column].astype(np.int64) for column in range(num_columns)}

    return draw


def draw_sensor_readings(num_sensors: int, num_slots: int) -> Callable[[np.random.Generator, int, int], dict[str, Any]]:
    """Return a generator of a long table: each sensor of one device reports once per second.

    Windows of `num_slots` seconds with as many time slots then have `num_sensors` times `num_slots` features.
    """

    def draw(rng: np.random.Generator, first_row: int, num_rows: int) -> dict[str, Any]:
        rows = np.arange(first_row, first_row + num_rows)
        seconds, sensors = rows // num_sensors, rows % num_sensors
        values = np.sin(seconds / 50.0 + sensors) + 0.1 * rng.normal(size=num_rows)
        names = pa.array([f"s{sensor}" for sensor in range(num_sensors)])
        return {
            "device": pa.array(["press-1"] * num_rows),
            "feature": pa.DictionaryArray.from_arrays(pa.array(sensors.astype(np.int32)), names).cast(pa.string()),
            "value": values,
            "time": pa.array(seconds * 1_000_000, pa.timestamp("us", "UTC")),
        }

    return draw


def write_stays(path: Path) -> None:
    """Write the readings of the intensive-care stays of patients who survived."""
    stays, has_survived = read_stays(get_tables_folder().parent / "icu2012")
    pq.write_table(stays.select(np.flatnonzero(has_survived)).to_table(), path)


def write_hourly_stays(path: Path) -> None:
    """Write the last value of each hour of the intensive-care stays, as in `benchmarks.icu_imputation`."""
    grids = read_grids(get_tables_folder().parent / "icu2012")
    pq.write_table(make_stay_readings(grids.restore_raw(), grids.is_observed).to_table(), path)


def write_cycles(path: Path) -> None:
    """Write the readings of the training cycles of the hydraulic rig, fold 0 of `benchmarks.hydraulic`."""
    case = make_cycles_case(*read_cycles(get_tables_folder().parent / "hydraulic"), 0)
    pq.write_table(case.train.to_table(), path)


def write_shifts(path: Path) -> None:
    """Write simulated shifts of pumps (`benchmarks.fleet`)."""
    pq.write_table(simulate_shifts(100, "", 0).readings.to_table(), path)


IRREGULAR = ("--layout", "long", "--irregular")

CASES = (
    Case("2,000,000 rows of 10 columns", 25.0, generate(2_000_000, draw_measurements(10))),
    Case("6,400 rows of 8 columns, the least limit", 1.0, generate(6_400, draw_measurements(8))),
    Case("6,400 rows of 8 columns", 10.0, generate(6_400, draw_measurements(8))),
    Case("2,000 rows of 62 columns", 30.0, generate(2_000, draw_measurements(62))),
    Case("1,966 rows of 1,555 columns", 30.0, generate(1_966, draw_measurements(1555))),
    Case("100 rows of 784 binary columns", 30.0, generate(100, draw_bits(784))),
    Case("3,000 rows of 784 binary columns", 30.0, generate(3_000, draw_bits(784))),
    Case("200 windows of 2,000 features", 30.0, generate(400_000, draw_sensor_readings(100, 20)),
         ("--window", "20s", "--slots", "20")),
    Case("1,000 rows of 20 columns, 5 folds", 30.0, generate(1_000, draw_measurements(20)), ("--folds", "5")),
    Case("100,000 rows of 20 columns, 2% contamination", 30.0, generate(100_000, draw_measurements(20)),
         ("--contamination", "0.02")),
    Case("irregular: 100 shifts of 850 readings", 60.0, write_shifts, IRREGULAR),
    Case("irregular: 162 cycles of 480 readings", 120.0, write_cycles, IRREGULAR),
    Case("irregular: 3,446 stays of 430 readings", 240.0, write_stays, IRREGULAR),
    Case("irregular: 4,000 stays for imputation", 240.0, write_hourly_stays,
         (*IRREGULAR, "--continuous", ",".join(PARAMETERS)), TRAINING_SETTINGS),
)  # fmt: skip


def run_case(case: Case, folder: Path, verbose: bool, uses_processor_time: bool) -> dict[str, Any]:
    """Run the training command on the table of a case and return the measurements.

    Args:
        case: The case, whose table is in the folder as `table.parquet`.
        folder: The folder of the case. The model directory `model` in it is replaced.
        verbose: Whether to print the command's lines with the seconds since its start.
        uses_processor_time: Whether the clock of the command is its processor time, with one thread.
    """
    program = ["-c", PROCESSOR_CLOCK] if uses_processor_time else ["-m", "trainer.cli"]
    command = [sys.executable, *program, str(folder / "table.parquet"), "--out", str(folder / "model")]
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if uses_processor_time else {})
    command += ["--max-time", f"{case.limit:g}s", *case.options]
    if case.settings:
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in case.settings.items()]
        (folder / "settings.toml").write_text("".join(lines))
        command += ["--config", str(folder / "settings.toml")]
    load = os.getloadavg()[0]
    cpu_seconds_before = read_child_cpu_seconds()
    started = time.monotonic()
    streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **streams) as process:
        longest_silence, last_line_at = 0.0, started
        for line in process.stderr or ():
            now = time.monotonic()
            longest_silence, last_line_at = max(longest_silence, now - last_line_at), now
            if verbose:
                print(f"  {now - started:6.2f} {line}", end="", flush=True)
    used = time.monotonic() - started
    silence = max(longest_silence, started + used - last_line_at)
    cpu_seconds = read_child_cpu_seconds() - cpu_seconds_before
    used = cpu_seconds if uses_processor_time else used
    if process.returncode:
        raise SystemExit(f"benchmarks.time_limit: {case.name}: the command failed with {process.returncode}")
    training = json.loads((folder / "model" / "manifest.json").read_text())["training"]
    return {
        "case": case.name,
        "limit": case.limit,
        "used": round(used, 2),
        "ratio": round(used / case.limit, 3),
        "records": sum(training["rows"].values()),
        "steps": training["steps"],
        "calibrated": training["records_used"]["calibration"],
        "preset": training["preset"]["name"],
        "silence": round(silence, 1),
        "start": training["seconds_by_phase"]["start"],
        "phases": training["seconds_by_phase"],
        "warnings": [warning["code"] for warning in training["warnings"]],
        "cpu": round(cpu_seconds, 1),
        "load": round(load, 1),
    }


def find_missing_data(case: Case) -> Path | None:
    """Return the folder that a case needs if it does not exist."""
    name = {write_stays: "icu2012", write_hourly_stays: "icu2012", write_cycles: "hydraulic"}.get(case.write)
    folder = get_tables_folder().parent / (name or "")
    return None if name is None or folder.exists() else folder


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the measurements of each case, which are also printed."""
    with tempfile.TemporaryDirectory() as temporary:
        for case in CASES:
            if arguments.cases and not any(words in case.name for words in arguments.cases.split(";")):
                continue
            if missing := find_missing_data(case):
                print(f"{case.name}: left out, because {missing} does not exist: set DEFORMER_DATA", flush=True)
                continue
            folder = Path(temporary) / str(CASES.index(case))
            folder.mkdir()
            case.write(folder / "table.parquet")
            for _ in range(arguments.repeat):
                line = run_case(case, folder, arguments.verbose, arguments.processor_time)
                print(json.dumps(line), flush=True)
                yield line


def format_table(lines: list[dict[str, Any]]) -> str:
    """Return the measurements as a table in Markdown."""
    rows = [
        format_markdown_row(
            [
                line["case"],
                f"{line['limit']:g} s",
                f"{line['used']:.1f} s",
                f"{line['ratio']:.2f}",
                f"{line['start']:.1f} s",
                f"{line['records']:,}",
                f"{line['steps']:,}",
                f"{line['calibrated']:,}",
                line["preset"],
                f"{line['load']:.1f}",
            ]
        )
        for line in lines
    ]
    return "\n".join([*format_markdown_header(list(TITLES)), *rows]) + "\n"


def run(arguments: argparse.Namespace) -> None:
    """Measure the cases and store the table in the results folder."""
    lines = list(measure(arguments))
    clock = "Processor time of one thread." if arguments.processor_time else "Time of the clock."
    text = f"# Time limit of training\n\n{format_today()}, {describe_machine()}. {clock}\n\n{format_table(lines)}"
    if arguments.cases:
        print("\n" + text)
    else:
        publish_results("time_limit", text, lines)


def main() -> None:
    """Run the benchmark with the command line's options."""
    options = build_parser(__doc__, tables="")
    options.add_argument(
        "--cases", default="", help="parts of the names of cases, separated by semicolons; all by default"
    )
    options.add_argument("--repeat", type=int, default=1, help="how often each case is measured; 1 by default")
    options.add_argument("--processor-time", action="store_true", help="measure processor time, for busy machines")
    options.add_argument("--verbose", action="store_true", help="print the lines of the command with their times")
    run_benchmark("time_limit", run, options)


if __name__ == "__main__":
    main()
