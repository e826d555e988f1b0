"""Compiled kernels are chosen by the processor, are never compiled at run time, and are optional."""

from __future__ import annotations

import ctypes
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deformer_stream import model_store
from deformer_stream.errors import ConfigError
from deformer_stream.kernels import abi, library
from deformer_stream.kernels.prefix_distances import get_distance_function
from deformer_stream.model.alert_distance import measure_distances
from deformer_stream.model.deformer import ModelConfig
from tests.engine.random_models import make_model
from tests.models import SCHEMA, TRAINING_SUMMARY, make_calibration

WIDE = ModelConfig(d_model=64, layers=1, heads=4, feedforward=32, mixtures=2, embedding=4, hidden=(8,))
SOURCES = Path(library.__file__).parent / "csrc"
X86 = ["avx512bf16", "avx512", "avx2", "sse4"]


class Processor:
    """A processor that can execute the given instruction sets, in place of that of this machine."""

    def __init__(self, instruction_sets: list[str], has_fast_dot: bool = False) -> None:
        self.instruction_sets, self.has_fast_dot = instruction_sets, has_fast_dot

    def can_execute(self, name: bytes) -> bool:
        return name.decode() in self.instruction_sets

    def has_fast_bfloat16_dot(self) -> bool:
        return self.has_fast_dot


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the libraries of an installation without any, and forget what has been loaded."""
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.setattr(library, "load_library", library.load_library.__wrapped__)
    monkeypatch.setattr(library, "_load_processor", library._load_processor.__wrapped__)
    monkeypatch.delenv(library.VARIABLE, raising=False)
    return tmp_path


def read_log(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_libraries_are_newer_than_their_sources() -> None:
    """Otherwise the other tests would pass or fail for the C code of yesterday."""
    built_at = (library.FOLDER / ".built").stat().st_mtime_ns
    sources = [SOURCES / "CMakeLists.txt", *SOURCES.glob("*.[ch]")]
    newer = [path.name for path in sources if path.stat().st_mtime_ns > built_at]
    assert not newer, "the sources have changed since the libraries were built: run `make kernels`"


def test_libraries_of_all_instruction_sets_are_built() -> None:
    names = {path.name for path in library.FOLDER.glob("*.so")}
    if os.uname().machine == "x86_64":
        assert names >= {f"float32-{name}.so" for name in X86[1:]} | {f"bfloat16-{name}.so" for name in X86[1:]}
    else:
        assert names >= {"float32-baseline.so", "bfloat16-baseline.so"}
    assert "processor.so" in names


def test_library_of_this_processor_is_loaded_once() -> None:
    loaded = library.load_library(False)
    assert isinstance(loaded, ctypes.CDLL)
    assert library.load_library(False) is loaded
    assert library.load_library(True) is not loaded


def test_features_of_the_processor_are_those_that_the_system_names() -> None:
    """The kernel of Linux reads them in its own way."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    features = set(next(line for line in lines if line.startswith(("flags", "Features"))).split())
    for name, feature in {"avx2": "avx2", "avx512": "avx512f", "avx512bf16": "avx512_bf16"}.items():
        assert library._load_processor().can_execute(name.encode()) == (feature in features)
    assert not library._load_processor().can_execute(b"no-such-set")


