"""Imputation of missing readings: errors and interval coverage, compared with scikit-learn's imputers.

    python -m benchmarks.imputation --models models --max-time 60s                         (make bench-quality)

Tables are sorted by their number of features, then by name, and every second one is used. The split is that of
`benchmarks.density`: half of the normal rows trains, and at most 2000 of the others are imputed. Each of their readings
is missing with probability 10%, 30% or 50%, independently of all values. All methods have the same missing readings
and learn from the same complete training rows. Ours keeps a fifth of these for the calibration of alerts, and a tenth
of the rest for validation.

- ours: `engine.imputation.impute`, each missing reading given all present ones. The conditional mean is evaluated by
  the squared error, the conditional median by the absolute error. Intervals are central 90% intervals. Preset tiny.
- mean: the mean of the training rows.
- kNN: scikit-learn's KNNImputer with 5 neighbours weighted by distance.
- iterative: scikit-learn's IterativeImputer with its default, Bayesian ridge regression. Its tolerance is 0, so that it
  performs all of its 10 rounds; with complete training rows it would stop after the first one.

scikit-learn's imputers receive readings standardised by the training rows, and label codes as numbers. Errors are in
standard deviations of the training rows, over the missing readings of all continuous features of a table.
Measurements of an earlier run with the same setting are reused unless --again is given, and a model in the folder
--models is not trained again.
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

from benchmarks.attribution import extract_matrix
from benchmarks.command import (
    ResultStore,
    add_again_option,
    build_parser,
    describe_machine,
    format_today,
    publish_results,
    run_benchmark,
)
from benchmarks.density import split_normal_rows
from benchmarks.tables import (
    NUM_NEIGHBOURS,
    find_tables,
    format_markdown_header,
    format_markdown_row,
    parse_seeds,
    require_scikit_learn,
    train_detector,
)
from deformer_stream import Detector, load
from deformer_stream.engine.imputation import impute
from deformer_stream.model.schema import Schema, format_label

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MISSING_SHARES = (0.1, 0.3, 0.5)
"""Probabilities that a reading is missing."""

INTERVAL = 0.9
"""Probability of the central intervals."""

NAME_BY_PEER = {"mean": "mean", "neighbours": "kNN", "iterative": "iterative"}
"""Column titles of the other methods by the keys of the JSON lines."""

NAME_BY_ERROR = {"rmse": "RMSE", "mae": "mean absolute error"}


def choose_tables(num_features_by_table: dict[str, int]) -> list[str]:
    """Return every second table in the order of their numbers of features, then of their names."""
    return sorted(num_features_by_table, key=lambda name: (num_features_by_table[name], name.lower()))[1::2]


def draw_masks(shape: tuple[int, int], seed: int) -> dict[float, Bools]:
    """Return which readings are missing, by share.

    A reading that is missing at one share is also missing at every larger one.
    """
    uniform = np.random.default_rng([seed, 0x1357]).random(shape)
    return {share: uniform < share for share in MISSING_SHARES}


def load_or_train(name: str, rows: pa.Table, seed: int, max_time: str, models: Path) -> Detector:
    """Return the detector of this table, seed and time from a folder, and train it first if it is missing."""
    model_dir = models / f"{name}-{seed}-{max_time}"
    if not model_dir.exists():
        with tempfile.TemporaryDirectory(dir=models) as temporary:  # an interrupted run leaves no incomplete model
            train_detector(rows, seed, max_time, Path(temporary) / "model")
            (Path(temporary) / "model").rename(model_dir)
    return load(model_dir)


def convert_readings(schema: Schema, table: pa.Table) -> Floats:
    """Return the table as the model receives it, (N, F): numbers, and codes in place of labels."""
    values = extract_matrix(table, schema.names)
    for feature, code_by_label in enumerate(schema.code_by_label):
        if code_by_label:
            unseen_code = len(code_by_label)
            values[:, feature] = [code_by_label.get(format_label(x), unseen_code) for x in values[:, feature]]
    return values


def impute_by_peers(
    train: Floats, incomplete_by_share: dict[float, Floats], seed: int
) -> dict[str, dict[float, Floats]]:
    """Return the imputed rows of each of scikit-learn's imputers, by share of missing readings.

    Args:
        train: (R, F) complete standardised training rows.
        incomplete_by_share: Standardised test rows with NaN for missing readings, by share.
        seed: Seed of the iterative imputer.
    """
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer, KNNImputer, SimpleImputer

    imputers = {
        "mean": SimpleImputer(),
        "neighbours": KNNImputer(n_neighbors=NUM_NEIGHBOURS, weights="distance"),
        "iterative": IterativeImputer(tol=0.0, random_state=seed),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # with tolerance 0, the iterative imputer always warns of no convergence
        return {
            name: {share: imputer.fit(train).transform(rows) for share, rows in incomplete_by_share.items()}
            for name, imputer in imputers.items()
        }


def compute_errors(truth: Floats, means: Floats, medians: Floats) -> dict[str, float]:
    """Return the root mean squared error of the means and the mean absolute error of the medians."""
    return {
        "rmse": float(np.sqrt(((means - truth) ** 2).mean())),
        "mae": float(np.abs(medians - truth).mean()),
    }


def evaluate_intervals(truth: Floats, low: Floats, high: Floats) -> dict[str, float]:
    """Return the share of true values within their intervals, and the mean width of the intervals."""
    return {"coverage": float(((low <= truth) & (truth <= high)).mean()), "width": float((high - low).mean())}


def measure_table(
    name: str, train: pa.Table, test: pa.Table, seed: int, max_time: str, models: Path
) -> list[dict[str, Any]]:
    """Measure one table with one seed; the result has one entry for each share of missing readings."""
    detector = load_or_train(name, train, seed, max_time, models)
    schema = detector.schema
    train_values, test_values = extract_matrix(train, schema.names), extract_matrix(test, schema.names)
    mean, std = train_values.mean(0), train_values.std(0)
    test_z = (test_values - mean) / std
    mask_by_share = draw_masks(test_values.shape, seed)
    incomplete_by_share = {share: np.where(mask, np.nan, test_z) for share, mask in mask_by_share.items()}
    peers = impute_by_peers((train_values - mean) / std, incomplete_by_share, seed)
    readings, runs = convert_readings(schema, test), []
    for share, mask in mask_by_share.items():
        is_evaluated = mask & ~schema.is_discrete
        imputed = impute(detector.artifact.model, np.where(mask, np.nan, readings), mask, INTERVAL)
        medians, low, high, means = (
            ((part - mean) / std)[is_evaluated] for part in (imputed.median, imputed.low, imputed.high, imputed.mean)
        )
        truth = test_z[is_evaluated]
        run: dict[str, Any] = {"seed": seed, "share": share, "cells": len(truth)}
        run["ours"] = compute_errors(truth, means, medians) | evaluate_intervals(truth, low, high)
        for peer, rows_by_share in peers.items():
            estimates = rows_by_share[share][is_evaluated]
            run[peer] = compute_errors(truth, estimates, estimates)
        runs.append(run)
    return runs


def average_over_seeds(line: dict[str, Any], share: float) -> dict[str, dict[str, float]]:
    """Return the mean figures of each method for one table and one share of missing readings."""
    runs = [run for run in line["runs"] if run["share"] == share]
    return {
        method: {key: float(np.mean([run[method][key] for run in runs])) for key in runs[0][method]}
        for method in ("ours", *NAME_BY_PEER)
    }


def count_wins(lines: list[dict[str, Any]], share: float, error: str, peer: str) -> int:
    """Return the number of tables on which our error is smaller than that of another method."""
    figures_by_table = [average_over_seeds(line, share) for line in lines]
    return sum(figures["ours"][error] < figures[peer][error] for figures in figures_by_table)


def format_error_table(lines: list[dict[str, Any]], error: str) -> str:
    """Return a Markdown table of errors; the smallest one of each row is bold.

    The last rows say on how many tables our error is smaller than that of each other method.
    """
    text = format_markdown_header(["table", "features", "missing", "ours", *NAME_BY_PEER.values()])
    for line in lines:
        for share in MISSING_SHARES:
            errors = [figures[error] for figures in average_over_seeds(line, share).values()]
            cells = [f"**{x:.3f}**" if x == min(errors) else f"{x:.3f}" for x in errors]
            text.append(format_markdown_row([line["table"], str(line["features"]), f"{share:.0%}", *cells]))
    for share in MISSING_SHARES:
        wins = [f"{count_wins(lines, share, error, peer)} of {len(lines)}" for peer in NAME_BY_PEER]
        text.append(format_markdown_row(["**our error is smaller**", "", f"{share:.0%}", "", *wins]))
    return "\n".join(text)


def format_interval_table(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the coverage and mean width of our intervals, with means over the tables."""
    columns = [(key, share) for key in ("coverage", "width") for share in MISSING_SHARES]
    text = format_markdown_header(["table", *(f"{key}, {share:.0%} missing" for key, share in columns)])
    figures = np.array([[average_over_seeds(line, share)["ours"][key] for key, share in columns] for line in lines])
    names = [*(line["table"] for line in lines), "**mean**"]
    num_shares = len(MISSING_SHARES)
    for name, row in zip(names, [*figures, figures.mean(0)], strict=True):
        cells = [*(f"{x:.1%}" for x in row[:num_shares]), *(f"{x:.2f}" for x in row[num_shares:])]
        text.append(format_markdown_row([name, *cells]))
    return "\n".join(text)


