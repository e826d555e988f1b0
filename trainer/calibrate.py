"""Calibrate the alert rule: compute the largest prefix statistic of normal records that training has not seen.

A prefix statistic is the anomaly score of a record after each reading; its largest value decides whether the record
raises an alert. Calibration records are scored in orders like those in which records will arrive. Tables that are too
small for a separate calibration part use cross-conformal calibration, for which this module divides them into folds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.calibration.calibration_scores import CalibrationScores
from deformer_stream.calibration.conformal import MAX_CALIBRATION_RECORDS, Calibration, TiePolicy, trim_largest
from deformer_stream.calibration.cusum import CusumScale
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.events import ClosedRecords, EventBatch
from deformer_stream.engine.record_scores import compute_record_scores
from deformer_stream.errors import ConfigError
from deformer_stream.kernels.cpu import attached_kernels
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.schema import Schema
from trainer.data import PreparedTable, Split
from trainer.sampling import create_generator, draw_random_keys, gather_values, order_readings, read_rows

Order = Literal["arrival", "random", "schema"]
"""The arrival-order distribution, which is the order in which the readings of a record are expected to arrive.

"arrival" is the order in the log, "random" means that all orders have the same probability, and "schema" is the order
of the features in the schema.
"""

BATCH_SIZE = 256
"""Number of records that are scored together by default."""


def choose_order(chosen: Order | None, data: PreparedTable) -> Order:
    """Return the arrival-order distribution to calibrate for.

    "arrival" is the logged order of each record. "random" draws from all orders with the same probability. "schema" is
    the order of the features in the schema.

    Args:
        chosen: The value of the option `--order`. None to use the logged order if the table has one, and random orders
            otherwise.
        data: The prepared table.

    Raises:
        ConfigError: The logged order is chosen, but the table has none. Or another order is chosen, but the option
            `--ties hold` needs the logged order.
    """
    if data.ties == "hold" and chosen not in (None, "arrival"):
        raise ConfigError(
            f"--order {chosen} cannot be combined with --ties hold, because only the logged order has readings of the "
            "same time; remove one of the two options"
        )
    if chosen == "arrival" and data.arrival_ranks is None:
        raise ConfigError(
            "--order arrival cannot be used, because a wide table does not contain the order of arrival of readings; "
            "give a long table with times, or choose --order random or --order schema"
        )
    return chosen or ("random" if data.arrival_ranks is None else "arrival")


def sample_rows(rows: NDArray[np.int64], seed: int, max_rows: int = MAX_CALIBRATION_RECORDS) -> NDArray[np.int64]:
    """Return the row numbers in `rows`, or a random sample of `max_rows` of them if there are more.

    Args:
        rows: (N,) row numbers of the training table, ascending.
        seed: Seed of the sample.
        max_rows: Largest number of rows to return.

    Returns:
        The row numbers, ascending.
    """
    if len(rows) <= max_rows:
        return rows
    # The constant in the seed makes this sample independent of others with the same seed.
    rng = np.random.default_rng([seed, 0xCA11])
    return np.sort(rng.choice(rows, max_rows, replace=False))


def score_calibration_records(
    model: DEformer,
    data: PreparedTable,
    rows: NDArray[np.int64],
    order: Order,
    seed: int,
    batch_size: int = BATCH_SIZE,
    should_continue: Callable[[int], bool] = lambda num_done: True,
) -> CalibrationScores:
    """Score each calibration record with its readings in one order of arrival.

    Calibration must give the same scores as the stream. Therefore the same code is used (the compiled kernels if they
    are available), and values get no noise, unlike in training. If `data.ties` is "hold", readings with the same event
    time are scored together: the streaming engine averages over the orders of these readings.

    Args:
        model: The trained model, in evaluation mode.
        data: The prepared table.
        rows: (N,) row numbers of the calibration records in the table.
        order: The arrival-order distribution from which each record's order is drawn: "arrival" (the logged order),
            "random" or "schema" (the order of the features).
        seed: Seed of the random orders.
        batch_size: Number of records that are scored together.
        should_continue: Called before each batch with the number of records that are scored. If it returns False, no
            more records are scored.

    Returns:
        The scores of the N records, or of the first ones if `should_continue` returned False. They contain for each
        record the largest prefix statistic. A prefix statistic is the anomaly score of a record after its first k
        readings.
    """
    generator = create_generator(seed, 0xCA1B)
    num_features = len(data.schema)
    total = CalibrationScores(np.empty(0), np.zeros(num_features), np.zeros(num_features, np.int64))
    with attached_kernels(model) as kernels:
        for start in range(0, len(rows), batch_size):
            if not should_continue(start):
                break
            batch = rows[start : start + batch_size]
            feature_codes, ordered_values, times = order_records(data, batch, order, generator)
            scores = compute_record_scores(kernels, model, feature_codes, ordered_values)
            if times is not None and data.ties == "hold":
                statistics, centered_nll = _score_tie_groups(model, feature_codes, ordered_values, times)
                scores = replace(scores, statistics=statistics, centered_nll=centered_nll)
            total += scores
    return total


def order_records(
    data: PreparedTable, rows: NDArray[np.int64], order: Order, generator: torch.Generator
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64] | None]:
    """Return the readings of N records in one order of arrival.

    Args:
        data: The prepared table.
        rows: (N,) row numbers of the records in the table.
        order: The arrival-order distribution from which each record's order is drawn: "arrival" (the logged order),
            "random" or "schema" (the order of the features).
        generator: Source of the random orders.

    Returns:
        (N, L) feature codes with L readings in the longest record and −1 as padding at the end of the others; (N, L)
        normalised values or label codes, arbitrary at padding; and (N, L) the ranks of the readings in the logged
        order, None in another order. Readings of the same time have the same rank with `--ties hold`.
    """
    values, arrival_ranks = read_rows(data, rows)
    ranks = arrival_ranks if order == "arrival" else None
    if ranks is not None:
        keys = ranks  # readings with equal ranks get any order here; the engine averages over orders
    elif order == "random":
        keys = draw_random_keys(values.shape, generator)
    else:  # the order of the features in the schema
        keys = torch.arange(len(data.schema), dtype=torch.float64).expand(values.shape)
    features, columns = order_readings(values, keys)
    ordered_ranks = None if ranks is None else gather_values(ranks, columns).long().numpy()
    return features.numpy(), gather_values(values, columns).double().numpy(), ordered_ranks


def _score_tie_groups(
    model: DEformer, feature_codes: NDArray[np.int64], values: NDArray[np.float64], times: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the scores of each record if readings with the same time are scored together.

    Readings of one record with the same time are a tie group. A prefix statistic is the anomaly score of the record
    after one of its tie groups. The records are processed by a streaming engine that raises no alerts.

    Args:
        model: The trained model.
        feature_codes: (N, L) feature codes of N records in arrival order, with L readings in the longest record and
            −1 as padding at the end of the others.
        values: (N, L) normalised values, arbitrary at padding.
        times: (N, L) event times in any unit. Only their equality and order within a record matter.

    Returns:
        statistics: (N,) largest prefix statistics, larger is more anomalous; 0 for a record without readings.
        centered NLLs: (N,) sums of centered NLLs. Empty if the model has exemplars already (`--init-from`), with which
            the engine combines them.
    """
    # Alerts are not needed (no alphas), nor explanations of them (effort "off"), nor p-values (a calibration without
    # scores).
    calibration = Calibration(np.empty(0), "arrival", tie_policy="hold")
    engine = Engine(model, calibration, fingerprint="", alpha=(), effort="off")
    record_indexes, positions = np.nonzero(feature_codes >= 0)
    record_ids = [str(index) for index in record_indexes.tolist()]
    event_codes = feature_codes[record_indexes, positions]
    event_values = model.schema.denormalise(event_codes, values[record_indexes, positions])  # events have raw units
    event_times = times[record_indexes, positions]
    zeros = np.zeros(len(record_ids), np.int32)  # all events are of message 0 and partition 0
    batch = EventBatch(record_ids, event_codes.astype(np.int32), event_values, event_times, zeros, zeros)
    # Complete records are closed at once; `finish` closes those with missing readings. The time `now` is arbitrary,
    # because no record is closed by a timeout here.
    closed = ClosedRecords.concatenate([engine.handle(batch, now=0).closed, engine.finish().closed])
    rows = np.array([int(record_id) for record_id in closed.record_ids], np.int64)
    statistics, centered_nll = np.zeros(len(feature_codes)), np.zeros(len(feature_codes))
    statistics[rows], centered_nll[rows] = closed.score, closed.anomaly_score
    return statistics, np.empty(0) if model.config.exemplars else centered_nll


