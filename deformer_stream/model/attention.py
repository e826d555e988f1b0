"""Attention over the tokens of whole records at once: what training and whole-record scoring spend their time on.

Two tokens a reading, z_k (which feature) and u_k (that feature with its value). Under the triangular mask z_k sees u_<k
and u_k sees u_≤k; with memory "all" both see z_≤k too, with memory "values" a z token sees no z but itself. So with
"values" L keys serve all 2L queries, and the place on the diagonal that z_k must not see is free for its own key: half
the scores of the masked square, and the same result. Single tokens have no kinds: each sees itself and those before.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

LONGEST = 256
"""Readings up to which scores that are written out beat the fused kernel on a CPU, whose backward pass is slow."""

AttentionContext = Literal["all", "values"]


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    memory: AttentionContext | None,
    dropout: float,
    before: Tensor | None = None,
) -> Tensor:
    """What tokens see of the earlier ones. keys, values: (N, H, 2L, d_head), the L tokens z before the L tokens u; or
    (N, H, L, d_head) single ones, whose memory is None. queries: of all tokens, or (last layer) of the z tokens alone,
    scaled already. before: (L, L) bool, which readings (columns) come before which (rows), where that is not the order
    they stand in. → as queries."""
    half = keys.shape[2] // (1 if memory is None else 2)
    kinds = queries.shape[2] // half
    if queries.device.type == "cpu" and half <= LONGEST and not dropout and (before is None or memory == "values"):
        if memory == "values":
            seen: Tensor = _Values.apply(queries, keys, values, before)
            return seen
        scores = queries @ keys.transpose(-1, -2)
        return torch.softmax(scores + _blocked(_sees(kinds, half, memory, keys.device), scores.dtype), -1) @ values
    triangle = memory is None and before is None  # for which the kernel needs no mask
    mask = None if triangle else _sees(kinds, half, memory, queries.device, before)
    return nn.functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, dropout_p=dropout, is_causal=triangle, scale=1.0
    )


def _sees(
    kinds: int, half: int, memory: AttentionContext | None, device: torch.device, before: Tensor | None = None
) -> Tensor:
    """(kinds · L, 2L) bool, whether a query (z, then perhaps u) may look at a key (z, then u). Single: (L, L)."""
    upto = _upto(half, device, before)
    own = torch.eye(half, dtype=torch.bool, device=device)
    if memory is None:
        return upto
    z = torch.cat([upto if memory == "all" else own, upto & ~own], 1)
    u = torch.cat([upto if memory == "all" else torch.zeros_like(own), upto], 1)
    return torch.cat([z, u][:kinds])


def _upto(half: int, device: torch.device, before: Tensor | None) -> Tensor:
    """(L, L) bool, which readings (columns) come before which (rows), and each itself."""
    own = torch.eye(half, dtype=torch.bool, device=device)
    return torch.ones_like(own).tril() if before is None else before | own


def _blocked(sees: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a query may look, −inf elsewhere."""
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill(~sees, -math.inf)


class _Values(torch.autograd.Function):
    """Memory "values" on L keys. Scores and their gradients are passed over as seldom as can be: what concerns the
    diagonal of the z queries is done on the diagonal alone."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, before: Tensor | None) -> Tensor:
        records, half = keys.shape[0], keys.shape[2] // 2
        q = queries.flatten(0, 1)
        (own_keys, k), (own_values, v) = (torch.split(t.flatten(0, 1), half, 1) for t in (keys, values))
        sees = _upto(half, keys.device, before).repeat(queries.shape[2] // half, 1)
        scores = torch.baddbmm(_blocked(sees, q.dtype), q, k.transpose(1, 2))
        _diagonal(scores).copy_((q[:, :half] * own_keys).sum(-1))
        weights = torch.softmax(scores, -1)
        seen = weights @ v
        seen[:, :half] += _diagonal(weights).unsqueeze(-1) * (own_values - v)
        ctx.save_for_backward(q, k, v, own_keys, own_values, weights)
        return torch.unflatten(seen, 0, (records, -1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, own_keys, own_values, weights = ctx.saved_tensors
        records, half = len(gradient), k.shape[1]
        g = gradient.flatten(0, 1)
        g_z, q_z = g[:, :half], q[:, :half]
        by_own_value = _diagonal(weights).unsqueeze(-1) * g_z
        by_value = weights.transpose(1, 2) @ g - by_own_value
        by_weight = g @ v.transpose(1, 2)
        _diagonal(by_weight).copy_((g_z * own_values).sum(-1))
        by_score = torch._softmax_backward_data(by_weight, weights, -1, weights.dtype)
        by_own = _diagonal(by_score).clone().unsqueeze(-1)
        _diagonal(by_score).zero_()
        by_query = by_score @ k
        by_query[:, :half] += by_own * own_keys
        by_key = by_score.transpose(1, 2) @ q
        gradients = by_query, torch.cat([by_own * q_z, by_key], 1), torch.cat([by_own_value, by_value], 1)
        g_query, g_key, g_value = (torch.unflatten(t, 0, (records, -1)) for t in gradients)
        return g_query, g_key, g_value, None


def _diagonal(scores: Tensor) -> Tensor:
    """(M, L): where the L queries of z tokens meet the u token of the same reading, (M, ·, L)."""
    return scores.diagonal(dim1=1, dim2=2)
