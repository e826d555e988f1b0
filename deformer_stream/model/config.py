"""What a model is made of: its hyperparameters, and presets of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Hyperparameters; they live in the model's manifest."""

    d_model: int = 128
    layers: int = 4
    heads: int = 4
    feedforward: int = 512
    mixtures: int = 16
    dropout: float = 0.0
    norm: Literal["pre", "post"] = "pre"
    activation: Literal["gelu", "relu"] = "gelu"
    identity: Literal["embedding", "coordinates", "both"] = "embedding"
    embedding: int = 20
    hidden: tuple[int, ...] = (128,)
    memory: Literal["all", "values"] = "values"
    tokens: Literal["pair", "single"] = "pair"
    gaussians: int = 0
    exemplars: int = 0
    precision: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.d_model % self.heads:
            raise ValueError(f"d_model {self.d_model} is not a multiple of heads {self.heads}")
        for name in ("d_model", "layers", "heads", "feedforward", "mixtures", "embedding"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("gaussians", "exemplars"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0")
        choices = {
            "norm": ("pre", "post"),
            "activation": ("gelu", "relu"),
            "identity": ("embedding", "coordinates", "both"),
            "memory": ("all", "values"),
            "tokens": ("pair", "single"),
            "precision": ("float32", "bfloat16"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}")
        if not 0 <= self.dropout < 1:
            raise ValueError("dropout lies in [0, 1)")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(row: dict[str, Any]) -> ModelConfig:
        return ModelConfig(**dict(row, hidden=tuple(row["hidden"])))


PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(d_model=64, layers=2, heads=4, feedforward=256, mixtures=8, hidden=(64,)),
    "small": ModelConfig(),
    "base": ModelConfig(d_model=256, layers=6, heads=8, feedforward=1024, mixtures=24, hidden=(256,)),
    "paper": ModelConfig(
        d_model=512,
        layers=6,
        heads=8,
        feedforward=2048,
        mixtures=150,
        dropout=0.2,
        norm="post",
        activation="relu",
        hidden=(128, 256),
        memory="all",
    ),
}
