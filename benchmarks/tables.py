"""How well whole records are ranked, and how early alerts fall, on the public tables of ADBench, beside peers.

    python -m benchmarks.tables --tables cardio,pendigits --seeds 0,1 --max-time 45s            (make bench-quality)

The protocol of ADBench (Han et al., arXiv 2206.09426) with clean splits: rows are shuffled, half of the normals train
(and calibrate), the others and all anomalies test. One recipe trains every table, `preset_for` chooses the size of the
model. Each test record comes in a random order of its own through the engine; its `anomaly_score` ranks it. Beside, in
the same run and on the same rows, standardised by the training rows: Isolation Forest, the mean distance to the five
nearest neighbours, ECOD (Li et al., arXiv 2201.00382), the local outlier factor, and full-covariance Gaussian mixtures,
as many components as BIC chooses from 1 to 10. Where there are calibration records enough for α, also what the alerts
were worth.

The tables (`NAME.parquet`, numbers, `label` 1 for anomalies) are looked for in `adbench/` under DEFORMER_DATA.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.command import launch, machine, parser, publish, today
from deformer_stream import Detector, load
from deformer_stream.demo.report import false_alarm_bound
from deformer_stream.errors import ConfigError, InputError
from trainer.job import Result, train
from trainer.settings import Preset, TrainConfig

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

ROOT = Path(__file__).parents[1]
ALPHA = 0.01
NEIGHBOURS = 5
AT_ONCE = 2000
"""Records that go to the engine in one batch."""
METHODS = {
    "ours": "ours",
    "forest": "Isolation Forest",
    "neighbours": f"{NEIGHBOURS}-NN",
    "ecod": "ECOD",
    "lof": "LOF",
    "mixture": "GMM",
}
COMPONENTS = 10
LOF_NEIGHBOURS = 20


@dataclass(frozen=True, slots=True)
class Split:
    """Rows of a table. train: (N,) normals. test: (M,) the other normals, then all anomalies. anomaly: (M,) of test."""

    train: Ints
    test: Ints
    anomaly: Bools


def split(labels: NDArray[Any], seed: int) -> Split:
    """Shuffle; the first half of the normals trains, rounded down. labels: (R,), other than 0 for anomalies."""
    order = np.random.default_rng(seed).permutation(len(labels))
    anomaly = np.asarray(labels)[order] != 0
    normals, anomalies = order[~anomaly], order[anomaly]
    half = len(normals) // 2
    test = np.concatenate([normals[half:], anomalies])
    return Split(normals[:half], test, np.arange(len(test)) >= len(normals) - half)


@dataclass(frozen=True, slots=True)
class Early:
    """What alerts at one α were worth. alarms: normals alerted, of `normals`; bound: the most that chance alone allows
    with 99% probability. detected: share of anomalies alerted. seen: mean share of the features seen at the alerts on
    anomalies, None where there were none."""

    alarms: int
    normals: int
    bound: int
    detected: float
    seen: float | None


def early(alert_seq: NDArray[np.integer], anomaly: Bools, features: int, calibrated: int, alpha: float) -> Early:
    """alert_seq: (M,) place of the reading that raised the alert, from 0, −1 where none did; features: of a record."""
    alerted = alert_seq >= 0
    hits = alert_seq[alerted & anomaly]
    return Early(
        alarms=int((alerted & ~anomaly).sum()),
        normals=int((~anomaly).sum()),
        bound=false_alarm_bound(alpha, calibrated, int((~anomaly).sum())),
        detected=len(hits) / max(int(anomaly.sum()), 1),
        seen=float((hits + 1).mean() / features) if len(hits) else None,
    )


def preset_for(rows: int) -> Preset:
    """The size of the model by the rows that train it: the only choice that depends on the table."""
    return "tiny" if rows < 50_000 else "small"


def ranking(scores: Floats, anomaly: Bools) -> dict[str, float]:
    """Area under the ROC curve, and under the precision-recall curve (average precision)."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    return {"auroc": float(roc_auc_score(anomaly, scores)), "aupr": float(average_precision_score(anomaly, scores))}


