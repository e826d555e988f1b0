"""The key of the messages of `deformer-stream produce`, and the field by which a consumer chooses among its models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deformer_stream.codec.model_choice import ModelChoice
from deformer_stream.codec.validation import FieldNames, RejectionError, is_json_id, quote
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.tables.table import Table

_NAMES = FieldNames()

_READING_FIELDS = (_NAMES.feature, _NAMES.value, _NAMES.values, _NAMES.time, _NAMES.label)
"""The fields of a message with a reading, and the columns of a long table. None of them can determine the model."""


@dataclass(frozen=True, slots=True)
class MessageForm:
    """The key of messages, and the field that determines their model.

    Attributes:
        get_device: Returns the device of a record id, "" if it contains none. Messages of records are keyed by their
            devices. None keys them by their record ids. Messages of devices are keyed by the device in both cases.
        model_field: The column whose value each message contains as a field of the same name, None for no such field.
        features_by_model: The features of each model, by its name, which is the value of `model_field`. Other readings
            of its rows are not sent. Rows that belong to no model are sent with all readings, because their model can
            be trained later. None sends all readings.
    """

    get_device: Callable[[str], str] | None = None
    model_field: str | None = None
    features_by_model: Mapping[str, frozenset[str]] | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` if the field is part of a reading."""
        if self.model_field in _READING_FIELDS:
            raise ConfigError(
                f"--model-by {self.model_field}: messages have a field of this name already, which is part of a "
                "reading; rename the column, and give its new name"
            )

    def make_key(self, owner_field: str, owner: str) -> bytes:
        """Return the key of a message.

        Args:
            owner_field: "record" or "device".
            owner: The record id or the device.

        Raises:
            InputError: The key is the device of a record, and the record id contains none.
        """
        if self.get_device is None or owner_field != _NAMES.record:
            return owner.encode()
        device = self.get_device(owner)
        if not device:
            raise InputError(
                f"--key device: the record id {quote(owner)} contains no device, which is the part before the last "
                "'@', else before the last '/', or before the text of --device-by: put the device before the ids with "
                "--record-prefix, name another text with --device-by, or leave out --key"
            )
        return device.encode()

    def make_key_of_line(self, document: Any) -> bytes:
        """Return the key of a message that is passed on unchanged; empty if it names no record and no device.

        Args:
            document: The decoded JSON.

        Raises:
            InputError: As `make_key`.
        """
        for name in (_NAMES.record, _NAMES.device):
            owner = document.get(name) if isinstance(document, dict) else None
            if owner is not None:
                return self.make_key(name, str(owner)) if is_json_id(owner) else b""
        return b""

    def find_model_column(self, table: Table, owner_field: str) -> str | None:
        """Return the column that determines the model, None if there is none or if it is that of the record or device.

        Args:
            table: The table.
            owner_field: The field of the messages with the record id or the device.

        Raises:
            InputError: The table does not have the column.
        """
        name = self.model_field
        if name is None or name == owner_field:
            return None
        if name not in table.schema.names:
            raise InputError(
                f"{table.name}: there is no column {name!r}, which determines the model of a row; choose one of the "
                f"columns {table.format_column_names()} with --model-by"
            )
        return name

    def make_model_fields(self, owner_field: str, value: Any) -> dict[str, Any]:
        """Return the field that determines the model; nothing if it is missing, or is that of the record or device.

        Args:
            owner_field: The field of the messages with the record id or the device.
            value: The value of the row, None for a null.
        """
        name = self.model_field
        return {} if name is None or name == owner_field or value is None else {name: value}

    def select_readings(self, value: Any, readings: list[tuple[str, Any]]) -> Sequence[tuple[str, Any]]:
        """Return the readings of a row that its model has.

        Args:
            value: The value that determines the model, None for a null.
            readings: Pairs of feature and value.
        """
        if self.features_by_model is None or self.model_field is None:
            return readings
        try:
            features = self.features_by_model.get(ModelChoice(self.model_field).choose(value))
        except RejectionError:  # a consumer rejects the messages of this row
            return readings
        return readings if features is None else [reading for reading in readings if reading[0] in features]


DEFAULT_MESSAGE_FORM = MessageForm()
"""Messages are keyed by record, and name no model."""
