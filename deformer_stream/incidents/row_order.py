"""The order in which the rows of a log of evidence are handled.

Rows wait until a row has come whose time is later by `reorder`, and are then handled in order of time, record and place
in the log. The tracker of incidents and the calibration of segments use the same order, because the guarantee of the
segment rule needs the same statistic in both.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.incident_evidence import ScoreTail
from deformer_stream.engine.events import NO_TIME
from deformer_stream.incidents.events import AlertRow, EvidenceBatch

Floats = NDArray[np.float64]

MAX_PENDING_ALERTS = 16_384
"""Largest number of alerts whose records have not closed yet; the oldest ones are dropped first, and counted."""


class Row(NamedTuple):
    """A closed record with its alert. Rows compare in the order in which they are handled.

    Attributes:
        time: Latest event time of the record.
        record: Id of the record.
        sequence: Number of the row in the log, which orders rows of the same time and record.
        model: Fingerprint of the model.
        p_value: p-value of the record.
        score: Anomaly score of the record.
        is_alerted: Whether the record has alerted.
        alert: Its last alert, None if it has none or the alert is unknown.
        record_p_value: p-value of the record as a whole, None if it is unknown.
        record_score: Anomaly score of the record as a whole, None if it is unknown.
    """

    time: int
    record: str
    sequence: int
    model: str
    p_value: float
    score: float
    is_alerted: bool
    alert: AlertRow | None
    record_p_value: float | None = None
    record_score: float | None = None

    def extend_p_value(self, tail: ScoreTail | None) -> float:
        """Return the p-value with which the record enters the segment rule: that of the whole record if it is known.

        Args:
            tail: The tail by which p-values are extended, None if they are not.
        """
        if self.record_p_value is None:
            return self.p_value if tail is None else tail.extend(self.p_value, self.score)
        of_records = None if tail is None else tail.of_records
        if of_records is None:
            return self.record_p_value
        return of_records.extend(self.record_p_value, self.record_score)


class OpenAlert(NamedTuple):
    """An alert at the place where it is handled if it counts before its record closes.

    Attributes:
        model: Fingerprint of the model.
        alert: The alert, which has a time.
    """

    model: str
    alert: AlertRow


@dataclass(slots=True)
class OrderState:
    """What a `RowOrder` needs to continue. All values can be expressed as JSON.

    Attributes:
        alert_by_record: The alerts whose records have not closed yet, in order of arrival.
        waiting: Rows that wait to be handled in order of time.
        stream_time: Largest time of a row so far.
        sequence: Number of rows so far.
        num_untimed: Number of rows that were dropped because they have no time.
        num_dropped_alerts: Number of alerts that were dropped because too many records had not closed.
    """

    alert_by_record: dict[str, AlertRow] = field(default_factory=dict)
    waiting: list[Row] = field(default_factory=list)
    stream_time: int = NO_TIME
    sequence: int = 0
    num_untimed: int = 0
    num_dropped_alerts: int = 0


class RowOrder:
    """Joins closed records with their alerts, and returns them in the order in which they are handled.

    Args:
        reorder: Time for which rows wait for earlier ones, in microseconds; 0 keeps the order of the log.
    """

    def __init__(self, reorder: int) -> None:
        self._reorder = reorder
        self._state = OrderState()

    @property
    def num_untimed(self) -> int:
        """Number of rows that were dropped because they have no time."""
        return self._state.num_untimed

    @property
    def num_dropped_alerts(self) -> int:
        """Number of alerts that were dropped because too many records had not closed."""
        return self._state.num_dropped_alerts

    def add(self, batch: EvidenceBatch) -> Iterator[Row]:
        """Add a batch of the log, and yield the rows that need not wait any more. It must be read to its end."""
        state, closed, reorder = self._state, batch.closed, self._reorder
        for alert in batch.alerts:
            state.alert_by_record.pop(alert.record, None)
            state.alert_by_record[alert.record] = alert
            if len(state.alert_by_record) > MAX_PENDING_ALERTS:
                del state.alert_by_record[next(iter(state.alert_by_record))]
                state.num_dropped_alerts += 1
        columns = zip(
            closed.record_ids,
            closed.times.tolist(),
            closed.p_values.tolist(),
            closed.scores.tolist(),
            closed.is_alerted.tolist(),
            _list_known(closed.record_p_values, len(closed)),
            _list_known(closed.record_scores, len(closed)),
            strict=True,
        )
        for record, time, p_value, score, is_alerted, record_p_value, record_score in columns:
            alert_of_record = state.alert_by_record.pop(record, None) if state.alert_by_record else None
            if time == NO_TIME:
                state.num_untimed += 1
                continue
            state.sequence += 1
            state.stream_time = max(state.stream_time, time)
            row = Row(
                time,
                record,
                state.sequence,
                batch.model,
                p_value,
                score,
                is_alerted,
                alert_of_record,
                record_p_value,
                record_score,
            )
            if reorder <= 0:
                yield row
                continue
            heapq.heappush(state.waiting, row)
            while state.waiting and state.waiting[0].time <= state.stream_time - reorder:
                yield heapq.heappop(state.waiting)

    def add_with_alerts(self, batch: EvidenceBatch) -> Iterator[Row | OpenAlert]:
        """Do the same as `add`, and yield the alerts of the batch as well, as if their records were still open.

        An alert comes before the rows of the batch that are not earlier, and does not wait for earlier rows of later
        batches. Its place is therefore the same for every division of a log in order of time. If rows come later than
        their times, or wait, it depends on the batch in which the alert is.
        """
        timed = [(alert.time, index, alert) for index, alert in enumerate(batch.alerts) if alert.time != NO_TIME]
        alert_by_index = {index: alert for _, index, alert in sorted(timed)}
        index_by_record = {alert.record: index for index, alert in alert_by_index.items()}
        for row in self.add(batch):
            while alert_by_index:
                index = next(iter(alert_by_index))
                if alert_by_index[index].time > row.time:
                    break
                yield OpenAlert(batch.model, alert_by_index.pop(index))
            alert_index = index_by_record.get(row.record)
            if alert_index is not None and alert_index in alert_by_index:
                yield OpenAlert(batch.model, alert_by_index.pop(alert_index))
            yield row
        for alert in alert_by_index.values():
            yield OpenAlert(batch.model, alert)

    def finish(self) -> Iterator[Row]:
        """Yield the rows that still wait, at the end of finite input."""
        while self._state.waiting:
            yield heapq.heappop(self._state.waiting)

    def export_state(self) -> OrderState:
        """Return the state. It must not be used after the next call of another method."""
        self._state.waiting.sort()  # a sorted list is a heap, too
        return self._state

    def import_state(self, state: OrderState) -> None:
        """Continue from a state."""
        self._state = state
        heapq.heapify(state.waiting)


def _list_known(values: Floats | None, num_rows: int) -> list[float | None]:
    """Return a column of numbers as a list with None in place of NaN.

    Args:
        values: (R,) the numbers; None if none is known.
        num_rows: The number R of rows.
    """
    if values is None:
        return [None] * num_rows
    return [None if value != value else value for value in values.tolist()]  # only NaN differs from itself
