"""Tests that the fast implementations of attention equal attention with an explicit mask, gradients included."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from deformer_stream.model import attention
from deformer_stream.model.attention import MAX_UNFUSED_READINGS, attend
from deformer_stream.model.config import AttentionContext


def attend_with_explicit_mask(q: Tensor, k: Tensor, v: Tensor, attention_context: AttentionContext) -> Tensor:
    """Return the attention output of pairs of tokens, with the mask built entry by entry from its definition."""
    num_readings = k.shape[2] // 2
    tokens = [(kind, index) for kind in "zu" for index in range(num_readings)]

    def is_visible(kind: str, index: int, other_kind: str, other_index: int) -> bool:
        if attention_context == "values" and other_kind == "z":
            return (kind, index) == (other_kind, other_index)
        is_z_of_same_reading = other_kind == kind or (kind, other_kind) == ("u", "z")
        return other_index < index or (other_index == index and is_z_of_same_reading)

    mask = [[is_visible(*token, *other) for other in tokens] for token in tokens[: q.shape[2]]]
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=torch.tensor(mask), scale=1.0)


@pytest.mark.parametrize("max_unfused", [MAX_UNFUSED_READINGS, 0], ids=["matrix products", "fused kernel"])
@pytest.mark.parametrize("attention_context", ["all", "values"])
@given(num_readings=st.integers(1, 6), num_kinds=st.integers(1, 2), seed=st.integers(0, 1000))
def test_outputs_and_gradients_equal_those_of_an_explicit_mask(
    attention_context: AttentionContext, max_unfused: int, num_readings: int, num_kinds: int, seed: int
) -> None:
    with patch.object(attention, "MAX_UNFUSED_READINGS", max_unfused):
        check_outputs_and_gradients(attention_context, num_readings, num_kinds, seed)


def check_outputs_and_gradients(
    attention_context: AttentionContext, num_readings: int, num_kinds: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = (num_kinds * num_readings, 2 * num_readings, 2 * num_readings)
    qkv = [torch.randn(2, 3, n, 4, generator=generator, dtype=torch.float64).requires_grad_() for n in lengths]
    actual, expected = attend(*qkv, attention_context, 0.0), attend_with_explicit_mask(*qkv, attention_context)
    weight = torch.randn(actual.shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(actual, expected)
    gradients = (torch.autograd.grad(output, qkv, weight) for output in (actual, expected))
    for actual_gradient, expected_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(actual_gradient, expected_gradient)


@pytest.mark.parametrize("length", [5, MAX_UNFUSED_READINGS + 1], ids=["matrix products", "fused kernel"])
def test_single_tokens_attend_to_themselves_and_to_earlier_tokens(length: int) -> None:
    """Check both implementations, with the tokens in arrival order and in the reverse order."""
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(2, 3, length, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    causal_mask = torch.ones(length, length, dtype=torch.bool).tril()
    expected = nn.functional.scaled_dot_product_attention(*qkv, attn_mask=causal_mask, scale=1.0)
    torch.testing.assert_close(attend(*qkv, None, 0.0), expected)
    reverse = attend(*(t.flip(2) for t in qkv), None, 0.0, causal_mask.flip(0, 1))
    torch.testing.assert_close(reverse.flip(2), expected)
