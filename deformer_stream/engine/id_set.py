"""The ids of closed records: very many, of which hardly any is asked for again, kept in few bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

TAG, TAGGED = 16, 32
TAGS = (1 << TAG) - 1
"""With the number of an id goes a tag, so many bits of its hash from `TAGGED` on: it tells most others at a glance."""
BLOCK = 10
"""Ids whose numbers are equal but for so many bits stand in one piece, which goes when others take its turn."""


class StringColumn:
    """N texts in one piece, as a value. utf8: one after the other; edges: (N + 1,) int64, where each begins, and the
    end."""

    def __init__(self, utf8: bytes, edges: NDArray[np.int64]) -> None:
        self.utf8, self.offsets = utf8, edges

    @staticmethod
    def from_strings(texts: Iterable[str]) -> StringColumn:
        parts = [text.encode() for text in texts]
        return StringColumn(b"".join(parts), np.cumsum([0, *map(len, parts)], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[str]:
        return (self.utf8[begin:end].decode() for begin, end in pairwise(self.offsets.tolist()))


class BoundedIdSet:
    """The latest `most` of the ids that were added, the earliest first.

    Ids are numbered from 1 as they come. Their bytes stand one after the other, in blocks, and where they end is found
    by number; a hash table holds the latest of each chain of ids, which leads from number to earlier number. Ids are
    forgotten in the order in which they came, so a chain is over where it leads to one that is forgotten, and nothing
    is ever taken out. That is some 17 bytes an id and its length, in pieces of memory that stay where they are: those
    for `most` ids are asked for at once, and resident as far as they were used. Strings in a set and a queue are four
    times as much, and lie scattered among those of batches, whose memory they keep from being freed.
    """

    def __init__(self, most: int, ids: Iterable[str] = ()) -> None:
        self.most = most
        self._latest = self._forgotten = 0  # numbers
        self._blocks = [bytearray() for _ in range(2 + (most >> BLOCK))]  # in turn, as their ids
        self._turn = len(self._blocks) << BLOCK
        self._ends = np.zeros(self._turn, np.int32).data  # in the blocks
        self._earlier = np.zeros(self._turn, np.int64).data
        self._chains = np.zeros(1 << max(0, most.bit_length() - 1), np.int64).data
        self._mask = len(self._chains) - 1
        begun = list(ids)
        if begun := begun[max(0, len(begun) - most) :]:
            self._begin(begun)

    def _begin(self, ids: list[str]) -> None:
        """With these, at once: one by one they take twice as long."""
        texts, spread = StringColumn.from_strings(ids), np.fromiter(map(hash, ids), np.int64, len(ids))
        chain, number = spread & self._mask, np.arange(1, len(ids) + 1)
        entries = number << TAG | spread >> TAGGED & TAGS
        order = chain.argsort(kind="stable")
        follows = chain[order[1:]] == chain[order[:-1]]
        np.asarray(self._earlier)[number[order[1:][follows]]] = entries[order[:-1][follows]]
        last = np.append(~follows, True)
        np.asarray(self._chains)[chain[order[last]]] = entries[order[last]]
        first = np.maximum(number >> BLOCK << BLOCK, 1)  # of the block
        np.asarray(self._ends)[number] = texts.offsets[number] - texts.offsets[first - 1]
        edges = texts.offsets[[*np.unique(first) - 1, -1]].tolist()
        self._blocks[: len(edges) - 1] = (bytearray(texts.utf8[begin:end]) for begin, end in pairwise(edges))
        self._latest = len(ids)

    def add(self, record: str) -> None:
        """An id that is not among them."""
        spread = hash(record)
        number = self._latest = self._latest + 1
        which = (number >> BLOCK) % len(self._blocks)
        if not number & (1 << BLOCK) - 1:
            self._blocks[which] = bytearray()
        block = self._blocks[which]
        block += record.encode()
        place, chain = number % self._turn, spread & self._mask
        self._ends[place], self._earlier[place] = len(block), self._chains[chain]
        self._chains[chain] = number << TAG | spread >> TAGGED & TAGS
        if number > self.most:
            self._forgotten += 1

    def __contains__(self, record: str) -> bool:
        spread = hash(record)
        found, forgotten, tag = self._chains[spread & self._mask], self._forgotten, spread >> TAGGED & TAGS
        while (number := found >> TAG) > forgotten:
            if found & TAGS == tag and self._is(number, record.encode()):
                return True
            found = self._earlier[number % self._turn]
        return False

    def _is(self, number: int, utf8: bytes) -> bool:
        block = self._blocks[(number >> BLOCK) % len(self._blocks)]
        return block[self._begins(number) : self._ends[number % self._turn]] == utf8

    def _begins(self, number: int) -> int:
        """Where in its block an id begins."""
        return self._ends[(number - 1) % self._turn] if number & (1 << BLOCK) - 1 else 0

    def to_column(self) -> StringColumn:
        """The ids as they are now."""
        first, pieces = self._forgotten + 1, list[bytearray]()
        edges, ends = np.zeros(self._latest - self._forgotten + 1, np.int64), np.asarray(self._ends)
        cut = self._begins(first)  # what was forgotten of the first block
        for number in range(first >> BLOCK, 1 + (self._latest >> BLOCK)):
            begin, over = max(first, number << BLOCK), 1 + min(self._latest, (number + 1 << BLOCK) - 1)
            at = begin % self._turn
            edges[begin - first + 1 : over - first + 1] = ends[at : at + over - begin] + (edges[begin - first] - cut)
            block = self._blocks[number % len(self._blocks)]
            pieces.append(block[cut:] if cut else block)
            cut = 0
        return StringColumn(b"".join(pieces), edges)

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_column())