def peers(train_rows: Floats, test_rows: Floats, seed: int) -> dict[str, Floats]:
    """Scores of test rows by each peer, larger is more anomalous."""
    from sklearn.ensemble import IsolationForest
    from sklearn.neighbors import LocalOutlierFactor, NearestNeighbors
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(train_rows)
    fitted, asked = scaler.transform(train_rows), scaler.transform(test_rows)
    distances, _ = NearestNeighbors(n_neighbors=NEIGHBOURS).fit(fitted).kneighbors(asked)
    forest = IsolationForest(random_state=seed).fit(fitted)
    outlier_factor = LocalOutlierFactor(min(LOF_NEIGHBOURS, len(fitted) - 1), novelty=True).fit(fitted)
    return {
        "forest": -forest.score_samples(asked),
        "neighbours": distances.mean(1),
        "ecod": ecod(fitted, asked),
        "lof": -outlier_factor.score_samples(asked),
        "mixture": gaussian_mixture(fitted, asked, seed),
    }


def ecod(train_rows: Floats, test_rows: Floats) -> Floats:
    """ECOD: Σ −ln of the empirical tail probability of each feature; the largest of left tails, right tails, and the
    tails on the side to which the feature is skewed. The cdf is that of the training rows."""
    order, n = np.sort(train_rows, 0), len(train_rows)
    sides = []
    for f in range(train_rows.shape[1]):
        left = (np.searchsorted(order[:, f], test_rows[:, f], "right") + 1) / (n + 1)
        right = (n - np.searchsorted(order[:, f], test_rows[:, f], "left") + 1) / (n + 1)
        skewed_left = float(((train_rows[:, f] - train_rows[:, f].mean()) ** 3).mean()) < 0
        sides.append(np.stack([-np.log(left), -np.log(right), -np.log(left if skewed_left else right)]))
    score: Floats = np.sum(sides, 0).max(0)
    return score


def gaussian_mixture(train_rows: Floats, test_rows: Floats, seed: int) -> Floats:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        few = [k for k in range(1, COMPONENTS + 1) if k == 1 or k * train_rows.shape[1] <= len(train_rows)]
        fits = [GaussianMixture(k, random_state=seed, reg_covar=1e-4).fit(train_rows) for k in few]
    best = min(fits, key=lambda fit: float(fit.bic(train_rows)))
    return np.asarray(-best.score_samples(test_rows))


def learn(rows: pa.Table, seed: int, max_time: str, keep: Path | None = None, **more: Any) -> tuple[Detector, Result]:
    """Train on normal records as `deformer-train` would. keep: where the model is to stay. more: further options."""
    with tempfile.TemporaryDirectory() as folder:
        source, model = Path(folder) / "normal.parquet", keep or Path(folder) / "model"
        pq.write_table(rows, source)
        settings = TrainConfig(out=model, preset=preset_for(len(rows)), max_time=max_time, seed=seed, **more)  # type: ignore[arg-type]
        result = train([source], settings)
        return load(model), result


def in_random_orders(detector: Detector, rows: pa.Table, seed: int) -> Iterator[list[dict[str, Any]]]:
    """The rows as records, each in an order of its own, batch by batch."""
    rng = np.random.default_rng([seed, 0x0DE5])
    known = [name for name in rows.column_names if name in detector.schema.names]  # constant columns are no features
    for start in range(0, len(rows), AT_ONCE):
        some = rows.slice(start, AT_ONCE).select(known).to_pylist()
        yield [{known[k]: row[known[k]] for k in rng.permutation(len(known)).tolist()} for row in some]


def stream(detector: Detector, rows: pa.Table, seed: int) -> tuple[Floats, Ints]:
    """`anomaly_score` (M,) and the place of the alert (M,), −1 for none, of records in a random order each."""
    scores, places = [], []
    for records in in_random_orders(detector, rows, seed):
        found = detector.score(records, ALPHA)
        scores.append(found.anomaly_score)
        places.append(found.alert_seq.astype(np.int64))
    return np.concatenate(scores), np.concatenate(places)


def measure(table: pa.Table, seed: int, max_time: str) -> dict[str, Any]:
    """One table, one seed."""
    parts = split(table["label"].to_numpy(), seed)
    features = table.drop_columns(["label"])
    detector, result = learn(features.take(parts.train), seed, max_time)
    scores, places = stream(detector, features.take(parts.test), seed)
    matrix = np.column_stack([column.to_numpy() for column in features.columns]).astype(np.float64)
    ranked = {"ours": scores} | peers(matrix[parts.train], matrix[parts.test], seed)
    row: dict[str, Any] = {"seed": seed, "preset": preset_for(len(parts.train)), "steps": result.fitted.steps}
    row["calibrated"] = len(result.calibration.scores)
    row |= {method: ranking(of, parts.anomaly) for method, of in ranked.items()}
    within_reach = result.calibration.min_p_value <= ALPHA
    worth = early(places, parts.anomaly, len(detector.schema), row["calibrated"], ALPHA)
    row["early"] = {k: getattr(worth, k) for k in worth.__slots__} if within_reach else None
    return row


