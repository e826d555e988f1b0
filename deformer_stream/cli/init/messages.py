"""Convert sampled JSON messages of a topic to a long table, with one row per reading, and guess the names of fields."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from deformer_stream.errors import InputError

_SYNONYMS = {
    "record_field": ("record", "record_id", "batch", "batch_id", "order", "run", "run_id", "journey"),
    "device_field": (
        "device",
        "device_id",
        "machine",
        "machine_id",
        "asset",
        "asset_id",
        "equipment",
        "unit",
        "source",
    ),
    "feature_field": (
        "feature",
        "sensor",
        "sensor_id",
        "tag",
        "tag_name",
        "signal",
        "metric",
        "name",
        "point",
        "channel",
    ),
    "value_field": ("value", "val", "v", "reading", "measurement"),
    "values_field": ("values", "readings", "measurements", "fields", "data", "payload"),
    "time_field": ("time", "timestamp", "ts", "event_time", "datetime", "t"),
}
"""By option that names a field of messages, the names that such a field often has; the first one is the default."""

Message = tuple[bytes, int]
"""The value of a message, and its timestamp in milliseconds since 1970."""


def convert_to_table(messages: Sequence[Message], topic: str) -> tuple[pa.Table, dict[str, str]]:
    """Return the readings of messages as a long table, and the options that name fields with unusual names.

    Args:
        messages: The messages. Those that are not JSON objects with readings are left out.
        topic: The topic, for error messages.

    Returns:
        A table with the columns device or record (or both), feature, value and time; and by option, such as
        "value_field", the name of the field.

    Raises:
        InputError: No message is a reading.
    """
    objects = [entry for value, milliseconds in messages if (entry := _parse(value, milliseconds)) is not None]
    if not objects:
        what = "is not a JSON object" if messages else "has arrived"
        raise InputError(
            f"topic {topic}: {'no message' if not messages else 'each message'} {what}; send readings such as "
            '{"device": "pump-7", "feature": "flow", "value": 20.1, "time": "2026-01-01T00:00:00Z"}, or add --listen 1m'
        )
    counts = Counter(name for entry, _ in objects for name in entry)
    field_by_option = _guess_fields(counts, objects)
    rows = [row for entry, milliseconds in objects for row in _list_readings(entry, milliseconds, field_by_option)]
    if not rows:
        fields = ", ".join(sorted(counts))
        raise InputError(
            f"topic {topic}: the messages have the fields {fields}, which are no readings; send the fields device (or "
            "record), feature, value and time, or an object of values by feature"
        )
    columns: dict[str, pa.Array] = {}
    for column in ("record", "device"):
        if any(row[column] is not None for row in rows):
            columns[column] = pa.array([row[column] for row in rows], pa.string())
    columns["feature"] = pa.array([row["feature"] for row in rows], pa.string())
    values = [row["value"] for row in rows]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        columns["value"] = pa.array([float(value) for value in values], pa.float64())
    else:
        columns["value"] = pa.array([value if isinstance(value, str) else json.dumps(value) for value in values])
    columns["time"] = _convert_times([row["time"] for row in rows])
    options = {option: name for option, name in field_by_option.items() if name != _SYNONYMS[option][0]}
    return pa.table(columns), options


def _parse(value: bytes, milliseconds: int) -> tuple[dict[str, Any], int] | None:
    """Return a message as a JSON object and its timestamp; None if it is no JSON object."""
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return (parsed, milliseconds) if isinstance(parsed, dict) else None


def _guess_fields(counts: Counter[str], objects: Sequence[tuple[dict[str, Any], int]]) -> dict[str, str]:
    """Return by option the name of the field that messages have.

    Args:
        counts: Number of messages by name of field.
        objects: The messages, with their timestamps.
    """
    fields: dict[str, str] = {}
    for option, synonyms in _SYNONYMS.items():
        by_lower_name = {name.lower(): name for name in counts if name not in fields.values()}
        for synonym in synonyms:
            name = by_lower_name.get(synonym)
            is_object = name is not None and any(isinstance(entry.get(name), dict) for entry, _ in objects)
            if name is not None and is_object == (option == "values_field"):
                fields[option] = name
                break
    return fields


def _list_readings(
    entry: Mapping[str, Any], milliseconds: int, field_by_option: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the readings of one message: its record, device, feature, value and time; empty if it is no reading."""

    def get(option: str) -> Any:
        """Return the value of a field of the message, None if the messages have no such field."""
        return entry.get(field_by_option.get(option, ""))

    owner: dict[str, Any] = {
        name: None if get(option) is None else str(get(option))
        for name, option in (("record", "record_field"), ("device", "device_field"))
    }
    if owner["record"] is None and owner["device"] is None:
        return []
    time = get("time_field")
    owner["time"] = milliseconds / 1000 if time is None else time
    values = get("values_field")
    if not isinstance(values, dict):
        feature = get("feature_field")
        values = {} if feature is None else {str(feature): get("value_field")}
    return [
        {**owner, "feature": feature, "value": value}
        for feature, value in values.items()
        if isinstance(value, int | float | str)
    ]


def _convert_times(times: Sequence[Any]) -> pa.Array:
    """Return times, which are seconds since 1970 or texts, as one column of numbers or of texts."""
    if all(isinstance(time, int | float) for time in times):
        return pa.array([float(time) for time in times], pa.float64())
    return pa.array([str(time) for time in times], pa.string())
