"""Add to a trained model what it needs to rank complete records: stored training records, the exemplars.

The ranking score of a complete record combines its distance to the nearest exemplars with its centered NLL (−ln p minus
the entropy of the conditionals). Both are expressed relative to their values for normal records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.engine.record_scores import sum_centered_nll
from deformer_stream.kernels.cpu import attached_kernels
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.ranking import Ranking
from trainer.budget import measure_seconds_per_record
from trainer.data import PreparedTable, Split
from trainer.sampling import create_generator, draw_random_keys, gather_values, order_readings, read_rows

MAX_EXEMPLARS = 4096
"""More exemplars would improve the ranking of very large tables a little and make each closed record more expensive."""

MAX_REFERENCE_RECORDS = 1000
"""Normal records from which the typical distance and the typical centered NLL are computed."""

MIN_DIFFERENCE_RATE = 0.05
"""Smallest assumed probability that two records differ in a label. The distance is divided by it, so a label that is
always the same must not outweigh all other features."""

RANKING_SEED = 0x4A4C
"""Constant that separates the random numbers of this module from others of the same seed."""


def add_ranking(
    model: DEformer,
    data: PreparedTable,
    max_exemplars: int,
    seed: int,
    num_reference_records: int = MAX_REFERENCE_RECORDS,
    batch_size: int | None = None,
    should_continue: Callable[[int], bool] = lambda num_done: True,
) -> DEformer:
    """Set the model's exemplars and the typical values of normal records, and return the model.

    Exemplars are drawn from all parts of the table, because the ranking guarantees no false-alarm rate. If suspected
    anomalies were left out, only training and validation records are used. The exemplars of a model that is adapted
    (`--init-from`) are kept as far as `max_exemplars` permits.

    Args:
        model: The trained model.
        data: The prepared table.
        max_exemplars: Largest number of exemplars. With 0, or with fewer than two records, the model gets no ranking.
        seed: Seed of the random choices.
        num_reference_records: Number of normal records from which typical values are computed.
        batch_size: Reference records that are processed together; by default all.
        should_continue: Called before each batch with the number of reference records done. If it returns false, the
            typical values are those of the records so far.
    """
    rng = np.random.default_rng([seed, RANKING_SEED])
    ranking = _create_ranking(model, data, max_exemplars, rng)
    if ranking is None:
        model.ranking = None
        return model
    num_own = min(ranking.num_exemplars, len(_choose_exemplar_rows(data, max_exemplars, None)))
    own_indexes = np.arange(ranking.num_exemplars - num_own, ranking.num_exemplars)
    references = np.sort(rng.permutation(own_indexes)[:num_reference_records])
    held_out_rows = rng.permutation(data.select_rows(Split.CALIBRATION))[:num_reference_records]
    distances, centered_nll = [], []
    batch_size = batch_size or max(len(references), len(held_out_rows), 1)
    if batch_size < len(references):
        references = rng.permutation(references)  # if time runs out, the records so far must be a random sample
    for start in range(0, max(len(references), len(held_out_rows)), batch_size):
        if not should_continue(start):
            break
        batch = slice(start, start + batch_size)
        if len(references[batch]):
            distances.append(_compute_own_distances(ranking, references[batch]))
        if len(held_out_rows[batch]):
            centered_nll.append(_compute_centered_nll(model, data, held_out_rows[batch], seed))
    typical = [_summarize_typical(np.concatenate(distances)), _summarize_typical(np.concatenate(centered_nll))]
    ranking.typical = torch.tensor(typical, dtype=torch.float64)
    model.ranking = ranking.to(model.device)
    model.config = replace(model.config, exemplars=ranking.num_exemplars)
    return model


def measure_distance_seconds(
    model: DEformer, data: PreparedTable, max_exemplars: int, seed: int, clock: Callable[[], float]
) -> float:
    """Measure the seconds to compute the distance of one record to the exemplars; 0 if there are none."""
    ranking = _create_ranking(model, data, max_exemplars, np.random.default_rng([seed, RANKING_SEED]))
    if ranking is None:
        return 0.0
    num_exemplars = ranking.num_exemplars
    return measure_seconds_per_record(lambda n: _compute_own_distances(ranking, np.arange(n)), clock, num_exemplars)


def _choose_exemplar_rows(
    data: PreparedTable, max_exemplars: int, rng: np.random.Generator | None
) -> NDArray[np.int64]:
    """Return the row numbers of the exemplars, ascending; without a generator, only their number is meaningful."""
    rows = np.arange(len(data.split))
    if (data.split == Split.LEFT_OUT).any():
        rows = np.flatnonzero((data.split == Split.TRAIN) | (data.split == Split.VALIDATION))
    if len(rows) <= max_exemplars:
        return rows
    return rows[:max_exemplars] if rng is None else np.sort(rng.choice(rows, max_exemplars, replace=False))


def _create_ranking(
    model: DEformer, data: PreparedTable, max_exemplars: int, rng: np.random.Generator
) -> Ranking | None:
    """Return a ranking with exemplars but without typical values; None if there is nothing to compare with."""
    rows = _choose_exemplar_rows(data, max_exemplars, rng)
    if not max_exemplars or len(rows) < 2:
        return None
    values = np.asarray(data.values[rows], np.float64)
    known = torch.from_numpy(~np.isnan(values))
    positions = Ranking(data.schema, 0).compute_positions(np.nan_to_num(values))
    if model.ranking is not None:
        positions, known = _prepend_old_exemplars(model.ranking, positions, known, max_exemplars, rng)
    ranking = Ranking(data.schema, len(positions))
    ranking.known = known
    ranking.deviations = _compute_deviations(ranking, positions)
    ranking.positions = positions / ranking.deviations
    return ranking


def _prepend_old_exemplars(
    old: Ranking, positions: torch.Tensor, known: torch.Tensor, max_exemplars: int, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put exemplars of the model that is adapted before those of this table, as many as `max_exemplars` permits.

    Args:
        old: The ranking of the model that is adapted.
        positions: (M, F) positions of this table's exemplars, before division by the deviations.
        known: (M, F) whether an exemplar has a reading of the feature.
        max_exemplars: Largest number of exemplars in all.
        rng: Chooses among the old exemplars.

    Returns:
        Positions and known readings of all exemplars. New features are unknown in old exemplars.
    """
    num_old = max(0, max_exemplars - len(positions))
    kept = np.sort(rng.permutation(old.num_exemplars)[:num_old])
    padding = (0, positions.shape[1] - old.positions.shape[1])
    old_positions = torch.nn.functional.pad((old.positions * old.deviations)[kept].cpu(), padding)
    old_known = torch.nn.functional.pad(old.known[kept].cpu(), padding)
    return torch.cat([old_positions, positions]), torch.cat([old_known, known])


