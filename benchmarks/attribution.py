"""Whether explanations name the faulty sensor: faults injected into normal records, beside simple ways to blame.

    python -m benchmarks.attribution --max-time 60s                                        (make bench-quality)

Tables: of those in `adbench/` under DEFORMER_DATA, the four whose features depend most on each other (largest median R²
of a linear regression of each feature on the others, fitted on the training half, on the held-out half), among tables
with at least 1000 normals and more than 20 distinct values in every feature. One model is trained on half of the
normals, as `benchmarks.tables` does. Faults are injected into the other half:

- shift: ±3 to 6 standard deviations are added to a reading;
- broken correlation: the reading is that of another held-out record, so that its own distribution stays as it is;
- stuck: the reading is the same in all records, that of one training record;
- each of these in two features at once (of two different other records), and two readings swapped (standardised).

The records come in random orders through the engine at α = 1%, and what its alerts say is compared with the truth.
Alerts before any faulty reading came are false alarms of the sound part and are left out. A reading is blamed by the
order of `contributions` (ours), by its surprise on arrival (effort "fast"), by its leave-one-out surprise and its
order-averaged attribution under the same model, by |z| of its marginal, and by the leave-one-out residual of one
Gaussian with the covariance of the training rows, in its standard deviations. With --cost it measures in place of all
this what an explanation costs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from benchmarks.command import launch, machine, parser, publish, today
from benchmarks.tables import ALPHA, find_tables, learn, need_peers, split
from deformer_stream import Detector
from deformer_stream.engine.engine import Limits
from deformer_stream.engine.events import NO_TIME, AlertRaised, Contribution, EventBatch
from deformer_stream.engine.explain import explain
from deformer_stream.errors import InputError
from deformer_stream.kernels import build
from deformer_stream.kernels.cpu import CpuKernels
from deformer_stream.model.deformer import PRESETS, DEformer
from deformer_stream.model.schema import Feature, Schema

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FAULTS = ("shift", "broken correlation", "stuck", "two shifts", "two broken correlations", "two stuck", "swapped")
METHODS = ("ours", "arrival", "leave-one-out", "attribution", "marginal z", "Gaussian leave-one-out")
TABLES, LEAST_NORMALS, DISTINCT = 4, 1000, 20
SHIFT = (3.0, 6.0)
RIDGE = 1e-3
COST_FEATURES, COST_RUNS = 20, 25


def matrix(table: pa.Table, names: tuple[str, ...]) -> Floats:
    return np.column_stack([table[name].to_numpy() for name in names]).astype(np.float64)


def dependence(train: Floats, test: Floats) -> float:
    """Median over features of the R² of a linear regression on the others; 0 where a feature has few values."""
    if min(len(np.unique(column)) for column in train.T) <= DISTINCT:
        return 0.0
    mean, std = train.mean(0), train.std(0)
    x, y = (train - mean) / std, (test - mean) / std
    found = []
    for f in range(x.shape[1]):
        others = np.arange(x.shape[1]) != f
        weights = np.linalg.lstsq(x[:, others], x[:, f], rcond=None)[0]
        found.append(1 - ((y[:, f] - y[:, others] @ weights) ** 2).mean() / y[:, f].var())
    return float(np.median(found))


def chosen(tables: dict[str, pa.Table], seed: int) -> list[str]:
    """The tables of the rule above, the most dependent first."""
    found = {}
    for name, table in tables.items():
        parts = split(table["label"].to_numpy(), seed)
        normals = matrix(table, tuple(n for n in table.column_names if n != "label"))
        rest = parts.test[~parts.anomaly]
        if len(parts.train) + len(rest) >= LEAST_NORMALS:
            found[name] = dependence(normals[parts.train], normals[rest])
    return sorted((name for name, r in found.items() if r > 0), key=lambda name: -found[name])[:TABLES]


def inject(fault: str, rows: Floats, others: Floats, train: Floats, rng: np.random.Generator) -> tuple[Floats, Ints]:
    """Faulty copies of rows (N, F), and which features are faulty, (N, 1) or (N, 2). others: held-out records."""
    N, F = rows.shape
    mean, std = train.mean(0), train.std(0)
    faulty = np.argsort(rng.random((N, F)), 1)[:, : 2 if fault.startswith(("two", "swapped")) else 1]
    here = np.arange(N)[:, None]
    came = rows[here, faulty]
    if "shift" in fault:
        sign = rng.choice([-1.0, 1.0], faulty.shape)
        new = came + sign * rng.uniform(*SHIFT, faulty.shape) * std[faulty]
    elif "broken" in fault:
        new = others[rng.integers(len(others), size=faulty.shape), faulty]
    elif "stuck" in fault:
        new = train[rng.integers(len(train), size=F), np.arange(F)][faulty]
    else:
        z = (came - mean[faulty]) / std[faulty]
        new = mean[faulty] + std[faulty] * z[:, ::-1]
    out = rows.copy()
    out[here, faulty] = new
    return out, faulty


def raised(detector: Detector, rows: Floats, orders: Ints) -> dict[int, AlertRaised]:
    """Alerts by row. orders: (N, F) in which the readings of each row come."""
    N, F = orders.shape
    flat = np.arange(N * F, dtype=np.int32)
    values = np.take_along_axis(rows, orders, 1).ravel()
    records = [str(i) for i in range(N) for _ in range(F)]
    batch = EventBatch(
        records, orders.ravel().astype(np.int32), values, np.full(N * F, NO_TIME), flat, np.zeros(N * F, np.int32)
    )
    effects = detector.engine(ALPHA, Limits(open_records=N)).handle(batch, 0)
    return {int(alert.record): alert for alert in effects.alerts}


@dataclass(frozen=True, slots=True)
class Gaussian:
    """The covariance of the training rows, drawn a little to its diagonal."""

    mean: Floats
    std: Floats
    correlation: Floats

    @staticmethod
    def of(train: Floats) -> Gaussian:
        F = train.shape[1]
        correlation = (1 - RIDGE) * np.corrcoef(train.T) + RIDGE * np.eye(F)
        return Gaussian(train.mean(0), train.std(0), correlation)

    def z(self, codes: Ints, values: Floats) -> Floats:
        return np.asarray((values - self.mean[codes]) / self.std[codes])

    def leave_one_out(self, codes: Ints, values: Floats) -> Floats:
        """Each reading's residual given all others, in its standard deviations."""
        precision = np.linalg.inv(self.correlation[np.ix_(codes, codes)])
        return np.asarray(precision @ self.z(codes, values) / np.sqrt(np.diag(precision)))


