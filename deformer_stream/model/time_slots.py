"""Schemas in which a sensor can report several times in a record, once in each time slot of the record's window.

The sensor `temp` has a feature for each time slot. The feature `temp+20s` is its reading in the time slot that begins
20 seconds after the start of the window. The features of a sensor share its kind, its transformation of values, its
labels and its embedding. Their coordinates differ and express the time. A time slot without a reading is a feature that
is not observed, so the intervals between readings may vary.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from deformer_stream.durations import format_duration
from deformer_stream.model.schema import Feature, Schema
from deformer_stream.model.windows import Window


def name_time_slot(sensor: str, offset: int) -> str:
    """Return the name of the feature that holds a sensor's reading in one time slot of a window, such as `temp+20s`.

    Args:
        sensor: The name of the sensor.
        offset: The microseconds from the start of the window to the start of the time slot.
    """
    return f"{sensor}+{format_duration(offset)}"


def expand_time_slots(schema: Schema, window: Window, reported_once: Collection[str] = ()) -> Schema:
    """Return a schema with one feature for each combination of a sensor and a time slot of a window.

    The coordinates of each feature (numbers that identify the feature for the network) express the time of its time
    slot. If no sensor can report several times in a window, only the window is added to the schema.

    Args:
        schema: A schema without a window, with one feature for each sensor.
        window: The width of the windows of event time, each of which is one record, and their number of time slots.
        reported_once: The names of sensors that report at most once in a window. They keep their single feature.

    Raises:
        ValueError: Two of the resulting features would have the same name.
    """
    if window.slots == 1 or all(f.name in reported_once for f in schema.features):
        # Features without time slots need no coordinates to distinguish them.
        return Schema(schema.features, replace(window, slots=1))
    # The features of sensors that report once get zeros, because all features must have equally many coordinates.
    coordinates_without_time = (0.0,) * len(_encode_time_slot(0, window))
    features: list[Feature] = []
    for f in schema.features:
        if f.name in reported_once:
            features.append(replace(f, coordinates=coordinates_without_time))
            continue
        for slot_index in range(window.slots):
            name = name_time_slot(f.name, window.time_slot_offset(slot_index))
            coordinates = _encode_time_slot(slot_index, window)
            features.append(replace(f, name=name, sensor=f.name, coordinates=coordinates))
    return Schema(tuple(features), window)


def collapse_time_slots(schema: Schema) -> Schema:
    """Return the schema with one feature for each sensor and without a window, the inverse of `expand_time_slots`.

    Args:
        schema: A schema in which a sensor may have a feature for each time slot. It is returned without change if it
            has no window.
    """
    first_feature_by_sensor: dict[str, Feature] = {}
    for f in schema.features:
        first_feature_by_sensor.setdefault(f.sensor_name, f)
    features = []
    for f in first_feature_by_sensor.values():
        feature = f
        if f.sensor is not None:
            feature = replace(feature, name=f.sensor, sensor=None)
        if schema.window is not None:
            feature = replace(feature, coordinates=None)  # they express the time of the time slot
        features.append(feature)
    return Schema(tuple(features))


def describe_records(schema: Schema) -> str:
    """Return sentences that explain to the reader of a report that each record is a window of event time.

    They state the width and the time slots of a window, and the sensors that report only once in a window. The text is
    empty if records are not windows, that is, if the input messages contain record ids.
    """
    if schema.window is None:
        return ""
    text = f"A record is a window of {format_duration(schema.window.width)} of a device's time"
    rule = schema.window.per_slot
    if not schema.has_repeating_sensors:
        return f"{text}." if rule == "first" else f"{text}. Of several readings of a sensor, the {rule} is used."
    example = next(f.name for f in schema.features if f.sensor is not None)
    reported_once = [f.name for f in schema.features if f.sensor is None]
    text += f" in {schema.window.slots} time slots. A sensor can report once in each time slot (feature {example}, …)"
    if reported_once:
        text += f", but these sensors report only once in a record: {', '.join(reported_once)}"
    if rule != "first":
        text += f". Of several readings in one time slot, the {rule} is used"
    return f"{text}."


def _encode_time_slot(slot_index: int, window: Window) -> tuple[float, ...]:
    """Return numbers that express the time of a time slot within its window, used as inputs of the network.

    Let m be the middle of the time slot, as a fraction of the window's width. The numbers are m, then sin(2π·2ᵏ·m) for
    k = 0, 1, …, then cos(2π·2ᵏ·m) for the same k. Only those k are used for which the period, 2⁻ᵏ windows, is longer
    than two time slots. With sines and cosines, attention can detect neighbouring time slots by a scalar product.

    Args:
        slot_index: The index of the time slot in the window, from 0.
        window: The width and the number of time slots of the window.

    Returns:
        (m, sines …, cosines …). All time slots of a window have equally many numbers.
    """
    middle = (slot_index + 0.5) / window.slots
    # The period 2**-k is longer than two time slots if 2**(k + 1) < slots. `slots` has less than 64 bits.
    angles = [2 * math.pi * 2**k * middle for k in range(64) if 2 ** (k + 1) < window.slots]
    return (middle, *(math.sin(a) for a in angles), *(math.cos(a) for a in angles))
