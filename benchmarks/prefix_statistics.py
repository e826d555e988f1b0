"""Prefix statistics with the distance to training records, and p-values for few calibration records.

    python -m benchmarks.prefix_statistics --max-time 60s --models /tmp/models --deals 200

Splits, training and tables are those of `benchmarks.early`. The features of each record arrive in a random order. Every
prefix of a record gets the statistic of the alert, g (`calibration.conformal`), and D, the mean distance to the three
nearest training records over the features that have arrived. The contenders combine both:

    g                 the alert's statistic today
    g + w D r^a       w = `WEIGHT` and a = `EXPONENT`; r is the share of the features that have arrived

D is first brought to nats: −ln of the share of reference records that reach it with a prefix of the same length, with
an exponential tail beyond 90%. Reference records are training records, whose distances leave out the record itself. So
exemplars and reference records are never calibration records, and calibration and new records stay exchangeable.

Four rules turn the largest statistic x of a record into a p-value. c₁ ≥ c₂ ≥ … are those of n calibration records.

    ranks          (1 + #{c ≥ x}) / (n + 1), the product's rule. At most a share α of normal records raises an alert.
    smoothed       (#{c > x} + u (1 + #{c = x})) / (n + 1) with a uniform u of each record. The share is exactly α.
    interpolated   k / (n + 1) at c_k, and 1/p is linear between them. The share is at most α + 1/(n + 1). It is α if
                   the upper tail of the statistic is exponential, with any scale.
    tail           beyond c_{m+1}: (m + 1)/(n + 1) · (1 + (x − c_{m+1}) / S)^−m with S = Σ_{k≤m} (c_k − c_{m+1}). It
                   reaches every α. The share is α if the tail beyond c_{m+1} is exponential; with a heavier tail it is
                   larger. m is a share of n, `TAIL_SHARE`.

A single division of the normal records says little about a rate of 1%. So calibration and test normals are pooled and
divided again `--deals` times, always with as many calibration records as the table has. The model and the training
records stay the same.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.command import build_parser, describe_machine, format_today, publish_results, run_benchmark
from benchmarks.early import (
    OBSERVED_SHARES,
    Case,
    compute_model_statistics,
    encode_rows,
    prepare_case,
)
from benchmarks.tables import (
    find_tables,
    format_markdown_header,
    format_markdown_row,
    parse_seeds,
    require_scikit_learn,
    split_table,
)
from deformer_stream.errors import InputError
from deformer_stream.model.exemplars import NUM_NEIGHBORS
from deformer_stream.model.positions import compute_positions, has_unordered_labels
from deformer_stream.model.schema import LINEAR_LIMIT, Schema
from trainer.data import Split, assign_split

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

ALPHAS = (0.01, 0.05)
"""False-alarm rates that are measured."""

WEIGHT, EXPONENT = 2.0, 0.3
"""Weight of the distance in nats, and the power of the share of arrived features by which it is multiplied."""

TAIL_SHARE = 0.1
"""Share of the calibration records from which the exponential tail is estimated."""

MIN_TAIL_RECORDS = 3
"""Smallest number of calibration records in the tail."""

REFERENCE_QUANTILE = 0.9
"""Quantile of the reference records beyond which the tail of D is exponential."""

MAX_EXEMPLARS, MAX_REFERENCE_RECORDS = 4096, 800
"""Largest numbers of training records with which prefixes are compared, and of those that bring D to nats."""

RULES = ("ranks", "smoothed", "interpolated", "tail")

CHOSEN_ON = ("annthyroid", "cardio", "pendigits", "shuttle", "vowels")
"""Tables on which `WEIGHT` and `EXPONENT` were chosen. The others confirm them."""


@dataclass(frozen=True, slots=True)
class PrefixStatistics:
    """Statistics of the prefixes of records with L features, by contender.

    Attributes:
        calibration: (N, L) by contender, of the calibration records.
        normal: (M, L) by contender, of the normal test records.
        anomalous: (A, L) by contender, of the anomalies.
    """

    calibration: dict[str, Floats]
    normal: dict[str, Floats]
    anomalous: dict[str, Floats]


def scale_positions(schema: Schema, exemplars: Floats, *others: Floats) -> list[NDArray[np.float32]]:
    """Return the positions of exemplars and of other records in units of the exemplars' standard deviations.

    Args:
        schema: The F features.
        exemplars: (E, F) training records in the model's units.
        others: (N, F) other records in the same units.

    Raises:
        InputError: A feature is cyclic or has labels without an order, for which there is no difference.
    """
    if schema.is_cyclic.any() or any(map(has_unordered_labels, schema.features)):
        raise InputError("the distance of prefixes needs numbers: leave out columns with texts or cyclic values")
    positions = [compute_positions(schema, values) for values in (exemplars, *others)]
    deviations = np.clip(positions[0], -LINEAR_LIMIT, LINEAR_LIMIT).std(0) + 1e-6
    return [(part / deviations).astype(np.float32) for part in positions]


def compute_prefix_distances(
    exemplars: NDArray[np.float32], records: NDArray[np.float32], codes: Ints, excluded_exemplar: Ints | None = None
) -> Floats:
    """Return the mean distance of each prefix to its nearest exemplars over the features that have arrived, (N, L).

    The distance is the sum of the absolute differences of positions.

    Args:
        exemplars: (E, F) positions of the exemplars.
        records: (N, F) positions of the records.
        codes: (N, L) feature codes in order of arrival.
        excluded_exemplar: (N,) the index of the exemplar that each record is itself, which is left out. By default
            none is.
    """
    by_feature = np.ascontiguousarray(exemplars.T)
    distances = np.empty(codes.shape)
    for i, prefix in enumerate(codes):
        differences = np.abs(by_feature[prefix] - records[i, prefix, None]).cumsum(0)  # (L, E)
        if excluded_exemplar is not None:
            differences[:, excluded_exemplar[i]] = np.inf
        num_neighbours = min(NUM_NEIGHBORS, len(exemplars) - (excluded_exemplar is not None))
        distances[i] = np.partition(differences, num_neighbours - 1, 1)[:, :num_neighbours].mean(1)
    return distances


class NatsScale:
    """Brings statistics of prefixes to nats: −ln of the share of reference records that reach them.

    Beyond a quantile of the reference records, the share falls exponentially, with the mean excess as its scale.
    """

    def __init__(self, reference: Floats) -> None:
        """Fit the scale to statistics of reference records, (R, L), one column for each length of prefixes."""
        self._sorted = np.sort(reference, 0)
        first = int(REFERENCE_QUANTILE * len(reference))
        self._quantiles = self._sorted[first]
        self._excess = np.maximum((self._sorted[first:] - self._quantiles).mean(0), 1e-9)

    def convert(self, statistics: Floats) -> Floats:
        """Return statistics of prefixes in nats, in the same shape (N, L); larger is more anomalous."""
        nats = np.empty(statistics.shape)
        num_reference = len(self._sorted)
        for k, column in enumerate(statistics.T):
            num_at_least = num_reference - np.searchsorted(self._sorted[:, k], column, "left")
            in_body = -np.log((num_at_least + 1.0) / (num_reference + 1.0))
            in_tail = -math.log(1.0 - REFERENCE_QUANTILE) + (column - self._quantiles[k]) / self._excess[k]
            nats[:, k] = np.where(column > self._quantiles[k], in_tail, in_body)
        return nats


def combine(statistics: Floats, distance_nats: Floats) -> Floats:
    """Return g + w D r^a of prefixes, (N, L), from g and from D in nats."""
    num_features = statistics.shape[1]
    share = np.arange(1, num_features + 1) / num_features
    return np.asarray(statistics + WEIGHT * distance_nats * share**EXPONENT)


def compute_statistics(case: Case, train_values: Floats, rng: np.random.Generator) -> PrefixStatistics:
    """Return the prefix statistics of all contenders, each record in one random order.

    Args:
        case: The model and the records.
        train_values: (T, F) the rows that fitted the model, in its units.
        rng: Source of the orders and of the choice of exemplars.
    """
    exemplars = train_values[np.sort(rng.permutation(len(train_values))[:MAX_EXEMPLARS])]
    reference_indexes = np.sort(rng.permutation(len(exemplars))[:MAX_REFERENCE_RECORDS])
    parts = (case.calibration, case.test[~case.is_anomaly], case.test[case.is_anomaly])
    positions = scale_positions(case.model.schema, exemplars, *parts)

    def draw_codes(num_records: int) -> Ints:
        return np.argsort(rng.random((num_records, exemplars.shape[1])), 1)

    reference_codes = draw_codes(len(reference_indexes))
    scale = NatsScale(
        compute_prefix_distances(positions[0], positions[0][reference_indexes], reference_codes, reference_indexes)
    )
    statistics = []
    for values, part in zip(parts, positions[1:], strict=True):
        codes = draw_codes(len(values))
        g = compute_model_statistics(case.model, codes, values)
        nats = scale.convert(compute_prefix_distances(positions[0], part, codes))
        statistics.append({"g": g, f"g + {WEIGHT:g} D r^{EXPONENT:g}": combine(g, nats)})
    return PrefixStatistics(*statistics)


def compute_p_values(rule: str, calibration: Floats, statistics: Floats, uniform: Floats) -> Floats:
    """Return p-values of records by one of `RULES`.

    Args:
        rule: Name of the rule.
        calibration: (n,) the largest statistics of calibration records, in any order.
        statistics: (N, C) the largest statistics of records so far, for each of C shares of their features.
        uniform: (N, 1) a uniform random number of each record, for the rule "smoothed".
    """
    ascending, num_records = np.sort(calibration), len(calibration)
    num_at_least = num_records - np.searchsorted(ascending, statistics, "left")
    if rule == "ranks":
        return (1.0 + num_at_least) / (num_records + 1.0)
    if rule == "smoothed":
        num_greater = num_records - np.searchsorted(ascending, statistics, "right")
        return (num_greater + uniform * (1.0 + num_at_least - num_greater)) / (num_records + 1.0)
    if rule == "interpolated":
        inverse = (num_records + 1.0) / np.arange(num_records, 0, -1.0)
        interpolated = 1.0 / np.interp(statistics, ascending, inverse, left=1.0)
        # A statistic that occurs in calibration gets the p-value by ranks, so that ties cannot break the bound.
        is_tie = np.searchsorted(ascending, statistics, "right") + num_at_least > num_records
        return np.where(is_tie, (1.0 + num_at_least) / (num_records + 1.0), interpolated)
    num_tail = min(max(MIN_TAIL_RECORDS, round(TAIL_SHARE * num_records)), num_records - 1)
    start = ascending[num_records - num_tail - 1]
    excess = (ascending[num_records - num_tail :] - start).sum()
    if excess <= 0.0:
        return (1.0 + num_at_least) / (num_records + 1.0)
    # The share of further records beyond x, if the excesses are exponential with an unknown scale: their sum has a
    # Gamma distribution with shape m, and the ratio of a new excess to it is Lomax-distributed.
    in_tail = (num_tail + 1.0) / (num_records + 1.0) * (1.0 + np.maximum(statistics - start, 0.0) / excess) ** -num_tail
    return np.where(statistics > start, in_tail, (1.0 + num_at_least) / (num_records + 1.0))


def measure_deals(
    statistics: PrefixStatistics,
    name: str,
    alphas: Sequence[float],
    num_calibration: int,
    num_deals: int,
    seed: int = 1,
) -> dict[str, list[dict[str, Any]]]:
    """Measure one contender over random divisions of the normal records into calibration and test.

    Args:
        statistics: The prefix statistics.
        name: The contender.
        alphas: The false-alarm rates.
        num_calibration: Number of calibration records of each division.
        num_deals: Number of divisions.
        seed: Seed of the divisions.

    Returns:
        For each rule one object for each α: `detected`, the shares of anomalies with an alert after each of
        `OBSERVED_SHARES` of the features, and `false_alarms`, the share of normal records with an alert.
    """
    pool = np.concatenate([statistics.calibration[name], statistics.normal[name]]).max(1)
    running = np.maximum.accumulate(statistics.anomalous[name], 1)
    num_features = running.shape[1]
    columns = [max(1, math.floor(share * num_features + 1e-9)) - 1 for share in OBSERVED_SHARES]
    anomalies = running[:, columns]
    rng = np.random.default_rng(seed)
    shares = np.zeros((len(RULES), len(alphas), len(columns) + 1))
    for _ in range(num_deals):
        order = rng.permutation(len(pool))
        calibration, normals = pool[order[:num_calibration]], pool[order[num_calibration:], None]
        u_normal, u_anomalous = rng.random((len(normals), 1)), rng.random((len(anomalies), 1))
        for i, rule in enumerate(RULES):
            p_normal = compute_p_values(rule, calibration, normals, u_normal)
            p_anomalous = compute_p_values(rule, calibration, anomalies, u_anomalous)
            for j, alpha in enumerate(alphas):
                bound = alpha + 1e-12
                shares[i, j] += [*(p_anomalous <= bound).mean(0), (p_normal <= bound).mean()]
    shares /= num_deals
    return {
        rule: [
            {"alpha": alpha, "detected": shares[i, j, :-1].tolist(), "false_alarms": float(shares[i, j, -1])}
            for j, alpha in enumerate(alphas)
        ]
        for i, rule in enumerate(RULES)
    }


def measure_table(
    table: pa.Table, max_time: str, folder: Path, order_seeds: Sequence[int], num_deals: int
) -> dict[str, Any]:
    """Measure all contenders and rules on one table, split and trained with seed 0.

    Args:
        table: A table of ADBench.
        max_time: Largest duration of the training run.
        folder: Where the model is stored.
        order_seeds: Seeds of the arrival orders.
        num_deals: Number of divisions of the normal records, for each seed.
    """
    case = prepare_case(table, 0, max_time, folder, alert_exemplars=0, alert_prior=False)  # only g
    rows = table.drop_columns(["label"]).take(split_table(table["label"].to_numpy(), 0).train)
    is_training = assign_split(len(rows), None, 0) != Split.CALIBRATION
    train_values = encode_rows(case.model.schema, rows.filter(pa.array(is_training)))
    runs = []
    for seed in order_seeds:
        statistics = compute_statistics(case, train_values, np.random.default_rng([seed, 0x9F1E]))
        runs.append(
            {
                name: measure_deals(statistics, name, ALPHAS, len(case.calibration), num_deals)
                for name in statistics.calibration
            }
        )
    return {"features": case.calibration.shape[1], "calibrated": len(case.calibration), "runs": runs}


def average_runs(line: Mapping[str, Any], name: str, rule: str, alpha: float) -> list[float]:
    """Return the mean over the arrival orders: shares detected by `OBSERVED_SHARES`, then that of false alarms."""
    index = ALPHAS.index(alpha)
    figures = [run[name][rule][index] for run in line["runs"]]
    return [float(x) for x in np.mean([[*f["detected"], f["false_alarms"]] for f in figures], 0)]


def format_report(lines: Sequence[Mapping[str, Any]], conditions: str) -> str:
    """Return the report in Markdown."""
    text = [f"# Prefix statistics\n\n{conditions}\n"]
    shares = [f"{share:.0%} observed" for share in OBSERVED_SHARES]
    names = list(lines[0]["runs"][0])
    for alpha in ALPHAS:
        reachable = [line for line in lines if alpha * (line["calibrated"] + 1) >= 1]
        others = [line for line in lines if alpha * (line["calibrated"] + 1) < 1]
        groups = {
            "tables on which α is reachable": reachable,
            "of them, tables on which the constants were chosen": [x for x in reachable if x["table"] in CHOSEN_ON],
            "of them, the other tables": [x for x in reachable if x["table"] not in CHOSEN_ON],
            "tables on which α is out of reach by ranks": others,
        }
        for title, group in groups.items():
            if not group:
                continue
            text.append(f"\n## α = {alpha:.0%}: {title} ({len(group)})\n")
            text += format_markdown_header(["statistic", "rule", *shares, "false alarms", "half / full by table"])
            for name in names:
                for rule in RULES:
                    by_table = [average_runs(line, name, rule, alpha) for line in group]
                    means = np.mean(by_table, 0)
                    cells = [f"{100 * x:.1f}%" for x in means[:-1]] + [f"{100 * means[-1]:.2f}%"]
                    half = OBSERVED_SHARES.index(0.5)
                    per_table = ", ".join(
                        f"{line['table']} {100 * figures[half]:.0f} / {100 * figures[-2]:.0f}"
                        for line, figures in zip(group, by_table, strict=True)
                    )
                    text.append(format_markdown_row([name, rule, *cells, per_table]))
    return "\n".join(text) + "\n"


def run(arguments: argparse.Namespace) -> None:
    """Measure all requested tables and publish the report."""
    require_scikit_learn()
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        models = Path(arguments.models or temporary)
        for name, path in find_tables(arguments.tables).items():
            measured = measure_table(
                pq.read_table(path),
                arguments.max_time,
                models / f"{name}-0",
                parse_seeds(arguments.orders),
                arguments.deals,
            )
            lines.append({"table": name, **measured})
            print(name, file=sys.stderr, flush=True)
    conditions = (
        f"{describe_machine()}, {format_today()}; {len(lines)} tables, seed 0, arrival orders of seeds "
        f"{arguments.orders}, {arguments.deals} divisions of the normal records. Each training run takes at most "
        f"{arguments.max_time}."
    )
    print(json.dumps({"benchmark": "prefix_statistics", "tables": len(lines)}))
    publish_results("prefix_statistics", format_report(lines, conditions), lines)


def main() -> None:
    """Run the program."""
    options = build_parser(__doc__, max_time="60s")
    options.add_argument("--models", default="", help="folder in which trained models are stored and reused")
    options.add_argument("--orders", default="0", help="comma-separated seeds of arrival orders; 0 by default")
    options.add_argument("--deals", type=int, default=200, help="divisions of the normal records; 200 by default")
    run_benchmark("prefix_statistics", run, options)


if __name__ == "__main__":
    main()
