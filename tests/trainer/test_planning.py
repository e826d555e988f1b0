"""The preset suits the table and the time, and a continued run keeps what the first one decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deformer_stream import model_store
from deformer_stream.errors import ConfigError
from tests.trainer.tables import correlated, write
from trainer import checkpoint, gaussian_prior, planning
from trainer.budget import (
    MIN_CLEAR_RATIO,
    StepCost,
    TimeBudget,
    measure_seconds_per_record,
    measure_step_cost,
)
from trainer.fit import Interrupted, Recipe, TrainingRun
from trainer.job import TrainingOutput, train
from trainer.planning import RunPlanner, create_first_part, estimate_least_seconds, reduce_batch
from trainer.recipes import MIN_STEPS_OF_LARGER_PRESET
from trainer.settings import TrainConfig


@pytest.fixture
def table(tmp_path: Path, rng: np.random.Generator) -> Path:
    x, _ = correlated(rng, 200)
    return write(tmp_path / "table.parquet", {f"x{i}": column for i, column in enumerate(x.T)})


@pytest.fixture
def step_seconds(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The seconds of a training step by preset, in place of measured ones. Tests may change them."""
    seconds_by_preset = {"tiny": 0.01, "small": 0.04}

    def measure_step(planner: RunPlanner, run: TrainingRun) -> StepCost:
        preset = "tiny" if run.model.config.layers == 2 else "small"
        return StepCost(0.0, seconds_by_preset[preset] / run.batch_size)

    monkeypatch.setattr(RunPlanner, "_measure_step", measure_step)
    return seconds_by_preset


def run_job(
    table: Path, out: Path, limit: float | None, messages: list[str] | None = None, **options: Any
) -> TrainingOutput:
    """Train with a clock that stands still, so that only the number of epochs ends the training."""
    defaults: dict[str, Any] = {"batch": 64, "gaussians": 1, "max_time": limit and f"{limit:g}s"}
    settings = TrainConfig(out=out, **(defaults | options))
    budget = TimeBudget(limit, lambda: 0.0)
    return train(
        [table], settings, budget=budget, on_message=(messages if messages is not None else list[str]()).append
    )


@pytest.mark.parametrize(
    ("limit", "seconds", "preset"), [(100.0, 0.04, "small"), (30.0, 0.04, "tiny"), (100.0, 0.08, "tiny")]
)
def test_auto_chooses_the_larger_preset_if_it_gets_enough_steps(
    tmp_path: Path,
    table: Path,
    step_seconds: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
    limit: float,
    seconds: float,
    preset: str,
) -> None:
    """55% of the time is for training: 100 s are 1,375 steps of 0.04 s, 30 s are 412, and 1,000 are needed."""
    monkeypatch.setattr(TrainingRun, "run", _run_one_step)
    step_seconds["small"] = seconds
    messages: list[str] = []
    output = run_job(table, tmp_path / "model", limit, messages)
    assert output.summary["preset"]["name"] == preset
    assert output.model.config.layers == (2 if preset == "tiny" else 4)
    assert output.summary["options"]["preset"] == "auto"
    if preset == "tiny":
        (line,) = (line for line in messages if line.startswith("preset tiny: "))
        assert f"at least {MIN_STEPS_OF_LARGER_PRESET}" in line
        assert output.summary["preset"]["reason"] in line


_run_to_the_end = TrainingRun.run


def _run_one_step(run: TrainingRun, *arguments: Any) -> Any:
    """Train for a single step, because these tests are about the preset."""
    run.steps = 1
    return _run_to_the_end(run, *arguments)


@pytest.mark.parametrize(
    ("limit", "options", "preset"),
    [(None, {}, "small"), (5.0, {"preset": "base"}, "base"), (5.0, {"d_model": 16, "heads": 2}, "small")],
)
def test_auto_is_small_without_a_limit_and_if_the_user_chose_the_size(
    tmp_path: Path,
    table: Path,
    step_seconds: dict[str, float],
    limit: float | None,
    options: dict[str, Any],
    preset: str,
) -> None:
    output = run_job(table, tmp_path / "model", limit, epochs=1, **options)
    assert output.summary["preset"]["name"] == preset
    assert model_store.read_manifest(tmp_path / "model")["training"]["preset"] == output.summary["preset"]


def test_continued_run_keeps_its_preset(tmp_path: Path, table: Path, step_seconds: dict[str, float]) -> None:
    options: dict[str, Any] = {"max_time": "30s", "epochs": 1500, "batch": 64, "gaussians": 1}
    chosen = []
    for resume in (False, True):
        settings = TrainConfig(out=tmp_path / "model", resume=resume, **options)
        with pytest.raises(Interrupted):  # after one step
            train([table], settings, budget=TimeBudget(30.0, lambda: 0.0), should_stop=lambda: True)
        state = checkpoint.load_state(tmp_path / "model.training")
        assert state is not None
        chosen.append((state["identity"]["preset"], state["step"]))
        step_seconds["small"] = 0.001  # when the run is continued, there is time for the larger preset
    assert chosen == [("tiny", 1), ("tiny", 2)]


