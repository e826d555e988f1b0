"""The calibration of the alert rule: the largest prefix statistic of held-out normal records in their arrival law."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.core.conformal import MOST, Calibration, Survey, survey, trimmed
from deformer_stream.core.model import DEformer
from deformer_stream.core.schema import Schema
from deformer_stream.errors import ConfigError
from trainer.data import Prepared
from trainer.sampling import arrange, random_keys, read_rows, seeded, take

Order = Literal["arrival", "random", "schema"]
BATCH = 256


def choose_order(wanted: Order | None, data: Prepared) -> Order:
    """The arrival law to calibrate in: as wanted, else the logged arrivals where the table has them, else random."""
    if wanted == "arrival" and data.ranks is None:
        raise ConfigError("--order arrival: a wide table knows no order of arrival; use a long table, random or schema")
    return wanted or ("random" if data.ranks is None else "arrival")


def calibration_rows(rows: NDArray[np.int64], seed: int, most: int = MOST) -> NDArray[np.int64]:
    """At most `most` of the rows, a random choice."""
    if len(rows) <= most:
        return rows
    return np.sort(np.random.default_rng([seed, 0xCA11]).choice(rows, most, replace=False))


def surveyed(model: DEformer, data: Prepared, rows: NDArray[np.int64], order: Order, seed: int) -> Survey:
    """Each row in one order drawn from the law. Readings are taken as they are."""
    generator = seeded(seed, 0xCA1B)
    found = survey(model, np.empty((0, 1), np.int64), np.empty((0, 1)))
    for start in range(0, len(rows), BATCH):
        values, ranks = read_rows(data, rows[start : start + BATCH])
        if order == "arrival" and ranks is not None:
            keys = ranks
        elif order == "random":
            keys = random_keys(values.shape, generator)
        else:
            keys = torch.arange(values.shape[1], dtype=torch.float64).expand(values.shape)
        features, places = arrange(values, keys)
        found += survey(model, features.numpy(), take(values, places).double().numpy(), BATCH)
    return found


def statistics(
    model: DEformer, data: Prepared, rows: NDArray[np.int64], order: Order, seed: int
) -> NDArray[np.float64]:
    """(N,) M of each row, larger is more anomalous."""
    return surveyed(model, data, rows, order, seed).statistics


def calibrate(
    model: DEformer, data: Prepared, rows: NDArray[np.int64], order: Order, seed: int, trim: float = 0.0
) -> Calibration:
    """Calibrate on the rows, which must have been used neither for training nor for early stopping."""
    was_training = model.training
    model.eval()
    found = surveyed(model, data, calibration_rows(rows, seed), order, seed)
    model.train(was_training)
    return calibrated(found, data.schema, order, trim)


def calibrated(found: Survey, schema: Schema, order: Order, trim: float) -> Calibration:
    """trim: share of the largest statistics that are left out."""
    return Calibration.of(trimmed(found.statistics, trim), order, found.by_feature(schema.names))
