"""How likely held-out records are: against a Gaussian mixture, and against the paper's recipe in the same time.

    python -m benchmarks.density --tables cardio,pendigits --max-time 60s            (make bench-quality)

The tables of `benchmarks.tables` with their split (half of the normals trains, the other normals are held out here) and
SKAB's record of normal operation, cut in halves by the same shuffle. The figure is −ln p of a held-out record in nats,
mean over ten random orders, in the units of the trained model; smaller is better. Every contender sees the same
transformed numbers: readings of a gridded sensor are spread evenly over their quantum. Results are kept table by table,
and a run that was cut off goes on where it was; with other code, measure --again.

- ours: the default recipe.
- mixture: full-covariance Gaussians by scikit-learn, their number chosen by BIC from 1 to 20, fitted to our training
  and validation records; a label is a number spread over a unit cell, so that a cell's density compares with a mass.
- paper: the paper's recipe (`PAPER`), as wide and deep as ours, since 19 million parameters get nowhere in a minute on
  a CPU, and with a rate of learning that suits that size; the same time for the whole run.
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

from benchmarks.command import ResultStore, add_again_option, run_benchmark, describe_machine, build_parser, publish_results, format_today
from benchmarks.tables import find_tables, need_peers, preset_for, seeds_of, split, tables_folder
from trainer.data import PreparedTable, Split, encode_table
from trainer.evaluate import evaluate_held_out
from trainer.job import TrainingOutput, train
from trainer.sampling import Noise, create_generator, read_rows
from trainer.settings import TrainConfig
from trainer.tables import index_records, open_tables

Floats = NDArray[np.float64]

ORDERS = 10
HELD_OUT = 2000
"""At most so many held-out records are scored."""
COMPONENTS = 20
SPREADS = 5
"""Draws of the places of gridded readings in their quantum, for the mixture."""
SKAB = "SKAB anomaly-free"
CONTENDERS = ("ours", "mixture", "paper")
PAPER: dict[str, Any] = {
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
    "averaging": 1e-3,  # as good as none
    "gaussians": 0,
}


def learned(rows: pa.Table, held: pa.Table, seed: int, max_time: str, **options: Any) -> tuple[TrainingOutput, float]:
    """A training run, and the mean −ln p of the held-out records over random orders."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pq.write_table(rows, folder / "train.parquet")
        pq.write_table(held, folder / "held.parquet")
        chosen = {"preset": preset_for(len(rows)), "max_time": max_time, "seed": seed} | options
        settings = TrainConfig(out=folder / "model", **chosen)  # type: ignore[arg-type]
        result = train([folder / "train.parquet"], settings)
        data = encoded(result.data, folder / "held.parquet", folder)
        return result, evaluate_held_out(result.model, data, np.arange(len(data.split)), ORDERS, seed).mean_nll


def encoded(data: PreparedTable, table: Path, folder: Path) -> PreparedTable:
    """Other records in the units of these, all of them held out."""
    source = open_tables([table], "wide", None, None)
    source.feature_columns = [name for name in source.schema.names if name in data.schema.code_by_name]
    index_records(source)
    values, _ = encode_table(source, data.schema, folder)
    return replace(data, values=values, ranks=None, split=np.full(len(values), Split.CALIBRATION, np.uint8))


def spread(data: PreparedTable, rows: NDArray[np.int64], seed: int) -> Floats:
    """(N, F) readings spread over their quantum and labels over their cell."""
    values, _ = read_rows(data, rows)
    spread_out, _ = Noise.from_schema(data.schema).apply(values, create_generator(seed, 0xDE45))
    cells = np.random.default_rng([seed, 0xDE45]).random(values.shape) - 0.5
    return spread_out.double().numpy() + np.where(data.schema.is_discrete, cells, 0.0)


def mixture(data: PreparedTable, held: PreparedTable, seed: int) -> tuple[int, float]:
    """Components chosen, and the mean −ln p of held-out records. Missing readings would need another peer."""
    from sklearn.mixture import GaussianMixture

    x = spread(data, np.flatnonzero(data.split != Split.CALIBRATION), seed)
    location, scale = x.mean(0), x.std(0) + 1e-9
    x = (x - location) / scale
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some numbers of components do not converge; BIC sorts them out
        fits = [
            GaussianMixture(k, random_state=seed).fit(x)
            for k in range(1, COMPONENTS + 1)
            if k == 1 or k * x.shape[1] <= len(x)
        ]
    best = min(fits, key=lambda fit: float(fit.bic(x)))
    rows = np.arange(len(held.split))
    likelihoods = [
        best.score_samples((spread(held, rows, seed + k) - location) / scale).mean() - np.log(scale).sum()
        for k in range(SPREADS)
    ]
    return int(best.n_components), -float(np.mean(likelihoods))


