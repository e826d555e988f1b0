"""The values that enter and leave the engine: batches of events, what the engine decided about them, and why.

A codec turns the messages of one poll into an `EventBatch`, a struct of arrays. The engine returns `Effects`, which
sinks write. `Decisions` holds the part of the effects that a restarted consumer cannot compute again from the log of
a partition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.drift_state import DriftNotice, DriftState

NO_TIME = int(np.iinfo(np.int64).min)
"""The time of an event that carries none. Times are microseconds since 1970, UTC."""

NO_ALERT = 1.0
"""Stored as the strictest alpha of a record that has not alerted: every alpha is stricter and may still alert."""

SUPPRESS_ALL = 0.0
"""Stored as the strictest alpha of a record that has alerted at an unknown alpha. No alpha is stricter, so the record
does not alert again."""


class RejectionReason(StrEnum):
    """Why an event was rejected. The values are used as the `reason` label of metrics and dead letters."""

    NOT_JSON = "not_json"
    MISSING_FIELD = "missing_field"
    UNKNOWN_FEATURE = "unknown_feature"
    WRONG_TYPE = "wrong_type"
    NOT_FINITE = "not_finite"
    DUPLICATE = "duplicate"
    LATE = "late"
    TOO_LARGE = "too_large"
    FUTURE = "future"


class CloseReason(StrEnum):
    """Why a record was closed."""

    COMPLETE = "complete"
    """Every feature was observed or declared as "will not be observed"."""
    TIMEOUT = "timeout"
    """No event of the record was accepted for the duration of the record timeout."""
    END = "end"
    """The input ended."""
    REVOKED = "revoked"
    """The partition of the record was assigned to another consumer."""
    WINDOW = "window"
    """The record is a window of a device's event time, and its end and grace period have passed."""
    EVICTED = "evicted"
    """The open records exceeded their number or memory, and this record had been idle for longest."""


@dataclass(frozen=True, slots=True)
class WindowMembership:
    """Which of N events belong to a window of their device's event time.

    Attributes:
        devices: N device names; "" if the event names its record itself and belongs to no window.
        deadlines: (N,) int64 event time of the device at which the event's window closes, microseconds. Meaningless if
            the event belongs to no window.
    """

    devices: list[str]
    deadlines: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EventBatch:
    """N events in the order of arrival. An event is a decoded message entry with one value of one feature.

    Attributes:
        record_ids: N ids of records.
        features: (N,) int32 feature codes (index of the feature in the schema).
        values: (N,) float64. The value in raw units for a continuous feature, the code of the label for a discrete one
            (the number of labels for a label that the model does not have), or NaN for "will not be observed".
        times: (N,) int64 event times in microseconds since 1970, `NO_TIME` if the event has none.
        message_indices: (N,) int32 index of the message in the poll that carried the event.
        partitions: (N,) int32 partition that the event was read from.
        unseen_labels: By index of the event: texts of labels that the model does not have.
        windows: Which events belong to windows; None if none does. Events of windows have a time.
        row_boundaries: (R + 1,) where the events of each of R table rows begin, followed by N. All rows are of one
            partition. The events of a row are of one record and distinct features. None for other events.
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
        """Return the record id of each row, and for each event the row it belongs to, (N,).

        If the events do not come from rows of a table, each event is a row of its own.
        """
        if self.row_boundaries is None:
            return self.record_ids, np.arange(len(self.record_ids))
        first_events = self.row_boundaries[:-1]
        row_by_event = np.repeat(np.arange(len(first_events)), np.diff(self.row_boundaries))
        return [self.record_ids[event] for event in first_events.tolist()], row_by_event

    @staticmethod
    def empty() -> EventBatch:
        """Return a batch without events."""
        ints = np.empty(0, np.int32)
        return EventBatch([], ints, np.empty(0), np.empty(0, np.int64), ints, ints)


@dataclass(frozen=True, slots=True)
class Rejection:
    """Readings of one message that were rejected for one reason.

    Attributes:
        message_index: Index of the message in the poll.
        reason: Why the readings were rejected.
        detail: One line that names the record, feature or field, and what is wrong with it.
        num_readings: Number of rejected readings, 1 for a message that is rejected as a whole.
    """

    message_index: int
    reason: RejectionReason
    detail: str
    num_readings: int = 1

    @staticmethod
    def merge_by_message(rejections: Iterable[Rejection]) -> list[Rejection]:
        """Return one rejection for each message and reason, ordered by message.

        It repeats the detail of the first rejection and counts the others. Each message is written to the dead-letter
        topic once per reason, so a message with many bad readings cannot flood that topic.
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
        """Return this rejection extended to further readings of its message."""
        if num_readings == self.num_readings:
            return self
        detail = f"{self.detail} (and {num_readings - self.num_readings} more of this message)"
        return Rejection(self.message_index, self.reason, detail, num_readings)


