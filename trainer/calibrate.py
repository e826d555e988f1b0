"""The calibration of the alert rule: the largest prefix statistic of held-out normal records in their arrival law."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import MOST, Calibration, Survey, Ties, survey, trim_largest
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.events import Closed, EventBatch
from deformer_stream.errors import ConfigError
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.schema import Schema
from trainer.data import Prepared
from trainer.sampling import arrange, random_keys, read_rows, seeded, take

Order = Literal["arrival", "random", "schema"]
BATCH = 256


def choose_order(wanted: Order | None, data: Prepared) -> Order:
    """The arrival law to calibrate in: as wanted, else the logged arrivals where the table has them, else random."""
    if data.ties == "hold" and wanted not in (None, "arrival"):
        raise ConfigError(f"--order {wanted}: only an order of arrival has ties; leave --order or --ties out")
    if wanted == "arrival" and data.ranks is None:
        raise ConfigError("--order arrival: a wide table knows no order of arrival; use a long table, random or schema")
    return wanted or ("random" if data.ranks is None else "arrival")


def calibration_rows(rows: NDArray[np.int64], seed: int, most: int = MOST) -> NDArray[np.int64]:
    """At most `most` of the rows, a random choice."""
    if len(rows) <= most:
        return rows
    return np.sort(np.random.default_rng([seed, 0xCA11]).choice(rows, most, replace=False))


def score_calibration_records(
    model: DEformer, data: Prepared, rows: NDArray[np.int64], order: Order, seed: int
) -> Survey:
    """Each row in one order drawn from the law. Readings are taken as they are; ties that are held as the engine takes
    them."""
    generator = seeded(seed, 0xCA1B)
    found = survey(model, np.empty((0, 1), np.int64), np.empty((0, 1)))
    for start in range(0, len(rows), BATCH):
        values, ranks = read_rows(data, rows[start : start + BATCH])
        if order == "arrival" and ranks is not None:
            keys = ranks  # with ties held, in any order of each: the engine has its own
        elif order == "random":
            keys = random_keys(values.shape, generator)
        else:
            keys = torch.arange(values.shape[1], dtype=torch.float64).expand(values.shape)
        features, places = arrange(values, keys)
        codes, x = features.numpy(), take(values, places).double().numpy()
        part = survey(model, codes, x, BATCH)
        if order == "arrival" and ranks is not None and data.ties == "hold":
            part = replace(part, statistics=_held(model, codes, x, take(ranks, places).long().numpy()))
        found += part
    return found


def _held(
    model: DEformer, codes: NDArray[np.int64], values: NDArray[np.float64], times: NDArray[np.int64]
) -> NDArray[np.float64]:
    """(N,) M of each record, (N, L) as of `survey`, whose readings of one time are judged together."""
    engine = Engine(model, Calibration(np.empty(0), "arrival", ties="hold"), "", (), effort="off")
    record, place = np.nonzero(codes >= 0)
    ids, code = [str(row) for row in record.tolist()], codes[record, place]
    raw, none = model.schema.denormalise(code, values[record, place]), np.zeros(len(ids), np.int32)
    batch = EventBatch(ids, code.astype(np.int32), raw, times[record, place], none, none)
    closed = Closed.joined([engine.handle(batch, 0).closed, engine.finish().closed])
    peaks = dict(zip(closed.records, closed.score.tolist(), strict=True))
    return np.array([peaks.get(str(row), 0.0) for row in range(len(codes))])


def statistics(
    model: DEformer, data: Prepared, rows: NDArray[np.int64], order: Order, seed: int
) -> NDArray[np.float64]:
    """(N,) M of each row, larger is more anomalous."""
    return score_calibration_records(model, data, rows, order, seed).statistics


def calibrate(
    model: DEformer, data: Prepared, rows: NDArray[np.int64], order: Order, seed: int, trim: float = 0.0
) -> Calibration:
    """Calibrate on the rows, which must have been used neither for training nor for early stopping."""
    was_training = model.training
    model.eval()
    found = score_calibration_records(model, data, calibration_rows(rows, seed), order, seed)
    model.train(was_training)
    return calibrated(found, data.schema, order, trim, data.ties)


def calibrated(found: Survey, schema: Schema, order: Order, trim: float, ties: Ties = "arrival") -> Calibration:
    """trim: share of the largest statistics that are left out."""
    return Calibration.of(trim_largest(found.statistics, trim), order, found.by_feature(schema.names), ties)
