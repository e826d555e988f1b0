"""Decoder for JSON messages: message bytes in, one `EventBatch` and a list of rejections out.

`MessageDecoder` has a fast path for the common message: one number of a known feature, parsed by msgspec. Every other
message takes an exact path: orjson parses it, and `DocumentReader` checks each field and states the reason if the
document must be rejected. The library's `Scorer.update` uses `DocumentReader` as well, with Python values in place of
JSON. Decoding never raises, whatever the bytes are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf, isfinite, nan
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from deformer_stream.codec.fill_values import list_fill_values
from deformer_stream.codec.labels import encode_label
from deformer_stream.codec.number_texts import parse_exact_number
from deformer_stream.codec.payloads import Messages, UnreadablePayload, is_arrow_stream
from deformer_stream.codec.timestamps import (
    DEFAULT_TIME_FORMAT,
    MAX_SECOND,
    MIN_SECOND,
    FutureTimeLimit,
    TimeFormat,
    drop_impossible_times,
    parse_time_of_day,
)
from deformer_stream.codec.validation import (
    MAX_TEXT_CHARS,
    NO_TIME_SLOT,
    FieldNames,
    RejectionError,
    find_feature_code,
    find_time_slot,
    is_json_number,
    is_utf8,
    not_finite_error,
    quote,
    unknown_feature_error,
)
from deformer_stream.codec.windowing import WindowAssigner
from deformer_stream.engine.events import NO_TIME, EventBatch, Rejection, RejectionReason
from deformer_stream.model.schema import SECONDS_PER_DAY, Schema

MAX_NUMBER_CHARS = 400
"""Maximum number of characters of an integer that is converted. A longer one counts as infinite, since float64 holds
about 309 digits. The limit is also below the 4,300 digits from which `int` refuses text."""

_LARGE_INTEGER = re.compile(rb"\d{19}")
"""What a JSON text contains if it has an integer beyond 64 bits."""

_JSON_TYPE_NAMES = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "a boolean",
    int: "a number",
    float: "a number",
}

Reading: TypeAlias = tuple[str, int, float, str | None, int, str]
"""One reading as (record id, feature code, value, text of an unseen label, time, device).

The value is NaN if the feature was declared as "will not be observed", and the label code of a discrete feature. The
text is None unless training never saw the label. The time is in microseconds since 1970, or `NO_TIME`. The device is ""
if the record is not a time window. This is a plain tuple and no class for speed, because one is made per reading."""

TableDecoder = Callable[[bytes, bytes | None, int], tuple[list[EventBatch], list[Rejection]]]
"""Decodes a message that is an Arrow stream into event batches and rejections. The arguments are its payload, its key
and the broker's timestamp (microseconds since 1970); see `deformer_stream.codec.arrow_messages.ArrowDecoder.decode`."""


