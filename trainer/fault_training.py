"""Train and calibrate the classifier of faults on labelled records; the density model is not changed.

Each labelled record is seen many times, with random subsets of its readings, so that few labels serve partial records
of every length. The classifier consists of linear softmax models, one without each fold of the records
(`calibration.fault_classifier` says why).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.calibration.fault_classifier import FaultClassifier, log_softmax, standardise_inputs
from deformer_stream.engine.fault_inputs import compute_fault_inputs
from deformer_stream.engine.order_trees import build_order_tree
from deformer_stream.kernels.cpu import CpuKernels
from deformer_stream.model.parameters import Model

Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NUM_FOLDS = 5
"""Number of linear models, each trained without one fold of the labelled records."""

NUM_SUBSETS = 24_000
"""Largest number of subsets of readings that are drawn for training, over all records."""

NUM_NODES = 4_000_000
"""About how many readings go through the network for training, and as many for the calibration, if records are long.

The smallest numbers of subsets and lengths, which follow, can exceed it: 20 times with 2,000 records of 1,000 features.
"""

SUBSETS_PER_RECORD = (8, 64)
"""The smallest and the largest number of subsets of one record."""

NUM_LENGTHS = (4, 16)
"""The smallest and the largest number of lengths at which the labelled records are scored for the calibration."""

NUM_PREFIXES = 4
"""Largest number of random prefixes of each length for the calibration."""

SUBSETS_AT_ONCE = 8_192
"""Number of subsets whose inputs are computed together, which bounds the memory."""

PENALTIES = (1.0, 0.1, 0.01)
"""Weights of the squared weights in the training loss, of which the one with the best held-out likelihood is chosen."""

MAX_ITERATIONS = 150
"""Largest number of iterations of L-BFGS."""

MIN_SCALE = 0.01
"""Added to the standard deviations by which the inputs are divided, because labelled records can agree by chance."""

PRIOR_RECORDS = 5
"""Number of records as which the mean variance of all faults counts in the variance of a fault's residuals."""

MIN_VARIANCE = 0.05
"""Added to the variances of the residuals, because a few records can agree by chance."""

TEMPERATURES = np.exp(np.linspace(-1.5, 1.5, 61))
"""The temperatures, of which the one with the best held-out likelihood divides the logits."""