def _compute_deviations(ranking: Ranking, positions: torch.Tensor) -> torch.Tensor:
    """Return the unit of distance of each feature, (F,): its standard deviation, or 1 if readings are all the same.

    For labels that are not numbers it is the probability that two records differ, at least `MIN_DIFFERENCE_RATE`.
    """
    deviations = np.ones(positions.shape[1])
    for f, (column, is_known) in enumerate(zip(positions.numpy().T, ranking.known.numpy().T, strict=True)):
        readings = column[is_known].astype(np.float64)
        if len(readings) and bool(ranking.is_text_label[f]):
            shares = np.unique(readings, return_counts=True)[1] / len(readings)
            deviations[f] = max(1.0 - float((shares**2).sum()), MIN_DIFFERENCE_RATE)
        elif len(readings) and readings.std() > 0:
            deviations[f] = readings.std()
    return torch.from_numpy(deviations).float()


def _compute_own_distances(ranking: Ranking, exemplar_indexes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the distance of some exemplars to the nearest other exemplars, (R,)."""
    own = torch.from_numpy(exemplar_indexes)
    distances = ranking.compute_distances(ranking.positions[own], ranking.known[own], own_exemplar=own)
    return np.asarray(distances.double().numpy())


def _compute_centered_nll(
    model: DEformer, data: PreparedTable, rows: NDArray[np.int64], seed: int
) -> NDArray[np.float64]:
    """Return the centered NLL of records that training did not see, in random orders, (N,) in nats."""
    values, _ = read_rows(data, np.sort(rows))
    keys = draw_random_keys(values.shape, create_generator(seed, RANKING_SEED))
    features, columns = order_readings(values, keys)
    with attached_kernels(model) as kernels:  # the engine compares sums of the same kernels with these values
        return sum_centered_nll(kernels, model, features.numpy(), gather_values(values, columns).double().numpy())


def _summarize_typical(values: NDArray[np.float64]) -> list[float]:
    """Return the median of some values, and the difference between their 90% quantile and the median."""
    median, high = np.quantile(values, [0.5, 0.9])
    return [float(median), max(float(high - median), 1e-9)]
