"""Density of a pretrained model on tables that it was not trained on, compared with its guides.

    python -m experiments.pretrained --out pretrained --steps 10000
    python -m benchmarks.pretrained --run pretrained

The split, the units and the held-out rows are those of `benchmarks.density`: half of the normal rows are the rows of a
new machine, at most 2,000 of the other normal rows are held out, and readings of a sensor with a known quantum are
spread uniformly over it. All methods receive the same numbers.

- guide: the Gaussian prior of the product (`trainer.gaussian_prior.fit_priors`), at most 24 Gaussians chosen by
  cross-validation, fitted to all rows of the new machine.
- gaussian: a single Gaussian with a full covariance, fitted to the same rows.
- network: the pretrained model, with the guide, the single Gaussian, and at most 512 of the same rows as reference
  rows. At most 128 rows of the fold that the second fit of the guide leaves out are support rows.
- untrained: the same with the initial weights of the network.

Labels and cyclic values are no features of the guide. All methods score a label by its smoothed count in the rows of
the new machine, so they do not differ there. Each row has one random order.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
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
from benchmarks.density import MAX_HELD_OUT, encode_held_out, split_normal_rows, spread_values
from benchmarks.tables import (
    compute_ranking_metrics,
    find_tables,
    format_markdown_header,
    format_markdown_row,
    require_scikit_learn,
    split_table,
)
from experiments.pretrained.guide import Guide, fit_gaussian
from experiments.pretrained.network import Context, InContextDensity
from experiments.pretrained.training import Run, TrainingSettings, build_context, draw_orders
from trainer.data import PreparedTable, Split, create_data_options
from trainer.gaussian_prior import extract_mixture, fit_priors
from trainer.prepare import prepare_table
from trainer.settings import TrainConfig

Floats = NDArray[np.float64]

MAX_GAUSSIANS = 24
"""Largest number of Gaussians of the guide."""

MAX_GUIDE_ROWS = 30_000
"""Largest number of rows to which the guide is fitted; no development set has more."""

NUM_REFERENCES, NUM_SUPPORT = 512, 128
"""Largest numbers of reference rows and support rows."""

MAX_ANOMALIES = 200
"""Largest number of anomalies that are scored for the AUROC."""

ROWS_AT_ONCE = 8
"""Rows that the network scores together."""

SMOOTHING_SEED = 0x500F
"""Constant that is combined with the user's seed, so that this module's random numbers differ from others."""


@dataclass(frozen=True, slots=True)
class NewMachine:
    """The rows of a development set, in normalised units.

    Attributes:
        data: The prepared table with the rows of the new machine, all of them training rows.
        rows: (N, D) the rows of the new machine.
        held_out: (M, D) held-out normal rows.
        anomalies: (A, D) anomalies.
        quantum_widths: (D,) resolution of each feature, 0 if it has none.
        labels_nll: Mean −ln p of the labels of a held-out row, in nats, by smoothed counts.
    """

    data: PreparedTable
    rows: Floats
    held_out: Floats
    anomalies: Floats
    quantum_widths: Floats
    labels_nll: float


def read_new_machine(name: str, path: Path, folder: Path, seed: int, smoothing: float) -> NewMachine:
    """Read a development set.

    Args:
        name: Name of the set.
        path: Its file.
        folder: An empty folder for files.
        seed: Seed of the split and of the noise.
        smoothing: Standard deviation of Gaussian noise on all values, in normalised units.
    """
    train_rows, held_out_rows = split_normal_rows(name, path, seed)
    table = pq.read_table(path)
    parts = split_table(table["label"].to_numpy(), seed)
    rng = np.random.default_rng([seed, SMOOTHING_SEED])
    anomalies = parts.test[parts.is_anomaly]
    anomalies = np.sort(rng.choice(anomalies, min(MAX_ANOMALIES, len(anomalies)), replace=False))
    anomaly_rows = table.drop_columns(["label"]).take(pa.array(anomalies))
    for part, part_rows in (("train", train_rows), ("held_out", held_out_rows), ("anomalies", anomaly_rows)):
        pq.write_table(part_rows, folder / f"{part}.parquet")
    options = create_data_options(TrainConfig(out=folder / "model", seed=seed))
    data = prepare_table([folder / "train.parquet"], options, folder)
    data = replace(data, split=np.full(len(data.split), Split.TRAIN, np.uint8))
    is_linear, is_discrete = data.schema.is_linear, data.schema.is_discrete
    if smoothing:  # the guide is fitted to the table, so the noise must be in it
        values = np.array(data.values)
        values[:, is_linear] += smoothing * rng.normal(size=(len(values), int(is_linear.sum())))
        data = replace(data, values=values)

    def read(part: str, part_seed: int) -> tuple[Floats, Floats]:
        """Return the values of a part with noise, and the codes of its labels without noise."""
        if part == "train":
            encoded = data
        else:
            (folder / part).mkdir()
            encoded = encode_held_out(data, folder / f"{part}.parquet", folder / part)
        values = spread_values(encoded, np.arange(len(encoded.split)), part_seed)
        numbers = values[:, is_linear]
        if part != "train":
            numbers = numbers + smoothing * rng.normal(size=numbers.shape)
        return numbers, np.asarray(encoded.values[:, is_discrete])

    (rows, labels), (held_out, held_out_labels) = read("train", seed), read("held_out", seed + 1)
    labels_nll = 0.0
    for column, held_out_column in zip(labels.T, held_out_labels.T, strict=True):
        num_labels = int(max(column.max(), held_out_column.max())) + 1
        counts = np.bincount(column.astype(np.int64), minlength=num_labels) + 0.5
        labels_nll -= float(np.log(counts / counts.sum())[held_out_column.astype(np.int64)].mean())
    quanta = [0.0 if f.quantum is None else f.quantum / f.scale for f in data.schema.features]
    return NewMachine(data, rows, held_out, read("anomalies", seed + 2)[0], np.array(quanta)[is_linear], labels_nll)


def build_guide(machine: NewMachine, seed: int) -> Guide | None:
    """Fit the guide to the rows of a new machine; None if there is no feature for it."""
    data = machine.data
    priors = fit_priors(data, MAX_GAUSSIANS, seed, max_rows=MAX_GUIDE_ROWS)
    if priors is None:
        return None
    is_in_fold = priors.fold_by_row == 0
    return Guide(
        extract_mixture(priors.full),
        fit_gaussian(machine.rows),
        extract_mixture(priors.by_fold, 0),
        fit_gaussian(machine.rows[~is_in_fold]),
        is_in_fold,
    )


@torch.no_grad()
def score(network: InContextDensity, context: Context, rows: Floats, seed: int) -> Floats:
    """Return −ln p of rows (M, D) in nats, (M,), each in one random order.

    Args:
        network: The network.
        context: The new machine.
        rows: Rows to score.
        seed: Seed of the orders.
    """
    generator = torch.Generator().manual_seed(seed)
    support_order = draw_orders(len(context.support), rows.shape[1], generator)
    prepared = network.prepare(context, support_order)
    parts = []
    for part in torch.as_tensor(rows, dtype=torch.float32).split(ROWS_AT_ONCE):
        log_density, _ = network.score(prepared, part, draw_orders(len(part), rows.shape[1], generator))
        parts.append(-log_density.double().sum(1).numpy())
    return np.concatenate(parts)


def measure(
    network: InContextDensity,
    untrained: InContextDensity,
    name: str,
    path: Path,
    seed: int,
    smoothing: float,
    max_rows: int,
) -> dict[str, Any]:
    """Return the results of one development set as a JSON line.

    Args:
        network: The trained network.
        untrained: A network with initial weights.
        name: Name of the set.
        path: Its file.
        seed: Seed of split, noise and orders.
        smoothing: Standard deviation of Gaussian noise on all values, in normalised units.
        max_rows: Largest number of held-out rows that are scored.
    """
    with tempfile.TemporaryDirectory() as folder:
        machine = read_new_machine(name, path, Path(folder), seed, smoothing)
        line: dict[str, Any] = {"table": name, "features": machine.rows.shape[1], "rows": len(machine.rows)}
        start = time.process_time()
        guide = build_guide(machine, seed)
        line["guide_seconds"] = time.process_time() - start
    line["labels_nll"] = machine.labels_nll
    if guide is None:
        return line
    start = time.process_time()
    rng = np.random.default_rng([seed, SMOOTHING_SEED])
    context = build_context(machine.rows, machine.quantum_widths, guide, NUM_REFERENCES, NUM_SUPPORT, rng)
    score(network, context, machine.held_out[:1], seed)
    line["first_score_seconds"] = time.process_time() - start
    held_out = machine.held_out[np.random.default_rng(seed).permutation(len(machine.held_out))[:max_rows]]
    rows = np.concatenate([held_out, machine.anomalies])
    start = time.process_time()
    scores = {"network": score(network, context, rows, seed)}
    line["row_seconds"] = (time.process_time() - start) / len(rows)
    scores["guide"] = guide.mixture.compute_neg_log_density(rows)
    scores["gaussian"] = guide.gaussian.compute_neg_log_density(rows)
    is_anomaly = np.arange(len(rows)) >= len(held_out)
    untrained_scores = score(untrained, context, held_out, seed)
    line["untrained"] = float(untrained_scores.mean())
    differences = untrained_scores - scores["network"][: len(held_out)]
    line["training_gain_error"] = float(differences.std() / np.sqrt(len(differences)))
    for method, values in scores.items():
        line[method] = float(values[~is_anomaly].mean())
        line[f"{method}_median"] = float(np.median(values[~is_anomaly]))
        line[f"{method}_auroc"] = compute_ranking_metrics(values, is_anomaly)["auroc"]
    gains = (scores["guide"] - scores["network"])[~is_anomaly]
    line["gain"], line["gain_error"] = float(gains.mean()), float(gains.std() / np.sqrt(len(gains)))
    return line | {"scored": len(held_out), "gaussians": len(guide.mixture.log_weights)}


def format_results(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the results; the smaller value of guide and network is bold."""
    titles = ["table", "features", "rows", "scored", "Gaussian", "guide", "untrained", "network"]
    titles += [
        "guide − network",
        "AUROC guide",
        "AUROC network",
        "s to the guide",
        "s to the first score",
        "ms per row",
    ]
    text = format_markdown_header(titles)
    for line in lines:
        cells = [line["table"], str(line["features"]), str(line["rows"])]
        if "network" in line:
            figures = {method: f"{line[method]:.2f}" for method in ("gaussian", "guide", "untrained", "network")}
            best = min(("guide", "network"), key=lambda method: line[method])
            figures[best] = f"**{figures[best]}**"
            cells += [str(line["scored"]), *figures.values(), f"{line['gain']:.2f} ± {line['gain_error']:.2f}"]
            cells += [f"{line['guide_auroc']:.3f}", f"{line['network_auroc']:.3f}", f"{line['guide_seconds']:.1f}"]
            cells += [f"{line['first_score_seconds']:.2f}", f"{1000 * line['row_seconds']:.0f}"]
        text.append(format_markdown_row(cells + [""] * (len(titles) - len(cells))))
    return "\n".join(text)


