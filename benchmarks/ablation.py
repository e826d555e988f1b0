"""Contribution of each part of the training recipe: variants of the default recipe on the same tables and seeds.

    python -m benchmarks.ablation --tables cardio,vowels --seeds 0,1 --readings 200000

The tables and their split are those of `benchmarks.tables`. The Gaussian prior is fitted once for each table and seed.
Every variant starts from the same weights and trains on the same batches with the same number of readings (steps times
batch size times features), so the load of the machine has no influence. The figure is −ln p of held-out normal records
as in `benchmarks.density`; smaller is better. Measurements are stored one by one, and an interrupted run continues; use
--again after code changes.

The variants `lags` are about the order of arrival. Each feature has a delay of its own plus noise, as in a plant. The
network is trained on such logged orders, on random ones, or on both, and evaluated in either.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from benchmarks.command import (
    ResultStore,
    add_again_option,
    build_parser,
    describe_machine,
    publish_results,
    run_benchmark,
)
from benchmarks.density import NUM_ORDERS, encode_held_out, find_sources, split_normal_rows
from benchmarks.tables import choose_preset, format_markdown_header, format_markdown_row, parse_seeds
from deformer_stream.errors import ConfigError
from deformer_stream.model.deformer import DEformer
from trainer import gaussian_prior
from trainer.budget import TimeBudget
from trainer.data import DataOptions, PreparedTable, Split
from trainer.evaluate import evaluate_held_out
from trainer.fit import TrainingRun
from trainer.gaussian_prior import CrossFittedPriors
from trainer.prepare import prepare_table
from trainer.recipes import choose_gaussians, choose_recipe, model_config
from trainer.settings import TrainConfig

DEFAULT_TABLES = "annthyroid,cardio,fault,pendigits,satellite,vowels"
DEFAULT_VARIANT = "default"
OPTIONS_BY_VARIANT: dict[str, dict[str, Any]] = {
    DEFAULT_VARIANT: {},
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
LOGGED_SHARE_BY_VARIANT = {
    "lags: both halves": 0.5,
    "lags: logged only": 1.0,
    "lags: random only": 0.0,
    "lags: nine tenths logged": 0.9,
}
"""Share of the training samples in logged order, by variant."""


class TableCase:
    """One table with one seed, encoded for training, with its fitted Gaussian prior.

    Attributes:
        name: Name of the table.
        seed: Seed of split, training and orders.
        folder: Where encoded values and models are stored.
        preset: Size of the network.
        data: The training and validation records.
        held_out: The held-out normal records.
    """

    def __init__(self, name: str, path: Path, seed: int, folder: Path) -> None:
        self.name, self.seed, self.folder = name, seed, folder
        train_rows, held_out_rows = split_normal_rows(name, path, seed)
        for part, rows in (("train", train_rows), ("held", held_out_rows)):
            (folder / part).mkdir()
            pq.write_table(rows, folder / part / "rows.parquet")
        self.preset = choose_preset(len(train_rows))
        self.data = prepare_table([folder / "train" / "rows.parquet"], DataOptions(seed=seed), folder / "train")
        self.held_out = encode_held_out(self.data, folder / "held" / "rows.parquet", folder / "held")

    @cached_property
    def priors(self) -> CrossFittedPriors | None:
        """The Gaussian priors, fitted once for all variants."""
        return gaussian_prior.fit_priors(self.data, choose_gaussians(self.make_config({})), self.seed)

    def make_config(self, options: dict[str, Any]) -> TrainConfig:
        """Return the training configuration with these options."""
        return TrainConfig(out=self.folder / "model", preset=self.preset, seed=self.seed, **options)

    def create_run(self, data: PreparedTable, options: dict[str, Any], num_readings: int) -> TrainingRun:
        """Return a training run that has not been started.

        Args:
            data: The records to train on.
            options: Training options that differ from the default recipe.
            num_readings: Number of readings after which the run ends.
        """
        config = self.make_config(options)
        num_rows = len(data.select_rows(Split.TRAIN))
        epochs = max(1, round(num_readings / len(data.schema) / num_rows))
        recipe = replace(choose_recipe(config, num_rows), epochs=epochs)
        priors = None if options.get("gaussians") == 0 else self.priors
        torch.manual_seed(self.seed)
        num_components = priors.num_components if priors else 0
        model = DEformer(data.schema, replace(model_config(config), gaussians=num_components))
        if priors is not None:
            model.gaussians = priors.full
        return TrainingRun(data, model, recipe, self.seed, self.folder, TimeBudget(None), {}, priors)


def add_lagged_orders(data: PreparedTable, seed: int) -> PreparedTable:
    """Return the records with orders of arrival.

    The arrival time of a reading is its feature's delay, equal in all records, plus noise with a similar spread.
    """
    rng = np.random.default_rng([seed, 0x1A65])
    delays = np.random.default_rng([seed, 0x1A66]).random(len(data.schema)) * len(data.schema)
    arrivals = delays + 2.0 * rng.standard_normal(data.values.shape)
    return replace(data, arrival_ranks=arrivals.argsort(1).argsort(1).astype(np.int16))


def measure_variant(case: TableCase, variant: str, num_readings: int) -> dict[str, Any]:
    """Train one variant and return its JSON line.

    The line holds −ln p of a held-out record in nats, in random orders, and in logged orders for variants with lags.
    """
    has_lags = variant in LOGGED_SHARE_BY_VARIANT
    data, held_out = case.data, case.held_out
    options = {"arrival_share": LOGGED_SHARE_BY_VARIANT[variant]} if has_lags else OPTIONS_BY_VARIANT[variant]
    if has_lags:
        data, held_out = (add_lagged_orders(part, case.seed) for part in (data, held_out))
    start = time.process_time()
    training_run = case.create_run(data, options, num_readings)
    result = training_run.run()
    seconds = time.process_time() - start
    rows = np.arange(len(held_out.split))
    nats = {"random": evaluate_held_out(result.model, held_out, rows, NUM_ORDERS, case.seed).mean_nll}
    if has_lags:
        nats["logged"] = evaluate_held_out(result.model, held_out, rows, 1, case.seed, 1.0).mean_nll
    return {
        "table": case.name,
        "seed": case.seed,
        "variant": variant,
        **nats,
        "steps": result.steps,
        "of": training_run.steps,
        "gaussians": result.model.config.gaussians,
        "seconds": round(seconds, 1),
    }


def measure_missing(
    store: ResultStore, names: list[str], seeds: list[int], variants: list[str], num_readings: int
) -> None:
    """Measure the requested tables, seeds and variants that are not stored yet."""
    for seed in seeds:
        for name, path in find_sources(",".join(names)).items():
            missing = [variant for variant in variants if not store.find(table=name, seed=seed, variant=variant)]
            if missing:
                with tempfile.TemporaryDirectory() as folder:
                    case = TableCase(name, path, seed, Path(folder))
                    for variant in missing:
                        print(json.dumps(store.add(measure_variant(case, variant, num_readings))), flush=True)


def format_differences(lines: list[dict[str, Any]], metric: str, baseline: str) -> str:
    """Return a Markdown table of differences between variants and a baseline, negative is better.

    The first row has the baseline's −ln p for each table, as a mean over seeds. Each further row has a variant's mean
    difference over the seeds that both have, and the number of pairs in which the variant is better.

    Args:
        lines: The JSON lines.
        metric: The key to compare, "random" or "logged".
        baseline: Name of the baseline variant.
    """
    nats = {(line["table"], line["seed"], line["variant"]): line[metric] for line in lines if metric in line}
    tables = list(dict.fromkeys(line["table"] for line in lines))
    variants = [v for v in dict.fromkeys(line["variant"] for line in lines) if v != baseline]
    baseline_seeds = {t: [seed for table, seed, v in nats if (table, v) == (t, baseline)] for t in tables}
    means = [np.mean([nats[t, seed, baseline] for seed in baseline_seeds[t]]) for t in tables if baseline_seeds[t]]
    text = format_markdown_header(["variant", *tables, "better in"])
    text.append(format_markdown_row([f"{baseline}, nats", *(f"{mean:.2f}" for mean in means), ""]))
    for variant in variants:
        differences_by_table = [
            [
                nats[table, seed, variant] - nats[table, seed, baseline]
                for seed in baseline_seeds[table]
                if (table, seed, variant) in nats
            ]
            for table in tables
        ]
        all_differences = [difference for differences in differences_by_table for difference in differences]
        if all_differences:
            cells = [f"{np.mean(differences):+.2f}" if differences else "" for differences in differences_by_table]
            num_better = sum(difference < 0 for difference in all_differences)
            text.append(format_markdown_row([variant, *cells, f"{num_better} of {len(all_differences)}"]))
    return "\n".join(text)


def run(arguments: argparse.Namespace) -> None:
    """Measure what is missing and publish the results."""
    seeds, names = parse_seeds(arguments.seeds), [name.strip() for name in arguments.tables.split(",")]
    known_variants = [*OPTIONS_BY_VARIANT, *LOGGED_SHARE_BY_VARIANT]
    variants = [v.strip() for v in arguments.variants.split(";")] if arguments.variants else known_variants
    if unknown := [v for v in variants if v not in known_variants]:
        available = "; ".join(known_variants)
        raise ConfigError(f"--variants {unknown[0]}: there is no such variant; available are {available}")
    setting = {"readings": arguments.readings, "machine": describe_machine()}
    store = ResultStore("ablation", setting, arguments.again)
    measure_missing(store, names, seeds, variants, arguments.readings)
    wide = [line for line in store.lines if line["variant"] in OPTIONS_BY_VARIANT]
    lags = [line for line in store.lines if line["variant"] in LOGGED_SHARE_BY_VARIANT]
    sections = [
        (wide, "random", DEFAULT_VARIANT, "Wide tables, random orders"),
        (lags, "logged", "lags: both halves", "With lags, logged orders"),
        (lags, "random", "lags: both halves", "With lags, random orders"),
    ]
    tables = [
        f"{title}:\n\n{format_differences(lines, metric, baseline)}"
        for lines, metric, baseline, title in sections
        if lines
    ]
    text = (
        f"# Ablation\n\n{describe_machine()}; −ln p of a held-out normal record in nats, smaller is better; seeds "
        f"{arguments.seeds}, {arguments.readings:,} readings for each training run. Variants are shown as differences "
        "from the first row.\n\n"
    )
    publish_results("ablation", text + "\n\n".join(tables) + "\n")


def main() -> None:
    """Run the program."""
    options = build_parser(__doc__, "", seeds="0,1")
    tables_help = f"comma-separated names of tables; {DEFAULT_TABLES} by default"
    options.add_argument("--tables", default=DEFAULT_TABLES, help=tables_help)
    readings_help = "number of readings of each training run; 300000 by default"
    options.add_argument("--readings", type=int, default=300_000, help=readings_help)
    options.add_argument("--variants", default="", help="semicolon-separated names of variants; all by default")
    run_benchmark("ablation", run, add_again_option(options))


if __name__ == "__main__":
    main()
