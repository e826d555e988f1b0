"""Assignment of readings to time windows: a record is then all readings of one device within one window.

An event may name its device and its time instead of a record. Its record id consists of the device and the window's
start:

    {"device": "pump-7", "feature": "Pressure", "value": 0.054711, "time": 1583750073.0}  →  pump-7@2020-03-09T10:34:30Z
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from deformer_stream.codec.timestamps import format_rfc3339
from deformer_stream.codec.validation import MAX_TEXT_CHARS, FieldNames, RejectionError
from deformer_stream.durations import format_duration
from deformer_stream.engine.events import NO_TIME, RejectionReason, WindowMembership
from deformer_stream.errors import ConfigError
from deformer_stream.model.schema import Schema
from deformer_stream.model.windows import WINDOW_SEPARATOR, floor_to_window

_format_window_start = lru_cache(maxsize=4096)(format_rfc3339)  # consecutive events usually share their window


@dataclass(frozen=True, slots=True)
class WindowAssigner:
    """Assigns readings to tumbling windows (adjacent windows of equal length) of event time.

    Windows are aligned to 1970-01-01T00:00:00Z. The start of a window belongs to it, its end belongs to the next one.

    Attributes:
        width: Length of a window in microseconds, at least 1.
        grace: Microseconds after the end of a window for which late readings are still accepted. A window is closed
            when an event of its device has a time at least this long after the end.
    """

    width: int
    grace: int = 0

    def __post_init__(self) -> None:
        if self.width < 1 or self.grace < 0:
            raise ConfigError(
                f"a window of {self.width} µs with a grace period of {self.grace} µs is impossible: give a positive "
                "width and a grace period of at least 0"
            )

    @staticmethod
    def from_options(schema: Schema, width: int | None, grace: int) -> WindowAssigner | None:
        """Return the window assigner for a model and the options `--window` and `--grace`.

        Args:
            schema: The features of the model, with the window that it was trained on, if any.
            width: Requested window length in microseconds, or None if the option was not given.
            grace: Requested grace period in microseconds.

        Returns:
            An assigner to windows of the model's width, or of the requested width if the model was not trained on
            windows. None if there is no width; then each event must name its record.

        Raises:
            ConfigError: If the request contradicts the model, or if there is a grace period without a window.
        """
        trained_window = schema.window
        if width is not None and trained_window is not None and width != trained_window.width:
            raise ConfigError(
                f"--window {format_duration(width)} contradicts the model, which was trained on windows of "
                f"{format_duration(trained_window.width)}; omit the option, or train a model with this window"
            )
        width = width if trained_window is None else trained_window.width
        if width is None and grace:
            raise ConfigError(
                f"--grace {format_duration(grace)} needs --window, because it states how long a time window accepts "
                "late readings, but the records are not time windows; add --window, or remove --grace"
            )
        return None if width is None else WindowAssigner(width, grace)

    def make_record_id(self, device: str, time: int) -> str | None:
        """Return the record id `DEVICE@START` of the window that contains a time.

        Args:
            device: The device name.
            time: Microseconds since 1970.

        Returns:
            The record id, or None if the window starts before the year 1.
        """
        start = _format_window_start(floor_to_window(time, self.width))
        return None if start is None else f"{device}{WINDOW_SEPARATOR}{start}"

    def assign(self, field_names: FieldNames, device: str, time: int) -> str:
        """Return the record id of an event that names its device and its time: the device and the start of the window.

        Args:
            field_names: The names of the event's fields, for error messages.
            device: The device name.
            time: The time of the event, microseconds since 1970, or `NO_TIME`.

        Raises:
            RejectionError: If the event has no time, if its window starts before the year 1, or if the id is too long.
        """
        if time == NO_TIME:
            raise RejectionError(
                RejectionReason.MISSING_FIELD,
                f"the field {field_names.time!r} is missing; an event without a record id needs it, because the time "
                "determines the time window that is the record; send the time or a record id",
            )
        record_id = self.make_record_id(device, time)
        if record_id is None:
            raise RejectionError(
                RejectionReason.WRONG_TYPE,
                f"the time {format_rfc3339(time)} lies in a window that starts before the year 1; send a later time",
            )
        if len(record_id) > MAX_TEXT_CHARS:
            raise RejectionError(
                RejectionReason.TOO_LARGE,
                f"the name in {field_names.device!r} is too long: the record id made of it and the start of the window "
                f"has {len(record_id)} characters, and at most {MAX_TEXT_CHARS} are accepted; shorten the name",
            )
        return record_id

    def make_membership(self, devices: list[str], times: NDArray[np.int64]) -> WindowMembership:
        """Return the device of each of N events, and the start and the deadline of its window.

        The deadline is the end of the window plus the grace period for late readings. The engine closes the window when
        an event of the device has this time or a later one.

        Args:
            devices: N device names, "" for an event that names its record explicitly.
            times: (N,) event times, microseconds since 1970. If an event names its record, its deadline is not used.
        """
        starts = floor_to_window(times, self.width)
        return WindowMembership(devices, starts + (self.width + self.grace), starts)
