"""Calibrate the alert rule of a model of irregular readings, with the engine that will score the stream.

The calibration records are sent through an `Engine` as events in the order of their times. So their anomaly scores are
those that the same records would get in a stream, with the same contexts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from deformer_stream.calibration.calibration_scores import CalibrationScores
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.cusum import CusumScale
from deformer_stream.calibration.torch_scoring import sum_neg_log_p
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.events import ClosedRecords, EventBatch, WindowMembership
from deformer_stream.kernels.cpu import attached_kernels
from deformer_stream.model.deformer import DEformer
from trainer.examples import BlockExamples, Ints
from trainer.irregular_table import IrregularTable, find_repetitions

MAX_READINGS_PER_CALL = 50_000
"""Readings that are sent to the engine at once. It bounds memory and does not change any score."""


def score_irregular_records(
    model: DEformer,
    table: IrregularTable,
    rows: Ints,
    batch_size: int = 64,
    cusum_scale: CusumScale | None = None,
    should_continue: Callable[[int], bool] = lambda num_done: True,
) -> NDArray[np.float64]:
    """Return the largest prefix statistic of each record, larger is more anomalous.

    A prefix statistic is the anomaly score of a record after its first k readings.

    Args:
        model: The trained model, in evaluation mode.
        table: The table.
        rows: (N,) row numbers of the records.
        batch_size: Number of records that are scored together at most.
        cusum_scale: The scale of the cumulative sums from which the statistics are computed; None to combine p-values.
        should_continue: Called before each batch with the number of records that are scored. If it returns False, no
            more records are scored.

    Returns:
        (N,) statistics in the order of `rows`, or those of the first ones; 0 for a record without readings.
    """
    parts: list[NDArray[np.float64]] = [np.empty(0)]
    with attached_kernels(model):
        start = 0
        while start < len(rows) and should_continue(start):
            num_readings = np.cumsum(table.num_readings[rows[start : start + batch_size]])
            stop = start + max(1, int(np.searchsorted(num_readings, MAX_READINGS_PER_CALL, side="right")))
            parts.append(_score_batch(model, table, rows[start:stop], cusum_scale))
            start = stop
    return np.concatenate(parts)


def _score_batch(
    model: DEformer, table: IrregularTable, rows: Ints, cusum_scale: CusumScale | None
) -> NDArray[np.float64]:
    """Return the largest prefix statistic of each of a few records, (N,)."""
    # Alerts are not needed (no alphas), nor explanations of them (effort "off"), nor p-values (a calibration without
    # scores).
    calibration = Calibration(np.empty(0), "arrival", cusum_scale=cusum_scale)
    engine = Engine(model, calibration, fingerprint="", alpha=(), effort="off")
    closed = []
    for batch in create_event_batches(table, rows):
        closed.append(engine.handle(batch, now=0).closed)
    closed.append(engine.finish().closed)
    ended = ClosedRecords.concatenate(closed)
    statistic_by_id = dict(zip(ended.record_ids, ended.score.tolist(), strict=True))
    return np.array([statistic_by_id.get(str(row), 0.0) for row in rows.tolist()])


def create_event_batches(table: IrregularTable, rows: Ints) -> list[EventBatch]:
    """Return the readings of records as events, record after record, in batches of limited size.

    The id of a record is its row number.

    Args:
        table: The table.
        rows: (N,) row numbers of the records.
    """
    schema = table.schema
    readings = np.concatenate([np.arange(table.offsets[row], table.offsets[row + 1]) for row in rows.tolist()])
    record = np.repeat(rows, table.num_readings[rows])
    codes = table.codes[readings]
    values = schema.denormalise(codes, table.values[readings].astype(np.float64))  # events have raw units
    times = table.origins[record] + np.round(1e6 * table.ages[readings]).astype(np.int64)
    # Readings that differed only beyond float32 are equal here. They must not be rejected as repetitions.
    while (is_repetition := find_repetitions(record, codes, values, times)).any():
        repeated = values[is_repetition]
        values[is_repetition] = np.nextafter(repeated, np.where(repeated > 0.0, -np.inf, np.inf))
    batches = []
    for start in range(0, len(readings), MAX_READINGS_PER_CALL):
        part = slice(start, start + MAX_READINGS_PER_CALL)
        ids = [str(row) for row in record[part].tolist()]
        windows = None
        if schema.window is not None:
            origins = table.origins[record[part]]
            windows = WindowMembership(ids, origins + schema.window.width, origins)
        zeros = np.zeros(len(ids), np.int32)  # all events are of message 0 and partition 0
        features = codes[part].astype(np.int32)
        batches.append(EventBatch(ids, features, values[part], times[part], zeros, zeros, windows=windows))
    return batches


def average_neg_log_p(
    model: DEformer,
    examples: BlockExamples,
    indexes: Ints,
    batch_size: int,
    should_continue: Callable[[int], bool] = lambda num_done: True,
) -> CalibrationScores:
    """Return the sums of −ln p over the readings of each feature, where p is the highest-density p-value of a reading.

    Args:
        model: The trained model, in evaluation mode.
        examples: The blocks of the records.
        indexes: Indexes of the blocks whose readings are used.
        batch_size: Number of blocks that are scored together.
        should_continue: Called before each batch with the number of blocks that are done. If it returns False, the sums
            cover only those.

    Returns:
        The sums, without statistics of records.
    """
    num_features = len(model.schema)
    total = CalibrationScores(np.empty(0), np.zeros(num_features), np.zeros(num_features, np.int64))
    for start in range(0, len(indexes), batch_size):
        if not should_continue(start):
            break
        batch = examples.gather_stored(indexes[start : start + batch_size])
        codes, values, ages = (tensor.numpy() for tensor in (batch.features, batch.values, batch.ages))
        total += sum_neg_log_p(model, codes, values, ages, examples.find_scored(batch), batch_size)
    return total
