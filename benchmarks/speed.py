"""How fast scoring is, as ratios of one run: against a full forward pass per event, and against the machine's ceiling.

    python -m benchmarks.speed            (make bench)

Rows: `steps` (one new event for each of many open records of mixed lengths) and `replay` (whole records through the
engine), for several numbers of features and presets. The baseline scores each new event as the published code would:
one forward pass of the same weights over all readings so far, batch 1. The ceiling is the rate of float32 matrix
products measured in the same run divided by the products of an event (two tokens through every matrix of the layers).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from deformer_stream.core.batch import NO_TIME, EventBatch
from deformer_stream.core.conformal import Calibration
from deformer_stream.core.engine import Engine, Limits
from deformer_stream.core.model import PRESETS, DEformer
from deformer_stream.core.schema import Feature, Schema

RESULTS = Path(__file__).parent / "results"
ROUNDS = 5


def schema_of(features: int) -> Schema:
    return Schema(tuple(Feature(f"f{i}", "continuous") for i in range(features)))


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def product_rate(d: int, rows: int = 2048) -> float:
    """FLOP/s of the float32 matrix products a layer consists of."""
    x, up, down = torch.randn(rows, d), torch.randn(4 * d, d), torch.randn(d, 4 * d)

    def work() -> None:
        for _ in range(10):
            torch.nn.functional.linear(torch.nn.functional.linear(x, up), down)

    work()
    return 10 * 2 * 2 * rows * d * 4 * d / median(timed(work) for _ in range(ROUNDS))


def flops_per_event(model: DEformer) -> float:
    """Two tokens through every matrix of the layers, a multiplication and an addition each."""
    weights = sum(p.numel() for block in model.blocks for p in block.parameters() if p.dim() == 2)
    return 2.0 * 2.0 * weights


class World:
    """Open records of mixed lengths, and the events that come next."""

    def __init__(self, preset: str, features: int, records: int) -> None:
        torch.manual_seed(0)
        self.rng = np.random.default_rng(0)
        self.model = DEformer(schema_of(features), PRESETS[preset]).eval()
        self.calibration = Calibration.of(
            1e6 + np.arange(100.0), "random"
        )  # nothing alerts: explanations are timed apart
        self.features, self.records = features, records
        self.orders = np.argsort(self.rng.random((records, features)), 1)
        self.values = self.rng.normal(size=(records, features))
        self.ids = [f"record-{i}" for i in range(records)]

    def engine(self) -> Engine:
        return Engine(self.model, self.calibration, "benchmark", 0.05, Limits(cache_bytes=4 * 2**30))

    def batch(self, rows: np.ndarray, places: np.ndarray) -> EventBatch:
        n = len(rows)
        index = np.arange(n, dtype=np.int32)
        codes = self.orders[rows, places].astype(np.int32)
        ids = [self.ids[r] for r in rows.tolist()]
        return EventBatch(ids, codes, self.values[rows, places], np.full(n, NO_TIME), index, np.zeros(n, np.int32))

    def steps(self) -> tuple[float, float]:
        """Events a second of live steps, and of a full forward pass per event, alternating."""
        engine = self.engine()
        lengths = self.rng.integers(0, max(1, self.features - 2 * ROUNDS), self.records)
        rows = np.repeat(np.arange(self.records), lengths)
        engine.handle(self.batch(rows, np.concatenate([np.arange(n) for n in lengths])), 0)
        live, full = [], []
        everyone = np.arange(self.records)
        for step in range(min(2 * ROUNDS, self.features)):
            batch = self.batch(everyone, lengths + step)
            live.append(self.records / timed(lambda batch=batch: engine.handle(batch, 0)))  # type: ignore[misc]
            full.append(self.one_by_one(lengths + step))
        return median(live[1:]), median(full[1:])

    def one_by_one(self, lengths: np.ndarray, count: int = 40) -> float:
        codes, values = torch.from_numpy(self.orders), torch.from_numpy(self.values).float()

        def work() -> None:
            with torch.inference_mode():
                for r in range(count):
                    n = int(lengths[r]) + 1
                    self.model.log_prob(codes[r : r + 1, :n], values[r : r + 1, :n])

        return count / timed(work)

    def replay(self) -> float:
        """Events a second of whole records, 1,024 to a batch."""
        rates = []
        for _ in range(ROUNDS):
            engine = self.engine()
            n = min(self.records, max(64, 40_000 // self.features))
            rows = np.repeat(np.arange(n), self.features)
            batch = self.batch(rows, np.tile(np.arange(self.features), n))
            rates.append(len(rows) / timed(lambda engine=engine, batch=batch: engine.handle(batch, 0)))  # type: ignore[misc]
        return median(rates)


def measure(preset: str, features: int, records: int) -> dict[str, Any]:
    world = World(preset, features, records)
    ceiling = product_rate(PRESETS[preset].d_model) / flops_per_event(world.model)
    steps, full = world.steps()
    replay = world.replay()
    return {
        "preset": preset,
        "features": features,
        "open_records": records,
        "ceiling": round(ceiling),
        "full_forward": round(full),
        "steps": round(steps),
        "steps_vs_full_forward": round(steps / full, 1),
        "steps_vs_ceiling": round(steps / ceiling, 3),
        "replay": round(replay),
        "replay_vs_ceiling": round(replay / ceiling, 3),
    }


def machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return (
        f"{os.cpu_count()} cores, {model}, torch {torch.__version__.split('+')[0]}, {torch.get_num_threads()} threads"
    )


def table(rows: list[dict[str, Any]]) -> str:
    head = ["preset", "features", "full forward /s", "steps /s", "× full", "% of ceiling", "replay /s", "% of ceiling"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        cells = [
            r["preset"],
            r["features"],
            f"{r['full_forward']:,}",
            f"{r['steps']:,}",
            f"{r['steps_vs_full_forward']:.0f}",
            f"{100 * r['steps_vs_ceiling']:.0f}",
            f"{r['replay']:,}",
            f"{100 * r['replay_vs_ceiling']:.0f}",
        ]
        lines.append("| " + " | ".join(str(c) for c in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small row, to see that it runs")
    arguments = parser.parse_args()
    worlds = (
        [("tiny", 8, 256)]
        if arguments.quick
        else [("tiny", 8, 4096), ("tiny", 40, 4096), ("small", 8, 4096), ("small", 40, 4096), ("small", 100, 1024)]
    )
    rows = []
    for world in worlds:
        rows.append(measure(*world))
        print(json.dumps(rows[-1]), flush=True)
    when = f"{machine()}, {datetime.now(UTC):%Y-%m-%d}; medians of {ROUNDS} or more rounds, events a second."
    text = f"# Speed\n\n{when}\n\n{table(rows)}\n"
    print("\n" + text)
    if not arguments.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "speed.md").write_text(text)
        (RESULTS / "speed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
