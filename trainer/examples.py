"""The examples from which the training loop learns: complete records, or blocks of long records with their contexts.

The loop (`trainer.fit`) draws a batch of examples, adds up gradients of parts of the batch, and evaluates validation
examples. What an example is depends on the table:

- Of a table whose features report once in a record, an example is a record, with its readings in some order.
- Of a table of irregular readings, an example is a block of a record with its context (`model.bounded_context`). Time
  and memory of a training step are then bounded, whatever the length of the records.

The objective of irregular readings is the mean of −ln p(reading | its context) over all readings of all training
records. Each block is an example with the same probability. The sum over the readings of a batch is divided by the
number of blocks times the mean number of readings of a block. So the gradients are unbiased.

A share of the examples are not in their real order, so that the model learns to condition on any readings (as
explanations and imputation do). The recent readings of the context and those of the block are then in random order. A
random number of them, at most as many as the context had, is the context of the others. Such an example has the weight
of its block. If all examples are in random order (`arrival_share` 0), the model is for imputation, where most of the
readings around a target are known. The number of context readings is then uniform from 0 to `MAX_CONTEXT_SHARE` of the
readings.

The loss of a batch of B blocks is

    − Σ_b w_b Σ_t ln p(x_t | the readings of block b before t in its order)  /  (B m)

where m is the mean number of scored readings of a training block. Block b has n readings, r recent readings before it,
and the last readings of sensors before these, which always come first:

    real order     t runs over the n readings of the block,                                  w_b = 1
    random order   t runs over the last r + n − c of the r + n readings in random order,     w_b = n / (r + n − c)

c is uniform, 0 ≤ c ≤ r if `arrival_share` is above 0, and 0 ≤ c < 0.9 (r + n) if it is 0. So both orders have the
weight n. Readings of context features have no term. Neither have hidden labels (`forget`), but they are counted in
m, so labels weigh less by the share that is hidden.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deformer_stream.model.bounded_context import ContextLimit
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.gaussian_prior import PriorConditional
from deformer_stream.model.gaussian_process import GaussianProcessPrior
from deformer_stream.model.process_conditionals import apply_process
from deformer_stream.ragged import ragged_indices
from trainer.array_files import create_array_file
from trainer.data import PreparedTable, Split
from trainer.evaluate import evaluate_held_out
from trainer.gaussian_prior import CrossFittedPriors
from trainer.irregular_table import IrregularTable, iterate_record_chunks
from trainer.sampling import (
    Noise,
    OrderedSamples,
    create_generator,
    draw_samples,
    move_to_device,
)

VALIDATION_ORDERS = 4
"""Number of orders of the readings in which a validation record is scored."""

MAX_CONTEXT_SHARE = 0.9
"""Largest share of the readings of an example that are its context if all examples are in random order.

