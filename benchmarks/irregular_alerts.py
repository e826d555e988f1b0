"""Alerts of several contenders on records with irregular readings, under the same conformal rule.

Each contender gives a statistic after each reading, from this reading and the earlier ones of its record. The largest
statistic of each calibration record is kept. The p-value of a record after a reading is the rank of its largest
statistic so far among them (`deformer_stream/calibration/conformal.py`). A record raises an alert when its p-value is
at most α. At most a share α of normal records ever does, if records are exchangeable.

Densities have one statistic in common: the engine's combination of the highest-density p-values of the readings.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.early import compute_false_alarm_bounds
from benchmarks.irregular_records import FaultyReadings, Readings
from benchmarks.tables import format_markdown_header, format_markdown_row
from deformer_stream.calibration.conformal import Calibration, PrefixState, advance_prefix_state
from deformer_stream.ragged import ragged_indices

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

ALPHAS = (0.01, 0.05)
"""False-alarm rates that are measured."""

RECORDS_PER_BATCH = 256


@dataclass(frozen=True, slots=True)
class PrefixScores:
    """What a contender computes for M readings.

    Attributes:
        statistics: (M,) the statistic of the record's readings up to this one; larger is more anomalous.
        log_likelihoods: (M,) ln p(reading | earlier readings of its record) in the common units of the benchmark; NaN
            for readings without one. None if the contender has no density.
        log_p_values: (M,) ln of the highest-density p-values of the readings; None if the contender has no density.
    """

    statistics: Floats
    log_likelihoods: Floats | None = None
    log_p_values: Floats | None = None


class Contender(Protocol):
    """A method that is compared. It is fitted once and scores any number of records afterwards."""

    name: str

    def fit(self, train: Readings) -> None:
        """Fit the method to normal records."""

    def score(self, readings: Readings) -> PrefixScores:
        """Score the prefixes of records in order of time."""


def combine_p_values(log_p_values: Floats, offsets: Ints) -> Floats:
    """Return the engine's running statistic after each reading, (M,); larger is more anomalous.

    Args:
        log_p_values: (M,) natural logarithms of the highest-density p-values of the readings.
        offsets: (R + 1,) index of each record's first reading; the last entry is M.
    """
    statistics = np.empty(len(log_p_values))
    for start in range(0, len(offsets) - 1, RECORDS_PER_BATCH):
        bounds = offsets[start : start + RECORDS_PER_BATCH + 1]
        lengths = np.diff(bounds)
        row, position = ragged_indices(lengths)
        log_p, is_scored = np.zeros((len(lengths), lengths.max())), np.zeros((len(lengths), lengths.max()), bool)
        log_p[row, position] = log_p_values[bounds[0] : bounds[-1]]
        is_scored[row, position] = True
        running, _ = advance_prefix_state(PrefixState.initial(len(lengths)), log_p, is_scored)
        statistics[bounds[0] : bounds[-1]] = running[row, position]
    return statistics


def compute_running_maxima(statistics: Floats, offsets: Ints) -> Floats:
    """Return the largest statistic of each record so far, (M,)."""
    running = statistics.copy()
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        np.maximum.accumulate(running[start:end], out=running[start:end])
    return running


def calibrate(statistics: Floats, offsets: Ints) -> Calibration:
    """Return the calibration of the alert rule by the statistics of normal records, each with at least one reading."""
    return Calibration.from_statistics(np.maximum.reduceat(statistics, offsets[:-1]), "arrival")


def find_alert_times(calibration: Calibration, statistics: Floats, readings: Readings, alpha: float) -> Floats:
    """Return the seconds since the origin of each record at which it raises an alert, infinite if it does not, (R,)."""
    p = calibration.compute_pooled_p_values(compute_running_maxima(statistics, readings.offsets))
    alert_times = np.full(len(readings.records), np.inf)
    is_alert = p <= alpha
    # A record's first alert is written last.
    alert_times[readings.record_index[is_alert][::-1]] = readings.times[is_alert][::-1]
    return alert_times


def count_false_alarms(alert_times: Floats, num_calibration: int, alpha: float) -> dict[str, Any]:
    """Return the number of normal records that raised an alert, and an interval for it.

    The interval contains the number with a probability of 99% if normal records are exchangeable.
    """
    alarms, num_records = int(np.isfinite(alert_times).sum()), len(alert_times)
    low, high = compute_false_alarm_bounds(alpha, num_calibration, num_records)
    return {"alarms": alarms, "records": num_records, "low": low, "high": high, "within": low <= alarms <= high}


def measure_detections(alert_times: Floats, onsets: Floats, delays: Sequence[float]) -> dict[str, Any]:
    """Return the shares of faulty records that are detected within each delay after the onset, in seconds.

    A record that raised an alert before the onset counts as not detected, because that alert is a false alarm. The
    median delay is that of the detected records, None without any.
    """
    delay = np.where(alert_times >= onsets, alert_times - onsets, np.inf)
    is_detected = np.isfinite(delay)
    return {
        "records": len(delay),
        "detected": float(is_detected.mean()),
        "within": [float((delay <= limit).mean()) for limit in delays],
        "median_delay": float(np.median(delay[is_detected])) if is_detected.any() else None,
    }


def compute_auroc_by_time(
    normal: tuple[Readings, Floats], abnormal: tuple[Readings, Floats], seconds: Sequence[float]
) -> list[float]:
    """Return the AUROC of the largest statistic so far at several times since the origin of the records.

    Args:
        normal: Readings of normal records and their statistics, (M,).
        abnormal: The same of abnormal records.
        seconds: The times. Records without a reading until then have the smallest statistic.
    """
    from sklearn.metrics import roc_auc_score

    areas = []
    for limit in seconds:
        scores = []
        for readings, statistics in (normal, abnormal):
            is_seen = readings.times <= limit
            largest = np.full(len(readings.records), -np.inf)
            np.maximum.at(largest, readings.record_index[is_seen], statistics[is_seen])
            scores.append(largest)
        everything = np.concatenate(scores)
        everything = np.where(np.isfinite(everything), everything, everything[np.isfinite(everything)].min() - 1)
        is_abnormal = np.arange(len(everything)) >= len(scores[0])
        areas.append(float(roc_auc_score(is_abnormal, everything)))
    return areas


def compute_nll(scores: PrefixScores, readings: Readings, left_out: Sequence[str] = ()) -> float | None:
    """Return the mean −ln p of a reading in nats, without the sensors that are left out; None without a density."""
    if scores.log_likelihoods is None:
        return None
    is_counted = ~np.isin(readings.codes, [readings.sensors.index(name) for name in left_out])
    return float(-np.nanmean(scores.log_likelihoods[is_counted]))


@dataclass(frozen=True, slots=True)
class Case:
    """The records on which contenders are compared.

    Attributes:
        train: The normal records to which contenders are fitted.
        calibration: The normal records that calibrate the alert rule.
        test: Normal records.
        faulty_by_name: Records with faults at known times, by the name of the fault.
        delays: Seconds after the onset of a fault at which detections are counted.
        abnormal_by_name: Records that are to be told from normal ones by the AUROC, by the name of their class.
        auroc_times: Seconds since the origin of a record at which that AUROC is computed.
        left_out: Sensors that are left out of the mean log-likelihood.
        has_injected_faults: Whether the faulty records are test records with injected faults. If so, the alerts of the
            test records in the same hours are counted beside the detections.
    """

    train: Readings
    calibration: Readings
    test: Readings
    faulty_by_name: Mapping[str, FaultyReadings]
    delays: Sequence[float]
    abnormal_by_name: Mapping[str, Readings]
    auroc_times: Sequence[float]
    left_out: Sequence[str] = ()
    has_injected_faults: bool = False


def measure_contender(contender: Contender, case: Case) -> dict[str, Any]:
    """Fit a contender, score all records of the case, and return its figures as they are stored in the JSON lines."""
    started = time.perf_counter()
    contender.fit(case.train)
    fitted = time.perf_counter()
    calibration = calibrate(contender.score(case.calibration).statistics, case.calibration.offsets)
    test = contender.score(case.test)
    faulty = {name: contender.score(faults.readings).statistics for name, faults in case.faulty_by_name.items()}
    line: dict[str, Any] = {"contender": contender.name, "nll": compute_nll(test, case.test, case.left_out)}
    for alpha in ALPHAS:
        num_calibration = len(calibration.scores)
        if alpha * (num_calibration + 1) < 1:
            continue
        normal_alerts = find_alert_times(calibration, test.statistics, case.test, alpha)
        line[f"{alpha:g}"] = {
            "false alarms": count_false_alarms(normal_alerts, num_calibration, alpha),
            "faults": {
                name: measure_detections(
                    find_alert_times(calibration, faulty[name], faults.readings, alpha), faults.onsets, case.delays
                )
                for name, faults in case.faulty_by_name.items()
            },
        }
        if case.has_injected_faults:
            line[f"{alpha:g}"]["without fault"] = {
                name: measure_detections(normal_alerts[faults.rows], faults.onsets, case.delays)
                for name, faults in case.faulty_by_name.items()
            }
    line["auroc"] = {}
    for name, readings in case.abnormal_by_name.items():
        is_scored = name in faulty and case.faulty_by_name[name].readings is readings
        statistics = faulty[name] if is_scored else contender.score(readings).statistics
        pair = (case.test, test.statistics), (readings, statistics)
        line["auroc"][name] = compute_auroc_by_time(*pair, case.auroc_times)
    line["fit_s"], line["score_s"] = round(fitted - started, 1), round(time.perf_counter() - fitted, 1)
    return line


def format_false_alarms(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table of the mean log-likelihoods and the false alarms of each contender.

    After each number of false alarms stands the interval that contains it with a probability of 99% if normal records
    are exchangeable.
    """
    titles = ["method", "NLL per reading, nats", *(f"false alarms at α = {alpha:.0%}" for alpha in ALPHAS), "fit, s"]
    text = format_markdown_header([*titles, "score, s"])
    for line in lines:
        cells = [line["contender"], "" if line["nll"] is None else f"{line['nll']:.3f}"]
        for alpha in ALPHAS:
            figures = line.get(f"{alpha:g}")
            cells.append("α is out of reach" if figures is None else _format_alarms(figures["false alarms"]))
        text.append(format_markdown_row([*cells, f"{line['fit_s']:.0f}", f"{line['score_s']:.0f}"]))
    return "\n".join(text)


