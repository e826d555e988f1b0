"""Drift detection: delay and false alarms, compared with change detectors of River, on the tables of ADBench.

    python -m benchmarks.drift --tables pendigits,satellite --models /tmp/models

Models, splits and units are those of `benchmarks.early`, with which --models DIR can be shared. All held-out normal
records of a table arrive in random orders, and each has a largest prefix statistic. A simulated stream draws at random
which of them are the calibration records and which are the stream, so that all are exchangeable. The detectors are:

    ours              the test martingale of `deformer_stream/calibration/drift.py`; a false alarm, ever, has a
                      probability of at most 1/level
    ADWIN, KSWIN      River's detectors with their defaults, on the p-values of the records among the calibration
    Page-Hinkley      River's detector of a growing mean, on the negative p-values

Streams without a change count false alarms. In the other streams, a change occurs after `NUM_BEFORE_CHANGE` records:
one feature is shifted or noisier by a number of its standard deviations in the model's units, or a share of the records
are anomalies. A stream counts as detected if the first alarm is within `NUM_AFTER_CHANGE` records after the change; an
alarm before the change counts as a miss. If one feature has changed, it is also measured how often our notice names it
first.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.command import build_parser, describe_machine, format_today, publish_results, run_benchmark
from benchmarks.early import DRAW_ORDERS_BY_NAME, Case, prepare_case
from benchmarks.tables import find_tables, format_markdown_header, format_markdown_row, parse_seeds
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.drift import NUM_RECENT_RECORDS, DriftMonitor, find_shifted_features
from deformer_stream.calibration.torch_scoring import score_records
from deformer_stream.errors import ConfigError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEVELS = (10.0, 100.0, 1000.0)
"""Alarm levels of ours in streams without a change."""

CHANGE_LEVEL = 1000.0
"""Alarm level of ours in streams with a change: at most 10 of 10,000 streams without a change would have an alarm."""

NUM_BEFORE_CHANGE, NUM_AFTER_CHANGE = 400, 600
"""Numbers of records of a stream before and after the change."""

NUM_UNCHANGED_STREAMS, NUM_CHANGED_STREAMS = 200, 20
"""Numbers of simulated streams without a change, and with each kind of change."""

MIN_NORMALS = 1500
"""Number of held-out normal records below which a stream would repeat records."""

PEERS = ("ADWIN", "KSWIN", "Page-Hinkley")
CHANGES = ("shift 0.5", "shift 1", "shift 2", "noise 1", "noise 2", "anomalies 10%", "anomalies 30%")

FindAlarm = Callable[[Floats, Floats], "int | None"]
"""Returns the number of stream records until the first alarm, None without an alarm. Its arguments are the calibration
statistics and the statistics of the stream in order."""


def make_own_detector(level: float) -> FindAlarm:
    """Return our detector with this alarm level."""

    def find_alarm(calibration: Floats, stream: Floats) -> int | None:
        monitor = DriftMonitor(Calibration.from_statistics(calibration, "random"), "model", level)
        monitor.observe([0] * len(stream), [str(i) for i in range(len(stream))], stream)
        alarms = monitor.pop_alarms()
        return alarms[0].num_records if alarms else None

    return find_alarm


def make_peer_detector(name: str, seed: int) -> FindAlarm:
    """Return one of River's detectors."""
    from river import drift

    def find_alarm(calibration: Floats, stream: Floats) -> int | None:
        create_by_name = {
            "ADWIN": drift.ADWIN,
            "KSWIN": lambda: drift.KSWIN(seed=seed),
            "Page-Hinkley": lambda: drift.PageHinkley(mode="up"),
        }
        detector, sign = create_by_name[name](), -1.0 if name == "Page-Hinkley" else 1.0
        p_values = Calibration.from_statistics(calibration, "random").compute_pooled_p_values(stream)
        for num_records, p in enumerate(p_values.tolist(), 1):
            detector.update(sign * p)
            if detector.drift_detected:
                return num_records
        return None

    return find_alarm


def apply_change(
    change: str, rows: Floats, anomalies: Floats, std: Floats, rng: np.random.Generator
) -> tuple[Floats, int]:
    """Return changed records, and the feature that has changed.

    Args:
        change: One of `CHANGES`.
        rows: (N, F) normal records.
        anomalies: (M, F) anomalies, which replace some of the records in a change of this kind.
        std: (F,) standard deviations of the features.
        rng: Source of random numbers.

    Returns:
        The changed records, (N, F), and the code of the changed feature, −1 if records were replaced by anomalies.
    """
    kind, amount = change.split(" ")
    rows = rows.copy()
    if kind == "anomalies":
        count = round(float(amount.rstrip("%")) / 100 * len(rows))
        rows[rng.permutation(len(rows))[:count]] = anomalies[rng.integers(len(anomalies), size=count)]
        return rows, -1
    feature = int(rng.integers(rows.shape[1]))
    scale = float(amount) * std[feature]
    rows[:, feature] += scale if kind == "shift" else scale * rng.standard_normal(len(rows))
    return rows, feature


