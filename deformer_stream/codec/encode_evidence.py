"""Evidence as bytes: the messages of `TOPIC-evidence` and the lines of `replay --evidence`.

A message is a JSON object with the closed records as columns and the alerts as objects (docs/reference/formats.md).
The numbers of `incidents.make_evidence` are rounded, so encoding loses nothing: `decode_evidence` gives back an equal
batch, and a log that is read again leads to the same incidents as the batches themselves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from deformer_stream.calibration.fault_classifier import FaultName
from deformer_stream.codec.json_types import Micros
from deformer_stream.engine.events import NO_TIME, ONLY_MODEL, SuggestedReading
from deformer_stream.errors import InputError
from deformer_stream.incidents.events import AlertRow, ClosedRows, EvidenceBatch, Suspect

EVIDENCE_VERSION = 2
"""Latest version of the format. A reader refuses messages of a later version. In every version, `v`, `model` and
`partition` mean the same, so that a reader recognises evidence of a later one.

Version 2 has p-values of closed records as a whole, which the detection of incidents must not ignore. A message without
them has version 1, so that earlier releases read it.
"""

MAX_EVIDENCE_BYTES = 2**19
"""Maximum size of a message: half of the default limit of a Kafka topic. A larger batch becomes several messages."""

MAX_SHOWN_CHARACTERS = 200
"""Longest part of a parser's message that an error repeats."""


class LaterEvidenceError(InputError):
    """Evidence of a later format version, which this release cannot read. Exit code 3.

    The operator replaces this process by one of the release that has written the evidence.
    """


class _ClosedColumns(msgspec.Struct):
    """The columns of the closed records of a message."""

    record: list[str]
    time: list[Micros]
    p: list[Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]]
    score: list[float]
    readings: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]
    alerted: list[Annotated[int, msgspec.Meta(ge=0, le=1)]]
    record_p: list[Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None] | None = None
    record_score: list[float | None] | None = None


class _SuspectObject(msgspec.Struct):
    """A suspect of an alert."""

    feature: str
    value: float | str | None
    low: float | None
    high: float | None
    share: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
    unit: str | None = None


class _AlertObject(msgspec.Struct):
    """An alert of a message."""

    id: str
    record: str
    time: Micros | None
    p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]
    severity: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    suspects: list[_SuspectObject] = msgspec.field(default_factory=list)
    silenced_by: list[str] | None = None
    score: float | None = None
    next_reading: SuggestedReading | None = None
    fault: FaultName | None = None
    alpha: Annotated[float, msgspec.Meta(gt=0.0, lt=1.0)] | None = None


class _EvidenceMessage(msgspec.Struct):
    """A message of evidence. Keys that a later release adds are ignored."""

    v: int
    model: str
    partition: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    closed: _ClosedColumns
    alerts: list[_AlertObject] = msgspec.field(default_factory=list)
    model_name: str | None = None


class _Version(msgspec.Struct):
    """The version of a message, which is checked before the rest."""

    v: int


class _Header(msgspec.Struct):
    """The parts of a message that tell evidence of a later version from a message of another kind."""

    model: str
    partition: int


_decode_version = msgspec.json.Decoder(_Version).decode
_decode_header = msgspec.json.Decoder(_Header).decode
_decode_message = msgspec.json.Decoder(_EvidenceMessage).decode


def encode_evidence(batch: EvidenceBatch) -> bytes:
    """Return a batch of evidence as a JSON object on one line, without a newline at its end."""
    closed = batch.closed
    document = {
        "v": 1 if closed.record_p_values is None else EVIDENCE_VERSION,
        "model": batch.model,
        **({} if batch.model_name == ONLY_MODEL else {"model_name": batch.model_name}),
        "partition": batch.partition,
        "closed": {
            "record": closed.record_ids,
            "time": closed.times,
            "p": closed.p_values,
            "score": closed.scores,
            "readings": closed.num_readings,
            "alerted": closed.is_alerted.astype(np.int8),
            **_record_columns(closed),
        },
        "alerts": [_alert_to_json(alert) for alert in batch.alerts],
    }
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def _record_columns(closed: ClosedRows) -> dict[str, NDArray[np.float64]]:
    """Return the columns of complete records that are known. NaN becomes null."""
    columns = {"record_p": closed.record_p_values, "record_score": closed.record_scores}
    return {name: column for name, column in columns.items() if column is not None}


def encode_evidence_parts(batch: EvidenceBatch, max_bytes: int = MAX_EVIDENCE_BYTES) -> list[bytes]:
    """Return a batch of evidence as messages of a bounded size, in order. A batch without rows gives no message.

    The division of rows into messages does not change the result of a reader. The alerts precede the closed records,
    because the alert of a record must not come after the record.

    Args:
        batch: The batch.
        max_bytes: Maximum size of a message. A message with one row may exceed it.
    """
    num_alerts, num_closed = len(batch.alerts), len(batch.closed)
    if not num_alerts and not num_closed:
        return []
    encoded = encode_evidence(batch)
    if len(encoded) <= max_bytes or num_alerts + num_closed == 1:
        return [encoded]
    if num_alerts and num_closed:
        parts = [replace(batch, closed=_slice_rows(batch.closed, slice(0))), replace(batch, alerts=())]
    elif num_alerts:
        middle = num_alerts // 2
        parts = [replace(batch, alerts=alerts) for alerts in (batch.alerts[:middle], batch.alerts[middle:])]
    else:
        middle = num_closed // 2
        rows = slice(middle), slice(middle, None)
        parts = [replace(batch, closed=_slice_rows(batch.closed, part)) for part in rows]
    return [message for part in parts for message in encode_evidence_parts(part, max_bytes)]


