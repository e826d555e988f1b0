"""JSON messages → events. Refusing is part of the format: whatever the bytes, decoding never raises."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from math import inf, isfinite, nan
from typing import cast

import numpy as np
import orjson
from numpy.typing import NDArray

from deformer_stream.codec.payloads import Messages, Unreadable
from deformer_stream.codec.validation import Refusal, brief, is_unicode
from deformer_stream.codec.timestamps import (
    FIRST_SECOND,
    LAST_SECOND,
    MaxAhead,
    micros,
    micros_of_text,
    sane,
    seconds_of_day,
)
from deformer_stream.codec.windowing import Windows
from deformer_stream.engine.events import NO_TIME, EventBatch, RejectionReason, Rejected
from deformer_stream.model.schema import DAY, Schema, label_of

MAX_TEXT = 1024
"""Longest record id and longest label, in characters."""

TABLE = b"\xff\xff\xff\xff"
"""What an Arrow IPC stream begins with, and no JSON."""

_WORDS = {dict: "an object", list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number"}


@dataclass(frozen=True, slots=True)
class Fields:
    """What the fields of an event are called in the messages (and the columns in a long table)."""

    record: str = "record"
    feature: str = "feature"
    value: str = "value"
    values: str = "values"
    time: str = "time"
    label: str = "label"
    device: str = "device"

    def needed(self, columns: Collection[str], windows: bool) -> tuple[str, ...]:
        """The columns that a long table cannot do without, first the one that says whose a reading is. windows: a
        device and a time stand for a record."""
        if windows and self.record not in columns:
            return self.device, self.feature, self.value, self.time
        return self.record, self.feature, self.value


Tables = Callable[[bytes, bytes | None, int], tuple[list[EventBatch], list[Rejected]]]
"""Decodes a message that is a table, given its key and the broker's time; see `arrow.ArrowDecoder.decode`."""


