"""Small models and random records for tests.

Most tests need some model, not a good one: `make_small_model` has random weights. Tests of imputation and explanations
need a model that has learned something: `train_linear_model` learns y = 2x + 1 in a few seconds.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream import model_store
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.schema import Feature, Schema
from tests.engine.max_statistics import compute_max_statistics
from tests.engine.random_models import draw_records, make_model, normalise_values

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
CONFIG = ModelConfig(d_model=64, layers=2, heads=4, feedforward=32, mixtures=3, embedding=6, hidden=(16,))
"""A small model with widths that the compiled kernels support. Programs that score with it start without PyTorch, and
its scores do not depend on which readings are scored together."""
TRAINING_SUMMARY = {"epochs": 3, "held_out_log_likelihood": -4.25, "data_fingerprint": "0123", "curve": [1.0, 0.5]}


def make_small_model(seed: int = 0) -> DEformer:
    """Return a model of `SCHEMA` with random weights, whose conditionals depend strongly on the earlier readings."""
    return make_model(SCHEMA, CONFIG, seed, torch.float32)


def make_calibration(
    model: DEformer, num_records: int = 199, seed: int = 7, arrival_order: str = "random"
) -> Calibration:
    """Return a calibration of the model on random records in random orders.

    Args:
        model: The model that scores the records.
        num_records: Number of calibration records.
        seed: Seed of the records.
        arrival_order: The name of the arrival order that the calibration states.
    """
    codes, raw_values = draw_records(model.schema, num_records, seed, missing_share=0.1)
    statistics = compute_max_statistics(model, codes, normalise_values(model.schema, codes, raw_values))
    return Calibration.from_statistics(statistics, arrival_order)


def write_model(directory: Path, seed: int = 0, arrival_order: str = "random") -> Path:
    """Write a model directory as `deformer-train` does, with a calibrated small model, and return its path."""
    model = make_small_model(seed)
    calibration = make_calibration(model, arrival_order=arrival_order)
    model_store.write(directory, model, calibration, TRAINING_SUMMARY, "<!doctype html><p>report</p>")
    return directory


def copy_model_with_label(model_dir: Path, directory: Path, label: str, normal: str) -> Path:
    """Write a copy of a model that states which column and value of it chose the rows of its training; return its path.

    Args:
        model_dir: The model.
        directory: The folder of the copy.
        label: The option `--label` of the training.
        normal: The option `--normal`.
    """
    loaded = model_store.read(model_dir)
    training = {"options": {"label": label, "normal": normal}}
    model_store.write(directory, loaded.model, loaded.calibration, training, "")
    return directory


def draw_linear_records(n: int, seed: int) -> NDArray[np.float64]:
    """Draw n records, (n, 3): x is standard normal, y is 2x + 1 plus noise, and the sign of x is a label code."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n)
    return np.stack([x, 2 * x + 1 + 0.1 * rng.normal(size=n), (x > 0).astype(float)], 1)


def train_linear_model() -> DEformer:
    """Return a model that was trained on `draw_linear_records` for a few seconds, once in a process."""
    return deepcopy(_train_linear_model())


@cache
def _train_linear_model(steps: int = 250) -> DEformer:
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
    raw = draw_linear_records(steps * 128, 2)
    for step in range(steps):
        rows = raw[128 * step : 128 * (step + 1)]
        codes = np.argsort(rng.random(rows.shape), 1)
        values = schema.normalise(codes, np.take_along_axis(rows, codes, 1))
        loss = -model.log_prob(torch.from_numpy(codes), torch.from_numpy(values).float()).sum(1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


def draw_rows(schema: Schema, num_records: int, seed: int, missing_share: float = 0.1) -> list[dict[str, float | str]]:
    """Draw random records as dictionaries from feature name to raw value or label text.

    The order of a dictionary is the record's order of arrival.

    Args:
        schema: The features.
        num_records: Number of records.
        seed: Seed of the records.
        missing_share: Probability that a reading is missing.
    """
    codes, raw_values = draw_records(schema, num_records, seed, missing_share)
    rows = []
    for record_codes, record_values in zip(codes.tolist(), raw_values.tolist(), strict=True):
        row: dict[str, float | str] = {}
        for code, value in zip(record_codes, record_values, strict=True):
            if code >= 0:
                labels = schema.features[code].labels
                row[schema.names[code]] = (*labels, "unheard of")[int(value)] if labels else value
        rows.append(row)
    return rows
