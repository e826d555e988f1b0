"""Conversion of the effects of the engine to evidence: the fields of closed records and alerts that incidents need.

Live processes and `replay` call the same function. It rounds numbers to the digits that the messages of evidence have.
Incidents therefore do not depend on whether the evidence was written and read in between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deformer_stream.engine.events import NO_TIME, Alert, ClosedRecords, CloseReason, Contribution, Effects
from deformer_stream.incidents.events import AlertRow, ClosedRows, EvidenceBatch, Suspect

Floats = NDArray[np.float64]

MAX_SUSPECTS = 5
"""Largest number of suspects of an alert."""

P_VALUE_DIGITS, SCORE_DIGITS, SHARE_DECIMALS = 6, 5, 4
"""Significant digits of p-values and of scores, and decimals of the shares of suspects."""

_DIGITS = np.array([[P_VALUE_DIGITS], [SCORE_DIGITS]])

MAX_LABEL_CHARACTERS = 200
"""Length at which labels are cut off. A label that the model does not have can be any text of the input."""


def make_evidence(effects: Effects) -> tuple[list[EvidenceBatch], list[str]]:
    """Return the evidence of the effects of one call of the engine.

    Records without readings are left out. So are records that another process continues, because their partition was
    assigned to it. Incidents need event times, so records without a time are left out, too; their ids are returned.

    Args:
        effects: The closed records and the alerts.

    Returns:
        One batch for each partition with closed records or alerts, ordered by partition. If earlier models have scored
        some of them, these are batches of their own, before that of the current model. And the ids of the records that
        were left out because none of their readings has a time.
    """
    closed = effects.closed
    if not len(closed) and not effects.raised_alerts:  # most polls of a live stream
        return [], []
    is_scored = closed.num_readings > 0
    if CloseReason.REVOKED in closed.reasons:
        is_scored &= np.array([reason is not CloseReason.REVOKED for reason in closed.reasons], np.bool_)
    is_timed = closed.latest_time != NO_TIME
    rows = (is_scored & is_timed).nonzero()[0]
    # The keys are the partition and the model.
    rows_by_key: dict[tuple[int, str], list[int]] = {}
    for row, partition in zip(rows.tolist(), closed.partitions[rows].tolist(), strict=True):
        rows_by_key.setdefault((partition, closed.models[row] if closed.models else effects.model), []).append(row)
    alerts_by_key: dict[tuple[int, str], list[AlertRow]] = {}
    for alert in effects.raised_alerts:
        alerts_by_key.setdefault((alert.partition, alert.model), []).append(_make_alert_row(alert))
    batches = [
        EvidenceBatch(
            model,
            partition,
            _select_rows(closed, np.array(rows_by_key.get((partition, model), ()), np.int64)),
            tuple(alerts_by_key.get((partition, model), ())),
            effects.model_name,
        )
        for partition, model in sorted(
            dict.fromkeys((*rows_by_key, *alerts_by_key)), key=lambda key: (key[0], key[1] == effects.model)
        )
    ]
    return batches, [closed.record_ids[row] for row in (is_scored & ~is_timed).nonzero()[0].tolist()]


def _select_rows(closed: ClosedRecords, rows: NDArray[np.int64]) -> ClosedRows:
    """Return the fields of evidence of some closed records.

    Args:
        closed: Closed records.
        rows: Indexes of the records that are selected.
    """
    numbers = np.stack([closed.p_value[rows], np.nan_to_num(closed.score[rows])])
    p_values, scores = round_significant(numbers, _DIGITS)
    # NaN is a number that is unknown.
    record_p_values, record_scores = np.full((2, len(rows)), np.nan)
    for numbers, target, digits in (
        (closed.record_p_value[rows], record_p_values, P_VALUE_DIGITS),
        (closed.anomaly_score[rows], record_scores, SCORE_DIGITS),
    ):
        is_known = np.isfinite(numbers)
        target[is_known] = round_significant(numbers[is_known], digits)
    return ClosedRows(
        record_ids=[closed.record_ids[row] for row in rows.tolist()],
        times=closed.latest_time[rows],
        p_values=p_values,
        scores=scores,
        num_readings=closed.num_readings[rows],
        is_alerted=closed.alert_seq[rows] >= 0,
        record_p_values=None if np.isnan(record_p_values).all() else record_p_values,
        record_scores=record_scores,
    )


def round_significant(numbers: Floats, digits: int | NDArray[np.int64]) -> Floats:
    """Return numbers rounded to significant digits, of the same shape.

    The results are the floating-point numbers that are nearest to these decimal numbers, so their texts are short.

    Args:
        numbers: Finite numbers.
        digits: Number of significant digits, or an array of numbers that can be broadcast to the shape of `numbers`.
    """
    magnitudes = np.floor(np.log10(np.abs(numbers), where=numbers != 0, out=np.zeros_like(numbers)))
    decimals = (digits - 1) - magnitudes
    # Powers of ten up to the 22nd are exact. A negative power would not be, so its inverse is used.
    factors, divisors = 10.0 ** np.minimum(np.maximum(decimals, 0), 22), 10.0 ** np.maximum(-decimals, 0)
    rounded: Floats = np.round(numbers * factors / divisors) / factors * divisors
    return rounded


def _make_alert_row(alert: Alert) -> AlertRow:
    """Return the fields of evidence of an alert. The name of a feature becomes that of its sensor."""
    sensor_by_feature = {
        contribution.feature: contribution.sensor
        for contribution in alert.contributions
        if contribution.sensor is not None
    }
    silenced_by = None
    if alert.silenced_by is not None:
        silenced_by = tuple(dict.fromkeys(sensor_by_feature.get(name, name) for name in alert.silenced_by))
    return AlertRow(
        alert.id,
        alert.record,
        alert.time,
        p_value=float(round_significant(np.array([alert.p_value]), P_VALUE_DIGITS)[0]),
        severity=alert.severity,
        suspects=_find_suspects(alert.contributions),
        silenced_by=silenced_by,
        score=float(round_significant(np.array([alert.score]), SCORE_DIGITS)[0])
        if math.isfinite(alert.score)
        else None,
        next_reading=alert.next_reading,
        fault=alert.fault,
        alpha=alert.alpha,
    )


def _find_suspects(contributions: Sequence[Contribution]) -> tuple[Suspect, ...]:
    """Return the suspects of an alert, the largest share first.

    The suspects are the sensors of the readings to which the alert is attributed. If the explanation attributes it to
    no reading, as with `--explanations fast`, the sensor of the most suspicious reading is the only suspect. Without an
    explanation there are no suspects. A sensor's share is its part of the sum of the weights of all readings. The
    weight of a reading is its relief; if that is not computed, its attribution; else its surprise.

    Args:
        contributions: The contributions of the readings, the most suspicious first.
    """
    readings = [contribution for contribution in contributions if contribution.suspect] or list(contributions[:1])
    first_by_sensor: dict[str, Contribution] = {}
    weight_by_sensor: dict[str, float] = {}
    for reading in readings:
        sensor = reading.sensor or reading.feature
        first_by_sensor.setdefault(sensor, reading)
        weight_by_sensor[sensor] = weight_by_sensor.get(sensor, 0.0) + _weigh(reading)
    total = sum(weight_by_sensor.values())
    share_by_sensor = {
        sensor: weight / total if total > 0 else 1 / len(weight_by_sensor)
        for sensor, weight in weight_by_sensor.items()
    }
    # The sort is stable: sensors of equal shares stay in the order of suspicion.
    ranked = sorted(share_by_sensor, key=lambda sensor: -share_by_sensor[sensor])[:MAX_SUSPECTS]
    return tuple(
        _make_suspect(sensor, first_by_sensor[sensor], round(share_by_sensor[sensor], SHARE_DECIMALS))
        for sensor in ranked
    )


def _weigh(reading: Contribution) -> float:
    """Return the weight of a suspect reading, which is not negative."""
    for weight in (reading.relief, reading.attribution, reading.surprise):
        if weight is not None and math.isfinite(weight):
            return max(weight, 0.0)
    return 0.0


def _make_suspect(sensor: str, reading: Contribution, share: float) -> Suspect:
    """Return a suspect.

    Args:
        sensor: Name of the sensor.
        reading: Its most suspicious reading.
        share: Its share of the attribution.
    """
    value = reading.value[:MAX_LABEL_CHARACTERS] if isinstance(reading.value, str) else _drop_infinite(reading.value)
    low, high = _drop_infinite(reading.expected.low), _drop_infinite(reading.expected.high)
    return Suspect(sensor, value, low, high, share, reading.unit)


def _drop_infinite(number: float | None) -> float | None:
    """Return a number, or None if it is not finite, because JSON cannot express it."""
    return number if number is not None and math.isfinite(number) else None
