"""Held-out likelihood of irregular readings, beside that of simple predictions (baselines).

All figures are means of −ln p over the same readings: those of random blocks of records that training has not used. As
in training, readings get uniform noise of the width of their sensor's resolution. The baselines are fitted to readings
of training records:

- "marginal": each reading has the distribution of its sensor's training readings.
- "last_value": the reading minus a linear function of the sensor's previous reading has a distribution that depends on
  the time since that reading. The first reading of a sensor has its marginal distribution.
- "process": the Gaussian process prior alone. Labels and cyclic values, which it does not contain, count as marginal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.model.deformer import DEformer
from deformer_stream.model.process_conditionals import apply_process
from deformer_stream.model.schema import Schema
from deformer_stream.model.time_inputs import find_previous_of_sensor
from trainer.evaluate import NUMBERS_OF_BINS, compute_log_density
from trainer.examples import BlockBatch, BlockExamples, Ints
from trainer.sampling import create_generator

Floats = NDArray[np.float64]

REFERENCE_BLOCKS = 2000
"""Number of random training blocks from whose readings the baselines are estimated."""

MAX_GAP_CLASSES = 6
"""Largest number of classes of the time since the previous reading, each with its own distribution."""

MIN_CLASS_READINGS = 100
"""A class of times has at least this many training readings."""


@dataclass(frozen=True, slots=True)
class IrregularLikelihood:
    """The likelihood of held-out irregular readings with F features.

    Densities are those of normalised values.

    Attributes:
        mean_nll: Mean −ln p of a reading given its context, in nats. Smaller is better.
        standard_error: Standard error of the mean, from the differences between blocks.
        nll_by_feature: (F,) the mean for each feature, NaN if the feature was never scored.
        baselines: By name of the baseline (see the docstring of the module) the mean −ln p of the same readings.
        num_readings: Number of readings.
        num_blocks: Number of blocks that contain them.
        num_records: Number of records that contain the blocks.
    """

    mean_nll: float
    standard_error: float
    nll_by_feature: Floats
    baselines: dict[str, float]
    num_readings: int
    num_blocks: int
    num_records: int

    def to_json(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Return the entry `held_out` of the training summary in the manifest.

        Args:
            names: The names of the F features.
        """
        finite = np.isfinite(self.nll_by_feature)
        return {
            "log_likelihood_per_reading": -self.mean_nll,
            "standard_error": self.standard_error,
            "baselines": {name: -nll for name, nll in self.baselines.items()},
            "features": {
                name: -float(nll)
                for name, nll, is_known in zip(names, self.nll_by_feature, finite, strict=True)
                if is_known
            },
            "readings": self.num_readings,
            "blocks": self.num_blocks,
            "records": self.num_records,
            "unit": "nats, normalised units",
        }


@dataclass(frozen=True, slots=True)
class Readings:
    """M readings that are predicted, with the previous reading of the same sensor.

    Attributes:
        codes: (M,) feature codes.
        values: (M,) normalised values with noise, or label codes.
        previous: (M,) stored value of the previous reading of the sensor, NaN if there is none.
        gaps: (M,) seconds since that reading, NaN if there is none.
    """

    codes: Ints
    values: Floats
    previous: Floats
    gaps: Floats

    @staticmethod
    def from_batch(examples: BlockExamples, batch: BlockBatch) -> Readings:
        """Return the scored readings of a batch of blocks in their real order.

        The context contains the last reading of each sensor, so the previous reading is that of the whole record.
        """
        row, place = np.nonzero(examples.find_scored(batch))
        previous_place = find_previous_of_sensor(batch.features).numpy()[row, place]
        has_previous = previous_place >= 0
        stored = examples.table.values[batch.readings[row, np.maximum(previous_place, 0)]].astype(np.float64)
        ages = batch.ages.numpy()
        gaps = ages[row, place] - ages[row, np.maximum(previous_place, 0)]
        return Readings(
            batch.features.numpy()[row, place],
            batch.values.numpy()[row, place].astype(np.float64),
            np.where(has_previous, stored, np.nan),
            np.where(has_previous, gaps, np.nan),
        )

    @staticmethod
    def concatenate(parts: list[Readings]) -> Readings:
        """Return the readings of several parts."""
        fields = ("codes", "values", "previous", "gaps")
        return Readings(*(np.concatenate([getattr(part, name) for part in parts]) for name in fields))

    def select(self, chosen: NDArray[Any]) -> Readings:
        """Return some of the readings."""
        return Readings(self.codes[chosen], self.values[chosen], self.previous[chosen], self.gaps[chosen])


