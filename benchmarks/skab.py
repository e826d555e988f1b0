"""Anomalies of a pump test bed, point by point, in the protocol of the Skoltech Anomaly Benchmark (SKAB v0.9).

    python -m benchmarks.skab --window 10 --epochs 60

Each of the 34 experiments on its own: its first 400 rows train, the rest test; F1, false-alarm rate (FAR) and
missed-alarm rate (MAR) of all test rows together. One recipe for all of them:

- A record is what six sensors said in the last WINDOW seconds, on the mean; with --slots, on the mean of each of so
  many parts, which are then readings of one sensor at several times. Temperature and thermocouple are left out: they
  follow the room and the motor for longer than an experiment lasts, so that every row is new in them.
- The windows within the first 200 rows train a `tiny` model; those within the next 200, none of which shares a row with
  them, calibrate the rule. The sensors of a row come at once, so nothing is decided earlier than on all of them: a
  row is called anomalous when the excess of its window's surprisal, Σ(−ln p − H) (`anomaly_score` without exemplars),
  exceeds that of all calibration windows. Nothing is smoothed beyond the window.

Beside, on the same windows by the same rule: Hotelling's T², the squared Mahalanobis distance. Windows overlap and the
bed drifts, so records are not exchangeable and the rate of false alarms is measured, not promised.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.command import launch, machine, parser, publish, today
from benchmarks.tables import markdown_head, markdown_row, tables_folder
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.torch_scoring import compute_centered_nll
from deformer_stream.errors import ConfigError, InputError
from trainer.job import train
from trainer.settings import TrainConfig

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

SENSORS = ("Accelerometer1RMS", "Accelerometer2RMS", "Current", "Pressure", "Voltage", "Volume Flow RateRMS")
GROUPS = ("valve1", "valve2", "other")
TRAINING_ROWS = 400
"""Of the protocol."""
FITTED_ROWS = 200
"""Of these, the first train; the others calibrate."""
CONTENDERS = ("ours", "T²")
LEADERBOARD = {"Conv-AE": (0.78, 13.6, 28.0), "MSET": (0.78, 39.7, 14.1), "T²+Q": (0.76, 26.6, 24.9)}
"""As published with the data: F1, FAR and MAR in %."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """values: (N, S) a row a second. anomaly: (N,)."""

    name: str
    values: Floats
    anomaly: Bools


@dataclass(frozen=True, slots=True)
class Counts:
    """Test rows: anomalous and called so, normal and called anomalous, anomalous and missed, normal and left alone."""

    hits: int
    false: int
    missed: int
    quiet: int

    @staticmethod
    def of(called: Bools, anomaly: Bools) -> Counts:
        """Both (N,)."""
        pairs = ((called & anomaly), (called & ~anomaly), (~called & anomaly), (~called & ~anomaly))
        return Counts(*(int(rows.sum()) for rows in pairs))

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.hits + other.hits, self.false + other.false, self.missed + other.missed, self.quiet + other.quiet
        )

    def rates(self) -> dict[str, float]:
        """F1, false-alarm rate, missed-alarm rate."""
        return {
            "f1": 2 * self.hits / max(1, 2 * self.hits + self.false + self.missed),
            "far": self.false / max(1, self.false + self.quiet),
            "mar": self.missed / max(1, self.missed + self.hits),
        }


def read(folder: Path) -> list[Experiment]:
    """The labelled experiments, in order."""
    paths = [p for group in GROUPS for p in sorted((folder / group).glob("*.parquet"), key=lambda p: int(p.stem))]
    if not paths:
        raise InputError(f"no experiments in {folder}: set DEFORMER_DATA to the folder with skab/ in it")
    out = []
    for path in paths:
        table = pq.read_table(path).sort_by("datetime")
        values = np.column_stack([table[name].to_numpy() for name in SENSORS]).astype(np.float64)
        out.append(Experiment(f"{path.parent.name}/{path.stem}", values, table["anomaly"].to_numpy() > 0))
    return out


def windows(values: Floats, width: int, slots: int = 1) -> Floats:
    """(N, slots, S) means over each slot of the last `width` rows, as far as there are any. values: (N, S)."""
    ends = np.arange(len(values))[:, None] - width // slots * np.arange(slots)[::-1]
    return _means(values, width // slots)[np.maximum(ends, 0)]


def _means(values: Floats, width: int) -> Floats:
    """(N, S) means of each row and up to `width` − 1 rows before it."""
    sums = np.cumsum(np.concatenate([np.zeros((1, values.shape[1])), values]), 0)
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - width, 0)
    means: Floats = (sums[ends] - sums[begins]) / (ends - begins)[:, None]
    return means


def table_of_windows(records: Floats) -> pa.Table:
    """What is trained on: a row per window; with slots a long table, in which each window is a device of its own, for
    they overlap. records: (N, slots, S)."""
    slots = records.shape[1]
    if slots == 1:
        return pa.table(dict(zip(SENSORS, records[:, 0].T, strict=True)))
    number, slot, sensor = (part.ravel() for part in np.indices(records.shape))
    columns = {"device": number, "feature": np.array(SENSORS)[sensor], "value": records.ravel(), "time": slot}
    return pa.table({name: pa.array(column) for name, column in columns.items()})


def density(records: Floats, width: int, seed: int, epochs: int) -> Floats:
    """(N,) Σ(−ln p − H) of each window, nats, by a model of the windows within the first `FITTED_ROWS`. records:
    (N, slots, S)."""
    slots = records.shape[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pq.write_table(table_of_windows(records[width - 1 : FITTED_ROWS]), folder / "windows.parquet")
        settings = TrainConfig(
            out=folder / "model",
            preset="tiny",
            epochs=epochs,
            seed=seed,
            continuous=",".join(SENSORS),
            window=float(slots) if slots > 1 else None,
            slots=slots if slots > 1 else None,
            calibration_share=0.05,  # its own calibration is not used
            exemplars=0,
        )
        model = train([folder / "windows.parquet"], settings).model
    schema = model.schema
    order = np.arange(len(schema)).reshape(-1, slots).T.ravel()  # as time goes by
    known = [SENSORS.index(sensor) for sensor in schema.sources]  # a sensor that never moved is no feature
    codes = np.tile(order, (len(records), 1))
    return compute_centered_nll(model, codes, schema.normalise(codes, records[:, :, known].reshape(len(records), -1)))


def hotelling(records: Floats, width: int) -> Floats:
    """(N,) squared Mahalanobis distance of each window (N, slots, S) from those of the first `FITTED_ROWS`."""
    records = records.reshape(len(records), -1)
    fitted = records[width - 1 : FITTED_ROWS]
    deviation = fitted.std(0) + 1e-9
    z = (records - fitted.mean(0)) / deviation
    precision = np.linalg.inv(np.cov((fitted / deviation).T) + 1e-2 * np.eye(records.shape[1]))
    distance: Floats = np.einsum("ij,jk,ik->i", z, precision, z)
    return distance


def called(statistic: Floats, width: int) -> Bools:
    """Which test rows are anomalous: (N − 400,) for a statistic (N,) of the windows."""
    calibration = Calibration.from_statistics(statistic[FITTED_ROWS + width - 1 : TRAINING_ROWS], "schema")
    smallest = calibration.min_p_value
    return np.asarray(calibration.compute_pooled_p_values(statistic[TRAINING_ROWS:]) <= smallest * (1 + 1e-9))


def delays(called: Bools, anomaly: Bools) -> list[int | None]:
    """Rows from the start of each anomaly to the first row called within it; None where none is. Both (N,)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], anomaly, [False]]).astype(np.int8)))
    found = []
    for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        inside = np.flatnonzero(called[start:end])
        found.append(int(inside[0]) if len(inside) else None)
    return found