def summary(name: str, table: pa.Table, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One table over its seeds: means, and the runs they are of."""
    line: dict[str, Any] = {"table": name, "records": len(table), "features": table.num_columns - 1}
    line["anomalies"] = int((table["label"].to_numpy() != 0).sum())
    for method in METHODS:
        line[method] = {k: round(float(np.mean([r[method][k] for r in runs])), 4) for k in ("auroc", "aupr")}
    return line | {"runs": runs}


def markdown_row(cells: list[str]) -> str:
    """A row of a table in Markdown."""
    return "| " + " | ".join(cells) + " |"


def markdown_head(cells: list[str]) -> list[str]:
    """The names of its columns, and the line under them."""
    return [markdown_row(cells), "|" + "---|" * len(cells)]


def ranking_table(lines: list[dict[str, Any]]) -> str:
    text = markdown_head(
        ["table", "features", "preset", *(f"{k} {m}" for k in ("AUROC", "AUPR") for m in METHODS.values())]
    )
    for line in lines:
        figures = [f"{line[m][k]:.3f}" for k in ("auroc", "aupr") for m in METHODS]
        text.append(markdown_row([line["table"], str(line["features"]), line["runs"][0]["preset"], *figures]))
    means = [f"{np.mean([line[m][k] for line in lines]):.3f}" for k in ("auroc", "aupr") for m in METHODS]
    return "\n".join([*text, markdown_row(["**mean**", "", "", *means])])


def early_table(lines: list[dict[str, Any]]) -> str:
    text = markdown_head(
        ["table", "seed", "calibrated", "normals alerted", "99% bound", "anomalies alerted", "features seen"]
    )
    for line in lines:
        for run in line["runs"]:
            e, first = run["early"], [line["table"], str(run["seed"]), str(run["calibrated"])]
            if e is None:
                text.append(markdown_row([*first, "out of reach", "", "", ""]))
                continue
            share = f"{e['alarms']} of {e['normals']} ({100 * e['alarms'] / e['normals']:.1f}%)"
            seen = "" if e["seen"] is None else f"{100 * e['seen']:.0f}%"
            text.append(markdown_row([*first, share, str(e["bound"]), f"{100 * e['detected']:.0f}%", seen]))
    return "\n".join(text)


def tables_folder() -> Path:
    return Path(os.environ.get("DEFORMER_DATA", ROOT.parent / "shared" / "data")) / "adbench"


def find_tables(wanted: str) -> dict[str, Path]:
    """Name → file. wanted: names with commas between, empty for all."""
    folder = tables_folder()
    found = {path.stem: path for path in sorted(folder.glob("*.parquet"), key=lambda p: p.stem.lower())}
    if not found:
        raise InputError(f"no tables in {folder}: set DEFORMER_DATA to the folder with adbench/ in it")
    names = [name.strip() for name in wanted.split(",") if name.strip()] or list(found)
    unknown = [name for name in names if name not in found]
    if unknown:
        raise ConfigError(f"--tables {unknown[0]}: not in {folder}; there are {', '.join(found)}")
    return {name: found[name] for name in names}


def need_peers() -> None:
    try:
        import sklearn  # noqa: F401
    except ImportError:
        raise ConfigError(
            "scikit-learn is not installed: run make bench-quality, or pip install -c constraints.txt -e '.[bench]'"
        ) from None


def seeds_of(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds {text}: whole numbers with commas between") from None


def run(arguments: argparse.Namespace) -> None:
    need_peers()
    seeds = seeds_of(arguments.seeds)
    lines = []
    for name, path in find_tables(arguments.tables).items():
        table = pq.read_table(path)
        lines.append(summary(name, table, [measure(table, seed, arguments.max_time) for seed in seeds]))
        print(json.dumps(lines[-1]), flush=True)
    when = (
        f"{machine()}, {today()}; {len(lines)} tables, seeds {arguments.seeds}, "
        f"at most {arguments.max_time} of training each, calibration included; means over seeds."
    )
    text = (
        f"# Tables\n\n{when}\n\n## Ranking whole records\n\n{ranking_table(lines)}\n\n"
        f"## Alerts at α = {ALPHA:.0%}\n\nReadings come in random order. Features seen: "
        f"mean share at the alerts on anomalies.\n\n{early_table(lines)}\n"
    )
    publish("tables", text, lines)


def main() -> None:
    launch("tables", run, parser(__doc__, seeds="0,1", max_time="45s"))


if __name__ == "__main__":
    main()
