"""The data types that enter and leave the engine: batches of events, and the engine's results for them.

A codec turns the messages of one poll into an `EventBatch`, a struct of arrays. The engine returns `Effects` (scores,
alerts, rejections and closed records), which sinks write. `Decisions` holds the part of the effects that a restarted
consumer cannot compute again from the log of a partition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.drift_state import DriftNotice, DriftState
from deformer_stream.calibration.fault_classifier import FaultName

NO_TIME = int(np.iinfo(np.int64).min)
"""The event time that stands for "no time". Other event times are microseconds since 1970, UTC."""

NO_ALERT = 1.0
"""Stored as the strictest alpha (false-alarm rate) of a record that has not alerted. Every alpha is smaller, so the
record can alert at any of them."""

SUPPRESS_ALL = 0.0
"""Stored as the strictest alpha of a record that has alerted at an unknown alpha. No alpha is smaller, so the record
does not alert again."""


ONLY_MODEL = ""
"""The name of the model of a process that has one model. No model of several has this name."""


class RejectionReason(StrEnum):
    """Why readings or a whole message were rejected.

    The values appear as `reason` in metrics, and in the dead-letter topic, to which rejected messages are written.
    """

    NOT_JSON = "not_json"
    """The message cannot be decoded, as JSON or in another configured format."""
    UNKNOWN_SCHEMA = "unknown_schema"
    """The schema registry has no schema with the id that the message states, or it cannot be used."""
    MALFORMED_ROW = "malformed_row"
    """A row of a CSV file has too few or too many cells."""
    MISSING_FIELD = "missing_field"
    """A field that is required is missing or empty."""
    UNKNOWN_FEATURE = "unknown_feature"
    """The model has no feature of this name."""
    WRONG_TYPE = "wrong_type"
    """A field or a value has another type than expected."""
    NOT_FINITE = "not_finite"
    """A value or a time is NaN or infinite."""
    DUPLICATE = "duplicate"
    """The record has this feature already; if readings are irregular, the same value of the sensor at the same time, or
    the declaration that the sensor will not report."""
    REPEATED = "repeated"
    """The window of the device, or the time slot of the window, has a reading of this sensor already.

    The model was trained with the first reading only, so this is no mistake of the sender. Repeated readings are
    counted, but not written to the dead-letter topic."""
    LATE = "late"
    """The record, or the window or the time slot that the event belongs to, is closed."""
    TOO_LARGE = "too_large"
    """The message, or a part of it, exceeds a limit."""
    FUTURE = "future"
    """The event time is too far ahead of the clock."""
    UNKNOWN_MODEL = "unknown_model"
    """The process has several models, and none for the value of the field that determines the model."""
    UNKNOWN_TOPIC = "unknown_topic"
    """The topic of an MQTT message does not fit the pattern that names the device and the feature."""
    NOT_SPARKPLUG = "not_sparkplug"
    """The topic or the payload is not that of a Sparkplug B message."""
    UNKNOWN_ALIAS = "unknown_alias"
    """A Sparkplug metric has an alias, or lacks a type, that no valid birth certificate has declared."""


class CloseReason(StrEnum):
    """Why a record was closed. A closed record accepts no further readings."""

    COMPLETE = "complete"
    """Every feature was observed or declared as "will not be observed"."""
    TIMEOUT = "timeout"
    """No event of the record was accepted for `Limits.record_timeout` microseconds."""
    END = "end"
    """The input ended."""
    REVOKED = "revoked"
    """The partition of the record was assigned to another consumer."""
    WINDOW = "window"
    """The record is a window (the readings of one device within an interval), and its end and grace period are over."""
    EVICTED = "evicted"
    """The open records exceeded the limit of their number or memory, and this record had been idle for longest."""


@dataclass(frozen=True, slots=True)
class WindowMembership:
    """Which of N events belong to windows. A window is a record of one device's readings within an interval of time.

    Attributes:
        devices: For each event, the name of the device that sent it. "" for an event that names its record itself and
            belongs to no window.
        deadlines: (N,) int64 event time at which the event's window closes, microseconds since 1970. The window closes
            when the device sends an event of this time or later. Arbitrary if the event belongs to no window.
        starts: (N,) int64 event time at which the event's window begins, microseconds since 1970. Only models of
            irregular readings need it, which count ages from it. None if it is not known; ages are then counted from
            the first reading of the window. Arbitrary if the event belongs to no window.
    """

    devices: list[str]
    deadlines: NDArray[np.int64]
    starts: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class EventBatch:
    """N events in the order of arrival. An event is one value of one feature of one record, decoded from a message.

    Attributes:
        record_ids: Id of the record of each event, N strings.
        features: (N,) int32 feature codes (index of the feature in the schema).
        values: (N,) float64. For a continuous feature the value in raw units; for a discrete feature the label code,
            from 0. A label that the model does not have is represented by the number of labels, one more than the last
            code. NaN declares that the feature will not be observed.
        times: (N,) int64 event times in microseconds since 1970, `NO_TIME` for an event without a time.
        message_indices: (N,) int32 index of each event's message among the messages of the same poll.
        partitions: (N,) int32 number of the partition from which the event was read.
        unseen_labels: By index of the event, the text of a label that the model does not have.
        windows: Which events belong to windows (records of one device's readings within an interval of time). None if
            no event does. Every event of a window has an event time.
        row_boundaries: (R + 1,) int64, set if the events were read from R rows of an input table: the index of each
            row's first event, followed by N. The events of a row have the same record and different features; all rows
            have the same partition. None if the events were not read from a table.
    """

    record_ids: list[str]
    features: NDArray[np.int32]
    values: NDArray[np.float64]
    times: NDArray[np.int64]
    message_indices: NDArray[np.int32]
    partitions: NDArray[np.int32]
    unseen_labels: dict[int, str] = field(default_factory=dict)
    windows: WindowMembership | None = None
    row_boundaries: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self.record_ids)

    def records_of_rows(self) -> tuple[list[str], NDArray[np.int64]]:
        """Return the record id of each row of the input table from which the events were read.

        The caller can then look up an id once per row and not once per event. If the events were not read from a table,
        each event counts as a row.

        Returns:
            The record ids of the R rows; and (N,) the index of each event's row.
        """
        if self.row_boundaries is None:
            return self.record_ids, np.arange(len(self.record_ids))
        first_events, num_events = self.row_boundaries[:-1], np.diff(self.row_boundaries)
        row_by_event = np.repeat(np.arange(len(first_events)), num_events)
        return [self.record_ids[event] for event in first_events.tolist()], row_by_event

    @staticmethod
    def empty() -> EventBatch:
        """Return a batch without events."""
        ints = np.empty(0, np.int32)
        return EventBatch([], ints, np.empty(0), np.empty(0, np.int64), ints, ints)


@dataclass(frozen=True, slots=True)
class Rejection:
    """One or more readings of one message that were rejected for the same reason.

    Attributes:
        message_index: Index of the message among those of the same poll.
        reason: Why the readings were rejected.
        detail: One line that names the record, the feature or the field, and says what is wrong with it.
        num_readings: Number of rejected readings. A message that is rejected as a whole counts as 1.
    """

    message_index: int
    reason: RejectionReason
    detail: str
    num_readings: int = 1

    @property
    def is_dead_letter(self) -> bool:
        """Whether the message is written to the dead-letter topic. Repeated readings are only counted."""
        return self.reason is not RejectionReason.REPEATED

    @staticmethod
    def merge_by_message(rejections: Iterable[Rejection]) -> list[Rejection]:
        """Merge the rejections that have the same message and reason, and return the results ordered by message.

        A merged rejection has the detail of the first one and the total number of readings. Each message is thus
        written to the dead-letter topic once per reason, so a message with many bad readings cannot flood that topic.
        """
        first_by_key: dict[tuple[int, RejectionReason], Rejection] = {}
        num_readings_by_key: Counter[tuple[int, RejectionReason]] = Counter()
        for rejection in rejections:
            key = rejection.message_index, rejection.reason
            first_by_key.setdefault(key, rejection)
            num_readings_by_key[key] += rejection.num_readings
        merged = [first._with_num_readings(num_readings_by_key[key]) for key, first in first_by_key.items()]
        return sorted(merged, key=lambda rejection: rejection.message_index)

    def _with_num_readings(self, num_readings: int) -> Rejection:
        """Return a copy of this rejection with a larger number of readings, all of the same message.

        Its detail then states how many readings were added. If none was added, the result is the rejection itself.

        Args:
            num_readings: Total number of rejected readings, those of this rejection included.
        """
        num_added = num_readings - self.num_readings
        if num_added == 0:
            return self
        detail = f"{self.detail} (and {num_added} more of this message)"
        return Rejection(self.message_index, self.reason, detail, num_readings)


@dataclass(frozen=True, slots=True)
class ScoredReadings:
    """M accepted readings with their scores.

    The readings are in the order of acceptance, unless readings of one record with the same event time are scored
    together (a tie group). They are then in the order in which their groups were completed. The score and the p-value
    of the record change only at the last reading of a group.

    Attributes:
        event_indices: (M,) index of each reading's event in the batch.
        seq: (M,) int32 position of the reading in its record, from 0.
        log_likelihood: (M,) natural logarithm of p(value | earlier values of the record). p is a density in normalised
            units, or a probability for a discrete feature. NaN for readings that are not scored, such as those of
            context features (features that condition the others but are not scored themselves).
        running_log_likelihood: (M,) sum of `log_likelihood` over the scored readings of the record so far.
        score: (M,) anomaly score of the record after this reading; larger is more anomalous. It is the largest prefix
            statistic so far. The prefix statistic of the first k readings combines their p-values in one number.
        p_value: (M,) p-value of the record after this reading. It never increases within a record.
        is_alert: (M,) whether the reading raised an alert.
    """

    event_indices: NDArray[np.int64]
    seq: NDArray[np.int32]
    log_likelihood: NDArray[np.float64]
    running_log_likelihood: NDArray[np.float64]
    score: NDArray[np.float64]
    p_value: NDArray[np.float64]
    is_alert: NDArray[np.bool_]

    def __len__(self) -> int:
        """Return the number of readings."""
        return len(self.event_indices)

    @staticmethod
    def empty() -> ScoredReadings:
        """Return an instance without readings."""
        floats = np.empty(0)
        ints, bools = np.empty(0, np.int32), np.empty(0, np.bool_)
        return ScoredReadings(np.empty(0, np.int64), ints, floats, floats, floats, floats, bools)


@dataclass(frozen=True, slots=True)
class ExpectedRange:
    """The value that the model expected for a reading, as three quantiles of the reading's conditional distribution.

    Attributes:
        low: 5% quantile in raw units, None for a discrete feature.
        median: Median in raw units; the most probable label of a discrete feature.
        high: 95% quantile in raw units, None for a discrete feature.
    """

    low: float | None
    median: float | str | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Contribution:
    """How much one reading contributed to an alert.

    The names of the fields are the names of the JSON fields of an alert. Scores are in nats (natural logarithms) and
    are larger if the reading contributed more. A score that was not computed is None.

    Attributes:
        feature: Name of the feature.
        value: The value in raw units, or the label of a discrete feature. None if the model does not have the label and
            its text is not known.
        surprise: Negative logarithm of the reading's highest-density p-value (probability of a value at most as likely
            as the observed one); 0 for the most likely value. The probability is conditional on the readings that are
            not suspects (see `suspect`). With `--explanations fast`, it is conditional on the earlier readings.
        expected: The range of values that the model expected, conditional on the same readings as `surprise`.
        attribution: Mean of -ln p(value | readings before it) over several orders of the readings. p is a density in
            normalised units. The attributions of all readings sum up to -ln p of the record. If readings are irregular,
            they sum up to -ln p of the alert's context.
        leave_one_out: -ln p(value | all other readings). p is a density in normalised units.
        relief: By how many nats the surprisal (−ln p) of the record decreases without this reading.
        suspect: Whether the alert is attributed to this reading. The suspects are the smallest known set of readings
            such that there is no alert if their values are replaced by expected ones. If no such set was found, they
            are the largest set that was tried. If readings are irregular, the suspects are the latest readings of one
            sensor: the sensor of `Alert.evidence`, or the one whose latest readings are most improbable given those of
            all other sensors.
        unit: The unit of the value and of the expected range, such as "m³/h"; None if it is not known.
        time: Event time of the reading, microseconds since 1970. None if readings are not irregular: a feature then has
            one reading in a record.
        sensor: Name of the sensor, if it differs from that of the feature: a sensor that reports several times in a
            window has a feature for each time slot. None otherwise. Alerts do not state it.
    """

    feature: str
    value: float | str | None
    surprise: float
    expected: ExpectedRange
    attribution: float | None = None
    leave_one_out: float | None = None
    relief: float | None = None
    suspect: bool = False
    unit: str | None = None
    time: int | None = None
    sensor: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of an alert: how much each reading contributed to it.

    Attributes:
        contributions: One `Contribution` per reading, the most suspicious reading first.
        silenced_by: The smallest known set of features that explains the alert: if their values were replaced by those
            expected given all other features, there would be no alert. None if no set was found or searched for.
    """

    contributions: tuple[Contribution, ...]
    silenced_by: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class AlertCause:
    """Which evidence has raised an alert of a record with irregular readings.

    Attributes:
        kind: "improbable" if the model finds readings of the sensor improbable; "offset" if readings of the sensor
            differ from what other sensors imply; "repeated" if the sensor repeats its last value more often than the
            model expects; "extreme" if a single reading is very improbable; "level" if readings of the sensor are
            unusual among all normal ones; "step" if it changes by unusual steps; "record" if readings of several
            sensors are improbable.
        sensor: Name of the sensor, which is that of the reading that raised the alert. None for "record".
    """

    kind: str
    sensor: str | None = None


