"""Blocks of irregular readings as examples: the objective, the orders, and the Gaussian process that is fitted."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deformer_stream.model.bounded_context import select_contexts
from deformer_stream.model.deformer import DEformer
from deformer_stream.model.gaussian_process import GaussianProcessPrior
from deformer_stream.model.process_conditionals import predict_from_others
from tests.trainer.irregular import CONFIG, divided, fleet, prepared_irregular
from trainer import gaussian_process
from trainer.data import Split
from trainer.examples import BlockExamples
from trainer.gaussian_process import compute_log_prob, draw_targets, find_targets, fit_process
from trainer.irregular_evaluation import draw_references, evaluate_blocks, predict_last_value, predict_marginal
from trainer.irregular_table import IrregularTable
from trainer.sampling import create_generator


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fit processes with a third of the usual rounds, which is enough for tables of tests."""
    monkeypatch.setattr(gaussian_process, "NUM_ROUNDS", 5)


@pytest.fixture
def table(tmp_path: Path) -> IrregularTable:
    return prepared_irregular(tmp_path, fleet(np.random.default_rng(0)))


def make_model(table: IrregularTable, examples: BlockExamples) -> DEformer:
    """Return a model in float64 with a fitted process, whose features have no resolution."""
    torch.manual_seed(0)
    model = DEformer(table.schema, CONFIG).double().eval()
    assert model.process is not None
    fit_process(model.process, examples, 0, seconds=0.5)
    return model


def test_mean_loss_over_all_blocks_is_the_nll_of_whole_records(tmp_path: Path, table: IrregularTable) -> None:
    examples = divided(tmp_path, table)
    model = make_model(table, examples)
    indexes = examples.train_indexes
    loss = 0.0
    for start in range(0, len(indexes), 13):  # batches of unequal size, weighted by their numbers of blocks
        batch = examples.draw(indexes[start : start + 13], create_generator(start))
        loss += float(examples.compute_loss(model, batch, slice(0, 13), False).detach()) * len(batch) / len(indexes)
    limit, nll, num_readings = examples.blocks.limit, 0.0, 0
    for record in table.select_rows(Split.TRAIN).tolist():
        own = slice(table.offsets[record], table.offsets[record + 1])
        codes = np.asarray(table.codes[own], np.int64)
        values, ages = np.asarray(table.values[own]), np.asarray(table.ages[own])
        for start in range(0, len(codes), limit.block):
            context, _ = select_contexts(codes[:start], np.array([0, start]), len(table.schema), limit.recent)
            chosen = np.concatenate([context, np.arange(start, min(start + limit.block, len(codes)))])
            c, v, a = (torch.from_numpy(array[chosen])[None] for array in (codes, values, ages))
            nll -= float(model.log_prob(c, v, ages=a)[0, len(context) :].sum().detach())
            num_readings += len(chosen) - len(context)
    assert loss == pytest.approx(nll / num_readings, abs=1e-6)
    assert examples.evaluate(model, indexes, 0, 32) == pytest.approx(loss, abs=1e-6)


def test_random_orders_keep_the_readings_and_the_weight_of_a_block(tmp_path: Path, table: IrregularTable) -> None:
    examples = divided(tmp_path, table, arrival_share=1e-12)
    indexes, blocks = examples.train_indexes, examples.blocks
    shuffled = examples.draw(indexes, create_generator(1))
    real = examples.gather(indexes, create_generator(1))
    num_contexts = set()
    for row, index in enumerate(indexes.tolist()):
        num_older = int(np.diff(blocks.context_offsets)[index])
        present = shuffled.readings[row] >= 0
        assert sorted(shuffled.readings[row][present]) == sorted(real.readings[row][present])
        assert (shuffled.readings[row][:num_older] == real.readings[row][:num_older]).all(), "older readings stay first"
        assert float(shuffled.weights[row].sum()) == pytest.approx(blocks.lengths[index])
        num_contexts.add(int((shuffled.weights[row].numpy()[present] == 0).sum()) - num_older)
        assert (real.weights[row] > 0).sum() == blocks.lengths[index]
    assert num_contexts == set(range(6)), "every number of context readings up to `recent`"
    assert (shuffled.readings != real.readings).any(1).mean() > 0.9
    again = examples.draw(indexes, create_generator(1))
    assert torch.equal(again.values, shuffled.values)


