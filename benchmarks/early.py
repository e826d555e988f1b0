"""Early alerts and false alarms, compared with detectors that impute missing features or wait, on tables of ADBench.

    python -m benchmarks.early --tables cardio,pendigits --seeds 0 --max-time 45s --models /tmp/models

Splits, training and tables are those of `benchmarks.tables`; at most 2000 normal rows and 1000 anomalies are tested.
The features of each record arrive in a random order of its own. Every contender computes a statistic for each prefix of
a record. The same rule applies to all (`deformer_stream/calibration/conformal.py`): the largest statistic so far is
compared with the largest statistics of the same calibration records. "Complete" applies the same statistic only once,
to complete records. The contenders are trained on the same rows:

    ours               the larger of Fisher's and Šidák's combination of the highest-density p-values of the readings
    Gaussian           −ln P(χ²_k ≥ squared Mahalanobis distance) of the prefix under a Gaussian with full covariance
    Isolation Forest   its score of the row in which the mean replaces every feature that has not arrived
    5-NN               the mean distance of this row to its five nearest neighbours

The guarantee assumes that arrival orders have the same distribution as in calibration. The benchmark also measures what
happens if they do not: calibrated on random orders and tested on others, and calibrated by groups of devices with their
own orders. With --models DIR, trained models are stored in this folder and reused.
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

from benchmarks.command import RESULTS, build_parser, describe_machine, format_today, publish_results, run_benchmark
from benchmarks.early_report import format_report, summarise_contenders
from benchmarks.tables import choose_preset, find_tables, parse_seeds, require_scikit_learn, split_table
from deformer_stream import load
from deformer_stream.calibration.conformal import Calibration, PrefixState, advance_prefix_state
from deformer_stream.kernels.library import load_library
from deformer_stream.kernels.prefix_distances import choose_distance_function
from deformer_stream.model.alert_distance import AlertDistance
from deformer_stream.model.alert_prior import AlertPrior, PriorPValues
from deformer_stream.model.deformer import DEformer, to_tensor
from deformer_stream.model.schema import Schema
from trainer.data import Split, assign_split
from trainer.job import train
from trainer.settings import TrainConfig
from trainer.tables import index_records, open_training_input
from trainer.value_matrix import encode_table

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

ALPHA = 0.01
"""False-alarm rate of the main tables."""

ALPHAS = (0.001, 0.01, 0.05)
"""False-alarm rates that are measured."""

RELIABILITY_ALPHAS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""False-alarm rates of the plot of reliability."""

