"""Measure `deformer-stream replay --output-dir`: speed with several workers, memory, and runs that are killed.

    python -m benchmarks.sharded_replay [PART…] --readings 200000000 --folder /data/scratch

speed        Seconds and readings per second with 1 and 2 workers (--workers), local and with Ray (--engines), and their
             ratio to the first number of workers of the engine. `scoring_s` is the sum over all shards of the seconds
             in which they were scored; the rest is the start, and the division of rows among shards. Memory is the
             largest sum of the resident bytes of all processes, and the largest of one process.
memory       The same memory for a tenth of the input and for all of it, with 2 workers.
kill         A run with 2 workers that is killed by SIGKILL, --kills times at random times, and then runs to its end. In
             half of the cases a worker is killed first. `equal` says whether all outputs equal those of `replay`
             in one process without shards. `written_again` is the number of finished shards that were scored again.

The input is a table of random records in --files Parquet files: with --layout long a row is a reading and the readings
of 1,000 records interleave. --source hive writes them into folders `site=…/day=…`, and --source s3 reads these from a
local S3 server, which keeps them in memory. The model has random weights, which are as fast as trained ones.

The outputs are compared by sums of hashes of rows, in bounded memory. Each worker computes on one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from benchmarks.command import describe_machine, format_today, publish_results
from benchmarks.feed import OUTLIER_VALUE, make_model, make_quiet_calibration
from benchmarks.stream import format_table
from deformer_stream import model_store
from deformer_stream.codec.columns import encode_distinct
from deformer_stream.codec.tables import mix_bits
from tests.integration.programs import list_workers, make_command, make_environment

PARTS = ("speed", "memory", "kill")
OUTPUTS = {"output": "scores.parquet", "records": "records.parquet", "alerts": "alerts.jsonl"}
RECORDS_AT_A_TIME = 1_000
"""Records whose readings interleave in a long table."""
START_SECONDS = 10.0
"""Range of the times at which runs are killed that are to be killed at their start."""
SHARE_OF_LATE_KILLS = 0.7
"""Share of the runs that are killed after they have finished a shard."""
OUTLIER_SHARE = 1e-3
"""Share of the records with an `OUTLIER_VALUE`, which raise an alert."""

Row = dict[str, Any]


def write_input(folder: Path, options: argparse.Namespace, readings: int) -> list[str]:
    """Write the input files, and return the inputs of the command."""
    shutil.rmtree(folder, ignore_errors=True)
    rng, names = np.random.default_rng(0), [f"f{i}" for i in range(options.features)]
    records_per_file = max(1, readings // options.features // options.files)
    for file in range(options.files):
        subfolder = folder / f"site={'AB'[file % 2]}" / f"day={file}" if options.source != "disk" else folder
        subfolder.mkdir(parents=True, exist_ok=True)
        path = subfolder / f"part-{file:04}.parquet"
        writer: pq.ParquetWriter | None = None
        for first in range(0, records_per_file, RECORDS_AT_A_TIME):
            table = _draw_table(rng, names, file, first, min(RECORDS_AT_A_TIME, records_per_file - first), options)
            writer = writer or pq.ParquetWriter(path, table.schema)
            writer.write_table(table)
        assert writer is not None
        writer.close()
    return [str(folder)]


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
    """

    def __init__(self, inputs: list[str], model: Path, *words: object) -> None:
        command = make_command("deformer-stream", "replay", *inputs, "--model", model, "--explanations", "fast", *words)
        # All threads of a worker are one; the environment of this process may say something else.
        environment = {name: value for name, value in make_environment({}).items() if name != "OMP_NUM_THREADS"}
        self._began = time.monotonic()
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self.max_total_bytes = self.max_process_bytes = 0

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def wait(self) -> str:
        """Wait for the end, watch the memory, and return the log."""
        while self.process.poll() is None:
            sizes = [_read_resident_bytes(pid) for pid in [self.process.pid, *list_children(self.process.pid)]]
            self.max_total_bytes = max(self.max_total_bytes, sum(sizes))
            self.max_process_bytes = max(self.max_process_bytes, *sizes)
            time.sleep(0.1)
        _, log = self.process.communicate()
        assert self.process.returncode == 0, log[-2000:]
        return log


