"""Attention among the tokens of complete records, for training and for scoring without a KV cache.

A record of L readings has either two tokens per reading or one:

- A pair: the query token z_k holds the identity of the k-th feature, the observation token u_k its identity and value.
  z_k attends to the observation tokens u_1 … u_{k-1}, and u_k to u_1 … u_k. Each token also attends to itself. With the
  attention context "all", both also attend to the query tokens z_1 … z_k; with "values" they do not.
- A single token: it attends to itself and to the tokens of earlier readings.

In every tensor of this module, the L query tokens of a record stand before its L observation tokens. Shapes use these
letters: N is the number of records, L the number of readings of each record, H the number of attention heads and d_head
the width of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from deformer_stream.model.config import AttentionContext

MAX_UNFUSED_READINGS = 256
"""The largest number of readings per record for which a CPU computes attention by separate matrix products.

Up to this number, they are faster than PyTorch's fused kernel, whose backward pass is slow on a CPU.
"""


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    attention_context: AttentionContext | None,
    dropout: float,
    earlier_mask: Tensor | None = None,
) -> Tensor:
    """Return the attention output of the tokens of complete records.

    Each reading (one value of one feature) has either a single token or a pair of tokens. A pair is a query token,
    whose output predicts the value, and an observation token, which holds the value. N is the number of records, L the
    number of readings of each record, H the number of attention heads, d_head the width of a head.

    Args:
        queries: The queries, already divided by √d_head: (N, H, 2L, d_head) for all tokens of pairs, (N, H, L, d_head)
            for the query tokens of pairs only (as in the last layer) or for single tokens.
        keys: (N, H, 2L, d_head) for pairs, the L query tokens before the L observation tokens; (N, H, L, d_head) for
            single tokens.
        values: The values of attention, in the shape and order of `keys`.
        attention_context: What the tokens of pairs attend to besides themselves. "values" means the observation tokens
            of earlier readings. "all" also includes the query tokens of earlier readings and of their own reading.
            None for single tokens, which attend to themselves and to all earlier tokens.
        dropout: The dropout probability of the attention weights.
        earlier_mask: (L, L) bool, true at [k, j] if reading j counts as earlier than reading k; by default j < k.

    Returns:
        The weighted sums of the values, in the shape of `queries`.
    """
    has_pairs = attention_context is not None
    num_readings = keys.shape[2] // (2 if has_pairs else 1)
    queries_per_reading = queries.shape[2] // num_readings  # 2 if both tokens of a pair have queries, else 1
    # On a CPU, separate matrix products are faster for short records than PyTorch's fused kernel.
    is_small_on_cpu = queries.device.type == "cpu" and num_readings <= MAX_UNFUSED_READINGS and not dropout
    if is_small_on_cpu and attention_context == "values":
        attended: Tensor = _ObservationAttention.apply(queries, keys, values, earlier_mask)
        return attended
    if is_small_on_cpu and earlier_mask is None:
        mask = build_mask(queries_per_reading, num_readings, attention_context, keys.device)
        scores = queries @ keys.transpose(-1, -2)
        return torch.softmax(scores + _to_additive_mask(mask, scores.dtype), -1) @ values
    if attention_context == "all" and earlier_mask is None:
        return _attend_interleaved(queries, keys, values, dropout)
    # The mask of single tokens is lower triangular by default. The fused kernel then needs no mask tensor.
    is_causal = attention_context is None and earlier_mask is None
    fused_mask = None
    if not is_causal:
        fused_mask = build_mask(queries_per_reading, num_readings, attention_context, queries.device, earlier_mask)
    return nn.functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=fused_mask, dropout_p=dropout, is_causal=is_causal, scale=1.0
    )


def _attend_interleaved(queries: Tensor, keys: Tensor, values: Tensor, dropout: float) -> Tensor:
    """Return the attention output of pairs of tokens with the attention context "all" and the order of the readings.

    In the order z_1, u_1, z_2, u_2, … a token attends to itself and to all tokens before it. The fused kernels support
    this mask without a mask tensor, skip half of the products, and on a GPU the fastest of them can be used.

    Args:
        queries: The queries, already divided by √d_head: (N, H, 2L, d_head) for z_1 … z_L, u_1 … u_L, or
            (N, H, L, d_head) for z_1 … z_L only.
        keys: (N, H, 2L, d_head), for z_1 … z_L, u_1 … u_L.
        values: (N, H, 2L, d_head), for z_1 … z_L, u_1 … u_L.
        dropout: The dropout probability of the attention weights.

    Returns:
        The weighted sums of the values, in the shape and order of `queries`.
    """

    def interleave(tokens: Tensor) -> Tensor:
        return torch.unflatten(tokens, 2, (2, -1)).transpose(2, 3).flatten(2, 3)

    has_all_queries = queries.shape[2] == keys.shape[2]
    # Without queries of the observation tokens, those of the query tokens fill their places, and the result is unused.
    rows = interleave(queries) if has_all_queries else queries.repeat_interleave(2, 2)
    attended = nn.functional.scaled_dot_product_attention(
        rows, interleave(keys), interleave(values), dropout_p=dropout, is_causal=True, scale=1.0
    )
    if not has_all_queries:
        return attended[:, :, ::2]
    return torch.unflatten(attended, 2, (-1, 2)).transpose(2, 3).flatten(2, 3)


def build_mask(
    queries_per_reading: int,
    num_readings: int,
    attention_context: AttentionContext | None,
    device: torch.device,
    earlier_mask: Tensor | None = None,
) -> Tensor:
    """Return the attention mask of a record, true where the token of the row attends to the token of the column.

    Each reading (one value of one feature) has either a single token or a pair of tokens. A pair is a query token,
    whose output predicts the value, and an observation token, which holds the value.

    Args:
        queries_per_reading: 2 if the rows are the query tokens followed by the observation tokens; 1 if they are the
            query tokens only, or single tokens.
        num_readings: The number L of readings.
        attention_context: What the tokens of pairs attend to besides themselves. "values" means the observation tokens
            of earlier readings. "all" also includes the query tokens of earlier readings and of their own reading.
            None for single tokens, which attend to themselves and to all earlier tokens.
        device: The device of the mask.
        earlier_mask: (L, L) bool, true at [k, j] if reading j counts as earlier than reading k; by default j < k.

    Returns:
        (queries_per_reading · L, 2L) bool for pairs, with columns for the query tokens and then for the observation
        tokens; (L, L) bool for single tokens.
    """
    own_or_earlier = _build_own_or_earlier_mask(num_readings, device, earlier_mask)
    if attention_context is None:
        return own_or_earlier
    is_own_reading = torch.eye(num_readings, dtype=torch.bool, device=device)
    # Each of the four (L, L) parts says which tokens of one type (query, observation) attend to which of another type.
    if attention_context == "all":
        query_to_query = observation_to_query = own_or_earlier
    else:
        query_to_query, observation_to_query = is_own_reading, torch.zeros_like(is_own_reading)
    # A query token must not attend to the observation token of its own reading, which holds the value to predict.
    query_to_observation, observation_to_observation = own_or_earlier & ~is_own_reading, own_or_earlier
    query_rows = torch.cat([query_to_query, query_to_observation], 1)
    if queries_per_reading == 1:
        return query_rows
    observation_rows = torch.cat([observation_to_query, observation_to_observation], 1)
    return torch.cat([query_rows, observation_rows])


def _build_own_or_earlier_mask(num_readings: int, device: torch.device, earlier_mask: Tensor | None) -> Tensor:
    """Return a mask over the readings of a record, true at [k, j] if reading j is reading k itself or is earlier.

    Args:
        num_readings: The number L of readings.
        device: The device of the mask.
        earlier_mask: (L, L) bool, true at [k, j] if reading j counts as earlier than reading k; by default j < k.

    Returns:
        (L, L) bool.
    """
    is_own_reading = torch.eye(num_readings, dtype=torch.bool, device=device)
    if earlier_mask is None:
        return torch.ones_like(is_own_reading).tril()  # j ≤ k
    return earlier_mask | is_own_reading


def _to_additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor to add to attention scores before the softmax: 0 where `mask` is true, −∞ where it is false.

    Args:
        mask: A boolean mask of any shape, true where a token attends to another.
        dtype: The dtype of the result, which has the shape of `mask`.
    """
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)


