"""Checks that every decoder applies to an event, and the exception that reports a failed check.

JSON messages, Arrow messages and table rows are accepted or rejected by the same rules. The functions of this module
find feature codes and time slots (parts of a window), and raise `RejectionError` if an event breaks a
rule. The decoders catch that exception and return a `Rejection`, so that bad input never stops the stream.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeGuard

from deformer_stream.engine.events import RejectionReason
from deformer_stream.model.schema import Schema

MAX_TEXT_CHARS = 1024
"""Maximum length of a record id, a device name and a label, in characters."""

NO_TIME_SLOT = -1
"""Stands for the time slot (part of a window) of a reading whose feature name alone determines the feature code. This
is the case if the event names its record explicitly, or if no sensor of the model reports several times per window."""


class RejectionError(Exception):
    """Raised inside the codec if an event cannot be accepted. The decoders convert it to a `Rejection`.

    Attributes:
        reason: The rule that the event breaks.
        detail: One line that names the field or the value that breaks the rule.
    """

    def __init__(self, reason: RejectionReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class FieldNames:
    """The names of the fields of a JSON message, and of the columns of a table with one reading per row.

    Each attribute is the name that the user has chosen for a field or a column.

    Attributes:
        record: The field with the record id.
        feature: The field with the feature name, if the message is a single reading.
        value: The field with the value of this reading.
        values: The field with several readings: an object from feature names to values. Tables do not have it.
        time: The field with the event time.
        label: A column with the values of discrete features as text. A table needs it only if its column of values
            holds numbers. JSON messages do not have it.
        device: The field with the device name. If records are time windows of devices, it replaces the record id.
    """

    record: str = "record"
    feature: str = "feature"
    value: str = "value"
    values: str = "values"
    time: str = "time"
    label: str = "label"
    device: str = "device"

    def required_columns(self, columns: Collection[str], has_windows: bool) -> tuple[str, ...]:
        """Return the columns that a table with one reading per row must have.

        Args:
            columns: The columns of the table.
            has_windows: Whether records are time windows of devices. A device and a time can then replace the record
                id.

        Returns:
            Column names. The first one identifies the record, by its id or by its device.
        """
        if has_windows and self.record not in columns:
            return self.device, self.feature, self.value, self.time
        return self.record, self.feature, self.value


def quote(text: str, max_chars: int = 60) -> str:
    """Return untrusted text for an error message: quoted, printable, on one line, cut after `max_chars` characters."""
    return repr(text) if len(text) <= max_chars else repr(text[:max_chars]) + "…"


def is_unicode(text: str) -> bool:
    """Return whether a string can be encoded as UTF-8.

    Text that was not valid UTF-8 when it was read from a table contains lone surrogates (PEP 383). They cannot be
    encoded.
    """
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_utf8(data: bytes) -> bool:
    """Return whether bytes are valid UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def is_json_number(value: object) -> TypeGuard[int | float]:
    """Return whether a decoded JSON value is a number. A boolean is none, although Python's bool is an int."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_json_id(value: object) -> TypeGuard[str | int]:
    """Return whether a decoded JSON value can be an id: text or an integer. A boolean is none."""
    return isinstance(value, str | int) and not isinstance(value, bool)


def find_time_slot(schema: Schema, time: int) -> int:
    """Return the time slot that contains a time.

    Time slots divide a window (the interval of time whose readings form a record) into equal parts. A sensor that
    reports several times per window has one feature for each time slot.

    Args:
        schema: The features of the model.
        time: Microseconds since 1970.

    Returns:
        The index of the time slot in its window, or `NO_TIME_SLOT` if no sensor of the model reports several times per
        window.
    """
    if schema.window is None or not schema.has_repeating_sensors:
        return NO_TIME_SLOT
    return schema.window.time_slot_index(time)


def find_feature_code(schema: Schema, name: str, time_slot: int) -> int | None:
    """Return the code of the feature that an event names.

    If records are windows of time that are divided into time slots, a sensor may have one feature for each time slot.
    An event then names the sensor, and its time slot selects the feature.

    Args:
        schema: The features of the model.
        name: The name in the event: of a sensor if there is a time slot, otherwise of a feature.
        time_slot: The index of the reading's time slot, or `NO_TIME_SLOT` if the name alone determines the feature.

    Returns:
        The feature code (index of the feature in the schema), or None if the model does not have such a feature.
    """
    if time_slot == NO_TIME_SLOT:
        return schema.code_by_name.get(name)
    slot_layout = schema.slot_layout_by_sensor.get(name)
    if slot_layout is None:
        return None
    first_code, code_step = slot_layout  # the step is 0 if the sensor has one feature for all time slots, else 1
    return first_code + code_step * time_slot


def unknown_feature_error(schema: Schema, name: str, time_slot: int) -> RejectionError:
    """Return the exception for a feature name that the model does not have.

    If records are windows of time that are divided into time slots, a sensor may have one feature for each time slot.
    The name of this sensor is then not enough in an event that names its record. The message of the exception states
    what to send instead.

    Args:
        schema: The features of the model.
        name: The unknown name in the event.
        time_slot: The index of the reading's time slot. `NO_TIME_SLOT` if it has none, because the event names its
            record instead of a device, or because the model has no time slots.
    """
    detail = f"feature {quote(name)} is unknown to the model"
    if time_slot == NO_TIME_SLOT and name in schema.slot_layout_by_sensor:
        first_code, _ = schema.slot_layout_by_sensor[name]
        detail += (
            f", which has one feature per time slot of this sensor: send device and time instead of the record, or "
            f"name the time slot, for example {quote(schema.names[first_code])}"
        )
    return RejectionError(RejectionReason.UNKNOWN_FEATURE, detail)


def not_finite_error(name: str, value: object) -> RejectionError:
    """Return the exception for a reading of the feature `name` whose value is NaN or infinite."""
    return RejectionError(RejectionReason.NOT_FINITE, f"feature {quote(name)}: {value!s} is not a finite number")
