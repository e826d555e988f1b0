"""Scoring in random orders can be interrupted, and saved progress of another model is not used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.schema import Feature, Schema
from experiments import score
from experiments.experiment import make_prepared_table
from experiments.score import score_in_orders
from trainer.data import PreparedTable, Split
from trainer.fit import Interrupted

SCHEMA = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(3)))


def model_of(seed: int) -> DEformer:
    torch.manual_seed(seed)
    return DEformer(SCHEMA, ModelConfig(d_model=16, layers=1, heads=2, feedforward=16, mixtures=2, hidden=(16,)))


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> PreparedTable:
    monkeypatch.setattr(score, "READINGS_PER_PIECE", 12)  # four records a piece
    values = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
    return make_prepared_table(SCHEMA, values, np.full(10, Split.TEST, np.uint8))


def test_interrupted_scoring_gives_equal_results(data: PreparedTable, tmp_path: Path) -> None:
    model, rows = model_of(0), data.select_rows(Split.TEST)
    uninterrupted = score_in_orders(model, data, rows, 3, 5)
    cuts = 0
    while True:
        try:
            parts = score_in_orders(model, data, rows, 3, 5, tmp_path / "with_old_progress", should_stop=lambda: True)
            break
        except Interrupted:
            cuts += 1
    assert cuts == 9  # pieces of 4, 4 and 2 records in three orders
    np.testing.assert_array_equal(parts.nll, uninterrupted.nll)
    np.testing.assert_array_equal(parts.per_feature, uninterrupted.per_feature)
    assert np.isfinite(uninterrupted.nll).all()
    np.testing.assert_allclose(uninterrupted.per_feature.sum(1), uninterrupted.nll.mean(1), rtol=1e-6)
    assert (np.diff(uninterrupted.nll, axis=0) != 0).any(axis=1).all(), "different orders must give different results"


def test_progress_of_another_model_or_other_rows_is_not_used(data: PreparedTable, tmp_path: Path) -> None:
    rows = data.select_rows(Split.TEST)
    score_in_orders(model_of(0), data, rows, 2, 5, tmp_path)
    for model, some, orders, seed in [
        (model_of(1), rows, 2, 5),
        (model_of(0), rows[::-1], 2, 5),
        (model_of(0), rows, 2, 6),
    ]:
        with_old_progress = score_in_orders(model, data, some, orders, seed, tmp_path)
        np.testing.assert_array_equal(with_old_progress.nll, score_in_orders(model, data, some, orders, seed).nll)


def test_fewer_orders_are_the_first_ones_of_more(data: PreparedTable) -> None:
    model, rows = model_of(0), data.select_rows(Split.TEST)
    np.testing.assert_array_equal(
        score_in_orders(model, data, rows, 2, 5).nll, score_in_orders(model, data, rows, 4, 5).nll[:2]
    )
