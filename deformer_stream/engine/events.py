"""The currency of the road: events come in as a struct of arrays, decisions go out as values.

`EventBatch` is what a codec makes of one poll. `Effects` is what the engine answers; only the edge acts on it.
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
"""The time of an event that carries none (times are microseconds since 1970, UTC)."""


class RejectionReason(StrEnum):
    """Why an event was refused. The values are the `reason` label of metrics and dead letters."""

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
    """Every feature was observed or declared as never coming."""
    TIMEOUT = "timeout"
    """No event of the record came for the record time-out."""
    END = "end"
    """The input ended."""
    REVOKED = "revoked"
    """Its partition went to another consumer."""
    WINDOW = "window"
    """It is a window of a device's time, and the device's clock has passed the window's end and the grace after it."""
    EVICTED = "evicted"
    """The bound on open records was reached and this one had been silent for longest."""


@dataclass(frozen=True, slots=True)
class WindowMembership:
    """Which of N events belong to a window of their device's time.

    devices: N names, "" where the event names its record itself. deadlines: (N,) int64 microseconds, the event time of
    the device from which on the event's record is closed; of no meaning where there is no device.
    """

    devices: list[str]
    deadlines: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EventBatch:
    """N events in order of arrival.

    records: N record ids. features: (N,) int32 feature codes of the schema. values: (N,) float64, raw units for a
    continuous feature, the label's code for a discrete one (the number of labels stands for an unseen label), NaN for
    "will not be observed". times: (N,) int64 microseconds or `NO_TIME`. messages: (N,) int32, the message of the poll
    that carried the event. sources: (N,) int32 partition the event came from. unseen: texts of unseen labels by index.
    windowed: None where no record is a window; an event of a window has a time. rows: (R + 1,) where the events of each
    of R rows begin, and the end, where they stand so: all of one partition, those of a row of one record, each feature
    at most once; None where nothing like it is known.
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
        return len(self.record_ids)

    def records_of_rows(self) -> tuple[list[str], NDArray[np.int64]]:
        """Ids of records and, of each event, the place of its own among them, (N,): those of the rows or of all."""
        if self.row_boundaries is None:
            return self.record_ids, np.arange(len(self.record_ids))
        begins = self.row_boundaries[:-1]
        return [self.record_ids[i] for i in begins.tolist()], np.repeat(np.arange(len(begins)), np.diff(self.row_boundaries))

    @staticmethod
    def empty() -> EventBatch:
        ints = np.empty(0, np.int32)
        return EventBatch([], ints, np.empty(0), np.empty(0, np.int64), ints, ints)


@dataclass(frozen=True, slots=True)
class Rejection:
    """Readings of one message that are refused for one reason. message: index into the poll. detail: one line that
    names the offending thing. readings: how many, 1 for a message that is refused whole."""

    message_index: int
    reason: RejectionReason
    detail: str
    num_readings: int = 1

    @staticmethod
    def merge_by_message(refusals: Iterable[Rejection]) -> list[Rejection]:
        """By message, one for each reason: it names the first thing and counts the others. A message is kept once for
        each reason, so what it costs to refuse one is bounded, however many readings it has."""
        first: dict[tuple[int, RejectionReason], Rejection] = {}
        counts: Counter[tuple[int, RejectionReason]] = Counter()
        for refusal in refusals:
            key = refusal.message_index, refusal.reason
            first.setdefault(key, refusal)
            counts[key] += refusal.num_readings
        merged = [one._with_num_readings(counts[key]) for key, one in first.items()]
        return sorted(merged, key=lambda refusal: refusal.message_index)

    def _with_num_readings(self, readings: int) -> Rejection:
        if readings == self.num_readings:
            return self
        more = f"{self.detail} (and {readings - self.num_readings} more of this message)"
        return Rejection(self.message_index, self.reason, more, readings)


@dataclass(frozen=True, slots=True)
class ScoredReadings:
    """M accepted events, in order of acceptance, where readings of one time wait for each other in that of decision.

    events: (M,) index into the batch. seq: (M,) int32 place in the record, from 0. log_likelihood: (M,) natural log of
    p(value | earlier values of the record) in normalised units, a mass for discrete features, NaN for context.
    running: (M,) its sum so far. score: (M,) running statistic, larger is more anomalous. p_value: (M,) anytime-valid.
    alert: (M,) bool, true on the events that raised an alert of the record. A block of ties counts at its last event.
    """

    event_indices: NDArray[np.int64]
    seq: NDArray[np.int32]
    log_likelihood: NDArray[np.float64]
    running_log_likelihood: NDArray[np.float64]
    score: NDArray[np.float64]
    p_value: NDArray[np.float64]
    is_alert: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.event_indices)

    @staticmethod
    def empty() -> ScoredReadings:
        f = np.empty(0)
        return ScoredReadings(np.empty(0, np.int64), np.empty(0, np.int32), f, f, f, f, np.empty(0, np.bool_))


@dataclass(frozen=True, slots=True)
class ExpectedRange:
    """What the model expected of a reading, raw units: 5% quantile, median, 95% quantile; or the likeliest label."""

    low: float | None
    median: float | str | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Contribution:
    """One reading's share in an alert, in nats; what is None was not asked for.

    surprise: −ln of its highest-density p-value, 0 is as expected; like `expected`, given the trusted rest, the other
    readings without the suspects (with effort "fast": given the readings before). attribution: mean over orders of
    −ln p(value | what came before), in normalised units; the sum over readings is −ln p of them all. leave_one_out:
    −ln p(value | all others). relief: by how much the record surprises less without it. suspect: it is in the smallest
    set found whose replacement would have kept the record silent, or, where none was, in the largest tried.
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
    """Why a record is what it is. contributions: the most suspicious first. silenced_by: the smallest set of features
    found whose values, replaced by what is expected given all others, would have kept the record silent; None where
    none was found or none was looked for."""

    contributions: tuple[Contribution, ...]
    silenced_by: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Alert:
    """A record became improbable. raised_at: number of readings accepted when it did. message: index into the poll, −1
    where the clock decided a block of ties. partition: the record's. ended: the batch closed it, for a reason that the
    log tells. severity: 1 for the largest alpha that was asked for, 2 for the next, …"""

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
    """R records that ended, as parallel lists.

    sources: (R,) int32 partitions. complete: nothing more was awaited. anomaly_score: ranks whole records, larger is
    more anomalous: the distance to the nearest exemplars and Σ(−ln p(v) − H), the surprisal of all scored readings
    beyond its mean under the model, in units of normal records (`model.ranking`); the latter alone, in nats, without
    exemplars.
    alert_seq: place of the event that raised the first alert, −1 where none did. alert_alpha: the strictest alpha that
    raised one, `QUIET` where none did. score: the running statistic in the end, larger is more anomalous.
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
        return len(self.record_ids)

    @staticmethod
    def empty() -> ClosedRecords:
        f, i = np.empty(0), np.empty(0, np.int32)
        return ClosedRecords([], [], i, i, np.empty(0, np.bool_), f, f, f, i, f, f)

    @staticmethod
    def concatenate(parts: Sequence[ClosedRecords]) -> ClosedRecords:
        """Several closings as one, in order."""
        if not parts:
            return ClosedRecords.empty()
        return ClosedRecords(
            [record for part in parts for record in part.record_ids],
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
    """What the engine decided about one batch. `batch` is the input that `scored.events` points into. evidence: of
    drift, by partition where there is more of it and notices go by it. waited: by partition and record, how many
    readings it had when the clock decided a block of ties (`engine.ties`). Readings of earlier batches that are decided
    now stand at the end of `batch`."""

    batch: EventBatch
    scored: ScoredReadings
    alerts: list[Alert]
    rejections: list[Rejection]
    closed: ClosedRecords
    drift_notices: list[DriftNotice] = field(default_factory=list)
    drift_states: Mapping[int, DriftState] = field(default_factory=dict)
    tie_timeouts: Mapping[int, Mapping[str, int]] = field(default_factory=dict)

    def decisions(self) -> dict[int, Decisions]:
        """By partition, what was decided here that the partition's log cannot tell."""
        closed: dict[int, list[str]] = {}
        alerted: dict[int, dict[str, AlertState]] = {}
        for alert in self.alerts:
            if not alert.is_record_closed:
                mine, told = alerted.setdefault(alert.partition, {}), AlertState(alert.raised_at - 1, alert.alpha)
                mine[alert.record] = mine[alert.record] + told if alert.record in mine else told
        rows = zip(self.closed.record_ids, self.closed.reasons, self.closed.partitions.tolist(), strict=True)
        for record, reason, partition in rows:
            if reason in (CloseReason.TIMEOUT, CloseReason.EVICTED):
                closed.setdefault(partition, []).append(record)
        waited = {p: {record: (count,) for record, count in counts.items()} for p, counts in self.tie_timeouts.items()}
        return {
            p: Decisions(tuple(closed.get(p, ())), alerted.get(p, {}), self.drift_states.get(p), waited.get(p, {}))
            for p in sorted({*closed, *alerted, *self.drift_states, *waited})
        }


