"""What a candidate changes: rates of false incidents, effects of patterns, and warnings."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence

from deformer_stream.calibration.false_alarm_patterns import FalseAlarmPattern, PatternCandidate
from deformer_stream.calibration.incident_budget import bound_realised_rate
from deformer_stream.calibration.incident_evidence import INITIAL_STATE, advance_detector, compute_log_statistic
from deformer_stream.durations import MICROS_PER_DAY, MICROS_PER_HOUR
from deformer_stream.runtime.incident_difference import IncidentDifference, LabelledIncident, predict_count
from deformer_stream.runtime.incident_plan import DetectionPlan
from deformer_stream.runtime.propose.proposal import FalseRate, LogSummary, PatternOutcome

MAX_RECORDS_TO_OPEN = 100_000
"""Largest number of records of a kind of false incidents for which it is tried whether they open an incident."""


def describe_rate(detection: DetectionPlan, log: LogSummary, count: int, labelled: int) -> FalseRate:
    """Return a number of false incidents as a rate for one device in the period of the budget."""
    periods = log.device_hours * MICROS_PER_HOUR / detection.plan.budget.period
    low, high = bound_realised_rate(count, periods)
    return FalseRate(count, labelled, count / periods if periods else 0.0, low, high, *predict_count(count))


def describe_pattern(
    candidate: PatternCandidate,
    plan: DetectionPlan,
    dropped: Mapping[str, str],
    removed_ids: Container[str],
) -> PatternOutcome:
    """Return what the pattern of a kind of false incidents changes.

    Args:
        candidate: The kind and its pattern.
        plan: The candidate's rule and patterns.
        dropped: Why patterns were left out, by their ids.
        removed_ids: Ids of the incidents without patterns that the candidate does not raise.
    """
    pattern = candidate.pattern
    if pattern is None:
        return PatternOutcome(candidate, False, candidate.remedy)
    num_removed = sum(incident in removed_ids for incident in pattern.score_by_incident)
    is_used = pattern in plan.patterns
    remedy = "" if is_used else dropped.get(pattern.id, "")
    return PatternOutcome(candidate, is_used, remedy, num_removed, count_records_to_open(plan, pattern))


def count_records_to_open(plan: DetectionPlan, pattern: FalseAlarmPattern) -> int | None:
    """Return how many successive records with scores above all past incidents of a pattern open an incident.

    Args:
        plan: The rule.
        pattern: The pattern.

    Returns:
        The number, at most `MAX_RECORDS_TO_OPEN`; None if no incident opens by then.
    """
    state = INITIAL_STATE
    previous = -math.inf
    for number in range(1, MAX_RECORDS_TO_OPEN + 1):
        state = advance_detector(state, pattern.min_p_value, plan.plan.kind, plan.plan.log_normalisers)
        statistic = compute_log_statistic(state)
        if plan.plan.is_reached(statistic):
            return number
        if statistic - previous < 1e-9:  # it no longer grows
            return None
        previous = statistic
    return None


def list_warnings(
    detection: DetectionPlan,
    difference: IncidentDifference,
    patterns: Sequence[PatternOutcome],
    log: LogSummary,
    num_unknown_labels: int,
    unpatterned: Sequence[LabelledIncident],
    label_again: Sequence[LabelledIncident],
) -> list[str]:
    """Return what a person should know before approving, as sentences without full stops."""
    warnings = []
    if difference.lost:
        ids = ", ".join(labelled.incident.id for labelled in difference.lost[:5])
        warnings.append(f"confirmed faults that would no longer be found: {len(difference.lost)}, such as {ids}")
    if num_unknown_labels:
        warnings.append(
            f"labels of incidents that the log does not contain: {num_unknown_labels}; a log that begins earlier, and "
            "the options of the running incidents process, give the same incidents again"
        )
    if label_again:
        ids = ", ".join(labelled.incident.id for labelled in label_again[:5])
        warnings.append(
            "incidents to label again, because they were reopened or their severity has risen since: "
            f"{len(label_again)}, such as {ids}; until then they count as not labelled"
        )
    if log.num_other_model:
        warnings.append(f"records of other models that were left out: {log.num_other_model:,}")
    num_without_suspects = sum(
        labelled.label == "false-alarm" and not labelled.incident.suspects for labelled in unpatterned
    )
    if num_without_suspects:
        warnings.append(
            f"false alarms without suspects, which belong to no pattern: {num_without_suspects}; run consume with "
            "--explanations full"
        )
    unlabelled = sum(len(outcome.candidate.unlabelled) for outcome in patterns if outcome.is_used)
    if unlabelled:
        warnings.append(
            f"incidents with the suspects of a pattern that nobody has labelled: {unlabelled}; look at them first, "
            "because a fault like them would be found late or not at all"
        )
    if not any(labelled.is_fault for labelled in unpatterned):
        warnings.append(
            "no confirmed fault is in the log, so it cannot show whether the candidate still finds faults; label real "
            "faults, too"
        )
    days = (log.end - log.start) / MICROS_PER_DAY
    if days * MICROS_PER_DAY < detection.plan.budget.period / 4:
        warnings.append(f"the span is {days:.1f} days, short for a budget of {detection.plan.budget}")
    return warnings
