"""Conditional distributions of the readings of complete records, by the compiled kernels or by PyTorch.

Explanations need whole distributions and not only scores. Both computations have the interface `Conditionals`, whose
arguments and results are NumPy arrays. PyTorch is only imported if a model has no compiled kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deformer_stream.engine.order_trees import OrderTree
from deformer_stream.kernels.cpu import CpuKernels
from deformer_stream.model.conditional_arrays import ConditionalArrays, ScoreTermArrays
from deformer_stream.model.load_network import load_network
from deformer_stream.model.parameters import Model

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Conditionals(Protocol):
    """The distributions of a batch of readings of shape S. Values are normalised values or label codes of shape S."""

    def __getitem__(self, index: Any) -> Conditionals:
        """Return the distributions of some readings, for an index of NumPy into the dimensions of the batch."""

    def log_prob(self, values: Floats) -> Floats:
        """Return ln p of each value."""

    def quantiles(self, probabilities: Sequence[float]) -> Floats:
        """Return Q quantiles of each reading's distribution, (Q, *S)."""

    def compute_score_terms(self, values: Floats) -> ScoreTermArrays:
        """Return how improbable each value is."""

    def get_log_mass(self) -> Floats:
        """Return ln of the probability of each label code, (*S, K + 1)."""


class KernelConditionals:
    """Distributions that the compiled kernels have computed.

    Args:
        arrays: The distributions.
        kernels: The kernels, which compute moments and quantiles of mixtures.
    """

    def __init__(self, arrays: ConditionalArrays, kernels: CpuKernels) -> None:
        self.arrays, self.kernels = arrays, kernels

    def __getitem__(self, index: Any) -> KernelConditionals:
        """Return the distributions of some readings."""
        return KernelConditionals(self.arrays[index], self.kernels)

    def log_prob(self, values: Floats) -> Floats:
        """Return ln p of each value."""
        return self.arrays.log_prob(values)

    def quantiles(self, probabilities: Sequence[float]) -> Floats:
        """Return Q quantiles of each reading's distribution, (Q, *S)."""
        return self.kernels.quantiles(self.arrays, probabilities)

    def compute_score_terms(self, values: Floats) -> ScoreTermArrays:
        """Return how improbable each value is."""
        return self.arrays.compute_score_terms(values, self.kernels.surprisal)

    def get_log_mass(self) -> Floats:
        """Return ln of the probability of each label code, (*S, K + 1)."""
        return self.arrays.log_mass


def compute_conditionals(
    model: Model,
    kernels: CpuKernels | None,
    codes: Ints,
    values: Floats,
    ages: Floats | None = None,
    tree: OrderTree | None = None,
) -> Conditionals:
    """Return the distribution of each reading of A records given the readings before it.

    Args:
        model: The model.
        kernels: The model's compiled kernels, or None to compute with PyTorch.
        codes: (A, W) feature codes (indexes in the schema), without padding.
        values: (A, W) values in normalised units, or label codes.
        ages: (A, W) seconds from the origin of the record to each reading, if readings are irregular.
        tree: A tree of orders with T nodes that orders W readings. It is applied to each record.

    Returns:
        Distributions of shape (A, W) in the order of the readings; with a tree, of shape (A, T), those of the readings
        at its nodes given the readings at their ancestors.

    Raises:
        ConfigError: There are no kernels, and PyTorch is not installed.
    """
    if kernels is None:
        network = load_network(model)
        # Imported here, because it imports PyTorch.
        from deformer_stream.engine import torch_conditionals

        return torch_conditionals.compute_conditionals(network, codes, values, ages, tree)
    if tree is None:
        return KernelConditionals(kernels.conditionals_of_records(codes, values, ages=ages), kernels)
    num_records, num_nodes = len(codes), len(tree.reading_index)
    # The nodes consist of one or two parts of the same shape, without edges between them, so each part is computed like
    # a record of its own. The kernels need only the depths: as nodes are in depth-first order, these determine the
    # ancestors.
    nodes_per_part = num_nodes // tree.num_parts
    part_codes, part_values = (array[:, tree.reading_index].reshape(-1, nodes_per_part) for array in (codes, values))
    part_ages = None if ages is None else ages[:, tree.reading_index].reshape(-1, nodes_per_part)
    depths = tree.path_and_depth[1, :nodes_per_part]
    arrays = kernels.conditionals_of_records(part_codes, part_values, depths, part_ages)
    return KernelConditionals(arrays.reshape(num_records, num_nodes), kernels)
