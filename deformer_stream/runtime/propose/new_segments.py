"""A new calibration of segments, from the log without confirmed faults and maintenance."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence

from deformer_stream.calibration.false_alarm_patterns import PatternAdjuster
from deformer_stream.calibration.incident_evidence import ScoreTail
from deformer_stream.calibration.incident_segments import SEGMENT_LENGTHS, SegmentCalibration, SegmentCollector
from deformer_stream.incidents.events import AlertRow
from deformer_stream.incidents.row_order import OpenAlert, Row, RowOrder
from deformer_stream.runtime.incident_calibration import Rescorer
from deformer_stream.runtime.incident_difference import IncidentSpans
from deformer_stream.runtime.incident_plan import DetectionPlan
from deformer_stream.runtime.propose.labelled_log import LabelledLog
from deformer_stream.runtime.propose.record_choice import LogSplit

Excluded = Container[tuple[str, int, int]]
"""Segments that are left out: device, length and number of each."""


def list_segment_lengths(plan: DetectionPlan) -> list[int]:
    """Return the lengths of segments for which a calibration is made, in microseconds, the longest first."""
    return sorted({*SEGMENT_LENGTHS, *([plan.plan.segment] if plan.plan.segment else [])}, reverse=True)


def collect_segments(
    log: LabelledLog,
    plan: DetectionPlan,
    spans: IncidentSpans,
    tail: ScoreTail | None,
    rescorer: Rescorer | None,
    split: LogSplit | None,
) -> tuple[SegmentCalibration, ...]:
    """Return calibrations by the segments of the log without confirmed faults and maintenance.

    A segment with a record of a confirmed fault or of maintenance is left out as a whole. The patterns apply to the
    segments as they will apply to new ones; otherwise the false alarms in the log would raise the threshold for all.

    Args:
        log: The log.
        plan: The rule, whose kind of detector is used, and the candidate's patterns.
        spans: The incidents without patterns, with their labels.
        tail: The tail by which p-values are extended, None if they are not.
        rescorer: Computes the p-values anew, None if they stay.
        split: Which parts of the log have calibrated the records, and are left out; None for none.
    """
    lengths = list_segment_lengths(plan)
    excluded: set[tuple[str, int, int]] = set()
    examined: set[tuple[str, int, int]] = set()
    for batch in log.iterate_batches():
        for record, time in zip(batch.closed.record_ids, batch.closed.times.tolist(), strict=True):
            device = log.get_device(record)
            segments = [(device, length, time // length) for length in lengths]
            if log.is_excluded(record, device, time, spans.find(device, time)):
                excluded.update(segments)
            if split is not None:
                new = [segment for segment in segments if segment not in examined]
                examined.update(new)
                excluded.update(segment for segment in new if split.has_calibrated_records(*segment))
    opens_early = plan.plan.opens_early
    collectors = [SegmentCollector(length, tail, plan.plan.kind, opens_early) for length in lengths]
    adjuster = PatternAdjuster(plan.patterns, plan.options.gap, plan.model, spans.find_id)
    order = RowOrder(plan.options.reorder)
    for row in _iterate_rows(log, plan, rescorer, order):
        if isinstance(row, Row):
            _add_row(row, log.get_device(row.record), collectors, adjuster, tail, excluded)
        elif row.alert.score is not None or not plan.patterns:
            _add_alert(row.alert, log.get_device(row.alert.record), collectors, adjuster, tail, excluded)
    return tuple(collector.calibrate() for collector in collectors)


def _add_row(
    row: Row,
    device: str,
    collectors: Sequence[SegmentCollector],
    adjuster: PatternAdjuster,
    tail: ScoreTail | None,
    excluded: Excluded,
) -> None:
    """Add a closed record to the segments to which it belongs, with its p-value under the patterns."""
    extended_p = row.extend_p_value(tail)
    shares = None if row.alert is None else {suspect.feature: suspect.share for suspect in row.alert.suspects}
    adjusted_p = adjuster.adjust(device, row.time, extended_p, row.score, shares)
    for collector in collectors:
        if (device, collector.length, row.time // collector.length) not in excluded:
            # The p-value is extended already; a score of −∞ keeps the collector from extending it.
            collector.add(device, row.time, adjusted_p, -math.inf, row.record)


def _add_alert(
    alert: AlertRow,
    device: str,
    collectors: Sequence[SegmentCollector],
    adjuster: PatternAdjuster,
    tail: ScoreTail | None,
    excluded: Excluded,
) -> None:
    """Add the alert of an open record to the segments to which it belongs, with its p-value under the patterns."""
    p_value = alert.p_value if tail is None else tail.extend(alert.p_value, alert.score)
    if alert.score is not None:
        shares = {suspect.feature: suspect.share for suspect in alert.suspects}
        p_value = adjuster.preview(device, alert.time, p_value, alert.score, shares)
    for collector in collectors:
        if (device, collector.length, alert.time // collector.length) not in excluded:
            collector.add_alert(device, alert.time, p_value, None, alert.record, alert.alpha)


def _iterate_rows(
    log: LabelledLog, plan: DetectionPlan, rescorer: Rescorer | None, order: RowOrder
) -> Iterator[Row | OpenAlert]:
    """Yield the rows of the log in the order in which they are handled; alerts only if incidents may open there.

    Args:
        log: The log.
        plan: The rule, which says whether incidents may open at alerts.
        rescorer: Computes the p-values anew, None if they stay.
        order: Orders the rows.
    """
    batches = log.iterate_batches()
    for batch in batches if rescorer is None else (rescored for _, rescored in rescorer.rescore(batches)):
        yield from order.add_with_alerts(batch) if plan.plan.opens_early else order.add(batch)
    yield from order.finish()
