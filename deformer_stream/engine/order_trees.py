"""Trees of orders: many orders of one record in a single forward pass.

An explanation needs the distribution of each of n readings given all others. That takes n orders, each with another
reading last, which cost n² tokens if every order is computed alone. Orders share prefixes, however: all orders that end
with a reading of the first half can begin with the whole second half, and so on recursively. The result is a tree (a
trie) with about n·log₂ n nodes, in which each path from root to leaf is one order. 20 readings take 108 nodes instead
of 400.

The network has no positional encoding, so all nodes fit into one sequence: a mask lets each node attend to its
ancestors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OrderTree:
    """P orders of a record's readings, stored as a trie: orders that begin alike share nodes.

    The network computes the distribution of each reading given those before it in an order. Each of the T nodes of the
    trie holds one reading, and an order is a path of nodes from a root to a leaf. A node that several orders share is
    computed once. Nodes are numbered depth first.

    The W readings of the record are numbered from 0, in three classes:

    - Given readings: every order begins with them. If there are no others, they are the only order.
    - Items: each item is the last reading of one order, after the given readings and all other items. If the tree is
      mirrored, each item is the last reading of a second order, too. An item can also be a chain of several readings,
      which stay together in all orders (`build_chain_tree`).
    - Extra readings: each is in a single order, after the given readings and all items. Such an order is one reading
      longer than the others.

    Attributes:
        reading_index: (T,) number of the reading at each node, 0 … W − 1.
        paths: (P, D) the nodes of each order from first to last; D is the length of the longest order. Shorter orders
            are padded with −1 at the end. The rows are the orders that end with the first item, the second item, and so
            on. A mirrored tree then has the second orders that end with these items. The orders that end with extra
            readings follow.
        path_and_depth: (2, T) where each node is in `paths`: row 0 holds the index of an order that contains the node,
            row 1 the position of the node in that order, from 0.
        num_parts: Number of equal parts of the nodes, one after the other. No node has an ancestor in another part, and
            ancestors are the same in all parts. So each part can be computed like a record of its own. There are two
            parts in a mirrored tree without given and extra readings, and one part otherwise.
        num_items: Number of items.
        num_extra: Number of extra readings.
    """

    reading_index: Ints
    paths: Ints
    path_and_depth: Ints
    num_parts: int = 1
    num_items: int = 0
    num_extra: int = 0

    @property
    def leaves(self) -> Ints:
        """The last node of each order, (P,), in the order of `paths`, which has P rows."""
        last_position = (self.paths >= 0).sum(1) - 1
        last_nodes: Ints = self.paths[np.arange(len(self.paths)), last_position]
        return last_nodes

    @property
    def ancestor_mask(self) -> NDArray[np.bool_]:
        """(T, T) bool; entry [t, u] says whether node u is an ancestor of node t (the node itself is not)."""
        path_index, depths = self.path_and_depth
        is_above = np.arange(self.paths.shape[1]) < depths[:, None]  # (T, D)
        mask = np.zeros((len(depths), len(depths)), bool)
        mask[np.nonzero(is_above)[0], self.paths[path_index][is_above]] = True
        return mask


@lru_cache(maxsize=64)
def build_order_tree(num_given: int, num_items: int, num_extra: int = 0, is_mirrored: bool = False) -> OrderTree:
    """Return a trie of orders of a record's readings. For each item (some of the readings), one order ends with it.

    With these orders, one forward pass of the network computes the distribution of each item given all other items. The
    readings are numbered from 0: first the given readings, then the items, then the extra readings. Every order begins
    with the given readings. Order i continues with all items, of which item i is the last. Orders that begin alike
    share nodes. For four items and no other readings, the orders are 2 3 1 0, 2 3 0 1, 0 1 3 2 and 0 1 2 3; the first
    two share the nodes of 2 3.

    Args:
        num_given: Number of readings with which all orders begin.
        num_items: Number of readings of which each is last in one order.
        num_extra: Number of extra readings. Each has one more order: the given readings, all items, and the extra
            reading at the end. No other reading is conditioned on it.
        is_mirrored: Add one more order per item, built from the items in reverse. Each item then precedes each other
            item in half of the orders. The mean over these orders therefore estimates the mean over all possible orders
            with less variance (antithetic sampling).
    """
    builder = _TreeBuilder()
    given_path = builder.append_path([], list(range(num_given)))
    items = [[num_given + i] for i in range(num_items)]
    paths: list[list[int]] = []
    if items:
        paths += builder.append_leave_one_out(given_path, items)
    if items and is_mirrored:
        mirrored_paths = builder.append_leave_one_out(given_path, items[::-1])
        last_added_path = mirrored_paths[-1]
        paths += mirrored_paths[::-1]  # path i ends with item i again
    else:
        last_added_path = paths[-1] if items else given_path
    # An extra reading follows all items, and their order does not matter. The extra readings therefore continue the
    # path whose nodes were added last, which keeps the nodes in depth-first order.
    first_extra = num_given + num_items
    paths += [builder.append_path(last_added_path, [first_extra + i]) for i in range(num_extra)]
    # Without given readings, the mirrored orders share no node with the others. They form a second part, which has the
    # same shape as the first one if there are no extra readings.
    has_two_parts = bool(items) and is_mirrored and not num_given and not num_extra
    return builder.build(paths or [given_path], 2 if has_two_parts else 1, num_items, num_extra)


def build_chain_tree(num_given: int, chain_lengths: Sequence[int]) -> OrderTree:
    """Return a mirrored trie of orders in which several readings stay together, for each chain two orders with it last.

    The tree is that of `build_order_tree`, with a chain of readings in place of each item. The readings of a chain keep
    their order, also in the mirrored part.

    Args:
        num_given: Number of readings with which all orders begin. They have the first numbers.
        chain_lengths: Number of readings of each chain, at least 1. The readings of a chain have consecutive numbers,
            the chains one after the other. There is at least one chain.
    """
    builder = _TreeBuilder()
    given_path = builder.append_path([], list(range(num_given)))
    ends = [num_given + int(end) for end in np.cumsum(chain_lengths)]
    chains = [list(range(end - length, end)) for end, length in zip(ends, chain_lengths, strict=True)]
    paths = builder.append_leave_one_out(given_path, chains)
    paths += builder.append_leave_one_out(given_path, chains[::-1])[::-1]
    # There is one part, because the mirrored orders have another shape if the chains differ in length.
    return builder.build(paths, 1, len(chains), 0)


class _TreeBuilder:
    """An `OrderTree` under construction: a trie of orders of readings, in which orders that begin alike share nodes.

    A node is identified by its index in the two lists. A path is a list of nodes from a root downwards.

    Attributes:
        reading_index: For each node, the number of the reading at this node.
        ancestors: For each node, the path to its parent; empty for a root.
    """

    def __init__(self) -> None:
        self.reading_index: list[int] = []
        self.ancestors: list[list[int]] = []

    def append_path(self, path: list[int], readings: list[int]) -> list[int]:
        """Add a chain of new nodes, one per reading, below the last node of a path, and return the extended path.

        Args:
            path: The nodes from a root to the node below which the chain starts; empty if the chain starts a new root.
            readings: The numbers of the readings, first to last.
        """
        for reading in readings:
            self.ancestors.append(path)
            path = [*path, len(self.reading_index)]
            self.reading_index.append(reading)
        return path

    def append_leave_one_out(self, path: list[int], items: list[list[int]]) -> list[list[int]]:
        """Add for each item an order of all items that ends with it, below a path of the trie.

        The orders share many nodes. Orders that end with an item of the first half share the nodes of the second half,
        with which they begin. The first half is then ordered recursively in the same way. The other orders exchange the
        two halves. Items 0 1 2 3 thus have the orders 2 3 1 0, 2 3 0 1, 0 1 3 2 and 0 1 2 3.

        Args:
            path: The nodes from a root to the node below which the orders start; empty to start at a new root.
            items: For each item, at least one, the numbers of its readings, which stay together in this order.

        Returns:
            For each item, the path of the order that ends with it, from the root.
        """
        if len(items) == 1:
            return [self.append_path(path, items[0])]
        middle = len(items) // 2
        first_half, second_half = items[:middle], items[middle:]
        first_readings, second_readings = list(chain(*first_half)), list(chain(*second_half))
        return [
            *self.append_leave_one_out(self.append_path(path, second_readings), first_half),
            *self.append_leave_one_out(self.append_path(path, first_readings), second_half),
        ]

    def build(self, paths: list[list[int]], num_parts: int, num_items: int, num_extra: int) -> OrderTree:
        """Return the tree of orders that consists of the nodes added so far.

        Args:
            paths: For each order its nodes from a root to a leaf. Together they contain every node.
            num_parts: Number of equal parts of the nodes, one after the other. No edge joins nodes of two parts, so
                each part can be computed like a record of its own.
            num_items: Number of items. Each item is the last reading of one or two orders, after all other items.
            num_extra: Number of extra readings. The last `num_extra` paths end with them, and no other path has them.
        """
        num_nodes = len(self.reading_index)
        padded_paths = np.full((len(paths), max(map(len, paths), default=0)), -1)
        path_and_depth = np.zeros((2, num_nodes), np.int64)
        for path_index, path in enumerate(paths):
            padded_paths[path_index, : len(path)] = path
            # If several paths contain a node, the last one overwrites the others. Any of them is correct.
            path_and_depth[0, path] = path_index
            path_and_depth[1, path] = np.arange(len(path))
        reading_index = np.array(self.reading_index, np.int64)
        return OrderTree(reading_index, padded_paths, path_and_depth, num_parts, num_items, num_extra)
