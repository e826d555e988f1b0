"""The objectives: random orders, and spans of corrupted readings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deformer_stream.model.config import ModelConfig
from deformer_stream.model.schema import Feature, Schema
from experiments.experiment import make_prepared_table
from experiments.reading_orders import (
    Objective,
    OrderedExamples,
    compute_log_p,
    draw_any_order,
    draw_spans,
    evaluate_any_order,
)
from experiments.synthesizer import create_model
from trainer.data import PreparedTable, Split
from trainer.sampling import create_generator

CONFIG = ModelConfig(d_model=16, layers=1, heads=2, feedforward=32, mixtures=3, hidden=(16,))


def make_data(num_records: int) -> PreparedTable:
    """Return records of four features, of which the second repeats the first."""
    values = np.random.default_rng(0).normal(size=(num_records, 4)).astype(np.float32)
    values[:, 1] = values[:, 0]
    schema = Schema(tuple(Feature(f"f{i}", "continuous") for i in range(4)))
    return make_prepared_table(schema, values, np.full(num_records, Split.TRAIN, np.uint8))


def test_any_order_is_a_permutation_and_predicts_all() -> None:
    is_earlier, is_predicted = draw_any_order(7, create_generator(0))
    assert sorted(is_earlier.sum(1).tolist()) == list(range(7))
    assert is_predicted.all()


@pytest.mark.parametrize("num_features", [1, 2, 6, 16, 40, 100])
def test_spans_are_apart_and_have_the_stated_share(num_features: int) -> None:
    first_or_last = 0
    for seed in range(50):
        is_earlier, is_corrupted = draw_spans(num_features, create_generator(seed))
        num_corrupted = int(is_corrupted.sum())
        assert num_corrupted == max(1, round(0.15 * num_features))
        begins = is_corrupted & ~torch.cat([torch.tensor([False]), is_corrupted[:-1]])
        assert int(begins.sum()) == max(1, round(num_corrupted / 3))
        first_or_last += int(is_corrupted[0] | is_corrupted[-1])
        visible = (~is_corrupted).nonzero().ravel().tolist()
        for k in range(num_features):
            corrupted_before = [j for j in range(k) if is_corrupted[j]] if is_corrupted[k] else []
            expected = sorted({*visible, *corrupted_before} - {k})
            assert is_earlier[k].nonzero().ravel().tolist() == expected
    assert first_or_last  # the ends can be corrupted


@pytest.mark.parametrize("objective", ["any order", "span corruption"])
def test_loss_is_the_mean_over_predicted_readings(objective: Objective) -> None:
    torch.manual_seed(0)
    data = make_data(6)
    examples, model = OrderedExamples(data, objective), create_model(data.schema, CONFIG, is_synthesizer=False)
    batch = examples.draw(examples.train_indexes, create_generator(1))
    values, is_earlier, is_predicted = batch
    expected = -compute_log_p(model, values, is_earlier)[:, is_predicted].mean()
    parts = [examples.compute_loss(model, batch, part, False) for part in (slice(0, 4), slice(4, 6))]
    torch.testing.assert_close(parts[0] + parts[1], expected)


def test_evaluation_in_the_order_of_the_schema_agrees_with_the_density() -> None:
    torch.manual_seed(0)
    data = make_data(5)
    model = create_model(data.schema, CONFIG, is_synthesizer=False).eval()
    rows = np.arange(5)
    first, second = (evaluate_any_order(model, data, rows, [seed]) for seed in (0, 1))
    np.testing.assert_allclose(evaluate_any_order(model, data, rows, [0, 1]), (first + second) / 2)
    values = torch.from_numpy(data.values)
    in_order = torch.ones(4, 4, dtype=torch.bool).tril(-1)
    torch.testing.assert_close(
        compute_log_p(model, values, in_order), model.log_prob(torch.arange(4).expand(5, -1), values)
    )
