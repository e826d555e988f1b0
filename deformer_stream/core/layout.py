"""How compiled code sees a model: its weights as structures of C (`native/blocks.c` and what that includes)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from deformer_stream.core.gaussians import Gaussians
from deformer_stream.core.layers import Block, rounded
from deformer_stream.core.model import DEformer

COLUMNS = 32
"""Columns of weights that lie together."""
LANES = 8
"""Gaussians side by side."""


def fields(numbers: str, spec: str) -> Any:
    """Fields of a structure by their names: pointers but those in `numbers`."""
    return tuple((n, ctypes.c_int64 if n in numbers.split() else ctypes.c_void_p) for n in spec.split())


class _Layer(ctypes.Structure):
    _fields_ = fields("", "norm1 norm1_bias norm2 norm2_bias qkv_bias out_bias up_bias down_bias qkv out up down")


class _Map(ctypes.Structure):
    _fields_ = fields("inputs columns", "inputs columns weights bias")


class _Encoders(ctypes.Structure):
    _fields_ = fields("width maps", "width maps identity feature number cycle label row labels map guidance")


class _Gaussians(ctypes.Structure):
    _fields_ = fields(
        "components padded features",
        "components padded features log_weights means covariances page_of place_in place",
    )


class _Head(ctypes.Structure):
    _fields_ = fields(
        "mixtures guides labels", "mixtures guides labels norm norm_bias floor unseen count project adjust"
    )


class _Network(ctypes.Structure):
    _fields_ = fields(
        "d heads feedforward layers kept pre relu",
        "d heads feedforward layers kept pre relu layer encoders gaussians head",
    )


class Layout:
    """network: the structure that stands for the model. pair: factors of a product that lie together. rows: in which
    page of a record the guide's row of its k-th reading lies, and at which vector, (readings,) each."""

    def __init__(self, model: DEformer, pair: int, rows: Sequence[Any] = ()) -> None:
        self._pair, self._rounds = pair, model.config.precision == "bfloat16"
        self._held: list[Any] = []  # what the structures point to
        config = model.config
        layers = (_Layer * config.layers)(*(self._layer(cast(Block, block)) for block in model.blocks))
        parts = self._encoders(model), self._gaussians(model.gaussians, rows), self._head(model)
        self.network = _Network(
            *(config.d_model, config.heads, config.feedforward, config.layers, model.tokens_kept),
            *(config.norm == "pre", config.activation == "relu", self._at(layers)),
            *(part and self._at(part) for part in parts),
        )

    def _at(self, structure: Any) -> int:
        self._held.append(structure)
        return ctypes.addressof(structure)

    def _kept(self, t: Tensor, dtype: torch.dtype | None = torch.float32) -> int:
        self._held.append(t.detach().to(dtype).contiguous())
        return int(self._held[-1].data_ptr())

    def _layer(self, block: Block) -> _Layer:
        norms = [t for norm in (block.norm1, block.norm2) for t in (norm.weight, norm.bias)]
        maps = block.qkv, block.out, block.up, block.down
        return _Layer(*map(self._kept, (*norms, *(linear.bias for linear in maps))), *map(self._factors, maps))

    def _factors(self, linear: nn.Linear) -> int:
        """(columns / 32, inputs / pair, 32, pair)"""
        weight = rounded(linear.weight.detach()) if self._rounds else linear.weight.detach()
        n, k = weight.shape
        laid = weight.view(n // COLUMNS, COLUMNS, k // self._pair, self._pair).transpose(1, 2)
        return self._kept(laid, torch.bfloat16 if self._pair == 2 else torch.float32)

    def _map(self, weight: Tensor, bias: Tensor, inputs: int) -> _Map:
        """Of so many inputs, of which the last may be nothing. weight: (outputs, inputs); bias: (outputs,)."""
        outputs = up_to(len(weight), COLUMNS)
        laid = enlarged(weight, outputs, inputs).view(-1, COLUMNS, inputs).transpose(1, 2)
        return _Map(inputs, outputs, self._kept(laid), self._kept(enlarged(bias, outputs)))

    def _encoders(self, model: DEformer) -> _Encoders:
        """Tokens are scaled by √d; so is the last map that leads to them."""
        root, features = math.sqrt(model.config.d_model), torch.arange(len(model.schema))
        linears = cast(Sequence[nn.Linear], model.value_encoder.maps)
        pairs = [(linear.weight.detach(), linear.bias.detach()) for linear in linears]
        pairs[-1] = root * pairs[-1][0], root * pairs[-1][1]
        width = up_to(len(pairs[0][1]), COLUMNS)
        tables = self._shares(model, *pairs[0], width)
        maps, inputs = [], width
        for weight, bias in pairs[1:]:
            maps.append(self._map(weight, bias, inputs))
            inputs = maps[-1].columns
        with torch.no_grad():
            identity, guidance = model.asking(features, None), None
            if model.guidance is not None:  # what it adds in any case is part of the identities
                identity = identity + root * model.guidance.bias
                told = root * model.guidance.weight, torch.zeros_like(model.guidance.bias)
                guidance = self._at(self._map(*told, model.guidance.in_features))
        counts = (self._kept(t, torch.int64) for t in (model.label_offsets, model.label_counts))
        given = *map(self._kept, (identity, *tables)), *counts
        return _Encoders(width, len(maps), *given, self._at((_Map * len(maps))(*maps)), guidance)

    def _shares(self, model: DEformer, weight: Tensor, bias: Tensor, width: int) -> list[Tensor]:
        """What features, numbers and labels add to the first hidden layer of u, with the angles of cycles."""
        known = model.identity().detach().double()
        ends = [known.shape[1], 1, 2 if model.cycles is not None else 0, model.label_width]
        own, number, turned, label = torch.split(enlarged(weight, width).double(), ends, 1)
        rows = torch.zeros(1, 0) if model.label_embedding is None else model.label_embedding.weight.detach()
        cycles = torch.zeros(len(known), 2) if model.cycles is None else model.cycles
        shares = known @ own.T + enlarged(bias, width)
        return [shares, torch.cat([number, enlarged(turned, width, 2)], 1).T, cycles, rows.double() @ label.T]

    def _gaussians(self, gaussians: Gaussians | None, rows: Sequence[Any]) -> _Gaussians | None:
        """The first variant with its components last, beside some that weigh nothing."""
        if gaussians is None:
            return None
        C = up_to(gaussians.components, LANES)
        parts = gaussians.log_weights[0], gaussians.means[0].T, gaussians.covariances[0].permute(1, 2, 0)
        given = [
            self._kept(nn.functional.pad(t.double(), (0, C - gaussians.components), value=fill), torch.float64)
            for t, fill in zip(parts, (-math.inf, 0.0, 1.0), strict=True)
        ]
        places = [self._kept(torch.as_tensor(t), torch.int64) for t in (*rows, gaussians.places)]
        return _Gaussians(gaussians.components, C, gaussians.means.shape[-1], *given, *places)

    def _head(self, model: DEformer) -> _Head:
        head, d = model.head, model.config.d_model
        norm = (model.norm.weight, model.norm.bias) if isinstance(model.norm, nn.LayerNorm) else ()
        unseen = torch.stack([torch.log1p(-head.unseen), torch.log(head.unseen)], 1)
        adjust, guides = None, 0
        if head.adjust is not None:
            adjust = self._at(self._map(head.adjust.weight, head.adjust.bias, d))
            guides = head.adjust.out_features // 3
        return _Head(
            *(head.mixtures, guides, head.labels, *(map(self._kept, norm) if norm else (None, None))),
            *(self._kept(head.floor), self._kept(unseen), self._kept(head.counts, torch.int64)),
            *(self._at(self._map(head.project.weight, head.project.bias, d)), adjust),
        )


def up_to(n: int, of: int) -> int:
    return -(-n // of) * of


def enlarged(t: Tensor, rows: int, columns: int | None = None) -> Tensor:
    """With zeros, to so many rows, and columns of a matrix."""
    wider = () if t.dim() == 1 else (0, 0 if columns is None else columns - t.shape[1])
    return nn.functional.pad(t.detach(), (*wider, 0, rows - len(t)))
