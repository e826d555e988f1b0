"""Point-wise anomaly detection on a pump test bed: the Skoltech Anomaly Benchmark (SKAB v0.9).

    python -m benchmarks.skab --window 10 --epochs 60

Each of the 34 experiments has a model of its own: the first 400 rows train, the others test. F1, the false-alarm rate
(FAR) and the missed-alarm rate (MAR) are computed over all test rows together. The recipe is the same for all:

- A record is the mean of each of six sensors over the last WINDOW seconds. With --slots, the window is divided into
  equal parts, and the means of the parts are readings of the same sensor at several times. Temperature and
  thermocouple are left out, because they drift with the room for longer than an experiment, so every row is new.
- The windows within the first 200 rows train a `tiny` model. The windows within the next 200 rows, which share no row
  with them, calibrate the rule. All sensors of a row arrive at once, so a decision is made for complete records: a row
  is anomalous if the centered NLL of its window exceeds that of all calibration windows.

Hotelling's T², the squared Mahalanobis distance, is evaluated on the same windows with the same rule. Windows overlap
and the test bed drifts, so records are not exchangeable and the false-alarm rate is measured, not guaranteed.
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

from benchmarks.command import build_parser, describe_machine, format_today, publish_results, run_benchmark
from benchmarks.tables import format_markdown_header, format_markdown_row, get_tables_folder
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.torch_scoring import compute_centered_nll
from deformer_stream.errors import ConfigError, InputError
from trainer.job import train
from trainer.settings import TrainConfig

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

SENSORS = ("Accelerometer1RMS", "Accelerometer2RMS", "Current", "Pressure", "Voltage", "Volume Flow RateRMS")
GROUPS = ("valve1", "valve2", "other")
"""Folders of the experiments."""

NUM_TRAINING_ROWS = 400
"""Number of training rows at the beginning of an experiment, given by the protocol."""

NUM_FITTED_ROWS = 200
"""Number of training rows that train the model; the other training rows calibrate the rule."""

CONTENDERS = ("ours", "T²")
LEADERBOARD = {"Conv-AE": (0.78, 13.6, 28.0), "MSET": (0.78, 39.7, 14.1), "T²+Q": (0.76, 26.6, 24.9)}
"""Results that were published with the data: F1, FAR and MAR in percent."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """One recording of the test bed with N rows, one per second.

    Attributes:
        name: Folder and number.
        values: (N, S) readings of S sensors.
        is_anomaly: (N,) whether the row is labelled as an anomaly.
    """

    name: str
    values: Floats
    is_anomaly: Bools


@dataclass(frozen=True, slots=True)
class ConfusionCounts:
    """Numbers of test rows by label and decision.

    Attributes:
        true_positives: Anomalous rows that were detected.
        false_positives: Normal rows that were called anomalous.
        false_negatives: Anomalous rows that were missed.
        true_negatives: Normal rows that were called normal.
    """

    true_positives: int
    false_positives: int
    false_negatives: int
    true_negatives: int

    @staticmethod
    def count(is_detected: Bools, is_anomaly: Bools) -> ConfusionCounts:
        """Count the decisions about N rows; both arguments have shape (N,)."""
        return ConfusionCounts(
            int((is_detected & is_anomaly).sum()),
            int((is_detected & ~is_anomaly).sum()),
            int((~is_detected & is_anomaly).sum()),
            int((~is_detected & ~is_anomaly).sum()),
        )

    def __add__(self, other: ConfusionCounts) -> ConfusionCounts:
        return ConfusionCounts(
            self.true_positives + other.true_positives,
            self.false_positives + other.false_positives,
            self.false_negatives + other.false_negatives,
            self.true_negatives + other.true_negatives,
        )

    def compute_rates(self) -> dict[str, float]:
        """Return F1, the false-alarm rate and the missed-alarm rate, each from 0 to 1."""
        num_errors = self.false_positives + self.false_negatives
        return {
            "f1": 2 * self.true_positives / max(1, 2 * self.true_positives + num_errors),
            "far": self.false_positives / max(1, self.false_positives + self.true_negatives),
            "mar": self.false_negatives / max(1, self.false_negatives + self.true_positives),
        }


def read_experiments(folder: Path) -> list[Experiment]:
    """Return the labelled experiments, sorted by group and number."""
    paths = [
        path for group in GROUPS for path in sorted((folder / group).glob("*.parquet"), key=lambda path: int(path.stem))
    ]
    if not paths:
        raise InputError(f"no experiments in {folder}: set DEFORMER_DATA to the folder that contains skab/")
    experiments = []
    for path in paths:
        table = pq.read_table(path).sort_by("datetime")
        values = np.column_stack([table[name].to_numpy() for name in SENSORS]).astype(np.float64)
        is_anomaly = table["anomaly"].to_numpy() > 0
        experiments.append(Experiment(f"{path.parent.name}/{path.stem}", values, is_anomaly))
    return experiments


def compute_windows(values: Floats, width: int, num_slots: int = 1) -> Floats:
    """Return the means of each sensor over the time slots of a window that ends at each row, (N, num_slots, S).

    Args:
        values: (N, S) one row per second.
        width: Number of rows in a window; fewer at the beginning.
        num_slots: Number of equal parts of a window.
    """
    slot_width = width // num_slots
    slot_ends = np.arange(len(values))[:, None] - slot_width * np.arange(num_slots)[::-1]
    return _compute_trailing_means(values, slot_width)[np.maximum(slot_ends, 0)]


def _compute_trailing_means(values: Floats, width: int) -> Floats:
    """Return the mean of each row and up to width − 1 rows before it, (N, S)."""
    sums = np.cumsum(np.concatenate([np.zeros((1, values.shape[1])), values]), 0)
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    means: Floats = (sums[ends] - sums[starts]) / (ends - starts)[:, None]
    return means


def make_training_table(windows: Floats) -> pa.Table:
    """Return N windows, (N, num_slots, S), as a training table.

    With one slot, a row is a window. With several slots the table is long, and each window is a device of its own,
    because windows of one device must not overlap.
    """
    num_slots = windows.shape[1]
    if num_slots == 1:
        return pa.table(dict(zip(SENSORS, windows[:, 0].T, strict=True)))
    device, slot, sensor = (index.ravel() for index in np.indices(windows.shape))
    columns = {"device": device, "feature": np.array(SENSORS)[sensor], "value": windows.ravel(), "time": slot}
    return pa.table({name: pa.array(column) for name, column in columns.items()})


def compute_model_scores(windows: Floats, width: int, seed: int, epochs: int) -> Floats:
    """Return the centered NLL of each window, (N,) in nats, by a model of the first `NUM_FITTED_ROWS` rows.

    Args:
        windows: (N, num_slots, S) windows that end at each row.
        width: Number of rows in a window.
        seed: Seed of the training run.
        epochs: Number of epochs of the training run.
    """
    num_slots = windows.shape[1]
    has_slots = num_slots > 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pq.write_table(make_training_table(windows[width - 1 : NUM_FITTED_ROWS]), folder / "windows.parquet")
        config = TrainConfig(
            out=folder / "model",
            preset="tiny",
            epochs=epochs,
            seed=seed,
            continuous=",".join(SENSORS),
            window=float(num_slots) if has_slots else None,
            slots=num_slots if has_slots else None,
            calibration_share=0.05,  # the model's own calibration is not used, so it may be small
            exemplars=0,
        )
        model = train([folder / "windows.parquet"], config).model
    schema = model.schema
    codes_in_time_order = np.arange(len(schema)).reshape(-1, num_slots).T.ravel()
    # A sensor that was constant in training is not a feature of the model.
    known_sensors = [SENSORS.index(sensor) for sensor in schema.sensor_names]
    codes = np.tile(codes_in_time_order, (len(windows), 1))
    values = schema.normalise(codes, windows[:, :, known_sensors].reshape(len(windows), -1))
    return compute_centered_nll(model, codes, values)


def compute_hotelling_scores(windows: Floats, width: int) -> Floats:
    """Return the squared Mahalanobis distance of each window from those of the first `NUM_FITTED_ROWS` rows, (N,)."""
    rows = windows.reshape(len(windows), -1)
    fitted = rows[width - 1 : NUM_FITTED_ROWS]
    std = fitted.std(0) + 1e-9
    z = (rows - fitted.mean(0)) / std
    precision = np.linalg.inv(np.cov((fitted / std).T) + 1e-2 * np.eye(rows.shape[1]))
    distances: Floats = np.einsum("ij,jk,ik->i", z, precision, z)
    return distances


def detect_anomalies(scores: Floats, width: int) -> Bools:
    """Return whether each test row is called anomalous, (N − 400,), given the scores of all N windows.

    A row is anomalous if its window's score exceeds that of all calibration windows.
    """
    calibration = Calibration.from_statistics(scores[NUM_FITTED_ROWS + width - 1 : NUM_TRAINING_ROWS], "schema")
    p = calibration.compute_pooled_p_values(scores[NUM_TRAINING_ROWS:])
    return np.asarray(p <= calibration.min_p_value * (1 + 1e-9))


def measure_delays(is_detected: Bools, is_anomaly: Bools) -> list[int | None]:
    """Return, for each period of anomalous rows, the number of rows until the first detection, None if missed."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_anomaly, [False]]).astype(np.int8)))
    delays = []
    for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        detections = np.flatnonzero(is_detected[start:end])
        delays.append(int(detections[0]) if len(detections) else None)
    return delays


