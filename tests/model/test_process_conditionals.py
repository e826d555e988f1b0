"""Exact conditionals of the Gaussian process by one Cholesky factor, compared with those given all neighbors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deformer_stream.model.gaussian_process import GaussianProcessPrior
from deformer_stream.model.process_conditionals import ProcessContext, condition_in_order, is_exact, pad_context
from tests.model.test_irregular_readings import (
    SCHEMA,
    draw_contexts,
    make_config,
    make_irregular_model,
    randomize_process,
)


def make_process(num_neighbors: int = 20) -> GaussianProcessPrior:
    process = GaussianProcessPrior(SCHEMA, rank=2, num_scales=3, num_neighbors=num_neighbors)
    randomize_process(process, torch.Generator().manual_seed(2))
    return process


def assert_equal(actual: object, expected: object) -> None:
    for name in ("log_weights", "means", "scales", "has_prior"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_conditionals_in_order_are_those_given_all_neighbors(seed: int) -> None:
    process = make_process()
    codes, values, ages = draw_contexts(3, 15, seed)
    values[0, 4] = 40.0  # an outlier, which is clipped
    codes[1, 10:] = -1  # padding
    codes[2, 3] = -1
    assert is_exact(process, 15)
    assert not is_exact(process, 21)
    expected = process(codes, values, ages)
    actual = condition_in_order(process, codes, values, ages)
    is_present = codes >= 0
    assert_equal(actual[is_present], expected[is_present])
    assert expected.has_prior.any()
    assert not expected.has_prior.all()  # labels, cyclic values and padding


def test_targets_and_added_readings_have_the_conditionals_of_the_sequence() -> None:
    process = make_process()
    codes, values, ages = draw_contexts(4, 9, 7)
    expected = process(codes, values, ages)
    context = ProcessContext(process, *pad_context(codes[:, :6], values[:, :6], ages[:, :6], 3))
    rows = torch.arange(4)
    for k in range(6, 9):
        actual = context.condition(rows, codes[:, k], ages[:, k], torch.float64)
        assert_equal(actual, expected[:, k : k + 1])
        context.append(rows, torch.full((4,), k), codes[:, k], values[:, k], ages[:, k])
    # Contexts of different lengths: a target depends on its own context only.
    codes[0, 5:] = -1
    context = ProcessContext(process, codes, values, ages)
    target = torch.tensor([1, 1]), torch.tensor([500.0, 500.0], dtype=torch.float64)
    both = context.condition(torch.tensor([0, 3]), *target, torch.float64)
    for i, row in enumerate((0, 3)):
        present = codes[row] >= 0
        sequence = (
            torch.cat([tensor[row, present], last])[None]
            for tensor, last in (
                (codes, torch.tensor([1])),
                (values, torch.zeros(1, dtype=torch.float64)),
                (ages, torch.tensor([500.0], dtype=torch.float64)),
            )
        )
        assert_equal(both[i : i + 1], process(*sequence)[:, -1:])


def test_a_network_with_enough_neighbors_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distributions of the network are the same, whichever way the process is computed."""
    model = make_irregular_model(replace(make_config(), neighbors=30), 1)
    codes, values, ages = draw_contexts(2, 12, 3)
    with torch.inference_mode():
        exact = model.log_prob(codes, values, ages=ages)
        monkeypatch.setattr("deformer_stream.model.process_conditionals.is_exact", lambda *given: False)
        by_neighbors = model.log_prob(codes, values, ages=ages)
    torch.testing.assert_close(exact, by_neighbors, rtol=0, atol=1e-9)
