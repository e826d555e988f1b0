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
    """P orders of the readings 0 … W − 1, stored as a tree of T nodes in depth-first order.

    Attributes:
        reading_index: (T,) the reading at each node.
        ancestor_mask: (T, T) bool; entry [t, u] says whether node u is an ancestor of node t.
        paths: (P, L) the nodes of each order from first to last, with −1 as padding behind orders that are shorter than
            the longest one.
        path_and_depth: (2, T) for each node, one order that contains it and its position in that order.
        num_trees: Number of equally shaped trees of which the nodes consist, one after the other. Nodes of different
            trees have no common ancestor, so the trees can be computed as separate records.
        num_items: Number of readings of which each is last in an order. The paths begin with one path per item, in the
            order of the items; a mirrored tree has a second path per item behind these.
        num_extra: Number of paths at the end that belong to extra readings (`build_order_tree`).
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
        """The last node of each order, (P,)."""
        last = (self.paths >= 0).sum(1) - 1
        return np.asarray(self.paths[np.arange(len(last)), last])


@lru_cache(maxsize=64)
def build_order_tree(num_given: int, num_items: int, num_extra: int = 0, is_mirrored: bool = False) -> OrderTree:
    """Return a tree of orders in which every item is last once.

    Readings are numbered: first the given ones, then the items, then the extra ones. Every order begins with the given
    readings. Order i continues with all items and ends with item i.

    Args:
        num_given: Number of readings with which all orders begin.
        num_items: Number of readings of which each is last in one order.
        num_extra: Number of further readings. For each, one more order consists of the given readings, all items, and
            this reading at the end, so no other reading is conditioned on it.
        is_mirrored: Add the orders of the reversed items. Every pair of items then occurs in both orders equally often,
            so the mean over all orders estimates the mean over all n! orders with less variance (antithetic sampling).
    """
    builder = _TreeBuilder()
    root = builder.append_path([], list(range(num_given)))
    items = list(range(num_given, num_given + num_items))
    paths: list[list[int]] = []
    if items:
        paths += builder.append_leave_one_out(root, items)
    if items and is_mirrored:
        mirrored = builder.append_leave_one_out(root, items[::-1])
        last_path = mirrored[-1]
        paths += mirrored[::-1]
    else:
        last_path = paths[-1] if items else root
    # The extra readings continue the path that was added last, so that the nodes stay in depth-first order.
    first_extra = num_given + num_items
    paths += [builder.append_path(last_path, [first_extra + i]) for i in range(num_extra)]
    has_two_trees = bool(items) and is_mirrored and not num_given and not num_extra
    return builder.build(paths or [root], 2 if has_two_trees else 1, num_items, num_extra)


class _TreeBuilder:
    """Nodes of a tree of orders under construction.

    Attributes:
        reading_index: The reading at each node.
        ancestors: The ancestors of each node, root first.
    """

    def __init__(self) -> None:
        self.reading_index: list[int] = []
        self.ancestors: list[list[int]] = []

    def append_path(self, path: list[int], readings: list[int]) -> list[int]:
        """Add one node per reading below the last node of a path, and return the extended path."""
        for reading in readings:
            self.ancestors.append(path)
            path = [*path, len(self.reading_index)]
            self.reading_index.append(reading)
        return path

    def append_leave_one_out(self, path: list[int], items: list[int]) -> list[list[int]]:
        """Add orders of the items below a path, one for each item as the last one.

        Half of the items are appended as a common prefix of the orders that end with an item of the other half; the
        same is done recursively with the other half.

        Returns:
            The paths of the orders, in the order of the items that they end with.
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
        """Return the tree with these paths, each a list of nodes from the root to a leaf.

        The other arguments are the attributes of `OrderTree` with the same names.
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
    """Return the distribution of the reading at each node given the readings at its ancestors.

    Args:
        model: The network, in evaluation mode.
        tree: A tree with T nodes over W readings.
        codes: (A, W) feature codes of W readings of A records, without padding.
        values: (A, W) their values in normalised units.
        kernels: The model's compiled kernels, or None to compute with PyTorch.

    Returns:
        Conditionals of shape (A, T).
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
        prior = PriorConditional(
            *(torch.unflatten(part, 1, (-1, nodes_per_tree)).flatten(0, 1) for part in prior.tensors)
        )
    mask = torch.from_numpy(ancestor_mask).to(model.device)
    return model.conditionals(tree_codes, tree_values, prior, mask).reshape(num_records, num_nodes)


def _compute_tree_prior(
    model: DEformer, tree: OrderTree, node_codes: Tensor, node_values: Tensor
) -> PriorConditional | None:
    """Return the Gaussian prior's conditionals at each node given its ancestors; None if the model has no prior.

    The prior is computed for each order as for a record of its own. Each node then takes its value from one of the
    orders that contain it.

    Args:
        model: The network.
        tree: A tree with T nodes and P orders.
        node_codes: (A, T) feature codes at the nodes, of A records.
        node_values: (A, T) values at the nodes in normalised units.
    """
    if model.gaussians is None:
        return None
    paths = torch.from_numpy(tree.paths).to(model.device)
    path_codes = node_codes[:, paths].masked_fill(paths < 0, -1).flatten(0, 1)
    path_values = node_values[:, paths].flatten(0, 1)
    path_index, depth = torch.from_numpy(tree.path_and_depth).to(model.device)
    first_path = torch.arange(len(node_codes), device=model.device)[:, None] * len(paths)
    path_prior: PriorConditional = model.gaussians(path_codes, path_values)
    return path_prior[first_path + path_index, depth]
