"""The readings that open records have received so far, in shared arrays.

Few records have a reading of every feature, so a row of fixed width per record would be mostly empty. A `ReadingLog`
gives each record an extent (consecutive places in shared arrays) that is just large enough. An extent that is full is
replaced by one of twice the size, and an extent that is given back is used again for another record.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deformer_stream.ragged import ragged_indices

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Indexes = NDArray[np.int64] | np.int64
Bools = NDArray[np.bool_]

MIN_EXTENT_SIZE = 8
"""Places in the smallest extent. Smaller ones would save few bytes beside the record's row in the table, and records
would be copied more often while they grow."""
INITIAL_NUM_PLACES = 1024


class _IndexStack:
    """A growing stack of integers, pushed and popped as arrays."""

    def __init__(self) -> None:
        self._items = np.empty(64, np.int64)
        self._num_items = 0

    def push(self, items: Ints) -> None:
        """Add integers on top of the stack."""
        end = self._num_items + len(items)
        if end > len(self._items):
            larger = np.empty(max(end, 2 * len(self._items)), np.int64)
            larger[: self._num_items] = self._items[: self._num_items]
            self._items = larger
        self._items[self._num_items : end] = items
        self._num_items = end

    def pop(self, max_items: int) -> Ints:
        """Remove and return at most `max_items` integers from the top."""
        first = max(0, self._num_items - max_items)
        popped = self._items[first : self._num_items].copy()
        self._num_items = first
        return popped


class ReadingLog:
    """The readings of the open records of a table, in order of arrival within each record.

    A place is the position of a reading in its record, counted from 0. The size of an extent depends on the number of
    readings only. The number of bytes in use is therefore the same after a restart, and it does not depend on the
    history of the process.

    Args:
        num_features: Features of the schema; a record has at most one reading of each.
        has_ties: Whether the log stores which readings belong to the tie group (readings of one record with the same
            event time) of the reading before them.

    Attributes:
        num_places: Total size of the extents in use.
    """

    def __init__(self, num_features: int, has_ties: bool) -> None:
        sizes = [0]
        while sizes[-1] < num_features:
            sizes.append(min(num_features, max(MIN_EXTENT_SIZE, 2 * sizes[-1])))
        self._extent_sizes = np.array(sizes, np.int64)
        self._free_extents = [_IndexStack() for _ in sizes]
        self._has_ties = has_ties
        self.num_places = 0
        self._end = 0  # no extent has ever used a place from here on
        self._features = np.empty(INITIAL_NUM_PLACES, np.int16)
        self._values = np.empty(INITIAL_NUM_PLACES, np.float64)
        self._is_tied = np.empty(INITIAL_NUM_PLACES if has_ties else 0, np.bool_)
        self._extent_start = np.zeros(0, np.int64)
        self._extent_size = np.zeros(0, np.int32)

    @property
    def bytes_per_place(self) -> int:
        """Bytes of one reading: feature code, value and, if there are tie groups, the tie flag."""
        return self._features.itemsize + self._values.itemsize + (self._is_tied.itemsize if self._has_ties else 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of all extents in use."""
        return self.num_places * self.bytes_per_place

    @property
    def row_bytes(self) -> int:
        """Bytes that the log keeps per row of the record table, besides the extent."""
        return self._extent_start.itemsize + self._extent_size.itemsize

    def extent_bytes(self, record_indices: Ints) -> Ints:
        """Return the bytes of the extents of the given records, (R,)."""
        return self._extent_size[record_indices].astype(np.int64) * self.bytes_per_place

    def resize(self, num_records: int) -> None:
        """Make room for records with an index below `num_records`; new ones have no extent."""
        num_new = num_records - len(self._extent_start)
        self._extent_start = np.append(self._extent_start, np.zeros(num_new, np.int64))
        self._extent_size = np.append(self._extent_size, np.zeros(num_new, np.int32))

    def reserve(self, record_indices: Ints, num_stored: Ints, num_readings: Ints) -> None:
        """Make the extents of R distinct records large enough.

        Args:
            record_indices: (R,) rows of the record table.
            num_stored: (R,) readings that each record has now; they are kept.
            num_readings: (R,) readings that each record must be able to hold.
        """
        too_small = (num_readings > self._extent_size[record_indices]).nonzero()[0]
        if not len(too_small):
            return
        growing = record_indices[too_small]
        size_classes = np.searchsorted(self._extent_sizes, num_readings[too_small])
        record, place = ragged_indices(num_stored[too_small])
        old_places = self._extent_start[growing[record]] + place
        features, values = self._features[old_places], self._values[old_places]
        is_tied = self._is_tied[old_places] if self._has_ties else None
        self.free(growing)
        for size_class in np.bincount(size_classes).nonzero()[0].tolist():
            members = growing[size_classes == size_class]
            self._extent_start[members] = self._allocate(size_class, len(members))
            self._extent_size[members] = self._extent_sizes[size_class]
        new_places = self._extent_start[growing[record]] + place
        self._features[new_places], self._values[new_places] = features, values
        if is_tied is not None:
            self._is_tied[new_places] = is_tied

    def _allocate(self, size_class: int, num_extents: int) -> Ints:
        """Return the first places of new extents: freed ones if there are any, then unused ones at the end."""
        size = int(self._extent_sizes[size_class])
        reused = self._free_extents[size_class].pop(num_extents)
        num_new = num_extents - len(reused)
        first_new = self._end + size * np.arange(num_new)
        self._end += size * num_new
        self.num_places += size * num_extents
        if self._end > len(self._features):
            self._enlarge(max(self._end, 2 * len(self._features)))
        return np.concatenate([reused, first_new])

    def _enlarge(self, num_places: int) -> None:
        """Move all readings into larger shared arrays. Doubling keeps the copies at a constant cost per reading."""
        for name in ("_features", "_values", *(("_is_tied",) if self._has_ties else ())):
            array = getattr(self, name)
            larger = np.empty(num_places, array.dtype)
            larger[: len(array)] = array
            setattr(self, name, larger)

    def free(self, record_indices: Ints) -> None:
        """Give back the extents of R distinct records, whose readings are lost."""
        size_classes = np.searchsorted(self._extent_sizes, self._extent_size[record_indices])
        for size_class in np.bincount(size_classes).nonzero()[0].tolist():
            if size_class > 0:
                members = record_indices[size_classes == size_class]
                self._free_extents[size_class].push(self._extent_start[members])
                self.num_places -= int(self._extent_sizes[size_class]) * len(members)
        self._extent_size[record_indices] = 0

    def write(self, record_indices: Ints, places: Ints, features: NDArray[np.integer], values: Floats) -> None:
        """Store M readings at places that `reserve` has provided. All arguments are (M,)."""
        at = self._extent_start[record_indices] + places
        self._features[at] = features
        self._values[at] = values

    def gather(self, record_indices: Indexes, places: Ints) -> tuple[Ints, Floats]:
        """Return feature codes and raw values of readings.

        Args:
            record_indices: Rows of the record table, of any shape that broadcasts with `places`.
            places: Places of the readings. A place at which its record has no reading gives meaningless numbers.
        """
        at = self._extent_start[record_indices] + places
        return self._features[at].astype(np.int64), self._values[at]

    def gather_features(self, record_indices: Ints, places: Ints) -> Ints:
        """Return the feature codes that `gather` returns, without the values."""
        features: Ints = self._features[self._extent_start[record_indices] + places].astype(np.int64)
        return features

    def gather_padded(self, record_indices: Ints, num_readings: Ints) -> tuple[Ints, Floats]:
        """Return the first readings of R records as matrices.

        Args:
            record_indices: (R,) rows of the record table.
            num_readings: (R,) how many readings of each record.

        Returns:
            (R, L) feature codes and (R, L) raw values, where L is the largest of `num_readings`, or 1. Padding at the
            end of a row has code -1 and value 0.
        """
        place = np.arange(max(1, int(num_readings.max(initial=0))))
        is_reading = place < num_readings[:, None]
        features, values = self.gather(record_indices[:, None], np.where(is_reading, place, 0))
        return np.where(is_reading, features, -1), np.where(is_reading, values, 0.0)

    def mark_tied(self, record_indices: Ints, places: Ints, is_tied: Bools) -> None:
        """Store for M readings whether each belongs to the tie group of the reading before it. Arguments are (M,)."""
        self._is_tied[self._extent_start[record_indices] + places] = is_tied

    def is_tied(self, record_indices: Indexes, places: Ints) -> Bools:
        """Return whether readings belong to the tie group of the reading before them, in the shape of `places`."""
        is_tied: Bools = self._is_tied[self._extent_start[record_indices] + places]
        return is_tied
