"""How early alerts fall and how often they are false, beside detectors that impute or wait, on the tables of ADBench.

    python -m benchmarks.early --tables cardio,pendigits --seeds 0 --max-time 45s --models /tmp/models

Splits, training and tables are those of `benchmarks.tables`; of the test rows at most 2000 normals and 1000 anomalies.
Each record's features come in a random order of its own. Every contender gives a statistic for each prefix of a record
and is judged by the same rule (`calibration/conformal.py`): the largest statistic so far, against the largest ones over the
lives of the same calibration records. "Complete" decides by the same statistic once, at the last feature, against the
calibration records' statistics there. Contenders, trained on the rows that our model was trained on:

    ours               max(Fisher, Šidák) of the highest-density p-values of the readings
    Gaussian           one Gaussian with full covariance: −ln P(χ²_k ≥ squared Mahalanobis distance) of the prefix
    Isolation Forest   of the prefix with the mean in place of every feature that is not there yet
    5-NN               mean distance to five neighbours, likewise

Also what becomes of the promise when the arrival law shifts: calibrated on random orders and tested on others, and
calibrated by groups of sources, each with its own law. `--models DIR` keeps the trained models there and takes those
that are there already.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from benchmarks.command import RESULTS, run_benchmark, describe_machine, build_parser, publish_results, format_today
from benchmarks.early_report import report, summary
from benchmarks.tables import find_tables, need_peers, preset_for, seeds_of, split
from deformer_stream import load
from deformer_stream.calibration.conformal import Calibration, PrefixState, advance_prefix_state
from deformer_stream.model.deformer import DEformer, to_tensor
from deformer_stream.model.schema import Schema
from trainer.data import Split, assign_split, encode_table
from trainer.job import train
from trainer.settings import TrainConfig
from trainer.tables import index_records, open_tables

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

ALPHA = 0.01
ALPHAS = (0.001, 0.01, 0.05)
GRID = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Of the plot of reliability."""
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of the features observed, rounded down."""
CONFIDENCE = 0.99
NEIGHBOURS = 5
NORMALS, ANOMALIES = 2000, 1000
CALIBRATION_SHARE = 0.2
BATCH = 256

Law = Callable[[int, int, np.random.Generator], Ints]
"""records N, features F → (N, L) codes in order of arrival."""

LAWS: dict[str, Law] = {
    "random": lambda n, f, rng: np.argsort(rng.random((n, f)), 1),
    "schema": lambda n, f, rng: np.tile(np.arange(f), (n, 1)),
    "reversed": lambda n, f, rng: np.tile(np.arange(f)[::-1], (n, 1)),
    "first half only": lambda n, f, rng: np.argsort(rng.random((n, max(1, f // 2))), 1),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A trained model and the records it is judged by.

    fitted: rows it was trained on; calibration, test: (N, F) in the model's units. The same rows for the peers, in
    standard deviations of the fitted ones, begin with `plain`. anomaly: (M,) of the test rows.
    """

    model: DEformer
    calibration: Floats
    test: Floats
    plain_fitted: Floats
    plain_calibration: Floats
    plain_test: Floats
    anomaly: Bools


@dataclass(frozen=True, slots=True)
class Judged:
    """p-values of M test records: p after each feature (M, L); complete: of deciding only at the end (M,)."""

    p: Floats
    complete: Floats


