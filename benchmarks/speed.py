"""Measure how fast readings are scored, as ratios within one run.

    python -m benchmarks.speed            (make bench)
    python -m benchmarks.speed --gpu

Three loads go through the engine. In `steps`, each of many open records of mixed lengths gets one new reading. In
`prefill`, all earlier readings of those records are scored at once. In `replay`, complete records are scored. Each load
is measured with and without compiled kernels, in both precisions, with and without a Gaussian prior.

Rates are compared with two others of the same run. The baseline scores each new reading as the published code would, by
one forward pass of the same weights over all readings so far, batch size 1, in float32. The ceiling is the rate of the
layers' matrix products alone, in the precision of the row, for two tokens per reading. The columns "in model" count
only the time in `ModelVersion.score_readings`, without the engine's bookkeeping. As in a consumer that has run for a
while, the pages of the KV cache have been in use before.

With --gpu, the cases are measured on a GPU, with its own baseline and ceiling. Then a case with different numbers of
open records, which is the size of a step's batch, is measured on the GPU and on the CPU of the same machine. The time
within a captured CUDA graph cannot be divided into stages.
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

from benchmarks.command import describe_machine, format_today, publish_results
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.engine.engine import Engine, Limits
from deformer_stream.engine.events import NO_TIME, EventBatch
from deformer_stream.engine.reading_log import ReadingLog
from deformer_stream.engine.scoring import ModelVersion
from deformer_stream.kernels.cpu import CpuKernels
from deformer_stream.kernels.cuda_graphs import CudaGraphs
from deformer_stream.kernels.library import load_library
from deformer_stream.kernels.torch_kv_cache import TorchKVCache
from deformer_stream.model.config import PRESETS
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.distributions import Conditional, Head
from deformer_stream.model.schema import Feature, Schema

ROUNDS = 5
CPU = torch.device("cpu")
REPLAY_READINGS = 20_000
"""The approximate number of readings of a round of replay."""


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table.

    Attributes:
        preset: The preset of the model.
        features: The number of features.
        records: The number of open records.
        precision: The precision of the layers' matrix products.
        gaussians: Components of the Gaussian prior, 0 for none.
        compiled: Whether the compiled kernels may be used.
        device: The device, as PyTorch names it.
    """

    preset: str
    features: int
    records: int
    precision: str = "bfloat16"
    gaussians: int = 0
    compiled: bool = True
    device: str = "cpu"

    @property
    def config(self) -> ModelConfig:
        """Return the hyperparameters of the model."""
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
GPU_CASES = (
    *(replace(case, compiled=False, device="cuda") for case in CASES if case.compiled),
    Case("base", 40, 4096, compiled=False, device="cuda"),
    Case("paper", 40, 512, "float32", compiled=False, device="cuda"),
    *(
        Case(preset, 40, records, gaussians=16, compiled=device == "cpu", device=device)
        for preset in ("small", "base")
        for records in (1, 16, 128, 1024)
        for device in ("cuda", "cpu")
    ),
)


