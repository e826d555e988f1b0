"""A proposal, from the log of evidence and the labels to the description of what the candidate changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.incident_evidence import ScoreTail
from deformer_stream.calibration.incident_segments import SegmentCalibration
from deformer_stream.incidents.events import FeedbackLabel
from deformer_stream.runtime.incident_calibration import fit_tail_of_calibration
from deformer_stream.runtime.incident_difference import IncidentSpans, label_incidents
from deformer_stream.runtime.incident_plan import DetectionPlan
from deformer_stream.runtime.propose.candidate import find_candidate
from deformer_stream.runtime.propose.labelled_log import LabelledLog, LogReader
from deformer_stream.runtime.propose.new_segments import list_segment_lengths
from deformer_stream.runtime.propose.outcomes import describe_pattern, describe_rate, list_warnings
from deformer_stream.runtime.propose.proposal import Proposal, ProposalOptions
from deformer_stream.runtime.propose.record_choice import LogSplit
from deformer_stream.runtime.propose.survey import collect_scores, survey_log

Floats = NDArray[np.float64]


def propose(
    read_log: LogReader,
    detection: DetectionPlan,
    labels: Sequence[FeedbackLabel],
    options: ProposalOptions,
    recalibrate_records: Callable[[Sequence[str], Floats, Floats | None], Calibration] | None = None,
    replan: Callable[[Sequence[SegmentCalibration]], DetectionPlan] | None = None,
    tail: ScoreTail | None = None,
) -> Proposal:
    """Make a candidate from labels and a log of evidence, and compare its incidents with those of today.

    Records and alerts that occur twice count once: a topic that was written at least once repeats some of them, and
    exports to files can overlap.

    Args:
        read_log: Reads the log.
        detection: Today's rule, options and patterns.
        labels: The labels of people, in any order.
        options: What the candidate replaces, and what is compared.
        recalibrate_records: Returns a calibration from record ids, their scores, and their scores as complete records
            (None if they are unknown). Required if the calibration of records is replaced.
        replan: Returns today's rule with other segments. Required if segments or the calibration of records are
            replaced.
        tail: The tail of the scores of the calibration of records, by which p-values of new segments are extended; None
            if they are not.

    Raises:
        InputError: The log has no record of the model.
        ValueError: The calibration of records is replaced, but `recalibrate_records` is missing.
    """
    has_new_records = "records" in options.changes
    log = LabelledLog.from_labels(read_log, detection, labels)
    unpatterned_incidents, today_incidents, summary = survey_log(log, detection, options)
    unpatterned = label_incidents(unpatterned_incidents, log.overlay, today_incidents)
    today = label_incidents(today_incidents, log.overlay)
    has_new_segments = "segments" in options.changes or (has_new_records and options.has_segments)
    split = None
    if has_new_records and has_new_segments:
        split = LogSplit(max(list_segment_lengths(detection)), options.seed)
    scores, review, kept = collect_scores(log, IncidentSpans(unpatterned, 0), options, split)
    unpatterned = [replace(entry, max_score=scores.get(entry.incident.id, math.nan)) for entry in unpatterned]

    calibration = None
    if has_new_records:
        if recalibrate_records is None:
            raise ValueError("the calibration of records is replaced: give recalibrate_records")
        calibration = recalibrate_records(kept.record_ids, kept.scores, kept.record_scores)
        tail = fit_tail_of_calibration(calibration)
    found = find_candidate(
        log,
        detection,
        unpatterned,
        today=today,
        options=options,
        calibration=calibration,
        replan=replan if has_new_segments else None,
        tail=tail,
        split=split,
    )
    summary = replace(summary, num_alerts_removed=found.num_alerts_removed, num_alerts_new=found.num_alerts_new)
    difference = found.difference
    known = {incident.id for incident in (*unpatterned_incidents, *today_incidents)}
    num_unknown = len({label.incident for label in labels if label.incident is not None} - known)
    entry_by_id = {entry.incident.id: entry for entry in (*unpatterned, *today)}
    label_again = tuple(entry for entry in entry_by_id.values() if entry.outdated_label is not None)
    removed_ids = {labelled.incident.id for labelled in found.without_patterns.removed}
    outcomes = tuple(describe_pattern(entry, found.plan, found.dropped, removed_ids) for entry in found.kinds)
    return Proposal(
        found.plan,
        found.segments,
        calibration,
        difference=difference,
        today=tuple(today),
        candidate=tuple(found.incidents),
        log=summary,
        rate_today=describe_rate(detection, summary, difference.num_false_today, difference.num_labelled_today),
        rate_candidate=describe_rate(
            detection, summary, difference.num_false_candidate, difference.num_labelled_candidate
        ),
        patterns=outcomes,
        review=review,
        label_again=label_again,
        num_labels=len({label.id for label in labels}),
        num_unknown_labels=num_unknown,
        warnings=tuple(list_warnings(detection, difference, outcomes, summary, num_unknown, unpatterned, label_again)),
    )
