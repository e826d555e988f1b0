"""Features: what a reading is called, what kind of value it has, and how values become the model's units.

A feature's *identity* is what the model is told before it predicts the value: an embedding learnt per feature,
coordinates (the row and column of a pixel, the position of a sensor), or both. A sensor that may report several times
in a record is a feature for each slot of the record's window (`model.time_slots`): they share its embedding, their
coordinates say when.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from deformer_stream.model.windows import Window

Kind = Literal["continuous", "discrete"]

LINEAR = 8.0
"""Normalised values are linear up to this many scales and logarithmic beyond, so that a wild reading is very surprising
yet finite in float32 (log density falls like −ln²) and cannot flood the readings that condition on it."""

DAY = 86_400.0
"""The period of times of day, which are seconds since midnight."""
MOST_TURNS = 1e5
"""Periods that a scale may span: beyond, single precision no longer tells the places on a cycle apart."""


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature. `context`: conditions the others and is never scored.

    Continuous: normalised value = tail((raw − location) / scale); `quantum` is the sensor's resolution in raw units
    (None where readings do not repeat on a grid); low and high are the range seen in training. `period`, raw units:
    where values are places on a cycle, 0 and the period the same one, as far as others condition on it; its own density
    is that of a number on a line.
    Discrete: `labels` are the values seen in training; `unseen` is the probability mass kept for all others.
    `reason` says in words why the kind was chosen. `sensor`: what this is a reading of, at one time of several; None
    for a feature that comes once in a record.
    """

    name: str
    kind: Kind
    context: bool = False
    coordinates: tuple[float, ...] | None = None
    location: float = 0.0
    scale: float = 1.0
    quantum: float | None = None
    low: float | None = None
    high: float | None = None
    labels: tuple[str, ...] = ()
    unseen: float = 1e-4
    reason: str = ""
    sensor: str | None = None
    period: float | None = None

    def __post_init__(self) -> None:
        if self.kind == "discrete" and not self.labels:
            raise ValueError(f"feature {self.name!r}: a discrete feature needs at least one label")
        if self.kind == "continuous" and not (
            self.scale > 0 and np.isfinite(self.scale) and np.isfinite(self.location)
        ):
            raise ValueError(f"feature {self.name!r}: location must be finite and scale positive and finite")
        if self.period is not None and not (self.kind == "continuous" and 0 < self.period < np.inf):
            raise ValueError(f"feature {self.name!r}: a period is positive, finite and of a continuous feature")
        if self.period is not None and not self.scale <= MOST_TURNS * self.period:
            raise ValueError(f"feature {self.name!r}: its values spread over more than {MOST_TURNS:g} periods")
        if not 0 < self.unseen < 1:
            raise ValueError(f"feature {self.name!r}: the mass of unseen labels lies between 0 and 1")

    @property
    def source(self) -> str:
        """What its readings are called in events: the sensor's name, or its own."""
        return self.name if self.sensor is None else self.sensor

    def to_json(self) -> dict[str, Any]:
        """Without what a feature that comes once and is no cycle has not, as it was before there were others."""
        return {k: v for k, v in asdict(self).items() if k not in ("sensor", "period") or v is not None}


