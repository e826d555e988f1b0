"""Tasks for the processes of a pool, which note their attempts in files."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from deformer_stream.errors import InputError

Perform = Callable[[int, Callable[[int], None]], object]


def prepare_tasks(folder: Path, kind: str) -> Perform:
    """Return a function that notes each attempt in a file, and then does what `kind` says."""

    def perform(task: int, report: Callable[[int], None]) -> object:
        attempts = folder / f"{task}.txt"
        attempts.write_text((attempts.read_text() if attempts.exists() else "") + "x")
        num_attempts = len(attempts.read_text())
        if kind == "killed" or (kind == "killed once" and task == 2 and num_attempts == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "error":
            raise InputError(f"task {task}: the file cannot be read")
        if kind == "bug":
            raise ZeroDivisionError("no rows")
        if kind == "slow":
            (folder / f"{task}.pid").write_text(str(os.getpid()))
            time.sleep(600)
        report(10 + task)
        return task * task, os.environ["OMP_NUM_THREADS"]

    return perform


def count_attempts(folder: Path) -> dict[int, int]:
    return {int(path.stem): len(path.read_text()) for path in folder.glob("*.txt")}
