"""Several processes, or accumulated gradients, give the same steps as one process with a larger batch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deformer_stream import model_store
from deformer_stream.model.deformer import DEformer, ModelConfig
from tests.conftest import find_free_port
from tests.trainer.tables import mixed, prepared, write
from trainer.budget import TimeBudget
from trainer.data import PreparedTable
from trainer.distributed import Ranks
from trainer.fit import Recipe, TrainingRun

SMALL = ModelConfig(d_model=16, layers=1, heads=2, feedforward=32, mixtures=4, hidden=(16,))
RECIPE = Recipe(batch=32, learning_rate=3e-3, epochs=2, training_precision="float32")
CONFIG = "d_model = 16\nlayers = 1\nheads = 2\nfeedforward = 32\nmixtures = 4\nhidden = [16]\nexemplars = 0\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedTable:
    return prepared(tmp_path_factory.mktemp("table"), mixed(np.random.default_rng(3), 400))


def trained(data: PreparedTable, folder: Path, recipe: Recipe) -> torch.Tensor:
    """Train a model and return its log-likelihoods of some records.

    Weights are not compared, because Adam amplifies rounding errors of gradients that are zero in theory.
    """
    torch.manual_seed(0)
    fit = TrainingRun(data, DEformer(data.schema, SMALL), recipe, 0, folder, TimeBudget(), {})
    return score_records(fit.run().model)


@torch.no_grad()
def score_records(model: DEformer) -> torch.Tensor:
    values = torch.linspace(-1.5, 1.5, 40).view(10, 4)
    return model.log_prob(torch.arange(4).repeat(10, 1), values)


def test_accumulation_equals_a_larger_batch(data: PreparedTable, tmp_path: Path) -> None:
    whole = trained(data, tmp_path, RECIPE)
    pieces = trained(data, tmp_path, replace(RECIPE, batch=8, accumulate=4))
    other = trained(data, tmp_path, replace(RECIPE, batch=16))
    torch.testing.assert_close(pieces, whole, atol=1e-3, rtol=1e-3)
    assert not torch.allclose(other, whole, atol=1e-2, rtol=1e-2)


def test_bfloat16_training_gives_nearly_the_same_model(data: PreparedTable, tmp_path: Path) -> None:
    whole = trained(data, tmp_path, RECIPE)
    rough = trained(data, tmp_path, replace(RECIPE, training_precision="bfloat16"))
    assert not torch.equal(rough, whole)
    torch.testing.assert_close(rough, whole, atol=0.05, rtol=0.05)


@pytest.mark.parametrize(("records", "size", "pieces"), [(128, 2, 1), (10, 3, 2), (3, 2, 4)])
def test_slices_of_all_processes_cover_the_batch_once(records: int, size: int, pieces: int) -> None:
    parts = [part for rank in range(size) for part in Ranks(rank, size).select_slices(records, pieces)]
    assert [i for part in parts for i in range(records)[part]] == list(range(records))


def run(table: Path, out: Path, *options: str, processes: int) -> torch.Tensor:
    """Run the command with several processes, as torchrun does, and return the model's log-likelihoods."""
    command = [sys.executable, "-m", "trainer.cli", str(table), "--out", str(out), *options]
    shared = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    shared |= {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    started = [
        subprocess.Popen(
            command, env=shared | {"RANK": str(k), "LOCAL_RANK": str(k)}, stderr=subprocess.PIPE, text=True
        )
        for k in range(processes)
    ]
    for process in started:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    assert sorted(p.name for p in out.parent.iterdir() if p.name.startswith(out.name)) == [out.name]
    return score_records(model_store.read(out).model)


def test_two_processes_equal_one_with_a_doubled_batch(
    tmp_path: Path, cli: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The single process is this one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    table = write(tmp_path / "table.parquet", mixed(np.random.default_rng(4), 300))
    (tmp_path / "half.toml").write_text(CONFIG + "batch = 16\n")
    (tmp_path / "whole.toml").write_text(CONFIG + "batch = 32\n")
    options = ["--epochs", "2", "--training-precision", "float32", "--config"]
    two = run(table, tmp_path / "two", *options, str(tmp_path / "half.toml"), processes=2)
    one = tmp_path / "one"
    done = cli(table, "--out", one, *options, tmp_path / "whole.toml", program="deformer-train")
    assert done.code == 0, done.err
    torch.testing.assert_close(two, score_records(model_store.read(one).model), atol=1e-3, rtol=1e-3)
