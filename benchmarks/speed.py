"""How fast scoring is, as ratios of one run: against a full forward pass per event, and against the machine's ceiling.

    python -m benchmarks.speed            (make bench)

Rows: `steps` (one new event for each of many open records of mixed lengths), `prefill` (their readings so far at once)
and `replay` (whole records), through the engine; with and without compiled code, in both precisions, with and without
the Gaussians that guide the network. The baseline scores each new event as the published code would: one forward pass
of the same weights over all readings so far, batch 1, in float32. The ceiling is the rate of the layers' matrix
products, in the precision of the row, measured in the same run, divided by the products of an event (two tokens through
every matrix of the layers). "in model" counts what `Generation.score` takes, without the engine's bookkeeping. The pool
of pages has been in use before, as in a consumer that runs for a while. Where there is a GPU the same cases are
measured on it, too, with its own baseline and ceiling; of a recorded pass nobody can say where its time went.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.command import describe_machine, publish_results, format_today
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import NO_TIME, EventBatch
from deformer_stream.engine.records import RecordTable
from deformer_stream.engine.scoring import ModelVersion
from deformer_stream.kernels import build
from deformer_stream.kernels.cpu import CpuKernels
from deformer_stream.kernels.cuda_graphs import CudaGraphs
from deformer_stream.kernels.kv_cache import TorchKVCache
from deformer_stream.model.deformer import PRESETS, DEformer, ModelConfig
from deformer_stream.model.distributions import Conditional, Head
from deformer_stream.model.schema import Feature, Schema

ROUNDS = 5
CPU = torch.device("cpu")
REPLAYED = 20_000
"""Readings of a round of replay, about."""


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table. compiled: whether compiled code may score. device: torch's name of it."""

    preset: str
    features: int
    records: int
    precision: str = "bfloat16"
    gaussians: int = 0
    compiled: bool = True
    device: str = "cpu"

    @property
    def config(self) -> ModelConfig:
        return replace(PRESETS[self.preset], precision=self.precision, gaussians=self.gaussians)  # type: ignore[arg-type]


CASES = (
    Case("small", 40, 4096),
    Case("small", 40, 4096, gaussians=16),
    Case("small", 40, 4096, "float32"),
    Case("small", 40, 4096, "float32", gaussians=16),
    Case("small", 40, 4096, "float32", compiled=False),
    Case("tiny", 8, 4096),
    Case("tiny", 8, 4096, gaussians=16),
    Case("tiny", 40, 4096, gaussians=16),
    Case("small", 8, 4096),
    Case("small", 100, 2048),
    Case("small", 500, 512),
)
ON_GPU = tuple(
    replace(case, compiled=False, device="cuda") for case in (*CASES, Case("base", 40, 4096)) if case.compiled
)


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def product_rate(d: int, dtype: torch.dtype, device: torch.device = CPU) -> float:
    """FLOP/s of the matrix products a layer consists of, of as many rows as keep the device busy."""
    rows = 2048 if device.type == "cpu" else 65_536
    x, up, down = (torch.randn(shape, device=device).to(dtype) for shape in ((rows, d), (4 * d, d), (d, 4 * d)))

    def work() -> None:
        for _ in range(10):
            torch.nn.functional.linear(torch.nn.functional.linear(x, up), down)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    return 10 * 2 * 2 * rows * d * 4 * d / median(timed(work) for _ in range(ROUNDS))


def ceiling_of(model: DEformer, rebuilt: int = 0) -> float:
    """Events a second if scoring were the layers' products and nothing else. rebuilt: readings that are prefilled again
    for each event."""
    dtype = torch.bfloat16 if model.config.precision == "bfloat16" else torch.float32
    flops = flops_per_event(model) + rebuilt * flops_per_rebuilt(model)
    return product_rate(model.config.d_model, dtype, model.device) / flops


def flops_per_event(model: DEformer) -> float:
    """Two tokens through every matrix of the layers, a multiplication and an addition each."""
    weights = sum(p.numel() for block in model.blocks for p in block.parameters() if p.dim() == 2)
    return 2.0 * 2.0 * weights


def flops_per_rebuilt(model: DEformer) -> float:
    """One token through all layers but the last, of which it needs its key and value."""
    *layers, last = model.blocks
    weights = sum(p.numel() for block in layers for p in block.parameters() if p.dim() == 2)
    return 2.0 * (weights + 2 / 3 * last.qkv.weight.numel())  # type: ignore[union-attr, operator]