def measure(experiment: Experiment, width: int, seed: int, epochs: int, slots: int = 1) -> dict[str, Any]:
    """One experiment: counts and delays of each contender."""
    records = windows(experiment.values, width, slots)
    truth = experiment.anomaly[TRAINING_ROWS:]
    line: dict[str, Any] = {"experiment": experiment.name}
    for name, statistic in (("ours", density(records, width, seed, epochs)), ("T²", hotelling(records, width))):
        calls = called(statistic, width)
        line[name] = {"counts": Counts.of(calls, truth), "delays": delays(calls, truth)}
    return line


def summary(lines: Sequence[dict[str, Any]], contender: str) -> dict[str, Any]:
    """Rates of all test rows together; anomalies, those found, and the median delay of these in rows (seconds)."""
    counts = sum((line[contender]["counts"] for line in lines), Counts(0, 0, 0, 0))
    waits = [wait for line in lines for wait in line[contender]["delays"]]
    found = [wait for wait in waits if wait is not None]
    median = float(np.median(found)) if found else None
    return counts.rates() | {"anomalies": len(waits), "found": len(found), "median_delay": median}


def table_of(lines: Sequence[dict[str, Any]]) -> str:
    text = markdown_head(["", "F1", "FAR %", "MAR %", "anomalies found", "delay, median s"])
    for contender in CONTENDERS:
        groups = {"all 34": lines} | {g: [x for x in lines if x["experiment"].startswith(g)] for g in GROUPS}
        for name, some in groups.items():
            if not some:
                continue
            s = summary(some, contender)
            delay = "" if s["median_delay"] is None else f"{s['median_delay']:.0f}"
            first = f"**{contender}**" if name == "all 34" else f"{contender}, {name}"
            rates = [f"{s['f1']:.3f}", f"{100 * s['far']:.1f}", f"{100 * s['mar']:.1f}"]
            text.append(markdown_row([first, *rates, f"{s['found']} of {s['anomalies']}", delay]))
    for name, (f1, far, mar) in LEADERBOARD.items():
        text.append(markdown_row([f"{name} (published)", f"{f1:.2f}", f"{far:.1f}", f"{mar:.1f}", "", ""]))
    return "\n".join(text)


