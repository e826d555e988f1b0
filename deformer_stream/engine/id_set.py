"""A bounded set of record ids, and a compact column of strings in which snapshots store it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


class StringColumn:
    """An immutable column of N strings in one UTF-8 buffer, with the memory layout of an Arrow string array.

    It needs far less memory than a list of strings, and can become an Arrow array without a copy.

    Args:
        utf8: The bytes of all strings, one string after the other.
        offsets: (N + 1,) int64 byte offsets. String i is `utf8[offsets[i]:offsets[i + 1]]`.
    """

    def __init__(self, utf8: bytes, offsets: NDArray[np.int64]) -> None:
        self.utf8, self.offsets = utf8, offsets

    @staticmethod
    def from_strings(strings: Iterable[str]) -> StringColumn:
        """Return a column that holds the strings in the same order."""
        strings = list(strings)
        utf8 = "".join(strings).encode()
        # The number of characters is faster to get than the number of bytes. The two are equal if a string is ASCII.
        num_characters = np.fromiter(map(len, strings), np.int64, len(strings))
        is_all_ascii = num_characters.sum() == len(utf8)
        if is_all_ascii:
            num_bytes = num_characters
        else:
            num_bytes = np.fromiter((len(string.encode()) for string in strings), np.int64, len(strings))
        offsets = np.concatenate([np.zeros(1, np.int64), num_bytes.cumsum()])
        return StringColumn(utf8, offsets)

    def __len__(self) -> int:
        """Return the number of strings."""
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[str]:
        """Yield the strings in order."""
        return (self.utf8[begin:end].decode() for begin, end in pairwise(self.offsets.tolist()))


class BoundedIdSet:
    """A set of at most `max_ids` record ids. When it is full, each added id replaces the oldest one.

    Args:
        max_ids: Largest number of ids in the set. If it is 0, the set stays empty.
        ids: The initial ids, all different, the oldest first. If there are more than `max_ids`, the oldest are dropped.
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
        """Return the ids, the oldest first, as an immutable column that a snapshot of the state can store."""
        return StringColumn.from_strings(self._ids_in_order)