def compute_statistics(
    model: DEformer, data: PreparedTable, rows: NDArray[np.int64], order: Order, seed: int
) -> NDArray[np.float64]:
    """Return the largest prefix statistic of each record.

    A prefix statistic is the anomaly score of a record after its first k readings.

    Args:
        model: The trained model, in evaluation mode.
        data: The prepared table.
        rows: (N,) row numbers of the records in the table.
        order: The arrival-order distribution from which each record's order is drawn: "arrival" (the logged order),
            "random" or "schema" (the order of the features).
        seed: Seed of the random orders.

    Returns:
        (N,) statistics in the order of `rows`; larger is more anomalous.
    """
    return score_calibration_records(model, data, rows, order, seed).statistics


def calibrate(
    model: DEformer, data: PreparedTable, rows: NDArray[np.int64], order: Order, seed: int, trim: float = 0.0
) -> Calibration:
    """Score calibration records and return the calibration of the alert rule.

    Args:
        model: The trained model. It is in evaluation mode during this call only.
        data: The prepared table.
        rows: (N,) row numbers of records that were used neither for training nor for early stopping. If there are more
            than `MAX_CALIBRATION_RECORDS`, a random sample is used.
        order: The arrival-order distribution from which each record's order is drawn: "arrival" (the logged order),
            "random" or "schema" (the order of the features).
        seed: Seed of the sample and of the random orders.
        trim: Share (0 to 1) of the calibration records that may be anomalies. Those with the largest anomaly scores are
            removed.
    """
    was_training = model.training
    model.eval()
    scores = score_calibration_records(model, data, sample_rows(rows, seed), order, seed)
    model.train(was_training)
    return build_calibration(scores, data.schema, order, trim, data.ties)


