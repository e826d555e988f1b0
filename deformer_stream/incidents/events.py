"""The types that pass between the processes: evidence of closed records, incidents, and labels of operators.

Times are microseconds since 1970, UTC. `deformer_stream.codec` encodes these types as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.fault_classifier import FaultName
from deformer_stream.engine.events import NO_TIME, ONLY_MODEL, SuggestedReading
from deformer_stream.feedback_labels import Label

IncidentState = Literal["open", "updated", "resolved"]
IncidentRule = Literal["segments", "e-detector"]
IncidentKind = Literal["device", "fleet"]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A feature to which an alert is attributed.

    Attributes:
        feature: Name of the feature.
        value: The observed value: a number, a label, or None if it is unknown.
        low: Lower end of the expected range, None for labels.
        high: Upper end of the expected range, None for labels.
        share: Share of the attribution of the alert, from 0 to 1. The shares of an alert's suspects sum to at most 1.
        unit: Unit of the value, None if it has none.
    """

    feature: str
    value: float | str | None
    low: float | None
    high: float | None
    share: float
    unit: str | None = None


@dataclass(frozen=True, slots=True)
class AlertRow:
    """The part of an alert that the detection of incidents uses.

    Attributes:
        id: Id of the alert, by which readers find it in the topic of alerts.
        record: Id of the record.
        time: Event time of the reading that raised the alert, `engine.events.NO_TIME` if it has none.
        p_value: p-value of the record at the alert.
        severity: 1 for the largest of the configured alphas, 2 for the next smaller one, and so on.
        suspects: The features to which the alert is attributed, the largest share first; at most
            `make_evidence.MAX_SUSPECTS`.
        silenced_by: The smallest known set of features whose expected values would prevent the alert, or None.
        score: Anomaly score of the record at the alert, None if it is unknown.
        next_reading: The reading of the record to take next, None if none is suggested.
        fault: Which known fault the record looks like, None if the model has no classifier of faults.
        alpha: The false-alarm rate at which the record has alerted, None in evidence of earlier releases.
    """

    id: str
    record: str
    time: int
    p_value: float
    severity: int
    suspects: tuple[Suspect, ...] = ()
    silenced_by: tuple[str, ...] | None = None
    score: float | None = None
    next_reading: SuggestedReading | None = None
    fault: FaultName | None = None
    alpha: float | None = None


@dataclass(frozen=True, slots=True)
class ClosedRows:
    """The fields of R closed records that the detection of incidents uses.

    Attributes:
        record_ids: R record ids.
        times: (R,) int64 latest event time of the accepted readings of each record.
        p_values: (R,) p-value of each record after its last reading.
        scores: (R,) anomaly score of each record; larger is more anomalous.
        num_readings: (R,) int32 number of readings of each record.
        is_alerted: (R,) whether the record has raised an alert.
        record_p_values: (R,) p-value of each record as a whole, NaN where it is unknown; None if all are.
        record_scores: (R,) anomaly score of each record as a whole, from which this p-value is computed. A later
            calibration computes p-values from it. NaN where it is unknown, None if all are.
    """

    record_ids: list[str]
    times: NDArray[np.int64]
    p_values: NDArray[np.float64]
    scores: NDArray[np.float64]
    num_readings: NDArray[np.int32]
    is_alerted: NDArray[np.bool_]
    record_p_values: NDArray[np.float64] | None = None
    record_scores: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.record_ids)

    def select(self, is_selected: NDArray[np.bool_]) -> ClosedRows:
        """Return some of the records.

        Args:
            is_selected: (R,) whether each record is selected.
        """
        return ClosedRows(
            [self.record_ids[index] for index in np.flatnonzero(is_selected).tolist()],
            self.times[is_selected],
            self.p_values[is_selected],
            self.scores[is_selected],
            self.num_readings[is_selected],
            self.is_alerted[is_selected],
            record_p_values=None if self.record_p_values is None else self.record_p_values[is_selected],
            record_scores=None if self.record_scores is None else self.record_scores[is_selected],
        )