def names_feature_first(case: Case, calibration_rows: Ints, feature: int, codes: Ints, rows: Floats) -> bool:
    """Return whether a notice after these records names the changed feature first.

    Args:
        case: The model and its records.
        calibration_rows: The calibration records, as row numbers of the held-out normal records.
        feature: Code of the changed feature.
        codes: (N, F) orders of the last N records before the notice, at most `NUM_RECENT_RECORDS`.
        rows: (N, F) these records.
    """
    names = case.model.schema.names
    normals = collect_held_out_normals(case)
    draw_orders = DRAW_ORDERS_BY_NAME["random"]
    calibration_codes = draw_orders(len(calibration_rows), normals.shape[1], np.random.default_rng(0))

    def average_neg_log_p(record_codes: Ints, records: Floats) -> dict[str, float]:
        values = np.take_along_axis(records, record_codes, 1)
        return score_records(case.model, record_codes, values).average_neg_log_p_by_feature(names)

    expected = average_neg_log_p(calibration_codes, normals[calibration_rows])
    shifts = find_shifted_features(average_neg_log_p(codes, rows), expected)
    return bool(shifts) and shifts[0].feature == names[feature]


def collect_held_out_normals(case: Case) -> Floats:
    """Return the normal records on which the model was not trained, (N, F)."""
    return np.concatenate([case.calibration, case.test[~case.is_anomaly]])


def count_false_alarms(
    statistics: Floats, num_calibration: int, detectors: dict[str, FindAlarm], seed: int
) -> dict[str, int]:
    """Return, for each detector, in how many of `NUM_UNCHANGED_STREAMS` streams without a change it raised an alarm.

    Args:
        statistics: (N,) largest prefix statistics of the held-out normal records.
        num_calibration: Number of calibration records of a stream.
        detectors: The detectors by name.
        seed: Seed of the streams.
    """
    rng = np.random.default_rng([seed, 0xD21F])
    counts = dict.fromkeys(detectors, 0)
    for _ in range(NUM_UNCHANGED_STREAMS):
        order = rng.permutation(len(statistics))
        calibration, rest = statistics[order[:num_calibration]], statistics[order[num_calibration:]]
        stream = rest[: NUM_BEFORE_CHANGE + NUM_AFTER_CHANGE]
        for name, find_alarm in detectors.items():
            counts[name] += find_alarm(calibration, stream) is not None
    return counts


def measure_change(
    case: Case, statistics: Floats, change: str, num_calibration: int, detectors: dict[str, FindAlarm], seed: int
) -> dict[str, Any]:
    """Measure the delays of all detectors for one kind of change.

    Args:
        case: The model and its records.
        statistics: (N,) largest prefix statistics of the held-out normal records.
        change: One of `CHANGES`.
        num_calibration: Number of calibration records of a stream.
        detectors: The detectors by name.
        seed: Seed of the streams.

    Returns:
        "delays": for each detector and stream, the number of records between change and alarm, None if the alarm was
        early or missing. "named": for each detection of ours, whether the notice names the changed feature first.
    """
    rng = np.random.default_rng([seed, 0xC4A6, CHANGES.index(change)])
    normals, anomalies = collect_held_out_normals(case), case.test[case.is_anomaly]
    delays: dict[str, list[int | None]] = {name: [] for name in detectors}
    is_named_first: list[bool] = []
    for _ in range(NUM_CHANGED_STREAMS):
        order = rng.permutation(len(normals))
        calibration_rows, rest = order[:num_calibration], order[num_calibration:]
        after_change = normals[rest[NUM_BEFORE_CHANGE:][:NUM_AFTER_CHANGE]]
        rows, feature = apply_change(change, after_change, anomalies, normals.std(0), rng)
        codes = DRAW_ORDERS_BY_NAME["random"](*rows.shape, rng)
        changed_statistics = score_records(case.model, codes, np.take_along_axis(rows, codes, 1)).statistics
        stream = np.concatenate([statistics[rest[:NUM_BEFORE_CHANGE]], changed_statistics])
        for name, find_alarm in detectors.items():
            num_records = find_alarm(statistics[calibration_rows], stream)
            is_detected = num_records is not None and num_records > NUM_BEFORE_CHANGE
            delay = num_records - NUM_BEFORE_CHANGE if num_records is not None and is_detected else None
            delays[name].append(delay)
            if name == "ours" and delay is not None and feature >= 0:
                recent = slice(max(0, delay - NUM_RECENT_RECORDS), delay)
                is_named_first.append(names_feature_first(case, calibration_rows, feature, codes[recent], rows[recent]))
    return {"delays": delays, "named": is_named_first}