def run(arguments: argparse.Namespace) -> None:
    """Measure all requested tables that are not stored yet, and publish the results."""
    require_scikit_learn()
    torch.set_num_threads(1)
    stored = Run(TrainingSettings(), arguments.run)
    untrained = stored.get_averaged_network()
    stored.restore()
    network = stored.get_averaged_network()
    seed, smoothing, max_rows = int(arguments.seeds), arguments.smoothing, arguments.rows
    setting = {"steps": stored.step, "seed": seed, "smoothing": smoothing, "max_rows": max_rows}
    name = "pretrained" if not smoothing else "pretrained-smoothed"
    store, lines = ResultStore(name, setting, arguments.again), []
    for table, path in find_tables(arguments.tables).items():
        line = store.find(table=table)
        if line is None:
            result = measure(network, untrained, table, path, seed, smoothing, max_rows)
            line = store.add(result | {"date": format_today()})
        lines.append(line)
        print(json.dumps(line), flush=True)
    wins = sum(line["gain"] > 0 for line in lines if "gain" in line)
    text = (
        f"# Pretrained density\n\n{describe_machine()}, {format_today()}; {stored.step} training steps; −ln p of a "
        f"held-out normal row, without labels, in nats; seed {seed}, one order, at most {max_rows} rows; noise of "
        f"{smoothing} deviations on all values. ± is one standard error. Seconds are processor seconds.\n\n"
        f"{format_results(lines)}\n\nThe network is likelier than the guide on {wins} of {len(lines)} tables.\n"
    )
    publish_results(name, text)


def main() -> None:
    """Run the program."""
    options = build_parser(__doc__, seeds="0")
    options.add_argument("--run", type=Path, required=True, help="folder of the training run")
    options.add_argument("--rows", type=int, default=MAX_HELD_OUT, help="largest number of held-out rows")
    options.add_argument("--smoothing", type=float, default=0.0, help="noise on all values, in standard deviations")
    run_benchmark("pretrained", run, add_again_option(options))


if __name__ == "__main__":
    main()
