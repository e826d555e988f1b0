"""Anomaly ranking and early alerts on the public tables of ADBench, compared with other detectors.

    python -m benchmarks.tables --tables cardio,pendigits --seeds 0,1 --max-time 45s            (make bench-quality)

The protocol is that of ADBench (Han et al., arXiv 2206.09426) with clean splits. Rows are shuffled. Half of the normal
rows train and calibrate a model, all other rows test it. The same recipe trains every table; only the size of the model
depends on the number of rows (`choose_preset`). The readings of each test record arrive in a random order, and the
engine's `anomaly_score` ranks the records.

Other detectors run on the same rows, standardised by the training rows: Isolation Forest, the mean distance to the five
nearest neighbours, ECOD (Li et al., arXiv 2201.00382), the local outlier factor, and Gaussian mixtures with full
covariances, of which BIC chooses 1 to 10 components. If there are enough calibration records for α, the number of false
alarms, the detected anomalies and the share of features seen at the alert are reported as well.

The tables are read from the folder `adbench/` in DEFORMER_DATA: files NAME.parquet with numeric columns, in which the
column `label` is 1 for anomalies.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.command import build_parser, describe_machine, format_today, publish_results, run_benchmark
from deformer_stream import Detector, load
from deformer_stream.demo.report import bound_false_alarms
from deformer_stream.errors import ConfigError, InputError
from trainer.job import TrainingOutput, train
from trainer.settings import Preset, TrainConfig

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

ROOT = Path(__file__).parents[1]

ALPHA = 0.01
"""False-alarm rate of the alerts."""

NUM_NEIGHBOURS = 5
"""Neighbours of the nearest-neighbour detector, as in the DTE paper's comparison."""

RECORDS_PER_BATCH = 2000
"""Records that the engine receives in one batch."""

NAME_BY_METHOD = {
    "ours": "ours",
    "forest": "Isolation Forest",
    "neighbours": f"{NUM_NEIGHBOURS}-NN",
    "ecod": "ECOD",
    "lof": "LOF",
    "mixture": "GMM",
}
"""Column titles by the keys of the JSON lines."""

PEERS = tuple(NAME_BY_METHOD)[1:]
"""Keys of the other detectors."""

MAX_COMPONENTS = 10
"""Largest number of components among which BIC chooses."""

NUM_LOF_NEIGHBOURS = 20
"""Neighbours of the local outlier factor, scikit-learn's default."""


@dataclass(frozen=True, slots=True)
class TableSplit:
    """The split of a table into training and test rows.

    Attributes:
        train: (N,) row numbers of the training rows, which are all normal.
        test: (M,) row numbers of the test rows: the other normal rows, then all anomalies.
        is_anomaly: (M,) whether each test row is an anomaly.
    """

    train: Ints
    test: Ints
    is_anomaly: Bools


def split_table(labels: NDArray[Any], seed: int) -> TableSplit:
    """Shuffle the rows and take the first half of the normal ones, rounded down, for training.

    Args:
        labels: (R,) one label per row, 0 for normal rows.
        seed: Seed of the shuffle.
    """
    order = np.random.default_rng(seed).permutation(len(labels))
    is_anomaly = np.asarray(labels)[order] != 0
    normals, anomalies = order[~is_anomaly], order[is_anomaly]
    half = len(normals) // 2
    test = np.concatenate([normals[half:], anomalies])
    return TableSplit(normals[:half], test, np.arange(len(test)) >= len(normals) - half)


@dataclass(frozen=True, slots=True)
class AlertSummary:
    """Alerts on test records at one α. The attribute names are keys of the JSON lines.

    Attributes:
        alarms: Number of normal records that raised an alert.
        normals: Number of normal records.
        bound: The number of false alarms that is exceeded with a probability of at most 1%.
        detected: Share of the anomalies that raised an alert.
        seen: Mean share of the features that had arrived at the alerts on anomalies, None without such alerts.
    """

    alarms: int
    normals: int
    bound: int
    detected: float
    seen: float | None


def summarise_alerts(
    alert_seq: NDArray[np.integer], is_anomaly: Bools, num_features: int, num_calibration: int, alpha: float
) -> AlertSummary:
    """Count the alerts on normal records and on anomalies.

    Args:
        alert_seq: (M,) index of the reading that raised each record's alert, from 0; −1 for records without an alert.
        is_anomaly: (M,) whether each record is an anomaly.
        num_features: Number of features of a record.
        num_calibration: Number of calibration records, which determines the bound of false alarms.
        alpha: The false-alarm rate of the alerts.
    """
    has_alert = alert_seq >= 0
    detected_seq = alert_seq[has_alert & is_anomaly]
    num_normals = int((~is_anomaly).sum())
    return AlertSummary(
        alarms=int((has_alert & ~is_anomaly).sum()),
        normals=num_normals,
        bound=bound_false_alarms(alpha, num_calibration, num_normals),
        detected=len(detected_seq) / max(int(is_anomaly.sum()), 1),
        seen=float((detected_seq + 1).mean() / num_features) if len(detected_seq) else None,
    )


