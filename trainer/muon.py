"""Muon: momentum whose matrices are orthogonalised, for the layers; Adam for everything else.

K. Jordan and others, "Muon: an optimizer for hidden layers in neural networks" (2024), with the learning rate scaled
by the size of the matrix as in J. Liu and others, arXiv 2502.16982. A step moves a matrix equally far in all its
directions, so the few that dominate its gradient do not hold up the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, cast

import torch
from torch import Tensor

from deformer_stream.model.deformer import DEformer

MOMENTUM, BETAS, EPSILON = 0.95, (0.9, 0.95), 1e-8
FACTOR = 10.0
"""Rate of the matrices over that of Adam for the rest."""


class Muon(torch.optim.Optimizer):
    """One learning rate `lr` for all; the groups' weight_decay is decoupled, as in AdamW.

    Matrices of the Transformer's layers are orthogonalised, queries, keys and values each on their own. All state is in
    tensors, so that it can be saved as such.
    """

    def __init__(self, model: DEformer, lr: float, weight_decay: float) -> None:
        matrices = {name: p for name, p in model.blocks.named_parameters() if p.dim() == 2}
        inside = {id(p) for p in matrices.values()}
        others = [p for p in model.parameters() if id(p) not in inside]
        self._parts = [3 if name.endswith("qkv.weight") else 1 for name in matrices]
        groups: list[dict[str, Any]] = [
            {"params": list(matrices.values()), "weight_decay": weight_decay, "matrices": True},
            {"params": [p for p in others if p.dim() > 1], "weight_decay": weight_decay, "matrices": False},
            {"params": [p for p in others if p.dim() <= 1], "weight_decay": 0.0, "matrices": False},
        ]
        super().__init__([g for g in groups if g["params"]], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update from the gradients at hand."""
        for group in self.param_groups:
            if group["matrices"]:
                self._orthogonal(group)
            else:
                self._adam(group)

    def _orthogonal(self, group: dict[str, Any]) -> None:
        alike: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for p, parts in zip(group["params"], self._parts, strict=True):
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p)
            state["momentum"].lerp_(p.grad, 1 - MOMENTUM)
            ahead = p.grad.lerp(state["momentum"], MOMENTUM)  # Nesterov's
            p.mul_(1 - group["lr"] * group["weight_decay"])
            for target, update in zip(p.chunk(parts), ahead.chunk(parts), strict=True):
                alike[target.shape].append((target, update))
        for shape, pairs in alike.items():
            updates = orthogonalised(torch.stack([update for _, update in pairs]))
            rate = FACTOR * group["lr"] * 0.2 * math.sqrt(max(shape))
            for (target, _), update in zip(pairs, updates, strict=True):
                target.add_(update, alpha=-rate)

    def _adam(self, group: dict[str, Any]) -> None:
        weights = [p for p in group["params"] if p.grad is not None]
        if not weights:
            return
        for p in weights:
            if not self.state[p]:
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32)
                self.state[p]["mean"], self.state[p]["square"] = torch.zeros_like(p), torch.zeros_like(p)
        gradients = [cast(Tensor, p.grad) for p in weights]
        steps, means, squares = ([self.state[p][name] for p in weights] for name in ("step", "mean", "square"))
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(means, gradients, 1 - BETAS[0])
        torch._foreach_lerp_(squares, torch._foreach_mul(gradients, gradients), 1 - BETAS[1])
        times = [float(t) for t in steps]
        scales = torch._foreach_div(squares, [1 - BETAS[1] ** t for t in times])
        torch._foreach_sqrt_(scales)
        torch._foreach_add_(scales, EPSILON)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_addcdiv_(weights, means, scales, [-group["lr"] / (1 - BETAS[0] ** t) for t in times])


def orthogonalised(matrices: Tensor, steps: int = 5) -> Tensor:
    """(N, A, B) → as large, all singular values of each matrix between about 0.7 and 1.2, directions kept.

    Newton–Schulz iteration with a quintic whose slope at zero is steep rather than one that ends at exactly 1; in
    bfloat16 on a GPU, where it need not be exact.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16() if matrices.device.type == "cuda" else matrices
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    back: Tensor = x if wide else x.mT
    return back.to(matrices.dtype)
