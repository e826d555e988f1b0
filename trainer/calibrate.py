"""The calibration of the alert rule: the largest prefix statistic of held-out normal records in their arrival law."""

from __future__ import annotations

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
from trainer.data import PreparedTable
from trainer.sampling import create_generator, draw_random_keys, gather_values, order_readings, read_rows

Order = Literal["arrival", "random", "schema"]
BATCH = 256


def choose_order(wanted: Order | None, data: PreparedTable) -> Order:
    """The arrival law to calibrate in: as wanted, else the logged arrivals where the table has them, else random."""
    if data.ties == "hold" and wanted not in (None, "arrival"):
        raise ConfigError(f"--order {wanted}: only an order of arrival has ties; leave --order or --ties out")
    if wanted == "arrival" and data.arrival_ranks is None:
        raise ConfigError("--order arrival: a wide table knows no order of arrival; use a long table, random or schema")
    return wanted or ("random" if data.arrival_ranks is None else "arrival")


def sample_rows(rows: NDArray[np.int64], seed: int, max_rows: int = MAX_CALIBRATION_RECORDS) -> NDArray[np.int64]:
    """At most `most` of the rows, a random choice."""
    if len(rows) <= max_rows:
        return rows
    return np.sort(np.random.default_rng([seed, 0xCA11]).choice(rows, max_rows, replace=False))


def score_calibration_records(
    model: DEformer, data: PreparedTable, rows: NDArray[np.int64], order: Order, seed: int
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
    """
    generator = create_generator(seed, 0xCA1B)
    num_features = len(data.schema)
    total = RecordScores(np.empty(0), np.zeros(num_features), np.zeros(num_features, np.int64))
    with attached_kernels(model) as kernels:
        for start in range(0, len(rows), BATCH):
            values, ranks = read_rows(data, rows[start : start + BATCH])
            if order == "arrival" and ranks is not None:
                keys = ranks  # readings of one event time get an arbitrary order here; the engine averages over orders
            elif order == "random":
                keys = draw_random_keys(values.shape, generator)
            else:
                keys = torch.arange(values.shape[1], dtype=torch.float64).expand(values.shape)
            features, places = order_readings(values, keys)
            codes, x = features.numpy(), gather_values(values, places).double().numpy()
            part = survey_records(kernels, model, codes, x)
            if order == "arrival" and ranks is not None and data.ties == "hold":
                part = replace(part, statistics=_held(model, codes, x, gather_values(ranks, places).long().numpy()))
            total += part
    return total


def _held(
    model: DEformer, codes: NDArray[np.int64], values: NDArray[np.float64], times: NDArray[np.int64]
) -> NDArray[np.float64]:
    """(N,) M of each record, (N, L) as of `survey`, whose readings of one time are judged together."""
    engine = Engine(model, Calibration(np.empty(0), "arrival", tie_policy="hold"), "", (), effort="off")
    record, place = np.nonzero(codes >= 0)
    ids, code = [str(row) for row in record.tolist()], codes[record, place]
    raw, none = model.schema.denormalise(code, values[record, place]), np.zeros(len(ids), np.int32)
    batch = EventBatch(ids, code.astype(np.int32), raw, times[record, place], none, none)
    closed = ClosedRecords.concatenate([engine.handle(batch, 0).closed, engine.finish().closed])
    peaks = dict(zip(closed.record_ids, closed.score.tolist(), strict=True))
    return np.array([peaks.get(str(row), 0.0) for row in range(len(codes))])


def compute_statistics(
    model: DEformer, data: PreparedTable, rows: NDArray[np.int64], order: Order, seed: int
) -> NDArray[np.float64]:
    """(N,) M of each row, larger is more anomalous."""
    return score_calibration_records(model, data, rows, order, seed).statistics


def calibrate(
    model: DEformer, data: PreparedTable, rows: NDArray[np.int64], order: Order, seed: int, trim: float = 0.0
) -> Calibration:
    """Calibrate on the rows, which must have been used neither for training nor for early stopping."""
    was_training = model.training
    model.eval()
    found = score_calibration_records(model, data, sample_rows(rows, seed), order, seed)
    model.train(was_training)
    return build_calibration(found, data.schema, order, trim, data.ties)


def build_calibration(found: RecordScores, schema: Schema, order: Order, trim: float, ties: TiePolicy = "arrival") -> Calibration:
    """trim: share of the largest statistics that are left out."""
    return Calibration.from_statistics(trim_largest(found.statistics, trim), order, found.average_neg_log_p_by_feature(schema.names), ties)