class DocumentReader:
    """Validator of parsed JSON objects (documents), which converts them to readings or rejections.

    Args:
        schema: The features of the model.
        field_names: The names of the fields of an event.
        max_readings: Maximum number of readings in one document. A document with more is rejected.
        window_assigner: Assigns each event that names a device but no record to a time window of the device. The window
            is then the record. None if each event must name its record.
        future_time_limit: Rejects times that lie too far in the future; None accepts all times.
        time_format: The unit of times that are numbers, and the zone of texts without one. If it is not known, such
            texts are rejected.
    """

    def __init__(
        self,
        schema: Schema,
        field_names: FieldNames,
        max_readings: int,
        window_assigner: WindowAssigner | None = None,
        future_time_limit: FutureTimeLimit | None = None,
        time_format: TimeFormat = DEFAULT_TIME_FORMAT,
    ) -> None:
        self._schema = schema
        self._field_names = field_names
        self._max_readings = max_readings
        self._window_assigner = window_assigner
        self._future_time_limit = future_time_limit
        self._time_format = time_format
        self._fill_values = list_fill_values(schema)

    def read(
        self, message_index: int, document: Mapping[str, object], key: bytes | None, broker_time: int
    ) -> tuple[list[Reading], list[Rejection]]:
        """Return the readings of a document and its rejections.

        A document gives at least one reading or rejection, unless all its values are fill values of sensors that may
        report again.

        Args:
            message_index: The index of the message in its poll, which the rejections state.
            document: The fields of a parsed message.
            key: The message key, or None. It replaces a missing record id or device.
            broker_time: The broker's timestamp of the message, microseconds since 1970 or `NO_TIME`. It is the time of
                the readings if the document states none.

        Returns:
            The accepted readings, and one rejection per reason.
        """
        try:
            # The readings belong to the record that the document names, or else to the window of its device that
            # contains its time. In a window, the time slot (part of the window) helps to select the feature. The device
            # "" means that the document names its record.
            if self._window_assigner is None or document.get(self._field_names.record) is not None:
                record_id, device = self._read_id(document, self._field_names.record, key), ""
                time, time_slot = self._read_time(document, broker_time), NO_TIME_SLOT
            else:
                device = self._read_id(document, self._field_names.device, key)
                time = self._read_time(document, broker_time)
                record_id = self._window_assigner.assign(self._field_names, device, time)
                time_slot = find_time_slot(self._schema, time)
            unchecked_readings = self._list_values(document)
        except RejectionError as error:
            return [], [Rejection(message_index, error.reason, error.detail)]
        readings: list[Reading] = []
        rejections: list[Rejection] = []
        for feature, value in unchecked_readings:
            try:
                code = self._find_feature(feature, time_slot)
                if value is not None and self._fill_values[code].contains(value):
                    if self._schema.may_report_again:
                        continue  # no reading, and another one may follow
                    value = None
                number, unseen_label = self._read_value(code, value)
                readings.append((record_id, code, number, unseen_label, time, device))
            except RejectionError as error:
                rejections.append(Rejection(message_index, error.reason, error.detail))
        return readings, Rejection.merge_by_message(rejections)

    def _read_id(self, document: Mapping[str, object], field_name: str, key: bytes | None) -> str:
        """Return the record id or the device name that a parsed message states.

        If the field is missing or null, the message key replaces it, because producers key messages by record or by
        device.

        Args:
            document: The fields of the message.
            field_name: The name of the field with the record id or the device name.
            key: The message key, or None.

        Raises:
            RejectionError: If there is no id, or if it is neither text nor a whole number, empty, or too long.
        """
        text = document.get(field_name)
        if text is None and key:
            try:
                text = key.decode()
            except UnicodeDecodeError:
                raise RejectionError(
                    RejectionReason.MISSING_FIELD,
                    f"the field {field_name!r} is missing, and the Kafka message key, which replaces it, is not UTF-8 "
                    "text; send the field, or a text as message key",
                ) from None
        if text is None:
            raise RejectionError(
                RejectionReason.MISSING_FIELD,
                f"the field {field_name!r} is missing, and no message key replaces it (lines of files have none); send "
                f"{self._describe_form(field_name)}{self._describe_flat_features(document)}",
            )
        if text == "":
            raise RejectionError(
                RejectionReason.MISSING_FIELD, f"the field {field_name!r} is empty; send a text that is not empty"
            )
        if type(text) is int:  # an id may be a whole number; `isinstance` would also accept booleans
            text = str(text)
        if not isinstance(text, str):
            raise RejectionError(
                RejectionReason.WRONG_TYPE,
                f"the field {field_name!r} is {_name_json_type(text)}; send text or a whole number",
            )
        if len(text) > MAX_TEXT_CHARS:
            raise RejectionError(
                RejectionReason.TOO_LARGE,
                f"the field {field_name!r} has {len(text)} characters; at most {MAX_TEXT_CHARS} are accepted; send a "
                "shorter text",
            )
        return text

    def _describe_form(self, id_field: str) -> str:
        """Return an example of a document with several readings, and the fields of one with a single reading.

        Args:
            id_field: The name of the field with the record id or the device name.
        """
        names = self._field_names
        time = f', "{names.time}": …' if id_field == names.device else ""
        return (
            f'{{"{id_field}": …{time}, "{names.values}": {{"NAME": VALUE}}}}, or {names.feature} and {names.value} in '
            f"place of {names.values}"
        )

    def _describe_flat_features(self, document: Mapping[str, object]) -> str:
        """Return a clause that fields of a document are features, which belong into the field of values.

        Args:
            document: The fields of the message.

        Returns:
            The clause, after a semicolon; empty if no field is a feature, or if the document has readings elsewhere.
        """
        names = self._field_names
        if document.get(names.values) is not None or document.get(names.feature) is not None:
            return ""
        features = [
            name for name in document if name in self._schema.code_by_name or name in self._schema.slot_layout_by_sensor
        ]
        if not features:
            return ""
        such = f"the field {quote(features[0], 30)} is a feature: it belongs"
        if len(features) > 1:
            such = f"{len(features)} fields, such as {quote(features[0], 30)}, are features: they belong"
        return f"; {such} into {names.values!r}"

    def _read_time(self, document: Mapping[str, object], broker_time: int) -> int:
        """Return the time that a parsed message states, or the broker's timestamp if it states none.

        Args:
            document: The fields of the message.
            broker_time: The broker's timestamp of the message, microseconds since 1970 or `NO_TIME`.

        Returns:
            Microseconds since 1970, or `NO_TIME` if there is no time at all.

        Raises:
            RejectionError: If the time is malformed, outside the years 1 to 9999, or too far in the future.
        """
        time = document.get(self._field_names.time)
        if time is None:
            return broker_time
        if not isinstance(time, str) and not is_json_number(time):
            raise RejectionError(
                RejectionReason.WRONG_TYPE,
                f"the field {self._field_names.time!r} is {_name_json_type(time)}; send epoch seconds (seconds since "
                "1970) or RFC 3339 text such as 2020-03-09T10:34:33Z",
            )
        micros = self._time_format.parse(time)
        if self._future_time_limit is not None:
            self._future_time_limit.check(micros, broker_time)
        return micros

    def _list_values(self, document: Mapping[str, object]) -> list[tuple[object, object]]:
        """Return the readings of a parsed message, which are not validated yet.

        Args:
            document: The fields of the message. A single reading is in the fields `feature` and `value`. Several
                readings are an object in the field `values`, with the feature names as keys.

        Returns:
            (feature name, value) of each reading, in the order of the document.

        Raises:
            RejectionError: If the fields for one reading or for several readings are missing, mixed or malformed.
        """
        names = self._field_names
        values, feature = document.get(names.values), document.get(names.feature)
        if values is None:
            if feature is None:
                raise RejectionError(
                    RejectionReason.MISSING_FIELD,
                    f"the fields {names.feature!r} and {names.values!r} are both missing; send one of them"
                    f"{self._describe_flat_features(document)}",
                )
            if names.value not in document:
                raise RejectionError(
                    RejectionReason.MISSING_FIELD,
                    f"the field {names.feature!r} is present, but the field {names.value!r} is missing; send both",
                )
            return [(feature, document[names.value])]
        if feature is not None:
            raise RejectionError(
                RejectionReason.WRONG_TYPE,
                f"the fields {names.feature!r} and {names.values!r} are both present; send one of them",
            )
        if not isinstance(values, dict):
            raise RejectionError(
                RejectionReason.WRONG_TYPE,
                f"the field {names.values!r} is {_name_json_type(values)}; send a JSON object with the feature names "
                "as keys",
            )
        if not values:
            raise RejectionError(
                RejectionReason.MISSING_FIELD, f"the field {names.values!r} is empty; at least one reading is expected"
            )
        if len(values) > self._max_readings:
            raise RejectionError(
                RejectionReason.TOO_LARGE,
                f"the message has {len(values)} readings; at most {self._max_readings} are accepted; split the message",
            )
        return list(values.items())

    def _find_feature(self, name: object, time_slot: int) -> int:
        """Return the feature code of a reading, the index of its feature in the schema.

        Args:
            name: The feature name of the reading, not yet validated.
            time_slot: The time slot (part of a window) of the reading; `NO_TIME_SLOT` if the name alone determines the
                feature.

        Raises:
            RejectionError: If the name is no text, or the feature is unknown.
        """
        if not isinstance(name, str):
            raise RejectionError(
                RejectionReason.WRONG_TYPE,
                f"the field {self._field_names.feature!r} is {_name_json_type(name)}; send the name of a feature as "
                "text",
            )
        code = find_feature_code(self._schema, name, time_slot)
        if code is None:
            raise unknown_feature_error(self._schema, name, time_slot)
        return code

    def _read_value(self, code: int, value: object) -> tuple[float, str | None]:
        """Validate and encode the value of a reading.

        Args:
            code: The feature code.
            value: The value; None declares that no reading will follow for this feature.

        Returns:
            (number, unseen label). The number is the value of a continuous feature or the label code of a discrete one;
            NaN if the value is None. The unseen label is the text of a label that did not occur in training, else None.

        Raises:
            RejectionError: If the value does not fit the feature.
        """
        if value is None:
            return nan, None
        feature = self._schema.features[code]
        name = feature.sensor_name
        is_number = is_json_number(value)
        if is_number and not isfinite(cast("float", value)):
            raise not_finite_error(name, value)
        if feature.kind == "discrete":
            if isinstance(value, dict | list):
                raise _wrong_value_error(name, value, expected="label")
            return encode_label(value, self._schema.code_by_label[code], name)
        if isinstance(value, str) and feature.period == SECONDS_PER_DAY:  # the feature's values are times of day
            seconds = parse_time_of_day(value)
            if seconds is not None:
                return seconds, None
        if not is_number:
            raise _wrong_value_error(name, value, expected="number")
        return float(cast("float", value)), None


