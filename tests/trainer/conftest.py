"""Fixtures that the trainer's tests share."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

Run = Callable[..., SimpleNamespace]


@pytest.fixture
def deformer_train(cli: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs `deformer-train` in this process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return lambda *arguments: cli(*arguments, program="deformer-train")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)
