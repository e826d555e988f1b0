"""Models that are exact densities of simulated irregular readings, for tests."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.engine.engine import Engine
from deformer_stream.engine.events import EventBatch
from deformer_stream.kernels.library import load_library
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.reading_times import ReadingTimes
from deformer_stream.model.schema import Feature, Schema

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
NUM_SENSORS, NUM_READINGS, DURATION = 6, 50, 3600.0
PROCESS_SCHEMA = Schema(
    tuple(Feature(f"sensor{i}", "continuous", unit="bar") for i in range(NUM_SENSORS)),
    reading_times=ReadingTimes(3_600_000_000, 1_000_000),
)
LEVEL, SLOW, OWN, NOISE = 0.6, 0.3, 0.08, 0.0201
"""Variances: of the level of a record, of what its sensors have in common, of each sensor's own, and of the noise."""
SLOW_SCALE, OWN_SCALE = 1000.0, 18_000.0
"""Time scales of the second and the third in seconds."""
EQUAL_SHARES = (1 / NUM_SENSORS,) * NUM_SENSORS
EXACT = ModelConfig(
    d_model=64,
    layers=1,
    heads=2,
    feedforward=64,
    mixtures=3,
    embedding=4,
    hidden=(8,),
    neighbors=16,
    process_rank=1,
    process_scales=3,
    context_recent=16,
    context_block=32,
)


@cache
def make_exact_model(neighbors: int = 16) -> DEformer:
    """Return a model whose network has not been trained, so that its density is that of the simulated process."""
    torch.manual_seed(0)
    model = DEformer(PROCESS_SCHEMA, replace(EXACT, neighbors=neighbors)).eval()
    process = model.process
    assert process is not None
    process.factors.zero_()
    process.factors[0], process.factors[1] = LEVEL**0.5, SLOW**0.5
    process.deviations.zero_()
    process.deviations[2] = OWN**0.5
    process.noise.fill_((NOISE - 1e-4) ** 0.5)
    process.scales.copy_(torch.tensor([1e9, SLOW_SCALE, OWN_SCALE]))
    process.outlier_share.fill_(1e-4)
    return model


def simulate(
    rng: np.random.Generator, num_readings: int = NUM_READINGS, shares: tuple[float, ...] = EQUAL_SHARES
) -> tuple[Ints, Floats, Floats]:
    """Return codes, values and ages of a record of the process, in which sensors have these shares of the readings."""
    ages = np.sort(rng.uniform(0, DURATION, num_readings)).round(3)
    codes = rng.choice(NUM_SENSORS, num_readings, p=shares)
    lag = np.abs(ages[:, None] - ages)
    covariance = LEVEL + SLOW * np.exp(-lag / SLOW_SCALE) + NOISE * np.eye(num_readings)
    covariance += (codes[:, None] == codes) * OWN * np.exp(-lag / OWN_SCALE)
    values: Floats = np.linalg.cholesky(covariance) @ rng.normal(size=num_readings)
    return codes, values, ages


def make_process_batch(records: list[tuple[Ints, Floats, Floats]]) -> EventBatch:
    lengths = [len(codes) for codes, _, _ in records]
    ids = [str(i) for i, length in enumerate(lengths) for _ in range(length)]
    codes, values, ages = (np.concatenate(parts) for parts in zip(*records, strict=True))
    times = np.round(1e6 * ages).astype(np.int64)
    return EventBatch(
        ids,
        codes.astype(np.int32),
        values,
        times,
        np.arange(len(ids), dtype=np.int32),
        np.zeros(len(ids), np.int32),
    )


def compute_statistics(records: list[tuple[Ints, Floats, Floats]]) -> Floats:
    """Return the largest statistic of each record."""
    model = make_exact_model()
    model.kernel_library = load_library(False)
    engine = Engine(model, Calibration(np.empty(0), "arrival"), "process", (), effort="off")
    engine.handle(make_process_batch(records), 0)
    closed = engine.finish().closed
    model.kernel_library = None
    score_by_id = dict(zip(closed.record_ids, closed.score.tolist(), strict=True))
    return np.array([score_by_id[str(i)] for i in range(len(records))])
