"""The features of a record, and the transformation of their values to the units of the model.

A feature is one measured quantity of a record. It is continuous (its values are numbers) or discrete (its values are
labels). A reading is one value of one feature. The code of a feature is its index in the schema; arrays use codes in
place of names.

A feature's identity is what the network gets before it predicts the value. It is an embedding learned for each feature,
the feature's coordinates (the row and column of a pixel, the position of a sensor), or both. If a sensor can report
several times in a record, it has one feature for each time slot of the record's window (`time_slots`). These features
share the sensor's embedding, and their coordinates express the time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from deformer_stream.model.cycles import Cycle, choose_cycle
from deformer_stream.model.reading_times import ReadingTimes
from deformer_stream.model.windows import PerSlot, Window

FeatureKind = Literal["continuous", "discrete"]

LINEAR_LIMIT = 8.0
"""The absolute value up to which normalised values are linear in raw values; beyond it they are logarithmic.

An extreme value is thus very improbable, but its log-density, which falls like the squared logarithm of the value,
stays finite in float32. Such a value also cannot dominate the predictions of later readings.
"""
SECONDS_PER_DAY = 86_400.0
"""The `Feature.period` of a feature whose values are times of day in seconds since midnight."""
MAX_PERIODS_PER_SCALE = 1e5
"""The largest allowed quotient scale / period of a cyclic feature.

