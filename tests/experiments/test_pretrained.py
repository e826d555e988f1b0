"""The pretrained model: normalised densities, invariances, its guide, synthetic tables, and training in parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.pretrained.network import InContextDensity
from experiments.pretrained.synthetic import (
    MAX_VALUE,
    change_marginal,
    draw_causal_model,
    draw_copula,
    draw_mixture,
    draw_regimes,
    draw_surface,
    draw_table,
)
from experiments.pretrained.training import Run, Task, TrainingSettings, draw_task, train

SETTINGS = TrainingSettings(seed=3, num_heads=2, width=16, warmup_steps=2)


@pytest.fixture(autouse=True)
def _use_one_thread() -> None:
    torch.set_num_threads(1)


def create_network(num_heads: int = 2) -> InContextDensity:
    """Return a network whose outputs are far from their initial values."""
    torch.manual_seed(1)
    network = InContextDensity(num_heads, width=16)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return network


def draw_small_task() -> Task:
    return draw_task(seed=5, number=2, difficulty=0.0, num_queries=6)


@torch.no_grad()
def test_density_of_each_position_integrates_to_one() -> None:
    network, task = create_network(), draw_small_task()
    num_features = task.rows.shape[1]
    index = task.context.support_index
    few = 40  # reference rows, so that the test is fast
    context = replace(
        task.context,
        references=task.context.references[:few],
        support_index=torch.where(index < few, index, -1),
    )
    prepared = network.prepare(context, task.support_order)
    order = task.order[:1]
    grid = torch.linspace(-15.0, 15.0, 1501)
    for position in (0, num_features // 2, num_features - 1):
        rows = task.rows[:1].repeat(len(grid), 1)
        rows[:, order[0, position]] = grid
        parts = [network.score(prepared, part, order.expand(len(part), -1))[0] for part in rows.split(50)]
        density = torch.cat(parts)[:, position].double().exp()
        assert torch.trapezoid(density, grid.double()).item() == pytest.approx(1.0, abs=2e-3)


@torch.no_grad()
def test_order_of_reference_rows_and_of_features_does_not_matter() -> None:
    network, task = create_network(), draw_small_task()
    expected, _ = network(task.context, task.rows, task.order, task.support_order)
    context = task.context
    shuffled = torch.randperm(len(context.references))
    position_by_row = torch.empty_like(shuffled)
    position_by_row[shuffled] = torch.arange(len(shuffled))
    index = torch.where(context.support_index >= 0, position_by_row[context.support_index.clamp(min=0)], -1)
    assert bool((context.support_index >= 0).any())
    other = replace(context, references=context.references[shuffled], support_index=index)
    actual, _ = network(other, task.rows, task.order, task.support_order)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    # The features in another order of the columns: the same values arrive in the same order.
    columns = torch.randperm(task.rows.shape[1])
    position_by_column = torch.empty_like(columns)
    position_by_column[columns] = torch.arange(len(columns))

    def permute_mixture(mixture):  # type: ignore[no-untyped-def]
        covariances = mixture.covariances[:, columns[:, None], columns]
        return replace(mixture, means=mixture.means[:, columns], covariances=covariances)

    other = replace(
        context,
        references=context.references[:, columns],
        quantum_widths=context.quantum_widths[columns],
        support=context.support[:, columns],
        mixture=permute_mixture(context.mixture),
        gaussian=permute_mixture(context.gaussian),
        mixture_without_fold=permute_mixture(context.mixture_without_fold),
        gaussian_without_fold=permute_mixture(context.gaussian_without_fold),
    )
    actual, _ = network(
        other, task.rows[:, columns], position_by_column[task.order], position_by_column[task.support_order]
    )
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_order_of_observed_features_does_not_change_what_the_components_see() -> None:
    """The last value's density depends on the set of earlier values, except by the gains of the record so far."""
    network, task = create_network(), draw_small_task()
    prepared = network.prepare(task.context, task.support_order)
    order = task.order[:1]
    num_features = order.shape[1]
    other = torch.cat([order[:, : num_features - 1].flip(1), order[:, num_features - 1 :]], 1)
    first = network._compute_components(prepared, task.rows[:1], order, is_in_fold=False)
    second = network._compute_components(prepared, task.rows[:1], other, is_in_fold=False)
    torch.testing.assert_close(first.log_densities[:, -1], second.log_densities[:, -1], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(first.inputs[:, -1], second.inputs[:, -1], rtol=2e-3, atol=2e-3)


@torch.no_grad()
def test_later_and_own_values_do_not_change_earlier_densities() -> None:
    network, task = create_network(), draw_small_task()
    num_features = task.rows.shape[1]
    expected, _ = network(task.context, task.rows, task.order, task.support_order)
    position = num_features // 2
    changed = task.rows.clone()
    changed.scatter_(1, task.order[:, position:], 3.0 * torch.randn(len(changed), num_features - position))
    actual, _ = network(task.context, changed, task.order, task.support_order)
    assert torch.equal(actual[:, :position], expected[:, :position])
    assert not torch.equal(actual, expected)


@torch.no_grad()
def test_closed_gate_gives_the_guide() -> None:
    network, task = create_network(), draw_small_task()
    network.gate_bias[1:] = -1e9
    log_density, log_guide = network(task.context, task.rows, task.order, task.support_order)
    torch.testing.assert_close(log_density, log_guide)
    # The sum over a record is the density of the whole record under the guide's mixture, in any order.
    mixture = task.context.mixture
    parts = [
        log_weight + torch.distributions.MultivariateNormal(mean, covariance).log_prob(task.rows.double())
        for log_weight, mean, covariance in zip(mixture.log_weights, mixture.means, mixture.covariances, strict=True)
    ]
    expected = torch.logsumexp(torch.stack(parts), 0)
    torch.testing.assert_close(log_density.double().sum(1), expected, rtol=1e-3, atol=1e-2)


@torch.no_grad()
def test_a_support_row_does_not_see_its_own_copy() -> None:
    network, task = create_network(), draw_small_task()
    inside = torch.nonzero(task.context.support_index >= 0).flatten()[:1]
    context = replace(
        task.context, support=task.context.support[inside], support_index=task.context.support_index[inside]
    )
    order = task.support_order[inside]
    prepared = network.prepare(context, order)
    expected = network._compute_components(prepared, context.support, order, is_in_fold=True).log_densities
    # The value of the copy among the reference rows has no influence.
    references = context.references.clone()
    references[context.support_index] = 50.0
    other = replace(prepared, context=replace(context, references=references))
    actual = network._compute_components(other, context.support, order, is_in_fold=True).log_densities
    kernels = slice(3, 3 + 2 * network.num_heads)
    torch.testing.assert_close(actual[..., kernels], expected[..., kernels], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("structure", [draw_mixture, draw_causal_model, draw_copula, draw_surface, draw_regimes])
def test_structures_are_finite(structure) -> None:  # type: ignore[no-untyped-def]
    for seed in range(5):
        x = structure(np.random.default_rng(seed), 100, 7)
        assert x.shape == (100, 7)
        assert np.isfinite(x).all()


def test_synthetic_tables_are_finite_and_reproducible() -> None:
    sizes = set()
    for number in range(20):
        table, again = draw_table(1, number, 1.0, 8), draw_table(1, number, 1.0, 8)
        assert np.array_equal(table.rows, again.rows)
        assert np.array_equal(table.held_out, again.held_out)
        assert np.isfinite(table.rows).all()
        assert np.isfinite(table.held_out).all()
        assert np.abs(table.rows).max() < MAX_VALUE + 0.1
        assert table.held_out.shape == (8, len(table.quantum_widths))
        sizes.add(table.rows.shape)
    assert len(sizes) == 20
    assert not np.array_equal(draw_table(2, 0, 1.0, 8).rows.mean(), draw_table(1, 0, 1.0, 8).rows.mean())


def test_changed_marginals_are_finite() -> None:
    x = np.random.default_rng(0).normal(size=500)
    for seed in range(30):
        assert np.isfinite(change_marginal(np.random.default_rng(seed), x)).all()


def test_a_few_steps_lower_the_loss_of_a_fixed_table() -> None:
    task = draw_small_task()
    torch.manual_seed(0)
    network = InContextDensity(num_heads=2, width=16)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    losses = []
    for _ in range(15):
        log_density, _ = network(task.context, task.rows, task.order, task.support_order)
        loss = -log_density.mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.01


def test_continued_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = Run(SETTINGS, tmp_path / "whole")
    train(whole, 4, lambda line: None)
    train(Run(SETTINGS, tmp_path / "parts"), 2, lambda line: None)
    continued = Run(SETTINGS, tmp_path / "parts")
    continued.restore()
    assert continued.step == 2
    train(continued, 4, lambda line: None)
    for name, value in whole.network.state_dict().items():
        assert torch.equal(value, continued.network.state_dict()[name])
        assert torch.equal(whole.average[name], continued.average[name])
    assert whole.gains == continued.gains


def test_stored_run_with_other_settings_is_refused(tmp_path: Path) -> None:
    train(Run(SETTINGS, tmp_path), 1, lambda line: None)
    with pytest.raises(ValueError, match="other settings"):
        Run(replace(SETTINGS, seed=4), tmp_path).restore()