def plan_calibration(num_records: int, num_features: int) -> tuple[Ints, int]:
    """Return the numbers of readings at which labelled records are scored, and the number of prefixes of each length.

    The lengths are all, or 16 that spread evenly. With many or long records, there are fewer prefixes, and then fewer
    lengths.

    Args:
        num_records: The number of labelled records.
        num_features: The number of features.
    """
    num_prefixes, num_lengths = NUM_PREFIXES, min(NUM_LENGTHS[1], num_features)
    while True:
        lengths = np.unique(np.linspace(1, num_features, num_lengths).round().astype(np.int64))
        num_nodes = num_records * sum(_count_nodes(length) for length in lengths.tolist())
        if num_prefixes > 1 and num_prefixes * num_nodes > NUM_NODES:
            num_prefixes = max(1, NUM_NODES // num_nodes)
        if num_prefixes * num_nodes <= NUM_NODES or num_lengths <= NUM_LENGTHS[0]:
            return lengths, num_prefixes
        num_lengths = max(NUM_LENGTHS[0], num_lengths // 2)


def _count_nodes(num_readings: int) -> int:
    """Return the number of readings that the network processes for a subset: those of all orders of its order tree."""
    return len(build_order_tree(0, num_readings).reading_index)


def assign_folds(fault_indexes: Ints, seed: int) -> Ints:
    """Return a fold for each labelled record, (L,); the records of a fault are spread evenly over the folds."""
    rng = np.random.default_rng([seed, 0xF41D])
    folds = np.zeros(len(fault_indexes), np.int64)
    first = 0
    for fault in np.unique(fault_indexes).tolist():
        rows = rng.permutation(np.flatnonzero(fault_indexes == fault))
        folds[rows] = (first + np.arange(len(rows))) % NUM_FOLDS
        first += len(rows)  # so that faults with few records do not all lack a record in the last folds
    return folds


def draw_orders(values: Floats, num_draws: int, ranks: Ints | None, rng: np.random.Generator) -> Ints:
    """Return the position of each reading in `num_draws` orders of each record, (L, num_draws, F).

    Args:
        values: (L, F) the records, NaN for features without a reading, which come last.
        num_draws: Number of orders of a record.
        ranks: (L, F) positions of the readings in the order of their arrival; None for random orders.
        rng: Draws the random orders.
    """
    shape = len(values), num_draws, values.shape[1]
    keys = rng.random(shape) if ranks is None else np.broadcast_to(ranks[:, None].astype(np.float64), shape)
    keys = np.where(np.isnan(values)[:, None], np.inf, keys)
    return np.asarray(keys.argsort(-1, kind="stable").argsort(-1, kind="stable"))


def train_classifier(
    model: Model,
    kernels: CpuKernels | None,
    values: Floats,
    fault_indexes: Ints,
    names: tuple[str, ...],
    level: float,
    seed: int,
    ranks: Ints | None = None,
) -> FaultClassifier:
    """Return a classifier that was trained and calibrated on L labelled records.

    Args:
        model: The density model.
        kernels: Its compiled kernels, or None to compute with PyTorch.
        values: (L, F) the records in normalised units or label codes, NaN for features without a reading.
        fault_indexes: (L,) index of each record's fault. Each fault has at least two records.
        names: The names of the faults.
        level: The level of the prediction sets.
        seed: Seed of the folds and of the subsets.
        ranks: (L, F) positions of the readings in their order of arrival, in which the classifier is calibrated. None
            to calibrate it in random orders.
    """
    rng = np.random.default_rng([seed, 0xFA17])
    num_records, num_features = values.shape
    folds = assign_folds(fault_indexes, seed)
    # Training: subsets of random size, in random order.
    most = min(NUM_SUBSETS, NUM_NODES // _count_nodes(-(-num_features // 2)))
    num_subsets = int(np.clip(most // num_records, *SUBSETS_PER_RECORD))
    positions = draw_orders(values, num_subsets, None, rng)
    num_observed = (~np.isnan(values)).sum(1)
    sizes = rng.integers(1, np.maximum(num_observed, 1)[:, None], (num_records, num_subsets), endpoint=True)
    inputs = _compute_inputs(model, kernels, values, positions < sizes[..., None])
    # Model k has seen nothing of the records of fold k, so that their scores are those of new records.
    units = [_estimate_units(inputs[folds != fold], num_features) for fold in range(NUM_FOLDS)]
    fitted = [
        _fit(
            standardise_inputs(inputs[folds != fold].reshape(-1, inputs.shape[-1]), *units[fold]),
            np.repeat(fault_indexes[folds != fold], num_subsets),
            len(names),
        )
        for fold in range(NUM_FOLDS)
    ]
    means, precisions = _estimate_residuals(inputs, fault_indexes, folds, num_features, len(names))
    # Calibration: prefixes of certain lengths, scored by the model that has not seen the record.
    lengths, num_prefixes = plan_calibration(num_records, num_features)
    positions = draw_orders(values, num_prefixes, ranks, rng)
    prefixes = positions[:, None] < lengths[:, None, None]  # (L, G, P, F)
    held_out = _compute_inputs(model, kernels, values, prefixes.reshape(num_records, -1, num_features))
    logits = np.zeros((len(PENALTIES), num_records, held_out.shape[1], len(names)))
    for record, fold in enumerate(folds.tolist()):
        standardised = standardise_inputs(held_out[record].astype(np.float64), *units[fold])
        for index, (weights_of_fold, biases_of_fold) in enumerate(fitted[fold]):
            logits[index, record] = standardised @ weights_of_fold + biases_of_fold
    # The penalty and the temperature of model k are chosen without the records of fold k, but with models that have
    # seen them. They are two numbers, so they hardly depend on a single record.
    chosen = []
    for fold in range(NUM_FOLDS):
        is_other = folds != fold
        scaled = [_choose_temperature(of_penalty[is_other], fault_indexes[is_other]) for of_penalty in logits]
        index = int(np.argmin([loss for loss, _ in scaled]))
        chosen.append([part / scaled[index][1] for part in fitted[fold][index]])
    weights, biases = (np.stack(parts) for parts in zip(*chosen, strict=True))
    centers, scales = (np.stack(parts) for parts in zip(*units, strict=True))
    uncalibrated = FaultClassifier(
        names,
        level,
        weights=weights.astype(np.float32),
        biases=biases.astype(np.float32),
        means=means.astype(np.float32),
        precisions=precisions.astype(np.float32),
        lengths=lengths,
        scores=np.zeros((num_records, len(lengths), num_prefixes), np.float32),
        fault_indexes=fault_indexes,
        folds=folds,
        centers=centers,
        scales=scales,
    )
    scores = [
        uncalibrated.compute_scores(held_out[record].astype(np.float64))[folds[record], :, fault_indexes[record]]
        for record in range(num_records)
    ]
    return replace(uncalibrated, scores=np.reshape(scores, uncalibrated.scores.shape).astype(np.float32))


def _compute_inputs(model: Model, kernels: CpuKernels | None, values: Floats, is_kept: Bools) -> Floats32:
    """Return the inputs of S subsets of the readings of each of L records, (L, S, D).

    Args:
        model: The density model.
        kernels: Its compiled kernels.
        values: (L, F) the records.
        is_kept: (L, S, F) which readings belong to the subsets.
    """
    num_records, num_subsets, _ = is_kept.shape
    records_at_once = max(1, SUBSETS_AT_ONCE // num_subsets)
    parts = []
    for start in range(0, num_records, records_at_once):
        part = slice(start, start + records_at_once)
        subsets = np.where(is_kept[part], values[part, None], np.nan).reshape(-1, values.shape[1])
        parts.append(compute_fault_inputs(model, kernels, subsets).astype(np.float32))
    return np.concatenate(parts).reshape(num_records, num_subsets, -1)


def _estimate_units(inputs: Floats32, num_features: int) -> tuple[Floats32, Floats32]:
    """Return the means and the standard deviations of residuals, their absolute values, and values, (3 F,) each.

    Readings that are missing do not count.

    Args:
        inputs: (L, S, D) the inputs of S subsets of each of L records.
        num_features: The number F of features.
    """
    numbers = inputs[..., : 3 * num_features].astype(np.float64)
    has_reading = np.tile(inputs[..., 3 * num_features : 4 * num_features], 3).astype(np.float64)
    counts = np.maximum(has_reading.sum((0, 1)), 1)
    centers = numbers.sum((0, 1)) / counts  # inputs of missing readings are 0
    variances = (((numbers - centers) * has_reading) ** 2).sum((0, 1)) / counts
    return centers.astype(np.float32), (np.sqrt(variances) + MIN_SCALE).astype(np.float32)


def _fit(inputs: Floats32, fault_indexes: Ints, num_faults: int) -> list[tuple[Floats, Floats]]:
    """Return the weights (D, C) and biases (C,) of a linear model for each of the `PENALTIES`.

    All faults have the same weight in the loss, however many records they have.

    Args:
        inputs: (N, D) the standardised inputs of N subsets of readings.
        fault_indexes: (N,) the fault of each.
        num_faults: The number C of faults.
    """
    mean, scale = inputs.mean(0, dtype=np.float64), inputs.std(0, dtype=np.float64) + 1e-3
    x, targets = torch.from_numpy(((inputs - mean) / scale).astype(np.float32)), torch.from_numpy(fault_indexes)
    counts = np.bincount(fault_indexes, minlength=num_faults)
    shares = 1 / (counts[fault_indexes] * (counts > 0).sum())
    w = torch.from_numpy(shares.astype(np.float32))
    weights = torch.zeros((inputs.shape[1], num_faults), requires_grad=True)
    biases = torch.zeros(num_faults, requires_grad=True)
    fitted = []
    for penalty in PENALTIES:  # from the largest one; each fit begins with the result of the one before
        optimizer = torch.optim.LBFGS(
            [weights, biases], max_iter=MAX_ITERATIONS, history_size=10, line_search_fn="strong_wolfe"
        )

        def compute_loss(penalty: float = penalty, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            nll = torch.nn.functional.cross_entropy(torch.addmm(biases, x, weights), targets, reduction="none")
            loss = nll @ w + 0.5 * penalty * (weights**2).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(compute_loss)  # type: ignore[no-untyped-call]
        unscaled = weights.detach().double().numpy() / scale[:, None]
        fitted.append((unscaled, biases.detach().double().numpy() - mean @ unscaled))
    return fitted


def _estimate_residuals(
    inputs: Floats32, fault_indexes: Ints, folds: Ints, num_features: int, num_faults: int
) -> tuple[Floats, Floats]:
    """Return the means and inverse variances of the residuals of each fault without one fold, (K, C, 2 F) each.

    The variance of a fault is shrunk to the mean variance of all faults, because a fault has few records.

    Args:
        inputs: (L, S, D) the inputs of S subsets of each of L records.
        fault_indexes: (L,) the fault of each record.
        folds: (L,) the fold of each record.
        num_features: The number F of features.
        num_faults: The number C of faults.
    """
    residuals = inputs[..., : 2 * num_features].astype(np.float64)
    has_reading = np.tile(inputs[..., 3 * num_features : 4 * num_features], 2).astype(np.float64)
    # (L, 2 F): sums over the subsets of each record.
    counts, sums = has_reading.sum(1), residuals.sum(1)  # residuals of missing readings are 0
    squares = (residuals**2).sum(1)
    means, variances = np.zeros((2, NUM_FOLDS, num_faults, 2 * num_features))
    for fold in range(NUM_FOLDS):
        one_hot = ((fault_indexes == np.arange(num_faults)[:, None]) & (folds != fold)).astype(np.float64)  # (C, L)
        count = one_hot @ counts
        means[fold] = one_hot @ sums / np.maximum(count, 1)
        deviations = np.maximum(one_hot @ squares - count * means[fold] ** 2, 0)
        pooled = deviations.sum(0) / np.maximum(count.sum(0), 1)
        num_records = one_hot.sum(1)[:, None]
        fault_variances = deviations / np.maximum(count, 1)
        variances[fold] = (num_records * fault_variances + PRIOR_RECORDS * pooled) / (num_records + PRIOR_RECORDS)
    return means, 1 / (variances + MIN_VARIANCE)


def _choose_temperature(logits: Floats, fault_indexes: Ints) -> tuple[float, float]:
    """Return the smallest held-out loss, with equal faults, and the number by which the logits are then divided.

    Args:
        logits: (L, S, C) logits of S subsets of each of L records, from the models that have not seen the record.
        fault_indexes: (L,) the fault of each record.
    """
    weights = 1 / np.bincount(fault_indexes)[fault_indexes]
    losses = [
        -(np.take_along_axis(log_softmax(logits / t), fault_indexes[:, None, None], 2).mean((1, 2)) * weights).sum()
        for t in TEMPERATURES
    ]
    return min(losses), float(TEMPERATURES[int(np.argmin(losses))])
