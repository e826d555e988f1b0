"""How training computes on the processor at hand."""

from __future__ import annotations

import torch

from deformer_stream.kernels import build
from deformer_stream.kernels.training import Layers, fits
from deformer_stream.model.deformer import DEformer
from trainer.settings import Precision


def low_precision(wanted: Precision, device: torch.device) -> bool:
    """Whether to multiply in bfloat16: as wanted, otherwise where that is quicker: in tiles (AMX) and some vectors."""
    if wanted != "auto" or device.type == "cuda":
        return wanted != "float32"
    return bool(torch.cpu.get_capabilities().get("amx_bf16")) or build.quick_pairs()


def fast_layers(model: DEformer, low: bool) -> Layers | None:
    """Compiled code in place of the layers, in low precision or not, where it is made for them. Where the processor
    multiplies tiles of bfloat16, PyTorch's products use them and the compiled code does not; without AVX-512 nobody has
    found it quicker."""
    known = torch.cpu.get_capabilities()
    if not fits(model) or not known.get("avx512_f") or (low and known.get("amx_bf16")):
        return None
    library = build.library(rounded=low)
    return None if library is None else Layers(model, library)
