"""The working folder of a training job: the table's readings on disk, and the checkpoint of an interrupted run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deformer_stream import model_store
from deformer_stream.errors import ConfigError
from deformer_stream.file_lock import open_locked
from trainer import checkpoint
from trainer.settings import TrainConfig


@contextmanager
def lock_working_folder(out: Path) -> Iterator[Path]:
    """Create the working folder of a job and lock it while the context is open, so that no other process uses it.

    The folder `DIR.training`, next to the model directory `DIR`, contains the matrix of the table's values and the
    checkpoint. It is deleted when the context closes, unless it contains the checkpoint of an interrupted run.

    Args:
        out: The model directory (`--out`).

    Raises:
        ConfigError: The folder cannot be written, or another process is using it.
    """
    model_store.check_output_directory(out)
    folder = get_working_folder(out)
    with lock_folder(folder, out):
        try:
            yield folder
        finally:
            if folder.exists() and not (folder / checkpoint.FILE_NAME).exists():
                shutil.rmtree(folder)


@contextmanager
def lock_folder(folder: Path, out: Path) -> Iterator[None]:
    """Create a folder and lock it while the context is open, so that no other process uses it.

    Args:
        folder: The folder.
        out: The path of `--out`, for messages.

    Raises:
        ConfigError: The folder cannot be written, or another process is using it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_locked(folder / "lock")
    except OSError as error:
        raise ConfigError(
            f"--out {out}: the working folder {folder} cannot be written ({error.strerror}); "
            "choose a model directory in another folder"
        ) from None
    if lock is None:
        raise ConfigError(
            f"--out {out}: another deformer-train process is using {folder}; "
            "wait until it has ended, or choose another model directory"
        )
    with lock:
        yield


def get_working_folder(out: Path) -> Path:
    """Return the working folder of a training job: the path of the model directory with `.training` appended."""
    return out.absolute().with_name(out.absolute().name + ".training")


def load_previous_run(folder: Path, settings: TrainConfig) -> dict[str, Any] | None:
    """Return the JSON state of the interrupted training run in a folder; None if the folder contains no checkpoint.

    Raises:
        ConfigError: There is an interrupted run, and the option `--resume` is not set.
        InputError: The checkpoint is damaged.
    """
    state = checkpoint.load_state(folder)
    if state is not None and not settings.resume:
        raise ConfigError(
            f"{folder} contains an interrupted training run (step {state['step']} of {state['steps']}): "
            f"add --resume to continue it, or delete the folder to train from the beginning"
        )
    return state
