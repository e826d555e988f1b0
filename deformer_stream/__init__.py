"""Anomaly alerts with a guaranteed false-alarm rate, raised before the record is complete.

`load(DIR)` reads a model directory and returns a `Detector`, which scores, explains and imputes records. All public
names are described in `deformer_stream.api`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deformer_stream.api import Detector, Imputation, RecordScores, Scorer, Update, load

__version__ = "0.1.0"
__all__ = ["Detector", "Imputation", "RecordScores", "Scorer", "Update", "__version__", "load"]


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that `deformer-stream --help` does not import torch."""
    if name in __all__:
        from deformer_stream import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