OBSERVED_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the features, rounded down, after which detections are counted."""

CONFIDENCE = 0.99
"""Probability that the number of false alarms lies within its bounds."""

NUM_NEIGHBOURS = 5
MAX_NORMALS, MAX_ANOMALIES = 2000, 1000
"""Largest numbers of normal and of anomalous test records."""

BATCH_SIZE = 256

DrawOrders = Callable[[int, int, np.random.Generator], Ints]
"""Draws arrival orders: number of records N, number of features F, generator → (N, L) feature codes in order of
arrival."""

DRAW_ORDERS_BY_NAME: dict[str, DrawOrders] = {
    "random": lambda n, f, rng: np.argsort(rng.random((n, f)), 1),
    "schema": lambda n, f, rng: np.tile(np.arange(f), (n, 1)),
    "reversed": lambda n, f, rng: np.tile(np.arange(f)[::-1], (n, 1)),
    "first half only": lambda n, f, rng: np.argsort(rng.random((n, max(1, f // 2))), 1),
}

ComputeStatistics = Callable[[str, Ints], Floats]
"""Computes prefix statistics of a contender: "calibration" or "test", and (N, L) feature codes in order of arrival →
(N, L) statistics, larger is more anomalous."""


@dataclass(frozen=True, slots=True)
class Case:
    """A trained model and the records for its evaluation.

    Attributes:
        model: The network.
        calibration: (N, F) calibration records in the model's units.
        test: (M, F) test records in the model's units.
        train_z: (R, F) training rows, standardised by their own mean and standard deviation, for the other contenders.
        calibration_z: (N, F) the calibration records in the same standardised units.
        test_z: (M, F) the test records in the same standardised units.
        is_anomaly: (M,) whether each test record is an anomaly.
    """

    model: DEformer
    calibration: Floats
    test: Floats
    train_z: Floats
    calibration_z: Floats
    test_z: Floats
    is_anomaly: Bools


@dataclass(frozen=True, slots=True)
class PValues:
    """p-values of M test records with L features.

    Attributes:
        by_prefix: (M, L) after each feature.
        complete: (M,) of the rule that decides once, on complete records.
    """

    by_prefix: Floats
    complete: Floats


def prepare_case(
    table: pa.Table,
    seed: int,
    max_time: str,
    folder: Path,
    alert_exemplars: int | None = None,
    alert_prior: bool | None = None,
) -> Case:
    """Train a model, or load it from the folder if it is there, and encode the records.

    Args:
        table: A table of ADBench.
        seed: Seed of split and training.
        max_time: Largest duration of the training run, for example "45s".
        folder: Where the model is stored.
        alert_exemplars: Largest number of training records whose distance is a term of the statistic; None for the
            default of training.
        alert_prior: Whether p-values under the Gaussian prior alone are a term of the statistic; None for the default.
    """
    parts = split_table(table["label"].to_numpy(), seed)
    features = table.drop_columns(["label"])
    rows = features.take(parts.train)
    model_dir = folder / "model"
    if not model_dir.exists():
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, folder / "normal.parquet")
        config = TrainConfig(
            out=model_dir,
            preset=choose_preset(len(rows)),
            max_time=max_time,  # type: ignore[arg-type]
            seed=seed,
            alert_exemplars=alert_exemplars,
            alert_prior=alert_prior,
        )
        train([folder / "normal.parquet"], config)
    model = load(model_dir).artifact.model
    is_calibration = assign_split(len(rows), None, seed) == Split.CALIBRATION
    normals, anomalies = parts.test[~parts.is_anomaly], parts.test[parts.is_anomaly]
    test = np.concatenate([normals[:MAX_NORMALS], anomalies[:MAX_ANOMALIES]])  # the split has shuffled them
    tables = [rows.filter(pa.array(~is_calibration)), rows.filter(pa.array(is_calibration)), features.take(test)]
    matrices = [
        np.column_stack([part[name].to_numpy() for name in model.schema.names]).astype(np.float64) for part in tables
    ]
    mean, std = matrices[0].mean(0), matrices[0].std(0) + 1e-9
    encoded = [encode_rows(model.schema, part) for part in tables[1:]]
    is_anomaly = np.arange(len(test)) >= min(MAX_NORMALS, len(normals))
    return Case(model, *encoded, *((matrix - mean) / std for matrix in matrices), is_anomaly)


def encode_rows(schema: Schema, table: pa.Table) -> Floats:
    """Return the rows of a wide table in the model's units, (N, F), with label codes for discrete features."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pq.write_table(table, folder / "table.parquet")
        source = open_training_input([folder / "table.parquet"], "wide", None, None)
        source.feature_columns = [column for column in source.schema.names if column in schema.code_by_name]
        index_records(source)
        return np.array(encode_table(source, schema, folder)[0], np.float64)


def compute_model_statistics(model: DEformer, codes: Ints, values: Floats) -> Floats:
    """Return our prefix statistic after each feature, (N, L).

    Args:
        model: The network.
        codes: (N, L) feature codes in order of arrival.
        values: (N, F) values in the model's units.
    """
    ordered = np.take_along_axis(values, codes, 1)
    statistics = np.empty(codes.shape)
    distance, lines = AlertDistance.from_model(model), AlertPrior.from_model(model)
    terms = np.zeros(codes.shape)
    if distance is not None:
        terms = distance.compute_terms(codes, ordered, choose_distance_function(load_library(False)))
    for start in range(0, len(codes), BATCH_SIZE):
        rows = slice(start, start + BATCH_SIZE)
        x = to_tensor(ordered[rows], model)
        with torch.inference_mode():
            conditional = model.conditionals(to_tensor(codes[rows], model), x)
            scored = conditional.compute_score_terms(x, conditional.compute_surprisal(x)).stack()
        log_p, *further = scored.double().cpu().numpy()[1::2]  # also ln of the p-value under the prior, if it is a term
        is_scored = ~model.schema.is_context[codes[rows]]
        state = PrefixState.initial(len(log_p))
        for k in range(log_p.shape[1]):
            state = replace(state, max_statistic=np.zeros(len(log_p)))  # the maximum over prefixes is computed later
            column = slice(k, k + 1)
            prior = None if lines is None else PriorPValues(further[0][:, column], lines)
            statistic, state = advance_prefix_state(
                state, log_p[:, column], is_scored[:, column], None, terms[rows, column], prior
            )
            statistics[rows, k] = statistic[:, 0]
    return statistics