def _format_alarms(alarms: Mapping[str, Any]) -> str:
    outside = "" if alarms["within"] else " **outside**"
    share = alarms["alarms"] / alarms["records"]
    return f"{alarms['alarms']} of {alarms['records']} ({share:.1%}), {alarms['low']} … {alarms['high']}{outside}"


def format_detections(
    lines: Sequence[Mapping[str, Any]],
    alpha: float,
    delays: Sequence[float],
    unit: float,
    unit_name: str,
    first_delay: float = 0.0,
) -> str:
    """Return a Markdown table of the shares of faults that are detected within each delay after the onset.

    If the faults are injected, each share is followed by that of the same records without the fault, in parentheses.

    Args:
        lines: The figures of the contenders.
        alpha: The false-alarm rate.
        delays: The delays in seconds.
        unit: Seconds of the unit in which delays are shown.
        unit_name: The name of the unit.
        first_delay: Number of seconds that is added to the delays that are shown.
    """
    titles = [f"{(delay + first_delay) / unit:g} {unit_name}" for delay in delays]
    text = format_markdown_header(["fault", "method", *titles, "ever", f"median delay, {unit_name}"])
    for fault in next((line[f"{alpha:g}"]["faults"] for line in lines if f"{alpha:g}" in line), {}):
        for line in lines:
            if f"{alpha:g}" not in line:
                continue
            figures = line[f"{alpha:g}"]["faults"][fault]
            median = "" if figures["median_delay"] is None else f"{(figures['median_delay'] + first_delay) / unit:.1f}"
            shares = [f"{share:.0%}" for share in (*figures["within"], figures["detected"])]
            unmodified = line[f"{alpha:g}"].get("without fault")
            if unmodified is not None:
                others = (*unmodified[fault]["within"], unmodified[fault]["detected"])
                shares = [f"{share} ({other:.0%})" for share, other in zip(shares, others, strict=True)]
            text.append(format_markdown_row([f"{fault} ({figures['records']})", line["contender"], *shares, median]))
    return "\n".join(text)