def choose_preset(num_rows: int) -> Preset:
    """Return the size of the model for this number of training rows, the only choice that depends on the table."""
    return "tiny" if num_rows < 50_000 else "small"


def compute_ranking_metrics(scores: Floats, is_anomaly: Bools) -> dict[str, float]:
    """Return the area under the ROC curve and the average precision of scores, of which larger is more anomalous."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    return {
        "auroc": float(roc_auc_score(is_anomaly, scores)),
        "aupr": float(average_precision_score(is_anomaly, scores)),
    }


def score_by_peers(
    train_rows: Floats, test_rows: Floats, seed: int, names: Collection[str] = PEERS
) -> dict[str, Floats]:
    """Return the scores of the test rows by other detectors, larger is more anomalous.

    Args:
        train_rows: (N, F) normal rows.
        test_rows: (M, F) rows to score.
        seed: Seed of the detectors with random parts.
        names: The detectors, some of `PEERS`; all by default.
    """
    from sklearn.ensemble import IsolationForest
    from sklearn.neighbors import LocalOutlierFactor, NearestNeighbors
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(train_rows)
    train_z, test_z = scaler.transform(train_rows), scaler.transform(test_rows)

    def score_by_forest() -> Floats:
        return np.asarray(-IsolationForest(random_state=seed).fit(train_z).score_samples(test_z))

    def score_by_neighbours() -> Floats:
        distances, _ = NearestNeighbors(n_neighbors=NUM_NEIGHBOURS).fit(train_z).kneighbors(test_z)
        return np.asarray(distances.mean(1))

    def score_by_lof() -> Floats:
        num_neighbours = min(NUM_LOF_NEIGHBOURS, len(train_z) - 1)
        return np.asarray(-LocalOutlierFactor(num_neighbours, novelty=True).fit(train_z).score_samples(test_z))

    score_by_name: dict[str, Callable[[], Floats]] = {
        "forest": score_by_forest,
        "neighbours": score_by_neighbours,
        "ecod": lambda: compute_ecod_scores(train_z, test_z),
        "lof": score_by_lof,
        "mixture": lambda: score_by_gaussian_mixture(train_z, test_z, seed),
    }
    return {name: score() for name, score in score_by_name.items() if name in names}


def compute_ecod_scores(train_rows: Floats, test_rows: Floats) -> Floats:
    """Return the ECOD scores of the test rows, larger is more anomalous.

    A score is a sum over features of −ln of an empirical tail probability. It is the largest of three sums: over left
    tails, over right tails, and over the tail on the side to which each feature is skewed. The empirical distribution
    is that of the training rows.
    """
    sorted_rows, num_rows = np.sort(train_rows, 0), len(train_rows)
    terms = []
    for f in range(train_rows.shape[1]):
        column, test_column = sorted_rows[:, f], test_rows[:, f]
        left = (np.searchsorted(column, test_column, "right") + 1) / (num_rows + 1)
        right = (num_rows - np.searchsorted(column, test_column, "left") + 1) / (num_rows + 1)
        is_skewed_left = float(((train_rows[:, f] - train_rows[:, f].mean()) ** 3).mean()) < 0
        terms.append(np.stack([-np.log(left), -np.log(right), -np.log(left if is_skewed_left else right)]))
    scores: Floats = np.sum(terms, 0).max(0)
    return scores


def score_by_gaussian_mixture(train_rows: Floats, test_rows: Floats, seed: int) -> Floats:
    """Return the negative log-likelihoods of the test rows under a Gaussian mixture chosen by BIC."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    num_rows, num_features = train_rows.shape
    candidates = [k for k in range(1, MAX_COMPONENTS + 1) if k == 1 or k * num_features <= num_rows]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        mixtures = [GaussianMixture(k, random_state=seed, reg_covar=1e-4).fit(train_rows) for k in candidates]
    best = min(mixtures, key=lambda mixture: float(mixture.bic(train_rows)))
    return np.asarray(-best.score_samples(test_rows))


