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

TREATMENTS = ("as is", "trimmed", "declared", "auto", "reviewed")
"""Ways to deal with the anomalies; keys of the JSON lines."""

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
    results = [detector.score(records) for records in iterate_in_random_orders(detector, rows, seed)]
    anomaly_scores = np.concatenate([result.anomaly_score for result in results])
    return anomaly_scores, np.concatenate([result.score for result in results])


def measure_table(table: pa.Table, share: float, seed: int, max_time: str) -> dict[str, Any]:
    """Measure all treatments on one table with one share of anomalies and one seed."""
    labels = table["label"].to_numpy()
    parts = contaminate(split_table(labels, seed), share, seed)
    is_anomaly = parts.is_anomaly
    features = table.drop_columns(["label"])
    train, test = features.take(parts.train), features.take(parts.test)
    actual_share = float((labels[parts.train] != 0).mean())
    plain_detector = train_detector(train, seed, max_time)[0]
    calibration = plain_detector.artifact.calibration
    anomaly_scores, statistics = score_stream(plain_detector, test, seed)
    metrics = compute_ranking_metrics(anomaly_scores, is_anomaly)
    line: dict[str, Any] = {
        "share": share,
        "seed": seed,
        "contaminated": round(actual_share, 4),
        "calibrated": len(calibration.scores),
        "as is": metrics | measure_alerts(calibration, statistics, is_anomaly),
    }
    if share > 0:
        trimmed = Calibration.from_statistics(trim_largest(calibration.scores, share), calibration.arrival_order)
        line["trimmed"] = metrics | measure_alerts(trimmed, statistics, is_anomaly)
        informed_detector = train_detector(train, seed, max_time, contamination=share)[0]
        anomaly_scores, statistics = score_stream(informed_detector, test, seed)
        alerts = measure_alerts(informed_detector.artifact.calibration, statistics, is_anomaly)
        line["declared"] = compute_ranking_metrics(anomaly_scores, is_anomaly) | alerts
    line |= _measure_auto(features, labels, parts, seed, max_time)
    matrix = np.column_stack([column.to_numpy() for column in features.columns]).astype(np.float64)
    peer_scores = score_by_peers(matrix[parts.train], matrix[parts.test], seed)
    return line | {name: compute_ranking_metrics(peer_scores[name], is_anomaly) for name in NAME_BY_PEER}


def _measure_auto(
    features: pa.Table, labels: NDArray[Any], parts: TableSplit, seed: int, max_time: str
) -> dict[str, Any]:
    """Measure `--contamination auto`, as it is and with a reviewed calibration, on one table."""
    train, test = features.take(parts.train), features.take(parts.test)
    detector, output = train_detector(train, seed, max_time, contamination="auto")
    is_hidden = labels[parts.train] != 0
    anomaly_scores, statistics = score_stream(detector, test, seed)
    metrics = compute_ranking_metrics(anomaly_scores, parts.is_anomaly)
    calibration = detector.artifact.calibration
    rows = output.data.select_rows(Split.CALIBRATION)
    _, calibration_statistics = score_stream(detector, train.take(rows), seed)
    is_confirmed = confirm_anomalies(calibration_statistics, is_hidden[rows])
    reviewed = Calibration.from_statistics(calibration_statistics[~is_confirmed], calibration.arrival_order)
    is_left_out = output.data.split == Split.LEFT_OUT
    return {
        "left out": {"anomalies": int(is_left_out[is_hidden].sum()), "normals": int(is_left_out[~is_hidden].sum())},
        "auto": metrics | measure_alerts(calibration, statistics, parts.is_anomaly),
        "reviewed": metrics | measure_alerts(reviewed, statistics, parts.is_anomaly),
    }


def confirm_anomalies(statistics: Floats, is_anomaly: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which calibration records are anomalies among the `NUM_REVIEWED` with the largest statistics."""
    is_confirmed = np.zeros(len(statistics), bool)
    reviewed = np.argsort(-statistics, kind="stable")[:NUM_REVIEWED]
    is_confirmed[reviewed] = is_anomaly[reviewed]
    return is_confirmed


def _format_rows(line: dict[str, Any]) -> list[list[str]]:
    """Return the rows of one measurement: one for each treatment and one for each other method."""
    first_cells = [line["table"], f"{line['contaminated']:.1%}", str(line["seed"])]
    rows = []
    for name in (*(treatment for treatment in TREATMENTS if treatment in line), *NAME_BY_PEER):
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


def average_by_share(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each requested share, the means over tables and seeds as a line like those of the tables."""
    lines_by_share: dict[float, list[dict[str, Any]]] = {}
    for line in lines:
        lines_by_share.setdefault(line["share"], []).append(line)
    names = (*TREATMENTS, *NAME_BY_PEER)
    averages = []
    for share, similar in lines_by_share.items():
        means = _average([{name: line[name] for name in names if name in line} for line in similar])
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


def run(arguments: argparse.Namespace) -> None:
    """Measure all requested tables and publish the results."""
    require_scikit_learn()
    store = ResultStore("contamination", {"max_time": arguments.max_time}, arguments.again)
    path_by_name, shares = find_tables(arguments.tables), parse_shares(arguments.shares)
    seeds = parse_seeds(arguments.seeds)
    # The seeds one after another, so that an interrupted run has measured all tables with the first seeds.
    for seed in seeds:
        for name, path in path_by_name.items():
            missing = [share for share in shares if not store.find(table=name, share=share, seed=seed)]
            table = pq.read_table(path) if missing else None
            for share in missing:
                assert table is not None
                line = {"table": name, "machine": describe_machine(), "date": format_today()}
                line |= measure_table(table, share, seed, arguments.max_time)
                print(json.dumps(store.add(line)), flush=True)
    # Without measurements that an interrupted run with other seeds, tables or shares has stored.
    requested = [
        line
        for line in store.lines
        if line["table"] in path_by_name and line["share"] in shares and line["seed"] in seeds
    ]
    lines = sorted(requested, key=lambda line: (line["table"].lower(), line["share"], line["seed"]))
    machines = "; ".join(sorted({f"{line['machine']}, {line['date']}" for line in lines}))
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
    options.add_argument("--shares", default="0,0.01,0.05,0.1", help=shares_help)
    run_benchmark("contamination", run, options)


if __name__ == "__main__":
    main()
