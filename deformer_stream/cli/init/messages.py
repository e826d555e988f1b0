"""Convert JSON messages of a topic, or JSON lines, to a long table with one row per reading, and guess field names."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import pyarrow as pa

from deformer_stream.codec.timestamps import guess_unit
from deformer_stream.codec.validation import is_json_number
from deformer_stream.durations import UNITS_PER_SECOND, TimeUnit
from deformer_stream.errors import InputError
from deformer_stream.model.schema import format_label

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

ROWS_PER_CHUNK = 10_000
"""Number of messages that are converted at a time. The first ones determine the names of the fields."""

Message = tuple[bytes, int | None]
"""The value of a message, and its timestamp in milliseconds since 1970, None for a line of a file."""


@dataclass(frozen=True, slots=True)
class ConvertedMessages:
    """The readings of messages.

    Attributes:
        table: A row for each reading, with the columns device or record (or both), feature, value, and time if the
            messages have times.
        field_by_option: The options that name fields with unusual names, such as "value_field", and these names.
        time_unit: The unit of times that are numbers.
        num_messages: Number of messages.
        num_left_out: How many of them are no readings.
    """

    table: pa.Table
    field_by_option: Mapping[str, str]
    time_unit: TimeUnit
    num_messages: int
    num_left_out: int


def convert_to_table(messages: Iterable[Message], origin: str, unit: TimeUnit = "s") -> ConvertedMessages:
    """Return the readings of messages as a long table, and the options that name fields with unusual names.

    Args:
        messages: The messages. Those that are not JSON objects with readings are left out.
        origin: The topic or the file, for error messages.
        unit: The unit of times that are numbers. Seconds are replaced by another unit if they would be out of range.

    Raises:
        InputError: No message is a reading.
    """
    remaining = iter(messages)
    field_by_option: dict[str, str] = {}
    time_unit = unit
    known_fields: set[str] = set()
    num_messages = num_readable = 0
    parts: list[pa.Table] = []
    while chunk := list(itertools.islice(remaining, ROWS_PER_CHUNK)):
        objects = [entry for value, milliseconds in chunk if (entry := _parse(value, milliseconds)) is not None]
        num_messages += len(chunk)
        if not parts:
            counts = Counter(name for entry, _ in objects for name in entry)
            field_by_option = _guess_fields(counts, objects)
            times = [entry.get(field_by_option.get("time_field", "")) for entry, _ in objects]
            if unit == "s":
                time_unit = guess_unit([time for time in times if is_json_number(time)])
            known_fields.update(counts)
        readings = [_list_readings(entry, milliseconds, field_by_option, time_unit) for entry, milliseconds in objects]
        num_readable += sum(map(bool, readings))
        if rows := list(itertools.chain.from_iterable(readings)):
            parts.append(_make_table(rows))
    if not parts:
        raise _make_error(origin, num_messages, known_fields)
    options = {option: name for option, name in field_by_option.items() if name != _SYNONYMS[option][0]}
    return ConvertedMessages(_concatenate(parts), options, time_unit, num_messages, num_messages - num_readable)


def _make_error(origin: str, num_messages: int, fields: Iterable[str]) -> InputError:
    """Return the error that no message is a reading.

    Args:
        origin: The topic or the file.
        num_messages: Number of messages.
        fields: The fields of the first messages; empty if these are not JSON objects.
    """
    names = ", ".join(sorted(fields))
    if names:
        return InputError(
            f"{origin}: the messages have the fields {names}, which are no readings; readings have the fields device "
            "(or record), feature, value and time, or an object of values by feature"
        )
    what = "no message is a JSON object" if num_messages else "there is no message"
    return InputError(
        f"{origin}: {what}; give readings such as "
        '{"device": "pump-7", "feature": "flow", "value": 20.1, "time": "2026-01-01T00:00:00Z"}'
    )


def _make_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return readings as a table. Values and times are numbers, or texts if one of them is a text."""
    columns = {name: pa.array([row[name] for row in rows], pa.string()) for name in ("record", "device", "feature")}
    values, times = [row["value"] for row in rows], [row["time"] for row in rows]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        columns["value"] = pa.array(map(float, values), pa.float64())
    else:
        columns["value"] = _format_cells(values)
    has_numbers = all(time is None or isinstance(time, int | float) for time in times)
    if has_numbers:
        columns["time"] = pa.array([None if time is None else float(time) for time in times], pa.float64())
    else:
        columns["time"] = _format_cells(times)
    return pa.table(columns)


def _format_cells(cells: Iterable[Any]) -> pa.Array:
    """Return values or times as texts: a number that is whole without a fraction, and null for None."""
    return pa.array([None if cell is None else format_label(cell) for cell in cells], pa.string())


def _concatenate(parts: Sequence[pa.Table]) -> pa.Table:
    """Return tables of readings as one, without the columns of records, devices or times that have no value."""
    columns: dict[str, pa.ChunkedArray] = {}
    for name in parts[0].column_names:
        arrays = [part.column(name) for part in parts]
        if any(pa.types.is_string(array.type) for array in arrays):
            arrays = [
                a if pa.types.is_string(a.type) else pa.chunked_array([_format_cells(a.to_pylist())]) for a in arrays
            ]
        column = pa.chunked_array([chunk for array in arrays for chunk in array.chunks])
        if name in ("feature", "value") or column.null_count < len(column):
            columns[name] = column
    return pa.table(columns)


def _parse(value: bytes, milliseconds: int | None) -> tuple[dict[str, Any], int | None] | None:
    """Return a message as a JSON object and its timestamp; None if it is no JSON object."""
    try:
        parsed = orjson.loads(value)
    except orjson.JSONDecodeError:
        try:  # JSON as Python writes it, with NaN; a reading that is not finite is left out
            parsed = json.loads(value)
            orjson.dumps(parsed)  # raises for lone surrogates
        except (ValueError, TypeError, RecursionError):
            return None
    return (parsed, milliseconds) if isinstance(parsed, dict) else None


def _guess_fields(counts: Counter[str], objects: Sequence[tuple[dict[str, Any], int | None]]) -> dict[str, str]:
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
    entry: Mapping[str, Any], milliseconds: int | None, field_by_option: Mapping[str, str], time_unit: TimeUnit
) -> list[dict[str, Any]]:
    """Return the readings of one message: its record, device, feature, value and time; empty if it is no reading.

    A message without a time gets its timestamp, `milliseconds`, in the unit of the other times.
    """

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
    if time is None and milliseconds is not None:
        time = milliseconds / 1000 * UNITS_PER_SECOND[time_unit]
    owner["time"] = time
    values = get("values_field")
    if not isinstance(values, dict):
        feature = get("feature_field")
        values = {} if feature is None else {str(feature): get("value_field")}
    return [
        {**owner, "feature": feature, "value": value}
        for feature, value in values.items()
        if isinstance(value, str) or (isinstance(value, int | float) and math.isfinite(value))
    ]