def blamed(alert: AlertRaised, codes: Ints, values: Floats, fast: tuple[Contribution, ...], by: Gaussian,
           schema: Schema) -> dict[str, list[int]]:  # fmt: skip
    """By method, the features seen, the most suspicious first. codes, values: (K,) as they came."""

    def sorted_by(parts: tuple[Contribution, ...], key: Callable[[Contribution], float] | None) -> list[int]:
        return [schema.codes[part.feature] for part in (sorted(parts, key=key) if key else parts)]

    def largest(scores: Floats) -> list[int]:
        return codes[np.argsort(-np.abs(scores), kind="stable")].tolist()

    ours = alert.contributions
    orders = (
        sorted_by(ours, None),
        sorted_by(fast, None),
        sorted_by(ours, lambda part: -(part.leave_one_out or 0.0)),
        sorted_by(ours, lambda part: -(part.attribution or 0.0)),
        largest(by.z(codes, values)),
        largest(by.leave_one_out(codes, values)),
    )
    return dict(zip(METHODS, orders, strict=True))


def measure_fault(
    detector: Detector, fault: str, train: Floats, held: Floats, count: int, seed: int, by: Gaussian
) -> dict[str, Any]:
    """One fault on one table: shares of alerts. first: a faulty feature ranks first; top_two: among the first two stand
    all the faulty features that had come."""
    rng = np.random.default_rng([seed, FAULTS.index(fault)])
    rows, faulty = inject(fault, held[rng.integers(len(held), size=count)], held, train, rng)
    orders = np.argsort(rng.random(rows.shape), 1)
    alerts = raised(detector, rows, orders)
    hits: dict[str, list[tuple[bool, bool]]] = {method: [] for method in METHODS}
    early, seen, sets = 0, [], []
    for i, alert in alerts.items():
        codes = orders[i, : alert.raised_at]
        wrong = set(faulty[i].tolist()) & set(codes.tolist())
        if not wrong:
            early += 1
            continue
        values = rows[i, codes]
        (fast,) = explain(detector.artifact.model, codes[None], values[None], [{}], [""], never, "fast")
        for method, order in blamed(alert, codes, values, fast.contributions, by, detector.schema).items():
            hits[method].append((order[0] in wrong, wrong <= set(order[:2])))
        seen.append(alert.raised_at)
        if alert.silenced_by is not None:
            named = {detector.schema.codes[name] for name in alert.silenced_by}
            sets.append((len(named), bool(named & wrong)))
    line: dict[str, Any] = {"injected": count, "alerts": len(alerts), "before the fault": early, "judged": len(seen)}
    line["seen"] = round(float(np.mean(seen)), 1) if seen else None
    for method in METHODS:
        first, two = np.mean(hits[method], 0).tolist() if seen else (None, None)
        line[method] = {"first": first, "top_two": two}
    line["silenced"] = {
        "found": len(sets) / len(seen) if seen else None,
        "size": float(np.mean([size for size, _ in sets])) if sets else None,
        "names_a_fault": float(np.mean([named for _, named in sets])) if sets else None,
    }
    return line


