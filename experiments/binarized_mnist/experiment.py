"""What is special about binarised MNIST, put together."""

from __future__ import annotations

from typing import Any

from deformer_stream.model.deformer import ModelConfig
from experiments.binarized_mnist.data import load
from experiments.binarized_mnist.report import report
from experiments.experiment import Experiment, Preset
from trainer.fit import Recipe

WAVES = (0.5, 1.0, 2.0, 4.0)
LARGE: dict[str, Any] = {"d_model": 512, "layers": 6, "heads": 8, "feedforward": 2048}
SMALL: dict[str, Any] = {"d_model": 64, "layers": 3, "heads": 2, "feedforward": 256}


def _pixels(size: dict[str, Any], **rest: Any) -> ModelConfig:
    return ModelConfig(**size, identity="coordinates", memory="all", **rest)


def _recipe(batch: int, learning_rate: float, epochs: int, **rest: Any) -> Recipe:
    """No pixel is hidden."""
    return Recipe(batch, learning_rate, epochs, forget=0.0, **rest)


PRESETS = {
    "paper": Preset(
        _pixels(LARGE, norm="post", activation="relu", hidden=(128, 256)),
        # One image a step; 1e-5 as in the authors' scripts (the text says 1e-6); the last weights, no average.
        _recipe(1, 1e-5, 80, optimizer="adam", weight_decay=0.0, warmup=1, clip=1e9, averaging=1e-9),
    ),
    "default": Preset(_pixels(LARGE, hidden=(256,)), _recipe(128, 5e-4, 100, warmup=200), waves=WAVES),
    "small": Preset(_pixels(SMALL, hidden=(128,)), _recipe(4, 2e-3, 10), waves=WAVES),
}

PUBLISHED = {
    "DeepNADE (order-agnostic)": 89.17,
    "MADE, 32 orders": 86.64,
    "DEformer (order-agnostic), the paper": 80.49,
    "PixelRNN (one fixed order)": 79.20,
    "TraDE (one fixed order)": 78.92,
}

EXPERIMENT = Experiment("binarized_mnist", "Binarised MNIST", "images", 70_000, PRESETS, PUBLISHED, load, report)
