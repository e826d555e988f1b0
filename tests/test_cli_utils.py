"""The edge of every command: light help, one line for an error, exit codes, tracebacks only when asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from deformer_stream import cli_utils, errors

HEAVY = ("torch", "numpy", "pyarrow", "kafka", "safetensors", "rich", "structlog", "prometheus_client", "orjson")
MAINS = {
    "deformer-stream": ("deformer_stream.cli.main", "main"),
    "deformer-replay": ("deformer_stream.cli.main", "replay_main"),
    "deformer-train": ("trainer.cli", "main"),
}


def child(program: str, words: list[str], unwanted: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """The program in a fresh Python; fails if one of the unwanted packages was imported by the end."""
    module, main = MAINS[program]
    code = f"""
import sys
sys.argv = {[program, *words]!r}
from {module} import {main}
try:
    {main}()
finally:
    heavy = [name for name in {unwanted!r} if name in sys.modules]
    assert not heavy, heavy
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("program", MAINS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_light(program: str, flag: str) -> None:
    ended = child(program, [flag], HEAVY)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "Usage:" in ended.stdout
    assert program in ended.stdout


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], [], ["nonsense"], ["config", "--help"], ["inspect", "--help"]]
)
def test_listing_commands_is_lighter_still(words: list[str]) -> None:
    """Without a command's own options not even the settings are built."""
    ended = child("deformer-stream", words, (*HEAVY, "pydantic", "pydantic_settings"))
    assert ended.returncode in (0, 2)


@pytest.mark.parametrize("name", ["consume", "replay", "produce", "impute", "sample", "inspect", "config", "demo"])
def test_every_command_has_help(name: str, cli: Callable[..., SimpleNamespace]) -> None:
    assert name in cli("--help").out
    ended = cli(name, "--help")
    assert (ended.code, ended.err) == (0, "")
    assert f"deformer-stream {name}" in ended.out
    assert "--debug" in ended.out


def test_no_command_shows_help(cli: Callable[..., SimpleNamespace]) -> None:
    ended = cli()
    assert (ended.code, ended.err) == (2, "")
    assert "consume" in ended.out


def test_version(cli: Callable[..., SimpleNamespace]) -> None:
    ended = cli("--version")
    assert (ended.code, ended.out.split()[:1]) == (0, ["deformer-stream,"])


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["consume", "--nonsense"], "deformer-stream consume --help"),
        (["nonsense"], "deformer-stream --help"),
        (["replay"], "INPUT"),
        (["inspect"], "DIRECTORY"),
        (["config", "inspect"], "consume"),
        (["consume", "--from", "never"], "--from"),
        (["consume", "--alpha"], "--alpha"),
    ],
)
def test_usage_errors(words: list[str], hint: str, cli: Callable[..., SimpleNamespace]) -> None:
    ended = cli(*words)
    assert (ended.code, ended.out, len(ended.lines)) == (2, "", 1)
    assert ended.lines[0].startswith("deformer-stream: ")
    assert hint in ended.lines[0]


def ran(failing: Callable[[], object], monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    @click.command()
    @cli_utils.add_debug_option
    def run() -> object:
        return failing()

    monkeypatch.setattr(sys, "argv", ["it", *words])
    with pytest.raises(SystemExit) as end:
        cli_utils.run(run, "it")
    return end.value.code


def raising(error: BaseException) -> Callable[[], object]:
    def fail() -> object:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvariantViolated("a bug"), 1),
        (errors.ConfigError("a flag"), 2),
        (errors.InputError("a file"), 3),
        (errors.ArtifactError("a model"), 3),
        (errors.Unavailable("a broker"), 4),
        (KeyboardInterrupt(), 130),
        (RuntimeError("first\nsecond"), 1),
        (MemoryError(), 1),
        (FileNotFoundError(2, "gone", "x"), 1),
        (click.UsageError("wrong"), 2),
        (click.ClickException("wrong"), 2),
        (click.exceptions.Exit(7), 7),
    ],
)
@pytest.mark.parametrize("debug", [False, True])
def test_exit_codes(
    error: BaseException, code: int, debug: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(raising(error), monkeypatch, *["--debug"] * debug) == code
    out, err = capsys.readouterr()
    assert out == ""
    if isinstance(error, click.exceptions.Exit):
        assert err == ""
        return
    assert err.splitlines()[-1].startswith("it: ")
    assert ("Traceback" in err) == debug
    assert debug or len(err.splitlines()) == 1
    if code == 1 and not isinstance(error, errors.DeformerError):
        assert type(error).__name__ in err
        assert "bug" in err


@pytest.mark.parametrize(("result", "code"), [(None, 0), (0, 0), (130, 130), ("text", 0)])
def test_a_command_may_choose_its_code(result: object, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ran(lambda: result, monkeypatch) == code


def test_reader_that_goes_away(model_dir: Path) -> None:
    """`deformer-stream … | head`: no traceback, no complaint."""
    code = "from deformer_stream.cli.main import main; main()"
    words = [sys.executable, "-c", code, "inspect", str(model_dir), "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 0


def test_a_core_is_left_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    cli_utils.reserve_core()
    assert os.environ["OMP_NUM_THREADS"] == "7", "who has said so gets it"
    monkeypatch.delenv("OMP_NUM_THREADS")
    cli_utils.reserve_core()
    assert os.environ["OMP_NUM_THREADS"] == "3"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS")
    cli_utils.reserve_core()
    assert os.environ["OMP_NUM_THREADS"] == "1"