class MessageDecoder:
    """Decoder for the messages of a poll: JSON documents, and Arrow streams if there is a `table_decoder`.

    Args:
        schema: The features of the model.
        field_names: The names of the fields of an event.
        max_bytes: Maximum size of a message in bytes; a larger one is rejected.
        max_readings: Maximum number of readings in one JSON message; one with more is rejected.
        window_assigner: Assigns each event that names a device but no record to a time window of the device. The window
            is then the record. None if each event must name its record.
        future_time_limit: Rejects times that lie too far in the future; None accepts all times.
        time_format: The unit of times that are numbers, and the zone of texts without one. If it is not known, such
            texts are rejected.
        table_decoder: Decodes messages that are Arrow streams; without it they are rejected.
    """

    def __init__(
        self,
        schema: Schema,
        field_names: FieldNames,
        max_bytes: int,
        max_readings: int,
        window_assigner: WindowAssigner | None = None,
        future_time_limit: FutureTimeLimit | None = None,
        time_format: TimeFormat = DEFAULT_TIME_FORMAT,
        table_decoder: TableDecoder | None = None,
    ) -> None:
        self._table_decoder = table_decoder
        self._field_names = field_names
        self._max_bytes = max_bytes
        self._window_assigner = window_assigner
        self._future_time_limit = future_time_limit
        self._units_per_second = time_format.units_per_second
        self._documents = DocumentReader(
            schema, field_names, max_readings, window_assigner, future_time_limit, time_format
        )
        self._parse_event = _make_event_parser(field_names)
        self._code_by_continuous_feature = {
            feature.name: code for code, feature in enumerate(schema.features) if feature.kind == "continuous"
        }
        self._fill_numbers = frozenset[float]().union(*(values.numbers for values in list_fill_values(schema)))
        self._has_large_labels = any(
            isinstance(parse_exact_number(label), int) for feature in schema.features for label in feature.labels
        )

    def decode(self, data: Messages) -> tuple[EventBatch, list[Rejection]]:
        """Return the events (decoded readings) of the messages in their order, and the rejections.

        The first part of the loop is the fast path for the common message. It has one number of a known feature, a text
        as record id, and a numeric time or none. It takes less than a microsecond per message. Any other message, valid
        or not, is decoded by `_decode_other`.

        Args:
            data: The messages of one poll.

        Returns:
            The events, and one rejection per message and reason.
        """
        events = _EventColumns()
        rejections: list[Rejection] = []

        broker_time_array = drop_impossible_times(data.times)
        broker_times, max_seconds = broker_time_array.tolist(), self._list_max_seconds(broker_time_array)
        # Local names keep attribute look-ups out of the loop.
        parse_event, code_by_feature, max_bytes = self._parse_event, self._code_by_continuous_feature, self._max_bytes
        units_per_second, fill_numbers = self._units_per_second, self._fill_numbers
        record_ids, features, values = events.record_ids, events.features, events.values
        times, message_indices = events.times, events.message_indices
        for i, payload in enumerate(data.payloads):
            try:
                if len(payload) <= max_bytes:  # type: ignore[arg-type]  # a tombstone raises TypeError, handled below
                    event = parse_event(payload)
                    record_id, time, code = event.record, event.time, code_by_feature[event.feature]
                    seconds = None if time is None else time / units_per_second
                    if (
                        0 < len(record_id) <= MAX_TEXT_CHARS
                        and (seconds is None or MIN_SECOND <= seconds <= max_seconds[i])
                        and event.value not in fill_numbers  # their features decide whether they are fill values
                        and event.values is msgspec.UNSET  # the message does not hold several readings as well
                        # The parser skips unknown fields without validating their text.
                        and (payload.isascii() or is_utf8(payload))  # type: ignore[union-attr, arg-type]
                    ):
                        record_ids.append(record_id)
                        features.append(code)
                        values.append(event.value)
                        times.append(broker_times[i] if seconds is None else round(seconds * 1e6))
                        message_indices.append(i)
                        continue
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                pass  # not a common message
            rejections += self._decode_other(i, payload, data.keys[i], broker_times[i], events)
        return events.to_batch(data, self._window_assigner), rejections

    def decode_document(self, document: Mapping[str, object]) -> tuple[EventBatch, list[Rejection]]:
        """Decode a message that is a Python mapping instead of JSON bytes.

        The rules are those of JSON messages. The mapping counts as message 0 of partition 0, without a key and a broker
        timestamp.

        Args:
            document: The fields of the message: one reading, or several readings of one record. Values must have the
                types that `json.loads` returns.

        Returns:
            The accepted readings as events, and one rejection per reason.
        """
        events = _EventColumns()
        readings, rejections = self._documents.read(0, document, key=None, broker_time=NO_TIME)
        events.add_readings(0, readings)
        return events.to_batch(None, self._window_assigner), rejections

    def _list_max_seconds(self, broker_times: NDArray[np.int64]) -> list[float]:
        """Return the latest time that each message may state, in seconds since 1970.

        Args:
            broker_times: (N,) broker timestamp of each of N messages in microseconds since 1970, or `NO_TIME`.

        Returns:
            N numbers of seconds, at most `MAX_SECOND`.
        """
        if self._future_time_limit is None:
            return [MAX_SECOND] * len(broker_times)
        # The broker's timestamp of each message, or the wall clock if it has none, in microseconds.
        reference_times = self._future_time_limit.reference_times(broker_times)
        max_seconds = (reference_times + self._future_time_limit.max_micros) / 1e6
        return cast("list[float]", np.minimum(max_seconds, MAX_SECOND).tolist())

    def _decode_other(
        self, message_index: int, payload: bytes | None, key: bytes | None, broker_time: int, events: _EventColumns
    ) -> list[Rejection]:
        """Decode a message that the fast path does not handle: append its events to `events`, return its rejections.

        Args:
            message_index: The index of the message in its poll.
            payload: The value of the message; None for a tombstone (a Kafka message without a value).
            key: The message key, or None.
            broker_time: The broker's timestamp in microseconds since 1970, or `NO_TIME`.
            events: The events of the poll so far, to which the message's events are appended.
        """
        if self._table_decoder is not None and is_arrow_stream(payload):
            batches, rejections = self._table_decoder(payload, key, broker_time)
            for batch in batches:
                events.add_batch(message_index, batch)
            return [replace(rejection, message_index=message_index) for rejection in rejections]
        if isinstance(payload, UnreadablePayload):
            return [Rejection(message_index, payload.reason, payload.detail, payload.num_messages)]
        try:
            document = parse_document(payload, self._max_bytes, self._has_large_labels)
        except RejectionError as error:
            return [Rejection(message_index, error.reason, error.detail)]
        readings, rejections = self._documents.read(message_index, document, key, broker_time)
        events.add_readings(message_index, readings)
        return rejections


