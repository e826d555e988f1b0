"""Explanations of irregular readings: faults are injected into stays, and the alerts name the faulty parameter.

    python -m benchmarks.irregular_attribution --max-time 10m

The stays, their split and the faults are those of `benchmarks.icu`. `deformer-train --irregular` trains a model on the
stays for training. The engine scores the faulty stays with the model's own calibration. Alerts whose context has no
faulty reading are false alarms and are left out. The parameter of the first contribution is compared with the faulty
one, or with the two that are swapped:

- arrival: contributions by the surprise on arrival (effort "fast").
- suspects: contributions with the suspects first (effort "full").
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import build_parser, describe_machine, format_today, publish_results, run_benchmark
from benchmarks.icu import make_case, read_stays
from benchmarks.irregular_alerts import Case
from benchmarks.irregular_deformer import CommandDeformer
from benchmarks.irregular_records import FAULT_KINDS, FIRST_TIME, FaultyReadings, Readings
from benchmarks.tables import format_markdown_header, format_markdown_row, get_tables_folder, parse_seeds
from deformer_stream import Detector, load
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.events import Alert, EventBatch
from deformer_stream.engine.explain import ExplanationEffort
from deformer_stream.model.schema import format_label

ALPHAS = (0.05, 0.2)
"""False-alarm rates; alerts at the larger one show more faults."""

EFFORTS: dict[str, ExplanationEffort] = {"arrival": "fast", "suspects": "full"}
"""The efforts that are compared, by the name of their ranking."""

STAYS_PER_BATCH = 64


def make_batch(readings: Readings, detector: Detector) -> EventBatch:
    """Return the readings of a few stays as events of the detector's model."""
    schema = detector.schema
    codes = np.array([schema.code_by_name[name] for name in readings.sensors])[readings.codes]
    values = readings.values.copy()
    for code, feature in enumerate(schema.features):
        if feature.kind == "discrete":
            label_codes = {label: index for index, label in enumerate(feature.labels)}
            rows = np.flatnonzero(codes == code)
            texts = map(format_label, values[rows].tolist())
            values[rows] = [label_codes.get(text, len(feature.labels)) for text in texts]
    return EventBatch(
        [readings.records[row] for row in readings.record_index.tolist()],
        codes.astype(np.int32),
        values,
        to_microseconds(readings.times),
        np.arange(len(codes), dtype=np.int32),
        np.zeros(len(codes), np.int32),
    )


def to_microseconds(times: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return times since the origin of a stay as microseconds since 1970."""
    return np.round((times + FIRST_TIME) * 1e6).astype(np.int64)


def raise_alerts(readings: Readings, detector: Detector, alpha: float, effort: ExplanationEffort) -> dict[str, Alert]:
    """Return the alerts of stays by the id of the stay."""
    artifact = detector.artifact
    alerts: dict[str, Alert] = {}
    for start in range(0, len(readings.records), STAYS_PER_BATCH):
        part = readings.select(range(start, min(start + STAYS_PER_BATCH, len(readings.records))))
        engine = Engine(artifact.model, artifact.calibration, artifact.fingerprint, alpha, effort=effort)
        alerts |= {alert.record: alert for alert in engine.handle(make_batch(part, detector), 0).alerts}
    return alerts


def find_faulty_readings(faults: FaultyReadings, normal: Readings) -> dict[str, set[tuple[str, int]]]:
    """Return the faulty readings of each stay as pairs of a parameter and a time in microseconds since 1970."""
    faulty, original = faults.readings, normal.select(faults.rows)
    is_faulty = (faulty.values != original.values) | (faulty.codes != original.codes)
    times, record_index = to_microseconds(faulty.times), faulty.record_index
    found: dict[str, set[tuple[str, int]]] = {record: set() for record in faulty.records}
    for row in np.flatnonzero(is_faulty).tolist():
        record = faulty.records[record_index[row]]
        found[record].add((faulty.sensors[faulty.codes[row]], int(times[row])))
    return found


def measure_kind(faults: FaultyReadings, normal: Readings, detector: Detector, alpha: float) -> dict[str, Any]:
    """Return the number of explained alerts, and for each ranking the share whose first parameter is faulty."""
    faulty_by_record = find_faulty_readings(faults, normal)
    line: dict[str, Any] = {}
    for name, effort in EFFORTS.items():
        started = time.process_time()
        alerts = raise_alerts(faults.readings, detector, alpha, effort)
        hits = []
        for record, alert in alerts.items():
            faulty = faulty_by_record[record]
            if any((part.feature, part.time) in faulty for part in alert.contributions):
                hits.append(alert.contributions[0].feature in {parameter for parameter, _ in faulty})
        line |= {"alerts": len(alerts), "explained": len(hits), name: float(np.mean(hits)) if hits else None}
        line[f"{name}_s"] = round(time.process_time() - started, 1)
    return line


def format_report(lines: list[dict[str, Any]], conditions: str) -> str:
    """Return the report in Markdown."""
    text = [f"# Explanations of irregular readings (ICU 2012)\n\n{conditions}\n"]
    text += format_markdown_header(["α", "fault", "alerts", "with faulty readings", *EFFORTS])
    for line in lines:
        shares = ["" if line[name] is None else f"{line[name]:.0%}" for name in EFFORTS]
        cells = [f"{line['alpha']:.0%}", line["fault"], str(line["alerts"]), str(line["explained"]), *shares]
        text.append(format_markdown_row(cells))
    return "\n".join(text) + "\n"


def train_detector(case: Case, seed: int, arguments: argparse.Namespace) -> Detector:
    """Return a detector that the training command has fitted to the stays for training."""
    deformer = CommandDeformer(arguments.max_time, seed, arguments.folder)
    deformer.fit(case.train)
    assert deformer.folder is not None
    return load(deformer.folder / "model")


def run(arguments: argparse.Namespace) -> None:
    """Train on each split, measure the explanations of each kind of fault, and publish the results."""
    stays, has_survived = read_stays(get_tables_folder().parent / "icu2012")
    lines: list[dict[str, Any]] = []
    for seed in parse_seeds(arguments.seeds):
        case = make_case(stays, has_survived, seed)
        detector = load(arguments.model) if arguments.model else train_detector(case, seed, arguments)
        for alpha in ALPHAS:
            for kind in FAULT_KINDS:
                figures = measure_kind(case.faulty_by_name[kind], case.test, detector, alpha)
                lines.append(
                    {"benchmark": "irregular_attribution", "seed": seed, "alpha": alpha, "fault": kind, **figures}
                )
                print(json.dumps(lines[-1]), flush=True)
    conditions = f"{describe_machine()}, {format_today()}; seeds {arguments.seeds}, training for {arguments.max_time}."
    publish_results("irregular_attribution", format_report(lines, conditions), lines)


def main() -> None:
    """Run the program."""
    options = build_parser(__doc__, tables="", seeds="0", max_time="10m")
    options.add_argument("--folder", type=Path, help="folder for the model and the tables (default: a temporary one)")
    options.add_argument("--model", help="measure this model in place of a new one; for the seed it was trained with")
    run_benchmark("irregular_attribution", run, options)


if __name__ == "__main__":
    main()