def train_detector(
    rows: pa.Table, seed: int, max_time: str, output_dir: Path | None = None, **options: Any
) -> tuple[Detector, TrainingOutput]:
    """Train on normal records as `deformer-train` does.

    Args:
        rows: A wide table of normal records without the label.
        seed: Seed of the training run.
        max_time: Largest duration of the run, for example "45s".
        output_dir: Where the model directory is written; a temporary folder if None.
        options: Further options of the training run, or another preset than that of `choose_preset`.
    """
    options = {"preset": choose_preset(len(rows)), **options}
    with tempfile.TemporaryDirectory() as folder:
        source, model_dir = Path(folder) / "normal.parquet", output_dir or Path(folder) / "model"
        pq.write_table(rows, source)
        config = TrainConfig(out=model_dir, max_time=max_time, seed=seed, **options)  # type: ignore[arg-type]
        result = train([source], config)
        return load(model_dir), result


def iterate_in_random_orders(detector: Detector, rows: pa.Table, seed: int) -> Iterator[list[dict[str, Any]]]:
    """Yield batches of the rows as records, the readings of each in a random order of its own."""
    rng = np.random.default_rng([seed, 0x0DE5])
    # Columns that were constant in training are not features of the model.
    known = [name for name in rows.column_names if name in detector.schema.names]
    for start in range(0, len(rows), RECORDS_PER_BATCH):
        batch = rows.slice(start, RECORDS_PER_BATCH).select(known).to_pylist()
        yield [{known[k]: row[known[k]] for k in rng.permutation(len(known)).tolist()} for row in batch]


def score_stream(detector: Detector, rows: pa.Table, seed: int) -> tuple[Floats, Ints]:
    """Score rows as records whose readings arrive in random orders.

    Returns:
        The `anomaly_score` of each of M records, (M,), and the index of the reading that raised its alert, (M,), −1
        without an alert.
    """
    scores, alert_seqs = [], []
    for records in iterate_in_random_orders(detector, rows, seed):
        result = detector.score(records, ALPHA, order="arrival")
        scores.append(result.anomaly_score)
        alert_seqs.append(result.alert_seq.astype(np.int64))
    return np.concatenate(scores), np.concatenate(alert_seqs)


def measure_table(table: pa.Table, seed: int, max_time: str) -> dict[str, Any]:
    """Train and test on one table with one seed, and return the run's part of the JSON line."""
    parts = split_table(table["label"].to_numpy(), seed)
    features = table.drop_columns(["label"])
    detector, result = train_detector(features.take(parts.train), seed, max_time)
    scores, alert_seq = score_stream(detector, features.take(parts.test), seed)
    matrix = np.column_stack([column.to_numpy() for column in features.columns]).astype(np.float64)
    scores_by_method = {"ours": scores} | score_by_peers(matrix[parts.train], matrix[parts.test], seed)
    run: dict[str, Any] = {
        "seed": seed,
        "preset": choose_preset(len(parts.train)),
        "steps": result.training_result.steps,
        "calibrated": len(result.calibration.scores),
    }
    for method, method_scores in scores_by_method.items():
        run[method] = compute_ranking_metrics(method_scores, parts.is_anomaly)
    run["early"] = None
    if result.calibration.min_p_value <= ALPHA:
        alerts = summarise_alerts(alert_seq, parts.is_anomaly, len(detector.schema), run["calibrated"], ALPHA)
        run["early"] = {name: getattr(alerts, name) for name in alerts.__slots__}
    return run


