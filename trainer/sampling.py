"""Draw training samples: records of the table with noise on their values, each with its readings in a random order.

All random numbers come from a generator that the caller passes. Therefore an interrupted training run that is continued
draws the same samples as one that was not interrupted.
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
    """The random changes of readings in training: noise on measurements, and hidden labels.

    A sensor with a limited resolution reports the same value for all true values that round to it. Uniform noise of the
    width of one step is therefore added to such readings (dequantisation). Without it, training could increase the
    density at repeated values without bound. All widths are in normalised units, and F is the number of features.

    Attributes:
        quantum_widths: (F,) width of one step of each sensor's resolution, 0 if the feature has none.
        is_discrete: (F,) bool, whether the feature is a label.
        label_counts: (F,) number of labels of each feature. It is also the code of a label that is not among them.
        smoothing: Standard deviation of additional Gaussian noise on measurements.
        forget: Probability that a label is hidden: replaced by the code of an unseen label. From such samples the
            network learns to predict other features when a label is unknown.
    """

    quantum_widths: Tensor
    is_discrete: Tensor
    label_counts: Tensor
    smoothing: float = 0.0
    forget: float = 0.0

    @staticmethod
    def from_schema(schema: Schema, smoothing: float = 0.0, forget: float = 0.0) -> Noise:
        """Return the noise for the features of a schema.

        Args:
            schema: The features with their resolutions and labels.
            smoothing: Standard deviation of additional Gaussian noise on measurements, in normalised units.
            forget: Probability that a label is replaced by the code of an unseen label.
        """
        # The resolution is in raw units; divided by the scale it is in normalised units.
        widths = [0.0 if f.quantum is None or f.kind == "discrete" else f.quantum / f.scale for f in schema.features]
        return Noise(
            torch.tensor(widths, dtype=torch.float32),
            torch.tensor(schema.is_discrete),
            torch.tensor(schema.label_counts, dtype=torch.float32),
            smoothing,
            forget,
        )

    def select(self, codes: Tensor) -> Noise:
        """Return the noise for readings of any shape S, whose feature codes are given, in place of all F features."""
        return Noise(
            self.quantum_widths[codes], self.is_discrete[codes], self.label_counts[codes], self.smoothing, self.forget
        )

    def apply(self, values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Add noise to the measurements of B records, and hide some of their labels.

        Args:
            values: (B, F) normalised values or label codes of F features, NaN if missing.
            generator: The source of random numbers.

        Returns:
            (values, is_hidden), both of shape (B, F). Missing values are still NaN. `is_hidden` is True if a label was
            replaced by the code of an unseen label.
        """
        # The resolution width of labels is 0, so their codes stay unchanged.
        offsets = (torch.rand(values.shape, generator=generator) - 0.5) * self.quantum_widths
        if self.smoothing:
            gaussian = torch.randn(values.shape, generator=generator)
            offsets = offsets + self.smoothing * gaussian.masked_fill(self.is_discrete, 0.0)
        is_hidden = torch.zeros(values.shape, dtype=torch.bool)
        if self.forget:
            is_chosen = torch.rand(values.shape, generator=generator) < self.forget
            is_hidden = self.is_discrete & is_chosen & ~values.isnan()
        unseen_codes = self.label_counts.expand_as(values)  # labels have the codes 0 to count − 1
        return torch.where(is_hidden, unseen_codes, values + offsets), is_hidden


@dataclass(frozen=True, slots=True)
class Samples:
    """B training records of F features with noise, and the order in which the readings of each are scored.

    Attributes:
        values: (B, F) normalised values or label codes with noise, NaN if missing.
        keys: (B, F) sort keys. The readings of a record are scored in ascending order of their keys.
        is_hidden: (B, F) bool, whether a label was replaced by the code of an unseen label. Such a label does not count
            in the loss.
    """

    values: Tensor
    keys: Tensor
    is_hidden: Tensor

    def sort_readings(self) -> OrderedSamples:
        """Put the readings of each record into the order in which they are scored, without missing ones."""
        features, columns = order_readings(self.values, self.keys)
        return OrderedSamples(features, gather_values(self.values, columns), self.is_hidden.gather(1, columns))


