"""Tie groups in the density: readings of one instant as a set, with learnt encoders instead of averages over orders.

The readings of a record arrive in groups G_1, …, G_T, each with the readings of one instant, whose order has no
meaning. The density of a record is that of its groups, and the density of a group G of n readings is factorised in
canonical order, by feature code:

    p(x) = Π_t p(G_t | G_1, …, G_{t−1}),    p(G | past) = Π_k p(x_k | past, {x_1, …, x_{k−1}}),    k = 1 … n

Each factor is normalised, hence so is their product. It does not depend on the order in which the readings of a group
are given, because they are sorted first. The networks differ in how the past and the readings of the group that are
already given are encoded. z_k is the query token of reading k, and u_k = g_u(i_k, v_k) its observation token, as in
`model.deformer`.

- "order": tokens of the past have the canonical order of their groups, as in `--ties hold` without its other orders.
  z_k and u_k attend to u_j for all earlier readings j.
- "attention": the observation tokens of a group attend to each other, without order (a Transformer without positions
  within each group). In layer l, with A for attention to a set of tokens,

      u_k^l = A^l(u_k^{l−1}; {u_j^{l−1} : j in the past or in the group of k})
      z_k^l = A^l(z_k^{l−1}; {z_k^{l−1}} ∪ {u_j^{l−1} : j in the past} ∪ {u_j^0 : j before k in the group of k})

  From the first layer on, the observation tokens of a group contain all of its values. The query tokens of the group
  must not attend to them. So they attend to the inputs u_j^0 of the readings that are already given.
- An encoder E of `trainer.equal_time` ("mean", "deep_sets", "lstm_set", "transformer"): each group is reduced to one
  vector, as in the source, and so are the readings of a group that are already given:

      u_{t,k} = E({g_u(i_j, v_j) : j = 1 … k in G_t})

  The token of a complete group is w_t = u_{t,n}. The token u_{t,k} attends to itself and to w_1 … w_{t−1}; the query
  token z_{t,k} attends to itself, to w_1 … w_{t−1} and to u_{t,k−1}. A KV cache would need one token for each group.

The source of the encoders is Ger, Klabjan and Utke, "Classification Models for Partially Ordered Sequences" (arXiv
2102.00380), which classifies and has no density. "attention" is the attention of its Transformer without the pooling.

`score_in_orders` is what the engine does with `--ties hold`: the logmeanexp over up to four orders of each group.

In the shapes, N is the number of records, L that of the readings of each, and d the width of a token. Group t of all
records has the readings at the positions from t · m on, where m is the size of a group; the last group may be smaller.
Records are complete: nothing is padded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deformer_stream.engine.ties import draw_orders
from deformer_stream.model.config import ModelConfig
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.distributions import Conditional
from deformer_stream.model.gaussian_prior import PriorConditional
from deformer_stream.model.layers import TransformerLayer
from deformer_stream.model.schema import Schema
from trainer.data import PreparedTable
from trainer.equal_time import create_encoder
from trainer.examples import RecordExamples
from trainer.fit import Recipe
from trainer.gaussian_prior import CrossFittedPriors
from trainer.sampling import OrderedSamples, draw_samples

Encoding = Literal["order", "attention", "mean", "deep_sets", "lstm_set", "transformer"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)

Ints = NDArray[np.int64]


def sort_groups(features: Tensor, group_size: int) -> Tensor:
    """Return the positions of the readings in canonical order, (N, L): group by group, by feature code in each.

    Args:
        features: (N, L) feature codes, group by group.
        group_size: Number m of readings of a group.
    """
    group = torch.arange(features.shape[1], device=features.device) // group_size
    return torch.argsort(group * (features.max() + 1) + features, dim=1)


class TieGroupDEformer(DEformer):
    """A density of records with tie groups, in which the order of the readings of a group has no influence.

    Args:
        schema: The features.
        config: The hyperparameters.
        group_size: Number m of readings of a group.
        encoding: How the readings of a group are encoded (see the module).
    """

    def __init__(self, schema: Schema, config: ModelConfig, group_size: int, encoding: Encoding) -> None:
        super().__init__(schema, replace(config, tokens="pair", memory="values"))
        self.group_size, self.encoding = group_size, encoding
        self.set_encoder = None
        if encoding != "order" and encoding != "attention":
            self.set_encoder = create_encoder(encoding, config.d_model, config.d_model, config.heads)

    def conditionals(
        self,
        features: Tensor,
        values: Tensor,
        prior: PriorConditional | None = None,
        earlier_mask: Tensor | None = None,
        ages: Tensor | None = None,
        time_inputs: Tensor | None = None,
    ) -> Conditional:
        """Return the distribution of each reading given the past and the readings of its group before it.

        "Before" means the canonical order of the group, whatever the order of the arguments.

        Args:
            features: (N, L) feature codes of complete records, group by group.
            values: (N, L) normalised values of continuous features and label codes of discrete ones.
            prior: The distributions of the readings under a Gaussian prior. The groups must then be in canonical order.
                By default, they are computed with the model's own prior, if it has one.
            earlier_mask: Not supported.
            ages: Not supported.
            time_inputs: Not supported.

        Returns:
            Distributions of shape (N, L), in the order of the arguments.

        Raises:
            ValueError: An argument is not supported.
        """
        if earlier_mask is not None or ages is not None or time_inputs is not None:
            raise ValueError("tie groups need complete records: pass no earlier_mask, ages or time_inputs")
        order = sort_groups(features, self.group_size)
        sorted_features, sorted_values = features.gather(1, order), values.gather(1, order)
        if prior is None:
            prior = self.apply_prior(sorted_features, sorted_values)
        if self.encoding == "order":
            conditional = super().conditionals(sorted_features, sorted_values, prior)
        else:
            conditional = self.predict_sorted(sorted_features, sorted_values, prior)
        return conditional[torch.arange(len(order), device=order.device)[:, None], order.argsort(1)]

    def predict_sorted(self, features: Tensor, values: Tensor, prior: PriorConditional | None) -> Conditional:
        """Return the distributions of readings whose groups are in the order in which they are factorised, (N, L).

        The arguments are those of `conditionals`. The encoding is not "order".
        """
        num_readings = features.shape[1]
        inputs = self.embed_observation_tokens(features, values)  # u^0
        if self.set_encoder is not None:
            inputs = self._encode_prefixes(inputs)
        x = torch.cat([self.embed_query_tokens(features, prior), inputs], 1)
        has_inputs = self.set_encoder is None  # whether query tokens attend to the inputs of their group
        mask = build_group_mask(num_readings, self.group_size, is_pooled=not has_inputs).to(x.device)
        for layer_index, layer in enumerate(cast(list[TransformerLayer], list(self.blocks))):
            num_outputs = num_readings if layer_index == self.config.layers - 1 else 2 * num_readings
            q, k, v = layer.project_qkv(torch.cat([x, inputs], 1) if has_inputs else x)
            dropout = layer.dropout if layer.training else 0.0
            attended = nn.functional.scaled_dot_product_attention(
                q[:, :, :num_outputs], k, v, attn_mask=mask[:num_outputs], dropout_p=dropout, scale=1.0
            )
            x = layer.apply_residual_branches(x[:, :num_outputs], attended.transpose(1, 2).flatten(2))
        return cast(Conditional, self.head(self.norm(x), features, prior))

    def _encode_prefixes(self, tokens: Tensor) -> Tensor:
        """Return for each reading one vector of the set of the readings of its group up to it, (N, L, d).

        Args:
            tokens: (N, L, d) observation tokens, group by group.
        """
        num_readings, size = tokens.shape[1], self.group_size
        groups = torch.unflatten(nn.functional.pad(tokens, (0, 0, 0, -num_readings % size)), 1, (-1, size))
        encoded = []
        for length in range(1, size + 1):
            # Only the last group can be smaller.
            num_groups = (num_readings + size - length) // size
            sets = groups[:, :num_groups, :length].flatten(0, 1)
            vectors = sets[:, 0] if length == 1 or self.set_encoder is None else self.set_encoder(sets)
            vectors = torch.unflatten(vectors, 0, (len(tokens), num_groups))
            encoded.append(nn.functional.pad(vectors, (0, 0, 0, groups.shape[1] - num_groups)))
        return torch.stack(encoded, 2).flatten(1, 2)[:, :num_readings]


@lru_cache(maxsize=64)
def build_group_mask(num_readings: int, group_size: int, is_pooled: bool) -> Tensor:
    """Return which tokens attend to which, (2L, 2L or 3L) bool, for L readings in tie groups.

    Args:
        num_readings: The number L.
        group_size: Number m of readings of a group.
        is_pooled: Whether an observation token holds the set of the readings of its group up to its own one.

    Returns:
        Rows: the query tokens, then the observation tokens. Columns: the same, then, unless `is_pooled`, the inputs of
        the first layer in place of the observation tokens.
    """
    position = torch.arange(num_readings)
    group = position // group_size
    is_own = position[:, None] == position
    is_past = group[:, None] > group
    is_same_group = group[:, None] == group
    nothing = torch.zeros_like(is_own)
    if is_pooled:
        is_last_of_group = torch.cat([group[1:] != group[:-1], torch.tensor([True])])
        is_past &= is_last_of_group
        is_previous = is_same_group & (position[:, None] == position + 1)
        return torch.cat([torch.cat([is_own, is_past | is_previous], 1), torch.cat([nothing, is_own | is_past], 1)])
    is_given = is_same_group & (position[:, None] > position)
    query_rows = torch.cat([is_own, is_past, is_given], 1)
    return torch.cat([query_rows, torch.cat([nothing, is_past | is_same_group, nothing], 1)])


class TieGroupExamples(RecordExamples):
    """Complete records whose readings arrive in tie groups, in random order or in canonical order within a group.

    The readings of each sample are divided into groups at random, because all features are equally likely to arrive
    together.

    Args:
        data: The prepared table, without missing readings.
        recipe: The hyperparameters of training.
        group_size: Number m of readings of a group. None for random orders, in which each reading is a group.
        priors: The Gaussian prior, None if the model has none.
    """

    def __init__(
        self, data: PreparedTable, recipe: Recipe, group_size: int | None, priors: CrossFittedPriors | None
    ) -> None:
        super().__init__(data, recipe.smoothing, recipe.forget, 0.0, priors)
        self.group_size = group_size

    def draw(self, indexes: Ints, generator: torch.Generator) -> tuple[OrderedSamples, Ints]:
        """Return records with noise, their readings group by group, and their row numbers."""
        samples = draw_samples(self.data, indexes, self.noise, 0.0, generator)
        if self.group_size is not None:
            num_features = samples.keys.shape[1]
            group = samples.keys.argsort(1).argsort(1) // self.group_size
            samples = replace(samples, keys=group + torch.arange(num_features) / num_features)
        return samples.sort_readings(), indexes


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of N records with L readings in tie groups.

    Attributes:
        log_p: (N,) ln p of each record.
        log_p_value: (N, L) ln of the highest-density p-value of each reading. The readings have the order of the
            arguments, or the canonical one after `score_in_orders`.
    """

    log_p: Tensor
    log_p_value: Tensor


