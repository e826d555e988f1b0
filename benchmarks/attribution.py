"""Quality of explanations: faults are injected into normal records, and each method names the faulty sensor.

    python -m benchmarks.attribution --max-time 60s                                        (make bench-quality)

Tables are those of `adbench/` in DEFORMER_DATA with at least 1000 normal rows and more than 20 distinct values in every
feature. The four whose features depend most on each other are used: by the median R² of linear regressions of each
feature on the others, fitted on the training half and evaluated on the other half. One model is trained on half of the
normal rows, as in `benchmarks.tables`. Faults are injected into the other half:

- shift: 3 to 6 standard deviations are added to a reading or subtracted from it;
- broken correlation: the reading is taken from another held-out record, so its own distribution does not change;
- stuck: the reading is the same in all records, taken from one training record;
- each of these in two features at once (from two different records);
- swapped: two standardised readings are exchanged.

The records arrive in random orders at the engine with α = 1%, and the explanations of its alerts are compared with the
truth. Alerts before the first faulty reading are false alarms and are left out. The methods rank the readings by:

- ours: the order of the explanation's contributions;
- arrival: the surprise on arrival (effort "fast");
- leave-one-out and attribution: the leave-one-out surprisal and the order-averaged attribution under the same model;
- marginal z: the distance from the feature's mean in standard deviations;
- Gaussian leave-one-out: the residual given all other readings under a Gaussian with the covariance of the training
  rows, in its standard deviations.

With --cost, only the time of an explanation is measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from benchmarks.command import build_parser, describe_machine, format_today, publish_results, run_benchmark
from benchmarks.tables import (
    ALPHA,
    find_tables,
    format_markdown_header,
    format_markdown_row,
    require_scikit_learn,
    split_table,
    train_detector,
)
from deformer_stream import Detector
from deformer_stream.engine.engine import Limits
from deformer_stream.engine.events import NO_TIME, Alert, Contribution, EventBatch
from deformer_stream.engine.explain import AlertRule, ExplanationEffort, explain_records
from deformer_stream.errors import InputError
from deformer_stream.kernels.cpu import CpuKernels
from deformer_stream.kernels.library import load_library
from deformer_stream.model.config import PRESETS
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.schema import Feature, Schema

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FAULTS = ("shift", "broken correlation", "stuck", "two shifts", "two broken correlations", "two stuck", "swapped")
METHODS = ("ours", "arrival", "leave-one-out", "attribution", "marginal z", "Gaussian leave-one-out")

NUM_TABLES = 4
"""Number of tables that are chosen by the dependence of their features."""

MIN_NORMALS = 1000
"""Number of normal rows below which a table is not used."""

MIN_DISTINCT = 20
"""A table is only used if every feature has more distinct values than this."""

SHIFT_RANGE = (3.0, 6.0)
"""Range of a shift in standard deviations: large enough to be a fault, small enough not to be obvious."""

SHRINKAGE = 1e-3
"""Share by which correlations are shrunk towards zero, so that the matrix can be inverted."""

COST_FEATURES, COST_RUNS = 20, 25
"""Number of features of the records with which time is measured, and number of repetitions."""


def extract_matrix(table: pa.Table, names: Sequence[str]) -> Floats:
    """Return the columns with these names as a matrix, (N, F)."""
    return np.column_stack([table[name].to_numpy() for name in names]).astype(np.float64)


def compute_dependence(train: Floats, test: Floats) -> float:
    """Return the median over features of the R² of a linear regression on the other features.

    The result is 0 if a feature has too few distinct values.

    Args:
        train: (N, F) rows on which the regressions are fitted.
        test: (M, F) rows on which they are evaluated.
    """
    if min(len(np.unique(column)) for column in train.T) <= MIN_DISTINCT:
        return 0.0
    mean, std = train.mean(0), train.std(0)
    x, y = (train - mean) / std, (test - mean) / std
    r_squared = []
    for f in range(x.shape[1]):
        others = np.arange(x.shape[1]) != f
        weights = np.linalg.lstsq(x[:, others], x[:, f], rcond=None)[0]
        residual = y[:, f] - y[:, others] @ weights
        r_squared.append(1 - (residual**2).mean() / y[:, f].var())
    return float(np.median(r_squared))


def choose_tables(tables: dict[str, pa.Table], seed: int) -> list[str]:
    """Return the names of the tables whose features depend most on each other, most dependent first."""
    dependence_by_name = {}
    for name, table in tables.items():
        parts = split_table(table["label"].to_numpy(), seed)
        values = extract_matrix(table, [column for column in table.column_names if column != "label"])
        test_normals = parts.test[~parts.is_anomaly]
        if len(parts.train) + len(test_normals) >= MIN_NORMALS:
            dependence_by_name[name] = compute_dependence(values[parts.train], values[test_normals])
    dependent = [name for name, dependence in dependence_by_name.items() if dependence > 0]
    return sorted(dependent, key=lambda name: -dependence_by_name[name])[:NUM_TABLES]


def inject_fault(
    fault: str, rows: Floats, donors: Floats, train: Floats, rng: np.random.Generator
) -> tuple[Floats, Ints]:
    """Return faulty copies of rows, and which features are faulty.

    Args:
        fault: One of `FAULTS`.
        rows: (N, F) normal rows.
        donors: Other held-out rows, whose values replace readings in a broken correlation.
        train: The training rows.
        rng: Source of random numbers.

    Returns:
        The faulty rows, (N, F), and the faulty feature codes of each row, (N, 1) or (N, 2).
    """
    num_rows, num_features = rows.shape
    mean, std = train.mean(0), train.std(0)
    num_faulty = 2 if fault.startswith(("two", "swapped")) else 1
    faulty = np.argsort(rng.random((num_rows, num_features)), 1)[:, :num_faulty]
    row_index = np.arange(num_rows)[:, None]
    original = rows[row_index, faulty]
    if "shift" in fault:
        sign = rng.choice([-1.0, 1.0], faulty.shape)
        replacement = original + sign * rng.uniform(*SHIFT_RANGE, faulty.shape) * std[faulty]
    elif "broken" in fault:
        replacement = donors[rng.integers(len(donors), size=faulty.shape), faulty]
    elif "stuck" in fault:
        stuck_values = train[rng.integers(len(train), size=num_features), np.arange(num_features)]
        replacement = stuck_values[faulty]
    else:
        z = (original - mean[faulty]) / std[faulty]
        replacement = mean[faulty] + std[faulty] * z[:, ::-1]
    faulty_rows = rows.copy()
    faulty_rows[row_index, faulty] = replacement
    return faulty_rows, faulty


def raise_alerts(detector: Detector, rows: Floats, orders: Ints) -> dict[int, Alert]:
    """Send rows through the engine as records and return the alerts by row number.

    Args:
        detector: The trained detector.
        rows: (N, F) raw values.
        orders: (N, F) feature codes of each row in order of arrival.
    """
    num_rows, num_features = orders.shape
    num_readings = num_rows * num_features
    batch = EventBatch(
        [str(row) for row in range(num_rows) for _ in range(num_features)],
        orders.ravel().astype(np.int32),
        np.take_along_axis(rows, orders, 1).ravel(),
        np.full(num_readings, NO_TIME),
        np.arange(num_readings, dtype=np.int32),
        np.zeros(num_readings, np.int32),
    )
    effects = detector.engine(ALPHA, Limits(max_open_records=num_rows)).handle(batch, 0)
    return {int(alert.record): alert for alert in effects.alerts}


@dataclass(frozen=True, slots=True)
class Gaussian:
    """A Gaussian fitted to the training rows.

    Attributes:
        mean: (F,) means.
        std: (F,) standard deviations.
        correlation: (F, F) correlations, shrunk a little towards zero.
    """

    mean: Floats
    std: Floats
    correlation: Floats

    @staticmethod
    def fit(train: Floats) -> Gaussian:
        """Fit the Gaussian to rows, (N, F)."""
        correlation = (1 - SHRINKAGE) * np.corrcoef(train.T) + SHRINKAGE * np.eye(train.shape[1])
        return Gaussian(train.mean(0), train.std(0), correlation)

    def compute_z(self, codes: Ints, values: Floats) -> Floats:
        """Return the distances of K readings from their means, (K,), in standard deviations."""
        return np.asarray((values - self.mean[codes]) / self.std[codes])

    def compute_leave_one_out(self, codes: Ints, values: Floats) -> Floats:
        """Return the residual of each of K readings given all others, (K,), in its standard deviations."""
        precision = np.linalg.inv(self.correlation[np.ix_(codes, codes)])
        return np.asarray(precision @ self.compute_z(codes, values) / np.sqrt(np.diag(precision)))


def rank_readings(
    alert: Alert,
    codes: Ints,
    values: Floats,
    fast: Sequence[Contribution],
    gaussian: Gaussian,
    schema: Schema,
) -> dict[str, list[int]]:
    """Return, for each method, the feature codes of the readings, most suspicious first.

    Args:
        alert: The alert with its full explanation.
        codes: (K,) feature codes of the readings in order of arrival.
        values: (K,) raw values.
        fast: The contributions of an explanation with effort "fast".
        gaussian: The Gaussian of the training rows.
        schema: The features.
    """

    def get_codes(parts: Sequence[Contribution]) -> list[int]:
        return [schema.code_by_name[part.feature] for part in parts]

    def sort_descending(scores: Floats) -> list[int]:
        sorted_codes: list[int] = codes[np.argsort(-np.abs(scores), kind="stable")].tolist()
        return sorted_codes

    parts = alert.contributions
    rankings = (
        get_codes(parts),
        get_codes(fast),
        get_codes(sorted(parts, key=lambda part: -(part.leave_one_out or 0.0))),
        get_codes(sorted(parts, key=lambda part: -(part.attribution or 0.0))),
        sort_descending(gaussian.compute_z(codes, values)),
        sort_descending(gaussian.compute_leave_one_out(codes, values)),
    )
    return dict(zip(METHODS, rankings, strict=True))


def measure_fault(
    detector: Detector, fault: str, train: Floats, held_out: Floats, num_records: int, seed: int, gaussian: Gaussian
) -> dict[str, Any]:
    """Inject one fault into records of one table and return the figures of its alerts.

    For each method, "first" is the share of alerts in which a faulty feature ranks first. "top_two" is the share in
    which all faulty features that had arrived are among the first two.
    """
    rng = np.random.default_rng([seed, FAULTS.index(fault)])
    sampled = held_out[rng.integers(len(held_out), size=num_records)]
    rows, faulty = inject_fault(fault, sampled, held_out, train, rng)
    orders = np.argsort(rng.random(rows.shape), 1)
    alerts = raise_alerts(detector, rows, orders)
    hits: dict[str, list[tuple[bool, bool]]] = {method: [] for method in METHODS}
    num_before_fault, readings_seen, silencing_sets = 0, [], []
    for row, alert in alerts.items():
        codes = orders[row, : alert.raised_at]
        faulty_codes = set(faulty[row].tolist()) & set(codes.tolist())
        if not faulty_codes:
            num_before_fault += 1
            continue
        values = rows[row, codes]
        model = detector.artifact.model
        (fast,) = explain_records(model, codes[None], values[None], [{}], [""], never_alert, "fast")
        rankings = rank_readings(alert, codes, values, fast.contributions, gaussian, detector.schema)
        for method, ranking in rankings.items():
            hits[method].append((ranking[0] in faulty_codes, faulty_codes <= set(ranking[:2])))
        readings_seen.append(alert.raised_at)
        if alert.silenced_by is not None:
            suspects = {detector.schema.code_by_name[name] for name in alert.silenced_by}
            silencing_sets.append((len(suspects), bool(suspects & faulty_codes)))
    num_explained = len(readings_seen)
    line: dict[str, Any] = {
        "injected": num_records,
        "alerts": len(alerts),
        "before the fault": num_before_fault,
        "explained": num_explained,
        "seen": round(float(np.mean(readings_seen)), 1) if num_explained else None,
    }
    for method in METHODS:
        first, top_two = np.mean(hits[method], 0).tolist() if num_explained else (None, None)
        line[method] = {"first": first, "top_two": top_two}
    line["silenced"] = {
        "found": len(silencing_sets) / num_explained if num_explained else None,
        "size": float(np.mean([size for size, _ in silencing_sets])) if silencing_sets else None,
        "names_a_fault": float(np.mean([is_hit for _, is_hit in silencing_sets])) if silencing_sets else None,
    }
    return line


def measure_table(name: str, table: pa.Table, num_records: int, seed: int, max_time: str) -> dict[str, Any]:
    """Train on one table, inject every fault, and return the JSON line."""
    parts = split_table(table["label"].to_numpy(), seed)
    detector, result = train_detector(table.drop_columns(["label"]).take(parts.train), seed, max_time)
    rows = extract_matrix(table, detector.schema.names)
    train, held_out = rows[parts.train], rows[parts.test[~parts.is_anomaly]]
    gaussian = Gaussian.fit(train)
    return {
        "table": name,
        "features": len(detector.schema),
        "steps": result.training_result.steps,
        "calibrated": len(result.calibration.scores),
        "faults": {
            fault: measure_fault(detector, fault, train, held_out, num_records, seed, gaussian) for fault in FAULTS
        },
    }


def never_alert(scores: Floats, _: Sequence[str]) -> NDArray[np.bool_]:
    """Raise no alert, whatever the statistic."""
    return np.isnan(scores)


def always_alert(scores: Floats, _: Sequence[str]) -> NDArray[np.bool_]:
    """Raise an alert, whatever the statistic."""
    return ~np.isnan(scores)


def measure_cost(num_runs: int = COST_RUNS) -> list[dict[str, Any]]:
    """Measure the time to explain a complete record of 20 features with a `small` network, in milliseconds.

    There is one line for a record alone and one for a record among 256 that are explained together.
    """
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(COST_FEATURES)))
    torch.manual_seed(0)
    model = DEformer(schema, PRESETS["small"]).eval()
    model.kernel_library = load_library(False)
    kernels = CpuKernels.for_model(model)
    rng = np.random.default_rng(0)

    def measure_milliseconds(num_records: int, effort: ExplanationEffort, alert_rule: AlertRule) -> float:
        codes = np.argsort(rng.random((num_records, COST_FEATURES)), 1)
        values = rng.normal(size=codes.shape)
        record_ids = [str(i) for i in range(num_records)]
        unseen_labels: list[dict[int, str]] = [{}] * num_records
        seconds = []
        for _ in range(num_runs if num_records == 1 else 2):
            start = time.perf_counter()
            explain_records(model, codes, values, unseen_labels, record_ids, alert_rule, effort, kernels)
            seconds.append(time.perf_counter() - start)
        num_warm_up = 3 if len(seconds) > 5 else 0
        return 1e3 * float(np.median(seconds[num_warm_up:])) / num_records

    return [
        {
            "features": COST_FEATURES,
            "preset": "small",
            "records at once": num_records,
            "fast": measure_milliseconds(num_records, "fast", never_alert),
            "one suspect": measure_milliseconds(num_records, "full", never_alert),
            "three tried in vain": measure_milliseconds(num_records, "full", always_alert),
        }
        for num_records in (1, 256)
    ]


def format_percentages(figures: dict[str, Any], key: str) -> list[str]:
    """Return one figure of each method in percent, empty if it was not measured."""
    return ["" if figures[m][key] is None else f"{100 * figures[m][key]:.0f}" for m in METHODS]


def format_quality_table(lines: list[dict[str, Any]], key: str) -> str:
    """Return a Markdown table of one figure, "first" or "top_two", for each fault, table and method, in percent."""
    text = format_markdown_header(["fault", "table", "alerts explained", "readings seen", *METHODS])
    for fault in FAULTS:
        figures_by_table = [line["faults"][fault] for line in lines]
        for line, figures in zip(lines, figures_by_table, strict=True):
            cells = [fault, line["table"], str(figures["explained"]), str(figures["seen"])]
            text.append(format_markdown_row([*cells, *format_percentages(figures, key)]))
        means = [np.mean([f[m][key] for f in figures_by_table if f[m][key] is not None]) for m in METHODS]
        mean_cells = [f"**{100 * mean:.0f}**" for mean in means]
        text.append(format_markdown_row([f"**{fault}**", "**mean**", "", "", *mean_cells]))
    return "\n".join(text)


def format_silencing_table(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table about the sets of suspects whose replacement avoids the alert, for each fault."""
    titles = ["fault", "alerts with such a set", "mean size of the set", "set contains a faulty feature"]
    text = format_markdown_header(titles)
    for fault in FAULTS:
        figures_by_table = [line["faults"][fault]["silenced"] for line in lines]
        share_found, size, share_hit = (
            np.mean([figures[key] for figures in figures_by_table if figures[key] is not None])
            for key in ("found", "size", "names_a_fault")
        )
        text.append(format_markdown_row([fault, f"{100 * share_found:.0f}%", f"{size:.1f}", f"{100 * share_hit:.0f}%"]))
    return "\n".join(text)