class Profile:
    """Seconds of each stage, its own without those of the stages inside it."""

    STAGES = (
        (Engine, "_accept", "accept"),
        (ModelVersion, "_update_statistics", "statistics"),
        (RecordTable, "log", "readings"),
        (RecordTable, "readings", "readings"),
        (TorchKVCache, "seen", "cache"),
        (TorchKVCache, "room", "cache"),
        (TorchKVCache, "past", "cache"),
        (TorchKVCache, "keep", "cache"),
        (CudaGraphs, "__call__", "network"),
        (DEformer, "compute_prior", "guide"),
        (DEformer, "embed_query_tokens", "tokens"),
        (DEformer, "embed_observation_tokens", "tokens"),
        (CpuKernels, "judge", "network"),
        (DEformer, "forward_cached", "layers"),
        (Head, "forward", "head"),
        (Conditional, "compute_surprisal", "surprise"),
        (Conditional, "compute_score_terms", "surprise"),
        (ModelVersion, "score", "rest of scoring"),
        (Engine, "handle", "rest of the engine"),
    )

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.model = 0.0
        self._inside: list[float] = []

    def _watched(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - start
                own = spent - self._inside.pop()
                self.seconds[stage] = self.seconds.get(stage, 0.0) + own
                self.model += spent if stage == "rest of scoring" else 0.0
                if self._inside:
                    self._inside[-1] += spent

        return call

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, stage in self.STAGES:
                stack.enter_context(patch.object(owner, name, self._watched(getattr(owner, name), stage)))
            yield


class World:
    """Open records of mixed lengths, and the events that come next."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.rng = np.random.default_rng(0)
        features, records = case.features, case.records
        schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(features)))
        self.model = DEformer(schema, case.config).to(case.device).eval()
        self.published = DEformer(schema, replace(case.config, precision="float32")).to(case.device).eval()
        self.published.load_state_dict(self.model.state_dict())
        if case.compiled:
            self.model.kernel_library = build.load_kernels(case.precision == "bfloat16")
        # Nothing alerts: explanations are timed apart.
        self.calibration = Calibration.from_statistics(1e6 + np.arange(100.0), "random")
        self.features, self.records = features, records
        self.orders = np.argsort(self.rng.random((records, features)), 1)
        self.values = self.rng.normal(size=(records, features))
        self.lives = 0
        self.engine = Engine(self.model, self.calibration, "benchmark", 0.05, Limits(cache_bytes=4 * 2**30))
        self.engine.handle(self.whole(records), 0)  # its pages have held as many records before

    def batch(self, rows: np.ndarray, places: np.ndarray) -> EventBatch:
        n = len(rows)
        index = np.arange(n, dtype=np.int32)
        codes = self.orders[rows, places].astype(np.int32)
        ids = [f"{self.lives}-{r}" for r in rows.tolist()]
        return EventBatch(ids, codes, self.values[rows, places], np.full(n, NO_TIME), index, np.zeros(n, np.int32))

    def whole(self, records: int) -> EventBatch:
        """All events of records that were not there before."""
        self.lives += 1
        return self.batch(np.repeat(np.arange(records), self.features), np.tile(np.arange(self.features), records))

    def live(self) -> dict[str, Any]:
        """Events a second: of live steps, of a full forward pass per event, alternating; and of the prefill before."""
        engine = self.engine
        self.lives += 1
        steps = min(2 * ROUNDS, self.features // 2)
        lengths = self.rng.integers(0, self.features - steps, self.records)
        rows = np.repeat(np.arange(self.records), lengths)
        history = self.batch(rows, np.concatenate([np.arange(n) for n in lengths]))
        prefill = len(rows) / timed(lambda: engine.handle(history, 0))
        everyone, live, full, profile = np.arange(self.records), [], [], Profile()
        for step in range(steps):
            batch = self.batch(everyone, lengths + step)
            with profile.watching():
                live.append(self.records / timed(lambda batch=batch: engine.handle(batch, 0)))  # type: ignore[misc]
            full.append(self.one_by_one(lengths + step))
        engine.finish()
        events = self.records * steps
        rates = {"full_forward": median(full[1:]), "steps": median(live[1:]), "steps_in_model": events / profile.model}
        return rates | {"prefill": prefill, "steps_profile": shares(profile)}

    def one_by_one(self, lengths: np.ndarray, count: int = 20) -> float:
        device = self.published.device
        codes, values = torch.from_numpy(self.orders).to(device), torch.from_numpy(self.values).float().to(device)

        def work() -> None:
            with torch.inference_mode():
                for r in range(count):
                    n = int(lengths[r]) + 1
                    float(self.published.log_prob(codes[r : r + 1, :n], values[r : r + 1, :n])[0, -1])

        return count / timed(work)

    def replay(self) -> dict[str, Any]:
        """Events a second of whole records."""
        rates, profile, events = [], Profile(), 0
        n = min(self.records, max(1, REPLAYED // self.features))
        for _ in range(ROUNDS):
            batch = self.whole(n)
            with profile.watching():
                rates.append(len(batch.features) / timed(lambda batch=batch: self.engine.handle(batch, 0)))  # type: ignore[misc]
            events += len(batch.features)
        rate = {"replay": median(rates), "replay_in_model": events / profile.model}
        return rate | {"replay_profile": shares(profile)}


def shares(profile: Profile) -> dict[str, float]:
    total = sum(profile.seconds.values())
    return {stage: round(100 * s / total, 1) for stage, s in profile.seconds.items()}


def measure(case: Case) -> dict[str, Any]:
    world = World(case)
    row: dict[str, Any] = {
        "preset": case.preset,
        "features": case.features,
        "open_records": case.records,
        "precision": case.precision,
        "gaussians": case.gaussians,
        "compiled": world.model.kernel_library is not None,
        "device": case.device,
        "ceiling": ceiling_of(world.model),
    }
    row |= world.live() | world.replay()
    row["steps_vs_full_forward"] = round(row["steps"] / row["full_forward"], 1)
    for kind in ("steps", "steps_in_model", "replay", "replay_in_model", "prefill"):
        row[f"{kind}_vs_ceiling"] = round(row[kind] / row["ceiling"], 3)
    return {k: round(v) if isinstance(v, float) and v > 100 else v for k, v in row.items()}


def table(rows: list[dict[str, Any]]) -> str:
    head = [
        "preset",
        "features",
        "products",
        "Gaussians",
        "code",
        "ceiling /s",
        "full forward /s",
        "steps /s",
        "× full",
    ]
    head += ["% of ceiling (in model)", "prefill /s", "replay /s", "% of ceiling (in model)"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        kinds = ("steps", "replay")
        steps, replay = (
            f"{100 * r[f'{kind}_vs_ceiling']:.0f} ({100 * r[f'{kind}_in_model_vs_ceiling']:.0f})" for kind in kinds
        )
        cells = [r["preset"], r["features"], r["precision"], r["gaussians"] or "–", code(r), f"{r['ceiling']:,.0f}"]
        cells += [f"{r['full_forward']:,.0f}", f"{r['steps']:,.0f}", f"{r['steps_vs_full_forward']:.0f}", steps]
        cells += [f"{r['prefill']:,.0f}", f"{r['replay']:,.0f}", replay]
        lines.append("| " + " | ".join(str(c) for c in cells) + " |")
    return "\n".join(lines)


def code(row: dict[str, Any]) -> str:
    """What scores."""
    return "GPU" if row["device"] == "cuda" else "compiled" if row["compiled"] else "plain"


def stages(rows: list[dict[str, Any]]) -> str:
    """Where the time of steps and of replay goes, in percent."""
    names = list(dict.fromkeys(stage for r in rows for kind in ("steps", "replay") for stage in r[f"{kind}_profile"]))
    lines = ["| row | " + " | ".join(names) + " |", "|" + "---|" * (len(names) + 1)]
    for r in rows:
        guide = f", {r['gaussians']} Gaussians" if r["gaussians"] else ""
        title = f"{r['preset']} {r['features']}, {r['precision']}{guide}{'' if r['compiled'] else f', {code(r)}'}"
        for kind in ("steps", "replay"):
            cells = [f"{r[f'{kind}_profile'].get(name, 0):.0f}" for name in names]
            lines.append(f"| {title}: {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small row, to see that it runs")
    parser.add_argument("--rows", type=int, nargs="*", help="these rows only, by number from 0; nothing is written")
    arguments = parser.parse_args()
    gpu = torch.cuda.is_available()
    every = CASES + ON_GPU if gpu else CASES
    cases = [Case("tiny", 8, 256)] if arguments.quick else list(every)
    cases = cases if arguments.rows is None else [every[i] for i in arguments.rows]
    rows = []
    for case in cases:
        rows.append(measure(case))
        print(json.dumps(rows[-1]), flush=True)
    where = f"{describe_machine()}; {torch.cuda.get_device_name()}" if gpu else describe_machine()
    when = f"{where}, {format_today()}; medians of {ROUNDS} or more rounds, events a second."
    text = f"# Speed\n\n{when}\n\n{table(rows)}\n\nWhere the time goes, percent:\n\n{stages(rows)}\n"
    if arguments.quick or arguments.rows is not None:
        print("\n" + text)
    else:
        publish_results("speed", text, rows)


if __name__ == "__main__":
    main()