def format_report(lines: list[dict[str, Any]], setting: dict[str, Any]) -> str:
    """Return the report in Markdown."""
    dates = ", ".join(sorted({line["date"] for line in lines}))
    sections = [
        f"## {title[0].upper()}{title[1:]}\n\n{format_error_table(lines, error)}"
        for error, title in NAME_BY_ERROR.items()
    ]
    return (
        f"# Imputation\n\n{setting['machine']}, {dates}; seeds {setting['seeds']}. Each training run takes at most "
        f"{setting['max_time']} including calibration. Errors are in standard deviations of the training rows.\n\n"
        + "\n\n".join(sections)
        + f"\n\n## Our {INTERVAL:.0%} intervals\n\n{format_interval_table(lines)}\n"
    )


def run(arguments: argparse.Namespace) -> None:
    """Measure all requested tables that are not stored yet, and publish the results."""
    require_scikit_learn()
    seeds = parse_seeds(arguments.seeds)
    setting = {"seeds": arguments.seeds, "max_time": arguments.max_time, "machine": describe_machine()}
    path_by_name = find_tables(arguments.tables)
    num_features_by_table = {name: len(pq.read_schema(path)) - 1 for name, path in path_by_name.items()}
    names = list(path_by_name) if arguments.tables else choose_tables(num_features_by_table)
    store, lines = ResultStore("imputation", setting, arguments.again), []
    with tempfile.TemporaryDirectory() as temporary:
        models = arguments.models or Path(temporary)
        models.mkdir(parents=True, exist_ok=True)
        for name in names:
            line = store.find(table=name)
            if line is None:
                parts = [split_normal_rows(name, path_by_name[name], seed) for seed in seeds]
                runs = []
                for (train, test), seed in zip(parts, seeds, strict=True):
                    runs += measure_table(name, train, test, seed, arguments.max_time, models)
                description = {"table": name, "features": num_features_by_table[name], "records": len(parts[0][0])}
                line = store.add({**description, "date": format_today(), "runs": runs})
            lines.append(line)
            print(json.dumps(line), flush=True)
    publish_results("imputation", format_report(lines, setting))


def main() -> None:
    """Run the program."""
    options = build_parser(__doc__, "every second one by number of features by default", seeds="0", max_time="60s")
    models_help = "folder in which trained models are stored and reused; models are not stored by default"
    options.add_argument("--models", type=Path, help=models_help)
    run_benchmark("imputation", run, add_again_option(options))


if __name__ == "__main__":
    main()