@dataclass(frozen=True, slots=True)
class OrderedSamples:
    """The readings of B training records in the order in which they are scored. The longest record has L readings.

    Attributes:
        features: (B, L) feature codes, −1 for padding at the end.
        values: (B, L) normalised values or label codes with noise, 0 at padding.
        is_hidden: (B, L) bool, whether a label was replaced by the code of an unseen label.
    """

    features: Tensor
    values: Tensor
    is_hidden: Tensor

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.features)

    def __getitem__(self, part: slice) -> OrderedSamples:
        """Return a slice of the B records, without columns that are padding in all of them."""
        features = self.features[part]
        num_readings = max(1, int((features >= 0).sum(1).max()))
        return OrderedSamples(
            features[:, :num_readings], self.values[part, :num_readings], self.is_hidden[part, :num_readings]
        )


def draw_samples(
    data: PreparedTable, rows: NDArray[np.int64], noise: Noise, arrival_share: float, generator: torch.Generator
) -> Samples:
    """Read B records of the table, add noise to their values, and draw an order of the readings for each.

    Args:
        data: The prepared table.
        rows: (B,) row numbers of the records in the table.
        noise: The noise to add.
        arrival_share: Probability (0 to 1) that a record gets its logged order of arrival, if the table has one,
            instead of a random order. If `data.ties` is "hold", readings with the same time get a random order among
            themselves.
        generator: The source of random numbers.

    Returns:
        The values with noise and, as the order, a sort key for each reading.
    """
    values, arrival_ranks = read_rows(data, rows)
    values, is_hidden = noise.apply(values, generator)
    random_keys = draw_random_keys(values.shape, generator)
    if arrival_ranks is None:
        return Samples(values, random_keys, is_hidden)
    uses_arrival_order = torch.rand((len(values), 1), generator=generator) < arrival_share  # (B, 1)
    # Random keys are less than 1 and ranks are integers, so the sum only changes the order of equal ranks.
    arrival_keys = arrival_ranks + random_keys if data.ties == "hold" else arrival_ranks
    keys = torch.where(uses_arrival_order, arrival_keys, random_keys)
    return Samples(values, keys, is_hidden)


def order_readings(values: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the readings of each record by their keys, and remove missing ones.

    Args:
        values: (B, F) values of B records and F features, NaN if missing.
        keys: (B, F) sort keys, ascending in the wanted order.

    Returns:
        (features, columns), both of shape (B, L), where L is the number of readings of the longest record. `features`
        are the feature codes (columns of `values`) in the wanted order, and −1 as padding at the end. `columns` are the
        same codes, and any valid code at padding, so that they can be used as an index (see `gather_values`).
    """
    is_present = ~values.isnan()
    columns = torch.argsort(keys.masked_fill(~is_present, torch.inf), dim=1)  # missing readings come last
    max_readings = max(1, int(is_present.sum(1).max()))  # L is at least 1, even if no record has a reading
    columns = columns[:, :max_readings]
    features = torch.where(is_present.gather(1, columns), columns, -1)
    return features, columns


def gather_values(values: Tensor, columns: Tensor) -> Tensor:
    """Put the values of B records into the order that `order_readings` has determined.

    Args:
        values: (B, F) values of F features, NaN if missing.
        columns: (B, L) second result of `order_readings`, where L is the number of readings of the longest record.

    Returns:
        (B, L) values, 0 at padding.
    """
    return values.gather(1, columns).nan_to_num(0.0)


def move_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device, and return the copy. A copy to a GPU does not block the program."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def draw_random_keys(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return uniform random sort keys in [0, 1) as float64. Sorting by them gives every order the same probability."""
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def read_rows(data: PreparedTable, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor | None]:
    """Read the values and the arrival ranks of B records from the matrices on disk.

    Args:
        data: The prepared table with F features.
        rows: (B,) row numbers of the records in the table.

    Returns:
        (values, arrival_ranks), both of shape (B, F). `values` are float32: normalised numbers or label codes, NaN if
        missing. `arrival_ranks` are float64: the position of each reading in its record's order of arrival, −1 if
        missing. They are None if the table has no order of arrival.
    """
    values = torch.from_numpy(np.ascontiguousarray(data.values[rows]))  # a plain array instead of a np.memmap
    if data.arrival_ranks is None:
        return values, None
    # Callers use the ranks as sort keys, which are float64 like random sort keys.
    return values, torch.from_numpy(data.arrival_ranks[rows].astype(np.float64))


def create_generator(*seeds: int) -> torch.Generator:
    """Return a random number generator whose state depends on the given numbers alone.

    Each use passes the user's seed and further numbers, such as that of the training step. Hence the random numbers of
    different uses are independent, and a run that is continued draws the same numbers.
    """
    high, low = np.random.SeedSequence(seeds).generate_state(2, np.uint32)
    return torch.Generator().manual_seed(int(high) << 31 ^ int(low))
