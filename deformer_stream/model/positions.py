"""Positions of readings: the numbers by which readings are compared when distances between records are measured.

The position of a number is (number − location) / scale, with the location and the scale of its feature. This is the
normalised value without the logarithm that `Schema.normalise` applies to large values. If all labels of a feature are
texts of numbers below `MAX_POSITION`, the position of a label is its number, otherwise its code. All labels that did
not occur in training have one position, which is greater than those of the known labels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deformer_stream.model.schema import Feature, Schema

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]

MAX_POSITION = 1e6
"""The limit to which the positions of readings are clipped, so that sums of their differences are finite in float32."""


class Positions:
    """Computes the positions of readings of the features of a schema.

    Args:
        schema: The F features.
    """

    def __init__(self, schema: Schema) -> None:
        self._locations = np.array([feature.location for feature in schema.features], np.float64)
        self._scales = np.array([feature.scale for feature in schema.features], np.float64)
        self._is_discrete = schema.is_discrete
        # (F, P) for P labels at most. The last position of a feature, that of unknown labels, is repeated.
        self._label_positions = _make_label_table(schema)

    def compute(self, codes: Ints, values: Floats) -> Floats32:
        """Return the positions of readings, of the shape of `codes`.

        Args:
            codes: The features of the readings, of any shape.
            values: Their raw values or label codes, of the same shape.
        """
        positions = (values - self._locations[codes]) / self._scales[codes]
        num_labels = self._label_positions.shape[1]
        if num_labels:
            label_codes = np.clip(values, 0, num_labels - 1).astype(np.int64)
            positions = np.where(self._is_discrete[codes], self._label_positions[codes, label_codes], positions)
        return np.clip(positions, -MAX_POSITION, MAX_POSITION).astype(np.float32)


def compute_positions(schema: Schema, values: Floats) -> Floats32:
    """Return the positions of the readings of R records, (R, F).

    Args:
        schema: The F features.
        values: (R, F), for each of R records the normalised values or label codes of the F features; any value for
            a missing reading.
    """
    codes = np.broadcast_to(np.arange(len(schema)), values.shape)
    return Positions(schema).compute(codes, schema.denormalise(codes, values))


def compute_label_positions(feature: Feature) -> Floats | None:
    """Return the position of each label of a feature.

    Returns:
        An array with one position for each label, in the order of the label codes. One more position at the end is for
        all labels that did not occur in training. None for a continuous feature.
    """
    if feature.kind == "continuous":
        return None
    if not _has_numeric_labels(feature):
        return np.arange(len(feature.labels) + 1, dtype=np.float64)
    numbers = np.array([float(label) for label in feature.labels])
    # The position of labels that did not occur in training is greater than all others. Its distance from the greatest
    # label is the range of the labels, but at least 1.
    unseen_position = numbers.max() + max(float(np.ptp(numbers)), 1.0)
    return np.append(numbers, unseen_position)


def has_unordered_labels(feature: Feature) -> bool:
    """Return whether a feature has labels without an order, which are only compared for equality."""
    return feature.kind == "discrete" and not _has_numeric_labels(feature)


def _has_numeric_labels(feature: Feature) -> bool:
    """Return whether all labels of a discrete feature are texts of numbers below `MAX_POSITION`, such as "2" or "0.5".

    Larger numbers, such as those of products, would all be clipped to the same position.
    """
    try:
        return all(abs(float(label)) < MAX_POSITION for label in feature.labels)  # false for infinity and NaN
    except ValueError:
        return False


def _make_label_table(schema: Schema) -> Floats:
    """Return the positions of the labels of each feature, (F, P) for P labels at most."""
    positions = [compute_label_positions(feature) for feature in schema.features]
    width = max((len(row) for row in positions if row is not None), default=0)
    table = np.zeros((len(schema), width))
    for code, row in enumerate(positions):
        if row is not None:
            table[code] = np.pad(row, (0, width - len(row)), mode="edge")
    return table
