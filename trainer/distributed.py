"""Train one model with several processes that `torchrun` starts; each computes the gradients of a part of each batch.

All processes draw the same random numbers and hold the same weights, and gradients are summed. Hence W processes take
the same steps as one process with a batch W times as large, except for the order of sums. Decisions that depend on
time are made by the first process for all. Only the first process writes files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from deformer_stream.errors import ConfigError

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long processes wait for each other, for example while the first one validates or writes a checkpoint."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that train together.

    Attributes:
        rank: Index of this process.
        world_size: Number of processes.
    """

    rank: int = 0
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the first process, which writes all files."""
        return self.rank == 0

    def choose_device(self, device: torch.device) -> torch.device:
        """Return the device of this process: on a machine with several GPUs, each process uses its own."""
        if device.type == "cuda" and self.world_size > 1:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        return device

    def select_slices(self, num_records: int, num_slices: int) -> list[slice]:
        """Return this process's part of a batch, in slices of nearly equal length.

        Args:
            num_records: Number of records of the batch.
            num_slices: Number of slices of each process. Empty slices are left out.
        """
        total = self.world_size * num_slices
        bounds = [num_records * k // total for k in range(total + 1)]
        own = range(self.rank * num_slices, (self.rank + 1) * num_slices)
        return [slice(bounds[k], bounds[k + 1]) for k in own if bounds[k] < bounds[k + 1]]

    def broadcast(self, value: float) -> float:
        """Return the first process's value in all processes. Each process must call this method."""
        if self.world_size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(shared, 0)
        return float(shared)

    def read_clock(self) -> float:
        """Return the time of the first process's clock in seconds. Each process must call this method."""
        return self.broadcast(time.monotonic())

    def is_any(self, value: bool) -> bool:
        """Return whether the value is true in any process. Each process must call this method."""
        if self.world_size == 1:
            return value
        flag = torch.tensor([int(value)])
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def sum_in_place(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the processes. All tensors are exchanged at once."""
        if self.world_size == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        sums = [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
        torch._foreach_copy_(list(tensors), sums)


@contextmanager
def join_process_group() -> Iterator[Ranks]:
    """Join the processes that `torchrun` started, and leave them when the context closes.

    Without `torchrun` this process trains alone.

    Raises:
        ConfigError: The processes cannot connect to each other.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Ranks()
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"torchrun: the processes cannot connect to each other ({error}); check its options"
        ) from None
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