def prepare(table: pa.Table, seed: int, max_time: str, folder: Path) -> Case:
    """Train, or take the model that stands in `folder`, and bring the records into its units."""
    parts = split(table["label"].to_numpy(), seed)
    features = table.drop_columns(["label"])
    rows = features.take(parts.train)
    model_folder = folder / "model"
    if not model_folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, folder / "normal.parquet")
        settings = TrainConfig(
            out=model_folder,
            preset=preset_for(len(rows)),
            max_time=max_time,  # type: ignore[arg-type]
            seed=seed,
            calibration_share=CALIBRATION_SHARE,
        )
        train([folder / "normal.parquet"], settings)
    model = load(model_folder).artifact.model
    held = assign_split(len(rows), CALIBRATION_SHARE, seed) == Split.CALIBRATION
    test = np.concatenate(
        [parts.test[~parts.anomaly][:NORMALS], parts.test[parts.anomaly][:ANOMALIES]]
    )  # shuffled already
    tables = [rows.filter(pa.array(~held)), rows.filter(pa.array(held)), features.take(test)]
    plain = [np.column_stack([t[name].to_numpy() for name in model.schema.names]).astype(np.float64) for t in tables]
    location, scale = plain[0].mean(0), plain[0].std(0) + 1e-9
    units = [matrix(model.schema, t) for t in tables[1:]]
    anomaly = np.arange(len(test)) >= min(NORMALS, int((~parts.anomaly).sum()))
    return Case(model, *units, *((x - location) / scale for x in plain), anomaly)


