"""Compiled code is made once, found again, never loaded from where others could write, and done without if need be."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from deformer_stream import model_store
from deformer_stream.kernels import build
from deformer_stream.model.deformer import ModelConfig
from tests.engine.worlds import model_of
from tests.models import SCHEMA, TRAINING, calibration_of

WIDE = ModelConfig(d_model=64, layers=1, heads=4, feedforward=32, mixtures=2, embedding=4, hidden=(8,))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where compiled code is kept; what this process has loaded already is not asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "library", build.library.__wrapped__)
    return tmp_path / "cache" / "deformer-stream"


def stand_in(folder: Path, script: str) -> str:
    """A program that is called as the compiler."""
    program = folder / "compiler"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


def test_it_is_compiled_once(cache: Path) -> None:
    assert isinstance(build.library(False), ctypes.CDLL)
    (made,) = cache.iterdir()
    before = made.stat().st_mtime_ns
    assert isinstance(build.library(False), ctypes.CDLL)
    assert [made] == list(cache.iterdir())
    assert made.stat().st_mtime_ns == before
    assert cache.stat().st_mode & 0o077 == 0


def test_without_a_compiler_there_is_none(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert build.library(True) is None
    assert not cache.exists()


@pytest.mark.parametrize("script", ["exit 1", '[ "$1" = --version ] && exit 0; echo "no such option" >&2; exit 1'])
def test_a_compiler_that_fails_is_done_without_and_said(
    script: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", stand_in(tmp_path, script))
    assert build.library(False) is None
    assert not list(cache.iterdir()), "nothing half-made is left"
    captured = capsys.readouterr()
    said = captured.out + captured.err
    assert "scoring runs without compiled code" in said
    assert "no such option" in said or script == "exit 1"


@pytest.mark.parametrize(("name", "singly"), [("AMD EPYC", False), ("Intel Xeon", True)])
def test_pairs_are_multiplied_where_that_is_quick(
    name: str, singly: bool, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": name, "avx512_bf16": True})
    monkeypatch.setattr(build, "compiled", lambda sources, without, *flags: flags)
    assert build.library(True) == ("-DROUNDED", *["-DSINGLY"] * singly)
    assert build.library(False) == ()


def test_what_others_can_write_is_not_loaded(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert build.library(False) is None
    captured = capsys.readouterr()
    assert "chmod 700" in captured.out + captured.err


def test_a_model_that_is_read_has_it_where_it_fits(tmp_path: Path) -> None:
    model = model_of(SCHEMA, WIDE, 0, torch.float32)
    model_store.write(tmp_path / "model", model, calibration_of(model), TRAINING, "")
    assert model_store.read(tmp_path / "model").model.kernel_library is build.library(False)
    assert model_store.read(tmp_path / "model", compiled=False).model.kernel_library is None
