"""From alerts to incidents: is there one incident for one fault, soon, and how many are false?

    python -m benchmarks.incidents skab
    python -m benchmarks.incidents tep
    python -m benchmarks.incidents hydraulic

A row is a record of one device. Our records become incidents as in the program: p-values of complete records, the
detector of `calibration.incident_evidence`, the segment rule, and `incidents.tracker`. A second line has the
anytime-valid p-values from which alerts follow in their place. The peers are Hotelling's T² and the residual Q of a
PCA, and an Isolation Forest. Each has a run rule: an incident opens when the score has been above a threshold in k of
the last n rows. All thresholds are set by the same segments of normal rows at the same budget of false incidents, with
the segment rule. Each peer has the run rule with which it finds most faults on the rows that are tested, which favours
the peers. A second line of each peer is chosen with hindsight. It has the run rule and the threshold with which the
peer finds most of the tested faults, with at most as many false incidents as we have. "T², our evidence" is T² in place
of the network, with our detector.

An incident is false if it opens, or is reopened, in a normal row. A fault is found if an incident opens, or is
reopened, in one of its rows.

SKAB       34 experiments with a pump, a row per second. Rows are means of five seconds of six sensors, relative to the
           mean and the standard deviation of the experiment's own training rows. One model for all experiments. The
           first 400 rows of each train: for the final model all of them, and for the p-values and the segments models
           that were trained without a block of 100 rows of each experiment. One fault in each experiment.
TEP        Tennessee Eastman process, 52 variables, a row every three minutes. 500 normal rows train; 480 rows make
           segments of two hours; 480 rows and the first eight hours of each of 11 faults are normal.
hydraulic  Hydraulic rig, cycles of a minute, eight sensors with a mean for each quarter of a cycle. Three of five
           parts of the normal cycles train, one makes segments of ten cycles, one is tested, in five folds. A fault is
           an uninterrupted run of cycles in which one component is degraded to one degree.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.command import build_parser, describe_machine, format_today, publish_results, run_benchmark
from benchmarks.hydraulic import classify_cycles, read_cycles, split_blocks
from benchmarks.incident_detectors import compute_p_values
from benchmarks.skab import SENSORS, Experiment, compute_windows, read_experiments
from benchmarks.tables import format_markdown_header, format_markdown_row, get_tables_folder, require_scikit_learn
from deformer_stream.calibration.incident_budget import BudgetPlan, IncidentBudget, parse_budget, plan_budget
from deformer_stream.calibration.incident_evidence import LN_10, ScoreTail, fit_tail
from deformer_stream.calibration.incident_segments import SegmentCalibration, SegmentCollector
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.incidents.events import ClosedRows, EvidenceBatch
from deformer_stream.incidents.tracker import IncidentTracker, TrackerOptions
from deformer_stream.library.detector import Detector
from deformer_stream.library.detector import load as load_detector
from deformer_stream.library.training import train

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MICROS = 1_000_000

RECORD_ALPHA = 0.01
"""False-alarm rate of record alerts."""

RUN_RULES = ((1, 1), (3, 3), (8, 10), (15, 20), (24, 30))
"""The run rules k of n of the peers, of which each peer has the best one."""

OURS, OURS_BY_ALERTS = "ours", "ours, p-values of alerts"
"""The evidence of the product, by p-values of complete records; and that by the anytime-valid p-values of alerts."""

HELD_OUT = ", held out"
"""End of the name of the held-out rows of a device."""

PCA_VARIANCE = 0.9
"""Share of the variance that the components of the PCA explain."""

SKAB_BASE_ROWS, SKAB_BLOCK_ROWS, SKAB_WINDOW = 400, 100, 5
TEP_FAULT_ROW = 160


@dataclass(frozen=True, slots=True)
class Fold:
    """Rows that train a model, and rows that it scores.

    Attributes:
        fit: (N, F) normal rows that train the model.
        held_out: Normal rows by device, with which segments and p-values are calibrated.
        tests: Rows that are tested, by device.
    """

    fit: Floats
    held_out: Mapping[str, Floats]
    tests: Mapping[str, Floats]


@dataclass(frozen=True, slots=True)
class Case:
    """A data set.

    Attributes:
        name: Name of the data set.
        columns: The names of the F values of a row.
        folds: The models. Held-out rows of a device in several folds follow each other.
        faults: First row of the fault, and the row after its last one, for each device that is tested; the first row
            can be negative. None for a device without a fault.
        row_seconds: Seconds between two rows.
        segment_rows: Number of rows of a segment.
        budget: Budget of false incidents of a device.
        has_own_p_values: Whether the p-values are those of the model's own calibration. Otherwise they are ranks among
            the held-out rows of the other devices.
    """

    name: str
    columns: tuple[str, ...]
    folds: Sequence[Fold]
    faults: Mapping[str, tuple[int, int] | None]
    row_seconds: float
    segment_rows: int
    budget: IncidentBudget
    has_own_p_values: bool


@dataclass(frozen=True, slots=True)
class DeviceScores:
    """The scores of the rows of one device.

    Attributes:
        scores: (N,) score of each row; larger is more anomalous.
        p_values: (N,) p-value of each row, None if it is unknown.
        tail: The tail by which the p-values are extended, None without.
    """

    scores: Floats
    p_values: Floats | None = None
    tail: ScoreTail | None = None


@dataclass(frozen=True, slots=True)
class CaseScores:
    """The scores of a case by one method.

    Attributes:
        held_out: The scores of the held-out rows by device.
        tests: The scores of the tested rows by device.
    """

    held_out: dict[str, DeviceScores]
    tests: dict[str, DeviceScores]


Scorer = Callable[[Floats, Sequence[Floats]], list[Floats]]
"""Returns the scores of some rows by a model of the rows that it is given first."""


def score_by_pca(fit: Floats, rows: Sequence[Floats]) -> list[tuple[Floats, Floats]]:
    """Return T² and Q of rows: the distance within the components of a PCA, and the squared residual."""
    mean, std = fit.mean(0), fit.std(0) + 1e-9
    _, singular_values, components = np.linalg.svd((fit - mean) / std, full_matrices=False)
    variances = singular_values**2 / (len(fit) - 1)
    num_components = 1 + int(np.searchsorted(variances.cumsum() / variances.sum(), PCA_VARIANCE))
    components, variances = components[:num_components], variances[:num_components]
    results = []
    for part in rows:
        z = (part - mean) / std
        projected = z @ components.T
        residual = z - projected @ components
        results.append(((projected**2 / variances).sum(1), (residual**2).sum(1)))
    return results


def score_by_mahalanobis(fit: Floats, rows: Sequence[Floats]) -> list[Floats]:
    """Return half of the squared Mahalanobis distance of rows, with a small ridge."""
    mean, std = fit.mean(0), fit.std(0) + 1e-9
    precision = np.linalg.inv(np.cov(((fit - mean) / std).T) + 1e-2 * np.eye(fit.shape[1]))
    return [0.5 * np.einsum("ij,jk,ik->i", z, precision, z) for z in ((part - mean) / std for part in rows)]


def score_by_forest(fit: Floats, rows: Sequence[Floats]) -> list[Floats]:
    """Return the scores of an Isolation Forest."""
    from sklearn.ensemble import IsolationForest

    forest = IsolationForest(random_state=0).fit(fit)
    return [-forest.score_samples(part) for part in rows]


def score_all(case: Case, score: Scorer) -> CaseScores:
    """Return the scores of all held-out and tested rows of a case, without p-values."""
    held_out: dict[str, list[Floats]] = {}
    tests: dict[str, DeviceScores] = {}
    for fold in case.folds:
        names = [*fold.held_out, *fold.tests]
        results = score(fold.fit, [*fold.held_out.values(), *fold.tests.values()])
        for name, scores in list(zip(names, results, strict=True))[: len(fold.held_out)]:
            held_out.setdefault(name, []).append(scores)
        for name, scores in list(zip(names, results, strict=True))[len(fold.held_out) :]:
            tests[name] = DeviceScores(scores)
    return CaseScores({name: DeviceScores(np.concatenate(parts)) for name, parts in held_out.items()}, tests)


def rank_among_others(scores: CaseScores) -> CaseScores:
    """Return scores with the p-values of each device, which are ranks among the held-out rows of the other devices."""

    def rank(name: str, device: DeviceScores) -> DeviceScores:
        own = name.removesuffix(HELD_OUT) + HELD_OUT
        others = np.sort(np.concatenate([other.scores for key, other in scores.held_out.items() if key != own]))
        return DeviceScores(device.scores, compute_p_values(device.scores, others), fit_tail(others))

    return CaseScores(
        {name: rank(name, device) for name, device in scores.held_out.items()},
        {name: rank(name, device) for name, device in scores.tests.items()},
    )


def rank_by_cross_fit(case: Case, score: Scorer, num_blocks: int = 5) -> CaseScores:
    """Return scores with p-values: ranks among the training rows, which models without their block have scored."""
    held_out: dict[str, DeviceScores] = {}
    tests: dict[str, DeviceScores] = {}
    for fold in case.folds:
        blocks = np.array_split(np.arange(len(fold.fit)), num_blocks)
        calibration = np.sort(
            np.concatenate([score(np.delete(fold.fit, block, 0), [fold.fit[block]])[0] for block in blocks])
        )
        names = [*fold.held_out, *fold.tests]
        results = score(fold.fit, [*fold.held_out.values(), *fold.tests.values()])
        for index, (name, scores) in enumerate(zip(names, results, strict=True)):
            target = held_out if index < len(fold.held_out) else tests
            target[name] = DeviceScores(scores, compute_p_values(scores, calibration), fit_tail(calibration))
    return CaseScores(held_out, tests)


def train_or_load(case: Case, index: int, arguments: argparse.Namespace) -> Detector:
    """Return the model of a fold: from the folder of --models if it is there, else a new one, which is stored there."""
    folder = None if arguments.models is None else Path(arguments.models) / case.name / str(index)
    if folder is not None and folder.exists():
        return load_detector(folder)
    print(f"{case.name}: training model {index + 1} of {len(case.folds)}", flush=True)
    fit = case.folds[index].fit
    table = pa.table({name: fit[:, column] for column, name in enumerate(case.columns)})
    options = {"continuous": ",".join(case.columns), "preset": "tiny", "seed": arguments.seed}
    return train(table, folder, max_time=arguments.max_time, **options)


def score_by_network(case: Case, arguments: argparse.Namespace) -> dict[str, CaseScores]:
    """Return the scores of our models: those of complete records, and the running ones from which alerts follow."""
    parts_by_title: dict[str, dict[str, list[DeviceScores]]] = {title: {} for title in (OURS, OURS_BY_ALERTS)}
    for index, fold in enumerate(case.folds):
        detector = train_or_load(case, index, arguments)
        calibration = detector.artifact.calibration
        for name, rows in [*fold.held_out.items(), *fold.tests.items()]:
            result = detector.score(rows, columns=list(case.columns), order="arrival")
            p_values = calibration.compute_record_p_values(result.anomaly_score, [""] * len(rows))
            tail = None if calibration.record_scores is None else fit_tail(calibration.record_scores)
            for title, of_fold in (
                (OURS, DeviceScores(result.anomaly_score, p_values, tail)),
                (OURS_BY_ALERTS, DeviceScores(result.score, result.p_value, fit_tail(calibration.scores))),
            ):
                parts_by_title[title].setdefault(name, []).append(of_fold)
    names_of_tests = {name for fold in case.folds for name in fold.tests}
    results = {}
    for title, parts_by_name in parts_by_title.items():
        # The held-out rows of an experiment have another name than its tested ones, and can come from several models.
        joined = {
            name: parts[0] if case.has_own_p_values else DeviceScores(np.concatenate([part.scores for part in parts]))
            for name, parts in parts_by_name.items()
        }
        scores = CaseScores(
            {name: device for name, device in joined.items() if name not in names_of_tests},
            {name: device for name, device in joined.items() if name in names_of_tests},
        )
        results[title] = scores if case.has_own_p_values else rank_among_others(scores)
    return results


def cut_segments(case: Case, scores: CaseScores) -> list[DeviceScores]:
    """Return the held-out rows as segments. A part of less than half a segment at the end is left out."""
    segments = []
    for device in scores.held_out.values():
        for start in range(0, len(device.scores), case.segment_rows):
            part = slice(start, start + case.segment_rows)
            if start and len(device.scores[part]) < case.segment_rows / 2:
                continue
            p_values = None if device.p_values is None else device.p_values[part]
            segments.append(DeviceScores(device.scores[part], p_values, device.tail))
    return segments


def plan_segments(case: Case, log_statistics: Sequence[float]) -> BudgetPlan:
    """Return the plan that keeps the budget of a case by segments with these largest statistics."""
    length = round(case.segment_rows * case.row_seconds * MICROS)
    calibration = SegmentCalibration(length, tuple(sorted(log_statistics)), case.segment_rows, num_devices=1)
    return plan_budget(case.budget, [calibration], requested="segments")


def detect_by_evidence(case: Case, scores: CaseScores) -> tuple[dict[str, list[int]], BudgetPlan]:
    """Return the rows at which incidents open or are reopened by device, as the program detects them, and the plan."""
    maxima: list[float] = []
    for segment in cut_segments(case, scores):
        collector = SegmentCollector(2**62, segment.tail)
        for row, (p_value, score) in enumerate(zip(np.asarray(segment.p_values), segment.scores, strict=True)):
            collector.add("", row, float(p_value), float(score))
        maxima += collector.calibrate().log_statistics
    plan = plan_segments(case, maxima)
    row_micros = round(case.row_seconds * MICROS)
    rows_by_device = {}
    for name, device in scores.tests.items():
        plan_of_device = replace(plan, tail=device.tail)
        options = TrackerOptions(quiet=max(60, round(10 * case.row_seconds)) * MICROS, gap=0)
        tracker = IncidentTracker(plan_of_device, options)
        times = row_micros * np.arange(len(device.scores), dtype=np.int64)
        ids = [f"device@{row}" for row in range(len(times))]
        p_values = np.asarray(device.p_values)
        closed = ClosedRows(
            ids, times, p_values, device.scores, np.ones(len(times), np.int32), p_values <= RECORD_ALPHA
        )
        num_reopened_by_id: dict[str, int] = {}
        rows = []
        for message in tracker.handle(EvidenceBatch("model", 0, closed)):
            if num_reopened_by_id.get(message.id) != message.num_reopened:
                num_reopened_by_id[message.id] = message.num_reopened
                rows.append(message.last // row_micros)
        rows_by_device[name] = rows
    return rows_by_device, plan


def compute_run_statistic(scores: Floats, num_above: int, num_rows: int) -> Floats:
    """Return for each row the largest number that `num_above` of the last `num_rows` scores reach, (N,)."""
    padded = np.concatenate([np.full(num_rows - 1, -np.inf), scores])
    windows = np.lib.stride_tricks.sliding_window_view(padded, num_rows)
    statistic: Floats = np.sort(windows, 1)[:, num_rows - num_above]
    return statistic


def list_run_rules(case: Case) -> list[tuple[int, int]]:
    """Return the run rules that fit into a segment of a case."""
    return [(num_above, num_rows) for num_above, num_rows in RUN_RULES if num_rows <= case.segment_rows]


def calibrate_run_rule(case: Case, scores: CaseScores, num_above: int, num_rows: int) -> float:
    """Return the threshold of a run rule that keeps the budget of a case by its segments."""
    segments = cut_segments(case, scores)
    maxima = [compute_run_statistic(segment.scores, num_above, num_rows).max() for segment in segments]
    smallest = min(maximum for maximum in maxima if np.isfinite(maximum))
    return plan_segments(case, [float(max(maximum, smallest)) for maximum in maxima]).log_threshold


def detect_by_run_rule(
    case: Case, scores: CaseScores, num_above: int, num_rows: int, threshold: float
) -> dict[str, list[int]]:
    """Return the rows at which incidents open by device with a run rule.

    An incident is over when no run has been above the threshold for a minute and for ten rows.
    """
    quiet_rows = max(10, math.ceil(60 / case.row_seconds))
    rows_by_device = {}
    for name, device in scores.tests.items():
        is_above = compute_run_statistic(device.scores, num_above, num_rows) > threshold
        rows, last = [], -math.inf
        for row in np.flatnonzero(is_above).tolist():
            if row - last > quiet_rows:
                rows.append(row)
            last = row
        rows_by_device[name] = rows
    return rows_by_device


def choose_run_rule(case: Case, title: str, scores: CaseScores) -> dict[str, Any]:
    """Return the figures of the best run rule of a peer at the budget of a case."""
    candidates = []
    for num_above, num_rows in list_run_rules(case):
        threshold = calibrate_run_rule(case, scores, num_above, num_rows)
        rows_by_device = detect_by_run_rule(case, scores, num_above, num_rows, threshold)
        candidates.append(_describe_line(case, f"{title}, {num_above} of {num_rows}", scores, rows_by_device))
    return max(candidates, key=_rate_line)


def choose_in_hindsight(case: Case, title: str, scores: CaseScores, max_false: int) -> dict[str, Any]:
    """Return the figures of the best run rule and threshold of a peer with at most this number of false incidents."""
    pool = np.concatenate([device.scores for device in scores.tests.values()])
    candidates = []
    for num_above, num_rows in list_run_rules(case):
        for threshold in np.quantile(pool, np.linspace(0.0, 1.0, 201)).tolist():
            rows_by_device = detect_by_run_rule(case, scores, num_above, num_rows, threshold)
            name = f"{title}, {num_above} of {num_rows}, hindsight"
            line = _describe_line(case, name, scores, rows_by_device)
            if line["false"] <= max_false:
                candidates.append(line)
    return max(candidates, key=lambda line: (line["found"], -(line["median_delay"] or math.inf), -line["false"]))


def _rate_line(line: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the order of figures: more faults found, then fewer false incidents, then a smaller delay."""
    return line["found"], -line["false"], -(line["median_delay"] or math.inf)


