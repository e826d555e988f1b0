"""A training run on disk: one safetensors file, replaced by renaming, so that it is always whole.

Tensors are the weights, their moving averages and the optimiser's moments; the rest is JSON in the file's metadata.
Randomness needs no state here: every step seeds its own generators (`sampling.seeded`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from deformer_stream.errors import InputError, map_write_errors

FILE_NAME = "checkpoint.safetensors"


def save(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write tensors and JSON-ready state durably. Raises `Unavailable` where the disk has no room."""
    data = safetensors.torch.save(
        {name: t.detach().cpu().contiguous() for name, t in tensors.items()}, {"state": json.dumps(state)}
    )
    partial = folder / (FILE_NAME + ".partial")
    with map_write_errors(folder / FILE_NAME):
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / FILE_NAME)


def load_state(folder: Path) -> dict[str, Any] | None:
    """The state without the tensors, or None where there is no checkpoint."""
    path = folder / FILE_NAME
    if not path.exists():
        return None
    try:
        with safetensors.safe_open(path, "pt") as file:
            state: dict[str, Any] = json.loads(file.metadata()["state"])
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise InputError(f"{path}: not a readable checkpoint ({error}); delete {folder} to start anew") from None
    return state


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors, on the CPU."""
    tensors: dict[str, Tensor] = safetensors.torch.load_file(folder / FILE_NAME)
    return tensors