def test_examples_for_imputation_have_contexts_of_all_sizes(tmp_path: Path, table: IrregularTable) -> None:
    """Without real orders, the context may also be larger than `recent`, and no example has no target."""
    examples = divided(tmp_path, table, arrival_share=0.0)
    shares = []
    for seed in range(5):
        batch = examples.draw(examples.train_indexes, create_generator(seed))
        num_older = np.diff(examples.blocks.context_offsets)[examples.train_indexes]
        num_span = (batch.readings >= 0).sum(1) - num_older
        num_targets = (batch.weights.numpy() > 0).sum(1)
        assert (num_targets >= 0.1 * num_span).all()
        lengths = examples.blocks.lengths[examples.train_indexes]
        np.testing.assert_allclose(batch.weights.numpy().sum(1), lengths, rtol=1e-5)
        shares += (1 - num_targets / num_span)[num_span > 10].tolist()
    assert max(shares) > 0.8
    assert abs(np.mean(shares) - 0.42) < 0.05
    # The process is then fitted to the same orders, in which a reading has neighbors with later times.
    targets = draw_targets(GaussianProcessPrior(table.schema, 2, 3, 6), examples, 20, create_generator(3))
    is_later = targets.neighbors.is_neighbor & (targets.neighbors.ages > targets.ages.unsqueeze(1))
    assert is_later.double().mean() > 0.2


@pytest.mark.parametrize(("neighbors", "outlier_limit"), [(3, 0.0), (60, 0.0), (60, 3.0)])
def test_batches_contain_the_predictions_that_the_network_would_compute(
    tmp_path: Path, table: IrregularTable, neighbors: int, outlier_limit: float
) -> None:
    """The process of training examples is applied when they are drawn, with the same loss and the same gradients."""
    examples = divided(tmp_path, table, 5, 8, arrival_share=0.5)
    config = replace(CONFIG, neighbors=neighbors, outlier_limit=outlier_limit, context_recent=5, context_block=8)
    model = DEformer(table.schema, config)
    assert model.process is not None
    fit_process(model.process, examples, 0, seconds=0.1)
    own = examples.with_process(model.process)
    assert own.draws_ahead
    assert not examples.draws_ahead
    losses, gradients = [], []
    for source in (examples, own):
        batch = source.draw(source.train_indexes[:12], create_generator(5))
        assert (batch.prior is not None) == (source is own)
        model.zero_grad()
        loss = sum(source.compute_loss(model, batch, part, False) for part in (slice(5), slice(5, 12)))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(second, first)


def test_size_of_an_example_does_not_grow_with_the_record(tmp_path: Path) -> None:
    columns = fleet(np.random.default_rng(1), 25, 10)
    for t in range(5000):  # one record is very long
        for name, cell in zip(columns, ("long", "ab"[t % 2], str(t % 7 / 7), 1.6e9 + t), strict=True):
            columns[name].append(cell)
    examples = divided(tmp_path, prepared_irregular(tmp_path, columns))
    batch = examples.gather(np.arange(len(examples.blocks)), create_generator(0))
    assert len(examples.blocks) > 5000 / 8
    assert batch.features.shape[1] <= examples.blocks.limit.max_readings(3)


def test_process_predicts_held_out_readings_better_than_baselines(tmp_path: Path, table: IrregularTable) -> None:
    """The true noise of a and b is 0.1, and their process is smooth."""
    examples = divided(tmp_path, table, 16, 32)
    process = GaussianProcessPrior(table.schema, 2, 3, 6)
    losses: list[float] = []
    rounds = fit_process(process, examples, 0, on_progress=losses.append)
    assert rounds == gaussian_process.NUM_ROUNDS == len(losses)
    assert losses[-1] < losses[0]
    held_out = replace(table, split=np.where(table.split == Split.CALIBRATION, Split.TRAIN, Split.LEFT_OUT))
    others = BlockExamples(held_out, examples.blocks)  # its training blocks are those of calibration records
    with torch.no_grad():
        targets = draw_targets(process, others, 100, create_generator(3))
        nll = -float(compute_log_prob(process, targets).mean())
    references, readings = draw_references(examples, 0), draw_references(others, 0)
    readings = readings.select(~table.schema.is_discrete[readings.codes])
    marginal = predict_marginal(table.schema, references, readings)
    last_value = predict_last_value(table.schema, references, readings, marginal)
    assert nll < -last_value.mean() - 0.2 < -marginal.mean() - 0.4


