"""What of the road can be measured in one process: its stages, its memory, and replay. See `benchmarks.stream`."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from kafka.record.default_records import DefaultRecordBatch

from benchmarks.feed import BATCH, Events, calm_calibration, model_of, records_of
from benchmarks.speed import ceiling_of
from connectors.files import ScoresParquet
from connectors.kafka.incoming import messages_of
from connectors.kafka.runs import runs_of
from deformer_stream import model_store
from deformer_stream.codec import Codec
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import NO_TIME, EventBatch
from deformer_stream.engine.records import RecordTable
from deformer_stream.model.deformer import DEformer
from tests.connectors.raw import batch
from tests.integration.programs import command, environment

Rows = Iterator[dict[str, Any]]

POLL = 8192
OPEN = 4096
GUIDE = 4
"""Components of the guide in the rows with one."""


def stages(options: argparse.Namespace, folder: Path) -> Rows:
    """Every hop by itself, over the same messages of one reading each."""
    for gaussians in (0, GUIDE):
        model = model_of(options.preset, options.features, gaussians)
        rates = _stages(model, options.features, folder)
        yield {"preset": options.preset, "features": options.features, "guide": gaussians, **rates}


def _stages(model: DEformer, features: int, folder: Path, polls: int = 9) -> dict[str, int]:
    messages = Events(features, OPEN).singles()
    codec, engine = Codec(model.schema), Engine(model, calm_calibration(), "benchmark", 0.01)
    records, sink = RecordTable(model.schema), ScoresParquet(folder / "stages.parquet", model.schema)
    took: dict[str, list[float]] = {name: [] for name in ("unpack", "decode", "accept", "handle", "encode")}

    def timed(name: str, began: float) -> None:
        took[name].append(time.perf_counter() - began)

    for _ in range(polls):
        some = list(islice(messages, POLL))
        sent = [batch(records_of(some[i : i + BATCH]), len(some[i : i + BATCH])) for i in range(0, POLL, BATCH)]
        began = time.perf_counter()
        runs = [run for data in sent for run in runs_of(DefaultRecordBatch(data))]
        data = messages_of("topic", {_Partition(): runs})  # type: ignore[dict-item]
        timed("unpack", began)
        assert data is not None
        began = time.perf_counter()
        events, _ = codec.decode(data)
        timed("decode", began)
        began = time.perf_counter()
        accepted, _ = records.ingest(events, 0)
        records.release(accepted.close_reasons)
        timed("accept", began)
        began = time.perf_counter()
        effects = engine.handle(events, 0)
        timed("handle", began)
        began = time.perf_counter()
        sink.write(effects, data)
        timed("encode", began)
    sink.discard()
    handled = [h - a for h, a in zip(took["handle"], took["accept"], strict=True)]
    named = {"unpack": took["unpack"], "decode": took["decode"], "accept": took["accept"]}
    named |= {"score_and_effects": handled, "encode": took["encode"]}
    named["all"] = [sum(parts) for parts in zip(*named.values(), strict=True)]
    return {f"{name}_/s": round(POLL / median(seconds[1:])) for name, seconds in named.items()}


class _Partition:
    partition = 0


def resident(process: int | str = "self") -> int:
    """Bytes of a process in memory now; 0 where it has ended."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
    except (FileNotFoundError, ProcessLookupError):
        return 0


def memory(options: argparse.Namespace, folder: Path) -> Rows:
    """Open records that stay open, and the rate at which they, or few others, are scored. "possible": what the products
    alone would allow, where any record is one whose pages have gone to others if all of them do not fit."""
    features = max(options.features, 40)
    model = model_of("small", features, options.gaussians, options.precision)
    before = resident()
    for open_records in (OPEN, options.records):
        engine = Engine(model, calm_calibration(), "benchmark", 0.01, Limits(max_open_records=2 * open_records))
        _fill(engine, open_records, 20)
        filled = resident() - before
        recent = _rate(engine, range(20, 26), open_records, OPEN)
        engine.pop_cache_rebuilds()
        anywhere = _rate(engine, range(26, 32), open_records, open_records)
        possible = ceiling_of(model, 20 * round(engine.pop_cache_rebuilds() / (6 * OPEN)))
        yield {
            "preset": "small",
            "features": features,
            "precision": model.config.precision,
            "guide": options.gaussians,
            "compiled": model.library is not None,
            "threads": torch.get_num_threads(),
            "open_records": open_records,
            "readings_each": 20,
            "resident_MiB": round(filled / 2**20),
            "after_scoring_MiB": round((resident() - before) / 2**20),
            "cache_MiB": round(engine.cache_bytes / 2**20),
            "events_of_recent_records_/s": recent,
            "events_of_any_record_/s": anywhere,
            "possible_/s": round(possible),
            "share_of_possible": round(anywhere / possible, 3),
        }
        del engine