def measure_experiment(
    experiment: Experiment, width: int, seed: int, epochs: int, num_slots: int = 1
) -> dict[str, Any]:
    """Return the counts and delays of each contender for one experiment."""
    windows = compute_windows(experiment.values, width, num_slots)
    is_anomaly = experiment.is_anomaly[NUM_TRAINING_ROWS:]
    scores_by_contender = {
        "ours": compute_model_scores(windows, width, seed, epochs),
        "T²": compute_hotelling_scores(windows, width),
    }
    line: dict[str, Any] = {"experiment": experiment.name}
    for name, scores in scores_by_contender.items():
        is_detected = detect_anomalies(scores, width)
        counts = ConfusionCounts.count(is_detected, is_anomaly)
        line[name] = {"counts": counts, "delays": measure_delays(is_detected, is_anomaly)}
    return line


def summarise_experiments(lines: Sequence[dict[str, Any]], contender: str) -> dict[str, Any]:
    """Return the rates over all test rows, the numbers of anomalous periods and of detected ones, and the median delay.

    The delay is in seconds, because there is one row per second; it is None if nothing was detected.
    """
    counts = sum((line[contender]["counts"] for line in lines), ConfusionCounts(0, 0, 0, 0))
    delays = [delay for line in lines for delay in line[contender]["delays"]]
    detected = [delay for delay in delays if delay is not None]
    median = float(np.median(detected)) if detected else None
    return counts.compute_rates() | {"anomalies": len(delays), "found": len(detected), "median_delay": median}


