"""The training of the demo: `deformer-train` in a process of its own, which continues what an earlier call has left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from trainer import checkpoint
from trainer.working_folder import get_working_folder


def run_trainer(console: Console, table: Path, model: Path, seed: int, train_time: str) -> int:
    """Train the model in a child process, and return the exit code of this process.

    The equivalent shell command is printed first, so that the user can repeat the training. A training that was
    interrupted is continued. The trainer refuses to, and names the folder to delete, if it had another seed or another
    time limit, or belongs to another table.

    Args:
        console: The terminal to print on.
        table: Parquet file with the training records.
        model: Folder for the trained model.
        seed: Seed of the training.
        train_time: Time limit of the training, such as "60s".

    Raises:
        KeyboardInterrupt: The demo was interrupted. The trainer has then ended and saved its progress.
    """
    arguments = [str(table), "--out", str(model), "--preset", "tiny", "--max-time", train_time]
    arguments += ["--exclude", "record,time", "--seed", str(seed)]
    unfinished = get_working_folder(model) / checkpoint.FILE_NAME
    if unfinished.exists():
        console.print("  continuing the unfinished training of an earlier call")
        arguments.append("--resume")
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
            if unfinished.exists():
                console.print("  the training was interrupted: the same command of the demo continues it")
            raise
