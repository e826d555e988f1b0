"""Choose the hyperparameters of model and training.

They follow from a preset (a named size of the model) and the number of training records. Values that the user has set
take precedence.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from deformer_stream.errors import ConfigError
from deformer_stream.model.config import IRREGULAR, PRESETS
from deformer_stream.model.deformer import ModelConfig
from deformer_stream.model.process_conditionals import check_outlier_limit
from trainer import finetune
from trainer.exemplars import MAX_EXEMPLARS
from trainer.fit import Recipe
from trainer.settings import Preset, TrainConfig

AUTO_PRESETS: tuple[Preset, Preset] = ("small", "tiny")
"""The presets between which `--preset auto` chooses: the default, and the one for short time limits."""

MIN_STEPS_OF_LARGER_PRESET = 1000
"""Number of training steps from which the larger one of `AUTO_PRESETS` is worth its time.

With fewer of its steps, the smaller one predicts better after the same time, for tables of irregular readings, too
(docs/experiments/19-training-steps.md).
"""

MIN_USEFUL_STEPS = 200
"""Number of training steps from which a network predicts clearly better than the Gaussian prior alone.

It was measured in the same experiment.
"""

SHAPE_HYPERPARAMETERS = {f.name for f in fields(ModelConfig)} - {
    "gaussians",
    "exemplars",
    "prior_weight",
    "marginal_weight",
    *IRREGULAR,
}
"""Names of the hyperparameters that determine the shape of the network.

The numbers of Gaussians and exemplars (stored training records) are not among them, because they depend on the table.
Nor are the weights of densities in the ranking. Those of irregular readings are chosen by
`irregular_model_config`.
"""

IRREGULAR_DEFAULTS = {
    "neighbors": 12,
    "neighbor_decay": 0.8,
    "process_rank": 12,
    "process_scales": 5,
    "context_recent": 32,
    "context_block": 64,
}
"""Hyperparameters of models for irregular readings (see `ModelConfig`)."""

IRREGULAR_BATCH = 32
"""Number of blocks of a batch of irregular readings."""

IRREGULAR_ARRIVAL_SHARE = 0.75
"""Share of the blocks of irregular readings that are learnt in their real order."""


def resolve_preset(settings: TrainConfig) -> str:
    """Return the name of the preset; that of the larger candidate for "auto"."""
    return AUTO_PRESETS[0] if settings.preset == "auto" else settings.preset


def has_own_size(settings: TrainConfig) -> bool:
    """Return whether the user or the model of `--init-from` determines the size of the network, and not the preset."""
    is_shaped = any(getattr(settings, name, None) is not None for name in SHAPE_HYPERPARAMETERS)
    return is_shaped or settings.init_from is not None


def model_config(settings: TrainConfig, has_repeating_sensors: bool = False) -> ModelConfig:
    """Return the hyperparameters of the network: those that the user has set, and those of the preset for all others.

    A preset is a named size of the model. The numbers of Gaussians and exemplars are not set here, because they depend
    on the table.

    Args:
        settings: All options of `deformer-train`.
        has_repeating_sensors: Whether a sensor reports several times in a record, once in each time slot. The network
            then gets both the sensor and the time slot of a reading as inputs.

    Raises:
        ConfigError: The hyperparameters contradict each other.
    """
    # The settings have no field for the hyperparameter `identity` (the input that identifies a feature).
    user_values = {name: getattr(settings, name, None) for name in SHAPE_HYPERPARAMETERS}
    if has_repeating_sensors:
        # A feature is then identified by a learned embedding (the sensor) and by coordinates (the time slot).
        user_values["identity"] = "both"
    try:
        return replace(PRESETS[resolve_preset(settings)], **_drop_none(user_values))
    except ValueError as error:
        raise ConfigError(
            f"the model cannot be built, because its hyperparameters contradict each other: {error}; "
            "change them in the file that --config names"
        ) from None


def irregular_model_config(settings: TrainConfig, num_features: int) -> ModelConfig:
    """Return the hyperparameters of the network for irregular readings.

    Args:
        settings: All options of `deformer-train`.
        num_features: Number of features of the table, which limits the rank of the Gaussian process and adds to the
            readings of a context.

    Raises:
        ConfigError: The hyperparameters contradict each other.
    """
    user_values = _drop_none({name: getattr(settings, name) for name in IRREGULAR})
    values = IRREGULAR_DEFAULTS | user_values
    values["process_rank"] = min(values["process_rank"], num_features)
    if not values["neighbors"]:
        values |= {"process_rank": 0, "process_scales": 0}
    try:
        config = replace(model_config(settings), **values)
        check_outlier_limit(config, num_features)
        return config
    except ValueError as error:
        raise ConfigError(
            f"the model cannot be built, because its hyperparameters contradict each other: {error}; "
            "change them in the file that --config names"
        ) from None


@dataclass(frozen=True, slots=True)
class _TrainingPreset:
    """The training hyperparameters of a preset.

    Attributes:
        steps: Number of training steps.
        max_batch: Largest number of records in a batch. Small tables get smaller batches.
        learning_rate: The largest learning rate of the schedule.
        max_gaussians: Largest number of Gaussians of the Gaussian prior.
        changes: (name, value) of each other field of `Recipe` whose value differs from its default.
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
"""A table with n training records gets batches of about n / RECORDS_PER_BATCH records, but of at least MIN_BATCH."""


