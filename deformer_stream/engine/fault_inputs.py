"""The inputs of the classifier of faults: what the density model says about each reading of a partial record.

Each reading is compared with its distribution given all other readings of the record. The inputs of a record are the
same for every order of its readings. They exist for every set of readings, so that one classifier serves all partial
records.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.fault_classifier import FaultClassifier, FaultName
from deformer_stream.engine.conditionals import compute_conditionals
from deformer_stream.engine.order_trees import build_order_tree
from deformer_stream.engine.single_readings import check_single_readings
from deformer_stream.kernels.cpu import CpuKernels
from deformer_stream.model.parameters import Model
from deformer_stream.model.positions import compute_positions
from deformer_stream.model.schema import Schema

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

RECORDS_AT_ONCE = 1024
"""Number of records whose faults are named together, which bounds the memory."""

RESIDUAL_LIMIT = 8.0
"""Residuals are limited to this absolute value, so that no single reading decides alone."""

MAX_LABELS = 16
"""Features with more labels have no input for each label."""

NODES_PER_PASS = 8_192
"""Number of readings, in all orders, that go through the network together. It bounds memory."""


def count_inputs(schema: Schema) -> int:
    """Return the number of inputs of a classifier for records with these features."""
    return 4 * len(schema) + int(_count_label_inputs(schema).sum())


def _count_label_inputs(schema: Schema) -> Ints:
    """Return for each feature how many inputs its labels have, (F,)."""
    return np.where(schema.label_counts <= MAX_LABELS, schema.label_counts, 0)


def compute_fault_inputs(model: Model, kernels: CpuKernels | None, values: Floats) -> Floats:
    """Return the inputs of the classifier for N records, (N, D).

    For each feature with a reading, they are:

    - the signed residual, sign(v − m) √(−2 ln p), and its absolute value. m is the median of the value's distribution
      given all other readings, and p its p-value, the probability of a value at most as likely. For Gaussian
      distributions this resembles the number of standard deviations. The residual of a label is not negative.
    - the value in units of normal records, without the logarithm of large normalised values (`compute_positions`), or 1
      for the label. The classifier limits it;
    - 1, which says that there is a reading.

    All inputs of features without a reading are 0. Context features have no residual.

    Args:
        model: The density model.
        kernels: Its compiled kernels, or None to compute with PyTorch.
        values: (N, F) values in normalised units or label codes, NaN for features without a reading.

    Raises:
        ConfigError: The readings of the model are irregular. Or there are no kernels, and PyTorch is not installed.
    """
    check_single_readings(model.schema, "name the fault of")
    schema = model.schema
    is_observed = ~np.isnan(values)
    residuals, normalised = np.zeros(values.shape), np.zeros(values.shape)
    num_readings = is_observed.sum(1)
    for count in np.unique(num_readings[num_readings > 0]).tolist():
        tree = build_order_tree(0, count)
        rows = np.flatnonzero(num_readings == count)
        rows_per_pass = max(1, NODES_PER_PASS // len(tree.reading_index))
        for start in range(0, len(rows), rows_per_pass):
            part = rows[start : start + rows_per_pass, None]
            codes = np.nonzero(is_observed[part[:, 0]])[1].reshape(-1, count)  # ascending, so that no order matters
            part_values = values[part, codes]
            conditional = compute_conditionals(model, kernels, codes, part_values, tree=tree)[:, tree.leaves]
            log_p_value = conditional.compute_score_terms(part_values).log_p_value
            is_above = part_values >= conditional.quantiles((0.5,))[0]
            sign = np.where(is_above | schema.is_discrete[codes], 1.0, -1.0)
            residuals[part, codes] = np.where(
                schema.is_context[codes], 0.0, sign * np.sqrt(-2 * np.fmin(log_p_value, 0))
            )
            normalised[part, codes] = part_values
    # A damaged or far extrapolating model may give numbers that are not finite.
    residuals = np.clip(np.nan_to_num(residuals), -RESIDUAL_LIMIT, RESIDUAL_LIMIT)
    labels = [
        (normalised[:, code, None] == np.arange(count)) & is_observed[:, code, None]
        for code, count in enumerate(_count_label_inputs(schema).tolist())
        if count
    ]
    positions = np.nan_to_num(compute_positions(schema, normalised))
    numbers = np.where(schema.is_discrete | ~is_observed, 0.0, positions)
    parts = [residuals, np.abs(residuals), numbers, is_observed, *labels]
    return np.concatenate([np.asarray(part, np.float64) for part in parts], 1)


def name_faults(
    model: Model, kernels: CpuKernels | None, classifier: FaultClassifier, values: Floats
) -> list[FaultName | None]:
    """Return which known fault each of N records looks like, None for a record without readings.

    Args:
        model: The density model.
        kernels: Its compiled kernels, or None to compute with PyTorch.
        classifier: The classifier that was trained for this model.
        values: (N, F) values in normalised units or label codes, NaN for features without a reading.
    """
    return classify_records(model, kernels, classifier, values)[0]


def classify_records(
    model: Model, kernels: CpuKernels | None, classifier: FaultClassifier, values: Floats
) -> tuple[list[FaultName | None], Floats]:
    """Return what `name_faults` returns, and the probabilities of the C faults, (N, C), NaN without readings."""
    names: list[FaultName | None] = []
    probabilities = np.full((len(values), len(classifier.names)), np.nan)
    for start in range(0, len(values), RECORDS_AT_ONCE):
        part = slice(start, start + RECORDS_AT_ONCE)
        num_readings = (~np.isnan(values[part])).sum(1)
        inputs = compute_fault_inputs(model, kernels, values[part])
        found, found_probabilities = classifier.classify(inputs, num_readings)
        names += [name if count else None for name, count in zip(found, num_readings.tolist(), strict=True)]
        probabilities[part][num_readings > 0] = found_probabilities[num_readings > 0]
    return names, probabilities
