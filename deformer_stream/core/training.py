"""The layers in training by compiled code: whole records forward and back, a few at a time, in the processor's cache.

What it computes, gradients included, is what `DEformer.conditionals` computes with its own layers; those stay the
reference, and do the work where this code is not made for the model (`fits`) or there is no compiler. Where its library
rounds, factors of products are rounded to bfloat16 as under autocast, and the rest is float32.

A norm's weights are part of those of the map that follows: W (w · n + b) + c = (W w) n + (W b + c), and the queries'
scale likewise. All of that is done by tensors' own arithmetic, gradients as well; the compiled code only standardises.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from deformer_stream.core import compiled
from deformer_stream.core.attention import LONGEST
from deformer_stream.core.compiled import pointer
from deformer_stream.core.layers import Block
from deformer_stream.core.layout import COLUMNS, fields
from deformer_stream.core.model import DEformer

UNIT_TOKENS = 240
"""Tokens, about, that go through all layers together."""
SPARE = 12
"""Rows after the last one that may be read, in vain."""
MAPS = ("qkv", "out", "up", "down")


class _Network(ctypes.Structure):
    _fields_ = fields(
        "d heads feedforward layers relu",
        "d heads feedforward layers relu qkv out up down qkv_back out_back up_back down_back "
        "qkv_bias out_bias up_bias down_bias",
    )


class _Work(ctypes.Structure):
    _fields_ = fields(
        "back records identities values unit rows shares",
        "network back records identities values unit rows x hidden n1 qkv paired attended n2 up slope own scale1 "
        "scale2 by_qkv by_out by_up by_down by_bias shares next",
    )


def fits(model: DEformer) -> bool:
    """Whether the compiled code is made for training such a model."""
    c, longest = model.config, len(model.schema)
    return compiled.fits(model) and c.norm == "pre" and c.memory == "values" and not c.dropout and longest <= LONGEST


class Layers:
    """The layers of a model, whose weights they read at each call. What the way back needs is kept until the next
    call, in memory that is used again: fresh memory costs more than what is done with it."""

    def __init__(self, model: DEformer, library: ctypes.CDLL) -> None:
        self.model, self.library = model, library
        number, address = ctypes.c_int64, ctypes.c_void_p
        library.pair.restype = number
        library.pack_weights.restype, library.pack_weights.argtypes = None, (address, *[number] * 3, *[address] * 2)
        self.pair = int(library.pair())
        self.dtype = torch.bfloat16 if self.pair == 2 else torch.float32
        self.kept: dict[str, Tensor] = {}
        self.calls = 0
        self.now: tuple[_Network, dict[str, int], dict[str, Tensor]]

    @staticmethod
    def of(model: DEformer, library: ctypes.CDLL | None) -> Layers | None:
        """None without a library, or where it does not multiply in bfloat16: the layers' own way is as fast then."""
        layers = None if library is None else Layers(model, library)
        return layers if layers is not None and layers.pair == 2 else None

    def __call__(self, z: Tensor, u: Tensor) -> Tensor:
        """(N, L, d) tokens of identities and of values → (N, L, d) what comes out at identities."""
        return cast(Tensor, _Pass.apply(self, torch.cat([z, u[:, :-1]], 1), *self._maps()))  # nobody sees the last u

    def _maps(self) -> list[Tensor]:
        """Weights (layers, outputs, inputs) of qkv, out, up, down, then their biases (layers, outputs)."""
        blocks = [cast(Block, block) for block in self.model.blocks]

        def stacked(name: str) -> Tensor:
            return torch.stack([block.get_parameter(name) for block in blocks])

        maps, biases = ([stacked(f"{name}.{kind}") for name in MAPS] for kind in ("weight", "bias"))
        for i, norm in ((0, "norm1"), (2, "norm2")):
            biases[i] = biases[i] + torch.einsum("lnk,lk->ln", maps[i], stacked(f"{norm}.bias"))
            maps[i] = maps[i] * stacked(f"{norm}.weight").unsqueeze(1)
        return maps + biases

    def _room(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory that is kept from call to call, (*shape)."""
        size = torch.Size(shape).numel()
        if name not in self.kept or len(self.kept[name]) < size:
            self.kept[name] = torch.empty(size, dtype=dtype or self.dtype)
        return self.kept[name][:size].view(shape)

    def _network(self, maps: Sequence[Tensor]) -> tuple[_Network, Any]:
        """What compiled code is told of the weights, which are packed; and what that points to."""
        c, held = self.model.config, dict[str, Tensor]()
        for name, weights, bias in zip(MAPS, maps[:4], maps[4:], strict=True):
            given = weights.to(self.dtype).contiguous()
            on, back = (self._room(f"{name}{way}", *given.shape) for way in ("_on", "_back"))
            self.library.pack_weights(pointer(given), *given.shape, pointer(on), pointer(back))
            held |= {name: on, f"{name}_back": back, f"{name}_bias": bias.contiguous()}
        pointers = {name: pointer(t) for name, t in held.items()}
        numbers = c.d_model, c.heads, c.feedforward, c.layers, c.activation == "relu"
        return _Network(*numbers, **pointers), held

    def _work(self, records: int, tokens: int) -> tuple[dict[str, int], dict[str, Tensor]]:
        """What compiled code is told of a batch: numbers, and the memory for what is kept."""
        c, N, T, L = self.model.config, records, tokens, (tokens + 1) // 2
        d, rows, unit = c.d_model, N * T + SPARE, max(1, round(UNIT_TOKENS / T))
        widths = {"n1": d, "qkv": 3 * d, "attended": d, "n2": d, "up": c.feedforward, "slope": c.feedforward}
        held = {name: self._room(name, c.layers, rows, width) for name, width in widths.items()}
        columns = COLUMNS * max(1, -(-(L - 1) // COLUMNS))
        held["paired"] = self._room("paired", c.layers, N, c.heads, columns, T + 1)
        exact = {"scale1": (c.layers, rows), "scale2": (c.layers, rows), "own": (c.layers, N, c.heads, L)}
        held |= {name: self._room(name, *shape, dtype=torch.float32) for name, shape in exact.items()}
        shares = min(torch.get_num_threads(), -(-N // unit))
        numbers = {"records": N, "identities": L, "values": L - 1, "unit": unit, "rows": rows, "shares": shares}
        return numbers, held

    def _run(self, back: bool, given: dict[str, Tensor]) -> None:
        network, numbers, held = self.now
        pointers = {name: pointer(t) for name, t in (held | given).items()}
        work = partial(_Work, ctypes.addressof(network), back, **numbers, **pointers)
        compiled.run(self.library, "train_layers", lambda counter: work(next=counter), numbers["shares"])

    def forward(self, x: Tensor, maps: Sequence[Tensor]) -> Tensor:
        """x: (N, T, d) tokens, z before u; overwritten."""
        N, T, d = x.shape
        network, self.packed = self._network(maps)
        self.now = network, *self._work(N, T)
        self.calls += 1
        hidden = torch.empty(N, (T + 1) // 2, d)
        self._run(False, {"x": x, "hidden": hidden})
        return hidden

    def backward(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """Of what `forward` gave last → of x and of the maps."""
        c, (_, numbers, _) = self.model.config, self.now
        N, _, d = gradient.shape
        x = torch.empty(N, numbers["identities"] + numbers["values"], d)
        shapes: dict[str, tuple[int, ...]] = {"qkv": (3 * d, d), "out": (d, d), "up": (c.feedforward, d)}
        shapes |= {"down": (d, c.feedforward), "bias": (5 * d + c.feedforward,)}
        by = {f"by_{name}": torch.zeros(numbers["shares"], c.layers, *shape) for name, shape in shapes.items()}
        self._run(True, {"x": x, "hidden": gradient.contiguous()} | by)
        *weights, bias = (t.sum(0) for t in by.values())
        return x, *weights, *torch.split(bias, [3 * d, d, c.feedforward, d], 1)


class _Pass(torch.autograd.Function):
    """Tokens (N, T, d), z before u, and `Layers._maps` → (N, L, d)."""

    @staticmethod
    def forward(ctx: Any, layers: Layers, x: Tensor, *maps: Tensor) -> Tensor:
        hidden = layers.forward(x.clone(), maps)
        ctx.layers, ctx.call = layers, layers.calls
        return hidden

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.call != ctx.layers.calls:
            raise RuntimeError("the layers were called again before their gradients were taken")
        return None, *ctx.layers.backward(gradient)