def choose_gaussians(settings: TrainConfig) -> int:
    """Return the largest number of components of the Gaussian prior, 0 for no prior.

    The Gaussian prior is a mixture of Gaussians that is fitted before training. The user's value takes precedence over
    that of the preset.
    """
    if settings.gaussians is not None:
        return settings.gaussians
    return _TRAINING_PRESETS[resolve_preset(settings)].max_gaussians


def choose_irregular_recipe(settings: TrainConfig, num_blocks: int) -> Recipe:
    """Return the training hyperparameters for a table of irregular readings, whose examples are blocks.

    Args:
        settings: All options of `deformer-train`.
        num_blocks: Number of blocks of the training records.
    """
    changes: dict[str, Any] = {}
    if settings.batch is None:
        changes["batch"] = min(IRREGULAR_BATCH, max(num_blocks, 1))
    if settings.arrival_share is None:
        changes["arrival_share"] = IRREGULAR_ARRIVAL_SHARE
    return choose_recipe(settings.model_copy(update=changes), num_blocks)


def choose_recipe(settings: TrainConfig, num_rows: int) -> Recipe:
    """Return the training hyperparameters for a table.

    Values that the user has set take precedence. All others follow from the preset and the number of training records.
    The batch grows with the table, and the number of epochs is such that training takes the preset's number of steps.

    Args:
        settings: All options of `deformer-train`.
        num_rows: Number of training records.
    """
    preset = _TRAINING_PRESETS[resolve_preset(settings)]
    batch = settings.batch
    if batch is None:
        # About num_rows / RECORDS_PER_BATCH records, rounded to a power of two.
        power_of_two = 2 ** round(np.log2(max(num_rows, 1) / RECORDS_PER_BATCH))
        batch = int(np.clip(power_of_two, MIN_BATCH, preset.max_batch))
    steps_per_epoch = max(1, num_rows // min(batch, num_rows))
    epochs = settings.epochs or max(1, round(preset.steps / steps_per_epoch))
    # Adapting an old model (--init-from) needs a smaller learning rate, because its weights are already good.
    rate_factor = finetune.LEARNING_RATE_FACTOR if settings.init_from is not None else 1.0
    recipe = Recipe(batch, preset.learning_rate * rate_factor, epochs)
    recipe = replace(recipe, **dict(preset.changes))
    # The values of the user for `batch` and `epochs` were used above; those for all other fields follow last.
    other_names = [field.name for field in fields(Recipe) if field.name not in ("batch", "epochs")]
    user_values = _drop_none({name: getattr(settings, name) for name in other_names})
    return replace(recipe, **user_values)


def _drop_none(values: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a dictionary of options whose value is not None, that is, those that the user has set."""
    return {name: value for name, value in values.items() if value is not None}


def choose_exemplars(settings: TrainConfig) -> int:
    """Return the largest number of exemplars, 0 for none.

    Exemplars are training records that the model stores. Complete records are ranked from normal to anomalous by their
    mean distance to the nearest exemplars.
    """
    return MAX_EXEMPLARS if settings.exemplars is None else settings.exemplars
