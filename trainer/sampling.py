"""Training samples: rows of the matrix in a fresh random order each, readings as far as they were observed.

Everything random here comes from the generator passed in, so that a run can be continued exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deformer_stream.model.schema import Schema
from trainer.data import PreparedTable


@dataclass(frozen=True, slots=True)
class Noise:
    """What is added to readings, in normalised units.

    steps: (F,) width of a quantum; a gridded reading stands for all values that round to it, so it is spread evenly
    over its quantum (dequantisation: the density can then not grow without bound on repeated values). smoothing:
    standard deviation of Gaussian noise on continuous readings. forget: chance that a label is shown to the others as
    unseen, so that the network knows what to make of labels it never met.
    """

    steps: Tensor
    discrete: Tensor
    label_counts: Tensor
    smoothing: float = 0.0
    forget: float = 0.0

    @staticmethod
    def from_schema(schema: Schema, smoothing: float = 0.0, forget: float = 0.0) -> Noise:
        steps = [0.0 if f.quantum is None or f.kind == "discrete" else f.quantum / f.scale for f in schema.features]
        return Noise(
            torch.tensor(steps, dtype=torch.float32),
            torch.tensor(schema.is_discrete),
            torch.tensor(schema.label_counts, dtype=torch.float32),
            smoothing,
            forget,
        )

    def apply(self, values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """values: (B, F) → noisy values (B, F), and (B, F) bool, whether a label was hidden."""
        spread = (torch.rand(values.shape, generator=generator) - 0.5) * self.steps
        if self.smoothing:
            normal = torch.randn(values.shape, generator=generator)
            spread = spread + self.smoothing * normal.masked_fill(self.discrete, 0.0)
        hidden = torch.zeros(values.shape, dtype=torch.bool)
        if self.forget:
            hidden = self.discrete & (torch.rand(values.shape, generator=generator) < self.forget) & ~values.isnan()
        return torch.where(hidden, self.label_counts.expand_as(values), values + spread), hidden


@dataclass(frozen=True, slots=True)
class Samples:
    """What one training step looks at. values, keys: (B, F) noisy readings, NaN where missing, and what puts them in
    order. hidden: (B, F) bool, whether a label is shown to the others as unseen and not scored."""

    values: Tensor
    keys: Tensor
    hidden: Tensor

    def __getitem__(self, part: slice) -> Samples:
        return Samples(self.values[part], self.keys[part], self.hidden[part])


def draw_samples(
    data: PreparedTable, rows: NDArray[np.int64], noise: Noise, arrival_share: float, generator: torch.Generator
) -> Samples:
    """Rows of the matrix with noise, each in a fresh random order; a share of them as logged, where the table knows,
    with ties held in any order of each."""
    values, ranks = read_rows(data, rows)
    values, hidden = noise.apply(values, generator)
    keys = draw_random_keys(values.shape, generator)
    if ranks is not None:
        logged = torch.rand((len(values), 1), generator=generator) < arrival_share
        keys = torch.where(logged, ranks + keys if data.ties == "hold" else ranks, keys)
    return Samples(values, keys, hidden)


def order_readings(values: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Put the readings of each record in ascending order of their keys, missing ones left out.

    values, keys: (B, F), NaN where missing → features (B, L) int64 codes with −1 padding at the end, and order (B, L),
    the column each place came from (any column at padding); L is the largest number of readings.
    """
    present = ~values.isnan()
    order = torch.argsort(keys.masked_fill(~present, torch.inf), dim=1)
    length = max(1, int(present.sum(1).max()))
    order = order[:, :length]
    return torch.where(present.gather(1, order), order, -1), order


def gather_values(values: Tensor, order: Tensor) -> Tensor:
    """Values (B, F) in the order (B, L) of `arrange`, 0 at padding."""
    return values.gather(1, order).nan_to_num(0.0)


def move_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device; to a GPU by way of pinned memory, so that nobody waits for the copy."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def draw_random_keys(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Keys that give every order the same chance."""
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def read_rows(data: PreparedTable, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor | None]:
    """(B, F) values and (B, F) ranks of arrival, if the table has them, of some rows of the matrix on disk."""
    values = torch.from_numpy(np.ascontiguousarray(data.values[rows]))
    if data.arrival_ranks is None:
        return values, None
    return values, torch.from_numpy(data.arrival_ranks[rows].astype(np.float64))


def create_generator(*seeds: int) -> torch.Generator:
    """A generator that depends on all of the numbers and nothing else."""
    state = np.random.SeedSequence(seeds).generate_state(2, np.uint32)
    return torch.Generator().manual_seed(int(state[0]) << 31 ^ int(state[1]))
