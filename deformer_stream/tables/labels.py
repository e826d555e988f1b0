"""Labels in columns of tables, and which rows have the label of normal records."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from deformer_stream.codec.columns import encode_distinct, format_cell
from deformer_stream.codec.number_texts import parse_exact_number
from deformer_stream.model.schema import format_label


def match_normal_label(values: pa.Array, normal_label: str) -> NDArray[np.bool_]:
    """Return for each of N values of the label column whether it marks a normal record.

    Values are compared as text, without the white space around them. A number matches in every spelling: the value 0.0
    matches the option `--normal 0`.

    Args:
        values: N values of the column that `--label` names.
        normal_label: The value of the option `--normal`.

    Returns:
        (N,) bool, False for null.
    """
    spelling = normalize_label(normal_label)
    label_indexes, labels = encode_labels(values)
    # The index of a null is −1, which selects the last element.
    is_normal_label = np.array([normalize_label(label) == spelling for label in labels] + [False])
    is_normal: NDArray[np.bool_] = is_normal_label[label_indexes]
    return is_normal


def normalize_label(text: str) -> str:
    """Return a label of a record as labels are compared: without white space around it, and numbers in one spelling."""
    return normalize_number_text(text.strip())


def normalize_number_text(text: str) -> str:
    """Return the text of a number in the spelling of numeric labels, such as "1" for "1.0"; other text unchanged."""
    number = parse_exact_number(text)
    return text if number is None else format_label(number)


def encode_labels(values: pa.Array) -> tuple[NDArray[np.int64], list[str]]:
    """Replace N labels by indexes into a list of their distinct labels.

    Args:
        values: N labels: numbers, booleans or texts, perhaps dictionary-encoded.

    Returns:
        (indexes, labels). `indexes` has shape (N,) and contains −1 for null and NaN. `labels` are texts. Equal numbers
        have the same text, such as "1" for 1 and 1.0. Some labels may not occur in `values`.
    """
    cell_indexes, cells = encode_distinct(values)
    # NaN is a missing value like null, which has the index after the last cell.
    indexes = [-1 if isinstance(cell, float) and math.isnan(cell) else index for index, cell in enumerate(cells)]
    return np.array([*indexes, -1], np.int64)[cell_indexes], [format_cell(cell) for cell in cells]
