"""A bounded set of record ids, and a compact column of strings in which snapshots store it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


class StringColumn:
    """An immutable column of N strings, stored one after the other in UTF-8 as in an Arrow string array.

    A column occupies far less memory than a list of strings, and Arrow reads its buffers without a copy.

    Args:
        utf8: The bytes of all strings, one string after the other.
        offsets: (N + 1,) int64. String i is `utf8[offsets[i]:offsets[i + 1]]`.
    """

    def __init__(self, utf8: bytes, offsets: NDArray[np.int64]) -> None:
        self.utf8, self.offsets = utf8, offsets

    @staticmethod
    def from_strings(strings: Iterable[str]) -> StringColumn:
        """Return a column that holds the strings in the same order."""
        strings = list(strings)
        utf8 = "".join(strings).encode()
        sizes = np.fromiter(map(len, strings), np.int64, len(strings))
        # Counting characters is faster than counting bytes, and gives the same numbers if all strings are ASCII.
        if sizes.sum() != len(utf8):
            sizes = np.fromiter((len(string.encode()) for string in strings), np.int64, len(strings))
        return StringColumn(utf8, np.concatenate([np.zeros(1, np.int64), sizes.cumsum()]))

    def __len__(self) -> int:
        """Return the number of strings."""
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[str]:
        """Yield the strings in order."""
        return (self.utf8[begin:end].decode() for begin, end in pairwise(self.offsets.tolist()))


class BoundedIdSet:
    """A set of the record ids that were added last, in the order in which they were added.

    Args:
        max_ids: Largest number of ids in the set. When an id is added to a full set, the oldest one is removed.
        ids: Distinct ids with which the set begins, the oldest first. If there are too many, the oldest are dropped.
    """

    def __init__(self, max_ids: int, ids: Iterable[str] = ()) -> None:
        self.max_ids = max_ids
        self._ids_in_order = deque(ids, max_ids)
        self._ids = set(self._ids_in_order)

    def add(self, record_id: str) -> None:
        """Add an id, and remove the oldest id if the set is full. The id must not be in the set already."""
        if self.max_ids == 0:
            return
        if len(self._ids_in_order) == self.max_ids:
            self._ids.discard(self._ids_in_order[0])
        self._ids_in_order.append(record_id)  # a full deque drops its first element
        self._ids.add(record_id)

    def __contains__(self, record_id: str) -> bool:
        """Return whether an id is in the set."""
        return record_id in self._ids

    def __len__(self) -> int:
        """Return the number of ids."""
        return len(self._ids_in_order)

    def __iter__(self) -> Iterator[str]:
        """Yield the ids, the oldest first."""
        return iter(self._ids_in_order)

    def to_column(self) -> StringColumn:
        """Return an immutable copy of the ids for a snapshot, the oldest first."""
        return StringColumn.from_strings(self._ids_in_order)