def measure(name: str, table: pa.Table, count: int, seed: int, max_time: str) -> dict[str, Any]:
    """One table: train once, inject every fault."""
    parts = split(table["label"].to_numpy(), seed)
    detector, result = learn(table.drop_columns(["label"]).take(parts.train), seed, max_time)
    rows = matrix(table, detector.schema.names)
    train, held = rows[parts.train], rows[parts.test[~parts.anomaly]]
    by = Gaussian.of(train)
    line: dict[str, Any] = {"table": name, "features": len(detector.schema), "steps": result.fitted.steps}
    line["calibrated"] = len(result.calibration.scores)
    line["faults"] = {f: measure_fault(detector, f, train, held, count, seed, by) for f in FAULTS}
    return line


def never(score: Floats, _: Sequence[str]) -> NDArray[np.bool_]:
    return np.isnan(score)


def always(score: Floats, _: Sequence[str]) -> NDArray[np.bool_]:
    return ~np.isnan(score)


def cost(runs: int = COST_RUNS) -> list[dict[str, Any]]:
    """Milliseconds to explain one complete record of 20 features, `small` preset, and a record among 256 at once."""
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(COST_FEATURES)))
    torch.manual_seed(0)
    model = DEformer(schema, PRESETS["small"]).eval()
    model.library = build.library(False)
    compiled = CpuKernels.of(model)
    rng = np.random.default_rng(0)

    def taken(records: int, effort: Any, alarming: Any) -> float:
        codes = np.argsort(rng.random((records, COST_FEATURES)), 1)
        values = rng.normal(size=codes.shape)
        names, unseen = [str(i) for i in range(records)], [{}] * records
        seconds = []
        for _ in range(runs if records == 1 else 2):
            begin = time.perf_counter()
            explain(model, codes, values, unseen, names, alarming, effort, compiled)
            seconds.append(time.perf_counter() - begin)
        return 1e3 * float(np.median(seconds[len(seconds) > 5 and 3 :])) / records

    return [
        {
            "features": COST_FEATURES,
            "preset": "small",
            "records at once": records,
            "fast": taken(records, "fast", never),
            "one suspect": taken(records, "full", never),
            "three tried in vain": taken(records, "full", always),
        }
        for records in (1, 256)
    ]


