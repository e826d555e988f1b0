"""Small models without training, and one that knows a line: for tests of everything around the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream import model_store
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.calibration.torch_scoring import compute_max_statistics
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.schema import Feature, Schema
from tests.engine.worlds import model_of, normalised, records_of

SCHEMA = Schema(
    (
        Feature("temperature", "continuous", location=20.0, scale=5.0, quantum=0.1, low=5.0, high=35.0),
        Feature("pressure", "continuous", location=1.0, scale=0.2, low=0.3, high=1.8, reason="numbers"),
        Feature("vibration", "continuous", location=0.0, scale=3.0, low=-9.0, high=9.0),
        Feature("state", "discrete", labels=("idle", "run", "stop"), reason="text"),
        Feature("valve", "discrete", labels=("false", "true"), reason="boolean"),
        Feature("load", "continuous", context=True, location=50.0, scale=20.0, low=0.0, high=100.0),
    )
)
CONFIG = ModelConfig(d_model=16, layers=2, heads=2, feedforward=32, mixtures=3, embedding=6, hidden=(16,))
TRAINING = {"epochs": 3, "held_out_log_likelihood": -4.25, "data_fingerprint": "0123", "curve": [1.0, 0.5]}


def small_model(seed: int = 0) -> DEformer:
    """Random weights; conditionals that differ from reading to reading."""
    return model_of(SCHEMA, CONFIG, seed, torch.float32)


def calibration_of(model: DEformer, n: int = 199, seed: int = 7, order: str = "random") -> Calibration:
    """From random records in random orders."""
    codes, values = records_of(model.schema, n, seed, missing=0.1)
    return Calibration.from_statistics(compute_max_statistics(model, codes, normalised(model.schema, codes, values)), order)


def write_model(directory: Path, seed: int = 0, order: str = "random") -> Path:
    """A model directory as `deformer-train` would have written it."""
    model = small_model(seed)
    model_store.write(directory, model, calibration_of(model, order=order), TRAINING, "<!doctype html><p>report</p>")
    return directory


def linear_records(n: int, seed: int) -> NDArray[np.float64]:
    """(n, 3): x normal, y = 2x + 1 with a little noise, and the sign of x as label code."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n)
    return np.stack([x, 2 * x + 1 + 0.1 * rng.normal(size=n), (x > 0).astype(float)], 1)


def linear_model(steps: int = 250) -> DEformer:
    """Trained for a few seconds on `linear_records`."""
    torch.manual_seed(0)
    schema = Schema(
        (
            Feature("x", "continuous", low=-4.0, high=4.0),
            Feature("y", "continuous", location=1.0, scale=2.0, low=-7.0, high=9.0),
            Feature("sign", "discrete", labels=("minus", "plus")),
        )
    )
    model = DEformer(schema, ModelConfig(d_model=32, layers=2, heads=2, feedforward=64, mixtures=4, hidden=(32,)))
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    rng = np.random.default_rng(1)
    raw = linear_records(steps * 128, 2)
    for step in range(steps):
        rows = raw[128 * step : 128 * (step + 1)]
        codes = np.argsort(rng.random(rows.shape), 1)
        values = schema.normalise(codes, np.take_along_axis(rows, codes, 1))
        loss = -model.log_prob(torch.from_numpy(codes), torch.from_numpy(values).float()).sum(1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


def rows_of(schema: Schema, n: int, seed: int, missing: float = 0.1) -> list[dict[str, float | str]]:
    """Records as mappings in random orders of arrival, raw values and label texts."""
    codes, values = records_of(schema, n, seed, missing)
    rows = []
    for order, numbers in zip(codes.tolist(), values.tolist(), strict=True):
        row: dict[str, float | str] = {}
        for code, number in zip(order, numbers, strict=True):
            if code >= 0:
                labels = schema.features[code].labels
                row[schema.names[code]] = (*labels, "unheard of")[int(number)] if labels else number
        rows.append(row)
    return rows