def evaluate_blocks(
    model: DEformer,
    examples: BlockExamples,
    indexes: Ints,
    seed: int,
    batch_size: int,
    should_continue: Callable[[int], bool] = lambda num_done: True,
    references: Readings | None = None,
) -> IrregularLikelihood:
    """Compute the likelihood of the readings of blocks, and of the baselines for the same readings.

    Args:
        model: The trained model.
        examples: The blocks of the records.
        indexes: (K,) indexes of the blocks in random order, at least one.
        seed: Seed of the noise.
        batch_size: Number of blocks that are scored together.
        should_continue: Called before each batch but the first with the number of blocks that are done. If it returns
            False, the result covers only those blocks.
        references: The training readings to which the baselines are fitted. None to draw them (`draw_references`).
    """
    parts: list[Readings] = []
    log_p_parts: list[Floats] = []
    process_parts: list[Floats] = []
    block_parts: list[Ints] = []
    num_done = 0
    for batch, log_p, process_log_p in iterate_predictions(model, examples, indexes, seed, batch_size):
        is_scored = examples.find_scored(batch)
        parts.append(Readings.from_batch(examples, batch))
        log_p_parts.append(log_p[is_scored])
        process_parts.append(process_log_p[is_scored])
        block_parts.append(num_done + np.nonzero(is_scored)[0])
        num_done += len(batch)
        if not should_continue(num_done):
            break
    readings = Readings.concatenate(parts)
    nll, block = -np.concatenate(log_p_parts), np.concatenate(block_parts)
    references = draw_references(examples, seed) if references is None else references
    schema = examples.table.schema
    marginal, last_value = predict_baselines(schema, references, readings)
    process = np.concatenate(process_parts)
    baselines = {"marginal": -float(marginal.mean()), "last_value": -float(last_value.mean())}
    if model.process is not None:
        baselines["process"] = -float(np.where(np.isnan(process), marginal, process).mean())
    sums = np.bincount(readings.codes, nll, len(schema))
    counts = np.bincount(readings.codes, minlength=len(schema))
    excess = np.bincount(block, nll - nll.mean(), num_done)  # by block, because readings of a block are not independent
    return IrregularLikelihood(
        float(nll.mean()),
        float(np.sqrt((excess**2).sum()) / len(nll)),
        np.where(counts > 0, sums / np.maximum(counts, 1), np.nan),
        baselines,
        len(nll),
        num_done,
        len(np.unique(examples.blocks.records[indexes[:num_done]])),
    )


def iterate_predictions(
    model: DEformer, examples: BlockExamples, indexes: Ints, seed: int, batch_size: int
) -> Iterator[tuple[BlockBatch, Floats, Floats]]:
    """Yield batches of blocks in their real order, each with ln p of its readings under the model and its process.

    The arguments are those of `BlockExamples.iterate_log_p`. The arrays have the shape (B, L). Those of the process are
    NaN for readings that it does not contain.
    """
    for batch, log_p in examples.iterate_log_p(model, indexes, seed, batch_size):
        yield batch, log_p, _compute_process_log_p(model, batch)


def _compute_process_log_p(model: DEformer, batch: BlockBatch) -> Floats:
    """Return ln p of the readings of a batch, (B, L), under the Gaussian process alone; NaN if it lacks the feature."""
    if model.process is None:
        return np.full(batch.features.shape, np.nan)
    with torch.inference_mode():
        features, values, ages = (t.to(model.device) for t in (batch.features, batch.values, batch.ages))
        prior = apply_process(model.process, features, values, ages)
        z = (values.unsqueeze(-1) - prior.means) / prior.scales
        log_p = torch.logsumexp(
            prior.log_weights - prior.scales.log() - 0.5 * z.square() - 0.5 * np.log(2.0 * np.pi), -1
        )
        has_prior = model.process.is_linear[features]
    result: Floats = torch.where(has_prior, log_p.double(), torch.nan).cpu().numpy()
    return result


def draw_references(examples: BlockExamples, seed: int) -> Readings:
    """Return the readings of random training blocks, from which the baselines are estimated."""
    train, num_blocks = examples.train_indexes, min(REFERENCE_BLOCKS, len(examples.train_indexes))
    chosen = np.sort(np.random.default_rng([seed, 0x5EF]).choice(train, num_blocks, replace=False))
    parts = [
        Readings.from_batch(
            examples, examples.gather(chosen[start : start + 250], create_generator(seed, 0x5EF, start))
        )
        for start in range(0, len(chosen), 250)
    ]
    return Readings.concatenate(parts)


