"""Keep the state of the process of a program that trains a model: its random numbers and its environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def preserve_global_state() -> Iterator[None]:
    """Restore PyTorch's global generators and the variables of its compiler when the block ends, also by an error.

    Training seeds the generators, from which PyTorch draws initial weights. The compiler sets environment variables.
    """
    environment = _get_compiler_variables()
    state, seed = torch.get_rng_state(), torch.initial_seed()
    # A GPU that is not in use yet has no state. It is seeded like the CPU when it comes into use.
    has_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # PyTorch gives no type
    gpu_states = torch.cuda.get_rng_state_all() if has_gpu else None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if gpu_states is not None:
            torch.cuda.set_rng_state_all(gpu_states)
        else:
            torch.cuda.manual_seed_all(seed)
        for name in _get_compiler_variables().keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


def _get_compiler_variables() -> dict[str, str]:
    """Return the environment variables of PyTorch's compiler."""
    return {name: value for name, value in os.environ.items() if name.startswith(("TORCHINDUCTOR_", "TRITON_"))}
