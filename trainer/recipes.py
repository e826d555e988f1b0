"""What a preset says of a model's size and of its training, and what was set otherwise."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from deformer_stream.errors import ConfigError
from deformer_stream.model.deformer import PRESETS, ModelConfig
from trainer import finetune
from trainer.exemplars import MAX_EXEMPLARS
from trainer.fit import Recipe
from trainer.settings import Optimizer, TrainConfig

SHAPE = {f.name for f in fields(ModelConfig)} - {"gaussians", "exemplars"}
"""Hyperparameters that a person may set; the table decides about Gaussians and exemplars."""


def model_config(settings: TrainConfig, repeats: bool = False) -> ModelConfig:
    """The preset with what was set otherwise; the table decides about Gaussians, exemplars and repeated sensors."""
    given = {name: getattr(settings, name, None) for name in SHAPE} | ({"identity": "both"} if repeats else {})
    try:
        return replace(PRESETS[settings.preset], **{k: v for k, v in given.items() if v is not None})
    except ValueError as error:
        raise ConfigError(f"the model cannot be built: {error}; change the hyperparameters") from None


@dataclass(frozen=True, slots=True)
class _Defaults:
    """steps: how long a run is. batch: the largest, smaller tables take smaller ones. learning_rate: its peak.
    gaussians: most that may guide the network. optimizer, smoothing: see `Recipe`; without noise, and with Muon,
    held-out records are likelier, and alerts on tables with exact relations fewer (docs/experiments.md, section 16)."""

    steps: int
    batch: int
    learning_rate: float
    gaussians: int = 24
    optimizer: Optimizer = "adamw"
    smoothing: float = 0.02


_RECIPES = {
    "tiny": _Defaults(3000, 256, 3e-3),
    "small": _Defaults(4000, 128, 2e-3),
    "base": _Defaults(10_000, 256, 1e-3),
    "paper": _Defaults(100_000, 128, 1e-4, gaussians=0, smoothing=0.0),
}


def choose_gaussians(settings: TrainConfig) -> int:
    """The most Gaussians that may guide the network, 0 for none."""
    return _RECIPES[settings.preset].gaussians if settings.gaussians is None else settings.gaussians


def choose_recipe(settings: TrainConfig, rows: int) -> Recipe:
    """The recipe for a table with so many training rows, with what was set otherwise."""
    base = _RECIPES[settings.preset]
    batch = settings.batch or int(np.clip(2 ** round(np.log2(max(rows, 1) / 32)), 64, base.batch))
    steps_per_epoch = max(1, rows // min(batch, rows))
    epochs = settings.epochs or max(1, round(base.steps / steps_per_epoch))
    rate = base.learning_rate * (finetune.LEARNING_RATE_FACTOR if settings.init_from is not None else 1.0)
    recipe = Recipe(batch, rate, epochs, optimizer=base.optimizer, smoothing=base.smoothing)
    given = {f.name: getattr(settings, f.name) for f in fields(Recipe) if f.name not in ("batch", "epochs")}
    return replace(recipe, **{k: v for k, v in given.items() if v is not None})


def choose_exemplars(settings: TrainConfig) -> int:
    """The most records that the ranking of whole records may compare with, 0 for none."""
    return MAX_EXEMPLARS if settings.exemplars is None else settings.exemplars