def measure_seconds(work: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_product_rate(d: int, dtype: torch.dtype, device: torch.device = CPU) -> float:
    """Return the floating-point operations per second of a layer's matrix products, with rows enough for the device.

    Args:
        d: The width of a token.
        dtype: The type of the factors.
        device: Where to multiply.
    """
    rows = 2048 if device.type == "cpu" else 65_536
    x, up, down = (torch.randn(shape, device=device).to(dtype) for shape in ((rows, d), (4 * d, d), (d, 4 * d)))

    def work() -> None:
        for _ in range(10):
            torch.nn.functional.linear(torch.nn.functional.linear(x, up), down)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    return 10 * 2 * 2 * rows * d * 4 * d / median(measure_seconds(work) for _ in range(ROUNDS))


def measure_ceiling(model: DEformer, rebuilt: int = 0) -> float:
    """Return how many readings per second the layers' matrix products alone would allow.

    Args:
        model: The model.
        rebuilt: Earlier readings that are computed again for each new one.
    """
    dtype = torch.bfloat16 if model.config.precision == "bfloat16" else torch.float32
    flops = count_flops_per_reading(model) + rebuilt * count_flops_per_rebuilt_reading(model)
    return measure_product_rate(model.config.d_model, dtype, model.device) / flops


def count_flops_per_reading(model: DEformer) -> float:
    """Return the operations of one reading: two tokens through every matrix, with a multiplication and an addition."""
    weights = sum(p.numel() for block in model.blocks for p in block.parameters() if p.dim() == 2)
    return 2.0 * 2.0 * weights


def count_flops_per_rebuilt_reading(model: DEformer) -> float:
    """Return the operations to compute an earlier reading again: one token; of the last layer only key and value."""
    *layers, last = model.blocks
    weights = sum(p.numel() for block in layers for p in block.parameters() if p.dim() == 2)
    return 2.0 * (weights + 2 / 3 * last.qkv.weight.numel())  # type: ignore[union-attr, operator]


class Profile:
    """The seconds of each stage of scoring, without those of other stages that it calls.

    Attributes:
        seconds: The seconds by stage.
        model_seconds: The seconds in the model, all its stages together.
    """

    # The names of the stages are keys in benchmarks/results.
    STAGES = (
        (Engine, "_ingest", "accept"),
        (ModelVersion, "_update_statistics", "statistics"),
        (ReadingLog, "gather", "readings"),
        (ReadingLog, "gather_padded", "readings"),
        (TorchKVCache, "locate_tokens", "cache"),
        (TorchKVCache, "allocate_tokens", "cache"),
        (TorchKVCache, "gather_pages", "cache"),
        (TorchKVCache, "write", "cache"),
        (CudaGraphs, "__call__", "network"),
        (DEformer, "compute_prior", "prior"),
        (DEformer, "embed_query_tokens", "tokens"),
        (DEformer, "embed_observation_tokens", "tokens"),
        (CpuKernels, "score", "network"),
        (DEformer, "forward_cached", "layers"),
        (Head, "forward", "head"),
        (Conditional, "compute_surprisal", "score terms"),
        (Conditional, "compute_score_terms", "score terms"),
        (ModelVersion, "score_readings", "rest of scoring"),
        (Engine, "handle", "rest of the engine"),
    )

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.model_seconds = 0.0
        self._inner_seconds: list[float] = []

    def _measured(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        """Return a function that does the same as another one and adds its time to a stage."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._inner_seconds.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                own_seconds = seconds - self._inner_seconds.pop()
                self.seconds[stage] = self.seconds.get(stage, 0.0) + own_seconds
                self.model_seconds += seconds if stage == "rest of scoring" else 0.0
                if self._inner_seconds:
                    self._inner_seconds[-1] += seconds

        return call

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure all stages within a `with` block."""
        with ExitStack() as stack:
            for owner, name, stage in self.STAGES:
                stack.enter_context(patch.object(owner, name, self._measured(getattr(owner, name), stage)))
            yield


class World:
    """An engine with open records of mixed lengths, and the events that come next."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.rng = np.random.default_rng(0)
        features, records = case.features, case.records
        schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(features)))
        self.model = DEformer(schema, case.config).to(case.device).eval()
        self.published = DEformer(schema, replace(case.config, precision="float32")).to(case.device).eval()
        self.published.load_state_dict(self.model.state_dict())
        if case.compiled:
            self.model.kernel_library = load_library(case.precision == "bfloat16")
        # No record alerts, because explanations are not part of this measurement.
        self.calibration = Calibration.from_statistics(1e6 + np.arange(100.0), "random")
        self.features, self.records = features, records
        self.orders = np.argsort(self.rng.random((records, features)), 1)
        self.values = self.rng.normal(size=(records, features))
        self.num_generations = 0
        self.engine = Engine(self.model, self.calibration, "benchmark", 0.05, Limits(cache_bytes=4 * 2**30))
        self.engine.handle(self.complete_records(records), 0)  # touches the pages of the cache

    def batch(self, rows: np.ndarray, places: np.ndarray) -> EventBatch:
        """Return the readings at these places of these records, (M,) each, as events."""
        n = len(rows)
        index = np.arange(n, dtype=np.int32)
        codes = self.orders[rows, places].astype(np.int32)
        ids = [f"{self.num_generations}-{r}" for r in rows.tolist()]
        return EventBatch(ids, codes, self.values[rows, places], np.full(n, NO_TIME), index, np.zeros(n, np.int32))

    def complete_records(self, records: int) -> EventBatch:
        """Return all events of new records."""
        self.num_generations += 1
        return self.batch(np.repeat(np.arange(records), self.features), np.tile(np.arange(self.features), records))

    def measure_steps(self) -> dict[str, Any]:
        """Return readings per second of steps and of the baseline, measured alternately, and of the prefill before."""
        engine = self.engine
        self.num_generations += 1
        steps = min(2 * ROUNDS, self.features // 2)
        lengths = self.rng.integers(0, self.features - steps, self.records)
        rows = np.repeat(np.arange(self.records), lengths)
        history = self.batch(rows, np.concatenate([np.arange(n) for n in lengths]))
        prefill = len(rows) / measure_seconds(lambda: engine.handle(history, 0))
        everyone, live, full, profile = np.arange(self.records), [], [], Profile()
        for step in range(steps):
            batch = self.batch(everyone, lengths + step)
            with profile.measuring():
                live.append(self.records / measure_seconds(lambda batch=batch: engine.handle(batch, 0)))  # type: ignore[misc]
            full.append(self.measure_full_forward(lengths + step))
        engine.finish()
        events = self.records * steps
        rates = {
            "full_forward": median(full[1:]),
            "steps": median(live[1:]),
            "steps_in_model": events / profile.model_seconds,
        }
        return rates | {"prefill": prefill, "steps_profile": compute_shares(profile)}

    def measure_full_forward(self, lengths: np.ndarray, count: int = 20) -> float:
        """Return readings per second of the baseline, which computes a forward pass for each reading.

        Args:
            lengths: (records,) how many readings each record has before the one that is scored.
            count: How many records are scored.
        """
        device, count = self.published.device, min(count, self.records)
        codes, values = torch.from_numpy(self.orders).to(device), torch.from_numpy(self.values).float().to(device)

        def work() -> None:
            with torch.inference_mode():
                for r in range(count):
                    n = int(lengths[r]) + 1
                    float(self.published.log_prob(codes[r : r + 1, :n], values[r : r + 1, :n])[0, -1])

        return count / measure_seconds(work)

    def measure_replay(self) -> dict[str, Any]:
        """Return readings per second of complete records."""
        rates, profile, events = [], Profile(), 0
        n = min(self.records, max(1, REPLAY_READINGS // self.features))
        for _ in range(ROUNDS):
            batch = self.complete_records(n)
            with profile.measuring():
                rates.append(len(batch.features) / measure_seconds(lambda batch=batch: self.engine.handle(batch, 0)))  # type: ignore[misc]
            events += len(batch.features)
        rate = {"replay": median(rates), "replay_in_model": events / profile.model_seconds}
        return rate | {"replay_profile": compute_shares(profile)}


def compute_shares(profile: Profile) -> dict[str, float]:
    """Return the percentage of the time of each stage."""
    total = sum(profile.seconds.values())
    return {stage: round(100 * s / total, 1) for stage, s in profile.seconds.items()}


def measure(case: Case) -> dict[str, Any]:
    """Measure one case and return its row, whose keys are those of benchmarks/results/speed.jsonl."""
    world = World(case)
    row: dict[str, Any] = {
        "preset": case.preset,
        "features": case.features,
        "open_records": case.records,
        "precision": case.precision,
        "gaussians": case.gaussians,
        "compiled": world.model.kernel_library is not None,
        "device": case.device,
        "ceiling": measure_ceiling(world.model),
    }
    row |= world.measure_steps() | world.measure_replay()
    row["steps_vs_full_forward"] = round(row["steps"] / row["full_forward"], 1)
    for kind in ("steps", "steps_in_model", "replay", "replay_in_model", "prefill"):
        row[f"{kind}_vs_ceiling"] = round(row[kind] / row["ceiling"], 3)
    return {k: round(v) if isinstance(v, float) and v > 100 else v for k, v in row.items()}


def format_table(rows: list[dict[str, Any]]) -> str:
    """Return the rates as a Markdown table."""
    head = [
        "preset",
        "features",
        "open records",
        "precision",
        "prior components",
        "scored by",
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
        cells = [
            r["preset"],
            r["features"],
            r["open_records"],
            r["precision"],
            r["gaussians"] or "–",
            name_backend(r),
            f"{r['ceiling']:,.0f}",
        ]
        cells += [f"{r['full_forward']:,.0f}", f"{r['steps']:,.0f}", f"{r['steps_vs_full_forward']:.0f}", steps]
        cells += [f"{r['prefill']:,.0f}", f"{r['replay']:,.0f}", replay]
        lines.append("| " + " | ".join(str(c) for c in cells) + " |")
    return "\n".join(lines)


def name_backend(row: dict[str, Any]) -> str:
    """Return what scores: a GPU, the compiled kernels, or PyTorch on the CPU."""
    if row["device"] == "cuda":
        return "GPU"
    return "kernels" if row["compiled"] else "PyTorch"


def format_stages(rows: list[dict[str, Any]]) -> str:
    """Return the percentage of each stage of steps and of replay as a Markdown table."""
    names = list(dict.fromkeys(stage for r in rows for kind in ("steps", "replay") for stage in r[f"{kind}_profile"]))
    lines = ["| row | " + " | ".join(names) + " |", "|" + "---|" * (len(names) + 1)]
    for r in rows:
        prior = f", {r['gaussians']} Gaussians" if r["gaussians"] else ""
        backend = "" if r["compiled"] else f", {name_backend(r)}"
        title = f"{r['preset']} {r['features']}, {r['precision']}{prior}{backend}"
        for kind in ("steps", "replay"):
            cells = [f"{r[f'{kind}_profile'].get(name, 0):.0f}" for name in names]
            lines.append(f"| {title}: {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Measure one small case only, as a test of this program.")
    parser.add_argument(
        "--rows", type=int, nargs="*", help="Measure only these rows, numbered from 0, and write no results."
    )
    parser.add_argument("--gpu", action="store_true", help="Measure the cases on a GPU.")
    arguments = parser.parse_args()
    every = GPU_CASES if arguments.gpu else CASES
    cases = [Case("tiny", 8, 256)] if arguments.quick else list(every)
    cases = cases if arguments.rows is None else [every[i] for i in arguments.rows]
    rows = []
    for case in cases:
        rows.append(measure(case))
        print(json.dumps(rows[-1]), flush=True)
    where = f"{describe_machine()}; {torch.cuda.get_device_name()}" if arguments.gpu else describe_machine()
    when = f"{where}, {format_today()}. Readings per second, medians of at least {ROUNDS} rounds."
    stages = f"Percentage of time in each stage:\n\n{format_stages(rows)}"
    text = f"# Speed of scoring\n\n{when}\n\n{format_table(rows)}\n\n{stages}\n"
    if arguments.quick or arguments.rows is not None:
        print("\n" + text)
    else:
        publish_results("speed_gpu" if arguments.gpu else "speed", text, rows)


if __name__ == "__main__":
    main()
