"""Sensors that report several times in a record: a feature for each slot of the record's window, and back.

`temp` in the slot that begins 20 s after the window's start is the feature `temp+20s`. What was learnt of values (kind,
transform, labels) is the sensor's, and so is its embedding; coordinates tell the slots apart. A slot without a reading
is a feature that is not, or not yet, observed. So a series may be irregular, and a reading may be missing.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from deformer_stream.model.schema import Feature, Schema
from deformer_stream.model.windows import Window, format_duration


def name_of(sensor: str, offset: int) -> str:
    """What a sensor's reading in a slot is called. offset: microseconds from the window's start to the slot's."""
    return f"{sensor}+{format_duration(offset)}"


def repeated(schema: Schema, window: Window, once: Collection[str] = ()) -> Schema:
    """A feature for each slot in place of each feature of a schema without a window, but of those named, which come
    once in a window. Raises ValueError where two features would have one name."""
    if window.slots == 1 or all(f.name in once for f in schema.features):
        return Schema(schema.features, Window(window.width))
    nowhere = (0.0,) * len(_place(0, window))
    features: list[Feature] = []
    for f in schema.features:
        if f.name in once:
            features.append(replace(f, coordinates=nowhere))
            continue
        for slot in range(window.slots):
            name = name_of(f.name, window.offset(slot))
            features.append(replace(f, name=name, sensor=f.name, coordinates=_place(slot, window)))
    return Schema(tuple(features), window)


def single(schema: Schema) -> Schema:
    """The schema without a window that `repeated` made this one of: a feature for each sensor."""
    first = {f.source: f for f in reversed(schema.features)}
    names = (first[name] for name in schema.sources)
    features = (f if f.sensor is None else replace(f, name=f.sensor, sensor=None) for f in names)
    return Schema(tuple(f if schema.window is None else replace(f, coordinates=None) for f in features))


def in_words(schema: Schema) -> str:
    """What records are, for a person; nothing where they are given by name."""
    if schema.window is None:
        return ""
    text = f"A record is a window of {format_duration(schema.window.width)} of a device's time"
    if not schema.repeats:
        return f"{text}."
    many = next(f for f in schema.features if f.sensor is not None)
    once = [f.name for f in schema.features if f.sensor is None]
    text += f" in {schema.window.slots} slots, in each of which a sensor may report ({many.name}, …)"
    return f"{text}; once only: {', '.join(once)}." if once else f"{text}."


def _place(slot: int, window: Window) -> tuple[float, ...]:
    """When a slot is: the share of the window before its middle, and sine and cosine of that for periods of the window,
    a half of it, a quarter, … while they are longer than two slots: attention finds neighbours by a scalar product."""
    middle = (slot + 0.5) / window.slots
    angles = [2 * math.pi * 2**k * middle for k in range(64) if 2 ** (k + 1) < window.slots]
    return (middle, *(math.sin(a) for a in angles), *(math.cos(a) for a in angles))
