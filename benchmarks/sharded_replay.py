"""Measure `deformer-stream replay --output-dir`: speed with several workers, memory, and runs that are killed.

    python -m benchmarks.sharded_replay [PART…]
    python -m benchmarks.sharded_replay --readings 100000 --kills 2 --rounds 1 --preset tiny --results build/small
    python -m benchmarks.sharded_replay --readings 200000000 --rounds 1 --sources disk,hive,s3 --engines local,ray \\
        --folder /data/scratch

The second command is a trial of minutes. The third one takes about a day on two cores, and needs some 30 GB of disk:
14 bytes a reading for the input, and as much for the rows of shards and for scores. With s3, the input is in memory.

Ray is not installed by `make`. `make test-ray` installs it beside everything else, for
`build/venv-ray/bin/python -m benchmarks.sharded_replay`.

speed        Seconds and readings per second with 1 and 2 workers (--workers) in turn, for --rounds, for each of the
             --engines: medians, and the ratio to the first number of workers in the same round. `scoring_s` is the sum
             over all shards of the seconds in which they were scored; the rest is the start, and the division of rows
             among shards. Memory is the largest sum of the resident bytes of all processes, the largest of a worker,
             and that of the process that the command has started.
memory       The same memory for a tenth of the input and for all of it, with 2 workers.
kill         A run with 2 workers that is killed by SIGKILL, --kills times at random times, and then runs to its end. In
             half of the cases a worker is killed first. `equal` says whether all outputs equal those of `replay`
             in one process without shards. `written_again` is the number of finished shards that were scored again.

Measurements are stored one by one, so that an interrupted run continues and parts can be measured one after the other;
use --again after code changes.

Each part is measured for each of the --sources. The input is a table of random records in --files Parquet files: with
--layout long a row is a reading and the readings of 1,000 records interleave. The source hive has them in folders
`site=…/day=…`, and s3 reads these from a local S3 server, which keeps them in memory. The model has random weights,
which are as fast as trained ones.

The outputs are compared by sums of hashes of rows, in bounded memory. Each worker computes on one thread. Every run is
printed as a line of JSON when it has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from pyarrow import fs

from benchmarks.command import (
    RESULTS,
    ResultStore,
    add_again_option,
    build_parser,
    describe_machine,
    format_today,
    publish_results,
)
from benchmarks.feed import OUTLIER_VALUE, make_model, make_quiet_calibration
from benchmarks.stream import format_table
from deformer_stream import model_store
from deformer_stream.cli.shards.tasks import read_receipt
from deformer_stream.codec.columns import encode_distinct
from deformer_stream.codec.tables import mix_bits
from tests.conftest import ROOT
from tests.integration.programs import make_command, make_environment
from tests.s3 import BUCKET, run_server, write_object

PARTS = ("speed", "memory", "kill")
OUTPUTS = {"output": "scores.parquet", "records": "records.parquet", "alerts": "alerts.jsonl"}
RECORDS_AT_A_TIME = 1_000
"""Records whose readings interleave in a long table."""
ROWS_PER_GROUP = 1_000_000
"""Rows of a row group of the input, as in the default of pyarrow. The footer of a file describes all of its row groups,
and each process reads footers; with small row groups their memory would grow with the input."""
START_SECONDS = 10.0
"""Range of the times at which runs are killed that are to be killed at their start."""
SHARE_OF_LATE_KILLS = 0.7
"""Share of the runs that are killed after they have finished a shard."""
OUTLIER_SHARE = 1e-3
"""Share of the records with an `OUTLIER_VALUE`, which raise an alert."""

MEASURED = ("seconds", "readings_/s", "scoring_s", "total_MiB", "worker_MiB", "main_MiB")
"""What differs between runs of the same input."""

Row = dict[str, Any]


def write_input(
    folder: Path, options: argparse.Namespace, source: str, readings: int, store: fs.S3FileSystem | None
) -> list[str]:
    """Write the input files, and return the inputs of the command.

    Args:
        folder: The folder of the files. For a store it is deleted, and its name is the beginning of their keys.
        options: The command's options.
        source: disk, hive or s3.
        readings: The number of readings.
        store: The S3 server, None without one.
    """
    shutil.rmtree(folder, ignore_errors=True)
    rng, names = np.random.default_rng(0), [f"f{i}" for i in range(options.features)]
    records_per_file = max(1, readings // options.features // options.files)
    for file in range(options.files):
        subfolder = folder / f"site={'AB'[file % 2]}" / f"day={file}" if source != "disk" else folder
        subfolder.mkdir(parents=True, exist_ok=True)
        path = subfolder / f"part-{file:04}.parquet"
        blocks = (
            _draw_table(rng, names, file, first, min(RECORDS_AT_A_TIME, records_per_file - first), options)
            for first in range(0, records_per_file, RECORDS_AT_A_TIME)
        )
        _write_row_groups(path, blocks)
        if store is not None:
            write_object(store, f"{folder.name}/{path.relative_to(folder)}", path.read_bytes())
            path.unlink()
    return [str(folder) if store is None else f"s3://{BUCKET}/{folder.name}"]


def _write_row_groups(path: Path, blocks: Iterator[pa.Table]) -> None:
    """Write blocks of rows to a Parquet file, in row groups of about `ROWS_PER_GROUP` rows."""
    first = next(blocks)
    with pq.ParquetWriter(path, first.schema) as writer:
        group = [first]
        for block in blocks:
            if sum(map(len, group)) >= ROWS_PER_GROUP:
                writer.write_table(pa.concat_tables(group))
                group = []
            group.append(block)
        writer.write_table(pa.concat_tables(group))


def _draw_table(
    rng: np.random.Generator, names: list[str], file: int, first: int, num_records: int, options: argparse.Namespace
) -> pa.Table:
    """Return random records as rows of a wide table, or their readings in random order as rows of a long one."""
    values = rng.normal(size=(num_records, len(names))).round(5)
    is_outlier = rng.random(num_records) < OUTLIER_SHARE
    values[is_outlier, rng.integers(len(names), size=int(is_outlier.sum()))] = OUTLIER_VALUE
    ids = pa.array([f"p{file}/{first + i}" for i in range(num_records)])
    seconds = 1.7e9 + 3600.0 * file + (first + np.arange(num_records)) / 100
    if options.layout == "wide":
        columns = {"record": ids, "time": pa.array(seconds)}
        return pa.table(columns | {name: values[:, i] for i, name in enumerate(names)})
    order = rng.permutation(values.size)
    record, feature = np.divmod(order, len(names))
    return pa.table(
        {
            "record": ids.take(pa.array(record)),
            "feature": pa.array(names).take(pa.array(feature)),
            "value": values.reshape(-1)[order],
            "time": seconds[record],
        }
    )


class RunningReplay:
    """A run of `replay` in a process of its own.

    Args:
        inputs: The inputs.
        model: The model directory.
        words: Further words of the command line.

    Attributes:
        process: The process.
        max_total_bytes: Largest sum of the resident bytes of all processes.
        max_main_bytes: Largest number of resident bytes of the process.
        max_worker_bytes: The same of a worker.
    """

    def __init__(self, inputs: list[str], model: Path, *words: object) -> None:
        command = make_command("deformer-stream", "replay", *inputs, "--model", model, "--explanations", "fast", *words)
        # All threads of a worker are one; the environment of this process may say something else.
        environment = {name: value for name, value in make_environment({}).items() if name != "OMP_NUM_THREADS"}
        # Processes of Ray do not begin in this folder.
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
        self._began = time.monotonic()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it is open as long as the run
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=self._log)
        self.max_total_bytes = self.max_main_bytes = self.max_worker_bytes = 0

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def wait(self) -> None:
        """Wait for the end, and watch the memory."""
        while self.process.poll() is None:
            main, children = self.process.pid, list_children(self.process.pid)
            bytes_by_process = {pid: _read_resident_bytes(pid) for pid in [main, *children]}
            of_workers = [size for pid, size in bytes_by_process.items() if is_worker(pid)]
            self.max_total_bytes = max(self.max_total_bytes, sum(bytes_by_process.values()))
            self.max_main_bytes = max(self.max_main_bytes, bytes_by_process[main])
            self.max_worker_bytes = max(self.max_worker_bytes, *of_workers, 0)
            time.sleep(0.1)
        self._check_end()

    def kill(self) -> bool:
        """Kill the process, and return whether it was running."""
        if self.process.poll() is not None:
            self._check_end()
            return False
        self.process.kill()
        self.process.wait()
        self._log.close()
        return True

    def _check_end(self) -> None:
        """Check that the process has ended without an error."""
        self._log.seek(0)
        log = self._log.read()
        self._log.close()
        assert self.process.returncode == 0, log[-2000:]


def list_children(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have started."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    return children + [grandchild for child in children for grandchild in list_children(child)]


def is_worker(pid: int) -> bool:
    """Return whether a process is a worker of the pool on this machine, or of Ray, whose services are none."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # the process has ended
        return False
    return b"spawn_main" in command or command.startswith((b"ray::IDLE", b"ray::_perform"))


