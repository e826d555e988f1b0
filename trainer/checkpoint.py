"""Save and load the state of a training run, so that an interrupted run can be continued.

A checkpoint is one safetensors file. Its tensors are the weights, their averages and the optimizers' moments. All other
state is JSON in the file's metadata. The file is written under another name and then renamed, so it is always complete.
States of random number generators are not saved, because each training step creates a generator from the seed and the
number of the step (`sampling.create_generator`).
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
"""Name of the checkpoint file in the working folder of a training run."""


def save(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write a checkpoint and flush it to the disk.

    Args:
        folder: An existing folder. If it contains a checkpoint, that file is replaced.
        tensors: Weights, averaged weights and optimizer moments by name, on any device.
        state: All other state, with values that JSON can represent.

    Raises:
        Unavailable: The file cannot be written, for example because the disk is full.
    """
    # The safetensors format accepts contiguous tensors only.
    cpu_tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    content = safetensors.torch.save(cpu_tensors, {"state": json.dumps(state)})
    # The file is renamed when it is complete, so a crash while writing leaves the previous checkpoint intact.
    partial = folder / (FILE_NAME + ".partial")
    with map_write_errors(folder / FILE_NAME):
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / FILE_NAME)


def load_state(folder: Path) -> dict[str, Any] | None:
    """Return the `state` that `save` stored in a folder's checkpoint, without reading the tensors.

    Returns:
        The state, or None if the folder contains no checkpoint.

    Raises:
        InputError: The checkpoint is damaged.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return None
    try:
        with safetensors.safe_open(path, "pt") as file:
            state: dict[str, Any] = json.loads(file.metadata()["state"])  # metadata() is None in other files
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise InputError(
            f"{path}: the checkpoint of the interrupted training run cannot be read ({error}); "
            f"delete the folder {folder} to train from the beginning"
        ) from None
    return state


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors by name that `save` stored in a folder's checkpoint, on the CPU."""
    tensors: dict[str, Tensor] = safetensors.torch.load_file(folder / FILE_NAME)
    return tensors
