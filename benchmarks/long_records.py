"""Measure the cost and the memory of records with irregular readings that stay open for long.

    python -m benchmarks.long_records [PART…]

length       Time per reading, and bytes per open record, against the number of readings that each record has.
open         Many records are open at once, and each gets a reading in turn. The cache holds only some of them, so the
             contexts of the others are computed again. The number of rounds is limited by --events. In the rows with
             `readings_in_turn` below the number of open records, only these records get readings. Their rate shows what
             the other open records cost.
replay       `deformer-stream replay` of --stays records in order of time, all of which are open at once: intensive-care
             stays (DEFORMER_DATA), or simulated records. The seconds are those of the whole command.

In the first two parts, sensors report at random, so records have readings of all sensors. The model has random weights,
which are as fast as trained ones, unless --model names a model directory. Bytes of the cache are those of the pages in
use. The bytes of a row are those of the record table: the id, the running statistics, the latest time of each sensor,
and others.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from benchmarks.command import RESULTS, describe_machine, format_today, read_child_cpu_seconds
from benchmarks.irregular_deformer import run_command
from benchmarks.irregular_feed import make_irregular_calibration, make_irregular_model, read_or_simulate_records
from benchmarks.stream import format_table
from benchmarks.stream_local import read_resident_bytes
from benchmarks.tables import get_tables_folder
from deformer_stream import load, model_store
from deformer_stream.codec.state import encode_snapshot
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import EventBatch
from deformer_stream.engine.snapshot import EventTimes, Snapshot
from deformer_stream.model.deformer import DEformer

Rows = Iterator[dict[str, Any]]

LENGTHS = (50, 400, 2_000, 10_000)
"""Numbers of readings of a record after which the cost of a reading is measured."""
MEASURED_READINGS = 128
"""Readings of each record over which the cost is averaged: two blocks of the default size."""
READINGS_PER_BATCH = 8
"""Readings of each record in a batch of the part `length`."""
TEMPLATE_RECORDS = 64
"""Records whose state is repeated to open many records at once."""
TEMPLATE_READINGS = 500
"""Readings of each record before the part `open` begins."""
BATCH_EVENTS = 4096
REPLAY_READINGS = 430
"""Readings of a simulated record of the part `replay`, as in the intensive-care stays."""
NUM_HOT_RECORDS = 512
"""Records that get readings while many others are open, few enough for the cache."""


def make_model(options: argparse.Namespace) -> DEformer:
    """Return a model of irregular readings with compiled kernels: that of --model, or one with random weights."""
    if options.model:
        return load(options.model).artifact.model
    sensors = [f"sensor-{i:02d}" for i in range(options.sensors)]
    return make_irregular_model(options.preset, sensors, options.precision)


def make_engine(model: DEformer, options: argparse.Namespace, num_records: int) -> Engine:
    """Return an engine that closes no record by itself and raises no alert."""
    limits = Limits(
        max_open_records=2 * num_records, max_record_bytes=2**40, cache_bytes=options.cache_mib * 2**20, tie_wait=None
    )
    return Engine(model, make_irregular_calibration(model.schema), "benchmark", 1e-9, limits)


def make_batch(names: list[str], first: int, num_readings: int, num_sensors: int, seed: int) -> EventBatch:
    """Return consecutive readings of each record, in turn.

    Args:
        names: Ids of the records.
        first: Position of the first reading in each record, from which its time follows.
        num_readings: Number of readings of each record.
        num_sensors: Number of sensors, of which one is drawn for each reading.
        seed: Seed of sensors and values.
    """
    rng = np.random.default_rng((seed, first))
    n = len(names) * num_readings
    seconds = 60 * (first + np.repeat(np.arange(num_readings), len(names))) + rng.integers(0, 60, n)
    return EventBatch(
        names * num_readings,
        rng.integers(0, num_sensors, n).astype(np.int32),
        np.round(rng.normal(size=n), 2),
        1_000_000 * seconds,
        np.arange(n, dtype=np.int32),
        np.zeros(n, np.int32),
    )


def measure_bytes(engine: Engine, num_records: int) -> dict[str, int]:
    """Return the bytes of an open record in memory and in a snapshot, averages over all open records."""
    rows = np.flatnonzero(engine.records.is_open)
    log_bytes = int(engine.records.log.extent_bytes(rows).sum())
    table_bytes = int(engine.records.bytes_of(rows).sum()) - log_bytes
    num_cached = int((engine.cache.num_cached_readings > 0).sum())
    snapshot = encode_snapshot(engine.snapshot(0, 0))
    return {
        "log_bytes": round(log_bytes / num_records),
        "row_bytes": round(table_bytes / num_records),
        "cache_bytes": round(engine.cache_bytes / max(num_cached, 1)),
        "snapshot_bytes": round(len(snapshot) / num_records),
    }


def measure_lengths(options: argparse.Namespace) -> Rows:
    """Measure the cost of a reading and the bytes of a record at several lengths of the records."""
    model = make_model(options)
    num_sensors, num_records = len(model.schema), options.records
    engine = make_engine(model, options, num_records)
    names = [f"device-{i:04d}/{i:06d}" for i in range(num_records)]
    seconds_by_start: dict[int, float] = {}
    for start in range(0, max(LENGTHS), READINGS_PER_BATCH):
        batch = make_batch(names, start, READINGS_PER_BATCH, num_sensors, 0)
        began = time.perf_counter()
        engine.handle(batch, start)
        seconds_by_start[start] = time.perf_counter() - began
        stop = start + READINGS_PER_BATCH
        length = next((length for length in LENGTHS if start < length <= stop), None)
        if length is not None:
            # The shortest records have less than two blocks.
            first = max(stop - MEASURED_READINGS, READINGS_PER_BATCH)
            seconds = sum(part for begin, part in seconds_by_start.items() if begin >= first)
            yield {
                "readings_of_a_record": length,
                "us_a_reading": round(1e6 * seconds / (num_records * (stop - first)), 1),
                "stored_readings": round(int(engine.records.count_stored(np.arange(num_records)).mean())),
                **measure_bytes(engine, num_records),
                **describe_model(model, options),
            }


def describe_model(model: DEformer, options: argparse.Namespace) -> dict[str, Any]:
    """Return the columns that describe the model and its cache."""
    engine = make_engine(model, options, 1)
    cache = engine.cache
    tokens = model.cached_tokens_per_reading
    return {
        "sensors": len(model.schema),
        "precision": model.config.precision,
        "compiled": model.kernel_library is not None,
        "threads": torch.get_num_threads(),
        "cache_bytes_a_reading": round(cache.page_bytes * tokens / cache.PAGE_TOKENS),
        "records_in_cache": cache.num_pages // cache.pages_per_record,
    }


def make_snapshot(template: Snapshot, num_records: int) -> Snapshot:
    """Return a snapshot with many records, whose scores are those of the records of another one in turn.

    Each record has its own values, with two decimals, and its own times, with a resolution of a second. Otherwise the
    compression of snapshots would find the repetitions.

    Args:
        template: The other snapshot. Its records must not be windows.
        num_records: Number of records, a multiple of the number of records of the template.
    """
    repeats, rng = num_records // len(template), np.random.default_rng(0)
    names = (
        "model",
        "idle_micros",
        "counts",
        "num_declared_missing",
        "declared_missing",
        "features",
        "alert_seq",
        "alert_alpha",
    )
    sums = ("log_likelihood", "neg_log_p_sum", "min_log_p", "max_statistic", "centered_nll")
    event_times = template.event_times
    assert event_times is not None
    columns = {name: np.tile(getattr(template, name), repeats) for name in (*names, "running")}
    for name in sums:
        columns["running"][name] *= rng.random(num_records)
    if template.cusums is not None:
        columns["cusums"] = np.tile(template.cusums, (repeats, 1)) * rng.random((num_records, 1), np.float32)
    if template.latest_event_time is not None:
        columns["latest_event_time"] = np.tile(template.latest_event_time, repeats)
    num_readings = len(columns["features"])
    seconds = np.tile(event_times.times, repeats) // 10**6 + rng.integers(-20, 20, num_readings)
    counts = np.tile(template.counts, repeats)
    return replace(
        template,
        ids=[f"device-{i % 997}/{i:07d}" for i in range(num_records)],
        values=np.round(rng.normal(size=num_readings), 2),
        event_times=EventTimes(
            1_000_000 * (seconds + np.repeat(rng.integers(0, 10**6, num_records), counts)),
            np.tile(event_times.origins, repeats),
            np.tile(event_times.num_dropped, repeats),
        ),
        **columns,
    )


def measure_open_records(options: argparse.Namespace) -> Rows:
    """Measure the rate at which many open records get readings in turn, their memory, and their snapshot."""
    model = make_model(options)
    num_sensors = len(model.schema)
    template = make_engine(model, options, TEMPLATE_RECORDS)
    names = [str(i) for i in range(TEMPLATE_RECORDS)]
    for start in range(0, TEMPLATE_READINGS, READINGS_PER_BATCH):
        template.handle(make_batch(names, start, READINGS_PER_BATCH, num_sensors, 1), 0)
    for number in map(int, options.open.split(",")):
        num_records = number // TEMPLATE_RECORDS * TEMPLATE_RECORDS
        snapshot = make_snapshot(template.snapshot(0, 0), num_records)
        before = read_resident_bytes()
        engine = make_engine(model, options, num_records)
        began = time.perf_counter()
        engine.restore(0, snapshot, 0)
        restore_seconds = time.perf_counter() - began
        resident_bytes = read_resident_bytes() - before
        for num_in_turn in sorted({min(NUM_HOT_RECORDS, num_records), num_records}):
            first = 100_000 + num_in_turn  # in minutes, after all readings before
            rate, rebuilds = _measure_rate(engine, snapshot.ids[:num_in_turn], first, num_sensors, options.events)
            yield {
                "open_records": num_records,
                "readings_in_turn": num_in_turn,
                "readings_/s": round(rate),
                "contexts_computed_a_reading": round(rebuilds, 3),
                "records_in_cache": int((engine.cache.num_cached_readings > 0).sum()),
                "cache_MiB": round(engine.cache_bytes / 2**20),
                "table_and_log_MiB": round(engine.records.num_bytes / 2**20),
                "resident_MiB": round(resident_bytes / 2**20),
                **_measure_snapshot(engine),
                "restore_s": round(restore_seconds, 1),
                "peak_MiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10),
            }
        del engine, snapshot


def _measure_rate(
    engine: Engine, names: list[str], first: int, num_sensors: int, num_events: int
) -> tuple[float, float]:
    """Return readings per second when records get readings in turn, and the contexts computed again per reading."""
    batch_events = min(BATCH_EVENTS, len(names), max(num_events // 4, 1))
    seconds, num_measured, num_rebuilds = 0.0, 0, 0
    num_batches = max(2, num_events // batch_events)
    for number in range(num_batches):
        start = number * batch_events % len(names)
        own = (names[start : start + batch_events] + names[:batch_events])[:batch_events]
        batch = make_batch(own, first + number, 1, num_sensors, 2)
        engine.pop_cache_rebuilds()
        began = time.perf_counter()
        effects = engine.handle(batch, 1)
        if number >= num_batches // 4:  # before, the cache is filled
            seconds += time.perf_counter() - began
            num_measured += len(effects.scored)
            num_rebuilds += engine.pop_cache_rebuilds()
    return num_measured / seconds, num_rebuilds / num_measured


def _measure_snapshot(engine: Engine) -> dict[str, Any]:
    """Return the size of a snapshot, and the seconds to take it and to encode it."""
    moments = [time.perf_counter()]
    snapshot = engine.snapshot(0, 0)
    moments.append(time.perf_counter())
    data = encode_snapshot(snapshot)
    moments.append(time.perf_counter())
    seconds = dict(zip(("take_s", "encode_s"), np.diff(moments).round(2).tolist(), strict=True))
    return {"snapshot_MiB": round(len(data) / 2**20), "snapshot_bytes": round(len(data) / len(snapshot)), **seconds}


def measure_replay(options: argparse.Namespace) -> Rows:
    """Measure the command `replay` on records in order of time, which are all open at once."""
    records = read_or_simulate_records(get_tables_folder().parent / "icu2012", options.stays, REPLAY_READINGS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, output, model = folder / "readings.parquet", folder / "scores.parquet", Path(options.model)
        pq.write_table(records.to_table().sort_by("time"), source)
        if not options.model:
            model = folder / "model"
            network = make_irregular_model(options.preset, records.sensors, options.precision)
            model_store.write(model, network, make_irregular_calibration(network.schema), {}, "")
        words = ("--layout", "long", "--order", "arrival", "--record-timeout", "72h", "--model", model)
        cache = ("--cache-memory", f"{options.cache_mib}MiB")
        processor_before, began = read_child_cpu_seconds(), time.perf_counter()
        run_command("deformer-stream", "replay", source, *words, *cache, "--output", output)
        seconds = time.perf_counter() - began
        num_scored = pq.read_metadata(output).num_rows
    yield {
        "records": len(records.records),
        "readings": len(records),
        "not scored": len(records) - num_scored,
        "seconds": round(seconds, 1),
        "processor s": round(read_child_cpu_seconds() - processor_before, 1),
        "readings_/s": round(num_scored / seconds),
        "model": "trained" if options.model else f"random {options.preset}",
        "cache_MiB": options.cache_mib,
    }


PARTS: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "length": measure_lengths,
    "open": measure_open_records,
    "replay": measure_replay,
}
TITLES = {
    "length": "Cost and memory by the number of readings of a record",
    "open": "Many open records",
    "replay": "Replay of records that are open at once",
}


def write(rows: list[dict[str, Any]], folder: Path) -> None:
    """Write the rows to the results, in place of earlier rows of the same parts."""
    lines = folder / "long_records.jsonl"
    earlier_rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    new_parts = {row["part"] for row in rows}
    rows = [row for row in earlier_rows if row["part"] not in new_parts] + rows
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = "# Long records with irregular readings\n\n`python -m benchmarks.long_records --help` describes the parts.\n"
    for part, title in TITLES.items():
        part_rows = [row for row in rows if row["part"] == part]
        if part_rows:
            text += f"\n## {title}\n\n{part_rows[0]['machine']}, {part_rows[0]['date']}. {part_rows[0]['command']}\n\n"
            hidden = ("part", "machine", "date", "command")
            text += format_table([{k: v for k, v in row.items() if k not in hidden} for row in part_rows]) + "\n"
    (folder / "long_records.md").write_text(text)


def main(words: list[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.long_records",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help="the parts; by default all")
    parser.add_argument("--model", default="", help="a directory with a model of irregular readings")
    parser.add_argument("--preset", default="small", help="preset of a model with random weights")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--sensors", type=int, default=40)
    parser.add_argument("--records", type=int, default=64, help="number of records of the part `length`")
    parser.add_argument("--open", default="1024,100000,300000", help="numbers of records of the part `open`")
    parser.add_argument("--events", type=int, default=20_000, help="readings of each row of the part `open`")
    parser.add_argument("--stays", type=int, default=1600, help="number of records of the part `replay`")
    parser.add_argument("--cache-mib", type=int, default=512, help="largest size of the cache in MiB")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(words)
    torch.set_num_threads(options.threads)
    command = "`python -m benchmarks.long_records " + " ".join(sys.argv[1:] if words is None else words) + "`"
    rows: list[dict[str, Any]] = []
    for part in options.parts or PARTS:
        for row in PARTS[part](options):
            described = {"machine": describe_machine(), "date": format_today(), "command": command}
            rows.append({"part": part, **described, **row})
            print(json.dumps(row), flush=True)
    options.results.mkdir(exist_ok=True, parents=True)
    write(rows, options.results)


if __name__ == "__main__":
    main()