def _read_resident_bytes(pid: int) -> int:
    """Return the resident bytes of a process, 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def run_in_shards(inputs: list[str], model: Path, folder: Path, workers: int, engine: str, *words: object) -> Row:
    """Run the command to its end in a new folder, print the figures, and return them."""
    shutil.rmtree(folder, ignore_errors=True)
    outputs = [f"--{name}={path}" for name, path in OUTPUTS.items()]
    running = RunningReplay(
        inputs, model, "--output-dir", folder, "--workers", workers, "--engine", engine, *outputs, *words
    )
    running.wait()
    seconds, summary = running.seconds, json.loads((folder / "summary.json").read_text())
    row = {
        "engine": engine,
        "workers": workers,
        "readings": summary["readings"],
        "shards": summary["shards"],
        "seconds": round(seconds, 1),
        "readings_/s": round(summary["readings"] / seconds),
        "scoring_s": round(summary["seconds_of_workers"], 1),
        "total_MiB": round(running.max_total_bytes / 2**20),
        "worker_MiB": round(running.max_worker_bytes / 2**20),
        "main_MiB": round(running.max_main_bytes / 2**20),
    }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def measure_speed(
    options: argparse.Namespace, engine: str, inputs: list[str], model: Path, folder: Path
) -> Iterator[Row]:
    """Yield the speed of an engine with each number of workers."""
    numbers = list(map(int, options.workers.split(",")))
    rounds = [
        {workers: run_in_shards(inputs, model, folder / "shards", workers, engine) for workers in numbers}
        for _ in range(options.rounds)
    ]
    for workers in numbers:
        rows = [measured[workers] for measured in rounds]
        ratios = [measured[numbers[0]]["seconds"] / measured[workers]["seconds"] for measured in rounds]
        medians = {name: round(median(row[name] for row in rows), 1) for name in MEASURED}
        ratio = {"ratio": round(median(ratios), 2), "smallest_ratio": round(min(ratios), 2)}
        yield {**rows[0], **medians, **ratio}


def measure_memory(
    options: argparse.Namespace,
    key: Mapping[str, str],
    store: fs.S3FileSystem | None,
    inputs: list[str],
    model: Path,
    folder: Path,
) -> Iterator[Row]:
    """Yield the memory for a tenth of the input and for all of it; see `measure` for the arguments."""
    tenth = write_input(folder / "tenth", options, key["source"], options.readings // 10, store)
    for part_of_input in (tenth, inputs):
        yield run_in_shards(part_of_input, model, folder / "shards", 2, key["engine"])
    if store is not None:
        store.delete_dir(f"{BUCKET}/tenth")
    shutil.rmtree(folder / "tenth", ignore_errors=True)


@functools.cache
def digest_run_in_one_process(input_path: str, model: Path, folder: Path) -> tuple[list[tuple[int, int]], float]:
    """Run the command once without shards, and return the digests of its outputs and the seconds that it took.

    Args:
        input_path: The input.
        model: The model directory.
        folder: The folder of the outputs.
    """
    folder.mkdir()
    running = RunningReplay(
        [input_path], model, "--drift", "off", *(f"--{name}={folder / path}" for name, path in OUTPUTS.items())
    )
    running.wait()
    seconds = round(running.seconds, 1)
    print(json.dumps({"one_process_s": seconds}), file=sys.stderr, flush=True)
    digests = [compute_digest([folder / name]) for name in OUTPUTS.values()]
    shutil.rmtree(folder)
    return digests, seconds


def kill_runs(options: argparse.Namespace, engine: str, inputs: list[str], model: Path, folder: Path) -> Iterator[Row]:
    """Kill runs of an engine repeatedly, and yield whether their outputs are those of one process."""
    expected, seconds_of_one = digest_run_in_one_process(inputs[0], model, folder / "whole")
    row = _kill_runs_of_engine(options, engine, inputs, model, folder / "killed")
    digests = [compute_digest(sorted(folder.glob(f"killed/shards/*/{name}"))) for name in OUTPUTS.values()]
    yield {**row, "equal": str(digests == expected), "one_process_s": seconds_of_one}
    assert digests == expected, "the outputs differ"
    assert not row["written_again"], "finished shards were scored again"


def _kill_runs_of_engine(options: argparse.Namespace, engine: str, inputs: list[str], model: Path, target: Path) -> Row:
    """Kill runs of an engine repeatedly, let the last one end, and return the figures.

    Args:
        options: The command's options.
        engine: The engine.
        inputs: The inputs.
        model: The model directory.
        target: The folder of the outputs.
    """
    shutil.rmtree(target, ignore_errors=True)
    rng = np.random.default_rng(options.seed)
    num_shards = 3 * options.kills  # so that shards are left for each run
    words = (target, "--workers", 2, "--engine", engine, "--shards", num_shards)
    outputs = [f"--{name}={path}" for name, path in OUTPUTS.items()]
    finished: dict[str, int] = {}
    num_written_again = num_killed = num_killed_workers = 0
    for _ in range(options.kills):
        running = RunningReplay(inputs, model, "--output-dir", *words, *outputs)
        _wait_for_moment(running, target, len(finished), rng)
        workers = [pid for pid in list_children(running.process.pid) if is_worker(pid)]
        if workers and rng.random() < 0.5:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(rng.choice(workers)), signal.SIGKILL)
            num_killed_workers += 1
            time.sleep(rng.uniform(0.0, 1.0))
        num_killed += running.kill()
        now = list_shards(target)
        num_written_again += sum(now.get(name) != identity for name, identity in finished.items())
        finished = now
        print(f"killed: {len(finished)} of {num_shards} shards are finished", file=sys.stderr, flush=True)
    num_finished_before_end = len(finished)
    RunningReplay(inputs, model, "--output-dir", *words, *outputs).wait()
    now = list_shards(target)
    num_written_again += sum(now.get(name) != identity for name, identity in finished.items())
    return {
        "engine": engine,
        "kills": num_killed,
        "of_workers": num_killed_workers,
        "readings": options.readings,
        "shards": len(now),
        "finished_before_last_run": num_finished_before_end,
        "written_again": num_written_again,
    }


def _wait_for_moment(running: RunningReplay, target: Path, num_finished: int, rng: np.random.Generator) -> None:
    """Wait for the random moment at which a run is killed: at its start, or after it has finished one or two shards.

    Args:
        running: The run.
        target: The folder of its outputs.
        num_finished: Number of shards that earlier runs have finished.
        rng: The generator.
    """
    if rng.random() >= SHARE_OF_LATE_KILLS:
        time.sleep(rng.uniform(0.0, START_SECONDS))
        return
    num_new = int(rng.integers(1, 3))
    while running.process.poll() is None and len(list_shards(target)) < num_finished + num_new:
        time.sleep(0.02)
    receipts = [read_receipt(path) for path in target.glob("shards/[0-9]*")]
    time.sleep(rng.uniform(0.0, max([receipt["seconds"] for receipt in receipts], default=0.0)))


def list_shards(folder: Path) -> dict[str, int]:
    """Return the finished shards by name, each with the number of its folder in the file system."""
    return {path.name: path.stat().st_ino for path in folder.glob("shards/[0-9]*")}


def compute_digest(paths: list[Path]) -> tuple[int, int]:
    """Return the number of rows of files and the sum of the hashes of the rows, which do not depend on their order."""
    num_rows = total = 0
    for path in paths:
        if path.suffix == ".jsonl":
            # The numbers of explanations depend in their last digits on which records are explained together.
            with path.open("rb") as lines:
                alerts = [json.loads(line) for line in lines]
            texts = (
                repr([alert[name] for name in ("id", "record", "raised_at", "p_value", "source")]) for alert in alerts
            )
            hashes = np.array([zlib.crc32(text.encode()) for text in texts], np.uint64)
            num_rows, total = num_rows + len(hashes), total + int(mix_bits(hashes).sum(dtype=np.uint64))
            continue
        for batch in pq.ParquetFile(path).iter_batches(65_536):
            mixed = np.zeros(batch.num_rows, np.uint64)
            for column in batch.columns:
                mixed = mix_bits(mixed + _hash_column(column))
            num_rows, total = num_rows + batch.num_rows, total + int(mixed.sum(dtype=np.uint64))
    return num_rows, total % 2**64


def _hash_column(column: pa.Array) -> NDArray[np.uint64]:
    """Return a hash of each cell of a column."""
    if pa.types.is_string(column.type):
        indexes, texts = encode_distinct(column)
        return np.array([zlib.crc32(text.encode()) for text in [*texts, ""]], np.uint64)[indexes]
    if pa.types.is_boolean(column.type) or pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    return column.cast(pa.float64()).fill_null(-1.5).to_numpy(zero_copy_only=False).view(np.uint64)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts that the command line names, and publish the figures."""
    parser = add_again_option(build_parser(__doc__, tables=""))
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help="all by default")
    parser.add_argument("--readings", type=int, default=2_000_000)
    parser.add_argument("--features", type=int, default=20)
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--layout", choices=("wide", "long"), default="long")
    parser.add_argument("--sources", default="disk", help="disk, hive or s3, comma-separated")
    parser.add_argument("--preset", default="small")
    parser.add_argument("--workers", default="1,2", help="numbers of workers, comma-separated")
    parser.add_argument("--engines", default="local", help="local or ray, comma-separated")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of speed")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="folder for input and outputs; by default a temporary one")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    setting = {"layout": options.layout, "preset": options.preset, "features": options.features}
    measured = ResultStore("sharded_replay", setting, options.again, options.results)
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
        model = folder / "model"
        model_store.write(model, make_model(options.preset, options.features, 0), make_quiet_calibration(), {}, "")
        for source in options.sources.split(","):
            keys = [
                {"part": part, "source": source, "engine": engine}
                for part in dict.fromkeys(options.parts or PARTS)
                for engine in options.engines.split(",")
            ]
            keys = [key for key in keys if measured.find(**key, readings=options.readings) is None]
            if not keys:
                continue
            store = None
            if source == "s3":
                logging.getLogger("werkzeug").setLevel(logging.WARNING)  # it would log each request
                patch = cleanup.enter_context(pytest.MonkeyPatch.context())
                store, _ = cleanup.enter_context(run_server(patch))
            inputs = write_input(folder / "input", options, source, options.readings, store)
            for key in keys:
                # Once all runs have ended, so that an interrupted run does not leave a part of them.
                for row in list(measure(options, key, store, inputs, model, folder)):
                    print(json.dumps(measured.add(key | row)), flush=True)
            digest_run_in_one_process.cache_clear()
    tables = "\n".join(
        f"### {part}\n\n{format_table(of_part)}\n"
        for part in PARTS
        if (of_part := [row for row in measured.lines if row["part"] == part])
    )
    text = f"# Replay in shards\n\n{format_today()}, {describe_machine()}\n\n{tables}"
    publish_results("sharded_replay", text, None, options.results)


def measure(
    options: argparse.Namespace,
    key: Mapping[str, str],
    store: fs.S3FileSystem | None,
    inputs: list[str],
    model: Path,
    folder: Path,
) -> Iterator[Row]:
    """Return the rows of the part, the source and the engine of `key`; see `write_input` for the other arguments."""
    if key["part"] == "speed":
        return measure_speed(options, key["engine"], inputs, model, folder)
    if key["part"] == "memory":
        return measure_memory(options, key, store, inputs, model, folder)
    return kill_runs(options, key["engine"], inputs, model, folder)


if __name__ == "__main__":
    main()
