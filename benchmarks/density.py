"""Log-likelihood of held-out records, compared with Gaussian mixtures and with the paper's recipe in the same time.

    python -m benchmarks.density --tables cardio,pendigits --max-time 60s            (make bench-quality)

The tables and their split are those of `benchmarks.tables`: half of the normal rows trains, the other normal rows are
held out. A further table is SKAB's recording of normal operation, split in the same way. The figure is −ln p of a
held-out record in nats, a mean over ten random orders, in the units of the trained model; smaller is better. All
methods receive the same numbers, in which values of sensors with a known resolution (quantum) are spread uniformly
over one quantum. Results are stored table by table, and an interrupted run continues; use --again after code changes.

- ours: the default recipe.
- mixture: Gaussian mixtures with full covariances by scikit-learn, with 1 to 20 components chosen by BIC, fitted to our
  training and validation records. A label is a number spread over a unit cell, so that the density over a cell is
  comparable with a probability.
- paper: the recipe of the paper (`PAPER_OPTIONS`) in the same total time. The network is as wide and deep as ours,
  because the paper's 19 million parameters cannot be trained in a minute on a CPU. The learning rate suits that size.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.command import (
    ResultStore,
    add_again_option,
    build_parser,
    describe_machine,
    format_today,
    publish_results,
    run_benchmark,
)
from benchmarks.tables import (
    choose_preset,
    find_tables,
    format_markdown_header,
    format_markdown_row,
    get_tables_folder,
    parse_seeds,
    require_scikit_learn,
    split_table,
)
from trainer.data import PreparedTable, Split
from trainer.evaluate import evaluate_held_out
from trainer.job import TrainingOutput, train
from trainer.sampling import Noise, create_generator, read_rows
from trainer.settings import TrainConfig
from trainer.tables import index_records, open_training_input
from trainer.value_matrix import encode_table

Floats = NDArray[np.float64]

NUM_ORDERS = 10
"""Random orders over which the log-likelihood of a record is averaged."""

MAX_HELD_OUT = 2000
"""Largest number of held-out records that are scored."""

MAX_COMPONENTS = 20
"""Largest number of components among which BIC chooses."""

NUM_SPREADS = 5
"""Draws of the values within their quantum over which the mixture's log-likelihood is averaged."""

SKAB = "SKAB anomaly-free"
"""Name of the table that is SKAB's recording of normal operation."""

CONTENDERS = ("ours", "mixture", "paper")

PAPER_OPTIONS: dict[str, Any] = {
    "norm": "post",
    "activation": "relu",
    "memory": "all",
    "hidden": (128, 256),
    "mixtures": 150,
    "dropout": 0.2,
    "batch": 128,
    "optimizer": "adamw",
    "learning_rate": 1e-3,
    "weight_decay": 0.0,
    "smoothing": 0.0,
    "forget": 0.0,
    "averaging": 1e-3,  # so short that weights are practically not averaged
    "gaussians": 0,
}
"""Training options of the paper's recipe."""


