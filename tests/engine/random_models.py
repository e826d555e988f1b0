"""Random schemas, models and records for property tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from deformer_stream.kernels.library import load_library
from deformer_stream.model.deformer import AlertDistanceTensors, DEformer, ModelConfig
from deformer_stream.model.positions import compute_positions
from deformer_stream.model.schema import Feature, Schema
from deformer_stream.model.time_slots import expand_time_slots
from deformer_stream.model.windows import Window


@st.composite
def schemas(draw: st.DrawFn, max_features: int = 60, context: bool = False) -> Schema:
    """Draw a schema with 1 to `max_features` features: continuous, discrete or mixed.

    Some continuous features are cyclic. Some schemas have three time slots, so that a sensor reports several times.

    Args:
        draw: Hypothesis' draw function.
        max_features: Largest number of features.
        context: Whether some continuous features are context, which conditions the model and is not scored.
    """
    n = draw(st.integers(1, max_features))
    kinds = draw(st.sampled_from(["continuous", "discrete", "mixed"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    features = []
    for i in range(n):
        is_discrete = kinds == "discrete" or (kinds == "mixed" and rng.random() < 0.5)
        coordinates = (float(i % 7), float(i // 7))
        if is_discrete:
            labels = tuple(str(k) for k in range(int(rng.integers(1, 9))))
            features.append(Feature(f"f{i}", "discrete", coordinates=coordinates, labels=labels))
        else:
            is_context = context and n > 1 and rng.random() < 0.2
            location, scale = float(rng.normal()), float(rng.uniform(0.1, 10))
            period = 4 * scale if rng.random() < 0.15 else None
            features.append(Feature(f"f{i}", "continuous", is_context, coordinates, location, scale, period=period))
    schema, num_slots = Schema(tuple(features)), draw(st.sampled_from([1, 3]))
    if 1 < num_slots * n <= max_features:
        return expand_time_slots(schema, Window(60_000_000, num_slots))
    return schema


PRIORS: tuple[dict[str, int], ...] = ({}, {"gaussians": 3}, {"neighbors": 2, "process_rank": 2, "process_scales": 1})
"""Hyperparameters of the Gaussian prior: none, a mixture, and the factor analysis of wide records."""


def make_config(prior: dict[str, int], alert_prior: bool = False, **hyperparameters: Any) -> ModelConfig:
    """Return hyperparameters, with those of the Gaussian prior in a dict of their own.

    Args:
        prior: Hyperparameters of the prior.
        alert_prior: Whether the prior is a term of the alert; ignored without a prior.
        hyperparameters: The others.
    """
    return ModelConfig(**hyperparameters, **prior, alert_prior=alert_prior and bool(prior))


configs = st.builds(
    make_config,
    prior=st.sampled_from(PRIORS),
    d_model=st.sampled_from([16, 32]),
    layers=st.integers(1, 3),
    heads=st.sampled_from([1, 4]),
    feedforward=st.just(48),
    mixtures=st.integers(1, 5),
    norm=st.sampled_from(["pre", "post"]),
    activation=st.sampled_from(["gelu", "relu"]),
    identity=st.sampled_from(["embedding", "coordinates", "both"]),
    memory=st.sampled_from(["all", "values"]),
    tokens=st.sampled_from(["pair", "single"]),
    hidden=st.sampled_from([(24,), (16, 24)]),
    alert_exemplars=st.sampled_from([0, 5]),
    alert_prior=st.booleans(),
)
"""Hyperparameters of small models."""


def make_model(schema: Schema, config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> DEformer:
    """Return a model with random weights.

    The weights of the head are enlarged, so that the conditionals differ from reading to reading.
    """
    torch.manual_seed(seed)
    if not schema.is_linear.any():  # no Gaussian prior
        config = replace(config, alert_prior=False)
    model = DEformer(schema, config).to(dtype).eval()
    with torch.no_grad():
        model.head.project.weight.mul_(5.0)
        if model.gaussians is not None:
            shape = model.gaussians.covariances.shape
            model.gaussians.means.copy_(torch.randn(shape[:-1]))
            mixing = torch.randn(shape, dtype=torch.float64) / shape[-1] ** 0.5
            model.gaussians.covariances.copy_(mixing @ mixing.mT + 0.2 * torch.eye(shape[-1]))
        if model.process is not None:
            model.process.means.copy_(torch.randn(model.process.means.shape))
            model.process.factors.copy_(torch.randn(model.process.factors.shape))
            model.process.noise.copy_(0.3 + torch.rand(model.process.noise.shape))
    if model.alert_distance is not None:
        fill_alert_distance(model.alert_distance, schema, seed)
        model.distance_library = load_library(False)
    if model.alert_prior is not None:
        rng, shape = np.random.default_rng([seed, 0xA9]), model.alert_prior.slopes.shape
        model.alert_prior.starts.copy_(torch.from_numpy(rng.uniform(0.0, 0.5, shape)))
        model.alert_prior.slopes.copy_(torch.from_numpy(rng.uniform(0.2, 1.0, shape)))
    return model


def fill_alert_distance(tensors: AlertDistanceTensors, schema: Schema, seed: int) -> None:
    """Store random records, some of which lack features, and distances that random records exceed at times."""
    rng, num_stored = np.random.default_rng([seed, 0xD1]), tensors.positions.shape[1]
    by_feature = np.stack(
        [
            rng.integers(0, len(feature.labels) + 1, num_stored)
            if feature.kind == "discrete"
            else rng.standard_normal(num_stored)
            for feature in schema.features
        ]
    )
    deviations = rng.uniform(0.5, 2.0, len(schema)).astype(np.float32)
    positions = compute_positions(schema, by_feature.T).T / deviations[:, None]
    num_counted = len(tensors.slopes)
    for name, array in (
        ("positions", positions),
        ("known", rng.random(positions.shape) < 0.9),
        ("deviations", deviations),
        ("starts", rng.uniform(0.3, 0.8, num_counted) * np.arange(1, num_counted + 1)),
        ("slopes", rng.uniform(0.5, 2.0, num_counted)),
    ):
        tensor = getattr(tensors, name)
        tensor.copy_(torch.from_numpy(array).to(tensor.dtype))


def draw_records(
    schema: Schema, num_records: int, seed: int, missing_share: float = 0.0
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return N records with random values in random orders of arrival.

    Args:
        schema: F features.
        num_records: N.
        seed: Seed of the random numbers.
        missing_share: Probability that a record has no reading of a feature. The first feature is never missing.

    Returns:
        (N, F) feature codes, with -1 as padding at the end; and (N, F) raw values, among them codes of labels that the
        model does not have.
    """
    rng = np.random.default_rng(seed)
    F = len(schema)
    sort_keys = rng.random((num_records, F))
    is_missing = rng.random((num_records, F)) < missing_share
    is_missing[:, 0] = False
    codes = np.argsort(np.where(is_missing, np.inf, sort_keys), 1)
    num_present = F - is_missing.sum(1)
    raw = np.empty((num_records, F))
    for f, feature in enumerate(schema.features):
        if feature.kind == "discrete":
            raw[:, f] = rng.integers(0, len(feature.labels) + 1, num_records)
        else:
            raw[:, f] = feature.location + feature.scale * rng.standard_t(3, num_records)
    values = np.take_along_axis(raw, codes, 1)
    codes = np.where(np.arange(F) < num_present[:, None], codes, -1)
    return codes, values


def normalise_values(schema: Schema, codes: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return raw values in the model's normalised units; padding (code -1) is treated as a value of feature 0."""
    return schema.normalise(np.maximum(codes, 0), values)
