"""Tests of the training loop: learning, time limits, and bit-exact continuation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model.deformer import DEformer, ModelConfig
from tests.trainer.tables import correlated, entropy, mixed, prepared
from trainer import checkpoint
from trainer.budget import Costs, TimeBudget
from trainer.data import PreparedTable, Split
from trainer.evaluate import evaluate_held_out
from trainer.fit import Interrupted, Recipe, TrainingResult, TrainingRun, TrainingStatus, should_use_bfloat16
from trainer.sampling import Noise, create_generator, draw_random_keys, gather_values, order_readings
from trainer.settings import Optimizer

SMALL = ModelConfig(d_model=16, layers=1, heads=2, feedforward=32, mixtures=4, hidden=(16,), dropout=0.1)
WIDE = ModelConfig(d_model=64, layers=2, heads=2, feedforward=96, mixtures=4, hidden=(16,))
RECIPE = Recipe(batch=32, learning_rate=3e-3, epochs=4, smoothing=0.05)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedTable:
    return prepared(tmp_path_factory.mktemp("data"), mixed(np.random.default_rng(3), 300))


def start(
    data: PreparedTable,
    folder: Path,
    recipe: Recipe = RECIPE,
    budget: TimeBudget | None = None,
    config: ModelConfig = SMALL,
    **identity: Any,
) -> TrainingRun:
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    return TrainingRun(data, DEformer(data.schema, config), recipe, 0, folder, budget or TimeBudget(), identity)


def weights(fitted: TrainingResult) -> list[torch.Tensor]:
    return [p.detach() for p in fitted.model.parameters()]


def stopping_at(fit: TrainingRun, step: int) -> Callable[[], bool]:
    return lambda: fit.step >= step


@pytest.mark.parametrize(
    ("at", "config", "optimizer"),
    [(1, SMALL, "muon"), (7, SMALL, "muon"), (13, SMALL, "muon"), (5, WIDE, "muon"), (7, SMALL, "adamw")],
)
def test_resumed_run_equals_uninterrupted_run(
    data: PreparedTable, tmp_path: Path, at: int, config: ModelConfig, optimizer: Optimizer
) -> None:
    recipe = replace(RECIPE, optimizer=optimizer)
    whole = start(data, tmp_path / "whole", recipe, config=config).run()
    first = start(data, tmp_path / "parts", recipe, config=config)
    with pytest.raises(Interrupted):
        first.run(stopping_at(first, at))
    torch.rand(3)  # whatever else drew random numbers in between
    second = start(data, tmp_path / "parts", recipe, config=config)
    state = checkpoint.load_state(tmp_path / "parts")
    assert state is not None
    second.restore(state)
    assert second.step == at
    resumed = second.run()
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))
    for a, b in zip(whole.history, resumed.history, strict=True):
        assert {k: v for k, v in a.items() if k != "seconds"} == {k: v for k, v in b.items() if k != "seconds"}


def test_weights_depend_on_the_seed_alone(data: PreparedTable, tmp_path: Path) -> None:
    runs = [start(data, tmp_path).run() for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(weights(runs[0]), weights(runs[1]), strict=True))
    other = start(data, tmp_path)
    other.seed = 1
    assert any(not torch.equal(a, b) for a, b in zip(weights(runs[0]), weights(other.run()), strict=True))


def test_training_in_bfloat16_reaches_about_the_likelihood_of_float32(data: PreparedTable, tmp_path: Path) -> None:
    recipe = replace(RECIPE, training_precision="bfloat16", optimizer="adam")
    rough, exact = (
        start(data, tmp_path / name, r, config=WIDE)
        for name, r in (("a", recipe), ("b", replace(recipe, training_precision="float32")))
    )
    nll = [run.run().history[-1]["validation"] for run in (rough, exact)]
    assert nll[0] == pytest.approx(nll[1], abs=0.05)


@pytest.mark.parametrize(
    ("capabilities", "is_low"),
    [
        ({"cpu_name": "Intel Xeon", "avx512_f": True, "avx512_bf16": True, "amx_bf16": True}, True),
        ({"cpu_name": "Intel Xeon", "avx512_f": True, "avx512_bf16": True, "amx_bf16": False}, False),
        ({"cpu_name": "AMD EPYC", "avx512_f": True, "avx512_bf16": True}, False),
        ({"cpu_name": "AMD EPYC", "avx512_f": True}, False),
        ({}, False),
    ],
)
def test_automatic_precision_is_bfloat16_only_on_cpus_with_amx(
    capabilities: dict[str, Any], is_low: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    cpu = torch.device("cpu")
    assert should_use_bfloat16("auto", cpu) is is_low
    assert should_use_bfloat16("bfloat16", cpu)
    assert not should_use_bfloat16("float32", cpu)
    assert should_use_bfloat16("auto", torch.device("cuda"))


@pytest.mark.parametrize("optimizer", ["muon", "adamw", "adam"])
def test_each_optimizer_reduces_the_validation_loss(data: PreparedTable, tmp_path: Path, optimizer: Optimizer) -> None:
    run = start(data, tmp_path, replace(RECIPE, optimizer=optimizer, epochs=20))
    before = [parameter.detach().clone() for parameter in run.parameters]
    history = run.run().history
    assert history[-1]["validation"] < history[0]["validation"] - 0.3
    optimized = [p for optimizer in run.optimizers for group in optimizer.param_groups for p in group["params"]]
    assert sum(p.numel() for p in optimized) == sum(parameter.numel() for parameter in run.parameters)
    assert all(not torch.equal(old, new) for old, new in zip(before, run.parameters, strict=True))


def test_resume_rejects_other_data_or_options(data: PreparedTable, tmp_path: Path) -> None:
    first = start(data, tmp_path, learning_rate=1e-3)
    with pytest.raises(Interrupted):
        first.run(stopping_at(first, 2))
    state = checkpoint.load_state(tmp_path)
    assert state is not None
    with pytest.raises(ConfigError, match=r"learning_rate was 0\.001, now it is 0\.01"):
        start(data, tmp_path, learning_rate=1e-2).restore(state)


def test_resume_names_options_as_on_the_command_line(data: PreparedTable, tmp_path: Path) -> None:
    first = start(data, tmp_path, max_time=60.0)
    with pytest.raises(Interrupted):
        first.run(stopping_at(first, 2))
    state = checkpoint.load_state(tmp_path)
    assert state is not None
    with pytest.raises(ConfigError, match=r"--max-time was 1m, now it is 30s"):
        start(data, tmp_path, max_time=30.0).restore(state)
    with pytest.raises(ConfigError, match=r"--max-time was 1m, now it is none"):
        start(data, tmp_path, max_time=None).restore(state)


def test_damaged_checkpoint_is_rejected_by_name(data: PreparedTable, tmp_path: Path) -> None:
    first = start(data, tmp_path)
    with pytest.raises(Interrupted):
        first.run(stopping_at(first, 1))
    path = tmp_path / checkpoint.FILE_NAME
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InputError, match="delete"):
        checkpoint.load_state(tmp_path)


def test_training_ends_within_its_time_limit(data: PreparedTable, tmp_path: Path) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.01
        return now

    budget = TimeBudget(limit=20.0, clock=clock)
    fitted = start(data, tmp_path, replace(RECIPE, epochs=10_000, patience=10_000), budget).run(
        costs=Costs(after=5.0, record=1e-4)
    )
    assert 14.5 < now < 15.5
    assert not fitted.stopped_early
    assert 20 <= len(fitted.history) <= 32


@pytest.mark.parametrize(("first", "later"), [(15.0, 5.0), (5.0, 10.0)])
def test_time_for_training_follows_the_costs_that_are_measured_during_it(
    data: PreparedTable, tmp_path: Path, first: float, later: float
) -> None:
    """The reserve is too large or too small at first. The training ends when the time for the later work begins."""
    now = [0.0]
    budget = TimeBudget(limit=20.0, clock=lambda: now[0])
    fit = start(data, tmp_path, replace(RECIPE, epochs=10_000, patience=10_000), budget)
    measured_at: list[float] = []

    def measure_again(model: DEformer) -> Costs:
        measured_at.append(now[0])
        return Costs(after=later, record=0.0)

    def work(status: TrainingStatus) -> None:
        now[0] += 0.05

    result = fit.run(on_status=work, costs=Costs(first, 0.0), measure_again=measure_again)
    assert now[0] == pytest.approx(20.0 - later, abs=0.2)
    assert measured_at[0] == pytest.approx(0.5 * (20.0 - first), abs=0.2)
    assert len(measured_at) == 3
    assert result.steps > 100


def test_training_without_time_does_one_step(data: PreparedTable, tmp_path: Path) -> None:
    fitted = start(data, tmp_path, budget=TimeBudget(limit=5.0, spent=7.0)).run()
    assert fitted.steps == 1
    assert len(fitted.history) == 1


def test_training_stops_when_validation_no_longer_improves(data: PreparedTable, tmp_path: Path) -> None:
    fitted = start(data, tmp_path, replace(RECIPE, learning_rate=0.03, epochs=400, smoothing=0.0, patience=3)).run()
    assert fitted.stopped_early
    validation = [row["validation"] for row in fitted.history]
    assert validation.index(min(validation)) == len(validation) - 4


def test_diverging_training_is_reported(data: PreparedTable, tmp_path: Path) -> None:
    fit = start(data, tmp_path)
    with torch.no_grad():
        next(fit.model.parameters()).fill_(torch.nan)
    with pytest.raises(ConfigError, match="set a smaller learning_rate"):
        fit.run()


@pytest.mark.slow
def test_held_out_nll_approaches_the_entropy_of_a_gaussian(tmp_path: Path) -> None:
    x, covariance = correlated(np.random.default_rng(5), 8000)
    data = prepared(tmp_path, {f"x{i}": column for i, column in enumerate(x.T)})
    config = ModelConfig(d_model=32, layers=2, heads=2, feedforward=64, mixtures=4, hidden=(32,))
    torch.manual_seed(0)
    recipe = Recipe(batch=128, learning_rate=5e-3, epochs=6)
    fitted = TrainingRun(data, DEformer(data.schema, config), recipe, 0, tmp_path, TimeBudget(), {}).run()
    nll = evaluate_held_out(fitted.model, data, data.select_rows(Split.CALIBRATION), 4, 1).mean_nll
    truth = entropy(covariance, np.array([f.scale for f in data.schema.features]))
    untrained = entropy(np.eye(4), np.ones(4))
    assert truth - 0.06 < nll < truth + 0.12 < untrained - 1.0


def test_random_orders_are_complete_and_uniform() -> None:
    generator = create_generator(1, 2)
    values = torch.arange(4.0).repeat(6000, 1)
    features, order = order_readings(values, draw_random_keys(values.shape, generator))
    assert (features.sort(1).values == torch.arange(4)).all()
    counts = np.unique(features.numpy(), axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert counts.min() > 170  # 250 expected, four standard deviations below is 188
    assert torch.equal(gather_values(values, order), features.double().float())


def test_missing_readings_are_removed_from_orders() -> None:
    nan = torch.nan
    values = torch.tensor([[1.0, nan, 3.0, nan], [nan, nan, nan, 7.0]])
    features, order = order_readings(values, torch.tensor([[9.0, 1.0, 2.0, 3.0]] * 2))
    assert features.tolist() == [[2, 0], [3, -1]]
    assert gather_values(values, order).tolist() == [[3.0, 1.0], [7.0, 0.0]]
    empty, _ = order_readings(torch.full((2, 3), nan), torch.zeros(2, 3))
    assert empty.tolist() == [[-1], [-1]]


def test_noise_covers_one_quantum_of_gridded_readings(data: PreparedTable) -> None:
    noise = Noise.from_schema(data.schema, forget=0.2)
    values = torch.zeros(20_000, 4)
    values[0] = torch.nan
    noisy, hidden = noise.apply(values, create_generator(0))
    a, c, state = (data.schema.code_by_name[name] for name in ("a", "c", "state"))
    assert torch.equal(noisy[1:, a], values[1:, a])
    assert noisy[0].isnan().all()
    width = 0.1 / data.schema.features[c].scale
    assert float(noisy[1:, c].min()) == pytest.approx(-width / 2, rel=0.01)
    assert float(noisy[1:, c].max()) == pytest.approx(width / 2, rel=0.01)
    assert noisy[1:, state].unique().tolist() == [0.0, 3.0]
    assert float(hidden[1:, state].float().mean()) == pytest.approx(0.2, abs=0.02)
    assert not hidden[:, [a, c]].any()
    smooth, _ = Noise.from_schema(data.schema, smoothing=0.3).apply(values, create_generator(0))
    assert float(smooth[1:, a].std()) == pytest.approx(0.3, rel=0.05)
    assert (smooth[1:, state] == 0).all()