def predict_baselines(schema: Schema, references: Readings, readings: Readings) -> tuple[Floats, Floats]:
    """Return ln p of readings by the baselines "marginal" and "last_value", (M,) each.

    Args:
        schema: The features.
        references: The training readings to which the baselines are fitted.
        readings: The M readings.
    """
    marginal = predict_marginal(schema, references, readings)
    return marginal, predict_last_value(schema, references, readings, marginal)


def predict_marginal(schema: Schema, references: Readings, readings: Readings) -> Floats:
    """Return ln p of readings if each has the distribution of its sensor's training readings, (M,)."""
    log_p = np.zeros(len(readings.codes))
    for code in np.unique(readings.codes).tolist():
        is_of_feature, reference = readings.codes == code, references.values[references.codes == code]
        if schema.is_discrete[code]:
            num_labels = int(schema.label_counts[code]) + 1  # an unseen label is one more
            counts = np.bincount(reference.astype(np.int64), minlength=num_labels) + 0.5
            log_p[is_of_feature] = np.log(counts / counts.sum())[readings.values[is_of_feature].astype(np.int64)]
        else:
            log_p[is_of_feature] = _predict_number(reference, readings.values[is_of_feature])
    return log_p


def predict_last_value(schema: Schema, references: Readings, readings: Readings, marginal: Floats) -> Floats:
    """Return ln p of readings given the previous reading of the same sensor and the time since then, (M,).

    Args:
        schema: The features.
        references: Training readings.
        readings: The M readings.
        marginal: (M,) ln p of the readings under the marginal distribution.
    """
    log_p = marginal.copy()
    for code in np.unique(readings.codes).tolist():
        rows_of_feature = np.flatnonzero((readings.codes == code) & ~np.isnan(readings.previous))
        reference = references.select((references.codes == code) & ~np.isnan(references.previous))
        num_classes = int(np.clip(len(reference.codes) // MIN_CLASS_READINGS, 0, MAX_GAP_CLASSES))
        if not len(rows_of_feature) or not num_classes:
            continue
        edges = np.unique(np.quantile(reference.gaps, np.linspace(0.0, 1.0, num_classes + 1)[1:-1]))
        reference_class = np.searchsorted(edges, reference.gaps, side="right")
        class_by_row = np.searchsorted(edges, readings.gaps[rows_of_feature], side="right")
        for gap_class in np.unique(class_by_row).tolist():
            learnt = reference.select(reference_class == gap_class)
            chosen = rows_of_feature[class_by_row == gap_class]
            if len(learnt.codes) < MIN_CLASS_READINGS // 2:
                continue
            if schema.is_discrete[code]:
                log_p[chosen] = _predict_label(int(schema.label_counts[code]) + 1, learnt, readings.select(chosen))
            else:
                spread = learnt.previous.var()
                covariance = ((learnt.previous - learnt.previous.mean()) * learnt.values).mean()
                slope = covariance / spread if spread > 1e-6 else 0.0
                residuals = learnt.values - slope * learnt.previous
                log_p[chosen] = _predict_number(residuals, readings.values[chosen] - slope * readings.previous[chosen])
    return log_p


def _predict_label(num_labels: int, references: Readings, readings: Readings) -> Floats:
    """Return ln p of labels given the previous label, from the frequencies of transitions."""
    counts = np.full((num_labels, num_labels), 0.5)
    np.add.at(counts, (references.previous.astype(np.int64), references.values.astype(np.int64)), 1.0)
    log_p: Floats = np.log(counts / counts.sum(1, keepdims=True))
    return log_p[readings.previous.astype(np.int64), readings.values.astype(np.int64)]


def _predict_number(reference: Floats, x: Floats) -> Floats:
    """Return the log-density of numbers under the distribution of reference numbers.

    It is a normal distribution or a histogram. One half of the reference numbers, chosen at random, decides the number
    of bins that predicts the other half best.
    """
    shuffled = np.random.default_rng(0).permutation(reference)
    half = len(shuffled) // 2
    num_bins = max(NUMBERS_OF_BINS, key=lambda n: compute_log_density(shuffled[:half], shuffled[half:], n).sum())
    return compute_log_density(reference, x, num_bins)