class MessageDecoder:
    """Decodes `Messages`. `decode` is one tight loop over the common form, a number of a known feature in a message of
    its own; every other form, good or bad, goes through `_readings_of`, which is written to be read; tables go through
    `tables`.

    windows: the record of an event that names none is a window of its device. max_ahead: an event whose own time lies
    further ahead is refused."""

    def __init__(
        self,
        schema: Schema,
        fields: Fields,
        max_bytes: int,
        max_readings: int,
        windows: Windows | None = None,
        max_ahead: MaxAhead | None = None,
        tables: Tables | None = None,
    ) -> None:
        self._tables = tables
        self._schema = schema
        self._fields = fields
        self._max_bytes = max_bytes
        self._max_readings = max_readings
        self._windows = windows
        self._max_ahead = max_ahead
        self._numeric = {f.name: code for code, f in enumerate(schema.features) if f.kind == "continuous"}

    def decode(self, data: Messages) -> tuple[EventBatch, list[Rejected]]:
        """See `Codec.decode`. Cost: about one microsecond per message of one reading."""
        records: list[str] = []
        features: list[int] = []
        values: list[float] = []
        times: list[int] = []
        messages: list[int] = []
        unseen: dict[int, str] = {}
        devices: dict[int, str] = {}
        rejected: list[Rejected] = []

        stamps = sane(data.times)
        broker, latest = stamps.tolist(), self._latest(stamps)
        loads, numeric, max_bytes = orjson.loads, self._numeric, self._max_bytes
        f_record, f_feature, f_value = self._fields.record, self._fields.feature, self._fields.value
        f_values, f_time = self._fields.values, self._fields.time
        for i, payload in enumerate(data.payloads):
            try:
                if len(payload) <= max_bytes:  # type: ignore[arg-type]  # a tombstone is a TypeError, handled below
                    document = loads(payload)  # type: ignore[arg-type]
                    record, value, time = document[f_record], document[f_value], document.get(f_time)
                    code = numeric[document[f_feature]]
                    if (
                        type(record) is str
                        and 0 < len(record) <= MAX_TEXT
                        and (type(value) is float or type(value) is int)
                        and (time is None or (type(time) is float and FIRST_SECOND <= time <= latest[i]))
                        and f_values not in document
                    ):
                        records.append(record)
                        features.append(code)
                        values.append(value)
                        times.append(broker[i] if time is None else round(time * 1e6))
                        messages.append(i)
                        continue
            except (ValueError, KeyError, TypeError, AttributeError):
                pass  # not the common form: `_readings_of` says what it is
            if self._tables is not None and payload is not None and payload[:4] == TABLE:
                parts, refused = self._tables(payload, data.keys[i], broker[i])
                rejected += [replace(one, message=i) for one in refused]
                for part in parts:
                    first = len(records)
                    unseen |= {first + at: text for at, text in part.unseen_labels.items()}
                    if part.windows is not None:
                        devices |= {first + at: name for at, name in enumerate(part.windows.devices) if name}
                    records += part.record_ids
                    features += part.features.tolist()
                    values += part.values.tolist()
                    times += part.times.tolist()
                    messages += [i] * len(part)
                continue
            for reading in self._readings_of(i, payload, data.keys[i], broker[i]):
                if isinstance(reading, Rejected):
                    rejected.append(reading)
                    continue
                record, code, value, label, time, device = reading
                if label is not None:
                    unseen[len(records)] = label
                if device:
                    devices[len(records)] = device
                records.append(record)
                features.append(code)
                values.append(value)
                times.append(time)
                messages.append(i)

        sources, moments = np.asarray(messages, np.int32), np.asarray(times, np.int64)
        windowed = None
        if self._windows is not None and devices:
            windowed = self._windows.of([devices.get(i, "") for i in range(len(records))], moments)
        batch = EventBatch(
            records,
            np.asarray(features, np.int32),
            np.asarray(values, np.float64),
            moments,
            sources,
            np.asarray(data.partitions, np.int32)[sources],
            unseen,
            windowed,
        )
        return batch, rejected

    def _latest(self, broker: NDArray[np.int64]) -> list[float]:
        """The latest time, epoch seconds, that each of N messages may state."""
        if self._max_ahead is None:
            return [LAST_SECOND] * len(broker)
        latest = (self._max_ahead.references(broker) + self._max_ahead.micros) / 1e6
        return cast("list[float]", np.minimum(latest, LAST_SECOND).tolist())

    def _readings_of(
        self, i: int, payload: bytes | None, key: bytes | None, broker: int
    ) -> list[tuple[str, int, float, str | None, int, str] | Rejected]:
        """One message's readings (record, feature code, value, text of an unseen label, time, device or "" where the
        record is no window) and its refusals, one for each reason; at least one of them."""
        if isinstance(payload, Unreadable):
            return [Rejected(i, payload.reason, payload.detail, payload.messages)]
        try:
            document = self._document(payload)
            if self._windows is None or document.get(self._fields.record) is not None:
                record, device = self._id(document, self._fields.record, key), ""
                time, slot = self._time(document, broker), NAMED
            else:
                device = self._id(document, self._fields.device, key)
                time = self._time(document, broker)
                record = window_of(self._windows, self._fields, device, time)
                slot = slot_of(self._schema, time)
            readings = self._readings(document)
        except Refusal as refusal:
            return [Rejected(i, refusal.reason, refusal.detail)]
        result: list[tuple[str, int, float, str | None, int, str] | Rejected] = []
        refused: list[Rejected] = []
        for name, value in readings:
            try:
                code, number, label = self._reading(name, value, slot)
                result.append((record, code, number, label, time, device))
            except Refusal as refusal:
                refused.append(Rejected(i, refusal.reason, refusal.detail))
        return result + Rejected.merged(refused)

    def _document(self, payload: bytes | None) -> dict[str, object]:
        if payload is None:
            raise Refusal(RejectionReason.NOT_JSON, "a tombstone: the message has no value")
        if len(payload) > self._max_bytes:
            raise Refusal(RejectionReason.TOO_LARGE, f"{len(payload)} bytes; at most {self._max_bytes} are accepted")
        try:
            document = orjson.loads(payload)
        except orjson.JSONDecodeError as error:
            document = _lenient(payload, str(error))
        if not isinstance(document, dict):
            raise Refusal(RejectionReason.NOT_JSON, f"{_word(document)} where a JSON object is expected")
        return document

    def _id(self, document: dict[str, object], name: str, key: bytes | None) -> str:
        """The record id, or the device; absent or null, the message's key stands for it, since producers key readings
        by it."""
        text = document.get(name)
        if text is None and key:
            try:
                text = key.decode()
            except UnicodeDecodeError:
                raise Refusal(RejectionReason.MISSING_FIELD, f"no {name!r}, and the key is not UTF-8 text") from None
        if type(text) is int:
            text = str(text)
        if text is None or text == "":
            raise Refusal(RejectionReason.MISSING_FIELD, f"{name!r} is {'empty' if text == '' else 'missing'}")
        if not isinstance(text, str):
            raise Refusal(RejectionReason.WRONG_TYPE, f"{name!r} is {_word(text)}; text is expected")
        if len(text) > MAX_TEXT:
            raise Refusal(RejectionReason.TOO_LARGE, f"{name!r} has {len(text)} characters; at most {MAX_TEXT} are accepted")
        return text

    def _time(self, document: dict[str, object], broker: int) -> int:
        time = document.get(self._fields.time)
        if time is None:
            return broker
        if isinstance(time, str):
            moment = micros_of_text(time)
        elif isinstance(time, bool) or not isinstance(time, int | float):
            raise Refusal(RejectionReason.WRONG_TYPE, f"time is {_word(time)}; epoch seconds or RFC 3339 text is expected")
        else:
            moment = micros(time)
        if self._max_ahead is not None:
            self._max_ahead.check(moment, broker)
        return moment

    def _readings(self, document: dict[str, object]) -> list[tuple[object, object]]:
        fields = self._fields
        many, feature = document.get(fields.values), document.get(fields.feature)
        if many is None:
            if feature is None:
                raise Refusal(RejectionReason.MISSING_FIELD, f"neither {fields.feature!r} nor {fields.values!r} is there")
            if fields.value not in document:
                raise Refusal(RejectionReason.MISSING_FIELD, f"{fields.value!r} is missing")
            return [(feature, document[fields.value])]
        if feature is not None:
            raise Refusal(RejectionReason.WRONG_TYPE, f"both {fields.feature!r} and {fields.values!r}; send one of them")
        if not isinstance(many, dict):
            raise Refusal(RejectionReason.WRONG_TYPE, f"{fields.values!r} is {_word(many)}; an object is expected")
        if not many:
            raise Refusal(RejectionReason.MISSING_FIELD, f"{fields.values!r} is empty")
        if len(many) > self._max_readings:
            raise Refusal(RejectionReason.TOO_LARGE, f"{len(many)} readings; at most {self._max_readings} are accepted")
        return list(many.items())

    def _reading(self, name: object, value: object, slot: int) -> tuple[int, float, str | None]:
        """slot: see `code_of`."""
        if not isinstance(name, str):
            raise Refusal(RejectionReason.WRONG_TYPE, f"{self._fields.feature!r} is {_word(name)}; text is expected")
        code = code_of(self._schema, name, slot)
        if code is None:
            raise unknown_feature(self._schema, name, slot)
        if value is None:
            return code, nan, None
        if isinstance(value, int | float) and not isinstance(value, bool) and not isfinite(value):
            raise Refusal(RejectionReason.NOT_FINITE, f"feature {brief(name)}: {value!r} is not a finite number")
        feature = self._schema.features[code]
        if feature.kind == "discrete":
            if isinstance(value, dict | list):
                raise Refusal(RejectionReason.WRONG_TYPE, f"feature {brief(name)}: {_word(value)} where a label is expected")
            return code, *code_of_label(label_of(value), self._schema.label_codes[code], name)
        if isinstance(value, str) and feature.period == DAY and (seconds := seconds_of_day(value)) is not None:
            return code, seconds, None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Refusal(RejectionReason.WRONG_TYPE, f"feature {brief(name)}: {_word(value)} where a number is expected")
        return code, float(value), None