def score(model: DEformer, features: Tensor, values: Tensor) -> Scores:
    """Return the scores of readings in one order: the given one, or that of a `TieGroupDEformer`.

    Args:
        model: A network.
        features: (N, L) feature codes of complete records, group by group.
        values: (N, L) normalised values or label codes.
    """
    conditional = model.conditionals(features, values)
    terms = conditional.compute_score_terms(values, conditional.compute_surprisal(values))
    return Scores(terms.log_prob.sum(1), terms.log_p_value)


@dataclass(frozen=True, slots=True)
class Branches:
    """Up to K orders of each tie group of a record with L readings, as T nodes of which each holds a reading.

    The first L nodes are the readings in canonical order. Each other order of a group is a branch: its nodes follow the
    canonical readings of earlier groups, and no node outside the branch follows them.

    Attributes:
        reading: (T,) position of the reading of each node in the canonical order.
        order_index: (T,) which order of its group each node belongs to; 0 is the canonical one.
        place: (T,) position of each node in the record if all groups have that order.
        is_earlier: (T, T) true at [k, j] if node j precedes node k.
        groups: For each group of n readings, (orders, n) its nodes in each order, sorted by their readings.
        orders: (K, L) the readings of the record if all groups have their order k. Groups with fewer orders have the
            canonical one.
    """

    reading: Tensor
    order_index: Tensor
    place: Tensor
    is_earlier: Tensor
    groups: list[Tensor]
    orders: Tensor


