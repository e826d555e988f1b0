"""Missing readings filled: how far from the truth, and whether intervals hold what they promise, beside peers.

    python -m benchmarks.imputation --models models --max-time 60s                         (make bench-quality)

Tables: of those in `adbench/` under DEFORMER_DATA, every second one in the order of their features (then names), the
wider of each pair. The split is that of `benchmarks.density`: half of the normals trains, of the others at most 2000
are filled. Each reading of these is missing with probability 10%, 30% or 50%, whatever the others are; the masks are
the same for all contenders, and all learn from the same complete training rows (ours keeps a fifth of them for the
calibration of alerts, and a tenth of the rest for validation).

- ours: `engine.queries.fill`, each missing reading given all present ones; the conditional mean for the squared error, the
  conditional median for the absolute one, and the central 90% interval. Preset tiny.
- mean: of the training rows.
- kNN: scikit-learn's KNNImputer, 5 neighbours weighted by distance.
- iterative: scikit-learn's IterativeImputer with its default, Bayesian ridge regression; tolerance 0, as it would stop
  after one round where training rows are complete, so that it takes its 10 rounds.

Peers see readings standardised by the training rows, columns that ours takes for labels as numbers. Errors are in
standard deviations of the training rows, over the missing readings of all continuous features of a table together.
Tables that an earlier run with the same setting has measured stay as they are (--again measures them anew), and a model
in --models is not trained again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.attribution import matrix
from benchmarks.command import Kept, again, launch, machine, parser, publish, today
from benchmarks.density import halves
from benchmarks.tables import NEIGHBOURS, find_tables, learn, markdown_head, markdown_row, need_peers, seeds_of
from deformer_stream import Detector, load
from deformer_stream.engine.queries import fill
from deformer_stream.model.schema import Schema, label_of

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

SHARES = (0.1, 0.3, 0.5)
INTERVAL = 0.9
PEERS = {"mean": "mean", "neighbours": "kNN", "iterative": "iterative"}
ERRORS = {"rmse": "RMSE", "mae": "mean absolute error"}


def chosen(features: dict[str, int]) -> list[str]:
    """The tables of the rule above. features: how many each table has."""
    return sorted(features, key=lambda name: (features[name], name.lower()))[1::2]


def masks(shape: tuple[int, int], seed: int) -> dict[float, Bools]:
    """Missing readings by share; what is missing at one share is missing at every larger one."""
    drawn = np.random.default_rng([seed, 0x1357]).random(shape)
    return {share: drawn < share for share in SHARES}


def trained(name: str, rows: pa.Table, seed: int, max_time: str, models: Path) -> Detector:
    """The model of this name, seed and time in the folder, trained where it is not there yet."""
    kept = models / f"{name}-{seed}-{max_time}"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=models) as place:  # a run that is cut off leaves no half of a model
            learn(rows, seed, max_time, Path(place) / "model")
            (Path(place) / "model").rename(kept)
    return load(kept)


def readings(schema: Schema, table: pa.Table) -> Floats:
    """(N, F) what the model reads: numbers, codes of labels."""
    values = matrix(table, schema.names)
    for code, labels in enumerate(schema.label_codes):
        if labels:
            values[:, code] = [labels.get(label_of(x), len(labels)) for x in values[:, code]]
    return values


def completed(train: Floats, tests: dict[float, Floats], seed: int) -> dict[str, dict[float, Floats]]:
    """Test rows with NaNs filled by each peer, by share. train: (R, F) standardised."""
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer, KNNImputer, SimpleImputer

    imputers = {
        "mean": SimpleImputer(),
        "neighbours": KNNImputer(n_neighbors=NEIGHBOURS, weights="distance"),
        "iterative": IterativeImputer(tol=0.0, random_state=seed),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ten rounds were asked for, whether or not anything changes
        return {
            name: {share: imputer.fit(train).transform(rows) for share, rows in tests.items()}
            for name, imputer in imputers.items()
        }


def errors(truth: Floats, squared: Floats, absolute: Floats) -> dict[str, float]:
    """Over cells. squared, absolute: the answers that are judged by either error."""
    return {
        "rmse": float(np.sqrt(((squared - truth) ** 2).mean())),
        "mae": float(np.abs(absolute - truth).mean()),
    }


def held(truth: Floats, low: Floats, high: Floats) -> dict[str, float]:
    """Share of the cells that lie within their interval, and its mean width."""
    return {"coverage": float(((low <= truth) & (truth <= high)).mean()), "width": float((high - low).mean())}


def measure(name: str, train: pa.Table, test: pa.Table, seed: int, max_time: str, models: Path) -> list[dict[str, Any]]:
    """One table, one seed, a row for each share."""
    detector = trained(name, train, seed, max_time, models)
    schema = detector.schema
    names = tuple(schema.names)
    x, y = matrix(train, names), matrix(test, names)
    mean, std = x.mean(0), x.std(0)
    z = (y - mean) / std
    missing = masks(y.shape, seed)
    others = completed((x - mean) / std, {share: np.where(mask, np.nan, z) for share, mask in missing.items()}, seed)
    values, rows = readings(schema, test), []
    for share, mask in missing.items():
        asked = mask & ~schema.discrete
        filled = fill(detector.artifact.model, np.where(mask, np.nan, values), mask, INTERVAL)
        value, low, high, expected = (
            ((part - mean) / std)[asked] for part in (filled.value, filled.low, filled.high, filled.mean)
        )
        truth = z[asked]
        row: dict[str, Any] = {"seed": seed, "share": share, "cells": len(truth)}
        row["ours"] = errors(truth, expected, value)
        row["ours"] |= held(truth, low, high)
        row |= {peer: errors(truth, of[share][asked], of[share][asked]) for peer, of in others.items()}
        rows.append(row)
    return rows


def figures(line: dict[str, Any], share: float) -> dict[str, dict[str, float]]:
    """One table at one share: means over seeds, by contender."""
    runs = [run for run in line["runs"] if run["share"] == share]
    return {who: {k: float(np.mean([r[who][k] for r in runs])) for k in runs[0][who]} for who in ("ours", *PEERS)}


def wins(lines: list[dict[str, Any]], share: float, error: str, peer: str) -> int:
    """Tables on which ours errs less."""
    both = [figures(line, share) for line in lines]
    return sum(of["ours"][error] < of[peer][error] for of in both)


def error_table(lines: list[dict[str, Any]], error: str) -> str:
    """A row for each table and share, the least error in bold; below, on how many tables ours errs less."""
    text = markdown_head(["table", "features", "missing", "ours", *PEERS.values()])
    for line in lines:
        for share in SHARES:
            of = [found[error] for found in figures(line, share).values()]
            cells = [f"**{x:.3f}**" if x == min(of) else f"{x:.3f}" for x in of]
            text.append(markdown_row([line["table"], str(line["features"]), f"{share:.0%}", *cells]))
    for share in SHARES:
        less = [f"{wins(lines, share, error, peer)} of {len(lines)}" for peer in PEERS]
        text.append(markdown_row(["**ours errs less**", "", f"{share:.0%}", "", *less]))
    return "\n".join(text)


def interval_table(lines: list[dict[str, Any]]) -> str:
    """Coverage and mean width by table and share, and the mean of the tables."""
    text = markdown_head(["table", *(f"{what}, {share:.0%}" for what in ("held", "width") for share in SHARES)])
    found = np.array(
        [[figures(line, share)["ours"][k] for k in ("coverage", "width") for share in SHARES] for line in lines]
    )
    for name, row in zip([*(line["table"] for line in lines), "**mean**"], [*found, found.mean(0)], strict=True):
        text.append(markdown_row([name, *(f"{x:.1%}" for x in row[:3]), *(f"{x:.2f}" for x in row[3:])]))
    return "\n".join(text)


def report(lines: list[dict[str, Any]], setting: dict[str, Any]) -> str:
    days = ", ".join(sorted({line["date"] for line in lines}))
    parts = [f"## {title[0].upper()}{title[1:]}\n\n{error_table(lines, error)}" for error, title in ERRORS.items()]
    return (
        f"# Imputation\n\n{setting['machine']}, {days}; at most {setting['max_time']} of training, calibration "
        f"included; seeds {setting['seeds']}. Errors in standard deviations of the training rows.\n\n"
        + "\n\n".join(parts)
        + f"\n\n## {INTERVAL:.0%} intervals of ours\n\n{interval_table(lines)}\n"
    )


def run(arguments: argparse.Namespace) -> None:
    need_peers()
    seeds = seeds_of(arguments.seeds)
    setting = {"seeds": arguments.seeds, "max_time": arguments.max_time, "machine": machine()}
    tables = find_tables(arguments.tables)
    features = {name: len(pq.read_schema(path)) - 1 for name, path in tables.items()}
    kept, lines = Kept("imputation", setting, arguments.again), []
    with tempfile.TemporaryDirectory() as place:
        models = arguments.models or Path(place)
        models.mkdir(parents=True, exist_ok=True)
        for name in list(tables) if arguments.tables else chosen(features):
            line = kept.find(table=name)
            if line is None:
                pairs = [halves(name, tables[name], seed) for seed in seeds]
                runs = [
                    run
                    for pair, seed in zip(pairs, seeds, strict=True)
                    for run in measure(name, *pair, seed, arguments.max_time, models)
                ]
                about = {"table": name, "features": features[name], "records": len(pairs[0][0])}
                line = kept.add({**about, "date": today(), "runs": runs})
            lines.append(line)
            print(json.dumps(line), flush=True)
    text = report(lines, setting)
    publish("imputation", text)


def main() -> None:
    options = parser(__doc__, "by the rule above by default", seeds="0", max_time="60s")
    options.add_argument("--models", type=Path, help="folder that keeps the models; none are kept by default")
    launch("imputation", run, again(options))


if __name__ == "__main__":
    main()