NAMED = -1
"""The slot of a reading whose feature's name says all: its record is given by name, or no sensor reports twice."""


def slot_of(schema: Schema, time: int) -> int:
    """In which slot of its window a reading of this time (microseconds) is."""
    return schema.window.slot(time) if schema.repeats and schema.window is not None else NAMED


def code_of(schema: Schema, name: str, slot: int) -> int | None:
    """The code of the feature that an event calls by this name. slot: of the window, or `NAMED`."""
    if slot == NAMED:
        return schema.codes.get(name)
    place = schema.places.get(name)
    return None if place is None else place[0] + place[1] * slot


def unknown_feature(schema: Schema, name: str, slot: int) -> Refusal:
    """Why there is no such code."""
    detail = f"feature {brief(name)} is unknown to the model"
    if slot == NAMED and name in schema.places:
        example = schema.names[schema.places[name][0]]
        detail += f", which knows its slots: send device and time in place of the record, or name it {brief(example)}"
    return Refusal(RejectionReason.UNKNOWN_FEATURE, detail)


def window_of(windows: Windows, fields: Fields, device: str, time: int) -> str:
    """The id of the device's window around this time. Raises `Refusal`."""
    if time == NO_TIME:
        raise Refusal(RejectionReason.MISSING_FIELD, f"{fields.time!r} is missing: without it there is no window to be in")
    record = windows.record(device, time)
    if record is None:
        raise Refusal(RejectionReason.WRONG_TYPE, "time lies in a window that began before the year 1")
    if len(record) > MAX_TEXT:
        detail = f"{fields.device!r} makes an id of {len(record)} characters; at most {MAX_TEXT} are accepted"
        raise Refusal(RejectionReason.TOO_LARGE, detail)
    return record


