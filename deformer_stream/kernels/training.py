"""The layers in training by compiled code: whole records forward and back, a few at a time, in the processor's cache.

What it computes, gradients included, is what `DEformer.conditionals` computes with its own layers; those stay the
reference, and do the work where this code is not made for the model (`fits`) or there is no compiler. Where its library
rounds, factors of products are rounded to bfloat16 as under autocast, and the rest is float32.

A layer's weights go in as they are, and their gradients come out, each in a tensor of its own; in between they are
packed as factors of products, those of a norm within those of the map that follows it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deformer_stream.kernels import cpu
from deformer_stream.kernels.cpu import COLUMNS, fields, pointer
from deformer_stream.model.attention import LONGEST
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.layers import TransformerLayer

UNIT_TOKENS = 120
"""Tokens, about, that go through all layers together; twice as many of half the size."""
SPARE = 12
"""Rows after the last one that may be read, in vain."""
MAPS = ("qkv", "out", "up", "down")
OWN = [f"{name}.{kind}" for name in ("norm1", "norm2", *MAPS) for kind in ("weight", "bias")]
"""A layer's weights, in the order in which compiled code knows them."""


class _Network(ctypes.Structure):
    _fields_ = fields(
        "d heads feedforward layers relu",
        "d heads feedforward layers relu own qkv out up down qkv_back out_back up_back down_back "
        "qkv_bias out_bias up_bias down_bias",
    )


class _Work(ctypes.Structure):
    _fields_ = fields(
        "back records identities values unit rows shares",
        "network back records identities values unit rows z u hidden n1 qkv paired attended n2 up slope own scale1 "
        "scale2 by_qkv by_out by_up by_down by_bias learned shares next",
    )


def fits(model: DEformer) -> bool:
    """Whether the compiled code is made for training such a model."""
    c, longest = model.config, len(model.schema)
    return cpu.fits(model) and c.norm == "pre" and c.memory == "values" and not c.dropout and longest <= LONGEST


