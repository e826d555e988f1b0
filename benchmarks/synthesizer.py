"""Synthesizer attention and span corruption beside dot-product attention and training in any order.

    python -m benchmarks.synthesizer --tables cardio,pendigits,satellite --seeds 0,1,2,3,4 --readings 600000

Each of the two kinds of attention (`experiments.synthesizer`) is trained by three objectives
(`experiments.reading_orders`): any order; span corruption for the first half of the readings, then any order; and span
corruption only. All have the same number of readings (steps times batch size times features), preset `tiny`, and no
Gaussian prior, so that the attention has to learn all relations between features. In a step, all records of the batch
have the same order. The figure is −ln p of held-out normal records in random orders, which depend on the seed; smaller
is better. All held-out records have the same orders, unlike in `benchmarks.ablation`, whose tables and splits are used.
Adjacent features are adjacent in time on pendigits (points of a pen) and
in space on satellite (pixels), which gives spans a meaning.

Measurements are stored one by one, and an interrupted run continues; use --again after code changes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.ablation import TableCase
from benchmarks.command import (
    ResultStore,
    add_again_option,
    build_parser,
    describe_machine,
    format_today,
    publish_results,
    run_benchmark,
)
from benchmarks.density import NUM_ORDERS, find_sources
from benchmarks.tables import format_markdown_header, format_markdown_row, format_mean, parse_seeds
from deformer_stream.model.config import PRESETS
from deformer_stream.model.deformer import DEformer
from experiments.reading_orders import Objective, OrderedExamples, evaluate_any_order
from experiments.synthesizer import create_model
from trainer.budget import TimeBudget
from trainer.fit import Recipe, TrainingRun

DEFAULT_TABLES = "cardio,pendigits,satellite"
PRESET, BATCH, LEARNING_RATE = "tiny", 64, 3e-3

ATTENTIONS = ("dot product", "Synthesizer")
STAGES_BY_OBJECTIVE: dict[str, dict[Objective, float]] = {
    "any order": {"any order": 1.0},
    "span corruption, then any order": {"span corruption": 0.5, "any order": 0.5},
    "span corruption only": {"span corruption": 1.0},
}
"""The share of the readings that each stage of training gets, by objective."""

COMPARED = ("dot product", "any order")
"""The attention and the objective of the product, with which the others are compared."""


def measure_variant(case: TableCase, attention: str, objective: str, num_readings: int) -> dict[str, Any]:
    """Train one variant and return its JSON line, with −ln p of a held-out record in nats."""
    torch.manual_seed(case.seed)
    model = create_model(case.data.schema, PRESETS[PRESET], attention == "Synthesizer")
    start = time.process_time()
    for stage, share in STAGES_BY_OBJECTIVE[objective].items():
        model = train_stage(case, model, stage, share * num_readings)
    seconds = time.process_time() - start
    rows = np.arange(len(case.held_out.split))
    order_seeds = range(NUM_ORDERS * case.seed, NUM_ORDERS * (case.seed + 1))
    return {
        "table": case.name,
        "seed": case.seed,
        "attention": attention,
        "objective": objective,
        "nats": evaluate_any_order(model, case.held_out, rows, order_seeds),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(seconds, 1),
    }


def train_stage(case: TableCase, model: DEformer, objective: Objective, num_readings: float) -> DEformer:
    """Train a model by one objective, and return the averaged weights with the smallest validation loss."""
    examples = OrderedExamples(case.data, objective)
    epochs = max(1, round(num_readings / len(case.data.schema) / len(examples.train_indexes)))
    recipe = Recipe(batch=BATCH, learning_rate=LEARNING_RATE, epochs=epochs)
    model.requires_grad_(True)
    with tempfile.TemporaryDirectory() as folder:
        run = TrainingRun(examples, model, recipe, case.seed, Path(folder), TimeBudget(None), {})
        return run.run().model


def format_report(lines: list[dict[str, Any]], conditions: str) -> str:
    """Return the report in Markdown, with means and standard deviations over the seeds.

    The records and orders differ between seeds. So each variant is also compared with `COMPARED` under the same seed.
    """
    tables = list(dict.fromkeys(line["table"] for line in lines))
    text = ["# Synthesizer attention and span corruption\n", conditions, ""]
    titles = [title for table in tables for title in (table, "difference")]
    text += format_markdown_header(["attention", "objective", *titles, "seconds"])
    compared = {
        (line["table"], line["seed"]): line["nats"]
        for line in lines
        if (line["attention"], line["objective"]) == COMPARED
    }
    for objective in STAGES_BY_OBJECTIVE:
        for attention in ATTENTIONS:
            runs = [line for line in lines if (line["attention"], line["objective"]) == (attention, objective)]
            cells = []
            for table in tables:
                nats_by_seed = {line["seed"]: line["nats"] for line in runs if line["table"] == table}
                differences = [
                    nats - compared[table, seed] for seed, nats in nats_by_seed.items() if (table, seed) in compared
                ]
                has_difference = differences and (attention, objective) != COMPARED
                cells.append(format_mean(list(nats_by_seed.values()), 2) if nats_by_seed else "")
                cells.append(format_mean(differences, 2, "+") if has_difference else "")
            if runs:
                seconds = f"{np.mean([line['seconds'] for line in runs]):.0f}"
                text.append(format_markdown_row([attention, objective, *cells, seconds]))
    return "\n".join(text) + "\n"


def run(arguments: argparse.Namespace) -> None:
    """Measure what is missing and publish the results."""
    setting = {"readings": arguments.readings, "machine": describe_machine()}
    store = ResultStore("synthesizer", setting, arguments.again)
    variants = [(attention, objective) for objective in STAGES_BY_OBJECTIVE for attention in ATTENTIONS]
    for seed in parse_seeds(arguments.seeds):
        for name, path in find_sources(arguments.tables).items():
            missing = [
                (attention, objective)
                for attention, objective in variants
                if not store.find(table=name, seed=seed, attention=attention, objective=objective)
            ]
            if missing:
                with tempfile.TemporaryDirectory() as folder:
                    case = TableCase(name, path, seed, Path(folder))
                    for attention, objective in missing:
                        line = measure_variant(case, attention, objective, arguments.readings)
                        print(json.dumps(store.add(line)), flush=True)
    conditions = (
        f"{describe_machine()}, {format_today()}; −ln p of a held-out normal record in nats, smaller is better; means "
        f"and standard deviations over the seeds {arguments.seeds}, {arguments.readings:,} readings for each training."
    )
    publish_results("synthesizer", format_report(store.lines, conditions))


def main() -> None:
    """Run the program."""
    options = build_parser(__doc__, "", seeds="0,1,2,3,4")
    tables_help = f"comma-separated names of tables; {DEFAULT_TABLES} by default"
    options.add_argument("--tables", default=DEFAULT_TABLES, help=tables_help)
    readings_help = "number of readings of each training; 600000 by default"
    options.add_argument("--readings", type=int, default=600_000, help=readings_help)
    run_benchmark("synthesizer", run, add_again_option(options))


if __name__ == "__main__":
    main()