@dataclass(frozen=True, slots=True)
class EvidenceBatch:
    """The closed records and the alerts of one poll of one partition.

    A batch is one message of `TOPIC-evidence`, or several if it is large. The alert of a record is in the same batch as
    the record or in an earlier one.

    Attributes:
        model: Fingerprint of the model and its calibration.
        partition: Number of the partition of the topic of events.
        closed: The closed records, in the order of closing.
        alerts: The alerts, in the order in which they were raised.
        model_name: Name of the model among several ones; `ONLY_MODEL` if there is one model, or if an earlier release
            has written the evidence.
        arrived: Timestamp of its message in the topic, `engine.events.NO_TIME` if the batch is not from a topic.
    """

    model: str
    partition: int
    closed: ClosedRows
    alerts: tuple[AlertRow, ...] = ()
    model_name: str = ONLY_MODEL
    arrived: int = NO_TIME

    def bound_times(self, max_ahead: int) -> tuple[EvidenceBatch, int]:
        """Return the batch with times that do not lie far after its arrival, and the number of records it changes.

        A later time becomes the time of arrival. A batch whose time of arrival is unknown stays as it is.

        Args:
            max_ahead: Longest time after the arrival that stays as it is, in microseconds.
        """
        if self.arrived == NO_TIME:
            return self, 0
        limit = self.arrived + max_ahead
        is_ahead = self.closed.times > limit
        if not (is_ahead.any() or any(alert.time > limit for alert in self.alerts)):
            return self, 0
        closed = replace(self.closed, times=np.where(is_ahead, self.arrived, self.closed.times))
        alerts = tuple([replace(one, time=self.arrived) if one.time > limit else one for one in self.alerts])
        return replace(self, closed=closed, alerts=alerts), int(is_ahead.sum())


@dataclass(frozen=True, slots=True)
class IncidentSuspect:
    """A feature to which the alerts of an incident are attributed.

    Attributes:
        feature: Name of the feature.
        share: Mean share of the attribution over the alerts of the incident, from 0 to 1.
        low: Median of the lower ends of the expected ranges, None if the feature has labels.
        high: Median of the upper ends of the expected ranges, None if the feature has labels.
        came_low: Smallest observed value in an alert, None if the feature has labels.
        came_high: Largest observed value in an alert, None if the feature has labels.
        unit: Unit of the values, None if they have none.
    """

    feature: str
    share: float
    low: float | None = None
    high: float | None = None
    came_low: float | None = None
    came_high: float | None = None
    unit: str | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """The evidence of an incident over time, thinned to a bounded number of points.

    Attributes:
        times: Latest event time of each record that is a point.
        evidence: log10 of the detector's statistic after each of these records.
        p_values: p-value of each of these records.
    """

    times: tuple[int, ...] = ()
    evidence: tuple[float, ...] = ()
    p_values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SuspectReadings:
    """The readings of one suspect in the alerts of an incident, with the range that was expected for each.

    Attributes:
        times: Event time of each alert.
        values: Value of each reading, None for labels.
        lows: Lower end of each expected range, None for labels.
        highs: Upper end of each expected range, None for labels.
    """

    times: tuple[int, ...] = ()
    values: tuple[float | None, ...] = ()
    lows: tuple[float | None, ...] = ()
    highs: tuple[float | None, ...] = ()


NO_READINGS: Mapping[str, SuspectReadings] = MappingProxyType({})
"""The readings of an incident without suspects."""


@dataclass(frozen=True, slots=True)
class OpenRecordReading:
    """The reading to take next of an open record that has alerted.

    Attributes:
        suggestion: The feature, and what its reading is expected to change.
        record: Id of the record.
        time: Time of the alert.
    """

    suggestion: SuggestedReading
    record: str
    time: int


