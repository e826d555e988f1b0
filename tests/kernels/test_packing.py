"""Weights are packed as PyTorch would convert them."""

from __future__ import annotations

import numpy as np
import torch

from deformer_stream.kernels.packing import round_to_bfloat16, widen_bfloat16


def test_bfloat16_is_rounded_as_pytorch_does() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint32)
    ties = (rng.integers(0, 2**16, 1000, dtype=np.uint32) << 16) | np.uint32(0x8000)  # between two bfloat16 numbers
    array = np.concatenate([bits, ties]).view(np.float32)
    array = array[np.isfinite(array)]
    expected = torch.from_numpy(array).to(torch.bfloat16)
    np.testing.assert_array_equal(round_to_bfloat16(array), expected.view(torch.int16).numpy().view(np.uint16))
    np.testing.assert_array_equal(widen_bfloat16(round_to_bfloat16(array)), expected.float().numpy())
