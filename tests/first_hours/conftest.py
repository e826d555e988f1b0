"""A terminal, in which a trial types commands as a user does, and a trained model that several trials share."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.first_hours.plant_data import record_pump_station
from trainer.job import train
from trainer.settings import TrainConfig

PROGRAMS = {"deformer-train": "trainer.cli", "deformer-stream": "deformer_stream.cli"}
"""By the name of each program, the module that runs it."""

TypeCommand = Callable[..., SimpleNamespace]
"""Runs a command line and returns its exit code (`code`), standard output (`out`), standard error (`err`), both outputs
(`text`), and the lines of standard error (`lines`)."""


@pytest.fixture
def terminal(cli: TypeCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TypeCommand:
    """Return a function that runs a command line in the folder of the trial: `terminal("deformer-train pumps.csv …")`.

    The command runs in this process, which has imported PyTorch already. It must end with the exit code `code`.
    """
    monkeypatch.chdir(tmp_path)

    def type_command(line: str, code: int = 0) -> SimpleNamespace:
        program, *words = shlex.split(line)
        result = cli(*words, program=program)
        result.text = result.out + result.err
        assert result.code == code, result.text
        return result

    return type_command


@pytest.fixture
def new_terminal(tmp_path: Path) -> TypeCommand:
    """Return a function like `terminal` that runs each command in a process of its own, as a shell does."""

    def type_command(line: str, code: int = 0) -> SimpleNamespace:
        return run_in_process(line, tmp_path, code)

    return type_command


def run_in_process(line: str, folder: Path, code: int = 0) -> SimpleNamespace:
    """Run a command line in a process of its own, and assert its exit code.

    Args:
        line: The command line, without pipes and redirections.
        folder: The current folder of the process.
        code: The exit code that is expected.
    """
    program, *words = shlex.split(line)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DEFORMER_")}
    done = subprocess.run(
        [sys.executable, "-m", PROGRAMS[program], *words],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return SimpleNamespace(
        code=code,
        out=done.stdout,
        err=done.stderr,
        text=done.stdout + done.stderr,
        lines=done.stderr.splitlines(),
    )


@pytest.fixture(scope="session")
def station(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `normal.csv` of the pump station and the directory `model` that was trained on it."""
    folder = tmp_path_factory.mktemp("station")
    record_pump_station(1500).to_csv(folder / "normal.csv", index=False)
    train([folder / "normal.csv"], TrainConfig(out=folder / "model", preset="tiny", epochs=1))
    return folder


def count_alerts(replay: SimpleNamespace) -> int:
    """Return the number of alerts that the last line of `deformer-stream replay` states."""
    match = re.search(r"(\d+) alerts? at alpha", replay.err)
    assert match, replay.err
    return int(match[1])


def find_row(output: str, name: str) -> str:
    """Return the line of the table of features that `deformer-train` prints for a column."""
    rows = [line for line in output.splitlines() if line.startswith(f"{name} ")]
    assert len(rows) == 1, output
    return rows[0]
