"""The codecs of a command, which decode messages or rows of tables as its options say.

Heavy packages are imported inside the functions, so that `--help` is printed without delay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deformer_stream.codec import Codec, FieldNames, Order, TimeFormat, WindowAssigner
    from deformer_stream.codec.model_choice import ModelChoice
    from deformer_stream.model.schema import Schema
    from deformer_stream.model_store import Artifact
    from deformer_stream.settings import (
        InputSettings,
        ScoringSettings,
    )

MIN_READINGS_LIMIT = 4096
"""Smallest limit of the readings in a message. The limit is larger if the model has more features than this."""


def get_field_names(settings: ScoringSettings) -> FieldNames:
    """Return the names of the JSON fields from which the codec reads events, as set by the options of the command."""
    from deformer_stream.codec import FieldNames

    return FieldNames(
        record=settings.record_field,
        feature=settings.feature_field,
        value=settings.value_field,
        values=settings.values_field,
        time=settings.time_field,
        device=settings.device_field,
    )


def make_time_format(settings: ScoringSettings) -> TimeFormat:
    """Return how times of events are written, as set by the options of the command."""
    from deformer_stream.codec import TimeFormat

    return TimeFormat.from_names(settings.time_unit, settings.timezone)


def make_window_assigner(schema: Schema, settings: ScoringSettings) -> WindowAssigner | None:
    """Return the object that assigns events without a record id to windows.

    A window is a record that collects the readings of one device within an interval of event time.

    Args:
        schema: The schema of the model, which may contain the length of the windows.
        settings: Options of the command, which may contain the length of the windows (`--window`).

    Returns:
        The window assigner; None if there are no windows, since every event contains a record id.

    Raises:
        ConfigError: The options contradict the model or each other.
    """
    from deformer_stream.codec import WindowAssigner
    from deformer_stream.durations import to_micros
    from deformer_stream.errors import ConfigError

    width = None if settings.window is None else to_micros(settings.window)
    assigner = WindowAssigner.from_options(schema, width, to_micros(settings.grace))
    if assigner is not None and settings.device_field == settings.record_field:
        raise ConfigError(
            "--device-field and --record-field must differ, because one JSON field cannot be both the device and the "
            "record id of an event: name two different fields"
        )
    return assigner


def make_codec(loaded: Artifact, settings: ScoringSettings, **others: Any) -> Codec:
    """Return the codec that decodes messages into events for a model, and encodes alerts.

    Args:
        loaded: The model.
        settings: Options of the command.
        others: Further arguments of `Codec`.
    """
    from deformer_stream.codec import Codec

    window_assigner = make_window_assigner(loaded.schema, settings)
    return Codec(
        loaded.schema,
        get_field_names(settings),
        max_message_bytes=settings.max_message_bytes,
        # Messages with more readings are rejected. One with one reading for each feature must always be accepted.
        max_readings=max(MIN_READINGS_LIMIT, len(loaded.schema)),
        window_assigner=window_assigner,
        # Events further in the future than this are rejected. None accepts all times.
        max_ahead_micros=settings.get_max_ahead_micros(window_assigner is not None),
        time_format=make_time_format(settings),
        **others,
    )


def make_row_codec(loaded: Artifact, settings: InputSettings, choice: ModelChoice | None = None) -> Codec:
    """Return the codec of a command that scores files. It orders the readings of a row of a wide table.

    Args:
        loaded: The model.
        settings: Options of the command.
        choice: What chooses the model, if it is one of several.
    """
    order = choose_order_of_rows(loaded, settings)
    return make_codec(
        loaded, settings, order=order, seed=settings.seed, model_field=None if choice is None else choice.field
    )


def choose_order_of_rows(loaded: Artifact, settings: InputSettings) -> Order:
    """Return the order in which the readings of a row of a wide table (one record per row) are scored.

    Such readings have no order of arrival. By default they are scored in the order in which the model was calibrated,
    because the false-alarm rate is guaranteed only for this order.

    Args:
        loaded: The model with its calibration.
        settings: Options of the command. `--order` has precedence.
    """
    return loaded.calibration.row_order if settings.input_order is None else settings.input_order
