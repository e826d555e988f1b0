"""What every finished training job returns, and what it stores about itself in the model directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.model.deformer import DEformer
from trainer.budget import TimeBudget
from trainer.data import TrainingTable
from trainer.fit import Recipe, TrainingResult
from trainer.settings import TrainConfig
from trainer.training_warnings import TrainingWarning


@dataclass(frozen=True, slots=True)
class JobOutput:
    """The results of a finished training job that do not depend on the kind of its records.

    Attributes:
        directory: The model directory that was written.
        fingerprint: The model's fingerprint: a hexadecimal digest that identifies it.
        model: The trained model. If its features report once in a record, it has exemplars (stored training records)
            for the ranking of complete records.
        training_result: The result of the training loop.
        calibration: The calibration of the alert rule.
        summary: The entry `training` of the manifest in the model directory.
    """

    directory: Path
    fingerprint: str
    model: DEformer
    training_result: TrainingResult
    calibration: Calibration
    summary: dict[str, Any]


def summarize_job(
    settings: TrainConfig,
    data: TrainingTable,
    recipe: Recipe,
    result: TrainingResult,
    held_out: dict[str, Any],
    preset: tuple[str, str],
    budget: TimeBudget,
    warnings: Sequence[TrainingWarning],
) -> dict[str, Any]:
    """Return the part of the entry `training` of the model's manifest that all training jobs have.

    The values can be written as JSON.

    Args:
        settings: All options of `deformer-train`, as the user has set them.
        data: The prepared table.
        recipe: Hyperparameters of training.
        result: The result of the training loop.
        held_out: The likelihood of records that were not used for training.
        preset: The name of the preset (a named size of the model), and why it was chosen, as text for the user.
        budget: The budget whose elapsed times are stored.
        warnings: The warnings about the training.
    """
    name, reason = preset
    return {
        **data.summarize(),
        "held_out": held_out,
        "steps": result.steps,
        "epochs": round(result.epochs, 3),
        "stopped_early": result.stopped_early,
        "device": str(result.model.device),
        "seed": settings.seed,
        "recipe": asdict(recipe),
        "options": settings.model_dump(mode="json", exclude_none=True),
        "history": result.history,
        "preset": {"name": name, "reason": reason},
        "seconds": round(budget.elapsed, 1),
        "seconds_by_phase": dict(budget.seconds_by_phase),
        "warnings": [warning.to_json() for warning in warnings],
    }
