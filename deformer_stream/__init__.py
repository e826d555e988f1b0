"""Anomaly alerts with a guaranteed false-alarm rate, raised before the record is complete.

`load(DIR)` reads a model directory and returns a `Detector`, which scores, explains and imputes records. `train(table)`
trains one. All public names are described in `deformer_stream.api`, and the detectors with the interfaces of other
libraries in `deformer_stream.estimator` (scikit-learn), `pyod_adapter` and `river_adapter`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deformer_stream.api import Detector, Imputation, RecordScores, Scorer, Update, load, train
    from deformer_stream.estimator import DeformerDetector
    from deformer_stream.pyod_adapter import PyODDetector
    from deformer_stream.river_adapter import RiverDetector

__version__ = "0.1.0"
__all__ = [
    "DeformerDetector",
    "Detector",
    "Imputation",
    "PyODDetector",
    "RecordScores",
    "RiverDetector",
    "Scorer",
    "Update",
    "__version__",
    "load",
    "train",
]
_MODULE_BY_NAME = {"DeformerDetector": "estimator", "PyODDetector": "pyod_adapter", "RiverDetector": "river_adapter"}
"""The modules of public names that are not in `deformer_stream.api`. They need optional dependencies."""


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that `deformer-stream --help` does not import torch.

    Raises:
        AttributeError: There is no such name.
        ImportError: The name needs an optional dependency that is not installed.
    """
    if name in __all__:
        module = importlib.import_module(f"deformer_stream.{_MODULE_BY_NAME.get(name, 'api')}")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, which tab completion shows."""
    return sorted(__all__)
