"""A candidate for the calibration of incidents, made from labels and kept evidence, and the difference that it makes.

"Today" means the calibration in use. The log of evidence is read several times from its start:

1. The incidents without patterns and those under today's patterns are computed. Labels name incidents by their ids.
2. The largest score of each incident is computed, and records are selected for review.
3. If requested, records and segments are calibrated again, without the records that a person has confirmed as faulty.
   If both are, they share no records (`_LogSplit`): by comparison with themselves, records would have p-values that are
   too regular, and the threshold of the segments would be too low.
4. The incidents of the candidate are computed and compared with those of today.

Each past incident is compared with the others of its pattern and not with itself, because patterns have the same effect
on new incidents. If a confirmed fault would no longer be found with a pattern, suspects must match the pattern more
closely. If the fault is then still not found, the pattern is left out of the candidate.

A new calibration leaves out the records of confirmed faults and of known maintenance, and no others. This follows from
labels of incidents, labels of single records, and maintenance windows. If all unusual records were left out, it would
give too many alerts (Label-Trim, arXiv 2502.04807). The unlabelled records with the largest scores are offered for
review. So is a random sample of records without an alert, because labels of alerts give no information about faults
that were missed.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.false_alarm_patterns import (
    FalseAlarmPattern,
    PastIncident,
    PatternAdjuster,
    PatternCandidate,
    make_patterns,
    tighten,
)
from deformer_stream.calibration.incident_budget import MICROS_PER_DAY, bound_realised_rate
from deformer_stream.calibration.incident_evidence import (
    INITIAL_STATE,
    ScoreTail,
    advance_detector,
    compute_log_statistic,
)
from deformer_stream.calibration.incident_segments import (
    MICROS_PER_HOUR,
    SEGMENT_LENGTHS,
    SegmentCalibration,
    SegmentCollector,
)
from deformer_stream.calibration.share_vectors import compute_cosine
from deformer_stream.errors import InputError
from deformer_stream.incidents.events import AlertRow, ClosedRows, EvidenceBatch, FeedbackLabel, Incident
from deformer_stream.incidents.overlay import Overlay
from deformer_stream.incidents.repetitions import leave_out_repetitions
from deformer_stream.incidents.row_order import OpenAlert, Row, RowOrder
from deformer_stream.runtime.incident_calibration import fit_tail_of_calibration, rescore_batch
from deformer_stream.runtime.incident_difference import (
    IncidentDifference,
    IncidentSpans,
    LabelledIncident,
    compare_incidents,
    label_incidents,
    predict_count,
)
from deformer_stream.runtime.incident_plan import DetectionPlan

if TYPE_CHECKING:
    from deformer_stream.calibration.conformal import Calibration

Floats = NDArray[np.float64]

LogReader = Callable[[], Iterator[EvidenceBatch]]
"""Reads the log of evidence from its start. It is called several times."""

MAX_REPLAYS = 10
"""Largest number of replays of the candidate. After each, patterns that would lose a fault are changed or left out."""

MAX_RECORDS_TO_OPEN = 100_000
"""Largest number of records of a kind of false incidents for which it is tried whether they open an incident."""

MAX_COLLECTED_RECORDS = 1_000_000
"""Largest number of records from which a calibration of records is made. Of more records, a random sample is used."""


@dataclass(frozen=True, slots=True)
class ReviewRecord:
    """A record at which a person should look.

    Attributes:
        record: Id of the record.
        device: Its device.
        time: Its event time, microseconds since 1970.
        score: Its score; larger is more anomalous.
        p_value: Its p-value.
        incident: Id of the incident to which it belongs, None without one.
    """

    record: str
    device: str
    time: int
    score: float
    p_value: float
    incident: str | None


@dataclass(frozen=True, slots=True)
class Review:
    """The records at which a person should look, and a summary of the labels of such records so far.

    Attributes:
        largest: The records with the largest scores that nobody has labelled, the largest first.
        silent: A random sample of the records without an alert that nobody has labelled.
        num_silent_answers: Number of records without an alert that people have labelled.
        num_silent_faults: How many of them are faults that were missed.
    """

    largest: tuple[ReviewRecord, ...]
    silent: tuple[ReviewRecord, ...]
    num_silent_answers: int = 0
    num_silent_faults: int = 0


@dataclass(frozen=True, slots=True)
class LogSummary:
    """A summary of the log of evidence in the span that is compared.

    Attributes:
        start: Time of the first record, microseconds since 1970; 0 without records.
        end: Time of the last record.
        num_records: Number of records.
        num_devices: Number of devices.
        device_hours: Number of hours in which a device has records, summed over the devices.
        num_alerts_today: Number of records with an alert.
        num_alerts_removed: Number of these records that have no alert under the candidate.
        num_alerts_new: Number of records that have an alert under the candidate only.
        num_other_model: Number of records of other models, which are left out.
    """

    start: int = 0
    end: int = 0
    num_records: int = 0
    num_devices: int = 0
    device_hours: int = 0
    num_alerts_today: int = 0
    num_alerts_removed: int = 0
    num_alerts_new: int = 0
    num_other_model: int = 0


@dataclass(frozen=True, slots=True)
class FalseRate:
    """The number of false incidents in a span, as a rate, and the number to expect in a further span.

    Attributes:
        count: Number of incidents that count as false (`LabelledIncident.can_be_false`).
        labelled: How many of them people have labelled as false alarms.
        per_period: Mean number of false incidents of one device in the period of the budget.
        low: Lower end of the 99% confidence interval of `per_period`.
        high: Upper end of this interval.
        expected_low: Lower end of the 95% interval of the number in a further span of the same length.
        expected_high: Upper end of this interval.
    """

    count: int
    labelled: int
    per_period: float
    low: float
    high: float
    expected_low: int
    expected_high: int


@dataclass(frozen=True, slots=True)
class PatternOutcome:
    """A kind of false incidents, and what its pattern changes.

    Attributes:
        candidate: The incidents of the kind and their pattern.
        is_used: Whether the pattern is a part of the candidate.
        remedy: Why it is not, or what is missing for it; "" if it is.
        num_removed: Number of the kind's incidents, labelled and unlabelled, that the candidate no longer raises.
        records_to_open: Number of successive records with scores above all past incidents of the kind after which an
            incident opens nevertheless; None if none opens.
    """

    candidate: PatternCandidate
    is_used: bool
    remedy: str
    num_removed: int = 0
    records_to_open: int | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """A candidate and what it would have changed.

    Attributes:
        plan: The candidate's rule, options and patterns.
        segments: The candidate's segments, None if they stay.
        calibration: The candidate's calibration of records, None if it stays.
        difference: The difference between the incidents.
        today: The incidents under today's calibration, over the whole log.
        candidate: The incidents of the candidate, over the whole log.
        log: What the log contains in the span.
        rate_today: The false incidents of today.
        rate_candidate: The false incidents of the candidate.
        patterns: The kinds of false incidents.
        review: The records at which a person should look.
        num_labels: Number of labels that count.
        num_unknown_labels: How many of them name incidents that the log does not contain.
        warnings: What a person should know before approving, as sentences.
    """

    plan: DetectionPlan
    segments: tuple[SegmentCalibration, ...] | None
    calibration: Calibration | None
    difference: IncidentDifference
    today: tuple[LabelledIncident, ...]
    candidate: tuple[LabelledIncident, ...]
    log: LogSummary
    rate_today: FalseRate
    rate_candidate: FalseRate
    patterns: tuple[PatternOutcome, ...]
    review: Review
    num_labels: int
    num_unknown_labels: int
    warnings: tuple[str, ...]


Change = Literal["patterns", "segments", "records"]
"""A part of the calibration that a candidate replaces."""


@dataclass(frozen=True, slots=True)
class ProposalOptions:
    """What a candidate replaces, and what is compared.

    Attributes:
        changes: The parts of the calibration that the candidate replaces.
        since: Beginning of the span that is compared, None for the start of the log.
        until: End of this span, None for the end of the log.
        alpha: False-alarm rate of alerts of single records, if their calibration is replaced.
        num_review: Number of records of each kind that are offered for review.
        seed: Seed of the choice of records.
        has_segments: Whether the calibration in use has segments. A new calibration of records gives other p-values, so
            it needs new segments, even if the rule in use is the e-detector.
    """

    changes: tuple[Change, ...] = ("patterns",)
    since: int | None = None
    until: int | None = None
    alpha: float = 0.01
    num_review: int = 20
    seed: int = 0
    has_segments: bool = False


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
    """

    def read_distinct() -> Iterator[EvidenceBatch]:
        return leave_out_repetitions(read_log())

    overlay = Overlay(labels)
    unpatterned_incidents, today_incidents, log = _survey(
        read_distinct, detection.with_patterns(()), detection, options
    )
    unpatterned = label_incidents(unpatterned_incidents, overlay)
    today = label_incidents(today_incidents, overlay)
    has_new_segments = "segments" in options.changes or ("records" in options.changes and options.has_segments)
    split = None
    if "records" in options.changes and has_new_segments:
        split = _LogSplit(max(_list_segment_lengths(detection)), options.seed)
    spans = IncidentSpans(unpatterned, 0)
    label_by_record = _find_record_labels(labels)
    scores, review, kept = _collect_scores(read_distinct, detection, spans, overlay, label_by_record, options, split)
    unpatterned = [replace(entry, max_score=scores.get(entry.incident.id, math.nan)) for entry in unpatterned]

    calibration = None
    if "records" in options.changes:
        assert recalibrate_records is not None  # noqa: S101 - a programming error of the caller
        calibration = recalibrate_records(kept.record_ids, kept.scores, kept.record_scores)
        tail = fit_tail_of_calibration(calibration)
    found = _find_candidate(
        read_distinct,
        detection,
        unpatterned,
        today=today,
        overlay=overlay,
        label_by_record=label_by_record,
        options=options,
        calibration=calibration,
        replan=replan if has_new_segments else None,
        tail=tail,
        split=split,
    )
    log = replace(log, num_alerts_removed=found.num_alerts_removed, num_alerts_new=found.num_alerts_new)
    difference = found.difference
    known = {incident.id for incident in (*unpatterned_incidents, *today_incidents)}
    labelled_ids = {label.incident for label in labels if label.incident is not None}
    removed_ids = {labelled.incident.id for labelled in found.without_patterns.removed}
    outcomes = tuple(_describe_pattern(entry, found.plan, found.dropped, removed_ids) for entry in found.kinds)
    return Proposal(
        found.plan,
        found.segments,
        calibration,
        difference=difference,
        today=tuple(today),
        candidate=tuple(found.incidents),
        log=log,
        rate_today=_describe_rate(detection, log, difference.num_false_today, difference.num_labelled_today),
        rate_candidate=_describe_rate(
            detection, log, difference.num_false_candidate, difference.num_labelled_candidate
        ),
        patterns=outcomes,
        review=review,
        num_labels=len({label.id for label in labels}),
        num_unknown_labels=len(labelled_ids - known),
        warnings=tuple(_list_warnings(detection, difference, outcomes, log, len(labelled_ids - known), unpatterned)),
    )


