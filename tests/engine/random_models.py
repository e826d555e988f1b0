"""Random schemas, models and records for the laws."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.schema import Feature, Schema
from deformer_stream.model.time_slots import expand_time_slots
from deformer_stream.model.windows import Window


@st.composite
def schemas(draw: st.DrawFn, most: int = 60, context: bool = False) -> Schema:
    """Continuous, discrete or mixed, 1 to `most` features, some of them cycles, some those of sensors that report
    several times."""
    n = draw(st.integers(1, most))
    kinds = draw(st.sampled_from(["continuous", "discrete", "mixed"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    features = []
    for i in range(n):
        discrete = kinds == "discrete" or (kinds == "mixed" and rng.random() < 0.5)
        coordinates = (float(i % 7), float(i // 7))
        if discrete:
            labels = tuple(str(k) for k in range(int(rng.integers(1, 9))))
            features.append(Feature(f"f{i}", "discrete", coordinates=coordinates, labels=labels))
        else:
            hidden = context and n > 1 and rng.random() < 0.2
            location, scale = float(rng.normal()), float(rng.uniform(0.1, 10))
            period = 4 * scale if rng.random() < 0.15 else None
            features.append(Feature(f"f{i}", "continuous", hidden, coordinates, location, scale, period=period))
    schema, slots = Schema(tuple(features)), draw(st.sampled_from([1, 3]))
    return expand_time_slots(schema, Window(60_000_000, slots)) if 1 < slots * n <= most else schema


configs = st.builds(
    ModelConfig,
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
    gaussians=st.sampled_from([0, 3]),
)


def model_of(schema: Schema, config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> DEformer:
    """Random weights, with a head large enough that conditionals differ from reading to reading."""
    torch.manual_seed(seed)
    model = DEformer(schema, config).to(dtype).eval()
    with torch.no_grad():
        model.head.project.weight.mul_(5.0)
        if model.gaussians is not None:
            shape = model.gaussians.covariances.shape
            model.gaussians.means.copy_(torch.randn(shape[:-1]))
            mixing = torch.randn(shape, dtype=torch.float64) / shape[-1] ** 0.5
            model.gaussians.covariances.copy_(mixing @ mixing.mT + 0.2 * torch.eye(shape[-1]))
    return model


def records_of(
    schema: Schema, n: int, seed: int, missing: float = 0.0
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """N records in random orders: codes (N, F) with −1 padding at the end, and raw values; unseen labels among them."""
    rng = np.random.default_rng(seed)
    F = len(schema)
    keys = rng.random((n, F))
    gone = rng.random((n, F)) < missing
    gone[:, 0] = False
    codes = np.argsort(np.where(gone, np.inf, keys), 1)
    present = F - gone.sum(1)
    raw = np.empty((n, F))
    for f, feature in enumerate(schema.features):
        if feature.kind == "discrete":
            raw[:, f] = rng.integers(0, len(feature.labels) + 1, n)
        else:
            raw[:, f] = feature.location + feature.scale * rng.standard_t(3, n)
    values = np.take_along_axis(raw, codes, 1)
    codes = np.where(np.arange(F) < present[:, None], codes, -1)
    return codes, values


def normalised(schema: Schema, codes: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    return schema.normalise(np.maximum(codes, 0), values)
