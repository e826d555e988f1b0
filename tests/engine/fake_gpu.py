"""Tests of GPU code on a machine without a GPU.

Fake tensors of PyTorch have a shape, a type and a device, but no contents, so they need no GPU. An operation on tensors
of two devices fails as it would on a GPU. Reading the contents of a fake tensor fails, too; on a GPU that would block
until the device has finished.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deformer_stream.kernels.cuda_graphs import ForwardPass

Module = TypeVar("Module", bound=nn.Module)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")


def capture_on_cpu(work: ForwardPass) -> ForwardPass:
    """Return a function that behaves on the CPU like a captured CUDA graph: each call writes into the same tensor."""
    out = work().clone()

    def replay() -> Tensor:
        return out.copy_(work())

    return replay


@contextmanager
def fake_gpu() -> Iterator[FakeTensorMode]:
    """Make new tensors fake; autocast and pinned memory behave as if the machine had a GPU.

    Before version 2.13, PyTorch asks NVIDIA's driver even for a fake tensor. There the test is skipped.
    """
    if torch.__version__ < TorchVersion("2.13"):
        pytest.skip("fake tensors on a GPU need PyTorch 2.13")
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        patch("torch.cuda.is_available", lambda: True),
        patch("torch.cuda.is_bf16_supported", lambda: True),
        patch.object(Tensor, "pin_memory", lambda self: self),
    ):
        yield mode


def move_to_fake_gpu(module: Module, mode: FakeTensorMode) -> Module:
    """Replace the parameters and buffers of a module by fake tensors on a GPU, and return the module."""
    module._apply(lambda t: mode.from_tensor(t).to("cuda"))
    return module


class CapturableOnly(TorchDispatchMode):
    """Fails for operations that cannot be captured in a CUDA graph.

    Such operations create, read or copy tensors on the CPU, or belong to libraries that do not support capture. Fake
    tensors fail for operations whose result or shape depends on contents.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and check the devices of its arguments and results."""
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
        assert all(t.device.type == "cuda" for t in tensors), f"{func} uses a tensor on the CPU"
        assert "linalg" not in str(func), f"{func} belongs to a library that does not support capture"
        return out