def compute_gaussian_statistics(train_rows: Floats, codes: Ints, values: Floats) -> Floats:
    """Return −ln P(χ²_k ≥ d²) for the squared Mahalanobis distance d² of each prefix of k features, (N, L).

    Args:
        train_rows: (R, F) rows to which the Gaussian is fitted.
        codes: (N, L) feature codes in order of arrival.
        values: (N, F) values in the units of the training rows.
    """
    from scipy.stats import chi2

    covariance = np.cov(train_rows.T) + 1e-6 * np.eye(train_rows.shape[1])
    statistics = np.empty(codes.shape)
    for start in range(0, len(codes), BATCH_SIZE):
        rows = slice(start, start + BATCH_SIZE)
        batch_codes = codes[rows]
        factor = np.linalg.cholesky(covariance[batch_codes[:, :, None], batch_codes[:, None, :]])
        centred = np.take_along_axis(values[rows], batch_codes, 1) - train_rows.mean(0)[batch_codes]
        z = np.linalg.solve(factor, centred[..., None])[..., 0]
        distance = np.cumsum(np.square(z), 1)
        statistic = -chi2.logsf(distance, np.arange(1, batch_codes.shape[1] + 1))
        # Far out logsf overflows; d²/2 is the leading term there.
        statistics[rows] = np.where(np.isfinite(statistic), statistic, distance / 2)
    return statistics


def compute_imputed_statistics(score_rows: Callable[[Floats], Floats], codes: Ints, values: Floats) -> Floats:
    """Return a detector's scores of rows in which the mean, 0, replaces features that have not arrived, (N, L).

    Args:
        score_rows: Scores complete standardised rows, larger is more anomalous.
        codes: (N, L) feature codes in order of arrival.
        values: (N, F) standardised values.
    """
    rows, statistics = np.zeros_like(values), np.empty(codes.shape)
    for k in range(codes.shape[1]):
        column = codes[:, k : k + 1]
        np.put_along_axis(rows, column, np.take_along_axis(values, column, 1), 1)
        statistics[:, k] = score_rows(rows)
    return statistics


def make_contenders(case: Case, seed: int) -> dict[str, ComputeStatistics]:
    """Return the functions that compute each contender's prefix statistics, by name."""
    from sklearn.ensemble import IsolationForest
    from sklearn.neighbors import NearestNeighbors

    forest = IsolationForest(random_state=seed).fit(case.train_z)
    neighbours = NearestNeighbors(n_neighbors=NUM_NEIGHBOURS).fit(case.train_z)

    def score_by_forest(rows: Floats) -> Floats:
        return np.asarray(-forest.score_samples(rows))

    def score_by_neighbours(rows: Floats) -> Floats:
        return np.asarray(neighbours.kneighbors(rows)[0].mean(1))

    values = {"calibration": case.calibration, "test": case.test}
    z = {"calibration": case.calibration_z, "test": case.test_z}
    return {
        "ours": lambda part, codes: compute_model_statistics(case.model, codes, values[part]),
        "Gaussian": lambda part, codes: compute_gaussian_statistics(case.train_z, codes, z[part]),
        "Isolation Forest": lambda part, codes: compute_imputed_statistics(score_by_forest, codes, z[part]),
        f"{NUM_NEIGHBOURS}-NN": lambda part, codes: compute_imputed_statistics(score_by_neighbours, codes, z[part]),
    }


def compute_p_values(calibration: Floats, test: Floats) -> PValues:
    """Return the p-values of test records from prefix statistics of the calibration, (N, L), and the test, (M, L)."""
    by_maximum = Calibration.from_statistics(calibration.max(1), "")
    by_last = Calibration.from_statistics(calibration[:, -1], "")
    return PValues(
        by_maximum.compute_pooled_p_values(np.maximum.accumulate(test, 1)),
        by_last.compute_pooled_p_values(test[:, -1]),
    )