@pytest.mark.parametrize(("before", "now"), [(0, "auto"), (0.05, "auto"), ("auto", 0), (0.05, 0.06)])
def test_run_with_another_contamination_is_not_continued(
    tmp_path: Path, table: Path, before: float | str, now: float | str
) -> None:
    """Other records would be left out of training, and those of the Gaussian prior would not be."""
    options: dict[str, Any] = {"preset": "tiny", "epochs": 50, "batch": 64, "gaussians": 1}
    settings = TrainConfig(out=tmp_path / "model", contamination=before, **options)  # type: ignore[arg-type]
    with pytest.raises(Interrupted):  # after one step
        train([table], settings, should_stop=lambda: True)
    settings = TrainConfig(out=tmp_path / "model", contamination=now, resume=True, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="contamination was"):
        train([table], settings)


def test_folds_use_the_preset_of_the_first_model(
    tmp_path: Path, table: Path, step_seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingRun, "run", _run_one_step)
    sizes: list[int] = []
    created = planning.RunPlanner._create_run

    def create(planner: RunPlanner, *arguments: Any) -> TrainingRun:
        run = created(planner, *arguments)
        sizes.append(run.model.config.layers)
        return run

    monkeypatch.setattr(RunPlanner, "_create_run", create)
    output = run_job(table, tmp_path / "model", 100.0, folds=3)
    assert output.summary["preset"]["name"] == "tiny"  # a third of 100 s is too short for 1,000 steps of `small`
    assert sizes[-2:] == [2, 2]
    assert output.summary["records_used"]["calibration"] == output.summary["records_available"]["calibration"] == 200