def parse_document(payload: bytes | None, max_bytes: int, has_large_integers: bool = False) -> dict[str, object]:
    """Parse the value of a message as a JSON object.

    Args:
        payload: The value; None for a tombstone.
        max_bytes: Maximum size of a message in bytes.
        has_large_integers: Whether integers beyond 64 bits must be exact. Otherwise they may be rounded to float64.

    Raises:
        RejectionError: If the value is missing, too large, or not a JSON object.
    """
    if payload is None:
        raise RejectionError(
            RejectionReason.NOT_JSON, "the message has no value (a tombstone); a JSON object is expected"
        )
    if len(payload) > max_bytes:
        raise RejectionError(
            RejectionReason.TOO_LARGE,
            f"the message has {len(payload)} bytes; at most {max_bytes} are accepted; send smaller messages",
        )
    try:
        document = orjson.loads(payload)
        if has_large_integers and _LARGE_INTEGER.search(payload):
            with suppress(RecursionError):  # such a document has no readings, and is rejected for another reason
                document = json.loads(payload, parse_int=_parse_large_integer)
    except orjson.JSONDecodeError as error:
        document = _parse_lenient(payload, str(error))
    if not isinstance(document, dict):
        raise RejectionError(
            RejectionReason.NOT_JSON,
            f"the message is {_name_json_type(document)}; a JSON object is expected: write one per message or line",
        )
    return document