def build_calibration(
    scores: CalibrationScores,
    schema: Schema,
    order: Order,
    trim: float,
    ties: TiePolicy = "arrival",
    cusum_scale: CusumScale | None = None,
    record_scores: NDArray[np.float64] | None = None,
) -> Calibration:
    """Return the calibration of the alert rule: the sorted anomaly scores of normal records and how they were computed.

    Args:
        scores: The scores of the calibration records.
        schema: The features.
        order: The arrival-order distribution in which the records were scored: "arrival" (the logged order), "random"
            or "schema" (the order of the features).
        trim: Share (0 to 1) of the records that may be anomalies. Those with the largest scores are removed.
        ties: "arrival" if readings of one record with the same time were scored one after the other, "hold" if they
            were scored together.
        cusum_scale: The scale of the cumulative sums from which the scores were computed, None without sums.
        record_scores: The anomaly scores of complete calibration records; None if they are unknown.
    """
    # These means are stored for the drift monitor, which compares them with those of later records.
    mean_neg_log_p_by_feature = scores.average_neg_log_p_by_feature(schema.names)
    statistics = trim_largest(scores.statistics, trim)
    if record_scores is not None:
        record_scores = trim_largest(record_scores, trim)
    return Calibration.from_statistics(statistics, order, mean_neg_log_p_by_feature, ties, cusum_scale, record_scores)


def split_folds(data: PreparedTable, num_folds: int, seed: int) -> Iterator[PreparedTable]:
    """Yield the table `num_folds` − 1 times, each time split differently into training, validation and calibration.

    The splits are used for cross-conformal calibration of small tables (after Vovk, "Cross-conformal predictors",
    2015). Several models are trained, and each record is scored by the model that was trained without it. The
    calibration records of the table's own split are fold 0. All other records are divided at random into folds 1, 2,
    ... of nearly equal size. In split k, the records of fold k are for calibration. As many records as in the table's
    own split are for validation, and the others for training.

    The scores of different folds come from different models. Therefore the guaranteed false-alarm rate holds only as
    far as these models give similar scores.

    Args:
        data: The prepared table. Its calibration records are fold 0. Its records of `Split.LEFT_OUT` and `Split.EMPTY`
            stay unused.
        num_folds: Number of models in total, at least 2.
        seed: Seed of the random division.
    """
    is_unused = ~data.is_used
    rng = np.random.default_rng([seed, 0xF01D])
    fold_by_row = np.zeros(len(data.split), np.int64)
    is_outside_fold_0 = (data.split != Split.CALIBRATION) & ~is_unused
    # The numbers 1, 2, ..., num_folds − 1, 1, 2, ..., of which each record gets a random one.
    balanced_folds = np.arange(int(is_outside_fold_0.sum())) % (num_folds - 1) + 1
    fold_by_row[is_outside_fold_0] = rng.permutation(balanced_folds)
    num_validation = int((data.split == Split.VALIDATION).sum())
    for fold in range(1, num_folds):
        split = np.full(len(data.split), Split.TRAIN, np.uint8)
        split[fold_by_row == fold] = Split.CALIBRATION
        candidates = np.flatnonzero((fold_by_row != fold) & ~is_unused)
        split[rng.permutation(candidates)[:num_validation]] = Split.VALIDATION
        split[is_unused] = data.split[is_unused]
        yield replace(data, split=split)
