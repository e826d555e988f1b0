"""The incident of a device, as the trackers of devices and of fleets update it."""

from __future__ import annotations

from dataclasses import dataclass, field

from deformer_stream.calibration.incident_evidence import LogState
from deformer_stream.incidents.events import IncidentRule, OpenRecordReading
from deformer_stream.incidents.series import TimelineSeries
from deformer_stream.incidents.suspects import SuspectTotals


@dataclass(slots=True)
class TrackedIncident:
    """An incident of a device: the open one, or the last one that was resolved.

    Attributes:
        id: Id of the incident.
        model: Fingerprint of the model at the opening.
        rule: The rule by which it has opened.
        log_threshold: ln of the threshold at the opening.
        opened: Time of the first record.
        first_record: Id of the first record.
        segment: Number of the segment in which it opened, None without segments.
        last: Time of the last record that the incident includes.
        resolved: Time at which it was resolved, None if it is open.
        num_records: Number of records up to `last`.
        num_alerted: Number of these records that have alerted.
        num_pending: Number of records since `last`, at all of which the statistic was below the threshold.
        num_pending_alerted: Number of these records that have alerted.
        below_since: Time of the first of these records, None if there is none.
        log_evidence: ln M_κ without the bound that holds while an incident is open; empty if M_κ is 0.
        max_log_evidence: Largest ln of the statistic without this bound.
        severity: The severity.
        revision: Number of messages so far.
        num_reopened: How often it was reopened.
        resolution: Why it was resolved, None if it is open.
        parent: Id of its fleet incident, None without one.
        former_parent: Id of the last fleet incident that it is no longer a member of, None if there was none.
        next_num_records: Number of records at which the next message is sent.
        last_message: Time of the last message.
        sent_severity: Severity of the last message.
        first_suspect: First suspect of the last message, None if it had none.
        totals: The sums of the suspects' shares.
        timeline: The evidence over time.
        record_ids: Ids of records that have alerted, the first and the latest ones.
        alert_ids: Ids of their alerts.
        early_records: Ids of open records that are counted already, because they have alerted.
        next_reading: The reading to take next, of an open record; None if none is known.
        sent_feature: Feature of `next_reading` in the last message, None if it had none.
        fault: The known faults that the record of the latest alert looks like, with their probabilities.
    """

    id: str
    model: str
    rule: IncidentRule
    log_threshold: float
    opened: int
    first_record: str
    segment: int | None
    last: int
    resolved: int | None = None
    num_records: int = 0
    num_alerted: int = 0
    num_pending: int = 0
    num_pending_alerted: int = 0
    below_since: int | None = None
    log_evidence: LogState = ()
    max_log_evidence: float = 0.0
    severity: int = 1
    revision: int = 0
    num_reopened: int = 0
    resolution: str | None = None
    parent: str | None = None
    former_parent: str | None = None
    next_num_records: int = 2
    last_message: int = 0
    sent_severity: int = 1
    first_suspect: str | None = None
    totals: SuspectTotals = field(default_factory=SuspectTotals)
    timeline: TimelineSeries = field(default_factory=TimelineSeries)
    record_ids: list[str] = field(default_factory=list)
    alert_ids: list[str] = field(default_factory=list)
    early_records: list[str] = field(default_factory=list)
    next_reading: OpenRecordReading | None = None
    sent_feature: str | None = None
    fault: tuple[tuple[str, float], ...] = ()
