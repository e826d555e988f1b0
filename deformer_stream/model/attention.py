"""Attention among the tokens of complete records, for training and for scoring without a KV cache.

A record of L readings has either two tokens per reading or one:

- A pair: the query token z_k holds the identity of the k-th feature, the observation token u_k its identity and value.
  z_k attends to the observation tokens u_1 … u_{k-1}, and u_k to u_1 … u_k. Each token also attends to itself. With the
  attention context "all", both also attend to the query tokens z_1 … z_k; with "values" they do not.
- A single token: it attends to itself and to the tokens before it.

The L query tokens stand before the L observation tokens in every tensor of this module. Shapes use these letters: N is
the number of records, H the number of attention heads and d_head the width of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from deformer_stream.model.config import AttentionContext

MAX_UNFUSED_READINGS = 256
"""The largest number of readings per record for which a CPU computes attention by separate matrix products.

Up to this length they are faster than PyTorch's fused kernel, whose backward pass is slow on a CPU.
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

    A reading has a query token and an observation token, or a single token. N is the number of records, L the number of
    readings of each record, H the number of attention heads, d_head the width of a head.

    Args:
        queries: The queries, already divided by √d_head: (N, H, 2L, d_head) for all tokens of pairs, (N, H, L, d_head)
            for the query tokens of pairs only (as in the last layer) or for single tokens.
        keys: (N, H, 2L, d_head), the L query tokens before the L observation tokens; (N, H, L, d_head) if single.
        values: The values of attention, shaped as `keys`.
        attention_context: The earlier tokens that the tokens of a pair attend to; None for single tokens.
        dropout: The dropout probability of the attention weights.
        earlier_mask: (L, L) bool, true at [k, j] if reading j counts as earlier than reading k. The default is the
            order of the readings in the tensors, that is j < k.

    Returns:
        The weighted sums of the values, shaped as `queries`.
    """
    has_pairs = attention_context is not None
    num_readings = keys.shape[2] // (2 if has_pairs else 1)
    num_kinds = queries.shape[2] // num_readings  # 2 if both tokens of a pair have queries, else 1
    is_small_on_cpu = queries.device.type == "cpu" and num_readings <= MAX_UNFUSED_READINGS and not dropout
    if is_small_on_cpu and attention_context == "values":
        attended: Tensor = _ObservationAttention.apply(queries, keys, values, earlier_mask)
        return attended
    if is_small_on_cpu and earlier_mask is None:
        mask = _build_mask(num_kinds, num_readings, attention_context, keys.device)
        scores = queries @ keys.transpose(-1, -2)
        return torch.softmax(scores + _to_additive_mask(mask, scores.dtype), -1) @ values
    is_causal = attention_context is None and earlier_mask is None  # the fused kernel needs no mask in this case
    fused_mask = None
    if not is_causal:
        fused_mask = _build_mask(num_kinds, num_readings, attention_context, queries.device, earlier_mask)
    return nn.functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=fused_mask, dropout_p=dropout, is_causal=is_causal, scale=1.0
    )


def _build_mask(
    num_kinds: int,
    num_readings: int,
    attention_context: AttentionContext | None,
    device: torch.device,
    earlier_mask: Tensor | None = None,
) -> Tensor:
    """Return the attention mask, true where a token (row) attends to a token (column).

    Args:
        num_kinds: 2 if the rows are query tokens and then observation tokens, 1 if they are query tokens only.
        num_readings: The number L of readings.
        attention_context: The earlier tokens that the tokens of a pair attend to; None for single tokens.
        device: The device of the mask.
        earlier_mask: (L, L) bool, true at [k, j] if reading j counts as earlier than reading k; by default j < k.

    Returns:
        (num_kinds · L, 2L) bool for pairs, with columns for the query tokens and then for the observation tokens;
        (L, L) bool for single tokens.
    """
    up_to = _build_up_to_mask(num_readings, device, earlier_mask)
    itself = torch.eye(num_readings, dtype=torch.bool, device=device)
    if attention_context is None:
        return up_to
    nothing = torch.zeros_like(itself)
    query_rows = torch.cat([up_to if attention_context == "all" else itself, up_to & ~itself], 1)
    observation_rows = torch.cat([up_to if attention_context == "all" else nothing, up_to], 1)
    return torch.cat([query_rows, observation_rows][:num_kinds])


def _build_up_to_mask(num_readings: int, device: torch.device, earlier_mask: Tensor | None) -> Tensor:
    """Return a mask over the L readings of a record, true at [k, j] if reading j is reading k or is earlier.

    Args:
        num_readings: The number L of readings.
        device: The device of the mask.
        earlier_mask: (L, L) bool, true at [k, j] if reading j counts as earlier than reading k; by default j < k.

    Returns:
        (L, L) bool.
    """
    itself = torch.eye(num_readings, dtype=torch.bool, device=device)
    return torch.ones_like(itself).tril() if earlier_mask is None else earlier_mask | itself


def _to_additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to attention scores: 0 where the boolean mask is true, −∞ elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)


class _ObservationAttention(torch.autograd.Function):
    """Attention of pairs of tokens with the context "values", computed with L keys instead of 2L.

    A query token z_k attends to u_1 … u_{k-1} and to itself. It must not attend to u_k, which would reveal the value
    that it predicts. So in the (L, L) scores of the query tokens, the diagonal entry (z_k, u_k) is free: it holds the
    score of z_k with its own key. This halves the scores in comparison with a mask over 2L keys; the result is equal.

    In the shapes, L is the number of readings of a record, M the number of records times that of attention heads, and
    `rows` is 2L if the observation tokens have queries, too, else L.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, earlier_mask: Tensor | None) -> Tensor:
        """Return the weighted values; the arguments and the result are those of `attend`."""
        num_records, num_readings = keys.shape[0], keys.shape[2] // 2
        q = queries.flatten(0, 1)  # (M, rows, d_head)
        own_keys, k = torch.split(keys.flatten(0, 1), num_readings, 1)  # of z and of u: (M, L, d_head) each
        own_values, v = torch.split(values.flatten(0, 1), num_readings, 1)
        mask = _build_up_to_mask(num_readings, keys.device, earlier_mask)
        mask = mask.repeat(queries.shape[2] // num_readings, 1)  # (rows, L)
        scores = torch.baddbmm(_to_additive_mask(mask, q.dtype), q, k.transpose(1, 2))  # (M, rows, L)
        _diagonal(scores).copy_((q[:, :num_readings] * own_keys).sum(-1))
        weights = torch.softmax(scores, -1)
        attended = weights @ v
        # The product used u_k's value on the diagonal; replace it by the own value of z_k.
        attended[:, :num_readings] += _diagonal(weights).unsqueeze(-1) * (own_values - v)
        ctx.save_for_backward(q, k, v, own_keys, own_values, weights)
        return torch.unflatten(attended, 0, (num_records, -1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients of queries, keys and values; `earlier_mask` has none.

        The entries that belong to a query token and its own key are corrected in place on the diagonal. This needs
        fewer passes over the large (M, rows, L) tensors than a second set of scores would.
        """
        q, k, v, own_keys, own_values, weights = ctx.saved_tensors
        num_records, num_readings = len(gradient), k.shape[1]
        grad = gradient.flatten(0, 1)
        grad_z, q_z = grad[:, :num_readings], q[:, :num_readings]
        grad_own_values = _diagonal(weights).unsqueeze(-1) * grad_z
        grad_v = weights.transpose(1, 2) @ grad - grad_own_values
        grad_weights = grad @ v.transpose(1, 2)
        _diagonal(grad_weights).copy_((grad_z * own_values).sum(-1))
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        grad_own_scores = _diagonal(grad_scores).clone().unsqueeze(-1)
        _diagonal(grad_scores).zero_()
        grad_q = grad_scores @ k
        grad_q[:, :num_readings] += grad_own_scores * own_keys
        grad_k = grad_scores.transpose(1, 2) @ q
        grad_keys = torch.cat([grad_own_scores * q_z, grad_k], 1)
        grad_values = torch.cat([grad_own_values, grad_v], 1)
        grad_queries, grad_keys, grad_values = (
            torch.unflatten(t, 0, (num_records, -1)) for t in (grad_q, grad_keys, grad_values)
        )
        return grad_queries, grad_keys, grad_values, None


def _diagonal(scores: Tensor) -> Tensor:
    """Return a view of the entries where the query token and the observation token of one reading meet.

    Args:
        scores: (M, rows, L) for M pairs of a record and an attention head. The first L rows are those of the query
            tokens of L readings, the columns those of the observation tokens.

    Returns:
        (M, L), a view, so that writing to it changes `scores`.
    """
    return scores.diagonal(dim1=1, dim2=2)
