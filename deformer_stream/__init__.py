"""Anomaly alerts with a guaranteed false-alarm rate, raised before the record is complete.

`load(DIR)` reads a model directory and returns a `Detector`, which scores, explains and imputes records. `train(table)`
trains one. All public names are described in `deformer_stream.api`, and the detectors with the interfaces of other
libraries (scikit-learn, PyOD, River) in `deformer_stream.adapters`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deformer_stream.adapters.pyod import PyODDetector
    from deformer_stream.adapters.river import RiverDetector
    from deformer_stream.adapters.scikit_learn import DeformerDetector
    from deformer_stream.api import (
        Detector,
        FaultCandidate,
        FaultName,
        Imputation,
        NextReading,
        RecordScores,
        Scorer,
        Update,
        load,
        train,
    )

    __version__: str

__all__ = [
    "DeformerDetector",
    "Detector",
    "FaultCandidate",
    "FaultName",
    "Imputation",
    "NextReading",
    "PyODDetector",
    "RecordScores",
    "RiverDetector",
    "Scorer",
    "Update",
    "__version__",
    "load",
    "train",
]
_MODULE_BY_NAME = {
    "DeformerDetector": "adapters.scikit_learn",
    "PyODDetector": "adapters.pyod",
    "RiverDetector": "adapters.river",
}
"""The modules of public names that are not in `deformer_stream.api`. They need optional dependencies."""


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that `deformer-stream --help` does not import torch.

    Raises:
        AttributeError: There is no such name.
        ImportError: The name needs an optional dependency that is not installed.
    """
    if name == "__version__":
        return _read_version()
    if name in __all__:
        module = importlib.import_module(f"deformer_stream.{_MODULE_BY_NAME.get(name, 'api')}")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _read_version() -> str:
    """Return the version of the installed package, which its build takes from the newest tag of git.

    Returns:
        The version; "0+unknown" if the code is imported from a folder without being installed.
    """
    from importlib import metadata

    try:
        return metadata.version("deformer-stream")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def __dir__() -> list[str]:
    """Return the public names, which tab completion shows."""
    return sorted(__all__)
