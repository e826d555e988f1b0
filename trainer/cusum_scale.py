"""Fit the scale of the cumulative sums (`deformer_stream.calibration.cusum`) to normal records.

The alert rule is calibrated with other records, whose scores are computed with the scale. If the scale depended on
these records, their scores would be smaller than those of new normal records, and there would be too many false alarms.
So the scale uses the validation records, on which the network was not trained, if there are enough of them. Otherwise
it uses the training records. The distributions of the sensors' readings and steps are those of training records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.calibration.cusum import (
    KINDS,
    CusumReadings,
    CusumScale,
    advance_sums,
    compute_log_resolutions,
    create_states,
    find_previous_values,
    fit_scale,
)
from deformer_stream.calibration.marginals import Marginals
from deformer_stream.calibration.sensor_steps import Steps
from deformer_stream.kernels.cpu import CpuKernels, RaggedBatch, attached_kernels
from deformer_stream.model.deformer import DEformer
from deformer_stream.ragged import find_previous_in_group, ragged_indices
from trainer.examples import BlockBatch, BlockExamples, Ints
from trainer.irregular_table import IrregularTable
from trainer.sampling import move_to_device

Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]

MAX_SCALE_RECORDS = 1000
"""Largest number of records to which the scale is fitted."""

MIN_SCALE_RECORDS = 100
"""Smallest number of records to which the scale is fitted, even if time is over. A tail is then that of the largest ten
sums."""

MIN_HELD_OUT_RECORDS = 500
"""Smallest number of validation records to which the scale is fitted in place of training records.

