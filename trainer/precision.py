"""How training computes on the processor at hand."""

from __future__ import annotations

import torch

from deformer_stream import native
from deformer_stream.core.model import DEformer
from deformer_stream.core.training import Layers, fits
from trainer.options import Precision


def low_precision(wanted: Precision, device: torch.device) -> bool:
    """Whether to multiply in bfloat16: as wanted, otherwise where it is native; elsewhere it is slower than float32."""
    if wanted != "auto" or device.type == "cuda":
        return wanted != "float32"
    known = torch.cpu.get_capabilities()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def fast_layers(model: DEformer) -> Layers | None:
    """Compiled code in place of the layers, in low precision, where it is made for them; where the processor multiplies
    tiles (AMX), PyTorch's products use them and the compiled code does not."""
    if not fits(model) or torch.cpu.get_capabilities().get("amx_bf16"):
        return None
    return Layers.of(model, native.library(rounded=True))