def _make_event_parser(field_names: FieldNames) -> Callable[[Any], Any]:
    """Return the parser of the fast path: a function from the bytes of a common message to an object.

    A common message is a JSON object of one reading whose value is a number. The object has the attributes `record`,
    `feature`, `value`, `time` (None if missing) and `values` (`msgspec.UNSET` if missing). For any other message the
    function raises ValueError or RecursionError, or returns an object without these attributes. It skips unknown fields
    without checking that their text is valid UTF-8.

    Args:
        field_names: The names of these attributes as keys of the JSON object.
    """
    names = {name: getattr(field_names, name) for name in ("record", "feature", "value", "time", "values")}
    if len(set(names.values())) < len(names):
        # A struct needs distinct keys, so there is no fast path. `orjson.loads` returns a dictionary, which lacks the
        # attributes, so that every message is decoded as an uncommon one.
        return orjson.loads
    event_type = msgspec.defstruct(
        "Event",
        [
            ("record", str),
            ("feature", str),
            ("value", float),
            ("time", float | None, None),
            ("values", msgspec.Raw | msgspec.UnsetType, msgspec.UNSET),  # not parsed: only its presence matters
        ],
        rename=names,
        gc=False,  # an event cannot be part of a reference cycle
    )
    return msgspec.json.Decoder(event_type).decode