def format_auroc(lines: Sequence[Mapping[str, Any]], titles: Sequence[str]) -> str:
    """Return a Markdown table of the AUROC of each class at several times, which have these titles."""
    text = format_markdown_header(["class", "method", *titles])
    for name in lines[0]["auroc"]:
        rows = ([name, line["contender"], *(f"{area:.3f}" for area in line["auroc"][name])] for line in lines)
        text += [format_markdown_row(row) for row in rows]
    return "\n".join(text)


def average_lines(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one line for each contender: sums of counts and means of the other figures over its lines.

    The bounds of the false alarms are summed too, so they are wider than 99% bounds of the sum.
    """
    lines_by_name: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        lines_by_name.setdefault(line["contender"], []).append(line)
    averages = []
    for same in lines_by_name.values():
        average = _average(same)
        for alpha in ALPHAS:
            if f"{alpha:g}" in average:
                alarms = average[f"{alpha:g}"]["false alarms"]
                alarms["within"] = alarms["low"] <= alarms["alarms"] <= alarms["high"]
        averages.append(average)
    return averages


def _average(entries: Sequence[Any], key: str = "") -> Any:
    """Return the mean of figures, the sum of counts, or entry by entry that of dictionaries and lists."""
    first = entries[0]
    if isinstance(first, Mapping):
        common = [name for name in first if all(name in entry for entry in entries)]
        return {name: _average([entry[name] for entry in entries], name) for name in common}
    if isinstance(first, list):
        return [_average(column) for column in zip(*entries, strict=True)]
    if isinstance(first, str | bool):
        return first
    numbers = [entry for entry in entries if entry is not None]
    if not numbers:
        return None
    return sum(numbers) if key in ("alarms", "records", "low", "high") else float(np.mean(numbers))
