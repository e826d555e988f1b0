"""What the network is made of: encoders of readings, and Transformer layers."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from deformer_stream.model.config import ModelConfig


class Encoder(nn.Module):
    """g(·) of the paper: linear maps with a ReLU between them. What comes out is √outputs times as large, the size in
    which tokens enter the layers; the last map's weights are scaled for that, which are fewer than tokens."""

    def __init__(self, inputs: int, hidden: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.size = math.sqrt(outputs)
        widths = (inputs, *hidden, outputs)
        self.maps = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        *hidden, last = cast(list[nn.Linear], list(self.maps))
        for linear in hidden:
            x = nn.functional.relu(linear(x))
        return nn.functional.linear(x, self.size * last.weight, self.size * last.bias)


class TransformerLayer(nn.Module):
    """One Transformer layer, split where attention needs its keys from outside."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d = config.d_model
        self.pre = config.norm == "pre"
        self.heads, self.dropout = config.heads, config.dropout
        self.scale = 1.0 / math.sqrt(d // config.heads)
        self.rounds = config.precision == "bfloat16"
        self.activation = nn.functional.gelu if config.activation == "gelu" else nn.functional.relu
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, config.feedforward), nn.Linear(config.feedforward, d)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: (N, T, d) → queries, divided by √d_head already, keys, values: (N, H, T, d_head)."""
        qkv = self._map(self.qkv, self.norm1(x) if self.pre else x)
        q, k, v = torch.unflatten(qkv, -1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        return self._factor(q * self.scale), self._factor(k), self._factor(v)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The residual branches after attention. x, attended: (N, T, d) → (N, T, d)."""
        x = x + nn.functional.dropout(self._map(self.out, attended), self.dropout, self.training)
        x = x if self.pre else self.norm1(x)
        hidden = self.activation(self._map(self.up, self.norm2(x) if self.pre else x))
        y = self._map(self.down, nn.functional.dropout(hidden, self.dropout, self.training))
        x = x + nn.functional.dropout(y, self.dropout, self.training)
        return x if self.pre else self.norm2(x)

    def _map(self, linear: nn.Linear, x: Tensor) -> Tensor:
        return nn.functional.linear(self._factor(x), self._factor(linear.weight), linear.bias)

    def _factor(self, t: Tensor) -> Tensor:
        """What goes into a product. Training sees it whole."""
        return rounded(t) if self.rounds and not self.training else t


def rounded(t: Tensor) -> Tensor:
    """To the nearest bfloat16, in its own dtype."""
    return t.to(torch.bfloat16).to(t.dtype)