def train_and_evaluate(
    rows: pa.Table, held_out_rows: pa.Table, seed: int, max_time: str, **options: Any
) -> tuple[TrainingOutput, float]:
    """Train a model and return it with the mean −ln p of the held-out records over random orders, in nats.

    Args:
        rows: A wide table of training records.
        held_out_rows: A wide table of other normal records.
        seed: Seed of the training run and of the orders.
        max_time: Largest duration of the run, for example "60s".
        options: Further options of the training run.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pq.write_table(rows, folder / "train.parquet")
        pq.write_table(held_out_rows, folder / "held.parquet")
        all_options = {"preset": choose_preset(len(rows)), "max_time": max_time, "seed": seed} | options
        config = TrainConfig(out=folder / "model", **all_options)  # type: ignore[arg-type]
        result = train([folder / "train.parquet"], config)
        data = encode_held_out(result.data, folder / "held.parquet", folder)
        all_rows = np.arange(len(data.split))
        return result, evaluate_held_out(result.model, data, all_rows, NUM_ORDERS, seed).mean_nll


def encode_held_out(data: PreparedTable, table: Path, folder: Path) -> PreparedTable:
    """Encode other records in the units of a prepared table, all of them as calibration records.

    Args:
        data: The prepared training table, whose schema determines the units.
        table: A Parquet file with the other records.
        folder: Where the encoded values are stored.
    """
    source = open_training_input([table], "wide", None, None)
    source.feature_columns = [name for name in source.schema.names if name in data.schema.code_by_name]
    index_records(source)
    values, _ = encode_table(source, data.schema, folder)
    return replace(data, values=values, arrival_ranks=None, split=np.full(len(values), Split.CALIBRATION, np.uint8))


def encode_training_rows(data: PreparedTable, table: Path, folder: Path) -> PreparedTable:
    """Encode the training table again with its original split, because the training run deletes its own copy."""
    return replace(encode_held_out(data, table, folder), split=data.split)


def spread_values(data: PreparedTable, rows: NDArray[np.int64], seed: int) -> Floats:
    """Return (N, F) values that are spread uniformly: numbers over their quantum, label codes over a unit cell.

    Args:
        data: The prepared table.
        rows: (N,) row numbers.
        seed: Seed of the random positions.
    """
    values, _ = read_rows(data, rows)
    spread, _ = Noise.from_schema(data.schema).apply(values, create_generator(seed, 0xDE45))
    cell_offsets = np.random.default_rng([seed, 0xDE45]).random(values.shape) - 0.5
    return spread.double().numpy() + np.where(data.schema.is_discrete, cell_offsets, 0.0)


def evaluate_mixture(data: PreparedTable, held_out: PreparedTable, seed: int) -> tuple[int, float]:
    """Fit Gaussian mixtures and evaluate the one with the best BIC; the tables must not have missing readings.

    Args:
        data: The training and validation records.
        held_out: The held-out records.
        seed: Seed of the fits and of the spread values.

    Returns:
        The number of components and the mean −ln p of the held-out records in nats.
    """
    from sklearn.mixture import GaussianMixture

    x = spread_values(data, np.flatnonzero(data.split != Split.CALIBRATION), seed)
    location, scale = x.mean(0), x.std(0) + 1e-9
    x = (x - location) / scale
    candidates = [k for k in range(1, MAX_COMPONENTS + 1) if k == 1 or k * x.shape[1] <= len(x)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fits that do not converge have a poor BIC and are not chosen
        mixtures = [GaussianMixture(k, random_state=seed).fit(x) for k in candidates]
    best = min(mixtures, key=lambda mixture: float(mixture.bic(x)))
    rows = np.arange(len(held_out.split))
    log_likelihoods = []
    for k in range(NUM_SPREADS):
        z = (spread_values(held_out, rows, seed + k) - location) / scale
        log_likelihoods.append(best.score_samples(z).mean() - np.log(scale).sum())
    return int(best.n_components), -float(np.mean(log_likelihoods))


def measure_table(train_rows: pa.Table, held_out_rows: pa.Table, seed: int, max_time: str) -> dict[str, Any]:
    """Return the mean −ln p of held-out records by each method, in nats, for one table and seed."""
    result, ours = train_and_evaluate(train_rows, held_out_rows, seed, max_time)
    paper_result, paper = train_and_evaluate(train_rows, held_out_rows, seed, max_time, **PAPER_OPTIONS)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as held_out_folder, tempfile.TemporaryDirectory() as train_folder:
        train_path, held_out_path = Path(held_out_folder) / "train.parquet", Path(held_out_folder) / "held.parquet"
        pq.write_table(train_rows, train_path)
        pq.write_table(held_out_rows, held_out_path)
        held_out = encode_held_out(result.data, held_out_path, Path(held_out_folder))
        training = encode_training_rows(result.data, train_path, Path(train_folder))
        num_components, mixture = evaluate_mixture(training, held_out, seed)
    return {
        "seed": seed,
        "ours": ours,
        "mixture": mixture,
        "paper": paper,
        "components": num_components,
        "gaussians": result.model.config.gaussians,
        "steps": result.training_result.steps,
        "paper_steps": paper_result.training_result.steps,
        "mixture_seconds": round(time.monotonic() - start, 1),
    }


def find_sources(requested: str) -> dict[str, Path]:
    """Return the files of the requested tables by name, including SKAB's if it is named or nothing is named."""
    names = [name.strip() for name in requested.split(",") if name.strip()]
    skab_path = get_tables_folder().parent / "skab" / "anomaly-free" / "anomaly-free.parquet"
    path_by_name = find_tables(",".join(name for name in names if name != SKAB)) if names != [SKAB] else {}
    return path_by_name | ({SKAB: skab_path} if not names or SKAB in names else {})


