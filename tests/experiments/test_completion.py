"""Joint draws have the distribution with which the model scores."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.schema import Feature, Schema
from experiments.completion import fill_missing
from tests.engine.random_models import make_model
from tests.models import draw_linear_records, make_small_model, train_linear_model
from trainer.fit import Interrupted


def binary_model(memory: str) -> DEformer:
    schema = Schema(tuple(Feature(f"b{i}", "discrete", labels=("0", "1"), unseen=1e-9) for i in range(3)))
    config = ModelConfig(d_model=16, layers=1, heads=2, feedforward=16, hidden=(16,), memory=memory)  # type: ignore[arg-type]
    return make_model(schema, config, 3, torch.float32)


def probabilities(model: DEformer, given: dict[int, int]) -> dict[tuple[int, ...], float]:
    """Return the probability of each record given some values, averaged over the orders that `fill_missing` uses."""
    known = list(given)
    rest = [i for i in range(3) if i not in given]
    result = {}
    for free in itertools.product([0, 1], repeat=len(rest)):
        values = given | dict(zip(rest, free, strict=True))
        record = tuple(values[i] for i in range(3))
        chances = []
        for before in itertools.permutations(known):
            for after in itertools.permutations(rest):
                order = [*before, *after]
                v = torch.tensor([[float(values[i]) for i in order]])
                log_p = model.log_prob(torch.tensor([order]), v)[0, len(known) :].sum()
                chances.append(log_p.exp().item())
        result[record] = float(np.mean(chances))
    return result


@pytest.mark.parametrize("memory", ["all", "values"])
@pytest.mark.parametrize("given", [{}, {1: 1}, {0: 1, 2: 0}])
def test_frequencies_of_draws_equal_probabilities(memory: str, given: dict[int, int]) -> None:
    model, n = binary_model(memory), 6000
    values = np.full((n, 3), np.nan)
    for code, value in given.items():
        values[:, code] = value
    drawn = fill_missing(model, values, 0)
    expected = probabilities(model, given)
    assert abs(sum(expected.values()) - 1) < 1e-5
    for record, p in expected.items():
        share = (drawn == record).all(1).mean()
        assert abs(share - p) < 4.5 * np.sqrt(p * (1 - p) / n) + 1e-3


def test_known_readings_stay_and_drawn_ones_fit_them() -> None:
    model = train_linear_model()
    truth = draw_linear_records(200, 7)
    values = truth.copy()
    values[:, 1:] = np.nan
    drawn = fill_missing(model, values, 1)
    np.testing.assert_array_equal(drawn[:, 0], truth[:, 0])
    inside = np.abs(truth[:, 0]) < 2
    assert np.median(np.abs(drawn[inside, 1] - (2 * truth[inside, 0] + 1))) < 0.5
    assert ((drawn[:, 2] > 0) == (truth[:, 0] > 0))[np.abs(truth[:, 0]) > 0.5].mean() > 0.9


def test_equal_seeds_give_equal_draws_and_complete_records_do_not_change() -> None:
    model = make_small_model()
    values = np.full((5, len(model.schema)), np.nan)
    np.testing.assert_array_equal(fill_missing(model, values, 3), fill_missing(model, values, 3))
    assert not np.array_equal(fill_missing(model, values, 3), fill_missing(model, values, 4))
    complete_records = fill_missing(model, values, 3)
    np.testing.assert_array_equal(fill_missing(model, complete_records, 9), complete_records)
    assert fill_missing(model, values[:0], 0).shape == (0, len(model.schema))


def test_unequal_numbers_of_missing_readings_and_stops() -> None:
    model = make_small_model()
    values = np.full((2, len(model.schema)), np.nan)
    values[0, 0] = 1.0
    with pytest.raises(ValueError, match="same number"):
        fill_missing(model, values, 0)
    with pytest.raises(Interrupted):
        fill_missing(model, values[1:], 0, should_stop=lambda: True)
