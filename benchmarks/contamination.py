"""Effect of unlabelled anomalies among the training records, with and without countermeasures.

    python -m benchmarks.contamination --tables cardio,thyroid --shares 0,0.01,0.05,0.1 --max-time 45s

Splits, presets and streams are those of `benchmarks.tables`, except that anomalies replace a share of the training
records; these anomalies are not tested. These treatments are compared:

    as is      all training records are treated as normal
    trimmed    calibration drops the given share of the records with the largest statistics
    declared   deformer-train --contamination SHARE, which also drops the records farthest from others from training
    auto       deformer-train --contamination auto, which is not told the share
    reviewed   the model of auto; of the 100 calibration records with the largest statistics, the anomalies are removed,
               as a person would confirm them (deformer-stream calibrate --review 100 and --anomalous)

--treatments measures some of them only. "trimmed" is measured with "as is", and "reviewed" with "auto".

Isolation Forest and the mean distance to the five nearest neighbours run on the same rows without knowing the share.
The report shows AUROC and AUPR of complete records, and for each α the shares of normal records and of anomalies that
raise an alert. Measurements are stored one by one: an interrupted run continues; use --again after code changes.
"""

from __future__ import annotations

import argparse
import json
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
    TableSplit,
    compute_ranking_metrics,
    find_tables,
    format_markdown_header,
    format_markdown_row,
    iterate_in_random_orders,
    parse_seeds,
    require_scikit_learn,
    score_by_peers,
    split_table,
    train_detector,
)
from deformer_stream import Detector
from deformer_stream.calibration.conformal import Calibration, trim_largest
from deformer_stream.errors import ConfigError
from trainer.data import Split

Floats = NDArray[np.float64]

ALPHAS = (0.05, 0.01)
"""False-alarm rates of the alerts."""

TREATMENTS_BY_TRAINING = {"as is": ("as is", "trimmed"), "declared": ("declared",), "auto": ("auto", "reviewed")}
"""Ways to deal with the anomalies, keys of the JSON lines, by the training run whose model they share."""

TREATMENTS = tuple(treatment for treatments in TREATMENTS_BY_TRAINING.values() for treatment in treatments)

NUM_REVIEWED = 100
"""Number of calibration records that a person looks at."""

NAME_BY_PEER = {"forest": "Isolation Forest", "neighbours": "5-NN"}


