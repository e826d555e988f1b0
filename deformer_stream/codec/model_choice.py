"""Messages and rows of several models: which model each belongs to, and a decoder that divides a poll among them.

Each message or row names its model: the value of a field is the name, or a pattern finds the name in the value. The
choice depends on the message alone. So it is the same after a restart, and however the messages are cut into polls.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from deformer_stream.codec.arrow_messages import split_stream
from deformer_stream.codec.columns import decode_dictionary, encode_distinct, is_scalar
from deformer_stream.codec.encode_alerts import encode_alert
from deformer_stream.codec.json_messages import parse_document
from deformer_stream.codec.payloads import LongRows, Messages, Payload, UnreadablePayload, WideRows, is_arrow_stream
from deformer_stream.codec.validation import MAX_TEXT_CHARS, FieldNames, RejectionError, is_unicode, quote
from deformer_stream.engine.events import Alert, EventBatch, Rejection, RejectionReason
from deformer_stream.errors import InputError
from deformer_stream.model.schema import format_label

if TYPE_CHECKING:
    from deformer_stream.codec import Codec
    from deformer_stream.codec.schema_formats import SchemaTranslator

Ints = NDArray[np.int64]

MAX_CACHED_VALUES = 65_536
"""Largest number of values of the field whose model is stored, so that the pattern is not applied to each message."""


class ModelChoice:
    """Decides to which model a message or a row belongs, by the value of a field.

    Args:
        field: The field of a message, or the column of a table.
        pattern: Finds the name of the model in the value of the field: the name is the first group of the first match,
            or the whole match of a pattern without groups. None if the value is the name.
    """

    def __init__(self, field: str, pattern: re.Pattern[str] | None = None) -> None:
        self.field, self._pattern = field, pattern
        self._name_by_value: dict[str, str] = {}

    @property
    def has_pattern(self) -> bool:
        """Whether a pattern finds the name of the model in the value of the field."""
        return self._pattern is not None

    def describe(self) -> str:
        """Return a text that is equal for equal choices only, for the fingerprint of a set of models."""
        return f"{self.field}\0{self._pattern.pattern if self._pattern is not None else ''}"

    def choose(self, value: object) -> str:
        """Return the name of the model that a value of the field determines.

        Args:
            value: The value: a text, a number, or a boolean, which is "true" or "false" as in `--per`. A whole number
                has the same name in each type: 2 and 2.0 are "2". None or NaN if the field is missing.

        Raises:
            RejectionError: The value is missing, is none of these, or the pattern does not match it.
        """
        if self._pattern is None and type(value) is str and 0 < len(value) <= MAX_TEXT_CHARS:
            return value
        if isinstance(value, Decimal | np.floating):
            value = float(value)
        if _is_missing(value) or value == "":
            problem = "empty" if value == "" else "missing"
            raise RejectionError(
                RejectionReason.MISSING_FIELD,
                f"the field {self.field!r}, which determines the model, is {problem}; send it in each message, as "
                f"`deformer-stream produce --model-by` does with a column of a table",
            )
        if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):  # a boolean is an int
            value = format_label(value)
        if not isinstance(value, str) or not is_unicode(value):
            raise RejectionError(
                RejectionReason.WRONG_TYPE,
                f"the field {self.field!r}, which determines the model, is no text, whole number or boolean",
            )
        if len(value) > MAX_TEXT_CHARS:
            raise RejectionError(
                RejectionReason.TOO_LARGE,
                f"the field {self.field!r} has {len(value)} characters; at most {MAX_TEXT_CHARS} are accepted",
            )
        if self._pattern is None:
            return value
        name = self._name_by_value.get(value)
        if name is None:
            match = self._pattern.search(value)
            name = None if match is None else match.group(1 if self._pattern.groups else 0)
            if not name:
                raise RejectionError(
                    RejectionReason.UNKNOWN_MODEL,
                    f"the pattern of --model-pattern finds no model in the field {self.field!r}, which is "
                    f"{quote(value)}",
                )
            if len(self._name_by_value) >= MAX_CACHED_VALUES:
                self._name_by_value.clear()
            self._name_by_value[value] = name
        return name


def _is_missing(value: object) -> bool:
    """Return whether a value is None, or NaN, which is a missing number of a data frame."""
    return value is None or value != value  # NaN differs from itself


class ModelDecoder(Protocol):
    """The decoder of a process: a `Codec` if there is one model, `ModelCodecs` if there are several."""

    @property
    def field_names(self) -> FieldNames:
        """The names of the fields of an event."""

    def decode_by_model(self, data: Payload) -> tuple[Mapping[str, EventBatch], list[Rejection]]:
        """Decode what a poll of a connector returned.

        Returns:
            The events by the name of the model, which is `ONLY_MODEL` for the only one; and the rejections. The message
            indices of events and rejections refer to `data`.

        Raises:
            InputError: As `Codec.decode`.
        """

    def with_codec(self, name: str, codec: Codec) -> ModelDecoder:
        """Return the decoder after a model was replaced or added.

        Args:
            name: The name of the model, which is `ONLY_MODEL` for the only one.
            codec: Its codec.
        """

    def combine_fingerprints(self, fingerprint_by_model: Mapping[str, str]) -> str:
        """Return the fingerprint of the only model, or that of the set of models with what chooses among them."""

    def encode_alert(self, alert: Alert, data: Payload | None) -> bytes:
        """Return an alert of any of the models as JSON, as `Codec.encode_alert` does."""


class ModelCodecs:
    """Decoder for messages and rows of several models, each with a codec of its own.

    Messages and rows of a model that is not among the codecs are rejected with the reason `UNKNOWN_MODEL`.

    Args:
        choice: Decides to which model a message or a row belongs.
        codec_by_model: The codec of each model, by the name of the model.
        field_names: The names of the fields of an event.
        max_message_bytes: Maximum size of a message in bytes; a larger one is rejected.
        translator: Converts messages in a format of a schema registry to JSON. None if they are JSON or Arrow streams.
            The codecs must not translate them again.
    """

    def __init__(
        self,
        choice: ModelChoice,
        codec_by_model: Mapping[str, Codec],
        field_names: FieldNames,
        max_message_bytes: int = 1_048_576,
        translator: SchemaTranslator | None = None,
    ) -> None:
        self.choice, self.codec_by_model, self.field_names = choice, dict(codec_by_model), field_names
        self._max_bytes, self._translator = max_message_bytes, translator
        # The message key replaces these fields if they are missing, because producers key messages by them.
        self._is_key = choice.field in (field_names.record, field_names.device)
        event_type = msgspec.defstruct("Event", [("value", str | None, None)], rename={"value": choice.field}, gc=False)
        self._parse_value: Callable[[Any], Any] = msgspec.json.Decoder(event_type).decode

    def decode_by_model(self, data: Payload) -> tuple[dict[str, EventBatch], list[Rejection]]:
        """Decode what a poll of a connector returned.

        Args:
            data: Messages or table rows.

        Returns:
            The events of each model that has some, by the name of the model, in alphabetical order. The message indices
            of events and rejections refer to `data`.

        Raises:
            InputError: As `Codec.decode`.
        """
        parts: Mapping[str, tuple[Payload, Ints]]
        if isinstance(data, Messages):
            parts, rejections = self._divide_messages(
                data if self._translator is None else self._translator.translate(data)
            )
        else:
            parts, rejections = self._divide_rows(data)
        batches: dict[str, EventBatch] = {}
        for name in sorted(parts):
            part, indices = parts[name]
            batch, part_rejections = self.codec_by_model[name].decode(part)
            if len(batch):
                message_indices = indices[batch.message_indices].astype(np.int32)
                batches[name] = replace(batch, message_indices=message_indices)
            rejections += [replace(r, message_index=int(indices[r.message_index])) for r in part_rejections]
        return batches, Rejection.merge_by_message(rejections)

    def with_codec(self, name: str, codec: Codec) -> ModelCodecs:
        """Return the decoder after a model was replaced or added."""
        codec_by_model = {**self.codec_by_model, name: codec}
        return ModelCodecs(self.choice, codec_by_model, self.field_names, self._max_bytes, self._translator)

    def combine_fingerprints(self, fingerprint_by_model: Mapping[str, str]) -> str:
        """Return the fingerprint of the set of models with what chooses among them."""
        return compute_set_fingerprint(self.choice, fingerprint_by_model)

    def encode_alert(self, alert: Alert, data: Payload | None) -> bytes:
        """Return an alert of any of the models as JSON, as `Codec.encode_alert` does."""
        return encode_alert(alert, data)

    def _choose(self, value: object, key: bytes | None = None) -> str:
        """Return the name of an existing model that a value of the field determines.

        Args:
            value: The value, None if the field is missing.
            key: The message key, which replaces a missing record id or device.

        Raises:
            RejectionError: There is no such model, or as `ModelChoice.choose`.
        """
        if _is_missing(value) and self._is_key and key:
            try:
                value = key.decode()
            except UnicodeDecodeError:
                value = None
        name = self.choice.choose(value)
        if name not in self.codec_by_model:
            raise RejectionError(
                RejectionReason.UNKNOWN_MODEL,
                f"there is no model {quote(name)}, which the field {self.choice.field!r} determines; train it, or "
                "replay the message when it exists",
            )
        return name

    def _divide_messages(self, data: Messages) -> tuple[dict[str, tuple[Messages, Ints]], list[Rejection]]:
        """Divide messages among the models.

        A message that is an Arrow stream with rows of several models becomes a message for each of them.

        Args:
            data: The messages, which are JSON or Arrow streams.

        Returns:
            The messages of each model with their indices in `data`; and the messages that belong to no model.
        """
        indices_by_model: dict[str, list[int]] = {}
        # By model, the streams that replace messages: place in the list of indices, and content.
        streams_by_model: dict[str, list[tuple[int, bytes]]] = {}
        rejections: list[Rejection] = []
        parse_value, known = self._parse_value, self.codec_by_model
        choose_name = self.choice.choose if self.choice.has_pattern else None
        for i, payload in enumerate(data.payloads):
            try:
                if len(payload) <= self._max_bytes:  # type: ignore[arg-type]  # a tombstone raises TypeError
                    value = parse_value(payload).value
                    name = value if choose_name is None else choose_name(value)
                    if name in known:
                        indices_by_model.setdefault(name, []).append(i)
                        continue
            except (ValueError, TypeError, RecursionError, RejectionError):
                pass  # a message that the fast parser cannot assign
            try:
                for name, stream in self._choose_for_message(payload, data.keys[i]):
                    indices = indices_by_model.setdefault(name, [])
                    if stream is not None:
                        streams_by_model.setdefault(name, []).append((len(indices), stream))
                    indices.append(i)
            except RejectionError as error:
                num_messages = payload.num_messages if isinstance(payload, UnreadablePayload) else 1
                rejections.append(Rejection(i, error.reason, error.detail, num_messages))
        parts: dict[str, tuple[Messages, Ints]] = {}
        for name, chosen in indices_by_model.items():
            places = np.array(chosen, np.int64)
            part = data.take(places)
            for place, stream in streams_by_model.get(name, ()):
                part.payloads[place] = stream
            parts[name] = part, places
        return parts, rejections

    def _choose_for_message(self, payload: bytes | None, key: bytes | None) -> list[tuple[str, bytes | None]]:
        """Return the models of a message that the fast parser cannot assign, each with its rows if it is divided.

        Raises:
            RejectionError: The message cannot be read, or it or one of its rows belongs to no model.
        """
        if isinstance(payload, UnreadablePayload):
            raise RejectionError(payload.reason, payload.detail)
        if not is_arrow_stream(payload):
            return [(self._choose(parse_document(payload, self._max_bytes).get(self.choice.field), key), None)]
        streams = split_stream(payload, self.choice.field, self._max_bytes, lambda value: self._choose(value, key))
        return list(streams.items())

    def _divide_rows(
        self, data: LongRows | WideRows
    ) -> tuple[dict[str, tuple[LongRows | WideRows, Ints]], list[Rejection]]:
        """Divide rows of a table among the models.

        Args:
            data: The rows.

        Returns:
            The rows of each model with their indices in `data`; and the rows that belong to no model.

        Raises:
            InputError: The column has a type that no value of the field can have.
        """
        field = self.choice.field
        if field in data.table.schema.names:
            # Without a dictionary, whose values could be decimals.
            column = decode_dictionary(data.table.column(field))
            if not is_scalar(column.type):
                raise InputError(
                    f"{data.origin}: column {field!r} has the type {column.type}, which names no model; convert the "
                    "column to text, whole numbers or booleans"
                )
            value_index, values = encode_distinct(column)
        elif isinstance(data, WideRows) and field == self.field_names.record:
            values = list(dict.fromkeys(data.record_ids))
            index_by_value = {value: index for index, value in enumerate(values)}
            value_index = np.array([index_by_value[value] for value in data.record_ids], np.int64)
        else:
            value_index, values = np.zeros(len(data), np.int64), []  # `open_source` has checked that tables have it
        names: list[str | RejectionError] = []
        for value in [*values, None]:  # null cells have the index after the last distinct value
            try:
                names.append(self._choose(value))
            except RejectionError as error:
                names.append(error)
        rejections: list[Rejection] = []
        models = sorted({name for name in names if isinstance(name, str)})
        number_by_model = {name: number for number, name in enumerate(models)}
        model_of_value = np.array([number_by_model[name] if isinstance(name, str) else -1 for name in names])
        model_of_row = model_of_value[value_index]
        for row in np.flatnonzero(model_of_row < 0).tolist():
            refusal = names[value_index[row]]
            if isinstance(refusal, RejectionError):
                rejections.append(Rejection(row, refusal.reason, refusal.detail))
        parts: dict[str, tuple[LongRows | WideRows, Ints]] = {}
        for number, name in enumerate(models):
            rows = np.flatnonzero(model_of_row == number)
            if len(rows):
                parts[name] = data.take(rows), rows
        return parts, rejections


def compute_set_fingerprint(choice: ModelChoice, fingerprint_by_model: Mapping[str, str]) -> str:
    """Return the fingerprint of a set of models: a hash of the choice, and of the names and fingerprints of all models.

    Args:
        choice: Decides to which model a message belongs.
        fingerprint_by_model: The fingerprint of each model.
    """
    lines = [choice.describe(), *(f"{name}\0{value}" for name, value in sorted(fingerprint_by_model.items()))]
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()[:16]
