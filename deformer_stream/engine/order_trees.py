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

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deformer_stream.kernels.cpu import CpuKernels
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.distributions import Conditional
from deformer_stream.model.gaussian_prior import PriorConditional

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OrderTree:
    """P orders of the readings 0 … W − 1 of a record, stored as a trie: orders that begin alike share nodes.

    The network computes the distribution at a node given the readings at its ancestors. Shared nodes are computed once.
    T is the number of nodes, which are numbered in depth-first order. A path is one order as a list of nodes, from the
    first reading to the last.

    Attributes:
        reading_index: (T,) the reading at each node, 0 … W − 1.
        ancestor_mask: (T, T) bool; entry [t, u] says whether node u is an ancestor of node t (the node itself is not).
        paths: (P, D) the nodes of each order from first to last; D is the length of the longest order. Shorter orders
            are padded with −1 at the end. First come the orders that end with item 0, 1, …; in a mirrored tree, a
            second order per item follows; then come the orders that end with an extra reading.
        path_and_depth: (2, T); row 0 holds for each node the index of one path that contains it, row 1 the position of
            the node in that path, from 0.
        num_trees: Number of equally shaped trees of which the nodes consist, one after the other. Nodes of different
            trees have no common ancestor, so the trees can be computed as separate records. It is 1 or 2.
        num_items: Number of items. An item is a reading that is last in one order (in two of a mirrored tree).
        num_extra: Number of extra readings, each of which is in one order only and last there.
    """

    reading_index: Ints
    ancestor_mask: NDArray[np.bool_]
    paths: Ints
    path_and_depth: Ints
    num_trees: int = 1
    num_items: int = 0
    num_extra: int = 0

    @property
    def leaves(self) -> Ints:
        """The last node of each order, (P,), one entry per row of `paths`."""
        last_position = (self.paths >= 0).sum(1) - 1
        return np.asarray(self.paths[np.arange(len(self.paths)), last_position])


@lru_cache(maxsize=64)
def build_order_tree(num_given: int, num_items: int, num_extra: int = 0, is_mirrored: bool = False) -> OrderTree:
    """Return a tree of orders of a record's readings in which every item is last once.

    It is used to compute, in one forward pass, the distribution of each item given all other items. A tree is a trie:
    orders that begin alike share nodes. There are three kinds of readings, numbered in this order: given readings,
    items and extra readings. Every order begins with the given readings. Order i continues with all items, item i last.

    Args:
        num_given: Number of readings with which all orders begin.
        num_items: Number of readings of which each is last in one order.
        num_extra: Number of further readings. For each, one more order consists of the given readings, all items, and
            this reading at the end, so no other reading is conditioned on it.
        is_mirrored: Add one more order per item, built from the items in reverse. Every pair of items then occurs in
            both orders equally often. The mean over these orders therefore estimates the mean over all possible orders
            with less variance (antithetic sampling).
    """
    builder = _TreeBuilder()
    root = builder.append_path([], list(range(num_given)))
    items = list(range(num_given, num_given + num_items))
    paths: list[list[int]] = []
    if items:
        paths += builder.append_leave_one_out(root, items)
    if items and is_mirrored:
        mirrored_paths = builder.append_leave_one_out(root, items[::-1])
        last_path = mirrored_paths[-1]
        paths += mirrored_paths[::-1]  # back to the order of the items
    else:
        last_path = paths[-1] if items else root
    # The extra readings continue the path that was added last, so that the nodes stay in depth-first order.
    first_extra = num_given + num_items
    paths += [builder.append_path(last_path, [first_extra + i]) for i in range(num_extra)]
    # Without given readings, the orders of the items and the mirrored ones have no common node.
    has_two_trees = bool(items) and is_mirrored and not num_given and not num_extra
    return builder.build(paths or [root], 2 if has_two_trees else 1, num_items, num_extra)