def row_of(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def head(names: list[str]) -> list[str]:
    return [row_of(names), "|" + "---|" * len(names)]


def shares(line: dict[str, Any], key: str) -> list[str]:
    return ["" if line[m][key] is None else f"{100 * line[m][key]:.0f}" for m in METHODS]


def quality_table(lines: list[dict[str, Any]], key: str) -> str:
    text = head(["fault", "table", "alerts judged", "readings seen", *METHODS])
    for fault in FAULTS:
        of = [line["faults"][fault] for line in lines]
        for line, found in zip(lines, of, strict=True):
            text.append(row_of([fault, line["table"], str(found["judged"]), str(found["seen"]), *shares(found, key)]))
        means = [np.mean([f[m][key] for f in of if f[m][key] is not None]) for m in METHODS]
        text.append(row_of([f"**{fault}**", "**mean**", "", "", *(f"**{100 * mean:.0f}**" for mean in means)]))
    return "\n".join(text)


def silenced_table(lines: list[dict[str, Any]]) -> str:
    text = head(["fault", "a set was found", "its mean size", "it names a faulty feature"])
    for fault in FAULTS:
        of = [line["faults"][fault]["silenced"] for line in lines]
        cells = [np.mean([f[k] for f in of if f[k] is not None]) for k in ("found", "size", "names_a_fault")]
        text.append(row_of([fault, f"{100 * cells[0]:.0f}%", f"{cells[1]:.1f}", f"{100 * cells[2]:.0f}%"]))
    return "\n".join(text)


def cost_table(costs: list[dict[str, Any]]) -> str:
    """Milliseconds a record."""
    text = head([f"{key}, ms" if isinstance(value, float) else key for key, value in costs[0].items()])
    for line in costs:
        text.append(row_of([f"{value:.1f}" if isinstance(value, float) else str(value) for value in line.values()]))
    return "\n".join(text)


def run(arguments: argparse.Namespace) -> None:
    if arguments.cost:
        costs = cost()
        publish(
            "attribution_cost",
            f"# What an explanation costs\n\n{machine()}, {today()}.\n\n{cost_table(costs)}\n",
            costs,
        )
        return
    need_peers()
    tables = {name: pq.read_table(path) for name, path in find_tables(arguments.tables).items()}
    names = list(tables) if arguments.tables else chosen(tables, arguments.seed)
    if not names:
        raise InputError(f"no table has {LEAST_NORMALS} normals and continuous features")
    lines = []
    for name in names:
        lines.append(measure(name, tables[name], arguments.injected, arguments.seed, arguments.max_time))
        print(json.dumps(lines[-1]), flush=True)
    text = (
        f"# Attribution\n\n{machine()}, {today()}; tables {', '.join(names)}, seed {arguments.seed}, at most "
        f"{arguments.max_time} of training each, {arguments.injected} injections of each fault; α = {ALPHA:.0%}. "
        "Percent of alerts.\n\n"
        f"## A faulty feature ranks first\n\n{quality_table(lines, 'first')}\n\n"
        f"## All faulty features that had come are among the first two\n\n{quality_table(lines, 'top_two')}\n\n"
        f"## The smallest set whose replacement silences the alert (at most three)\n\n{silenced_table(lines)}\n"
    )
    publish("attribution", text, lines)


def main() -> None:
    options = parser(__doc__, "by default four chosen by the rule", max_time="60s")
    options.add_argument("--seed", type=int, default=0, help="of split, training, faults and orders")
    options.add_argument("--injected", type=int, default=1000, help="records for each fault; 1000 by default")
    options.add_argument("--cost", action="store_true", help="only measure what an explanation costs, and print it")
    launch("attribution", run, options)


if __name__ == "__main__":
    main()
