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

    Ids are numbered from 1 as they come. Their bytes stand one after the other, and where they end is found by number;
    a hash table holds the latest of each chain of ids, which leads from number to earlier number. Ids are forgotten in
    the order in which they came, so a chain is over where it leads to one that is forgotten, and nothing is ever taken
    out. That is some 25 bytes an id and up to twice its length, in a few pieces of memory that stay where they are.
    Strings in a set and a queue are three times as much, and lie scattered among those of batches, whose memory they
    keep from being freed.
    """

    def __init__(self, most: int, ids: Iterable[str] = ()) -> None:
        self.most = most
        self._latest = self._forgotten = 0  # numbers
        self._utf8 = bytearray()
        self._base = self._end = 0  # where it begins and where the latest id ends, in bytes from the first id ever
        # By number, in turn; one place more than there are ids, for the first one begins where the last forgotten ends.
        self._turn, self._ends, self._earlier = most + 1, array("q", [0]), array("q", [0])
        self._chains = array("q", bytes(8 << max(0, most.bit_length() - 1)))
        self._mask = len(self._chains) - 1
        begun = list(ids)
        if begun := begun[max(0, len(begun) - most) :]:
            self._begin(begun)

    def _begin(self, ids: list[str]) -> None:
        """With these, at once: one by one they take twice as long."""
        texts, spread = Texts.of(ids), np.fromiter(map(hash, ids), np.int64, len(ids))
        chain = spread & self._mask
        entries = np.arange(1, len(ids) + 1) << TAG | spread >> TAGGED & TAGS
        order = chain.argsort(kind="stable")
        follows = chain[order[1:]] == chain[order[:-1]]
        earlier = np.zeros(1 + len(ids), np.int64)
        earlier[1 + order[1:][follows]] = entries[order[:-1][follows]]
        self._ends, self._earlier = (array("q", column.tobytes()) for column in (texts.edges, earlier))
        last = np.append(~follows, True)
        np.frombuffer(self._chains, np.int64)[chain[order[last]]] = entries[order[last]]
        self._utf8, self._end, self._latest = bytearray(texts.utf8), len(texts.utf8), len(ids)

    def add(self, record: str) -> None:
        """An id that is not among them."""
        spread, utf8 = hash(record), record.encode()
        if self._end - self._base + len(utf8) > len(self._utf8):
            self._make_room(len(utf8))
        begin = self._end - self._base
        self._utf8[begin : begin + len(utf8)] = utf8
        self._end += len(utf8)
        number = self._latest = self._latest + 1
        chain = spread & self._mask
        if number < self._turn:
            self._ends.append(self._end)
            self._earlier.append(self._chains[chain])
        else:
            place = number % self._turn
            self._ends[place], self._earlier[place] = self._end, self._chains[chain]
            self._forgotten += 1
        self._chains[chain] = number << TAG | spread >> TAGGED & TAGS

    def _make_room(self, more: int) -> None:
        """For so many bytes, and so that it need not be done again soon."""
        kept = self._kept()
        self._base = self._end - len(kept)
        if len(self._utf8) < len(kept) + len(kept) // 4 + more:
            self._utf8 = bytearray(len(kept) + len(kept) // 2 + more)
        self._utf8[: len(kept)] = kept

    def _kept(self) -> bytes:
        begin = self._ends[self._forgotten % self._turn]
        return bytes(self._utf8[begin - self._base : self._end - self._base])

    def __contains__(self, record: str) -> bool:
        spread = hash(record)
        found, forgotten, tag = self._chains[spread & self._mask], self._forgotten, spread >> TAGGED & TAGS
        while (number := found >> TAG) > forgotten:
            if found & TAGS == tag and self._is(number, record.encode()):
                return True
            found = self._earlier[number % self._turn]
        return False

    def _is(self, number: int, utf8: bytes) -> bool:
        begin, end = (self._ends[n % self._turn] - self._base for n in (number - 1, number))
        return self._utf8[begin:end] == utf8

    def texts(self) -> Texts:
        """The ids as they are now."""
        kept = self._kept()
        numbers = np.arange(self._forgotten, self._latest + 1)
        return Texts(kept, np.array(self._ends)[numbers % self._turn] - (self._end - len(kept)))

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts())
