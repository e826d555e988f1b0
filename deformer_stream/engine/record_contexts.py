"""The bounded contexts of open records with irregular readings, and which readings are not needed any more.

The readings of a record are divided into blocks (`deformer_stream.model.bounded_context`). The context of a reading
consists of the earlier readings of its block, and of a selection of the readings before the block. The selection has
the latest readings, and the latest reading of each sensor.

A record can have thousands of readings. The selection for the next block contains only readings of the current block
and of its own selection. Therefore the reading log stores only these: first the readings from before the block that
were selected, then those of the block. When a record enters its next block, the selection is made among the stored
readings, and the others are dropped.

Two numbers refer to a reading. Its *position* counts all readings of the record, from 0, and never changes. Its *place*
is its position among the readings that the log stores.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from deformer_stream.engine.reading_log import ReadingLog
from deformer_stream.model.bounded_context import ContextLimit, select_contexts
from deformer_stream.ragged import ragged_indices

Ints = NDArray[np.int64]

NO_LIMIT = ContextLimit(recent=0, block=2**31 - 1)
"""The limit of records that are not scored by a model: all readings are in one block, so none is dropped."""


class RecordContexts:
    """The blocks and contexts of open records, and how many of their readings were dropped.

    Records are identified by their row in the record table.

    Args:
        num_features: Number of features of the schema.

    Attributes:
        num_features: Number of features of the schema.
        limits: Context limit by model version.
        num_dropped: (rows,) number of readings of each record that the log does not store any more. 0 if the row has no
            record.
        block_starts: (rows,) position of the first reading of each record's current block. 0 if the row has no record.
            The log stores `block_starts - num_dropped` readings from before the block. They belong to its context.
        block: (rows,) number of readings of a block of the record.
        recent: (rows,) number of the latest readings before a block that belong to its context.
    """

    def __init__(self, num_features: int) -> None:
        self.num_features = num_features
        self.limits: Mapping[int, ContextLimit] = {}
        self.num_dropped = np.zeros(0, np.int64)
        self.block_starts = np.zeros(0, np.int64)
        self.block = np.zeros(0, np.int32)
        self.recent = np.zeros(0, np.int32)
        self._array_names = ("num_dropped", "block_starts", "block", "recent")

    @property
    def row_bytes(self) -> int:
        """Bytes for each row of the record table."""
        return sum(getattr(self, name).itemsize for name in self._array_names)

    def resize(self, num_records: int) -> None:
        """Add rows without readings until there are `num_records` rows, the new size of the record table."""
        for name in self._array_names:
            array = getattr(self, name)
            larger = np.zeros(num_records, array.dtype)
            larger[: len(array)] = array
            setattr(self, name, larger)

    def limit_of(self, model_version: int) -> ContextLimit:
        """Return the limit of the contexts of records that a model version scores."""
        return self.limits.get(model_version, NO_LIMIT)

    def initialize(self, record_indices: Ints, model_versions: Ints) -> None:
        """Prepare the rows of new records.

        Args:
            record_indices: (R,) rows of the records.
            model_versions: (R,) number of the model version that scores each record.
        """
        for version in np.unique(model_versions).tolist():
            limit, members = self.limit_of(version), record_indices[model_versions == version]
            self.block[members], self.recent[members] = limit.block, limit.recent

    def restore(self, record_indices: Ints, num_dropped: Ints) -> None:
        """Prepare the rows of records from a snapshot, whose stored readings form a block without a context.

        `RecordTable.drop_old_readings` selects the contexts. It changes nothing if only needed readings are stored.

        Args:
            record_indices: (R,) rows of the records.
            num_dropped: (R,) number of readings of each record that the log does not store.
        """
        self.num_dropped[record_indices] = num_dropped
        self.block_starts[record_indices] = num_dropped

    def release(self, record_indices: Ints) -> None:
        """Reset the rows of closed records."""
        self.num_dropped[record_indices] = 0
        self.block_starts[record_indices] = 0

    def find_block_starts(self, record_indices: Ints, positions: Ints) -> Ints:
        """Return the position of the first reading of the block to which each of R readings belongs, (R,).

        If another model scores the record again, the block can begin with readings that were dropped. The first stored
        reading is then the first one of the block.

        Args:
            record_indices: (R,) row of each reading's record.
            positions: (R,) position of each reading in its record.
        """
        starts: Ints = positions - positions % self.block[record_indices]
        return np.maximum(starts, self.num_dropped[record_indices])

    def enter_blocks(self, log: ReadingLog, record_indices: Ints, num_readings: Ints) -> tuple[Ints, Ints, Ints]:
        """Move R records to the blocks of their next readings, and drop the readings that are not needed any more.

        Args:
            log: The readings of the records.
            record_indices: (R,) distinct rows of the records.
            num_readings: (R,) number of readings of each record, dropped ones included.

        Returns:
            First (E,) rows of the records that have entered another block. Second (K,) former places of the readings
            that these records still have, record after record. Third (E,) the number of these readings.
        """
        starts = self.find_block_starts(record_indices, num_readings)
        has_entered = starts > self.block_starts[record_indices]
        rows, starts, num_readings = record_indices[has_entered], starts[has_entered], num_readings[has_entered]
        if not len(rows):
            return rows, np.empty(0, np.int64), np.empty(0, np.int64)
        num_before = starts - self.num_dropped[rows]
        record, places = ragged_indices(num_readings - self.num_dropped[rows])
        is_before = places < num_before[record]
        is_kept = ~is_before
        is_kept[is_before] = self._find_selected(log, rows, record[is_before], places[is_before])
        num_context = np.bincount(record[is_kept & is_before], minlength=len(rows))
        counts = np.bincount(record[is_kept], minlength=len(rows))
        # Memory for the whole block, so that readings need not be copied before the next one.
        log.keep(rows, places[is_kept], counts, num_context + self.block[rows])
        self.num_dropped[rows] = starts - num_context
        self.block_starts[rows] = starts
        return rows, places[is_kept], counts

    def _find_selected(self, log: ReadingLog, rows: Ints, record: Ints, places: Ints) -> NDArray[np.bool_]:
        """Return which of B readings before the new blocks of E records belong to their contexts, (B,).

        Args:
            log: The readings.
            rows: (E,) rows of the records.
            record: (B,) index of each reading's record among the E records, ascending.
            places: (B,) place of each reading in its record, ascending within each.
        """
        is_selected = np.zeros(len(record), bool)
        codes = log.gather_features(rows[record], places)
        recent = self.recent[rows]
        for number in np.unique(recent).tolist():  # one number, unless several models score open records
            members = np.flatnonzero(recent[record] == number)
            counts = np.bincount(record[members], minlength=len(rows))
            selected, _ = select_contexts(
                codes[members], np.concatenate([[0], np.cumsum(counts)]), self.num_features, number
            )
            is_selected[members[selected]] = True
        return is_selected


class ContextWalk:
    """The contexts of R records while a batch is scored. The new readings of a record can span several blocks.

    The log stores all readings of the batch until alerts are explained. So the readings of a context are not the first
    ones of the log any more after a record has entered its next block.

    Args:
        contexts: The blocks and contexts of the records before the batch.
        log: The readings of the records.
        record_indices: (R,) distinct rows of the records.
        limit: How many readings contexts have at most.

    Attributes:
        block_starts: (R,) position of the first reading of the current block of each record.
        num_context: (R,) number of readings before the block that belong to its context.
        context_starts: (R,) index in `context_places` of the first reading of each record's context. −1 if the context
            consists of the first readings that the log stores.
        context_places: Places of the readings of contexts.
    """

    def __init__(
        self,
        contexts: RecordContexts,
        log: ReadingLog,
        record_indices: Ints,
        limit: ContextLimit,
    ) -> None:
        self._contexts, self._log, self._record_indices, self._limit = contexts, log, record_indices, limit
        self._num_dropped = contexts.num_dropped[record_indices]
        self.block_starts = contexts.block_starts[record_indices]
        self.num_context = self.block_starts - self._num_dropped
        self.context_starts = np.full(len(record_indices), -1)
        self.context_places = np.empty(0, np.int64)

    def enter_blocks(self, members: Ints, positions: Ints) -> None:
        """Move some of the records to the blocks of the given readings, which are the current or the next ones.

        Args:
            members: (S,) indexes of the records, from 0 to R − 1.
            positions: (S,) position of a reading in each record.
        """
        starts = self._contexts.find_block_starts(self._record_indices[members], positions)
        has_entered = starts > self.block_starts[members]
        if not has_entered.any():
            return
        members, starts = members[has_entered], starts[has_entered]
        # The context is selected among the readings of the block that ends and of its own context.
        record, offset = ragged_indices(self.num_context[members] + starts - self.block_starts[members])
        owners = members[record]
        places = find_places(
            offset,
            self.num_context[owners],
            self.context_starts[owners],
            self.context_places,
            (self.block_starts - self._num_dropped)[owners],
        )
        codes = self._log.gather_features(self._record_indices[owners], places)
        offsets = np.searchsorted(record, np.arange(len(members) + 1))
        selected, new_offsets = select_contexts(codes, offsets, self._contexts.num_features, self._limit.recent)
        self.block_starts[members] = starts
        self.num_context[members] = np.diff(new_offsets)
        self.context_starts[members] = len(self.context_places) + new_offsets[:-1]
        self.context_places = np.concatenate([self.context_places, places[selected]])


def find_places(
    offsets: Ints, num_context: Ints, context_starts: Ints, context_places: Ints, block_places: Ints
) -> Ints:
    """Return the places in the log of K readings, which are given by their positions in their contexts, (K,).

    Args:
        offsets: (K,) position of each reading in the sequence of the readings before the block that belong to the
            context, and of those of the block.
        num_context: (K,) number of readings before the block that belong to the context.
        context_starts: (K,) index in `context_places` of the first of these, −1 if they are the first ones of the log.
        context_places: Places of the readings of contexts.
        block_places: (K,) place of the first reading of the block.
    """
    places = np.where(offsets < num_context, offsets, block_places + offsets - num_context)
    is_listed = (offsets < num_context) & (context_starts >= 0)
    places[is_listed] = context_places[context_starts[is_listed] + offsets[is_listed]]
    return places