@lru_cache(maxsize=16)
def build_branches(num_readings: int, group_size: int, seed: int) -> Branches:
    """Return the orders of all tie groups, drawn as the engine draws them but the same for all records.

    Args:
        num_readings: The number L.
        group_size: Number m of readings of a group.
        seed: Seed of the random orders.
    """
    canonical = np.arange(num_readings)
    starts = range(0, num_readings, group_size)
    orders_by_group = []  # (orders, n) readings of each group
    for start in starts:
        codes = np.arange(min(group_size, num_readings - start))
        others = draw_orders(f"{seed} {start}", codes, 0)  # without the canonical one
        orders_by_group.append(start + np.concatenate([codes[None], others]))
    # The nodes are numbered order by order, and within each from the first group to the last one that has it.
    num_orders = max(map(len, orders_by_group))
    orders = np.tile(canonical, (num_orders, 1))
    readings, order_indexes, places = [], [], []
    for k in range(num_orders):
        for start, group_orders in zip(starts, orders_by_group, strict=True):
            if k < len(group_orders):
                group_places = np.arange(start, start + group_orders.shape[1])
                orders[k, group_places] = group_orders[k]
                readings.append(group_orders[k])
                order_indexes.append(np.full(len(group_places), k))
                places.append(group_places)
    reading, order_index, place = (
        torch.from_numpy(np.concatenate(parts)) for parts in (readings, order_indexes, places)
    )
    group = reading // group_size
    is_past = (order_index == 0) & (group < group[:, None])
    is_same_branch = (order_index == order_index[:, None]) & (group == group[:, None])
    is_earlier = is_past | (is_same_branch & (place < place[:, None]))
    by_reading = torch.argsort((group * num_orders + order_index) * num_readings + reading)
    nodes_by_group = torch.split(by_reading, [o.size for o in orders_by_group])
    groups = [nodes.reshape(o.shape) for nodes, o in zip(nodes_by_group, orders_by_group, strict=True)]
    return Branches(reading, order_index, place, is_earlier, groups, torch.from_numpy(orders))


