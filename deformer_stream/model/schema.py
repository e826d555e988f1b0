"""The features of a record, and the transformation of their values to the units of the model.

A feature is one measured quantity of a record, continuous or discrete. A reading is one value of one feature. The code
of a feature is its index in the schema; arrays use codes in place of names.

A feature's identity is what the network gets before it predicts the value: an embedding learned for each feature, the
feature's coordinates (the row and column of a pixel, the position of a sensor), or both. If a sensor can report several
times in a record, it has one feature for each time slot of the record's window (`time_slots`). These features share the
sensor's embedding, and their coordinates express the time.
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

FeatureKind = Literal["continuous", "discrete"]

LINEAR_LIMIT = 8.0
"""The absolute value up to which normalised values are linear in raw values; beyond it they are logarithmic.

A wild reading is thus very improbable, but finite in float32: the log-density falls like the squared logarithm of the
value. It also cannot dominate the readings that are conditioned on it.
"""
SECONDS_PER_DAY = 86_400.0
"""The period of times of day, which are given in seconds since midnight."""
MAX_PERIODS_PER_SCALE = 1e5
"""The largest number of periods that the scale of a cyclic feature may span.

Beyond it, single precision cannot distinguish positions on the cycle.
"""


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature: its name, its kind, and how its values are normalised.

    The names of the attributes are keys of the entry `features` in the manifest of a model directory.

    Attributes:
        name: The unique name.
        kind: "continuous" for numbers, "discrete" for labels.
        context: Whether the feature only conditions the others and is never scored itself.
        coordinates: Numbers that identify the feature, of equal length for all features; None if there are none.
        location: The raw value whose normalised value is 0.
        scale: The difference of raw values that corresponds to 1 in normalised units.
        quantum: The resolution of the sensor in raw units, or None if the readings do not lie on a grid.
        low: The smallest raw value in training, None for discrete features.
        high: The largest raw value in training, None for discrete features.
        labels: The values of a discrete feature that occurred in training; the code of a label is its index.
        unseen: The probability that is reserved for all labels that did not occur in training.
        reason: Why the kind was chosen, in words for a person.
        sensor: The name of the sensor of which this feature is the reading in one time slot; None for a feature with
            at most one reading per record.
        period: The period in raw units, if the values are positions on a cycle, such as times of day or angles. Other
            readings are conditioned on the position on the cycle. The density of the value itself is that of a number
            on a line.

    Raises:
        ValueError: The attributes contradict each other or are out of range.
    """

    name: str
    kind: FeatureKind
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
        is_continuous = self.kind == "continuous"
        if self.kind == "discrete" and not self.labels:
            raise ValueError(f"feature {self.name!r} is discrete, but has no labels: a discrete feature needs one")
        has_valid_scale = self.scale > 0 and np.isfinite(self.scale) and np.isfinite(self.location)
        if is_continuous and not has_valid_scale:
            raise ValueError(f"feature {self.name!r}: location must be finite and scale positive and finite")
        if self.period is not None and not (is_continuous and 0 < self.period < np.inf):
            raise ValueError(
                f"feature {self.name!r}: the period must be positive and finite, and only continuous features have one"
            )
        if self.period is not None and not self.scale <= MAX_PERIODS_PER_SCALE * self.period:
            raise ValueError(
                f"feature {self.name!r}: its values spread over more than {MAX_PERIODS_PER_SCALE:g} periods; "
                "check the unit of the period"
            )
        if not 0 < self.unseen < 1:
            raise ValueError(f"feature {self.name!r}: the probability of unseen labels must lie between 0 and 1")

    @property
    def sensor_name(self) -> str:
        """The name that events use for this feature's readings: the sensor's name, or the feature's own."""
        return self.name if self.sensor is None else self.sensor

    def to_json(self) -> dict[str, Any]:
        """Return the feature as an object for the manifest of a model directory.

        The keys `sensor` and `period` are left out if they are None. Models from before these keys existed thus keep
        their fingerprints.
        """
        optional_keys = ("sensor", "period")
        return {key: value for key, value in asdict(self).items() if key not in optional_keys or value is not None}


