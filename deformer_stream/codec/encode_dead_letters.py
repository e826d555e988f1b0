"""Encoding of dead letters, the reports of messages that were rejected, as JSON.

A dead letter states the source position of its message, as an alert does.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import orjson
import pyarrow as pa

from deformer_stream.codec.columns import decode_dictionary, is_text, to_python_values
from deformer_stream.codec.encode_alerts import get_position
from deformer_stream.codec.payloads import Messages, Payload, UnreadablePayload, WideRows
from deformer_stream.codec.tables import ADDED_COLUMNS
from deformer_stream.engine.events import Rejection


def encode_rejected(rejection: Rejection, data: Payload) -> bytes:
    """Return a dead letter (the report of a rejected message) as a JSON object.

    Its fields are the reason, the detail, the source position, the key and the payload of the message. A key or a
    payload that is not UTF-8 text is written in base64, in the field `key_base64` or `payload_base64`.

    Args:
        rejection: Which message was rejected and why.
        data: The messages or table rows of one poll. The item at the index `rejection.message_index` was rejected.
    """
    topic, partition, offset = get_position(data, rejection.message_index)
    key, payload = get_message(data, rejection.message_index)
    document: dict[str, Any] = {
        "reason": str(rejection.reason),
        "detail": rejection.detail,
        "source": {"topic": topic, "partition": partition, "offset": offset},
    }
    for name, content in (("key", key), ("payload", payload)):
        if content is None:  # a message without a key
            document[name] = None
            continue
        try:
            document[name] = content.decode()
        except UnicodeDecodeError:
            document[f"{name}_base64"] = base64.b64encode(content).decode()
    return orjson.dumps(document)


def get_message(data: Payload, message_index: int) -> tuple[bytes | None, bytes]:
    """Return the key and the value of a message as they were received. A missing value becomes empty bytes.

    For a table row these are its record id (None if the table has one reading per row) and the row as a JSON object.

    Args:
        data: The messages or table rows of one poll.
        message_index: The index of the message or row in `data`.
    """
    if isinstance(data, Messages):
        payload = data.payloads[message_index]
        return data.keys[message_index], payload.content if isinstance(payload, UnreadablePayload) else payload or b""
    row = {
        name: _cell_to_json(column.slice(message_index, 1))
        for name, column in zip(data.table.schema.names, data.table.columns, strict=True)
        if name not in ADDED_COLUMNS
    }
    record_id = data.record_ids[message_index] if isinstance(data, WideRows) else None
    key = record_id.encode("utf-8", "surrogateescape") if record_id else None
    # Values that JSON cannot express, such as decimals, are written as text. A nested cell may have keys of any type.
    return key, orjson.dumps(row, default=str, option=orjson.OPT_NON_STR_KEYS)


def _cell_to_json(cell: pa.Array) -> Any:
    """Return a cell of a rejected table row as a value that orjson can encode, for a person to read.

    Invalid UTF-8 is escaped, and a number that is not finite becomes null. A value that Python cannot express is
    replaced by the name of its type in parentheses.

    Args:
        cell: A column with this cell only.
    """
    try:
        if pa.types.is_timestamp(cell.type):
            cell = cell.cast(pa.timestamp("us", cell.type.tz), safe=False)  # Python has no nanoseconds
        value = cell[0].as_py()
        # `get_message` will encode the value with the same options. This raises if the value cannot be encoded.
        orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS)
    except (ValueError, TypeError, ArithmeticError, LookupError, pa.ArrowException):
        if is_text(cell.type):
            return to_python_values(decode_dictionary(cell))[0].encode("utf-8", "backslashreplace").decode()
        return f"({cell.type})"
    is_not_finite = isinstance(value, float) and not math.isfinite(value)
    return None if is_not_finite else value
