"""Encoding of events for `deformer-stream produce`: single readings are packed into messages with many readings.

Messages with many readings cost the broker and the consumer less work per reading. A message holds one reading (JSON),
several readings of one record or of one device at one time (JSON), or many readings (an Arrow stream).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Literal, NamedTuple

import orjson
import pyarrow as pa

from deformer_stream.codec.number_texts import MAX_EXACT_INTEGER
from deformer_stream.codec.validation import is_json_number
from deformer_stream.model.schema import format_label

Packing = Literal["json", "json-many", "arrow"]

MAX_GROUP_SIZE = 1000
"""Maximum number of readings that are collected before they are packed into messages and sent."""

_REQUIRED_FIELDS = {"feature", "value"}
_FIELDS = {*_REQUIRED_FIELDS, "time"}
_OWNER_FIELDS = ("record", "device")
"""What a reading belongs to: a record, or a device whose records are windows of time."""


def choose_group_size(rate: float | None) -> int:
    """Return how many readings to collect before they are packed into messages and sent.

    It is the number of readings in a tenth of a second, so that no reading is delayed for longer. It is at least 1 and
    at most `MAX_GROUP_SIZE`.

    Args:
        rate: Readings per second at which the messages are sent, or None for no limit.
    """
    return MAX_GROUP_SIZE if rate is None else max(1, min(MAX_GROUP_SIZE, int(rate / 10)))


class OutgoingMessage(NamedTuple):
    """A message to be sent.

    Attributes:
        key: The message key, or None.
        value: The message value.
        partition: The partition to send to if there is no key, or None to let the producer choose.
        num_readings: How many readings the message holds, for progress reports.
    """

    key: bytes | None
    value: bytes
    partition: int | None = None
    num_readings: int = 1


def pack_readings(
    messages: Iterable[tuple[bytes | None, bytes]],
    packing: Packing,
    group_size: int = MAX_GROUP_SIZE,
    partition_of: Callable[[bytes | None], int] | None = None,
    model_field: str | None = None,
) -> Iterator[OutgoingMessage]:
    """Pack JSON messages of one reading each into fewer messages, keeping the order within each record.

    A message that is not one reading of a named record or device (for example several readings, or a time as text) is
    yielded unchanged, after the readings before it.

    Args:
        messages: The key (or None) and the value of each message.
        packing: "json" yields every message unchanged. "json-many" makes one JSON object of the readings of each record
            in a group, or of each device and time if records are windows of time. "arrow" makes one Arrow stream of all
            readings of each partition in a group.
        group_size: The number of consecutive messages in a group, which are collected before they are packed.
        partition_of: Returns the partition of a message key. An Arrow stream holds the readings of one partition only,
            so that each record stays in its partition. The default is one partition, number 0.
        model_field: A further field of readings that is kept: the one by which a consumer chooses among its models.

    Yields:
        The messages to send.
    """
    if packing == "json":
        yield from (OutgoingMessage(key, value) for key, value in messages)
        return
    find_partition = partition_of or (lambda _: 0)
    remaining_messages = iter(messages)
    while group := list(islice(remaining_messages, group_size)):
        readings: list[tuple[bytes | None, dict[str, Any]]] = []
        for key, value in group:
            reading = _parse_reading(value, model_field)
            if reading is not None:
                readings.append((key, reading))
                continue
            # This message cannot be packed. To keep the order, it is sent after the readings that came before it.
            yield from _pack_group(readings, packing, find_partition, model_field)
            readings = []
            yield OutgoingMessage(key, value)
        yield from _pack_group(readings, packing, find_partition, model_field)


def _parse_reading(value: bytes, model_field: str | None) -> dict[str, Any] | None:
    """Return the fields of a message if it can be packed with others, else None.

    It can be packed if it is one reading of a named record or device. It must be a JSON object with the fields
    `feature`, `value`, and `record` or `device`. It may have a numeric `time` and the field that determines the model
    in addition, and no other field.

    Args:
        value: The value of the message.
        model_field: The field that determines the model, None if there is none.
    """
    try:
        document = orjson.loads(value)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(document, dict):
        return None
    owners = [name for name in _OWNER_FIELDS if name in document]
    if len(owners) != 1 or not _REQUIRED_FIELDS <= document.keys() - owners <= _FIELDS | {model_field}:
        return None
    time = document.get("time")
    has_text_names = isinstance(document[owners[0]], str) and isinstance(document["feature"], str)
    has_numeric_time = time is None or is_json_number(time)
    has_scalar_values = not any(isinstance(document.get(name), dict | list) for name in ("value", model_field))
    return document if has_text_names and has_numeric_time and has_scalar_values else None


def _pack_group(
    readings: list[tuple[bytes | None, dict[str, Any]]],
    packing: Packing,
    find_partition: Callable[[bytes | None], int],
    model_field: str | None,
) -> Iterator[OutgoingMessage]:
    """Pack a group of readings into messages.

    Args:
        readings: The message key and the fields of each reading, in order of arrival.
        packing: "arrow" for one Arrow stream per partition. Otherwise one JSON object per record, or per device and
            time. A record with several values of a feature needs several objects, because an object holds each feature
            once.
        find_partition: Returns the partition of a message key.
        model_field: The field that determines the model, None if there is none. An object has readings of one value.

    Yields:
        The messages in the order of their first readings.
    """
    if packing == "arrow":
        readings_by_partition: dict[int, list[dict[str, Any]]] = {}
        for key, reading in readings:
            readings_by_partition.setdefault(find_partition(key), []).append(reading)
        for partition, partition_readings in readings_by_partition.items():
            value = encode_arrow_stream(partition_readings, model_field)
            yield OutgoingMessage(None, value, partition, len(partition_readings))
        return
    documents_by_owner: dict[tuple[bytes | None, str, str, float | None, bytes], list[dict[str, Any]]] = {}
    for key, reading in readings:
        owner = _get_owner_field(reading)
        # Readings of a device at other times could belong to other windows. The time of a record is that of its last
        # reading: by then all values are known.
        time = reading.get("time")
        # As JSON, so that 1, 1.0 and true differ.
        model_fields = {model_field: reading[model_field]} if model_field in reading else {}
        key_time = time if owner == "device" else None
        documents = documents_by_owner.setdefault(
            (key, owner, reading[owner], key_time, orjson.dumps(model_fields)), []
        )
        # A second value of a feature needs a second document, because an object holds each feature once.
        if not documents or reading["feature"] in documents[-1]["values"]:
            documents.append({owner: reading[owner], **model_fields, "time": None, "values": {}})
        documents[-1]["values"][reading["feature"]] = reading["value"]
        documents[-1]["time"] = time
    for (key, *_), documents in documents_by_owner.items():
        for document in documents:
            yield OutgoingMessage(key, orjson.dumps(document), None, len(document["values"]))


def _get_owner_field(reading: dict[str, Any]) -> str:
    """Return the field that says to what a reading belongs, which it has: "record" or "device"."""
    return next(name for name in _OWNER_FIELDS if name in reading)


def encode_arrow_stream(readings: list[dict[str, Any]], model_field: str | None = None) -> bytes:
    """Return readings as an Arrow IPC stream with one reading per row.

    The column `value` is float64 if all values are numbers that float64 represents exactly. Otherwise it holds the
    values as texts, in which -0.0 becomes 0. Null values stay null.

    Args:
        readings: The fields of each reading: `record` or `device`, `feature`, `value` and perhaps `time` (seconds since
            1970).
        model_field: The field that determines the model, None if there is none. It becomes a column of text.
    """
    values = [reading["value"] for reading in readings]
    # Booleans are labels. `isinstance` would accept them as integers, so the exact type is compared. Integers beyond
    # `MAX_EXACT_INTEGER` would be rounded in float64.
    fits_float64 = all(
        value is None or (type(value) in (int, float) and abs(value) <= MAX_EXACT_INTEGER) for value in values
    )
    if fits_float64:
        value_column = pa.array(values, pa.float64())
    else:
        value_column = pa.array([None if value is None else format_label(value) for value in values])
    owners = {name for reading in readings for name in _OWNER_FIELDS if name in reading}
    columns = {
        **{
            name: pa.array([reading.get(name) for reading in readings], pa.string()).dictionary_encode()
            for name in sorted(owners)
        },
        **({} if model_field is None or model_field in owners else {model_field: _list_models(readings, model_field)}),
        "feature": pa.array([reading["feature"] for reading in readings]).dictionary_encode(),
        "value": value_column,
        "time": pa.array([reading.get("time") for reading in readings], pa.float64()),
    }
    batch = pa.record_batch(list(columns.values()), list(columns))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def _list_models(readings: list[dict[str, Any]], model_field: str) -> pa.Array:
    """Return the field that determines the model as an Arrow array of text, with a null for each reading without it.

    Args:
        readings: The fields of each reading.
        model_field: Name of the field.
    """
    values = [reading.get(model_field) for reading in readings]
    return pa.array(
        [None if value is None else format_label(value) for value in values], pa.string()
    ).dictionary_encode()
