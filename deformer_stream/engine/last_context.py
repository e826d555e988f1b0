"""The context of a record's last reading, if readings are irregular, as it is in the record table.

Explanations of alerts and notices of drift need it. Scoring selects the contexts of many records together
(`engine.scoring`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deformer_stream.engine.records import RecordTable
from deformer_stream.model.bounded_context import select_contexts

Ints = NDArray[np.int64]


def find_last_context(records: RecordTable, record_index: int, num_readings: int) -> tuple[Ints, int]:
    """Return where the log has the readings of the last reading's context and block, and how many precede the block.

    Args:
        records: The record table, whose readings are irregular.
        record_index: Row of the record in the table.
        num_readings: Number of readings of the record, at least 1. Later readings are ignored.

    Returns:
        First (L,) places of the readings in the log, ascending; the last one is that of the last reading. Second how
        many of them are from before the block of the last reading.

    Raises:
        ValueError: The readings of the table are not irregular.
    """
    if records.contexts is None:
        raise ValueError("the readings of the record table are not irregular, so they have no bounded contexts")
    # Positions of the first reading of the block and after the last one, and their places in the log.
    positions = np.array([0, num_readings])
    positions[0] = records.contexts.find_block_starts(np.array([record_index]), positions[1:] - 1)[0]
    block_place, end = records.find_places(np.full(2, record_index), positions).tolist()
    earlier_codes = records.log.gather_features(np.full(block_place, record_index), np.arange(block_place))
    offsets, recent = np.array([0, block_place]), int(records.contexts.recent[record_index])
    selected, _ = select_contexts(earlier_codes, offsets, len(records.schema), recent)
    return np.concatenate([selected, np.arange(block_place, end)]), len(selected)
