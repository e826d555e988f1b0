"""What every finished training job returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deformer_stream.calibration.conformal import Calibration
from deformer_stream.model.deformer import DEformer
from trainer.fit import TrainingResult


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
