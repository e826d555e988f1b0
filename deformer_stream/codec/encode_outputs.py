"""What leaves: alerts and dead letters as JSON, and where in the input a thing came from."""

from __future__ import annotations

import base64
import math
from typing import Any

import orjson
import pyarrow as pa

from deformer_stream.calibration.drift_state import DriftNotice
from deformer_stream.codec.columns import to_python_values, decode_dictionary, is_text
from deformer_stream.codec.payloads import LongRows, Messages, Payload, WideRows
from deformer_stream.codec.tables import ROW_FILE_COLUMN, ROW_NUMBER_COLUMN
from deformer_stream.codec.timestamps import format_rfc3339
from deformer_stream.engine.events import Alert, Rejection

MAX_ALERT_BYTES = 2**19
"""Bytes of an alert, half of what a topic takes by default: labels come from outside and may be long and many."""


def encode_alert(alert: Alert, data: Payload | None) -> bytes:
    """The alert as JSON, its keys in the order of the public format. A number that is not finite is null, as is an
    unknown time. Of contributions that would make it longer than `MAX_ALERT_BYTES` the first ones are kept.

    `data` is the poll that `alert.message` points into; without it (or with a negative message) `source` is null.
    """
    source = None
    if data is not None and alert.message_index >= 0:
        source = dict(zip(("topic", "partition", "offset"), get_position(data, alert.message_index), strict=True))
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
        "contributions": [
            {
                "feature": c.feature,
                "value": c.value,
                "surprise": c.surprise,
                "expected": {"low": c.expected.low, "median": c.expected.median, "high": c.expected.high},
                "attribution": c.attribution,
                "leave_one_out": c.leave_one_out,
                "relief": c.relief,
                "suspect": c.suspect,
            }
            for c in alert.contributions
        ],
    }
    while len(line := orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)) > MAX_ALERT_BYTES:
        document["contributions"] = document["contributions"][: len(document["contributions"]) // 2]
    return line


def encode_drift(notice: DriftNotice) -> bytes:
    """The notice as JSON. `kind` tells it from alerts, which have none."""
    return orjson.dumps(
        {
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
                {"feature": one.feature, "surprise": one.recent_neg_log_p, "expected": one.calibration_neg_log_p} for one in notice.shifted_features
            ],
        }
    )


def encode_rejected(rejected: Rejection, data: Payload) -> bytes:
    """A dead letter as JSON: reason, detail, source position, and the message as text (base64 where it is not
    UTF-8)."""
    topic, partition, offset = get_position(data, rejected.message_index)
    key, payload = get_message(data, rejected.message_index)
    letter: dict[str, Any] = {
        "reason": str(rejected.reason),
        "detail": rejected.detail,
        "source": {"topic": topic, "partition": partition, "offset": offset},
    }
    for name, content in (("key", key), ("payload", payload)):
        try:
            letter[name] = None if content is None else content.decode()
        except UnicodeDecodeError:
            letter[f"{name}_base64"] = base64.b64encode(content or b"").decode()
    return orjson.dumps(letter)


def get_position(data: Payload, message: int) -> tuple[str, int, int]:
    """Topic, partition and offset of a message; for a table its file, 0 and the row number in the file."""
    match data:
        case Messages():
            return data.topic, int(data.partitions[message]), int(data.offsets[message])
        case LongRows() if ROW_NUMBER_COLUMN in data.table.schema.names:
            row, file = (data.table.column(name)[message].as_py() for name in (ROW_NUMBER_COLUMN, ROW_FILE_COLUMN))
            return file, 0, row
        case _:
            return data.origin, 0, data.first_row + message


def get_message(data: Payload, message: int) -> tuple[bytes | None, bytes]:
    """Key and value of a message as they came; of a table's row its record id and the row as JSON."""
    if isinstance(data, Messages):
        return data.keys[message], data.payloads[message] or b""
    row = {
        name: _shown(column.slice(message, 1))
        for name, column in zip(data.table.schema.names, data.table.columns, strict=True)
        if name not in (ROW_NUMBER_COLUMN, ROW_FILE_COLUMN)
    }
    key = data.record_ids[message] if isinstance(data, WideRows) else None
    document = orjson.dumps(row, default=str, option=orjson.OPT_NON_STR_KEYS)
    return (key.encode("utf-8", "surrogateescape") if key else None), document


def _shown(cell: pa.Array) -> Any:
    """A cell as a person would want to see it; what Python cannot express is named by its type."""
    try:
        if pa.types.is_timestamp(cell.type):
            cell = cell.cast(pa.timestamp("us", cell.type.tz), safe=False)  # Python knows no nanoseconds
        value = cell[0].as_py()
        orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS)
    except (ValueError, TypeError, ArithmeticError, LookupError, pa.ArrowException):
        if is_text(cell.type):
            return to_python_values(decode_dictionary(cell))[0].encode("utf-8", "backslashreplace").decode()
        return f"({cell.type})"
    return None if isinstance(value, float) and not math.isfinite(value) else value
