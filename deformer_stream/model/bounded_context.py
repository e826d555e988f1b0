"""The bounded context of a reading in a long record: the earlier readings on which its prediction is conditional.

Attention to all earlier readings of a record with thousands of readings would be slow, and would need much memory. The
readings of a record are therefore divided into blocks of `ContextLimit.block` readings, in the order of acceptance. The
context of a reading consists of the earlier readings of its block, and of a selection of the readings before the block.
The selection is the latest `ContextLimit.recent` readings, and the latest reading of each sensor. The selection is made
at the beginning of a block and stays the same for all of its readings.

The conditionals of a record still multiply to a density, by the chain rule: each reading is conditional on some of the
readings before it. An order-agnostic model is trained to condition on any subset of readings.

The selection for the next block contains only readings of this block and of its own selection. So readings that are in
neither of them are never needed again, and the memory of a record is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deformer_stream.ragged import ragged_indices

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """How many earlier readings the context of a reading has at most.

    Attributes:
        recent: Number of the latest readings before a block that belong to the context of the block's readings.
        block: Number of readings of a block, at least 1.

    Raises:
        ValueError: The numbers are out of range.
    """

    recent: int
    block: int

    def __post_init__(self) -> None:
        if self.recent < 0 or self.block < 1:
            raise ValueError(
                f"a context cannot have {self.recent} recent readings and blocks of {self.block} readings: the first "
                "number must not be negative, and the second must be positive"
            )

    def max_readings(self, num_sensors: int) -> int:
        """Return the largest number of readings of a context and the reading that is predicted from it, together."""
        return num_sensors + self.recent + self.block


def select_contexts(codes: NDArray[np.integer], offsets: Ints, num_features: int, recent: int) -> tuple[Ints, Ints]:
    """Return which of the readings of R records belong to the contexts of their next readings.

    These are the latest `recent` readings of each record and the latest reading of each sensor.

    Args:
        codes: (M,) feature codes, record after record, in the order of acceptance within each record.
        offsets: (R + 1,) index of each record's first reading among the M readings; the last entry is M.
        num_features: Number of features of the schema, larger than each code.
        recent: Number of the latest readings of a record that belong to its context.

    Returns:
        First (C,) indexes, ascending, of the selected ones among the M readings. Second (R + 1,) the index of each
        record's first selected reading among the C selected ones; the last entry is C.
    """
    num_readings = np.diff(offsets)
    row, position = ragged_indices(num_readings)
    is_selected = position >= num_readings[row] - recent
    # The latest reading of a sensor is the first one in reversed order.
    sensor_of_record = row * num_features + codes
    _, first_in_reversed = np.unique(sensor_of_record[::-1], return_index=True)
    is_selected[len(codes) - 1 - first_in_reversed] = True
    num_selected = np.add.reduceat(np.append(is_selected, False), offsets[:-1], dtype=np.int64) if len(row) else 0
    num_selected = np.where(num_readings > 0, num_selected, 0)
    return np.flatnonzero(is_selected), np.concatenate([[0], np.cumsum(num_selected)])