@pytest.mark.parametrize(
    ("instruction_sets", "has_fast_dot", "chosen_float32", "chosen_bfloat16"),
    [
        (X86, True, "avx512", "avx512bf16"),
        (X86, False, "avx512", "avx512"),
        (X86[1:], False, "avx512", "avx512"),
        (X86[2:], False, "avx2", "avx2"),
        (X86[3:], False, "sse4", "sse4"),
        ([], False, None, None),
    ],
)
def test_fastest_instruction_set_is_chosen(
    instruction_sets: list[str],
    has_fast_dot: bool,
    chosen_float32: str | None,
    chosen_bfloat16: str | None,
    empty_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processor = Processor(instruction_sets, has_fast_dot)
    monkeypatch.setattr(library, "_load_processor", lambda: processor)
    for name in X86:
        (empty_folder / f"bfloat16-{name}.so").touch()
        if name != "avx512bf16":
            (empty_folder / f"float32-{name}.so").touch()
    assert library.choose_instruction_set(False) == chosen_float32
    assert library.choose_instruction_set(True) == chosen_bfloat16


def test_variable_chooses_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    slowest = library.list_instruction_sets(False)[-1]
    monkeypatch.setenv(library.VARIABLE, slowest)
    loaded = library.load_library.__wrapped__(False)
    assert loaded is not None
    assert loaded._name == str(library.library_path(slowest, False))
    monkeypatch.setenv(library.VARIABLE, "mmx")
    with pytest.raises(ConfigError, match=f"DEFORMER_INSTRUCTION_SET names the instruction set 'mmx'.*{slowest}"):
        library.load_library.__wrapped__(False)


def test_installation_without_kernels_scores_without_them(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")  # no compiler could be found
    assert library.load_library(True) is None
    logged = read_log(capsys)
    assert "scoring runs without compiled code" in logged
    assert "no compiled kernels for this processor" in logged
    assert not list(empty_folder.iterdir())


def test_library_that_cannot_be_loaded_is_logged(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("processor.so", *(f"float32-{name}.so" for name in library.INSTRUCTION_SETS)):
        (empty_folder / name).write_bytes(b"not a library")
    assert library.load_library(False) is None
    assert "compiled_code_unavailable" in read_log(capsys)
    shutil.copy(Path(library.__file__).parent / "compiled" / "processor.so", empty_folder)
    assert library.load_library(False) is None
    assert "compiled_code_unavailable" in read_log(capsys)


def test_library_with_other_structures_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(abi, "RUNNING_STATE_BYTES", 64)
    assert library.load_library.__wrapped__(False) is None
    logged = read_log(capsys)
    assert "kernels_refused" in logged
    assert "RunningState" in logged
    assert "make kernels" in logged


def test_model_that_is_read_gets_the_kernels_of_its_precision(tmp_path: Path) -> None:
    model = make_model(SCHEMA, WIDE, 0, torch.float32)
    model_store.write(tmp_path / "model", model, make_calibration(model), TRAINING_SUMMARY, "")
    assert model_store.read(tmp_path / "model").model.kernel_library is library.load_library(False)
    assert model_store.read(tmp_path / "model", compiled=False).model.kernel_library is None


def test_model_in_bfloat16_needs_no_kernels_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instruction set that DEFORMER_INSTRUCTION_SET names, such as avx512bf16, may have none."""
    model = make_model(SCHEMA, replace(WIDE, alert_exemplars=5, precision="bfloat16"), 0, torch.float32)
    model_store.write(tmp_path / "model", model, make_calibration(model), TRAINING_SUMMARY, "")
    precisions: list[bool] = []

    def load_library(low_precision: bool) -> ctypes.CDLL | None:
        precisions.append(low_precision)
        return library.load_library(low_precision)

    monkeypatch.setattr(model_store, "load_library", load_library)
    scoring_model = model_store.read(tmp_path / "model").scoring_model
    assert precisions == [True]
    assert get_distance_function(scoring_model) is not measure_distances


def test_model_that_pytorch_scores_gets_the_kernels_for_its_distances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(SCHEMA, replace(WIDE, alert_exemplars=5), 0, torch.float32)
    model_store.write(tmp_path / "model", model, make_calibration(model), TRAINING_SUMMARY, "")
    with_kernels = model_store.read(tmp_path / "model").model
    assert (with_kernels.kernel_library, with_kernels.distance_library) == (library.load_library(False), None)
    assert get_distance_function(with_kernels) is not measure_distances
    monkeypatch.setattr(model_store, "is_supported", lambda _: False)
    with_torch = model_store.read(tmp_path / "model").model
    assert (with_torch.kernel_library, with_torch.distance_library) == (None, library.load_library(False))
    assert with_torch.extract_parameters().distance_library is with_torch.distance_library
    assert get_distance_function(with_torch) is not measure_distances
    without = model_store.read(tmp_path / "model", compiled=False).model
    assert without.distance_library is None
    assert get_distance_function(without) is measure_distances
