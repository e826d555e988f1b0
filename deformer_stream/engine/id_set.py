"""A bounded set of record ids, and a compact column of strings in which it is saved."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


class StringColumn:
    """An immutable column of N strings, stored one after the other in UTF-8 as in an Arrow string array.

    A column takes far less memory than a list of strings, and Arrow reads its buffers without a copy.

    Args:
        utf8: The bytes of all strings.
        offsets: (N + 1,) int64 where each string begins in `utf8`, followed by the number of bytes.
    """

    def __init__(self, utf8: bytes, offsets: NDArray[np.int64]) -> None:
        self.utf8, self.offsets = utf8, offsets

    @staticmethod
    def from_strings(strings: Iterable[str]) -> StringColumn:
        """Return a column of these strings."""
        strings = list(strings)
        utf8 = "".join(strings).encode()
        sizes = np.fromiter(map(len, strings), np.int64, len(strings))
        if sizes.sum() != len(utf8):  # some string is not ASCII and has more bytes than characters
            sizes = np.fromiter((len(string.encode()) for string in strings), np.int64, len(strings))
        return StringColumn(utf8, np.concatenate([np.zeros(1, np.int64), sizes.cumsum()]))

    def __len__(self) -> int:
        """Return the number of strings."""
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[str]:
        """Yield the strings in order."""
        return (self.utf8[begin:end].decode() for begin, end in pairwise(self.offsets.tolist()))


class BoundedIdSet:
    """The ids that were added last, at most `max_ids` of them, in the order in which they were added.

    Args:
        max_ids: If an id is added to a full set, the id that was added first is removed.
        ids: The first ids, without repetitions.
    """

    def __init__(self, max_ids: int, ids: Iterable[str] = ()) -> None:
        self.max_ids = max_ids
        self._ids_in_order = deque(ids, max_ids)
        self._ids = set(self._ids_in_order)

    def add(self, record_id: str) -> None:
        """Add an id that is not in the set."""
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
        """Yield the ids in the order in which they were added."""
        return iter(self._ids_in_order)

    def to_column(self) -> StringColumn:
        """Return the ids as a value that later additions do not change."""
        return StringColumn.from_strings(self._ids_in_order)
