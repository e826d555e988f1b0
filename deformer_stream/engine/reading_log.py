"""The readings that open records have received so far, in shared arrays.

Few records have a reading of every feature, so a row of fixed width per record would be mostly empty. A `ReadingLog`
gives each record an extent (consecutive elements of shared arrays) of about the size that it needs. When an extent is
full, it is replaced by one of twice the size. The extent of a closed record is used again for another record.

If readings are irregular, a record has any number of readings of a sensor, and the log also stores when each of them
was made. It then has only the latest readings of a record (`deformer_stream.engine.record_contexts`).
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
"""Readings that fit into the smallest extent (the part of the shared arrays that one record occupies). Smaller extents
would save little compared with the record's row in the table, and growing records would be copied more often."""
MAX_EXTENT_SIZE = 2**30
"""Readings that fit into the largest extent, if readings are irregular. The sizes of extents are int32."""
EXTENT_STEP = 32
"""Step between medium sizes of extents, if readings are irregular. A long record has about the same number of readings
in each block, so extents whose sizes double would leave up to half of the memory unused for good."""
INITIAL_NUM_PLACES = 1024
"""Length of the shared arrays of a new log, in readings."""


class _IndexStack:
    """A growing stack of integers, which are pushed and popped several at a time, as arrays."""

    def __init__(self) -> None:
        self._items = np.empty(64, np.int64)
        self._num_items = 0

    def push(self, items: Ints) -> None:
        """Add integers on top of the stack."""
        end = self._num_items + len(items)
        if end > len(self._items):
            # At least double the array, so that the average cost of copying per pushed item is constant.
            larger = np.empty(max(end, 2 * len(self._items)), np.int64)
            larger[: self._num_items] = self._items[: self._num_items]
            self._items = larger
        self._items[self._num_items : end] = items
        self._num_items = end

    def pop(self, max_items: int) -> Ints:
        """Remove and return the last `max_items` integers that were pushed, or all if there are fewer."""
        first = max(0, self._num_items - max_items)
        popped = self._items[first : self._num_items].copy()
        self._num_items = first
        return popped