class _ObservationAttention(torch.autograd.Function):
    """Attention of pairs of tokens with the attention context "values", computed with L keys instead of 2L.

    Each of the L readings of a record has a query token z_k, whose output predicts the value, and an observation token
    u_k, which holds the value. u_k attends to u_1 … u_k. z_k attends to itself and to u_1 … u_{k-1}, but not to u_k,
    which would reveal the value to predict. In the (L, L) matrix of the scores of query tokens with the keys of
    observation tokens, the diagonal entry (z_k, u_k) is therefore free. It stores the score of z_k with its own key.
    The result is that of a mask over all 2L keys, with half as many scores.

    In the shapes, d_head is the width of an attention head, M the number of records times the number of attention
    heads, and `rows` the number of queries: 2L, or L if only the query tokens have queries.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, earlier_mask: Tensor | None) -> Tensor:
        """Return the attention output of the tokens of complete records, two tokens for each reading.

        Reading k has a query token z_k, whose output predicts the value, and an observation token u_k, which holds the
        value. z_k attends to itself and to the observation tokens of the earlier readings. u_k attends to itself and to
        the observation tokens of the earlier readings. No token attends to the query token of another reading.

        Args:
            ctx: The context in which PyTorch keeps tensors for the backward pass.
            queries: The queries, already divided by √d_head, for N records of L readings and H attention heads of width
                d_head: (N, H, 2L, d_head) for z_1 … z_L, u_1 … u_L, or (N, H, L, d_head) for z_1 … z_L only.
            keys: (N, H, 2L, d_head), for z_1 … z_L, u_1 … u_L.
            values: (N, H, 2L, d_head), for z_1 … z_L, u_1 … u_L.
            earlier_mask: (L, L) bool, true at [k, j] if reading j counts as earlier than reading k; None for j < k.

        Returns:
            The weighted sums of the values, in the shape of `queries`.
        """
        num_records, num_readings = keys.shape[0], keys.shape[2] // 2
        # Flatten records and heads into one batch dimension M. `rows` is the number of queries, 2L or L.
        q = queries.flatten(0, 1)  # (M, rows, d_head)
        keys_z, keys_u = torch.split(keys.flatten(0, 1), num_readings, 1)  # (M, L, d_head) each
        values_z, values_u = torch.split(values.flatten(0, 1), num_readings, 1)
        mask = _build_own_or_earlier_mask(num_readings, keys.device, earlier_mask)  # (L, L)
        mask = mask.repeat(queries.shape[2] // num_readings, 1)  # (rows, L), the same for z_k and u_k
        # The columns of the scores are the keys of u_1 … u_L. The product and the mask are added in one operation.
        scores = torch.baddbmm(_to_additive_mask(mask, q.dtype), q, keys_u.transpose(1, 2))  # (M, rows, L)
        # z_k must not attend to u_k, so replace the score (z_k, u_k) by the score of z_k with its own key.
        scores_with_own_key = (q[:, :num_readings] * keys_z).sum(-1)  # (M, L)
        _diagonal(scores).copy_(scores_with_own_key)
        weights = torch.softmax(scores, -1)
        attended = weights @ values_u
        # The product applied the weight of z_k's own key to the value of u_k; replace that value by the value of z_k.
        attended[:, :num_readings] += _diagonal(weights).unsqueeze(-1) * (values_z - values_u)
        ctx.save_for_backward(q, keys_z, keys_u, values_z, values_u, weights)
        return torch.unflatten(attended, 0, (num_records, -1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients of the arguments `queries`, `keys` and `values` of `forward`, and None for the mask.

        In the matrix of attention scores, rows are queries and columns are the keys of observation tokens. The diagonal
        is an exception: `forward` stored there the score of each query token with its own key. The gradients on the
        diagonal are therefore corrected in place. Separate tensors for these scores would be slower.

        Args:
            ctx: The context with the tensors that `forward` saved.
            gradient: The gradient of the output of `forward`, in the shape of `queries`.
        """
        q, keys_z, keys_u, values_z, values_u, weights = ctx.saved_tensors
        num_records, num_readings = len(gradient), keys_u.shape[1]
        grad = gradient.flatten(0, 1)  # (M, rows, d_head), with records and heads in the dimension M
        grad_z, q_z = grad[:, :num_readings], q[:, :num_readings]  # the rows of the query tokens
        # On the diagonal, `forward` applied the weights to values_z in place of values_u. The product for values_u
        # includes the diagonal, so subtract that part.
        grad_values_z = _diagonal(weights).unsqueeze(-1) * grad_z
        grad_values_u = weights.transpose(1, 2) @ grad - grad_values_z
        grad_weights = grad @ values_u.transpose(1, 2)
        _diagonal(grad_weights).copy_((grad_z * values_z).sum(-1))
        # The backward pass of the softmax that computed `weights` from the scores.
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        # The scores on the diagonal depend on keys_z. Remove their gradients before the products with keys_u.
        grad_own_scores = _diagonal(grad_scores).clone().unsqueeze(-1)
        _diagonal(grad_scores).zero_()
        grad_q = grad_scores @ keys_u
        grad_q[:, :num_readings] += grad_own_scores * keys_z
        grad_keys_u = grad_scores.transpose(1, 2) @ q
        grad_keys = torch.cat([grad_own_scores * q_z, grad_keys_u], 1)
        grad_values = torch.cat([grad_values_z, grad_values_u], 1)
        grad_queries, grad_keys, grad_values = (
            torch.unflatten(t, 0, (num_records, -1)) for t in (grad_q, grad_keys, grad_values)
        )
        return grad_queries, grad_keys, grad_values, None


def _diagonal(scores: Tensor) -> Tensor:
    """Return a view of the entries [m, k, k], which belong to the query token and observation token of reading k.

    Args:
        scores: (M, rows, L), attention scores, attention weights or gradients of either, for M combinations of a record
            and an attention head. The first L of the `rows` rows belong to the query tokens of the L readings, the
            columns to the observation tokens.

    Returns:
        (M, L), a view, so that writing to it changes `scores`.
    """
    return scores.diagonal(dim1=1, dim2=2)
