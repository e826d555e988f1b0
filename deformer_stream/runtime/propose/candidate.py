"""The candidate whose patterns lose no confirmed fault, found by replays of the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.false_alarm_patterns import (
    FalseAlarmPattern,
    PastIncident,
    PatternCandidate,
    make_patterns,
    tighten,
)
from deformer_stream.calibration.incident_evidence import ScoreTail
from deformer_stream.calibration.incident_segments import SegmentCalibration
from deformer_stream.calibration.share_vectors import compute_cosine
from deformer_stream.incidents.events import Incident
from deformer_stream.incidents.overlay import Overlay
from deformer_stream.runtime.incident_calibration import Rescorer
from deformer_stream.runtime.incident_difference import (
    IncidentDifference,
    IncidentSpans,
    LabelledIncident,
    compare_incidents,
    label_incidents,
)
from deformer_stream.runtime.incident_plan import DetectionPlan
from deformer_stream.runtime.propose.labelled_log import LabelledLog
from deformer_stream.runtime.propose.new_segments import collect_segments
from deformer_stream.runtime.propose.proposal import ProposalOptions
from deformer_stream.runtime.propose.record_choice import LogSplit

MAX_REPLAYS = 10
"""Largest number of replays of the candidate. After each, patterns that would lose a fault are changed or left out."""


@dataclass(slots=True)
class Candidate:
    """A candidate and its incidents, before it is described.

    Attributes:
        plan: The rule, options and patterns.
        segments: The segments, None if they stay.
        incidents: The incidents over the whole log.
        difference: The difference from the incidents of today.
        without_patterns: The difference from the incidents without any pattern, over the whole log.
        num_alerts_removed: Number of records in the span that no longer alert.
        num_alerts_new: Number of records in the span that alert with the candidate only.
        kinds: The kinds of false incidents.
        dropped: Why patterns were left out, by their ids.
    """

    plan: DetectionPlan
    segments: tuple[SegmentCalibration, ...] | None
    incidents: list[LabelledIncident]
    difference: IncidentDifference
    without_patterns: IncidentDifference
    num_alerts_removed: int
    num_alerts_new: int
    kinds: list[PatternCandidate]
    dropped: dict[str, str]


def find_candidate(
    log: LabelledLog,
    detection: DetectionPlan,
    unpatterned: Sequence[LabelledIncident],
    today: Sequence[LabelledIncident],
    options: ProposalOptions,
    calibration: Calibration | None,
    replan: Callable[[Sequence[SegmentCalibration]], DetectionPlan] | None,
    tail: ScoreTail | None,
    split: LogSplit | None,
) -> Candidate:
    """Return the candidate whose patterns lose no confirmed fault, by replays of the log.

    Args:
        log: The log.
        detection: Today's rule, options and patterns.
        unpatterned: The incidents without patterns, with their labels and largest scores.
        today: The incidents of today.
        options: What the candidate replaces, and what is compared.
        calibration: The candidate's calibration of records, None if it stays.
        replan: As in `propose`; None if the segments stay.
        tail: As in `propose`, of the candidate's calibration.
        split: Which parts of the log calibrate the records; None if all or none do.
    """
    margin = detection.options.gap
    spans = IncidentSpans(unpatterned, margin)
    rescorer = None if calibration is None else Rescorer(calibration, options.alpha)
    shown = [entry.incident for entry in (*unpatterned, *today)]
    kinds: list[PatternCandidate] = []
    patterns = list(detection.patterns)
    if "patterns" in options.changes:
        past_incidents = [_to_past_incident(entry) for entry in unpatterned]
        kinds = make_patterns(past_incidents, detection.patterns, _find_labels(detection.patterns, log.overlay))
        patterns = [kind.pattern for kind in kinds if kind.pattern is not None]
    dropped: dict[str, str] = {}
    for _ in range(MAX_REPLAYS):
        plan, segments = detection.with_patterns(patterns), None
        if replan is not None:
            segments = collect_segments(log, plan, spans, tail, rescorer, split)
            plan = replan(segments).with_patterns(patterns)
        found, num_removed, num_new = _replay(log, plan, spans, rescorer, options)
        incidents = label_incidents(found, log.overlay, shown)
        candidate = Candidate(
            plan,
            segments,
            incidents,
            difference=compare_incidents(today, incidents, margin, options.since, options.until),
            # Faults that today's calibration finds, or would find without its patterns, must not be lost.
            without_patterns=compare_incidents(unpatterned, incidents, margin),
            num_alerts_removed=num_removed,
            num_alerts_new=num_new,
            kinds=kinds,
            dropped=dropped,
        )
        is_done = "patterns" not in options.changes or not _correct_patterns(
            patterns, kinds, dropped, candidate.without_patterns.lost
        )
        if is_done:
            break
    return candidate


def _correct_patterns(
    patterns: list[FalseAlarmPattern],
    kinds: list[PatternCandidate],
    dropped: dict[str, str],
    lost: Sequence[LabelledIncident],
) -> bool:
    """Tighten or remove the patterns that may hide confirmed faults, and return whether there were any.

    Args:
        patterns: The patterns of the candidate, which change.
        kinds: The kinds of false incidents, which change with their patterns.
        dropped: Receives why patterns were removed, by their ids.
        lost: The confirmed faults that the candidate does not find.
    """
    culprits = [pattern for pattern in patterns if any(_may_hide(pattern, fault) for fault in lost)]
    for pattern in culprits:
        position = patterns.index(pattern)
        index = next(index for index, kind in enumerate(kinds) if kind.pattern == pattern)
        stricter = tighten(kinds[index])
        if stricter is not None and stricter.pattern is not None:
            kinds[index], patterns[position] = stricter, stricter.pattern
            continue
        hidden = next(fault for fault in lost if _may_hide(pattern, fault))
        dropped[pattern.id] = f"it would lose the confirmed fault {hidden.incident.id}"
        del patterns[position]
    return bool(culprits)


def _replay(
    log: LabelledLog,
    plan: DetectionPlan,
    spans: IncidentSpans,
    rescorer: Rescorer | None,
    options: ProposalOptions,
) -> tuple[list[Incident], int, int]:
    """Return the incidents of a candidate, and the numbers of removed and of new alerts in the span.

    Args:
        log: The log.
        plan: The candidate's rule, options and patterns.
        spans: The incidents without patterns, to which records belong; each is not compared with itself.
        rescorer: Computes the p-values and alerts anew, None if they stay.
        options: The span.
    """
    tracker = plan.make_tracker(spans.find_id)
    by_id: dict[str, Incident] = {}
    num_removed = num_new = 0
    batches = log.iterate_batches()
    for original, batch in ((one, one) for one in batches) if rescorer is None else rescorer.rescore(batches):
        before, after = original.closed.is_alerted, batch.closed.is_alerted
        is_in_span = options.is_in_span(batch.closed.times)
        num_removed += int((is_in_span & before & ~after).sum())
        num_new += int((is_in_span & after & ~before).sum())
        by_id.update((incident.id, incident) for incident in tracker.handle(batch))
    by_id.update((incident.id, incident) for incident in tracker.finish())
    return list(by_id.values()), num_removed, num_new


def _find_labels(patterns: Sequence[FalseAlarmPattern], overlay: Overlay) -> dict[str, str]:
    """Return the last labels of the incidents of patterns, by id; "cleared" if a label was taken back."""
    label_by_id = {id_: overlay.get_last_label(id_) for pattern in patterns for id_ in pattern.score_by_incident}
    return {id_: label for id_, label in label_by_id.items() if label is not None}


def _get_shares(incident: Incident) -> dict[str, float]:
    """Return the shares of the suspects of an incident by feature."""
    return {suspect.feature: suspect.share for suspect in incident.suspects}


def _to_past_incident(labelled: LabelledIncident) -> PastIncident:
    """Return an incident in the form from which patterns are made."""
    incident = labelled.incident
    return PastIncident(incident.id, incident.device, _get_shares(incident), labelled.max_score, labelled.label)


def _may_hide(pattern: FalseAlarmPattern, fault: LabelledIncident) -> bool:
    """Return whether a pattern can be the reason why a fault is not found."""
    if not pattern.includes_device(fault.incident.device):
        return False
    # Single alerts of an incident can match although their mean does not, so the bound is lower.
    cosine = compute_cosine(_get_shares(fault.incident), pattern.direction, if_empty=0.0)
    return cosine >= 0.5 * pattern.min_cosine