def measure_table(case: Case, seed: int) -> dict[str, Any]:
    """Measure false alarms and delays on one table with one seed."""
    normals = collect_held_out_normals(case)
    codes = DRAW_ORDERS_BY_NAME["random"](*normals.shape, np.random.default_rng([seed, 0x0DE5]))
    statistics = score_records(case.model, codes, np.take_along_axis(normals, codes, 1)).statistics
    num_calibration = min(len(case.calibration), len(normals) - NUM_BEFORE_CHANGE - NUM_AFTER_CHANGE)
    peers = {name: make_peer_detector(name, seed) for name in PEERS}
    own_by_level = {f"level {level:g}": make_own_detector(level) for level in LEVELS}
    detectors = {"ours": make_own_detector(CHANGE_LEVEL)} | peers
    return {
        "seed": seed,
        "calibrated": num_calibration,
        "streams": NUM_UNCHANGED_STREAMS,
        "false": count_false_alarms(statistics, num_calibration, own_by_level | peers, seed),
        "changes": {
            change: measure_change(case, statistics, change, num_calibration, detectors, seed) for change in CHANGES
        },
    }


def format_delays(delays: list[int | None]) -> str:
    """Return the share of streams with a detection and the median delay in records."""
    known = [delay for delay in delays if delay is not None]
    share = f"{100 * len(known) / len(delays):.0f}%"
    return f"{share} · {np.median(known):.0f}" if known else share


def format_results(lines: list[dict[str, Any]]) -> str:
    """Return the results as two Markdown tables with headings."""
    return f"{_format_false_alarms(lines)}\n\n{_format_changes(lines)}"


def _format_false_alarms(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the streams without a change in which an alarm was raised."""
    runs = [run for line in lines for run in line["runs"]]
    detectors = [f"level {level:g}" for level in LEVELS] + list(PEERS)
    titles = ["table", "calibration records", "streams", *detectors]
    text = ["## Streams without a change that have an alarm", "", *format_markdown_header(titles)]
    for line in lines:
        for run in line["runs"]:
            cells = [line["table"], str(run["calibrated"]), str(run["streams"])]
            text.append(format_markdown_row(cells + [str(run["false"][name]) for name in detectors]))
    num_streams = sum(run["streams"] for run in runs)
    shares = [f"{100 * sum(run['false'][name] for run in runs) / num_streams:.1f}%" for name in detectors]
    text.append(format_markdown_row(["**all**", "", str(num_streams), *shares]))
    bounds = [f"{100 / level:g}%" for level in LEVELS] + ["no guarantee"] * len(PEERS)
    text.append(format_markdown_row(["**guaranteed bound**", "", "", *bounds]))
    return "\n".join(text)


def _format_changes(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table of detections and delays for each kind of change."""
    runs = [run for line in lines for run in line["runs"]]
    title = f"## Change after {NUM_BEFORE_CHANGE} records: streams with a detection · median delay in records"
    titles = ["change", f"ours, level {CHANGE_LEVEL:g}", *PEERS, "ours names the feature first"]
    text = [title, "", *format_markdown_header(titles)]
    for change in CHANGES:
        measurements = [run["changes"][change] for run in runs]
        delays = [format_delays([d for m in measurements for d in m["delays"][name]]) for name in ("ours", *PEERS)]
        named = [is_first for m in measurements for is_first in m["named"]]
        share_named = f"{100 * np.mean(named):.0f}% of {len(named)}" if named else ""
        text.append(format_markdown_row([change, *delays, share_named]))
    return "\n".join(text)


def run(arguments: argparse.Namespace) -> None:
    """Measure all requested tables and publish the results."""
    try:
        import river  # noqa: F401
    except ImportError:
        raise ConfigError(
            "river is not installed: run make bench-quality, or pip install -c constraints.txt -e '.[bench]'"
        ) from None
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        models = Path(arguments.models or temporary)
        for name, path in find_tables(arguments.tables).items():
            table = pq.read_table(path)
            case_by_seed = {
                seed: prepare_case(table, seed, arguments.max_time, models / f"{name}-{seed}")
                for seed in parse_seeds(arguments.seeds)
            }
            num_normals = min(len(collect_held_out_normals(case)) for case in case_by_seed.values())
            if num_normals < MIN_NORMALS:
                message = f"{name} is skipped: it has {num_normals} held-out normal records, {MIN_NORMALS} are needed"
                print(message, file=sys.stderr, flush=True)
                continue
            lines.append({"table": name, "runs": [measure_table(case, seed) for seed, case in case_by_seed.items()]})
            print(name, file=sys.stderr, flush=True)
    if not lines:
        raise ConfigError(
            f"--tables {arguments.tables}: no table has {MIN_NORMALS} held-out normal records; name larger tables"
        )
    conditions = f"{describe_machine()}, {format_today()}; {len(lines)} tables, seeds {arguments.seeds}."
    text = f"# Drift\n\n{conditions}\n\n{format_results(lines)}\n"
    found = {
        change: format_delays(
            [d for line in lines for r in line["runs"] for d in r["changes"][change]["delays"]["ours"]]
        )
        for change in CHANGES
    }
    print(json.dumps({"benchmark": "drift", "tables": len(lines), "level": CHANGE_LEVEL, "found": found}))
    publish_results("drift", text, lines)


def main() -> None:
    """Run the program."""
    options = build_parser(__doc__, "all with enough normal records by default", seeds="0", max_time="45s")
    models_help = "folder in which trained models are stored and reused; models are not stored by default"
    options.add_argument("--models", default="", help=models_help)
    run_benchmark("drift", run, options)


if __name__ == "__main__":
    main()
