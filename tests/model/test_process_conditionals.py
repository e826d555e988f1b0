"""Exact conditionals of the Gaussian process by one Cholesky factor, compared with those given all neighbors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deformer_stream.kernels.cpu import is_supported
from deformer_stream.model.gaussian_process import GaussianProcessPrior
from deformer_stream.model.process_conditionals import (
    FIRST_CHECK,
    ProcessContext,
    condition_in_order,
    is_exact,
    pad_context,
    predict_from_others,
)
from tests.model.irregular_models import (
    SCHEMA,
    draw_contexts,
    log_prob_by_steps,
    make_config,
    make_irregular_model,
    randomize_process,
)

LIMIT = 3.0


def make_process(num_neighbors: int = 20, outlier_limit: float = 0.0) -> GaussianProcessPrior:
    process = GaussianProcessPrior(SCHEMA, 2, 3, num_neighbors, outlier_limit=outlier_limit)
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


def select(tensors: tuple[torch.Tensor, ...], kept: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor[:, kept] for tensor in tensors)


@pytest.mark.parametrize("seed", range(3))
def test_prediction_from_others_is_the_conditional_given_them(seed: int) -> None:
    process = make_process()
    readings = draw_contexts(2, 12, seed)
    readings[0][1, 8:] = -1
    actual = predict_from_others(process, *readings)
    for i in range(12):
        others = ProcessContext(process, *select(readings, torch.arange(12) != i))
        expected = others.condition(torch.arange(2), readings[0][:, i], readings[2][:, i], torch.float64)
        is_present = readings[0][:, i : i + 1] >= 0
        assert_equal(actual[:, i : i + 1][is_present], expected[is_present])


def test_limit_has_no_effect_without_outliers() -> None:
    codes, values, ages = draw_contexts(3, 40, 1)
    expected = condition_in_order(make_process(50), codes, values, ages)
    assert_equal(condition_in_order(make_process(50, 1000.0), codes, values, ages), expected)


def draw_smooth_context(num_readings: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a context of one sensor whose values are near its mean, one reading a minute."""
    codes = torch.zeros(1, num_readings, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    values = 0.1 * torch.randn(1, num_readings, generator=generator, dtype=torch.float64)
    return codes, values, 60.0 * torch.arange(num_readings, dtype=torch.float64)[None]


@pytest.mark.parametrize("place", [0, 9, 19])
def test_wrong_reading_of_a_context_hardly_changes_predictions(place: int) -> None:
    """It is recognised by the readings on both sides, wherever it is in the order of the context."""
    codes, values, ages = draw_smooth_context(20)
    target = torch.tensor([0]), codes[:, 0], ages[:, place] + 30.0

    def predict(outlier_limit: float, change: float) -> float:
        changed = values.clone()
        changed[0, place] += change
        context = ProcessContext(make_process(20, outlier_limit), codes, changed, ages)
        return float(context.condition(*target, torch.float64).means[0, 0, 0])

    shift = abs(predict(LIMIT, 8.0) - predict(LIMIT, 0.0))
    assert shift < 0.2 * abs(predict(0.0, 8.0) - predict(0.0, 0.0))


def test_outlier_has_the_distribution_of_any_reading_itself() -> None:
    """The additional noise is for the predictions of others; an outlier stays as improbable as it is."""
    codes, values, ages = draw_smooth_context(24)
    process = make_process(24, LIMIT)
    expected = condition_in_order(process, codes, values, ages)[:, :21]
    from_others = predict_from_others(process, codes, values, ages)
    values[0, 20] = 8.0
    assert_equal(condition_in_order(process, codes, values, ages)[:, :21], expected)
    assert_equal(predict_from_others(process, codes, values, ages)[:, 20], from_others[:, 20])


def test_added_reading_that_is_an_outlier_hardly_changes_predictions() -> None:
    codes, values, ages = draw_smooth_context(20)
    row, age = torch.tensor([0]), ages[:, -1] + 60.0
    means = []
    for outlier_limit in (LIMIT, 0.0):
        context = ProcessContext(make_process(21, outlier_limit), *pad_context(codes, values, ages, 1))
        before = context.condition(row, codes[:, 0], age + 60.0, torch.float64).means
        context.append(row, torch.tensor([20]), codes[:, 0], torch.tensor([8.0], dtype=torch.float64), age)
        after = context.condition(row, codes[:, 0], age + 60.0, torch.float64).means
        means.append(abs(float((after - before)[0, 0, 0])))
    assert means[0] < 0.2 * means[1]


def test_sums_of_steps_with_a_limit_for_outliers_equal_log_prob() -> None:
    """The conditionals of a sequence depend on earlier readings only, so that their product is a density."""
    config = replace(make_config(), neighbors=60, outlier_limit=1.0, context_block=50)
    model = make_irregular_model(config, 4)
    num_readings = 2 * FIRST_CHECK + 5
    codes, values, ages = draw_contexts(2, num_readings, 5)
    values[:, ::7] *= 6.0
    with torch.inference_mode():
        expected = model.log_prob(codes, values, ages=ages)
        for cuts in (list(range(1, num_readings)), [FIRST_CHECK - 1, 2 * FIRST_CHECK]):
            actual = log_prob_by_steps(model, codes, values, ages, cuts)
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)
        plain = make_irregular_model(replace(config, outlier_limit=0.0), 4)
        assert not torch.allclose(plain.log_prob(codes, values, ages=ages), expected)


def test_kernels_leave_a_limit_for_outliers_to_pytorch() -> None:
    config = replace(make_config(), d_model=64, feedforward=128, neighbors=32, context_block=20, context_recent=2)
    assert is_supported(make_irregular_model(config, 0).float())
    assert not is_supported(make_irregular_model(replace(config, outlier_limit=5.0), 0).float())


def test_padding_between_readings_moves_no_check() -> None:
    """New readings of a batch follow the padding of records that have fewer cached readings."""
    process = make_process(100, 1.0)
    codes, values, ages = draw_contexts(1, 40, 6)
    values[:, ::7] *= 6.0
    expected = condition_in_order(process, codes, values, ages)
    places = torch.cat([torch.arange(25), torch.arange(55, 70)])
    padded = [torch.full((1, 70), -1), torch.zeros(1, 70, dtype=torch.float64), torch.zeros(1, 70, dtype=torch.float64)]
    for tensor, own in zip(padded, (codes, values, ages), strict=True):
        tensor[:, places] = own
    assert_equal(condition_in_order(process, *padded)[:, places], expected)
