"""Programs in which PyTorch cannot be imported, and a model for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from deformer_stream import model_store
from tests.engine.random_models import make_model
from tests.models import SCHEMA, make_calibration

WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
"""


def write_model(folder: Path, **changes: Any) -> Path:
    """Write a model directory with random weights, and return its path."""
    base = model_store.ModelConfig(
        d_model=64, layers=2, heads=2, feedforward=64, mixtures=4, embedding=6, hidden=(16,), **changes
    )
    model = make_model(SCHEMA, base, 3, torch.float32)
    model_store.write(folder / "model", model, make_calibration(model), {}, "")
    return folder / "model"
