"""Choose the hyperparameters of model and training: presets, adapted to the table, with the user's changes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from deformer_stream.errors import ConfigError
from deformer_stream.model.deformer import PRESETS, ModelConfig
from trainer import finetune
from trainer.exemplars import MAX_EXEMPLARS
from trainer.fit import Recipe
from trainer.settings import TrainConfig

SHAPE = {f.name for f in fields(ModelConfig)} - {"gaussians", "exemplars"}
"""Hyperparameters of the model that a user may set; the numbers of Gaussians and exemplars depend on the table."""


def model_config(settings: TrainConfig, has_repeating_sensors: bool = False) -> ModelConfig:
    """Return the model's hyperparameters: those of the preset, except for those that the user has set.

    Args:
        settings: All options.
        has_repeating_sensors: Whether a sensor reports several times in a record, so that the network needs to know
            both the sensor and the time slot of a reading.

    Raises:
        ConfigError: The hyperparameters contradict each other.
    """
    changes = {name: getattr(settings, name, None) for name in SHAPE}
    if has_repeating_sensors:
        changes["identity"] = "both"
    try:
        return replace(PRESETS[settings.preset], **_drop_none(changes))
    except ValueError as error:
        raise ConfigError(f"the model cannot be built: {error}; change the hyperparameters") from None


@dataclass(frozen=True, slots=True)
class _TrainingPreset:
    """Training hyperparameters of a preset. All others have the defaults of `Recipe`.

    Attributes:
        steps: Number of training steps.
        max_batch: Largest batch; smaller tables get smaller batches.
        learning_rate: The largest learning rate.
        max_gaussians: Largest number of Gaussians of the prior.
        changes: Fields of `Recipe` that differ from its defaults.
    """

    steps: int
    max_batch: int
    learning_rate: float
    max_gaussians: int = 24
    changes: tuple[tuple[str, Any], ...] = ()


_TRAINING_PRESETS = {
    "tiny": _TrainingPreset(3000, 256, 3e-3),
    "small": _TrainingPreset(4000, 128, 2e-3),
    "base": _TrainingPreset(10_000, 256, 1e-3),
    "paper": _TrainingPreset(100_000, 128, 1e-4, max_gaussians=0, changes=(("smoothing", 0.0),)),
}

MIN_BATCH, RECORDS_PER_BATCH = 64, 32
"""A table with n training records gets a batch of about n / 32 records, at least 64."""


def choose_gaussians(settings: TrainConfig) -> int:
    """Return the largest number of Gaussians of the prior, 0 for no prior."""
    return _TRAINING_PRESETS[settings.preset].max_gaussians if settings.gaussians is None else settings.gaussians


def choose_recipe(settings: TrainConfig, num_rows: int) -> Recipe:
    """Return the training hyperparameters for a table, except for those that the user has set.

    Args:
        settings: All options.
        num_rows: Number of training records.
    """
    preset = _TRAINING_PRESETS[settings.preset]
    batch = settings.batch
    if batch is None:
        power_of_two = 2 ** round(np.log2(max(num_rows, 1) / RECORDS_PER_BATCH))
        batch = int(np.clip(power_of_two, MIN_BATCH, preset.max_batch))
    steps_per_epoch = max(1, num_rows // min(batch, num_rows))
    epochs = settings.epochs or max(1, round(preset.steps / steps_per_epoch))
    rate_factor = finetune.LEARNING_RATE_FACTOR if settings.init_from is not None else 1.0
    recipe = replace(Recipe(batch, preset.learning_rate * rate_factor, epochs), **dict(preset.changes))
    settable = (field.name for field in fields(Recipe) if field.name not in ("batch", "epochs"))
    return replace(recipe, **_drop_none({name: getattr(settings, name) for name in settable}))


def _drop_none(values: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def choose_exemplars(settings: TrainConfig) -> int:
    """Return the largest number of exemplars with which the ranking compares complete records, 0 for none."""
    return MAX_EXEMPLARS if settings.exemplars is None else settings.exemplars
