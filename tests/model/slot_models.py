"""The hyperparameters of a small model for the features of time slots."""

from __future__ import annotations

from deformer_stream.model.config import ModelConfig

CONFIG = ModelConfig(
    d_model=16, layers=2, heads=2, feedforward=32, mixtures=3, embedding=6, hidden=(16,), identity="both"
)