An example has the weight of its block, so each of its targets has at most ten times the usual weight.
"""

Ints = NDArray[np.int64]


class Examples(Protocol):
    """The training and validation examples of a table.

    Attributes:
        train_indexes: Indexes of the training examples.
        validation_indexes: Indexes of the validation examples.
        nats_factor: The loss times this factor is the mean −ln p, in nats, of what `evaluate` describes.
        num_orders: Number of passes of the network over each example in `evaluate`.
        draws_ahead: Whether `draw` takes so long that a thread should draw the next batch during a step on the CPU.
    """

    train_indexes: Ints
    validation_indexes: Ints
    nats_factor: float
    num_orders: int

    @property
    def draws_ahead(self) -> bool: ...

    def draw(self, indexes: Ints, generator: torch.Generator) -> Any:
        """Return a batch of training examples on the CPU.

        Args:
            indexes: (B,) indexes of the examples.
            generator: The source of all random numbers.
        """

    def compute_loss(self, model: DEformer, batch: Any, part: slice, is_low_precision: bool) -> Tensor:
        """Return the share of a part of a batch in the loss, a scalar. The sum over all parts is the loss.

        Args:
            model: The model in training mode.
            batch: The result of `draw`.
            part: The examples of the batch that belong to the part.
            is_low_precision: Whether the matrix products of the layers are computed in bfloat16.
        """

    def evaluate(
        self, model: DEformer, indexes: Ints, seed: int, batch_size: int, is_low_precision: bool = False
    ) -> float:
        """Return the mean −ln p of examples, in nats. Orders and noise depend on the seed and the indexes alone.

        Args:
            model: The model. It is in evaluation mode during this call only.
            indexes: Indexes of the examples.
            seed: Seed of orders and noise.
            batch_size: Number of examples that are scored together.
            is_low_precision: Whether the matrix products of the layers are computed in bfloat16.
        """


class RecordExamples:
    """Complete records of a table whose features report once in a record. The indexes are row numbers of the table.

    Args:
        data: The prepared table.
        smoothing: Standard deviation of Gaussian noise on measurements, in normalised units.
        forget: Probability that a label is replaced by the code of an unseen label.
        arrival_share: Share of the records in their logged order, if the table has one.
        priors: The Gaussian prior with the variants that are used in training, None if the model has no prior.
    """

    def __init__(
        self,
        data: PreparedTable,
        smoothing: float,
        forget: float,
        arrival_share: float,
        priors: CrossFittedPriors | None = None,
    ) -> None:
        self.data, self.arrival_share, self.priors = data, arrival_share, priors
        self.train_indexes = data.select_rows(Split.TRAIN)
        self.validation_indexes = data.select_rows(Split.VALIDATION)
        self.noise = Noise.from_schema(data.schema, smoothing, forget)
        self.num_scored_features = int((~data.schema.is_context).sum())
        self.nats_factor = float(self.num_scored_features)
        self.num_orders = VALIDATION_ORDERS
        self.draws_ahead = False

    def draw(self, indexes: Ints, generator: torch.Generator) -> tuple[OrderedSamples, Ints]:
        """Return records with noise, their readings in some order, and their row numbers (see `Examples`)."""
        samples = draw_samples(self.data, indexes, self.noise, self.arrival_share, generator)
        return samples.sort_readings(), indexes

    def compute_loss(
        self, model: DEformer, batch: tuple[OrderedSamples, Ints], part: slice, is_low_precision: bool
    ) -> Tensor:
        """Return the share of a part in the mean of −ln p / number of scored features (see `Examples`)."""
        device = model.device
        samples, rows = batch[0][part], batch[1][part]
        features, values, is_hidden = (
            move_to_device(tensor, device) for tensor in (samples.features, samples.values, samples.is_hidden)
        )
        conditionals = None if self.priors is None else self.priors.compute_conditionals(features, values, rows)
        with torch.autocast(device.type, torch.bfloat16, enabled=is_low_precision):
            log_p = model.log_prob(features, values, conditionals)
        # A hidden label was replaced by the code of an unseen label, which the network should not learn to predict.
        log_p = log_p.masked_fill(is_hidden, 0.0)
        return -log_p.sum() / len(batch[1]) / self.num_scored_features

    def evaluate(
        self, model: DEformer, indexes: Ints, seed: int, batch_size: int, is_low_precision: bool = False
    ) -> float:
        """Return the mean −ln p of records, in nats.

        As in training, the share `arrival_share` of the orders is the logged order of arrival.
        """
        with torch.autocast(model.device.type, torch.bfloat16, enabled=is_low_precision):
            held_out = evaluate_held_out(
                model, self.data, indexes, self.num_orders, seed, self.arrival_share, batch_size
            )
        return held_out.mean_nll


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of all records of a table of irregular readings, with the contexts that precede them.

    Attributes:
        limit: The size of blocks and contexts.
        records: (K,) record of each of the K blocks, ascending.
        starts: (K,) index of the first reading of each block among all readings of the table.
        lengths: (K,) number of readings of each block.
        num_recent: (K,) number of readings directly before the block that belong to its context.
        context_offsets: (K + 1,) index of the first entry of each block in `context_readings`.
        context_readings: The indexes of those context readings that are not directly before the block: the last
            readings of sensors that have not reported since. They are ascending for each block.
    """

    limit: ContextLimit
    records: Ints
    starts: Ints
    lengths: Ints
    num_recent: Ints
    context_offsets: Ints
    context_readings: Ints

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.records)

    @staticmethod
    def divide(table: IrregularTable, limit: ContextLimit, folder: Path) -> Blocks:
        """Divide the records of a table into blocks, and find the contexts of all blocks.

        Args:
            table: The table.
            limit: The size of blocks and contexts.
            folder: An existing folder, in which the file of the context readings is created.

        Raises:
            Unavailable: The disk has no space.
        """
        blocks_per_record = -(-table.num_readings // limit.block)
        records, block_index = ragged_indices(blocks_per_record)
        first_of_record = table.offsets[records]
        starts = first_of_record + block_index * limit.block
        lengths = np.minimum(limit.block, table.offsets[records + 1] - starts)
        num_recent = np.minimum(limit.recent, starts - first_of_record)
        first_block = np.concatenate([[0], np.cumsum(blocks_per_record)])
        num_context = np.zeros(len(records), np.int64)
        for chunk in iterate_record_chunks(table.offsets):
            block, _ = _find_last_of_sensors(table, limit, chunk, first_block)
            num_context += np.bincount(block, minlength=len(records))
        context_offsets = np.concatenate([[0], np.cumsum(num_context)])
        context_readings = create_array_file(folder / "contexts.npy", np.int64, (int(context_offsets[-1]),))
        for chunk in iterate_record_chunks(table.offsets):
            block, reading = _find_last_of_sensors(table, limit, chunk, first_block)
            order = np.lexsort((reading, block))
            # The blocks of the records of a chunk are adjacent, so their entries are adjacent, too.
            entries = slice(*context_offsets[first_block[[chunk.start, chunk.stop]]].tolist())
            context_readings[entries] = reading[order]
        context_readings.flush()
        return Blocks(limit, records, starts, lengths, num_recent, context_offsets, context_readings)


def _find_last_of_sensors(
    table: IrregularTable, limit: ContextLimit, records: slice, first_block: Ints
) -> tuple[Ints, Ints]:
    """Return the last readings of sensors before each block that are not among the recent readings of the block.

    A reading is the last one of its sensor before all blocks that begin after it, and not after the next reading of the
    sensor.

    Args:
        table: The table.
        limit: The size of blocks and contexts.
        records: The records whose blocks are considered.
        first_block: (N + 1,) index of the first block of each record.

    Returns:
        (block, reading): the index of a block, and that of a reading of its context; in any order.
    """
    chunk = slice(int(table.offsets[records.start]), int(table.offsets[records.stop]))
    num_readings = np.diff(table.offsets[records.start : records.stop + 1])
    record, position = ragged_indices(num_readings)
    codes = np.asarray(table.codes[chunk])
    order = np.lexsort((position, codes, record))
    next_position = num_readings[record]  # the end of the record, if the sensor does not report again
    has_next = (record[order[1:]] == record[order[:-1]]) & (codes[order[1:]] == codes[order[:-1]])
    next_position[order[:-1][has_next]] = position[order[1:][has_next]]
    # Block b begins at the position b · limit.block. Before that, a recent reading is one of the last `limit.recent`.
    first = (position + limit.recent) // limit.block + 1
    last = np.minimum(next_position, num_readings[record] - 1) // limit.block
    index, place = ragged_indices(np.maximum(last - first + 1, 0))
    return first_block[records.start + record[index]] + first[index] + place, chunk.start + index


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """A batch of B blocks with their contexts. L is the number of readings of the longest one.

    Attributes:
        features: (B, L) feature codes in the order in which the readings are predicted, −1 for padding at the end.
        values: (B, L) normalised values or label codes with noise.
        ages: (B, L) float64 seconds from the origin of the record.
        weights: (B, L) weight of each reading in the loss: 0 for readings of the context and for padding.
        readings: (B, L) index of each reading in the table.
        prior: The distributions of the readings under the Gaussian process; None to let the network compute them.
    """

    features: Tensor
    values: Tensor
    ages: Tensor
    weights: Tensor
    readings: Ints
    prior: PriorConditional | None = None

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.features)

    def __getitem__(self, part: slice) -> BlockBatch:
        """Return the blocks of a slice of the batch."""
        return BlockBatch(
            self.features[part],
            self.values[part],
            self.ages[part],
            self.weights[part],
            self.readings[part],
            None if self.prior is None else self.prior[part],
        )