class _EventColumns:
    """The events of a poll, collected column by column for an `EventBatch`.

    Attributes:
        record_ids: List of the record id of each event.
        features: List of the feature code (index of the feature in the schema) of each event.
        values: List of the value of each event: a number, or the label code of a discrete feature. NaN declares that
            the feature will not be observed.
        times: List of the time of each event, microseconds since 1970 or `NO_TIME`.
        message_indices: List of the index of each event's message in the poll.
        unseen_labels: Dictionary from the index of an event to its label. It contains only the events whose label did
            not occur in training.
        devices: Dictionary from the index of an event to its device. It contains only the events that name a device
            instead of a record.
    """

    def __init__(self) -> None:
        self.record_ids: list[str] = []
        self.features: list[int] = []
        self.values: list[float] = []
        self.times: list[int] = []
        self.message_indices: list[int] = []
        self.unseen_labels: dict[int, str] = {}
        self.devices: dict[int, str] = {}

    def add_readings(self, message_index: int, readings: list[Reading]) -> None:
        """Append the readings of one JSON document as events.

        Args:
            message_index: The index of the document's message in the poll.
            readings: The readings, in the order of the document.
        """
        for record_id, code, value, unseen_label, time, device in readings:
            if unseen_label is not None:
                self.unseen_labels[len(self.record_ids)] = unseen_label
            if device:
                self.devices[len(self.record_ids)] = device
            self.record_ids.append(record_id)
            self.features.append(code)
            self.values.append(value)
            self.times.append(time)
            self.message_indices.append(message_index)

    def add_batch(self, message_index: int, batch: EventBatch) -> None:
        """Append the events of a message that is an Arrow stream.

        Args:
            message_index: The index of the message in the poll, which replaces the message indices of the batch.
            batch: The events of the stream.
        """
        num_earlier_events = len(self.record_ids)
        self.unseen_labels |= {num_earlier_events + i: text for i, text in batch.unseen_labels.items()}
        if batch.windows is not None:
            self.devices |= {num_earlier_events + i: device for i, device in enumerate(batch.windows.devices) if device}
        self.record_ids += batch.record_ids
        self.features += batch.features.tolist()
        self.values += batch.values.tolist()
        self.times += batch.times.tolist()
        self.message_indices += [message_index] * len(batch)

    def to_batch(self, data: Messages | None, window_assigner: WindowAssigner | None) -> EventBatch:
        """Return the columns as an `EventBatch`.

        Args:
            data: The messages of the poll, from which the partitions of the events are read; None sets partition 0.
            window_assigner: Computes when the windows of events with a device close. None if no event has a device.
        """
        message_indices, times = np.asarray(self.message_indices, np.int32), np.asarray(self.times, np.int64)
        if data is None:
            partitions = np.zeros(len(message_indices), np.int32)
        else:
            partitions = np.asarray(data.partitions, np.int32)[message_indices]
        windows = None
        if window_assigner is not None and self.devices:
            # An event that names its record has the device "".
            devices = [self.devices.get(i, "") for i in range(len(self.record_ids))]
            windows = window_assigner.make_membership(devices, times)
        return EventBatch(
            self.record_ids,
            features=np.asarray(self.features, np.int32),
            values=np.asarray(self.values, np.float64),
            times=times,
            message_indices=message_indices,
            partitions=partitions,
            unseen_labels=self.unseen_labels,
            windows=windows,
        )