@dataclass(frozen=True, slots=True)
class SuggestedReading:
    """The reading of a record to take next: the one that is expected to change its verdict most.

    It is the first one of the ranking of `engine.next_reading_ranking`. For a record that has alerted, the ranking is
    for the readings that it had at the alert.

    Attributes:
        feature: Name of the feature.
        alpha: The largest false-alarm rate at which the record can still alert. None if it has alerted at all of them;
            features are then ranked by `score_rise`.
        alert_probability: Probability that the record alerts at `alpha` with this reading, if one of its suspicious
            readings is wrong. None without `alpha`.
        score_rise: Mean rise of the record's anomaly score, under the same hypothesis.
    """

    feature: str
    alpha: float | None
    alert_probability: float | None
    score_rise: float


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert, raised when the p-value of a record is at most a false-alarm rate (alpha) for the first time.

    Attributes:
        id: Id of the alert. It depends only on the record id, the model and the alpha, so that receivers can drop
            repetitions.
        record: Id of the record.
        raised_at: Number of readings of the record when it alerted.
        features_seen: The same number as `raised_at`, for comparison with `features_expected`. If readings are
            irregular, the number of different sensors that have reported.
        features_expected: Number of features of the schema without those declared as "will not be observed". If
            readings are irregular, the number of all sensors.
        time: Event time of the reading that raised the alert, microseconds since 1970; `NO_TIME` if it has none.
        p_value: p-value of the record after that reading.
        alpha: The alpha that the p-value has reached.
        score: Anomaly score of the record after that reading (its largest prefix statistic so far, from which the
            p-value is computed); larger is more anomalous.
        running_log_likelihood: Sum of ln p(value | earlier values) over the record's readings so far.
        model: Fingerprint of the model, a hash that identifies it with its calibration.
        message_index: Index of the message that raised the alert among the messages of the same poll. -1 if no message
            did: readings of one record with the same event time (a tie group) wait for each other. They can be scored
            without a new message, after a timeout or when the record is closed.
        contributions: How much each reading contributed to the alert, the most suspicious reading first.
        partition: Number of the record's partition.
        is_record_closed: Whether the same batch closed the record because it is complete or its window (interval of
            time) is over. If so, a consumer that reads the log again closes the record as well. The alert then need not
            be stored to prevent a repetition.
        severity: 1 for the largest of the configured alphas, 2 for the next smaller one, and so on.
        silenced_by: The smallest known set of features that explains the alert: if their values were replaced by those
            expected given all other features, there would be no alert. None if no set was found or searched for.
        evidence: Which cumulative sum has raised the alert. None if the model has no cumulative sums, or if the anomaly
            score has not risen with this reading. The latter is possible after a change of the model or of the alphas.
        next_reading: The reading to take next. None unless suggestions were requested, and if the record lacks no
            feature, or exceeds the number of records of a batch that get one.
        fault: Which known fault the record looks like, by its readings until the alert. None if the model has no
            classifier of faults, or if alerts are not explained.
    """

    id: str
    record: str
    raised_at: int
    features_seen: int
    features_expected: int
    time: int
    p_value: float
    alpha: float
    score: float
    running_log_likelihood: float
    model: str
    message_index: int
    contributions: tuple[Contribution, ...]
    partition: int = 0
    is_record_closed: bool = False
    severity: int = 1
    silenced_by: tuple[str, ...] | None = None
    evidence: AlertCause | None = None
    next_reading: SuggestedReading | None = None
    fault: FaultName | None = None


@dataclass(frozen=True, slots=True)
class SuspiciousRecord:
    """An open record that is suspicious and has not alerted, with the reading to take next.

    It describes the record after a batch, and is valid until the record changes. Then it is replaced or withdrawn.

    Attributes:
        record: Id of the record.
        partition: Number of its partition.
        time: Latest event time of its readings, microseconds since 1970; `NO_TIME` if none of them has a time.
        p_value: Its p-value.
        features_seen: Number of its readings.
        features_expected: Number of features that it may have, without those declared as "will not be observed".
        next_reading: The reading to take next.
        expires: Time at which the record is closed if it gets no further event, microseconds since 1970. None if
            records have no timeout.
        model: Fingerprint of the model that scores the record.
    """

    record: str
    partition: int
    time: int
    p_value: float
    features_seen: int
    features_expected: int
    next_reading: SuggestedReading
    expires: int | None
    model: str


@dataclass(frozen=True, slots=True)
class StormNotice:
    """A notice to the user that alerts were held back, because more were raised in a short time than may be sent.

    Attributes:
        id: Identifier of the notice.
        partition: Number of the partition whose alert was held back last.
        time: When the notice was made, in microseconds since 1970, UTC.
        num_by_partition: By partition number, how many alerts were held back since the last notice.
        records: Ids of the first records whose alerts were held back.
        max_rate: Largest number of alerts per second that may be sent for long.
        model: Fingerprint (hash) of the model in use.
    """

    id: str
    partition: int
    time: int
    num_by_partition: Mapping[int, int]
    records: tuple[str, ...]
    max_rate: float
    model: str

    @property
    def num_held_back(self) -> int:
        """The number of alerts that were held back since the last notice."""
        return sum(self.num_by_partition.values())


@dataclass(frozen=True, slots=True)
class ClosedRecords:
    """R records that were closed, with their final scores.

    Attributes:
        record_ids: R record ids.
        reasons: Why each of the R records was closed.
        partitions: (R,) int32 number of each record's partition.
        num_readings: (R,) int32 number of readings of each record.
        is_complete: (R,) whether every feature was observed or declared as "will not be observed". If readings are
            irregular, whether every sensor was declared so.
        log_likelihood: (R,) sum of ln p(value | earlier values) over the scored readings.
        anomaly_score: (R,) score for ranking complete records; larger is more anomalous. It is the sum of centered NLLs
            (negative log-likelihood of a value minus the entropy of its conditional) over the scored readings, in nats.
            If the model has exemplars (stored training records), the sum is combined with the distance to the nearest
            exemplars (`deformer_stream.model.ranking`). If readings are irregular, the sum is divided by the square
            root of the number of scored readings.
        p_value: (R,) p-value of the record after its last reading.
        alert_seq: (R,) int32 position in the record, from 0, of the reading that raised the first alert, -1 if there
            was none.
        alert_alpha: (R,) strictest (smallest) alpha that raised an alert, `NO_ALERT` if there was none.
        score: (R,) anomaly score from which the p-value is computed; larger is more anomalous. It is the largest prefix
            statistic of the record. The prefix statistic of the first k readings combines their p-values in one number.
        latest_time: (R,) int64 latest event time of the record's readings, microseconds since 1970; `NO_TIME` if none
            of them has a time.
        record_p_value: (R,) p-value of the closed record as a whole, by its `anomaly_score`; NaN if the calibration has
            no scores of complete records.
        faults: Which known fault each of the R records looks like, by all of its readings. None for records that have
            not alerted, and if their model has no classifier of faults. Empty if no record has a name.
        models: Fingerprint of the model that has scored each of the R records. After a change of the model, an earlier
            one may finish records. Empty if all were scored by the model of the effects.
    """

    record_ids: list[str]
    reasons: list[CloseReason]
    partitions: NDArray[np.int32]
    num_readings: NDArray[np.int32]
    is_complete: NDArray[np.bool_]
    log_likelihood: NDArray[np.float64]
    anomaly_score: NDArray[np.float64]
    p_value: NDArray[np.float64]
    alert_seq: NDArray[np.int32]
    alert_alpha: NDArray[np.float64]
    score: NDArray[np.float64]
    latest_time: NDArray[np.int64]
    record_p_value: NDArray[np.float64]
    faults: tuple[FaultName | None, ...] = ()
    models: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.record_ids)

    @staticmethod
    def empty() -> ClosedRecords:
        """Return an instance without records."""
        floats, ints = np.empty(0), np.empty(0, np.int32)
        bools = np.empty(0, np.bool_)
        times = np.empty(0, np.int64)
        return ClosedRecords(
            record_ids=[],
            reasons=[],
            partitions=ints,
            num_readings=ints,
            is_complete=bools,
            log_likelihood=floats,
            anomaly_score=floats,
            p_value=floats,
            alert_seq=ints,
            alert_alpha=floats,
            score=floats,
            latest_time=times,
            record_p_value=floats,
        )

    @staticmethod
    def concatenate(parts: Sequence[ClosedRecords]) -> ClosedRecords:
        """Return one instance with the records of several instances, in the order of `parts`."""
        if not parts:
            return ClosedRecords.empty()
        columns: dict[str, Any] = {}
        for name in (column.name for column in fields(ClosedRecords) if column.name != "faults"):
            values = [getattr(part, name) for part in parts]
            is_array = isinstance(values[0], np.ndarray)
            columns[name] = np.concatenate(values) if is_array else list(chain.from_iterable(values))
        if any(part.faults for part in parts):
            columns["faults"] = tuple(fault for part in parts for fault in part.faults or (None,) * len(part))
        return ClosedRecords(**columns)


@dataclass(frozen=True, slots=True)
class Effects:
    """The results of the engine for one batch of events. Sinks write them; the engine itself writes nothing.

    Readings of one record with the same event time (a tie group) may wait for each other, to be scored together. The
    waiting ends when a reading with another time arrives, when the record is closed, or after a timeout.

    Attributes:
        batch: The events to which `scored.event_indices` refers. First the events of the batch that was handled. Then
            one event for each reading of an earlier batch that has waited for its tie group and is scored now.
        scored: The readings that were scored, with their scores.
        alerts: The alerts that were raised and are sent.
        rejections: The rejected readings, in the order of the batch.
        closed: The records that were closed.
        drift_notices: Notices that the records of a partition no longer resemble the calibration records (drift).
        drift_states: By partition number, the evidence of drift so far. Only partitions whose evidence has changed are
            included.
        tie_timeouts: The timeouts of tie groups. By partition number, then by record id: the number of readings that
            the record had at the timeout.
        num_combined: Number of readings of the batch that were combined with an earlier reading of the same time slot
            (a part of a window). The slot is scored as one reading when it is over.
        model: Fingerprint of the model that scores new records, a hash that identifies it with its calibration.
        model_name: Name of the model among several ones of a process, empty if it is the only one.
        held_back_alerts: The alerts that were raised and are not sent, because there are too many. The engine leaves
            this list empty; the runtime decides. Their explanation is "fast" at most (`Engine.handle`).
        storm_notices: Notices that alerts were held back.
        suspicious_records: Records that are suspicious and have not alerted, each with the reading to take next, as far
            as this was computed now. Empty unless it was requested.
        withdrawn_records: Partition number and id of each record of earlier `suspicious_records` that has changed, and
            is not in `suspicious_records` again.
        completed_by_model: Partition number and id of each closed record that is complete only because the current
            model lacks the features that it still awaited.
    """

    batch: EventBatch
    scored: ScoredReadings
    alerts: list[Alert]
    rejections: list[Rejection]
    closed: ClosedRecords
    drift_notices: list[DriftNotice] = field(default_factory=list)
    drift_states: Mapping[int, DriftState] = field(default_factory=dict)
    tie_timeouts: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    num_combined: int = 0
    model: str = ""
    model_name: str = ONLY_MODEL
    held_back_alerts: list[Alert] = field(default_factory=list)
    storm_notices: list[StormNotice] = field(default_factory=list)
    suspicious_records: list[SuspiciousRecord] = field(default_factory=list)
    withdrawn_records: list[tuple[int, str]] = field(default_factory=list)
    completed_by_model: Collection[tuple[int, str]] = frozenset()

    @staticmethod
    def empty(model: str = "", model_name: str = ONLY_MODEL) -> Effects:
        """Return effects without events, alerts and closed records, of a model with this fingerprint and name."""
        return Effects(
            EventBatch.empty(),
            ScoredReadings.empty(),
            [],
            [],
            ClosedRecords.empty(),
            model=model,
            model_name=model_name,
        )

    @property
    def raised_alerts(self) -> list[Alert]:
        """All alerts that were raised, whether or not they are sent."""
        return [*self.alerts, *self.held_back_alerts] if self.held_back_alerts else self.alerts

    def dead_letters(self) -> list[Rejection]:
        """Return the rejections whose messages are dead letters: all but repeated readings of a time slot."""
        return [rejection for rejection in self.rejections if rejection.is_dead_letter]

    def decisions(self) -> dict[int, Decisions]:
        """Return, by partition number, the decisions that cannot be reproduced by reading the partition's log again.

        These are closings by timeout, by eviction or by the features of a new model, alerts, the evidence of drift, and
        timeouts of tie groups. A tie group is readings of one record with the same event time, which wait for each
        other. Partitions without decisions are left out.

        An alert is left out if its record was closed in the same batch because it is complete or its window is over.
        Reading the log again closes such a record again, so it cannot repeat its alert.
        """
        alert_states: dict[int, dict[str, AlertState]] = {}
        for alert in self.raised_alerts:
            if not alert.is_record_closed:
                state_by_record = alert_states.setdefault(alert.partition, {})
                position = alert.raised_at - 1  # of the reading that raised the alert, from 0
                state = AlertState(position, alert.alpha)
                earlier = state_by_record.get(alert.record)
                state_by_record[alert.record] = state if earlier is None else earlier + state
        closed_ids: dict[int, list[str]] = {}
        closed = zip(self.closed.record_ids, self.closed.reasons, self.closed.partitions.tolist(), strict=True)
        for record_id, reason, partition in closed:
            # These closings depend on the clock, on memory or on the model. The other reasons follow from the log.
            is_decided = reason in (CloseReason.TIMEOUT, CloseReason.EVICTED)
            if is_decided or (partition, record_id) in self.completed_by_model:
                closed_ids.setdefault(partition, []).append(record_id)
        # `Decisions` of several batches can be added up, so they hold a tuple of numbers of readings for each record.
        tie_timeouts = {
            partition: {record_id: (num_readings,) for record_id, num_readings in num_readings_by_record.items()}
            for partition, num_readings_by_record in self.tie_timeouts.items()
        }
        return {
            partition: Decisions(
                closed_ids=tuple(closed_ids.get(partition, ())),
                alert_states=alert_states.get(partition, {}),
                drift_state=self.drift_states.get(partition),
                tie_timeouts=tie_timeouts.get(partition, {}),
            )
            for partition in sorted({*closed_ids, *alert_states, *self.drift_states, *tie_timeouts})
        }


@dataclass(frozen=True, slots=True)
class AlertState:
    """A summary of the alerts that a record has raised, so that they are not raised again.

    Attributes:
        seq: Position in the record of the reading that raised the first alert, from 0.
        alpha: The strictest (smallest) alpha at which the record has alerted, `SUPPRESS_ALL` if it is unknown.
    """

    seq: int
    alpha: float = SUPPRESS_ALL

    def __add__(self, later: AlertState) -> AlertState:
        """Return the summary of these alerts and later ones of the same record: first position, smallest alpha."""
        return AlertState(self.seq, min(self.alpha, later.alpha))


@dataclass(frozen=True, slots=True)
class Decisions:
    """Decisions about the records of one partition that cannot be reproduced by reading the partition's log again.

    A restarted consumer reads the log again and accepts the same readings. Decisions that depended on the clock, on
    memory or on other partitions are stored separately. The consumer repeats them by `Engine.preload_decisions` and
    `Engine.apply_decisions`.

    Attributes:
        closed_ids: Ids of records that were closed by a timeout or evicted, or because a new model lacks the features
            that they still awaited, in the order of closing.
        alert_states: By record id, a summary of the record's alerts, so that the record does not raise them again.
            Records that were complete, or whose window was over, in the batch of the alert are left out. A restart
            closes them while it reads the log again, and a closed record raises no alert.
        drift_state: The evidence of drift so far, None if it has not changed.
        tie_timeouts: By record id, one number for each timeout of a tie group of the record: how many readings the
            record had then. A tie group is the readings of one record with the same event time, which wait for each
            other.
    """

    closed_ids: tuple[str, ...] = ()
    alert_states: Mapping[str, AlertState] = field(default_factory=dict)
    drift_state: DriftState | None = None
    tie_timeouts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Return whether there is any decision."""
        return bool(self.closed_ids or self.alert_states or self.drift_state or self.tie_timeouts)

    def __add__(self, later: Decisions) -> Decisions:
        """Return these decisions followed by later ones of the same partition."""
        alert_states = dict(self.alert_states)
        for record_id, state in later.alert_states.items():
            earlier = alert_states.get(record_id)
            alert_states[record_id] = state if earlier is None else earlier + state
        tie_timeouts = dict(self.tie_timeouts)
        for record_id, reading_counts in later.tie_timeouts.items():
            tie_timeouts[record_id] = tie_timeouts.get(record_id, ()) + reading_counts
        return Decisions(
            closed_ids=self.closed_ids + later.closed_ids,
            alert_states=alert_states,
            drift_state=later.drift_state or self.drift_state,  # the later evidence includes the earlier one
            tie_timeouts=tie_timeouts,
        )
