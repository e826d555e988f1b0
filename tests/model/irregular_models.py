"""Models of irregular readings with random weights, and their readings, for tests."""

from __future__ import annotations

import numpy as np
import torch

from deformer_stream.model.deformer import DEformer, KVCacheView, ModelConfig
from deformer_stream.model.gaussian_process import GaussianProcessPrior
from deformer_stream.model.reading_times import ReadingTimes
from deformer_stream.model.schema import Feature, Schema

TIMES = ReadingTimes(duration=48 * 3_600_000_000, resolution=60_000_000)
SCHEMA = Schema(
    (
        *(Feature(f"sensor{i}", "continuous") for i in range(3)),
        Feature("direction", "continuous", period=360.0, scale=90.0),
        Feature("mode", "discrete", labels=("off", "on")),
    ),
    reading_times=TIMES,
)


def make_config(memory: str = "values", neighbors: int = 3, decay: float = 1.0) -> ModelConfig:
    return ModelConfig(
        d_model=16,
        layers=2,
        heads=2,
        feedforward=32,
        mixtures=3,
        embedding=4,
        hidden=(8,),
        memory=memory,  # type: ignore[arg-type]
        neighbors=neighbors,
        neighbor_decay=decay,
        process_rank=2 if neighbors else 0,
        process_scales=3 if neighbors else 0,
    )


def make_irregular_model(config: ModelConfig, seed: int) -> DEformer:
    """Return a model whose weights and Gaussian process are random, in float64."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = DEformer(SCHEMA, config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    if model.process is not None:
        randomize_process(model.process, generator)
    return model


def randomize_process(process: GaussianProcessPrior, generator: torch.Generator) -> None:
    def draw(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64)

    process.means.copy_(0.3 * draw(process.means))
    process.factors.copy_(0.5 * draw(process.factors))
    process.deviations.copy_(0.3 * draw(process.deviations).abs())
    process.noise.copy_(0.2 + 0.2 * draw(process.noise).abs())
    process.scales.copy_(torch.tensor([600.0, 10_000.0, 1e6], dtype=torch.float64)[: len(process.scales)])


def draw_contexts(num_records: int, num_readings: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, values and ages of contexts whose sensors report several times; some readings are late."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, len(SCHEMA), (num_records, num_readings))
    values = rng.normal(size=codes.shape)
    values[codes == 4] = rng.integers(0, 3, int((codes == 4).sum()))  # label codes; 2 is that of an unseen label
    ages = np.sort(rng.integers(0, 2880, codes.shape), 1) * 60.0
    ages += np.where(rng.random(codes.shape) < 0.2, -7200.0, 0.0)
    return torch.from_numpy(codes), torch.from_numpy(values), torch.from_numpy(ages)


def log_prob_by_steps(
    model: DEformer, codes: torch.Tensor, values: torch.Tensor, ages: torch.Tensor, cuts: list[int]
) -> torch.Tensor:
    parts: list[torch.Tensor] = []
    cache: KVCacheView | None = None
    for start, stop in zip([0, *cuts], [*cuts, codes.shape[1]], strict=True):
        c, v, a = codes[:, start:stop], values[:, start:stop], ages[:, start:stop]
        output = model.prefill(c, v, a) if cache is None else model.forward_cached(c, v, cache, ages=a)
        parts.append(output.conditional.log_prob(v))
        assert output.readings is not None
        assert output.ages is not None
        keys, cached_values, readings, all_ages = output.keys, output.values, output.readings, output.ages
        if cache is not None:
            assert cache.readings is not None
            assert cache.ages is not None
            keys = [torch.cat(pair, 2) for pair in zip(cache.keys, keys, strict=True)]
            cached_values = [torch.cat(pair, 2) for pair in zip(cache.values, cached_values, strict=True)]
            readings, all_ages = torch.cat([cache.readings, readings], 1), torch.cat([cache.ages, all_ages], 1)
        cache = KVCacheView(keys, cached_values, torch.full((len(codes),), keys[0].shape[2]), readings, all_ages)
    return torch.cat(parts, 1)
