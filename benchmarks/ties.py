"""Effect of holding ties: readings that arrive with equal event times, scored as a group or in order of arrival.

    python -m benchmarks.ties --tables cardio,pendigits --seeds 0 --max-time 30s --models /tmp/models

Splits, training and tables are those of `benchmarks.early`. The features of each record arrive in a random order of its
own, a few at the same time. All records pass through the engine, in calibration as well. Both tie policies ("arrival"
and "hold") receive the same events, and once more with the readings of each tie group in another order. The report
shows false alarms, detections by share of the features, the AUROC of the largest statistic, and the time per event. It
also shows how many of the records with an alert raise it in one of the two orders only.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.command import build_parser, describe_machine, format_today, publish_results, run_benchmark
from benchmarks.early import ALPHA, OBSERVED_SHARES, Case, compute_p_values, count_alerts, prepare_case
from benchmarks.tables import (
    find_tables,
    format_markdown_header,
    format_markdown_row,
    parse_seeds,
    require_scikit_learn,
)
from deformer_stream.calibration.conformal import Calibration, TiePolicy
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.events import EventBatch
from deformer_stream.model.deformer import DEformer

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TIE_POLICIES: tuple[TiePolicy, ...] = get_args(TiePolicy)

EVENTS_PER_BATCH = 8192
"""Number of events that the engine receives at a time."""

ALPHAS = (0.05, ALPHA)
"""False-alarm rates that are measured if there are enough calibration records."""

ComputeStatistics = Callable[[DEformer, TiePolicy, Floats, Ints, int], tuple[Floats, float]]
"""A function like `compute_engine_statistics`."""


def compute_engine_statistics(
    model: DEformer, tie_policy: TiePolicy, values: Floats, codes: Ints, group_size: int
) -> tuple[Floats, float]:
    """Return the running statistics of N records from the engine, and the seconds per event.

    Args:
        model: The network.
        tie_policy: How readings with equal event times are scored.
        values: (N, F) values in the model's units.
        codes: (N, L) feature codes in order of arrival.
        group_size: Number of consecutive readings of a record that have the same event time.

    Returns:
        (N, L) running statistics, larger is more anomalous, and the mean time to handle one event.
    """
    num_records, num_readings = codes.shape
    engine = Engine(model, Calibration(np.empty(0), "arrival", tie_policy=tie_policy), "", (), effort="off")
    event_times = np.tile(np.arange(num_readings) // group_size, num_records)
    order = np.argsort(event_times, kind="stable")  # the readings of all records with one time come together
    record = np.repeat(np.arange(num_records), num_readings)[order]
    code, times = codes.ravel()[order], event_times[order]
    raw_values = model.schema.denormalise(code, np.take_along_axis(values, codes, 1).ravel()[order])
    statistics, seconds = np.empty(codes.shape), 0.0
    # The limit is one larger, so that there is a batch even without events.
    for start in range(0, len(record) + 1, EVENTS_PER_BATCH):
        events = slice(start, start + EVENTS_PER_BATCH)
        record_ids = [str(number) for number in record[events].tolist()]
        zeros = np.zeros(len(record_ids), np.int32)
        batch = EventBatch(record_ids, code[events].astype(np.int32), raw_values[events], times[events], zeros, zeros)
        began = time.perf_counter()
        effects = engine.handle(batch, 0)
        seconds += time.perf_counter() - began
        scored_records = [int(effects.batch.record_ids[event]) for event in effects.scored.event_indices.tolist()]
        statistics[scored_records, effects.scored.seq] = effects.scored.score
    return statistics, seconds / statistics.size


def shuffle_within_groups(codes: Ints, group_size: int, rng: np.random.Generator) -> Ints:
    """Return the orders of N records, (N, L), with the readings of each tie group in another random order."""
    keys = np.arange(codes.shape[1]) // group_size + rng.random(codes.shape)
    return np.take_along_axis(codes, np.argsort(keys, 1), 1)


def compute_auroc(scores: Floats, is_anomaly: NDArray[np.bool_]) -> float:
    """Return the area under the ROC curve of scores, of which larger is more anomalous."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(is_anomaly, scores))