def by_experiment(lines: Sequence[dict[str, Any]]) -> str:
    text = markdown_head(["experiment", "F1", "FAR %", "MAR %", "delays, s"])
    for line in lines:
        rates = line["ours"]["counts"].rates()
        waits = ", ".join("missed" if wait is None else str(wait) for wait in line["ours"]["delays"])
        figures = [f"{rates['f1']:.2f}", f"{100 * rates['far']:.0f}", f"{100 * rates['mar']:.0f}"]
        text.append(markdown_row([line["experiment"], *figures, waits]))
    return "\n".join(text)


def run(arguments: argparse.Namespace) -> None:
    if arguments.window % arguments.slots:
        raise ConfigError(f"--slots {arguments.slots}: a window of {arguments.window} rows has no such equal parts")
    experiments = read(tables_folder().parent / "skab")
    lines = [measure(e, arguments.window, arguments.seed, arguments.epochs, arguments.slots) for e in experiments]
    figures = {name: summary(lines, name) for name in CONTENDERS}
    line = {"benchmark": "skab", "window": arguments.window, "slots": arguments.slots, "experiments": len(lines)}
    when = (
        f"{machine()}, {today()}; {len(lines)} experiments, windows of {arguments.window} s, "
        f"{arguments.slots} mean(s) of each, {arguments.epochs} epochs of training each, seed {arguments.seed}."
    )
    text = f"# SKAB\n\n{when}\n\n{table_of(lines)}\n\n## By experiment (ours)\n\n{by_experiment(lines)}\n"
    publish("skab", text, [line | figures])
    print(json.dumps(line | figures))


def main() -> None:
    options = parser(__doc__, "")
    options.add_argument("--window", type=int, default=10, help="seconds of a record; 10 by default")
    options.add_argument(
        "--slots", type=int, default=1, help="equal parts of the window with a mean each; 1 by default"
    )
    options.add_argument("--epochs", type=int, default=60, help="of each training run; 60 by default")
    options.add_argument("--seed", type=int, default=0)
    launch("skab", run, options)


if __name__ == "__main__":
    main()
