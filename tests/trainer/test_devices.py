"""A step of training on a GPU that is not there mixes no devices."""

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
from trainer import fit as training
from trainer import gaussian_prior
from trainer.budget import TimeBudget
from trainer.data import Split
from trainer.fit import Recipe, TrainingRun
from trainer.sampling import Noise, Samples, create_generator, draw_samples, order_readings
from trainer.settings import Optimizer

CONFIG = ModelConfig(d_model=64, layers=2, heads=4, feedforward=96, mixtures=3, hidden=(16,), dropout=0.1)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # to copy a model
@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
@pytest.mark.parametrize("change", [{}, {"gaussians": 1}, {"tokens": "single"}, {"memory": "all"}])
def test_a_step_on_a_gpu_that_is_not_there(tmp_path: Path, optimizer: Optimizer, change: dict[str, object]) -> None:
    """In low precision, with dropout, guided and not. The way back is PyTorch's own and needs a real one."""
    data = prepared(tmp_path, mixed(np.random.default_rng(3), 200))
    guides = gaussian_prior.fit_priors(data, 1, 0)
    assert guides is not None
    rows = data.select_rows(Split.TRAIN)[:32]
    drawn = draw_samples(data, rows, Noise.from_schema(data.schema, 0.05, 0.01), 0.5, create_generator(1))
    arranged = order_readings(drawn.values, drawn.keys)
    recipe = Recipe(batch=32, learning_rate=1e-3, epochs=1, optimizer=optimizer)
    model = DEformer(data.schema, replace(CONFIG, **change))  # type: ignore[arg-type]
    with fake_gpu() as mode:
        move_to_fake_gpu(model, mode)
        guided = replace(guides, folds=move_to_fake_gpu(guides.by_fold, mode)) if model.gaussians is not None else None
        fit = TrainingRun(data, model, recipe, 0, tmp_path, TimeBudget(), {}, guided)
        assert fit.is_low_precision
        fit.model.train()
        places = [mode.from_tensor(tensor) for tensor in arranged]
        samples = Samples(*(mode.from_tensor(tensor) for tensor in (drawn.values, drawn.keys, drawn.is_hidden)))
        with patch.object(training, "arrange", lambda values, keys: places), patch("torch.autograd.backward"):
            loss = fit._accumulate_gradients(samples, rows, len(rows))
        for weight in fit.parameters:
            weight.grad = torch.zeros_like(weight)
        fit.optimizer.step()
        fit.step += 1
        fit._update_average()
    assert (loss.device.type, loss.dtype) == ("cuda", torch.float32)