@dataclass(frozen=True, slots=True)
class Incident:
    """The state of an incident. `TOPIC-incidents` has a message for each reported change; the last one is valid.

    Attributes:
        id: Hash of the device, the model and the first record (of a fleet incident, see `tracker`).
        device: The device, `device.WHOLE_STREAM` if record ids name none, and for a fleet incident.
        state: "open" in the first message, "updated" in later ones, "resolved" in the last one. A resolved incident
            that is reopened has the state "updated" again.
        opened: Time of the first record.
        last: Time of the last record that the incident includes.
        resolved: Time of the record that resolved the incident, None before. If its device was silent, the time after
            its last record at which this was long enough.
        num_records: Number of records from the first one to the last one.
        num_alerted: Number of these records that have raised an alert.
        evidence: log10 of the largest value of the detector's statistic so far.
        rule: The rule that keeps the budget.
        budget: The budget of false incidents as text, such as "1 per 30d".
        severity: 1 when it opens, 2 if at least half of the last records have alerted, 3 for a fleet incident. It never
            falls.
        suspects: The suspects, the largest share first.
        model: Fingerprint of the model and its calibration.
        first_record: Id of the first record, at which the statistic reached its threshold.
        kind: "device", or "fleet" for an incident of several devices.
        group: The device group of a fleet incident or of the device (`device.extract_device_group`); "" without one.
        members: Ids of the incidents that a fleet incident includes.
        devices: The devices of these incidents, in the same order.
        parent: Id of the fleet incident that includes this incident, or None.
        former_parent: Id of the last fleet incident that included this incident, and does not any more; None if there
            was none.
        revision: Number of earlier messages of this incident.
        num_reopened: How often the incident was reopened.
        resolution: Why the incident was resolved: "quiet", "silent" if its device has sent nothing for long, or
            "model-changed" if another model scores the records now; None if it is open.
        threshold: log10 of the statistic at which incidents open.
        record_ids: Ids of records of the incident that have alerted: the first and the latest ones, at most
            `tracker.MAX_EXAMPLES`.
        alert_ids: Ids of the alerts of these records.
        silenced_by: The set of features whose expected values would most often prevent the alerts, and the share of the
            alerts for which this holds. None if no set is known.
        timeline: The evidence over time.
        readings: The readings of the suspects in the alerts, by feature.
        next_reading: The reading to take next, of the last open record that has suggested one; None if there is none.
        fault: The known faults that the record of the latest alert looks like, with their probabilities. Empty if the
            model has no classifier of faults, or if the record looks like none of them.
        model_name: Name of the model among several ones, `ONLY_MODEL` if there is one model.
    """

    id: str
    device: str
    state: IncidentState
    opened: int
    last: int
    resolved: int | None
    num_records: int
    num_alerted: int
    evidence: float
    rule: IncidentRule
    budget: str
    severity: int
    suspects: tuple[IncidentSuspect, ...]
    model: str
    first_record: str
    kind: IncidentKind = "device"
    group: str = ""
    members: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    parent: str | None = None
    former_parent: str | None = None
    revision: int = 0
    num_reopened: int = 0
    resolution: str | None = None
    threshold: float = 0.0
    record_ids: tuple[str, ...] = ()
    alert_ids: tuple[str, ...] = ()
    silenced_by: tuple[tuple[str, ...], float] | None = None
    timeline: Timeline = field(default_factory=Timeline)
    readings: Mapping[str, SuspectReadings] = field(default_factory=lambda: NO_READINGS)
    fault: tuple[tuple[str, float], ...] = ()
    next_reading: OpenRecordReading | None = None
    model_name: str = ONLY_MODEL


@dataclass(frozen=True, slots=True)
class FeedbackLabel:
    """A label that a person has given to an incident, a device or a record: a message of `TOPIC-feedback`.

    If an incident or a record has several labels, the latest one is valid. A label covers what the person has seen: it
    does not silence an incident that is reopened later, whose severity rises, or which gets further members
    (`overlay`).

    Attributes:
        label: "true" for a real fault, "false-alarm", "maintenance", or "cleared" to take an earlier label back.
        time: When the label was given.
        by: Who has given it; "" if unknown.
        incident: Id of the incident, None for a maintenance window of a device and for a label of one record.
        name: Name of the fault, None if there is none.
        note: Free text.
        device: The device of a maintenance window, None otherwise.
        start: Beginning of the maintenance window, None otherwise.
        end: End of the maintenance window, None otherwise.
        record: Id of a record that was offered for review, None otherwise.
        severity: Severity that the incident had when the person saw it, None if unknown.
        num_reopened: How often the incident had been reopened then, None if unknown.
        members: Ids of the members that a fleet incident had then. None if unknown, and for other incidents.
        id: Hash of the other fields, so that a label that is sent twice counts once. It is "" before
            `codec.feedback_messages.add_id` has checked the label.
    """

    label: Label
    time: int
    by: str = ""
    incident: str | None = None
    name: str | None = None
    note: str = ""
    device: str | None = None
    start: int | None = None
    end: int | None = None
    record: str | None = None
    severity: int | None = None
    num_reopened: int | None = None
    members: tuple[str, ...] | None = None
    id: str = ""
