"""Estimates of single values from conditional distributions: likeliest labels, and numbers of a sensor's resolution."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deformer_stream.model.schema import Schema

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def find_likeliest_labels(schema: Schema, codes: Ints, log_mass: Floats) -> Ints:
    """Return the code of the most probable label of each reading, among the labels that occurred in training.

    A distribution also has a probability that another label occurs; it is ignored.

    Args:
        schema: Describes the features.
        codes: Feature codes (indexes in the schema) of the readings, of any shape S.
        log_mass: (*S, K + 1) ln of the probability of each label. After the labels of a feature comes the probability
            of labels that did not occur in training. The axis is long enough for the feature with most labels.

    Returns:
        Label codes of shape S, 0 for continuous features.
    """
    # A continuous feature has no labels. It is treated as if it had one, so that its result is 0.
    num_labels = np.maximum(schema.label_counts[codes], 1)
    is_own_label = np.arange(log_mass.shape[-1]) < num_labels[..., None]
    likeliest: Ints = np.where(is_own_label, log_mass, -np.inf).argmax(-1)
    return likeliest


def round_to_quantum(schema: Schema, codes: Ints, values: Floats) -> Floats:
    """Round raw values to the resolution of their sensors, so that imputed values look like measured ones.

    The resolution of a sensor is called its quantum: its values are origin + k · quantum for integers k. Values of
    features without a known quantum stay the same.

    Args:
        schema: Describes the features.
        codes: Feature codes in the shape of `values`.
        values: Raw values, of any shape.

    Returns:
        The rounded values, in the same shape.
    """
    # Per feature: the quantum, NaN if it is not known; the lowest training value; and the origin.
    feature_quantum = np.array([feature.quantum or np.nan for feature in schema.features])
    feature_low = np.array([feature.low or 0.0 for feature in schema.features])
    # The origin is 0 if the lowest training value is a multiple of the quantum, so that rounding errors of this value
    # do not shift the others. Otherwise it is the lowest training value.
    remainder = feature_low - feature_quantum * np.round(feature_low / feature_quantum)
    feature_origin = np.where(np.abs(remainder) < 1e-6 * feature_quantum, 0.0, feature_low)
    origin, quantum = feature_origin[codes], feature_quantum[codes]
    with np.errstate(invalid="ignore"):
        num_steps = np.round((values - origin) / quantum)
        # For a quantum like 0.1, of which 1 is a multiple, k steps are computed as k / 10 and not as k · 0.1. In
        # floating point, 3 / 10 equals 0.3, but 3 · 0.1 does not.
        steps_per_unit = np.round(1 / quantum)
        divides_unit = (steps_per_unit > 0) & (np.abs(steps_per_unit * quantum - 1) < 1e-9)
        divisor = np.where(divides_unit, steps_per_unit, 1.0)  # never 0, so that no division fails
        rounded = origin + np.where(divides_unit, num_steps / divisor, num_steps * quantum)
    return np.where(np.isnan(quantum), values, rounded)