class ReadingLog:
    """The readings of the open records of a table, in order of arrival within each record.

    Records are identified by their row in the record table. The readings of a record occupy an extent: consecutive
    elements of arrays that all records share. A place is an element of an extent, which holds one reading or is free;
    places are counted from 0 in each record. The size of an extent depends only on the number of readings. The bytes in
    use are therefore the same after a restart.

    Args:
        num_features: Number of features of the schema; a record has at most one reading of each, unless readings are
            irregular.
        has_ties: Whether to store a flag for each reading: whether it belongs to the same tie group as the reading
            before it. A tie group is the readings of one record with the same event time.
        has_times: Whether readings are irregular. The log then also stores the time of each reading, and the size of a
            record is not limited.

    Attributes:
        num_places: How many readings fit into all extents in use.
    """

    def __init__(self, num_features: int, has_ties: bool, has_times: bool = False) -> None:
        # An extent is the part of the shared arrays that one record occupies. Extent sizes double, except that the
        # first is `MIN_EXTENT_SIZE` and the last holds a reading of every feature, if a feature has at most one. A size
        # class is the index of a size in this list. Size class 0 is that of a record without an extent.
        sizes, largest_size = [0], MAX_EXTENT_SIZE if has_times else num_features
        while sizes[-1] < largest_size:
            growth = max(MIN_EXTENT_SIZE, sizes[-1])
            if has_times and growth > EXTENT_STEP:
                growth = EXTENT_STEP if growth < 8 * EXTENT_STEP else growth // 2
            sizes.append(min(largest_size, sizes[-1] + growth))
        self._extent_sizes = np.array(sizes, np.int64)
        self._free_extents = [_IndexStack() for _ in sizes]  # starts of freed extents, by size class
        self.num_places = 0
        # The shared arrays, with one element per reading. Elements from index `_end` on were never part of an extent.
        self._end = 0
        self._features = np.empty(INITIAL_NUM_PLACES, np.int16)
        self._values = np.empty(INITIAL_NUM_PLACES, np.float64)
        self._is_tied = np.empty(INITIAL_NUM_PLACES if has_ties else 0, np.bool_)
        self._times = np.empty(INITIAL_NUM_PLACES if has_times else 0, np.int64)
        names = ("_features", "_values", "_is_tied", "_times")
        self._array_names = [name for name in names if len(getattr(self, name))]
        # The extent of the record in each row of the record table; size 0 for a row without an extent.
        self._extent_start = np.zeros(0, np.int64)
        self._extent_size = np.zeros(0, np.int32)

    @property
    def bytes_per_place(self) -> int:
        """Number of bytes that the log needs to store one reading.

        It stores the feature code and the value of the reading. If readings of one record with the same event time (a
        tie group) are scored together, it also stores a flag. It states whether the reading continues the group of the
        reading before it. If readings are irregular, it stores their times.
        """
        return sum(getattr(self, name).itemsize for name in self._array_names)

    @property
    def num_bytes(self) -> int:
        """Bytes of all extents in use (the parts of the shared arrays that records occupy)."""
        return self.num_places * self.bytes_per_place

    @property
    def row_bytes(self) -> int:
        """Bytes that the log uses per row of the record table in addition to the record's readings."""
        return self._extent_start.itemsize + self._extent_size.itemsize

    def extent_bytes(self, record_indices: Ints) -> Ints:
        """Return, for each of R records, the bytes of its readings and of the memory reserved for further ones, (R,).

        Args:
            record_indices: (R,) rows of the record table.
        """
        return self._extent_size[record_indices].astype(np.int64) * self.bytes_per_place

    def resize(self, num_records: int) -> None:
        """Add rows without readings until there are `num_records` rows, the new size of the record table."""
        num_new = num_records - len(self._extent_start)
        self._extent_start = np.append(self._extent_start, np.zeros(num_new, np.int64))
        self._extent_size = np.append(self._extent_size, np.zeros(num_new, np.int32))

    def reserve(self, record_indices: Ints, num_stored: Ints, num_readings: Ints) -> None:
        """Reserve memory for the readings of R records, so that new readings can be written.

        Args:
            record_indices: (R,) distinct rows of the record table.
            num_stored: (R,) number of readings that each record has now. They are kept.
            num_readings: (R,) number of readings that each record will have, old and new ones together.
        """
        too_small = (num_readings > self._extent_size[record_indices]).nonzero()[0]
        if not len(too_small):
            return
        num_stored = num_stored[too_small]
        _, places = ragged_indices(num_stored)
        self.keep(record_indices[too_small], places, num_stored, num_readings[too_small])

    def keep(self, record_indices: Ints, places: Ints, num_kept: Ints, num_readings: Ints) -> None:
        """Keep some of the readings of R records, drop the others, and reserve memory for new ones.

        Args:
            record_indices: (R,) distinct rows of the record table.
            places: (K,) positions of the readings to keep, record after record, ascending within each. The first one of
                a record gets the position 0, the next one the position 1, and so on.
            num_kept: (R,) number of readings of each record to keep.
            num_readings: (R,) number of readings for which each record reserves memory, old and new ones together.
        """
        # The smallest extent size that is sufficient, as an index into the ascending sizes.
        size_classes = np.searchsorted(self._extent_sizes, num_readings)
        # For each kept reading: the index of its record in `record_indices`, and its new position in the record.
        record, new_places = ragged_indices(num_kept)
        rows = record_indices[record]
        old_elements = self._extent_start[rows] + places
        kept_arrays = {name: getattr(self, name)[old_elements] for name in self._array_names}
        # An extent is the part of the shared arrays that a record occupies. Records that need one of another size
        # return theirs first, so that others can use it.
        has_other_size = self._extent_sizes[size_classes] != self._extent_size[record_indices]
        self.free(record_indices[has_other_size])
        for size_class in np.bincount(size_classes[has_other_size]).nonzero()[0].tolist():  # each class that occurs
            members = record_indices[has_other_size & (size_classes == size_class)]
            self._extent_start[members] = self._allocate(size_class, len(members))
            self._extent_size[members] = self._extent_sizes[size_class]
        new_elements = self._extent_start[rows] + new_places
        for name, kept in kept_arrays.items():
            getattr(self, name)[new_elements] = kept

    def _allocate(self, size_class: int, num_extents: int) -> Ints:
        """Allocate extents of one size (consecutive elements of the shared arrays, each for the readings of a record).

        Freed extents of this size are used first. The others are taken from the unused end of the arrays, which are
        enlarged if necessary.

        Args:
            size_class: Index of the size in `_extent_sizes`.
            num_extents: E, the number of extents.

        Returns:
            (E,) the index in the shared arrays at which each extent begins.
        """
        size = int(self._extent_sizes[size_class])
        reused_starts = self._free_extents[size_class].pop(num_extents)
        num_new = num_extents - len(reused_starts)
        new_starts = self._end + size * np.arange(num_new)
        self._end += size * num_new
        self.num_places += size * num_extents
        if self._end > len(self._features):
            self._enlarge(max(self._end, 2 * len(self._features)))
        return np.concatenate([reused_starts, new_starts])

    def _enlarge(self, num_places: int) -> None:
        """Copy the readings of all records into larger arrays.

        Args:
            num_places: New length of the arrays, in readings. The caller at least doubles it, so that the average cost
                of copying per reading is constant.
        """
        for name in self._array_names:
            array = getattr(self, name)
            larger = np.empty(num_places, array.dtype)
            larger[: len(array)] = array
            setattr(self, name, larger)

    def free(self, record_indices: Ints) -> None:
        """Drop the readings of R records, so that other records can use their extents (parts of the shared arrays).

        Args:
            record_indices: (R,) distinct rows of the record table.
        """
        # The index of each extent's size in the ascending list of sizes.
        size_classes = np.searchsorted(self._extent_sizes, self._extent_size[record_indices])
        for size_class in np.bincount(size_classes).nonzero()[0].tolist():  # each size class that occurs
            if size_class > 0:  # records of size class 0 have no extent
                members = record_indices[size_classes == size_class]
                self._free_extents[size_class].push(self._extent_start[members])
                self.num_places -= int(self._extent_sizes[size_class]) * len(members)
        self._extent_size[record_indices] = 0

    def write(self, record_indices: Ints, places: Ints, features: NDArray[np.integer], values: Floats) -> None:
        """Store M readings, for which `reserve` must have reserved memory.

        Args:
            record_indices: (M,) row of each reading's record in the record table.
            places: (M,) position of each reading in its record, from 0.
            features: (M,) feature codes (indexes in the schema).
            values: (M,) raw values; label codes of discrete features.
        """
        elements = self._extent_start[record_indices] + places  # indexes in the shared arrays
        self._features[elements] = features
        self._values[elements] = values

    def write_times(self, record_indices: Ints, places: Ints, times: Ints) -> None:
        """Store the times of M irregular readings, which `write` has stored.

        Args:
            record_indices: (M,) row of each reading's record in the record table.
            places: (M,) position of each reading in its record, from 0.
            times: (M,) event times, microseconds since 1970.
        """
        self._times[self._extent_start[record_indices] + places] = times

    def gather_times(self, record_indices: Indexes, places: Ints) -> Ints:
        """Return the event times of irregular readings, in microseconds since 1970.

        Args:
            record_indices: Row of each reading's record in the record table.
            places: Position of each reading in its record, from 0.

        Returns:
            An array of the shape to which `record_indices` and `places` broadcast.
        """
        times: Ints = self._times[self._extent_start[record_indices] + places]
        return times

    def find_repetitions(self, record_index: int, num_readings: int, feature: int, time: int, value: float) -> Ints:
        """Return the positions of the irregular readings of a record that have a given sensor, time and value.

        Args:
            record_index: Row of the record in the record table.
            num_readings: Number of readings of the record to search, from the first.
            feature: Feature code of the sensor.
            time: Event time, microseconds since 1970.
            value: Raw value, or label code.
        """
        start = int(self._extent_start[record_index])
        extent = slice(start, start + num_readings)
        places = np.flatnonzero(self._times[extent] == time)
        elements = start + places
        is_equal = (self._features[elements] == feature) & (self._values[elements] == value)
        repetitions: Ints = places[is_equal]
        return repetitions

    def gather(self, record_indices: Indexes, places: Ints) -> tuple[Ints, Floats]:
        """Return the feature codes and the raw values of readings.

        Args:
            record_indices: Row of each reading's record in the record table.
            places: Position of each reading in its record, from 0. If a record has no reading there, the result is
                arbitrary numbers.

        Returns:
            Feature codes (int64) and raw values (label codes of discrete features). Both have the shape to which
            `record_indices` and `places` broadcast.
        """
        elements = self._extent_start[record_indices] + places  # indexes in the shared arrays
        return self._features[elements].astype(np.int64), self._values[elements]

    def gather_features(self, record_indices: Ints, places: Ints) -> Ints:
        """Return the feature codes of M readings, (M,), without copying their values.

        Args:
            record_indices: (M,) row of each reading's record in the record table.
            places: (M,) position of each reading in its record, from 0.
        """
        features: Ints = self._features[self._extent_start[record_indices] + places].astype(np.int64)
        return features

    def gather_padded(self, record_indices: Ints, num_readings: Ints) -> tuple[Ints, Floats]:
        """Return the first readings of R records as padded matrices with one row per record.

        Args:
            record_indices: (R,) rows of the record table.
            num_readings: (R,) number of readings to return of each record.

        Returns:
            (R, L) feature codes and (R, L) raw values (label codes of discrete features), in order of arrival. L is the
            largest of `num_readings`, at least 1. Padding at the end of a row has code -1 and value 0.
        """
        place = np.arange(max(1, int(num_readings.max(initial=0))))
        is_reading = place < num_readings[:, None]
        # Padding reads the first reading of its record, and is then replaced.
        features, values = self.gather(record_indices[:, None], np.where(is_reading, place, 0))
        return np.where(is_reading, features, -1), np.where(is_reading, values, 0.0)

    def mark_tied(self, record_indices: Ints, places: Ints, is_tied: Bools) -> None:
        """Store which of M readings continue a tie group (readings of one record with the same event time).

        Args:
            record_indices: (M,) row of each reading's record in the record table.
            places: (M,) position of each reading in its record, from 0.
            is_tied: (M,) whether the reading belongs to the same tie group as the reading before it in its record.
        """
        self._is_tied[self._extent_start[record_indices] + places] = is_tied

    def is_tied(self, record_indices: Indexes, places: Ints) -> Bools:
        """Return whether each reading belongs to the same tie group as the reading before it in its record.

        A tie group is the readings of one record with the same event time.

        Args:
            record_indices: Row of each reading's record in the record table.
            places: Position of each reading in its record, from 0.

        Returns:
            A boolean array of the shape to which `record_indices` and `places` broadcast.
        """
        is_tied: Bools = self._is_tied[self._extent_start[record_indices] + places]
        return is_tied
