"""All commands: fast help, one line for an error, exit codes, and tracebacks only with `--debug`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from deformer_stream import cli_utils, errors
from deformer_stream.runtime import process
from tests.entry_points import ENTRY_POINT_BY_PROGRAM, HEAVY_PACKAGES, run_program


@pytest.mark.parametrize("program", ENTRY_POINT_BY_PROGRAM)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_imports_no_heavy_package(program: str, flag: str) -> None:
    result = run_program(program, [flag], HEAVY_PACKAGES)
    assert (result.returncode, result.stderr) == (0, "")
    assert "Usage:" in result.stdout
    assert program in result.stdout


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], [], ["nonsense"], ["config", "--help"], ["inspect", "--help"]]
)
def test_listing_commands_does_not_import_settings(words: list[str]) -> None:
    """The settings are only imported if the options of a command are needed."""
    result = run_program("deformer-stream", words, (*HEAVY_PACKAGES, "pydantic", "pydantic_settings"))
    assert result.returncode in (0, 2)


@pytest.mark.parametrize("name", ["consume", "replay", "produce", "impute", "sample", "inspect", "config", "demo"])
def test_every_command_has_help(name: str, cli: Callable[..., SimpleNamespace]) -> None:
    assert name in cli("--help").out
    result = cli(name, "--help")
    assert (result.code, result.err) == (0, "")
    assert f"deformer-stream {name}" in result.out
    assert "--debug" in result.out


@pytest.mark.parametrize("name", ["consume", "replay", "calibrate", "produce", "impute", "sample", "demo"])
def test_help_has_groups_of_options_and_examples(name: str, cli: Callable[..., SimpleNamespace]) -> None:
    text = cli(name, "--help").out
    groups, _, examples = text.partition("Examples:\n")
    headings = re.findall(r"^([A-Z][\w ]+):$", groups, re.MULTILINE)
    assert len(headings) > 1
    assert headings[-1] == "General"
    assert "Further options" not in headings, "every option has a heading in settings.option_groups"
    assert f"  deformer-stream {name} " in examples or f"| deformer-stream {name} " in examples


def test_help_of_consume_lists_related_options_together(cli: Callable[..., SimpleNamespace]) -> None:
    groups = re.split(r"^([A-Z][\w ]+):$", cli("consume", "--help").out, flags=re.MULTILINE)
    text_by_heading = dict(zip(groups[1::2], groups[2::2], strict=True))
    assert list(text_by_heading)[:3] == ["Input", "Model", "Alerts"]
    flags_by_heading = {
        heading: re.findall(r"^  (--[\w-]+)", text, re.MULTILINE) for heading, text in text_by_heading.items()
    }
    assert flags_by_heading["Input"][:2] == ["--topic", "--source"]
    assert flags_by_heading["Alerts"][0] == "--alpha"
    assert {"--bootstrap-servers", "--group"} <= set(flags_by_heading["Kafka"])
    assert all(flag.startswith(("--ssl", "--sasl", "--security")) for flag in flags_by_heading["Kafka security"])


def test_help_of_training_has_groups_of_options_and_examples() -> None:
    text = run_program("deformer-train", ["--help"]).stdout
    for heading in (
        "Model directory",
        "Time and size",
        "Normal records and names of faults",
        "Columns",
        "Windows",
        "Calibration",
    ):
        assert f"\n{heading}:\n" in text
    assert "Further options" not in text
    assert "Examples:\n  # " in text
    assert "  deformer-train normal.parquet --out model --max-time 10m\n" in text


@pytest.mark.parametrize("words", [["consume", "--help"], ["replay", "--help"], ["inspect", "--help"]])
def test_help_of_a_command_imports_no_heavy_package(words: list[str]) -> None:
    assert run_program("deformer-stream", words, HEAVY_PACKAGES).returncode == 0


def test_program_without_command_shows_help(cli: Callable[..., SimpleNamespace]) -> None:
    result = cli()
    assert (result.code, result.err) == (2, "")
    assert "consume" in result.out


def test_version_is_shown(cli: Callable[..., SimpleNamespace]) -> None:
    result = cli("--version")
    assert (result.code, result.out.split()[:1]) == (0, ["deformer-stream,"])


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
def test_usage_error_is_one_line_with_exit_code_2(
    words: list[str], hint: str, cli: Callable[..., SimpleNamespace]
) -> None:
    result = cli(*words)
    assert (result.code, result.out, len(result.lines)) == (2, "", 1)
    assert result.lines[0].startswith("deformer-stream: ")
    assert hint in result.lines[0]


def run_failing_command(failing: Callable[[], object], monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    @click.command()
    @cli_utils.add_debug_option
    def run() -> object:
        return failing()

    monkeypatch.setattr(sys, "argv", ["it", *words])
    with pytest.raises(SystemExit) as end:
        cli_utils.run(run, "it")
    return end.value.code


def make_raising_function(error: BaseException) -> Callable[[], object]:
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
def test_errors_have_exit_codes_and_one_line(
    error: BaseException, code: int, debug: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_failing_command(make_raising_function(error), monkeypatch, *["--debug"] * debug) == code
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
def test_command_can_return_an_exit_code(result: object, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_failing_command(lambda: result, monkeypatch) == code


def test_closed_output_pipe_is_no_error(model_dir: Path) -> None:
    """`deformer-stream … | head` ends without a traceback or an error message."""
    code = "from deformer_stream.cli.main import main; main()"
    words = [sys.executable, "-c", code, "inspect", str(model_dir), "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 0


def test_one_core_is_reserved_unless_the_user_sets_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    process.reserve_core()
    assert os.environ["OMP_NUM_THREADS"] == "7", "the value of the user must be kept"
    monkeypatch.delenv("OMP_NUM_THREADS")
    process.reserve_core()
    assert os.environ["OMP_NUM_THREADS"] == "3"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS")
    process.reserve_core()
    assert os.environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_repeated_signal_does_not_end_the_process(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """GNU `timeout` sends a signal to the process and to its group. A later one of a person has its default effect."""
    handlers = {other: signal.getsignal(other) for other in (signal.SIGINT, signal.SIGTERM)}
    now = [100.0]
    monkeypatch.setattr("deformer_stream.cli_utils.time.monotonic", lambda: now[0])
    try:
        stop = cli_utils.stop_on_signals()
        assert not stop.is_set()
        for now[0] in (100.0, 100.5):
            signal.raise_signal(number)
            assert stop.is_set()
        ended: list[int] = []
        monkeypatch.setattr("deformer_stream.cli_utils.signal.raise_signal", ended.append)
        now[0] = 101.5
        os.kill(os.getpid(), number)
        assert ended == [number]
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        for other, handler in handlers.items():
            signal.signal(other, handler)