def measure_incidents(
    case: Case, rows_by_device: Mapping[str, Sequence[int]], num_rows: Mapping[str, int]
) -> dict[str, Any]:
    """Return the numbers of faults that are found, of incidents, and of false ones, and the median delay.

    Args:
        case: The data set.
        rows_by_device: The rows at which incidents open, by device.
        num_rows: The number of tested rows, by device.
    """
    delays, num_by_fault, false_by_device, normal_rows = [], [], {}, 0
    for name, fault in case.faults.items():
        start, end = fault or (0, 0)
        is_fault = [start <= row < end for row in rows_by_device[name]]
        false_by_device[name] = len(is_fault) - sum(is_fault)
        normal_rows += num_rows[name] - (end - max(start, 0))
        if fault is not None:
            num_by_fault.append(sum(is_fault))
            if any(is_fault):
                delays.append((rows_by_device[name][is_fault.index(True)] - start) * case.row_seconds)
    num_false = sum(false_by_device.values())
    return {
        "faults": len(num_by_fault),
        "found": len(delays),
        "one": num_by_fault.count(1),
        "at_most_two": num_by_fault.count(1) + num_by_fault.count(2),
        "incidents": sum(map(len, rows_by_device.values())),
        "false": num_false,
        "normal_hours": normal_rows * case.row_seconds / 3600,
        "median_delay": float(np.median(delays)) if delays else None,
        "missed": [
            name
            for name, fault in case.faults.items()
            if fault is not None and not _is_found(rows_by_device[name], fault)
        ],
        "delays": delays,
    }