@dataclass(frozen=True, slots=True)
class ScoredReadings:
    """M accepted readings with their scores.

    They are in the order of acceptance. If readings with the same event time wait for each other (a tie group), they
    are in the order in which their groups were decided, and all scores of a group apply from its last reading on.

    Attributes:
        event_indices: (M,) index of the event in the batch.
        seq: (M,) int32 place of the reading in its record, from 0.
        log_likelihood: (M,) natural logarithm of p(value | earlier values of the record), a density in normalised units
            or, for a discrete feature, a probability. NaN for context features, which are not scored.
        running_log_likelihood: (M,) sum of `log_likelihood` over the record so far.
        score: (M,) prefix statistic of the record so far; larger is more anomalous.
        p_value: (M,) p-value of the record so far. It never rises within a record.
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
        """Return no readings."""
        floats = np.empty(0)
        ints, bools = np.empty(0, np.int32), np.empty(0, np.bool_)
        return ScoredReadings(np.empty(0, np.int64), ints, floats, floats, floats, floats, bools)


@dataclass(frozen=True, slots=True)
class ExpectedRange:
    """What the model expected of a reading.

    Attributes:
        low: 5% quantile in raw units, None for a discrete feature.
        median: Median in raw units, or the most probable label.
        high: 95% quantile in raw units, None for a discrete feature.
    """

    low: float | None
    median: float | str | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Contribution:
    """The share of one reading in an alert. Scores are in nats; those that were not computed are None.

    The names of the fields are the names of the JSON fields.

    Attributes:
        feature: Name of the feature.
        value: The value, or the label of a discrete feature.
        surprise: Negative logarithm of the reading's highest-density p-value; 0 is as expected. It is conditional on
            the readings of the record that are not suspects. With effort "fast", it is conditional on the readings
            that arrived earlier.
        expected: What the model expected under the same condition.
        attribution: Mean of -ln p(value | readings before it) over several orders, in normalised units. The sum over
            all readings is -ln p of the record.
        leave_one_out: -ln p(value | all other readings).
        relief: By how much the score of the record decreases without this reading.
        suspect: Whether the reading is in the smallest set found whose replacement by expected values would have
            prevented the alert. If no such set was found, whether it is in the largest set that was tried.
    """

    feature: str
    value: float | str | None
    surprise: float
    expected: ExpectedRange
    attribution: float | None = None
    leave_one_out: float | None = None
    relief: float | None = None
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a record has alerted.

    Attributes:
        contributions: Shares of the readings, the most suspicious first.
        silenced_by: The smallest set of features found that would have prevented the alert, if their values were
            replaced by what is expected given all others. None if no set was found or none was searched for.
    """

    contributions: tuple[Contribution, ...]
    silenced_by: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Alert:
    """A record has become improbable: its p-value has reached an alpha (false-alarm rate) for the first time.

    Attributes:
        id: Identifies the alert; it depends on the record, the model and alpha only.
        record: Id of the record.
        raised_at: Number of readings of the record when it alerted.
        features_seen: The same number.
        features_expected: Number of features of the schema without those declared as "will not be observed".
        time: Event time of the reading that raised the alert, microseconds, or `NO_TIME`.
        p_value: p-value of the record at that reading.
        alpha: The alpha that was reached.
        score: Prefix statistic of the record; larger is more anomalous.
        running_log_likelihood: Sum of ln p over the record's readings so far.
        model: Fingerprint of the model.
        message_index: Index of the message in the poll, -1 if a timeout has decided the tie group (readings of one
            record with the same event time) that raised the alert.
        contributions: Shares of the readings, the most suspicious first.
        partition: Partition of the record.
        is_record_closed: Whether the same batch has closed the record, for a reason that follows from the log.
        severity: 1 for the largest of the configured alphas, 2 for the next, and so on.
        silenced_by: See `Explanation`: features whose replacement would have prevented the alert.
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


@dataclass(frozen=True, slots=True)
class ClosedRecords:
    """R records that were closed.

    Attributes:
        record_ids: R ids.
        reasons: R reasons.
        partitions: (R,) int32 partitions.
        num_readings: (R,) int32 number of readings.
        is_complete: (R,) whether every feature was observed or declared as "will not be observed".
        log_likelihood: (R,) sum of ln p over the scored readings.
        anomaly_score: (R,) score for ranking whole records; larger is more anomalous. It is the sum of the centered NLL
            (NLL minus its conditional entropy) over the scored readings, in nats. If the model has exemplars, it
            combines that sum with the distance to the nearest exemplars, in units of normal records
            (`deformer_stream.model.ranking`).
        p_value: (R,) p-value at the end.
        alert_seq: (R,) int32 place of the reading that raised the first alert, -1 if there was none.
        alert_alpha: (R,) strictest alpha that raised an alert, `NO_ALERT` if there was none.
        score: (R,) prefix statistic at the end; larger is more anomalous.
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

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.record_ids)

    @staticmethod
    def empty() -> ClosedRecords:
        """Return no records."""
        floats, ints = np.empty(0), np.empty(0, np.int32)
        bools = np.empty(0, np.bool_)
        return ClosedRecords([], [], ints, ints, bools, floats, floats, floats, ints, floats, floats)

    @staticmethod
    def concatenate(parts: Sequence[ClosedRecords]) -> ClosedRecords:
        """Return the records of several parts, one part after the other."""
        if not parts:
            return ClosedRecords.empty()
        return ClosedRecords(
            [record_id for part in parts for record_id in part.record_ids],
            [reason for part in parts for reason in part.reasons],
            np.concatenate([part.partitions for part in parts]),
            np.concatenate([part.num_readings for part in parts]),
            np.concatenate([part.is_complete for part in parts]),
            np.concatenate([part.log_likelihood for part in parts]),
            np.concatenate([part.anomaly_score for part in parts]),
            np.concatenate([part.p_value for part in parts]),
            np.concatenate([part.alert_seq for part in parts]),
            np.concatenate([part.alert_alpha for part in parts]),
            np.concatenate([part.score for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class Effects:
    """What the engine decided about one batch. Sinks write it; the engine itself writes nothing.

    Attributes:
        batch: The events that `scored.event_indices` refers to. It is the input, followed by readings of earlier
            batches whose tie group (readings of one record with the same event time) was decided now.
        scored: Scores of the accepted readings.
        alerts: Alerts that were raised.
        rejections: Rejected readings, by message and reason.
        closed: Records that were closed.
        drift_notices: Notices that the records of a partition differ from the calibration records.
        drift_states: New states of the drift monitor, by partition. Only partitions whose state changed are present.
        tie_timeouts: By partition and record id: number of readings of the record when a timeout decided its tie group.
    """

    batch: EventBatch
    scored: ScoredReadings
    alerts: list[Alert]
    rejections: list[Rejection]
    closed: ClosedRecords
    drift_notices: list[DriftNotice] = field(default_factory=list)
    drift_states: Mapping[int, DriftState] = field(default_factory=dict)
    tie_timeouts: Mapping[int, Mapping[str, int]] = field(default_factory=dict)

    def decisions(self) -> dict[int, Decisions]:
        """Return by partition the decisions that cannot be reproduced from the partition's log."""
        closed_ids: dict[int, list[str]] = {}
        alert_states: dict[int, dict[str, AlertState]] = {}
        for alert in self.alerts:
            if not alert.is_record_closed:
                states, state = (
                    alert_states.setdefault(alert.partition, {}),
                    AlertState(alert.raised_at - 1, alert.alpha),
                )
                states[alert.record] = states[alert.record] + state if alert.record in states else state
        closed = zip(self.closed.record_ids, self.closed.reasons, self.closed.partitions.tolist(), strict=True)
        for record_id, reason, partition in closed:
            if reason in (CloseReason.TIMEOUT, CloseReason.EVICTED):
                closed_ids.setdefault(partition, []).append(record_id)
        tie_timeouts = {
            partition: {record_id: (num_readings,) for record_id, num_readings in by_record.items()}
            for partition, by_record in self.tie_timeouts.items()
        }
        return {
            partition: Decisions(
                tuple(closed_ids.get(partition, ())),
                alert_states.get(partition, {}),
                self.drift_states.get(partition),
                tie_timeouts.get(partition, {}),
            )
            for partition in sorted({*closed_ids, *alert_states, *self.drift_states, *tie_timeouts})
        }


@dataclass(frozen=True, slots=True)
class AlertState:
    """Which alerts a record has raised.

    Attributes:
        seq: Place in the record of the reading that raised the first alert, from 0.
        alpha: The strictest alpha so far, `SUPPRESS_ALL` if it is unknown.
    """

    seq: int
    alpha: float = SUPPRESS_ALL

    def __add__(self, later: AlertState) -> AlertState:
        """Return the state after further alerts of the same record."""
        return AlertState(self.seq, min(self.alpha, later.alpha))


@dataclass(frozen=True, slots=True)
class Decisions:
    """What was decided about one partition and cannot be reproduced from the partition's log.

    A restarted consumer reads the log again and gets the same records. Decisions that depended on the clock, on memory
    or on other partitions are therefore stored beside the log.

    Attributes:
        closed_ids: Records that were closed by a timeout or evicted, in order.
        alert_states: By id, alerts of records that the log leaves open.
        drift_state: State of the drift monitor, None if it has not changed.
        tie_timeouts: By record id, numbers of readings at which a timeout decided a tie group (readings of one record
            with the same event time).
    """

    closed_ids: tuple[str, ...] = ()
    alert_states: Mapping[str, AlertState] = field(default_factory=dict)
    drift_state: DriftState | None = None
    tie_timeouts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Return whether anything was decided."""
        return bool(self.closed_ids or self.alert_states or self.drift_state or self.tie_timeouts)

    def __add__(self, later: Decisions) -> Decisions:
        """Return these decisions followed by later ones of the same partition."""
        alert_states = dict(self.alert_states)
        for record_id, state in later.alert_states.items():
            alert_states[record_id] = alert_states[record_id] + state if record_id in alert_states else state
        tie_timeouts = dict(self.tie_timeouts)
        for record_id, num_readings in later.tie_timeouts.items():
            tie_timeouts[record_id] = tie_timeouts.get(record_id, ()) + num_readings
        return Decisions(
            self.closed_ids + later.closed_ids, alert_states, later.drift_state or self.drift_state, tie_timeouts
        )
