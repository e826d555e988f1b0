"""What each part of the training recipe is worth: the default against variants of it, on the same tables and seeds.

    python -m benchmarks.ablation --tables cardio,vowels --seeds 0,1 --readings 200000

The tables of `benchmarks.tables` with their split; the Gaussians are fitted once for a table and seed, and every
variant trains from the same initial weights through the same batches on as many readings (steps times batch times
features), so that a busy machine changes nothing. The figure is −ln p of held-out normal records as in
`benchmarks.density`. What has been measured is kept line by line, and a run that was cut off goes on where it was; with
other code, measure --again.

`lags` is about the order of arrival: features come with delays of their own plus noise, as in a plant, the network is
trained on these orders, on random ones or on both, and is asked in either.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from benchmarks.command import ResultStore, add_again_option, run_benchmark, describe_machine, build_parser, publish_results
from benchmarks.density import ORDERS, encoded, halves, sources
from benchmarks.tables import markdown_head, markdown_row, preset_for, seeds_of
from deformer_stream.errors import ConfigError
from deformer_stream.model.deformer import DEformer
from trainer import gaussian_prior
from trainer.budget import TimeBudget
from trainer.data import DataOptions, PreparedTable, Split, prepare_table
from trainer.evaluate import evaluate_held_out
from trainer.fit import TrainingRun
from trainer.recipes import choose_gaussians, choose_recipe, model_config
from trainer.settings import TrainConfig

TABLES = "annthyroid,cardio,fault,pendigits,satellite,vowels"
DEFAULT = "default"
VARIANTS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "Muon": {"optimizer": "muon"},
    "half the learning rate": {"learning_rate": 1.5e-3},
    "twice the learning rate": {"learning_rate": 6e-3},
    "four times the learning rate": {"learning_rate": 1.2e-2},
    "no input noise": {"smoothing": 0.0},
    "input noise 0.005": {"smoothing": 0.005},
    "no input noise, Muon": {"smoothing": 0.0, "optimizer": "muon"},
    "early stopping": {"patience": 10},
    "weights not averaged": {"averaging": 1e-3},
    "no label hidden": {"forget": 0.0},
    "dropout 0.1": {"dropout": 0.1},
    "post-norm": {"norm": "post"},
    "no Gaussians": {"gaussians": 0},
}
LAGS = {"lags: both halves": 0.5, "lags: logged only": 1.0, "lags: random only": 0.0, "lags: nine tenths logged": 0.9}
"""Share of the samples in logged order."""


class Table:
    """A table and a seed, encoded, with its Gaussians."""

    def __init__(self, name: str, path: Path, seed: int, folder: Path) -> None:
        self.name, self.seed, self.folder = name, seed, folder
        train, held = halves(name, path, seed)
        for part, rows in (("train", train), ("held", held)):
            (folder / part).mkdir()
            pq.write_table(rows, folder / part / "rows.parquet")
        self.preset = preset_for(len(train))
        self.data = prepare_table([folder / "train" / "rows.parquet"], DataOptions(seed=seed), folder / "train")
        self.held = encoded(self.data, folder / "held" / "rows.parquet", folder / "held")
        began = time.process_time()
        self.guides = gaussian_prior.fit_priors(self.data, choose_gaussians(self.settings({})), seed)
        self.seconds = time.process_time() - began

    def settings(self, options: dict[str, Any]) -> TrainConfig:
        return TrainConfig(out=self.folder / "model", preset=self.preset, seed=self.seed, **options)

    def fit(self, data: PreparedTable, options: dict[str, Any], readings: int) -> TrainingRun:
        """A training run of so many readings that has not begun."""
        settings = self.settings(options)
        rows = len(data.select_rows(Split.TRAIN))
        recipe = replace(choose_recipe(settings, rows), epochs=max(1, round(readings / len(data.schema) / rows)))
        guides = None if options.get("gaussians") == 0 else self.guides
        torch.manual_seed(self.seed)
        model = DEformer(data.schema, replace(model_config(settings), gaussians=guides.num_components if guides else 0))
        if guides is not None:
            model.gaussians = guides.full
        return TrainingRun(data, model, recipe, self.seed, self.folder, TimeBudget(None), {}, guides)


def lagged(data: PreparedTable, seed: int) -> PreparedTable:
    """With an order of arrival: a delay for each feature, the same in all records, and noise of the same spread."""
    rng = np.random.default_rng([seed, 0x1A65])
    delay = np.random.default_rng([seed, 0x1A66]).random(len(data.schema)) * len(data.schema)
    arrival = delay + 2.0 * rng.standard_normal(data.values.shape)
    return replace(data, ranks=arrival.argsort(1).argsort(1).astype(np.int16))


def measure(table: Table, variant: str, readings: int) -> dict[str, Any]:
    """One variant on a table and seed: nats a held-out record in random orders, and in logged ones where there are."""
    logged = variant in LAGS
    data, held = (lagged(part, table.seed) for part in (table.data, table.held)) if logged else (table.data, table.held)
    options = {"arrival_share": LAGS[variant]} if logged else VARIANTS[variant]
    began = time.process_time()
    fit = table.fit(data, options, readings)
    fitted = fit.run()
    seconds = time.process_time() - began
    rows = np.arange(len(held.split))
    nats = {"random": evaluate_held_out(fitted.model, held, rows, ORDERS, table.seed).mean_nll}
    if logged:
        nats["logged"] = evaluate_held_out(fitted.model, held, rows, 1, table.seed, 1.0).mean_nll
    steps = {"steps": fitted.steps, "of": fit.steps, "gaussians": fitted.model.config.gaussians}
    return {"table": table.name, "seed": table.seed, "variant": variant, **nats, **steps, "seconds": round(seconds, 1)}


def complete(kept: ResultStore, names: list[str], seeds: list[int], variants: list[str], readings: int) -> None:
    """Measure what is asked for and not there yet."""
    for seed in seeds:
        for name, path in sources(",".join(names)).items():
            if left := [variant for variant in variants if not kept.find(table=name, seed=seed, variant=variant)]:
                with tempfile.TemporaryDirectory() as folder:
                    table = Table(name, path, seed, Path(folder))
                    for variant in left:
                        print(json.dumps(kept.add(measure(table, variant, readings))), flush=True)


def table_of(lines: list[dict[str, Any]], figure: str, baseline: str) -> str:
    """Nats of the baseline by table, mean over seeds, and what each variant adds to them; below nought is better."""
    nats = {(line["table"], line["seed"], line["variant"]): line[figure] for line in lines if figure in line}
    tables = list(dict.fromkeys(line["table"] for line in lines))
    variants = [v for v in dict.fromkeys(line["variant"] for line in lines) if v != baseline]
    text = markdown_head(["variant", *tables, "better"])
    pairs = {t: [s for table, s, v in nats if (table, v) == (t, baseline)] for t in tables}
    own = [np.mean([nats[t, s, baseline] for s in pairs[t]]) for t in tables if pairs[t]]
    text.append(markdown_row([f"{baseline}, nats", *(f"{mean:.2f}" for mean in own), ""]))
    for variant in variants:
        by_table = [
            [nats[t, s, variant] - nats[t, s, baseline] for s in pairs[t] if (t, s, variant) in nats] for t in tables
        ]
        gains = [gain for some in by_table for gain in some]
        if gains:
            cells = [f"{np.mean(some):+.2f}" if some else "" for some in by_table]
            text.append(markdown_row([variant, *cells, f"{sum(g < 0 for g in gains)} of {len(gains)}"]))
    return "\n".join(text)


def run(arguments: argparse.Namespace) -> None:
    seeds, names = seeds_of(arguments.seeds), [name.strip() for name in arguments.tables.split(",")]
    variants = [v.strip() for v in arguments.variants.split(";")] if arguments.variants else [*VARIANTS, *LAGS]
    if unknown := [v for v in variants if v not in VARIANTS and v not in LAGS]:
        raise ConfigError(f"--variants {unknown[0]}: there are {'; '.join([*VARIANTS, *LAGS])}")
    kept = ResultStore("ablation", {"readings": arguments.readings, "machine": describe_machine()}, arguments.again)
    complete(kept, names, seeds, variants, arguments.readings)
    plain = [line for line in kept.lines if line["variant"] in VARIANTS]
    lags = [line for line in kept.lines if line["variant"] in LAGS]
    parts = [(plain, "random", DEFAULT, "Wide tables, random orders")]
    parts += [(lags, figure, "lags: both halves", f"With lags, {figure} orders") for figure in ("logged", "random")]
    blocks = [f"{title}:\n\n{table_of(some, figure, base)}" for some, figure, base, title in parts if some]
    text = (
        f"# Ablation\n\n{describe_machine()}; −ln p of a held-out normal record, nats, seeds {arguments.seeds}, "
        f"{arguments.readings:,} readings for each training run; variants as differences from the first row.\n\n"
    )
    text += "\n\n".join(blocks) + "\n"
    publish_results("ablation", text)


def main() -> None:
    options = build_parser(__doc__, "", seeds="0,1")
    options.add_argument("--tables", default=TABLES, help=f"names with commas between; {TABLES} by default")
    options.add_argument("--readings", type=int, default=300_000, help="of each training run; 300000 by default")
    options.add_argument("--variants", default="", help="names with semicolons between; all by default")
    run_benchmark("ablation", run, add_again_option(options))


if __name__ == "__main__":
    main()
