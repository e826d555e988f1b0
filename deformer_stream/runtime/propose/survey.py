"""Passes over the log as it is: today's incidents, and the scores of records."""

from __future__ import annotations

import math

import numpy as np

from deformer_stream.calibration.observed_time import MAX_GAP, ObservedTime
from deformer_stream.durations import MICROS_PER_HOUR
from deformer_stream.errors import InputError
from deformer_stream.incidents.events import Incident
from deformer_stream.runtime.incident_difference import IncidentSpans
from deformer_stream.runtime.incident_plan import DetectionPlan
from deformer_stream.runtime.propose.labelled_log import LabelledLog
from deformer_stream.runtime.propose.proposal import LogSummary, ProposalOptions, Review, ReviewRecord
from deformer_stream.runtime.propose.record_choice import KeptRecords, LogSplit, ReviewChooser


def survey_log(
    log: LabelledLog, detection: DetectionPlan, options: ProposalOptions
) -> tuple[list[Incident], list[Incident], LogSummary]:
    """Return the incidents without patterns, those of today, and what the log contains in the span.

    Args:
        log: The log.
        detection: Today's rule, options and patterns.
        options: The span.

    Raises:
        InputError: The log has no record of the model.
    """
    unpatterned_tracker = detection.with_patterns(()).make_tracker()
    # Without patterns both trackers would do the same.
    today_tracker = detection.make_tracker() if detection.patterns else unpatterned_tracker
    base_by_id: dict[str, Incident] = {}
    today_by_id: dict[str, Incident] = {} if detection.patterns else base_by_id
    start, end, num_records, num_alerts, num_other = None, None, 0, 0, 0
    observed = ObservedTime(max(MAX_GAP, detection.window or 0))
    for batch in log.read():
        if not log.has_scored(batch):
            num_other += len(batch.closed)
            continue
        base_by_id.update((incident.id, incident) for incident in unpatterned_tracker.handle(batch))
        if today_tracker is not unpatterned_tracker:
            today_by_id.update((incident.id, incident) for incident in today_tracker.handle(batch))
        is_in_span = options.is_in_span(batch.closed.times)
        if not is_in_span.any():
            continue
        times = batch.closed.times[is_in_span]
        start = min(int(times.min()), start if start is not None else int(times.min()))
        end = max(int(times.max()), end if end is not None else int(times.max()))
        num_records += len(times)
        num_alerts += int(batch.closed.is_alerted[is_in_span].sum())
        for index in np.flatnonzero(is_in_span).tolist():
            observed.add(log.get_device(batch.closed.record_ids[index]), int(batch.closed.times[index]))
    base_by_id.update((incident.id, incident) for incident in unpatterned_tracker.finish())
    if today_tracker is not unpatterned_tracker:
        today_by_id.update((incident.id, incident) for incident in today_tracker.finish())
    if start is None or end is None:
        other = f" of model {detection.model}, but {num_other:,} of other models" if num_other else ""
        raise InputError(
            f"the log of evidence has no record{other} in the span: check --log, --since and --until, and that --model "
            "is the model that has scored the records"
        )
    summary = LogSummary(
        start,
        end,
        num_records,
        num_devices=observed.num_devices,
        device_hours=observed.micros / MICROS_PER_HOUR,
        num_alerts_today=num_alerts,
        num_other_model=num_other,
    )
    return list(base_by_id.values()), list(today_by_id.values()), summary


def collect_scores(
    log: LabelledLog, spans: IncidentSpans, options: ProposalOptions, split: LogSplit | None
) -> tuple[dict[str, float], Review, KeptRecords]:
    """Return the largest score of each incident by id, the records for review, and the records for a new calibration.

    Args:
        log: The log.
        spans: The incidents without patterns, with their labels.
        options: Numbers of records for review, and whether a calibration of records is made.
        split: Which parts of the log a calibration of records uses; None for all.
    """
    score_by_incident: dict[str, float] = {}
    chooser, kept = ReviewChooser(log.label_by_record, options), KeptRecords(options.seed)
    collects = "records" in options.changes
    for batch in log.iterate_batches():
        closed = batch.closed
        rows = zip(
            closed.record_ids,
            closed.times.tolist(),
            closed.p_values.tolist(),
            closed.scores.tolist(),
            closed.is_alerted.tolist(),
            np.full(len(closed), np.nan).tolist() if closed.record_scores is None else closed.record_scores.tolist(),
            strict=True,
        )
        for record, time, p_value, score, is_alerted, record_score in rows:
            device = log.get_device(record)
            owner = spans.find(device, time)
            id_ = None
            if owner is not None:
                id_ = owner.incident.id
                score_by_incident[id_] = max(score, score_by_incident.get(id_, -math.inf))
            chooser.add(ReviewRecord(record, device, time, score, p_value, id_), is_alerted, owner)
            is_used = collects and (split is None or split.is_for_records(device, time))
            if is_used and not log.is_excluded(record, device, time, owner):
                kept.add(record, score, record_score)
    return score_by_incident, chooser.make_review(), kept