def test_process_with_all_neighbors_is_fitted_to_complete_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: IrregularTable
) -> None:
    monkeypatch.setattr(gaussian_process, "choose_arrival_share", lambda examples: 1.0)
    monkeypatch.setattr(gaussian_process, "STEPS_PER_ROUND", 25)
    examples = divided(tmp_path, table, 5, 8)
    few, all_neighbors = (GaussianProcessPrior(table.schema, 2, 3, number) for number in (6, 100))
    losses: list[float] = []
    fit_process(all_neighbors, examples, 0, on_progress=losses.append)
    fit_process(few, examples, 0)
    assert losses[-1] < losses[0] - 0.2
    batch = examples.gather(examples.validation_indexes, create_generator(3))
    is_target = batch.weights > 0
    log_p = []
    for process in (few, all_neighbors):
        with torch.no_grad():
            targets = find_targets(process, batch.features, batch.values, batch.ages, is_target)
            log_p.append(float(compute_log_prob(process, targets).mean()))
    assert log_p[1] > log_p[0] - 0.05  # at least about as good


def test_process_for_imputation_is_fitted_to_predict_readings_from_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: IrregularTable
) -> None:
    monkeypatch.setattr(gaussian_process, "MAX_EXACT_ROUNDS", 6)
    monkeypatch.setattr(gaussian_process, "STEPS_PER_ROUND", 25)
    examples = divided(tmp_path, table, 0, 40, arrival_share=0.0)
    process = GaussianProcessPrior(table.schema, 2, 4, 100, outlier_limit=5.0)
    losses: list[float] = []
    assert fit_process(process, examples, 0, on_progress=losses.append) == 6
    times = table.schema.reading_times
    assert times is not None
    assert float(process.scales[0]) == pytest.approx(gaussian_process.SHORT_SCALE * times.resolution / 1e6)
    # Half of the readings of validation blocks are predicted from the others. The true noise of a and b is 0.1.
    batch = examples.gather(examples.validation_indexes, create_generator(3), arrival_share=0.0)
    chain = GaussianProcessPrior(table.schema, 2, 4, 100)
    monkeypatch.setattr(gaussian_process, "_fits_complete_examples", lambda *given: False)
    monkeypatch.setattr(chain, "num_neighbors", 6)
    fit_process(chain, examples, 0)
    chain.num_neighbors = 100
    errors = []
    for fitted in (process, chain):
        prior = predict_from_others(fitted, batch.features, batch.values.double(), batch.ages)
        error = (prior.means[..., 0] - batch.values).abs()
        errors.append(float(error[prior.has_prior].mean()))
    assert errors[0] < errors[1] + 0.005
    assert losses[-1] < losses[0]


def test_loss_of_several_threads_has_the_gradients_of_a_sum(tmp_path: Path, table: IrregularTable) -> None:
    examples = divided(tmp_path, table, 0, 40, arrival_share=0.0)
    process = GaussianProcessPrior(table.schema, 2, 4, 100, outlier_limit=5.0)
    batch = examples.gather(examples.train_indexes[:3], create_generator(3), arrival_share=0.0)
    results = []
    for num_threads in (0, 1, 3):
        parameters = {
            name: (buffer + 0.1).requires_grad_()
            for name, buffer in process.named_buffers()
            if buffer.is_floating_point()
        }
        for name, parameter in parameters.items():
            setattr(process, name, parameter.clone())

        def compute_block_loss(i: int) -> torch.Tensor:
            prior = predict_from_others(
                process, batch.features[i : i + 1], batch.values[i : i + 1].double(), batch.ages[i : i + 1]
            )
            has_prior = prior.has_prior.unsqueeze(-1)
            return torch.where(has_prior, prior.means.square() + prior.scales, 0.0).sum()

        losses = [functools.partial(compute_block_loss, i) for i in range(3)]
        if num_threads:
            with ThreadPoolExecutor(num_threads) as threads:
                total = gaussian_process._sum_in_threads(process, losses, threads)
        else:
            total = torch.stack([compute() for compute in losses]).sum()
        total.square().backward()
        gradients = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
        assert any(bool((gradient != 0).any()) for gradient in gradients)
        results.append((total.detach(), gradients))
        with torch.no_grad():
            for name, parameter in parameters.items():
                setattr(process, name, parameter.detach() - 0.1)
    (sum_alone, gradients_alone), (one_thread, gradients_one), (three_threads, gradients_three) = results
    torch.testing.assert_close(one_thread, sum_alone)
    torch.testing.assert_close(gradients_one, gradients_alone)
    assert torch.equal(three_threads, one_thread)
    assert all(torch.equal(a, b) for a, b in zip(gradients_three, gradients_one, strict=True))


