"""Index arithmetic for ragged arrays: rows of unequal length stored one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def ragged_indices(counts: NDArray[np.int32] | NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and place in the row of every element of rows of so many elements."""
    sizes = counts.astype(np.int64)
    row = np.arange(len(sizes)).repeat(sizes)
    return row, np.arange(len(row)) - (sizes.cumsum() - sizes)[row]


def run_boundaries(ordered: NDArray[Any]) -> NDArray[np.int64]:
    """(R + 1,) where runs of equal numbers begin, and the end."""
    edge = np.ones(len(ordered) + 1, bool)
    np.not_equal(ordered[1:], ordered[:-1], out=edge[1:-1])
    return edge.nonzero()[0]
