"""Conditional distributions of the readings of complete records, computed by the network in PyTorch.

`engine.conditionals` chooses between this module and the compiled kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deformer_stream.engine.order_trees import OrderTree
from deformer_stream.engine.passes import MAX_READINGS_PER_PASS
from deformer_stream.model.conditional_arrays import ScoreTermArrays
from deformer_stream.model.deformer import DEformer, to_tensor
from deformer_stream.model.distributions import Conditional
from deformer_stream.model.gaussian_prior import PriorConditional
from deformer_stream.model.process_conditionals import apply_process

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class TorchConditionals:
    """Distributions that PyTorch has computed, with arrays of NumPy as arguments and results.

    Args:
        conditional: The distributions.
        model: The network.
    """

    def __init__(self, conditional: Conditional, model: DEformer) -> None:
        self.conditional, self.model = conditional, model

    def __getitem__(self, index: Any) -> TorchConditionals:
        """Return the distributions of some readings."""
        parts = index if isinstance(index, tuple) else (index,)
        device = self.conditional.discrete.device
        # Tensors are indexed by tensors.
        on_device = tuple(torch.from_numpy(p).to(device) if isinstance(p, np.ndarray) else p for p in parts)
        return TorchConditionals(self.conditional[on_device], self.model)

    def log_prob(self, values: Floats) -> Floats:
        """Return ln p of each value."""
        return _to_array(self.conditional.log_prob(to_tensor(values, self.model)))

    def quantiles(self, probabilities: Sequence[float]) -> Floats:
        """Return Q quantiles of each reading's distribution, (Q, *S)."""
        return _to_array(self.conditional.quantiles(probabilities))

    def compute_score_terms(self, values: Floats) -> ScoreTermArrays:
        """Return how improbable each value is."""
        x = to_tensor(values, self.model)
        terms = self.conditional.compute_score_terms(x, self.conditional.compute_surprisal(x))
        return ScoreTermArrays(
            _to_array(terms.log_prob),
            _to_array(terms.log_p_value),
            _to_array(terms.centered_nll),
            None if terms.log_p_prior is None else _to_array(terms.log_p_prior),
        )

    def get_log_mass(self) -> Floats:
        """Return ln of the probability of each label code, (*S, K + 1)."""
        return _to_array(self.conditional.log_mass)


def _to_array(tensor: Tensor) -> Floats:
    """Return a tensor as an array of float64."""
    array: Floats = tensor.detach().double().cpu().numpy()
    return array


@torch.inference_mode()
def compute_conditionals(
    network: DEformer, codes: Ints, values: Floats, ages: Floats | None, tree: OrderTree | None
) -> TorchConditionals:
    """Return the distribution of each reading of A records given the readings before it.

    The arguments and the result are those of `engine.conditionals.compute_conditionals`.
    """
    code_tensor, value_tensor = to_tensor(codes, network), to_tensor(values, network)
    age_tensor = None  # float64, whatever the dtype of the model
    if ages is not None:
        age_tensor = torch.from_numpy(np.ascontiguousarray(ages, np.float64)).to(network.device)
    if tree is None:
        conditional = network.conditionals(code_tensor, value_tensor, ages=age_tensor)
    else:
        conditional = compute_tree_conditionals(network, tree, code_tensor, value_tensor, age_tensor)
    return TorchConditionals(conditional, network)


