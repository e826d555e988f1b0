"""Processes that train one model together, as `torchrun` starts them: each takes a part of every step's records.

All draw the same random numbers and hold the same weights; gradients are added up, so that W processes take the step
that one process takes with W times the batch (up to the order of sums). Whatever depends on time or on a signal is
decided by one of them for all. Only the first writes.
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

PATIENCE = timedelta(minutes=30)
"""The first process may be so long at what the others wait for."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """rank: which of `size` processes this is."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def choose_device(self, wanted: torch.device) -> torch.device:
        """With GPUs each process takes the one of its place on the machine."""
        if wanted.type == "cuda" and self.world_size > 1:
            wanted = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(wanted)
        return wanted

    def select_slices(self, records: int, pieces: int) -> list[slice]:
        """The pieces of a step's records that are this process's, `pieces` of them, as even as can be."""
        total = self.world_size * pieces
        edges = [records * k // total for k in range(total + 1)]
        mine = range(self.rank * pieces, (self.rank + 1) * pieces)
        return [slice(edges[k], edges[k + 1]) for k in mine if edges[k] < edges[k + 1]]

    def broadcast(self, value: float) -> float:
        """The first process's value for all of them: a call is answered once all have made it."""
        if self.world_size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(shared, 0)
        return float(shared)

    def read_clock(self) -> float:
        """The first process's clock, seconds."""
        return self.broadcast(time.monotonic())

    def is_any(self, value: bool) -> bool:
        """Whether it is so for any of them."""
        if self.world_size == 1:
            return value
        flag = torch.tensor([int(value)])
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def sum_in_place(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the processes, in one exchange."""
        if self.world_size == 1:
            return
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        parts = torch.split(flat, [t.numel() for t in tensors])
        torch._foreach_copy_(list(tensors), [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])


@contextmanager
def join_process_group() -> Iterator[Ranks]:
    """The processes started by `torchrun`, or this one alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Ranks()
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, timeout=PATIENCE)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"torchrun: the processes do not find each other ({error}); check its options") from None
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
