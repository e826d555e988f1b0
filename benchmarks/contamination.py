"""What unlabelled anomalies among the training records cost, and what trimming brings back.

    python -m benchmarks.contamination --tables cardio,thyroid --shares 0,0.01,0.05,0.1 --max-time 45s

Splits, presets and streams are those of `benchmarks.tables`; only, of the training records a share is replaced by
anomalies, which then do not test. Three ways to deal with them:

    as is      the records are taken for normal
    trimmed    calibration leaves out the most surprising records, as many as the share
    told       deformer-train --contamination SHARE, which also leaves as many out of training, the farthest from others

Beside, in the same run and on the same rows: Isolation Forest and the mean distance to the five nearest neighbours,
which are not told the share. Printed are AUROC and AUPR of whole records, and at each α the shares of normals and of
anomalies that alert.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.command import launch, machine, parser, publish, today
from benchmarks.tables import (
    Split,
    find_tables,
    in_random_orders,
    learn,
    markdown_head,
    markdown_row,
    need_peers,
    peers,
    ranking,
    seeds_of,
    split,
)
from deformer_stream import Detector
from deformer_stream.calibration.conformal import Calibration, trim_largest
from deformer_stream.errors import ConfigError

Floats = NDArray[np.float64]
ALPHAS = (0.05, 0.01)
WAYS = ("as is", "trimmed", "told")
BESIDE = {"forest": "Isolation Forest", "neighbours": "5-NN"}


def contaminated(parts: Split, share: float, seed: int) -> Split:
    """Put test anomalies in the place of training normals, so that they are the share of the training records, as far
    as half of the anomalies go."""
    anomalies = parts.test[parts.anomaly]
    count = min(round(share * len(parts.train)), len(anomalies) // 2)
    chosen = np.random.default_rng([seed, 0xC0]).permutation(len(anomalies))[:count]
    train = np.concatenate([parts.train[: len(parts.train) - count], anomalies[chosen]])
    rest = np.delete(anomalies, chosen)
    test = np.concatenate([parts.test[~parts.anomaly], rest])
    return Split(train, test, np.arange(len(test)) >= len(test) - len(rest))


def judged(calibration: Calibration, statistics: Floats, anomaly: NDArray[np.bool_]) -> dict[str, dict[str, float]]:
    """By α: shares of normals and of anomalies that alert."""
    p = calibration.compute_pooled_p_values(statistics)
    return {
        f"{alpha:g}": {
            "false alarms": round(float((p[~anomaly] <= alpha).mean()), 4),
            "detected": round(float((p[anomaly] <= alpha).mean()), 4),
        }
        for alpha in ALPHAS
    }


def streamed(detector: Detector, rows: pa.Table, seed: int) -> tuple[Floats, Floats]:
    """`anomaly_score` and the alert's statistic, each (M,), of records in a random order each."""
    found = [detector.score(records) for records in in_random_orders(detector, rows, seed)]
    return np.concatenate([f.anomaly_score for f in found]), np.concatenate([f.score for f in found])


def measure(table: pa.Table, share: float, seed: int, max_time: str) -> dict[str, Any]:
    """One table, one share, one seed, all ways."""
    parts = contaminated(split(table["label"].to_numpy(), seed), share, seed)
    features = table.drop_columns(["label"])
    train, test = features.take(parts.train), features.take(parts.test)
    found = float((table["label"].to_numpy()[parts.train] != 0).mean())
    row: dict[str, Any] = {"share": share, "seed": seed, "contaminated": round(found, 4)}
    plain = learn(train, seed, max_time)[0]
    row["calibrated"] = len(plain.artifact.calibration.scores)
    calibration, (ranks, statistics) = plain.artifact.calibration, streamed(plain, test, seed)
    ranked = ranking(ranks, parts.anomaly)
    row["as is"] = ranked | judged(calibration, statistics, parts.anomaly)
    if share > 0:
        without = Calibration.from_statistics(trim_largest(calibration.scores, share), calibration.arrival_order)
        row["trimmed"] = ranked | judged(without, statistics, parts.anomaly)
        told = learn(train, seed, max_time, contamination=share)[0]
        ranks, statistics = streamed(told, test, seed)
        row["told"] = ranking(ranks, parts.anomaly) | judged(told.artifact.calibration, statistics, parts.anomaly)
    matrix = np.column_stack([column.to_numpy() for column in features.columns]).astype(np.float64)
    others = peers(matrix[parts.train], matrix[parts.test], seed)
    return row | {name: ranking(others[name], parts.anomaly) for name in BESIDE}


def _figures(line: dict[str, Any]) -> list[list[str]]:
    """Rows of the report: one for each way and peer."""
    first = [line["table"], f"{line['contaminated']:.1%}", str(line["seed"])]
    rows = []
    for name in (*(way for way in WAYS if way in line), *BESIDE):
        of = line[name]
        worth = [of.get(f"{alpha:g}", {}) for alpha in ALPHAS]
        alerts = [f"{at[what]:.1%}" if at else "" for at in worth for what in ("false alarms", "detected")]
        rows.append([*first, BESIDE.get(name, name), f"{of['auroc']:.3f}", f"{of['aupr']:.3f}", *alerts])
    return rows


def report(lines: list[dict[str, Any]]) -> str:
    alerts = [f"{what} at {a:.0%}" for a in ALPHAS for what in ("false alarms", "detected")]
    head = ["table", "anomalies in training", "seed", "way", "AUROC", "AUPR", *alerts]
    rows = (markdown_row(row) for line in lines for row in _figures(line))
    return "\n".join([*markdown_head(head), *rows])


def means(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each share asked for, the means over tables and seeds, as a line like theirs."""
    by_share: dict[float, list[dict[str, Any]]] = {}
    for line in lines:
        by_share.setdefault(line["share"], []).append(line)
    ways = (*WAYS, *BESIDE)
    return [
        {"table": "mean", "contaminated": share, "seed": ""} | _mean([{w: a[w] for w in ways if w in a} for a in alike])
        for share, alike in by_share.items()
    ]


def _mean(figures: list[Any]) -> Any:
    """Of numbers, or entry by entry of dictionaries of the same shape."""
    if isinstance(figures[0], dict):
        return {key: _mean([one[key] for one in figures]) for key in figures[0]}
    return float(np.mean(figures))


def shares_of(text: str) -> list[float]:
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        shares = [-1.0]
    if not all(0 <= share < 0.5 for share in shares):
        raise ConfigError(f"--shares {text}: numbers from 0 to below 0.5 with commas between")
    return shares


def run(arguments: argparse.Namespace) -> None:
    need_peers()
    lines = []
    for name, path in find_tables(arguments.tables).items():
        table = pq.read_table(path)
        for share in shares_of(arguments.shares):
            for seed in seeds_of(arguments.seeds):
                lines.append({"table": name} | measure(table, share, seed, arguments.max_time))
                print(json.dumps(lines[-1]), flush=True)
    when = f"{machine()}, {today()}; at most {arguments.max_time} of training each way."
    when += " The means are by the share asked for, which a table with few anomalies does not reach."
    text = f"# Contaminated training data\n\n{when}\n\n{report(means(lines))}\n\n{report(lines)}\n"
    publish("contamination", text, lines)


def main() -> None:
    options = parser(__doc__, seeds="0", max_time="45s")
    options.add_argument("--shares", default="0,0.01,0.05,0.1", help="of anomalies; 0,0.01,0.05,0.1 by default")
    launch("contamination", run, options)


if __name__ == "__main__":
    main()
