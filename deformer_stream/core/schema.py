"""Features: what a reading is called, what kind of value it has, and how values become the model's units.

A feature's *identity* is what the model is told before it predicts the value: an embedding learnt per feature,
coordinates (the row and column of a pixel, the position of a sensor), or both.
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

Kind = Literal["continuous", "discrete"]

LINEAR = 8.0
"""Normalised values are linear up to this many scales and logarithmic beyond, so that a wild reading is very surprising
yet finite in float32 (log density falls like −ln²) and cannot flood the readings that condition on it."""


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature. `context`: conditions the others and is never scored.

    Continuous: normalised value = tail((raw − location) / scale); `quantum` is the sensor's resolution in raw units
    (None where readings do not repeat on a grid); low and high are the range seen in training.
    Discrete: `labels` are the values seen in training; `unseen` is the probability mass kept for all others.
    `reason` says in words why the kind was chosen.
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

    def __post_init__(self) -> None:
        if self.kind == "discrete" and not self.labels:
            raise ValueError(f"feature {self.name!r}: a discrete feature needs at least one label")
        if self.kind == "continuous" and not (
            self.scale > 0 and np.isfinite(self.scale) and np.isfinite(self.location)
        ):
            raise ValueError(f"feature {self.name!r}: location must be finite and scale positive and finite")
        if not 0 < self.unseen < 1:
            raise ValueError(f"feature {self.name!r}: the mass of unseen labels lies between 0 and 1")


@dataclass(frozen=True)
class Schema:
    """The features of a record; a feature's *code* is its place in the tuple."""

    features: tuple[Feature, ...]

    def __post_init__(self) -> None:
        if not self.features:
            raise ValueError("a schema needs at least one feature")
        if len(self.codes) != len(self.features):
            raise ValueError("feature names must be unique")
        if len({len(f.coordinates or ()) for f in self.features}) > 1:
            raise ValueError("either all features have coordinates, of one dimension, or none has")

    def __len__(self) -> int:
        return len(self.features)

    @cached_property
    def codes(self) -> dict[str, int]:
        return {f.name: i for i, f in enumerate(self.features)}

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.features)

    @cached_property
    def discrete(self) -> NDArray[np.bool_]:
        """(F,) whether a feature is discrete."""
        return np.array([f.kind == "discrete" for f in self.features])

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
            z = np.clip((values - location[codes]) / scale[codes], -1e300, 1e300)
        size = np.abs(z)
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
        return [asdict(f) for f in self.features]

    @staticmethod
    def from_json(rows: Iterable[dict[str, Any]]) -> Schema:
        def feature(row: dict[str, Any]) -> Feature:
            row = dict(row, labels=tuple(row.get("labels", ())))
            if row.get("coordinates") is not None:
                row["coordinates"] = tuple(row["coordinates"])
            return Feature(**row)

        return Schema(tuple(feature(row) for row in rows))

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of everything that gives a value its meaning (the stated reasons do not)."""
        rows = [{k: v for k, v in row.items() if k != "reason"} for row in self.to_json()]
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


def label_of(value: object) -> str:
    """The canonical text of a discrete value: `true`, `3` for 3 and 3.0, otherwise the value as text."""
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, float | np.floating) and np.isfinite(value) and value == int(value):
        return str(int(value))
    return str(value)
