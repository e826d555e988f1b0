"""Segments of the incident budget from kept evidence, and kept evidence under another calibration of records."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.incident_budget import IncidentBudget, count_required_segments
from deformer_stream.calibration.incident_evidence import ScoreTail, fit_tails
from deformer_stream.calibration.incident_segments import SEGMENT_LENGTHS, SegmentCalibration, SegmentCollector
from deformer_stream.counts import format_count
from deformer_stream.durations import MICROS_PER_DAY, format_period
from deformer_stream.engine.events import ONLY_MODEL
from deformer_stream.errors import InputError
from deformer_stream.incidents.device import extract_device
from deformer_stream.incidents.events import AlertRow, EvidenceBatch
from deformer_stream.incidents.make_evidence import P_VALUE_DIGITS, round_significant
from deformer_stream.incidents.row_order import OpenAlert, Row, RowOrder

Floats = NDArray[np.float64]


def fit_tail_of_manifest(manifest: Mapping[str, Any]) -> ScoreTail | None:
    """Return the tail of the scores of a model's calibration records, None if groups have calibrations of their own.

    Args:
        manifest: The contents of manifest.json.
    """
    calibration = manifest["calibration"]
    if calibration.get("groups"):
        return None
    record_scores = calibration.get("record_scores")
    return fit_tails(
        np.asarray(calibration["scores"], np.float64),
        None if record_scores is None else np.asarray(record_scores, np.float64),
    )


def fit_tail_of_calibration(calibration: Calibration) -> ScoreTail | None:
    """Return the tail of the scores of calibration records, None if groups have calibrations of their own."""
    if calibration.calibration_by_group:
        return None
    return fit_tails(calibration.scores, calibration.record_scores)


def calibrate_from_evidence(
    batches: Iterable[EvidenceBatch],
    model: str,
    tail: ScoreTail | None,
    reorder: int,
    calibration: Calibration | None = None,
    get_device: Callable[[str], str] = extract_device,
    opens_early: bool = False,
) -> list[SegmentCalibration]:
    """Return a calibration for each of `SEGMENT_LENGTHS`.

    Args:
        batches: The evidence of normal operation, in order.
        model: Fingerprint of the model that must have scored the records.
        tail: The tail by which p-values are extended, None if they are not.
        reorder: Time for which rows wait for earlier ones, in microseconds.
        calibration: A calibration of the model that is newer than the evidence, under which p-values are computed anew.
            None for the p-values of the evidence.
        get_device: Returns the device of a record id.
        opens_early: Whether incidents may open at alerts of open records. The statistics of the segments then include
            those at these alerts.

    Raises:
        InputError: There are no records, or another model has scored them. Or the alerts have no scores from which new
            p-values could be computed. Or an earlier release has written the evidence without p-values of complete
            records, which new evidence has.
    """
    collectors = [SegmentCollector(length, tail, opens_early=opens_early) for length in SEGMENT_LENGTHS]
    order = RowOrder(reorder)
    num_records = 0
    for batch in batches:
        if batch.model_name != ONLY_MODEL and batch.model != model:
            continue  # the evidence of another one of several models
        _check_model(batch, model)
        rescored = batch if calibration is None else rescore_batch(batch, calibration)
        _check_record_p_values(rescored, tail)
        if opens_early and any(alert.score is None for alert in rescored.alerts) and calibration is not None:
            raise InputError(
                "the alerts of the evidence have no scores, which --open-early needs: run `deformer-stream replay "
                "--evidence` again with this release"
            )
        rows = order.add_with_alerts(rescored) if opens_early else order.add(rescored)
        num_records += _collect_rows(rows, collectors, get_device)
    num_records += _collect_rows(order.finish(), collectors, get_device)
    if not num_records:
        raise InputError(
            f"the evidence has no records of the model {model}: give files that `replay --evidence` wrote with it"
        )
    return [collector.calibrate() for collector in collectors]


def _check_model(batch: EvidenceBatch, model: str) -> None:
    """Raise `InputError` if another model has scored a batch of evidence."""
    if batch.model != model:
        raise InputError(
            f"the evidence was written by the model {batch.model}, but segments of {model} are calibrated: run "
            "`deformer-stream replay --evidence` again with this model"
        )


def _check_record_p_values(batch: EvidenceBatch, tail: ScoreTail | None) -> None:
    """Raise `InputError` if a batch lacks the p-values of complete records that new evidence of the model has."""
    if len(batch.closed) and batch.closed.record_p_values is None and tail is not None and tail.of_records is not None:
        raise InputError(
            "the evidence has no p-values of complete records, by which this calibration detects incidents: write it "
            "again with `deformer-stream replay --evidence` of this release and the calibrated model, and then run "
            "`deformer-stream calibrate --incidents`"
        )


def _collect_rows(
    rows: Iterable[Row | OpenAlert], collectors: Sequence[SegmentCollector], get_device: Callable[[str], str]
) -> int:
    """Add rows to the collectors of segments, and return the number of closed records."""
    num_records = 0
    for row in rows:
        if isinstance(row, Row):
            num_records += 1
            device = get_device(row.record)
            for collector in collectors:
                # The p-value is extended already; a score of −∞ keeps the collector from extending it.
                collector.add(device, row.time, row.extend_p_value(collector.tail), -math.inf, row.record)
            continue
        alert = row.alert
        device = get_device(alert.record)
        for collector in collectors:
            collector.add_alert(device, alert.time, alert.p_value, alert.score, alert.record, alert.alpha)
    return num_records


def rescore_batch(batch: EvidenceBatch, calibration: Calibration) -> EvidenceBatch:
    """Return a batch whose closed records and alerts have the p-values of another calibration.

    Alerts without a score keep theirs.

    Args:
        batch: The batch.
        calibration: The other calibration.
    """

    def compute_p_values(record_ids: Sequence[str], scores: Floats) -> Floats:
        p_values = calibration.compute_p_values(scores[:, None], lambda: record_ids)[:, 0]
        return round_significant(p_values, P_VALUE_DIGITS)

    closed, record_p_values = batch.closed, None
    if closed.record_scores is not None:
        record_p_values = calibration.compute_record_p_values(closed.record_scores, closed.record_ids)
        if record_p_values is not None:
            is_known = ~np.isnan(record_p_values)
            record_p_values[is_known] = round_significant(record_p_values[is_known], P_VALUE_DIGITS)
    closed = replace(
        closed,
        p_values=compute_p_values(closed.record_ids, closed.scores),
        record_p_values=record_p_values,
    )
    scored = [alert for alert in batch.alerts if alert.score is not None]
    if not scored:
        return replace(batch, closed=closed)
    scores = np.array([alert.score for alert in scored], np.float64)
    p_values = compute_p_values([alert.record for alert in scored], scores).tolist()
    rescored = {id(alert): replace(alert, p_value=p) for alert, p in zip(scored, p_values, strict=True)}
    alerts = tuple(rescored.get(id(alert), alert) for alert in batch.alerts)
    return replace(batch, closed=closed, alerts=alerts)


class Rescorer:
    """Computes the p-values and alerts of records anew, by comparison of their scores with another calibration.

    Args:
        calibration: The other calibration.
        alpha: False-alarm rate of alerts.
    """

    def __init__(self, calibration: Calibration, alpha: float) -> None:
        self._calibration, self._alpha = calibration, alpha

    def rescore(self, batches: Iterable[EvidenceBatch]) -> Iterator[tuple[EvidenceBatch, EvidenceBatch]]:
        """Yield the batches of a log, each with the same batch under the other calibration.

        An alert stays where it is if its record alerts there with the other calibration, too. Otherwise, or if its
        score is unknown, it comes with its record if that alerts, and is left out if not.
        """
        waiting: dict[str, AlertRow] = {}
        for batch in batches:
            rescored = rescore_batch(batch, self._calibration)
            is_alerted = rescored.closed.p_values <= self._alpha
            alerts = []
            for alert in rescored.alerts:
                if alert.score is not None and alert.p_value <= self._alpha:
                    alerts.append(alert)
                    waiting.pop(alert.record, None)
                else:
                    waiting[alert.record] = alert
            for record, has_alert in zip(rescored.closed.record_ids, is_alerted.tolist(), strict=True):
                alert_of_record = waiting.pop(record, None)
                if alert_of_record is not None and has_alert:
                    alerts.append(alert_of_record)
            closed = replace(rescored.closed, is_alerted=is_alerted)
            yield batch, replace(rescored, closed=closed, alerts=tuple(alerts))


def describe_segments(segments: Sequence[SegmentCalibration], budget: IncidentBudget) -> list[tuple[str, ...]]:
    """Return the rows of a table that says which budgets are in reach, with a header.

    Args:
        segments: The calibrations.
        budget: A budget for which the last column says whether it is in reach.
    """
    rows: list[tuple[str, ...]] = [
        ("segments of", "number", "devices", "left out", "smallest budget in reach", str(budget))
    ]
    for calibration in segments:
        num_segments = calibration.num_segments
        num_days = calibration.length * (num_segments + 1) / MICROS_PER_DAY
        num_required = count_required_segments(min(budget.count * calibration.length / budget.period, 1.0))
        missing = num_required - num_segments
        rows.append(
            (
                format_period(calibration.length),
                f"{num_segments:,}",
                f"{calibration.num_devices:,}",
                f"{calibration.num_left_out:,}",
                f"1 per {num_days:.4g}d" if num_segments else "none",
                "in reach" if missing <= 0 else f"{format_count(missing, 'segment')} missing",
            )
        )
    return rows
