"""A training step keeps all tensors on one device; the GPU is simulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from deformer_stream.model.deformer import DEformer, ModelConfig
from tests.engine.fake_gpu import fake_gpu, move_to_fake_gpu
from tests.trainer.tables import mixed, prepared
from trainer import gaussian_prior
from trainer.budget import TimeBudget
from trainer.data import Split
from trainer.fit import Recipe, TrainingRun
from trainer.sampling import Noise, OrderedSamples, create_generator, draw_samples
from trainer.settings import Optimizer

CONFIG = ModelConfig(d_model=64, layers=2, heads=4, feedforward=96, mixtures=3, hidden=(16,), dropout=0.1)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # to copy a model
@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
@pytest.mark.parametrize("change", [{}, {"gaussians": 1}, {"tokens": "single"}, {"memory": "all"}])
def test_training_step_runs_on_a_simulated_gpu(tmp_path: Path, optimizer: Optimizer, change: dict[str, object]) -> None:
    """Low precision and dropout, with and without prior. The backward pass is replaced, as it needs a real GPU."""
    data = prepared(tmp_path, mixed(np.random.default_rng(3), 200))
    priors = gaussian_prior.fit_priors(data, 1, 0)
    assert priors is not None
    rows = data.select_rows(Split.TRAIN)[:32]
    drawn = draw_samples(data, rows, Noise.from_schema(data.schema, 0.05, 0.01), 0.5, create_generator(1))
    arranged = drawn.sort_readings()
    recipe = Recipe(batch=32, learning_rate=1e-3, epochs=1, optimizer=optimizer)
    model = DEformer(data.schema, replace(CONFIG, **change))  # type: ignore[arg-type]
    with fake_gpu() as mode:
        move_to_fake_gpu(model, mode)
        priors_in_training = (
            replace(priors, by_fold=move_to_fake_gpu(priors.by_fold, mode)) if model.gaussians is not None else None
        )
        run = TrainingRun(data, model, recipe, 0, tmp_path, TimeBudget(), {}, priors_in_training)
        assert run.is_low_precision
        run.model.train()
        samples = OrderedSamples(
            *(mode.from_tensor(tensor) for tensor in (arranged.features, arranged.values, arranged.is_hidden))
        )
        # The length of the longest record in a part would be read from the contents.
        whole = patch.object(OrderedSamples, "__getitem__", lambda self, part: self)
        with whole, patch("torch.autograd.backward"):
            loss = run._accumulate_gradients((samples, rows), slice(0, len(rows)))
        for weight in run.parameters:
            weight.grad = torch.zeros_like(weight)
        for part in run.optimizers:
            part.step()
        run.step += 1
        run._update_average()
    assert (loss.device.type, loss.dtype) == ("cuda", torch.float32)