@dataclass(frozen=True)
class Schema:
    """The features of a record; a feature's *code* is its place in the tuple.

    window: what records are cut out of, None where they are given by name. The features of a sensor are one for each
    slot, one after the other."""

    features: tuple[Feature, ...]
    window: Window | None = None

    def __post_init__(self) -> None:
        if not self.features:
            raise ValueError("a schema needs at least one feature")
        if len(self.codes) != len(self.features):
            raise ValueError("feature names must be unique")
        if len({len(f.coordinates or ()) for f in self.features}) > 1:
            raise ValueError("either all features have coordinates, of one dimension, or none has")
        self._check_sensors()

    def _check_sensors(self) -> None:
        slots = 1 if self.window is None else self.window.slots
        if slots > 1 and all(f.sensor is None for f in self.features):
            raise ValueError("no sensor reports in the slots of the window")
        for name, (first, step) in self.places.items():
            own = self.features[first : first + (slots if step else 1)]
            if {f.source for f in own} != {name} or (step and len(own) != slots):
                raise ValueError(f"sensor {name!r}: its slots are not one after the other, a feature for each")
            if step and (self.window is None or own[0].coordinates is None):
                raise ValueError(f"sensor {name!r}: without a window and coordinates it reports once")
            if len({(f.sensor, f.kind, f.context, f.labels, f.period) for f in own}) > 1:
                raise ValueError(f"sensor {name!r}: its readings are not of one kind")
        if len(self.features) != sum(slots if step else 1 for _, step in self.places.values()):
            raise ValueError("the slots of a sensor are not one after the other, a feature for each")

    def __len__(self) -> int:
        return len(self.features)

    @cached_property
    def codes(self) -> dict[str, int]:
        return {f.name: i for i, f in enumerate(self.features)}

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.features)

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """What readings are called in events (`Feature.source`), in order of first appearance."""
        return tuple(dict.fromkeys(f.source for f in self.features))

    @cached_property
    def source_of(self) -> NDArray[np.int64]:
        """(F,) which of the sources a feature is a reading of."""
        place = {name: i for i, name in enumerate(self.sources)}
        return np.array([place[f.source] for f in self.features], np.int64)

    @cached_property
    def first_of(self) -> NDArray[np.int64]:
        """(S,) code of the first feature of each source."""
        return np.unique(self.source_of, return_index=True)[1]

    @cached_property
    def repeats(self) -> bool:
        """Whether a sensor may report several times in a record."""
        return len(self.sources) < len(self.features)

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """Source → its first feature's code, and how much the code grows from one slot of the window to the next: 1, or
        0 for what comes once."""
        found: dict[str, tuple[int, int]] = {}
        for code, f in enumerate(self.features):
            found.setdefault(f.source, (code, 0 if f.sensor is None else 1))
        return found

    @cached_property
    def discrete(self) -> NDArray[np.bool_]:
        """(F,) whether a feature is discrete."""
        return np.array([f.kind == "discrete" for f in self.features])

    @cached_property
    def cyclic(self) -> NDArray[np.bool_]:
        """(F,) whether a feature's values are places on a cycle."""
        return np.array([f.period is not None for f in self.features])

    @cached_property
    def turns(self) -> NDArray[np.float64]:
        """(F,) once around in scales; infinite where a feature is no cycle."""
        return np.array([np.inf if f.period is None else f.period / f.scale for f in self.features])

    @cached_property
    def linear(self) -> NDArray[np.bool_]:
        """(F,) whether a feature's values are numbers on a line: neither labels nor places on a cycle."""
        return ~(self.discrete | self.cyclic)

    @cached_property
    def context(self) -> NDArray[np.bool_]:
        """(F,) whether a feature is context, that is, never scored."""
        return np.array([f.context for f in self.features])

    @cached_property
    def label_counts(self) -> NDArray[np.int64]:
        """(F,) number of labels, 0 for continuous features."""
        return np.array([len(f.labels) for f in self.features], np.int64)

    @cached_property
    def label_codes(self) -> tuple[dict[str, int], ...]:
        """Per feature, label → code."""
        return tuple({label: k for k, label in enumerate(f.labels)} for f in self.features)

    @cached_property
    def _affine(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(F,) location and scale, 0 and 1 for discrete features."""
        rows = [(0.0, 1.0) if f.kind == "discrete" else (f.location, f.scale) for f in self.features]
        table = np.array(rows, np.float64)
        return table[:, 0], table[:, 1]

    def normalise(self, codes: NDArray[Any], values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Raw values to the model's units, elementwise; label codes stay as they are, NaN stays NaN."""
        location, scale = self._affine
        with np.errstate(over="ignore"):
            z: NDArray[np.float64] = np.maximum(np.minimum((values - location[codes]) / scale[codes], 1e300), -1e300)
        size = np.abs(z)
        if not (size > LINEAR).any():
            return z
        tail = np.sign(z) * (LINEAR + np.log1p(np.maximum(size - LINEAR, 0.0)))
        normal: NDArray[np.float64] = np.where((size > LINEAR) & ~self.discrete[codes], tail, z)
        return normal

    def denormalise(self, codes: NDArray[Any], values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The inverse of `normalise`."""
        location, scale = self._affine
        size = np.abs(values)
        with np.errstate(over="ignore"):
            far = np.sign(values) * (LINEAR + np.expm1(np.maximum(size - LINEAR, 0.0)))
            z = np.where((size > LINEAR) & ~self.discrete[codes], far, values)
            raw: NDArray[np.float64] = z * scale[codes] + location[codes]
        return raw

    def to_json(self) -> list[dict[str, Any]]:
        return [f.to_json() for f in self.features]

    @staticmethod
    def from_json(rows: Iterable[dict[str, Any]], window: dict[str, Any] | None = None) -> Schema:
        def feature(row: dict[str, Any]) -> Feature:
            row = dict(row, labels=tuple(row.get("labels", ())))
            if row.get("coordinates") is not None:
                row["coordinates"] = tuple(row["coordinates"])
            return Feature(**row)

        return Schema(tuple(feature(row) for row in rows), Window.from_json(window))

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of everything that gives a value its meaning (the stated reasons do not)."""
        rows: list[Any] = [{k: v for k, v in row.items() if k != "reason"} for row in self.to_json()]
        if self.window is not None:
            rows.append(self.window.to_json())
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


def label_of(value: object) -> str:
    """The canonical text of a discrete value: `true`, `3` for 3 and 3.0, otherwise the value as text."""
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, float | np.floating) and np.isfinite(value) and value == int(value):
        return str(int(value))
    return str(value)