def summarise_table(name: str, table: pa.Table, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON line of a table: the mean of each figure over the seeds, and the runs."""
    line: dict[str, Any] = {
        "table": name,
        "records": len(table),
        "features": table.num_columns - 1,
        "anomalies": int((table["label"].to_numpy() != 0).sum()),
    }
    for method in NAME_BY_METHOD:
        line[method] = {
            metric: round(float(np.mean([run[method][metric] for run in runs])), 4) for metric in ("auroc", "aupr")
        }
    return line | {"runs": runs}


def format_mean(values: Sequence[float], digits: int, sign: str = "") -> str:
    """Return mean and standard deviation, such as "0.81 ± 0.02"; `sign` is "+" to show the sign of a positive mean."""
    return f"{np.mean(values):{sign}.{digits}f} ± {np.std(values):.{digits}f}"


def format_markdown_row(cells: list[str]) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def format_markdown_header(titles: list[str]) -> list[str]:
    """Return the two header lines of a Markdown table with these column titles."""
    return [format_markdown_row(titles), "|" + "---|" * len(titles)]


def format_ranking_table(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table with AUROC and AUPR of each table and method, and their means."""
    columns = [(metric, method) for metric in ("auroc", "aupr") for method in NAME_BY_METHOD]
    titles = [f"{metric.upper()} {NAME_BY_METHOD[method]}" for metric, method in columns]
    text = format_markdown_header(["table", "features", "preset", *titles])
    for line in lines:
        figures = [f"{line[method][metric]:.3f}" for metric, method in columns]
        text.append(format_markdown_row([line["table"], str(line["features"]), line["runs"][0]["preset"], *figures]))
    means = [f"{np.mean([line[method][metric] for line in lines]):.3f}" for metric, method in columns]
    return "\n".join([*text, format_markdown_row(["**mean**", "", "", *means])])


def format_alert_table(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the alerts on each table and seed."""
    text = format_markdown_header(
        [
            "table",
            "seed",
            "calibration records",
            "normal records with alert",
            "99% bound",
            "anomalies with alert",
            "features seen at the alert",
        ]
    )
    for line in lines:
        for run in line["runs"]:
            alerts, first_cells = run["early"], [line["table"], str(run["seed"]), str(run["calibrated"])]
            if alerts is None:
                text.append(format_markdown_row([*first_cells, "too few calibration records", "", "", ""]))
                continue
            num_alarms, num_normals = alerts["alarms"], alerts["normals"]
            alarms = f"{num_alarms} of {num_normals} ({100 * num_alarms / num_normals:.1f}%)"
            detected = f"{100 * alerts['detected']:.0f}%"
            seen = "" if alerts["seen"] is None else f"{100 * alerts['seen']:.0f}%"
            text.append(format_markdown_row([*first_cells, alarms, str(alerts["bound"]), detected, seen]))
    return "\n".join(text)


def get_tables_folder() -> Path:
    """Return the folder of the tables, `adbench/` in DEFORMER_DATA."""
    return Path(os.environ.get("DEFORMER_DATA", ROOT.parent / "shared" / "data")) / "adbench"


def find_tables(requested: str) -> dict[str, Path]:
    """Return the files of the requested tables by name.

    Args:
        requested: Comma-separated names; empty for all tables.

    Raises:
        InputError: There are no tables.
        ConfigError: A requested table does not exist.
    """
    folder = get_tables_folder()
    path_by_name = {path.stem: path for path in sorted(folder.glob("*.parquet"), key=lambda path: path.stem.lower())}
    if not path_by_name:
        raise InputError(f"no tables in {folder}: set DEFORMER_DATA to the folder that contains adbench/")
    names = [name.strip() for name in requested.split(",") if name.strip()] or list(path_by_name)
    unknown = [name for name in names if name not in path_by_name]
    if unknown:
        available = ", ".join(path_by_name)
        raise ConfigError(f"--tables {unknown[0]}: there is no such table in {folder}; available are {available}")
    return {name: path_by_name[name] for name in names}


def require_scikit_learn() -> None:
    """Raise a `ConfigError` if scikit-learn, which contains the other detectors, is not installed."""
    try:
        import sklearn  # noqa: F401
    except ImportError:
        raise ConfigError(
            "scikit-learn is not installed: run make bench-quality, or pip install -c constraints.txt -e '.[bench]'"
        ) from None


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of the option --seeds."""
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds {text}: expected comma-separated whole numbers, for example 0,1,2") from None


def run(arguments: argparse.Namespace) -> None:
    """Measure all requested tables and publish the results."""
    require_scikit_learn()
    seeds = parse_seeds(arguments.seeds)
    lines = []
    for name, path in find_tables(arguments.tables).items():
        table = pq.read_table(path)
        runs = [measure_table(table, seed, arguments.max_time) for seed in seeds]
        lines.append(summarise_table(name, table, runs))
        print(json.dumps(lines[-1]), flush=True)
    conditions = (
        f"{describe_machine()}, {format_today()}; {len(lines)} tables, seeds {arguments.seeds}. Each training run "
        f"takes at most {arguments.max_time} including calibration. Figures are means over the seeds."
    )
    text = (
        f"# Tables\n\n{conditions}\n\n## Ranking of complete records\n\n{format_ranking_table(lines)}\n\n"
        f"## Alerts at α = {ALPHA:.0%}\n\nReadings arrive in random order. The last column is the mean share of the "
        f"features that had arrived at the alerts on anomalies.\n\n{format_alert_table(lines)}\n"
    )
    publish_results("tables", text, lines)


def main() -> None:
    """Run the program."""
    run_benchmark("tables", run, build_parser(__doc__, seeds="0,1", max_time="45s"))


if __name__ == "__main__":
    main()
