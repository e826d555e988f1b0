"""The presets and published results of binarised MNIST."""

from __future__ import annotations

from typing import Any

from deformer_stream.model.deformer import ModelConfig
from experiments.binarized_mnist.data import load_images
from experiments.binarized_mnist.report import make_report
from experiments.experiment import Experiment, Preset
from trainer.fit import Recipe

WAVES = (0.5, 1.0, 2.0, 4.0)
"""Spatial frequencies that describe the place of a pixel, in periods per side of the image."""

LARGE: dict[str, Any] = {"d_model": 512, "layers": 6, "heads": 8, "feedforward": 2048}
SMALL: dict[str, Any] = {"d_model": 64, "layers": 3, "heads": 2, "feedforward": 256}


def _make_config(size: dict[str, Any], **others: Any) -> ModelConfig:
    """Return the hyperparameters of a network that identifies a pixel by its coordinates."""
    return ModelConfig(**size, identity="coordinates", memory="all", **others)


def _make_recipe(batch: int, learning_rate: float, epochs: int, **others: Any) -> Recipe:
    """Return a recipe that never hides a pixel from the network during training and adds no noise to it."""
    settings: dict[str, Any] = {"optimizer": "muon", "forget": 0.0, "smoothing": 0.0} | others
    return Recipe(batch, learning_rate, epochs, **settings)


PRESETS = {
    "paper": Preset(
        _make_config(LARGE, norm="post", activation="relu", hidden=(128, 256)),
        # One image per step. The learning rate is that of the authors' scripts; their text says 1e-6. The averaging
        # constant is so small that the last weights are kept, without an average.
        _make_recipe(1, 1e-5, 80, optimizer="adam", weight_decay=0.0, warmup=1, clip=1e9, averaging=1e-9),
    ),
    "default": Preset(_make_config(LARGE, hidden=(256,)), _make_recipe(128, 5e-4, 100, warmup=200), waves=WAVES),
    "small": Preset(_make_config(SMALL, hidden=(128,)), _make_recipe(4, 2e-3, 10), waves=WAVES),
}

PUBLISHED = {
    "DeepNADE (order-agnostic)": 89.17,
    "MADE, 32 orders": 86.64,
    "DEformer (order-agnostic), the paper": 80.49,
    "PixelRNN (one fixed order)": 79.20,
    "TraDE (one fixed order)": 78.92,
}

EXPERIMENT = Experiment(
    name="binarized_mnist",
    title="Binarised MNIST",
    record_noun="images",
    num_records=70_000,
    presets=PRESETS,
    published_nll_by_method=PUBLISHED,
    load_data=load_images,
    make_report=make_report,
)
