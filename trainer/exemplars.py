"""What whole records are ranked by beside the density: exemplars, and what is typical of normal records."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.engine.record_scores import sum_centered_nll
from deformer_stream.kernels.cpu import attached_kernels
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.ranking import Ranking
from trainer.data import PreparedTable, Split
from trainer.sampling import create_generator, draw_random_keys, gather_values, order_readings, read_rows

MAX_EXEMPLARS = 4096
"""More make the ranking of the largest tables a little better and every closing record dearer."""
MAX_REFERENCE_RECORDS = 1000
"""Records that say what is typical."""
MIN_DIFFERENCE_RATE = 0.05
"""Least chance that two records differ in a word: a word that is always the same must not outweigh all else."""


def add_ranking(model: DEformer, data: PreparedTable, most: int, seed: int) -> DEformer:
    """The model with exemplars: at most `most` records of the table, from all parts of its split, for the ranking makes
    no promise that needs records kept apart; only those that were sifted, where some were left out. Those of a model
    that was adapted stay, as far as there is room. With `most` 0, or where there is nothing to compare, none."""
    rng = np.random.default_rng([seed, 0x4A4C])
    rows = np.arange(len(data.split))
    if (data.split == Split.LEFT_OUT).any():
        rows = np.flatnonzero((data.split == Split.TRAIN) | (data.split == Split.VALIDATION))
    rows = np.sort(rng.choice(rows, most, replace=False)) if len(rows) > most else rows
    if not most or len(rows) < 2:
        model.ranking = None
        return model
    values = np.asarray(data.values[rows], np.float64)
    known = torch.from_numpy(~np.isnan(values))
    places = Ranking(data.schema, 0).compute_positions(np.nan_to_num(values))
    if model.ranking is not None:
        places, known = _joined(model.ranking, places, known, most, rng)
    ranking = Ranking(data.schema, len(places))
    ranking.known = known
    ranking.deviations = _deviations(ranking, places)
    ranking.positions = places / ranking.deviations
    own = np.arange(len(places) - len(rows), len(places))
    some = torch.from_numpy(np.sort(rng.permutation(own)[:MAX_REFERENCE_RECORDS]))
    far = ranking.compute_distances(ranking.positions[some], ranking.known[some], own_exemplar=some).double().numpy()
    kept = data.select_rows(Split.CALIBRATION)
    excess = _excess(model, data, rng.permutation(kept)[:MAX_REFERENCE_RECORDS], seed)
    ranking.typical = torch.tensor([_typical(far), _typical(excess)], dtype=torch.float64)
    model.ranking = ranking.to(model.device)
    model.config = replace(model.config, exemplars=len(places))
    return model


def _joined(
    earlier: Ranking, places: torch.Tensor, known: torch.Tensor, most: int, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exemplars of the model that was adapted, as far as there is room, and then this table's."""
    kept = np.sort(rng.permutation(earlier.exemplars)[: max(0, most - len(places))])
    wider = (0, places.shape[1] - earlier.positions.shape[1])
    old = torch.nn.functional.pad((earlier.positions * earlier.deviations)[kept].cpu(), wider)
    old_known = torch.nn.functional.pad(earlier.known[kept].cpu(), wider)
    return torch.cat([old, places]), torch.cat([old_known, known])


def _deviations(ranking: Ranking, places: torch.Tensor) -> torch.Tensor:
    out = np.ones(places.shape[1])
    for f, (place, known) in enumerate(zip(places.numpy().T, ranking.known.numpy().T, strict=True)):
        there = place[known].astype(np.float64)
        if len(there) and bool(ranking.is_text_label[f]):
            shares = np.unique(there, return_counts=True)[1] / len(there)
            out[f] = max(1.0 - float((shares**2).sum()), MIN_DIFFERENCE_RATE)
        elif len(there) and there.std() > 0:
            out[f] = there.std()
    return torch.from_numpy(out).float()


def _excess(model: DEformer, data: PreparedTable, rows: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """Of records that training never saw, in random orders."""
    values, _ = read_rows(data, np.sort(rows))
    features, order = order_readings(values, draw_random_keys(values.shape, create_generator(seed, 0x4A4C)))
    with attached_kernels(model) as kernels:  # the engine standardises its own sums by these
        return sum_centered_nll(kernels, model, features.numpy(), gather_values(values, order).double().numpy())


def _typical(values: NDArray[np.float64]) -> list[float]:
    median, high = np.quantile(values, [0.5, 0.9])
    return [float(median), max(float(high - median), 1e-9)]
