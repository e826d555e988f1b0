"""Attention by matrix products is the masked attention it stands for, gradients included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from deformer_stream.model.attention import LONGEST, AttentionContext, attend


def by_definition(q: Tensor, k: Tensor, v: Tensor, memory: AttentionContext) -> Tensor:
    """The triangular mask over interleaved tokens, one entry after the other."""
    half = k.shape[2] // 2
    tokens = [(kind, place) for kind in "zu" for place in range(half)]
    seen = [
        [
            earlier < place or (earlier == place and (other == kind or (kind, other) == ("u", "z")))
            if memory == "all" or other == "u"
            else (kind, place) == (other, earlier)
            for other, earlier in tokens
        ]
        for kind, place in tokens[: q.shape[2]]
    ]
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=torch.tensor(seen), scale=1.0)


@pytest.mark.parametrize("memory", ["all", "values"])
@given(half=st.integers(1, 6), kinds=st.integers(1, 2), seed=st.integers(0, 1000))
def test_values_and_gradients_are_those_of_the_mask(memory: AttentionContext, half: int, kinds: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = (kinds * half, 2 * half, 2 * half)
    given = [torch.randn(2, 3, n, 4, generator=generator, dtype=torch.float64).requires_grad_() for n in shapes]
    found, wanted = attend(*given, memory, 0.0), by_definition(*given, memory)
    weight = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(found, wanted)
    gradients = (torch.autograd.grad(out, given, weight) for out in (found, wanted))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("length", [5, LONGEST + 1])
def test_single_tokens_see_themselves_and_those_before(length: int) -> None:
    """Written out, and by the fused kernel; in the order they stand in, and in another one."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 3, length, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    wanted = nn.functional.scaled_dot_product_attention(*given, attn_mask=seen, scale=1.0)
    torch.testing.assert_close(attend(*given, None, 0.0), wanted)
    turned = attend(*(t.flip(2) for t in given), None, 0.0, seen.flip(0, 1))
    torch.testing.assert_close(turned.flip(2), wanted)