@dataclass(frozen=True)
class Schema:
    """The features of a record. The code of a feature is its index in `features`.

    Arrays of shape (F,) have an entry for each of the F features, in the order of their codes.

    Attributes:
        features: The features. If a sensor has a feature for each time slot of the window, these features stand next to
            each other in the order of the time slots.
        window: The windows of event time that are the records; None if records have ids in the events.

    Raises:
        ValueError: The features contradict each other or the window.
    """

    features: tuple[Feature, ...]
    window: Window | None = None

    def __post_init__(self) -> None:
        if not self.features:
            raise ValueError("the schema has no features: it needs at least one")
        if len(self.code_by_name) != len(self.features):
            raise ValueError("two features have the same name: feature names must be unique")
        if len({len(f.coordinates or ()) for f in self.features}) > 1:
            raise ValueError("the features have different numbers of coordinates: give all of them the same number")
        self._check_sensors()

    def _check_sensors(self) -> None:
        """Raise ValueError if the features of a sensor do not match the time slots of the window."""
        num_slots = 1 if self.window is None else self.window.slots
        if num_slots > 1 and all(f.sensor is None for f in self.features):
            raise ValueError("the window has time slots, but no sensor reports in them")
        num_expected = 0
        for name, (first_code, code_step) in self.slot_layout_by_sensor.items():
            num_features = num_slots if code_step else 1
            num_expected += num_features
            features = self.features[first_code : first_code + num_features]
            if {f.sensor_name for f in features} != {name} or (code_step and len(features) != num_slots):
                raise ValueError(f"sensor {name!r} does not have one feature for each time slot, next to each other")
            if code_step and (self.window is None or features[0].coordinates is None):
                raise ValueError(f"sensor {name!r} has time slots, which need a window and coordinates")
            if len({(f.sensor, f.kind, f.context, f.labels, f.period) for f in features}) > 1:
                raise ValueError(f"sensor {name!r}: the features of its time slots are not of one kind")
        if len(self.features) != num_expected:
            raise ValueError("the features of a sensor's time slots do not stand next to each other in the schema")

    def __len__(self) -> int:
        """Return the number F of features."""
        return len(self.features)

    @cached_property
    def code_by_name(self) -> dict[str, int]:
        """The code of each feature by its name."""
        return {f.name: code for code, f in enumerate(self.features)}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the features in the order of their codes."""
        return tuple(f.name for f in self.features)

    @cached_property
    def sensor_names(self) -> tuple[str, ...]:
        """The names that events use for readings (`Feature.sensor_name`), in order of first appearance."""
        return tuple(dict.fromkeys(f.sensor_name for f in self.features))

    @cached_property
    def sensor_indexes(self) -> NDArray[np.int64]:
        """(F,) the index in `sensor_names` of each feature's sensor."""
        index_by_name = {name: i for i, name in enumerate(self.sensor_names)}
        return np.array([index_by_name[f.sensor_name] for f in self.features], np.int64)

    @cached_property
    def first_codes(self) -> NDArray[np.int64]:
        """The code of the first feature of each sensor, in the order of `sensor_names`."""
        return np.unique(self.sensor_indexes, return_index=True)[1]

    @cached_property
    def has_repeating_sensors(self) -> bool:
        """Whether some sensor can report several times in a record."""
        return len(self.sensor_names) < len(self.features)

    @cached_property
    def slot_layout_by_sensor(self) -> dict[str, tuple[int, int]]:
        """By sensor name: the code of the sensor's first feature, and the step of the code per time slot.

        The feature of time slot k has the code first + k · step. The step is 1 for a sensor that reports in each time
        slot, and 0 for one that reports once in a record.
        """
        layout: dict[str, tuple[int, int]] = {}
        for code, f in enumerate(self.features):
            layout.setdefault(f.sensor_name, (code, 0 if f.sensor is None else 1))
        return layout

    @cached_property
    def is_discrete(self) -> NDArray[np.bool_]:
        """(F,) whether each feature is discrete."""
        return np.array([f.kind == "discrete" for f in self.features])

    @cached_property
    def is_cyclic(self) -> NDArray[np.bool_]:
        """(F,) whether the values of each feature are positions on a cycle."""
        return np.array([f.period is not None for f in self.features])

    @cached_property
    def cycle_lengths(self) -> NDArray[np.float64]:
        """(F,) the period of each feature in units of its scale, infinite for features that are not cyclic."""
        return np.array([np.inf if f.period is None else f.period / f.scale for f in self.features])

    @cached_property
    def is_linear(self) -> NDArray[np.bool_]:
        """(F,) whether the values of each feature are numbers on a line, neither labels nor positions on a cycle."""
        return ~(self.is_discrete | self.is_cyclic)

    @cached_property
    def is_context(self) -> NDArray[np.bool_]:
        """(F,) whether each feature only conditions the others and is never scored itself."""
        return np.array([f.context for f in self.features])

    @cached_property
    def label_counts(self) -> NDArray[np.int64]:
        """(F,) the number of labels of each feature, 0 for continuous features."""
        return np.array([len(f.labels) for f in self.features], np.int64)

    @cached_property
    def code_by_label(self) -> tuple[dict[str, int], ...]:
        """The code of each label by its text, one mapping per feature."""
        return tuple({label: code for code, label in enumerate(f.labels)} for f in self.features)

    @cached_property
    def _location_and_scale(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(F,) the locations and (F,) the scales, 0 and 1 for discrete features."""
        rows = [(0.0, 1.0) if f.kind == "discrete" else (f.location, f.scale) for f in self.features]
        table = np.array(rows, np.float64)
        return table[:, 0], table[:, 1]

    def normalise(self, codes: NDArray[Any], values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return values in the units of the model.

        A continuous value is mapped to z = (value − location) / scale. If |z| exceeds `LINEAR_LIMIT`, the excess is
        replaced by its logarithm, ln(1 + excess). Label codes are unchanged.

        Args:
            codes: The feature codes, of any shape.
            values: The raw values or label codes, of the same shape. NaN is allowed and stays NaN.
        """
        location, scale = self._location_and_scale
        with np.errstate(over="ignore"):
            # Infinite quotients of large values and small scales become finite.
            z: NDArray[np.float64] = np.maximum(np.minimum((values - location[codes]) / scale[codes], 1e300), -1e300)
        size = np.abs(z)
        if not (size > LINEAR_LIMIT).any():
            return z
        logarithmic = np.sign(z) * (LINEAR_LIMIT + np.log1p(np.maximum(size - LINEAR_LIMIT, 0.0)))
        is_beyond = (size > LINEAR_LIMIT) & ~self.is_discrete[codes]
        normalised: NDArray[np.float64] = np.where(is_beyond, logarithmic, z)
        return normalised

    def denormalise(self, codes: NDArray[Any], values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return raw values, the inverse of `normalise`.

        Args:
            codes: The feature codes, of any shape.
            values: The normalised values or label codes, of the same shape.
        """
        location, scale = self._location_and_scale
        size = np.abs(values)
        with np.errstate(over="ignore"):
            exponential = np.sign(values) * (LINEAR_LIMIT + np.expm1(np.maximum(size - LINEAR_LIMIT, 0.0)))
            is_beyond = (size > LINEAR_LIMIT) & ~self.is_discrete[codes]
            z = np.where(is_beyond, exponential, values)
            raw: NDArray[np.float64] = z * scale[codes] + location[codes]
        return raw

    def to_json(self) -> list[dict[str, Any]]:
        """Return the features as a list for the manifest of a model directory; the window is stored separately."""
        return [f.to_json() for f in self.features]

    @staticmethod
    def from_json(rows: Iterable[dict[str, Any]], window: dict[str, Any] | None = None) -> Schema:
        """Return the schema that `to_json` and `Window.to_json` wrote.

        Args:
            rows: The features, one object for each.
            window: The window, or None if records have ids in the events.

        Raises:
            ValueError: The features contradict each other or the window.
            TypeError: A key is unknown or missing, or a value has the wrong type.
        """

        def read_feature(row: dict[str, Any]) -> Feature:
            row = dict(row, labels=tuple(row.get("labels", ())))
            if row.get("coordinates") is not None:
                row["coordinates"] = tuple(row["coordinates"])
            return Feature(**row)

        return Schema(tuple(read_feature(row) for row in rows), Window.from_json(window))

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that identify everything that decides the meaning of a value.

        The explanations in `Feature.reason` are left out.
        """
        rows: list[Any] = [{key: v for key, v in row.items() if key != "reason"} for row in self.to_json()]
        if self.window is not None:
            rows.append(self.window.to_json())
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


def format_label(value: object) -> str:
    """Return the canonical text of a discrete value, so that equal values in different types get the same label.

    Booleans become `true` and `false`, whole numbers lose their fraction (3 and 3.0 both become `3`), and every other
    value is converted by `str`.
    """
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, float | np.floating) and np.isfinite(value) and value == int(value):
        return str(int(value))
    return str(value)
