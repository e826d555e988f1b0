"""Many orders of one record in a single pass: a tree whose branches are what the orders have in common.

To ask for each of n readings given all others takes n orders, each with another reading last. Written one beside the
other they cost n² readings. But who leaves out a reading of the first half may begin with the whole second half, and so
on by halves: a tree of n log₂ n readings in which every leaf is a reading that has all others before it. The network
has no positions, so all branches fit into one sequence in which a reading looks back along its own branch only
(`before` of `DEformer.conditionals`); 20 readings take 108 places in place of 400.
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
class Orders:
    """Orders of the readings 0 … W − 1, folded into T nodes, depth first.

    reading: (T,) which reading stands at a node. before: (T, T) bool, before[t, u] where u lies on the way to t. paths:
    (P, L) the nodes of each order from first to last, −1 where it is shorter than the longest. of: (2, T) an order that
    goes through the node, and the node's place in it. trees: how many equal trees, one after
    the other, the nodes make up, which see nothing of each other.
    """

    reading: Ints
    before: NDArray[np.bool_]
    paths: Ints
    of: Ints
    trees: int = 1

    @property
    def last(self) -> Ints:
        """(P,) the node at which each order ends."""
        ends = (self.paths >= 0).sum(1) - 1
        return np.asarray(self.paths[np.arange(len(ends)), ends])


@lru_cache(maxsize=64)
def each_last(given: int, items: int, asked: int = 0, mirrored: bool = False) -> Orders:
    """Orders that begin with the given readings; each of the items is last in one of them, in the items' order.

    mirrored: a second time, through the items backwards; then each pair of readings comes in both orders, and the mean
    over all orders estimates the one over all n! orders (as antithetic pairs of orders do). asked: readings that are
    known to none: for each, one more order that ends with it, after the given readings and all items.
    """
    reading: list[int] = []
    ways: list[list[int]] = []
    paths: list[list[int]] = []

    def along(readings: list[int], way: list[int]) -> list[int]:
        for each in readings:
            ways.append(way)
            way = [*way, len(reading)]
            reading.append(each)
        return way

    def grow(rest: list[int], way: list[int]) -> None:
        """An order for each of the rest, after what is on the way."""
        if len(rest) == 1:
            paths.append(along(rest, way))
            return
        half = len(rest) // 2
        grow(rest[:half], along(rest[half:], way))
        grow(rest[half:], along(rest[:half], way))

    root = along(list(range(given)), [])
    inner = list(range(given, given + items))
    if items:
        grow(inner, root)
    if items and mirrored:
        grow(inner[::-1], root)
    whole = paths[-1] if items else root  # the way that was gone last, so that the nodes stand depth first
    if mirrored:
        paths[items:] = paths[: items - 1 : -1]
    paths += [along([given + items + a], whole) for a in range(asked)]
    return _folded(reading, ways, paths or [root], 2 if items and mirrored and not given and not asked else 1)


def _folded(reading: list[int], ways: list[list[int]], paths: list[list[int]], trees: int) -> Orders:
    before = np.zeros((len(reading), len(reading)), bool)
    for node, way in enumerate(ways):
        before[node, way] = True
    padded = np.full((len(paths), max(map(len, paths), default=0)), -1)
    of = np.zeros((2, len(reading)), np.int64)
    for p, path in enumerate(paths):
        padded[p, : len(path)] = path
        of[:, path] = [[p] * len(path), list(range(len(path)))]
    return Orders(np.array(reading, np.int64), before, padded, of, trees)


def conditionals(
    model: DEformer, orders: Orders, codes: Tensor, values: Tensor, compiled: CpuKernels | None = None
) -> Conditional:
    """p(v | what lies on the way) at each node. codes, values: (A, W) readings of A records, normalised units → shape
    (A, T). compiled: the model's compiled code, where it shall do the work."""
    device = model.device
    reading, before = torch.from_numpy(orders.reading).to(device), torch.from_numpy(orders.before).to(device)
    features, x = codes[:, reading], values[:, reading]
    A, T = features.shape
    each = T // orders.trees  # trees see nothing of each other: they go side by side, as records do
    if compiled is not None:
        depth = orders.before[:each, :each].sum(1)
        return compiled.whole(features.reshape(-1, each), x.reshape(-1, each), depth).shaped(A, T)
    guide = None
    if model.gaussians is not None:
        P = len(orders.paths)
        nodes = torch.from_numpy(orders.paths).to(device)
        ordered = features[:, nodes].masked_fill(nodes < 0, -1).flatten(0, 1)
        path, place = torch.from_numpy(orders.of).to(device)
        rows = torch.arange(A, device=device)[:, None] * P + path
        guide = model.gaussians(ordered, x[:, nodes].flatten(0, 1))[rows, place]
    if guide is not None:
        guide = PriorConditional(*(torch.unflatten(part, 1, (-1, each)).flatten(0, 1) for part in guide.parts))
    found = model.conditionals(features.reshape(-1, each), x.reshape(-1, each), guide, before[:each, :each])
    return found.shaped(A, T)
