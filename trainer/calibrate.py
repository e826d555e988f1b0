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

from deformer_stream.calibration.conformal import MAX_CALIBRATION_RECORDS, Calibration, TiePolicy, trim_largest
from deformer_stream.calibration.torch_scoring import RecordScores
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.events import ClosedRecords, EventBatch
from deformer_stream.engine.record_scores import survey_records
from deformer_stream.errors import ConfigError
from deformer_stream.kernels.cpu import attached_kernels
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.schema import Schema
from trainer.data import PreparedTable, Split
from trainer.sampling import create_generator, draw_random_keys, gather_values, order_readings, read_rows

Order = Literal["arrival", "random", "schema"]
"""The arrival-order distribution: the logged order, all orders with the same probability, or the schema's order."""

BATCH_SIZE = 256


def choose_order(chosen: Order | None, data: PreparedTable) -> Order:
    """Return the arrival-order distribution to calibrate for.

    Args:
        chosen: The user's choice. None to use the logged order if the table has one, and random orders otherwise.
        data: The prepared table.

    Raises:
        ConfigError: The table has no order of arrival, or the choice does not fit `--ties hold`.
    """
    if data.ties == "hold" and chosen not in (None, "arrival"):
        raise ConfigError(f"--order {chosen}: only an order of arrival has ties; leave --order or --ties out")
    if chosen == "arrival" and data.arrival_ranks is None:
        raise ConfigError("--order arrival: a wide table has no order of arrival; use a long table, random or schema")
    return chosen or ("random" if data.arrival_ranks is None else "arrival")


def sample_rows(rows: NDArray[np.int64], seed: int, max_rows: int = MAX_CALIBRATION_RECORDS) -> NDArray[np.int64]:
    """Return all rows, ascending, or a random sample of `max_rows` of them if there are more."""
    if len(rows) <= max_rows:
        return rows
    return np.sort(np.random.default_rng([seed, 0xCA11]).choice(rows, max_rows, replace=False))


def score_calibration_records(
    model: DEformer,
    data: PreparedTable,
    rows: NDArray[np.int64],
    order: Order,
    seed: int,
    batch_size: int = BATCH_SIZE,
    should_continue: Callable[[int], bool] = lambda num_done: True,
) -> RecordScores:
    """Score each row in one arrival order, by the code that will score streams (the compiled kernels if there are any).

    Values are used as they are, without the noise of training. If readings of one event time are decided together
    (`data.ties` is "hold"), the statistics come from the engine, which averages over the orders of such readings.

    Args:
        model: The trained model.
        data: The prepared table.
        rows: (N,) row numbers of the calibration records.
        order: The arrival-order distribution from which each record's order is drawn.
        seed: Seed of the random orders.
        batch_size: Records that are scored together.
        should_continue: Called before each batch with the number of records done. If it returns false, the result
            covers the records so far.
    """
    generator = create_generator(seed, 0xCA1B)
    num_features = len(data.schema)
    total = RecordScores(np.empty(0), np.zeros(num_features), np.zeros(num_features, np.int64))
    with attached_kernels(model) as kernels:
        for start in range(0, len(rows), batch_size):
            if not should_continue(start):
                break
            values, arrival_ranks = read_rows(data, rows[start : start + batch_size])
            if order == "arrival" and arrival_ranks is not None:
                keys = arrival_ranks  # equal ranks get an arbitrary order here; the engine averages over orders
            elif order == "random":
                keys = draw_random_keys(values.shape, generator)
            else:
                keys = torch.arange(values.shape[1], dtype=torch.float64).expand(values.shape)
            features, columns = order_readings(values, keys)
            codes, ordered_values = features.numpy(), gather_values(values, columns).double().numpy()
            scores = survey_records(kernels, model, codes, ordered_values)
            if order == "arrival" and arrival_ranks is not None and data.ties == "hold":
                times = gather_values(arrival_ranks, columns).long().numpy()
                scores = replace(scores, statistics=_score_with_ties_held(model, codes, ordered_values, times))
            total += scores
    return total


