"""The ids of closed records: very many, of which hardly any is asked for again, kept in few bytes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

TAG, TAGGED = 16, 32
TAGS = (1 << TAG) - 1
"""With the number of an id goes a tag, so many bits of its hash from `TAGGED` on: it tells most others at a glance."""


class Texts:
    """N texts in one piece, as a value. utf8: one after the other; edges: (N + 1,) int64, where each begins, and the
    end."""

    def __init__(self, utf8: bytes, edges: NDArray[np.int64]) -> None:
        self.utf8, self.edges = utf8, edges

    @staticmethod
    def of(texts: Iterable[str]) -> Texts:
        parts = [text.encode() for text in texts]
        return Texts(b"".join(parts), np.cumsum([0, *map(len, parts)], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.edges) - 1

    def __iter__(self) -> Iterator[str]:
        return (self.utf8[begin:end].decode() for begin, end in pairwise(self.edges.tolist()))


class Remembered:
    """The latest `most` of the ids that were added, the earliest first.

    Ids are numbered from 1 as they come. Their bytes go round in a ring, and where they end is found by number; a hash
    table holds the latest of each chain of ids, which leads from number to earlier number. Ids are forgotten in the
    order in which they came, so a chain is over where it leads to one that is forgotten, and nothing is ever taken out.
    That is some 25 bytes an id and its length, in a few pieces of memory that stay where they are. Strings in a set and
    a queue are four times as much, and lie scattered among those of batches, whose memory they keep from being freed.
    """

    def __init__(self, most: int, ids: Iterable[str] = ()) -> None:
        self.most = most
        self._latest = self._forgotten = 0  # numbers
        self._ring = _Ring()
        # By number, in turn; one place more than there are ids, for the first one begins where the last forgotten ends.
        self._ends, self._earlier = array("q", [0]), array("q", [0])
        self._chains = array("q", bytes(8 << max(0, most.bit_length() - 1)))
        for record in ids:
            self.add(record)

    def add(self, record: str) -> None:
        """An id that is not among them."""
        spread = hash(record)
        number = self._latest = self._latest + 1
        chain = spread & (len(self._chains) - 1)
        end, earlier = self._ring.add(record.encode()), self._chains[chain]
        if number <= self.most:
            self._ends.append(end)
            self._earlier.append(earlier)
        else:
            place = number % (self.most + 1)
            self._ends[place], self._earlier[place] = end, earlier
            self._forgotten += 1
            self._ring.begin = self._ends[self._forgotten % (self.most + 1)]
        self._chains[chain] = number << TAG | spread >> TAGGED & TAGS

    def __contains__(self, record: str) -> bool:
        spread = hash(record)
        found, forgotten = self._chains[spread & (len(self._chains) - 1)], self._forgotten
        tag = spread >> TAGGED & TAGS
        while (number := found >> TAG) > forgotten:
            if found & TAGS == tag and self._utf8(number) == record.encode():
                return True
            found = self._earlier[number % (self.most + 1)]
        return False

    def _utf8(self, number: int) -> bytes:
        return self._ring.between(*(self._ends[n % (self.most + 1)] for n in (number - 1, number)))

    def texts(self) -> Texts:
        """The ids as they are now."""
        numbers = np.arange(self._forgotten, self._latest + 1)
        edges = np.array(self._ends)[numbers % (self.most + 1)]
        return Texts(self._ring.between(self._ring.begin, self._ring.end), edges - self._ring.begin)

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts())


class _Ring:
    """Bytes that come at the end and go at the beginning. Their places are counted from the first byte ever."""

    def __init__(self) -> None:
        self.begin = self.end = 0
        self._bytes = bytearray(64)

    def add(self, more: bytes) -> int:
        """The place after it."""
        room, size = len(self._bytes), self.end - self.begin + len(more)
        if size > room:
            kept, self.end = self.between(self.begin, self.end), self.begin
            self._bytes = bytearray(size + size // 4)
            self.add(kept)
            room = len(self._bytes)
        start = self.end % room
        until = start + len(more)
        self._bytes[start:until] = more[: room - start]
        if until > room:
            self._bytes[: until - room] = more[room - start :]
        self.end += len(more)
        return self.end

    def between(self, begin: int, end: int) -> bytes:
        start = begin % len(self._bytes)
        part = bytes(self._bytes[start : start + end - begin])
        return part + self._bytes[: end - begin - len(part)]