@dataclass(slots=True)
class _Candidate:
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


def _find_candidate(
    read_log: LogReader,
    detection: DetectionPlan,
    unpatterned: Sequence[LabelledIncident],
    today: Sequence[LabelledIncident],
    overlay: Overlay,
    label_by_record: Mapping[str, str],
    options: ProposalOptions,
    calibration: Calibration | None,
    replan: Callable[[Sequence[SegmentCalibration]], DetectionPlan] | None,
    tail: ScoreTail | None,
    split: _LogSplit | None,
) -> _Candidate:
    """Return the candidate whose patterns lose no confirmed fault, by replays of the log.

    Args:
        read_log: Reads the log.
        detection: Today's rule, options and patterns.
        unpatterned: The incidents without patterns, with their labels and largest scores.
        today: The incidents of today.
        overlay: The labels and maintenance windows.
        label_by_record: The labels of single records.
        options: What the candidate replaces, and what is compared.
        calibration: The candidate's calibration of records, None if it stays.
        replan: As in `propose`; None if the segments stay.
        tail: As in `propose`, of the candidate's calibration.
        split: Which parts of the log calibrate the records; None if all or none do.
    """
    margin = detection.options.gap
    spans = IncidentSpans(unpatterned, margin)
    rescorer = None if calibration is None else _Rescorer(calibration, options.alpha)
    kinds: list[PatternCandidate] = []
    patterns = list(detection.patterns)
    if "patterns" in options.changes:
        kinds = make_patterns([_to_past_incident(entry) for entry in unpatterned], detection.patterns)
        patterns = [kind.pattern for kind in kinds if kind.pattern is not None]
    dropped: dict[str, str] = {}
    for _ in range(MAX_REPLAYS):
        plan, segments = detection.with_patterns(patterns), None
        if replan is not None:
            segments = _collect_segments(read_log, plan, spans, overlay, label_by_record, tail, rescorer, split)
            plan = replan(segments).with_patterns(patterns)
        found, num_removed, num_new = _replay(read_log, plan, spans, rescorer, options)
        incidents = label_incidents(found, overlay)
        candidate = _Candidate(
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


def _find_record_labels(labels: Iterable[FeedbackLabel]) -> dict[str, str]:
    """Return the latest label of each record by the id of the record. A label "cleared" removes the record."""
    latest: dict[str, FeedbackLabel] = {}
    for label in sorted(labels, key=lambda label: (label.time, label.id)):
        if label.record is not None:
            latest[label.record] = label
    return {record: label.label for record, label in latest.items() if label.label != "cleared"}


def _iterate_own(read_log: LogReader, detection: DetectionPlan) -> Iterator[EvidenceBatch]:
    """Return the batches of the log that the model of a plan has scored."""
    return (batch for batch in read_log() if detection.model in ("", batch.model))


def _survey(
    read_log: LogReader, unpatterned: DetectionPlan, detection: DetectionPlan, options: ProposalOptions
) -> tuple[list[Incident], list[Incident], LogSummary]:
    """Return the incidents without patterns, those of today, and what the log contains in the span.

    Raises:
        InputError: The log has no record of the model.
    """
    unpatterned_tracker = unpatterned.make_tracker()
    # Without patterns both trackers would do the same.
    today_tracker = detection.make_tracker() if detection.patterns else unpatterned_tracker
    base_by_id: dict[str, Incident] = {}
    today_by_id: dict[str, Incident] = {} if detection.patterns else base_by_id
    get_device = detection.options.get_device
    start, end, num_records, num_alerts, device_hours, num_other = None, None, 0, 0, 0, 0
    last_hour_by_device: dict[str, int] = {}
    for batch in read_log():
        if detection.model not in ("", batch.model):
            num_other += len(batch.closed)
            continue
        base_by_id.update((incident.id, incident) for incident in unpatterned_tracker.handle(batch))
        if today_tracker is not unpatterned_tracker:
            today_by_id.update((incident.id, incident) for incident in today_tracker.handle(batch))
        is_in_span = _is_in_span(batch.closed, options)
        if not is_in_span.any():
            continue
        times = batch.closed.times[is_in_span]
        start = min(int(times.min()), start if start is not None else int(times.min()))
        end = max(int(times.max()), end if end is not None else int(times.max()))
        num_records += len(times)
        num_alerts += int(batch.closed.is_alerted[is_in_span].sum())
        for index in np.flatnonzero(is_in_span).tolist():
            device = get_device(batch.closed.record_ids[index])
            hour = int(batch.closed.times[index]) // MICROS_PER_HOUR
            if hour > last_hour_by_device.get(device, hour - 1):
                device_hours += 1
                last_hour_by_device[device] = hour
    base_by_id.update((incident.id, incident) for incident in unpatterned_tracker.finish())
    if today_tracker is not unpatterned_tracker:
        today_by_id.update((incident.id, incident) for incident in today_tracker.finish())
    if start is None or end is None:
        other = f" of model {detection.model}, but {num_other:,} of other models" if num_other else ""
        raise InputError(
            f"the log of evidence has no record{other} in the span: check --log, --since and --until, and that --model "
            "is the model that has scored the records"
        )
    log = LogSummary(
        start,
        end,
        num_records,
        num_devices=len(last_hour_by_device),
        device_hours=device_hours,
        num_alerts_today=num_alerts,
        num_alerts_removed=0,
        num_alerts_new=0,
        num_other_model=num_other,
    )
    return list(base_by_id.values()), list(today_by_id.values()), log


def _is_in_span(closed: ClosedRows, options: ProposalOptions) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which records lie in the span that is compared, (R,)."""
    is_in_span = np.ones(len(closed), bool)
    if options.since is not None:
        is_in_span &= closed.times >= options.since
    if options.until is not None:
        is_in_span &= closed.times < options.until
    return is_in_span


@dataclass(slots=True)
class _KeptRecords:
    """Records from which a calibration of records is made: all of them, or a random sample of bounded size.

    Attributes:
        seed: Seed of the choice.
    """

    seed: int
    _heap: list[tuple[float, str, float, float]] = field(default_factory=list)

    def add(self, record: str, score: float, record_score: float) -> None:
        """Add a record. If there are too many, the ones with the smallest hashes stay.

        Args:
            record: Id of the record.
            score: Its score.
            record_score: Its score as a complete record, NaN if it is unknown.
        """
        entry = (-_hash_record(record, self.seed), record, score, record_score)
        if len(self._heap) < MAX_COLLECTED_RECORDS:
            heapq.heappush(self._heap, entry)
        elif entry[0] > self._heap[0][0]:
            heapq.heapreplace(self._heap, entry)

    @property
    def record_ids(self) -> list[str]:
        """The ids of the records, in the order of `scores`."""
        return [record for _, record, _, _ in self._list()]

    @property
    def scores(self) -> Floats:
        """The scores of the records."""
        return np.array([score for _, _, score, _ in self._list()])

    @property
    def record_scores(self) -> Floats | None:
        """The scores of the records as complete records, None if one of them is unknown."""
        scores = np.array([record_score for _, _, _, record_score in self._list()])
        return None if np.isnan(scores).any() else scores

    def _list(self) -> list[tuple[float, str, float, float]]:
        """Return the records in an order that does not depend on that of the log."""
        return sorted(self._heap, key=lambda entry: (-entry[0], entry[1]))


class _ReviewChooser:
    """Chooses the records at which a person should look, and counts the answers so far.

    Args:
        label_by_record: The labels of single records.
        options: Number of records of each kind, and the seed of the choice.
    """

    def __init__(self, label_by_record: dict[str, str], options: ProposalOptions) -> None:
        self._label_by_record, self._seed = label_by_record, options.seed
        # The largest scores and the smallest hashes; the hash breaks ties.
        self._largest, self._silent = _Best(options.num_review), _Best(options.num_review)
        self._num_answers = self._num_missed = 0

    def add(self, entry: ReviewRecord, is_alerted: bool, owner: LabelledIncident | None) -> None:
        """Add a record.

        Args:
            entry: The record.
            is_alerted: Whether it has alerted.
            owner: The incident to which it belongs, None without one.
        """
        label = self._label_by_record.get(entry.record)
        if label is not None and not is_alerted:
            self._num_answers += 1
            self._num_missed += label == "true"
        if label is not None or (owner is not None and owner.label is not None):
            return  # a person has looked at it
        hash_ = _hash_record(entry.record, self._seed)
        if is_alerted:
            self._largest.add((entry.score, -hash_), entry)
        else:
            self._silent.add((-hash_, 0.0), entry)

    def make_review(self) -> Review:
        """Return the chosen records."""
        return Review(
            tuple(sorted(self._largest.entries, key=lambda entry: (-entry.score, entry.time, entry.record))),
            tuple(sorted(self._silent.entries, key=lambda entry: (entry.time, entry.record))),
            self._num_answers,
            self._num_missed,
        )


def _collect_scores(
    read_log: LogReader,
    detection: DetectionPlan,
    spans: IncidentSpans,
    overlay: Overlay,
    label_by_record: dict[str, str],
    options: ProposalOptions,
    split: _LogSplit | None,
) -> tuple[dict[str, float], Review, _KeptRecords]:
    """Return the largest score of each incident by id, the records for review, and the records for a new calibration.

    Args:
        read_log: Reads the log.
        detection: Today's rule.
        spans: The incidents without patterns, with their labels.
        overlay: The maintenance windows.
        label_by_record: The labels of single records.
        options: Numbers of records for review, and whether a calibration of records is made.
        split: Which parts of the log a calibration of records uses; None for all.
    """
    score_by_incident: dict[str, float] = {}
    chooser, kept = _ReviewChooser(label_by_record, options), _KeptRecords(options.seed)
    collects = "records" in options.changes
    get_device = detection.options.get_device
    for batch in _iterate_own(read_log, detection):
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
            device = get_device(record)
            owner = spans.find(device, time)
            id_ = None
            if owner is not None:
                id_ = owner.incident.id
                score_by_incident[id_] = max(score, score_by_incident.get(id_, -math.inf))
            chooser.add(ReviewRecord(record, device, time, score, p_value, id_), is_alerted, owner)
            is_used = collects and (split is None or split.is_for_records(device, time))
            if is_used and not _is_excluded(record, device, time, owner, label_by_record, overlay):
                kept.add(record, score, record_score)
    return score_by_incident, chooser.make_review(), kept


def _is_excluded(
    record: str,
    device: str,
    time: int,
    owner: LabelledIncident | None,
    label_by_record: Mapping[str, str],
    overlay: Overlay,
) -> bool:
    """Return whether a record enters no new calibration, because it is a confirmed fault or known maintenance.

    Args:
        record: Id of the record.
        device: Its device.
        time: Its time.
        owner: The incident to which it belongs, None without one.
        label_by_record: The labels of single records.
        overlay: The maintenance windows.
    """
    labels = (label_by_record.get(record), None if owner is None else owner.label)
    return "true" in labels or "maintenance" in labels or overlay.is_under_maintenance(device, time)


def _hash_record(record: str, seed: int) -> float:
    """Return a number from 0 to 1 that is a hash of a record id and a seed."""
    digest = hashlib.blake2b(f"{seed}\0{record}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _list_segment_lengths(plan: DetectionPlan) -> list[int]:
    """Return the lengths of segments for which a calibration is made, in microseconds, the longest first."""
    return sorted({*SEGMENT_LENGTHS, *([plan.plan.segment] if plan.plan.segment else [])}, reverse=True)


@dataclass(frozen=True, slots=True)
class _LogSplit:
    """A random half of the log, which calibrates the records. The other half calibrates the segments.

    Attributes:
        length: Length of a part of the log of one device that is in one half, in microseconds.
        seed: Seed of the choice.
    """

    length: int
    seed: int

    def is_for_records(self, device: str, time: int) -> bool:
        """Return whether a time of a device is in the half that calibrates the records."""
        return _hash_record(f"{device}\0{time // self.length}", self.seed) < 0.5

    def has_calibrated_records(self, device: str, length: int, number: int) -> bool:
        """Return whether a segment, which is not longer than a part, is partly in this half.

        Args:
            device: The device.
            length: Length of the segment in microseconds.
            number: Its number, as `time // length`.
        """
        start = number * length
        return self.is_for_records(device, start) or self.is_for_records(device, start + length - 1)


class _Best:
    """The records with the largest keys.

    Args:
        size: Largest number of records.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._entry_by_record: dict[str, ReviewRecord] = {}
        self._heap: list[tuple[tuple[float, float], str]] = []

    @property
    def entries(self) -> list[ReviewRecord]:
        """The records, in any order."""
        return list(self._entry_by_record.values())

    def add(self, key: tuple[float, float], entry: ReviewRecord) -> None:
        """Add a record, and drop the one with the smallest key if there are too many. A record counts once."""
        if entry.record in self._entry_by_record or not self._size:
            return
        if len(self._heap) >= self._size:
            if (key, entry.record) <= self._heap[0]:
                return
            del self._entry_by_record[heapq.heappop(self._heap)[1]]
        heapq.heappush(self._heap, (key, entry.record))
        self._entry_by_record[entry.record] = entry


class _Rescorer:
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


def _collect_segments(
    read_log: LogReader,
    plan: DetectionPlan,
    spans: IncidentSpans,
    overlay: Overlay,
    label_by_record: Mapping[str, str],
    tail: ScoreTail | None,
    rescorer: _Rescorer | None,
    split: _LogSplit | None,
) -> tuple[SegmentCalibration, ...]:
    """Return calibrations by the segments of the log without confirmed faults and maintenance.

    A segment with a record of a confirmed fault or of maintenance is left out as a whole. The patterns apply to the
    segments as they will apply to new ones; otherwise the false alarms in the log would raise the threshold for all.

    Args:
        read_log: Reads the log.
        plan: The rule, whose kind of detector is used, and the candidate's patterns.
        spans: The incidents without patterns, with their labels.
        overlay: The maintenance windows.
        label_by_record: The labels of single records.
        tail: The tail by which p-values are extended, None if they are not.
        rescorer: Computes the p-values anew, None if they stay.
        split: Which parts of the log have calibrated the records, and are left out; None for none.
    """
    lengths = _list_segment_lengths(plan)
    excluded: set[tuple[str, int, int]] = set()
    examined: set[tuple[str, int, int]] = set()
    get_device = plan.options.get_device
    for batch in _iterate_own(read_log, plan):
        for record, time in zip(batch.closed.record_ids, batch.closed.times.tolist(), strict=True):
            device = get_device(record)
            segments = [(device, length, time // length) for length in lengths]
            if _is_excluded(record, device, time, spans.find(device, time), label_by_record, overlay):
                excluded.update(segments)
            if split is not None:
                new = [segment for segment in segments if segment not in examined]
                examined.update(new)
                excluded.update(segment for segment in new if split.has_calibrated_records(*segment))
    opens_early = plan.plan.opens_early
    collectors = [SegmentCollector(length, tail, plan.plan.kind, opens_early) for length in lengths]
    adjuster = PatternAdjuster(plan.patterns, plan.options.gap, plan.model, _make_finder(spans))
    order = RowOrder(plan.options.reorder, get_device)
    for row in _iterate_rows(read_log, plan, rescorer, order):
        if isinstance(row, Row):
            _add_row(row, get_device(row.record), collectors, adjuster, tail, excluded)
        elif row.alert.score is not None or not plan.patterns:
            _add_alert(row.alert, get_device(row.alert.record), collectors, adjuster, tail, excluded)
    return tuple(collector.calibrate() for collector in collectors)


Excluded = Container[tuple[str, int, int]]
"""Segments that are left out: device, length and number of each."""


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
    read_log: LogReader, plan: DetectionPlan, rescorer: _Rescorer | None, order: RowOrder
) -> Iterator[Row | OpenAlert]:
    """Yield the rows of the log in the order in which they are handled; alerts only if incidents may open there.

    Args:
        read_log: Reads the log.
        plan: The plan, whose model has scored the records.
        rescorer: Computes the p-values anew, None if they stay.
        order: Orders the rows.
    """
    batches = _iterate_own(read_log, plan)
    for batch in batches if rescorer is None else (rescored for _, rescored in rescorer.rescore(batches)):
        yield from order.add_with_alerts(batch) if plan.plan.opens_early else order.add(batch)
    yield from order.finish()


def _make_finder(spans: IncidentSpans) -> Callable[[str, int], str | None]:
    """Return a function that returns the id of the incident to which a record of a device at a time belongs."""

    def find_own_incident(device: str, time: int) -> str | None:
        owner = spans.find(device, time)
        return None if owner is None else owner.incident.id

    return find_own_incident


def _replay(
    read_log: LogReader,
    plan: DetectionPlan,
    spans: IncidentSpans,
    rescorer: _Rescorer | None,
    options: ProposalOptions,
) -> tuple[list[Incident], int, int]:
    """Return the incidents of a candidate, and the numbers of removed and of new alerts in the span.

    Args:
        read_log: Reads the log.
        plan: The candidate's rule, options and patterns.
        spans: The incidents without patterns, to which records belong; each is not compared with itself.
        rescorer: Computes the p-values and alerts anew, None if they stay.
        options: The span.
    """
    tracker = plan.make_tracker(_make_finder(spans))
    by_id: dict[str, Incident] = {}
    num_removed = num_new = 0
    batches = _iterate_own(read_log, plan)
    for original, batch in ((one, one) for one in batches) if rescorer is None else rescorer.rescore(batches):
        before, after = original.closed.is_alerted, batch.closed.is_alerted
        is_in_span = _is_in_span(batch.closed, options)
        num_removed += int((is_in_span & before & ~after).sum())
        num_new += int((is_in_span & after & ~before).sum())
        by_id.update((incident.id, incident) for incident in tracker.handle(batch))
    by_id.update((incident.id, incident) for incident in tracker.finish())
    return list(by_id.values()), num_removed, num_new


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


def _describe_rate(detection: DetectionPlan, log: LogSummary, count: int, labelled: int) -> FalseRate:
    """Return a number of false incidents as a rate for one device in the period of the budget."""
    periods = log.device_hours * MICROS_PER_HOUR / detection.plan.budget.period
    low, high = bound_realised_rate(count, periods)
    return FalseRate(count, labelled, count / periods if periods else 0.0, low, high, *predict_count(count))


def _describe_pattern(
    candidate: PatternCandidate,
    plan: DetectionPlan,
    dropped: dict[str, str],
    removed_ids: set[str],
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


def _list_warnings(
    detection: DetectionPlan,
    difference: IncidentDifference,
    patterns: Sequence[PatternOutcome],
    log: LogSummary,
    num_unknown_labels: int,
    unpatterned: Sequence[LabelledIncident],
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
