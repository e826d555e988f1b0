"""Shell completion: the scripts are printed, and a real bash completes commands, options, choices and files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.entry_points import HEAVY_PACKAGES, run_program

COMPLETE_IN_BASH = """
source "$SCRIPT"
COMP_WORDS=($WORDS)
COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
if [[ "$WORDS" == *' ' ]]; then COMP_WORDS+=(""); COMP_CWORD=$(( COMP_CWORD + 1 )); fi
compopt() { printf 'compopt %s %s\\n' "$@"; }
_$(tr - _ <<< "${COMP_WORDS[0]}")_completion "${COMP_WORDS[0]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the script of `deformer-stream completion bash` to a file, and return its path."""
    result = run_program("deformer-stream", ["completion", "bash"])
    assert (result.returncode, result.stderr) == (0, "")
    path = tmp_path_factory.mktemp("completion") / "script.bash"
    path.write_text(result.stdout)
    return path


def complete(script: Path, words: str) -> list[str]:
    """Return what bash offers after a command line; "compopt -o default" means names of files."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SCRIPT": str(script),
        "WORDS": words,
    }
    result = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE_IN_BASH], env=environment, capture_output=True, text=True, check=False
    )
    assert result.stderr == ""
    return result.stdout.split("\n")[:-1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("deformer-stream c", ["consume", "calibrate", "config", "completion"]),
        ("deformer-stream consume --ex", ["--explanations"]),
        ("deformer-stream consume --explanations ", ["full", "fast", "off"]),
        ("deformer-stream consume --from l", ["latest"]),
        ("deformer-stream consume --model mod", ["compopt -o default", ""]),
        ("deformer-stream replay pump", ["compopt -o default", ""]),
        ("deformer-stream completion ", ["bash", "zsh", "fish"]),
        ("deformer-replay --lay", ["--layout"]),
        ("deformer-train --ties h", ["hold"]),
        ("deformer-train norm", ["compopt -o default", ""]),
    ],
)
def test_bash_completes(script: Path, words: str, expected: list[str]) -> None:
    assert complete(script, words) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_names_every_program(shell: str, cli: Callable[..., SimpleNamespace]) -> None:
    result = cli("completion", shell)
    assert (result.code, result.err) == (0, "")
    for variable in ("_DEFORMER_STREAM_COMPLETE", "_DEFORMER_TRAIN_COMPLETE", "_DEFORMER_REPLAY_COMPLETE"):
        assert f"{variable}={shell}_complete" in result.out.replace("$", "")


def test_unknown_shell_is_a_usage_error(cli: Callable[..., SimpleNamespace]) -> None:
    result = cli("completion", "tcsh")
    assert result.code == 2
    assert "'bash', 'zsh', 'fish'" in result.err


def test_environment_variable_prints_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_DEFORMER_STREAM_COMPLETE", "bash_source")
    result = run_program("deformer-stream", [])
    assert (result.returncode, result.stderr) == (0, "")
    assert "complete -o nosort -F _deformer_stream_completion deformer-stream" in result.stdout


def test_completing_the_name_of_a_command_builds_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_DEFORMER_STREAM_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "deformer-stream rep")
    monkeypatch.setenv("COMP_CWORD", "1")
    result = run_program("deformer-stream", [], (*HEAVY_PACKAGES, "pydantic"))
    assert (result.returncode, result.stderr, result.stdout) == (0, "", "plain,replay\n")