def format_results(lines: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of the results by contender and group, followed by the published results."""
    text = format_markdown_header(["method", "F1", "FAR %", "MAR %", "anomalies found", "median delay, s"])
    for contender in CONTENDERS:
        lines_by_group = {"all 34": lines}
        for group in GROUPS:
            lines_by_group[group] = [line for line in lines if line["experiment"].startswith(group)]
        for group, group_lines in lines_by_group.items():
            if not group_lines:
                continue
            summary = summarise_experiments(group_lines, contender)
            delay = "" if summary["median_delay"] is None else f"{summary['median_delay']:.0f}"
            title = f"**{contender}**" if group == "all 34" else f"{contender}, {group}"
            rates = [f"{summary['f1']:.3f}", f"{100 * summary['far']:.1f}", f"{100 * summary['mar']:.1f}"]
            found = f"{summary['found']} of {summary['anomalies']}"
            text.append(format_markdown_row([title, *rates, found, delay]))
    for name, (f1, far, mar) in LEADERBOARD.items():
        text.append(format_markdown_row([f"{name} (published)", f"{f1:.2f}", f"{far:.1f}", f"{mar:.1f}", "", ""]))
    return "\n".join(text)


def format_experiments(lines: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table with our results for each experiment."""
    text = format_markdown_header(["experiment", "F1", "FAR %", "MAR %", "delays, s"])
    for line in lines:
        rates = line["ours"]["counts"].compute_rates()
        delays = ", ".join("missed" if delay is None else str(delay) for delay in line["ours"]["delays"])
        cells = [f"{rates['f1']:.2f}", f"{100 * rates['far']:.0f}", f"{100 * rates['mar']:.0f}"]
        text.append(format_markdown_row([line["experiment"], *cells, delays]))
    return "\n".join(text)


def run(arguments: argparse.Namespace) -> None:
    """Measure all experiments and publish the results."""
    width, num_slots = arguments.window, arguments.slots
    if width % num_slots:
        raise ConfigError(
            f"--slots {num_slots}: a window of {width} rows cannot be divided into {num_slots} equal parts"
        )
    experiments = read_experiments(get_tables_folder().parent / "skab")
    lines = [
        measure_experiment(experiment, width, arguments.seed, arguments.epochs, num_slots) for experiment in experiments
    ]
    figures = {name: summarise_experiments(lines, name) for name in CONTENDERS}
    line = {"benchmark": "skab", "window": width, "slots": num_slots, "experiments": len(lines)}
    conditions = (
        f"{describe_machine()}, {format_today()}; {len(lines)} experiments, windows of {width} s with {num_slots} time "
        f"slot(s), {arguments.epochs} epochs of training each, seed {arguments.seed}."
    )
    text = (
        f"# SKAB\n\n{conditions}\n\n{format_results(lines)}\n\n"
        f"## Our results by experiment\n\n{format_experiments(lines)}\n"
    )
    publish_results("skab", text, [line | figures])
    print(json.dumps(line | figures))


def main() -> None:
    """Run the program."""
    options = build_parser(__doc__, "")
    options.add_argument("--window", type=int, default=10, help="length of a window in seconds; 10 by default")
    slots_help = "number of equal parts of a window, with one mean for each; 1 by default"
    options.add_argument("--slots", type=int, default=1, help=slots_help)
    epochs_help = "number of epochs of each training run; 60 by default"
    options.add_argument("--epochs", type=int, default=60, help=epochs_help)
    options.add_argument("--seed", type=int, default=0, help="seed of the training runs; 0 by default")
    run_benchmark("skab", run, options)


if __name__ == "__main__":
    main()
