"""The training of the demo: one that was interrupted is continued, unless it had other settings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from deformer_stream import model_store
from deformer_stream.demo.training import run_trainer
from tests.conftest import ROOT

PROGRAM = """
from deformer_stream.cli import main
from deformer_stream.demo import page_demo, run

run.NUM_TRAINING_RECORDS = page_demo.NUM_TRAINING_RECORDS = 800
run.NUM_NORMAL_RECORDS, run.NUM_FAULTY_RECORDS = 60, 12
main.main()
"""
"""The demo with few records."""

PATIENCE_SECONDS = 300.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "number"), [((), signal.SIGINT), ((), signal.SIGTERM), (("--page",), signal.SIGINT)]
)
def test_the_call_after_an_interrupted_one_continues_its_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], options: tuple[str, ...], number: signal.Signals
) -> None:
    """Ctrl-C reaches the processes of the demo and of the trainer, and `kill` that of the demo only."""
    output = tmp_path / "demo-output"
    command = [sys.executable, "-c", PROGRAM, "demo", "--output", str(output), "--train-time", "1h", *options]
    # The number of steps does not depend on the speed of the machine.
    variables = os.environ | {"DEFORMER_EPOCHS": "3", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}

    def start() -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=variables, start_new_session=True)

    def interrupt(process: subprocess.Popen[str]) -> None:
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)

    with start() as process:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (output / "model.training" / "values.npy").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        interrupt(process)
        printed, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130, errors
    assert "the same command of the demo continues it" in printed
    assert not (output / "model").exists()
    if number == signal.SIGTERM:  # in one of the cases, because it starts a further process
        # With another seed it is not continued, and the error of the trainer names the folder to delete.
        assert run_trainer(Console(), output / "normal.parquet", output / "model", seed=1, train_time="1h") == 2
        assert f"delete {output / 'model.training'}" in capfd.readouterr().err
    with start() as process:
        if options:  # the page stays until it is interrupted
            assert process.stdout is not None
            lines = []
            while not lines or not lines[-1].startswith("3  Live"):
                lines.append(process.stdout.readline())
                assert lines[-1], process.communicate()
            interrupt(process)
            rest, errors = process.communicate(timeout=PATIENCE_SECONDS)
            printed = "".join(lines) + rest
        else:
            printed, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, errors
    assert printed.count("continuing the unfinished training of an earlier call") == 1
    assert '"text": "continuing at step' in errors
    assert model_store.read(output / "model").manifest["training"]["steps"] > 0
    assert not (output / "model.training").exists()
