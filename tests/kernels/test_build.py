"""Compiled code is built once and cached, never loaded from a place where others can write, and optional."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

from deformer_stream import model_store
from deformer_stream.kernels import abi, build
from deformer_stream.model.deformer import ModelConfig
from tests.engine.random_models import make_model
from tests.models import SCHEMA, TRAINING_SUMMARY, make_calibration

WIDE = ModelConfig(d_model=64, layers=1, heads=4, feedforward=32, mixtures=2, embedding=4, hidden=(8,))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache directory, used in place of the user's and of what this process has loaded already."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "load_kernels", build.load_kernels.__wrapped__)
    return tmp_path / "cache" / "deformer-stream"


def write_compiler(folder: Path, script: str) -> str:
    """Write a shell script that stands in for the compiler, and return its path."""
    program = folder / "compiler"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


def read_log(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_library_is_compiled_once(cache: Path) -> None:
    assert isinstance(build.load_kernels(False), ctypes.CDLL)
    (library,) = cache.iterdir()
    compiled_at = library.stat().st_mtime_ns
    assert isinstance(build.load_kernels(False), ctypes.CDLL)
    assert [library] == list(cache.iterdir())
    assert library.stat().st_mtime_ns == compiled_at
    assert cache.stat().st_mode & 0o077 == 0


def test_no_compiler_means_no_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert build.load_kernels(True) is None
    assert not cache.exists()


@pytest.mark.parametrize("script", ["exit 1", '[ "$1" = --version ] && exit 0; echo "no such option" >&2; exit 1'])
def test_failing_compiler_means_no_library_and_is_logged(
    script: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", write_compiler(tmp_path, script))
    assert build.load_kernels(False) is None
    assert not list(cache.iterdir()), "no incomplete file is left"
    logged = read_log(capsys)
    assert "scoring runs without compiled code" in logged
    assert "no such option" in logged or script == "exit 1"


@pytest.mark.parametrize("command", ["{cc} -O2", "{wrapper} {cc}"])
def test_compiler_command_may_have_options_or_a_wrapper(
    command: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = write_compiler(tmp_path, 'exec "$@"')
    monkeypatch.setenv("CC", command.format(cc=shutil.which("cc"), wrapper=wrapper))
    assert isinstance(build.load_kernels(False), ctypes.CDLL)


@pytest.mark.parametrize(("name", "has_slow_dot"), [("AMD EPYC", False), ("Intel Xeon", True)])
def test_bfloat16_pairs_are_multiplied_only_on_processors_where_that_is_fast(
    name: str, has_slow_dot: bool, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": name, "avx512_bf16": True})
    monkeypatch.setattr(build, "build_library", lambda sources, consequence, *flags: flags)
    monkeypatch.setattr(abi, "find_differences", lambda library: [])
    assert build.load_kernels(True) == ("-DBFLOAT16_FACTORS", *["-DNO_BFLOAT16_DOT"] * has_slow_dot)
    assert build.load_kernels(False) == ()


def test_folder_that_others_can_write_is_refused(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The remedy must not be to change the mode, which would make a library that is there already trusted."""
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert build.load_kernels(False) is None
    logged = read_log(capsys)
    assert "delete the whole folder" in logged
    assert "chmod" not in logged


def test_library_that_others_can_write_is_built_again(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build.load_kernels(False) is not None
    (library,) = cache.iterdir()
    library.chmod(0o777)
    assert build.load_kernels(False) is not None
    assert "another user" in read_log(capsys)
    (library,) = cache.iterdir()
    assert library.stat().st_mode & 0o022 == 0


@pytest.mark.parametrize("kept_share", [0.0, 0.001, 0.5, 0.99])
def test_truncated_library_is_built_again(
    kept_share: float, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "answer.c").write_text("int answer(void) { return 42; }\n")
    assert build.build_library(sources, "") is not None
    (library,) = cache.iterdir()
    content = library.read_bytes()
    library.unlink()  # writing into the loaded file would change the code of this process
    library.write_bytes(content[: int(kept_share * len(content))])
    rebuilt = build.build_library(sources, "")
    assert rebuilt is not None
    assert rebuilt.answer() == 42
    assert "cached_library_rebuilt" in read_log(capsys)
    assert [path.read_bytes() for path in cache.iterdir()] == [content]


def test_user_without_home_directory_has_no_library_and_no_crash(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert build.load_kernels.__wrapped__(False) is None
    assert "XDG_CACHE_HOME" in read_log(capsys)


def test_library_with_other_structures_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(abi, "RUNNING_STATE_BYTES", 64)
    assert build.load_kernels(False) is None
    logged = read_log(capsys)
    assert "kernels_refused" in logged
    assert "RunningState" in logged


def test_model_that_is_read_gets_the_kernels_of_its_precision(tmp_path: Path) -> None:
    model = make_model(SCHEMA, WIDE, 0, torch.float32)
    model_store.write(tmp_path / "model", model, make_calibration(model), TRAINING_SUMMARY, "")
    assert model_store.read(tmp_path / "model").model.kernel_library is build.load_kernels(False)
    assert model_store.read(tmp_path / "model", compiled=False).model.kernel_library is None
