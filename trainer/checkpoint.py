"""Save and load the state of an interrupted training run.

A checkpoint is one safetensors file. Its tensors are the weights, their averages and the optimizers' moments; all other
state is JSON in the file's metadata. The file is replaced by renaming, so it is always complete. Random number
generators have no state here, because each training step creates its own (`sampling.create_generator`).
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
    """Write a checkpoint and wait until it is on the disk.

    Args:
        folder: An existing folder; a checkpoint in it is replaced.
        tensors: The tensors by name.
        state: All other state, ready for JSON.

    Raises:
        Unavailable: The disk has no space.
    """
    cpu_tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    content = safetensors.torch.save(cpu_tensors, {"state": json.dumps(state)})
    partial = folder / (FILE_NAME + ".partial")
    with map_write_errors(folder / FILE_NAME):
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / FILE_NAME)


def load_state(folder: Path) -> dict[str, Any] | None:
    """Return the state of the checkpoint in a folder without its tensors, None if there is no checkpoint.

    Raises:
        InputError: The checkpoint is damaged.
    """
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
    """Return the tensors of the checkpoint in a folder, on the CPU."""
    tensors: dict[str, Tensor] = safetensors.torch.load_file(folder / FILE_NAME)
    return tensors