def compute_false_alarm_bounds(alpha: float, num_calibration: int, num_records: int) -> tuple[int, int]:
    """Return the bounds between which the number of false alarms lies with probability `CONFIDENCE`.

    The number is beta-binomial, as in `demo.report.bound_false_alarms`. Each tail has half of the rest.
    """
    from scipy.stats import betabinom

    k = math.floor(alpha * (num_calibration + 1) + 1e-9)
    if k < 1:
        return 0, 0
    distribution = betabinom(num_records, k, num_calibration + 1 - k)
    return int(distribution.ppf((1 - CONFIDENCE) / 2)), int(distribution.ppf((1 + CONFIDENCE) / 2))


@dataclass(frozen=True, slots=True)
class AlertFigures:
    """Alerts of one contender at one α. The attribute names are keys of the JSON lines.

    Attributes:
        alpha: The false-alarm rate.
        alarms: Number of normal records that raised an alert.
        normals: Number of normal records.
        low: Lower bound of the number of false alarms, with 99% probability.
        high: Upper bound of the number of false alarms, with 99% probability.
        detected: Share of the anomalies that raised an alert.
        at_shares: Shares of the anomalies that raised an alert after each of `OBSERVED_SHARES` of the features.
        seen: Mean share of the features that had arrived at the alerts on anomalies, None without such alerts.
        complete: Share of the anomalies that are detected by deciding once, on complete records.
    """

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
    def is_within_bounds(self) -> bool:
        """Whether the number of false alarms lies within its bounds."""
        return self.low <= self.alarms <= self.high

    def to_json(self) -> dict[str, Any]:
        """Return the figures as they are stored in the JSON lines."""
        return asdict(self) | {"within": self.is_within_bounds}


def count_alerts(p_values: PValues, is_anomaly: Bools, num_calibration: int, alpha: float) -> AlertFigures:
    """Count the alerts on test records at one α.

    Args:
        p_values: The p-values of M test records.
        is_anomaly: (M,) whether each record is an anomaly.
        num_calibration: Number of calibration records, which determines the bounds of false alarms.
        alpha: The false-alarm rate.
    """
    has_alert = p_values.by_prefix <= alpha
    num_features = has_alert.shape[1]
    is_detected = has_alert[is_anomaly]
    num_seen = is_detected.argmax(1)[is_detected[:, -1]] + 1
    num_normals = int((~is_anomaly).sum())
    low, high = compute_false_alarm_bounds(alpha, num_calibration, num_normals)
    prefix_lengths = [max(1, math.floor(share * num_features + 1e-9)) for share in OBSERVED_SHARES]
    return AlertFigures(
        alpha=alpha,
        alarms=int(has_alert[~is_anomaly, -1].sum()),
        normals=num_normals,
        low=low,
        high=high,
        detected=float(is_detected[:, -1].mean()),
        at_shares=tuple(float(is_detected[:, length - 1].mean()) for length in prefix_lengths),
        seen=float(num_seen.mean() / num_features) if len(num_seen) else None,
        complete=float((p_values.complete[is_anomaly] <= alpha).mean()),
    )


def count_alerts_at_reachable_alphas(
    p_values: PValues, is_anomaly: Bools, num_calibration: int
) -> list[dict[str, Any]]:
    """Return the JSON figures for each of `ALPHAS` at which an alert is possible with this many calibration records."""
    return [
        count_alerts(p_values, is_anomaly, num_calibration, alpha).to_json()
        for alpha in ALPHAS
        if alpha * (num_calibration + 1) >= 1
    ]


def measure_table(table: pa.Table, seed: int, max_time: str, folder: Path) -> dict[str, Any]:
    """Measure all contenders, our reliability and other arrival orders on one table with one seed."""
    case = prepare_case(table, seed, max_time, folder)
    num_calibration, num_features = case.calibration.shape
    rng = np.random.default_rng([seed, 0xEA71])
    draw_orders = DRAW_ORDERS_BY_NAME["random"]
    calibration_codes = draw_orders(len(case.calibration), num_features, rng)
    test_codes = draw_orders(len(case.test), num_features, rng)
    run: dict[str, Any] = {"seed": seed, "calibrated": num_calibration, "contenders": {}}
    contenders = make_contenders(case, seed)
    for name, compute_statistics in contenders.items():
        p_values = compute_p_values(
            compute_statistics("calibration", calibration_codes), compute_statistics("test", test_codes)
        )
        run["contenders"][name] = count_alerts_at_reachable_alphas(p_values, case.is_anomaly, num_calibration)
        if name == "ours":
            run["reliability"] = measure_reliability(p_values.by_prefix[~case.is_anomaly, -1], num_calibration)
    run["shifted"] = measure_other_orders(contenders["ours"], calibration_codes, case, rng)
    return run