def split_normal_rows(name: str, path: Path, seed: int) -> tuple[pa.Table, pa.Table]:
    """Return the training records and the held-out normal records of a table, without the label."""
    table = pq.read_table(path)
    if name == SKAB:
        numeric = [column.name for column in table.schema if pa.types.is_floating(column.type)]
        table = table.select(numeric).append_column("label", pa.array(np.zeros(len(table), np.int64)))
    parts = split_table(table["label"].to_numpy(), seed)
    held_out = parts.test[~parts.is_anomaly]
    if len(held_out) > MAX_HELD_OUT:
        rng = np.random.default_rng([seed, 0xDE46])
        held_out = np.sort(rng.choice(held_out, MAX_HELD_OUT, replace=False))
    features = table.drop_columns(["label"])
    return features.take(parts.train), features.take(held_out)


def format_results(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the results; the smallest value of each row is bold."""
    text = format_markdown_header(
        [
            "table",
            "features",
            "training records",
            "ours",
            "Gaussian mixture (BIC)",
            "paper's recipe",
            "Gaussians in our prior",
            "components of the mixture",
        ]
    )
    for line in lines:
        means = [float(np.mean([run[contender] for run in line["runs"]])) for contender in CONTENDERS]
        figures = [f"**{mean:.2f}**" if mean == min(means) else f"{mean:.2f}" for mean in means]
        counts = [", ".join(str(run[key]) for run in line["runs"]) for key in ("gaussians", "components")]
        text.append(
            format_markdown_row([line["table"], str(line["features"]), str(line["records"]), *figures, *counts])
        )
    return "\n".join(text)


def count_wins(lines: list[dict[str, Any]], opponent: str) -> int:
    """Return the number of tables on which our mean −ln p over seeds is smaller than that of another method."""
    return sum(
        np.mean([run["ours"] for run in line["runs"]]) < np.mean([run[opponent] for run in line["runs"]])
        for line in lines
    )


def run(arguments: argparse.Namespace) -> None:
    """Measure all requested tables that are not stored yet, and publish the results."""
    require_scikit_learn()
    seeds = parse_seeds(arguments.seeds)
    setting = {"seeds": arguments.seeds, "max_time": arguments.max_time, "machine": describe_machine()}
    store, lines = ResultStore("density", setting, arguments.again), []
    for name, path in find_sources(arguments.tables).items():
        line = store.find(table=name)
        if line is None:
            parts = [split_normal_rows(name, path, seed) for seed in seeds]
            runs = [measure_table(*part, seed, arguments.max_time) for part, seed in zip(parts, seeds, strict=True)]
            train_rows = parts[0][0]
            description = {"table": name, "features": train_rows.num_columns, "records": len(train_rows)}
            line = store.add({**description, "date": format_today(), "runs": runs})
        lines.append(line)
        print(json.dumps(line), flush=True)
    dates = ", ".join(sorted({line["date"] for line in lines}))
    text = (
        f"# Density\n\n{describe_machine()}, {dates}; −ln p of a held-out normal record in nats, a mean over "
        f"{NUM_ORDERS} random orders and seeds {arguments.seeds}; smaller is better. Each training run takes at most "
        f"{arguments.max_time} including calibration.\n\n"
        f"{format_results(lines)}\n\nOurs is likelier than the Gaussian mixture on {count_wins(lines, 'mixture')} and "
        f"than the paper's recipe on {count_wins(lines, 'paper')} of {len(lines)} tables.\n"
    )
    publish_results("density", text)


def main() -> None:
    """Run the program."""
    options = build_parser(__doc__, f"all by default, including {SKAB!r}", seeds="0", max_time="60s")
    run_benchmark("density", run, add_again_option(options))


if __name__ == "__main__":
    main()