The scale is the difference of raw values that is 1 in normalised units. If it spans more periods than this, single
precision cannot distinguish positions on the cycle.
"""
MAX_SHOWN_NAMES = 6
"""Largest number of features that the text of a schema names."""


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature: its name, its kind, and how its values are normalised.

    The names of the attributes are keys of the entry `features` in the manifest of a model directory.

    Attributes:
        name: The unique name.
        kind: "continuous" if the values are numbers, "discrete" if they are labels.
        context: Whether the feature is only an input to the predictions of other features and is never scored itself.
        coordinates: Numbers that identify the feature, such as the row and column of a pixel; None if it has none.
            They are inputs of the network. All features of a schema have the same number of coordinates.
        location: The raw value whose normalised value is 0.
        scale: The difference of raw values that corresponds to 1 in normalised units.
        quantum: The resolution of the sensor in raw units: all readings are multiples of it plus a constant. None if
            the readings do not lie on such a grid.
        low: The smallest raw value in the training data; None for discrete features.
        high: The largest raw value in the training data; None for discrete features.
        labels: The values of a discrete feature that occurred in training. The code of a label is its index here.
        unseen: The total probability that is reserved for all labels that did not occur in training.
        reason: Why `kind` was chosen, as text for people.
        sensor: The name of the sensor, if the sensor can report several times in a record. Such a sensor has one
            feature for each time slot, that is, for each part of the record's window of time. None if the feature has
            at most one reading per record.
        period: The period in raw units, if the values are positions on a cycle, such as times of day or angles; else
            None. As an input to the predictions of other readings, the value is mapped to an angle. The density of the
            value itself is not periodic: it treats the value as a number on a line.
        unit: The unit of the raw values as text for people, such as "m³/h"; None if it is not known.
        fill_values: Values that stand for a missing reading, such as "99999" and "Bad". Numbers are texts as well.

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
    unit: str | None = None
    fill_values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        is_continuous = self.kind == "continuous"
        if self.kind == "discrete" and not self.labels:
            raise ValueError(
                f"feature {self.name!r} is discrete, but has no labels: give it at least one, or make it continuous"
            )
        has_valid_scale = self.scale > 0 and np.isfinite(self.scale) and np.isfinite(self.location)
        if is_continuous and not has_valid_scale:
            raise ValueError(
                f"feature {self.name!r} has location {self.location} and scale {self.scale}: the location must be "
                "finite, and the scale must be positive and finite"
            )
        if self.period is not None and not (is_continuous and 0 < self.period < np.inf):
            raise ValueError(
                f"feature {self.name!r} is {self.kind} and has period {self.period}: the period must be positive and "
                "finite, and only continuous features can have one"
            )
        # `scale` measures how far the values spread. If it spans too many periods, rounding errors of single precision
        # hide the position on the cycle.
        if self.period is not None and not self.scale <= MAX_PERIODS_PER_SCALE * self.period:
            raise ValueError(
                f"the values of feature {self.name!r} spread over more than {MAX_PERIODS_PER_SCALE:g} periods (scale "
                f"{self.scale}, period {self.period}): check that the period has the unit of the values"
            )
        if not 0 < self.unseen < 1:
            raise ValueError(
                f"feature {self.name!r} reserves the probability {self.unseen} for labels that did not occur in "
                "training: the probability must be greater than 0 and less than 1"
            )

    @property
    def sensor_name(self) -> str:
        """The name that input messages use for readings of this feature.

        A sensor that can report several times in a record has a feature for each time slot of the record's window. The
        input messages then use the name of the sensor. Otherwise they use the name of the feature.
        """
        return self.name if self.sensor is None else self.sensor

    @property
    def cycle(self) -> Cycle | None:
        """The cycle on which the values are positions, None if they are not. Means of several readings lie on it."""
        return None if self.period is None else choose_cycle(self.period, self.low)

    def to_json(self) -> dict[str, Any]:
        """Return a dict from attribute names to JSON values, for the manifest (manifest.json) of a model directory.

        The keys `sensor`, `period`, `unit` and `fill_values` are left out if they are None or empty. The dict is part
        of the hash that identifies a schema, and schemas that were written before these keys existed must keep theirs.
        """
        optional_keys = ("sensor", "period", "unit", "fill_values")
        return {
            key: value for key, value in asdict(self).items() if key not in optional_keys or value not in (None, ())
        }


@dataclass(frozen=True, repr=False)
class Schema:
    """The features of a record. The code of a feature is its index in `features`.

    Arrays of shape (F,) have an entry for each of the F features, in the order of their codes.

    Attributes:
        features: The features. If a sensor has a feature for each time slot of the window, these features are adjacent
            and in the order of the time slots.
        window: The width and the time slots of the windows, if each window of a device's event time is one record.
            None if the input messages contain record ids.
        reading_times: The time scales of the records, if readings are irregular: a sensor reports any number of times
            in a record, and each reading keeps its own time. None if a feature has at most one reading per record.

    Raises:
        ValueError: The features contradict each other or the window.
    """

    features: tuple[Feature, ...]
    window: Window | None = None
    reading_times: ReadingTimes | None = None

    def __post_init__(self) -> None:
        if not self.features:
            raise ValueError("the schema has no features: give it at least one")
        if len(self.code_by_name) != len(self.features):
            # `code_by_name` keeps the last of several features with the same name.
            repeated_name = next(f.name for code, f in enumerate(self.features) if self.code_by_name[f.name] != code)
            raise ValueError(f"two features of the schema have the name {repeated_name!r}: give each a unique name")
        first = self.features[0]
        for f in self.features:
            if len(f.coordinates or ()) != len(first.coordinates or ()):
                raise ValueError(
                    f"feature {f.name!r} has {len(f.coordinates or ())} coordinates (numbers that identify it, such as "
                    f"its position), but feature {first.name!r} has {len(first.coordinates or ())}: give all features "
                    "the same number of coordinates"
                )
        self._check_sensors()
        if self.reading_times is not None and self.window is not None and self.window.slots > 1:
            raise ValueError(
                f"readings that keep their own times cannot be assigned to the {self.window.slots} time slots of the "
                "window: use a window without time slots, or a schema without reading_times"
            )

    def _check_sensors(self) -> None:
        """Check that each sensor has the features that it must have.

        A window (the time span of a record) can be divided into time slots. A sensor that can report several times in a
        record must have one feature for each time slot. These features must be adjacent and agree in kind, context,
        labels and period. Every other sensor must have a single feature.

        Raises:
            ValueError: The features do not satisfy these conditions.
        """
        num_slots = 1 if self.window is None else self.window.slots
        if num_slots > 1 and all(f.sensor is None for f in self.features):
            raise ValueError(
                f"the window has {num_slots} time slots, but no sensor has a feature for each of them: use a window "
                "without time slots, or create the features with expand_time_slots"
            )
        checked_codes: set[int] = set()
        for name, (first_code, code_step) in self.slot_layout_by_sensor.items():
            # `first_code` is the index of the sensor's first feature. `code_step` is 1 if the sensor has a feature for
            # each time slot, and 0 if it has a single feature.
            has_time_slots = code_step == 1
            num_features = num_slots if has_time_slots else 1
            features = self.features[first_code : first_code + num_features]
            # The slice is shorter than `num_features` if the schema ends before the last time slot.
            if {f.sensor_name for f in features} != {name} or len(features) != num_features:
                raise ValueError(
                    f"sensor {name!r} does not have {num_slots} adjacent features, one for each time slot of the "
                    "window: create the features with expand_time_slots"
                )
            checked_codes.update(range(first_code, first_code + num_features))
            if has_time_slots and self.window is None:
                raise ValueError(
                    f"sensor {name!r} has time slots, but the schema has no window: create the features with "
                    "expand_time_slots"
                )
            if has_time_slots and features[0].coordinates is None:
                raise ValueError(
                    f"sensor {name!r} has a feature for each time slot, but these features have no coordinates "
                    "(numbers that identify a feature). A coordinate must state the time of the slot: create the "
                    "features with expand_time_slots"
                )
            if len({(f.sensor, f.kind, f.context, f.labels, f.period) for f in features}) > 1:
                raise ValueError(
                    f"the features for the time slots of sensor {name!r} differ: give all of them the same sensor, "
                    "kind (continuous or discrete), context, labels and period"
                )
        # The loop checked as many features as each sensor may have. Any other feature belongs to one of these sensors.
        for code, f in enumerate(self.features):
            if code not in checked_codes:
                raise ValueError(
                    f"feature {f.name!r} is one too many for sensor {f.sensor_name!r}, which must have either a single "
                    f"feature or one for each of {num_slots} time slots: create the features with expand_time_slots"
                )

    def __len__(self) -> int:
        """Return the number of features."""
        return len(self.features)

    def __repr__(self) -> str:
        """Return the number of features and the names of the first ones."""
        shown = ", ".join(self.names[:MAX_SHOWN_NAMES]) + (", …" if len(self) > MAX_SHOWN_NAMES else "")
        window = "" if self.window is None else f"; window {self.window}"
        return f"Schema({len(self)} feature{'s' * (len(self) != 1)}: {shown}{window})"

    @cached_property
    def code_by_name(self) -> dict[str, int]:
        """A mapping from the name of each feature to its code, which is its index in `features`."""
        return {f.name: code for code, f in enumerate(self.features)}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the features, in the order of `features`."""
        return tuple(f.name for f in self.features)

    @cached_property
    def sensor_names(self) -> tuple[str, ...]:
        """The names that input messages use for readings (`Feature.sensor_name`), in order of first appearance.

        If a sensor has a feature for each time slot, these features share the sensor's name. Every other feature
        counts as a sensor of the same name.
        """
        return tuple(dict.fromkeys(f.sensor_name for f in self.features))

    @cached_property
    def sensor_indexes(self) -> NDArray[np.int64]:
        """The index in `sensor_names` of the sensor of each of the F features, as an array (F,)."""
        index_by_name = {name: i for i, name in enumerate(self.sensor_names)}
        return np.array([index_by_name[f.sensor_name] for f in self.features], np.int64)

    @cached_property
    def first_codes(self) -> NDArray[np.int64]:
        """For each entry of `sensor_names`, the index in `features` of the first feature of that sensor."""
        _, first_occurrences = np.unique(self.sensor_indexes, return_index=True)
        return first_occurrences

    @cached_property
    def has_repeating_sensors(self) -> bool:
        """Whether some sensor can report several times in a record."""
        return len(self.sensor_names) < len(self.features)

    @property
    def may_report_again(self) -> bool:
        """Whether a sensor may report again in a record: records are windows of time, or readings are irregular."""
        return self.window is not None or self.reading_times is not None

    @cached_property
    def slot_layout_by_sensor(self) -> dict[str, tuple[int, int]]:
        """A mapping from each sensor name to (first code, step), which locate the sensor's features in `features`.

        The sensor's feature for time slot k of the record's window has the code (index in `features`)
        `first code + k · step`. The step is 1 if the sensor has a feature for each time slot, and 0 if it has a single
        feature for all.
        """
        layout: dict[str, tuple[int, int]] = {}
        for code, f in enumerate(self.features):
            step = 0 if f.sensor is None else 1
            layout.setdefault(f.sensor_name, (code, step))  # keeps the entry of the sensor's first feature
        return layout

    @cached_property
    def per_slot_by_sensor(self) -> dict[str, PerSlot]:
        """A mapping from each sensor name to the rule for several of its readings in one time slot.

        The rules are described at `Window.per_slot`. A window without time slots counts as one time slot. Sensors that
        report once, although the window has time slots, always use "first", so that their reading is scored when it
        arrives. Labels cannot be averaged or compared, so "mean", "min" and "max" are "last" for them. The mean of
        positions on a cycle is the circular mean (`slot_mean_cycles`).
        """
        window = self.window
        if window is None:
            return dict.fromkeys(self.sensor_names, "first")
        rules: dict[str, PerSlot] = {}
        for f in self.features:
            rule = window.per_slot
            if window.slots > 1 and f.sensor is None:
                rule = "first"
            elif f.kind == "discrete" and rule != "first":
                rule = "last"
            rules[f.sensor_name] = rule
        return rules

    @cached_property
    def slot_mean_cycles(self) -> tuple[Cycle | None, ...]:
        """For each feature, the cycle on which the readings of a time slot are averaged.

        It is None if the readings are not averaged (`per_slot_by_sensor`), or if their mean is the arithmetic mean.
        """
        rules = self.per_slot_by_sensor
        return tuple(f.cycle if rules[f.sensor_name] == "mean" else None for f in self.features)

    @cached_property
    def is_discrete(self) -> NDArray[np.bool_]:
        """Whether the values of each of the F features are labels, as a bool array (F,)."""
        return np.array([f.kind == "discrete" for f in self.features])

    @cached_property
    def is_cyclic(self) -> NDArray[np.bool_]:
        """Whether the values of each of the F features are positions on a cycle, as a bool array (F,).

        Examples are times of day and angles.
        """
        return np.array([f.period is not None for f in self.features])

    @cached_property
    def cycle_lengths(self) -> NDArray[np.float64]:
        """The period of each of the F features in normalised units (period / scale), as an array (F,).

        It is infinite if the values of a feature are not positions on a cycle.
        """
        return np.array([np.inf if f.period is None else f.period / f.scale for f in self.features])

    @cached_property
    def is_linear(self) -> NDArray[np.bool_]:
        """Whether the values of each of the F features are numbers on a line, as a bool array (F,).

        It is False for labels and for positions on a cycle, such as times of day.
        """
        return ~(self.is_discrete | self.is_cyclic)

    @cached_property
    def is_context(self) -> NDArray[np.bool_]:
        """Whether each of the F features is a context feature, as a bool array (F,).

        A context feature is only an input to the predictions of other features and is never scored itself.
        """
        return np.array([f.context for f in self.features])

    @cached_property
    def label_counts(self) -> NDArray[np.int64]:
        """The number of labels of each of the F features, as an array (F,); 0 for continuous features."""
        return np.array([len(f.labels) for f in self.features], np.int64)

    @cached_property
    def code_by_label(self) -> tuple[dict[str, int], ...]:
        """For each feature, a mapping from the text of each label to its code, the index in `Feature.labels`."""
        return tuple({label: code for code, label in enumerate(f.labels)} for f in self.features)

    @cached_property
    def _location_and_scale(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Two arrays (F,): the location and the scale of each of the F features.

        Normalisation subtracts the location and divides by the scale. Discrete features have location 0 and scale 1,
        so that normalisation leaves label codes unchanged.
        """
        rows = [(0.0, 1.0) if f.kind == "discrete" else (f.location, f.scale) for f in self.features]
        table = np.array(rows, np.float64)
        return table[:, 0], table[:, 1]

    def normalise(self, codes: NDArray[Any], values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return values in the normalised units of the model.

        A continuous value is mapped to z = (value − location) / scale. If |z| exceeds `LINEAR_LIMIT`, the excess
        |z| − `LINEAR_LIMIT` is replaced by ln(1 + excess). Label codes are unchanged.

        Args:
            codes: The feature to which each value belongs, as an index in `features`; of any shape.
            values: The raw values or label codes, of the same shape. NaN is allowed and stays NaN.

        Returns:
            The normalised values or label codes, of the same shape.
        """
        location, scale = self._location_and_scale
        with np.errstate(over="ignore"):
            quotient = (values - location[codes]) / scale[codes]
        # A large value divided by a small scale can be infinite; the model needs finite numbers.
        z: NDArray[np.float64] = np.maximum(np.minimum(quotient, 1e300), -1e300)
        magnitude = np.abs(z)
        if not (magnitude > LINEAR_LIMIT).any():
            return z  # the usual case, without the cost of the logarithm
        excess = np.maximum(magnitude - LINEAR_LIMIT, 0.0)
        logarithmic = np.sign(z) * (LINEAR_LIMIT + np.log1p(excess))
        is_beyond_limit = (magnitude > LINEAR_LIMIT) & ~self.is_discrete[codes]
        normalised: NDArray[np.float64] = np.where(is_beyond_limit, logarithmic, z)
        return normalised

    def denormalise(self, codes: NDArray[Any], values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return raw values, the inverse of `normalise`.

        Args:
            codes: The feature to which each value belongs, as an index in `features`; of any shape.
            values: The normalised values or label codes, of the same shape.

        Returns:
            The raw values or label codes, of the same shape; infinite if a value exceeds the range of float64.
        """
        location, scale = self._location_and_scale
        magnitude = np.abs(values)
        is_beyond_limit = (magnitude > LINEAR_LIMIT) & ~self.is_discrete[codes]
        with np.errstate(over="ignore"):
            # `normalise` replaced the excess over the limit by ln(1 + excess).
            excess = np.expm1(np.maximum(magnitude - LINEAR_LIMIT, 0.0))
            exponential = np.sign(values) * (LINEAR_LIMIT + excess)
            z = np.where(is_beyond_limit, exponential, values)
            raw: NDArray[np.float64] = z * scale[codes] + location[codes]
        return raw

    def to_json(self) -> list[dict[str, Any]]:
        """Return one JSON object for each feature, for the manifest (manifest.json) of a model directory.

        The window is not included, because it has an entry of its own in the manifest.
        """
        return [f.to_json() for f in self.features]

    @staticmethod
    def from_json(
        rows: Iterable[dict[str, Any]],
        window: dict[str, Any] | None = None,
        reading_times: dict[str, Any] | None = None,
    ) -> Schema:
        """Return the schema from the JSON values that `to_json`, `Window.to_json` and `ReadingTimes.to_json` returned.

        Args:
            rows: One JSON object for each feature.
            window: The JSON object of the window, or None if the input messages contain record ids.
            reading_times: The JSON object of the time scales, or None if readings are not irregular.

        Raises:
            ValueError: The features contradict each other or the window.
            TypeError: A key is unknown or missing, or a value has the wrong type.
        """

        def read_feature(row: dict[str, Any]) -> Feature:
            # JSON has lists only; a feature needs tuples.
            row = dict(row, labels=tuple(row.get("labels", ())), fill_values=tuple(row.get("fill_values", ())))
            if row.get("coordinates") is not None:
                row["coordinates"] = tuple(row["coordinates"])
            return Feature(**row)

        features = tuple(read_feature(row) for row in rows)
        return Schema(features, Window.from_json(window), ReadingTimes.from_json(reading_times))

    def with_units(self, unit_by_name: Mapping[str, str]) -> Schema:
        """Return the schema with units of features added or replaced. The fingerprint stays the same.

        Args:
            unit_by_name: Unit by the name that input messages use (`Feature.sensor_name`) or by the name of the
                feature. An empty text removes the unit. Names that the schema does not have are ignored.
        """
        features = []
        for f in self.features:
            unit = unit_by_name.get(f.name, unit_by_name.get(f.sensor_name, f.unit))
            features.append(replace(f, unit=unit or None))
        return replace(self, features=tuple(features))

    def with_fill_values(self, list_values: Callable[[str], tuple[str, ...]]) -> Schema:
        """Return the schema with other fill values of its features.

        Args:
            list_values: Returns the fill values of the feature with a name that input messages use
                (`Feature.sensor_name`).
        """
        return replace(self, features=tuple(replace(f, fill_values=list_values(f.sensor_name)) for f in self.features))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the schema (16 hexadecimal digits), by which files that were made with another schema are detected.

        It covers the window, the time scales of irregular readings, and all attributes of the features except
        `Feature.reason` and `Feature.unit`, which are texts for people.
        """
        # These texts do not affect how the model reads or scores values, so they may change.
        texts = ("reason", "unit")
        rows: list[Any] = [{key: v for key, v in row.items() if key not in texts} for row in self.to_json()]
        if self.window is not None:
            rows.append(self.window.to_json())
        if self.reading_times is not None:
            rows.append({"reading_times": self.reading_times.to_json()})
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


BOOLEANS, BOOLEAN_NUMBERS = ("false", "true"), ("0", "1")
"""The labels of booleans, and the numbers that other programs write for them, in the same order."""


def spell_boolean(label: str, known_labels: Container[str]) -> str:
    """Return a boolean in the spelling of the known labels, and any other label unchanged.

    One program may write false and true, and another one 0 and 1.

    Args:
        label: The label, which is not among the known ones.
        known_labels: The labels that occurred in training.
    """
    for names, numbers in ((BOOLEANS, BOOLEAN_NUMBERS), (BOOLEAN_NUMBERS, BOOLEANS)):
        if label in numbers and all(name in known_labels for name in names):
            return names[numbers.index(label)]
    return label


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
