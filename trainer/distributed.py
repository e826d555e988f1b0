"""Train one model with several processes (ranks) that `torchrun` starts.

Each process computes the gradients of a part of each batch, and the gradients are summed. All processes draw the same
random numbers and have the same weights. Hence W processes take the same steps as one process with a batch W times as
large, apart from rounding errors of the sums. The first process makes all decisions that depend on time, and only the
first process writes files.
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
"""Longest time that a process waits for the others, for example while the first one writes a checkpoint."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The group of processes that train one model together, and the index of this process in it.

    Attributes:
        rank: Index of this process, from 0.
        world_size: Number of processes. 1 if this process trains alone.
    """

    rank: int = 0
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the first process, which writes all files."""
        return self.rank == 0

    def choose_device(self, device: torch.device) -> torch.device:
        """Return the device that this process must use.

        If several processes train on GPUs, each of them gets a GPU of its own, which is also made the current one.

        Args:
            device: The device that the user has chosen. A device that is not a GPU is returned unchanged.
        """
        if device.type == "cuda" and self.world_size > 1:
            gpu_index = int(os.environ.get("LOCAL_RANK", "0"))  # torchrun sets the process's index on this machine
            device = torch.device("cuda", gpu_index)
            torch.cuda.set_device(device)
        return device

    def select_slices(self, num_records: int, num_slices: int) -> list[slice]:
        """Return the slices of a batch of which this process computes the gradients, one after the other.

        The batch is divided into slices of nearly equal length, and each process gets `num_slices` consecutive ones.
        More slices need less memory at once.

        Args:
            num_records: Number of records in the batch of all processes.
            num_slices: Number of slices for each process.

        Returns:
            Slices of the indexes of the batch's records, without empty slices.
        """
        num_total = self.world_size * num_slices
        # Slice k of the batch contains the records bounds[k] to bounds[k + 1] - 1.
        bounds = [num_records * k // num_total for k in range(num_total + 1)]
        own_slices = range(self.rank * num_slices, (self.rank + 1) * num_slices)
        return [slice(bounds[k], bounds[k + 1]) for k in own_slices if bounds[k] < bounds[k + 1]]

    def broadcast(self, value: float) -> float:
        """Send the first process's value to all processes and return it. Each process must call this method."""
        if self.world_size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(shared, 0)
        return float(shared)

    def read_clock(self) -> float:
        """Return the monotonic clock of the first process in seconds. Each process must call this method.

        A common clock lets all processes make the same decisions under a time limit.
        """
        return self.broadcast(time.monotonic())

    def is_any(self, value: bool) -> bool:
        """Return whether `value` is True in at least one process. Each process must call this method."""
        if self.world_size == 1:
            return value
        flag = torch.tensor([int(value)])
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def sum_in_place(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the processes. Each process must call this method.

        The tensors are concatenated and exchanged at once, because many small exchanges would be slow.

        Args:
            tensors: Tensors on one device, with the same shapes in all processes.
        """
        if self.world_size == 1:
            return
        concatenated = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(concatenated)  # the default operation is the sum
        flat_sums = torch.split(concatenated, [tensor.numel() for tensor in tensors])
        sums = [flat_sum.view_as(tensor) for flat_sum, tensor in zip(flat_sums, tensors, strict=True)]
        torch._foreach_copy_(list(tensors), sums)  # copies each sum to its tensor in one call


@contextmanager
def join_process_group() -> Iterator[Ranks]:
    """Connect to the other processes that `torchrun` started, and disconnect when the context closes.

    If the process was not started by `torchrun`, nothing is connected and the result is a group of one process.

    Raises:
        ConfigError: The processes cannot connect to each other.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Ranks()
        return
    # Tensors on the CPU are exchanged by Gloo, tensors on a GPU by NCCL.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the processes that torchrun started cannot connect to each other ({error}); "
            "check the options of torchrun, such as --nnodes and --rdzv-endpoint"
        ) from None
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
