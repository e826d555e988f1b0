"""Index arithmetic for ragged arrays, in which rows of unequal length are stored one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def ragged_indices(row_lengths: NDArray[np.int32] | NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the position of every element of a ragged array.

    For example, the lengths [2, 0, 3] give the rows [0, 0, 2, 2, 2] and the places [0, 1, 0, 1, 2].

    Args:
        row_lengths: (R,) number of elements in each row, T in total.

    Returns:
        (T,) row of each element, and (T,) its place within the row, both from 0.
    """
    lengths = row_lengths.astype(np.int64)
    row = np.arange(len(lengths)).repeat(lengths)
    first_element = lengths.cumsum() - lengths
    return row, np.arange(len(row)) - first_element[row]


def run_boundaries(values: NDArray[Any]) -> NDArray[np.int64]:
    """Return where runs of equal consecutive values begin, followed by the number of values.

    For example, the values [7, 7, 3, 7] give the boundaries [0, 2, 3, 4].

    Args:
        values: (N,) values with R runs.

    Returns:
        (R + 1,) boundaries: run r covers the values from `boundaries[r]` to before `boundaries[r + 1]`.
    """
    is_boundary = np.ones(len(values) + 1, bool)
    np.not_equal(values[1:], values[:-1], out=is_boundary[1:-1])
    return is_boundary.nonzero()[0]
