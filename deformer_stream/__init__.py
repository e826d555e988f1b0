"""Anomaly alerts with a guaranteed false-alarm rate, raised before the record is complete.

`load(DIR)` reads a model directory and returns a `Detector`, which scores, explains and imputes records. `train(table)`
trains one. All public names are described in `deformer_stream.api` and `deformer_stream.estimator`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deformer_stream.api import Detector, Imputation, RecordScores, Scorer, Update, load, train

__version__ = "0.1.0"
_MODULE_BY_NAME = dict.fromkeys(("Detector", "Imputation", "RecordScores", "Scorer", "Update", "load", "train"), "api")
__all__ = ["Detector", "Imputation", "RecordScores", "Scorer", "Update", "__version__", "load", "train"]


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that `deformer-stream --help` does not import torch."""
    if name in _MODULE_BY_NAME:
        return getattr(importlib.import_module(f"deformer_stream.{_MODULE_BY_NAME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, which tab completion shows."""
    return sorted(__all__)