def format_cost_table(costs: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the measured times in milliseconds per record."""
    text = format_markdown_header([f"{k}, ms" if isinstance(value, float) else k for k, value in costs[0].items()])
    for line in costs:
        cells = [f"{value:.1f}" if isinstance(value, float) else str(value) for value in line.values()]
        text.append(format_markdown_row(cells))
    return "\n".join(text)


def run(arguments: argparse.Namespace) -> None:
    """Measure quality, or the cost with --cost, and publish the results."""
    if arguments.cost:
        costs = measure_cost()
        conditions = f"{describe_machine()}, {format_today()}."
        text = f"# Cost of an explanation\n\n{conditions}\n\n{format_cost_table(costs)}\n"
        publish_results("attribution_cost", text, costs)
        return
    require_scikit_learn()
    tables = {name: pq.read_table(path) for name, path in find_tables(arguments.tables).items()}
    names = list(tables) if arguments.tables else choose_tables(tables, arguments.seed)
    if not names:
        raise InputError(f"no table has {MIN_NORMALS} normal rows and continuous features only: name one by --tables")
    lines = []
    for name in names:
        lines.append(measure_table(name, tables[name], arguments.injected, arguments.seed, arguments.max_time))
        print(json.dumps(lines[-1]), flush=True)
    text = (
        f"# Attribution\n\n{describe_machine()}, {format_today()}; tables {', '.join(names)}, seed {arguments.seed}. "
        f"Each training run takes at most {arguments.max_time}. Each fault is injected into {arguments.injected} "
        f"records; α = {ALPHA:.0%}. Figures are percentages of alerts.\n\n"
        f"## A faulty feature ranks first\n\n{format_quality_table(lines, 'first')}\n\n"
        "## All faulty features that had arrived are among the first two\n\n"
        f"{format_quality_table(lines, 'top_two')}\n\n"
        "## Sets of at most three suspects whose replacement avoids the alert\n\n"
        f"{format_silencing_table(lines)}\n"
    )
    publish_results("attribution", text, lines)


def main() -> None:
    """Run the program."""
    options = build_parser(__doc__, "by default the four with the most dependent features", max_time="60s")
    seed_help = "seed of split, training, faults and orders; 0 by default"
    options.add_argument("--seed", type=int, default=0, help=seed_help)
    injected_help = "number of faulty records for each fault; 1000 by default"
    options.add_argument("--injected", type=int, default=1000, help=injected_help)
    options.add_argument("--cost", action="store_true", help="only measure and print the time of an explanation")
    run_benchmark("attribution", run, options)


if __name__ == "__main__":
    main()