def _events(rows: np.ndarray, codes: np.ndarray) -> EventBatch:
    n = len(rows)
    index = np.arange(n, dtype=np.int32)
    values = np.sin(rows * 0.37 + codes)
    names = [f"device-{row % 997}/{row}" for row in rows.tolist()]
    return EventBatch(names, codes.astype(np.int32), values, np.full(n, NO_TIME), index, np.zeros(n, np.int32))


def _fill(engine: Engine, records: int, readings: int) -> None:
    """As a restored snapshot leaves them: with their readings and without anything cached."""
    for start in range(0, records, 4096):
        rows = np.repeat(np.arange(start, min(records, start + 4096)), readings)
        codes = np.tile(np.arange(readings), len(rows) // readings)
        engine.records.ingest(replace(_events(rows, codes), row_boundaries=np.arange(0, len(rows) + 1, readings)), 0)


def _rate(engine: Engine, places: range, records: int, among: int) -> int:
    """Events a second of records drawn from the last `among`, one of each at every place in the record."""
    rng = np.random.default_rng(0)
    rates = []
    for place in places:
        rows = records - 1 - rng.permutation(among)[:OPEN]
        events = _events(rows, np.full(len(rows), place))
        began = time.perf_counter()
        engine.handle(events, 0)
        rates.append(len(rows) / (time.perf_counter() - began))
    return round(median(rates[1:]))


def replay(options: argparse.Namespace, folder: Path) -> Rows:
    """The command as a process, over whole records in a wide table, and the engine alone, against the ceiling. Seconds
    count from the start of the process."""
    model = model_of(options.preset, options.features, options.gaussians, options.precision)
    model_store.write(folder / "replayed", model, calm_calibration(), {}, "")
    table, scores = folder / "replay.parquet", folder / "scores.parquet"
    for events in (min(1_000_000, options.events // 5), options.events):
        _table(table, events // options.features, options.features)
        ceiling, alone = ceiling_of(model), _alone(model, options.features)
        began = time.monotonic()
        process = subprocess.Popen(
            command("deformer-stream", "replay", table, "--model", folder / "replayed", "--output", scores),
            env=environment({"OMP_NUM_THREADS": str(torch.get_num_threads())}),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        held = []
        while process.poll() is None:
            held.append(resident(process.pid))
            time.sleep(0.05)
        took = time.monotonic() - began
        assert process.returncode == 0, process.returncode
        scores.unlink()
        yield {
            "preset": options.preset,
            "features": options.features,
            "precision": model.config.precision,
            "guide": options.gaussians,
            "threads": torch.get_num_threads(),
            "events": events,
            "seconds": round(took, 1),
            "ceiling_/s": round(ceiling),
            "engine_alone_/s": round(alone),
            "engine_share": round(alone / ceiling, 3),
            "events_/s": round(events / took),
            "share_of_ceiling": round(events / took / ceiling, 3),
            "resident_MiB_by_tenths": [round(max(part) / 2**20) for part in np.array_split(held[:-1], 10)],
        }


def _table(path: Path, records: int, features: int) -> None:
    rng = np.random.default_rng(0)
    columns = {f"f{i}": pa.array(np.empty(0)) for i in range(features)}
    with pq.ParquetWriter(path, pa.table(columns).schema) as writer:
        for start in range(0, records, 100_000):
            n = min(100_000, records - start)
            writer.write_table(pa.table({name: rng.normal(size=n).round(5) for name in columns}))


def _alone(model: DEformer, features: int) -> float:
    """Events a second of `Engine.handle` over whole records."""
    rates = []
    engine = Engine(model, calm_calibration(), "benchmark", 0.01)
    for turn in range(8):
        records = POLL // features
        rows = np.repeat(np.arange(records) + turn * POLL, features)
        events = _events(rows, np.tile(np.arange(features), records))
        events = replace(events, row_boundaries=features * np.arange(records + 1))
        began = time.perf_counter()
        engine.handle(events, 0)
        rates.append(len(rows) / (time.perf_counter() - began))
    return median(rates[1:])


if __name__ == "__main__":
    sys.exit("python -m benchmarks.stream")