def compute_tree_conditionals(
    model: DEformer,
    tree: OrderTree,
    codes: Tensor,
    values: Tensor,
    ages: Tensor | None = None,
) -> Conditional:
    """Return the distribution of the reading at each node of a tree of orders, given the readings at its ancestors.

    A tree of orders is a trie of several orders of a record's readings. All orders are computed in one forward pass.

    Args:
        model: The network, in evaluation mode.
        tree: A tree with T nodes that orders W readings. It is applied to each of A records.
        codes: (A, W) feature codes (indexes in the schema). Entry [a, w] is for the reading of record a that has number
            w in the tree. There is no padding.
        values: (A, W) the values of the same readings in normalised units, or label codes.
        ages: (A, W) float64 seconds from the origin of the record to the same readings, if readings are irregular.

    Returns:
        Distributions of shape (A, T): entry [a, t] is that of the reading of record a at node t.
    """
    reading_index = torch.from_numpy(tree.reading_index).to(model.device)
    node_codes, node_values = codes[:, reading_index], values[:, reading_index]
    node_ages = None if ages is None else ages[:, reading_index]
    num_records, num_nodes = node_codes.shape
    # The nodes consist of one or two parts of the same shape, without edges between them. Nodes of different parts do
    # not attend to each other, so each part is computed like a record of its own, with `nodes_per_part` readings.
    nodes_per_part = num_nodes // tree.num_parts
    part_codes, part_values = node_codes.reshape(-1, nodes_per_part), node_values.reshape(-1, nodes_per_part)
    prior, time_inputs = _compute_tree_inputs(model, tree, node_codes, node_values, node_ages)

    def split_parts(tensor: Tensor) -> Tensor:
        """Return a tensor (A, T, …) as (A · num_parts, nodes_per_part, …), like the codes and values."""
        return torch.unflatten(tensor, 1, (-1, nodes_per_part)).flatten(0, 1)

    if prior is not None:
        prior = PriorConditional(*map(split_parts, prior.tensors))
    if time_inputs is not None:
        time_inputs = split_parts(time_inputs)
    attention_mask = torch.from_numpy(tree.ancestor_mask[:nodes_per_part, :nodes_per_part]).to(model.device)
    conditional = model.conditionals(part_codes, part_values, prior, attention_mask, time_inputs=time_inputs)
    return conditional.reshape(num_records, num_nodes)


def _compute_tree_inputs(
    model: DEformer, tree: OrderTree, node_codes: Tensor, node_values: Tensor, node_ages: Tensor | None
) -> tuple[PriorConditional | None, Tensor | None]:
    """Return further inputs of the network at each node of a tree of orders, which depend on the node's ancestors.

    They are the distributions under the prior (which was fitted before training) and, if readings are irregular, the
    time since the previous reading of the sensor. A tree of orders is a trie of several orders of a record's readings.
    These inputs cannot be computed for a trie, so each order is computed as a record of its own. The result of a node
    is taken from one of the orders that contain it; all give the same result, because the ancestors are the same.

    Args:
        model: The network.
        tree: A tree with T nodes and P orders, which is applied to each of A records.
        node_codes: (A, T) feature codes of the readings at the nodes.
        node_values: (A, T) the values of the same readings in normalised units, or label codes.
        node_ages: (A, T) float64 seconds from the origin of the record to these readings, if readings are irregular.

    Returns:
        First distributions of shape (A, T), or None if the model has no prior. Second (A, T, inputs) the inputs that
        express the times, or None if readings are not irregular.
    """
    if not model.num_prior_components and node_ages is None:
        return None, None
    paths = torch.from_numpy(tree.paths).to(model.device)  # (P, D) nodes of each order, −1 as padding
    # Each order of each record becomes one row of the input, (A · P, D), with feature code −1 as padding (its
    # values are ignored).
    path_codes = node_codes[:, paths].masked_fill(paths < 0, -1).flatten(0, 1)
    path_values = node_values[:, paths].flatten(0, 1)
    path_ages = None if node_ages is None else node_ages[:, paths].flatten(0, 1)
    # The orders of record a are the rows a · P, …, a · P + P − 1. Node t is in order `path_index[t]`, at `depth[t]`.
    path_index, depth = torch.from_numpy(tree.path_and_depth).to(model.device)
    first_row = torch.arange(len(node_codes), device=model.device)[:, None] * len(paths)
    cells = first_row + path_index, depth
    if path_ages is None:
        prior = model.apply_prior(path_codes, path_values)
        return (None if prior is None else prior[cells]), None
    rows_per_pass = max(1, MAX_READINGS_PER_PASS // max(1, paths.shape[1]))
    priors: list[PriorConditional] = []
    times: list[Tensor] = []
    for start in range(0, len(path_codes), rows_per_pass):
        rows = slice(start, start + rows_per_pass)
        if model.process is not None:
            priors.append(apply_process(model.process, path_codes[rows], path_values[rows], path_ages[rows]))
        encoded = model.encode_times(path_codes[rows], path_ages[rows])
        if encoded is not None:
            times.append(encoded)
    process_prior = None
    if priors:
        tensors = zip(*(prior.tensors for prior in priors), strict=True)
        process_prior = PriorConditional(*(torch.cat(parts)[cells] for parts in tensors))
    return process_prior, torch.cat(times)[cells] if times else None
