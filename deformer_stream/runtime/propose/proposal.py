"""What `propose` is given besides the log and the labels, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.false_alarm_patterns import PatternCandidate
from deformer_stream.calibration.incident_segments import SegmentCalibration
from deformer_stream.runtime.incident_difference import IncidentDifference, LabelledIncident
from deformer_stream.runtime.incident_plan import DetectionPlan

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

    def is_in_span(self, times: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which times lie in the span that is compared, (R,).

        Args:
            times: (R,) times, microseconds since 1970.
        """
        is_in_span = np.ones(len(times), bool)
        if self.since is not None:
            is_in_span &= times >= self.since
        if self.until is not None:
            is_in_span &= times < self.until
        return is_in_span


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
        device_hours: Hours for which a device was observed (`ObservedTime`), summed over the devices.
        num_alerts_today: Number of records with an alert.
        num_alerts_removed: Number of these records that have no alert under the candidate.
        num_alerts_new: Number of records that have an alert under the candidate only.
        num_other_model: Number of records of other models, which are left out.
    """

    start: int = 0
    end: int = 0
    num_records: int = 0
    num_devices: int = 0
    device_hours: float = 0.0
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
        label_again: The incidents that count as not labelled, because they were reopened or their severity has risen
            since they were labelled.
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
    label_again: tuple[LabelledIncident, ...]
    num_labels: int
    num_unknown_labels: int
    warnings: tuple[str, ...]
