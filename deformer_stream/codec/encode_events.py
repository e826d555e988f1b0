"""Single readings gathered into messages of many: JSON objects of a record each, or Arrow streams of many records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Literal, NamedTuple

import orjson
import pyarrow as pa

from deformer_stream.model.schema import label_of

Packing = Literal["json", "json-many", "arrow"]

GATHERED = 1000
"""Readings that are gathered before they go out."""
EXACT = 2**53
"""Whole numbers up to here are what they were as floating-point numbers, too."""


def together(rate: float | None) -> int:
    """Readings to gather where so many come a second: at a slow rate a tenth of a second's worth."""
    return GATHERED if rate is None else max(1, min(GATHERED, int(rate / 10)))


class Packed(NamedTuple):
    """A message on its way. partition: where it belongs if no key says so. readings: how many are in it."""

    key: bytes | None
    value: bytes
    partition: int | None = None
    readings: int = 1


def packed(
    messages: Iterable[tuple[bytes | None, bytes]],
    packing: Packing,
    gathered: int = GATHERED,
    partition_of: Callable[[bytes | None], int] | None = None,
) -> Iterator[Packed]:
    """The readings of these JSON messages, given with their keys, in fewer messages; each record's in their order.

    What is no single reading of a named record with a time in seconds, if any, passes as it is, after the readings
    before it. partition_of: of a key; the readings of a stream belong to one partition, so that each record stays in
    its own."""
    if packing == "json":
        yield from (Packed(key, value) for key, value in messages)
        return
    place = partition_of or (lambda _: 0)
    source = iter(messages)
    while some := list(islice(source, gathered)):
        waiting: list[tuple[bytes | None, dict[str, Any]]] = []
        for key, value in some:
            reading = _reading(value)
            if reading is not None:
                waiting.append((key, reading))
                continue
            yield from _sent(waiting, packing, place)
            waiting = []
            yield Packed(key, value)
        yield from _sent(waiting, packing, place)


def _reading(value: bytes) -> dict[str, Any] | None:
    try:
        document = orjson.loads(value)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(document, dict) or not {"record", "feature", "value"} <= document.keys() <= _KNOWN:
        return None
    texts = isinstance(document["record"], str) and isinstance(document["feature"], str)
    time = document.get("time")
    numeric = time is None or (isinstance(time, int | float) and not isinstance(time, bool))
    return document if texts and numeric and not isinstance(document["value"], dict | list) else None


_KNOWN = {"record", "feature", "value", "time"}


def _sent(
    readings: list[tuple[bytes | None, dict[str, Any]]], packing: Packing, place: Callable[[bytes | None], int]
) -> Iterator[Packed]:
    if packing == "arrow":
        parts: dict[int, list[dict[str, Any]]] = {}
        for key, reading in readings:
            parts.setdefault(place(key), []).append(reading)
        for partition, rows in parts.items():
            yield Packed(None, arrow_stream(rows), partition, len(rows))
        return
    objects: dict[tuple[bytes | None, str], list[dict[str, Any]]] = {}
    for key, reading in readings:
        of_record = objects.setdefault((key, reading["record"]), [])
        if not of_record or reading["feature"] in of_record[-1]["values"]:
            of_record.append({"record": reading["record"], "time": None, "values": {}})
        of_record[-1]["values"][reading["feature"]] = reading["value"]
        of_record[-1]["time"] = reading.get("time")  # by then all of them are known
    for (key, _), documents in objects.items():
        for document in documents:
            yield Packed(key, orjson.dumps(document), None, len(document["values"]))


def arrow_stream(readings: list[dict[str, Any]]) -> bytes:
    """Readings (record, feature, value and perhaps time) as the rows of an Arrow IPC stream."""
    values = [reading["value"] for reading in readings]
    plain = all(v is None or (type(v) in (int, float) and abs(v) <= EXACT) for v in values)
    numbers = (
        pa.array(values, pa.float64()) if plain else pa.array([None if v is None else label_of(v) for v in values])
    )
    columns = {
        "record": pa.array([reading["record"] for reading in readings]).dictionary_encode(),
        "feature": pa.array([reading["feature"] for reading in readings]).dictionary_encode(),
        "value": numbers,
        "time": pa.array([reading.get("time") for reading in readings], pa.float64()),
    }
    batch = pa.record_batch(list(columns.values()), list(columns))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())