class BlockExamples:
    """Blocks of the records of a table of irregular readings, with their contexts. The indexes are those of the blocks.

    Args:
        table: The table.
        blocks: The blocks of its records.
        smoothing: Standard deviation of Gaussian noise on measurements, in normalised units.
        forget: Probability that a label is replaced by the code of an unseen label.
        arrival_share: Share of the blocks in their real order. The others are in random order.
    """

    def __init__(
        self,
        table: IrregularTable,
        blocks: Blocks,
        smoothing: float = 0.0,
        forget: float = 0.0,
        arrival_share: float = 1.0,
    ) -> None:
        self.table, self.blocks, self.arrival_share = table, blocks, arrival_share
        self.process: GaussianProcessPrior | None = None
        self.train_indexes = self.select(Split.TRAIN)
        self.validation_indexes = self.select(Split.VALIDATION)
        self.noise = Noise.from_schema(table.schema, smoothing, forget)
        self.quantum_noise = Noise.from_schema(table.schema)
        self.nats_factor = 1.0
        self.num_orders = 1
        self.mean_block_readings = self._count_scored_readings() / max(len(self.train_indexes), 1)

    def with_process(self, process: GaussianProcessPrior) -> BlockExamples:
        """Return the same examples, of which `draw` computes the distributions under a Gaussian process, too.

        Args:
            process: The process of the network that is trained, on the CPU. It must not change any more.
        """
        examples = copy.copy(self)
        examples.process = process
        return examples

    @property
    def draws_ahead(self) -> bool:
        """Whether to draw the next batch during a step: the process takes about as long as the network."""
        return self.process is not None

    def select(self, part: Split) -> Ints:
        """Return the indexes of the blocks of the records in one part of the split, ascending."""
        return np.flatnonzero(self.table.split[self.blocks.records] == part)

    def _count_scored_readings(self) -> int:
        """Return the number of readings of training records whose feature is scored."""
        num_scored = 0
        is_context = self.table.schema.is_context
        for records in iterate_record_chunks(self.table.offsets):
            chunk = slice(int(self.table.offsets[records.start]), int(self.table.offsets[records.stop]))
            is_training = np.repeat(self.table.split[records] == Split.TRAIN, self.table.num_readings[records])
            num_scored += int((is_training & ~is_context[self.table.codes[chunk]]).sum())
        return max(num_scored, 1)

    def draw(self, indexes: Ints, generator: torch.Generator) -> BlockBatch:
        """Return blocks with their contexts, some of them in random order, with noise (see `Examples`)."""
        batch = self.gather(indexes, generator, self.noise, self.arrival_share)
        if self.process is None:
            return batch
        with torch.no_grad():
            prior = apply_process(self.process, batch.features, batch.values, batch.ages)
        return replace(batch, prior=prior)

    def gather(
        self, indexes: Ints, generator: torch.Generator, noise: Noise | None = None, arrival_share: float = 1.0
    ) -> BlockBatch:
        """Return blocks with their contexts.

        Args:
            indexes: (B,) indexes of the blocks.
            generator: The source of all random numbers.
            noise: The noise on the values. None for the noise of held-out figures, which is only that of the sensors'
                resolutions.
            arrival_share: Probability that a block is in its real order.
        """
        blocks, num_blocks = self.blocks, len(indexes)
        num_older = np.diff(blocks.context_offsets)[indexes]
        num_recent, lengths = blocks.num_recent[indexes], blocks.lengths[indexes]
        num_span = num_recent + lengths  # the readings that may be in random order
        row, place = ragged_indices(num_older + num_span)
        older, recent = num_older[row], num_recent[row]
        is_older = place < older
        reading = blocks.starts[indexes][row] - recent + place - older
        reading[is_older] = blocks.context_readings[blocks.context_offsets[indexes][row[is_older]] + place[is_older]]
        # One random number for each example decides its order, one the number of context readings.
        is_arrival = torch.rand(num_blocks, generator=generator).numpy() < arrival_share
        drawn = torch.rand(num_blocks, generator=generator, dtype=torch.float64).numpy()
        keys = torch.rand(len(row), generator=generator, dtype=torch.float64).numpy()
        max_context = MAX_CONTEXT_SHARE * num_span if arrival_share == 0.0 else num_recent + 1
        num_context = np.where(is_arrival, num_recent, (drawn * max_context).astype(np.int64))
        # Older readings stay first: their keys are their places, which are smaller than those of the other readings.
        keys = np.where(is_older | is_arrival[row], place, older + keys)
        order = np.lexsort((keys, row))
        reading = reading[order]
        is_target = place >= (num_older + num_context)[row]
        # An example has the weight of its block, also if it has more targets than the block.
        weight = is_target * (lengths / np.maximum(num_span - num_context, 1))[row]
        shape = num_blocks, int((num_older + num_span).max(initial=1))
        codes = np.full(shape, -1, np.int64)
        values, weights = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        ages, readings = np.zeros(shape), np.full(shape, -1, np.int64)
        codes[row, place], values[row, place] = self.table.codes[reading], self.table.values[reading]
        ages[row, place], readings[row, place] = self.table.ages[reading], reading
        weights[row, place] = weight
        features, noisy = torch.from_numpy(codes), torch.from_numpy(values)
        noise_of_readings = (self.quantum_noise if noise is None else noise).select(features.clamp(min=0))
        noisy, is_hidden = noise_of_readings.apply(noisy, generator)
        # A hidden label was replaced by the code of an unseen label, which the network should not learn to predict.
        masked_weights = torch.from_numpy(weights).masked_fill(is_hidden, 0.0)
        return BlockBatch(features, noisy, torch.from_numpy(ages), masked_weights, readings)

    def gather_stored(self, indexes: Ints) -> BlockBatch:
        """Return blocks in their real order with their contexts and the stored values, which have no noise.

        Args:
            indexes: (B,) indexes of the blocks.
        """
        batch = self.gather(indexes, torch.Generator().manual_seed(0))  # the noise that it draws is not used
        stored = np.where(batch.readings >= 0, self.table.values[np.maximum(batch.readings, 0)], 0.0)
        return replace(batch, values=torch.from_numpy(stored))

    def compute_loss(self, model: DEformer, batch: BlockBatch, part: slice, is_low_precision: bool) -> Tensor:
        """Return the share of a part in the mean −ln p of a reading given its context (see `Examples`)."""
        blocks = batch[part]
        device = model.device
        features, values, ages, weights = (
            move_to_device(tensor, device) for tensor in (blocks.features, blocks.values, blocks.ages, blocks.weights)
        )
        with torch.autocast(device.type, torch.bfloat16, enabled=is_low_precision):
            log_p = model.log_prob(features, values, blocks.prior, ages)
        return -(log_p * weights).sum() / (len(batch) * self.mean_block_readings)

    def evaluate(
        self, model: DEformer, indexes: Ints, seed: int, batch_size: int, is_low_precision: bool = False
    ) -> float:
        """Return the mean −ln p of the readings of blocks in their real order, given their contexts, in nats."""
        nll_sum, num_readings = 0.0, 0
        with torch.autocast(model.device.type, torch.bfloat16, enabled=is_low_precision):
            for batch, log_p in self.iterate_log_p(model, indexes, seed, batch_size):
                is_scored = self.find_scored(batch)
                nll_sum -= float(log_p[is_scored].sum())
                num_readings += int(is_scored.sum())
        return nll_sum / max(num_readings, 1)

    def find_scored(self, batch: BlockBatch) -> NDArray[np.bool_]:
        """Return which readings of a batch, (B, L), are predicted and belong to features that are scored."""
        codes = batch.features.numpy()
        is_scored: NDArray[np.bool_] = (batch.weights.numpy() > 0) & ~self.table.schema.is_context[codes]
        return is_scored

    def iterate_log_p(self, model: DEformer, indexes: Ints, seed: int, batch_size: int) -> Any:
        """Yield batches of blocks in their real order, each with ln p of its readings, (B, L) float64.

        Readings get uniform noise of the width of their sensor's resolution, as in training. The noise of a batch
        depends on the seed and the indexes alone.

        Args:
            model: The model. It is in evaluation mode meanwhile.
            indexes: Indexes of the blocks.
            seed: Seed of the noise.
            batch_size: Number of blocks that are scored together.
        """
        was_training = model.training
        model.eval()
        device = model.device
        try:
            for start in range(0, len(indexes), batch_size):
                batch = self.gather(indexes[start : start + batch_size], create_generator(seed, 0xB10C, start))
                with torch.inference_mode():
                    log_p = model.log_prob(
                        move_to_device(batch.features, device),
                        move_to_device(batch.values, device),
                        ages=move_to_device(batch.ages, device),
                    )
                yield batch, log_p.double().cpu().numpy()
        finally:
            model.train(was_training)