def _is_found(rows: Sequence[int], fault: tuple[int, int]) -> bool:
    """Return whether an incident opens within a fault."""
    return any(fault[0] <= row < fault[1] for row in rows)


def measure_record_alerts(case: Case, scores: CaseScores) -> dict[str, Any]:
    """Return the number of record alerts, and of those in normal rows.

    Without p-values, a row alerts if its score exceeds those of 99% of the held-out rows.
    """
    pool = np.sort(np.concatenate([device.scores for device in scores.held_out.values()]))
    threshold = pool[math.ceil((1.0 - RECORD_ALPHA) * len(pool)) - 1]
    num_alerts = num_false = 0
    for name, device in scores.tests.items():
        is_alerted = device.scores > threshold if device.p_values is None else device.p_values <= RECORD_ALPHA
        start, end = case.faults[name] or (0, 0)
        rows = np.arange(len(is_alerted))
        num_alerts += int(is_alerted.sum())
        num_false += int((is_alerted & ~((rows >= start) & (rows < end))).sum())
    return {"alerts": num_alerts, "false_alerts": num_false}


def measure_case(case: Case, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of all methods on a data set."""
    lines = []
    contenders = dict(score_by_network(case, arguments).items())
    contenders["T², our evidence"] = (
        rank_by_cross_fit(case, score_by_mahalanobis)
        if case.has_own_p_values
        else rank_among_others(score_all(case, score_by_mahalanobis))
    )
    for title, scores in contenders.items():
        rows_by_device, plan = detect_by_evidence(case, scores)
        line = _describe_line(case, title, scores, rows_by_device)
        if title == OURS:  # alerts follow from the other p-values
            line |= measure_record_alerts(case, contenders[OURS_BY_ALERTS])
        lines.append(line | {"threshold": round(plan.log_threshold / LN_10, 1)})
    peers: dict[str, Scorer] = {
        "PCA T²": lambda fit, rows: [t2 for t2, _ in score_by_pca(fit, rows)],
        "PCA Q": lambda fit, rows: [q for _, q in score_by_pca(fit, rows)],
        "Isolation Forest": score_by_forest,
    }
    for title, scorer in peers.items():
        scores = score_all(case, scorer)
        lines.append(choose_run_rule(case, title, scores))
        lines.append(choose_in_hindsight(case, title, scores, lines[0]["false"]))
    return lines


def _describe_line(
    case: Case, title: str, scores: CaseScores, rows_by_device: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Return the figures of one method."""
    num_rows = {name: len(device.scores) for name, device in scores.tests.items()}
    return (
        {"data": case.name, "method": title}
        | measure_record_alerts(case, scores)
        | measure_incidents(case, rows_by_device, num_rows)
    )


def measure_hindsight_delay(case: Case, scores: CaseScores) -> tuple[float, int, int] | None:
    """Return how soon faults are visible at all: the median delay with a threshold of hindsight for each device.

    The threshold is the largest score of the normal rows before the fault. A fault is visible from the first row on
    from which eight of ten rows are above it. Only a rule that adds up scores can be sooner without false incidents.

    Returns:
        The median delay in seconds, and the numbers of faults that become visible and of faults with normal rows
        before them; None if there are none.
    """
    delays, num_faults = [], 0
    for name, fault in case.faults.items():
        if fault is None or fault[0] <= 0:
            continue
        num_faults += 1
        start, end = fault
        values = scores.tests[name].scores
        is_above = values > values[:start].max()
        visible = [row for row in range(start, end) if is_above[row] and is_above[row : row + 10].mean() >= 0.8]
        if visible:
            delays.append((visible[0] - start) * case.row_seconds)
    return (float(np.median(delays)), len(delays), num_faults) if delays else None


def make_skab_case() -> Case:
    """Return the experiments of the pump test bed as one case, with blocks of their first rows held out."""
    experiments = read_experiments(get_tables_folder().parent / "skab")
    # An experiment whose fault begins within the first rows is tested, but trains and calibrates nothing.
    is_clean = [not experiment.is_anomaly[:SKAB_BASE_ROWS].any() for experiment in experiments]
    windows = [compute_windows(experiment.values, SKAB_WINDOW)[:, 0] for experiment in experiments]

    def make_relative(base: NDArray[np.int64]) -> list[Floats]:
        """Return the rows of each experiment relative to the mean and deviation of some of its rows."""
        return [
            (rows - rows[base].mean(0)) / _compute_scale(experiment, base)
            for rows, experiment in zip(windows, experiments, strict=True)
        ]

    folds = []
    all_rows = np.arange(SKAB_WINDOW - 1, SKAB_BASE_ROWS)
    for start in range(0, SKAB_BASE_ROWS, SKAB_BLOCK_ROWS):
        # No row of the window of a training row is in the block, and the other way round.
        is_far = (all_rows <= start - SKAB_WINDOW) | (all_rows >= start + SKAB_BLOCK_ROWS + SKAB_WINDOW)
        base = all_rows[is_far]
        relative = make_relative(base)
        block = slice(max(start, SKAB_WINDOW - 1), start + SKAB_BLOCK_ROWS)
        clean = [
            (experiment.name, rows)
            for experiment, rows, is_used in zip(experiments, relative, is_clean, strict=True)
            if is_used
        ]
        held_out = {name + HELD_OUT: rows[block] for name, rows in clean}
        folds.append(Fold(np.concatenate([rows[base] for _, rows in clean]), held_out, {}))
    relative = make_relative(all_rows)
    fit = np.concatenate([rows[all_rows] for rows, is_used in zip(relative, is_clean, strict=True) if is_used])
    tests = {e.name: rows[SKAB_BASE_ROWS:] for e, rows in zip(experiments, relative, strict=True)}
    folds.append(Fold(fit, {}, tests))
    faults: dict[str, tuple[int, int] | None] = {}
    for experiment in experiments:
        rows_of_fault = np.flatnonzero(experiment.is_anomaly)
        faults[experiment.name] = (
            int(rows_of_fault[0]) - SKAB_BASE_ROWS,
            int(rows_of_fault[-1]) + 1 - SKAB_BASE_ROWS,
        )
    return Case("skab", SENSORS, folds, faults, 1.0, SKAB_BASE_ROWS, parse_budget("1 per 2000s"), False)


def _compute_scale(experiment: Experiment, base: NDArray[np.int64]) -> Floats:
    """Return the standard deviation of single rows of each sensor, with a floor for constant sensors, (S,)."""
    rows = experiment.values[base]
    scale: Floats = rows.std(0) + 1e-3 * np.abs(rows.mean(0)) + 1e-9
    return scale


def make_tep_case() -> Case:
    """Return the Tennessee Eastman process as a case."""
    folder = get_tables_folder().parent / "tep"
    if not (folder / "normal_train.parquet").exists():
        raise InputError(f"no tables in {folder}: set DEFORMER_DATA to the folder that contains tep/")
    columns = tuple(name for name in pq.read_schema(folder / "normal_train.parquet").names if name != "fault")

    def read(name: str) -> Floats:
        table = pq.read_table(folder / f"{name}.parquet")
        return np.column_stack([table[column].to_numpy() for column in columns]).astype(np.float64)

    normal = read("normal_test")
    half = len(normal) // 2
    tests = {"normal": normal[half:]}
    faults: dict[str, tuple[int, int] | None] = {"normal": None}
    for path in sorted(folder.glob("fault*.parquet")):
        tests[path.stem] = read(path.stem)
        faults[path.stem] = TEP_FAULT_ROW, len(tests[path.stem])
    fold = Fold(read("normal_train"), {"normal" + HELD_OUT: normal[:half]}, tests)
    return Case("tep", columns, [fold], faults, 180.0, 40, parse_budget("1 per 26h"), True)


def make_hydraulic_case() -> Case:
    """Return the hydraulic rig as a case, with five folds."""
    cycles, condition_by_component = read_cycles(get_tables_folder().parent / "hydraulic")
    is_normal, rows_by_class = classify_cycles(condition_by_component)
    columns = tuple(f"{name} quarter {quarter + 1}" for name in cycles.sensors for quarter in range(4))
    values = np.empty((len(cycles.records), len(columns)))
    for row in range(len(cycles.records)):
        part = cycles.select(np.array([row]))
        for code in range(len(cycles.sensors)):
            readings = part.values[part.codes == code]
            for quarter, chunk in enumerate(np.array_split(readings, 4)):
                values[row, 4 * code + quarter] = chunk.mean()
    folds = []
    faults: dict[str, tuple[int, int] | None] = {}
    for index in range(5):
        split = split_blocks(is_normal, index)
        tests = {f"fold {index}, normal": values[split.test]}
        faults[f"fold {index}, normal"] = None
        for name, rows in rows_by_class.items():
            for number, run in enumerate(np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)):
                if len(run) >= 10:
                    tests[f"fold {index}, {name}, run {number}"] = values[run]
                    faults[f"fold {index}, {name}, run {number}"] = 0, len(run)
        folds.append(Fold(values[split.train], {f"fold {index}" + HELD_OUT: values[split.calibration]}, tests))
    return Case("hydraulic", columns, folds, faults, 60.0, 10, parse_budget("1 per 4h"), True)