class _TreeBuilder:
    """A tree of orders under construction. The tree is a trie: orders of readings that begin alike share nodes.

    A node is identified by its index in the two lists. A path is a list of nodes from the root downwards.

    Attributes:
        reading_index: The number of the reading at each node.
        ancestors: The ancestors of each node as a path, root first, without the node itself.
    """

    def __init__(self) -> None:
        self.reading_index: list[int] = []
        self.ancestors: list[list[int]] = []

    def append_path(self, path: list[int], readings: list[int]) -> list[int]:
        """Add a chain of nodes, one per reading, below the last node of a path, and return the extended path.

        Args:
            path: The nodes from the root to the node below which the chain starts; empty to start at the root.
            readings: The numbers of the readings, first to last.
        """
        for reading in readings:
            self.ancestors.append(path)
            path = [*path, len(self.reading_index)]
            self.reading_index.append(reading)
        return path

    def append_leave_one_out(self, path: list[int], items: list[int]) -> list[list[int]]:
        """Add orders of the items below a path, one for each item as the last one.

        The orders that end with an item of the first half share a prefix: all items of the second half. The remaining
        items, those of the first half, are ordered recursively in the same way; likewise with the halves exchanged.

        Args:
            path: The nodes from the root to the node below which the orders start.
            items: The numbers of the readings to order, at least one.

        Returns:
            The paths of the orders from the root. Path i ends with item i.
        """
        if len(items) == 1:
            return [self.append_path(path, items)]
        middle = len(items) // 2
        first, second = items[:middle], items[middle:]
        return [
            *self.append_leave_one_out(self.append_path(path, second), first),
            *self.append_leave_one_out(self.append_path(path, first), second),
        ]

    def build(self, paths: list[list[int]], num_trees: int, num_items: int, num_extra: int) -> OrderTree:
        """Return the finished tree.

        Args:
            paths: For each order its nodes from the root to a leaf. Together they contain every node.
            num_trees: Number of equally shaped trees of which the nodes consist, one after the other.
            num_items: Number of readings of which each is last in an order.
            num_extra: Number of paths at the end that end with an extra reading, which is in no other order.
        """
        num_nodes = len(self.reading_index)
        ancestor_mask = np.zeros((num_nodes, num_nodes), bool)
        for node, ancestors in enumerate(self.ancestors):
            ancestor_mask[node, ancestors] = True
        padded_paths = np.full((len(paths), max(map(len, paths), default=0)), -1)
        path_and_depth = np.zeros((2, num_nodes), np.int64)
        for path_index, path in enumerate(paths):
            padded_paths[path_index, : len(path)] = path
            path_and_depth[0, path] = path_index
            path_and_depth[1, path] = np.arange(len(path))
        reading_index = np.array(self.reading_index, np.int64)
        return OrderTree(reading_index, ancestor_mask, padded_paths, path_and_depth, num_trees, num_items, num_extra)


def compute_tree_conditionals(
    model: DEformer, tree: OrderTree, codes: Tensor, values: Tensor, kernels: CpuKernels | None = None
) -> Conditional:
    """Return the distribution of the reading at each node of a tree of orders, given the readings at its ancestors.

    A tree of orders is a trie of several orders of a record's readings. All orders are computed in one forward pass.

    Args:
        model: The network, in evaluation mode.
        tree: A tree with T nodes that orders W readings. It is applied to each of the A records.
        codes: (A, W) for each record the feature codes (indexes in the schema) of the readings that the tree numbers
            0 … W − 1, without padding.
        values: (A, W) the values of the same readings in normalised units, or label codes.
        kernels: The model's compiled kernels, or None to compute with PyTorch.

    Returns:
        Distributions of shape (A, T): entry [a, t] is that of the reading of record a at node t.
    """
    reading_index = torch.from_numpy(tree.reading_index).to(model.device)
    node_codes, node_values = codes[:, reading_index], values[:, reading_index]
    num_records, num_nodes = node_codes.shape
    # Nodes of different trees do not attend to each other, so each tree is computed like a record of its own.
    nodes_per_tree = num_nodes // tree.num_trees
    tree_codes, tree_values = node_codes.reshape(-1, nodes_per_tree), node_values.reshape(-1, nodes_per_tree)
    ancestor_mask = tree.ancestor_mask[:nodes_per_tree, :nodes_per_tree]
    if kernels is not None:
        depths = ancestor_mask.sum(1)
        return kernels.conditionals_of_records(tree_codes, tree_values, depths).reshape(num_records, num_nodes)
    prior = _compute_tree_prior(model, tree, node_codes, node_values)
    if prior is not None:
        # From (A, T, …) to (A · num_trees, nodes_per_tree, …), like the codes and values.
        prior = PriorConditional(
            *(torch.unflatten(tensor, 1, (-1, nodes_per_tree)).flatten(0, 1) for tensor in prior.tensors)
        )
    mask = torch.from_numpy(ancestor_mask).to(model.device)
    return model.conditionals(tree_codes, tree_values, prior, mask).reshape(num_records, num_nodes)


def _compute_tree_prior(
    model: DEformer, tree: OrderTree, node_codes: Tensor, node_values: Tensor
) -> PriorConditional | None:
    """Return the Gaussian prior's distribution of the reading at each node of a tree of orders, given its ancestors.

    The Gaussian prior is a mixture of Gaussians that was fitted before training; its conditional distributions are
    inputs of the network. The tree is a trie of several orders of a record's readings. The prior cannot use a tree, so
    each order is computed as a record of its own. A node that several orders share takes the result of one of them;
    all give the same, because its ancestors are the same.

    Args:
        model: The network.
        tree: A tree with T nodes and P orders, which is applied to each of A records.
        node_codes: (A, T) for each record the feature codes of the readings at the nodes.
        node_values: (A, T) the values of the same readings in normalised units.

    Returns:
        Distributions of shape (A, T), or None if the model has no Gaussian prior.
    """
    if model.gaussians is None:
        return None
    paths = torch.from_numpy(tree.paths).to(model.device)  # (P, D) nodes of each order, −1 as padding
    # Each order of each record becomes one row of the input, (A · P, D), with feature code −1 as padding.
    path_codes = node_codes[:, paths].masked_fill(paths < 0, -1).flatten(0, 1)
    path_values = node_values[:, paths].flatten(0, 1)
    path_prior: PriorConditional = model.gaussians(path_codes, path_values)
    # The orders of record a are the rows a · P, …, a · P + P − 1.
    path_index, depth = torch.from_numpy(tree.path_and_depth).to(model.device)
    first_row = torch.arange(len(node_codes), device=model.device)[:, None] * len(paths)
    return path_prior[first_row + path_index, depth]