class Layers:
    """The layers of a model, whose weights they read at each call. What the way back needs is kept until the next
    call, in memory that is used again: fresh memory costs more than what is done with it."""

    def __init__(self, model: DEformer, library: ctypes.CDLL) -> None:
        self.model, self.library = model, library
        self.own = [cast(TransformerLayer, block).get_parameter(name) for block in model.blocks for name in OWN]
        library.pair.restype = ctypes.c_int64
        self.pair = int(library.pair())
        self.dtype = torch.bfloat16 if self.pair == 2 else torch.float32
        self.kept: dict[str, Tensor] = {}
        self.calls = 0
        self.known: tuple[int, ...] = ()
        self.told: dict[str, Any] = {}

    def __call__(self, z: Tensor, u: Tensor) -> Tensor:
        """(N, L, d) tokens of identities and (N, L − 1, d) of values → (N, L, d) what comes out at identities."""
        return cast(Tensor, _Pass.apply(self, z, u, *self.own))

    def _room(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory that is kept from call to call, (*shape)."""
        size = torch.Size(shape).numel()
        if name not in self.kept or len(self.kept[name]) < size:
            self.kept[name] = torch.empty(size, dtype=dtype or self.dtype)
        return self.kept[name][:size].view(shape)

    def _shapes(self) -> dict[str, tuple[int, int]]:
        """Of maps: (outputs, inputs)."""
        d, wide = self.model.config.d_model, self.model.config.feedforward
        return {"qkv": (3 * d, d), "out": (d, d), "up": (wide, d), "down": (d, wide)}

    def _tell(self, records: int, readings: int) -> None:
        """What compiled code is told of the weights and of a batch, unless that is what it was told before."""
        known = records, readings, torch.get_num_threads(), *(p.data_ptr() for p in self.own)
        if known != self.known:
            self.network = self._network()
            self.known, self.told = known, {"network": ctypes.addressof(self.network)} | self._work(records, readings)

    def _network(self) -> _Network:
        """The weights, and the memory for what is made of them."""
        c = self.model.config
        self.addresses = _addresses(self.own)
        held: dict[str, Any] = {"own": self.addresses}
        for name, shape in self._shapes().items():
            held |= {name + way: self._room(name + way, c.layers, *shape) for way in ("", "_back")}
            held[f"{name}_bias"] = self._room(f"{name}_bias", c.layers, shape[0], dtype=torch.float32)
        pointers = {name: pointer(t) for name, t in held.items()}
        return _Network(c.d_model, c.heads, c.feedforward, c.layers, c.activation == "relu", **pointers)

    def _work(self, records: int, readings: int) -> dict[str, Any]:
        """A batch: numbers, and the memory for what is kept."""
        c, N, L, T = self.model.config, records, readings, 2 * readings - 1
        d, rows, unit = c.d_model, N * T + SPARE, max(1, round(UNIT_TOKENS * self.pair / T))
        shares = min(torch.get_num_threads(), -(-N // unit))
        widths = {"n1": d, "qkv": 3 * d, "attended": d, "n2": d, "up": c.feedforward, "slope": c.feedforward}
        held = {name: self._room(f"of {name}", c.layers, rows, width) for name, width in widths.items()}
        columns = COLUMNS * max(1, -(-(L - 1) // COLUMNS))
        held["paired"] = self._room("paired", c.layers, N, c.heads, columns, T + 1)
        exact: dict[str, tuple[int, ...]] = {"scale1": (c.layers, rows), "scale2": (c.layers, rows)}
        exact |= {"own": (c.layers, N, c.heads, L), "by_bias": (shares, c.layers, 5 * d + c.feedforward)}
        exact |= {f"by_{name}": (shares, c.layers, *shape) for name, shape in self._shapes().items()}
        held |= {name: self._room(name, *shape, dtype=torch.float32) for name, shape in exact.items()}
        numbers = {"records": N, "identities": L, "values": L - 1, "unit": unit, "rows": rows, "shares": shares}
        return numbers | {name: pointer(t) for name, t in held.items()}

    def _run(self, name: str, units: int, back: bool = False, **given: Any) -> None:
        work = partial(_Work, back=back, **self.told, **{name: pointer(t) for name, t in given.items()})
        cpu.run(self.library, name, lambda counter: work(next=counter), units)

    def forward(self, z: Tensor, u: Tensor) -> Tensor:
        self._tell(*z.shape[:2])
        self.calls += 1
        hidden = torch.empty(z.shape)
        self._run("fold_weights", self.model.config.layers * len(MAPS))
        self._run("train_layers", self.told["shares"], z=z.contiguous(), u=u.contiguous(), hidden=hidden)
        return hidden

    def backward(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """Of what `forward` gave last → of z, u and the layers' weights."""
        (N, L, d), z = gradient.shape, torch.empty(gradient.shape)
        u = torch.empty(N, L - 1, d)
        self._run("train_layers", self.told["shares"], back=True, z=z, u=u, hidden=gradient.contiguous())
        learned = [torch.empty_like(p) for p in self.own]
        self._run("unfold_gradients", self.model.config.layers * len(MAPS), learned=_addresses(learned))
        return z, u, *learned


class _Pass(torch.autograd.Function):
    """Tokens z (N, L, d) and u (N, L − 1, d), and the layers' weights → (N, L, d)."""

    @staticmethod
    def forward(ctx: Any, layers: Layers, z: Tensor, u: Tensor, *own: Tensor) -> Tensor:
        hidden = layers.forward(z, u)
        ctx.layers, ctx.call = layers, layers.calls
        return hidden

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.call != ctx.layers.calls:
            raise RuntimeError("the layers were called again before their gradients were taken")
        return None, *ctx.layers.backward(gradient)


def _addresses(tensors: Sequence[Tensor]) -> NDArray[np.int64]:
    return np.array([t.data_ptr() for t in tensors], np.int64)