def _score_with_ties_held(
    model: DEformer, codes: NDArray[np.int64], values: NDArray[np.float64], times: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the largest prefix statistic of N records whose readings of one time are decided together.

    Args:
        model: The trained model.
        codes: (N, L) feature codes in arrival order, −1 for padding at the end.
        values: (N, L) normalised values.
        times: (N, L) times; readings with the same time are a tie group.

    Returns:
        (N,) statistics, larger is more anomalous; 0 for a record without readings.
    """
    engine = Engine(model, Calibration(np.empty(0), "arrival", tie_policy="hold"), "", (), effort="off")
    record_indexes, positions = np.nonzero(codes >= 0)
    record_ids = [str(index) for index in record_indexes.tolist()]
    event_codes = codes[record_indexes, positions]
    raw_values = model.schema.denormalise(event_codes, values[record_indexes, positions])
    zeros = np.zeros(len(record_ids), np.int32)
    event_times = times[record_indexes, positions]
    batch = EventBatch(record_ids, event_codes.astype(np.int32), raw_values, event_times, zeros, zeros)
    closed = ClosedRecords.concatenate([engine.handle(batch, 0).closed, engine.finish().closed])
    statistic_by_id = dict(zip(closed.record_ids, closed.score.tolist(), strict=True))
    return np.array([statistic_by_id.get(str(index), 0.0) for index in range(len(codes))])


def compute_statistics(
    model: DEformer, data: PreparedTable, rows: NDArray[np.int64], order: Order, seed: int
) -> NDArray[np.float64]:
    """Return the largest prefix statistic of each of N records, (N,); larger is more anomalous."""
    return score_calibration_records(model, data, rows, order, seed).statistics


def calibrate(
    model: DEformer, data: PreparedTable, rows: NDArray[np.int64], order: Order, seed: int, trim: float = 0.0
) -> Calibration:
    """Score calibration records and return the calibration of the alert rule.

    Args:
        model: The trained model. It is put into evaluation mode and back.
        data: The prepared table.
        rows: Row numbers of records that were used neither for training nor for early stopping.
        order: The arrival-order distribution from which each record's order is drawn.
        seed: Seed of the random orders.
        trim: Share of the records with the largest statistics that is removed, as they may be anomalies.
    """
    was_training = model.training
    model.eval()
    scores = score_calibration_records(model, data, sample_rows(rows, seed), order, seed)
    model.train(was_training)
    return build_calibration(scores, data.schema, order, trim, data.ties)


def build_calibration(
    scores: RecordScores, schema: Schema, order: Order, trim: float, ties: TiePolicy = "arrival"
) -> Calibration:
    """Return the calibration of the alert rule.

    Args:
        scores: The scores of the calibration records.
        schema: The features.
        order: The arrival-order distribution in which the records were scored.
        trim: Share of the largest statistics that is removed.
        ties: Whether readings of one record with the same time were scored in their order or together.
    """
    mean_neg_log_p = scores.average_neg_log_p_by_feature(schema.names)
    return Calibration.from_statistics(trim_largest(scores.statistics, trim), order, mean_neg_log_p, ties)


def split_folds(data: PreparedTable, num_folds: int, seed: int) -> Iterator[PreparedTable]:
    """Yield `num_folds` − 1 further splits of a table for cross-conformal calibration.

    In cross-conformal calibration (after Vovk, "Cross-conformal predictors", 2015) each record is scored by a model
    that was trained without it. The first model is trained with the table's own split. For each split that is
    yielded, one more model is trained in the same way. The records that the first split holds out are then training
    records, and each other record is a calibration record exactly once. The number of validation records stays the
    same.

    The statistic of each record has the distribution of a future normal record's statistic. Statistics of different
    folds come from different models, so the false-alarm rate alpha holds only as far as these models score alike.
    """
    is_first_fold, is_left_out = data.split == Split.CALIBRATION, data.split == Split.LEFT_OUT
    rng = np.random.default_rng([seed, 0xF01D])
    fold_by_row = np.zeros(len(data.split), np.int64)
    is_other = ~is_first_fold & ~is_left_out
    fold_by_row[is_other] = rng.permutation(np.arange(int(is_other.sum())) % (num_folds - 1)) + 1
    num_validation = int((data.split == Split.VALIDATION).sum())
    for fold in range(1, num_folds):
        split = np.full(len(data.split), Split.TRAIN, np.uint8)
        split[fold_by_row == fold] = Split.CALIBRATION
        candidates = np.flatnonzero((fold_by_row != fold) & ~is_left_out)
        split[rng.permutation(candidates)[:num_validation]] = Split.VALIDATION
        split[is_left_out] = Split.LEFT_OUT
        yield replace(data, split=split)