@pytest.mark.parametrize(("problem", "failing_step"), [("gradient", 1), ("factor", 40), ("loss", 150)])
def test_fit_of_the_process_keeps_the_parameters_before_numerical_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: IrregularTable, problem: str, failing_step: int
) -> None:
    """The loss is spoilt after some steps. With 150, it is that after the last step of two rounds."""
    examples = divided(tmp_path, table)
    prepare_loss = gaussian_process._prepare_loss
    num_calls = 0

    def prepare_failing_loss(*arguments: Any) -> Callable[[], torch.Tensor]:
        compute_loss = prepare_loss(*arguments)
        assert compute_loss is not None

        def compute() -> torch.Tensor:
            nonlocal num_calls
            loss = compute_loss()
            num_calls += 1
            if num_calls <= failing_step:
                return loss
            if problem == "factor":
                torch.linalg.cholesky(-torch.eye(2))
            # The derivative of the square root of 0 is infinite, and that of the square is 0.
            return loss * math.nan if problem == "loss" else loss + (loss - loss.detach()).square().sqrt()

        return compute

    monkeypatch.setattr(gaussian_process, "NUM_ROUNDS", 2)
    monkeypatch.setattr(gaussian_process, "_prepare_loss", prepare_failing_loss)
    process = GaussianProcessPrior(table.schema, 2, 3, 3)
    messages: list[str] = []
    fit_process(process, examples, 0, clock=lambda: 0.0, on_message=messages.append)  # without messages about progress
    assert num_calls == failing_step + 1
    assert len(messages) == 1
    assert f"not finite after {failing_step} step" in messages[0]
    GaussianProcessPrior(table.schema, 2, 3, 3).load_state_dict(process.state_dict())  # refuses parameters out of range
    with torch.no_grad():
        targets = draw_targets(process, examples, 20, create_generator(3))
        assert torch.isfinite(compute_log_prob(process, targets)).all()


def test_fit_of_the_process_does_a_step_even_if_the_time_is_over(tmp_path: Path, table: IrregularTable) -> None:
    examples = divided(tmp_path, table)
    process = GaussianProcessPrior(table.schema, 2, 3, 3)
    times = iter(range(100))
    losses: list[float] = []
    assert fit_process(process, examples, 0, 0.5, lambda: float(next(times)), losses.append) == 1
    assert len(losses) == 1


def test_fit_of_the_process_reports_its_progress(tmp_path: Path, table: IrregularTable) -> None:
    """On a large table, the fit takes minutes, during which the user must see that it goes on."""
    times, messages = iter(range(0, 1000, 2)), []
    process = GaussianProcessPrior(table.schema, 2, 3, 3)
    fit_process(process, divided(tmp_path, table), 0, 20.0, lambda: float(next(times)), on_message=messages.append)
    shares = [re.fullmatch(r"fitting the Gaussian process prior: (\d+)% done, −ln p is \S+ nats", m) for m in messages]
    assert [match and int(match[1]) for match in shares] == [30, 60, 90]  # every third step, after 2 s each


def test_fit_of_the_process_is_reproducible_and_loads_into_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: IrregularTable
) -> None:
    examples = divided(tmp_path, table)
    first, second = (GaussianProcessPrior(table.schema, 2, 3, 3) for _ in range(2))
    monkeypatch.setattr(gaussian_process, "NUM_ROUNDS", 2)
    fit_process(first, examples, 7)
    fit_process(second, examples, 7)
    assert not list(first.parameters())  # training does not change what was fitted
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
        assert not tensor.requires_grad
    third = GaussianProcessPrior(table.schema, 2, 3, 3)
    third.load_state_dict(first.state_dict())  # refuses parameters that are out of range


def test_held_out_figures_are_those_of_the_same_readings(tmp_path: Path, table: IrregularTable) -> None:
    examples = divided(tmp_path, table)
    model = make_model(table, examples)
    blocks = examples.select(Split.CALIBRATION)
    held_out = evaluate_blocks(model, examples, blocks, 3, 16)
    assert held_out.mean_nll == pytest.approx(examples.evaluate(model, blocks, 3, 16), abs=1e-9)
    assert held_out.num_readings == examples.blocks.lengths[blocks].sum()
    assert held_out.num_records == (table.split == Split.CALIBRATION).sum()
    assert set(held_out.baselines) == {"marginal", "last_value", "process"}
    assert held_out.baselines["process"] < held_out.baselines["marginal"]
    sums = held_out.nll_by_feature * np.bincount(
        np.concatenate([table.codes[slice(*table.offsets[r : r + 2])] for r in table.select_rows(Split.CALIBRATION)])
    )
    assert sums.sum() / held_out.num_readings == pytest.approx(held_out.mean_nll)
    stopped = evaluate_blocks(model, examples, blocks, 3, 16, should_continue=lambda num_done: False)
    assert stopped.num_blocks == 16
