"""The training of the demo: an unfinished one is continued, or deleted if it had other settings."""

from __future__ import annotations

import fcntl
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from deformer_stream import model_store
from deformer_stream.demo import run, training
from deformer_stream.demo.training import SETTINGS_FILE, Unfinished, begin_training, run_trainer
from deformer_stream.errors import ConfigError
from tests.conftest import ROOT
from trainer import checkpoint
from trainer.working_folder import LOCK_NAME

PROGRAM = """
from deformer_stream.cli import main
from deformer_stream.demo import page_demo, run

run.NUM_TRAINING_RECORDS = page_demo.NUM_TRAINING_RECORDS = 800
run.NUM_NORMAL_RECORDS, run.NUM_FAULTY_RECORDS = 60, 12
main.main()
"""
"""The demo with few records."""

PATIENCE_SECONDS = 300.0


def save_checkpoint(output: Path, seed: int = 0, seconds: float = 60.0) -> Path:
    """Write the checkpoint of a training of the demo's model, and return its path."""
    folder = output / "model.training"
    folder.mkdir(exist_ok=True)
    state = {"identity": {"seed": seed, "max_time": seconds}, "step": 3, "steps": 40}
    checkpoint.save(folder, {"weight": torch.zeros(1)}, state)
    return folder / checkpoint.FILE_NAME


def begin(output: Path, seed: int = 0, train_time: str = "60s") -> Unfinished:
    return begin_training(output, output / "model", seed, train_time)


def test_unfinished_training_with_the_same_settings_is_continued(tmp_path: Path) -> None:
    assert begin(tmp_path) is Unfinished.NOTHING
    path = save_checkpoint(tmp_path)
    for _ in range(2):  # interrupted again
        assert begin(tmp_path) is Unfinished.SAME_SETTINGS
        assert path.exists()


@pytest.mark.parametrize(("seed", "train_time"), [(1, "60s"), (0, "300s")])
def test_unfinished_training_with_other_settings_is_deleted(tmp_path: Path, seed: int, train_time: str) -> None:
    begin(tmp_path)
    path = save_checkpoint(tmp_path)
    assert begin(tmp_path, seed, train_time) is Unfinished.OTHER_SETTINGS
    assert not path.exists()
    save_checkpoint(tmp_path, seed, float(train_time.removesuffix("s")))
    assert begin(tmp_path, seed, train_time) is Unfinished.SAME_SETTINGS


@pytest.mark.parametrize("has_settings", [False, True])
def test_unfinished_training_that_is_not_the_demos_is_kept(tmp_path: Path, has_settings: bool) -> None:
    """With settings: the demo was killed before its first checkpoint, and `deformer-train` was interrupted later."""
    if has_settings:
        begin(tmp_path)
    path = save_checkpoint(tmp_path, seconds=600.0)
    content = path.read_bytes()
    with pytest.raises(ConfigError, match=r"model\.training contains an unfinished training that is not the demo's"):
        run.run_demo(tmp_path, seed=0)
    assert path.read_bytes() == content
    assert not (tmp_path / "normal.parquet").exists()


def test_a_folder_that_is_no_model_is_kept(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "work.txt").write_text("years")
    with pytest.raises(ConfigError, match="is not a model directory"):
        run.run_demo(tmp_path, seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "work.txt").read_text() == "years"


def test_a_training_that_is_running_is_kept(tmp_path: Path) -> None:
    begin(tmp_path)
    path = save_checkpoint(tmp_path)
    with (path.parent / LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"--output .* another deformer-train process is using"):
            begin(tmp_path, seed=1)
    assert path.exists()


def run_with(
    output: Path, monkeypatch: pytest.MonkeyPatch, unfinished: Unfinished, codes: list[int]
) -> tuple[int, str, list[bool]]:
    """Run a trainer that ends with these exit codes, one a call.

    Returns:
        The exit code of the training, what was printed, and for each call whether it had the option `--resume`.
    """
    calls: list[bool] = []

    def run_process(console: Console, arguments: list[str]) -> int:
        calls.append("--resume" in arguments)
        return codes[len(calls) - 1]

    monkeypatch.setattr(training, "_run_process", run_process)
    out = io.StringIO()
    console = Console(file=out, width=200)
    code = run_trainer(console, output / "normal.parquet", output / "model", 0, "60s", unfinished)
    return code, out.getvalue(), calls


def test_each_kind_of_unfinished_training_is_stated_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for unfinished, resumes, words in (
        (Unfinished.NOTHING, False, ""),
        (Unfinished.SAME_SETTINGS, True, "  continuing the unfinished training of an earlier call\n"),
        (
            Unfinished.OTHER_SETTINGS,
            False,
            "  an unfinished training with other settings was deleted: starting again\n",
        ),
    ):
        assert run_with(tmp_path, monkeypatch, unfinished, [0]) == (0, words, [resumes])


@pytest.mark.parametrize("code", [2, 3])
def test_unfinished_training_that_the_trainer_refuses_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Its checkpoint is damaged here, so its settings cannot be compared."""
    begin(tmp_path)
    path = save_checkpoint(tmp_path)
    path.write_bytes(b"damaged")
    unfinished = begin(tmp_path)
    found, printed, calls = run_with(tmp_path, monkeypatch, unfinished, [code, 0])
    assert (found, calls) == (0, [True, False])
    assert "cannot be continued: starting again" in printed
    assert not path.exists()


def test_settings_do_not_stay_without_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay with an unfinished one, for the next call. Other files of a folder of this name stay."""
    folder = tmp_path / "model.training"
    begin(tmp_path)
    run_with(tmp_path, monkeypatch, Unfinished.NOTHING, [2])
    assert not folder.exists()
    begin(tmp_path)
    save_checkpoint(tmp_path)
    run_with(tmp_path, monkeypatch, Unfinished.SAME_SETTINGS, [130])
    assert (folder / SETTINGS_FILE).exists()
    (folder / checkpoint.FILE_NAME).rename(folder / "mine")
    run_with(tmp_path, monkeypatch, Unfinished.NOTHING, [2])
    assert sorted(path.name for path in folder.iterdir()) == [LOCK_NAME, "mine"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "number"), [((), signal.SIGINT), ((), signal.SIGTERM), (("--page",), signal.SIGINT)]
)
def test_the_call_after_an_interrupted_one_continues_its_training(
    tmp_path: Path, options: tuple[str, ...], number: signal.Signals
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