def code_of_label(text: str, labels: dict[str, int], name: str) -> tuple[float, str | None]:
    """A label's code, or the number of labels together with the text of a label never seen in training. Raises
    `Refusal`."""
    code = labels.get(text)
    if code is not None:
        return code, None
    if not is_unicode(text):
        raise Refusal(RejectionReason.WRONG_TYPE, f"feature {brief(name)}: a label that is no UTF-8 text")
    if len(text) > MAX_TEXT:
        raise Refusal(
            RejectionReason.TOO_LARGE,
            f"feature {brief(name)}: a label of {len(text)} characters; at most {MAX_TEXT} are accepted",
        )
    return len(labels), text


def _word(value: object) -> str:
    return "null" if value is None else _WORDS[type(value)]


def _lenient(payload: bytes, error: str) -> object:
    """What strict decoding refused, decoded as Python's `json` writes it (`NaN`, `Infinity`, numbers beyond float64),
    so that `_reading` can name the feature that is not finite. Raises `Refusal` where that fails too."""
    try:
        document = json.loads(payload.decode(), parse_int=_integer)
        orjson.dumps(document)  # fails for lone surrogates and deep nesting, which could never be written again
    except (ValueError, TypeError, RecursionError):
        raise Refusal(RejectionReason.NOT_JSON, error.splitlines()[0] if error else "not JSON") from None
    return document


def _integer(text: str) -> int | float:
    """Like the strict decoder: exact within 64 bits, a float beyond, infinite past float64 (`int` would refuse long
    texts)."""
    if len(text) > 400:
        return inf
    exact = int(text)
    return exact if -(2**63) <= exact < 2**64 else float(text)
