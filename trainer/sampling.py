"""Draw training samples: records in a fresh random order each, with noise on their values.

All random numbers come from a generator that the caller passes, so that an interrupted run continues exactly.
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
    """The noise that is added to readings, in normalised units.

    A sensor with a limited resolution reports the same value for all true values that round to it. Uniform noise of one
    step is therefore added to such readings (dequantisation). Without it, the density of repeated values could grow
    without bound.

    Attributes:
        quantum_widths: (F,) width of one step of each feature's resolution, 0 if it has none.
        is_discrete: (F,) whether the feature is a label.
        label_counts: (F,) number of labels, which is also the code of an unseen label.
        smoothing: Standard deviation of Gaussian noise on measurements.
        forget: Probability that a label is replaced by the code of an unseen label, so that the network learns what an
            unseen label means for the other features.
    """

    quantum_widths: Tensor
    is_discrete: Tensor
    label_counts: Tensor
    smoothing: float = 0.0
    forget: float = 0.0

    @staticmethod
    def from_schema(schema: Schema, smoothing: float = 0.0, forget: float = 0.0) -> Noise:
        """Return the noise that suits the features of a schema."""
        widths = [0.0 if f.quantum is None or f.kind == "discrete" else f.quantum / f.scale for f in schema.features]
        return Noise(
            torch.tensor(widths, dtype=torch.float32),
            torch.tensor(schema.is_discrete),
            torch.tensor(schema.label_counts, dtype=torch.float32),
            smoothing,
            forget,
        )

    def apply(self, values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Add noise to the values of B records.

        Args:
            values: (B, F) normalised values or label codes, NaN if missing.
            generator: The source of random numbers.

        Returns:
            (B, F) noisy values; and (B, F) bool, whether a label was replaced by the code of an unseen label.
        """
        offsets = (torch.rand(values.shape, generator=generator) - 0.5) * self.quantum_widths
        if self.smoothing:
            gaussian = torch.randn(values.shape, generator=generator)
            offsets = offsets + self.smoothing * gaussian.masked_fill(self.is_discrete, 0.0)
        is_hidden = torch.zeros(values.shape, dtype=torch.bool)
        if self.forget:
            is_chosen = torch.rand(values.shape, generator=generator) < self.forget
            is_hidden = self.is_discrete & is_chosen & ~values.isnan()
        return torch.where(is_hidden, self.label_counts.expand_as(values), values + offsets), is_hidden


@dataclass(frozen=True, slots=True)
class Samples:
    """B training records with noise and an order.

    Attributes:
        values: (B, F) noisy values, NaN if missing.
        keys: (B, F) sort keys: readings are put into ascending order of their keys.
        is_hidden: (B, F) bool, whether a label was replaced by the code of an unseen label. Such a label is not scored.
    """

    values: Tensor
    keys: Tensor
    is_hidden: Tensor

    def __getitem__(self, part: slice) -> Samples:
        """Return some of the records."""
        return Samples(self.values[part], self.keys[part], self.is_hidden[part])


def draw_samples(
    data: PreparedTable, rows: NDArray[np.int64], noise: Noise, arrival_share: float, generator: torch.Generator
) -> Samples:
    """Return records of the table with fresh noise, each in a fresh order.

    Args:
        data: The prepared table.
        rows: (B,) row numbers of the records.
        noise: The noise to add.
        arrival_share: Probability that a record gets its logged order of arrival, if the table has one, instead of a
            random order. Readings of one time get a random order if `data.ties` is "hold".
        generator: The source of random numbers.
    """
    values, arrival_ranks = read_rows(data, rows)
    values, is_hidden = noise.apply(values, generator)
    keys = draw_random_keys(values.shape, generator)
    if arrival_ranks is not None:
        uses_arrival_order = torch.rand((len(values), 1), generator=generator) < arrival_share
        arrival_keys = arrival_ranks + keys if data.ties == "hold" else arrival_ranks
        keys = torch.where(uses_arrival_order, arrival_keys, keys)
    return Samples(values, keys, is_hidden)


def order_readings(values: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the readings of each of B records by their keys and remove missing ones.

    Args:
        values: (B, F) values, NaN if missing.
        keys: (B, F) sort keys.

    Returns:
        (B, L) feature codes in ascending order of the keys, with −1 as padding at the end, where L is the largest
        number of readings of a record; and (B, L) the column of `values` from which each reading comes, arbitrary at
        padding.
    """
    is_present = ~values.isnan()
    columns = torch.argsort(keys.masked_fill(~is_present, torch.inf), dim=1)
    length = max(1, int(is_present.sum(1).max()))
    columns = columns[:, :length]
    return torch.where(is_present.gather(1, columns), columns, -1), columns


def gather_values(values: Tensor, columns: Tensor) -> Tensor:
    """Return values (B, F) in the order that `order_readings` returned as `columns` (B, L), 0 at padding."""
    return values.gather(1, columns).nan_to_num(0.0)


def move_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device. A copy to a GPU uses pinned memory, so that the program does not wait for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def draw_random_keys(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return random sort keys, with which every order of the readings has the same probability."""
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def read_rows(data: PreparedTable, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor | None]:
    """Read B rows of the matrix on disk.

    Returns:
        (B, F) values; and (B, F) arrival ranks as float64, None if the table has no order of arrival.
    """
    values = torch.from_numpy(np.ascontiguousarray(data.values[rows]))
    if data.arrival_ranks is None:
        return values, None
    return values, torch.from_numpy(data.arrival_ranks[rows].astype(np.float64))


def create_generator(*seeds: int) -> torch.Generator:
    """Return a random number generator whose state depends on the given numbers alone."""
    state = np.random.SeedSequence(seeds).generate_state(2, np.uint32)
    return torch.Generator().manual_seed(int(state[0]) << 31 ^ int(state[1]))
