"""The building blocks of the network: encoders that make tokens from readings, and Transformer layers.

A Transformer layer has one method for the computation before attention and one for that after it. The attention itself
is left to the callers, who compute it over complete records or over a KV cache.

Shapes use these letters: N is the number of records, and T the number of tokens of each record. d is the width of a
token (`d_model`), H the number of attention heads, and d_head = d / H the width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from deformer_stream.model.config import ModelConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": nn.functional.gelu, "relu": nn.functional.relu}
"""The activation functions of PyTorch, by the name that the hyperparameter `activation` uses.

`constants.ACTIVATION_CODES` has the numbers by which the compiled kernels select the same functions.
"""


def get_activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the activation function that a value of the hyperparameter `activation` names.

    Args:
        name: The name, such as "gelu".

    Raises:
        ValueError: The name is unknown; the message lists the known ones.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"the activation {name!r} is unknown: use one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class Encoder(nn.Module):
    """A multilayer perceptron with ReLU that makes the tokens of the Transformer from vectors that describe readings.

    It is one of the functions g_z and g_u of the paper (arXiv 2106.06989). g_z makes query tokens, whose outputs
    predict values, and g_u makes observation tokens, which hold values. The output, of width d, is multiplied by √d, as
    token embeddings are in the original Transformer. The factor is applied to the weights of the last linear map,
    because there are fewer weights than output numbers.

    Args:
        num_inputs: The width of the input.
        hidden: The widths of the hidden layers.
        num_outputs: The width d of the output.
    """

    def __init__(self, num_inputs: int, hidden: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.output_scale = math.sqrt(num_outputs)
        widths = (num_inputs, *hidden, num_outputs)
        self.maps = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        """Return one token for each input vector.

        Args:
            x: (*S, num_inputs), input vectors in a batch of any shape S.

        Returns:
            (*S, num_outputs), the tokens.
        """
        *hidden_maps, last_map = cast(list[nn.Linear], list(self.maps))
        for linear in hidden_maps:
            x = nn.functional.relu(linear(x))
        # The tokens are multiplied by `output_scale`, which is √d for tokens of width d. It is cheaper to scale the
        # weights than the tokens.
        return nn.functional.linear(x, self.output_scale * last_map.weight, self.output_scale * last_map.bias)


class TransformerLayer(nn.Module):
    """One Transformer layer without the attention itself, which the caller computes between two method calls.

    Some callers compute attention over complete records, others over a KV cache. They all use a layer as follows:

        queries, keys, values = layer.project_qkv(x)
        attended = attention(queries, keys, values)
        x = layer.apply_residual_branches(x, attended)

    Args:
        config: The hyperparameters of the network.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d = config.d_model
        self.is_pre_norm = config.norm == "pre"
        self.is_bfloat16 = config.precision == "bfloat16"
        self.heads, self.dropout = config.heads, config.dropout
        self.query_scale = 1.0 / math.sqrt(d // config.heads)
        self.activation = get_activation(config.activation)
        # Attention has `norm1`, the input projection `qkv` and the output projection `out`. The feed-forward network
        # has `norm2` and the linear maps `up` and `down`. These names are part of the keys in model.safetensors.
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, config.feedforward), nn.Linear(config.feedforward, d)

    def project_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of tokens.

        Args:
            x: (N, T, d), for each of N records T tokens of width d.

        Returns:
            Queries, keys and values, (N, H, T, d_head) each, for H attention heads of width d_head = d / H. The queries
            are already divided by √d_head, so that their scalar products with the keys are the attention logits.
        """
        attention_input = self.norm1(x) if self.is_pre_norm else x
        qkv = self._apply_linear(self.qkv, attention_input)  # (N, T, 3d)
        qkv = torch.unflatten(qkv, -1, (3, self.heads, -1)).transpose(1, 3)  # (N, H, 3, T, d_head)
        q, k, v = qkv.unbind(2)
        return self._round_factor(q * self.query_scale), self._round_factor(k), self._round_factor(v)

    def apply_residual_branches(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the output of the layer, given the output of its attention.

        First the output projection of attention is added to the tokens, then the output of the feed-forward network.
        Layer normalisation is applied to the input of each of these two branches (hyperparameter `norm` "pre") or after
        each addition ("post").

        Args:
            x: (N, T, d), for each of N records the T tokens of width d that entered the layer.
            attended: (N, T, d), the weighted sums of values from attention, with the heads concatenated.

        Returns:
            (N, T, d), the tokens after both additions.
        """
        attention_output = self._apply_linear(self.out, attended)
        x = x + nn.functional.dropout(attention_output, self.dropout, self.training)
        x = x if self.is_pre_norm else self.norm1(x)  # with "pre", project_qkv has applied norm1
        feedforward_input = self.norm2(x) if self.is_pre_norm else x
        hidden = self.activation(self._apply_linear(self.up, feedforward_input))
        hidden = nn.functional.dropout(hidden, self.dropout, self.training)
        feedforward_output = self._apply_linear(self.down, hidden)
        x = x + nn.functional.dropout(feedforward_output, self.dropout, self.training)
        return x if self.is_pre_norm else self.norm2(x)

    def _apply_linear(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """Apply a linear map. If the precision of the model is bfloat16, round the input and the weights first.

        The bias is not rounded.
        """
        if self.is_bfloat16 and not self.training and x.is_cuda and x.dtype == torch.float32:
            return multiply_bfloat16(x, linear.weight) + linear.bias
        return nn.functional.linear(self._round_factor(x), self._round_factor(linear.weight), linear.bias)

    def _round_factor(self, factor: Tensor) -> Tensor:
        """Round a factor of a matrix product to bfloat16 if the precision of the model is bfloat16; keep the dtype.

        Training does not round, because the gradient of the rounding is zero almost everywhere.
        """
        return round_to_bfloat16(factor) if self.is_bfloat16 and not self.training else factor


def multiply_bfloat16(x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ in float32 for factors that are rounded to bfloat16, computed by the matrix units of a GPU.

    The products of rounded factors are exact in float32, and their sums are float32 numbers, as those of the same
    factors in float32 are. The matrix units are some ten times as fast with factors in bfloat16.

    Args:
        x: (*S, num_inputs) float32 on a GPU.
        weight: (num_outputs, num_inputs) float32 on the same GPU.

    Returns:
        (*S, num_outputs) float32.
    """
    rows = x.to(torch.bfloat16).flatten(0, -2)
    product = torch.mm(rows, weight.to(torch.bfloat16).t(), out_dtype=torch.float32)
    return torch.unflatten(product, 0, x.shape[:-1])


def round_to_bfloat16(x: Tensor) -> Tensor:
    """Return the numbers of a tensor rounded to the nearest bfloat16, in the dtype of the tensor."""
    return x.to(torch.bfloat16).to(x.dtype)
