"""Index arithmetic for ragged arrays, in which rows of unequal length are stored one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def ragged_indices(row_lengths: NDArray[np.int32] | NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the row and the position within the row of every element of a ragged array.

    A ragged array stores rows of unequal length one after the other, without padding. For example, the lengths
    [2, 0, 3] give the rows [0, 0, 2, 2, 2] and the positions [0, 1, 0, 1, 2].

    Args:
        row_lengths: (R,) number of elements in each of R rows, T in total.

    Returns:
        Two arrays: (T,) the row of each element, and (T,) its position within that row, both from 0.
    """
    lengths = row_lengths.astype(np.int64)
    row = np.arange(len(lengths)).repeat(lengths)
    start_of_row = lengths.cumsum() - lengths  # the number of elements in all rows before each row
    return row, np.arange(len(row)) - start_of_row[row]


def run_boundaries(values: NDArray[Any]) -> NDArray[np.int64]:
    """Return the index at which each run of equal consecutive values begins, followed by the number of values.

    For example, the values [7, 7, 3, 7] give the boundaries [0, 2, 3, 4]: two sevens, a three and a seven.

    Args:
        values: (N,) values that form R runs.

    Returns:
        (R + 1,) boundaries: run r is `values[boundaries[r]:boundaries[r + 1]]`.
    """
    is_boundary = np.ones(len(values) + 1, bool)  # the first run begins at 0, the last one ends after all values
    np.not_equal(values[1:], values[:-1], out=is_boundary[1:-1])
    return is_boundary.nonzero()[0]


def find_previous_in_group(groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of the previous element of the same group for each of M elements, −1 if there is none, (M,).

    Args:
        groups: (M,) number of the group of each element.
    """
    order = np.argsort(groups, kind="stable")  # the elements of a group stay in their order
    previous = np.full(len(groups), -1)
    is_same = groups[order][1:] == groups[order][:-1]
    previous[order[1:][is_same]] = order[:-1][is_same]
    return previous