MAKERS = {"skab": make_skab_case, "tep": make_tep_case, "hydraulic": make_hydraulic_case}


def format_results(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table of the figures of one data set."""
    titles = ["method", "record alerts", "of them false", "incidents", "faults found", "exactly one", "at most two"]
    text = format_markdown_header([*titles, "false", "false per normal hour", "median delay"])
    for line in lines:
        delay = line["median_delay"]
        of_all = f"of {line['faults']}"
        cells = [
            f"{line['alerts']:,}",
            f"{line['false_alerts']:,}",
            str(line["incidents"]),
            f"{line['found']} {of_all}",
            f"{line['one']} {of_all}",
            f"{line['at_most_two']} {of_all}",
            str(line["false"]),
            f"{line['false'] / line['normal_hours']:.2f}",
            "" if delay is None else f"{delay:.0f} s" if delay < 600 else f"{delay / 60:.0f} min",
        ]
        name = f"**{line['method']}**" if line["method"] == OURS else line["method"]
        text.append(format_markdown_row([name, *cells]))
    return "\n".join(text)


def describe_missed(names: Sequence[str]) -> str:
    """Return the faults that were missed as text. Runs and folds of a fault are counted."""
    kinds = Counter(re.sub(r"fold \d+, |, run \d+", "", name) for name in names)
    return ", ".join(f"{kind} ({count} times)" if count > 1 else kind for kind, count in kinds.items()) or "none"


def run(arguments: argparse.Namespace) -> None:
    """Measure one data set and publish the results."""
    if arguments.data not in MAKERS:
        raise ConfigError(f"{arguments.data!r} is not a data set of this benchmark; choose one of {', '.join(MAKERS)}")
    require_scikit_learn()
    case = MAKERS[arguments.data]()
    lines = measure_case(case, arguments)
    conditions = (
        f"{describe_machine()}, {format_today()}; {len(case.folds)} models of at most {arguments.max_time} of training "
        f"each, seed {arguments.seed}. Budget of a device: {case.budget}, by segments of {case.segment_rows} rows; "
        f"{lines[0]['normal_hours']:.1f} normal hours are tested."
    )
    hindsight = measure_hindsight_delay(case, score_all(case, score_by_mahalanobis))
    visibility = ""
    if hindsight is not None:
        visibility = (
            " With a threshold of T² that is chosen for each device in hindsight, just above the normal rows before "
            f"its fault, {hindsight[1]} of {hindsight[2]} faults become visible after a median of {hindsight[0]:.0f} s."
        )
    missed = describe_missed(lines[0]["missed"])
    text = (
        f"# Incidents: {case.name}\n\n{conditions}\n\n{format_results(lines)}\n\n"
        f"Faults that {lines[0]['method']} misses: {missed}.{visibility}\n"
    )
    publish_results(f"incidents_{case.name}", text, lines)


def main() -> None:
    """Run the program."""
    options = build_parser(__doc__, "", max_time="100s")
    options.add_argument("data", help=f"data set: {', '.join(MAKERS)}")
    options.add_argument("--seed", type=int, default=0, help="seed of the training runs; 0 by default")
    options.add_argument("--models", help="folder in which models are stored, and from which they are used again")
    run_benchmark("incidents", run, options)


if __name__ == "__main__":
    main()
