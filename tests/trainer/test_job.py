"""A whole run keeps to its time. The clock of these tests counts work (conditionals computed), so that how busy the
machine is decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deformer_stream.model.distributions import Head
from tests.trainer.tables import mixed, write
from trainer.budget import TimeBudget
from trainer.job import train
from trainer.settings import TrainConfig

SMALL: dict[str, Any] = {"d_model": 16, "layers": 1, "heads": 2, "feedforward": 32, "mixtures": 4, "hidden": (16,)}


@pytest.fixture
def work() -> Iterator[list[float]]:
    """Seconds, a thousandth for each conditional."""
    seconds = [0.0]

    def count(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, Head):
            seconds[0] += 1e-3 * inputs[0].shape[:-1].numel()

    hook = torch.nn.modules.module.register_module_forward_hook(count)
    yield seconds
    hook.remove()


@pytest.mark.parametrize(("limit", "all_calibrate"), [(60.0, True), (25.0, False)])
def test_a_run_takes_the_time_it_was_given(
    tmp_path: Path, work: list[float], limit: float, all_calibrate: bool
) -> None:
    table = write(tmp_path / "table.parquet", mixed(np.random.default_rng(0), 3000))
    settings = TrainConfig(
        out=tmp_path / "model", max_time=f"{limit:.0f}s", batch=32, epochs=1000, patience=1000, **SMALL
    )
    result = train([table], settings, budget=TimeBudget(limit, lambda: work[0]))
    assert 0.9 * limit - 1.0 < work[0] < 1.05 * limit
    assert (len(result.calibration.scores) == 600) is all_calibrate
    assert len(result.calibration.scores) >= 500
    assert result.training_result.steps > 50


def test_time_that_is_gone_at_once_still_makes_a_model_and_that_is_said(tmp_path: Path) -> None:
    table = write(tmp_path / "table.parquet", mixed(np.random.default_rng(0), 300))
    settings = TrainConfig(out=tmp_path / "model", max_time="5s", batch=32, epochs=1000, **SMALL)
    said: list[str] = []
    result = train([table], settings, budget=TimeBudget(5.0, spent=6.0), on_message=said.append)
    assert result.training_result.steps == 1
    assert any("next to no time to train (steps: 1)" in line for line in said)