def measure_reliability(p: Floats, num_calibration: int) -> list[dict[str, float]]:
    """Return the share of normal records that raise an alert and its bounds, each divided by α, for several α.

    Args:
        p: (N,) the smallest p-value of each normal record.
        num_calibration: Number of calibration records; alphas at which no alert is possible are left out.
    """
    points = []
    for alpha in RELIABILITY_ALPHAS:
        if alpha * (num_calibration + 1) >= 1:
            low, high = compute_false_alarm_bounds(alpha, num_calibration, len(p))
            realised = int((p <= alpha).sum())
            point = {"realised": realised, "low": low, "high": high}
            points.append({"alpha": alpha} | {key: count / len(p) / alpha for key, count in point.items()})
    return points


def measure_other_orders(
    compute_statistics: ComputeStatistics, random_codes: Ints, case: Case, rng: np.random.Generator
) -> dict[str, dict[str, Any]]:
    """Measure alerts on test records that arrive in other orders than random ones.

    Two calibrations are compared: on random orders only ("random"), and by group of devices ("group"), where the
    records of one group arrive in random orders and those of the other in the tested ones.

    Args:
        compute_statistics: Computes our prefix statistics.
        random_codes: (N, F) the random orders of the calibration records.
        case: The model and the records.
        rng: Source of random numbers.

    Returns:
        For each distribution of orders and each calibration, the figures by α.
    """
    (num_calibration, num_features), num_test = case.calibration.shape, len(case.test)
    random_statistics = compute_statistics("calibration", random_codes)
    figures: dict[str, dict[str, Any]] = {}
    for name, draw_orders in DRAW_ORDERS_BY_NAME.items():
        if name == "random":
            continue
        own_statistics = compute_statistics("calibration", draw_orders(num_calibration, num_features, rng))
        test_statistics = compute_statistics("test", draw_orders(num_test, num_features, rng))
        statistics_by_group = {"random": random_statistics.max(1), name: own_statistics.max(1)}
        pooled = Calibration.from_statistics(np.concatenate(list(statistics_by_group.values())), "arrival")
        calibration = pooled.with_groups(statistics_by_group, "/", min_records=1)
        record_ids = [f"{name}/{i}" for i in range(num_test)]
        running = np.maximum.accumulate(test_statistics, 1)
        by_prefix = calibration.compute_p_values(running, lambda ids=record_ids: ids)
        own_p_values = compute_p_values(own_statistics, test_statistics)
        p_values_by_calibration = {
            "random": compute_p_values(random_statistics, test_statistics),
            "group": PValues(by_prefix, own_p_values.complete),
        }
        figures[name] = {
            how: count_alerts_at_reachable_alphas(p_values, case.is_anomaly, num_calibration)
            for how, p_values in p_values_by_calibration.items()
        }
    return figures


def run(arguments: argparse.Namespace) -> None:
    """Measure all requested tables and publish the report and the page of plots."""
    require_scikit_learn()
    seeds = parse_seeds(arguments.seeds)
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        models = Path(arguments.models or temporary)
        for name, path in find_tables(arguments.tables).items():
            table = pq.read_table(path)
            runs = [measure_table(table, seed, arguments.max_time, models / f"{name}-{seed}") for seed in seeds]
            lines.append({"table": name, "features": table.num_columns - 1, "runs": runs})
            print(name, file=sys.stderr, flush=True)
    conditions = (
        f"{describe_machine()}, {format_today()}; {len(lines)} tables, seeds {arguments.seeds}. Each training run "
        f"takes at most {arguments.max_time} including calibration."
    )
    text, page = format_report(lines, conditions, ALPHA, OBSERVED_SHARES)
    line = {"benchmark": "early", "alpha": ALPHA, "tables": len(lines)}
    print(json.dumps(line | summarise_contenders(lines, ALPHA)))
    publish_results("early", text, lines)
    (RESULTS / "early.html").write_text(page)


def main() -> None:
    """Run the program."""
    options = build_parser(__doc__, seeds="0", max_time="45s")
    models_help = "folder in which trained models are stored and reused; models are not stored by default"
    options.add_argument("--models", default="", help=models_help)
    run_benchmark("early", run, options)


if __name__ == "__main__":
    main()
