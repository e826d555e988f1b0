"""The training of the demo: `deformer-train` in a process of its own, which continues what an earlier call has left.

The trainer refuses a folder with an unfinished training, unless its option `--resume` is set. The demo has no such
option. It writes its settings into the working folder of the trainer, so that a later call knows whether the unfinished
training there is that of the demo, and whether it had the same settings.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from deformer_stream import model_store
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.settings.base import parse_duration
from trainer import checkpoint
from trainer.working_folder import LOCK_NAME, get_working_folder, lock_folder

SETTINGS_FILE = "demo.json"
"""Name of the file with the settings of the demo in the working folder of the trainer."""

REFUSAL_EXIT_CODES = (2, 3)
"""Exit codes of the trainer if the unfinished training does not fit the present table or options, or is damaged."""


class Unfinished(Enum):
    """What an earlier call of the demo has left of its training."""

    NOTHING = "nothing"
    SAME_SETTINGS = "same settings"
    """A training with the settings of this call, which can be continued."""
    OTHER_SETTINGS = "other settings"
    """A training that cannot be continued. It was deleted."""


def begin_training(output: Path, model: Path, seed: int, train_time: str) -> Unfinished:
    """Prepare the working folder of the trainer, and return what an earlier call of the demo has left there.

    Call it before anything is written to the folder of the demo.

    Args:
        output: Folder of the demo, for messages.
        model: Folder for the trained model.
        seed: Seed of the training.
        train_time: Time limit of the training, such as "60s".

    Raises:
        ConfigError: The folder of the model, or an unfinished training, is not that of the demo, or another process
            uses it.
    """
    model_store.check_output_directory(model)
    folder = get_working_folder(model)
    settings = {"seed": seed, "train_time": train_time}
    with lock_folder(folder, output, flag="--output"):
        previous = _read_settings(folder)
        unfinished = Unfinished.NOTHING
        if (folder / checkpoint.FILE_NAME).exists():
            if previous is None or not _has_begun_with(folder, previous):
                raise ConfigError(
                    f"{folder} contains an unfinished training that is not the demo's: continue it with "
                    "deformer-train --resume, or delete this folder, or choose another folder with --output"
                )
            unfinished = Unfinished.SAME_SETTINGS if previous == settings else Unfinished.OTHER_SETTINGS
        if unfinished is Unfinished.OTHER_SETTINGS:
            (folder / checkpoint.FILE_NAME).unlink()
        (folder / SETTINGS_FILE).write_text(json.dumps(settings))
    return unfinished


def run_trainer(
    console: Console, table: Path, model: Path, seed: int, train_time: str, unfinished: Unfinished = Unfinished.NOTHING
) -> int:
    """Train the model in a child process, and return the exit code of this process.

    The equivalent shell command is printed first, so that the user can repeat the training.

    Args:
        console: The terminal to print on.
        table: Parquet file with the training records.
        model: Folder for the trained model.
        seed: Seed of the training.
        train_time: Time limit of the training, such as "60s".
        unfinished: What `begin_training` has returned.

    Raises:
        KeyboardInterrupt: The demo was interrupted. The trainer has then ended and saved its progress.
    """
    options = ["--out", str(model), "--preset", "tiny", "--max-time", train_time]
    options += ["--exclude", "record,time", "--seed", str(seed)]
    folder = get_working_folder(model)
    try:
        if unfinished is Unfinished.SAME_SETTINGS:
            console.print("  continuing the unfinished training of an earlier call")
            exit_code = _run_process(console, [str(table), *options, "--resume"])
            if exit_code not in REFUSAL_EXIT_CODES:
                return exit_code
            console.print("  the unfinished training cannot be continued: starting again")
            with lock_folder(folder, model.parent, flag="--output"):
                (folder / checkpoint.FILE_NAME).unlink(missing_ok=True)
        elif unfinished is Unfinished.OTHER_SETTINGS:
            console.print("  an unfinished training with other settings was deleted: starting again")
        return _run_process(console, [str(table), *options])
    except KeyboardInterrupt:
        if (folder / checkpoint.FILE_NAME).exists():
            console.print("  the training was interrupted: the same command of the demo continues it")
        raise
    finally:
        _remove_settings(folder, model.parent)


def _run_process(console: Console, arguments: list[str]) -> int:
    """Print the command `deformer-train` with these arguments, run it, and return its exit code."""
    console.print(Text("  $ " + " ".join(["deformer-train", *arguments]), "cyan"), soft_wrap=True)
    sys.stdout.flush()  # before the child process writes to the same terminal
    # The same program as `deformer-train`, which need not be on the PATH.
    command = [sys.executable, "-m", "trainer.cli", *arguments]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:  # noqa: S603 - ours
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The trainer saves its progress at its first SIGINT and its first SIGTERM, and ends at once at the second
            # of a kind. Ctrl-C has sent it SIGINT already, but a signal for this process alone has not.
            try:
                process.terminate()
                process.wait()
            finally:
                process.kill()  # without effect if it has ended; otherwise Ctrl-C was pressed again
            raise


def _read_settings(folder: Path) -> dict[str, Any] | None:
    """Return the settings of the demo that began the training in a folder, None if they are not there."""
    try:
        settings = json.loads((folder / SETTINGS_FILE).read_text())
    except (OSError, ValueError):
        return None
    return settings if isinstance(settings, dict) and settings.keys() == {"seed", "train_time"} else None


def _has_begun_with(folder: Path, settings: dict[str, Any]) -> bool:
    """Return whether the checkpoint in a folder is that of a training with the settings of the demo.

    It is not if the demo was killed before its first checkpoint, and `deformer-train` has then used the folder.
    """
    try:
        state = checkpoint.load_state(folder)
    except InputError:  # it is damaged, so nothing is lost with it
        return True
    if state is None:
        return False
    identity = state["identity"]
    has_same_time = identity.get("max_time") == parse_duration(settings["train_time"])
    return identity.get("seed") == settings["seed"] and bool(has_same_time)


def _remove_settings(folder: Path, output: Path) -> None:
    """Delete the settings of the demo in the working folder of the trainer, unless there is an unfinished training.

    Usually the trainer has deleted the folder. It has not if it has refused its options or was killed.

    Args:
        folder: The working folder.
        output: Folder of the demo, for messages.
    """
    if not folder.exists() or (folder / checkpoint.FILE_NAME).exists():
        return
    with suppress(ConfigError), lock_folder(folder, output, flag="--output"):  # another process may use it by now
        (folder / SETTINGS_FILE).unlink(missing_ok=True)
        if [path.name for path in folder.iterdir()] == [LOCK_NAME]:
            shutil.rmtree(folder)
