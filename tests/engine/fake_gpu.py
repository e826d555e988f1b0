"""GPUs for tests: recorders that work on a CPU, and tensors of a GPU that is not there.

Fake tensors (of PyTorch itself) have shapes, types and a device, but no contents, so nothing has to be there: an
operator that is given tensors of two devices is refused as it would be, and so is a look at what a tensor holds.
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deformer_stream.kernels.cuda_graphs import Work

Module = TypeVar("Module", bound=nn.Module)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")


def on_cpu(work: Work) -> Work:
    """As a recorded graph does it: what is answered is always in the same memory."""
    out = work().clone()

    def again() -> Tensor:
        return out.copy_(work())

    return again


@contextmanager
def fake() -> Iterator[FakeTensorMode]:
    """Where tensors are fake, and autocast and pinned memory are what they are where a GPU is."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        patch("torch.cuda.is_available", lambda: True),
        patch("torch.cuda.is_bf16_supported", lambda: True),
        patch.object(Tensor, "pin_memory", lambda self: self),
    ):
        yield mode


def on_gpu(module: Module, mode: FakeTensorMode) -> Module:
    """The module on a GPU that is not there."""
    module._apply(lambda t: mode.from_tensor(t).to("cuda"))
    return module


class Recordable(TorchDispatchMode):
    """Refuses operators that a CUDA graph cannot be recorded of: those that make, read or copy tensors on the CPU, and
    those of libraries that do not promise it. Fake tensors refuse those whose result or its shape depends on what they
    hold."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
        assert all(t.device.type == "cuda" for t in tensors), f"{func} has to do with the CPU"
        assert "linalg" not in str(func), f"{func} is of a library that does not promise to be recordable"
        return out