def _slice_rows(closed: ClosedRows, rows: slice) -> ClosedRows:
    """Return some of the closed records."""
    return ClosedRows(
        record_ids=closed.record_ids[rows],
        times=closed.times[rows],
        p_values=closed.p_values[rows],
        scores=closed.scores[rows],
        num_readings=closed.num_readings[rows],
        is_alerted=closed.is_alerted[rows],
        record_p_values=None if closed.record_p_values is None else closed.record_p_values[rows],
        record_scores=None if closed.record_scores is None else closed.record_scores[rows],
    )


def _alert_to_json(alert: AlertRow) -> dict[str, object]:
    """Return an alert as a JSON object of the format."""
    return {
        "id": alert.id,
        "record": alert.record,
        "time": None if alert.time == NO_TIME else alert.time,
        "p": alert.p_value,
        "severity": alert.severity,
        "suspects": [
            {
                "feature": suspect.feature,
                **({} if suspect.unit is None else {"unit": suspect.unit}),
                "value": suspect.value,
                "low": suspect.low,
                "high": suspect.high,
                "share": suspect.share,
            }
            for suspect in alert.suspects
        ],
        "silenced_by": alert.silenced_by,
        **({} if alert.score is None else {"score": alert.score}),
        **({} if alert.next_reading is None else {"next_reading": alert.next_reading}),
        **({} if alert.fault is None else {"fault": alert.fault}),
        **({} if alert.alpha is None else {"alpha": alert.alpha}),
    }


def decode_evidence(payload: bytes) -> EvidenceBatch:
    """Return the batch of evidence that a message or a line of a file holds.

    Args:
        payload: The JSON object.

    Raises:
        LaterEvidenceError: The payload is evidence of a later version.
        InputError: The payload is not a message of evidence. The text of the errors is one line without the position of
            the payload, which the caller adds.
    """
    try:
        version = _decode_version(payload).v
        if version > EVIDENCE_VERSION:
            _decode_header(payload)
        if not 1 <= version <= EVIDENCE_VERSION:
            kind = LaterEvidenceError if version > EVIDENCE_VERSION else InputError
            raise kind(
                f"evidence of format version {version} cannot be read: this release reads versions 1 to "
                f"{EVIDENCE_VERSION}; use the release that wrote it"
            )
        message = _decode_message(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        detail = " ".join(str(error).split())[:MAX_SHOWN_CHARACTERS]
        raise InputError(
            f"no message of evidence ({detail}); give what `consume --evidence on` or `replay --evidence` wrote"
        ) from None
    closed = message.closed
    num_records = len(closed.record)
    lengths = [len(closed.time), len(closed.p), len(closed.score), len(closed.readings), len(closed.alerted)]
    record_p, record_score = closed.record_p, closed.record_score
    lengths += [len(column) for column in (record_p, record_score) if column is not None]
    if any(length != num_records for length in lengths):
        raise InputError(
            "no message of evidence (its columns of closed records have different lengths); give what "
            "`consume --evidence on` or `replay --evidence` wrote"
        )
    return EvidenceBatch(
        message.model,
        message.partition,
        ClosedRows(
            record_ids=closed.record,
            times=np.array(closed.time, np.int64),
            p_values=np.array(closed.p, np.float64),
            scores=np.array(closed.score, np.float64),
            num_readings=np.array(closed.readings, np.int32),
            is_alerted=np.array(closed.alerted, np.bool_),
            record_p_values=None if record_p is None else np.array(record_p, np.float64),  # null becomes NaN
            record_scores=None if record_score is None else np.array(record_score, np.float64),
        ),
        tuple(_alert_from_json(alert) for alert in message.alerts),
        message.model_name or ONLY_MODEL,
    )


def _alert_from_json(alert: _AlertObject) -> AlertRow:
    """Return the alert that a JSON object of the format states."""
    return AlertRow(
        alert.id,
        alert.record,
        NO_TIME if alert.time is None else alert.time,
        p_value=alert.p,
        severity=alert.severity,
        suspects=tuple(
            Suspect(suspect.feature, suspect.value, suspect.low, suspect.high, suspect.share, suspect.unit)
            for suspect in alert.suspects
        ),
        silenced_by=None if alert.silenced_by is None else tuple(alert.silenced_by),
        score=alert.score,
        next_reading=alert.next_reading,
        fault=alert.fault,
        alpha=alert.alpha,
    )