def list_children(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have started."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    return children + [grandchild for child in children for grandchild in list_children(child)]


def _read_resident_bytes(pid: int) -> int:
    """Return the resident bytes of a process, 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def run_in_shards(inputs: list[str], model: Path, folder: Path, workers: int, engine: str, *words: object) -> Row:
    """Run the command to its end in a new folder, and return the figures."""
    shutil.rmtree(folder, ignore_errors=True)
    outputs = [f"--{name}={path}" for name, path in OUTPUTS.items()]
    running = RunningReplay(
        inputs, model, "--output-dir", folder, "--workers", workers, "--engine", engine, *outputs, *words
    )
    running.wait()
    seconds, summary = running.seconds, json.loads((folder / "summary.json").read_text())
    return {
        "engine": engine,
        "workers": workers,
        "readings": summary["readings"],
        "shards": summary["shards"],
        "seconds": round(seconds, 1),
        "readings_/s": round(summary["readings"] / seconds),
        "scoring_s": round(summary["seconds_of_workers"], 1),
        "total_MiB": round(running.max_total_bytes / 2**20),
        "process_MiB": round(running.max_process_bytes / 2**20),
    }


def measure_speed(options: argparse.Namespace, inputs: list[str], model: Path, folder: Path) -> Iterator[Row]:
    """Yield the speed of each engine with each number of workers."""
    for engine in options.engines.split(","):
        first: Row | None = None
        for workers in map(int, options.workers.split(",")):
            row = run_in_shards(inputs, model, folder / "shards", workers, engine)
            first = first or row
            yield {"part": "speed", **row, "ratio": round(first["seconds"] / row["seconds"], 2)}


def measure_memory(options: argparse.Namespace, model: Path, folder: Path) -> Iterator[Row]:
    """Yield the memory for a tenth of the input and for all of it."""
    for readings in (options.readings // 10, options.readings):
        inputs = write_input(folder / "input-of-memory", options, readings)
        yield {"part": "memory", **run_in_shards(inputs, model, folder / "shards", 2, "local")}
    shutil.rmtree(folder / "input-of-memory")


def kill_runs(options: argparse.Namespace, inputs: list[str], model: Path, folder: Path) -> Iterator[Row]:
    """Kill a run repeatedly, and yield whether its outputs are those of one process."""
    whole, target = folder / "whole", folder / "killed"
    for path in (whole, target):
        shutil.rmtree(path, ignore_errors=True)
    whole.mkdir()
    running = RunningReplay(
        inputs, model, "--drift", "off", *(f"--{name}={whole / path}" for name, path in OUTPUTS.items())
    )
    running.wait()
    seconds_of_one = running.seconds
    rng = np.random.default_rng(options.seed)
    num_shards = 3 * options.kills  # so that shards are left for each run
    words = (target, "--workers", 2, "--shards", num_shards, *(f"--{name}={path}" for name, path in OUTPUTS.items()))
    finished: dict[str, int] = {}
    num_written_again = num_killed_workers = 0
    for _ in range(options.kills):
        running = RunningReplay(inputs, model, "--output-dir", *words)
        _wait_for_moment(running, target, len(finished), rng, seconds_of_one / num_shards)
        workers = list_workers(running.process.pid)
        if workers and rng.random() < 0.5:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(rng.choice(workers)), signal.SIGKILL)
            num_killed_workers += 1
            time.sleep(rng.uniform(0.0, 1.0))
        running.process.kill()
        running.process.communicate()
        now = list_shards(target)
        num_written_again += sum(now.get(name) != identity for name, identity in finished.items())
        finished = now
    num_finished_before_end = len(finished)
    RunningReplay(inputs, model, "--output-dir", *words).wait()
    now = list_shards(target)
    num_written_again += sum(now.get(name) != identity for name, identity in finished.items())
    are_equal = all(
        compute_digest([whole / name]) == compute_digest(sorted(target.glob(f"shards/*/{name}")))
        for name in OUTPUTS.values()
    )
    yield {
        "part": "kill",
        "kills": options.kills,
        "of_workers": num_killed_workers,
        "shards": len(now),
        "finished_before_last_run": num_finished_before_end,
        "written_again": num_written_again,
        "equal": str(are_equal),
        "one_process_s": round(seconds_of_one, 1),
    }
    assert are_equal, "the outputs differ"
    assert not num_written_again, "finished shards were scored again"


def _wait_for_moment(
    running: RunningReplay, target: Path, num_finished: int, rng: np.random.Generator, seconds_per_shard: float
) -> None:
    """Wait for the random moment at which a run is killed: at its start, or after it has finished one or two shards.

    Args:
        running: The run.
        target: The folder of its outputs.
        num_finished: Number of shards that earlier runs have finished.
        rng: The generator.
        seconds_per_shard: Seconds in which about one shard is scored.
    """
    seconds, num_new = rng.uniform(0.0, START_SECONDS), 0
    if rng.random() < SHARE_OF_LATE_KILLS:
        seconds, num_new = rng.uniform(0.0, seconds_per_shard), int(rng.integers(1, 3))
    while running.process.poll() is None and len(list_shards(target)) < num_finished + num_new:
        time.sleep(0.02)
    time.sleep(seconds)


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


@contextlib.contextmanager
def serve_input(options: argparse.Namespace, inputs: list[str]) -> Iterator[list[str]]:
    """Copy the input to a local S3 server with --source s3, and yield the inputs of the command."""
    if options.source != "s3":
        yield inputs
        return
    from tests.s3 import BUCKET, run_server, write_object

    with pytest.MonkeyPatch.context() as patch, run_server(patch) as (store, _):
        root = Path(inputs[0])
        for path in sorted(root.rglob("*.parquet")):
            write_object(store, f"logs/{path.relative_to(root)}", path.read_bytes())
        yield [f"s3://{BUCKET}/logs"]


def main() -> None:
    """Run the parts that the command line names, and publish the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--readings", type=int, default=2_000_000)
    parser.add_argument("--features", type=int, default=20)
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--layout", choices=("wide", "long"), default="long")
    parser.add_argument("--source", choices=("disk", "hive", "s3"), default="disk")
    parser.add_argument("--preset", default="small")
    parser.add_argument("--workers", default="1,2", help="numbers of workers, comma-separated")
    parser.add_argument("--engines", default="local", help="local or ray, comma-separated")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="folder for input and outputs; by default a temporary one")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        model = folder / "model"
        model_store.write(model, make_model(options.preset, options.features, 0), make_quiet_calibration(), {}, "")
        with serve_input(options, write_input(folder / "input", options, options.readings)) as inputs:
            for part in dict.fromkeys(options.parts):
                measured = {
                    "speed": lambda: measure_speed(options, inputs, model, folder),
                    "memory": lambda: measure_memory(options, model, folder),
                    "kill": lambda: kill_runs(options, inputs, model, folder),
                }[part]()
                for row in measured:
                    rows.append(row | {"layout": options.layout, "source": options.source, "preset": options.preset})
                    print(json.dumps(rows[-1]), flush=True)
    tables = "\n".join(
        f"### {part}\n\n{format_table(of_part)}\n"
        for part in PARTS
        if (of_part := [row for row in rows if row["part"] == part])
    )
    publish_results("sharded_replay", f"# Replay in shards\n\n{format_today()}, {describe_machine()}\n\n{tables}", rows)


if __name__ == "__main__":
    main()
