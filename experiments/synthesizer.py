"""Synthesizer attention: each token computes its attention weights alone, without a comparison with other tokens.

Tay, Bahri, Metzler, Juan, Zhao and Zheng, "Synthesizer: Rethinking Self-Attention for Transformer Models" (arXiv
2005.00743). For head i of h, with tokens X ∈ R^{ℓ×d}:

    Y_i = softmax(ReLU(X A_i + b_1) B_i + b_2) X V_i,    A_i ∈ R^{d×d/h},  B_i ∈ R^{d/h×ℓ},  V_i ∈ R^{d×d/h}

in place of softmax(Q Kᵀ) V. Column j of B_i belongs to the token at position j. So all records must have the same
tokens at the same positions: the readings of all features in the order of the schema. Which of them are earlier is
expressed by a mask (`experiments.reading_orders`), and the weights of all others are 0.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from deformer_stream.model import deformer
from deformer_stream.model.attention import build_mask
from deformer_stream.model.config import AttentionContext, ModelConfig
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.layers import TransformerLayer
from deformer_stream.model.schema import Schema


class SynthesizerLayer(TransformerLayer):
    """A Transformer layer with Synthesizer attention among ℓ tokens.

    Args:
        config: The hyperparameters of the network.
        num_tokens: The number ℓ of tokens of a record.
    """

    def __init__(self, config: ModelConfig, num_tokens: int) -> None:
        super().__init__(config)
        del self.qkv
        width = config.d_model // config.heads
        self.hidden = nn.Linear(config.d_model, config.d_model)  # A_i and b_1 of all heads
        self.logits = nn.Parameter(torch.randn(config.heads, width, num_tokens) / width**0.5)  # B_i
        self.bias = nn.Parameter(torch.zeros(config.heads, 1, num_tokens))  # b_2
        self.value = nn.Linear(config.d_model, config.d_model)  # V_i of all heads

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the weighted sums of values, (N, rows, d), with the heads concatenated.

        Args:
            x: (N, ℓ, d) the tokens of N records.
            mask: (rows, ℓ) bool, true where one of the first tokens attends to a token.
        """
        x = self.norm1(x) if self.is_pre_norm else x
        hidden = self._split_heads(torch.relu(self.hidden(x[:, : len(mask)])))
        logits = hidden @ self.logits + self.bias  # (N, H, rows, ℓ)
        weights = torch.softmax(logits.masked_fill(~mask, -torch.inf), -1)
        weights = nn.functional.dropout(weights, self.dropout, self.training)
        return (weights @ self._split_heads(self.value(x))).transpose(1, 2).flatten(2)

    def _split_heads(self, x: Tensor) -> Tensor:
        """Return (N, H, T, d/H) for (N, T, d)."""
        return torch.unflatten(x, -1, (self.heads, -1)).transpose(1, 2)


def apply_layer(
    layer: TransformerLayer,
    x: Tensor,
    num_outputs: int,
    attention_context: AttentionContext | None,
    earlier_mask: Tensor | None = None,
) -> Tensor:
    """Return the output of a layer of either kind of attention (`deformer.apply_layer` has the same arguments)."""
    if not isinstance(layer, SynthesizerLayer):
        return deformer.apply_layer(layer, x, num_outputs, attention_context, earlier_mask)
    num_readings = x.shape[1] // 2
    mask = build_mask(num_outputs // num_readings, num_readings, attention_context, x.device, earlier_mask)
    return layer.apply_residual_branches(x[:, :num_outputs], layer.attend(x, mask))


def create_model(schema: Schema, config: ModelConfig, is_synthesizer: bool) -> DEformer:
    """Return a network with two tokens for each reading, and dot-product or Synthesizer attention.

    The network with Synthesizer attention is for complete records whose readings are in the order of the schema.

    Args:
        schema: The features.
        config: The hyperparameters.
        is_synthesizer: Whether the attention is that of the Synthesizer.
    """
    model = DEformer(schema, replace(config, tokens="pair"))
    if is_synthesizer:
        num_tokens = 2 * len(schema)
        model.blocks = nn.ModuleList(SynthesizerLayer(config, num_tokens) for _ in range(config.layers))
        model.apply_layer = apply_layer
    return model
