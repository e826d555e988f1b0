"""A training job keeps to its time limit.

The clock of most tests counts computed conditionals and not seconds, so the load of the machine has no influence.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deformer_stream import model_store
from deformer_stream.calibration.calibration_scores import CalibrationScores
from deformer_stream.model.distributions import Head
from deformer_stream.settings.commands import ScoringSettings
from tests.trainer.tables import correlated, mixed, write
from trainer import calibrate, exemplars
from trainer.budget import (
    MIN_ALPHA,
    Phase,
    PhaseCosts,
    RecordCounts,
    TimeBudget,
    choose_batch_size,
    compute_min_counts,
    measure_seconds_per_record,
    plan_record_counts,
    read_process_age,
)
from trainer.job import train
from trainer.settings import TrainConfig

SMALL: dict[str, Any] = {"d_model": 16, "layers": 1, "heads": 2, "feedforward": 32, "mixtures": 4, "hidden": (16,)}
SECONDS_PER_CONDITIONAL = 1e-3


@pytest.fixture
def work_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that advances by a thousandth of a second for each conditional that is computed."""
    seconds = [0.0]

    def count_head(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, Head):
            seconds[0] += SECONDS_PER_CONDITIONAL * inputs[0].shape[:-1].numel()

    def count_kernels(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(kernels: Any, model: Any, features: np.ndarray[Any, Any], values: Any) -> Any:
            if kernels is not None:  # otherwise the head counts
                seconds[0] += SECONDS_PER_CONDITIONAL * features.size
            return function(kernels, model, features, values)

        return counted

    monkeypatch.setattr(calibrate, "compute_record_scores", count_kernels(calibrate.compute_record_scores))
    monkeypatch.setattr(exemplars, "sum_centered_nll", count_kernels(exemplars.sum_centered_nll))
    hook = torch.nn.modules.module.register_module_forward_hook(count_head)
    yield seconds
    hook.remove()


@pytest.mark.parametrize(("limit", "num_held_out"), [(60.0, 599), (25.0, None)])
def test_job_uses_its_time_limit_and_calibrates_on_enough_records(
    tmp_path: Path, work_clock: list[float], limit: float, num_held_out: int | None
) -> None:
    table = write(tmp_path / "table.parquet", mixed(np.random.default_rng(0), 3000))
    settings = TrainConfig(
        out=tmp_path / "model", max_time=f"{limit:.0f}s", batch=32, epochs=1000, patience=1000, **SMALL
    )
    messages: list[str] = []
    budget = TimeBudget(limit, lambda: work_clock[0])
    output = train([table], settings, budget=budget, on_message=messages.append)
    fixed_seconds = 2.1  # reserved for the report, which computes no conditional
    assert 0.9 * limit - fixed_seconds < work_clock[0] < 1.05 * limit
    used = model_store.read_manifest(tmp_path / "model")["training"]["records_used"]
    assert used["calibration"] == len(output.calibration.scores) == 599
    assert used["held_out"] == len(output.held_out.nll_by_record)
    assert (used["held_out"] == 599) is (num_held_out == 599)
    assert any(line.startswith("held-out figures: ") for line in messages)
    assert output.training_result.steps > 50


def test_job_without_time_trains_one_step_and_says_so(tmp_path: Path) -> None:
    table = write(tmp_path / "table.parquet", mixed(np.random.default_rng(0), 200))
    settings = TrainConfig(out=tmp_path / "model", max_time="5s", batch=32, epochs=1000, **SMALL)
    messages: list[str] = []
    output = train([table], settings, budget=TimeBudget(5.0, spent=6.0), on_message=messages.append)
    assert output.training_result.steps == 1
    assert any("next to no time to train (steps: 1)" in line for line in messages)
    assert any("--max-time 5s is too short" in line and "needs at least about" in line for line in messages)
    assert len(output.calibration.scores) == 39, "all that the table has, because 99 are the least"


@pytest.mark.long
@pytest.mark.parametrize("limit", [20.0])
def test_command_ends_within_its_time_limit(tmp_path: Path, limit: float, cli: Any) -> None:
    """A wide table, whose records are expensive. On a busy machine, the processor time is compared with the limit."""
    x = np.random.default_rng(0).normal(size=(2000, 100))
    table = write(tmp_path / "table.parquet", {f"x{i}": column for i, column in enumerate(x.T)})
    started, cpu_started = time.monotonic(), time.process_time()
    done = cli(table, "--out", tmp_path / "model", "--max-time", f"{limit:.0f}s", program="deformer-train")
    assert done.code == 0, done.err
    assert min(time.monotonic() - started, time.process_time() - cpu_started) < 1.1 * limit
    used = model_store.read_manifest(tmp_path / "model")["training"]["records_used"]
    assert f"{used['calibration']} " in done.out
    assert used["calibration"] >= 99, "alpha 1%, the default of the commands that score, is in reach"


COSTS = PhaseCosts(calibration=0.01, ranking=0.012, held_out=0.005, fixed=1.0)
ALL_RECORDS = RecordCounts(calibration=20_000, ranking=1000, held_out_passes=8000)


@pytest.mark.parametrize("seconds", [0.0, 1.0, 5.0, 10.5, 12.0, 50.0, 150.0, 1000.0])
def test_planned_phases_fit_into_their_time(seconds: float) -> None:
    counts = plan_record_counts(COSTS, seconds, ALL_RECORDS)
    minimum = compute_min_counts(ALL_RECORDS)
    assert counts.estimate_seconds(COSTS) <= max(seconds, minimum.estimate_seconds(COSTS)) + 1e-9
    for field in fields(RecordCounts):
        assert getattr(minimum, field.name) <= getattr(counts, field.name) <= getattr(ALL_RECORDS, field.name)
    if seconds >= 1000.0:
        assert counts == ALL_RECORDS


def test_least_calibration_brings_the_default_alpha_into_reach() -> None:
    minimum = compute_min_counts(ALL_RECORDS)
    assert minimum.calibration == 99
    assert plan_record_counts(COSTS, 0.0, ALL_RECORDS).calibration == 99
    assert compute_min_counts(replace(ALL_RECORDS, calibration=40)).calibration == 40
    assert ScoringSettings.model_fields["alpha"].default == MIN_ALPHA


def test_calibration_has_priority_until_the_smallest_alpha_is_reachable() -> None:
    before = plan_record_counts(COSTS, 9.0, ALL_RECORDS)
    assert 99 < before.calibration < 999
    assert before.ranking == compute_min_counts(ALL_RECORDS).ranking
    after = plan_record_counts(COSTS, 40.0, ALL_RECORDS)
    assert after.calibration >= 999
    assert after.ranking > before.ranking


def test_more_time_never_means_fewer_records() -> None:
    plans = [plan_record_counts(COSTS, seconds, ALL_RECORDS) for seconds in np.linspace(0.0, 300.0, 200)]
    for field in fields(RecordCounts):
        assert (np.diff([getattr(plan, field.name) for plan in plans]) >= 0).all()


def test_small_tables_use_all_their_records_at_no_cost() -> None:
    few = RecordCounts(calibration=15, ranking=5, held_out_passes=4)
    assert plan_record_counts(COSTS, 0.0, few) == few
    free = replace(COSTS, calibration=0.0, ranking=0.0, held_out=0.0)
    assert plan_record_counts(free, 0.0, ALL_RECORDS) == ALL_RECORDS


def test_phase_ends_at_its_deadline_but_not_before_its_minimum() -> None:
    now = [0.0]
    messages: list[str] = []
    phase = Phase("calibrating", 100, 19, deadline=10.0, clock=lambda: now[0], on_message=messages.append)
    assert phase.should_continue(50)
    now[0] = 11.0
    assert phase.should_continue(18)
    assert not phase.should_continue(19)
    assert messages == ["calibrating: 18 of 100 records"]


def test_budget_of_several_trainings_keeps_time_for_the_last_phases() -> None:
    now = [10.0]
    budget = TimeBudget(100.0, lambda: now[0])
    assert budget.create_equal_part(4, final_seconds=20.0).limit == pytest.approx(20.0)
    assert budget.create_equal_part(1) is budget
    assert TimeBudget().create_equal_part(3).limit is None
    now[0] = 200.0
    assert budget.create_equal_part(2).limit == 0.0
    assert budget.remaining == 0.0
    assert math.isinf(TimeBudget().remaining)


def test_cost_of_a_record_is_measured_on_few_records() -> None:
    now, sizes = [0.0], []

    def process(num_records: int) -> None:
        sizes.append(num_records)
        now[0] += 0.01 * num_records + (1.0 if len(sizes) == 1 else 0.0)  # the first call loads libraries

    assert measure_seconds_per_record(process, lambda: now[0], 1000) == pytest.approx(0.01)
    assert sizes == [1, 1, 4, 16]
    assert choose_batch_size(0.01, 256) == 50
    assert choose_batch_size(10.0, 256) == 1
    assert choose_batch_size(0.0, 256) == choose_batch_size(None, 256) == 256


def test_age_of_this_process_is_known() -> None:
    assert 0.0 < read_process_age() < 1e7


def test_default_hyperparameters_are_those_of_the_default_preset() -> None:
    from trainer.fit import Recipe
    from trainer.recipes import choose_recipe

    chosen = choose_recipe(TrainConfig(out=Path("model")), 10_000)
    default = Recipe(chosen.batch, chosen.learning_rate, chosen.epochs)
    assert chosen == default
    assert (default.optimizer, default.smoothing) == ("adamw", 0.02)
    assert choose_recipe(TrainConfig(out=Path("model"), preset="paper"), 10_000).smoothing == 0.0


def test_early_end_of_phases_leaves_a_usable_model(tmp_path: Path) -> None:
    """Scores, typical values and held-out figures cover the records that were processed."""
    from deformer_stream.model.deformer import DEformer, ModelConfig
    from tests.trainer.tables import prepared
    from trainer.calibrate import score_calibration_records
    from trainer.data import Split
    from trainer.evaluate import evaluate_held_out
    from trainer.exemplars import add_ranking

    x, _ = correlated(np.random.default_rng(1), 300)
    data = prepared(tmp_path, {f"x{i}": column for i, column in enumerate(x.T)})
    torch.manual_seed(0)
    model = DEformer(data.schema, ModelConfig(**SMALL)).eval()
    rows = data.select_rows(Split.CALIBRATION)
    every: CalibrationScores = score_calibration_records(model, data, rows, "schema", 0)
    some = score_calibration_records(
        model, data, rows, "schema", 0, batch_size=10, should_continue=lambda num_done: num_done < 20
    )
    np.testing.assert_allclose(some.statistics, every.statistics[:20], rtol=1e-5)
    held_out = evaluate_held_out(model, data, rows, 4, 0, should_continue=lambda num_passes: False)
    assert held_out.num_orders == 1
    expected = evaluate_held_out(model, data, rows, 1, 0)
    np.testing.assert_allclose(held_out.nll_by_record, expected.nll_by_record)
    add_ranking(model, data, 100, 0, 50, batch_size=10, should_continue=lambda num_done: num_done < 20)
    assert model.ranking is not None
    assert torch.isfinite(model.ranking.typical).all()


def test_calibration_keeps_a_limited_number_of_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.job.sample_rows", lambda rows, seed, max_rows=7: calibrate.sample_rows(rows, seed, 7))
    table = write(tmp_path / "table.parquet", {"x": np.random.default_rng(0).normal(size=200)})
    result = train([table], TrainConfig(out=tmp_path / "model", preset="tiny", epochs=1))
    assert len(result.calibration.scores) == result.summary["records_used"]["calibration"] == 7
