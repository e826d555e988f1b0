"""The bounded contexts of open records with irregular readings: which earlier readings a prediction depends on.

The readings of a record are divided into blocks (`deformer_stream.model.bounded_context`). The context of a reading
consists of the earlier readings of its block, and of a selection of the readings before the block: the latest ones, and
the latest one of each sensor. A record can have thousands of readings, so the selection must not be searched for among
all of them each time. `RecordContexts` keeps the latest reading of each sensor before the current block of a record.
When a record enters its next block, only the readings of the block that ends are examined.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deformer_stream.engine.reading_log import ReadingLog
from deformer_stream.ragged import ragged_indices

Ints = NDArray[np.int64]

MAX_READINGS_PER_PASS = 2**20
"""Largest number of readings that are examined at a time. After a restart, all readings of each record are examined
once."""


class RecordContexts:
    """The latest reading of each sensor before the current block of each open record.

    Records are identified by their row in the record table. The contents follow from the readings in the log, so they
    are not part of snapshots.

    Args:
        num_features: The number F of features of the schema.

    Attributes:
        block_starts: (rows,) for each record the position of the first reading of the block to which `latest_places`
            belongs.
        latest_places: (rows, F) int32 for each sensor the position of its latest reading before that block, −1 if there
            is none.
    """

    def __init__(self, num_features: int) -> None:
        self.block_starts = np.zeros(0, np.int64)
        self.latest_places = np.zeros((0, num_features), np.int32)

    @property
    def row_bytes(self) -> int:
        """Bytes for each row of the record table."""
        return self.block_starts.itemsize + self.latest_places.itemsize * self.latest_places.shape[1]

    def resize(self, num_records: int) -> None:
        """Add rows without readings until there are `num_records` rows, the new size of the record table."""
        num_new = num_records - len(self.block_starts)
        self.block_starts = np.append(self.block_starts, np.zeros(num_new, np.int64))
        new_places = np.full((num_new, self.latest_places.shape[1]), -1, np.int32)
        self.latest_places = np.concatenate([self.latest_places, new_places])

    def reset(self, record_indices: Ints) -> None:
        """Return the records in these rows to their first block, which has no reading before it."""
        self.block_starts[record_indices] = 0
        self.latest_places[record_indices] = -1

    def advance(self, log: ReadingLog, record_indices: Ints, block_starts: Ints) -> None:
        """Move R records to the blocks that begin at the given positions.

        Args:
            log: The readings of the records.
            record_indices: (R,) distinct rows of the records.
            block_starts: (R,) position of the first reading of the new block of each record.
        """
        current = self.block_starts[record_indices]
        if (current == block_starts).all():
            return
        is_behind = current > block_starts  # the record is scored again, from an earlier reading on
        if is_behind.any():
            self.reset(record_indices[is_behind])
            current = np.where(is_behind, 0, current)
        num_passed = block_starts - current
        reading_sums = np.cumsum(num_passed)
        # A group has at most about `MAX_READINGS_PER_PASS` readings, or a single record.
        group = reading_sums // MAX_READINGS_PER_PASS
        for number in np.unique(group[num_passed > 0]).tolist():
            members = np.flatnonzero((group == number) & (num_passed > 0))
            record, offset = ragged_indices(num_passed[members])
            rows, places = record_indices[members[record]], current[members[record]] + offset
            codes = log.gather_features(rows, places)
            # Positions ascend within a record, and of several values for one element the largest one is kept.
            np.maximum.at(self.latest_places, (rows, codes), places.astype(np.int32))
        self.block_starts[record_indices] = block_starts

    def count(self, record_indices: Ints, recent: int) -> Ints:
        """Return the number of readings before the current block that belong to the context of its readings, (R,).

        Args:
            record_indices: (R,) rows of the records.
            recent: Number of the latest readings before a block that belong to its context.
        """
        first_recent = np.maximum(self.block_starts[record_indices] - recent, 0)
        num_older: Ints = self._is_older(record_indices, first_recent).sum(1)
        return num_older + self.block_starts[record_indices] - first_recent

    def select(self, record_indices: Ints, recent: int) -> tuple[Ints, Ints]:
        """Return which readings before the current block of R records belong to the contexts of its readings.

        Args:
            record_indices: (R,) rows of the records.
            recent: Number of the latest readings before a block that belong to its context.

        Returns:
            First (C,) positions of the readings in their records, record after record, ascending within each. Second
            (R,) the number of readings of each record.
        """
        first_recent = np.maximum(self.block_starts[record_indices] - recent, 0)
        is_older = self._is_older(record_indices, first_recent)
        num_older = is_older.sum(1)
        counts: Ints = num_older + self.block_starts[record_indices] - first_recent
        # Sensors without an older reading are sorted to the end of their row.
        older = np.sort(np.where(is_older, self.latest_places[record_indices], np.iinfo(np.int32).max), 1)
        record, offset = ragged_indices(counts)
        is_from_older = offset < num_older[record]
        places = first_recent[record] + offset - num_older[record]
        places[is_from_older] = older[record[is_from_older], offset[is_from_older]]
        return places, counts

    def _is_older(self, record_indices: Ints, first_recent: Ints) -> NDArray[np.bool_]:
        """Return for each sensor whether its latest reading is before the recent ones, (R, F).

        Args:
            record_indices: (R,) rows of the records.
            first_recent: (R,) position of the first recent reading of each record.
        """
        latest = self.latest_places[record_indices]
        is_older: NDArray[np.bool_] = (latest >= 0) & (latest < first_recent[:, None])
        return is_older