def test_prior_is_fitted_to_few_records_if_time_is_short(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fitting takes 1 s for 500 records. 15% of 40 s are 6 s, of which 5 s are left after the first fit."""
    x, _ = correlated(rng, 4000)
    table = write(tmp_path / "table.parquet", {f"x{i}": column for i, column in enumerate(x.T)})
    now, sizes = [0.0], list[int]()
    fit_priors = gaussian_prior.fit_priors

    def fit(data: Any, max_components: int, seed: int, is_short: Any, max_rows: int) -> Any:
        now[0] += max_rows / 500.0
        sizes.append(max_rows)
        return fit_priors(data, max_components, seed, is_short, max_rows)

    monkeypatch.setattr(gaussian_prior, "fit_priors", fit)
    monkeypatch.setattr(TrainingRun, "run", _run_one_step)
    options: dict[str, Any] = {"max_time": "40s", "d_model": 16, "layers": 1, "heads": 2, "feedforward": 32}
    settings = TrainConfig(out=tmp_path / "model", **options)
    output = train([table], settings, budget=TimeBudget(40.0, lambda: now[0]))
    assert sizes == [500, 1250]
    assert output.summary["records_used"]["prior"] == 1250


def test_limit_below_the_least_is_reported_at_once(tmp_path: Path, table: Path) -> None:
    messages: list[str] = []
    options: dict[str, Any] = {"max_time": "1s"}
    settings = TrainConfig(out=tmp_path / "model", **options)
    output = train([table], settings, budget=TimeBudget(1.0, spent=3.0), on_message=messages.append)
    assert messages[0].startswith("--max-time 1s is too short: this machine needs at least about 8 s for any table")
    assert output.training_result.steps == 1
    assert output.summary["preset"]["name"] == "tiny"
    assert estimate_least_seconds(3.0) == pytest.approx(7.8)
    assert output.summary["records_used"]["train"] == 20
    assert "few_steps" in [warning["code"] for warning in output.summary["warnings"]]


def test_expensive_first_call_is_itself_the_measurement() -> None:
    now, sizes = [0.0], list[int]()

    def process(num_records: int) -> None:
        sizes.append(num_records)
        now[0] += 3.0

    assert measure_seconds_per_record(process, lambda: now[0], 100) == 3.0
    assert sizes == [1]


def _simulate_steps(fixed: float, per_record: float) -> tuple[Callable[[int], float], list[int]]:
    """Return a function that returns the seconds of a step, and the list of the numbers of records of its calls.

    The first step with a new number of records takes 60 ms longer, as in a real training.
    """
    sizes: list[int] = []

    def measure_step(num_records: int) -> float:
        is_new = num_records not in sizes
        sizes.append(num_records)
        return fixed + per_record * num_records + 0.06 * is_new

    return measure_step, sizes


@pytest.mark.parametrize(("fixed", "per_record"), [(0.015, 0.00055), (0.15, 0.0055), (0.0, 0.3)])
def test_time_that_each_step_takes_does_not_count_for_each_record(fixed: float, per_record: float) -> None:
    """The first two are a step of preset tiny for 13 features, and the same on a machine that is ten times slower."""
    measure_step, sizes = _simulate_steps(fixed, per_record)
    cost = measure_step_cost(measure_step, 256, remaining_seconds=50.0)
    assert cost.estimate_seconds(256) == pytest.approx(fixed + 256 * per_record)
    assert sum(fixed + per_record * size + 0.06 for size in sizes) < 10.0


@pytest.mark.parametrize("slowness", [1.0, 10.0])
def test_time_that_each_call_takes_does_not_count_for_each_record(slowness: float) -> None:
    """A call takes 5 ms, and 0.1 ms more for each record. On a slow machine a single record takes 51 ms."""
    now = [0.0]

    def process(num_records: int) -> None:
        now[0] += slowness * (0.005 + 0.0001 * num_records)

    seconds = measure_seconds_per_record(process, lambda: now[0], 1000, min_ratio=MIN_CLEAR_RATIO)
    assert seconds < 2 * slowness * 0.0001


@pytest.mark.parametrize("disturbed", [1, 2])
def test_one_disturbed_step_does_not_make_all_batches_look_equal(disturbed: int) -> None:
    """Another process takes the processor during one of the steps with a single record."""
    undisturbed, sizes = _simulate_steps(0.015, 0.00055)

    def measure_step(num_records: int) -> float:
        is_disturbed = num_records == 1 and sizes.count(1) == disturbed
        return undisturbed(num_records) + 0.3 * is_disturbed

    cost = measure_step_cost(measure_step, 256, remaining_seconds=50.0)
    assert cost.per_record == pytest.approx(0.00055)
    assert cost.fixed == pytest.approx(0.015)


def test_expensive_steps_are_measured_with_one_record() -> None:
    measure_step, sizes = _simulate_steps(0.0, 3.0)
    assert measure_step_cost(measure_step, 256, 50.0).estimate_seconds(10) == pytest.approx(30.6)
    assert sizes == [1]


@pytest.mark.parametrize(
    ("seconds", "fixed", "per_record", "batch"),
    [
        (40.0, 0.015, 0.0005, 256),  # 200 steps with 370 records
        (30.0, 0.015, 0.0005, 256),  # with 270
        (20.0, 0.015, 0.0005, 128),  # with 170
        (4.0, 0.015, 0.0005, 32),  # with 10: batches of fewer than 32 records are of no use
        (4.0, 0.5, 0.0005, 256),  # with none, and a step is hardly shorter with fewer records than 1,000
        (40.0, 0.0, 0.05, 32),  # with 4
        (10.0, 0.0, 0.05, 8),  # 20 steps with 10 records
        (0.0, 0.0, 0.05, 1),
    ],
)
def test_batch_is_reduced_for_enough_steps(seconds: float, fixed: float, per_record: float, batch: int) -> None:
    messages: list[str] = []
    recipe = Recipe(256, learning_rate=1e-3, epochs=1)
    assert reduce_batch(recipe, seconds, StepCost(fixed, per_record), "record", messages.append) == batch
    assert len(messages) == (batch < 256)
    assert reduce_batch(recipe, 2 * seconds, StepCost(fixed, per_record), "record", messages.append) >= batch
    halves = replace(recipe, accumulate=2)
    assert reduce_batch(halves, 2 * seconds, StepCost(fixed, per_record), "record", messages.append) == batch


def test_records_used_and_available_are_those_of_each_phase(
    tmp_path: Path, table: Path, step_seconds: dict[str, float]
) -> None:
    output = run_job(table, tmp_path / "model", None, epochs=1, batch=100, contamination=0.1, d_model=16, heads=2)
    used, available = output.summary["records_used"], output.summary["records_available"]
    assert used["train"] == 100 < available["train"]
    assert used["validation"] == available["validation"]
    assert used["calibration"] == len(output.calibration.scores) == 35
    assert used["calibration_trimmed"] == 4
    assert used["held_out"] == available["calibration"] == 39
    assert available["table"] == 200
    assert sum(output.summary["seconds_by_phase"].values()) <= output.summary["seconds"] + 0.1


def test_first_of_several_models_has_time_for_the_planning() -> None:
    """The report takes 3.4 s and 0.002 s for each feature, the planning 4 s, as the start; the rest is divided."""
    part = create_first_part(TimeBudget(100.0, lambda: 0.0), 5, start_seconds=4.0, num_features=10)
    assert part.limit == pytest.approx((100.0 - 3.42 - 4.0) / 5 + 4.0)
    unlimited = TimeBudget()
    assert create_first_part(unlimited, 5, start_seconds=4.0, num_features=10) is unlimited