def _wrong_value_error(name: str, value: object, expected: str) -> RejectionError:
    """Return the exception for a reading whose value has a JSON type that does not fit its feature.

    Args:
        name: The feature name.
        value: The parsed JSON value, whose type the message states.
        expected: What the feature requires: "number" or "label".
    """
    detail = f"feature {quote(name)}: the value is {_name_json_type(value)}; a {expected} is expected"
    return RejectionError(RejectionReason.WRONG_TYPE, detail)


def _name_json_type(value: object) -> str:
    """Return the name of the JSON type of a parsed value for error messages, such as "a list" or "null"."""
    return "null" if value is None else _JSON_TYPE_NAMES[type(value)]


def _parse_lenient(payload: bytes, error: str) -> object:
    """Parse text as Python's `json` writes it: JSON with `NaN`, `Infinity` and numbers beyond float64.

    Such a text is not JSON, so the message will be rejected. It is parsed so that the rejection can name the feature
    whose value is not finite.

    Args:
        payload: A message that the strict parser rejected.
        error: The strict parser's error message.

    Raises:
        RejectionError: If the message cannot be parsed in this way either; the detail is the strict parser's error.
    """
    try:
        document = json.loads(payload.decode(), parse_int=_parse_integer)
        # Raises for lone surrogates and deep nesting. The report of the rejection could not quote them, because orjson
        # encodes it.
        orjson.dumps(document)
    except (ValueError, TypeError, RecursionError):
        raise RejectionError(RejectionReason.NOT_JSON, error.splitlines()[0] if error else "not JSON") from None
    return document


def _parse_large_integer(text: str) -> int | float:
    """Return an integer literal as an exact number; an infinite one if it is beyond the range of float64."""
    number = float(text)
    return int(text) if isfinite(number) else number


def _parse_integer(text: str) -> int | float:
    """Return an integer literal as orjson does: exact if it fits in 64 bits, else as a float, possibly infinite."""
    if len(text) > MAX_NUMBER_CHARS:
        return inf
    number = int(text)
    return number if -(2**63) <= number < 2**64 else float(text)