def measure_table(
    case: Case, seed: int, group_size: int, compute_statistics: ComputeStatistics = compute_engine_statistics
) -> dict[str, Any]:
    """Measure both tie policies on one table with one seed; the figures are stored by policy."""
    rng = np.random.default_rng([seed, 0x71E5])
    num_calibration, num_features = case.calibration.shape
    calibration_codes = np.argsort(rng.random((num_calibration, num_features)), 1)
    test_codes = np.argsort(rng.random((len(case.test), num_features)), 1)
    shuffled_codes = shuffle_within_groups(test_codes, group_size, rng)
    alphas = [alpha for alpha in ALPHAS if alpha * (num_calibration + 1) >= 1]
    run: dict[str, Any] = {"seed": seed, "calibrated": num_calibration}
    for policy in TIE_POLICIES:
        calibration = compute_statistics(case.model, policy, case.calibration, calibration_codes, group_size)[0]
        test, seconds = compute_statistics(case.model, policy, case.test, test_codes, group_size)
        shuffled = compute_statistics(case.model, policy, case.test, shuffled_codes, group_size)[0]
        p_values, shuffled_p_values = compute_p_values(calibration, test), compute_p_values(calibration, shuffled)
        figures_by_alpha = []
        for alpha in alphas:
            figures = count_alerts(p_values, case.is_anomaly, num_calibration, alpha).to_json()
            first = p_values.by_prefix[:, -1] <= alpha
            second = shuffled_p_values.by_prefix[:, -1] <= alpha
            flips = int((first != second).sum()) / max(1, int((first | second).sum()))
            figures_by_alpha.append(figures | {"flips": flips})
        auroc = compute_auroc(test.max(1), case.is_anomaly)
        run[policy] = {"auroc": auroc, "seconds": seconds, "alphas": figures_by_alpha}
    return run


def format_report(lines: list[dict[str, Any]], conditions: str) -> str:
    """Return the report in Markdown, with means over the seeds."""
    titles = [
        "table",
        "α",
        "ties",
        "false alarms (99% bounds)",
        *(f"detected by {share:.0%}" for share in OBSERVED_SHARES),
        "AUROC",
        "alerts in one order only",
        "µs/event",
    ]
    text = [f"# Ties\n\n{conditions}\n", *format_markdown_header(titles)]
    for line in lines:
        num_alphas = min(len(run["hold"]["alphas"]) for run in line["runs"])
        for alpha_index in range(num_alphas):
            for policy in TIE_POLICIES:
                runs = [run[policy] for run in line["runs"]]
                figures = [run["alphas"][alpha_index] for run in runs]
                num_alarms, low, high = (sum(entry[key] for entry in figures) for key in ("alarms", "low", "high"))
                detections = [
                    np.mean([entry["at_shares"][i] for entry in figures]) for i in range(len(OBSERVED_SHARES))
                ]
                cells = [
                    line["table"],
                    f"{figures[0]['alpha']:g}",
                    policy,
                    f"{num_alarms} ({low}–{high})",
                    *(f"{share:.3f}" for share in detections),
                    f"{np.mean([run['auroc'] for run in runs]):.3f}",
                    f"{np.mean([entry['flips'] for entry in figures]):.1%}",
                    f"{1e6 * np.mean([run['seconds'] for run in runs]):.0f}",
                ]
                text.append(format_markdown_row(cells))
    return "\n".join(text) + "\n"


def run(arguments: argparse.Namespace) -> None:
    """Measure all requested tables and publish the results."""
    require_scikit_learn()
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        models = Path(arguments.models or temporary)
        for name, path in find_tables(arguments.tables).items():
            table, runs = pq.read_table(path), []
            for seed in parse_seeds(arguments.seeds):
                case = prepare_case(table, seed, arguments.max_time, models / f"{name}-{seed}")
                runs.append(measure_table(case, seed, arguments.group_size))
            lines.append({"table": name, "group_size": arguments.group_size, "runs": runs})
            print(name, file=sys.stderr, flush=True)
    conditions = (
        f"{describe_machine()}, {format_today()}; tie groups of {arguments.group_size} readings, "
        f"seeds {arguments.seeds}. Each training run takes at most {arguments.max_time} including calibration."
    )
    text = format_report(lines, conditions)
    all_runs = [run for line in lines for run in line["runs"]]
    means = {
        policy: {
            "auroc": float(np.mean([run[policy]["auroc"] for run in all_runs])),
            "microseconds": float(1e6 * np.mean([run[policy]["seconds"] for run in all_runs])),
        }
        for policy in TIE_POLICIES
    }
    assert all(math.isfinite(mean["auroc"]) for mean in means.values())
    print(json.dumps({"benchmark": "ties", "group_size": arguments.group_size, "tables": len(lines)} | means))
    publish_results("ties", text, lines)


def main() -> None:
    """Run the program."""
    options = build_parser(__doc__, seeds="0", max_time="30s")
    group_help = "number of readings of a record with the same event time; 4 by default"
    options.add_argument("--group-size", type=int, default=4, help=group_help)
    models_help = "folder in which trained models are stored and reused; models are not stored by default"
    options.add_argument("--models", default="", help=models_help)
    run_benchmark("ties", run, options)


if __name__ == "__main__":
    main()