def score_in_orders(model: DEformer, features: Tensor, values: Tensor, group_size: int, seed: int) -> Scores:
    """Return the scores of records whose tie groups are averaged over up to four orders, as the engine does.

    ln p of a group is the logmeanexp over its orders; the p-value of a reading is its smallest one. The past of a group
    is in canonical order. One call of the network computes all orders.

    Args:
        model: A network with two tokens for each reading that has learnt random orders.
        features: (N, L) feature codes of complete records, group by group.
        values: (N, L) normalised values or label codes.
        group_size: Number m of readings of a group.
        seed: Seed of the orders.
    """
    canonical = sort_groups(features, group_size)
    features, values = features.gather(1, canonical), values.gather(1, canonical)
    branches = build_branches(features.shape[1], group_size, seed)
    prior = _compute_branch_prior(model, features, values, branches)
    node_values = values[:, branches.reading]
    conditional = model.conditionals(features[:, branches.reading], node_values, prior, branches.is_earlier)
    terms = conditional.compute_score_terms(node_values, conditional.compute_surprisal(node_values))
    log_p, log_p_values = torch.zeros(len(features), dtype=values.dtype), []
    for nodes in branches.groups:
        log_p += torch.logsumexp(terms.log_prob[:, nodes].sum(2), 1) - np.log(len(nodes))
        log_p_values.append(terms.log_p_value[:, nodes].amin(1))
    return Scores(log_p, torch.cat(log_p_values, 1))


def _compute_branch_prior(
    model: DEformer, features: Tensor, values: Tensor, branches: Branches
) -> PriorConditional | None:
    """Return the distributions of all nodes under the Gaussian prior, (N, T); None if the model has none.

    Under a mixture of Gaussians, the distribution of a reading depends on the set of the earlier ones, not on their
    order.
    """
    if model.gaussians is None:
        return None
    priors = [cast(PriorConditional, model.gaussians(features[:, o], values[:, o])) for o in branches.orders]
    tensors = zip(*(prior.tensors for prior in priors), strict=True)
    return PriorConditional(*(torch.stack(parts, 1)[:, branches.order_index, branches.place] for parts in tensors))
