"""Measure whether `deformer-train --max-time` keeps its limit on tables of very different shapes.

    python -m benchmarks.time_limit

Each case is a table, a limit and further options. The command runs in a new process, with the threads that a user has.
The measured time is that of the whole process: start, imports, training, model directory, end. The column "ratio" is
this time divided by the limit. It should be at most 1.1, and not much less than 1 if more training is useful. The least
limit is that of the command itself: a smaller limit cannot be kept, and the command then prints how long it needs.

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
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.command import build_parser, describe_machine, format_today, publish_results, run_benchmark
from benchmarks.tables import format_markdown_header, format_markdown_row

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
        columns: Generates the columns of the given number of rows from a random number generator.
        num_rows: Number of rows of the table.
        options: Further options of the command.
    """

    name: str
    limit: float
    columns: Callable[[np.random.Generator, int, int], dict[str, Any]]
    num_rows: int
    options: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        """Write the table as a Parquet file, one batch at a time."""
        rng = np.random.default_rng(0)
        writer = None
        for first_row in range(0, self.num_rows, BATCH_ROWS):
            num_rows = min(BATCH_ROWS, self.num_rows - first_row)
            batch = pa.table(self.columns(rng, first_row, num_rows))
            writer = writer or pq.ParquetWriter(path, batch.schema)
            writer.write_table(batch)
        if writer is not None:
            writer.close()


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


CASES = (
    Case("2,000,000 rows of 10 columns", 25.0, draw_measurements(10), 2_000_000),
    Case("6,400 rows of 8 columns, the least limit", 1.0, draw_measurements(8), 6_400),
    Case("6,400 rows of 8 columns", 10.0, draw_measurements(8), 6_400),
    Case("2,000 rows of 62 columns", 30.0, draw_measurements(62), 2_000),
    Case("1,966 rows of 1,555 columns", 30.0, draw_measurements(1555), 1_966),
    Case("100 rows of 784 binary columns", 30.0, draw_bits(784), 100),
    Case("3,000 rows of 784 binary columns", 30.0, draw_bits(784), 3_000),
    Case("200 windows of 2,000 features", 30.0, draw_sensor_readings(100, 20), 400_000,
         ("--window", "20s", "--slots", "20")),
    Case("1,000 rows of 20 columns, 5 folds", 30.0, draw_measurements(20), 1_000, ("--folds", "5")),
    Case("100,000 rows of 20 columns, 2% contamination", 30.0, draw_measurements(20), 100_000,
         ("--contamination", "0.02")),
)  # fmt: skip


def read_child_cpu_seconds() -> float:
    """Return the processor seconds of all finished child processes of this one."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


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


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the measurements of each case, which are also printed."""
    with tempfile.TemporaryDirectory() as temporary:
        for case in CASES:
            if arguments.cases and not any(words in case.name for words in arguments.cases.split(";")):
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
