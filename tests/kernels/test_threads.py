"""The kernels compute the same on threads of OpenMP and of Python, and on as many as the user asks for."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from deformer_stream.kernels import threads
from deformer_stream.kernels.cpu import CpuKernels, RaggedBatch
from deformer_stream.kernels.library import load_library
from deformer_stream.model.deformer import ModelConfig
from deformer_stream.model.schema import Feature, Schema
from tests.engine.random_models import make_model

SCHEMA = Schema(tuple(Feature(f"x{i}", "continuous") for i in range(6)))
NUM_RECORDS = 200


def score() -> Any:
    config = ModelConfig(d_model=64, layers=1, heads=4, feedforward=32, mixtures=2, embedding=4, hidden=(8,))
    library = load_library(False)
    assert library is not None, "the tests of the kernels need compiled code"
    kernels = CpuKernels(make_model(SCHEMA, config, 0, torch.float32), library)
    cache, pages = kernels.create_cache_of_records(NUM_RECORDS, 6)
    values = np.random.default_rng(0).normal(size=6 * NUM_RECORDS).astype(np.float32)
    offsets = 6 * np.arange(NUM_RECORDS + 1)
    batch = RaggedBatch(np.tile(np.arange(6), NUM_RECORDS), values, offsets, np.zeros(NUM_RECORDS, np.int64), pages)
    return kernels.score(cache, batch)


def test_python_threads_compute_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = score()
    used: list[int] = []
    run_on_python_threads = threads._run_on_python_threads

    def run(library: Any, team: Any, num_threads: int) -> None:
        used.append(num_threads)
        run_on_python_threads(library, team, num_threads)

    monkeypatch.setattr(threads, "get_num_threads", lambda: 3)
    monkeypatch.setattr(threads, "_openmp_runner", lambda: None)
    monkeypatch.setattr(threads, "_run_on_python_threads", run)
    assert np.array_equal(score(), expected)
    assert used == [3]
    # The pool starts its second thread only if the first one is still busy when the second call is submitted.
    assert sum(thread.name.startswith("kernels") for thread in threading.enumerate()) in (1, 2)


def test_errors_of_threads_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(library: Any, team: Any, num_threads: int) -> None:
        team.failed = 1  # as C code does if it cannot allocate memory

    monkeypatch.setattr(threads, "get_num_threads", lambda: 3)
    monkeypatch.setattr(threads, "_openmp_runner", lambda: None)
    monkeypatch.setattr(threads, "_run_on_python_threads", fail)
    with pytest.raises(MemoryError, match="could not allocate memory for the intermediate results of the C function"):
        score()


def test_pytorch_decides_the_number_of_threads_if_it_is_loaded() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    assert threads.get_num_threads() == before + 1
    torch.set_num_threads(before)
    assert threads.get_num_threads() == before


@pytest.mark.parametrize(("variable", "expected"), [("3", 3), ("2,4", 2), ("0", None), ("many", None), ("", None)])
def test_number_of_threads_without_pytorch(
    variable: str, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    threads._get_default_number.cache_clear()
    number = threads.get_num_threads()
    threads._get_default_number.cache_clear()
    assert number == (len(os.sched_getaffinity(0)) if expected is None else expected)
