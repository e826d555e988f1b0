"""Encoding of alerts, and of notices of drift and storms, as JSON: the messages of `TOPIC-alerts`.

An alert states the source position of its message: topic, partition and offset, or for tables the file and the row.
"""

from __future__ import annotations

from typing import Any

import orjson

from deformer_stream.calibration.drift_state import DriftNotice
from deformer_stream.codec.payloads import LongRows, Messages, Payload
from deformer_stream.codec.tables import ROW_FILE_COLUMN, ROW_NUMBER_COLUMN
from deformer_stream.codec.timestamps import format_rfc3339
from deformer_stream.engine.events import Alert, AlertCause, Contribution, StormNotice

MAX_ALERT_BYTES = 2**19
"""Maximum size of an alert in bytes: half of the default limit of a Kafka topic. Without it, long labels from the input
could make an alert too large to send."""


def encode_alert(alert: Alert, data: Payload | None, max_bytes: int = MAX_ALERT_BYTES) -> bytes:
    """Return an alert as a JSON object, with its keys in the order of the public format.

    Numbers that are not finite and an unknown time become null. If the alert would exceed `max_bytes`, only its first
    contributions (the most important readings) are kept. Without contributions it may still exceed them.

    Args:
        alert: The alert.
        data: The messages or table rows of one poll. The item at the index `alert.message_index` raised the alert; its
            position becomes the field `source`. The field is null if `data` is None, or if the index is negative
            because a time-out raised the alert.
        max_bytes: Largest size of the alert in bytes.
    """
    source = None
    if data is not None and alert.message_index >= 0:
        topic, partition, offset = get_position(data, alert.message_index)
        source = {"topic": topic, "partition": partition, "offset": offset}
    document: dict[str, Any] = {
        "id": alert.id,
        "record": alert.record,
        "raised_at": alert.raised_at,
        "features_seen": alert.features_seen,
        "features_expected": alert.features_expected,
        "time": format_rfc3339(alert.time),
        "p_value": alert.p_value,
        "alpha": alert.alpha,
        "severity": alert.severity,
        "score": alert.score,
        "running_log_likelihood": alert.running_log_likelihood,
        "model": alert.model,
        "source": source,
        "silenced_by": alert.silenced_by,
        **({} if alert.evidence is None else {"evidence": _evidence_to_json(alert.evidence)}),
        **({} if alert.next_reading is None else {"next_reading": alert.next_reading}),
        **({} if alert.fault is None else {"fault": alert.fault}),
        "contributions": [_contribution_to_json(contribution) for contribution in alert.contributions],
    }
    encoded = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    while len(encoded) > max_bytes and document["contributions"]:
        num_kept = len(document["contributions"]) // 2  # halving needs few attempts
        document["contributions"] = document["contributions"][:num_kept]
        encoded = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return encoded


def _evidence_to_json(evidence: AlertCause) -> dict[str, str]:
    """Return which cumulative sum has raised an alert, as a JSON object of the public format."""
    sensor = {} if evidence.sensor is None else {"sensor": evidence.sensor}
    return {"kind": evidence.kind, **sensor}


def _contribution_to_json(contribution: Contribution) -> dict[str, Any]:
    """Return a reading's contribution to an alert (how it explains the alert) as a JSON object of the public format."""
    expected = contribution.expected
    # These keys are left out if they are not known.
    unit = {} if contribution.unit is None else {"unit": contribution.unit}
    time = {} if contribution.time is None else {"time": format_rfc3339(contribution.time)}
    return {
        "feature": contribution.feature,
        "value": contribution.value,
        **unit,
        **time,
        "surprise": contribution.surprise,
        "expected": {"low": expected.low, "median": expected.median, "high": expected.high},
        "attribution": contribution.attribution,
        "leave_one_out": contribution.leave_one_out,
        "relief": contribution.relief,
        "suspect": contribution.suspect,
    }


def encode_drift(notice: DriftNotice) -> bytes:
    """Return a drift notice as a JSON object of the public format.

    Its field `kind` distinguishes it from an alert, which does not have this field.

    Args:
        notice: The notice that a partition's records no longer resemble the calibration records (the normal records
            with which p-values are computed).
    """
    # The public format has names of its own. The value of a test martingale is called wealth there (evidence of drift),
    # and the mean of −ln p over the readings of a feature is called surprise. The level is the evidence at which a
    # notice is sent.
    document = {
        "kind": "drift",
        "id": notice.id,
        "record": notice.record,
        "partition": notice.partition,
        "time": format_rfc3339(notice.time),
        "model": notice.model,
        "level": notice.level,
        "log10_martingale": notice.log10_wealth,
        "records": notice.num_records,
        "features": [
            {"feature": shift.feature, "surprise": shift.recent_neg_log_p, "expected": shift.calibration_neg_log_p}
            for shift in notice.shifted_features
        ],
    }
    return orjson.dumps(document)


def encode_storm(notice: StormNotice) -> bytes:
    """Return a notice that alerts were held back, as a JSON object of the public format.

    Its field `kind` distinguishes it from an alert, which does not have this field.
    """
    document = {
        "kind": "storm",
        "id": notice.id,
        "time": format_rfc3339(notice.time),
        "model": notice.model,
        "held_back": notice.num_held_back,
        "partitions": {str(partition): number for partition, number in sorted(notice.num_by_partition.items())},
        "records": list(notice.records),
        "max_alert_rate": notice.max_rate,
    }
    return orjson.dumps(document)


def get_position(data: Payload, message_index: int) -> tuple[str, int, int]:
    """Return where a message was read, as (topic, partition, offset).

    For a table row these are its file, 0 and its row number within the file.

    Args:
        data: The messages or table rows of one poll.
        message_index: The index of the message or row in `data`.
    """
    match data:
        case Messages():
            return data.topic, int(data.partitions[message_index]), int(data.offsets[message_index])
        case LongRows() if ROW_NUMBER_COLUMN in data.table.schema.names:
            # The rows were reordered or made of other rows, so columns hold the original position of each row.
            row_number = data.table.column(ROW_NUMBER_COLUMN)[message_index].as_py()
            has_files = ROW_FILE_COLUMN in data.table.schema.names
            file = data.table.column(ROW_FILE_COLUMN)[message_index].as_py() if has_files else data.origin
            return file, 0, row_number
        case _:
            return data.origin, 0, data.get_row_number(message_index)