NO_ALERT = 1.0
"""In place of the strictest alpha that has raised an alert of a record, where none has: every alpha is stricter."""


SUPPRESS_ALL = 0.0
"""In its place where it is not known: no alpha is stricter, so the record alerts no more."""


@dataclass(frozen=True, slots=True)
class AlertState:
    """A record has alerted. seq: place of the reading that raised the first alert. alpha: the strictest so far."""

    seq: int
    alpha: float = SUPPRESS_ALL

    def __add__(self, later: AlertState) -> AlertState:
        return AlertState(self.seq, min(self.alpha, later.alpha))


@dataclass(frozen=True, slots=True)
class Decisions:
    """What was decided about one partition that its log cannot tell.

    closed: records closed by the clock or for want of room, in order. alerted: of records that the log has left open.
    drift: the evidence that notices go by, None where it is as it was. waited: numbers of readings that records had
    when the clock decided a block of ties.
    """

    closed_ids: tuple[str, ...] = ()
    alert_states: Mapping[str, AlertState] = field(default_factory=dict)
    drift_state: DriftState | None = None
    tie_timeouts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.closed_ids or self.alert_states or self.drift_state or self.tie_timeouts)

    def __add__(self, later: Decisions) -> Decisions:
        alerted = dict(self.alert_states)
        for record, told in later.alert_states.items():
            alerted[record] = alerted[record] + told if record in alerted else told
        waited = dict(self.tie_timeouts)
        for record, counts in later.tie_timeouts.items():
            waited[record] = waited.get(record, ()) + counts
        return Decisions(self.closed_ids + later.closed_ids, alerted, later.drift_state or self.drift_state, waited)