def measure(train_rows: pa.Table, held_rows: pa.Table, seed: int, max_time: str) -> dict[str, Any]:
    """One table, one seed: nats a held-out record of each contender."""
    result, ours = learned(train_rows, held_rows, seed, max_time)
    plain, paper = learned(train_rows, held_rows, seed, max_time, **PAPER)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as other:
        pq.write_table(train_rows, Path(name) / "train.parquet")
        pq.write_table(held_rows, Path(name) / "held.parquet")
        held = encoded(result.data, Path(name) / "held.parquet", Path(name))
        components, nats = mixture(encoded_train(result.data, Path(name) / "train.parquet", Path(other)), held, seed)
    return {
        "seed": seed,
        "ours": ours,
        "mixture": nats,
        "paper": paper,
        "components": components,
        "gaussians": result.model.config.gaussians,
        "steps": result.training_result.steps,
        "paper_steps": plain.training_result.steps,
        "mixture_seconds": round(time.monotonic() - began, 1),
    }


def encoded_train(data: PreparedTable, table: Path, folder: Path) -> PreparedTable:
    """The training table again (the run's own copy is gone), with the split it was used in."""
    return replace(encoded(data, table, folder), split=data.split)


def sources(wanted: str) -> dict[str, Path]:
    """The tables, and SKAB's where all are wanted or it is named."""
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    skab = tables_folder().parent / "skab" / "anomaly-free" / "anomaly-free.parquet"
    found = find_tables(",".join(name for name in names if name != SKAB)) if names != [SKAB] else {}
    return found | ({SKAB: skab} if not names or SKAB in names else {})


def halves(name: str, path: Path, seed: int) -> tuple[pa.Table, pa.Table]:
    """Training records and held-out normal ones."""
    table = pq.read_table(path)
    if name == SKAB:
        numbers = [f.name for f in table.schema if pa.types.is_floating(f.type)]
        table = table.select(numbers).append_column("label", pa.array(np.zeros(len(table), np.int64)))
    parts = split(table["label"].to_numpy(), seed)
    normals = parts.test[~parts.anomaly]
    if len(normals) > HELD_OUT:
        normals = np.sort(np.random.default_rng([seed, 0xDE46]).choice(normals, HELD_OUT, replace=False))
    features = table.drop_columns(["label"])
    return features.take(parts.train), features.take(normals)


def table_of(lines: list[dict[str, Any]]) -> str:
    text = [
        "| table | features | trained on | ours | Gaussian mixture (BIC) | paper's recipe | Gaussians | their BIC |"
    ]
    text.append("|---|---|---|---|---|---|---|---|")
    for line in lines:
        means = {c: float(np.mean([run[c] for run in line["runs"]])) for c in CONTENDERS}
        least = min(means.values())
        cells = [f"**{m:.2f}**" if m == least else f"{m:.2f}" for m in means.values()]
        guides, components = ([str(run[k]) for run in line["runs"]] for k in ("gaussians", "components"))
        rest = [", ".join(guides), ", ".join(components)]
        text.append(
            "| " + " | ".join([line["table"], str(line["features"]), str(line["records"]), *cells, *rest]) + " |"
        )
    return "\n".join(text)


def wins(lines: list[dict[str, Any]], against: str) -> int:
    """Tables on which ours is likelier, by the mean over seeds."""
    return sum(
        np.mean([r["ours"] for r in line["runs"]]) < np.mean([r[against] for r in line["runs"]]) for line in lines
    )


def run(arguments: argparse.Namespace) -> None:
    need_peers()
    seeds = seeds_of(arguments.seeds)
    setting = {"seeds": arguments.seeds, "max_time": arguments.max_time, "machine": describe_machine()}
    kept, lines = ResultStore("density", setting, arguments.again), []
    for name, path in sources(arguments.tables).items():
        line = kept.find(table=name)
        if line is None:
            pairs = [halves(name, path, seed) for seed in seeds]
            runs = [measure(*pair, seed, arguments.max_time) for pair, seed in zip(pairs, seeds, strict=True)]
            about = {"table": name, "features": pairs[0][0].num_columns, "records": len(pairs[0][0])}
            line = kept.add({**about, "date": format_today(), "runs": runs})
        lines.append(line)
        print(json.dumps(line), flush=True)
    days = ", ".join(sorted({line["date"] for line in lines}))
    text = (
        f"# Density\n\n{describe_machine()}, {days}; −ln p of a held-out normal record, nats, mean over {ORDERS} random orders "
        f"and seeds {arguments.seeds}; at most {arguments.max_time} for a training run, calibration included.\n\n"
        f"{table_of(lines)}\n\nOurs is likelier than the Gaussian mixture on {wins(lines, 'mixture')} and than the "
        f"paper's recipe on {wins(lines, 'paper')} of {len(lines)} tables.\n"
    )
    publish_results("density", text)


def main() -> None:
    options = build_parser(__doc__, f"{SKAB!r} among them; all by default", seeds="0", max_time="60s")
    run_benchmark("density", run, add_again_option(options))


if __name__ == "__main__":
    main()