def contaminate(parts: TableSplit, share: float, seed: int) -> TableSplit:
    """Replace a share of the training records by anomalies, which are then removed from the test records.

    At most half of the anomalies are used, so that enough of them remain for the test.
    """
    anomalies = parts.test[parts.is_anomaly]
    count = min(round(share * len(parts.train)), len(anomalies) // 2)
    chosen = np.random.default_rng([seed, 0xC0]).permutation(len(anomalies))[:count]
    train = np.concatenate([parts.train[: len(parts.train) - count], anomalies[chosen]])
    remaining = np.delete(anomalies, chosen)
    test = np.concatenate([parts.test[~parts.is_anomaly], remaining])
    return TableSplit(train, test, np.arange(len(test)) >= len(test) - len(remaining))


def measure_alerts(
    calibration: Calibration, statistics: Floats, is_anomaly: NDArray[np.bool_]
) -> dict[str, dict[str, float]]:
    """Return, by α, the shares of normal records and of anomalies that raise an alert.

    Args:
        calibration: The calibration of the alert rule.
        statistics: (M,) the largest prefix statistic of each test record.
        is_anomaly: (M,) whether each record is an anomaly.
    """
    p = calibration.compute_pooled_p_values(statistics)
    return {
        f"{alpha:g}": {
            "false alarms": round(float((p[~is_anomaly] <= alpha).mean()), 4),
            "detected": round(float((p[is_anomaly] <= alpha).mean()), 4),
        }
        for alpha in ALPHAS
    }


def score_stream(detector: Detector, rows: pa.Table, seed: int) -> tuple[Floats, Floats]:
    """Score rows as records whose readings arrive in random orders.

    Returns:
        The `anomaly_score` of each of M records, (M,), and its largest prefix statistic, (M,).
    """
    results = [detector.score(records, order="arrival") for records in iterate_in_random_orders(detector, rows, seed)]
    anomaly_scores = np.concatenate([result.anomaly_score for result in results])
    return anomaly_scores, np.concatenate([result.score for result in results])


def measure_table(table: pa.Table, share: float, seed: int, max_time: str, training: str) -> dict[str, Any]:
    """Measure the treatments of one training run on one table with one share of anomalies and one seed.

    Args:
        table: The table with its labels.
        share: Share of anomalies among the training records.
        seed: Seed of the split, the training run and the orders.
        max_time: Largest duration of the training run.
        training: A key of `TREATMENTS_BY_TRAINING`.
    """
    labels = table["label"].to_numpy()
    parts = contaminate(split_table(labels, seed), share, seed)
    is_anomaly = parts.is_anomaly
    features = table.drop_columns(["label"])
    train, test = features.take(parts.train), features.take(parts.test)
    is_hidden = labels[parts.train] != 0
    contamination = {"as is": 0.0, "declared": share, "auto": "auto"}[training]
    detector, output = train_detector(train, seed, max_time, contamination=contamination)
    calibration = detector.artifact.calibration
    anomaly_scores, statistics = score_stream(detector, test, seed)
    metrics = compute_ranking_metrics(anomaly_scores, is_anomaly)
    line: dict[str, Any] = {
        "share": share,
        "seed": seed,
        "training": training,
        "contaminated": round(float(is_hidden.mean()), 4),
        "calibrated": len(calibration.scores),
        training: metrics | measure_alerts(calibration, statistics, is_anomaly),
    }
    if training == "as is" and share > 0:
        trimmed = Calibration.from_statistics(trim_largest(calibration.scores, share), calibration.arrival_order)
        line["trimmed"] = metrics | measure_alerts(trimmed, statistics, is_anomaly)
    if training == "auto":
        rows = output.data.select_rows(Split.CALIBRATION)
        _, calibration_statistics = score_stream(detector, train.take(rows), seed)
        is_confirmed = confirm_anomalies(calibration_statistics, is_hidden[rows])
        reviewed = Calibration.from_statistics(calibration_statistics[~is_confirmed], calibration.arrival_order)
        line["reviewed"] = metrics | measure_alerts(reviewed, statistics, is_anomaly)
    if training != "as is":
        is_left_out = output.data.split == Split.LEFT_OUT
        line["left out"] = {
            "anomalies": int(is_left_out[is_hidden].sum()),
            "normals": int(is_left_out[~is_hidden].sum()),
        }
    else:
        matrix = np.column_stack([column.to_numpy() for column in features.columns]).astype(np.float64)
        peer_scores = score_by_peers(matrix[parts.train], matrix[parts.test], seed)
        line |= {name: compute_ranking_metrics(peer_scores[name], is_anomaly) for name in NAME_BY_PEER}
    return line


def confirm_anomalies(statistics: Floats, is_anomaly: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which calibration records are anomalies among the `NUM_REVIEWED` with the largest statistics."""
    is_confirmed = np.zeros(len(statistics), bool)
    reviewed = np.argsort(-statistics, kind="stable")[:NUM_REVIEWED]
    is_confirmed[reviewed] = is_anomaly[reviewed]
    return is_confirmed


def _format_rows(line: dict[str, Any]) -> list[list[str]]:
    """Return the rows of a table, share and seed: one for each treatment and one for each other method."""
    first_cells = [line["table"], f"{line['contaminated']:.1%}", str(line["seed"])]
    rows = []
    for name in (name for name in (*TREATMENTS, *NAME_BY_PEER) if name in line):
        figures = line[name]
        alerts_by_alpha = [figures.get(f"{alpha:g}", {}) for alpha in ALPHAS]
        alert_cells = [
            f"{alerts[key]:.1%}" if alerts else "" for alerts in alerts_by_alpha for key in ("false alarms", "detected")
        ]
        metrics = [f"{figures['auroc']:.3f}", f"{figures['aupr']:.3f}"]
        rows.append([*first_cells, NAME_BY_PEER.get(name, name), *metrics, *alert_cells])
    return rows


def format_results(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the measurements."""
    alert_titles = [f"{key} at α = {alpha:.0%}" for alpha in ALPHAS for key in ("false alarms", "detected")]
    titles = ["table", "anomalies in training", "seed", "treatment", "AUROC", "AUPR", *alert_titles]
    rows = (format_markdown_row(row) for line in lines for row in _format_rows(line))
    return "\n".join([*format_markdown_header(titles), *rows])


def join_trainings(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the measurements with one line for each table, share and seed, in this order, with all treatments."""
    joined: dict[tuple[str, float, int], dict[str, Any]] = {}
    for line in sorted(lines, key=lambda line: list(TREATMENTS_BY_TRAINING).index(line["training"])):
        joined.setdefault((line["table"].lower(), line["share"], line["seed"]), {}).update(line)
    return [joined[key] for key in sorted(joined)]


def average_by_share(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each requested share, the means over tables and seeds as a line like those of the tables."""
    lines_by_share: dict[float, list[dict[str, Any]]] = {}
    for line in lines:
        lines_by_share.setdefault(line["share"], []).append(line)
    averages = []
    for share, similar in lines_by_share.items():
        means = {
            name: _average([line[name] for line in similar])
            for name in (*TREATMENTS, *NAME_BY_PEER)
            if all(name in line for line in similar)
        }
        averages.append({"table": "mean", "contaminated": share, "seed": ""} | means)
    return averages


def _average(figures: list[Any]) -> Any:
    """Return the mean of numbers, or entry by entry the mean of dictionaries with the same keys."""
    if isinstance(figures[0], dict):
        return {key: _average([entry[key] for entry in figures]) for key in figures[0]}
    return float(np.mean(figures))


def parse_shares(text: str) -> list[float]:
    """Return the shares of the option --shares."""
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        shares = [-1.0]
    if not all(0 <= share < 0.5 for share in shares):
        raise ConfigError(f"--shares {text}: expected comma-separated numbers, at least 0 and below 0.5")
    return shares


def parse_treatments(text: str) -> list[str]:
    """Return the training runs of the option --treatments, all if it is empty."""
    trainings = text.split(",") if text else list(TREATMENTS_BY_TRAINING)
    if unknown := set(trainings) - set(TREATMENTS_BY_TRAINING):
        expected = ", ".join(f'"{name}"' for name in TREATMENTS_BY_TRAINING)
        raise ConfigError(f"--treatments {text}: {sorted(unknown)[0]!r} is none of {expected}")
    return trainings


def run(arguments: argparse.Namespace) -> None:
    """Measure all requested tables and publish the results."""
    require_scikit_learn()
    store = ResultStore("contamination", {"max_time": arguments.max_time}, arguments.again)
    path_by_name, shares = find_tables(arguments.tables), parse_shares(arguments.shares)
    seeds, trainings = parse_seeds(arguments.seeds), parse_treatments(arguments.treatments)
    # The seeds one after another, so that an interrupted run has measured all tables with the first seeds.
    for seed in seeds:
        for name, path in path_by_name.items():
            missing = [
                (share, training)
                for share in shares
                for training in trainings
                if (share > 0 or training != "declared")
                and not store.find(table=name, share=share, seed=seed, training=training)
            ]
            table = pq.read_table(path) if missing else None
            for share, training in missing:
                assert table is not None
                line = {"table": name, "machine": describe_machine(), "date": format_today()}
                line |= measure_table(table, share, seed, arguments.max_time, training)
                print(json.dumps(store.add(line)), flush=True)
    # Without measurements that a run with other seeds, tables, shares or treatments has stored.
    requested = [
        line
        for line in store.lines
        if line["table"] in path_by_name
        and line["share"] in shares
        and line["seed"] in seeds
        and line["training"] in trainings
    ]
    machines = "; ".join(sorted({f"{line['machine']}, {line['date']}" for line in requested}))
    lines = join_trainings(requested)
    conditions = (
        f"{machines}. Each training run takes at most {arguments.max_time}. Means are by the requested share, which "
        "tables with few anomalies do not reach."
    )
    text = (
        f"# Contaminated training data\n\n{conditions}\n\n"
        f"{format_results(average_by_share(lines))}\n\n{format_results(lines)}\n"
    )
    publish_results("contamination", text)


def main() -> None:
    """Run the program."""
    options = add_again_option(build_parser(__doc__, seeds="0", max_time="45s"))
    shares_help = "comma-separated shares of anomalies among the training records; 0,0.01,0.05,0.1 by default"
    names = ", ".join(f'"{name}"' for name in TREATMENTS_BY_TRAINING)
    options.add_argument("--treatments", default="", help=f"comma-separated, of {names}; all by default")
    options.add_argument("--shares", default="0,0.01,0.05,0.1", help=shares_help)
    run_benchmark("contamination", run, options)


if __name__ == "__main__":
    main()