def matrix(schema: Schema, table: pa.Table) -> Floats:
    """(N, F) the table in the model's units and label codes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pq.write_table(table, folder / "table.parquet")
        source = open_tables([folder / "table.parquet"], "wide", None, None)
        source.feature_columns = [column for column in source.schema.names if column in schema.code_by_name]
        index_records(source)
        return np.array(encode_table(source, schema, folder)[0], np.float64)


def ours(model: DEformer, codes: Ints, values: Floats) -> Floats:
    """(N, L) the prefix statistic after each feature. codes: (N, L) in order of arrival; values: (N, F)."""
    ordered = np.take_along_axis(values, codes, 1)
    out = np.empty(codes.shape)
    for start in range(0, len(codes), BATCH):
        rows = slice(start, start + BATCH)
        x = to_tensor(ordered[rows], model)
        with torch.inference_mode():
            log_p = model.conditionals(to_tensor(codes[rows], model), x).log_p_value(x).double().cpu().numpy()
        scored = ~model.schema.is_context[codes[rows]]
        state = PrefixState.initial(len(log_p))
        for k in range(log_p.shape[1]):
            state = replace(state, peak=np.zeros(len(log_p)))  # the rule takes the largest later
            g, state = advance_prefix_state(state, log_p[:, k : k + 1], scored[:, k : k + 1])
            out[rows, k] = g[:, 0]
    return out


def gaussian(fitted: Floats, codes: Ints, values: Floats) -> Floats:
    """(N, L) −ln P(χ²_k ≥ d²) of the squared Mahalanobis distance d² of each prefix of k features."""
    from scipy.stats import chi2

    covariance = np.cov(fitted.T) + 1e-6 * np.eye(fitted.shape[1])
    out = np.empty(codes.shape)
    for start in range(0, len(codes), BATCH):
        some = codes[start : start + BATCH]
        factor = np.linalg.cholesky(covariance[some[:, :, None], some[:, None, :]])
        x = np.take_along_axis(values[start : start + BATCH], some, 1) - fitted.mean(0)[some]
        z = np.linalg.solve(factor, x[..., None])[..., 0]
        distance = np.cumsum(np.square(z), 1)
        g = -chi2.logsf(distance, np.arange(1, some.shape[1] + 1))
        out[start : start + BATCH] = np.where(np.isfinite(g), g, distance / 2)  # its limit far out
    return out


def imputed(score: Callable[[Floats], Floats], codes: Ints, values: Floats) -> Floats:
    """(N, L) a detector of complete rows (larger is more anomalous), the mean, 0, standing for what is not there."""
    rows, out = np.zeros_like(values), np.empty(codes.shape)
    for k in range(codes.shape[1]):
        column = codes[:, k : k + 1]
        np.put_along_axis(rows, column, np.take_along_axis(values, column, 1), 1)
        out[:, k] = score(rows)
    return out


def contenders(case: Case, seed: int) -> dict[str, Callable[[str, Ints], Floats]]:
    """Name → the prefix statistics (N, L) of the "calibration" or the "test" rows in these orders."""
    from sklearn.ensemble import IsolationForest
    from sklearn.neighbors import NearestNeighbors

    fitted = case.plain_fitted
    forest = IsolationForest(random_state=seed).fit(fitted)
    neighbours = NearestNeighbors(n_neighbors=NEIGHBOURS).fit(fitted)

    def far(rows: Floats) -> Floats:
        return np.asarray(neighbours.kneighbors(rows)[0].mean(1))

    units = {"calibration": case.calibration, "test": case.test}
    plain = {"calibration": case.plain_calibration, "test": case.plain_test}
    return {
        "ours": lambda part, codes: ours(case.model, codes, units[part]),
        "Gaussian": lambda part, codes: gaussian(fitted, codes, plain[part]),
        "Isolation Forest": lambda part, codes: imputed(lambda x: -forest.score_samples(x), codes, plain[part]),
        f"{NEIGHBOURS}-NN": lambda part, codes: imputed(far, codes, plain[part]),
    }


def judge(calibration: Floats, test: Floats) -> Judged:
    """Prefix statistics of calibration records (N, L) and test records (M, L) → p-values."""
    lives = Calibration.from_statistics(calibration.max(1), "")
    ends = Calibration.from_statistics(calibration[:, -1], "")
    return Judged(lives.compute_pooled_p_values(np.maximum.accumulate(test, 1)), ends.compute_pooled_p_values(test[:, -1]))


def bounds(alpha: float, calibrated: int, records: int) -> tuple[int, int]:
    """Between which the number of false alarms lies with `CONFIDENCE`, half of the rest on each side: beta-binomial,
    see `demo_report.false_alarm_bound`."""
    from scipy.stats import betabinom

    k = math.floor(alpha * (calibrated + 1) + 1e-9)
    if k < 1:
        return 0, 0
    law = betabinom(records, k, calibrated + 1 - k)
    return int(law.ppf((1 - CONFIDENCE) / 2)), int(law.ppf((1 + CONFIDENCE) / 2))


@dataclass(frozen=True, slots=True)
class Worth:
    """At one α. alarms: normals alerted, of `normals`, between `low` and `high` with 99%. detected: share of anomalies
    alerted, at_shares of them by the `SHARES` of features. seen: mean share of the features seen at the alerts on
    anomalies, None without any. complete: share alerted by deciding on complete records."""

    alpha: float
    alarms: int
    normals: int
    low: int
    high: int
    detected: float
    at_shares: tuple[float, ...]
    seen: float | None
    complete: float

    @property
    def within(self) -> bool:
        return self.low <= self.alarms <= self.high


def worth(judged: Judged, anomaly: Bools, calibrated: int, alpha: float) -> Worth:
    """Count at one α. calibrated: calibration records."""
    alerted = judged.p <= alpha
    length = alerted.shape[1]
    hits = alerted[anomaly]
    first = hits.argmax(1)[hits[:, -1]] + 1
    low, high = bounds(alpha, calibrated, int((~anomaly).sum()))
    return Worth(
        alpha=alpha,
        alarms=int(alerted[~anomaly, -1].sum()),
        normals=int((~anomaly).sum()),
        low=low,
        high=high,
        detected=float(hits[:, -1].mean()),
        at_shares=tuple(float(hits[:, max(1, math.floor(s * length + 1e-9)) - 1].mean()) for s in SHARES),
        seen=float(first.mean() / length) if len(first) else None,
        complete=float((judged.complete[anomaly] <= alpha).mean()),
    )


def measure(table: pa.Table, seed: int, max_time: str, folder: Path) -> dict[str, Any]:
    """One table, one seed: what each contender was worth, reliability, and shifted orders."""
    case = prepare(table, seed, max_time, folder)
    n, features = case.calibration.shape
    rng = np.random.default_rng([seed, 0xEA71])
    codes = {
        part: LAWS["random"](len(x), features, rng)
        for part, x in (("calibration", case.calibration), ("test", case.test))
    }
    run: dict[str, Any] = {"seed": seed, "calibrated": n, "contenders": {}}
    methods = contenders(case, seed)
    for name, statistic in methods.items():
        judged = judge(statistic("calibration", codes["calibration"]), statistic("test", codes["test"]))
        at = [worth(judged, case.anomaly, n, alpha) for alpha in ALPHAS if alpha * (n + 1) >= 1]
        run["contenders"][name] = [asdict(w) | {"within": w.within} for w in at]
        if name == "ours":
            run["reliability"] = reliability(judged.p[~case.anomaly, -1], n)
    run["shifted"] = shifted(methods["ours"], codes["calibration"], case, rng)
    return run


def reliability(p: Floats, calibrated: int) -> list[dict[str, float]]:
    """Share of normal records with p ≤ α and its bounds, each divided by α, over the grid within reach. p: (N,)."""
    out = []
    for alpha in GRID:
        if alpha * (calibrated + 1) >= 1:
            low, high = bounds(alpha, calibrated, len(p))
            shares = [count / len(p) / alpha for count in (int((p <= alpha).sum()), low, high)]
            out.append(dict(zip(("alpha", "realised", "low", "high"), (alpha, *shares), strict=True)))
    return out


def shifted(
    statistic: Callable[[str, Ints], Floats], usual: Ints, case: Case, rng: np.random.Generator
) -> dict[str, dict[str, Any]]:
    """Law → what alerts were worth, calibrated in random orders, and by group: records of one source come in random
    orders, those of another by this law. usual: the random orders (N, F) of the calibration records."""
    (n, features), m = case.calibration.shape, len(case.test)
    before = statistic("calibration", usual)
    out: dict[str, dict[str, Any]] = {}
    for law, orders in LAWS.items():
        if law == "random":
            continue
        own, test = (statistic(part, orders(size, features, rng)) for part, size in (("calibration", n), ("test", m)))
        lives = {"random": before.max(1), law: own.max(1)}
        groups = Calibration.from_statistics(np.concatenate(list(lives.values())), "arrival").with_groups(lives, "/", min_records=1)
        p = groups.compute_p_values(np.maximum.accumulate(test, 1), lambda law=law: [f"{law}/{i}" for i in range(m)])
        found = {"random": judge(before, test), "group": Judged(p, judge(own, test).complete)}
        out[law] = {}
        for name, judged in found.items():
            at = [worth(judged, case.anomaly, n, alpha) for alpha in ALPHAS if alpha * (n + 1) >= 1]
            out[law][name] = [asdict(w) | {"within": w.within} for w in at]
    return out


def run(arguments: argparse.Namespace) -> None:
    need_peers()
    seeds = seeds_of(arguments.seeds)
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        kept = Path(arguments.models or temporary)
        for name, path in find_tables(arguments.tables).items():
            table = pq.read_table(path)
            runs = [measure(table, seed, arguments.max_time, kept / f"{name}-{seed}") for seed in seeds]
            lines.append({"table": name, "features": table.num_columns - 1, "runs": runs})
            print(name, file=sys.stderr, flush=True)
    when = (
        f"{describe_machine()}, {format_today()}; {len(lines)} tables, seeds {arguments.seeds}, at most "
        f"{arguments.max_time} of training each, calibration included."
    )
    text, page = report(lines, when, ALPHA, SHARES)
    print(json.dumps({"benchmark": "early", "alpha": ALPHA, "tables": len(lines)} | summary(lines, ALPHA)))
    publish_results("early", text, lines)
    (RESULTS / "early.html").write_text(page)


def main() -> None:
    options = build_parser(__doc__, seeds="0", max_time="45s")
    options.add_argument("--models", default="", help="folder in which trained models are kept; none by default")
    run_benchmark("early", run, options)


if __name__ == "__main__":
    main()