The tails of 172 such records found 19% of the shifted parameters of intensive-care stays, those of 500 training records
28% (docs/experiments/27-steps-and-single-readings.md).
"""

RECORDS_PER_PASS, READINGS_PER_PASS = 64, 200_000
"""Largest numbers of records that are scored together, and of their readings, unless a single record has more."""

CHUNK_READINGS = 4096
"""About the number of readings of each record that are scored together. It bounds memory, however long a record is."""


def fit_cusum_scale(
    model: DEformer,
    examples: BlockExamples,
    rows: Ints,
    distributions: SensorDistributions,
    batch_size: int,
    should_continue: Callable[[int], bool] = lambda num_done: True,
) -> CusumScale:
    """Score the readings of normal records, and fit the tails of their largest cumulative sums.

    Args:
        model: The trained model, in evaluation mode.
        examples: The blocks of the records.
        rows: (N,) row numbers of the records.
        distributions: The distributions of the readings and steps of each sensor (`SensorDistributions.fit`).
        batch_size: Number of blocks that are scored together.
        should_continue: Called before each group of records with the number of records that are scored. If it returns
            False, the scale is fitted to these.
    """
    parts: list[LargestSums] = []
    with attached_kernels(model) as kernels:
        start = 0
        while start < len(rows) and should_continue(start):
            num_readings = np.cumsum(examples.table.num_readings[rows[start : start + RECORDS_PER_PASS]])
            rows_of_part = rows[
                start : start + max(1, int(np.searchsorted(num_readings, READINGS_PER_PASS, side="right")))
            ]
            parts.append(find_largest_sums(kernels, model, examples, rows_of_part, distributions, batch_size))
            start += len(rows_of_part)
    return fit_scale(
        np.concatenate([part.sums for part in parts], 1),
        np.concatenate([part.record_sums for part in parts]),
        np.concatenate([part.has_readings for part in parts]),
        distributions.marginals,
        distributions.steps,
    )


@dataclass(frozen=True, slots=True)
class SensorDistributions:
    """The distributions of the readings and of the steps of each sensor in training records.

    Attributes:
        marginals: The distributions of the readings.
        steps: The distributions of the steps.
        steps_by_half: The same of the records with even row numbers, and of those with odd ones. The sums of a record
            are computed with the half that does not contain it.
    """

    marginals: Marginals
    steps: Steps
    steps_by_half: tuple[Steps, Steps]

    @staticmethod
    def fit(table: IrregularTable, rows: Ints) -> SensorDistributions:
        """Fit the distributions to the readings of some records."""
        record, place = ragged_indices(table.num_readings[rows])
        readings = table.offsets[rows[record]] + place
        codes, values = np.asarray(table.codes[readings], np.int64), np.asarray(table.values[readings])
        earlier = find_previous_in_group(record * len(table.schema) + codes)
        previous = np.where(earlier >= 0, values[earlier], np.inf)
        whole, *halves = Steps.fit_halves(table.schema, codes, values, previous, rows[record] % 2 == 0)
        return SensorDistributions(Marginals.fit(table.schema, codes, values), whole, (halves[0], halves[1]))

    def add_steps(self, readings: CusumReadings, rows: Ints, states: Floats32) -> CusumReadings:
        """Return successive readings of N records with the p-values of their steps.

        Args:
            readings: The readings, (N, L).
            rows: (N,) row numbers of the records.
            states: (N, W) the states of the records before the readings (`cusum.create_states`).
        """
        previous = find_previous_values(states, readings.codes, readings.values, readings.is_counted)
        log_p_step = np.zeros_like(readings.log_p)
        for half, steps in enumerate(self.steps_by_half):
            is_of_other_half = rows % 2 != half
            log_p_step[is_of_other_half] = steps.compute_log_p(
                readings.codes[is_of_other_half], readings.values[is_of_other_half], previous[is_of_other_half]
            )
        return replace(readings, log_p_step=log_p_step)


@dataclass(frozen=True, slots=True)
class LargestSums:
    """The largest cumulative sums of N records with F sensors, which are the arguments of `cusum.fit_scale`.

    Attributes:
        sums: (6, N, F) the largest value of each kind of evidence of each sensor, a row for each of `KINDS`.
        record_sums: (N,) the largest sum of each record.
        has_readings: (N, F) whether the record has counted readings of the sensor.
    """

    sums: Floats
    record_sums: Floats
    has_readings: NDArray[np.bool_]


def find_largest_sums(
    kernels: CpuKernels | None,
    model: DEformer,
    examples: BlockExamples,
    rows: Ints,
    distributions: SensorDistributions,
    batch_size: int,
) -> LargestSums:
    """Score the readings of a few records, and return the largest cumulative sums.

    The readings are scored in chunks, from which only the states of the sums are kept.

    Args:
        kernels: The compiled kernels of the model (`attached_kernels`), None to use PyTorch.
        model: The trained model, in evaluation mode.
        examples: The blocks of the records.
        rows: (N,) row numbers of the records.
        distributions: The distributions of the readings and steps of each sensor.
        batch_size: Number of blocks that are scored together.
    """
    num_readings, num_sensors = examples.table.num_readings[rows], len(model.schema)
    states = create_states(len(rows), num_sensors)
    largest = np.zeros((len(KINDS), len(rows), num_sensors))
    largest_of_record = np.zeros(len(rows))
    has_readings = np.zeros((len(rows), num_sensors), bool)
    block = examples.blocks.limit.block
    chunk = -(-CHUNK_READINGS // block) * block
    for start in range(0, int(num_readings.max(initial=0)), chunk):
        chosen = np.flatnonzero(num_readings > start)
        chosen_rows, chosen_states = rows[chosen], states[chosen]
        readings = score_records(
            kernels,
            model,
            examples,
            rows=chosen_rows,
            marginals=distributions.marginals,
            batch_size=batch_size,
            start=start,
            stop=start + chunk,
        )
        readings = distributions.add_steps(readings, chosen_rows, chosen_states)
        sensor_sums, record_sums = advance_sums(chosen_states, readings)
        states[chosen] = chosen_states
        record, place = np.nonzero(readings.is_counted)
        codes = readings.codes[record, place]
        for kind in range(len(KINDS)):
            np.maximum.at(largest[kind], (chosen[record], codes), sensor_sums[kind, record, place])
        np.maximum.at(largest_of_record, chosen[record], record_sums[record, place])
        has_readings[chosen[record], codes] = True
    return LargestSums(largest, largest_of_record, has_readings)


def score_records(
    kernels: CpuKernels | None,
    model: DEformer,
    examples: BlockExamples,
    rows: Ints,
    marginals: Marginals,
    batch_size: int,
    start: int = 0,
    stop: int | None = None,
) -> CusumReadings:
    """Return what the cumulative sums need of readings of some records.

    Values have no noise, as in a stream.

    Args:
        kernels: The compiled kernels of the model (`attached_kernels`), None to use PyTorch.
        model: The trained model, in evaluation mode.
        examples: The blocks of the records.
        rows: (N,) row numbers of the records.
        marginals: The distributions of the readings of each sensor.
        batch_size: Number of blocks that are scored together.
        start: Position in its record of the first reading, a multiple of the number of readings of a block.
        stop: Position after the last reading; None for the end of the record.
    """
    table, blocks = examples.table, examples.blocks
    num_readings = np.maximum(table.num_readings[rows] - start, 0)
    if stop is not None:
        num_readings = np.minimum(num_readings, stop - start)
    record, place = ragged_indices(num_readings)
    # Where the reading with an index of the table belongs in the padded arrays.
    order = np.argsort(rows, kind="stable")
    ends = table.offsets[rows[order] + 1]
    shape = len(rows), int(num_readings.max(initial=1))
    codes, values = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    log_p, log_p_others, log_prob = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    reading = table.offsets[rows[record]] + start + place
    codes[record, place], values[record, place] = table.codes[reading], table.values[reading]
    # The blocks of a record are adjacent.
    block_record, block_index = ragged_indices(-(-num_readings // blocks.limit.block))
    first_blocks = np.searchsorted(blocks.records, rows) + start // blocks.limit.block
    indexes = np.sort(first_blocks[block_record] + block_index)
    for first in range(0, len(indexes), batch_size):
        batch = examples.gather_stored(indexes[first : first + batch_size])
        is_target = batch.weights.numpy() > 0
        terms = _score_with_torch(model, batch) if kernels is None else _score_with_kernels(kernels, batch)
        target = batch.readings[is_target]
        row_of_target = order[np.searchsorted(ends, target, side="right")]
        place_of_target = target - table.offsets[rows[row_of_target]] - start
        (
            log_prob[row_of_target, place_of_target],
            log_p[row_of_target, place_of_target],
            log_p_others[row_of_target, place_of_target],
        ) = terms[:, is_target]
    is_valid = np.arange(shape[1]) < num_readings[:, None]
    return CusumReadings(
        codes=codes,
        values=values,
        log_p=log_p,
        log_p_others=None if model.process is None else log_p_others,
        log_masses=log_prob + compute_log_resolutions(model.schema)[codes],
        log_p_level=marginals.compute_log_p(codes, values),
        is_counted=is_valid & ~model.schema.is_context[codes] & np.isfinite(log_p) & np.isfinite(log_prob),
    )


def _score_with_torch(model: DEformer, batch: BlockBatch) -> Floats:
    """Return the score terms of the readings of blocks, (3, B, L): ln p, ln of the p-value, and that given others.

    The last one is the p-value given the readings of other sensors only. It is 0 if the model has no Gaussian process.
    """
    features, x, ages = (
        move_to_device(tensor, model.device) for tensor in (batch.features, batch.values.to(model.dtype), batch.ages)
    )
    with torch.inference_mode():
        conditional = model.conditionals(features, x, ages=ages)
        terms = conditional.compute_score_terms(x, conditional.compute_surprisal(x))
        others = torch.zeros_like(x) if model.process is None else model.process.compute_log_p_others(features, x, ages)
    return np.stack([term.double().cpu().numpy() for term in (terms.log_prob, terms.log_p_value, others)])


def _score_with_kernels(kernels: CpuKernels, batch: BlockBatch) -> Floats:
    """Return the score terms of the readings of blocks as `_score_with_torch`, 0 for readings of the contexts."""
    is_reading = batch.features.numpy() >= 0
    # The readings of a block follow those of its context, which only condition them.
    is_before_targets = is_reading & (np.cumsum(batch.weights.numpy() > 0, 1) == 0)
    cache, pages = kernels.create_cache_of_records(*is_reading.shape)
    ragged = RaggedBatch(
        features=batch.features.numpy()[is_reading],
        values=batch.values.numpy()[is_reading].astype(np.float32),
        offsets=np.append(0, np.cumsum(is_reading.sum(1))),
        num_cached=np.zeros(len(is_reading), np.int64),
        page_table=pages,
        num_prefill_only=is_before_targets.sum(1),
        ages=batch.ages.numpy()[is_reading],
    )
    has_others = kernels.parameters.has_process
    terms = np.zeros((3, *is_reading.shape))
    scored = kernels.score(cache, ragged, has_others)
    is_scored = is_reading & ~is_before_targets
    terms[0, is_scored], terms[1, is_scored] = scored[:2]
    if has_others:
        terms[2, is_scored] = scored[3]
    return terms
